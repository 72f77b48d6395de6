"""Backend: the interface of both backends, and the code that they share.

The trainer knows no parallelism: all ranks call these methods alike. A concrete method is shared by
the backends, or assumes that this rank has the whole model. Both follow megatron's schedules:
forward_step(iterator, model) -> (output, loss_func), and loss_func(output) -> (loss sum, count,
metrics).
"""

import abc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from . import cpu, kernels, parallel
from .args import check_together
from .batch import Batch, to_rank
from .errors import Keys, expect
from .files import PathLike
from .finetuning import finetuning_of
from .hosts import module_of
from .loss_tokens import LossOfLogits
from .model_moe import BalancingLosses, RouterStatistics, address_of
from .tables import COLUMNS
from .weights_convert import Change
from .weights_files import NamedTensors

Metrics: TypeAlias = list[dict[str, Any]]  # of each micro-batch


def count_real_micro_batches(batches: Iterable[dict[str, Any]]) -> int:
    """Count the micro-batches with at least one token that is not padding. Filler micro-batches
    have none."""
    return sum(not bool(batch["padding_mask"].all()) for batch in batches)


def mean_of(total: Any, count: torch.Tensor) -> Any:
    """total / count. A count below 1 is taken as 1, so that a batch without tokens gives 0 instead
    of NaN."""
    return total / count.clamp(min=1)


class Backend(abc.ABC):
    """Base class of the two backends (megatron-core and plain torch), through which the trainer
    trains a model: it has the model, its optimizer and the calls of a training step. `chunks`: this
    rank's parts of the model, wrapped for training; several only with virtual pipeline stages."""

    name: str
    snapshot_of: Any  # ckpt.TorchSnapshot or MegatronSnapshot, this rank's share of a checkpoint
    load_checkpoint: Callable[..., Any]  # (folder, model, optimizer or None) -> None
    micro_batch_multiple = 1  # micro-batches per step are a multiple of it
    document_multiple = 1  # tokens of a packed document are padded to a multiple of it
    length_multiple = 1  # tokens of a row are padded to a multiple of it
    pad_token_id = 0  # padding's token id
    context_parallel = (1, 0)  # (size, this rank)
    micro_batch_weight = 1.0  # factor on losses, so that their mean leaves out empty micro-batches
    predicts_ahead = 0.0  # weight of the multi-token prediction losses relative to the main loss
    counts_tokens = True  # True if reduce() shall sum this rank's token counts, once for each batch
    dp_rank: int
    dp_size: int
    hf_config: dict[str, Any]  # the model's config.json
    grad_scalers: list[Any]  # the loss scalers of fp16, for checkpoints

    def __init__(self, model: Any, args: Keys, losses: BalancingLosses) -> None:
        self.finetuning = finetuning_of(model)
        kind = self.finetuning.kind
        check_together(args, use_mca=self.name == "megatron", finetuning_type=kind)
        if args.deterministic:
            parallel.make_deterministic()  # a script may have set up torch.distributed itself
        cpu.apply_on_cuda()
        kernels.switch(args.torch_compile)
        self.model = model
        self.args = args
        self.dtype, self.precision = torch.float32, "fp32"  # for the forward pass
        if args.bf16:
            self.dtype = torch.bfloat16
            self.precision = "bf16"
        elif args.fp16:
            self.dtype = torch.float16
            self.precision = "fp16"
        self.losses_of_routers = losses
        # None for a model without experts; on plain torch also for one that is not in FAMILIES
        self.statistics_of_routers: RouterStatistics | None = None
        self.chunks: list[torch.nn.Module] = []
        self.optimizer: Any = None
        # this rank's count in earlier calls of add_gradients
        self.pending: torch.Tensor | None = None
        self._is_sent = False  # True once the reduction of added gradients has begun
        # {"model", "grad" or "optimizer": its storages that part_sleep.py freed}
        self.away: dict[str, list[Any]] = {}

    # -- different in each backend

    @abc.abstractmethod
    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        """This rank's shard of a batch, on its device, as keyword arguments of the model's forward
        pass."""

    @abc.abstractmethod
    def wrap_reference(
        self, model: Any, of_logits: LossOfLogits | None = None
    ) -> list[torch.nn.Module]:
        """Prepare another model, such as a reference model or teacher, for forward passes only:
        freeze it in place -> its chunks (its parts on this rank), which forward() takes. of_logits:
        a function of the logits that computes the loss, in place of cross entropy; None: cross
        entropy."""

    def places(self, batch: Batch) -> torch.Tensor | None:
        """The tokens of a row that this rank has, if context parallelism splits rows of s tokens
        over cp ranks: their indices in the row, int64 [s / cp]. None without context parallelism,
        because the rank then has all tokens."""
        return None

    def loss_columns(self, batch: Batch) -> dict[str, Any]:
        """Prepare the columns (named tensors) of a batch that the loss needs besides the model's
        inputs -> the batch with these columns on this rank's device. They are the columns in
        COLUMNS that the model's forward pass does not take. If a column has a value per token, only
        the values of this context-parallel rank's tokens are kept."""
        names = [name for name in batch if name in COLUMNS and not COLUMNS[name].to_model]
        return batch | to_rank(batch, names, self.places(batch), parallel.device())

    def joins_rows(self, chunks: Sequence[Any]) -> bool:
        """True if the rows of several micro-batches may be joined into one forward pass of these
        chunks (this rank's parts of a model). This base class says False."""
        return False

    @abc.abstractmethod
    def expect_weighted_losses(self) -> None:
        """Prepare the model for token losses whose weights in the objective are known only after
        the forward pass, and differ between tokens."""

    @abc.abstractmethod
    def use_loss(self, of_logits: LossOfLogits | None) -> None:
        """Compute the trained model's loss by `of_logits` from now on, in place of cross entropy;
        None: by cross entropy again. of_logits: a function of Logits (the logits and labels of some
        tokens) that returns their losses."""

    @abc.abstractmethod
    def use_timers(self, timers: Callable[..., Any]) -> None:
        """Time the parts of a step with timers(name).start() and stop(), as megatron-core's Timers
        do, or with timers(name) as a context."""

    @abc.abstractmethod
    def create_optimizer(self) -> Any:
        """Create the optimizer, set it as `optimizer` and return it."""

    @abc.abstractmethod
    def forward(
        self,
        forward_step: Callable[..., Any],
        micro_batches: list[Any],
        chunks: list[Any] | None = None,
    ) -> Metrics:
        """Run the schedule's forward pass only -> metrics per micro-batch; [] on pipeline stages
        other than the last. forward_step: megatron's forward_step_func, (iterator over
        micro-batches, model) -> (output, loss function). chunks: from wrap_reference, to run
        instead of the trained model. Collective."""

    @abc.abstractmethod
    def add_gradients(
        self, forward_step: Callable[..., Any], micro_batches: list[Any], last: bool = False
    ) -> Metrics:
        """Run the schedule forward and backward -> metrics per micro-batch, as from forward(). The
        gradients are added to the gradients of earlier calls, until finish_gradients() or
        discard_gradients() is called. Collective.

        last: True in the last call before finish_gradients(): its backward pass may then already
        reduce gradients over ranks."""

    @abc.abstractmethod
    def finish_gradients(
        self, denominator: float | None = None, times: float = 1.0
    ) -> torch.Tensor:
        """Reduce the added gradients over ranks, so that step() can use them -> the divisor.
        Collective.

        With calculate_per_token_loss, the update uses the sum of the gradients divided by the
        divisor. This is `denominator` if given; otherwise max(count, 1) x `times`, where count is
        the loss count (such as the number of trained tokens) of the whole update. Without that key
        the returned number has no use."""

    @abc.abstractmethod
    def clip_at(self, max_grad_norm: float) -> None:
        """Set the gradient norm to which later updates clip; 0: no clipping."""

    @abc.abstractmethod
    def step(self) -> tuple[bool, float, int | None]:
        """Clip gradients and update weights -> (False if the update is skipped, gradient norm
        before clipping, count of zeros in the gradient or None), the same on every rank.
        Collective.

        There is no update if the norm is not finite (with check_for_nan_in_loss_and_grad), if it is
        above grad_norm_skip_threshold, or if fp16's loss scale overflowed (the norm is then 0).
        Zeros are counted with log_num_zeros_in_grad."""

    @abc.abstractmethod
    def reduce(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum a vector over data-parallel and context-parallel ranks, in place, and return it. With
        pipeline parallelism every rank gets the last stage's sum. Collective."""

    @abc.abstractmethod
    def _export(
        self, folder: PathLike, max_shard_size: str | int, change: Change | None = None
    ) -> list[str]:
        """Write the model as a Hugging Face checkpoint into `folder` -> file names on global rank
        0, [] on other ranks. max_shard_size: of a weights file, such as "5GB". change(name,
        tensor): returns the tensor to write in place of `tensor`; None: weights are written as they
        are. Collective."""

    @abc.abstractmethod
    def _gradients_for_weights(self) -> None:
        """Put each trained parameter's gradient, reduced over ranks and in float32, in place of its
        weights, so that the code that exports weights can export gradients. May be collective."""

    @abc.abstractmethod
    def _trained_weights(self) -> NamedTensors:
        """Yield (Hugging Face name, CPU tensor) of each weight, on global rank 0 only. Called for
        runs that train whole weights rather than adapters. Collective: all ranks iterate to the
        end."""

    @abc.abstractmethod
    def weights(self, change: Change | None = None) -> NamedTensors:
        """Yield (Hugging Face name, copy of the whole tensor on this rank's device) of each weight,
        on global rank 0 only. change(name, tensor): returns the tensor to yield instead; None: no
        change. Collective: all ranks iterate to the end."""

    @abc.abstractmethod
    def weight_forms(self) -> NamedTensors:
        """Yield the names and shapes of the tensors that weights() yields, as (Hugging Face name,
        tensor on the meta device, which has no data). Every rank gets them all. Collective: all
        ranks iterate to the end."""

    @abc.abstractmethod
    def _sum_over_data_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the data-parallel ranks, whose batches differ. Changes `values`. Collective."""

    # -- defaults, for a rank that has the whole model

    def over_context_parallel(
        self, total: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adapt the loss of this rank's tokens to megatron's schedule, if context parallelism
        splits rows over ranks -> (loss sum, count). count: their loss count, such as the number of
        trained tokens. May be a collective over the context-parallel ranks. This base class,
        without context parallelism, changes nothing."""
        return total, count

    def sum_over_context_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the context-parallel ranks, which share each row. May change `values`.
        Collective if there are several. This base class has one such rank and returns `values`."""
        return values

    def whole_logits(self, logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Gather the logits of whole rows, [b, s, V], from the ranks that have parts of them.
        logits: this rank's part. inputs: the model's keyword arguments. Collective over those
        ranks. In this base class a rank has whole rows, and `logits` is returned."""
        return logits

    def common_length(self, longest: int) -> int:
        """Row length to which all micro-batches of a step are padded, before it is rounded up to
        length_multiple; 0 if their lengths may differ. longest: this rank's longest row. Collective
        if all ranks need one length. Base class: 0."""
        return 0

    def finish_param_sync(self) -> None:  # noqa: B027 - no gather is pending on one rank
        """Run the all-gathers of updated weights that are still due, and wait for them. Collective
        with overlap_param_gather. In this base class there are none."""

    def discard_gradients(self) -> None:
        """Drop the gradients that add_gradients() added. Collective if their reduction over ranks
        has begun. A reduction that was cut off by an error in a backward pass cannot be repaired.
        """
        self.pending = None
        self._is_sent = False

    # -- shared by both backends

    def expect_here(self, call: str, *kinds: str) -> None:
        """Raise ValueError if tensors that a call needs are away: part_sleep.py moves weights and
        optimizer states to host memory, and frees gradients. call: the call's name, for the
        message. kinds: the tensors that it needs: "model", "grad", "optimizer"."""
        away = [kind for kind in kinds if kind in self.away]
        expect(not away, f"{call} with {' and '.join(away)} in host memory: call to(device) first")

    def forward_backward(
        self, forward_step: Callable[..., Any], micro_batches: list[Any]
    ) -> Metrics:
        """Run a step's micro-batches, and compute the gradients of a whole update, ready for step()
        -> metrics per micro-batch, as from forward(). Collective."""
        self.pending = None  # drop what a failed call may have left
        metrics = self.add_gradients(forward_step, micro_batches, last=True)
        self.finish_gradients()
        return metrics

    def _take_divisor(
        self, denominator: float | None, times: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the number by which an update's gradients are to be divided -> (divisor, factor).
        divisor: see finish_gradients(), which has the same arguments. factor: turns gradients that
        were divided by the pending count (the loss count that add_gradients() sums up) into
        gradients divided by the divisor; None if they need no change, that is, with denominator
        None and times 1. Resets the pending count."""
        count = self.pending.float().clamp(min=1)
        self.pending = None
        self._is_sent = False
        if denominator is None and times == 1.0:
            return count, None
        divisor = count * times
        if denominator is not None:
            divisor = torch.full_like(count, denominator)
        return divisor, count / divisor

    @property
    def largest_norm(self) -> float | None:
        """The largest gradient norm with which weights are updated; None if any norm is accepted,
        even NaN."""
        if not self.args.check_for_nan_in_loss_and_grad:
            return None
        return self.args.grad_norm_skip_threshold or sys.float_info.max

    def rejects(self, grad_norm: float) -> bool:
        """True if an update must be skipped because its grad_norm is NaN or above largest_norm.
        False if largest_norm is None."""
        return self.largest_norm is not None and not grad_norm <= self.largest_norm

    def train_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def autocast(self) -> Any:
        """The autocast context of a forward pass in the run's precision; it does nothing in
        float32."""
        is_mixed = self.dtype != torch.float32
        return torch.autocast(parallel.device().type, dtype=self.dtype, enabled=is_mixed)

    def num_parameters(self) -> tuple[int, int]:
        """(number of parameters on this rank, number of trained ones among them)."""
        parameters = list(self.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return sum(p.numel() for p in parameters), trained

    def weigh_micro_batches(self, micro_batches: list[Any], num_filled: int) -> None:
        """Set micro_batch_weight, a factor on losses, so that empty micro-batches do not count in a
        mean over micro-batches. num_filled: number of micro-batches that are not empty, over all
        data-parallel ranks. Does nothing with calculate_per_token_loss."""
        if not self.args.calculate_per_token_loss:
            self.micro_batch_weight = len(micro_batches) * self.dp_size / num_filled

    def weigh_router_losses(
        self, micro_batches: list[Any], count_of_loss: Callable[[dict[str, Any]], float]
    ) -> None:
        """Set the weight of the routers' balancing losses in the coming step, so that their mean
        over all micro-batches that are not padding alone is added to the objective.

        A weight is needed because a schedule divides by the loss count of all ranks, or averages
        over micro-batches and ranks. count_of_loss(micro-batch): the count that its loss is divided
        by. Collective over data parallel ranks if there are balancing losses.
        """
        if self.statistics_of_routers is None or not self.losses_of_routers.on:
            return
        self.statistics_of_routers.weights.clear()  # a Session may have left some
        counts = [count_real_micro_batches(micro_batches), sum(map(count_of_loss, micro_batches))]
        numbers = torch.tensor(counts, dtype=torch.float32)
        numbers = parallel.to_device(numbers, parallel.device())
        real, counts = self._sum_over_data_parallel(numbers)
        scale = len(micro_batches) * self.dp_size
        if self.args.calculate_per_token_loss:
            scale = counts.clamp(min=1)  # finish_gradients() clamps its divisor too
        self.statistics_of_routers.loss_weight = mean_of(scale, real)

    def weigh_router_loss(self, count: float, inputs: dict[str, Any]) -> None:
        """Weigh the balancing losses of MoE routers in the next micro-batch by `count`, its loss
        count (such as its number of trained tokens). By default finish_gradients() divides by the
        sum of these counts; so the result does not depend on how a step's micro-batches are spread
        over add_gradients() calls. inputs: the micro-batch's, from model_inputs()."""
        statistics = self.statistics_of_routers
        if statistics is not None:
            statistics.loss_weight = float(count)
            if "padding_mask" in inputs:  # on megatron-core, where recomputation may come later
                statistics.weights[address_of(inputs["padding_mask"])] = float(count)

    def router_statistics(self) -> dict[str, float]:
        """Metrics of the MoE routers since the last call, over all ranks. {} if no expert was
        chosen, or if there are no statistics: statistics_of_routers is None, as for a model without
        experts. Collective, except without statistics."""
        if self.statistics_of_routers is None:
            return {}
        return self.statistics_of_routers.take(self.losses_of_routers)

    def router_sums(self) -> list[Any] | None:
        """The numbers, summed over all ranks, from which router_statistics() computes its metrics,
        as lists to save in a checkpoint. None if there are no statistics: statistics_of_routers is
        None, as for a model without experts. Collective, except without statistics."""
        if self.statistics_of_routers is None:
            return None
        return self.statistics_of_routers.sums().tolist()

    def carry_router_sums(self, sums: list[Any] | None) -> None:
        """Restore the routers' statistics in a resumed run. sums: what router_sums() returned, from
        the checkpoint. The main rank takes them; other ranks start at 0, because the numbers are
        summed over all ranks later. If `sums` is None, or is for another number of layers or
        experts, all ranks start at 0."""
        if self.statistics_of_routers is None:
            return
        rows = (
            self.statistics_of_routers.rows.zero_()
        )  # an earlier run in this process may have left sums
        if sums and parallel.is_main():
            carried = rows.new_tensor(sums)
            if carried.shape == rows.shape:  # the checkpoint may have another number of layers
                rows += carried

    def load_state(self, folder: PathLike, with_optimizer: bool = True) -> None:
        """Load a checkpoint's weights into the model and, if with_optimizer, its optimizer state.
        ValueError if its adapters do not fit this run's, or if only one of checkpoint and run has
        adapters; CheckpointError, a ValueError too, if a tensor cannot be read. Collective."""
        self.finetuning.check_checkpoint(self.model, folder)
        self.load_checkpoint(folder, self.model, self.optimizer if with_optimizer else None)

    def gradients(self) -> NamedTensors:
        """Yield the gradients of the last forward_backward() as (name, CPU tensor in float32), on
        global rank 0 only; all ranks must iterate to the end, because sharded tensors are gathered.
        Names are Hugging Face's; for adapters they are PEFT's, without its prefix. With fp16,
        gradients are multiplied by the loss scale. A buffer, such as a router's bias, is yielded
        with its value.

        Gradients replace the weights for this, so the model cannot be used afterwards."""
        self._gradients_for_weights()
        if self.finetuning.is_whole:
            for name, tensor in self._trained_weights():
                if self.finetuning.trains(module_of(name)):  # frozen weights have no gradient
                    yield name, tensor
        else:
            yield from self.finetuning.trained_tensors(self.model).items()

    def export_hf(self, folder: PathLike, max_shard_size: str | int) -> list[str]:
        """Write the trained model as a Hugging Face checkpoint, or with LoRA its adapters in PEFT's
        format -> names of this rank's files. Collective."""
        self.finish_param_sync()
        if not self.finetuning.is_whole:
            return self.export_adapters(folder)
        return self._export(folder, max_shard_size)

    def export_adapters(self, folder: PathLike) -> list[str]:
        """Write the adapters in PEFT's format -> names of this rank's files. Collective; without
        adapters nothing is done -> []."""
        return self.finetuning.export_beside(self.model, folder)

    def export_merged(self, folder: PathLike, max_shard_size: str | int) -> None:
        """Write the model with its adapters merged, as a Hugging Face checkpoint. Collective."""
        self.finish_param_sync()
        self._export(folder, max_shard_size, self.finetuning.merger(self.model))
