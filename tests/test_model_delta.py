"""The gated delta net: its rule against the recurrence of single tokens in float64, layers against
transformers' class, packed documents against the same documents alone.
"""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from mca_lite import part_delta
from mca_lite.batch import row_layout
from mca_lite.part_delta import (
    causal_convolution,
    delta_rule_by_kernels,
    gated_delta_rule,
    why_no_fla,
)
from tests.shared import pictures, tiny, tiny_moe, world
from tests.shared.files import assert_same_bytes, changed, tensors
from tests.shared.layouts import CP2, EP2, PP2, TP2_SP, VPP2
from tests.shared.training import BRIEF, arguments, refusal, train, whole_and_resumed
from tests.tools import gpu_kernels

B, N, K, V = 2, 3, 6, 5
LENGTHS = (1, 7, 64, 65, 150)
DOCUMENTS = (3, 1, 70, 64, 12)  # more than a chunk, a chunk, several in one


def token_by_token(query, key, value, decay, beta):
    """The recurrence of the module's docstring, in the dtype of its inputs [s, b, n, ...]."""
    query = F.normalize(query, dim=-1, eps=0) * query.shape[-1] ** -0.5
    key = F.normalize(key, dim=-1, eps=0)
    state = query.new_zeros(*query.shape[1:], value.shape[-1])
    out = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[..., None, None]
        seen = (state * k[..., None]).sum(-2)
        state = state + k[..., None] * (b[..., None] * (v - seen))[..., None, :]
        out.append((state * q[..., None]).sum(-2))
    return torch.stack(out)


def inputs(length: int, b: int = B, dtype=torch.float64, strongest: float = 3.0) -> list:
    g = torch.Generator().manual_seed(length)
    query, key = (torch.randn(length, b, N, K, generator=g, dtype=dtype) for _ in range(2))
    value = torch.randn(length, b, N, V, generator=g, dtype=dtype)
    decay = -strongest * torch.rand(length, b, N, generator=g, dtype=dtype)
    beta = torch.rand(length, b, N, generator=g, dtype=dtype)
    # transformers adds 1e-6 to the square of a length: no difference to long ones
    return [x.requires_grad_() for x in (1000 * query, 1000 * key, value, decay, beta)]


def numbers(lengths) -> torch.Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def assert_same_with_gradients(ours, theirs, tensors, tolerance=1e-9):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    factors = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0), dtype=ours.dtype)
    pairs = zip(*(torch.autograd.grad(x, tensors, factors) for x in (ours, theirs)), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk_size", (4, 64))
@pytest.mark.parametrize("length", LENGTHS)
def test_rule_in_chunks_is_the_recurrence(length, chunk_size):
    tensors = inputs(length)
    ours = gated_delta_rule(*tensors, numbers([length]), chunk_size)
    assert_same_with_gradients(ours, token_by_token(*tensors), tensors)


@pytest.mark.parametrize("chunk_size", (4, 64))
def test_state_of_packed_documents_begins_anew_in_each(chunk_size):
    tensors = inputs(sum(DOCUMENTS), b=1)
    ours = gated_delta_rule(*tensors, numbers(DOCUMENTS), chunk_size)
    alone = zip(*(x.split(DOCUMENTS) for x in tensors), strict=True)
    theirs = torch.cat([token_by_token(*document) for document in alone])
    assert_same_with_gradients(ours, theirs, tensors)


def test_packed_rows_on_a_gpu_are_padded_to_few_shapes_and_give_the_same(monkeypatch):
    monkeypatch.setattr(part_delta, "compiles", lambda x: True)
    monkeypatch.setattr(part_delta, "PACKED_LENGTH", 8)
    monkeypatch.setattr(part_delta, "COMPILED_SHAPES", {})
    for documents in (DOCUMENTS, [1, 2], [5, 2], [9, 3, 7]):
        tensors = inputs(sum(documents), b=1)
        ours = gated_delta_rule(*tensors, numbers(documents), 4, is_packed=True)
        alone = zip(*(x.split(documents) for x in tensors), strict=True)
        theirs = torch.cat([token_by_token(*document) for document in alone])
        assert_same_with_gradients(ours, theirs, tensors)
    [shapes] = part_delta.COMPILED_SHAPES.values()
    assert sorted(shape[0] for shape in shapes) == [8, 152]


def test_strong_decays_in_front_leave_later_ones_exact_in_float32():
    """Sums of g from the first token of a chunk reach -1300: their differences round to 1e-4."""
    tensors = inputs(64, dtype=torch.float32)
    decay = tensors[3].detach().clone()
    decay[:32] = -40.0
    decay[32:] *= 1e-3
    given = [*tensors[:3], decay, tensors[4]]
    ours = gated_delta_rule(*given, numbers([64]))
    wanted = token_by_token(*(x.double() for x in given))
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("lengths", ((1,), (2,), (9,), (3, 1, 2, 9)))
def test_convolution_is_torchs_of_each_document(lengths):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), B, K, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(K, 4, generator=g, dtype=torch.float64, requires_grad=True)
    alone = []
    for document in x.split(lengths):
        out = F.conv1d(document.permute(1, 2, 0), weight[:, None], padding=3, groups=K)
        alone.append(F.silu(out[..., : len(document)]).permute(2, 0, 1))
    ours = causal_convolution(x, weight, numbers(lengths))
    assert_same_with_gradients(ours, torch.cat(alone), (x, weight))


def test_documents_of_a_layout_are_numbered_in_the_rows_order_on_each_rank():
    lengths = (4, 8, 4)
    borders = (0, 4, 12, 16)
    for size in (1, 2):
        for rank in range(size):
            layout = row_layout(borders, size, rank, torch.device("cpu"))
            assert torch.equal(layout.documents, numbers(lengths))


def test_kernels_get_rows_of_the_batch_and_the_borders_of_packed_ones(monkeypatch):
    seen = []

    def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens):
        assert use_qk_l2norm_in_kernel
        seen.append(cu_seqlens)
        rows = (x.transpose(0, 1) for x in (q, k, v, g, beta))
        return token_by_token(*rows).transpose(0, 1), None

    names = ("fla", "fla.ops", "fla.ops.gated_delta_rule")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].chunk_gated_delta_rule = chunk_gated_delta_rule
    tensors = inputs(7)
    out = delta_rule_by_kernels(*tensors, None)
    torch.testing.assert_close(out, token_by_token(*tensors))
    delta_rule_by_kernels(*tensors, torch.tensor([0, 3, 7], dtype=torch.int32))
    assert seen[0] is None
    assert seen[1].tolist() == [0, 3, 7] and seen[1].dtype == torch.int64


@pytest.mark.parametrize(
    ("triton", "gpu", "reason"),
    [("3.6.0", (9, 0), "wrong"), ("3.7.1", (9, 0), None), ("3.6.0", (8, 0), None)],
)
def test_kernels_with_wrong_gradients_are_left_alone(triton, gpu, reason, monkeypatch):
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule", "triton"):
        module = ModuleType(name)
        module.__version__ = triton
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: gpu)
    found = why_no_fla.__wrapped__()
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("sees_borders", [True, False])
def test_the_check_of_kernels_on_a_gpu_sees_wrong_borders(sees_borders, monkeypatch):
    """The kernels of flash-linear-attention have a stand-in in plain torch."""

    def stand_in(query, key, value, decay, beta, borders):
        lengths = [len(query)]
        if borders is not None and sees_borders:
            lengths = borders.diff().tolist()
        return gated_delta_rule(query, key, value, decay, beta, numbers(lengths))

    monkeypatch.setattr("mca_lite.part_delta.why_no_fla", lambda: None)
    monkeypatch.setattr("mca_lite.part_delta.delta_rule_by_kernels", stand_in)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu_kernels, "device", lambda: "cpu")
    tolerance = gpu_kernels.TOLERANCE[torch.bfloat16]
    is_right = {}
    for name, *case in gpu_kernels.linear_cases(torch.bfloat16):
        is_right[name] = gpu_kernels.difference(*case) < tolerance
    assert is_right == {"delta-rule-packed": sees_borders, "delta-rule-rows": True}
    for dtype in (torch.float32, torch.float16):
        assert not list(gpu_kernels.linear_cases(dtype))


# -- layers

IDS = torch.randint(0, 61, (2, 150), generator=torch.Generator().manual_seed(2))
PACKED_ROWS = (20, 64, 66)


def logits_of(path: str, lengths, keys: dict) -> list | None:
    """Logits of IDS [b, s, V], or of packed documents of `lengths` [1, s, V], on the ranks of the
    last stage."""
    from mca_lite import AutoModel, TrainingArguments
    from mca_lite.batch import packed_row

    models = AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused", **keys)).eval()
    given, ids = {}, IDS
    if lengths:
        ids = IDS.view(1, -1)[:, : sum(lengths)]
        borders = (0, *torch.tensor(lengths).cumsum(0).tolist())
        given["packed_seq_params"] = packed_row(borders, 1, 0, ids.device)
    with torch.no_grad():
        return models.gather_logits(models(ids, **given)).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_moe.save_model(tmp_path_factory.mktemp("model"), "qwen3_next", num_hidden_layers=4)


@pytest.mark.parametrize("lengths", ((), PACKED_ROWS))
@pytest.mark.parametrize("keys", ({}, TP2_SP), ids=("one", "tp2_sp"))
def test_rows_of_several_chunks_have_the_logits_of_transformers(path, lengths, keys):
    ranks = 1 if not keys else 2
    got = torch.tensor(world.run(logits_of, ranks, path, lengths, keys)[0])
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    rows = [IDS]
    if lengths:
        rows = IDS.view(1, -1)[:, : sum(lengths)].split(lengths, 1)
    with torch.no_grad():
        theirs = torch.cat([model(row).logits for row in rows], 1)
    torch.testing.assert_close(got, theirs, rtol=0, atol=1e-5)


# -- runs


@pytest.mark.parametrize("keys", (TP2_SP, {**PP2, **VPP2}), ids=("tp2_sp", "pp2_vpp2"))
def test_a_resumed_run_is_the_whole_one(path, keys, tmp_path):
    for whole, resumed in world.run(whole_and_resumed, 2, path, str(tmp_path), **keys):
        assert whole == resumed


@pytest.mark.parametrize("recomputed", ("core_attn", "full"))
def test_recomputed_states_change_nothing(path, recomputed, tmp_path):
    keys = dict(recompute_granularity="full")
    if recomputed != "full":
        keys = dict(recompute_granularity="selective", recompute_modules=[recomputed])
    [plain] = world.run(train, 1, path, str(tmp_path / "plain"), **BRIEF)
    [again] = world.run(train, 1, path, str(tmp_path / "again"), **BRIEF, **keys)
    assert again == plain


def modules_without_a_call(path: str) -> list[str]:
    """Modules with parameters that a forward pass does not call."""
    from mca_lite import AutoModel

    [model] = AutoModel.from_pretrained(path, arguments())
    called = set()
    holders = {n: m for n, m in model.named_modules() if list(m.parameters(recurse=False))}
    for name, module in holders.items():
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    model(IDS, labels=IDS)
    return sorted(holders.keys() - called)


def test_each_module_with_weights_is_called_as_overlapped_gathers_wait_for_that(path):
    assert world.run(modules_without_a_call, 1, path)[0] == []


# -- files as the hub has them


def stacked(path: str, folder) -> str:
    """A copy of a model with the experts of a layer in one tensor, and layers that transformers
    does not read."""
    pieces = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

    def change(values: dict) -> None:
        prefixes = {name.partition("experts.0.")[0] for name in values if "experts.0." in name}
        for prefix in prefixes:
            for name, projections in pieces.items():
                experts = []
                for e in range(tiny_moe.EXPERTS):
                    names = [f"{prefix}experts.{e}.{p}.weight" for p in projections]
                    experts.append(torch.cat([values.pop(name) for name in names]))
                values[f"{prefix}experts.{name}"] = torch.stack(experts)
        values["mtp.fc.weight"] = torch.randn(32, 64).bfloat16()
        values["mtp.layers.0.mlp.gate.weight"] = torch.randn(4, 32)
        values["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.randn(4, 16, 32).bfloat16()
        values["mtp.layers.0.mlp.experts.down_proj"] = torch.randn(4, 32, 8).bfloat16()
        values["mtp.layers.1.mlp.experts.0.down_proj.weight"] = torch.randn(32, 8).bfloat16()

    return changed(path, folder, change)


def exported(path: str, out: str, keys: dict) -> None:
    from mca_lite import AutoModel, TrainingArguments

    AutoModel.from_pretrained(path, TrainingArguments(output_dir="unused", **keys)).save_pretrained(
        out
    )


@pytest.mark.parametrize("keys", (TP2_SP, EP2), ids=("tp2_sp", "ep2"))
def test_a_file_with_stacked_experts_a_tower_and_more_is_exported_as_it_is(keys, tmp_path):
    source = pictures.save_model(tmp_path / "model", "qwen3_5_moe")
    source = stacked(source, tmp_path / "stacked")
    world.run(exported, 2, source, str(tmp_path / "out"), keys)
    assert_same_bytes(tensors(tmp_path / "out"), tensors(source))


def test_an_export_without_its_source_warns_of_layers_that_it_lacks(tmp_path):
    from mca_lite.weights_files import carried_tensors

    gone = str(tmp_path / "gone")
    config = {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}
    with pytest.warns(UserWarning, match="layers for multi-token prediction"):
        assert list(carried_tensors(gone, config)) == []


def test_stacked_experts_are_those_of_transformers(tmp_path):
    source = tiny_moe.save_model(tmp_path / "model", "qwen3_5_moe_text", num_hidden_layers=2)
    source = stacked(source, tmp_path / "stacked")
    got = torch.tensor(world.run(logits_of, 1, source, (), {})[0])
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad():
        torch.testing.assert_close(got, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ("qwen3_next", "qwen3_5_text"))
def test_drawn_weights_are_distributed_as_transformers_draws_them(name):
    from mca_lite.weights_files import InitSource

    shared = tiny_moe if name in tiny_moe.MODELS else tiny
    hf = shared.hf_config(name, linear_num_value_heads=400)
    source = InitSource(hf.to_dict(), 1)
    prefix = "model.layers.0.linear_attn."
    for vector in ("norm.weight", "dt_bias"):
        assert source.read(prefix + vector).eq(1).all()
    assert source.read("model.layers.0.input_layernorm.weight").eq(0).all()
    strength = source.read(prefix + "A_log").exp()
    assert 0.01 <= strength.min() < 0.5 and 15.5 < strength.max() <= 16
    assert abs(float(strength.mean()) - 8) < 1


def test_flops_are_six_per_weight_the_core_and_the_states():
    from mca_lite.log import ModelWork, model_sizes, partial_work
    from mca_lite.model_config import from_hf_config

    hf = tiny.hf_config("qwen3_5_text")
    model = AutoModelForCausalLM.from_config(hf)
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n
    )
    of_states = 88 * 3 + 3 * 8 * 6 * 5  # one of 2 layers: channels x taps, 8 heads of [6, 5]
    for config in (hf, from_hf_config(hf, arguments())):
        sizes = model_sizes(config)
        assert (sizes.weights, sizes.linear) == (weights, of_states)
        assert sizes.core == 4 * 2 * 16 / 2  # the other: 4 heads of 16
        work = ModelWork(0.0, sizes.weights, sizes.core, linear=sizes.linear)
        assert work.flops(10, 100) == 60 * (weights + of_states) + 600 * sizes.core
        above = partial_work(config, {"model.layers.1.mlp.up_proj"}, None)
        assert (above.linear, above.linear_below) == (0, of_states)
        assert (above.core, above.core_below) == (sizes.core, 0)


# -- limits, in words


@pytest.mark.parametrize(
    "heads, keys, words",
    [
        ((3, 6), TP2_SP, "3 key heads among 2 ranks"),
        ((2, 4), dict(CP2, **TP2_SP), "2 key heads among 4 ranks"),
        ((2, 4), dict(mtp_num_layers=2), "qwen3_next have one layer for multi-token prediction"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(heads, keys, words):
    from mca_lite.model_config import from_hf_config

    of_keys, of_values = heads
    sizes = dict(linear_num_key_heads=of_keys, linear_num_value_heads=of_values)
    hf = tiny_moe.hf_config("qwen3_next", **sizes)
    assert words in refusal(from_hf_config, hf, arguments(**keys))


def test_heads_of_values_are_a_multiple_of_those_of_keys():
    from mca_lite.args_rules_model import check_numbers
    from mca_lite.errors import Judge

    judge = Judge(None)
    check_numbers(tiny_moe.hf_config("qwen3_next", linear_num_value_heads=3).to_dict(), judge)
    text = refusal(judge.close)
    assert "linear_num_value_heads" in text and "a multiple of linear_num_key_heads, 4" in text


def test_transformer_engine_is_refused_for_what_it_lacks():
    from mca_lite import McaModelConfig

    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4)
    keys = dict(linear_layers=[0], attention_output_gate=True)
    text = refusal(McaModelConfig, **sizes, **keys, transformer_impl="transformer_engine")
    assert "needs linear_layers, attention_output_gate, which only the local layers have" in text


def test_packed_rows_are_refused_on_plain_torch_whose_states_would_run_on():
    from mca_lite.args_rules_model import check_torch_packing
    from mca_lite.errors import Judge

    judge = Judge(None)
    check_torch_packing(tiny_moe.hf_config("qwen3_next"), judge)
    assert "linear attention" in refusal(judge.close)
