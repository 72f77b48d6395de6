"""Adapters of experts, routers and shared experts: the mathematics of PEFT's for single experts, in
every layout.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.shared import tiny, tiny_moe, world
from tests.shared.layouts import CP2, DIST_OPT, EP2, ETP1, LOOP, OVERLAP, PP2, TP2_SP
from tests.shared.lora_tools import (
    ALPHA,
    RANK,
    adapter_of,
    load,
    run_keys,
    save_start,
    whole_logits_trainer,
    with_drawn_adapters,
)
from tests.shared.small_runs import save_tokenizer, write_data
from tests.shared.training import assert_same_curve, train

SCALE = ALPHA / RANK
LAYOUTS = {
    "one": (1, {}),
    "ep2": (2, {**EP2, **DIST_OPT}),
    "dp2_overlap": (2, {**OVERLAP, "ddp_bucket_size": 1}),
    "tp2": (2, TP2_SP),
    "ep2tp2": (4, {**EP2, **TP2_SP, **OVERLAP}),
    "ep2tp2_etp1": (2, {**EP2, **TP2_SP, **ETP1}),
    "tp2_etp1": (2, {**TP2_SP, **ETP1}),
    "ep2pp2": (4, {**EP2, **PP2}),
    "cp2ep2_recompute": (2, {**CP2, **EP2, "recompute_granularity": "full"}),
    "torch": (1, dict(backend="torch")),
    "torch_dp2": (2, dict(backend="torch")),
}
WIDE = dict(global_batch_size=8, per_device_train_batch_size=2)  # two samples on each of four ranks
TARGETS = {
    "qwen3_moe_dense_layers": ("all", "all-router"),
    "qwen2_moe": ("all",),
    "mixtral": (
        "w1",
        "w2",
        "q_proj",
        "mlp.router",
    ),  # a projection without adapter beside one that has it
    "glm4_moe": ("linear_fc1", "gate"),  # megatron's name for gate and up
    "deepseek_v3": ("all",),
    "gpt_oss": ("all", "all-router"),
}

# routers and groups of experts with adapters in every layout; the other models in some
EVERYWHERE = ("qwen3_moe_dense_layers", "glm4_moe")
FEW = ("one", "ep2tp2_etp1", "torch")


def names_of(layout: str) -> list[str]:
    """Models that `make test` trains in a layout. Where experts are cut, one with adapters in half
    of a fused matrix too; attention and shared experts are cut in ep2tp2_etp1 as they are there.
    """
    if layout in FEW:
        return list(TARGETS)
    return [*EVERYWHERE, *(["mixtral"] if layout == "tp2" else [])]


class Merged(torch.nn.Module):
    """A weight of transformers' model as a parametrization: W + scale * B A, for each part of W
    that has an adapter.
    """

    def __init__(self, parts):
        super().__init__()
        self.indices = [index for index, _, _ in parts]
        self.a = torch.nn.ParameterList(a for _, a, _ in parts)
        self.b = torch.nn.ParameterList(b for _, _, b in parts)

    def forward(self, weight):
        weight = weight.clone()
        for index, a, b in zip(self.indices, self.a, self.b, strict=True):
            delta = SCALE * b @ a
            # gpt_oss' experts have inputs before outputs
            weight[index] = weight[index] + (delta.t() if len(index) == 3 else delta)
        return weight


def where(model, name: str, key: str) -> tuple[torch.nn.Module, str, tuple]:
    """(module, parameter, index) that a module's name in a file means in transformers' model;
    written down by hand.
    """
    for theirs, ours in (
        ("block_sparse_moe", "mlp"),
        (".w1", ".gate_proj"),
        (".w3", ".up_proj"),
        (".w2", ".down_proj"),
    ):
        key = key.replace(theirs, ours)
    if ".experts." not in key:
        return model.get_submodule(key), "weight", (slice(None),)
    prefix, rest = key.split(".experts.")
    e, projection = rest.split(".")
    experts = model.get_submodule(prefix + ".experts")
    if name == "gpt_oss":
        columns = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        parameter = "gate_up_proj" if projection in columns else "down_proj"
        return experts, parameter, (int(e), slice(None), columns.get(projection, slice(None)))
    half = experts.down_proj.shape[2]
    rows = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}.get(
        projection, slice(None)
    )
    return experts, "down_proj" if projection == "down_proj" else "gate_up_proj", (int(e), rows)


def oracle(path: str, folder: str, name: str, start: str) -> list:
    """The curve of transformers' model whose weights are parametrized by the adapter of `start`;
    the end is in `folder`.
    """
    from torch.nn.utils import parametrize
    from transformers import AutoModelForCausalLM

    from mca_lite.args import TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
    tensors, places, trained = adapter_of(start), {}, {}
    for key in (k for k in tensors if k.endswith("lora_A.weight")):
        other = key.replace("lora_A", "lora_B")
        module, parameter, index = where(
            model, name, key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        )
        a, b = (torch.nn.Parameter(tensors[k]) for k in (key, other))
        trained.update({key: a, other: b})
        places.setdefault((module, parameter), []).append((index, a, b))
    for (module, parameter), parts in places.items():
        parametrize.register_parametrization(module, parameter, Merged(parts), unsafe=True)
    keys = {**run_keys(f"{folder}/run"), **WIDE}
    trainer = whole_logits_trainer()(
        model, TrainingArguments(**keys), train_dataset=tiny.samples(12)
    )
    trainer.train()
    save_file(
        {k: v.detach().contiguous() for k, v in trained.items()},
        f"{folder}/adapter_model.safetensors",
    )
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


def all_oracles(paths: dict, folders: dict) -> dict:
    """{name: curve}; each folder holds the adapter at the start and at the end."""
    curves = {}
    for name, targets in TARGETS.items():
        start = f"{folders[name]}/start"
        save_start(paths[name], start, targets)
        curves[name] = oracle(paths[name], folders[name], name, start)
    return curves


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{name: (model, folder of the adapter at the start, curve, adapter at the end)}"""
    folders = {name: tmp_path_factory.mktemp(name) for name in TARGETS}
    paths = {
        name: tiny_moe.save_model(folder / "model", name, num_hidden_layers=2)
        for name, folder in folders.items()
    }
    [curves] = world.run(all_oracles, 1, paths, {n: str(f) for n, f in folders.items()})
    return {
        name: (paths[name], folder / "start", curves[name], adapter_of(folder))
        for name, folder in folders.items()
    }


def train_all(models: dict, out: str, keys: dict) -> dict:
    """Each model from its adapter, one after another; the expert loop for some of them."""
    curves = {}
    for name, (path, adapter) in models.items():
        own = LOOP if name == "qwen2_moe" and "backend" not in keys else {}
        shared = dict(WIDE, steps=2, count=12, warmup_steps=0, adam_epsilon=1e-4, export=True)
        curves[name] = train(
            path,
            f"{out}/{name}",
            adapt=functools.partial(load, adapter),
            **{**shared, **own, **keys},
        )
    return curves


def train_all_by_products(*args) -> dict:
    """train_all, whose adapters are added in products, as they are in half precision."""
    from mca_lite.part_lora_layers import Adapter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapter, "adds_in_product", lambda self, weight: self.enabled)
        return train_all(*args)


def check(layout, names, made, tmp_path, train_all=train_all):
    ranks, keys = LAYOUTS[layout]
    models = {name: (made[name][0], str(made[name][1])) for name in names}
    for curves in world.run(train_all, ranks, models, str(tmp_path), keys):
        for name, curve in curves.items():
            assert_same_curve(curve, made[name][2])
    for name in names:
        end = made[name][3]
        ours = adapter_of(tmp_path / name)
        assert ours.keys() == end.keys()
        for key, value in end.items():
            torch.testing.assert_close(
                ours[key], value, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize(  # beside ep2tp2 stands that with etp1
    "layout", [pytest.param(n, marks=pytest.mark.full) if n == "ep2tp2" else n for n in LAYOUTS]
)
def test_adapters_of_experts_train_as_parametrized_weights(layout, made, tmp_path):
    check(layout, names_of(layout), made, tmp_path)


@pytest.mark.parametrize("layout", ["ep2", "tp2"])
def test_products_of_experts_train_as_parametrized_weights(layout, made, tmp_path):
    check(layout, EVERYWHERE, made, tmp_path, train_all_by_products)


@pytest.mark.full
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in FEW])
def test_adapters_of_more_models_train_as_parametrized_weights(layout, made, tmp_path):
    names = [name for name in TARGETS if name not in names_of(layout)]
    check(layout, names, made, tmp_path)


def merged_and_logits(models: dict, out: str, keys: dict) -> dict:
    """Write each model with its adapter in its weights -> the logits with the adapter beside them,
    on one stage.
    """
    from mca_lite import part_lora, part_lora_files, weights_convert
    from mca_lite.model import AutoModel
    from tests.shared.files import TOKENS, make_args

    logits = {}
    for name, (path, adapter) in models.items():
        args = make_args(**keys)
        model = part_lora.load_adapter(AutoModel.from_pretrained(path, args), adapter).eval()
        weights_convert.export_hf(model, f"{out}/{name}", change=part_lora_files.merger(model))
        with torch.no_grad():
            logits[name] = model.gather_logits(model(torch.tensor(TOKENS))).tolist()
    return logits


def logits_of(model) -> torch.Tensor:
    from tests.shared.files import TOKENS

    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits


@pytest.mark.parametrize("layout", ["one", "ep2tp2_etp1"])
def test_merged_weights_give_the_logits_of_the_adapters(layout, made, tmp_path):
    from tests.shared.files import load_hf

    ranks, keys = LAYOUTS[layout]
    models = {name: (path, str(adapter)) for name, (path, adapter, _, _) in made.items()}
    answer = world.run(merged_and_logits, ranks, models, str(tmp_path), keys)[0]
    for name, ours in answer.items():
        merged = load_hf(tmp_path / name)
        torch.testing.assert_close(logits_of(merged), torch.tensor(ours), rtol=0, atol=1e-5)
        assert (logits_of(merged) - logits_of(load_hf(made[name][0]))).abs().max() > 1e-2, (
            "the adapter changes nothing"
        )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe_dense_layers", "glm4_moe"])
def test_peft_loads_adapters_of_experts_with_the_same_logits(name, made, tmp_path):
    from peft import PeftModel

    from tests.shared.files import load_hf

    path, adapter, _, _ = made[name]
    folder = str(tmp_path / "adapter")
    # beside experts PEFT's conversion to transformers 5 passes adapters of dense MLPs and of shared
    # experts over; it has none
    # for qwen2_moe
    targets = ("all",) if name == "mixtral" else ("*.mlp.experts.*", "q_proj", "o_proj")
    world.run(save_start, 1, path, folder, targets)
    answer = world.run(merged_and_logits, 2, {name: (path, folder)}, str(tmp_path), EP2)[0]
    theirs = PeftModel.from_pretrained(load_hf(path), folder)
    torch.testing.assert_close(logits_of(theirs), torch.tensor(answer[name]), rtol=0, atol=1e-5)


def save_stabilised(path: str, folder: str) -> list:
    """Save drawn adapters of experts scaled by alpha / sqrt(rank), and check a checkpoint's file of
    an earlier version -> the logits."""
    from mca_lite.model import AutoModel
    from mca_lite.part_lora_files import check_checkpoint, save_adapter
    from tests.shared.files import TOKENS, make_args

    spec = dict(targets=("*.experts.*",), rank=2, alpha=8.0)
    model = AutoModel.from_pretrained(path, make_args())
    model = with_drawn_adapters(model, use_rslora=True, **spec).eval()
    save_adapter(model, folder)
    check_checkpoint(model, folder)
    file = Path(folder) / "adapter_config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "use_rslora": True, "lora_alpha": 8}))
    check_checkpoint(model, folder)
    file.write_text(json.dumps(written))
    with torch.no_grad():
        return model.gather_logits(model(torch.tensor(TOKENS))).tolist()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_peft_scales_rank_stabilised_adapters_of_experts_alike(name, tmp_path):
    """It joins gate and up at twice the rank and alpha, by whose square root it would divide."""
    from peft import PeftModel

    from tests.shared.files import load_hf

    path = str(tiny_moe.save_model(tmp_path / name, name))
    folder = str(tmp_path / "adapter")
    [wanted] = world.run(save_stabilised, 1, path, folder)
    theirs = PeftModel.from_pretrained(load_hf(path), folder)
    torch.testing.assert_close(logits_of(theirs), torch.tensor(wanted), rtol=0, atol=1e-5)


RESUME = {"ep2": ("ep2", "ep2tp2_etp1"), "ep2tp2": ("ep2pp2",)}


# experts with adapters go from ranks to cut ones above, adapters over stages in test_lora_files,
# and experts from ep2tp2 in test_moe_ckpt
THINNED = [("ep2tp2", "ep2pp2")]


@pytest.mark.parametrize(
    "before, after",
    [
        pytest.param(a, b, marks=[pytest.mark.full] if (a, b) in THINNED else [])
        for a, row in RESUME.items()
        for b in row
    ],
)
def test_checkpoints_of_adapters_go_on_in_other_expert_layouts(before, after, made, tmp_path):
    name = "qwen3_moe_dense_layers"
    models = {name: (made[name][0], str(made[name][1]))}
    save = dict(save_strategy="steps", save_steps=2, num_train_epochs=5, steps=3)
    (ranks, keys), (others, other) = LAYOUTS[before], LAYOUTS[after]
    [wanted, *_] = world.run(train_all, ranks, models, str(tmp_path / "first"), {**save, **keys})
    end = adapter_of(tmp_path / "first" / name)
    checkpoint = str(tmp_path / "first" / name / "checkpoint-2")
    keys = {**save, **other, "resume_from_checkpoint": checkpoint}
    [got, *_] = world.run(train_all, others, models, str(tmp_path / "then"), keys)
    ours = adapter_of(tmp_path / "then" / name)
    if before == after:
        assert got == wanted and all(torch.equal(ours[key], value) for key, value in end.items())
    assert_same_curve(got[name], wanted[name], 5e-6)
    for key, value in end.items():
        torch.testing.assert_close(
            ours[key], value, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


def beside_the_dispatch(path: str) -> list:
    from mca_lite import AutoModel, TrainingArguments, part_lora

    answers = []
    for targets in (("all",), ("q_proj", "gate")):  # with shared experts, and without
        args = TrainingArguments(output_dir="unused", moe_shared_expert_overlap=True, **TP2_SP)
        try:
            part_lora.inject(
                AutoModel.from_pretrained(path, args), part_lora.LoraSpec(targets=targets)
            )
            answers.append("taken")
        except ValueError as error:
            answers.append(str(error))
    return answers


def test_adapters_of_shared_experts_beside_the_dispatch_are_refused_where_they_are_cut(made):
    for refused, taken in world.run(beside_the_dispatch, 2, made["qwen2_moe"][0]):
        assert "try: moe_shared_expert_overlap: false" in refused and taken == "taken"


# -- a run of the command line


def lines_of_plans(folder: str, keys_of_plans: tuple) -> dict:
    """{keys: lines of the report about PEFT} of runs of adapters."""
    from mca_lite.args import parse_args
    from mca_lite.run import make_plan

    words = f"model_name_or_path={folder}/model dataset={folder}/chat.jsonl output_dir={folder}/out"
    words += f" cache_dir={folder}/cache stage=sft finetuning_type=lora preprocessing_num_workers=1"
    found = {}
    for keys in keys_of_plans:
        report = make_plan(parse_args(f"{words} {keys}".split())).data.report
        found[keys] = [line for line in report if "PEFT" in line]
    return found


def test_a_run_says_that_peft_may_pass_over_adapters_of_experts(tmp_path):
    """PEFT 0.21 takes those of gpt_oss' attention alone, without a word about the others."""
    tiny_moe.save_model(tmp_path / "model", "gpt_oss")
    save_tokenizer(tmp_path / "model")
    write_data(tmp_path)
    keys = ("lora_target=all", "lora_target=o_proj", "save_merged_model=true")
    [found] = world.run(lines_of_plans, 1, str(tmp_path), keys)
    assert list(map(len, found.values())) == [1, 0, 0]
    assert "save_merged_model: true" in found["lora_target=all"][0]


def test_a_run_says_so_of_dense_layers_and_shared_experts_too(tmp_path):
    """PEFT 0.21 takes down_proj for that of experts, wherever it is: logits were off by a tenth."""
    tiny_moe.save_model(tmp_path / "model", "glm4_moe")
    save_tokenizer(tmp_path / "model")
    write_data(tmp_path)
    shared = "lora_target=*.shared_experts.*"
    dense = "lora_target=*.layers.0.mlp.down_proj"
    keys = (shared, dense, "lora_target=q_proj", f"{dense} save_merged_model=true")
    [found] = world.run(lines_of_plans, 1, str(tmp_path), keys)
    assert list(map(len, found.values())) == [1, 1, 0, 0]
