"""Numbers that are not finite: found before an update, named, and the run stopped. Loss spikes:
named in a warning.

Steps that are good pay nothing for it. A micro-batch whose loss is not finite makes its own
gradient NaN, and that reaches the gradient norm, which every rank reads before the update anyway:
no collective and no waiting for a device is added. What follows then may take its time: the ranks
tell each other what they saw, the micro-batches run forward once more to find the layer, and the
run ends with NotFiniteError, which the command line answers with NOT_FINITE_EXIT_CODE.
"""

import contextlib
import functools
import io
import itertools
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from . import ckpt_folder, parallel
from .data_batches import FILLER, BatchPlan
from .data_packs import Packs
from .files import write_file
from .model import VirtualModels
from .trainer_events import finish_checkpoint, prune

NOT_FINITE_EXIT_CODE = 86  # of a run that numbers which are not finite have stopped
_SHOWN = 3  # micro-batches that a message names
# a loss is a spike where it is so many standard deviations above the mean of the losses before it
_SPIKE, _SPIKE_STEPS, _SPIKE_AFTER = 6.0, 100, 20


class NotFiniteError(ArithmeticError):
    """A loss, a gradient or a weight is not finite, or no update was made. Every rank raises it,
    with the same text."""

    exit_code = NOT_FINITE_EXIT_CODE


class BadLoss(NamedTuple):
    """A micro-batch whose loss is not finite. samples: their numbers in the dataset."""

    replica: int
    micro_batch: int
    rank: int
    loss: float
    samples: list[int]

    def __str__(self) -> str:
        samples, more = self.samples[:20], len(self.samples) - 20
        return (
            f"loss {self.loss:.4g} on rank {self.rank} (data parallel replica {self.replica}), "
            f"micro-batch {self.micro_batch}, samples {', '.join(map(str, samples))}"
            + (f" and {more} more" if more > 0 else "")
        )


class FiniteGuard:
    """Watches the steps of one trainer. All ranks must call its methods together."""

    def __init__(self, trainer):
        self.trainer, self.args = trainer, trainer.args
        self.is_on = trainer.args.check_for_nan_in_loss_and_grad
        self._start()

    def _start(self) -> None:
        self.steps = self.skipped = self.dropped = 0
        # named, and not pruned for: no step has been made from its weights yet
        self.unproven: Path | None = None
        self._losses: list[torch.Tensor] = []  # of this step's micro-batches, on the device
        self.is_spike = False
        self._usual: deque[float] = deque(maxlen=_SPIKE_STEPS)
        self._last_loss: tuple = ()  # of a step, and the metrics of its micro-batches

    # -- the fast path

    def start_run(self, plan: BatchPlan) -> None:
        """Begin anew, before the first step of a run in whose steps `plan` places the samples."""
        self._start()
        self.plan = plan
        self.check_weights("before the first step")

    def start_step(self) -> None:
        state = self.trainer.state
        self._losses, self.step, self.position = [], state.global_step + 1, state.position

    def mark(self, loss_func: Callable) -> Callable:
        """A loss_func that gives the same numbers; where its loss is not finite, the gradient is
        NaN too, which the gradient of an infinite loss need not be."""
        if not self.is_on:
            return loss_func

        def marked(output):
            total, count, metrics = loss_func(output)
            if total.requires_grad:
                self._losses.append(total.detach())
                total = total * (1 + 0 * total.detach())  # 0 * inf is NaN; the factor is 1 else
            return total, count, metrics

        return marked

    def after_step(self, skipped, grad_norm, metrics, micro_batches, seq_length):
        """What the step's numbers count -> (metrics, gradient norm), without those that are not
        finite where nan_policy: skip leaves the update out.

        NotFiniteError where the run stops. An overflow of fp16's loss scale, with finite losses,
        stays as it is.
        """
        self.steps, self.skipped = self.steps + 1, self.skipped + skipped
        if not skipped:
            self.prune_if_proven()
        if not skipped or not self.is_on:
            return metrics, grad_norm
        found = self._bad_losses()
        if not found and math.isfinite(grad_norm):
            return metrics, grad_norm
        self.dropped += 1
        what, args = f"step {self.step}: {_describe(found, grad_norm)}", self.args
        if args.nan_policy == "skip" and self.dropped <= args.nan_skip_limit:
            self.trainer.report.print(
                f"warning: {what}: its update is left out ({self.dropped} of at most "
                f"{args.nan_skip_limit}, nan_skip_limit)"
            )
            losses = zip(metrics, self._losses, strict=False)
            return [of for of, loss in losses if math.isfinite(loss)], 0.0
        self._stop_before_update(what, found, micro_batches, seq_length)

    def note_loss(self, loss: float | None, metrics: list[dict]) -> None:
        """Compare a step's mean loss over all ranks with those before it: `is_spike` says what came
        of it."""
        self.is_spike = False
        if loss is None or not math.isfinite(loss):
            return
        self._last_loss = loss, metrics
        if len(self._usual) >= _SPIKE_AFTER:
            mean, deviation = statistics.fmean(self._usual), statistics.pstdev(self._usual)
            # losses that hardly differ have no deviation to measure by
            self.is_spike = loss > mean + _SPIKE * max(deviation, 0.01 * abs(mean))
        self._usual.append(loss)

    def name_spike(self) -> None:
        """Warn of the last step's loss, with the samples of the micro-batches that had the highest.
        Collective."""
        loss, metrics = self._last_loss
        pairs = enumerate(of_batch["loss"].tolist() for of_batch in metrics)
        found = self._of_all_ranks({n: total / max(count, 1) for n, (total, count) in pairs})
        highest = sorted(found, key=lambda bad: -bad.loss)[:_SHOWN]
        before = list(self._usual)[:-1]
        usual = f"{statistics.fmean(before):.4g} +- {statistics.pstdev(before):.2g}"
        self.trainer.report.print(
            f"warning: step {self.step}: loss {loss:.4g} is a spike: {usual} in the {len(before)} "
            f"steps before; the highest of its micro-batches: {'; '.join(map(str, highest))}"
        )

    def prune_if_proven(self) -> None:
        """Delete older checkpoints for the newest, once a step from its weights was good."""
        if self.unproven is not None:
            folder, self.unproven = self.unproven, None
            prune(self.trainer, folder)

    # -- beside the steps

    def check_weights(self, when: str, model=None) -> None:
        """NotFiniteError where a weight is not finite, with its name. One reduction a tensor."""
        if not self.is_on:
            return
        own = _first_bad(
            _tensors(self.trainer.model if model is None else model, torch.Tensor.detach)
        )
        found = [(*bad, rank) for rank, bad in enumerate(parallel.gather(own)) if bad is not None]
        if found:
            chunk, name, rank = min(found, key=lambda bad: (bad[0], bad[2]))
            self.stop(f"{when}: the weight {name} is not finite (rank {rank})")

    def check_evaluation(self, metrics: dict[str, float]) -> None:
        """NotFiniteError where the loss of an evaluation is not finite."""
        loss = metrics.get("eval_loss", 0.0)
        if self.is_on and not math.isfinite(loss):
            step = self.trainer.state.global_step
            self.stop(f"the evaluation after step {step} gave eval_loss {loss}")

    def end_run(self) -> None:
        """NotFiniteError where every step of the run was skipped, or where the last update left
        weights that are not finite. Else checkpoints are pruned for the last one too."""
        if self.steps and self.skipped == self.steps:
            hint = "lower learning_rate, or look at the data"
            if self.args.fp16:
                hint = "set bf16: true instead of fp16, or a lower initial_loss_scale"
            self.stop(
                f"every update of {self.steps} steps was skipped, nothing was trained: {hint}"
            )
        self.check_weights("after the last step")
        self.prune_if_proven()

    def stop(self, text: str) -> None:
        """End the run with NotFiniteError; a checkpoint that is being written is finished first."""
        finish_checkpoint(self.trainer)
        there = ckpt_folder.list_checkpoints(self.args.output_dir)
        newest = f"; the newest checkpoint is {there[-1]}" if there else ""
        if self.unproven is not None and len(there) > 1:
            newest += f", from which no good step was made, and the one before {there[-2].name}"
        raise NotFiniteError(f"{text}{newest}; nothing was exported")

    # -- what is not finite, and where

    def _bad_losses(self) -> list[BadLoss]:
        """Those of all ranks, one for each micro-batch. Collective."""
        losses = {}
        if self._losses:  # stages of a pipeline before the last have none
            losses = dict(enumerate(torch.stack(self._losses).tolist()))
        bad = {number: loss for number, loss in losses.items() if not math.isfinite(loss)}
        return self._of_all_ranks(bad)

    def _of_all_ranks(self, losses: dict[int, float]) -> list[BadLoss]:
        """These micro-batches of this rank with those of the others, in order; one that several
        ranks hold comes once. Collective."""
        replica, rank = self.trainer.backend.dp_rank, parallel.rank()
        own: list[BadLoss] = []
        first: dict[tuple[int, int], BadLoss] = {}
        for number, loss in losses.items():
            own.append(BadLoss(replica, number, rank, loss, self._samples(number)))
        for bad in itertools.chain.from_iterable(parallel.gather(own)):
            first.setdefault((bad.replica, bad.micro_batch), bad)
        return sorted(first.values())

    def _samples(self, number: int) -> list[int]:
        """Numbers in the dataset of the samples in a micro-batch of this rank's step."""
        dataset = self.trainer.train_dataset
        chosen = self.plan.step(*divmod(self.position, self.plan.steps_per_epoch))
        if number >= len(chosen):  # an empty micro-batch, which the schedule asked for
            return []
        rows = [row for row in chosen[number] if row != FILLER]
        if not isinstance(dataset, Packs):
            return rows
        return [int(sample) for row in rows for sample in dataset.packs[row]]

    def _stop_before_update(self, what, found, micro_batches, seq_length) -> None:
        where = self._first_cause(found, micro_batches, seq_length)
        written = self._write_batches(found, micro_batches)
        advice = "look at these samples, lower learning_rate, or set nan_policy: skip"
        if self.args.nan_policy == "skip":
            advice = f"{self.dropped - 1} updates were left out before (nan_skip_limit)"
        self.stop(
            f"{what}. The first that is not finite: {where}. Its update is not made; "
            f"the batch is in {', '.join(written)}: {advice}"
        )

    def _first_cause(self, found: list[BadLoss], micro_batches: list, seq_length: int) -> str:
        """A weight, else a layer's output, else a gradient, in words. Collective."""
        model = self.trainer.model
        own = (
            self.trainer.backend.dp_rank,
            _first_bad(_tensors(model, torch.Tensor.detach)),
            self._bad_outputs(micro_batches, seq_length),
            # the backward pass goes from the last parameter to the first
            _first_bad(reversed(list(_tensors(model, _gradient_of)))),
        )
        weights, layers, gradients = [], [], []
        # ranks of later pipeline stages have higher numbers
        for rank, (replica, weight, outputs, gradient) in enumerate(parallel.gather(own)):
            if weight is not None:
                weights.append((*weight, rank))
            if gradient is not None:
                gradients.append((gradient[0], rank, gradient[1]))
            for (number, chunk), name in outputs.items():
                if not found or (replica, number) == found[0][:2]:
                    layers.append((number, chunk, rank, name))
        if weights:
            return f"the weight {min(weights)[1]}"
        if layers:
            return f"the output of {min(layers)[3] or 'the model'}"
        if found:
            return "the loss itself"
        if gradients:
            return f"the gradient of {max(gradients)[2]}"
        return "the gradient's norm, a sum of finite numbers"

    @torch.no_grad()
    def _bad_outputs(self, micro_batches, seq_length) -> dict[tuple[int, int], str]:
        """(micro-batch, chunk) -> the first module there, on this rank, whose output is not finite,
        found by another forward pass. Collective."""
        trainer, first, calls = self.trainer, {}, Counter()

        def count(chunk: int, *_) -> None:
            calls[chunk] += 1

        def look(chunk: int, name: str, module, inputs, output) -> None:
            place = calls[chunk] - 1, chunk
            if place not in first and not _is_finite(output):
                first[place] = name

        trainer.backend.train_mode(False)
        batches = trainer._prepare_micro_batches(micro_batches, seq_length)
        with contextlib.ExitStack() as hooks:
            for number, chunk in enumerate(_chunks(trainer.model)):
                begin = functools.partial(count, number)
                hooks.enter_context(trainer.models[number].register_forward_pre_hook(begin))
                for name, module in chunk.named_modules():
                    hook = functools.partial(look, number, _name_in_whole_model(chunk, name))
                    hooks.enter_context(module.register_forward_hook(hook))
            step = trainer.forward_step
            trainer.backend.forward_backward(step, batches, seq_length, forward_only=True)
        return first

    def _write_batches(self, found, micro_batches) -> list[str]:
        """Write the micro-batches that are not finite, all of the step's where only the gradient
        is, to output_dir: a file of one rank of each replica -> their paths, or why nothing could
        be written: the run stops for another reason. Collective."""
        rank, replica = parallel.rank(), self.trainer.backend.dp_rank
        numbers = [bad.micro_batch for bad in found if bad.rank == rank]
        if not found and parallel.gather(replica).index(replica) == rank:
            numbers = list(range(len(micro_batches)))
        written = None
        if numbers:
            batches = [
                {"number": n, "samples": self._samples(n), "batch": micro_batches[n]}
                for n in numbers
            ]
            record = {"step": self.step, "rank": rank, "replica": replica, "micro_batches": batches}
            data, path = io.BytesIO(), Path(self.args.output_dir)
            path /= f"nonfinite-step-{self.step}-rank-{rank}.pt"
            torch.save(record, data)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data.getvalue())
                written = str(path)
            except OSError as error:
                written = f"no file ({path}: {error.strerror})"
        return [path for path in parallel.gather(written) if path is not None]


def _describe(found: list[BadLoss], grad_norm: float) -> str:
    if not found:
        return f"the gradient norm is {grad_norm}, and the losses are finite"
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(map(str, found[:_SHOWN])) + more


# -- tensors and modules of a model, chunk by chunk


def _chunks(model) -> list[torch.nn.Module]:
    return list(model) if isinstance(model, VirtualModels) else [model]


def _name_in_whole_model(chunk: torch.nn.Module, name: str) -> str:
    """A name with the layer's number in the whole model, where megatron counts those of a chunk."""
    match = re.match(r"(.*?layers)\.(\d+)(?=\.|$)", name)
    number = getattr(chunk.get_submodule(match[0]), "layer_number", None) if match else None
    if number is None:
        return name
    return f"{match[1]}.{number - 1}{name[match.end() :]}"


def _tensors(model, take: Callable) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(chunk, name, take(parameter)) of the parameters for which that is not None."""
    for number, chunk in enumerate(_chunks(model)):
        for name, parameter in chunk.named_parameters():
            tensor = take(parameter)
            if tensor is not None:
                yield number, _name_in_whole_model(chunk, name), tensor


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    return getattr(parameter, "main_grad", parameter.grad)  # megatron's, or torch's


def _first_bad(tensors: Iterator[tuple[int, str, torch.Tensor]]) -> tuple[int, str] | None:
    """(chunk, name) of the first tensor that is not finite. Waits for the device once."""
    tensors = [item for item in tensors if item[2].is_floating_point() and item[2].numel()]
    if not tensors:
        return None
    # the largest absolute value, which no sum overflows
    largest = torch._foreach_norm([tensor for _, _, tensor in tensors], math.inf)
    finite = torch.stack([value.float() for value in largest]).isfinite().tolist()
    bad = (item[:2] for item, good in zip(tensors, finite, strict=True) if not good)
    return next(bad, None)


def _is_finite(output) -> bool:
    """Whether the tensors of a module's output are finite."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    tensors = (part for part in parts if isinstance(part, torch.Tensor))
    return all(bool(part.isfinite().all()) for part in tensors if part.is_floating_point())
