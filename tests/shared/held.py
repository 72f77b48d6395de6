"""Bytes of a rank in training: storages of weights, gradients, optimizer, and the tensors
that autograd saves.
"""

from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedTensors:
    """Bytes of the storages that autograd keeps, and the most at one time; those that were there
    before (weights, batches) do not count."""

    def __init__(self, others):
        self.others = {t.untyped_storage().data_ptr() for t in others}
        self.uses, self.bytes, self.peak = {}, 0, 0

    def hooks(self):
        saved = self

        class Kept:
            def __init__(self, tensor):
                storage = tensor.untyped_storage()
                self.tensor, self.place, self.size = tensor, storage.data_ptr(), storage.nbytes()
                if self.place in saved.others:
                    self.size = 0
                saved.uses[self.place] = saved.uses.get(self.place, 0) + 1
                if saved.uses[self.place] == 1:
                    saved.bytes += self.size
                saved.peak = max(saved.peak, saved.bytes)

            def __del__(self):
                saved.uses[self.place] -= 1
                if not saved.uses[self.place]:
                    saved.bytes -= self.size

        return torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor)


class Messages(TorchDispatchMode):
    """Bytes of what each collective's or receiving operation writes, by its name, call by call."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            written = [t for t in tree_leaves(args[0]) if torch.is_tensor(t)]
            name = function._opname
            self.sizes.setdefault(name, []).append(sum(t.nbytes for t in written))
        return function(*args, **(kwargs or {}))


class PeakMemory(TorchDispatchMode):
    """The rise of this process's private memory, in bytes, looked at after each operation of torch.

    Pages of the weight file do not count: they are the kernel's cache, which it drops when memory
    is short.
    """

    def __enter__(self):
        self.rise, self._start = 0, self._private()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.rise = max(self.rise, self._private() - self._start)
        return out

    @staticmethod
    def _private() -> int:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * 4096


class Rows(TorchDispatchMode):
    """Most rows of a new tensor with one of these numbers of columns, such as a vocabulary's."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.most = {*columns}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        given = [t.untyped_storage().data_ptr() for t in filter(torch.is_tensor, tree_leaves(args))]
        for tensor in filter(torch.is_tensor, tree_leaves(found)):
            is_view = tensor.untyped_storage().data_ptr() in given
            if tensor.dim() > 1 and tensor.shape[-1] in self.columns and not is_view:
                self.most = max(self.most, tensor.numel() // tensor.shape[-1])
        return found


def train_and_measure(hf, length: int, output_dir: str, lora_rank: int = 0, **keys) -> dict:
    """Bytes that this rank holds after two steps on rows of `length` tokens, by the names of
    tool_plan_memory.PARTS, with the pipeline stage; and what tool_plan_memory says."""
    from megatron.core import parallel_state as mpu

    from mca_lite import McaTrainer, TrainingArguments, parallel, tool_plan_memory
    from mca_lite.model import AutoModel
    from mca_lite.model_config import from_hf_config
    from mca_lite.optim import parts_of
    from mca_lite.part_lora import inject
    from mca_lite.part_lora_layers import LoraSpec

    given = dict(output_dir=output_dir, max_steps=2, save_strategy="no", save_hf_model=False)
    args = TrainingArguments(**{**given, "disable_tqdm": True, **keys})
    parallel.initialize(args, True)
    built = AutoModel.from_config(from_hf_config(hf, args))
    if lora_rank:
        built = inject(built, LoraSpec(rank=lora_rank))
    ids = torch.arange(length + 1) % hf.vocab_size
    rows = [dict(input_ids=ids[:-1], labels=ids[1:])] * args.train_global_batch_size
    trainer = McaTrainer(model=built, args=args, train_dataset=rows)
    weights = {*built.parameters()}
    saved = SavedTensors(weights)
    with saved.hooks(), Messages() as messages:
        trainer.train()
    chunks, parts = trainer.backend.chunks, parts_of(trainer.backend.optimizer)
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    states = [group["params"] for part in parts for group in part.optimizer.param_groups]
    states += [state.values() for part in parts for state in part.optimizer.state.values()]
    held = dict(
        weights=_bytes(weights),
        gradients=_bytes(b.grad_data for b in buffers),
        optimizer=_bytes((t for group in states for t in group), but=weights),
        activations=saved.peak,
    )
    stage, config = mpu.get_pipeline_model_parallel_rank(), built.config
    tensors = tool_plan_memory.ModelTensors(config, built.finetuning)
    world_size = parallel.world_size()
    planned = tool_plan_memory.rank_memory(args, config, tensors, stage, length, world_size, False)
    parameters = sum(p.numel() for p in weights)
    return dict(
        held=held, planned=planned, stage=stage, parameters=parameters, messages=messages.sizes
    )


def _bytes(tensors, but=()) -> int:
    def storage(tensor):
        return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()

    tensors = {storage(t) for t in tensors if torch.is_tensor(t) and t.numel()}
    tensors -= {storage(t) for t in but}
    return sum(size for _, size in tensors)
