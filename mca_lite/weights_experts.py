"""Experts in Hugging Face's modules and files: transformers 5 holds those of a layer as one tensor of three dimensions, and
save_pretrained writes a tensor for each projection of each expert, under names of its own for some families.
"""

import re
from typing import NamedTuple


class _Names(NamedTuple):
    """What a family's files call the block, and an expert's gate, up and down projection."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_NAMES = {
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys("qwen2_moe qwen3_moe olmoe glm4_moe deepseek_v2 deepseek_v3".split(), _Names()),
}
_EXPERTS = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
_BLOCK = re.compile(r"(.*\.layers\.\d+\.)mlp\.(.*)")


def file_parts(model_type: str, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple]]:
    """(name in a file, index into the tensor) for each tensor that the files hold of a module's: one, or those of its
    experts. name, shape: of the module's tensor. Families that are not known here keep the module's form."""
    names = _NAMES.get(model_type)
    if names is None:
        return [(name, ())]
    experts = _EXPERTS.fullmatch(name)
    if experts is None:
        renamed = _BLOCK.fullmatch(name)
        return [(f"{renamed[1]}{names.block}.{renamed[2]}" if renamed else name, ())]
    prefix, half = f"{experts[1]}{names.block}.experts", shape[1] // 2
    if experts[2] == "down_proj":
        return [(f"{prefix}.{e}.{names.down}.weight", (e,)) for e in range(shape[0])]
    return [
        (f"{prefix}.{e}.{part}.weight", (e, rows))
        for e in range(shape[0])
        for part, rows in ((names.gate, slice(0, half)), (names.up, slice(half, 2 * half)))
    ]


def holds_fused_experts(names) -> bool:
    """Whether a checkpoint's tensors are in the modules' form."""
    return any(_EXPERTS.fullmatch(name) for name in names)


def named_tensors(model):
    """(name, tensor) of what a transformers model saves: its parameters, a tied one once, and its persistent buffers."""
    yield from model.named_parameters()
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
