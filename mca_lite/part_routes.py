"""Replay a sampler's choice of experts (R3, rollout routing replay), or record the choice made
here.

A sample of a Session or of stage policy may have a column `routes`: integers [n, layers with
experts, k], the experts of each token in each layer with experts, or -1 in all k places to choose
them here. Routing weights and counts follow the replayed experts. Letters: n tokens in a sample, T
tokens in a call, L layers with experts, k experts per token, [b, s] a micro-batch on this rank.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import parallel
from .errors import expect
from .mcore import mpu
from .model_moe import Router, address_of, routers_of
from .tables import COLUMNS, Column

# row index of a token in the table of a recording
COLUMNS["route_row"] = Column("token", "int64", -1, given_by=("sample", "collator"))


class Routes:
    """Context in which the MoE routers of a model use given experts (replaying), or record the
    experts that they choose.

    Replaying reads the column "routes" (experts of each token) of the micro-batches passed to
    expect(). is_recording: True to record. The record is `table`, int16 [T, L, k] for T tokens, L
    layers with experts and k experts per token, on this rank's device; take() makes it. ValueError
    for a model without experts, or on plain torch."""

    def __init__(self, backend: Any, is_recording: bool = False):
        self._config = config = _config_of(backend)
        self._index = {layer: index for index, layer in enumerate(_layers(config))}
        routers = routers_of(backend.model)
        # routers of layers for multi-token prediction have no rows in `routes`
        self._routers = [one for one in routers if one.layer_number <= config.num_layers]
        self._is_recording = is_recording
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sizes: list[int] = []
        self.table: torch.Tensor

    def take(self, documents: Sequence[dict[str, Any]]) -> None:
        """Prepare to record the experts of a call's documents; do nothing if not recording. Makes
        the empty table, and gives each document a column route_row, in place: each token's row in
        the table."""
        if not self._is_recording:
            return
        self._sizes = [len(document["input_ids"]) for document in documents]
        shape = (sum(self._sizes), len(self._index), self._config.moe_router_topk)
        self.table = torch.zeros(shape, dtype=torch.int16, device=parallel.device())
        for document, end in zip(documents, itertools.accumulate(self._sizes), strict=True):
            document["route_row"] = torch.arange(end - len(document["input_ids"]), end)

    def __enter__(self) -> None:
        for router in self._routers:
            router.replay = self._choose
        self._rows = {}

    def __exit__(self, *error: Any) -> None:
        for router in self._routers:
            router.replay = None
        self._rows = {}

    def expect(self, batch: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Register a micro-batch on this rank before its forward pass, so that the routers find the
        experts to replay for its tokens, or the rows of the table in which to record them.

        batch: the arranged micro-batch (from pack or split). inputs: the model's inputs for it.
        Recomputation and pipelines run micro-batches in another order, so a router recognises a
        micro-batch by the memory address of its padding mask."""
        mask = inputs["padding_mask"]
        rows = batch.get("route_row" if self._is_recording else "routes")
        if rows is None:  # these samples have no routes, and their routers choose
            return
        # filler rows repeat a sample: hide them
        rows = rows.masked_fill(mask.view(*mask.shape, *[1] * (rows.dim() - 2)), -1)
        if self._config.sequence_parallel:
            size = mpu.get_tensor_model_parallel_world_size()
            rows = rows.chunk(size, 1)[mpu.get_tensor_model_parallel_rank()]
        # keep the mask, so that no other mask gets its address
        self._rows[address_of(mask)] = rows.transpose(0, 1).flatten(0, 1), mask

    def _choose(self, router: Router, mask: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Choose the experts [tokens, k] that a router uses; the router calls this. experts: its
        own choice. mask: the micro-batch's padding mask, by which expect() registered it.

        When replaying, the result is the experts in the column "routes", or `experts` for tokens
        without routes. When recording, it is `experts`, after storing them in the table."""
        if address_of(mask) not in self._rows:  # a micro-batch without the column
            return experts
        rows, _ = self._rows[address_of(mask)]
        index = self._index[router.layer_number - 1]
        if self._is_recording:
            is_real = rows >= 0
            self.table[rows[is_real], index] = experts[is_real].to(self.table.dtype)
            return experts
        given = rows[:, index].to(experts.dtype)
        return given.where(given >= 0, experts)

    def recorded(self) -> list[torch.Tensor]:
        """The recorded experts of each document passed to take(): int16 [n, L, k] for its n tokens,
        L layers with experts and k experts per token, on the CPU of every rank. Collective over all
        ranks."""
        # each token of a layer is on one rank
        whole = parallel.sum_over_all(self.table.int()).cpu().to(torch.int16)
        return list(whole.split(self._sizes))


def check(backend: Any, documents: Sequence[dict[str, Any]]) -> None:
    """Check the column "routes" (the experts to use for each token) of the documents of a Session
    call. A document without it gets one filled with -1 (the router chooses), in place. backend:
    that of the model. ValueError for routes that do not fit the model."""
    config = _config_of(backend)
    for number, document in enumerate(documents):
        shape = (len(document["input_ids"]), len(_layers(config)), config.moe_router_topk)
        routes = document.setdefault("routes", torch.full(shape, -1, dtype=torch.int16))
        try:
            check_routes(backend, routes)
        except ValueError as error:
            raise ValueError(f"sample {number} of the call: {error}") from None


def check_routes(backend: Any, routes: torch.Tensor) -> None:
    """Raise ValueError for routes that do not fit the model. routes: [..., L, k], the k experts to
    use for each token in each of the L MoE layers, or -1. Refused are another number of MoE layers
    or of experts per token, an expert that does not exist or is there twice, and -1 for only some
    of a token's experts in a layer. backend: that of the model."""
    config = _config_of(backend)
    wanted = [len(_layers(config)), config.moe_router_topk]
    expect(
        [*routes.shape[-2:]] == wanted,
        f"routes of a sample: expected integers [tokens, {wanted[0]} layers with experts, "
        f"{wanted[1]} experts per token], got {[*routes.shape[-3:]]}",
    )
    low, high = map(int, routes.aminmax())
    expect(
        -1 <= low <= high < config.num_moe_experts,
        f"routes from {low} to {high}: expected experts 0 to {config.num_moe_experts - 1}, or -1 "
        "to choose them here",
    )
    _check_choices(routes)


def _layers(config: Any) -> list[int]:
    """Indices, from 0, of the model's MoE layers."""
    return [layer for layer in range(config.num_layers) if config.is_moe_layer(layer)]


def _config_of(backend: Any) -> Any:
    """The config of the model that `backend` trains. ValueError on plain torch, and for a model
    without experts."""
    config: Any = getattr(backend, "config", None)
    expect(config is not None, "routes on plain torch: set use_mca: true, or remove the column")
    expect(
        config.num_moe_experts, f"routes: {config.hf_model_type} has no experts: remove the column"
    )
    return config


def _check_choices(routes: torch.Tensor) -> None:
    """Raise ValueError if, for a token in a layer, an expert is given twice, or -1 stands for some
    of its experts but not for all.
    """
    is_here = routes < 0
    expect(
        bool((is_here.all(-1) == is_here.any(-1)).all()),
        "routes with -1 for some experts of a token in a layer: expected it for all, or for none",
    )
    in_order = routes.sort(-1).values
    is_twice = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
    expect(not is_twice.any(), "routes with an expert twice for a token in a layer")
