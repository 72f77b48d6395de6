"""Move a Session's tensors to host memory while another program uses the GPU, and back.

Storages are freed and allocated again in place, so their views (megatron's buffers, shards,
main_grad) stay valid.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from . import parallel
from .errors import expect
from .optim import parts_of


def move(backend: Any, device: str | torch.device, kinds: Collection[str]) -> None:
    """Move a backend's tensors to host memory, or back to this rank's device. kinds: which tensors:
    some of "model", "grad" and "optimizer". Gradients are freed without a copy, and come back as 0.

    device: this rank's own: move them back, as come_back() does. "cpu", on a rank with a GPU: move
    them to host memory, as leave() does. ValueError for another device known to torch."""
    here = parallel.device()
    wanted = torch.device(device)
    expect(
        wanted.type in ("cpu", here.type) and wanted.index in (None, here.index),
        f'to({str(device)!r}): expected "cpu", or the device of this rank, "{here}"',
    )
    if wanted.type == here.type:
        come_back(backend, kinds)
    else:
        leave(backend, kinds)


@torch.no_grad()
def leave(backend: Any, kinds: Collection[str]) -> None:
    """Free a backend's tensors on the device: those of "model" and "optimizer" are first copied to
    host memory; gradients ("grad") are not copied.

    kinds: which of the three; those that have left already are skipped. The optimizer's zero_grad()
    is called before the copies. Collective for "model" with overlap_param_gather."""
    kinds = [kind for kind in kinds if kind not in backend.away]
    if "model" in kinds:
        backend.finish_param_sync()
    if backend.optimizer is not None:
        backend.optimizer.zero_grad()
    found = _storages(backend)
    for kind in kinds:
        backend.away[kind] = [
            (storage, storage.nbytes(), None if kind == "grad" else _to_host(storage))
            for storage in found[kind]
        ]
    parallel.wait_for_device()
    for storage in (storage for kind in kinds for storage in found[kind]):
        storage.resize_(0)
    torch.cuda.empty_cache()


@torch.no_grad()
def come_back(backend: Any, kinds: Collection[str]) -> None:
    """Move a backend's tensors from host memory back to this rank's device, after leave(). Weights
    and optimizer states get their values back, bit for bit; gradients become 0. kinds: some of
    "model", "grad" and "optimizer"; a kind that was not moved is skipped."""
    moved = [part for kind in kinds for part in backend.away.pop(kind, ())]
    for storage, size, copy in moved:
        storage.resize_(size)
        if copy is None:
            _bytes_of(storage).zero_()
        else:
            _bytes_of(storage).copy_(copy, non_blocking=True)
    parallel.wait_for_device()  # before the copies are freed


def _storages(backend: Any) -> dict[str, list[torch.UntypedStorage]]:
    """List the storages in use on this rank's device -> {kind: storages} for the kinds "model",
    "grad" and "optimizer". A storage that several tensors share is listed once, under one kind."""
    model = backend.model
    gradients = [getattr(parameter, "main_grad", None) for parameter in model.parameters()]
    tensors = {
        "model": [*model.parameters(), *model.buffers()],
        "grad": [gradient for gradient in gradients if gradient is not None],
        "optimizer": list(_tensors_of(backend.optimizer)),  # float32 weights are masters too
    }
    seen = {0}  # the address of freed storages
    return {kind: list(_new(tensors[kind], seen)) for kind in tensors}


def _tensors_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer updates, such as master weights, and the tensors in
    its states."""
    for part in parts_of(optimizer):
        inner = getattr(part, "optimizer", part)
        if inner is None:  # this rank trains nothing
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _new(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Yield storages of `tensors` that were not yielded before and are on this rank's device. seen:
    addresses of the storages yielded so far, which is added to."""
    # a quantised tensor consists of several plain ones, its parts
    for tensor in (part for whole in tensors for part in getattr(whole, "parts", (whole,))):
        storage = tensor.untyped_storage()
        if storage.device == parallel.device() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 tensor that shares the storage's memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """Start an asynchronous copy of a storage's bytes to host memory, pinned if they come from a
    GPU -> the copy."""
    given = _bytes_of(storage)
    copy = torch.empty(given.shape, dtype=torch.uint8, device="cpu", pin_memory=given.is_cuda)
    return copy.copy_(given, non_blocking=True)
