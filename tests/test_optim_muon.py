"""Muon against torch.optim.Muon on the matrices of transformers' modules, in every layout."""

import pytest
import torch

from tests.shared import tiny, tiny_moe, world
from tests.shared.files import tensors
from tests.shared.layouts import DENSE, EP2, ETP1, TP2_SP
from tests.shared.training import assert_same_curve, train


def in_float32(model):
    """The model, in a process where Newton-Schulz iterates in float32, ours and torch's. In bf16 a
    gradient that is summed in another order rounds to a neighbour here and there, and five
    iterations multiply that by up to 3.4445 ** 5 = 485."""
    torch.Tensor.bfloat16 = lambda tensor: tensor.float().clone()
    return model


MUON = dict(optim="muon", learning_rate=2e-3, steps=5, adapt=in_float32)
WEIGHTS = 1e-5


def matrices_of(model) -> list[tuple[torch.nn.Parameter, tuple]]:
    """(parameter, index) of each matrix of the hidden layers of a transformers model: gate, up and
    every expert by themselves."""
    found = []
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name, p in model.named_parameters():
        if p.dim() == 2 and id(p) not in outside:
            found.append((p, ()))
        if p.dim() == 3:
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
        self.views = [torch.nn.Parameter(p.data[index]) for p, index in self.matrices]
        self.muon = torch.optim.Muon(
            self.views,
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            momentum=args.muon_momentum,
            nesterov=args.muon_nesterov,
            ns_steps=args.muon_ns_steps,
            adjust_lr_fn=args.muon_adjust_lr,
        )
        vectors = dict(params=[p for p in rest if p.dim() == 1], weight_decay=0.0)
        tables = dict(params=[p for p in rest if p.dim() > 1], weight_decay=args.weight_decay)
        numbers = dict(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        self.adam = torch.optim.AdamW([vectors, tables], lr=args.learning_rate, **numbers)

    def step(self, closure=None):
        for view, (p, index) in zip(self.views, self.matrices, strict=True):
            view.grad = p.grad[index]
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
