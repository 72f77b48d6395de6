"""Cases of gpu_kernels.py: experts, their routers and adapters."""

import functools
import itertools

import torch
import torch.nn.functional as F

from mca_lite import kernels, model_moe, part_lora_layers, part_triton, part_triton_moe
from mca_lite.model_moe import BalancingLosses

from .gpu_kernels import device, drawn

ROWS_OF_EXPERTS = [0, 70, 64, 3, 0, 130]


def expert_cases(dtype):
    """Weight gradients of experts, of which some have no rows, added to what is there."""
    # Triton's interpreter multiplies the bits of bf16 as if they were integers
    if dtype == torch.float32 or (dtype == torch.bfloat16 and device() == "cpu"):
        return
    counts = torch.tensor(ROWS_OF_EXPERTS, device=device())
    ends = counts.cumsum(0).to(torch.int32)
    for n_out, n_in in ((200, 72), (16, 264)):

        def kernel(x, grad, n_out=n_out, n_in=n_in):
            main_grad = torch.ones(len(counts), n_out, n_in, device=device())
            part_triton_moe.add_gradient_of_experts(x.detach(), grad.detach(), ends, main_grad)
            return [main_grad + 0 * (x.sum() + grad.sum())]

        def formula(x, grad):
            parts = zip(grad.split(counts.tolist()), x.split(counts.tolist()), strict=True)
            found = torch.stack([1 + of_out.t() @ of_x for of_out, of_x in parts]).detach()
            return [found + 0 * (x.sum() + grad.sum())]

        total = int(counts.sum())
        inputs = [drawn(total, size, dtype=dtype) for size in (n_in, n_out)]
        yield f"experts {n_out} {n_in}", kernel, formula, inputs


def mixture_cases(dtype):
    """The activation of experts, with the weights of their rows, and the sums of a token's rows."""

    def kernel(both, weights, room=0):
        return (part_triton.SwiGLU.apply(both, weights, room),)

    def formula(both, weights):
        gate, up = both.chunk(2, -1)
        return (F.silu(gate) * up * weights[:, None],)

    # dtypes of weights, inputs that are frozen
    pairs = dict.fromkeys((dtype, torch.float32)), ((), (0,), (1,))
    for f, (of_weights, frozen) in itertools.product((40, 1500, 5000), itertools.product(*pairs)):
        inputs = [drawn(7, 2 * f, dtype=dtype), drawn(7, dtype=of_weights)]
        for number in frozen:
            inputs[number].requires_grad_(False)
        yield f"weighted {f} {of_weights} {frozen=}", kernel, formula, inputs
        in_room = functools.partial(kernel, room=8)
        yield f"weighted {f} {of_weights} {frozen=} in room", in_room, formula, inputs
    for tokens, choices, h in ((5, 8, 2048), (7, 4, 2880), (3, 1, 24), (0, 2, 16)):
        order = torch.randperm(tokens * choices, device=device())
        places = order.view(tokens, choices)

        def sums(rows, places=places):
            found = part_triton_moe.sums_of_rows(rows.detach(), places)
            return [found + 0 * rows.sum()]  # it has no gradient

        def of_choices(rows, places=places):
            return [rows.detach()[places].sum(1) + 0 * rows.sum()]

        for room in (0, 16):

            def copies(rows, places=places, room=room):
                found = part_triton_moe.copies_of_rows(rows.detach(), places.flatten(), room)
                return [found + 0 * rows.sum()]

            def of_index(rows, places=places):
                return [rows.detach()[places.flatten()] + 0 * rows.sum()]

            name = f"copies {tokens} {choices} {room}"
            yield name, copies, of_index, [drawn(len(order), h, dtype=dtype)]
        yield f"sums {tokens} {choices}", sums, of_choices, [drawn(len(order), h, dtype=dtype)]


def route_cases(dtype):
    """The choice of experts, its losses and their gradients."""
    if dtype != torch.float32:
        return
    rules = (
        ("softmax", True, None, None, BalancingLosses("seq_aux_loss", 0.01, 0.001), 128, 8),
        ("softmax", False, 2.5, None, BalancingLosses("aux_loss", 0.01), 6, 2),
        ("softmax", False, None, None, BalancingLosses("none", 0.0, 0.1), 300, 1),
        ("sigmoid", True, 2.5, 1.0, BalancingLosses(), 24, 4),
        ("sigmoid", False, None, None, BalancingLosses("seq_aux_loss", 0.01), 24, 4),
        ("sigmoid", True, None, None, BalancingLosses("aux_loss", 0.01, 0.1), 5, 5),
    )
    for (
        function,
        norm,
        scaling,
        bias,
        losses,
        num,
        k,
    ), b, has_padding, counts in itertools.product(rules, (1, 3), (False, True), (False, True)):
        s = 70
        real = torch.ones(s, b, dtype=torch.bool, device=device())
        if has_padding:
            real[50:, 0] = False
        if bias is not None:
            bias = torch.randn(num, device=device())

        def run(
            route,
            logits,
            real=real if counts else None,
            losses=losses,
            k=k,
            rule=(function, norm, scaling, bias, None, None, "top2", None),
        ):
            weights, experts, found = route(logits, real, losses, None, rule[3] is None, k, *rule)
            results = [weights, experts + 0 * weights]
            if found is not None:
                row, *of_losses = found
                results += [row + 0 * weights.sum(), *(x + 0 * weights.sum() for x in of_losses)]
            return results

        by_kernel = functools.partial(run, functools.partial(part_triton_moe.routed, None))
        name = f"route {function} {norm} {num} {b} {has_padding} {counts}"
        # of numbers far enough apart that float64 chooses the same experts
        order = torch.stack([torch.randperm(num, device=device()) for _ in range(s * b)])
        logits = (order.view(s, b, num) * (8 / num) - 4).requires_grad_()
        yield name, by_kernel, functools.partial(run, model_moe.routed), [logits]


def pass_cases(dtype):
    """A router's choice without gradients, as of a recomputed layer's first pass, to the bit."""
    if dtype != torch.float32:
        return
    real = torch.ones(300, 2, dtype=torch.bool, device=device())
    for function, num, k in (("softmax", 128, 8), ("sigmoid", 60, 4)):
        rule = k, function, True, None, None, None, None, "top2", None
        route = functools.partial(part_triton_moe.routed, None)
        losses = BalancingLosses("seq_aux_loss", 0.01, 0.001)

        def both(logits, rule=rule, route=route, losses=losses):
            first = route(logits.detach(), None, losses, None, True, *rule)[:2]
            second = route(logits, real, losses, None, True, *rule)[:2]
            pairs = zip(first, second, strict=True)
            return [(one != two).float() + 0 * logits.sum() for one, two in pairs]

        logits = drawn(300, 2, num).detach().bfloat16().float().requires_grad_()
        shape = 600, k
        yield (
            f"pass {function}",
            both,
            lambda logits, shape=shape: [logits.new_zeros(shape) + 0 * logits.sum()] * 2,
            [logits],
        )


def order_cases(dtype):
    """Tokens in the order of their experts."""
    if dtype != torch.float32:
        return
    for tokens, num, k in ((700, 128, 8), (50, 5, 3), (1, 300, 1), (0, 8, 2)):
        scores = torch.rand(tokens, num, device=device())
        scores[:, num // 2] = 0  # chosen by no token, if there are others
        chosen = scores.topk(k, -1).indices

        def kernel(x, chosen=chosen, num=num):
            return [y + 0 * x for y in part_triton_moe.sorted_by_expert(chosen, num)]

        def formula(x, chosen=chosen, num=num):
            on_cpu = model_moe.sorted_by_expert(chosen.cpu(), num)
            return [y.to(chosen.device) + 0 * x for y in on_cpu]

        yield f"order {tokens} {num} {k}", kernel, formula, [drawn(1)]


def router_cases(dtype):
    """The logits of a router, from numbers that bf16 can hold; gradients are rounded to bf16."""
    if dtype != torch.bfloat16 or device() == "cpu":  # a CPU's matmul has no other result dtype
        return

    def kernel(x, weight):
        return (part_triton_moe.LogitsOfRouter.apply(x, weight),)

    for frozen in ((), (1,)):
        inputs = [drawn(3, 7, 256, dtype=dtype), drawn(24, 256, dtype=dtype)]
        for number in frozen:
            inputs[number].requires_grad_(False)
        yield f"router {frozen=}", kernel, lambda x, w: (x @ w.t(),), inputs


def adapted_mixture_cases(dtype):
    """Tokens to experts with adapters and back, whose rows have room for the adapters' numbers."""
    if dtype != torch.bfloat16:
        return
    tokens, k, n, r, f, h, scale = 50, 2, 6, 4, 40, 72, 2.0
    spec = part_lora_layers.LoraSpec(rank=r, alpha=scale * r)
    fc1, fc2 = drawn(n, 2, f, h, dtype=dtype, grad=False), drawn(n, h, f, dtype=dtype, grad=False)
    chosen = torch.rand(tokens, n - 1, device=device()).topk(k, -1).indices  # the last gets none
    order, of_rows, places, counts = model_moe.sorted_by_expert(chosen, n)
    ends = counts.cumsum(0).to(torch.int32)
    sizes = dict(gate_A=(r, h), up_A=(r, h), gate_B=(f, r), up_B=(f, r), down_A=(r, f))
    sizes["down_B"] = (h, r)

    def multiply(t, w):
        left, right = (t.t(), w) if w.dim() == 2 else (t, w.transpose(1, 2))
        return F.grouped_mm(left, right, offs=ends)

    def kernel(x, weights, *matrices):
        names = tuple(map(str, range(n)))
        adapter = part_lora_layers.LoraExperts(spec, (names,) * 3, h, f)
        for name, matrix in zip(sizes, matrices, strict=True):
            delattr(adapter, name)
            setattr(adapter, name, matrix)
        room = adapter.room
        assert room == 8
        indices = order, of_rows, places
        rows, of_weights = model_moe.ToExperts.apply(x, weights, *indices, room)
        both = adapter(("gate", "up"), rows, fc1, multiply)
        hidden = kernels.weighted_swiglu(both, of_weights, room)
        assert kernels.compiles(x) == hasattr(rows, "room") == hasattr(hidden, "room")
        out = adapter(("down",), hidden, fc2, multiply)
        return (model_moe.FromExperts.apply(out, of_rows, places, room),)

    def formula(x, weights, a_gate, a_up, b_gate, b_up, a_down, b_down):
        one = fc1.flatten(1, 2) + scale * torch.cat([b_gate @ a_gate, b_up @ a_up], 1)
        two = fc2 + scale * (b_down @ a_down)
        both = torch.einsum("th,tkoh->tko", x, one[chosen])
        gate, up = both.chunk(2, -1)
        hidden = F.silu(gate) * up * weights.unsqueeze(-1)
        return (torch.einsum("tkf,tkhf->th", hidden, two[chosen]),)

    inputs = [drawn(tokens, h, dtype=dtype), drawn(tokens, k, dtype=dtype)]
    yield "mixture", kernel, formula, [*inputs, *(0.1 * drawn(n, *s) for s in sizes.values())]


def bias_cases(dtype):
    """The activation of experts with biases, of which some have no rows."""
    counts = torch.tensor(ROWS_OF_EXPERTS, device=device())
    numbers = torch.arange(len(counts), device=device())
    experts = numbers.repeat_interleave(counts)
    for f, room, frozen in ((40, 0, ()), (2880, 0, ()), (40, 16, (0,)), (40, 16, (1,))):

        def kernel(both, weights, biases, room=room):
            of_expert = (experts[:, None] == numbers).to(both.dtype)
            both = model_moe.ExpertsBias.apply(both, biases, of_expert)
            more = room, biases.detach(), experts, 2.0
            return (part_triton.SwiGLU.apply(both, weights, *more),)

        def formula(both, weights, biases):
            gate, up = (both + biases[experts]).chunk(2, -1)
            gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
            return ((up + 1) * gate * torch.sigmoid(1.702 * gate) * weights[:, None],)

        shapes = (len(experts), 2 * f), (len(experts),), (len(counts), 2 * f)
        # sums of these are exact, so that float64 clamps the same ones
        inputs = [drawn(*s, grad=False).bfloat16().to(dtype) for s in shapes]
        for number, x in enumerate(inputs):
            x.requires_grad_(number not in frozen)
        yield f"biases {f} {room} {frozen=}", kernel, formula, inputs


def adapter_cases(dtype):
    """Adapters of both projections of experts in the experts' grouped matmul."""
    if dtype != torch.bfloat16:
        return
    counts = torch.tensor(ROWS_OF_EXPERTS, device=device())
    ends = counts.cumsum(0).to(torch.int32)
    n, r, f, h, scale = len(counts), 4, 40, 72, 2.0
    spec = part_lora_layers.LoraSpec(rank=r, alpha=scale * r)
    weight = drawn(n, 2, f, h, dtype=dtype, grad=False)

    def multiply(t, w):
        left, right = (t.t(), w) if w.dim() == 2 else (t, w.transpose(1, 2))
        return F.grouped_mm(left, right, offs=ends)

    def kernel(x, *matrices):
        names = tuple(map(str, range(n)))
        adapter = part_lora_layers.LoraExperts(spec, (names, names, ()), h, f)
        for name, matrix in zip(("gate_A", "up_A", "gate_B", "up_B"), matrices, strict=True):
            delattr(adapter, name)
            setattr(adapter, name, matrix)
        x.again = x.detach
        return (adapter(("gate", "up"), x, weight, multiply),)

    def formula(x, a_gate, a_up, b_gate, b_up):
        whole = weight.flatten(1, 2) + scale * torch.cat([b_gate @ a_gate, b_up @ a_up], 1)
        pairs = zip(x.split(ROWS_OF_EXPERTS), whole, strict=True)
        return (torch.cat([part @ of_expert.t() for part, of_expert in pairs]),)

    x = drawn(sum(ROWS_OF_EXPERTS), h, dtype=dtype)
    yield "adapters", kernel, formula, [x, *(drawn(n, *s) for s in [(r, h)] * 2 + [(f, r)] * 2)]


CASES = (
    expert_cases,
    route_cases,
    pass_cases,
    order_cases,
    mixture_cases,
    router_cases,
    bias_cases,
    adapter_cases,
    adapted_mixture_cases,
)
