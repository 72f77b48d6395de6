"""`make families`: measures every family against transformers and writes the table in
tests/README.md.

Each family's tiny models (tiny.py, tiny_moe.py) are trained for three steps in each layout and
compared with the torch backend on one rank, read and written, and asked for logits. A number in the
table is the worst of all its models and layouts. With names of families, the rows of these alone
are measured: `python -m tests.tools.family_table olmo3 dots1`.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import torch

from tests.shared import pictures, tiny, tiny_moe, world
from tests.shared.cells import train_all
from tests.shared.files import TOKENS, tensors
from tests.shared.layouts import CP2, EP2, PACKED, PP2, TP2_SP

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- families: written by make families -->", "<!-- families: end -->"

# What people ask for and this does not have, and why
NOT_BUILT = {
    "cohere, cohere2": "attention and MLP side by side on one LayerNorm",
    "deepseek_v32": "sparse attention with an indexer",
    "ernie4_5_moe": "a bias [1, experts] of softmax scores, which megatron refuses, and a floor "
    "under the sum of a token's weights",
    "falcon_h1, jamba, bamba, nemotron_h, zamba2": "state-space layers",
    "gemma3, llama4, qwen3_vl_moe and others with images": "their language models alone, or "
    "qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_5 and qwen3_5_moe",
    "gemma4 of experts, with embeddings of each layer, or of pictures": "gemma4_text's dense "
    "models alone, with keys that are values in full layers",
    "gemma3n": "embeddings of their own in each layer, layers that share keys and values",
    "gpt2, gpt_neox, starcoder2, phi": "LayerNorm, biases and an MLP without a gate",
    "phi3 with longrope": "frequencies that depend on the length of the text: refused",
    "granitemoe": "all experts of a layer in one tensor, under names of its own",
    "hunyuan_v1_moe with moe_topk of several numbers": "layers with different numbers of experts "
    "of a token: refused",
    "hy_v3": "files that name the router, its bias and the shared experts otherwise than "
    "transformers' modules, whose names adapters have",
    "kimi_linear, minimax": "linear attention layers of other kinds",
}
LAYOUTS = {
    "one": (1, {}),
    "tp2+sp": (2, TP2_SP),
    "pp2, packed": (2, {**PP2, **PACKED}),
    "cp2, packed": (2, {**CP2, **PACKED}),
    "tp2+sp pp2": (4, {**TP2_SP, **PP2}),
}
EXPERT_LAYOUTS = {
    "ep2": (2, EP2),
    "ep4": (4, dict(expert_model_parallel_size=4)),
    "ep2 tp2+sp": (4, {**EP2, **TP2_SP}),
    "ep2 pp2": (4, {**EP2, **PP2}),
    "cp2 ep2, packed": (4, {**CP2, **EP2, **PACKED}),
}


def save_models(folder: Path) -> dict[str, dict[str, str]]:
    """{family: {model: its folder}}"""
    made: dict[str, dict[str, str]] = {}
    for name, keys in {**tiny.FAMILY_KEYS, **tiny.MORE_KEYS}.items():
        family = keys.get("model_type", name)
        made.setdefault(family, {})[name] = tiny.save_model(folder / name, name)
    for name, (family, _) in tiny_moe.MODELS.items():
        made.setdefault(family, {})[f"{name}+experts"] = tiny_moe.save_model(
            folder / f"{name}-experts", name
        )
    for name in pictures.FAMILIES:
        made[name] = {name: pictures.save_model(folder / name, name)}
    return made


class Worst(dict):
    """The largest difference of each kind of a family, and the number of layouts that were
    compared.
    """

    def __init__(self):
        super().__init__(logits=0.0, loss=0.0, norm=0.0, weights=0.0, bytes=True, layouts=set())

    def see(self, kind: str, *values: float) -> None:
        self[kind] = max(self[kind], *values)


def measure(folder: Path, chosen: set[str]) -> dict[str, Worst]:
    """{family: the worst of what was measured}, of the chosen families, all without."""
    from tests.test_model_families import SHORT, round_trip

    models = save_models(folder)
    models = {family: models[family] for family in chosen or models}
    worst = {family: Worst() for family in models}
    paths = {name: path for family in models.values() for name, path in family.items()}
    family_of = {name: family for family, names in models.items() for name in names}
    runs = {name: ((path,), {}) for name, path in paths.items()}
    seen = {name: runs.pop(name) for name in pictures.FAMILIES if name in runs}
    keys = dict(SHORT, timeout_s=600)
    [wanted] = world.run(train_all, 1, runs, str(folder / "torch"), backend="torch", **keys)
    for name in seen:
        wanted[name] = pictures.train_plain(paths[name], str(folder / "torch" / name))
    for layout, (ranks, own) in {**LAYOUTS, **EXPERT_LAYOUTS}.items():
        chosen = {n: run for n, run in runs.items() if layout in LAYOUTS or n.endswith("+experts")}
        out = folder / layout
        got = world.run(train_all, ranks, chosen, str(out), **keys, **own)
        if layout in LAYOUTS:
            chosen |= seen
            of_pictures = dict(own, run=pictures.train_ours, timeout_s=600)
            more = world.run(train_all, ranks, seen, str(out), **of_pictures)
            got = [{**a, **b} for a, b in zip(got, more, strict=True)]
        for name in chosen:
            of = worst[family_of[name]]
            of["layouts"].add(layout)
            for curve in (rank[name] for rank in got):
                pairs = list(zip(curve, wanted[name], strict=True))
                of.see("loss", *(abs(a[0] - b[0]) for a, b in pairs))
                of.see("norm", *(abs(a[1] - b[1]) / b[1] for a, b in pairs))
            ours, theirs = tensors(out / name), tensors(folder / "torch" / name)
            assert ours.keys() == theirs.keys(), name
            of.see("weights", *(float((ours[key] - theirs[key]).abs().max()) for key in theirs))
        print(layout, flush=True)
    [logits] = world.run(round_trip, 1, paths, str(folder / "read"), {}, timeout_s=600)
    world.run(round_trip, 4, paths, str(folder / "cut"), {**TP2_SP, **PP2}, timeout_s=600)
    for name, path in paths.items():
        of = worst[family_of[name]]
        of.see("logits", difference_of_logits(path, logits[name]))
        source, cut = tensors(path), tensors(folder / "cut" / name)
        of["bytes"] &= source.keys() == cut.keys() and all(
            torch.equal(source[key], cut[key]) for key in source
        )
    return worst


def difference_of_logits(path: str, ours: list) -> float:
    from mca_lite.model import load_torch_model

    model = load_torch_model(path).eval()
    with torch.no_grad():
        return float((torch.tensor(ours) - model(torch.tensor(TOKENS)).logits).abs().max())


def rows(worst: dict[str, Worst]) -> dict[str, str]:
    """{family: its row}"""
    lines = {}
    for family, of in worst.items():
        numbers = " | ".join(f"{of[kind]:.0e}" for kind in ("logits", "loss", "norm", "weights"))
        same = "the same bytes" if of["bytes"] else "NOT the same"
        lines[family] = f"| {family} | {numbers} | {same} | {len(of['layouts'])} |"
    return lines


def rows_of_page(text: str) -> dict[str, str]:
    """{family: its row} of the table between the markers."""
    measured = text[text.index(BEGIN) : text.index(END)].split("| not built |")[0]
    lines = [line for line in measured.splitlines() if line.startswith("| ")][2:]
    return {line.split("|")[1].strip(): line for line in lines}


def table(rows: dict[str, str]) -> str:
    lines = [
        f"Layouts: {'; '.join(LAYOUTS)}; of models with experts "
        f"{'; '.join(EXPERT_LAYOUTS)} as well.",
        "",
        "| family | logits | loss | grad norm | weights | read and written | layouts |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [row for _, row in sorted(rows.items())]
    lines += ["", "| not built | why |", "| --- | --- |"]
    lines += [f"| {names} | {why} |" for names, why in NOT_BUILT.items()]
    return "\n".join(lines)


def named_families(text: str) -> tuple[set[str], dict[str, str]]:
    """(families of the table between the markers, {what is not built: why})"""
    part = text[text.index(BEGIN) : text.index(END)]
    missing = part.split("| not built |")[1]
    absent = [
        line.strip("|").split("|") for line in missing.splitlines()[2:] if line.startswith("| ")
    ]
    return set(rows_of_page(text)), {cells[0].strip(): cells[1].strip() for cells in absent}


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    text = README.read_text()
    chosen = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        measured = rows(measure(Path(folder), chosen))
    new = table({**(rows_of_page(text) if chosen else {}), **measured})
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    README.write_text(pattern.sub(lambda _: f"{BEGIN}\n{new}\n{END}", text))
    print(new)


if __name__ == "__main__":
    main()
