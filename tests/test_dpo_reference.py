"""The reference model of DPO: its three kinds give one curve; the cached one is kept, resumed,
refused where it is foreign.
"""

import contextlib
import functools
import io
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.shared import small_runs, tiny, world
from tests.shared.dpo_tools import (
    COUNT,
    OBJECTIVES,
    STEPS,
    Pairs,
    curve_of,
    differences,
    oracle_metrics,
    our_run,
    references_of,
)
from tests.shared.layouts import CP2, OVERLAP, PP2, TP2, VPP2
from tests.shared.training import refusal

SIGMOID = OBJECTIVES["sigmoid"]


@pytest.fixture(scope="module")
def adapted_start(tmp_path_factory):
    """(model folder, folder of an adapter that was trained before)"""
    folder = tmp_path_factory.mktemp("reference")
    path = tiny.save_model(folder / "model", "qwen3")
    world.run(save_adapter, 1, path, f"{folder}/adapter")
    return path, f"{folder}/adapter"


def save_adapter(path, folder):
    from tests.shared.lora_tools import peft_model

    peft_model(path).save_pretrained(folder)


def curve_of_run(path, out, objective=SIGMOID, **keys) -> list:
    return curve_of(our_run(path, out, objective, **keys))


def curves_of_kinds(path, adapter, out, keys) -> dict:
    kinds = {
        "adapter": dict(adapter=adapter),
        "cached": dict(adapter=adapter, objective={**SIGMOID, "reference": "cached"}),
        "model": dict(adapter=adapter, ref=True),
        "full cached": {},
        "full model": dict(ref=True),
    }
    keys = dict(keys, eval_strategy="steps", eval_steps=STEPS)
    found = {}
    for name, kind in kinds.items():
        trainer = our_run(
            path,
            f"{out}/{name}",
            **{"objective": SIGMOID, **keys, **kind},
            eval_dataset=Pairs(5, seed=3),
        )
        [evaluated] = [line for line in trainer.state.log_history if "eval_loss" in line]
        evaluated = {
            key.removeprefix("eval_"): value
            for key, value in evaluated.items()
            if key.startswith("eval_")
        }
        found[name] = [*curve_of(trainer), {**evaluated, "grad_norm": 0, "consumed_tokens": 0}]
    return found


@pytest.mark.parametrize(
    "ranks, keys",
    [
        # Each kind alone is compared with plain torch at tp2 and pp2_vpp2 in test_dpo, a second
        # model at ep2tp2 in test_dpo_moe.
        pytest.param(2, {**PP2, **VPP2}, marks=pytest.mark.full),
        (2, {**OVERLAP, "sequence_packing": True}),
        pytest.param(2, dict(TP2, attention_dropout=0.0), marks=pytest.mark.full),
        (2, dict(backend="torch")),
        (2, {**PP2, **VPP2, "pack": 35, "sequence_packing": True}),
    ],
    ids=["pp2_vpp2", "dp2_overlap_packed", "tp2", "torch", "pp2_vpp2_packs"],
)
def test_all_kinds_of_reference_give_the_same_curve(adapted_start, tmp_path, ranks, keys):
    found = world.run(curves_of_kinds, ranks, *adapted_start, str(tmp_path), keys)
    assert found[0] == found[1], "every rank logs the same"
    for name, wanted in (
        ("cached", "adapter"),
        ("model", "adapter"),
        ("full model", "full cached"),
    ):
        assert not differences(found[0][name], found[0][wanted], 2e-6), name
    assert differences(found[0]["adapter"], found[0]["full cached"]), (
        "the adapter is not part of the reference"
    )


def metrics_before_and_after(path, out) -> list:
    """Evaluations over nine pairs, in micro-batches of two, before training and after each second
    step; the final model.
    """
    before = []
    data = dict(
        train_dataset=Pairs(17),
        eval_dataset=Pairs(9, seed=3),
        before=lambda trainer: before.append(trainer.evaluate()),
    )
    keys = dict(
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=2,
        max_steps=4,
        logging_steps=2,
    )
    trainer = our_run(path, out, OBJECTIVES["smoothed"], **data, **keys, **PP2)
    trainer.save_model()
    return before + trainer.state.log_history


def expected_metrics(path, trained) -> list:
    import torch
    from transformers import AutoModelForCausalLM

    pairs, found = Pairs(9, seed=3).pairs, []
    models = [
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (path, trained)
    ]
    references = references_of(models[0], pairs)
    for model in models:
        found.append(oracle_metrics(model, pairs, references, OBJECTIVES["smoothed"]))
    return found


def test_evaluation_and_the_log_window_mean_over_pairs(adapted_start, tmp_path):
    path, _ = adapted_start
    history = world.run(metrics_before_and_after, 4, path, str(tmp_path / "run"))[0]
    [[before, after]] = world.run(expected_metrics, 1, path, str(tmp_path / "run"))
    evaluated = [line for line in history if "eval_loss" in line]
    assert [line.get("step") for line in evaluated] == [None, 2, 4]
    for line, wanted in ((history[0], before), (evaluated[-1], after)):
        got = {
            key.removeprefix("eval_"): value
            for key, value in line.items()
            if key.startswith("eval_")
        }
        assert not differences([got], [wanted], 2e-5)
    keys = dict(max_steps=4, train_dataset=Pairs(17))
    each = world.run(curve_of_run, 1, path, str(tmp_path / "each"), OBJECTIVES["smoothed"], **keys)[
        0
    ]
    windows = [line for line in history if "loss" in line]
    assert len(windows) == 2
    for window, (first, second) in zip(windows, (each[:2], each[2:]), strict=True):
        for key in ("loss", "rewards/margins", "logps/rejected", "sft_loss"):
            assert window[key] == pytest.approx((first[key] + second[key]) / 2, abs=1e-4), key


SAVE = dict(save_strategy="steps", save_steps=2)


def pairs_whole_and_resumed(path, out, kept: bool, keys) -> tuple:
    """(curve of a run, curve of what goes on from its checkpoint-2, samples of which it knows)"""
    import torch.distributed as dist

    objective = {**SIGMOID, "cache_dir": f"{out}/cache"} if kept else SIGMOID
    keys = {**SAVE, "max_steps": 3, **keys}
    whole = curve_of_run(path, f"{out}/parts", objective, **keys)
    dist.barrier()
    if dist.get_rank() == 0:
        for folder in Path(out, "parts").glob("checkpoint-*"):
            if folder.name != "checkpoint-2":
                shutil.rmtree(folder)
    dist.barrier()
    trainer = our_run(path, f"{out}/parts", objective, resume_from_checkpoint="auto", **keys)
    return whole, curve_of(trainer), trainer.state.consumed_samples


@pytest.mark.parametrize("kind", ["kept", "computed_again", "adapter", "packs"])
def test_resume_is_bit_for_bit(adapted_start, tmp_path, kind):
    path, adapter = adapted_start
    keys = dict(PP2, attention_dropout=0.1)
    if kind == "adapter":
        keys.update(adapter=adapter)
    if kind == "packs":
        keys.update(pack=35, sequence_packing=True)
    whole, parts, samples = world.run(
        pairs_whole_and_resumed, 2, path, str(tmp_path), kind == "kept", keys
    )[0]
    assert parts == whole and len(whole) == 3 and samples


def curve_and_printed(path, out, **keys) -> tuple:
    """(curve or error, what was printed) of a run."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            found = curve_of_run(path, out, **keys)
        except ValueError as error:
            found = f"{type(error).__name__}: {error}"
    return found, said.getvalue()


def test_the_cached_reference_is_kept_and_goes_on_where_it_stopped(adapted_start, tmp_path):
    path, _ = adapted_start
    keys = dict(
        objective={**SIGMOID, "cache_dir": str(tmp_path / "cache")},
        overwrite_output_dir=True,
        train_dataset=Pairs(9),
    )
    first, said = world.run(curve_and_printed, 1, path, str(tmp_path / "a"), **keys)[0]
    assert "9 of 9 pairs" in said
    [folder] = (tmp_path / "cache/reference").iterdir()
    whole = stored(folder)
    # a second run, in another layout, reads it
    again, said = world.run(curve_and_printed, 2, path, str(tmp_path / "b"), **PP2, **keys)[0]
    assert said.count("9 of 9 pairs in") == 1 and not differences(again, first)
    # a pass that died after 8 pairs
    [part] = folder.glob("*.rows")
    part.unlink()
    kept = [whole[:4], whole[4:8] + 0.25]  # to be known again
    store_of(folder, *kept)
    again, said = world.run(curve_and_printed, 1, path, str(tmp_path / "c"), **keys)[0]
    assert "8 of 9 pairs" in said and "9 of 9 pairs" in said and len(again) == STEPS
    np.testing.assert_allclose(stored(folder), np.concatenate([*kept, whole[8:]]), atol=1e-5)


def store_of(folder: Path, *parts: np.ndarray):
    """The store of a folder that another one has written, with more parts."""
    from mca_lite import DPOTrainer
    from mca_lite.part_scores import RowStore

    identity = json.loads((folder / "meta.json").read_text())
    store = RowStore(folder, identity, DPOTrainer.row_type).load()
    for logps in parts:
        rows = np.zeros(len(logps), DPOTrainer.row_type)
        rows["logps"] = logps
        store.parts.append(store.write(rows))
    return store


def stored(folder: Path) -> np.ndarray:
    """float32 [pairs, 2], in the order of the data set."""
    return store_of(folder).read()["logps"]


def asked_to_stop(path, out, cache) -> tuple:
    """(exit code, what was printed, steps made) of a run that gets SIGTERM on its last rank in the
    first part of the pass.
    """
    from mca_lite import DPOTrainer

    DPOTrainer.part_rows = 4
    said = io.StringIO()

    def at_first_part(trainer):
        by_sample = trainer.evaluator.by_sample

        def scored(*args):
            if int(os.environ["RANK"]) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return by_sample(*args)

        trainer.evaluator.by_sample = scored

    code = None
    with contextlib.redirect_stdout(said):
        try:
            our_run(path, out, {**SIGMOID, "cache_dir": cache}, before=at_first_part)
        except SystemExit as stop:
            code = stop.code
    return code, said.getvalue()


def test_a_reference_pass_stops_between_two_parts_when_asked_to(adapted_start, tmp_path):
    found = world.run(
        asked_to_stop, 2, adapted_start[0], str(tmp_path / "run"), str(tmp_path / "cache")
    )
    assert [code for code, _ in found] == [85, 85]
    assert "SIGTERM: stopped in the reference model's pass" in found[0][1]
    [folder] = (tmp_path / "cache/reference").iterdir()
    assert 0 < len(stored(folder)) < COUNT


def test_a_cached_reference_of_another_model_or_other_data_is_refused(adapted_start, tmp_path):
    path, _ = adapted_start
    other = tiny.save_model(tmp_path / "other", "qwen3", seed=1)
    cache = tmp_path / "cache"
    keys = dict(objective={**SIGMOID, "cache_dir": str(cache)}, overwrite_output_dir=True)
    world.run(curve_and_printed, 1, path, str(tmp_path / "a"), **keys, **SAVE)
    [folder] = (cache / "reference").iterdir()
    world.run(curve_and_printed, 1, other, str(tmp_path / "b"), **keys)
    [theirs] = {f.name for f in (cache / "reference").iterdir()} - {
        folder.name
    }  # another model has a folder of its own
    [kept] = folder.glob("*.rows")
    kept.rename(tmp_path / kept.name)
    [(_, foreign)] = store_of(folder, stored(cache / "reference" / theirs)).parts
    found, _ = world.run(curve_and_printed, 2, path, str(tmp_path / "c"), **keys)[1]
    assert "are of another reference model: it gave" in found and str(folder) in found
    assert not (tmp_path / "c" / "trainer_log.jsonl").exists(), "nothing was trained"
    foreign.unlink()
    (tmp_path / kept.name).rename(kept)
    # a run goes on with the reference that it began with
    keys["overwrite_output_dir"] = False
    keys["resume_from_checkpoint"] = "auto"
    found, _ = world.run(curve_and_printed, 1, other, str(tmp_path / "a"), **keys, **SAVE)[0]
    assert "trained against another reference model" in found


def train_each(runs: list[dict]) -> None:
    for keys in runs:
        small_runs.train_by_words(keys)


def test_drawn_models_of_two_seeds_and_two_precisions_have_folders_of_their_own(
    adapted_start, tmp_path
):
    path = shutil.copytree(adapted_start[0], tmp_path / "model")
    small_runs.save_tokenizer(path)
    small_runs.write_data(tmp_path)
    keys = dict(model_name_or_path=str(path), train_from_scratch=True, use_mca=False, stage="dpo")
    keys |= dict(dataset=f"{tmp_path}/pairs.jsonl", cache_dir=f"{tmp_path}/cache", cutoff_len=40)
    keys |= dict(max_steps=1, save_strategy="no", save_hf_model=False, disable_tqdm=True)
    others = [{}, dict(seed=7, data_seed=42), dict(bf16=True)]
    runs = [dict(keys, output_dir=f"{tmp_path}/{i}", **other) for i, other in enumerate(others)]
    world.run(train_each, 1, runs)
    assert len(list((tmp_path / "cache/reference").iterdir())) == 3


def refused_runs(path, adapter, out) -> list[str]:
    """What DPOTrainer and DPOConfig say to what cannot be."""
    from types import SimpleNamespace

    from mca_lite import DPOConfig, DPOTrainer
    from mca_lite.data_batches import Collator

    def one_sided(samples):
        batch = {
            key: value[:, :5] * (value[:, :5] < 2) for key, value in Collator(0)(samples).items()
        }
        batch["labels"][batch["attention_mask"] == 0] = -100
        return batch

    def forgetful(samples):
        return {key: value for key, value in Collator(0)(samples).items() if key != "reference"}

    orpo, plain = dict(pref_loss="orpo"), tiny.samples(4)
    scored, labelled = ([{**Pairs()[0], name: 1}] * 4 for name in ("reference", "answer_label"))
    weighed = [Pairs()[0], *({**Pairs()[i], "pair_weight": 0.5} for i in (1, 2, 3))]
    of_four = dict(per_device_train_batch_size=4)
    trained = our_run(path, f"{out}/ok", SIGMOID, max_steps=1)
    return [
        refusal(lambda: DPOConfig(pref_loss="ranked")),
        refusal(lambda: DPOConfig(pref_loss="orpo", use_ref_model=True)),
        refusal(lambda: DPOConfig(pref_loss="sigmoid", use_ref_model=False)),
        refusal(lambda: DPOConfig(pref_loss="orpo", label_smoothing=0.1)),
        refusal(lambda: DPOConfig(beta=-1.0)),
        refusal(lambda: our_run(path, f"{out}/a", orpo, ref=True)),
        refusal(lambda: our_run(path, f"{out}/b", SIGMOID, train_dataset=plain)),
        refusal(lambda: our_run(path, f"{out}/c", {**SIGMOID, "reference": "adapter"})),
        refusal(lambda: our_run(path, f"{out}/d", {**SIGMOID, "reference": "cached"}, ref=True)),
        refusal(lambda: our_run(path, f"{out}/e", SIGMOID, calculate_per_token_loss=False)),
        refusal(lambda: our_run(path, f"{out}/h", SIGMOID, pack=35)),
        refusal(lambda: trained.evaluate(Pairs(3, seed=9))),
        refusal(
            lambda: DPOTrainer(
                SimpleNamespace(config=SimpleNamespace(mtp_num_layers=1), lora=None),
                args=trained.args,
            )
        ),
        refusal(lambda: our_run(path, f"{out}/f", SIGMOID, collator=one_sided)),
        refusal(lambda: our_run(path, f"{out}/g", SIGMOID, collator=forgetful)),
        refusal(lambda: our_run(path, f"{out}/i", SIGMOID, train_dataset=scored)),
        refusal(lambda: our_run(path, f"{out}/j", orpo, train_dataset=labelled)),
        refusal(lambda: our_run(path, f"{out}/k", orpo, train_dataset=weighed, **of_four)),
    ]


def test_what_cannot_be_trained_is_refused_before_training(adapted_start, tmp_path):
    [texts] = world.run(refused_runs, 1, *adapted_start, str(tmp_path))
    words = [
        "expected one of sigmoid, sigmoid_norm", "has no reference model", "has a reference model",
        "dpo_label_smoothing: 0.1",
        "pref_beta: -1.0", "leave ref_model out", "a data set of pairs, or stage: sft",
        "there are no adapters to switch off",
        "expected no ref_model", "calculate_per_token_loss: true",
        "packs, and sequence_packing is false", "before it is trained",
        "mtp_num_layers: 0",
        "chosen and rejected in turn", 'dropped "reference"', "the samples have reference",
        "the samples have answer_label, without an effect", "have no pair_weight",
    ]  # fmt: skip
    for text, expected in zip(texts, words, strict=True):
        assert expected in text
    # only what is in the batches of the first step shows as late as that
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "j", "k", "ok"], (
        "nothing else was written"
    )


def test_a_first_sample_without_documents_is_refused():
    from mca_lite import DPOTrainer

    with pytest.raises(ValueError, match="0 documents"):
        DPOTrainer.check_samples([[]])


def scores(path, adapter, out, keys) -> tuple:
    """(what the reference says, twice, and a second model as the reference; whether the policy
    trains on) of a model in training, with dropout.
    """
    from mca_lite import AutoModel, DPOConfig, DPOTrainer, TrainingArguments
    from mca_lite.part_lora import load_adapter
    from mca_lite.part_lora_sites import adapters_of

    args = TrainingArguments(output_dir=out, attention_dropout=0.3, hidden_dropout=0.3, **keys)
    model, second = (AutoModel.from_pretrained(path, args) for _ in range(2))
    trainer = DPOTrainer(load_adapter(model, adapter, 0.3), DPOConfig(), second, args)
    trainer.backend.train_mode(True)

    def log_probs(chunks, batches):
        length = batches[0]["input_ids"].shape[1]
        found = trainer.compute_reference_log_probs(chunks, batches, length) or ()
        return [torch.stack(list(of_batch.values()), -1) for of_batch in found]

    found = []
    for chunks in (trainer.models, trainer.models, trainer.ref_chunks):
        run = functools.partial(log_probs, chunks)
        found.append(trainer.evaluator.by_sample(Pairs(), run, (2,)).tolist())
    return found, all(adapter.enabled for adapter in adapters_of(trainer.model)) and trainer.models[
        0
    ].training


def expected_scores(path) -> list:
    import torch
    from transformers import AutoModelForCausalLM

    return references_of(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), Pairs().pairs
    )


def test_the_reference_has_neither_dropout_nor_adapters(adapted_start, tmp_path):
    [wanted] = world.run(expected_scores, 1, adapted_start[0])
    for (first, again, of_second), in_training in world.run(
        scores, 2, *adapted_start, str(tmp_path), dict(PP2)
    ):
        assert first == again and in_training
        np.testing.assert_allclose(first, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(of_second, wanted, rtol=1e-5, atol=1e-5)


class EvenPairs(Pairs):
    """Pairs whose rows have one length."""

    def __init__(self, *args):
        super().__init__(*args)
        for pair in self.pairs:
            chosen = pair["chosen"]
            for name, filling in (("input_ids", 3), ("labels", 5)):
                more = 20 - len(chosen[name])
                chosen[name] = torch.cat([chosen[name], chosen[name].new_full((more,), filling)])


def joined_and_apart(path, out, dataset, few, keys) -> list:
    """For runs whose reference takes all micro-batches at once, two, two with few tokens, and each
    by itself: the curve, and how many forward passes each step had."""
    from mca_lite import part_dpo

    found, two = [], part_dpo.JOINED
    for joined, tokens in ((4, 2**14), (two, 2**14), (two, few), (4, 0)):
        part_dpo.JOINED, part_dpo.JOINED_TOKENS, passes = joined, tokens, []

        def count(trainer, passes=passes):
            compute = trainer.compute_reference_log_probs

            def counted(models, batches, seq_length):
                passes.append(len(batches))
                return compute(models, batches, seq_length)

            trainer.compute_reference_log_probs = counted

        of_run = dict(ref=True, before=count, train_dataset=dataset(), **keys)
        trainer = our_run(path, f"{out}/{joined}-{tokens}", SIGMOID, **of_run)
        curve = curve_of(trainer)
        del curve[0]["rewards/accuracies"]  # policy and reference are one: rounding decides
        found.append((curve, passes))
    return found


@pytest.mark.parametrize(
    "ranks, dataset, few, keys, passes",
    [
        (1, Pairs, 35, dict(sequence_packing=True), [[1, 1], [2, 2], [2, 2], [4, 3]]),
        (1, EvenPairs, 90, {}, [[1, 1], [2, 2], [2, 2], [4, 3]]),
        (1, Pairs, 90, {}, None),  # rows of many lengths
        (2, Pairs, 35, dict(sequence_packing=True, **OVERLAP), [[1, 1], [1, 1], [1, 1], [2, 2]]),
        (2, Pairs, 50, dict(sequence_packing=True, **CP2), [[1, 1], [2, 2], [2, 2], [4, 3]]),
        (2, EvenPairs, 90, PP2, [[4, 3]] * 4),
    ],
    ids=["packed", "rows", "uneven rows", "packed dp2", "packed cp2", "pp2"],
)
def test_the_reference_takes_micro_batches_at_once(
    ranks, dataset, few, keys, passes, adapted_start, tmp_path
):
    keys = dict(keys, per_device_train_batch_size=1)
    found = world.run(joined_and_apart, ranks, adapted_start[0], str(tmp_path), dataset, few, keys)[
        -1
    ]
    curves, of_steps = zip(*found, strict=True)
    assert passes in (None, list(of_steps))
    for curve in curves[:-1]:
        for ours, theirs in zip(curve, curves[-1], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "stages, of_reference, joins",
    [
        (1, {}, True),
        (2, {}, False),
        (1, dict(num_moe_experts=4), False),  # what they drop or gather follows the batch
        (1, dict(attn_logit_softcapping=50.0), False),  # scores are held whole
    ],
)
def test_what_depends_on_the_shape_of_a_batch_is_not_joined(stages, of_reference, joins):
    from mca_lite.backend_megatron import MegatronBackend

    backend = MegatronBackend.__new__(MegatronBackend)
    backend.config = SimpleNamespace(pipeline_model_parallel_size=stages)
    config = dict(num_moe_experts=None, attn_logit_softcapping=None) | of_reference
    assert backend.joins_rows([SimpleNamespace(config=SimpleNamespace(**config))]) is joins


def work(path: str, adapter: str, out: str) -> dict:
    """{reference: (weights, those that run forward only beside)} as the log counts them."""
    cases = {
        "cached": dict(adapter=adapter, objective={**SIGMOID, "reference": "cached"}),
        "adapter": dict(adapter=adapter, objective={**SIGMOID, "reference": "adapter"}),
        "model": dict(objective=SIGMOID, ref=True),
        "orpo": dict(objective=dict(pref_loss="orpo")),
    }
    found = {}
    for name, keys in cases.items():
        of_step = our_run(path, f"{out}/{name}", max_steps=1, **keys).work
        beside = 0 if of_step.reference is None else of_step.reference.weights
        found[name] = of_step.frozen + of_step.trained, beside
    return found


def test_the_log_counts_a_reference_that_runs_beside(adapted_start, tmp_path):
    [found] = world.run(work, 1, *adapted_start, str(tmp_path))
    whole = found["model"][0]
    assert found["model"] == (whole, whole)  # 4/3 of the model's own work
    assert found["adapter"][1] == whole < found["adapter"][0]
    assert found["cached"][1] == found["orpo"][1] == 0


def scored_by_itself(path: str, out: str) -> list[str]:
    from mca_lite import AutoModel, DPOConfig, DPOTrainer, TrainingArguments
    from mca_lite.part_distill import DistillConfig, DistillTrainer

    args = TrainingArguments(output_dir=out)
    model = AutoModel.from_pretrained(path, args)
    distills = DistillTrainer(model, DistillConfig(), model, args, train_dataset=tiny.samples(2))
    return [
        refusal(lambda: DPOTrainer(model, DPOConfig(reference="model"), model, args)),
        refusal(distills.train),
    ]


def identities(path: str, out: str) -> list[str]:
    """Of a cached reference, with rotary factors that a run's keys may change."""
    from mca_lite import AutoModel, DPOConfig, DPOTrainer, TrainingArguments

    args = TrainingArguments(output_dir=out)
    found = []
    for factor in (2.0, 30.0, 2.0):
        model = AutoModel.from_pretrained(path, args)
        model.config.hf_config["rope_parameters"] = {"rope_type": "linear", "factor": factor}
        trainer = DPOTrainer(model, DPOConfig(reference="cached"), args=args)
        found.append(str(trainer.facts_of_model(Path(out))))
    return found


def test_stored_scores_are_those_of_one_rotary_scaling(adapted_start, tmp_path):
    [found] = world.run(identities, 1, adapted_start[0], str(tmp_path))
    assert found[0] == found[2] != found[1]


def test_the_trained_model_is_not_its_own_reference_or_teacher(adapted_start, tmp_path):
    said = world.run(scored_by_itself, 1, adapted_start[0], str(tmp_path))[0]
    assert all("is the trained model itself, which would be frozen" in one for one in said)
