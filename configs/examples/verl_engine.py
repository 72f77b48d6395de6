"""A verl training engine on a Session: import this module by verl's model.external_lib, and set the
strategy of the actor's engine to mca_lite. Written for verl 0.9.1's BaseEngine; text alone.

verl's loss is any function of log-probabilities: they are computed first, its gradient in them is
trained in a second pass. Entropy is measured without a gradient (entropy_coeff: 0). Rank 0 alone
has the tensors of get_per_tensor_param: the samplers are on other devices.
"""

import torch
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from mca_lite import AutoModel, Session, TrainingArguments, parallel
from mca_lite.mcore import mpu
from mca_lite.optim import get_megatron_lr_scheduler

LAYOUT = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "virtual_pipeline_model_parallel_size expert_model_parallel_size sequence_parallel "
    "expert_tensor_parallel_size use_distributed_optimizer"
).split()


class Context(BaseEngineCtx):
    """A mode of the engine; tensors come to the device and leave it by verl's settings."""

    def __exit__(self, *error):
        if self.mode == "train" and self.zero_grad_on_exit:
            self.engine.optimizer_zero_grad()
        super().__exit__(*error)


@EngineRegistry.register(model_type="language_model", backend="mca_lite", device=["cuda", "cpu"])
class McaLiteEngine(BaseEngine):
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config, **unused):
        super().__init__()
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.mode = None

    def initialize(self):
        engine, optimizer = self.engine_config, self.optimizer_config
        layout = {name: getattr(engine, name, None) for name in LAYOUT}
        args = TrainingArguments(
            output_dir="unused",
            bf16=engine.dtype == "bfloat16",
            per_device_train_batch_size=engine.micro_batch_size_per_gpu or 1,
            learning_rate=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            max_grad_norm=optimizer.clip_grad,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=max(optimizer.lr_warmup_steps or 0, 0),
            **{name: value for name, value in layout.items() if value is not None},
        )
        parallel.initialize(args, True)
        model = AutoModel.from_pretrained(self.model_config.local_path, args)
        self.session = Session(model, args)
        self.backend = self.session.backend
        self.optimizer = self.backend.create_optimizer()
        steps = max(optimizer.total_training_steps, args.warmup_steps + 1)
        self.schedule = get_megatron_lr_scheduler(args, steps, self.optimizer)

    # -- modes and places

    @property
    def is_param_offload_enabled(self):
        return self.engine_config.param_offload

    @property
    def is_optimizer_offload_enabled(self):
        return self.engine_config.optimizer_offload

    def train_mode(self, **kwargs):
        return Context(self, "train", **kwargs)

    def eval_mode(self, **kwargs):
        return Context(self, "eval", **kwargs)

    def to(self, device, model=True, optimizer=True, grad=True):
        super().to(device, model, optimizer, grad)
        self.session.to(device, model, optimizer, grad)

    def get_data_parallel_rank(self):
        return self.backend.dp_rank

    def get_data_parallel_size(self):
        return self.backend.dp_size

    def get_data_parallel_group(self):
        return mpu.get_data_parallel_group()

    def is_mp_src_rank_with_outputs(self):
        is_first = mpu.get_tensor_model_parallel_rank() == 0
        return is_first and self.backend.counts_tokens

    def disable_adapter(self):
        return self.backend.finetuning.without(self.session.model)

    # -- passes and updates

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        """The outputs of this replica's samples, in their order; {} on all but one of its ranks."""

        def given(name, otherwise=None):
            return data[name] if name in data.keys() else otherwise

        if "multi_modal_inputs" in data.keys():
            raise ValueError("multi_modal_inputs: this engine trains text alone")
        tokens = data["loss_mask"].values().sum().to(parallel.device())
        torch.distributed.all_reduce(tokens, group=self.get_data_parallel_group())
        sizes = {"dp_size": self.backend.dp_size, "batch_num_tokens": int(tokens)}
        assign_non_tensor(data, **sizes)
        temperatures = torch.as_tensor(given("temperature", 1.0)).unique().tolist()
        if len(temperatures) > 1:
            raise ValueError(f"temperature: expected one of all samples, got {temperatures}")
        masks = data["loss_mask"].unbind()
        samples = [_sample(*pair) for pair in zip(data["input_ids"].unbind(), masks, strict=True)]
        pass_keys = dict(temperature=temperatures[0], own=True)
        rows = self.session.log_probs(samples, entropy=True, **pass_keys)
        # the value at t is of the token at t + 1, of the last one nothing
        device = data["input_ids"].device
        rows = [torch.nn.functional.pad(row, (0, 0, 0, 1)).to(device) for row in rows]
        logps = [row[:, 0].clone().requires_grad_() for row in rows]
        entropies = [row[:, 1].clone().requires_grad_() for row in rows]
        output = {"log_probs": _jagged(logps)}
        if given("calculate_entropy", False):
            output["entropy"] = _jagged(entropies)
        loss, metrics = torch.tensor(1.0), {}
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=output, data=data, dp_group=group)
        if not forward_only:
            loss.backward()
            if any(one.grad is not None and one.grad.any() for one in entropies):
                raise ValueError("entropy_coeff: entropy has no gradient here: set it to 0")
            for sample, one in zip(samples, logps, strict=True):
                # verl's losses expect a mean over replicas, and a Session sums
                gradient = torch.zeros_like(one) if one.grad is None else one.grad
                sample["sampler_weight"] = -gradient[:-1] / self.backend.dp_size
            self.session.forward_backward(samples, "cross_entropy", **pass_keys)
        if not self.is_mp_src_rank_with_outputs():
            return {}
        output = {name: values.detach() for name, values in output.items()}
        metrics = {name: [value] for name, value in metrics.items()}
        return {"model_output": output, "loss": [float(loss.detach())], "metrics": metrics}

    def optimizer_zero_grad(self):
        self.session.discard()

    def optimizer_step(self):
        groups = self.optimizer.param_groups
        numbers = {name: groups[0][name] for name in ("lr", "betas", "eps") if name in groups[0]}
        decay = max(group["weight_decay"] for group in groups)
        step = self.session.optim_step(weight_decay=decay, denominator=1.0, **numbers)
        return step.grad_norm

    def lr_scheduler_step(self):
        self.schedule.step()
        return self.schedule.get_last_lr()[0]

    # -- weights and files

    def get_per_tensor_param(self, **unused):
        return iter(self.session.weights()), None

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, **unused):
        self.session.save(local_path)

    def load_checkpoint(self, local_path, hdfs_path=None, **unused):
        self.session.load(local_path)


def _sample(ids, mask):
    ids, mask = ids.cpu(), mask.cpu()
    return {"input_ids": ids[:-1], "labels": ids[1:].masked_fill(mask[1:] == 0, -100)}


def _jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
