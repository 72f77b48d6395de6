"""mcore_adapter's names for trainer hooks, which a subclass may override or call.

Only an overridden hook is called in each step; without an override no step passes through here.
"""

from collections.abc import Iterator
from typing import Any

from . import parallel
from .batch import packed_row
from .step import inputs_of, to_length


class OtherNames:
    """Base class of McaTrainer with mcore_adapter's names."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        overrides = vars(cls).keys()
        if overrides & {"_prepare_train_inputs", "_packing_sequence"}:
            cls.inputs_of = OtherNames.inputs_of
        if "_get_step_iterator_and_seq_length" in overrides:
            cls.read_step = cls._get_step_iterator_and_seq_length
        elif "read_step" in overrides:
            cls._get_step_iterator_and_seq_length = cls.read_step

    def inputs_of(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._prepare_train_inputs(iter([batch]))

    def _prepare_train_inputs(self, data_iterator: Iterator[Any]) -> dict[str, Any]:
        """inputs_of() for the next micro-batch."""
        batch = next(data_iterator)
        if self.args.sequence_packing:
            batch = self._packing_sequence(batch)
        return inputs_of(self.backend, self._arranged(batch))

    def _packing_sequence(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch [b, s] as one row [1, t] in thd format: adds packed_seq_params to the columns,
        which include input_ids, labels and cu_seqlens.

        attention_mask numbers the documents in each row (1, 2, ...; 0 is padding, which is
        dropped); without numbers each row is one document. A batch that is packed already keeps its
        row.
        """
        inputs = self._arranged(inputs)
        cp_size, cp_rank = self.backend.context_parallel
        params = packed_row(inputs["cu_seqlens"], cp_size, cp_rank, parallel.device())
        return {**inputs, "packed_seq_params": params}

    def _arranged(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch itself if it is arranged; otherwise the collator's batch, arranged."""
        if "padding_mask" in batch:
            return batch
        return to_length(self.backend, self._arrange(batch))
