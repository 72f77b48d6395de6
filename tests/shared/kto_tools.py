"""KTO in tests: tiny labelled answers, a run of ours in any layout, and plain transformers and
torch as the oracle.
"""

import contextlib

import numpy as np
import torch

from mca_lite.part_pictures_data import ROPE_COLUMNS
from tests.shared import pictures, tiny
from tests.shared.answers import curve_of_steps, trained
from tests.shared.dpo_tools import COUNT, GLOBAL_BATCH, STEPS, logp_and_length

OBJECTIVE = dict(beta=0.3, desirable_weight=1.5, undesirable_weight=0.75)


def raw_answers(count: int = COUNT, seed: int = 1, scale: int = 1) -> list[tuple]:
    """(tokens of a prompt, tokens of its answer, label), all of unequal length, times scale."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        length = int(torch.randint(scale * low, scale * high, (1,), generator=generator))
        return torch.randint(0, tiny.VOCAB, (length,), generator=generator)

    return [(draw(2, 7), draw(1, 9), float(i % 3 != 1)) for i in range(count)]


def picture_answers(count: int = COUNT, seed: int = 1) -> list[tuple]:
    """The same, with prompts that are documents, some with pictures."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        pieces = [(4,), (2, (2, 2), 3), ((1, 3), 2, (2, 1), 4), (2, (3, 1), 2)][i % 4]
        prompt = pictures.document(generator, *pieces)
        answer = torch.randint(10, tiny.VOCAB, (1 + 5 * i % 9,), generator=generator)
        found.append((prompt, answer, float(i % 3 != 1)))
    return found


def shifted(prompt, answer) -> dict:
    if isinstance(prompt, dict):
        whole = torch.cat([prompt["input_ids"], prompt["labels"][-1:]])
        document = shifted(whole, answer)
        more = torch.arange(1, len(document["input_ids"]) - len(prompt["input_ids"]) + 1)
        before = {name: prompt[name] for name in ROPE_COLUMNS}
        positions = {name: torch.cat([x, x[-1] + more]) for name, x in before.items()}
        return prompt | document | positions
    tokens = torch.cat([prompt, answer])
    labels = tokens[1:].clone()
    labels[: len(prompt) - 1] = -100
    return {"input_ids": tokens[:-1], "labels": labels}


class Answers:
    """Labelled samples as the data side gives them."""

    documents_per_sample = 1

    def __init__(self, raw=None):
        raw = raw or raw_answers()
        self.samples = [{**shifted(p, a), "answer_label": label} for p, a, label in raw]
        self.fingerprint = f"{len(raw)} answers"
        self.document_lengths = np.array([[len(s["labels"])] for s in self.samples])
        self.num_tokens, self.num_trained_tokens = int(self.document_lengths.sum()), 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


def kto_run(path, output_dir, adapter=None, **changes):
    """The trainer after a run of KTOTrainer; the arguments are those of dpo_tools.our_run."""
    from mca_lite import KTOConfig, KTOTrainer

    config = KTOConfig(**changes.pop("objective", OBJECTIVE))
    data = dict(train_dataset=Answers(), eval_dataset=None)
    return trained(KTOTrainer, config, path, output_dir, data, adapter, **changes)


# -- the oracle


def mismatched(raw, block: int = GLOBAL_BATCH) -> list[dict]:
    """As TRL pairs them: in each block of samples the answers shift by one."""
    out = []
    for start in range(0, len(raw), block):
        part = raw[start : start + block]
        answers = [answer for _, answer, _ in part]
        answers = [answers[-1], *answers[:-1]]
        out += [shifted(p, answer) for (p, _, _), answer in zip(part, answers, strict=True)]
    return out


def logps_of(model, documents) -> torch.Tensor:
    return torch.stack([logp_and_length(model, document)[0] for document in documents])


def step_numbers(model, chosen, raw, others, reference, of_others, config) -> tuple:
    """(losses, metrics) of the samples `chosen`, by TRL's formulas."""
    labels = torch.tensor([raw[j][2] for j in chosen])
    logps = logps_of(model, [shifted(*raw[j][:2]) for j in chosen])
    with torch.no_grad():
        kl = (logps_of(model, [others[j] for j in chosen]) - of_others[chosen]).mean().clamp(min=0)
    ratios = logps - reference[chosen]
    beta = config["beta"]
    good = config["desirable_weight"] * (1 - torch.sigmoid(beta * (ratios - kl)))
    bad = config["undesirable_weight"] * (1 - torch.sigmoid(beta * (kl - ratios)))
    losses = torch.where(labels > 0, good, bad)
    metrics = {"loss": losses.mean(), "kl": kl}
    for name, of_side in ("chosen", labels > 0), ("rejected", labels == 0):
        if of_side.any():
            metrics[f"rewards/{name}"] = (beta * ratios)[of_side].mean()
            metrics[f"logps/{name}"] = logps[of_side].mean()
    return losses, {key: float(value.detach()) for key, value in metrics.items()}


def oracle_curve(model, config=None, steps: int = STEPS, packs=None, raw=None) -> list[dict]:
    """The curve for kto_run: one answer after another through transformers, torch's AdamW, the
    trainer's permutation. packs: the numbers of the samples of each pack. raw: in place of
    raw_answers()."""
    config = config or OBJECTIVE
    model.eval()
    raw = raw or raw_answers()
    others = mismatched(raw)
    off = model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext()
    with torch.no_grad(), off:
        reference = logps_of(model, [shifted(*one[:2]) for one in raw])
        of_others = logps_of(model, others)

    def numbers(model, chosen):
        return step_numbers(model, chosen, raw, others, reference, of_others, config)

    return curve_of_steps(model, numbers, steps, packs)


def make_oracles(path: str, folder: str, steps: int) -> dict:
    """{"full" or "lora": curve}; folder/start is the adapter that lora starts from."""
    from transformers import AutoModelForCausalLM

    from tests.shared.lora_tools import peft_model

    full = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    wrapped = peft_model(path)
    wrapped.save_pretrained(f"{folder}/start")
    return {"full": oracle_curve(full, steps=steps), "lora": oracle_curve(wrapped, steps=steps)}
