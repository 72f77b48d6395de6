"""What a run says about itself: start summary, progress, trainer_log.jsonl, trackers, pictures."""

import io
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from .args_rules_schedule import plan_schedule
from .constants import LOSS_PLOT_NAME, PAGE_NAME, RUN_SUMMARY_NAME, TRAINER_LOG_NAME
from .files import describe_error, write_file, write_json
from .log_html import page
from .log_read import RunFolder, format_duration, format_rate, read_log, smooth
from .trainer_callbacks import TrainerCallback

# Pictures are drawn again after so many seconds, and so rarely that they take 1/50 of the time
_DRAW_EVERY_S, _DRAW_SHARE = 30.0, 50

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


def format_summary(sections: Mapping[str, Mapping]) -> str:
    """Returns the start summary as text: a line for each section's name, below it its values in one
    column.

    Numbers get thousand separators, lists are joined by commas, and a value of None leaves its line
    out.
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


def plot_loss(records: Iterable[Mapping], path: str) -> None:
    """Writes a picture of loss, smoothed loss and eval_loss over the steps of `records` to `path`,
    in one step; needs matplotlib."""
    # Figure and Agg directly: pyplot would choose a backend for the whole process and keep every
    # figure alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(records)
    trained = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    evaluated = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
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
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    write_file(path, picture.getvalue())


class Report(TrainerCallback):
    """Prints progress and writes the log; every rank constructs one, only the rank with `is_main`
    prints and writes.

    report_to: names out of tensorboard and wandb (or "none"). disable_tqdm: None shows a bar where
    stderr is a terminal and plain lines elsewhere; True always plain lines, False always the bar.
    `config` is what W&B stores about the run. Raises ValueError, on every rank alike, for an
    unknown name or one whose package is not installed.
    """

    def __init__(
        self,
        *,
        is_main: bool,
        output_dir: str,
        report_to: Iterable[str] = (),
        plot_loss: bool = False,
        html_report: bool = True,
        run_name: str | None = None,
        disable_tqdm: bool | None = None,
        config: Mapping | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.is_main = is_main
        self.output_dir = output_dir
        named = [report_to] if isinstance(report_to, str) else report_to
        self.trackers = [name for name in named if name != "none"]
        self.page_path = None
        if html_report:
            self.page_path = os.path.join(output_dir, PAGE_NAME)
        self.plots = plot_loss
        self.run_name = run_name
        self.config = dict(config or {})
        self.uses_bar = sys.stderr.isatty() if disable_tqdm is None else not disable_tqdm
        self._clock = clock
        self._file = self._bar = self._tensorboard = self._wandb = None
        self._max_steps = self.first_step = 0
        self._started = self._draw_at = clock()
        self._facts: dict = {}  # run_summary.json
        self._folder: RunFolder | None = None

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
        """Prints the start summary, see `format_summary`; run_summary.json will hold it."""
        self._facts["sections"] = sections
        self.print(format_summary(sections))

    def on_train_begin(self, args, state, control, **kwargs):
        self._max_steps = state.max_steps
        self.first_step = state.global_step
        self._started = self._clock()
        if not self.is_main:
            return
        self._close()
        os.makedirs(self.output_dir, exist_ok=True)
        self._open_log(state.global_step)
        self._facts |= {"max_steps": state.max_steps, "first_step": state.global_step}
        self._facts |= {"started": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        self._write_facts("running")
        self._draw_at = self._started + _DRAW_EVERY_S
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
        """Opens the log for appending, with the lines up to `resumed_step` in it: a new run (step
        0) starts empty."""
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
        self._file = open(self.log_path, "a", encoding="utf-8")  # until on_train_end

    def on_step_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args, state, control, logs, **kwargs):
        self.log(logs)

    def log(self, logs: Mapping) -> None:
        """Writes one record: a line of trainer_log.jsonl (unrounded), of the trackers and of the
        progress.

        `logs` must hold "step"; numbers may be Python's, numpy's or tensors of one element. Nothing
        is added to them.
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
        if self._file is not None and self._clock() >= self._draw_at:
            self._draw()

    def _show(self, logs: Mapping) -> None:
        if self._bar is not None and "loss" in logs:
            self._bar.set_postfix_str(format_progress(logs, self._max_steps).split("  ", 1)[1])
            return
        done, left = logs["step"] - self.first_step, self._max_steps - logs["step"]
        eta_s = None
        if done > 0 and left > 0 and "loss" in logs:
            eta_s = (self._clock() - self._started) / done * left
        self.print(format_progress(logs, self._max_steps, eta_s))

    def on_train_end(self, args, state, control, **kwargs):
        self.end("finished")

    def end(self, state: str) -> None:
        """Writes how the run ended, draws its pictures and closes the log and the trackers."""
        if not self.is_main:
            return
        self._write_facts(state)
        self._draw()
        self._close()

    def _write_facts(self, state: str) -> None:
        self._facts["state"] = state
        write_json(os.path.join(self.output_dir, RUN_SUMMARY_NAME), self._facts, default=str)

    def _draw(self) -> None:
        """Draws training_loss.png and report.html. A run does not end of it that this fails."""
        began = self._clock()
        try:
            if self._folder is None:
                self._folder = RunFolder(self.output_dir)
            run = self._folder.read()
            if self.plots:
                plot_loss(run.records, os.path.join(self.output_dir, LOSS_PLOT_NAME))
            if self.page_path is not None:
                write_file(self.page_path, page([run]))
        except Exception as error:  # whatever a full disk or a font leads to
            self.print(f"note: no more pictures of this run: {describe_error(error)}")
            self.plots, self.page_path = False, None
        now = self._clock()
        self._draw_at = now + max(_DRAW_EVERY_S, _DRAW_SHARE * (now - began))

    def _close(self) -> None:
        for opened in (self._file, self._bar, self._tensorboard):
            if opened is not None:
                opened.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._file = self._bar = self._tensorboard = self._wandb = None


def report_of(args) -> Report:
    """The Report that TrainingArguments ask for."""
    from . import parallel

    return Report(
        is_main=parallel.is_main(),
        output_dir=args.output_dir,
        report_to=args.report_to,
        plot_loss=args.plot_loss,
        html_report=args.html_report,
        run_name=args.run_name,
        disable_tqdm=args.disable_tqdm,
        config=args.to_dict(),
    )


def _epochs(trainer, plan, unit: str) -> str:
    if not hasattr(trainer.train_dataset, "__len__"):
        return "of a stream, which has no epochs"
    return f"({plan.steps_per_epoch} an epoch of {plan.num_samples} {unit})"


def run_summary(trainer, plan) -> dict[str, dict]:
    """Sections of the start summary: model, layout, batch, steps, dataset, and what was chosen by
    itself."""
    # here: they bring torch and megatron, which a refused key need not wait for
    from . import model_te, parallel

    args = trainer.args
    config = getattr(trainer.model, "config", None)
    total, trained = trainer.backend.num_parameters()
    precision = str(trainer.backend.dtype).removeprefix("torch.")
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(precision, "fp32")
    if args.fp8:
        precision += f", products in fp8 ({args.fp8}, {args.fp8_recipe})"
    backend = "plain torch DDP"
    if trainer.backend.name == "megatron":
        backend = f"megatron-core, {config.transformer_impl} layers"
    degrees = [
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    ]
    degrees.append(trainer.backend.dp_size)
    shared = [
        text
        for text, on in (
            ("sequence parallel", args.sequence_parallel),
            ("packed rows", args.sequence_packing),
        )
        if on
    ]
    sections = {
        "model": {
            "name": getattr(config, "name_or_path", None) or getattr(config, "_name_or_path", None),
            "type": getattr(config, "hf_model_type", None) or getattr(config, "model_type", None),
            "parameters on this rank": f"{total:,} ({trained:,} trained)",
            "weights": getattr(trainer.model, "weights_from", None) or "as given",
            "precision": precision,
        },
        "layout": {
            "backend": backend,
            "world": f"{args.world_size} ranks on {parallel.device().type}",
            "found": model_te.found_here(),
            "tensor x pipeline x context x data": " x ".join(map(str, degrees)),
            **_experts(config, args),
            **balance_summary(trainer.backend, args),
            "activations": ", ".join(shared) or "whole on every rank",
            **_connections(args, parallel.device().type),
        },
        "steps": _steps(trainer, plan),
    }
    if args.notes:
        sections["chosen"] = {str(i + 1): note for i, note in enumerate(args.notes)}
    return {**sections, **trainer.extra_summary}


def _steps(trainer, plan) -> dict[str, str | int]:
    args, state = trainer.args, trainer.state
    unit = getattr(trainer.train_dataset, "unit", "samples")
    warmup = plan_schedule(args, state.max_steps).warmup
    return {
        "global batch": f"{plan.global_batch_size} {unit} = micro-batch {plan.micro_batch_size} x "
        f"accumulation {args.gradient_accumulation_steps} x data parallel {plan.dp_size}",
        "steps": f"{state.max_steps} {_epochs(trainer, plan, unit)}",
        "learning rate": f"{args.learning_rate:g}, {args.lr_scheduler_type}, {warmup} steps of "
        "warm-up",
        "from step": state.global_step,
    }


def _connections(args, device: str) -> dict[str, str]:
    """What megatron-core recommends for tensor parallelism on a GPU, where it is not so."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device == "cpu" or args.tensor_model_parallel_size == 1 or os.environ.get(name) == "1":
        return {}
    return {name: "not 1: exported so, messages begin before the products that hide them"}


def _experts(config, args) -> dict[str, str]:
    """How experts are spread, for a model that has them on megatron-core."""
    if not getattr(config, "num_moe_experts", None) or not hasattr(
        config, "expert_tensor_parallel_size"
    ):
        return {}
    ep, etp = args.expert_model_parallel_size, config.expert_tensor_parallel_size
    experts = config.num_moe_experts
    return {"expert x expert tensor": f"{ep} x {etp} ({experts // ep} of {experts} experts a rank)"}


def balance_summary(backend, args) -> dict[str, str]:
    """Which load-balancing loss routers have, and who asked for it."""
    if backend.statistics_of_routers is None:
        return {}
    losses, origin = backend.losses_of_routers, "moe_aux_loss_coeff"
    if args.moe_aux_loss_coeff is None:
        origin = "the model's router_aux_loss_coef; moe_aux_loss_coeff: 0 switches it off"
    if losses.kind == "none":
        return {"load-balancing loss": "none"}
    return {"load-balancing loss": f"{losses.kind} x {losses.balance:g} ({origin})"}
