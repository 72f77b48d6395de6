"""Distillation: DistillTrainer, as hooks of McaTrainer's loop, and the teacher's pass.

    _prepare_micro_batches  a resident teacher's hidden states, or places of a cached one's rows
    _loss_of_logits         a chunk of both models' logits -> divergence and cross entropy
    _post_compute_loss      their mix -> loss, 3 metrics

Letters: p the teacher's probabilities of the next token and q the student's, both of logits divided
by the temperature T; V the token ids of both models; k those of a cached row; n tokens of a chunk.

    loss = (1 - w) T^2 D(p, q) + w cross entropy        w: ce_weight; T^2: Hinton et al., 2015
    forward_kl   D = sum p log(p / q)
    reverse_kl   D = sum q log(q / p)
    jsd          D = b sum p log(p / m) + (1 - b) sum q log(q / m),   m = b p + (1 - b) q
                 (Agarwal et al., On-Policy Distillation of Language Models, 2024)

Models whose vocabularies are padded differently are compared on the ids that both have: p and q are
normalised over those. A cached row has the k likeliest tokens of the teacher, and all others as one
event: D is of k + 1 events, whose probabilities are exact sums, at T. It is 0 where q is right
about these tokens and about the mass of the others, never above D over V, and equal to it for k =
V. Without that event, or with p and q normalised over k tokens, the minimum is elsewhere: a student
would learn to be too certain (Anshumann et al., Sparse Logit Sampling, 2025).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from . import parallel
from .args import FinetuningArguments, check_together
from .ckpt_folder import CheckpointError
from .data_batches import Limits, samples_of
from .data_encode import cache_folder, hash_of
from .data_stream import TokenStream
from .data_teacher import (
    LOWEST,
    TopKStore,
    WithRows,
    fingerprint_of,
    teacher_identity,
    trained_counts,
)
from .errors import expect, refuse
from .files import IGNORE_INDEX, resolve_folder
from .loss_tokens import Logits
from .model_config import load_tokenizer
from .tables import other_columns
from .trainer import McaTrainer
from .trainer_events import check_given

PART_ROWS = 65_536  # tokens that the teacher's pass writes at once; a crash loses as many
# fields of DistillConfig -> configuration keys of the same meaning
_KEYS = {
    "divergence": "distill_loss",
    "jsd_mix": "distill_jsd_mix",
    "temperature": "distill_temperature",
    "ce_weight": "distill_ce_weight",
    "top_k": "teacher_top_k",
    "cache": "teacher_cache",
    "cache_dtype": "teacher_cache_dtype",
    "teacher": "teacher_model_name_or_path",
}


@dataclass(kw_only=True)
class DistillConfig:
    """The objective. ConfigError for values that do not fit together.

    divergence: forward_kl, reverse_kl or jsd. jsd_mix: the share b of the teacher in its mixture.
    temperature: T. ce_weight: w. top_k: k of a cached teacher; None: the teacher stays in memory.
    cache: folder of its rows. cache_dtype: float32 or float16. teacher: folder of the teacher,
    whose files a cache names; None: another model's, or the cache is only read. cache_dir: of
    DataArguments, for rows without `cache`, and for sums of files.
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

    def __post_init__(self):
        keys = self.as_keys()
        # rules about a missing teacher are DistillTrainer's, which may be given a model
        keys["teacher_model_name_or_path"] = self.teacher or "given"
        checked = FinetuningArguments(stage="distill", **keys)
        for name, key in _KEYS.items():  # cast to the keys' types
            if name != "teacher":
                setattr(self, name, getattr(checked, key))

    def as_keys(self) -> dict[str, Any]:
        """The configuration keys of the same meaning."""
        return {key: getattr(self, name) for name, key in _KEYS.items()}


# -- divergences


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return log_p.exp() * (log_p - log_q)


def divergence_terms(log_p: torch.Tensor, log_q: torch.Tensor, config: DistillConfig):
    """The summands of D over events, of the shape of their log-probabilities."""
    if config.divergence == "forward_kl":
        return _kl(log_p, log_q)
    if config.divergence == "reverse_kl":
        return _kl(log_q, log_p)
    b = config.jsd_mix
    log_m = torch.logaddexp(log_p + math.log(b), log_q + math.log1p(-b))
    return b * _kl(log_p, log_m) + (1 - b) * _kl(log_q, log_m)


def _without(logits: Logits, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """values [n, columns] with -inf at the tokens [n, k]."""
    column, here = logits.head.place(tokens)
    columns = values.shape[1]
    hidden = values.new_zeros(len(values), columns + 1, dtype=torch.bool)
    hidden.scatter_(1, column.where(here, columns), True)
    return values.masked_fill(hidden[:, :columns], float("-inf"))


def log_probs_of(logits: Logits, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, k + 1]: log-probabilities of tokens [n, k] and of all others together, the same on all
    ranks; [n, V] if there are no others. Collective."""
    values = logits.values / temperature
    whole = logits.logsumexp(values)[:, None]
    log_q = logits.of_tokens(tokens, values) - whole
    if tokens.shape[1] == logits.head.vocab_size:
        return log_q
    rest = logits.logsumexp(_without(logits, tokens, values))[:, None] - whole
    return torch.cat([log_q, rest], 1)


def top_k_of(logits: Logits, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64 [n, k], log-probabilities [n, k + 1] of them and of all others together) of the
    likeliest tokens, the same on all ranks. Collective."""
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
    """A resident teacher's head, for the student's ranks.

    Each rank needs the rows of the student's columns. Models with vocabularies padded to other
    sizes are cut at other rows: the head is then gathered once, and cut again.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype  # of the product
        self.head: Any = None  # of the teacher
        self.weight: Any = None
        self.cut: Any = None  # the rows of the student's columns

    def keep(self, logits: Logits) -> torch.Tensor:
        """[n, h]: the teacher's hidden states, as its loss of tokens; keeps its head."""
        self.head = logits.head
        self.weight = logits.weight
        return logits.hidden

    def rows_of(self, logits: Logits) -> torch.Tensor:
        """[columns, h]: the rows of the student's columns. Collective at first."""
        if self.cut is None:
            start = 0
            weight = self.weight
            if len(weight) != len(logits.weight) and logits.head.group is not None:
                start = logits.head.first
                weight = parallel.whole(weight, 0, logits.head.group)
            self.cut = weight[start : start + logits.head.columns].to(self.dtype)
            if weight is not self.weight:
                self.cut = self.cut.clone()  # without the others' rows
        return self.cut


@dataclass
class Resident:
    """A teacher in memory, for a micro-batch: its last hidden states [b, s, h] of this rank."""

    head: Head
    hidden: torch.Tensor

    def divergence(self, logits: Logits, config: DistillConfig) -> torch.Tensor:
        """D of each token [n]. Collective."""
        values = (logits.take(self.hidden) @ self.head.rows_of(logits).t()).float()
        cap = self.head.head.softcap
        if cap is not None:
            values = cap * torch.tanh(values / cap)
        log_p = logits.log_softmax(values / config.temperature)
        log_q = logits.log_softmax(logits.values / config.temperature)
        return logits.sum(divergence_terms(log_p, log_q, config).sum(1))


@dataclass
class Cached:
    """Rows of a cached teacher, for a micro-batch: their numbers int64 [b, s] of this rank, -1
    without. read: numbers [m] -> a structured array [m]. They are read by the last stage alone, at
    its first chunk."""

    read: Callable[[np.ndarray], np.ndarray]
    rows: torch.Tensor

    @functools.cached_property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [b, s, k], log-probabilities float32 [b, s, k + 1])."""
        rows = self.read(self.rows.clamp(min=0).flatten().numpy())
        shape = self.rows.shape
        tokens = torch.from_numpy(rows["tokens"].astype(np.int64)).view(*shape, -1)
        logps = torch.from_numpy(rows["logps"].astype(np.float32)).view(*shape, -1)
        device = parallel.device()
        return parallel.to_device(tokens, device), parallel.to_device(logps, device)

    def divergence(self, logits: Logits, config: DistillConfig) -> torch.Tensor:
        """D of each token [n]. Collective."""
        tokens, log_p = (logits.take(column) for column in self.columns)
        log_q = log_probs_of(logits, tokens, config.temperature)
        return divergence_terms(log_p[:, : log_q.shape[1]], log_q, config).sum(1)


# -- the trainer

# of configs: keys in which both models must agree -> the reason
_SAME = {
    "vision_config": "both see pictures, or none of them",
    "mtp_num_layers": "layers for multi-token prediction have no part in distillation",
}


class DistillTrainer(McaTrainer):
    """Train `model` to give a teacher's probabilities, on McaTrainer's samples.

    train_config: DistillConfig. teacher: a model of the backend's kind, or a function that loads
    it, called if it is needed; None: a cache is read. It shares no parameter with `model`. The
    other arguments are McaTrainer's.
    Raises: ValueError for data, keys and models that do not fit.
    """

    metrics_keys = ["loss", "kd_loss", "sft_loss"]
    unread_columns = other_columns("teacher_row")

    def __init__(
        self, model=None, train_config: DistillConfig | None = None, teacher=None, args=None,
        **kwargs,
    ):  # fmt: skip
        check_given(model, args)
        self.train_config = config = train_config or DistillConfig()
        mtp = args.mtp_num_layers or getattr(model.config, "mtp_num_layers", None)
        check_together(args, stage="distill", mtp_num_layers=mtp, **config.as_keys())
        self._given_teacher = teacher
        self._chunks: list | None = None  # of the teacher, once it is loaded
        super().__init__(model=model, args=args, **kwargs)
        self.settings |= config.as_keys()
        self._stores: list[tuple[int, TopKStore]] = []  # the first row of each
        self._head: Any = None  # of a resident teacher

    @property
    def _k(self) -> int:
        """Tokens of a row; 0 of a resident teacher."""
        return self.train_config.top_k or 0

    @property
    def _num_tokens(self) -> int:
        """V."""
        return int(self.limits.vocab_size)

    # -- a run of the command line

    @classmethod
    def second_model_folder(cls, arguments, planned) -> Path | None:
        name = arguments.finetuning.teacher_model_name_or_path
        if name is None:
            return None
        folder = resolve_folder(name)
        if folder == planned.folder and planned.from_scratch:
            reason = "train_from_scratch: its weights would be random, as the student's are"
            refuse("teacher_model_name_or_path", name, reason, "the folder of a trained model")
        return folder

    @classmethod
    def check_second_model(cls, arguments, first, second, tokenizer) -> None:
        """Refuse a teacher that reads other tokens. Sizes may differ by rows that only pad."""
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

    @classmethod
    def own_keywords(cls, arguments, second_model) -> dict[str, Any]:
        keys = arguments.finetuning
        config = DistillConfig(
            **{name: getattr(keys, key) for name, key in _KEYS.items()},
            cache_dir=arguments.data.cache_dir,
        )
        return {"train_config": config, "teacher": second_model}

    # -- the loss

    def _loss_of_logits(self, logits: Logits) -> torch.Tensor:
        """[n, 2]: T^2 D, and cross entropy."""
        config = self.train_config
        common = logits.of_first(self._num_tokens)
        divergence = logits.batch["teacher"].divergence(common, config)
        return torch.stack([config.temperature**2 * divergence, logits.cross_entropy()], 1)

    def _post_compute_loss(self, labels, losses):
        """losses [b, s, 2] -> (sum of the mix, trained tokens, {metric: (sum, tokens)})."""
        kd, cross_entropy = losses.unbind(-1)
        weight = self.train_config.ce_weight
        mixed = (1 - weight) * kd + weight * cross_entropy
        loss, count, metrics = super()._post_compute_loss(labels, mixed)
        tokens = metrics["loss"][1]
        metrics["kd_loss"] = torch.stack([kd.detach().sum(), tokens])
        metrics["sft_loss"] = torch.stack([cross_entropy.detach().sum(), tokens])
        return loss, count, metrics

    def _prepare_micro_batches(self, micro_batches: list[dict], seq_length: int) -> list[dict]:
        """The micro-batches with the teacher's part."""
        if self._k:
            return [
                {**batch, "teacher": Cached(self._read, self._numbers_of(batch))}
                for batch in micro_batches
            ]
        step = self.evaluator.collecting(lambda inputs, batch, hidden: hidden)
        found = self._run_teacher(step, micro_batches, seq_length)
        if not found:  # a pipeline stage before the last, without losses
            return micro_batches
        dtype = self.backend.dtype  # of the head's product; the states are float32
        return [
            {**batch, "teacher": Resident(self._head, hidden.to(dtype))}
            for batch, hidden in zip(micro_batches, found, strict=True)
        ]

    def _numbers_of(self, batch: dict) -> torch.Tensor:
        """int64 [b, s] on the host: the rows of this rank's tokens, -1 without."""
        rows: Any = batch.get("teacher_row")
        expect(
            rows is not None,
            'the data collator dropped "teacher_row", the numbers of the tokens\' rows [b, s]: '
            "hand them on, or leave teacher_top_k out",
        )
        trained = batch["labels"] != IGNORE_INDEX
        expect(
            bool((rows[trained] >= 0).all()),
            "the data collator gave labels for tokens without a row in the teacher's cache: "
            "expected those of the samples, which the teacher has scored",
        )
        places = self.backend.places(batch)
        return rows if places is None else rows[..., places]

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of these numbers, over all stores."""
        firsts = [first for first, _ in self._stores]
        of_store = np.searchsorted(firsts, numbers, side="right") - 1
        rows = np.empty(len(numbers), self._stores[0][1].dtype)
        for i, (first, store) in enumerate(self._stores):
            here = of_store == i
            rows[here] = store.rows[numbers[here] - first]
        return rows

    # -- the teacher

    def _run_teacher(self, step: Callable, batches: list[dict], seq_length: int) -> list:
        """Results of step for each micro-batch by the teacher; [] on pipeline stages before the
        last. Loads it at first. Collective."""
        if self._chunks is None:
            self._chunks = self._load_teacher()
        with torch.no_grad():
            return self.backend.forward_backward(
                step, batches, seq_length, forward_only=True, chunks=self._chunks
            )

    def _load_teacher(self) -> list:
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
        self._reference_model = teacher  # its work counts in each step
        self._head = Head(self.backend.dtype)
        chunks = self.backend.wrap_reference(teacher, self._head.keep)
        expect(
            getattr(chunks[0], "head_is_plain", True),
            "this teacher changes its logits, which plain torch would hold whole: set "
            "teacher_top_k, or use_mca: true",
        )
        return chunks

    def _check_teacher(self, config) -> None:
        """ValueError for a teacher that cannot run on the student's batches. Lowers the limits of
        batches to the teacher's."""
        for name, reason in _SAME.items():
            expect(
                bool(getattr(config, name, None)) == bool(getattr(self.model.config, name, None)),
                f"the teacher and the student differ in {name}: {reason}",
            )
        values = getattr(config, "hf_config", None) or config.to_dict()
        self.limits = self.limits.within(Limits.of(values))
        size = self.limits.vocab_size
        if self._k > size:
            refuse("teacher_top_k", self._k, "the models have fewer tokens", f"at most {size}")

    def _scores_of(self, logits: Logits) -> torch.Tensor:
        """[n, 2 k + 1]: the teacher's tokens and log-probabilities, as its losses of tokens."""
        common = logits.of_first(self._num_tokens)
        tokens, logps = top_k_of(common, self._k, self.train_config.temperature)
        return torch.cat([tokens.float(), logps], 1)  # exact: ids are below 2^24

    # -- the teacher's pass over a data set

    def _score(self, view: WithRows, start: int, stop: int) -> np.ndarray:
        """float32 [rows, 2 k + 1] of samples start to stop, on every rank. Collective."""
        first, end = view.ends[[start, stop]].tolist()
        scores = torch.zeros(end - first, 2 * self._k + 1)
        scores = scores.to(parallel.device())

        def collect(inputs: dict, batch: dict, output: torch.Tensor) -> None:
            kept = inputs["labels"] != IGNORE_INDEX
            rows = parallel.to_device(self._numbers_of(batch), scores.device)
            scores[rows[kept] - first] = output[kept]

        run = functools.partial(self._run_teacher, self.evaluator.collecting(collect))
        for _ in self.evaluator.passes(Subset(view, range(start, stop)), run):
            pass
        return self.backend.reduce(scores.flatten()).view(scores.shape).cpu().numpy()

    def _write(self, store: TopKStore, view: WithRows) -> None:
        """Let the teacher score the samples whose rows are missing. Collective."""
        parallel.on_main(store.begin, CheckpointError)
        try:
            self._write_missing(store, view)
        finally:  # after a signal too: the next run of this process may write there
            if parallel.is_main():
                store.end()

    def _write_missing(self, store: TopKStore, view: WithRows) -> None:
        args = self.args
        of_step = args.per_device_eval_batch_size * args.gradient_accumulation_steps
        of_step *= self.backend.dp_size
        start = int(np.searchsorted(view.ends, store.num_rows))
        if store.num_rows:
            size = store.meta["vocab_size"]
            expect(
                size == self._num_tokens,
                f"{store.folder} has a teacher's rows over {size:,} token ids, and this run adds "
                f"rows over {self._num_tokens:,}: set teacher_cache to another folder",
            )
            self._check_kept(store, view, min(of_step, start))
        while not store.is_complete:
            stop = int(np.searchsorted(view.ends, view.ends[start] + PART_ROWS, side="right")) - 1
            if stop < len(view):  # whole steps, and one at least
                steps = max((stop - start) // of_step, 1)
                stop = min(start + steps * of_step, len(view))
            tokens, logps = np.split(self._score(view, start, stop), [self._k], 1)
            add = functools.partial(store.add, tokens, logps, self._num_tokens)
            store.meta = parallel.on_main(add, CheckpointError)
            total = store.identity["rows"]
            self.report.print(f"teacher: {store.num_rows:,} of {total:,} tokens in {store.folder}")
            self.stop_after_signal(f"in the teacher's pass; it goes on from {store.folder}")
            start = stop

    def _check_kept(self, store: TopKStore, view: WithRows, stop: int) -> None:
        """CheckpointError if the teacher gives other log-probabilities to the first samples."""
        now = self._score(view, 0, stop)[:, self._k :]
        kept = parallel.on_main(lambda: store.read(len(now))["logps"].astype(np.float32))
        if not self._is_same(now, kept):
            raise CheckpointError(
                f"the rows in {store.folder} are of another teacher: set it back, or "
                "teacher_cache: <another folder>"
            )

    def _is_same(self, logps, others) -> bool:
        """True if log-probabilities differ by rounding only."""
        share = 1e-3
        if self.args.bf16 or self.args.fp16 or self.train_config.cache_dtype == "float16":
            share = 3e-2
        return bool(np.allclose(logps, others, rtol=share, atol=share))

    def _store_of(self, view, num_rows: int) -> TopKStore:
        """The store of a data set; of its files the main rank alone reads any."""
        config = self.train_config
        cache_dir = cache_folder(config)
        identity: dict[str, Any] = {
            "data": fingerprint_of(view),
            "rows": num_rows,
            "top_k": config.top_k,
            "temperature": config.temperature,
            "dtype": config.cache_dtype,
        }
        if config.teacher is not None:
            folder = str(resolve_folder(config.teacher))
            teacher = [teacher_identity(folder, cache_dir), self.backend.precision]
            identity["teacher"] = hash_of(teacher)
        name = hash_of([identity.get("teacher"), config.top_k, config.temperature])[:32]
        root = config.cache or cache_dir / "teacher" / name
        return TopKStore(Path(root, identity["data"]), identity)

    def _rows_of(self, view) -> WithRows:
        """The samples with the numbers of their rows, which are on disk. Collective."""
        counts = trained_counts(view)
        num_rows = int(counts.sum())
        store = self._store_of(view, num_rows)
        same = [first for first, other in self._stores if other.folder == store.folder]
        if same:
            return WithRows(view, counts, same[0])
        store.meta = parallel.on_main(lambda: store.load(self.report.print), CheckpointError)
        if store.is_complete:
            self.report.print(f"teacher: {num_rows:,} tokens from {store.folder}")
        elif self._given_teacher is None:
            raise CheckpointError(
                f"{store.folder} has {store.num_rows:,} of the teacher's rows for {num_rows:,} "
                "trained tokens: set teacher_model_name_or_path, and it computes the others; rows "
                "of other data, or of another tokenizer or cutoff_len, are in other folders"
            )
        else:
            self._write(store, WithRows(view, counts))
        self._check_vocabulary(store)
        words = "the teacher's rows cannot be read"
        parallel.on_all(lambda: len(store.rows), CheckpointError, words)
        first = sum(other.identity["rows"] for _, other in self._stores)
        self._stores.append((first, store))
        return WithRows(view, counts, first)

    def _check_vocabulary(self, store: TopKStore) -> None:
        """CheckpointError for rows of more tokens than the student has, or than other rows."""
        size = store.meta["vocab_size"] or self.limits.vocab_size  # no rows
        is_first = not self._stores and self._chunks is None
        fits = size <= self.limits.vocab_size if is_first else size == self.limits.vocab_size
        if not fits:
            raise CheckpointError(
                f"the teacher's rows in {store.folder} are of {size:,} tokens, and this run needs "
                f"those of {self.limits.vocab_size:,}: set teacher_cache to another folder"
            )
        self.limits = self.limits.within(Limits(vocab_size=size))

    def _prepare_samples(self, samples):
        """The samples with the numbers of a cached teacher's rows. Collective."""
        if not self._k or isinstance(samples, WithRows):
            return samples
        expect(
            not isinstance(samples, TokenStream),
            "a cached teacher scores the samples before training, and a stream is read once: leave "
            "teacher_top_k out, or set streaming: false",
        )
        return self._rows_of(samples)

    # -- around the loop

    def _prepare_datasets(self, *names: str) -> None:
        """Load a resident teacher too, before the summary, which counts its work; let go of one
        that was loaded for its rows. Collective."""
        super()._prepare_datasets(*names)
        if self._k:
            self._chunks = None
        elif self._chunks is None:
            self._chunks = self._load_teacher()

    def objective_facts(self) -> dict:
        """The first rows of a cached teacher: a resumed run must have the same."""
        view = samples_of(self.train_dataset)
        if not isinstance(view, WithRows):
            return {}
        rows = self._read(np.arange(min(4, view.ends[-1])) + view.first)
        return {"teacher": rows["logps"].astype(float).tolist()}

    def check_objective(self, facts: dict, folder: Path) -> None:
        written = facts.get("teacher")
        now = self.objective_facts().get("teacher")
        if written and now and not self._is_same(np.array(now), np.array(written)):
            raise CheckpointError(
                f"{folder} was trained with another teacher, or other keys of it: set "
                "teacher_model_name_or_path back to go on"
            )
