"""Seconds from launch to the end of the first step, phase by phase:

    python -m tests.tools.bench_start [--shape 0.5B] [--ranks 1 2]

A model on disk in bf16 (random weights, the embedded tokenizer) and a JSONL of 4,000 conversations
are made first. Each line is a fresh launch of a command on the main rank's clock: ours by torchrun
on 1 and 2 ranks and by Python alone, then a plain script of Hugging Face's Trainer by Python alone.
Each is launched twice: at first without caches of tokens and compiled kernels (of tokens alone on a
machine that has run), then with them. "launch" is torchrun's own time and the interpreter's; the
imports come in the order of a run. "others" is the sum of what is not named. The first shape is of
a CPU.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"
RECORDS = 4000
_LAUNCHED, _RESULT = "BENCH_LAUNCHED", "BENCH_RESULT"


class Phases:
    """Seconds of named phases of this process, those of inner phases taken off."""

    def __init__(self):
        self.seconds: dict[str, float] = {"launch": time.time() - float(os.environ[_LAUNCHED])}
        self._inner = [0.0]

    def run(self, name, action, *args, **kwargs):
        self._inner.append(0.0)
        start = time.time()
        try:
            return action(*args, **kwargs)
        finally:
            took = time.time() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
            self._inner[-1] += took

    def wrap(self, name: str, owner, attribute: str) -> None:
        """Time each call of owner.attribute as this phase."""
        action = getattr(owner, attribute)
        timed = lambda *args, **kwargs: self.run(name, action, *args, **kwargs)  # noqa: E731
        setattr(owner, attribute, timed)

    def end(self) -> None:
        """Write the phases, of the main rank, when the first step is done."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        total = time.time() - float(os.environ[_LAUNCHED])
        self.seconds |= {"others": total - sum(self.seconds.values()), "first step done": total}
        if os.environ.get("RANK", "0") == "0":
            Path(os.environ[_RESULT]).write_text(json.dumps(self.seconds))


def ours(words: list[str]) -> int:
    """A rank of ours, as train.py."""
    from importlib import import_module

    phases = Phases()
    for name in ("torch", "transformers"):
        phases.run(f"import {name}", import_module, name)
    phases.run("import megatron", import_module, "mca_lite.mcore")
    for name in ("run", "generation", "tool_page"):
        phases.run("import mca_lite", import_module, f"mca_lite.{name}")
    from mca_lite import cli, model, parallel, run, weights_convert
    from mca_lite.callbacks import TrainerCallback
    from mca_lite.trainer import McaTrainer

    phases.wrap("keys", cli, "parse_args")
    phases.wrap("data", run, "load_datasets")
    phases.wrap("plan", run, "make_plan")
    phases.wrap("process group", parallel, "initialize")
    phases.wrap("model", model, "build_chunks")
    phases.wrap("weights", weights_convert, "fill")
    phases.wrap("optimizer", McaTrainer, "create_optimizer")
    phases.wrap("first step", McaTrainer, "training_step")

    class End(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            phases.end()

    train = run.train
    run.train = lambda plan, callbacks: train(plan, [*callbacks, End()])
    return cli.main(words)


def theirs(folder: str, records: str) -> None:
    """A plain script of Hugging Face's Trainer."""
    phases = Phases()
    from importlib import import_module

    torch = phases.run("import torch", import_module, "torch")
    transformers = phases.run("import transformers", import_module, "transformers")
    trainer_of = phases.run("import transformers", getattr, transformers, "Trainer")
    cuda = torch.cuda.is_available()

    def read():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        samples = []
        for line in Path(records).read_text().splitlines():
            text = "\n".join(message["content"] for message in json.loads(line)["messages"])
            ids = tokenizer(text)["input_ids"][:1024]
            samples.append(dict(input_ids=ids, labels=ids))
        return tokenizer, samples

    class End(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            phases.end()

    tokenizer, samples = phases.run("data", read)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = phases.run("weights", load, folder, dtype=torch.bfloat16 if cuda else torch.float32)
    args = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=1,
        per_device_train_batch_size=8,
        bf16=cuda,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not cuda,
    )
    collate = transformers.DataCollatorForSeq2Seq(tokenizer, padding=True)
    make = dict(model=model, args=args, train_dataset=samples, data_collator=collate)
    trainer = phases.run("trainer", lambda: trainer_of(**make, callbacks=[End()]))
    phases.wrap("first step", trainer, "training_step")
    trainer.train()


def make(shape: str, folder: Path) -> list[str]:
    """Write model and data -> the words of a run of ours."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tools.bench_gpu import hf_config

    model = AutoModelForCausalLM.from_config(hf_config(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "model" / name, folder / "model" / name)
    lines = (TINY / "sft.jsonl").read_text().splitlines()
    lines = (lines * (RECORDS // len(lines) + 1))[:RECORDS]
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    keys = dict(
        model_name_or_path=folder / "model",
        dataset=folder / "records.jsonl",
        cache_dir=folder / "cache",
        stage="sft",
        cutoff_len=1024,
        sequence_packing="true",
        per_device_train_batch_size=8,
        max_steps=1,
        save_strategy="no",
        save_hf_model="false",
        bf16=str(torch.cuda.is_available()).lower(),
    )
    return [f"{key}={value}" for key, value in keys.items()]


def launch(command: list[str], folder: Path) -> dict[str, float]:
    """The phases of a command."""
    result = folder / "phases.json"
    result.unlink(missing_ok=True)
    environment = {**os.environ, _LAUNCHED: str(time.time()), _RESULT: str(result)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    if not result.is_file():
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(result.read_text())


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(ours(sys.argv[2:]))
    if sys.argv[1:2] == ["--rival"]:
        sys.exit(theirs(*sys.argv[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="8M", help="of bench_gpu.SHAPES")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone".split()]
    me = ["-m", "tests.tools.bench_start"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = make(options.shape, folder)
        rank = [*me, "--rank", *words, "overwrite_output_dir=true"]
        commands = {
            f"ours, {ranks} ranks": [
                *torchrun, "--local_addr", "127.0.0.1", "--nproc_per_node", str(ranks), *rank,
                f"output_dir={folder}/run{ranks}",
            ]
            for ranks in options.ranks
        }  # fmt: skip
        commands["ours, Python alone"] = [sys.executable, *rank, f"output_dir={folder}/run"]
        files = [str(folder / "model"), str(folder / "records.jsonl")]
        commands["Hugging Face"] = [sys.executable, *me, "--rival", *files]
        for name, command in commands.items():
            for kind in ("first", "again"):
                found = launch(command, folder)
                shown = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found.items())
                print(f"{name}, {kind}: {shown}", flush=True)


if __name__ == "__main__":
    main()
