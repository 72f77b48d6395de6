"""Non-finite numbers: detected before an update, named, and the run stopped. Loss spikes: a
warning.

Good steps pay nothing for it. A micro-batch with a non-finite loss makes its gradient NaN, and this
reaches the gradient norm, read by every rank before the update anyway: no collective and no waiting
for a device is added. After that, time does not matter: the ranks gather their losses, the
micro-batches run forward once more to find the layer, and the run ends with NotFiniteError, for the
command line NOT_FINITE_EXIT_CODE.
"""

import contextlib
import functools
import io
import itertools
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from . import ckpt_folder, parallel
from .data_batches import FILLER, Packs
from .errors import UserError
from .files import write_file
from .model import VirtualModels

NOT_FINITE_EXIT_CODE = 86  # of a run stopped by non-finite numbers
_SHOWN = 3  # micro-batches in a message
# a spike is so many standard deviations above the mean of the losses before it
_SPIKE = 6.0
_SPIKE_STEPS = 100
_SPIKE_AFTER = 20


class NotFiniteError(UserError, ArithmeticError):
    """A loss, a gradient or a weight is not finite, or no update was made. Every rank raises it,
    with the same text."""

    exit_code = NOT_FINITE_EXIT_CODE
    same_on_all_ranks = True


class BadLoss(NamedTuple):
    """A micro-batch with a non-finite loss. samples: their numbers in the dataset."""

    replica: int
    micro_batch: int
    rank: int
    loss: float
    samples: list[int]

    def __str__(self) -> str:
        samples = self.samples[:20]
        more = len(self.samples) - 20
        return (
            f"loss {self.loss:.4g} on rank {self.rank} (data parallel replica {self.replica}), "
            f"micro-batch {self.micro_batch}, samples {', '.join(map(str, samples))}"
            + (f" and {more} more" if more > 0 else "")
        )


class FiniteGuard:
    """Watches the steps of a trainer. All ranks must call its methods together."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.args = trainer.args
        self.is_on = trainer.args.check_for_nan_in_loss_and_grad
        self.start_run()

    def start_run(self) -> None:
        """Forget the steps of an earlier run."""
        self.steps = 0
        self.skipped = 0
        self.dropped = 0  # of the skipped steps: those with non-finite numbers
        self.is_spike = False
        self._micro_batches: list[dict] = []  # of this step, as the model gets them
        self._losses: list[torch.Tensor] = []  # of those, on the device
        self._losses_before: deque[float] = deque(maxlen=_SPIKE_STEPS)  # means of steps
        self._last_loss: tuple = ()  # of a step, and the metrics of its micro-batches

    # -- the fast path

    def start_step(self, micro_batches: list[dict]) -> None:
        """Begin a step with these micro-batches, as the model gets them."""
        state = self.trainer.state
        self._micro_batches = micro_batches
        self._losses = []
        self.step = state.global_step + 1
        self.position = state.position

    def mark(self, loss_func: Callable) -> Callable:
        """A loss_func with the same numbers; the gradient of a non-finite loss is NaN, even if that
        of an infinite loss would not be."""
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
        """Count a step -> (metrics, gradient norm), without non-finite ones if nan_policy: skip
        leaves the update out.

        NotFiniteError if the run stops. An overflow of fp16's loss scale, with finite losses,
        changes nothing.
        """
        self.steps = self.steps + 1
        self.skipped = self.skipped + skipped
        if not skipped:
            self.trainer.checkpoints.prune()
        if not skipped or not self.is_on:
            return metrics, grad_norm
        losses = [float(loss) for loss in self._losses]  # none on stages before the last
        found = self._of_all_ranks({n: x for n, x in enumerate(losses) if not math.isfinite(x)})
        if not found and math.isfinite(grad_norm):
            return metrics, grad_norm
        self.dropped += 1
        what = f"step {self.step}: {_describe(found, grad_norm)}"
        limit = self.args.nan_skip_limit
        if self.args.nan_policy == "skip" and self.dropped <= limit:
            self.trainer.report.print(
                f"warning: {what}: its update is left out ({self.dropped} of at most {limit}, "
                "nan_skip_limit)"
            )
            pairs = zip(metrics, losses, strict=False)
            return [of_batch for of_batch, loss in pairs if math.isfinite(loss)], 0.0
        self._stop_before_update(what, found, micro_batches, seq_length)

    def note_loss(self, loss: float | None, metrics: list[dict]) -> None:
        """Set `is_spike` by comparing a step's mean loss over all ranks with those before it."""
        self.is_spike = False
        if loss is None or not math.isfinite(loss):
            return
        self._last_loss = loss, metrics
        before = self._losses_before
        if len(before) >= _SPIKE_AFTER:
            mean = statistics.fmean(before)
            deviation = statistics.pstdev(before)
            # nearly equal losses have no deviation to measure by
            self.is_spike = loss > mean + _SPIKE * max(deviation, 0.01 * abs(mean))
        before.append(loss)

    def name_spike(self) -> None:
        """Warn of the last step's loss, with the samples of the micro-batches with the highest.
        Collective."""
        self.is_spike = False  # the end of an epoch asks again
        loss, metrics = self._last_loss
        pairs = enumerate(of_batch["loss"].tolist() for of_batch in metrics)
        found = self._of_all_ranks({n: total / max(count, 1) for n, (total, count) in pairs})
        highest = sorted(found, key=lambda bad: -bad.loss)[:_SHOWN]
        before = list(self._losses_before)[:-1]
        usual = f"{statistics.fmean(before):.4g} +- {statistics.pstdev(before):.2g}"
        self.trainer.report.print(
            f"warning: step {self.step}: loss {loss:.4g} is a spike: {usual} in the {len(before)} "
            f"steps before; the highest of its micro-batches: {'; '.join(map(str, highest))}"
        )

    # -- beside the steps

    def check_weights(self, when: str, model=None) -> None:
        """NotFiniteError for a non-finite weight, with its name. One reduction a tensor."""
        if not self.is_on:
            return
        own = _first_bad(_parameters(self.trainer.model if model is None else model))
        found = [(*bad, rank) for rank, bad in enumerate(parallel.gather(own)) if bad is not None]
        if found:
            _, name, rank = min(found, key=lambda bad: (bad[0], bad[2]))  # of the first chunk
            self.stop(f"{when}: the weight {name} is not finite (rank {rank})")

    def check_evaluation(self, metrics: dict[str, float]) -> None:
        """NotFiniteError for a non-finite loss of an evaluation."""
        loss = metrics.get("eval_loss", 0.0)
        if self.is_on and not math.isfinite(loss):
            step = self.trainer.state.global_step
            self.stop(f"the evaluation after step {step} gave eval_loss {loss}")

    def end_run(self) -> None:
        """NotFiniteError if every step of the run was skipped, or the last update left non-finite
        weights. Else prune checkpoints for the last one too."""
        has_updates = self.trainer.lr_scheduler.num_steps > 0  # those of a resumed run too
        if self.steps and self.skipped == self.steps and has_updates:
            self.trainer.report.print(
                f"warning: no update was made since the checkpoint ({self.skipped} skipped): the "
                "weights are as they were there"
            )
        elif self.steps and self.skipped == self.steps:
            hint = "lower learning_rate, or look at the data"
            if self.args.fp16:
                hint = "set bf16: true instead of fp16, or a lower initial_loss_scale"
            self.stop(
                f"every update of {self.steps} steps was skipped, nothing was trained: {hint}"
            )
        self.check_weights("after the last step")
        self.trainer.checkpoints.prune()

    def stop(self, text: str) -> None:
        """End the run with NotFiniteError, after finishing a pending checkpoint."""
        checkpoints = self.trainer.checkpoints
        checkpoints.finish()
        there = ckpt_folder.list_checkpoints(self.args.output_dir)
        newest = f"; the newest checkpoint is {there[-1]}" if there else ""
        if checkpoints.unproven is not None and len(there) > 1:
            newest += f", from which no good step was made, and the one before {there[-2].name}"
        raise NotFiniteError(f"{text}{newest}; nothing was exported")

    # -- the cause

    def _of_all_ranks(self, losses: dict[int, float]) -> list[BadLoss]:
        """These micro-batches of all ranks, in order; one on several ranks comes once.
        Collective."""
        own = []
        for number, loss in losses.items():
            place = self.trainer.backend.dp_rank, number, parallel.rank()
            own.append(BadLoss(*place, loss, self._samples(number)))
        first: dict[tuple[int, int], BadLoss] = {}
        for bad in itertools.chain.from_iterable(parallel.gather(own)):
            first.setdefault((bad.replica, bad.micro_batch), bad)
        return sorted(first.values())

    def _samples(self, number: int) -> list[int]:
        """Numbers in the dataset of the samples in a micro-batch of this rank's step."""
        dataset = self.trainer.train_dataset
        plan = self.trainer.batch_plan
        chosen = plan.step(*divmod(self.position, plan.steps_per_epoch))
        if number >= len(chosen):  # an empty micro-batch of the schedule
            return []
        rows = [row for row in chosen[number] if row != FILLER]
        if not isinstance(dataset, Packs):
            return rows
        return [int(sample) for row in rows for sample in dataset.packs[row]]

    def _stop_before_update(self, what, found, micro_batches, seq_length) -> None:
        where = self._first_cause(found, seq_length)
        written = self._write_batches(found, micro_batches)
        advice = "look at these samples, lower learning_rate, or set nan_policy: skip"
        if self.args.nan_policy == "skip":
            advice = f"{self.dropped - 1} updates were left out before (nan_skip_limit)"
        self.stop(
            f"{what}. The first that is not finite: {where}. Its update is not made; "
            f"the batch is in {', '.join(written)}: {advice}"
        )

    def _first_cause(self, found: list[BadLoss], seq_length: int) -> str:
        """A weight, else a layer's output, else a gradient, in words. Collective."""
        replica = self.trainer.backend.dp_rank
        parameters = list(_parameters(self.trainer.model))
        outputs = self._bad_outputs(seq_length)
        if found:  # those of the first micro-batch with a bad loss
            outputs = [place for place in outputs if (replica, place[0]) == found[0][:2]]
        # the backward pass goes from the last parameter to the first
        gradients = [(chunk, name, _gradient_of(p)) for chunk, name, p in parameters[::-1]]
        own = _first_bad(parameters), outputs, _first_bad(gradients)
        of_ranks = parallel.gather(own)
        weights = [weight for weight, _, _ in of_ranks if weight is not None]
        if weights:
            return f"the weight {min(weights)[1]}"
        # ranks of later pipeline stages have higher numbers
        layers = [
            (number, chunk, rank, name)
            for rank, (_, places, _) in enumerate(of_ranks)
            for number, chunk, name in places
        ]
        if layers:
            return f"the output of {min(layers)[3] or 'the model'}"
        if found:
            return "the loss itself"
        last = [(bad[0], rank, bad[1]) for rank, (*_, bad) in enumerate(of_ranks) if bad]
        if last:
            return f"the gradient of {max(last)[2]}"
        return "the gradient's norm, a sum of finite numbers"

    @torch.no_grad()
    def _bad_outputs(self, seq_length) -> list[tuple[int, int, str]]:
        """(micro-batch, chunk, first module) on this rank with a non-finite output, by another
        forward pass. Collective."""
        trainer = self.trainer
        calls = Counter()
        first: dict[tuple[int, int], str] = {}

        def count(chunk: int, *_) -> None:
            calls[chunk] += 1

        def look(chunk: int, name: str, module, inputs, output) -> None:
            if not _is_finite(output):
                first.setdefault((calls[chunk] - 1, chunk), name)

        trainer.backend.train_mode(False)
        with contextlib.ExitStack() as hooks:
            for number, chunk in enumerate(_chunks(trainer.model)):
                begin = functools.partial(count, number)
                hooks.enter_context(trainer.models[number].register_forward_pre_hook(begin))
                for name, module in chunk.named_modules():
                    hook = functools.partial(look, number, _name_in_whole_model(chunk, name))
                    hooks.enter_context(module.register_forward_hook(hook))
            step = trainer.forward_step
            trainer.backend.forward_backward(
                step, self._micro_batches, seq_length, forward_only=True
            )
        return [(*place, name) for place, name in first.items()]

    def _write_batches(self, found, micro_batches) -> list[str]:
        """Write the micro-batches with a non-finite loss, or all of the step if only the gradient
        is bad, to output_dir: a file of one rank of each replica -> their paths, or the reason for
        no file: the run stops for another reason. Collective."""
        rank = parallel.rank()
        replica = self.trainer.backend.dp_rank
        numbers = [bad.micro_batch for bad in found if bad.rank == rank]
        if not found and parallel.gather(replica).index(replica) == rank:
            numbers = list(range(len(micro_batches)))
        batches = [
            {"number": n, "samples": self._samples(n), "batch": micro_batches[n]} for n in numbers
        ]
        record = {"step": self.step, "rank": rank, "replica": replica, "micro_batches": batches}
        written = self._write(record) if batches else None
        return [path for path in parallel.gather(written) if path is not None]

    def _write(self, record: dict) -> str:
        """Write a record -> its path, or why there is no file."""
        data = io.BytesIO()
        path = Path(self.args.output_dir)
        path /= f"nonfinite-step-{record['step']}-rank-{record['rank']}.pt"
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
    """A name with the layer's number in the whole model: megatron counts those of a chunk."""
    match = re.match(r"(.*?layers)\.(\d+)(?=\.|$)", name)
    number = getattr(chunk.get_submodule(match[0]), "layer_number", None) if match else None
    if number is None:
        return name
    return f"{match[1]}.{number - 1}{name[match.end() :]}"


def _parameters(model) -> Iterator[tuple[int, str, torch.nn.Parameter]]:
    """(chunk, name, parameter)"""
    for number, chunk in enumerate(_chunks(model)):
        for name, parameter in chunk.named_parameters():
            yield number, _name_in_whole_model(chunk, name), parameter


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    return getattr(parameter, "main_grad", parameter.grad)  # megatron's, or torch's


@torch.no_grad()
def _first_bad(tensors: Iterable[tuple[int, str, torch.Tensor | None]]) -> tuple[int, str] | None:
    """(chunk, name) of the first non-finite tensor. Waits for the device once."""
    names = []
    known = []
    for chunk, name, tensor in tensors:
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            names.append((chunk, name))
            known.append(tensor)
    if not known:
        return None
    # the largest absolute value: no sum overflows
    largest = torch._foreach_norm(known, math.inf)
    finite = torch.stack([value.float() for value in largest]).isfinite().tolist()
    return next((name for name, good in zip(names, finite, strict=True) if not good), None)


def _is_finite(output) -> bool:
    """True if all tensors of a module's output are finite."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    tensors = (part for part in parts if isinstance(part, torch.Tensor))
    return all(bool(part.isfinite().all()) for part in tensors if part.is_floating_point())
