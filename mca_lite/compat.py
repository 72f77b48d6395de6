"""mcore_adapter's names for trainer hooks, which a subclass may override or call.

Without an override no step passes through here.
"""

from collections.abc import Iterator
from typing import Any

from . import parallel
from .batch import Batch, packed_row
from .step import inputs_of, to_length


class OtherNames:
    """Base class of McaTrainer that keeps mcore_adapter's names of trainer hooks: a subclass
    written for mcore_adapter may override or call them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        overrides = vars(cls).keys()
        if overrides & {"_prepare_train_inputs", "_packing_sequence"}:
            cls.inputs_of = OtherNames.inputs_of
        if "_get_step_iterator_and_seq_length" in overrides:
            cls.read_step = cls._get_step_iterator_and_seq_length
        elif "read_step" in overrides:
            cls._get_step_iterator_and_seq_length = cls.read_step

    def inputs_of(self, batch: Batch) -> dict[str, Any]:
        return self._prepare_train_inputs(iter([batch]))

    def _prepare_train_inputs(self, data_iterator: Iterator[Any]) -> dict[str, Any]:
        """Model inputs (keyword arguments of forward) for the next micro-batch of an iterator.
        mcore_adapter's name for inputs_of()."""
        batch = next(data_iterator)
        if self.args.sequence_packing:
            batch = self._packing_sequence(batch)
        return inputs_of(self.backend, self._arranged(batch))

    def _packing_sequence(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Pack a batch [b, s] into one row [1, t] in thd format -> its columns, with
        packed_seq_params next to input_ids, labels and cu_seqlens. For runs with sequence_packing.

        attention_mask numbers the documents in each row (1, 2, ...; 0 is padding, which is
        dropped); without numbers each row is one document. A batch that is packed already keeps its
        row.
        """
        inputs = self._arranged(inputs)
        cp_size, cp_rank = self.backend.context_parallel
        params = packed_row(inputs["cu_seqlens"], cp_size, cp_rank, parallel.device())
        return {**inputs, "packed_seq_params": params}

    def _arranged(self, batch: Batch) -> Batch:
        """The collator's batch with the columns that the trainer expects, padded to a length that
        the layout can shard. A batch that has padding_mask is returned as it is, because it was
        arranged before."""
        if "padding_mask" in batch:
            return batch
        return to_length(self.backend, self._arrange(batch))
