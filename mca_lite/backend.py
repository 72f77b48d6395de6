"""Backend: the interface of both backends, and the code they share.

The trainer knows no parallelism: it calls these methods on every rank together. A method with a
body is right for both backends, or for a rank with a whole model. Both run megatron's contract of a
schedule: forward_step(iterator, model) -> (output, loss_func), and loss_func(output) -> (loss sum,
count, metrics).
"""

import abc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import cpu, kernels, parallel
from .args import check_together
from .batch import to_rank
from .errors import expect
from .finetuning import finetuning_of
from .hosts import module_of
from .loss_tokens import LossOfLogits
from .model_moe import BalancingLosses, RouterStatistics, count_real_micro_batches
from .tables import COLUMNS


def mean_of(total, count: torch.Tensor):
    """The sum `total` divided by its count, 0 without summands: the one division of losses and
    gradients by tokens."""
    return total / count.clamp(min=1)


class Backend(abc.ABC):
    """A model in training. `chunks`: the wrapped models for the schedule."""

    name: str
    snapshot_of: Any  # ckpt.TorchSnapshot or MegatronSnapshot: this rank's part of a checkpoint
    load_checkpoint: Callable  # (folder, model, optimizer or None): reads it into them
    micro_batch_multiple = 1  # a step has a multiple of this many micro-batches
    document_multiple = 1  # packed documents are padded to a multiple of this many tokens
    length_multiple = 1  # rows are padded to a multiple of this many tokens
    pad_token_id = 0  # the token in their padding
    context_parallel = (1, 0)  # (size, this rank's number)
    micro_batch_weight = 1.0  # in the mean over micro-batches; some may be empty
    predicts_ahead = 0.0  # weight of all losses of multi-token prediction beside the main loss
    counts_tokens = True  # True on one rank of those with the same batch
    dp_rank: int
    dp_size: int
    hf_config: dict  # the model's config.json
    grad_scalers: list  # the loss scalers of fp16, for checkpoints

    def __init__(self, model, args, losses: BalancingLosses):
        self.finetuning = finetuning_of(model)
        kind = self.finetuning.kind
        check_together(args, use_mca=self.name == "megatron", finetuning_type=kind)
        if args.deterministic:
            parallel.make_deterministic()  # a world from Python has not begun with initialize()
        cpu.apply_on_cuda()
        kernels.switch(args.torch_compile)
        self.model = model
        self.args = args
        self.dtype, self.precision = torch.float32, "fp32"  # of the computation
        if args.bf16:
            self.dtype = torch.bfloat16
            self.precision = "bf16"
        elif args.fp16:
            self.dtype = torch.float16
            self.precision = "fp16"
        self.losses_of_routers = losses
        self.statistics_of_routers: RouterStatistics | None = None  # of a model with experts
        self.chunks: list[torch.nn.Module] = []
        self.optimizer = None
        self.pending: torch.Tensor | None = None  # this rank's count, of calls of add_gradients
        self._is_sent = False  # the reduction of their gradients has begun
        # {"model", "grad" or "optimizer": its storages that part_sleep.py freed}
        self.away: dict[str, list] = {}

    # -- different in each backend

    @abc.abstractmethod
    def model_inputs(self, batch: dict) -> dict:
        """This rank's part of a batch, on its device: the arguments of the model's forward pass."""

    @abc.abstractmethod
    def wrap_reference(self, model, of_logits: LossOfLogits | None = None) -> list[torch.nn.Module]:
        """A frozen model as chunks for forward_backward, forward only. of_logits: in place of its
        cross entropy."""

    def places(self, batch: dict) -> torch.Tensor | None:
        """Places of this rank's tokens in the rows of an arranged batch; None: all."""
        return None

    def loss_columns(self, batch: dict) -> dict:
        """The batch with its columns for losses alone on this rank's device, cut as the model's."""
        names = [name for name in batch if name in COLUMNS and not COLUMNS[name].to_model]
        return batch | to_rank(batch, names, self.places(batch), parallel.device())

    def joins_rows(self, chunks) -> bool:
        """True if a forward pass of these chunks takes rows of several micro-batches at once."""
        return False

    @abc.abstractmethod
    def expect_weighted_losses(self) -> None:
        """Expect a weight of each token's loss that is known after the forward pass only."""

    @abc.abstractmethod
    def use_loss(self, of_logits: LossOfLogits | None) -> None:
        """Replace the trained model's cross entropy by this loss of tokens (None: restore it)."""

    @abc.abstractmethod
    def use_timers(self, timers: Callable) -> None:
        """Time a step's parts by timers(name).start() and stop(), as megatron-core's Timers."""

    @abc.abstractmethod
    def create_optimizer(self):
        """Make the optimizer, set it as `optimizer` and return it."""

    @abc.abstractmethod
    def forward(
        self, forward_step, micro_batches: list, seq_length: int, chunks: list | None = None
    ) -> list[dict]:
        """Run the schedule forward only -> the metrics of each micro-batch, [] on pipeline stages
        before the last. chunks: those of wrap_reference, in place of the trained ones."""

    @abc.abstractmethod
    def add_gradients(
        self, forward_step, micro_batches: list, seq_length: int, last: bool = False
    ) -> list[dict]:
        """Run the schedule -> metrics as forward() gives them; add the gradients to those of the
        calls since the last finish_gradients or discard_gradients. They stay on this rank; last: of
        the last call they are reduced during its backward pass."""

    @abc.abstractmethod
    def finish_gradients(
        self, denominator: float | None = None, times: float = 1.0
    ) -> torch.Tensor:
        """Sum the added gradients over the ranks and, with per-token loss, divide them, for step()
        -> the divisor: a denominator, or the sum of all counts times a number. Collective."""

    @abc.abstractmethod
    def clip_at(self, max_grad_norm: float) -> None:
        """Set the norm at which later updates clip; 0: they do not."""

    @abc.abstractmethod
    def step(self) -> tuple[bool, float, int | None]:
        """Clip and update -> (True if updated, gradient norm before clipping, zeros in the
        gradient), the same on every rank.

        A norm that is not finite prevents the update with check_for_nan_in_loss_and_grad, and one
        above grad_norm_skip_threshold. So does an overflow by the loss scale of fp16: the norm is 0
        then."""

    @abc.abstractmethod
    def reduce(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum of a vector over data parallel ranks, in place, from the last stage to every rank."""

    @abc.abstractmethod
    def _export(self, folder, max_shard_size, change: Callable | None = None) -> list[str]:
        """Write the model in Hugging Face's format, each (name, tensor) changed -> files."""

    @abc.abstractmethod
    def _gradients_for_weights(self) -> None:
        """Set each trained parameter to its whole gradient, in float32."""

    @abc.abstractmethod
    def _trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face's name, CPU tensor) of a model without adapters, on global rank 0."""

    @abc.abstractmethod
    def weights(self, change: Callable | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the model's files, CPU tensor in the dtype of the computation) without adapters,
        each changed by change(name, tensor), on global rank 0. Collective: all ranks iterate to
        the end."""

    @abc.abstractmethod
    def weight_forms(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor on the meta device) of weights(), on every rank, without their transfer.
        Collective."""

    @abc.abstractmethod
    def _sum_over_data_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks with different batches. Changes `values`."""

    # -- defaults, for a rank with a whole model

    def over_context_parallel(
        self, total: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss sum, tokens) for the schedule, by a rank with a part of each row."""
        return total, count

    def sum_over_context_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of values of the parts of a row. Changes `values`."""
        return values

    def whole_logits(self, logits: torch.Tensor, inputs: dict) -> torch.Tensor:
        """The logits [b, s, V] of whole rows, from this rank's part. Collective over the ranks
        with the other parts."""
        return logits

    def common_length(self, longest: int) -> int:
        """The length for all micro-batches of a step, given the longest; 0: any."""
        return 0

    def finish_param_sync(self) -> None:  # noqa: B027 - no gather is pending on one rank
        """Wait for the pending all-gathers of weights."""

    def discard_gradients(self) -> None:
        """Forget the added gradients. Collective with a reduction under way."""
        self.pending = None
        self._is_sent = False

    # -- the same for both

    def expect_here(self, call: str, *kinds: str) -> None:
        """ValueError if tensors that a call needs are in host memory."""
        away = [kind for kind in kinds if kind in self.away]
        expect(not away, f"{call} with {' and '.join(away)} in host memory: call to(device) first")

    def forward_backward(
        self, forward_step, micro_batches: list, seq_length: int, forward_only=False, chunks=None
    ) -> list[dict]:
        """forward(), or the gradients of a whole update, finished for step()."""
        if forward_only:
            return self.forward(forward_step, micro_batches, seq_length, chunks)
        self.pending = None  # of a call that failed
        metrics = self.add_gradients(forward_step, micro_batches, seq_length, last=True)
        self.finish_gradients()
        return metrics

    def _take_divisor(
        self, denominator: float | None, times: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(divisor of finish_gradients, factor of gradients that are divided by the pending count
        of all ranks, None for 1), no longer pending."""
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
        """The largest gradient norm of an update; None: any, even one that is not finite."""
        if not self.args.check_for_nan_in_loss_and_grad:
            return None
        return self.args.grad_norm_skip_threshold or sys.float_info.max

    def rejects(self, grad_norm: float) -> bool:
        """True if a gradient norm prevents the update."""
        return self.largest_norm is not None and not grad_norm <= self.largest_norm

    def train_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def autocast(self):
        """The context of a forward pass over float32 weights in the precision of the run."""
        is_mixed = self.dtype != torch.float32
        return torch.autocast(parallel.device().type, dtype=self.dtype, enabled=is_mixed)

    def num_parameters(self) -> tuple[int, int]:
        """(parameters of this rank, trained ones among them)"""
        parameters = list(self.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return sum(p.numel() for p in parameters), trained

    def weigh_micro_batches(self, micro_batches: list, num_filled: int) -> None:
        """Set the weight of this rank's micro-batches in their mean, of which empty ones have no
        part. num_filled: the others of all ranks."""
        if not self.args.calculate_per_token_loss:
            self.micro_batch_weight = len(micro_batches) * self.dp_size / num_filled

    def weigh_router_losses(
        self, micro_batches: list, count_of_loss: Callable[[dict], int]
    ) -> None:
        """Set the weight of a micro-batch's balancing losses in the coming step.

        The objective adds their mean over all real micro-batches. A schedule divides by the counts
        of all ranks, or averages over micro-batches and ranks: the weight undoes that.
        count_of_loss: summands of a micro-batch's loss. Collective over the data parallel ranks if
        there are such losses.
        """
        if self.statistics_of_routers is None or not self.losses_of_routers.on:
            return
        counts = [count_real_micro_batches(micro_batches), sum(map(count_of_loss, micro_batches))]
        numbers = torch.tensor(counts, dtype=torch.float32)
        numbers = parallel.to_device(numbers, parallel.device())
        real, counts = self._sum_over_data_parallel(numbers)
        scale = len(micro_batches) * self.dp_size
        if self.args.calculate_per_token_loss:
            scale = counts
        self.statistics_of_routers.loss_weight = mean_of(scale, real)

    def weigh_router_loss(self, count: int) -> None:
        """Set the weight of the balancing losses of the next micro-batch to the count of its loss:
        added gradients, divided by the sum of all counts, do not depend on calls."""
        if self.statistics_of_routers is not None:
            self.statistics_of_routers.loss_weight = float(count)

    def router_statistics(self) -> dict[str, float]:
        """Numbers of the routers since the last call, over all ranks; {} without experts.
        Collective."""
        if self.statistics_of_routers is None:
            return {}
        return self.statistics_of_routers.take(self.losses_of_routers)

    def router_sums(self) -> list | None:
        """The sums that router_statistics() reads, for a checkpoint; None without experts.
        Collective."""
        if self.statistics_of_routers is None:
            return None
        return self.statistics_of_routers.sums().tolist()

    def carry_router_sums(self, sums: list | None) -> None:
        """Restore router_sums() of a resumed run."""
        if self.statistics_of_routers is None:
            return
        rows = self.statistics_of_routers.rows.zero_()  # of an earlier run in this process
        if sums and parallel.is_main():
            carried = rows.new_tensor(sums)
            if carried.shape == rows.shape:  # not of another number of layers
                rows += carried

    def load_state(self, folder, with_optimizer: bool = True) -> None:
        """Load weights, and the optimizer's state, of a checkpoint. Collective."""
        self.finetuning.check_checkpoint(self.model, folder)
        self.load_checkpoint(folder, self.model, self.optimizer if with_optimizer else None)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face's or PEFT's name, float32 CPU tensor) of each gradient of the last
        forward_backward, on global rank 0. All ranks must iterate to the end.

        The gradients replace the weights and are exported: the model is of no use afterwards.
        Collectives: those of an export, and a gather of the distributed optimizer's shards."""
        self._gradients_for_weights()
        if self.finetuning.is_whole:
            for name, tensor in self._trained_weights():
                if self.finetuning.trains(module_of(name)):  # others are no gradients
                    yield name, tensor
        else:
            yield from self.finetuning.trained_tensors(self.model).items()

    def export_hf(self, folder, max_shard_size) -> list[str]:
        """Write the trained model in Hugging Face's format, or its adapters in PEFT's -> this
        rank's files. Collective."""
        self.finish_param_sync()
        if not self.finetuning.is_whole:
            return self.export_adapters(folder)
        return self._export(folder, max_shard_size)

    def export_adapters(self, folder) -> list[str]:
        """Write the adapters, if any, in PEFT's format -> this rank's files. Collective."""
        return self.finetuning.export_beside(self.model, folder)

    def export_merged(self, folder, max_shard_size) -> None:
        """Write the model with merged adapters in Hugging Face's format. Collective."""
        self.finish_param_sync()
        self._export(folder, max_shard_size, self.finetuning.merger(self.model))
