"""`make families`: measures every family against transformers and writes the table in
tests/FAMILIES.md.

Each family's tiny models (tiny.py, tiny_moe.py) are trained for two steps in each layout and
compared with the torch backend on one rank, read and written, and asked for logits. Checkpoints of
some layouts go on in others, and are compared with the run that did not stop. Adapters on the
linears of attention and MLPs are compared with PEFT's. Greedy tokens of transformers' generate() on
the export of a layout are compared with those of our logits. A number in the table is the worst of
all its models and layouts. The exit code is 1 if one is too large. With names of families, the rows
of these alone are measured: `python -m tests.tools.family_table olmo3 dots1`.
"""

import contextlib
import functools
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import torch

from tests.shared import greedy, pictures, tiny, tiny_moe, world
from tests.shared.cells import train_all
from tests.shared.files import TOKENS, tensors
from tests.shared.layouts import CP2, EP2, PACKED, PP2, TP2_SP
from tests.shared.lora_tools import adapter_of, load, train_with_peft

PAGE = Path(__file__).parents[1] / "FAMILIES.md"
BEGIN, END = "<!-- families: written by make families -->", "<!-- families: end -->"

# What people ask for and this does not have, and why
NOT_BUILT = {
    "cohere, cohere2": "attention and MLP side by side on one LayerNorm",
    "deepseek_v32": "sparse attention with an indexer",
    "ernie4_5_moe": "a bias [1, experts] of softmax scores, which megatron refuses, and a floor "
    "under the sum of a token's weights",
    "falcon_h1, jamba, bamba, nemotron_h, zamba2": "state-space layers",
    "gemma3, llama4 and others with images": "their language models alone, or "
    "qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe and glm4v",
    "gemma4 of experts, with embeddings of each layer, or of pictures": "gemma4_text's dense "
    "models alone, with keys that are values in full layers",
    "gemma3n": "embeddings of their own in each layer, layers that share keys and values",
    "gpt2, gpt_neox, starcoder2, phi": "LayerNorm, biases and an MLP without a gate",
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
# {layout of a run: (another layout, in which its checkpoint goes on; ranks and keys of that)}
RESUMED = {"tp2+sp": ("pp2", (2, PP2)), "ep2": ("tp2+sp", (2, TP2_SP))}
NUMBERS = ("logits", "loss", "norm", "weights", "resume", "adapters")
SAVED_STEP = (1, 3)  # of models of text and of pictures; the third step has no picture
ADAPTED = (2, {**TP2_SP, **PACKED})
FUSED = ("qkv_proj", "gate_up_proj")
MLPS = ("gate_proj", "up_proj", "down_proj", "shared_expert_gate")
EXPORTED = "tp2+sp pp2"  # of which transformers generates
TOLERANCE = 1e-5


def save_models(folder: Path) -> dict[str, dict[str, str]]:
    """{family: {model: its folder}}"""
    made: dict[str, dict[str, str]] = {}
    for name, keys in {**tiny.FAMILY_KEYS, **tiny.MORE_KEYS}.items():
        family = keys.get("model_type", name)
        made.setdefault(family, {})[name] = tiny.save_model(folder / name, name)
    for name, (family, _) in tiny_moe.MODELS.items():
        if not tiny.is_known(family):
            continue
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
        super().__init__(bytes=True, tokens=True, layouts=set())
        self.update(dict.fromkeys(NUMBERS, 0.0))

    @property
    def is_right(self) -> bool:
        return self["bytes"] and self["tokens"] and all(self[n] <= TOLERANCE for n in NUMBERS)

    def see(self, kind: str, *values: float) -> None:
        self[kind] = max(self[kind], *values)

    def see_curve(self, got: list, wanted: list) -> None:
        for (loss, norm), (wanted_loss, wanted_norm) in zip(got, wanted, strict=True):
            self.see("loss", abs(loss - wanted_loss))
            self.see("norm", abs(norm - wanted_norm) / wanted_norm)


def train_models(ranks: int, paths: dict, out: Path, resumes: Path | None = None, **own) -> list:
    """[{model: curve} of each rank]; exports in out/model. resumes: the folder of the runs whose
    checkpoints go on."""
    from tests.test_model_families import SHORT

    curves: list[dict] = [{} for _ in range(ranks)]
    for of_pictures in (False, True):
        runs = {}
        for name, path in paths.items():
            more = {}
            if resumes is not None:
                step = SAVED_STEP[of_pictures]
                more["resume_from_checkpoint"] = str(resumes / name / f"checkpoint-{step}")
            if (name in pictures.FAMILIES) == of_pictures:
                runs[name] = ((path,), more)
        keys = dict(run=pictures.train_ours) if of_pictures else SHORT
        if out.name in RESUMED:
            saves = dict(save_strategy="steps", save_steps=SAVED_STEP[of_pictures])
            keys = {**keys, **saves}
        got = world.run(train_all, ranks, runs, str(out), timeout_s=600, **keys, **own)
        for curve, of_rank in zip(curves, got, strict=True):
            curve.update(of_rank)
    return curves


def measure(folder: Path, chosen: set[str]) -> dict[str, Worst]:
    """{family: the worst of what was measured}, of the chosen families, all without."""
    models = save_models(folder)
    models = {family: models[family] for family in chosen or models}
    worst = {family: Worst() for family in models}
    paths = {name: path for family in models.values() for name, path in family.items()}
    of_model = {name: worst[family] for family, names in models.items() for name in names}
    text = {name: path for name, path in paths.items() if name not in pictures.FAMILIES}
    [wanted] = train_models(1, text, folder / "torch", backend="torch")
    for name in paths.keys() - text.keys():
        wanted[name] = pictures.train_plain(paths[name], str(folder / "torch" / name))
    for layout, (ranks, own) in {**LAYOUTS, **EXPERT_LAYOUTS}.items():
        trained = {n: path for n, path in paths.items() if layout in LAYOUTS or has_experts(n)}
        curves = train_models(ranks, trained, folder / layout, **own)
        for name in trained:
            of_model[name]["layouts"].add(layout)
            for of_rank in curves:
                of_model[name].see_curve(of_rank[name], wanted[name])
            difference = difference_of_weights(folder, layout, "torch", name)
            of_model[name].see("weights", difference)
        if layout in RESUMED:
            whole = curves[0]
            then, (ranks, own) = RESUMED[layout]
            later = f"{layout}, then {then}"
            resumed = train_models(ranks, trained, folder / later, folder / layout, **own)
            for name in trained:
                loss = abs(resumed[0][name][-1][0] - whole[name][-1][0])
                weights = difference_of_weights(folder, later, layout, name)
                of_model[name].see("resume", loss, weights)
        print(layout, flush=True)
    see_adapters(folder, paths, of_model)
    see_files(folder, paths, of_model)
    return worst


def linears(path: str) -> list[str]:
    """The linears of a text model that lora_target: all means, without fused ones, which this
    refuses, and experts, which are no modules of transformers. Where transformers fuses experts of
    the files, PEFT takes names of other MLPs as names of experts: then those of attention."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from mca_lite import AutoConfig, hosts, part_lora
    from tests.shared.files import load_hf, make_args

    config = AutoConfig.from_pretrained(path, make_args())
    candidates = part_lora.candidates_of(hosts.host_of(config))
    left_out = FUSED
    if get_checkpoint_conversion_mapping(config.hf_model_type) is not None:
        left_out += MLPS
    names = [c.hf for c in candidates if c.in_all and not c.hf.endswith(left_out)]
    modules = dict(load_hf(path).named_modules())
    return [name for name in names if isinstance(modules.get(name), torch.nn.Linear)]


def train_with_adapters(paths: dict[str, str], out: str) -> dict[str, list]:
    """{model: curve} with PEFT's adapters, saved before and after to out/model."""
    return {
        name: train_with_peft(path, f"{out}/{name}", targets=linears(path))
        for name, path in paths.items()
    }


def see_adapters(folder: Path, paths: dict, of_model: dict[str, Worst]) -> None:
    """Add the differences from PEFT of adapters in ADAPTED to the models' worst."""
    from tests.test_model_families import train_adapters

    ranks, own = ADAPTED
    peft, out = folder / "peft", folder / "adapters"
    text = {name: path for name, path in paths.items() if name not in pictures.FAMILIES}
    curves, wanted = {}, {}
    if text:
        [wanted] = world.run(train_with_adapters, 1, text, str(peft), timeout_s=600)
        curves = world.run(
            train_adapters, ranks, text, str(peft), str(out), list(text), own, timeout_s=600
        )[0]
    for name in paths.keys() - text.keys():
        start, end = (str(peft / name / part) for part in ("start", "end"))
        adapt = functools.partial(pictures.with_peft, start)
        wanted[name] = pictures.train_plain(paths[name], end, adapt)
        keys = dict(own, adapt=functools.partial(load, start), timeout_s=600)
        where = paths[name], str(out / name)
        curves[name] = world.run(pictures.train_ours, ranks, *where, **keys)[0]
    for name in paths:
        ours, theirs = adapter_of(out / name), adapter_of(peft / name / "end")
        assert ours.keys() == theirs.keys() and ours, name
        for (loss, _), (wanted_loss, _) in zip(curves[name], wanted[name], strict=True):
            of_model[name].see("adapters", abs(loss - wanted_loss))
        for key, matrix in theirs.items():
            of_model[name].see("adapters", float((ours[key] - matrix).abs().max()))
    print("adapters", flush=True)


def see_files(folder: Path, paths: dict, of_model: dict[str, Worst]) -> None:
    """Add what is measured of reading, writing and exports to the models' worst."""
    from tests.test_model_families import round_trip

    [logits] = world.run(round_trip, 1, paths, str(folder / "read"), {}, timeout_s=600)
    world.run(round_trip, 4, paths, str(folder / "cut"), {**TP2_SP, **PP2}, timeout_s=600)
    exports = {name: str(folder / EXPORTED / name) for name in paths}
    [tokens] = world.run(greedy.of_ours, 1, exports, timeout_s=600)
    for name, path in paths.items():
        of = of_model[name]
        of.see("logits", difference_of_logits(path, logits[name]))
        source, cut = tensors(path), tensors(folder / "cut" / name)
        of["bytes"] &= source.keys() == cut.keys() and all(
            torch.equal(source[key], cut[key]) for key in source
        )
        of["tokens"] &= greedy.of_transformers(exports[name]) == tokens[name]


def has_experts(name: str) -> bool:
    """True for a name of save_models whose model has experts."""
    text, _ = pictures.FAMILIES.get(name, ({}, {}))
    return name.endswith("+experts") or "num_experts" in text


def difference_of_weights(folder: Path, one: str, other: str, name: str) -> float:
    """The largest difference of a model's exports in two folders."""
    ours, theirs = tensors(folder / one / name), tensors(folder / other / name)
    assert ours.keys() == theirs.keys(), name
    return max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)


def difference_of_logits(path: str, ours: list) -> float:
    from mca_lite.model import load_torch_model

    model = load_torch_model(path).eval()
    with torch.no_grad():
        return float((torch.tensor(ours) - model(torch.tensor(TOKENS)).logits).abs().max())


def rows(worst: dict[str, Worst]) -> dict[str, str]:
    """{family: its row}"""
    lines = {}
    for family, of in worst.items():
        numbers = " | ".join(f"{of[kind]:.0e}" for kind in NUMBERS)
        bytes_read = "the same bytes" if of["bytes"] else "NOT the same"
        tokens = "the same tokens" if of["tokens"] else "NOT the same"
        count = len(of["layouts"])
        lines[family] = f"| {family} | {numbers} | {bytes_read} | {tokens} | {count} |"
    return lines


def rows_of_page(text: str) -> dict[str, str]:
    """{family: its row} of the table between the markers."""
    measured = text[text.index(BEGIN) : text.index(END)].split("| not built |")[0]
    lines = [line for line in measured.splitlines() if line.startswith("| ")][2:]
    return {line.split("|")[1].strip(): line for line in lines}


def table(rows: dict[str, str]) -> str:
    lines = [
        f"Layouts: {'; '.join(LAYOUTS)}; of models with experts "
        f"{'; '.join(EXPERT_LAYOUTS)} as well. Resumed: "
        f"{'; '.join(f'{first} to {then}' for first, (then, _) in RESUMED.items())}.",
        "",
        "| family | logits | loss | grad norm | weights | resume | adapters | read and written "
        "| generation | layouts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
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


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        worst = measure(Path(folder), chosen)
    text = PAGE.read_text()
    measured = rows(worst)
    new = table({**(rows_of_page(text) if chosen else {}), **measured})
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: f"{BEGIN}\n{new}\n{END}", text))
    print("\n".join(measured.values()))
    wrong = [family for family, of in worst.items() if not of.is_right]
    if wrong:
        print(f"larger than {TOLERANCE}, or not the same: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
