"""Facts about a run before it begins: samples, rows and problems in its data; its ranks in a dry
run.

One process does this alone. The dry run (check) leaves output_dir and the token cache unchanged.
"""

import collections
import copy
import itertools
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import ckpt_folder
from .args import RunArguments
from .args_values import show_count
from .backend_megatron import PACKED_BUCKET, ROW_BUCKET, MegatronBackend
from .backend_torch import TorchBackend
from .data import TokenDataset, marked_runs, tokens_of
from .data_batches import Packs, Stream, make_loader, samples_of
from .data_chat import ChatRenderer
from .data_encode import BAD, CUT, LEFT_OUT, UNLABELED, joins_texts
from .data_files import SIDES
from .files import cache_folder, check_can_write, printable
from .log import format_summary, steps_summary
from .model_config import grow
from .run import Plan, data_summary, make_plan, named_sets
from .tool_plan_memory import ModelTensors
from .weights_files import model_class

# -- the data

PROBLEMS = {  # what may be wrong with a sample
    "duplicate": "the same tokens as an earlier one",
    "in training too": "the same tokens as one of the training data",
    "double BOS": "the token that begins a text, twice in a row",
    "no end of turn": "a trained turn ends without its end token",
    "cut in a turn": "cutoff_len cut a trained turn before its end",
}
_MAX_ROWS = 10
_MAX_BARS = 12
_TAIL = 16  # an end of turn is searched in this many tokens


class Side(NamedTuple):
    """A piece of a sample to show, such as the rejected answer of a pair. name: its heading. runs:
    its text in pieces, each with True if the piece is trained. pictures: (data: URL, caption) for
    each picture."""

    name: str
    runs: list[tuple[str, bool]]
    pictures: Sequence[tuple[str, str]] = ()


class Sample(NamedTuple):
    """A sample of a dataset to show. number: its index in the dataset. sides: one with the whole
    text; for a preference pair three: the beginning that both documents share, the rest of the
    chosen one, and the rest of the rejected one. problems: the problems found in it, as names in
    PROBLEMS."""

    number: int
    sides: list[Side]
    problems: list[str]


class Row(NamedTuple):
    """A packed row, in which several samples may be joined. number: its index. samples: (sample
    index, number of tokens) for each sample in it. capacity: the number of tokens that it has room
    for."""

    number: int
    samples: list[tuple[int, int]]
    capacity: int


@dataclass
class Part:
    """Facts about one dataset of a run, for training or evaluation, to show to the user.

    bars: a histogram of document lengths, as (range of lengths, count). problems: {name in
    PROBLEMS: indices of the samples that have it}. packing: a sentence on how samples become rows.
    rows: some of the packed rows; [] if samples are not packed. pictures: their number, as text; ""
    if there are none. samples: the samples to show. If texts are joined and then cut into rows,
    bars and problems are about the texts."""

    name: str
    pictures: str = ""
    bars: list[tuple[str, int]] = field(default_factory=list)
    problems: dict[str, list[int]] = field(default_factory=dict)
    packing: str = "not packed: each sample is a row, padded to the longest of its micro-batch"
    rows: list[Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class DataInspector:
    """Collects facts about the datasets of a planned run, such as duplicate samples. shown: how
    many samples per dataset to show, from the first on. The first sample with each problem is shown
    too, unless texts are joined and then cut into rows. Sets is_read of the plan's media (the
    reader of images) to False, so that only the pictures of shown samples are read."""

    def __init__(self, plan: Plan, shown: int) -> None:
        self.shown = shown
        self.tokenizer = plan.tokenizer
        data = plan.arguments.data
        self.objective = plan.objective
        self.joins = self.objective.joins_documents and joins_texts(data)
        self.cutoff_len = data.cutoff_len
        ends = {self.tokenizer.eos_token, *data.end_of_answer}
        if self.objective.is_rendered:
            ends.add(ChatRenderer(self.tokenizer, data.enable_thinking).end_of_turn().strip())
        self.ends = tuple(filter(None, ends))
        self.sets = named_sets(plan.data)
        self.media = plan.data.media
        self.media.is_read = False  # only the shown samples' pictures are read

    def records(self) -> dict[str, int]:
        """Counts over the files of all datasets: {"read": number of records read, then for each
        kind of defect, such as "truncated": number of records, or of samples made from them, that
        have it}."""
        tallies = {}
        for dataset in self.sets.values():
            tallies |= {shard.folder: shard.tally for shard in samples_of(dataset).shards}
        counts = {"read": sum(tally.records for tally in tallies.values())}
        for kind in (BAD, CUT, UNLABELED, LEFT_OUT):
            counts[kind] = sum(tally.number(kind) for tally in tallies.values())
        return counts

    def parts(self) -> Iterator[Part]:
        """Yield a Part with the facts about each dataset, training first. Reads the samples."""
        trained_on: set[int] = set()
        trained_shards: set[Path] = set()
        for name, dataset in self.sets.items():
            tokens = samples_of(dataset)
            part = Part(name)
            shards = {shard.folder for shard in tokens.shards}
            if (
                not self.joins or not shards <= trained_shards
            ):  # otherwise its texts are those of training
                hashes = self._scan(tokens, part, trained_on)
                part.bars = histogram(self._lengths(tokens))
                if name == "training":
                    trained_on = hashes
                    trained_shards = shards
            if isinstance(dataset, Packs):
                self._map_packs(dataset, part)
            elif self.joins:
                rows = f"{len(dataset):,} rows of {self.cutoff_len:,} tokens"
                part.packing = f"{rows}, texts joined and cut, which see each other"
            numbers = set(range(min(self.shown, len(tokens))))
            if not self.joins:  # texts are numbered differently
                numbers.update(*(found[:1] for found in part.problems.values()))
            part.samples = [self._sample(tokens, number, part) for number in sorted(numbers)]
            yield part

    def _ends_of_texts(self, shard: Any) -> np.ndarray:
        """Find the ends of the texts in a shard (a dataset's tokens), in which texts are joined
        with an eos token after each -> the indices just after each eos."""
        return np.flatnonzero(shard.tokens == self.tokenizer.eos_token_id) + 1

    def _lengths(self, dataset: TokenDataset) -> np.ndarray:
        """The lengths for the histogram: the number of input tokens of each document; if texts are
        joined and then cut into rows, the number of tokens of each text."""
        if not self.joins:
            return dataset.document_lengths.ravel()
        ends = map(self._ends_of_texts, dataset.shards)
        return np.concatenate([np.diff(of_shard, prepend=0) for of_shard in ends])

    def _scan(self, dataset: TokenDataset, part: Part, trained_on: set[int]) -> set[int]:
        """Look for problems in each sample of a dataset, and set part.problems and part.pictures,
        in place -> hashes of the samples. If texts are joined and then cut into rows, each text
        counts as a sample. trained_on: the hashes of the training data's samples, to find samples
        that are there too."""
        part.problems = {name: [] for name in PROBLEMS}
        hashes: set[int] = set()
        num_tokens: collections.Counter[str] = collections.Counter()
        for number, documents in self._units(dataset):
            key = hash(tuple(tokens.tobytes() for tokens, _ in documents))
            found = set()
            if key in hashes:
                found.add("duplicate")
            if key in trained_on:
                found.add("in training too")
            hashes.add(key)
            for tokens, trained in documents:
                found |= set(self._problems(tokens, trained))
                self._count_pictures(tokens, num_tokens)
            for name in found:
                part.problems[name].append(number)
        if num_tokens["pictures"]:
            part.pictures = show_count(num_tokens["pictures"], "picture")
            part.pictures += f", {num_tokens['placeholders']:,} of {num_tokens['all']:,} tokens"
        return hashes

    def _count_pictures(self, tokens: np.ndarray, counts: collections.Counter[str]) -> None:
        """Add to `counts` the numbers of one document: "all" (of its tokens), "placeholders" (of
        the tokens that stand for pictures and the like), "pictures" (of unbroken runs of
        placeholders). tokens: the document's, int64 [n]."""
        is_image = np.append(np.isin(tokens, self.media.token_ids), False)
        counts["pictures"] += int((is_image[:-1] & ~is_image[1:]).sum())
        counts["placeholders"] += int(is_image.sum())
        counts["all"] += len(tokens)

    def _units(self, dataset: TokenDataset) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
        """Yield (number, documents) for each sample in which to look for problems; a sample that a
        mix repeats is yielded once. If texts are joined and then cut into rows, yield each text (up
        to an eos) as a sample with one document. A document is (tokens int64 [n], bool [n], True
        for tokens with loss)."""
        if not self.joins:
            for number in np.sort(np.unique(dataset.indices, return_index=True)[1]).tolist():
                yield number, [tokens_of(document) for document in dataset[number]]
            return
        texts = itertools.chain.from_iterable(
            np.split(shard.tokens, self._ends_of_texts(shard)[:-1]) for shard in dataset.shards
        )
        for number, text in enumerate(texts):
            yield number, [(text.astype(np.int64), np.ones(len(text), bool))]

    def _problems(self, tokens: np.ndarray, trained: np.ndarray) -> Iterator[str]:
        """Yield the problems inside one document, as names in PROBLEMS; a name may come several
        times. tokens: int64 [n]. trained: bool [n], True for tokens with loss."""
        bos = self.tokenizer.bos_token_id
        is_bos = tokens == bos
        # if bos is also eos, it separates joined texts
        separates = self.joins and bos == self.tokenizer.eos_token_id
        if not separates and (is_bos[1:] & is_bos[:-1]).any():
            yield "double BOS"
        ends = np.flatnonzero(trained & ~np.append(trained[1:], False))
        end_ids = self.tokenizer.convert_tokens_to_ids(list(self.ends))
        for end in ends[~np.isin(tokens[ends], end_ids)].tolist():
            # the end may have several tokens, or white space after it
            tail = self.tokenizer.decode(tokens[: end + 1][-_TAIL:].tolist()).rstrip()
            if tail.endswith(self.ends):
                continue
            # a document has at most cutoff_len + 1 tokens
            yield "cut in a turn" if end == self.cutoff_len else "no end of turn"

    def _map_packs(self, packs: Packs, part: Part) -> None:
        capacity = self.cutoff_len * packs.documents_per_sample
        part.packing = f"{len(packs):,} rows of {capacity:,} tokens, samples do not see each other"
        part.packing += f", {packs.padding_fraction:.1%} padding"
        sizes = packs.dataset.document_lengths.sum(axis=1).tolist()
        # rows from everywhere, because the first rows have the longest samples
        for number in np.unique(np.linspace(0, len(packs) - 1, _MAX_ROWS, dtype=int)).tolist():
            samples = [(i, sizes[i]) for i in packs.packs[number]]
            part.rows.append(Row(number, samples, capacity))

    def _sample(self, dataset: TokenDataset, number: int, part: Part) -> Sample:
        documents = [tokens_of(document) for document in dataset[number]]
        sizes = [f"{len(tokens):,} tokens" for tokens, _ in documents]
        if self.joins:
            return Sample(number, [self._side(f"row {number}, {sizes[0]}", documents[0])], [])
        problems = [name for name, numbers in part.problems.items() if number in numbers]
        pictures = self._pictures(dataset, number)
        if not self.objective.has_pairs:
            side = self._side(f"sample {number}, {sizes[0]}", documents[0], pictures=pictures)
            return Sample(number, [side], problems)
        (chosen, _), (rejected, _) = documents
        size = min(len(chosen), len(rejected))
        at = int(np.append(chosen[:size] != rejected[:size], True).argmax())
        name = f"pair {number}: the first {at:,} tokens"
        sides = [self._side(name, documents[0], stop=at, pictures=pictures)]
        for name, count, document in zip(SIDES, sizes, documents, strict=True):
            sides.append(self._side(f"{name}, {count}, goes on", document, at))
        return Sample(number, sides, problems)

    def _pictures(self, dataset: TokenDataset, number: int) -> list[tuple[str, str]]:
        """The pictures of a sample to show: (data: URL, caption) for each one in its first
        document. A video is shown by one frame. number: the sample's index in the dataset."""
        if not self.media.block:
            return []
        index = int(dataset.indices[number])
        at = int(np.searchsorted(dataset.ends, index, side="right"))
        shard = dataset.shards[at]
        return self.media.shown(shard.placed(index - dataset.ends[at] + len(shard))[0])

    def _side(
        self,
        name: str,
        document: tuple[Any, ...],
        start: int = 0,
        stop: int | None = None,
        pictures: Any = (),
    ) -> Side:
        tokens, trained = (column[start:stop] for column in document)
        return Side(name, marked_runs(tokens, trained, self.tokenizer, self.media), pictures)


def histogram(lengths: np.ndarray) -> list[tuple[str, int]]:
    """[("from-to", count)] of lengths, for at most 12 ranges of equal width."""
    least = int(lengths.min())
    width = math.ceil((int(lengths.max()) - least + 1) / _MAX_BARS)
    counts = np.bincount((lengths - least) // width).tolist()
    starts = range(least, least + width * len(counts), width)
    ranges = [f"{start:,}-{start + width - 1:,}" for start in starts]
    return list(zip(ranges, counts, strict=True))


# -- the dry run


def check(arguments: RunArguments) -> None:
    """The dry run: print how a run on WORLD_SIZE ranks would begin, namely its model and data; if
    the run trains, also its steps, each rank's first batches and the tensors of each pipeline
    stage. Raises the errors that it finds in configuration, model files, data and checkpoints.
    Changes arguments.data.cache_dir."""
    cache = cache_folder(arguments.data.cache_dir)
    with tempfile.TemporaryDirectory(prefix="mca_lite-check-") as folder:
        arguments.data.cache_dir = folder
        _link_cache(cache, Path(folder))
        plan = make_plan(arguments)
        if any(not path.is_symlink() for path in Path(folder, "tokens").glob("*")):
            check_can_write(cache, "cache_dir")  # the run would tokenise into it
        print(*map(printable, plan.data.report), sep="\n")
        print(format_summary({"model": _model_facts(plan), "data": data_summary(plan)}))
        if arguments.training.do_train:
            print(format_summary({"steps": _step_facts(plan)}))
            stages = _stages(plan)
            print(*_rank_table(plan, stages), *_tensor_lists(stages), sep="\n")
    first = "first step" if arguments.training.do_train else "evaluation"
    print(f"\nok: nothing of the run was written, and the run would reach its {first}")


def _link_cache(cache: Path, folder: Path) -> None:
    """Put symbolic links to the cache's finished token shards and file hashes into `folder`, so
    that a dry run can read them and writes nothing into the cache."""
    for kind in ("tokens", "hashes"):
        (folder / kind).mkdir()
        for path in (cache / kind).glob("*"):
            if not path.suffix:  # other files are locks, or builds in progress
                (folder / kind / path.name).symlink_to(path.absolute())


def _model_facts(plan: Plan) -> dict[str, Any]:
    planned = plan.model
    weights = "a checkpoint of this package, or drawn from the seed"
    if planned.source is not None:
        weights = f"{len(planned.source.names()):,} tensors, whose names and shapes fit"
    return {
        "name": plan.arguments.model.model_name_or_path,
        "weights": weights,
        "tokens": f"{planned.vocab_size:,}",
        "reference": plan.second_model and str(plan.second_model.folder),
    }


def _step_facts(plan: Plan) -> dict[str, Any]:
    """Facts about the run's steps, and the checkpoint to resume from. Raises ValueError if that
    checkpoint is damaged or of another model, or if a new run may not begin in output_dir."""
    args = plan.arguments.training
    config = plan.model.config
    notes: list[str] = []
    if not args.resume_from_checkpoint:
        ckpt_folder.check_new(args)
    else:
        kind = "torch"
        values = config.to_dict()
        if plan.arguments.backend.use_mca:
            kind = "megatron"
            values = config.hf_config
        identity = ckpt_folder.model_identity(values)
        ckpt_folder.choose(args, args.resume_from_checkpoint, kind, identity, notes.append)
    trainer = _planned_trainer(plan, 0)
    facts = steps_summary(trainer, trainer.plan_batches(trainer.train_dataset))
    del facts["from step"]  # only the checkpoint has it, and it is not read
    return {**facts, "resuming": "; ".join(notes) or "no"}


# -- planned ranks


class _Planned:
    """A stand-in for the backend of one data-parallel rank in a dry run: it knows the layout, but
    has no weights and communicates with nobody.

    at_least: tokens in the longest row of any rank, for layouts that pad all ranks to one length.
    """

    counts_tokens = False

    def __init__(self, plan: Plan, dp_rank: int) -> None:
        self.args = plan.arguments.training
        self.config = plan.model.config
        self.model = torch.nn.Module()
        self.model.config = self.config
        self.chunks: list[Any] = []
        if plan.arguments.backend.use_mca:
            self.set_layout(self.config, cp_rank=0)
        self.dp_rank = dp_rank
        self.dp_size = self.args.data_parallel_size
        self.at_least = 0

    def common_length(self, longest: int) -> int:
        return super().common_length(max(longest, self.at_least))

    def use_loss(self, of_logits: Any) -> None:
        """Do nothing: a dry run computes no loss."""

    def expect_weighted_losses(self) -> None:
        """Do nothing: a dry run computes no loss."""


class _PlannedMegatron(_Planned, MegatronBackend):
    """The dry run's stand-in for a megatron-core backend."""


class _PlannedTorch(_Planned, TorchBackend):
    """The dry run's stand-in for a plain torch backend."""


def _planned_trainer(plan: Plan, dp_rank: int) -> Any:
    """The trainer of a data-parallel rank in a dry run. Its model has no parameters, so it only
    plans and reads batches."""
    arguments = plan.arguments
    args = copy.copy(arguments.training)
    args.eval_strategy = (
        "no"  # a trainer without a model does not know the metrics of generated answers
    )
    args.predict_with_generate = False
    kind = _PlannedMegatron if arguments.backend.use_mca else _PlannedTorch
    backend = kind(plan, dp_rank)
    make = plan.objective.trainer_class()
    trainer = make(
        model=backend.model,
        args=args,
        tokenizer=plan.tokenizer,
        train_dataset=plan.data.train,
        shuffle=not arguments.data.disable_shuffling,
        backend=backend,
        **make.own_keywords(
            arguments.with_keys(ref_model=None), None
        ),  # no reference model is needed
    )
    trainer.state.max_steps = plan.steps
    return trainer


def _first_batches(plan: Plan) -> list[list[tuple[int, int]]]:
    """The shapes (rows, tokens) of the first step's micro-batches, as one list per data-parallel
    rank."""
    sizes = range(plan.arguments.training.data_parallel_size)
    trainers = [_planned_trainer(plan, dp_rank) for dp_rank in sizes]
    shapes = [_first_batches_of(trainer) for trainer in trainers]
    is_common = getattr(plan.model.config, "moe_token_dispatcher_type", None) == "allgather"
    for trainer in trainers * is_common:  # all ranks agree on one length
        trainer.backend.at_least = max(length for of_rank in shapes for _, length in of_rank)
    return [_first_batches_of(trainer) for trainer in trainers]


def _first_batches_of(trainer: Any) -> list[tuple[int, int]]:
    data = trainer.train_dataset
    batches = trainer.plan_batches(data)
    if isinstance(data, Stream):
        loader = data.loader(trainer.data_collator, batches, None, num_workers=0, speaks=False)
    else:
        loader = make_loader(data, trainer.data_collator, batches)
    step = trainer.read_step(iter(loader), batches, 0)[0]
    return [tuple(batch["input_ids"].shape) for batch in step]


def _rank_table(plan: Plan, stages: list[Any]) -> Iterator[str]:
    """Yield the lines of a table: a head, one line per rank with its coordinates in the parallel
    layout, its parameter counts and the shapes of its first batches, and a note. stages: from
    _stages."""
    args = plan.arguments.training
    shapes = _first_batches(plan)
    config = plan.model.config
    cp = args.context_parallel_size
    # in megatron-core's order of ranks, the first of these varies fastest
    sizes = {
        "tensor": args.tensor_model_parallel_size,
        "context": cp,
        "data": args.data_parallel_size,
    }
    of_experts = {}
    if plan.arguments.backend.use_mca and config.num_moe_experts:
        of_experts["expert tensor"] = config.expert_tensor_parallel_size
        of_experts["expert"] = config.expert_model_parallel_size
    heads = "".join(f" {name:>7}" for name in ("stage", *sizes, *of_experts))
    yield f"\nrank{heads}     parameters        trained  first step reads"
    for rank in range(args.world_size):
        stage, within = divmod(rank, args.world_size // len(stages))
        places = {"stage": stage, **_places(within, sizes), **_places(within, of_experts)}
        total, trained, _ = stages[stage]
        counts = collections.Counter(shapes[places["data"]])
        batches = [f"{count} x [{b}, {s // cp}]" for (b, s), count in counts.items()]
        columns = "".join(f" {place:>{max(7, len(name))}}" for name, place in places.items())
        yield f"{rank:>4}{columns} {total:>14,} {trained:>14,}  {', '.join(batches)}"
    bucket = PACKED_BUCKET if args.sequence_packing else ROW_BUCKET
    yield f"note: megatron-core on GPUs pads rows to multiples of {bucket} tokens"


def _tensor_lists(stages: list[Any]) -> Iterator[str]:
    """Yield text lines with name, shape and layers of each tensor on a rank of each pipeline stage.
    stages: from _stages."""
    for stage, (_, _, tensors) in enumerate(stages):
        yield f"\na rank of stage {stage} holds"
        for (name, shape), layers in tensors.items():
            yield f"  {name:58} {list(shape)}{_spans(layers)}"


def _places(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """A rank's coordinates in a grid with these axis sizes; the first axis varies fastest."""
    places = {}
    for name, size in sizes.items():
        rank, places[name] = divmod(rank, size)
    return places


def _stages(plan: Plan) -> list[tuple[int, int, dict[str, Any]]]:
    """List the contents of one rank of each pipeline stage -> per stage (number of parameters,
    number of trained parameters, {(name, shape) of a tensor: indices of the layers that have such a
    tensor, [None] or [] outside layers}). On plain torch there is one stage."""
    config = plan.model.config
    finetuning = plan.model.finetuning
    if plan.arguments.backend.use_mca:
        tensors = ModelTensors(config, finetuning)
        stages = range(config.pipeline_model_parallel_size)
        return [(*tensors.counts(stage), tensors.shapes(stage)) for stage in stages]
    config = copy.deepcopy(config)
    grow(config, plan.model.vocab_size)
    with torch.device("meta"):
        model = model_class(config).from_config(
            config, trust_remote_code=plan.arguments.model.trust_remote_code
        )
        finetuning.place(model)
    tensors: dict[str, Any] = {}
    total = 0
    trained = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        trained += parameter.numel() * parameter.requires_grad
        parts = re.split(r"\.layers\.(\d+)\.", name)
        key = ".layers.{}.".join(parts[::2]), tuple(parameter.shape)
        tensors.setdefault(key, []).extend(map(int, parts[1::2]))
    return [(total, trained, tensors)]


def _spans(layers: list[Any]) -> str:
    """Text about a tensor's layers: "  layers 0-3" for [0, 1, 2, 3], "  layers 1, 3" for [1, 3], ""
    for [None] and []."""
    if layers in ([], [None]):
        return ""
    first = layers[0]
    last = layers[-1]
    spans = ", ".join(map(str, layers))
    if last > first and layers == list(range(first, last + 1)):
        spans = f"{first}-{last}"
    return f"  layers {spans}"
