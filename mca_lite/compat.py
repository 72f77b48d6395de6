"""Names of mcore_adapter's trainer for hooks of this one: a subclass may override or call them.

An override is on the way of every batch; without one, no step passes through here.
"""

from collections.abc import Iterator
from typing import Any

from . import parallel
from .batch import packed_row
from .step import inputs_of, to_length


class OtherNames:
    """Base of McaTrainer."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        overrides = vars(cls).keys()
        if overrides & {"_prepare_train_inputs", "_packing_sequence"}:
            cls.inputs_of = OtherNames.inputs_of
        if "_get_step_iterator_and_seq_length" in overrides:
            cls.read_step = cls._get_step_iterator_and_seq_length
        elif "read_step" in overrides:
            cls._get_step_iterator_and_seq_length = cls.read_step

    def inputs_of(self, batch: dict) -> dict[str, Any]:
        return self._prepare_train_inputs(iter([batch]))

    def _prepare_train_inputs(self, data_iterator: Iterator) -> dict[str, Any]:
        """inputs_of the next micro-batch."""
        batch = next(data_iterator)
        if self.args.sequence_packing:
            batch = self._packing_sequence(batch)
        return inputs_of(self.backend, self._arranged(batch))

    def _packing_sequence(self, inputs: dict) -> dict[str, Any]:
        """A batch [b, s] as one row [1, t] in thd format: input_ids, labels, cu_seqlens and
        packed_seq_params.

        attention_mask numbers the documents of each row (1, 2, ...; 0 is padding, which is
        dropped); without numbers each row is a document. A batch that is packed already is taken as
        it is.
        """
        inputs = self._arranged(inputs)
        cp_size, cp_rank = self.backend.context_parallel
        params = packed_row(inputs["cu_seqlens"], cp_size, cp_rank, parallel.device())
        return {**inputs, "packed_seq_params": params}

    def _arranged(self, batch: dict) -> dict:
        """The batch itself, or one of the data collator arranged."""
        if "padding_mask" in batch:
            return batch
        return to_length(self.backend, self._arrange(batch))
