"""Adapters that are added in the product of a frozen linear in half precision."""

import pytest
import torch
import torch.nn.functional as F

from mca_lite.part_lora_layers import COLUMN, ROW, LoraAdapter, LoraExperts, LoraSpec, attach
from tests.shared import tiny, tiny_moe, world
from tests.shared.files import assert_same_tensors
from tests.shared.layouts import PACKED, SP, TP2
from tests.shared.lora_tools import EVERYTHING, train_from_adapter, train_with_peft
from tests.shared.lora_tools import adapter_of as saved
from tests.shared.training import BRIEF, assert_same_curve

NAMES = {"all": (("q",), ("k",), ("v",)), "some": (("q",), (), ("v",)), "one": (("q",),)}


def adapter_of_linear(names, groups, spec=None):
    """An adapter of a linear 12 -> 8 + 4 + 4 (one projection: 8), no matrix of it zero."""
    widths = (8, 4, 4)[: len(names)]
    adapter = LoraAdapter(spec or LoraSpec(rank=3, alpha=6), names, 12, widths, groups=groups)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return adapter, sum(widths)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("groups", [None, 2])
def test_one_product_equals_the_sum_of_two(names, groups):
    adapter, out = adapter_of_linear(names, groups)
    x, weight = torch.randn(5, 2, 12, requires_grad=True), torch.randn(out, 12)
    grad, tensors = torch.randn(5, 2, out), [x, *adapter.parameters()]
    expected = F.linear(x, weight) + adapter(x)
    got = adapter(x, weight)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(got, tensors, grad),
        torch.autograd.grad(expected, tensors, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


class Linear(torch.nn.Linear):
    """With the seam of tensor-parallel linears."""

    def product(self, x, weight):
        return F.linear(x, weight)

    def forward(self, x):
        return self.product(x, self.weight)


@torch.no_grad()
def test_an_update_below_the_last_digit_of_the_output_is_there_on_average():
    """Added to an output that is rounded to bf16 already, it would vanish."""
    torch.manual_seed(0)
    linear = Linear(256, 384, dtype=torch.bfloat16).requires_grad_(False)
    adapter = LoraAdapter(LoraSpec(rank=1, alpha=1), (("q",),), 256, (384,))
    x = torch.randn(512, 256).bfloat16()
    base = linear(x).float()
    attach(linear, adapter)
    adapter.lora_A.normal_()
    adapter.lora_B_0.fill_(2.0**-16)
    small = (adapter(x).sign() * (linear(x).float() - base)).mean()
    wanted = adapter(x).abs().mean()
    assert wanted < base.abs().mean() / 1000
    assert small == pytest.approx(float(wanted), rel=0.1)
    lost = (adapter(x).sign() * ((base + adapter(x)).bfloat16().float() - base)).mean()
    assert lost < 0.5 * wanted


@pytest.mark.parametrize("why", ["float32", "dropout", "trained", "switched off"])
def test_the_sum_is_made_afterwards_where_the_product_cannot_take_it(why):
    dtype = torch.float32 if why == "float32" else torch.bfloat16
    linear = Linear(12, 8, dtype=dtype).requires_grad_(why == "trained")
    spec = LoraSpec(rank=3, alpha=6, dropout=0.5 if why == "dropout" else 0.0)
    adapter, _ = adapter_of_linear(NAMES["one"], None, spec)
    x = torch.randn(4, 12).to(dtype)
    base = linear(x)
    attach(linear, adapter)
    if why == "switched off":
        adapter.enabled = False
        assert torch.equal(linear(x), base)
        return
    assert not adapter.adds_in_product(linear.weight)
    torch.manual_seed(1)
    got = linear(x)
    torch.manual_seed(1)
    assert torch.equal(got, (base + adapter(x)).to(dtype))


@torch.no_grad()
def test_a_weight_that_is_replaced_after_a_product_is_the_one_of_the_next():
    one, other = (
        Linear(12, 8, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in "ab"
    )
    for linear in (one, other):
        attach(linear, adapter_of_linear(NAMES["one"], None)[0])
    x = torch.randn(5, 12).bfloat16()
    one(x)  # moves the weight into the memory that has room for B beside it
    one.weight.data = other.weight.data.clone()
    assert torch.equal(one(x), other(x))


def experts_of(names, dtype):
    """(adapter of three experts, 8 -> 2 * 6 or 6 -> 8, no matrix zero; fc1 and fc2, frozen)."""
    generator = torch.Generator().manual_seed(0)
    names = tuple(tuple(f"{name}.{i}" for i in range(3)) if name else () for name in names)
    adapter = LoraExperts(LoraSpec(rank=3, alpha=6), names, 8, 6)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    shapes = ((3, 2, 6, 8), (3, 8, 6))
    return adapter, *(
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype), requires_grad=False)
        for shape in shapes
    )


def one_by_one(t, w):
    parts = t.split((4, 0, 5))
    if w.dim() == 2:
        return torch.stack([a.mT @ b for a, b in zip(parts, w.split((4, 0, 5)), strict=True)])
    return torch.cat([F.linear(part, of) for part, of in zip(parts, w, strict=True)])


@pytest.mark.parametrize(
    "names", [("gate", "up", "down"), ("gate", "", ""), ("", "up", "down")], ids="-".join
)
def test_products_of_experts_equal_the_sums_of_two(names, monkeypatch):
    adapter, fc1, fc2 = experts_of(names, torch.float32)
    x, scale, trained = torch.randn(9, 8, requires_grad=True), 2.0, [*adapter.parameters()]

    def through(projections, t, weight):
        return adapter(projections, t, weight, one_by_one)

    def by_matrices(projections, t, weight):
        of_each = weight.unflatten(1, (1, -1)) if weight.dim() == 3 else weight
        whole = [
            of_each[:, i] + scale * getattr(adapter, f"{p}_B") @ getattr(adapter, f"{p}_A")
            if p in names
            else of_each[:, i]
            for i, p in enumerate(projections)
        ]
        return one_by_one(t, torch.cat(whole, 1))

    def with_room(rows):
        """The same rows, with columns beside them in memory."""
        wide = torch.cat([rows.detach(), torch.full((len(rows), 8), torch.nan)], 1)
        rows = wide[:, :-8].data
        rows.room = wide
        return rows

    def outcome(of, room=False):
        saved = []
        if room:
            x.room = with_room(x).room
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            hidden = of(("gate", "up"), x, fc1)
        activated = hidden[:, :6] * hidden[:, 6:]
        if room:
            hidden.register_hook(with_room)
            activated.room = with_room(activated).room
        activated.again = activated.detach  # as of experts' activations
        out = of(("down",), activated, fc2)
        grads = torch.autograd.grad(out.square().mean(), [x, *trained])
        return [out, *grads], any(t.data_ptr() == x.data_ptr() for t in saved)

    (wanted, _), (afterwards, _) = outcome(by_matrices), outcome(through)
    monkeypatch.setattr(LoraExperts, "adds_in_product", lambda self, weight: True)
    saving, keeps_x = outcome(through)
    x.again = x.detach
    computing, keeps_x_too = outcome(through)
    in_room, _ = outcome(through, room=True)
    for a, b in zip(computing, in_room, strict=True):
        assert torch.equal(a, b)
    is_adapted = names[0] or names[1]
    assert (keeps_x, keeps_x_too) == (bool(is_adapted), False)
    for a, *others in zip(wanted, afterwards, saving, computing, strict=True):
        for other in others:
            torch.testing.assert_close(other, a, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_small_update_of_experts_is_there_on_average():
    adapter, _, fc2 = experts_of(("", "", "down"), torch.bfloat16)
    adapter.down_B.fill_(2.0**-16)
    x = torch.randn(3 * 8192, 6).bfloat16()

    def by_expert(t, w):
        return torch.einsum("ntk,nok->nto", t.unflatten(0, (3, -1)), w).flatten(0, 1)

    base, got = (of.float() for of in (by_expert(x, fc2), adapter(("down",), x, fc2, by_expert)))
    scale = 2.0  # alpha / rank
    small = scale * by_expert(by_expert(x.float(), adapter.down_A), adapter.down_B)
    arrived, wanted = (small.sign() * (got - base)).mean(), small.abs().mean()
    assert arrived == pytest.approx(float(wanted), rel=0.2)
    assert (small.sign() * ((base + small).bfloat16().float() - base)).mean() < 0.5 * wanted


def test_gradients_are_of_the_forward_pass_s_adapters_whatever_ran_between():
    adapter, _, fc2 = experts_of(("", "", "down"), torch.bfloat16)
    trained, x = [*adapter.parameters()], torch.randn(9, 6).bfloat16().requires_grad_()

    def gradients(factor):
        out = adapter(("down",), x, fc2, one_by_one)
        for parameter in trained if factor else ():
            parameter.data.mul_(factor)  # as of a reference's or averaged adapters
        if factor:
            adapter(("down",), x.detach(), fc2, one_by_one)
        for parameter in trained if factor else ():
            parameter.data.div_(factor)
        return torch.autograd.grad(out.float().square().sum(), [x, *trained])

    assert all(map(torch.equal, gradients(0), gradients(2)))


def test_gradients_are_added_to_the_buffers_of_ddp_where_it_made_some():
    adapter, fc1, _ = experts_of(("gate", "up", ""), torch.bfloat16)
    linear, out = adapter_of_linear(NAMES["some"], 2)
    weight = torch.randn(out, 12).bfloat16()
    t, x = torch.randn(9, 8).bfloat16(), torch.randn(5, 12).bfloat16()

    def losses():
        both = adapter(("gate", "up"), t, fc1, one_by_one), linear(x, weight)
        return sum(out.float().square().sum() for out in both)

    b = [p for of in (adapter, linear) for name, p in of.named_parameters() if name != "lora_A"]
    wanted = torch.autograd.grad(losses(), b)
    for parameter in b:
        parameter.main_grad = torch.zeros_like(parameter)
    for _ in range(2):
        losses().backward()
    for parameter, gradient in zip(b, wanted, strict=True):
        assert parameter.grad_added_to_main_grad, "DDP's hook adds nothing then"
        assert torch.equal(parameter.main_grad, 2 * gradient)


def check_gradients_of_adapted_experts(path, folder) -> int:
    """Compare gradients by grouped matmuls with those of one expert after another, of an MoE
    layer's input and of the adapters of its experts, in bf16, after these have changed once -> the
    number of gradients."""
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.part_lora import inject

    args = TrainingArguments(output_dir=folder, bf16=True)
    model = AutoModel.from_pretrained(path, args)
    inject(model, LoraSpec(rank=3, alpha=6, targets=("gate_proj", "up_proj", "down_proj")))
    layer, found = model[0].decoder.layers[0].mlp, {}
    parameters = [*layer.experts.lora.parameters()]
    for is_grouped in (True, False):
        model.config.moe_grouped_gemm = is_grouped
        torch.manual_seed(0)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
                parameter.data.normal_(std=0.3)  # as optimizers do: its version stays
            x = torch.randn(9, 1, model.config.hidden_size).bfloat16().requires_grad_()
            layer(x)[0].float().square().sum().backward()
        found[is_grouped] = [x.grad, *(parameter.grad for parameter in parameters)]
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
    return len(found[True])


@pytest.mark.parametrize("columns", [16, 12, 9])
def test_gradients_of_experts_are_the_same_one_by_one(columns, tmp_path):
    """With 12 columns B stands beside W where no grouped matmul can read it, with 9 no weight can
    be read by one."""
    keys = dict(num_hidden_layers=1, moe_intermediate_size=columns)
    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe", **keys)
    assert world.run(check_gradients_of_adapted_experts, 1, path, str(tmp_path / "run")) == [7]


# -- linears that tensor parallelism cuts -----------------------------------------------------


@pytest.fixture(scope="module")
def peft(tmp_path_factory):
    """(model folder, folder of peft's adapters, its curve)."""
    folder = tmp_path_factory.mktemp("peft")
    path = tiny.save_model(folder / "model", "qwen2")
    targets = [name for name in EVERYTHING if name != "embed_tokens"]
    [curve] = world.run(train_with_peft, 1, path, str(folder), targets=targets)
    return path, folder, curve


def train_by_products(*args, **keys) -> tuple[list, int]:
    """(the curve of train_from_adapter whose adapters are all added in products, also in float32,
    which shows each error; products)."""
    products, forward = [], LoraAdapter.forward

    def counted(self, x, *weight):
        if weight:
            products.append(self)
        return forward(self, x, *weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoraAdapter, "forward", counted)
        patch.setattr(LoraAdapter, "adds_in_product", lambda self, weight: self.enabled)
        return train_from_adapter(*args, **keys), len(products)


@pytest.mark.parametrize(
    "keys", [TP2, {**TP2, **SP}, {**TP2, **SP, **PACKED}], ids=["tp2", "tp2_sp", "tp2_sp_packed"]
)
def test_products_of_cut_linears_train_as_with_peft(keys, peft, tmp_path):
    path, folder, curve = peft
    start, keys = str(folder / "start"), {**BRIEF, **keys}
    for got, products in world.run(train_by_products, 2, path, str(tmp_path), start, **keys):
        assert products
        assert_same_curve(got, curve)
    assert_same_tensors(saved(tmp_path), saved(folder / "end"))


@torch.no_grad()
def shares_that_arrive(path, folder) -> dict:
    """{linear: (the share of a small update that is in its bf16 output on average, the share if the
    sum were made afterwards)} of a column-cut and a row-cut one."""
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.part_lora import inject

    args = TrainingArguments(output_dir=folder, bf16=True, **TP2)
    model = AutoModel.from_pretrained(path, args)
    inject(model, LoraSpec(rank=1, alpha=1))
    mlp, shares = model[0].decoder.layers[0].mlp, {}
    for linear in (mlp.linear_fc1, mlp.linear_fc2):
        torch.manual_seed(0)
        linear.weight.normal_()
        x = torch.randn(4096, 1, linear.weight.shape[1]).bfloat16()
        for name, parameter in linear.lora.named_parameters():
            parameter.normal_() if "lora_A" in name else parameter.fill_(2.0**-14)
        linear.lora.enabled = False
        base = linear(x)[0].float()
        linear.lora.enabled = True
        small, arrived = linear.lora(x), linear(x)[0].float() - base
        added = (base + small).bfloat16().float() - base
        shares[linear.lora.cut] = tuple(
            float((small.sign() * part).mean() / small.abs().mean()) for part in (arrived, added)
        )
    return shares


def test_small_updates_of_cut_linears_are_there_on_average(peft, tmp_path):
    for shares in world.run(shares_that_arrive, 2, peft[0], str(tmp_path)):
        assert sorted(shares) == [COLUMN, ROW]
        for arrived, added in shares.values():
            assert arrived == pytest.approx(1, rel=0.1)
            assert added < 0.5
