"""Checkpoints: checkpoint-<step>/ is complete or absent, and loads in any layout.

    mca_config.json, trainer_state.json    the model's config; the loop's state (Hugging Face's names)
    training.json                          schedule, optimizer steps, position in the data, layout
    rng-<rank>.pt                          random states, read with weights_only
    dist/                                  megatron backend: megatron's distributed checkpoint
    model.safetensors, optimizer.safetensors   torch backend

The optimizer's state is stored per parameter, cut like the model's own sharded tensors: megatron's own optimizer format
needs Apex or TE to load, and shares one step counter among all parameters without them.
"""

import json
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from . import parallel
from .callbacks import TrainerState
from .constants import CHECKPOINT_PREFIX, TRAINER_STATE_NAME

TRAINING_NAME = "training.json"
DIST_NAME = "dist"
_OPTIMIZER_KEYS = ("exp_avg", "exp_avg_sq", "momentum_buffer")

# -- a folder, from the trainer's side ----------------------------------------------------------------------------------


def save(trainer) -> Path:
    """Write checkpoint-<step> of a trainer; it appears under its name only when every rank has written its part.

    All ranks must call it; the file system is shared by all of them.
    """
    final = Path(trainer.args.output_dir) / f"{CHECKPOINT_PREFIX}-{trainer.state.global_step}"
    temporary = final.with_name(f".{final.name}.tmp")
    if parallel.is_main():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    parallel.barrier()
    trainer.backend.save_state(temporary, with_optimizer=not trainer.args.save_only_model)
    torch.save(_random_states(), temporary / f"rng-{parallel.rank()}.pt")
    if parallel.is_main():
        trainer.state.save(temporary / TRAINER_STATE_NAME)
        (temporary / TRAINING_NAME).write_text(json.dumps(_training_record(trainer), indent=2) + "\n")
    parallel.barrier()
    if parallel.is_main():
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        _sync(final.parent)
    parallel.barrier()
    return final


def write_state_and_prune(trainer, folder: Path) -> None:
    """After on_save: store what callbacks changed in the state; delete the oldest beyond save_total_limit, but never the
    newest or the best."""
    if not parallel.is_main():
        return
    trainer.state.save(folder / TRAINER_STATE_NAME)
    limit = trainer.args.save_total_limit
    if limit is None:
        return
    best = trainer.state.best_model_checkpoint
    spare = [f for f in list_checkpoints(folder.parent) if f != folder and (best is None or f != Path(best))]
    kept = len(list_checkpoints(folder.parent)) - len(spare)
    for old in spare[: max(0, len(spare) + kept - limit)]:
        shutil.rmtree(old)


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = []
    for path in Path(output_dir).glob(f"{CHECKPOINT_PREFIX}-*"):
        match = re.fullmatch(rf"{CHECKPOINT_PREFIX}-(\d+)", path.name)
        if match and (path / TRAINER_STATE_NAME).is_file():
            found.append((int(match.group(1)), path))
    return [path for _, path in sorted(found)]


def find(args, asked: str | bool | None, say=print) -> Path | None:
    """The checkpoint to resume from, or None to start anew.

    asked: "auto" or True: the newest complete one in output_dir, if any; a path; None or False: start anew, which is a
    ValueError where output_dir holds checkpoints, unless overwrite_output_dir removes them.
    """
    there = list_checkpoints(args.output_dir)
    if asked in (True, "auto"):
        say(
            f"resuming from {there[-1]}"
            if there
            else f"no checkpoint in {args.output_dir}: starting from the beginning"
        )
        return there[-1] if there else None
    if asked not in (None, False):
        if not (Path(asked) / TRAINER_STATE_NAME).is_file():
            raise ValueError(
                f"resume_from_checkpoint: {asked} is not a complete checkpoint; complete ones: {there or 'none'}"
            )
        say(f"resuming from {asked}")
        return Path(asked)
    if there and not args.overwrite_output_dir:
        raise ValueError(
            f"{args.output_dir} holds checkpoints of an earlier run, the newest {there[-1].name}: set "
            "resume_from_checkpoint: auto to go on, overwrite_output_dir: true to delete them, or another output_dir"
        )
    parallel.barrier()  # every rank has looked before the main one deletes
    if parallel.is_main():
        for old in there:
            shutil.rmtree(old)
    return None


def load(folder: str | os.PathLike, trainer) -> None:
    """Put a trainer where the checkpoint was. All ranks must call it.

    ValueError where the checkpoint has no optimizer state, or where the data or the global batch are not what they were.
    """
    folder = Path(folder)
    record = json.loads((folder / TRAINING_NAME).read_text())
    if not record["with_optimizer"]:
        raise ValueError(f"{folder} was saved with save_only_model and cannot be resumed from: start from its weights")
    now = _training_record(trainer)
    for key in ("num_samples", "global_batch_size", "data_seed"):
        if record[key] != now[key]:
            raise ValueError(
                f"{folder} was saved with {key} {record[key]}, and this run has {now[key]}: set it back to go on"
            )
    trainer.backend.load_state(folder)
    max_steps, epochs = trainer.state.max_steps, trainer.state.num_train_epochs
    trainer.state = TrainerState.load(folder / TRAINER_STATE_NAME)
    trainer.state.max_steps, trainer.state.num_train_epochs = max_steps, epochs
    best = trainer.state.best_model_checkpoint
    if best is not None and (folder.parent / Path(best).name).is_dir():  # the run's folder may have been moved since
        trainer.state.best_model_checkpoint = str(folder.parent / Path(best).name)
    # last: it writes rate and decay into the optimizer's groups; the schedule's shape is this run's
    trainer.lr_scheduler.num_steps = 0
    trainer.lr_scheduler.step(record["scheduler_steps"])
    mine = folder / f"rng-{parallel.rank()}.pt"
    if record["layout"] == now["layout"] and mine.is_file():
        _set_random_states(torch.load(mine, weights_only=True))


def load_model(folder: str | os.PathLike, backend) -> None:
    """The weights alone."""
    backend.load_state(Path(folder), with_optimizer=False)


def save_model(folder: str | os.PathLike, backend) -> None:
    """The weights alone, in the format of checkpoints."""
    if parallel.is_main():
        Path(folder).mkdir(parents=True, exist_ok=True)
    parallel.barrier()
    backend.save_state(Path(folder), with_optimizer=False)


def _training_record(trainer) -> dict:
    args, plan = trainer.args, trainer._plan(trainer.train_dataset)
    layout = [args.tensor_model_parallel_size, args.pipeline_model_parallel_size]
    layout += [args.virtual_pipeline_model_parallel_size, args.context_parallel_size, args.world_size]
    return {
        "with_optimizer": not args.save_only_model,
        "scheduler_steps": trainer.lr_scheduler.num_steps,
        "num_samples": plan.num_samples,
        "global_batch_size": plan.global_batch_size,
        "data_seed": plan.seed,
        "layout": layout,
    }


def _sync(folder: Path) -> None:
    """Flush the files of a folder, and the folder's own entries, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- random states ------------------------------------------------------------------------------------------------------


def _random_states() -> dict:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
    }


def _set_random_states(states: dict) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


# -- megatron's side ----------------------------------------------------------------------------------------------------


def save_megatron(folder: Path, models, optimizer=None) -> None:
    """The model's weights, and the optimizer's state where one is given, as a distributed checkpoint."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    if parallel.is_main():
        (folder / DIST_NAME).mkdir()
        models.config.save_pretrained(folder)
    parallel.barrier()
    state = models.sharded_state_dict()
    if optimizer is not None:
        state["optimizer"], _ = _sharded_optimizer(optimizer, models, read=True)
        state["optimizer_steps"] = _optimizer_steps(optimizer, models)
    # one file a rank, written in this process
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(state, str(folder / DIST_NAME), strategy)


def load_megatron(folder: Path, models, optimizer=None) -> None:
    """Fill the model, and the optimizer where one is given, from a checkpoint of any layout."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    if not (folder / DIST_NAME).is_dir():
        raise ValueError(
            f"{folder} holds no distributed checkpoint: it was written by the torch backend (use_mca: false)"
        )
    state = models.sharded_state_dict()
    where = {}
    if optimizer is not None:
        state["optimizer"], where = _sharded_optimizer(optimizer, models, read=False)
    loaded = dist_checkpointing.load(state, str(folder / DIST_NAME), TorchDistLoadShardedStrategy())
    models.load_state_dict({k: v for k, v in loaded.items() if k.startswith("model")})
    if optimizer is None:
        return
    states: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in loaded["optimizer"].items():
        parameter, name = where[key]
        states.setdefault(parameter, {})[name] = value
    with torch.no_grad():
        for inner, parameter, main, part in _owned(optimizer, models):
            mine = {k: v.reshape(-1)[part].view(main.shape).to(main.device) for k, v in states[id(parameter)].items()}
            if "master" in mine:
                main.copy_(mine.pop("master"))
            step = {"step": torch.tensor(float(loaded["optimizer_steps"]))} if "exp_avg" in mine else {}
            inner.state[main] = {**step, **{k: v.clone() for k, v in mine.items()}}


def _owned(optimizer, models):
    """(torch optimizer, model parameter, its float32 master or this rank's flat piece of that, the piece's slice)."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        if hasattr(part, "gbuf_ranges"):  # the distributed optimizer
            for parameter, (group, i) in part.model_param_group_index_map.items():
                piece = part._get_model_param_range_map(parameter)["param"]
                yield inner, parameter, inner.param_groups[group]["params"][i], slice(piece.start, piece.end)
            continue
        mains = {id(p) for group in inner.param_groups for p in group["params"]}
        for parameter in models.parameters():
            main = getattr(parameter, "main_param", parameter)
            if id(main) in mains:
                yield inner, parameter, main, slice(0, parameter.numel())


def _state_names(optimizer, parameter) -> list[str]:
    config = getattr(optimizer, "chained_optimizers", [optimizer])[0].config
    names = ["momentum_buffer"] if config.optimizer == "sgd" else ["exp_avg", "exp_avg_sq"]
    return names + (["master"] if parameter.dtype != torch.float32 else [])


def _sharded_optimizer(optimizer, models, read: bool):
    """({key: ShardedTensor of one state of one parameter}, {key: (id of the parameter, name of the state)}).

    read: fill them with the optimizer's values; pieces of a distributed optimizer are summed over its group.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    parameters = [p for p in models.parameters() if p.requires_grad]
    full = {id(p): {n: torch.zeros(p.shape, device=p.device) for n in _state_names(optimizer, p)} for p in parameters}
    if read:
        _read_states(optimizer, models, full)
    sharded, where = {}, {}
    for tensor in nested_values(extract_sharded_tensors_and_factories(models.sharded_state_dict())[0]):
        for name, value in full.get(id(tensor.data), {}).items():
            key = f"{len(sharded)}.{name}"
            dtype = {} if isinstance(tensor, ShardedTensorFactory) else {"dtype": value.dtype}
            sharded[key] = replace(tensor, key=f"optimizer.{name}.{tensor.key}", data=value, **dtype)
            where[key] = (id(tensor.data), name)
    assert len(sharded) == sum(map(len, full.values())), (
        "a trained parameter has no sharded tensor in the model's state"
    )
    return sharded, where


def _read_states(optimizer, models, full: dict) -> None:
    for inner, parameter, main, piece in _owned(optimizer, models):
        for name, value in full[id(parameter)].items():
            source = main if name == "master" else inner.state.get(main, {}).get(name)
            if source is not None:  # an optimizer that has not stepped yet has none: zeros
                value.view(-1)[piece] = source.detach().view(-1)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "gbuf_ranges") and part.data_parallel_group.size() > 1:
            for buffer in part.buffers:
                for parameter in buffer.params:
                    for value in full[id(parameter)].values():
                        dist.all_reduce(value, group=part.data_parallel_group)


def _optimizer_steps(optimizer, models) -> int:
    """Updates made so far: the same for all parameters; the largest over ranks, since some own no piece."""
    counts = [
        int(inner.state[main]["step"]) for inner, _, main, _ in _owned(optimizer, models) if "step" in inner.state[main]
    ]
    steps = torch.tensor(max(counts, default=0), device=parallel.device())
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return int(steps)


# -- the torch backend's side -------------------------------------------------------------------------------------------


def save_torch(folder: Path, model, optimizer=None) -> None:
    """Weights in float32 and the optimizer's state by parameter name, written by the main rank."""
    from safetensors.torch import save_file

    if not parallel.is_main():
        return
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    save_file({name: p.detach().cpu() for p, name in names.items()}, folder / "model.safetensors")
    if optimizer is not None:
        states = {
            f"{key}.{names[p]}": value.detach().cpu()
            for p, state in optimizer.state.items()
            for key, value in state.items()
            if torch.is_tensor(value)
        }
        save_file(states, folder / "optimizer.safetensors")


def load_torch(folder: Path, model, optimizer=None) -> None:
    """What save_torch wrote."""
    from safetensors.torch import load_file

    if not (folder / "model.safetensors").is_file():
        raise ValueError(
            f"{folder} holds no weights of the torch backend: it was written by megatron-core (use_mca: true)"
        )
    weights = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(weights[name])
    if optimizer is None:
        return
    states = load_file(folder / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        keys = [k for k in (*_OPTIMIZER_KEYS, "step") if f"{k}.{name}" in states]
        device = {k: "cpu" if k == "step" else parameter.device for k in keys}
        optimizer.state[parameter] = {k: states[f"{k}.{name}"].to(device[k]) for k in keys}
