"""Patches of megatron-core and torch: a table for training on a CPU with gloo, which is not applied
if CUDA is there, and a short one for CUDA.

This is the only file of the package that assigns to other libraries' attributes. Each row is
(object, attribute, replacement, reason); `apply()` walks the first table, `apply_on_cuda()` the
second.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.utils._device

PatchRow: TypeAlias = tuple[Any, str, Any, str]  # (object, attribute, replacement, reason)

_DEVICE = torch.device("cpu")
_MARK = (
    "rows_of_mca_lite"  # marks a patched function and has the rows, for all copies of the package
)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Finished:
    """Replaces CUDA streams and events on a CPU. Its methods return at once, because on a CPU all
    earlier work has finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, *args: Any) -> "_Finished":
        return self

    def elapsed_time(self, other: object) -> float:
        return 0.0

    wait_stream = wait_event = synchronize = record = wait = __exit__ = __enter__ = _nothing


def _constructor_on_cpu(construct: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor constructor, such as torch.zeros: for device "cuda" it makes CPU tensors, and
    it never pins memory."""

    @functools.wraps(construct)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = _DEVICE
        kwargs.pop("pin_memory", None)
        return construct(*args, **kwargs)

    return wrapped


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    return type_


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        as_list = [
            s.tolist() if isinstance(s, torch.Tensor) else s
            for s in (output_split_sizes, input_split_sizes)
        ]
        return original(output, input, *as_list, **kwargs)

    return all_to_all_single


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if len({part.shape for part in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        import torch.distributed as dist

        for rank, part in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                part.copy_(tensor)
            dist.broadcast(part, group_src=rank, group=group)

    return all_gather


_LARGE = 2**20  # elements


def joined(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat views that together hold the numbers of contiguous tensors: those that lie one after
    another in memory, as gradients in DDP's buffers do, are one view."""
    found: list[torch.Tensor] = []
    end = None
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        flat = tensor.detach().reshape(-1)
        place = flat.dtype, flat.untyped_storage().data_ptr(), flat.storage_offset()
        if end == place:
            last = found.pop()
            flat = last.as_strided((len(last) + len(flat),), (1,))
        found.append(flat)
        end = *place[:2], found[-1].storage_offset() + len(found[-1])
    return found


def l2_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The float32 norm of all tensors together, as a scalar tensor on their device; on the CPU if
    there is no tensor.

    On a CPU torch adds a tensor's squares one after another, which is off by 1e-4 at 4 million
    elements, and differently in each layout. Taking norms of short rows first is right to 1e-7 and
    as fast."""
    if tensors and tensors[0].is_cuda:
        tensors = joined(tensors)
        # the kernel for many tensors reads large ones at half the speed of the kernel for one
        # tensor
        large = [tensor for tensor in tensors if tensor.numel() >= _LARGE]
        small = [tensor for tensor in tensors if tensor.numel() < _LARGE]
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in large]
        if small:
            norms += torch._foreach_norm(small, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))
    parts = [torch.zeros(1)]
    for tensor in tensors:
        flat = tensor.detach().float().reshape(-1)
        even = flat.numel() // 4096 * 4096
        parts += [flat[:even].view(-1, 4096).norm(dim=1), flat[even:].norm()[None]]
    return torch.cat(parts).norm()


def _foreach_scale(chunk_size: Any, noop_flag: Any, tensor_lists: Any, scale: Any) -> None:
    source, target = tensor_lists
    if source and source[0].data_ptr() == target[0].data_ptr():  # megatron clips in place
        torch._foreach_mul_(target, scale)
    elif source:
        torch._foreach_copy_(target, torch._foreach_mul(source, scale))


def _foreach_copy(this: Any, that: Any, overflow_buf: Any = None) -> None:
    if this:
        torch._foreach_copy_(that, this)


def add_weight_gradient(
    inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add a linear's weight gradient to main_grad [n, k], in place: main_grad += grad_output^T
    inputs. inputs: [tokens, k]; grad_output: [tokens, n]. If main_grad is float32, 16-bit inputs
    are multiplied and added in float32."""
    if inputs.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), inputs)
    else:
        torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=torch.float32, out=main_grad)


class _WeightGradient:
    """Stands for Apex's module fused_weight_gradient_mlp_cuda, with the one function that megatron
    calls for float32 gradient buffers."""

    wgrad_gemm_accum_fp32 = staticmethod(add_weight_gradient)


_INDUCTOR = "torch._inductor.config"
_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def cuda_rows() -> Iterator[PatchRow]:
    """Yield the patches for CUDA: (object, attribute, replacement, reason). Scaling and copying of
    many tensors are replaced only if megatron would loop over the tensors, because it found neither
    Transformer Engine's kernels for that nor Apex's."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.optimizer as optimizer
    import megatron.core.tensor_parallel.layers as layers
    from megatron.core.utils import local_multi_tensor_l2_norm

    waits = "megatron's loops launch a kernel for each tensor"
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        yield clip_grads, "multi_tensor_scale_impl", _foreach_scale, waits
        yield optimizer, "_multi_tensor_copy_this_to_that", _foreach_copy, waits
    if not optimizers.USING_PYTORCH_OPTIMIZER:
        same = "the same optimizers everywhere: Transformer Engine's count updates in another place"
        yield optimizers, "Adam", torch.optim.AdamW, same
        yield optimizers, "SGD", torch.optim.SGD, same
        yield optimizers, "USING_PYTORCH_OPTIMIZER", True, same
    if not layers._grad_accum_fusion_available:
        no_apex = "a product that adds to the float32 gradient needs no Apex: torch has one"
        yield layers, "fused_weight_gradient_mlp_cuda", _WeightGradient, no_apex
        yield layers, "_grad_accum_fusion_available", True, no_apex
    disable = _disabled_where_loaded(torch._disable_dynamo)
    by_torch = torch._disable_dynamo(_nothing).__code__  # a host program's replacement is kept
    for name in "add_param_group load_state_dict state_dict zero_grad".split():
        method = getattr(torch.optim.Optimizer, name)
        if getattr(method, "__code__", None) is by_torch:
            seconds = "its first call imports torch's compiler only to be kept from being compiled"
            yield torch.optim.Optimizer, name, disable(method.__wrapped__), seconds
    if torch.are_deterministic_algorithms_enabled() or _INDUCTOR in sys.modules:
        inductor = importlib.import_module(_INDUCTOR)
        if torch.are_deterministic_algorithms_enabled():
            untimed = "kernels are not chosen by their time in this run"
            yield inductor, "deterministic", True, untimed
        if _COMPILE_THREADS not in os.environ:
            # the compiling processes are ready only after the first step
            late = "processes that compile start for seconds, while training needs the cores"
            yield inductor, "compile_threads", 1, late


def cpu_rows() -> Iterator[PatchRow]:
    """Yield the patches for a CPU: (object, attribute, replacement, reason). It is a generator
    because building them imports megatron."""
    import megatron.core.tensor_parallel.random as megatron_random
    import torch.distributed as dist

    cuda = torch.cuda

    def rng_get(*args, **kwargs):
        return torch.get_rng_state()

    def rng_set(state, *args, **kwargs) -> None:
        torch.set_rng_state(state)

    no_streams = "megatron orders its collectives with CUDA's streams; a CPU has no second queue"
    one_rng = "megatron keeps its dropout states in the CUDA generator; the CPU's takes its place"
    no_marks = "profiler marks are written through the CUDA runtime"
    late = "deferred until CUDA starts, which it never does here"
    yield cuda, "current_device", lambda: _DEVICE, "megatron places buffers on the current device"
    yield cuda, "synchronize", _nothing, no_streams
    for name in "Stream Event current_stream default_stream".split():
        yield cuda, name, _Finished, no_streams
    yield cuda, "stream", lambda stream: contextlib.nullcontext(), no_streams
    yield cuda.nvtx, "range_push", _nothing, no_marks
    yield cuda.nvtx, "range_pop", _nothing, no_marks
    for place in (cuda, cuda.random):
        yield place, "get_rng_state", rng_get, one_rng
        yield place, "set_rng_state", rng_set, one_rng
    yield cuda, "manual_seed", torch.manual_seed, one_rng
    yield cuda, "_lazy_call", lambda f, **k: f(), late
    yield megatron_random, "_get_cuda_rng_state", rng_get, one_rng
    yield megatron_random, "_set_cuda_rng_state", rng_set, one_rng

    names = (
        "tensor zeros ones empty full arange rand randn zeros_like ones_like empty_like full_like"
    )
    device = 'the schedules, clipping and p2p name device="cuda"'
    kind = "clipping compares types with 'torch.cuda.FloatTensor'"
    equal = "gloo needs equal pieces; experts have unequal ones"
    as_lists = _all_to_all_single(dist.all_to_all_single)
    for name in names.split():
        yield torch, name, _constructor_on_cpu(getattr(torch, name)), device
    for moved in (torch.Tensor, torch.nn.Module):
        yield moved, "cuda", lambda self, *a, **k: self, "megatron moves both with .cuda()"
    yield torch.Tensor, "type", _tensor_type(torch.Tensor.type), kind
    yield dist, "all_gather", _all_gather(dist.all_gather), equal
    yield dist, "all_to_all_single", as_lists, "gloo needs split sizes as lists"


_PAGED_STASH = "megatron.core.transformer.moe.paged_stash"


class _WithoutTriton(types.ModuleType):
    """Stands in for a module of megatron-core that cannot be imported without triton. Each of its
    names is a function that raises ImportError when it is called, except names that begin with two
    underscores."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise ImportError(f"{self.__name__}.{name} needs the package triton")

        return missing


def _replace_what_needs_triton() -> None:
    """If triton is not installed, put a stand-in for the one module of megatron-core 0.18 and 0.19
    (paged_stash of its experts) that imports triton without a guard. With triton nothing is
    replaced."""
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_PAGED_STASH, _WithoutTriton(_PAGED_STASH))


def _compile_later(compile: Callable[..., Any]) -> Any:
    """Make a replacement for torch.compile that compiles a function at its first call, not when the
    function is decorated. compile: the original torch.compile."""

    def later(function=None, **options):
        if function is None:
            return functools.partial(later, **options)
        compiled = functools.cache(lambda: compile(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    later.original = compile
    return later


def _disabled_where_loaded(disable: Callable[..., Any]) -> Any:
    """Make a replacement for the decorator torch._disable_dynamo, which keeps a function out of
    compilation. Until torch's compiler is imported, a function that it decorates runs as it is,
    because nothing could compile it before. disable: the original decorator."""

    def later(function=None, **options):
        if function is None:
            return functools.partial(later, **options)
        disabled = disable(function, **options)

        @functools.wraps(function)
        def call(*args, **kwargs):
            chosen = disabled if "torch._dynamo" in sys.modules else function
            return chosen(*args, **kwargs)

        return call

    later.original = disable
    return later


_SHAPES = "torch.fx.experimental.symbolic_shapes"


class _Later(types.ModuleType):
    """Placeholder for a module that takes seconds to import, and is often not needed. torch's
    distributed tensor modules import functions and one error type from it: they get stubs, and a
    stub function imports the real module when it is called. Other names, such as classes, and other
    importers make it import the real module at once. The import replaces the stubs by the real
    objects."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._given: list[
            tuple[dict[str, Any], str]
        ] = []  # (a module's names, the one it took from here)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def load() -> Any:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            real = importlib.import_module(self.__name__)
            for names, given in self._given:
                names[given] = getattr(real, given)
            return getattr(real, name)

        names = sys._getframe(1).f_globals
        is_error = name == "GuardOnDataDependentSymNode"  # an error type that these functions raise
        if not names.get("__name__", "").startswith("torch.distributed.tensor."):
            return load()
        if name[0].isupper() and not is_error:
            return load()
        self._given.append((names, name))
        if is_error:
            return type(name, (RuntimeError,), {})
        return lambda *args, **kwargs: load()(*args, **kwargs)


@contextlib.contextmanager
def compiling_later() -> Iterator[None]:
    """A context that saves seconds of import time: modules imported in it do not load torch's
    compiler (torch._dynamo) and sympy, unless a module imports them by name.

    Three things would load them, and are delayed. megatron-core decorates fused functions with
    torch.compile: each function compiles at its first call instead. megatron-core imports torch's
    distributed tensors, which import the compiler's symbolic shapes and with them sympy: these load
    when a function needs them. torch excludes some Python operators from compilation, such as
    attention for packed rows: they run without the exclusion until the compiler is loaded.
    """
    # also find the originals if another copy of the package is inside this context
    before = [getattr(x, "original", x) for x in (torch.compile, torch._disable_dynamo)]
    torch.compile = _compile_later(before[0])
    torch._disable_dynamo = _disabled_where_loaded(before[1])
    later = sys.modules.setdefault(_SHAPES, _Later(_SHAPES))
    try:
        yield
    finally:
        torch.compile, torch._disable_dynamo = before
        if isinstance(later, _Later) and sys.modules.get(_SHAPES) is later:
            del sys.modules[_SHAPES]


def apply() -> list[PatchRow]:
    """Apply the patches for a CPU, unless CUDA is available -> the patches in force in this
    process; [] with CUDA. In both cases, if triton is missing, the module of megatron-core that
    needs it is replaced. A second call changes nothing, even from another copy of the package."""
    _replace_what_needs_triton()
    if torch.cuda.is_available():
        return []
    in_force = getattr(torch.Tensor.type, _MARK, None)
    if in_force is not None:
        return in_force
    # on a CPU, torch.compile of megatron's fused functions takes a C++ compiler and a second per
    # import
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # `with torch.device("meta")` looks constructors up in a set that is filled once: it must have
    # the originals, or models that transformers builds under it keep uninitialised buffers (rotary
    # frequencies)
    torch.utils._device._device_constructors()
    rows = _put_in_force(cpu_rows())
    setattr(torch.Tensor.type, _MARK, rows)
    return rows


@functools.cache
def apply_on_cuda() -> None:
    """Apply the patches for CUDA, if CUDA is available. Later calls do nothing."""
    if torch.cuda.is_available():
        _put_in_force(cuda_rows())
        os.environ.setdefault(_COMPILE_THREADS, "1")  # for the compiler, if it is imported later


def _put_in_force(table: Iterable[PatchRow]) -> list[PatchRow]:
    """Apply patches: set each patch's attribute to its replacement -> the patches as a list. table:
    rows (object, attribute, replacement, reason). All rows are made before the first is applied, so
    that replacements can wrap the originals."""
    rows = list(table)
    for owner, attribute, replacement, _ in rows:
        setattr(owner, attribute, replacement)
    return rows
