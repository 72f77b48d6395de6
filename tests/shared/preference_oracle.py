"""Preference losses in plain torch: whole logits of one answer after another, and formulas over the
vectors of a global batch, written down apart from the package.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from tests.shared.dpo_tools import BETAS, CLIP, DECAY, EPS, GLOBAL_BATCH, RATE

WITHOUT_REFERENCE = ("orpo", "simpo", "cpo", "sft")


def of_tokens(model, side: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities of an answer's tokens, logs of the sums of squared probabilities)"""
    log_probs = model(side["input_ids"][None]).logits[0].float().log_softmax(-1)
    kept = side["labels"] != -100
    log_probs, labels = log_probs[kept], side["labels"][kept]
    return log_probs.gather(-1, labels[:, None])[:, 0], log_probs.exp().square().sum(-1).log()


def cut(chosen, rejected, alpha):
    """Sums of both, the tokens beyond the shorter one times alpha."""
    shared = min(len(chosen), len(rejected))
    return [tokens[:shared].sum() + alpha * tokens[shared:].sum() for tokens in (chosen, rejected)]


def losses_of(name, c, r, ref_c, ref_r, lc, lr, whole_c, margin, o, memory) -> torch.Tensor:
    """[N]: the losses of the pairs of a batch, all [N]; o: the objective's numbers."""
    b, e = o["beta"], o["label_smoothing"]
    log, s = F.logsigmoid, torch.sigmoid
    pc, pr = c / lc, r / lr  # means of a token
    token_loss = -whole_c * len(c) / lc.sum()  # its mean: that of all chosen answers' tokens
    if name == "orpo":
        odds = torch.log(pc.exp() / (1 - pc.exp())) - torch.log(pr.exp() / (1 - pr.exp()))
        return -pc - b * log(odds)
    if name == "simpo":
        d = b * (pc - pr - o["simpo_gamma"] / b) - margin
        return -log(d) * (1 - e) - log(-d) * e
    if name == "cpo":
        d = b * (c - r) - margin
        return -log(d) * (1 - e) - log(-d) * e + o["cpo_alpha"] * token_loss
    if name == "sft":
        return token_loss
    x, y = c - ref_c, r - ref_r
    kind, alpha = o["f_divergence_type"], o["f_alpha_divergence_coef"]
    slope = {
        "reverse_kl": lambda ratio: ratio,
        "forward_kl": lambda ratio: 1 - torch.exp(-ratio),
        "js_divergence": lambda ratio: torch.log(2 * ratio.exp() / (1 + ratio.exp())),
        "alpha_divergence": lambda ratio: (ratio.exp() ** (alpha - 1) - 1) / (alpha - 1),
    }[kind]
    fx, fy = slope(x), slope(y)
    d = b * (fx - fy) - margin
    if name == "sigmoid":
        return -(1 - e) * log(d) - e * log(-d)
    if name == "sigmoid_norm":
        return -log(b * (fx / lc - fy / lr) - margin)
    if name == "hinge":
        return torch.relu(1 - d)
    if name == "ipo":
        return (fx / lc - fy / lr - 1 / (2 * b)) ** 2
    if name == "robust":
        return (-(1 - e) * log(d) + e * log(-d)) / (1 - 2 * e)
    if name == "exo_pair":
        p, q = torch.stack([s(d), s(-d)]), torch.tensor([[1 - e], [e]])
        return (p * (p / q).log()).sum(0)
    if name == "discopop":
        share = s(d / o["discopop_tau"])
        return log(d) * (share - 1) + torch.exp(-d) * share
    if name == "nca_pair":
        return -log(b * x) - 0.5 * log(-b * x) - 0.5 * log(-b * y)
    if name == "bco_pair_unshifted":
        return -log(b * x) - log(-b * y)
    if name == "bco_pair":
        memory.append(float((b * torch.cat([x, y])).mean()))
        shift = sum(memory) / len(memory)
        return -log(b * x - shift) - log(-(b * y - shift))
    if name == "sppo_hard":
        return (x - 0.5 / b) ** 2 + (y + 0.5 / b) ** 2
    if name == "apo_zero":
        return 1 - s(b * x) + s(b * y)
    if name == "apo_down":
        return s(b * x) + 1 - s(b * x - b * y)
    if name == "kto_pair":
        kl_x, kl_y = (max(0.0, float(ratio.mean())) for ratio in (x, y))
        both = torch.stack([1 - s(b * (x - kl_y)), 1 - s(b * (kl_x - y))])
        return both.mean(0)
    if name == "aot":
        d = b * ((c - r).sort().values - (ref_c - ref_r).sort().values)
    else:
        assert name == "aot_unpaired"
        d = b * (x.sort().values - y.sort().values)
    return -(1 - e) * log(d) - e * log(-d)


DEFAULTS = dict(
    beta=0.1, label_smoothing=0.0, ftx=0.0, simpo_gamma=0.5, cpo_alpha=1.0, discopop_tau=0.05,
    f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5, ld_alpha=None, use_weighting=False,
    pref_loss_weights=None,
)  # fmt: skip


def metrics_of(model, pairs, references, objective, memory) -> dict:
    """The 8 metrics of a global batch; "loss" has a gradient. references: of of_tokens."""
    o = {**DEFAULTS, **objective}
    names = [o["pref_loss"]] if isinstance(o["pref_loss"], str) else o["pref_loss"]
    alpha = 1.0 if o["ld_alpha"] is None else o["ld_alpha"]
    columns = []
    agreement = []
    for pair, reference in zip(pairs, references, strict=True):
        both = [of_tokens(model, pair[side]) for side in ("chosen", "rejected")]
        (c, _), (r, _) = both
        lengths = torch.tensor([float(len(c)), float(len(r))])
        numbers = [*cut(c, r, alpha), *cut(*reference, alpha), *lengths, c.sum()]
        numbers.append(torch.tensor(float(pair.get("pair_margin", 0.0))))
        columns.append(torch.stack(numbers))
        means = [(logp - squares).mean().exp() for logp, squares in both]
        agreement.append(float(means[0] * means[1]) if o["use_weighting"] else 1.0)
    c, r, ref_c, ref_r, lc, lr, whole_c, margin = torch.stack(columns).unbind(1)
    vectors = (c, r, ref_c, ref_r, lc, lr, whole_c, margin)
    weights = o["pref_loss_weights"] or [1.0] * len(names)
    total = sum(
        weight * losses_of(name, *vectors, o, memory)
        for name, weight in zip(names, weights, strict=True)
    )
    sft = -whole_c / lc
    total = torch.tensor(agreement) * total + o["ftx"] * sft
    total = total * torch.tensor([float(pair.get("pair_weight", 1.0)) for pair in pairs])
    rewards = (o["beta"] * (c - ref_c), o["beta"] * (r - ref_r))
    if names[0] in WITHOUT_REFERENCE:
        rewards = (o["beta"] * c / lc, o["beta"] * r / lr)
    values = {
        "loss": total,
        "rewards/chosen": rewards[0],
        "rewards/rejected": rewards[1],
        "rewards/accuracies": (rewards[0] > rewards[1]).float(),
        "rewards/margins": rewards[0] - rewards[1],
        "logps/chosen": c,
        "logps/rejected": r,
        "sft_loss": sft,
    }
    return {name: value.mean() for name, value in values.items()}


def curve(model, objective: dict, pairs: list[dict], steps: int) -> list[dict]:
    """Per step the 8 metrics and the gradient's norm: AdamW, clipping, the trainer's permutation
    and batches."""
    model.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    references = []
    with torch.no_grad(), without_adapters(model):
        for pair in pairs:
            references.append([of_tokens(model, pair[k])[0] for k in ("chosen", "rejected")])
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    per_epoch = math.ceil(len(pairs) / GLOBAL_BATCH)
    lines = []
    memory: list[float] = []
    for step in range(steps):
        epoch, i = divmod(step, per_epoch)
        order = np.random.default_rng([7, epoch]).permutation(len(pairs))
        chosen = order[i * GLOBAL_BATCH : (i + 1) * GLOBAL_BATCH]
        batch, known = [pairs[j] for j in chosen], [references[j] for j in chosen]
        found = metrics_of(model, batch, known, objective, memory)
        optimizer.zero_grad()
        found["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        lines.append({**{k: float(v.detach()) for k, v in found.items()}, "grad_norm": float(norm)})
    return lines


def without_adapters(model):
    import contextlib

    if hasattr(model, "disable_adapter"):
        return model.disable_adapter()
    return contextlib.nullcontext()
