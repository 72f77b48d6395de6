"""An update of policy training on given completions, beside TRL's GRPOTrainer: `python -m
tests.tools.bench_policy 1.5B 30B-A3B`; names of trainers pick some of them.

Each trainer runs in a process of its own, with random weights, prompts and completions, and makes
each step in two timed passes: log-probabilities without gradients, and a GRPO update. `ours` is a
Session, `ours-packed` one with sequence_packing; `trl` is GRPOTrainer with its chunked head, and
`trl-liger` that with Liger's layers; its completions are given to it in place of generated ones.
Tokens are those of prompts and completions, without padding. bf16 weights; here with float32
masters, gradients and moments. `gap` prints how far bf16 log-probabilities are from a float32 run
of transformers. TINY=1 runs the same at a size for a CPU.
"""

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import types

import numpy as np
import torch

from .bench_gpu import TINY, fill, hf_config, peak_gib, write

# answers: of an update; mbs: rows of a micro-batch
CASES = {
    "1.5B": dict(shape="1.5B", answers=32, mbs=8),
    "30B-A3B": dict(shape="30B-A3B", answers=16, mbs=4, lora=16),
}
TRAINERS = ("ours", "ours-packed", "trl", "trl-liger")
GROUP = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def rollouts(config, answers: int) -> list[dict]:
    """Prompts of 64 to 512 tokens, GROUP completions of each, log-normal with mean 512, at most
    1,536; a normal advantage each."""
    rng = np.random.default_rng(0)
    shrink = 16 if TINY else 1
    found = []
    for _ in range(answers // GROUP):
        prompt = rng.integers(1, config.vocab_size, int(rng.integers(64, 512)) // shrink)
        for _ in range(GROUP):
            length = int(np.clip(rng.lognormal(np.log(512) - 0.245, 0.7), 16, 1536)) // shrink
            completion = rng.integers(1, config.vocab_size, max(length, 2))
            found.append(dict(prompt=prompt, completion=completion, advantage=rng.normal()))
    return found


def sample_of(rollout: dict) -> dict:
    ids = np.concatenate([rollout["prompt"], rollout["completion"]])
    labels = ids[1:].copy()
    labels[: len(rollout["prompt"]) - 1] = -100
    return dict(
        input_ids=ids[:-1].tolist(), labels=labels.tolist(), advantage=float(rollout["advantage"])
    )


def tokens_of(found: list[dict]) -> int:
    return sum(len(one["prompt"]) + len(one["completion"]) for one in found)


class Watch:
    """Seconds of passes, with a wait for the device at both ends."""

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    def time(self, name: str, function):
        self.wait()
        start = time.perf_counter()
        found = function()
        self.wait()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return found

    def wait(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def rates(self, tokens: int, skip: int) -> dict[str, int]:
        """Tokens/s of each pass by the median after the first `skip`."""
        return {
            f"{k}_per_second": round(tokens / np.median(v[skip:])) for k, v in self.seconds.items()
        }


def session_of(shape: str, mbs: int, lora: int, packed: bool):
    from mca_lite import AutoConfig, Session, TrainingArguments, parallel
    from mca_lite.model import build_chunks
    from mca_lite.part_lora import inject
    from mca_lite.part_lora_layers import LoraSpec

    folder = tempfile.mkdtemp()
    config = hf_config(shape)
    config.save_pretrained(folder)
    args = TrainingArguments(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=1 if packed else mbs,
        learning_rate=1e-6,
        bf16=torch.cuda.is_available(),
        sequence_packing=packed,
    )
    parallel.initialize(args, True)
    models = build_chunks(AutoConfig.from_pretrained(folder, args))
    fill(models.named_parameters())
    if lora:
        inject(models, LoraSpec(rank=lora, alpha=2 * lora, targets=ATTENTION))
    return Session(models, args)


def run_ours(shape, answers, mbs, steps, lora=0, packed=False) -> tuple[Watch, int, list]:
    watch = Watch()
    session = session_of(shape, mbs, lora, packed)
    found = rollouts(hf_config(shape), answers)
    samples = [sample_of(one) for one in found]
    norms = []

    def update(old):
        rows = [
            {**sample, "old_logp": logp.tolist()} for sample, logp in zip(samples, old, strict=True)
        ]
        session.forward_backward(rows, "grpo", clip_low=0.2, clip_high=0.2, last=True)
        norms.append(session.optim_step().grad_norm)

    for _ in range(steps):
        old = watch.time("log_probs", lambda: session.log_probs(samples))
        watch.time("update", lambda old=old: update(old))
    return watch, tokens_of(found), norms


class Stub(types.ModuleType):
    """A module whose classes are empty."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def import_trl():
    """TRL's GRPOTrainer; what it imports for files of data, where it is missing, is empty."""
    for name in ("datasets", "pandas"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = Stub(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name].__version__ = "4.7.0"
    from trl import GRPOConfig, GRPOTrainer

    return GRPOConfig, GRPOTrainer


def _dataset(rows: list[dict]):
    """The rows as an instance of datasets.Dataset, or of what stands in for it."""
    import datasets

    if isinstance(datasets, Stub):
        made = type(
            "Rows", (list, datasets.Dataset), {"column_names": ["prompt"], "cache_files": []}
        )
        return made(rows)
    return datasets.Dataset.from_list(rows)


def tokenizer_of():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "a": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


def padded(rows: list, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(0, len(row))
        ids[number, place] = torch.from_numpy(row)
        mask[number, place] = 1
    return ids, mask


def theirs_of(shape: str, dtype):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = hf_config(shape)
    more = {"experts_implementation": "grouped_mm"} if hasattr(config, "num_experts") else {}
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **more)
    fill(model.named_parameters())
    return model


def run_trl(shape, answers, mbs, steps, lora=0, liger=False) -> tuple[Watch, int, list]:
    GRPOConfig, GRPOTrainer = import_trl()
    from transformers import TrainerCallback

    cuda = torch.cuda.is_available()
    watch = Watch()
    found = rollouts(hf_config(shape), answers)
    prompt_ids, prompt_mask = padded([one["prompt"] for one in found], left=True)
    completion_ids, completion_mask = padded([one["completion"] for one in found], left=False)
    given = dict(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        advantages=torch.tensor([one["advantage"] for one in found], dtype=torch.float32),
        num_items_in_batch=completion_mask.sum(),
    )

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            on_device = {name: values.to(self.accelerator.device) for name, values in given.items()}
            on_device["old_per_token_logps"] = watch.time("log_probs", lambda: self._old(on_device))
            watch.wait()
            self.started = time.perf_counter()
            return on_device

        @torch.no_grad()
        def _old(self, given):
            ids = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
            mask = torch.cat([given["prompt_mask"], given["completion_mask"]], 1)
            size = given["completion_ids"].size(1)
            return self._get_per_token_logps_and_entropies(self.model, ids, mask, size, mbs)[0]

    class Ticks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            watch.wait()
            watch.seconds.setdefault("update", []).append(time.perf_counter() - trainer.started)

    dtype = torch.bfloat16 if cuda else torch.float32
    folder = tempfile.mkdtemp()
    peft = None
    if lora:
        from peft import LoraConfig

        peft = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules=[*ATTENTION])
    args = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        logging_steps=1,
        per_device_train_batch_size=mbs,
        gradient_accumulation_steps=answers // mbs,
        num_generations=GROUP,
        max_completion_length=completion_ids.size(1),
        learning_rate=1e-6,
        bf16=cuda,
        beta=0.0,
        loss_type="grpo",
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        use_liger_kernel=liger and cuda,
        report_to=[],
    )
    trainer = Given(
        model=theirs_of(shape, dtype),
        reward_funcs=lambda **columns: [0.0],
        args=args,
        train_dataset=_dataset([{"prompt": "a"}] * answers),
        processing_class=tokenizer_of(),
        callbacks=[Ticks()],
        peft_config=peft,
    )
    trainer.train()
    logs = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    return watch, tokens_of(found), logs


def measure(case: str, trainer: str) -> dict:
    keys = dict(CASES[case], steps=7)
    run = run_ours
    if trainer == "ours-packed":
        keys["packed"] = True
    if trainer.startswith("trl"):
        run = run_trl
        keys["liger"] = trainer == "trl-liger"
    watch, tokens, norms = run(**keys)
    seconds = {name: [round(t, 3) for t in times] for name, times in watch.seconds.items()}
    rates = watch.rates(tokens, skip=3)
    norms = [round(float(norm), 4) for norm in norms]
    return dict(
        case=f"policy {case}", trainer=trainer, tokens=tokens, **rates, peak_gib=peak_gib(),
        seconds=seconds, grad_norms=norms,
    )  # fmt: skip


def gap(case: str) -> dict:
    """Distances of log-probabilities from those of transformers in float32: [mean, largest]."""
    shape, mbs = CASES[case]["shape"], 4
    found = rollouts(hf_config(shape), 8)
    samples = [sample_of(one) for one in found]
    trained = [torch.tensor(one["labels"]) != -100 for one in samples]
    session = session_of(shape, mbs, 0, False)
    ours = session.log_probs(samples)
    weights = {name: tensor.clone() for name, tensor in session.weights()}
    logps = {"ours": torch.cat([values[mask] for values, mask in zip(ours, trained, strict=True)])}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, dtype in (("transformers", torch.bfloat16), ("float32", torch.float32)):
        model = theirs_of(shape, dtype).eval()
        missing = model.load_state_dict(weights, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing
        rows = []
        torch.set_grad_enabled(False)
        for sample, mask in zip(samples, trained, strict=True):
            ids = torch.tensor(sample["input_ids"], device=device)[None]
            logits = model(input_ids=ids).logits[0].float()
            labels = torch.tensor(sample["labels"]).clamp(min=0).to(device)
            rows.append(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0].cpu()[mask])
        logps[name] = torch.cat(rows)
        del model
    line: dict = dict(case=case, trainer="gap")
    for name in ("ours", "transformers"):
        away = (logps[name] - logps["float32"]).abs()
        line[name] = [round(float(away.mean()), 6), round(float(away.max()), 5)]
    away = (logps["ours"] - logps["transformers"]).abs()
    line["ours beside transformers"] = [round(float(away.mean()), 6), round(float(away.max()), 5)]
    return line


def _child(case: str, trainer: str) -> None:
    try:
        write(gap(case) if trainer == "gap" else measure(case, trainer))
    except BaseException as error:
        traceback.print_exc()
        write(dict(case=case, trainer=trainer, failed=f"{type(error).__name__}: {error}"[:300]))
    sys.stdout.flush()
    os._exit(0)


def main(names: list[str]) -> int:
    known = (*CASES, *TRAINERS, "gap")
    if unknown := [name for name in names if name not in known]:
        print(f"unknown: {', '.join(unknown)}; expected {', '.join(known)}")
        return 2
    cases = [name for name in CASES if name in names] or list(CASES)
    trainers = [name for name in (*TRAINERS, "gap") if name in names] or TRAINERS
    for case in cases:
        for trainer in trainers:
            method = multiprocessing.get_context("spawn")
            child = method.Process(target=_child, args=(case, trainer))
            child.start()
            child.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
