"""The megatron-core backend: DDP on every chunk, the pipeline schedule, megatron's optimizer."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import parallel, weights_convert
from .args_rules_model import check_gate
from .backend import Backend, Metrics, mean_of
from .batch import Batch, RowLayout, model_columns, row_layout, to_rank
from .ckpt_megatron import MegatronSnapshot, load_megatron, may_rest, owned_parameters
from .errors import Judge, Keys, expect
from .families import rows_of
from .files import PathLike
from .hosts import module_of
from .loss_tokens import LossOfLogits, TrainedPlaces
from .mcore import (
    ColumnParallelLinear,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    RowParallelLinear,
    clip_grad_by_total_norm_fp32,
    finalize_model_grads,
    get_forward_backward_func,
    mpu,
    reduce_from_tensor_model_parallel_region,
)
from .model import VirtualModels
from .model_config import McaModelConfig, accumulate_in_place
from .model_moe import BalancingLosses, Experts, RouterStatistics, routers_of
from .optim import (
    Matrices,
    SplitMasterOptimizer,
    create_megatron_optimizer,
    gradient_norm,
    parts_of,
)
from .tables import OPTIMIZERS, function_of
from .weights_convert import Change
from .weights_files import NamedTensors, in_words_of

# On a GPU rows are padded to a multiple of these numbers of tokens. With few lengths, a packed row
# fits into memory that an earlier one has freed, and cuDNN, which plans attention anew for each
# length of rows in 0.1 s, plans less often.
PACKED_BUCKET = 128
ROW_BUCKET = 64


def _one_or_all(of_chunks: list[Any]) -> Any:
    """Pass model chunks to megatron as it expects them: a list if there are several, otherwise the
    only one."""
    return of_chunks if len(of_chunks) > 1 else of_chunks[0]


class MegatronBackend(Backend):
    """Backend (the trainer's access to a framework) that trains VirtualModels on megatron-core.

    models: the chunks of the model on this rank. args: the run's TrainingArguments. `chunks` has
    the same models, each wrapped in megatron's DistributedDataParallel."""

    name = "megatron"
    snapshot_of = MegatronSnapshot
    load_checkpoint = staticmethod(load_megatron)

    def __init__(self, models: VirtualModels, args: Keys) -> None:
        self.config = config = models.config
        self.chooses_recomputed = config.chooses_recomputed
        judge = Judge(args)
        check_gate(config, args, judge)
        judge.close()
        super().__init__(models, args, BalancingLosses.of(config))
        made = config.params_dtype
        expect(made == self.dtype, f"args: {self.precision}, the model: {made}: make it with these")
        self.dp_rank = mpu.get_data_parallel_rank()
        self.dp_size = mpu.get_data_parallel_world_size()
        cp_rank = mpu.get_context_parallel_rank()
        self.set_layout(config, cp_rank)
        self.counts_tokens = mpu.is_pipeline_last_stage(ignore_virtual=True) and cp_rank == 0
        self._configure(config)
        self.chunks = [self._wrap(model, first=i == 0) for i, model in enumerate(models)]
        self.claim = models.claim = object()  # who has its gradient buffers
        self._may_rest = False  # True if any rank has parameters that may rest
        self._rests: set[int] = set()  # kinds that the next update skips
        self._accumulate_in_place(models)
        experts = config.num_moe_experts
        if experts:
            layers = config.num_layers + (config.mtp_num_layers or 0)
            self.statistics_of_routers = RouterStatistics(layers, experts)
            for router in routers_of(models):
                router.statistics = self.statistics_of_routers

    def set_layout(self, config: McaModelConfig, cp_rank: int) -> None:
        """Set attributes of this backend that depend on the model and the parallel layout, such as
        document_multiple (packed documents are padded to a multiple of it). Batches and losses read
        them. config: the model's, with the layout. cp_rank: this rank's index in its
        context-parallel group."""
        self.hf_config = config.hf_config
        self.inputs = config.inputs
        cp = config.context_parallel_size
        self.context_parallel = cp, cp_rank
        if cp > 1:  # each document is split into two chunks per rank
            self.document_multiple = 2 * cp
        if config.virtual_pipeline_model_parallel_size:  # micro-batches run in whole groups
            self.micro_batch_multiple = config.pipeline_model_parallel_size
        if config.mtp_num_layers:
            self.predicts_ahead = config.mtp_loss_scaling_factor / config.mtp_num_layers

    @property
    def grad_scalers(self) -> list[Any]:
        scalers = [getattr(part, "grad_scaler", None) for part in parts_of(self.optimizer)]
        return [scaler for scaler in scalers if scaler is not None]

    def _configure(self, config: McaModelConfig) -> None:
        """Write the run's keys calculate_per_token_loss and sequence_packing into a model's config
        (the second as rows_are_packed), and set its loss_weights_differ to False.
        create_optimizer() adds the functions that megatron's schedule calls."""
        config.calculate_per_token_loss = self.args.calculate_per_token_loss
        config.rows_are_packed = self.args.sequence_packing
        config.loss_weights_differ = False

    # -- this rank's place in the layout

    @property
    def length_multiple(self) -> int:
        """Multiple to which a row's number of tokens is padded, over all context-parallel ranks.

        Under sequence parallelism the tensor-parallel ranks split each context-parallel rank's
        shard again. 8-bit kernels need multiples of 16 tokens on each rank, rows on a GPU are
        padded to multiples of ROW_BUCKET or PACKED_BUCKET, and context parallelism needs an even
        number of tokens on each rank."""
        config = self.config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        if config.fp8:  # 8-bit kernels need multiples of 16 on each rank
            multiple *= 16
        if torch.cuda.is_available():
            bucket = PACKED_BUCKET if self.args.sequence_packing else ROW_BUCKET
            multiple = math.lcm(multiple, bucket)
        cp = config.context_parallel_size
        return cp * math.lcm(2, multiple) if cp > 1 else multiple

    def common_length(self, longest: int) -> int:
        """The least length to which the rows of all micro-batches in a step are padded, if these
        must be equally long; otherwise 0. longest: the longest row in this rank's micro-batches.

        With the allgather dispatcher of MoE layers it is the longest row on all ranks, found by a
        collective. Otherwise, with pipeline parallelism but without variable_seq_lengths, it is
        `longest`: stages must know the size of what they receive."""
        if self.config.num_moe_experts and self.config.moe_token_dispatcher_type == "allgather":
            return parallel.largest(longest)[0]
        pipelined = self.config.pipeline_model_parallel_size > 1
        return longest if pipelined and not self.config.variable_seq_lengths else 0

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        """Keyword arguments of McaGPTModel.forward for a batch: this context-parallel rank's tokens
        and labels on its device, and packed_seq_params if rows are packed."""
        places = self.places(batch)
        device = parallel.device()
        batch = self.inputs.arrange(batch)
        names = model_columns(batch)
        if not self.config.num_moe_experts:  # only balancing losses read it
            names.remove("padding_mask")
        inputs = to_rank(batch, names, places, device)
        labels = (
            batch["labels"] if places is None else batch["labels"][..., places]
        )  # still on the host
        trained = TrainedPlaces.of(inputs["labels"], labels)
        if self.config.mtp_num_layers:
            ahead = function_of("part_mtp:Targets").ahead(batch, self.config.mtp_num_layers)
            inputs["labels"] = ahead.to_rank(inputs["labels"], places, device)
        return dict(
            inputs,
            trained=trained,
            position_ids=self._layout(batch).positions.expand(inputs["input_ids"].shape),
            attention_mask=None,
            packed_seq_params=batch.get("packed_seq_params"),
        )

    def places(self, batch: Batch) -> torch.Tensor | None:
        return None if self.context_parallel[0] == 1 else self._layout(batch).index

    def _layout(self, batch: Batch) -> RowLayout:
        borders = batch.get("cu_seqlens", (0, batch["input_ids"].shape[1]))
        return row_layout(borders, *self.context_parallel, parallel.device())

    def over_context_parallel(
        self, total: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert a rank's loss sum and its count to what megatron's schedule needs under context
        parallelism. With calculate_per_token_loss they are unchanged, because gradients and counts
        are summed over all ranks later.

        Otherwise megatron divides by the count, and averages over context-parallel ranks. So the
        count is summed over these ranks, which is collective, and the loss sum is multiplied by
        their number."""
        if self.config.context_parallel_size == 1 or self.config.calculate_per_token_loss:
            return total, count
        dist.all_reduce(count, group=mpu.get_context_parallel_group())
        return total * self.config.context_parallel_size, count

    def sum_over_context_parallel(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over the context-parallel ranks, which share each row. Backward returns the
        gradient unchanged, because megatron sums parameter gradients over these ranks. Collective
        in forward."""
        if self.config.context_parallel_size == 1:
            return values
        group = mpu.get_context_parallel_group()
        return reduce_from_tensor_model_parallel_region(values, group=group)

    def whole_logits(self, logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        logits = self.model.gather_logits(logits)
        size, rank = self.context_parallel
        if size == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in range(size)]
        dist.all_gather(parts, logits.contiguous(), group=mpu.get_context_parallel_group())
        whole = torch.cat(parts, 1)
        params = inputs["packed_seq_params"]
        if params is not None:
            return whole[:, params.layout.order]
        return whole[:, row_layout((0, whole.shape[1]), size, rank, logits.device).order]

    # -- training

    def _accumulate_in_place(self, models: VirtualModels) -> None:
        """Save memory for gradients on a GPU with grad_reduce_in_fp32: let the matmuls of linears
        add their weight gradients directly to DDP's float32 buffers. Otherwise nothing changes.
        models: this rank's model chunks."""
        if not torch.cuda.is_available() or not self.args.grad_reduce_in_fp32:
            return
        for model in models:
            for module in model.modules():
                if accumulate_in_place(module):
                    continue
                if isinstance(module, Experts):
                    module.accumulate_in_place()
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    module.gradient_accumulation_fusion = True

    def expect_weighted_losses(self) -> None:
        self.config.loss_weights_differ = True

    def use_loss(self, of_logits: LossOfLogits | None) -> None:
        for model in self.model:
            model.loss_of_logits = of_logits

    def use_timers(self, timers: Callable[..., Any]) -> None:
        self.config.timers = timers

    def joins_rows(self, chunks: Sequence[Any]) -> bool:
        """True if the rows of several micro-batches can go through one forward pass of these model
        chunks. It is False with pipeline parallelism, which needs equal shapes; for a model with
        experts, whose token dispatch depends on the shape; and with capped attention scores, whose
        matrix is in memory as a whole."""
        configs = [chunk.config for chunk in chunks]
        fixed = any(c.num_moe_experts or c.attn_logit_softcapping for c in configs)
        return self.config.pipeline_model_parallel_size == 1 and not fixed

    def wrap_reference(
        self, models: VirtualModels, of_logits: LossOfLogits | None = None
    ) -> list[Any]:
        self._configure(models.config)
        for model in models:
            model.loss_of_logits = of_logits
        return list(models.requires_grad_(False).eval())

    def _wrap(self, model: torch.nn.Module, first: bool) -> DistributedDataParallel:
        args = self.args
        if args.overlap_grad_reduce and any(hasattr(p, "main_grad") for p in model.parameters()):
            raise ValueError(
                "overlap_grad_reduce: the hooks of an earlier trainer are on this model: load the "
                "model again for a second one"
            )
        config = DistributedDataParallelConfig(**args.fields_of("ddp"))
        # a later chunk's communication overlaps with the compute of earlier chunks, so one bucket
        # is enough
        return DistributedDataParallel(self.config, config, model, disable_bucketing=not first)

    def create_optimizer(self) -> Any:
        """Create megatron's optimizer, set it as `optimizer` and return it. Also set the functions
        that megatron's schedule reads from the model's config."""
        config = self.config
        chunks = self.chunks
        is_whole = self.finetuning.is_whole
        dtype = config.params_dtype
        self.optimizer = create_megatron_optimizer(self.args, chunks, dtype, is_whole)
        if OPTIMIZERS[self.args.optim].of_matrices:
            self._mark_matrices()
        self._may_rest = self.inputs.trains(self.model)
        for part in parts_of(self.optimizer):
            part.config.timers = config.timers
        config.finalize_model_grads_func = self._count
        config.grad_scale_func = self.optimizer.scale_loss
        if self.args.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([c.no_sync for c in chunks])
        if self.args.overlap_param_gather:
            config.param_sync_func = _one_or_all([c.start_param_sync for c in chunks])
        return self.optimizer

    def _mark_matrices(self) -> None:
        """Tell Muon which matrices a parameter of a hidden layer contains, such as q, k and v in a
        fused one: set the attribute `matrices` (an optim.Matrices) on the parameter and on its
        master weight."""
        config = self.config
        rows = rows_of(config.hf_model_type, config)
        rows = {row.mca: row for row in rows if row.is_linear or row.is_of_inputs}
        tables = {m.weight for m in self.model.modules() if isinstance(m, torch.nn.Embedding)}
        for (name, _), view in weights_convert.own_parameters(self.model).items():
            row = rows.get(name)
            is_table = name in weights_convert.VOCABULARY or view in tables
            if row is None or is_table or view.dim() != 2:
                continue
            cut = {}
            size = len(view)
            if row.axis is not None:
                cut = dict(group=parallel.cut_group(row.expert is not None), axis=row.axis + 1)
            if row.axis == 0:
                size *= weights_convert.degree(row, config)
            groups = weights_convert.num_groups(row, config)
            sizes = [n // groups for n in weights_convert.row_sizes(row, size, config)]
            parameter = weights_convert.stacked(view)
            master = getattr(parameter, "main_param", parameter)
            parameter.matrices = master.matrices = Matrices(sizes, groups, **cut)

    def forward(
        self,
        forward_step: Callable[..., Any],
        micro_batches: list[Any],
        chunks: list[Any] | None = None,
    ) -> Metrics:
        return self._run_schedule(
            forward_step, micro_batches, chunks or self.chunks, forward_only=True
        )

    def _begin_gradients(self, micro_batches: list[Any], first: bool) -> None:
        """Prepare the gradients for some micro-batches of an update: zero them if these are the
        update's first ones (`first`). Also note which trained input modules, such as a vision
        tower, have had no input in this update so far; the update skips these. Collective if input
        modules are trained."""
        if first:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        if self._may_rest:
            rests = self.inputs.rests(micro_batches)
            self._rests = rests if first else rests & self._rests

    def _run_schedule(
        self,
        forward_step: Callable[..., Any],
        micro_batches: list[Any],
        chunks: Sequence[Any],
        forward_only: bool = False,
    ) -> Metrics:
        size, length = micro_batches[0]["input_ids"].shape
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=_one_or_all([iter(micro_batches) for _ in chunks]),
            model=_one_or_all(chunks),
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=size,
            forward_only=forward_only,
        )

    def add_gradients(
        self, forward_step: Callable[..., Any], micro_batches: list[Any], last: bool = False
    ) -> Metrics:
        config = self.config
        usual = config.no_sync_func
        first = self.pending is None
        expect(
            self.model.claim is self.claim,
            "a later trainer of this model has its gradients: use that, or make this one anew",
        )
        self._begin_gradients(micro_batches, first)
        if first:
            self.pending = torch.zeros((), dtype=torch.int, device=parallel.device())
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, config, "no_sync_func", usual)  # after an error too
            if not last:
                # megatron's schedule would end no_sync before the last micro-batch of each call
                config.no_sync_func = contextlib.nullcontext
                for chunk in self.chunks:
                    stack.enter_context(chunk.no_sync())
            metrics = self._run_schedule(forward_step, micro_batches, self.chunks)
        self._is_sent = last
        return metrics

    def _count(self, chunks: Any, num_tokens: torch.Tensor | None, **kwargs: Any) -> None:
        """Add the number of tokens in a call of megatron's schedule to the update's. The schedule
        calls this at its end in place of finalize_model_grads; finish_gradients() reduces the
        gradients later. num_tokens: None adds nothing. chunks, kwargs: not used."""
        if num_tokens is not None:
            self.pending += num_tokens

    def finish_gradients(
        self, denominator: float | None = None, times: float = 1.0
    ) -> torch.Tensor:
        if not self._is_sent:
            self._start_reduction()
        self._finalize_gradients()
        divisor, factor = self._take_divisor(denominator, times)
        for chunk in self.chunks if factor is not None else ():
            chunk.scale_gradients(factor)
        return divisor

    def _start_reduction(self) -> None:
        """Start the reduction of gradients over ranks that hooks of the backward pass would have
        started: for an update with overlap_grad_reduce in which they did not. Without that key do
        nothing."""
        if not self.args.overlap_grad_reduce:
            return
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # until a first batch was counted, finish_grad_sync starts the reduction itself
                if not getattr(group, "is_first_batch", False):
                    group.start_grad_sync()

    def discard_gradients(self) -> None:
        if self._is_sent and self.args.overlap_grad_reduce:
            for chunk in self.chunks:
                chunk.finish_grad_sync()
        super().discard_gradients()
        for router in routers_of(self.chunks):
            if router.enable_expert_bias:
                router.local_tokens_per_expert.zero_()

    def clip_at(self, max_grad_norm: float) -> None:
        for part in parts_of(self.optimizer):
            part.config.clip_grad = max_grad_norm or float("inf")

    def _finalize_gradients(self) -> None:
        """Reduce the gradients over ranks by megatron's finalize_model_grads. Collective.

        With calculate_per_token_loss they are then divided, in place, by the token count of all
        ranks, without waiting for the GPU; but if every optimizer is a SplitMasterOptimizer, the
        division is left to its update."""
        self._tokens = None
        per_token = self.args.calculate_per_token_loss
        if per_token:
            self.reduce(self.pending)
        finalize_model_grads(self.chunks)
        split = [isinstance(part, SplitMasterOptimizer) for part in parts_of(self.optimizer)]
        if per_token and all(split):
            self._tokens = self.pending
        elif per_token:
            for chunk in self.chunks:
                chunk.scale_gradients(mean_of(1.0, self.pending))

    @property
    def _gradient_factor(self) -> torch.Tensor | float:
        """The factor by which the update must still multiply gradients: 1 / token count, a float64
        tensor, if _finalize_gradients has left the division to the update; otherwise 1.0."""
        return 1.0 if self._tokens is None else mean_of(1.0, self._tokens.double())

    @torch.no_grad()
    def step(self) -> tuple[bool, float, int | None]:
        """Clip the gradients and update the weights -> (False if the update is skipped, gradient
        norm before clipping, number of zeros in the gradient or None), as Backend.step says.
        Collective.

        With split masters the update is launched before the host reads the norm, so that the GPU
        does not wait for the host; if the norm is refused, such an update changes no weight or
        moment, and its step count is taken back."""
        optimizer = self.optimizer
        if optimizer.prepare_grads():  # the loss scale of fp16 overflowed
            return False, 0.0, None
        norm = gradient_norm(optimizer) * self._gradient_factor
        norm_on_host = parallel.HostCopy(norm)
        if self._rests:
            self._leave_out()
        split = [part for part in parts_of(optimizer) if isinstance(part, SplitMasterOptimizer)]
        for part in split:
            part.multiply(self._gradient_factor, norm, self.largest_norm)
        updated = bool(split) and optimizer.step_with_ready_grads()
        grad_norm = float(norm_on_host.wait())
        num_zeros = None
        if self.rejects(grad_norm):
            for part in split:
                part.optimizer.take_back()
            return False, grad_norm, None
        for part in parts_of(optimizer):
            if part not in split and (parameters := part.get_parameters()):
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm)
        if self.args.log_num_zeros_in_grad:
            num_zeros = int(optimizer.count_zeros()) - self._num_zeros_of_padding()
        if not split:
            updated = optimizer.step_with_ready_grads()
        return bool(updated), grad_norm, num_zeros

    def _leave_out(self) -> None:
        """Remove the gradients of input modules, such as a vision tower, that had no input in this
        update, so that it skips them."""
        for _, parameter, main, _ in owned_parameters(self.optimizer, self.model):
            if may_rest(parameter) in self._rests:
                main.grad = None
                if hasattr(main, "decoupled_grad"):  # it is set again for each update
                    main.decoupled_grad = None

    def _num_zeros_of_padding(self) -> int:
        """The number of elements of the gradient that belong to rows that pad the vocabulary. They
        are zero, and the log's count of zeros leaves them out."""
        config = self.config
        modules = {module_of(name) for name in weights_convert.vocabulary_names(config)}
        if config.tie_embeddings_and_output_weights:
            modules.discard("lm_head")
        count = sum(map(self.finetuning.trains, modules))
        return count * (config.padded_vocab_size - config.vocab_size) * config.hidden_size

    # -- numbers

    def reduce(self, totals: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(totals, group=mpu.get_data_parallel_group(with_context_parallel=True))
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            last = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast(totals, src=last, group=mpu.get_pipeline_model_parallel_group())
        return totals

    def _sum_over_data_parallel(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=mpu.get_data_parallel_group())
        return values

    # -- Hugging Face out

    def _gradients_for_weights(self) -> None:
        self._gather_shards()
        factor = self._gradient_factor
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.main_grad.float() * factor

    def _gather_shards(self) -> None:
        """Complete the gradient buffers on each rank: under the distributed optimizer a rank has
        reduced only its shard, so the shards are all-gathered, which is collective. Without that
        optimizer do nothing."""
        if not self.args.use_distributed_optimizer:
            return
        for chunk in self.chunks:
            for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group = buckets.intra_distributed_optimizer_instance_group
                for bucket in buckets.buckets:
                    shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    parallel.gather_into(bucket.grad_data, shard, group=group)

    def _trained_weights(self) -> NamedTensors:
        return weights_convert.iter_hf_tensors(self.model)

    def weights(self, change: Change | None = None) -> NamedTensors:
        self.finish_param_sync()
        tensors = weights_convert.iter_hf_tensors(self.model, device=parallel.device())
        if change is not None:
            tensors = ((name, change(name, tensor)) for name, tensor in tensors)
        return self._in_words(tensors)

    def weight_forms(self) -> NamedTensors:
        return self._in_words(weights_convert.forms_of(self.model))

    def _in_words(self, tensors: NamedTensors) -> NamedTensors:
        return in_words_of(self.config.name_or_path, self.hf_config, tensors)

    def _export(
        self, folder: PathLike, max_shard_size: str | int, change: Change | None = None
    ) -> list[str]:
        return weights_convert.export_hf(self.model, folder, max_shard_size, change)

    def finish_param_sync(self) -> None:
        # with overlap_param_gather the weights of the last update are gathered in the next forward
        # pass
        if self.args.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    # -- checkpoints

    def load_state(self, folder: PathLike, with_optimizer: bool = True) -> None:
        super().load_state(folder, with_optimizer)
        if not with_optimizer and self.optimizer is not None:
            self.optimizer.reload_model_params()  # the master weights follow
