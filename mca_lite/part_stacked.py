"""Files that stack the experts of a layer in one tensor per kind of weight: read and written here
as if experts were stored singly.

in_turns (gpt_oss), with biases:

    gate_up_proj [E, h, 2 f]   transposed for x W; columns alternate between gate and up
    down_proj [E, f, h]
    gate_up_proj_bias [E, 2 f], down_proj_bias [E, h]

rows (qwen3_5_moe, and qwen3_vl_moe as transformers saves it):

    gate_up_proj [E, 2 f, h]   the rows of gate before those of up
    down_proj [E, h, f]

columns (qwen3_vl_moe on the hub): rows, transposed for x W

    gate_up_proj [E, h, 2 f], down_proj [E, f, h]

In MXFP4 a matrix consists of gate_up_proj_blocks [E, 2 f, h / 32, 16], two 4-bit values per byte,
and gate_up_proj_scales [E, 2 f, h / 32], an exponent per 32 values; rows are outputs. They are read
as bf16, like transformers' integrations/mxfp4.py.

Letters: E experts, h hidden size, f columns per expert.
"""

import itertools
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]
# stacked tensor -> the projections of single experts in it
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks)?")
_SINGLE = re.compile(r"(.*\.mlp\.experts\.)\d+\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
# the values of the lower three bits; the fourth is the sign
_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_IN_BLOCK = 32


def parts_of(name: str, experts: int) -> list[tuple[str, tuple[Any, ...]]]:
    """List the tensors of single experts that the stacked tensor `name` contains:
    [("...experts.0.gate_proj.weight", index), ...]; [] if it is no stacked tensor. experts: number
    of experts.

    index: the place of the single tensor in the stacked one, right for unquantised files of
    gpt_oss, in which gate and up alternate. It gives a matrix as [in, out], or a bias."""
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


# -- reading


@dataclass(frozen=True)
class _Rows:
    """Reads single experts from a tensor in a file that stacks their matrices as [E, out, in], or
    their biases as [E, out], for E experts. slices: the tensor's safetensors slice, which reads
    only what is indexed."""

    slices: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.slices.get_shape())

    def read(self, *place: Any) -> torch.Tensor:
        """Read a part of one expert's matrix, [rows, columns], or of its bias, [rows]. place:
        (expert, rows, columns), or (expert, rows) for a bias; rows are outputs, columns inputs."""
        return self.slices[place]


@dataclass(frozen=True)
class _Matrices:
    """Reads single experts from a tensor in a file that stacks their matrices transposed, as
    [E, in, out] for E experts. slices: the tensor's safetensors slice, which reads only what is
    indexed."""

    slices: Any

    @property
    def shape(self) -> Shape:
        experts, inputs, outputs = self.slices.get_shape()
        return experts, outputs, inputs

    def read(self, expert: int, rows: slice, columns: slice) -> torch.Tensor:
        """Read a part of one expert's matrix and transpose it -> [rows, columns]. rows: a range of
        outputs. columns: a range of inputs."""
        return self.slices[expert, columns, rows].mT


@dataclass(frozen=True)
class _Mxfp4Matrices:
    """Reads single experts from tensors in a file that stack their MXFP4 matrices [E, out, in] for
    E experts. slices: safetensors slice of the 4-bit values, two in a byte, uint8
    [E, out, in / 32, 16], which reads only what is indexed. scales: slice of the exponents, one per
    32 values."""

    slices: Any
    scales: Any

    @property
    def shape(self) -> Shape:
        experts, outputs, blocks, _ = self.slices.get_shape()
        return experts, outputs, blocks * _IN_BLOCK

    def read(self, expert: int, rows: slice, columns: slice) -> torch.Tensor:
        """Read a part of one expert's matrix, decoded to bf16 -> [rows, columns]. rows: a range of
        outputs. columns: a range of inputs. Only the blocks that contain these values are read."""
        first = columns.start // _IN_BLOCK
        blocks = slice(first, -(-columns.stop // _IN_BLOCK))
        values = from_mxfp4(self.slices[expert, rows, blocks], self.scales[expert, rows, blocks])
        return values[:, columns.start - first * _IN_BLOCK :][:, : columns.stop - columns.start]


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode numbers in MXFP4 to bf16 [..., 32 n]. blocks: uint8 [..., n, 16], n blocks of 32
    values; a byte contains two 4-bit values, the first in its lower bits. scales: uint8 [..., n],
    an exponent per block: its values are multiplied by 2 ** (scale - 127)."""
    positive = torch.tensor(_MXFP4, dtype=torch.bfloat16, device=blocks.device)
    numbers = torch.cat((positive, -positive))
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    exponents = scales.int().unsqueeze(-1) - 127
    return torch.ldexp(numbers[pairs.int()], exponents).to(torch.bfloat16).flatten(-2)


@dataclass(frozen=True)
class ExpertSlice:
    """One expert's tensor inside a stacked one. It can be read like a safetensors slice, without
    reading the other experts. stack: reads the stacked tensor, a _Rows, _Matrices or
    _Mxfp4Matrices. expert: the expert's index. outputs: which of the stacked tensor's outputs are
    this tensor's rows."""

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


def format_of(slices: dict[str, Any]) -> str:
    """Find out how files stack their experts: "in_turns" (gate and up alternate), "rows" (matrices
    [out, in]) or "columns" (matrices [in, out]). slices: {name: safetensors slice} of the files,
    with at least one stacked tensor."""
    first = next(match for name in slices if (match := _STACKED.fullmatch(name)))[1]
    gate_up, down = (first + stack for stack in _PARTS)
    if f"{gate_up}_bias" in slices:
        return "in_turns"
    if not slices.keys() >= {gate_up, down}:
        return "rows"
    sizes = (list(slices[name].get_shape()) for name in (gate_up, down))
    (*_, last), (_, f, _) = sizes
    return "columns" if last == 2 * f else "rows"


def unstacked(slices: dict[str, Any], form: str) -> dict[str, Any]:
    """Make files with stacked experts look as if each expert had tensors of its own. slices:
    {name: safetensors slice} of the files. The result has an ExpertSlice (one expert's part of a
    stacked tensor) for each of these tensors, under its own name, instead of the stacked one.

    form: from format_of. ValueError if MXFP4 blocks have no scales, or scales of another shape."""
    in_turns = form == "in_turns"
    singles = {}
    for name, stored in slices.items():
        match = _STACKED.fullmatch(name)
        if match is None:
            singles[name] = stored
            continue
        _, stack, suffix = match.groups()
        whole: Any = _Matrices(stored)
        if suffix == "_blocks":
            whole = _Mxfp4Matrices(stored, _scales_of(name, slices))
        elif suffix == "_bias" or form == "rows":
            whole = _Rows(stored)
        rows = range(whole.shape[1])
        size = len(rows) // len(_PARTS[stack])
        for single, (expert, _, outputs) in parts_of(name, whole.shape[0]):
            first = outputs.start * size
            of_single = rows[outputs] if in_turns else rows[first : first + size]
            singles[single] = ExpertSlice(whole, expert, of_single)
    return {name: part for name, part in singles.items() if not _is_of_blocks(name, slices)}


def _is_of_blocks(name: str, slices: dict[str, Any]) -> bool:
    """True if `name` is the name of MXFP4 scales whose blocks of values are in `slices` too,
    {name: safetensors slice}."""
    return name.endswith("_scales") and name.replace("_scales", "_blocks") in slices


def _scales_of(name: str, slices: dict[str, Any]) -> Any:
    """The scales of an MXFP4 weight. name: its blocks' name, ending in "_blocks". slices: {name:
    safetensors slice}. ValueError if the scales are missing, or do not fit the blocks' shape.
    """
    other = name.replace("_blocks", "_scales")
    if other not in slices:
        raise ValueError(f"{name} is there without {other}: copy or download the model again")
    *wanted, _ = slices[name].get_shape()
    got = slices[other].get_shape()
    if list(got) != wanted:
        raise ValueError(f"{other} has shape {got}, expected {wanted}, that of its blocks")
    return slices[other]


# -- writing


def stacked(
    tensors: Iterable[tuple[str, torch.Tensor]], form: str, names: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Join the tensors of single experts into stacked ones, as unquantised files of this format
    have them, and yield (name, tensor). tensors: (name, tensor) pairs; the experts' tensors of one
    stacked tensor must follow each other. Other tensors pass unchanged.

    form: from format_of. names: the stacked tensors to make; None: all."""
    for name, group in itertools.groupby(tensors, lambda pair: stack_of(pair[0])):
        if name is None or names is not None and name not in names:
            yield from group
            continue
        whole = torch.stack([tensor for _, tensor in group])
        step = len(_PARTS[name.rpartition(".")[2].removesuffix("_bias")])
        whole = whole.unflatten(0, (-1, step))
        if form == "in_turns":
            whole = whole.transpose(1, 2)
        whole = whole.flatten(1, 2)
        yield name, whole.mT.contiguous() if form != "rows" and whole.dim() == 3 else whole


def stack_of(name: str) -> str | None:
    """The name of the stacked tensor for a single expert's tensor, such as
    "...experts.gate_up_proj" for "...experts.3.up_proj.weight"; None for other tensors.
    """
    match = _SINGLE.fullmatch(name)
    if match is None:
        return None
    prefix, part, kind = match.groups()
    [stack] = [stack for stack, parts in _PARTS.items() if part in parts]
    return f"{prefix}{stack}{'_bias' if kind == 'bias' else ''}"
