"""What the trainer asks of a backend, and what both backends answer in the same way.

The trainer knows no parallelism: it calls these methods on every rank together. The abstract
methods are each backend's own. A method with a body is right for both, or for a rank that holds a
whole model. megatron's contract of a schedule holds for both: forward_step(iterator, model) ->
(output, loss_func), and loss_func(output) -> (loss sum, count, metrics).
"""

import abc
from collections.abc import Callable, Iterator

import torch

from . import cpu, kernels, lora, lora_files, parallel
from .args import check_together
from .batch import to_rank
from .loss_tokens import LossOfLogits
from .model_moe import BalancingLosses, RouterStatistics, count_real_micro_batches
from .tables import COLUMNS


class Backend(abc.ABC):
    """A model in training. `chunks` are the wrapped models that the schedule runs."""

    name: str
    snapshot_of: Callable  # (model, optimizer or None, copy) -> this rank's part of a checkpoint
    load_checkpoint: Callable  # (folder, model, optimizer or None): what it wrote, into them
    micro_batch_multiple = 1  # a step has a multiple of this many micro-batches
    document_multiple = 1  # packed documents are padded to a multiple of this many tokens
    length_multiple = 1  # rows are padded to a multiple of this many tokens
    context_parallel = (1, 0)  # (size, this rank's number)
    predicts_ahead = 0.0  # weight of all losses of multi-token prediction beside the main loss
    counts_tokens = True  # one rank of those that read the same batch adds its tokens to the totals
    dp_rank: int
    dp_size: int

    def __init__(self, model, args, losses: BalancingLosses):
        kind = "full" if lora.spec_of(model) is None else "lora"
        check_together(args, use_mca=self.name == "megatron", finetuning_type=kind)
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

    # -- each backend's own

    @property
    @abc.abstractmethod
    def hf_config(self) -> dict:
        """The model's config.json."""

    @property
    @abc.abstractmethod
    def grad_scalers(self) -> list:
        """The loss scalers of fp16, which checkpoints keep."""

    @abc.abstractmethod
    def model_inputs(self, batch: dict) -> dict:
        """This rank's part of a batch, on its device: the arguments of the model's forward pass."""

    @abc.abstractmethod
    def wrap_reference(self, model) -> list[torch.nn.Module]:
        """A frozen model as chunks that forward_backward runs forward only."""

    def places(self, batch: dict) -> torch.Tensor | None:
        """Places of this rank's tokens in the rows of an arranged batch; None: all."""
        return None

    def loss_columns(self, batch: dict) -> dict:
        """The batch with its columns for losses alone on this rank's device, cut as the model's."""
        names = [name for name in batch if name in COLUMNS and not COLUMNS[name].to_model]
        return batch | to_rank(batch, names, self.places(batch), parallel.device())

    def joins_rows(self, chunks) -> bool:
        """Whether a forward pass of these chunks takes rows of several micro-batches at once."""
        return False

    @abc.abstractmethod
    def expect_weighted_losses(self) -> None:
        """Say that each token's loss gets a weight that is known after the forward pass only."""

    @abc.abstractmethod
    def use_loss(self, of_logits: LossOfLogits | None) -> None:
        """Take this loss of the trained model's tokens in place of cross entropy (None: that)."""

    @abc.abstractmethod
    def create_optimizer(self):
        """Make the optimizer, which is also kept as `optimizer`."""

    @abc.abstractmethod
    def forward_backward(
        self, forward_step, micro_batches: list, seq_length: int, forward_only=False, chunks=None
    ) -> list[dict]:
        """Run the schedule over the micro-batches; on the last pipeline stage the metrics of each,
        elsewhere [].

        Gradients are left reduced over data parallel ranks and, with per-token loss, divided by the
        tokens of all. chunks: those of wrap_reference, in place of the trained ones.
        """

    @abc.abstractmethod
    def step(self) -> tuple[bool, float, int | None]:
        """Clip and update -> (whether the update was made, gradient norm before clipping, zeros in
        the gradient). The answer is the same on every rank.

        No update is made with a norm that is not finite, where check_for_nan_in_loss_and_grad is
        set, nor with gradients that the loss scale of fp16 overflowed: the norm is 0 then."""

    @abc.abstractmethod
    def reduce(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum of a vector over data parallel ranks, in place, from the last stage to every rank."""

    @abc.abstractmethod
    def _export(self, folder, max_shard_size, change: Callable | None = None) -> list[str]:
        """The model in Hugging Face's format, each (name, tensor) changed -> files written."""

    @abc.abstractmethod
    def _gradients_for_weights(self) -> None:
        """Give each trained parameter its whole gradient, in float32, for its value."""

    @abc.abstractmethod
    def _trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face's name, CPU tensor) of a model without adapters, on global rank 0."""

    @abc.abstractmethod
    def _sum_over_data_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that read different batches. Changes `values`."""

    # -- of one rank with a whole model, where a backend does not say otherwise

    def over_context_parallel(
        self, total: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss sum, tokens) for the schedule, of a rank that may hold a part of each row."""
        return total, count

    def sum_over_context_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank got from its part of a row. Changes `values`."""
        return values

    def whole_logits(self, logits: torch.Tensor, inputs: dict) -> torch.Tensor:
        """The logits [b, s, V] of whole rows, where this rank may have computed a part of them.
        Collective over the ranks that share them."""
        return logits

    def common_length(self, longest: int) -> int:
        """The length that all micro-batches of a step must have, of which the longest is given; 0:
        each has its own."""
        return 0

    def finish_param_sync(self) -> None:  # noqa: B027 - nothing is on its way on one rank
        """Wait for weights that are on their way from other ranks."""

    # -- the same for both

    def train_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def autocast(self):
        """The context of a forward pass over float32 weights in the precision of the run."""
        is_mixed = self.dtype != torch.float32
        return torch.autocast(parallel.device().type, dtype=self.dtype, enabled=is_mixed)

    def num_parameters(self) -> tuple[int, int]:
        """(parameters of this rank, those among them that are trained)"""
        parameters = list(self.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return sum(p.numel() for p in parameters), trained

    def weigh_router_losses(
        self, micro_batches: list, count_of_loss: Callable[[dict], int]
    ) -> None:
        """Say what the balancing losses of a micro-batch weigh in the coming step.

        The objective adds their mean over all real micro-batches. A schedule divides by the counts
        of all ranks, or averages over micro-batches and ranks: the weight undoes that.
        count_of_loss: what a micro-batch's loss is a sum over. Collective over the data parallel
        ranks where there are such losses.
        """
        if self.statistics_of_routers is None or not self.losses_of_routers.on:
            return
        own = [count_real_micro_batches(micro_batches), sum(map(count_of_loss, micro_batches))]
        numbers = torch.tensor(own, dtype=torch.float32).to(parallel.device())
        real, counts = self._sum_over_data_parallel(numbers)
        scale = len(micro_batches) * self.dp_size
        if self.args.calculate_per_token_loss:
            scale = counts
        self.statistics_of_routers.loss_weight = scale / real.clamp(min=1)

    def router_statistics(self) -> dict[str, float]:
        """What the routers did since the last call, over all ranks; {} without experts.

        Collective over all ranks.
        """
        if self.statistics_of_routers is None:
            return {}
        return self.statistics_of_routers.take(self.losses_of_routers, parallel.sum_over_all)

    def router_sums(self) -> list | None:
        """What router_statistics() would be made of now, for a checkpoint; None without experts.
        Collective over all ranks."""
        if self.statistics_of_routers is None:
            return None
        return parallel.sum_over_all(self.statistics_of_routers.rows.clone()).tolist()

    def carry_router_sums(self, sums: list | None) -> None:
        """Go on from the router_sums() of a run that is resumed."""
        if self.statistics_of_routers is None:
            return
        rows = self.statistics_of_routers.rows.zero_()  # a run in this process may have left some
        if sums and parallel.is_main():
            carried = rows.new_tensor(sums)
            if carried.shape == rows.shape:  # another number of layers begins anew
                rows += carried

    def snapshot(self, with_optimizer: bool, copy: bool):
        """This rank's part of a checkpoint, ready to be written. All ranks must call it."""
        return self.snapshot_of(self.model, self.optimizer if with_optimizer else None, copy)

    def load_state(self, folder, with_optimizer: bool = True) -> None:
        """Weights, and the optimizer's state, of a checkpoint. All ranks must call it."""
        lora_files.check_checkpoint(self.model, folder)
        self.load_checkpoint(folder, self.model, self.optimizer if with_optimizer else None)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face's or PEFT's name, float32 CPU tensor) of what the last forward_backward
        left, on global rank 0. All ranks must iterate to the end.

        The gradients take the weights' place, and go the way of an export: the model is no model
        afterwards. Collectives: those of an export, and a gather of the distributed optimizer's
        shards."""
        self._gradients_for_weights()
        if lora.spec_of(self.model) is None:
            yield from self._trained_weights()
        else:
            yield from lora_files.trained_tensors(self.model).items()

    def export_hf(self, folder, max_shard_size) -> list[str]:
        """The trained model in Hugging Face's format, or its adapters in PEFT's -> the files that
        this rank wrote. All ranks must call it."""
        self.finish_param_sync()
        if lora.spec_of(self.model) is not None:
            return self.export_adapters(folder)
        return self._export(folder, max_shard_size)

    def export_adapters(self, folder) -> list[str]:
        """The adapters, if any, as PEFT has them -> files that this rank wrote. Collective."""
        if lora.spec_of(self.model) is None:
            return []
        return lora_files.save_adapter(self.model, folder)

    def export_merged(self, folder, max_shard_size) -> None:
        """The model with its adapters in its weights, as Hugging Face has it. Collective."""
        self.finish_param_sync()
        self._export(folder, max_shard_size, lora_files.merger(self.model))
