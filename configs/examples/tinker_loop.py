"""The training half of a loop written for Tinker, on a Session, for completions that were sampled
elsewhere: Datum, forward_backward, optim_step and .result(); rewards centred as in rl_loop. A line
of the file is a group: {"prompt": ids, "completions": [{"tokens": ids, "logprobs": numbers,
"reward": number}]}. Losses are sums. Tokens with advantage or weight 0 have the log-probability 0.

    torchrun --nproc_per_node 2 configs/examples/tinker_loop.py completions.jsonl configs/sft.yaml \
        tensor_model_parallel_size=2 global_batch_size=64 output_dir=output/tinker
"""

import json
import sys
from typing import Any, NamedTuple

import torch

from mca_lite import Session, parallel, run
from mca_lite.args import parse_args


class Datum(NamedTuple):
    model_input: list[int]
    loss_fn_inputs: dict[str, Any]  # target_tokens; weights, or logprobs and advantages


class AdamParams(NamedTuple):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: no clipping


class ForwardBackwardOutput(NamedTuple):
    loss_fn_outputs: list[dict[str, torch.Tensor]]
    metrics: dict[str, float]

    def result(self):  # every rank has made the call at once
        return self


class TrainingClient:
    def __init__(self, session):
        self.session = session

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        given = loss_fn_config or {}
        numbers = {}
        if loss_fn == "ppo":
            numbers["clip_low"] = 1 - given.get("clip_low_threshold", 0.8)
            numbers["clip_high"] = given.get("clip_high_threshold", 1.2) - 1
        found = self.session.forward_backward([*map(sample_of, data)], loss_fn, **numbers)
        outputs = [{"logprobs": logps} for logps in found.logps]
        return ForwardBackwardOutput(outputs, {"loss:sum": found.sums["loss"][0]})

    def optim_step(self, adam):
        lr, *betas, eps, decay, norm = adam
        step = self.session.optim_step(lr, tuple(betas), eps, decay, norm, denominator=1.0)
        return ForwardBackwardOutput([], {"grad_norm": step.grad_norm})


def sample_of(datum):
    given = {name: torch.as_tensor(values) for name, values in datum.loss_fn_inputs.items()}
    names = {"weights": "sampler_weight", "advantages": "advantage", "logprobs": "old_logp"}
    columns = {names[name]: given[name] for name in names if name in given}
    weights = given.get("weights", given.get("advantages"))
    labels = given["target_tokens"].masked_fill(weights == 0, -100)
    return {"input_ids": datum.model_input, "labels": labels, **columns}


def datums_of(prompt, completions):
    mean = sum(one["reward"] for one in completions) / len(completions)
    before = [0] * (len(prompt) - 1)
    for one in completions:
        inputs = {"target_tokens": before + one["tokens"], "logprobs": before + one["logprobs"]}
        inputs["advantages"] = before + [one["reward"] - mean] * len(one["tokens"])
        if one["reward"] != mean:
            yield Datum(prompt + one["tokens"][:-1], inputs)


def loop(file, words):
    plan = run.make_plan(parse_args(words))
    args = plan.arguments.training
    parallel.initialize(args, plan.arguments.use_mca)
    client = TrainingClient(Session(run.build_model(plan), args, plan.tokenizer))
    with open(file) as lines:
        groups = [json.loads(line) for line in lines]
    size = args.train_global_batch_size
    for i in range(0, len(groups), size):
        if data := [one for group in groups[i : i + size] for one in datums_of(**group)]:
            passed = client.forward_backward(data, "importance_sampling")
            updated = client.optim_step(AdamParams(args.learning_rate))
            yield {**passed.result().metrics, **updated.result().metrics}


if __name__ == "__main__":
    for metrics in loop(sys.argv[1], sys.argv[2:]):
        print(metrics)
    parallel.shutdown()
