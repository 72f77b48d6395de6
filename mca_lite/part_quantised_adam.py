"""Adam's moments in 8 bits: blocks of 64 numbers with a float32 scale each, in bitsandbytes'
dynamic map of 256 numbers over seven decades (Dettmers et al., arXiv 2110.02861).

Two rules differ from bitsandbytes'. The first moment's scale is the block's number of largest
magnitude, with its sign: the map contains 1 but not -1, and so a block that is read and stored
again stays the same. A second moment above 0 is never stored as 0: its root divides the update,
which would explode.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from .kernels import AdamW

BLOCK = 64
LEAST = 4096  # elements; moments of smaller parameters stay float32
CHUNK = 1 << 24  # elements whose moments are float32 at a time, a multiple of BLOCK


@functools.cache
def dynamic_map(signed: bool, device: torch.device) -> torch.Tensor:
    """The values of 8-bit codes: float32 [256], ascending. They are 0, 1, and in each of the seven
    decades from 1e-7 to 1 equally spaced values: 2, 4, ... 128 of them, or if `signed` 1, 2, ... 64
    of each sign. Cached."""
    numbers = [0.0, 1.0]
    for i in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        means = (borders[:-1] + borders[1:]) / 2 * 10 ** (i - 6)
        numbers += [*means.tolist(), *((-means).tolist() if signed else ())]
    return torch.tensor(sorted(numbers), device=device)


def to_blocks(numbers: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise flat numbers [n] -> (codes uint8 [n], scales float32 [ceil(n / 64)]). signed: False
    for numbers that are not negative."""
    padding = -numbers.numel() % BLOCK
    blocks = torch.nn.functional.pad(numbers.float(), (0, padding)).view(-1, BLOCK)
    scales = blocks.amax(1)
    if signed:
        largest = blocks.abs().argmax(1, keepdim=True)
        scales = blocks.gather(1, largest).squeeze(1)
    inverse = 1.0 / torch.where(scales == 0, 1.0, scales)
    table = dynamic_map(signed, numbers.device)
    scaled = (blocks * inverse.unsqueeze(1)).clamp(-1, 1)
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view(-1)[: numbers.numel()], scales


def from_blocks(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Dequantise the results of to_blocks() -> float32 [n]. signed: as given to to_blocks()."""
    numbers = dynamic_map(signed, codes.device)[codes.int()]
    return numbers * scales.repeat_interleave(BLOCK)[: len(numbers)]


class Moment(torch.Tensor):
    """One of Adam's moments, stored in 8 bits. Operators see it as a float32 tensor of the
    parameter's shape; copy_ quantises into it."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, signed: bool):
        shape, device = parameter.shape, parameter.device
        return cls._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    def __init__(self, parameter: torch.Tensor, signed: bool):
        """Make a moment of zeros for a parameter. signed: True for the first moment."""
        self.signed = signed
        self.codes, self.scales = to_blocks(parameter.new_zeros(parameter.numel()), signed)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales), the plain tensors that hold the moment."""
        return self.codes, self.scales

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Dequantise the flat numbers from index `first`, which must begin a block, up to and
        without `last` (None: to the end) -> float32."""
        last = last or self.numel()
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        return from_blocks(self.codes[first:last], self.scales[blocks], self.signed)

    def write(self, numbers: torch.Tensor, first: int = 0) -> None:
        """Quantise flat numbers into this moment, from index `first` on, which must begin a
        block."""
        codes, scales = to_blocks(numbers, self.signed)
        self.codes[first : first + len(codes)] = codes
        block = first // BLOCK
        self.scales[block : block + len(scales)] = scales

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        first = args[0]
        if function is torch.ops.aten.copy_.default and isinstance(first, cls):
            first.write(args[1].to(first.device).reshape(-1))
            return first
        plain = [x.read().view(x.shape) if isinstance(x, cls) else x for x in args]
        return function(*plain, **(kwargs or {}))

    def __repr__(self):
        return f"Moment({tuple(self.shape)})"


class BlockAdamW(AdamW):
    """AdamW with moments in 8 bits, except those of small parameters. blocks: which moments,
    exp_avg or exp_avg_sq or both."""

    def __init__(self, groups: Any, blocks: Iterable[str], **numbers: Any):
        super().__init__(groups, **numbers)
        self.blocks = set(blocks)

    def state_of(self, p: torch.Tensor) -> dict:
        """A parameter's state. Missing moments are created as zeros: in 8 bits if configured and
        the parameter has at least LEAST elements."""
        state = self.state[p]
        for name in self.blocks if p.numel() >= LEAST else ():
            if name not in state:
                state[name] = Moment(p, signed=name == "exp_avg")
        return super().state_of(p)

    def _update(self, group: dict, p: torch.Tensor, grad: torch.Tensor, factor: Any) -> None:
        """AdamW's update of one parameter. If it has 8-bit moments, it is updated in pieces of
        CHUNK elements, so that only one piece's moments are in float32 at a time."""
        state = self.state_of(p)
        packed = {name: value for name, value in state.items() if isinstance(value, Moment)}
        if not packed:
            return super()._update(group, p, grad, factor)
        flat = p.detach().view(-1)
        gradients = grad.reshape(-1)
        steps = state["step"]
        for first in range(0, len(flat), CHUNK):
            last = min(first + CHUNK, len(flat))
            piece = flat[first:last]
            of_piece = {"step": steps}
            for name in {"exp_avg", "exp_avg_sq", "low"} & state.keys():
                if name in packed:
                    of_piece[name] = packed[name].read(first, last)
                else:
                    of_piece[name] = state[name].view(-1)[first:last]
            self.state[piece] = of_piece
            super()._update(group, piece, gradients[first:last], factor)
            for name, moment in packed.items():
                moment.write(of_piece[name], first)
            state["step"] = self.state.pop(piece)["step"]
        return None


def new(groups: Any, args: Any, numbers: dict, halves: set[str]) -> BlockAdamW:
    """Build AdamW for TrainingArguments whose exp_avg_dtype or exp_avg_sq_dtype is 8bit. numbers:
    lr, betas and eps. halves: names of the moments in bf16."""
    moments = ("exp_avg", "exp_avg_sq")
    blocks = {name for name in moments if getattr(args, f"{name}_dtype") == "8bit"}
    return BlockAdamW(groups, blocks, halves=halves, **numbers)
