"""Wishes of a config.json: each field of each family's class changes the model's configuration, is
refused, or has a reason here why training goes on alike. And a model's load-balancing loss.
"""

import contextlib
import copy
import functools
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from mca_lite import TrainingArguments
from mca_lite.backend_torch import losses_of
from mca_lite.errors import ConfigError
from mca_lite.families import FAMILIES
from mca_lite.log import balance_summary
from mca_lite.model_config import McaModelConfig, from_hf_config
from mca_lite.model_moe import BalancingLosses
from tests.shared import pictures, tiny, tiny_moe

# {field: why another value trains alike}
WITHOUT_EFFECT = {
    **dict.fromkeys(
        "architectures dtype model_type transformers_version _name_or_path".split(),
        "the name of the class, and of the files: the arguments decide the precision",
    ),
    **dict.fromkeys(
        "bos_token_id eod_token_id eos_token_id pad_token_id sep_token_id".split(),
        "the tokenizer's are used, in the data",
    ),
    **dict.fromkeys(
        "id2label label2id problem_type is_encoder_decoder chunk_size_feed_forward".split(),
        "of classifiers and encoders: no decoder reads them",
    ),
    **dict.fromkeys(
        "output_attentions output_hidden_states return_dict use_cache".split(),
        "what a forward pass hands out, or keeps while it generates",
    ),
    "output_router_logits": "moe_aux_loss_coeff decides",
    "pretraining_tp": "transformers no longer reads it",
    "embd_pdrop": "transformers' Phi-3 does not read it",
    "num_mtp_layers": "mtp_num_layers decides; files have as many as num_nextn_predict_layers says",
    "num_nextn_predict_layers": "mtp_num_layers decides how many of them are trained",
    "qk_head_dim": "the sum of qk_nope_head_dim and qk_rope_head_dim",
    "original_max_position_embeddings": "of longrope, whose rows are compared in test_rope.py",
    "_sliding_window_pattern": "layer_types holds what follows from it",
    "no_rope_layer_interval": "no_rope_layers holds what follows from it",
    "vision_config": "transformers' module is made of it, whatever it says",
    "audio_config": "transformers' module is made of it, whatever it says",
    "audio_token_id": "it is read from the copy of config.json, for each batch",
    **dict.fromkeys(
        "audio_start_token_id position_id_per_seconds seconds_per_chunk user_token_id".split(),
        "of videos with sound, and of the processor that makes the prompts",
    ),
    "image_token_id": "it is read from the copy of config.json, for each batch",
    **dict.fromkeys(
        "video_token_id vision_start_token_id vision_end_token_id image_start_token_id "
        "image_end_token_id video_start_token_id video_end_token_id".split(),
        "of videos, and of the processor that makes the prompts",
    ),
}
NOT_HEARD = tiny.WITHOUT_EFFECT | tiny_moe.WITHOUT_EFFECT
# fields whose other values are no model's, or another output's
NOT_A_MODELS = set(
    "architectures dtype model_type return_dict output_attentions output_hidden_states "
    "vision_config image_token_id num_hidden_layers num_key_value_heads".split()
)
# {field: why logits do not show it}
NOT_IN_LOGITS = {
    "initializer_range": "of weights that are drawn",
    "max_position_embeddings": "a bound on the length of rows",
    "router_aux_loss_coef": "of a loss, compared with the torch backend's below",
}
# attributes that no config.json has as fields of a model
PARTS = set(
    "text_config decoder generator text_encoder quantization_config per_layer_config".split()
)
TOKENS = torch.arange(1, 13)[None]
VALUES = [True, False, 1, 2, 3, 8, 64, 0.25, "gelu", "greedy", "sigmoid", "all", [0], [1, 1]]
VALUES += [{"1": {"head_dim": 32}}, ["dense", "sparse"] * 2]
VALUES += [[name] * count for name in ("sliding_attention", "full_attention") for count in (2, 4)]
VALUES += [{"rope_type": "default", "rope_theta": 77.0}]
VALUES += [{**VALUES[-1], "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 4}]
VALUES[-1]["mrope_section"] = [1, 2, 1]
VALUES += [{**VALUES[-1], "partial_rotary_factor": 0.5}]
VALUES += [{name: VALUES[-1] for name in ("full_attention", "sliding_attention")}]
# for fields that a class lacks, which has no check of them
FEW = [False, 2, 0.25, ["full_attention"] * 2, ["full_attention"] * 4, ["dense", "sparse"] * 2]


def bases() -> dict[str, list]:
    """{model_type: transformers' configs, where some fields are in effect only beside others}"""
    names = [*tiny.FAMILY_KEYS, *tiny.MORE_KEYS]
    configs = [tiny.hf_config(name) for name in names]
    configs += [tiny_moe.hf_config(name) for name in tiny_moe.MODELS]
    window = dict(use_sliding_window=True, sliding_window=5)
    configs += [tiny.hf_config(name, **window, max_window_layers=2) for name in ("qwen2", "qwen3")]
    configs += [tiny_moe.hf_config("qwen2_moe", **window, max_window_layers=2)]
    configs += [tiny_moe.hf_config("qwen3_moe", **window)]
    dense = dict(mlp_only_layers=[0])
    configs += [tiny_moe.hf_config(name, **dense) for name in ("qwen2_moe", "qwen3_next")]
    configs += [pictures.hf_config(name) for name in pictures.FAMILIES]
    of_dense_layers = ("qwen3_vl_moe", "qwen3_omni_moe_thinker")
    configs += [pictures.hf_config(name, **dense) for name in of_dense_layers]
    window |= dict(max_window_layers=2)
    configs += [pictures.hf_config(name, **window) for name in ("qwen2_vl", "qwen2_5_vl")]
    out: dict[str, list] = {}
    for config in configs:
        out.setdefault(config.model_type, []).append(config)
    return out


BASES = bases()


def fields_of(hf) -> dict:
    """A model's configuration without the copy of its config.json, and functions made for it."""
    fields = vars(from_hf_config(hf))
    kept = {name: x for name, x in fields.items() if name != "hf_config" and not callable(x)}
    return kept | {"activation_func": fields["activation_func"]}


def built(hf, given: dict):
    """A config of the class of hf, which may change what is given; None if transformers refuses the
    keys."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return type(hf)(**given)
    except Exception:
        return None


@functools.lru_cache(1)
def kinds_of(family: str) -> list[tuple]:
    """(config, its keys, their fields) of a family's configs, and of each without kinds of layers,
    which hold against what they follow from."""
    out = []
    for hf in BASES[family]:
        given = hf.to_dict()
        without = copy.deepcopy(given)
        text = without.get("text_config", without)
        for types in ("layer_types", "mlp_layer_types"):
            text.pop(types, None)
        for keys in [given] if given == without else [given, without]:
            if config := built(hf, copy.deepcopy(keys)):
                out.append((hf, keys, fields_of(config)))
    return out


def others_of(hf, field: str) -> list:
    """Values to try in place of a field's."""
    given = hf.get_text_config().to_dict().get(field)
    return VALUES + [given[::-1]] if isinstance(given, list) else VALUES


def with_value(keys: dict, field: str, value) -> dict:
    """The keys with another value of a field, which they may not have had."""
    keys = copy.deepcopy(keys)
    is_of_text = "text_config" in keys and field not in keys
    (keys["text_config"] if is_of_text else keys)[field] = copy.deepcopy(value)
    return keys


def is_heard(family: str, field: str, values: list | None = None) -> bool:
    """True if another value of the field makes another model of the family, or is refused; and
    then makes another one of transformers' class too, by its logits. values: to try in the first
    kind alone."""
    taken = 0
    deaf = []
    is_refused = False
    for number, (hf, keys, plain) in enumerate(kinds_of(family)):
        if is_refused or (values and number):
            break
        for value in values or others_of(hf, field):
            config = built(hf, with_value(keys, field, value))
            if config is None:
                continue
            taken += 1
            try:
                differs = fields_of(config) != plain
            except ConfigError:
                is_refused = True
                continue
            except Exception:  # no value that a model could have
                continue
            if not differs:
                continue
            if field in NOT_IN_LOGITS:
                return True
            with contextlib.suppress(Exception):  # of no value that transformers' model can have
                if logits_differ(family, number, config):
                    return True
                deaf.append(value)
    assert taken or values, f"transformers takes none of VALUES as {field}: add one that it takes"
    assert not deaf, f"{field}: {deaf[:3]} make other models here, and the same in transformers"
    return is_refused


def model_of(hf):
    """transformers' model of a config, not initialised."""
    is_of_text = hf.get_text_config() is hf
    kind = AutoModelForCausalLM if is_of_text else AutoModelForImageTextToText
    with no_init_weights():
        model = kind.from_config(hf).train()
    model.tie_weights()
    return model


def logits_of(model) -> torch.Tensor:
    torch.manual_seed(0)  # of dropout
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


@functools.lru_cache(8)
def right_of(family: str, number: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """(transformers' model with random weights, its logits) of a config in kinds_of."""
    hf, keys, _ = kinds_of(family)[number]
    model = model_of(built(hf, copy.deepcopy(keys)))
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.copy_(0.3 * torch.randn(tensor.shape) + (tensor.dim() < 2))
    return model, logits_of(model)


def logits_differ(family: str, number: int, config) -> bool:
    """True if transformers' model of a changed config has other tensors than that of kinds_of, or
    other logits with the same."""
    right, logits = right_of(family, number)
    model = model_of(config)
    if sizes(model) != sizes(right):
        return True
    model.load_state_dict(right.state_dict())
    return not logits_of(model).equal(logits)


def sizes(model) -> dict:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def fields_read(hf) -> set[str]:
    """Fields of the text's config that the family's table reads, its class has them or not."""
    hf = copy.deepcopy(hf)
    text = hf.get_text_config()
    kind = type(text)
    names: set[str] = set()

    class Recorder(kind):
        def __getattribute__(self, name):
            if sys._getframe(1).f_globals["__name__"].startswith("mca_lite."):
                names.add(name)
            return super().__getattribute__(name)

    text.__class__ = Recorder
    FAMILIES[hf.model_type].check(hf, "a model")
    FAMILIES[hf.model_type].values(hf)
    text.__class__ = kind
    fields = {name for name in names if name[0] != "_" and not callable(getattr(kind, name, None))}
    return fields - PARTS


def test_every_family_has_a_config_here():
    assert set(BASES) == set(FAMILIES)


def fields_of_classes(family: str) -> set[str]:
    """Fields of the classes of a family's config, of text too."""
    parts = [part for hf in BASES[family] for part in (hf, hf.get_text_config())]
    return set().union(*(part.to_dict() for part in parts)) - {"text_config"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_config_json_is_heard_or_has_a_reason_not_to_be(family):
    fields = fields_of_classes(family) - WITHOUT_EFFECT.keys()
    silent = {field for field in fields if not is_heard(family, field)}
    there = {name for kind, name in NOT_HEARD if kind == family}
    assert silent - there == set()
    assert there <= silent, "reasons for fields that are heard"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_the_class_of_transformers_lacks_is_heard_as_there(family):
    read = set().union(*map(fields_read, BASES[family]))
    for field in read - fields_of_classes(family):
        is_heard(family, field, FEW)


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_without_effect_here_have_none_in_transformers(family):
    of_family = {name for kind, name in NOT_HEARD if kind == family}
    fields = (WITHOUT_EFFECT.keys() | of_family) - NOT_A_MODELS
    hf, keys, plain = kinds_of(family)[0]
    for field in sorted(fields & fields_of_classes(family)):
        tries = [with_value(keys, field, value) for value in (1, True)]
        keys = next((more for more in tries if built(hf, copy.deepcopy(more))), keys)
    config = built(hf, keys)
    assert fields_of(config) == plain
    assert not logits_differ(family, 0, config)


@pytest.mark.parametrize("family", ["gemma3_text", "flint"])
def test_a_field_without_effect_is_not_heard_beside_kinds_of_layers(family):
    assert not is_heard(family, "use_cache")


OWN = dict(router_aux_loss_coef=0.03)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_the_models_load_balancing_loss_is_in_effect_on_both_backends_until_a_key_says_otherwise(
    family, tmp_path
):
    hf = tiny_moe.hf_config(family, **OWN)
    for given, wanted in ((None, 0.03), (0.0, 0.0), (0.5, 0.5)):
        args = TrainingArguments(output_dir="unused", moe_aux_loss_coeff=given)
        config = from_hf_config(hf, args)
        assert config.moe_aux_loss_coeff == wanted
        assert BalancingLosses.of(config) == losses_of(hf, args)
        config.save_pretrained(tmp_path)  # a run's own coefficient does not outlive it
        again = McaModelConfig.from_pretrained(str(tmp_path), TrainingArguments(output_dir="x"))
        assert again.moe_aux_loss_coeff == 0.03
    assert from_hf_config(hf).moe_aux_loss_coeff == 0.03


@pytest.mark.parametrize("name", tiny_moe.MODELS)
def test_the_models_coefficient_counts_where_transformers_reads_it(name, tmp_path):
    hf = tiny_moe.hf_config(name, **OWN)
    is_read = hasattr(type(hf)(), "router_aux_loss_coef")
    is_read &= (hf.model_type, "router_aux_loss_coef") not in NOT_HEARD
    args = TrainingArguments(output_dir="unused")
    config = from_hf_config(hf, args)
    config.save_pretrained(tmp_path)
    again = McaModelConfig.from_pretrained(str(tmp_path), args)
    for made in (config, again, from_hf_config(hf)):
        assert made.moe_aux_loss_coeff == 0.03 * is_read
    assert BalancingLosses.of(config) == losses_of(hf, args)


def test_the_summary_says_which_load_balancing_loss_is_in_use_and_why():
    hf, said = tiny_moe.hf_config("qwen3_moe", **OWN), []
    for given in (None, 0.0, 0.5):
        args = TrainingArguments(output_dir="unused", moe_aux_loss_coeff=given)
        backend = SimpleNamespace(
            statistics_of_routers=object(), losses_of_routers=losses_of(hf, args)
        )
        said.append(balance_summary(backend, args))
    assert [line.partition(" (")[0] for line in said] == [
        "aux_loss x 0.03",
        "none",
        "aux_loss x 0.5",
    ]
