"""Losses on the logits: the example's z loss against whole logits in plain torch, in every kind of
layout; what a function of the logits gets, and the gradients of all of it, on one rank and on two.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.shared import layouts, tiny, world
from tests.shared.examples import example
from tests.shared.losses import draw_head, losses_of_cut_head
from tests.shared.training import assert_same_curve, train

WEIGHT = 0.05  # large enough to show


def z_trainer(whole: bool = False):
    """The example's trainer; whole: with plain torch on the whole logits in place of its hook."""
    module = example("z_loss")
    module.WEIGHT = WEIGHT

    class WholeLogits(module.ZLossTrainer):
        _loss_of_logits = None

        def forward_step(self, data_iterator, model):
            batch = next(data_iterator)
            inputs = self._prepare_train_inputs(iter([batch]))
            labels = inputs.pop("labels")
            logits = model(**inputs).float()
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            squares = logits.logsumexp(-1).square() * (labels != -100)
            output = torch.stack([losses.view(labels.shape), squares], -1)
            return output, self.guard.mark(self._pre_compute_loss(batch, {"labels": labels}))

    return WholeLogits if whole else module.ZLossTrainer


def curve_with_log_z(path, out, whole=False, **keys):
    lines = []

    from mca_lite import TrainerCallback

    class Lines(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            lines.append(logs.get("log_z_squared", 0.0))

    got = train(path, out, trainer_class=z_trainer(whole), callbacks=[Lines()], **keys)
    return got + [(line, 0.0) for line in lines]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """{family: (its folder, the curve of plain torch on whole logits)}"""
    found = {}
    for family in ("qwen3", "gemma2"):
        folder = tmp_path_factory.mktemp(family)
        path = tiny.save_model(folder / "model", family)
        keys = dict(backend="torch", whole=True)
        found[family] = path, world.run(curve_with_log_z, 1, path, str(folder / "whole"), **keys)[0]
    return found


LAYOUTS = {
    "torch": (1, dict(backend="torch")),
    "tp2": (2, layouts.TP2),
    "tp2_sp_packed": (2, {**layouts.TP2_SP, **layouts.PACKED}),
    "cp2": (2, layouts.CP2),
    "pp2": (2, layouts.PP2),
}
CELLS = [("qwen3", name) for name in LAYOUTS] + [("gemma2", "torch"), ("gemma2", "tp2")]


@pytest.mark.parametrize("family, layout", CELLS)
def test_the_examples_z_loss_equals_plain_torch_on_whole_logits(oracles, tmp_path, family, layout):
    ranks, keys = LAYOUTS[layout]
    path, wanted = oracles[family]
    assert wanted[-1][0] > 1  # the squares, which show in the loss
    got = world.run(curve_with_log_z, ranks, path, str(tmp_path), loss_chunk_size=5, **keys)
    assert_same_curve(got[0], wanted)


def predictions(path, out, backend) -> list:
    """Of the z loss, and of plain cross entropy; and the names of a later evaluation."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    args, found = TrainingArguments(output_dir=out, disable_tqdm=True), []
    for make in (z_trainer(), McaTrainer):
        model = load_torch_model(path) if backend == "torch" else AutoModel.from_pretrained(
            path, args
        )  # fmt: skip
        trainer = make(model, args, eval_dataset=tiny.samples(5))
        found.append(trainer.predict(tiny.samples(5)).predictions.tolist())
        found.append(sorted(trainer.evaluate()))
    return found


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_log_probabilities_are_the_models_whatever_it_minimises(oracles, tmp_path, backend):
    [found] = world.run(predictions, 1, oracles["qwen3"][0], str(tmp_path), backend)
    assert found[0] == found[2] and found[1] == ["eval_log_z_squared", "eval_loss"]


# -- a function of the logits


VOCAB = 61  # no multiple of 2 or 4


def everything(logits, vocab):
    """[n, 2]: cross entropy smoothed over the vocabulary; and a norm of the hidden states with the
    logits of halved hidden states, whose products with the head are the function's own."""
    halved = logits.spread(logits.hidden / 2) @ logits.weight.t()
    parts = torch.stack([logits.values.sum(1), halved.tanh().sum(1)])
    total, rest = logits.sum(parts.t()).unbind(1)  # of a view whose rows do not follow each other
    smoothed = 0.9 * logits.cross_entropy() + 0.1 * (logits.logsumexp() - total / vocab)
    return torch.stack([smoothed, logits.hidden.square().sum(1) + rest], 1)


def on_whole(hidden, weight, labels):
    z = hidden @ weight.t()
    smoothed = F.cross_entropy(z, labels, reduction="none", label_smoothing=0.1)
    rest = hidden.square().sum(1) + (hidden / 2 @ weight.t()).tanh().sum(1)
    return torch.stack([smoothed, rest], 1)


def draw(vocab: int = VOCAB) -> tuple:
    return draw_head(vocab, (26,), (2,))


def cut_losses(chunk_size: int, vocab: int, rows: int) -> list:
    of_logits = functools.partial(everything, vocab=vocab)
    return losses_of_cut_head(*draw(vocab), chunk_size, rows, of_logits)


@pytest.mark.parametrize(
    "ranks, vocab, rows",
    [(1, VOCAB, 61), (2, VOCAB, 31), (4, VOCAB, 16), (4, 29, 16)],
    ids=["1", "2", "4", "4, two of which have padding alone"],
)
def test_a_function_of_the_logits_has_its_gradients_in_every_layout(ranks, vocab, rows):
    hidden, weight, labels, grad = draw(vocab)
    hidden.requires_grad_(), weight.requires_grad_()
    kept = labels != -100
    losses = on_whole(hidden[kept], weight, labels[kept])
    losses.backward(grad[kept])
    wanted = torch.zeros(26, 2).index_put((kept,), losses.detach())
    for got in world.run(cut_losses, ranks, 7, vocab, rows):
        for ours, theirs in zip(got, (wanted, hidden.grad, weight.grad), strict=True):
            torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=1e-5)


def logits_seen(labels, function, chunk_size=4):
    from mca_lite.loss_tokens import token_losses

    hidden, weight, _, _ = draw()
    seen = []

    def noted(logits):
        seen.append(tuple(logits.values.shape))
        return function(logits)

    labels = torch.tensor(labels)
    return token_losses(
        hidden[: len(labels)], weight, labels, chunk_size=chunk_size, of_logits=noted
    ), seen


def test_a_chunk_of_the_logits_is_there_at_a_time_and_rows_without_a_label_never():
    losses, seen = logits_seen([1, 2, -100, 4, 5, 6, 7], lambda logits: logits.cross_entropy())
    assert seen == [(4, VOCAB), (2, VOCAB)]
    assert losses[2] == 0 and losses.shape == (7,)
    hidden, weight, _, _ = draw()
    wanted = F.cross_entropy(hidden[:1] @ weight.t(), torch.tensor([1]))
    assert losses[0] == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("sequence_first", [False, True])
def test_the_tokens_of_a_chunk_are_taken_from_columns_of_the_batch(sequence_first):
    from mca_lite.loss_tokens import token_losses

    hidden, weight, _, _ = draw()
    places = torch.arange(12).view(4, 3)  # of a micro-batch [b, s], [s, b] in the model
    labels = torch.where(places % 4 == 1, -100, places)
    column = torch.stack([places, -places], -1)
    shown, hidden = labels, hidden[:12].view(4, 3, -1)
    if sequence_first:
        shown, hidden = labels.t(), hidden.transpose(0, 1)

    def taken(logits):
        assert logits.take(column).tolist() == [[n, -n] for n in logits.labels.tolist()]
        return logits.take(places).float()

    keys = dict(chunk_size=4, of_logits=taken, sequence_first=sequence_first)
    losses = token_losses(hidden, weight, shown.contiguous(), **keys)
    assert losses.tolist() == torch.where(shown == -100, 0, shown).tolist()


def test_a_row_without_any_label_has_as_many_losses_and_a_bad_label_is_nan():
    losses, _ = logits_seen([-100] * 3, lambda logits: torch.stack([logits.cross_entropy()] * 2, 1))
    assert losses.shape == (3, 2) and not losses.any()
    losses, _ = logits_seen([1, 99], lambda logits: logits.cross_entropy())
    assert losses.isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_cross_entropy_as_a_function_of_the_logits_has_the_usual_gradients(dtype, softcap):
    from mca_lite.loss_tokens import token_losses

    hidden, weight, labels, grad = draw()
    low, high = torch.randn(26, 3), torch.randn(VOCAB, 3)  # of an adapter on the head
    got = []
    for function in (None, lambda logits: logits.cross_entropy()):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, low, high)]
        losses = token_losses(
            *leaves[:2], labels, chunk_size=7, extra=leaves[2:], softcap=softcap, of_logits=function
        )
        losses.backward(grad[:, 0])
        got.append([losses.detach(), *(leaf.grad.float() for leaf in leaves)])
    for theirs, ours in zip(*got, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


def test_losses_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"gave \[\] for 3 tokens: expected \[n\] or \[n, k\]"):
        logits_seen([1, 2, 3], lambda logits: logits.cross_entropy().mean())
