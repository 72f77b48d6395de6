"""A model's inputs other than text, such as pictures: Media handles these in records, Inputs in the
model.

The classes here are those of a text model: they accept no such input. A part registers its own
classes in INPUTS. Reading records imports this module, before torch.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import Keys, expect
from .families import FAMILIES
from .parts import absent_rows, need_of
from .tables import INPUTS, function_of, is_of_inputs


class InputWork(NamedTuple):
    """FLOPs of the input modules: per unit (such as a picture's patch), and per squared count of
    units of one input."""

    of_unit: float
    of_square: float


# -- in records

MARK = "\ufdd0"  # stands for an input in a message: a code point that is no character
# the types of message blocks that are inputs
BLOCKS = ("image", "image_url", "video", "video_url")


class Media:
    """Reads a model's inputs other than text from records. This class, for text models, refuses
    records with such inputs. Picklable.

    block: the text that stands for a picture in a conversation. token_ids: those of placeholder
    tokens. kinds: the types that a single input in a column may have. is_read: False if this rank
    should not load the inputs' contents. options: facts that determine tokens. unread: columns of
    records with inputs that are refused; unread_marks: marks of these inputs in a text.
    """

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
        """The folders of input files that records name, for the key of the token cache."""
        return {}

    def check_mark(self, mark: str, where: str) -> None:
        """Raise ValueError for a video or audio mark in a text, if the model reads inputs that are
        not text."""

    # -- of a record

    def of_columns(self, record: dict[str, Any], columns: dict[str, Any]) -> list[Any]:
        """The inputs in a record's columns: `images` (LLaMA-Factory) or `image` (TRL). columns:
        declared column names."""
        found = record.get(columns.get("images", "images")) or []
        alone = record.get("image")
        if not found and isinstance(alone, self.kinds):
            found = [alone]
        return found if isinstance(found, list) else [found]

    def take(
        self, messages: list[dict[str, Any]], of_columns: list[Any], may_lead: bool, where: str
    ) -> tuple[Any, ...]:
        """Replace each input in `messages` by `block`, in place -> the inputs.

        An input is a message block, or a mark in a content that is a text. One without a value
        takes the next value in of_columns. may_lead: if there are no marks, put the inputs before
        the first question, as TRL does. Raises ValueError if inputs and marks differ in count, or
        if the model takes no inputs.
        """
        of_blocks = [message.pop("media", None) for message in messages]
        reason = "the model reads text: its config.json has no vision_config with "
        reason += "vision_start_token_id, image_token_id, vision_end_token_id"
        if part := absent_rows().get("pictures"):
            reason, _ = need_of(part, "they need")
        expect(
            not (of_columns or any(of_blocks)),
            f"{where}: the record has pictures or videos (columns, or blocks of a message), and "
            f"{reason}",
        )
        return ()

    def of_tokens(self, ids: np.ndarray, values: list[Any], where: str) -> tuple[Any, ...]:
        """The inputs `values` of a record given as tokens, with their sizes. ids: with all
        placeholder tokens. ValueError for an unusable input, or another number of placeholders."""
        return self.take([], values, False, where)

    # -- of a document

    def check_template(
        self, template: str, render: Callable[..., Any], messages: list[dict[str, Any]]
    ) -> None:
        """Raise ValueError for a chat template that writes an input otherwise than as `block`."""

    def check_rendered(self, text: str, messages: list[dict[str, Any]]) -> None:
        """Raise ValueError if the rendered text lacks an input of its messages."""

    def placed(self, text: str, inputs: Sequence[Any], where: str) -> tuple[Any, ...]:
        """The inputs that stand in `text`, with their sizes; `text` holds the first ones of its
        conversation. Raises ValueError for an unusable input, or for a placeholder token without an
        input."""
        return ()

    def expand(self, document: np.ndarray, inputs: Sequence[Any]) -> np.ndarray:
        """The document with as many placeholder tokens as each input takes."""
        return document

    def fit(
        self, document: np.ndarray, inputs: Sequence[Any], start: int, stop: int
    ) -> tuple[slice, list[Any]]:
        """(slice, inputs in it): the part of the document from `start` to `stop`, shortened so that
        it cuts no input."""
        return slice(start, stop), [*inputs]

    def lost(self, units: str, cutoff_len: int) -> str:
        """A note about inputs that were dropped with the end of a document."""
        return ""

    def columns(self, ids: np.ndarray, inputs: Sequence[Any]) -> dict[str, Any]:
        """The columns that the model needs for the inputs of a document. ids: its tokens [n]."""
        return {}

    def prompt(
        self, ids: list[int], inputs: Sequence[Any], where: str
    ) -> tuple[list[int], dict[str, Any]]:
        """(a prompt's tokens with every placeholder of its inputs, the inputs' columns)."""
        return ids, {}

    # -- in a shard of the token cache

    def store(self, folder: Path) -> Any:
        """The input files in a shard's folder, an object with add and read; None if
        there are none."""
        return None


TEXT = Media()


# -- in a model


class Inputs:
    """A model's inputs other than text, on both backends. This class, for text models, has none.

    config: McaModelConfig; on plain torch the transformers config. Inputs holds no weights: the
    input modules belong to the model.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def tensors(self) -> tuple[tuple[str, bool], ...]:
        """(name, True for the matrix of a linear) of the input modules' tensors."""
        return ()

    @property
    def num_deepstack(self) -> int:
        """The count of layers, from the first on, that add input features to their outputs."""
        return 0

    def owns(self, name: str) -> bool:
        """True if a checkpoint tensor of this name belongs to an input module."""
        return False

    def media(self, folder: Path, tokenizer: Keys, keys: Keys) -> Media:
        """The Media of this model. folder: the model's; keys: those of a run. Raises ValueError if
        the tokenizer does not fit."""
        return Media()

    def notes(self, args: Keys) -> list[str]:
        """Report lines for a run whose training data have images or other inputs than text. args:
        TrainingArguments. Raises ConfigError for arguments that do not work with such inputs."""
        return []

    # -- on megatron-core

    def build(self, model: Any) -> None:
        """Add the input modules to a model chunk, in its constructor, under their
        checkpoint names."""

    def embed(
        self, model: Any, hidden: Any, shared: dict[str, Any], **columns: Any
    ) -> tuple[Any, list[Any], Callable[..., Any] | None]:
        """Add the features of a micro-batch's inputs -> (hidden, features, change).

        features: one per layer from the first on, to add to its output. change: a function of the
        embeddings and positions of tokens ahead (multi-token prediction), or None. columns: the
        micro-batch's input columns. shared: keyword arguments of layers; entries are added in
        place.
        """
        raise ValueError(
            f"expected text alone, got {', '.join(columns)}: set model_name_or_path to one that "
            "reads them"
        )

    def arrange(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's columns of an arranged batch. Raises ValueError for inputs that the model
        does not take."""
        columns = [name for name in batch if is_of_inputs(name)]
        expect(
            not columns,
            f"a batch has {', '.join(columns)}: {self.config.hf_model_type} takes text alone",
        )
        return batch

    def trains(self, model: Any) -> bool:
        """True if any rank trains an input module. Collective for a model that has
        input modules."""
        return False

    # -- on plain torch

    def for_transformers(
        self, batch: dict[str, Any], inputs: dict[str, Any], positions: Any, is_padding: Any
    ) -> tuple[dict[str, Any], Any]:
        """(keyword arguments, position_ids) for a transformers model; `inputs` and `positions` are
        those for text alone."""
        return inputs, positions

    def parameters_of(self, model: Any) -> list[Any]:
        """The parameters of a transformers model's input modules."""
        return []

    def unused(self, model: Any, columns: Any) -> Any:
        """A zero to add to the loss: it gives a gradient of 0 to each input module that a forward
        pass with these columns does not use."""
        return 0.0

    # -- on both

    def rests(self, micro_batches: Any) -> bool:
        """True if no micro-batch of a step has an input, on any rank. The update then skips the
        input modules, whose weights and moments it would decay without a gradient. Collective.
        Called only if input modules are trained."""
        return False

    def work(self, model: Any) -> InputWork | None:
        """FLOPs of the input modules in a step; None if there are no such modules."""
        return None

    def parts_summary(self, model: Any) -> str | None:
        """A report line with this rank's trained parameters in each part of the model, adapters
        aside; None for a text model."""
        return None

    def bytes_of_token(self, trained: Iterable[str], width: int) -> float:
        """Bytes that the input modules keep for the backward pass, per token of an input. trained:
        names of trained parameters. width: bytes per number."""
        return 0.0


def inputs_of(config: Any) -> Inputs:
    """The Inputs for a McaModelConfig or a transformers config."""
    kind = getattr(config, "hf_model_type", None) or getattr(config, "model_type", None)
    row = FAMILIES[kind].inputs if kind in FAMILIES else ""
    return function_of(INPUTS[row])(config) if row else Inputs(config)
