"""Training speed on one GPU, side by side: `make bench-gpu`, or `make bench-gpu ARGS="1.5B 'LoRA
8B'"` for some cases.

Each case is trained by this project, by Hugging Face's Trainer and by that with Liger kernels, each
in a process of its own, with random weights and tokens; one JSON line each, also appended to
$OUT/results.jsonl where OUT is set. Time: by events in the device's stream at the end of each step,
without a wait for them; the median of the steps after the warm-up counts. FLOPs are counted as
Megatron does (see `flops`), over the dense bf16 peak of an H100 or H200, 989 TFLOP/s; recomputed
work and padding do not count.

Full training here has float32 master weights. Of Hugging Face's, hf and liger have bf16 weights and
moments; liger-float32 has weights loaded in float32, and products in bf16 by autocast. Packed rows
have a dense mask in hf and liger; in liger-varlen documents are flattened, and attention is torch's
varlen kernel (bench_varlen.py). Adapters are float32 in all of them. DPO's rivals are a plain loop
over transformers' models (bench_pairs.py), and the reference's forward pass counts as work. TINY=1
in the environment runs the same at a size for a CPU, without Liger there; PROFILE=1 prints where
the GPU's time goes in a step of this project's, WAITS=1 each line of it in which the host waits,
MEMORY=1 which lines of code hold the memory at the last step's peak. SECONDS=N ends all after N
seconds, the case in progress too, and names what it did not run.
"""

import contextlib
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from importlib.metadata import version

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a fork may start CUDA afterwards

import numpy as np
import torch

from . import bench_varlen, gpu_memory, gpu_trace, gpu_waits

PEAK = 989e12
_MODULE = {
    "torch": "torch",
    "triton": "triton",
    "flash-linear-attention": "fla",
    "nvidia-cudnn-frontend": "cudnn",
}
TINY = bool(os.environ.get("TINY"))
_QWEN2 = dict(vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=1 << 18)
SHAPES = {
    "0.5B": ("qwen2", dict(_QWEN2, hidden_size=896, intermediate_size=4864, num_hidden_layers=24)),
    "1.5B": ("qwen2", dict(_QWEN2, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28)),
    "4B": ("qwen3", dict(_QWEN2, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36)),
    "8B": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)),
    # the layers of Qwen3-30B-A3B, fewer of them
    "experts": (
        "qwen3_moe",
        dict(
            vocab_size=151936,
            tie_word_embeddings=False,
            max_position_embeddings=32768,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=6,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
    ),
}
_HEADS = {
    "0.5B": dict(num_attention_heads=14, num_key_value_heads=2),
    "1.5B": dict(num_attention_heads=12, num_key_value_heads=2),
    "4B": dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128),
    "8B": dict(num_attention_heads=32, num_key_value_heads=8),
    "experts": dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128),
}
# of `make bench` on a CPU (bench_trainers.py)
SHAPES["8M"] = (
    "qwen3",
    dict(_QWEN2, hidden_size=256, intermediate_size=768, num_hidden_layers=4, vocab_size=8192),
)
_HEADS["8M"] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
SHAPES["8B"][1].update(_QWEN2, vocab_size=128256, tie_word_embeddings=False)
# the layers of Qwen3.5-35B-A3B and of gpt_oss-20b, six of them
_OF_TWO_SIZES = dict(tie_word_embeddings=False, max_position_embeddings=32768, num_hidden_layers=6)
SHAPES["hybrid"] = (
    "qwen3_5_moe_text",
    dict(
        _OF_TWO_SIZES,
        vocab_size=248320,
        hidden_size=2048,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
)
_HEADS["hybrid"] = dict(num_attention_heads=16, num_key_value_heads=2, head_dim=256)
# Qwen3.5-4B
SHAPES["qwen3_5"] = (
    "qwen3_5_text",
    dict(
        vocab_size=248320,
        tie_word_embeddings=True,
        max_position_embeddings=1 << 18,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    ),
)
_HEADS["qwen3_5"] = dict(num_attention_heads=16, num_key_value_heads=4, head_dim=256)
SHAPES["sinks"] = (
    "gpt_oss",
    dict(
        _OF_TWO_SIZES,
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
)
_HEADS["sinks"] = dict(num_attention_heads=64, num_key_value_heads=8, head_dim=64)
SHAPES["30B-A3B"] = ("qwen3_moe", dict(SHAPES["experts"][1], num_hidden_layers=48))
_HEADS["30B-A3B"] = _HEADS["experts"]
SHAPES["gpt-oss-20b"] = ("gpt_oss", dict(SHAPES["sinks"][1], num_hidden_layers=24))
_HEADS["gpt-oss-20b"] = _HEADS["sinks"]
SHAPES["70B"] = (
    "llama",
    dict(SHAPES["8B"][1], hidden_size=8192, intermediate_size=28672, num_hidden_layers=80),
)
_HEADS["70B"] = dict(num_attention_heads=64, num_key_value_heads=8)
SHAPES["32B"] = (
    "qwen3",
    dict(
        _QWEN2,
        tie_word_embeddings=False,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
    ),
)
_HEADS["32B"] = dict(num_attention_heads=64, num_key_value_heads=8, head_dim=128)
# attention of transformers, if it is not torch's scaled_dot_product_attention
_ATTENTION = {"sinks": "flex_attention", "gpt-oss-20b": "flex_attention"}
_FLOAT32 = ("liger-float32",)
# mbs: rows of 4,096 tokens a micro-batch; rows: a step; theirs: what differs for rivals that
# have masks; rivals: beside hf and liger
CASES = {
    "0.5B": dict(shape="0.5B", mbs=8, rows=8, theirs=dict(mbs=4), rivals=_FLOAT32),
    "1.5B": dict(shape="1.5B", mbs=4, rows=32, steps=5, skip=2, rivals=_FLOAT32),
    "1.5B short steps": dict(shape="1.5B", mbs=4, rows=8, rivals=_FLOAT32),
    "4B": dict(shape="4B", mbs=2, rows=8, steps=6, skip=3, rivals=_FLOAT32),
    "packed 1.5B": dict(
        shape="1.5B",
        mbs=4,
        rows=8,
        packed=True,
        theirs=dict(mbs=1),
        rivals=("liger-varlen", "liger-varlen-float32"),
    ),
    # other packs in each step, as in training: cuDNN's graphs are built in the first twenty
    "packed 1.5B, new packs": dict(
        shape="1.5B", mbs=4, rows=8, packed=True, new_packs=True, steps=32, skip=20
    ),
    "LoRA 8B": dict(shape="8B", mbs=2, rows=4, lora=16, steps=6, skip=3),
    # frozen weights in nf4; of rivals too, where bitsandbytes is installed
    "QLoRA 8B": dict(shape="8B", mbs=2, rows=4, lora=16, steps=6, skip=3, form="nf4"),
    # rows are pairs of 2 x 1,024 tokens
    "DPO 1.5B": dict(shape="1.5B", mbs=4, rows=8, s=1024, pairs=True, steps=12, skip=6),
    "packed DPO 1.5B": dict(
        shape="1.5B", mbs=4, rows=8, s=1024, pairs=True, packed=True, steps=12, skip=6
    ),
    "experts": dict(shape="experts", mbs=4, rows=8, steps=8, skip=4),
    "hybrid": dict(shape="hybrid", mbs=2, rows=8, steps=7, skip=3),
    "packed hybrid": dict(shape="hybrid", mbs=2, rows=8, packed=True, steps=7, skip=3),
    "sinks": dict(shape="sinks", mbs=2, rows=8, steps=7, skip=3),
}
# on Transformer Engine, where it works; this project alone, the local layers beside it first
_TE = dict(transformer_impl="transformer_engine")
_FP8 = dict(_TE, fp8="hybrid", fp8_recipe="delayed")
_PACKED = dict(shape="1.5B", mbs=4, rows=32, steps=6, skip=3, packed=True)
_ROWS = dict(_PACKED, packed=False)
_LORA = CASES["LoRA 8B"]
TE_CASES = {
    "te-local": dict(_ROWS, keys=dict(transformer_impl="local")),
    "te": dict(_ROWS, keys=_TE),
    "te-fp8": dict(_ROWS, keys=_FP8),
    "te-fp8-tensorwise": dict(_ROWS, keys=dict(_FP8, fp8_recipe="tensorwise")),
    "te-fp8-blockwise": dict(_ROWS, keys=dict(_FP8, fp8_recipe="blockwise")),
    "te-packed-local": dict(_PACKED, keys=dict(transformer_impl="local")),
    "te-packed": dict(_PACKED, keys=_TE),
    "te-packed-fp8": dict(_PACKED, keys=_FP8),
    "te-lora-local": dict(_LORA, keys=dict(transformer_impl="local")),
    "te-lora": dict(_LORA, keys=_TE),
    "te-lora-fp8": dict(_LORA, keys=_FP8),
}
CASES.update(TE_CASES)
# another optimizer; this project alone
MUON = "1.5B Muon"
CASES[MUON] = dict(CASES["1.5B"], keys=dict(optim="muon"))
# rows of s tokens, one a step; this project with all layers recomputed and nothing kept too
_FULL = dict(recompute_granularity="full", loss_chunk_size=8192)
_KEEP = dict(_FULL, recompute_keep="core_attn")
_AWAY = dict(_KEEP, activation_offloading=True, mlp_chunk_size=16384)
_LONG = dict(shape="8B", mbs=1, rows=1, lora=16, steps=3, skip=1, theirs=dict(recomputes=True))


def _block(layers: int) -> dict:
    return dict(_KEEP, recompute_method="block", recompute_num_layers=layers)


LONG_CASES = {
    # so many of the layers are recomputed
    "LoRA 8B 32k": dict(_LONG, s=1 << 15, steps=5, keys=_block(8)),
    "LoRA 8B 32k of 12": dict(_LONG, s=1 << 15, steps=5, keys=_block(12)),
    "LoRA 8B 32k auto": dict(
        _LONG, s=1 << 15, steps=4, keys=dict(_KEEP, recompute_granularity="auto")
    ),
    "LoRA 8B 65k": dict(_LONG, s=1 << 16, keys=_KEEP),
    "LoRA 8B 131k": dict(_LONG, s=1 << 17, keys=_KEEP),
    "LoRA 8B 131k away": dict(_LONG, s=1 << 17, steps=2, keys=_AWAY),
    "LoRA 8B 262k": dict(_LONG, s=1 << 18, steps=2, keys=_AWAY),
    "LoRA qwen3_5 131k": dict(_LONG, shape="qwen3_5", s=1 << 17, keys=_KEEP),
    "1.5B 65k": dict(_LONG, shape="1.5B", lora=0, s=1 << 16, keys=_FULL),
    "1.5B 262k": dict(_LONG, shape="1.5B", lora=0, s=1 << 18, steps=2, keys=_KEEP),
}
CASES.update(LONG_CASES)
# full training with moments in 8 bits: on 8B a step needs about 79 GiB
_EIGHT = dict(exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit", grad_reduce_in_fp32=False)
# "packed hybrid": transformers packs no delta nets without flash-linear-attention; new packs: no
# rival plans for them
ALONE = {MUON, "1.5B 8 bits", "8B 8 bits", "packed hybrid", "packed 1.5B, new packs"}
# frozen weights in four bits; this project alone
_FOUR = dict(mbs=2, rows=4, lora=16, steps=10, skip=3)
_SOME = dict(recompute_granularity="full", recompute_method="block")
FOUR_CASES = {
    "LoRA 30B-A3B": dict(_FOUR, shape="30B-A3B"),
    "QLoRA 30B-A3B": dict(_FOUR, shape="30B-A3B", form="nf4"),
    "QLoRA 30B-A3B in 48 GiB": dict(
        _FOUR,
        shape="30B-A3B",
        form="nf4",
        keys=dict(_SOME, recompute_num_layers=5, exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit"),
    ),
    "QLoRA experts": dict(_FOUR, shape="experts", form="nf4"),
    "QLoRA gpt-oss-20b": dict(
        _FOUR, shape="gpt-oss-20b", mbs=1, form="mxfp4", keys=dict(recompute_granularity="full")
    ),
    "QLoRA 70B": dict(
        _FOUR, shape="70B", mbs=1, rows=2, form="nf4", keys=dict(_SOME, recompute_num_layers=16)
    ),
}
CASES.update(FOUR_CASES)
ALONE.update(FOUR_CASES)
CASES["1.5B 8 bits"] = dict(CASES["1.5B"], keys=_EIGHT)
CASES["8B 8 bits"] = dict(
    shape="8B", mbs=1, rows=4, steps=6, skip=3, keys=dict(_EIGHT, recompute_granularity="full")
)
# of Hugging Face's Trainer: keywords of run_theirs
RIVALS = {
    "hf": {},
    "liger": dict(liger=True),
    "liger-float32": dict(liger=True, float32=True),
    "liger-varlen": dict(liger=True, varlen=True),
    "liger-varlen-float32": dict(liger=True, varlen=True, float32=True),
}
RECOMPUTED = "ours-recomputed"
TRAINERS = ("ours", RECOMPUTED, *RIVALS)


def trainers_of(case: str) -> tuple[str, ...]:
    """The trainers of a case."""
    if case in TE_CASES or case in ALONE:
        return ("ours",)
    if case in LONG_CASES:
        return ("ours", RECOMPUTED, "liger")
    return ("ours", "hf", "liger", *CASES[case].get("rivals", ()))


def hf_config(shape: str):
    from transformers import AutoConfig

    kind, keys = SHAPES[shape][0], {**SHAPES[shape][1], **_HEADS[shape]}
    if TINY:
        keys = {**keys, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
        keys.update(num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
        keys.update({"head_dim": 16} if "head_dim" in keys else {})
        keys.update({"moe_intermediate_size": 64} if "num_experts" in keys else {})
        keys.update(
            {"shared_expert_intermediate_size": 32} if "linear_num_key_heads" in keys else {}
        )
    tokens = dict(pad_token_id=None, bos_token_id=None, eos_token_id=0)
    return AutoConfig.for_model(kind, rms_norm_eps=1e-6, **tokens, **keys)


def flops(config, tokens: int, squares: int, lora: int) -> float:
    """Operations of a step over `tokens`, the squared lengths of whose documents sum to `squares`.

    6 for each weight of a matrix product, the head's included; half of the square of attention,
    which is causal. LoRA: 4 for each frozen weight and 6 for each trained one. Of experts those
    that a token goes to.
    """
    h, n, g = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    d = getattr(config, "head_dim", None) or h // n
    f, layers = config.intermediate_size, config.num_hidden_layers
    router = 0
    if experts := getattr(config, "num_experts", 0):
        f, router = config.num_experts_per_tok * config.moe_intermediate_size, h * experts
    weights = layers * (h * d * (2 * n + 2 * g) + 3 * h * f + router) + h * config.vocab_size
    core = 6.0 * layers * squares * n * d
    if not lora:
        return 6.0 * weights * tokens + core
    shapes = ((h, n * d), (h, g * d), (h, g * d), (n * d, h), (h, f), (h, f), (f, h))
    adapters = layers * lora * sum(a + b for a, b in shapes)
    return (4.0 * weights + 6.0 * adapters) * tokens + core


def document_lengths(total: int, longest: int, seed=0, mean=400) -> np.ndarray:
    """Log-normal lengths, sigma 0.9, which sum to at least `total`."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        lengths.append(int(np.clip(rng.lognormal(math.log(mean) - 0.405, 0.9), 16, longest)))
    return np.array(lengths)


def dataset(config, s: int, rows: int, packed: bool) -> tuple[list[dict], int, int]:
    """(rows of a step, their tokens, their documents' squared lengths): input_ids, labels shifted,
    attention_mask that numbers documents."""
    rng = np.random.default_rng(0)
    packs = [[s]] * rows
    if packed:
        from mca_lite.data_batches import best_fit

        lengths = document_lengths(rows * s * 1.15, s, mean=min(400, s // 4))
        fullest = sorted(best_fit(lengths, s), key=lambda pack: -int(lengths[pack].sum()))
        packs = [lengths[pack].tolist() for pack in fullest[:rows]]
    data = []
    for pack in packs:
        ids = torch.from_numpy(rng.integers(0, config.vocab_size, sum(pack) + 1))
        numbers = torch.arange(1, len(pack) + 1).repeat_interleave(torch.tensor(pack))
        data.append(dict(input_ids=ids[:-1], labels=ids[1:], attention_mask=numbers))
    lengths = np.concatenate(packs)
    return data, int(lengths.sum()), int((lengths.astype(np.int64) ** 2).sum())


def dataset_of_pairs(config, s: int, pairs: int, packed: bool) -> tuple[list, int, int]:
    """Samples of dataset()'s kind: a chosen and a rejected document of s tokens each, with a
    prompt of an eighth to a half of it, without labels."""
    rng, data = np.random.default_rng(0), []
    for _ in range(pairs):
        prompt, sample = int(rng.integers(s // 8, s // 2)), []
        for _ in range(2):
            ids = torch.from_numpy(rng.integers(0, config.vocab_size, s + 1))
            labels = ids[1:].clone()
            labels[:prompt] = -100
            sample.append(dict(input_ids=ids[:-1], labels=labels))
        data.append(sample)
    return data, 2 * pairs * s, 2 * pairs * s * s


class Clock:
    """Seconds of each step: by the device's clock from the end of an update to that of the next,
    without a wait for it; of this process alone on a CPU."""

    def __init__(self):
        self.marks: list = []
        self.account: dict = {}  # gpu_trace.account of a step, if asked for

    def begin(self):
        self.tick()

    def tick(self):
        mark = time.process_time()
        if torch.cuda.is_available():
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.marks.append(mark)

    @property
    def times(self) -> list[float]:
        if not torch.cuda.is_available():
            return [end - start for start, end in itertools.pairwise(self.marks)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(self.marks)]

    def median(self, skip: int) -> float:
        """Seconds of the median step after the first `skip`."""
        times = sorted(self.times[skip:])
        return times[len(times) // 2]

    def rates(self, tokens: int, skip: int) -> dict:
        """tokens_per_second by the median step, and its spread: of the slowest and of the fastest
        step after the first `skip`."""
        times = self.times[skip:]
        spread = [round(tokens / slowest) for slowest in (max(times), min(times))]
        return dict(tokens_per_second=round(tokens / self.median(skip)), spread=spread)


@torch.no_grad()
def fill(parameters) -> None:
    torch.manual_seed(1234)
    for name, p in parameters:
        if p.dim() > 1:
            p.copy_(torch.empty(p.shape, dtype=p.dtype, device=p.device).normal_(0.0, 0.02))
        elif name.endswith("bias"):
            p.zero_()
        else:
            p.fill_(1.0)


def model_of(folder: str, args, use_mca: bool, form: str | None, lora: int):
    """The model of a folder's config on this rank, filled. form: of its frozen weights, such as
    nf4; None: not quantised."""
    from mca_lite.model import build_chunks, load_torch_model
    from mca_lite.model_config import AutoConfig
    from mca_lite.part_lora import inject
    from mca_lite.part_lora_layers import LoraSpec
    from mca_lite.part_quantised import choose

    if use_mca:
        planned = AutoConfig.from_pretrained(folder, args)
        if form is not None:
            choose(planned, kind=form)
        models = build_chunks(planned)
    else:
        models = load_torch_model(folder, train_from_scratch=True)
    fill(models.named_parameters())
    return inject(models, LoraSpec(rank=lora, alpha=2 * lora)) if lora else models


def run_ours(
    shape,
    mbs,
    rows,
    s,
    steps,
    packed=False,
    lora=0,
    form=None,
    pairs=False,
    new_packs=False,
    keys=None,
    folder=None,
    use_mca=True,
) -> tuple[Clock, list, int, int]:
    """new_packs: other rows in each step; tokens are then the mean of a step. keys: further
    TrainingArguments; folder: of the run, the same on every rank."""
    from mca_lite import DPOConfig, DPOTrainer, McaTrainer, TrainingArguments, parallel
    from mca_lite.callbacks import TrainerCallback

    folder, clock = folder or tempfile.mkdtemp(), Clock()
    config, profile = hf_config(shape), None
    config.save_pretrained(folder)
    of_steps = steps if new_packs else 1
    data, tokens, squares = (dataset_of_pairs if pairs else dataset)(
        config, s, rows * of_steps, packed
    )
    if os.environ.get("PROFILE"):
        profile = torch.profiler.profile()
    if os.environ.get("TRACE"):
        profile = gpu_trace.profiler()

    class Ticks(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.begin()

        def on_step_end(self, args, state, control, **kwargs):
            clock.tick()
            watch_last(steps - state.global_step, profile)

    with contextlib.redirect_stdout(io.StringIO()):
        of_run = dict(
            output_dir=f"{folder}/out",
            max_steps=steps,
            logging_steps=1,
            per_device_train_batch_size=mbs,
            gradient_accumulation_steps=rows // mbs,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            bf16=torch.cuda.is_available(),
            save_strategy="no",
            disable_tqdm=True,
            sequence_packing=packed,
        )
        args = TrainingArguments(**{**of_run, **(keys or {})})
        parallel.initialize(args, use_mca)
        models = model_of(folder, args, use_mca, form, lora)
        shared = dict(train_dataset=data, callbacks=[Ticks()], shuffle=False)
        if pairs:
            reference = model_of(folder, args, True, None, 0)
            trainer = DPOTrainer(models, DPOConfig(reference="model"), reference, args, **shared)
        else:
            trainer = McaTrainer(models, args, **shared)
        trainer.train()
    if profile is not None:
        profile.stop()
    if os.environ.get("PROFILE"):
        say_profile(profile)
    if os.environ.get("MEMORY"):
        gpu_memory.say()
    if os.environ.get("TRACE"):
        clock.account = gpu_trace.account(profile)
        if name := os.environ.get("TRACE_TO"):
            profile.export_chrome_trace(f"{name}-{os.getpid()}.json.gz")
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return clock, logs, tokens // of_steps, squares // of_steps


def watch_last(left: int, profile) -> None:
    """Watch the waits of the last two of the steps left, and profile the last, if asked for."""
    if left == 2 and os.environ.get("WAITS"):
        gpu_waits.watch()
    if left == 1 and os.environ.get("MEMORY"):
        gpu_memory.watch()
    if left == 1 and profile is not None:
        profile.start()


def say_profile(profile) -> None:
    """The kernels of a step that take the most time, and what the host waited for."""
    events = profile.key_averages()
    print(events.table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90))
    waits = {e.key: e.count for e in events if "Synchronize" in e.key or e.key == "aten::item"}
    kernels = [e for e in profile.events() if "cuda" in str(e.device_type).lower()]
    if kernels:
        ends = max(e.time_range.end for e in kernels) - min(e.time_range.start for e in kernels)
        busy = sum(e.time_range.elapsed_us() for e in kernels)
        print(f"span {ends / 1e3:.0f} ms, kernels {busy / 1e3:.0f} ms, waits {waits}", flush=True)


def run_theirs(
    shape,
    mbs,
    rows,
    s,
    steps,
    packed=False,
    lora=0,
    form=None,
    liger=False,
    varlen=False,
    float32=False,
    recomputes=False,
):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    cuda, clock, config = torch.cuda.is_available(), Clock(), hf_config(shape)
    data, tokens, squares = dataset(config, s, rows, packed)
    with torch.device("cuda" if cuda else "cpu"):
        dtype = torch.bfloat16 if cuda and not float32 else torch.float32
        has_experts = hasattr(config, "num_experts") or hasattr(config, "num_local_experts")
        more = {"experts_implementation": "grouped_mm"} if has_experts else {}
        if shape in _ATTENTION and cuda:
            more["attn_implementation"] = _ATTENTION[shape]
        if varlen:
            more["attn_implementation"] = bench_varlen.register()
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **more)
    fill(model.named_parameters())
    if form == "nf4":
        quantise_by_bitsandbytes(model)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear")
        )
    model.config.use_cache = False
    samples = []
    for (
        row
    ) in data:  # Trainer shifts labels itself; positions that restart make its mask of packed rows
        lengths = torch.bincount(row["attention_mask"])[1:].tolist()
        positions = torch.cat([torch.arange(n) for n in lengths])
        labels = row["input_ids"].masked_fill(positions == 0, -100)
        extra = {"position_ids": positions} if packed else {}
        samples.append(dict(input_ids=row["input_ids"], labels=labels, **extra))

    def stack(rows):
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    collate = bench_varlen.flatten if varlen else stack
    more = {}
    if recomputes:
        more = dict(
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    logs = train_theirs(model, samples, collate, clock, mbs, rows, steps, liger, **more)
    return clock, logs, tokens, squares


def quantise_by_bitsandbytes(model) -> None:
    """Replace the linears of a transformers model, but its head, by bitsandbytes' in nf4; a note
    where it is not installed, and the weights stay in bf16."""
    if importlib.util.find_spec("bitsandbytes") is None:
        print("bitsandbytes is not installed: the rival's weights stay in bf16", flush=True)
        return
    import bitsandbytes

    head = model.get_output_embeddings()
    for name, linear in list(model.named_modules()):
        if isinstance(linear, torch.nn.Linear) and linear is not head:
            sizes = linear.in_features, linear.out_features
            weight = linear.weight.data
            new = bitsandbytes.nn.Linear4bit(
                *sizes, bias=False, compute_dtype=weight.dtype, quant_type="nf4", device="meta"
            )
            new.weight = bitsandbytes.nn.Params4bit(
                weight.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=False
            )
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, new.to(weight.device))
    model.is_loaded_in_4bit = True


def train_theirs(model, samples, collate, clock, mbs, rows, steps, liger, **more) -> list[dict]:
    """Train by Hugging Face's Trainer -> its log lines. clock: ticks at each step; more: of its
    arguments."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.begin()

        def on_step_end(self, *args, **kwargs):
            clock.tick()

    cuda = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        logging_steps=1,
        per_device_train_batch_size=mbs,
        gradient_accumulation_steps=rows // mbs,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        bf16=cuda,
        save_strategy="no",
        disable_tqdm=True,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        use_liger_kernel=liger and cuda,
        report_to=[],
        remove_unused_columns=False,
        **more,
    )
    trainer = Trainer(
        model, args, train_dataset=samples, data_collator=collate, callbacks=[Ticks()]
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return [log for log in trainer.state.log_history if "loss" in log]


def measure(case: str, trainer: str, label: str) -> dict:
    """Train one case and return its line."""
    keys = dict(CASES[case])
    theirs, skip = keys.pop("theirs", {}), keys.pop("skip", 4)
    keys.pop("rivals", None)
    keys = {"s": 4096, "steps": 8, **keys}
    if TINY:
        keys["s"] = 64
    if trainer == RECOMPUTED:
        keys["keys"] = _FULL
    if trainer in ("ours", RECOMPUTED):
        clock, logs, tokens, squares = run_ours(**keys)
    elif keys.pop("pairs", False):
        from .bench_pairs import run_pairs

        clock, logs, tokens, squares = run_pairs(**keys, liger=trainer == "liger")
    else:
        own = {} if "varlen" in trainer else theirs
        keys.pop("keys", None)
        clock, logs, tokens, squares = run_theirs(**{**keys, **own, **RIVALS[trainer]})
    median = clock.median(skip)
    work = float("nan")  # of other layers than flops() knows
    if keys["shape"] not in ("hybrid", "qwen3_5", "sinks", "gpt-oss-20b"):
        work = flops(hf_config(keys["shape"]), tokens, squares, keys.get("lora", 0))
    if CASES[case].get("pairs"):
        work *= 4 / 3  # the reference's forward pass
    host = 0.0
    if "mca_lite.part_long" in sys.modules:
        host = sys.modules["mca_lite.part_long"].POOL.taken / 2**30
    return dict(
        case=case,
        trainer=label or trainer,
        **clock.rates(tokens, skip),
        mfu=round(work / median / PEAK, 4),
        peak_gib=peak_gib(),
        host_gib=round(host, 1),
        step_ms=[round(1e3 * t) for t in clock.times],
        losses=[round(float(log["loss"]), 5) for log in logs],
        grad_norms=[round(float(log["grad_norm"]), 4) for log in logs],
        own_mfu=logs[-1].get("mfu"),
    )


def peak_gib() -> float | None:
    """The most memory of this GPU that was in use, GiB."""
    if not torch.cuda.is_available():
        return None
    return round(torch.cuda.max_memory_allocated() / 2**30, 1)


def machine() -> dict:
    """The GPU's name, and the versions of what its speed depends on."""
    if not torch.cuda.is_available():
        return {}
    installed = [name for name, module in _MODULE.items() if importlib.util.find_spec(module)]
    return dict(
        gpu=torch.cuda.get_device_name(),
        versions=", ".join(f"{name} {version(name)}" for name in installed),
    )


def write(line: dict) -> None:
    line |= machine()
    print(json.dumps(line), flush=True)
    if "OUT" in os.environ:
        with open(f"{os.environ['OUT']}/results.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def in_a_child(case: str, trainer: str, label: str, seconds: float | None = None) -> None:
    """Each case gets a process, and with it a fresh GPU memory: a fork, to which the imports are
    made, unless one of them has started CUDA, which no fork lives through. It is killed after
    `seconds`; None: never."""
    method = "spawn" if torch.cuda.is_initialized() else "fork"
    child = multiprocessing.get_context(method).Process(target=_child, args=(case, trainer, label))
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
        write(dict(case=case, trainer=label or trainer, failed=f"killed after {seconds:.0f} s"))


def _child(case: str, trainer: str, label: str) -> None:
    try:
        write(measure(case, trainer, label))
    except BaseException as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {error}"[:300]
        write(dict(case=case, trainer=label or trainer, failed=failed))
    sys.stdout.flush()
    os._exit(0)


def _te_is_installed() -> bool:
    if importlib.util.find_spec("transformer_engine") is None:
        print("Transformer Engine is not installed: its cases are left out")
        return False
    return True


def main(names: list[str]) -> int:
    """Names of cases or trainers, or label=NAME for the lines of this project; no case or no
    trainer means all: see trainers_of()."""
    label = "".join(name.removeprefix("label=") for name in names if name.startswith("label="))
    unknown = [n for n in names if n not in CASES and n not in TRAINERS and "label=" not in n]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; cases: {', '.join(CASES)}; {', '.join(TRAINERS)}")
        return 2
    import transformers.trainer  # noqa: F401

    import mca_lite.trainer  # noqa: F401

    cases = [name for name in names if name in CASES]
    if not cases:
        cases = [name for name in CASES if name not in TE_CASES or _te_is_installed()]
    asked = [name for name in TRAINERS if name in names] or TRAINERS
    end = time.monotonic() + float(os.environ.get("SECONDS", "inf"))
    for case in cases:
        for trainer in trainers_of(case):
            if trainer not in asked:
                continue
            left = end - time.monotonic()
            if left < 1:
                print(f"no time left for {case}, {trainer}")
                continue
            seconds = None if math.isinf(left) else left
            in_a_child(case, trainer, label if trainer == "ours" else "", seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
