"""Two steps of every family and objective at its default keys, compiled: `make gpu ARGS=compiled`,
or a part of it:

    python -m tests.tools.gpu compiled [text | experts | pictures | objectives] [NAME ...]

Each of several processes has a share of the cells, and compiles anew in each of them. A cell trains
in float32 or bf16, in rows or packed, one or two to a micro-batch, whose lengths differ: the first
kernels are of one length, the next of any. It is compared with the same run in float32 by single
operations in plain torch: the torch backend, and transformers' own class for pictures. Rows are of
600 tokens and more, since torch's compiler joins and splits the sums of long rows alone.

A line a cell: the largest relative differences of a loss and of a gradient norm; what ran
compiled, as the number of graphs of torch.compile beside the Triton kernels, or why not. The exit
code is 1 if a cell failed, is further away than TOLERANCES, or was not compiled. NAME: parts of the
cells' names, of which those with all are run. By its own name it runs on a CPU, uncompiled.
"""

import contextlib
import gc
import io
import itertools
import os
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from tests.shared import distilling, dpo_tools, kto_tools, pictures, rm_tools, tiny, tiny_moe, world
from tests.shared.layouts import ONE_ROW, PACKED, TWO_ROWS
from tests.shared.training import most, train

PARTS = ("text", "experts", "pictures", "objectives")
ROWS = {
    "one row": ONE_ROW,
    "two rows": TWO_ROWS,
    "packed, one": {**PACKED, **ONE_ROW},
    "packed, two": PACKED,
}
# the largest difference of a loss and of a gradient norm
TOLERANCES = {"float32": (1e-5, 1e-4), "bf16": (2e-2, 5e-2)}
# these losses are of differences between sums over hundreds of tokens, or of scores
OF_DIFFERENCES = {"float32": (1e-4, 1e-3), "bf16": (5e-2, 2e-1)}
LENGTHS = (600, 1537)
LONG = dict(max_position_embeddings=2048)
PROCESSES = 8  # that share a GPU
PART_S = 460  # after which no cell begins
STEPS, COUNT = 2, 7  # the second step has three samples and a filler
SHORT = dict(warmup_steps=0, adam_epsilon=1e-4)
SCALE = 100  # of the lengths of tiny pairs and answers
PAIRS = {
    "dpo": dict(pref_loss="sigmoid", beta=0.1),
    "orpo": dict(pref_loss="orpo", beta=0.1),
    "simpo": dict(pref_loss="simpo", beta=0.1),
}
# of tests.shared.distilling: each divergence, a resident teacher and a cached one
RUNS_OF_TEACHERS = (
    ("plain", None, "full"),
    *itertools.product(distilling.OBJECTIVES, (None, 5), ("full",)),
)


# -- what is trained: functions of a model's folder, a folder for its run, and keys


def of_text(path: str, out: str, **keys) -> list:
    data = tiny.samples(COUNT, lengths=LENGTHS)
    return train(path, out, steps=STEPS, data=data, **SHORT, **keys)


def of_whole_documents(path: str, out: str, **keys) -> list:
    """Pretraining: each token is a label."""
    data = tiny.samples(COUNT, lengths=LENGTHS)
    for sample in data:
        sample["labels"] = sample["input_ids"].roll(-1)
    return train(path, out, steps=STEPS, data=data, **SHORT, **keys)


LONG_PICTURES = [
    [(300, (2, 2), 500), (700, (1, 3), 400), (900,), (610,)],
    [(200, (2, 3), 400), (300, (2, 1), 250, (2, 2), 500), (720, (4, 2), 60), (800,)],
]
# frames of audios are floats
LONG_AUDIO = [
    [(300, 700.0, 500), (700, (1, 3), 400), (900,), (610,)],
    [(200, (2, 3), 9.0, 400), (300, 1210.0, 250, 40.0, 300), (720, 130.0, 60), (800,)],
]
LONG_VIDEOS = [
    [(300, (3, 2, 2), 500), (700, (1, 3), 400), (900,), (610,)],
    [(200, (2, 2, 3), 400), (300, (2, 1), 250, (5, 2, 2), 500), (720, (2, 4, 2), 60), (800,)],
]


def long_inputs(shapes: list, **how) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [pictures.document(generator, *pieces, **how) for step in shapes for pieces in step]


def of_pictures(path: str, out: str, shapes: list, how: dict, **keys) -> list:
    keys = {"steps": STEPS, "export": False, **keys}
    return pictures.train_ours(path, out, data=long_inputs(shapes, **how), **keys)


def of_pictures_in_torch(path: str, out: str, shapes: list, how: dict) -> list:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return pictures.train_plain(path, out, data=long_inputs(shapes, **how), device=device)


def longer(draw):
    return lambda low, high: draw(SCALE * low, SCALE * high)


class LongPairs(dpo_tools.Pairs):
    def pair(self, draw) -> dict:
        return super().pair(longer(draw))


class LongRated(rm_tools.Rated):
    def pair(self, draw) -> dict:
        return super().pair(longer(draw))


def curve_of(trainer) -> list:
    return [(line["loss"], line["grad_norm"]) for line in dpo_tools.curve_of(trainer)]


def of_pairs(path: str, out: str, objective: str, **keys) -> list:
    trainer = dpo_tools.our_run(path, out, PAIRS[objective], train_dataset=LongPairs(), **keys)
    return curve_of(trainer)


def of_answers(path: str, out: str, **keys) -> list:
    data = kto_tools.Answers(kto_tools.raw_answers(scale=SCALE))
    return curve_of(kto_tools.kto_run(path, out, train_dataset=data, **keys))


def of_scores(path: str, out: str, **keys) -> list:
    return curve_of(rm_tools.rm_run(path, out, train_dataset=LongRated(), **keys))


def of_a_teacher(path: str, out: str, teacher: str, run: tuple, **keys) -> list:
    keys = dict(SHORT, steps=STEPS, data=tiny.samples(COUNT, lengths=LENGTHS), **keys)
    config = distilling.keys_of_run(run)
    if config["top_k"]:
        config["cache"] = f"{out}-cache"
    return distilling.our_curve(path, teacher, out, config, **keys)


# -- cells: {name: (function, folder of its model, keys)}, and those that they are compared with


def cells_of(part: str, folder: Path) -> dict[str, tuple]:
    """The cells of a part: {name: (function, folder of its model, its other arguments)}."""
    if part == "text":
        names = {**tiny.FAMILY_KEYS, **tiny.MORE_KEYS}
        return {name: (of_text, tiny.save_model(folder / name, name, **LONG), {}) for name in names}
    if part == "experts":
        return {
            f"{name}, experts": (of_text, tiny_moe.save_model(folder / name, name, **LONG), {})
            for name, (family, _) in tiny_moe.MODELS.items()
            if tiny.is_known(family)
        }
    if part == "pictures":
        return cells_of_pictures(folder)
    cells = {}
    for family in ("qwen3", "qwen3_5_text"):
        path, teacher = distilling.save_models(folder / family, family, **LONG)
        scores = rm_tools.save_model(folder / family / "rm", family, **LONG)
        of_family = dict(pt=(of_whole_documents, path, {}), sft=(of_text, path, {}))
        of_family |= {name: (of_pairs, path, dict(objective=name)) for name in PAIRS}
        of_family |= dict(kto=(of_answers, path, {}), rm=(of_scores, scores, {}))
        for run in RUNS_OF_TEACHERS:
            keys = dict(teacher=teacher, run=run)
            of_family["distill " + " ".join(map(str, run))] = of_a_teacher, path, keys
        cells |= {f"{name}, {family}": cell for name, cell in of_family.items()}
    return cells


def cells_of_pictures(folder: Path) -> dict[str, tuple]:
    """Each family on pictures, on videos, and on audio where it hears."""
    cells = {}
    for name in pictures.FAMILIES:
        path = pictures.save_model(folder / name, name, **LONG)
        kinds: dict[str, tuple] = {"pictures": (LONG_PICTURES, {})}
        kinds["videos"] = LONG_VIDEOS, pictures.of_videos(name)
        if name == pictures.HEARS:
            kinds["audio"] = LONG_AUDIO, {}
        for kind, (shapes, how) in kinds.items():
            cells[f"{name}, {kind}"] = of_pictures, path, dict(shapes=shapes, how=how)
    return cells


def variants() -> dict[str, dict]:
    """{name: keys} of how each is trained."""
    out = {f"float32, {name}": keys for name, keys in ROWS.items()}
    return out | {f"bf16, {name}": dict(bf16=True, **ROWS[name]) for name in list(ROWS)[1::2]}


def quiet(function, path: str, out: str, keys: dict) -> list:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return function(path, out, **keys)


# -- a share of the cells, on a rank


_fallen: list[str] = []  # the lines about functions of this process that are compiled no more


def compiled_run(function, path: str, out: str, keys: dict) -> tuple[list, str]:
    """(curve, "" or why it was not compiled)"""
    from mca_lite import kernels

    torch.compiler.reset()  # after some kinds of a function torch compiles no more of them
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        curve = quiet(function, path, out, keys)
    lines = [str(line.message) for line in said]
    _fallen.extend(line for line in lines if "torch.compile" in line and "slower" in line)
    if _fallen:
        return curve, f"FELL BACK: {'; '.join(_fallen)}"
    if not torch.cuda.is_available() or not kernels.compiles(torch.ones(1, device="cuda")):
        return curve, "not compiled"
    return curve, ""


def worst(got: list, wanted: list) -> tuple[float, float]:
    """Largest differences of loss, relative to one above 1, and of gradient norm, relative to
    it."""
    pairs = list(zip(got, wanted, strict=True))
    losses = most(abs(a[0] - b[0]) / max(b[0], 1.0) for a, b in pairs)
    return losses, most(abs(a[1] - b[1]) / b[1] for a, b in pairs)


def in_turn(share: list[tuple], folder: str, end: float) -> list[str]:
    """On a rank: the cells (name, (function, model, arguments)) in all variants -> the names of
    those that are wrong."""
    torch.backends.cudnn.allow_tf32 = False  # of convolutions in plain torch
    wrong = []
    for name, (function, path, given) in share:
        wanted = None
        for variant, keys in variants().items():
            start, label, what = time.time(), f"{name}, {variant}", ""
            out = f"{folder}/{label.replace(', ', '-').replace(' ', '-')}"
            loss = norm = float("inf")
            try:
                world.expect_time(end)
                if wanted is None:
                    wanted = plain_run(function, path, f"{out}-plain", given)
                curve, what = compiled_run(function, path, out, {**given, **keys})
                loss, norm = worst(curve, wanted)
            except TimeoutError as error:
                what = str(error)
            except Exception as error:
                traceback.print_exc()
                what = f"FAILED: {(str(error) or type(error).__name__).splitlines()[0]}"
            tolerances = OF_DIFFERENCES if name.startswith(("dpo", "kto", "rm")) else TOLERANCES
            most = tolerances["bf16" if "bf16" in variant else "float32"]
            is_far = not (loss <= most[0] and norm <= most[1])
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            words = what or f"compiled: kernels, {graphs} graphs{', TOO FAR' if is_far else ''}"
            seconds = time.time() - start
            line = f"{label:54} d loss {loss:.1e}  d norm {norm:.1e}  {words}  {seconds:.1f} s"
            print(line, flush=True)
            if is_far or what:
                wrong.append(label)
            leave_layout()
    return wrong


def leave_layout() -> None:
    """Free what a cell held on the GPU, which eight processes share: its tensors, and the
    communicators of its groups, which NCCL keeps until they are destroyed."""
    world.leave_layout()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
    torch.cuda.empty_cache()


def plain_run(function, path: str, out: str, given: dict) -> list:
    """The curve in float32 by single operations in plain torch."""
    if function is of_pictures:
        return quiet(of_pictures_in_torch, path, out, given)
    keys = dict(given, backend="torch", torch_compile=False, **ONE_ROW)
    return quiet(function, path, out, keys)


def run_part(part: str, words: list[str]) -> int:
    """Run a part's cells whose names have all words -> 0 if they are right."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()):
            cells = list(cells_of(part, Path(folder)).items())
        chosen = [cell for cell in cells if all(word in cell[0] for word in words)]
        count = min(max((os.cpu_count() or 2) // 2, 1), PROCESSES, len(chosen))
        end = start + PART_S

        def run(share: list) -> list[str]:
            return world.run(in_turn, 1, share, f"{folder}/out", end, timeout_s=PART_S + 100)[0]

        with ThreadPoolExecutor(max(count, 1)) as pool:
            wrong = sum(pool.map(run, [chosen[i::count] for i in range(count)]), [])
    seconds, total = time.time() - start, len(chosen) * len(variants())
    print(f"compiled {part}: {len(wrong)} of {total} wrong, {seconds:.0f} s", *wrong, sep="\n  ")
    return int(bool(wrong))


def main(words: list[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each process has cells of its own
    chosen = [part for part in PARTS if part in words] or list(PARTS)
    rest = [word for word in words if word not in PARTS]
    return max(run_part(part, rest) for part in chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
