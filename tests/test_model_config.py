"""From Hugging Face's configs to megatron's and to JSON, and what is refused on the way. No process
group is needed.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from mca_lite.batch import row_layout
from mca_lite.errors import ConfigError, Judge
from mca_lite.families import check_type, get_family
from mca_lite.model import AutoModel
from mca_lite.model_attention import Rope, rope_frequencies, rotary_tables
from mca_lite.model_config import (
    AutoConfig,
    McaModelConfig,
    MLAMcaModelConfig,
    PretrainedConfig,
    from_hf_config,
    load_hf_config,
)
from tests.shared import tiny, world
from tests.shared.training import arguments

FAMILIES = {
    "llama": (transformers.LlamaConfig, LlamaRotaryEmbedding),
    "mistral": (transformers.MistralConfig, MistralRotaryEmbedding),
    "qwen2": (transformers.Qwen2Config, Qwen2RotaryEmbedding),
    "qwen3": (transformers.Qwen3Config, Qwen3RotaryEmbedding),
}
SIZES = dict(
    vocab_size=63,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=128,
)


def hf(family="llama", **values):
    return FAMILIES[family][0](**{**SIZES, **values})


def saved(config, folder):
    """The config read back from the mca_config.json that it wrote."""
    config.save_pretrained(folder)
    return AutoConfig.from_pretrained(str(folder))


# ---- fields


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_each_family_arrive(family):
    config = from_hf_config(
        hf(family, head_dim=16, rms_norm_eps=3e-6, tie_word_embeddings=True), arguments()
    )
    assert (config.vocab_size, config.hidden_size, config.ffn_hidden_size, config.num_layers) == (
        63,
        32,
        48,
        4,
    )
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (8, 4, 16)
    assert config.layernorm_epsilon == 3e-6 and config.normalization == "RMSNorm"
    assert config.max_sequence_length == 128 and config.tie_embeddings_and_output_weights is True
    assert config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    assert (
        config.add_bias_linear is False
        and config.hidden_dropout == 0.0
        and config.attention_dropout == 0.0
    )
    assert config.hf_model_type == family
    # megatron's RMSNorm would otherwise add 1 to weights, and its rope would interleave
    assert not config.layernorm_zero_centered_gamma and not config.rotary_interleaved


@pytest.mark.parametrize(
    "family, qkv_bias, qk_norm",
    [
        ("llama", False, False),
        ("mistral", False, False),
        ("qwen2", True, False),
        ("qwen3", False, True),
    ],
)
def test_bias_and_norms_of_attention_are_the_family_s(family, qkv_bias, qk_norm):
    config = from_hf_config(hf(family), arguments())
    assert (config.add_qkv_bias, config.qk_layernorm) == (qkv_bias, qk_norm)
    assert config.tie_embeddings_and_output_weights is False


@pytest.mark.parametrize(
    "family, head_dim", [("llama", 4), ("mistral", 4), ("qwen2", 4), ("qwen3", 128)]
)
def test_head_dim_that_is_not_given_is_the_one_of_the_hf_class(family, head_dim):
    assert from_hf_config(hf(family), arguments()).kv_channels == head_dim


def test_dropout_of_the_model_is_kept_unless_the_arguments_give_one():
    assert from_hf_config(hf(attention_dropout=0.2), arguments()).attention_dropout == 0.2
    assert (
        from_hf_config(
            hf(attention_dropout=0.2), arguments(attention_dropout=0.0)
        ).attention_dropout
        == 0.0
    )


def test_layout_and_precision_come_from_the_arguments():
    args = arguments(
        tensor_model_parallel_size=2, sequence_parallel=True, bf16=True, loss_chunk_size=7
    )
    config = from_hf_config(hf(), args)
    assert (
        config.tensor_model_parallel_size == 2
        and config.sequence_parallel
        and config.loss_chunk_size == 7
    )
    assert config.bf16 and config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert config.padded_vocab_size == 64 and config.vocab_size == 63
    assert from_hf_config(hf(), arguments()).params_dtype == torch.float32
    assert from_hf_config(hf(), arguments(fp16=True)).params_dtype == torch.float16


def test_without_arguments_it_is_one_rank_in_float32_on_layers_that_work_here():
    config = from_hf_config(hf())
    assert config.tensor_model_parallel_size == config.pipeline_model_parallel_size == 1
    assert config.params_dtype == torch.float32
    if not torch.cuda.is_available():
        assert config.transformer_impl == "local"


# ---- rope

SCALINGS = {
    "default": dict(rope_type="default", rope_theta=5e5),
    "linear": dict(rope_type="linear", factor=4.0, rope_theta=1e4),
    # a factor of 32, as Llama 3.2 has: 8 is not built in
    "llama3": dict(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
        rope_theta=5e5,
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1e6),
    "yarn_factor_below_1": dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=32,
        rope_theta=1e6,
        attention_factor=0.8,
    ),
    "yarn_mscale": dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=32,
        rope_theta=1e6,
        mscale=0.7,
        mscale_all_dim=1.0,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_is_that_of_the_hf_model(family, scaling, tmp_path):
    theirs = hf(family, head_dim=16, rope_parameters=SCALINGS[scaling])
    rope = FAMILIES[family][1](theirs)
    for config in (from_hf_config(theirs, arguments()), saved(from_hf_config(theirs), tmp_path)):
        inv_freq, factor = rope_frequencies(config)
        assert inv_freq.dtype == torch.float32
        assert torch.equal(inv_freq.cpu(), rope.inv_freq)
        assert factor == rope.attention_scaling


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_tables_of_a_row_are_transformers(scaling):
    theirs, device = hf(head_dim=16, rope_parameters=SCALINGS[scaling]), torch.device("cpu")
    rope, expected = Rope.of(from_hf_config(theirs)), LlamaRotaryEmbedding(theirs)
    for borders in ((0, 5), (0, 3001), (0, 7, 1500)):
        layout = row_layout(borders, 1, 0, device)
        tables = rotary_tables(rope, layout, torch.float32)
        assert rotary_tables(rope, layout, torch.float32) is tables
        wanted = expected(torch.zeros(1), layout.positions[None])
        for table, of_transformers in zip(tables, wanted, strict=True):
            torch.testing.assert_close(table[:, 0, 0], of_transformers[0], rtol=0, atol=1e-6)


def test_scaled_rope_differs_from_plain_rope():
    plain = rope_frequencies(from_hf_config(hf(head_dim=16)))[0]
    for scaling in ("linear", "llama3", "yarn"):
        scaled = rope_frequencies(
            from_hf_config(hf(head_dim=16, rope_parameters=SCALINGS[scaling]))
        )[0]
        assert not torch.equal(scaled, plain)
    assert (
        rope_frequencies(from_hf_config(hf(rope_parameters=SCALINGS["yarn_factor_below_1"])))[1]
        == 0.8
    )


def test_a_config_json_of_transformers_4_is_understood(tmp_path):
    values = {**SIZES, "model_type": "llama", "rope_theta": 5e5, "hidden_act": "silu"}
    values["rope_scaling"] = {k: v for k, v in SCALINGS["llama3"].items() if k != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = AutoConfig.from_pretrained(str(tmp_path), arguments())
    rope = LlamaRotaryEmbedding(hf(rope_parameters=SCALINGS["llama3"]))
    assert config.rotary_base == 5e5
    assert torch.equal(rope_frequencies(config)[0].cpu(), rope.inv_freq)


# ---- JSON


@pytest.mark.parametrize("family", FAMILIES)
def test_json_round_trip_keeps_every_field(family, tmp_path):
    config = from_hf_config(hf(family), arguments(tensor_model_parallel_size=2, bf16=True))
    read = saved(config, tmp_path)
    assert type(read) is McaModelConfig
    assert read.to_dict() == json.loads(config.to_json_string())
    for name in (
        "params_dtype",
        "autocast_dtype",
        "activation_func",
        "attention_backend",
        "kv_channels",
    ):
        assert getattr(read, name) == getattr(config, name), name


def test_saved_config_wins_over_the_hf_config(tmp_path):
    hf("llama").save_pretrained(tmp_path)
    saved(from_hf_config(hf("qwen3")), tmp_path)
    assert AutoConfig.from_pretrained(str(tmp_path)).hf_model_type == "qwen3"
    assert PretrainedConfig.from_pretrained(str(tmp_path)).hf_model_type == "qwen3"


def test_a_saved_layout_does_not_outlive_its_run(tmp_path):
    pp2 = dict(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        gradient_accumulation_steps=2,
    )
    first = arguments(tensor_model_parallel_size=4, bf16=True, recompute_granularity="full", **pp2)
    from_hf_config(hf(), first).save_pretrained(tmp_path)
    now = AutoConfig.from_pretrained(str(tmp_path), arguments())
    fresh = from_hf_config(hf(), arguments())
    names = """tensor_model_parallel_size pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size expert_tensor_parallel_size
        microbatch_group_size_per_vp_stage overlap_p2p_comm batch_p2p_comm recompute_granularity
        recompute_method recompute_num_layers bf16 params_dtype pipeline_dtype autocast_dtype"""
    for name in names.split():
        assert getattr(now, name) == getattr(fresh, name), name


def test_a_config_saved_on_one_rank_takes_a_pipeline(tmp_path):
    from_hf_config(hf()).save_pretrained(tmp_path)
    layout = "Et|t|t|tL"
    args = arguments(
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=layout,
        gradient_accumulation_steps=2,
        bf16=True,
    )
    config = AutoConfig.from_pretrained(str(tmp_path), args)
    assert (
        config.microbatch_group_size_per_vp_stage == 2
    )  # megatron's schedule refuses less than the pipeline's size
    assert config.autocast_dtype == torch.bfloat16
    again = saved(config, tmp_path)
    assert again.pipeline_model_parallel_layout.input_data == layout
    assert again.distribute_config_match(config)


def test_a_layout_may_have_commas_beside_layers_for_multi_token_prediction():
    config = McaModelConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=8,
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et*3,|t*1,L,",
        mtp_num_layers=1,
    )
    assert config.pipeline_model_parallel_layout.input_data == "Et*3|t*1mL"


@pytest.mark.parametrize("vpp", [None, 2])
def test_virtual_stages_of_a_layout_switch_p2p_as_those_of_the_key_do(vpp):
    # batched p2p mixes up the two messages of interleaved stages without an error
    config = McaModelConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=8,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=vpp,
        pipeline_model_parallel_layout="Et|t|t|tL",
    )
    assert config.virtual_pipeline_model_parallel_size == 2
    assert config.overlap_p2p_comm and not config.batch_p2p_comm
    plain = from_hf_config(hf(), arguments(pipeline_model_parallel_size=2))
    assert not plain.overlap_p2p_comm and plain.batch_p2p_comm


def test_mla_config_round_trips_as_its_own_class(tmp_path):
    config = MLAMcaModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=10)
    read = saved(config, tmp_path)
    assert type(read) is MLAMcaModelConfig and read.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "more",
    [
        {"layernorm_epsilom": 1e-3},
        {"params_dtype": "torch.bfloat16"},
        {"num_layers": 3},
        {"cuda_graph_impl": "local"},
        {"num_layers_in_first_pipeline_stage": 1},
        {"cross_entropy_loss_fusion": True},
    ],
)
def test_additional_configs_that_cannot_be_are_refused(more):
    with pytest.raises(
        ConfigError, match=f"config.json and keys.*(?s:.)*try: {next(iter(more))} left out"
    ) as caught:
        arguments(additional_configs=more)
    assert [problem.key for problem in caught.value.problems] == [
        f"additional_configs.{next(iter(more))}"
    ]


def test_additional_configs_that_are_keys_are_sent_there():
    with pytest.raises(ConfigError, match="try: fp8: hybrid, beside additional_configs"):
        arguments(additional_configs={"fp8": "hybrid"})


@pytest.mark.parametrize("key", ["activation_func", "attention_backend"])
def test_an_unknown_name_of_a_function_or_backend_is_refused(key):
    with pytest.raises(ValueError, match=f"{key}: 'snake'"):
        McaModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **{key: "snake"})


@pytest.mark.parametrize(
    "values, match",
    [
        ({}, True),
        (dict(bf16=True, sequence_parallel=True), True),  # how it is computed, not how it is cut
        (dict(tensor_model_parallel_size=2, sequence_parallel=True), False),
        (dict(pipeline_model_parallel_size=2), False),
        (dict(expert_model_parallel_size=2), False),
        (dict(transformer_impl="transformer_engine"), False),
    ],
)
def test_configs_match_where_every_rank_holds_the_same_weights(values, match):
    base = dict(num_layers=4, hidden_size=32, num_attention_heads=8, transformer_impl="local")
    one, other = (
        McaModelConfig(**base, num_moe_experts=2),
        McaModelConfig(**{**base, **values}, num_moe_experts=2),
    )
    assert (
        one.distribute_config_match(other) is match and other.distribute_config_match(one) is match
    )


def test_configs_of_different_pipeline_layouts_do_not_match():
    def cut(layout=None):
        return from_hf_config(
            hf(), arguments(pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
        )

    assert not cut().distribute_config_match(cut("Et|t*3L"))
    assert not cut("Et*3|tL").distribute_config_match(cut("Et|t*3L"))
    assert cut("Et*3|tL").distribute_config_match(cut("Et*3|tL"))


# ---- refusals


@pytest.mark.parametrize(
    "family, values, message",
    [
        ("llama", dict(hidden_act="gelu"), "hidden_act in config.json of llama: 'gelu'"),
        ("mistral", dict(hidden_act="relu"), "hidden_act .*: 'relu'"),
        ("qwen2", dict(hidden_act="gelu_new"), "hidden_act .*: 'gelu_new'"),
        ("qwen3", dict(hidden_act="gelu"), "hidden_act .*: 'gelu'"),
        ("llama", dict(attention_bias=True), "attention_bias .*: true"),
        ("qwen3", dict(attention_bias=True), "attention_bias .*: true"),
        ("llama", dict(mlp_bias=True), "mlp_bias .*: true"),
        (
            "llama",
            dict(quantization_config={"quant_method": "gptq", "bits": 4}),
            "quantization_config",
        ),
        (
            "qwen3",
            dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)),
            "rope_type .*: 'dynamic'",
        ),
        (
            "qwen3",
            dict(
                num_hidden_layers=2,
                layer_types=["sliding_attention", "full_attention"],
                use_sliding_window=False,
            ),
            "layer_types .*: 'sliding_attention'\n.*switched off",
        ),
        # transformers' own default rope passes it over: half a rotation would be another model
        (
            "llama",
            dict(
                rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
            ),
            "partial_rotary_factor .*: 0.5",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(family, values, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_hf_config(hf(family, **values), arguments())
    assert "use_mca: false" in str(caught.value)


def test_all_refusals_of_a_model_are_said_at_once():
    with pytest.raises(ValueError) as caught:
        from_hf_config(
            hf(hidden_act="gelu", attention_bias=True, mlp_bias=True), arguments(), "some/model"
        )
    text = str(caught.value)
    assert "of some/model" in text and all(
        key in text for key in ("hidden_act", "attention_bias", "mlp_bias")
    )


@pytest.mark.parametrize(
    "family, values, window",
    [
        ("mistral", dict(sliding_window=16), 16),
        ("mistral", dict(sliding_window=None), None),
        ("qwen2", dict(use_sliding_window=True, sliding_window=16, max_window_layers=2), 16),
        ("qwen3", dict(use_sliding_window=True, sliding_window=16, max_window_layers=0), 16),
        ("qwen2", dict(use_sliding_window=False, sliding_window=16), None),
        (
            "qwen3",
            dict(use_sliding_window=True, sliding_window=16, max_window_layers=4),
            None,
        ),  # no layer has it
        ("llama", {}, None),
    ],
)
def test_sliding_window_is_kept_where_a_layer_uses_it(family, values, window):
    assert from_hf_config(hf(family, **values), arguments()).sliding_window == window


@pytest.mark.parametrize("values", [None, {}, {"model_type": ["qwen3"], "hidden_size": 8}])
@pytest.mark.parametrize("kind", [["qwen3"], None, 3])
def test_a_model_type_that_is_no_text_is_refused_in_words(kind, values):
    with pytest.raises(ConfigError, match="expected one of arcee.* qwen3,"):
        get_family(kind, values)


def test_unknown_model_type_names_those_that_there_are():
    with pytest.raises(
        ValueError, match="(?s)'gpt2'.*expected one of .*llama, .*mistral, .*qwen3.*use_mca: false"
    ):
        from_hf_config(transformers.GPT2Config(), arguments())


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(pipeline_model_parallel_size=3), "4 layers cannot be shared evenly by 3 x 1 stages"),
        (
            dict(
                pipeline_model_parallel_size=4,
                virtual_pipeline_model_parallel_size=2,
                gradient_accumulation_steps=4,
            ),
            "4 layers cannot be shared evenly by 4 x 2",
        ),
        (dict(tensor_model_parallel_size=3), "8 attention heads .* no multiple of 3"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(hf(), arguments(**values))


def test_query_groups_that_tensor_parallelism_cannot_cut_are_refused():
    uneven = hf(hidden_size=48, num_attention_heads=12, num_key_value_heads=6)
    with pytest.raises(ValueError, match="6 query groups"):
        from_hf_config(uneven, arguments(tensor_model_parallel_size=4))


def test_virtual_stages_need_a_pipeline():
    with pytest.raises(ValueError, match="virtual stages need a pipeline"):
        McaModelConfig(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=8,
            virtual_pipeline_model_parallel_size=2,
        )


def test_sequence_parallelism_follows_tensor_parallelism():
    base = dict(num_layers=4, hidden_size=32, num_attention_heads=8)
    assert not McaModelConfig(**base, sequence_parallel=True).sequence_parallel


def test_folders_without_a_config_and_files_of_no_known_class_are_named(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory: .*config.json"):
        load_hf_config(str(tmp_path))
    (tmp_path / "mca_config.json").write_text('{"model_class": "Other"}')
    with pytest.raises(ValueError, match="got model_class 'Other'"):
        AutoConfig.from_pretrained(str(tmp_path))
    (tmp_path / "mca_config.json").write_text('{"model_class": "McaModelConfig", "num_layer": 2}')
    with pytest.raises(ValueError, match="not fields of McaModelConfig: num_layer"):
        AutoConfig.from_pretrained(str(tmp_path))


def test_what_was_read_of_a_config_json_is_not_read_again(tmp_path, monkeypatch):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    values = json.loads((Path(path) / "config.json").read_text())
    expected, given = load_hf_config(str(path)).to_dict(), copy.deepcopy(values)
    (Path(path) / "config.json").write_text("{}")
    assert load_hf_config(str(path), values=given).to_dict() == expected and given == values
    assert load_hf_config(str(path), values={**values, "_name_or_path": "x"}).name_or_path == path
    # transformers takes such a mistral for a ministral, and reads the file itself
    (Path(path) / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    other = {**values, "model_type": "mistral", "layer_types": ["full_attention"]}
    assert load_hf_config(str(path), values=other).model_type == "qwen2"


@pytest.mark.parametrize("field, value", [("no_rope_freq", [1] * 4), ("softmax_type", "learnable")])
def test_attention_that_the_local_layers_lack_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: the local layers lack it"):
        McaModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, **{field: value})


@pytest.mark.parametrize(
    ("keys", "fused"),
    [({}, False), (dict(hidden_dropout=0.1), True), (dict(bias_dropout_fusion=True), True)],
)
def test_a_residual_is_compiled_on_a_gpu_where_it_has_dropout(keys, fused, monkeypatch, tmp_path):
    path = tiny.save_model(tmp_path / "model", "llama")
    args = arguments(transformer_impl="local", **keys)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert AutoConfig.from_pretrained(path, args).bias_dropout_fusion is fused


# ---- models that are not trained here

PICTURES = dict(vision_config={}, text_config={})
NO_MEDIA = (
    "of models with images, audio or video glm4v, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, "
    "qwen3_omni_moe_thinker, qwen3_vl, qwen3_vl_moe are trained here"
)
PLAIN = "use_mca: false"
ALONE = "its language model, saved alone as "


@pytest.mark.parametrize(
    "values, backend, reason, remedy",
    [
        (dict(PICTURES, model_type="llava"), "use_mca=true", NO_MEDIA, "a model of text"),
        (dict(PICTURES, model_type="internvl"), "use_mca=false", NO_MEDIA, "a model of text"),
        (
            dict(audio_config={}, model_type="qwen2_audio"),
            "use_mca=false",
            NO_MEDIA,
            "a model of text",
        ),
        # transformers has a causal model of its text
        (dict(PICTURES, model_type="gemma3"), "use_mca=true", NO_MEDIA, f"{ALONE}gemma3_text; or"),
        (dict(PICTURES, model_type="gemma4"), "use_mca=true", NO_MEDIA, f"{ALONE}gemma4_text; or"),
        (dict(model_type="gpt2"), "use_mca=true", "one of arcee, cwm", f"{PLAIN}, to train it as"),
        (dict(model_type="t5"), "use_mca=true", "one of arcee, cwm", "a model of text"),
        (dict(model_type="t5"), "use_mca=false", "no causal model", "a model of text"),
    ],
)
def test_a_model_that_no_backend_trains_is_refused_with_a_true_remedy(
    values, backend, reason, remedy, tmp_path
):
    from mca_lite.args import parse_args

    (tmp_path / "config.json").write_text(json.dumps(values))
    words = [f"model_name_or_path={tmp_path}", "dataset=none.jsonl", "output_dir=out", backend]
    with pytest.raises(ConfigError) as caught:
        parse_args(words)
    [problem] = caught.value.problems
    assert problem.key == "model_type in config.json" and problem.value == values["model_type"]
    assert reason in problem.reason and problem.suggestion.startswith(remedy)


@pytest.mark.parametrize(
    "values",
    [
        dict(PICTURES, model_type="gemma3"),
        dict(model_type="gpt2"),
        dict(model_type="of_its_own", auto_map={"AutoModelForCausalLM": "modeling.Model"}),
    ],
)
def test_a_causal_model_of_transformers_passes_on_plain_torch(values):
    judge = Judge(None)
    check_type(values, judge, use_mca=False)
    assert judge.problems == []
    check_type(values, judge)
    assert "use_mca: false" in judge.problems[0].suggestion


def test_auto_config_says_which_images_are_not_trained(tmp_path):
    from transformers import LlavaConfig

    LlavaConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="qwen3_vl, qwen3_vl_moe are trained here"):
        AutoConfig.from_pretrained(str(tmp_path))


def test_a_model_is_not_built_from_a_config_of_transformers():
    args = arguments()
    with pytest.raises(ValueError) as caught:
        AutoModel.from_config(hf(), args)
    said = str(caught.value)
    assert (
        "expected the McaModelConfig that mca_lite.AutoConfig.from_pretrained(folder, args)" in said
    )
    assert "got transformers.models.llama.configuration_llama.LlamaConfig" in said
    assert "call mca_lite.model_config.from_hf_config(config, args)" in said
    assert not torch.distributed.is_initialized()


def draw() -> list[str]:
    args = arguments()
    models = AutoModel.from_config(from_hf_config(hf(), args), args)
    return [type(chunk).__name__ for chunk in models]


def test_the_call_that_the_refusal_names_makes_a_config_to_build_from():
    assert world.run(draw, 1) == [["McaGPTModel"]]
