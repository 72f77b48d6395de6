"""Inputs of a model beside text: Media in its records, Inputs in the model. Those of models of
text, defined here, are none: a part such as pictures brings its classes in a row of INPUTS. Reading
records imports it, before torch."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .errors import Judge, expect
from .families import FAMILIES
from .parts import absent_rows, need_of
from .tables import INPUTS, function_of, is_of_inputs


class InputWork(NamedTuple):
    """FLOPs of the modules for inputs: of a unit, such as a patch of a picture, and of the squared
    number of units of an input."""

    of_unit: float
    of_square: float


# -- in records

MARK = "\ufdd0"  # in place of an input in a message: Unicode has no such character
BLOCKS = ("image", "image_url")  # types of the blocks of a message that are inputs


class Media:
    """The inputs beside text in the records of a model; of a model of text, as this one, records
    with any are refused. Picklable.

    block: the text of an input in a conversation. token_id: of its placeholders. kinds: of values
    in a column of one input. is_read: False where the model does not take them, for a rank to leave
    their contents out. options: facts that determine tokens.
    """

    block = ""
    token_id = -1
    kinds: tuple[type, ...] = (bytes, dict)
    is_read = True

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def folders(self, files: Iterable[str]) -> dict[str, Any]:
        """The folders of files named by records, for a key of the cache."""
        return {}

    def check_keys(self, judge: Judge):
        """Apply the rules between such a model and the keys of its data."""

    def check_mark(self, mark, where):
        """ValueError for a mark of video or audio in a text, if the model has inputs beside it."""

    # -- of a record

    def of_columns(self, record, columns) -> list:
        """The inputs in the columns of a record: LLaMA-Factory's images, or TRL's image. columns:
        their declared names."""
        found = record.get(columns.get("images", "images")) or []
        alone = record.get("image")
        if not found and isinstance(alone, self.kinds):
            found = [alone]
        return found if isinstance(found, list) else [found]

    def take(self, messages, of_columns, may_lead, where) -> tuple:
        """Write `block` for each input of the messages, in place -> the inputs.

        An input is a block, or a mark in a content that is a text; those without a value of their
        own take the next of the column. may_lead: TRL's way, inputs without any mark stand before
        the first question.
        Raises: ValueError for other numbers of inputs and marks, and where the model takes none.
        """
        of_blocks = [message.pop("media", None) for message in messages]
        reason = "the model reads text: its config.json has no vision_config with "
        reason += "vision_start_token_id, image_token_id, vision_end_token_id"
        if part := absent_rows().get("pictures"):
            reason, _ = need_of(part, "they need")
        expect(
            not (of_columns or any(of_blocks)),
            f"{where}: the record has pictures (images, or blocks of a message), and {reason}",
        )
        return ()

    # -- of a document

    def check_template(self, template, render, messages):
        """ValueError for a chat template that writes inputs otherwise than as `block`."""

    def check_rendered(self, text, messages):
        """ValueError for a text that lacks inputs of its messages."""

    def placed(self, text, inputs, where) -> tuple:
        """The inputs in a text, the first of its conversation's, with their sizes. ValueError for
        unusable ones, and for their token without one."""
        return ()

    def expand(self, document, inputs) -> np.ndarray:
        """The document with the placeholders that its inputs take."""
        return document

    def fit(self, document, inputs, start, stop) -> tuple[slice, list]:
        """(places, their inputs) of the document from `start` to `stop`, without an input cut by
        these borders."""
        return slice(start, stop), [*inputs]

    def lost(self, units, cutoff_len) -> str:
        """A note about inputs that were cut."""
        return ""

    def columns(self, ids, inputs) -> dict[str, Any]:
        """Columns for the model of a document with these tokens [n]."""
        return {}

    def prompt(self, ids, inputs, where) -> tuple[list[int], dict]:
        """(tokens of a prompt with all placeholders of its inputs, their columns)."""
        return ids, {}

    # -- in a shard of the token cache

    def store(self, folder):
        """The files of inputs in a shard's folder, with add and read; None without any."""
        return None


TEXT = Media()


# -- in a model


class Inputs:
    """The inputs of a model beside text, on both backends; none here.

    config: McaModelConfig, or on plain torch transformers'. It holds no weights: the modules for
    inputs are those of a model.
    """

    def __init__(self, config):
        self.config = config

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors of the modules."""
        return ()

    @property
    def num_deepstack(self) -> int:
        """Layers, the first ones, that add features of inputs to their outputs."""
        return 0

    def owns(self, name: str) -> bool:
        """True for the name of a tensor of the modules in files."""
        return False

    def media(self, folder, tokenizer, keys) -> Media:
        """The inputs in records of this model. folder: of the model; keys: those of a run.
        ValueError for a tokenizer that does not fit."""
        return Media()

    def notes(self, args) -> list[str]:
        """Lines for the report of a run whose data have inputs. ConfigError for keys that do not
        fit."""
        return []

    # -- on megatron-core

    def build(self, model):
        """Set the modules of a chunk in its constructor, under their names in checkpoints."""

    def embed(self, model, hidden, shared, **columns) -> tuple[Any, list, Callable | None]:
        """(hidden with the features of inputs, features to add after the first layers, a function
        of the embeddings of tokens ahead and their places or None), by the columns of a
        micro-batch. Adds to `shared`, the arguments of layers."""
        raise ValueError(f"a model of text was given {', '.join(columns)}")

    def arrange(self, batch) -> dict:
        """The columns of an arranged batch for this rank. ValueError for those of other inputs."""
        columns = [name for name in batch if is_of_inputs(name)]
        expect(
            not columns,
            f"a batch has {', '.join(columns)}: {self.config.hf_model_type} takes text alone",
        )
        return batch

    def trains(self, model) -> bool:
        """True if a module for inputs is in training on any rank. Collective for models with such
        modules."""
        return False

    # -- on plain torch

    def for_transformers(self, batch, inputs, positions, is_padding) -> tuple[dict, Any]:
        """(arguments, position_ids) of a transformers model, from those of text."""
        return inputs, positions

    def parameters_of(self, model) -> list:
        """The parameters of the modules for inputs of a transformers model."""
        return []

    def unused(self, model, columns):
        """0, with gradients of 0 for the modules left out of a forward pass with these columns."""
        return 0.0

    # -- on both

    def rests(self, micro_batches) -> bool:
        """True if no micro-batch of a step has an input, on any rank. The update then leaves the
        modules out: by gradients of zero it would decay their weights and moments. Collective;
        called if these modules are in training."""
        return False

    def work(self, model) -> InputWork | None:
        """The work of the modules in a step, None without any."""
        return None

    def parts_summary(self, model) -> str | None:
        """The parameters in training on this rank of each part of the model, adapters apart."""
        return None

    def bytes_of_token(self, trained: Iterable[str], width: int) -> float:
        """Bytes kept by the modules for the backward pass, of a token in rows of inputs alone.
        trained: names of parameters in training; width: bytes of a number."""
        return 0.0


def inputs_of(config) -> Inputs:
    """The inputs of a model by its McaModelConfig or transformers config."""
    kind = getattr(config, "hf_model_type", None) or getattr(config, "model_type", None)
    row = FAMILIES[kind].inputs if kind in FAMILIES else ""
    return function_of(INPUTS[row])(config) if row else Inputs(config)
