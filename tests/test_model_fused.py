"""One kernel on a GPU, plain torch on a CPU: the latter against formulas. `make gpu`, part kernels,
compares the kernels."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mca_lite import (
    TrainingArguments,
    kernels,
    model,
    model_layers,
    model_norms,
    part_delta,
    part_triton,
    parts,
)
from tests.shared import tiny, world
from tests.shared.layouts import CP2, FULL, PACKED, PP2, TP2_SP
from tests.shared.training import assert_same_curve, train


def rows(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_equals_its_formula(zero_centered):
    x, weight = rows(5, 2, 24), rows(24)
    scale = 1 + weight if zero_centered else weight
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6, zero_centered), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 6])  # of 8 channels
def test_rotation_turns_each_pair_by_its_angle(interleaved, rotary):
    query, key = rows(5, 2, 4, 8), rows(5, 2, 2, 8)
    angles = torch.outer(torch.arange(5.0), torch.linspace(1, 2, rotary // 2))
    table = angles.repeat_interleave(2, 1) if interleaved else angles.repeat(1, 2)
    turned = kernels.rotate(
        query, key, table.cos()[:, None, None], table.sin()[:, None, None], interleaved
    )
    for x, got in zip((query, key), turned, strict=True):
        if interleaved:
            pairs = torch.view_as_complex(x[..., :rotary].unflatten(-1, (-1, 2)).contiguous())
        else:
            pairs = torch.complex(*x[..., :rotary].chunk(2, -1))
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None, None]
        parts = torch.stack([pairs.real, pairs.imag], -1 if interleaved else -2).flatten(-2)
        torch.testing.assert_close(got, torch.cat([parts, x[..., rotary:]], -1))


def test_heads_are_split_by_groups():
    query, key, value = rows(3, 2, 6, 4), rows(3, 2, 2, 4) + 10, rows(3, 2, 2, 4) - 10
    by_group = [query.unflatten(2, (2, 3)), key[:, :, :, None], value[:, :, :, None]]
    mixed = torch.cat(by_group, 3).flatten(2)
    got = kernels.split_heads(mixed, 2, 4)
    for x, expected in zip(got, (query, key, value), strict=True):
        torch.testing.assert_close(x, expected)
        assert x.is_contiguous()


def test_swiglu_is_silu_of_the_first_half_times_the_second():
    gate, up, weights = rows(7, 10), rows(7, 10) + 1, torch.rand(7)
    both = torch.cat([gate, up], -1)
    torch.testing.assert_close(kernels.swiglu(both), F.silu(gate) * up)
    expected = F.silu(gate) * up * weights[:, None]
    torch.testing.assert_close(kernels.weighted_swiglu(both, weights), expected)


def test_the_weights_of_experts_are_float32_and_their_product_is_rounded_once():
    both, weights = rows(64, 32, dtype=torch.bfloat16), torch.rand(64)
    product = kernels.swiglu(both).float() * weights[:, None]
    got = kernels.weighted_swiglu(both, weights)
    assert got.dtype == torch.bfloat16 and torch.equal(got, product.bfloat16())


@pytest.fixture
def switched_back():
    """The switch of torch_compile as it is without the key, after a test."""
    yield
    kernels.switch(None)


@pytest.mark.usefixtures("switched_back")
def test_torch_compile_true_warns_where_there_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = TrainingArguments(output_dir=str(tmp_path), torch_compile=True)
    with pytest.warns(UserWarning, match="there is no GPU"):
        kernels.switch(args.torch_compile)


@pytest.mark.usefixtures("switched_back")
@pytest.mark.parametrize(("asked", "runs_compiled"), [(None, True), (True, True), (False, False)])
def test_torch_compile_switches_what_runs_on_a_gpu(asked, runs_compiled, monkeypatch):
    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "works", lambda *words: True)
    kernels.switch(asked)
    assert kernels.compiles(OnGpu()) is runs_compiled


def test_a_machine_without_a_compiler_says_so_once_and_runs_uncompiled(monkeypatch):
    class OnGpu:
        is_cuda = True

    def fails(*args, **kwargs):
        raise RuntimeError("no C compiler\nand a long trace")

    monkeypatch.setattr(torch, "ones", fails)  # of the kernel that is tried
    monkeypatch.setattr(kernels, "triton", "there")
    kernels.works.cache_clear()
    with pytest.warns(UserWarning, match=r"can be compiled here \(no C compiler\)") as said:
        assert not kernels.compiles(OnGpu())
        assert not kernels.compiles(OnGpu())
    kernels.works.cache_clear()
    assert len(said) == 1
    monkeypatch.setattr(kernels, "triton", None)
    assert kernels.why_no_kernels() == "Triton cannot be imported"


def test_a_package_without_its_kernels_says_which_file_to_copy(monkeypatch):
    gone = {"triton": {"triton": "part_triton.py"}}
    monkeypatch.setattr(parts, "missing", lambda: gone)
    monkeypatch.setattr(kernels, "triton", "there")
    parts.module_of.cache_clear()
    assert kernels.why_no_kernels() == (
        f"it needs part triton, and part_triton.py is not in {Path(parts.__file__).parent}: copy "
        "triton's files from mca_lite"
    )
    parts.module_of.cache_clear()


def test_where_torch_compile_alone_does_not_work_functions_run_as_they_are(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("Python 3.99 is not supported")

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(kernels, "compiles", lambda x: True)
    kernels.works.cache_clear()
    x, table = rows(5, 2, 4, 8), rows(5, 1, 1, 8)
    with pytest.warns(UserWarning, match=r"does not work here \(Python 3.99"):
        got = kernels.rotate(x, x, table, table)
    kernels.works.cache_clear()
    torch.testing.assert_close(got[0], kernels.plain_rotation(x, table, table, False))


def cannot_be_compiled(graph, inputs):
    """A compiler that fails as torch 2.11's did on the convolution of gated delta nets."""
    from torch._inductor.exc import InductorError

    raise InductorError(AssertionError("1533 v.s. 1534\nand a long trace"), None)


@pytest.fixture
def compiler(monkeypatch):
    """A function that puts compilers of forward and backward passes in place of torch's, which
    compile what runs on a CPU here."""
    from torch._dynamo.backends.common import aot_autograd

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # set while megatron is imported on a CPU
    monkeypatch.setattr(kernels, "compiles", lambda x: True)
    monkeypatch.setattr(kernels, "works", lambda *words: True)

    def replace(**compilers):
        monkeypatch.setattr(torch._inductor, "compile", aot_autograd(**compilers))

    yield replace
    torch.compiler.reset()


def as_it_is(graph, inputs):
    return graph


def half_of_sum(x, weight):
    return (x * weight).sum() / 2


@pytest.mark.parametrize("failing", ["fw_compiler", "bw_compiler"])
def test_a_function_that_cannot_be_compiled_runs_as_it_is_and_says_so_once(compiler, failing):
    compiler(**{"fw_compiler": as_it_is, "bw_compiler": as_it_is, failing: cannot_be_compiled})
    half = kernels.compiled(half_of_sum)
    words = (
        r"fails for half_of_sum \(AssertionError: 1533 v.s. 1534\): it runs as single operations"
    )
    with pytest.warns(UserWarning, match=words) as said:
        for length in (3, 5):
            x, weight = rows(length, 2).requires_grad_(), rows(2).requires_grad_()
            half(x, weight).backward()
            torch.testing.assert_close(weight.grad, x.detach().sum(0) / 2)
    assert len(said) == 1 and "\n" not in str(said[0].message)


@pytest.mark.filterwarnings("error")
def test_a_wrong_argument_is_no_fault_of_the_compiler(compiler):
    compiled = []
    compiler(fw_compiler=lambda graph, inputs: compiled.append(graph) or graph)
    half = kernels.compiled(half_of_sum)
    with pytest.raises(RuntimeError, match=r"^The size of tensor a \(2\)"):
        half(rows(3, 2), rows(3))
    assert half(rows(3, 2), rows(2)) == half_of_sum(rows(3, 2), rows(2))
    assert len(compiled) == 1


# the functions of `compiled` whose backward pass is compiled too: inputs with a gradient, others
WITH_GRADIENTS = {
    part_delta.causal_convolution: ((rows(11, 2, 3), rows(3, 4)), (torch.arange(11) // 4,)),
    kernels.rotate: ((rows(11, 2, 4, 8), rows(11, 2, 2, 8)), (rows(11, 1, 1, 6),) * 2),
}


class Sums(TorchDispatchMode):
    """Notes the shape of each tensor that is summed."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.sum:
            self.shapes.add(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", WITH_GRADIENTS, ids=lambda function: function.__name__)
def test_compiled_functions_have_no_sums_of_unequal_length(function):
    """torch's compiler joins the sums of a graph, and asserts that they are of one length."""
    trained, others = WITH_GRADIENTS[function]
    trained = [x.clone().requires_grad_() for x in trained]
    out = function(*trained, *others)
    out = out if isinstance(out, tuple) else (out,)
    with Sums() as sums:
        torch.autograd.grad(out, trained, [torch.ones_like(x) for x in out])
    assert len(sums.shapes) <= 1


# -- a norm whose input is used beside it


def train_both_ways(path: str, out: str, **keys) -> list:
    """Curves with layers as they run on a CPU and on a GPU; how often a norm had something beside;
    whether each loss was told where labels are."""
    calls, told, beside, losses = [], [], kernels.norm_beside, model.token_losses

    def noted(*args, **more):
        told.append(args[-1] is not None)
        return losses(*args, **more)

    def counted(*args):
        calls.append(args)
        return beside(*args)

    model.token_losses = noted
    plain = train(path, f"{out}/plain", **keys)
    model_layers.compiles, model_norms.norm_beside = lambda x: True, counted
    return [plain, train(path, f"{out}/beside", **keys), len(calls), told]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize(
    "keys",
    [
        TP2_SP,
        {**PP2, **FULL},
        dict(recompute_granularity="selective", recompute_modules=["mlp"], **CP2, **PACKED),
    ],
    ids=["tp2_sp", "pp2 recomputed", "packed cp2, mlp recomputed"],
)
def test_layers_train_as_ever_where_norms_take_what_goes_past_them(family, keys, tmp_path):
    path = tiny.save_model(tmp_path / "model", family)
    plain, beside, calls, told = world.run(train_both_ways, 2, path, str(tmp_path), **keys)[-1]
    assert_same_curve(beside, plain, 1e-5)
    assert calls
    assert told
    assert all(told)  # else the loss waits for the device


def parts_called(path: str, out: str) -> list[str]:
    """Names of the functions of heads that a step calls."""
    from mca_lite import model_attention

    calls = []
    for name in ("rotated_heads", "split_heads", "rotate"):
        function = getattr(model_attention, name)

        def noted(*args, name=name, function=function):
            calls.append(name)
            return function(*args)

        setattr(model_attention, name, noted)
    train(path, out, steps=2)
    return sorted(set(calls))


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", ["rotated_heads"]),
        ("qwen2", ["rotated_heads"]),  # a bias
        ("qwen3", ["rotated_heads"]),  # norms of single heads
        ("olmo2", ["rotate", "split_heads"]),  # norms over all heads
    ],
)
def test_heads_are_split_normed_and_rotated_at_once(family, wanted, tmp_path):
    path = tiny.save_model(tmp_path / "model", family)
    assert world.run(parts_called, 1, path, str(tmp_path / "out"))[0] == wanted


def test_loops_of_wide_rows_ask_for_no_more_memory_than_small_gpus_have():
    of_rows = {width: part_triton.iterations_at_once(3 * width * 4) for width in (2048, 4096, 8192)}
    assert of_rows == {2048: 3, 4096: 3, 8192: 1}  # float32; two of three iterations wait
