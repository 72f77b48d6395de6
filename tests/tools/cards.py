"""A card of a model's real shape: `make card MODEL=Qwen3-8B`, on one GPU with nothing to download.

Weights are drawn from a seed on the device, tensor by tensor, and no file holds them. A card says

    round trip       every tensor drawn, loaded, exported and drawn again, compared bit by bit
    log-probabilities  distance from transformers in float32, beside transformers in bf16, and
                     beside the same model with its weights shaken by 1e-7
    LoRA, training   tokens/s, losses and memory, beside what `plan` says
    resume           losses and norms after a checkpoint, beside a run without a stop

Each part runs in a process of its own, which imports while the part before it runs. Where a shape
does not fit, the model has fewer layers, and the card says how many; that of a resume has a smaller
vocabulary too, since its checkpoint is written and read. Writes tests/cards/MODEL.md after each
part; further words pick parts, whose rows alone are replaced. TINY=1 runs the same at a size for a
CPU and writes no page.
"""

import contextlib
import copy
import gc
import hashlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from tests.shared import world

from . import bench_gpu
from .faults import die_with_parent

FOLDER = Path(__file__).parents[1] / "cards"
SEED = 20261127
ROW = 64 if bench_gpu.TINY else 4096
SHAKE = 1e-7
GIB = 2**30
RESUMED_VOCABULARY = 1 << 15
PICTURE_TOKENS = "image_token_id video_token_id vision_start_token_id vision_end_token_id".split()


class Shape(NamedTuple):
    """A model's config; layers that a float32 copy, full training in 80 GB, and a resume have."""

    kind: str
    keys: dict
    compared: int
    trained: int
    resumed: int = 2


_QWEN3 = dict(vocab_size=151936, rope_theta=1e6, head_dim=128, rms_norm_eps=1e-6)
_TEXT = dict(_QWEN3, max_position_embeddings=40960, tie_word_embeddings=False)
_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_YARN = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
SHAPES = {
    "Qwen3-8B": Shape(
        "qwen3",
        dict(
            _TEXT,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        36,
        10,
    ),
    "Llama-3.1-8B": Shape(
        "llama",
        dict(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_parameters=dict(_ROPE, rope_theta=5e5, original_max_position_embeddings=8192),
            tie_word_embeddings=False,
        ),
        32,
        10,
    ),
    "Qwen3-30B-A3B": Shape(
        "qwen3_moe",
        dict(
            _TEXT,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        20,
        4,
        1,
    ),
    "gpt-oss-20b": Shape(
        "gpt_oss",
        dict(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=24,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_parameters=dict(_YARN, rope_theta=150000.0, original_max_position_embeddings=4096),
            tie_word_embeddings=False,
        ),
        16,
        4,
        1,
    ),
    "Qwen2.5-VL-7B": Shape(
        "qwen2_5_vl",
        dict(
            text_config=dict(
                vocab_size=152064,
                hidden_size=3584,
                intermediate_size=18944,
                num_hidden_layers=28,
                num_attention_heads=28,
                num_key_value_heads=4,
                max_position_embeddings=128000,
                rms_norm_eps=1e-6,
                rope_parameters=dict(
                    rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]
                ),
            ),
            vision_config=dict(
                depth=32,
                hidden_size=1280,
                intermediate_size=3420,
                num_heads=16,
                out_hidden_size=3584,
                patch_size=14,
                window_size=112,
                fullatt_block_indexes=[7, 15, 23, 31],
                tokens_per_second=2,
            ),
            image_token_id=151655,
            video_token_id=151656,
            vision_start_token_id=151652,
            vision_end_token_id=151653,
            tie_word_embeddings=False,
        ),
        28,
        8,
    ),
    "Qwen3.5-0.8B": Shape(
        "qwen3_5_text",
        dict(
            vocab_size=248320,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            max_position_embeddings=262144,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
        ),
        24,
        24,
        4,
    ),
}
_SMALL = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    num_local_experts=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    depth=4,
    num_heads=2,
    out_hidden_size=64,
)


def config_of(model: str, layers: int | None = None, vocabulary: int | None = None):
    """transformers' config of a shape; with fewer layers, its first ones."""
    from transformers import AutoConfig

    keys = copy.deepcopy(SHAPES[model].keys)
    parts = [keys, *(part for part in keys.values() if isinstance(part, dict))]
    if bench_gpu.TINY:
        for part in parts:
            part.update({name: _SMALL[name] for name in part if name in _SMALL})
        if "vision_config" in keys:
            keys["vision_config"].update(fullatt_block_indexes=[1, 3], hidden_size=32)
            keys["text_config"]["rope_parameters"]["mrope_section"] = [2, 3, 3]
        layers = layers and min(layers, 4)
    text = keys.get("text_config", keys)
    if layers:
        text["num_hidden_layers"] = layers
    text["vocab_size"] = min(text["vocab_size"], vocabulary or text["vocab_size"])
    for place, name in enumerate(PICTURE_TOKENS, 1):
        if keys.get(name, 0) >= text["vocab_size"]:
            keys[name] = text["vocab_size"] - place
    tokens = dict(pad_token_id=None, bos_token_id=None, eos_token_id=0)
    return AutoConfig.for_model(SHAPES[model].kind, **tokens, **keys)


class Drawn:
    """A tensor source (weights_files.py) that draws each tensor on the device, from its name."""

    def __init__(self, config, dtype: torch.dtype):
        from mca_lite import parallel
        from mca_lite.weights_files import InitSource

        self._shapes = InitSource(config.to_dict(), 0)
        self._device, self._dtype = parallel.device(), dtype
        self._last = ("", torch.empty(0))  # experts are read one by one, and drawn together

    def names(self):
        return self._shapes.names()

    def shape(self, name: str):
        return self._shapes.shape(name)

    def read(self, name: str, part=(slice(None),)) -> torch.Tensor:
        if name != self._last[0]:
            self._last = name, self._draw(name)
        return self._last[1][part]

    def _draw(self, name: str) -> torch.Tensor:
        digest = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        known = dict(device=self._device, generator=generator, dtype=torch.float32)
        drawn = torch.randn(self.shape(name), **known)
        if name.endswith("A_log"):
            drawn = drawn.abs().add(0.1).log()
        else:
            # a norm's weight is 1, or 0 where 1 is added: both are in this range
            drawn = drawn * 0.02 + 0.5 * (drawn.dim() == 1 and name.endswith("weight"))
        return drawn.bfloat16().to(self._dtype)


def ours_of(config, lora: int = 0, **keys):
    """(args, models) in bf16, filled; in evaluation of the card's own folder."""
    from mca_lite import AutoConfig, TrainingArguments, parallel, part_lora
    from mca_lite.model import build_chunks
    from mca_lite.weights_convert import fill

    folder = tempfile.mkdtemp()
    config.save_pretrained(folder)
    own = dict(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_steps=6,
        save_strategy="no",
        disable_tqdm=True,
        transformer_impl="local",
        bf16=True,
    )
    args = TrainingArguments(**{**own, **keys})
    parallel.initialize(args, True)
    models = build_chunks(AutoConfig.from_pretrained(folder, args))
    fill(models, Drawn(config, torch.bfloat16))
    if lora:
        models = part_lora.inject(models, part_lora.LoraSpec(rank=lora, alpha=2 * lora))
    return args, models


def theirs_of(config, dtype: torch.dtype):
    """transformers' model, filled."""
    from mca_lite import parallel
    from mca_lite.weights_files import file_tensors, model_class

    source = Drawn(config, dtype)
    with torch.device(parallel.device()):
        model = model_class(config).from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, _, part in file_tensors(model):
            part.copy_(source.read(name))
    return model


def rows_of(config, count: int, length: int) -> list[dict]:
    generator = torch.Generator().manual_seed(SEED)
    size = config.get_text_config().vocab_size
    if hasattr(config, "vision_config"):
        size -= len(PICTURE_TOKENS)  # rows of text alone
    ids = torch.randint(1, min(size, 1 << 17), (count, length + 1), generator=generator)
    places = {}
    if hasattr(config, "vision_config"):  # of a row of text alone
        places = {f"rope_{axis}": torch.arange(length) for axis in "thw"}
    return [dict(input_ids=row[:-1], labels=row[1:], **places) for row in ids]


# ---- parts of a card, each in a process


def round_trip(model: str) -> dict:
    """Tensors and bytes that came back as they were drawn."""
    from mca_lite import parallel
    from mca_lite.weights_convert import iter_hf_tensors

    config = config_of(model)
    _, models = ours_of(config)
    source = Drawn(config, torch.bfloat16)
    seen, size, wrong = set(), 0, []
    for name, tensor in iter_hf_tensors(models, device=parallel.device()):
        seen.add(name)
        size += tensor.nbytes
        if not torch.equal(tensor, source.read(name).to(tensor.dtype)):
            wrong.append(name)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = sorted(set(source.names()) - seen - tied)
    return dict(tensors=len(seen), gb=round(size / 1e9, 2), wrong=wrong, missing=missing)


def trainer_of(models, args, config, **more):
    """A trainer that has trained on the same four rows, step after step."""
    from mca_lite import McaTrainer

    data = rows_of(config, 4, ROW)
    trainer = McaTrainer(models, args, train_dataset=data, shuffle=False, **more)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer


def log_probs_of_theirs(model, samples: list[dict]) -> torch.Tensor:
    found = []
    for sample in samples:
        ids = sample["input_ids"][None].to(model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
        labels = sample["labels"].to(model.device)
        found.append(torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0].cpu())
    return torch.cat(found)


def distances(model: str) -> dict:
    """Mean and largest distance of log-probabilities from transformers in float32."""
    from mca_lite import Session, parallel

    layers = SHAPES[model].compared
    config = config_of(model, layers)
    samples = rows_of(config, 2, 64 if bench_gpu.TINY else 1024)
    args, models = ours_of(config, lora=1)
    session = Session(models, args)
    found = {"mca_lite, bf16": torch.cat(session.log_probs(samples))}
    del session, models
    for name, dtype in (("transformers, bf16", torch.bfloat16), ("float32", torch.float32)):
        gc.collect()
        parallel.device().type == "cuda" and torch.cuda.empty_cache()
        theirs = theirs_of(config, dtype)
        if hasattr(theirs, "set_experts_implementation"):
            theirs.set_experts_implementation("eager")
        found[name] = log_probs_of_theirs(theirs, samples)
        if dtype is torch.float32:
            with torch.no_grad():
                for parameter in theirs.parameters():
                    parameter.mul_(1 + SHAKE * torch.randn_like(parameter))
            found[f"float32, shaken by {SHAKE:.0e}"] = log_probs_of_theirs(theirs, samples)
        del theirs
    right = found.pop("float32")
    off = {name: (values - right).abs() for name, values in found.items()}
    kept = config.get_text_config().num_hidden_layers
    return dict(layers=kept, **{n: [float(d.mean()), float(d.max())] for n, d in off.items()})


def trained(model: str, layers: int | None, lora: int) -> dict:
    """Tokens/s by the median of the last steps, the peak, and what plan says of both."""
    from mca_lite import part_lora, tool_plan_memory
    from mca_lite.tool_plan import RATES, step_time

    config = config_of(model, layers)
    args, models = ours_of(config, lora)
    times = []
    trainer = trainer_of(models, args, config, callbacks=[_ticks(times)])
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
    seconds = sorted(b - a for a, b in zip(times[1:], times[2:], strict=False))
    finetuning = None
    if lora:
        finetuning = part_lora.Lora(part_lora.plan(models.config, part_lora.LoraSpec(lora)))
    tensors = tool_plan_memory.ModelTensors(models.config, finetuning)
    on_gpu = torch.cuda.is_available()
    memory = tool_plan_memory.rank_memory(args, models.config, tensors, 0, ROW, 1, on_gpu)
    rates = next(
        (r for n, r in RATES.items() if on_gpu and n in torch.cuda.get_device_name()), None
    )
    planned = rates and step_time(args, models.config, memory, [ROW], 1, rates, bool(lora))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return dict(
        layers=config.get_text_config().num_hidden_layers,
        tokens_per_second=round(4 * ROW / seconds[len(seconds) // 2]),
        planned_tokens_per_second=round(4 * ROW / planned.total) if planned else None,
        mfu=logs[-1].get("mfu"),
        peak_gib=round(peak, 1),
        planned_gib=round(memory.total / GIB, 1),
        losses=[round(float(log["loss"]), 4) for log in logs],
    )


def _ticks(times: list):
    from mca_lite.callbacks import TrainerCallback

    class Ticks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    return Ticks()


def resumed(model: str, lora: int) -> dict:
    """Steps after a checkpoint whose loss and gradient norm have the bits of the unbroken run."""
    config = config_of(model, SHAPES[model].resumed, RESUMED_VOCABULARY)
    curves = []
    with tempfile.TemporaryDirectory() as folder:
        keys = dict(deterministic=True, max_steps=5, output_dir=folder)
        for step in (0, 3):
            args, models = ours_of(config, lora, **keys)
            if step:
                args.resume_from_checkpoint = f"{folder}/checkpoint-{step}"
            trainer = trainer_of(models, args, config, callbacks=[_saves()])
            logs = [log for log in trainer.state.log_history if "loss" in log]
            curves.append([tuple(float(x[k]).hex() for k in ("loss", "grad_norm")) for x in logs])
            del trainer, models
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e9
    text = config.get_text_config()
    kept = dict(layers=text.num_hidden_layers, vocabulary=text.vocab_size)
    same = curves[0][-2:] == curves[1][-2:]
    return dict(kept, checkpoint_gb=round(size, 1), same_bits=same, unbroken=curves[0][-2:])


def _saves():
    """A callback that saves after the third step of five, and not at the end: large models leave
    no room for a second checkpoint."""
    from mca_lite.callbacks import TrainerCallback

    class Saves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 3

    return Saves()


PARTS = {
    "round trip": (round_trip,),
    "log-probabilities": (distances,),
    "LoRA": (trained, None, 16),
    "training": (trained, "trained", 0),
    "resume": (resumed, 0),
    "resume, LoRA": (resumed, 8),
}


def when_told(gate: str, function, *args) -> dict:
    """Import what a part needs, wait for the file `gate`, and run the part."""
    import transformers  # noqa: F401

    from mca_lite import McaTrainer, Session, part_lora, tool_plan  # noqa: F401

    die_with_parent()
    while not os.path.exists(gate):
        time.sleep(0.05)
    return function(*args)


def measured(model: str, part: str, gate: Path) -> dict:
    """A part's line; where it fails, the error."""
    function, *more = PARTS[part]
    more = [getattr(SHAPES[model], x) if isinstance(x, str) else x for x in more]
    try:
        return world.run(when_told, 1, str(gate), function, model, *more, timeout_s=900)[0]
    except Exception as error:
        return dict(failed=f"{type(error).__name__}: {error}"[-900:])


def lines_of(models: list[str], parts: list[str]) -> Iterator[tuple[str, str, dict]]:
    """(model, part, its line) one after another; the next one's process starts meanwhile."""
    pairs = [(model, part) for model in models for part in parts]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        gates = [Path(folder, str(number)) for number in range(len(pairs))]
        begun = [
            pool.submit(measured, *pair, gate) for pair, gate in zip(pairs, gates, strict=True)
        ]
        for pair, gate, line in zip(pairs, gates, begun, strict=True):
            start = time.time()
            gate.touch()
            yield *pair, dict(line.result(), seconds=round(time.time() - start))


def page(model: str, found: dict[str, dict], old: str = "") -> str:
    """The card in Markdown; rows of other parts are those of the old page."""
    names = ("torch", "triton", "megatron-core", "transformers")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    packages = ", ".join(f"{n} {version(n)}" for n in names if _is_there(n))
    made = [line for line in old.splitlines() if "; torch " in line][:1]
    here = f"{gpu}; {packages}"
    where = made[0].rstrip(".") if made else here
    rows = {}
    for line in old.splitlines():
        part, _, words = line.strip("| ").partition(" | ")
        if part in PARTS:
            rows[part] = words
    for part, values in found.items():
        words = "; ".join(f"{k.replace('_', ' ')} {_show(v)}" for k, v in values.items())
        rows[part] = words if where == here else f"{words}; {here}"
    lines = [f"# {model}", "", f"{where}.", ""]
    lines += [f"`make card MODEL={model}`; weights drawn from the seed {SEED}.", ""]
    lines += ["| part | found |", "| --- | --- |"]
    lines += [f"| {part} | {rows[part]} |" for part in PARTS if part in rows]
    return "\n".join(lines) + "\n"


def _is_there(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _show(value) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_show, value)) or "none"
    return str(value)


def main(words: list[str]) -> int:
    models = [word for word in words if word in SHAPES]
    parts = [word for word in words if word in PARTS]
    if not models or len(models) + len(parts) < len(words):
        print(f"{__doc__}\nmodels: {', '.join(SHAPES)}; parts: {', '.join(PARTS)}")
        return 2
    failed = 0
    pages = {model: FOLDER / f"{model}.md" for model in models}
    keep = {
        model: path.read_text() if parts and path.exists() else "" for model, path in pages.items()
    }
    for model, part, line in lines_of(models, parts or list(PARTS)):
        failed += "failed" in line
        bench_gpu.write(dict(card=model, part=part, **line))
        keep[model] = page(model, {part: line}, keep[model])
        if not bench_gpu.TINY:
            pages[model].write_text(keep[model])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
