"""A step without a trainer: functions of a backend, its arguments and an objective give the loss
and the gradient's norm of a trainer's step, bit for bit.
"""

import functools

import pytest
import torch

from tests.shared import tiny, world
from tests.shared.layouts import CP2, PACKED, PP2, TP2_SP
from tests.shared.training import arguments

ROWS = 4
COEFFICIENT = 1e-2  # of the squared logsumexp


def z_loss(logits) -> torch.Tensor:
    return logits.cross_entropy() + COEFFICIENT * logits.logsumexp().square()


class PlainObjective:
    """The six members of an objective, and nothing else."""

    metrics_keys = ["loss"]
    _loss_of_logits = staticmethod(z_loss)

    def __init__(self, backend, args):
        self.backend = backend
        self.args = args

    def _arrange(self, batch):
        from mca_lite.step import arrange

        return arrange(self.backend, self.args, batch)

    def _pre_compute_loss(self, batch, inputs):
        return functools.partial(self._post_compute_loss, inputs["labels"])

    def _post_compute_loss(self, labels, losses):
        from mca_lite.step import sum_losses

        return sum_losses(self.backend, labels, losses)

    def _count_of_loss(self, batch):
        from mca_lite.step import count_labels

        return count_labels(batch)


def load(path: str, backend: str, args):
    from mca_lite.model import AutoModel, load_torch_model

    return load_torch_model(path) if backend == "torch" else AutoModel.from_pretrained(path, args)


def batches_of(args) -> list[dict]:
    """The data collator's micro-batches of this rank's step."""
    from mca_lite.data_batches import Collator, Limits, check_batch

    size = args.per_device_train_batch_size
    samples = tiny.samples(ROWS)
    groups = [samples[first : first + size] for first in range(0, ROWS, size)]
    collated = [Collator(0)([dict(sample) for sample in group]) for group in groups]
    return [check_batch(batch, args.sequence_packing, Limits()) for batch in collated]


def numbers_of(metrics: list[dict], grad_norm: float) -> tuple:
    """((sum, count) of the losses, [] before the last pipeline stage; the gradient's norm)."""
    return [of_batch["loss"].tolist() for of_batch in metrics], grad_norm


def step_without_trainer(path: str, backend_name: str, args) -> tuple:
    from mca_lite import parallel
    from mca_lite.backend_megatron import MegatronBackend
    from mca_lite.backend_torch import TorchBackend
    from mca_lite.step import arrange_step, compute_gradients, forward_step, measure
    from mca_lite.trainer_events import Phases

    parallel.start_process_group(args.ddp_timeout)
    kind = TorchBackend if backend_name == "torch" else MegatronBackend
    backend = kind(load(path, backend_name, args), args)
    backend.use_timers(Phases(waits_in_model=False).timer)
    backend.create_optimizer()
    objective = PlainObjective(backend, args)
    batches = arrange_step(backend, objective, batches_of(args))
    run = functools.partial(forward_step, backend, args, objective)
    metrics = compute_gradients(backend, objective, run, batches)
    with torch.no_grad():
        sums = [of_batch["loss"].tolist() for of_batch in measure(backend, run, batches)]
    _, grad_norm, _ = backend.step()
    return numbers_of(metrics, grad_norm), sums


def step_of_trainer(path: str, backend_name: str, args) -> tuple:
    from mca_lite import McaTrainer

    class ZLossTrainer(McaTrainer):
        def _loss_of_logits(self, logits):
            return z_loss(logits)

    model = load(path, backend_name, args)
    trainer = ZLossTrainer(model, args, train_dataset=tiny.samples(ROWS))
    if not args.calculate_per_token_loss:
        trainer.backend.micro_batch_weight = 3.0  # of an earlier step, such as an evaluation's
    _, metrics, _, grad_norm, _ = trainer.training_step(trainer.models, batches_of(args), 0)
    return numbers_of(metrics, grad_norm)


def both_steps(path: str, backend: str, keys: dict) -> tuple:
    args = arguments(global_batch_size=ROWS, max_steps=1, max_grad_norm=0.5, **keys)
    found, sums = step_without_trainer(path, backend, args)
    return found, sums, step_of_trainer(path, backend, args)


@pytest.mark.parametrize(
    ("ranks", "backend", "keys"),
    [
        (2, "megatron", {**TP2_SP, **PACKED}),
        (2, "megatron", {**CP2, "calculate_per_token_loss": False}),
        (2, "megatron", PP2),
        (1, "torch", PACKED),
    ],
    ids=["tp2_sp_packed", "cp2_mean_of_micro_batches", "pp2", "torch"],
)
def test_a_step_of_any_objective_needs_no_trainer(tmp_path, ranks, backend, keys):
    path = tiny.save_model(tmp_path / "model", "qwen3")
    for found, sums, wanted in world.run(both_steps, ranks, path, backend, keys):
        assert found == wanted
        assert wanted[1] > 0
        if keys.get("calculate_per_token_loss", True):  # training logs a mean of each otherwise
            assert sums == wanted[0]
