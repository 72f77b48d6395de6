"""LoRA layers: y = W x + scale * B A x with W frozen, as in PEFT.

An adapter belongs to a module of the Hugging Face model (q_proj, gate_proj, embed_tokens, ...),
also where megatron holds several of them in one matrix: one GEMM serves the A of all, and each has
a B of its own. An adapter is the submodule "lora" of the module that it changes. It must be there
before DDP wraps the model.

Letters: r rank, h hidden size, V vocabulary, tp the tensor-parallel size, s sequence, b batch; of
experts, n on this rank, f columns of one on this rank, T tokens. Only activations r wide cross
ranks, or the gradient of a matrix where the linear's product has the adapter in it. What each
matrix of a cut linear is, for megatron's gradient reduction and norm:

    column        A whole, its gradient complete, or that of A x. B cut along its rows.
    column, SP    A whole, its gradient partial over the sequence (marked sequence_parallel). B cut.
    row           A cut along its columns. B whole, complete.
    row, SP       A cut. B whole, partial over the sequence (marked sequence_parallel).
    not cut       A and B whole and complete; with SP both partial over the sequence.
    experts       gate, up: A [n, r, h] whole, B [n, f, r] cut. down: A [n, r, f] cut, B [n, h, r]
                  whole. The dispatcher sums activations over the expert-tensor-parallel ranks: each
                  has a part of the gradient of a whole matrix, and the parts are summed here.
"""

import abc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import parallel
from .args import FinetuningArguments
from .args_values import check_keys
from .errors import ConfigError
from .kernels import rms_norm
from .mcore import get_cuda_rng_tracker, mappings

# -- a frozen weight and its adapter as one product


def with_room(weight, columns: int, rooms: dict) -> torch.Tensor:
    """A buffer [..., out, in + columns]: `weight`, whose data moves into it, and beside it columns
    to which B is written. rooms: the buffers of an adapter, by the shape of their weight."""
    room = rooms.get(weight.shape)
    inputs = weight.shape[-1]
    if room is None or room.data_ptr() != weight.data_ptr() or room.dtype != weight.dtype:
        room = rooms[weight.shape] = weight.new_zeros(*weight.shape[:-1], inputs + columns)
        weight.data = room[..., :inputs].copy_(weight)
    return room


def _float_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left^T right, float32."""
    if left.is_cuda:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    return (left.t() @ right).float()


class AdaptedProduct(torch.autograd.Function):
    """x W^T + scale (x A^T) B^T of a frozen W as one product [x, scale x A^T] [W, B]^T, which is
    rounded once.

    Added to a product that is rounded already, an update smaller than half of its last digit would
    be lost. A product's own addition (addmm) does not help: cuBLAS rounds to bf16 before it adds.
    """

    @staticmethod
    def forward(ctx, x, weight, room, a, b, scale, group=None):
        """room: what with_room gives for `weight`; its columns for B are written. group:
        the ranks of which each has a part of the sequence in x, and here gets the whole product;
        A's gradient is that of its own part then. Collective over it, both ways."""
        a = a.to(x.dtype)
        b = b.to(x.dtype)
        whole = x if group is None else mappings._gather_along_first_dim(x, group)
        flat = whole.reshape(-1, x.shape[-1])
        low = (flat @ a.t()).mul_(scale)
        room[:, x.shape[-1] :].copy_(b)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        ctx.group = group
        return (torch.cat([flat, low], 1) @ room.t()).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight, a, b, low = ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1])
        grad = grad.reshape(-1, grad.shape[-1])
        d_low = (grad @ b).mul_(ctx.scale)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (d_low @ a).addmm_(grad, weight)
        if ctx.group is not None:
            to_parts = mappings._reduce_scatter_along_first_dim
            d_low = to_parts(d_low, ctx.group)
            d_x = d_x if d_x is None else to_parts(d_x, ctx.group)
        d_x = d_x if d_x is None else d_x.view(x.shape)
        d_a = _float_product(d_low, flat)
        d_b = _float_product(grad, low)
        return d_x, None, None, d_a, d_b, None, None


class AdaptedExperts(torch.autograd.Function):
    """Of each expert x W^T + low B^T of a frozen W as one product [x, low] [W, B]^T, which is
    rounded once."""

    @staticmethod
    def forward(ctx, x, low, weight, b, room, multiply):
        """x [T, in], low [T, c], weight [n, ..., in], b [n, out, c]; room as above. multiply(x, w):
        each expert's tokens times its w^T."""
        room = room.flatten(1, -2)
        room[..., x.shape[-1] :].copy_(b)
        ctx.save_for_backward(low, weight, b)
        ctx.multiply = multiply
        return multiply(torch.cat([x, low], 1), room)

    @staticmethod
    def backward(ctx, grad):
        low, weight, b = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = ctx.multiply(grad, weight.flatten(1, -2).transpose(1, 2))
        with torch.enable_grad():  # r wide: its gradients are those of any product of experts
            low = low.detach().requires_grad_()
            b = b.detach().requires_grad_()
            product = ctx.multiply(low, b)
        d_low, d_b = torch.autograd.grad(product, (low, b), grad)
        return d_x, d_low, None, d_b, None, None


def normed(module, x):
    """The input of the matrix itself: Transformer Engine's fused linears apply a norm before it."""
    weight = getattr(module, "layer_norm_weight", None)
    return x if weight is None else rms_norm(x, weight, module.eps, module.zero_centered_gamma)


def suit_transformer_engine(module, adapter) -> None:
    """What a linear of Transformer Engine needs that has this adapter: in bf16 on one rank of
    tensor parallelism AdaptedProduct in place of its own product."""
    # it asks once that all of its parameters, the adapter's too, have its input's dtype: it has
    module.activation_dtype = module.weight.dtype
    adapter.in_half = bool(module.config.fp8)  # float32 products take longer than 8-bit ones
    if adapter.tp > 1 or adapter.in_half:
        return

    def forward(x):
        """(output, None), or (output without bias, bias)."""
        x = normed(module, x)
        weight = module.weight
        out = adapter(x, weight) if adapter.adds_in_product(weight) else F.linear(x, weight)
        bias = module.bias if module.use_bias else None
        if bias is None or module.te_return_bias:
            return out, bias
        return out + bias, None

    module.forward = forward
    adapter.in_product = True


# -- adapters of layers

PROJECTIONS = ("gate", "up", "down")  # of an expert
Names = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class LoraSpec:
    """What adapters a model has. modules: the adapted HF modules, which lora.plan fills in.

    Raises ConfigError by the rules of its keys in FinetuningArguments.
    """

    rank: int = 8
    alpha: float | None = None  # None: 2 * rank
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all",)
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    base_model: str | None = None

    def __post_init__(self):
        keys = dict(lora_rank=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout)
        if problems := check_keys(FinetuningArguments, **keys):
            raise ConfigError(problems)
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2 * self.rank)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class Piece(NamedTuple):
    """This rank's part of one matrix of PEFT.

    key: the matrix's name in a file, without PEFT's prefix. part: where it is in `parameter` (a
    slice of rows, or an expert's number). axis: where `group` cuts the matrix, None: whole. real:
    the length of the whole matrix along axis, where the parameters are padded.
    """

    key: str
    parameter: torch.nn.Parameter
    part: slice | int
    axis: int | None
    group: dist.ProcessGroup | None  # None: this rank alone
    real: int | None = None
    # its group is the expert-tensor-parallel one; other ranks have other experts
    is_expert: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        return self.parameter.detach()[self.part]

    @property
    def full_shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.shape)
        if self.axis is not None:
            shape[self.axis] = self.real or shape[self.axis] * self.group.size()
        return tuple(shape)

    def take(self, full: torch.Tensor) -> None:
        """Copy this rank's part of the whole matrix in."""
        if self.axis is not None:
            size = self.tensor.shape[self.axis]
            missing = size * self.group.size() - full.shape[self.axis]
            pad = (0, missing) if self.axis == 1 else (0, 0, 0, missing)
            full = F.pad(full, pad).narrow(self.axis, self.group.rank() * size, size)
        self.tensor.copy_(full)

    def whole(self) -> torch.Tensor:
        """The whole matrix. Collective: gathers over the group."""
        full = parallel.whole(self.tensor, self.axis, self.group)
        return full if self.axis is None else full.narrow(self.axis, 0, self.full_shape[self.axis])


def _side_by_side(bs, widths, columns: int, like: torch.Tensor) -> list[torch.Tensor]:
    """B of each projection [..., width, columns], with columns of its own; zeros for None. like:
    one of the matrices A."""
    blocks = []
    first = 0
    for b, width in zip(bs, widths, strict=True):
        if b is None:
            blocks.append(like.new_zeros(*like.shape[:-2], width, columns))
        else:
            blocks.append(F.pad(b, (first, columns - first - b.shape[-1])))
            first += b.shape[-1]
    return blocks


class Adapter(torch.nn.Module, abc.ABC):
    """Base of all adapters.

    names: for each projection the Hugging Face modules that it consists of (one; of experts, that
    of each local expert), () for a projection without adapter. group: the ranks that cut the
    module, None on plain torch.
    """

    in_product = False  # whether the linear's own product may add the adapter's (adds_in_product)
    in_half = False  # whether its products run in the input's dtype, as beside 8-bit ones
    num_stack_axes = 0  # axes of a parameter before those of a matrix: 1 for the experts of a layer

    def __init__(
        self, spec: LoraSpec, names: Names, group=None, sequence_parallel=False, device=None
    ):
        super().__init__()
        self.spec = spec
        self.names = names
        self.group = group
        self.device = device
        self.tp = group.size() if group is not None else 1
        self.rank = group.rank() if group is not None else 0
        self.sequence_parallel = sequence_parallel and self.tp > 1
        self.enabled = True
        self.axes: dict[str, int | None] = {}  # parameter -> the matrix's axis that the group cuts
        # parameter -> length of the whole matrix along that axis, which the vocabulary may pad
        self.real: dict[str, int] = {}
        self._rooms: dict[torch.Size, torch.Tensor] = {}  # by the shape of their weight

    def _add(self, name: str, shape, axis: int | None, partial: bool = False) -> None:
        """Add a float32 parameter. partial: its gradient is a part of the sum over the sequence."""
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=self.device))
        cut = axis is not None and self.tp > 1
        parameter.tensor_model_parallel = cut
        parameter.partition_dim = axis if cut else -1
        parameter.partition_stride = 1
        parameter.sequence_parallel = partial and self.sequence_parallel
        self.register_parameter(name, parameter)
        self.axes[name] = axis if cut else None

    @abc.abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """This rank's parts of the matrices of PEFT that the adapter stands for."""

    def _piece(self, key: str, name: str, part=slice(None)) -> Piece:
        is_expert = self.num_stack_axes > 0
        real = self.real.get(name)
        return Piece(key, getattr(self, name), part, self.axes[name], self.group, real, is_expert)

    def _summed(self, low: torch.Tensor, scatter: bool) -> torch.Tensor:
        """The sum over the group, or this rank's part of the sequence of it. Collective."""
        if scatter:
            return mappings.reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return mappings.reduce_from_tensor_model_parallel_region(low, group=self.group)

    def adds_in_product(self, weight: torch.Tensor) -> bool:
        """Whether the linear's own product can add the adapter's, so that the sum is rounded once:
        beside a frozen matrix in half precision, without dropout."""
        drops = self.training and self.spec.dropout > 0.0
        is_half = weight.dtype in (torch.bfloat16, torch.float16)
        return self.enabled and is_half and not (weight.requires_grad or drops)

    def _dropped(self, x: torch.Tensor, is_shared: bool = False) -> torch.Tensor:
        """x after dropout. is_shared: all ranks have the same x, and must drop the same of it."""
        if not self.training or self.spec.dropout == 0.0:
            return x
        if is_shared:
            return F.dropout(x, self.spec.dropout)
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.spec.dropout)


class LoraAdapter(Adapter):
    """The adapters of one linear, which may hold several projections.

    widths: outputs of each projection on this rank. cut: "column", "row" or None. groups: query
    groups of this rank, if the outputs are interleaved by them. vocab_size: the real V of an output
    layer that is padded.
    """

    def __init__(
        self, spec, names, in_size, widths, cut=None, groups=None, vocab_size=None, **shared
    ):
        super().__init__(spec, names, **shared)
        self.widths = widths
        self.cut = cut
        self.groups = groups
        count = sum(map(bool, names))
        is_row = cut == "row"
        is_column = cut == "column"
        self._add("lora_A", (count * spec.rank, in_size), 1 if is_row else None, partial=not is_row)
        for i, (of_projection, width) in enumerate(zip(names, widths, strict=True)):
            if of_projection:
                axis = 0 if is_column else None
                self._add(f"lora_B_{i}", (width, spec.rank), axis, partial=not is_column)
        if vocab_size is not None:
            self.real["lora_B_0"] = vocab_size

    def pieces(self) -> Iterator[Piece]:
        r = self.spec.rank
        first = 0
        for i, of_projection in enumerate(self.names):
            for name in of_projection:
                yield self._piece(f"{name}.lora_A.weight", "lora_A", slice(first, first + r))
                yield self._piece(f"{name}.lora_B.weight", f"lora_B_{i}")
                first += r

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """x as the linear gets it -> scale * B A x as the linear gives it, float32 (in_half: in x's
        dtype).

        weight: the linear's own matrix, if adds_in_product; the result is W x + scale * B A x then,
        in x's dtype.
        """
        if weight is not None:
            return self._product(x, weight)
        low = self.low(x)
        outs = []
        lows = iter(low.split(self.spec.rank, -1))
        for b, width in zip(self._bs(), self.widths, strict=True):
            if b is None:
                outs.append(low.new_zeros(*low.shape[:-1], width))
            else:
                outs.append(F.linear(next(lows), b.to(low.dtype)))
        return self._joined(outs, low.dim() - 1)

    def _bs(self) -> list[torch.Tensor | None]:
        """B of each projection."""
        return [getattr(self, f"lora_B_{i}", None) for i in range(len(self.names))]

    def _joined(self, parts: list[torch.Tensor], axis: int) -> torch.Tensor:
        """What each projection has along an axis, in the order of the linear's outputs."""
        if self.groups is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
        parts = [part.unflatten(axis, (self.groups, -1)) for part in parts]
        return torch.cat(parts, axis + 1).flatten(axis, axis + 1)

    def _product(self, x, weight):
        """W x + scale * B A x; of a linear that is cut along its columns this rank's part of that
        sum, with its own part of A x. Collective: gradients of a whole matrix are summed where
        megatron does not (it does under sequence parallelism)."""
        a = self.lora_A
        gathers = None
        # B of all projections as one matrix [out, projections * r]
        b = self._joined(_side_by_side(self._bs(), self.widths, len(a), like=a), 0)
        if self.cut == "column" and self.sequence_parallel:
            gathers = self.group
        elif self.cut == "column" and self.tp > 1:
            a = parallel.sum_gradients(a, self.group)
            x = parallel.sum_gradients(x, self.group)
        elif self.cut == "row" and self.tp > 1 and not self.sequence_parallel:
            b = parallel.sum_gradients(b, self.group)
        room = with_room(weight, len(self.lora_A), self._rooms)
        return AdaptedProduct.apply(x, weight, room, a, b, self.spec.scale, gathers)

    def low(self, x: torch.Tensor) -> torch.Tensor:
        """scale * A x, float32 or in x's dtype; of a cut linear summed over its ranks, or of the
        whole sequence."""
        # without sequence parallelism every rank of a group sees the same x, but for row-cut
        # linears
        is_shared = self.tp == 1 or (self.cut != "row" and not self.sequence_parallel)
        dtype = x.dtype if self.in_half else self.lora_A.dtype
        low = F.linear(self._dropped(x.to(dtype), is_shared), self.lora_A.to(dtype))
        return self._across_ranks(low) * self.spec.scale

    def _across_ranks(self, low: torch.Tensor) -> torch.Tensor:
        if self.tp == 1 or self.cut is None:
            return low
        if self.cut == "row":
            return self._summed(low, scatter=self.sequence_parallel)
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=self.group
            )
        return mappings.copy_to_tensor_model_parallel_region(low, group=self.group)

    def merged(self, router: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The weight of transformers' router, which nothing cuts, with the adapter in it."""
        delta = self.spec.scale * self.lora_B_0 @ self.lora_A
        return {"weight": (router.weight.float() + delta).to(router.weight.dtype)}


class LoraEmbedding(Adapter):
    """The adapter of an embedding: scale * B A[:, token]. As in PEFT A [r, V / tp] starts at zero.

    rows: V / tp, padding included. scatters: the embedding gives each rank a part of the sequence.
    """

    def __init__(self, spec, names, rows, hidden_size, vocab_size, scatters=False, **shared):
        super().__init__(spec, names, **shared)
        self.scatters, self.real["lora_embedding_A"] = scatters, vocab_size
        self._add("lora_embedding_A", (spec.rank, rows), 1)
        self._add("lora_embedding_B", (hidden_size, spec.rank), None, partial=True)

    def pieces(self) -> Iterator[Piece]:
        [[name]] = self.names
        for matrix in ("lora_embedding_A", "lora_embedding_B"):
            yield self._piece(f"{name}.{matrix}", matrix)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [b, s] -> float32 [b, s, h], or [s / tp, b, h] if the embedding scatters."""
        table = self.lora_embedding_A.t()
        if self.tp == 1:
            low = F.embedding(tokens, table)
        else:
            local = tokens - self.rank * table.shape[0]
            elsewhere = (local < 0) | (local >= table.shape[0])
            low = F.embedding(local.masked_fill(elsewhere, 0), table)
            low = low.masked_fill(elsewhere[..., None], 0.0)
            if self.scatters:
                low = low.transpose(0, 1).contiguous()
            low = self._summed(low, scatter=self.scatters)
        return F.linear(low * self.spec.scale, self.lora_embedding_B)


class LoraExperts(Adapter):
    """The adapters of a layer's experts, their matrices side by side as the experts' own are.

    names: of gate, up and down, the module of each local expert. columns: f. ep: the
    expert-parallel group; group: the expert-tensor-parallel one.
    """

    num_stack_axes = 1

    def __init__(self, spec, names, hidden_size, columns, ep=None, **shared):
        super().__init__(spec, names, **shared)
        self.ep = ep
        self.adapted = {
            p: modules for p, modules in zip(PROJECTIONS, names, strict=True) if modules
        }
        for projection, modules in self.adapted.items():
            n = len(modules)
            inputs = hidden_size
            outputs = columns
            cut_a = None
            cut_b = 0
            if projection == "down":
                inputs = columns
                outputs = hidden_size
                cut_a = 1
                cut_b = None
            self._add(f"{projection}_A", (n, spec.rank, inputs), cut_a)
            self._add(f"{projection}_B", (n, outputs, spec.rank), cut_b)

    def _add(self, name: str, shape, axis: int | None, partial: bool = False) -> None:
        super()._add(name, shape, axis, partial)
        parameter = getattr(self, name)
        parameter.allreduce = False  # reduced over the ranks that hold the same experts
        # a whole expert is no duplicate of another rank's; a matrix that all ranks of the group
        # hold is
        parameter.tensor_model_parallel = axis is not None or self.tp == 1
        parameter.partition_dim = 1 if axis is None else 1 + axis

    def pieces(self) -> Iterator[Piece]:
        for projection, modules in self.adapted.items():
            for expert, module in enumerate(modules):
                yield self._piece(f"{module}.lora_A.weight", f"{projection}_A", expert)
                yield self._piece(f"{module}.lora_B.weight", f"{projection}_B", expert)

    def _matrix(self, name: str) -> torch.Tensor:
        parameter = getattr(self, name)
        if self.tp == 1 or self.axes[name] is not None:
            return parameter
        return parallel.sum_gradients(parameter, self.group)

    def _factors(self, projections: tuple[str, ...], outputs: int):
        """scale * A [n, c, in] and B [n, outputs, c] of several projections together, float32. c is
        a multiple of 8, since a grouped product in half precision wants whole 16 bytes."""
        adapted = [p for p in projections if p in self.adapted]
        a = torch.cat([self._matrix(f"{p}_A") for p in adapted], 1)
        columns = -(-a.shape[1] // 8) * 8
        count = len(projections)
        bs = [self._matrix(f"{p}_B") if p in adapted else None for p in projections]
        b = torch.cat(_side_by_side(bs, [outputs // count] * count, columns, like=a), 1)
        return F.pad(a, (0, 0, 0, columns - a.shape[1])) * self.spec.scale, b

    def product(self, projections: tuple[str, ...], x, weight, multiply: Callable) -> torch.Tensor:
        """W x + scale * B A x [T, outputs] in x's dtype, of projections side by side in weight [n,
        ..., in]. multiply(x, w): each expert's tokens times its w^T."""
        whole = weight.flatten(1, -2)
        if not any(p in self.adapted for p in projections):
            return multiply(x, whole)
        a, b = self._factors(projections, whole.shape[1])
        if not self.adds_in_product(weight):
            low = multiply(self._dropped(x.float()), a)
            return (multiply(x, whole) + multiply(low, b)).to(x.dtype)
        low = multiply(x, a.to(x.dtype))
        room = with_room(weight, b.shape[-1], self._rooms)
        return AdaptedExperts.apply(x, low, weight, b.to(x.dtype), room, multiply)

    def merged(self, experts: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The parameters of transformers' experts with the adapters in them."""
        gate_up = experts.gate_up_proj
        down = experts.down_proj
        gate, up = gate_up.float().chunk(2, 1)
        both = torch.cat([self._with_delta("gate", gate), self._with_delta("up", up)], 1)
        down_with = self._with_delta("down", down.float()).to(down.dtype)
        return {"gate_up_proj": both.to(gate_up.dtype), "down_proj": down_with}

    def _with_delta(self, projection: str, weight: torch.Tensor) -> torch.Tensor:
        """weight + scale * B A of each expert [n, outputs, inputs], float32."""
        if projection not in self.adapted:
            return weight
        a = getattr(self, f"{projection}_A")
        b = getattr(self, f"{projection}_B")
        return weight + self.spec.scale * torch.bmm(b, a)


# -- how a module gets its adapter -----------------------------------------------------------------


def attach(module: torch.nn.Module, adapter: Adapter) -> None:
    """Put an adapter on a module that uses it itself: model_moe.py's router and experts."""
    adapter.train(module.training)
    module.add_module("lora", adapter)
    module.register_forward_pre_hook(_before_adapter)


def _before_adapter(module, args):
    # experts, and the loss of an output layer, take an adapter's matrices without calling it, and
    # megatron's DDP waits for weights that are on their way in hooks of that call
    for hook in module.lora._forward_pre_hooks.values():
        hook(module.lora, args)


def attach_beside(module: torch.nn.Module, adapter: Adapter) -> None:
    """Put an adapter on a linear or an embedding: a hook adds its output, or megatron's product."""
    attach(module, adapter)
    module.register_forward_hook(_add_output)
    if hasattr(module, "activation_dtype"):
        suit_transformer_engine(module, adapter)
    if isinstance(adapter, LoraAdapter) and hasattr(module, "_forward_impl"):
        own = module._forward_impl  # the product of a ColumnParallelLinear or RowParallelLinear
        adapter.in_product = True

        def product(input, weight, bias=None, **keys):
            if not adapter.adds_in_product(weight):
                return own(input=input, weight=weight, bias=bias, **keys)
            out = adapter(input, weight)
            return out if bias is None else out + bias

        module._forward_impl = product


def attach_merged(module: torch.nn.Module, adapter: Adapter) -> None:
    """Put an adapter on a module that has no linear of its own, transformers' experts and routers.

    Its forward pass runs with the tensors of adapter.merged(module), by name, in place of its
    parameters. That takes their memory once more, and allows no dropout.
    """
    attach(module, adapter)
    own = _OwnForward(module)  # not a submodule: the module would contain itself

    def forward(*args, **kwargs):
        tensors = adapter.merged(module) if adapter.enabled else {}
        tensors = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return torch.func.functional_call(own, tensors, args, kwargs)

    module.forward = forward


class _OwnForward(torch.nn.Module):
    """Runs the forward pass of a module's class without the module's hooks, which run anyway."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return type(self.module).forward(self.module, *args, **kwargs)


def _add_output(module, args, output):
    """Forward hook: add the adapter's output in float32; the result has the base's dtype."""
    adapter = module.lora
    # the chunked loss takes the adapter's factors itself (lora.extra_factors)
    if not adapter.enabled or getattr(module, "passes_hidden", False):
        return output
    if adapter.in_product and adapter.adds_in_product(module.weight):
        return output
    base, *rest = output if isinstance(output, tuple) else (output,)
    added = adapter(normed(module, args[0]))
    if hasattr(module, "embed_scale"):
        added = added * module.embed_scale  # transformers' gemmas scale what the embedding gives
    summed = (base + added).to(base.dtype)
    return (summed, *rest) if isinstance(output, tuple) else summed
