"""Additions of a user's script train: an objective, a loss on the logits, a preference loss and an
optimizer. The scripts are those of configs/examples.
"""

import ast
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mca_lite
from mca_lite.args import parse_args
from tests.shared import tiny, world
from tests.shared.examples import FOLDER, example
from tests.shared.small_runs import save_tokenizer
from tests.shared.training import read_log

ROOT = Path(__file__).parents[1]
SHORT = (
    "max_steps=2 logging_steps=1 eval_strategy=no global_batch_size=4 per_device_train_batch_size=2"
)
SHORT += " warmup_steps=0 max_samples=20 disable_tqdm=true learning_rate=1e-2"
MODEL = "model_name_or_path=configs/tiny/model train_from_scratch=true"


def train(name: str, words: str, out: str) -> int:
    """A script of configs/examples: it registers, then trains by the command line."""
    os.chdir(ROOT)
    places = [f"output_dir={out}/run", f"cache_dir={out}/cache"]
    return example(name).main([*MODEL.split(), *SHORT.split(), *words.split(), *places])


BACKENDS = pytest.mark.parametrize("backend", ["use_mca=true", "use_mca=false"])


def logged(name: str, words: str, out, ranks: int = 1) -> list[dict]:
    assert world.run(train, ranks, name, words, str(out)) == [0] * ranks
    return read_log(out / "run")


@BACKENDS
def test_a_loss_from_outside_trains(tmp_path, backend):
    words = f"configs/dpo.yaml pref_loss=slic pref_beta=0.5 ref_model=null {backend}"
    first, second = logged("preference_loss", words, tmp_path)
    # a model that is drawn at random gives both answers about the same: the hinge is near beta
    assert first["loss"] == pytest.approx(0.5, abs=0.3) and first["loss"] > 0
    margin = first["rewards/chosen"] - first["rewards/rejected"]
    assert first["rewards/margins"] == pytest.approx(margin, abs=1e-6)
    assert second["grad_norm"] > 0


def own_loop(words: str, out: str) -> list:
    os.chdir(ROOT)
    places = [f"output_dir={out}/run", f"cache_dir={out}/cache"]
    return example("own_loop").loop([*MODEL.split(), *SHORT.split(), *words.split(), *places])


@BACKENDS
def test_a_loop_of_one_s_own_has_the_losses_of_a_trainer(tmp_path, backend):
    words = f"configs/sft.yaml {backend} save_strategy=no lr_scheduler_type=constant"
    words += " disable_shuffling=true"
    theirs = logged("optimizer", words, tmp_path / "trainer")
    [ours] = world.run(own_loop, 1, words, str(tmp_path / "loop"))
    wanted = [(line["loss"], line["grad_norm"]) for line in theirs]
    assert ours == [pytest.approx(pair, rel=1e-5) for pair in wanted]


def run_the_page(folder: str, **keys) -> list[str]:
    """What the code on LOOP.md prints, one block after the other, with a model in `folder`."""
    os.chdir(folder)
    page = (ROOT / "configs/LOOP.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.+?)```", page, re.DOTALL))
    code = code.replace("Qwen/Qwen3-0.6B", f"{folder}/model")
    code = code.replace("One two three four.", "w1 w2 w3 w4").replace("Five six", "w5 w6")
    assert code.count("bf16=True") == 2
    code = code.replace("bf16=True", ", ".join(f"{key}={value}" for key, value in keys.items()))
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, "LOOP.md", "exec"), {})
    return shown.getvalue().splitlines()


def test_the_code_of_the_page_on_loops_runs_in_a_layout(tmp_path):
    tiny.save_model(tmp_path / "model", "qwen3", vocab_size=100)
    save_tokenizer(tmp_path / "model")
    keys = dict(disable_tqdm=True, save_strategy="'no'", report_to=[])
    [alone] = world.run(run_the_page, 1, str(tmp_path), **keys)
    both = world.run(run_the_page, 2, str(tmp_path), tensor_model_parallel_size=2, **keys)
    steps = [[line for line in lines if re.match(r"[\d.]+ ", line)] for lines in (alone, both[0])]
    numbers = [[float(word) for line in of for word in line.split()] for of in steps]
    assert len(numbers[0]) == 13  # three steps of three numbers, two of two
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-4)


@BACKENDS
def test_an_optimizer_from_outside_trains_and_goes_on_from_a_checkpoint(tmp_path, backend):
    words = f"configs/sft.yaml optim=radam {backend} lr_scheduler_type=constant"
    whole = logged("optimizer", f"{words} max_steps=3 save_strategy=no", tmp_path / "whole")
    logged("optimizer", f"{words} save_strategy=steps save_steps=2", tmp_path / "parts")
    goes_on = f"{words} save_strategy=no max_steps=3 resume_from_checkpoint=auto"
    parts = logged("optimizer", goes_on, tmp_path / "parts")
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]
    adam = f"configs/sft.yaml {backend} save_strategy=no lr_scheduler_type=constant"
    adam = logged("optimizer", adam, tmp_path / "adam")
    assert adam[0]["loss"] == whole[0]["loss"] and adam[1]["loss"] != whole[1]["loss"]


def assert_same(ours: list[dict], theirs: list[dict], *names: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", *names):
            assert a[name] == pytest.approx(b[name], rel=1e-5)


def test_an_optimizer_from_outside_is_the_same_on_both_backends_and_not_distributed(tmp_path):
    words = "configs/sft.yaml optim=radam weight_decay=0.1 save_strategy=no"
    tp2 = f"{words} tensor_model_parallel_size=2"
    ours = logged("optimizer", tp2, tmp_path / "tp2", ranks=2)
    assert_same(ours, logged("optimizer", f"{words} use_mca=false", tmp_path / "torch"))
    refused = f"{words} use_distributed_optimizer=true"
    assert world.run(train, 1, "optimizer", refused, str(tmp_path / "no")) == [2]


def test_an_objective_from_outside_trains_the_same_on_both_backends(tmp_path):
    best = "metric_for_best_model=certain eval_strategy=steps eval_steps=2"
    words = f"configs/sft.yaml stage=focal save_strategy=no {best}"
    tp2 = f"{words} tensor_model_parallel_size=2"
    ours = logged("objective", tp2, tmp_path / "tp2", ranks=2)
    theirs = logged("objective", f"{words} use_mca=false", tmp_path / "torch")
    assert "eval_certain" in ours[-1] and "eval_certain" in theirs[-1]
    assert_same(ours[:2], theirs[:2], "certain")
    plain = "configs/sft.yaml save_strategy=no use_mca=false"
    plain = logged("objective", plain, tmp_path / "sft")
    # a model that is drawn at random is certain of nothing: (1 - p)^2 of 1 / 512 tokens is 0.996
    assert theirs[0]["loss"] < plain[0]["loss"]
    assert theirs[0]["loss"] == pytest.approx(plain[0]["loss"], rel=0.02)


@pytest.mark.parametrize("backend", ["tensor_model_parallel_size=2", "use_mca=false"])
def test_a_loss_on_the_logits_from_outside_trains_and_is_logged(tmp_path, backend):
    words = f"configs/sft.yaml stage=sft_z save_strategy=no {backend}"
    first, second = logged("z_loss", words, tmp_path, ranks=2)
    # of logits near 0 the sum is near the size of the vocabulary
    assert first["log_z_squared"] == pytest.approx(math.log(512) ** 2, rel=0.1)
    assert second["grad_norm"] > 0


@pytest.mark.parametrize("backend", ["tensor_model_parallel_size=2", "use_mca=false"])
def test_a_key_of_a_stage_from_outside_arrives_and_is_fixed_on_resume(tmp_path, backend):
    words = f"configs/sft.yaml stage=poly poly_epsilon=2 save_strategy=steps save_steps=1 {backend}"
    ranks = 1 if "use_mca" in backend else 2
    first = logged("own_keys", words, tmp_path / "poly", ranks)[0]
    plain = logged("own_keys", f"{words} stage=sft poly_epsilon=1", tmp_path / "sft", ranks)[0]
    # a model that is drawn at random gives each of 512 tokens about the same probability
    assert first["loss"] - plain["loss"] == pytest.approx(2 * (1 - 1 / 512), abs=0.01)
    words += " resume_from_checkpoint=auto"
    for value, code in (("2", 0), ("3", 2)):
        again = f"{words} poly_epsilon={value}"
        assert world.run(train, ranks, "own_keys", again, str(tmp_path / "poly")) == [code] * ranks


@pytest.fixture
def poly():
    """The rows of own_keys.py, in this process."""
    from mca_lite.tables import KEY_GROUPS, OBJECTIVES

    yield example("own_keys").main
    KEY_GROUPS.pop("poly", None)
    OBJECTIVES.pop("poly", None)


def test_keys_from_outside_have_help_limits_rules_and_near_names(poly, capsys):
    with pytest.raises(SystemExit):
        poly(["--help"])
    assert "\n  poly_epsilon (1.0): stage poly: weight" in capsys.readouterr().out
    words = [*MODEL.split(), "dataset=configs/tiny/sft.jsonl", "output_dir=out", "stage=poly"]
    assert parse_args([*words, "poly_epsilon=2"]).poly_epsilon == 2.0
    for wrong, reason in {
        "poly_epsilon=-2": "it must be at least -1",
        "poly_epsilom=1": "try: poly_epsilon",
        "poly_epsilon=0": "it is stage sft then",
        "poly_epsilon=2 stage=sft": "no effect, since stage is sft",
    }.items():
        with pytest.raises(ValueError, match=reason):
            parse_args([*words, *wrong.split()])


def test_keys_that_are_taken_and_what_is_no_group_are_refused():
    from mca_lite import ArgumentGroup, arg, register_keys

    @dataclass(kw_only=True)
    class Taken(ArgumentGroup):
        seed: int = arg(1, "of a script")

    with pytest.raises(ValueError, match="key seed is registered already"):
        register_keys("mine", Taken)
    with pytest.raises(ValueError, match="keys kto is registered already"):
        register_keys("kto", ArgumentGroup)
    with pytest.raises(TypeError, match="keys mine: expected a subclass of ArgumentGroup"):
        register_keys("mine", dict)


def test_a_part_has_the_first_choice_of_names():
    code = "import mca_lite; mca_lite.register_objective('kto', records='text')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ValueError: stage kto is registered already" in ended.stderr.splitlines()[-1]


def distil_itself(words: str, out: str) -> int:
    """The example with a teacher that the student starts from."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    module = example("distillation")
    module.TEACHER = f"{out}/model"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(ROOT / "configs/tiny/model")
    AutoModelForCausalLM.from_config(config).save_pretrained(module.TEACHER)
    AutoTokenizer.from_pretrained(ROOT / "configs/tiny/model").save_pretrained(module.TEACHER)
    os.chdir(ROOT)
    keys = f"model_name_or_path={module.TEACHER} output_dir={out}/run cache_dir={out}/cache"
    return module.main([*words.split(), *SHORT.split(), "train_from_scratch=false", *keys.split()])


def test_a_loss_that_compares_with_a_teacher_trains(tmp_path):
    words = "configs/sft.yaml stage=kd save_strategy=no"
    assert world.run(distil_itself, 1, words, str(tmp_path)) == [0]
    first, _ = read_log(tmp_path / "run")
    assert abs(first["loss"]) < 1e-6 and first["grad_norm"] < 1e-4


WEIGHTED = [{"use_mca": "false"}, {"tp": 2, "pp": 2}, {"cp": 2, "packing": "true"}, {"dp": 2}]
WEIGHTED += [{"dp": 2, "streaming": "true"}, {"dp": 2, "packing": "true", "use_mca": "false"}]
NAMES_OF = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
NAMES_OF |= {"cp": "context_parallel_size"}


def first_token_weights(labels: torch.Tensor) -> torch.Tensor:
    """4 for the first token of each answer, 1 for the others."""
    trained = (labels != -100).tolist()
    begins = [now and not before for before, now in zip([False, *trained], trained, strict=False)]
    return 1 + 3 * torch.tensor(begins).float()


def weighted_losses(folder, weights: dict[str, float], of_tokens=None) -> list[dict]:
    """In plain torch, of two steps with SGD over all samples: sum(weight * cross entropy) / number
    of tokens. weights: of the files, for records without a weight; of_tokens: labels -> weights, in
    place of them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mca_lite import DataArguments, load_datasets

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    lines = []
    for _ in range(2):
        total = tokens = 0
        for file, weight in weights.items():
            keys = dict(dataset=[file], cutoff_len=64, cache_dir=str(folder / "cache"))
            samples = load_datasets(DataArguments(**keys), "sft", tokenizer).train
            records = map(json.loads, Path(file).read_text().splitlines())
            for [document], record in zip(samples, records, strict=True):
                ids, labels = (torch.as_tensor(document[k]) for k in ("input_ids", "labels"))
                logits = model(ids[None]).logits[0]
                cross_entropy = F.cross_entropy(logits, labels, reduction="none")
                weight_of_tokens = record.get("weight", weight)
                if of_tokens:
                    weight_of_tokens = of_tokens(labels)
                total = total + (weight_of_tokens * cross_entropy).sum()
                tokens += int((labels != -100).sum())
        loss = total / tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        lines.append({"loss": loss.item(), "grad_norm": float(norm)})
    return lines


def train_weighted(words: str, folder: str, name: str = "dataset_weights") -> int:
    os.chdir(ROOT)
    places = [f"output_dir={folder}/run", f"cache_dir={folder}/cache"]
    return example(name).main([*words.split(), *places])


def train_weighted_pairs(words: str, folder: str, weight: float) -> int:
    """DPO whose token losses are weighed by the hook of a trainer that knows no pairs."""
    from mca_lite import DPOTrainer, cli, register_column, register_objective
    from mca_lite.tables import OBJECTIVES

    class WeightedPairs(DPOTrainer, example("dataset_weights").WeightedTrainer):
        pass

    os.chdir(ROOT)
    dpo = OBJECTIVES["dpo"]
    register_column("weight", of_dataset=lambda spec, keys: weight * keys.cutoff_len / 128)
    fields = dict(trainer=WeightedPairs, keys=dpo.keys)
    register_objective("weighted_pairs", records="pairs", **fields)
    places = [f"output_dir={folder}/run", f"cache_dir={folder}/cache"]
    return cli.main([*MODEL.split(), *SHORT.split(), *words.split(), *places])


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    """(folder with dataset_info.json, its entries with weights, the lines of plain torch)"""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("weighted")
    torch.manual_seed(1)
    source = ROOT / "configs/tiny/model"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "model")
    lines = (ROOT / "configs/tiny/sft.jsonl").read_text().splitlines()
    lines[6] = json.dumps({**json.loads(lines[6]), "weight": 0.5})  # a weight of a record
    weights = {}
    for name, weight, part in (("a", 0.25, lines[:5]), ("b", 3.0, lines[5:8])):
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(part))
        weights[str(file)] = weight
    info = {
        Path(file).stem: {"file_name": file, "values": {"weight": weight}}
        for file, weight in weights.items()
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    of_tokens = weighted_losses(folder, weights, first_token_weights)
    return folder, info, weighted_losses(folder, weights), of_tokens


@pytest.mark.parametrize("layout", WEIGHTED, ids=lambda layout: "-".join(map(str, layout)))
def test_a_weight_per_dataset_from_outside_equals_plain_torch(weighted, tmp_path, layout):
    check_weighted(weighted, tmp_path, layout, "dataset_weights", "sft_weighted", weighted[2])


@pytest.mark.parametrize("layout", WEIGHTED[:3], ids=lambda layout: "-".join(map(str, layout)))
def test_a_weight_per_token_from_outside_equals_plain_torch(weighted, tmp_path, layout):
    check_weighted(weighted, tmp_path, layout, "token_weights", "sft_first_token", weighted[3])


def check_weighted(weighted, tmp_path, layout, name, stage, wanted) -> None:
    folder, info, *_ = weighted
    dp = layout.get("dp", 1)
    sizes = {key: layout[key] for key in NAMES_OF.keys() & layout.keys()}
    keys = {NAMES_OF.get(key, key): value for key, value in layout.items() if key != "dp"}
    keys |= dict(model_name_or_path=folder / "model", stage=stage, global_batch_size=8)
    keys |= dict(train_from_scratch="false", per_device_train_batch_size=2)
    keys |= dict(dataset_dir=folder, dataset=",".join(info))
    keys |= dict(cutoff_len=64, max_steps=2, logging_steps=1, warmup_steps=0, learning_rate=1e-2)
    keys |= dict(lr_scheduler_type="constant", weight_decay=0, max_grad_norm=0, optim="sgd")
    keys |= dict(eval_strategy="no", save_strategy="no", disable_tqdm="true")
    words = "configs/sft.yaml eval_dataset=null " + " ".join(f"{k}={v}" for k, v in keys.items())
    ranks = dp * math.prod(sizes.values())
    codes = world.run(train_weighted, ranks, words, str(tmp_path), name)
    assert codes == [0] * ranks
    for got, line in zip(read_log(tmp_path / "run"), wanted, strict=True):
        for name, value in line.items():
            assert got[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("backend", ["tensor_model_parallel_size=2", "use_mca=false"])
def test_a_column_s_hook_reaches_the_loss_of_pairs(tmp_path, backend):
    words = f"configs/orpo.yaml stage=weighted_pairs save_strategy=no {backend}"
    lines = []
    for weight in (1.0, 0.5):
        folder = tmp_path / str(weight)
        assert world.run(train_weighted_pairs, 2, words, str(folder), weight) == [0, 0]
        lines.append(read_log(folder / "run")[0])
    for name in ("logps/chosen", "logps/rejected"):
        assert lines[1][name] == pytest.approx(0.5 * lines[0][name], rel=1e-5)


def test_the_data_of_a_run_is_looked_at_without_the_run(tmp_path, capsys):
    keys = ["dataset=configs/tiny/sft.jsonl", "cutoff_len=128", "val_size=0.1", "max_samples=50"]
    main = example("datasets").main
    assert main(["configs/tiny/model", *keys, f"cache_dir={tmp_path}"]) == 0
    *_, first, _, counts = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+ tokens, of which are trained: '.+<\|im_end\|>'", first)
    assert counts == "45 samples to train on, 5 to evaluate on"


def test_every_example_is_short_and_run_by_a_test_and_named_on_the_page():
    page = (ROOT / "configs/README.md").read_text()
    names = ("test_registries", "test_session_examples", "test_verl_engine")
    own = "".join((ROOT / f"tests/{name}.py").read_text() for name in names)
    longest = {"grpo": 100, "opd_loop": 100, "tinker_loop": 100, "verl_engine": 200}
    for path in sorted(FOLDER.glob("*.py")):
        assert len(path.read_text().splitlines()) < longest.get(path.stem, 60), path
        assert f'"{path.stem}"' in own, path
        assert f"(examples/{path.name})" in page, path


def test_the_commands_of_examples_have_folders_of_their_own():
    """None overwrites the run of the configuration that it begins with, or leaves a cache where
    nobody looks for it."""
    taken = {"output/sft", "output/dpo"}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem == "verl_engine":  # verl imports it: it has no command
            continue
        words = (example(path.stem).__doc__ or "").replace("\\\n", " ").split(path.name)[1].split()
        keys = dict(word.split("=", 1) for word in words if "=" in word)
        if path.stem == "datasets":
            assert keys["cache_dir"] == "output/cache"
            continue
        assert keys["output_dir"].startswith("output/") and keys["output_dir"] not in taken
        taken.add(keys["output_dir"])
        file = next(word for word in words if word.endswith(".yaml"))
        assert "cache_dir: output/cache" in (ROOT / file).read_text()


def test_names_that_are_taken_and_records_that_there_are_not_are_refused(monkeypatch):
    from mca_lite import register_loss, register_objective, register_optimizer, tables

    with pytest.raises(ValueError, match="sigmoid is registered already"):
        register_loss("sigmoid", print, has_reference=False)
    with pytest.raises(ValueError, match="adamw_torch is registered already"):
        register_optimizer("adamw_torch", print, states=())
    monkeypatch.setitem(tables.OPTIMIZER_ALIASES, "ours", "muon")
    with pytest.raises(ValueError, match="ours is registered already"):
        register_optimizer("mine", print, states=(), aliases=("Ours",))
    with pytest.raises(ValueError, match="expected one of text, conversations, pairs"):
        register_objective("kto", records="scores")
    with pytest.raises(TypeError, match="pref_loss five: .* got 5"):
        register_loss("five", 5, has_reference=False)
    with pytest.raises(TypeError, match="optim five: .* got 5"):
        register_optimizer("five", 5, states=())
    with pytest.raises(TypeError, match="stage five: .* got 5"):
        register_objective("five", records="text", trainer=5)


def test_the_metrics_of_a_stage_are_those_of_its_trainer(monkeypatch):
    from mca_lite import DPOTrainer, register_objective, tables
    from mca_lite.trainer_events import Numbers

    monkeypatch.setattr(tables, "OBJECTIVES", dict(tables.OBJECTIVES))
    trainer = example("objective").FocalTrainer
    row = register_objective("focal", records="conversations", trainer=trainer)
    assert row.metrics == ("loss", "certain")
    assert tables.OBJECTIVES["dpo"].metrics == tuple(DPOTrainer.metrics_keys)
    with pytest.raises(TypeError, match="stage other: metrics: .*metrics_keys"):
        fields = dict(records="conversations", trainer=trainer, metrics=("loss", "sure"))
        register_objective("other", **fields)
    pair = torch.ones(2)
    for given in (dict(loss=pair, sure=pair), dict(sure=pair), dict(loss=pair.sum())):
        with pytest.raises(ValueError, match="gave the metrics .*: expected loss: .*_keys.*count"):
            Numbers.zeros(["loss"]).add_metrics([given])


# -- the names of rows are compared in no file but their tables

TABLES = {"tables", "kernels"}
NAMES = {"pt", "sft", "dpo", "sigmoid", "orpo", "adam", "adamw_torch", "sgd"}
# the router's score function of a model is called so too
OTHER_MEANINGS = {("model_config", "sigmoid"), ("model_moe", "sigmoid")}


def compared(tree: ast.Module) -> set[str]:
    """The texts that a module compares something with, by ==, != or in."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in [node.left, *node.comparators]:
                found |= {n.value for n in ast.walk(side) if isinstance(n, ast.Constant)}
    return found


def test_no_file_but_the_tables_compares_with_the_name_of_a_row():
    for path in sorted(Path(mca_lite.__file__).parent.glob("*.py")):
        if path.stem in TABLES:
            continue
        for name in compared(ast.parse(path.read_text())) & NAMES:
            assert (path.stem, name) in OTHER_MEANINGS, f"{path.name} compares with {name!r}"
