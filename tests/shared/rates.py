"""A CPU's row of plan_time's table of rates, measured on the spot, and steps that it predicts.

Each rate is the seconds of one operation with the sizes that a micro-batch gives it: tokens x
hidden size x MLP columns of a product, heads of attention, an elementwise pass over the MLP's
columns, the optimizer's update of a layer. A link's depends on the size of its messages, and is
that of those which the layout sends: hidden states of tensor and pipeline parallel ranks, whose
small messages cost more a byte, or all gradients of data parallel ones. Nothing is fitted.

Time is the process's own on its cores: what else runs on the machine takes no part in it, nor does
what a rank waits for. A core's speed still changes with what runs beside it, so the rates are
measured again before each step, and the step is predicted before it runs.
"""

import functools
import statistics
import time

import torch

from mca_lite.callbacks import TrainerCallback

_STEPS, _TIMES = 7, 6


def _trainer(hf, length: int, output_dir: str, steps: int, callback, **keys):
    """(trainer, its model's config) of a run on rows of `length` tokens. Collective."""
    from mca_lite import McaTrainer, TrainingArguments, parallel
    from mca_lite.model import AutoModel
    from mca_lite.model_config import from_hf_config

    given = dict(output_dir=output_dir, max_steps=steps, save_strategy="no", save_hf_model=False)
    args = TrainingArguments(**given, disable_tqdm=True, **keys)
    parallel.initialize(args, True)
    built = AutoModel.from_config(from_hf_config(hf, args))
    ids = torch.arange(length + 1) % hf.vocab_size
    rows = [dict(input_ids=ids[:-1], labels=ids[1:])] * args.train_global_batch_size
    return McaTrainer(model=built, args=args, train_dataset=rows, callbacks=[callback])


# -- the work of a step


def predict_and_train(hf, length: int, output_dir: str, **keys) -> dict:
    """The median over steps of this rank: seconds `planned` with gaps of 1 and without the
    pipeline's wait, then `taken`. Collective."""
    from mca_lite import parallel, tool_plan, tool_plan_memory

    clock = _Clock()
    trainer = _trainer(hf, length, output_dir, _STEPS, clock, **keys)
    args, config, world_size = trainer.args, trainer.model.config, parallel.world_size()
    tensors = tool_plan_memory.ModelTensors(config)
    memory = tool_plan_memory.rank_memory(args, config, tensors, 0, length, world_size, False)
    clock.operations = _operations(config, args.micro_batch_size, length, memory.gradients)

    def predict(rates) -> float:
        times = tool_plan.step_time(args, config, memory, [length], world_size, rates)
        return times.total - times.bubble

    clock.predict = predict
    trainer.train()
    # the first step allocates what the others use again
    return {name: statistics.median(of[1:]) for name, of in clock.seconds.items()}


def _operations(config, rows: int, length: int, gradients: int) -> dict:
    """Column of the table -> (an operation, what it does of the column's unit). gradients: bytes of
    a rank."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    tokens, h, columns = rows * length, config.hidden_size, config.ffn_hidden_size
    x, weight = torch.randn(tokens, h), torch.randn(columns, h)
    heads = (rows, config.num_attention_heads, length, config.kv_channels)
    q = torch.randn(heads, requires_grad=True)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    activation, message = torch.randn(tokens, columns), torch.zeros(tokens, h)
    if config.tensor_model_parallel_size * config.pipeline_model_parallel_size == 1:
        message = torch.zeros(gradients // 4)
    parameter = torch.nn.Parameter(torch.randn(3 * columns, h))
    parameter.grad = torch.randn_like(parameter)
    adam = torch.optim.AdamW([parameter], foreach=False)
    # forward and backward of the half that is not masked: 3 x 2 products x 2 / 2
    attended = 6 * rows * length**2 * config.num_attention_heads * config.kv_channels
    return {
        "products": (lambda: x @ weight.T, 2 * tokens * h * columns),
        "attention": (lambda: attend(q, q, q).sum().backward(), attended),
        "passes": (lambda: activation.mul_(1.0), 2 * activation.nbytes),
        "update": (adam.step, parameter.numel()),
        "link": (lambda: dist.all_reduce(message), 2 * max(ranks - 1, 1) / ranks * message.nbytes),
    }


class _Clock(TrainerCallback):
    """Before each step it measures the rates and predicts, then it times the step."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {"planned": [], "taken": []}

    def on_step_begin(self, args, state, control, **kwargs):
        from mca_lite import tool_plan

        rates = {}
        for name, (operation, amount) in self.operations.items():
            start = time.process_time()
            for _ in range(_TIMES):
                operation()
            rates[name] = amount * _TIMES / (time.process_time() - start)
        self.seconds["planned"].append(self.predict(tool_plan.Rates(gaps=1.0, **rates)))
        self.start = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds["taken"].append(time.process_time() - self.start)


# -- what a pipeline waits


def wait_in_a_pipeline(hf, length: int, output_dir: str, layer_s: float, **keys) -> dict:
    """The seconds by the clock that a step takes longer when its layers sleep: layer_s forward and
    twice that backward. Every other step sleeps, so that what layers compute and ranks send, much
    on a busy machine, is in both and falls out; the quickest of each kind are taken. Collective."""
    from mca_lite import tool_plan

    watch = _Watch()
    trainer = _trainer(hf, length, output_dir, 7, watch, **keys)

    def sleep(module, args, answer):
        seconds = layer_s if watch.sleeps else 0.0
        time.sleep(seconds)
        hidden = answer[0] if isinstance(answer, tuple) else answer
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: time.sleep(2 * seconds))

    for chunk in trainer.model:
        for layer in chunk.decoder.layers:
            layer.register_forward_hook(sleep)
    trainer.train()
    args, config = trainer.args, trainer.model.config
    layers = config.num_layers / config.pipeline_model_parallel_size
    busy = args.gradient_accumulation_steps * layers * 3 * layer_s
    taken = min(watch.seconds[True]) - min(watch.seconds[False])
    return dict(busy=busy, bubble=tool_plan.bubble(args, config), taken=taken)


class _Watch(TrainerCallback):
    """Times the steps, of which every other one is to sleep."""

    def __init__(self):
        self.sleeps, self.seconds = False, {True: [], False: []}

    def on_step_begin(self, args, state, control, **kwargs):
        self.sleeps = state.global_step % 2 == 1
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds[self.sleeps].append(time.perf_counter() - self.start)
