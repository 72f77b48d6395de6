"""Attention of segments, as context parallelism has them: the last query sees the last of more keys
than there are queries.

torch's kernels for that shape on Hopper GPUs are half as fast as cuDNN's, which knows squares and
full rectangles alone. So the keys are taken in two parts, a rectangle of those before the first
query and a causal square, and joined by their log-sum-exps, as in ring attention (Liu et al. 2023,
"Ring Attention with Blockwise Transformers for Near-Infinite Context").
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from .kernels import compiles, first_line, fused, works

# elements of queries from which a call of cuDNN's costs the host less than it saves the GPU
_FRONTEND_FROM = 2**23
_NO_FRONTEND = (
    "nvidia-cudnn-frontend cannot be used: {}. Packed rows train with torch's flash attention, "
    "which is slower on this GPU: pip install -U nvidia-cudnn-frontend, or uninstall it"
)
_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def suits_cudnn(q, k, v) -> bool:
    """True if cuDNN's attention takes them: half precision on CUDA, sizes of heads it knows; not
    with deterministic algorithms."""
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

    if not q.is_cuda or torch.are_deterministic_algorithms_enabled():
        return False
    is_one_size = q.shape[-1] == v.shape[-1]
    return is_one_size and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, True))


def _forward(q, k, v, is_causal: bool, scale: float | None) -> tuple:
    """(out [b, n, q, d], log-sum-exps float32 [b, n, q, 1], more for _backward)."""
    if not q.is_cuda:
        out, lse = _CPU(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse.unsqueeze(-1), ()
    out, lse, *more, _ = _CUDNN(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return out, lse.view(*q.shape[:3], 1), tuple(more)


def _backward(grad, q, k, v, out, lse, more, is_causal: bool, scale: float | None):
    """Gradients of q, k and v, with out and lse of all keys."""
    if not q.is_cuda:
        return _CPU_BACKWARD(grad, q, k, v, out, lse.squeeze(-1), 0.0, is_causal, scale=scale)
    cum_q, cum_k, max_q, max_k, seed, offset = more
    of_random = seed, offset, None
    sizes = cum_q, cum_k, max_q, max_k
    return _CUDNN_BACKWARD(grad, q, k, v, out, lse, *of_random, *sizes, 0.0, is_causal, scale=scale)


def causal_by_cudnn(q, k, v, scale: float | None) -> torch.Tensor:
    """softmax(q k^T scale) v, causal, of as many queries as keys: the call that torch's
    scaled_dot_product_attention makes, without its choice of a kernel.

    q [b, n, s, d], k and v [b, g, s, d], n a multiple of g -> [b, n, s, d]. See suits_cudnn.
    """
    return _CUDNN(q, k, v, None, torch.is_grad_enabled(), 0.0, True, False, scale=scale)[0]


@functools.cache
def has_frontend(device: torch.device) -> bool:
    """True if nvidia-cudnn-frontend is installed, and the GPU a Hopper, where it was measured."""
    is_installed = importlib.util.find_spec("cudnn") is not None
    return is_installed and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def why_no_frontend() -> str | None:
    """The first line of the error of nvidia-cudnn-frontend's import; None if it works."""
    try:
        import cudnn.sdpa.fwd.torch_op  # noqa: F401  it registers torch.ops.cudnn
    except Exception as error:  # a broken installation raises more than ImportError
        return first_line(error)
    return None


def suits_frontend(q) -> bool:
    """True if cuDNN's attention of packed rows takes queries [t, n, d]: many, in half precision,
    where has_frontend(); not with deterministic algorithms."""
    if not q.is_cuda or q.numel() < _FRONTEND_FROM or q.dtype == torch.float32:
        return False
    if torch.are_deterministic_algorithms_enabled() or not has_frontend(q.device):
        return False
    return works(why_no_frontend, _NO_FRONTEND)


def packed_by_cudnn(q, k, v, layout, scale: float | None, window: int | None) -> torch.Tensor:
    """softmax(q k^T scale) v of a packed row in order, causal, in a window of tokens or None.

    q [t, n, d], k [t, g, d], v [t, g, e] -> [t, n, e]. layout: the row's RowLayout. torch's own
    call of this kernel builds its graph again each time, and its gradients are wrong (2.11).
    """
    borders, longest = layout.varlen_of_graph
    out, _ = torch.ops.cudnn.sdpa_fwd(
        q,
        k,
        v,
        scale or q.shape[-1] ** -0.5,
        is_causal=True,
        window_left=window or -1,
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return out


# of a context: called with a kernel and its arguments, they give its result (part_long)
keepers: list[Callable] = []


class SegmentAttention(torch.autograd.Function):
    """softmax(q k^T scale) v in segments (q0, q1, k0, k1): queries q0:q1 see the keys k0:k1 alone,
    the last query all of them, each one before it one less.

    q [t, b, n, d], k and v [T, b, g, d], n a multiple of g (on a CPU g) -> [t, b, n * d]. Each
    query is in one segment.
    """

    @staticmethod
    def forward(ctx, q, k, v, segments, scale: float | None):
        run = functools.partial(keepers[-1], _attended) if keepers else _attended
        out, saved, ctx.more = run(q, k, v, segments, scale)
        ctx.save_for_backward(q, k, v, out, *saved)
        ctx.segments = segments
        ctx.scale = scale
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
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


def _attended(q, k, v, segments, scale: float | None) -> tuple[torch.Tensor, list, list]:
    """(out [t, b, n, d], log-sum-exps and more for _backward of each segment)."""
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


def _parts(segments):
    """(slice of queries, slice of as many keys, slice of the keys before these or None) of each
    segment."""
    for q0, q1, k0, k1 in segments:
        own = k1 - (q1 - q0)
        yield slice(q0, q1), slice(own, k1), slice(k0, own) if own > k0 else None


def _cut(heads, rows: slice, keys: slice) -> list[torch.Tensor]:
    """Rows of queries and of keys and values [b, heads, tokens, d]."""
    q, k, v = heads
    return [q[:, :, rows], k[:, :, keys], v[:, :, keys]]


def join(first, lse1, second, lse2, out) -> torch.Tensor:
    """Put softmax's product of two runs of keys together, in `out` -> the log-sum-exps of both.

    first, second, out: [q, b, n, d]; lse1, lse2 and what is given: float32 [b, n, q, 1].
    """
    if not compiles(first):
        lse = torch.logaddexp(lse1, lse2)
        by1, by2 = ((x - lse).exp().permute(2, 0, 1, 3) for x in (lse1, lse2))
        out.copy_(first * by1 + second * by2)
        return lse
    return fused().join_by_kernel(first, lse1, second, lse2, out)
