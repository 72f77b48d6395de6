"""The plain torch backend: a Hugging Face model, torch DDP and a torch optimizer. A fallback, and
the reference in tests of layouts.

`forward_backward` follows megatron's schedules, so the trainer's objective runs on both backends.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import cpu, parallel
from .args_rules_model import check_torch_packing
from .backend import Backend, Metrics, mean_of
from .batch import (
    Batch,
    block_diagonal_mask,
    get_ltor_masks_and_position_ids,
    model_columns,
    to_rank,
)
from .ckpt import TorchSnapshot, load_torch
from .errors import Judge, Keys, expect
from .families import FAMILIES, values_of
from .families_rows import has_value_head
from .files import IGNORE_INDEX, PathLike, describe_error
from .inputs import inputs_of
from .loss_tokens import Head, Logits, LossOfLogits, checked, token_losses
from .model_linears import extra_factors
from .model_moe import BalancingLosses, RouterStatistics, counted
from .optim import Matrices, create_grad_scaler, create_torch_optimizer
from .tables import OPTIMIZERS
from .weights_convert import Change, write_model
from .weights_files import NamedTensors, file_tensors

# -- experts in a transformers model

_LAYER = re.compile(r"\.layers\.(\d+)\.")
# how class names of transformers' routers end, in lower case
_ROUTERS = ("topkrouter", "moev1gate")


def updated_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> torch.Tensor:
    """Move a router's expert bias towards balance after a step, as DeepSeek-V3 does instead of a
    loss -> the new bias [.., E] for E experts. counts: [.., E], how often each expert was chosen in
    the step. The bias rises by `rate` for experts chosen less than average, and falls by `rate` for
    those chosen more."""
    return bias + (counts.mean(-1, keepdim=True) - counts).sign() * rate


def losses_of(config: Any, args: Keys) -> BalancingLosses:
    """The coefficients of the routers' balancing losses for a transformers model, from the training
    arguments `args`. If moe_aux_loss_coeff is None there, it is taken from `config`, the model's
    config; it is 0 if the model's family has no such number in its config, or is not in
    FAMILIES."""
    return BalancingLosses.of(args, values_of(config).get("moe_aux_loss_coeff", 0.0))


class TorchRouters:
    """Collects the logits and expert indices that the MoE routers of a transformers model output
    during training, for balancing losses and statistics.

    `statistics` is None, and nothing is collected, for a model without experts or of a family that
    is not in FAMILIES. Raises ValueError if balancing losses or bias updates are set for such a
    model, or if a model's routers are not found.
    """

    def __init__(self, model: torch.nn.Module, args: Keys) -> None:
        config = model.config
        self.losses = losses_of(config, args)
        self.bias_rate = args.moe_router_bias_update_rate
        self.statistics: RouterStatistics | None = None
        self.padding_mask: torch.Tensor  # for the next forward pass
        # None outside of a training pass of this backend: others may run the same model
        self._outputs: list[tuple[int, torch.Tensor, torch.Tensor]] | None = None
        self._modules: dict[int, torch.nn.Module] = {}
        values = values_of(config)
        experts = values.get("num_moe_experts")
        if not experts:
            if self.losses.on or self.bias_rate:
                raise ValueError(
                    "moe_aux_loss_coeff, moe_z_loss_coeff and moe_router_bias_update_rate: "
                    f"{config.model_type} has no routers here"
                )
            return
        self._topk = values["moe_router_topk"]
        self._scores = values.get("moe_router_score_function", "softmax")
        self._find(model, sum(values["moe_layer_freq"]))
        layers = config.get_text_config().num_hidden_layers
        self.statistics = RouterStatistics(layers, experts)
        self._counts = torch.zeros(layers, experts, device=parallel.device())

    def _find(self, model: torch.nn.Module, wanted: int) -> None:
        """Register a forward hook on the router of each MoE layer; routers are found by how their
        class names end. wanted: the number of MoE layers. ValueError if another number of routers
        is found."""
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith(_ROUTERS):
                layer = int(_LAYER.search(name)[1])
                block = model.get_submodule(name.rpartition(".")[0])
                has_bias = hasattr(block, "e_score_correction_bias")  # otherwise the router has it
                self._modules[layer] = block if has_bias else module
                module.register_forward_hook(functools.partial(self._keep, layer))
        if len(self._modules) != wanted:
            raise ValueError(
                f"{model.config.model_type} has experts in {wanted} layers, and routers (classes "
                f"named ...TopKRouter) were found in {len(self._modules)}: their losses and biases "
                "would be left out; use another version of transformers, or set use_mca: true"
            )

    def _keep(self, layer: int, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._outputs is not None and module.training:
            logits, _, experts = output
            self._outputs.append((layer, logits, experts))

    def expect(self, padding_mask: torch.Tensor) -> None:
        """Prepare for the next forward pass: keep its padding mask, bool [b, s], True for padding,
        and forget the outputs of earlier passes."""
        self.padding_mask = padding_mask
        self._outputs = [] if torch.is_grad_enabled() else None

    def losses_of_pass(self) -> torch.Tensor | float:
        """The routers' balancing losses in the last training forward pass (one micro-batch): their
        sum over layers, times the weight statistics.loss_weight; 0.0 if there are none. Also counts
        how often each expert was chosen, for the log and for bias updates."""
        total = 0.0
        for layer, logits, experts in self._outputs or ():
            real = ~self.padding_mask.t()
            of_rows, experts = (
                x.view(*self.padding_mask.shape, -1).transpose(0, 1) for x in (logits, experts)
            )
            of_tokens = of_rows, real, self._topk, self._scores, experts
            found = counted(self.losses, None, *of_tokens)
            self._counts[layer] += found[0][:-3]
            total = total + self.statistics.add(layer, self.losses, *found)
        self._outputs = None
        return total

    @torch.no_grad()
    def update_biases(self) -> None:
        """After a step's micro-batches, shift the routers' biases towards equal loads of experts,
        by moe_router_bias_update_rate, and reset the counts of chosen experts. Routers without
        biases stay as they are. Does nothing if the rate is 0 or the model has no routers here.
        Otherwise collective."""
        if self.statistics is None or not self.bias_rate:
            return
        counts = parallel.sum_over_all(self._counts)
        for layer, module in self._modules.items():
            bias = getattr(module, "e_score_correction_bias", None)
            if bias is not None:
                bias.copy_(updated_bias(bias, counts[layer], self.bias_rate))
        self.forget()

    def forget(self) -> None:
        """Reset the counts of chosen experts since the last update of the biases."""
        if self.statistics is not None:
            self._counts.zero_()


# -- the backend


class TokenLossModel(torch.nn.Module):
    """A Hugging Face decoder with McaGPTModel's outputs: token losses if labels are given, else
    logits; with a value head, one score per token.

    If the logits are the last hidden states times the head's weight, the loss is computed in chunks
    of rows. Other heads (scaled or capped logits, a bias) need the logits of all tokens at once."""

    def __init__(self, model: Any, loss_chunk_size: int | None) -> None:
        super().__init__()
        self.model = model.eval()
        self.loss_chunk_size = loss_chunk_size
        self.weights_differ = False  # True if rows have different weights in the objective
        self.loss_of_logits: LossOfLogits | None = None  # replaces cross entropy
        # if trains_inputs, a pass without a picture adds gradients of 0 for the vision tower
        self.inputs = inputs_of(model.config)
        self.trains_inputs = False
        self.has_value_head = has_value_head(model.config.architectures)
        self.head_is_plain = self.has_value_head or self._head_is_plain()

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """Find out whether the model's logits are its last hidden states times the head's weight:
        True if so. A test pass runs with large numbers in place of the head's output, because a cap
        would hardly change small ones. ValueError if this pass raises a RuntimeError, unless the
        GPU's memory runs out."""
        vocab_size = self.model.config.get_text_config().vocab_size
        ids = torch.arange(4, device=parallel.device())[None] % vocab_size
        head = self.model.get_output_embeddings()
        numbers = torch.arange(ids.numel() * len(head.weight), device=ids.device)
        numbers = (numbers % 97 - 48).view(*ids.shape, -1) * 256.0  # exact in 16 bits
        entered = []

        def replace(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            entered.extend(inputs)
            return numbers.to(output.dtype)

        handle = head.register_forward_hook(replace)
        try:
            logits = self.model(ids, use_cache=False).logits
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            words = f"transformers' model of this config.json does not run: {describe_error(error)}"
            raise ValueError(f"{words}: change the sizes, or set use_mca: true") from error
        handle.remove()
        hidden = self.model.base_model(ids, use_cache=False).last_hidden_state
        is_last = torch.allclose(entered[0].float(), hidden.float(), rtol=1e-3, atol=1e-3)
        return is_last and head.bias is None and torch.equal(logits.float(), numbers)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: Any = None,
        attention_mask: Any = None,
        labels: Any = None,
        places: Any = None,
        **more: Any,
    ) -> torch.Tensor:
        """Run the model on input_ids [b, s]. With labels [b, s] -> token losses, float32 [b, s], or
        [b, s, k] if the objective's loss_of_logits gives k numbers per token. Without labels ->
        logits [b, s, V], or [b, n, V] for n `places`. A model with a value head -> scores, float32
        [b, s], in both cases.

        attention_mask: bool [b or 1, 1, s, s], True means hidden. places: positions in a row whose
        logits are wanted; None: all. more: further columns of the batch for the model, such as
        those of images."""
        if attention_mask is not None:
            attention_mask = ~attention_mask  # Hugging Face's True means visible
        kwargs = dict(
            more, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        if self.has_value_head:
            hidden = self.model.base_model(input_ids, **kwargs).last_hidden_state
            losses = self.model.score(hidden)[..., 0].float()
        elif labels is None:
            if places is not None:
                kwargs["logits_to_keep"] = places
            return self.model(input_ids, **kwargs).logits
        else:
            losses = self._losses(input_ids, labels, kwargs)
        if self.trains_inputs and torch.is_grad_enabled():
            losses = losses + self.inputs.unused(self.model, more)
        return losses

    def _losses(
        self, input_ids: torch.Tensor, labels: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        if not self.head_is_plain:
            return self._losses_of_whole_logits(input_ids, labels, kwargs)
        hidden = self.model.base_model(input_ids, **kwargs).last_hidden_state
        head = self.model.get_output_embeddings()
        return token_losses(
            hidden,
            head.weight,
            labels,
            chunk_size=self.loss_chunk_size,
            extra=extra_factors(head, hidden),
            weights_differ=self.weights_differ,
            of_logits=self.loss_of_logits,
        )

    def _losses_of_whole_logits(
        self, input_ids: torch.Tensor, labels: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        if self.loss_of_logits is None:
            logits = self.model(input_ids, **kwargs).logits.float().flatten(0, 1)
            losses = F.cross_entropy(
                logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
            )
            return losses.view(labels.shape)
        answer = self.model(input_ids, output_hidden_states=True, **kwargs)
        kept = labels != IGNORE_INDEX
        weight = self.model.get_output_embeddings().weight
        head = Head(None, len(weight), 0, len(weight), labels.numel(), None, labels.shape)
        hidden = answer.hidden_states[-1]
        [places] = kept.flatten().nonzero(as_tuple=True)
        logits = Logits(answer.logits[kept], labels[kept], hidden[kept], weight, head, places)
        losses = checked(self.loss_of_logits(logits), logits)
        out = losses.new_zeros(*labels.shape, *losses.shape[1:])
        return out.index_put((kept,), losses)


class TorchBackend(Backend):
    """Backend that trains a Hugging Face model in plain torch: autocast for bf16 and fp16, DDP over
    several ranks."""

    name = "torch"
    snapshot_of = TorchSnapshot
    load_checkpoint = staticmethod(load_torch)

    def __init__(self, model: Any, args: Keys) -> None:
        super().__init__(model, args, BalancingLosses())
        self.dp_size = parallel.world_size()
        self.dp_rank = parallel.rank()
        with self.autocast():  # frozen weights may be bf16 while modules_to_save are float32
            self.loss_model = wrapped = TokenLossModel(model, args.loss_chunk_size)
        if not wrapped.head_is_plain:
            args.notes.append(
                f"{model.config.model_type} changes its logits: they are held whole, "
                "loss_chunk_size has no effect"
            )
        if args.sequence_packing:
            judge = Judge(None)
            check_torch_packing(model.config, judge)
            judge.close()
        self.inputs = wrapped.inputs
        self._resting = {
            kind: trained
            for kind, parameters in enumerate(self.inputs.parameters_of(model), 1)
            if (trained := [parameter for parameter in parameters if parameter.requires_grad])
        }
        if self.dp_size > 1:
            wrapped.trains_inputs = bool(self._resting)  # DDP waits for every gradient
            ids = [torch.cuda.current_device()] if torch.cuda.is_available() else None
            # buffers change alike on all ranks, so broadcasting them in each pass would only cost
            # time
            wrapped = torch.nn.parallel.DistributedDataParallel(
                wrapped, device_ids=ids, broadcast_buffers=False
            )
        self.chunks = [wrapped]
        self.routers = TorchRouters(model, args)
        self.losses_of_routers = self.routers.losses
        self.statistics_of_routers = self.routers.statistics
        self._max_grad_norm = args.max_grad_norm
        self._rests: set[int] = set()  # kinds of input modules that the next update skips
        self._scaler = create_grad_scaler(args) if args.fp16 else None
        self.grad_scalers = [self._scaler] if self._scaler else []

    @property
    def hf_config(self) -> dict[str, Any]:
        return self.model.config.to_dict()

    def model_inputs(self, batch: Batch) -> dict[str, Any]:
        """Make the keyword arguments of TokenLossModel.forward from an arranged micro-batch, on
        this rank's device. In packed rows, the attention mask and position ids keep documents
        apart. Also tells the routers which positions are padding."""
        device = parallel.device()
        params = batch.get("packed_seq_params")
        inputs = to_rank(batch, model_columns(batch), None, device)
        is_padding = inputs.pop("padding_mask")
        self.routers.expect(is_padding)
        if params is None:  # rows are padded on the right and attention is causal: no mask
            mask, positions = get_ltor_masks_and_position_ids(inputs["input_ids"], False)
        else:
            mask = block_diagonal_mask(batch["cu_seqlens"], device)
            positions = params.layout.positions[None]
        inputs, positions = self.inputs.for_transformers(batch, inputs, positions, is_padding)
        return dict(inputs, position_ids=positions, attention_mask=mask)

    def expect_weighted_losses(self) -> None:
        self.loss_model.weights_differ = True

    def wrap_reference(self, model: Any, of_logits: LossOfLogits | None = None) -> list[Any]:
        wrapped = TokenLossModel(model.requires_grad_(False), self.args.loss_chunk_size)
        wrapped.loss_of_logits = of_logits
        return [wrapped.eval()]

    def use_loss(self, of_logits: LossOfLogits | None) -> None:
        self.loss_model.loss_of_logits = of_logits

    def use_timers(self, timers: Callable[..., Any]) -> None:
        self._timers = timers

    def create_optimizer(self) -> Any:
        if OPTIMIZERS[self.args.optim].of_matrices:
            self._mark_matrices()
        self.optimizer = create_torch_optimizer(self.args, self.model)
        return self.optimizer

    def _mark_matrices(self) -> None:
        """Tell Muon which parameters it can update as matrices: set their attribute `matrices` (an
        optim.Matrices), except for the embeddings and the head. ValueError for stacked experts
        whose gate and up rows alternate."""
        family = FAMILIES.get(self.model.config.model_type)
        expect(
            family is None or family.stacked_experts != "in_turns",
            f"optim: {self.args.optim} on plain torch has no way to take the stacked experts of "
            f"{self.model.config.model_type} apart: set use_mca: true, or optim: adam",
        )
        head = self.model.get_output_embeddings()
        modules = [m for m in self.model.modules() if isinstance(m, torch.nn.Embedding)]
        others = {module.weight for module in (head, *modules) if module is not None}
        counts = Counter(tensor for _, tensor, _ in file_tensors(self.model))
        for tensor in counts.keys() - others:
            if tensor.dim() in (2, 3) and 1 not in tensor.shape:
                *experts, rows, _ = tensor.shape
                parts = max(counts[tensor] // math.prod(experts), 1)
                tensor.matrices = Matrices([rows // parts] * parts)

    def forward(
        self,
        forward_step: Callable[..., Any],
        micro_batches: list[Any],
        chunks: list[Any] | None = None,
    ) -> Metrics:
        [model] = chunks or self.chunks
        return self._run_all(forward_step, micro_batches, model, forward_only=True)[0]

    def _run_all(
        self,
        forward_step: Callable[..., Any],
        micro_batches: list[Any],
        model: Any,
        forward_only: bool = False,
        last: bool = True,
    ) -> tuple[Metrics, torch.Tensor]:
        """Run micro-batches forward, and backward unless forward_only -> (metrics of each, sum of
        their counts of tokens or pairs). forward_step(iterator, model): runs the next one. last:
        True if DDP shall average the gradients over ranks, in the last backward pass; False if more
        are to be added."""
        iterator = iter(micro_batches)
        metrics = []
        tokens = torch.zeros((), dtype=torch.float32, device=parallel.device())
        for i in range(len(micro_batches)):
            # DDP reads what no_sync() would set, so gradients are reduced once
            is_last = last and i == len(micro_batches) - 1
            model.require_backward_grad_sync = forward_only or is_last
            passes = self._timers("model")
            passes.start()
            with self.autocast():
                output, loss_func = forward_step(iterator, model)
            loss, count, measured = loss_func(output)
            passes.stop()
            tokens += count
            if not forward_only:
                self._backward(loss, count, len(micro_batches))
            metrics.append(measured)
        return metrics, tokens

    def add_gradients(
        self, forward_step: Callable[..., Any], micro_batches: list[Any], last: bool = False
    ) -> Metrics:
        first = self.pending is None
        if first:
            self.optimizer.zero_grad()
            self.pending = torch.zeros((), dtype=torch.float32, device=parallel.device())
        [model] = self.chunks
        metrics, tokens = self._run_all(forward_step, micro_batches, model, last=last)
        self.pending += tokens
        self._is_sent = last
        # modules for inputs have gradients of 0 from DDP alone
        if self.loss_model.trains_inputs:
            rests = self.inputs.rests(micro_batches)
            self._rests = rests if first else rests & self._rests
        return metrics

    def finish_gradients(
        self, denominator: float | None = None, times: float = 1.0
    ) -> torch.Tensor:
        if not self._is_sent:  # average as DDP would have
            for gradient in self._gradients() if self.dp_size > 1 else ():
                torch.distributed.all_reduce(gradient.div_(self.dp_size))
        for kind in self._rests & self._resting.keys():
            for parameter in self._resting[kind]:
                parameter.grad = None  # left out of the update
        self.routers.update_biases()
        if self.args.calculate_per_token_loss:
            self._divide_by_tokens(self.pending)
        divisor, factor = self._take_divisor(denominator, times)
        if factor is not None and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, factor)
        return divisor

    def discard_gradients(self) -> None:
        super().discard_gradients()
        self.routers.forget()

    def clip_at(self, max_grad_norm: float) -> None:
        self._max_grad_norm = max_grad_norm

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _backward(self, loss: torch.Tensor, count: torch.Tensor, num_micro_batches: int) -> None:
        """Run the backward pass of one micro-batch. loss: its summed loss. count: the number of
        tokens or pairs in that sum.

        With calculate_per_token_loss, gradients are those of the summed loss, and
        finish_gradients() divides them later by the count of the step. Otherwise the loss is
        divided by its count and by num_micro_batches. The routers' balancing losses are added. With
        fp16 the loss is multiplied by the loss scale."""
        if not self.args.calculate_per_token_loss:
            loss = mean_of(loss, count)
        loss = loss + self.routers.losses_of_pass()
        if not self.args.calculate_per_token_loss:
            loss = loss / num_micro_batches
        if self._scaler is not None:
            loss = loss * self._scaler.scale
        if not loss.requires_grad:  # a text batch, and only the vision tower is trained
            return
        passes = self._timers("model")
        reduction = self._timers("reduction")

        def begin_reduction() -> None:
            passes.stop()
            reduction.start()

        passes.start()
        # runs before DDP waits for reduced gradients, because that wait is queued later
        engine = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(begin_reduction))
        loss.backward()
        reduction.stop()

    def _divide_by_tokens(self, tokens: torch.Tensor) -> None:
        """Divide gradients by the number of tokens (or pairs) of all ranks. Before, they are
        averages over ranks; after, they are sums over ranks divided by that number. tokens: this
        rank's number, summed over ranks in place. Collective."""
        tokens = parallel.sum_over_all(tokens)
        if grads := self._gradients():
            torch._foreach_mul_(grads, mean_of(self.dp_size, tokens))

    def step(self) -> tuple[bool, float, int | None]:
        grads = self._gradients()
        if not grads:  # a text step, and only the vision tower is trained
            return True, 0.0, None
        if self._scaler:
            torch._foreach_mul_(grads, float(self._scaler.inv_scale))
        grad_norm = cpu.l2_norm(grads)
        is_finite = bool(grad_norm.isfinite())
        if self._scaler:
            self._scaler.update(not is_finite)
            if not is_finite:
                return False, 0.0, None  # megatron's optimizer reports an overflow like this
        if self.rejects(float(grad_norm)):
            return False, float(grad_norm), None
        torch.nn.utils.clip_grads_with_norm_(
            self.model.parameters(), self._max_grad_norm or float("inf"), grad_norm
        )
        zeros = sum(int((g == 0).sum()) for g in grads) if self.args.log_num_zeros_in_grad else None
        with self._timers("update"):
            self.optimizer.step()
        return True, float(grad_norm), zeros

    def reduce(self, totals: torch.Tensor) -> torch.Tensor:
        return parallel.sum_over_all(totals)

    _sum_over_data_parallel = reduce

    def _export(
        self, folder: PathLike, max_shard_size: str | int, change: Change | None = None
    ) -> list[str]:
        tensors = self._tensors_of_files(self.dtype, change)
        source = self.model.name_or_path
        return write_model(tensors, folder, max_shard_size, self.hf_config, source, self.dtype)

    def weights(self, change: Change | None = None) -> NamedTensors:
        return self._tensors_of_files(self.dtype, change, parallel.device())

    def weight_forms(self) -> NamedTensors:
        for name, tensor, view in file_tensors(self.model):
            dtype = self.dtype if isinstance(tensor, torch.nn.Parameter) else view.dtype
            yield name, view.to("meta", dtype)

    def _gradients_for_weights(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                if gradient is None:  # the loss does not depend on this parameter
                    gradient = torch.zeros_like(parameter)
                parameter.data = gradient.float()

    def _trained_weights(self) -> NamedTensors:
        return self._tensors_of_files(torch.float32)

    def _tensors_of_files(
        self, dtype: torch.dtype, change: Change | None = None, device: torch.device | None = None
    ) -> NamedTensors:
        """Yield (name in a Hugging Face file, tensor) for each tensor of the model, on global rank
        0; nothing on other ranks. Parameters are cast to `dtype`; buffers keep their dtype. change:
        a function of (name, tensor) whose result replaces the tensor before the cast.

        device: for copies of the tensors; None: the CPU, where tensors may share the model's
        memory."""
        if not parallel.is_main():
            return
        for name, tensor, view in file_tensors(self.model):
            part = view.to(device or "cpu", copy=device is not None or view.shape != tensor.shape)
            # a buffer, such as a router's bias, keeps its dtype, as in transformers
            kept = dtype if isinstance(tensor, torch.nn.Parameter) else part.dtype
            if change is not None:
                part = change(name, part)
            yield name, part.to(kept)
