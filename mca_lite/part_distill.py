"""Distillation: DistillTrainer, as hooks of McaTrainer's loop, and the teacher's pass.

    _prepare_micro_batches  add a resident teacher's hidden states, or the rows of a cached teacher
    _loss_of_logits         logits of both models for a chunk -> divergence and cross entropy
    _post_compute_loss      their mix -> loss and 3 metrics

Letters: p the teacher's probabilities of the next token and q the student's, both with logits
divided by the temperature T; V token ids that both models have; k tokens in a cached row; n tokens
in a chunk.

    loss = (1 - w) T^2 D(p, q) + w cross entropy        w: ce_weight; T^2: Hinton et al., 2015
    forward_kl   D = sum p log(p / q)
    reverse_kl   D = sum q log(q / p)
    jsd          D = b sum p log(p / m) + (1 - b) sum q log(q / m),   m = b p + (1 - b) q
                 (Agarwal et al., On-Policy Distillation of Language Models, 2024)

If vocabulary sizes differ, models are compared on their common ids, over which p and q are
normalised. A cached row has the teacher's k likeliest of them; all other tokens count as one event,
so D compares k + 1 events with their probabilities at T. Up to the rounding of stored values, this
D is 0 where q is right about these tokens and about the others' total, never above D over V, and
equal to it for k = V. Without the extra event, or with p and q normalised over k tokens, the
minimum would be elsewhere: a student would learn to be too certain (Anshumann et al., Sparse Logit
Sampling, 2025).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Subset

from . import parallel
from .batch import Batch
from .ckpt_folder import CheckpointError
from .data_batches import Documents, Limits, Stream, View, documents_of
from .data_encode import hash_of
from .errors import expect, refuse
from .files import IGNORE_INDEX, cache_folder, resolve_folder
from .inputs import inputs_of
from .kernels import compiles
from .loss_tokens import Logits
from .model_config import load_tokenizer
from .part_distill_kernels import log_probs_of_events, losses_beside
from .part_scores import (
    ObjectiveConfig,
    RowStore,
    ScoredTrainer,
    identity_of_model,
    trained,
    trained_counts,
)
from .step import collecting, measure, scattered
from .tables import other_columns

# lower bound of stored log-probabilities, so that float16 has no -inf: 0 x inf would be NaN
LOWEST = float(np.finfo(np.float16).min)


@dataclass(kw_only=True)
class DistillConfig(ObjectiveConfig):
    """Settings of distillation. ConfigError for values that do not fit together.

    divergence: forward_kl, KL(teacher, student); reverse_kl, KL(student, teacher); or jsd, the
    Jensen-Shannon divergence. jsd_mix: the teacher's share in jsd's mixture.
    temperature: divides both models' logits. ce_weight: weight of cross entropy with the labels;
    the divergence has 1 - ce_weight.
    top_k: score the data once before training, and store this many likeliest tokens per trained
    token; None: the teacher stays in memory.
    cache: folder for the stored tokens. cache_dtype: of their log-probabilities, float32 or
    float16.
    teacher: the teacher's folder, whose files identify the cache; None: unknown, or the cache is
    only read.
    cache_dir: folder for the stored tokens if `cache` is None, and for file hashes; None becomes
    the package's cache folder.
    """

    divergence: str = "forward_kl"
    jsd_mix: float = 0.5
    temperature: float = 1.0
    ce_weight: float = 0.0
    top_k: int | None = None
    cache: str | None = None
    cache_dtype: str = "float32"
    teacher: str | None = None
    cache_dir: str | None = None
    stage: ClassVar[str] = "distill"

    def __post_init__(self) -> None:
        # DistillTrainer checks for a missing teacher, because it may be given a model
        self.take_keys(teacher_model_name_or_path=self.teacher or "given")
        self.cache_dir = str(cache_folder(self.cache_dir))


# -- divergences


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The summands p log(p / q) of KL(p, q), from log-probabilities."""
    return log_p.exp() * (log_p - log_q)


def divergence_terms(
    log_p: torch.Tensor, log_q: torch.Tensor, config: DistillConfig
) -> torch.Tensor:
    """The summands of the configured divergence between the teacher's and the student's
    distribution, from their log-probabilities log_p and log_q, in the same shape.
    """
    if config.divergence == "forward_kl":
        return _kl(log_p, log_q)
    if config.divergence == "reverse_kl":
        return _kl(log_q, log_p)
    b = config.jsd_mix
    log_m = torch.logaddexp(log_p + math.log(b), log_q + math.log1p(-b))
    return b * _kl(log_p, log_m) + (1 - b) * _kl(log_q, log_m)


def _without(logits: Logits, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of values [n, columns], which has a column for each of this rank's token ids, with
    -inf in the columns of `tokens` [n, k], global token ids."""
    column, here = logits.head.place(tokens)
    columns = values.shape[1]
    hidden = values.new_zeros(len(values), columns + 1, dtype=torch.bool)
    hidden.scatter_(1, column.where(here, columns), True)
    return values.masked_fill(hidden[:, :columns], float("-inf"))


def log_probs_of(logits: Logits, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities [n, k + 1] at the temperature: of the tokens [n, k], then of all other
    tokens of the vocabulary of `logits` together. If k is the whole vocabulary, no other tokens
    exist, and the result is [n, k]. Collective over the tensor-parallel group, whose ranks get the
    same result."""
    values = logits.values / temperature
    whole = logits.logsumexp(values)[:, None]
    log_q = logits.of_tokens(tokens, values) - whole
    if tokens.shape[1] == logits.head.vocab_size:
        return log_q
    rest = logits.logsumexp(_without(logits, tokens, values))[:, None] - whole
    return torch.cat([log_q, rest], 1)


def top_k_of(logits: Logits, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(the k likeliest tokens, int64 [n, k]; log-probabilities at the temperature, [n, k + 1], of
    these and then of all other tokens together). If k is the whole vocabulary, the last column is
    LOWEST. Collective over the tensor-parallel group, whose ranks get the same result.
    """
    first = logits.head.first
    values, columns = logits.values.topk(min(k, logits.head.columns), 1)
    missing = (0, k - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=float("-inf"))
    columns = torch.nn.functional.pad(columns + first, missing)
    group = logits.head.group
    if group is not None:
        values = parallel.whole(values, 1, group)
        columns = parallel.whole(columns, 1, group)
    tokens = columns.gather(1, values.topk(k, 1).indices)
    logps = log_probs_of(logits, tokens, temperature)
    missing = (0, k + 1 - logps.shape[1])
    return tokens, torch.nn.functional.pad(logps, missing, value=LOWEST)


# -- teachers


class Head:
    """A resident teacher's output layer. It is kept apart, so that the teacher's logits are
    computed for the same chunk of tokens as the student's, and sharded like the student's.

    If tensor-parallel shards of the two output weights differ in size, the teacher's is gathered
    once and sharded again, like the student's.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype  # the matmul's
        self.head: Any = None  # the teacher's loss_tokens.Head
        self.weight: Any = None
        self.cut: Any = None  # the weight's rows for this rank's token ids

    def keep(self, logits: Logits) -> torch.Tensor:
        """Stands in for the teacher's loss: remember the teacher's output layer, and return that
        layer's inputs, the last hidden states [n, h], instead of losses."""
        self.head = logits.head
        self.weight = logits.weight
        return logits.hidden

    def rows_of(self, logits: Logits) -> torch.Tensor:
        """The rows [columns, h] of the teacher's output weight, in `dtype`, for this rank's columns
        of `logits`: the student's, for the token ids that both models have. Cached. The first call
        is collective over the tensor-parallel group if the weights' shards differ in size."""
        if self.cut is None:
            start = 0
            weight = self.weight
            if len(weight) != len(logits.weight) and logits.head.group is not None:
                start = logits.head.first
                weight = parallel.whole(weight, 0, logits.head.group)
            self.cut = weight[start : start + logits.head.columns].to(self.dtype)
            if weight is not self.weight:
                self.cut = self.cut.clone()  # frees the gathered weight
        return self.cut


_HEADS_ADAPTERS = ("output_layer.lora", "lm_head.lora")


@dataclass
class Resident:
    """A teacher in memory, for one micro-batch. head: the teacher's output layer. hidden: the
    teacher's last hidden states [b, s, h] on this rank."""

    head: Head
    hidden: torch.Tensor

    def losses(
        self, logits: Logits, common: Logits, config: DistillConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token, (divergence [n] between teacher and student at the temperature, not yet
        times T^2; the student's cross entropy [n]).

        logits: the student's. common: the student's logits for token ids that both models have.
        Collective over the tensor-parallel group.
        """
        product = common.take(self.hidden) @ self.head.rows_of(common).t()
        cap = self.head.head.softcap
        if compiles(product):
            return losses_beside(logits, common, product, cap, config)
        values = product.float()
        if cap is not None:
            values = cap * torch.tanh(values / cap)
        log_p = common.log_softmax(values / config.temperature)
        log_q = common.log_softmax(common.values / config.temperature)
        divergence = common.sum(divergence_terms(log_p, log_q, config).sum(1))
        return divergence, logits.cross_entropy()


@dataclass
class Cached:
    """A teacher's stored rows for one micro-batch.

    read(indices [m]): returns the stored rows, a structured array [m]. rows: row index of each
    token on this rank, int64 [b, s], -1 for none. Rows are read when the loss first needs them."""

    read: Callable[[np.ndarray], np.ndarray]
    rows: torch.Tensor

    @functools.cached_property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [b, s, k], log-probabilities float32 [b, s, k + 1]) of the stored rows, on
        this rank's device. Tokens without a row get the values of row 0, which no loss uses.
        """
        rows = self.read(self.rows.clamp(min=0).flatten().numpy())
        shape = self.rows.shape
        tokens = torch.from_numpy(rows["tokens"].astype(np.int64)).view(*shape, -1)
        logps = torch.from_numpy(rows["logps"].astype(np.float32)).view(*shape, -1)
        device = parallel.device()
        return parallel.to_device(tokens, device), parallel.to_device(logps, device)

    def losses(
        self, logits: Logits, common: Logits, config: DistillConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token, (divergence [n] between the stored teacher and the student at the
        temperature, not yet times T^2; the student's cross entropy [n]).

        logits: the student's. common: the student's logits for token ids that both models have.
        Collective over the tensor-parallel group.
        """
        tokens, log_p = (common.take(column) for column in self.columns)
        if compiles(logits.product):
            log_q, cross_entropy = log_probs_of_events(logits, common, tokens, config.temperature)
        else:
            log_q = log_probs_of(common, tokens, config.temperature)
            cross_entropy = logits.cross_entropy()
        terms = divergence_terms(log_p[:, : log_q.shape[1]], log_q, config)
        return terms.sum(1), cross_entropy


# -- the trainer


class WithRows(View):
    """A view of a dataset that adds "teacher_row" to documents, int64 [n]: the row index of each
    trained token among the teacher's stored rows, -1 for other tokens.

    ends: int64 [samples + 1], cumulative row counts, starting at 0. first: index of this dataset's
    first row. ValueError on reading a sample whose number of trained tokens changed.
    """

    def __init__(self, dataset: Any, ends: np.ndarray, first: int = 0):
        super().__init__(dataset)
        self.first = first
        self.ends = ends
        self.document_lengths = getattr(dataset, "document_lengths", None)

    def __getitem__(self, i: int) -> Documents:
        documents = documents_of(self.dataset[i])
        row = self.ends[i]
        numbered = []
        for document in documents:
            has_row = trained(document)
            rows = np.where(has_row, self.first + row + has_row.cumsum() - 1, -1)
            numbered.append({**document, "teacher_row": rows})
            row += has_row.sum()
        expect(
            row == self.ends[i + 1],
            f"sample {i} has {row - self.ends[i]} trained tokens, and had "
            f"{self.ends[i + 1] - self.ends[i]}: expected the same sample in every epoch",
        )
        return numbered


def _rows_of(batch: Batch) -> torch.Tensor:
    """A batch's column "teacher_row", int64 [b, s]. ValueError if the data collator dropped it."""
    rows: Any = batch.get("teacher_row")
    expect(
        rows is not None,
        'the data collator dropped "teacher_row", the row index of each token [b, s]: '
        "keep that column, or leave teacher_top_k out",
    )
    return rows


class DistillTrainer(ScoredTrainer):
    """Train a student model to predict a teacher model's probabilities, on McaTrainer's samples.

    train_config: a DistillConfig; None: its defaults. teacher: a model of the backend's kind, which
    must share no parameter with `model`; or a function that loads it, called only if needed; None:
    stored rows are read. Other arguments are McaTrainer's. ValueError for keys that do not fit
    together; for data and models that do not fit, when they are prepared.
    """

    config_class = DistillConfig
    scorer = "teacher"
    scorer_key = "teacher_model_name_or_path, teacher_top_k and distill_temperature"
    kind = "teacher"
    row_unit = "token"
    part_rows = 65_536
    metrics_keys = ["loss", "kd_loss", "sft_loss"]
    unread_columns = other_columns("teacher_row")

    def __init__(
        self,
        model: Any = None,
        train_config: DistillConfig | None = None,
        teacher: Any = None,
        args: Any = None,
        **kwargs: Any,
    ) -> None:
        self._given_teacher = teacher
        self._chunks: list[Any] | None = None  # the teacher's, once it is loaded
        self._head: Any = None  # a resident teacher's Head
        self._maps: list[np.ndarray] = []  # memory-mapped rows of all data sets
        self._firsts = np.zeros(1, np.int64)  # first row of each map, then the total
        super().__init__(model, train_config, args, **kwargs)
        logps = (np.dtype(self.train_config.cache_dtype), (self._k + 1,))
        self.row_type = np.dtype([("tokens", np.int32, (self._k,)), ("logps", *logps)])

    @property
    def _k(self) -> int:
        """Number of the teacher's tokens in a stored row; 0 if the teacher stays in memory."""
        return self.train_config.top_k or 0

    @property
    def _num_tokens(self) -> int:
        """Number of token ids that are compared, from 0 on: those that both models have, once the
        teacher or its rows are known."""
        return int(self.limits.vocab_size)

    # -- a run of the command line

    @classmethod
    def second_model_folder(cls, arguments: Any, planned: Any) -> Path | None:
        """The teacher's folder; None if the configuration names no teacher. planned: the student's
        run.PlannedModel. ConfigError if the teacher's folder is the student's while the student
        starts from random weights: the teacher would be random too."""
        name = arguments.teacher_model_name_or_path
        if name is None:
            return None
        folder = resolve_folder(name)
        if folder == planned.folder and planned.from_scratch:
            reason = "train_from_scratch: its weights would be random, as the student's are"
            refuse("teacher_model_name_or_path", name, reason, "the folder of a trained model")
        return folder

    @classmethod
    def check_second_model(cls, arguments: Any, first: Any, second: Any, tokenizer: Any) -> None:
        """Raise ConfigError if a token in the student's tokenizer has another id in the teacher's,
        or none, if the teacher's embedding has too few rows, or if plain torch would have to hold
        the whole logits of a teacher that scales or caps them. The teacher may have more tokens.
        first, second: run.PlannedModel of student and teacher.
        """
        vocabulary = tokenizer.get_vocab()
        known = load_tokenizer(second.folder, arguments.model.trust_remote_code).get_vocab()
        others = [token for token in vocabulary if known.get(token) != vocabulary[token]]
        key = "teacher_model_name_or_path"
        remedy = "a teacher of the student's family, with the same tokens"
        if others:
            token = min(others, key=vocabulary.__getitem__)
            reason = f"its tokenizer is another one: {len(others):,} of the student's "
            reason += f"{len(vocabulary):,} tokens have another id in it, or none: {token!r} is "
            reason += f"{vocabulary[token]}, and there {known.get(token, 'unknown')}"
            refuse(key, str(second.folder), reason, remedy)
        if second.old_vocab_size < len(vocabulary):
            reason = f"it has {second.old_vocab_size:,} rows for {len(vocabulary):,} tokens"
            refuse(key, str(second.folder), reason, remedy)
        if not (arguments.backend.use_mca or arguments.teacher_top_k):
            for name in ("final_logit_softcapping", "logits_scaling"):
                if getattr(second.config, name, None) not in (None, 1.0):
                    reason = f"its {name} changes logits, which plain torch would hold whole"
                    refuse(key, str(second.folder), reason, "teacher_top_k: 64, or use_mca: true")

    @classmethod
    def own_keywords(cls, arguments: Any, second_model: Any) -> dict[str, Any]:
        cache_dir = arguments.data.cache_dir
        config = DistillConfig.of_keys(arguments, cache_dir=cache_dir)
        return {"train_config": config, "teacher": second_model}

    # -- the loss

    def _loss_of_logits(self, logits: Logits) -> torch.Tensor:
        """Losses [n, 2] of a chunk of n tokens: the divergence times the squared temperature, and
        cross entropy. logits: the student's."""
        config = self.train_config
        common = logits.of_first(self._num_tokens)
        divergence, cross_entropy = logits.batch["teacher"].losses(logits, common, config)
        return torch.stack([config.temperature**2 * divergence, cross_entropy], 1)

    def _post_compute_loss(self, labels: torch.Tensor, losses: torch.Tensor) -> Any:
        """Mix token losses [b, s, 2], from _loss_of_logits, by ce_weight. Returns what McaTrainer
        does for the mixed losses, with the metrics "kd_loss" and "sft_loss" too: [sum, tokens] of
        each loss before mixing."""
        kd, cross_entropy = losses.unbind(-1)
        weight = self.train_config.ce_weight
        mixed = (1 - weight) * kd + weight * cross_entropy
        loss, count, metrics = super()._post_compute_loss(labels, mixed)
        tokens = metrics["loss"][1]
        metrics["kd_loss"] = torch.stack([kd.detach().sum(), tokens])
        metrics["sft_loss"] = torch.stack([cross_entropy.detach().sum(), tokens])
        return loss, count, metrics

    def _prepare_micro_batches(self, micro_batches: list[Batch], seq_length: int) -> list[Batch]:
        """Add "teacher" to each micro-batch -> the micro-batches. With teacher_top_k the value is a
        Cached, which reads stored log-probabilities. Otherwise the teacher runs forward
        (collective), and the value is a Resident; pipeline stages before the last add nothing."""
        if self._k:
            return [
                {**batch, "teacher": Cached(self._read, self._numbers_of(batch))}
                for batch in micro_batches
            ]
        found = self._run_teacher(lambda inputs, batch, hidden: hidden, micro_batches)
        if not found:  # a pipeline stage before the last has no losses
            return micro_batches
        dtype = self.backend.dtype  # the output layer's; the hidden states are float32
        return [
            {**batch, "teacher": Resident(self._head, hidden.to(dtype))}
            for batch, hidden in zip(micro_batches, found, strict=True)
        ]

    def _numbers_of(self, batch: Batch) -> torch.Tensor:
        """Index of the teacher's stored row for each token on this rank, int64 [b, s] on the CPU,
        -1 for none. ValueError if a token with a label has no row.
        """
        rows = _rows_of(batch)
        trained = batch["labels"] != IGNORE_INDEX
        expect(
            bool((rows[trained] >= 0).all()),
            "the data collator gave labels for tokens without a row in the teacher's cache: "
            "expected those of the samples, which the teacher has scored",
        )
        places = self.backend.places(batch)
        return rows if places is None else rows[..., places]

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        """The teacher's stored rows (tokens and log-probabilities) with the indices `numbers` [m],
        from all data sets' files."""
        of_part = np.searchsorted(self._firsts, numbers, side="right") - 1
        rows = np.empty(len(numbers), self.row_type)
        for part in np.unique(of_part):
            here = of_part == part
            rows[here] = self._maps[part][numbers[here] - self._firsts[part]]
        return rows

    # -- the teacher

    def _run_teacher(self, collect: Callable[..., Any], batches: list[Batch]) -> list[Any]:
        """Run the teacher over micro-batches. Returns collect(inputs, batch, output) for each
        micro-batch, where output is what the teacher gives instead of losses; [] on pipeline stages
        before the last. Loads the teacher if it is not loaded. Collective.
        """
        self._need_teacher()
        step = collecting(self.backend, collect, self.inputs_of)
        return measure(self.backend, step, batches, self._chunks)

    def _need_teacher(self) -> None:
        """Load the teacher if it is not loaded. Collective."""
        if self._chunks is None:
            self._chunks = self._load_teacher()

    def _load_teacher(self) -> list[Any]:
        """Load the teacher, check it, and wrap it for forward passes. Returns its model chunks.
        ValueError if there is no teacher, or it does not fit. Collective."""
        teacher = self._given_teacher
        expect(
            teacher is not None,
            "distillation needs its teacher here: DistillTrainer(teacher=...), in a run "
            "teacher_model_name_or_path",
        )
        if not isinstance(teacher, torch.nn.Module):
            teacher = teacher()
        self._check_teacher(teacher.config)
        self.guard.check_weights("the teacher", teacher)
        if self._k:
            return self.backend.wrap_reference(teacher, self._scores_of)
        adapters = [name for name, _ in teacher.named_modules() if name.endswith(_HEADS_ADAPTERS)]
        expect(
            not adapters,
            f"this teacher has an adapter on its output layer ({adapters}), which a resident "
            "teacher's logits would lack: merge it into the weights, or set teacher_top_k",
        )
        self._reference_model = teacher  # its FLOPs count in each step
        self._head = Head(self.backend.dtype)
        chunks = self.backend.wrap_reference(teacher, self._head.keep)
        expect(
            getattr(chunks[0], "head_is_plain", True),
            "this teacher changes its logits, which plain torch would hold whole: set "
            "teacher_top_k, or use_mca: true",
        )
        return chunks

    def _check_teacher(self, config: Any) -> None:
        """Raise ValueError if the teacher cannot run on the student's batches, for example because
        only one of them sees images, or if top_k is above the number of tokens. Lowers self.limits
        (vocabulary, positions) to what both models have. config: the teacher's.
        """
        differ = "the teacher and the student differ in"
        mine = self.model.config
        ahead = "mtp_num_layers"
        expect(
            type(inputs_of(config)) is type(inputs_of(mine)),
            f"{differ} vision_config: both see pictures, or none of them",
        )
        expect(
            bool(getattr(config, ahead, None)) == bool(getattr(mine, ahead, None)),
            f"{differ} {ahead}: layers for multi-token prediction have no part in distillation",
        )
        values = getattr(config, "hf_config", None) or config.to_dict()
        self.limits = self.limits.within(Limits.of(values))
        size = self.limits.vocab_size
        if self._k > size:
            refuse("teacher_top_k", self._k, "the models have fewer tokens", f"at most {size}")

    def _scores_of(self, logits: Logits) -> torch.Tensor:
        """Stands in for the teacher's loss: the k likeliest of the tokens that both models have,
        by the teacher, then the log-probabilities, among these tokens, of the k and of all others
        together, float32 [n, 2 k + 1]."""
        common = logits.of_first(self._num_tokens)
        tokens, logps = top_k_of(common, self._k, self.train_config.temperature)
        return torch.cat([tokens.float(), logps], 1)  # exact: ids are below 2^24

    # -- the teacher's pass over a data set

    def _identity(self, cache_dir: Path) -> dict[str, Any]:
        config = self.train_config
        identity: dict[str, Any] = {
            "top_k": config.top_k,
            "temperature": config.temperature,
            "dtype": config.cache_dtype,
        }
        if config.teacher is not None:
            files = identity_of_model(resolve_folder(config.teacher), cache_dir)
            identity["teacher"] = hash_of([files, self.backend.precision])
        return identity

    def _check_vocabulary(self, store: RowStore) -> None:
        """Raise CheckpointError if the stored rows were computed over another number of token ids
        than this run compares; a new store notes the run's. A smaller number is accepted for the
        first data set if no teacher is loaded: the run then compares only these ids."""
        known = self._num_tokens
        size = store.identity.setdefault("vocab_size", known)
        is_narrower = size < known and not self._maps and self._chunks is None
        if size != known and not is_narrower:
            raise CheckpointError(
                f"the teacher's rows in {store.folder} are of {size:,} token ids, and this run "
                f"needs those of {known:,}: set teacher_cache to another folder"
            )
        self.limits = self.limits.within(Limits(vocab_size=size))

    def _score(self, samples: Any, ends: np.ndarray, start: int, stop: int) -> np.ndarray:
        first, end = ends[[start, stop]].tolist()
        zeros = torch.zeros(end - first, 2 * self._k + 1, device=parallel.device())

        def collect(inputs: dict[str, Any], batch: Batch, output: torch.Tensor) -> tuple[Any, ...]:
            kept = inputs["labels"] != IGNORE_INDEX
            return _rows_of(batch)[kept] - first, output[kept]

        run = functools.partial(self._run_teacher, collect)
        part = Subset(WithRows(samples, ends), range(start, stop))
        scores = [pair for step in self.evaluator.passes(part, run) for _, pair in step]
        found = scattered(self.backend, scores, zeros).numpy()
        rows = np.empty(len(found), self.row_type)
        rows["tokens"] = found[:, : self._k]
        rows["logps"] = found[:, self._k :].clip(min=LOWEST)
        return rows

    def _prepare_samples(self, samples: Any) -> Any:
        """For a stored teacher, the samples with "teacher_row" added; rows that are not stored are
        computed now. Otherwise the samples unchanged. ValueError for a stream with a stored
        teacher, CheckpointError if rows are missing and there is no teacher. Collective."""
        if not self._k or isinstance(samples, WithRows):
            return samples
        expect(
            not isinstance(samples, Stream),
            "a cached teacher scores the samples before training, and a stream is read once: leave "
            "teacher_top_k out, or set streaming: false",
        )
        ends = np.append(0, trained_counts(samples).cumsum())
        store = self._stored(samples, int(ends[-1]))
        # the cache's identity does not name this teacher: its rows are compared with those there
        is_unnamed = self.train_config.teacher is None and self._given_teacher is not None
        if not store.is_complete or is_unnamed:
            if self._given_teacher is None:
                raise CheckpointError(
                    f"{store.folder} lacks rows of the teacher: set teacher_model_name_or_path, "
                    "and it computes them; those of other data, or of another tokenizer or "
                    "cutoff_len, are in other folders"
                )
            self._need_teacher()
        self._check_vocabulary(store)
        if not store.is_complete or is_unnamed:
            for _ in self._missing_rows(store, samples, ends):
                pass
        first = int(self._firsts[-1])

        def open_rows() -> None:
            self._maps += store.maps()

        words = f"{store.folder} cannot be read: expected a folder that all nodes see"
        parallel.on_all(open_rows, CheckpointError, words)
        self._firsts = np.cumsum([0, *map(len, self._maps)])
        view = WithRows(samples, ends, first)
        view.first_scores = self._read(first + np.arange(min(4, ends[-1])))["logps"].tolist()
        return view

    # -- around the loop

    def _prepare_datasets(self, *names: str) -> None:
        """Prepare the data sets in the attributes `names`, such as "train_dataset". Also load a
        teacher that stays in memory, because the start summary counts its FLOPs; or drop the one
        that was loaded to compute rows. Collective."""
        super()._prepare_datasets(*names)
        if self._k:
            self._chunks = None
        else:
            self._need_teacher()
