"""Wishes of a config.json: each field of each family's class changes the model's configuration, is
refused, or has a reason here why training goes on alike. And a model's load-balancing loss.
"""

import copy
import functools
import warnings
from types import SimpleNamespace

import pytest

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
    "original_max_position_embeddings": "of longrope, which is refused",
    "_sliding_window_pattern": "layer_types holds what follows from it",
    "no_rope_layer_interval": "no_rope_layers holds what follows from it",
    "vision_config": "transformers' module is made of it, whatever it says",
    "image_token_id": "it is read from the copy of config.json, for each batch",
    **dict.fromkeys(
        "video_token_id vision_start_token_id vision_end_token_id".split(),
        "of videos, and of the processor that makes the prompts",
    ),
}
VALUES = [True, False, 1, 2, 3, 8, 64, 0.25, "gelu", "greedy", "sigmoid", "all", [0], [1, 1]]
VALUES += [{"1": {"head_dim": 32}}]
VALUES += [[name] * count for name in ("sliding_attention", "full_attention") for count in (2, 4)]
VALUES += [{"rope_type": "default", "rope_theta": 77.0}]
VALUES += [{**VALUES[-1], "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 4}]
VALUES += [{name: VALUES[-1] for name in ("full_attention", "sliding_attention")}]


def bases() -> dict[str, list]:
    """{model_type: transformers' configs, where some fields are in effect only beside others}"""
    names = [*tiny.FAMILY_KEYS, *tiny.MORE_KEYS]
    configs = [tiny.hf_config(name) for name in names]
    configs += [tiny_moe.hf_config(name) for name in tiny_moe.MODELS]
    window = dict(use_sliding_window=True, sliding_window=5)
    configs += [tiny.hf_config(name, **window, max_window_layers=2) for name in ("qwen2", "qwen3")]
    configs += [tiny_moe.hf_config("qwen2_moe", **window, max_window_layers=2)]
    configs += [tiny_moe.hf_config("qwen3_moe", **window)]
    configs += [pictures.hf_config(name) for name in pictures.FAMILIES]
    window |= dict(max_window_layers=2)
    configs += [pictures.hf_config(name, **window) for name in ("qwen2_vl", "qwen2_5_vl")]
    out: dict[str, list] = {}
    for config in configs:
        out.setdefault(config.model_type, []).append(config)
    return out


BASES = bases()


def fields_of(hf) -> dict:
    """A model's configuration without the copy of its config.json."""
    return {k: v for k, v in from_hf_config(hf).to_dict().items() if k != "hf_config"}


def built(hf, given: dict):
    """A config of the class of hf; None if transformers refuses the keys."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return type(hf)(**copy.deepcopy(given))
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
            if built(hf, keys):
                out.append((hf, keys, fields_of(built(hf, keys))))
    return out


def is_heard(family: str, field: str) -> bool:
    """True if another value of the field makes another model of the family, or is refused."""
    taken = 0
    for hf, keys, plain in kinds_of(family):
        given = hf.get_text_config().to_dict().get(field)
        others = [given[::-1]] if isinstance(given, list) else []
        for value in VALUES + others:
            changed = copy.deepcopy(keys)
            (changed if field in keys else changed["text_config"])[field] = value
            config = built(hf, changed)
            if config is None:
                continue
            taken += 1
            try:
                if fields_of(config) != plain:
                    return True
            except ConfigError:
                return True
            except Exception:  # no value that a model could have
                continue
    assert taken, f"transformers takes none of VALUES as {field}: add one that it takes"
    return False


def test_every_family_has_a_config_here():
    assert set(BASES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_config_json_is_heard_or_has_a_reason_not_to_be(family):
    fields = set().union(*(hf.to_dict() for hf in BASES[family]))
    fields = fields.union(*(hf.get_text_config().to_dict() for hf in BASES[family]))
    fields -= {"text_config", *WITHOUT_EFFECT}
    silent = {field for field in fields if not is_heard(family, field)}
    known = tiny.WITHOUT_EFFECT | tiny_moe.WITHOUT_EFFECT
    there = {name for kind, name in known if kind == family}
    assert silent - there == set()
    assert there <= silent, "reasons for fields that are heard"


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
