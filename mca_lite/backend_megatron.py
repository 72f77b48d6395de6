"""The megatron-core backend: DDP on every chunk, the pipeline schedule, megatron's optimizer.

Both backends answer the same few calls; the trainer knows no parallelism.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from . import lora_files, parallel, weights_convert
from .ckpt_megatron import MegatronSnapshot, load_megatron
from .model import VirtualModels
from .model_moe import routers_of
from .model_routing import BalancingLosses, RouterStatistics, count_real_micro_batches
from .optim import create_megatron_optimizer
from .packed_rows import Targets, row_layout


def _to_rank(tokens, device, index):
    """A tensor [..., s], or Targets, on a device; of its tokens those at `index` (None: all)."""
    if isinstance(tokens, Targets):
        return Targets(*(_to_rank(x, device, index) for x in tokens))
    tokens = tokens.to(device, non_blocking=True)
    return tokens if index is None else tokens[..., index]


class MegatronBackend:
    """VirtualModels in training. `chunks` are the DDP-wrapped models, what the seeds call models."""

    name = "megatron"

    def __init__(self, models: VirtualModels, args):
        self.models, self.args, self.config = models, args, models.config
        self.config.calculate_per_token_loss = args.calculate_per_token_loss
        self.config.rows_are_packed = args.sequence_packing
        self.chunks = [self._wrap(model, first=i == 0) for i, model in enumerate(models)]
        self.optimizer = None
        self._statistics = None
        if self.config.num_moe_experts:
            self._statistics = RouterStatistics(
                self.config.num_layers + (self.config.mtp_num_layers or 0),
                self.config.num_moe_experts,
                parallel.device(),
            )
            for router in routers_of(models):
                router.statistics = self._statistics

    @property
    def grad_scalers(self) -> list:
        """The loss scalers of fp16, one of each part of the optimizer, which checkpoints keep."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [
            part.grad_scaler for part in parts if getattr(part, "grad_scaler", None) is not None
        ]

    @property
    def hf_config(self) -> dict:
        """The model's config.json."""
        return self.config.hf_config

    @property
    def predicts_ahead(self) -> float:
        """What the losses of all layers for multi-token prediction together weigh beside the main loss; 0.0: there are none."""
        count = self.config.mtp_num_layers or 0
        return self.config.mtp_loss_scaling_factor / count if count else 0.0

    # -- where this rank stands

    @property
    def dp_rank(self) -> int:
        return mpu.get_data_parallel_rank()

    @property
    def dp_size(self) -> int:
        return mpu.get_data_parallel_world_size()

    @property
    def micro_batch_multiple(self) -> int:
        """The schedule with virtual stages wants whole groups of micro-batches."""
        interleaved = self.config.virtual_pipeline_model_parallel_size is not None
        return self.config.pipeline_model_parallel_size if interleaved else 1

    @property
    def context_parallel(self) -> tuple[int, int]:
        """(size, this rank's number)"""
        return self.config.context_parallel_size, mpu.get_context_parallel_rank()

    @property
    def document_multiple(self) -> int:
        """Documents are padded to a multiple of this many tokens: each is cut into two chunks a context-parallel rank."""
        cp = self.config.context_parallel_size
        return 2 * cp if cp > 1 else 1

    @property
    def length_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens: sequence parallelism cuts what context parallelism leaves."""
        tp = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        cp = self.config.context_parallel_size
        fp8 = 16 if self.config.fp8 else 1  # its kernels want local multiples of 16
        return cp * math.lcm(2, tp, fp8) if cp > 1 else math.lcm(tp, fp8)

    def common_length(self, longest: int) -> int:
        """The length that all micro-batches of a step must have, of which the longest is given; 0: each has its own.

        Pipeline stages post their receives by it; the all-gather of tokens for experts wants it on all ranks, and asks them.
        """
        if self.config.num_moe_experts and self.config.moe_token_dispatcher_type == "allgather":
            return parallel.largest(longest)[0]
        equal = (
            self.config.pipeline_model_parallel_size > 1 and not self.config.variable_seq_lengths
        )
        return longest if equal else 0

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank adds a step's tokens to the totals: one rank of those that read the same batch."""
        return (
            mpu.is_pipeline_last_stage(ignore_virtual=True) and mpu.get_context_parallel_rank() == 0
        )

    def model_inputs(self, batch: dict) -> dict:
        """This rank's part of a batch, on its device: tokens and labels cut alike, and the borders of packed documents."""
        size, rank = self.context_parallel
        device, params = parallel.device(), batch.get("packed_seq_params")
        s = batch["input_ids"].shape[1]
        layout = row_layout((0, s), size, rank, device) if params is None else params.layout
        ids, labels = batch["input_ids"], batch["labels"]
        if self.config.mtp_num_layers:
            labels = Targets.ahead(batch, self.config.mtp_num_layers)
        ids, labels = (
            _to_rank(x, device, layout.index if size > 1 else None) for x in (ids, labels)
        )
        positions = layout.positions.expand(ids.shape)
        inputs = dict(
            input_ids=ids,
            labels=labels,
            position_ids=positions,
            attention_mask=None,
            packed_seq_params=params,
        )
        if (
            self.config.num_moe_experts and "padding_mask" in batch
        ):  # padding does not count where experts are balanced
            inputs["padding_mask"] = batch["padding_mask"].to(device, non_blocking=True)[
                :, layout.index
            ]
        return inputs

    def over_context_parallel(
        self, total: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss sum, tokens) as megatron's schedule wants them from a rank that holds a part of each row.

        Per token it sums both over all ranks itself. Otherwise it divides here, by the row's tokens, and averages over
        context-parallel ranks, which have to be summed.
        """
        if self.config.context_parallel_size == 1 or self.config.calculate_per_token_loss:
            return total, count
        dist.all_reduce(count, group=mpu.get_context_parallel_group())
        return total * self.config.context_parallel_size, count

    def sum_over_context_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of what each rank got from its part of a row. Each rank's gradient is that of its own part: what the ranks
        make of the same sum is one loss, and megatron sums their gradients. Changes `values`."""
        if self.config.context_parallel_size == 1:
            return values
        return reduce_from_tensor_model_parallel_region(
            values, group=mpu.get_context_parallel_group()
        )

    # -- training

    def wrap_reference(self, models: VirtualModels) -> list:
        """Frozen models as the chunks that forward_backward runs forward only."""
        models.config.calculate_per_token_loss = self.config.calculate_per_token_loss
        models.config.rows_are_packed = self.config.rows_are_packed
        return list(models.requires_grad_(False).eval())

    def _wrap(self, model, first: bool) -> DistributedDataParallel:
        args = self.args
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=args.grad_reduce_in_fp32,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            use_distributed_optimizer=args.use_distributed_optimizer,
            bucket_size=args.ddp_bucket_size,
        )
        # later chunks' communication is hidden behind the compute of earlier ones: one bucket each
        return DistributedDataParallel(self.config, config, model, disable_bucketing=not first)

    def create_optimizer(self):
        """megatron's optimizer; also ties the model's config to it, which the schedule reads."""
        self.optimizer = create_megatron_optimizer(self.args, self.chunks, self.config.params_dtype)
        config, chunks = self.config, self.chunks
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if self.args.overlap_grad_reduce:
            config.no_sync_func = (
                [c.no_sync for c in chunks] if len(chunks) > 1 else chunks[0].no_sync
            )
        if self.args.overlap_param_gather:
            sync = [c.start_param_sync for c in chunks]
            config.param_sync_func = sync if len(chunks) > 1 else sync[0]
        return self.optimizer

    def train_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    def forward_backward(
        self, forward_step, micro_batches: list, seq_length: int, forward_only=False, chunks=None
    ) -> list[dict]:
        """Run the schedule over the micro-batches; on the last pipeline stage the metrics of each, elsewhere [].

        Gradients are left reduced over data parallel ranks and, with per-token loss, divided by the tokens of all.
        chunks: those of wrap_reference, in place of the trained ones.
        """
        chunks = self.chunks if chunks is None else chunks
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        iterators = [iter(micro_batches) for _ in chunks]
        many = len(chunks) > 1
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if many else iterators[0],
            model=chunks if many else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=seq_length,
            micro_batch_size=micro_batches[0]["input_ids"].shape[0],
            forward_only=forward_only,
        )

    def weigh_router_losses(
        self, micro_batches: list, count_of_loss: Callable[[dict], int]
    ) -> None:
        """Say what the balancing losses of a micro-batch weigh in the coming step: the objective adds their mean over all real
        micro-batches. count_of_loss: what a micro-batch's loss is a sum over. Collective where there are such losses.

        megatron divides by the counts of all ranks, or averages over micro-batches and ranks: the weight undoes that.
        """
        if self._statistics is None or not BalancingLosses.of(self.config).on:
            return
        counts = sum(map(count_of_loss, micro_batches))
        numbers = torch.tensor(
            [count_real_micro_batches(micro_batches), counts], dtype=torch.float32
        )
        numbers = numbers.to(parallel.device())
        dist.all_reduce(numbers, group=mpu.get_data_parallel_group())
        real, counts = numbers
        scale = (
            counts if self.config.calculate_per_token_loss else len(micro_batches) * self.dp_size
        )
        self._statistics.loss_weight = scale / real.clamp(min=1)

    def router_statistics(self) -> dict[str, float]:
        """What the routers did since the last call, over all ranks; {} without experts. Collective."""

        def over_all(rows):
            dist.all_reduce(rows)
            return rows

        if self._statistics is None:
            return {}
        return self._statistics.take(BalancingLosses.of(self.config), over_all)

    def step(self) -> tuple[bool, float, int | None]:
        """Clip and update -> (whether the update was made, gradient norm before clipping, zeros in the gradient).

        The answer is the same on every rank."""
        updated, grad_norm, num_zeros = self.optimizer.step()
        return bool(updated), float(grad_norm or 0.0), None if num_zeros is None else int(num_zeros)

    # -- numbers

    def reduce(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum of a vector over data parallel ranks, from the last pipeline stage, on every rank. Changes `totals`."""
        dist.all_reduce(totals, group=mpu.get_data_parallel_group(with_context_parallel=True))
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(totals, src=last, group=mpu.get_pipeline_model_parallel_group())
        return totals

    def num_parameters(self) -> tuple[int, int]:
        """(parameters of this rank, those among them that are trained)"""
        parameters = list(self.models.parameters())
        return sum(p.numel() for p in parameters), sum(
            p.numel() for p in parameters if p.requires_grad
        )

    # -- Hugging Face out

    def export_hf(self, folder, max_shard_size) -> list[str]:
        """The trained model in Hugging Face's format, or its adapters in PEFT's -> the files that this rank wrote.

        All ranks must call it."""
        self.finish_param_sync()
        if self.models.lora is not None:
            return self.export_adapters(folder)
        return weights_convert.export_hf(self.models, folder, max_shard_size)

    def export_adapters(self, folder) -> list[str]:
        """The adapters in PEFT's format, where there are any -> the files that this rank wrote. All ranks must call it."""
        if self.models.lora is None:
            return []
        return lora_files.save_adapter(self.models, folder)

    def export_merged(self, folder, max_shard_size) -> None:
        """The model with its adapters in its weights, in Hugging Face's format. All ranks must call it."""
        self.finish_param_sync()
        weights_convert.export_hf(
            self.models, folder, max_shard_size, lora_files.merger(self.models)
        )

    def finish_param_sync(self) -> None:
        """With overlap_param_gather the weights of the last update arrive during the next forward pass: fetch them now."""
        if self.args.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    # -- checkpoints

    def snapshot(self, with_optimizer: bool, copy: bool) -> MegatronSnapshot:
        """This rank's part of a checkpoint, ready to be written. All ranks must call it."""
        return MegatronSnapshot(self.models, self.optimizer if with_optimizer else None, copy)

    def load_state(self, folder, with_optimizer: bool = True) -> None:
        """Weights, and the optimizer's state, of a checkpoint of any layout. All ranks must call it."""
        lora_files.check_checkpoint(self.models, folder)
        load_megatron(folder, self.models, self.optimizer if with_optimizer else None)
        if not with_optimizer and self.optimizer is not None:
            self.optimizer.reload_model_params()  # the master weights follow
