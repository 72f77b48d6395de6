"""The table of patches: each has a reason, none is in force where CUDA is there, and none harms
other libraries.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import transformers

from mca_lite import cpu, parallel  # noqa: F401 - parallel applies the patches

FOLDER = os.path.dirname(cpu.__file__)
without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the patches are not in force where CUDA is there"
)


@pytest.fixture
def fresh_cpu():
    """cpu.py as a module that has applied nothing yet."""
    spec = importlib.util.spec_from_file_location("fresh_cpu_for_test", cpu.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@without_cuda
def test_every_patch_is_in_force_and_has_a_reason_of_its_own_words():
    rows = cpu.apply()
    assert len(rows) > 30
    for owner, attribute, replacement, reason in rows:
        name = f"{getattr(owner, '__name__', owner)}.{attribute}"
        assert isinstance(reason, str) and len(reason.split()) >= 5, name
        assert getattr(owner, attribute) is (
            replacement.__func__ if isinstance(replacement, staticmethod) else replacement
        ), name
    names = [(id(owner), attribute) for owner, attribute, *_ in rows]
    assert len(names) == len(set(names))


def test_functions_that_megatron_decorates_are_compiled_when_they_are_called(monkeypatch):
    compiled = []

    def compile(function, **options):
        compiled.append((function.__name__, options))
        return lambda x: function(x) + 1

    monkeypatch.setattr(torch, "compile", compile)
    with cpu.compiling_later():

        @torch.compile
        def twice(x):
            return 2 * x

        @torch.compile(dynamic=True)
        def half(x):
            return x / 2

    assert torch.compile is compile and not compiled
    assert [twice(1), twice(2), half(4)] == [3, 5, 3]
    assert compiled == [("twice", {}), ("half", {"dynamic": True})]
    assert twice.__name__ == "twice"


def run(script: str) -> None:
    """A script in a process of its own, in which torch compiles."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "0"},
    )
    assert done.returncode == 0, done.stderr


LATER = """
import sys
import torch

sys.path.append({folder!r})
import cpu

with cpu.compiling_later():
    import torch.distributed.tensor
    assert "sympy" not in sys.modules
    if {compiler!r}:
        import torch._dynamo
        assert "sympy" in sys.modules
print(torch.fx.experimental.symbolic_shapes.__file__ if {compiler!r} else "")
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.fx.experimental.symbolic_shapes import statically_known_true

store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
y = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
if not {compiler!r}:
    from torch.distributed.tensor._ops import _tensor_ops
    _tensor_ops.statically_known_true(True)  # it imports the module, which takes its place
from torch.distributed.tensor import _decompositions
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
assert _decompositions.GuardOnDataDependentSymNode is GuardOnDataDependentSymNode
assert torch.cat([x @ y, x]).view(2, 16).full_tensor().sum() == 80
twice = torch.compile(lambda x: 2 * x.sin(), backend="eager", dynamic=True)
assert torch.equal(twice(torch.ones(2)), 2 * torch.ones(2).sin())
assert statically_known_true.__module__ == "torch.fx.experimental.symbolic_shapes"
"""


@pytest.mark.parametrize("compiler", [False, True], ids=["without", "with its compiler"])
def test_torchs_distributed_tensors_work_when_they_came_before_sympy(compiler):
    run(LATER.format(folder=FOLDER, compiler=compiler))


OPTIMIZER = """
import sys
import torch

sys.path.append({folder!r})
import cpu

patched = lambda self, set_to_none=True: None
original, torch.optim.Optimizer.zero_grad = torch.optim.Optimizer.zero_grad, patched
with cpu.compiling_later():
    import megatron.core
names = [name for owner, name, *_ in cpu.cuda_rows() if owner is torch.optim.Optimizer]
assert "state_dict" in names and "zero_grad" not in names, "a host program's own stays"
torch.optim.Optimizer.zero_grad = original
for owner, name, replacement, _ in cpu.cuda_rows():
    if owner is torch.optim.Optimizer:
        setattr(owner, name, replacement)

class Still(torch.optim.Optimizer):
    def step(self, closure=None):
        pass

with cpu.compiling_later():

    @torch.library.custom_op("test_cpu::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)

assert torch.equal(twice(torch.ones(2)), 2 * torch.ones(2))
weight = torch.nn.Parameter(torch.ones(2))
still = Still([weight], dict(lr=1.0))
still.load_state_dict(still.state_dict())
weight.sum().backward()
still.step()
still.zero_grad()
assert weight.grad is None and "torch._dynamo" not in sys.modules

traced = []

def backend(graph, inputs):
    traced.append(graph)
    return graph

@torch.compile(backend=backend)
def cleared(x):
    still.zero_grad()
    return twice(x)

weight.grad = torch.ones(2)
assert torch.equal(cleared(torch.ones(2)), 2 * torch.ones(2)) and weight.grad is None
assert "zero_grad" not in str([graph.graph for graph in traced])
"""


def test_neither_an_optimizer_nor_an_operator_in_python_imports_the_compiler_on_cuda():
    run(OPTIMIZER.format(folder=FOLDER))


def test_two_copies_that_import_at_once_leave_torch_as_it_was(fresh_cpu):
    before = {name: id(value) for name, value in vars(torch).items()}
    one, other = cpu.compiling_later(), fresh_cpu.compiling_later()
    for step in (one.__enter__, other.__enter__):
        step()
    assert {name: id(value) for name, value in vars(torch).items()} != before
    for copy in (one, other):
        copy.__exit__(None, None, None)
    assert {name: id(value) for name, value in vars(torch).items()} == before


def test_on_cuda_a_compiler_imported_later_has_one_process(fresh_cpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fresh_cpu, "cuda_rows", lambda: ())
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    fresh_cpu.apply_on_cuda()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


@without_cuda
def test_applying_again_changes_nothing():
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, *_ in cpu.apply()]
    count = len(before)
    assert len(cpu.apply()) == count
    assert all(getattr(owner, attribute) is value for owner, attribute, value in before)


@without_cuda
def test_another_copy_of_the_package_wraps_nothing_again(fresh_cpu):
    before, rows = torch.Tensor.type, cpu.apply()
    assert fresh_cpu.apply() is rows and torch.Tensor.type is before


def test_nothing_is_patched_where_cuda_is_there(fresh_cpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def table():
        raise AssertionError("the table was read")

    places = [
        (torch, "zeros"),
        (torch, "tensor"),
        (torch.cuda, "current_device"),
        (torch.cuda, "Stream"),
    ]
    places += [
        (torch.Tensor, "cuda"),
        (torch.Tensor, "type"),
        (torch.distributed, "all_to_all_single"),
    ]
    before = [getattr(owner, attribute) for owner, attribute in places]
    monkeypatch.setattr(fresh_cpu, "cpu_rows", table)
    assert fresh_cpu.apply() == []
    assert all(
        getattr(owner, name) is old for (owner, name), old in zip(places, before, strict=True)
    )


def test_the_table_can_be_read_without_changing_anything(fresh_cpu):
    before = torch.zeros, torch.cuda.current_device, torch.Tensor.type
    rows = list(fresh_cpu.cpu_rows())
    assert len(rows) > 30 and (torch.zeros, torch.cuda.current_device, torch.Tensor.type) == before


@pytest.mark.parametrize("asked", [None, "4"])
def test_on_cuda_no_process_beside_training_compiles_unless_it_is_asked_for(monkeypatch, asked):
    import torch._inductor.config as inductor
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", asked)
    rows = [row for row in cpu.cuda_rows() if row[0] is inductor]
    assert [row[1:3] for row in rows] == ([] if asked else [("compile_threads", 1)])
    for owner, attribute, replacement, _ in rows:
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, replacement)
            assert AsyncCompile.use_process_pool() is False
            assert AsyncCompile.process_pool.cache_info().currsize == 0


@without_cuda
def test_constructors_read_cuda_as_the_cpu_and_leave_other_devices_alone():
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
    assert torch.arange(3, dtype=torch.int32, device="cuda").tolist() == [0, 1, 2]
    assert torch.ones_like(torch.zeros(2), device="meta").device.type == "meta"
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.full((2,), 3.0).tolist() == [3.0, 3.0]


@without_cuda
def test_constructors_obey_the_default_device_of_a_context():
    for make in (
        lambda: torch.zeros(2),
        lambda: torch.tensor([1.0]),
        lambda: torch.arange(0, 4, 2),
        lambda: torch.rand(2),
        lambda: torch.full((2,), 1.0),
        lambda: torch.empty(2),
    ):
        with torch.device("meta"):
            assert make().device.type == "meta"
        assert make().device.type == "cpu"


def tiny(rope_parameters=None):
    return transformers.Qwen3Config(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 1e4},
    )


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize("scaling, factor", [(None, 1.0), (LINEAR, 4.0)])
def test_a_model_that_transformers_loads_after_the_patches_has_right_rotary_frequencies(
    tmp_path, scaling, factor
):
    # 1 / theta^(2i / d) for i = 0..3, theta = 10^4, d = 8
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001]) / factor
    transformers.AutoModelForCausalLM.from_config(tiny(scaling)).save_pretrained(tmp_path)
    for _ in range(2):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        rope = model.model.rotary_emb
        for name in ("inv_freq", "original_inv_freq"):
            torch.testing.assert_close(getattr(rope, name).cpu(), expected, rtol=1e-6, atol=0)
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_a_model_built_under_the_meta_device_is_all_meta_and_one_built_after_it_is_not():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny())
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors and all(t.device.type == "meta" for t in tensors)
    inv_freq = transformers.AutoModelForCausalLM.from_config(tiny()).model.rotary_emb.inv_freq
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)


@without_cuda
def test_seeds_and_random_states_are_those_of_the_cpu_generator():
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)


@without_cuda
def test_types_convert_and_are_named_as_megatron_asks_for_them():
    x = torch.ones(2)
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.type(torch.float64).dtype == torch.float64
    assert x.cuda() is x
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()


def test_the_norm_of_a_large_tensor_is_exact():
    """torch's own is 1e-4 off here, and gradient norms would differ between layouts by as much."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(4_000_001, generator=generator) * 1e-3,
        torch.randn(3, 5, generator=generator),
        torch.zeros(0),
    ]
    exact = sum(float(t.double().pow(2).sum()) for t in tensors) ** 0.5
    assert abs(float(cpu.l2_norm(tensors)) - exact) / exact < 1e-6


def test_tensors_that_lie_one_after_another_are_joined():
    buffer = torch.arange(100.0)
    parts = [buffer[10:30].view(4, 5), buffer[:10], buffer[40:], torch.ones(2, 3).t()]
    found = sorted(cpu.joined(parts), key=len)
    assert [len(flat) for flat in found] == [6, 30, 60]
    assert torch.equal(found[1], buffer[:30]) and torch.equal(found[2], buffer[40:])
