"""Files of models in tests: what they hold, how they are changed, and when two of them
are alike.
"""

import contextlib
import io
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EMBEDDING = "model.embed_tokens.weight"
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 60, 0], [27, 18, 28, 18, 28, 45, 9, 0, 4, 52, 35, 36]]
SEED = 7


def load_hf(folder, **keys):
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):
        return AutoModelForCausalLM.from_pretrained(folder, **keys)


def tensors(folder) -> dict[str, torch.Tensor]:
    return {
        k: v
        for file in sorted(Path(folder).glob("*.safetensors"))
        for k, v in load_file(file).items()
    }


def changed(path: str, folder: Path, change) -> str:
    """A copy of a model's folder whose dict of tensors went through `change`."""
    folder.mkdir(parents=True)
    shutil.copy(f"{path}/config.json", folder)
    values = tensors(path)
    change(values)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def assert_same_bytes(got: dict, wanted: dict):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(got[name].view(torch.uint8), value.view(torch.uint8)), name


def make_args(**keys):
    from mca_lite.args import TrainingArguments

    return TrainingArguments(
        output_dir="unused", gradient_accumulation_steps=2, **keys
    )  # virtual stages want two


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def assert_same_tensors(got: dict, wanted: dict, tolerance=1e-5):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
