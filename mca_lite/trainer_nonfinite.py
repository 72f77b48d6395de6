"""Numbers that are not finite: found before an update, named, and the run stopped. Loss spikes:
named in a warning.

Steps that are good pay nothing for it. A micro-batch whose loss is not finite makes its own
gradient NaN, and that reaches the gradient norm, which every rank reads before the update anyway:
no collective and no waiting for a device is added. What follows then may take its time: the ranks
tell each other what they saw, the micro-batches run forward once more to find the layer, and the
run ends with NotFiniteError, which the command line answers with NOT_FINITE_EXIT_CODE.
"""

import io
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from . import ckpt_folder, parallel
from .data_batches import FILLER, BatchPlan
from .data_packs import Packs
from .files import write_file
from .model import VirtualModels
from .trainer_checkpoints import finish_checkpoint, prune

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
        return (
            f"loss {self.loss:.4g} on rank {self.rank} (data parallel replica {self.replica}), "
            f"micro-batch {self.micro_batch}, samples {_listed(self.samples)}"
        )


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 20} more" if len(numbers) > 20 else ""
    return ", ".join(map(str, numbers[:20])) + more


def _one_of_each(found: Iterable[BadLoss]) -> list[BadLoss]:
    """The first that is found of each micro-batch, which several ranks may hold, in order."""
    first: dict[tuple[int, int], BadLoss] = {}
    for bad in found:
        first.setdefault((bad.replica, bad.micro_batch), bad)
    return sorted(first.values())


class FiniteGuard:
    """Watches the steps of one trainer. All ranks must call its methods together."""

    def __init__(self, trainer):
        self.trainer, self.args = trainer, trainer.args
        self.is_on = trainer.args.check_for_nan_in_loss_and_grad
        self.steps = self.skipped = self.dropped = 0
        # named, and not pruned for: no step has been made from its weights yet
        self.unproven: Path | None = None
        self._losses: list[torch.Tensor] = []  # of this step's micro-batches, on the device
        self.is_spike = False
        self._usual: deque[float] = deque(maxlen=_SPIKE_STEPS)
        self._last_step: tuple = ()  # loss, metrics of its micro-batches, their plan, its number

    # -- the fast path

    def start_run(self) -> None:
        self.steps = self.skipped = self.dropped = 0
        self.unproven, self.is_spike = None, False
        self._usual.clear()
        self.check_weights("before the first step")

    def start_step(self) -> None:
        self._losses = []

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

    def after_step(self, skipped, grad_norm, metrics, plan, micro_batches, seq_length):
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
        found = self._bad_losses(plan)
        if not found and math.isfinite(grad_norm):
            return metrics, grad_norm
        self.dropped += 1
        what = _describe(found, grad_norm)
        args, step = self.args, self.trainer.state.global_step + 1
        if args.nan_policy == "skip" and self.dropped <= args.nan_skip_limit:
            self.trainer.report.print(
                f"warning: step {step}: {what}: its update is left out ({self.dropped} of at most "
                f"{args.nan_skip_limit}, nan_skip_limit)"
            )
            losses = zip(metrics, self._losses, strict=False)
            return [of for of, loss in losses if math.isfinite(loss)], 0.0
        self._stop_before_update(step, what, found, plan, micro_batches, seq_length)

    def note_loss(self, loss: float | None, metrics: list[dict], plan: BatchPlan) -> None:
        """Compare a step's mean loss over all ranks with those before it: `is_spike` says what came
        of it. Before the step is counted."""
        self.is_spike = False
        if loss is None or not math.isfinite(loss):
            return
        self._last_step = loss, metrics, plan, self.trainer.state.global_step
        if len(self._usual) >= _SPIKE_AFTER:
            mean, deviation = statistics.fmean(self._usual), statistics.pstdev(self._usual)
            # losses that hardly differ have no deviation to measure by
            self.is_spike = loss > mean + _SPIKE * max(deviation, 0.01 * abs(mean))
        self._usual.append(loss)

    def name_spike(self) -> None:
        """Warn of the last step's loss, with the samples of the micro-batches that had the highest.
        Collective."""
        loss, metrics, plan, step = self._last_step
        own = []
        for number, of_batch in enumerate(metrics):
            total, count = of_batch["loss"].tolist()
            samples = self._samples(plan, number, step)
            place = self.trainer.backend.dp_rank, number, parallel.rank()
            own.append(BadLoss(*place, total / max(count, 1), samples))
        first = _one_of_each(bad for of_rank in parallel.gather(own) for bad in of_rank)
        highest = sorted(first, key=lambda bad: -bad.loss)[:_SHOWN]
        before = list(self._usual)[:-1]
        self.trainer.report.print(
            f"warning: step {step + 1}: loss {loss:.4g} is a spike: {statistics.fmean(before):.4g} "
            f"+- {statistics.pstdev(before):.2g} in the {len(before)} steps before; the highest of "
            f"its micro-batches: {'; '.join(map(str, highest))}"
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
        own = _first_bad(_parameters(self.trainer.model if model is None else model))
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
        if self.trainer._writer.is_busy:
            finish_checkpoint(self.trainer)
        there = ckpt_folder.list_checkpoints(self.args.output_dir)
        newest = f"; the newest checkpoint is {there[-1]}" if there else ""
        if self.unproven is not None and len(there) > 1:
            newest += f", from which no good step was made, and the one before {there[-2].name}"
        raise NotFiniteError(f"{text}{newest}; nothing was exported")

    # -- what is not finite, and where

    def _bad_losses(self, plan: BatchPlan) -> list[BadLoss]:
        """Those of all ranks, one for each micro-batch. Collective."""
        own, losses = [], []
        if self._losses:  # stages of a pipeline before the last have none
            losses = torch.stack(self._losses).tolist()
        for number, loss in enumerate(losses):
            if not math.isfinite(loss):
                replica, samples = self.trainer.backend.dp_rank, self._samples(plan, number)
                own.append(BadLoss(replica, number, parallel.rank(), loss, samples))
        return _one_of_each(bad for of_rank in parallel.gather(own) for bad in of_rank)

    def _samples(self, plan: BatchPlan, number: int, step: int | None = None) -> list[int]:
        """Numbers in the dataset of the samples in a micro-batch of this rank's step, after `step`
        others (None: the one that is being made)."""
        dataset = self.trainer.train_dataset
        step = self.trainer.state.global_step if step is None else step
        chosen = plan.step(*divmod(step, plan.steps_per_epoch))
        if number >= len(chosen):  # an empty micro-batch, which the schedule asked for
            return []
        rows = [row for row in chosen[number] if row != FILLER]
        if not isinstance(dataset, Packs):
            return rows
        return [int(sample) for row in rows for sample in dataset.packs[row]]

    def _stop_before_update(self, step, what, found, plan, micro_batches, seq_length) -> None:
        where = self._first_cause(found, micro_batches, seq_length)
        written = self._write_batches(step, found, plan, micro_batches)
        advice = "look at these samples, lower learning_rate, or set nan_policy: skip"
        if self.args.nan_policy == "skip":
            advice = f"{self.dropped - 1} updates were left out before (nan_skip_limit)"
        self.stop(
            f"step {step}: {what}. The first that is not finite: {where}. Its update is not made; "
            f"the batch is in {', '.join(written)}: {advice}"
        )

    def _first_cause(self, found: list[BadLoss], micro_batches: list, seq_length: int) -> str:
        """A weight, else a layer's output, else a gradient, in words. Collective."""
        trainer = self.trainer
        weight = _first_bad(_parameters(trainer.model))
        outputs = self._bad_outputs(micro_batches, seq_length)
        # the backward pass goes from the last parameter to the first
        gradient = _first_bad(reversed(list(_gradients(trainer.model))))
        seen = list(enumerate(parallel.gather((weight, outputs, gradient))))
        # ranks of later pipeline stages have higher numbers
        weights = sorted((*bad, rank) for rank, (bad, _, _) in seen if bad is not None)
        if weights:
            return f"the weight {weights[0][1]}"
        wanted = {(bad.replica, bad.micro_batch) for bad in found[:1]}
        layers = sorted(
            (number, chunk, rank, name)
            for rank, (_, outputs, _) in seen
            for replica, number, chunk, name in outputs
            if not wanted or (replica, number) in wanted
        )
        if layers:
            return f"the output of {layers[0][3] or 'the model'}"
        if found:
            return "the loss itself"
        gradients = sorted((*bad, rank) for rank, (_, _, bad) in seen if bad is not None)
        if gradients:
            last = max(gradients, key=lambda bad: (bad[0], bad[2]))
            return f"the gradient of {last[1]}"
        return "the gradient's norm, a sum of finite numbers"

    @torch.no_grad()
    def _bad_outputs(self, micro_batches, seq_length) -> list[tuple[int, int, int, str]]:
        """(replica, micro-batch, chunk, module) of the first module of each chunk on this rank
        whose output is not finite, found by another forward pass. Collective."""
        trainer, first, calls = self.trainer, {}, Counter()
        now = {"chunk": 0}

        def forward_step(iterator, model):
            now["chunk"] = next(i for i, chunk in enumerate(trainer.models) if chunk is model)
            calls[now["chunk"]] += 1
            return trainer.forward_step(iterator, model)

        def hook_of(name):
            def look(module, inputs, output):
                place = calls[now["chunk"]] - 1, now["chunk"]
                if place not in first and not _is_finite(output):
                    first[place] = name

            return look

        handles = []
        for chunk in _chunks(trainer.model):
            for name, module in chunk.named_modules():
                name = _name_in_whole_model(chunk, name)
                handles.append(module.register_forward_hook(hook_of(name)))
        trainer.backend.train_mode(False)
        try:
            batches = trainer._prepare_micro_batches(micro_batches, seq_length)
            trainer.backend.forward_backward(forward_step, batches, seq_length, forward_only=True)
        finally:
            for handle in handles:
                handle.remove()
        return [(trainer.backend.dp_rank, *place, name) for place, name in first.items()]

    def _write_batches(self, step, found, plan, micro_batches) -> list[str]:
        """Write the micro-batches that are not finite, all of the step's where only the gradient
        is, to output_dir: a file of one rank of each replica -> their paths. Collective."""
        rank, replica = parallel.rank(), self.trainer.backend.dp_rank
        numbers = [bad.micro_batch for bad in found if bad.rank == rank]
        if not found and parallel.gather(replica).index(replica) == rank:
            numbers = list(range(len(micro_batches)))
        written = None
        if numbers:
            batches = [
                {"number": n, "samples": self._samples(plan, n), "batch": micro_batches[n]}
                for n in numbers
            ]
            record = {"step": step, "rank": rank, "replica": replica, "micro_batches": batches}
            folder = Path(self.args.output_dir)
            written = _write(folder / f"nonfinite-step-{step}-rank-{rank}.pt", record)
        return [path for path in parallel.gather(written) if path is not None]


def _write(path: Path, record: dict) -> str:
    """The path, or why nothing could be written: the run stops for another reason."""
    data = io.BytesIO()
    torch.save(record, data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data.getvalue())
    except OSError as error:
        return f"no file ({path}: {error.strerror})"
    return str(path)


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


def _parameters(model) -> Iterator[tuple[int, str, torch.Tensor]]:
    for number, chunk in enumerate(_chunks(model)):
        for name, parameter in chunk.named_parameters():
            yield number, _name_in_whole_model(chunk, name), parameter.detach()


def _gradients(model) -> Iterator[tuple[int, str, torch.Tensor]]:
    for number, chunk in enumerate(_chunks(model)):
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", parameter.grad)  # megatron's, or torch's
            if gradient is not None:
                yield number, _name_in_whole_model(chunk, name), gradient


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
