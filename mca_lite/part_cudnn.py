"""cuDNN's attention: of rows, of packed rows, and in segments. Context parallelism needs segments:
there can be more keys than queries, and the last query sees the last key.

torch's kernels for segments on Hopper GPUs are half as fast as its cuDNN operator, which computes
causal squares and full rectangles. So the keys are split in two, a full rectangle of keys before
the first query and a causal square, and the results are joined by their log-sum-exps, as in ring
attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context").
"""

import functools
import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import parallel
from .batch import row_layout
from .kernels import compiles, first_line, fused, works

# from this many query elements on, cuDNN saves the GPU more time than its call costs the host
_FRONTEND_FROM = 2**23
_NO_FRONTEND = (
    "nvidia-cudnn-frontend cannot be used: {}. Packed rows train with torch's flash attention, "
    "which is slower on this GPU: pip install -U nvidia-cudnn-frontend, or uninstall it"
)
_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def suits_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if cuDNN's attention can be used for these q, k and v, [b, heads, s, d] each: torch's
    checks allow it, and q and v have one head size. False on a CPU and with deterministic
    algorithms."""
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

    if not q.is_cuda or torch.are_deterministic_algorithms_enabled():
        return False
    is_one_size = q.shape[-1] == v.shape[-1]
    return is_one_size and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, True))


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    """Attention without dropout, by cuDNN on a GPU, by torch's flash kernel on a CPU -> (output [b,
    n, s, d], log-sum-exps [b, n, s, 1], further values that _backward needs). q [b, n, s, d]: s
    queries in n heads. k and v [b, g, t, d]: t keys in g heads. scale: a factor on scores; None:
    d^-0.5."""
    if not q.is_cuda:
        out, lse = _CPU(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse.unsqueeze(-1), ()
    out, lse, *more, _ = _CUDNN(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return out, lse.view(*q.shape[:3], 1), tuple(more)


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    more: Any,
    is_causal: bool,
    scale: float | None,
) -> Any:
    """Gradients of q, k and v for one call of _forward. The call may have covered only some of the
    keys that the queries see; out and lse are the output and log-sum-exps over all of these keys.
    grad: the gradient of that output. more: the further values that _forward returned."""
    if not q.is_cuda:
        return _CPU_BACKWARD(grad, q, k, v, out, lse.squeeze(-1), 0.0, is_causal, scale=scale)
    cum_q, cum_k, max_q, max_k, seed, offset = more
    of_random = seed, offset, None
    sizes = cum_q, cum_k, max_q, max_k
    return _CUDNN_BACKWARD(grad, q, k, v, out, lse, *of_random, *sizes, 0.0, is_causal, scale=scale)


def causal_by_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Causal attention softmax(q k^T scale) v for as many queries as keys, by a direct call of
    cuDNN's operator, where scaled_dot_product_attention might choose another kernel.

    q [b, n, s, d], k and v [b, g, s, d], n a multiple of g -> [b, n, s, d]. scale: None for d^-0.5.
    Only for tensors that suits_cudnn() accepts."""
    return _CUDNN(q, k, v, None, torch.is_grad_enabled(), 0.0, True, False, scale=scale)[0]


@functools.cache
def has_frontend(device: torch.device) -> bool:
    """True if nvidia-cudnn-frontend is installed and the GPU is a Hopper, the only type on which
    the frontend was measured. Cached per device."""
    is_installed = importlib.util.find_spec("cudnn") is not None
    return is_installed and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def why_no_frontend() -> str | None:
    """The error from importing nvidia-cudnn-frontend, in one line; None without one. Cached."""
    try:
        import cudnn.sdpa.fwd.torch_op  # noqa: F401  it registers torch.ops.cudnn
    except Exception as error:  # a broken installation raises more than ImportError
        return first_line(error)
    return None


def suits_frontend(q: torch.Tensor) -> bool:
    """True if packed_by_cudnn() should compute queries q [t, n, d]: q has at least _FRONTEND_FROM
    elements on a GPU, has_frontend() is true of that GPU, and the frontend can be imported (a
    warning if not). False for float32 and with deterministic algorithms."""
    if not q.is_cuda or q.numel() < _FRONTEND_FROM or q.dtype == torch.float32:
        return False
    if torch.are_deterministic_algorithms_enabled() or not has_frontend(q.device):
        return False
    return works(why_no_frontend, _NO_FRONTEND)


def packed_by_cudnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Any,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention softmax(q k^T scale) v in a packed row (several documents in one row), causal
    inside each document, by the operator of nvidia-cudnn-frontend. torch's call of the same cuDNN
    kernel is not used: it rebuilds the cuDNN graph each time, and its gradients are wrong (torch
    2.11).

    q [t, n, d], k [t, g, d], v [t, g, e] -> [t, n, e], for t tokens. layout: the row's RowLayout
    (document borders and the like); this rank must hold the whole row, in order. scale: None for
    d^-0.5. window: how many keys a query sees, its own token's included; None: all. The first call
    with new head shapes, strides, dtypes, scale or window starts a thread that builds cuDNN graphs
    for the row sizes in foreseen_sizes."""
    heads = q, k, v
    keys = dict(attn_scale=scale or q.shape[-1] ** -0.5, is_causal=True, window_left=window or -1)
    like = [(x.shape[1:], x.stride(), x.dtype) for x in heads]
    kind = *like, *keys.values()
    if kind not in planned_kinds:
        planned_kinds.add(kind)
        sizes = list(foreseen_sizes)
        threading.Thread(target=_plan, args=(like, q.device, keys, sizes)).start()
    return _by_frontend(heads, keys, *layout.varlen_of_graph)


def _by_frontend(
    heads: Sequence[torch.Tensor], keys: dict[str, Any], borders: torch.Tensor, longest: int
) -> torch.Tensor:
    """Call nvidia-cudnn-frontend's attention operator for a packed row of t tokens -> the output
    [t, n, e]. heads: (q, k, v), each [t, heads, channels]. keys: further keyword arguments of the
    operator, such as attn_scale. borders: cu_seqlens (where documents begin and end). longest:
    tokens in the longest document. Both come rounded to few sizes, as in RowLayout.varlen_of_graph.
    """
    sizes = dict(cu_seqlens_q=borders, cu_seqlens_kv=borders)
    sizes |= dict(max_seqlen_q=longest, max_seqlen_kv=longest)
    return torch.ops.cudnn.sdpa_fwd(*heads, **keys, **sizes)[0]


# (tokens, documents, longest) of a run's first packed rows, the last two rounded as in
# varlen_of_graph; and the kinds of heads for which a thread was started to build graphs
foreseen_sizes: list[tuple[int, int, int]] = []
planned_kinds: set[tuple[Any, ...]] = set()
ROWS_FORESEEN = 64


def foresee(rows: Iterator[dict[str, Any]]) -> None:
    """Note the sizes of this rank's first packed rows in foreseen_sizes, in place of earlier ones,
    so that packed_by_cudnn() can let a thread build their cuDNN graphs. rows: micro-batches with
    cu_seqlens; they are read only if nvidia-cudnn-frontend is installed and the GPU is a Hopper;
    otherwise no sizes are noted."""
    foreseen_sizes.clear()
    planned_kinds.clear()
    device = parallel.device()
    if device.type == "cuda" and has_frontend(device):
        foreseen_sizes.extend(dict.fromkeys(first_sizes(rows)))


def first_sizes(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[int, int, int]]:
    """Yield the sizes of the first ROWS_FORESEEN packed rows: (tokens, number of documents, tokens
    in the longest document). The last two are rounded to few values, as in
    RowLayout.varlen_of_graph. rows: micro-batches with input_ids and cu_seqlens."""
    for row in itertools.islice(rows, ROWS_FORESEEN):
        layout = row_layout(row["cu_seqlens"], 1, 0, torch.device("cpu"))
        borders, longest = layout.varlen_of_graph
        yield row["input_ids"].shape[1], len(borders) - 1, longest


def _plan(
    like: Sequence[Any], device: torch.device, keys: dict[str, Any], sizes: Sequence[Any]
) -> None:
    """Build the cuDNN graphs of both passes for rows of these sizes, by running attention on zeros.
    Runs in a thread beside training: a build takes the host 0.05 s, and the host runs ahead of its
    GPU.

    like: (shape of a token, strides of the whole tensor, dtype) of q, k and v. keys: keyword
    arguments of the operator. sizes: (tokens, documents, longest document) per row.
    """
    with torch.cuda.device(device if device.type == "cuda" else -1):
        for tokens, documents, longest in sizes:
            rows = [
                torch.empty_strided((tokens, *shape), stride, dtype=dtype, device=device)
                for shape, stride, dtype in like
            ]
            rows = [x.zero_().requires_grad_() for x in rows]
            ends = torch.arange(documents + 1, dtype=torch.int32, device=device) * longest
            out = _by_frontend(rows, keys, ends.clamp(max=tokens), longest)
            torch.autograd.grad(out, rows, torch.zeros_like(out))


# While a context of part_long is open, its function is here: called with a kernel and the kernel's
# arguments, it returns the kernel's result.
keepers: list[Callable[..., Any]] = []


class SegmentAttention(torch.autograd.Function):
    """Attention softmax(q k^T scale) v in segments (q0, q1, k0, k1): queries q0:q1 see only keys
    k0:k1. It is causal: a segment's last query sees all of its keys, each query before it one key
    less.

    q [t, b, n, d] (t queries, n heads), k and v [T, b, g, d] (T keys, g heads), n a multiple of g
    (on a CPU n = g) -> [t, b, n * d]. Each query is in one segment."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        segments: Any,
        scale: float | None,
    ) -> torch.Tensor:
        run = functools.partial(keepers[-1], _attended) if keepers else _attended
        out, saved, ctx.more = run(q, k, v, segments, scale)
        ctx.save_for_backward(q, k, v, out, *saved)
        ctx.segments = segments
        ctx.scale = scale
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, *saved = ctx.saved_tensors
        grad = grad.view(out.shape).permute(1, 2, 0, 3)
        out = out.permute(1, 2, 0, 3)
        heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        sums = [x.permute(1, 2, 0, 3) for x in grads]
        for (rows, own, before), lse, more in zip(
            _parts(ctx.segments), saved, ctx.more, strict=True
        ):
            for keys, more_of_keys in zip((own, before), more, strict=True):
                if keys is None:
                    continue
                of_rows = grad[:, :, rows], *_cut(heads, rows, keys), out[:, :, rows]
                found = _backward(*of_rows, lse, more_of_keys, keys is own, ctx.scale)
                for total, of_keys in zip(_cut(sums, rows, keys), found, strict=True):
                    total += of_keys
        return *grads, None, None


def _attended(q, k, v, segments, scale: float | None) -> tuple[torch.Tensor, list[Any], list[Any]]:
    """Forward pass of SegmentAttention, with the same arguments -> (output [t, b, n, d]; a list
    with the log-sum-exps of each segment; a list with the further values that _backward needs for
    each segment)."""
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    saved = []
    of_kernels = []
    for rows, own, before in _parts(segments):
        part, lse, more = _forward(*_cut(heads, rows, own), True, scale)
        part = part.permute(2, 0, 1, 3)
        more_before = None
        if before is None:
            out[rows] = part
        else:
            other, lse_before, more_before = _forward(*_cut(heads, rows, before), False, scale)
            lse = join(part, lse, other.permute(2, 0, 1, 3), lse_before, out[rows])
        saved.append(lse)
        of_kernels.append((more, more_before))
    return out, saved, of_kernels


def _parts(
    segments: Iterable[tuple[int, int, int, int]],
) -> Iterator[tuple[slice, slice, slice | None]]:
    """Split the keys of each segment in two, for two attention calls. A segment (q0, q1, k0, k1):
    queries q0:q1 see keys k0:k1. Yields slices (queries, own keys, keys before). Own keys are the
    last ones, as many as there are queries, for a causal call. The keys before them are for a call
    without a mask; None if there are none."""
    for q0, q1, k0, k1 in segments:
        own = k1 - (q1 - q0)
        yield slice(q0, q1), slice(own, k1), slice(k0, own) if own > k0 else None


def _cut(
    heads: Sequence[torch.Tensor], rows: slice, keys: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut out the tensors of one attention call, as views: the queries `rows`, the keys `keys` and
    the values `keys`. heads: (q, k, v) or their gradients, each [b, heads, tokens, d]."""
    q, k, v = heads
    return q[:, :, rows], k[:, :, keys], v[:, :, keys]


def join(
    first: torch.Tensor,
    lse1: torch.Tensor,
    second: torch.Tensor,
    lse2: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Combine two attention outputs of the same queries over different keys into the output over
    all of these keys, by their log-sum-exps. It is written to `out` -> the log-sum-exps over all of
    the keys.

    first, second: the two outputs. lse1, lse2: their log-sum-exps. Shapes: first, second, out [q,
    b, n, d]; lse1, lse2 and the result [b, n, q, 1]."""
    if not compiles(first):
        lse = torch.logaddexp(lse1, lse2)
        by1, by2 = ((x - lse).exp().permute(2, 0, 1, 3) for x in (lse1, lse2))
        out.copy_(first * by1 + second * by2)
        return lse
    return fused().join_by_kernel(first, lse1, second, lse2, out)
