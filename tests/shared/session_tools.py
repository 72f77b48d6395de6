"""A Session in any layout beside formulas on whole logits of the transformers model: samples, one
real update, then the gradients of losses.
"""

from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.shared import pictures, tiny, world
from tests.shared.layouts import CP2, DIST_OPT, OVERLAP, PP2, TP2_SP, VPP2

TOLERANCE = 1e-5
UPDATE = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=0.5)
STILL = dict(lr=0.0, weight_decay=0.0, max_grad_norm=0.0)  # an update that changes no weight
PACKED = dict(sequence_packing=True)
LAYOUTS = {
    "torch": (1, dict(backend="torch")),
    "torch_dp2": (2, dict(backend="torch")),
    "one": (1, {}),
    "packed": (1, PACKED),
    "tp2": (2, TP2_SP),
    "pp2": (2, PP2),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "dp2": (2, {}),  # the second call leaves a rank with fillers alone
    "dist_opt_packed": (2, {**DIST_OPT, **PACKED}),
    "overlap": (2, OVERLAP),
}
MORE_LAYOUTS = {
    "cp2": (2, CP2),
    "torch_packed": (1, dict(backend="torch", **PACKED)),
    "pp2_vpp2": (2, {**PP2, **VPP2, "gradient_accumulation_steps": 2}),
    "cp2dp2": (4, {**CP2, **DIST_OPT, **PACKED}),
    "pp2dp2_overlap": (4, {**PP2, **OVERLAP}),
}


def log_probs_of(model, sample: dict, temperature: float = 1.0) -> tuple:
    """(log-probabilities of the labels, 0 without; entropies) [n], by whole logits."""
    given = dict(input_ids=torch.as_tensor(sample["input_ids"])[None])
    if "rope_t" in sample:  # of a model with pictures
        given = pictures.inputs_of(model, sample)
    logits = model(**given).logits[0].float() / temperature
    whole = torch.log_softmax(logits, -1)
    labels = torch.as_tensor(sample["labels"])
    of_labels = whole.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return of_labels.masked_fill(labels == -100, 0.0), -(whole.exp() * whole).sum(-1)


def padded_columns(model, samples: list[dict], temperature: float = 1.0) -> tuple:
    """(log p, entropy, 1 for trained tokens, o, q, sampler_weight, A), each [samples, n] with zeros
    after a sample, as other trainers pass them to their losses."""
    rows = []
    for sample in samples:
        logps, entropy = log_probs_of(model, sample, temperature)
        is_trained = (torch.tensor(sample["labels"]) != -100).float()
        names = ("old_logp", "ref_logp", "sampler_weight", "advantage")
        columns = [torch.tensor(sample[name]).expand(len(logps)) for name in names]
        rows.append([x.nan_to_num() for x in (logps, entropy, is_trained, *columns)])
    return tuple(pad_sequence(list(column), True) for column in zip(*rows, strict=True))


def samples_of(model) -> list[dict]:
    """Samples of unequal length with every column; one has no label, one a gap in its answer."""
    generator = torch.Generator().manual_seed(3)

    def noisy(values, scale):
        return values + scale * torch.randn(len(values), generator=generator)

    found = []
    for i in range(8):
        prompt = 3 + i % 4
        answer = 2 + (5 * i) % 7
        ids = torch.randint(1, tiny.VOCAB, (prompt + answer + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[:prompt] = -100
        if i == 2:
            labels[prompt] = -100  # of a tool
        if i == 4:
            labels[:] = -100
        sample = dict(input_ids=ids[:-1].tolist(), labels=labels.tolist())
        with torch.no_grad():
            logps, _ = log_probs_of(model, sample)
        advantage = torch.randn((), generator=generator)
        nothing = torch.full((prompt,), float("nan"))  # ignored there
        columns = dict(
            advantage=float(advantage) if i % 2 else noisy(advantage.expand(len(labels)), 0.2),
            old_logp=torch.cat([nothing, noisy(logps, 0.3)[prompt:]]),
            ref_logp=noisy(logps, 0.3),
            sampler_weight=torch.rand(len(labels), generator=generator) + 0.5,
        )
        found.append(
            sample | {k: getattr(v, "tolist", lambda v=v: v)() for k, v in columns.items()}
        )
    return found


def update_with_torch(model, samples: list[dict]) -> float:
    """Train a model by one update of cross entropy -> the norm of its gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = UPDATE["weight_decay"]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=UPDATE["lr"], betas=UPDATE["betas"], eps=UPDATE["eps"])
    count = sum(label != -100 for sample in samples for label in sample["labels"])
    (-sum(log_probs_of(model, sample)[0].sum() for sample in samples) / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, UPDATE["max_grad_norm"])
    optimizer.step()
    return float(norm)


def make_oracle(folder: Path, losses: dict) -> str:
    """A folder with a model, the samples, and what a Session has to give: oracle.pt.

    losses: {name: function(model, samples) -> the loss of the whole update}.
    """
    from mca_lite.model import load_torch_model

    path = tiny.save_model(folder / "model", "qwen3")
    model = load_torch_model(path)
    samples = samples_of(model)
    norm = update_with_torch(model, samples)
    with torch.no_grad():
        found = [log_probs_of(model, sample) for sample in samples]
    logps, entropies = zip(*found, strict=True)
    gradients = {}
    for name, loss in losses.items():
        model.zero_grad()
        loss(model, samples).backward()
        gradients[name] = {key: p.grad.clone() for key, p in model.named_parameters()}
    facts = dict(samples=samples, norm=norm, logps=logps, entropies=entropies, gradients=gradients)
    torch.save(facts, folder / "oracle.pt")
    return str(folder)


def new_session(folder: str, backend: str = "megatron", adapt=None, **keys):
    from mca_lite import AutoModel, Session
    from mca_lite.model import load_torch_model
    from tests.shared.training import arguments

    args = arguments(**{"per_device_train_batch_size": 2, **keys})
    path = f"{folder}/model"
    if backend == "torch":
        model = load_torch_model(path)
    else:
        model = AutoModel.from_pretrained(path, args)
    return Session(adapt(model) if adapt else model, args)


def with_adapters(model):
    """A model with adapters of which none begins at zero."""
    from mca_lite.part_lora import inject
    from mca_lite.part_lora_layers import LoraSpec

    inject(model, LoraSpec(rank=4), seed=1)
    generator = torch.Generator().manual_seed(2)
    model.finetuning.fill_fresh(
        model, lambda key, shape: 0.1 * torch.randn(shape, generator=generator)
    )
    return model


def refusal(call, *args, **keys) -> str:
    """The words of the ValueError that a call raises."""
    with pytest.raises(ValueError) as caught:
        call(*args, **keys)
    return str(caught.value)


def gradients_of(session) -> dict:
    """The gradients of the last update, on the main rank. The weights stay."""
    kept = [(parameter, parameter.data) for parameter in session.model.parameters()]
    found = {name: tensor.clone() for name, tensor in session.backend.gradients()}
    for parameter, data in kept:
        parameter.data = data
    return found


def largest_error(found: dict, wanted: dict) -> float:
    """Of all parameters, relative to each one's norm."""
    assert not found or found.keys() == wanted.keys()
    errors = [(found[name] - wanted[name]).norm() / wanted[name].norm() for name in found]
    return float(max(errors, default=0.0))


def add(session, samples, call: dict) -> None:
    """Add the gradient of a row of CALLS."""
    if "function" in call:
        documents = [{k: s[k] for k in ("input_ids", "labels")} for s in samples]
        session.forward_backward_custom(documents, call["function"])
        return
    loss, numbers = call["loss"], call.get("numbers", {})
    read = call["columns"]
    kept = [{k: v for k, v in s.items() if k in ("input_ids", "labels", *read)} for s in samples]
    session.forward_backward(kept, loss, **numbers)


def largest_difference(found, wanted) -> float:
    return float((torch.cat([*found]) - torch.cat([*wanted])).abs().max())


def errors_of_shares(session, oracle: dict) -> dict:
    """The errors of calls with other samples on each replica, all but one of them on the first, and
    of samples packed by best fit."""
    replica, replicas = session.backend.dp_rank, session.backend.dp_size
    numbers = [*range(len(oracle["samples"]))]
    numbers = numbers[-replica:][:1] if replica else numbers[: len(numbers) + 1 - replicas]
    samples, logps, entropies = (
        [oracle[name][i] for i in numbers] for name in ("samples", "logps", "entropies")
    )
    documents = [{k: one[k] for k in ("input_ids", "labels")} for one in samples]
    here = [torch.tensor(one["labels"]) != -100 for one in samples]
    entropies = [values * is_trained for values, is_trained in zip(entropies, here, strict=True)]
    errors = {}
    for cutoff_len in None, 20:
        session.cutoff_len = cutoff_len
        both = torch.cat(session.log_probs(samples, entropy=True, own=True))
        wanted = torch.stack([torch.cat(logps), torch.cat(entropies)], 1)
        given = session.forward_backward(documents, "cross_entropy", own=True)
        assert [len(x) for x in given.logps] == [len(one["labels"]) for one in samples]
        session.optim_step(**STILL)
        words = f"own, cutoff_len {cutoff_len}"
        errors[f"log_probs, {words}"] = float((both - wanted).abs().max())
        found = gradients_of(session)
        errors[f"cross_entropy, {words}"] = largest_error(
            found, oracle["gradients"]["cross_entropy"]
        )
    session.cutoff_len = None
    return errors


def errors_of(folder: str, calls: dict, keys: dict) -> dict:
    """{what: largest error on this rank} of log-probabilities after an update, and of gradients of
    each row of `calls`, by one call and by two; with cross entropy among them of
    errors_of_shares."""
    oracle = torch.load(f"{folder}/oracle.pt", weights_only=False)
    samples = oracle["samples"]
    session = new_session(folder, **keys)
    plain = {"loss": "cross_entropy", "columns": ()}
    for part in samples[:5], samples[5:]:
        add(session, part, plain)
    step = session.optim_step(**UPDATE)
    errors = {"norm": abs(step.grad_norm / oracle["norm"] - 1)}
    logps = session.log_probs(samples)
    differences = [a - b for a, b in zip(logps, oracle["logps"], strict=True)]
    errors["log_probs"] = float(torch.cat(differences).abs().max())
    for name, call in calls.items():
        for cut in call.get("cuts", (8, 6)):
            for part in samples[:cut], samples[cut:]:
                if part:
                    add(session, part, call)
            step = session.optim_step(**STILL, **call.get("step", {}))
            assert step.denominator == call["denominator"] and not step.skipped
            found = gradients_of(session)
            key = f"{name}, {'one call' if cut == 8 else 'two calls'}"
            errors[key] = largest_error(found, oracle["gradients"][name])
    if "cross_entropy" in calls:
        errors |= errors_of_shares(session, oracle)
    return errors


def wrong_of(folder: str, calls: dict, layout: str) -> str:
    """The errors of a layout's ranks above the tolerance."""
    ranks, keys = (LAYOUTS | MORE_LAYOUTS)[layout]
    found = world.run(errors_of, ranks, folder, calls, keys, timeout_s=120)
    return "\n".join(
        f"rank {rank}, {what}: {error:.1e}"
        for rank, errors in enumerate(found)
        for what, error in errors.items()
        if not error <= (1e-6 if what.startswith("log_probs") else TOLERANCE)
    )
