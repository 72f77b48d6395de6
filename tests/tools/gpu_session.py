"""Session.to on a GPU, `make gpu ARGS=session`: the memory that leaves and comes back, the seconds
of each, and the numbers of an update afterwards, bit for bit those of a session that stayed.

Further words choose some cases.
"""

import gc
import tempfile
import time

import torch

from tests.shared import session_tools, tiny, world
from tests.shared.layouts import DIST_OPT

VOCAB = 32000
SIZES = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, vocab_size=VOCAB)
SIZES |= dict(num_hidden_layers=6, num_key_value_heads=8, max_position_embeddings=2048)
HALF = dict(bf16=True, deterministic=True)
CASES = {
    "torch": dict(HALF, backend="torch"),
    "split masters": HALF,
    "float32": dict(deterministic=True),
    "distributed optimizer": dict(HALF, **DIST_OPT),
    "overlap": dict(HALF, **DIST_OPT, overlap_grad_reduce=True, overlap_param_gather=True),
    "offloaded": dict(HALF, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
    "adapters": dict(HALF, adapt=session_tools.with_adapters),
}
LEFT_OVER = 0.05  # of the memory before: batches, RoPE tables, workspaces


def gib() -> float:
    return torch.cuda.memory_allocated() / 2**30


def update(session, samples: list) -> list:
    session.forward_backward(samples, "cross_entropy")
    norm = session.optim_step(**session_tools.UPDATE).grad_norm
    return [norm, *torch.cat(session.log_probs(samples)).tolist()]


def numbers_of(folder: str, keys: dict, leaves: bool) -> tuple[list, str, float]:
    """(numbers of the second update, words about memory, share of it that stayed)."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, VOCAB, (n,), generator=generator) for n in (300, 500, 700, 513)]
    samples = [dict(input_ids=one[:-1], labels=one[1:]) for one in ids]
    session = session_tools.new_session(folder, **keys)
    update(session, samples)
    words, share = "", 0.0
    if leaves:
        before = gib()
        start = time.time()
        session.to("cpu", model=False)
        without_states = gib()
        session.log_probs(samples)
        session.to("cpu")
        left = gib()
        away = time.time()
        session.to("cuda")
        words = f"{before:.2f} GiB, {without_states:.2f} without optimizer and gradients, "
        words += f"{left:.2f} away, {gib():.2f} back; "
        words += f"{away - start:.1f} s and {time.time() - away:.1f} s"
        share = left / before
    return update(session, samples), words, share


def both(folder: str, keys: dict) -> tuple[bool, str, float]:
    """(True if the numbers agree, words, share of the memory that stayed)."""
    stayed, _, _ = numbers_of(folder, keys, False)
    gc.collect()
    torch.cuda.empty_cache()
    left, words, share = numbers_of(folder, keys, True)
    return stayed == left, words, share


def main(words: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tiny.save_model(f"{folder}/model", "qwen3", **SIZES)
        for name, keys in CASES.items():
            if words and name not in words:
                continue
            [(agrees, seen, share)] = world.run(both, 1, folder, keys, timeout_s=200)
            bits = "the same bits" if agrees else "OTHER NUMBERS"
            print(f"session, {name}: {seen}; {bits}", flush=True)
            failed += not agrees or share > LEFT_OVER
    return int(failed > 0)
