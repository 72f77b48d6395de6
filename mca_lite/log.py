"""A run's log: start summary, progress, trainer_log.jsonl and trackers; speed and FLOPs.

FLOPs of a step: (4 F + 6 T) tokens + 6 c (sum of squared document lengths). F and T: frozen and
trained weights that are multiplied with a token. Without adapters, layers below every trained
weight have no backward pass, and count 2 in place of 4 and 6; so do extra forward passes. c: half
the query and value channels, summed over heads and layers, because attention is causal. Linear
attention: 6 tokens times the multiplications in its convolution and its state, or 2 likewise.
Pictures: 2 passes (weights per patch) patches + 4 passes (width x layers) (sum of squared patches
per picture or video frame), with three passes if any of the tower on this rank is trained, else
one; layers with windows count their windows instead. Audio: FLOPs per frame times frames."""

import contextlib
import json
import math
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from . import model_config, parallel
from .args_rules_training import plan_schedule
from .args_values import show_count
from .callbacks import TrainerCallback
from .errors import Keys
from .families import values_of
from .files import (
    RUN_SUMMARY_NAME,
    TRAINER_LOG_NAME,
    describe_error,
    lost_stdout,
    write_file,
    write_json,
)
from .finetuning import finetuning_of, layer_of, lowest_layer
from .inputs import InputWork, inputs_of
from .log_metrics import METRICS, PROGRESS, format_duration, log_line, metric_of, read_lines
from .tables import function_of
from .weights_files import InitSource

# -- speed

# Words in a device's name -> its dense bf16 and fp16 peak in FLOP/s from NVIDIA's data sheets
# (without sparsity); None if its peak is lower and not known. The first row that matches is used.
_PEAK_FLOPS = (
    ("A100", 312e12),
    ("A800", 312e12),
    ("H100 PCIE", 756e12),
    ("H800 PCIE", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("L40S", 362e12),
    ("4090 D", None),
    ("4090 LAPTOP", None),
    ("4090", 165e12),
)


class Throughput:
    """Times the steps between two log lines and turns their token counts into rates.

    Counts are of whole steps, over all ranks. world_size: number of devices; peak_flops: FLOP/s of
    one device, None if unknown. clock: returns the time in seconds. Nothing here waits for the GPU.
    Work that is still queued there at stop() is timed in a later step, or not at all if the GPU
    ends it before the next start(). This error is small if the loop reads a value
    (loss, gradient norm) in each step."""

    def __init__(
        self,
        world_size: int = 1,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.world_size = world_size
        self.peak_flops = peak_flops
        self._clock = clock
        self._reset()

    @classmethod
    def of(cls, args: Keys) -> "Throughput":
        """The Throughput for a run with these TrainingArguments. The peak is that of this rank's
        GPU with bf16 or fp16, if known; otherwise None."""
        peak = None
        if torch.cuda.is_available() and (args.bf16 or args.fp16):
            peak = peak_flops(torch.cuda.get_device_name())
        return cls(args.world_size, peak)

    def _reset(self) -> None:
        self._steps = self._tokens = self._positions = 0
        self._time_s = self._flops = 0.0

    def start(self) -> None:
        """Mark the beginning of a step."""
        self._started = self._clock()

    def stop(self, tokens: float, positions: float, model_flops: float = 0.0) -> None:
        """Mark the end of a step, and count it. tokens: its number of tokens without padding, over
        all ranks. positions: the number including padding. model_flops: its FLOPs over all ranks
        (0: not counted)."""
        self._time_s += self._clock() - self._started
        self._steps += 1
        self._tokens += tokens
        self._positions += positions
        self._flops += model_flops

    def take(self) -> dict[str, float]:
        """Mean rates over the steps since the last call; then counts start anew. {} if there was no
        step.

        Keys: step_time_s (mean), tokens_per_second, tokens_per_second_per_device, padding_fraction
        (of all positions), tflops_per_device if FLOPs were counted, and mfu (1 is the device's
        peak) if the peak is known too."""
        if not self._steps:
            return {}
        time_s = max(self._time_s, 1e-9)  # a clock may not have ticked
        rates = {
            "step_time_s": self._time_s / self._steps,
            "tokens_per_second": self._tokens / time_s,
            "tokens_per_second_per_device": self._tokens / time_s / self.world_size,
            "padding_fraction": 1.0 - self._tokens / max(self._positions, 1),
        }
        if self._flops:
            flops_per_device = self._flops / time_s / self.world_size
            rates["tflops_per_device"] = flops_per_device / 1e12
            if self.peak_flops:
                rates["mfu"] = flops_per_device / self.peak_flops
        self._reset()
        return rates


class ModelSizes(NamedTuple):
    """The sizes of a model that decide the cost of a token, from a config of either backend.
    weights: number of weights that a token is multiplied with. core: half the query and value
    channels, summed over heads and layers of softmax attention; times a document's squared length,
    this gives attention's multiplications. mlp_weights: weights in MLPs that a token is multiplied
    with, per layer on average. linear: multiplications per token in linear attention, without those
    with weights."""

    weights: float
    core: float
    num_layers: int
    hidden_size: int
    vocab_size: int
    mlp_weights: float
    linear: float = 0.0

    def cost(self, tokens: Any, squares: Any) -> Any:
        """Count the multiplications in a forward pass over documents. tokens: the number of their
        tokens. squares: the sum of their squared lengths. Both are numbers or arrays."""
        return (self.weights + self.linear) * tokens + self.core * squares

    def passes(self, count: float, others: "ModelSizes | None" = None) -> "ModelSizes":
        """The sizes of `count` forward passes taken together, to count FLOPs: weights, core and
        linear times `count`. others: the sizes of another model that runs too, which are added to
        these three; None: no other model."""
        sums = {name: count * getattr(self, name) for name in ("weights", "core", "linear")}
        if others is not None:
            sums = {name: size + getattr(others, name) for name, size in sums.items()}
        return self._replace(**sums)


@dataclass(frozen=True)
class ModelWork:
    """The numbers from which flops() computes the FLOPs of a step; the formulas are at the top of
    this file. frozen, trained: numbers of weights that a token is multiplied with. core, linear:
    sizes of softmax attention and of linear attention, see ModelSizes. below, core_below,
    linear_below: weights, core and linear of layers without a backward pass; the other fields do
    not include them. reference: sizes for extra forward passes; None: none. inputs: FLOPs of the
    towers for pictures and audio; None: no towers."""

    frozen: float = 0.0
    trained: float = 0.0
    core: float = 0.0
    reference: ModelSizes | None = None
    inputs: InputWork | None = None
    below: float = 0.0
    core_below: float = 0.0
    linear: float = 0.0
    linear_below: float = 0.0

    def flops(
        self,
        tokens: float,
        squares: float,
        units: float = 0.0,
        unit_squares: float = 0.0,
        frames: float = 0.0,
    ) -> float:
        """FLOPs of one step. tokens: number of tokens without padding. squares: sum of squared
        document lengths. units: number of image patches. unit_squares: the squared number of
        patches of each image or video frame, summed. frames: number of frames of audio."""
        flops = (4 * self.frozen + 6 * self.trained) * tokens + 6 * self.core * squares
        flops += 2 * self.below * tokens + 2 * self.core_below * squares
        flops += (6 * self.linear + 2 * self.linear_below) * tokens
        if self.inputs is not None:
            flops += self.inputs.of_unit * units + self.inputs.of_square * unit_squares
            flops += self.inputs.of_frame * frames
        if self.reference is not None:
            beside = self.reference
            flops += 2 * (beside.weights + beside.linear) * tokens + 2 * beside.core * squares
        return flops


def model_work(
    model: Any, reference: Any = None, forward_passes: tuple[float, float] = (0, 1)
) -> ModelWork:
    """The ModelWork (numbers to compute a step's FLOPs from) of a model that is trained; all zeros
    if its sizes are unknown.

    model: VirtualModels (megatron's model chunks) or a transformers model. reference: a second
    model that only runs forward on each batch, or `model` itself if the reference is the model
    without its adapters; None: no reference. forward_passes: numbers of extra forward passes over a
    step's tokens, by the model and by the reference."""
    config = getattr(model, "config", None)
    sizes = model_sizes(config)
    if sizes is None:
        return ModelWork()
    of_model, of_reference = forward_passes
    beside = model_sizes(getattr(reference, "config", None))
    if beside is not None:
        beside = beside.passes(of_reference)
    beside = sizes.passes(of_model, beside)
    inputs = inputs_of(config).work(model)
    finetuning = finetuning_of(model)
    if finetuning.trained is not None:
        return replace(partial_work(config, finetuning.trained, beside), inputs=inputs)
    if finetuning.is_whole:
        return ModelWork(0.0, sizes.weights, sizes.core, beside, inputs, linear=sizes.linear)
    added = 0.0
    whole = 0.0
    for module, (uses, shape) in _matrices_of(config).items():
        of_matrix = 0.0 if _is_embedding(module) else uses
        added += finetuning.work_beside(module, of_matrix, shape)
        whole += finetuning.trains(module) * of_matrix * math.prod(shape)
    return ModelWork(
        sizes.weights - whole, added + whole, sizes.core, beside, inputs, linear=sizes.linear
    )


def partial_work(config: Any, trained: Collection[str], reference: ModelSizes | None) -> ModelWork:
    """The ModelWork (numbers to compute a step's FLOPs from) of a model in which only some modules
    are trained. Layers below the lowest trained one count without a backward pass. config: a config
    that model_sizes() knows. trained: Hugging Face names of the trained modules. reference: sizes
    for extra forward passes; None: none."""
    sizes = model_sizes(config)
    lowest = lowest_layer(trained, sizes.num_layers)
    linear = _fields_of(config).get("linear_layers") or ()
    linear_below = sum(layer < lowest for layer in linear)  # layers without a backward pass
    share = (lowest - linear_below) / max(sizes.num_layers - len(linear), 1)
    weights = {"below": 0.0, "frozen": 0.0, "trained": 0.0}
    for module, (uses, shape) in _matrices_of(config).items():
        kind = "trained" if module in trained else "frozen"
        if layer_of(module, lowest) < lowest:
            kind = "below"
        weights[kind] += uses * math.prod(shape)
    core_below = sizes.core * share
    core = sizes.core - core_below
    beside = sizes.linear * linear_below / max(len(linear), 1)
    weights |= {"linear": sizes.linear - beside, "linear_below": beside}
    return ModelWork(core=core, core_below=core_below, reference=reference, **weights)


def _is_embedding(module: str) -> bool:
    return module in ("model.embed_tokens", "model.language_model.embed_tokens")


def model_sizes(config: Any) -> ModelSizes | None:
    """Read the sizes of a model from its config, a McaModelConfig or a transformers config. None if
    it is another object, or if the model's family is not in FAMILIES."""
    fields = _fields_of(config)
    if not fields:
        return None
    heads = fields["num_attention_heads"]
    channels = 2 * (fields.get("kv_channels") or fields["hidden_size"] // heads)
    if fields.get("kv_lora_rank"):
        channels = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"] + fields["v_head_dim"]
    layers = fields["num_layers"] + (fields.get("mtp_num_layers") or 0)
    weights = {
        name: uses * math.prod(shape) for name, (uses, shape) in _matrices_of(config).items()
    }
    of_mlps = [
        size for name, size in weights.items() if re.search(r"\.(mlp|block_sparse_moe)\.", name)
    ]
    linear = len(fields.get("linear_layers") or ())
    return ModelSizes(
        weights=sum(weights.values()),
        core=((layers - linear) * heads * channels + _more_of_full_layers(fields)) / 2,
        num_layers=fields["num_layers"],
        hidden_size=fields["hidden_size"],
        vocab_size=fields["vocab_size"],
        mlp_weights=sum(of_mlps) / layers,
        linear=linear and linear * _linear_products(fields),
    )


def _more_of_full_layers(fields: dict[str, Any]) -> int:
    """Query and value channels that layers with full attention have beyond those of sliding-window
    layers, because their heads are wider; summed over heads and layers. 0 if all heads have one
    width. fields: values of McaModelConfig's fields."""
    if not fields.get("full_kv_channels"):
        return 0
    full = fields["num_layers"] - len(fields["sliding_layers"])
    more = fields["full_kv_channels"] - fields["kv_channels"]
    return 2 * full * fields["num_attention_heads"] * more


def _linear_products(fields: dict[str, Any]) -> int:
    """Number of multiplications per token in a linear attention layer, without those with its
    weight matrices. They are those in the convolution, and 3 k v for each value head: a head's
    state is a matrix [k, v], and each of its numbers is multiplied three times. fields: values of
    McaModelConfig's fields."""
    k = fields["linear_key_head_dim"]
    of_values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    channels = 2 * fields["linear_num_key_heads"] * k + of_values
    return channels * fields["linear_conv_kernel_dim"] + 3 * of_values * k


def _fields_of(config: Any) -> dict[str, Any]:
    """A model's config as {McaModelConfig's field: value}. config: a McaModelConfig, or a
    transformers config, which gives the fields that its model family knows. {} for another object,
    and for an unknown family."""
    if hasattr(config, "hf_model_type"):
        return vars(config)
    return values_of(config) if hasattr(config, "model_type") else {}


def _matrices_of(config: Any) -> dict[str, tuple[float, tuple[int, ...]]]:
    """The matrices of a text model, to count multiplications: {Hugging Face module: (uses, shape)}.
    uses: how often a token is multiplied with the matrix, mostly 1. For an expert it is the share
    of the experts that a token uses, for the embedding 0, and for the head one more per token
    predicted ahead."""
    fields = _fields_of(config)
    ahead = fields.get("mtp_num_layers") or 0
    hf_config = fields.get("hf_config") or config.to_dict()
    experts = fields.get("num_moe_experts")
    share = fields["moe_router_topk"] / experts if experts else 1.0
    source = InitSource(hf_config, 0, ahead)
    inputs = inputs_of(config)
    matrices = {}
    for name in source.names():
        shape = source.shape(name)
        uses = share if ".experts." in name else 1.0
        if name.startswith("lm_head"):
            uses += ahead
        module = name.removesuffix(".weight")
        if _is_embedding(module):
            uses = 0.0
        if len(shape) == 2 and not inputs.owns(name):
            matrices[module] = uses, shape
    return matrices


def peak_flops(device_name: str) -> float | None:
    """The dense peak of a device in bf16 and fp16, in FLOP/s. device_name: its name, from
    torch.cuda.get_device_name(). None if the peak is unknown, because no MFU is better than a wrong
    one."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    for name, flops in _PEAK_FLOPS:
        if words.issuperset(name.split()):
            return flops
    return None


def peak_memory_gib() -> float:
    """This process's peak memory in GiB: what CUDA's allocator gave out on its GPU, or the resident
    set if there is no CUDA."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# -- the log

# While a run trains, its page is drawn at most every DRAW_EVERY_S seconds, or every DRAW_SHARE
# times the time that drawing takes if that is longer.
DRAW_EVERY_S = 30.0
DRAW_SHARE = 50
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # megatron-core recommends 1
_WIDTH = 34  # width of a name in the start summary
_KNOWN = {"step", *(metric.key for metric in METRICS)}


def format_summary(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The start summary as text: a line with each section's name, then its values in one column. A
    value of None is skipped, and so is a section without other values."""
    lines = []
    for name, values in sections.items():
        known = {key: value for key, value in values.items() if value is not None}
        lines += [name] * bool(known)
        lines += [f"  {key:<{_WIDTH}}  {value}" for key, value in known.items()]
    return "\n".join(lines)


def format_progress(logs: Mapping[str, Any], max_steps: int, eta_s: float | None = None) -> str:
    """A progress line for one log record, `logs`. It has the step and max_steps, the metrics of
    PROGRESS in this order, then keys that METRICS does not have, and eta_s, the remaining seconds,
    if given.

    A metric that is NaN, or smaller than its field `least`, is left out. So are other keys with the
    value 0, but for metrics of evaluations, and the lags of ranks if `logs` has no slowest_rank."""
    parts = [f"step {logs['step']}/{max_steps}"]
    for metric in PROGRESS:
        is_noise = metric.key.startswith("lag_") and "slowest_rank" not in logs
        if metric.key in logs and logs[metric.key] >= metric.least and not is_noise:
            parts.append(f"{metric.name} {metric.form(logs[metric.key])}")
    for key, value in logs.items():
        # 0 is not shown, as in skipped_iter
        if key not in _KNOWN and (value or key.startswith("eval_")):
            parts.append(f"{key} {metric_of(key).form(value)}")
    if eta_s is not None:
        parts.append(f"eta {format_duration(eta_s)}")
    return "  ".join(parts)


class Pictures(TrainerCallback):
    """A callback that has a run's curves drawn while it trains: it makes `draw` the drawing
    function of the trainer's Report. draw: for example tool_page.draw."""

    def __init__(self, draw: Callable[..., None]) -> None:
        self.draw = draw

    def on_init_end(
        self, args: Any, state: Any, control: Any, trainer: Any = None, **kwargs: Any
    ) -> None:
        trainer.report.draw = self.draw


class Report(TrainerCallback):
    """Prints progress and writes the log, as TrainingArguments say. Every rank makes one; only the
    rank with `is_main` prints and writes.

    If disable_tqdm is None, there is a bar if stderr is a terminal, otherwise plain lines. draw: a
    function of TrainingArguments that draws a run, repeatedly while it trains and at its end; None:
    nothing is drawn. If it fails, the run goes on, without more drawings.
    """

    draw: Callable[..., Any] | None = None

    def __init__(
        self, args: Keys, is_main: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.args = args
        self.is_main = is_main
        self._clock = clock
        self.log_path = os.path.join(args.output_dir, TRAINER_LOG_NAME)
        self.uses_bar = not args.disable_tqdm
        if args.disable_tqdm is None:
            self.uses_bar = sys.stderr.isatty()
        self._opened = contextlib.ExitStack()  # closes log, bar and trackers
        self._file: Any = None
        self._bar: Any = None
        self._trackers: list[Callable[..., None]] = []
        self._max_steps = self.first_step = 0
        self._started = self._draw_at = clock()
        self._facts: dict[str, Any] = {}  # content of run_summary.json

    def print(self, text: str) -> None:
        """Print on the main rank only, above the progress bar if there is one. If stdout is lost (a
        closed pipe, a full disk), the run goes on, and an open log file gets a note."""
        if not self.is_main:
            return
        try:
            if self._bar is not None:
                self._bar.write(text, file=sys.stdout)
            else:
                print(text, flush=True)
        except OSError as error:
            if not lost_stdout():
                raise
            if self._file is not None:
                note = f"stdout cannot be written ({error}): only this file continues"
                self._file.write(json.dumps({"note": note}) + "\n")

    def summary(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Print the start summary on the main rank, and keep it for run_summary.json."""
        self._facts["sections"] = sections
        self.print(format_summary(sections))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._max_steps = state.max_steps
        self.first_step = state.global_step
        self._started = self._clock()
        if not self.is_main:
            return
        self._close()
        os.makedirs(self.args.output_dir, exist_ok=True)
        kept = []  # keep lines up to the resumed step; a new run starts with an empty log
        if self.first_step:
            lines = filter(log_line, read_lines(self.log_path))
            kept = [line for line in lines if line["step"] <= self.first_step]
            state.resumes.append(self.first_step)
        write_file(self.log_path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self._opened.enter_context(open(self.log_path, "a", encoding="utf-8"))
        self._facts |= {"max_steps": state.max_steps, "first_step": state.global_step}
        self._facts["resumes"] = state.resumes
        self._facts |= {"started": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        self._write_facts("running")
        self._draw_at = self._started + DRAW_EVERY_S
        if self.uses_bar:
            from tqdm import tqdm

            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True
            )
            self._opened.callback(self._bar.close)
        for name in self.args.report_to:
            begin = function_of("part_callbacks:TRACKERS")[name]
            track, close = begin(self.args, state.global_step)
            self._trackers.append(track)
            self._opened.callback(close)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        self.log(logs)

    def log(self, logs: Mapping[str, Any]) -> None:
        """Show one record as progress, on the main rank. While a run trains, the record also goes
        to the trackers, and unrounded to trainer_log.jsonl. logs: {name: value} with "step"; values
        may be tensors or numpy arrays of one element. Only numbers are shown and tracked."""
        if not self.is_main:
            return
        logs = {k: v.item() if hasattr(v, "item") else v for k, v in logs.items()}
        numbers = {k: v for k, v in logs.items() if isinstance(v, (int, float))}
        self._show(numbers)
        step = numbers.pop("step")
        for track in self._trackers:
            track(numbers, step)
        if self._file is None:
            return
        self._file.write(json.dumps(logs) + "\n")
        self._file.flush()  # so that others can read it, and a crash loses nothing
        if self._clock() >= self._draw_at:
            self._draw()

    def _show(self, numbers: Mapping[str, Any]) -> None:
        if self._bar is not None and "loss" in numbers:
            self._bar.set_postfix_str(format_progress(numbers, self._max_steps).split("  ", 1)[1])
            return
        done = numbers["step"] - self.first_step
        left = self._max_steps - numbers["step"]
        eta_s = None
        if done > 0 and left > 0 and "loss" in numbers:
            eta_s = (self._clock() - self._started) / done * left
        self.print(format_progress(numbers, self._max_steps, eta_s))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end("finished")

    def end(self, state: str) -> None:
        """On the main rank: write the run's final `state` ("interrupted", for example), call `draw`
        if it is set, close log and trackers. Other ranks do nothing."""
        if not self.is_main:
            return
        self._write_facts(state)
        self._draw()
        self._close()

    def _write_facts(self, state: str) -> None:
        self._facts["state"] = state
        write_json(os.path.join(self.args.output_dir, RUN_SUMMARY_NAME), self._facts, default=str)

    def _draw(self) -> None:
        if self.draw is None:
            return
        began = self._clock()
        try:
            self.draw(self.args)
        except Exception as error:  # a full disk, or a missing font
            self.print(f"note: report and plot are no longer drawn: {describe_error(error)}")
            self.draw = None
        now = self._clock()
        self._draw_at = now + max(DRAW_EVERY_S, DRAW_SHARE * (now - began))

    def _close(self) -> None:
        self._opened.close()
        self._file = self._bar = None
        self._trackers = []


def run_summary(trainer: Any, plan: Any) -> dict[str, dict[str, Any]]:
    """The sections of the start summary, {section: {name: value}}: model, layout, steps, automatic
    choices, and those in trainer.extra_summary. plan: the trainer's BatchPlan
    (which samples each step takes)."""
    args = trainer.args
    backend = trainer.backend
    config = getattr(trainer.model, "config", None)
    model_type = getattr(config, "hf_model_type", None) or getattr(config, "model_type", None)
    total, trained = backend.num_parameters()
    device = parallel.device().type
    precision = backend.precision
    if args.fp8:
        precision += f", matmuls in fp8 ({args.fp8}, {args.fp8_recipe})"
    kind = "plain torch DDP"
    if backend.name == "megatron":
        kind = f"megatron-core, {config.transformer_impl} layers"
    degrees = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        backend.dp_size,
    )
    shared = ["sequence parallel"] * args.sequence_parallel
    shared += ["packed rows"] * args.sequence_packing
    sections = {
        "model": {
            "name": getattr(config, "name_or_path", None),
            "type": model_type,
            "parameters on this rank": f"{total:,} ({trained:,} trained)",
            "trained of each part": inputs_of(config).parts_summary(trainer.model),
            "weights": getattr(trainer.model, "weights_from", None) or "as given",
            "precision": precision,
        },
        "layout": {
            "backend": kind,
            "world": f"{show_count(args.world_size, 'rank')} on {device}",
            "found": model_config.found_here(),
            "tensor x pipeline x context x data": " x ".join(map(str, degrees)),
            "expert x expert tensor": _expert_layout(backend),
            "load-balancing loss": balance_summary(backend, args),
            "activations": ", ".join(shared) or "whole on every rank",
            _CONNECTIONS: connections(args, device),
        },
        "steps": steps_summary(trainer, plan),
        "chosen": dict(enumerate(args.notes, 1)),
    }
    return {**sections, **trainer.extra_summary}


def steps_summary(trainer: Any, plan: Any) -> dict[str, Any]:
    """Lines of the start summary, {name: value}: batch size, steps, learning rate and first step.
    plan: the trainer's BatchPlan (which samples each step takes)."""
    args = trainer.args
    state = trainer.state
    unit = getattr(trainer.train_dataset, "unit", "samples")
    warmup = plan_schedule(args, state.max_steps).warmup
    epochs = "of a stream, which has no epochs"
    if hasattr(trainer.train_dataset, "__len__"):
        epochs = f"({plan.steps_per_epoch} an epoch of {plan.num_samples} {unit})"
    return {
        "global batch": f"{plan.global_batch_size} {unit} = micro-batch {plan.micro_batch_size} x "
        f"accumulation {args.gradient_accumulation_steps} x data parallel {plan.dp_size}",
        "steps": f"{state.max_steps} {epochs}",
        "learning rate": f"{args.learning_rate:g}, {args.lr_scheduler_type}, "
        f"{show_count(warmup, 'step')} of warm-up",
        "from step": state.global_step,
    }


def connections(args: Keys, device: str) -> str | None:
    """A warning for the start summary if the environment variable CUDA_DEVICE_MAX_CONNECTIONS is
    not 1 with tensor parallelism on a GPU; otherwise None. device: the device's type, such as
    "cpu"."""
    is_parallel = device != "cpu" and args.tensor_model_parallel_size > 1
    if is_parallel and os.environ.get(_CONNECTIONS) != "1":
        return "not 1: with 1, communication starts before the matmuls that it overlaps with"
    return None


def _expert_layout(backend: Any) -> str | None:
    """The spread of experts over ranks, as text for the start summary, such as "4 x 1
    (2 of 8 experts a rank)": expert-parallel size x expert-tensor-parallel size. None for a model
    without experts, and on plain torch. backend: the run's backend."""
    if backend.name != "megatron" or not backend.config.num_moe_experts:
        return None
    config = backend.config
    experts = config.num_moe_experts
    ep = config.expert_model_parallel_size
    etp = config.expert_tensor_parallel_size
    return f"{ep} x {etp} ({experts // ep} of {experts} experts a rank)"


def balance_summary(backend: Any, args: Keys) -> str | None:
    """The load-balancing loss of the MoE routers as text for the start summary, with its
    coefficient and the key that set this. "none" if the loss is off; None if no routers are
    counted, as in a dense model."""
    if backend.statistics_of_routers is None:
        return None
    losses = backend.losses_of_routers
    origin = "moe_aux_loss_coeff"
    if args.moe_aux_loss_coeff is None:
        origin = "the model's router_aux_loss_coef; moe_aux_loss_coeff: 0 switches it off"
    if losses.kind == "none":
        return "none"
    return f"{losses.kind} x {losses.balance:g} ({origin})"
