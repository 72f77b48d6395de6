"""Checkpoints: checkpoint-<step>/ is complete or absent, and loads in any layout.

    trainer_state.json      the loop's state, by Hugging Face's names
    training.json           schedule, loss scale, data, layout
    rng-<rank>.pt           random states, read with weights_only
    mca_config.json, dist/  megatron backend: the model's config, megatron's distributed checkpoint
    model.safetensors, optimizer.safetensors   torch backend
    hf/                     with save_hf_checkpoints: the model in Hugging Face's format
    manifest.json           sizes and checksums of all others, written last

Saving has three parts: begin copies the state of this step, with all ranks; writing talks to no
other rank and may run in a thread (async_save); finish names the folder. An error on any rank ends
them on all.
"""

import io
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from . import ckpt_folder, lora, parallel, watchdog
from .args import FIELDS
from .args_values import default_of, read_config_file
from .callbacks import TrainerState, ranking_of, restore_states
from .ckpt_folder import CheckpointError
from .data_stream import TokenStream
from .files import (
    MCA_CONFIG_NAME,
    RUN_CONFIG_NAME,
    TRAINER_STATE_NAME,
    describe_error,
    read_json,
    write_file,
)
from .mcore import get_cuda_rng_tracker
from .model_config import McaModelConfig, load_decision
from .optim import load_scaler_states, scaler_states
from .weights_files import named_tensors, open_safetensors

# -- checkpoints of the torch backend


class TorchSnapshot:
    """Float32 weights and optimizer state by parameter name, for the main rank to write."""

    def __init__(self, model, optimizer=None, copy: bool = False):
        self._files: dict[str, dict[str, torch.Tensor]] = {}
        if not parallel.is_main():
            return
        names = {p: name for name, p in _changing(model)}
        self._files["model.safetensors"] = {name: p.detach() for p, name in names.items()}
        if optimizer is not None:
            self._files["optimizer.safetensors"] = {
                f"{key}.{names[p]}": torch.as_tensor(value).detach()
                for p, state in optimizer.state.items()
                for key, value in state.items()
                if isinstance(value, (torch.Tensor, int, float))
            }
        if copy:
            self._files = {
                f: {k: v.to("cpu", copy=True) for k, v in d.items()} for f, d in self._files.items()
            }

    def write(self, folder: Path) -> tuple[list[str], None]:
        """Write this rank's files, unflushed -> (files, None). No collectives."""
        for name, tensors in self._files.items():
            save_file({key: value.cpu() for key, value in tensors.items()}, folder / name)
        names = list(self._files)
        self._files = {}
        return names, None

    def finish(self, folder: Path, results: list) -> list[str]:
        """Nothing is left to write."""
        return []


def _changing(model) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the parameters in training, and of the buffers if all are trained."""
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    return [(name, t) for name, t in named_tensors(model) if is_whole or t.requires_grad]


def load_torch(folder: Path, model, optimizer=None) -> None:
    """Read the files of TorchSnapshot into a model. CheckpointError for other names or shapes."""
    read, _ = _reader(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in _changing(model):
            tensor.copy_(read(name, tensor.shape))
    if optimizer is None:
        return
    read, names = _reader(folder / "optimizer.safetensors")
    keys = sorted({key.partition(".")[0] for key in names})
    of_one_kernel = [g for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    counted_there = {p for group in of_one_kernel for p in group["params"]}
    for name, parameter in model.named_parameters():
        # the counter too: the fused AdamW keeps it beside the parameter
        kept = {}
        if any(f"{key}.{name}" in names for key in keys):
            shapes = parameter.shape, torch.Size()
            kept = {key: read(f"{key}.{name}", *shapes) for key in keys}
        for key, value in kept.items():  # other kernels want their counters on the CPU
            if value.dim() or parameter in counted_there:
                kept[key] = value.to(parameter.device)
        optimizer.state[parameter] = kept


def _reader(path: Path) -> tuple[Callable[..., torch.Tensor], set[str]]:
    """(a function that reads a tensor by name and possible shapes, the names) of a file."""
    file = open_safetensors(path)
    names = set(file.keys())

    def read(name: str, *shapes: torch.Size) -> torch.Tensor:
        if name in names and torch.Size(file.get_slice(name).get_shape()) in shapes:
            return file.get_tensor(name)
        raise CheckpointError(
            f"{path}: expected {name} of shape {tuple(shapes[0])}: use another checkpoint"
        )

    return read, names


# -- save and resume

TRAINING_NAME = "training.json"
HF_FOLDER = "hf"
_OF_A_START = {"resume_from_checkpoint", "overwrite_output_dir", "output_dir"}  # settings


class Checkpoints:
    """The checkpoints of one trainer, written one at a time. Its methods are collective."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.written_step: int | None = None  # of the last checkpoint begun
        # the newest one, while no step was made from its weights: older ones stay
        self.unproven: Path | None = None
        self._job: _Job | None = None
        self._base: dict | None = None  # of adapters: a sample of the frozen model

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is begun and not named yet."""
        return self._job is not None

    @property
    def is_writing(self) -> bool:
        """True while this rank's thread writes."""
        return self._job is not None and self._job.thread.is_alive()

    def begin(self) -> None:
        """Copy the state of this step and write it; with async_save writing goes on after the
        return.

        CheckpointError, on every rank, if the folder cannot be made.
        """
        trainer = self.trainer
        args = self.trainer.args
        step = self.written_step = trainer.state.global_step
        final = ckpt_folder.checkpoint_folder(args.output_dir, step)
        temporary = ckpt_folder.temporary_folder(final)
        parallel.on_main(lambda: _make_empty(temporary), CheckpointError)
        trainer.backend.finish_param_sync()
        if self._base is None:  # frozen: once is enough
            self._base = lora.base_sample(trainer.model)
        files: dict[str, str | bytes] = {f"rng-{parallel.rank()}.pt": _random_states()}
        if parallel.is_main():
            files[TRAINER_STATE_NAME] = _state_to_store(trainer.state, final)
            files[TRAINING_NAME] = _json({**self._training_record(), "base": self._base})
        with_optimizer = not args.save_only_model
        backend = trainer.backend
        facts = _facts(backend.name, backend.hf_config, step, with_optimizer)
        snapshot = backend.snapshot(with_optimizer, copy=args.async_save)
        exported = []
        if args.save_hf_checkpoints:
            names = backend.export_hf(temporary / HF_FOLDER, args.max_shard_size)
            exported = [f"{HF_FOLDER}/{name}" for name in names]
        exported += backend.export_adapters(temporary)
        self._job = _Job(final, temporary, snapshot, facts, files, exported)
        if args.async_save:
            self._job.thread.start()
        else:
            self._job.write()

    def finish(self) -> None:
        """Wait for all ranks to have written a pending checkpoint, and name its folder.

        Older ones are pruned for it after the next good step: its weights may be finite, and lost.
        CheckpointError, on every rank, for a part that could not be written; earlier checkpoints
        are untouched.
        """
        job = self._job
        if job is None:
            return
        watchdog.note(watchdog.SAVING)
        self._job = None
        if job.thread.is_alive():
            job.thread.join()
        try:
            job.complete()
        except CheckpointError as error:
            parallel.on_main(lambda: shutil.rmtree(job.temporary, ignore_errors=True))
            raise CheckpointError(f"{error}; earlier checkpoints are untouched") from None
        self.trainer.notify("on_save", path=str(job.final), step=job.facts["step"])
        self.unproven = job.final
        if not self.trainer.guard.is_on:
            self.prune()

    def prune(self) -> None:
        """Delete the oldest checkpoints beyond save_total_limit, once a step from the weights of
        the newest was good."""
        folder = self.unproven
        if folder is None:
            return
        self.unproven = None
        best = self.trainer.state.best_model_checkpoint
        limit = self.trainer.args.save_total_limit
        parallel.on_main(lambda: ckpt_folder.prune(folder, best, limit), CheckpointError)

    def resume(self, choice: str | bool | None) -> None:
        """Load the state of a checkpoint, if there is one; choice: see ckpt_folder.find.
        Collective; CheckpointError for one that cannot be resumed from."""
        trainer = self.trainer
        backend = trainer.backend
        say = trainer.report.print
        model = ckpt_folder.model_identity(backend.hf_config)
        folder = ckpt_folder.find(trainer.args, choice, backend.name, model, say)
        if folder is not None:
            self._load(folder)
            restore_states(trainer.callbacks, trainer.state.stateful_callbacks)

    def _load(self, folder: Path) -> None:
        """Load the state of a verified checkpoint. Collective.

        CheckpointError for a checkpoint without optimizer state, and for other data, another global
        batch or another optimizer. Other settings are taken, and a line lists them.
        """
        trainer = self.trainer
        record, state = _read_records(folder)
        if not record["with_optimizer"]:
            raise CheckpointError(
                f"{folder} was saved with save_only_model and cannot be resumed from: start from "
                "its weights"
            )
        now = self._training_record()
        keys = "streaming num_samples global_batch_size data_seed shuffle dataset"
        refuse_changes({"streaming": False, **record}, now, keys, folder)
        before = settings_before(record, folder)
        refuse_other_states(before, trainer.settings, trainer.backend.name, folder)
        trainer.check_objective(record.get("objective") or {}, folder)
        _check_base(record.get("base") or {}, trainer.model, folder)
        trainer.backend.load_state(folder)
        try:
            load_scaler_states(trainer.backend.grad_scalers, record.get("loss_scales", []))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{folder / TRAINING_NAME}: loss_scales are none: use another checkpoint"
            ) from None
        if (folder / MCA_CONFIG_NAME).is_file():
            saved = McaModelConfig.from_json_file(folder / MCA_CONFIG_NAME)
            trainer.report.print(
                f"weights and optimizer state {load_decision(saved, trainer.model.config)}"
            )
        state.max_steps = trainer.state.max_steps
        state.num_train_epochs = trainer.state.num_train_epochs
        trainer.state = state
        best = folder.parent / Path(state.best_model_checkpoint or ".").name
        if state.best_model_checkpoint is not None and best.is_dir():
            state.best_model_checkpoint = str(best)  # the run's folder may have been moved since
        self._forget_other_best(before)
        # last: it writes rate and decay into the optimizer's groups, by the schedule of this run
        trainer.lr_scheduler.num_steps = 0
        trainer.lr_scheduler.step(record["scheduler_steps"])
        _restore_random_states(folder, record["layout"] == now["layout"])
        parallel.on_main(lambda: self._tidy(folder), CheckpointError)
        if changes := say_changes(before, trainer.settings):
            trainer.report.print(changes)

    def _forget_other_best(self, before: dict) -> None:
        """Forget a best evaluation by another metric than this run's."""
        trainer = self.trainer
        keys = ("metric_for_best_model", "greater_is_better")
        state = trainer.state
        was, now = (ranking_of(*map(of.get, keys)) for of in (before, trainer.settings))
        if state.best_metric is not None and before and was != now:
            trainer.report.print(
                f"note: the best evaluation so far, of step {state.best_global_step}, is "
                f"forgotten: {' and '.join(keys)} decide in another way from here on"
            )
            state.forget_best()

    def _tidy(self, folder: Path) -> None:
        """Set newer checkpoints aside and prune old ones."""
        args = self.trainer.args
        state = self.trainer.state
        ckpt_folder.set_newer_aside(args.output_dir, state.global_step, self.trainer.report.print)
        if folder.parent.resolve() == Path(args.output_dir).resolve():
            ckpt_folder.prune(folder, state.best_model_checkpoint, args.save_total_limit)

    def _training_record(self) -> dict:
        trainer = self.trainer
        args = trainer.args
        plan = trainer.batch_plan
        streams = isinstance(trainer.train_dataset, TokenStream)
        layout = [args.tensor_model_parallel_size, args.pipeline_model_parallel_size]
        layout += [args.virtual_pipeline_model_parallel_size, args.context_parallel_size]
        layout += [args.world_size]
        return {
            "with_optimizer": not args.save_only_model,
            "scheduler_steps": trainer.lr_scheduler.num_steps,
            "loss_scales": scaler_states(trainer.backend.grad_scalers),
            "streaming": streams,
            "num_samples": 0 if streams else plan.num_samples,
            "global_batch_size": plan.global_batch_size,
            "data_seed": plan.seed,
            "shuffle": plan.shuffle,
            # other people's datasets have none
            "dataset": getattr(trainer.train_dataset, "identity", None),
            "layout": layout,
            "objective": trainer.objective_facts(),
            "settings": trainer.settings,
        }


class _Job:
    """One checkpoint on its way: this rank's files, and the result of writing them."""

    def __init__(
        self, final: Path, temporary: Path, snapshot, facts: dict, files=None, exported=()
    ):
        """files: name -> content; exported: names of files written already."""
        self.final = final
        self.temporary = temporary
        self.snapshot = snapshot
        self.facts = facts
        self.files = files or {}
        self.exported = exported
        self.thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)
        self.error: str | None = None
        self.results = None  # of the snapshot
        self.entries: dict[str, dict] = {}  # in the manifest

    def write(self) -> None:
        try:
            for name, data in self.files.items():
                write_file(self.temporary / name, data)
            names, self.results = self.snapshot.write(self.temporary)
            names += self.exported
            # the disk and the checksums are busy at the same time
            with ThreadPoolExecutor(1) as flusher:
                paths = [self.temporary / name for name in names]
                flushed = [flusher.submit(ckpt_folder.sync, path) for path in paths]
                for name in [*self.files, *names]:
                    self.entries[name] = ckpt_folder.measure(self.temporary / name)
                for answer in flushed:
                    answer.result()
        except Exception as error:  # complete() tells all ranks
            self.error = describe_error(error)

    def complete(self) -> None:
        """Write the index and the manifest and name the folder, after every rank has written.
        Collective.

        CheckpointError on every rank, with the problems of any.
        """
        answers = parallel.gather((self.error, self.entries, self.results))
        errors = [f"rank {rank}: {error}" for rank, (error, _, _) in enumerate(answers) if error]
        if errors:
            raise CheckpointError(f"{self.final} could not be written: {'; '.join(errors)}")

        def finish() -> None:
            folder = self.temporary
            files = {}
            for _, entries, _ in answers:
                files |= entries
            for name in self.snapshot.finish(folder, [results for _, _, results in answers]):
                files[name] = ckpt_folder.measure(folder / name)
            ckpt_folder.write_manifest(folder, self.facts, files)
            if folder != self.final:
                ckpt_folder.publish(folder, self.final)

        try:
            parallel.on_main(finish, CheckpointError)
        except CheckpointError as error:
            raise CheckpointError(f"{self.final} could not be finished: {error}") from None


def _make_empty(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error}") from error


def _facts(backend: str, hf_config: dict, step: int = 0, with_optimizer: bool = False) -> dict:
    model = ckpt_folder.model_identity(hf_config)
    return dict(backend=backend, step=step, with_optimizer=with_optimizer, model=model)


def _state_to_store(state: TrainerState, final: Path) -> str:
    """The state as of the finished checkpoint: this one is the best, if the step evaluated best."""
    best = state.best_model_checkpoint
    if state.best_global_step == state.global_step:
        best = str(final)
    return _json(asdict(state) | {"best_model_checkpoint": best})


def _json(record: dict) -> str:
    return json.dumps(record, indent=2) + "\n"


_KINDS = {  # of the fields of training.json
    "with_optimizer": bool,
    "scheduler_steps": int,
    "num_samples": int,
    "global_batch_size": int,
    "layout": list,
}


def _read_records(folder: Path) -> tuple[dict, TrainerState]:
    """(training.json, trainer_state.json) of a checkpoint. CheckpointError, on every rank, for
    other content than is written there."""
    path = folder / TRAINING_NAME
    try:
        record = read_json(path)
        state = TrainerState.load(folder / TRAINER_STATE_NAME)
        for key, kind in _KINDS.items():
            if type(record.get(key)) is not kind:
                raise ValueError(f"{path}: expected {key}, of type {kind.__name__}")
        step = ckpt_folder.read_manifest(folder)["step"]
        if state.global_step != step or not 0 <= record["scheduler_steps"] <= step:
            raise ValueError(f"{path}, {TRAINER_STATE_NAME}: expected the counts of step {step}")
        for key in ("data_seed", "shuffle", "dataset"):
            if key not in record:
                raise ValueError(f"{path}: expected {key}")
        for key in ("objective", "base", "settings"):
            if not isinstance(record.get(key) or {}, dict):
                raise ValueError(f"{path}: {key} is no object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{error}: use another checkpoint") from None
    return record, state


def _check_base(theirs: dict, model, folder: Path) -> None:
    """CheckpointError if adapters belong to other frozen weights. Collective."""

    def check() -> None:
        base = lora.base_sample(model)
        if any(base[name] != theirs[name] for name in base.keys() & theirs.keys()):
            raise CheckpointError(
                f"{folder} holds adapters that were trained on another base model, of the same "
                "shape: set model_name_or_path "
                "to the one that the run started from, or start anew from these by "
                "adapter_name_or_path"
            )

    parallel.on_main(check, CheckpointError)


def load_model(folder: str | os.PathLike, backend) -> None:
    """Load the weights alone, verified first. Collective. CheckpointError for an unreadable
    checkpoint."""
    model = ckpt_folder.model_identity(backend.hf_config)
    bad = ckpt_folder.inspect(Path(folder), backend.name, model)
    if bad:
        raise CheckpointError(bad)
    backend.load_state(Path(folder), with_optimizer=False)


def save_model(folder: str | os.PathLike, backend) -> None:
    """The weights alone, in the format of checkpoints, with a manifest. Collective."""
    folder = Path(folder)
    parallel.on_main(lambda: folder.mkdir(parents=True, exist_ok=True), CheckpointError)
    backend.finish_param_sync()
    snapshot = backend.snapshot(with_optimizer=False, copy=False)
    write_weights(folder, snapshot, backend.name, backend.hf_config)


def write_weights(folder: Path, snapshot, backend: str, hf_config: dict) -> None:
    """Write a snapshot and its manifest into a folder. backend: name of the writer. Collective;
    CheckpointError on every rank if any fails."""
    job = _Job(folder, folder, snapshot, _facts(backend, hf_config))
    job.write()
    job.complete()


# -- settings that may change when a run is resumed


def settings_of(args) -> dict[str, Any]:
    """The TrainingArguments of a trainer made without a file, by their keys."""
    settings = args.to_dict()
    if args.global_batch_size is not None:
        del settings["gradient_accumulation_steps"]  # it follows from the world
    return json.loads(json.dumps(settings, default=str))  # additional_configs may have objects


def settings_before(record: dict, folder: Path) -> dict[str, Any]:
    """The settings of the run of a checkpoint, {} if unknown. record: its training.json; older ones
    have none, and the run's config.yaml is beside the checkpoint."""
    config = folder.parent / RUN_CONFIG_NAME
    if "settings" in record or not config.is_file():
        return record.get("settings") or {}
    return read_config_file(config)


def refuse_changes(before: dict, now: dict, keys: str, folder: Path) -> None:
    """CheckpointError if one of the keys (by spaces) has another value than before. Keys without an
    earlier value pass."""
    for key in keys.split():
        if key in before and _shown(before[key]) != _shown(now.get(key)):
            raise CheckpointError(
                f"{folder} was saved with {key} {before[key]}, and this run has {now.get(key)}: "
                "set it back to go on"
            )


def refuse_other_states(before: dict, now: dict, backend: str, folder: Path) -> None:
    """CheckpointError for settings of an optimizer with other states than the stored ones. before,
    now: settings. backend: megatron or torch."""
    keys = "optim"
    if backend == "torch":
        keys += " exp_avg_dtype exp_avg_sq_dtype"  # of tensors loaded without a cast
    elif before.get("finetuning_type") != "lora":  # adapters are float32 in any precision
        if not any(_shown(before.get(key)) == "true" for key in ("bf16", "fp16")):
            keys += " bf16 fp16"  # there are no float32 weights beside the model's
    refuse_changes(before, now, keys, folder)


def say_changes(before: dict, now: dict) -> str:
    """A line about changed settings, "" without any."""
    changed = []
    for key in sorted((before.keys() | now.keys()) - _OF_A_START if before else ()):
        default = default_of(FIELDS[key]) if key in FIELDS else None
        values = [_shown(settings.get(key, default)) for settings in (before, now)]
        if default is not MISSING and values[0] != values[1]:
            changed.append(f"{key} {values[0]} -> {values[1]}")
    if not changed:
        return ""
    return f"note: other values than before, taken from here on: {', '.join(changed)}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- random states


def _random_states() -> bytes:
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
    }
    stream = io.BytesIO()
    torch.save(states, stream)
    return stream.getvalue()


def _restore_random_states(folder: Path, is_same_layout: bool) -> None:
    """Restore this rank's random state if the layout is unchanged. Collective; CheckpointError on
    every rank if the file of any has other content."""
    mine = folder / f"rng-{parallel.rank()}.pt"
    problem = None
    try:
        if is_same_layout and mine.is_file():
            _set_random_states(torch.load(mine, weights_only=True))
    except Exception as error:  # whatever torch and the generators make of other content
        problem = f"{mine} cannot be read ({describe_error(error).splitlines()[0]})"
    for found in filter(None, parallel.gather(problem)):
        raise CheckpointError(f"{found}: use another checkpoint")


def _set_random_states(states: dict) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
