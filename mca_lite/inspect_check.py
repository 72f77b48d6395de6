"""The dry run: what a run does before its first step, and what each of its ranks would hold and
read then. One process does it alone, and writes nothing.
"""

import copy
import itertools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers

from . import ckpt_folder, lora
from .args_run import RunArguments
from .backend_megatron import PACKED_BUCKET, MegatronBackend
from .backend_torch import TorchBackend
from .data_batches import Collator, make_loader
from .data_cache import cache_folder
from .data_stream import TokenStream
from .files import check_can_write
from .log import format_summary, steps_summary
from .model_config import grow
from .plan_memory import ModelTensors
from .run import Plan, data_summary, make_plan
from .trainer_step import plan_batches, read_step

_MAX_RANKS = 64


def check(arguments: RunArguments) -> None:
    """Print what a run would begin with, in the world of WORLD_SIZE. What keeps it from its first
    step is raised, as the run would raise it."""
    cache = cache_folder(arguments.data)
    with tempfile.TemporaryDirectory(prefix="mca_lite-check-") as folder:
        arguments.data.cache_dir = folder
        _show_cache(cache, Path(folder))
        plan = make_plan(arguments)
        if any(not path.is_symlink() for path in Path(folder, "tokens").glob("*")):
            check_can_write(cache, "cache_dir")  # the run would tokenise into it
        print(*plan.data.report, sep="\n")
        print(format_summary({"model": _of_model(plan), "data": data_summary(plan)}))
        if arguments.training.do_train:
            print(format_summary({"steps": _of_steps(plan)}))
            print(*_of_ranks(plan), sep="\n")
    first = "first step" if arguments.training.do_train else "evaluation"
    print(f"\nok: nothing was written, and nothing keeps the run from its {first}")


def _show_cache(cache: Path, folder: Path) -> None:
    """Let a folder have what is in the token cache by links; what is not goes into the folder."""
    for kind in ("tokens", "hashes"):
        (folder / kind).mkdir()
        for path in (cache / kind).glob("*"):
            if not path.suffix:  # else a lock, or progress
                (folder / kind / path.name).symlink_to(path.absolute())


def _of_model(plan: Plan) -> dict:
    planned, config = plan.model, plan.model.config
    weights = "a checkpoint of this package"
    if planned.from_scratch:
        weights = "drawn from the seed"
    elif planned.source is not None:
        weights = f"{len(planned.source.names()):,} tensors, whose names and shapes fit"
    return {
        "name": plan.arguments.model.model_name_or_path,
        "type": getattr(config, "hf_model_type", None) or config.model_type,
        "weights": weights,
        "tokens": planned.vocab_size,
        "reference": plan.second_model and str(plan.second_model.folder),
    }


def _of_steps(plan: Plan) -> dict:
    """What the run will say of its steps, and what it would resume. ValueError where that, or a new
    run in output_dir, is refused."""
    args, config, notes = plan.arguments.training, plan.model.config, []
    asked = args.resume_from_checkpoint
    if asked in (None, False):
        ckpt_folder.check_new(args)
    else:
        kind, hf = "megatron", getattr(config, "hf_config", None)
        if not plan.arguments.backend.use_mca:
            kind, hf = "torch", config.to_dict()
        identity = ckpt_folder.model_identity(hf)
        ckpt_folder.choose(args, asked, kind, identity, notes.append)
    trainer = _absent_trainer(plan, 0)
    told = steps_summary(trainer, plan_batches(trainer, trainer.train_dataset, training=True))
    del told["from step"]  # it is in the checkpoint, which is not read
    return {**told, "resuming": "; ".join(notes) or "no"}


# -- ranks that are not there


class _Absent:
    """Before a backend in the order of classes, and in place of its constructor: what is known of
    a data parallel rank before it is there."""

    dp_rank, dp_size, at_least = 0, 1, 0

    def __init__(self, plan: Plan, dp_rank: int):
        self.args, self.config = plan.arguments.training, plan.model.config
        self.dp_rank, self.dp_size = dp_rank, self.args.data_parallel_size

    def common_length(self, longest: int) -> int:
        return super().common_length(max(longest, self.at_least))


class _AbsentMegatron(_Absent, MegatronBackend):
    pass


class _AbsentTorch(_Absent, TorchBackend):
    pass


def _absent_trainer(plan: Plan, dp_rank: int):
    """The trainer of a rank without its constructor, which wants a model and the other ranks."""
    trainer = object.__new__(plan.objective.trainer_class())
    backend = _AbsentMegatron if plan.arguments.backend.use_mca else _AbsentTorch
    trainer.args, trainer.backend = plan.arguments.training, backend(plan, dp_rank)
    trainer.tokenizer, trainer.train_dataset = plan.tokenizer, plan.data.train
    trainer.shuffle = not plan.arguments.data.disable_shuffling
    trainer.state = SimpleNamespace(global_step=0, max_steps=plan.steps)
    return trainer


def _first_batches(plan: Plan) -> list[list[tuple[int, int]]]:
    """The shapes [rows, tokens] of the first step's micro-batches, for each data parallel rank."""
    sizes = range(plan.arguments.training.data_parallel_size)
    trainers = [_absent_trainer(plan, dp_rank) for dp_rank in sizes]
    shapes = [_first_batches_of(trainer) for trainer in trainers]
    for trainer in trainers:  # some layouts want one length on all ranks, who ask each other
        trainer.backend.at_least = max(length for of_rank in shapes for _, length in of_rank)
    return [_first_batches_of(trainer) for trainer in trainers]


def _first_batches_of(trainer) -> list[tuple[int, int]]:
    data, collate = trainer.train_dataset, Collator(trainer._pad_token_id)
    batches = plan_batches(trainer, data, training=True)
    if isinstance(data, TokenStream):
        loader = data.loader(collate, batches, None, num_workers=0, speaks=False)
    else:
        loader = make_loader(data, collate, batches)
    step = read_step(trainer, iter(loader), batches, 0)[0]
    return [tuple(batch["input_ids"].shape) for batch in step]


def _of_ranks(plan: Plan) -> Iterator[str]:
    args, shapes = plan.arguments.training, _first_batches(plan)
    stages, config = _stages(plan), plan.model.config
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    # in megatron-core's order of ranks the first of these counts fastest
    sizes = {"tensor": tp, "context": cp, "data": args.data_parallel_size}
    of_experts = {}
    if plan.arguments.backend.use_mca and config.num_moe_experts:
        of_experts["expert tensor"] = config.expert_tensor_parallel_size
        of_experts["expert"] = config.expert_model_parallel_size
    heads = "".join(f" {name:>7}" for name in ("stage", *sizes, *of_experts))
    yield f"\nrank{heads}     parameters        trained  first step reads"
    for rank in range(min(args.world_size, _MAX_RANKS)):
        stage, within = divmod(rank, args.world_size // len(stages))
        places = {"stage": stage, **_places(within, sizes), **_places(within, of_experts)}
        data, (held, trained, _) = places["data"], stages[stage]
        sp = tp if args.sequence_parallel else 1
        batches = []
        for (b, s), alike in itertools.groupby(shapes[data]):
            batches.append(f"{len(list(alike))} x [{b}, {s // cp}]")
            if stage:  # what comes from the stage before
                batches[-1] += f" as [{s // cp // sp}, {b}, {config.hidden_size}]"
        columns = "".join(f" {place:>{max(7, len(name))}}" for name, place in places.items())
        yield f"{rank:>4}{columns} {held:>14,} {trained:>14,}  {', '.join(batches)}"
    if args.world_size > _MAX_RANKS:
        yield f"  ... and {args.world_size - _MAX_RANKS:,} ranks more"
    if args.sequence_packing and not torch.cuda.is_available() and plan.arguments.backend.use_mca:
        yield f"note: on GPUs packed rows are padded to multiples of {PACKED_BUCKET} tokens"
    for stage, (_, _, tensors) in enumerate(stages):
        yield f"\na rank of stage {stage} holds"
        for (name, shape), layers in tensors.items():
            where = "" if layers == [None] else f"  layers {_spans(layers)}"
            yield f"  {name:58} {list(shape)}{where}"


def _places(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """A rank's coordinates in a grid, whose first axis counts fastest."""
    places = {}
    for name, size in sizes.items():
        rank, places[name] = divmod(rank, size)
    return places


def _stages(plan: Plan) -> list[tuple[int, int, dict]]:
    """(parameters, those that are trained, {(name, shape): layers}) of a rank of each stage."""
    config, spec = plan.model.config, plan.model.adapters
    if plan.arguments.backend.use_mca:
        tensors, stages = ModelTensors(config, spec), []
        for stage in range(config.pipeline_model_parallel_size):
            held, trained, adapters = tensors.of_stage(config, stage)
            total = held.sum + adapters.sum
            stages.append((total, trained.sum + adapters.sum, tensors.shapes(config, stage)))
        return stages
    config = copy.deepcopy(config)
    grow(config, plan.model.vocab_size)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=plan.arguments.model.trust_remote_code
        )
        if spec is not None:
            lora.inject(model, spec)
    found: dict = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        name = re.sub(r"\.layers\.\d+\.", ".layers.{}.", name)
        number = int(layer[1]) if layer else None
        found.setdefault((name, tuple(parameter.shape)), []).append(number)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [(sum(p.numel() for p in model.parameters()), trained, found)]


def _spans(layers: list[int]) -> str:
    """0-3, 6 of [0, 1, 2, 3, 6]."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))
