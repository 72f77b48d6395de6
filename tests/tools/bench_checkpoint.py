"""Speed of saving and loading a checkpoint against a plain write of the same bytes, and the memory
that it takes.

    python -m tests.tools.bench_checkpoint [--hidden 1024] [--ranks 2] [--layout buckets]

Ranks on this machine, each on a GPU where there are some. A plain write is each rank's share of the
same bytes, in blocks of 4 MiB, flushed; the median of five, each, measured in turn. Every data
parallel rank reads all it needs: megatron's fully parallel load, in which each reads a share and
sends it to the others, took 1.5 to 2 times as long over gloo with the file in the page cache.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from tests.shared import tiny, world

BLOCK = bytes(range(256)) * (1 << 14)  # 4 MiB


class PeakMemory:
    """Host memory of this process above what it was when entered, bytes."""

    def __enter__(self):
        import psutil

        self._process, self._stop, self.peak = psutil.Process(), threading.Event(), 0
        self._before = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, self._process.memory_info().rss - self._before)

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join()


class GpuMemory:
    """Of this rank's GPU, bytes above what was in use when entered: the peak of torch's allocator,
    and what others hold at the end, such as communicators of nccl. 0 without a GPU."""

    def __enter__(self):
        self.peak = self.others = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated(), self._held_by_others()
        return self

    def __exit__(self, *exception):
        if torch.cuda.is_available():
            allocated, of_others = self._before
            self.peak = torch.cuda.max_memory_allocated() - allocated
            self.others = self._held_by_others() - of_others

    @staticmethod
    def _held_by_others() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


def timed(action) -> float:
    from mca_lite import parallel

    parallel.barrier()
    start = time.perf_counter()
    action()
    parallel.barrier()
    return time.perf_counter() - start


def plain_write(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        for start in range(0, size, len(BLOCK)):
            file.write(BLOCK[: size - start])
        file.flush()
        os.fsync(file.fileno())


def measure(model_path: str, folder: str, keys: dict) -> dict:
    """Seconds and bytes of saving and loading on this rank."""
    from mca_lite import ckpt_folder, parallel
    from mca_lite.args import TrainingArguments
    from mca_lite.model import AutoModel
    from mca_lite.trainer import McaTrainer

    args = TrainingArguments(
        output_dir=folder, max_steps=1, save_strategy="no", disable_tqdm=True, **keys
    )
    trainer = McaTrainer(
        model=AutoModel.from_pretrained(model_path, args), args=args, train_dataset=tiny.samples(8)
    )
    trainer.train()
    times = {"save": [], "load": [], "plain write": [], "blocked": []}
    mine = Path(folder) / f"plain-{parallel.rank()}"

    def save():
        start = time.perf_counter()
        trainer.checkpoints.begin()
        times["blocked"].append(time.perf_counter() - start)
        trainer.checkpoints.finish()

    def load(final: Path):
        model = ckpt_folder.model_identity(trainer.backend.hf_config)
        found = ckpt_folder.inspect(final, trainer.backend.name, model)
        assert not found, found
        trainer.backend.load_state(final)

    memory = {"save memory": 0, "load memory": 0, "GPU": 0, "others": 0}
    for step in range(1, 6):
        trainer.state.global_step = step
        final = ckpt_folder.checkpoint_folder(folder, step)
        with PeakMemory() as save_memory, GpuMemory() as gpu:
            times["save"].append(timed(save))
        size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
        times["plain write"].append(
            timed(lambda size=size: plain_write(mine, size // parallel.world_size()))
        )
        with PeakMemory() as load_memory:
            times["load"].append(timed(lambda final=final: load(final)))
        parallel.on_main(lambda final=final: shutil.rmtree(final))
        memory["save memory"] = max(memory["save memory"], save_memory.peak)
        memory["GPU"] = max(memory["GPU"], gpu.peak)
        memory["others"] += gpu.others
        memory["load memory"] = max(memory["load memory"], load_memory.peak)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, **memory, "bytes": size}


LAYOUTS = {
    "dp2": {},
    "dp2, distributed optimizer": dict(use_distributed_optimizer=True),
    "dp2, many buckets": dict(
        use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=10_000_000
    ),
    "dp2, in the background": dict(use_distributed_optimizer=True, async_save=True),
    "tp2": dict(tensor_model_parallel_size=2),
}


def checkpoint_speed(hidden: int = 1024, ranks: int = 2, words: str = "") -> dict[str, dict]:
    """{layout: bytes, median seconds and peak memory of the main rank}, of layouts whose names have
    these words."""
    with tempfile.TemporaryDirectory() as folder:
        shape = dict(hidden_size=hidden, intermediate_size=3 * hidden, head_dim=64, vocab_size=4096)
        shape["num_attention_heads"] = shape["num_key_value_heads"] = hidden // 64
        path, out = tiny.save_model(Path(folder) / "model", "qwen3", **shape), {}
        for name, keys in LAYOUTS.items():
            if words in name and keys.get("tensor_model_parallel_size", 1) <= ranks:
                place = str(Path(folder) / name)
                out[name] = world.run(measure, ranks, path, place, keys, timeout_s=300)[0]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", default="", help="words in the names of the layouts wanted")
    options, _ = parser.parse_known_args()
    print(
        f"checkpoints of 4 layers, hidden {options.hidden}, float32 with Adam's state, "
        f"on {options.ranks} ranks"
    )
    print(
        f"{'layout':28} {'MB':>6} {'save GB/s':>9} {'of plain':>8} {'load GB/s':>9} "
        f"{'of plain':>8}  blocked s  memory MB"
    )
    print(
        "of plain: against a plain write; loading includes the check of all sums; "
        "blocked: how long training stands still"
    )
    for name, m in checkpoint_speed(options.hidden, options.ranks, options.layout).items():
        speed = {key: m["bytes"] / 1e9 / m[key] for key in ("save", "load", "plain write")}
        print(
            f"{name:28} {m['bytes'] / 1e6:6.0f} {speed['save']:9.2f} "
            f"{speed['save'] / speed['plain write']:8.2f} "
            f"{speed['load']:9.2f} {speed['load'] / speed['plain write']:8.2f}  "
            f"{m['blocked']:9.2f}  "
            f"save {m['save memory'] / 1e6:.0f}, load {m['load memory'] / 1e6:.0f}; "
            f"GPU {m['GPU'] / 1e6:.0f}, others {m['others'] / 1e6:.0f}"
        )
    print(
        "memory: host memory above what training holds, on rank 0; its share of the "
        "checkpoint is half of the bytes. GPU: the same of torch's allocator, in saves; others: "
        "what all saves left on the GPU outside of it"
    )


if __name__ == "__main__":
    main()
