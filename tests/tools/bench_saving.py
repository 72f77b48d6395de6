"""Training beside its checkpoints: how long it waits, how fast its steps are meanwhile.

    python -m tests.tools.bench_saving [--shape 1.5B] [--ranks 2] [--steps 20] [--folder DIR]

The same run with save and with async_save, data parallel with the distributed optimizer, each on
fresh ranks, on a GPU each where there are some (the default shape is of a CPU). It saves every
--steps steps, keeps one checkpoint, and the waits of a checkpoint are all seconds between steps
from its own on until the next one, beyond those between other steps. "beside": the median step
until the checkpoint has its name, over the median of those before the first one. A plain write is
each rank's share of the same bytes by all ranks at once, flushed to the disk, in the same call.
Host memory: of a rank, above that before the first checkpoint; pinned: by torch's own count.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tests.shared import world
from tests.tools import bench_gpu
from tests.tools.bench_checkpoint import PeakMemory, plain_write, timed

SAVES = 3  # the last one ends the run


def pinned_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def watcher(clock=time.perf_counter):
    """A callback that notes [second, event, step]: begin and end of each step, and each save."""
    from mca_lite.callbacks import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self):
            self.events: list = []
            self.memory = PeakMemory()

        def note(self, name, step):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.events.append((clock(), name, step))

        def on_step_begin(self, args, state, control, **kwargs):
            self.note("begin", state.global_step + 1)

        def on_step_end(self, args, state, control, **kwargs):
            self.note("end", state.global_step)
            if state.global_step == args.save_steps - 1:
                self.memory.__enter__()

        def on_save(self, args, state, control, path, step, **kwargs):
            self.note("saved", step)

        def on_train_end(self, args, state, control, **kwargs):
            self.memory.__exit__()

    return Watch()


def summary(events: list, steps: int) -> dict:
    """Waits of the checkpoints after `steps` and twice as many steps, and the median steps."""
    times = {(name, step): second for second, name, step in events}
    last = max(step for _, name, step in events if name == "end")
    seconds = {n: times["end", n] - times["begin", n] for n in range(1, last + 1)}
    gaps = {n: times["begin", n + 1] - times["end", n] for n in range(1, last)}
    usual = statistics.median(gaps[n] for n in range(2, steps))
    before = statistics.median(seconds[n] for n in range(2, steps + 1))
    found: dict = {"step": before, "waits": [], "named after": [], "beside": []}
    for first in range(steps, last, steps):
        of_this = range(first, min(first + steps, last))
        found["waits"].append(sum(max(0.0, gaps[n] - usual) for n in of_this))
        found["named after"].append(times["saved", first] - times["end", first])
        named = times["saved", first]
        beside = [seconds[n + 1] for n in of_this if times["begin", n + 1] < named]
        found["beside"].append(statistics.median(beside) / before if beside else None)
    return found


def measure(shape: str, folder: str, steps: int, is_async: bool) -> dict:
    """Train on this rank -> the figures of its checkpoints."""
    from mca_lite import McaTrainer, TrainingArguments, parallel
    from mca_lite.model import build_chunks
    from mca_lite.model_config import AutoConfig

    cuda = torch.cuda.is_available()
    config = bench_gpu.hf_config(shape)
    place = Path(folder)
    parallel.on_main(lambda: config.save_pretrained(place / "model"))
    args = TrainingArguments(
        output_dir=str(place / "run"),
        max_steps=SAVES * steps,
        save_steps=steps,
        save_total_limit=1,
        async_save=is_async,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=cuda,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        disable_tqdm=True,
    )
    parallel.initialize(args)
    models = build_chunks(AutoConfig.from_pretrained(str(place / "model"), args))
    bench_gpu.fill(models.named_parameters())
    data, *_ = bench_gpu.dataset(config, 4096 if cuda else 64, 8 * parallel.world_size(), False)
    watch = watcher()
    with contextlib.redirect_stdout(io.StringIO()):
        McaTrainer(models, args, train_dataset=data, callbacks=[watch]).train()
    files = (place / "run").glob(f"checkpoint-{SAVES * steps}/**/*")
    size = sum(path.stat().st_size for path in files if path.is_file())
    mine = place / f"plain-{parallel.rank()}"
    share = size // parallel.world_size()
    plain = statistics.median(timed(lambda: plain_write(mine, share)) for _ in range(3))
    return {
        **summary(watch.events, steps),
        "bytes": size,
        "plain": plain,
        "host memory": watch.memory.peak,
        "pinned": pinned_bytes(),
    }


def show(name: str, found: dict) -> str:
    """A line for a reader."""
    listed = {key: ", ".join(f"{x:.2f}" for x in found[key]) for key in ("waits", "named after")}
    speeds = ", ".join(f"{found['bytes'] / 1e9 / x:.2f}" for x in found["named after"])
    beside = ", ".join("-" if x is None else f"{x:.3f}" for x in found["beside"])
    return (
        f"{name}: {found['bytes'] / 1e9:.2f} GB, step {found['step']:.3f} s; training waits "
        f"{listed['waits']} s; named after {listed['named after']} s, {speeds} GB/s (plain write "
        f"{found['bytes'] / 1e9 / found['plain']:.2f}); steps beside x {beside}; host memory of a "
        f"rank {found['host memory'] / 1e9:.2f} GB, pinned {found['pinned'] / 1e9:.2f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="8M", choices=bench_gpu.SHAPES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="between checkpoints")
    parser.add_argument("--folder", help="where the checkpoints go (a temporary one)")
    options = parser.parse_args()
    for name, is_async in (("save", False), ("async_save", True)):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            ranks = world.run(
                measure,
                options.ranks,
                options.shape,
                folder,
                options.steps,
                is_async,
                timeout_s=280,
            )
        # the rank that holds most
        found = {**ranks[0], **{k: max(r[k] for r in ranks) for k in ("host memory", "pinned")}}
        print(show(name, found), flush=True)
        if os.environ.get("OUT"):
            with open(Path(os.environ["OUT"]) / "saving.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"case": name, **found}) + "\n")


if __name__ == "__main__":
    main()
