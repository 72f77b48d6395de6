"""Answers that the model itself writes during an evaluation, compared with those of the data.

transformers' generate runs, greedily, over a whole model on each rank, which share the samples out:
the trained model on the torch backend, else a copy that is exported, adapters in its weights, and
loaded again. A sample's prompt is all that stands before its last run of trained tokens.
"""

import contextlib
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch

from . import lora, parallel, watchdog
from .constants import GENERATION_METRICS
from .data_batches import documents_of
from .data_packs import samples_of
from .generation import GREEDY, continuations, last_turn, stop_ids, until_stop
from .model import load_torch_model

# words of letters and digits; Chinese and Japanese characters are words of their own
_WORD = re.compile(r"[^\W_\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")


def scores(answers: list[dict], prefix: str) -> dict[str, float]:
    """<prefix>_exact_match and <prefix>_rouge_l: their means over what generate() returned."""
    found = [[one["exact_match"], rouge_l(one["answer"], one["expected"])] for one in answers]
    means = np.array(found).reshape(-1, len(GENERATION_METRICS)).sum(0) / max(len(found), 1)
    names = [f"{prefix}_{name}" for name in GENERATION_METRICS]
    return dict(zip(names, means.tolist(), strict=True))


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


# -- the model whole


def check_room(trainer) -> None:
    """ValueError, on every rank, where one of them has no room for a copy of the whole model."""
    if trainer.backend.name == "torch":
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**trainer.backend.hf_config))
    weights = sum(p.numel() for p in whole.parameters()) * trainer.backend.dtype.itemsize
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


def _whole_model(trainer):
    """The model as transformers has it, whole on this rank. Collective."""
    backend, args = trainer.backend, trainer.args
    if backend.name == "torch":
        return trainer.model
    check_room(trainer)
    folder = Path(args.output_dir) / ".generate"
    try:
        has_adapters = lora.spec_of(trainer.model) is not None
        export = backend.export_merged if has_adapters else backend.export_hf
        export(folder, args.max_shard_size)
        model = load_torch_model(str(folder), dtype=backend.dtype).eval()
        parallel.barrier()
    finally:
        if parallel.is_main():
            shutil.rmtree(folder, ignore_errors=True)
    return model


# -- generation


@torch.no_grad()
def generate(trainer, dataset) -> list[dict]:
    """{"index", "prompt", "answer", "expected", "exact_match"} of those among the first
    generation_num_samples samples that have an answer, in order, on every rank. Collective."""
    args, tokenizer, dataset = trainer.args, trainer.tokenizer, samples_of(dataset)
    count = min(len(dataset), args.generation_num_samples or len(dataset))
    turns = ((index, last_turn(documents_of(dataset[index])[0])) for index in range(count))
    turns = [(index, *turn) for index, turn in turns if turn is not None]
    own, size = turns[parallel.rank() :: parallel.world_size()], args.per_device_eval_batch_size
    watchdog.note("generating answers")
    trainer.backend.train_mode(False)
    model, found = _whole_model(trainer), []
    decoding, stop = GREEDY._replace(max_new_tokens=args.max_new_tokens), stop_ids(model, tokenizer)
    for start in range(0, len(own), size):
        watchdog.alive()
        batch = own[start : start + size]
        prompts = [prompt for _, prompt, _ in batch]
        with trainer.backend.autocast():
            written = continuations(model, prompts, stop, decoding, size)
        for (index, prompt, known), ids in zip(batch, written, strict=True):
            texts = tokenizer.batch_decode([ids, until_stop(known, stop)], skip_special_tokens=True)
            answer, expected = (text.strip() for text in texts)
            line = {"index": index, "prompt": tokenizer.decode(prompt), "answer": answer}
            found.append({**line, "expected": expected, "exact_match": answer == expected})
    del model
    torch.cuda.empty_cache()  # the copy's memory is training's again
    trainer.backend.train_mode(True)
    whole = [answer for theirs in parallel.gather(found) for answer in theirs]
    return sorted(whole, key=lambda answer: answer["index"])
