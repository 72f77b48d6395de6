"""The kernels against the formulas that they stand for, in float64: `make gpu
ARGS=kernels`.

Outputs and gradients, in float32, fp16 and bf16, of odd shapes. Where Triton is installed they run
without a GPU too, by its interpreter: TRITON_INTERPRET=1 python -m tests.tools.gpu_kernels.
"""

import itertools
import sys
import time

import torch
import torch.nn.functional as F

from mca_lite import kernels, loss_tokens
from mca_lite.model_sinks import FlashWithSinks, whole_scores
from mca_lite.kernels_attention import LateAttention

# of the largest number
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}  # of the largest number
NORM_SHAPES = (5, 2, 24), (7, 1, 2560), (301, 1, 16), (3, 1, 6000), (2, 1, 12288), (0, 1, 16)
# groups, queries a group, size of a head, rotary channels, bias, norms, interleaved, zero-centered,
# inputs that are frozen
HEADS = (
    (2, 6, 128, 128, True, False, False, False, ()),
    (8, 4, 128, 128, False, True, False, False, ()),
    (3, 1, 12, 8, True, True, True, False, (1,)),
    (1, 4, 80, 20, True, True, False, True, (2, 3)),
    (5, 3, 6, 6, True, False, True, False, (0,)),
    (1, 2, 256, 256, True, True, False, True, ()),
)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape, dtype=torch.float32, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, device=device()).to(dtype).requires_grad_(grad)


def normed(x, weight, eps: float, zero_centered: bool):
    by = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * by * (1 + weight if zero_centered else weight)


def difference(kernel, formula, inputs: list) -> float:
    """The largest difference of outputs and gradients, of the largest number of each. Inputs that
    need no gradient get none."""
    exact = [x if x is None else x.detach().double() for x in inputs]
    exact = [
        x if x is None else x.requires_grad_(own.requires_grad)
        for x, own in zip(exact, inputs, strict=True)
    ]
    outputs, wanted, worst = kernel(*inputs), formula(*exact), 0.0
    weights = [torch.randn_like(out) for out in outputs]
    has_grad = [x for x in inputs if x is not None and x.requires_grad]
    of_exact = [x for x in exact if x is not None and x.requires_grad]
    got = [*outputs, *torch.autograd.grad(outputs, has_grad, weights)]
    wanted = [*wanted, *torch.autograd.grad(wanted, of_exact, [w.double() for w in weights])]
    for ours, theirs in zip(got, wanted, strict=True):
        if ours.shape != theirs.shape or not ours.isfinite().all():
            return float("inf")
        if not ours.numel():
            continue
        largest = max(float(theirs.abs().max()), 1e-9)
        worst = max(worst, float((ours.double() - theirs).abs().max()) / largest)
    return worst


def norm_cases(dtype):
    for shape, zero, beside, trained in itertools.product(NORM_SHAPES, *[(False, True)] * 3):
        inputs = [drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype, grad=trained)]

        def kernel(x, weight, zero=zero, beside=beside):
            out = kernels.Norm.apply(x, weight, 1e-6, zero, beside)
            return out if beside else (out,)

        def formula(x, weight, zero=zero, beside=beside):
            return (normed(x, weight, 1e-6, zero), x)[: 1 + beside]

        yield f"norm {shape} {zero=} {beside=} {trained=}", kernel, formula, inputs


def heads_cases(dtype):
    s, b = 5, 2
    for groups, queries, d, rotary, bias, norms, interleaved, zero, frozen in HEADS:
        width = groups * (queries + 2) * d
        inputs = [
            drawn(s, b, width, dtype=dtype),
            drawn(width, dtype=dtype) if bias else None,
            *(drawn(d, dtype=dtype) if norms else None for _ in range(2)),
        ]
        for number in frozen:
            inputs[number].requires_grad_(False)
        # of a model with pictures each row of a batch has positions of its own
        positions = torch.randint(0, 9, (s, b)) if norms else torch.arange(s)[:, None]
        angles = (positions[..., None] * torch.linspace(1, 2, rotary // 2)).to(device())
        angles = angles.repeat_interleave(2, 2) if interleaved else angles.repeat(1, 1, 2)
        tables = [table[:, :, None].to(dtype) for table in (angles.cos(), angles.sin())]
        sizes, flags = (groups, d), (1e-6, zero, interleaved)

        def kernel(*inputs, sizes=sizes, tables=tables, flags=flags):
            return kernels.RotatedHeads.apply(*inputs, *tables, *sizes, *flags)

        def formula(mixed, bias, q, k, sizes=sizes, tables=tables, flags=flags):
            eps, zero, interleaved = flags
            query, key, value = kernels.split_heads(mixed, bias, *sizes)
            if q is not None:
                query, key = normed(query, q, eps, zero), normed(key, k, eps, zero)
            turn = (*(table.double() for table in tables), interleaved)
            return kernels.plain_rotation(query, *turn), kernels.plain_rotation(key, *turn), value

        words = f"heads {groups} x {queries} of {d}, {rotary} turn, {bias=} {norms=} {frozen=}"
        yield words, kernel, formula, inputs


def other_cases(dtype):
    def gated(both):
        gate, up = both.chunk(2, -1)
        return (F.silu(gate) * up,)

    def kernel(both):
        return (kernels.SwiGLU.apply(both),)

    yield "SwiGLU", kernel, gated, [drawn(3, 5, 2 * 1500, dtype=dtype)]
    column, columns = torch.tensor([3, 0, 20_008], device=device()), 20_009

    def statistics(logits):
        found = loss_tokens.statistics_in_one_pass(logits.detach(), column, columns)
        return [x + 0 * logits.sum() for x in found]  # it has no gradient

    def formula(logits):
        logits, zero = logits.detach()[:, :columns], 0 * logits.sum()
        top = logits.amax(1)
        total = (logits - top[:, None]).exp().sum(1)
        return [x + zero for x in (top, total, logits.gather(1, column[:, None])[:, 0])]

    yield "statistics of logits", statistics, formula, [drawn(3, columns + 7, dtype=dtype)]
    lse, weights = 10 + torch.rand(3, device=device()), torch.rand(3, device=device())
    for softcap, by in itertools.product((None, 5.0), (None, weights)):

        def probabilities(logits, softcap=softcap, by=by):
            capped = logits.detach().clamp(-4, 4)
            found = loss_tokens.probabilities_in_one_pass(capped, lse, by, columns, softcap)
            return [found + 0 * logits.sum()]

        def formula(logits, softcap=softcap, by=by):
            values, zero = logits.detach().clamp(-4, 4), 0 * logits.sum()
            out = (values - lse[:, None].double()).exp()
            if softcap is not None:
                out = out * (1 - (values / softcap).square())
            out = out if by is None else out * by[:, None].double()
            out[:, columns:] = 0
            return [out + zero]

        words = f"probabilities {softcap=} weighted={by is not None}"
        yield words, probabilities, formula, [drawn(3, columns + 7, dtype=dtype)]


# rows, heads, groups, queries, keys, size of a head
LATE = (1, 12, 2, 1000, 3000, 128), (2, 4, 4, 64, 65, 64), (1, 8, 1, 512, 513, 96)


def attention_cases(dtype):
    if (dtype == torch.float32) == torch.cuda.is_available():
        return  # cuDNN's takes halves, the CPU's float32 as well
    for b, n, groups, queries, keys, d in LATE:
        groups = groups if torch.cuda.is_available() else n
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device()).tril(keys - queries)

        def formula(q, k, v, visible=visible):
            return (F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True),)

        def kernel(q, k, v):
            return (LateAttention.apply(q, k, v, None),)

        shapes = (b, n, queries, d), (b, groups, keys, d), (b, groups, keys, d)
        yield (
            f"late-attention {n} {keys}",
            kernel,
            formula,
            [drawn(*s, dtype=dtype) for s in shapes],
        )


def sinks_cases(dtype):
    """Flash attention with sinks: documents, windows, and queries that are the last ones of their
    document."""
    if device() == "cpu" or dtype == torch.float32:
        return
    lengths = [300, 2, 64, 130]
    cu_k = torch.tensor([0, *lengths], device=device()).cumsum(0).int()
    for window, late in itertools.product((None, 5, 128), (1, 2)):
        cu_q = torch.tensor([0, *(n // late for n in lengths)], device=device()).cumsum(0).int()
        sizes = cu_q, cu_k, 300 // late, 300, None, window

        def kernel(*inputs, sizes=sizes):
            return (FlashWithSinks.apply(*inputs, *sizes),)

        def formula(q, k, v, sinks, sizes=sizes):
            of_queries, of_keys, _, _, _, window = sizes
            pairs = (itertools.pairwise(cu.tolist()) for cu in (of_queries, of_keys))
            out = []
            for (q0, q1), (k0, k1) in zip(*pairs, strict=True):
                more = k1 - k0 - (q1 - q0)
                visible = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=device())
                visible = visible.tril(more)
                if window is not None:
                    visible = visible.triu(more - window + 1)
                row = (x[None].transpose(1, 2) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
                out.append(whole_scores(*row, visible, None, 0.0, sinks=sinks)[0].transpose(0, 1))
            return (torch.cat(out),)

        inputs = [drawn(int(cu_q[-1]), 8, 64, dtype=dtype)]
        inputs += [drawn(int(cu_k[-1]), 2, 64, dtype=dtype) for _ in range(2)]
        yield f"sinks {window=} {late=}", kernel, formula, [*inputs, drawn(8, dtype=dtype)]


def main() -> int:
    torch.manual_seed(0)
    if device() == "cpu":
        kernels.num_programs = lambda device: 3  # it asks the GPU
    start, bad = time.time(), 0
    for dtype, tolerance in TOLERANCE.items():
        worst = {}
        for cases in (norm_cases, heads_cases, other_cases, attention_cases, sinks_cases):
            for name, kernel, formula, inputs in cases(dtype):
                found = difference(kernel, formula, inputs)
                kind = name.split()[0]
                worst[kind] = max(worst.get(kind, 0.0), found)
                if not found <= tolerance:
                    bad += 1
                    print(f"{dtype}: {name}: differs by {found:.1e}, expected {tolerance}")
        print(f"kernels, {dtype}:", ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))
    print(f"kernels: {bad} wrong, {time.time() - start:.0f} s", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
