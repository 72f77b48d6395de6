"""Estimates for `plan`, from a config alone: the memory that layers keep with part_long's keys.

Bytes are per token on this rank. Letters: w bytes per activation value, h hidden size, n heads on
this rank, v channels of a value."""

from typing import Any, NamedTuple


class Kept(NamedTuple):
    """Bytes per token that recomputed layers keep: on the device for the backward pass, on the
    device while a unit is recomputed, and in host memory."""

    device: float
    again: float
    host: float


def results(config: Any, layer: int, sizes: Any) -> float:
    """Bytes per token that a layer (counted from 0) keeps with recompute_keep: attention's output,
    w n v, and its log-sum-exps, 4 n. 0 for linear attention, and without recompute_keep. sizes:
    RankSizes."""
    if not config.recompute_keep or config.layer_type(layer + 1) == "linear_attention":
        return 0.0
    channels = config.head_sizes(layer + 1)[1]
    if config.multi_latent_attention:
        channels = config.v_head_dim
    return sizes.heads * (sizes.w * channels + 4)


def tiled(
    config: Any, layer: int, sizes: Any, tokens: float, of_layer: float, of_mlp: float
) -> tuple:
    """(bytes per token of a layer, of its MLP) with mlp_chunk_size. of_layer, of_mlp: the same
    without it. An MLP's activations are those of one tile; experts also keep their inputs for the
    backward pass. tokens: tokens of a micro-batch on this rank."""
    rows = config.mlp_chunk_size * sizes.sp
    inputs = 0.0
    if config.is_moe_layer(layer):
        # a tile has rows of experts, and a token has one row per chosen expert
        tokens *= config.moe_router_topk
        inputs = sizes.w * config.moe_router_topk * sizes.h / sizes.sp
    tile = inputs + (of_mlp - inputs) * min(rows / tokens, 1.0)
    return of_layer - of_mlp + tile, tile


def kept(config, inputs: float, units: int, of_results: list[float], again: float) -> Kept:
    """Bytes per token of recomputed layers with recompute_keep or activation_offloading.

    inputs: bytes of a unit's inputs. units: number of units. of_results: results() of each
    recomputed layer. again: bytes of a unit while it is recomputed. With offloading everything is
    in host memory, and at most two units are on the device: the one recomputed, and the one before
    it."""
    whole = inputs * units + sum(of_results)
    of_unit = sum(of_results) / max(units, 1)
    again -= of_unit  # kept results are the same storages: they count once
    if not config.activation_offloading:
        return Kept(whole, again, 0.0)
    return Kept(min(whole, 2 * (inputs + of_unit)), again, whole)
