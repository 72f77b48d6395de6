"""What a run says about itself: start summary, progress, trainer_log.jsonl, TensorBoard, W&B, loss plot, speed."""

import importlib.util
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from .constants import LOSS_PLOT_NAME, TRAINER_LOG_NAME
from .trainer_callbacks import TrainerCallback

# What report_to may name: the packages it takes and the extra that installs them.
_TRACKERS = {"tensorboard": ("tensorboard", "tensorboard"), "wandb": ("wandb", "wandb")}

# Keys that the progress line shows in its own way, or not at all: the log file has them.
_NOT_IN_LINE = {
    "step",
    "expert_load",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "consumed_samples",
    "consumed_tokens",
    "padding_fraction",
    "tflops_per_device",
    "step_time_s",
    "peak_memory_gib",
}

# Dense bf16 and fp16 peaks in FLOP/s from NVIDIA's data sheets (without sparsity). Each row: words that the device's
# name must hold, words that it must not hold, the peak. The first row that fits counts.
_PEAK_FLOPS = (
    ({"A100"}, set(), 312e12),
    ({"A800"}, set(), 312e12),
    ({"H100", "PCIE"}, set(), 756e12),
    ({"H800", "PCIE"}, set(), 756e12),
    ({"H100", "NVL"}, set(), 835e12),
    ({"H200", "NVL"}, set(), 835e12),
    ({"H100"}, set(), 989e12),
    ({"H800"}, set(), 989e12),
    ({"H200"}, set(), 989e12),
    ({"B200"}, set(), 2250e12),
    ({"L40S"}, set(), 362e12),
    ({"4090"}, {"D", "LAPTOP"}, 165e12),
)


def format_summary(sections: Mapping[str, Mapping]) -> str:
    """Returns the start summary as text: a line for each section's name, below it its values in one column.

    Numbers get thousand separators, lists are joined by commas, and a value of None leaves its line out.
    """
    known = {
        name: {k: v for k, v in values.items() if v is not None}
        for name, values in sections.items()
    }
    width = max((len(key) for values in known.values() for key in values), default=0)
    lines = []
    for name, values in known.items():
        if values:
            lines.append(name)
            lines.extend(f"  {key:<{width}}  {_text(value)}" for key, value in values.items())
    return "\n".join(lines)


def _text(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value)
    return str(value)


def format_duration(seconds: float) -> str:
    """Returns 58s, 1m20s or 2h05m."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def format_rate(per_second: float) -> str:
    """Returns 850, 12.3k or 1.2M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= limit:
            return f"{per_second / limit:.1f}{unit}"
    return f"{per_second:.0f}"


def format_progress(logs: Mapping, max_steps: int, eta_s: float | None = None) -> str:
    """Returns one line for one record of the log; what the record lacks is left out."""
    parts = [f"step {logs['step']}/{max_steps}"]
    for key, form in (
        ("epoch", "epoch {:.2f}"),
        ("loss", "loss {:.4f}"),
        ("grad_norm", "grad_norm {:.2f}"),
    ):
        if logs.get(key) is not None:
            parts.append(form.format(logs[key]))
    if logs.get("learning_rate") is not None:
        parts.append(f"lr {logs['learning_rate']:.1e}")
    if logs.get("tokens_per_second") is not None:
        parts.append(f"{format_rate(logs['tokens_per_second'])} tokens/s")
    for key, value in logs.items():
        counts_nothing = key == "skipped_iter" and not value
        if key not in _NOT_IN_LINE and value is not None and not counts_nothing:
            parts.append(f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}")
    if eta_s is not None:
        parts.append(f"eta {format_duration(eta_s)}")
    return "  ".join(parts)


def smooth(values: Iterable[float], weight: float = 0.9) -> list[float]:
    """Returns the running mean in which a value counts `weight` times less with each step since.

    m_t = sum_i w^(t-i) x_i / sum_i w^(t-i): the first values are not pulled to zero.
    """
    total, norm, means = 0.0, 0.0, []
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        means.append(total / norm)
    return means


def read_log(path: str) -> list[dict]:
    """Returns the records of a trainer_log.jsonl; a last line that a crash left unfinished is passed over."""
    records = []
    with open(path, encoding="utf-8") as file:
        lines = file.readlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}:{number}: expected a JSON object, but {error}: remove the line"
                ) from None
    return records


def plot_loss(records: Iterable[Mapping], path: str) -> None:
    """Writes a picture of loss, smoothed loss and eval_loss over the steps of `records` to `path`; needs matplotlib."""
    # Figure and Agg directly: pyplot would choose a backend for the whole process and keep every figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(records)
    trained = [
        (record["step"], record["loss"]) for record in records if record.get("loss") is not None
    ]
    evaluated = [
        (record["step"], record["eval_loss"])
        for record in records
        if record.get("eval_loss") is not None
    ]
    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if trained:
        steps, losses = zip(*trained, strict=True)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, label="loss")
        axes.plot(steps, smooth(losses), color="tab:blue", label="loss, smoothed")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), color="tab:orange", marker="o", label="eval_loss")
    if trained or evaluated:
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


class Report(TrainerCallback):
    """Prints progress and writes the log; every rank constructs one, only the rank with `is_main` prints and writes.

    report_to: names out of tensorboard and wandb (or "none"). disable_tqdm: None shows a bar where stderr is a terminal
    and plain lines elsewhere; True always plain lines, False always the bar. `config` is what W&B stores about the run.
    Raises ValueError, on every rank alike, for an unknown name or one whose package is not installed.
    """

    def __init__(
        self,
        *,
        is_main: bool,
        output_dir: str,
        report_to: Iterable[str] = (),
        plot_loss: bool = False,
        run_name: str | None = None,
        disable_tqdm: bool | None = None,
        config: Mapping | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.is_main = is_main
        self.output_dir = output_dir
        self.trackers = [
            name
            for name in ([report_to] if isinstance(report_to, str) else report_to)
            if name != "none"
        ]
        self.plots = plot_loss
        self.run_name = run_name
        self.config = dict(config or {})
        check_trackers(self.trackers, plot_loss)
        self.uses_bar = sys.stderr.isatty() if disable_tqdm is None else not disable_tqdm
        self._clock = clock
        self._file = self._bar = self._tensorboard = self._wandb = None
        self._max_steps = self._first_step = 0
        self._started = clock()

    @property
    def log_path(self) -> str:
        return os.path.join(self.output_dir, TRAINER_LOG_NAME)

    def print(self, text: str) -> None:
        """Prints on the main rank only, above the bar where there is one."""
        if not self.is_main:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def summary(self, sections: Mapping[str, Mapping]) -> None:
        """Prints the start summary, see `format_summary`."""
        self.print(format_summary(sections))

    def on_train_begin(self, args, state, control, **kwargs):
        self._max_steps, self._first_step, self._started = (
            state.max_steps,
            state.global_step,
            self._clock(),
        )
        if not self.is_main:
            return
        self._close()
        os.makedirs(self.output_dir, exist_ok=True)
        self._open_log(state.global_step)
        if self.uses_bar:
            from tqdm import tqdm

            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True
            )
        if "tensorboard" in self.trackers:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what a crashed run wrote past the step that this one resumes from.
            purge_step = state.global_step + 1 if state.global_step else None
            self._tensorboard = SummaryWriter(
                os.path.join(self.output_dir, "runs"), purge_step=purge_step
            )
        if "wandb" in self.trackers:
            import wandb

            project = os.environ.get("WANDB_PROJECT", "mca_lite")
            self._wandb = wandb.init(
                project=project, name=self.run_name, config=self.config, dir=self.output_dir
            )

    def _open_log(self, resumed_step: int) -> None:
        """Opens the log for appending, with the lines up to `resumed_step` in it: a new run (step 0) starts empty."""
        kept = []
        if resumed_step and os.path.exists(self.log_path):
            kept = [
                record
                for record in read_log(self.log_path)
                if record.get("step", 0) <= resumed_step
            ]
        temporary = f"{self.log_path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in kept)
        os.replace(temporary, self.log_path)
        self._file = open(self.log_path, "a", encoding="utf-8")  # noqa: SIM115 (stays open until on_train_end)

    def on_step_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args, state, control, logs, **kwargs):
        self.log(logs)

    def log(self, logs: Mapping) -> None:
        """Writes one record: a line of trainer_log.jsonl (unrounded), of the trackers and of the progress.

        `logs` must hold "step"; numbers may be Python's, numpy's or tensors of one element. Nothing is added to them.
        """
        if not self.is_main:
            return
        logs = {
            key: value.item() if hasattr(value, "item") else value for key, value in logs.items()
        }
        if self._file is not None:
            self._file.write(json.dumps(logs) + "\n")
            self._file.flush()  # whoever follows the file sees each line, and a crash loses none
        numbers = {
            key: value
            for key, value in logs.items()
            if key != "step" and isinstance(value, (int, float))
        }
        if self._tensorboard is not None:
            for key, value in numbers.items():
                group = "eval/" if key.startswith("eval_") else "train/"
                self._tensorboard.add_scalar(group + key.removeprefix("eval_"), value, logs["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=logs["step"])
        self._show(logs)

    def _show(self, logs: Mapping) -> None:
        if self._bar is not None and "loss" in logs:
            self._bar.set_postfix_str(format_progress(logs, self._max_steps).split("  ", 1)[1])
            return
        done, left = logs["step"] - self._first_step, self._max_steps - logs["step"]
        eta_s = (
            (self._clock() - self._started) / done * left
            if done > 0 and left > 0 and "loss" in logs
            else None
        )
        self.print(format_progress(logs, self._max_steps, eta_s))

    def on_save(self, args, state, control, path, **kwargs):
        self._plot()

    def on_train_end(self, args, state, control, **kwargs):
        if not self.is_main:
            return
        self._plot()
        self._close()

    def _plot(self) -> None:
        if self.is_main and self.plots and os.path.exists(self.log_path):
            plot_loss(read_log(self.log_path), os.path.join(self.output_dir, LOSS_PLOT_NAME))

    def _close(self) -> None:
        for opened in (self._file, self._bar, self._tensorboard):
            if opened is not None:
                opened.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._bar = self._tensorboard = self._wandb = None


def check_trackers(report_to: Iterable[str], plot_loss: bool) -> None:
    """ValueError for a tracker that is unknown, or that is asked for and not installed."""
    for name in report_to:
        if name == "none":
            continue
        if name not in _TRACKERS:
            raise ValueError(
                f"report_to names {name!r}, expected any of {', '.join(_TRACKERS)} or none"
            )
        _require(*_TRACKERS[name], key=f"report_to: {name}")
    if plot_loss:
        _require("matplotlib", "plot", key="plot_loss: true")


def _require(package: str, extra: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{key} needs {package}, which is not installed: pip install 'mca-lite[{extra}]', or unset it"
        )


class Throughput:
    """Times steps between two lines of the log and turns their token counts into rates.

    Counts are of the whole step, over all ranks. world_size: number of devices; peak_flops: FLOP/s of one device, None
    where unknown. Nothing here waits for the GPU: a step whose work is still queued shifts its time to the next one,
    and the sums between two lines are right as long as the loop reads a number (loss, grad norm) off each step.
    total_samples, total_tokens, total_time_s: over all steps since the construction.
    """

    def __init__(
        self,
        world_size: int = 1,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.world_size = world_size
        self.peak_flops = peak_flops
        self._clock = clock
        self._started: float | None = None
        self.total_samples = self.total_tokens = 0
        self.total_time_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._steps = self._tokens = self._padded_tokens = 0
        self._time_s = self._flops = 0.0

    def start(self) -> None:
        """A step begins."""
        self._started = self._clock()

    def stop(
        self, tokens: int, padded_tokens: int, samples: int = 0, model_flops: float = 0.0
    ) -> None:
        """A step ends. tokens: real ones, no padding; padded_tokens: all positions computed, padding included;
        model_flops: FLOPs of the step's model, forward and backward (0 where not counted)."""
        assert self._started is not None, "Throughput.stop() without start()"
        time_s = self._clock() - self._started
        self._started = None
        self._steps += 1
        self._time_s += time_s
        self._tokens += tokens
        self._padded_tokens += padded_tokens
        self._flops += model_flops
        self.total_time_s += time_s
        self.total_tokens += tokens
        self.total_samples += samples

    def take(self) -> dict[str, float]:
        """Returns the rates over the steps since the last call, and starts anew; {} where there was no step.

        Keys: step_time_s (mean), tokens_per_second, tokens_per_second_per_device, padding_fraction (of all positions),
        tflops_per_device where FLOPs were counted, mfu (of 1) where the peak is known too.
        """
        if not self._steps:
            return {}
        time_s = max(self._time_s, 1e-9)  # a clock may not have ticked
        rates = {
            "step_time_s": self._time_s / self._steps,
            "tokens_per_second": self._tokens / time_s,
            "tokens_per_second_per_device": self._tokens / time_s / self.world_size,
            "padding_fraction": 1.0 - self._tokens / self._padded_tokens
            if self._padded_tokens
            else 0.0,
        }
        if self._flops:
            flops_per_device = self._flops / time_s / self.world_size
            rates["tflops_per_device"] = flops_per_device / 1e12
            if self.peak_flops:
                rates["mfu"] = flops_per_device / self.peak_flops
        self._reset()
        return rates


def model_flops_per_token(
    *,
    hidden_size: int,
    num_layers: int,
    num_attention_heads: int,
    num_query_groups: int,
    head_dim: int,
    ffn_hidden_size: int,
    vocab_size: int,
    seq_length: float,
    gated_mlp: bool = True,
    attention_weights: float | None = None,
    num_prediction_layers: int = 0,
) -> float:
    """Returns the FLOPs, forward and backward, that a token of a full fine-tune costs a dense model (megatron's count).

    seq_length: sum(L_i^2) / sum(L_i) over the documents i of a batch, which is L where all are L long. A weight costs 2
    FLOPs forward and 4 backward; the causal half of the attention core 6 L heads head_dim; the logits 6 h V; the
    embedding look-up nothing. Recomputation is not counted: it is work that the model does not ask for. attention_weights: of a
    layer, where they do not follow from heads; head_dim is then the mean of a query's and a value's. Layers for multi-token
    prediction are layers with a projection of 2 h and the logits again.
    """
    attention = (
        hidden_size * head_dim * (2 * num_attention_heads + 2 * num_query_groups)
    )  # q and output, k and v
    attention = attention if attention_weights is None else attention_weights
    mlp = hidden_size * ffn_hidden_size * (3 if gated_mlp else 2)
    core = seq_length * num_attention_heads * head_dim
    ahead = num_prediction_layers
    layers = (num_layers + ahead) * (attention + mlp + core) + ahead * 2 * hidden_size**2
    return 6.0 * (layers + (1 + ahead) * hidden_size * vocab_size)


def peak_flops(device_name: str, dtype: str | torch.dtype = torch.bfloat16) -> float | None:
    """Returns the dense peak of a device in FLOP/s by the name that torch.cuda.get_device_name() gives.

    None for a device that is not in the table and for dtypes other than bf16 and fp16: better no mfu than a wrong one.
    """
    if str(dtype).removeprefix("torch.") not in ("bfloat16", "float16", "bf16", "fp16"):
        return None
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    for needed, forbidden, flops in _PEAK_FLOPS:
        if needed <= words and not forbidden & words:
            return flops
    return None


def peak_memory_gib() -> float:
    """Returns the most memory this process has held so far, in GiB: CUDA's allocator, or the resident set on CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
