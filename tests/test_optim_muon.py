"""Muon against torch.optim.Muon on the matrices of transformers' modules, in every layout."""

import shutil

import pytest
import torch

from mca_lite.args import TrainingArguments, check_together
from mca_lite.errors import ConfigError
from mca_lite.optim import Matrices, create_torch_optimizer
from tests.shared import tiny, tiny_moe, world
from tests.shared.files import tensors
from tests.shared.layouts import CP2, DENSE, EP2, ETP1, PP2, SAVE, TP2, TP2_SP
from tests.shared.training import assert_same_curve, in_float32, train

MUON = dict(optim="muon", learning_rate=2e-3, steps=5, adapt=in_float32)
WEIGHTS = 1e-5


def part_of(index: tuple, x: torch.Tensor) -> torch.Tensor:
    """x[index]; of an index with three parts, as gpt_oss' [E, in, out] needs it, transposed."""
    return x[index].t() if len(index) == 3 else x[index]


def matrices_of(model) -> list[tuple[torch.nn.Parameter, tuple]]:
    """(parameter, index of part_of) of each matrix of the hidden layers of a transformers model:
    gate, up and every expert by themselves."""
    found = []
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name, p in model.named_parameters():
        if p.dim() == 2 and id(p) not in outside and not name.endswith("bias"):
            found.append((p, ()))
        if p.dim() == 3 and model.config.model_type == "gpt_oss":
            turns = 2 if name.endswith("gate_up_proj") else 1
            for e in range(len(p)):
                found += [(p, (e, slice(None), slice(i, None, turns))) for i in range(turns)]
        elif p.dim() == 3 and 1 not in p.shape:  # no convolution of channels
            halves = 2 if name.endswith("gate_up_proj") else 1
            size = p.shape[1] // halves
            for e in range(len(p)):
                found += [(p, (e, slice(i * size, (i + 1) * size))) for i in range(halves)]
    return found


class TorchsMuon(torch.optim.Optimizer):
    """torch.optim.Muon for the matrices of hidden layers, AdamW for the rest."""

    def __init__(self, model, args):
        self.matrices = matrices_of(model)
        hidden = {id(p) for p, _ in self.matrices}
        rest = [p for p in model.parameters() if id(p) not in hidden]
        super().__init__(list(model.parameters()), dict(lr=args.learning_rate, weight_decay=0.0))
        # matrices by themselves, in the memory of the model's
        self.views = [torch.nn.Parameter(part_of(index, p.data)) for p, index in self.matrices]
        self.muon = torch.optim.Muon(
            self.views,
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            momentum=args.muon_momentum,
            nesterov=args.muon_nesterov,
            ns_steps=args.muon_ns_steps,
            adjust_lr_fn=args.muon_adjust_lr,
        )
        named = {id(p): name for name, p in model.named_parameters()}
        biases = [p for p in rest if p.dim() == 1 or named[id(p)].endswith("bias")]
        vectors = dict(params=biases, weight_decay=0.0)
        tables = [p for p in rest if not any(p is bias for bias in biases)]
        tables = dict(params=tables, weight_decay=args.weight_decay)
        numbers = dict(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        self.adam = torch.optim.AdamW([vectors, tables], lr=args.learning_rate, **numbers)

    def step(self, closure=None):
        for view, (p, index) in zip(self.views, self.matrices, strict=True):
            view.grad = part_of(index, p.grad)
        for part in (self.muon, self.adam):
            for group in part.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            part.step()


def curve_of_torch(path: str, out: str, **keys) -> list:
    from mca_lite import McaTrainer

    class Oracle(McaTrainer):
        def __init__(self, model, args, **more):
            super().__init__(
                model=model, args=args, optimizers=(TorchsMuon(model, args), None), **more
            )

    return train(path, out, backend="torch", trainer_class=Oracle, export=True, **MUON, **keys)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """(model folder, curve of torch.optim.Muon, its weights)"""
    folder = tmp_path_factory.mktemp("muon")
    path = tiny.save_model(folder / "model", "llama")
    [curve] = world.run(curve_of_torch, 1, path, str(folder / "torch"))
    return path, curve, tensors(folder / "torch")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon_moe")
    path = tiny_moe.save_model(folder / "model", "qwen3_moe")
    [curve] = world.run(curve_of_torch, 1, path, str(folder / "torch"))
    return path, curve, tensors(folder / "torch")


def assert_as_torch(oracle, out, ranks: int, **keys) -> None:
    path, wanted, weights = oracle
    for curve in world.run(train, ranks, path, str(out), export=True, **MUON, **keys):
        assert_same_curve(curve, wanted)
    got = tensors(out)
    assert got.keys() == weights.keys()
    for name, tensor in got.items():
        assert (tensor - weights[name]).abs().max() < WEIGHTS, name


LAYOUTS = ("one", "dp2", "tp2", "tp2_sp", "pp2", "tp2pp2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_equals_torch_s_in_every_layout(dense, tmp_path, layout):
    ranks, keys = DENSE[layout]
    assert_as_torch(dense, tmp_path, ranks, **keys)


def test_muon_on_the_torch_backend_equals_torch_s(dense, tmp_path):
    assert_as_torch(dense, tmp_path, 1, backend="torch")


MIXTURES = {
    "ep2": (2, EP2),
    "tp2": (2, TP2_SP),
    "etp1": (2, {**TP2_SP, **ETP1}),
    "torch": (1, dict(backend="torch")),
}


@pytest.mark.parametrize("layout", MIXTURES)
def test_each_expert_s_matrices_are_updated_by_themselves(sparse, tmp_path, layout):
    ranks, keys = MIXTURES[layout]
    assert_as_torch(sparse, tmp_path, ranks, **keys)


# families with fused matrices in Hugging Face's files, or linears that no rank cuts, and their
# layout
FAMILIES = {"phi3": TP2, "glm4": TP2, "deepseek_v3": TP2_SP, "qwen2": CP2, "gpt_oss": TP2_SP}
FAMILIES["qwen3_5_text"] = TP2_SP


# phi3 has the fused MLP of glm4
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.full if name == "glm4" else ()) for name in FAMILIES],
)
def test_matrices_of_a_family_are_those_of_transformers(tmp_path, family):
    save = tiny_moe.save_model if family in tiny_moe.MODELS else tiny.save_model
    path = save(tmp_path / "model", family)
    [curve] = world.run(curve_of_torch, 1, path, str(tmp_path / "torch"))
    oracle = path, curve, tensors(tmp_path / "torch")
    assert_as_torch(oracle, tmp_path / "out", 2, **FAMILIES[family])


def torch_error(path: str, out: str) -> str:
    with pytest.raises(ValueError) as error:
        train(path, out, backend="torch", **MUON)
    return str(error.value)


def test_stacked_experts_on_plain_torch_are_refused(tmp_path):
    path = tiny_moe.save_model(tmp_path / "model", "gpt_oss", num_hidden_layers=2)
    [error] = world.run(torch_error, 1, path, str(tmp_path / "out"))
    assert "stacked experts of gpt_oss" in error and "use_mca: true" in error


# -- one update


def one_parameter(shape, **keys) -> tuple:
    """(optimizer of a single matrix, the matrix)"""
    args = TrainingArguments(output_dir="out", optim="muon", learning_rate=0.1, **keys)
    torch.manual_seed(3)
    module = torch.nn.Module()
    module.matrix = torch.nn.Parameter(torch.randn(shape))
    module.matrix.matrices = Matrices((shape[0],))
    optimizer = create_torch_optimizer(args, module)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.3
    return optimizer, module.matrix


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
@pytest.mark.parametrize(
    "keys, theirs",
    [
        ({}, dict(adjust_lr_fn="match_rms_adamw")),
        (dict(muon_adjust_lr="original"), dict(adjust_lr_fn="original")),
        (dict(muon_nesterov=False), dict(adjust_lr_fn="match_rms_adamw", nesterov=False)),
        (dict(muon_ns_steps=3, muon_momentum=0.5), dict(
            adjust_lr_fn="match_rms_adamw", ns_steps=3, momentum=0.5)),
    ],
)  # fmt: skip
def test_updates_are_those_of_torch_s_muon_in_bf16_too(shape, keys, theirs):
    ours, matrix = one_parameter(shape, **keys)
    other = torch.nn.Parameter(matrix.detach().clone())
    torchs = torch.optim.Muon([other], lr=0.1, weight_decay=0.3, **theirs)
    for _ in range(3):
        matrix.grad = torch.randn(shape)
        other.grad = matrix.grad.clone()
        ours.step()
        torchs.step()
        torch.testing.assert_close(matrix, other, rtol=0, atol=1e-6)


def test_fused_matrices_are_updated_one_by_one():
    """Queries, keys and values of two groups, in megatron's order; and a stack of two experts."""
    torch.manual_seed(0)
    ranges = lambda x: x - x.mean((1, 2), keepdim=True)  # noqa: E731 - sees the whole matrix
    whole = torch.randn(16, 6)
    of_groups = whole.view(2, 8, 6)
    wanted = torch.empty(2, 8, 6)
    for rows in (slice(0, 4), slice(4, 6), slice(6, 8)):
        wanted[:, rows] = of_groups[:, rows] - of_groups[:, rows].mean()
    got = Matrices((4, 2, 2), 2).apply(ranges, whole)
    torch.testing.assert_close(got, wanted.view(16, 6))
    stack = torch.randn(2, 2, 5, 6)
    got = Matrices((5, 5)).apply(ranges, stack)
    torch.testing.assert_close(got, stack - stack.mean((2, 3), keepdim=True))


# -- checkpoints

RESUMED = {
    "tp2_sp": (2, TP2_SP),
    "pp2": (2, PP2),
    "bf16": (2, dict(TP2, bf16=True)),
    "torch": (1, dict(backend="torch")),
}


def saved_and_whole(path: str, out, ranks: int, keys: dict, **more) -> list:
    """The curve of a run of four steps, of which the checkpoint of step 2 is left."""
    keys = {**SAVE, "optim": "muon", **keys, **more}
    curve, *_ = world.run(train, ranks, path, str(out), steps=4, **keys)
    shutil.rmtree(out / "checkpoint-4")
    return curve


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_same_bits(dense, tmp_path, name):
    ranks, keys = RESUMED[name]
    whole = saved_and_whole(dense[0], tmp_path, ranks, keys)
    keys = {**SAVE, **keys, "optim": "muon", "resume_from_checkpoint": "auto"}
    assert world.run(train, ranks, dense[0], str(tmp_path), steps=4, **keys)[0] == whole


def test_a_checkpoint_loads_in_another_layout(sparse, tmp_path):
    more = dict(adapt=in_float32)
    whole = saved_and_whole(sparse[0], tmp_path / "ep2", 2, EP2, **more)
    keys = {**TP2_SP, "optim": "muon", "resume_from_checkpoint": f"{tmp_path}/ep2/checkpoint-2"}
    got = world.run(train, 2, sparse[0], str(tmp_path / "tp2"), steps=4, **keys, **more)[0]
    assert_same_curve(got, whole, 1e-6)


def masters_of(path: str, out: str) -> tuple[int, bool]:
    """(matrices whose master moved by less than their weight shows, all masters are float32)"""
    from mca_lite.optim import parts_of
    from mca_lite.trainer import McaTrainer

    found = []

    class Kept(McaTrainer):
        def __init__(self, **keys):
            super().__init__(**keys)
            found.append(self)

    keys = dict(bf16=True, learning_rate=1e-6, weight_decay=0.0)
    keys |= dict(lr_scheduler_kwargs={}, warmup_steps=0)
    train(path, out, steps=2, optim="muon", trainer_class=Kept, **keys)
    [part] = parts_of(found[0].backend.optimizer)
    matrices = [p for p in found[0].model.parameters() if hasattr(p, "matrices")]
    inner = part.optimizer
    masters = [p.main_param for p in matrices]
    assert all("momentum_buffer" in inner.state[p] for p in masters)
    moved = sum(bool((m != p.float()).any()) for m, p in zip(masters, matrices, strict=True))
    return moved, all(p.dtype == torch.float32 for p in masters)


def test_bf16_weights_have_float32_masters(dense, tmp_path):
    [(moved, are_float32)] = world.run(masters_of, 1, dense[0], str(tmp_path))
    assert moved > 8 and are_float32


# -- refusals


@pytest.mark.parametrize(
    "keys, key",
    [
        (dict(use_distributed_optimizer=True), "optim"),
        (dict(optimizer_cpu_offload=True), "optim"),
        (dict(exp_avg_dtype="bf16"), "exp_avg_dtype"),
    ],
)
def test_states_in_other_places_are_refused(keys, key):
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(output_dir="out", optim="muon", **keys)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_adapters_are_refused():
    args = TrainingArguments(output_dir="out", optim="muon")
    with pytest.raises(ConfigError, match="adapters are factors"):
        check_together(args, finetuning_type="lora")


def test_keys_of_muon_are_noted_with_adam():
    args = TrainingArguments(output_dir="out", muon_momentum=0.9)
    assert args.notes == ["muon_momentum: no effect, since optim is adam"]
