"""Files of other trainers by `mca-lite migrate`, then planned with a tiny model and data:
python -m tests.tools.migrated FOLDER ...

FOLDER has their examples (axolotl's examples/, ms-swift's examples/train and examples/megatron,
TRL's scripts as .sh). Printed are, by form, the files, those that are read, those with a method
of this package, and of these the ones whose keys fit together; then each other one with its reason.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mca_lite import tool_migrate
from mca_lite.args import parse_args
from mca_lite.errors import ConfigError
from tests.shared import tiny
from tests.shared.small_runs import DATA, save_tokenizer, write_data

METHODS = ("method", "rl", "rlhf_type", "task_type", "tuner_type", "adapter", "cached_dataset")
OURS = {"dataset", "eval_dataset", "model_name_or_path", "teacher_model_name_or_path", "output_dir"}
OURS |= {"adapter_name_or_path", "model_revision", "chat_template", "cache_dir", "default_system"}


def fate(path: Path, folder: Path) -> tuple[str, str]:
    """(form, "fits", or the reason why not) of a file."""
    try:
        form, values, _ = tool_migrate.read(path)
        lines = tool_migrate.migrated(form, values)
    except Exception as error:
        return "none", f"unread: {error}".replace(str(path), "FILE")
    refused = [line.key for line in lines if line.fate == "refused" and line.key in METHODS]
    if refused or form == "Hugging Face":
        return form, f"another method: {', '.join(refused)}"
    keys = {key: value for line in lines for key, value in line.keys.items()}
    kept = {key: value for key, value in keys.items() if key not in OURS}
    data = f"{folder}/{DATA[str(keys.get('stage', 'sft'))]}.jsonl"
    places = {"model_name_or_path": f"{folder}/model", "dataset": data, "output_dir": f"{folder}/o"}
    places |= {"eval_dataset": data} if "eval_dataset" in keys else {}
    places |= (
        {"teacher_model_name_or_path": f"{folder}/model"} if keys.get("stage") == "distill" else {}
    )
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in (kept | places).items())
    (folder / "config.yaml").write_text(text)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parse_args([f"{folder}/config.yaml"], needs_world=False)
    except ConfigError as error:
        return form, "; ".join(f"{one.key}: {one.reason}" for one in error.problems)
    return form, "fits"


def main(folders: list[str]) -> int:
    """Print the counts, and the reasons -> 0."""
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.save_model(folder / "model", "qwen3", vocab_size=100)
        save_tokenizer(folder / "model")
        write_data(folder)
        for root in folders:
            for path in sorted(Path(root).rglob("*")):
                if path.suffix in (".yaml", ".yml", ".sh"):
                    counts[fate(path, folder)] += 1
    for (form, reason), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
        print(f"{form}: {count:4}  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
