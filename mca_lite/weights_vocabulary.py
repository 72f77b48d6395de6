"""New tokens: the tokenizer learns them, and embedding and head grow by a row each.

A new row begins as the mean of the rows that the model has, in that matrix, summed in float64 in
the order of the file: the same in every layout and on both backends, whatever else is drawn at
random.
"""

from collections.abc import Callable

import torch

from .args_values import Judge

MEAN_ROWS = 4096  # of the matrix are in memory at a time


def add_tokens(tokenizer, tokens: list[str] | None, special_tokens: list[str] | None) -> int:
    """Teach the tokenizer these tokens -> how many of them it did not know."""
    known = len(tokenizer)  # add_tokens() counts those too that it knew
    tokenizer.add_tokens(tokens or [])
    tokenizer.add_tokens(special_tokens or [], special_tokens=True)
    return len(tokenizer) - known


def grown_size(tokenizer, vocab_size: int, resize: bool, judge: Judge) -> int:
    """The model's vocab_size after growing it for the tokenizer, which is refused if not resize."""
    if len(tokenizer) > vocab_size and not resize:
        reason = f"the tokenizer has {len(tokenizer)} tokens, and the model's vocab_size is "
        reason += f"{vocab_size}: they do not belong together, or new tokens were added without "
        reason += "growing the embedding"
        judge.refuse("resize_vocab", reason, "resize_vocab: true, which grows it", False)
    return max(len(tokenizer), vocab_size)


def mean_row(read: Callable[[slice], torch.Tensor], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The mean of the rows of a matrix, [h], rounded once. read(rows): these rows of it."""
    parts = (read(slice(i, min(i + MEAN_ROWS, rows))) for i in range(0, rows, MEAN_ROWS))
    return (sum(part.to("cpu", torch.float64).sum(0) for part in parts) / rows).to(dtype)


class GrownSource:
    """A source (weights_sources.py) whose matrices of the vocabulary have `vocab_size` rows."""

    def __init__(self, source, names: set[str], vocab_size: int):
        self._source, self._vocabulary, self._vocab_size = source, names, vocab_size
        self._means: dict[str, torch.Tensor] = {}

    def names(self) -> set[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return (self._vocab_size, *shape[1:]) if name in self._vocabulary else shape

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        if name not in self._vocabulary:
            return self._source.read(name, rows=rows, columns=columns)
        assert columns is None, f"{name}: tensor parallelism cuts the rows of the vocabulary"
        start, stop, _ = (rows or slice(None)).indices(self._vocab_size)
        old = self._source.shape(name)[0]
        value = self._source.read(name, rows=slice(min(start, old), min(stop, old)))
        new = max(stop - max(start, old), 0)
        if new == 0:
            return value
        return torch.cat([value, self._mean(name, old, value.dtype).expand(new, -1)])

    def _mean(self, name: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._means:
            source = self._source
            self._means[name] = mean_row(lambda part: source.read(name, rows=part), rows, dtype)
        return self._means[name]


def grow_torch(model, vocab_size: int, dtype: torch.dtype) -> None:
    """Grow embedding, head and config of a transformers model. dtype: of its file's weights."""
    old = model.get_input_embeddings().weight.shape[0]
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    means = [mean_row(module.weight.detach().__getitem__, old, dtype) for module in both]
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    both = (model.get_input_embeddings(), model.get_output_embeddings())  # new modules
    with torch.no_grad():
        for module, mean in zip(both, means, strict=True):
            module.weight[old:] = mean.to(module.weight)
