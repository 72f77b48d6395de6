"""`python -m mca_lite plan`: what it says of memory is what ranks hold."""

import os
import re

import pytest
import torch

from mca_lite.args import parse_args
from mca_lite.tool_plan_memory import ModelOfRun
from tests.shared import commands, tiny, tiny_moe, world
from tests.shared.layouts import CP2, DIST_OPT, EP2, FULL, PP2, TP2_SP, VPP2
from tests.shared.training import train

BF16, TWO = dict(bf16=True), dict(per_device_train_batch_size=2)
MORE = dict(gradient_accumulation_steps=3)
SMALL = dict(hidden_size=64, intermediate_size=176, vocab_size=512, num_attention_heads=8)
MILLIONS = dict(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=24576,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
LAYOUTS = {
    "one": (1, TWO),
    "one_bf16": (1, {**TWO, **BF16}),
    "tp2_sp_bf16": (2, {**TP2_SP, **BF16}),
    "pp2": (2, {**PP2, **MORE}),
    "pp2_one": (2, {**PP2, "gradient_accumulation_steps": 1}),  # fewer in flight than stages
    "pp2_vpp2": (2, {**PP2, **VPP2, "gradient_accumulation_steps": 4}),
    "dp2_dist_opt_bf16": (2, {**DIST_OPT, **BF16}),
    "cp2": (2, CP2),
    "full": (1, {**FULL, **TWO}),
}
# The same formulas, where rows and padding are a small part: each of them is held for a tiny model
# in its layout.
OF_MILLIONS = [
    "tp2_sp_bf16",
    *(
        pytest.param(name, marks=pytest.mark.full)
        for name in ("one_bf16", "pp2", "dp2_dist_opt_bf16", "cp2", "full")
    ),
]


# what one H200 held at the peak of a step in bf16, GiB (case of tests/tools/bench_gpu.py)
H200 = {
    "0.5B": (39.0, {}),
    "1.5B": (56.6, {}),
    "4B": (93.6, {}),  # 93.0 where values of heads were views
    # 79.6 where the head's gradient stayed until the next micro-batch's was there
    "4B, moments in bf16": (78.1, dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")),
    "LoRA 8B": (51.2, {}),
    "experts": (78.5, {}),
    "DPO 1.5B": (44.4, {}),  # its reference is in memory
}
_FULL = dict(recompute_granularity="full")
_KEEP = dict(_FULL, recompute_keep="core_attn", loss_chunk_size=8192)
_HALF = dict(_KEEP, recompute_method="block", recompute_num_layers=16)
# long rows, of the cases' lengths: 8B with adapters, and 1.5B
LONG = {
    "LoRA 8B 32k, half of the layers recomputed": (94.8, _HALF),
    "LoRA 8B 32k, all recomputed": (30.0, dict(_FULL, loss_chunk_size=8192)),
    "LoRA 8B 65k": (44.3, _FULL),
    "LoRA 8B 131k, all recomputed": (72.5, _FULL),
    "LoRA 8B 131k": (104.3, _KEEP),
    "1.5B 65k": (35.6, _FULL),
}


def measured(hf, length: int, out: str, keys: dict) -> dict:
    from tests.shared.held import train_and_measure

    return train_and_measure(hf, length, out, **keys)


def check(hf, ranks: int, length: int, out, keys: dict) -> None:
    for run in world.run(measured, ranks, hf, length, str(out), keys, timeout_s=200):
        held, planned = run["held"], run["planned"]
        assert planned.parameters == run["parameters"]
        for part, wanted in held.items():
            assert getattr(planned, part) == pytest.approx(wanted, rel=0.1), part


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_tiny_model_hold_what_is_planned(tmp_path, layout):
    check(tiny.hf_config("qwen3", **SMALL), LAYOUTS[layout][0], 64, tmp_path, LAYOUTS[layout][1])


@pytest.mark.parametrize(
    "name, keys",
    [
        ("qwen3_moe", EP2),
        ("qwen2_moe", {**EP2, **BF16}),
        ("qwen3_moe", {**EP2, **DIST_OPT}),  # each rank has its own experts, and all their states
    ],
)
def test_ranks_of_a_mixture_of_experts_do(tmp_path, name, keys):
    hf = tiny_moe.hf_config(name, hidden_size=64, vocab_size=512)
    check(hf, 2, 64, tmp_path, {**TWO, **keys})


@pytest.mark.parametrize("name, keys", [("deepseek_v3", {}), ("deepseek_v2", TP2_SP)])
@pytest.mark.parametrize("precision", [{}, BF16])
def test_ranks_with_latent_attention_do(tmp_path, name, keys, precision):
    hf = tiny_moe.hf_config(name, hidden_size=64, vocab_size=512)
    check(hf, 2 if keys else 1, 64, tmp_path, {**TWO, **keys, **precision})


@pytest.mark.parametrize("keys", [BF16, TP2_SP])
def test_ranks_with_linear_attention_do(tmp_path, keys):
    hf = tiny.hf_config("qwen3_5_text", hidden_size=64, vocab_size=512)
    check(hf, 2 if keys is TP2_SP else 1, 128, tmp_path, keys)


@pytest.mark.parametrize(
    "shapes, name, ranks, keys",
    [
        (tiny, "qwen3_5_text", 2, TP2_SP),
        (tiny_moe, "glm4_moe", 2, {**PP2, **MORE}),
        (tiny_moe, "deepseek_v3", 1, {**FULL, **TWO}),
    ],
)
def test_ranks_with_prediction_layers_do(tmp_path, shapes, name, ranks, keys):
    hf = shapes.hf_config(name, hidden_size=64, vocab_size=512)
    check(hf, ranks, 128, tmp_path, dict(keys, mtp_num_layers=1))


def test_ranks_with_adapters_do(tmp_path):
    check(tiny.hf_config("llama", **SMALL), 2, 64, tmp_path, {**TP2_SP, **TWO, "lora_rank": 4})


def test_adapters_of_a_model_in_bf16_are_float32(tmp_path):
    """The table of activations leaves out copies that a CPU makes for their products in bf16."""
    hf, keys = tiny.hf_config("llama", **SMALL), {**TP2_SP, **BF16, "lora_rank": 4}
    for run in world.run(measured, 2, hf, 64, str(tmp_path), keys):
        for part in ("weights", "gradients", "optimizer"):
            # the room that products leave beside a weight for its adapter is not counted
            assert getattr(run["planned"], part) == pytest.approx(run["held"][part], rel=0.1)


@pytest.mark.parametrize("layout", OF_MILLIONS)
def test_ranks_of_a_model_of_50_million_do(tmp_path, layout):
    check(tiny.hf_config("qwen3", **MILLIONS), LAYOUTS[layout][0], 64, tmp_path, LAYOUTS[layout][1])


# layout -> (the operation, how many of what it writes are there at once: what comes and what is
# sent; keys and values as they come and in order)
MESSAGES = {
    "tensor": (TP2_SP, "_allgather_base_", 1),
    "pipeline": (PP2, "recv_", 2),
    "context": (CP2, "_allgather_base_", 2),
    "experts": (EP2, "alltoall_base_", 1),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_are_as_large_as_planned(tmp_path, kind):
    layout, operation, times = MESSAGES[kind]
    hf = tiny.hf_config("qwen3", **SMALL)
    if kind == "experts":
        hf = tiny_moe.hf_config("qwen3_moe", hidden_size=64, vocab_size=512)
    runs = world.run(measured, 2, hf, 64, str(tmp_path), {**TWO, **layout})
    # of activations: others are up to 3 KiB; what an expert gets is even over all ranks alone
    sizes = [size for run in runs for size in run["messages"][operation] if size > 4096]
    mean = sum(sizes) / len(sizes)
    assert [run["planned"].buffers for run in runs] == [pytest.approx(mean * times)] * 2


def test_a_reference_model_is_counted(tmp_path):
    from transformers import AutoModelForCausalLM

    hf = tiny.save_model(tmp_path / "hf", "qwen3", **SMALL)
    larger = tiny.save_model(tmp_path / "ref", "qwen3", **{**SMALL, "intermediate_size": 352})
    words = f"configs/dpo.yaml model_name_or_path={hf} max_steps=2 warmup_steps=0"
    assert reference_in(plan(words)[1]) == 0  # scored before training
    for name, folder in (("model", hf), (larger, larger)):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
        planned = reference_in(plan(f"{words} ref_model={name}")[1])
        assert planned == pytest.approx(count * 4 / 2**20, abs=0.01)


def test_a_teacher_is_counted(tmp_path):
    from transformers import AutoModelForCausalLM

    hf = tiny.save_model(tmp_path / "hf", "qwen3", **SMALL)
    sizes = {**SMALL, "hidden_size": 128, "vocab_size": 520}
    teacher = tiny.save_model(tmp_path / "teacher", "qwen3", **sizes)
    words = f"configs/distill.yaml model_name_or_path={hf} train_from_scratch=false warmup_ratio=0"
    words += f" teacher_model_name_or_path={teacher} max_steps=2"
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(teacher).parameters())
    hidden = 4 * 16 * 128 * 128  # of the four micro-batches: samples, cutoff_len, hidden size
    planned = reference_in(plan(words)[1])
    assert planned == pytest.approx((count + hidden) * 4 / 2**20, abs=0.01)
    # scored before training, in the memory that the optimizer and activations take later
    assert reference_in(plan(f"{words} teacher_top_k=4")[1]) == 0


DISTILL = "distill train_from_scratch=false teacher_model_name_or_path={larger}"
# words -> (forward passes in each step beside training's, over the data before training)
PASSES = {
    "sft": (0, 0),
    "rm": (0, 0),
    "orpo": (0, 0),
    "dpo": (0, 1),
    "dpo finetuning_type=lora ref_model=null": (1, 0),
    "dpo finetuning_type=lora ref_model=cached": (0, 1),
    "dpo ref_model=model": (1, 0),
    "dpo ref_model={larger}": ("larger", 0),
    "dpo pref_loss=bco_pair": (1, 1),
    "kto": (1, 2),
    "kto ref_model=model": (3, 0),
    DISTILL: ("larger", 0),
    f"{DISTILL} teacher_top_k=4": (0, "larger"),
    "distill train_from_scratch=false teacher_model_name_or_path=null teacher_top_k=4 "
    "teacher_cache=rows": (0, 0),
}


def test_forward_passes_of_each_objective_are_counted(tmp_path):
    from transformers import AutoModelForCausalLM

    def weights(folder) -> int:  # of products with a token
        model = AutoModelForCausalLM.from_pretrained(folder)
        return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))

    hf = tiny.save_model(tmp_path / "hf", "qwen3", **SMALL)
    larger = tiny.save_model(tmp_path / "larger", "qwen3", **{**SMALL, "intermediate_size": 352})
    more = {"larger": weights(larger) / weights(hf)}
    assert more["larger"] > 1.2
    for words, wanted in PASSES.items():
        stage, *others = words.format(larger=larger).split()
        given = [f"configs/{stage}.yaml", f"model_name_or_path={hf}", "max_steps=2", *others]
        run = parse_args([*given, "warmup_ratio=0", "warmup_steps=0"], needs_world=False)
        model = ModelOfRun(run)
        found = model.forward_passes(run.training, model.config_of(run))
        assert found == pytest.approx([more.get(number, number) for number in wanted]), words


def test_a_pass_over_the_data_before_training_is_in_the_time(tmp_path):
    hf = tiny.save_model(tmp_path / "hf", "qwen3", **SMALL)
    words = f"model_name_or_path={hf} max_steps=2 warmup_steps=0 --gpu H200"
    assert "before it      a pass over the data, once\n" in plan(f"configs/dpo.yaml {words}")[1]
    assert "before it" not in plan(f"configs/orpo.yaml {words}")[1]


def reference_in(out: str) -> float:
    number, unit = out.split("  reference ")[1].split()[:2]
    assert unit == "MiB"
    return float(number)


def test_transformer_engine_need_not_be_here_to_plan_its_run(tmp_path):
    tiny.hf_config("qwen3").save_pretrained(tmp_path)
    words = f"configs/pt.yaml model_name_or_path={tmp_path} max_steps=4 warmup_steps=0 bf16=true "
    code, plain = plan(words)
    assert code == 0, plain
    layers = "first_last_layers_bf16=true num_layers_at_start_in_bf16=2"
    for more in (
        "fp8=hybrid fp8_recipe=delayed",
        f"fp8=hybrid {layers} apply_rope_fusion=true",
        "transformer_impl=transformer_engine",
    ):
        code, out = plan(words + more)
        assert code == 0 and out == plain


@pytest.mark.parametrize("name", H200)
def test_a_gpu_held_what_is_planned(name):
    from tests.tools import gpu_plan

    case, (peak, keys) = name.split(",")[0], H200[name]
    planned = gpu_plan.planned(case, **keys)[2]
    assert planned.total / 2**30 == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("name", LONG)
def test_a_gpu_held_what_is_planned_of_long_rows(name):
    from tests.tools import gpu_plan

    peak, keys = LONG[name]
    planned = gpu_plan.planned(name.split(",")[0], **keys)[2]
    assert planned.total / 2**30 == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("name, peak", [("hybrid", 111.2), ("LoRA qwen3_5 131k", 90.5)])
def test_a_gpu_held_what_is_planned_of_delta_nets_in_torch(name, peak, monkeypatch):
    """Without flash-linear-attention."""
    from mca_lite import part_delta
    from tests.tools import bench_gpu, gpu_plan

    monkeypatch.setattr(part_delta, "why_no_fla", lambda: "it is not installed")
    planned = gpu_plan.planned(name, **bench_gpu.CASES[name].get("keys", {}))[2]
    assert planned.total / 2**30 == pytest.approx(peak, rel=0.02)


def test_a_plan_says_how_many_layers_auto_recomputes(tmp_path):
    tiny.hf_config("qwen3", **MILLIONS).save_pretrained(tmp_path)
    words = f"configs/pt.yaml model_name_or_path={tmp_path} max_steps=4 warmup_steps=0 "
    words += "cutoff_len=256 per_device_train_batch_size=8 recompute_granularity=auto"
    assert "all 8 layers of a stage; --memory says of which GPUs" in plan(words)[1]
    said, totals = {}, {}
    for gib in (1.4, 1.7, 40):
        out = plan(f"{words} --memory {gib}")[1]
        said[gib] = int(re.search(r"recomputed +(\d) of 8 layers of a stage", out)[1])
        totals[gib] = re.search(r"\n  total +(.*)", out)[1]
    assert said[40] == 0 < said[1.7] < said[1.4], (said, totals)


def test_a_plan_that_is_a_ninth_off_fails_make_gpu():
    from tests.tools import gpu_plan

    assert gpu_plan.line("4B", 92 * 2**30, 93 * 2**30)[0]
    assert (
        "planned  92.00 GiB, held  93.00 (-1.1%)" in gpu_plan.line("4B", 92 * 2**30, 93 * 2**30)[1]
    )
    for factor in (0.89, 1.11, float("nan")):
        assert not gpu_plan.line("4B", factor * 2**30, 2**30)[0]


# -- the command


def plan(words: str) -> tuple[int, str]:
    from mca_lite import tool_plan

    return commands.answer(tool_plan.main, words)


def test_a_configuration_is_planned_without_weights(tmp_path):
    tiny.hf_config("qwen3", **MILLIONS).save_pretrained(tmp_path)
    words = f"configs/pt.yaml model_name_or_path={tmp_path} max_steps=40 warmup_steps=4 "
    words += "save_strategy=steps save_steps=10 per_device_train_batch_size=4 cutoff_len=512 "
    words += "gradient_accumulation_steps=null global_batch_size=16 bf16=true optim=adam "
    code, out = plan(f"{words} --gpus 4 --gpu H200")
    assert code == 0, out
    count = 24576 * 512 * 2 + 8 * (512 * 64 * 24 + 3 * 512 * 1536 + 2 * 512 + 2 * 64) + 512
    assert f"{count:,} parameters" in out
    assert "40 of 16 samples, 640 in all" in out and "at most 327,680" in out
    assert "warm-up        4 steps" in out and "checkpoints    4" in out
    assert "MFU" in out and "not checked" not in out and "WORLD_SIZE" not in os.environ
    slow, fast = (plan(f"{words} --gpus 4 --gpu H200 --link {link}")[1] for link in (1, 1000))
    times = [float(one.split("time  ")[1].split()[0]) for one in (fast, out, slow)]
    assert times[0] <= times[1] < times[2] and "of it communication" in slow
    # 1.7 GiB and nccl's fit as they are; the search says what a smaller GPU wants
    assert plan(f"{words} --gpus 4 --memory 4")[0] == 0
    code, out = plan(f"{words} --gpus 4 --memory 2.1")
    assert code == 3 and "does not fit" in out and "best first" in out
    best, *others = re.findall(r"^ +([\d.]+) GiB  (.*)$", out.split("best first")[1], re.MULTILINE)
    assert len({keys for _, keys in others}) == len(others) > 1
    for size, keys in (best, others[-1]):  # they can be pasted
        code, again = plan(f"{words} {keys} --gpus 4 --memory 2.1")
        assert code == 0 and "40 of 16 samples" in again, again
        assert float(re.search(r"fits: ([\d.]+) GiB", again)[1]) == pytest.approx(
            float(size), abs=0.06
        )


@pytest.mark.parametrize("gpus", [16, 1024])
def test_layouts_of_many_gpus_are_sorted_by_their_seconds(tmp_path, gpus):
    tiny.hf_config("qwen3", **MILLIONS).save_pretrained(tmp_path)
    words = f"configs/pt.yaml model_name_or_path={tmp_path} max_steps=4 warmup_steps=0 bf16=true "
    words += "gradient_accumulation_steps=null global_batch_size=1024 cutoff_len=512 "
    words += "per_device_train_batch_size=1"
    code, out = plan(f"{words} --gpus {gpus} --gpu H100 --memory 80")
    assert code == 0
    seconds = re.findall(r"GiB +([\d.]+) s a step", out.split("best first")[1])
    assert len(seconds) == 8 and seconds == sorted(seconds, key=float)
    assert out.count("not checked") == 2 * (gpus > 16)


def test_what_cannot_be_planned_is_refused(tmp_path):
    tiny.hf_config("qwen3").save_pretrained(tmp_path)
    words = f"configs/pt.yaml model_name_or_path={tmp_path} max_steps=4 warmup_steps=0"
    code, out = plan(f"{words} use_mca=false")
    assert code == 2 and "use_mca" in out
    code, out = plan(f"{words} tensor_model_parallel_size=3 --gpus 4")
    assert code == 2 and "tensor_model_parallel_size" in out


def test_a_checkpoint_is_as_large_as_planned(tmp_path):
    hf = tiny.save_model(tmp_path / "hf", "qwen3", **SMALL)
    keys = dict(bf16=True, save_strategy="steps", save_steps=2, max_steps=2)
    world.run(train, 1, hf, str(tmp_path / "out"), **keys)
    files = (tmp_path / "out" / "checkpoint-2" / "dist").rglob("*")
    size = sum(path.stat().st_size for path in files if path.is_file())
    words = f"configs/pt.yaml model_name_or_path={hf} bf16=true max_steps=2 warmup_steps=0"
    out = plan(words)[1]
    planned = float(out.split("a checkpoint   ")[1].split(" ")[0])
    assert "MiB" in out.split("a checkpoint")[1]
    assert planned * 2**20 == pytest.approx(size, rel=0.1)
