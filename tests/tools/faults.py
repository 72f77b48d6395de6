"""Faults, scored: each fault in each phase of a run, in layouts of two ranks, then a restart.

    make chaos                    the table, about 60 cells; those of RESULTS are not run again
    make chaos ARGS=all           every fault in every phase, layout and rank
    make chaos ARGS="hang tp2"    the cells whose names have all these words, anew
    make chaos ARGS=goodput       the share of useful time, with a kill every few minutes
    make chaos ARGS="kills --kills 200 --seed 1"      tests/tools/chaos.py: kills at random moments

A cell starts torchrun's agent with two ranks (forked, so that nobody waits for imports), breaks
something on one rank, and starts again without the fault. Scored: did the words name the rank, and
the cause; how long after the fault came the last word, with which ranks leave (at most DDP_S +
SLACK_S; a stopped process is ended by torchrun, after its --shutdown-timeout); are losses, gradient
norms and export those of the run that nobody broke, to the bit.
"""

import ctypes
import functools
import itertools
import json
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mca_lite.callbacks import TrainerCallback
from tests.shared import small_runs, tiny, training, world
from tests.shared.files import flip_bit, tensors
from tests.shared.layouts import DIST_OPT, PP2, TP2

RESULTS = Path(__file__).parents[2] / "output" / "faults.json"
RANKS, STEPS, STEP = 2, 6, 3  # the fault of a step comes after this many
DDP_S, HANG_S, SLACK_S = 20, 5, 10
AT_ONCE = 4
SLOW_S = 0.5  # of each step of the slow rank
DISK_S = 14.0  # a save takes so much longer: it is spoken of after half of DDP_S
LAYOUTS = {"dp2": DIST_OPT, "tp2": TP2, "pp2": PP2, "torch": dict(use_mca=False)}
KEYS = dict(
    max_steps=STEPS, logging_steps=1, learning_rate=1e-2, global_batch_size=4, cutoff_len=64,
    per_device_train_batch_size=1, preprocessing_num_workers=1, disable_tqdm=True,
    save_strategy="steps", save_steps=2, resume_from_checkpoint="auto",
    ddp_timeout=DDP_S, hang_timeout=HANG_S,
)  # fmt: skip
START, TRAINING, SAVING = "start", "training", "saving"


class Fault(NamedTuple):
    """phases: where it can come. rank, cause: patterns of the words, {v} the victim; no rank: none
    is to blame. ends_well: the run goes on to its end. main_alone: only rank 0 can have it.
    layouts: None: all of them.
    """

    phases: tuple[str, ...]
    rank: str
    cause: str
    ends_well: bool = False
    victims: tuple[int, ...] = (1, 0)
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    by_agent: bool = True


ALL = (START, TRAINING, SAVING)
# torchrun's summary: the rank that failed first
FIRST = r"(?s)Root Cause \(first observed failure\):.*?rank\s+: {v} "
FAULTS = {
    "crash": Fault(ALL, FIRST + "|rank {v}: [^\n]*what broke", "what broke on this rank"),
    "kill": Fault(ALL, FIRST, "SIGKILL"),
    "stop": Fault(ALL, r"rank {v} on \S+ \(process", "does not answer: its process is stopped"),
    "hang": Fault(ALL, r"rank {v} on \S+ \(process \d+\)[^\n]* hung", r"in sleep_for_ever|sleep\("),
    # of unequal sizes gloo aborts a process, whose traceback shows the call
    "alone": Fault((TRAINING,), FIRST + r"|rank {v} on \S+ \(process",
                   r"all_reduce of \[\[3\]\]|in all_reduce\n(.*\n){1,3}.* in strike"),
    "store stopped": Fault(
        ALL, "its holder, rank 0 on", "store of the ranks has not answered",
        victims=(0,), layouts=("dp2", "pp2"), by_agent=False,
    ),
    "store killed": Fault(
        ALL, r"rank 0 on \S+ \(process \d+\), which held the store", "store of the ranks, is gone",
        victims=(0,), layouts=("dp2", "pp2"), by_agent=False,
    ),
    "slow rank": Fault((TRAINING,), r'(?s)("slowest_rank": {v}\b.*){{4}}', '"lag_callbacks_s"',
                       ends_well=True),
    "slow disk": Fault((SAVING,), r"rank {v} on \S+ \(process", "saving", ends_well=True),
    "full disk": Fault((SAVING,), r"could not be.*rank {v}\b",
                       "checkpoint-4 could not be.*File too large"),
    "corrupt weights": Fault((START,), "", r"model\.safetensors", victims=(0,),
                             layouts=("dp2", "torch")),
    "corrupt checkpoint": Fault((START,), "", "skipped checkpoint-6: ", ends_well=True,
                                victims=(0,)),
    "memory": Fault((START, TRAINING), FIRST, "out of memory: .* plan CONFIG"),
    "nan": Fault((TRAINING,), r"not finite.*rank {v}\b|rank {v}\b.*not finite", "not finite",
                 victims=(1,)),
    "wrong data": Fault((START,), "", r"chat\.jsonl:5: .*asistant", victims=(0,),
                        layouts=("pp2", "torch")),
}  # fmt: skip


class Cell(NamedTuple):
    fault: str
    phase: str
    layout: str
    victim: int

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.phase}, {self.layout}, rank {self.victim}"


def every_cell() -> list[Cell]:
    return [
        Cell(name, phase, layout, victim)
        for name, fault in FAULTS.items()
        for phase, layout, victim in itertools.product(fault.phases, fault.layouts, fault.victims)
    ]


def table() -> list[Cell]:
    """Each fault in each of its phases: in every layout if it has one phase, in two if it has more,
    others in each phase. The victims take turns.
    """
    found: dict[tuple, list[Cell]] = {}
    for cell in every_cell():
        fault = FAULTS[cell.fault]
        turn = fault.layouts.index(cell.layout) - fault.phases.index(cell.phase)
        if len(fault.phases) == 1 or len(fault.layouts) <= 2 or turn % 2 == 0:
            found.setdefault(cell[:3], []).append(cell)
    return [cells[number % len(cells)] for number, cells in enumerate(found.values())]


# -- in a rank


def sleep_for_ever() -> None:
    time.sleep(600)


class Breaks(TrainerCallback):
    """A callback that breaks this rank where its cell says; the file `struck` gets the moment."""

    def __init__(self, cell: Cell, folder: str):
        self.cell, self.folder, self.is_done = cell, folder, False

    def strike(self, once: bool = True) -> None:
        if self.is_done and once:
            return
        if not self.is_done:
            Path(self.folder, "struck").write_text(str(time.time()))
        self.is_done, how = True, self.cell.fault
        if how == "crash":
            raise KeyError("what broke on this rank")
        if how in ("kill", "store killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how in ("stop", "store stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "hang":
            sleep_for_ever()
        if how == "alone":
            import torch

            torch.distributed.all_reduce(torch.zeros(3))
        if how == "slow rank":
            time.sleep(SLOW_S)
        if how == "slow disk":
            time.sleep(DISK_S)
        if how == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        if how == "memory":
            import torch

            torch.zeros(2**50)

    def on_step_begin(self, args, state, control, trainer=None, **kwargs):
        if self.cell.phase == TRAINING and self.cell.fault == "slow rank":
            self.strike(once=False)
        if self.cell.phase == TRAINING and state.global_step == STEP:
            if self.cell.fault == "nan":
                self.poison(trainer)
            else:
                self.strike()

    def poison(self, trainer) -> None:
        compute = trainer._post_compute_loss
        trainer._post_compute_loss = lambda labels, losses: compute(labels, losses * float("nan"))
        Path(self.folder, "struck").write_text(str(time.time()))

    def at_file(self, event: str, args: tuple) -> None:
        is_saving = event == "open" and args and "/.checkpoint-4." in str(args[0])
        if is_saving and self.cell.phase == SAVING:
            self.strike()


def rank_of_cell(keys: dict, cell: Cell | None, folder: str) -> None:
    """Train by the command line on this rank, with a cell's fault if there is one."""
    from mca_lite import cli, run

    rank = int(os.environ["RANK"])
    build = run.build_trainer
    if cell is not None and rank == cell.victim:
        breaks = Breaks(cell, folder)
        sys.addaudithook(breaks.at_file)

        def broken(plan, callbacks):
            if cell.phase == START and "corrupt" not in cell.fault and cell.fault != "wrong data":
                breaks.strike()
            return build(plan, [*callbacks, breaks])

        run.build_trainer = broken
    code = cli.main(small_runs.words_of(keys))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # the agent takes the answer of a rank that ends well
        os._exit(code)


def under_the_agent(keys: dict, cell: Cell | None, folder: str, logs: str) -> tuple[bool, str]:
    """(True if the run ended well, all words) of torchrun's agent with two forked ranks."""
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    dist.destroy_process_group()  # the ranks make their own
    die_with_parent()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=RANKS, max_restarts=0, run_id="faults",
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1",
        start_method="fork", monitor_interval=0.1, shutdown_timeout=3,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
    )  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    summary = ""
    try:
        elastic_launch(config, rank_of_cell)(keys, cell, folder)
    except ChildFailedError as error:
        summary = str(error)
    said = [f.read_text(errors="replace") for f in sorted(Path(logs).glob("**/std*.log"))]
    return not summary, "\n".join([*said, summary])


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def without_the_agent(keys: dict, cell: Cell | None, folder: str, port: int) -> None:
    """A rank as srun starts it: rank 0 holds the store."""
    import torch.distributed as dist

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    said = os.open(f"{folder}/said-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    rank_of_cell(keys, cell, folder)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# -- a cell


class Place:
    """A folder with a model and data, where cells run."""

    def __init__(self, folder: Path):
        self.folder = folder
        tiny.save_model(folder / "model", "qwen3")
        small_runs.save_tokenizer(folder / "model")
        small_runs.write_data(folder, chats=30)
        self.calm = functools.cache(self._calm)

    def keys(self, layout: str, out: Path, **more) -> dict:
        places = dict(output_dir=str(out / "run"), cache_dir=str(out / "cache"))
        model = dict(model_name_or_path=str(self.folder / "model"))
        data = dict(dataset=str(self.folder / "chat.jsonl"))
        return {**KEYS, **model, **data, **places, **LAYOUTS[layout], **more}

    def start(self, keys: dict, cell: Cell | None, out: Path, by_agent: bool = True):
        """(ended well, words) of one start."""
        limit = DDP_S + SLACK_S + 60
        logs = out / f"logs-{len(list(out.glob('logs-*')))}"
        if by_agent:
            logs.mkdir()
            work = under_the_agent, 1, keys, cell, str(out), str(logs)
            return world.run(*work, timeout_s=limit)[0]
        waits = [1] if cell and cell.fault == "store stopped" else None
        work = without_the_agent, RANKS, keys, cell, str(out), free_port()
        codes, _ = world.exits(*work, timeout_s=limit, wait_for=waits)
        words = "".join(Path(out, f"said-{rank}").read_text() for rank in range(RANKS))
        return codes == [0] * RANKS, words

    def _calm(self, layout: str) -> tuple:
        out = self.folder / "calm" / layout
        out.mkdir(parents=True)
        well, words = self.start(self.keys(layout, out), None, out)
        assert well, words
        return self.what_is_left(out)

    def what_is_left(self, out: Path) -> tuple:
        """Losses, gradient norms and tensors of the export."""
        exported = {name: value.tolist() for name, value in tensors(out / "run").items()}
        lines = small_runs.curve(training.read_log(out / "run"))
        return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line], exported

    def score(self, cell: Cell) -> dict:
        out = self.folder / cell.name.replace(", ", "-").replace(" ", "_")
        out.mkdir()
        fault, keys, given = FAULTS[cell.fault], self.keys(cell.layout, out), {}
        if cell.fault.startswith("corrupt"):
            given = self.corrupt(cell, out)
        if cell.fault == "wrong data":
            lines = Path(keys["dataset"]).read_text().splitlines()
            lines[4] = lines[4].replace('"assistant"', '"asistant"')
            (out / "chat.jsonl").write_text("\n".join(lines))
            given = dict(dataset=str(out / "chat.jsonl"))
        begun = time.time()
        well, words = self.start({**keys, **given}, cell, out, fault.by_agent)
        # the last word of a rank, just before it leaves
        last = max(f.stat().st_mtime for f in [*out.glob("logs-*/**/std*.log"), *out.glob("said*")])
        struck = out / "struck"
        seconds = last - (float(struck.read_text()) if struck.exists() else begun)
        log = out / "run" / "trainer_log.jsonl"
        if cell.fault == "slow rank":
            words += log.read_text()
        if not well or not fault.ends_well:
            self.start(keys, None, out)
        found = {
            "rank": bool(re.search(fault.rank.format(v=cell.victim), words)),
            "cause": bool(re.search(fault.cause, words)),
            "end": well == fault.ends_well,
            "seconds": round(seconds, 1),
            "in time": fault.ends_well or seconds <= DDP_S + SLACK_S,
            "curve": self.what_is_left(out) == self.calm(cell.layout),
        }
        return {**found, "words": words[-6000:]}

    def corrupt(self, cell: Cell, out: Path) -> dict:
        """Damage a file before the start -> keys of that start."""
        if cell.fault == "corrupt weights":
            model = out / "model"
            model.mkdir()
            for file in (self.folder / "model").iterdir():
                (model / file.name).write_bytes(file.read_bytes())
            weights = model / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-100])
            return dict(model_name_or_path=str(model))
        self.start(self.keys(cell.layout, out), None, out)
        folder = out / "run" / "checkpoint-6"
        flip_bit(max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size))
        return {}


SCORES = ("rank", "cause", "end", "in time", "curve")


def run(cells: list[Cell], known: dict, path: Path) -> dict:
    """Score the cells that are not known yet, a few at a time; each result is kept at once."""
    results = {cell.name: known[cell.name] for cell in cells if cell.name in known}
    left = [cell for cell in cells if cell.name not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Place(Path(temporary))
        for layout in dict.fromkeys(cell.layout for cell in left):
            place.calm(layout)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            scored = pool.map(functools.partial(attempt, place), left)
            for cell, found in zip(left, scored, strict=True):
                known[cell.name] = results[cell.name] = found
                path.write_text(json.dumps(known, indent=1))
                missed = [name for name in SCORES if not found.get(name)]
                print(f"{cell.name}: {found.get('seconds')} s, missed: {missed or 'nothing'}",
                      flush=True)  # fmt: skip
    return results


def attempt(place: Place, cell: Cell) -> dict:
    try:
        return place.score(cell)
    except Exception as error:  # of the tool, or a run that never ended
        return {"error": f"{type(error).__name__}: {error}"[-6000:]}


def summary(results: dict) -> str:
    parts = []
    for name in SCORES:
        count = sum(bool(found.get(name)) for found in results.values())
        parts.append(f"{name} {count}/{len(results)}")
    return f"{len(results)} cells: {', '.join(parts)}"


def main(words: list[str]) -> int:
    if words[:1] == ["kills"]:
        from tests.tools import chaos

        sys.argv[1:] = words[1:]
        chaos.main()
        return 0
    if words[:1] == ["goodput"]:
        from tests.tools import goodput

        return goodput.main(words[1:])
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    cells = every_cell() if words == ["all"] else table()
    if words and words != ["all"]:
        cells = [cell for cell in every_cell() if all(word in cell.name for word in words)]
        for cell in cells:
            known.pop(cell.name, None)
    if not cells:
        sys.exit(f"no cell has {' and '.join(words)} in its name; faults: {', '.join(FAULTS)}")
    results = run(cells, known, RESULTS)
    print(summary(results))
    return int(not all(found.get(name) for found in results.values() for name in SCORES))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
