"""megatron's tensor-parallel linears, each matmul and its communication in one autograd function.

Under sequence parallelism, communication can overlap with matmuls (tp_comm_overlap), by
part_overlap.py. Otherwise they overlap only in the backward pass of column-parallel linears.
Weights, initialisation and checkpoints stay megatron's.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .cpu import add_weight_gradient
from .mcore import ColumnParallelLinear, RowParallelLinear
from .parallel import gather_into, scatter_into
from .tables import function_of


class Way(NamedTuple):
    """Settings of a tensor-parallel linear that its autograd function needs: the process group,
    whether tokens are sharded outside the linear, whether communication overlaps with matmuls, and
    whether the weight's gradient is accumulated in main_grad."""

    group: Any  # a ProcessGroup; None: no communication
    cuts_tokens: bool = False  # outside the linear, tokens are sharded (sequence parallelism)
    overlaps: bool = False  # communication runs beside matmuls
    accumulates: bool = False  # the weight's gradient is added to its main_grad

    @classmethod
    def of(cls, linear: torch.nn.Module) -> "Way":
        """Read these settings from a megatron linear. The group is None if it has one rank, or if
        the caller does the communication itself."""
        accumulates = linear.gradient_accumulation_fusion
        # shared experts that overlap with the token dispatch do this communication themselves
        if linear.explicit_expert_comm or linear.tp_group.size() == 1:
            return cls(None, accumulates=accumulates)
        is_cut = linear.sequence_parallel
        return cls(linear.tp_group, is_cut, linear.config.tp_comm_overlap, accumulates)


class ColumnProduct(torch.autograd.Function):
    """Autograd function of a column-parallel linear: x times the transposed weight, plus the bias,
    on this rank's shard of the outputs. x: [s, b, k], or [s / tp, b, k] if tokens are sharded over
    the tp ranks; weight: [n, k]; bias: [n] or None; result: [s, b, n], rounded once. s tokens, b
    sequences, k inputs, n outputs of this rank. Backward sums the gradient of x over the group, if
    there is one."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: Way
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.constants = weight, bias, way
        if not way.cuts_tokens:
            return F.linear(x, weight, bias)
        return gather_multiply(x, weight.t(), way, bias)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        weight, bias, way = ctx.constants
        [x] = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        # each of the two matmuls runs during the other's communication
        if x is not None:
            whole, arrivals = start_gather(x, way)
        sums: list[Any] = []
        if ctx.needs_input_grad[0]:
            of_x, sums = start_sum(grad, weight, way)
        if x is not None:
            _wait(arrivals)
            of_weight = _of_weight(weight, whole, grad, way.accumulates)
        if ctx.needs_input_grad[2]:
            of_bias = _of_bias(bias, grad, way.accumulates)
        _wait(sums)
        return of_x, of_weight, of_bias, None


class RowProduct(torch.autograd.Function):
    """Autograd function of a row-parallel linear: x times the transposed weight, on this rank's
    shard of the inputs, summed over the group if there is one. x: [s, b, k]; weight: [n, k];
    result: [s, b, n], or [s / tp, b, n] if tokens are sharded over the tp ranks. s tokens, b
    sequences, k inputs of this rank, n outputs. With a weight inside zeros_from() the result is
    zeros, without a matmul."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, way: Way) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.constants = weight, way
        if gives_zeros(weight):
            tokens = len(x)
            if way.cuts_tokens:
                tokens //= way.group.size()
            return x.new_zeros(tokens, *x.shape[1:-1], len(weight))
        if way.cuts_tokens:
            return multiply_scatter(x, weight.t(), way)
        out = F.linear(x, weight)
        if way.group is not None:
            dist.all_reduce(out, group=way.group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        weight, way = ctx.constants
        [x] = ctx.saved_tensors
        of_weight = None
        if way.cuts_tokens:
            grad, of_x = gather_multiply(grad, weight, way)
        else:
            of_x = grad @ weight
        if x is not None:
            of_weight = _of_weight(weight, x, grad, way.accumulates)
        return of_x, of_weight, None


@contextlib.contextmanager
def zeros_from(weight: Any, module: torch.nn.Module, on: bool) -> Iterator[None]:
    """Context manager for recomputing a layer whose output nobody reads: a RowLinear with this
    weight, or experts with this fc2, may return zeros without a matmul. Their gradients are the
    matmul's. Nothing changes if `on` is False, or if `module` or a module inside it has a forward
    hook, which may read or change outputs. Hooks of modules with a LoRA adapter do not count."""
    heard = (vars(m)["_forward_hooks"] and not hasattr(m, "lora") for m in module.modules())
    if not on or any(heard):
        yield
        return
    weight.gives_zeros = True
    try:
        yield
    finally:
        del weight.gives_zeros


def gives_zeros(weight: torch.Tensor) -> bool:
    """True for a weight inside zeros_from()."""
    return hasattr(weight, "gives_zeros")


class _Linear:
    """The matmul of ColumnLinear and RowLinear."""

    tp_product: Any  # the autograd function of its matmul

    def product(self, x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
        """The matmul with its communication. bias: of a ColumnLinear, which is added, or None; a
        RowLinear gives none. A LoRA adapter replaces this method on the instance."""
        return self.tp_product.apply(x, weight, *bias, Way.of(self))


class ColumnLinear(_Linear, ColumnParallelLinear):
    """A linear whose outputs are sharded over tp_group: each rank computes n / tp of the n outputs.
    Input [s, b, h], or [s / tp, b, h] under sequence parallelism; output [s, b, n / tp]. s tokens,
    b sequences, h inputs, tp ranks.

    The matmul adds the bias before it rounds. Added to rounded numbers of few digits, a bias
    would round all tokens' values by the same error, which attention's mean of them keeps.

    Collectives over tp_group, if Way.of() gives it: in backward; under sequence parallelism in
    forward too.
    """

    tp_product = ColumnProduct

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Apply the linear to x -> (output, None): no bias is left to add."""
        return self.product(x, self.weight, self.bias), None


class RowLinear(_Linear, RowParallelLinear):
    """A linear whose inputs are sharded over tp_group: each rank has k / tp of the k inputs, and
    the products are summed. Input [s, b, k / tp]; output [s, b, n], or [s / tp, b, n] under
    sequence parallelism. s tokens, b sequences, n outputs, tp ranks.

    Collectives over tp_group, if Way.of() gives it: in forward, except in zeros_from(); under
    sequence parallelism in backward too.
    """

    tp_product = RowProduct

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the linear to x -> (output without the bias, bias or None)."""
        return self.product(x, self.weight), self.bias


def beside(module: torch.nn.Module) -> Any:
    """The module's LoRA adapter; None if it has none or the adapter is disabled."""
    adapter = getattr(module, "lora", None)
    return adapter if adapter is not None and adapter.enabled else None


def experts_product(
    x: torch.Tensor, weight: torch.Tensor, product: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Multiply each expert's tokens by the expert's transposed matrix. x: the tokens, in the form
    that `product` takes. weight: [n, ..., in], the matrices of n experts; the middle axes are
    joined to `out`. product(x, weight [n, out, in]) multiplies. A quantised weight is saved for
    backward in its quantised form."""
    if hasattr(weight, "frozen_product"):
        return weight.frozen_product(x, product)
    return product(x, weight.flatten(1, -2))


def extra_factors(head: torch.nn.Module, hidden: torch.Tensor) -> Any:
    """The LoRA factors of an output layer (head), for the argument `extra` of token_losses; None if
    it has no enabled adapter. They are (scale * hidden A^T, B): the first for all tokens of the
    sequence, with the adapter's dropout on hidden; B [V / tp, r] is this rank's shard (V tokens in
    the vocabulary, tp ranks, r the rank of the adapter). Collective over the tensor-parallel group,
    if there is an adapter: in backward, under sequence parallelism in forward too."""
    adapter = beside(head)
    return None if adapter is None else adapter.factors(hidden)


def _of_weight(
    weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, accumulates: bool
) -> torch.Tensor:
    """Gradient [n, k] of a linear's weight. x: its inputs [s, b, k]; grad: the gradient [s, b, n]
    of its outputs (s tokens, b sequences, k inputs, n outputs). If `accumulates`, the gradient is
    added to weight.main_grad, and the result is an uninitialised tensor for megatron's DDP hook."""
    x = x.flatten(0, 1)
    grad = grad.flatten(0, 1)
    if not accumulates:
        return grad.t() @ x
    add_weight_gradient(x, grad, weight.main_grad)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _of_bias(bias: torch.Tensor, grad: torch.Tensor, accumulates: bool) -> torch.Tensor:
    """Gradient [n] of a linear's bias, summed in float32 or wider over the tokens of grad
    [s, b, n], the gradient of its outputs. If `accumulates`, it is added to bias.main_grad, and the
    result is an uninitialised tensor for megatron's DDP hook."""
    gradient = grad.sum((0, 1), dtype=torch.promote_types(grad.dtype, torch.float32))
    if not accumulates:
        return gradient.to(bias.dtype)
    bias.main_grad += gradient
    bias.grad_added_to_main_grad = True
    return torch.empty_like(bias)


def _wait(messages: list[Any]) -> None:
    """Wait for pending communication. The CUDA stream waits for GPU work, not the host."""
    for message in messages:
        message.wait()


def _peers_of(way: Way, x: torch.Tensor) -> Any:
    """The part_overlap.Peers of a linear's group, which overlap communication with matmuls. way:
    the linear's settings. x: the tensor to communicate or multiply. None if communication does not
    overlap, x is not on a GPU, or torch's symmetric memory does not work. The first call for a
    group is collective."""
    if not (way.overlaps and x.is_cuda):
        return None
    return function_of("part_overlap:peers_of")(way.group)


def start_gather(x: torch.Tensor, way: Way) -> tuple[torch.Tensor, list[Any]]:
    """Start to gather x, if each of the tp ranks has a shard of the s tokens: x [s / tp, b, k] ->
    (result [s, b, k], handles to wait for before the result is read). Collective over way.group. If
    tokens are not sharded: (x, []), without communication."""
    if not way.cuts_tokens:
        return x, []
    x = x.contiguous()
    peers = _peers_of(way, x)
    if peers is not None:
        whole, arrivals = peers.gather(x)
        return whole, [arrival for _, arrival in arrivals]
    whole = x.new_empty(way.group.size() * x.shape[0], *x.shape[1:])
    return whole, [gather_into(whole, x, group=way.group, async_op=True)]


def start_sum(grad: torch.Tensor, weight: torch.Tensor, way: Way) -> tuple[torch.Tensor, list[Any]]:
    """Multiply grad [s, b, n] by weight [n, k], and start to sum the products of all ranks ->
    (result, handles to wait for before the result is read).

    The result is [s, b, k]; if the s tokens are sharded over the tp ranks, this rank's [s / tp, b,
    k]. Collective over way.group; without a group nothing is summed.
    """
    if way.cuts_tokens and way.overlaps and grad.is_cuda:
        return multiply_scatter(grad, weight, way), []
    product = grad @ weight
    if way.group is None:
        return product, []
    if not way.cuts_tokens:
        return product, [dist.all_reduce(product, group=way.group, async_op=True)]
    out = product.new_empty(product.shape[0] // way.group.size(), *product.shape[1:])
    return out, [scatter_into(out, product, group=way.group, async_op=True)]


def gather_multiply(
    x: torch.Tensor, matrix: torch.Tensor, way: Way, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather x, of which each of the tp ranks has a shard of the s tokens, and multiply it by a
    matrix: x [s / tp, b, k], matrix [k, n] -> (gathered x [s, b, k], product [s, b, n]). bias: [n],
    added to the product; None: none. Collective over way.group."""
    x = x.contiguous()
    peers = _peers_of(way, x)
    if peers is not None:
        return peers.gather_multiply(x, matrix, bias)
    whole = x.new_empty(way.group.size() * x.shape[0], *x.shape[1:])
    gather_into(whole, x, group=way.group)
    return whole, F.linear(whole, matrix.t(), bias)


def multiply_scatter(x: torch.Tensor, matrix: torch.Tensor, way: Way) -> torch.Tensor:
    """Multiply x [s, b, k] by a matrix [k, n], sum the products of all tp ranks, and return this
    rank's shard of the s tokens, [s / tp, b, n]. Collective over way.group."""
    peers = _peers_of(way, x)
    if peers is not None:
        return peers.multiply_scatter(x, matrix)
    product = x @ matrix
    out = product.new_empty(product.shape[0] // way.group.size(), *product.shape[1:])
    scatter_into(out, product, group=way.group)
    return out
