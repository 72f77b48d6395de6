"""KTO and distillation on one GPU, beside rivals: `python -m tests.tools.bench_objectives`;
names of cases and trainers pick some of them.

KTO: 16 answers of up to 1,024 tokens a step, in micro-batches of 8, beside mismatched documents;
its rival is TRL's KTOTrainer with Liger's layers, given the same tokens. Distillation: a teacher of
4B and a student of 0.5B, 8 rows of 4,096 a step in micro-batches of 4, forward KL; its rival is a
plain loop over transformers' models with Liger's layers and its fused divergence. Each trainer runs
in a process of its own, with random weights and new tokens in each step. bf16 weights; here with
float32 masters, gradients and moments. Of KTO the tokens of answers with their prompts count.
TINY=1 runs the same at a size for a CPU, without Liger there.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .bench_gpu import TINY, Clock, hf_config, model_of, peak_gib, write
from .bench_policy import Stub, import_trl, theirs_of, tokenizer_of

STEPS, SKIP = 9, 4
ROWS, MBS = {"KTO 1.5B": 16, "distill 4B into 0.5B": 8}, {"KTO 1.5B": 8, "distill 4B into 0.5B": 4}
RIVALS = {"KTO 1.5B": "trl-liger", "distill 4B into 0.5B": "liger"}
# the trained model; the reference or teacher
SHAPES = {"KTO 1.5B": ("1.5B", "1.5B"), "distill 4B into 0.5B": ("0.5B", "4B")}
CUDA = torch.cuda.is_available


def answers() -> list[dict]:
    """Prompts of 128 to 512 tokens and answers that fill up 1,024 or less, desirable in turn; in
    each micro-batch the answer before is a prompt's mismatched one."""
    rng, shrink = np.random.default_rng(0), 16 if TINY else 1
    vocab_size = hf_config(SHAPES["KTO 1.5B"][0]).vocab_size
    found = []
    for number in range(ROWS["KTO 1.5B"] * STEPS):
        length = int(rng.integers(768, 1025)) // shrink
        prompt = int(rng.integers(128, 513)) // shrink
        ids = rng.integers(1, vocab_size, length).tolist()
        found.append(dict(prompt=ids[:prompt], answer=ids[prompt:], label=number % 2 == 0))
    return found


def rows() -> list[dict]:
    """Rows of 4,096 tokens, with shifted labels for all of them."""
    rng = np.random.default_rng(0)
    vocab_size = hf_config(SHAPES["distill 4B into 0.5B"][0]).vocab_size
    found = []
    for _ in range(ROWS["distill 4B into 0.5B"] * STEPS):
        ids = torch.from_numpy(rng.integers(0, vocab_size, (64 if TINY else 4096) + 1))
        found.append(dict(input_ids=ids[:-1], labels=ids[1:]))
    return found


def sample_of(one: dict) -> list[dict]:
    ids = torch.tensor(one["prompt"] + one["answer"])
    labels = ids[1:].clone()
    labels[: len(one["prompt"]) - 1] = -100
    return [dict(input_ids=ids[:-1], labels=labels, answer_label=int(one["label"]))]


def ticks_of(callback: type, clock: Clock) -> Any:
    """An instance of a class of callbacks that tells the clock of each step."""

    class Ticks(callback):
        def on_train_begin(self, *args, **kwargs):
            clock.begin()

        def on_step_end(self, *args, **kwargs):
            clock.tick()

    return Ticks()


def of_run(case: str) -> dict:
    """Training arguments that this project's trainers and TRL's have alike."""
    return dict(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=MBS[case],
        gradient_accumulation_steps=ROWS[case] // MBS[case],
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        bf16=CUDA(),
        save_strategy="no",
        disable_tqdm=True,
    )


def run_ours(case: str) -> tuple[Clock, list]:
    from mca_lite import TrainingArguments, parallel
    from mca_lite.callbacks import TrainerCallback
    from mca_lite.part_distill import DistillConfig, DistillTrainer
    from mca_lite.part_kto import KTOConfig, KTOTrainer

    clock = Clock()
    with contextlib.redirect_stdout(io.StringIO()):
        args = TrainingArguments(**of_run(case))
        parallel.initialize(args)
        models = []
        for shape in SHAPES[case]:
            folder = tempfile.mkdtemp()
            hf_config(shape).save_pretrained(folder)
            models.append(model_of(folder, args, True, None, 0))
        shared = dict(callbacks=[ticks_of(TrainerCallback, clock)], shuffle=False)
        trainer: Any
        if case == "KTO 1.5B":
            data = [sample_of(one) for one in answers()]
            trainer = KTOTrainer(
                models[0],
                KTOConfig(reference="model"),
                models[1],
                args,
                train_dataset=data,
                **shared,
            )
        else:
            trainer = DistillTrainer(
                models[0], DistillConfig(), models[1], args, train_dataset=rows(), **shared
            )
        trainer.train()
    return clock, [log for log in trainer.state.log_history if "loss" in log]


def run_trl(case: str) -> tuple[Clock, list]:
    """TRL's KTOTrainer over the tokens of answers(), with a reference model in memory."""
    import_trl()
    import datasets

    if isinstance(datasets, Stub):
        datasets.__path__ = []
        sys.modules["datasets.fingerprint"] = Stub("datasets.fingerprint")
    from transformers import TrainerCallback
    from trl import KTOConfig, KTOTrainer

    class Given(KTOTrainer):
        def _prepare_dataset(self, dataset, *unused):
            return dataset

    data = []
    for number, one in enumerate(answers()):
        data.append(
            dict(prompt_ids=one["prompt"], completion_ids=one["answer"], label=one["label"])
        )
        first = number // MBS[case] * MBS[case]
        before = number - 1 if number > first else first + MBS[case] - 1
        data[-1]["KL_completion_ids"] = before
    for row in data:
        row["KL_completion_ids"] = data[row["KL_completion_ids"]]["completion_ids"]
    if isinstance(datasets, Stub):
        data = type(
            "Rows", (list, datasets.Dataset), {"column_names": [*data[0]], "cache_files": []}
        )(data)
    else:
        data = datasets.Dataset.from_list(data)
    clock = Clock()
    args = KTOConfig(
        **of_run(case),
        gradient_checkpointing=False,
        optim="adamw_torch_fused" if CUDA() else "adamw_torch",
        use_liger_kernel=CUDA(),
        report_to=[],
        remove_unused_columns=False,
    )
    dtype = torch.bfloat16 if CUDA() else torch.float32
    policy, reference = (theirs_of(shape, dtype) for shape in SHAPES[case])
    trainer = Given(
        model=policy,
        ref_model=reference,
        args=args,
        train_dataset=data,
        processing_class=tokenizer_of(),
        callbacks=[ticks_of(TrainerCallback, clock)],
    )
    trainer.train()
    return clock, [log for log in trainer.state.log_history if "loss" in log]


def divergence_of_logits(student, weight, teacher, of_teacher, labels):
    """Forward KL over rows of hidden states, by whole logits: what Liger computes in pieces."""
    known = torch.nn.functional.linear(teacher, of_teacher).float().log_softmax(-1)
    own = torch.nn.functional.linear(student, weight).float().log_softmax(-1)
    return (known.exp() * (known - own)).sum(-1).mean()


def run_loop(case: str) -> tuple[Clock, list]:
    """A plain loop: hidden states of both models, then Liger's divergence over their heads."""
    dtype, device = (torch.bfloat16, "cuda") if CUDA() else (torch.float32, "cpu")
    student, teacher = (theirs_of(shape, dtype) for shape in SHAPES[case])
    student.train(), teacher.eval().requires_grad_(False)
    divergence: Callable[..., torch.Tensor] = divergence_of_logits
    if CUDA():
        from liger_kernel.transformers import LigerFusedLinearJSD
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        for model in (student, teacher):
            _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)
        divergence = LigerFusedLinearJSD(jsd_beta=0.0)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=1e-5, weight_decay=0.1, fused=device == "cuda"
    )
    data, clock, logs = rows(), Clock(), []
    clock.begin()
    for step in range(STEPS):
        total = 0.0
        for start in range(0, ROWS[case], MBS[case]):
            first = step * ROWS[case] + start
            batch = data[first : first + MBS[case]]
            ids, labels = (
                torch.stack([row[key] for row in batch]).to(device)
                for key in ("input_ids", "labels")
            )
            with torch.no_grad():
                known = teacher.base_model(input_ids=ids, use_cache=False)[0].flatten(0, 1)
            own = student.base_model(input_ids=ids, use_cache=False)[0].flatten(0, 1)
            heads = student.lm_head.weight, teacher.lm_head.weight
            loss = divergence(own, heads[0], known, heads[1], labels.flatten())
            loss = loss * MBS[case] / ROWS[case]
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logs.append(dict(loss=total, grad_norm=float(norm)))
        clock.tick()
    return clock, logs


def measure(case: str, trainer: str) -> dict:
    run = run_ours
    if trainer != "ours":
        run = run_trl if case == "KTO 1.5B" else run_loop
    clock, logs = run(case)
    tokens = (
        sum(len(row["input_ids"]) for row in rows()[: ROWS[case]])
        if case == "distill 4B into 0.5B"
        else 0
    )
    if case == "KTO 1.5B":  # a step's mean, since each has new answers
        tokens = sum(len(one["prompt"] + one["answer"]) for one in answers()) // STEPS
    return dict(
        case=case,
        trainer=trainer,
        **clock.rates(tokens, SKIP),
        peak_gib=peak_gib(),
        step_ms=[round(1e3 * t) for t in clock.times],
        losses=[round(float(log["loss"]), 5) for log in logs],
        grad_norms=[round(float(log["grad_norm"]), 4) for log in logs],
    )


def _child(case: str, trainer: str) -> None:
    try:
        write(measure(case, trainer))
    except BaseException as error:
        traceback.print_exc()
        write(dict(case=case, trainer=trainer, failed=f"{type(error).__name__}: {error}"[:300]))
    sys.stdout.flush()
    os._exit(0)


def main(names: list[str]) -> int:
    known = (*RIVALS, "ours", *RIVALS.values())
    if unknown := [name for name in names if name not in known]:
        print(f"unknown: {', '.join(unknown)}; expected {', '.join(known)}")
        return 2
    for case in [name for name in RIVALS if name in names] or RIVALS:
        trainers = ("ours", RIVALS[case])
        for trainer in [name for name in trainers if name in names] or trainers:
            process = multiprocessing.get_context("fork").Process(
                target=_child, args=(case, trainer)
            )
            process.start()
            process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
