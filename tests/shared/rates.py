"""A CPU's row of plan_time's table of rates, measured on the spot, and a run that it predicts.

Time is the process's own on its cores: what else runs on the machine takes no part in it, nor does
what a rank waits for (others, a pipeline). Rates are measured between the steps, since a core's
speed changes with what runs beside it.
"""

import time

import torch

from mca_lite.trainer_callbacks import TrainerCallback

_STEPS, _TIMES = 6, 8


def train_and_predict(hf, length: int, output_dir: str, **keys) -> dict:
    """The mean seconds of a step on this rank, and what plan_time predicts. Collective."""
    from mca_lite import McaTrainer, TrainingArguments, parallel, plan_memory, plan_time
    from mca_lite.model import AutoModel
    from mca_lite.model_config import from_hf_config

    given = dict(output_dir=output_dir, max_steps=_STEPS, save_strategy="no", save_hf_model=False)
    args = TrainingArguments(**given, disable_tqdm=True, **keys)
    parallel.initialize(args, True)
    built = AutoModel.from_config(from_hf_config(hf, args))
    ids = torch.arange(length + 1) % hf.vocab_size
    rows = [dict(input_ids=ids[:-1], labels=ids[1:])] * args.train_global_batch_size
    clock = _Clock()
    McaTrainer(model=built, args=args, train_dataset=rows, callbacks=[clock]).train()
    config, world_size = built.config, parallel.world_size()
    tensors = plan_memory.ModelTensors(config)
    memory = plan_memory.rank_memory(args, config, tensors, 0, length, world_size, False)
    planned = plan_time.step_time(args, config, memory, [length], world_size, clock.rates())
    return dict(seconds=clock.seconds["step"] / _STEPS, planned=planned)


class _Clock(TrainerCallback):
    """Times the steps, and after each of them the operations that rates are for."""

    def __init__(self):
        import torch.distributed as dist

        x, weight, self.hidden = torch.randn(512, 256), torch.randn(768, 256), torch.zeros(2**18)
        q = torch.randn(2, 4, 256, 64, requires_grad=True)
        long, self.ranks, self.seconds = torch.randn(2**20), dist.get_world_size(), {}
        parameter = torch.nn.Parameter(torch.randn(2**20))
        parameter.grad = torch.randn(2**20)
        adam, attend = (
            torch.optim.AdamW([parameter], foreach=False),
            torch.nn.functional.scaled_dot_product_attention,
        )
        self.actions = {
            "products": lambda: x @ weight.T,
            "attention": lambda: attend(q, q, q, is_causal=True).sum().backward(),
            "passes": lambda: long.mul_(1.0),
            "update": adam.step,
            "link": lambda: dist.all_reduce(self.hidden),
        }

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self._count("step", self.start)
        for name, action in self.actions.items():
            start = time.process_time()
            for _ in range(_TIMES):
                action()
            self._count(name, start)

    def _count(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start

    def rates(self):
        from mca_lite import plan_time

        done = dict(
            products=2 * 512 * 256 * 768,
            attention=6 * 2 * 256**2 * 4 * 64,
            passes=8 * 2**20,
            update=2**20,
            link=2 * (self.ranks - 1) / self.ranks * self.hidden.nbytes,
        )
        times = {name: self.seconds[name] / (_STEPS * _TIMES) for name in done}
        return plan_time.Rates(gaps=1.0, **{name: done[name] / times[name] for name in done})
