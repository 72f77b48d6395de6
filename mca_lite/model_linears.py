"""megatron's linears under sequence parallelism with their messages behind their products
(tp_comm_overlap).

torch's fused products take a part of the tokens while another part travels, through symmetric
memory of the GPUs of one host. Elsewhere the same functions gather, multiply and scatter in turn.
Of megatron's linears the weights, their initialisation and their checkpoints stay; frozen weights,
which have adapters beside them, take megatron's way.
"""

import functools
import warnings

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .cpu import add_weight_gradient
from .kernels import first_line
from .mcore import ColumnParallelLinear, RowParallelLinear, mappings

_NO_SYMMETRIC_MEMORY = (
    "tp_comm_overlap: torch's symmetric memory does not work here ({}): messages of tensor "
    "parallelism are not hidden behind products"
)


class ColumnLinear(ColumnParallelLinear):
    """A linear with its outputs cut over the ranks of tp_group: takes [s / tp, b, h] under sequence
    parallelism. Collectives over tp_group in both passes."""

    def _forward_impl(self, input, weight, *args, **kwargs):
        if kwargs["bias"] is not None or not _overlaps(self, kwargs["sequence_parallel"]):
            return super()._forward_impl(input, weight, *args, **kwargs)
        return GatherLinear.apply(input, weight, self.tp_group, self.gradient_accumulation_fusion)


class RowLinear(RowParallelLinear):
    """A linear with its inputs cut over the ranks of tp_group: gives [s / tp, b, h] under sequence
    parallelism. Collectives over tp_group in both passes."""

    def forward(self, input_):
        """(output, bias or None) of input_ [s, b, h / tp]."""
        if not self.skip_bias_add or not _overlaps(self, self.sequence_parallel):
            return super().forward(input_)
        more = self.tp_group, self.gradient_accumulation_fusion
        return LinearScatter.apply(input_, self.weight, *more), self.bias


def _overlaps(linear, is_cut: bool) -> bool:
    """True if the functions of this file multiply for a linear, with its tokens cut."""
    is_usual = is_cut and not linear.explicit_expert_comm
    return is_usual and linear.config.tp_comm_overlap and linear.weight.requires_grad


class GatherLinear(torch.autograd.Function):
    """x [s / tp, b, k] of each rank, whole, times weight [n, k] -> [s, b, n]. accumulates: the
    weight's gradient is added to its main_grad."""

    @staticmethod
    def forward(ctx, x, weight, group, accumulates: bool):
        ctx.save_for_backward(x)
        ctx.constants = weight, group, accumulates
        return gather_multiply(x, weight.t(), group)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, group, accumulates = ctx.constants
        [x] = ctx.saved_tensors
        whole = x.new_empty(grad.shape[0], *x.shape[1:])
        gathered = dist.all_gather_into_tensor(whole, x.contiguous(), group, async_op=True)
        of_x = multiply_scatter(grad.contiguous(), weight, group)
        gathered.wait()
        return of_x, _of_weight(weight, whole, grad, accumulates), None, None


class LinearScatter(torch.autograd.Function):
    """x [s, b, k] times weight [n, k], summed over the ranks -> this rank's part [s / tp, b, n]."""

    @staticmethod
    def forward(ctx, x, weight, group, accumulates: bool):
        ctx.save_for_backward(x)
        ctx.constants = weight, group, accumulates
        return multiply_scatter(x, weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, group, accumulates = ctx.constants
        [x] = ctx.saved_tensors
        whole, of_x = gather_multiply(grad, weight, group)
        return of_x, _of_weight(weight, x, whole, accumulates), None, None


def _of_weight(weight, x, grad, accumulates: bool):
    """The gradient of weight [n, k] for its inputs x [s, b, k] and its outputs' gradient
    [s, b, n]; added to weight.main_grad, an empty tensor for the hook of megatron's DDP."""
    x = x.flatten(0, 1)
    grad = grad.flatten(0, 1)
    if not accumulates:
        return grad.t() @ x
    add_weight_gradient(x, grad, weight.main_grad)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def gather_multiply(x, matrix, group) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [s / tp, b, k] of each rank gathered to [s, b, k], that times matrix [k, n]). Collective
    over group."""
    if x.is_cuda and has_symmetric_memory(group):
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        whole, [product] = fused(x.contiguous(), [matrix], 0, group.group_name)
        return whole, product
    whole = mappings._gather_along_first_dim(x, group)
    return whole, whole @ matrix


def multiply_scatter(x, matrix, group) -> torch.Tensor:
    """x [s, b, k] times matrix [k, n], summed over the ranks -> this rank's part [s / tp, b, n].
    Collective over group."""
    if x.is_cuda and has_symmetric_memory(group):
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return fused(x.contiguous(), matrix, "sum", 0, group.group_name)
    return mappings._reduce_scatter_along_first_dim(x @ matrix, group)


@functools.cache
def has_symmetric_memory(group) -> bool:
    """True if the fused products work on all ranks of a group: tried once, with a warning if they
    do not. Collective over group then."""
    reason = "another rank could not"
    try:
        x = torch.ones(128, 128, dtype=torch.bfloat16, device="cuda")
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        _, [product] = fused(x, [x], 0, group.group_name)
        works = bool((product == len(x)).all())
    except Exception as error:  # of the driver, the container, or torch
        works = False
        reason = first_line(error)
    everywhere = torch.tensor(int(works), device="cuda")
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group)
    if not everywhere:
        warnings.warn(_NO_SYMMETRIC_MEMORY.format(reason), stacklevel=2)
    return bool(everywhere)
