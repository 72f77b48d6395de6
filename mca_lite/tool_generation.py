"""Text from a trained model: load what a run or PEFT wrote, answer prompts, and turn answers into
metrics of an evaluation.

transformers' generate() runs a whole model. Prompts are lists of token ids.
"""

import contextlib
import copy
import itertools
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, TextStreamer
from transformers.utils.logging import disable_progress_bar

from . import model_config, parallel, watchdog, world
from .args import key_groups
from .args_values import read_config_file
from .callbacks import TrainerCallback
from .ckpt import HF_FOLDER
from .ckpt_megatron import DIST_NAME
from .data_batches import View, documents_of, samples_of
from .data_chat import ChatRenderer
from .data_records import Message
from .errors import Judge, expect, refuse
from .families_rows import has_value_head
from .files import (
    ADAPTER_CONFIG_NAME,
    CHECKPOINT_PREFIX,
    GENERATION_METRICS,
    HF_CONFIG_NAME,
    HF_GENERATION_CONFIG_NAME,
    IGNORE_INDEX,
    RUN_CONFIG_NAME,
    json_if_there,
    printable,
    resolve_folder,
)
from .model import load_torch_model
from .tables import function_of, is_of_inputs
from .weights_files import model_class

MAX_NEW_TOKENS = 512  # if neither the caller nor generation_config.json says
# the keys in a run's config.yaml about the model that it started from
_ORIGIN_KEYS = "model_name_or_path model_revision adapter_name_or_path train_from_scratch seed"
# these keys of generation_config.json have a number or null; the last one may have a list
_NUMBERS = (
    "temperature top_p top_k repetition_penalty max_new_tokens do_sample eos_token_id".split()
)
# a word is letters and digits, or one Chinese or Japanese character
_WORD = re.compile(r"[^\W_\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")


class Decoding(NamedTuple):
    """Settings for generating an answer: the most tokens that it may have, and how each token is
    chosen. A field that is None is taken from the model's generation_config.json; without a
    max_new_tokens there the limit is MAX_NEW_TOKENS. temperature 0 means greedy, without sampling,
    whatever top_p is."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


GREEDY = Decoding(temperature=0.0)


# -- loading


def load_for_generation(
    path: str | Path,
    base: str | None = None,
    before: bool = False,
    trusted: Collection[str | None] = (),
) -> tuple[Any, Any]:
    """Load a model for generate() -> (transformers model in evaluation mode, tokenizer). Its dtype
    is the one that its config.json names, otherwise float32.

    path: a folder or hub name of a model in Hugging Face's format, or of an adapter, which is
    merged into its base model in memory.
    before: True to load, in place of the trained model in `path`, the model from which it was
    trained. The tokenizer is that of `path` if it has one.
    base: folder or hub name of the adapter's base, or with `before` of the model before training;
    None: as the run's config.yaml or the adapter says.
    trusted: names of models that may run code.

    Raises ValueError if the folder has neither a model nor an adapter, if the model is a reward
    model, or if adapter and base do not fit together."""
    disable_progress_bar()
    folder = resolve_folder(str(path))
    is_adapter = (folder / ADAPTER_CONFIG_NAME).is_file()
    is_model = (folder / HF_CONFIG_NAME).is_file() and not (folder / DIST_NAME).is_dir()
    if not is_adapter and not is_model:
        reason = "it holds neither a model in Hugging Face's format nor an adapter"
        remedy = "the output_dir of a run that has ended; python -m mca_lite convert exports "
        refuse("MODEL", str(folder), reason, f"{remedy}a checkpoint")
    name = str(path)
    origin = folder
    adapter = None
    seed = 0
    is_fresh = False
    if is_adapter or before:
        keys = keys_of_run(folder, _ORIGIN_KEYS)
        name, origin = _origin(folder, base, keys)
        adapter = keys.adapter_name_or_path if before else folder
        seed = keys.seed
        is_fresh = keys.train_from_scratch and not base and origin != folder
        role = "the model before training" if before else f"the base of {folder}"
        _note(f"{role}: {origin}")
    names = {_run_folder(folder): str(path), folder: str(path)}
    own = [place for place in names if any(place.glob("tokenizer*"))]
    place = [origin, *own][-1]
    tokenizer = model_config.load_tokenizer(place, names.get(place, name) in trusted)
    config = model_config.load_hf_config(str(origin), name in trusted)
    if has_value_head(config.architectures):
        reason = "it is a reward model, which scores answers and gives none"
        refuse("model_name_or_path", str(origin), reason, "the model that it began as")
    check_generation_config(origin)
    model = load_torch_model(
        str(origin),
        is_fresh,
        seed,
        name in trusted,
        # as many rows as in the run, because values of fresh weights depend on this count
        max(len(tokenizer), config.get_text_config().vocab_size),
        config,
        config.dtype or config.get_text_config().dtype or torch.float32,
    )
    if adapter:
        function_of("part_lora_files:merge_into")(model, adapter)
    return model.eval(), tokenizer


def _origin(folder: Path, base: str | None, keys: SimpleNamespace) -> tuple[str, Path]:
    """Find the model from which the run or adapter in `folder` was trained -> (its name, its
    folder). base: the name that the user gave; None: look into `keys`, then into the adapter's
    config. keys: those configuration keys of the run that say from which model it started.
    ConfigError if no name is known, or the model cannot be found."""
    of_adapter = json_if_there(folder / ADAPTER_CONFIG_NAME)
    name = base or keys.model_name_or_path or of_adapter.get("base_model_name_or_path")
    if not name:
        refuse("--base", None, f"{folder} does not say which model it was trained from", "--base M")
    try:
        return name, resolve_folder(name, None if base else keys.model_revision)
    except ValueError as error:
        reason = f"{folder} was trained from it: {error}"
        refuse("--base", base, reason, "--base M, where that model is now")


def _run_folder(folder: Path) -> Path:
    """The output_dir of the run to which `folder` belongs: `folder` itself, or the one around it if
    its name is that of a checkpoint, an export or a merged model inside an output_dir."""
    while re.fullmatch(rf"merged|{HF_FOLDER}|{CHECKPOINT_PREFIX}-.*", folder.name):
        folder = folder.parent
    return folder


def keys_of_run(folder: str | Path, names: str) -> SimpleNamespace:
    """Read some configuration keys from the config.yaml of the run to which `folder` belongs -> an
    object with the keys as attributes. names: the keys to read, separated by spaces; all other
    keys, and those that the file lacks, have their defaults ("" if a key is required). The keys
    that were found are printed.

    The user did not name that file, so callers must not let models that it names run code. Raises
    ConfigError if the file cannot be read, or a value does not fit its key."""
    path = _run_folder(Path(folder)) / RUN_CONFIG_NAME
    written = read_config_file(path) if path.is_file() else {}
    taken = {name: written[name] for name in names.split() if written.get(name) is not None}
    judge = Judge(None)
    values: dict[str, Any] = {}
    for group in key_groups():
        values |= vars(group.read(taken, judge))
    judge.problems = [problem for problem in judge.problems if problem.key in taken]
    judge.close()
    if taken:
        shown = ", ".join(f"{name}: {str(value):.200}" for name, value in taken.items())
        _note(f"{path}: {shown}")
    return SimpleNamespace(**values)


def check_generation_config(folder: Path) -> None:
    """Check the numbers in a model folder's generation_config.json, such as temperature. ValueError
    if one is neither a number nor a boolean (eos_token_id may also be a list of them), or if
    max_new_tokens is below 1."""
    path = folder / HF_GENERATION_CONFIG_NAME
    values = json_if_there(path)
    for key in _NUMBERS:
        value = values.get(key)
        if value is None:
            continue
        array = np.asarray(value)
        is_number = array.dtype.kind in "bif" and array.ndim <= (key == "eos_token_id")
        if not is_number or (key == "max_new_tokens" and value < 1):
            raise ValueError(f"{path}: {key} cannot be {value!r:.40}: correct it, or leave it out")


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


# -- prompts and their ends


def prompt_ids(
    tokenizer: Any, messages: list[Message], enable_thinking: bool | None = None
) -> list[int]:
    """Make a prompt's token ids from a conversation, up to where the assistant's answer begins.
    Without a chat template, only the text of the last message is used. enable_thinking: passed to
    the chat template as a variable of this name; None: not passed."""
    if not tokenizer.chat_template:
        return tokenizer.encode(messages[-1]["content"])
    keys = {}
    if enable_thinking is not None:
        keys["enable_thinking"] = enable_thinking
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **keys
    )
    return tokenizer.encode(text, add_special_tokens=False)


def stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """Token ids that end an answer: those in generation_config.json, the tokenizer's, and the chat
    template's end of a turn, if that is one token (generation_config.json of a base model lacks
    it)."""
    ids = model.generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [ids]
    if tokenizer.chat_template:
        end_of_turn = ChatRenderer(tokenizer).end_of_turn()
        end_ids = tokenizer.encode(end_of_turn, add_special_tokens=False)
        if len(end_ids) == 1:
            ids = ids + end_ids
    return sorted({*ids, tokenizer.eos_token_id} - {None})


def until_stop(ids: list[int], stop: list[int]) -> list[int]:
    """The token ids before the first one that is in `stop`; all of them if none is."""
    return list(itertools.takewhile(lambda token: token not in stop, ids))


def last_turn(document: dict[str, Any]) -> tuple[list[int], list[int]] | None:
    """(prompt, answer) as token ids, for the last answer with loss in a document {"input_ids",
    "labels"}; None if no token has loss. The prompt is everything before that answer."""
    ids = np.asarray(document["input_ids"])
    labels = np.asarray(document["labels"])
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    if not len(trained):
        return None
    run = np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1)[-1]
    return ids[: run[0] + 1].tolist(), labels[run].tolist()


def pictures_before(
    document: dict[str, Any], ids: list[int], model: Any
) -> dict[str, torch.Tensor]:
    """Select the inputs that belong to a document's prompt: the columns, such as pixel_values, for
    the pictures, videos and audio in it; {} if there are none. document: a sample's columns. ids:
    the prompt's tokens, with which the document begins. ValueError if this rank has not read the
    document's pixels."""
    if not any(map(is_of_inputs, document)):
        return {}
    from .part_pictures_data import COLUMNS_OF, merged_grids

    kept: dict[str, torch.Tensor] = {}
    for kind, (pixels, name) in {**COLUMNS_OF, "audio": ("input_features", "audio_grid")}.items():
        grids = document.get(name, torch.empty(0, 3, dtype=torch.int64))
        expect(
            not len(grids) or pixels in document,
            "inputs of an evaluation have no pixels or spectra on this pipeline stage: set "
            "predict_with_generate: false, and ask the exported model, python -m mca_lite generate",
        )
        ends = merged_grids(grids, model.config.vision_config.spatial_merge_size).prod(1).cumsum(0)
        count = int((ends <= ids.count(getattr(model.config, f"{kind}_token_id", None))).sum())
        rows = grids[:count].prod(1)
        if count and kind == "audio":
            rows = kept["audio_lengths"] = document["audio_lengths"][:count]
        if count:
            kept |= {pixels: document[pixels][: int(rows.sum())], name: grids[:count]}
    if "second_per_grid_ts" in document and "video_grid_thw" in kept:
        kept["second_per_grid_ts"] = document["second_per_grid_ts"][: len(kept["video_grid_thw"])]
    return kept


def turns_of(
    dataset: Any, numbers: Iterable[int], model: Any, tokenizer: Any
) -> list[tuple[Any, ...]]:
    """Find a prompt and its expected answer in each of some samples: a list of (sample index,
    prompt tokens, answer's text, pictures in the prompt as from pictures_before). The answer is the
    last one with loss, in a preference pair that of the chosen document. Samples without loss are
    left out. numbers: the samples' indices."""
    stop = stop_ids(model, tokenizer)
    turns = []
    for number in numbers:
        document = documents_of(dataset[number])[0]
        turn = last_turn(document)
        if turn is not None:
            text = tokenizer.decode(until_stop(turn[1], stop), skip_special_tokens=True)
            turns.append((number, turn[0], text, pictures_before(document, turn[0], model)))
    return turns


@contextlib.contextmanager
def _reading_inputs(dataset: Any) -> Iterator[None]:
    """Context manager in which a dataset's samples have pixels on every rank; otherwise only some
    pipeline stages read pixels."""
    while isinstance(dataset, View):
        dataset = dataset.dataset
    media = [shard.media for shard in getattr(dataset, "shards", ())]
    before = [one.is_read for one in media]
    try:
        for one in media:
            one.is_read = True
        yield
    finally:
        for one, is_read in zip(media, before, strict=True):
            one.is_read = is_read


# -- generating


def answers(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    decoding: Decoding = GREEDY,
    batch_size: int = 32,
    pictures: Sequence[dict[str, Any]] = (),
) -> list[str]:
    """Generate a text after each prompt -> the texts, without special tokens. model: in evaluation
    mode. prompts: token ids. pictures: for each prompt the columns of its images and videos, such
    as pixel_values, or {} if it has none; () if no prompt has any."""
    stop = stop_ids(model, tokenizer)
    rows = continuations(model, prompts, stop, decoding, batch_size, pictures=pictures)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def continuations(
    model: Any,
    prompts: list[list[int]],
    stop: list[int],
    decoding: Decoding = GREEDY,
    batch_size: int = 32,
    streamer: Any = None,
    pictures: Sequence[dict[str, Any]] = (),
) -> list[list[int]]:
    """Generate tokens after each prompt -> the new tokens, up to the first one in `stop`, which is
    left out.

    Generation also ends at the limit of new tokens and at the model's last position, but makes at
    least one token. Prompts of similar length share a batch [b, s], padded on the left, because
    generation continues at the end of a row. streamer: a transformers streamer, for a single
    prompt. pictures: for each prompt the columns of its images and videos, such as pixel_values, or
    {} if it has none; () if no prompt has any."""
    config = _generation_config(model, stop, decoding)
    text_config = model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
    limits = [max(1, min(config.max_new_tokens, positions - len(prompt))) for prompt in prompts]
    new_tokens = {}
    for numbers in _batches(prompts, limits, batch_size):
        watchdog.alive()
        rows = [torch.tensor(prompts[number], device=model.device) for number in numbers]
        ids = pad_sequence(rows, True, config.pad_token_id, "left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
        config.max_new_tokens = limits[numbers[0]]
        seen = _joined([pictures[number] for number in numbers] if pictures else [], ids, model)
        output = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config, streamer=streamer, **seen
        )
        new_tokens |= zip(numbers, output[:, ids.shape[1] :].tolist(), strict=True)
    return [until_stop(new_tokens[number], stop) for number in range(len(prompts))]


def _batches(prompts: list[list[int]], limits: list[int], size: int) -> Iterator[list[int]]:
    """Yield batches of prompts, each as a list of prompt indices. A batch has up to `size` prompts
    of similar length. All have the same limit of new tokens, because generate() takes one limit per
    batch. limits: these limits, one for each prompt."""
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    for _, group in itertools.groupby(order, key=limits.__getitem__):
        alike = list(group)
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


def _joined(
    pictures: list[dict[str, Any]], ids: torch.Tensor, model: Any
) -> dict[str, torch.Tensor]:
    """Join the pictures of a batch of prompts into keyword arguments for generate(); {} if there
    are none. pictures: for each prompt its columns, such as pixel_values, or {}. ids: the padded
    prompts, [b, s]."""
    columns = list(filter(None, pictures))
    if not columns:
        return {}
    joined = {
        name: torch.cat([of_row[name] for of_row in columns if name in of_row])
        for name in set().union(*columns)
    }
    is_video = ids == getattr(model.config, "video_token_id", None)
    if hasattr(model.config, "audio_config"):
        joined = function_of("part_audio_model:for_thinker")(joined)
    else:
        joined["mm_token_type_ids"] = (ids == model.config.image_token_id) + 2 * is_video
    return {name: column.to(model.device) for name, column in joined.items()}


def _generation_config(model: Any, stop: list[int], decoding: Decoding) -> Any:
    """A copy of the model's GenerationConfig with the settings of `decoding`, and `stop` as end
    tokens."""
    config = copy.deepcopy(model.generation_config)
    if decoding.temperature == 0:
        # set the defaults, because with None generate() takes the model's values and warns
        changes = dict(do_sample=False, temperature=1.0, top_p=1.0, top_k=50)
    else:
        given = dict(temperature=decoding.temperature, top_p=decoding.top_p)
        changes = {key: value for key, value in given.items() if value is not None}
        changes |= dict(do_sample=bool(changes) or config.do_sample)
    limit = decoding.max_new_tokens or config.max_new_tokens or MAX_NEW_TOKENS
    changes |= dict(max_new_tokens=limit, max_length=None, eos_token_id=stop or None)
    config.update(**changes, pad_token_id=[*stop, 0][0])
    return config


def stream(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    decoding: Decoding,
    pictures: dict[str, Any] | None = None,
) -> str:
    """Answer one prompt and print each word as soon as it is there -> the text. Ctrl-C ends the
    answer. pictures: the columns of the prompt's images and videos, such as pixel_values; None or
    {}: there are none."""
    stop = stop_ids(model, tokenizer)
    streamer = _Streamer(tokenizer, stop)
    try:
        continuations(model, [prompt], stop, decoding, 1, streamer, [pictures or {}])
    except KeyboardInterrupt:
        streamer.end()
    return streamer.text


class _Streamer(TextStreamer):
    """A transformers streamer that prints whole words of an answer, without the prompt and the end
    token, and collects them in `text`."""

    def __init__(self, tokenizer: Any, stop: list[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop = stop
        self.text = ""

    def put(self, value: Any) -> None:
        if self.next_tokens_are_prompt or int(value[0]) not in self._stop:
            super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(printable(text), end="", flush=True)
        self.text += text


# -- answers in an evaluation


class Answers(TrainerCallback):
    """A trainer callback that generates answers in evaluate() and predict(), for the metrics
    exact_match and rouge_l. It does nothing without predict_with_generate.

    lines: what generate() returned for the last dataset.
    """

    metrics = GENERATION_METRICS

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_init_end(
        self, args: Any, state: Any, control: Any, trainer: Any = None, **kwargs: Any
    ) -> None:
        """Register this callback as the trainer's `answers`, if predict_with_generate is on. Raises
        ValueError if answers cannot be generated or compared, and, on every rank, if any rank has
        no room for a copy of the whole model. Collective then on megatron-core."""
        if not args.predict_with_generate:
            return
        rules = {
            "compute_metrics is given logits, and generate's tokens go into exact_match and "
            "rouge_l: one of the two": trainer.compute_metrics is not None,
            "a pair has two answers: set it to false": trainer.documents_per_sample > 1,
            "give the trainer a tokenizer, to compare texts": trainer.tokenizer is None,
        }
        for reason, is_broken in rules.items():
            if is_broken:
                raise ValueError(f"predict_with_generate: {reason}")
        check_room(trainer.backend)
        self.trainer = trainer
        trainer.answers = self

    def measure(self, dataset: Any) -> dict[str, tuple[float, int]]:
        """Generate answers to a dataset's samples and score them -> {metric: (sum, count)}, the
        same on every rank. Collective."""
        self.lines = self.generate(dataset)
        matches = sum(line["exact_match"] for line in self.lines)
        overlaps = sum(rouge_l(line["answer"], line["expected"]) for line in self.lines)
        count = len(self.lines)
        return {"exact_match": (matches, count), "rouge_l": (overlaps, count)}

    @torch.no_grad()
    def generate(self, dataset: Any) -> list[dict[str, Any]]:
        """Answer the first generation_num_samples samples (None: all) greedily -> {"index",
        "prompt", "answer", "expected", "exact_match"} for each that has an expected answer, in
        order, on every rank. Collective."""
        args = self.trainer.args
        backend = self.trainer.backend
        tokenizer = self.trainer.tokenizer
        dataset = samples_of(dataset)
        count = min(len(dataset), args.generation_num_samples or len(dataset))
        watchdog.note("generating answers")
        backend.train_mode(False)
        model = self._whole_model()
        own = range(parallel.rank(), count, parallel.world_size())
        with _reading_inputs(dataset):
            turns = turns_of(dataset, own, model, tokenizer)
        decoding = GREEDY._replace(max_new_tokens=args.max_new_tokens)
        prompts = [prompt for _, prompt, *_ in turns]
        seen = [pictures for *_, pictures in turns]
        size = args.per_device_eval_batch_size
        with backend.autocast():
            texts = answers(model, tokenizer, prompts, decoding, size, seen)
        del model
        torch.cuda.empty_cache()  # training needs the memory of the copy
        backend.train_mode(True)
        lines = []
        for (index, prompt, expected, _), text in zip(turns, texts, strict=True):
            line = dict(index=index, prompt=tokenizer.decode(prompt))
            line |= dict(answer=text.strip(), expected=expected.strip())
            lines.append(line | dict(exact_match=line["answer"] == line["expected"]))
        everyone = itertools.chain(*parallel.gather(lines))
        return sorted(everyone, key=lambda line: line["index"])

    def _whole_model(self) -> Any:
        """Get the whole model on this rank, as a transformers model. The torch backend has it
        already. On megatron-core it is exported to a folder in output_dir, loaded from there on
        every rank, and the folder is deleted; that is collective."""
        trainer = self.trainer
        backend = trainer.backend
        if backend.name == "torch":
            return trainer.model
        check_room(backend)
        folder = Path(trainer.args.output_dir) / ".generate"
        try:
            backend.export_merged(folder, trainer.args.max_shard_size)
            model = load_torch_model(str(folder), dtype=backend.dtype).eval()
            parallel.barrier()
        finally:
            if parallel.is_main():
                shutil.rmtree(folder, ignore_errors=True)
        return model


def check_room(backend: Any) -> None:
    """Raise ValueError, on every rank, if any rank has no room for a copy of the whole model.
    Collective on megatron-core; the torch backend needs no copy, and always passes."""
    if backend.name == "torch":
        return
    with torch.device("meta"):
        config = AutoConfig.for_model(**backend.hf_config)
        whole = model_class(config).from_config(config)
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
    """Bytes that this rank can still use: on its GPU, or on a machine without GPUs its share of
    free host memory."""
    if torch.cuda.is_available():
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    return psutil.virtual_memory().available / world.current().local_size


def rouge_l(answer: str, expected: str) -> float:
    """ROUGE-L's F1 of two texts, 0 to 1: twice the longest common subsequence of words, divided by
    the number of words in both texts. 1 if both have no words."""
    a = _WORD.findall(answer.lower())
    b = np.array(_WORD.findall(expected.lower()))
    if not a or not len(b):
        return float(len(a) == len(b))
    longest = np.zeros(
        len(b) + 1, int
    )  # [j]: longest common subsequence of a's words so far and b[:j]
    for word in a:
        ending_here = (longest[:-1] + 1) * (b == word)
        longest[1:] = np.maximum.accumulate(np.maximum(longest[1:], ending_here))
    return 2 * int(longest[-1]) / (len(a) + len(b))
