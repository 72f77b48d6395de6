"""Ranks are killed by SIGKILL at random moments of a run: of its caches, reference pass, steps,
saves, renames, deletions, export; the run starts again each time.

    make chaos ARGS=kills               50 kills
    make chaos ARGS="kills --kills 200 --seed 1"
    python -m tests.tools.chaos --kills 6     what `make test-all` runs

The seed draws which runs are disturbed, and where. After each kill every folder with a checkpoint's
name must be whole, by its checksums, and none may be missing but the one that was being written. In
the end log and export must be those of the run that nobody disturbed, to the last bit.
"""

import argparse
import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

from mca_lite import ckpt_folder
from mca_lite.callbacks import TrainerCallback
from tests.shared import small_runs, tiny, training, world
from tests.shared.files import tensors
from tests.shared.layouts import DIST_OPT, PACKED, PP2, TP2

STEPS, INTERVAL, RANKS, LIMIT = 9, 2, 2, 2
KEYS = dict(
    save_strategy="steps",
    save_steps=INTERVAL,
    save_total_limit=LIMIT,
    resume_from_checkpoint="auto",
)
# of a whole run, besides
RUN_KEYS = dict(
    max_steps=STEPS,
    logging_steps=1,
    learning_rate=1e-2,
    global_batch_size=4,
    cutoff_len=64,
    max_shard_size="20KB",
    preprocessing_num_workers=1,
    disable_tqdm=True,
)
DROPOUT = dict(attention_dropout=0.1)
ASYNC = dict(async_save=True)
DPO = dict(stage="dpo", ref_model="cached")
LORA = dict(finetuning_type="lora", lora_rank=4)
OUT, CACHE = "out", "cache"
# {what is disturbed: (its keys, the folders where it dies)}
RUNS = {
    "dp2, distributed optimizer": ({**DIST_OPT, **DROPOUT}, [OUT]),
    "tp2, saved in the background": ({**TP2, **ASYNC, **DROPOUT}, [OUT]),
    "pp2": ({**PP2, **DROPOUT}, [OUT]),
    "pp2, saved in the background": ({**PP2, **ASYNC, "save_hf_checkpoints": True}, [OUT]),
    "torch": (dict(use_mca=False), [OUT]),
    "LoRA, tp2": ({**LORA, **TP2, "lora_dropout": 0.1, "save_merged_model": True}, [OUT]),
    "LoRA, pp2, saved in the background": ({**LORA, **PP2, **ASYNC}, [OUT]),
    "DPO, pp2": ({**DPO, **PP2}, [OUT, CACHE]),
    "DPO of LoRA, packed, saved in the background": (
        {**DPO, **LORA, **PACKED, **ASYNC, "per_device_train_batch_size": 1},
        [OUT, CACHE],
    ),
    "DPO's reference pass": (DPO, [CACHE]),
    "the token cache": ({}, [CACHE]),
}
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def victim(keys: dict, folders: list[str], rank: int, event: int | None, seconds: float | None):
    """A run in which rank `rank` dies at its n-th touch of a file in `folders`, or after so many
    seconds, or not at all.

    -> how often this rank touched a file there"""
    from mca_lite import DPOTrainer

    DPOTrainer.part_rows = 4  # of this process: a pass of several parts
    count = 0

    def watch(name, args):
        nonlocal count
        if name in FILE_EVENTS and args and any(folder in str(args[0]) for folder in folders):
            count += 1
            if count == event and int(os.environ["RANK"]) == rank:
                die()

    sys.addaudithook(watch)
    if seconds is not None and int(os.environ["RANK"]) == rank:
        threading.Timer(seconds, die).start()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        small_runs.train_by_words(keys)
    return count


class Campaign:
    """One run, disturbed again and again until it is done. folder: with a model, data, and place
    for what it writes.
    """

    def __init__(self, folder: Path, place: Path, name: str):
        keys, watched = RUNS[name]
        self.out, self.watched = place / OUT, [str(place / part) for part in watched]
        data = folder / f"{small_runs.DATA[keys.get('stage', 'sft')]}.jsonl"
        places = dict(output_dir=str(self.out), cache_dir=str(place / CACHE))
        model = dict(model_name_or_path=str(folder / "model"), dataset=[str(data)])
        if watched == [CACHE] and "stage" not in keys:
            model["dataset"].append(str(folder / "other.jsonl"))  # a shard each
        self.keys = {**KEYS, **RUN_KEYS, **model, **places, **keys}

    def start(self, rank: int = 0, event: int | None = None, seconds: float | None = None):
        return world.run(victim, RANKS, self.keys, self.watched, rank, event, seconds)

    def what_is_left(self) -> tuple:
        """The log and the tensors of the export: the same however often the run died."""
        exported = {name: value.tolist() for name, value in tensors(self.out).items()}
        return small_runs.curve(training.read_log(self.out)), exported

    def check(self) -> None:
        """Every checkpoint that has its name is whole, and the last one that was due is there.

        In the background one may still be on its way, until the next is due: then the one before it
        must be there.
        """
        there, step = ckpt_folder.all_folders(self.out), self._steps_made()
        replaced = list(self.out.glob(".checkpoint-*.replaced"))
        for folder in there:
            wrong = ckpt_folder.damage(folder, ckpt_folder.read_manifest(folder))
            assert not wrong, f"{folder} is unreadable: {wrong}"
        due = (step - 1) // INTERVAL * INTERVAL
        if self.keys.get("async_save"):
            due -= INTERVAL
        newest = ckpt_folder.step_of(there[-1]) if there else 0
        assert newest >= due or replaced, (
            f"killed after step {step}: the newest checkpoint is {newest}, and {due} was due"
        )

    def _steps_made(self) -> int:
        """The last step of the log: what was due before it is saved."""
        path = self.out / "trainer_log.jsonl"
        # the last line may be cut
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)

    def run(self, kills: int, rng: random.Random, undisturbed: tuple, events: list[int]) -> int:
        """The run, started again after each of at most `kills` kills, to its end -> how many there
        were.
        """
        done = 0
        while True:
            rank, event, seconds = rng.randrange(RANKS), None, None
            if done < kills and rng.random() < 0.7:
                event = rng.randint(1, max(1, events[rank]))
            elif done < kills:
                seconds = rng.uniform(0.1, 2.0)
            try:
                self.start(rank, event, seconds)
            except (RuntimeError, AssertionError) as error:
                lost_peer = "Connection" in str(error) or "peer" in str(error)
                if not isinstance(error, RuntimeError) and not lost_peer:
                    raise  # the survivor must have lost its peer, and nothing else
                done += 1
                self.check()
                continue
            break
        self.check()
        assert self.what_is_left() == undisturbed, f"after {done} kills the run is another"
        assert len(ckpt_folder.list_checkpoints(self.out)) <= LIMIT
        assert not [p for p in self.out.iterdir() if p.name.startswith(".checkpoint")]
        return done


def run(kills: int, seed: int, names=tuple(RUNS), say=print) -> int:
    """Kill `kills` times, over the runs in a drawn order -> the kills. AssertionError for whatever
    was lost.
    """
    rng, total, known, order = random.Random(seed), 0, {}, []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny.save_model(folder / "model", "qwen3")
        small_runs.save_tokenizer(folder / "model")
        small_runs.write_data(folder, chats=22, pairs=18)
        while total < kills:
            order = order or rng.sample(names, len(names))
            name = order.pop()
            if name not in known:
                calm = Campaign(folder, folder / "calm" / str(len(known)), name)
                events = calm.start()
                known[name] = calm.what_is_left(), events
            place = folder / f"after-{total}-{len(order)}"
            done = Campaign(folder, place, name).run(min(5, kills - total), rng, *known[name])
            total += done
            say(f"{name}: {done} kills, the same log and export; {total} in all", flush=True)
    return total


# Where the n-th start of a run under torchrun dies: (the point, the rank). In step 5 or while
# checkpoint-6 is saved, and so the next start resumes from checkpoint-4, after the last from 6.
POINTS = (
    ("before the reduction of the gradients", 1),
    ("within a save", 1),
    ("before the rename of a checkpoint", 0),
    ("between its two renames, where the name was taken", 0),
    ("between its rename and that of the pointer to it", 0),
)


def under_torchrun(path: str, out: str) -> None:
    """The script of torchrun: each start but the last dies at its point."""
    from mca_lite import McaTrainer

    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    point, rank = POINTS[start] if start < len(POINTS) else ("", 0)
    is_victim = os.environ["RANK"] == str(rank)
    final = f"{out}/checkpoint-6"

    class Trainer(McaTrainer):
        def _post_compute_loss(self, labels, losses):
            if is_victim and point.startswith("before the reduction"):
                if self.state.global_step == 4:
                    losses.register_hook(lambda _: die())
            return super()._post_compute_loss(labels, losses)

    class Take(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if is_victim and "was taken" in point and state.global_step == 6:
                Path(final).mkdir()

    def watch(name, args):
        target = str(args[1]) if name == "os.rename" else ""
        moments = {
            "within a save": name == "open" and f"{out}/.checkpoint-6.tmp/dist/" in str(args[0]),
            "before the rename": target == final,
            "between its two": target == final and any(Path(out).glob(".checkpoint-6.replaced*")),
            "between its rename": target == f"{out}/latest" and Path(final).exists(),
        }
        if any(is_now and point.startswith(words) for words, is_now in moments.items()):
            die()

    if is_victim:
        sys.addaudithook(watch)
    training.train(path, out, trainer_class=Trainer, callbacks=[Take()], **UNDER_TORCHRUN)


UNDER_TORCHRUN = {**KEYS, **DIST_OPT, **DROPOUT, "steps": STEPS}


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
    print(json.dumps({"kills": total, "unreadable": 0, "lost": 0, "logs and exports": "identical"}))


if __name__ == "__main__":
    main()
