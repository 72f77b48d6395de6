"""The torch backend's side of a checkpoint: safetensors of weights and optimizer state."""

from pathlib import Path

import torch

from . import parallel
from .ckpt_folder import CheckpointError
from .weights_files import named_tensors, open_safetensors


class TorchSnapshot:
    """Float32 weights and optimizer state by parameter name, for the main rank to write."""

    backend = "torch"

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
        from safetensors.torch import save_file

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
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    is_whole = len(trained) == sum(1 for _ in model.parameters())
    return trained + [
        (name, t)
        for name, t in named_tensors(model)
        if is_whole and not isinstance(t, torch.nn.Parameter)
    ]


def load_torch(folder: Path, model, optimizer=None) -> None:
    """What TorchSnapshot wrote. CheckpointError for other names or shapes."""
    weights = _Tensors(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in _changing(model):
            tensor.copy_(weights.read(name, [tensor.shape]))
    if optimizer is None:
        return
    states = _Tensors(folder / "optimizer.safetensors")
    keys = sorted({key.partition(".")[0] for key in states.names})
    of_one_kernel = [g for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    counted_there = {p for group in of_one_kernel for p in group["params"]}
    for name, parameter in model.named_parameters():
        # the counter too: the fused AdamW keeps it beside the parameter
        kept, shapes = {}, [parameter.shape, torch.Size()]
        if any(f"{key}.{name}" in states.names for key in keys):
            kept = {key: states.read(f"{key}.{name}", shapes) for key in keys}
        for key, value in kept.items():  # other kernels want their counters on the CPU
            if value.dim() or parameter in counted_there:
                kept[key] = value.to(parameter.device)
        optimizer.state[parameter] = kept


class _Tensors:
    """The tensors of a checkpoint's file."""

    def __init__(self, path: Path):
        self.path, self.file = path, open_safetensors(path)
        self.names = set(self.file.keys())

    def read(self, name: str, shapes: list[torch.Size]) -> torch.Tensor:
        """One of them. CheckpointError where there is none, or none of these shapes."""
        if name in self.names and torch.Size(self.file.get_slice(name).get_shape()) in shapes:
            return self.file.get_tensor(name)
        raise CheckpointError(
            f"{self.path}: expected {name} of shape {tuple(shapes[0])}: use another checkpoint"
        )
