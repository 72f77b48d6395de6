"""Rates and FLOPs, counted by hand: dense, LoRA, padded and packed rows, on both backends."""

import psutil
import pytest
import torch
from transformers import AutoConfig

from mca_lite.log import ModelSizes, ModelWork, Throughput, model_sizes, peak_flops, peak_memory_gib
from tests.shared import tiny, tiny_moe, world
from tests.shared.layouts import EP2
from tests.shared.training import GLOBAL_BATCH, Clock, read_log, train


def test_throughput_is_tokens_over_time_since_the_last_line():
    clock = Clock()
    throughput = Throughput(world_size=4, peak_flops=1e12, clock=clock)
    assert throughput.take() == {}
    for seconds, tokens, positions in ((1.0, 300, 400), (3.0, 500, 600)):
        throughput.start()
        clock.now += seconds
        throughput.stop(tokens, positions, model_flops=4e12)
        clock.now += 100.0  # between steps (saving, evaluation) no time is counted
    rates = throughput.take()
    assert rates == pytest.approx({
        "step_time_s": 2.0,
        "tokens_per_second": 200.0,  # 800 tokens in 4 s
        "tokens_per_second_per_device": 50.0,
        "padding_fraction": 0.2,  # 200 of 1000
        "tflops_per_device": 0.5,  # 8e12 in 4 s on 4 devices
        "mfu": 0.5,
    })  # fmt: skip
    assert throughput.take() == {}


def test_throughput_without_a_known_peak_or_count_leaves_those_keys_out():
    throughput = Throughput()
    throughput.start()
    throughput.stop(1, 1)
    assert not {"mfu", "tflops_per_device"} & set(throughput.take())
    throughput.start()
    throughput.stop(1, 1, model_flops=1.0)
    assert "mfu" not in throughput.take()


def test_flops_of_a_model_counted_by_hand():
    # h=4, 2 heads of 3, 1 group, ffn 5, V 7. Weights of a layer: q 4*6, k and v 2*4*3, output 6*4,
    # MLP 3*4*5: 132. The logits have 4*7 weights. Half of the scores of 2 heads: 3 channels each of
    # queries and values.
    hf = AutoConfig.for_model(
        "llama", hidden_size=4, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=3, intermediate_size=5, vocab_size=7,
    )  # fmt: skip
    sizes = model_sizes(hf)
    assert sizes.weights == 2 * 132 + 28
    assert sizes.core == 2 * 2 * 3
    # one document of 10 tokens: forward 2 products of 2 FLOPs for 10 * 10 / 2 pairs of 6 channels a
    # layer, that is 1200 in 2 layers, and twice as much backward
    whole = ModelWork(0.0, sizes.weights, sizes.core)
    assert whole.flops(10, 100) == 6 * 292 * 10 + 3 * 2 * (2 * 2 * (10 * 10 / 2) * 6)
    # two documents of 5 in one row have half of these pairs
    assert whole.flops(10, 50) == 6 * 292 * 10 + 3 * 2 * 2 * (2 * 2 * (5 * 5 / 2) * 6)


def test_frozen_weights_cost_four_and_trained_ones_six():
    assert ModelWork(frozen=100, trained=10, core=0).flops(7, 1000) == 7 * (400 + 60)


def test_a_reference_that_runs_beside_costs_a_third_of_the_model():
    # 10 tokens of one document: 2 FLOPs of each weight, and 2 * 10 * 10 / 2 pairs of 6 channels
    policy, reference = ModelWork(0.0, 292, 12), ModelSizes(292, 12, 2, 4, 7, 60)
    both = ModelWork(0.0, 292, 12, reference)
    forward = 2 * 292 * 10 + 2 * (2 * 2 * (10 * 10 / 2) * 6)
    assert both.flops(10, 100) == policy.flops(10, 100) + forward == policy.flops(10, 100) * 4 / 3
    # adapters of 5 weights: 4 FLOPs of a frozen weight, 6 of a trained one, 2 more of the frozen
    plain = ModelSizes(100, 0.0, 2, 4, 7, 60)
    adapted = ModelWork(frozen=100, trained=5, core=0, reference=plain)
    assert adapted.flops(7, 0) == 7 * (600 + 30)


def test_more_forward_passes_of_both_models_are_counted():
    # two passes over a token, of 2 FLOPs each, of this model, and one of a larger one
    sizes, larger = ModelSizes(100, 3.0, 2, 4, 7, 60, 8.0), ModelSizes(400, 5.0, 2, 4, 7, 60)
    beside = sizes.passes(2, larger)
    assert beside.cost(10, 100) == 10 * (2 * 108 + 400) + 100 * (2 * 3.0 + 5.0)
    work = ModelWork(trained=100, core=3.0, reference=beside, linear=8.0)
    training = 6 * 108 * 10 + 6 * 3.0 * 100
    assert work.flops(10, 100) == training + 2 * beside.cost(10, 100)


def test_flops_of_qwen3_8b_are_six_per_weight():
    hf = AutoConfig.for_model(
        "qwen3", hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, intermediate_size=12288, vocab_size=151936,
    )  # fmt: skip
    weights = 8_190_735_360 - 151936 * 4096  # the parameters without the embedding table
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert model_sizes(hf).weights == weights - norms


def test_a_model_outside_the_table_has_no_known_sizes():
    assert model_sizes(object()) is None


# tiny qwen3: h 32, 4 layers, 4 heads of 8 in 2 groups, MLP 48, V 61
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
WEIGHTS = 4 * LAYER + 32 * 61
CORE = 4 * 4 * 8
# rank 4 of every linear: 4 (inputs + outputs) each, of q, k, v, o, gate, up, down
ADAPTERS = 4 * 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))


def with_adapters(model, **spec):
    from mca_lite import part_lora

    return part_lora.inject(model, part_lora.LoraSpec(rank=4, **spec))


def adapted_with_head(model):
    return with_adapters(model, modules_to_save=("lm_head",))


def flops_of_one_step(path: str, out: str, **keys) -> float:
    """FLOPs of one step, as the log has them; on rank 0."""
    train(path, out, steps=2, count=GLOBAL_BATCH, **keys)
    record = read_log(out)[0]
    world_size = torch.distributed.get_world_size()
    return record["tflops_per_device"] * 1e12 * record["step_time_s"] * world_size


PACKED = dict(sequence_packing=True)
TP2 = dict(tensor_model_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2)
CASES = {
    "padded": (1, {}, 6 * WEIGHTS),
    "padded, dp2": (2, {}, 6 * WEIGHTS),
    "padded, torch": (1, dict(backend="torch"), 6 * WEIGHTS),
    "packed": (1, PACKED, 6 * WEIGHTS),
    "packed, torch": (1, dict(PACKED, backend="torch"), 6 * WEIGHTS),
    "lora": (1, dict(adapt=with_adapters), 4 * WEIGHTS + 6 * ADAPTERS),
    "lora, tp2": (2, dict(TP2, adapt=with_adapters), 4 * WEIGHTS + 6 * ADAPTERS),
    "lora, pp2": (2, dict(PP2, adapt=with_adapters), 4 * WEIGHTS + 6 * ADAPTERS),
    "lora, torch": (1, dict(adapt=with_adapters, backend="torch"), 4 * WEIGHTS + 6 * ADAPTERS),
    "lora and head": (1, dict(adapt=adapted_with_head), 4 * 4 * LAYER + 6 * (32 * 61 + ADAPTERS)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_log_counts_real_tokens_documents_and_what_is_trained(tmp_path, case):
    ranks, keys, per_token = CASES[case]
    path = tiny.save_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    lengths = [len(sample["input_ids"]) for sample in tiny.samples(GLOBAL_BATCH)]
    got = world.run(flops_of_one_step, ranks, path, str(tmp_path / "out"), **keys)[0]
    squares = sum(length**2 for length in lengths)
    assert got == pytest.approx(per_token * sum(lengths) + 6 * CORE * squares, rel=1e-9)


def adapted_experts(model):
    return with_adapters(model, targets=("gate_proj", "down_proj"))


@pytest.mark.parametrize("ranks, keys", [(1, {}), (2, EP2)])
def test_the_log_counts_the_experts_that_a_token_goes_to_once(tmp_path, ranks, keys):
    """Two of four experts with 16 channels, whose gate and down have adapters of rank 4."""
    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    layer = LAYER - 3 * 32 * 48 + 4 * 32 + 2 * 3 * 32 * 16  # the router, and two experts
    adapters = 2 * 2 * 2 * 4 * (32 + 16)
    per_token = 4 * (2 * layer + 32 * 61) + 6 * adapters
    lengths = [len(sample["input_ids"]) for sample in tiny.samples(GLOBAL_BATCH)]
    keys = dict(keys, adapt=adapted_experts)
    got = world.run(flops_of_one_step, ranks, path, str(tmp_path / "out"), **keys)[0]
    core = 6 * CORE / 2 * sum(length**2 for length in lengths)
    assert got == pytest.approx(per_token * sum(lengths) + core, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H20", None),
        ("NVIDIA GB200", None),
        ("", None),
    ],
)
def test_peak_is_known_by_name_or_not_at_all(name, peak):
    assert peak_flops(name) == peak


def test_peak_memory_is_in_gib():
    assert psutil.Process().memory_info().rss / 2**30 * 0.9 < peak_memory_gib() < 64
