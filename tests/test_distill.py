"""Distillation: the example's loss, stage distill with a resident and a cached teacher, against
plain torch on whole logits.
"""

import pytest

from tests.shared import layouts, world
from tests.shared.distilling import PLAIN, oracle_curve, save_models
from tests.shared.examples import example
from tests.shared.training import assert_same_curve, train

TP2PP2 = {**layouts.TP2, **layouts.PP2}
CP2_PACKED = {**layouts.CP2, **layouts.PACKED}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("distill"))


@pytest.fixture(scope="module")
def oracle(models, tmp_path_factory):
    """objective -> the curve of plain torch, computed once."""
    curves = {}

    def curve_of(objective: dict) -> list:
        name = str(sorted(objective.items()))
        if name not in curves:
            out = str(tmp_path_factory.mktemp("oracle"))
            [curves[name]] = world.run(oracle_curve, 1, *models, out, objective)
        return curves[name]

    return curve_of


# -- the example


def curve_of_example(student, teacher, out, **keys) -> list:
    module = example("distillation")
    module.TEACHER = teacher
    return train(student, out, trainer_class=module.KDTrainer, **keys)


@pytest.mark.parametrize(
    "ranks, keys",
    [(1, dict(backend="torch")), (4, TP2PP2), (2, CP2_PACKED)],
    ids=["torch", "tp2pp2", "cp2_packed"],
)
def test_the_examples_loss_equals_plain_torch_on_whole_logits(
    models, oracle, tmp_path, ranks, keys
):
    got = world.run(curve_of_example, ranks, *models, str(tmp_path), loss_chunk_size=5, **keys)
    assert_same_curve(got[-1], oracle(PLAIN))
