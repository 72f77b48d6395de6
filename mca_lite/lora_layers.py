"""LoRA: low-rank adapters y = W x + scale * B A x beside frozen weights; the mathematics, names and file format of PEFT.

An adapter belongs to a module of the Hugging Face model (q_proj, gate_proj, embed_tokens, ...), also where megatron holds
several of them in one matrix: then one GEMM serves the A of all, and each has a B of its own. An adapter is a submodule
"lora" of the linear that it belongs to; a forward hook adds what it gives. It must be there before DDP wraps the model.

Letters: r rank, h hidden size, V vocabulary, tp the tensor-parallel size, s sequence, b batch. Only activations r wide cross
ranks. What each matrix of a cut linear is, for megatron's gradient reduction and norm:

    column        A whole, its gradient complete: copy_to sums that of the low-rank activation. B cut along its rows.
    column, SP    A whole, its gradient a partial sum over the sequence (marked sequence_parallel). B cut.
    row           A cut along its columns. B whole, complete.
    row, SP       A cut. B whole, partial over the sequence (marked sequence_parallel).
    not cut       A and B whole and complete; with SP both partial over the sequence, of which it sees a part.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class LoraSpec:
    """What adapters there are. `modules` are the adapted modules' Hugging Face names; filled in by the injection."""

    rank: int = 8
    alpha: float | None = None  # None: 2 * rank
    dropout: float = 0.0
    targets: tuple[str, ...] = ("all",)
    use_rslora: bool = False
    modules_to_save: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    base_model: str | None = None

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"lora_rank {self.rank}: expected at least 1: set lora_rank: 8")
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2 * self.rank)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class Piece(NamedTuple):
    """One matrix of PEFT, under its key in a file, as this rank holds it: `rows` of `parameter`, cut along `axis` over
    tensor-parallel ranks (None: whole). `real` is the whole's length there, where it is padded. An expert's is one of several
    matrices in a parameter."""

    key: str
    parameter: torch.nn.Parameter
    rows: slice | int
    axis: int | None
    tp: int
    rank: int
    real: int | None
    expert: bool = False  # cut over the expert tensor parallel ranks; others hold other experts

    @property
    def tensor(self) -> torch.Tensor:
        return self.parameter.detach()[self.rows]

    @property
    def full_shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.shape)
        if self.axis is not None:
            shape[self.axis] = self.real or shape[self.axis] * self.tp
        return tuple(shape)

    def take(self, full: torch.Tensor) -> None:
        """Copy this rank's part of the whole matrix in."""
        if self.axis is not None:
            size = self.tensor.shape[self.axis]
            missing = size * self.tp - full.shape[self.axis]
            pad = (0, missing) if self.axis == 1 else (0, 0, 0, missing)
            full = F.pad(full, pad).narrow(self.axis, self.rank * size, size)
        self.tensor.copy_(full)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole matrix from the parts of all tensor-parallel ranks."""
        if self.axis is None:
            return parts[0]
        return torch.cat(parts, self.axis).narrow(self.axis, 0, self.full_shape[self.axis])


class Adapter(torch.nn.Module):
    """What the adapters of linears and of embeddings share."""

    def __init__(self, spec: LoraSpec, mca: str, group, sequence_parallel: bool, device):
        super().__init__()
        self.spec, self.mca, self.group, self.device = spec, mca, group, device
        self.tp, self.rank = (group.size(), group.rank()) if group is not None else (1, 0)
        self.sequence_parallel = sequence_parallel and self.tp > 1
        self.enabled = True
        self.axes: dict[str, int | None] = {}  # of each parameter, where tensor parallelism cuts it
        self.padded: set[str] = set()  # parameters that a padded vocabulary makes longer

    def _add(
        self, name: str, shape: tuple[int, int], axis: int | None, partial: bool = False
    ) -> None:
        """A float32 parameter; `partial`: its gradient has to be summed over the ranks that share the sequence."""
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=self.device))
        parameter.tensor_model_parallel = axis is not None and self.tp > 1
        parameter.partition_dim, parameter.partition_stride = (
            (axis, 1) if parameter.tensor_model_parallel else (-1, 1)
        )
        parameter.sequence_parallel = partial and self.sequence_parallel
        self.register_parameter(name, parameter)
        self.axes[name] = axis if self.tp > 1 else None

    def _piece(self, key: str, name: str, rows=slice(None), real: int | None = None) -> Piece:
        return Piece(key, getattr(self, name), rows, self.axes[name], self.tp, self.rank, real)


class LoraAdapter(Adapter):
    """The adapters of one linear, which may hold several Hugging Face modules.

    names: the HF module of each projection in the order of the linear's outputs, None for one without adapter. widths: its
    outputs on this rank. cut: "column", "row" or None. groups: query groups of this rank, where the outputs are interleaved
    by them. vocab_size: the real V of an output layer that is padded.
    """

    def __init__(
        self, spec, mca, names, in_size, widths, cut=None, group=None, sequence_parallel=False, groups=None,
        vocab_size=None, device=None,
    ):  # fmt: skip
        super().__init__(spec, mca, group, sequence_parallel, device)
        self.names, self.widths, self.cut, self.groups, self.vocab_size = (
            names,
            widths,
            cut,
            groups,
            vocab_size,
        )
        count = sum(name is not None for name in names)
        column, row = cut == "column", cut == "row"
        self._add("lora_A", (count * spec.rank, in_size), 1 if row else None, partial=not row)
        for i, (name, width) in enumerate(zip(names, widths, strict=True)):
            if name is not None:
                self._add(
                    f"lora_B_{i}", (width, spec.rank), 0 if column else None, partial=not column
                )
        if vocab_size is not None:
            self.padded.add("lora_B_0")

    def pieces(self) -> Iterator[Piece]:
        r, place = self.spec.rank, 0
        for i, name in enumerate(self.names):
            if name is not None:
                yield self._piece(
                    f"{name}.lora_A.weight", "lora_A", slice(place * r, (place + 1) * r)
                )
                yield self._piece(f"{name}.lora_B.weight", f"lora_B_{i}", real=self.vocab_size)
                place += 1

    def forward(self, x, only_low: bool = False):
        """x as the linear gets it -> scale * B A x as the linear gives it, float32.

        only_low: (scale * A x of the whole sequence, B) of a single column-cut projection instead.
        """
        low = (
            self._across_ranks(F.linear(self._dropped(x.to(self.lora_A.dtype)), self.lora_A))
            * self.spec.scale
        )
        if only_low:
            return low, self.lora_B_0
        outs, lows = [], iter(low.split(self.spec.rank, -1))
        for i, (name, width) in enumerate(zip(self.names, self.widths, strict=True)):
            if name is None:
                outs.append(low.new_zeros(*low.shape[:-1], width))
            else:
                outs.append(F.linear(next(lows), getattr(self, f"lora_B_{i}")))
        if self.groups is not None:
            return torch.cat([out.unflatten(-1, (self.groups, -1)) for out in outs], -1).flatten(-2)
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def _across_ranks(self, low):
        if self.tp == 1 or self.cut is None:
            return low
        from megatron.core.tensor_parallel import mappings

        sp = self.sequence_parallel
        if self.cut == "row":
            reduce = mappings.reduce_scatter_to_sequence_parallel_region if sp else None
            return (reduce or mappings.reduce_from_tensor_model_parallel_region)(
                low, group=self.group
            )
        if sp:
            return mappings.gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=self.group
            )
        return mappings.copy_to_tensor_model_parallel_region(low, group=self.group)

    def _dropped(self, x):
        if not self.training or self.spec.dropout == 0.0:
            return x
        shared = self.tp == 1 or (self.cut != "row" and not self.sequence_parallel)
        if shared:  # every rank has the same x, and must drop the same of it
            return F.dropout(x, self.spec.dropout)
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.spec.dropout)


class LoraEmbedding(Adapter):
    """The adapter of an embedding: scale * B A[:, token]. A [r, V / tp] starts at zero, B [h, r] does not, as in PEFT."""

    def __init__(
        self, spec, mca, name, rows, hidden_size, vocab_size, group=None, sequence_parallel=False, scatters=False,
        device=None,
    ):  # fmt: skip
        super().__init__(spec, mca, group, sequence_parallel, device)
        self.names, self.vocab_size, self.scatters = [name], vocab_size, scatters
        self._add("lora_embedding_A", (spec.rank, rows), 1)
        self._add("lora_embedding_B", (hidden_size, spec.rank), None, partial=True)
        self.padded.add("lora_embedding_A")

    def pieces(self) -> Iterator[Piece]:
        yield self._piece(
            f"{self.names[0]}.lora_embedding_A", "lora_embedding_A", real=self.vocab_size
        )
        yield self._piece(f"{self.names[0]}.lora_embedding_B", "lora_embedding_B")

    def forward(self, tokens):
        """tokens [b, s] -> [b, s, h], or [s / tp, b, h] where the embedding scatters the sequence; float32."""
        table = self.lora_embedding_A.t()
        if self.tp == 1:
            low = F.embedding(tokens, table)
        else:
            from megatron.core.tensor_parallel import mappings

            local = tokens - self.rank * table.shape[0]
            elsewhere = (local < 0) | (local >= table.shape[0])
            low = F.embedding(local.masked_fill(elsewhere, 0), table).masked_fill(
                elsewhere[..., None], 0.0
            )
            if self.scatters:
                low = low.transpose(0, 1).contiguous()
                low = mappings.reduce_scatter_to_sequence_parallel_region(low, group=self.group)
            else:
                low = mappings.reduce_from_tensor_model_parallel_region(low, group=self.group)
        return F.linear(low * self.spec.scale, self.lora_embedding_B)


def _hook(module, args, output):
    """Adds the adapter's part to a linear's output, in float32, and gives it back in the base's dtype."""
    adapter = module.lora
    if not adapter.enabled or getattr(
        module, "passes_hidden", False
    ):  # the chunked loss asks for its factors itself
        return output
    base, *rest = output if isinstance(output, tuple) else (output,)
    summed = (base + adapter(_normed(module, args[0]))).to(base.dtype)
    return (summed, *rest) if isinstance(output, tuple) else summed


def _normed(module, x):
    """What the matrix itself sees: Transformer Engine's fused linears put a norm in front of it."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return x
    scale = weight.float() + (1.0 if getattr(module, "zero_centered_gamma", False) else 0.0)
    if getattr(module, "normalization", "RMSNorm") == "RMSNorm":
        return F.rms_norm(x.float(), (x.shape[-1],), scale, module.eps).to(x.dtype)
    bias = module.layer_norm_bias.float()
    return F.layer_norm(x.float(), (x.shape[-1],), scale, bias, module.eps).to(x.dtype)


def attach(module: torch.nn.Module, adapter: Adapter) -> None:
    """Put an adapter beside a module; a router asks it by itself, others have a hook."""
    adapter.train(module.training)
    module.add_module("lora", adapter)
    if not hasattr(module, "gating"):
        module.register_forward_hook(_hook)
