"""The plain torch backend: a Hugging Face model, torch DDP, AdamW. The fallback, and the oracle of
every test.

`forward_backward` has the contract of megatron's schedules: the trainer's objective runs on both.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from . import cpu, parallel
from .args_rules_model import check_torch_packing
from .backend import Backend, mean_of
from .batch import block_diagonal_mask, get_ltor_masks_and_position_ids, model_columns, to_rank
from .ckpt import TorchSnapshot, load_torch
from .errors import Judge, expect
from .families import FAMILIES, values_of
from .families_rows import has_value_head
from .files import IGNORE_INDEX, describe_error
from .inputs import inputs_of
from .loss_tokens import Head, Logits, LossOfLogits, checked, token_losses
from .model_linears import extra_factors
from .model_moe import BalancingLosses, RouterStatistics, updated_bias
from .optim import Matrices, create_grad_scaler, create_torch_optimizer
from .tables import OPTIMIZERS
from .weights_convert import write_model
from .weights_files import file_tensors

# -- experts of a transformers model

_LAYER = re.compile(r"\.layers\.(\d+)\.")
# ends of the names of transformers' routers, in lower case
_ROUTERS = ("topkrouter", "moev1gate")


def losses_of(config, args) -> BalancingLosses:
    """The coefficients for a transformers config: the arguments', or its family's."""
    return BalancingLosses.of(args, values_of(config).get("moe_aux_loss_coeff", 0.0))


class TorchRouters:
    """Collects the outputs of the routers, (logits, weights, experts), in training.

    `statistics` is None for a model without experts, or of a family without a row: nothing is
    collected then. ValueError for balancing losses of such a model, and for experts without known
    routers.
    """

    def __init__(self, model, args):
        config = model.config
        self.losses = losses_of(config, args)
        self.bias_rate = args.moe_router_bias_update_rate
        self.statistics: RouterStatistics | None = None
        self.padding_mask: torch.Tensor  # of the next forward pass
        self._outputs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
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

    def _find(self, model, wanted: int) -> None:
        """Hook the router of each mixture, by the name of its class."""
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith(_ROUTERS):
                layer = int(_LAYER.search(name)[1])
                block = model.get_submodule(name.rpartition(".")[0])
                has_bias = hasattr(block, "e_score_correction_bias")  # else it is the router's
                self._modules[layer] = block if has_bias else module
                module.register_forward_hook(functools.partial(self._keep, layer))
        if len(self._modules) != wanted:
            raise ValueError(
                f"{model.config.model_type} has experts in {wanted} layers, and routers (classes "
                f"named ...TopKRouter) were found in {len(self._modules)}: their losses and biases "
                "would be left out; use another version of transformers, or set use_mca: true"
            )

    def _keep(self, layer, module, args, output):
        if module.training and torch.is_grad_enabled():
            logits, _, experts = output
            self._outputs.append((layer, logits, experts))

    def expect(self, padding_mask: torch.Tensor) -> None:
        """The next forward pass has this mask, bool [b, s] with True meaning padding."""
        self.padding_mask = padding_mask
        self._outputs = []

    def losses_of_pass(self) -> torch.Tensor | float:
        """The losses of the last forward pass, for its micro-batch.

        Counts the pass for the log and for the bias updates too.
        """
        total = 0.0
        for layer, logits, experts in self._outputs:
            real = ~self.padding_mask
            self._counts[layer] += self.statistics.count(layer, experts, real.flatten())
            if self.losses.on:
                of_rows = logits.view(*real.shape, -1).transpose(0, 1)
                total = total + self.statistics.losses(
                    layer, of_rows, real.t(), self.losses, self._topk, self._scores
                )
        self._outputs = []
        return total

    @torch.no_grad()
    def update_biases(self) -> None:
        """After the micro-batches of a step: even out the loads by moe_router_bias_update_rate.
        Collective with such a rate."""
        if self.statistics is None or not self.bias_rate:
            return
        counts = parallel.sum_over_all(self._counts)
        for layer, module in self._modules.items():
            bias = getattr(module, "e_score_correction_bias", None)
            if bias is not None:
                bias.copy_(updated_bias(bias, counts[layer], self.bias_rate))
        self._counts.zero_()


# -- the backend


class TokenLossModel(torch.nn.Module):
    """A Hugging Face decoder with the outputs of McaGPTModel: token losses with labels, logits
    without; with a value head a score of each token.

    If the logits are the last hidden states times the head's weight, the loss is taken in chunks of
    rows. Other heads (scaled or capped logits, a bias) need whole logits.
    """

    def __init__(self, model, loss_chunk_size: int | None):
        super().__init__()
        self.model = model.eval()
        self.loss_chunk_size = loss_chunk_size
        self.weights_differ = False  # True: rows weigh differently in the loss
        self.loss_of_logits: LossOfLogits | None = None  # in place of cross entropy
        # True: a forward pass without a picture has a part of 0 in the tower's gradients
        self.inputs = inputs_of(model.config)
        self.trains_inputs = False
        self.has_value_head = has_value_head(model.config.architectures)
        self.head_is_plain = self.has_value_head or self._head_is_plain()

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """True if the last hidden states enter the head, and its output leaves the model. Large
        numbers take the place of the output: a cap shows in no small ones."""
        vocab_size = self.model.config.get_text_config().vocab_size
        ids = torch.arange(4, device=parallel.device())[None] % vocab_size
        head = self.model.get_output_embeddings()
        numbers = torch.arange(ids.numel() * len(head.weight), device=ids.device)
        numbers = (numbers % 97 - 48).view(*ids.shape, -1) * 256.0  # exact in 16 bits
        entered = []

        def replace(module, inputs, output):
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
        self, input_ids, position_ids=None, attention_mask=None, labels=None, places=None, **more
    ):
        """input_ids, labels [b, s]; mask bool [b or 1, 1, s, s], True hidden -> float32 [b, s].
        places: positions of logits (None: all). more: columns for the model."""
        if attention_mask is not None:
            attention_mask = ~attention_mask  # Hugging Face's True means visible
        kwargs = dict(
            more, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        if self.has_value_head:
            hidden = self.model.base_model(input_ids, **kwargs).last_hidden_state
            return self.model.score(hidden)[..., 0].float()
        if labels is None:
            if places is not None:
                kwargs["logits_to_keep"] = places
            return self.model(input_ids, **kwargs).logits
        losses = self._losses(input_ids, labels, kwargs)
        if self.trains_inputs and torch.is_grad_enabled():
            losses = losses + self.inputs.unused(self.model, more)
        return losses

    def _losses(self, input_ids, labels, kwargs) -> torch.Tensor:
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

    def _losses_of_whole_logits(self, input_ids, labels, kwargs) -> torch.Tensor:
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
    """A Hugging Face model in training: float32 weights, autocast for bf16 and fp16, DDP over
    several ranks."""

    name = "torch"
    snapshot_of = TorchSnapshot
    load_checkpoint = staticmethod(load_torch)

    def __init__(self, model, args):
        super().__init__(model, args, BalancingLosses())
        self.dp_size = parallel.world_size()
        self.dp_rank = parallel.rank()
        with self.autocast():  # beside frozen weights in bf16, those of modules_to_save are float32
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
        parameters = self.inputs.parameters_of(model)
        self._resting = [parameter for parameter in parameters if parameter.requires_grad]
        if self.dp_size > 1:
            wrapped.trains_inputs = bool(self._resting)  # DDP waits for every gradient
            ids = [torch.cuda.current_device()] if torch.cuda.is_available() else None
            # buffers change on all ranks alike: a broadcast in each pass would only be waited for
            wrapped = torch.nn.parallel.DistributedDataParallel(
                wrapped, device_ids=ids, broadcast_buffers=False
            )
        self.chunks = [wrapped]
        self.routers = TorchRouters(model, args)
        self.losses_of_routers = self.routers.losses
        self.statistics_of_routers = self.routers.statistics
        self._max_grad_norm = args.max_grad_norm
        self._rests = False  # modules for inputs, in the next update by added gradients
        self._scaler = create_grad_scaler(args) if args.fp16 else None
        self.grad_scalers = [self._scaler] if self._scaler else []

    @property
    def hf_config(self) -> dict:
        return self.model.config.to_dict()

    def model_inputs(self, batch: dict) -> dict:
        """The batch on this rank's device; masks and positions keep packed documents apart."""
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

    def wrap_reference(self, model, of_logits=None) -> list:
        wrapped = TokenLossModel(model.requires_grad_(False), self.args.loss_chunk_size)
        wrapped.loss_of_logits = of_logits
        return [wrapped.eval()]

    def use_loss(self, of_logits) -> None:
        self.loss_model.loss_of_logits = of_logits

    def use_timers(self, timers) -> None:
        self._timers = timers

    def create_optimizer(self):
        if OPTIMIZERS[self.args.optim].of_matrices:
            self._mark_matrices()
        self.optimizer = create_torch_optimizer(self.args, self.model)
        return self.optimizer

    def _mark_matrices(self) -> None:
        """Set `matrices` of the parameters with matrices of hidden layers, for the optimizer.
        ValueError for experts whose gates and ups lie in turns."""
        family = FAMILIES.get(self.model.config.model_type)
        expect(
            family is None or not family.stacked_experts,
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
        self, forward_step, micro_batches: list, seq_length: int, chunks: list | None = None
    ) -> list[dict]:
        [model] = chunks or self.chunks
        return self._run_all(forward_step, micro_batches, model, forward_only=True)[0]

    def _run_all(
        self, forward_step, micro_batches: list, model, forward_only=False, last=True
    ) -> tuple[list[dict], torch.Tensor]:
        """(metrics of each micro-batch, sum of their counts). last: DDP averages the gradients."""
        iterator = iter(micro_batches)
        metrics = []
        tokens = torch.zeros((), dtype=torch.float32, device=parallel.device())
        for i in range(len(micro_batches)):
            # DDP reads it, as no_sync() sets it: the gradients are reduced once
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
        self, forward_step, micro_batches: list, seq_length: int, last: bool = False
    ) -> list[dict]:
        first = self.pending is None
        if first:
            self.optimizer.zero_grad()
            self.pending = torch.zeros((), dtype=torch.float32, device=parallel.device())
        [model] = self.chunks
        metrics, tokens = self._run_all(forward_step, micro_batches, model, last=last)
        self.pending += tokens
        self._is_sent = last
        # modules for inputs have gradients of 0 from DDP alone
        rests = self.loss_model.trains_inputs and self.inputs.rests(micro_batches)
        self._rests = rests and (first or self._rests)
        return metrics

    def finish_gradients(
        self, denominator: float | None = None, times: float = 1.0
    ) -> torch.Tensor:
        if not self._is_sent:  # as DDP's average
            for gradient in self._gradients() if self.dp_size > 1 else ():
                torch.distributed.all_reduce(gradient.div_(self.dp_size))
        for parameter in self._resting if self._rests else ():
            parameter.grad = None  # left out of the update
        self.routers.update_biases()
        if self.args.calculate_per_token_loss:
            self._divide_by_tokens(self.pending)
        divisor, factor = self._take_divisor(denominator, times)
        if factor is not None and (gradients := self._gradients()):
            torch._foreach_mul_(gradients, factor)
        return divisor

    def clip_at(self, max_grad_norm: float) -> None:
        self._max_grad_norm = max_grad_norm

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _backward(self, loss, count, num_micro_batches: int) -> None:
        """The backward pass of a micro-batch.

        Per token, gradients of sums, divided by all tokens in the end; otherwise the mean over
        micro-batches of the means over their tokens.
        """
        if not self.args.calculate_per_token_loss:
            loss = mean_of(loss, count)
        loss = loss + self.routers.losses_of_pass()
        if not self.args.calculate_per_token_loss:
            loss = loss / num_micro_batches
        if self._scaler is not None:
            loss = loss * self._scaler.scale
        if not loss.requires_grad:  # of text, if the tower alone is trained
            return
        passes = self._timers("model")
        reduction = self._timers("reduction")

        def begin_reduction() -> None:
            passes.stop()
            reduction.start()

        passes.start()
        # called before DDP waits for sums of gradients: its wait is queued after this
        engine = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(begin_reduction))
        loss.backward()
        reduction.stop()

    def _divide_by_tokens(self, tokens: torch.Tensor) -> None:
        """Make DDP's average of the ranks' sums the sum over all, divided by the tokens of all.
        Collective."""
        tokens = parallel.sum_over_all(tokens)
        if grads := self._gradients():
            torch._foreach_mul_(grads, mean_of(self.dp_size, tokens))

    def step(self) -> tuple[bool, float, int | None]:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        grads = [p.grad for p in parameters]
        if not grads:  # of a step of text, if the tower alone is trained
            return True, 0.0, None
        if self._scaler:
            torch._foreach_mul_(grads, float(self._scaler.inv_scale))
        grad_norm = cpu.l2_norm(grads)
        is_finite = bool(grad_norm.isfinite())
        if self._scaler:
            self._scaler.update(not is_finite)
            if not is_finite:
                return False, 0.0, None  # as megatron's optimizer
        if self.rejects(float(grad_norm)):
            return False, float(grad_norm), None
        torch.nn.utils.clip_grads_with_norm_(
            parameters, self._max_grad_norm or float("inf"), grad_norm
        )
        zeros = sum(int((g == 0).sum()) for g in grads) if self.args.log_num_zeros_in_grad else None
        with self._timers("update"):
            self.optimizer.step()
        return True, float(grad_norm), zeros

    def reduce(self, totals: torch.Tensor) -> torch.Tensor:
        return parallel.sum_over_all(totals)

    _sum_over_data_parallel = reduce

    def _export(self, folder, max_shard_size, change=None) -> list[str]:
        tensors = self._tensors_of_files(self.dtype, change)
        source = self.model.name_or_path
        return write_model(tensors, folder, max_shard_size, self.hf_config, source, self.dtype)

    def weights(self, change=None) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors_of_files(self.dtype, change)

    def weight_forms(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor, view in file_tensors(self.model):
            dtype = self.dtype if isinstance(tensor, torch.nn.Parameter) else view.dtype
            yield name, view.to("meta", dtype)

    def _gradients_for_weights(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                if gradient is None:  # the loss does not depend on it
                    gradient = torch.zeros_like(parameter)
                parameter.data = gradient.float()

    def _trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors_of_files(torch.float32)

    def _tensors_of_files(
        self, dtype: torch.dtype, change=None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in a file, tensor) on global rank 0; trained ones in `dtype`."""
        if not parallel.is_main():
            return
        for name, tensor, view in file_tensors(self.model):
            part = view.to("cpu", copy=view.shape != tensor.shape)
            # a buffer, such as a router's bias, keeps its precision, as in transformers
            kept = dtype if isinstance(tensor, torch.nn.Parameter) else part.dtype
            if change is not None:
                part = change(name, part)
            yield name, part.to(kept)
