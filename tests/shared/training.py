"""One short training run on this rank, in any layout and on either backend: what the parity tests
compare.
"""

import contextlib
import functools
import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.shared import tiny
from tests.shared.layouts import SAVE

TOLERANCE = 1e-5  # float32, summed in another order
GLOBAL_BATCH, COUNT = 4, 11  # the last step of an epoch has three samples: ranks hold fillers
# The shortest run of which every update is seen: that of a whole window in the next loss, that of
# three samples and a filler in the exported weights. A warm-up's first update would change nothing.
BRIEF = dict(steps=2, count=7, warmup_steps=0)
NUMBERS = (
    "expert_load_max",
    "expert_load_min",
    "load_balancing_loss",
    "seq_load_balancing_loss",
    "z_loss",
)


def most(numbers: Iterable[float]) -> float:
    """The largest number, or NaN if there is one, which max() may pass over; 0 without numbers."""
    return float(np.max(list(numbers), initial=0.0))


def train(
    model_path,
    output_dir,
    backend="megatron",
    export=False,
    steps=None,
    count=COUNT,
    adapt=None,
    callbacks=None,
    vocab_size=None,
    trainer_class=None,
    data=None,
    **changes,
) -> list:
    """(loss, grad norm) of each logged step of a run with weight decay, clipping, warm-up and
    uneven masks.

    adapt: what is done to the model before the trainer gets it. vocab_size: new tokens, which the
    samples hold too. The last step of an epoch of `count` samples is a partial window with fillers.
    data: samples in place of those, in their order.
    """
    from mca_lite.args import TrainingArguments
    from mca_lite.model import AutoModel, load_torch_model
    from mca_lite.trainer import McaTrainer

    keys = dict(
        output_dir=output_dir,
        global_batch_size=GLOBAL_BATCH,
        max_steps=steps or 4,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        lr_scheduler_kwargs={"min_lr": 1e-3},
        warmup_steps=1,
        weight_decay=0.1,
        max_grad_norm=0.5,
        adam_epsilon=1e-5,  # 1e-8 amplifies the rounding of near-zero gradients
        adam_beta2=0.95,
        save_strategy="no",
        max_shard_size="20KB",
        disable_tqdm=True,
    )
    args = TrainingArguments(**{**keys, **changes})
    load = (
        functools.partial(AutoModel.from_pretrained, args=args)
        if backend == "megatron"
        else load_torch_model
    )
    model = load(model_path, vocab_size=vocab_size)
    tiny.VOCAB = vocab_size or tiny.VOCAB  # of this process, which is the test's own
    model = adapt(model) if adapt is not None else model
    given = dict(train_dataset=tiny.samples(count), eval_dataset=tiny.samples(9, seed=2))
    if data is not None:
        given = dict(train_dataset=data, shuffle=False)
    trainer = (trainer_class or McaTrainer)(model=model, args=args, callbacks=callbacks, **given)
    trainer.train()
    if export:
        trainer.save_model()
    history = trainer.state.log_history
    evals = [("eval", h["eval_loss"]) for h in history if "eval_loss" in h]
    return [(h["loss"], h["grad_norm"]) for h in history if "loss" in h] + evals


def whole_and_resumed(path: str, out: str, first=None, then=None, **keys) -> tuple[list, list]:
    """(curve, the same of a run that died after its second step and went on) of four steps.

    first, then: keys of the run that died, and of the one that went on.
    """
    keys = {"steps": 4, **SAVE, **keys}
    whole = train(path, out, **keys, **(first or {}))
    for folder in Path(out).glob("checkpoint-*"):
        if folder.name != "checkpoint-2":
            shutil.rmtree(folder, ignore_errors=True)  # another rank may be at it
    return whole, train(path, out, resume_from_checkpoint="auto", **keys, **(then or {}))


def arguments(**keys):
    """The TrainingArguments of a run that writes nothing."""
    from mca_lite.args import TrainingArguments

    return TrainingArguments(output_dir="unused", **keys)


def read_log(output_dir: str) -> list[dict]:
    with open(f"{output_dir}/trainer_log.jsonl") as file:
        return [json.loads(line) for line in file]


def assert_same_curve(got, wanted, tolerance=TOLERANCE):
    assert len(got) == len(wanted)
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        for name, a, b in zip(("loss", "grad norm"), ours, theirs, strict=True):
            assert abs(a - b) <= tolerance * max(1.0, abs(b)), (
                f"step {step}: {name} {a} instead of {b}"
            )


def refusal(function, *args, **keys) -> str:
    """The words of the ValueError that a call raises, "" if it raises none."""
    try:
        function(*args, **keys)
    except ValueError as error:
        return str(error)
    return ""


def attempt(path: str, out: str, **keys) -> tuple[str, str, list]:
    """(error or "", what was printed, curve) of a run."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            curve = train(path, out, **keys)
            return "", printed.getvalue(), curve
        except ValueError as error:
            return str(error), printed.getvalue(), []


def in_float32(model):
    """The model, in a process where Newton-Schulz iterates in float32, ours and torch's. In bf16 a
    gradient that is summed in another order rounds to a neighbour here and there, and five
    iterations multiply that by up to 3.4445 ** 5 = 485."""
    import torch

    torch.Tensor.bfloat16 = lambda tensor: tensor.float().clone()
    return model


class Clock:
    """A clock that shows what the test says."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now
