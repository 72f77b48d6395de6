"""Packed rows as Hugging Face's users train them: a micro-batch is one flattened row, and attention
a varlen kernel, which takes each document alone. torch's kernel, as flash-attn is not installed.
"""

import inspect

import torch
import torch.nn.functional as F

NAME = "varlen"
_last: dict = {}  # of the micro-batch that runs: its positions, starts of documents, the longest


def flatten(rows: list[dict]) -> dict:
    """A collator: [s] of several rows -> [1, sum of s]."""
    return {key: torch.cat([row[key] for row in rows])[None] for key in rows[0]}


def register() -> str:
    """Make the kernel known to transformers -> the name for attn_implementation."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    return NAME


def attention(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
    """query [1, n, t, d], key and value [1, g, t, d] of documents whose positions restart at 0 ->
    ([1, t, n, d], None)"""
    positions = kwargs["position_ids"]
    if _last.get("positions") is not positions:  # all layers of a micro-batch have these
        flat = positions.flatten()
        starts = F.pad((flat == 0).nonzero().flatten(), (0, 1), value=len(flat)).to(torch.int32)
        _last.update(positions=positions, starts=starts, longest=int(starts.diff().max()))
    # autocast leaves float32 of rotary embeddings
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    attend = _on_gpu if query.is_cuda else _one_by_one
    return attend(q, k, v, _last["starts"], _last["longest"], scaling)[None], None


def _on_gpu(q, k, v, starts, longest, scaling):
    from torch.nn.attention.varlen import varlen_attn

    knows_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in torch 2.11
    more = {"enable_gqa": True} if knows_groups else {}
    causal = dict(scale=scaling, window_size=(-1, 0))
    return varlen_attn(q, k, v, starts, starts, longest, longest, **causal, **more)


def _one_by_one(q, k, v, starts, longest, scaling):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        document = (x[start:end].transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*document, is_causal=True, scale=scaling)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)
