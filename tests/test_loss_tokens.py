"""Token losses on one rank, against torch's cross entropy over logits that are held whole."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mca_lite import loss_tokens
from mca_lite.loss_tokens import token_losses

TOLERANCE = dict(rtol=1e-6, atol=1e-6)  # fp32: the two differ in the order of their sums only


def token_problem(rows=13, hidden=16, vocab=37, ignored=(2, 5, 6, 12), seed=0):
    """(hidden [rows, h], weight [V, h], labels [rows]) with rows that carry no loss."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(rows, hidden, generator=g, requires_grad=True)
    w = (torch.randn(vocab, hidden, generator=g) * 0.5).requires_grad_()
    y = torch.randint(0, vocab, (rows,), generator=g)
    y[list(ignored)] = -100
    return h, w, y


def torch_losses(h, w, y, row_weights, vocab=None):
    """(losses, d hidden, d weight) of the weighted sum, through torch."""
    h, w = h.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    logits = F.linear(h, w)[..., :vocab].float()
    losses = F.cross_entropy(
        logits.flatten(0, -2), y.flatten(), ignore_index=-100, reduction="none"
    ).view(y.shape)
    (losses * row_weights).sum().backward()
    return losses.detach(), h.grad, w.grad


@pytest.mark.parametrize("ignored", [(2, 5, 6, 12), ()], ids=["some", "all"])  # have a label
@pytest.mark.parametrize(
    "chunk_size", [1, 4, 5, 9, 1024]
)  # 9 or 13 rows are kept: 4 and 5 leave a shorter chunk
def test_losses_and_gradients_equal_cross_entropy_for_any_chunk(chunk_size, ignored):
    h, w, y = token_problem(ignored=ignored)
    losses = token_losses(h, w, y, chunk_size=chunk_size)
    losses.sum().backward()
    expected, d_hidden, d_weight = torch_losses(h, w, y, torch.ones(13))
    assert losses.dtype == torch.float32 and losses.shape == y.shape
    torch.testing.assert_close(losses, expected, **TOLERANCE)
    torch.testing.assert_close(h.grad, d_hidden, **TOLERANCE)
    torch.testing.assert_close(w.grad, d_weight, **TOLERANCE)


def test_capped_logits_have_the_loss_and_gradients_of_tanh():
    h, w, y = token_problem(vocab=40)
    y[y >= 37] = 3
    losses = token_losses(h, w, y, vocab_size=37, chunk_size=4, softcap=1.5)
    losses.sum().backward()
    h2, w2 = h.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    logits = 1.5 * torch.tanh(F.linear(h2, w2)[:, :37] / 1.5)
    expected = F.cross_entropy(logits, y, ignore_index=-100, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses, expected, **TOLERANCE)
    torch.testing.assert_close(h.grad, h2.grad, **TOLERANCE)
    torch.testing.assert_close(w.grad, w2.grad, **TOLERANCE)


def test_every_row_may_have_a_weight_of_its_own_of_either_sign():
    h, w, y = token_problem()
    row_weights = torch.linspace(-3.0, 2.0, 13)
    (token_losses(h, w, y, chunk_size=4) * row_weights).sum().backward()
    _, d_hidden, d_weight = torch_losses(h, w, y, row_weights)
    torch.testing.assert_close(h.grad, d_hidden, **TOLERANCE)
    torch.testing.assert_close(w.grad, d_weight, **TOLERANCE)


def test_a_gradient_that_is_expanded_from_one_number_is_taken():
    h, w, y = token_problem()
    token_losses(h, w, y, chunk_size=4).mean().backward()
    _, d_hidden, _ = torch_losses(h, w, y, torch.full((13,), 1 / 13))
    torch.testing.assert_close(h.grad, d_hidden, **TOLERANCE)


def test_leading_dimensions_stay_and_a_transposed_view_is_taken():
    h, w, y = token_problem(rows=12, ignored=(0, 7))
    view = h.view(3, 4, 16).transpose(0, 1)  # not contiguous: megatron's [s, b, h]
    labels = y.view(3, 4).t()
    losses = token_losses(view, w, labels, chunk_size=5)
    losses.sum().backward()
    expected, d_hidden, _ = torch_losses(h, w, y, torch.ones(12))
    assert losses.shape == (4, 3)
    torch.testing.assert_close(losses.t().reshape(-1), expected, **TOLERANCE)
    torch.testing.assert_close(h.grad, d_hidden, **TOLERANCE)


def test_columns_that_only_pad_the_vocabulary_take_no_part():
    h, w, y = token_problem(vocab=40)
    y[y >= 37] = 3
    losses = token_losses(h, w, y, vocab_size=37, chunk_size=4)
    losses.sum().backward()
    expected, d_hidden, d_weight = torch_losses(h, w, y, torch.ones(13), vocab=37)
    torch.testing.assert_close(losses, expected, **TOLERANCE)
    torch.testing.assert_close(h.grad, d_hidden, **TOLERANCE)
    torch.testing.assert_close(w.grad, d_weight, **TOLERANCE)
    assert torch.equal(w.grad[37:], torch.zeros(3, 16))
    with torch.no_grad():
        w[37:] = 1e4  # whatever stands there
    assert torch.equal(token_losses(h, w, y, vocab_size=37, chunk_size=4), losses)


def test_a_batch_without_labels_has_loss_zero_and_gradients_of_zeros():
    h, w, _ = token_problem()
    losses = token_losses(h, w, torch.full((13,), -100))
    losses.sum().backward()
    assert torch.equal(losses, torch.zeros(13))
    # zeros, not None: data parallel ranks that have labels wait for this rank's gradients
    assert torch.equal(h.grad, torch.zeros_like(h)) and torch.equal(w.grad, torch.zeros_like(w))


def test_ignored_rows_get_no_gradient_even_where_their_values_are_not_finite():
    h, w, y = token_problem()
    with torch.no_grad():
        h[2] = float("nan")
    losses = token_losses(h, w, y)
    losses.sum().backward()
    assert losses[2] == 0 and torch.equal(h.grad[2], torch.zeros(16))
    assert h.grad.isfinite().all() and w.grad.isfinite().all()


def test_a_frozen_weight_gets_no_gradient():
    h, w, y = token_problem()
    w.requires_grad_(False)
    token_losses(h, w, y).sum().backward()
    assert w.grad is None
    torch.testing.assert_close(h.grad, torch_losses(h, w, y, torch.ones(13))[1], **TOLERANCE)


def test_frozen_hidden_states_get_no_gradient():
    h, w, y = token_problem()
    token_losses(h.detach(), w, y).sum().backward()
    assert h.grad is None
    torch.testing.assert_close(w.grad, torch_losses(h, w, y, torch.ones(13))[2], **TOLERANCE)


def test_evaluation_without_gradients_gives_the_same_losses():
    h, w, y = token_problem()
    with torch.no_grad():
        losses = token_losses(h, w, y)
    assert not losses.requires_grad and torch.equal(losses, token_losses(h, w, y).detach())


def test_large_logits_do_not_overflow():
    h, w, y = token_problem()
    losses = token_losses(h * 1000, w, y)
    expected = torch_losses(h * 1000, w, y, torch.ones(13))[0]
    assert losses.isfinite().all()
    torch.testing.assert_close(
        losses, expected, rtol=1e-6, atol=1e-3
    )  # logits of 1e4 have steps of 1e-3 in fp32


def test_bf16_weights_give_float32_losses_and_bf16_gradients():
    h, w, y = token_problem()
    h16, w16 = (x.detach().bfloat16().requires_grad_() for x in (h, w))
    losses = token_losses(h16, w16, y, chunk_size=4)
    losses.sum().backward()
    expected, d_hidden, d_weight = torch_losses(h16.float(), w16.float(), y, torch.ones(13))
    assert losses.dtype == torch.float32
    assert h16.grad.dtype == w16.grad.dtype == torch.bfloat16
    # logits and probabilities are rounded to 8 bits of mantissa on the way
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(h16.grad.float(), d_hidden, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(w16.grad.float(), d_weight, rtol=5e-2, atol=5e-2)


def test_autocast_runs_in_its_dtype_and_leaves_float32_gradients():
    h, w, y = token_problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = token_losses(h, w, y, chunk_size=4)
        losses.sum().backward()
    plain = token_losses(h.detach().bfloat16(), w.detach().bfloat16(), y, chunk_size=4)
    assert torch.equal(losses.detach(), plain)
    assert losses.dtype == h.grad.dtype == w.grad.dtype == torch.float32
    torch.testing.assert_close(
        h.grad, torch_losses(h, w, y, torch.ones(13))[1], rtol=5e-2, atol=5e-2
    )


@pytest.mark.parametrize(
    "label", [37, 36, -1]
)  # beyond the weight's rows, in the padding, negative
def test_a_label_that_is_no_token_id_makes_its_own_loss_nan(label):
    h, w, y = token_problem()
    y[y == 36] = 0
    expected = torch_losses(h, w, y, torch.ones(13), vocab=36)[0]
    y[0] = label
    losses = token_losses(h, w, y, vocab_size=36)
    assert losses[0].isnan()
    torch.testing.assert_close(losses[1:], expected[1:], **TOLERANCE)


def test_places_of_labels_are_known_while_these_are_as_they_were():
    h, w, y = token_problem()
    both = y[:12].view(3, 4)
    known = loss_tokens.TrainedPlaces.of(both, both.clone())
    places, transposed = known.known_for(both), both.t().contiguous()
    assert torch.equal(places, (transposed.flatten() != -100).nonzero()[:, 0])
    rows = h[:12].view(4, 3, -1)
    wanted = token_losses(rows, w, transposed)
    assert torch.equal(token_losses(rows, w, transposed, trained=places), wanted)
    other = both.clone()
    while other._version < both._version:
        other += 0
    assert known.known_for(other) is None
    both[0, 0] = 1
    assert known.known_for(both) is None
    with torch.inference_mode():
        uncounted = both + 0
    assert loss_tokens.TrainedPlaces.of(uncounted, both).known_for(uncounted) is None


def test_labels_of_another_shape_are_refused():
    h, w, y = token_problem()
    with pytest.raises(ValueError, match=r"hidden \(13, 16\) does not belong to labels \(12,\)"):
        token_losses(h, w, y[:12])


@pytest.mark.parametrize("weights_differ", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_are_the_same_whenever_they_are_taken(weights_differ, softcap):
    """In the forward pass or in the backward pass, for equal weights and for others."""
    row_weights = torch.linspace(-3.0, 2.0, 13)
    for weigh in (lambda losses: losses.sum() * 0.37, lambda losses: (losses * row_weights).sum()):
        h, w, y = token_problem()
        losses = token_losses(h, w, y, chunk_size=4, softcap=softcap, weights_differ=weights_differ)
        weigh(losses).backward()
        h2, w2 = h.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        logits = F.linear(h2, w2)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        weigh(F.cross_entropy(logits, y, ignore_index=-100, reduction="none")).backward()
        # weights of up to 3 for each of 9 rows
        torch.testing.assert_close(h.grad, h2.grad, rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(w.grad, w2.grad, rtol=1e-6, atol=5e-6)


class Products(TorchDispatchMode):
    """Count of matrix products with a row of so many columns: of logits."""

    def __init__(self, columns: int):
        super().__init__()
        self.columns, self.count = columns, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.count += out.shape[-1] == self.columns
        return out


def test_a_frozen_head_makes_its_logits_once_also_for_weights_that_differ():
    h, w, y = token_problem()
    w.requires_grad_(False)
    row_weights = torch.linspace(-3.0, 2.0, 13)
    with Products(len(w)) as made:
        (token_losses(h, w, y, weights_differ=True) * row_weights).sum().backward()
    assert made.count == 1
    torch.testing.assert_close(h.grad, torch_losses(h, w, y, row_weights)[1], **TOLERANCE)


def test_a_token_that_is_nearly_certain_has_a_gradient_in_bf16():
    """p - 1 is taken before it is rounded: p itself would round to 1."""
    w = torch.zeros(8, 4, dtype=torch.bfloat16)
    w[3, 0] = 1.0
    h = torch.tensor([[9.0, 0, 0, 0]], dtype=torch.bfloat16, requires_grad=True)
    loss = token_losses(h, w, torch.tensor([3]))
    loss.sum().backward()
    expected = torch.expm1(-loss.detach())[0]
    assert -2e-3 < expected < 0
    torch.testing.assert_close(h.grad[0, 0].float(), expected, rtol=1e-2, atol=0)


def test_small_gradients_in_fp16_are_kept_by_the_loss_scale():
    """Of a rare token: 2e-9, which is nothing in fp16, and 1e-4 once it is scaled."""
    w = torch.zeros(40, 4, dtype=torch.float16)
    w[8:, 0] = -18.0
    w.requires_grad_()
    h = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float16, requires_grad=True)
    (token_losses(h, w, torch.tensor([3])) * 2.0**16).sum().backward()
    probability = torch.tensor(-18.0).exp() / (8 + 32 * torch.tensor(-18.0).exp())
    wanted = torch.full((32,), 2.0**16 * float(probability))
    torch.testing.assert_close(w.grad[8:, 0].float(), wanted, rtol=1e-2, atol=0)


def others_like(*tensors) -> list[tuple]:
    """Shapes of the float32 tensors with the shape of one of these and memory of their own."""
    shapes = {t.shape for t in tensors}
    known = {t.data_ptr() for t in tensors} | {
        t.grad.data_ptr() for t in tensors if t.grad is not None
    }
    alive = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape in shapes]
    return sorted({tuple(t.shape) for t in alive if t.data_ptr() not in known})


def test_gradients_taken_ahead_are_gone_after_the_backward_pass():
    """Whoever keeps the losses, as a schedule does until the next micro-batch's are there, does not
    keep a float32 gradient of the head with them."""
    h, w, y = token_problem(rows=23, hidden=19, vocab=41)  # shapes of no other test's tensors
    losses = token_losses(h, w, y)
    assert others_like(h, w) == [tuple(h.shape), tuple(w.shape)]
    losses.sum().backward()
    assert others_like(h, w) == []
    assert losses.shape == y.shape  # still held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_rows", [False, True])
def test_gradients_are_scaled_in_float32_and_rounded_once(dtype, of_rows):
    gradient = torch.randn(64, 8).to(dtype)
    by = 1 + torch.rand(64, 1) / 100 if of_rows else torch.tensor([1.0039])  # between two of bf16
    got = loss_tokens.scaled(gradient, by, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, (gradient.float() * by).to(dtype))
    from_float = loss_tokens.scaled(gradient.float(), by, dtype)
    assert torch.equal(from_float, got)
