"""Long rows: attention kept over recomputation and activations in host memory change no bit, and
tiles of an MLP the last ones of a gradient, in every layout.
"""

import contextlib
import functools
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mca_lite import part_long, part_long_auto
from mca_lite.errors import Judge
from mca_lite.part_long import PIECE, POOL, HostPool, Offloaded, host_memory
from mca_lite.part_lora import inject
from mca_lite.part_lora_layers import LoraSpec
from mca_lite.part_quantised import FORMS, Quantised
from tests.shared import dpo_tools, pictures, tiny, tiny_moe, world
from tests.shared.held import train_and_measure
from tests.shared.layouts import (
    CP2,
    CUT,
    DENSE,
    EP2,
    FULL,
    PACKED,
    PACKED_LAYOUTS,
    PP2,
    TP2,
    TP2_SP,
    VPP2,
)
from tests.shared.training import arguments, refusal, train, whole_and_resumed

KEEP = dict(FULL, recompute_keep="core_attn")
AWAY = dict(FULL, activation_offloading=True)
SAME = {"kept": KEEP, "away": AWAY, "both": KEEP | AWAY}
AUTO = dict(KEEP, recompute_granularity="auto")
TILED = dict(mlp_chunk_size=3)
STEPS = dict(steps=2, count=7, warmup_steps=0)
LAYOUTS = {
    **DENSE,
    **{f"{name}, padded": pair for name, pair in CUT.items()},
    **{f"{name}, packed": (n, {**keys, **PACKED}) for name, (n, keys) in PACKED_LAYOUTS.items()},
}
# in `make test`; the other layouts and families are in `make test-all`
SHORT = ("one", "tp2_sp", "one, packed", "pp2_vpp2, packed", "cp2, packed")
SLOW_FAMILIES = "ahead", "shared experts", "delta", "pictures", "sinks"


class Counted(TorchDispatchMode):
    """Counts the calls of torch's attention kernel of a CPU."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        Counted.calls += name.startswith("aten::_scaled_dot_product") and "backward" not in name
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_tiles():
    """An entry for each module that this context runs in tiles."""
    found, forward = [], part_long.Tiles.forward

    def counted(ctx, *more):
        found.append(True)
        return forward(ctx, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_long.Tiles, "forward", staticmethod(counted))
        yield found


@contextlib.contextmanager
def half_of_the_room():
    """Layers are chosen for memory half way between those of none and of all recomputed; the
    chosen numbers."""
    found, least = [], part_long_auto.least

    def chosen(count, need, room):
        found.append(least(count, need, (need(0) + need(count)) / 2))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_long_auto, "least", chosen)
        yield found


def curves_of(path: str, out: str, runs: dict, run=train, **keys) -> dict:
    """{name: (curve, calls of the kernel)} of runs {name: keys} on this rank; and the bytes of host
    memory that are in use after them."""
    found: dict = {}
    for name, changes in runs.items():
        Counted.calls = 0
        with Counted(), counted_tiles() as tiles, half_of_the_room() as chosen:
            curve = run(path, f"{out}/{name}", **{**keys, **changes})
        found[name] = curve, Counted.calls
        found[f"tiles of {name}"] = len(tiles)
        found[f"layers of {name}"] = chosen
    free = sum(piece.nbytes for pieces in POOL.free.values() for piece in pieces)
    return {**found, "in use": POOL.taken - free, "taken": POOL.taken}


def assert_same(found: dict, attends: bool = True) -> None:
    """The curves of the keys without a bit of difference; half of the kernel's calls where it is
    kept."""
    (wanted, calls) = found["plain"]
    assert calls or not attends
    for name in found.keys() & SAME.keys():
        curve, of_kernel = found[name]
        assert curve == wanted, name
        assert of_kernel == (calls if name == "away" else calls / 2)
    assert found["taken"] and not found["in use"]


def assert_near(found: dict, tolerance: float = 1e-6) -> None:
    curve, wanted = found["tiled"][0], found["plain"][0]
    for ours, theirs in zip(curve, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
    assert found["tiles of tiled"] and not found["tiles of plain"]


@functools.cache
def model_of(family: str) -> str:
    import tempfile

    folder = tempfile.mkdtemp()
    if family in pictures.FAMILIES:
        return pictures.save_model(folder, family)
    make = tiny_moe if family in tiny_moe.MODELS else tiny
    return make.save_model(folder, family)


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.full]) for n in LAYOUTS]
)
def test_a_layout_trains_to_the_same_bits(layout, tmp_path):
    ranks, keys = LAYOUTS[layout]
    runs = {"plain": FULL, "both": SAME["both"], "tiled": {**FULL, **TILED}, "auto": AUTO}
    more = dict(STEPS, timeout_s=200)
    for found in world.run(
        curves_of, ranks, model_of("qwen3"), str(tmp_path), runs, **more, **keys
    ):
        assert_same(found)
        assert_near(found)
        assert found["auto"][0] == found["plain"][0] and len(found["layers of auto"]) == 1


def accumulate_in_place(model):
    """Let products add to DDP's gradients, as on a GPU."""
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True
        if hasattr(module, "accumulate_in_place"):
            module.accumulate_in_place()
    return model


def adapted(models):
    return inject(models, LoraSpec(rank=4))


def hooked(models):
    """Let a user's hook change the output of each layer."""
    for layer in models[0].decoder.layers:
        layer.register_forward_hook(lambda module, args, out: out * out.tanh())
    return models


class Flops(TorchDispatchMode):
    """Counts the floating-point operations of matmuls and attention."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._grouped_mm.default:
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        elif func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def flops_of(path: str, out: str, runs: dict, **keys) -> dict:
    """{name: (curve, floating-point operations of this rank)} of runs {name: keys}."""
    found = {}
    for name, changes in runs.items():
        with Flops() as flops:
            curve = train(path, f"{out}/{name}", **{**keys, **changes})
        found[name] = curve, flops.total
    return found


UNITS = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, TP2_SP),
    "pp2": (2, PP2),
    "packed": (1, PACKED),
    "adapters": (1, dict(adapt=adapted, bf16=True)),
    "adapters, tp2_sp": (2, dict(adapt=adapted, bf16=True, **TP2_SP)),
    "tiles": (1, TILED),
    "norm": (1, {}),
    "hook": (1, dict(adapt=hooked)),
    "experts": (2, dict(adapt=accumulate_in_place, **EP2)),
    "experts' adapters": (2, dict(adapt=adapted, bf16=True, **EP2)),
    "experts' tiles": (1, dict(adapt=adapted, bf16=True, **TILED)),
}


# in `make test`; the others are in `make test-all`
SHORT_UNITS = ("tp2_sp", "adapters", "tiles", "norm", "hook", "experts' adapters")


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[] if n in SHORT_UNITS else [pytest.mark.full]) for n in UNITS]
)
def test_a_recomputed_unit_leaves_out_its_last_matmul(case, tmp_path):
    ranks, keys = UNITS[case]
    runs = {"none": {}, "one": FULL, "two": {**FULL, "recompute_num_layers": 2}}
    # gemma's norm after the MLP and the hook read its output
    reads = case in ("norm", "hook")
    family = {"norm": "gemma3_text"}.get(case, "qwen3_moe" if "experts" in case else "qwen3")
    more = dict(STEPS, timeout_s=200)
    for found in world.run(flops_of, ranks, model_of(family), str(tmp_path), runs, **more, **keys):
        curves, (none, one, two) = zip(*found.values(), strict=True)
        assert curves[0] == curves[1] == curves[2]
        assert none < one == two if reads else none < one < two


FAMILIES = {
    "sinks": ("gpt_oss", 2, {**EP2, **PACKED}),
    "latent": ("deepseek_v3", 1, PACKED),
    "ahead": ("deepseek_v3", 2, {**CP2, "mtp_num_layers": 1}),
    "experts": ("qwen3_moe", 2, EP2),
    "shared experts": ("qwen2_moe", 2, TP2_SP),
    "delta": ("qwen3_next", 2, CP2),
    "window": ("gemma3_text", 1, {}),
    "pictures": ("qwen2_5_vl", 2, {**PP2, **PACKED}),
}


def train_drawn(path: str, out: str, **keys) -> list:
    """train() of weights drawn from the seed: no file has layers for multi-token prediction."""
    from mca_lite.model import AutoModel
    from mca_lite.model_config import AutoConfig

    def draw(path, args, vocab_size):
        return AutoModel.from_config(AutoConfig.from_pretrained(path, args), args)

    AutoModel.from_pretrained = draw
    return train(path, out, **keys)


@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=[pytest.mark.full] if n in SLOW_FAMILIES else []) for n in FAMILIES],
)
def test_a_family_trains_to_the_same_bits(case, tmp_path):
    family, ranks, keys = FAMILIES[case]
    keys = {**STEPS, **keys}
    if case in ("experts", "pictures"):
        keys["adapt"] = accumulate_in_place
    run = train_drawn if case == "ahead" else train
    if case == "pictures":
        run = pictures.train_ours
        del keys["count"]
    runs = {"plain": FULL, "kept": KEEP, "both": SAME["both"], "tiled": {**FULL, **TILED}}
    more = dict(run=run, timeout_s=200)
    for found in world.run(curves_of, ranks, model_of(family), str(tmp_path), runs, **more, **keys):
        for name in ("kept", "both"):
            assert found[name][0] == found["plain"][0]
        # the kernels of a CPU have neither sinks nor heads of two sizes; pictures have others
        calls = found["plain"][1]
        assert found["kept"][1] == found["both"][1] <= (calls or 1) - (calls > 0)
        assert_near(found)


def train_pairs(path: str, out: str, **keys) -> list:
    """The log of preference training with a reference."""
    objective = dpo_tools.OBJECTIVES["sigmoid"]
    return dpo_tools.curve_of(dpo_tools.our_run(path, out, objective, ref=True, **keys))


@pytest.mark.parametrize("layout", [{**PP2, **VPP2}, {**CP2, **PACKED}], ids=["vpp2", "cp2_packed"])
def test_pairs_train_to_the_same_bits(layout, tmp_path):
    runs = {"plain": FULL, "both": SAME["both"], "tiled": {**FULL, **TILED}}
    more = dict(run=train_pairs, timeout_s=200)
    for found in world.run(curves_of, 2, model_of("qwen3"), str(tmp_path), runs, **more, **layout):
        assert found["both"][0] == found["plain"][0]
        assert found["both"][1] < found["plain"][1] and not found["in use"]


def test_a_run_goes_on_with_other_keys_of_long_rows(tmp_path):
    keys = dict(first=FULL, then={**SAME["both"]})
    path = model_of("qwen3")
    [(whole, resumed)] = world.run(whole_and_resumed, 1, path, str(tmp_path), **keys)
    assert resumed == whole


# ---- as many layers as memory needs


def test_the_fewest_layers_are_recomputed_for_which_memory_is_enough():
    def need(number):
        return [100, 80, 60, 40, 20][number]

    chosen = [part_long_auto.least(4, need, room) for room in (100, 99, 60, 59, 10)]
    assert chosen == [0, 1, 2, 3, 4]


def chosen_with(path: str, out: str, free: dict, **keys) -> list[tuple]:
    """(recomputed layers of this rank's stage, the summary's words, the words of an error for want
    of memory) for each free memory of the ranks, {rank: bytes}."""
    import torch.distributed as dist

    from mca_lite import cli
    from mca_lite.trainer import McaTrainer

    found, choose = [], part_long_auto.choose

    def watched(backend, *of_run):
        section = choose(backend, *of_run)
        number = backend.config.recompute_num_layers
        error = cli.user_words(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
        found.append((number, section["recomputation"], error))
        return section

    assert McaTrainer
    for name, of_ranks in free.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part_long_auto, "choose", watched)
            patch.setattr(part_long_auto, "free_memory", lambda of=of_ranks: of[dist.get_rank()])
            train(path, f"{out}/{name}", steps=1, count=7, warmup_steps=0, **keys)
    return found


ALL, NONE = 0, 1e12  # bytes: all layers are recomputed, and none


def test_layers_are_chosen_for_the_free_memory(tmp_path):
    free = {"much": [NONE], "little": [ALL]}
    [(much, little)] = world.run(
        chosen_with, 1, model_of("qwen3"), str(tmp_path), free, recompute_granularity="auto"
    )
    assert (much[0], little[0]) == (0, 4)
    assert much[1]["recomputed layers"] == "0 of 4 (recompute_granularity: auto)"
    assert re.fullmatch(
        r"rows of \d+ tokens: 0\.\d+ GiB planned beside weights and optimizer, 931\.\d+ free",
        much[1]["for"],
    )
    assert "chose to recompute 0 of 4 layers; try recompute_granularity: full" in much[2]
    assert "recompute_method: block, recompute_num_layers: 1; python -m mca_lite plan" in much[2]
    assert "chose to recompute 4 of 4 layers; try activation_offloading: true" in little[2]


@pytest.mark.parametrize(
    "layout, wanted", [(PP2, [0, 2]), (TP2_SP, [4, 4])], ids=["stages differ", "ranks agree"]
)
def test_each_stage_chooses_for_itself_and_its_ranks_alike(layout, wanted, tmp_path):
    free = {"uneven": [NONE, ALL]}
    runs = world.run(
        *(chosen_with, 2, model_of("qwen3"), str(tmp_path), free),
        **dict(layout, recompute_granularity="auto"),
    )
    assert [number for [(number, _, _)] in runs] == wanted
    if layout is PP2:
        assert runs[0][0][1]["recomputed layers"].startswith("0 of 2, 2 of 2, by stage")


def test_a_pair_is_planned_with_the_tokens_of_both_answers():
    chosen, rejected = (dict(input_ids=[1] * n, labels=[1] * n) for n in (3, 5))
    pairs = [dict(chosen=chosen, rejected=rejected), dict(chosen=chosen, rejected=chosen)]
    assert part_long_auto.row_tokens(pairs, None, 2) == 8


def test_the_next_choice_is_named_for_each_state():
    from types import SimpleNamespace

    def said(chosen, **keys):
        config = dict(activation_offloading=False, mlp_chunk_size=None) | keys
        return part_long_auto.advice(chosen, 32, SimpleNamespace(**config))

    assert said(8).endswith("recompute_num_layers: 12")
    assert "try activation_offloading: true" in said(32)
    assert "try mlp_chunk_size: 8192" in said(32, activation_offloading=True)
    assert "cutoff_len" in said(32, activation_offloading=True, mlp_chunk_size=8192)


@pytest.mark.parametrize("key", ["recompute_method=block", "recompute_num_layers=2"])
def test_a_number_of_layers_is_refused_beside_auto(key):
    name, _, value = key.partition("=")
    words = refusal(arguments, recompute_granularity="auto", **{name: value})
    assert name in words and "recompute_granularity is auto" in words


def test_room_is_left_for_the_largest_dequantised_weight():
    model = torch.nn.Linear(128, 6, bias=False)
    assert part_long_auto.dequantised_bytes(model, 2) == 0
    empty = Quantised.empty(model.weight.detach(), FORMS["nf4"])
    model.weight = torch.nn.Parameter(empty, requires_grad=False)
    assert part_long_auto.dequantised_bytes(model, 2) == 2 * 128 * 6


# ---- host memory


@pytest.mark.parametrize("shape", [(PIECE // 2 + 100,), (3, 5, 7), (1,)])
def test_a_tensor_comes_back_from_host_memory(shape):
    tensor = torch.randn(*shape).to(torch.bfloat16)
    view = tensor.movedim(0, -1)[..., :]
    size = view.numel() * view.element_size()
    away = Offloaded(view, POOL.take(size))
    away.release()
    assert away.tensor is None
    back = away.get()
    assert torch.equal(back, view) and back.stride() == view.stride()
    assert back.data_ptr() != view.data_ptr()
    taken = POOL.taken
    Offloaded(view, POOL.take(size)).release()  # never read: its memory is free again
    assert POOL.take(size) and POOL.taken == taken >= size


def test_host_memory_is_taken_in_pieces_that_rows_of_other_lengths_can_use():
    pool = HostPool(limit=1e9)
    pieces = pool.take(2 * PIECE + 700)
    assert [piece.nbytes for piece in pieces] == [PIECE, PIECE, 1024]
    pool.give(pieces)
    assert [piece.nbytes for piece in pool.take(PIECE + 1000)] == [PIECE, 1024]
    assert pool.taken == 2 * PIECE + 1024


def test_what_the_host_has_no_memory_for_stays_on_the_device():
    pool = HostPool(limit=3000)
    assert [piece.nbytes for piece in pool.take(1500)] == [2048]
    with pytest.warns(UserWarning, match="of host memory, and no more"):
        assert pool.take(1500) is None
    assert [piece.nbytes for piece in pool.take(500)] == [512]


def with_little_memory(path: str, out: str, **keys) -> tuple[list, int, int]:
    """(curve, curve with room for a few borders, bytes of these) on this rank."""
    wanted = train(path, f"{out}/plain", **keys)
    POOL.limit = 6_000
    return wanted, train(path, f"{out}/away", **keys, **SAME["both"]), POOL.taken


def test_a_host_with_little_memory_gives_the_same_bits(tmp_path):
    for wanted, got, taken in world.run(
        with_little_memory, 2, model_of("qwen3"), str(tmp_path), **STEPS, **PP2
    ):
        assert got == wanted and 3_000 < taken <= 6_000


def test_the_memory_of_a_container_counts(monkeypatch):
    from pathlib import Path

    files = {"memory.max": "5000", "memory.stat": "anon 2000\nfile 2500"}
    real = Path.read_text

    def read(path, *args):
        if str(path).startswith("/sys/fs/cgroup/"):
            return files[path.name] if path.name in files and "memory/" not in str(path) else "max"
        return real(path, *args)

    monkeypatch.setattr(Path, "read_text", read)
    assert host_memory() == 3000


def test_a_full_pool_gives_a_larger_unused_piece():
    pool = HostPool(limit=3000)
    pool.give(pool.take(2048) + pool.take(512))
    [piece] = pool.take(900)
    assert piece.nbytes == 2048 and pool.taken == 2560


# ---- refusals


def test_attention_with_dropout_is_not_kept():
    from mca_lite.model_config import from_hf_config

    keys = arguments(attention_dropout=0.1, **KEEP)
    words = refusal(from_hf_config, tiny.hf_config("qwen3"), keys)
    assert "recompute_keep: 'core_attn'" in words and "attention_dropout: 0" in words


def test_adapters_with_dropout_have_no_tiles():
    from mca_lite.model_config import from_hf_config
    from mca_lite.part_lora_layers import LoraSpec
    from mca_lite.part_lora_rules import check_on_megatron

    config = from_hf_config(tiny.hf_config("qwen3"), arguments(mlp_chunk_size=8))
    judge = Judge(config)
    check_on_megatron(LoraSpec(dropout=0.1), config, [], [], judge)
    assert "lora_dropout: 0, or no mlp_chunk_size" in str(judge.problems)


@pytest.mark.parametrize("key", ["recompute_keep", "activation_offloading"])
def test_keys_of_full_recomputation_are_refused_without_it(key):
    words = refusal(arguments, **{key: SAME["both"][key]})
    assert f"{key}" in words and "recompute_granularity: full" in words


# ---- plan

ROWS = dict(hidden_size=64, intermediate_size=512, vocab_size=256, num_key_value_heads=4)


def held_and_planned(out: str, runs: dict) -> dict:
    """{name: (activations on the device, their plan, new bytes in host memory, their plan)} of runs
    {name: keys} on this rank."""
    hf = tiny.hf_config("qwen3", **ROWS)
    found = {}
    for name, keys in runs.items():
        before = POOL.taken
        run = train_and_measure(hf, 128, f"{out}/{name}", max_steps=1, **keys)
        memory = run["planned"]
        away = POOL.taken - before
        POOL.free.clear()
        POOL.taken = 0
        found[name] = run["held"]["activations"], memory.activations, away, memory.host
    return found


@pytest.mark.parametrize("layout", [(1, {}), (2, TP2_SP), (2, CP2)], ids=["one", "tp2", "cp2"])
def test_memory_falls_by_what_the_plan_says(layout, tmp_path):
    ranks, keys = layout
    of_batch = dict(global_batch_size=1, per_device_train_batch_size=1, **keys)
    runs = {
        "plain": FULL,
        "away": AWAY,
        "both": SAME["both"],
        "tiled": {**FULL, "mlp_chunk_size": 16},
        "two layers": {**KEEP, "recompute_method": "block", "recompute_num_layers": 2},
    }
    runs = {name: {**of_batch, **run} for name, run in runs.items()}
    for found in world.run(held_and_planned, ranks, str(tmp_path), runs, timeout_s=200):
        held, planned, away, host = found["plain"]
        assert away == host == 0 and held == pytest.approx(planned, rel=0.1)
        # tensors of a power of two: borders, and what attention's kernels gave
        for name in ("away", "both"):
            assert found[name][2] == pytest.approx(found[name][3], rel=0.02)
        # at the peak one of the four borders is on the device again
        fallen = found["plain"][0] - found["away"][0]
        assert fallen == pytest.approx(found["away"][3] * 3 / 4, rel=0.05)
        held, planned, *_ = found["two layers"]
        assert held == pytest.approx(planned, rel=0.1)
        got = found["plain"][0] - found["tiled"][0]
        assert got == pytest.approx(found["plain"][1] - found["tiled"][1], rel=0.1)
