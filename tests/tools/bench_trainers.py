"""`make bench ARGS=trainers`: training speed on a CPU beside Hugging Face's Trainer, TRL and peft.

The models, rows and clocks are those of bench_gpu.py, at a size for a CPU; each run has a process
of its own, with one thread, whose own seconds count. Tokens are real ones: no padding. What is not
installed (the extra `bench`) is named and left out.
"""

import contextlib
import functools
import importlib.util
import io
import tempfile

import torch

from tests.shared import world
from tests.shared.commands import without_launcher
from tests.tools.bench_gpu import Clock, document_lengths, fill, hf_config, run_ours, run_theirs

SIZE = dict(shape="8M", mbs=2, rows=4, s=256, steps=8)
SKIP = 3
CASES = {"full rows": {}, "packed": dict(packed=True), "LoRA of rank 16": dict(lora=16)}


def rate(run, keys: dict) -> float:
    """Tokens a second of the median step after the first ones. run(**keys) -> (Clock, log, tokens
    of a step, ...)
    """
    clock, _, tokens, *_ = run(**keys)
    return tokens / clock.median(SKIP)


def rate_alone(run, keys: dict) -> float:
    """rate() of a trainer that starts its own world, or none."""
    torch.distributed.destroy_process_group()
    without_launcher()
    return rate(run, keys)


def run_trl(shape, mbs, rows, s, steps, packed=True):
    """TRL's SFTTrainer over documents of the same lengths, which it packs itself; mbs: rows of a
    micro-batch.
    """
    import transformers
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from tests.shared.toy_tokenizer import word_tokenizer

    transformers.utils.logging.set_verbosity_error()
    config, clock = hf_config(shape), Clock()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model.named_parameters())
    lengths = document_lengths(steps * rows * s * 1.2, s, mean=s // 4)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

    class Ticks(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.begin()

        def on_step_end(self, *args, **kwargs):
            clock.tick()

    args = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, logging_steps=1,
        per_device_train_batch_size=mbs,
        gradient_accumulation_steps=rows // mbs, learning_rate=1e-5, lr_scheduler_type="constant",
        weight_decay=0.1,
        bf16=False, save_strategy="no", disable_tqdm=True, report_to=[], optim="adamw_torch",
        use_cpu=True,
        packing=packed, max_length=s, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model, args, train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=word_tokenizer(), callbacks=[Ticks()],
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    log = [line for line in trainer.state.log_history if "num_tokens" in line]
    return clock, log, log[-1]["num_tokens"] / steps


def rivals(case: str) -> dict:
    """{name: (what it needs, run, its own keys)}"""
    if case == "packed":
        return {
            "Hugging Face's Trainer, our packs": ("accelerate", run_theirs, dict(mbs=1)),
            "TRL, packing": ("trl", run_trl, dict(mbs=1)),
        }
    if "LoRA" in case:
        return {"Hugging Face's Trainer and peft": ("peft", run_theirs, {})}
    return {"Hugging Face's Trainer": ("accelerate", run_theirs, {})}


def main() -> None:
    print(f"8M parameters, {SIZE['rows']} rows of {SIZE['s']} tokens a step, float32, one thread")
    print(f"  {'':58} {'real tokens/s':>14} {'ratio':>6}")
    for case, own in CASES.items():
        keys, base = {**SIZE, **own}, None
        for name, (package, run, changes) in rivals(case).items():
            if importlib.util.find_spec(package) is None:
                print(
                    f"  {f'{case}, {name}':58} {package} is not installed: the extra `bench` has it"
                )
                continue
            speed = world.run(rate_alone, 1, run, {**keys, **changes}, timeout_s=500)[0]
            base = base or speed
            print(f"  {f'{case}, {name}':58} {speed:14,.0f} {speed / base:6.2f}", flush=True)
        for name, use_mca in (("megatron-core", True), ("plain torch", False)):
            ours = functools.partial(run_ours, use_mca=use_mca)
            speed = world.run(rate, 1, ours, keys, timeout_s=500)[0]
            base = base or speed
            print(
                f"  {f'{case}, mca_lite on {name}':58} {speed:14,.0f} {speed / base:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
