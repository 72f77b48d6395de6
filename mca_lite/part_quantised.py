"""Frozen weights in 4 or 8 bits: blocks of codes along a weight's inputs, with one scale per block.

    value = table[code] * scale, or in 8 bits code * scale: computed in float32, then rounded once

nf4 is bitsandbytes' format: blocks of 64; the scale is the largest magnitude (Dettmers
et al., arXiv 2305.14314). int8 also has blocks of 64; the scale is the largest magnitude / 127.
mxfp4 has blocks of 32, and powers of two as scales (OCP Microscaling, 1.0).

Norms' outputs, experts' copies of tokens and their activations may have an attribute `again`, a
function without arguments that computes them once more: beside quantised weights, and on experts,
adapted products call it in backward and do not keep their inputs.

Letters: k columns of a weight, its inputs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from .errors import Judge
from .families import rows_of
from .families_rows import Row
from .finetuning import Request
from .hosts import modules_of
from .kernels import compiles, jit, launch, tl, triton
from .model_linears import gives_zeros
from .part_lora_patterns import LoraSpec, is_saved
from .weights_convert import Change, LayerRows, degree, in_layer_order
from .weights_files import InitSource, original_of

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_POSITIVE = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4 = (*(-x for x in reversed(_POSITIVE)), 0.0, *_POSITIVE, 6.0)  # 15 numbers, the last twice
_LEAST = 2.0**-127  # smallest divisor: its inverse is finite
CHUNK = 1 << 20  # values converted at once on a CPU; on a GPU 16 times as many are quantised
_BYTES = 1024  # of codes, at most, per program


class Form(NamedTuple):
    """A quantised number format, such as nf4: a weight is stored as codes, in blocks with one scale
    each.

    table: the value of each 4-bit code; (): codes are signed bytes, which are their own values.
    block: number of values that share a scale.
    largest: a block's scale is its largest magnitude divided by this number. None: scales are
    powers of two, stored as exponent + 127."""

    table: tuple[float, ...]
    block: int  # numbers with one scale
    largest: float | None

    @property
    def bits(self) -> int:
        """Bits per code: 4 or 8."""
        return 4 if self.table else 8

    @property
    def bytes_of_number(self) -> float:
        """Bytes per value, including its share of the block's scale: 0.5625 for nf4."""
        return self.bits / 8 + (1 if self.largest is None else 4) / self.block


FORMS = {"nf4": Form(NF4, 64, 1.0), "int8": Form((), 64, 127.0), "mxfp4": Form(_MXFP4, 32, None)}


@functools.cache
def _table(form: Form, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A format's table of code values, and the midpoints between neighbours in it, by which numbers
    are rounded to codes; float32 on `device`. Cached."""
    table = torch.tensor(form.table, device=device)
    return table, (table[1:] + table[:-1]) / 2


def _factors(form: Form, scales: torch.Tensor) -> torch.Tensor:
    """The scales of blocks as float32 factors. scales: from quantise(). If the format's scales are
    powers of two, they are computed from the stored exponents; other scales are returned as they
    are."""
    if form.largest is not None:
        return scales
    exponents = scales.int()
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is no normal number
    return bits.view(torch.float32)


def quantise(numbers: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise numbers [.., k] in a format, such as FORMS["nf4"] -> (codes, scales
    [.., k / form.block]). A scale belongs to a block of form.block neighbouring numbers along the
    last axis. Codes of 4 bits are packed two in a byte, uint8 [.., k / 2], the first in the upper
    half. Codes of 8 bits are int8 [.., k]."""
    blocks = numbers.float().unflatten(-1, (-1, form.block))
    most = blocks.abs().amax(-1)
    if form.largest is not None:
        scales = most / form.largest
    else:  # the largest value of the table, 6, has the exponent 2
        exponents = torch.frexp(most).exponent - 3
        scales = (exponents.clamp(-127, 127) + 127).to(torch.uint8)
    scaled = blocks * (1.0 / _factors(form, scales).clamp(min=_LEAST)).unsqueeze(-1)
    if not form.table:
        return scaled.round().clamp(-127, 127).to(torch.int8).flatten(-2), scales
    borders = _table(form, numbers.device)[1]
    codes = torch.bucketize(scaled, borders, out_int32=True).to(torch.uint8).flatten(-2)
    return codes[..., ::2] << 4 | codes[..., 1::2], scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, form: Form) -> torch.Tensor:
    """Values [.., k] in float32, from the codes and scales of quantise()."""
    if form.table:
        halves = torch.stack((codes >> 4, codes & 15), -1).flatten(-2)
        values = _table(form, codes.device)[0][halves.int()]
    else:
        values = codes.float()
    blocks = values.unflatten(-1, (-1, form.block)) * _factors(form, scales).unsqueeze(-1)
    return blocks.flatten(-2)


@jit
def _whole_kernel(
    codes, scales, table, out, columns, rows, far, stride, BITS: tl.constexpr,
    SIZE: tl.constexpr, EXPONENTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // BITS
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = place < columns // PER_BYTE
    byte = tl.load(codes + row * (columns // PER_BYTE) + place, inside, 0)
    scale = tl.load(scales + row * (columns // SIZE) + place // (SIZE // PER_BYTE), inside, 0)
    if EXPONENTS:  # make float32's bits of 2^(scale - 127); 2^-127, for 0, is no normal number
        bits = scale.to(tl.int32)
        bits = tl.where(bits == 0, 1 << 22, bits << 23)
        scale = bits.to(tl.float32, bitcast=True)
    if BITS == 4:
        code = byte.to(tl.int32)
        first = (tl.load(table + (code >> 4)) * scale).to(out.dtype.element_ty)
        second = (tl.load(table + (code & 15)) * scale).to(out.dtype.element_ty)
        value = tl.interleave(first, second)
    else:
        value = (byte.to(tl.float32) * scale).to(out.dtype.element_ty)
    column = (tl.program_id(1) * BYTES * PER_BYTE) + tl.arange(0, BYTES * PER_BYTE)
    tl.store(out + row // rows * far + row % rows * stride + column, value, column < columns)


def write_whole(codes: torch.Tensor, scales: torch.Tensor, form: Form, out: torch.Tensor) -> None:
    """Dequantise a weight into the given tensor `out` [.., k], rounded to its dtype. codes, scales:
    from quantise(), in the format `form`. The rows of `out` may have gaps between them in memory.
    If it is a stack of matrices [n, rows, k], these may have further gaps between them. On a GPU
    with Triton this is one kernel."""
    if compiles(out):
        launch_whole(codes, scales, form, out if out.dim() == 3 else out.view(-1, out.shape[-1]))
        return
    if out.dim() == 3:
        codes = codes.reshape(*out.shape[:-1], -1)
        scales = scales.reshape(*out.shape[:-1], -1)
        for part in zip(codes, scales, out, strict=True):
            write_whole(*part[:2], form, part[2])
        return
    rows = out.view(-1, out.shape[-1])
    codes = codes.reshape(len(rows), -1)
    scales = scales.reshape(len(rows), -1)
    step = max(CHUNK // rows.shape[1], 1)
    for part in zip(rows.split(step), codes.split(step), scales.split(step), strict=True):
        part[0].copy_(dequantise(*part[1:], form))


def launch_whole(codes: torch.Tensor, scales: torch.Tensor, form: Form, out: torch.Tensor) -> None:
    """Run the Triton kernel that does the work of write_whole() on a GPU: dequantise codes and
    scales into `out`, which is [rows, k] or [n, rows, k]. codes, scales: from quantise(),
    contiguous, with a row for each row of `out` (n * rows of them in the second case)."""
    *_, rows, columns = out.shape
    a_row = columns * form.bits // 8
    at_once = min(max(triton.next_power_of_2(a_row), 256), _BYTES)
    grid = (out.numel() // columns, triton.cdiv(a_row, at_once))
    table, _ = _table(form, out.device)
    sizes = columns, rows, out.stride(0), out.stride(-2)
    constants = (form.bits, form.block, form.largest is None, at_once)
    tensors = codes, scales, table, out
    launch(_whole_kernel, grid, *tensors, *sizes, *constants, num_warps=max(at_once // 512, 1))


# -- a parameter

_aten = torch.ops.aten


class Quantised(torch.Tensor):
    """A frozen weight [.., k], stored as the codes and scales of quantise(). Its dtype is that of
    the dequantised values.

    These operators work on the stored form: detach, select along axis 0 of several axes, and view
    of the leading axes give a Quantised that shares its memory; copy_ into the weight quantises
    plain values; a copy to the meta device has no values. Other in-place methods that change
    values, such as mul_, raise NotImplementedError.

    Other operators get a dequantised copy, whole(). Those that write to their arguments in another
    way (torch._foreach_mul_, out=) change this copy alone."""

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scales: torch.Tensor, form: Form, dtype: torch.dtype
    ) -> Any:
        shape = (*codes.shape[:-1], codes.shape[-1] * 8 // form.bits)
        return cls._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, form: Form, dtype: torch.dtype
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.form = form

    @classmethod
    def empty(cls, weight: torch.Tensor, form: Form) -> "Quantised":
        """A Quantised with the weight's shape, dtype and device, whose codes and scales are all
        0."""
        *rows, columns = weight.shape
        kind = torch.uint8 if form.table else torch.int8
        of_scales = torch.uint8 if form.largest is None else torch.float32
        codes = torch.zeros(*rows, columns * form.bits // 8, dtype=kind, device=weight.device)
        shape = (*rows, columns // form.block)
        scales = torch.zeros(shape, dtype=of_scales, device=weight.device)
        return cls(codes, scales, form, weight.dtype)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales), the plain tensors that hold the weight."""
        return self.codes, self.scales

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def _with(self, codes: torch.Tensor, scales: torch.Tensor) -> "Quantised":
        return type(self)(codes, scales, self.form, self.dtype)

    def whole(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The dequantised weight. out: a tensor to write it to, rounded to the tensor's dtype; the
        result is this tensor. None: a new tensor in this weight's dtype."""
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        write_whole(*self.parts, self.form, out)
        return out

    def set(self, numbers: torch.Tensor) -> None:
        """Overwrite this weight with other values, which are quantised. numbers: the values,
        broadcast to this weight's shape. Some rows are converted at a time, to save memory."""
        columns = self.shape[-1]
        rows = numbers.expand(self.shape).reshape(-1, columns)
        codes, scales = (part.view(len(rows), -1) for part in self.parts)
        at_once = CHUNK << 4 if self.is_cuda else CHUNK  # there each operator costs a launch
        step = max(at_once // columns, 1)
        for first in range(0, len(rows), step):
            some = rows[first : first + step].to(self.device)
            for part, new in zip((codes, scales), quantise(some, self.form), strict=True):
                part[first : first + step] = new

    def frozen_product(self, x: torch.Tensor, product: Callable[..., Any]) -> torch.Tensor:
        """Multiply x by this weight: product(x, w), with w the dequantised weight as [n, out, in]
        for n experts. Backward dequantises the weight again, instead of keeping its values. For a
        weight inside zeros_from(), which marks products that nobody reads, the result may be zeros.
        """
        return _Product.apply(x, self, product)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0]
        if function is _aten.copy_.default and isinstance(first, cls):
            source = args[1]
            if not isinstance(source, cls):
                first.set(source)
            elif source.codes.data_ptr() != first.codes.data_ptr():
                for part, new in zip(first.parts, source.parts, strict=True):
                    part.copy_(new)
            return first
        in_place = function.overloadpacket.__name__.endswith("_")
        if isinstance(first, cls) and in_place:
            raise NotImplementedError(f"{function} on a quantised weight: use copy_")
        shared = first.shared(function, args, kwargs or {}) if isinstance(first, cls) else None
        if shared is not None:
            return shared
        if function is _aten._foreach_norm.Scalar:  # of a model: one dequantised weight at a time
            of_one = functools.partial(tree_map_only, cls, cls.whole)
            return [function(of_one([x]), *args[1:], **kwargs or {})[0] for x in first]
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return function(*args, **kwargs)

    def shared(self, function: Any, args: Any, kwargs: Any) -> "torch.Tensor | None":
        """The result of an operator that works on codes and scales, such as detach or a view, or of
        a copy to the meta device; None for any other operator. function, args, kwargs: the
        operator and its arguments, as __torch_dispatch__ gets them."""
        if function in (_aten.detach.default, _aten.alias.default):
            return self._with(*self.parts)
        if function is _aten.select.int and args[1] == 0 and self.dim() > 1:
            return self._with(*(part[args[2]] for part in self.parts))
        if function is _aten.view.default and args[1][-1] == self.shape[-1]:
            lead = args[1][:-1]
            return self._with(*(part.view(*lead, part.shape[-1]) for part in self.parts))
        is_copy = str(function) == "aten._to_copy.default"
        if is_copy and kwargs.get("device") == torch.device("meta"):
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return None

    def __repr__(self) -> str:
        return f"Quantised({tuple(self.shape)}, {self.dtype}, {self.form.bits} bits)"


class _Product(torch.autograd.Function):
    """Autograd function of Quantised.frozen_product(): product(x, w), with w the frozen weight
    [n, .., in], dequantised as [n, out, in]. It saves the quantised weight for backward, and gives
    only x a gradient. For a weight inside zeros_from(), which marks products that nobody reads,
    forward gives zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, product: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.product = product
        if gives_zeros(weight):
            return x.new_zeros(len(x), weight.shape[1])
        return product(x, weight.whole().flatten(1, -2))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [weight] = ctx.saved_tensors
        whole = weight.whole().flatten(1, -2)
        return ctx.product(grad.contiguous(), whole.transpose(1, 2)), None, None


# -- the weights of a model


def is_quantised(row: Row, config: Any) -> bool:
    """True if the format config.weight_format, which must be set, applies to the weight of a Row (a
    megatron tensor and its Hugging Face names). It applies to a linear's or expert's matrix in a
    layer, of a kind that tensor parallelism can shard. mxfp4 applies to experts alone if the model
    has some."""
    is_matrix = row.is_linear and row.axis is not None and "{}" in row.mca
    only_experts = config.weight_format == "mxfp4" and config.num_moe_experts
    return is_matrix and (row.expert is not None or not only_experts)


def quantised_layers(config: Any) -> LayerRows:
    """Yield (row, layer index) for each weight that config.weight_format quantises. row: a Row of
    the family's table (a megatron tensor and its Hugging Face names)."""
    return ((row, layer) for row, layer in in_layer_order(config) if is_quantised(row, config))


def bytes_of_numbers(config: Any) -> dict[str, float]:
    """The size of quantised weights: {megatron name: bytes per value} for each weight that
    config.weight_format quantises. In a name, {} stands for the layer, [] for the expert."""
    size = FORMS[config.weight_format].bytes_of_number
    rows = [row for row, _ in quantised_layers(config)]
    return {row.mca.replace(f"experts.{row.expert}.", "experts.[]."): size for row in rows}


def quantise_layer(layer: torch.nn.Module, config: Any) -> None:
    """Replace the matrices of a decoder layer that config.weight_format quantises, in place: each
    becomes a frozen Quantised (codes and scales), which are 0 until weights are loaded.
    is_quantised() says which; other tensors are kept."""
    form = FORMS[config.weight_format]
    rows = [row for row in rows_of(config.hf_model_type, config) if is_quantised(row, config)]
    names = {row.mca.partition(".{}.")[2] for row in rows}
    if any(row.expert is not None for row in rows):
        names |= {"mlp.experts.fc1", "mlp.experts.fc2"}
    for name in names.intersection(dict(layer.named_parameters())):
        path, _, key = name.rpartition(".")
        module = layer.get_submodule(path)
        weight = module.get_parameter(key)
        packed = Quantised.empty(weight.detach(), form)
        parameter = torch.nn.Parameter(packed, requires_grad=False)
        vars(parameter).update(vars(weight))  # keep the attributes that megatron reads
        setattr(module, key, parameter)


def plan_base(request: Request, spec: LoraSpec, judge: Judge) -> str:
    """Choose the number format of a run's frozen weights, such as nf4, by its quantization keys,
    and set it on the model's config -> text for the report, such as ", base in nf4".

    request: a Request (the run's arguments and the model's config). spec: the settings of the run's
    LoRA adapters. judge: a Judge (collects Problems of a configuration), which gets one for a model
    or layout that cannot be quantised, and for a quantised module in modules_to_save. Not
    collective."""
    name = choose_by_keys(request.config, request.arguments, judge)
    for row, layer in quantised_layers(request.config):
        for module in modules_of(row, layer):
            judge.expect(
                not is_saved(module, spec),
                "modules_to_save",
                f"{module} is kept in {name}, and cannot be trained",
                "modules_to_save without it, or quantization_bit left out",
            )
    return f", base in {name}"


def choose_by_keys(config: Any, arguments: Any, judge: Judge | None = None) -> str:
    """Choose the quantised format by a run's keys quantization_bit and quantization_type, and set
    config.weight_format -> the format's name, such as "nf4". arguments: RunArguments. config,
    judge: see choose()."""
    keys = arguments.parts["quantised"]
    return choose(config, int(keys.quantization_bit), keys.quantization_type, judge)


def choose(config: Any, bits: int = 4, kind: str | None = None, judge: Judge | None = None) -> str:
    """Choose the quantised format and set config.weight_format (McaModelConfig), before the model
    is built -> its name in FORMS.

    bits, kind: the keys quantization_bit and quantization_type. 8 bits are int8; otherwise `kind`
    is taken or, if None, mxfp4 for a model that is stored in it, else nf4. judge: a Judge, which
    collects a Problem for each reason why the model or layout cannot be quantised; None:
    ConfigError is raised instead."""
    rules = judge or Judge(config)
    stored = (config.hf_config or {}).get("quantization_config") or {}
    kept = "mxfp4" if stored.get("quant_method") == "mxfp4" else "nf4"
    name = config.weight_format = "int8" if bits == 8 else kind or kept
    rules.expect(
        config.transformer_impl == "local",
        "transformer_impl",
        "Transformer Engine's linears cannot hold quantised weights",
        "transformer_impl: local",
    )
    block = FORMS[name].block
    source = InitSource(config.hf_config, 0, config.mtp_num_layers)  # for its shapes alone
    for row, layer in quantised_layers(config):
        columns = source.shape(row.hf[0].format(layer))[1]
        ranks = degree(row, config) if row.axis == 1 else 1
        key = "tensor_model_parallel_size"
        if row.expert is not None:
            key = "expert_tensor_parallel_size"
        remedy = f"{key}: {ranks // 2}" if ranks > 1 else "quantization_bit left out"
        rules.expect(
            columns // ranks % block == 0,
            key,
            f"{name} has blocks of {block} numbers, and a rank has {columns // ranks} columns of "
            f"{row.hf[0].format(layer)}",
            remedy,
        )
    if judge is None:
        rules.close()
    return name


def base_weights(config: Any) -> Change:
    """Make a function that gives a quantised weight as it was before quantisation: function(HF
    name, dequantised CPU tensor) -> the weight, read from the model's files
    (nf4 in these as float32). The function returns the given tensor itself if this weight is not
    quantised, or if the files are gone."""
    source = original_of(config.name_or_path)
    names = {hf.format(layer) for row, layer in quantised_layers(config) for hf in row.hf}

    def read(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if source is None or name not in names:
            return tensor
        return source.read(name)

    return read
