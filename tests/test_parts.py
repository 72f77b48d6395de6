"""Each part of the package can be deleted: what is left reads configurations, refuses the part's
keys by name, plans and trains with the same losses, in processes that no installation can help.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from mca_lite.args import CORE_GROUPS, parse_args
from mca_lite.args_values import default_of
from mca_lite.errors import UserError
from mca_lite.families import FAMILIES
from mca_lite.inputs import TEXT
from mca_lite.part_delta_families import LINEAR
from mca_lite.parts import PARTS, absent, missing, with_needs
from mca_lite.tables import (
    CORE_ATTENTIONS,
    FINETUNING,
    INPUTS,
    KEY_GROUPS,
    LAYER_TYPES,
    OBJECTIVES,
    OPTIMIZERS,
    TENSOR_FORMATS,
    function_of,
)
from tests.shared import removal
from tests.tools import rings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mca_lite"
# key of the core -> its values, and the module that a part's row names
FAMILIES_OF_PARTS = {  # their rows are gone with the part
    kind: INPUTS[family.inputs] for kind, family in FAMILIES.items() if family.inputs
} | dict.fromkeys(LINEAR, "part_delta_families:LINEAR")
# their rows name modules of parts
TABLES = (CORE_ATTENTIONS, LAYER_TYPES, TENSOR_FORMATS, INPUTS, FAMILIES_OF_PARTS)
CHOICES = {
    "stage": {name: str(row.trainer).split(":")[0] for name, row in OBJECTIVES.items()},
    "optim": {name: str(row.make).split(":")[0] for name, row in OPTIMIZERS.items()},
    "optimizer_cpu_offload": {"true": "part_offload"},
    "tp_comm_overlap": {"true": "part_overlap"},
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), {"8bit": "part_quantised_adam"}),
    "recompute_granularity": {"auto": "part_long_auto"},
    "recompute_keep": {"core_attn": "part_long"},
    "transformer_impl": {"transformer_engine": "part_transformer_engine"},
    "activation_offloading": {"true": "part_long"},
    "finetuning_type": {name: row.split(":")[0] for name, row in FINETUNING.items()},
}
# keys of the core that need a part, whatever their value
KEYS = {
    "mlp_chunk_size": "part_long",
    "mtp_num_layers": "part_mtp",
    **dict.fromkeys(("early_stopping_patience", "profile_steps", "report_to"), "part_callbacks"),
    "fp8": "part_transformer_engine",
    "mtp_loss_scaling_factor": "part_mtp",
}
# their values that need none
NEED_NOTHING = {
    "mtp": ["mtp_num_layers:0", "mtp_loss_scaling_factor:0.1"],
    "callbacks": ["report_to:", "report_to:none"],
}


def without(*parts: str) -> list[str]:
    """The parts that cannot be used without these."""
    return [name for name in PARTS if not {*with_needs(name)}.isdisjoint(parts)]


def files_of(*parts: str) -> list[str]:
    return [f"{module}.py" for part in parts for module in PARTS[part].modules.split()]


def case(*parts: str) -> dict:
    return {"removed": files_of(*parts), "parts": without(*parts)}


CASES = {"whole": case(), **{part: case(part) for part in PARTS}, removal.ALL: case(*PARTS)}
# in `make test`: the copy without any part, and every fourth one that lacks one part
SHORT = ("whole", removal.ALL, *list(PARTS)[::4])
NAMES = [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.full]) for n in CASES]


@pytest.fixture(scope="module")
def facts(request, tmp_path_factory):
    """name of a case, and of a report of removal.py -> what was seen"""
    out = tmp_path_factory.mktemp("removal")
    site_packages = str(Path(numpy.__file__).parents[1])
    tiny = ROOT / "configs/tiny"
    words = [f"model_name_or_path={tiny}/model", f"dataset={tiny}/sft.jsonl", "output_dir=out"]
    (out / "full.json").write_text(json.dumps(parse_args(words).to_yaml_dict()))
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-S", "-m", "tests.shared.removal", str(out), site_packages]
    own = [item for item in request.session.items if item.module is request.module]
    asked = {item.callspec.params.get("name") for item in own if hasattr(item, "callspec")}
    cases = {n: CASES[n] for n in CASES if n in {"whole", removal.ALL, *asked}}
    subprocess.run([*command, json.dumps(cases)], cwd=ROOT, env=env, check=True)

    def read(name: str, report: str) -> dict:
        found = json.loads(Path(out, f"{name}.{report}.json").read_text())
        assert "error" not in found, f"{found['error']}\n{found['shown']}"
        return found

    return read


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_a_missing_part_are_refused_by_name_without_torch(facts, name):
    seen = facts(name, "keys")
    assert not seen["torch"] and seen["good"] == seen["full"] == []
    assert [*seen["missing"]] == CASES[name]["parts"]
    for word, refused in seen["refusals"].items():
        key = word.partition("=")[0]
        [part] = [part for part, row in PARTS.items() if word in row.keys.split()]
        [[named, reason, remedy]] = refused
        assert named == key and reason.startswith(f"it needs part {part}, and part_")
        assert reason.endswith(f"not in {Path(reason.split()[-1])}") and "mca_lite" in reason
        assert remedy.startswith("copy ") and remedy.endswith(", or leave the key out")
        assert f"\n  {word} (" not in seen["help"]
    for row, refused in seen["models"].items():
        [part] = [part for part, of in PARTS.items() if row in of.provides.split()]
        files = ", ".join(seen["missing"].get(part, {}).values())  # of those that it needs too
        words = f" need part {part}, and {files} {'are' if ',' in files else 'is'} not in "
        found = [r for key, reason, r in refused if key == "model_type" and words in reason]
        assert len(found) == (part in seen["missing"])
        for remedy in found:
            lacking = " and ".join(seen["missing"][part])
            assert remedy.startswith(f"copy {lacking}'s files from ")
    for key, refused in seen["near"].items():
        [[_, reason, remedy]] = refused
        assert (reason, remedy) == ("no such key", key)
    reasons = [[reason for _, reason, _ in refused] for refused in seen["foreign"].values()]
    if "migration" in seen["missing"]:
        assert reasons == [["no such key"]] * 3
        assert seen["foreign"]["router_aux_loss_coef"][0][2] == "moe_aux_loss_coeff"
    else:
        assert reasons[:2] == [["expected a finite number"], []]
        assert reasons[2][0].startswith("not in this version: ")
    for key in [key for part in set(PARTS) - {*CASES[name]["parts"]} for key in keys_of(part)]:
        assert f"\n  {key} (" in seen["help"]


@pytest.mark.parametrize("name", NAMES)
def test_the_package_without_a_part_plans_and_trains_with_the_same_losses(facts, name):
    seen = facts(name, "run")
    assert seen["home"].endswith(f"/{name}/mca_lite/__init__.py")
    assert (seen["plan"], seen["code"]) == (0, 0), seen["shown"]
    assert len(seen["losses"]) == 2 and seen["losses"] == facts("whole", "run")["losses"]
    assert "model.safetensors" in seen["exported"]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_the_whole_package_goes_on_unless_it_needs_a_missing_part(facts, name):
    seen = facts(name, "run")["resumed"]
    assert seen["changed"] == {}
    words = [word for part in CASES[name]["parts"] for word in PARTS[part].keys.split()]
    assert [*seen["refusals"]] == words
    for word, refused in seen["refusals"].items():
        [part] = [part for part, row in PARTS.items() if word in row.keys.split()]
        key, _, value = word.partition("=")
        saved = f"checkpoint-1 was saved with {key} {value or 7}: it needs part {part}, and part_"
        assert refused.startswith(saved) and refused.endswith("'s files from mca_lite")


def test_the_package_without_any_part_trains_at_tp2(facts):
    whole = facts("whole", "run")["losses"]
    for rank in range(2):
        seen = facts(removal.ALL, f"tp2-{rank}")
        assert seen["code"] == 0, seen["shown"]
        assert seen["losses"] == pytest.approx(whole, rel=1e-5)


# -- the table


def has_keys(part: str) -> bool:
    return PARTS[part].modules.split()[0] == f"part_{part}_keys"


def module_of(name: str) -> str:
    return name.partition(":")[0]


def keys_of(part: str) -> list[str]:
    return [word for word in PARTS[part].keys.split() if "=" not in word]


def as_written(value) -> str:
    return ",".join(value) if isinstance(value, list) else str(value).lower()


@pytest.mark.parametrize("part", PARTS)
def test_the_row_of_a_part_lists_its_files_and_keys(part):
    modules = PARTS[part].modules.split()
    assert set(modules) == {m for m, of in rings.rings_of(PACKAGE).items() if of == ("part", part)}
    items = dataclasses.fields(KEY_GROUPS[part].group) if has_keys(part) else ()
    fields = [item.name for item in items]
    defaults = {item.name: default_of(item) for item in items}
    assert PARTS[part].defaults.split() == [
        f"{key}:{as_written(value)}" for key, value in defaults.items() if value is not None
    ] + NEED_NOTHING.get(part, [])
    values = [
        f"{key}={value}"
        for key, rows in CHOICES.items()
        for value, module in rows.items()
        if module in modules
    ]
    values += [key for key, module in KEYS.items() if module in modules]
    assert sorted(PARTS[part].keys.split()) == sorted(fields + values)
    rows = [row for table in TABLES for row, name in table.items() if module_of(name) in modules]
    assert sorted(PARTS[part].provides.split()) == sorted(rows)


def test_every_row_that_a_part_provides_names_what_is_there_and_is_refused_without_it():
    rows = [row for table in TABLES for row in table]
    assert sorted(rows) == sorted(removal.MODELS)
    for table in TABLES:
        for name in table.values():
            assert function_of(name).__doc__


def test_a_row_of_a_missing_part_is_not_taken_from_another_installation(folder):
    (folder / "part_sinks.py").unlink()
    missing.cache_clear()
    with pytest.raises(
        UserError, match=r"^part_sinks\.py: it needs part sinks, and part_sinks\.py"
    ):
        function_of(CORE_ATTENTIONS["sinks"])


def test_a_record_with_pictures_is_refused_by_the_name_of_their_part(folder):
    (folder / "part_pictures_model.py").unlink()
    missing.cache_clear()
    words = r"a\.jsonl:1: .*they need part pictures, and part_pictures_model\.py is not in"
    for blocks, of_columns in ([{}], []), ([], ["a.png"]):
        with pytest.raises(ValueError, match=words):
            TEXT.take([{"content": "", "media": blocks}], of_columns, False, "a.jsonl:1")


def test_every_group_of_keys_is_the_core_s_or_a_part_s():
    assert set(KEY_GROUPS) == {*CORE_GROUPS, *filter(has_keys, PARTS)}


def test_a_copy_with_other_keys_leaves_the_arguments_as_they_are(monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = parse_args([*removal.GOOD, "stage=dpo", "ref_model=model"])
    copied = arguments.with_keys(ref_model=None, key_of_a_missing_part=1)
    assert copied.to_dict() == arguments.to_dict() | {"ref_model": None}
    assert arguments.ref_model == "model"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which parts are looked for, with the files of all."""
    from mca_lite import parts

    for file in files_of(*PARTS):
        (tmp_path / file).touch()
    monkeypatch.setattr(parts, "__file__", str(tmp_path / "parts.py"))
    missing.cache_clear()
    yield tmp_path
    missing.cache_clear()


def test_half_a_part_is_missing_and_so_is_one_without_the_part_that_it_needs(folder, monkeypatch):
    assert missing() == {}
    (folder / "part_kto.py").unlink()
    monkeypatch.setitem(PARTS, "rm", PARTS["rm"]._replace(needs="kto"))
    monkeypatch.setitem(PARTS, "distill", PARTS["distill"]._replace(needs="rm"))
    missing.cache_clear()
    assert missing() == dict.fromkeys(("kto", "rm", "distill"), {"kto": "part_kto.py"})
    [problem] = absent({"stage": "Distill", "teacher_top_k": None})
    assert problem.key == "stage" and problem.value == "Distill"
    reason = f"it needs part distill, and part_kto.py is not in {folder}"
    assert (problem.reason, problem.suggestion) == (
        reason,
        "copy kto's files from mca_lite, or leave the key out",
    )


def test_a_part_that_is_whole_takes_its_keys_and_loads_alone(folder):
    assert absent({"stage": "kto", "kto_chosen_weight": "2"}) == []
    for file in files_of("kto"):
        (folder / file).unlink()
    missing.cache_clear()
    assert [p.key for p in absent({"kto_chosen_weight": "2", "stage": "rm"})] == [
        "kto_chosen_weight"
    ]
