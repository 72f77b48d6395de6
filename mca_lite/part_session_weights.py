"""Whole tensors of a model in training, one after another, for a sampler."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import parallel
from .weights_files import NamedTensors


class ParamMeta(NamedTuple):
    """Name, dtype and shape of one tensor that Weights yields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Weights:
    """An iterable over the whole (unsharded) tensors of a model in training, to load them into a
    sampler such as vLLM. Values are those at the time of iteration.

    All ranks must iterate together, and may do so again. Global rank 0 gets (name, tensor on its
    device); other ranks get nothing. Names are those in Hugging Face files, such as
    "model.layers.3.mlp.down_proj.weight"; a tied head is left out. Experts are stacked where the
    model's files stack them. The torch backend keeps the prefixes of transformers' modules, and
    yields single experts in the families of FAMILIES.
    backend: the Session's. adapters: "merged" into the weights, "without" them, or "only" them and
    the weights in modules_to_save. For "only", names are PEFT's without the prefix
    "base_model.model.".
    vLLM 0.33's WeightSource differs (metadata is a property, iter_full() iterates): see the short
    adapter in configs/EXPORTS.md."""

    backend: Any
    adapters: str

    def metadata(self) -> list[ParamMeta]:
        """List name, dtype and shape of the tensors that iteration yields, in the same order, on
        every rank. Collective; tensors are transferred between ranks only with adapters="only"."""
        if self.adapters == "only":
            forms = dict(self._adapters())
            return parallel.on_main(lambda: _metadata(forms.items()), ValueError)
        return _metadata(self.backend.weight_forms())

    def __iter__(self) -> NamedTensors:
        self.backend.expect_here("weights", "model")
        finetuning = self.backend.finetuning
        if self.adapters == "only":
            tensors = self._adapters()
        else:
            is_merged = self.adapters == "merged"
            tensors = self.backend.weights(
                finetuning.merger(self.backend.model) if is_merged else None
            )
        for name, tensor in tensors:
            yield name, parallel.to_device(tensor, parallel.device())

    def _adapters(self) -> Iterable[tuple[str, torch.Tensor]]:
        self.backend.expect_here("weights", "model")
        found = self.backend.finetuning.trained_tensors(self.backend.model)
        return sorted(found.items()) if parallel.is_main() else ()


def _metadata(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[ParamMeta]:
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
