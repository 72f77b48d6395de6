"""Replay a sampler's choice of experts (R3, rollout routing replay), or record the choice here.

A Session's sample may have a column `routes`: integers [n, mixture layers, k], the experts of each
of its input_ids in each layer with experts, or -1 in all k places to choose them here. Weights and
counts of the routers follow the replayed experts. Letters: T tokens, L layers with experts.
"""

import base64
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from . import parallel
from .errors import expect
from .mcore import mpu
from .model_moe import Router, routers_of
from .tables import COLUMNS, Column

# number of a token's row in the table of a call
COLUMNS["route_row"] = Column("token", "int64", -1, given_by=("sample", "collator"))


def read_routes(field: Mapping[str, Any]) -> torch.Tensor:
    """int16 [n, L, k] of a JSON field {"data": base64 of little-endian int16, "shape": [n, L, k]}.
    ValueError for another form."""
    try:
        shape = [int(size) for size in field["shape"]]
        numbers = np.frombuffer(base64.b64decode(field["data"], validate=True), "<i2")
        return torch.from_numpy(numbers.astype(np.int16).reshape(shape))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            'routes: expected {"data": base64 of int16 numbers, "shape": [tokens, layers with '
            f"experts, experts per token]}}, got {field!r:.100} ({error})"
        ) from None


class Routes:
    """The experts of a call's tokens: replayed, or recorded in place. In its context the routers of
    a backend's model follow it, or fill it.

    is_recording: True to record. table, once documents are taken: int16 [T, L, k] on this rank's
    device. ValueError for a model without experts.
    """

    def __init__(self, backend: Any, is_recording: bool = False):
        self._config = config = _config_of(backend)
        self._index = {layer: index for index, layer in enumerate(_layers(config))}
        routers = routers_of(backend.model)
        # without those of multi-token prediction
        self._routers = [one for one in routers if one.layer_number <= config.num_layers]
        self._is_recording = is_recording
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sizes: list[int] = []
        self.table: torch.Tensor

    def take(self, documents: Sequence[dict[str, Any]]) -> None:
        """Move the routes of checked documents to the table, and number its rows in their column
        route_row."""
        self._sizes = [len(document["input_ids"]) for document in documents]
        shape = (sum(self._sizes), len(self._index), self._config.moe_router_topk)
        table = torch.zeros(shape, dtype=torch.int16)
        if not self._is_recording:
            table = torch.cat([document.pop("routes") for document in documents])
        self.table = parallel.to_device(table, parallel.device())
        for document, end in zip(documents, itertools.accumulate(self._sizes), strict=True):
            document["route_row"] = torch.arange(end - len(document["input_ids"]), end)

    def __enter__(self) -> None:
        for router in self._routers:
            router.replay = self._choose

    def __exit__(self, *error: Any) -> None:
        for router in self._routers:
            router.replay = None
        self._rows = {}

    def expect(self, batch: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Set the rows of the next micro-batch, by its column route_row on this rank. Recomputation
        and pipelines run micro-batches in another order: they are known by their padding mask."""
        mask = inputs["padding_mask"]
        # rows that only fill a micro-batch repeat a sample
        rows = batch["route_row"].masked_fill(mask, -1)
        if self._config.sequence_parallel:
            size = mpu.get_tensor_model_parallel_world_size()
            rows = rows.chunk(size, 1)[mpu.get_tensor_model_parallel_rank()]
        # the mask is kept, so that no other one has its address
        self._rows[_address(mask)] = rows.t().flatten(), mask

    def _choose(self, router: Router, mask: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The experts [tokens, k] of a router, in place of its own choice."""
        rows, _ = self._rows[_address(mask)]
        index = self._index[router.layer_number - 1]
        if self._is_recording:
            is_real = rows >= 0
            self.table[rows[is_real], index] = experts[is_real].to(self.table.dtype)
            return experts
        given = self.table[rows.clamp(min=0), index].to(experts.dtype)
        return given.where((rows >= 0)[:, None] & (given >= 0), experts)

    def recorded(self) -> list[torch.Tensor]:
        """The recorded experts of each document, int16 [n, L, k] on the CPU, on every rank.
        Collective over all ranks."""
        # each token of a layer is on one rank
        whole = parallel.sum_over_all(self.table.int()).cpu().to(torch.int16)
        return list(whole.split(self._sizes))


def check(backend: Any, documents: Sequence[dict[str, Any]]) -> None:
    """Make int16 [n, L, k] of the routes of a call's documents; -1 where one has none. ValueError
    for what is no route of the backend's model."""
    config = _config_of(backend)
    for number, document in enumerate(documents):
        shape = (len(document["input_ids"]), len(_layers(config)), config.moe_router_topk)
        given = document.get("routes", torch.full(shape, -1))
        try:
            document["routes"] = _checked(given, shape, config.num_moe_experts)
        except ValueError as error:
            raise ValueError(f"sample {number} of the call: {error}") from None


def _layers(config: Any) -> list[int]:
    """The layers with experts, from 0."""
    return [layer for layer in range(config.num_layers) if config.is_moe_layer(layer)]


def _address(mask: torch.Tensor) -> int:
    return mask.untyped_storage().data_ptr()


def _config_of(backend: Any) -> Any:
    config: Any = getattr(backend, "config", None)
    expect(config is not None, "routes on plain torch: set use_mca: true, or remove the column")
    expect(
        config.num_moe_experts, f"routes: {config.hf_model_type} has no experts: remove the column"
    )
    return config


def _checked(routes: torch.Tensor, shape: tuple[int, int, int], num_experts: int) -> torch.Tensor:
    """Routes of a sample as int16. ValueError for what is no route of this model."""
    expect(
        routes.shape == shape and not routes.is_floating_point(),
        f"routes of a sample: expected integers {list(shape)}, [tokens, layers with experts, "
        f"experts per token], got {routes.dtype} {list(routes.shape)}",
    )
    low, high = map(int, routes.aminmax())
    expect(
        -1 <= low <= high < num_experts,
        f"routes from {low} to {high}: expected experts 0 to {num_experts - 1}, or -1 to choose "
        "them here",
    )
    is_here = routes < 0
    expect(
        bool((is_here.all(-1) == is_here.any(-1)).all()),
        "routes with -1 for some experts of a token in a layer: expected it for all, or for none",
    )
    in_order = routes.sort(-1).values
    is_twice = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
    expect(not is_twice.any(), "routes with an expert twice for a token in a layer")
    return routes.to(torch.int16)
