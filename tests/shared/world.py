"""Fresh worlds for tests: run(function, ranks, ...) from a fork server that has imported everything
once.

Over gloo on the CPU; over nccl with a GPU a rank where there is CUDA (tests/tools/gpu.py, not the
suite).

A world lives for one call. A rank that fails fails the call with its traceback; one that hangs ends
it with a TimeoutError; nothing of either survives into the next test. Functions go by module and
name, so they stand at module level.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
import traceback

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Connect ranks when they first talk: to connect all of megatron's groups takes 0.1 s a world.
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

_context = None


def has_cuda() -> bool:
    """True if torch sees a GPU; torch is imported only beside NVIDIA's driver."""
    if not os.path.exists("/dev/nvidiactl"):
        return False
    import torch

    return torch.cuda.is_available()


def server():
    global _context
    if _context is None:
        if has_cuda():  # importing megatron starts CUDA, which does not live through a fork
            _context = multiprocessing.get_context("spawn")
        else:
            _context = multiprocessing.get_context("forkserver")
            _context.set_forkserver_preload(["tests.shared.preload"])
    return _context


def start_server() -> None:
    """Start the fork server, if worlds fork: it imports while its host goes on."""
    if server().get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def _rank(function, args, kwargs, rank, ranks, store, answers):
    import datetime

    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    torch.set_num_threads(1)
    gc.set_threshold(20_000)  # a rank is short: Python's 700 takes 8 % of its CPU time
    multiprocessing.set_start_method(None, force=True)  # the platform's, as of a launched rank
    try:
        backend, timeout = "gloo", datetime.timedelta(seconds=20)
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
            backend, timeout = "nccl", datetime.timedelta(seconds=120)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timeout,
        )
        dist.barrier()  # a rank that is done at once would leave while others still connect to it
        answers.put((rank, None, function(*args, **kwargs)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
    finally:
        answers.close()
        answers.join_thread()
        os._exit(0)  # tearing down megatron's groups takes longer than the test


@contextlib.contextmanager
def _started(function, ranks: int, args, kwargs):
    """(processes, the queue of their answers) of a world; they are gone afterwards."""
    context, folder = server(), tempfile.mkdtemp()
    answers = context.Queue()
    processes = [
        context.Process(
            target=_rank, args=(function, args, kwargs, rank, ranks, f"{folder}/store", answers)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield processes, answers
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def run(function, ranks: int, *args, timeout_s: float = 60, **kwargs) -> list:
    """Run `function(*args, **kwargs)` on `ranks` ranks -> what each returns, in order of rank."""
    with _started(function, ranks, args, kwargs) as (processes, answers):
        return _collect(function, processes, answers, time.monotonic() + timeout_s, timeout_s)


def is_late(end: float) -> bool:
    """True if `end`, by time.time(), is past on any rank. Collective, in a world."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    late = torch.tensor(float(time.time() > end), device=device)
    torch.distributed.all_reduce(late)
    return bool(late)


def expect_time(end: float) -> None:
    """TimeoutError, on all ranks, if is_late(end)."""
    if is_late(end):
        raise TimeoutError("not run: no time was left")


def leave_layout() -> None:
    """Forget the layout of a run, for the next one of this world, and end its groups: each gloo
    group has threads, and those of a hundred runs keep a core busy. Collective."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
        dist.barrier()  # the last messages have come
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def end_when_told() -> None:
    """SIGTERM leaves the process by SystemExit: the worlds that it has started end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def exits(
    function, ranks: int, *args, timeout_s: float = 240, wait_for: list[int] | None = None, **kwargs
) -> tuple[list[int | None], float]:
    """(the exit code of each rank, None of one that still runs; seconds) of a world that ends by
    itself. wait_for: the ranks that do (None: all)."""
    start = time.monotonic()
    with _started(function, ranks, args, kwargs) as (processes, _):
        for number, process in enumerate(processes):
            if wait_for is None or number in wait_for:
                process.join(max(0.0, start + timeout_s - time.monotonic()))
        return [process.exitcode for process in processes], time.monotonic() - start


def _collect(function, processes, answers, end, timeout_s) -> list:
    got, name = {}, f"{function.__name__} on {len(processes)} ranks"
    while len(got) < len(processes):
        try:
            rank, error, value = answers.get(timeout=0.1)
        except queue.Empty:
            silent = [r for r in range(len(processes)) if r not in got]
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{name}: ranks {silent} still run after {timeout_s} s"
                ) from None
            dead = [r for r in silent if not processes[r].is_alive()]
            if dead and answers.empty():
                codes = [processes[r].exitcode for r in dead]
                raise RuntimeError(
                    f"{name}: ranks {dead} died without an answer, exit codes {codes}"
                ) from None
            continue
        if error:
            raise AssertionError(f"{name}: rank {rank} failed:\n{error}")
        got[rank] = value
    return [got[rank] for rank in range(len(processes))]
