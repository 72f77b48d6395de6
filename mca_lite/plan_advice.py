"""What a run that is out of GPU memory is told: what `plan` had predicted, and the keys that would
save most.

Each of the keys is tried as `plan` tries layouts: the rules between keys accept it, and the memory
of the fullest rank is computed with it.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from . import parallel, plan_memory
from .args_run import RunArguments, parse_args
from .args_values import show_size
from .trainer_profile import FOLDER, dump_memory

_SHOWN = 3


@contextlib.contextmanager
def explained(arguments: RunArguments) -> Iterator[None]:
    """Let torch's error of too little GPU memory say what was planned, which keys help most and
    where a snapshot of the memory is. It stays a torch.OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        lines = [str(error).strip()]
        with contextlib.suppress(Exception):  # the first words must come through
            lines += advice(arguments, parallel.world_size())
        with contextlib.suppress(OSError, RuntimeError):
            path = dump_memory(Path(arguments.training.output_dir) / FOLDER)
            if path is not None:
                lines.append(f"pytorch.org/memory_viz shows what memory holds: {path}")
        raise torch.OutOfMemoryError("\n  ".join(lines)) from error


def advice(arguments: RunArguments, world_size: int) -> list[str]:
    """Lines: the planned memory by its parts, and the keys that lower it most."""
    if not arguments.backend.use_mca:
        return ["what helps: a smaller per_device_train_batch_size or cutoff_len, or use_mca: true"]
    model = plan_memory.ModelOfRun(arguments)

    def memory_of(run: RunArguments) -> plan_memory.RankMemory:
        config, on_gpu = model.config_of(run), torch.cuda.is_available()
        return model.fullest_rank(run.training, config, world_size, on_gpu)[1]

    planned = memory_of(arguments)
    parts = sorted(plan_memory.PARTS, key=lambda part: -getattr(planned, part))
    sizes = ", ".join(f"{part} {show_size(getattr(planned, part))}" for part in parts)
    saved = []
    for keys in _candidates(arguments.training):
        with contextlib.suppress(ValueError):  # refused by the rules
            saves = planned.total - memory_of(_changed(arguments, keys)).total
            words = ", ".join(f"{key}: {str(value).lower()}" for key, value in keys.items())
            if saves > 0:
                saved.append((saves, f"{words} (-{show_size(saves)})"))
    best = [words for _, words in sorted(saved, reverse=True)]
    if len(best) < _SHOWN:  # these change what is trained
        best += ["a lower cutoff_len", "finetuning_type: lora"]
    return [
        f"planned were {show_size(planned.total)} on the fullest rank: {sizes}",
        f"most likely to help: {'; '.join(best[:_SHOWN])}",
    ]


def _candidates(args) -> Iterator[dict]:
    """Keys that may lower memory, where the run has them not."""
    if args.micro_batch_size > 1:
        yield {"per_device_train_batch_size": args.micro_batch_size // 2}
    if args.recompute_granularity != "full":
        yield {"recompute_granularity": "full"}
    if not args.use_distributed_optimizer and args.data_parallel_size > 1:
        yield {"use_distributed_optimizer": True}
    if args.data_parallel_size > 1:
        tp, pp, cp = (f"{name}_parallel_size" for name in _DEGREES)
        yield {tp: 2 * getattr(args, tp), "sequence_parallel": True}
        yield {pp: 2 * getattr(args, pp)}
        yield {cp: 2 * getattr(args, cp)}
    if not args.optimizer_cpu_offload:
        yield {"optimizer_cpu_offload": True}
    if "fp32" in (args.exp_avg_dtype, args.exp_avg_sq_dtype):
        yield {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    if not (args.bf16 or args.fp16):
        yield {"bf16": True}
    elif args.grad_reduce_in_fp32:
        yield {"grad_reduce_in_fp32": False}


_DEGREES = ("tensor_model", "pipeline_model", "context")


def _changed(arguments: RunArguments, keys: dict) -> RunArguments:
    """The run with other values of keys and the same global batch. ConfigError where the rules
    refuse it."""
    values = arguments.to_yaml_dict()
    values["global_batch_size"] = arguments.training.train_global_batch_size
    values.pop("gradient_accumulation_steps", None)
    return parse_args([f"{key}={json.dumps(value)}" for key, value in (values | keys).items()])
