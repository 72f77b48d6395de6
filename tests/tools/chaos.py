"""Ranks are killed by SIGKILL at random moments of a run, in steps, saves, renames, deletions; the run starts again each time.

    make chaos                          50 kills
    python -m tests.tools.chaos --kills 6     what `make test-all` runs

After each kill every folder with a checkpoint's name must be whole, by its checksums, and none may be missing but the one
that was being written. In the end the curve must be that of the run that nobody disturbed, to the last bit.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

from mca_lite import ckpt_folder
from mca_lite.trainer_callbacks import TrainerCallback
from tests.shared import tiny, training, world

STEPS, INTERVAL, RANKS = 9, 2, 2
KEYS = dict(
    save_strategy="steps",
    save_steps=INTERVAL,
    num_train_epochs=9,
    save_total_limit=2,
    attention_dropout=0.1,
)
KEYS.update(resume_from_checkpoint="auto", steps=STEPS)
LAYOUTS = {
    "dp2, distributed optimizer": dict(use_distributed_optimizer=True),
    "tp2, saved in the background": dict(tensor_model_parallel_size=2, async_save=True),
    "pp2": dict(pipeline_model_parallel_size=2),
    "torch": dict(backend="torch", attention_dropout=None),
}
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


class Progress(TrainerCallback):
    """Tells how far the run came: what was due before this step is saved."""

    def __init__(self, path):
        self.path = Path(path)

    def on_step_end(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "0":
            self.path.write_text(str(state.global_step))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def victim(
    path: str,
    out: str,
    progress: str,
    rank: int,
    event: int | None,
    seconds: float | None,
    keys: dict,
):
    """A run in which rank `rank` dies at its n-th touch of a file in `out`, or after so many seconds, or not at all.

    -> (curve, how often this rank touched a file)"""
    count = 0

    def watch(name, args):
        nonlocal count
        if name in FILE_EVENTS and args and str(out) in str(args[0]):
            count += 1
            if count == event and int(os.environ["RANK"]) == rank:
                die()

    sys.addaudithook(watch)
    if seconds is not None and int(os.environ["RANK"]) == rank:
        threading.Timer(seconds, die).start()
    curve = training.train(path, out, callbacks=[Progress(progress)], **{**KEYS, **keys})
    return curve, count


def check(out: Path, progress: Path, keys: dict) -> None:
    """Every checkpoint that has its name is whole, and the last one that was due is there.

    In the background one may still be on its way, until the next is due: then the one before it must be there."""
    step = int(progress.read_text()) if progress.exists() and progress.read_text() else 0
    there = ckpt_folder.all_folders(out)
    replaced = list(out.glob(".checkpoint-*.replaced"))
    for folder in there:
        wrong = ckpt_folder.damage(folder, ckpt_folder.read_manifest(folder))
        assert not wrong, f"{folder} is unreadable: {wrong}"
    due = (step - 1) // INTERVAL * INTERVAL - (INTERVAL if keys.get("async_save") else 0)
    newest = ckpt_folder.step_of(there[-1]) if there else 0
    assert newest >= due or replaced, (
        f"killed in step {step}: the newest checkpoint is {newest}, and {due} was due"
    )


def campaign(
    path: str, folder: Path, kills: int, rng: random.Random, keys: dict, undisturbed, events
) -> int:
    """One run, started again after each of at most `kills` kills, to its end -> how many there were."""
    out, progress, done = folder / "run", folder / "progress", 0
    while True:
        rank = rng.randrange(RANKS)
        by_event = rng.random() < 0.7
        event = rng.randint(1, events[rank]) if by_event and done < kills else None
        seconds = None if by_event or done >= kills else rng.uniform(0.1, 2.0)
        try:
            answers = world.run(
                victim, RANKS, path, str(out), str(progress), rank, event, seconds, keys
            )
        except (RuntimeError, AssertionError, TimeoutError) as error:
            if (
                not isinstance(error, RuntimeError)
                and "Connection" not in str(error)
                and "peer" not in str(error)
            ):
                raise  # the survivor must have lost its peer, and nothing else
            done += 1
            check(out, progress, keys)
            continue
        check(out, progress, keys)
        for curve, _ in answers:
            assert curve == undisturbed, (
                f"after {done} kills the curve is another:\n{curve}\n{undisturbed}"
            )
        assert len(ckpt_folder.list_checkpoints(out)) <= KEYS["save_total_limit"]
        assert not [p for p in out.iterdir() if p.name.startswith(".checkpoint")]
        return done


def run(kills: int, seed: int, layouts=LAYOUTS, say=print) -> int:
    """Kill `kills` times, over the layouts in turn -> the kills. AssertionError for whatever was lost."""
    rng, total, round_ = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        path, known = tiny.save_model(Path(folder) / "model", "qwen3"), {}
        while total < kills:
            name = list(layouts)[round_ % len(layouts)]
            round_ += 1
            place = Path(folder) / str(round_)
            place.mkdir()
            if name not in known:
                calm = place / "calm"
                arguments = (
                    path,
                    str(calm),
                    str(place / "calm_progress"),
                    0,
                    None,
                    None,
                    layouts[name],
                )
                answers = world.run(victim, RANKS, *arguments)
                known[name] = answers[0][0], [count for _, count in answers]
            done = campaign(path, place, min(5, kills - total), rng, layouts[name], *known[name])
            total += done
            say(f"{name}: {done} kills, the same curve; {total} in all", flush=True)
    return total


def under_torchrun(path: str, out: str) -> None:
    """What torchrun starts: rank 1 dies in step 5 of the first start, and in the rename of checkpoint-6 of the second."""
    start, last = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"] == "1"

    class Die(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if start == 0 and state.global_step == 5 and last:
                die()

    def watch(name, args):
        if (
            start == 1
            and not last
            and name == "os.rename"
            and str(args[1]).endswith("checkpoint-6")
        ):
            die()

    sys.addaudithook(watch)
    training.train(path, out, callbacks=[Die()], **{**KEYS, "use_distributed_optimizer": True})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--under-torchrun", nargs=2, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.under_torchrun:
        under_torchrun(*options.under_torchrun)
        return
    total = run(options.kills, options.seed)
    print(json.dumps({"kills": total, "unreadable": 0, "lost": 0, "curves": "identical"}))


if __name__ == "__main__":
    main()
