"""Rotary positions: frequencies as Hugging Face has them, and the tables of a row's positions.

`config` is a McaModelConfig (model_config.py).
"""

import copy

import torch

from .parallel import device


def rope_frequencies(config, layer_type: str = "full_attention") -> tuple[torch.Tensor, float]:
    """(inverse frequencies float32 [rotary_dim / 2] on this rank's device, factor on cos and sin)
    of layers of a type.

    From transformers' own functions, so that linear, llama3 and yarn scaling are Hugging Face's to
    the bit.
    """
    scaling, of_type = (config.hf_config or {}).get("rope_parameters") or {}, {}
    if config.has_local_rope:
        scaling, of_type = scaling[layer_type], {"layer_type": layer_type}
    if scaling.get("rope_type", "default") != "default":
        from transformers import AutoConfig as HFAutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        hf = HFAutoConfig.for_model(**copy.deepcopy(config.hf_config))
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
            hf, torch.device("cpu"), **of_type
        )
        return inv_freq.float().to(device()), float(factor)
    dim = int(config.kv_channels * config.rotary_percent)
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    base = scaling["rope_theta"] if of_type else config.rotary_base
    return (1.0 / base**exponent).to(device()), 1.0


def rotary_tables(
    config, layout, dtype: torch.dtype, layer_type: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [t, 1, 1, rotary_dim] for the positions of a row (packed_rows.RowLayout), in
    dtype.

    The tables over all positions are made once and grow by doubling; the last rows' own are
    kept as well.
    """
    if not config.has_local_rope:
        layer_type = "full_attention"  # one table serves all
    rows, key = config.__dict__.setdefault("_rotary_rows", {}), (id(layout), dtype, layer_type)
    if key not in rows or rows[key][0] is not layout:
        if len(rows) >= 64:
            rows.clear()
        tables = config.__dict__.setdefault("_rotary_table", {})
        whole = tables.get(layer_type)
        if whole is None or len(whole[0]) < layout.longest:
            inv_freq, factor = rope_frequencies(config, layer_type)
            length = max(layout.longest, 1024, 2 * len(whole[0]) if whole else 0)
            angles = torch.outer(torch.arange(length, device=inv_freq.device).float(), inv_freq)
            neighbours = config.rope_interleave
            angles = angles.repeat_interleave(2, 1) if neighbours else angles.repeat(1, 2)
            whole = tables[layer_type] = (angles.cos() * factor, angles.sin() * factor)
        rows[key] = (layout, *(table[layout.positions, None, None].to(dtype) for table in whole))
    return rows[key][1:]
