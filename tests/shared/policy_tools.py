"""Runs of PolicyTrainer on the samples of session_tools, and the same steps by formulas on whole
logits of the transformers model.
"""

import functools
import json

import torch

from tests.shared import pictures, session_tools
from tests.shared.session_tools import log_probs_of
from tests.shared.training import read_log, train

STEPS, BATCH = 3, 4  # the last of the 11 samples' batches has three
KEYS = dict(
    steps=STEPS, lr_scheduler_type="constant", lr_scheduler_kwargs={}, warmup_steps=0,
    global_batch_size=BATCH, per_device_train_batch_size=2,
)  # fmt: skip
METRICS = ("loss", "grad_norm", "ratio", "clipped", "kl", "entropy", "reward")


def samples_of(model) -> list[dict]:
    """11 samples with every column."""
    samples = session_tools.samples_of(model)
    samples += [dict(sample) for sample in samples[1:4]]
    for number, sample in enumerate(samples):
        sample["reward"] = number / 4
    return samples


def picture_samples_of(model) -> list[dict]:
    """Eight samples with every column, some with pictures."""
    return with_numbers(model, pictures.samples()[:8])


def with_numbers(model, samples: list[dict]) -> list[dict]:
    """The samples with every column."""
    generator = torch.Generator().manual_seed(4)
    for number, sample in enumerate(samples):
        logps, _ = log_probs_of(model, sample)
        noise = torch.randn(3, len(logps), generator=generator)
        sample |= dict(old_logp=logps + 0.3 * noise[0], ref_logp=logps + 0.3 * noise[1])
        sample |= dict(sampler_weight=noise[2].abs(), advantage=(-1.0) ** number, reward=number / 4)
    return samples


def with_some(samples: list[dict], *names: str) -> list[dict]:
    """The samples without other columns than these."""
    kept = {"input_ids", "labels", *names}
    return [{name: sample[name] for name in sample if name in kept} for sample in samples]


def clipped(p, o, q, a, w, h):
    """The terms of PPO's loss."""
    r = (p - o).exp()
    return -w * torch.minimum(r * a, r.clamp(0.8, 1.2) * a)


def policy_run(path: str, out: str, samples: list[dict], config: dict, **keys) -> list[dict]:
    """The numbers of METRICS of each step of a run."""
    from mca_lite import PolicyConfig, PolicyTrainer

    make = functools.partial(PolicyTrainer, train_config=PolicyConfig(**config))
    train(path, out, data=samples, trainer_class=make, **{**KEYS, **keys})
    lines = [line for line in read_log(out) if "grad_norm" in line]
    return [{name: line[name] for name in METRICS if name in line} for line in lines]


def tokens_of(model, sample: dict, temperature: float) -> tuple:
    """(log p, o, q, A, sampler_weight, entropy) of the trained tokens of a sample."""
    logps, entropy = log_probs_of(model, sample, temperature)
    kept = torch.as_tensor(sample["labels"]) != -100
    names = ("old_logp", "ref_logp", "advantage", "sampler_weight")
    columns = [torch.tensor(sample[name]).expand(len(kept))[kept] for name in names]
    return logps[kept], *columns, entropy[kept]


def oracle_run(model, samples: list[dict], formula, divisor, is_mean=False, temperature=1.0):
    """The numbers of METRICS of each step in plain torch.

    formula(p, o, q, A, w, h) -> terms of tokens. divisor(tokens, answers): of a step's sum.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-5)
    lines = []
    for first in range(0, len(samples), BATCH):
        part = [tokens_of(model, sample, temperature) for sample in samples[first:][:BATCH]]
        rewards = [sample["reward"] for sample in samples[first:][:BATCH]]
        rewards = [x for x, one in zip(rewards, part, strict=True) if len(one[0])]
        part = [one for one in part if len(one[0])]
        terms = [formula(*one) for one in part]
        total = sum(x.mean() if is_mean else x.sum() for x in terms)
        p, o, q, a, _, h = (torch.cat(columns).detach() for columns in zip(*part, strict=True))
        optimizer.zero_grad()
        (total / divisor(len(p), len(part))).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        r = (p - o).exp()
        values = dict(
            ratio=r,
            clipped=torch.where(a > 0, r > 1.2, r < 0.8).float(),
            kl=(q - p).exp() - (q - p) - 1,
            entropy=h,
            reward=torch.tensor(rewards),
        )
        line = {name: float(x.mean()) for name, x in values.items()}
        counts = {True: len(part), False: len(p)}
        lines.append({"total": float(total), "grad_norm": float(norm), **line, "counts": counts})
    return lines


def rollouts(count: int = 12, vocab: int = 40) -> list[dict]:
    """Records of rollouts with rewards in groups of four."""
    generator = torch.Generator().manual_seed(5)
    records = []
    for number in range(count):
        prompt = 2 + number // 4 % 3
        answer = 2 + (3 * number) % 5
        ids = torch.randint(1, vocab, (prompt + answer,), generator=generator).tolist()
        logps = (-2 - 4 * torch.rand(len(ids), generator=generator)).tolist()
        ref = (-2 - 4 * torch.rand(len(ids), generator=generator)).tolist()
        mask = [0] * prompt + [1] * answer
        reward = (number * 7) % 5 / 2
        record = dict(ids=ids, mask=mask, logprobs=logps, ref_logprobs=ref, reward=reward)
        records.append(record | dict(group=f"prompt {number // 4}"))
    return records


def write_rollouts(path, records: list[dict] | None = None) -> str:
    text = "".join(json.dumps(record) + "\n" for record in records or rollouts())
    path.write_text(text)
    return str(path)
