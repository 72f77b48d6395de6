"""What a user's script adds from outside the package trains: an objective, a preference loss and an
optimizer.
"""

import ast
import math
import os
from pathlib import Path

import pytest

import mca_lite
from tests.shared import world
from tests.shared.training import read_log

ROOT = Path(__file__).parents[1]
SHORT = (
    "max_steps=2 logging_steps=1 eval_strategy=no global_batch_size=4 per_device_train_batch_size=2"
)
SHORT += " warmup_steps=0 max_samples=20 disable_tqdm=true learning_rate=1e-2"
MODEL = "model_name_or_path=configs/tiny/model train_from_scratch=true"


# -- a user's script: nothing of it stands in the package


def hinge(responses, config):
    """SLiC's hinge on the mean log-probability of a token: max(0, beta - (chosen - rejected)), with
    no reference.
    """
    chosen = responses.chosen / responses.chosen_lens.clamp(min=1)
    rejected = responses.rejected / responses.rejected_lens.clamp(min=1)
    losses = (config.beta - (chosen - rejected)).clamp(min=0)
    return losses, chosen.detach(), rejected.detach()


def radam(groups, args):
    import torch

    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.RAdam(
        groups, lr=args.learning_rate, betas=betas, decoupled_weight_decay=True
    )


def doubled_trainer():
    from mca_lite import McaTrainer

    class DoubledTrainer(McaTrainer):
        """The mean loss of a token, times two; and the share of tokens that are certain to one
        half, as a metric.
        """

        metrics_keys = ["loss", "certain"]

        def _post_compute_loss(self, labels, losses):
            import torch

            total, count, metrics = super()._post_compute_loss(labels, losses)
            certain = ((losses < math.log(2)) & (labels != -100)).sum()
            metrics["certain"] = torch.stack([certain.double(), metrics["loss"][1].double()])
            metrics["loss"][0] *= 2
            return 2 * total, count, metrics

    return DoubledTrainer


def train(words: str, out: str) -> int:
    """A user's train.py: registers, then trains by the command line."""
    os.chdir(ROOT)
    from mca_lite import cli, register_loss, register_objective, register_optimizer

    register_loss("hinge", hinge, has_reference=False)
    register_optimizer("radam", radam, states=("exp_avg", "exp_avg_sq"), counts_steps=True)
    register_objective(
        "doubled",
        records="conversations",
        trainer=doubled_trainer(),
        metrics=("loss", "certain"),
        describe=lambda keys: "twice the loss",
    )
    places = [f"output_dir={out}/run", f"cache_dir={out}/cache"]
    return cli.main([*MODEL.split(), *SHORT.split(), *words.split(), *places])


BACKENDS = pytest.mark.parametrize("backend", ["use_mca=true", "use_mca=false"])


def logged(words: str, out, ranks: int = 1) -> list[dict]:
    assert world.run(train, ranks, words, str(out)) == [0] * ranks
    return read_log(out / "run")


@BACKENDS
def test_a_loss_from_outside_trains(tmp_path, backend):
    first, second = logged(
        f"configs/dpo.yaml pref_loss=hinge pref_beta=0.5 ref_model=null {backend}", tmp_path
    )
    # a model that is drawn at random gives both answers about the same: the hinge is near beta
    assert first["loss"] == pytest.approx(0.5, abs=0.3) and first["loss"] > 0
    margin = first["rewards/chosen"] - first["rewards/rejected"]
    assert first["rewards/margins"] == pytest.approx(margin, abs=1e-6)
    assert second["grad_norm"] > 0


@BACKENDS
def test_an_optimizer_from_outside_trains_and_goes_on_from_a_checkpoint(tmp_path, backend):
    words = f"configs/sft.yaml optim=radam {backend} lr_scheduler_type=constant"
    whole = logged(f"{words} max_steps=3 save_strategy=no", tmp_path / "whole")
    logged(f"{words} save_strategy=steps save_steps=2", tmp_path / "parts")
    parts = logged(
        f"{words} save_strategy=no max_steps=3 resume_from_checkpoint=auto", tmp_path / "parts"
    )
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]
    adam = logged(
        f"configs/sft.yaml {backend} save_strategy=no lr_scheduler_type=constant", tmp_path / "adam"
    )
    assert adam[0]["loss"] == whole[0]["loss"] and adam[1]["loss"] != whole[1]["loss"]


def test_an_optimizer_from_outside_is_the_same_on_both_backends_and_not_distributed(tmp_path):
    words = "configs/sft.yaml optim=radam weight_decay=0.1 save_strategy=no"
    ours = logged(f"{words} tensor_model_parallel_size=2", tmp_path / "tp2", ranks=2)
    theirs = logged(f"{words} use_mca=false", tmp_path / "torch")
    for a, b in zip(ours, theirs, strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-5)
    refused = f"{words} use_distributed_optimizer=true"
    assert world.run(train, 1, refused, str(tmp_path / "no")) == [2]


@BACKENDS
def test_an_objective_from_outside_trains(tmp_path, backend):
    plain = logged(f"configs/sft.yaml save_strategy=no {backend}", tmp_path / "sft")
    best = "metric_for_best_model=certain eval_strategy=steps eval_steps=2"
    words = f"configs/sft.yaml stage=doubled save_strategy=no {backend}"
    doubled = logged(f"{words} {best}", tmp_path / "doubled")
    assert "certain" in doubled[0] and "eval_certain" in doubled[-1]
    doubled = logged(words, tmp_path / "plain")
    assert doubled[0]["loss"] == pytest.approx(2 * plain[0]["loss"], rel=1e-6)
    assert doubled[0]["grad_norm"] == pytest.approx(2 * plain[0]["grad_norm"], rel=1e-5)


def test_names_that_are_taken_and_records_that_there_are_not_are_refused():
    from mca_lite import register_loss, register_objective, register_optimizer

    with pytest.raises(ValueError, match="sigmoid is registered already"):
        register_loss("sigmoid", hinge, has_reference=False)
    with pytest.raises(ValueError, match="adamw_torch is registered already"):
        register_optimizer("adamw_torch", radam, states=())
    with pytest.raises(ValueError, match="expected one of text, conversations, pairs"):
        register_objective("kto", records="scores")


# -- the names of rows are compared in no file but their tables

TABLES = {"objectives", "loss_preference", "optimizers"}
NAMES = {"pt", "sft", "dpo", "sigmoid", "orpo", "adam", "adamw_torch", "sgd"}
# the router's score function of a model is called so too
OTHER_MEANINGS = {
    ("model_routing", "sigmoid"),
    ("model_config", "sigmoid"),
    ("model_moe", "sigmoid"),
}


def compared(tree: ast.Module) -> set[str]:
    """The texts that a module compares something with, by ==, != or in."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in [node.left, *node.comparators]:
                found |= {n.value for n in ast.walk(side) if isinstance(n, ast.Constant)}
    return found


def test_no_file_but_the_tables_compares_with_the_name_of_a_row():
    for path in sorted(Path(mca_lite.__file__).parent.glob("*.py")):
        if path.stem in TABLES:
            continue
        for name in compared(ast.parse(path.read_text())) & NAMES:
            assert (path.stem, name) in OTHER_MEANINGS, f"{path.name} compares with {name!r}"
