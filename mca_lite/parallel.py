"""The distributed world: its start and stop, devices, seeds, collectives. CUDA with nccl, else CPU
with gloo."""

import contextlib
import datetime
import functools
import itertools
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import world
from .files import describe_error, first_of, users_place
from .mcore import mpu, tensor_parallel

# torch 2.13 warns about the former names in each call
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_is_alone = False  # inside alone()
_MEET = datetime.timedelta(hours=1)  # at most, for all ranks to start; ddp_timeout may be years


def device() -> torch.device:
    """This rank's device: its GPU with CUDA, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`. Does not wait for the GPU's earlier work, unlike a copy from memory
    without pinning."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """A tensor's values on their way to host memory, while the device goes on. wait() waits for the
    work that was queued before the copy, and for none queued after it."""

    def __init__(self, tensor: torch.Tensor):
        # into pinned memory
        self._values = tensor.detach().to("cpu", non_blocking=True)
        self._arrived = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """The values, a CPU tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def wait_for_device() -> None:
    """Wait for the work queued on this rank's GPU, if it has one."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


class HostBuffers:
    """Copies of tensors in host memory kept for later copies of the same sizes: fresh memory takes
    longer than the copy. Pinned on the host of a GPU, where torch rounds up to powers of two."""

    def __init__(self):
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)  # by their bytes
        self._used: list[torch.Tensor] = []
        self._reserving = threading.Thread()

    @staticmethod
    def taken(size: int) -> int:
        """Bytes of host memory that a copy of this many takes."""
        return 1 << (size - 1).bit_length() if size and torch.cuda.is_available() else size

    def reserve(self, sizes: list[int]) -> None:
        """Make buffers of these bytes, in a thread: pinning takes seconds."""
        self._reserving = threading.Thread(target=self._make, args=[sizes], daemon=True)
        self._reserving.start()

    def _make(self, sizes: list[int]) -> None:
        for size in sizes:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._free[size].append(buffer)

    def reuse(self) -> None:
        """Give the memory of all copies to the next ones."""
        if self._reserving.is_alive():
            self._reserving.join()
        for buffer in self._used:
            self._free[buffer.nbytes].append(buffer)
        self._used = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with a storage of its own, there after the work queued on the device so far."""
        if not self._free[tensor.nbytes]:
            self._make([tensor.nbytes])
        buffer = self._free[tensor.nbytes].pop()
        self._used.append(buffer)
        copy = buffer.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach(), non_blocking=True)


def rank() -> int:
    """Global rank of this process."""
    if _is_alone:
        return 0
    if dist.is_initialized():
        return dist.get_rank()
    return world.current().rank


def world_size() -> int:
    """Number of ranks; 1 before the process group starts."""
    return dist.get_world_size() if dist.is_initialized() and not _is_alone else 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Make this rank a world of one, within the context, for this module and the torch backend: one
    rank computes while the others wait."""
    global _is_alone
    _is_alone = True
    try:
        yield
    finally:
        _is_alone = False


def is_main() -> bool:
    """True on global rank 0: it prints and writes."""
    return rank() == 0


def start_process_group(timeout_s: float = 1800) -> None:
    """Join the world of torchrun's or SLURM's variables, or make a world of one.

    Does nothing if a process group exists: a test or a host program may have made it. ValueError
    for variables of a half-described world, and if the ranks do not meet within timeout_s.
    """
    if dist.is_initialized():
        world.met.set()
        return
    world.settle()
    world.watch_meeting()
    world.raise_open_files()
    here = world.current()
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(here.local_rank)
        backend = "nccl"
        # for watchdog.py: the last calls of a rank, and the moments its GPU begins them
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "500")
        os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    else:
        world.stay_on_loopback()
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(
            backend,
            store=dist.HashStore() if here.size == 1 else _store_of_all(timeout),
            rank=here.rank,
            world_size=here.size,
            timeout=timeout,
        )
    except dist.DistError as error:
        raise ValueError(world.why_not_met(error)) from error
    finally:
        world.met.set()


def _store_of_all(timeout: datetime.timedelta):
    """The store of torchrun, or of rank 0, which waits until all ranks have come."""
    here = world.current()
    limit = min(timeout, _MEET)
    if not here.is_main:
        limit /= 2  # torch tries twice
    is_holder = here.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(
        *address, None, is_holder, timeout=limit, wait_for_workers=False, multi_tenant=True
    )
    keys = [f"come/{rank}" for rank in range(here.size)]
    store.set(keys[here.rank], "")
    if is_holder:
        try:
            store.wait(keys)
        except dist.DistError as error:
            absent = [key.removeprefix("come/") for key in keys if not store.check([key])]
            raise dist.DistError(f"ranks {first_of(absent, 8)} did not come") from error
    store.set_timeout(timeout)
    # after a restart torchrun's store on one machine still has the addresses of dead ranks
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start-{start}", store) if here.is_one_machine else store


def own_store(prefix: str):
    """A second connection to the process group's store, usable while the main thread waits in the
    first."""
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    return store.clone()


def make_deterministic() -> None:
    """Choose the deterministic path of every library, for this process. CUDA must not have started.

    A step has the same bits then in every run of the same layout on the same machine and versions:
    flash attention sums its gradients in order, cuDNN's attention is left out (model_attention.py),
    cuBLAS and NCCL keep to one algorithm for a shape, torch.compile times no candidates (cpu.py).
    The Triton kernels of this package add in a fixed order always. ValueError for NCCL_ALGO with
    NVLS: the switch adds in the order of arrival.
    """
    algorithms = os.environ.setdefault("NCCL_ALGO", "Ring,Tree")
    if "NVLS" in algorithms.upper() and not algorithms.startswith("^"):
        raise ValueError(
            "deterministic: expected NCCL_ALGO without NVLS in the environment, got "
            f"{algorithms}: set NCCL_ALGO=Ring,Tree, or deterministic: false"
        )
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.set_flags(_benchmark=False, _deterministic=True)


def initialize(args, use_mca: bool = True) -> None:
    """Start the world for `args` (TrainingArguments): process group, megatron's groups, seeds.

    With use_mca false only torch.distributed starts. A second call with the same layout changes
    nothing; with another layout it raises RuntimeError: a process has one layout. Collectives:
    group creation over all ranks. ValueError if the layout does not fit the world.
    """
    if args.deterministic:
        make_deterministic()
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
    wanted["expert_tensor_parallel_size"] = (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    )
    if mpu.model_parallel_is_initialized():
        got = {f"{degree}_size": getattr(mpu, f"get_{degree}_world_size")() for degree in degrees}
        if got != wanted:
            raise RuntimeError(
                f"expected {wanted}, and this process already runs with {got}: call "
                "mca_lite.parallel.shutdown() first"
            )
        return
    mpu.initialize_model_parallel(
        **wanted,
        distributed_timeout_minutes=args.ddp_timeout / 60,  # a timedelta takes fractions
        create_gloo_process_groups=False,  # for megatron's checkpoints alone
    )


def set_seed(seed: int, use_mca: bool) -> None:
    """Seed python, numpy and torch, and megatron's per-rank dropout states. Megatron wants seeds
    above 0."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if use_mca:
        tensor_parallel.model_parallel_cuda_manual_seed(seed + 1)


def barrier() -> None:
    """Wait for all ranks. Collective."""
    if world_size() > 1:
        dist.barrier()


def gather(value) -> list:
    """Every rank's `value` (picklable), in order of rank, on every rank. Collective."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def pipeline_rank() -> int:
    """This rank's pipeline stage; 0 without megatron's groups."""
    if mpu.model_parallel_is_initialized():
        return mpu.get_pipeline_model_parallel_rank()
    return 0


def gather_given(value: dict) -> dict[int, dict]:
    """{rank: its value} of the ranks whose value is not empty, on every rank. Collective: a
    broadcast of each such rank.

    gather() pads all values to the longest one: of a thousand ranks with one a thousand of it.
    """
    given = [rank for rank, has_one in enumerate(gather(bool(value))) if has_one]
    return {number: _broadcast(value, number) for number in given}


def cut_group(of_expert: bool):
    """megatron's group over which tensors of experts, or others, are sharded."""
    if of_expert:
        return mpu.get_expert_tensor_parallel_group()
    return mpu.get_tensor_model_parallel_group()


def replica_group(of_expert: bool):
    """megatron's group of ranks with the same shard of a tensor of experts, or of another."""
    if of_expert:
        return mpu.get_expert_data_parallel_group()
    return mpu.get_data_parallel_group(with_context_parallel=True)


def whole(part: torch.Tensor, axis: int | None, group) -> torch.Tensor:
    """A tensor from its shards along an axis, one on each rank of a group; None: no shards.
    Collective over the group, unless there are no shards."""
    if axis is None or group.size() == 1:
        return part
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, axis)


def exchange(sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor], group=None) -> None:
    """Send tensors to ranks of the group, and receive into others, in one batch. The group has had
    a collective before.

    Without a batch nccl makes a communicator for each pair of ranks: 265 MiB of either GPU.
    """
    rows = [(dist.isend, *item) for item in sends.items()]
    rows += [(dist.irecv, *item) for item in receives.items()]
    messages = [dist.P2POp(way, x, group=group, group_peer=peer) for way, peer, x in rows]
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def to_main(tensor: torch.Tensor | None, sender: int, form: torch.Tensor) -> torch.Tensor | None:
    """The sender's tensor, on the main rank; what they have on other ranks. form: one of its shape
    and dtype. A message from the sender to the main rank."""
    if sender == rank() != 0:
        exchange({0: tensor.to(device()).contiguous()}, {})
    if sender != 0 and is_main():
        tensor = form.new_empty(form.shape, device=device())
        exchange({}, {sender: tensor})
    return tensor


def send_to_main(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """(name, {rank: its tensor of that name, on the CPU}) on the main rank, one name at a time;
    nothing elsewhere. All ranks must iterate to the end. Collective, with a message a tensor."""
    forms = gather_given({name: tensor.to("meta") for name, tensor in tensors.items()})
    for name in dict.fromkeys(itertools.chain(*forms.values())):
        received = {}
        for sender, form in forms.items():
            if name in form:
                received[sender] = to_main(tensors.get(name), sender, form[name])
        if is_main():
            yield name, {sender: tensor.cpu() for sender, tensor in received.items()}


def on_main(action: Callable[[], Any], kind: type[Exception] = RuntimeError) -> Any:
    """The result of action() on the main rank, on every rank. Collective.

    An error there is raised on every rank as `kind`, with the same text: no rank waits for a
    stopped one.
    """
    result, problem = _broadcast(_attempt(action) if is_main() else None)
    if problem:
        raise kind(problem)
    return result


def _broadcast(value, source: int = 0):
    """The value of the source's rank. Collective."""
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=source)
    return values[0]


def on_all(action: Callable[[], Any], kind: type[Exception], words: str) -> list:
    """The result of action() on each rank, in order of rank, on every rank. Collective.

    Errors of any are raised on every rank as one of `kind`: the words, and the first line of each,
    with its ranks.
    """
    answers = gather(_attempt(action))
    ranks: dict[str, list[str]] = {}  # a thousand may have one problem
    for number, (_, problem) in enumerate(answers):
        if problem:
            ranks.setdefault(problem.splitlines()[0], []).append(str(number))
    lines = [f"rank {first_of(of_problem, 8)}: {line}" for line, of_problem in ranks.items()]
    if lines:
        raise kind(f"{words} ({'; '.join(lines[:8])})")
    return [result for result, _ in answers]


def _attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """(the result of action(), its error in words)."""
    try:
        return action(), ""
    except Exception as error:
        place = users_place(error)
        return None, f"in your {place}: " * bool(place) + describe_error(error)


def largest(*numbers: int) -> list[int]:
    """The largest of each number over all ranks, on every rank. Collective.

    Does not wait for the GPU's earlier work: numbers of the host go by a stream of their own."""
    if world_size() == 1:
        return list(numbers)
    with _beside_other_work():
        vector = torch.tensor(numbers, dtype=torch.int64, device=device())
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        return vector.tolist()


def _beside_other_work():
    """A context with a stream of its own on a GPU."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return torch.cuda.stream(_stream_of(torch.cuda.current_device()))


@functools.cache
def _stream_of(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


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
    """x, the same on all ranks of the group; its gradient is the sum over them. Collective in the
    backward pass.

    megatron's copy_to does not sum a gradient that is not contiguous, as after a split.
    """
    return _SumGradients.apply(x, group)


def shutdown() -> None:
    """Close the groups of `initialize`, on every rank. For a clean end only: after a failure of a
    rank it would wait."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
