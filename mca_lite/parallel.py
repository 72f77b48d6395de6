"""Start and stop of the distributed world: process groups, devices, seeds. CUDA with nccl, else CPU
with gloo."""

import contextlib
import datetime
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import world
from .files import describe_error, users_place
from .mcore import mpu, tensor_parallel

_is_alone = False  # inside alone()
_MEET_S = 3600.0  # at most, until all ranks are there; ddp_timeout may be years


def device() -> torch.device:
    """This rank's device: its own GPU where CUDA is there, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`, without waiting for the work that a GPU has to do before: a copy
    from memory that is not pinned would."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def rank() -> int:
    if _is_alone:
        return 0
    return dist.get_rank() if dist.is_initialized() else world.current().rank


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() and not _is_alone else 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, this rank is a world of one for this module's functions, and for the torch backend:
    for what one rank computes while the others wait."""
    global _is_alone
    _is_alone = True
    try:
        yield
    finally:
        _is_alone = False


def is_main() -> bool:
    """True on global rank 0: the rank that prints and writes."""
    return rank() == 0


def start_process_group(timeout_s: float = 1800) -> None:
    """Join the world that torchrun's or SLURM's variables describe, or make a world of one.

    Does nothing when a process group is there already (a test, or a host program, may have made
    it). ValueError for variables that describe a world by half, and where the ranks do not meet
    within timeout_s.
    """
    if dist.is_initialized():
        return
    world.settle()
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(world.current().local_rank)
        backend = "nccl"
    else:
        world.stay_on_loopback()
    timeout = datetime.timedelta(seconds=timeout_s)
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return
    try:
        store, rank_, size = next(dist.rendezvous("env://", timeout=_time_to_meet(timeout)))
        store.set_timeout(timeout)
        if world.current().is_one_machine:
            # after a restart torchrun's store still holds the addresses of ranks that are dead
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"start-{start}", store)
        dist.init_process_group(backend, store=store, rank=rank_, world_size=size, timeout=timeout)
    except dist.DistError as error:
        raise ValueError(world.why_not_met(error)) from error


def _time_to_meet(timeout: datetime.timedelta) -> datetime.timedelta:
    """How long this rank may try to reach the store of rank 0: torch tries twice, and waits on
    rank 0 itself once."""
    limit = min(timeout, datetime.timedelta(seconds=_MEET_S))
    return limit if world.current().is_main else limit / 2


def own_store(prefix: str):
    """The process group's store, through a connection of its own: usable while the main thread
    waits in it."""
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    return store.clone()


def initialize(args, use_mca: bool = True) -> None:
    """Start the world for `args` (TrainingArguments): process group, megatron's groups, seeds.

    With use_mca false only torch.distributed starts. Calling it again with the same layout changes
    nothing; with another layout it is a RuntimeError, since a process can hold one layout only.
    Collectives: group creation over all ranks. ValueError for a world that the layout does not fit.
    """
    start_process_group(args.ddp_timeout)
    if use_mca and world_size() % args.model_parallel_size:
        raise ValueError(
            f"a copy of the model takes {args.model_parallel_size} ranks, and there are "
            f"{world_size()}: start a multiple, torchrun --nproc_per_node "
            f"{args.model_parallel_size}, or lower the parallel sizes"
        )
    if use_mca:
        _initialize_model_parallel(args)
    set_seed(args.seed, use_mca)


def _initialize_model_parallel(args) -> None:
    kinds = "tensor_model pipeline_model virtual_pipeline_model context expert_model expert_tensor"
    degrees = [f"{kind}_parallel" for kind in kinds.split()]
    wanted = {f"{degree}_size": getattr(args, f"{degree}_size") for degree in degrees}
    if mpu.model_parallel_is_initialized():
        got = tuple(getattr(mpu, f"get_{degree}_world_size")() for degree in degrees)
        *others, etp = wanted.values()
        asked = (*others, etp or args.tensor_model_parallel_size)
        if got != asked:
            raise RuntimeError(
                f"this process already runs with (tp, pp, vpp, cp, ep, etp) = {got}, and {asked} "
                "was asked for: call mca_lite.parallel.shutdown() first"
            )
        return
    mpu.initialize_model_parallel(
        **wanted,
        distributed_timeout_minutes=args.ddp_timeout / 60,  # a timedelta takes fractions
        create_gloo_process_groups=False,  # megatron's own checkpoints gather over them
    )


def set_seed(seed: int, use_mca: bool = True) -> None:
    """Seed python, numpy and torch, and megatron's per-rank dropout states. Megatron wants seeds
    above 0."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if use_mca:
        tensor_parallel.model_parallel_cuda_manual_seed(seed + 1)


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def gather(value) -> list:
    """Every rank's `value` (anything that pickles), in order of rank, on every rank. Collective."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def cut_group(of_expert: bool):
    """megatron's ranks over which a tensor of an expert, or another, is cut."""
    if of_expert:
        return mpu.get_expert_tensor_parallel_group()
    return mpu.get_tensor_model_parallel_group()


def replica_group(of_expert: bool):
    """megatron's ranks that hold the same part of a tensor of an expert, or of another."""
    if of_expert:
        return mpu.get_expert_data_parallel_group()
    return mpu.get_data_parallel_group(with_context_parallel=True)


def whole(part: torch.Tensor, axis: int | None, group) -> torch.Tensor:
    """The tensor of which each rank of a group has a part along an axis; None: all have the whole.
    Collective over the group where there are parts."""
    if axis is None or group.size() == 1:
        return part
    parts = [
        torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, axis)


def exchange(sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], group=None) -> None:
    """Send each tensor to a rank of the group, and fill each of `receives` with what a rank sends,
    in one batch. The group has had a collective before.

    nccl makes a communicator for each pair of ranks that sends unbatched: 265 MiB of either GPU.
    """
    ways = (dist.isend, sends), (dist.irecv, receives)
    messages = [
        dist.P2POp(way, tensor, group=group, group_peer=peer)
        for way, tensors in ways
        for peer, tensor in tensors.items()
    ]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def send_to_main(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """(name, {rank: its tensor of that name, on the CPU}) on the main rank, one name at a time;
    nothing elsewhere. All ranks must iterate to the end. Collective, with a message a tensor."""
    told = gather({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()})
    for name in dict.fromkeys(name for theirs in told for name in theirs):
        found = {}
        for holder, theirs in enumerate(told):
            if name not in theirs or rank() not in (0, holder):
                continue
            shape, dtype = theirs[name]
            if holder == 0:
                found[0] = tensors[name].cpu()
            elif is_main():
                buffer = torch.empty(shape, dtype=dtype, device=device())
                exchange({}, {holder: buffer})
                found[holder] = buffer.cpu()
            else:
                exchange({0: tensors[name].to(device()).contiguous()}, {})
        if is_main():
            yield name, found


def on_main(action: Callable[[], Any], kind: type[Exception] = RuntimeError) -> Any:
    """What action() returns on the main rank, on every rank. Collective.

    What it raises there is raised on every rank as `kind`, with the same text: nobody waits for a
    rank that has stopped.
    """
    answer = [None, None]
    if is_main():
        try:
            answer[0] = action()
        except Exception as error:
            place = users_place(error)
            answer[1] = f"in your {place}: " * bool(place) + describe_error(error)
    if world_size() > 1:
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise kind(answer[1])
    return answer[0]


def largest(*numbers: int) -> list[int]:
    """The largest of each number over all ranks, on every rank. Collective."""
    if world_size() == 1:
        return list(numbers)
    vector = torch.tensor(numbers, dtype=torch.int64, device=device())
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    return vector.tolist()


def sum_over_all(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, on every rank. Collective. Changes `values`."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradients(x: torch.Tensor, group) -> torch.Tensor:
    """x, which all ranks of the group hold; its gradient is the sum of what each found. Collective
    in the backward pass.

    megatron's own copy_to leaves a gradient that is not contiguous, such as that of a split, as it
    came.
    """
    return _SumGradients.apply(x, group)


def shutdown() -> None:
    """Close what `initialize` opened, on every rank. For a clean end only: after a failure of a
    rank it would wait."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
