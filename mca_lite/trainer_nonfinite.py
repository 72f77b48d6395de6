"""Non-finite numbers: kept out of the weights, traced to a cause, and the run stopped.

The gradient of a non-finite loss is made NaN, so it reaches the gradient norm, which every rank
reads in each step anyway: good steps get no further collective and no device sync. Once that
happens, time does not matter: ranks gather their losses, and unless nan_policy skips the update,
the micro-batches run forward again to find the layer, and the run ends with NotFiniteError (exit
code NOT_FINITE_EXIT_CODE on the command line)."""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch

from . import ckpt_folder, parallel
from .data_batches import FILLER, Packs
from .errors import UserError
from .model import VirtualModels
from .step import measure

NOT_FINITE_EXIT_CODE = 86  # exit code of a run stopped by non-finite numbers
_SHOWN = 3  # how many micro-batches a message names


class NotFiniteError(UserError, ArithmeticError):
    """Raised on every rank, with the same text, to stop a run because a loss, gradient or weight is
    not finite, or because too many updates were skipped."""

    exit_code = NOT_FINITE_EXIT_CODE
    same_on_all_ranks = True


class BadLoss(NamedTuple):
    """A micro-batch with a non-finite loss. replica, rank: the data-parallel replica, and the
    global rank, that ran it. samples: indices of its samples in the dataset, or for a stream row
    numbers."""

    replica: int
    micro_batch: int
    rank: int
    loss: float
    samples: list[int]

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4g} on rank {self.rank} (data parallel replica {self.replica}), "
            f"micro-batch {self.micro_batch}, samples {', '.join(map(str, self.samples))}"
        )


_NOTHING_LEARNED = (
    "warning: the gradient norm of the first step is 0, so it trained nothing: check "
    "the loss's keys (weights, temperature, pref_beta), the labels, and which weights are trained"
)


class FiniteGuard:
    """Watches a trainer's steps for non-finite numbers, if check_for_nan_in_loss_and_grad is set.
    All ranks must call its methods together."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.args = trainer.args
        self.is_on = trainer.args.check_for_nan_in_loss_and_grad
        self.start_run()

    def start_run(self) -> None:
        """Reset the counts of skipped steps, for a new run."""
        self.steps = 0
        self.dropped = 0  # steps without an update because of non-finite numbers
        self.too_large = 0  # consecutive steps above grad_norm_skip_threshold
        self._losses: list[torch.Tensor] = []  # losses of this step's micro-batches, on the device

    # -- the fast path

    def start_step(self, micro_batches: list[dict[str, Any]]) -> None:
        """Begin a step: remember its micro-batches, in which a cause is sought if a number is not
        finite."""
        state = self.trainer.state
        self._micro_batches = micro_batches
        self._losses = []
        self.step = state.global_step + 1
        self.position = state.position

    def mark(self, loss_func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a loss function so that a non-finite loss shows in the gradient norm: its gradient
        becomes NaN, since an infinite loss may have finite gradients. Finite losses do not change.
        loss_func(output) -> (loss sum, count, metrics). If the guard is off, loss_func itself is
        returned."""
        if not self.is_on:
            return loss_func

        def marked(output: Any) -> tuple[Any, ...]:
            total, count, metrics = loss_func(output)
            if total.requires_grad:
                self._losses.append(total.detach())
                total = total * (
                    1 + 0 * total.detach()
                )  # 0 * inf is NaN; otherwise the factor is 1
            return total, count, metrics

        return marked

    def after_step(self, skipped: int, grad_norm: float, metrics: Any) -> tuple[Any, float]:
        """Check a step, after its update was made or skipped -> (metrics, gradient norm) to log.
        skipped: not 0 if there was no update. metrics: of each micro-batch. NotFiniteError if the
        run must stop.

        If nan_policy: skip leaves out an update because of non-finite numbers, the returned metrics
        lack this rank's micro-batches with a non-finite loss, and the returned norm is 0. An
        overflow of fp16's loss scale with finite losses is ignored. After an update, old
        checkpoints are pruned."""
        self.steps += 1
        if self.steps == 1 and grad_norm == 0 and not skipped:
            self.trainer.report.print(_NOTHING_LEARNED)
        if not skipped:
            self.too_large = 0
            self.trainer.checkpoints.prune()
        if not skipped or not self.is_on:
            return metrics, grad_norm
        losses = [float(loss) for loss in self._losses]  # stages before the last have none
        found = self._bad_losses(losses)
        if not found and math.isfinite(grad_norm):
            self._count_large(grad_norm)
            return metrics, grad_norm
        self.dropped += 1
        causes = "; ".join(map(str, found[:_SHOWN]))
        if not found:
            causes = f"the gradient norm is {grad_norm}, and the losses are finite"
        what = f"step {self.step}: {causes}"
        limit = self.args.nan_skip_limit
        advice = "look at these samples, lower learning_rate, or set nan_policy: skip"
        if self.args.nan_policy == "skip":
            if self.dropped <= limit:
                self.trainer.report.print(
                    f"warning: {what}: its update is left out ({self.dropped} of at most {limit}, "
                    "nan_skip_limit)"
                )
                pairs = zip(metrics, losses, strict=False)
                return [of_batch for of_batch, loss in pairs if math.isfinite(loss)], 0.0
            advice = f"{limit} updates were left out before (nan_skip_limit)"
        where = self._first_cause(bool(found))
        self.stop(
            f"{what}. The first non-finite number: {where}. The update was not made: {advice}"
        )

    def _count_large(self, grad_norm: float) -> None:
        """Count a skipped step whose gradient norm exceeds grad_norm_skip_threshold. NotFiniteError
        after more than nan_skip_limit of them without an update in between."""
        threshold = self.args.grad_norm_skip_threshold
        if threshold is None or grad_norm <= threshold:
            return
        limit = self.args.nan_skip_limit
        self.too_large += 1
        what = (
            f"step {self.step}: the gradient norm is {grad_norm:.4g}, above {threshold:g} "
            "(grad_norm_skip_threshold)"
        )
        if self.too_large > limit:
            self.stop(
                f"{what}, as in the {limit} steps before (nan_skip_limit): raise the threshold, or "
                "lower learning_rate"
            )
        self.trainer.report.print(
            f"warning: {what}: its update is left out ({self.too_large} of at most {limit} in a "
            "row, nan_skip_limit)"
        )

    # -- beside the steps

    def check_weights(self, when: str, model: Any = None) -> None:
        """Raise NotFiniteError on every rank if a weight on any rank is not finite; nothing if the
        guard is off. when: the moment, for the message. model: None for the trainer's.
        Collective."""
        if not self.is_on:
            return
        bad = _first_bad(_named(model or self.trainer.model, "parameters"))
        own = [(chunk, parallel.rank(), name) for chunk, name in bad]
        found = itertools.chain(*parallel.gather(own))
        for _, rank, name in sorted(found)[:1]:
            self.stop(f"{when}: the weight {name} is not finite (rank {rank})")

    def check_evaluation(self, metrics: dict[str, float]) -> None:
        """Raise NotFiniteError if the guard is on and eval_loss in these metrics is not finite."""
        loss = metrics.get("eval_loss", 0.0)
        if self.is_on and not math.isfinite(loss):
            self.stop(
                f"the evaluation after step {self.trainer.state.global_step} gave eval_loss {loss}"
            )

    def end_run(self) -> None:
        """Raise NotFiniteError if the update of every step was skipped, or, with the guard on, if
        the last update left non-finite weights. Otherwise prune checkpoints once more."""
        # the scheduler's count includes the steps before a resume
        if self.steps and not self.trainer.lr_scheduler.num_steps:
            self.stop(
                f"every update of {self.steps} steps was skipped, nothing was trained: lower "
                "learning_rate, look at the data, or set bf16: true instead of fp16, or a lower "
                "initial_loss_scale, or a higher grad_norm_skip_threshold"
            )
        self.check_weights("after the last step")
        self.trainer.checkpoints.prune()

    def stop(self, text: str) -> NoReturn:
        """Finish a pending checkpoint, and raise NotFiniteError with `text` and the newest
        checkpoint's name, if there is one."""
        checkpoints = self.trainer.checkpoints
        checkpoints.finish()
        there = ckpt_folder.list_checkpoints(self.args.output_dir)
        newest = f"; the newest checkpoint is {there[-1]}" if there else ""
        if checkpoints.unproven is not None and len(there) > 1:
            newest += f", from which no good step was made, and the one before {there[-2].name}"
        raise NotFiniteError(f"{text}{newest}; nothing was exported")

    # -- the cause

    def _bad_losses(self, losses: list[float]) -> list[BadLoss]:
        """Micro-batches with a non-finite loss, from all ranks, in order. If several ranks share a
        micro-batch, it is named once. losses: of this rank's micro-batches. Collective."""
        replica = self.trainer.backend.dp_rank
        own = [
            BadLoss(replica, number, parallel.rank(), loss, self.samples_of(number))
            for number, loss in enumerate(losses)
            if not math.isfinite(loss)
        ]
        every = sorted(itertools.chain(*parallel.gather(own)), reverse=True)
        # sorted from high to low: the entry of the lowest rank replaces the others
        return sorted({(bad.replica, bad.micro_batch): bad for bad in every}.values())

    def samples_of(self, number: int) -> list[int]:
        """The samples in a micro-batch of this rank's current step, as indices in the dataset; for
        a stream, as row numbers, counted from the run's first row. number: the micro-batch's index
        in the step."""
        dataset = self.trainer.train_dataset
        plan = self.trainer.batch_plan
        chosen = dict(enumerate(plan.step(*divmod(self.position, plan.steps_per_epoch))))
        # filler micro-batches come after the chosen ones
        rows = [row for row in chosen.get(number, ()) if row != FILLER]
        if not isinstance(dataset, Packs):
            return rows
        return [int(sample) for sample in itertools.chain(*(dataset.packs[row] for row in rows))]

    def _first_cause(self, has_bad_loss: bool) -> str:
        """Text that names the first non-finite tensor in the order of computation: a weight, else a
        layer's output, else the loss (if has_bad_loss), else a gradient, else the gradient's norm.
        Runs the step's micro-batches forward again. Collective."""
        rank = parallel.rank()
        parameters = list(_named(self.trainer.model, "parameters"))
        # reversed, because backward goes from the last parameter to the first. main_grad is
        # megatron's gradient, grad is torch's
        gradients = [
            (chunk, name, getattr(p, "main_grad", p.grad)) for chunk, name, p in parameters[::-1]
        ]
        # ordered by (kind, micro-batch, chunk, rank): the first cause is the smallest, as ranks of
        # later pipeline stages have higher numbers
        own = [(0, 0, chunk, rank, f"the weight {name}") for chunk, name in _first_bad(parameters)]
        for (number, chunk), name in self._bad_outputs().items():
            own.append((1, number, chunk, rank, f"the output of {name or 'the model'}"))
        if has_bad_loss:
            own.append((2, 0, 0, rank, "the loss itself"))
        for chunk, name in _first_bad(gradients):
            own.append((3, 0, -chunk, -rank, f"the gradient of {name}"))
        own.append((4, 0, 0, rank, "the gradient's norm, a sum of finite numbers"))
        return min(map(min, parallel.gather(own)))[-1]

    def _bad_outputs(self) -> dict[tuple[int, int], str]:
        """Run the step's micro-batches forward again -> {(micro-batch, chunk): name of the first
        module on this rank whose output is not finite}. Collective."""
        trainer = self.trainer
        backend = trainer.backend
        first: dict[tuple[int, int], str] = {}

        def look(
            place: tuple[int, int], name: str, module: torch.nn.Module, inputs: Any, output: Any
        ) -> None:
            if not _is_finite(output):
                first.setdefault(place, name)

        for number, batch in enumerate(self._micro_batches):
            same = [batch] * backend.micro_batch_multiple
            with contextlib.ExitStack() as hooks:
                for chunk, name, module in _named(trainer.model, "modules"):
                    hook = functools.partial(look, (number, chunk), name)
                    hooks.enter_context(module.register_forward_hook(hook))
                measure(backend, trainer.forward_step, same)
        return first


# -- tensors and modules of a model, chunk by chunk


def _name_in_whole_model(chunk: torch.nn.Module, name: str) -> str:
    """A parameter's or module's name with the layer's index in the whole model instead of in this
    pipeline chunk: decoder.layers.0.mlp becomes decoder.layers.12.mlp."""
    match = re.match(r"(.*?layers)\.(\d+)(?=\.|$)", name)
    number = getattr(chunk.get_submodule(match[0]), "layer_number", None) if match else None
    if number is None:
        return name
    return f"{match[1]}.{number - 1}{name[match.end() :]}"


def _named(model: Any, kind: str) -> Iterator[tuple[int, str, Any]]:
    """List a model's parameters or modules on this rank: yield (chunk index, name in the whole
    model, parameter or module). kind: "parameters" or "modules". A chunk is a part of the model, of
    which a rank has several with virtual pipeline stages."""
    for number, chunk in enumerate(model if isinstance(model, VirtualModels) else [model]):
        for name, part in getattr(chunk, f"named_{kind}")():
            yield number, _name_in_whole_model(chunk, name), part


@torch.no_grad()
def _first_bad(tensors: Iterable[tuple[int, str, torch.Tensor | None]]) -> list[tuple[int, str]]:
    """Find the first tensor that has a non-finite value -> [(its chunk index, its name)]; [] if
    there is none. tensors: (chunk index, name, tensor) each; a tensor may be None. At most one
    device sync."""
    known = [one for one in tensors if one[-1] is not None and one[-1].numel()]
    if not known:
        return []
    # the largest absolute value: no sum overflows
    largest = torch._foreach_norm([tensor for _, _, tensor in known], math.inf)
    finite = torch.stack([value.float() for value in largest]).isfinite().tolist()
    pairs = zip(known, finite, strict=True)
    return [(chunk, name) for (chunk, name, _), good in pairs if not good][:1]


def _is_finite(output: Any) -> bool:
    """True if a module's output, a tensor or a tuple or list with tensors, is finite; True for any
    other output."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    return all(part.isfinite().all() for part in parts if isinstance(part, torch.Tensor))
