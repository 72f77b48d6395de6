"""Files with bitsandbytes' NF4 weights, read as float32. A weight X [n, k] is stored as

    X                      uint8 [n k / 2, 1]; the upper half of a byte is the first of two codes
    X.absmax               scales for blocks in the flat weight: float32, or codes (nested)
    X.quant_map            float32 [16], the value of each code
    X.nested_absmax, X.nested_quant_map   for nested scales: map[code] * nested_absmax + offset
    X.quant_state.bitsandbytes__nf4       JSON: shape, block sizes, the offset

Quantising the float32 values again gives the same codes, and the same scales except for blocks of
zeros.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from .errors import expect

_STATE = re.compile(r"(.*)\.quant_state\.bitsandbytes__(\w+)")
_OTHERS = "absmax quant_map nested_absmax nested_quant_map quant_state.bitsandbytes__nf4".split()
# gpt_oss's experts and routers in Unsloth's files; the rows of gate and up alternate
_UNSLOTH = re.compile(r"(.*\.mlp\.experts\.)(gate_up_projs|down_projs)\.(\d+)\.(weight|bias)")
_ROUTER = re.compile(r"(.*\.mlp\.router\.)linear\.(weight|bias)")


class Nf4Slice:
    """A weight in a model's files that bitsandbytes stored in its 4-bit format NF4. It is read like
    a safetensors slice: indexing gives dequantised float32 values. Only the rows asked for are
    read, in whole blocks; columns are cut out afterwards.

    name: the weight's. slices: {name: safetensors slice} of the files."""

    def __init__(self, name: str, slices: dict[str, Any]):
        self._codes = slices[name]
        self._of: dict[str, Any] = {other: slices.get(f"{name}.{other}") for other in _OTHERS}
        state = bytes(self._of["quant_state.bitsandbytes__nf4"][:].tolist())
        self._state = json.loads(state)
        self._table = self._of["quant_map"][:].float()

    def get_shape(self) -> list[int]:
        return self._state["shape"]

    def _scales(self, first: int, last: int) -> torch.Tensor:
        """Read the scales of the blocks with index first to last - 1, float32. If they are
        quantised themselves (nested), they are dequantised; ValueError if the file lacks the nested
        scales for that."""
        scales = self._of["absmax"][first:last]
        nested = self._of["nested_absmax"]
        if nested is None:
            words = "absmax holds codes, and nested_absmax is missing: the file is damaged"
            expect(scales.is_floating_point(), words)
            return scales.float()
        size = self._state["nested_blocksize"]
        values = self._of["nested_quant_map"][:][scales.int()]
        places = torch.arange(first, first + len(scales)) // size
        return values * nested[:][places] + self._state["nested_offset"]

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        rows, columns = _both(part)
        count, width = self.get_shape()
        top, bottom, _ = rows.indices(count)
        block = self._state["blocksize"]
        start = top * width
        stop = max(bottom * width, start)
        first = start // block
        last = -(-stop // block)
        packed = self._codes[first * block // 2 : -(-last * block // 2)].flatten()
        codes = torch.stack((packed >> 4, packed & 15), 1).flatten()
        scales = self._scales(first, last).repeat_interleave(block)
        numbers = self._table[codes.int()] * scales[: len(codes)]
        return numbers[start - first * block :][: stop - start].view(-1, width)[:, columns]


def _both(part: slice | tuple[slice, ...]) -> tuple[slice, slice]:
    """Split the index by which a weight is read, such as [2:4] or [2:4, :8], into (slice of rows,
    slice of columns)."""
    both = part if isinstance(part, tuple) else (part,)
    return both[0], both[1] if len(both) > 1 else slice(None)


class _EveryOther:
    """Every second row of a stored weight, read like a safetensors slice. slices: the weight's
    safetensors slice, or what stands for it. first: the row to start with, 0 or 1."""

    def __init__(self, slices: Any, first: int):
        self._slices = slices
        self._first = first

    def get_shape(self) -> list[int]:
        count, *rest = self._slices.get_shape()
        return [count // 2, *rest]

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        rows, columns = _both(part)
        shape = self.get_shape()
        start, stop, _ = rows.indices(shape[0])
        places = slice(self._first + 2 * start, self._first + 2 * max(stop, start))
        whole = self._slices[places] if len(shape) == 1 else self._slices[places, columns]
        return whole[::2]


def unpacked(slices: dict[str, Any]) -> dict[str, Any]:
    """Make a model's NF4 weights readable: {name: slice} of its files -> {name: slice}, in which
    one Nf4Slice (dequantises as it is read) replaces the several tensors of an NF4 weight.
    Unsloth's names for gpt_oss's experts and routers become those that this package reads.

    ValueError for a weight in another 4-bit format of bitsandbytes, or without its codes, absmax or
    quant_map."""
    of_states = {}
    for match in filter(None, map(_STATE.fullmatch, slices)):
        name, kind = match.groups()
        needed = [name, *(f"{name}.{other}" for other in ("absmax", "quant_map"))]
        missing = [other for other in needed if other not in slices]
        if kind != "nf4" or missing:
            why = f"{missing[0]} is not there" if missing else f"it is in {kind}"
            raise ValueError(
                f"{name}: expected bitsandbytes' nf4 with its scales, and {why}: save the model in "
                "bf16, or download it again"
            )
        of_states[name] = Nf4Slice(name, slices)
    beside = {f"{name}.{other}" for name in of_states for other in _OTHERS}
    plain = {name: of_states.get(name, part) for name, part in slices.items()}
    return dict(_renamed((name, part) for name, part in plain.items() if name not in beside))


def _renamed(parts: Any) -> Iterator[tuple[str, Any]]:
    """Replace Unsloth's names for gpt_oss's experts and routers by those that this package reads.
    parts: (name, slice) pairs; yields the new pairs. An expert's gate_up_projs becomes two,
    gate_proj and up_proj, of every second row each. Other pairs are unchanged."""
    for name, part in parts:
        expert = _UNSLOTH.fullmatch(name)
        if expert is None:
            yield _ROUTER.sub(r"\1\2", name), part
            continue
        prefix, stack, number, kind = expert.groups()
        if stack == "down_projs":
            yield f"{prefix}{number}.down_proj.{kind}", part
        else:
            for first, projection in enumerate(("gate_proj", "up_proj")):
                yield f"{prefix}{number}.{projection}.{kind}", _EveryOther(part, first)
