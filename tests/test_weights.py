"""Hugging Face weights in and out: the same bytes after a round trip in any layout, and errors that
name the tensor.
"""

import ctypes
import filecmp
import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.shared import tiny, world
from tests.shared.files import (
    EMBEDDING,
    SEED,
    TOKENS,
    assert_same_bytes,
    changed,
    load_hf,
    make_args,
    tensors,
)
from tests.shared.held import PeakMemory
from tests.shared.layouts import PP2, TP2

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "tp2sp": (2, {**TP2, "sequence_parallel": True}),
    "pp2": (2, PP2),
    "pp2_uneven": (2, {**PP2, "pipeline_model_parallel_layout": "Ettt|tL"}),
    "pp2vpp2": (2, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    "pp2vpp2_head_alone": (
        2,
        {
            **PP2,
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et|tt|t|L",
        },
    ),
    "tp2pp2": (4, {**TP2, **PP2}),
    "dp2": (2, {}),
}
FAMILIES = list(tiny.FAMILY_KEYS)
SHARDED = ("mistral", "qwen3")  # the folders that come as several files with an index
BF16 = [
    ("llama", "tp2"),
    ("mistral", "tp2pp2"),
    ("qwen2", "pp2vpp2"),
    ("qwen3", "pp2"),
    ("qwen3", "dp2"),
]
# bytes of a shard: less than the embedding's 61 * 32 * 4, more than any two other tensors but norms
LIMIT = 7000


# -- on the ranks ----------------------------------------------------------------------------------


def through_every_family(sources: dict, bf16_sources: dict, out: str, keys: dict) -> dict:
    """Export each model as it came, in one file and in several, and one drawn from a seed. One
    world for all of them.

    Returns per family the bytes that this rank read, those of its parameters, and on one stage the
    logits.
    """
    from mca_lite.model import AutoModel
    from mca_lite.model_config import AutoConfig

    args, measured = make_args(**keys), {}
    for family, path in sources.items():
        models = AutoModel.from_pretrained(path, args).eval()
        models.save_pretrained(f"{out}/{family}")
        models.save_pretrained(f"{out}/{family}-shards", max_shard_size=LIMIT)
        measured[family] = count_bytes(models, path)
        if args.pipeline_model_parallel_size == 1:
            with torch.no_grad():
                measured[family]["logits"] = models.gather_logits(
                    models(torch.tensor(TOKENS))
                ).tolist()
        drawn = AutoModel.from_config(AutoConfig.from_pretrained(path, args), args, SEED)
        drawn.save_pretrained(f"{out}/{family}-seed")
    args = make_args(bf16=True, **keys)
    for family, path in bf16_sources.items():
        AutoModel.from_pretrained(path, args).save_pretrained(f"{out}/{family}-bf16")
        drawn = AutoModel.from_config(AutoConfig.from_pretrained(path, args), args, SEED)
        drawn.save_pretrained(f"{out}/{family}-bf16-seed")
    return measured


def count_bytes(models, path: str) -> dict:
    from mca_lite import weights_convert, weights_files

    class Counting(weights_files.SafetensorsSource):
        num_bytes = 0

        def read(self, *args, **kwargs):
            value = super().read(*args, **kwargs)
            self.num_bytes += value.nbytes
            return value

    source = Counting(path)
    weights_convert.fill(models, source)
    shapes = {n: tuple(p.shape) for n, p in models.named_parameters()}
    return {
        "read": source.num_bytes,
        "own": sum(p.nbytes for p in models.parameters()),
        "shapes": shapes,
    }


def export_at_tp4(path: str, out: str) -> list:
    from mca_lite.model import AutoModel

    models = AutoModel.from_pretrained(path, make_args(tensor_model_parallel_size=4)).eval()
    models.save_pretrained(out)
    with torch.no_grad():
        tokens = torch.tensor(TOKENS) % models.config.vocab_size
        return models.gather_logits(models(tokens)).tolist()


def memory_of_a_round_trip(path: str, out: str, keys: dict, max_shard_size: int) -> dict:
    """Bytes of this rank's parameters, and by how much private memory rose while they were read and
    written.
    """
    from mca_lite import parallel
    from mca_lite.model import AutoModel

    args = make_args(**keys)
    parallel.initialize(args)
    # blocks above 64 KiB go back to the system when they are freed: the rise is what is held, not
    # what malloc keeps
    ctypes.CDLL(None).mallopt(-3, 65536)
    ctypes.CDLL(None).malloc_trim(0)  # pages that are free already would be taken without a rise
    with PeakMemory() as reading:
        models = AutoModel.from_pretrained(path, args)
    with PeakMemory() as writing:
        models.save_pretrained(out, max_shard_size)
    own = sum(p.nbytes for p in models.parameters())
    return {"own": own, "reading": reading.rise, "writing": writing.rise}


# -- round trips -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    size = {family: "10KB" if family in SHARDED else "50GB" for family in FAMILIES}
    return {f: tiny.save_model(folder / f, f, max_shard_size=size[f]) for f in FAMILIES}


@pytest.fixture(scope="module")
def trip(sources, tmp_path_factory):
    """trip(layout) -> (folder of the exports, what each rank measured); each layout runs once."""

    @functools.cache
    def run(layout: str):
        out, (ranks, keys) = tmp_path_factory.mktemp(layout), LAYOUTS[layout]
        halves = [family for family, wanted in BF16 if wanted == layout]
        bf16 = {
            f: tiny.save_model(out / f"{f}-bf16-source", f, dtype=torch.bfloat16) for f in halves
        }
        return out, world.run(through_every_family, ranks, sources, bf16, str(out), keys)

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_gives_the_same_bytes(family, layout, sources, trip):
    out, _ = trip(layout)
    assert_same_bytes(tensors(out / family), tensors(sources[family]))
    assert_same_bytes(tensors(out / f"{family}-shards"), tensors(sources[family]))
    if family not in SHARDED:
        assert filecmp.cmp(
            out / family / "model.safetensors",
            f"{sources[family]}/model.safetensors",
            shallow=False,
        )


@pytest.mark.parametrize(("family", "layout"), BF16)
def test_bf16_round_trip_gives_the_same_bytes(family, layout, trip):
    out, _ = trip(layout)
    wanted = tensors(out / f"{family}-bf16-source")
    assert {value.dtype for value in wanted.values()} == {torch.bfloat16}
    assert_same_bytes(tensors(out / f"{family}-bf16"), wanted)
    assert json.loads((out / f"{family}-bf16" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_export_and_gives_the_same_logits(family, sources, trip):
    out, _ = trip("tp2pp2")
    theirs = load_hf(sources[family])
    for name in (family, f"{family}-shards"):
        ours, info = load_hf(out / name, output_loading_info=True)
        assert (
            not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        )
        assert ours.config.to_diff_dict() == theirs.config.to_diff_dict()
        with torch.no_grad():
            assert torch.equal(
                ours(torch.tensor(TOKENS)).logits, theirs(torch.tensor(TOKENS)).logits
            )


@pytest.mark.parametrize("layout", ["one", "tp2", "tp2sp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, layout, sources, trip):
    with torch.no_grad():
        wanted = load_hf(sources[family])(torch.tensor(TOKENS)).logits
    for measured in trip(layout)[1]:
        # float32, summed in another order
        torch.testing.assert_close(
            torch.tensor(measured[family]["logits"]), wanted, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_head_is_written_once(family, layout, trip):
    names = tensors(trip(layout)[0] / family)
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names


def test_head_that_a_tied_checkpoint_repeats_is_left_out(sources, tmp_path):
    path = changed(
        sources["qwen2"],
        tmp_path / "in",
        lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}),
    )
    world.run(export_at_tp4, 4, path, str(tmp_path / "out"))
    assert_same_bytes(tensors(tmp_path / "out"), tensors(sources["qwen2"]))


def test_vocabulary_is_padded_inside_and_stripped_outside(trip):
    out, (first, last) = trip("tp2")
    for measured in (first, last):
        assert measured["llama"]["shapes"]["embedding.word_embeddings.weight"] == (
            31,
            32,
        )  # 62 rows for 61 tokens
        assert measured["llama"]["shapes"]["output_layer.weight"] == (31, 32)
    assert tensors(out / "llama")["lm_head.weight"].shape == (61, 32)
    assert json.loads((out / "llama" / "config.json").read_text())["vocab_size"] == 61


def test_rank_may_hold_nothing_but_padding_of_the_vocabulary(tmp_path):
    """5 tokens over 4 ranks: two rows each, the last rank has none of the model's."""
    path = tiny.save_model(tmp_path / "in", "llama", vocab_size=5, num_key_value_heads=4)
    logits = world.run(export_at_tp4, 4, path, str(tmp_path / "out"))
    assert_same_bytes(tensors(tmp_path / "out"), tensors(path))
    with torch.no_grad():
        wanted = load_hf(path)(torch.tensor(TOKENS) % 5).logits
    for got in logits:
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=1e-5, atol=1e-5)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["one", "tp2pp2"])
def test_shards_have_standard_names_and_a_complete_index(layout, sources, trip):
    folder = trip(layout)[0] / "llama-shards"
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        name: file for file in files for name in load_file(folder / file)
    }
    assert index["weight_map"].keys() == tensors(sources["llama"]).keys()
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in tensors(sources["llama"]).values()
    )
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        *files,
    ] + ["model.safetensors.index.json"]


def test_total_size_is_the_one_that_transformers_writes(sources, trip):
    ours, theirs = (
        json.loads(Path(folder, "model.safetensors.index.json").read_text())["metadata"][
            "total_size"
        ]
        for folder in (trip("pp2")[0] / "mistral-shards", sources["mistral"])
    )
    assert ours == theirs


def test_shard_is_larger_than_the_limit_only_where_one_tensor_is(trip):
    for file in (trip("tp2")[0] / "llama-shards").glob("*.safetensors"):
        held = load_file(file)
        assert sum(t.nbytes for t in held.values()) <= LIMIT or list(held) in (
            [EMBEDDING],
            ["lm_head.weight"],
        )


def test_shards_are_filled_up_to_the_limit(tmp_path):
    from mca_lite.weights_files import write_safetensors

    sizes = [40, 60, 1, 150, 100, 50, 49]  # bytes
    items = [(f"t{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    write_safetensors(items, tmp_path, 100)
    shards = [sorted(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))]
    assert shards == [["t0", "t1"], ["t2"], ["t3"], ["t4"], ["t5", "t6"]]


def test_smaller_export_leaves_no_shard_of_an_earlier_one(tmp_path):
    from mca_lite.weights_files import write_safetensors

    items = [(f"t{i}", torch.full((4,), float(i))) for i in range(3)]
    write_safetensors(items, tmp_path, 16)
    assert len(list(tmp_path.iterdir())) == 4
    write_safetensors(items, tmp_path, "1KB")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    write_safetensors(items[:2], tmp_path, 16)
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_model_may_be_written_over_the_folder_that_it_came_from(sources, tmp_path):
    path = str(shutil.copytree(sources["mistral"], tmp_path / "model"))
    world.run(export_at_tp4, 4, path, path)
    assert not list(Path(path).glob("model-*"))
    assert_same_bytes(tensors(path), tensors(sources["mistral"]))


def test_folder_with_a_file_and_an_index_is_read_as_transformers_reads_it(tmp_path):
    from mca_lite.weights_files import SafetensorsSource

    path = tiny.save_model(tmp_path / "model", "qwen3", max_shard_size="10KB")
    other = tiny.save_model(tmp_path / "other", "qwen3", seed=5)
    shutil.copy(f"{other}/model.safetensors", path)
    wanted = load_hf(path).state_dict()[EMBEDDING]
    assert torch.equal(SafetensorsSource(path).read(EMBEDDING), wanted)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("10GiB", 10 * 2**30),
        ("500MB", 500 * 10**6),
        ("2.5KB", 2500),
        ("1.5KiB", 1536),
        ("1 tb", 10**12),
        (" 20 B ", 20),
        ("77", 77),
        (77, 77),
        ("4.1KB", 4100),
    ],
)
def test_size_of_a_shard_is_parsed(text, size):
    from mca_lite.weights_files import parse_size

    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "five", "-5GB", "1.2.3GB", ".", "5GB5", "1e3"])
def test_what_is_no_size_is_refused(text):
    from mca_lite.weights_files import parse_size

    with pytest.raises(ValueError, match=f"{re.escape(repr(text))} .*5GB or 500MB"):
        parse_size(text)


# -- what a rank reads and holds -------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_replica_reads_the_bytes_of_its_own_slices_and_no_others(layout, trip):
    """Others get them by broadcasts: test_many_ranks."""
    ranks = trip(layout)[1]
    if layout == "dp2":
        assert all(measured["read"] == 0 for measured in ranks.pop().values())
    for rank, measured in enumerate(ranks):
        for family in FAMILIES:
            shapes = measured[family]["shapes"].items()
            copies = sum(
                n.endswith(("word_embeddings.weight", "output_layer.weight")) for n, _ in shapes
            )
            # the last tensor-parallel rank holds one row more than there are tokens, of 32 floats
            padding = copies * 32 * 4 if layout.startswith("tp2") and rank % 2 else 0
            assert measured[family]["read"] == measured[family]["own"] - padding > 0
    whole = trip("one")[1][0]["llama"]["own"]
    if layout not in ("one", "dp2"):
        assert all(measured["llama"]["own"] < 0.85 * whole / (len(ranks) / 2) for measured in ranks)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    """A model of 50 MB whose largest tensor has 1 MB, 2 MB where gate and up are joined."""
    keys = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=12, vocab_size=999)
    path = tiny.save_model(tmp_path_factory.mktemp("large") / "model", "qwen3", head_dim=64, **keys)
    yield path
    shutil.rmtree(path)  # pytest keeps the folders of three runs


@pytest.mark.parametrize("keys", [TP2, PP2], ids=["tp2", "pp2"])
def test_memory_holds_the_local_shard_and_little_else(keys, large, tmp_path):
    mb = 1e6
    whole = sum(t.nbytes for t in tensors(large).values())
    assert 45 * mb < whole < 60 * mb
    for measured in world.run(memory_of_a_round_trip, 2, large, str(tmp_path), keys, 4_000_000):
        assert 0.45 * whole < measured["own"] < 0.55 * whole
        assert measured["own"] < measured["reading"] < measured["own"] + 4 * mb
        assert (
            measured["writing"] < 12 * mb
        )  # a shard of 4 MB, and one tensor: its parts, joined, and as it is written
    assert_same_bytes(tensors(tmp_path), tensors(large))
    shutil.rmtree(tmp_path)


# -- weights drawn from a seed ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_from_scratch_are_those_of_the_torch_backend_in_every_layout(
    family, layout, sources, trip
):
    from mca_lite.model import load_torch_model

    model = load_torch_model(sources[family], train_from_scratch=True, seed=SEED)
    wanted = {name: value.detach() for name, value in model.named_parameters()}
    assert_same_bytes(tensors(trip(layout)[0] / f"{family}-seed"), wanted)


@pytest.mark.parametrize(("family", "layout"), BF16)
def test_weights_from_scratch_in_bf16_are_the_float32_ones_rounded(family, layout, trip):
    from mca_lite.model import load_torch_model

    model = load_torch_model(
        str(trip(layout)[0] / f"{family}-bf16-source"), train_from_scratch=True, seed=SEED
    )
    wanted = {name: value.detach().bfloat16() for name, value in model.named_parameters()}
    assert_same_bytes(tensors(trip(layout)[0] / f"{family}-bf16-seed"), wanted)


def test_weights_from_scratch_have_the_distribution_that_the_config_asks_for():
    from mca_lite.weights_files import InitSource

    hf = tiny.hf_config("qwen2", hidden_size=64, initializer_range=0.05).to_dict()
    source, other = InitSource(hf, SEED), InitSource(hf, SEED + 1)
    matrices = [name for name in source.names() if len(source.shape(name)) == 2]
    values = torch.cat([source.read(name).flatten() for name in matrices])
    # tens of thousands of draws: the mean lies within 5 standard errors, the deviation within 2 %
    assert (
        abs(values.mean()) < 5 * 0.05 / len(values) ** 0.5 and abs(values.std() / 0.05 - 1) < 0.02
    )
    assert len({source.read(name).flatten()[0].item() for name in matrices}) == len(
        matrices
    )  # a seed for each name
    assert not any(torch.equal(source.read(name), other.read(name)) for name in matrices)
    for name in source.names() - set(matrices):
        assert (source.read(name) == (0.0 if name.endswith(".bias") else 1.0)).all(), name
    rows, columns = (slice(3, 9),), (slice(None), slice(3, 9))
    assert torch.equal(source.read(EMBEDDING, rows), source.read(EMBEDDING)[3:9])
    assert torch.equal(source.read(EMBEDDING, columns), source.read(EMBEDDING)[:, 3:9])


# -- query groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [(), (5,)], ids=["bias", "weight"])
def test_parts_of_qkv_join_to_the_whole_with_fewer_groups_than_ranks(tp, width):
    """8 heads of 4 in 2 groups: per group 4 queries, the key, the value."""
    from types import SimpleNamespace

    from mca_lite import weights_convert
    from mca_lite.families_rows import Row

    config = SimpleNamespace(
        num_attention_heads=8, num_query_groups=2, kv_channels=4, tensor_model_parallel_size=tp
    )
    q, k, v = (torch.randn(rows, *width) for rows in (32, 8, 8))

    class Source:
        tensors = {"q": q, "k": k, "v": v}

        def shape(self, name):
            return tuple(self.tensors[name].shape)

        def read(self, name, part):
            return self.tensors[name][part]

    row = Row("linear_qkv", ("q", "k", "v"), "qkv")
    parts = [weights_convert.read_part(row, None, Source(), config, rank) for rank in range(tp)]
    assert {part.shape[0] for part in parts} == {48 // tp}
    assert torch.equal(torch.cat(parts), torch.cat([q[:16], k[:4], v[:4], q[16:], k[4:], v[4:]]))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "kind, rows, fused",
    [
        ("copy", [8], False),
        ("row", [8], False),
        ("column", [8], False),
        ("gated", [8, 8], False),
        ("gated", [16], True),
        ("qkv", [16, 8, 8], False),
        ("qkv", [32], True),
        ("delta_grouped", [32, 16], False),
        ("delta", [24, 8, 8, 8], False),
        ("delta_convolution", [24], True),
    ],
)
def test_the_parts_that_ranks_read_join_and_split_into_the_tensors_of_the_files(
    tp, kind, rows, fused
):
    from types import SimpleNamespace

    from mca_lite.families_rows import Row
    from mca_lite.weights_convert import read_part, split

    config = SimpleNamespace(
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=2,
        linear_value_head_dim=1,
        tensor_model_parallel_size=tp,
    )
    held = {str(i): torch.randn(n, 12) for i, n in enumerate(rows)}
    source = SimpleNamespace(
        shape=lambda name: tuple(held[name].shape), read=lambda name, part: held[name][part]
    )
    row = Row("module.weight", tuple(held), kind, fused=fused)
    ranks = range(1 if row.axis is None else tp)  # of what is not cut each rank has the whole
    parts = [read_part(row, None, source, config, rank) for rank in ranks]
    assert len({part.shape for part in parts}) == 1
    whole = torch.cat(parts, row.axis or 0)
    found = dict(split(row, None, whole, config))
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())


def test_a_model_that_cannot_be_written_names_the_folder_and_the_error(tmp_path):
    from mca_lite.weights_convert import write_model

    def refuse(name, tensor):
        raise OSError("no space left")

    tensors = iter([("a", torch.zeros(2)), ("b", torch.zeros(2))])
    with pytest.raises(OSError, match="could not be written: no space left"):
        write_model(tensors, tmp_path, "5GB", {}, None, torch.float32, change=refuse)
    assert not list(tmp_path.iterdir()) and not list(tensors)


def test_model_with_fewer_query_groups_than_ranks_keeps_its_logits_and_bytes(sources, tmp_path):
    logits = world.run(export_at_tp4, 4, sources["qwen2"], str(tmp_path))
    assert_same_bytes(tensors(tmp_path), tensors(sources["qwen2"]))
    with torch.no_grad():
        wanted = load_hf(sources["qwen2"])(torch.tensor(TOKENS)).logits
    for got in logits:
        torch.testing.assert_close(torch.tensor(got), wanted, rtol=1e-5, atol=1e-5)


def export_where_the_main_rank_fails(path: str, out: str, **keys) -> str:
    from mca_lite import AutoModel, TrainingArguments, weights_convert

    model = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused", **keys))

    def fail(tensors, *args):
        next(tensors)
        raise OSError("no space left")

    weights_convert.write_safetensors = fail
    try:
        model.save_pretrained(out)
    except OSError as error:
        return str(error)
    return "nothing failed"


def test_an_export_that_cannot_be_written_fails_on_all_ranks(tmp_path):
    """The other stage sends its tensors to the end: nobody waits."""
    path = tiny.save_model(tmp_path / "model", "llama")
    out = str(tmp_path / "out")
    for error in world.run(export_where_the_main_rank_fails, 2, path, out, **PP2):
        assert "could not be written: no space left" in error
