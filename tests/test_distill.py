"""Distillation: the example's loss, stage distill with a resident and a cached teacher, against
plain torch on whole logits.
"""

import itertools
import math

import pytest
import torch

from tests.shared import layouts, tiny, tiny_moe, world
from tests.shared.distilling import (
    OBJECTIVES,
    curves_of,
    divergence,
    oracle_curves,
    save_models,
    teacher_of,
    whole_and_resumed_curves,
)
from tests.shared.examples import example
from tests.shared.held import Rows
from tests.shared.lora_tools import with_drawn_adapters
from tests.shared.losses import draw_head
from tests.shared.training import assert_same_curve, refusal, train

TP2PP2 = {**layouts.TP2, **layouts.PP2}
CP2_PACKED = {**layouts.CP2, **layouts.PACKED}
K = 5
ALL_TOKENS = tiny.VOCAB
OF_EXAMPLE = ("plain", None, "full")
WAYS = (None, K)  # resident, cached
ALL = [*itertools.product(OBJECTIVES, WAYS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(student's folder, teacher's, that of an adapter of the student)"""
    from tests.shared.lora_tools import peft_model

    folder = tmp_path_factory.mktemp("distill")
    student, teacher = save_models(folder)
    peft_model(student).save_pretrained(folder / "adapter")
    return student, teacher, str(folder / "adapter")


@pytest.fixture(scope="module")
def oracle(request, models, tmp_path_factory):
    """{(objective, k, "full" or "lora"): the curve of plain torch}, of the runs of this session."""
    asked = {OF_EXAMPLE, ("jsd", K, "full")}
    for item in request.session.items:
        if "layouts_distil" in item.name:
            runs = item.callspec.params["runs"]
            asked |= {(name, None if k == ALL_TOKENS else k, kind) for name, k, kind in runs}
    runs = sorted(asked, key=str)
    out = str(tmp_path_factory.mktemp("oracle"))
    curves = world.run(oracle_curves, 1, *models, out, runs, timeout_s=240)[0]
    return dict(zip(runs, curves, strict=True))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Folder of the rows, written by the first layout that asks, and read by the others."""
    return str(tmp_path_factory.mktemp("cache"))


# -- the example


def curve_of_example(student, teacher, out, **keys) -> list:
    module = example("distillation")
    module.TEACHER = teacher
    return train(student, out, trainer_class=module.KDTrainer, **keys)


@pytest.mark.parametrize(
    "ranks, keys",
    [(1, dict(backend="torch")), (4, TP2PP2), (2, CP2_PACKED)],
    ids=["torch", "tp2pp2", "cp2_packed"],
)
def test_the_examples_loss_equals_plain_torch_on_whole_logits(
    models, oracle, tmp_path, ranks, keys
):
    out = str(tmp_path)
    got = world.run(curve_of_example, ranks, *models[:2], out, loss_chunk_size=5, **keys)
    assert_same_curve(got[-1], oracle[OF_EXAMPLE])


# -- divergences

Q = [1 / 8, 1 / 8, 3 / 4]  # of a student
P = [1 / 2, 1 / 4, 1 / 4]  # of a teacher
LN2, LN3 = math.log(2), math.log(3)
BY_HAND = {
    # 1/2 ln 4 + 1/4 ln 2 + 1/4 ln 1/3
    "forward_kl": (dict(divergence="forward_kl"), 1.25 * LN2 - LN3 / 4),
    # 1/8 ln 1/4 + 1/8 ln 1/2 + 3/4 ln 3
    "reverse_kl": (dict(divergence="reverse_kl"), 0.75 * LN3 - 0.375 * LN2),
    # m = 5/16, 3/16, 1/2: the mean of KL(p, m) and KL(q, m)
    "jsd": (
        dict(divergence="jsd"),
        (0.5 * math.log(8 / 5) + 0.25 * math.log(4 / 3) - 0.25 * LN2) / 2
        + (0.125 * math.log(2 / 5) + 0.125 * math.log(2 / 3) + 0.75 * math.log(3 / 2)) / 2,
    ),
    # the first token and the others together: 1/2, 1/2 and 1/8, 7/8
    "top 1": (dict(divergence="forward_kl", top_k=1), 0.5 * math.log(4) + 0.5 * math.log(4 / 7)),
    # T = 1/2 squares the probabilities: 4/6, 1/6, 1/6 and 1/38, 1/38, 36/38; times T^2
    "cold": (
        dict(divergence="forward_kl", temperature=0.5),
        0.25 * (4 / 6 * math.log(4 / 6 * 38) + math.log(38 / 6) / 6 + math.log(38 / 216) / 6),
    ),
}


def logits_of(z):
    """Logits of one rank with these values [n, V]."""
    from mca_lite.loss_tokens import Head, Logits

    count, vocab = z.shape
    head = Head(None, vocab, 0, vocab, count, None, (1, count))
    labels = torch.zeros(count, dtype=torch.int64)
    return Logits(z, labels, z, torch.eye(vocab), head, torch.arange(count))


@pytest.mark.parametrize("name", BY_HAND)
def test_divergences_of_three_tokens_by_hand(name):
    from mca_lite.part_distill import DistillConfig, divergence_terms, log_probs_of, top_k_of

    keys, wanted = BY_HAND[name]
    config = DistillConfig(**keys)
    student, teacher = (logits_of(torch.tensor([probs]).log()) for probs in (Q, P))
    tokens, log_p = top_k_of(teacher, config.top_k or 3, config.temperature)
    log_q = log_probs_of(student, tokens, config.temperature)
    terms = divergence_terms(log_p[:, : log_q.shape[1]], log_q, config)
    assert config.temperature**2 * float(terms.sum()) == pytest.approx(wanted, rel=1e-5)
    whole = divergence(student.values, teacher.values, **keys)
    assert float(whole) == pytest.approx(wanted, rel=1e-5)  # the oracle of the curves


def test_the_rest_of_the_teachers_tokens_is_exact_where_it_is_tiny():
    """1 - sum of the probabilities would be 0 here, or rounding."""
    from mca_lite.part_distill import top_k_of

    _, logps = top_k_of(logits_of(torch.tensor([[50.0, 1.0, 0.0]])), 1, 1.0)
    assert logps[0].tolist() == pytest.approx([0.0, math.log(math.e + 1) - 50], rel=1e-6)


def cut_losses(rows: int, vocab: int, k: int) -> list:
    """Of a head cut over all ranks: divergence of its own top k from those of a second head, with
    gradients."""
    from mca_lite.part_distill import DistillConfig, divergence_terms, log_probs_of, top_k_of
    from tests.shared.losses import losses_of_cut_head

    hidden, weight, labels, grad = draw_head(vocab, (26,))
    config = DistillConfig(divergence="jsd", temperature=2.0)

    def of_logits(logits):
        with torch.no_grad():  # the teacher: the same head, of other hidden states
            values = logits.hidden.flip(1) @ logits.weight.t()
            tokens, log_p = top_k_of(logits_with(logits, values), k, 2.0)
        log_q = log_probs_of(logits, tokens, 2.0)
        return 4 * divergence_terms(log_p[:, : log_q.shape[1]], log_q, config).sum(1)

    return losses_of_cut_head(hidden, weight, labels, grad, 7, rows, of_logits)


def logits_with(logits, values):
    import dataclasses

    return dataclasses.replace(logits, product=values)


@pytest.mark.parametrize(
    "ranks, vocab, rows, k", [(2, 61, 31, 40), (4, 29, 16, 3), (4, 29, 16, 29)]
)  # of four ranks two have padding alone, and a rank has fewer tokens than k
def test_top_k_of_a_cut_vocabulary_has_the_gradients_of_a_whole_one(ranks, vocab, rows, k):
    hidden, weight, labels, grad = draw_head(vocab, (26,))
    hidden.requires_grad_(), weight.requires_grad_()
    kept = labels != -100
    with torch.no_grad():
        t = hidden.flip(1) @ weight.t()
    keys = dict(divergence="jsd", temperature=2.0, top_k=k)
    losses = divergence((hidden @ weight.t())[kept], t[kept], **keys)
    losses.backward(grad[kept].double())
    wanted = torch.zeros(26).index_put((kept,), losses.detach().float())
    for got in world.run(cut_losses, ranks, rows, vocab, k):
        for ours, theirs in zip(got, (wanted, hidden.grad, weight.grad), strict=True):
            torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=1e-5)


# -- curves

TORCH = dict(backend="torch")
SHORT = {
    "tp2pp2": (4, TP2PP2, [("forward", None, "full"), ("reverse", K, "full")]),
    "cp2_packed": (2, CP2_PACKED, [("jsd", None, "full"), ("reverse", K, "full")]),
    "torch": (1, TORCH, [("reverse", None, "lora"), ("jsd", K, "full")]),
    "one": (1, {}, [("jsd", K, "lora"), ("forward", ALL_TOKENS, "full")]),
}
KINDS = ["full", "lora", "lora", "full", "full", "lora"]  # each objective and each way in both
EVERY = [(*run, kind) for run, kind in zip(ALL, KINDS, strict=True)]
LONG = {
    f"{name}{end}": (ranks, {**keys, **rows}, EVERY)
    for name, (ranks, keys) in {**layouts.DENSE, **layouts.CUT, "torch_dp2": (2, TORCH)}.items()
    for end, rows in (("", {}), (" packed", layouts.PACKED))
}


@pytest.mark.parametrize(
    "ranks, keys, runs",
    [*SHORT.values(), *(pytest.param(*cell, marks=pytest.mark.full) for cell in LONG.values())],
    ids=[*SHORT, *(f"all_{name}" for name in LONG)],
)
def test_layouts_distil_as_plain_torch_on_whole_logits(
    models, oracle, cache, tmp_path, ranks, keys, runs
):
    found = world.run(curves_of, ranks, *models, str(tmp_path), cache, runs, **keys, timeout_s=400)
    for run, got in zip(runs, found[-1], strict=True):
        name, k, kind = run
        # all tokens of a cached teacher are the resident one
        wanted = oracle[name, None if k == ALL_TOKENS else k, kind]
        assert_same_curve(got, wanted)


def test_what_one_layout_wrote_others_read_without_a_teacher(models, oracle, tmp_path):
    runs = [("jsd", K, "full")]
    args = (*models, str(tmp_path / "a"), str(tmp_path / "cache"), runs)
    written = world.run(curves_of, 2, *args, **layouts.TP2_SP, dtype="float16")[0]
    for keys in (TORCH, CP2_PACKED):
        ranks = 1 if keys is TORCH else 2
        read = world.run(curves_of, ranks, *args, given=False, dtype="float16", **keys)[0]
        assert_same_curve(read[0], written[0])
    # float16 rounds log-probabilities to 2^-11 of themselves
    assert_same_curve(written[0], oracle["jsd", K, "full"], 5e-3)
    assert written[0] != oracle["jsd", K, "full"]


@pytest.mark.parametrize("keys", [{}, TORCH], ids=["megatron", "torch"])
def test_bf16_stays_beside_float32(models, oracle, tmp_path, keys):
    runs = [("jsd", K, "full"), OF_EXAMPLE]
    args = (*models, str(tmp_path), str(tmp_path / "cache"), runs)
    found = world.run(curves_of, 1, *args, bf16=True, **keys)[0]
    for run, got in zip(runs, found, strict=True):
        # bf16 rounds to 2^-9 of a number; a divergence is a difference of such logits
        assert_same_curve(got, oracle[run], 3e-2)
        assert got != oracle[run]


def words_for_an_adapted_head(student: str, teacher: str, out: str, backend: str) -> str:
    from mca_lite import DistillConfig, DistillTrainer

    def make(model, args, **more):
        whole = teacher_of(teacher, backend, args)
        adapted = with_drawn_adapters(whole, targets=("lm_head",))
        return DistillTrainer(model, DistillConfig(), adapted, args, **more)

    return refusal(train, student, out, backend=backend, trainer_class=make)


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_a_resident_teachers_adapter_on_its_head_is_refused(models, tmp_path, backend):
    student, teacher, _ = models
    args = (student, teacher, str(tmp_path), backend)
    [said] = world.run(words_for_an_adapted_head, 1, *args)
    assert "adapter on its output layer" in said and "teacher_top_k" in said


VOCAB = 509


def rows_of_logits(student, teacher, out, **keys) -> list:
    """Most rows of logits at one time, in chunks of 5 and 7 rows, of a resident and a cached
    teacher."""
    found = []
    brief = dict(steps=1, warmup_steps=0, per_device_train_batch_size=4)
    for number, (size, k) in enumerate(itertools.product((5, 7), WAYS)):
        with Rows((VOCAB, VOCAB + 3)) as mode:
            args = (student, teacher, "", f"{out}/{number}", f"{out}/cache-{number}")
            curves_of(*args, [("jsd", k, "full")], loss_chunk_size=size, **brief, **keys)
        found.append(mode.most)
    return found


@pytest.mark.parametrize("keys", [{}, TORCH], ids=["megatron", "torch"])
def test_logits_of_neither_model_are_held(tmp_path, keys):
    paths = save_models(tmp_path, vocab=VOCAB + 3, vocab_size=VOCAB)
    [rows] = world.run(rows_of_logits, 1, *paths, str(tmp_path), **keys)
    assert rows == [5, 5, 7, 7]


@pytest.mark.parametrize("k", WAYS)
def test_resume_is_bit_for_bit(models, tmp_path, k):
    cache = str(tmp_path / "cache")
    whole, parts = world.run(whole_and_resumed_curves, 2, *models, str(tmp_path), cache, k)[0]
    assert parts == whole and len(whole) == 4


# (student's family, teacher's): capped logits, experts on one side
PAIRS = {
    "of_capped_logits": ("qwen3", "gemma2", 4, TP2PP2),
    "to_capped_logits": ("gemma2", "qwen3", 1, TORCH),
    "of_experts": ("qwen3", "qwen3_moe", 2, CP2_PACKED),
    "to_experts": ("qwen3_moe", "qwen3", 2, {}),
    **{name: ("qwen3_moe", "qwen3_moe", *layout) for name, layout in layouts.EXPERTS.items()},
}
MARKED = [
    pytest.param(name, marks=[] if name == "of_capped_logits" else [pytest.mark.full])
    for name in PAIRS
]


@pytest.mark.parametrize("name", MARKED)
def test_models_of_two_families_distil_as_plain_torch(tmp_path, name):
    *families, ranks, keys = PAIRS[name]
    paths = []
    for seed, family in enumerate(families):
        save = tiny_moe.save_model if family in tiny_moe.MODELS else tiny.save_model
        paths.append(save(tmp_path / f"model-{seed}", family, seed=seed))
    args = (*paths, "", str(tmp_path))
    runs = [("jsd", None, "full"), ("reverse", K, "full")]
    wanted = world.run(oracle_curves, 1, *args, runs)[0]
    found = world.run(curves_of, ranks, *args, str(tmp_path / "cache"), runs, **keys)[-1]
    for got, theirs in zip(found, wanted, strict=True):
        assert_same_curve(got, theirs)
