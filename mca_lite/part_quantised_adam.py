"""Adam's moments in 8 bits: blocks of 64 numbers with a float32 scale each, in bitsandbytes'
dynamic map of 256 numbers over seven decades (Dettmers et al., arXiv 2110.02861).

Two rules differ. The first moment's scale has the sign of the block's largest number: the map ends
at 1 but not at -1, so that a stored moment is stored again as it is. The second moment gets no 0
unless it is 0: its root divides the update, which would explode.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from .kernels import AdamW, compiles, jit, launch, tl, triton

BLOCK = 64
LEAST = 4096  # numbers of a parameter; moments of smaller ones stay float32
CHUNK = 1 << 24  # numbers whose moments are float32 at once, whole blocks
_ROWS = 16  # blocks per program
_AT_ONCE = 1 << 24  # numbers: quantising takes some 20 bytes for each


@functools.cache
def dynamic_map(signed: bool, device: torch.device) -> torch.Tensor:
    """The table of numbers that 8-bit codes stand for: float32 [256], ascending. It has 0 and 1,
    and equally spaced numbers in each of the seven decades from 1e-7 to 1: 2 in the first decade, 4
    in the next, up to 128. If `signed`, there are 1, 2, up to 64 of each sign. Cached."""
    numbers = [0.0, 1.0]
    for i in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        means = (borders[:-1] + borders[1:]) / 2 * 10 ** (i - 6)
        numbers += [*means.tolist(), *((-means).tolist() if signed else ())]
    return torch.tensor(sorted(numbers), device=device)


@functools.cache
def _table(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The table dynamic_map() [256], and the 255 midpoints between neighbours in it, by which
    numbers are rounded to codes. Cached."""
    table = dynamic_map(signed, device)
    return table, (table[1:] + table[:-1]) / 2


def to_blocks(numbers: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise n flat numbers to 8 bits, in blocks of 64 with one scale each -> (codes uint8 [n],
    scales float32 [ceil(n / 64)]). signed: False for numbers that are not negative."""
    padding = -numbers.numel() % BLOCK
    blocks = torch.nn.functional.pad(numbers.float(), (0, padding)).view(-1, BLOCK)
    scales = blocks.amax(1)
    if signed:
        largest = blocks.abs().argmax(1, keepdim=True)
        scales = blocks.gather(1, largest).squeeze(1)
    inverse = 1.0 / torch.where(scales == 0, 1.0, scales)
    scaled = (blocks * inverse.unsqueeze(1)).clamp(-1, 1)
    codes = torch.bucketize(scaled, _table(signed, numbers.device)[1], out_int32=True)
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).view(-1)[: numbers.numel()], scales


def from_blocks(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """Dequantise the results of to_blocks() -> float32 [n]. signed: as given to to_blocks()."""
    numbers = dynamic_map(signed, codes.device)[codes.int()]
    return numbers * scales.repeat_interleave(BLOCK)[: len(numbers)]


@jit
def _code_of(x, borders):
    """The 8-bit code of each number in x: the index of the nearest of 256 ascending values.
    borders: the 255 midpoints between these values."""
    code = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(8):
        step = 128 >> i
        code += tl.where(tl.load(borders + code + step - 1) < x, step, 0)
    return code


@jit
def _values(codes, scales, table, place, block, inside, exists):
    """Dequantise some blocks of an 8-bit moment of Adam -> float32 [blocks, 64]. codes, scales,
    table: pointers to the moment's codes and scales, and to the codes' values. place: the indices
    [blocks, 64] of the numbers. block: the indices of the blocks. inside, exists: masks of the
    numbers, and of the blocks, that exist."""
    scale = tl.load(scales + block, exists, 0.0)
    return tl.load(table + tl.load(codes + place, inside, 0).to(tl.int32)) * scale[:, None]


@jit
def _pointer(places, i: tl.constexpr, kind: tl.constexpr, EVEN: tl.constexpr):
    """The i-th of the addresses at `places`, as a pointer to numbers of dtype `kind`. EVEN: it is a
    multiple of 16 bytes."""
    pointer = tl.load(places + i).to(tl.pointer_type(kind))
    if EVEN:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _adam_kernel(
    places, signed, of_signed, plain, of_plain,
    factor, decay, beta2, new1, new2, rate, root, eps,
    SPLIT: tl.constexpr, GRAD: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    places += tl.program_id(1) * 8
    n = tl.load(places)
    if tl.program_id(0).to(tl.int64) * ROWS * SIZE >= n:
        return
    if EVEN:
        n = tl.multiple_of(n, 16)
    weight = _pointer(places, 1, tl.int16 if SPLIT else tl.float32, EVEN)
    low = _pointer(places, 2, tl.int16, EVEN)
    grad = _pointer(places, 3, GRAD, EVEN)
    mean = _pointer(places, 4, tl.uint8, EVEN)
    of_mean = _pointer(places, 5, tl.float32, EVEN)
    square = _pointer(places, 6, tl.uint8, EVEN)
    of_square = _pointer(places, 7, tl.float32, EVEN)
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)[None, :]
    place = block[:, None] * SIZE + column
    inside = place < n
    exists = block * SIZE < n
    by = tl.load(factor).to(tl.float32)
    if by != by:
        return
    if SPLIT:
        bits = tl.load(weight + place, inside, 0).to(tl.int32) << 16
        bits += tl.load(low + place, inside, 0).to(tl.int32)
        w = bits.to(tl.float32, bitcast=True)
    else:
        w = tl.load(weight + place, inside, 0.0)
    g = tl.load(grad + place, inside, 0.0).to(tl.float32) * by
    m = _values(mean, of_mean, signed, place, block, inside, exists)
    v = _values(square, of_square, plain, place, block, inside, exists)
    m += (g - m) * new1
    v = v * beta2 + g * g * new2
    w = w - w * decay - rate * m / (tl.sqrt(v) / root + eps)
    if SPLIT:
        bits = w.to(tl.int32, bitcast=True)
        high = (bits + 32768) >> 16
        tl.store(weight + place, high.to(tl.int16), inside)
        tl.store(low + place, (bits - (high << 16)).to(tl.int16), inside)
    else:
        tl.store(weight + place, w, inside)
    m = tl.where(inside, m, 0.0)
    v = tl.where(inside, v, 0.0)
    largest = tl.argmax(tl.abs(m), 1)
    scale = tl.sum(tl.where(column == largest[:, None], m, 0.0), 1)
    tl.store(of_mean + block, scale, exists)
    scaled = m * (1.0 / tl.where(scale == 0, 1.0, scale))[:, None]
    code = _code_of(tl.minimum(tl.maximum(scaled, -1.0), 1.0), of_signed)
    tl.store(mean + place, code.to(tl.uint8), inside)
    scale = tl.max(v, 1)
    tl.store(of_square + block, scale, exists)
    scaled = v * (1.0 / tl.where(scale == 0, 1.0, scale))[:, None]
    code = _code_of(tl.minimum(scaled, 1.0), of_plain)
    code = tl.where(v > 0, tl.maximum(code, 1), code)
    tl.store(square + place, code.to(tl.uint8), inside)


def launch_adam(many: list[tuple[Any, ...]], factor: torch.Tensor, numbers: Any) -> None:
    """Run AdamW's update of parameters whose two moments are stored in 8 bits, with one Triton
    kernel. Parameters, moments and the low bits of float32 masters change in place; nothing changes
    if the factor on the gradients is NaN.

    many: for each parameter (parameter, the low 16 bits of its float32 master or None, gradient,
    first Moment, second Moment), with the same dtypes and on one device. numbers: (lr * weight
    decay, beta2, 1 - beta1, 1 - beta2, bias-corrected lr, sqrt(1 - beta2^step), eps)."""
    p, low, grad, *_ = many[0]
    rows = []
    for weight, of_weight, gradient, mean, square in many:
        tensors = weight, weight if of_weight is None else of_weight, gradient
        addresses = [t.data_ptr() for t in (*tensors, *mean.parts, *square.parts)]
        rows.append([weight.numel(), *addresses])
    is_even = not any(number % 16 for row in rows for number in row)
    places = torch.tensor(rows).to(p.device, non_blocking=True)
    tables = [t for signed in (True, False) for t in _table(signed, p.device)]
    grid = (triton.cdiv(max(row[0] for row in rows), BLOCK * _ROWS), len(rows))
    kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    constants = low is not None, kind[grad.dtype], is_even, BLOCK, _ROWS
    launch(_adam_kernel, grid, places, *tables, factor, *numbers, *constants)


class Moment(torch.Tensor):
    """One of Adam's moments, stored in 8 bits. Operators see it as a float32 tensor of the
    parameter's shape; copy_ quantises into it."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, signed: bool) -> Any:
        shape, device = parameter.shape, parameter.device
        return cls._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)

    def __init__(self, parameter: torch.Tensor, signed: bool) -> None:
        """Make a moment of zeros for a parameter. signed: True for the first moment."""
        self.signed = signed
        n = parameter.numel()
        zero, _ = to_blocks(parameter.new_zeros(1), signed)
        self.codes = zero.repeat(n)
        self.scales = torch.zeros(-(-n // BLOCK), device=zero.device)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales), the plain tensors that hold the moment."""
        return self.codes, self.scales

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Dequantise a range of the moment's flat numbers -> float32. first: the index of the first
        number, a multiple of the block size. last: the index after the last one; None: up to the
        end."""
        last = last or self.numel()
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        return from_blocks(self.codes[first:last], self.scales[blocks], self.signed)

    def write(self, numbers: torch.Tensor, first: int = 0) -> None:
        """Quantise flat numbers into this moment. first: the index of the first of them in the
        moment, a multiple of the block size."""
        for part in numbers.split(_AT_ONCE):
            codes, scales = to_blocks(part, self.signed)
            self.codes[first : first + len(codes)] = codes
            block = first // BLOCK
            self.scales[block : block + len(scales)] = scales
            first += len(codes)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if function is torch.ops.aten.copy_.default and isinstance(first, cls):
            first.write(args[1].to(first.device).reshape(-1))
            return first
        plain = [x.read().view(x.shape) if isinstance(x, cls) else x for x in args]
        return function(*plain, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"Moment({tuple(self.shape)})"


class BlockAdamW(AdamW):
    """AdamW that stores moments in 8 bits, except those of small parameters. blocks: the moments to
    store so: exp_avg, exp_avg_sq or both."""

    def __init__(self, groups: Any, blocks: Iterable[str], **numbers: Any) -> None:
        super().__init__(groups, **numbers)
        self.blocks = set(blocks)
        # parameters of this step that one kernel updates, by what they must have in common
        self._many: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}

    def step(self, closure: Any = None) -> None:
        super().step()
        self.launch_waiting()

    def state_of(self, p: torch.Tensor) -> dict:
        """The optimizer's state of a parameter. Moments that do not exist yet are created as zeros.
        Those named in `blocks` are created in 8 bits if the parameter has at least LEAST elements.
        """
        state = self.state[p]
        for name in self.blocks if p.numel() >= LEAST else ():
            if name not in state:
                state[name] = Moment(p, signed=name == "exp_avg")
        return super().state_of(p)

    def _update(self, group: dict, p: torch.Tensor, grad: torch.Tensor, factor: Any) -> None:
        """Run AdamW's update of one parameter, in place. group: its parameter group. factor: a
        scalar tensor, multiplied with the gradient.

        If both moments are in 8 bits, one Triton kernel does it on a GPU. If only one is, or
        without Triton, the update runs in pieces of CHUNK elements: of the 8-bit moments, one piece
        at a time is float32. If no moment is in 8 bits, it is as in AdamW."""
        state = self.state_of(p)
        packed = {name: value for name, value in state.items() if isinstance(value, Moment)}
        if not packed:
            return super()._update(group, p, grad, factor)
        if len(packed) == 2 and compiles(p):
            return self.update_at_once(group, p, grad, factor)
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

    def update_at_once(self, group: dict, p: torch.Tensor, grad: torch.Tensor, by: Any) -> None:
        """Prepare the update of a parameter whose moments are both in 8 bits, for launch_waiting().
        group: its parameter group. by: a scalar tensor, multiplied with the gradient."""
        state = self.state[p]
        step = int(state["step"]) + 1
        state["step"] = torch.tensor(float(step))
        beta1, beta2 = group["betas"]
        rate = group["lr"] / (1 - beta1**step)
        decay = group["lr"] * group["weight_decay"]
        numbers = decay, beta2, 1 - beta1, 1 - beta2, rate, (1 - beta2**step) ** 0.5, group["eps"]
        low = state.get("low")
        kind = p.device, low is None, grad.dtype, p.numel().bit_length(), p.numel() % 16
        many = self._many.setdefault((by, numbers, *kind), [])
        many.append((p.detach(), low, grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]))

    def launch_waiting(self) -> None:
        """Run the updates that update_at_once() prepared: one kernel for those parameters that have
        the same numbers and dtypes, the largest at most twice as large as the smallest."""
        for (by, numbers, *_), many in self._many.items():
            launch_adam(many, by, numbers)
        self._many.clear()


def new(groups: Any, args: Any, numbers: dict, halves: set[str]) -> BlockAdamW:
    """Build the AdamW for TrainingArguments whose exp_avg_dtype or exp_avg_sq_dtype is 8bit.
    groups: parameter groups. args: the TrainingArguments. numbers: lr, betas and eps by name.
    halves: names of the moments in bf16."""
    moments = ("exp_avg", "exp_avg_sq")
    blocks = {name for name in moments if getattr(args, f"{name}_dtype") == "8bit"}
    return BlockAdamW(groups, blocks, halves=halves, **numbers)
