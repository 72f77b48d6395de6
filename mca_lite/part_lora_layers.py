"""LoRA layers: y = W x + scale * B A x with W frozen, as in PEFT.

An adapter belongs to a module of the Hugging Face model (q_proj, gate_proj, embed_tokens, ...),
also if megatron has several of them in one matrix: one GEMM serves the A of all, and each has
a B to itself. An adapter is the submodule "lora" of the module that it changes. It must be there
before DDP wraps the model.

Letters: r rank, h hidden size, V vocabulary, tp the tensor-parallel size, s sequence, b batch; of
experts, n on this rank, f columns of one on this rank, T tokens. Only activations r wide cross
ranks, or the gradient of a matrix if the linear's product includes the adapter. Matrices of a cut
linear, for megatron's gradient reduction and norm:

    column        A whole, its gradient complete, or the gradient of A x. B cut along its rows.
    column, SP    A whole, its gradient partial over the sequence (marked sequence_parallel). B cut.
    row           A cut along its columns. B whole, complete.
    row, SP       A cut. B whole, partial over the sequence (marked sequence_parallel).
    not cut       A and B whole and complete; with SP both partial over the sequence.
    experts       gate, up: A [n, r, h] whole, B [n, f, r] cut. down: A [n, r, f] cut, B [n, h, r]
                  whole. The dispatcher sums activations over the expert-tensor-parallel ranks: each
                  has a part of the gradient of a whole matrix, and the parts are summed here.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import parallel
from .args_values import check_keys
from .errors import ConfigError
from .finetuning import finetuning_of
from .kernels import rms_norm
from .mcore import get_cuda_rng_tracker, mappings, set_tensor_model_parallel_attributes
from .part_lora_keys import LoraArguments

PROJECTIONS = ("gate", "up", "down")  # of an expert
Names = tuple[tuple[str, ...], ...]
# the cut of a linear: the axis of its matrix
COLUMN = 0
ROW = 1
# cut of a linear -> cut axes of A and B
_CUT_AXES = {None: (None, None), COLUMN: (None, 0), ROW: (1, None)}


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of a model. modules: the adapted HF modules, filled in by part_lora_sites.plan.

    Raises ConfigError by the rules of its keys in LoraArguments.
    """

    rank: int = 8
    alpha: Any = None  # float; None: 2 * rank
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all",)
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    base_model: str | None = None

    def __post_init__(self):
        keys = dict(lora_rank=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout)
        if problems := check_keys(LoraArguments, **keys):
            raise ConfigError(problems)
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2 * self.rank)

    def __str__(self) -> str:
        modules = f"{len(self.modules)} modules"
        return f"LoRA of rank {self.rank} on {modules}, scale {self.scale:g}"

    @property
    def scale(self) -> float:
        if self.use_rslora:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank


def spec_of(model) -> Any:
    """The LoraSpec of a model with adapters, None of one without."""
    return getattr(finetuning_of(model), "spec", None)


def is_saved(module: str, spec: LoraSpec) -> bool:
    """True for an HF module in modules_to_save, by PEFT's rule: the end of its name."""
    return module.endswith(tuple(spec.modules_to_save))


class Piece(NamedTuple):
    """This rank's part of one matrix of PEFT.

    key: the matrix's name in a file, without PEFT's prefix. part: its index in `parameter` (a
    slice of rows, or an expert's number). axis: the axis cut by `group`, None: whole. real: the
    length of the whole matrix along axis, if the parameters are padded.
    """

    key: str
    parameter: torch.nn.Parameter
    part: slice | int
    axis: int | None
    group: Any  # dist.ProcessGroup; None: this rank alone
    real: int | None = None
    # its group is the expert-tensor-parallel one; other ranks have other experts
    is_expert: bool = False
    # rows of the whole matrix in the order of megatron's, None: the same
    order: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        return self.parameter.detach()[self.part]

    @property
    def full_shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.shape)
        if self.axis is not None:
            shape[self.axis] = self.real or shape[self.axis] * self.group.size()
        return tuple(shape)

    @property
    def is_first(self) -> bool:
        """True on the first rank with all parts of the matrix."""
        if self.group is None:
            return parallel.is_main()
        return self.group.rank() == parallel.replica_group(self.is_expert).rank() == 0

    def take(self, full: torch.Tensor) -> None:
        """Copy this rank's part of the whole matrix in."""
        if self.order is not None:
            full = full[self.order.to(full.device)]
        if self.axis is not None:
            size = self.tensor.shape[self.axis]
            missing = size * self.group.size() - full.shape[self.axis]
            pad = (0, missing) if self.axis == 1 else (0, 0, 0, missing)
            full = F.pad(full, pad).narrow(self.axis, self.group.rank() * size, size)
        self.tensor.copy_(full)

    def whole(self) -> torch.Tensor:
        """The whole matrix. Collective: gathers over the group."""
        full = parallel.whole(self.tensor, self.axis, self.group)
        if self.order is not None:
            full = full[self.order.argsort().to(full.device)]
        return full[tuple(map(slice, self.full_shape))]


def _side_by_side(bs: list[torch.Tensor], columns: int) -> list[torch.Tensor]:
    """Matrices B [..., out, r] with `columns` columns, those of each beside the others'."""
    blocks = []
    first = 0
    for b in bs:
        blocks.append(F.pad(b, (first, columns - first - b.shape[-1])))
        first += b.shape[-1]
    return blocks


class Adapter(torch.nn.Module):
    """Base of all adapters. group: the ranks that cut the module, None on plain torch.

    names, of those below: for each projection its Hugging Face modules (one; of experts, one for
    each local expert), () for a projection without adapter.
    """

    in_product = False  # True if the module's product may add the adapter's (adds_in_product)
    in_half = False  # True if its products run in the input's dtype, as beside 8-bit ones
    is_expert = False  # True for the experts of a layer, with a first axis of them in parameters

    def __init__(self, spec: LoraSpec, group=None, sequence_parallel=False, device=None):
        super().__init__()
        self.spec = spec
        self.group = group
        self.device = device
        self.tp = group.size() if group is not None else 1
        self.sequence_parallel = sequence_parallel and self.tp > 1
        self.enabled = True
        # parameter -> (the matrix's axis cut by the group, its whole length there if it is padded)
        self.cuts: dict[str, tuple[int | None, int | None]] = {}
        self.pieces: list[Piece] = []  # this rank's parts of the adapter's matrices in PEFT
        self._rooms: dict[torch.Size, torch.Tensor] = {}  # by the shape of their weight

    def _add(
        self,
        name: str,
        matrix: str,
        parts: dict[str, slice | int],
        shape: tuple[int, ...],
        axis: int | None,
        real: int | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        """Add a float32 parameter. parts: of each module the part with its `matrix`, named as in a
        file. Without a cut the gradient is a part of the sum over the sequence. real, order: see
        Piece."""
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=self.device))
        parameter.sequence_parallel = axis is None and self.sequence_parallel
        if self.tp == 1:
            axis = None
        self._mark(parameter, axis)
        self.register_parameter(name, parameter)
        self.cuts[name] = (axis, real)
        for module, part in parts.items():
            key = f"{module}.{matrix}"
            place = part, axis, self.group, real, self.is_expert, order
            self.pieces.append(Piece(key, parameter, *place))

    def _mark(self, parameter: torch.nn.Parameter, axis: int | None) -> None:
        """Set megatron's attributes of a parameter cut along an axis."""
        is_cut = axis is not None
        set_tensor_model_parallel_attributes(parameter, is_cut, axis if is_cut else -1, 1)

    def _summed(self, low: torch.Tensor) -> torch.Tensor:
        """The sum over the group, or this rank's part of the sequence of it. Collective."""
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return mappings.reduce_from_tensor_model_parallel_region(low, group=self.group)

    def adds_in_product(self, weight: torch.Tensor) -> bool:
        """True if the linear's product can add the adapter's, to round the sum once: beside a
        frozen matrix in half precision, without dropout."""
        is_half = weight.dtype in (torch.bfloat16, torch.float16)
        is_in = self.in_product and self.enabled and not self._drops
        return is_in and is_half and not weight.requires_grad

    @property
    def _drops(self) -> bool:
        return self.training and self.spec.dropout > 0.0

    def _dropped(self, x: torch.Tensor, is_shared: bool = False) -> torch.Tensor:
        """x after dropout. is_shared: all ranks have the same x, and must drop the same of it."""
        if not self._drops:
            return x
        if is_shared:
            return F.dropout(x, self.spec.dropout)
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.spec.dropout)


class LoraAdapter(Adapter):
    """The adapters of one linear with one projection or several.

    widths: outputs of each projection on this rank. cut: COLUMN, ROW or None. groups: groups of
    heads of this rank, if the outputs are interleaved by them. vocab_size: the real V of an output
    layer with padding. orders: the order of the rows of each projection, see Piece.
    """

    def __init__(
        self,
        spec,
        names,
        in_size,
        widths,
        cut=None,
        groups=None,
        vocab_size=None,
        orders=None,
        **shared,
    ):
        super().__init__(spec, **shared)
        self.widths = widths
        self.cut = cut if self.tp > 1 else None
        self.groups = groups
        axis_a, axis_b = _CUT_AXES[cut]
        r = spec.rank
        rows = {m: slice(i * r, (i + 1) * r) for i, m in enumerate(itertools.chain(*names))}
        self._add("lora_A", "lora_A.weight", rows, (len(rows) * r, in_size), axis_a)
        for i, modules in enumerate(names):
            whole = dict.fromkeys(modules, slice(None))
            if whole:
                shape = (widths[i], r)
                rows_of_b = axis_b, vocab_size, orders and orders[i]
                self._add(f"lora_B_{i}", "lora_B.weight", whole, shape, *rows_of_b)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None):
        """Input of the linear -> scale * B A x, shaped as the linear's output, float32 (in_half: in
        x's dtype).

        weight: the linear's matrix, if adds_in_product; the result is W x + scale * B A x then, in
        x's dtype.
        """
        if weight is not None:
            return self._product(x, weight)
        low = self.low(x)
        bs = self._bs()
        lows = low.split([b.shape[1] for b in bs], -1)
        outs = [F.linear(part, b.to(low.dtype)) for part, b in zip(lows, bs, strict=True)]
        return self._joined(outs, low.dim() - 1)

    def _bs(self) -> list[torch.Tensor]:
        """B of each projection, without columns for one without adapter."""
        a = self.lora_A
        widths = enumerate(self.widths)
        return [getattr(self, f"lora_B_{i}", a.new_zeros(width, 0)) for i, width in widths]

    def _joined(self, parts: list[torch.Tensor], axis: int) -> torch.Tensor:
        """Join parts of the projections along an axis, in the order of the linear's outputs."""
        if self.groups is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
        parts = [part.unflatten(axis, (self.groups, -1)) for part in parts]
        return torch.cat(parts, axis + 1).flatten(axis, axis + 1)

    def _product(self, x, weight):
        """W x + scale * B A x, summed over the ranks of a row-cut linear. Collective: gradients of
        a whole matrix are summed unless megatron sums them, as under sequence parallelism."""
        a = self.lora_A
        gathers = None
        # B of all projections as one matrix [out, projections * r]
        b = self._joined(_side_by_side(self._bs(), len(a)), 0)
        if self.cut == COLUMN and self.sequence_parallel:
            gathers = self.group
        elif self.cut == COLUMN:
            a = parallel.sum_gradients(a, self.group)
            x = parallel.sum_gradients(x, self.group)
        elif self.cut == ROW and not self.sequence_parallel:
            b = parallel.sum_gradients(b, self.group)
        room = with_room(weight, len(self.lora_A), self._rooms)
        out = AdaptedProduct.apply(x, weight, room, a, b, self.spec.scale, gathers)
        return self._summed(out) if self.cut == ROW else out

    def low(self, x: torch.Tensor) -> torch.Tensor:
        """scale * A x, float32 or in x's dtype; of a cut linear summed over its ranks, or of the
        whole sequence."""
        # without sequence parallelism every rank of a group sees the same x, but for row-cut
        # linears
        is_shared = self.cut != ROW and not self.sequence_parallel
        dtype = x.dtype if self.in_half else self.lora_A.dtype
        low = F.linear(self._dropped(x.to(dtype), is_shared), self.lora_A.to(dtype))
        if self.cut == ROW:
            low = self._summed(low)
        elif self.cut == COLUMN and self.sequence_parallel:
            low = mappings.gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=self.group
            )
        elif self.cut == COLUMN:
            low = mappings.copy_to_tensor_model_parallel_region(low, group=self.group)
        return low * self.spec.scale

    def factors(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale * A hidden of the whole sequence, B) on an output layer."""
        return self.low(hidden), self.lora_B_0

    def merged(self, router: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The weight of transformers' router with the adapter in it; nothing cuts it."""
        delta = self.spec.scale * self.lora_B_0 @ self.lora_A
        return {"weight": (router.weight.float() + delta).to(router.weight.dtype)}


class LoraEmbedding(Adapter):
    """The adapter of an embedding: scale * B A[:, token]. As in PEFT A [r, V / tp] starts at zero.

    in_size: h. widths: [V / tp], padding included. vocab_size: the real V. padding_idx: the token
    without gradient in A, as in PEFT.
    """

    def __init__(self, spec, names, in_size, widths, vocab_size=None, padding_idx=None, **shared):
        super().__init__(spec, **shared)
        [rows] = widths
        self.first = self.group.rank() * rows if self.tp > 1 else 0
        local = range(self.first, self.first + rows)
        self.padding_idx = local.index(padding_idx) if padding_idx in local else None
        [modules] = names
        whole = dict.fromkeys(modules, slice(None))
        a = "lora_embedding_A"
        b = "lora_embedding_B"
        self._add(a, a, whole, (spec.rank, *widths), 1, vocab_size)
        self._add(b, b, whole, (in_size, spec.rank), None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [b, s] -> float32 [b, s, h], or [s / tp, b, h] under sequence parallelism."""
        table = self.lora_embedding_A.t()
        if self.tp == 1:
            low = F.embedding(tokens, table, self.padding_idx)
        else:
            local = tokens - self.first
            elsewhere = (local < 0) | (local >= table.shape[0])
            low = F.embedding(local.masked_fill(elsewhere, 0), table, self.padding_idx)
            low = low.masked_fill(elsewhere[..., None], 0.0)
            if self.sequence_parallel:
                low = low.transpose(0, 1).contiguous()
            low = self._summed(low)
        return F.linear(low * self.spec.scale, self.lora_embedding_B)


class LoraExperts(Adapter):
    """The adapters of a layer's experts, their matrices side by side as the experts' own are.

    names: of gate, up and down, the module of each local expert. columns: f. ep: the
    expert-parallel group; group: the expert-tensor-parallel one.
    """

    is_expert = True
    in_product = True

    def __init__(self, spec, names, hidden_size, columns, ep=None, **shared):
        super().__init__(spec, **shared)
        self.ep = ep
        self.adapted = [p for p, modules in zip(PROJECTIONS, names, strict=True) if modules]
        for projection, modules in zip(self.adapted, filter(None, names), strict=True):
            sizes = [hidden_size, columns]
            axis_a, axis_b = _CUT_AXES[COLUMN]
            if projection == "down":
                sizes.reverse()
                axis_a, axis_b = _CUT_AXES[ROW]
            n = len(modules)
            parts = dict(zip(modules, range(n), strict=True))
            a = (n, spec.rank, sizes[0])
            b = (n, sizes[1], spec.rank)
            self._add(f"{projection}_A", "lora_A.weight", parts, a, axis_a)
            self._add(f"{projection}_B", "lora_B.weight", parts, b, axis_b)

    def _mark(self, parameter: torch.nn.Parameter, axis: int | None) -> None:
        parameter.allreduce = False  # reduced over the ranks with the same experts
        # a whole expert is no duplicate of another rank's; a matrix of all ranks of the group is
        is_first = self.tp == 1 or self.group.rank() == 0
        parameter.tensor_model_parallel = axis is not None or is_first
        parameter.partition_dim = 1 + (axis or 0)

    def _matrix(self, name: str) -> torch.Tensor:
        parameter = getattr(self, name)
        axis, _ = self.cuts[name]
        if self.tp == 1 or axis is not None:
            return parameter
        return parallel.sum_gradients(parameter, self.group)

    def _factors(self, projections: tuple[str, ...], outputs: int):
        """scale * A [n, c, in] and B [n, outputs, c] of several projections together, float32. c is
        a multiple of 8, since a grouped product in half precision wants whole 16 bytes."""
        a = torch.cat([self._matrix(f"{p}_A") for p in projections if p in self.adapted], 1)
        columns = -(-a.shape[1] // 8) * 8
        absent = a.new_zeros(len(a), outputs // len(projections), 0)
        bs = [self._matrix(f"{p}_B") if p in self.adapted else absent for p in projections]
        b = torch.cat(_side_by_side(bs, columns), 1)
        return F.pad(a, (0, 0, 0, columns - a.shape[1])) * self.spec.scale, b

    def forward(self, projections: tuple[str, ...], x, weight, multiply: Callable) -> torch.Tensor:
        """W x + scale * B A x [T, outputs] in x's dtype, of projections side by side in weight [n,
        ..., in]. multiply(x, w): each expert's tokens times its w^T."""
        whole = weight.flatten(1, -2)
        if set(projections).isdisjoint(self.adapted):
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
        gate_up = in_rows(experts, "gate_up_proj")
        down = self._with_delta("down", in_rows(experts, "down_proj"))
        if getattr(experts, "is_concatenated", True):
            gate, up = gate_up.chunk(2, 1)
            both = torch.cat([self._with_delta("gate", gate), self._with_delta("up", up)], 1)
        else:
            gate, up = gate_up[:, ::2], gate_up[:, 1::2]
            pairs = self._with_delta("gate", gate), self._with_delta("up", up)
            both = torch.stack(pairs, 2).flatten(1, 2)
        if getattr(experts, "is_transposed", False):
            both = both.mT
            down = down.mT
        return {"gate_up_proj": both, "down_proj": down}

    def _with_delta(self, projection: str, weight: torch.Tensor) -> torch.Tensor:
        """weight + scale * B A of each expert [n, outputs, inputs], in the dtype of weight."""
        if projection not in self.adapted:
            return weight
        a = getattr(self, f"{projection}_A")
        b = getattr(self, f"{projection}_B")
        return (weight.float() + self.spec.scale * torch.bmm(b, a)).to(weight.dtype)


def in_rows(experts: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter of transformers' experts, [n, outputs, inputs]."""
    parameter = experts.get_parameter(name)
    return parameter.mT if getattr(experts, "is_transposed", False) else parameter


# -- how a module gets its adapter


def attach(module: torch.nn.Module, adapter: Adapter, way: str = "beside") -> None:
    """Put an adapter on a module.

    way: "beside" a linear or an embedding: the output of the adapter is added, by a hook or in
    its product; "inside": the module uses it itself (model_moe.py's router and experts);
    "merged": the forward pass of transformers' experts and routers reads adapter.merged(module), by
    name, in place of their parameters. That takes their memory once more, and allows no dropout.
    """
    adapter.train(module.training)
    module.add_module("lora", adapter)
    if way == "merged":
        module.register_forward_pre_hook(_cover_parameters)
        module.register_forward_hook(_uncover_parameters, always_call=True)
    elif way == "beside":
        module.register_forward_hook(_add_output)
        _add_in_product(module, adapter)


def _cover_parameters(module, args):
    # an attribute of the instance comes before a parameter of the same name
    if module.lora.enabled:
        vars(module).update(module.lora.merged(module))


def _uncover_parameters(module, args, output):
    for name, _ in module.named_parameters(recurse=False):
        vars(module).pop(name, None)


def _add_in_product(module, adapter: Adapter) -> None:
    """Let a tensor-parallel linear, or Transformer Engine's, add the adapter in its product. Both
    are replaced on the instance: a hook comes after the product."""
    if hasattr(module, "activation_dtype"):
        _suit_transformer_engine(module, adapter)
    elif isinstance(adapter, LoraAdapter) and hasattr(module, "product"):
        base_product = module.product  # of model_linears.py

        def product(x, weight):
            multiply = adapter if adapter.adds_in_product(weight) else base_product
            return multiply(x, weight)

        module.product = product
        adapter.in_product = True


def _suit_transformer_engine(module, adapter) -> None:
    """Fit a linear of Transformer Engine to its adapter: in bf16 on one rank of tensor parallelism
    AdaptedProduct takes the place of its product."""
    # it checks the dtype of all of its parameters once, the adapter's too, against its input's
    module.activation_dtype = module.weight.dtype
    adapter.in_half = bool(module.config.fp8)  # float32 products take longer than 8-bit ones
    if adapter.tp > 1 or adapter.in_half:
        return

    def forward(x):
        """(output, None), or (output without bias, bias)."""
        x = _normed(module, x)
        product = F.linear
        if adapter.adds_in_product(module.weight):
            product = adapter
        out = product(x, module.weight)
        if not module.use_bias:
            return out, None
        if module.te_return_bias:
            return out, module.bias
        return out + module.bias, None

    module.forward = forward
    adapter.in_product = True


def _normed(module, x):
    """Input of the matrix itself: Transformer Engine's fused linears apply a norm before it."""
    weight = getattr(module, "layer_norm_weight", None)
    return x if weight is None else rms_norm(x, weight, module.eps, module.zero_centered_gamma)


def _add_output(module, args, output):
    """Forward hook: add the adapter's output in float32; the result has the base's dtype."""
    adapter = module.lora
    # the chunked loss takes the adapter's factors itself (model_linears.extra_factors)
    passes_hidden = getattr(module, "passes_hidden", False)
    if not adapter.enabled or passes_hidden or adapter.adds_in_product(module.weight):
        return output
    added = adapter(_normed(module, args[0]))
    if hasattr(module, "embed_scale"):
        added = added * module.embed_scale  # of transformers' gemmas
    if isinstance(output, tuple):
        base, *rest = output
        return ((base + added).to(base.dtype), *rest)
    return (output + added).to(output.dtype)


# -- a frozen weight and its adapter as one product


def with_room(weight, columns: int, rooms: dict) -> torch.Tensor:
    """A buffer [..., out, in + columns]: the data of `weight`, moved into it, and beside it columns
    for B. rooms: the buffers of an adapter, by the shape of their weight."""
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
    """x W^T + scale (x A^T) B^T of a frozen W as one product [x, scale x A^T] [W, B]^T,
    rounded once.

    Added to a rounded product, an update smaller than half of its last digit would
    be lost. A product's own addition (addmm) does not help: cuBLAS rounds to bf16 before it adds.
    """

    @staticmethod
    def forward(ctx, x, weight, room, a, b, scale, group=None):
        """room: the buffer of with_room for `weight`; its columns for B are written. group: ranks
        with a part of the sequence each in x, and the whole product here; A's gradient is of this
        rank's part then. Collective over it, both ways."""
        a = a.to(x.dtype)
        b = b.to(x.dtype)
        whole = x
        if group is not None:
            whole = mappings._gather_along_first_dim(x, group)
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
            d_x = _to_part((d_low @ a).addmm_(grad, weight), ctx.group).view(x.shape)
        d_a = _float_product(_to_part(d_low, ctx.group), flat)
        d_b = _float_product(grad, low)
        return d_x, None, None, d_a, d_b, None, None


def _to_part(partial: torch.Tensor, group) -> torch.Tensor:
    """This rank's part of the sequence, summed over the group; all of it without a group."""
    if group is None:
        return partial
    return mappings._reduce_scatter_along_first_dim(partial, group)


class AdaptedExperts(torch.autograd.Function):
    """Of each expert x W^T + low B^T of a frozen W as one product [x, low] [W, B]^T, rounded
    once."""

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
