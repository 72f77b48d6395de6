"""Loops of configs/examples on a Session: in the way of Tinker, on-policy distillation, GRPO."""

import json
import os

import pytest
import torch

from tests.shared import world
from tests.shared.commands import ROOT
from tests.shared.examples import example
from tests.shared.session_tools import log_probs_of

KEYS = (
    "configs/sft.yaml model_name_or_path=configs/tiny/model train_from_scratch=true seed=42 "
    "global_batch_size=2 per_device_train_batch_size=2 disable_tqdm=true max_samples=20"
)
TP2 = "use_mca=true tensor_model_parallel_size=2"
BACKENDS = pytest.mark.parametrize("ranks, keys", [(1, "use_mca=false"), (2, TP2)])


def words_of(keys: str, out) -> list[str]:
    os.chdir(ROOT)
    return [*KEYS.split(), *keys.split(), f"output_dir={out}/run", f"cache_dir={out}/cache"]


def given_groups() -> list[dict]:
    """Three groups of completions; those of the second have one reward."""
    generator = torch.Generator().manual_seed(1)
    groups = []
    for number in range(3):
        completions = []
        for i in range(4):
            tokens = torch.randint(5, 500, (3 + i,), generator=generator).tolist()
            logprobs = (-6.2 + 0.3 * torch.randn(3 + i, generator=generator)).tolist()
            reward = float(i % 3 == 0) if number != 1 else 1.0
            completions.append(dict(tokens=tokens, logprobs=logprobs, reward=reward))
        groups.append(dict(prompt=[7, 8, 9 + number], completions=completions))
    return groups


def with_tinker(keys: str, out: str) -> list[dict]:
    return list(example("tinker_loop").loop(f"{out}/groups.jsonl", words_of(keys, out)))


def by_formula() -> tuple[float, float]:
    """(loss, norm of its gradient) of the first two groups: - sum of exp(l - o) A."""
    from mca_lite.model import load_torch_model

    os.chdir(ROOT)
    model = load_torch_model("configs/tiny/model", True, 42)
    total = 0.0
    for group in given_groups()[:2]:
        mean = sum(one["reward"] for one in group["completions"]) / 4
        for one in group["completions"]:
            ids = group["prompt"] + one["tokens"]
            labels = [-100] * (len(group["prompt"]) - 1) + one["tokens"]
            logps, _ = log_probs_of(model, dict(input_ids=ids[:-1], labels=labels))
            logps = logps[-len(one["tokens"]) :]
            ratios = (logps - torch.tensor(one["logprobs"])).exp()
            total = total - ratios.sum() * (one["reward"] - mean)
    total.backward()
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(total), float(torch.stack(gradients).norm())


@BACKENDS
def test_a_loop_in_the_way_of_tinker_has_the_loss_and_gradient_of_its_formula(
    tmp_path, ranks, keys
):
    lines = "".join(json.dumps(group) + "\n" for group in given_groups())
    (tmp_path / "groups.jsonl").write_text(lines)
    [wanted] = world.run(by_formula, 1)
    for first, second in world.run(with_tinker, ranks, keys, str(tmp_path)):
        assert (first["loss:sum"], first["grad_norm"]) == pytest.approx(wanted, rel=1e-4)
        assert second["grad_norm"] > 0


def other_losses(keys: str, out: str) -> list[float]:
    """The losses of cross_entropy with weights, and of ppo at a ratio of 1 and of 2."""
    from mca_lite import Session, parallel, run
    from mca_lite.args import parse_args

    tinker = example("tinker_loop")
    plan = run.make_plan(parse_args(words_of(keys, out)))
    parallel.initialize(plan.arguments.training, plan.arguments.use_mca)
    session = Session(run.build_model(plan), plan.arguments.training)
    client = tinker.TrainingClient(session)
    ids, targets = [7, 8, 9], [8, 9, 10]
    [logps] = session.log_probs([dict(input_ids=ids, labels=targets)])
    weighted = tinker.Datum(ids, dict(target_tokens=targets, weights=[0.0, 0.5, 2.0]))
    found = client.forward_backward([weighted], "cross_entropy").result()
    [output] = found.loss_fn_outputs
    losses = [found.metrics["loss:sum"], float(0.5 * logps[1] + 2 * logps[2])]
    assert torch.allclose(output["logprobs"][1:], logps[1:], atol=1e-6)
    client.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
    inputs = dict(target_tokens=targets, advantages=[0.0, 1.0, 1.0])
    old = logps - torch.tensor([0.0, 0.0, 2.0]).log1p()  # ratios 1 and 3
    datum = tinker.Datum(ids, dict(inputs, logprobs=old))
    found = client.forward_backward([datum], "ppo", {"clip_high_threshold": 1.5}).result()
    return [*losses, found.metrics["loss:sum"]]


def test_other_losses_of_tinker_have_its_numbers(tmp_path):
    [(weighted, wanted, clipped)] = world.run(other_losses, 1, "use_mca=false", str(tmp_path))
    assert weighted == pytest.approx(-wanted, rel=1e-5)
    assert clipped == pytest.approx(-(1 + 1.5), rel=1e-5)


def distilled(out: str) -> tuple:
    """((divergence, norm of its gradient) by the loop, by the formula on the same answers, of a
    step toward a teacher that is the student itself)."""
    from mca_lite import run, tool_generation
    from mca_lite.args import parse_args
    from mca_lite.model import load_torch_model

    os.chdir(ROOT)
    loop = example("opd_loop")
    words = words_of("use_mca=false max_steps=1 learning_rate=1e-2", out)
    student, teacher = (load_torch_model("configs/tiny/model", True, seed) for seed in (42, 1))
    student.save_pretrained(f"{out}/student")
    teacher.save_pretrained(f"{out}/teacher")
    [ours] = loop.loop(f"{out}/teacher", words)
    [alike] = loop.loop(f"{out}/student", words)

    plan = run.make_plan(parse_args(words))
    student.generation_config.top_k = 0
    stop = tool_generation.stop_ids(student, plan.tokenizer)
    prompts = [loop.prompt_of(plan.data.train[i]) for i in range(2)]
    torch.manual_seed(42)
    samples = list(loop.rollouts_of(student, prompts, stop))
    tokens = sum(label != -100 for sample in samples for label in sample["labels"])
    mine = torch.cat([log_probs_of(student, sample)[0] for sample in samples])
    with torch.no_grad():
        theirs = torch.cat([log_probs_of(teacher, sample)[0] for sample in samples])
    (-((theirs - mine).detach() * mine).sum() / tokens).backward()
    norms = [p.grad.norm() for p in student.parameters() if p.grad is not None]
    formula = float((mine - theirs).sum() / tokens), float(torch.stack(norms).norm())
    return ours, formula, alike


def test_on_policy_distillation_has_the_gradient_of_its_formula(tmp_path):
    [(ours, formula, alike)] = world.run(distilled, 1, str(tmp_path), timeout_s=120)
    assert ours == pytest.approx(formula, rel=1e-4)
    assert alike == pytest.approx((0.0, 0.0), abs=1e-5)


def share_of_letters(answer: str, expected: str) -> float:
    return sum(character.isalpha() for character in answer) / max(len(answer), 1)


def short_grpo(out: str) -> tuple:
    """(held-out rewards, rewards of batches) of a fresh model."""
    grpo = example("grpo")
    grpo.PROMPTS = 8
    keys = "use_mca=false val_size=20 max_samples=60 max_steps=6 learning_rate=3e-3"
    words = words_of(
        keys + " eval_dataset=null global_batch_size=64 per_device_train_batch_size=32", out
    )
    return grpo.loop(words, 0, share_of_letters)


def test_grpo_raises_the_reward_of_what_is_sampled_next(tmp_path):
    results = world.run(short_grpo, 2, str(tmp_path), timeout_s=120)
    for (before, after), rewards in results:
        assert rewards == results[0][1], "ranks have other rewards"
        assert rewards[-1] > rewards[0] + 0.05 and after > before + 0.05


def whole_grpo(out: str, seed: int) -> tuple:
    os.chdir(ROOT)
    [line] = [
        x for x in example("grpo").__doc__.replace("\\\n", "").splitlines() if "torchrun" in x
    ]
    words = line.split("grpo.py")[1].split()
    return example("grpo").loop([*words, f"seed={seed}", f"output_dir={out}", f"cache_dir={out}"])


@pytest.mark.full
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_grpo_raises_exact_match_on_held_out_dates(tmp_path, seed):
    [((before, after), _), _] = world.run(whole_grpo, 2, str(tmp_path), seed, timeout_s=900)
    assert after >= before + 0.05
