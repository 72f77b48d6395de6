"""The torch backend's side of a checkpoint: safetensors of weights and optimizer state."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import parallel
from .ckpt_folder import CheckpointError
from .weights_files import named_tensors, open_safetensors


class TorchSnapshot:
    """Float32 weights and optimizer state by parameter name, for the main rank to write."""

    def __init__(self, model, optimizer=None, copy: bool = False):
        self._files: dict[str, dict[str, torch.Tensor]] = {}
        if not parallel.is_main():
            return
        names = {p: name for name, p in _changing(model)}
        self._files["model.safetensors"] = {name: p.detach() for p, name in names.items()}
        if optimizer is not None:
            self._files["optimizer.safetensors"] = {
                f"{key}.{names[p]}": torch.as_tensor(value).detach()
                for p, state in optimizer.state.items()
                for key, value in state.items()
                if isinstance(value, (torch.Tensor, int, float))
            }
        if copy:
            self._files = {
                f: {k: v.to("cpu", copy=True) for k, v in d.items()} for f, d in self._files.items()
            }

    def write(self, folder: Path) -> tuple[list[str], None]:
        """Write this rank's files, unflushed -> (files, None). No collectives."""
        for name, tensors in self._files.items():
            save_file({key: value.cpu() for key, value in tensors.items()}, folder / name)
        names, self._files = list(self._files), {}
        return names, None

    def finish(self, folder: Path, results: list) -> list[str]:
        """Nothing is left to write."""
        return []


def _changing(model) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of what training changes: parameters, and the buffers of a model that is
    trained whole."""
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    return [(name, t) for name, t in named_tensors(model) if is_whole or t.requires_grad]


def load_torch(folder: Path, model, optimizer=None) -> None:
    """What TorchSnapshot wrote. CheckpointError for other names or shapes."""
    read, _ = _reader(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in _changing(model):
            tensor.copy_(read(name, tensor.shape))
    if optimizer is None:
        return
    read, names = _reader(folder / "optimizer.safetensors")
    keys = sorted({key.partition(".")[0] for key in names})
    of_one_kernel = [g for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    counted_there = {p for group in of_one_kernel for p in group["params"]}
    for name, parameter in model.named_parameters():
        # the counter too: the fused AdamW keeps it beside the parameter
        kept = {}
        if any(f"{key}.{name}" in names for key in keys):
            shapes = parameter.shape, torch.Size()
            kept = {key: read(f"{key}.{name}", *shapes) for key in keys}
        for key, value in kept.items():  # other kernels want their counters on the CPU
            if value.dim() or parameter in counted_there:
                kept[key] = value.to(parameter.device)
        optimizer.state[parameter] = kept


def _reader(path: Path) -> tuple[Callable[..., torch.Tensor], set[str]]:
    """(what reads a tensor of a checkpoint's file by its name and possible shapes, the names)."""
    file = open_safetensors(path)
    names = set(file.keys())

    def read(name: str, *shapes: torch.Size) -> torch.Tensor:
        if name in names and torch.Size(file.get_slice(name).get_shape()) in shapes:
            return file.get_tensor(name)
        raise CheckpointError(
            f"{path}: expected {name} of shape {tuple(shapes[0])}: use another checkpoint"
        )

    return read, names
