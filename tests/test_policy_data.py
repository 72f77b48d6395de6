"""Rollouts in files: five spellings of one record, shifted alike; records that cannot be trained;
columns that are computed before training; runs from the command line.
"""

import base64
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from mca_lite import DataArguments, load_datasets
from mca_lite.args import parse_args
from mca_lite.part_policy import group_advantages, sampler_weights
from mca_lite.part_stream_keys import StreamArguments
from tests.shared import tiny, world
from tests.shared.commands import keys_of, run_all
from tests.shared.layouts import CP2, PACKED, PP2
from tests.shared.policy_tools import rollouts, write_rollouts
from tests.shared.small_runs import save_tokenizer
from tests.shared.training import read_log, refusal

FULL = pytest.mark.full
IDS, PROMPT = [5, 9, 7, 2, 11, 3], 2
MASK, LOGPS = [0, 0, 1, 0, 1, 1], [0.0, 0.0, -0.5, -1.0, -1.5, -2.0]
REF, GAINS = [0.0, 0.0, -0.25, -1.25, -1.75, -2.25], [0, 0, 1.0, 2.0, 3.0, 4.0]
REST = {"ref_logprobs": REF, "temperature": 0.5}
OF_ANSWER = {"ref_logprobs": REF[PROMPT:], "temperature": 0.5}
SPELLINGS = {
    "ids": {"ids": IDS, "mask": MASK, "logprobs": LOGPS, "advantages": GAINS, **REST},
    "token_ids": {"token_ids": IDS, "mask": MASK, "logprobs": LOGPS, "advantages": GAINS, **REST},
    "tokens": {
        "tokens": IDS, "response_length": 4, "loss_mask": MASK[PROMPT:],
        "rollout_log_probs": LOGPS[PROMPT:], "advantage": GAINS[PROMPT:], **OF_ANSWER,
    },
    "input_ids": {
        "input_ids": IDS, "loss_mask": MASK, "logprobs": [None, *LOGPS[1:]],
        "advantages": GAINS[PROMPT:], **OF_ANSWER,
    },
    "response_ids": {
        "prompt_ids": IDS[:PROMPT], "response_ids": IDS[PROMPT:], "response_mask": MASK[PROMPT:],
        "logprobs": LOGPS[PROMPT:], "advantages": GAINS, **OF_ANSWER,
    },
    "old_log_probs": {
        "ids": IDS, "mask": MASK, "old_log_probs": LOGPS, "ref_log_prob": REF, "advantages": GAINS,
        "temperature": 0.5,
    },
    "a sample's": {
        "ids": IDS, "mask": MASK, "old_logp": LOGPS, "ref_logp": REF, "advantage": GAINS,
        "temperature": 0.5,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from mca_lite.model_config import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(folder, False)


def load(path, tokenizer, tmp_path, **keys):
    stream = StreamArguments(streaming=keys.pop("streaming", False))
    args = DataArguments(dataset=[str(path)], cache_dir=str(tmp_path / "cache"), **keys)
    return load_datasets(args, "policy", tokenizer, stream_args=stream)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_shifted_to_the_same_sample(spelling, tokenizer, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(SPELLINGS[spelling]))
    [[document]] = load(path, tokenizer, tmp_path).train
    assert document["input_ids"].tolist() == IDS[:-1]
    assert document["labels"].tolist() == [-100, 7, -100, 11, 3]
    kept = document["labels"] != -100  # position t has the values of the token t + 1
    wanted = dict(old_logp=LOGPS, ref_logp=REF, advantage=GAINS, temperature=[0.5] * 6)
    assert document.keys() == {"input_ids", "labels", *wanted}
    for name, values in wanted.items():
        assert document[name].dtype == np.float32 and len(document[name]) == 5
        assert document[name][kept].tolist() == np.float32(values)[1:][kept].tolist()


GOOD = SPELLINGS["ids"]
ROUTES = [[[n, -1], [n + 1, n + 7]] for n in range(6)]  # two layers, two experts
ENCODED = {
    "data": base64.b64encode(np.array(ROUTES[:5], "<i2").tobytes()).decode(),
    "shape": [5, 2, 2],
}


def test_streamed_records_have_the_columns_of_the_first(tokenizer, tmp_path):
    path = write_rollouts(tmp_path / "rollouts.jsonl", [GOOD, GOOD | {"routes": ROUTES}])
    rows = load(path, tokenizer, tmp_path, streaming=True, disable_shuffling=True).train.rows()
    assert "expected the same in all records of a dataset" in refusal(next, rows)


@pytest.mark.parametrize("name, routes", [("routes", ENCODED), ("routed_experts", ROUTES)])
@pytest.mark.parametrize("keys", [dict(streaming=False), dict(streaming=True)])
def test_routes_are_those_of_the_tokens_and_cut_with_them(name, routes, keys, tokenizer, tmp_path):
    path = write_rollouts(tmp_path / "rollouts.jsonl", [GOOD | {name: routes}])
    data = load(path, tokenizer, tmp_path, cutoff_len=4, **keys).train
    [document] = next(data.rows())[0] if keys["streaming"] else data[0]
    assert document["input_ids"].tolist() == IDS[:4]
    assert document["routes"].tolist() == ROUTES[:4] and document["routes"].dtype == np.int16


NAN = float("nan")
BAD = {
    "two names": ({"tokens": IDS}, "ids and tokens: expected one of them"),
    "both": ({"response_ids": [1]}, "ids and response_ids: expected one of them"),
    "length": ({"logprobs": LOGPS[:5]}, "'logprobs' has 5 values: expected 6 or 4"),
    "mask": ({"mask": [0, 0, 2, 0, 1, 1]}, "'mask' has 2 at 2: expected 0 and 1"),
    "no mask": ({"mask": None}, "'mask' is missing"),
    "NaN": (
        {"logprobs": [*LOGPS[:4], NAN, -1.0]}, "'logprobs' has nan at 4, for a token to train"
    ),
    "null": ({"ref_logprobs": [*REF[:5], None]}, "'ref_logprobs' has nan at 5"),
    "text": ({"advantages": "much"}, "'advantages': expected"),
    "cold": ({"temperature": 0}, "'temperature' has 0 at 2"),
    "token": ({"ids": [*IDS[:5], 100_000]}, "token id [100000]: expected 0 to"),
    "half": ({"ids": [*IDS[:5], 0.5]}, "token id [0.5]: expected 0 to"),
    "reward": ({"reward": NAN}, "'reward' is nan: expected a finite number"),
    "large reward": ({"reward": 10**400}, "'reward' is 1000"),
    "size": ({"response_length": 9}, "response_length or mask has 9 tokens, and the record 6"),
    "group": ({"group": [1]}, "'group': expected"),
    "routes": ({"routes": ROUTES[:4]}, "'routes' has 4 rows: expected 5 or 6"),
    "experts": ({"routes": [[0, 1]] * 5}, "routes: expected {"),
    "video": ({"videos": ["a.mp4"]}, "this model or stage does not read the column 'videos'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_record_is_refused_with_its_line(case, tokenizer, tmp_path):
    changes, words = BAD[case]
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | changes)}\n")
    found = refusal(load, path, tokenizer, tmp_path)
    assert f"{path}:2: {words}" in found


def test_what_was_sampled_is_not_cut_in_its_middle(tokenizer, tmp_path):
    path = write_rollouts(tmp_path / "rollouts.jsonl", [GOOD])
    found = refusal(load, path, tokenizer, tmp_path, cutoff_len=4, cutoff_rule="proportion")
    assert "cutoff_rule: proportion would cut prompts" in found


def test_records_with_other_columns_than_the_first_are_refused(tokenizer, tmp_path):
    records = [GOOD, {name: GOOD[name] for name in GOOD if name != "logprobs"}]
    path = write_rollouts(tmp_path / "rollouts.jsonl", records)
    found = refusal(load, path, tokenizer, tmp_path)
    assert "expected the same in all records of a dataset" in found and "old_logp" in found


def test_a_sample_with_other_columns_than_the_first_is_refused():
    from mca_lite import PolicyConfig
    from mca_lite.part_policy_trainer import Computed

    one = dict(input_ids=[1, 2], labels=[2, 3], advantage=1.0, old_logp=None)
    view = Computed([one, one | dict(old_logp=[-1.0, -1.0])], PolicyConfig(), {"advantage"})
    assert view[0][0]["advantage"] == 1.0
    with pytest.raises(ValueError, match=r"sample 1 has \['advantage', 'old_logp'\]"):
        view[1]


def test_wrong_numbers_of_a_sampler_are_refused_in_words(tmp_path):
    tiny.save_model(tmp_path / "model", "qwen3")
    [found] = world.run(refusals_of_a_sampler, 1, str(tmp_path))
    assert "old_logp of sample 1 has the shape [1]: expected one number, or [4]" in found[0]
    assert "sampler_correction computes the weights of tokens, and the samples have" in found[1]
    assert "opd learns from a teacher, and the samples have no ref_logp" in found[2]


def refusals_of_a_sampler(folder: str) -> list[str]:
    from mca_lite import PolicyConfig, PolicyTrainer
    from tests.shared import session_tools

    session = session_tools.new_session(folder)
    good = dict(input_ids=[1, 2, 3, 4], labels=[-100, 3, 4, 5], advantage=1.0, old_logp=[-1.0] * 4)
    found = []
    correction = dict(sampler_correction="token_mask")
    for samples, keys in (
        ([good, good | dict(old_logp=[-1.0])], correction),
        ([good | dict(sampler_weight=1.0)] * 2, correction),
        ([good] * 2, dict(name="opd")),
    ):
        config = PolicyConfig(**keys)
        given = dict(args=session.args, train_dataset=samples, backend=session.backend)
        trainer = PolicyTrainer(session.model, config, **given)
        found.append(refusal(second_sample, trainer))
    return found


def second_sample(trainer) -> dict:
    trainer.get_train_dataloader()
    return trainer.train_dataset[1][0]


def test_long_rollouts_are_cut_with_their_columns_and_bad_ones_left_out(tokenizer, tmp_path):
    records = [GOOD] * 18 + [GOOD | {"mask": [0] * 6}, GOOD | {"mask": 5}]
    path = write_rollouts(tmp_path / "rollouts.jsonl", records)
    keys = dict(cutoff_len=3, on_bad_record="skip")
    found = load(path, tokenizer, tmp_path, **keys)
    assert len(found.train) == 18
    [document] = found.train[17]
    assert document["labels"].tolist() == [-100, 7, -100] and len(document["old_logp"]) == 3
    text = "\n".join(found.report)
    assert "were longer than cutoff_len 3 and cut" in text and "cannot be used" in text


def test_rewards_of_a_group_become_advantages():
    rewards, groups = [1.0, 4.0, 3.0, 5.0, 2.0], ["a", "b", "a", "b", "c"]
    assert group_advantages(rewards, groups).tolist() == [-1, -0.5, 1, 0.5, 0]
    # n - 1: the two of "a" have the deviation sqrt(2), those of "b" sqrt(1/2)
    wanted = [-1 / (2**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)]
    assert group_advantages(rewards, groups, True)[:2] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "correction, wanted",
    [
        ("token_truncate", [0, 2.0, 0.5, 1.0]),
        ("token_mask", [0, 0, 0.5, 1.0]),
        ("sequence_truncate", [0, 2.0, 2.0, 2.0]),
        ("sequence_mask", [0, 0, 0, 0]),
    ],
)
def test_weights_of_a_sampler(correction, wanted):
    labels = [-100, 5, 6, 7]
    old = [NAN, math.log(8), math.log(0.5), -1.0]
    sampler = [9.0, 0.0, 0.0, NAN]  # the last token was not scored
    weights = sampler_weights(labels, old, sampler, correction, most=2.0, least=0.25)
    kept = np.array(labels) != -100
    assert weights[kept].tolist() == pytest.approx(wanted[1:])
    assert weights.dtype == np.float32
    with pytest.raises(ValueError, match="expected token or sequence"):
        sampler_weights(labels, old, sampler, "token")


# -- columns computed before training, and runs


def columns_before_training(folder: str, keys: dict) -> list:
    """[(what, largest difference)] of a trainer's samples from what they should have, of a model
    with adapters that are not zero."""
    import torch

    from mca_lite import PolicyConfig, PolicyTrainer
    from mca_lite.model import load_torch_model
    from tests.shared import lora_tools, session_tools

    samples = [dict(one) for one in session_tools.samples_of(load_torch_model(f"{folder}/model"))]
    for number, sample in enumerate(samples):
        sample |= dict(reward=float(number), group=f"group {number // 4}")
        sample.pop("ref_logp"), sample.pop("advantage"), sample.pop("sampler_weight")
    session = session_tools.new_session(folder, adapt=lora_tools.with_drawn_adapters, **keys)
    documents = [{k: one[k] for k in ("input_ids", "labels")} for one in samples]
    found = {}
    wanted = {
        "old_logp": session.log_probs(documents, temperature=0.7),
        "ref_logp": session.log_probs(documents, temperature=0.7, base=True),
    }
    config = PolicyConfig(
        kl_coef=0.1, temperature=0.7, sampler_correction="token_mask", sampler_max=1.1,
        cache_dir=f"{folder}/rows",
    )  # fmt: skip
    for _ in range(2):  # the second trainer reads the rows
        given = dict(args=session.args, train_dataset=samples, backend=session.backend)
        trainer = PolicyTrainer(session.model, config, **given)
        trainer.get_train_dataloader()
        for number, sample in enumerate(samples):
            [document] = trainer.train_dataset[number]
            kept = torch.tensor(sample["labels"]) != -100
            for name, logps in wanted.items():
                gap = (torch.from_numpy(document[name]) - logps[number])[kept].abs()
                found[name] = max([found.get(name, 0.0), *gap.tolist()])
            ratio = (wanted["old_logp"][number] - torch.tensor(sample["old_logp"])).exp()
            ratio = ratio.where(ratio <= 1.1, 0.0)
            gap = (torch.from_numpy(document["sampler_weight"]) - ratio)[kept].abs()
            found["weight"] = max([found.get("weight", 0.0), *gap.tolist()])
            gap = document["advantage"] - (number % 4 - 1.5)
            found["advantage"] = max(found.get("advantage", 0.0), abs(gap))
            assert "group" not in document
        sums = trainer.predict(samples).predictions  # at the temperature of training
        for number, logps in enumerate(wanted["old_logp"]):
            gap = abs(sums[number, 0] - float(logps.sum())) / max(1, sums[number, 1])
            found["predictions"] = max(found.get("predictions", 0.0), gap)
    return [*found.items()], len([*Path(f"{folder}/rows").rglob("*.rows")])


@pytest.mark.parametrize(
    "ranks, keys",
    [(1, dict(backend="torch")), (2, {**CP2, **PACKED}), pytest.param(2, PP2, marks=FULL)],
)
def test_columns_come_from_the_model_before_training(tmp_path, ranks, keys):
    tiny.save_model(tmp_path / "model", "qwen3")
    for found, files in world.run(columns_before_training, ranks, str(tmp_path), keys):
        assert files == 1
        assert not [(what, error) for what, error in found if not error <= 2e-6]


COMMON = (
    "model_name_or_path={folder}/model cutoff_len=40 cache_dir={folder}/cache logging_steps=1 "
    "global_batch_size=4 per_device_train_batch_size=2 learning_rate=1e-2 save_hf_model=false "
    "overwrite_output_dir=true disable_tqdm=true html_report=false lr_scheduler_type=constant "
    "disable_shuffling=true save_strategy=steps save_steps=2 max_steps=5 output_dir={folder}/{name}"
)
GRPO = "stage=grpo dataset={folder}/rollouts.jsonl"
RUNS = {
    "whole": f"{GRPO} kl_coef=0.1 sampler_correction=token_truncate finetuning_type=lora "
    "lora_target=q_proj val_size=4 eval_strategy=steps eval_steps=2 do_predict=true",
    "read": "stage=policy policy_loss=ppo dataset={folder}/advantages.jsonl",
    "streamed": "stage=policy policy_loss=ppo dataset={folder}/advantages.jsonl streaming=true",
}
NUMBERS = ("loss", "grad_norm", "ratio", "clipped", "kl", "entropy", "reward", "eval_loss")


def test_runs_of_the_command_line_are_resumed_bit_for_bit_and_streamed(tmp_path):
    tiny.save_model(tmp_path / "model", "qwen3")
    save_tokenizer(tmp_path / "model")
    records = rollouts()
    write_rollouts(tmp_path / "rollouts.jsonl", [r | {"ref_logprobs": None} for r in records])
    for number, record in enumerate(records):
        del record["group"]
        record["advantages"] = number % 3 - 1.0
    write_rollouts(tmp_path / "advantages.jsonl", records)
    world.run(run_all, 1, COMMON, RUNS, str(tmp_path), timeout_s=120)
    lines = {name: steps_of(tmp_path / name) for name in RUNS}
    assert lines["read"] == lines["streamed"] and len(lines["read"]) == 5
    [first, *_] = lines["whole"]
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["kl"] == pytest.approx(
        0, abs=1e-5
    )
    assert first["entropy"] > 1 and "eval_loss" in str(lines["whole"])
    assert len((tmp_path / "whole/predictions.jsonl").read_text().splitlines()) == 4
    for folder in (tmp_path / "whole").glob("checkpoint-*"):
        if folder.name != "checkpoint-2":
            shutil.rmtree(folder)
    resumed = {"whole": f"{RUNS['whole']} resume_from_checkpoint=auto"}
    world.run(run_all, 1, COMMON, resumed, str(tmp_path))
    assert steps_of(tmp_path / "whole")[-3:] == lines["whole"][-3:]


def steps_of(folder: Path) -> list[dict]:
    lines = [{k: line[k] for k in NUMBERS if k in line} for line in read_log(folder)]
    return [line for line in lines if line]


@pytest.mark.parametrize(
    "words, key",
    [
        ("stage=grpo tau_pos=2", "tau_pos policy_loss"),
        ("stage=policy policy_loss=cispo cispo_max=5 dual_clip=3", "dual_clip policy_loss"),
        ("stage=policy policy_loss=sapo delta=3", "delta policy_loss"),
        ("stage=ppo teacher_coef=2", "teacher_coef policy_loss"),
        ("stage=ppo sampler_max=2", "sampler_max sampler_correction"),
        ("stage=ppo kl_unbiased=true", "kl_unbiased kl_coef"),
    ],
)
def test_a_key_without_effect_on_the_loss_is_refused(words, key, tmp_path):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    given = [f"model_name_or_path={path}", "dataset=a.jsonl", "output_dir=o", "max_steps=1"]
    [problem] = keys_of(parse_args, [*given, *words.split()]).values()
    assert problem.key == key.split()[0] and "no effect, since" in problem.reason
