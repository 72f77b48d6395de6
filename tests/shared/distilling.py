"""Distillation in tests: a student and a teacher, runs of ours in any layout, and plain torch on
whole logits as the oracle.
"""

import functools

import torch
import torch.nn.functional as F

from tests.shared import tiny
from tests.shared.training import train

# name -> fields of DistillConfig
OBJECTIVES = {
    "forward": dict(divergence="forward_kl", temperature=2.0),
    "reverse": dict(divergence="reverse_kl", ce_weight=0.25),
    "jsd": dict(divergence="jsd", jsd_mix=0.3, temperature=1.5, ce_weight=0.5),
}
PLAIN = dict(divergence="forward_kl")
TEACHER_VOCAB = 64  # with rows that only pad: cut in other places than the student's 61


def save_models(folder, family: str = "qwen3", vocab: int = TEACHER_VOCAB, **changes):
    """(student's folder, teacher's folder) of models of other sizes."""
    student = tiny.save_model(folder / "student", family, **changes)
    sizes = dict(hidden_size=48, intermediate_size=40, vocab_size=vocab)
    teacher = tiny.save_model(folder / "teacher", family, seed=5, **{**changes, **sizes})
    return student, teacher


# -- plain torch


def events(z: torch.Tensor, t: torch.Tensor, temperature: float, top_k: int | None):
    """(q, p): probabilities in float64 of the student and the teacher, [.., V] or, of the teacher's
    top_k tokens and the others, [.., k + 1]."""
    size = min(z.shape[-1], t.shape[-1])
    q, p = ((x[..., :size].double() / temperature).softmax(-1) for x in (z, t))
    if top_k is None or top_k == size:
        return q, p
    places = p.topk(top_k).indices
    mask = torch.ones_like(p).scatter(-1, places, 0.0)
    return tuple(
        torch.cat([x.gather(-1, places), (x * mask).sum(-1, keepdim=True)], -1) for x in (q, p)
    )


def divergence(z, t, divergence, jsd_mix=0.5, temperature=1.0, top_k=None, **_) -> torch.Tensor:
    """T^2 D of whole logits, by torch's own kl_div, in float64."""
    q, p = events(z, t, temperature, top_k)

    def kl(a, b):
        return F.kl_div(b.log(), a, reduction="none").sum(-1)

    if divergence == "jsd":
        m = jsd_mix * p + (1 - jsd_mix) * q
        found = jsd_mix * kl(p, m) + (1 - jsd_mix) * kl(q, m)
    else:
        found = kl(p, q) if divergence == "forward_kl" else kl(q, p)
    return temperature**2 * found


def whole_trainer(teacher: str, objective: dict):
    """A trainer on the torch backend whose losses are taken of whole logits."""
    from mca_lite import McaTrainer
    from mca_lite.model import load_torch_model

    class WholeLogits(McaTrainer):
        def forward_step(self, data_iterator, model):
            batch = next(data_iterator)
            inputs = self._prepare_train_inputs(iter([batch]))
            labels = inputs.pop("labels")
            z = model(**inputs).float()
            with torch.no_grad():
                t = load_torch_model(teacher)(batch["input_ids"]).logits.float()
            kept = labels != -100
            of_tokens = divergence(z, t, **objective).float() * kept
            cross_entropy = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none")
            weight = objective.get("ce_weight", 0.0)
            losses = (1 - weight) * of_tokens + weight * cross_entropy.view(labels.shape)
            return losses, self.guard.mark(self._pre_compute_loss(batch, {"labels": labels}))

    return WholeLogits


def oracle_curve(student, teacher, out, objective, **keys) -> list:
    """The curve of plain torch."""
    keys = {"backend": "torch", **keys}
    return train(student, out, trainer_class=whole_trainer(teacher, objective), **keys)


# -- ours


def our_curve(student, teacher, out, objective, given=True, metrics=None, **keys) -> list:
    """The curve of DistillTrainer. given: False without a teacher, for a cache. metrics: a list for
    the lines of the log."""
    from mca_lite import AutoModel, DistillConfig, DistillTrainer
    from mca_lite.model import load_torch_model

    def load(args):
        if keys.get("backend") == "torch":
            return load_torch_model(teacher)
        return AutoModel.from_pretrained(teacher, args)

    def make(model, args, callbacks=None, **data):
        config = DistillConfig(**objective)
        loaded = functools.partial(load, args) if given else None
        trainer = DistillTrainer(model, config, loaded, args, callbacks=callbacks, **data)
        if metrics is not None:
            metrics.append(trainer.state)
        return trainer

    return train(student, out, trainer_class=make, **keys)
