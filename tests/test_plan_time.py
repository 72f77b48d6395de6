"""The time of a step that `plan` predicts: beside what one H200 and ranks of a CPU took."""

import math
import re
from pathlib import Path

import pytest

from mca_lite import TrainingArguments, part_lora, tool_plan, tool_plan_memory
from mca_lite import world as launched
from mca_lite.model_config import from_hf_config
from tests.shared import planned, tiny, tiny_moe, world
from tests.shared.layouts import PP2, TP2, TP2_SP
from tests.shared.rates import predict_and_train, wait_in_a_pipeline
from tests.tools import bench_gpu, gpu_plan

RESULTS = (Path(__file__).parent / "bench" / "RESULTS.md").read_text()
# cases of RESULTS.md -> of bench_gpu
CASES = {
    "0.5B": "0.5B",
    "1.5B, 32 rows a step": "1.5B",
    "1.5B, 8 rows a step": "1.5B short steps",
    "4B": "4B",
    "8B LoRA": "LoRA 8B",
    "DPO 1.5B": "DPO 1.5B",
}


def measured(case: str) -> float:
    """tokens/s of this project in the last call that has the case."""
    rows = re.findall(
        rf"^\| \d \| {re.escape(case)} \| (?:now|after) \| ([\d,]+) \|", RESULTS, re.MULTILINE
    )
    return float(rows[-1].replace(",", ""))


def planned_on_h200(name: str, world_size: int = 1, link: float = math.inf, **keys):
    """(StepTime, tokens of a step) of a case of bench_gpu."""
    case = bench_gpu.CASES[name]
    pairs = "pairs" in case
    lengths = [case.get("s", 4096)] * (2 if pairs else 1)
    args, config, memory = gpu_plan.planned(name, world_size, **keys)
    rates = tool_plan.RATES["H200"]._replace(link=link)
    times = tool_plan.step_time(
        *(args, config, memory, lengths, world_size, rates),
        frozen=bool(case.get("lora")),
        reference=pairs,
    )
    return times, args.train_global_batch_size * sum(lengths)


@pytest.mark.parametrize("case", CASES)
def test_an_h200_took_what_is_predicted(case):
    times, tokens = planned_on_h200(CASES[case])
    assert tokens / times.total == pytest.approx(measured(case), rel=0.1)


# tokens/s of long rows with keys of recomputation
_FULL = dict(recompute_granularity="full")
_KEEP = dict(_FULL, recompute_keep="core_attn")
_SOME = dict(_KEEP, recompute_method="block", recompute_num_layers=8)
LONG = {
    "LoRA 8B 32k": (8840, _SOME),
    "LoRA 8B 32k, all recomputed": (6813, _FULL),
    "LoRA 8B 65k": (4636, _FULL),
    "LoRA 8B 131k, all recomputed": (2680, _FULL),
    "LoRA 8B 131k": (3411, _KEEP),
    "LoRA 8B 262k": (1902, bench_gpu.LONG_CASES["LoRA 8B 262k"]["keys"]),
    "1.5B 65k": (15099, _FULL),
    "1.5B 262k, all recomputed": (4615, _FULL),
    "1.5B 262k": (5940, _KEEP),
    "LoRA qwen3_5 131k": (5995, _KEEP),
}
# GiB on the GPU at the peak, and GiB in host memory, which was limited
PEAKS = {
    "LoRA 8B 32k": (124.9, 0),
    "LoRA 8B 131k": (104.3, 0),
    "LoRA 8B 262k": (108.0, 64),
    "1.5B 262k": (92.6, 0),
}


def test_an_h200_took_what_is_predicted_of_delta_nets():
    times, tokens = planned_on_h200("hybrid")
    assert tokens / times.total == pytest.approx(43125, rel=0.1)


@pytest.mark.parametrize("name", LONG)
def test_an_h200_took_what_is_predicted_of_long_rows(name):
    rate, keys = LONG[name]
    times, tokens = planned_on_h200(name.split(",")[0], **keys)
    assert tokens / times.total == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("name", PEAKS)
def test_an_h200_held_what_is_predicted_of_long_rows(name):
    peak, on_host = PEAKS[name]
    memory = gpu_plan.planned(name, **LONG[name][1])[2]
    held = memory.total - memory.nccl + memory.host
    assert held / 2**30 - on_host == pytest.approx(peak, rel=0.05)


# -- runs


def planned_step(case: planned.Step, gpu: str):
    """The StepTime of a row of tests/shared/planned.py, and its RankMemory."""
    keys = dict(case.keys)
    adapter = keys.pop("lora_rank", None)
    with launched.planned_world(case.gpus):
        args = TrainingArguments(
            output_dir="unused", bf16=True, transformer_impl="local", **keys,
            per_device_train_batch_size=case.micro_batch, global_batch_size=case.rows,
        )  # fmt: skip
        config = from_hf_config(planned.hf_config(case.shape), args)
        finetuning = None
        if adapter:
            spec = part_lora.plan(config, part_lora.LoraSpec(rank=adapter))
            finetuning = part_lora.Lora(spec)
        tensors = tool_plan_memory.ModelTensors(config, finetuning)
        memory = tool_plan_memory.rank_memory(
            args, config, tensors, 0, case.length, case.gpus, True
        )
        lengths = [case.length]
        rates = tool_plan.RATES[gpu]
        is_frozen = adapter is not None
        time = tool_plan.step_time(args, config, memory, lengths, case.gpus, rates, is_frozen)
    return time, memory


@pytest.mark.parametrize("name", planned.STEPS)
def test_two_h200_took_what_is_predicted(name):
    case = planned.STEPS[name]
    time, memory = planned_step(case, "H200")
    assert time.total * 1000 == pytest.approx(case.milliseconds, rel=0.15)
    if case.peak_gib:
        assert (memory.total - memory.nccl) / 2**30 == pytest.approx(case.peak_gib, rel=0.05)


@pytest.mark.parametrize("name", planned.PUBLISHED)
def test_published_runs_on_h100_took_what_is_predicted(name):
    """Other trainers, with their own kernels: a fifth."""
    case = planned.PUBLISHED[name]
    time, _ = planned_step(case, "H100")
    assert time.total * 1000 == pytest.approx(case.milliseconds, rel=0.2)


def test_small_micro_batches_take_the_time_of_the_host():
    name = "1.5B pp2 of 16 and 12 layers"
    case = planned.STEPS[name]
    rates = tool_plan.RATES["H200"]
    time, _ = planned_step(case, "H200")
    slowest = 16 * 16 * rates.layer_s  # micro-batches, layers of the first stage
    assert time.compute + time.bubble == pytest.approx(slowest * 17 / 16, rel=0.01)


@pytest.mark.parametrize("again", [{}, dict(recompute_granularity="full")])
def test_a_prediction_layer_takes_the_time_of_a_layer_and_a_head(again):
    def seconds(ahead: int = 0, layers: int = 8, vocabulary: int = 32768) -> float:
        args = TrainingArguments(
            output_dir="unused", bf16=True, transformer_impl="local", global_batch_size=8,
            per_device_train_batch_size=8, mtp_num_layers=ahead, **again,
        )  # fmt: skip
        hf = tiny_moe.hf_config(
            "glm4_moe", hidden_size=2048, num_hidden_layers=layers, vocab_size=vocabulary,
            intermediate_size=6144, first_k_dense_replace=layers, max_position_embeddings=4096,
        )  # fmt: skip
        config = from_hf_config(hf, args)
        tensors = tool_plan_memory.ModelTensors(config)
        memory = tool_plan_memory.rank_memory(args, config, tensors, 0, 4096, 1, True)
        return tool_plan.step_time(args, config, memory, [4096], 1, rates).compute

    rates = tool_plan.RATES["H200"]
    passes = 4 if again else 3
    projection = 2 * passes * 2 * 2048**2 * 8 * 4096 / rates.products * rates.gaps
    more = seconds(layers=9) + seconds(vocabulary=2 * 32768) - 2 * seconds()
    assert seconds(ahead=1) - seconds() == pytest.approx(more + projection, rel=1e-3)


def test_nccl_takes_half_a_gib_for_each_group():
    groups = {"1.5B": 0, "1.5B dp2 overlap": 2, "1.5B tp2": 3, "experts ep2 overlap": 3}
    for name, count in groups.items():
        assert planned_step(planned.STEPS[name], "H200")[1].nccl == count * 2**29


def test_the_network_between_nodes_is_slower():
    base = dict(use_distributed_optimizer=True)
    step = planned.Step("1.5B", 8, 1, 32, 0, base)
    near, _ = planned_step(step, "H100")
    far, _ = planned_step(step._replace(gpus=16, rows=64), "H100")
    sent = 1543714304 * (4 + 2)  # float32 gradients, bf16 weights
    rates = tool_plan.RATES["H100"]
    assert near.messages == pytest.approx(sent * 7 / 8 / rates.link)
    assert far.messages == pytest.approx(sent * 15 / 16 / rates.network)


# -- layouts: each part by hand


def test_a_pipeline_waits_and_recomputation_computes_again():
    one, _ = planned_on_h200("1.5B")
    pipe, _ = planned_on_h200("1.5B", 2, pipeline_model_parallel_size=2)
    assert one.bubble == one.messages == 0
    assert pipe.compute == pytest.approx(one.compute / 2)
    # the head, 0.233 of 1.543 billion weights, makes the last stage slower than the mean
    slowest = (pipe.compute + pipe.bubble) / (1 + 1 / 8)  # (2 - 1) of 8 micro-batches
    assert slowest / pipe.compute == pytest.approx(1 + 0.233 / 1.543, rel=0.05)
    keys = dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    virtual, _ = planned_on_h200("1.5B", 2, **keys)
    # a micro-batch waits for half a stage
    assert virtual.compute + virtual.bubble == pytest.approx(slowest * (1 + 1 / 16))
    again, _ = planned_on_h200("1.5B", recompute_granularity="full")
    # a third of all but the head, whose products and passes are some tenths of the model's
    assert 1.22 < again.compute / one.compute < 4 / 3


def test_messages_take_what_a_link_gives(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    link = 1e11
    weights = 1543714304  # of Qwen2 1.5B
    copies, _ = planned_on_h200("1.5B", 2, link)
    assert copies.messages == pytest.approx(weights * 4 / link)  # 2 x 1/2 of float32 gradients
    shared, _ = planned_on_h200("1.5B", 2, link, use_distributed_optimizer=True)
    assert shared.messages == pytest.approx(weights * (4 + 2) / 2 / link)
    assert shared.update == pytest.approx(copies.update / 2)
    behind = dict(overlap_grad_reduce=True, overlap_param_gather=True)
    behind, _ = planned_on_h200("1.5B", 2, link, use_distributed_optimizer=True, **behind)
    assert behind.messages == 0  # a forward pass takes longer than the weights too
    hidden, _ = planned_on_h200("1.5B", 2, link, overlap_grad_reduce=True)
    assert hidden.messages == 0  # a backward pass is longer
    split, _ = planned_on_h200("1.5B", 2, link, tensor_model_parallel_size=2)
    sent = 4 * 4096 * 1536 * 2 * (4 * 28 + 2)  # an all-reduce over two ranks sends its size once
    assert split.messages == pytest.approx(8 * sent / link)


# -- ranks of a CPU

# Planned over taken was 0.80 (always tp2_sp) to 1.16 (tp2pp2) in three runs on two busy cores: the
# bytes of passes are a GPU's, and what a byte of a message costs depends on what is sent around it.
# Messages are a quarter of the plan of tp2_sp, which would be out of the bound without them
BOUND = 0.3
HF = dict(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=2048,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, TP2_SP),
    "pp2": (2, PP2),
    "dp4": (4, {}),
    "tp2pp2": (4, {**TP2, **PP2}),
}
BATCH = dict(global_batch_size=8, per_device_train_batch_size=2)


@pytest.fixture(scope="module")
def work_of(tmp_path_factory):
    """A function: layout -> (seconds that a rank computes and sends in a step as planned, as they
    were), in the mean over ranks, whose stages are planned as even."""

    def of(ranks: int, keys: dict) -> tuple[float, float]:
        out, hf = str(tmp_path_factory.mktemp("out")), tiny.hf_config("qwen3", **HF)
        runs = world.run(predict_and_train, ranks, hf, 256, out, timeout_s=200, **BATCH, **keys)
        return tuple(sum(run[name] for run in runs) / ranks for name in ("planned", "taken"))

    return of


@pytest.fixture(scope="module")
def gaps(work_of):
    """The last column of the table, which one rank's steps give as they did for the H200: what the
    rates leave out. On a CPU that is much, since nothing is compiled there."""
    planned, taken = work_of(1, {})
    return taken / planned


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_cpu_take_what_is_predicted(work_of, gaps, layout):
    """Seconds of a processor, predicted before each step from rates measured right before it."""
    planned, taken = work_of(*LAYOUTS[layout])
    assert planned * gaps == pytest.approx(taken, rel=BOUND)


@pytest.mark.parametrize(
    "micro_batches, chunks", [(2, 1), pytest.param(4, 1, marks=pytest.mark.full), (2, 2)]
)
def test_a_pipeline_waits_as_long_as_predicted(tmp_path, micro_batches, chunks):
    """By the clock: layers that sleep do so as long on a busy machine."""
    keys = {**PP2, "gradient_accumulation_steps": micro_batches}
    if chunks > 1:
        keys["virtual_pipeline_model_parallel_size"] = chunks
    hf = tiny.hf_config("qwen3", num_hidden_layers=4)
    runs = world.run(wait_in_a_pipeline, 2, hf, 8, str(tmp_path), 0.05, **keys)
    for run in runs:
        assert run["bubble"] == 1 / (micro_batches * chunks)
        assert run["taken"] == pytest.approx(run["busy"] * (1 + run["bubble"]), rel=0.15)
