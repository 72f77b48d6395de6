"""Experts side by side in one grouped matrix product against one after another, and whole training
steps of a mixture.
"""

import contextlib
import io
import statistics
import time

import torch

from tests.shared import tiny_moe, world
from tests.shared.layouts import EP2

HIDDEN, COLUMNS = 512, 256


def experts_run(num_experts: int, tokens: int, topk: int, repeats: int = 5) -> dict[str, float]:
    """Seconds of forward and backward of a layer's experts, for each way; the tokens are spread
    unevenly.
    """
    from mca_lite import parallel
    from mca_lite.args import TrainingArguments
    from mca_lite.model_config import from_hf_config
    from mca_lite.model_moe import Experts

    keys = dict(
        hidden_size=HIDDEN,
        moe_intermediate_size=COLUMNS,
        num_experts=num_experts,
        num_experts_per_tok=topk,
    )
    args = TrainingArguments(output_dir="unused", bf16=torch.cuda.is_available())
    parallel.initialize(args)
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    config = from_hf_config(tiny_moe.hf_config("qwen3_moe", **keys), args)
    experts = Experts(num_experts, config, pg_collection=get_default_pg_collection())
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.multinomial(
        torch.rand(num_experts, generator=generator) + 0.1, tokens * topk, True, generator=generator
    )
    counts = torch.bincount(chosen, minlength=num_experts)
    x = torch.randn(tokens * topk, HIDDEN).to(experts.fc1).requires_grad_()
    probs = torch.rand(tokens * topk, device=x.device)
    out = {}
    for name, grouped in (("loop", False), ("grouped", True)):
        config.moe_grouped_gemm, times = grouped, []
        for _ in range(repeats + 1):
            _synchronize()
            started = time.perf_counter()
            y = experts(x, counts, probs)[0]
            y.backward(torch.ones_like(y))
            _synchronize()
            times.append(time.perf_counter() - started)
        out[name] = statistics.median(times[1:])
    return out


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_run(path: str, folder: str, backend: str, grouped: bool, **keys) -> float:
    """Seconds of a step, the first left out."""
    from tests.shared.training import read_log, train

    own = {} if backend == "torch" else dict(moe_grouped_gemm=grouped)
    with contextlib.redirect_stdout(io.StringIO()):
        train(
            path,
            folder,
            backend=backend,
            steps=4,
            count=40,
            global_batch_size=8,
            per_device_train_batch_size=4,
            **own,
            **keys,
        )
    return statistics.median(line["step_time_s"] for line in read_log(folder)[1:])


def main() -> None:
    """Print both tables."""
    import tempfile

    print(f"hidden {HIDDEN}, {COLUMNS} columns an expert; seconds of forward and backward")
    print(f"  {'':44} {'loop':>8} {'grouped':>8} {'ratio':>6}")
    for num_experts, tokens, topk in ((8, 2048, 2), (64, 2048, 4), (128, 2048, 8), (128, 256, 8)):
        times = world.run(experts_run, 1, num_experts, tokens, topk, timeout_s=300)[0]
        what = f"{num_experts} experts, {topk} of them for {tokens:,} tokens"
        print(
            f"  {what:44} {times['loop']:8.3f} {times['grouped']:8.3f} "
            f"{times['loop'] / times['grouped']:6.2f}"
        )
    print("a step of 8 rows, 4 layers of 32 experts, hidden 128; seconds")
    sizes = dict(
        hidden_size=128,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        head_dim=32,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_moe.save_model(f"{folder}/model", "qwen3_moe", **sizes)
        for name, ranks, backend, grouped, keys in (
            ("torch, one rank", 1, "torch", False, {}),
            ("megatron, one rank, loop", 1, "megatron", False, {}),
            ("megatron, one rank, grouped", 1, "megatron", True, {}),
            ("torch, two ranks", 2, "torch", False, {}),
            ("megatron, ep2, grouped", 2, "megatron", True, EP2),
        ):
            seconds = world.run(
                step_run, ranks, path, f"{folder}/{name}", backend, grouped, timeout_s=300, **keys
            )[0]
            print(f"  {name:44} {seconds:8.3f}")
