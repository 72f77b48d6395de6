"""A head's loss in tests: numbers to take it of, and what all ranks get that share the head."""

import torch
import torch.nn.functional as F


def draw_head(vocab: int, tokens: tuple[int, ...], losses: tuple[int, ...] = ()) -> tuple:
    """(hidden [tokens, 24], weight [vocab, 24], labels [tokens], gradient [tokens, losses]); every
    fourth label of a row is ignored."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*tokens, 24, generator=generator)
    weight = torch.randn(vocab, 24, generator=generator) / 5
    labels = torch.randint(0, vocab, tokens, generator=generator)
    labels[..., ::4] = -100
    return hidden, weight, labels, torch.randn(*tokens, *losses, generator=generator)


def losses_of_cut_head(
    hidden, weight, labels, grad, chunk_size: int, rows: int, of_logits=None
) -> list:
    """[losses, d hidden, d weight] of all ranks together, on every rank; each has `rows` of the
    head. Collective, in a world."""
    import torch.distributed as dist

    from mca_lite.loss_tokens import token_losses

    size, rank, vocab = dist.get_world_size(), dist.get_rank(), len(weight)
    padded = F.pad(weight, (0, 0, 0, rows * size - vocab))
    mine = padded.chunk(size)[rank].clone().requires_grad_()
    hidden.requires_grad_()
    group = dist.group.WORLD
    losses = token_losses(hidden, mine, labels, group, vocab, chunk_size, of_logits=of_logits)
    losses.backward(grad)
    dist.all_reduce(hidden.grad)  # megatron's mapping before the head does it
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine.grad)
    return [losses.tolist(), hidden.grad.tolist(), torch.cat(parts)[:vocab].tolist()]
