"""Checkpoints: checkpoint-<step>/ is complete or absent, and loads in any parallel layout.

    trainer_state.json      the loop's state, under Hugging Face's names
    training.json           schedule, loss scale, data, layout
    rng-<rank>.pt           random states, read with weights_only
    mca_config.json, dist/  megatron backend: the model's config, megatron's distributed checkpoint
    model.safetensors, optimizer.safetensors   torch backend
    adapter_*               with LoRA: the adapters in PEFT's format
    hf/                     with save_hf_checkpoints: the model in Hugging Face's format, with LoRA
                            the adapters
    manifest.json           size and checksum of every other file, written last

Saving has three parts: begin collects the state of this step, together with all ranks; writing
needs no other rank and may run in a thread (async_save); finish gives the folder its name. An error
on any rank ends saving on all ranks.
"""

import io
import itertools
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from . import ckpt_folder, parallel, parts, watchdog, world
from .args import key_fields
from .args_values import default_of
from .callbacks import TrainerState, ranking_of, restore_states
from .ckpt_folder import CheckpointError, Entries
from .data_batches import Stream
from .files import TRAINER_STATE_NAME, PathLike, read_json, show_size, write_file
from .finetuning import finetuning_of
from .kernels import AdamW
from .mcore import get_cuda_rng_tracker
from .optim import load_scaler_states, scaler_states
from .tables import KEY_GROUPS
from .weights_files import NamedTensors, Shape, named_tensors, slices_of

# -- checkpoints of the torch backend


class TorchSnapshot:
    """The torch backend's weights (with LoRA only the trained ones), and the optimizer's state if
    `optimizer` is given, ready to be written. Only the main rank keeps and writes them, because all
    ranks have the same. copy: function that copies a tensor to host memory, so that later steps do
    not change it; None: Tensor.cpu, which does not copy a CPU tensor."""

    def __init__(
        self, model: Any, optimizer: Any = None, copy: Callable[..., Any] | None = None
    ) -> None:
        copy = copy or torch.Tensor.cpu
        self._files: dict[str, dict[str, torch.Tensor]] = {}
        files = {"model.safetensors": _changing(model)}
        if optimizer is not None:
            files["optimizer.safetensors"] = _states(model, optimizer)
        for file, tensors in files.items():
            if parallel.is_main():
                self._files[file] = {name: copy(x.detach()) for name, x in tensors}
        parallel.wait_for_device()

    @staticmethod
    def sizes(model: Any, optimizer: Any = None) -> list[int]:
        """Bytes of each tensor that this rank would copy: the weights on the main rank, []
        elsewhere. Optimizer states are left out, because a new run has none before its first
        update."""
        return [x.nbytes for _, x in _changing(model)] if parallel.is_main() else []

    def write(self, folder: Path) -> tuple[Entries, None]:
        """Write the files that this rank keeps -> ({file: its entry in the manifest}, None). Not
        collective."""
        names = list(self._files)
        for name in names:
            save_file(self._files.pop(name), folder / name)
        return ckpt_folder.measure_all(folder, names), None

    def finish(self, folder: Path, results: list[Any]) -> list[str]:
        """The names of files that the main rank adds to the checkpoint once all ranks have written
        theirs. This backend has no such files: the list is empty."""
        return []


def _changing(model: Any) -> NamedTensors:
    """(name, tensor) of each weight and buffer that a checkpoint of the torch backend has. With
    adapters (LoRA) it has only the trained weights."""
    is_whole = finetuning_of(model).is_whole
    return ((name, x) for name, x in named_tensors(model) if is_whole or x.requires_grad)


def _states(model: Any, optimizer: Any) -> NamedTensors:
    """Yield ("<state>.<parameter>", tensor), such as "exp_avg.lm_head.weight", for each entry of
    the optimizer's state that is a tensor or a number."""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, (torch.Tensor, int, float)):
                yield f"{key}.{name}", torch.as_tensor(value)


def load_torch(folder: Path, model: Any, optimizer: Any = None) -> None:
    """Load what a TorchSnapshot wrote: the weights into the model and, if `optimizer` is given, the
    optimizer's state, in place. A parameter for which no state was stored gets none. Raises
    CheckpointError for a missing weight, for a tensor of another shape, and mostly for a parameter
    of which only a part of the state was stored."""
    read, _ = _reader(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in _changing(model):
            tensor.copy_(read(name, tensor.shape))
    if optimizer is None:
        return
    read, stored = _reader(folder / "optimizer.safetensors")
    keys = {name.partition(".")[0] for name in stored}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        # the fused AdamW keeps its step on the parameter's device, other kernels keep it on the CPU
        counts_there = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            wanted = {key: f"{key}.{names[parameter]}" for key in keys}
            state = {}
            if stored.isdisjoint(wanted.values()):
                wanted = {}
            if isinstance(optimizer, AdamW):
                own = {"step", *optimizer.dtypes_of(parameter)}
                wanted = {key: name for key, name in wanted.items() if key in own}
            for key, name in wanted.items():
                value = read(name, tuple(parameter.shape), ())
                is_here = value.dim() or counts_there
                state[key] = value.to(parameter.device) if is_here else value
            optimizer.state[parameter] = state  # set only once everything was read


def _reader(path: Path) -> tuple[Callable[..., torch.Tensor], Set[str]]:
    """Open a safetensors file -> (read, names of its tensors). read(name, *shapes) returns a
    tensor, and raises CheckpointError if the tensor is missing or has none of these shapes."""
    slices = slices_of(path)

    def read(name: str, *shapes: Shape) -> torch.Tensor:
        if name in slices and tuple(slices[name].get_shape()) in shapes:
            return slices[name][...]
        raise CheckpointError(
            f"{path}: expected {name} of shape {tuple(shapes[0])}: use another checkpoint"
        )

    return read, slices.keys()


# -- save and resume

TRAINING_NAME = "training.json"
HF_FOLDER = "hf"
# keys that only say how a run starts
_OF_A_START = {"resume_from_checkpoint", "overwrite_output_dir", "output_dir", "model_name_or_path"}
# fields of training.json that decide which data a step has
_OF_THE_DATA = "streaming num_samples global_batch_size data_seed shuffle dataset".split()


class Checkpoints:
    """Writes and loads the checkpoints of one trainer, one at a time. All ranks must call its
    methods."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.written_step: int | None = None  # the step of the last checkpoint begun
        # the newest checkpoint, until a step made from its weights was good; older ones are kept
        # until then
        self.unproven: Path | None = None
        self._job: _Job | None = None
        self._buffers = parallel.HostBuffers()  # for copies that are written while training goes on
        self._remover = ThreadPoolExecutor(1)
        self._removing: list[Future[None]] = []  # deletions under way, on the main rank

    @property
    def is_busy(self) -> bool:
        """True from begin() until finish(), which gives the checkpoint's folder its name."""
        return self._job is not None

    @property
    def is_writing(self) -> bool:
        """True while this rank's thread writes a checkpoint (async_save)."""
        return self._job is not None and self._job.thread.is_alive()

    def prepare(self) -> None:
        """Start to reserve host memory for the copies that are written while training goes on. This
        is for async_save; without it, or with save_strategy "no", nothing is done. Prints a note if
        the copies need more memory than the host has free."""
        args = self.trainer.args
        if not args.async_save or args.save_strategy == "no":
            return
        backend = self.trainer.backend
        sizes = backend.snapshot_of.sizes(backend.model, self._optimizer)
        here = world.current()
        needed = sum(map(parallel.HostBuffers.taken, sizes)) * here.local_size
        free = psutil.virtual_memory().available
        if needed > free and here.local_rank == 0:
            print(
                f"note: async_save copies checkpoints into {show_size(needed)} of host memory, and "
                f"{show_size(free)} are free: the system ends runs that take more than it has; "
                "async_save: false needs no copies",
                flush=True,
            )
        self._buffers.reserve(sizes)

    @property
    def _optimizer(self) -> Any:
        """The optimizer whose state is saved; None with save_only_model."""
        return None if self.trainer.args.save_only_model else self.trainer.backend.optimizer

    def begin(self) -> None:
        """Write the state of this step to a temporary folder. With async_save the state is copied,
        and a thread goes on writing after the return.

        Raises CheckpointError, on every rank, if the folder cannot be made. Adapters and hf/ (the
        model in Hugging Face's format) are written before the return, and their errors are raised
        here. Errors in writing the state are raised by finish()."""
        trainer = self.trainer
        args = self.trainer.args
        step = self.written_step = trainer.state.global_step
        final = ckpt_folder.checkpoint_folder(args.output_dir, step)
        temporary = final.with_name(f".{final.name}.tmp")
        parallel.on_main(lambda: make_empty(temporary), CheckpointError)
        trainer.backend.finish_param_sync()
        files: dict[str, str | bytes] = {f"rng-{parallel.rank()}.pt": random_states()}
        if parallel.is_main():
            files[TRAINER_STATE_NAME] = _state_to_store(trainer.state, final)
            files[TRAINING_NAME] = _json(self._training_record())
        backend = trainer.backend
        facts = _facts(backend.name, backend.hf_config, step, not args.save_only_model)
        copy = None
        if args.async_save:
            self._buffers.reuse()
            copy = self._buffers.copy
        snapshot = backend.snapshot_of(backend.model, self._optimizer, copy)
        exported = list(backend.export_adapters(temporary))
        if args.save_hf_checkpoints:
            folder = temporary / HF_FOLDER
            backend.export_hf(folder, args.max_shard_size)
            trainer.save_tokenizer(folder)
            if parallel.is_main():
                files_there = filter(Path.is_file, folder.rglob("*"))
                exported += [f"{HF_FOLDER}/{file.relative_to(folder)}" for file in files_there]
        self._job = _Job(final, temporary, snapshot, facts, files, exported)
        if args.async_save:
            self._job.thread.start()
        else:
            with trainer.phases.of["save"]:
                self._job.write()

    def finish(self) -> None:
        """Wait until all ranks have written the checkpoint that begin() began, and give its folder
        its name. Does nothing if no checkpoint was begun.

        Older checkpoints are deleted by prune(), which is mostly called after the next good step or
        at the end of the run: the new weights are finite, but may have diverged. Without
        check_for_nan_in_loss_and_grad finish() calls it at once. Raises CheckpointError, on every
        rank, if a part of the checkpoint could not be written; earlier checkpoints are untouched
        then."""
        job = self._job
        if job is None:
            return
        watchdog.note(watchdog.SAVING)
        self._job = None
        if job.thread.is_alive():
            job.thread.join()
        try:
            job.complete()
        except CheckpointError:
            parallel.on_main(lambda: shutil.rmtree(job.temporary, ignore_errors=True))
            raise
        self.trainer.notify("on_save", path=str(job.final), step=job.facts["step"])
        self.unproven = job.final
        if not self.trainer.guard.is_on:
            self.prune()

    def prune(self) -> None:
        """Delete the oldest checkpoints over save_total_limit, but neither the newest nor the best
        one. Call it after a good step, which shows that the newest one's weights are good. If there
        is no new checkpoint since the last call, nothing is deleted.

        Raises CheckpointError, on every rank, if deleting fails; with async_save, which deletes in
        a thread, a later call may raise it. Collective."""
        folder = self.unproven
        if folder is None:
            return
        self.unproven = None
        best = self.trainer.state.best_model_checkpoint
        args = self.trainer.args

        def prune() -> None:
            self._end_removals()
            gone = ckpt_folder.set_spare_aside(folder, best, args.save_total_limit)
            self._removing = [self._remover.submit(shutil.rmtree, path) for path in gone]
            if not args.async_save:
                self._end_removals()

        parallel.on_main(prune, CheckpointError)

    def _end_removals(self) -> None:
        """Wait until the main rank's thread has deleted older checkpoints. Raises the error of a
        deletion that failed."""
        for removal in self._removing:
            removal.result()
        self._removing = []

    def end(self) -> None:
        """Wait until older checkpoints are deleted. Raises CheckpointError, on every rank, if one
        cannot be deleted. Collective."""
        parallel.on_main(self._end_removals, CheckpointError)

    def resume(self, choice: str | bool | None) -> None:
        """Find the checkpoint to resume from, and load its state into the trainer and its
        callbacks. If there is none, trainer and callbacks stay as they are. choice: "auto" or True
        for the newest good one in output_dir, or a path; None or False: none. Raises
        CheckpointError if the run cannot be resumed from the checkpoint, or if a new run would
        begin beside checkpoints without overwrite_output_dir; ValueError if adapters in the
        checkpoint do not fit the model. Collective."""
        trainer = self.trainer
        backend = trainer.backend
        say = trainer.report.print
        model = ckpt_folder.model_identity(backend.hf_config)
        folder = ckpt_folder.find(trainer.args, choice, backend.name, model, say)
        if folder is not None:
            self._load(folder)
            restore_states(trainer.callbacks, trainer.state.stateful_callbacks)

    def _load(self, folder: Path) -> None:
        """Load the state of a verified checkpoint into the trainer. A printed line lists most
        settings that have changed since the checkpoint. Collective.

        Raises CheckpointError if the checkpoint has no optimizer state, if it needs a part of this
        package that is not installed, or if its run had another global batch size, another
        objective, or another setting that decides the optimizer's state. Other data, or another
        base model of adapters, are refused too if the checkpoint has facts by which to notice them.
        """
        trainer = self.trainer
        record, state = read_records(folder)
        if not record["with_optimizer"]:
            raise CheckpointError(
                f"{folder} was saved with save_only_model and cannot be resumed from: start from "
                "its weights"
            )
        now = parallel.on_main(self._training_record)
        before = record["settings"]
        refuse_missing_parts(before, folder)
        changed = changed_settings(before, trainer.settings)
        fixed = _fixed_settings(before, trainer.backend)
        _refuse_changes(changes(record, now), _OF_THE_DATA, folder)
        _refuse_changes(changed, fixed, folder)
        trainer.check_objective(record["objective"], folder)
        base = record["base"]
        if any(base[name] != now["base"][name] for name in base.keys() & now["base"].keys()):
            raise CheckpointError(
                f"{folder} holds adapters that were trained on another base model, of the same "
                "shape: set model_name_or_path to the one that the run started from, or start "
                "anew from these by adapter_name_or_path"
            )
        trainer.backend.load_state(folder)
        parallel.on_all(
            lambda: load_scaler_states(trainer.backend.grad_scalers, record["loss_scales"]),
            CheckpointError,
            f"{folder / TRAINING_NAME}: loss_scales are invalid: use another checkpoint",
        )
        state.max_steps = trainer.state.max_steps
        state.num_train_epochs = trainer.state.num_train_epochs
        trainer.state = state
        if state.best_model_checkpoint:  # the run's folder may have been moved since
            best = folder.with_name(Path(state.best_model_checkpoint).name)
            state.best_model_checkpoint = str(best)
        if _ranking(before) != _ranking(trainer.settings):
            state.forget_best()
        # last, because it sets rate and decay in the optimizer's groups from this run's schedule
        trainer.lr_scheduler.num_steps = 0
        trainer.lr_scheduler.step(record["scheduler_steps"])
        restore_random_states(folder, record["layout"] == now["layout"])
        parallel.on_main(lambda: self._tidy(folder), CheckpointError)
        taken = [f"{key} {was} -> {now}" for key, (was, now) in changed.items()]
        if taken:
            others = "note: other values than before, taken from here on:"
            trainer.report.print(f"{others} {', '.join(taken)}")

    def _tidy(self, folder: Path) -> None:
        """Rename the checkpoints in output_dir that are newer than the step from which this run
        resumes, so that they no longer count. If `folder`, the resumed checkpoint, is in
        output_dir, also delete the oldest checkpoints over save_total_limit. Called on the main
        rank."""
        args = self.trainer.args
        state = self.trainer.state
        ckpt_folder.set_newer_aside(args.output_dir, state.global_step, self.trainer.report.print)
        if folder.parent.resolve() == Path(args.output_dir).resolve():
            ckpt_folder.prune(folder, state.best_model_checkpoint, args.save_total_limit)

    def _training_record(self) -> dict[str, Any]:
        trainer = self.trainer
        args = trainer.args
        plan = trainer.batch_plan
        streams = isinstance(trainer.train_dataset, Stream)
        degrees = "tensor_model pipeline_model virtual_pipeline_model context".split()
        layout = [getattr(args, f"{degree}_parallel_size") for degree in degrees]
        return {
            "with_optimizer": not args.save_only_model,
            "scheduler_steps": trainer.lr_scheduler.num_steps,
            "loss_scales": scaler_states(trainer.backend.grad_scalers),
            "streaming": streams,
            "num_samples": 0 if streams else plan.num_samples,
            "global_batch_size": plan.global_batch_size,
            "data_seed": plan.seed,
            "shuffle": plan.shuffle,
            # a user's dataset may have none
            "dataset": getattr(trainer.train_dataset, "identity", None),
            "layout": [*layout, args.world_size],
            "objective": trainer.objective_facts(),
            "settings": trainer.settings,
            "base": trainer.backend.finetuning.base_sample(),
        }


@dataclass
class _Job:
    """One checkpoint being written by this rank. final: the checkpoint's folder. temporary: the
    folder to write to, which complete() renames to `final` if they differ. snapshot: weights and
    optimizer state, ready to be written. facts: for the manifest. files: {name: content} of files
    to write too. exported: names of files that are there already. error, results, entries: results
    of writing: the exception, what snapshot.write() returned for complete(), and the files'
    manifest entries."""

    final: Path
    temporary: Path
    snapshot: Any
    facts: dict[str, Any]
    files: dict[str, str | bytes]  # name -> content
    exported: list[str]  # names of files written already
    error: Exception | None = None
    results: Any = None  # what the snapshot's write() returned
    entries: Entries = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)

    def write(self) -> None:
        try:
            for name, data in self.files.items():
                write_file(self.temporary / name, data)
            written, self.results = self.snapshot.write(self.temporary)
            self.entries |= written
            names = [*self.files, *self.exported]
            self.entries |= ckpt_folder.measure_all(self.temporary, names)
        except Exception as error:  # complete() raises it on all ranks
            self.error = error

    def complete(self) -> None:
        """Once every rank has written its files, write the last ones, such as the manifest, on the
        main rank and give the folder its name. Collective.

        Raises CheckpointError on every rank, with the errors of the ranks that failed.
        """

        def written() -> tuple[Any, ...]:
            if self.error is not None:
                raise self.error
            return self.entries, self.results

        def finish() -> None:
            if not parallel.is_main():
                return
            folder = self.temporary
            files = dict(itertools.chain(*(entries.items() for entries, _ in answers)))
            for name in self.snapshot.finish(folder, [results for _, results in answers]):
                files[name] = ckpt_folder.measure(folder / name)
            ckpt_folder.write_manifest(folder, self.facts, files)
            if folder != self.final:
                ckpt_folder.publish(folder, self.final)

        words = f"{self.final} could not be written; earlier checkpoints are untouched"
        answers = parallel.on_all(written, CheckpointError, words)
        parallel.on_all(finish, CheckpointError, words)


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _facts(
    backend: str, hf_config: dict[str, Any], step: int = 0, with_optimizer: bool = False
) -> dict[str, Any]:
    model = ckpt_folder.model_identity(hf_config)
    return dict(backend=backend, step=step, with_optimizer=with_optimizer, model=model)


def _state_to_store(state: TrainerState, final: Path) -> str:
    """The trainer's state as JSON text, to be stored in the checkpoint `final`. If the best
    evaluation so far was at this step, best_model_checkpoint is `final` in that text."""
    best = state.best_model_checkpoint
    if state.best_global_step == state.global_step:
        best = str(final)
    return _json(asdict(state) | {"best_model_checkpoint": best})


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2) + "\n"


_KINDS = {  # the types of training.json's fields
    "with_optimizer": bool,
    "scheduler_steps": int,
    "loss_scales": list,
    "streaming": bool,
    "num_samples": int,
    "global_batch_size": int,
    "layout": list,
    "objective": dict,
    "base": dict,
    "settings": dict,
}


def read_records(folder: Path) -> tuple[dict[str, Any], TrainerState]:
    """Read a checkpoint's training.json and trainer_state.json -> (dict, TrainerState). Raises
    CheckpointError if a file cannot be read, if a field of _KINDS or of the TrainerState has
    another type than it should, if the counts of steps do not fit the step in the checkpoint's
    manifest, or if the count of samples is negative."""
    path = folder / TRAINING_NAME
    try:
        record = read_json(path)
        state = TrainerState.load(folder / TRAINER_STATE_NAME)
        ckpt_folder.check_kinds(record, _KINDS)
        step = ckpt_folder.read_manifest(folder)["step"]
        is_of_step = state.global_step == step and 0 <= record["scheduler_steps"] <= step
        if state.consumed_samples < 0 or not is_of_step:
            raise ValueError(f"{TRAINER_STATE_NAME}: expected the counts of step {step}")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {error}: use another checkpoint; python -m mca_lite convert {folder} DST "
            "exports the weights of this one"
        ) from None
    return record, state


def load_model(folder: PathLike, backend: Any, with_optimizer: bool = False) -> None:
    """Verify a checkpoint, and load its weights into the backend's model. with_optimizer: True to
    load the optimizer's state too. Raises CheckpointError if the checkpoint is damaged, does not
    fit the backend and model, or lacks an optimizer state that is asked for; ValueError if the
    checkpoint's adapters do not fit the model, or if only one of the two has adapters.
    Collective."""
    model = ckpt_folder.model_identity(backend.hf_config)
    ckpt_folder.refuse_damage(Path(folder), backend.name, model)
    if with_optimizer and not ckpt_folder.read_manifest(Path(folder))["with_optimizer"]:
        raise CheckpointError(f"{folder} has only weights: pass with_optimizer=False")
    backend.load_state(Path(folder), with_optimizer)


def save_model(folder: PathLike, backend: Any, with_optimizer: bool = False) -> None:
    """Write a model's weights (with LoRA only the trained ones) as a checkpoint with a manifest,
    which load_model() reads. with_optimizer: True to write the optimizer's state too. Raises
    CheckpointError if it cannot be written (OSError for the files of adapters). Collective."""
    folder = Path(folder)
    parallel.on_main(lambda: folder.mkdir(parents=True, exist_ok=True), CheckpointError)
    backend.finish_param_sync()
    snapshot = backend.snapshot_of(backend.model, backend.optimizer if with_optimizer else None)
    exported = list(backend.export_adapters(folder))
    name, hf_config = backend.name, backend.hf_config
    write_weights(folder, snapshot, name, hf_config, with_optimizer, exported)


def write_weights(
    folder: Path,
    snapshot: Any,
    backend: str,
    hf_config: dict[str, Any],
    with_optimizer: bool = False,
    exported: list[str] | None = None,
) -> None:
    """Write a snapshot (weights ready to be written) and a manifest into a folder, which
    load_model() reads as a checkpoint. backend: the name of the backend that made the snapshot.
    hf_config: the model's config, by which the manifest identifies the model. with_optimizer: True
    if the snapshot has optimizer state. exported: names of files that this rank has already written
    there. Raises CheckpointError, on every rank, if any rank fails. Collective."""
    facts = _facts(backend, hf_config, with_optimizer=with_optimizer)
    job = _Job(folder, folder, snapshot, facts, {}, exported or [])
    job.write()
    job.complete()


# -- settings that may change when a run is resumed


def settings_of(args: Any) -> dict[str, Any]:
    """The TrainingArguments as {key: JSON value}, to store in checkpoints and compare on resume.
    gradient_accumulation_steps is left out if global_batch_size is set, since it then depends on
    the number of ranks."""
    settings = args.to_dict()
    if args.global_batch_size is not None:
        del settings["gradient_accumulation_steps"]  # it follows from the number of ranks
    return json.loads(json.dumps(settings, default=str))  # additional_configs may hold objects


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Compare settings or records of an earlier run with those of this run -> {key:
    (value before, value now) as text} for the keys that differ. A key that is missing on one side
    counts as its default there, or as None if it is no configuration key. Keys that only say how a
    run starts, such as output_dir, are left out."""
    found = {}
    for key in sorted((before.keys() | now.keys()) - _OF_A_START):
        default = default_of(key_fields()[key]) if key in key_fields() else None
        pair = _shown(before.get(key, default)), _shown(now.get(key, default))
        if pair[0] != pair[1]:
            found[key] = pair
    return found


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Compare a checkpoint's settings with those of this run -> {key: (value before, value now) as
    text} for those that differ. Keys in `before` of optional parts that are not installed are
    ignored."""
    return changes({key: before[key] for key in before.keys() - parts.absent_keys().keys()}, now)


def refuse_missing_parts(before: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError if a checkpoint's settings need an optional part of this package that
    is not installed. before: the checkpoint's settings by key. folder: the checkpoint, for the
    message."""
    for key, name in parts.needed(before).items():
        reason, remedy = parts.need_of(name)
        saved = f"{folder} was saved with {key} {_shown(before[key])}"
        raise CheckpointError(f"{saved}: {reason}: {remedy}")


def _ranking(settings: dict[str, Any]) -> tuple[str, bool]:
    return ranking_of(settings.get("metric_for_best_model"), settings.get("greater_is_better"))


def _fixed_settings(before: dict[str, Any], backend: Any) -> list[str]:
    """Keys whose values must stay the same when a run is resumed, such as those that decide which
    optimizer state a checkpoint has. before: the settings in the checkpoint by key."""
    fixed = ["optim", "finetuning_type"]
    for row in KEY_GROUPS.values():
        fixed += row.fixed
    if backend.name == "torch":
        return [*fixed, "exp_avg_dtype", "exp_avg_sq_dtype"]  # tensors are loaded without a cast
    is_half = "true" in (_shown(before.get("bf16")), _shown(before.get("fp16")))
    if is_half or not backend.finetuning.is_whole:  # new tensors next to weights are always float32
        return fixed
    return [*fixed, "bf16", "fp16"]  # there are no float32 masters next to the model's weights


def _refuse_changes(changed: dict[str, Any], keys: Iterable[str], folder: Path) -> None:
    """Raise CheckpointError if a setting that must stay the same has changed. changed: {key:
    (old, new) as text}. keys: the keys that must not be among them. folder: the checkpoint, for the
    message."""
    for key in changed.keys() & keys:
        was, now = changed[key]
        raise CheckpointError(
            f"{folder} was saved with {key} {was}, and this run has {now}: set it back to go on "
            "(dataset: its files, tokenizer, chat_template, cutoff_len, max_samples and val_size)"
        )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- random states


def random_states() -> bytes:
    name, keys, *rest = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
    }
    stream = io.BytesIO()
    torch.save(states, stream)
    return stream.getvalue()


def restore_random_states(folder: Path, is_same_layout: bool) -> None:
    """Restore this rank's random states (torch, CUDA, megatron, python, numpy) from a checkpoint's
    folder. is_same_layout: True if this run has the checkpoint's parallel layout; if False, or if
    the rank's file is missing, the states stay as they are. Raises CheckpointError, on every rank,
    if a rank cannot read its file. Collective."""
    path = folder / f"rng-{parallel.rank()}.pt"

    def restore() -> None:
        if not is_same_layout or not path.is_file():
            return
        states = torch.load(path, weights_only=True)
        torch.set_rng_state(states["torch"])
        if states["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        get_cuda_rng_tracker().set_states(states["tracker"])
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])

    words = f"{folder}: random states cannot be read: use another checkpoint"
    parallel.on_all(restore, CheckpointError, words)
