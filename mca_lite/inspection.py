"""The dry run: what a run does before its first step, and what each of its ranks would hold and
read then. One process does it alone, and writes nothing.
"""

import copy
import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import transformers

from . import ckpt_folder, lora
from .args import RunArguments
from .backend_megatron import PACKED_BUCKET, MegatronBackend
from .backend_torch import TorchBackend
from .data import TokenDataset, marked_runs, tokens_of
from .data_batches import Collator, Packs, make_loader, samples_of
from .data_chat import ChatRenderer
from .data_encode import BAD, CUT, LEFT_OUT, UNLABELED, cache_folder, joins_texts
from .data_files import SIDES
from .data_stream import TokenStream
from .files import check_can_write
from .log import format_summary, steps_summary
from .log_html import document, esc, tiles
from .model_config import grow
from .plan_memory import ModelTensors
from .run import Plan, data_summary, make_plan
from .trainer_events import plan_batches, read_step

# -- counts and samples

# what can be wrong with a sample
FOUND = {
    "duplicate": "the same tokens as an earlier one",
    "in training too": "the same tokens as one of the training data",
    "double BOS": "the token that begins a text, twice in a row",
    "no end of turn": "a trained turn ends without the token that ends it",
    "cut in a turn": "cutoff_len cut a trained turn before its end",
}
_MAX_ROWS = 10
_MAX_BARS = 12


class Side(NamedTuple):
    """A piece of a sample: what it is, and (text, whether it is trained) of its runs of tokens."""

    name: str
    runs: list[tuple[str, bool]]


class Sample(NamedTuple):
    """One of a dataset. sides: one; of a pair what both begin with, then how chosen and rejected go
    on. found: what is wrong with it, of FOUND."""

    number: int
    sides: list[Side]
    found: list[str]


class Row(NamedTuple):
    """A packed row: (name, tokens) of each document, and the tokens that it has room for."""

    number: int
    documents: list[tuple[str, int]]
    capacity: int


@dataclass
class Part:
    """A dataset of a run: training, or one of the evaluation. bars: (how many tokens, documents
    that have so many). found: by the names of FOUND the numbers of its samples, or of its texts
    where rows are cut from them. rows: some of them, [] where a sample is a row."""

    name: str
    summary: str
    bars: list[tuple[str, int]] = field(default_factory=list)
    found: dict[str, list[int]] = field(default_factory=dict)
    packing: str = "not packed: each sample is a row, padded to the longest of its micro-batch"
    rows: list[Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class DataInspector:
    """Looks at the datasets of a run.Plan: parts() of each, records() of the files. shown: how many
    samples of each."""

    def __init__(self, plan, shown: int):
        self.plan = plan
        self.shown = shown
        self.tokenizer = plan.tokenizer
        data = plan.arguments.data
        self.objective = plan.objective
        self.joins = self.objective.joins_documents and joins_texts(data)
        self.cutoff_len = data.cutoff_len
        ends = {self.tokenizer.eos_token}
        if not self.objective.joins_documents:
            ends.add(ChatRenderer(self.tokenizer, data.enable_thinking).end_of_turn().strip())
        self.ends = tuple(filter(None, ends))
        vocabulary = self.tokenizer.get_vocab()
        self.end_ids = [vocabulary[text] for text in self.ends if text in vocabulary]
        evaluated = plan.data.eval
        if not isinstance(evaluated, dict):
            evaluated = {"evaluation": evaluated}
        sets = {"training": plan.data.train, **evaluated}
        self.sets = {name: dataset for name, dataset in sets.items() if dataset is not None}

    def records(self) -> dict[str, int]:
        """Counts over the files of all datasets: what was read, and what became of it."""
        sets = self.sets.values()
        shards = {shard.folder: shard for one in sets for shard in samples_of(one).shards}
        counts = dict.fromkeys(("read", BAD, CUT, UNLABELED, LEFT_OUT), 0)
        for shard in shards.values():
            counts["read"] += shard.tally.records
            for kind in (BAD, CUT, UNLABELED, LEFT_OUT):
                counts[kind] += shard.tally.number(kind)
        return counts

    def parts(self) -> Iterator[Part]:
        """What there is to see of each dataset, of the training one first. Reads all samples."""
        trained_on: set[int] = set()
        shards: set = set()
        for name, dataset in self.sets.items():
            tokens = samples_of(dataset)
            part = Part(name, _summary(dataset, self.objective))
            folders = {shard.folder for shard in tokens.shards}
            if not (self.joins and folders <= shards):  # else its texts were those of training
                seen = self._scan(tokens, part, trained_on)
                part.bars = histogram(self._lengths(tokens))
                if name == "training":
                    trained_on = seen
                    shards = folders
            self._map_rows(dataset, part)
            numbers = set(range(min(self.shown, len(tokens))))
            if not self.joins:  # texts have numbers of their own
                numbers |= {number for found in part.found.values() for number in found[:1]}
            part.samples = [self._sample(tokens, number, part) for number in sorted(numbers)]
            yield part

    def _lengths(self, dataset: TokenDataset) -> np.ndarray:
        """Tokens of each document, or of each text that was joined."""
        if not self.joins:
            return dataset.document_lengths.ravel()
        ends = [_ends_of_texts(shard.maps()[0], self.tokenizer) for shard in dataset.shards]
        return np.concatenate([np.diff(of_shard, prepend=0) for of_shard in ends])

    def _scan(self, dataset: TokenDataset, part: Part, trained_on: set[int]) -> set[int]:
        """Fill part.found -> hashes of the samples."""
        names = [name for name in FOUND if name != "in training too" or trained_on]
        if self.objective.joins_documents:
            names = [name for name in names if "turn" not in name]
        part.found = {name: [] for name in names}
        seen: set[int] = set()
        for number, documents in self._units(dataset):
            key = hash(tuple(tokens.tobytes() for tokens, _ in documents))
            found = set()
            if key in seen:
                found.add("duplicate")
            if key in trained_on:
                found.add("in training too")
            seen.add(key)
            for tokens, trained in documents:
                found |= self._wrong_with(tokens, trained)
            for name in found & part.found.keys():
                part.found[name].append(number)
        return seen

    def _units(self, dataset: TokenDataset) -> Iterator[tuple[int, list[tuple]]]:
        """(number, (tokens, whether each is trained) of its documents) of each sample once, though
        a mix repeats it; or of each text, whole, that joining cut into rows."""
        if not self.joins:
            for number in np.sort(np.unique(dataset.index, return_index=True)[1]).tolist():
                yield number, [tokens_of(document) for document in dataset[number]]
            return
        number = 0
        for shard in dataset.shards:
            ids = shard.maps()[0].astype(np.int64)
            for text in np.split(ids, _ends_of_texts(ids, self.tokenizer)[:-1]):
                yield number, [(text, np.ones(len(text), bool))]
                number += 1

    def _wrong_with(self, tokens: np.ndarray, trained: np.ndarray) -> set[str]:
        found = set()
        bos = self.tokenizer.bos_token_id
        # where bos is eos too, it stands between joined texts
        if bos is not None and not (self.joins and bos == self.tokenizer.eos_token_id):
            if ((tokens[1:] == bos) & (tokens[:-1] == bos)).any():
                found.add("double BOS")
        ends = np.flatnonzero(trained & ~np.append(trained[1:], False))
        for end in ends[~np.isin(tokens[ends], self.end_ids)].tolist():
            # an end of several tokens, or white space behind it
            tail = self.tokenizer.decode(tokens[: end + 1][-16:].tolist()).rstrip()
            if not tail.endswith(self.ends):
                is_cut = end == self.cutoff_len  # a document has one token more at most
                found.add("cut in a turn" if is_cut else "no end of turn")
        return found

    def _map_rows(self, dataset, part: Part) -> None:
        if isinstance(dataset, Packs):
            count = len(dataset)
            names = [""]
            if self.objective.has_pairs:
                names = [f" {side}" for side in SIDES]
            capacity = self.cutoff_len * len(names)
            part.packing = f"{count:,} rows of {capacity:,} tokens, samples do not see each other, "
            part.packing += f"{dataset.padding_fraction:.1%} padding"
            lengths = dataset.dataset.document_lengths
            # the longest samples are in the first rows: some of all
            for number in np.unique(np.linspace(0, count - 1, _MAX_ROWS, dtype=int)).tolist():
                pack = dataset.packs[number]
                named = [(f"{i}{names[k]}", int(n)) for i in pack for k, n in enumerate(lengths[i])]
                part.rows.append(Row(number, named, capacity))
        elif self.joins:
            part.packing = f"{len(dataset):,} rows of {self.cutoff_len:,} tokens, texts joined "
            part.packing += "and cut, which see each other"
            ends = [_ends_of_texts(shard.maps()[0], self.tokenizer) for shard in dataset.shards]
            before = np.cumsum([0, *map(len, ends)]).tolist()
            for i in range(min(len(dataset), _MAX_ROWS)):
                shard, row = dataset.place(i)
                start, stop = dataset.shards[shard].spans[row, 0]
                inside = ends[shard][(ends[shard] > start) & (ends[shard] < stop - 1)]
                first = before[shard] + int(np.searchsorted(ends[shard], start, side="right"))
                sizes = np.diff([start, *inside, stop - 1]).tolist()
                named = [(str(first + n), size) for n, size in enumerate(sizes)]
                part.rows.append(Row(i, named, self.cutoff_len))

    def _sample(self, dataset: TokenDataset, number: int, part: Part) -> Sample:
        documents = dataset[number]
        found = []
        if not self.joins:
            found = [name for name, numbers in part.found.items() if number in numbers]
        sizes = [f"{len(document['input_ids']):,} tokens" for document in documents]
        if not self.objective.has_pairs:
            name = f"{'row' if self.joins else 'sample'} {number}, {sizes[0]}"
            return Sample(number, [Side(name, self._runs(documents[0]))], found)
        chosen, rejected = (tokens_of(document)[0] for document in documents)
        size = min(len(chosen), len(rejected))
        differ = np.append(chosen[:size] != rejected[:size], True)
        at = int(differ.argmax())
        sides = [Side(f"pair {number}: the first {at:,} tokens", self._runs(documents[0], 0, at))]
        for name, count, of_side in zip(SIDES, sizes, documents, strict=True):
            sides.append(Side(f"{name}, {count}, goes on", self._runs(of_side, at)))
        return Sample(number, sides, found)

    def _runs(self, document: dict, start: int = 0, stop: int | None = None):
        """(text, whether it is trained) of the runs of a document from one token to another."""
        tokens, trained = (of_all[start:stop] for of_all in tokens_of(document))
        return marked_runs(tokens, trained, self.tokenizer)


def _ends_of_texts(ids: np.ndarray, tokenizer) -> np.ndarray:
    """Behind the end token of each text of a stream."""
    return np.flatnonzero(ids == tokenizer.eos_token_id) + 1


def _summary(dataset, objective) -> str:
    tokens = samples_of(dataset)
    count = dataset.num_tokens
    share = dataset.num_trained_tokens / max(count, 1)
    return f"{len(tokens):,} {objective.unit}s, {count:,} tokens, {share:.1%} of them trained"


def histogram(lengths: np.ndarray) -> list[tuple[str, int]]:
    """("from-to", how many of the lengths lie there) of at most 12 bars of one round width."""
    width = 1
    least = int(lengths.min())
    most = int(lengths.max())
    while most // width - least // width >= _MAX_BARS:
        width = {"1": 2, "2": 5, "5": 10}[str(width)[0]] * 10 ** (len(str(width)) - 1)
    bars = []
    for start in range(least // width * width, most + 1, width):
        name = f"{start:,}" if width == 1 else f"{start:,}-{start + width - 1:,}"
        bars.append((name, int(((lengths >= start) & (lengths < start + width)).sum())))
    return bars


def visible(text: str, most: int) -> str:
    """The text with codes instead of characters that nobody sees, or that control a terminal, and
    without its middle where it is longer than `most`."""
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


# -- the page

_MAX_CHARS = 20_000  # of a piece of a sample
_STYLE = """
:root { --mark: #c9f0d3; --ink: #0b3d1c; }
@media (prefers-color-scheme: dark) { :root { --mark: #1d4d2e; --ink: #c8f5d5; } }
a { color: inherit }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem } dd { margin: 0 }
h3 { margin-top: 1.2rem } details { margin: .6rem 0 }
.tiles span.c5 { color: var(--c5); font-size: inherit }
.tiles small { display: block; font-weight: 400; color: var(--soft) }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 2px .7rem;
  font-size: .85rem } .bars i, .row i { background: var(--c0); border-radius: 0 3px 3px 0 }
.row { display: flex; height: 1.25rem; line-height: 1.25rem; margin: 2px 0;
  font-size: .7rem; gap: 1px; color: var(--back) }
.row span { width: 3rem; flex: none; color: var(--soft) }
.row i { overflow: hidden; text-align: center; font-style: normal; min-width: 0 }
.row i:nth-child(odd) { opacity: .7 } .row s { border: 1px dashed var(--line); min-width: 0 }
article { margin: .7rem 0 } article h4 { margin: 0 0 .3rem; font-size: .9rem }
.text, pre { font: .85rem/1.55 ui-monospace, monospace; white-space: pre-wrap;
  max-height: 28rem; overflow-y: auto; margin: 0 }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: .8rem; margin-top: .6rem;
  border-top: 1px dashed var(--soft); padding-top: .5rem }
mark { background: var(--mark); color: var(--ink); border-radius: 3px }
"""


def page(title: str, plan, report: list[str], records: dict[str, int], parts: list[Part]) -> str:
    """The page of a run.Plan. report: lines about its files; records, parts: as DataInspector has
    them."""
    facts = {"model": plan.arguments.model.model_name_or_path}
    told = [part.name for part in parts]
    facts |= {name: text for name, text in data_summary(plan).items() if name not in told}
    rows = (f"<dt>{esc(name)}</dt><dd>{esc(text)}</dd>" for name, text in facts.items())
    read = _text("\n".join(report))
    body = [
        f"<h1>inspect {esc(title)}</h1><dl>{''.join(rows)}</dl><h3>Records of the files</h3>",
        tiles((name, _count(count, name != "read")) for name, count in records.items()),
        f"<details><summary>what was read</summary><pre class='card'>{read}</pre></details>",
        "<p><mark>Marked</mark> tokens are trained: they carry loss. The others are read.</p>",
        *(html for number, part in enumerate(parts) for html in _part(number, part)),
    ]
    return document(f"inspect {title}", _STYLE, body)


def _count(count: int, is_bad: bool) -> str:
    return f"<span class='c5'>{count:,}</span>" if count and is_bad else f"{count:,}"


def _part(number: int, part: Part) -> Iterable[str]:
    yield f"<h2>{esc(part.name)}</h2><p>{esc(part.summary)}</p>"
    shown = {sample.number for sample in part.samples}
    found = []
    for name, numbers in part.found.items():
        links = [f'<a href="#{number}-{n}">{n}</a>' if n in shown else str(n) for n in numbers[:5]]
        where = ": " + ", ".join(links) if links else ""
        found.append((name, f"{_count(len(numbers), True)}<small>{FOUND[name]}{where}</small>"))
    yield tiles(found)
    yield "<h3>Samples</h3>"
    yield from (_sample(number, sample) for sample in part.samples)
    if part.bars:
        yield '<h3>Tokens of a document</h3>\n<div class="bars">'
        most = max(count for _, count in part.bars)
        for lengths, count in part.bars:
            width = 100 * count / most
            yield f'<span>{lengths}</span><i style="width:{width:.2f}%"></i><span>{count:,}</span>'
        yield "</div>"
    yield f"<h3>Rows</h3><p>{esc(part.packing)}</p>"
    yield from map(_row, part.rows)


def _row(row: Row) -> str:
    blocks = []
    used = 0
    for name, size in row.documents:
        used += size
        what = esc(f"{name}: {size:,} tokens")
        blocks.append(f'<i style="flex:{size} 0 0" title="{what}">{esc(name)}</i>')
    if free := row.capacity - used:
        blocks.append(f'<s style="flex:{free} 0 0" title="{free:,} free"></s>')
    return f'<div class="row"><span>{row.number}</span>{"".join(blocks)}</div>'


def _sample(part: int, sample: Sample) -> str:
    found = f' <b class="c5">{", ".join(sample.found)}</b>' if sample.found else ""
    first, *others = map(_side, sample.sides)
    body = first.replace("</h4>", f"{found}</h4>", 1)
    if others:
        body += f'<div class="sides"><div>{"</div><div>".join(others)}</div></div>'
    return f'<article class="card" id="{part}-{sample.number}">{body}</article>'


def _side(side: Side) -> str:
    text = ""
    for run, is_trained in side.runs:
        text += f"<mark>{_text(run)}</mark>" if is_trained else _text(run)
    return f'<h4>{side.name}</h4><div class="text">{text}</div>'


def _text(text: str) -> str:
    return esc(visible(text, _MAX_CHARS))


# -- the dry run

_MAX_RANKS = 64


def check(arguments: RunArguments) -> None:
    """Print what a run would begin with, in the world of WORLD_SIZE. What keeps it from its first
    step is raised, as the run would raise it."""
    cache = cache_folder(arguments.data)
    with tempfile.TemporaryDirectory(prefix="mca_lite-check-") as folder:
        arguments.data.cache_dir = folder
        _show_cache(cache, Path(folder))
        plan = make_plan(arguments)
        if any(not path.is_symlink() for path in Path(folder, "tokens").glob("*")):
            check_can_write(cache, "cache_dir")  # the run would tokenise into it
        print(*plan.data.report, sep="\n")
        print(format_summary({"model": _of_model(plan), "data": data_summary(plan)}))
        if arguments.training.do_train:
            print(format_summary({"steps": _of_steps(plan)}))
            print(*_of_ranks(plan), sep="\n")
    first = "first step" if arguments.training.do_train else "evaluation"
    print(f"\nok: nothing was written, and nothing keeps the run from its {first}")


def _show_cache(cache: Path, folder: Path) -> None:
    """Let a folder have what is in the token cache by links; what is not goes into the folder."""
    for kind in ("tokens", "hashes"):
        (folder / kind).mkdir()
        for path in (cache / kind).glob("*"):
            if not path.suffix:  # else a lock, or progress
                (folder / kind / path.name).symlink_to(path.absolute())


def _of_model(plan: Plan) -> dict:
    planned = plan.model
    config = plan.model.config
    weights = "a checkpoint of this package"
    if planned.from_scratch:
        weights = "drawn from the seed"
    elif planned.source is not None:
        weights = f"{len(planned.source.names()):,} tensors, whose names and shapes fit"
    return {
        "name": plan.arguments.model.model_name_or_path,
        "type": getattr(config, "hf_model_type", None) or config.model_type,
        "weights": weights,
        "tokens": planned.vocab_size,
        "reference": plan.second_model and str(plan.second_model.folder),
    }


def _of_steps(plan: Plan) -> dict:
    """What the run will say of its steps, and what it would resume. ValueError where that, or a new
    run in output_dir, is refused."""
    args = plan.arguments.training
    config = plan.model.config
    notes = []
    asked = args.resume_from_checkpoint
    if asked in (None, False):
        ckpt_folder.check_new(args)
    else:
        kind = "megatron"
        hf = getattr(config, "hf_config", None)
        if not plan.arguments.backend.use_mca:
            kind = "torch"
            hf = config.to_dict()
        identity = ckpt_folder.model_identity(hf)
        ckpt_folder.choose(args, asked, kind, identity, notes.append)
    trainer = _absent_trainer(plan, 0)
    told = steps_summary(trainer, plan_batches(trainer, trainer.train_dataset, training=True))
    del told["from step"]  # it is in the checkpoint, which is not read
    return {**told, "resuming": "; ".join(notes) or "no"}


# -- ranks that are not there


class _Absent:
    """Before a backend in the order of classes, and in place of its constructor: what is known of
    a data parallel rank before it is there."""

    dp_rank = 0
    dp_size = 1
    at_least = 0

    def __init__(self, plan: Plan, dp_rank: int):
        self.args = plan.arguments.training
        self.config = plan.model.config
        self.dp_rank = dp_rank
        self.dp_size = self.args.data_parallel_size

    def common_length(self, longest: int) -> int:
        return super().common_length(max(longest, self.at_least))


class _AbsentMegatron(_Absent, MegatronBackend):
    pass


class _AbsentTorch(_Absent, TorchBackend):
    pass


def _absent_trainer(plan: Plan, dp_rank: int):
    """The trainer of a rank without its constructor, which wants a model and the other ranks."""
    trainer = object.__new__(plan.objective.trainer_class())
    backend = _AbsentMegatron if plan.arguments.backend.use_mca else _AbsentTorch
    trainer.args = plan.arguments.training
    trainer.backend = backend(plan, dp_rank)
    trainer.tokenizer = plan.tokenizer
    trainer.train_dataset = plan.data.train
    trainer.shuffle = not plan.arguments.data.disable_shuffling
    trainer.state = SimpleNamespace(global_step=0, max_steps=plan.steps)
    return trainer


def _first_batches(plan: Plan) -> list[list[tuple[int, int]]]:
    """The shapes [rows, tokens] of the first step's micro-batches, for each data parallel rank."""
    sizes = range(plan.arguments.training.data_parallel_size)
    trainers = [_absent_trainer(plan, dp_rank) for dp_rank in sizes]
    shapes = [_first_batches_of(trainer) for trainer in trainers]
    for trainer in trainers:  # some layouts want one length on all ranks, who ask each other
        trainer.backend.at_least = max(length for of_rank in shapes for _, length in of_rank)
    return [_first_batches_of(trainer) for trainer in trainers]


def _first_batches_of(trainer) -> list[tuple[int, int]]:
    data = trainer.train_dataset
    collate = Collator(trainer._pad_token_id)
    batches = plan_batches(trainer, data, training=True)
    if isinstance(data, TokenStream):
        loader = data.loader(collate, batches, None, num_workers=0, speaks=False)
    else:
        loader = make_loader(data, collate, batches)
    step = read_step(trainer, iter(loader), batches, 0)[0]
    return [tuple(batch["input_ids"].shape) for batch in step]


def _of_ranks(plan: Plan) -> Iterator[str]:
    args = plan.arguments.training
    shapes = _first_batches(plan)
    stages = _stages(plan)
    config = plan.model.config
    tp = args.tensor_model_parallel_size
    cp = args.context_parallel_size
    # in megatron-core's order of ranks the first of these counts fastest
    sizes = {"tensor": tp, "context": cp, "data": args.data_parallel_size}
    of_experts = {}
    if plan.arguments.backend.use_mca and config.num_moe_experts:
        of_experts["expert tensor"] = config.expert_tensor_parallel_size
        of_experts["expert"] = config.expert_model_parallel_size
    heads = "".join(f" {name:>7}" for name in ("stage", *sizes, *of_experts))
    yield f"\nrank{heads}     parameters        trained  first step reads"
    for rank in range(min(args.world_size, _MAX_RANKS)):
        stage, within = divmod(rank, args.world_size // len(stages))
        places = {"stage": stage, **_places(within, sizes), **_places(within, of_experts)}
        data = places["data"]
        (held, trained, _) = stages[stage]
        sp = tp if args.sequence_parallel else 1
        batches = []
        for (b, s), alike in itertools.groupby(shapes[data]):
            batches.append(f"{len(list(alike))} x [{b}, {s // cp}]")
            if stage:  # what comes from the stage before
                batches[-1] += f" as [{s // cp // sp}, {b}, {config.hidden_size}]"
        columns = "".join(f" {place:>{max(7, len(name))}}" for name, place in places.items())
        yield f"{rank:>4}{columns} {held:>14,} {trained:>14,}  {', '.join(batches)}"
    if args.world_size > _MAX_RANKS:
        yield f"  ... and {args.world_size - _MAX_RANKS:,} ranks more"
    if args.sequence_packing and not torch.cuda.is_available() and plan.arguments.backend.use_mca:
        yield f"note: on GPUs packed rows are padded to multiples of {PACKED_BUCKET} tokens"
    for stage, (_, _, tensors) in enumerate(stages):
        yield f"\na rank of stage {stage} holds"
        for (name, shape), layers in tensors.items():
            where = "" if layers == [None] else f"  layers {_spans(layers)}"
            yield f"  {name:58} {list(shape)}{where}"


def _places(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """A rank's coordinates in a grid, whose first axis counts fastest."""
    places = {}
    for name, size in sizes.items():
        rank, places[name] = divmod(rank, size)
    return places


def _stages(plan: Plan) -> list[tuple[int, int, dict]]:
    """(parameters, those that are trained, {(name, shape): layers}) of a rank of each stage."""
    config = plan.model.config
    spec = plan.model.adapters
    if plan.arguments.backend.use_mca:
        tensors = ModelTensors(config, spec)
        stages = []
        for stage in range(config.pipeline_model_parallel_size):
            held, trained, adapters = tensors.of_stage(config, stage)
            total = held.sum + adapters.sum
            stages.append((total, trained.sum + adapters.sum, tensors.shapes(config, stage)))
        return stages
    config = copy.deepcopy(config)
    grow(config, plan.model.vocab_size)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=plan.arguments.model.trust_remote_code
        )
        if spec is not None:
            lora.inject(model, spec)
    found: dict = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        name = re.sub(r"\.layers\.\d+\.", ".layers.{}.", name)
        number = int(layer[1]) if layer else None
        found.setdefault((name, tuple(parameter.shape)), []).append(number)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [(sum(p.numel() for p in model.parameters()), trained, found)]


def _spans(layers: list[int]) -> str:
    """0-3, 6 of [0, 1, 2, 3, 6]."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))
