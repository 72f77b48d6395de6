"""A model's inputs other than text, such as pictures: Media handles these in records, Inputs in the
model.

The classes here are those of a text model: they accept no such input. tables.INPUTS names the
classes of parts. Records are read without torch, so this module does not import it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .args_values import as_list
from .errors import Keys, expect
from .families import FAMILIES, InputTensors
from .parts import absent_rows, need_of
from .tables import INPUTS, function_of, is_of_inputs


class InputWork(NamedTuple):
    """FLOPs of the modules for inputs other than text (such as a vision tower). of_unit: per unit
    of input (an image patch). of_square: to be multiplied by n squared for n units that attend to
    each other, such as the patches of an image. of_frame: per frame of an audio's spectrum."""

    of_unit: float
    of_square: float
    of_frame: float = 0.0


# -- in records

MARK = "\ufdd0"  # stands for an input in a message: a code point that is no character
# the types of message blocks that are inputs
BLOCKS = ("image", "image_url", "video", "video_url", "audio", "audio_url")


class Media:
    """Handles inputs other than text (images, videos, audio) while records are read and tokenised.
    This base class is for text models: it takes no such inputs. Picklable.

    block: the text that stands for an image in a conversation. token_ids: the placeholder tokens.
    kinds: types that a value in the column `image` may have. is_read: False on a rank that does not
    need the contents, such as pixels. options: facts that determine the tokens, for the cache's
    key. unread: record columns of inputs that values_of() refuses; unread_marks: marks in a text
    for which check_mark() is called."""

    block = ""
    token_ids: tuple[int, ...] = ()
    unread: tuple[str, ...] = ("videos", "video", "audios", "audio")
    unread_marks = re.compile(r"<(?:video|audio)>|<\|(?:video|audio)_pad\|>")
    kinds: tuple[type, ...] = (bytes, dict)
    is_read = True

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def folders(self, files: Iterable[str]) -> dict[str, Any]:
        """Paths that decide which files the relative image paths in records mean, as {name: paths}:
        a folder, and the dataset's files. They become part of the token cache's key. files: the
        dataset's files. Base class: {}."""
        return {}

    def check_mark(self, mark: str, where: str) -> None:
        """React to the mark of an input that the model cannot read, such as "<audio>", in a
        record's text. A model with images raises ValueError; this base class, for text models,
        accepts the mark as text."""

    # -- of a record

    def of_columns(self, record: dict[str, Any], columns: dict[str, Any]) -> list[Any]:
        """The values of inputs (such as image paths) in a record's columns; [] if there are none.
        This class looks for images: in `images` (LLaMA-Factory), otherwise in `image` (TRL) if that
        value's type is in `kinds`. columns: {name of a column in dataset_info.json: name in the
        files}."""
        found = record.get(columns.get("images", "images")) or []
        alone = record.get("image")
        if not found and isinstance(alone, self.kinds):
            found = [alone]
        return as_list(found)

    def values_of(self, record: dict[str, Any], columns: dict[str, Any], where: str) -> list[Any]:
        """The values of inputs in a record's columns, as of_columns() returns them. ValueError,
        naming the record by `where`, if a column in `unread` (inputs that this class does not read)
        has a value."""
        for column in self.unread:
            expect(
                not record.get(columns.get(column, column)),
                f"{where}: this model or stage does not read the column {column!r}: remove it",
            )
        return self.of_columns(record, columns)

    def take(
        self, messages: list[dict[str, Any]], of_columns: list[Any], may_lead: bool, where: str
    ) -> tuple[Any, ...]:
        """Replace each input in `messages`, such as an image, by its text (`block` for an image),
        in place -> the inputs, in order. `where` names the record in errors.

        An input is a message block, or a mark such as "<image>" in a message's text. If it has no
        value of its own, it takes the next value in of_columns. may_lead: without marks and blocks,
        the inputs are put before the first question, as TRL does. Raises ValueError if values and
        places for them differ in number. This base class takes marks as text, returns (), and
        raises ValueError if there is a value or a message block.
        """
        of_blocks = [message.pop("media", None) for message in messages]
        reason = "the model reads text: its config.json has no vision_config with "
        reason += "vision_start_token_id, image_token_id, vision_end_token_id"
        if part := absent_rows().get("pictures"):
            reason, _ = need_of(part, "they need")
        expect(
            not (of_columns or any(of_blocks)),
            f"{where}: the record has pictures, videos or audio (columns, or blocks of a message), "
            f"and {reason}",
        )
        return ()

    def of_tokens(self, ids: np.ndarray, values: list[Any], where: str) -> tuple[Any, ...]:
        """Read the inputs, such as images, of a record that is given as token ids -> the inputs,
        with their sizes. ids: the record's tokens, with one placeholder per feature of an input.
        values: the inputs in its columns. Raises ValueError, naming `where`, for an unusable input,
        or if `ids` has another number of placeholders. Base class: ValueError for any input,
        otherwise ()."""
        return self.take([], values, False, where)

    # -- of a document

    def check_template(
        self, template: str, render: Callable[..., Any], messages: list[dict[str, Any]]
    ) -> None:
        """Raise ValueError if the chat template writes an image in another form than `block`, or
        changes the rest of its message. template: its text. render(messages): applies it, and
        returns a conversation as text. messages: those of a conversation with inputs. Base class:
        nothing is checked."""

    def check_rendered(self, text: str, messages: list[dict[str, Any]]) -> None:
        """Raise ValueError if a conversation that the chat template has written as text lacks an
        input, such as an image, of its messages. Base class: nothing is checked."""

    def placed(self, text: str, inputs: Sequence[Any], where: str) -> tuple[Any, ...]:
        """Find the inputs, such as images, that stand in `text` by their own text (`block` for an
        image) -> these inputs, with their sizes. inputs: those of the whole conversation; `text`
        may be its beginning, with only the first of them. Raises ValueError, naming `where`, for an
        unusable input, or a placeholder token without one. Base class: ()."""
        return ()

    def expand(self, document: np.ndarray, inputs: Sequence[Any]) -> np.ndarray:
        """Repeat the placeholder tokens in a document, so that there is one token per feature of an
        input, such as an image -> the longer document. Base class: the document unchanged."""
        return document

    def fit(
        self, document: np.ndarray, inputs: Sequence[Any], start: int, stop: int
    ) -> tuple[slice, list[Any]]:
        """Cut a document to tokens start:stop without cutting an input in two -> (the slice,
        shortened where necessary; the inputs inside it). Base class: start:stop and all inputs."""
        return slice(start, stop), [*inputs]

    def lost(self, units: str, cutoff_len: int) -> str:
        """A note for the report: cutting samples to cutoff_len removed some of their inputs, such
        as images. units: the samples' name, such as "pairs". Base class: ""."""
        return ""

    def columns(self, ids: np.ndarray, inputs: Sequence[Any]) -> dict[str, Any]:
        """The columns beside tokens that the model needs for a document, such as its inputs' pixels
        and rotary positions. ids: the document's tokens [n]. Base class: {}."""
        return {}

    def prompt(
        self, ids: list[int], inputs: Sequence[Any], where: str
    ) -> tuple[list[int], dict[str, Any]]:
        """Prepare a prompt with inputs, such as images, for generation -> (its tokens, with one
        placeholder per feature of an input; the inputs' columns, such as pixels). ids: the
        tokenised prompt, whose placeholders are not yet repeated. Base class: (ids, {})."""
        return ids, {}

    # -- in a shard of the token cache

    def store(self, folder: Path) -> Any:
        """An object that writes the inputs of a token-cache shard into `folder` (add) and reads
        them back (read). Base class: None."""
        return None


TEXT = Media()


# -- in a model


class Inputs:
    """The modules for a model's inputs other than text (such as a vision tower), for both backends.
    This base class is for text models, which have no such modules.

    config: McaModelConfig; on plain torch the transformers config. An Inputs object holds no
    weights: these belong to the model.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def tensors(self) -> InputTensors:
        """(name, True if it is the weight matrix of a torch Linear) for each parameter in the
        modules for inputs other than text, such as the vision tower; () in this base class, for
        text models. Names are relative to the module that contains them all."""
        return ()

    @property
    def num_deepstack(self) -> int:
        """The number of decoder layers, from the first on, to whose outputs image features are
        added (DeepStack). Base class: 0."""
        return 0

    def owns(self, name: str) -> bool:
        """True if a checkpoint tensor, such as "model.visual.blocks.0.attn.proj.weight", belongs to
        an input module. Base class: False."""
        return False

    def media(self, folder: Path, tokenizer: Keys, keys: Keys) -> Media:
        """The Media of this model, which reads its inputs from records. folder: the model's. keys:
        a run's keys. Raises ValueError if the tokenizer lacks the placeholder tokens. Base class:
        Media()."""
        return Media()

    def notes(self, args: Keys) -> list[str]:
        """Report lines for a run whose training data have inputs other than text. args:
        TrainingArguments. Raises ConfigError for arguments that do not work with them. Base class:
        []."""
        return []

    # -- on megatron-core

    def build(self, model: Any) -> None:
        """Add the input modules to a model chunk on megatron-core, if it is the one that has them;
        called in the chunk's constructor. Base class: nothing is added."""

    def embed(
        self, model: Any, hidden: Any, shared: dict[str, Any], **columns: Any
    ) -> tuple[Any, list[Any], Callable[..., Any] | None]:
        """Replace the embeddings of placeholder tokens by the features of a micro-batch's inputs,
        such as images -> (hidden, features, change). hidden: on the first pipeline stage the token
        embeddings.

        features: tensors to add to the outputs of the first decoder layers, one per layer; [] if
        there are none. change(embeddings, slots): for multi-token prediction, replaces embeddings
        of the tokens ahead by the features whose indices are in slots (-1: none); None if this rank
        computed no features. columns: the micro-batch's input columns. shared: keyword arguments
        for the layers; entries are added in place. This base class raises ValueError, because a
        text model takes no such columns.
        """
        raise ValueError(
            f"expected text alone, got {', '.join(columns)}: set model_name_or_path to one that "
            "reads them"
        )

    def arrange(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A micro-batch with the columns of inputs, such as pixels, that this rank needs. batch: an
        arranged one (from batch.pack or split). Raises ValueError for inputs that the model does
        not take. Base class: the batch unchanged, ValueError for any input."""
        columns = [name for name in batch if is_of_inputs(name)]
        expect(
            not columns,
            f"a batch has {', '.join(columns)}: {self.config.hf_model_type} takes text alone",
        )
        return batch

    def trains(self, model: Any) -> bool:
        """True if any rank trains an input module. Collective for a model that has input modules.
        Base class: False."""
        return False

    # -- on plain torch

    def for_transformers(
        self, batch: dict[str, Any], inputs: dict[str, Any], positions: Any, is_padding: Any
    ) -> tuple[dict[str, Any], Any]:
        """Prepare the forward pass of a transformers model -> (keyword arguments, position_ids).
        inputs: the columns of `batch` that the model takes; may be changed in place. positions: the
        position ids of text alone. is_padding: bool, True for padding. Base class: (inputs,
        positions), unchanged."""
        return inputs, positions

    def parameters_of(self, model: Any) -> list[list[Any]]:
        """The parameters of a transformers model's input modules, one list per kind of input: first
        for images, then for audio. Base class: []."""
        return []

    def unused(self, model: Any, columns: Any) -> Any:
        """A zero to add to the loss, so that input modules (such as a vision tower) have gradients
        on ranks without such inputs too: modules that a forward pass with these columns does not
        use get a gradient of 0. Base class: 0.0."""
        return 0.0

    # -- on both

    def rests(self, micro_batches: Any) -> set[int]:
        """Find the kinds of input (images, audio) that no micro-batch of a step has, on any rank ->
        their indices in ckpt_megatron.STEPS. The optimizer skips the modules of these kinds in this
        step; otherwise it would decay their weights and moments without a gradient. Called only if
        input modules are trained, and then collective. Base class: an empty set."""
        return set()

    def work(self, model: Any) -> InputWork | None:
        """Training FLOPs of the input modules per unit of input, as an InputWork: forward, and
        backward if they are trained. Base class: None."""
        return None

    def parts_summary(self, model: Any) -> str | None:
        """A report line with this rank's trained and total parameters in each part of the model,
        such as the vision tower; adapters do not count. Base class: None."""
        return None

    def bytes_of_token(self, trained: Iterable[str], width: int) -> float:
        """Bytes that the input modules save for the backward pass, per placeholder token. trained:
        names of trained parameters. width: bytes per value. Base class: 0."""
        return 0.0


def inputs_of(config: Any) -> Inputs:
    """The Inputs of a model, from its McaModelConfig or transformers config; the base class for a
    text model."""
    kind = getattr(config, "hf_model_type", None) or getattr(config, "model_type", None)
    row = FAMILIES[kind].inputs if kind in FAMILIES else ""
    return function_of(INPUTS[row])(config) if row else Inputs(config)
