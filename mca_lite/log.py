"""What a run says about itself: start summary, progress, trainer_log.jsonl, trackers, pictures."""

import io
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from . import model_fused
from .args_rules_training import plan_schedule
from .args_values import show_count
from .constants import LOSS_PLOT_NAME, PAGE_NAME, RUN_SUMMARY_NAME, TRAINER_LOG_NAME
from .files import describe_error, write_file, write_json
from .log_html import page
from .log_read import LineFile, RunFolder, format_duration, format_rate, log_line, smooth
from .trainer_callbacks import TrainerCallback

# Pictures are drawn again after so many seconds, and so rarely that they take 1/50 of the time
_DRAW_EVERY_S, _DRAW_SHARE = 30.0, 50

# The progress line shows these keys so, then the tokens per second, and other keys as they are
_FORMS = {
    "epoch": "epoch {:.2f}",
    "loss": "loss {:.4f}",
    "grad_norm": "grad_norm {:.2f}",
    "learning_rate": "lr {:.1e}",
}
# ... but not these, which the log file has
_NOT_IN_LINE = {"step", "consumed_samples", "consumed_tokens", "expert_load", "padding_fraction"}
_NOT_IN_LINE |= {"tokens_per_second", "tokens_per_second_per_device", "tflops_per_device"}
_NOT_IN_LINE |= {"step_time_s", "peak_memory_gib", *_FORMS}


def format_summary(sections: Mapping[str, Mapping]) -> str:
    """The start summary as text: a line for each section's name, below it its values in one column.

    Numbers get thousand separators, lists are joined by commas, and a value of None leaves its line
    out.
    """
    known = {}
    for name, values in sections.items():
        known[name] = {key: value for key, value in values.items() if value is not None}
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
    parts += [form.format(logs[key]) for key, form in _FORMS.items() if logs.get(key) is not None]
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
    """Prints progress and writes the log, as TrainingArguments say; every rank constructs one, only
    the rank with `is_main` prints and writes.

    With disable_tqdm None a bar is shown where stderr is a terminal, and plain lines elsewhere.
    """

    def __init__(self, args, is_main: bool, clock: Callable[[], float] = time.perf_counter):
        self.args, self.is_main, self._clock = args, is_main, clock
        self.log_path = os.path.join(args.output_dir, TRAINER_LOG_NAME)
        self.page_path = os.path.join(args.output_dir, PAGE_NAME) if args.html_report else None
        self.plots, self.uses_bar = args.plot_loss, not args.disable_tqdm
        if args.disable_tqdm is None:
            self.uses_bar = sys.stderr.isatty()
        self._file = self._bar = self._tensorboard = self._wandb = None
        self._max_steps = self.first_step = 0
        self._started = self._draw_at = clock()
        self._facts: dict = {}  # run_summary.json
        self._folder: RunFolder | None = None

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
        os.makedirs(self.args.output_dir, exist_ok=True)
        self._open_log(state.global_step)
        self._facts |= {"max_steps": state.max_steps, "first_step": state.global_step}
        self._facts |= {"started": time.time(), "host": socket.gethostname(), "pid": os.getpid()}
        self._write_facts("running")
        self._draw_at = self._started + _DRAW_EVERY_S
        if self.uses_bar:
            from tqdm import tqdm

            done, steps = state.global_step, state.max_steps
            self._bar = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)
        if "tensorboard" in self.args.report_to:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what a crashed run wrote past the step that this one resumes from.
            purge_step = state.global_step + 1 if state.global_step else None
            folder = os.path.join(self.args.output_dir, "runs")
            self._tensorboard = SummaryWriter(folder, purge_step=purge_step)
        if "wandb" in self.args.report_to:
            import wandb

            project = os.environ.get("WANDB_PROJECT", "mca_lite")
            about = dict(name=self.args.run_name, config=self.args.to_dict())
            self._wandb = wandb.init(project=project, dir=self.args.output_dir, **about)

    def _open_log(self, resumed_step: int) -> None:
        """Opens the log for appending, with the lines up to `resumed_step` in it: a new run (step
        0) starts empty."""
        kept = []
        if resumed_step:
            lines = LineFile(self.log_path).read()
            kept = [line for line in lines if log_line(line) and line["step"] <= resumed_step]
        write_file(self.log_path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(self.log_path, "a", encoding="utf-8")  # until on_train_end

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.first_step + 1 and model_fused.is_on():
            took = self._clock() - self._started
            self.print(f"the first step took {took:.1f} s: kernels were compiled in it")
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args, state, control, logs, **kwargs):
        self.log(logs)

    def log(self, logs: Mapping) -> None:
        """Writes one record: a line of trainer_log.jsonl (unrounded), of the trackers and of the
        progress. `logs` must hold "step"; numbers may be tensors or numpy's, of one element."""
        if not self.is_main:
            return
        logs = {k: v.item() if hasattr(v, "item") else v for k, v in logs.items()}
        if self._file is not None:
            self._file.write(json.dumps(logs) + "\n")
            self._file.flush()  # whoever follows the file sees each line, and a crash loses none
        numbers = {k: v for k, v in logs.items() if k != "step" and isinstance(v, (int, float))}
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
        write_json(os.path.join(self.args.output_dir, RUN_SUMMARY_NAME), self._facts, default=str)

    def _draw(self) -> None:
        """Draws training_loss.png and report.html. A failure here does not end the run."""
        began = self._clock()
        try:
            if self._folder is None:
                self._folder = RunFolder(self.args.output_dir)
            run = self._folder.read()
            if self.plots:
                plot_loss(run.records, os.path.join(self.args.output_dir, LOSS_PLOT_NAME))
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


def run_summary(trainer, plan) -> dict[str, dict]:
    """Sections of the start summary: model, layout, batch, steps, dataset, and what was chosen by
    itself."""
    # here: they bring torch and megatron, which a refused key need not wait for
    from . import model_te, parallel

    args, backend = trainer.args, trainer.backend
    config = getattr(trainer.model, "config", None)
    total, trained = backend.num_parameters()
    precision = backend.precision
    if args.fp8:
        precision += f", products in fp8 ({args.fp8}, {args.fp8_recipe})"
    kind = "plain torch DDP"
    if backend.name == "megatron":
        kind = f"megatron-core, {config.transformer_impl} layers"
    degrees = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        backend.dp_size,
    )
    shared = ["sequence parallel"] if args.sequence_parallel else []
    shared += ["packed rows"] if args.sequence_packing else []
    sections = {
        "model": {
            "name": getattr(config, "name_or_path", None) or getattr(config, "_name_or_path", None),
            "type": getattr(config, "hf_model_type", None) or getattr(config, "model_type", None),
            "parameters on this rank": f"{total:,} ({trained:,} trained)",
            "weights": getattr(trainer.model, "weights_from", None) or "as given",
            "precision": precision,
        },
        "layout": {
            "backend": kind,
            "world": f"{show_count(args.world_size, 'rank')} on {parallel.device().type}",
            "found": model_te.found_here(),
            "tensor x pipeline x context x data": " x ".join(map(str, degrees)),
            **_experts(backend),
            **balance_summary(backend, args),
            "activations": ", ".join(shared) or "whole on every rank",
            **_connections(args, parallel.device().type),
        },
        "steps": steps_summary(trainer, plan),
    }
    if args.notes:
        sections["chosen"] = {str(i + 1): note for i, note in enumerate(args.notes)}
    return {**sections, **trainer.extra_summary}


def steps_summary(trainer, plan) -> dict[str, str | int]:
    """What the start summary says of the steps of a trainer, and of its BatchPlan."""
    args, state = trainer.args, trainer.state
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


def _connections(args, device: str) -> dict[str, str]:
    """What megatron-core recommends for tensor parallelism on a GPU, where it is not so."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if device == "cpu" or args.tensor_model_parallel_size == 1 or os.environ.get(name) == "1":
        return {}
    return {name: "not 1: exported so, messages begin before the products that hide them"}


def _experts(backend) -> dict[str, str]:
    """How experts are spread, for a model that has them on megatron-core."""
    if backend.name != "megatron" or not backend.config.num_moe_experts:
        return {}
    config, experts = backend.config, backend.config.num_moe_experts
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
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
