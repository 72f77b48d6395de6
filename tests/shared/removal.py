"""The package without parts, in processes that no installation can help.

    python -S -m tests.shared.removal FOLDER SITE_PACKAGES JSON

JSON: {name: [files removed from a copy of the package]}. Each copy is tried in two forks, two
copies at a time: one before torch is imported, which reads configurations, and one after it, which
imports, plans and trains. FOLDER/<name>.json has the facts that they saw. `-S` leaves out the
finder of an editable install, which would find a removed file in the checkout.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKERS = 2
ALL = "all"  # the name of the copy without any part, which trains at tp2
GOOD = ["model_name_or_path=configs/tiny/model", "dataset=configs/tiny/sft.jsonl", "output_dir=out"]
# row that a part provides -> a model type that needs it
MODELS = {
    "sinks": "flint",
    "linear_attention": "qwen3_next",
    "qwen3_next": "qwen3_next",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_5_moe_text": "qwen3_5_moe_text",
    "stacked_experts": "gpt_oss",
    "pictures": "qwen3_vl",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "glm4v": "glm4v",
    "audio": "qwen3_omni_moe_thinker",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_thinker",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
}
FULL = "../full.json"  # the configuration of a run of the whole package, all keys with a value
# keys of other trainers: an alias, one that is ignored, and one that is refused
FOREIGN = ("router_aux_loss_coef", "dataloader_drop_last", "use_dora")
SHORT = (
    "configs/sft.yaml train_from_scratch=true cutoff_len=64 max_steps=2 max_samples=40 "
    "logging_steps=1 warmup_steps=0 global_batch_size=4 per_device_train_batch_size=2 "
    "eval_strategy=no save_strategy=no plot_loss=false html_report=false disable_tqdm=true"
).split()


def make_copy(folder: Path, removed: list[str]) -> None:
    """A copy of the package without files, beside the configurations."""
    shutil.copytree(ROOT / "mca_lite", folder / "mca_lite", ignore=shutil.ignore_patterns("__py*"))
    (folder / "configs").symlink_to(ROOT / "configs")
    for file in removed:
        (folder / "mca_lite" / file).unlink()


def refusals_of(words: list[str]) -> list[list[str]]:
    """[key, reason, remedy] of each Problem of a run with these words."""
    from mca_lite.args import parse_args
    from mca_lite.errors import ConfigError

    try:
        parse_args([*GOOD, *words])
    except ConfigError as error:
        return [[p.key, p.reason, p.suggestion] for p in error.problems]
    return []


def refusals_of_model(kind: str) -> list[list[str]]:
    """refusals_of a run with a model of this type."""
    folder = Path(kind)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return refusals_of([f"model_name_or_path={folder}", "train_from_scratch=true"])


def misspelt(key: str) -> str:
    return key + key[-1]


def read_configurations(parts: list[str]) -> dict:
    """--help, and the refusals of the keys of parts and of near names; all of it without torch."""
    from mca_lite.args import format_help
    from mca_lite.parts import PARTS, missing

    facts: dict = {"help": format_help(), "missing": missing(), "refusals": {}, "near": {}}
    for word in [word for part in parts for word in PARTS[part].keys.split()]:
        key, equals, value = word.partition("=")
        facts["refusals"][word] = refusals_of([f"{key}={value or 'nonsense'}"])
        if not equals:
            facts["near"][word] = refusals_of([f"{misspelt(key)}=1"])
    facts["models"] = {row: refusals_of_model(kind) for row, kind in MODELS.items()}
    facts["full"] = refusals_of([FULL])
    facts["foreign"] = {key: refusals_of([f"{key}=x"]) for key in FOREIGN}
    facts["good"] = refusals_of([])
    facts["torch"] = "torch" in sys.modules
    return facts


def train(out: Path, words: list[str]) -> dict:
    """Train two steps -> the exit code, the losses, the exported files."""
    from mca_lite import __main__

    places = [f"output_dir={out}/run", f"cache_dir={out.parent}/cache"]
    code = __main__.main([*SHORT, *words, *places])
    log = (out / "run/trainer_log.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, log) if "loss" in line]
    return {"code": code, "losses": losses, "exported": [*os.listdir(out / "run")]}


def use(out: Path, parts: list[str]) -> dict:
    """Import every module that is left, plan, and train on one rank."""
    from mca_lite import __main__
    from mca_lite.parts import PARTS

    left = {path.stem for path in Path("mca_lite").glob("*.py")}
    for part in parts:  # those that lack a part they need are still there
        left -= {*PARTS[part].modules.split()}
    for module in sorted(left):
        importlib.import_module(f"mca_lite.{module}")
    plan = __main__.main(["plan", "configs/sft.yaml"])
    facts = {"home": sys.modules["mca_lite"].__file__, "plan": plan, **train(out, [])}
    return {**facts, "resumed": resume(parts)}


def resume(parts: list[str]) -> dict:
    """What a run that goes on finds changed in the settings of the whole package, and how those
    that need a missing part are refused."""
    from mca_lite import ckpt
    from mca_lite.args import parse_args
    from mca_lite.parts import PARTS

    before = json.loads(Path(FULL).read_text())
    ckpt.refuse_missing_parts(before, Path("checkpoint-1"))
    now = parse_args([FULL]).to_yaml_dict()
    facts: dict = {"changed": ckpt.changed_settings(before, now), "refusals": {}}
    for word in [word for part in parts for word in PARTS[part].keys.split()]:
        key, _, value = word.partition("=")
        try:
            ckpt.refuse_missing_parts({**before, key: value or 7}, Path("checkpoint-1"))
        except ckpt.CheckpointError as error:
            facts["refusals"][word] = str(error)
    return facts


def use_at_tp2(out: Path, rank: int, port: int) -> dict:
    """Train as one of two ranks, in the environment that torchrun gives."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return train(out, ["tensor_model_parallel_size=2", "sequence_parallel=true"])


def fork(folder: Path, report: str, work: Callable[..., dict], *args) -> int:
    """Start a process in a copy of the package -> its id. It writes its facts, or why it has none,
    and its output to files of the name `report`."""
    if pid := os.fork():
        return pid
    facts: dict = {}
    shown = io.StringIO()
    try:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            facts = work(*args)
    except BaseException:
        facts["error"] = traceback.format_exc()
    facts["shown"] = shown.getvalue()[-4000:]
    Path(f"{folder}{report}").write_text(json.dumps(facts))
    os._exit(0)


def run_all(starts: list[Callable[[], int]]) -> None:
    """Run forks, WORKERS at a time."""
    running: set[int] = set()
    for start in starts:
        if len(running) == WORKERS:
            running.remove(os.wait()[0])
        running.add(start())
    for _ in running:
        os.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main(out: Path, cases: dict[str, dict]) -> None:
    """cases: {name: {"removed": files, "parts": the parts that are missing then}}."""
    for name, case in cases.items():
        make_copy(out / name, case["removed"])

    def first(name, case):
        return lambda: fork(out / name, ".keys.json", read_configurations, case["parts"])

    def second(name, case):
        return lambda: fork(out / name, ".run.json", use, out / name, case["parts"])

    run_all([first(name, case) for name, case in cases.items()])
    # not megatron-core, which the package patches before its import
    importlib.import_module("torch")
    importlib.import_module("transformers")
    run_all([second(name, case) for name, case in cases.items()])
    port = free_port()
    for rank in range(2):
        folder = out / ALL
        fork(folder, f".tp2-{rank}.json", use_at_tp2, folder / "tp2", rank, port)
    for _ in range(2):
        os.wait()


if __name__ == "__main__":
    sys.path.append(sys.argv[2])
    main(Path(sys.argv[1]), json.loads(sys.argv[3]))
