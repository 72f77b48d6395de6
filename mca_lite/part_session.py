"""Session: log-probabilities, gradients, updates and weights of a model, for a training loop
outside this package.

A sample is a shifted document: {"input_ids": [n], "labels": [n]}, where labels[t] is the target of
position t, or -100 for no loss. Optional columns, each one number or [n], ignored where labels are
-100: advantage, old_logp, ref_logp, sampler_weight; temperature, which divides the logits and
overrides the loss's parameter; reward, which is only a metric. Letters: N samples in a call, n
tokens in a sample, [b, s] a micro-batch on this rank.

Calls add up the gradients of sums; optim_step divides once, by a count over the whole update. So a
loss has the same gradient however its samples are split into calls. Every rank calls each method
with the same samples and gets the same results; only with own=True do data-parallel replicas pass
different samples."""

import contextlib
import functools
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from . import ckpt, parallel
from .backend_megatron import MegatronBackend
from .backend_torch import TorchBackend
from .batch import Batch
from .data_batches import (
    BatchPlan,
    Collator,
    Documents,
    Limits,
    best_fit,
    check_batch,
    documents_of,
    make_loader,
)
from .errors import expect
from .files import IGNORE_INDEX, PathLike
from .model import VirtualModels
from .part_session_loss import GivenGradient, Plain, SampleLoss, WithEntropy, check_dropout, loss_of
from .part_session_weights import Weights
from .step import arrange_step, forward_step, inputs_of, measure, new_numbers, scattered
from .tables import SESSION_COLUMNS, function_of, is_of_inputs
from .trainer_events import Phases, check_given

Samples: TypeAlias = Sequence[Mapping[str, Any]]  # columns by name, or documents of them


class Output(NamedTuple):
    """Results of a Session's forward pass.

    logps: for each sample given to this rank, in order, float32 [n] on the CPU: the log-probability
    of each label, 0 where there is no label.
    sums: {metric: (sum, count)} over all ranks; {} from forward_backward_custom.
    metrics: {metric: sum / count}. A metric with a count of 0 is left out, but "loss" is then 0.
    From forward_backward_custom: "loss" and the metrics that the caller's function returned."""

    logps: list[torch.Tensor]
    metrics: dict[str, float]
    sums: dict[str, tuple[float, float]]


class Step(NamedTuple):
    """Results of an update. grad_norm: gradient norm after the division by `denominator`, before
    clipping; 0 after an overflow. skipped: True if the weights did not change, because the norm was
    not finite or too large, or fp16's loss scale overflowed. denominator: what the gradient was
    divided by."""

    grad_norm: float
    skipped: bool
    denominator: float


_ALL = ("model", "optimizer", "grad")  # the kinds of tensors that a Session can move


# -- samples


def _documents(samples: Samples, loss: Any, limits: Limits, refuses_more: bool) -> Documents:
    """Check a call's samples, and return each as a document, {column: tensor}. Columns of
    SESSION_COLUMNS that the loss does not read are left out; with refuses_more they are an error.
    limits: the model's, such as vocabulary size. ValueError for invalid samples, or if a column
    that the loss reads is in some samples only."""
    expect(len(samples) > 0, "the call has no samples: expected at least one")
    documents = []
    for number, sample in enumerate(samples):
        try:
            documents.append(_document(sample, loss, limits, refuses_more))
        except ValueError as error:
            raise ValueError(f"sample {number} of the call: {error}") from None
    for name in loss.columns:
        lacking = [number for number, one in enumerate(documents) if name not in one]
        expect(
            len(lacking) in (0, len(documents)),
            f"{name}: samples {lacking} of the call have none, and others have: set it in every "
            "sample, or in none",
        )
    return documents


def _document(
    sample: Mapping[str, Any], loss: Any, limits: Limits, refuses_more: bool
) -> dict[str, Any]:
    [given, *others] = documents_of(sample)
    expect(not others, "it has several documents: expected one, {input_ids, labels}")
    kept = {name: given[name] for name in given if given[name] is not None}
    unread = [name for name in SESSION_COLUMNS if name in kept and name not in loss.columns]
    expect(
        not (refuses_more and unread),
        f"{', '.join(unread)} has no effect on the loss {loss.name}: remove it, or choose another",
    )
    kept = {name: kept[name] for name in kept if name not in unread}
    batch = Collator(0)([kept])
    check_batch(batch, False, limits)
    row = {name: x if is_of_inputs(name) else x[0] for name, x in batch.items()}
    row = with_columns(row, loss)
    row.pop("attention_mask")  # a row's collator makes it, with the documents' indices
    return row


def with_columns(row: dict[str, Any], loss: Any) -> dict[str, Any]:
    """A copy of a document or batch, with the columns that the loss reads set to 0 where there is
    no label. row: {column: tensor}. loss: the loss, such as a CrossEntropy. ValueError if a column
    that the loss requires is missing, if a value at a label is not finite, or a temperature there
    is not above 0."""
    row = dict(row)
    is_trained = row["labels"] != IGNORE_INDEX
    for name in loss.columns:
        if name not in row:
            expect(name not in loss.required, f"{loss.name} needs {name}, and it has none")
            continue
        values = row[name]
        is_wrong = ~values.isfinite() & is_trained
        kind = "finite numbers"
        if name == "temperature":
            is_wrong |= (values <= 0) & is_trained
            kind = "finite numbers above 0"
        place = is_wrong.nonzero()[:1].flatten().tolist()
        expect(
            not place,
            f"{name} is {values[is_wrong][:1].tolist()} at position {place}, which has a label: "
            f"expected {kind} there",
        )
        row[name] = values.where(is_trained, 0.0)
    return row


def _numbered(documents: Documents, first: int) -> np.ndarray:
    """Number the trained tokens of N documents, in order, from `first`: set each document's column
    token_number, in place (-1: not trained). Returns int64 [N + 1]: the number of each document's
    first trained token, then the next free number."""
    ends = [first]
    for document in documents:
        is_trained = document["labels"] != IGNORE_INDEX
        numbers = ends[-1] + is_trained.cumsum(0) - 1
        document["token_number"] = torch.where(is_trained, numbers, -1)
        ends.append(ends[-1] + int(is_trained.sum()))
    return np.array(ends)


class _Share(NamedTuple):
    """Facts about a rank's part of a call, compared over all ranks. replica: data-parallel rank
    whose samples these are; 0 if all ranks have the same samples. call: the other arguments as
    text. checksum: of the samples' columns for text. tokens: number of trained tokens. num_batches:
    number of micro-batches on the rank."""

    replica: int
    call: str
    checksum: int
    tokens: int
    num_batches: int


def _checksum(documents: Documents) -> int:
    found = 0
    for document in documents:
        for name in sorted(document):
            if is_of_inputs(name):  # later pipeline stages have no pixels
                continue
            found = zlib.crc32(document[name].contiguous().numpy().tobytes(), found)
    return found


class _Call(NamedTuple):
    """A call's checked samples, and what all ranks agreed on. documents: the samples given to this
    rank. rows: the documents of each row. ends: int64 [samples + 1], the number of each sample's
    first trained token, then the next number. tokens: number of trained tokens on all replicas.
    num_batches: the largest number of micro-batches on a rank."""

    documents: Documents
    rows: list[Documents]
    ends: np.ndarray
    tokens: int
    num_batches: int


# -- the session


class Session:
    """A model in training, driven by another program's calls, for example a reinforcement-learning
    loop.

    model: VirtualModels (megatron backend) or a transformers model (torch backend), with or without
    adapters.
    args: TrainingArguments; their learning-rate schedule has no effect. ValueError if
    calculate_per_token_loss is false.
    tokenizer: gives the padding token. If it is None or has no padding token, token 0 pads.
    backend: replaces the one made for the model.
    cutoff_len: with sequence_packing, a micro-batch is one row of per_device_train_batch_size
    packs. Samples are put by best fit into packs of at most cutoff_len tokens; None: a pack is one
    sample.

    Call each method on every rank, with the same arguments; only with own=True may samples differ.
    No pass runs layers for multi-token prediction. They are frozen, with a warning: load the model
    again to train them. If `backend` is given they stay as they are, and ValueError is raised if a
    pass with gradients finds them trained."""

    def __init__(
        self,
        model: Any,
        args: Any,
        tokenizer: Any = None,
        backend: Any = None,
        cutoff_len: int | None = None,
    ) -> None:
        check_given(model, args)
        expect(
            args.calculate_per_token_loss,
            "calculate_per_token_loss: false: a Session adds the gradients of sums: set it to true",
        )
        if backend is None:
            _freeze_predictions(model)
            parallel.start_process_group(args.ddp_timeout)
            is_megatron = isinstance(model, VirtualModels)
            backend = (MegatronBackend if is_megatron else TorchBackend)(model, args)
        self.model = model
        self.args = args
        self.tokenizer = tokenizer
        self.cutoff_len = cutoff_len
        self.backend = backend
        backend.use_timers(Phases(waits_in_model=False).timer)
        backend.pad_token_id = getattr(tokenizer, "pad_token_id", None) or 0
        backend.expect_weighted_losses()
        self._limits = Limits.of(backend.hf_config or {})
        self._counts: list[tuple[str, float]] = []  # (counts, times) of the pending calls' losses
        # True after a call with last=True, or a pass that failed, until the update or discard()
        self._is_closed = False

    # -- passes

    def log_probs(
        self,
        samples: Samples,
        temperature: float = 1.0,
        base: bool = False,
        entropy: bool = False,
        own: bool = False,
    ) -> list[torch.Tensor]:
        """Log-probabilities of the labels, without dropout or gradients: float32 [n] for each
        sample, in order, 0 where there is no label, on the CPU of every rank. Collective.

        temperature: divides the logits; a sample's column "temperature" overrides it.
        base: switch adapters off. ValueError if whole weights are trained, as with modules_to_save.
        entropy: return [n, 2], with the entropy of the next-token distribution as the second
        number.
        own: each data-parallel replica passes its own samples (at least one), the same on its
        ranks, and gets only their results. ValueError for invalid samples."""
        finetuning = self.backend.finetuning
        expect(
            not base or finetuning.can_be_off,
            "base=True: the weights of the model itself are in training, so that the model before "
            "it is gone: call log_probs() before the first update, and give it as ref_logp",
        )
        loss = (WithEntropy if entropy else Plain)(temperature=temperature)
        as_it_was = finetuning.without(self.model) if base else contextlib.nullcontext()
        with as_it_was:
            return self._run(samples, loss, False, own=own, refuses_more=False).logps

    def routes(self, samples: Samples) -> list[torch.Tensor]:
        """The experts that the model's routers choose: for each sample, in order, int16 [n, MoE
        layers, experts per token], on the CPU of every rank. Collective. In later calls, samples
        with this result as their column "routes" use these experts; this call ignores that column.
        ValueError if the model has no experts, or is a transformers model."""
        routes = function_of("part_routes:Routes")(self.backend, is_recording=True)
        without: Any = [
            [{k: one[k] for k in one if k != "routes"} for one in documents_of(sample)]
            for sample in samples
        ]
        self._run(without, Plain(), False, refuses_more=False, routes=routes)
        return routes.recorded()

    def forward(self, samples: Samples, loss: str = "cross_entropy", **numbers: Any) -> Output:
        """Compute a loss without gradients, in evaluation mode. Returns an Output. Collective.
        loss: a name in SESSION_LOSSES. numbers: the loss's parameters. ValueError for an unknown
        loss or parameter, and for invalid samples."""
        return self._run(samples, loss_of(loss, numbers), False)

    def forward_backward(
        self, samples: Samples, loss: str, last: bool = False, own: bool = False, **numbers: Any
    ) -> Output:
        """Compute a loss, and add its gradient, summed over the samples, for optim_step. Returns an
        Output. Collective.

        loss: a name in SESSION_LOSSES. numbers: the loss's parameters.
        last: True tells that no other call adds gradients before optim_step or discard; the
        backward pass may then already reduce the gradients over ranks.
        own: each data-parallel replica passes its own samples, as for log_probs; the sum then
        covers the samples of all replicas.
        ValueError for an unknown loss or parameter, for invalid samples, after a call with
        last=True or one whose pass failed, and for dropout with a loss that compares
        log-probabilities of two passes."""
        return self._run(samples, loss_of(loss, numbers), True, last, own)

    def forward_backward_custom(
        self, samples: Samples, function: Callable[..., Any], last: bool = False
    ) -> Output:
        """Add the gradient of a loss that your function computes from all log-probabilities.
        Returns an Output with "loss" and the function's metrics. Collective.

        function(samples, logps): returns (loss, {metric: number}), computed with torch on the CPU.
        logps: float32 [n] for each sample, from a first forward pass; a second one, with a backward
        pass, adds the gradient. optim_step does not divide this gradient by a count of tokens.
        last: as in forward_backward. ValueError if the loss is not a differentiable scalar, if a
        label's gradient is not finite, or if the model has dropout."""
        logps = [values.requires_grad_() for values in self.log_probs(samples)]
        loss, metrics = function(samples, logps)
        expect(
            isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1,
            f"the function gave {loss!r:.100} as its loss: expected a tensor of one number, "
            "computed from the log-probabilities",
        )
        loss.backward()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in logps]
        weighted = [
            {**_only_document(sample), "sampler_weight": -gradient}
            for sample, gradient in zip(samples, gradients, strict=True)
        ]
        row = GivenGradient(name="custom")
        found = self._run(weighted, row, True, last)
        return Output(found.logps, {"loss": float(loss.detach()), **metrics}, {})

    def _run(
        self,
        samples: Samples,
        loss: Any,
        trains: bool,
        last: bool = False,
        own: bool = False,
        refuses_more: bool = True,
        routes: Any = None,
    ) -> Output:
        """Check the samples and run a pass over them. loss: an instance of a class in
        SESSION_LOSSES. trains: add gradients. last, own: see forward_backward. refuses_more: refuse
        samples with columns that the loss does not read. routes: a part_routes.Routes that records.
        Collective."""
        expect(
            not (trains and self._is_closed),
            "forward_backward after last=True, or after a call that failed: the gradients are "
            "reduced already, or not whole: call optim_step, or discard",
        )
        self.backend.expect_here("a pass", *_ALL if trains else ("model",))
        if trains:
            check_dropout(self.model, self.backend.finetuning, loss)
            expect(
                not _trained_predictions(self.model),
                "layers for multi-token prediction are trained by this Session's backend, and have "
                "no part in its losses: freeze them before it is made, or set mtp_num_layers: 0",
            )
            self._need_optimizer()
        call = self._agreed(samples, loss, own, refuses_more, repr((loss, trains, last, own)))
        if routes is None and any("routes" in document for document in call.documents):
            routes = function_of("part_routes:Routes")(self.backend)
        if routes is not None:
            routes.take(call.documents)
        objective = SampleLoss(self.backend, self.args, loss, call.ends, routes, call.tokens)
        batches = self._batches(call.rows, own)
        batches = arrange_step(self.backend, objective, batches, call.num_batches)
        run = functools.partial(
            forward_step, self.backend, self.args, objective, to_inputs=self._inputs_of
        )
        with routes or contextlib.nullcontext():
            if trains:
                self.backend.train_mode(True)
                counts = [*self._counts, (loss.counts, loss.times)]
                self._counts = []
                self._is_closed = True  # if the pass fails
                found = self.backend.add_gradients(run, batches, last)
                self._counts = counts
                self._is_closed = last
            else:
                found = measure(self.backend, run, batches)
        width = (2,) if isinstance(loss, WithEntropy) else ()
        logps = self._gathered([metrics.pop("logps") for metrics in found], call, width)
        numbers = new_numbers(objective, found).over_ranks(self.backend)
        pairs = numbers.vector[: 2 * len(numbers.keys)].view(-1, 2).tolist()
        sums = dict(zip(numbers.keys, map(tuple, pairs), strict=True))
        return Output(logps, numbers.means(), sums)

    def _inputs_of(self, batch: Batch) -> dict[str, Any]:
        """Make the model's keyword arguments for a micro-batch, as inputs_of() of step.py does, but
        with plain labels, so that layers for multi-token prediction do not run."""
        inputs = inputs_of(self.backend, batch)
        inputs["labels"] = getattr(inputs["labels"], "labels", inputs["labels"])
        return inputs

    def _need_optimizer(self) -> None:
        if self.backend.optimizer is None:
            self.backend.create_optimizer()

    def _agreed(
        self, samples: Samples, loss: Any, own: bool, refuses_more: bool, call: str
    ) -> _Call:
        """Check this rank's samples, and compare the call with those of all other ranks. own: True
        if each replica passes its own samples. refuses_more: as in _run(). call: the call's other
        arguments as text. Collective. ValueError on every rank if a rank's samples are invalid, if
        the arguments differ, or if columns for text differ between ranks that must pass the same.
        """
        documents: Documents = []
        rows: list[Documents] = []
        replica = self.backend.dp_rank if own else 0

        def prepare() -> _Share:
            documents.extend(_documents(samples, loss, self._limits, refuses_more))
            if any("routes" in document for document in documents):
                function_of("part_routes:check")(self.backend, documents)
            rows.extend(self._rows(documents))
            trained = sum(int((one["labels"] != IGNORE_INDEX).sum()) for one in documents)
            num_batches = self._plan(rows, own).num_micro_batches(0)
            return _Share(replica, call, _checksum(documents), trained, num_batches)

        found = parallel.on_all(prepare, ValueError, "a call has wrong samples")
        shares = {share.replica: share for share in found}
        expect(
            len({*found}) == len(shares) and len({share.call for share in found}) == 1,
            "the ranks were given different samples, or another loss: expected the same call on "
            "each, with all samples of the whole batch, or with own=True those of its replica",
        )
        tokens = [shares[number].tokens for number in sorted(shares)]
        ends = _numbered(documents, sum(tokens[:replica]))
        num_batches = max(share.num_batches for share in found)
        return _Call(documents, rows, ends, sum(tokens), num_batches)

    def _rows(self, documents: Documents) -> list[Documents]:
        """Assign documents to rows -> the documents of each row. Normally a row has one document;
        with sequence_packing and cutoff_len rows are filled by best fit, up to cutoff_len tokens.
        ValueError if a document is longer than that."""
        if not self.args.sequence_packing or self.cutoff_len is None:
            return [[document] for document in documents]
        lengths = np.array([len(one["labels"]) for one in documents])
        return [[documents[i] for i in pack] for pack in best_fit(lengths, self.cutoff_len)]

    def _plan(self, rows: list[Documents], own: bool) -> BatchPlan:
        """Plan the call as one step: a BatchPlan, which assigns rows to this rank's micro-batches,
        rows of similar length together. rows: the documents of each row. own: True if these rows
        are this replica's alone; False: data-parallel ranks share them."""
        size = self.args.per_device_train_batch_size
        rank, ranks = (0, 1) if own else (self.backend.dp_rank, self.backend.dp_size)
        return BatchPlan(
            len(rows),
            size,
            math.ceil(len(rows) / (size * ranks)),
            rank,
            ranks,
            seed=0,
            shuffle=False,
            costs=np.array([sum(len(one["labels"]) for one in row) for row in rows], np.float64),
        )

    def _batches(self, rows: list[Documents], own: bool) -> list[Batch]:
        """Collate the micro-batches that this rank computes. rows: the documents of each row. own:
        True if these rows are this replica's alone; False: data-parallel ranks share them."""
        collate = Collator(self.backend.pad_token_id)
        return list(make_loader(rows, collate, self._plan(rows, own), num_epochs=1))

    def _gathered(
        self, found: list[tuple[Any, ...]], call: _Call, width: tuple[Any, ...]
    ) -> list[torch.Tensor]:
        """Collect the per-token results of a pass from all ranks -> for each sample given to this
        rank float32 [n, *width] on the CPU, 0 where there is no label. found: this rank's (token
        numbers, results) of each micro-batch. width: shape of one token's result, () or (2,).
        Collective."""
        zeros = torch.zeros(call.tokens, *width, device=parallel.device())
        first, *_, end = call.ends.tolist()
        results = scattered(self.backend, found, zeros)[first:end]
        parts = results.split(np.diff(call.ends).tolist())
        rows = []
        for document, part in zip(call.documents, parts, strict=True):
            is_trained = document["labels"] != IGNORE_INDEX
            row = torch.zeros(len(is_trained), *width)
            row[is_trained] = part
            rows.append(row)
        return rows

    # -- updates

    def optim_step(
        self,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
        denominator: float | None = None,
    ) -> Step:
        """Divide the gradients added since the last update, clip them, and update the weights.
        Returns a Step. Collective.

        Arguments that are None, except denominator, come from args. max_grad_norm 0 or inf: no
        clipping. denominator: the divisor, of the routers' balancing losses too; None: the count
        that the losses define, over all samples and ranks. ValueError without added gradients; if
        their losses divide by different counts, and denominator is None; if balancing losses are
        on, and the losses divide by different counts, or count "one" in several calls or with a
        denominator; if ranks have different arguments; and for numbers out of range."""
        counts = set(self._counts)
        expect(counts, "optim_step without gradients: call forward_backward first")
        words = sorted(f"{count} times {times:g}" for count, times in counts)
        expect(
            len(counts) == 1 or denominator is not None,
            f"the calls of this update divide by different counts, {', '.join(words)}: one update "
            "has one denominator: divide in the samples, and give denominator=1",
        )
        ones = [kind for kind, _ in self._counts].count("one")
        has_weight = len(counts) == 1 and (not ones or (ones == 1 and denominator in (None, 1)))
        expect(
            has_weight or not self._balances(),
            f"the routers' balancing losses have no weight beside {len(self._counts)} calls that "
            f"divide by {', '.join(words)}, with denominator {denominator}: make one call whose "
            "loss is a mean, or set moe_aux_loss_coeff and moe_z_loss_coeff to 0",
        )
        expect(
            denominator is None or denominator > 0,
            f"denominator: expected a number above 0, got {denominator}",
        )
        given = repr((lr, betas, eps, weight_decay, max_grad_norm, denominator))
        expect(
            len(set(parallel.gather(given))) == 1,
            f"optim_step{given}: another rank was given other arguments: expected the same ones, "
            "and as denominator the count over all replicas",
        )
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in (numbers | {"max_grad_norm": max_grad_norm}).items():
            if value is None or (name == "max_grad_norm" and value == math.inf):
                continue
            is_in = not isinstance(value, str) and 0 <= value < math.inf
            expect(is_in, f"{name}: expected a number of 0 or more, got {value!r}")
        are_in = betas is None or [0 <= beta < 1 for beta in betas] == [True, True]
        expect(are_in, f"betas: expected two numbers from 0 to below 1, got {betas}")
        [(count, times), *_] = counts
        if count == "one" and denominator is None:
            denominator = 1.0
        args = self.args
        self._set_groups(
            lr=_first(lr, args.learning_rate),
            betas=_first(betas, (args.adam_beta1, args.adam_beta2)),
            eps=_first(eps, args.adam_epsilon),
            weight_decay=_first(weight_decay, args.weight_decay),
        )
        self.backend.clip_at(_first(max_grad_norm, args.max_grad_norm))
        divisor = self.backend.finish_gradients(denominator, times)
        self._counts = []
        self._is_closed = False
        updated, grad_norm, _ = self.backend.step()
        return Step(grad_norm, not updated, float(divisor))

    def _balances(self) -> bool:
        """True if the model's routers add balancing losses."""
        return self.backend.statistics_of_routers is not None and self.backend.losses_of_routers.on

    def _set_groups(self, **numbers: Any) -> None:
        """Set numbers of the optimizer for the coming update, such as lr=1e-5. In a parameter group
        only keys that it has are changed, except weight_decay: every group gets it, multiplied by
        the group's wd_mult (1 if it has none)."""
        for group in self.backend.optimizer.param_groups:
            group.update({name: value for name, value in numbers.items() if name in group})
            group["weight_decay"] = numbers["weight_decay"] * group.get("wd_mult", 1.0)

    # -- files

    def save(self, folder: PathLike, with_optimizer: bool = True) -> None:
        """Write a checkpoint of the weights (or adapters) and, if with_optimizer, of the
        optimizer's state. It loads in other parallel layouts too. Collective. ValueError if
        gradients wait for optim_step, or if tensors are in host memory (see `to`)."""
        expect(not self._counts, "save with pending gradients: call optim_step or discard first")
        self.backend.expect_here("save", *_ALL)
        self._need_optimizer()
        ckpt.save_model(folder, self.backend, with_optimizer)

    def load(self, folder: PathLike, with_optimizer: bool = True) -> None:
        """Load a checkpoint that save() wrote. Added gradients are discarded; fp16's loss scale
        stays. Collective. CheckpointError if the checkpoint cannot be read, lacks the optimizer's
        state that with_optimizer asks for, or belongs to another model. ValueError if its adapters
        do not fit, or if tensors are in host memory."""
        self.discard()
        self.backend.expect_here("load", *_ALL)
        self._need_optimizer()
        ckpt.load_model(folder, self.backend, with_optimizer)

    def weights(self, adapters: str = "merged") -> Weights:
        """The model's current whole weights, to iterate over, for example for a sampler: see
        Weights. adapters: "merged" into the weights, "without" them, or "only" them, with the
        modules trained whole. ValueError for another word, and for "only" if the model has no
        adapters."""
        known = ("merged", "only", "without")
        expect(adapters in known, f"weights({adapters!r}): expected one of {', '.join(known)}")
        expect(
            adapters != "only" or not self.backend.finetuning.is_whole,
            'weights("only"): this model has no adapters: expected weights()',
        )
        return Weights(self.backend, adapters)

    def to(
        self,
        device: str | torch.device,
        model: bool = True,
        optimizer: bool = True,
        grad: bool = True,
    ) -> None:
        """Move tensors from the GPU to host memory (device "cpu"), so that another program can use
        the GPU, or back to this rank's device. model: weights. optimizer: master weights and
        states. grad: gradient buffers, which come back as zeros; the others come back bit for bit.

        Calls that need tensors in host memory raise ValueError. torch DDP's buckets stay on the
        GPU. ValueError if gradients wait for optim_step, and for another device."""
        expect(not self._counts, "to with pending gradients: call optim_step or discard first")
        given = dict(zip(_ALL, (model, optimizer, grad), strict=True))
        kinds = [kind for kind in _ALL if given[kind]]
        function_of("part_sleep:move")(self.backend, device, kinds)

    def discard(self) -> None:
        """Drop the gradients added since the last update, so that the next update starts from zero.
        An error in a backward pass that reduces gradients (last=True, with overlap_grad_reduce or
        torch DDP) cannot be put right: later passes then raise errors."""
        self.backend.discard_gradients()
        self._counts = []
        self._is_closed = False


def _freeze_predictions(model: Any) -> None:
    """Freeze a model's layers for multi-token prediction, in place, with a warning: they would have
    no gradient, and weight decay alone would change them."""
    trained = _trained_predictions(model)
    if trained:
        warnings.warn(
            "the model's layers for multi-token prediction have no part in a Session: they are "
            "frozen now; mtp_num_layers: 0 loads the model without them",
            stacklevel=3,
        )
    for parameter in trained:
        parameter.requires_grad_(False)


def _trained_predictions(model: Any) -> list[torch.nn.Parameter]:
    """The trained parameters in a model's layers for multi-token prediction."""
    layers = [chunk.mtp for chunk in model.children() if hasattr(chunk, "mtp")]
    return [p for layer in layers for p in layer.parameters() if p.requires_grad]


def _only_document(sample: Mapping[str, Any]) -> dict[str, Any]:
    [sample] = documents_of(sample)
    return {
        name: sample[name]
        for name in sample
        if name not in SESSION_COLUMNS or name == "temperature"
    }


def _first(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given
