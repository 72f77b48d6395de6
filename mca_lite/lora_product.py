"""The product of a frozen linear, or of experts, in half precision with the adapter in it, and how
Transformer Engine's linears get it."""

import torch
import torch.nn.functional as F

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core.tensor_parallel import mappings

from .model_fused import rms_norm


def with_room(weight, columns: int, rooms: dict) -> torch.Tensor:
    """A buffer [..., out, in + columns]: `weight`, whose data moves into it, and beside it columns
    to which B is written. rooms: the buffers of an adapter, by the shape of their weight."""
    room, inputs = rooms.get(weight.shape), weight.shape[-1]
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
        a, b = a.to(x.dtype), b.to(x.dtype)
        whole = x if group is None else mappings._gather_along_first_dim(x, group)
        flat = whole.reshape(-1, x.shape[-1])
        low = (flat @ a.t()).mul_(scale)
        room[:, x.shape[-1] :].copy_(b)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale, ctx.group = scale, group
        return (torch.cat([flat, low], 1) @ room.t()).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight, a, b, low = ctx.saved_tensors
        flat, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        d_low, d_x = (grad @ b).mul_(ctx.scale), None
        if ctx.needs_input_grad[0]:
            d_x = (d_low @ a).addmm_(grad, weight)
        if ctx.group is not None:
            to_parts = mappings._reduce_scatter_along_first_dim
            d_low = to_parts(d_low, ctx.group)
            d_x = d_x if d_x is None else to_parts(d_x, ctx.group)
        d_x = d_x if d_x is None else d_x.view(x.shape)
        d_a, d_b = _float_product(d_low, flat), _float_product(grad, low)
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
        grad, d_x = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            d_x = ctx.multiply(grad, weight.flatten(1, -2).transpose(1, 2))
        with torch.enable_grad():  # r wide: its gradients are those of any product of experts
            low, b = low.detach().requires_grad_(), b.detach().requires_grad_()
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
        x, weight = normed(module, x), module.weight
        out = adapter(x, weight) if adapter.adds_in_product(weight) else F.linear(x, weight)
        bias = module.bias if module.use_bias else None
        if bias is None or module.te_return_bias:
            return out, bias
        return out + bias, None

    module.forward, adapter.in_product = forward, True
