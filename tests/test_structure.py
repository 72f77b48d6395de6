"""What keeps the package readable: imports point down, only cpu.py changes other libraries, and the folder can be copied."""

import ast
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mca_lite"

# each module may import from those before it
ORDER = """
    constants cpu loss_tokens loss_preference model_routing model_family_rows model_families weights_experts
    args_pipeline args_values args_keys args_rules_preference args_rules_experts args_rules
    args_parser args packed_rows data_build_once data_files data_records data_chat data_encode data_shard data_cache data_batches data_packs data parallel
    model_moe model_latent model_layers model_mtp model_config optim trainer_callbacks log weights_files weights_sources weights_vocabulary weights_convert lora_layers lora_experts lora
    lora_files ckpt_manifest trainer_reference ckpt_folder ckpt_megatron ckpt trainer_signals model backend_megatron backend_torch_moe
    backend_torch log_summary trainer trainer_dpo cli cli_convert __main__ __init__
""".split()
# The products of other people, and ours only in tests
FOREIGN = {"accelerate", "peft", "datasets", "trl", "deepspeed", "llamafactory"}


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {path.stem: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}


def test_every_module_has_its_place_in_the_order():
    assert sorted(modules()) == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_down(name):
    place = ORDER.index(name)
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{name} imports from outside the package"
            for target in [node.module] if node.module else [a.name for a in node.names]:
                assert ORDER.index(target) < place, (
                    f"{name} imports {target}, which stands above it"
                )
        imported = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for full in imported:
            assert full.split(".")[0] not in FOREIGN | {"mca_lite"}, f"{name} imports {full}"


@pytest.mark.parametrize("name", [n for n in ORDER if n != "cpu"])
def test_only_cpu_assigns_to_another_librarys_attributes(name):
    tree = modules()[name]
    borrowed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            borrowed |= {(a.asname or a.name).split(".")[0] for a in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level:
            borrowed |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AugAssign)
            else []
        )
        for target in targets:
            root = target
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(target, ast.Attribute) and isinstance(root, ast.Name):
                assert root.id not in borrowed, (
                    f"{name}:{node.lineno} assigns to {ast.unparse(target)}"
                )
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called == "setattr":
            assert ast.unparse(node.args[0]).split(".")[0] not in borrowed, (
                f"{name}:{node.lineno} sets {ast.unparse(node)}"
            )


@pytest.mark.parametrize("name", ORDER)
def test_files_and_functions_stay_short(name):
    text = (PACKAGE / f"{name}.py").read_text()
    assert text.count("\n") <= 700, f"{name}.py has {text.count(chr(10))} lines"
    for node in ast.walk(modules()[name]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 90, (
                f"{name}.{node.name} has {node.end_lineno - node.lineno + 1} lines"
            )


def test_public_names_of_the_seeds_are_importable():
    import mca_lite

    for name in mca_lite.__all__:
        assert getattr(mca_lite, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        mca_lite.Nothing  # noqa: B018


VENDORED = """
import sys
sys.path.insert(0, {here!r})
from third_party.our_trainer import AutoModel, McaTrainer, TrainingArguments
args = TrainingArguments(output_dir={out!r}, max_steps=2, logging_steps=1, save_strategy="no", learning_rate=1e-2)
model = AutoModel.from_pretrained({model!r}, args)
data = [{{"input_ids": list(range(8)), "labels": list(range(1, 9))}}] * 4
result = McaTrainer(model=model, args=args, train_dataset=data).train()
assert result.global_step == 2
assert not [m for m in sys.modules if m.split(".")[0] == "mca_lite"], "the copy imports the original"
"""


def test_the_folder_works_under_another_name(tmp_path):
    from tests import tiny

    model = tiny.save_model(tmp_path / "model", "llama")
    shutil.copytree(
        PACKAGE,
        tmp_path / "third_party" / "our_trainer",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    script = tmp_path / "use.py"
    script.write_text(VENDORED.format(here=str(tmp_path), out=str(tmp_path / "out"), model=model))
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "step 2/2" in result.stdout


def test_the_readmes_tree_names_every_module():
    readme = (ROOT / "README.md").read_text()
    missing = [name for name in ORDER if f"{name}.py" not in readme]
    assert not missing, f"README.md's tree lacks {missing}"
