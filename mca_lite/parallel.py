"""The distributed world: start and stop, devices, seeds, collectives. Uses nccl with CUDA,
otherwise gloo on the CPU.
"""

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
_is_alone = False  # True inside alone()
_MEET = datetime.timedelta(hours=1)  # longest wait for all ranks to start; ddp_timeout may be years


def device() -> torch.device:
    """This rank's device: its GPU with CUDA, otherwise the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`. A copy from CPU to GPU goes through pinned memory, so it does not
    wait for the GPU's earlier work."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of a tensor on a GPU to host memory; a CPU tensor is taken as it is.
    wait() waits for the copy and work queued before it on its stream, not for later work."""

    def __init__(self, tensor: torch.Tensor):
        # torch copies into pinned memory here
        self._values = tensor.detach().to("cpu", non_blocking=True)
        self._arrived = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """The copied values, a CPU tensor."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def wait_for_device() -> None:
    """Wait for all work queued on the GPU's current stream; returns at once without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


class HostBuffers:
    """Reusable host memory for copies of tensors, because allocation takes longer than the copy.
    With CUDA the memory is pinned, and torch rounds its size up to a power of two."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)  # by size in bytes
        self._used: list[torch.Tensor] = []
        self._reserving = threading.Thread()

    @staticmethod
    def taken(size: int) -> int:
        """Bytes of host memory that a buffer of `size` bytes really takes: with CUDA, `size`
        rounded up to a power of two."""
        return 1 << (size - 1).bit_length() if size and torch.cuda.is_available() else size

    def reserve(self, sizes: list[int]) -> None:
        """Start a thread that allocates buffers of these sizes in bytes, because pinning memory
        takes seconds."""
        self._reserving = threading.Thread(target=self._make, args=[sizes], daemon=True)
        self._reserving.start()

    def _make(self, sizes: list[int]) -> None:
        for size in sizes:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._free[size].append(buffer)

    def reuse(self) -> None:
        """Make all buffers available for new copies, which may overwrite the tensors that copy()
        returned before. Waits for the thread of reserve()."""
        if self._reserving.is_alive():
            self._reserving.join()
        for buffer in self._used:
            self._free[buffer.nbytes].append(buffer)
        self._used = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to a free buffer, or a new one if none has its size -> the copy, a CPU
        tensor. From a GPU it is complete only once the work queued so far is done."""
        if not self._free[tensor.nbytes]:
            self._make([tensor.nbytes])
        buffer = self._free[tensor.nbytes].pop()
        self._used.append(buffer)
        copy = buffer.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach(), non_blocking=True)


def rank() -> int:
    """Global rank of this process; 0 inside alone()."""
    if _is_alone:
        return 0
    if dist.is_initialized():
        return dist.get_rank()
    return world.current().rank


def world_size() -> int:
    """Number of ranks; 1 before the process group starts and inside alone()."""
    return dist.get_world_size() if dist.is_initialized() and not _is_alone else 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context manager in which one rank can compute while the others wait: rank() and world_size(),
    the collectives of this module over all ranks, and the torch backend see a world of one rank."""
    global _is_alone
    _is_alone = True
    try:
        yield
    finally:
        _is_alone = False


def is_main() -> bool:
    """True on global rank 0, which prints and writes shared files; inside alone() on any rank."""
    return rank() == 0


def start_process_group(timeout_s: float = 1800) -> None:
    """Start torch.distributed for the ranks that torchrun or SLURM describes; without them, a world
    of one.

    Starts nothing if a process group exists. ValueError if RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT are incomplete or no possible numbers, if too few files may be open, or if the ranks
    do not meet at their store in time.
    timeout_s: limit for each collective, and for the start; connecting to the store waits at most
    an hour.
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
        # watchdog.py reads the last collectives of a rank, and when its GPU began them
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


def _store_of_all(timeout: datetime.timedelta) -> Any:
    """Connect to the key-value store by which all ranks meet: torchrun's, or one that rank 0 holds.
    timeout: limit for waiting, an hour at most while ranks connect. If rank 0 holds the store, it
    waits until all ranks have connected, and raises DistError with up to eight that have not."""
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
    # after a restart on one machine, torchrun's store still has the addresses of dead ranks
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"start-{start}", store) if here.is_one_machine else store


def own_store(prefix: str) -> Any:
    """A second connection to the process group's key-value store, with `prefix` before its keys. It
    works while the main thread waits on the first connection."""
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    return store.clone()


def make_deterministic() -> None:
    """Choose deterministic algorithms in torch, CUDA's libraries and Transformer Engine, for this
    process. Call it before CUDA starts.

    The aim is that a step gives the same bits in every run with the same layout, machine and
    versions. torch's flash attention sums its gradients in order; cuDNN's attention is not used
    (model_attention.py); cuBLAS has a fixed workspace; NCCL uses Ring and Tree unless NCCL_ALGO is
    set; torch.compile does not choose kernels by timing (cpu.py). This package's Triton kernels add
    in a fixed order. ValueError if NCCL_ALGO has NVLS, which adds in the order of arrival, unless
    it begins with ^ (all but these).
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


def initialize(args: Any, use_mca: bool = True) -> None:
    """Start the distributed world: process group, megatron's groups, seeds. args:
    TrainingArguments.

    use_mca False: no megatron groups, and the layout is not checked. A second call with the same
    layout creates no groups and sets the seeds again; with another layout it raises RuntimeError,
    because a process has one layout. ValueError if the number of ranks is no multiple of tensor x
    pipeline x context parallel size, or from make_deterministic() or start_process_group().
    Collective: all ranks create groups.
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


def _initialize_model_parallel(args: Any) -> None:
    """Create megatron's process groups. RuntimeError if they exist with another layout."""
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
        distributed_timeout_minutes=args.ddp_timeout / 60,  # fractions of a minute are valid
        create_gloo_process_groups=False,  # only megatron's checkpoints would use them
    )


def set_seed(seed: int, use_mca: bool) -> None:
    """Seed Python, NumPy and torch; with use_mca also the random states that megatron keeps for
    dropout on each rank, from seed + 1. This sets CUDA's generator too (on a CPU, torch's)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if use_mca:
        tensor_parallel.model_parallel_cuda_manual_seed(seed + 1)


def barrier() -> None:
    """Wait until all ranks get here. Collective."""
    if world_size() > 1:
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """Every rank's `value` (picklable) as a list in rank order, on every rank. Collective."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def pipeline_rank() -> int:
    """This rank's pipeline stage; 0 if megatron's groups do not exist."""
    if mpu.model_parallel_is_initialized():
        return mpu.get_pipeline_model_parallel_rank()
    return 0


def gather_given(value: dict[Any, Any]) -> dict[int, dict[Any, Any]]:
    """Collect the values of the ranks whose value is not empty -> {rank: value}, on every rank.
    Collective: a gather of flags, and one broadcast per such rank.

    gather() would pad every value to the longest: if one rank of a thousand has a value, it would
    send a thousand times its size.
    """
    given = [rank for rank, has_one in enumerate(gather(bool(value))) if has_one]
    return {number: _broadcast(value, number) for number in given}


def cut_group(of_expert: bool) -> dist.ProcessGroup:
    """megatron's process group over which a tensor is sharded: the expert-tensor-parallel group if
    of_expert, otherwise the tensor-parallel group."""
    if of_expert:
        return mpu.get_expert_tensor_parallel_group()
    return mpu.get_tensor_model_parallel_group()


def replica_group(of_expert: bool) -> dist.ProcessGroup:
    """megatron's process group of the ranks that hold the same shard of a tensor. For an expert's
    tensor (of_expert) it is the expert-data-parallel group; otherwise the data-parallel group,
    context parallelism included."""
    if of_expert:
        return mpu.get_expert_data_parallel_group()
    return mpu.get_data_parallel_group(with_context_parallel=True)


def whole(part: torch.Tensor, axis: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate `part`, the equal shards of all ranks in `group`, along `axis`. axis None: the
    tensor is not sharded and is returned unchanged. Collective over the group if it is sharded."""
    if axis is None or group.size() == 1:
        return part
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, axis)


def exchange(
    sends: dict[int, torch.Tensor],
    receives: dict[int, torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send tensors to some ranks of a group and receive tensors from some ranks, in one batch, and
    wait until all have arrived; with nccl the GPU's stream waits, not the host. sends, receives:
    {rank in the group: tensor}; a received tensor is filled in place.

    The group must have run a collective before. Unbatched, nccl would make a communicator per pair
    of ranks, 265 MiB on each GPU.
    """
    rows = [(dist.isend, *item) for item in sends.items()]
    rows += [(dist.irecv, *item) for item in receives.items()]
    messages = [dist.P2POp(way, x, group=group, group_peer=peer) for way, peer, x in rows]
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def to_main(tensor: torch.Tensor | None, sender: int, form: torch.Tensor) -> torch.Tensor | None:
    """Send a tensor from rank `sender` to the main rank, and return it there; any other rank gets
    back the `tensor` that it passed. form: a tensor with the shape and dtype of the one that is
    sent. Only these two ranks communicate."""
    if sender == rank() != 0:
        exchange({0: tensor.to(device()).contiguous()}, {})
    if sender != 0 and is_main():
        tensor = form.new_empty(form.shape, device=device())
        exchange({}, {sender: tensor})
    return tensor


def send_to_main(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """Send tensors of all ranks to the main rank, which yields (name, {rank: that rank's tensor, on
    the CPU}), one name at a time. Other ranks yield nothing, but must iterate to the end too.

    tensors: {name: tensor} of this rank. Collective: the names are gathered, then each tensor of
    another rank is one message.
    """
    forms = gather_given({name: tensor.to("meta") for name, tensor in tensors.items()})
    for name in dict.fromkeys(itertools.chain(*forms.values())):
        received = {}
        for sender, form in forms.items():
            if name in form:
                received[sender] = to_main(tensors.get(name), sender, form[name])
        if is_main():
            yield name, {sender: tensor.cpu() for sender, tensor in received.items()}


def on_main(action: Callable[[], Any], kind: type[Exception] = RuntimeError) -> Any:
    """Run action() on the main rank, and return its result on every rank. Collective.

    If it fails, every rank raises `kind` with the error's text, so that no rank waits for a stopped
    one.
    """
    result, problem = _broadcast(_attempt(action) if is_main() else None)
    if problem:
        raise kind(problem)
    return result


def _broadcast(value: Any, source: int = 0) -> Any:
    """The value of rank `source`, on every rank. Collective."""
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values, src=source)
    return values[0]


def on_all(action: Callable[[], Any], kind: type[Exception], words: str) -> list[Any]:
    """Run action() on every rank, and return all results in rank order on every rank. Collective.

    If any rank fails, every rank raises `kind`: `words`, then the first line of up to eight
    different errors, each with up to eight of its ranks.
    """
    answers = gather(_attempt(action))
    ranks: dict[str, list[str]] = {}  # grouped, because a thousand ranks may have one problem
    for number, (_, problem) in enumerate(answers):
        if problem:
            ranks.setdefault(problem.splitlines()[0], []).append(str(number))
    lines = [f"rank {first_of(of_problem, 8)}: {line}" for line, of_problem in ranks.items()]
    if lines:
        raise kind(f"{words} ({'; '.join(lines[:8])})")
    return [result for result, _ in answers]


def _attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """Call action() -> (its result, ""), or if it fails (None, the error's text)."""
    try:
        return action(), ""
    except Exception as error:
        place = users_place(error)
        return None, f"in your {place}: " * bool(place) + describe_error(error)


def largest(*numbers: int) -> list[int]:
    """The maximum of each number (integers) over all ranks, on every rank. Collective.

    It uses a separate GPU stream, so as not to wait for work queued on the current one.
    """
    if world_size() == 1:
        return list(numbers)
    with _beside_other_work():
        vector = torch.tensor(numbers, dtype=torch.int64, device=device())
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        return vector.tolist()


def _beside_other_work() -> Any:
    """Context manager that runs CUDA work on a separate stream; without a GPU it does nothing."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return torch.cuda.stream(_stream_of(torch.cuda.current_device()))


@functools.cache
def _stream_of(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


def sum_over_all(values: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all ranks, in place, and return it on every rank. Collective."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradients(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return x as it is in forward; in backward, sum the gradient of x over the group. Collective
    in backward.

    x must be the same on all ranks of the group. megatron's copy_to (0.16) does not sum a
    non-contiguous gradient, as after a split.
    """
    return _SumGradients.apply(x, group)


def shutdown() -> None:
    """Destroy the process groups. Call it on every rank, after a clean end only: after another
    rank's failure it might wait."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
