"""Models with pictures on megatron-core: each family against transformers' own class in plain
torch, in every layout.
"""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from mca_lite import TrainerCallback, TrainingArguments, part_transformer_engine
from mca_lite.part_pictures_data import rope_positions
from tests.shared import pictures, tiny, world
from tests.shared.cells import asked_for, shared_worlds, thinned
from tests.shared.files import assert_same_bytes, assert_same_tensors, changed, tensors
from tests.shared.held import SavedTensors
from tests.shared.layouts import (
    DIST_OPT,
    FULL,
    ONE_ROW,
    OVERLAP,
    PACKED,
    PP2,
    SAVE,
    SP,
    TP2,
    TWO_ROWS,
    VPP2,
)
from tests.shared.layouts import VISION as LAYOUTS
from tests.shared.lora_tools import adapter_of, load, with_drawn_adapters
from tests.shared.training import assert_same_curve, in_float32, refusal, train

FAMILIES = list(pictures.FAMILIES)
EVERYWHERE = ["qwen2_5_vl"]
FEW = ["tp2_sp_packed"]
# plain, with features of several layers, and with linear attention
CUT_ROWS = ["qwen2_5_vl", "qwen3_vl", "qwen3_5_moe"]
# beside them stand the same with overlap, packed rows or virtual stages
ELSEWHERE = ["dp2", "tp2", "tp2_sp", "pp2", "tp2pp2", "one_packed"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: pictures.save_model(folder / name, name) for name in FAMILIES}


@pytest.fixture(scope="module")
def wanted(request, paths, tmp_path_factory):
    """transformers' models in plain torch: ({family: curve}, folder of what they became)"""
    out = tmp_path_factory.mktemp("plain")
    names = asked_for(request)
    return {n: pictures.train_plain(paths[n], str(out / n)) for n in names}, out


@pytest.fixture(scope="module")
def trained(request, paths, tmp_path_factory):
    run = pictures.train_ours
    return shared_worlds(request, tmp_path_factory, LAYOUTS, lambda n: ((paths[n],), {}), run=run)


USUAL = [n for n in LAYOUTS if n not in (*ELSEWHERE, "cp2_packed", "ep2")]
CELLS = thinned(FAMILIES, USUAL, EVERYWHERE, FEW)
CELLS += thinned(FAMILIES, ELSEWHERE, [], []) + thinned(FAMILIES, ["cp2_packed"], CUT_ROWS, [])
OF_EXPERTS = ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_omni_moe_thinker"]
CELLS += thinned(OF_EXPERTS, ["ep2"], [], [])
# one layer a stage: refused below
OF_LAYERS = ["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker"]
REFUSED = [(name, "pp2_vpp2") for name in OF_LAYERS]
# experts and tensor parallelism need sequence parallelism
REFUSED += [(name, layout) for name in OF_EXPERTS for layout in ("tp2", "tp2pp2")]
CELLS = [cell for cell in CELLS if cell.values not in REFUSED]


@pytest.mark.parametrize("case, layout", CELLS)
def test_a_family_trains_as_transformers_does(case, layout, wanted, trained):
    (curves, folder), (ranks, out) = wanted, trained(layout)
    for got in ranks:
        assert_same_curve(got[case], curves[case])
    assert_same_tensors(tensors(out / case), tensors(folder / case))


# -- positions

DOCUMENTS = {
    "text alone": (5,),
    "a picture at the start": ((2, 3), 4),
    "a picture at the end": (3, (4, 2)),
    "pictures alone": ((2, 2), (1, 5)),
    "several": (2, (1, 1), (3, 2), 6, (2, 4), 1),
}


@functools.cache
def on_meta(family: str):
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(pictures.hf_config(family)).model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pieces", DOCUMENTS.values(), ids=DOCUMENTS)
def test_positions_are_those_of_transformers(family, pieces):
    document = pictures.document(torch.Generator().manual_seed(0), *pieces)
    # of a picture at the end, the token behind it has gone with the shift
    ids = torch.nn.functional.pad(document["input_ids"], (0, 1), value=pictures.END)[None]
    model, grids = on_meta(family), document.get("image_grid_thw")
    if hasattr(model, "audio_tower"):
        more = dict(attention_mask=torch.ones_like(ids))
    else:
        more = dict(mm_token_type_ids=(ids == pictures.IMAGE).int())
    wanted, _ = model.get_rope_index(ids, image_grid_thw=grids, **more)
    got = torch.stack([document[name] for name in ("rope_t", "rope_h", "rope_w")])
    assert torch.equal(got, wanted[:, 0, :-1])


def test_positions_of_pictures_without_text_between_them():
    image = pictures.IMAGE
    ids = torch.tensor([9, image, image, image, image, image, 9])
    got = rope_positions(ids, torch.tensor([[1, 2, 4], [1, 6, 2]]), image, 2)
    # two features side by side from 1, so the second picture begins at 3: three, one below another
    assert got.tolist() == [[0, 1, 1, 3, 3, 3, 6], [0, 1, 1, 3, 4, 5, 6], [0, 1, 2, 3, 3, 3, 6]]


def test_a_document_with_another_number_of_image_tokens_than_features_is_refused():
    ids = torch.tensor([9, pictures.IMAGE, 9])
    said = refusal(rope_positions, ids, torch.tensor([[1, 4, 4]]), pictures.IMAGE, 2)
    assert "1 image tokens, and its 1 pictures 4 features" in said


# -- files


@pytest.fixture(scope="module")
def spelled(paths, tmp_path_factory) -> dict[str, str]:
    """Models under both sets of names, and one with the config.json of the hub."""
    folder = tmp_path_factory.mktemp("spelled")
    named_twice = ["qwen2_vl", "qwen2_5_vl"]  # transformers reads one set of names of qwen3_vl
    others = {f"{n} renamed": pictures.renamed(paths[n], folder / n) for n in named_twice}
    tied = pictures.save_model(folder / "tied", "qwen2_5_vl", tied=True)
    hub = pictures.flat(tied, folder / "hub")
    columns = changed(paths["qwen3_vl_moe"], folder / "columns", transpose_experts)
    return {**paths, **others, "tied": tied, "hub": hub, "columns": columns}


def transpose_experts(values: dict) -> None:
    """The experts of a model as qwen3_vl_moe's files on the hub have them."""
    for name in values:
        if ".mlp.experts." in name:
            values[name] = values[name].mT.contiguous()


def test_experts_of_the_hub_are_read_as_transformers_reads_them(spelled):
    from mca_lite.weights_files import SafetensorsSource

    rows, columns = (SafetensorsSource(spelled[name]) for name in ("qwen3_vl_moe", "columns"))
    assert (rows.format, columns.format) == ("rows", "columns")
    assert rows.names() == columns.names()
    for name in rows.names():
        assert rows.read(name).equal(columns.read(name)), name
    ours, theirs = (
        AutoModelForImageTextToText.from_pretrained(spelled[name]).state_dict()
        for name in ("qwen3_vl_moe", "columns")
    )
    for name, tensor in ours.items():
        assert tensor.equal(theirs[name]), name


def exported(paths: dict, out: str, **keys) -> None:
    """Each model read, and written again."""
    from mca_lite import AutoModel

    args = TrainingArguments(output_dir="unused", **keys)
    for name, path in paths.items():
        AutoModel.from_pretrained(path, args).save_pretrained(f"{out}/{name}")


def test_files_are_written_as_they_were_read(spelled, tmp_path):
    world.run(exported, 4, spelled, str(tmp_path), **TP2, **SP, **PP2)
    for name, path in spelled.items():
        assert_same_bytes(tensors(tmp_path / name), tensors(path))
        configs = [
            json.loads(Path(of, "config.json").read_text()) for of in (tmp_path / name, path)
        ]
        configs[1]["dtype"] = "float32"
        assert configs[0] == configs[1], name


def command(words: list[str]) -> int:
    from mca_lite.tool_convert import main

    return main(words)


def converted(paths: dict, out: str) -> list[int]:
    codes = []
    for name, path in paths.items():
        codes.append(command([path, f"{out}/mca/{name}", "--verify"]))
        codes.append(command([f"{out}/mca/{name}", f"{out}/{name}", "--verify"]))
    return codes


def test_convert_gives_the_same_bytes_through_a_checkpoint(spelled, tmp_path):
    [codes] = world.run(converted, 1, spelled, str(tmp_path))
    assert set(codes) == {0}
    for name, path in spelled.items():
        assert_same_bytes(tensors(tmp_path / name), tensors(path))


def test_convert_keeps_a_dtype_that_config_json_names_for_the_text_alone(tmp_path):
    path = pictures.save_model(tmp_path / "hf", "qwen3_vl", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf/config.json").read_text())  # as the hub's Qwen3-VL
    config["text_config"]["dtype"] = config.pop("dtype")
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    assert world.run(converted, 1, {"back": path}, str(tmp_path)) == [[0, 0]]
    assert_same_bytes(tensors(tmp_path / "back"), tensors(path))


def drawn(paths: dict, out: str, **keys) -> None:
    """The models of config.json files alone, their weights drawn from a seed."""
    from mca_lite.model import AutoModel
    from mca_lite.model_config import AutoConfig

    args = TrainingArguments(output_dir="unused", **keys)
    for name, path in paths.items():
        model = AutoModel.from_config(AutoConfig.from_pretrained(path, args), args)
        model.save_pretrained(f"{out}/{name}")


def test_weights_from_a_seed_are_the_same_in_every_layout(paths, tmp_path):
    configs = {family: str(tmp_path / family) for family in paths}
    for family, path in paths.items():
        Path(configs[family]).mkdir()
        shutil.copy(Path(path, "config.json"), configs[family])
    world.run(drawn, 1, configs, str(tmp_path / "one"))
    world.run(drawn, 2, configs, str(tmp_path / "many"), **TP2, **SP)
    for family, path in paths.items():
        one, many = tmp_path / "one" / family, tmp_path / "many" / family
        assert_same_bytes(tensors(many), tensors(one))
        assert tensors(one).keys() == tensors(path).keys()
        AutoModelForImageTextToText.from_pretrained(one)


# -- checkpoints: the first step has no picture, so the tower has made fewer updates than the rest

RESUMED = dict(data=pictures.samples(2), **pictures.KEYS, **TWO_ROWS)


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.full)])
@pytest.mark.parametrize("first, then", [({}, {}), (DIST_OPT, PP2), (TP2, DIST_OPT)])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(paths, tmp_path, family, first, then):
    keys = {**RESUMED, **SAVE, "steps": 4}
    run = functools.partial(world.run, train, 2, paths[family], str(tmp_path))
    whole = run(**{**keys, **first})[0]
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = run(**{**keys, **then}, resume_from_checkpoint="auto")[0]
    assert_same_curve(resumed, whole, tolerance=0 if first == then else 1e-5)


# -- what is frozen


# the linears of the first one's tower have the names of the text's; the others' text has linear
# attention, and the last one's shared experts
ADAPTED = [
    *(("qwen2_5_vl", layout) for layout in ("one", "dp2_overlap", "tp2_sp_packed", "pp2")),
    ("qwen3_5_moe", "tp2_sp_packed"),
    *(
        pytest.param(family, layout, marks=pytest.mark.full)
        for family, layout in (
            ("qwen3_5", "one"),
            ("qwen3_5", "tp2_sp_packed"),
            ("qwen3_5_moe", "one"),
            ("qwen3_5_moe", "ep2"),
        )
    ),
]


@pytest.mark.parametrize("family, layout", ADAPTED)
def test_adapters_of_the_text_train_as_peft_does_beside_a_frozen_tower(
    paths, tmp_path, family, layout
):
    start, end, out = (str(tmp_path / name) for name in ("start", "end", "out"))
    path = paths[family]
    wanted = pictures.train_plain(path, end, functools.partial(pictures.with_peft, start))
    ranks, keys = LAYOUTS[layout]
    adapt = functools.partial(load, start)
    for got in world.run(pictures.train_ours, ranks, path, out, adapt=adapt, **keys):
        assert_same_curve(got, wanted)
    assert_same_tensors(adapter_of(out), adapter_of(end))
    base = AutoModelForImageTextToText.from_pretrained(path)
    loaded = PeftModel.from_pretrained(base, out)
    read = get_peft_model_state_dict(loaded)
    assert_same_bytes(read, adapter_of(out))
    assert not any("visual" in name for name in read)


ON_TORCH = {
    "torch_packed": (1, dict(backend="torch", **PACKED)),
    "torch_dp2": (2, dict(backend="torch", **ONE_ROW)),
}
OF_TOWER = [
    ("qwen2_5_vl", "tp2_sp_packed"),
    ("qwen2_5_vl", "torch_dp2"),
    ("qwen3_vl", "pp2"),
    *(
        pytest.param(family, layout, marks=pytest.mark.full)
        for family, layout in (
            *((family, "tp2_sp_packed") for family in FAMILIES if family != "qwen2_5_vl"),
            *(("qwen2_5_vl", layout) for layout in ("dp2_overlap", "tp2")),
            *(("qwen3_vl", layout) for layout in ("one", "cp2", "torch_packed")),
        )
    ),
]


class Merged(TrainerCallback):
    """Writes the merged model too, to output_dir/merged."""

    def on_train_end(self, args, state, control, trainer, **kwargs):
        trainer.save_merged_model()


def train_and_merge(path: str, out: str, start: str, **keys) -> list:
    adapt = functools.partial(load, start)
    return pictures.train_ours(path, out, adapt=adapt, callbacks=[Merged()], **keys)


@pytest.mark.parametrize("family, layout", OF_TOWER)
def test_adapters_of_tower_projector_and_text_train_and_merge_as_with_peft(
    paths, tmp_path, family, layout
):
    path, start, end, out = paths[family], *(str(tmp_path / n) for n in ("start", "end", "out"))
    adapt = functools.partial(pictures.with_peft, start, targets=pictures.EVERY_LINEAR)
    wanted = pictures.train_plain(path, end, adapt)
    ranks, keys = {**LAYOUTS, **ON_TORCH}[layout]
    for got in world.run(train_and_merge, ranks, path, out, start, **keys):
        assert_same_curve(got, wanted)
    assert_same_tensors(adapter_of(out), adapter_of(end))
    base = AutoModelForImageTextToText.from_pretrained(path)
    loaded = PeftModel.from_pretrained(base, out)
    read = get_peft_model_state_dict(loaded)
    assert_same_bytes(read, adapter_of(out))
    assert {"visual.blocks", "visual.merger", "language_model"} <= {
        part for name in read for part in ("visual.blocks", "visual.merger", "language_model")
        if f".{part}." in name
    }  # fmt: skip
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_same_tensors(tensors(f"{out}/merged"), tensors(tmp_path / "merged"), 1e-6)


def drawn_in_the_tower(models):
    parts = ("vision_tower", "multi_modal_projector", "language_model")
    return with_drawn_adapters(models, rank=4, parts=parts)


@pytest.mark.parametrize("first, then", [({}, {}), (TP2, PP2)])
def test_adapters_of_a_tower_go_on_as_if_they_had_not_stopped(paths, tmp_path, first, then):
    keys = {**RESUMED, **SAVE, "steps": 4, "adapt": drawn_in_the_tower}
    run = functools.partial(world.run, train, 2, paths["qwen3_vl"], str(tmp_path), **keys)
    whole = run(**first)[0]
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = run(**then, resume_from_checkpoint="auto")[0]
    assert_same_curve(resumed, whole, tolerance=0 if first == then else 1e-5)


def test_convert_merges_an_adapter_as_peft_does(paths, tmp_path):
    path, start = paths["qwen2_5_vl"], str(tmp_path / "start")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    merged = pictures.with_peft(start, model, pictures.EVERY_LINEAR).merge_and_unload()
    merged.save_pretrained(tmp_path / "wanted")
    words = [path, str(tmp_path / "out"), "--merge", start, "--verify"]
    assert world.run(command, 1, words) == [0]
    assert_same_tensors(tensors(tmp_path / "out"), tensors(tmp_path / "wanted"), 1e-6)


@pytest.mark.parametrize("layout", ["dp2_overlap", "tp2_sp", "cp2", "pp2"])
def test_a_frozen_tower_stays_and_the_text_trains_as_in_plain_torch(paths, tmp_path, layout):
    path = paths["qwen3_vl"]
    wanted = pictures.train_plain(path, str(tmp_path / "plain"), pictures.without_tower)
    ranks, keys = LAYOUTS[layout]
    adapt = pictures.without_tower_here
    out = tmp_path / "out"
    for got in world.run(pictures.train_ours, ranks, path, str(out), adapt=adapt, **keys):
        assert_same_curve(got, wanted)
    assert_same_tensors(tensors(out), tensors(tmp_path / "plain"))


# -- steps without a picture

OPTIMIZERS = {
    "bf16": (1, dict(bf16=True)),
    "bf16, distributed": (2, dict(bf16=True, **OVERLAP)),
    "moments in bf16": (1, dict(bf16=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")),
    "offloaded": (1, dict(optimizer_cpu_offload=True)),
    "sgd": (1, dict(optim="sgd")),
    "muon": (2, dict(optim="muon", **TP2)),
}


def first_steps(path: str, out: str, keys: dict) -> None:
    """Two runs: of a step without a picture, and of a step with some after it."""
    data = pictures.samples(2)
    for steps in (1, 2):
        pictures.train_ours(path, f"{out}/{steps}", data=data, **{**keys, "steps": steps})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_tower_rests_in_a_step_without_a_picture_and_goes_on_afterwards(paths, tmp_path, name):
    path = paths["qwen2_5_vl"]
    ranks, keys = OPTIMIZERS[name]
    world.run(first_steps, ranks, path, str(tmp_path), keys)
    before, rested, trained = (tensors(folder) for folder in (path, tmp_path / "1", tmp_path / "2"))
    for key, tensor in before.items():
        tensor = tensor.to(rested[key].dtype)
        if key.startswith("visual."):
            assert torch.equal(rested[key], tensor), key
            assert not torch.equal(trained[key], tensor), key
        else:
            assert not torch.equal(rested[key], tensor), key


def tower_of_rank(path: str, out: str, data: list[dict], backend: str) -> dict:
    """The tower's weights on this rank after a step of a document a rank."""
    kept = []

    def keep(models):
        kept.append(models)
        return models

    keys = dict(data=data, adapt=keep, steps=1, global_batch_size=2, export=False, **ONE_ROW)
    pictures.train_ours(path, out, backend=backend, **keys)
    named = kept[0].named_parameters()
    return {n: p.detach().numpy().copy() for n, p in named if "visual." in n or "vision_" in n}


@pytest.mark.parametrize("backend", ["megatron", "torch"])
def test_ranks_with_and_without_a_picture_have_one_tower(paths, tmp_path, backend):
    generator = torch.Generator().manual_seed(1)
    data = [pictures.document(generator, *pieces) for pieces in [(3, (2, 2), 5), (9,)]]
    path = paths["qwen2_5_vl"]
    one, other = world.run(tower_of_rank, 2, path, str(tmp_path), data, backend)
    [both] = world.run(tower_of_rank, 1, path, str(tmp_path), data, backend)
    assert one and one.keys() == other.keys() == both.keys()
    for name, weights in one.items():
        assert (weights == other[name]).all(), name
        assert weights == pytest.approx(both[name], abs=1e-5), name


# -- Muon: the tower's matrices too, as on the torch backend (which test_optim_muon compares with
# torch.optim.Muon)


@pytest.mark.parametrize("layout", ["tp2_sp", pytest.param("pp2", marks=pytest.mark.full)])
def test_muon_updates_the_same_matrices_of_the_tower_as_on_the_torch_backend(
    paths, tmp_path, layout
):
    path = paths["qwen3_vl"]
    ranks, keys = LAYOUTS[layout]
    muon = dict(optim="muon", learning_rate=2e-3, adapt=in_float32)
    keys = {**keys, **muon, "use_distributed_optimizer": False}
    one = dict(backend="torch", **muon, **TWO_ROWS)
    [wanted] = world.run(pictures.train_ours, 1, path, str(tmp_path / "torch"), **one)
    for got in world.run(pictures.train_ours, ranks, path, str(tmp_path / "out"), **keys):
        assert_same_curve(got, wanted)
    assert_same_tensors(tensors(tmp_path / "out"), tensors(tmp_path / "torch"))


# -- what is refused

BUILDS = {
    "pipeline_model_parallel_size": (
        dict(PP2, **VPP2, gradient_accumulation_steps=2),
        "its first stage has 1",
    ),
    "transformer_impl": (dict(transformer_impl="transformer_engine"), "mrope_section"),
    "fp8": (dict(fp8="e4m3", bf16=True), "local"),
}


def build(path: str, keys: dict) -> str:
    from mca_lite.model_config import AutoConfig

    return refusal(AutoConfig.from_pretrained, path, TrainingArguments(output_dir="unused", **keys))


@pytest.mark.parametrize("name", BUILDS)
def test_a_layout_that_a_model_with_pictures_cannot_have_is_refused(paths, name, monkeypatch):
    monkeypatch.setattr(part_transformer_engine, "works", lambda: True)
    keys, words = BUILDS[name]
    said = build(paths["qwen3_vl"], keys)
    assert name in said and words in said


def forward(path: str, batch: dict) -> str:
    """The words with which the inputs of a batch are refused."""
    from mca_lite.backend_megatron import MegatronBackend
    from mca_lite.batch import split
    from mca_lite.model import AutoModel

    args = TrainingArguments(output_dir="unused")
    backend = MegatronBackend(AutoModel.from_pretrained(path, args), args)
    return refusal(backend.model_inputs, split(batch))


def test_a_batch_without_positions_or_with_too_few_pictures_is_refused(paths, tmp_path):
    batch = pictures.row_of(pictures.document(torch.Generator(), 3, (2, 2), 4))
    grid = batch.pop("image_grid_thw")
    [said] = world.run(forward, 1, paths["qwen2_vl"], batch)
    assert "4 image tokens, and its pictures 0 features" in said
    batch["image_grid_thw"] = grid
    batch.pop("rope_h")
    [said] = world.run(forward, 1, paths["qwen2_vl"], batch)
    assert "lacks rope_h" in said
    text = tiny.save_model(tmp_path, "qwen2")
    [said] = world.run(forward, 1, text, batch)
    assert "pixel_values" in said and "qwen2" in said


# -- plans


def planned(path: str, **keys) -> tuple:
    """(memory of a rank of each stage, bytes of the tower's activations)"""
    from mca_lite.model_config import AutoConfig
    from mca_lite.part_long_costs import RankSizes, input_activations
    from mca_lite.tool_plan_memory import ModelTensors, rank_memory

    args = TrainingArguments(output_dir="unused", **keys)
    config = AutoConfig.from_pretrained(path, args)
    tensors = ModelTensors(config)
    stages = range(config.pipeline_model_parallel_size)
    memory = [rank_memory(args, config, tensors, stage, 64, len(stages), False) for stage in stages]
    trained = (tensor.name for tensor in tensors.stages[0] if tensor.is_trained)
    return memory, input_activations(args, config, trained, 64, RankSizes(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_counts_the_tower_on_the_first_stage(paths, family):
    model = AutoModelForImageTextToText.from_pretrained(paths[family]).model
    tower, audio = model.visual, getattr(model, "audio_tower", None)
    saved = SavedTensors(tower.parameters())
    with saved.hooks():  # one picture of 64 features, a row of pictures alone
        output = tower(torch.randn(256, pictures.CHANNELS), grid_thw=torch.tensor([[1, 16, 16]]))
    held = saved.bytes
    del output
    if audio is not None:  # chunks of 13 features each, and of the rows that hold the most
        saved = SavedTensors(audio.parameters())
        with saved.hooks():
            output = audio(torch.randn(8, 500), feature_lens=torch.tensor([500]))
        held = max(held, saved.bytes * 64 / 65)
        del output
    [whole], kept = planned(paths[family])
    assert kept == pytest.approx(held, rel=0.35)  # without mergers and the table of positions
    assert whole.activations > kept
    (first, second), _ = planned(paths[family], **PP2)
    towers = [tower] if audio is None else [tower, audio]
    count = sum(parameter.numel() for of in towers for parameter in of.parameters())
    assert first.parameters - second.parameters == count - 32  # the final norm is on the second
    assert 0 < planned(paths[family], **FULL)[1] < kept


@pytest.mark.parametrize("family", FAMILIES)
def test_the_work_of_the_tower_is_what_torch_counts(paths, family):
    from mca_lite.inputs import inputs_of

    model = AutoModelForImageTextToText.from_pretrained(paths[family], attn_implementation="eager")
    grid = torch.tensor([[1, 16, 16]])  # of whole windows
    with FlopCounterMode(display=False) as counter:
        model.model.visual(torch.randn(256, pictures.CHANNELS), grid_thw=grid)
    forward = counter.get_total_flops()
    work = inputs_of(model.config).work(model)
    assert work.of_unit * 256 + work.of_square * 256**2 == pytest.approx(3 * forward, rel=1e-6)
    frozen = inputs_of(model.config).work(pictures.without_tower(model))
    assert frozen.of_unit * 256 + frozen.of_square * 256**2 == pytest.approx(forward, rel=1e-6)


# -- evaluation, and half precision


def evaluated(path: str, keys: dict) -> float:
    from mca_lite import McaTrainer
    from mca_lite.model import AutoModel

    args = TrainingArguments(output_dir="unused", disable_tqdm=True, global_batch_size=4, **keys)
    model = AutoModel.from_pretrained(path, args)
    return McaTrainer(model=model, args=args, eval_dataset=pictures.samples()).evaluate()[
        "eval_loss"
    ]


@pytest.mark.parametrize("layout", ["one", "one_packed", "dp2", "tp2_sp_packed", "pp2", "cp2"])
def test_an_evaluation_gives_the_loss_of_transformers(paths, layout):
    path = paths["qwen3_vl"]
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    data = pictures.samples()
    with torch.no_grad():
        total = sum(pictures.loss_of(model, document).item() for document in data)
    wanted = total / sum(int((document["labels"] != -100).sum()) for document in data)
    ranks, keys = LAYOUTS[layout]
    keys = {**keys, "per_device_eval_batch_size": 2}
    for got in world.run(evaluated, ranks, path, keys):
        assert got == pytest.approx(wanted, abs=1e-5)


def in_bf16(path: str, out: str) -> tuple:
    """(frequencies of the tower, their dtype, the curve of a step in bf16)"""
    from mca_lite.model import AutoModel

    args = TrainingArguments(output_dir="unused", bf16=True)
    [chunk] = AutoModel.from_pretrained(path, args)
    buffers = dict(chunk.vision_model.named_buffers()).items()
    [frequencies] = [x for name, x in buffers if name.endswith("rotary_pos_emb.inv_freq")]
    curve = pictures.train_ours(path, out, bf16=True, steps=1, export=False)
    return frequencies.tolist(), str(frequencies.dtype), curve


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_near_and_keeps_the_frequencies_of_positions(paths, tmp_path, family):
    path = paths[family]
    [(frequencies, dtype, [(loss, _)])] = world.run(in_bf16, 1, path, str(tmp_path))
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    assert dtype == "torch.float32"
    assert frequencies == model.model.visual.rotary_pos_emb.inv_freq.tolist()
    first = pictures.samples()[:4]
    with torch.no_grad():
        total = sum(pictures.loss_of(model, document).item() for document in first)
    wanted = total / sum(int((document["labels"] != -100).sum()) for document in first)
    assert loss == pytest.approx(wanted, rel=5e-3)  # bf16 has three digits
