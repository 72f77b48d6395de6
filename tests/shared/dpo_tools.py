"""Preference training in tests: tiny pairs, a run of ours in any layout, and plain transformers and
torch as the oracle.
"""

import json
import math

import numpy as np
import torch
import torch.nn.functional as F

from tests.shared import pictures, tiny

STEPS, GLOBAL_BATCH, COUNT = 2, 4, 7  # 7 pairs: the last step of the epoch has three
OBJECTIVES = {
    "sigmoid": dict(pref_loss="sigmoid", beta=0.3),
    "smoothed": dict(pref_loss="sigmoid", beta=0.3, label_smoothing=0.2, ftx=0.5),
    "orpo": dict(pref_loss="orpo", beta=0.4),
}
RATE, DECAY, CLIP, EPS, BETAS = 1e-2, 0.1, 0.5, 1e-4, (0.9, 0.95)
KEYS = dict(
    global_batch_size=GLOBAL_BATCH, max_steps=STEPS, logging_steps=1, learning_rate=RATE,
    lr_scheduler_type="constant", weight_decay=DECAY, max_grad_norm=CLIP, adam_epsilon=EPS,
    adam_beta1=BETAS[0], adam_beta2=BETAS[1], save_strategy="no", disable_tqdm=True, seed=7,
)  # fmt: skip


class Pairs:
    """Pairs of a shared prompt and two responses, all of unequal length, as the data side gives
    them.
    """

    def __init__(self, count: int = COUNT, seed: int = 1):
        generator = torch.Generator().manual_seed(seed)

        def draw(low, high):
            return torch.randint(
                0,
                tiny.VOCAB,
                (int(torch.randint(low, high, (1,), generator=generator)),),
                generator=generator,
            )

        self.pairs, self.fingerprint = [], f"{count} of seed {seed}"
        for _ in range(count):
            self.pairs.append(self.pair(draw))
        sizes = np.array(
            [[len(pair[side]["labels"]) for side in ("chosen", "rejected")] for pair in self.pairs]
        )
        self.document_lengths = sizes
        self.lengths = sizes.sum(1)
        self.work = np.stack([sizes.sum(1), (sizes**2).sum(1)], axis=1).astype(np.float64)
        self.num_tokens, self.num_trained_tokens = int(sizes.sum()), 0

    def pair(self, draw) -> dict:
        """One pair. draw: (low, high) -> random tokens, as many as a random number between."""
        prompt, pair = draw(2, 7), {}
        for side in ("chosen", "rejected"):
            tokens = torch.cat([prompt, draw(1, 9)])
            labels = tokens[1:].clone()
            labels[: len(prompt) - 1] = -100
            pair[side] = {"input_ids": tokens[:-1], "labels": labels}
        return pair

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def our_run(
    path,
    output_dir,
    objective,
    adapter=None,
    backend="megatron",
    pack=0,
    ref=False,
    before=None,
    collator=None,
    **changes,
):
    """The trainer after a run of DPOTrainer.

    adapter: a folder in PEFT's format to start from. pack: tokens of a pack, 0 for none. ref: give
    it a second model. before: what is done with the trainer first.
    """
    from mca_lite import AutoModel, DPOConfig, DPOTrainer, TrainingArguments
    from mca_lite.data_batches import Packs
    from mca_lite.model import load_torch_model
    from mca_lite.part_lora import load_adapter

    data = {
        name: changes.pop(name, default)
        for name, default in (("train_dataset", Pairs()), ("eval_dataset", None))
    }
    args = TrainingArguments(output_dir, **{**KEYS, **changes})

    def load():
        return (
            AutoModel.from_pretrained(path, args)
            if backend == "megatron"
            else load_torch_model(path)
        )

    model = load_adapter(load(), adapter) if adapter else load()
    if pack:
        data = {name: dataset and Packs(dataset, pack) for name, dataset in data.items()}
    config = DPOConfig(**objective)
    data.update(ref_model=load() if ref else None, data_collator=collator)
    trainer = DPOTrainer(model, config, args=args, **data)
    if before is not None:
        before(trainer)
    trainer.train()
    return trainer


def curve_of(trainer) -> list[dict]:
    """Per step: the metrics with a count, the gradient's norm, the tokens so far."""
    wanted = [*trainer.metrics_keys, "grad_norm", "consumed_tokens"]
    lines = (line for line in trainer.state.log_history if "loss" in line)
    return [{key: line[key] for key in wanted if key in line} for line in lines]


# -- the oracle ------------------------------------------------------------------------------------


def logp_and_length(model, side: dict) -> tuple[torch.Tensor, int]:
    """Whole logits and log_softmax, of one response alone."""
    given = dict(input_ids=side["input_ids"][None])
    if "rope_t" in side:  # of a model with pictures
        given = pictures.inputs_of(model, side)
    logits = model(**given).logits[0].float()
    kept = side["labels"] != -100
    of_tokens = logits.log_softmax(-1).gather(-1, side["labels"].clamp(min=0)[:, None])[:, 0]
    return of_tokens[kept].sum(), int(kept.sum())


def oracle_loss(model, pair, reference, pref_loss, beta, label_smoothing=0.0, ftx=0.0) -> dict:
    (chosen, c), (rejected, r) = (
        logp_and_length(model, pair[side]) for side in ("chosen", "rejected")
    )
    if pref_loss == "orpo":
        a, b = chosen / c, rejected / r
        log_odds = torch.log(a.exp() / (1 - a.exp())) - torch.log(b.exp() / (1 - b.exp()))
        loss, rewards = -a - beta * F.logsigmoid(log_odds), (beta * a, beta * b)
    else:
        d = beta * ((chosen - rejected) - (reference[0] - reference[1]))
        loss = -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)
        rewards = beta * (chosen - reference[0]), beta * (rejected - reference[1])
    loss = loss - ftx * chosen / c
    margin = rewards[0] - rewards[1]
    values = [loss, *rewards, (margin > 0).float(), margin, chosen, rejected, -chosen / c]
    names = [
        "loss",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
    ]
    return dict(zip([*names, "logps/rejected", "sft_loss"], values, strict=True))


def oracle_metrics(model, pairs, references, objective) -> dict:
    with torch.no_grad():
        found = [
            oracle_loss(model, pair, ref, **objective)
            for pair, ref in zip(pairs, references, strict=True)
        ]
    return {key: float(sum(f[key] for f in found) / len(found)) for key in found[0]}


def references_of(model, pairs) -> list:
    import contextlib

    off = model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext()
    with torch.no_grad(), off:
        return [
            [float(logp_and_length(model, pair[side])[0]) for side in ("chosen", "rejected")]
            for pair in pairs
        ]


def oracle_curve(model, objective: dict, steps: int = STEPS, packs=None, pairs=None) -> list[dict]:
    """The curve for our_run: one pair after another through transformers, torch's AdamW, the
    trainer's permutation.

    packs: the numbers of the pairs of each pack, which is a sample then (None: each pair is one).
    pairs: in place of those of Pairs().
    """
    model.eval()
    pairs = pairs or Pairs().pairs
    parameters = [p for p in model.parameters() if p.requires_grad]
    references = references_of(model, pairs)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    packs = [[i] for i in range(COUNT)] if packs is None else packs
    per_epoch, curve = math.ceil(len(packs) / GLOBAL_BATCH), []
    for step in range(steps):
        epoch, i = divmod(step, per_epoch)
        order = np.random.default_rng([7, epoch]).permutation(len(packs))
        chosen = [j for p in order[i * GLOBAL_BATCH : (i + 1) * GLOBAL_BATCH] for j in packs[p]]
        found = [oracle_loss(model, pairs[j], references[j], **objective) for j in chosen]
        optimizer.zero_grad()
        (sum(f["loss"] for f in found) / len(found)).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        means = {key: float(sum(f[key].detach() for f in found) / len(found)) for key in found[0]}
        curve.append({**means, "grad_norm": float(norm)})
    return curve


def make_oracles(path: str, folder: str) -> dict:
    """{(objective, "full" or "lora"): curve}; folder/start is the adapter that lora starts from."""
    from transformers import AutoModelForCausalLM

    from tests.shared.lora_tools import peft_model

    out = {}
    for name, objective in OBJECTIVES.items():
        out[name, "full"] = oracle_curve(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), objective
        )
        wrapped = peft_model(path)
        wrapped.save_pretrained(f"{folder}/start")
        out[name, "lora"] = oracle_curve(wrapped, objective)
    with open(f"{folder}/curves.json", "w") as file:
        json.dump({"/".join(key): curve for key, curve in out.items()}, file)
    return out


def of_tie(line: dict) -> str:
    """The metric that is 0 where policy and reference are one model; KTO has no margins, and a step
    may have answers of one kind."""
    names = ("rewards/margins", "rewards/chosen", "rewards/rejected")
    return next(name for name in names if name in line)


def differences(got: list[dict], wanted: list[dict], tolerance: float = 1e-5) -> list[str]:
    """Differences between two curves above the tolerance, relative for numbers above 1.

    Where policy and reference are still one model, rounding decides which of two equal rewards is
    larger.
    """
    if len(got) != len(wanted):
        return [f"{len(got)} steps instead of {len(wanted)}"]
    return [
        f"step {step}: {key} {ours[key]} instead of {value}"
        for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True))
        for key, value in theirs.items()
        if not (key == "rewards/accuracies" and abs(theirs[of_tie(theirs)]) < tolerance)
        and not abs(ours[key] - value) <= tolerance * max(1.0, abs(value))
    ]
