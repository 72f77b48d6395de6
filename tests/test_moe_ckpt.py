"""Checkpoints of mixtures of experts: bit for bit in the same layout, and experts spread or cut
anew in another.
"""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.shared import tiny, tiny_moe, world
from tests.shared.files import tensors
from tests.shared.layouts import AUX, BIAS, CP2, DIST_OPT, EP2, EP4, ETP1, PP2, TP2_SP, VPP2
from tests.shared.training import assert_same_curve, read_log, train

LAYOUTS = {
    "one": (1, {}),
    "dp2_dist_opt": (2, DIST_OPT),
    "tp2": (2, TP2_SP),
    "ep2": (2, EP2),
    "ep2_dist_opt": (2, {**EP2, **DIST_OPT}),
    "ep4_dist_opt": (4, {**EP4, **DIST_OPT}),
    "ep2tp2_dist_opt": (4, {**EP2, **TP2_SP, **DIST_OPT}),
    "ep2tp2_etp1": (2, {**EP2, **TP2_SP, **ETP1}),
    "ep2pp2vpp2": (4, {**EP2, **PP2, **VPP2}),
    "cp2ep2_dist_opt": (2, {**CP2, **EP2, **DIST_OPT}),
    "torch": (1, dict(backend="torch")),
}
WIDE = dict(global_batch_size=8, per_device_train_batch_size=2)  # two samples on each of four ranks
SHARED = dict(AUX, **BIAS, **WIDE, steps=3, count=12, adam_epsilon=1e-5)
SAVE = dict(save_strategy="steps", save_steps=2, num_train_epochs=5)
PAIRS = {
    # experts to fewer, to cut ones, to pipeline stages
    "ep2_dist_opt": "ep2_dist_opt ep4_dist_opt tp2 one ep2pp2vpp2",
    "ep2tp2_dist_opt": "ep2 ep2tp2_etp1 cp2ep2_dist_opt",
    "ep2pp2vpp2": "ep2pp2vpp2 ep2tp2_dist_opt dp2_dist_opt",
    "torch": "torch",
}
# From tensor parallelism and from stages to others: ep2_dist_opt goes to one, tp2 and ep2pp2vpp2,
# ep2tp2_dist_opt to ep2tp2_etp1. Stages and context ranks of dense models: test_ckpt_layouts.
THINNED = [
    ("ep2tp2_dist_opt", "ep2"),
    ("ep2tp2_dist_opt", "cp2ep2_dist_opt"),
    ("ep2pp2vpp2", "dp2_dist_opt"),
    ("ep2pp2vpp2", "ep2tp2_dist_opt"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_moe.save_model(tmp_path_factory.mktemp("moe") / "model", "glm4_moe")


@pytest.fixture(scope="module")
def saved(path, tmp_path_factory):
    """layout -> (curve of the whole run, its weights, the folder in which only the checkpoint of
    step 2 is left).
    """
    done = {}

    def of(layout: str):
        if layout not in done:
            ranks, keys = LAYOUTS[layout]
            folder = tmp_path_factory.mktemp(layout)
            curve = world.run(
                train, ranks, path, str(folder), export=True, **{**SHARED, **SAVE, **keys}
            )[0]
            shutil.rmtree(folder / "checkpoint-3")
            done[layout] = curve, tensors(folder), folder
        return done[layout]

    return of


@pytest.mark.parametrize(
    "before, after",
    [
        pytest.param(a, b, marks=[pytest.mark.full] if (a, b) in THINNED else [])
        for a, row in PAIRS.items()
        for b in row.split()
    ],
)
def test_a_run_goes_on_in_the_same_layout_or_another(path, saved, tmp_path, before, after):
    curve, weights, folder = saved(before)
    ranks, keys = LAYOUTS[after]
    checkpoint = Path(folder) / "checkpoint-2"
    keys = dict(SHARED, **SAVE, resume_from_checkpoint=str(checkpoint), **keys)
    got = world.run(train, ranks, path, str(tmp_path), export=True, **keys)[0]
    ours = tensors(tmp_path)
    assert ours.keys() == weights.keys()
    if before == after:
        assert got == curve
        assert all(torch.equal(ours[name], value) for name, value in weights.items())
        return
    assert_same_curve(got, curve, 5e-6)
    for name, value in weights.items():  # the routers' bias too
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def main_pieces(path: str, **keys) -> list[tuple]:
    """(name, place) of each piece of the weights of which this rank says that it is the main
    replica."""
    from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors

    from mca_lite import TrainingArguments
    from mca_lite.ckpt_megatron import nested_values
    from mca_lite.model import AutoModel

    models = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused", **keys))
    state = models.sharded_state_dict()
    apply_factories(state)
    pieces = nested_values(extract_sharded_tensors(state)[0])
    return [(p.key, p.global_offset) for p in pieces if is_main_replica(p.replica_id)]


@pytest.mark.parametrize("layout", ["dp2_dist_opt", "tp2", "ep2"])
def test_each_piece_of_the_weights_has_one_main_replica(path, layout):
    ranks, keys = LAYOUTS[layout]
    [alone] = world.run(main_pieces, 1, path)
    experts = [name for name, _ in alone if "experts" in name]
    found = [piece for rank in world.run(main_pieces, ranks, path, **keys) for piece in rank]
    assert len(found) == len(set(found)) and len(experts) > 2
    assert {name for name, _ in found} == {name for name, _ in alone}


def test_a_line_of_the_log_has_the_routers_of_all_its_steps_after_a_restart(path, tmp_path):
    """Of four steps a line, of which the run that is resumed makes the last two."""
    keys = dict(SHARED, **SAVE, logging_steps=4)
    keys["steps"] = 4
    world.run(train, 1, path, str(tmp_path / "whole"), **keys)
    keys["resume_from_checkpoint"] = str(tmp_path / "whole" / "checkpoint-2")
    world.run(train, 2, path, str(tmp_path / "parts"), **{**keys, **EP2})
    [[whole], [parts]] = [read_log(str(tmp_path / name)) for name in ("whole", "parts")]
    for key in ("loss", "expert_load_max", "expert_load_min", "load_balancing_loss", "z_loss"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-4), key


def lines_of_the_log(path: str, out: str, interrupted: bool, **keys) -> list[dict]:
    from mca_lite import TrainingArguments
    from mca_lite.callbacks import Interrupted, TrainerCallback
    from mca_lite.model import AutoModel
    from mca_lite.trainer import McaTrainer

    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3 and not (Path(out) / "checkpoint-3").exists():
                signal.raise_signal(signal.SIGTERM)

    args = TrainingArguments(output_dir=out, disable_tqdm=True, **keys)
    model, callbacks = AutoModel.from_pretrained(path, args), [Interrupt()] * interrupted
    trainer = McaTrainer(model, args, train_dataset=tiny.samples(40), callbacks=callbacks)
    try:
        trainer.train()
    except Interrupted:
        trainer.train("auto")
    return read_log(out)


def test_going_on_in_the_same_process_counts_no_step_twice(path, tmp_path):
    keys = dict(AUX, global_batch_size=4, max_steps=4, logging_steps=4, learning_rate=1e-2)
    [[whole]], [[parts]] = (
        world.run(lines_of_the_log, 1, path, str(tmp_path / str(cut)), cut, **keys)
        for cut in (False, True)
    )
    for key in ("loss", "expert_load_max", "load_balancing_loss"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-6), key
