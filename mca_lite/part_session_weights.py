"""Whole tensors of a model in training, one after another, for a sampler."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import parallel


class ParamMeta(NamedTuple):
    """Name, dtype and shape of a tensor in Weights."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Weights:
    """Iterates over a model's whole tensors, with their values at that moment, like vLLM's
    WeightSource.

    All ranks iterate together, any number of times: global rank 0 gets (name, tensor on its
    device), other ranks nothing. Names are those in the model's files, with single experts and
    without a tied head. Adapters alone have PEFT's names without base_model.model.
    """

    backend: Any
    adapters: str

    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of each tensor, in order, on every rank. Collective; it moves no
        tensors except those of adapters.
        """
        if self.adapters == "only":
            forms = dict(self._adapters())
            return parallel.on_main(lambda: _metadata(forms.items()), ValueError)
        return _metadata(self.backend.weight_forms())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
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
