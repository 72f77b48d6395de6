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
    expect_another,
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
    """The summands p log(p / q) of the KL divergence KL(p, q), elementwise from log p and log q."""
    return log_p.exp() * (log_p - log_q)


def divergence_terms(
    log_p: torch.Tensor, log_q: torch.Tensor, config: DistillConfig
) -> torch.Tensor:
    """The summands of the configured divergence between teacher and student. log_p:
    log-probabilities of the teacher. log_q: those of the student, in the same shape, which the
    result has too. The divergence is the sum over the last axis: the vocabulary, or a stored row's
    k tokens and the event of all others."""
    if config.divergence == "forward_kl":
        return _kl(log_p, log_q)
    if config.divergence == "reverse_kl":
        return _kl(log_q, log_p)
    b = config.jsd_mix
    log_m = torch.logaddexp(log_p + math.log(b), log_q + math.log1p(-b))
    return b * _kl(log_p, log_m) + (1 - b) * _kl(log_q, log_m)


def _without(logits: Logits, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of `values` in which the given tokens are ruled out by -inf. values: [n, columns], a
    column for each token id of this rank's shard of the vocabulary. tokens: [n, k], token ids of
    the whole vocabulary; ids in other ranks' shards change nothing."""
    column, here = logits.head.place(tokens)
    columns = values.shape[1]
    hidden = values.new_zeros(len(values), columns + 1, dtype=torch.bool)
    hidden.scatter_(1, column.where(here, columns), True)
    return values.masked_fill(hidden[:, :columns], float("-inf"))


def log_probs_of(logits: Logits, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of k given tokens per position, and of all other tokens together, at a
    temperature: [n, k + 1]. tokens: int64 [n, k], token ids. logits: a Logits (this rank's shard of
    the logits for n positions). If k is the whole vocabulary, there are no other tokens, and the
    result is [n, k]. Collective over the tensor-parallel group, whose ranks get the same result."""
    values = logits.values / temperature
    whole = logits.logsumexp(values)[:, None]
    log_q = logits.of_tokens(tokens, values) - whole
    if tokens.shape[1] == logits.head.vocab_size:
        return log_q
    rest = logits.logsumexp(_without(logits, tokens, values))[:, None] - whole
    return torch.cat([log_q, rest], 1)


def top_k_of(logits: Logits, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the k likeliest tokens at each of n positions -> (their ids int64 [n, k],
    log-probabilities [n, k + 1] at the temperature: of these tokens, then of all other tokens
    together). If k is the whole vocabulary, the last column is LOWEST, a very low number. logits: a
    Logits (this rank's shard of the logits). Collective over the tensor-parallel group, whose ranks
    get the same result."""
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
    """The output layer of a teacher that stays in memory. The layer is kept apart, so that the
    teacher's logits can be computed for a chunk of tokens at a time, beside the student's, and
    sharded over tensor-parallel ranks like the student's.

    If the shards of the two output weights differ in size, the teacher's weight is gathered once
    and sharded again."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype  # the matmul's
        self.head: Any = None  # the teacher's loss_tokens.Head
        self.weight: Any = None
        self.cut: Any = None  # the weight's rows for this rank's token ids

    def keep(self, logits: Logits) -> torch.Tensor:
        """Hook that takes the place of the teacher's loss: instead of losses, it returns the output
        layer's inputs, the last hidden states [n, h], and this Head remembers the output layer.
        logits: the teacher's, a Logits (logits with the layer that gives them)."""
        self.head = logits.head
        self.weight = logits.weight
        return logits.hidden

    def rows_of(self, logits: Logits) -> torch.Tensor:
        """The rows [columns, h] of the teacher's output weight that give the same token ids as this
        rank's columns of the student's logits, cast to the attribute `dtype`. logits: the
        student's, for token ids that both models have. Cached; the first call is collective over
        the tensor-parallel group if the two weights' shards differ in size."""
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
    """The output of a teacher in memory for one micro-batch. head: the teacher's output layer.
    hidden: the teacher's last hidden states [b, s, h] on this rank, 0 where there is no label."""

    head: Head
    hidden: torch.Tensor

    def losses(
        self, logits: Logits, common: Logits, config: DistillConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of a chunk of n tokens -> (divergence [n] between teacher and student, the
        student's cross entropy [n]). The divergence is at config.temperature, not yet multiplied by
        its square.

        logits: the student's. common: the student's logits for the token ids that both models have.
        Collective over the tensor-parallel group."""
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
    """A teacher's stored results for one micro-batch. A stored row is for one trained token of the
    data: the tokens that the teacher finds likeliest, and their log-probabilities.

    read(indices [m]): returns those rows, a structured array [m]; first called when the loss needs
    them. rows: int64 [b, s], the row index of each token on this rank, -1 for tokens without one.
    """

    read: Callable[[np.ndarray], np.ndarray]
    rows: torch.Tensor

    @functools.cached_property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored rows as tensors on this rank's device: (tokens int64 [b, s, k],
        log-probabilities float32 [b, s, k + 1]: of the k tokens, then of all others together).
        Tokens without a row get the values of row 0, which no loss uses."""
        rows = self.read(self.rows.clamp(min=0).flatten().numpy())
        shape = self.rows.shape
        tokens = torch.from_numpy(rows["tokens"].astype(np.int64)).view(*shape, -1)
        logps = torch.from_numpy(rows["logps"].astype(np.float32)).view(*shape, -1)
        device = parallel.device()
        return parallel.to_device(tokens, device), parallel.to_device(logps, device)

    def losses(
        self, logits: Logits, common: Logits, config: DistillConfig
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of a chunk of n tokens -> (divergence [n] between the stored teacher and the
        student, the student's cross entropy [n]). The divergence is at config.temperature, not yet
        multiplied by its square.

        logits: the student's. common: the student's logits for the token ids that both models have.
        Collective over the tensor-parallel group."""
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
    """A view of a dataset that tells for each trained token where the teacher's result is stored:
    it adds "teacher_row" to documents, int64 [n], the row index, -1 for tokens that are not
    trained.

    ends: int64 [samples + 1]: sample i has the dataset's rows ends[i] to ends[i + 1] - 1. first:
    index of the dataset's row 0 among all stored rows. ValueError on reading a sample whose number
    of trained tokens changed."""

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

    train_config: a DistillConfig; None: its defaults.
    teacher: a model of the backend's kind, which must share no parameter with `model`; or a
    function that loads it, called only if needed; None: stored results of the teacher are read.
    Other arguments are McaTrainer's. ValueError for keys that do not fit together. Data or models
    that do not fit raise ValueError later, when they are prepared."""

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
        """Number of likeliest tokens that are stored per trained token (teacher_top_k); 0 if the
        teacher stays in memory."""
        return self.train_config.top_k or 0

    @property
    def _num_tokens(self) -> int:
        """Number of token ids over which teacher and student are compared: all ids below this
        number, which both models have. Final once the teacher is loaded, or its stored rows are
        open."""
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
        """Raise ConfigError if the teacher does not fit the student: a token in the student's
        tokenizer has another id in the teacher's, or none; the teacher's embedding has fewer rows
        than the student's tokenizer has tokens; or plain torch, with a teacher in memory, meets one
        that scales or caps its logits. The teacher may have more tokens.

        first, second: run.PlannedModel of student and teacher. tokenizer: the student's."""
        vocabulary = tokenizer.get_vocab()
        known = load_tokenizer(second.folder, arguments.model.trust_remote_code).get_vocab()
        others = [token for token in vocabulary if known.get(token) != vocabulary[token]]
        key = "teacher_model_name_or_path"
        remedy = "a teacher of the student's family, with the same tokens"
        if others:
            token = min(others, key=vocabulary.__getitem__)
            reason = f"its tokenizer differs: {len(others):,} of the student's "
            reason += f"{len(vocabulary):,} tokens have another id in it, or none: {token!r} is "
            reason += f"{vocabulary[token]} here, and there {known.get(token, 'unknown')}"
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
        """Losses [n, 2] of a chunk of n tokens: the divergence from the teacher, multiplied by the
        squared temperature, and the cross entropy with the labels. logits: the student's, a Logits.
        """
        config = self.train_config
        common = logits.of_first(self._num_tokens)
        divergence, cross_entropy = logits.batch["teacher"].losses(logits, common, config)
        return torch.stack([config.temperature**2 * divergence, cross_entropy], 1)

    def _post_compute_loss(self, labels: torch.Tensor, losses: torch.Tensor) -> Any:
        """Mix the token losses by ce_weight, and sum them as McaTrainer does -> (loss, number of
        trained tokens, metrics). losses: [b, s, 2] from _loss_of_logits, divergence and cross
        entropy. The metrics also have both before mixing, as [sum, tokens]: "kd_loss" and
        "sft_loss"."""
        kd, cross_entropy = losses.unbind(-1)
        weight = self.train_config.ce_weight
        mixed = (1 - weight) * kd + weight * cross_entropy
        loss, count, metrics = super()._post_compute_loss(labels, mixed)
        tokens = metrics["loss"][1]
        metrics["kd_loss"] = torch.stack([kd.detach().sum(), tokens])
        metrics["sft_loss"] = torch.stack([cross_entropy.detach().sum(), tokens])
        return loss, count, metrics

    def _prepare_micro_batches(self, micro_batches: list[Batch], seq_length: int) -> list[Batch]:
        """Add the teacher's results to each micro-batch, as the value "teacher" -> the
        micro-batches. With teacher_top_k it is a Cached, which reads stored log-probabilities.
        Otherwise the teacher runs forward (collective), and it is a Resident; pipeline stages
        before the last then add nothing. seq_length is not used."""
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
        """Find for each token on this rank the teacher's stored row: int64 [b, s] on the CPU, the
        row's index, -1 for tokens without one. batch: an arranged micro-batch. ValueError if a
        token with a label has no row."""
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
        """Read stored results of the teacher. numbers: indices [m] among the rows of all data sets
        -> a structured array [m] with the fields "tokens" [k] and "logps" [k + 1]."""
        of_part = np.searchsorted(self._firsts, numbers, side="right") - 1
        rows = np.empty(len(numbers), self.row_type)
        for part in np.unique(of_part):
            here = of_part == part
            rows[here] = self._maps[part][numbers[here] - self._firsts[part]]
        return rows

    # -- the teacher

    def _run_teacher(self, collect: Callable[..., Any], batches: list[Batch]) -> list[Any]:
        """Run the teacher forward over micro-batches, and load the teacher before if necessary.
        Returns collect(inputs, batch, output) of each micro-batch; [] on pipeline stages before the
        last. inputs: the model's keyword arguments. batch: the micro-batch, with this rank's tokens
        in its loss columns. output: the result of the teacher's hook in place of a loss, such as
        Head.keep. Collective."""
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
        expect_another(self.model, teacher, "the teacher")
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
        only one of them sees images, or if teacher_top_k is above the number of common tokens.
        Lowers self.limits (vocabulary, positions) to what both models have. config: the teacher's.
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
        """Hook that takes the place of the teacher's loss when its results are to be stored:
        float32 [n, 2 k + 1] for n tokens. First the ids of the teacher's k likeliest tokens, among
        those that both models have; then the k log-probabilities, and that of all other common
        tokens together. logits: the teacher's, a Logits."""
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
            identity["teacher"] = hash_of([files, self.backend.precision, self.args.fp8])
        return identity

    def _check_vocabulary(self, store: RowStore) -> None:
        """Raise CheckpointError if the stored rows were computed over another number of token ids
        than this run compares. store: a RowStore (stored results of the teacher for one data set);
        a new one notes this run's number. A smaller stored number is accepted for the first data
        set if no teacher is loaded: the run then compares only those ids."""
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
        """With teacher_top_k: make sure that the teacher's results for these samples are stored,
        computing those that are missing, and return a view of the samples with "teacher_row" added
        (the index of each token's stored row). Without: return the samples unchanged. ValueError
        for a stream with teacher_top_k; CheckpointError if rows are missing and there is no
        teacher. Collective."""
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
                    f"{store.folder} lacks rows of the teacher: set teacher_model_name_or_path "
                    "to compute them; rows for other data, another tokenizer or another "
                    "cutoff_len are in other folders"
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
        """Prepare data sets for training. names: the attributes that hold them, such as
        "train_dataset". Without teacher_top_k, the teacher is loaded too, because the start summary
        counts its FLOPs; with it, a teacher that was loaded to compute rows is dropped. Collective.
        """
        super()._prepare_datasets(*names)
        if self._k:
            self._chunks = None
        else:
            self._need_teacher()
