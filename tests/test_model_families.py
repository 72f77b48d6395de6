"""Families with more than a plain decoder has: each against transformers' own class, all of them in
one world a layout.
"""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.shared import tiny, tiny_moe, world
from tests.shared.cells import asked_for, cell, shared_worlds, thinned, train_all
from tests.shared.files import TOKENS, assert_same_bytes, assert_same_tensors, tensors
from tests.shared.layouts import (
    CP2,
    DIST_OPT,
    EP2,
    EP4,
    ONE_ROW,
    OVERLAP,
    PACKED,
    PP2,
    SP,
    TP2,
    TWO_ROWS,
)
from tests.shared.lora_tools import adapter_of, train_from_adapter, train_with_peft
from tests.shared.training import BRIEF, assert_same_curve

DENSE = list(tiny.MORE_KEYS)
# the dense models of deepseek have these names
EXPERTS = {f"{name}_experts" if name in DENSE else name: name for name in tiny_moe.UNBALANCED}
FAMILIES = [*DENSE, *EXPERTS]
OF_OTHERS = [*tiny.OF_OTHERS, *tiny_moe.OF_OTHERS]  # one layout in `make test`
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, {**TP2, **SP, **DIST_OPT}),
    "dp2_overlap": (2, {**OVERLAP, **ONE_ROW}),
    "pp2_packed": (2, {**PP2, **PACKED}),
    "tp2pp2_variable": (4, {**TP2, **PP2, "variable_seq_lengths": True}),
    "cp2": (2, CP2),
    "cp2_packed": (2, {**CP2, **PACKED}),
}
EXPERT_LAYOUTS = {
    "one": (1, {}),
    "tp2_sp": (2, {**TP2, **SP, **DIST_OPT}),
    "pp2_packed": (2, {**PP2, **PACKED}),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "ep2": (2, {**EP2, **ONE_ROW}),
    "ep4": (4, {**EP4, **DIST_OPT, **ONE_ROW}),
    "tp2sp_pp2": (4, {**TP2, **SP, **PP2}),
    "ep2tp2_sp": (4, {**EP2, **TP2, **SP, **ONE_ROW}),
    "ep2pp2": (4, {**EP2, **PP2, **ONE_ROW}),
    "cp2ep2": (4, {**CP2, **EP2, **PACKED}),
}


# each half is there without the other; test_moe trains both models at ep2tp2, and balances them,
# and others at ep4
PRODUCTS = ("tp2sp_pp2", "ep2tp2_sp", "one", "ep4")
MOST = [layout for layout in EXPERT_LAYOUTS if layout != "ep2"]

# what is most unlike a plain decoder: latent attention, and windows with scores and logits of its
# own
EVERYWHERE = ["deepseek_v2", "deepseek_v3", "gemma2"]
FEW = ["tp2_sp", "cp2_packed"]
SHORT = dict(BRIEF, adam_epsilon=1e-4)


def checkpoints(paths: dict, out: str, keys: dict) -> None:
    """Each model as a checkpoint in out/family of this layout."""
    from mca_lite import AutoModel, TrainingArguments, ckpt
    from mca_lite.ckpt_megatron import MegatronSnapshot

    for name, path in paths.items():
        models = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused", **keys))
        Path(out, name).mkdir(parents=True, exist_ok=True)
        config = models.config.hf_config
        ckpt.write_weights(Path(out, name), MegatronSnapshot(models), "megatron", config)


def round_trip(paths: dict, out: str, keys: dict) -> dict:
    """Each model read and written again; its logits, where one rank has them all."""
    from mca_lite import AutoModel, TrainingArguments

    args, logits = TrainingArguments(output_dir="unused", **keys), {}
    for name, path in paths.items():
        models = AutoModel.from_pretrained(path, args).eval()
        models.save_pretrained(f"{out}/{name}")
        if len(models) == 1 and args.pipeline_model_parallel_size == 1:
            with torch.no_grad():
                logits[name] = models.gather_logits(models(torch.tensor(TOKENS))).tolist()
    return logits


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    dense = {name: tiny.save_model(folder / name, name) for name in DENSE}
    return {
        **dense,
        **{n: tiny_moe.save_model(folder / n, m, num_hidden_layers=2) for n, m in EXPERTS.items()},
    }


@pytest.fixture(scope="module")
def wanted(request, paths, tmp_path_factory):
    """The torch backend on one rank: ({family: curve}, folder of its exports)"""
    runs = {name: ((paths[name],), {}) for name in asked_for(request)}
    out = tmp_path_factory.mktemp("torch")
    return world.run(train_all, 1, runs, str(out), backend="torch", **SHORT)[0], out


@pytest.fixture(scope="module")
def trained(request, paths, tmp_path_factory):
    layouts = {**LAYOUTS, **{f"{n}, experts": pair for n, pair in EXPERT_LAYOUTS.items()}}
    keys = {**SHORT, **TWO_ROWS}
    return shared_worlds(request, tmp_path_factory, layouts, lambda n: ((paths[n],), {}), **keys)


@pytest.fixture(scope="module")
def trips(paths, tmp_path_factory):
    @functools.cache
    def run(ranks: int, **keys):
        out = tmp_path_factory.mktemp("trips")
        return world.run(round_trip, ranks, paths, str(out), keys)[0], out

    return run


@pytest.mark.parametrize(
    "case, layout",
    thinned([name for name in DENSE if name not in OF_OTHERS], LAYOUTS, EVERYWHERE, FEW)
    + thinned([name for name in DENSE if name in OF_OTHERS], LAYOUTS, [], ["tp2_sp"])
    + [
        cell(name, f"{layout}, experts", full=layout in (MOST if name in OF_OTHERS else PRODUCTS))
        for name in EXPERTS
        for layout in EXPERT_LAYOUTS
    ],
)
def test_family_trains_as_torch_on_one_rank(case, layout, wanted, trained):
    (curves, folder), (ranks, out) = wanted, trained(layout)
    for got in ranks:
        assert_same_curve(got[case], curves[case])
    assert_same_tensors(tensors(out / case), tensors(folder / case))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, paths, trips):
    got, _ = trips(1)
    model = AutoModelForCausalLM.from_pretrained(paths[name]).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits
    torch.testing.assert_close(torch.tensor(got[name]), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_gives_the_same_bytes(name, paths, trips):
    _, out = trips(4, **TP2, **SP, **PP2)
    assert_same_bytes(tensors(out / name), tensors(paths[name]))


def test_layers_of_exaone_moe_that_transformers_ignores_are_exported_as_they_are(paths, tmp_path):
    shutil.copytree(paths["exaone_moe"], tmp_path / "model")
    values = {**tensors(tmp_path / "model"), "mtp.fc.weight": torch.ones(32, 64)}
    save_file(values, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    world.run(round_trip, 1, {"model": str(tmp_path / "model")}, str(tmp_path / "out"), {})
    assert_same_bytes(tensors(tmp_path / "out/model"), values)


def as_kimi(path: str, out: str) -> tuple:
    """Logits of ours and of plain torch for a model whose config.json has a type that transformers
    does not know.
    """
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.model import load_torch_model

    models = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused")).eval()
    models.save_pretrained(out)
    with torch.no_grad():
        ours = models.gather_logits(models(torch.tensor(TOKENS)))
        return ours.tolist(), load_torch_model(path).eval()(torch.tensor(TOKENS)).logits.tolist()


def test_kimi_k2_is_read_as_deepseek_v3_and_keeps_its_name(paths, trips, tmp_path):
    shutil.copytree(paths["deepseek_v3_experts"], tmp_path / "kimi")
    config = json.loads((tmp_path / "kimi/config.json").read_text())
    config |= dict(model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.Config"})
    (tmp_path / "kimi/config.json").write_text(json.dumps(config))
    ours, torchs = world.run(as_kimi, 1, str(tmp_path / "kimi"), str(tmp_path / "out"))[0]
    wanted = torch.tensor(trips(1)[0]["deepseek_v3_experts"])
    for got in (ours, torchs):
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "kimi_k2"


@pytest.fixture(scope="module")
def resharded(paths, tmp_path_factory):
    """Exports of the models that went through checkpoints of tp2 with sequence parallelism into two
    stages.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    world.run(checkpoints, 2, paths, str(folder / "saved"), {**TP2, **SP})
    world.run(
        round_trip,
        2,
        {name: str(folder / "saved" / name) for name in paths},
        str(folder / "out"),
        PP2,
    )
    return folder / "out"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_tp2_is_the_same_model_at_pp2(name, paths, resharded):
    assert_same_bytes(tensors(resharded / name), tensors(paths[name]))


# -- adapters

ADAPTED = tiny.ADAPTED | tiny_moe.ADAPTED
ADAPTER_LAYOUTS = {
    "one": (1, {}),
    "torch": (1, dict(backend="torch")),
    "tp2": (2, TP2),
    "tp2_sp_packed": (2, {**TP2, **SP, **PACKED}),
    "pp2": (2, PP2),
}


# In more layouts than tp2_sp_packed: latent and linear attention, norms after the layers, fused
# rows, sinks
UNLIKE = ("deepseek_v3", "gemma2", "phi3", "qwen3_next", "gpt_oss")
# Without sequence parallelism: matrices that tensor parallelism does not cut, and the embedding.
UNCUT = ("deepseek_v3", "gemma2")


def names_in(layout: str) -> list[str]:
    """The families whose adapters `make test` trains in a layout."""
    return list({"tp2_sp_packed": ADAPTED, "tp2": UNCUT}.get(layout, UNLIKE))


def train_adapters(paths: dict, references: str, out: str, names: list, keys: dict) -> dict:
    return {
        name: train_from_adapter(
            paths[name],
            f"{out}/{name}",
            f"{references}/{name}/start",
            **{**BRIEF, **TWO_ROWS, **keys},
        )
        for name in names
    }


def train_all_with_peft(paths: dict, out: str) -> dict:
    return {
        name: train_with_peft(paths[name], f"{out}/{name}", targets=targets)
        for name, targets in ADAPTED.items()
    }


@pytest.fixture(scope="module")
def with_peft(paths, tmp_path_factory):
    out = tmp_path_factory.mktemp("peft")
    return world.run(train_all_with_peft, 1, paths, str(out))[0], out


def check_adapters(layout, names, paths, with_peft, tmp_path):
    (curves, folder), (ranks, keys) = with_peft, ADAPTER_LAYOUTS[layout]
    for got in world.run(train_adapters, ranks, paths, str(folder), str(tmp_path), names, keys):
        for name in names:
            assert_same_curve(got[name], curves[name])
    for name in names:
        assert_same_tensors(adapter_of(tmp_path / name), adapter_of(folder / name / "end"))


@pytest.mark.parametrize("layout", ADAPTER_LAYOUTS)
def test_adapters_train_as_with_peft(layout, paths, with_peft, tmp_path):
    check_adapters(layout, names_in(layout), paths, with_peft, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("layout", [name for name in ADAPTER_LAYOUTS if name != "tp2_sp_packed"])
def test_adapters_of_more_families_train_as_with_peft(layout, paths, with_peft, tmp_path):
    names = [name for name in ADAPTED if name not in names_in(layout)]
    if layout == "tp2":  # experts need sequence parallelism
        names = [name for name in names if name not in EXPERTS]
    check_adapters(layout, names, paths, with_peft, tmp_path)


def refused_adapters(path: str) -> str:
    from mca_lite import AutoModel, TrainingArguments, part_lora

    models = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused"))
    with pytest.raises(ValueError) as error:
        part_lora.inject(models, part_lora.LoraSpec())
    return str(error.value)


def test_adapters_of_fused_projections_are_refused(paths):
    text = world.run(refused_adapters, 1, paths["phi3"])[0]
    assert "gate_up_proj, qkv_proj of phi3" in text and "lora_target: " in text


def zeros_behind_the_embedding(paths: list) -> list:
    """True for each model whose embedding dropout reaches, and for its layers."""
    from mca_lite import AutoModel, TrainingArguments

    out = []
    for path, keys in paths:
        [model] = AutoModel.from_pretrained(
            path, TrainingArguments(output_dir="unused", **keys)
        ).train()
        embedded = model.embedding(torch.tensor(TOKENS))
        out.append((bool((embedded == 0).any()), model.decoder.layers[0].mlp_bda.dropout))
    return out


def test_dropout_of_the_residual_stream_is_the_configs_and_leaves_the_embedding_alone(tmp_path):
    seed = tiny.save_model(tmp_path / "seed", "seed_oss", residual_dropout=0.3)
    phi = tiny.save_model(tmp_path / "phi", "phi3", resid_pdrop=0.4)
    llama = tiny.save_model(tmp_path / "llama", "llama")
    got = world.run(
        zeros_behind_the_embedding, 1, [(seed, {}), (phi, {}), (llama, dict(hidden_dropout=0.5))]
    )[0]
    assert got == [(False, 0.3), (False, 0.4), (True, 0.5)]


def embedded_in_bf16(path: str) -> list:
    from mca_lite import AutoModel, TrainingArguments

    [model] = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused", bf16=True))
    return model.embedding(torch.tensor(TOKENS)).transpose(0, 1).float().tolist()


def test_embeddings_in_bf16_are_scaled_by_the_factor_in_bf16(tmp_path):
    """The factors are transformers': sqrt(12) is 3.4641, and 3.4688 in bf16."""
    path = tiny.save_model(tmp_path / "model", "gemma3_text")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    wanted = theirs.get_input_embeddings()(torch.tensor(TOKENS))
    assert world.run(embedded_in_bf16, 1, path)[0] == wanted.float().tolist()


def with_masks(path: str) -> list:
    """Losses without a mask and with the causal ones; the error for others."""
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.batch import get_ltor_masks_and_position_ids

    model = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused"))
    ids = torch.arange(10).view(2, 5)
    mask, _ = get_ltor_masks_and_position_ids(ids)
    losses = [model(ids, attention_mask=m, labels=ids) for m in (None, mask, mask[:1])]
    errors = []
    for other in (~mask, mask.int(), mask[0], mask[:, :, 1:], torch.ones(2, 5)):
        with pytest.raises(ValueError) as error:
            model(ids, attention_mask=other, labels=ids)
        errors.append(str(error.value))
    return [*(x.tolist() for x in losses), *errors]


def test_the_causal_mask_changes_nothing_and_others_are_refused(paths):
    [[plain, of_rows, of_all, *errors]] = world.run(with_masks, 1, paths["gemma2"])
    assert of_rows == of_all == plain
    assert len(errors) == 5 and all("attention is causal" in error for error in errors)


def test_what_only_local_layers_have_is_refused_with_transformer_engine():
    from mca_lite import McaModelConfig

    sizes = dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, transformer_impl="transformer_engine"
    )
    with pytest.raises(
        ValueError, match="(?s)needs post_norms, .*try: transformer_impl: local or auto"
    ):
        McaModelConfig(**sizes, post_norms=True)


@pytest.mark.parametrize("name", ("deepseek_v2", "deepseek_v3"))
def test_flops_of_latent_attention_are_six_per_weight_and_the_core(name):
    from mca_lite.args import TrainingArguments
    from mca_lite.log import model_sizes
    from mca_lite.model_config import from_hf_config

    hf = tiny.hf_config(name)
    model = AutoModelForCausalLM.from_config(hf)
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed_tokens" not in n
    )
    ours = from_hf_config(hf, TrainingArguments(output_dir="unused"))
    for config in (hf, ours):
        assert model_sizes(config).weights == weights
        # 2 layers of 4 heads: queries and keys of 6 + 4 channels, values of 7
        assert model_sizes(config).core == 2 * 4 * (6 + 4 + 7) / 2
    config = tiny_moe.hf_config("deepseek_v3", first_k_dense_replace=4, num_nextn_predict_layers=1)
    layer, vocabulary = (weights - 61 * 32) / 2, 61 * 32
    if name == "deepseek_v3":
        ahead = from_hf_config(config, TrainingArguments(output_dir="unused", mtp_num_layers=1))
        assert model_sizes(ahead).weights == 5 * layer + 2 * 32**2 + 2 * vocabulary


@pytest.mark.parametrize("name", ("qwen3_5_text", "qwen3_next"))
def test_plan_and_flops_of_a_hybrids_prediction_layer_are_counted_by_hand(name):
    """The layer has full attention and the last layer's MLP, whatever attention that has."""
    from mca_lite.args import TrainingArguments
    from mca_lite.log import model_sizes
    from mca_lite.model_config import from_hf_config
    from mca_lite.tool_plan_memory import ModelTensors

    kinds = dict(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    save = tiny_moe if name in tiny_moe.MODELS else tiny
    hf = save.hf_config(name, **kinds)
    hidden, vocabulary = 32, 32 * 61
    attention = hidden * (2 * 64 + 2 * 32 + 64)  # queries and gates, keys, values, output
    of_mlp = 3 * hidden * 48
    used = of_mlp
    if name == "qwen3_next":  # 4 experts of 16, 2 of them for a token
        shared = 3 * hidden * 24 + hidden + hidden * 4
        of_mlp = shared + 4 * 3 * hidden * 16
        used = shared + 2 * 3 * hidden * 16
    norms = 5 * hidden + 2 * 16
    one, ahead = (
        from_hf_config(hf, TrainingArguments(output_dir="unused", mtp_num_layers=count))
        for count in (0, 1)
    )
    total = attention + of_mlp + norms + 2 * hidden**2
    assert ModelTensors(ahead).total - ModelTensors(one).total == total
    sizes, before = model_sizes(ahead), model_sizes(one)
    assert sizes.weights - before.weights == attention + used + 2 * hidden**2 + vocabulary
    assert sizes.core - before.core == 4 * 2 * 16 / 2  # 4 heads of 16
    assert sizes.linear == before.linear


def test_plan_and_flops_of_two_sizes_of_heads_are_counted_by_hand():
    from mca_lite.args import TrainingArguments
    from mca_lite.log import model_sizes
    from mca_lite.model_config import from_hf_config
    from mca_lite.tool_plan_memory import ModelTensors

    hf = tiny.hf_config("gemma4_text")
    model = AutoModelForCausalLM.from_config(hf)
    # a head of the embedding's weight, and no products with the embedding itself
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    ours = from_hf_config(hf, TrainingArguments(output_dir="unused"))
    for config in (hf, ours):
        assert model_sizes(config).weights == weights
        assert model_sizes(config).core == 4 * (8 + 8 + 16 + 16) / 2
    factors = 2  # of layers, no parameters
    assert ModelTensors(ours).total - factors == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(num_kv_shared_layers=1), "num_kv_shared_layers"),
        (dict(enable_moe_block=True), "enable_moe_block"),
        (dict(hidden_size_per_layer_input=4), "hidden_size_per_layer_input"),
        (dict(attention_k_eq_v=False), "attention_k_eq_v"),
        (dict(layer_types=["full_attention"] * 2), "sliding_attention"),
    ],
)
def test_other_models_of_gemma4_are_refused(changes, words):
    from mca_lite.model_config import from_hf_config

    with pytest.raises(ValueError, match=words):
        from_hf_config(tiny.hf_config("gemma4_text", **changes))


def test_layers_of_hunyuan_with_different_numbers_of_experts_of_a_token_are_refused():
    from mca_lite.model_config import from_hf_config

    with pytest.raises(ValueError, match=r"moe_topk.*\[2, 3, 2, 2\].*use_mca: false"):
        from_hf_config(tiny_moe.hf_config("hunyuan_v1_moe", moe_topk=[2, 3, 2, 2]))


def test_ranks_that_would_share_a_query_group_of_gemma4_are_refused():
    from mca_lite.args import TrainingArguments
    from mca_lite.model_config import from_hf_config

    args = TrainingArguments(output_dir="unused", tensor_model_parallel_size=4)
    with pytest.raises(ValueError, match="(?s)4 and 2 query groups.*tensor_model_parallel_size: 2"):
        from_hf_config(tiny.hf_config("gemma4_text"), args)


def test_the_page_names_the_families_that_there_are_and_why_others_are_not():
    from mca_lite.families import FAMILIES as TABLE
    from tests.tools.family_table import NOT_BUILT, PAGE, named_families

    there, absent = named_families(PAGE.read_text())
    assert there == TABLE.keys()
    assert absent == NOT_BUILT
