"""Losses, gradients, weights and evaluations that are not finite: the run stops before the update,
and says where.
"""

import contextlib
import io
import math
import re

import numpy as np
import pytest
import torch

from tests.shared import commands, dpo_tools, tiny, tiny_moe, world
from tests.shared.commands import SHORT
from tests.shared.files import tensors
from tests.shared.fixtures import saved_model
from tests.shared.layouts import CP2, DIST_OPT, EP2, PP2, TP2, VPP2
from tests.shared.training import read_log
from tests.shared.training import train as train_plainly

BAD_TOKEN, BAD_SAMPLE, BAD_LAYER = 60, 20, 2
KEYS = dict(
    global_batch_size=8,
    per_device_train_batch_size=2,
    max_steps=4,
    logging_steps=1,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    save_strategy="steps",
    save_steps=1,
    save_total_limit=1,
    disable_tqdm=True,
)


model_path = saved_model("llama")


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory):
    return tiny_moe.save_model(tmp_path_factory.mktemp("nonfinite_moe") / "model", "qwen3_moe")


def data() -> list[dict]:
    """Samples of which BAD_SAMPLE alone holds BAD_TOKEN, in a place that is trained on."""
    samples = tiny.samples()
    for sample in samples:
        for tokens in sample.values():
            tokens[tokens == BAD_TOKEN] = 0
    samples[BAD_SAMPLE]["input_ids"][-1] = BAD_TOKEN
    samples[BAD_SAMPLE]["labels"][:] = 1
    return samples


def place_of_the_bad_sample(ranks: int) -> tuple[int, int, list[int]]:
    """(step from 1, data parallel replica, samples of its micro-batch) by the plan's own words."""
    import numpy as np

    order = np.random.default_rng([42, 0]).permutation(22).tolist()
    at = order.index(BAD_SAMPLE)
    first = at // 2 * 2
    return at // 8 + 1, at % 8 // 2 % ranks, order[first : first + 2]


def poison_layer(models, trainer_of) -> None:
    """The MLP of BAD_LAYER gives NaN where the micro-batch holds BAD_TOKEN."""

    def spoil(module, inputs, output):
        if not getattr(trainer_of.get("trainer"), "is_bad", False):  # not made yet
            return output
        if isinstance(output, tuple):
            return (output[0] * math.nan, *output[1:])
        return output * math.nan

    for model in models if isinstance(models, list) else [models]:
        for name, module in model.named_modules():
            if name.rpartition(".")[0].endswith("layers") and hasattr(module, "mlp"):
                number = getattr(module, "layer_number", int(name.rpartition(".")[2]) + 1) - 1
                if number == BAD_LAYER:
                    module.mlp.register_forward_hook(spoil)


def is_whole(folder) -> bool:
    from mca_lite import ckpt_folder

    return not ckpt_folder.damage(folder, ckpt_folder.read_manifest(folder))


def train(path: str, out: str, backend: str, poison: str, **changes) -> dict:
    """Train with a BAD_SAMPLE of numbers that are not finite -> the run's words and traces."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model
    from mca_lite.trainer_nonfinite import NotFiniteError

    class Trainer(McaTrainer):
        is_bad = False

        def _prepare_train_inputs(self, data_iterator):
            batch = next(data_iterator)
            self.is_bad = bool((batch["input_ids"] == BAD_TOKEN).any())
            return super()._prepare_train_inputs(iter([batch]))

        def _post_compute_loss(self, labels, losses):
            if poison == "inf" and self.is_bad:
                losses = losses + math.inf  # whose gradient is finite
            if poison == "gradient" and self.is_bad and losses.requires_grad:
                losses.register_hook(lambda gradient: gradient * math.nan)
            in_evaluation = not self.models[0].training
            if (poison == "nan" and self.is_bad) or (poison == "evaluation" and in_evaluation):
                losses = losses * math.nan
            return super()._post_compute_loss(labels, losses)

    args = TrainingArguments(output_dir=out, **{**KEYS, **changes})
    load = load_torch_model if backend == "torch" else lambda p: AutoModel.from_pretrained(p, args)
    model, made = load(path), {}
    if poison == "layer":
        poison_layer(model if backend == "torch" else list(model), made)
    error = ""
    try:
        made["trainer"] = trainer = Trainer(
            model, args, train_dataset=data(), eval_dataset=tiny.samples(9, seed=2)
        )
        trainer.train()
    except NotFiniteError as stopped:
        error = str(stopped)
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return dict(error=error, finite=finite, state=made["trainer"].state if made else None)


MEGATRON, TORCH = "megatron", "torch"


@pytest.mark.parametrize(
    "ranks, backend, poison, keys",
    [
        (2, MEGATRON, "nan", {}),
        (2, MEGATRON, "nan", dict(DIST_OPT, bf16=True)),
        (2, MEGATRON, "layer", PP2),
        (2, MEGATRON, "inf", TP2),
        (2, MEGATRON, "nan", CP2),
        (2, TORCH, "inf", {}),
        (1, TORCH, "layer", {}),
        (1, MEGATRON, "nan", dict(fp16=True, initial_loss_scale=8.0)),
        (2, MEGATRON, "layer", {**PP2, **VPP2}),
        (2, MEGATRON, "nan", dict(async_save=True)),
        (2, MEGATRON, "layer", EP2),
        (1, TORCH, "layer", dict(moe_aux_loss_coeff=0.01)),
    ],
)
def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(
    model_path, moe_path, tmp_path, ranks, backend, poison, keys
):
    is_moe = keys == EP2 or "moe_aux_loss_coeff" in keys
    is_shared = {**keys, **PP2} == keys or keys in (TP2, CP2)  # by all ranks, which are one replica
    step, replica, samples = place_of_the_bad_sample(1 if is_shared else ranks)
    path = moe_path if is_moe else model_path
    results = world.run(train, ranks, path, str(tmp_path), backend, poison, **keys)
    errors = {result["error"] for result in results}
    assert len(errors) == 1, "all ranks say the same"
    [error] = errors
    wanted = f"replica {replica}), micro-batch"
    for words in (f"step {step}: loss ", wanted, f"samples {samples[0]}, {samples[1]}"):
        assert words in error, error
    cause = "the loss itself" if poison != "layer" else f"layers.{BAD_LAYER}.mlp"
    assert cause in error, error
    assert all(result["finite"] for result in results)
    assert len(read_log(tmp_path)) == step - 1
    assert f"checkpoint-{step - 1}" in error and is_whole(tmp_path / f"checkpoint-{step - 1}")
    assert not list(tmp_path.glob(".checkpoint*")), "one that was being written is finished"


PAIRS = 17  # three whole steps and more


def train_pairs(path: str, out: str, backend: str, replica: int, **keys) -> str:
    """The error of a DPO run in which the second micro-batch of step 3 of a replica is NaN."""
    from mca_lite.trainer_nonfinite import NotFiniteError

    def spoil(trainer):
        right, calls = trainer.preference_loss, []

        def preference_loss(responses):
            losses, *rewards = right(responses)
            if trainer.state.global_step == 2 and trainer.backend.dp_rank == replica:
                calls.append(losses)
                if len(calls) == 2:
                    losses = losses * math.nan
            return (losses, *rewards)

        trainer.preference_loss = preference_loss

    keys.update(save_strategy="steps", save_steps=1, save_total_limit=1, before=spoil)
    keys.update(train_dataset=dpo_tools.Pairs(PAIRS), max_steps=4)
    with pytest.raises(NotFiniteError) as stopped:
        dpo_tools.our_run(path, out, dpo_tools.OBJECTIVES["sigmoid"], backend=backend, **keys)
    return str(stopped.value)


@pytest.mark.parametrize(
    "ranks, backend, replica, keys",
    [(2, MEGATRON, 1, {}), (2, MEGATRON, 0, PP2), (1, TORCH, 0, {})],
)
def test_a_pair_whose_loss_is_not_finite_is_named(
    model_path, tmp_path, ranks, backend, replica, keys
):
    import numpy as np

    errors = world.run(train_pairs, ranks, model_path, str(tmp_path), backend, replica, **keys)
    [error] = set(errors)
    order = np.random.default_rng([7, 0]).permutation(PAIRS).tolist()
    words = rf"step 3: loss nan on rank \d \(data parallel replica {replica}\), micro-batch 1, "
    pair = int(re.match(words + r"samples (\d+)\. The first .* the loss itself", error)[1])
    of_step = order[2 * dpo_tools.GLOBAL_BATCH : 3 * dpo_tools.GLOBAL_BATCH]
    assert pair in of_step  # replicas share them by what they cost
    assert is_whole(tmp_path / "checkpoint-2") and is_whole(tmp_path / "checkpoint-1")
    assert "checkpoint-2, from which no good step was made" in error


@pytest.mark.parametrize("ranks, backend, keys", [(2, MEGATRON, PP2), (1, TORCH, {})])
def test_a_gradient_that_is_not_finite_is_named_where_the_backward_pass_met_it(
    model_path, tmp_path, ranks, backend, keys
):
    step, _, _ = place_of_the_bad_sample(1)
    results = world.run(train, ranks, model_path, str(tmp_path), backend, "gradient", **keys)
    head = "lm_head.weight" if backend == TORCH else "output_layer.weight"
    for result in results:
        assert (
            f"step {step}: the gradient norm is nan, and the losses are finite" in result["error"]
        )
        assert f"the gradient of {head}" in result["error"] and result["finite"]


def test_check_for_nan_in_loss_and_grad_can_be_switched_off(model_path, tmp_path):
    keys = dict(check_for_nan_in_loss_and_grad=False, save_strategy="no")
    [result] = world.run(train, 1, model_path, str(tmp_path), MEGATRON, "nan", **keys)
    assert not result["error"] and not result["finite"] and result["state"].global_step == 4


@pytest.mark.parametrize("ranks, backend", [(2, MEGATRON), (1, TORCH)])
def test_nan_policy_skip_leaves_the_update_out_and_counts_it(model_path, tmp_path, ranks, backend):
    step, _, _ = place_of_the_bad_sample(ranks)
    keys = dict(nan_policy="skip", nan_skip_limit=2)
    results = world.run(train, ranks, model_path, str(tmp_path), backend, "nan", **keys)
    assert all(result["finite"] and not result["error"] for result in results)
    log = read_log(tmp_path)
    assert [line["skipped_iter"] for line in log] == [int(n == step) for n in (1, 2, 3, 4)]
    # the other micro-batches of the step still count
    assert all(0 < line["loss"] < 100 for line in log) and log[step - 1]["grad_norm"] == 0
    assert [line["consumed_samples"] for line in log] == [8, 16, 22, 30]


def test_a_resumed_run_whose_last_steps_are_skipped_has_a_model(model_path, tmp_path):
    step, _, _ = place_of_the_bad_sample(1)
    assert step > 1
    keys = dict(nan_policy="skip", resume_from_checkpoint="auto")
    for max_steps in (step - 1, step):
        arguments = (model_path, str(tmp_path), TORCH, "nan")
        [result] = world.run(train, 1, *arguments, **keys, max_steps=max_steps)
        assert not result["error"] and result["state"].global_step == max_steps
    assert read_log(tmp_path)[-1]["skipped_iter"] == 1


def test_nan_skip_limit_ends_the_run(model_path, tmp_path):
    keys = dict(nan_policy="skip", nan_skip_limit=2, max_steps=9)  # the bad sample comes thrice
    [result] = world.run(train, 1, model_path, str(tmp_path), TORCH, "nan", **keys)
    assert "nan_skip_limit" in result["error"] and 6 <= result["state"].global_step < 9


@pytest.mark.parametrize("backend", [MEGATRON, TORCH])
def test_an_evaluation_that_is_not_finite_is_no_early_stop(model_path, tmp_path, backend):
    keys = dict(eval_strategy="steps", eval_steps=2, early_stopping_patience=1)
    [result] = world.run(train, 1, model_path, str(tmp_path), backend, "evaluation", **keys)
    assert "after step 2 gave eval_loss nan" in result["error"]
    assert result["state"].best_global_step is None


@pytest.mark.parametrize("backend", [MEGATRON, TORCH])
def test_weights_that_are_not_finite_are_named_before_anything_is_trained(
    model_path, tmp_path, backend
):
    from safetensors.torch import save_file

    path, name = tmp_path / "model", "model.layers.3.self_attn.o_proj.weight"
    path.mkdir()
    for file in ("config.json", "generation_config.json"):
        (path / file).write_bytes((tmp_path.parent / model_path / file).read_bytes())
    weights = tensors(model_path)
    weights[name][1, 2] = math.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    [result] = world.run(train, 1, str(path), str(tmp_path / "out"), backend, "")
    wanted = name if backend == TORCH else "decoder.layers.3.self_attention.linear_proj.weight"
    assert f"before training: the weight {wanted} is not finite" in result["error"]


def test_samples_are_those_of_the_data_also_after_an_epoch_that_was_stopped():
    from types import SimpleNamespace as Record

    from mca_lite.callbacks import TrainerState
    from mca_lite.data_batches import BatchPlan
    from mca_lite.trainer_nonfinite import FiniteGuard

    plan, state = BatchPlan(12, 2, 2, 0, 1, seed=1), TrainerState(global_step=2, left_out_steps=1)
    args = Record(check_for_nan_in_loss_and_grad=False)
    trainer = Record(args=args, state=state, train_dataset=range(12), batch_plan=plan)
    guard = FiniteGuard(trainer)
    guard.start_step([])
    assert plan.steps_per_epoch == 3 and guard.step == 3
    assert [guard.samples_of(number) for number in (0, 1, 2)] == [*map(list, plan.step(1, 0)), []]


def test_samples_of_packs_are_those_of_the_data():
    from types import SimpleNamespace as Record

    from mca_lite.callbacks import TrainerState
    from mca_lite.data_batches import BatchPlan, Packs
    from mca_lite.trainer_nonfinite import FiniteGuard

    lengths = np.array([[6], [2], [5], [3], [9], [4]])  # in rows of 9: 4; 0 and 3; 2 and 5; 1
    data = Record(document_lengths=lengths, num_tokens=29, num_trained_tokens=29, fingerprint="")
    plan = BatchPlan(4, 2, 2, 0, 1, seed=1, shuffle=False)
    trainer = Record(
        args=Record(check_for_nan_in_loss_and_grad=False),
        state=TrainerState(),
        train_dataset=Packs(data, 9),
        batch_plan=plan,
    )
    guard = FiniteGuard(trainer)
    guard.start_step([])
    assert [guard.samples_of(number) for number in (0, 1)] == [[4, 0, 3], [2, 5, 1]]


# -- through the command line, in this process


def through_the_command_line(words: str) -> tuple[int, str]:
    """(exit code, what was said as an error)"""
    from mca_lite import cli

    commands.without_launcher()
    code, _, said = commands.ended(cli.main, words.split())
    return code, said


def stopped(tmp_path, words: str, config: str = "configs/sft.yaml") -> str:
    """The error of a run that has to end with the exit code for it, and to export nothing."""
    from mca_lite.trainer_nonfinite import NOT_FINITE_EXIT_CODE

    out = tmp_path / "out"
    words = f"{config} {SHORT} {words} cache_dir={tmp_path}/cache output_dir={out}"
    code, said = world.run(through_the_command_line, 1, words)[0]
    assert code == NOT_FINITE_EXIT_CODE == 86, said
    assert not list(out.glob("model*.safetensors"))
    return said


@pytest.mark.parametrize(
    "config, key", [("sft", "async_save=false"), ("sft", "async_save=true"), ("dpo", "bf16=false")]
)
def test_weights_that_explode_do_not_cost_the_good_checkpoint(tmp_path, config, key):
    """Step 1 has learning rate 0, step 2 spoils the weights, which are finite until step 3 uses
    them.
    """
    words = "learning_rate=1e30 warmup_steps=1 save_strategy=steps save_steps=1 save_total_limit=1"
    words += " model_name_or_path=configs/tiny/model train_from_scratch=true"
    words += " max_samples=50"  # of pairs: the reference model goes through all of them first
    said = stopped(tmp_path, f"{words} {key}", f"configs/{config}.yaml")
    assert "step 3: " in said and "Traceback" not in said
    good = tmp_path / "out" / "checkpoint-1"
    assert good.is_dir(), "the last good checkpoint was pruned for a bad one"
    assert re.search(r"checkpoint-2\b.*\bcheckpoint-1\b", said), said


@pytest.mark.parametrize("backend", ["use_mca=true", "use_mca=false"])
def test_fp16_that_skips_every_step_does_not_end_well(tmp_path, backend):
    said = stopped(tmp_path, f"{backend} fp16=true loss_scale=1e30")
    assert "every update of 3 steps was skipped" in said and "bf16" in said


# -- grad_norm_skip_threshold


def sums(trainer) -> tuple[float, float]:
    """The sums of this rank's weights, and of the optimizer's states, as absolute values."""
    from mca_lite.optim import parts_of

    optimizer = trainer.backend.optimizer
    inner = [getattr(part, "optimizer", part) for part in parts_of(optimizer)]
    states = [value for part in inner for state in part.state.values() for value in state.values()]
    tensors = list(trainer.model.parameters()), map(torch.as_tensor, states)
    weights, states = (sum(float(x.detach().double().abs().sum()) for x in of) for of in tensors)
    return weights, states


def run_with_a_spike(path: str, out: str, **keys) -> tuple[list, list]:
    """(sums after each step, warnings) of a run whose second step has a large gradient."""
    from mca_lite import McaTrainer

    class Spiky(McaTrainer):
        def _post_compute_loss(self, labels, losses):
            if self.state.global_step == 1:
                losses = losses * 1000
            return super()._post_compute_loss(labels, losses)

        def training_step(self, *args):
            answer = super().training_step(*args)
            after.append(sums(self))
            return answer

    after: list = []
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train_plainly(path, out, trainer_class=Spiky, warmup_steps=0, **keys)
    return after, [line for line in said.getvalue().splitlines() if "above" in line]


LARGE = {
    "tp2pp2": (4, {**TP2, **PP2}),
    "bf16": (1, dict(bf16=True)),
    "dist_opt": (2, DIST_OPT),
    "muon": (1, dict(optim="muon")),
    "torch": (2, dict(backend="torch")),
}


@pytest.mark.parametrize("layout", LARGE)
def test_an_update_with_a_large_gradient_norm_is_left_out(model_path, tmp_path, layout):
    ranks, keys = LARGE[layout]
    keys = dict(keys, grad_norm_skip_threshold=100.0)
    found = world.run(run_with_a_spike, ranks, model_path, str(tmp_path), **keys)
    for after, _ in found:
        assert after[0] == after[1] != after[2] != after[3]
    log = read_log(tmp_path)
    assert [line["skipped_iter"] for line in log] == [0, 1, 0, 0]
    assert log[1]["grad_norm"] > 1000 > 100 > log[2]["grad_norm"]
    [warning] = found[0][1]
    assert warning.startswith("warning: step 2: the gradient norm is ")
    assert "above 100 (grad_norm_skip_threshold)" in warning
    assert "(1 of at most 10 in a row, nan_skip_limit)" in warning


def limited(path: str, out: str, **keys) -> tuple[str, int]:
    from mca_lite.trainer_nonfinite import NotFiniteError

    with pytest.raises(NotFiniteError) as stopped:
        train_plainly(path, out, grad_norm_skip_threshold=1e-6, nan_skip_limit=2, **keys)
    return str(stopped.value)


@pytest.mark.parametrize("ranks, keys", [(4, {**TP2, **PP2}), (1, dict(backend="torch"))])
def test_more_large_norms_in_a_row_than_the_limit_end_the_run(model_path, tmp_path, ranks, keys):
    [error] = set(world.run(limited, ranks, model_path, str(tmp_path), **keys))
    assert error.startswith("step 3: the gradient norm is ")
    assert "as in the 2 steps before (nan_skip_limit)" in error and len(read_log(tmp_path)) == 2


def test_an_update_between_them_starts_the_count_anew():
    from types import SimpleNamespace as Record

    from mca_lite.trainer_nonfinite import FiniteGuard

    args = Record(
        check_for_nan_in_loss_and_grad=True, grad_norm_skip_threshold=1.0, nan_skip_limit=1
    )
    prints: list[str] = []
    trainer = Record(
        args=args,
        backend=Record(dp_rank=0),
        checkpoints=Record(prune=lambda: None),
        report=Record(print=prints.append),
    )
    guard = FiniteGuard(trainer)
    guard.step = 1
    for norm in (2.0, 0.5, 2.0, 0.5, 2.0):
        guard.after_step(int(norm > 1), norm, [])
    assert len(prints) == 3 and guard.dropped == 0
