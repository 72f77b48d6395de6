"""Commands beside training, on the CPU, in one process.

python -m mca_lite convert SRC DST [--verify]
    SRC a Hugging Face folder or hub name: DST becomes a checkpoint that any layout loads (model_name_or_path: DST)
    SRC a checkpoint of any layout:        DST becomes a Hugging Face folder
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from .constants import HF_CONFIG_NAME

# what belongs to a model beside its weights and config.json
_SIDE_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "*.model",
)
_SIDE_FILES += ("generation_config.json", "*.py")


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` names -> exit code."""
    parser = argparse.ArgumentParser(
        prog="mca_lite", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    sub = parser.add_subparsers(dest="command", required=True).add_parser("convert", help="between formats of weights")
    sub.add_argument("src")
    sub.add_argument("dst")
    sub.add_argument("--verify", action="store_true", help="load both and compare their logits in float32")
    sub.add_argument("--max-shard-size", default="5GB")
    options = parser.parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for a GPU
    try:
        print(convert(options.src, Path(options.dst), options.max_shard_size))
        if options.verify:
            print(verify(options.src, options.dst))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def convert(src: str, dst: Path, max_shard_size: str = "5GB") -> str:
    """Write `src` in the other format into `dst` -> a line that says what was done.

    ValueError where src is neither, is damaged, or dst holds something."""
    from .sources import resolve_folder

    if dst.exists() and any(dst.iterdir()):
        raise ValueError(f"{dst} is not empty: name a folder that is not there yet")
    from_checkpoint = (Path(src) / "manifest.json").is_file()
    folder = Path(src) if from_checkpoint else resolve_folder(src)
    if from_checkpoint:
        _refuse_damage(folder)
    models = _load(folder, _dtype_of(folder))
    if from_checkpoint:
        models.save_pretrained(dst, max_shard_size)
        origin = models.config.name_or_path
        _copy_side_files([folder] + ([Path(origin)] if origin and Path(origin).is_dir() else []), dst)
        return f"{src}, a checkpoint, is now {dst} in Hugging Face's format"
    from . import checkpoint, manifest
    from .dist_checkpoint import MegatronSnapshot

    dst.mkdir(parents=True, exist_ok=True)
    facts = {"backend": "megatron", "step": 0, "with_optimizer": False}
    facts["model"] = manifest.model_identity(models.config.hf_config)
    checkpoint.write_weights(dst, MegatronSnapshot(models), facts)
    shutil.copyfile(folder / HF_CONFIG_NAME, dst / HF_CONFIG_NAME)
    _copy_side_files([folder], dst)
    return f"{src} is now {dst}, a checkpoint that any layout loads"


def verify(src: str, dst: str) -> str:
    """Load both, run the same tokens through them in float32 -> a line with the largest difference of a logit.

    ValueError where it is more than rounding."""
    import torch

    one, other = (src, dst) if (Path(src) / "dist").is_dir() else (dst, src)
    models = _load(Path(one), "float32").eval()
    import transformers

    hf = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    vocab_size = models.config.vocab_size
    tokens = torch.randint(0, vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = models.gather_logits(models(tokens)), hf(tokens).logits
    difference, largest = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not difference <= 1e-4 * max(largest, 1.0):
        raise ValueError(
            f"the logits of {src} and {dst} differ by {difference:.1e}, of {largest:.1e}: do not use {dst}"
        )
    return f"verified: the logits differ by at most {difference:.1e}, of {largest:.1e}"


def _load(folder: Path, dtype: str):
    """The model of a folder in either format, whole, on this process."""
    from .arguments import TrainingArguments
    from .models import AutoModel

    args = TrainingArguments(output_dir="unused", bf16=dtype == "bfloat16", fp16=dtype == "float16")
    return AutoModel.from_pretrained(str(folder), args)


def _dtype_of(folder: Path) -> str:
    """The dtype that a folder's config names: float32, bfloat16 or float16."""
    mca = folder / "mca_config.json"
    if mca.is_file():
        values = json.loads(mca.read_text())
        return "bfloat16" if values.get("bf16") else "float16" if values.get("fp16") else "float32"
    values = json.loads((folder / HF_CONFIG_NAME).read_text())
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{folder}: dtype {dtype} in {HF_CONFIG_NAME}, expected float32, bfloat16 or float16")
    return dtype


def _refuse_damage(folder: Path) -> None:
    from . import manifest

    record = manifest.read(folder)
    refused = manifest.refusal(folder, record, "megatron", record["model"])
    damage = manifest.damage(folder, record)
    if refused or damage:
        raise ValueError(refused or f"{folder} is damaged: {'; '.join(damage[:3])}")


def _copy_side_files(sources: list[Path], dst: Path) -> None:
    for folder in sources:
        for path in (path for pattern in _SIDE_FILES for path in folder.glob(pattern)):
            if path.is_file() and not (dst / path.name).exists():
                shutil.copyfile(path, dst / path.name)
