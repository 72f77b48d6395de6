"""Multi-token prediction without torch: names in Hugging Face's files, rules of the keys."""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .errors import Judge, Keys
from .families import FAMILIES
from .families_rows import HF_LAYERS, LAYERS, PREDICTION_KEY, PREDICTION_LAYERS, Row
from .files import text_values


@dataclass(frozen=True)
class Prediction:
    """Hugging Face's names for the modules of multi-token prediction layers; a {} in them stands
    for the layer index. layer: prefix of the decoder layer that each of them contains. enorm,
    hnorm, eh_proj, final_layernorm: the modules next to that decoder layer."""

    layer: str
    enorm: str
    hnorm: str
    eh_proj: str
    final_layernorm: str

    @property
    def is_numbered(self) -> bool:
        """True if the names contain the layer index. A model's files may then have several
        prediction layers, which may repeat embedding and head; otherwise they have one layer."""
        return "{}" in self.layer


AFTER_DECODER = Prediction(
    HF_LAYERS,
    enorm=f"{HF_LAYERS}enorm",
    hnorm=f"{HF_LAYERS}hnorm",
    eh_proj=f"{HF_LAYERS}eh_proj",
    final_layernorm=f"{HF_LAYERS}shared_head.norm",
)
BESIDE_DECODER = Prediction(
    "mtp.layers.0.",
    enorm="mtp.pre_fc_norm_embedding",
    hnorm="mtp.pre_fc_norm_hidden",
    eh_proj="mtp.fc",
    final_layernorm="mtp.norm",
)


def prediction_of(model_type: str | None) -> Prediction:
    """Hugging Face's names of multi-token prediction layers in a model type. They are
    BESIDE_DECODER, "mtp.layers.0." and so on, for families whose row in FAMILIES has both
    `prediction` and `unused`. Otherwise, also for an unknown type, they are AFTER_DECODER: the
    layers are numbered after the decoder's, such as "model.layers.61." after 61 decoder layers."""
    family = FAMILIES.get(str(model_type))
    if family is not None and family.prediction and family.unused:
        return BESIDE_DECODER
    return AFTER_DECODER


def prediction_rows(decoder_rows: Iterable[Row], model_type: str | None) -> Iterator[Row]:
    """Yield the Rows of multi-token prediction layers; a Row maps a megatron tensor to its Hugging
    Face names. They are three norms, a projection, and the Rows of a decoder layer under the names
    that it has inside a prediction layer. decoder_rows: the model's Rows, of which those of decoder
    layers are taken."""
    mca = PREDICTION_LAYERS
    names = prediction_of(model_type)
    for module in ("enorm", "hnorm", "final_layernorm"):
        yield Row(f"{mca}{module}.weight", (f"{getattr(names, module)}.weight",), "copy")
    yield Row(f"{mca}eh_proj.weight", (f"{names.eh_proj}.weight",), "copy", linear=True)
    for row in decoder_rows:
        if row.mca.startswith(LAYERS):
            hf = tuple(re.sub(r".*layers\.\{}\.", names.layer, name) for name in row.hf)
            mca_name = row.mca.replace(LAYERS, f"{mca}transformer_layer.")
            yield replace(row, mca=mca_name, hf=hf)


def check(m: Keys, a: Keys, judge: Judge) -> None:
    """Report keys for multi-token prediction that the model does not support to `judge`, a Judge
    (collects Problems of a configuration). m: the model's sizes, a McaModelConfig or
    args_rules_model.numbers_of(). a: the run's arguments, or the same McaModelConfig."""
    having = {name: family.prediction for name, family in FAMILIES.items() if family.prediction}
    if str(m.hf_model_type) in FAMILIES.keys() - having.keys():
        reason = f"{m.hf_model_type} has no layers for multi-token prediction"
        reason += f" ({', '.join(having)} have)"
        for key, plain in (("mtp_num_layers", (0, None)), ("mtp_loss_scaling_factor", (0.1,))):
            judge.expect(getattr(a, key) in plain, key, reason, f"{key} left out")
    is_numbered = prediction_of(m.hf_model_type).is_numbered
    judge.expect(
        is_numbered or (a.mtp_num_layers or 0) < 2,
        "mtp_num_layers",
        f"files of {m.hf_model_type} have one layer for multi-token prediction",
        "mtp_num_layers: 1",
    )
    judge.expect(
        not (is_numbered and a.mtp_num_layers and m.tie_embeddings_and_output_weights),
        "mtp_num_layers",
        f"it is not supported for a {m.hf_model_type} model whose embedding is its head",
        "mtp_num_layers: 0",
    )


def with_count(config: Any) -> dict[str, Any]:
    """A copy of config.hf_config, the content of config.json, for a model with multi-token
    prediction layers: their number in it is at least config.mtp_num_layers. A model drawn from a
    seed may have more of them than its config.json says."""
    hf_config: dict[str, Any] = copy.deepcopy(config.hf_config)
    text = text_values(hf_config)
    family = FAMILIES.get(config.hf_model_type)
    key = getattr(family, "prediction", "") or PREDICTION_KEY
    text[key] = max(text.get(key) or 0, config.mtp_num_layers)
    return hf_config
