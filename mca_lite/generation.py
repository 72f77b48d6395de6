"""Answers of a trained model, as transformers generates them: loading what a run, or PEFT, wrote,
and a batch of prompts.
"""

import contextlib
import copy
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, TextStreamer
from transformers.utils.logging import disable_progress_bar

from . import lora, lora_files, model_config, parallel, watchdog
from .args import GROUPS
from .args_values import read_config_file
from .callbacks import TrainerCallback
from .ckpt import HF_FOLDER
from .ckpt_megatron import DIST_NAME
from .data_batches import documents_of, samples_of
from .data_chat import ChatRenderer
from .errors import ConfigError, Judge, refuse
from .files import (
    ADAPTER_CONFIG_NAME,
    CHECKPOINT_PREFIX,
    GENERATION_METRICS,
    HF_CONFIG_NAME,
    HF_GENERATION_CONFIG_NAME,
    IGNORE_INDEX,
    RUN_CONFIG_NAME,
    printable,
    read_json,
    resolve_folder,
)
from .model import load_torch_model

# -- answers to prompts

MAX_NEW_TOKENS = 512  # where neither the caller nor generation_config.json says how many
# of a run's config.yaml: which model it began with
_ORIGIN_KEYS = "model_name_or_path model_revision adapter_name_or_path train_from_scratch seed"


class Decoding(NamedTuple):
    """How the next token is chosen. None: as the model's generation_config.json says; temperature
    0: the likeliest token (greedy)."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


GREEDY = Decoding(temperature=0.0)
_NUMBER = (int, float, type(None))
_TYPES: dict[str, tuple] = {  # what keys of generation_config.json may hold
    **dict.fromkeys("temperature top_p top_k repetition_penalty".split(), _NUMBER),
    "max_new_tokens": (int, type(None)),
    "do_sample": (bool, type(None)),
    "eos_token_id": (int, list, type(None)),
}


# -- loading ---------------------------------------------------------------------------------------


def _run_folder(folder: Path) -> Path:
    """The output_dir that a model or a checkpoint was written into."""
    while folder.name in ("merged", HF_FOLDER) or folder.name.startswith(f"{CHECKPOINT_PREFIX}-"):
        folder = folder.parent
    return folder


def keys_of_run(folder: str | Path, names: str) -> SimpleNamespace:
    """The keys of these names (by spaces) of the run that wrote a folder, the defaults where its
    config.yaml has none; prints which were there.

    Nobody named that file, so no name may let code run. ConfigError where it cannot be read.
    """
    path = _run_folder(Path(folder)) / RUN_CONFIG_NAME
    found = read_config_file(path) if path.is_file() else {}
    taken = {name: found[name] for name in names.split() if found.get(name) is not None}
    judge = Judge(None)
    values: dict[str, Any] = {}
    for group in GROUPS:
        values |= vars(group.read(taken, judge))
    problems = [problem for problem in judge.problems if problem.key in taken]
    if problems:
        raise ConfigError(problems)
    if taken:
        shown = ", ".join(f"{name}: {str(value):.200}" for name, value in taken.items())
        _note(f"{path}: {shown}")
    return SimpleNamespace(**{name: values[name] for name in names.split()})


def check_generation_config(folder: Path) -> None:
    """ValueError for a generation_config.json that cannot be used."""
    path = folder / HF_GENERATION_CONFIG_NAME
    values = read_json(path) if path.is_file() else {}
    for key, types in _TYPES.items():
        value = values.get(key)
        parts = value if isinstance(value, list) and list in types else [value]
        fits = type(value) in types and all(type(part) in types for part in parts)
        if not fits or (key == "max_new_tokens" and value is not None and value < 1):
            raise ValueError(f"{path}: {key} cannot be {value!r:.40}: correct it, or leave it out")


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def load_for_generation(
    path: str | Path,
    base: str | None = None,
    before: bool = False,
    trusted: Collection[str | None] = (),
):
    """(transformers model, tokenizer) of a folder, ready to generate, in the dtype of its files.

    path: a model in Hugging Face's format, or an adapter, which is merged into its base in memory.
    before: the model that training started from instead, with the tokenizer of `path`. base: where
    that model, or the adapter's base, is; None: as the run's config.yaml or the adapter says.
    trusted: the names, as they are given here or in that file, of models whose code may run.
    ValueError for what is no such folder, or does not belong together.
    """
    disable_progress_bar()
    folder = resolve_folder(str(path))
    name = str(path)
    origin = folder
    adapter = None
    keys = SimpleNamespace(train_from_scratch=False, seed=0)
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        adapter = folder
    elif not (folder / HF_CONFIG_NAME).is_file() or (folder / DIST_NAME).is_dir():
        reason = "it holds neither a model in Hugging Face's format nor an adapter"
        remedy = "the output_dir of a run that has ended; python -m mca_lite convert exports "
        refuse("MODEL", str(folder), reason, f"{remedy}a checkpoint")
    if adapter or before:
        keys = keys_of_run(folder, _ORIGIN_KEYS)
        name, origin = _origin(folder, base, keys, adapter)
        role = "the model before training" if before else f"the base of {folder}"
        _note(f"{role}: {origin}")
        if origin == folder or base:
            keys.train_from_scratch = False
    if before:
        adapter = keys.adapter_name_or_path
    written = (own for own in (folder, _run_folder(folder)) if any(own.glob("tokenizer*")))
    place = next(written, None)
    tokens_of = name if place is None else str(path)
    tokenizer = model_config.load_tokenizer(place or origin, tokens_of in trusted)
    return _load(origin, adapter, keys, len(tokenizer), name in trusted), tokenizer


def _origin(
    folder: Path, base: str | None, keys: SimpleNamespace, adapter: Path | None
) -> tuple[str, Path]:
    """The name and the folder of the model that training started from."""
    name = base or keys.model_name_or_path
    if not name and adapter:
        name = read_json(adapter / ADAPTER_CONFIG_NAME).get("base_model_name_or_path")
    if not name:
        refuse("--base", None, f"{folder} does not say which model it was trained from", "--base M")
    try:
        return name, resolve_folder(name, None if base else keys.model_revision)
    except ValueError as error:
        reason = f"{folder} was trained from it: {error}"
        refuse("--base", base, reason, "--base M, where that model is now")


def _load(
    folder: Path, adapter: str | Path | None, keys: SimpleNamespace, num_tokens: int, remote: bool
):
    """The model of a folder, or freshly drawn weights, with the adapter in its weights. remote: its
    code may run."""
    config = model_config.load_hf_config(str(folder), remote)
    check_generation_config(folder)
    model = load_torch_model(
        str(folder),
        keys.train_from_scratch,
        keys.seed,
        remote,
        # the run had as many rows, and what is drawn depends on it
        max(num_tokens, config.get_text_config().vocab_size),
        config,
        config.dtype or torch.float32,
    )
    if keys.train_from_scratch and (folder / HF_GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if adapter:
        lora_files.merge_into(model, adapter)
    return model.eval()


# -- generating ------------------------------------------------------------------------------------


def prompt_ids(tokenizer, messages: list[dict], enable_thinking: bool | None = None) -> list[int]:
    """The tokens of a conversation, up to where the assistant's answer begins; without a chat
    template those of the last message's text. enable_thinking: for the template, None: not given.
    """
    if not tokenizer.chat_template:
        return tokenizer.encode(messages[-1]["content"])
    keys = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **keys
    )
    return tokenizer.encode(text, add_special_tokens=False)


def stop_ids(model, tokenizer) -> list[int]:
    """The tokens that end an answer: those of generation_config.json, of the tokenizer, and of the
    chat template, which a base model's generation_config.json does not know."""
    own = model.generation_config.eos_token_id
    found = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    if tokenizer.chat_template:
        ending = ChatRenderer(tokenizer).end_of_turn()
        ids = tokenizer.encode(ending, add_special_tokens=False)
        found.update(ids if len(ids) == 1 else ())
    return sorted(found)


def last_turn(document: dict) -> tuple[list[int], list[int]] | None:
    """(the tokens before the last run of trained ones, that run) of a document {"input_ids",
    "labels"}; None where nothing is trained."""
    ids = np.asarray(document["input_ids"])
    labels = np.asarray(document["labels"])
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    if not len(trained):
        return None
    gaps = np.flatnonzero(np.diff(trained) > 1)
    first = trained[gaps[-1] + 1] if len(gaps) else trained[0]
    return ids[: first + 1].tolist(), labels[first : trained[-1] + 1].tolist()


def until_stop(ids: list[int], stop: list[int]) -> list[int]:
    """The tokens before the first one of `stop`."""
    return ids[: next((at for at, token in enumerate(ids) if token in stop), len(ids))]


def continuations(
    model,
    prompts: list[list[int]],
    stop: list[int],
    decoding: Decoding = GREEDY,
    batch_size: int = 32,
    streamer=None,
) -> list[list[int]]:
    """The new tokens after each prompt, without the one of `stop` that ends them.

    Prompts of similar length share a batch, padded on the left: generation continues where a row
    ends. streamer: transformers', for one prompt.
    """
    config = _generation_config(model, stop, decoding)
    limit = config.max_new_tokens
    positions = _num_positions(model)
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    found = {}
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        width = len(prompts[numbers[-1]])
        config.max_new_tokens = max(1, min(limit, positions - width))
        ids = torch.full((len(numbers), width), config.pad_token_id, device=model.device)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(numbers):
            own = prompts[number]
            ids[row, width - len(own) :] = torch.tensor(own)
            mask[row, width - len(own) :] = 1
        output = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, streamer=streamer
        )
        for number, row in zip(numbers, output[:, width:].tolist(), strict=True):
            found[number] = until_stop(row, stop)
    return [found[number] for number in range(len(prompts))]


def _num_positions(model) -> int:
    """The positions that a transformers model was made for."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def _generation_config(model, stop: list[int], decoding: Decoding):
    """The model's own, with what `decoding` says instead."""
    config = copy.deepcopy(model.generation_config)
    changes = {}
    if decoding.temperature == 0:
        # the defaults: of what is None generate() takes the model's value, and warns
        changes = dict(do_sample=False, temperature=1.0, top_p=1.0, top_k=50)
    elif decoding.temperature is not None or decoding.top_p is not None:
        given = dict(temperature=decoding.temperature, top_p=decoding.top_p)
        changes = {"do_sample": True, **{k: v for k, v in given.items() if v is not None}}
    limit = decoding.max_new_tokens
    if limit is None:
        limit = config.max_new_tokens or MAX_NEW_TOKENS
    changes |= dict(max_new_tokens=limit, max_length=None, eos_token_id=stop or None)
    config.update(**changes, pad_token_id=stop[0] if stop else 0)
    return config


def answers(
    model, tokenizer, prompts: list[list[int]], decoding: Decoding = GREEDY, batch_size: int = 32
) -> list[str]:
    """The text that a transformers model, in evaluation mode, answers to each prompt (token ids),
    without special tokens."""
    stop = stop_ids(model, tokenizer)
    found = continuations(model, prompts, stop, decoding, batch_size)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


class _Streamer(TextStreamer):
    """Hands on whole words as they come, without the prompt and the token that ends the answer."""

    def __init__(self, tokenizer, stop: list[int], write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop = stop
        self._write = write

    def put(self, value) -> None:
        if self.next_tokens_are_prompt or int(value[0]) not in self._stop:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def stream(
    model, tokenizer, prompt: list[int], decoding: Decoding, write: Callable[[str], None]
) -> None:
    """Answer one prompt, and hand each piece of text to `write` as soon as it is there. Ctrl-C ends
    the answer."""
    stop = stop_ids(model, tokenizer)
    streamer = _Streamer(tokenizer, stop, write)
    try:
        continuations(model, [prompt], stop, decoding, streamer=streamer)
    except KeyboardInterrupt:
        streamer.end()


# -- answers in an evaluation

# words of letters and digits; Chinese and Japanese characters are words of their own
_WORD = re.compile(r"[^\W_\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")


def rouge_l(ours: str, theirs: str) -> float:
    """ROUGE-L's F1: twice the longest common subsequence of words over the words of both."""
    a, b = (_WORD.findall(text.lower()) for text in (ours, theirs))
    if not a or not b:
        return float(a == b)
    places: dict[str, int] = {}
    for i, word in enumerate(a):
        places[word] = places.get(word, 0) | 1 << i
    # Hyyro's row of bits: a 0 for each place of `a` at which the common subsequence grows
    row = full = (1 << len(a)) - 1
    for word in b:
        hits = row & places.get(word, 0)
        row = ((row + hits) | (row - hits)) & full
    return 2 * (len(a) - row.bit_count()) / (len(a) + len(b))


class Answers(TrainerCallback):
    """Generated answers as metrics of evaluate() and predict(): exact_match and rouge_l.

    A callback of a McaTrainer with predict_with_generate. `lines`: see generate(), of the data set
    that was measured last.
    """

    metrics = GENERATION_METRICS

    def __init__(self):
        self.lines: list[dict] = []

    def on_init_end(self, args, state, control, trainer, **kwargs):
        """Become the trainer's `answers`. ValueError where answers cannot be generated or compared,
        and on every rank where one has no room for a copy of the whole model."""
        if not args.predict_with_generate:
            return
        if trainer.compute_metrics is not None:
            reason = "compute_metrics is given logits, and generate's tokens go into exact_match "
            raise ValueError(f"predict_with_generate: {reason}and rouge_l: one of the two")
        if trainer.documents_per_sample > 1:
            raise ValueError("predict_with_generate: a pair has two answers: set it to false")
        if trainer.tokenizer is None:
            raise ValueError(
                "predict_with_generate: give the trainer a tokenizer, to compare texts"
            )
        check_room(trainer.backend)
        self.trainer = trainer
        trainer.answers = self

    def measure(self, dataset) -> dict[str, tuple[float, int]]:
        """Answer a data set -> {metric: (sum, count)}, the same on every rank. Collective."""
        self.lines = self.generate(dataset)
        matches = sum(line["exact_match"] for line in self.lines)
        overlaps = sum(rouge_l(line["answer"], line["expected"]) for line in self.lines)
        count = len(self.lines)
        return {"exact_match": (matches, count), "rouge_l": (overlaps, count)}

    @torch.no_grad()
    def generate(self, dataset) -> list[dict]:
        """{"index", "prompt", "answer", "expected", "exact_match"} of those among the first
        generation_num_samples samples that have an answer, in order, on every rank. Collective."""
        trainer = self.trainer
        args = trainer.args
        tokenizer = trainer.tokenizer
        dataset = samples_of(dataset)
        count = min(len(dataset), args.generation_num_samples or len(dataset))
        turns = ((index, last_turn(documents_of(dataset[index])[0])) for index in range(count))
        turns = [(index, *turn) for index, turn in turns if turn is not None]
        own = turns[parallel.rank() :: parallel.world_size()]
        size = args.per_device_eval_batch_size
        watchdog.note("generating answers")
        trainer.backend.train_mode(False)
        model = self._whole_model()
        found = []
        decoding = GREEDY._replace(max_new_tokens=args.max_new_tokens)
        stop = stop_ids(model, tokenizer)
        for start in range(0, len(own), size):
            watchdog.alive()
            batch = own[start : start + size]
            prompts = [prompt for _, prompt, _ in batch]
            with trainer.backend.autocast():
                written = continuations(model, prompts, stop, decoding, size)
            for (index, prompt, known), ids in zip(batch, written, strict=True):
                texts = tokenizer.batch_decode(
                    [ids, until_stop(known, stop)], skip_special_tokens=True
                )
                answer, expected = (text.strip() for text in texts)
                line = {"index": index, "prompt": tokenizer.decode(prompt), "answer": answer}
                found.append({**line, "expected": expected, "exact_match": answer == expected})
        del model
        torch.cuda.empty_cache()  # the copy's memory is training's again
        trainer.backend.train_mode(True)
        whole = [answer for theirs in parallel.gather(found) for answer in theirs]
        return sorted(whole, key=lambda answer: answer["index"])

    def _whole_model(self):
        """The model as transformers has it, whole on this rank. Collective."""
        trainer = self.trainer
        backend = trainer.backend
        if backend.name == "torch":
            return trainer.model
        check_room(backend)
        folder = Path(trainer.args.output_dir) / ".generate"
        try:
            has_adapters = lora.spec_of(trainer.model) is not None
            export = backend.export_merged if has_adapters else backend.export_hf
            export(folder, trainer.args.max_shard_size)
            model = load_torch_model(str(folder), dtype=backend.dtype).eval()
            parallel.barrier()
        finally:
            if parallel.is_main():
                shutil.rmtree(folder, ignore_errors=True)
        return model


def check_room(backend) -> None:
    """ValueError, on every rank, where one of them has no room for a copy of the whole model."""
    if backend.name == "torch":
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**backend.hf_config))
    weights = sum(p.numel() for p in whole.parameters()) * backend.dtype.itemsize
    room = free_memory()
    [is_short] = parallel.largest(int(weights > room))
    if is_short:
        raise ValueError(
            f"predict_with_generate: a copy of the whole model takes {weights / 2**30:.1f} GiB on "
            f"each rank, and one has less; this one has {room / 2**30:.1f} GiB: set it to false, "
            "and ask the exported model"
        )


def free_memory() -> float:
    """Bytes that this rank can still take, where its device is; infinite where nothing says so."""
    if torch.cuda.is_available():
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + kept
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(free.split()[1]) * 1024 / ranks
    return math.inf
