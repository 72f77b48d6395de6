"""The commands of configs/EXPORTS.md on a run's export, where their programs are installed:
lm-eval in this environment, llama.cpp's converters in the folder that LLAMA_CPP names.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared.commands import ROOT

PAGE = (ROOT / "configs/EXPORTS.md").read_text()
LLAMA_CPP = os.environ.get("LLAMA_CPP")
# llama.cpp knows tokenizers by a checksum, and not that of the embedded model
KNOWN = """
import runpy, sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RUN = "train.py configs/sft.yaml max_steps=2 eval_strategy=no save_strategy=no"


def run(*words: str, **environment: str) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **offline, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def command_of_page(begin: str, **changes: str) -> list[str]:
    """The words of the page's first line with that beginning, some changed, without a comment."""
    [line, *_] = [line for line in PAGE.splitlines() if line.startswith(begin)]
    return [changes.get(word, word) for word in line.partition(" #")[0].split()]


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    places = [f"output_dir={folder}/out", f"cache_dir={folder}/cache"]
    run(sys.executable, *RUN.split(), *places)
    return folder / "out"


def test_the_export_has_the_files_that_other_programs_open(export):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(export).chat_template
    _, report = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


if importlib.util.find_spec("lm_eval"):

    def test_lm_eval_answers_the_task_of_the_page(export):
        [text] = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)
        tasks, results = export.parent / "tasks", export.parent / "results"
        tasks.mkdir()
        (tasks / "my_dates.yaml").write_text(text.replace("configs/", f"{ROOT}/configs/"))
        changes = {
            "pretrained=out,dtype=bfloat16": f"pretrained={export},dtype=float32",
            "gsm8k": "my_dates",
            "results": str(results),
        }
        words = command_of_page("lm-eval run", **changes)
        words[0] = str(Path(sys.executable).parent / words[0])
        run(*words, "--include_path", str(tasks), "--device", "cpu")
        [found] = [json.loads(path.read_text()) for path in results.rglob("results_*.json")]
        assert found["results"]["my_dates"]["exact_match,none"] == 0.0  # after two steps
        assert found["n-samples"]["my_dates"]["effective"] == 200


if LLAMA_CPP:

    def convert(words: list[str]) -> None:
        script = f"{LLAMA_CPP}/{Path(words[1]).name}"
        begin = f"import sys; sys.path.insert(0, {LLAMA_CPP!r}); sys.argv = sys.argv[1:]\n"
        run(sys.executable, "-c", begin + KNOWN, script, *words[2:])

    def tensors_of(path: Path) -> dict:
        sys.path.insert(0, f"{LLAMA_CPP}/gguf-py")
        from gguf import GGUFReader

        return {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}

    def test_llama_cpp_has_every_tensor_of_an_export(export):
        from safetensors.numpy import load_file

        out = export.parent / "model.gguf"
        places = {"out": str(export), "model.gguf": str(out), "bf16": "f32"}
        convert(command_of_page("python llama.cpp/convert_hf_to_gguf.py", **places))
        ours, theirs = load_file(export / "model.safetensors"), tensors_of(out)
        assert len(theirs) == len(ours)
        same = {
            "token_embd.weight": "model.embed_tokens.weight",
            "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
            "blk.2.ffn_down.weight": "model.layers.2.mlp.down_proj.weight",
            "output_norm.weight": "model.norm.weight",
        }
        for name, our in same.items():
            assert (theirs[name] == ours[our]).all()
