"""Layers for multi-token prediction, against a reference of transformers' own MtpLayer in plain
torch.
"""

import functools
import itertools
import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from mca_lite.args import parse_args
from mca_lite.run import make_plan
from tests.shared import picture_files, pictures, tiny, tiny_moe, world
from tests.shared.chats import conversation, write_records
from tests.shared.commands import keys_of
from tests.shared.files import assert_same_bytes, changed, tensors
from tests.shared.layouts import CP2, DIST_OPT, FULL, OVERLAP, PACKED, PP2, SP, TP2, TWO_ROWS, VPP2
from tests.shared.lora_tools import adapter_of, with_drawn_adapters
from tests.shared.training import BRIEF, arguments, assert_same_curve, read_log, refusal, train

COUNT, FACTOR = 2, 0.3
KEYS = dict(BRIEF, adam_epsilon=1e-4, export=True)
MTP = dict(mtp_num_layers=COUNT, mtp_loss_scaling_factor=FACTOR)
EP2 = dict(expert_model_parallel_size=2)
MEAN = dict(calculate_per_token_loss=False)
LAYOUTS = {
    "one": (1, TWO_ROWS),
    "one_packed": (1, PACKED),
    "tp2_sp_full_recompute": (2, {**TP2, **SP, **FULL, **TWO_ROWS}),
    "pp2_packed": (2, {**PP2, **PACKED, **DIST_OPT}),
    "dp2_overlap": (2, OVERLAP),
    "pp2_uneven": (2, {**PP2, **TWO_ROWS, "pipeline_model_parallel_layout": "Ettt|tL"}),
    "pp2_vpp2": (2, {**PP2, **VPP2, **TWO_ROWS}),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "cp2ep2": (4, {**CP2, **EP2, **DIST_OPT}),
    "ep2pp2": (4, {**EP2, **PP2}),
    "tp2sp_pp2": (4, {**TP2, **SP, **PP2}),
}


def text_of(model):
    """The decoder of a transformers model, of pictures too."""
    return getattr(model.model, "language_model", model.model)


def count_of(model) -> int:
    """Extra layers: files of Qwen's hybrids have one."""
    return 1 if model.config.model_type.startswith("qwen") else COUNT


def extra_layers(model):
    """transformers' layers for multi-token prediction, with random weights."""
    from transformers.modeling_layers import MtpLayer

    torch.manual_seed(5)
    text = text_of(model)
    config, norm = text.config, type(text.norm)
    *_, full = [layer for layer in text.layers if hasattr(layer, "self_attn")]
    layers = torch.nn.ModuleList(
        MtpLayer(config, type(full), norm, full.self_attn.layer_idx) for _ in range(count_of(model))
    )
    with torch.no_grad():
        for parameter in layers.parameters():
            scale, shift = (0.2, 1.0) if parameter.dim() == 1 else (0.1, 0.0)
            parameter.copy_(shift + scale * torch.randn_like(parameter))
        for buffer in layers.buffers():
            buffer.copy_(0.3 * torch.rand_like(buffer))
    return layers


# modules of MtpLayer -> their names in files of DeepSeek and GLM, and of Qwen
_AFTER = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
_BESIDE = {
    "mtp_block.": "layers.0.",
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "post_norm.": "norm.",
}


def in_files(layers, first: int) -> dict[str, torch.Tensor]:
    """The layers' tensors as checkpoints have them: behind the others, or under mtp; an expert's
    projections by themselves.
    """
    out = {}
    is_qwen = layers[0].config.model_type.startswith("qwen")
    for k, layer in enumerate(layers):
        for name, value in layer.state_dict().items():
            module, _, rest = name.partition(".")
            names = _BESIDE if is_qwen else _AFTER
            name = names.get(f"{module}.", f"{module}.") + rest
            prefix = f"mtp.{name}" if is_qwen else f"model.layers.{first + k}.{name}"
            for e, matrix in enumerate(value) if ".experts." in name else ():
                stem = prefix.rsplit(".", 1)[0] + f".{e}."
                is_down = name.endswith("down_proj")
                parts = (
                    {"down": matrix}
                    if is_down
                    else dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
                )
                out.update(
                    {f"{stem}{part}_proj.weight": rows.clone() for part, rows in parts.items()}
                )
            if ".experts." not in name:
                out[prefix] = value.clone()
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_with_extra_layers(
        tmp_path_factory.mktemp("models"), "deepseek_v3", num_nextn_predict_layers=COUNT
    )


def save_with_extra_layers(folder: Path, name: str, **keys) -> str:
    """A model whose files hold more layers, DeepSeek's with copies of the embedding and the
    head."""
    from mca_lite.model import load_torch_model

    save = tiny_moe if name in tiny_moe.MODELS else tiny
    if name in pictures.FAMILIES:
        save = pictures
    save.save_model(folder / "plain", name, **keys)
    shutil.copytree(folder / "plain", folder / "full")
    model = load_torch_model(str(folder / "plain"))
    values = load_file(folder / "plain/model.safetensors")
    values.update(in_files(extra_layers(model), 4))
    for layer in () if name.startswith("qwen") else (4, 5):
        values[f"model.layers.{layer}.embed_tokens.weight"] = values[
            "model.embed_tokens.weight"
        ].clone()
        values[f"model.layers.{layer}.shared_head.head.weight"] = values["lm_head.weight"].clone()
    save_file(values, folder / "full/model.safetensors", metadata={"format": "pt"})
    return str(folder / "full")


def reference(path: str, out: str, **changes) -> list:
    """(loss, grad norm, loss of the extra layers) of each step, in plain torch; out/end holds the
    weights.
    """
    from mca_lite.files import IGNORE_INDEX
    from mca_lite.trainer import McaTrainer

    class Oracle(McaTrainer):
        metrics_keys = ["loss", "mtp_loss"]

        def __init__(self, model, **kwargs):
            super().__init__(model=model, **kwargs)
            # beside adapters everything else is frozen
            is_whole = not hasattr(model, "finetuning")
            model.extra = extra_layers(model).requires_grad_(is_whole)
            models.append(model)

        def forward_step(self, data_iterator, model):
            inputs, hf = self._prepare_train_inputs(data_iterator), model.model
            ids, labels, positions = inputs["input_ids"], inputs["labels"], inputs["position_ids"]

            def losses(hidden, labels):
                return F.cross_entropy(
                    hf.lm_head(hidden)[0], labels[0], ignore_index=IGNORE_INDEX, reduction="none"
                )

            text = text_of(hf)
            embedded = text.embed_tokens(ids)
            seen = {n: inputs[n] for n in ("pixel_values", "image_grid_thw") if n in inputs}
            if seen:
                is_image = ids == pictures.IMAGE
                features = torch.cat(hf.model.get_image_features(**seen).pooler_output)
                embedded = embedded.masked_scatter(is_image[..., None], features)
                seen["mm_token_type_ids"] = is_image.int()
            hidden = hf.model(ids, **seen).last_hidden_state
            of_zero = text.embed_tokens(torch.zeros_like(ids[:, :1]))
            rotary = text.rotary_emb(hidden, positions)
            mask = torch.full((1, 1, ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
            main, more, trained, ahead = losses(hidden, labels).sum(), 0.0, labels, 0
            for layer in hf.extra:
                embedded = torch.cat((embedded[:, 1:], of_zero), 1)
                labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
                hidden = layer(embedded, hidden, rotary, mask, positions, None)
                more, ahead = (
                    more + losses(hidden, labels).sum(),
                    ahead + (labels != IGNORE_INDEX).sum(),
                )
            return main, functools.partial(self._loss, (trained != IGNORE_INDEX).sum(), more, ahead)

        def _loss(self, count, more, ahead, main):
            # the log has the mean that is minimised: of tokens, or of micro-batches' means
            shared = 1 if self.args.calculate_per_token_loss else count.clamp(min=1)
            pairs = {"loss": (main / shared, count / shared), "mtp_loss": (more, ahead)}
            metrics = {
                name: torch.stack([torch.as_tensor(x).detach().float() for x in pair])
                for name, pair in pairs.items()
            }
            total = (main + FACTOR / len(models[0].extra) * more) * self.backend.micro_batch_weight
            return total, count.int(), metrics

    models = []
    curve = train(path, out, backend="torch", trainer_class=Oracle, **{**KEYS, **changes})
    Path(out, "extra").mkdir()
    save_file(in_files(models[0].extra, 4), f"{out}/extra/model.safetensors")
    return with_losses(curve, out)


def with_losses(curve: list, out: str) -> list:
    """(loss, grad norm) of each step with the loss of the extra layers, from the log."""
    return [(*pair, line["mtp_loss"]) for pair, line in zip(curve, read_log(out), strict=True)]


def train_layers(path: str, out: str, **keys) -> list:
    return with_losses(train(path, out, **{**KEYS, **MTP, **keys}), out)


@pytest.fixture(scope="module")
def wanted(path, tmp_path_factory):
    """wanted(**changes) -> (curve of the reference, its weights)"""

    @functools.cache
    def run(**changes):
        out = tmp_path_factory.mktemp("reference")
        [curve] = world.run(reference, 1, path, str(out), **changes)
        weights = {n: t for n, t in tensors(out).items() if not n.startswith("extra.")}
        return curve, {**weights, **tensors(out / "extra")}

    return run


def assert_same(got, curve):
    for ours, theirs in zip(got, curve, strict=True):
        assert abs(ours[2] - theirs[2]) < 1e-5, (
            f"loss of the extra layers {ours[2]} instead of {theirs[2]}"
        )
    assert_same_curve([ours[:2] for ours in got], [theirs[:2] for theirs in curve])


def check(path, reference, tmp_path, ranks, keys):
    curve, weights = reference
    for got in world.run(train_layers, ranks, path, str(tmp_path), **keys):
        assert_same(got, curve)
    ours = tensors(tmp_path)
    assert ours.keys() == tensors(path).keys()
    for name, value in ours.items():
        copied = name.rsplit(".", 2)[-2] in ("embed_tokens", "head")  # of the trained ones
        source = (
            "model.embed_tokens.weight"
            if "embed_tokens" in name
            else "lm_head.weight"
            if copied
            else name
        )
        torch.testing.assert_close(
            value, weights[source], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


# cut by tensor parallelism and over stages: each is there without the other, and the embedding's
# copy on the last stage is reduced as that of a tied model is, which test_parity trains at tp2pp2
# (what a context rank's border and a rank's experts are is trained in cp2_packed and ep2pp2)
PRODUCTS = ("tp2sp_pp2", "cp2ep2")


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.full] if n in PRODUCTS else []) for n in LAYOUTS]
)
def test_extra_layers_train_as_in_plain_torch(layout, path, wanted, tmp_path):
    check(path, wanted(), tmp_path, *LAYOUTS[layout])


@pytest.mark.parametrize("ranks, keys", [(1, {}), (2, {**CP2}), (2, {**PP2, **VPP2})])
def test_the_mean_over_micro_batches_weighs_them_alike(ranks, keys, path, wanted, tmp_path):
    assert wanted(**MEAN)[0] != wanted()[0]
    check(path, wanted(**MEAN), tmp_path, ranks, {**keys, **MEAN})


@pytest.mark.parametrize(
    "family, key", [("glm4_moe", "num_mtp_layers"), ("glm4_moe_lite", "num_nextn_predict_layers")]
)
def test_extra_layers_of_glm_train_as_in_plain_torch(family, key, tmp_path):
    path = save_with_extra_layers(tmp_path / "model", family, **{key: COUNT})
    [curve] = world.run(reference, 1, path, str(tmp_path / "torch"))
    for got in world.run(train_layers, 2, path, str(tmp_path / "ours"), **TP2, **SP):
        assert_same(got, curve)
    assert tensors(tmp_path / "ours").keys() == tensors(path).keys()


ADAPTERS = {
    "one_packed": (1, PACKED),
    "tp2_sp_full_recompute": (2, {**TP2, **SP, **FULL, **TWO_ROWS}),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "cp2": (2, CP2),
    "ep2": (2, {**EP2, **DIST_OPT}),
}


@pytest.fixture(scope="module")
def of_adapters(path, tmp_path_factory):
    """(curve of the reference with adapters, its folder)"""
    out = str(tmp_path_factory.mktemp("adapters"))
    keys = dict(adapt=with_drawn_adapters, export=False)
    return world.run(reference, 1, path, out, **keys)[0]


@pytest.mark.parametrize("layout", ADAPTERS)
def test_adapters_of_the_decoder_learn_from_frozen_extra_layers(
    layout, path, of_adapters, tmp_path
):
    ranks, keys = ADAPTERS[layout]
    of_run = dict(adapt=with_drawn_adapters, export=True, **keys)
    for got in world.run(train_layers, ranks, path, str(tmp_path), **of_run):
        assert_same(got, of_adapters)
    names = adapter_of(tmp_path)
    assert names and not any(f"layers.{layer}." in name for name in names for layer in (4, 5))


def beside_a_copy(path: str, layout: dict) -> str:
    from mca_lite import AutoModel

    models = AutoModel.from_pretrained(path, arguments(**MTP, **layout))
    return refusal(with_drawn_adapters, models, targets=("embed_tokens",))


def test_adapters_of_an_embedding_on_two_stages_are_refused(path):
    [taken] = world.run(beside_a_copy, 1, path, {})
    refused = world.run(beside_a_copy, 2, path, PP2)
    assert not taken and all("try: lora_target without embed_tokens" in text for text in refused)


# -- one layer of Qwen's hybrids, beside the decoder

ONE = dict(mtp_num_layers=1)
QWEN_LAYOUTS = {
    "one_packed": (1, PACKED),
    "tp2_sp": (2, {**TP2, **SP, **TWO_ROWS}),
    "pp2_packed": (2, {**PP2, **PACKED, **DIST_OPT}),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "ep2": (2, {**EP2, **DIST_OPT}),
    "tp2pp2": (4, {**TP2, **SP, **PP2}),
    "tp2_sp_full_recompute": (2, {**TP2, **SP, **FULL}),
    "pp2_vpp2": (2, {**PP2, **VPP2}),
    "dp2_overlap": (2, OVERLAP),
    "cp2ep2": (4, {**CP2, **EP2, **PACKED}),
    "ep2tp2": (4, {**EP2, **TP2, **SP}),
    "cp2tp2_sp": (4, {**CP2, **TP2, **SP, **PACKED}),
}


TEXTS = [(7,), (12,), (9,), (5,), (11,), (8,), (6,), (10,)]
# a picture at the start, the last, several, side by side, and micro-batches without any
WITH_PICTURES = [(3, (2, 2), 5), (4, (1, 3), 2, (2, 1), 3), (9,), (6,)]
WITH_PICTURES += [((2, 3), 4), (7,), (5, (2, 2), (3, 1), 3), (4, (2, 2))]


def data_of(name: str, shapes: list) -> dict:
    """Documents for a model with pictures, which has positions along three axes."""
    if name not in pictures.FAMILIES:
        return {}
    generator = torch.Generator().manual_seed(3)
    return dict(data=[pictures.document(generator, *pieces) for pieces in shapes])


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    """hybrids(model type, sees, **changes) -> (folder of a model, curve of the reference, its
    weights)"""

    @functools.cache
    def save(name: str, sees: bool = False, **changes):
        folder = tmp_path_factory.mktemp(name)
        path = save_with_extra_layers(folder, name, **changes)
        data = data_of(name, WITH_PICTURES if sees else TEXTS)
        [curve] = world.run(reference, 1, path, str(folder / "reference"), **data)
        extra = tensors(folder / "reference/extra")
        return path, curve, {**tensors(folder / "reference"), **extra}

    return save


SHORT = {
    ("qwen3_next", "pp2_packed"),
    ("qwen3_next", "cp2_packed"),
    ("qwen3_5_text", "tp2_sp"),
    ("qwen3_5_moe_text", "ep2"),
    ("qwen3_5", "pp2_packed"),
}
CELLS = [
    *(("qwen3_next", layout) for layout in QWEN_LAYOUTS),
    *(("qwen3_5_text", layout) for layout in ("tp2_sp", "pp2_packed", "cp2_packed", "tp2pp2")),
    *(("qwen3_5_moe_text", layout) for layout in ("tp2_sp", "ep2", "ep2tp2")),
    *(("qwen3_5", layout) for layout in ("tp2_sp", "pp2_packed", "cp2_packed")),
    *(("qwen3_5_moe", layout) for layout in ("ep2", "cp2_packed")),
]


@pytest.mark.parametrize(
    "name, layout",
    [pytest.param(*cell, marks=[] if cell in SHORT else [pytest.mark.full]) for cell in CELLS],
)
def test_the_extra_layer_of_a_hybrid_trains_as_in_plain_torch(name, layout, hybrids, tmp_path):
    check_hybrid(name, layout, hybrids, tmp_path)


SEEING = {
    "qwen3_5": ("tp2_sp", "one_packed", "dp2_overlap", "cp2tp2_sp"),
    "qwen3_5_moe": ("cp2_packed", "ep2", "ep2tp2", "tp2_sp_full_recompute", "cp2ep2"),
}


@pytest.mark.parametrize(
    "name, layout",
    [
        pytest.param(name, layout, marks=[pytest.mark.full] if layout != layouts[0] else [])
        for name, layouts in SEEING.items()
        for layout in layouts
    ],
)
def test_the_extra_layer_sees_the_features_of_pictures(name, layout, hybrids, tmp_path):
    check_hybrid(name, layout, hybrids, tmp_path, sees=True)


def check_hybrid(name: str, layout: str, hybrids, tmp_path, sees: bool = False):
    path, curve, weights = hybrids(name, sees=sees)
    ranks, keys = QWEN_LAYOUTS[layout]
    keys = {**keys, **ONE, **data_of(name, WITH_PICTURES if sees else TEXTS)}
    for got in world.run(train_layers, ranks, path, str(tmp_path), **keys):
        assert_same(got, curve)
    ours = tensors(tmp_path)
    assert ours.keys() == tensors(path).keys()
    for key, value in ours.items():
        torch.testing.assert_close(
            value, weights[key], rtol=0, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_the_extra_layer_attends_fully_where_the_last_layer_does_not(hybrids, tmp_path):
    path, curve, _ = hybrids("qwen3_next", full_attention_interval=3)
    assert not any("layers.3.self_attn" in name for name in tensors(path))
    layout = dict(PP2, pipeline_model_parallel_layout="auto", **ONE)
    for got in world.run(train_layers, 2, path, str(tmp_path), **layout):
        assert_same(got, curve)


@pytest.mark.parametrize(
    "layout",
    [
        "pp2_packed",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("tp2_sp", "cp2_packed", "tp2pp2")),
    ],
)
def test_an_extra_layer_shares_an_embedding_that_is_the_head(layout, hybrids, tmp_path):
    path, curve, weights = hybrids("qwen3_5_text", tie_word_embeddings=True)
    ranks, keys = QWEN_LAYOUTS[layout]
    for got in world.run(train_layers, ranks, path, str(tmp_path), **{**keys, **ONE}):
        assert_same(got, curve)
    ours = tensors(tmp_path)
    assert ours.keys() == tensors(path).keys() and "lm_head.weight" not in ours
    for key, value in ours.items():
        torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-5)


def stacked(path: str, folder: Path, *prefixes: str) -> str:
    """A copy of a model whose layers under the prefixes have their experts in one tensor each."""

    def change(values: dict) -> None:
        for prefix in prefixes:
            singles = {
                n: values.pop(n) for n in list(values) if re.match(rf"{prefix}.*experts\.\d", n)
            }
            for stem in sorted({name.partition(".0.down_proj")[0] for name in singles}):
                if ".experts." in stem + "." and f"{stem}.0.down_proj.weight" in singles:
                    experts = range(tiny_moe.EXPERTS)
                    downs = [singles[f"{stem}.{e}.down_proj.weight"] for e in experts]
                    values[f"{stem}.down_proj"] = torch.stack(downs)
                    both = [
                        torch.cat([singles[f"{stem}.{e}.{p}_proj.weight"] for p in ("gate", "up")])
                        for e in experts
                    ]
                    values[f"{stem}.gate_up_proj"] = torch.stack(both)

    return changed(path, folder, change)


STACKS = {"none": (), "decoder": ("model",), "extra": ("mtp",), "both": ("model", "mtp")}


def exports_of(paths: dict[str, str], out: str, **keys) -> None:
    """Models exported with their extra layer trained, and carried; by the torch backend too."""
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.backend_torch import TorchBackend
    from mca_lite.model import load_torch_model

    for name, path in paths.items():
        for count in (0, 1):
            args = TrainingArguments(output_dir="unused", mtp_num_layers=count, **keys)
            AutoModel.from_pretrained(path, args).save_pretrained(f"{out}/{name}/{count}")
        if not keys:
            plain = TrainingArguments(output_dir="unused")
            TorchBackend(load_torch_model(path), plain).export_hf(f"{out}/{name}/torch", "5GB")


@pytest.mark.parametrize(
    "ranks, keys",
    [(1, {}), (4, {**EP2, **PP2}), pytest.param(4, {**TP2, **SP, **PP2}, marks=pytest.mark.full)],
)
def test_files_of_a_hybrid_come_out_as_they_went_in(ranks, keys, hybrids, tmp_path):
    path = hybrids("qwen3_5_moe")[0]
    paths = {n: stacked(path, tmp_path / "in" / n, *prefixes) for n, prefixes in STACKS.items()}
    if "expert_model_parallel_size" not in keys:
        paths["dense"] = hybrids("qwen3_5_text")[0]
    world.run(exports_of, ranks, paths, str(tmp_path / "out"), **keys)
    for name, source in paths.items():
        for export in (tmp_path / f"out/{name}").iterdir():
            assert_same_bytes(tensors(export), tensors(source))
    names = tensors(paths["extra"])
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.language_model.layers.3.mlp.experts.0.up_proj.weight" in names


def drawn(path: str, out: str, **keys) -> None:
    """A model with an extra layer drawn from a seed, exported."""
    from mca_lite import AutoConfig, AutoModel, TrainingArguments

    args = TrainingArguments(output_dir="unused", mtp_num_layers=1, **keys)
    config = AutoConfig.from_pretrained(path, args)
    config.name_or_path = None
    AutoModel.from_config(config, args, seed=3).save_pretrained(out)


@pytest.mark.parametrize(
    "name, key",
    [
        pytest.param("qwen3_next", "num_nextn_predict_layers", marks=pytest.mark.full),
        pytest.param("qwen3_5_text", "mtp_num_hidden_layers", marks=pytest.mark.full),
        ("qwen3_5_moe", "mtp_num_hidden_layers"),
    ],
)
def test_a_drawn_hybrid_has_the_same_extra_layer_in_every_layout(name, key, hybrids, tmp_path):
    path = hybrids(name)[0]
    world.run(drawn, 1, path, str(tmp_path / "one"))
    world.run(drawn, 4, path, str(tmp_path / "four"), **TP2, **SP, **PP2)
    ours = tensors(tmp_path / "four")
    assert_same_bytes(ours, tensors(tmp_path / "one"))
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in tensors(path).items()}
    assert ours["mtp.norm.weight"].eq(0).all() and ours["mtp.fc.weight"].std() > 0.01
    config = json.loads((tmp_path / "four/config.json").read_text())
    assert config.get("text_config", config)[key] == 1


@pytest.mark.parametrize("tied", (pytest.param(False, marks=pytest.mark.full), True))
def test_a_run_of_a_hybrid_resumes_in_another_layout(tied, hybrids, tmp_path):
    path, curve, _ = hybrids("qwen3_5_text", tie_word_embeddings=tied)
    saves = dict(save_strategy="steps", save_steps=1, export=False)
    world.run(train_layers, 2, path, str(tmp_path / "a"), **PP2, **saves, **ONE)
    keys = dict(TP2, **SP, **ONE, resume_from_checkpoint=str(tmp_path / "a/checkpoint-1"))
    for got in world.run(resumed, 2, path, str(tmp_path / "b"), **keys):
        assert_same([got], curve[1:])


def test_files_with_more_than_the_extra_layer_are_refused_where_it_is_trained(hybrids, tmp_path):
    """Another embedding, or a second layer with the first one's projection."""
    for name in ("mtp.embed_tokens.weight", "mtp.layers.1.input_layernorm.weight"):
        path = changed(
            hybrids("qwen3_5_text")[0],
            tmp_path / name,
            lambda values, name=name: values.update({name: torch.zeros(32)}),
        )
        [text] = world.run(loading, 1, path, 1)
        assert name in text and "mtp_num_layers: 0" in text
        assert world.run(loading, 1, path, 0) == [""]


def loading(path: str, count: int) -> str:
    from mca_lite import AutoModel

    return refusal(AutoModel.from_pretrained, path, arguments(mtp_num_layers=count))


def test_pictures_in_stages_and_frozen_layers_are_refused_beside_the_extra_layer(hybrids):
    path = hybrids("qwen3_5")[0]
    for text in world.run(taking_pictures, 2, path, **PP2):
        assert "pipeline_model_parallel_size: 1, mtp_num_layers: 0" in text
    [text] = world.run(freezing, 1, path)
    assert "mtp_num_layers: 0" in text and "frozen layers" in text


def test_a_run_on_pictures_in_stages_is_refused_before_it_starts(tmp_path):
    picture_files.save_whole_model(tmp_path / "model", "qwen3_5")
    picture = picture_files.draw(tmp_path / "0.png")
    write_records(
        tmp_path / "chats.jsonl", {**conversation("<image>what?", "y"), "images": [picture]}
    )
    words = [
        f"model_name_or_path={tmp_path / 'model'}",
        f"dataset={tmp_path / 'chats.jsonl'}",
        f"output_dir={tmp_path / 'out'}",
        f"cache_dir={tmp_path / 'cache'}",
        "max_steps=1",
        "train_from_scratch=true",
        "resize_vocab=true",
    ]
    assert make_plan(parse_args([*words, "mtp_num_layers=1"]))
    stages = [*words, "pipeline_model_parallel_size=2"]
    for ahead, is_refused in ((0, False), (1, True)):
        for text in world.run(planning, 2, [*stages, f"mtp_num_layers={ahead}"]):
            assert ("pipeline_model_parallel_size: 1, mtp_num_layers: 0" in text) == is_refused


def planning(words: list[str]) -> str:
    return refusal(make_plan, parse_args(words))


def taking_pictures(path: str, **keys) -> str:
    """The words that refuse a batch of one document with a picture."""
    from mca_lite.backend_megatron import MegatronBackend
    from mca_lite.batch import split
    from mca_lite.model import AutoModel

    args = arguments(**ONE, **keys)
    backend = MegatronBackend(AutoModel.from_pretrained(path, args), args)
    [document] = data_of("qwen3_5", WITH_PICTURES[:1])["data"]
    return refusal(backend.model_inputs, split(pictures.row_of(document)))


def freezing(path: str) -> str:
    from mca_lite import AutoModel
    from mca_lite.errors import Judge
    from mca_lite.finetuning import plan_frozen
    from mca_lite.part_scores import objective_keys

    args = arguments(**ONE)
    judge = Judge(args)
    keys = objective_keys("sft", finetuning_type="freeze")
    plan_frozen(AutoModel.from_pretrained(path, args), keys, judge)
    return refusal(judge.close)


AUX = dict(moe_aux_loss_coeff=0.05, moe_z_loss_coeff=0.01, moe_router_bias_update_rate=0.01)


def test_balancing_losses_of_extra_layers_are_the_same_in_every_layout(path, wanted, tmp_path):
    [one] = world.run(train_layers, 1, path, str(tmp_path / "one"), **PACKED, **AUX)
    assert abs(one[0][1] - wanted()[0][0][1]) > 1e-4, "the losses have no gradient"
    for ranks, keys in ((2, {**CP2, **EP2, **PACKED}), (2, {**PP2, **PACKED})):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        for got in world.run(train_layers, ranks, path, str(out), **keys, **AUX):
            assert_same(got, one)


# -- files


def round_trips(path: str, out: str, **keys) -> list:
    """The model exported with none, one and both layers trained, by the torch backend, and drawn
    from a seed with both.
    """
    from mca_lite import AutoConfig, AutoModel, TrainingArguments
    from mca_lite.backend_torch import TorchBackend
    from mca_lite.model import load_torch_model

    for count in (0, 1, 2):
        args = TrainingArguments(output_dir="unused", mtp_num_layers=count, **keys)
        AutoModel.from_pretrained(path, args).save_pretrained(f"{out}/{count}")
    config = AutoConfig.from_pretrained(path, args)
    config.name_or_path = None
    AutoModel.from_config(config, args, seed=3).save_pretrained(f"{out}/drawn")
    if not keys:
        TorchBackend(load_torch_model(path), TrainingArguments(output_dir="unused")).export_hf(
            f"{out}/torch", "5GB"
        )


@pytest.fixture(scope="module")
def exports(path, tmp_path_factory):
    out = tmp_path_factory.mktemp("exports")
    world.run(round_trips, 1, path, str(out / "one"))
    world.run(round_trips, 4, path, str(out / "four"), **TP2, **SP, **PP2)
    return out


@pytest.mark.parametrize(
    "name", ("one/0", "one/1", "one/2", "one/torch", "four/0", "four/1", "four/2")
)
def test_files_come_out_as_they_went_in_whether_layers_are_trained_or_carried(name, path, exports):
    assert_same_bytes(tensors(exports / name), tensors(path))


def test_copies_of_embedding_and_head_that_are_carried_grow_with_the_vocabulary(path):
    from mca_lite.weights_files import carried_tensors

    config, original = json.loads((Path(path) / "config.json").read_text()), tensors(path)
    rows = config["vocab_size"]
    carried = dict(carried_tensors(path, {**config, "vocab_size": rows + 3}))
    for layer, part in itertools.product((4, 5), ("embed_tokens", "shared_head.head")):
        name = f"model.layers.{layer}.{part}.weight"
        copy, old = carried.pop(name), original[name]
        assert copy.shape[0] == rows + 3 and copy[:rows].equal(old)
        torch.testing.assert_close(copy[rows:], old.mean(0).expand(3, -1))
    assert carried and all(value.equal(original[name]) for name, value in carried.items())


def test_a_copy_of_the_embedding_beside_a_vision_tower_is_carried(hybrids, tmp_path):
    from mca_lite.weights_files import carried_tensors

    name = "mtp.embed_tokens.weight"
    copy = torch.randn(tiny.VOCAB, 32)
    path = changed(
        hybrids("qwen3_5")[0], tmp_path / "model", lambda values: values.update({name: copy})
    )
    config = json.loads((Path(path) / "config.json").read_text())
    assert dict(carried_tensors(path, config))[name].equal(copy)


def test_layers_that_cannot_be_carried_any_more_are_missed(path):
    from mca_lite.weights_files import carried_tensors

    config = json.loads((Path(path) / "config.json").read_text())
    assert (
        len(list(carried_tensors(path, config))) > len(list(carried_tensors(path, config, 1))) > 0
    )
    for trained, missed in ((0, 1), (1, 1), (COUNT, 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert list(carried_tensors(f"{path}-gone", config, trained)) == []
        assert len([w for w in seen if "multi-token prediction" in str(w.message)]) == missed


def test_fresh_layers_are_the_same_in_every_layout(path, exports):
    ours = tensors(exports / "four/drawn")
    assert_same_bytes(ours, tensors(exports / "one/drawn"))
    assert ours.keys() == tensors(path).keys()
    assert torch.equal(
        ours["model.layers.5.embed_tokens.weight"], ours["model.embed_tokens.weight"]
    )


def drawn_with_more_layers(path: str, out: str) -> list:
    """Names of the tensors of a model whose config.json speaks of no extra layers, drawn with two
    and read again without.
    """
    from mca_lite import AutoConfig, AutoModel, TrainingArguments

    args = TrainingArguments(output_dir="unused", mtp_num_layers=2)
    AutoModel.from_config(AutoConfig.from_pretrained(path, args), args).save_pretrained(out)
    AutoModel.from_pretrained(out, TrainingArguments(output_dir="unused")).save_pretrained(
        f"{out}-again"
    )
    return [sorted(tensors(Path(folder))) for folder in (out, f"{out}-again")]


def test_an_exported_config_speaks_of_the_layers_that_the_files_hold(path, tmp_path):
    config = json.loads((Path(path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    args = str(tmp_path), str(tmp_path / "out")
    drawn, again = world.run(drawn_with_more_layers, 1, *args)[0]
    assert drawn == again == sorted(tensors(path))
    assert json.loads((tmp_path / "out/config.json").read_text()) == {
        **config,
        "num_nextn_predict_layers": 2,
    }


def test_a_run_resumes_in_another_layout(path, wanted, tmp_path):
    curve, _ = wanted()
    saves = dict(save_strategy="steps", save_steps=1, export=False)
    world.run(train_layers, 2, path, str(tmp_path / "a"), **PP2, **saves)
    keys = dict(TP2, **SP, resume_from_checkpoint=str(tmp_path / "a/checkpoint-1"))
    for got in world.run(resumed, 2, path, str(tmp_path / "b"), **keys):
        assert_same([got], curve[1:])


def resumed(path: str, out: str, **keys) -> tuple:
    curve, log = train(path, out, **{**KEYS, **MTP, **keys}), read_log(out)
    return (*curve[-1], log[-1]["mtp_loss"])


# -- refusals


def refusals(path: str, llama: str, plain: str, tied: str) -> list:
    from mca_lite import AutoModel, DPOTrainer, McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    args = TrainingArguments(output_dir="unused", mtp_num_layers=1)
    out = []
    for attempt in (
        lambda: McaTrainer(load_torch_model(path), args),
        lambda: AutoModel.from_pretrained(llama, args),
        lambda: AutoModel.from_pretrained(plain, args),
        lambda: AutoModel.from_pretrained(tied, args),
        lambda: DPOTrainer(AutoModel.from_pretrained(path, args), args=args),
    ):
        with pytest.raises(ValueError) as error:
            attempt()
        out.append(str(error.value))
    return out


def test_what_has_no_layers_to_train_is_refused(path, tmp_path):
    llama = tiny.save_model(tmp_path / "llama", "llama")
    plain = tiny_moe.save_model(tmp_path / "plain", "deepseek_v3")
    tied = tiny_moe.save_model(tmp_path / "tied", "deepseek_v3", tie_word_embeddings=True)
    for text in (got := world.run(refusals, 1, path, llama, plain, tied)[0]):
        assert "mtp_num_layers" in text
    assert "plain torch" in got[0] and "llama has no layers" in got[1] and "lacks" in got[2]
    assert "a deepseek_v3 model whose embedding is its head" in got[3]
    assert "preference" in got[4]


@pytest.mark.parametrize("word", ("use_mca=false", "stage=dpo"))
def test_a_run_whose_loss_cannot_look_ahead_is_refused_before_it_starts(word, path, tmp_path):
    words = [
        f"model_name_or_path={path}",
        "dataset=pairs.json",
        f"output_dir={tmp_path / 'out'}",
        "max_steps=1",
        word,
    ]
    assert list(keys_of(parse_args, [*words, "mtp_num_layers=1"])) == ["mtp_num_layers"]
    assert parse_args([*words, "mtp_num_layers=0"])


def of_a_session(path: str, count: int, keys: dict) -> tuple:
    """(entropies, gradient norms of two updates with weight decay, largest change of a prediction
    layer's weight)"""
    from mca_lite import AutoModel, Session

    args = arguments(mtp_num_layers=count, per_device_train_batch_size=1, **keys)
    model = AutoModel.from_pretrained(path, args)
    session = Session(model, args)
    weights = {name: p for name, p in model.named_parameters() if name.startswith("mtp.")}
    before = {name: p.detach().clone() for name, p in weights.items()}
    samples = [dict(input_ids=[1, 2, 3], labels=[-100, 3, 4]), dict(input_ids=[5], labels=[6])]
    found = [values.flatten().tolist() for values in session.log_probs(samples, entropy=True)]
    norms = []
    for _ in range(2):
        session.forward_backward(samples, "cross_entropy")
        norms.append(session.optim_step(lr=1e-2, weight_decay=0.1).grad_norm)
    changes = [float((p - before[name]).abs().max()) for name, p in weights.items()]
    return found, norms, max(changes, default=0.0)


def of_a_given_backend(path: str, count: int) -> str:
    from mca_lite import AutoModel, Session
    from mca_lite.backend_megatron import MegatronBackend

    args = arguments(mtp_num_layers=count)
    model = AutoModel.from_pretrained(path, args)
    session = Session(model, args, backend=MegatronBackend(model, args))
    samples = [dict(input_ids=[1, 2], labels=[2, 3])]
    session.log_probs(samples)
    return refusal(session.forward_backward, samples, "cross_entropy")


def test_a_session_refuses_to_train_beside_trained_extra_layers_of_a_given_backend(path):
    [said] = world.run(of_a_given_backend, 1, path, COUNT)
    assert "layers for multi-token prediction are trained by this Session's backend" in said


@pytest.mark.parametrize("keys", [{}, PP2], ids=["one", "pp2"])
def test_a_session_trains_a_model_without_its_extra_layers(path, keys):
    ranks = 2 if keys else 1
    [entropies, norms, change] = world.run(of_a_session, ranks, path, COUNT, keys)[-1]
    [wanted, norms_without, _] = world.run(of_a_session, 1, path, 0, {})[0]
    assert change == 0.0
    for one, other in zip(entropies, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert norms == pytest.approx(norms_without, rel=1e-5)
