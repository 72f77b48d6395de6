"""A quantised base is LoRA on the folder of its rounded weights, bit for bit; its codes are
bitsandbytes'.
"""

import functools
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from mca_lite import part_lora_product
from mca_lite.args import parse_args
from mca_lite.errors import ConfigError
from mca_lite.part_lora_layers import LoraAdapter, LoraExperts, LoraSpec
from mca_lite.part_quantised import FORMS, Quantised, dequantise, quantise
from mca_lite.weights_files import SafetensorsSource
from tests.shared import pictures, quantised_tools, tiny, world
from tests.shared.held import PeakMemory
from tests.shared.layouts import CP2, DIST_OPT, EP2, ETP1, FULL, PACKED, PP2, SP, TP2, TP2_SP, VPP2
from tests.shared.lora_tools import adapter_of
from tests.shared.quantised_tools import NF4_KEYS, keys_of
from tests.shared.small_runs import DATA, save_tokenizer, train_by_words, words_of, write_data
from tests.shared.training import read_log, train

BF16 = dict(bf16=True)
AHEAD = 2  # layers for multi-token prediction

# -- codes and numbers

# what bitsandbytes 0.50.2 gives for golden_numbers(): bytes, scales, and the first numbers in
# float32 (functional.quantize_4bit and dequantize_4bit on a CPU, nf4, blocks of 64)
GOLDEN_BYTES = bytes.fromhex(
    "0a2e61c3f91d50b3e71c4f92e60b3e81d50a2e71c4f91d50b3e71d4fa2e61c3f"
    "81d50a2e71c4f92e60b3e81d50a2e61c3f91d50b3e71c4fa2e60b3f81d50a2e7"
)
GOLDEN_SCALES = [0.5, 0.49497517943382263]
GOLDEN_NUMBERS = [
    -0.5, 0.12305615097284317, -0.26253652572631836, 0.36147841811180115, -0.045525018125772476,
    -0.34809640049934387,
]  # fmt: skip


def golden_numbers() -> torch.Tensor:
    return torch.tensor([(i * 2654435761) % 2**32 / 2**32 - 0.5 for i in range(128)])


def test_codes_scales_and_numbers_of_nf4_are_those_of_bitsandbytes():
    codes, scales = quantise(golden_numbers(), FORMS["nf4"])
    assert bytes(codes.tolist()) == GOLDEN_BYTES and scales.tolist() == GOLDEN_SCALES
    numbers = dequantise(codes, scales, FORMS["nf4"])
    assert numbers[:6].tolist() == GOLDEN_NUMBERS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_gets_the_nearest_code_of_its_block(form, dtype):
    torch.manual_seed(0)
    numbers = (torch.randn(6, 128) * torch.rand(6, 128).pow(4)).to(dtype)
    numbers[1] = 0
    kind = FORMS[form]
    got = dequantise(*quantise(numbers, kind), kind).double()
    blocks = numbers.double().unflatten(-1, (-1, kind.block))
    most = blocks.abs().amax(-1, keepdim=True)
    if form == "int8":
        table, scale = torch.arange(-127, 128).double(), most / 127
    else:
        table, scale = torch.tensor(kind.table).double(), most
    if form == "mxfp4":
        scale = torch.where(most > 0, 2.0 ** (most.log2().floor() - 2), 0.0)
    nearest = (blocks.unsqueeze(-1) - table * scale.unsqueeze(-1)).abs().amin(-1).flatten(-2)
    assert ((numbers - got).abs() - nearest).abs().max() < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_quantised_numbers_are_quantised_to_themselves_and_columns_can_be_cut(form):
    kind = FORMS[form]
    codes, scales = quantise(torch.randn(5, 256), kind)
    numbers = dequantise(codes, scales, kind)
    assert torch.equal(dequantise(*quantise(numbers, kind), kind), numbers)
    left, right = (dequantise(*quantise(part, kind), kind) for part in numbers.chunk(2, 1))
    assert torch.equal(torch.cat((left, right), 1), numbers)


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_is_written_read_and_viewed_by_experts(form, monkeypatch):
    monkeypatch.setattr("mca_lite.part_quantised.CHUNK", 200)  # several parts of rows
    weight = torch.randn(3, 2, 6, 64).bfloat16()
    parameter = torch.nn.Parameter(Quantised.empty(weight, FORMS[form]), requires_grad=False)
    wanted = dequantise(*quantise(weight, FORMS[form]), FORMS[form]).bfloat16()
    with torch.no_grad():
        for expert, numbers in enumerate(weight):
            parameter.detach()[expert].flatten(0, 1).copy_(numbers.flatten(0, 1))
    assert torch.equal(parameter.whole(), wanted)
    room = torch.zeros(3, 2, 6, 67).bfloat16()
    parameter.whole(room[..., :64])
    assert torch.equal(room[..., :64], wanted) and not room[..., 64:].any()
    x = torch.randn(4, 64).bfloat16()
    assert torch.equal(x @ parameter.detach()[1, 0].t(), x @ wanted[1, 0].t())
    assert parameter[1, 0, 2, 3] == wanted[1, 0, 2, 3]
    assert parameter.nbytes == weight.numel() * FORMS[form].bytes_of_number


def test_a_look_for_values_that_are_not_finite_dequantises_one_weight_at_a_time(monkeypatch):
    kept, held, whole = weakref.WeakSet(), [], Quantised.whole

    def watched(self, out=None):
        kept.add(numbers := whole(self, out))
        held.append(len(kept))
        return numbers

    monkeypatch.setattr(Quantised, "whole", watched)
    form = FORMS["nf4"]
    weights = [Quantised(*quantise(torch.randn(4, 64), form), form, torch.float32) for _ in "12345"]
    weights[3].scales[1] = torch.nan
    norms = torch._foreach_norm([*weights, torch.tensor([-9.0])], torch.inf)  # as the check does
    assert held == [1] * 5 and norms[5] == 9
    assert [bool(norm.isfinite()) for norm in norms] == [True, True, True, False, True, True]


# -- training


@functools.cache
def bases_of(folder: Path, family: str, dtype: torch.dtype) -> dict:
    forms = ("mxfp4",) if family == "gpt_oss" else ("nf4", "int8")
    ahead = AHEAD if family == "glm4_moe" else 0
    return quantised_tools.save_bases(folder / f"{family}-{dtype}", family, forms, dtype, ahead)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return functools.partial(bases_of, tmp_path_factory.mktemp("bases"))


def check_same(bases, family, form, layout, out, **keys):
    """Train the quantised base and LoRA on the rounded folder in a layout -> curves of a rank."""
    ranks, more = layout
    dtype = torch.bfloat16 if "bf16" in more else torch.float32
    both = (bases(family, dtype)[name] for name in ("plain", form))
    run = quantised_tools.run_both
    curves = world.run(run, ranks, *both, str(out), form, **more, **keys)
    for quantised, rounded in curves:
        assert quantised == rounded and len(quantised) == 2
    return curves[0]


DENSE = {
    "one": (1, {}),
    "one_bf16": (1, BF16),
    "bf16_packed": (1, {**BF16, **PACKED}),
    "dp2_bf16": (2, {**BF16, **DIST_OPT}),
    "tp2": (2, TP2),
    "tp2_sp_bf16": (2, {**TP2, **SP, **BF16}),
    "pp2_bf16": (2, {**PP2, **BF16}),
    "pp2_vpp2_full": (2, {**PP2, **VPP2, **FULL}),
    "cp2_bf16": (2, {**CP2, **BF16}),
    "full_bf16": (1, {**FULL, **BF16}),
}
EXPERTS = {
    "one": (1, {}),
    "ep2_bf16": (2, {**EP2, **BF16}),
    "tp2_sp": (2, TP2_SP),
    "tp2_etp1_bf16": (2, {**TP2_SP, **ETP1, **BF16}),
    "pp2_full_bf16": (2, {**PP2, **FULL, **BF16}),
}


FEW = "one", "bf16_packed", "ep2_bf16", "tp2_sp_bf16", "pp2_vpp2_full"


def in_few(layouts) -> list:
    """The layouts as parameters; those of FEW in `make test`, the others in `make test-all`."""
    return [pytest.param(n, marks=[] if n in FEW else [pytest.mark.full]) for n in layouts]


@pytest.mark.parametrize("layout", DENSE)
def test_a_quantised_base_trains_as_its_rounded_weights(layout, bases, tmp_path):
    check_same(bases, "qwen3", "nf4", DENSE[layout], tmp_path)


@pytest.mark.parametrize("layout", EXPERTS)
def test_a_quantised_mixture_does(layout, bases, tmp_path):
    check_same(bases, "qwen3_moe", "nf4", EXPERTS[layout], tmp_path)


@pytest.mark.parametrize("layout", in_few(DENSE))
def test_a_quantised_model_with_pictures_does(layout, bases, tmp_path):
    check_same(bases, "qwen2_5_vl", "nf4", DENSE[layout], tmp_path, data=pictures.samples())


@pytest.mark.parametrize("layout", in_few(EXPERTS))
def test_a_quantised_mixture_with_pictures_does(layout, bases, tmp_path):
    check_same(bases, "qwen3_vl_moe", "nf4", EXPERTS[layout], tmp_path, data=pictures.samples())


# experts and tensor parallelism need sequence parallelism
AHEAD_LAYOUTS = {**EXPERTS, **DENSE}
del AHEAD_LAYOUTS["tp2"]


@pytest.mark.parametrize("layout", in_few(AHEAD_LAYOUTS))
def test_a_quantised_base_with_layers_for_prediction_does(layout, bases, tmp_path):
    """The adapters are on the decoder, and the prediction layers' loss trains them too."""
    where = AHEAD_LAYOUTS[layout]
    ahead = check_same(bases, "glm4_moe", "nf4", where, tmp_path, mtp_num_layers=AHEAD)
    if layout == "one":
        alone = check_same(bases, "glm4_moe", "nf4", where, tmp_path / "alone")
        assert alone != ahead


@pytest.mark.parametrize("layout", ["one", "ep2_bf16"])
def test_experts_in_mxfp4_train_as_their_numbers(layout, bases, tmp_path):
    check_same(bases, "gpt_oss", "mxfp4", EXPERTS[layout], tmp_path)


@pytest.mark.parametrize("spec", [{"dropout": 0.3}, {"targets": ("q_proj", "up_proj")}])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_8_bits_dropout_and_linears_without_adapter_do(family, spec, bases, tmp_path):
    check_same(bases, family, "int8", (1, BF16), tmp_path, spec=spec)


def run_all(bases: dict, out: str) -> dict:
    return {form: quantised_tools.run(bases["plain"], out, form) for form in (None, "nf4", "int8")}


def test_the_bits_of_the_base_matter(bases, tmp_path):
    [curves] = world.run(run_all, 1, bases("qwen3", torch.float32), str(tmp_path))
    losses = {form: curve[0][0] for form, curve in curves.items()}
    assert (
        losses["int8"] == pytest.approx(losses[None], rel=1e-3) and losses["int8"] != losses[None]
    )
    assert abs(losses["nf4"] - losses[None]) > 3 * abs(losses["int8"] - losses[None])


def saved_shapes(path: str, out: str, targets: tuple, keys: dict) -> list:
    """Shapes of plain tensors that autograd saved and that a quantised weight has."""
    found = []

    def adapt(models):
        models = quantised_tools.adapted(path, "nf4", {"targets": targets}, models)
        shapes = set()
        for weight in models.parameters():
            if isinstance(weight.data, Quantised):
                rows = weight.flatten(0, -2).shape
                shapes |= {tuple(weight.shape), tuple(rows), tuple(rows[::-1])}
                if weight.dim() > 2:
                    shapes |= {(len(weight), rows[0] // len(weight), rows[1])}

        def pack(tensor):
            sizes = {tuple(tensor.shape), *([tuple(tensor.mT.shape)] if tensor.dim() > 1 else ())}
            if not isinstance(tensor, Quantised) and sizes & shapes:
                found.append(tuple(tensor.shape))
            return tensor

        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor).__enter__()
        return models

    train(path, out, steps=1, count=4, warmup_steps=0, adapt=adapt, **keys)
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("targets", [("all",), ("q_proj",)])
@pytest.mark.parametrize("keys", [{}, BF16])
def test_no_whole_weight_is_saved_for_the_backward_pass(family, targets, keys, bases, tmp_path):
    path = bases(family, torch.float32)["plain"]
    assert world.run(saved_shapes, 1, path, str(tmp_path), targets, keys) == [[]]


# -- products of one weight


def linear_of(form: str, x: torch.Tensor) -> tuple:
    """(trained tensors, packed weight, product of x) of a linear 128 -> 32."""
    adapter = LoraAdapter(LoraSpec(rank=4, alpha=8), (("a",), ("b",)), 128, [24, 8])
    weight = Quantised.empty(torch.randn(32, 128), FORMS[form])
    return list(adapter.parameters()), weight, lambda: adapter(x, weight)


def experts_of(form: str, x: torch.Tensor) -> tuple:
    """The same of gate and up of three experts 128 -> 2 x 16, each with a third of the rows."""

    def multiply(t, w):
        if w.dim() == 2:
            return t.unflatten(0, (3, -1)).mT @ w.unflatten(0, (3, -1))
        parts = zip(t.chunk(3), w, strict=True)
        return torch.cat([F.linear(part, one) for part, one in parts])

    names = ("0", "1", "2")
    adapter = LoraExperts(LoraSpec(rank=4, alpha=8), (names, names, ()), 128, 16)
    weight = Quantised.empty(torch.randn(3, 2, 16, 128), FORMS[form])
    product = functools.partial(adapter, ("gate", "up"))
    return list(adapter.parameters()), weight, lambda: product(x, weight, multiply)


def in_float64(x, tensors, weight, scale=2.0):
    """What linear_of() or experts_of() computes, as plain products."""
    whole = weight.whole().double()
    if weight.dim() == 2:
        a, *bs = tensors
        low = (x @ a.t()).split(4, -1)
        added = torch.cat([part @ b.t() for part, b in zip(low, bs, strict=True)], -1)
        return x @ whole.t() + scale * added
    pairs = zip(tensors[::2], tensors[1::2], whole.unbind(1), strict=True)
    outs = [
        torch.einsum("eti,eoi->eto", x.unflatten(0, (3, -1)), w + scale * b @ a)
        for a, b, w in pairs
    ]
    return torch.cat(outs, -1).flatten(0, 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("made", [linear_of, experts_of])
def test_gradients_beside_a_quantised_weight_are_those_of_float64(made, repeats, form, monkeypatch):
    """With x.again the inputs are not kept, and nothing else changes."""
    monkeypatch.setattr(LoraExperts, "adds_in_product", lambda self, weight: True)
    torch.manual_seed(0)
    x = torch.randn(12, 128, requires_grad=True)
    tensors, weight, product = made(form, x)
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape))
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape) / 8)
    if repeats:
        x.again = lambda: x.detach()
    with torch.inference_mode():
        product()  # what it makes is used by the passes below
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        got = product()
    kept = {(12, 128), (4, 128)} & set(map(tuple, saved))  # x, or the rows of an expert
    assert bool(kept) is not repeats
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, *tensors)]
    wanted = in_float64(doubles[0], doubles[1:], weight)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    grad = torch.randn(got.shape)
    ours = torch.autograd.grad(got, (x, *tensors), grad)
    theirs = torch.autograd.grad(wanted, doubles, grad.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


def test_a_decoded_weight_takes_memory_in_use_alone(monkeypatch):
    made = []

    class Recorded(part_lora_product.Room):
        def decode(self, weight):
            super().decode(weight)
            made.append(self)
            assert self.storage.nbytes() > 0

    monkeypatch.setattr(part_lora_product, "Room", Recorded)
    x = torch.randn(5, 128, requires_grad=True)
    _, _, product = linear_of("nf4", x)
    product().sum().backward()
    product()
    monkeypatch.setattr(torch, "cat", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        product()
    assert len(made) == 4 and len(set(map(id, made))) == 1
    assert made[0].storage.nbytes() == 0


# -- runs by keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory, bases):
    """A folder of a run: model and rounded model with their tokenizer, data of all stages."""
    made = tmp_path_factory.mktemp("runs")
    write_data(made)
    paths = bases("qwen3", torch.bfloat16)
    for name, path in {**paths, "teacher": paths["plain"]}.items():
        shutil.copytree(path, made / name)
        save_tokenizer(made / name)
    return made


STAGES = {
    "sft": dict(neat_packing=True),
    "dpo": dict(stage="dpo"),
    "dpo_second": dict(stage="dpo", ref_model="model"),  # as quantised as the model
    "kto": dict(stage="kto"),
    "rm": dict(stage="rm"),
    "distill": dict(stage="distill"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_trains_on_a_quantised_base(stage, folder, tmp_path):
    data = DATA[STAGES[stage].get("stage", "sft")]
    keys = dict(STAGES[stage], dataset=f"{folder}/{data}.jsonl")
    if stage == "distill":
        keys["teacher_model_name_or_path"] = f"{folder}/teacher"
    logs = []
    for name, more in (("plain", NF4_KEYS), ("nf4", {})):
        path = f"{folder}/{name}"
        of_run = keys_of(folder, tmp_path / name, **{**keys, "model_name_or_path": path, **more})
        world.run(train_by_words, 1, of_run)
        logs.append([line for line in read_log(str(tmp_path / name)) if "loss" in line])
    assert len(logs[0]) == 2
    for ours, theirs in zip(*logs, strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])
    quantised, rounded = (adapter_of(tmp_path / name) for name in ("plain", "nf4"))
    assert quantised and all(torch.equal(quantised[name], rounded[name]) for name in rounded)


def test_a_run_goes_on_to_the_bit_and_refuses_another_form(folder, tmp_path):
    keys = dict(NF4_KEYS, max_steps=4, save_strategy="steps", save_steps=2, deterministic=True)
    world.run(train_by_words, 1, keys_of(folder, tmp_path / "whole", **keys))
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoint-4")
    (tmp_path / "half" / "adapter_model.safetensors").unlink()
    again = dict(keys, resume_from_checkpoint="auto")
    with pytest.raises(AssertionError, match="saved with quantization_"):
        other = dict(again, quantization_bit=8, quantization_type=None)
        world.run(train_by_words, 1, keys_of(folder, tmp_path / "half", **other))
    world.run(train_by_words, 1, keys_of(folder, tmp_path / "half", **again))
    whole, half = (adapter_of(tmp_path / name) for name in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)


def test_the_merged_model_has_the_base_s_own_weights(folder, tmp_path):
    """Of a zero adapter the merged weights are those of the unquantised files."""
    keys = keys_of(folder, tmp_path, **NF4_KEYS, save_merged_model=True, learning_rate=0)
    world.run(train_by_words, 1, keys)
    base = SafetensorsSource(f"{folder}/plain")
    merged = SafetensorsSource(str(tmp_path / "merged"))
    assert all(torch.equal(base.read(name), merged.read(name)) for name in base.names())
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


@pytest.mark.parametrize(
    "words, wanted",
    [
        (dict(finetuning_type="full"), "finetuning_type: lora"),
        (dict(use_mca=False), "use_mca: true"),
        (dict(modules_to_save=["q_proj"]), "modules_to_save"),
        (dict(quantization_bit=8), "it is a form of 4 bits"),
        (dict(transformer_impl="transformer_engine"), "transformer_impl: local"),
        (dict(quantization_bit=None), "quantization_bit: 4"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_name(words, wanted, folder, tmp_path):
    with pytest.raises(AssertionError, match=wanted):
        world.run(train_by_words, 1, keys_of(folder, tmp_path, **{**NF4_KEYS, **words}))


def test_auto_is_the_local_layers(folder, tmp_path):
    for keys, wanted in ((NF4_KEYS, "local"), ({}, "auto")):
        run = parse_args(words_of(keys_of(folder, tmp_path, **keys, transformer_impl="auto")))
        assert run.transformer_impl == wanted


def test_a_layout_without_whole_blocks_is_refused(tmp_path):
    from mca_lite import part_quantised
    from mca_lite.model_config import AutoConfig
    from tests.shared.training import arguments

    path = tiny.save_model(tmp_path, "qwen3", **{**quantised_tools.WIDE, "intermediate_size": 192})
    for tp, wanted in ((1, ""), (2, "a rank has 96 columns of model.layers.0.mlp.down_proj")):
        config = AutoConfig.from_pretrained(path, arguments())
        config.tensor_model_parallel_size = tp
        try:
            part_quantised.choose(config)
            assert not wanted
        except ConfigError as error:
            assert wanted in str(error) and "tensor_model_parallel_size: 1" in str(error)


# -- memory


def memory_of_reading(path: str, form: str, keys: dict) -> dict:
    """Bytes of a rank's parameters, by how much memory rose while they were read, and bytes of a
    layer in bf16."""
    import ctypes
    import gc

    from mca_lite import parallel, part_quantised, tool_plan_memory
    from mca_lite.model import AutoModel
    from mca_lite.model_config import AutoConfig
    from tests.shared.training import arguments

    args = arguments(**keys, bf16=True)
    parallel.initialize(args)
    config = AutoConfig.from_pretrained(path, args)
    part_quantised.choose(config, 4, form)
    ctypes.CDLL(None).mallopt(-3, 65536)
    AutoModel.from_pretrained(path, args, config=config)  # what a first reading imports
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with PeakMemory() as reading:
        models = AutoModel.from_pretrained(path, args, config=config)
    [chunk] = models
    of_layer = 2 * sum(p.numel() for p in chunk.decoder.layers[0].parameters())
    held = sum(p.nbytes for p in models.parameters())
    tensors = tool_plan_memory.ModelTensors(config)
    ranks = parallel.world_size()
    planned = tool_plan_memory.rank_memory(args, config, tensors, 0, 64, ranks, False).weights
    return dict(held=held, rise=reading.rise, layer=of_layer, planned=planned)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    """A model in bf16 with layers of 12 MB."""
    keys = dict(hidden_size=768, intermediate_size=2304, num_hidden_layers=6, vocab_size=999)
    folder = tmp_path_factory.mktemp("large")
    return str(tiny.save_model(folder, "qwen3", dtype=torch.bfloat16, head_dim=64, **keys))


@pytest.mark.parametrize("ranks, keys", [(1, {}), (2, TP2)])
def test_reading_takes_the_packed_model_and_less_than_two_layers(ranks, keys, large):
    for seen in world.run(memory_of_reading, ranks, large, "nf4", keys):
        assert seen["held"] < 6 * 0.3 * seen["layer"] + 2e6
        assert seen["planned"] == seen["held"]
        assert seen["rise"] < seen["held"] + 1.5 * seen["layer"], seen


# -- files of bitsandbytes


def hand_read(file: Path, name: str) -> torch.Tensor:
    """A nested weight number by number, as bitsandbytes' documentation has it."""
    tensors = load_file(file)
    state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    codes = [code for byte in tensors[name].flatten().tolist() for code in (byte >> 4, byte & 15)]
    table, absmax = tensors[f"{name}.quant_map"], tensors[f"{name}.absmax"].tolist()
    maps, of_maps = tensors[f"{name}.nested_quant_map"], tensors[f"{name}.nested_absmax"]
    scales = [maps[c] * of_maps[i // 256] + state["nested_offset"] for i, c in enumerate(absmax)]
    numbers = [table[code] * scales[i // 64] for i, code in enumerate(codes)]
    return torch.stack(numbers).view(state["shape"])


@pytest.fixture(scope="module")
def packed_files(tmp_path_factory, bases):
    made = tmp_path_factory.mktemp("packed")
    source = bases("qwen3", torch.float32)["plain"]
    for nested in (False, True):
        quantised_tools.save_as_bitsandbytes(source, made / f"nested-{nested}", nested)
    return made


def test_nested_scales_are_read_as_bitsandbytes_does(packed_files):
    folder = packed_files / "nested-True"
    source = SafetensorsSource(str(folder))
    name = "model.layers.0.self_attn.k_proj.weight"
    wanted = hand_read(folder / "model.safetensors", name)
    assert torch.equal(source.read(name), wanted)
    part = (slice(3, 21), slice(64, 128))
    assert torch.equal(source.read(name, part), wanted[part])


def run_packed(packed: str, rounded: str, out: str, **keys) -> tuple[list, list]:
    return quantised_tools.run(packed, out, "nf4", **keys), quantised_tools.run(rounded, out, None)


def test_a_folder_of_bitsandbytes_trains_as_its_numbers(packed_files, bases, tmp_path):
    rounded = bases("qwen3", torch.float32)["nf4"]
    packed = str(packed_files / "nested-False")
    source = SafetensorsSource(rounded)
    read = SafetensorsSource(packed)
    assert read.names() == source.names()
    assert all(torch.equal(read.read(name), source.read(name)) for name in source.names())
    [(ours, theirs)] = world.run(run_packed, 1, packed, rounded, str(tmp_path))
    assert ours == theirs


def test_another_format_of_bitsandbytes_is_refused_by_name(packed_files, tmp_path):
    tensors = load_file(packed_files / "nested-False" / "model.safetensors")
    renamed = {name.replace("__nf4", "__fp4"): tensor for name, tensor in tensors.items()}
    without = dict(tensors)
    del without["model.layers.0.mlp.up_proj.weight.absmax"]
    for changed, words in ((renamed, "it is in fp4"), (without, "absmax is not there")):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            SafetensorsSource(str(tmp_path))


def test_codes_of_scales_without_their_numbers_are_refused():
    from mca_lite.part_quantised_files import unpacked

    state = list(json.dumps(dict(shape=[1, 64], blocksize=64)).encode())
    codes = {
        "w": torch.zeros(32, 1, dtype=torch.uint8),
        "w.absmax": torch.zeros(1, dtype=torch.uint8),
        "w.quant_map": torch.zeros(16),
        "w.quant_state.bitsandbytes__nf4": torch.tensor(state, dtype=torch.uint8),
    }
    with pytest.raises(ValueError, match="nested_absmax is missing"):
        unpacked(codes)["w"][0:1]
