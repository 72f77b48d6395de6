"""KTO in every layout trains as plain transformers and torch do: loss, metrics and gradient norm of
whole curves.
"""

import json

import pytest
import torch

from tests.shared import tiny, tiny_moe, world
from tests.shared.answers import (
    OF_PACKS,
    ROWS,
    STEPS,
    assert_every_rank_has,
    assert_resumed_bit_for_bit,
    cells_of_layouts,
    packs_of,
    wrong_of_layout,
)
from tests.shared.commands import error_of, run_script
from tests.shared.dpo_tools import curve_of, differences
from tests.shared.kto_tools import (
    OBJECTIVE,
    Answers,
    kto_run,
    logps_of,
    make_oracles,
    mismatched,
    oracle_curve,
    raw_answers,
    shifted,
    step_numbers,
)
from tests.shared.layouts import AUX, CP2, DIST_OPT, EP2, PACKED, PP2, TP2_SP, VPP2
from tests.shared.training import read_log, train

USUAL = {"one": ("full padded", "lora packed"), "tp2pp2": ("full padded",), "cp2": ("full packed",)}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """(model folder, folder of the adapter to start from, {kind: curve})"""
    folder = tmp_path_factory.mktemp("kto")
    path = tiny.save_model(folder / "model", "qwen3")
    [curves] = world.run(make_oracles, 1, path, str(folder), STEPS, timeout_s=120)
    estimates = [line["kl"] for line in curves["full"]]
    assert estimates[1] > 0 == estimates[2], "one above 0 and a clamped one are wanted"
    return path, f"{folder}/start", curves


@pytest.mark.parametrize("layout, cells", cells_of_layouts(USUAL))
def test_kto_trains_as_plain_torch(layout, cells, oracles, tmp_path):
    wrong = wrong_of_layout(kto_run, layout, cells, oracles, tmp_path)
    assert not wrong, wrong


# -- experts


def oracle_of(path) -> list:
    from transformers import AutoModelForCausalLM

    return oracle_curve(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


@pytest.mark.parametrize(
    "ranks, keys", [(2, EP2), (2, {**CP2, **EP2}), (4, {**EP2, **PP2}), (4, {**EP2, **TP2_SP})]
)
@pytest.mark.full
def test_experts_train_as_plain_torch(tmp_path, ranks, keys):
    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    [wanted] = world.run(oracle_of, 1, path)
    for rows in ROWS.values():
        assert_every_rank_has(wanted, ranks, kto_run, path, tmp_path / "run", {**keys, **rows})


def balanced_curves(path, out) -> list:
    """Of answers in rows, where the last step has a row that fills, and packed, without one."""
    runs = {
        name: dict(AUX, backend="torch", max_steps=STEPS, **rows) for name, rows in ROWS.items()
    }
    return [curve_of(kto_run(path, f"{out}/{name}", **keys)) for name, keys in runs.items()]


def test_rows_that_fill_have_no_part_in_the_weight_of_balancing_losses(tmp_path):
    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    [(padded, packed)] = world.run(balanced_curves, 1, path, str(tmp_path))
    assert not differences(padded, packed)


# -- rows, references, packs, evaluations, predictions, resume


def columns_of_passes(path, out, keys) -> list:
    """[(positions of the rows, tokens of the longest)] of each micro-batch of each pass."""
    found = []

    def spy(trainer):
        run = trainer.backend.forward_backward

        def recorded(step, batches, *more, **given):
            for batch in batches:
                mask = batch["padding_mask"]
                found.append((mask.shape[1], int((~mask).sum(1).max())))
            return run(step, batches, *more, **given)

        trainer.backend.forward_backward = recorded

    kto_run(path, out, before=spy, max_steps=1, **ROWS["padded"], **keys)
    return found


@pytest.mark.parametrize("keys", [dict(ref=True), dict(backend="torch")])
def test_answers_are_not_padded_to_the_length_of_mismatched_ones(oracles, tmp_path, keys):
    [found] = world.run(columns_of_passes, 1, oracles[0], str(tmp_path), keys)
    assert len({longest for _, longest in found}) > 1
    assert all(columns == max(longest, 1) for columns, longest in found)


def curves_of_references(path, adapter, out, keys) -> dict:
    """{kind: (curve, FLOPs of its steps over those of training alone)}"""
    from mca_lite.log import model_work

    given = {**keys, "max_steps": STEPS}
    kinds = {
        "full": dict(ref=True),
        "lora": dict(adapter=adapter, objective=dict(OBJECTIVE, reference="cached")),
    }
    found = {}
    for name, kind in kinds.items():
        run = kto_run(path, f"{out}/{name}", **given, **kind)
        of_training = model_work(run.model).flops(10, 100)
        found[name] = curve_of(run), run.work.flops(10, 100) / of_training
    return found


@pytest.mark.parametrize("keys", [PP2, pytest.param(CP2, marks=pytest.mark.full)])
def test_a_second_model_and_a_cached_reference_of_adapters_give_the_same(oracles, tmp_path, keys):
    path, adapter, curves = oracles
    found = world.run(curves_of_references, 2, path, adapter, str(tmp_path), keys)
    # mismatched answers pass forward, and both kinds of answers through a second model
    for name, least, most in ("full", 2, 2), ("lora", 4 / 3, 1.5):
        curve, flops = found[-1][name]
        assert not differences(curve, curves[name])
        assert least <= flops <= most


def oracle_of_packs(path) -> list:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return oracle_curve(model, packs=packs_of(Answers()))


@pytest.mark.parametrize(
    "keys", [{**PP2, **VPP2}, pytest.param(dict(backend="torch"), marks=pytest.mark.full)]
)
def test_packs_weigh_every_answer_alike(oracles, tmp_path, keys):
    [wanted] = world.run(oracle_of_packs, 1, oracles[0])
    assert_every_rank_has(wanted, 2, kto_run, oracles[0], tmp_path, {**keys, **OF_PACKS})


def test_a_rank_with_padding_alone_takes_part_in_a_step(tmp_path):
    """Of three answers two ranks get two packs and one. Latent attention takes no empty row."""
    path = tiny.save_model(tmp_path / "model", "deepseek_v3")
    [wanted] = world.run(oracle_of, 1, path)
    keys = dict(sequence_packing=True, max_steps=2)
    assert_every_rank_has(wanted, 2, kto_run, path, tmp_path, keys)


def evaluated(path, out, keys) -> tuple:
    """(metrics of an evaluation, predictions), of a model after a step, and its folder."""
    data = dict(eval_dataset=Answers(), per_device_eval_batch_size=8)
    trainer = kto_run(path, out, **{**keys, **data, "max_steps": 1, "global_batch_size": 8})
    found = trainer.evaluate(), trainer.predict(trainer.eval_dataset)
    trainer.save_model()
    return found


def expected(path, trained) -> tuple:
    """The same by plain transformers: one step over all answers, and one block of them."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(p).float().eval() for p in (path, trained)]
    raw = raw_answers()
    others = mismatched(raw, block=8)
    documents = [shifted(*one[:2]) for one in raw]
    with torch.no_grad():
        reference, of_others = (logps_of(models[0], part) for part in (documents, others))
        every = list(range(len(raw)))
        _, metrics = step_numbers(models[1], every, raw, others, reference, of_others, OBJECTIVE)
        return metrics, logps_of(models[1], documents).tolist()


@pytest.mark.parametrize("ranks, keys", [(1, PACKED), pytest.param(2, PP2, marks=pytest.mark.full)])
def test_evaluations_and_predictions_are_of_the_answers(oracles, tmp_path, ranks, keys):
    metrics, output = world.run(evaluated, ranks, oracles[0], str(tmp_path), keys)[0]
    [(wanted, logps)] = world.run(expected, 1, oracles[0], str(tmp_path))
    for key, value in wanted.items():
        assert metrics[f"eval_{key}"] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    assert output.predictions[:, 0] == pytest.approx(logps, rel=1e-5)
    assert output.metrics.keys() == {"test_loss"}


def logs_of_good_answers(path, out, keys) -> list[dict]:
    raw = [(prompt, answer, 1.0) for prompt, answer, _ in raw_answers()]
    data = dict(train_dataset=Answers(raw), eval_dataset=Answers(raw))
    run = kto_run(path, out, **data, eval_strategy="steps", eval_steps=1, max_steps=1, **keys)
    return run.state.log_history


def test_numbers_of_bad_answers_are_left_out_where_there_is_none(oracles, tmp_path):
    lines, others = world.run(logs_of_good_answers, 2, oracles[0], str(tmp_path), DIST_OPT)
    assert len(lines) == len(others) == 2
    for line, start in zip(lines, ("", "eval_"), strict=True):
        assert {f"{start}kl", f"{start}rewards/chosen", f"{start}logps/chosen"} <= line.keys()
        assert not {f"{start}rewards/rejected", f"{start}logps/rejected"} & line.keys()


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.full)])
def test_resume_is_bit_for_bit(oracles, tmp_path, kind):
    path, adapter, _ = oracles
    keys = dict(adapter=adapter if kind == "lora" else None)
    assert_resumed_bit_for_bit(kto_run, path, tmp_path, keys)


# -- what is refused, and the pairs of prompts and answers


def test_answers_shift_by_one_within_blocks():
    from mca_lite.part_kto import Mismatched

    view = Mismatched(Answers(), 3)
    assert [view.partner(i) for i in range(7)] == [2, 0, 1, 5, 3, 4, 5]
    wanted = mismatched(raw_answers()[:6], block=3)
    for got, document in zip(map(view.__getitem__, range(6)), wanted, strict=False):
        for name, column in document.items():
            assert got[1][name].tolist() == column.tolist()
        assert got[0]["answer_label"] == got[1]["answer_label"]
    assert len(Mismatched(Answers(), 3, cutoff_len=4)[1][1]["labels"]) == 4
    views = [Mismatched(Answers(), *more) for more in ((3,), (4,), (3, 4), (3, 5))]
    assert len({view.fingerprint for view in views}) == len(views)


def refusals(path, out) -> list[str]:
    gap = {"input_ids": [1, 2, 3, 4], "labels": [2, -100, 4, 5], "answer_label": 1}
    odd = {**gap, "labels": [-100, 3, 4, 5], "answer_label": 2}
    plain = {name: gap[name] for name in ("input_ids", "labels")}
    weighed = {**odd, "answer_label": 1, "pair_weight": 2.0}
    cases = [[plain] * 2, [gap], [gap] * 2, [odd] * 2, [weighed] * 4]
    said = [error_of(kto_run, path, f"{out}/{n}", train_dataset=c) for n, c in enumerate(cases)]
    more = [dict(calculate_per_token_loss=False), dict(pack=30), dict(objective=dict(beta=-1))]
    said += [error_of(kto_run, path, f"{out}/more", **keys) for keys in more]
    return [*said, error_of(train, path, f"{out}/sft", data=[weighed] * 4)]


def test_what_cannot_be_trained_is_refused(oracles, tmp_path):
    [said] = world.run(refusals, 1, oracles[0], str(tmp_path))
    words = ["with answer_label", "two samples", "labels in several parts", "answer_label 2"]
    words += ["stage kto has no pairs"]
    words += ["calculate_per_token_loss: true", "sequence_packing is false", "pref_beta"]
    words += ["the samples have answer_label, pair_weight, without an effect"]
    for text, expected_words in zip(said, words, strict=True):
        assert expected_words in text


# -- the command line


def test_the_example_gives_the_same_numbers_on_two_ranks_and_on_plain_torch(tmp_path):
    short = (
        "configs/kto.yaml model_name_or_path=configs/tiny/model train_from_scratch=true "
        "max_steps=3 logging_steps=1 eval_steps=3 global_batch_size=8 max_samples=24 "
        "per_device_train_batch_size=4 per_device_eval_batch_size=12"
    )
    layouts = {"pp2": "pipeline_model_parallel_size=2", "torch": "use_mca=false"}
    logs = {}
    for name, keys in layouts.items():
        words = f"{short} {keys} do_predict=true output_dir={tmp_path / name}"
        shown = run_script(words, tmp_path, nproc=2 if name == "pp2" else 1).stdout
        assert "kto, beta 0.1" in shown and "reference model: 24" in shown
        assert "warning" not in shown
        logs[name] = read_log(tmp_path / name)
        lines = (tmp_path / name / "predictions.jsonl").read_text().splitlines()
        assert len(lines) == 24 and json.loads(lines[0])["tokens"] > 0
    assert {"eval_kl", "eval_rewards/accuracies"} <= logs["torch"][-1].keys()
    for ours, theirs in zip(logs["pp2"], logs["torch"], strict=True):
        for key in theirs:
            if key.removeprefix("eval_").startswith(("loss", "kl", "rewards/c", "logps", "grad")):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-5), key
    first, *_ = logs["torch"]
    # policy and reference are one model: half of the weights of both kinds
    assert first["loss"] == pytest.approx(0.5) and first["kl"] == 0
