"""Golden runs: ten losses and gradient norms of each family in each layout, kept as hexadecimal
floats in tests/golden, with the machine that made each. A change of any bit is seen there; on
another machine curves are compared within tolerances() of the family.
"""

import contextlib
import functools
import hashlib
import io
import json
import re
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

from tests.shared import pictures, tiny, tiny_moe, world
from tests.shared.layouts import (
    CP2,
    DIST_OPT,
    EP2,
    ONE_ROW,
    OVERLAP,
    PACKED,
    PP2,
    SP,
    TP2,
    TP2_SP,
    TWO_ROWS,
    VPP2,
)
from tests.shared.training import train

FOLDER = Path(__file__).parents[1] / "golden"
STEPS = 10
TOLERANCE = 1e-6
# Another machine rounds in another order, as another layout does. After ten steps of KEYS floors()
# are at most 2e-7 in losses and 5e-7 in gradient norms, but 8e-7 in qwen3_vl's and 1.6e-6 in
# gemma4_text's.
OF_FLOOR = 4
LARGEST_FLOOR = 2e-6
# A world's cells, and its limit: a cell takes 1 s, 10 on a slow machine that runs more beside it.
WORLD_CELLS = 8
CELL_S = 45
KEYS = dict(
    steps=STEPS,
    count=22,  # five full steps and one of two samples are an epoch
    warmup_steps=0,
    learning_rate=1e-3,
    lr_scheduler_kwargs={"min_lr": 1e-4},
    adam_epsilon=1e-4,
)
DENSE = [*tiny.FAMILY_KEYS, *tiny.MORE_KEYS]
# the dense models of deepseek have these names
EXPERTS = {f"{name}_experts" if name in DENSE else name: name for name in tiny_moe.MODELS}
PICTURES = list(pictures.FAMILIES)
LAYOUTS = {
    "torch": (1, dict(backend="torch", **TWO_ROWS)),
    "one": (1, TWO_ROWS),
    "dp2_overlap": (2, {**OVERLAP, **ONE_ROW}),
    "tp2_sp": (2, {**TP2, **SP, **DIST_OPT, **TWO_ROWS}),
    "pp2_packed": (2, {**PP2, **PACKED}),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "ep2": (2, {**EP2, **ONE_ROW}),
    "pp2_vpp2": (2, {**PP2, **VPP2, **TWO_ROWS}),
    "tp2sp_pp2": (4, {**TP2_SP, **PP2, **TWO_ROWS}),
    "ep2tp2_sp": (4, {**EP2, **TP2_SP, **ONE_ROW}),
}
OF_EXPERTS = ("ep2", "ep2tp2_sp")
# in every layout: most of a dense decoder, windows and caps, latent attention with experts
EVERYWHERE = ("qwen3", "gemma2", "deepseek_v3_experts")


def layouts_of(family: str) -> list[str]:
    names = [name for name in LAYOUTS if family in EXPERTS or name not in OF_EXPERTS]
    # each virtual stage needs a layer, and other models have two
    return [name for name in names if family in tiny.FAMILY_KEYS or name != "pp2_vpp2"]


# the rest of the families in two of the layouts; of them a third of "one" in `make test`
FEW = ("one", "tp2_sp")
CELLS = [
    (family, layout)
    for family in (*DENSE, *EXPERTS, *PICTURES)
    for layout in layouts_of(family)
    if family in EVERYWHERE or layout in FEW
]


# of the others, those whose runs at "one" are in `make test`
THIRD = [family for family, layout in CELLS if layout == "one"][::3]


def is_short(family: str, layout: str) -> bool:
    """True if `make test` runs the cell, too."""
    return family in ("qwen3", "deepseek_v3_experts") or (layout == "one" and family in THIRD)


def machine() -> dict[str, object]:
    """What decides the bits of a run: {fact: value}."""
    import torch

    cpus = Path("/proc/cpuinfo")
    facts = dict(re.findall(r"^(.+?)\s*: (.*)$", cpus.read_text(), re.M)) if cpus.exists() else {}
    names = ("vendor_id", "cpu family", "model", "model name")
    packages = ("torch", "megatron-core", "transformers")
    return {
        "cpu": " ".join(facts.get(name, "unknown") for name in names),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,  # of each rank, by tests/shared/world.py
        **{package: version(package) for package in packages},
    }


def saved(folder: str, family: str) -> str:
    """The path of a family's model, made in a folder."""
    path = f"{folder}/{family}"
    if family in DENSE:
        return tiny.save_model(path, family)
    if family in EXPERTS:
        return tiny_moe.save_model(path, EXPERTS[family], num_hidden_layers=2)
    return pictures.save_model(path, family)


def digest(path: str) -> str:
    """The start of the SHA-256 of a model's tensors."""
    found = hashlib.sha256()
    for file in sorted(Path(path).glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def run_cells(paths: dict[str, str], cells: list[tuple[str, str]], out: str) -> list:
    """The curves of cells with as many ranks as this world has: (family, layout, curve)."""
    found = []
    for family, layout in cells:
        own = dict(KEYS, **LAYOUTS[layout][1])
        if family in PICTURES:
            own["data"] = pictures.samples()
        with contextlib.redirect_stdout(io.StringIO()):
            curve = train(paths[family], f"{out}/{family}-{layout}", **own)
        found.append((family, layout, curve))
        world.leave_layout()
    return found


def worlds(cells: list[tuple[str, str]]) -> list[tuple[tuple[str, str], ...]]:
    """The cells in groups, each of as many ranks, that share a world."""
    found = []
    for ranks in (1, 2, 4):
        own = [cell for cell in cells if LAYOUTS[cell[1]][0] == ranks]
        starts = range(0, len(own), WORLD_CELLS)
        found += [tuple(own[start : start + WORLD_CELLS]) for start in starts]
    return found


def curves(cells: tuple[tuple[str, str], ...]) -> dict[str, dict]:
    """{family: {"weights": digest, layout: [[loss, grad norm] of each step, in hex]}} of the cells
    of a world."""
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()):
            paths = {family: saved(folder, family) for family in dict.fromkeys(f for f, _ in cells)}
        ranks, limit = LAYOUTS[cells[0][1]][0], 60 + CELL_S * len(cells)
        rows = world.run(run_cells, ranks, paths, cells, f"{folder}/out", timeout_s=limit)[0]
        for family, layout, curve in rows:
            hexed = [[float(value).hex() for value in step] for step in curve]
            found.setdefault(family, {"weights": digest(paths[family])})[layout] = hexed
    return found


@functools.cache
def kept(family: str) -> dict:
    """What tests/golden has of a family: nothing of a new one."""
    path = FOLDER / f"{family}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(found: dict[str, dict]) -> None:
    """Keep curves, all of a family, with this machine."""
    FOLDER.mkdir(exist_ok=True)
    for family, own in found.items():
        whole = {"machine": machine(), **own}
        names = [name for name in ("machine", "weights", *LAYOUTS) if name in whole]
        lines = [f'"{name}": {json.dumps(whole[name])}' for name in names]
        (FOLDER / f"{family}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def distance(a: str, b: str) -> float:
    """The difference of two numbers, relative to the second one above 1."""
    new, old = float.fromhex(a), float.fromhex(b)
    return abs(new - old) / max(1.0, abs(old))


def floors(family: str) -> list[float]:
    """What rounding in another order is worth: the largest distance of losses, and of gradient
    norms, between the family's golden runs in other layouts and the first one."""
    first, *others = [kept(family)[layout] for layout in LAYOUTS if layout in kept(family)]
    steps = [pair for other in others for pair in zip(other, first, strict=True)]
    return [max((distance(a[of], b[of]) for a, b in steps), default=0.0) for of in (0, 1)]


def tolerances(family: str) -> list[float]:
    """Distances allowed on another machine, of a loss and of a gradient norm."""
    return [max(TOLERANCE, OF_FLOOR * floor) for floor in floors(family)]


def differences(got: list, wanted: list, allowed: list[float]) -> list[str]:
    """Words for each number that is not that of the golden run: bit for bit where 0 is allowed, of
    losses and gradient norms."""
    found = [] if len(got) == len(wanted) else [f"{len(got)} steps instead of {len(wanted)}"]
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=False)):
        names = ("loss", "grad norm")
        for name, a, b, most in zip(names, ours, theirs, allowed, strict=True):
            if not distance(a, b) <= most:
                words = f"{name} {a} instead of {b}, {distance(a, b):.1e} from it"
                found.append(f"step {step + 1}: {words}")
    return found


def check(family: str, layout: str, own: dict) -> None:
    """AssertionError if a family's curve in a layout is not the golden one; a warning says what was
    compared within a tolerance, and why.
    """
    golden, here = kept(family), machine()
    then = golden["machine"]
    other = [f"{name} {here[name]}, not {then[name]}" for name in then if here[name] != then[name]]
    if own["weights"] != golden["weights"]:
        words = f"the model's random weights are others than those of the golden run of {family}"
        assert other, f"{words}: {MEANT}"
        if here["transformers"] != then["transformers"]:
            warnings.warn(f"{words} ({'; '.join(other)}): nothing was compared", stacklevel=2)
            return
    allowed = [0.0, 0.0]
    if other:
        allowed = tolerances(family)
        within = "losses within {:.1e} and gradient norms within {:.1e}".format(*allowed)
        words = f"golden runs were compared, {within}, not to the bit: {'; '.join(other)}"
        warnings.warn(words, stacklevel=2)
    wrong = differences(own[layout], golden[layout], allowed)
    assert not wrong, "\n".join([f"{family} at {layout}: {MEANT}", *wrong])


MEANT = "if the change is meant, run `make golden`, and say why in the commit"
