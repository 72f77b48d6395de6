"""Distillation in tests: a student and a teacher, runs of ours in any layout, and plain torch on
whole logits as the oracle.
"""

import functools

import torch
import torch.nn.functional as F

from tests.shared import tiny
from tests.shared.layouts import PP2
from tests.shared.training import train, whole_and_resumed

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


def rows_of_torch(teacher: str, samples: list[dict], objective: dict) -> tuple:
    """(tokens int64 [rows, k], log-probabilities [rows, k + 1]) of the samples' trained tokens by
    transformers' model: those of the student's ids that it finds likeliest, and of all others."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    tokens, logps = [], []
    with torch.no_grad():
        for sample in samples:
            ids, labels = (torch.as_tensor(sample[name]) for name in ("input_ids", "labels"))
            logits = model(ids[None]).logits[0, labels != -100]
            of_student = logits[:, : tiny.VOCAB] / objective.get("temperature", 1.0)
            order = of_student.log_softmax(-1).sort(descending=True)
            k = objective["top_k"]
            tokens.append(order.indices[:, :k])
            rest = order.values[:, k:].logsumexp(-1, keepdim=True)
            logps.append(torch.cat([order.values[:, :k], rest], 1))
    return torch.cat(tokens).numpy(), torch.cat(logps).numpy()


def whole_trainer(teacher: str, objective: dict):
    """A trainer on the torch backend whose losses are taken of whole logits."""
    from mca_lite import McaTrainer
    from mca_lite.model import load_torch_model

    taught = load_torch_model(teacher)

    class WholeLogits(McaTrainer):
        def forward_step(self, data_iterator, model):
            batch = next(data_iterator)
            inputs = self._prepare_train_inputs(iter([batch]))
            labels = inputs.pop("labels")
            z = model(**inputs).float()
            with torch.no_grad():
                t = taught(batch["input_ids"]).logits.float()
            kept = labels != -100
            of_tokens = divergence(z, t, **objective).float() * kept
            cross_entropy = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none")
            weight = objective.get("ce_weight", 0.0)
            losses = (1 - weight) * of_tokens + weight * cross_entropy.view(labels.shape)
            return losses, self.guard.mark(self._pre_compute_loss(batch, {"labels": labels}))

    return WholeLogits


# a run: (name of OBJECTIVES, or "plain"; k of a cached teacher, None: resident; "full" or "lora")


def keys_of_run(run: tuple) -> dict:
    name, k, _ = run
    return dict(OBJECTIVES.get(name, PLAIN), top_k=k)


def adapting(adapter: str, kind: str):
    from mca_lite.part_lora import load_adapter

    return functools.partial(load_adapter, folder=adapter) if kind == "lora" else None


def oracle_curves(student, teacher, adapter, out, runs) -> list:
    """The curves of plain torch."""
    return [
        train(
            student,
            f"{out}/{number}",
            backend="torch",
            trainer_class=whole_trainer(teacher, keys_of_run(run)),
            adapt=adapting(adapter, run[-1]),
        )
        for number, run in enumerate(runs)
    ]


# -- ours


def teacher_of(folder: str, backend: str, args):
    from mca_lite import AutoModel
    from mca_lite.model import load_torch_model

    if backend == "torch":
        return load_torch_model(folder)
    return AutoModel.from_pretrained(folder, args)


def maker(teacher: str, config: dict, backend: str, given: bool = True):
    """A function that makes a DistillTrainer of McaTrainer's arguments. given: False without its
    teacher, for rows of an earlier run."""
    from mca_lite import DistillConfig, DistillTrainer

    def make(model, args, **more):
        loads = functools.partial(teacher_of, teacher, backend, args) if given else None
        return DistillTrainer(model, DistillConfig(**config), loads, args, **more)

    return make


def our_curve(student, teacher, out, config, backend="megatron", given=True, **keys) -> list:
    """The curve of DistillTrainer."""
    make = maker(teacher, config, backend, given)
    return train(student, out, trainer_class=make, backend=backend, **keys)


def curves_of(
    student, teacher, adapter, out, cache, runs, given=True, dtype="float32", **keys
) -> list:
    """The curves of DistillTrainer, in chunks of few tokens; the rows of each cached teacher have a
    folder in `cache`."""
    keys = {"loss_chunk_size": 5, **keys}
    curves = []
    for number, run in enumerate(runs):
        config = keys_of_run(run)
        if run[1] is not None:
            config |= dict(cache=f"{cache}/{run[0]}-{run[1]}", cache_dtype=dtype)
        adapt = adapting(adapter, run[-1])
        curves.append(
            our_curve(student, teacher, f"{out}/{number}", config, given=given, adapt=adapt, **keys)
        )
    return curves


def whole_and_resumed_curves(student, teacher, adapter, out, cache, k) -> tuple[list, list]:
    """(curve, that of a run which died after its second step and went on) at pp2, with dropout."""
    config = dict(keys_of_run(("jsd", k, "full")), cache=None if k is None else cache)
    keys = dict(PP2, attention_dropout=0.1)
    make = maker(teacher, config, "megatron")
    return whole_and_resumed(student, out, trainer_class=make, **keys)
