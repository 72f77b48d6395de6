"""Files with the experts of a layer in one tensor: read and written here under the names of single
experts. As gpt_oss has them, with biases:

    gate_up_proj [E, h, 2 f]   x W as transformers multiplies it; column 2 i is row i of the gate,
    down_proj [E, f, h]        column 2 i + 1 row i of up
    gate_up_proj_bias [E, 2 f], down_proj_bias [E, h]

As others may have them (qwen3_5_moe):

    gate_up_proj [E, 2 f, h]   the rows of the gate before those of up
    down_proj [E, h, f]

In MXFP4 a matrix is gate_up_proj_blocks [E, 2 f, h / 32, 16], two numbers of four bits in a byte,
and gate_up_proj_scales [E, 2 f, h / 32], the exponents of 32 numbers each; rows are outputs. They
become bf16, in which each of them is exact, as in transformers' integrations/mxfp4.py.

Letters: E experts, h hidden size, f columns of an expert.
"""

import itertools
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]
# names of single experts' projections in each stacked tensor
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks)?")
_SINGLE = re.compile(r"(.*\.mlp\.experts\.)\d+\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
# numbers of four bits, the highest for the sign
_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_IN_BLOCK = 32


def parts_of(name: str, experts: int) -> list[tuple[str, tuple[Any, ...]]]:
    """(name of a single expert's, index) of each part of a stacked tensor, by its name; [] for
    another tensor. The index gives [in, out] of a matrix."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return []
    prefix, stack, suffix = match.groups()
    kind = "bias" if suffix == "_bias" else "weight"
    names = _PARTS[stack]
    return [
        (f"{prefix}{e}.{part}.{kind}", (e, ..., slice(i, None, len(names))))
        for e, (i, part) in itertools.product(range(experts), enumerate(names))
    ]


# -- in


@dataclass(frozen=True)
class _Rows:
    """Stacked matrices [E, out, in] of a file."""

    slices: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.slices.get_shape())

    def read(self, expert: int, rows: slice, columns: slice) -> torch.Tensor:
        """Outputs `rows` and inputs `columns` of an expert."""
        return self.slices[expert, rows, columns]


@dataclass(frozen=True)
class _Matrices:
    """Stacked matrices [E, in, out] of a file."""

    slices: Any

    @property
    def shape(self) -> Shape:
        experts, inputs, outputs = self.slices.get_shape()
        return experts, outputs, inputs

    def read(self, expert: int, rows: slice, columns: slice) -> torch.Tensor:
        """Outputs `rows` and inputs `columns` of an expert."""
        return self.slices[expert, columns, rows].mT


@dataclass(frozen=True)
class _Biases:
    """Stacked biases [E, out] of a file."""

    slices: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.slices.get_shape())

    def read(self, expert: int, rows: slice) -> torch.Tensor:
        """Outputs `rows` of an expert."""
        return self.slices[expert, rows]


@dataclass(frozen=True)
class _Mxfp4Matrices:
    """Stacked matrices in MXFP4 of a file: blocks and scales."""

    slices: Any
    scales: Any

    @property
    def shape(self) -> Shape:
        experts, outputs, blocks, _ = self.slices.get_shape()
        return experts, outputs, blocks * _IN_BLOCK

    def read(self, expert: int, rows: slice, columns: slice) -> torch.Tensor:
        """bf16: outputs `rows` and inputs `columns` of an expert."""
        first = columns.start // _IN_BLOCK
        blocks = slice(first, -(-columns.stop // _IN_BLOCK))
        values = from_mxfp4(self.slices[expert, rows, blocks], self.scales[expert, rows, blocks])
        return values[:, columns.start - first * _IN_BLOCK :][:, : columns.stop - columns.start]


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 [.., 32 n] of blocks uint8 [.., n, 16] and scales uint8 [.., n]: the number of the lower
    four bits of a byte before that of the upper, times 2 ** (scale - 127)."""
    positive = torch.tensor(_MXFP4, dtype=torch.bfloat16, device=blocks.device)
    numbers = torch.cat((positive, -positive))
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = scales.int().unsqueeze(-1) - 127
    return torch.ldexp(numbers[pairs.int()], exponents).to(torch.bfloat16).flatten(-2)


@dataclass(frozen=True)
class ExpertSlice:
    """A single expert's tensor, as safetensors' slices are read. outputs: its rows of the stacked
    one's."""

    stack: Any
    expert: int
    outputs: range

    def get_shape(self) -> list[int]:
        return [len(self.outputs), *self.stack.shape[2:]]

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        shape = self.get_shape()
        given = (*part, *[slice(None)] * len(shape))[: len(shape)]
        bounds = [slice(*p.indices(size)[:2]) for p, size in zip(given, shape, strict=True)]
        rows = self.outputs[bounds[0]]
        step = self.outputs.step
        return self.stack.read(self.expert, slice(rows.start, rows.stop), *bounds[1:])[::step]


def unstacked(slices: dict[str, Any]) -> dict[str, Any]:
    """{name: safetensors' slice} of files, with an ExpertSlice for each single expert's tensor in
    place of those of a stacked one. ValueError if blocks or their scales are lacking, or differ in
    their shapes."""
    singles = {}
    for name, stored in slices.items():
        match = _STACKED.fullmatch(name)
        prefix, stack, suffix = match.groups() if match else ("", "", "")
        if match is None:
            singles[name] = stored
            continue
        in_turns = f"{prefix}{stack}_bias" in slices
        whole: Any = _Matrices(stored) if in_turns else _Rows(stored)
        if suffix == "_bias":
            whole = _Biases(stored)
        elif suffix == "_blocks":
            whole = _Mxfp4Matrices(stored, _scales_of(name, slices))
        rows = range(whole.shape[1])
        size = len(rows) // len(_PARTS[stack])
        for single, (expert, _, outputs) in parts_of(name, whole.shape[0]):
            first = outputs.start * size
            of_single = rows[outputs] if in_turns else rows[first : first + size]
            singles[single] = ExpertSlice(whole, expert, of_single)
    return {name: part for name, part in singles.items() if not _is_of_blocks(name, slices)}


def _is_of_blocks(name: str, slices: dict[str, Any]) -> bool:
    return name.endswith("_scales") and name.replace("_scales", "_blocks") in slices


def _scales_of(name: str, slices: dict[str, Any]) -> Any:
    """The scales of blocks."""
    other = name.replace("_blocks", "_scales")
    if other not in slices:
        raise ValueError(f"{name} is there without {other}: copy or download the model again")
    *wanted, _ = slices[name].get_shape()
    got = slices[other].get_shape()
    if list(got) != wanted:
        raise ValueError(f"{other} has shape {got}, expected {wanted}, that of its blocks")
    return slices[other]


# -- out


def stacked(
    tensors: Iterable[tuple[str, torch.Tensor]], in_turns: bool, names: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) with those of single experts, which follow one another, in one tensor each.
    in_turns: as gpt_oss has them. names: of the stacked tensors to make, None for all. Host memory:
    two of these."""
    for name, group in itertools.groupby(tensors, lambda pair: stack_of(pair[0])):
        if name is None or names is not None and name not in names:
            yield from group
            continue
        whole = torch.stack([tensor for _, tensor in group])
        step = len(_PARTS[name.rpartition(".")[2].removesuffix("_bias")])
        whole = whole.unflatten(0, (-1, step))
        if in_turns:
            whole = whole.transpose(1, 2)
        whole = whole.flatten(1, 2)
        yield name, whole.mT.contiguous() if in_turns and whole.dim() == 3 else whole


def stack_of(name: str) -> str | None:
    """The name of the stacked tensor with a single expert's, None of other tensors."""
    match = _SINGLE.fullmatch(name)
    if match is None:
        return None
    prefix, part, kind = match.groups()
    [stack] = [stack for stack, parts in _PARTS.items() if part in parts]
    return f"{prefix}{stack}{'_bias' if kind == 'bias' else ''}"
