"""LoRA layers: y = W x + scale * B A x with W frozen, as in PEFT.

Adapters belong to modules of the Hugging Face model (q_proj, gate_proj, embed_tokens, ...), even if
megatron fuses several of them into one matrix: then one matmul serves the A of all, and each has
its B. An adapter is the submodule "lora" of the module it changes. Add it before DDP wraps the
model.

Letters: r rank, h hidden size, V vocabulary, tp the tensor-parallel size, s sequence, b batch. For
experts: n experts on this rank, f columns of an expert on this rank, T tokens. Besides what the
module itself exchanges, ranks exchange activations r wide, or gradients of A and B. Sharding of the
matrices, as megatron must know it for gradient reduction and gradient norm:

    column        A replicated, its gradient (or that of A x) complete. B sharded by rows.
    column, SP    A replicated, its gradient partial over the sequence (marked
                  sequence_parallel). B sharded by rows.
    row           A sharded by columns. B replicated, complete.
    row, SP       A sharded by columns. B replicated, its gradient partial (marked).
    unsharded     A and B replicated and complete; with SP both partial over the sequence.
    experts       gate, up: A [n, r, h] replicated, B [n, f, r] sharded. down: A [n, r, f] sharded,
                  B [n, h, r] replicated. The dispatcher sums activations over the
                  expert-tensor-parallel ranks, so each rank has a partial gradient of a
                  replicated matrix; these are summed here.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import parallel
from .kernels import rms_norm
from .mcore import get_cuda_rng_tracker, mappings, set_tensor_model_parallel_attributes
from .model_linears import experts_product
from .part_lora_patterns import LoraSpec
from .part_lora_product import AdaptedExperts, AdaptedProduct, Factors, Room, filled_room

PROJECTIONS = ("gate", "up", "down")  # an expert's projections
Names = tuple[tuple[str, ...], ...]
# how a linear is sharded: the axis of its matrix
COLUMN = 0
ROW = 1
# sharded axis of a linear's matrix -> sharded axes of A and B
_CUT_AXES = {None: (None, None), COLUMN: (None, 0), ROW: (1, None)}


class Piece(NamedTuple):
    """This rank's shard of one LoRA matrix (A or B) of one Hugging Face module, such as q_proj, and
    the parameter that stores it. If a module of the trained model fuses projections or stacks
    experts, one parameter may have several Pieces.

    key: the matrix's name in PEFT's file without its prefix, such as
    "model.layers.3.self_attn.q_proj.lora_A.weight"; of an expert, the name that it would have if
    PEFT's file did not join experts (target_parameters).
    parameter: this rank's parameter that contains the shard. part: the shard's place in it, a slice
    of rows or an expert's index.
    axis: the axis along which the matrix is sharded over the ranks of `group`; None: not sharded.
    real: length of the whole matrix along axis without padding; None: there is no padding.
    is_expert: True for an expert's matrix; `group`, if given, is then the expert-tensor-parallel
    group. order: row permutation from PEFT's order to megatron's; None: the same order."""

    key: str
    parameter: torch.nn.Parameter
    part: slice | int
    axis: int | None
    group: Any  # dist.ProcessGroup; None: this rank alone
    real: int | None = None
    is_expert: bool = False
    # row permutation from PEFT's to megatron's order; None: the same order
    order: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's shard of the LoRA matrix: a view of its parameter, detached."""
        return self.parameter.detach()[self.part]

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole LoRA matrix, of which this rank may have only a shard; without
        padding."""
        shape = list(self.tensor.shape)
        if self.axis is not None:
            shape[self.axis] = self.real or shape[self.axis] * self.group.size()
        return tuple(shape)

    @property
    def is_first(self) -> bool:
        """True on exactly one of the ranks that can gather this whole matrix: the rank that exports
        it."""
        if self.group is None:
            return parallel.is_main()
        return self.group.rank() == parallel.replica_group(self.is_expert).rank() == 0

    def take(self, full: torch.Tensor) -> None:
        """Store this rank's shard of a whole LoRA matrix in the parameter. full: the whole matrix,
        with its rows in PEFT's order and without padding."""
        if self.order is not None:
            full = full[self.order.to(full.device)]
        if self.axis is not None:
            size = self.tensor.shape[self.axis]
            missing = size * self.group.size() - full.shape[self.axis]
            pad = (0, missing) if self.axis == 1 else (0, 0, 0, missing)
            full = F.pad(full, pad).narrow(self.axis, self.group.rank() * size, size)
        self.tensor.copy_(full)

    def whole(self) -> torch.Tensor:
        """The whole matrix, in PEFT's row order and without padding, on every rank of the group.
        Collective over the group if the matrix is sharded.
        """
        full = parallel.whole(self.tensor, self.axis, self.group)
        if self.order is not None:
            full = full[self.order.argsort().to(full.device)]
        return full[tuple(map(slice, self.full_shape))]


class Adapter(torch.nn.Module):
    """Base class of the LoRA adapters of linears, embeddings and experts.

    spec: the adapters' settings, such as rank and alpha. group: the tensor-parallel group, for
    experts the expert-tensor-parallel group; None on plain torch. sequence_parallel: True if
    sequence parallelism splits the tokens before or after the module.

    Subclasses also take `names`: for each projection in the module, a tuple of the Hugging Face
    modules that it contains. The tuple has one name, or for experts one per expert on this rank; it
    is empty if the projection has no adapter."""

    in_product = False  # True if the module's matmul can include the adapter (adds_in_product)
    in_half = False  # True if the adapter computes in the input's dtype, as beside fp8 matmuls
    is_expert = False  # True for experts: axis 0 of the parameters is the expert

    def __init__(
        self,
        spec: LoraSpec,
        group: Any = None,
        sequence_parallel: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.group = group
        self.device = device
        self.tp = group.size() if group is not None else 1
        self.sequence_parallel = sequence_parallel and self.tp > 1
        self.enabled = True
        # parameter -> (sharded axis or None, unpadded length along it if it is padded)
        self.cuts: dict[str, tuple[int | None, int | None]] = {}
        self.pieces: list[Piece] = []  # this rank's shards of the adapter's matrices in PEFT
        self._rooms: dict[torch.Size, Room] = {}  # by weight shape, see filled_room()

    def _add(
        self,
        name: str,
        matrix: str,
        parts: Mapping[str, slice | int],
        shape: tuple[int, ...],
        axis: int | None,
        real: int | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        """Register a float32 parameter of zeros that contains LoRA matrices, and a Piece (a
        module's shard of a matrix) for each Hugging Face module in `parts`.

        name: the parameter's name. matrix: the end of the matrix's name in PEFT's file, such as
        "lora_A.weight". parts: {Hugging Face module: its slice or index in the parameter}. shape:
        the parameter's on this rank. axis: the axis along which the matrix is sharded; None: not
        sharded. real: the whole matrix's length along axis without padding; None: no padding.
        order: row permutation from PEFT's order to megatron's; None: the same order. With axis None
        and sequence parallelism, the gradient is marked as partial, for megatron to sum over
        tensor-parallel ranks."""
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
        """Set the attributes by which megatron knows that a parameter is sharded along `axis`;
        None: not sharded.
        """
        is_cut = axis is not None
        set_tensor_model_parallel_attributes(parameter, is_cut, axis if is_cut else -1, 1)

    def _summed(self, low: torch.Tensor) -> torch.Tensor:
        """Sum partial results over the tensor-parallel group. low: this rank's partial result, such
        as A x. Under sequence parallelism each rank gets only its part of the sequence of the sum.
        Collective."""
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        return mappings.reduce_from_tensor_model_parallel_region(low, group=self.group)

    def adds_in_product(self, weight: torch.Tensor) -> bool:
        """True if the module's matmul can include the adapter. This needs a module that supports
        it, an enabled adapter without active dropout, and a frozen weight in bf16 or fp16.
        """
        is_half = weight.dtype in (torch.bfloat16, torch.float16)
        is_in = self.in_product and self.enabled and not self._drops
        return is_in and is_half and not weight.requires_grad

    @property
    def _drops(self) -> bool:
        """True if dropout is active: the module is in training mode, and the dropout rate is above
        0.
        """
        return self.training and self.spec.dropout > 0.0

    def _dropped(self, x: torch.Tensor, is_shared: bool = False) -> torch.Tensor:
        """Apply the adapter's dropout to x, if it is active. is_shared: True if all ranks of the
        group have the same x, and so must drop the same elements.
        """
        if not self._drops:
            return x
        if is_shared:
            return F.dropout(x, self.spec.dropout)
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.spec.dropout)


class LoraAdapter(Adapter):
    """The adapter of one linear or router. A linear may fuse the projections of several Hugging
    Face modules, such as q_proj, k_proj and v_proj.

    in_size: number of input features on this rank. widths: number of outputs of each projection on
    this rank.
    cut: how the linear is sharded: COLUMN, ROW, or None.
    groups: number of head groups on this rank, if megatron interleaves the outputs of the
    projections by group; None: one projection after another.
    vocab_size: V without padding, for an output layer whose rows are padded.
    orders: for each projection the row permutation from PEFT's order to megatron's, or None.
    """

    def __init__(
        self,
        spec: LoraSpec,
        names: Names,
        in_size: int,
        widths: list[int],
        cut: int | None = None,
        groups: int | None = None,
        vocab_size: int | None = None,
        orders: list[torch.Tensor | None] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(spec, **shared)
        self.widths = widths
        self.cut = cut if self.tp > 1 else None
        self.groups = groups
        axis_a, axis_b = _CUT_AXES[cut]
        adapted = [*itertools.chain(*names)]
        ranks = [*map(spec.rank_of, adapted)]
        ends = itertools.accumulate(ranks)
        rows = {m: slice(end - r, end) for m, r, end in zip(adapted, ranks, ends, strict=True)}
        self._add("lora_A", "lora_A.weight", rows, (sum(ranks), in_size), axis_a)
        # a number, or a factor for each row of A
        self.scale: Any = spec.scale_of(adapted[0])
        scales = [*map(spec.scale_of, adapted)]
        if len(set(scales)) > 1:
            factors = torch.tensor(scales, device=self.device)
            factors = factors.repeat_interleave(torch.tensor(ranks, device=self.device))
            del self.scale
            self.register_buffer("scale", factors, persistent=False)
        self.places: dict[str, tuple[slice, ...]] = {}  # see Factors; of each matrix B
        n = groups or 1
        of_all = () if groups is None else (slice(None),)
        for i, modules in enumerate(names):
            whole = dict.fromkeys(modules, slice(None))
            if whole:
                shape = (widths[i], spec.rank_of(modules[0]))
                rows_of_b = axis_b, vocab_size, orders and orders[i]
                self._add(f"lora_B_{i}", "lora_B.weight", whole, shape, *rows_of_b)
                of_group = slice(sum(widths[:i]) // n, sum(widths[: i + 1]) // n)
                self.places[f"lora_B_{i}"] = *of_all, of_group, rows[modules[0]]

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The adapter's output scale * B A x for the linear's input x, in the shape of the linear's
        output. Its dtype is A's; beside fp8 (in_half) or under autocast it may be lower.

        weight: the linear's matrix W, given if one matmul computes both (adds_in_product). The
        result is then W x + scale * B A x, plus `bias` if it is given, in x's dtype; inside
        zeros_from(), a recomputation whose output nobody reads, it may be zeros. Collective over
        the group if the linear is sharded, in the forward pass, the backward pass or both."""
        if weight is not None:
            return self._product(x, weight, bias)
        low = self.low(x)
        bs = self._bs()
        lows = low.split([b.shape[1] for b in bs], -1)
        outs = [F.linear(part, b.to(low.dtype)) for part, b in zip(lows, bs, strict=True)]
        return self._joined(outs, low.dim() - 1)

    def _bs(self) -> list[torch.Tensor]:
        """The LoRA matrix B [width, r] of each projection in this linear, on this rank. A
        projection without an adapter has an empty matrix [width, 0]."""
        a = self.lora_A
        widths = enumerate(self.widths)
        return [getattr(self, f"lora_B_{i}", a.new_zeros(width, 0)) for i, width in widths]

    def _joined(self, parts: list[torch.Tensor], axis: int) -> torch.Tensor:
        """Concatenate tensors of the linear's projections, such as q, k and v, in the order of the
        linear's outputs: one projection after another, or interleaved by head group. parts: one
        tensor per projection. axis: the axis of their outputs."""
        if self.groups is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
        parts = [part.unflatten(axis, (self.groups, -1)) for part in parts]
        return torch.cat(parts, axis + 1).flatten(axis, axis + 1)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The output of the linear with its adapter, W x + scale * B A x + bias, computed in one
        matmul. x: the linear's input. weight: W on this rank. bias: on this rank, or None. For a
        row-sharded linear the result is summed over the group. Inside zeros_from(), a recomputation
        whose output nobody reads, it may be zeros.

        If the linear is sharded, one of A and B is sharded and the other is the same on each rank.
        The other's gradient is summed over the group: here, or under sequence parallelism by
        megatron. Collective over the group if the linear is sharded, in the forward pass, the
        backward pass or both."""
        a = self.lora_A
        gathers = None
        again = getattr(x, "again", None) if hasattr(weight, "whole") else None
        bs = [getattr(self, name) for name in self.places]
        if self.cut == COLUMN and self.sequence_parallel:
            gathers = self.group
        elif self.cut == COLUMN:
            a = parallel.sum_gradients(a, self.group)
            x = parallel.sum_gradients(x, self.group)
        elif self.cut == ROW and not self.sequence_parallel:
            bs = [parallel.sum_gradients(b, self.group) for b in bs]
        b = Factors(bs, [*self.places.values()], groups=self.groups)
        room = functools.partial(filled_room, weight, self._rooms, len(a), None, b)
        out = AdaptedProduct.apply(x, weight, room, b, self.scale, gathers, again, bias, a, *bs)
        return self._summed(out) if self.cut == ROW else out

    def low(self, x: torch.Tensor) -> torch.Tensor:
        """The adapter's inner activation scale * A x [..., sum of the projections' r].

        For a row-sharded linear it is summed over the group (under sequence parallelism each rank
        gets its part of the sequence). For a column-sharded linear under sequence parallelism it
        covers the whole sequence. Collective over the group if the linear is sharded, in the
        forward pass, the backward pass or both.
        """
        # without sequence parallelism all ranks of a group have the same x, unless the linear is
        # sharded by rows
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
        return (low * self.scale).to(low.dtype)

    def factors(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale * A hidden, this rank's B): the two LoRA factors of an output layer, for the
        chunked loss, which multiplies them. hidden: the output layer's input. Under sequence
        parallelism the first factor covers the whole sequence."""
        return self.low(hidden), self.lora_B_0

    def merged(self, router: torch.nn.Module) -> dict[str, torch.Tensor]:
        """{"weight": W + scale * B A in W's dtype} for a transformers router with weight W, which
        is not sharded.
        """
        delta = self.scale * self.lora_B_0 @ self.lora_A
        return {"weight": (router.weight.float() + delta).to(router.weight.dtype)}


class LoraEmbedding(Adapter):
    """The LoRA adapter of an embedding: its output for a token is scale * B A[:, token]. A is [r, V
    / tp], B is [h, r], with rank r, vocabulary size V, hidden size h and tensor-parallel size tp.

    in_size: h. widths: [V / tp], with padding. vocab_size: V without padding. padding_idx: the
    token whose column in A gets no gradient, as in PEFT; None: there is no such token."""

    def __init__(
        self,
        spec: LoraSpec,
        names: Names,
        in_size: int,
        widths: list[int],
        vocab_size: int | None = None,
        padding_idx: int | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(spec, **shared)
        [rows] = widths
        self.first = self.group.rank() * rows if self.tp > 1 else 0
        local = range(self.first, self.first + rows)
        self.padding_idx = None
        if padding_idx is not None and padding_idx in local:
            self.padding_idx = local.index(padding_idx)
        [modules] = names
        whole = dict.fromkeys(modules, slice(None))
        a = "lora_embedding_A"
        b = "lora_embedding_B"
        rank = spec.rank_of(modules[0])
        self.scale = spec.scale_of(modules[0])
        self._add(a, a, whole, (rank, *widths), 1, vocab_size)
        self._add(b, b, whole, (in_size, rank), None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The adapter's output, which the caller adds to the embedding's. tokens: ids [b, s] -> [b,
        s, h], or [s / tp, b, h] under sequence parallelism. Outside of autocast it has A's dtype.
        Collective if the tensor-parallel group has several ranks."""
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
        return F.linear(low * self.scale, self.lora_embedding_B)


class LoraExperts(Adapter):
    """The LoRA adapters of an MoE layer's experts on this rank, stacked in one parameter per
    matrix.

    names: for gate, up and down, the Hugging Face module of each expert on this rank; empty for a
    projection without adapters. columns: the experts' intermediate size on this rank. ep: the
    expert-parallel group. group: the expert-tensor-parallel group.
    """

    is_expert = True
    in_product = True

    def __init__(
        self,
        spec: LoraSpec,
        names: Names,
        hidden_size: int,
        columns: int,
        ep: torch.distributed.ProcessGroup | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(spec, **shared)
        self.ep = ep
        of_projections = {p: m for p, m in zip(PROJECTIONS, names, strict=True) if m}
        self.adapted = [*of_projections]
        # single experts have one rank and scale (part_lora_patterns.check_stacked)
        self.scales = {p: spec.scale_of(modules[0]) for p, modules in of_projections.items()}
        self.ranks = {p: spec.rank_of(modules[0]) for p, modules in of_projections.items()}
        gates = of_projections.get("gate", ())
        # projections of a weight -> (places of A, places of B, rank, scale)
        self.plans: dict[tuple[str, ...], tuple[dict[str, Any], dict[str, Any], int, float]] = {}
        # gate and up share A, as PEFT's adapter of a stacked parameter has it
        self.is_joined = bool(gates) and spec.stacks(gates[0])
        for projection, modules in of_projections.items():
            sizes = [hidden_size, columns]
            axis_a, axis_b = _CUT_AXES[COLUMN]
            if projection == "down":
                sizes.reverse()
                axis_a, axis_b = _CUT_AXES[ROW]
            n = len(modules)
            rank = self.ranks[projection]
            parts = dict(zip(modules, range(n), strict=True))
            a = (n, rank, sizes[0])
            b = (n, sizes[1], rank)
            owners = parts
            if self.is_joined and projection == "gate":
                owners = parts | dict(zip(of_projections["up"], range(n), strict=True))
            if not self.is_joined or projection != "up":
                self._add(self._name_of_a(projection), "lora_A.weight", owners, a, axis_a)
            self._add(f"{projection}_B", "lora_B.weight", parts, b, axis_b)
            # the places (see Factors) of the matrices beside a weight with these projections
            together = PROJECTIONS[2:] if projection == "down" else PROJECTIONS[:2]
            plan = self.plans.setdefault(together, ({}, {}, rank, self.scales[projection]))
            of_a, of_b, *_ = plan
            end = (len(of_a) + 1) * rank
            place = slice(None), slice(end - rank, end)  # the columns of low that A computes
            place = of_a.setdefault(self._name_of_a(projection), place)
            first = together.index(projection) * sizes[1]
            of_b[f"{projection}_B"] = slice(None), slice(first, first + sizes[1]), place[1]

    @property
    def room(self) -> int:
        """Number of free columns that the experts' inputs and gradients should have beside their
        rows in memory. The adapter writes its low-rank products there."""
        return max(-(-len(of_a) * rank // 8) * 8 for of_a, _, rank, _ in self.plans.values())

    def _name_of_a(self, projection: str) -> str:
        """Name of the parameter that holds a projection's LoRA matrix A, such as "down_A". Gate and
        up may share one, "gate_up_A"."""
        return "gate_up_A" if self.is_joined and projection != "down" else f"{projection}_A"

    def _mark(self, parameter: torch.nn.Parameter, axis: int | None) -> None:
        parameter.allreduce = False  # its gradient is reduced over the ranks with the same experts
        # experts differ between expert-parallel ranks; a replicated matrix counts once per group
        is_first = self.tp == 1 or self.group.rank() == 0
        parameter.tensor_model_parallel = axis is not None or is_first
        parameter.partition_dim = 1 + (axis or 0)

    def _matrix(self, name: str) -> torch.Tensor:
        """The parameter with the LoRA matrices of this rank's experts that is named `name`, such as
        "gate_A". If all ranks of the group have it whole, its gradient is summed over the group in
        the backward pass, since each rank computes only a part of it."""
        parameter = getattr(self, name)
        axis, _ = self.cuts[name]
        if self.tp == 1 or axis is not None:
            return parameter
        return parallel.sum_gradients(parameter, self.group)

    def forward(
        self,
        projections: tuple[str, ...],
        x: torch.Tensor,
        weight: torch.Tensor,
        multiply: Callable[..., Any],
    ) -> torch.Tensor:
        """The output of the experts with their adapters, W x + scale * B A x. x: [T, in], tokens
        sorted by expert -> [T, outputs] in x's dtype. Inside zeros_from(), a recomputation whose
        output nobody reads, it may be zeros.

        weight: W of the n experts on this rank, [n, ..., in]. projections: those that W contains,
        such as ("gate", "up"). multiply: the grouped matmul, see AdaptedExperts. The backward pass
        is collective over the expert-tensor-parallel group if that has several ranks and a
        projection has an adapter."""
        if projections not in self.plans:
            return experts_product(x, weight, multiply)
        of_a, of_b, rank, scale = self.plans[projections]
        a = Factors([*map(self._matrix, of_a)], [*of_a.values()], scale)
        b = Factors([*map(self._matrix, of_b)], [*of_b.values()])
        c = len(of_a) * rank
        if not self.adds_in_product(weight):
            n, *outputs, inputs = weight.shape
            c = -(-c // 8) * 8  # grouped GEMMs need rows in multiples of 16 bytes
            low = multiply(self._dropped(x.float()), a.stack(n, c, inputs))
            of_low = b.stack(n, math.prod(outputs), c)
            return (experts_product(x, weight, multiply) + multiply(low, of_low)).to(x.dtype)
        room = functools.partial(filled_room, weight, self._rooms, c, a, b)
        again = getattr(x, "again", None)
        matrices = a.matrices + b.matrices
        return AdaptedExperts.apply(x, weight, room, a, b, multiply, again, *matrices)

    def merged(self, experts: torch.nn.Module) -> dict[str, torch.Tensor]:
        """{"gate_up_proj": ..., "down_proj": ...}: the parameters of a transformers experts module
        with the adapters added, in its layout and dtype.
        """
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
        """The weight of one projection with the adapters added: W + scale * B A for each expert, in
        W's dtype; W itself if the projection has no adapter. weight: W, [n, outputs, inputs]."""
        if projection not in self.adapted:
            return weight
        a = getattr(self, self._name_of_a(projection))
        b = getattr(self, f"{projection}_B")
        return (weight.float() + self.scales[projection] * torch.bmm(b, a)).to(weight.dtype)


def in_rows(experts: torch.nn.Module, name: str) -> torch.Tensor:
    """A view [n, outputs, inputs] of a parameter of a transformers experts module, such as
    "gate_up_proj", which some families store transposed."""
    parameter = experts.get_parameter(name)
    return parameter.mT if getattr(experts, "is_transposed", False) else parameter


# -- how a module gets its adapter


def attach(module: torch.nn.Module, adapter: Adapter, way: str = "beside") -> None:
    """Make an adapter part of a module, as its submodule "lora".

    way: how the adapter's output is added. "beside" (linears, embeddings): a tensor-parallel linear
    of this package adds it itself; with other modules a forward hook does, unless a Transformer
    Engine linear's matmul does, or the loss in case of an output layer. "inside" (routers
    and experts in model_moe.py): the module calls the adapter itself. "merged" (transformers'
    experts, and its routers that are no nn.Linear): during forward, the tensors of
    adapter.merged(module) stand in for the module's parameters of the same names; this needs their
    memory once more, and allows no dropout."""
    adapter.train(module.training)
    weight: Any = getattr(module, "weight", None)
    # a step without inputs for a module, such as a vision tower, skips its adapter's update too
    if hasattr(weight, "may_rest"):
        for parameter in adapter.parameters():
            parameter.may_rest = weight.may_rest
            parameter.sequence_parallel = weight.sequence_parallel
    module.add_module("lora", adapter)
    if isinstance(adapter, LoraExperts):
        module.room = adapter.room
    if way == "merged":
        module.register_forward_pre_hook(_cover_parameters)
        module.register_forward_hook(_uncover_parameters, always_call=True)
    elif way == "beside" and isinstance(adapter, LoraAdapter) and hasattr(module, "product"):
        _add_in_product(module, adapter)
    elif way == "beside":
        module.register_forward_hook(_add_output)
        if hasattr(module, "activation_dtype"):
            _suit_transformer_engine(module, adapter)


def _cover_parameters(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Pre-forward hook for way "merged" in attach: if the adapter is enabled, let plain attributes
    with the merged weights hide the module's parameters of the same names.
    """
    # attribute lookup finds the instance's __dict__ before nn.Module's parameters
    if module.lora.enabled:
        vars(module).update(module.lora.merged(module))


def _uncover_parameters(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook for way "merged" in attach: remove the attributes that _cover_parameters set. It
    is registered to run after an error too.
    """
    for name, _ in module.named_parameters(recurse=False):
        vars(module).pop(name, None)


def _add_in_product(module: torch.nn.Module, adapter: Adapter) -> None:
    """Make a tensor-parallel linear of this package add the adapter's output, in its own matmul if
    adds_in_product() allows it; otherwise the sum is rounded to the dtype of the linear's output.
    For that, a method is replaced on this instance, because a hook would run only after the
    matmul, and cost time in each call."""
    base_product = module.product  # defined in model_linears.py

    def product(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
        if adapter.adds_in_product(weight):
            return adapter(x, weight, *bias)
        out = base_product(x, weight, *bias)
        if adapter.enabled:
            out = (out + adapter(x)).to(out.dtype)
        return out

    module.product = product
    adapter.in_product = True


def _suit_transformer_engine(module: torch.nn.Module, adapter: Adapter) -> None:
    """Make a Transformer Engine linear work with its adapter. Without fp8 and with one
    tensor-parallel rank, the linear's forward is replaced by one whose matmul can include the
    adapter.
    """
    # Transformer Engine compares the dtype of all parameters, even the adapter's, with the input's
    # while this is unset
    module.activation_dtype = module.weight.dtype
    adapter.in_half = bool(module.config.fp8)  # float32 matmuls would take longer than the fp8 ones
    if adapter.tp > 1 or adapter.in_half:
        return

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The forward pass of a Transformer Engine linear, with a matmul that can include the
        adapter. x: the linear's input -> (output, None), or (output without bias, bias) if the
        linear leaves adding its bias to the caller."""
        x = _normed(module, x)
        multiply = adapter if adapter.adds_in_product(module.weight) else F.linear
        bias = module.bias if module.use_bias else None
        if module.te_return_bias:
            return multiply(x, module.weight), bias
        return multiply(x, module.weight, bias), None

    module.forward = forward
    adapter.in_product = True


def _normed(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The tensor that the linear's matrix multiplies: x after the norm that Transformer Engine
    fuses into some linears, or x itself if there is no such norm. module: the linear. x: its input.
    """
    weight = getattr(module, "layer_norm_weight", None)
    return x if weight is None else rms_norm(x, weight, module.eps, module.zero_centered_gamma)


def _add_output(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of a module with an adapter: add the adapter's output to the module's, and round
    the sum to the dtype of the module's output. args: the module's inputs. The output stays
    unchanged if the adapter is disabled, or if it is added elsewhere: in a Transformer Engine
    linear's matmul, or in the loss in case of an output layer."""
    adapter = module.lora
    # on an output layer the chunked loss adds the adapter (model_linears.extra_factors)
    passes_hidden = getattr(module, "passes_hidden", False)
    if not adapter.enabled or passes_hidden or adapter.adds_in_product(module.weight):
        return output
    added = adapter(_normed(module, args[0]))
    if hasattr(module, "embed_scale"):
        added = added * module.embed_scale  # transformers' Gemma scales its embeddings
    if isinstance(output, tuple):
        base, *rest = output
        return ((base + added).to(base.dtype), *rest)
    return (output + added).to(output.dtype)
