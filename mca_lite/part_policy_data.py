"""Rollouts in files: token ids with a mask and per-token numbers, under several programs' names.

    {"ids": [..], "mask": [0, 0, 1, 1], "logprobs": [..], "advantages": 0.5 or [..],
     "ref_logprobs": [..], "temperature": 1.0 or [..], "reward": 1.0, "group": "a name",
     "routes": {"data": base64, "shape": [tokens, layers, experts per token]} or lists}

A list has one value per token, or one per token of the answer, which comes last. mask: 1 for tokens
to train. ALIASES has other names; prompt_ids and response_ids may replace ids. data_encode.shifted
shifts per-token values together with the ids. routes have a row for each token, or for each but the
last, as vLLM gives them; a row is put in front, so that the shift leaves them at their tokens.
"""

import base64
import hashlib
import sys
from typing import Any

import numpy as np

from .data_encode import Document, Encoder, Record, Sample, Tally
from .data_files import get_column
from .errors import expect

ALIASES = {
    "ids": ("token_ids", "tokens", "input_ids"),
    "mask": ("loss_mask", "response_mask"),
    "logprobs": ("rollout_log_probs", "old_log_probs", "old_logp"),
    "ref_logprobs": ("ref_log_prob", "ref_logp"),
    "advantages": ("advantage",),
    "routes": ("routed_experts",),
}
# lists of a record -> columns of samples
TOKEN_COLUMNS = {
    "logprobs": "old_logp",
    "ref_logprobs": "ref_logp",
    "advantages": "advantage",
    "temperature": "temperature",
}


class RolloutEncoder(Encoder):
    """Encoder for rollouts (answers that a policy sampled): their records already have token ids,
    so nothing is rendered or tokenised.

    A sample has one document. Its columns in TOKEN_COLUMNS, such as old_logp, are float32 [n] for
    its n tokens, before labels are shifted by one. routes are as _routes() returns them; reward and
    group are numbers."""

    def encode(self, chunk: list[Record]) -> tuple[list[Sample], Tally]:
        """Turn a chunk of records into (samples, Tally of what happened to the records). An
        unusable record raises ValueError, or is only counted in the Tally if such records may be
        skipped. ValueError too for the setting cutoff_rule: proportion."""
        expect(
            not self.cuts_in_proportion,
            "cutoff_rule: proportion would cut prompts that answers were sampled after: set end",
        )
        tally = Tally(records=len(chunk))
        kept: list[Sample] = []
        for where, content, values in chunk:
            try:
                if isinstance(content, ValueError):
                    raise content
                document, columns, media = self.read(content, where)
            except ValueError as error:
                if not self.skips:
                    raise
                tally.refuse(where, str(error).removeprefix(where).removeprefix(": "))
                continue
            of_documents = [[*media]]
            [document] = self._cut([document], of_documents, tally, where)
            if media:
                [columns["media"]] = of_documents
            for name, values_ in columns.items():
                if isinstance(values_, np.ndarray):
                    columns[name] = values_[: len(document)]
            if not self._leaves_out([document], tally, where):
                kept.append([(document, values | columns)])
        return kept, tally

    def read(self, record: Any, where: str) -> tuple[Document, dict[str, Any], tuple[Any, ...]]:
        """Read and check one record -> (token ids, with ~id for a token that is not trained;
        {column: values}; images or other inputs beside text). where: the record's place, for
        messages. ValueError if the record is unusable."""
        record = _with_usual_names(record, where)
        ids, start = self._ids(record, where)
        mask = _of_tokens(record, "mask", len(ids), start, where)
        if mask is None and start is not None:
            mask = np.arange(len(ids)) >= start
        expect(mask is not None, f"{where}: 'mask' is missing: expected 1 for tokens to train")
        wrong = ~np.isin(mask, (0, 1))
        expect(not wrong.any(), f"{where}: 'mask' has {_first(mask, wrong)}: expected 0 and 1")
        is_trained = mask == 1
        media = self.media.of_tokens(ids, self.media.values_of(record, {}, where), where)
        wrong = is_trained & np.isin(ids, self.media.token_ids)
        expect(
            not wrong.any(),
            f"{where}: 'mask' has {_first(mask, wrong)}, a token of a picture: expected 0 there",
        )
        if start is None:
            start = int(np.append(is_trained, True).argmax())
        columns: dict[str, Any] = {}
        for name, column in TOKEN_COLUMNS.items():
            values = _of_tokens(record, name, len(ids), start, where)
            if values is None:
                continue
            wrong = ~np.isfinite(values) & is_trained
            if name == "temperature":
                wrong |= (values <= 0) & is_trained
            expect(
                not wrong.any(),
                f"{where}: {name!r} has {_first(values, wrong)}, for a token to train: expected "
                "finite numbers" + ", a temperature above 0" * (name == "temperature"),
            )
            columns[column] = values
        reward = get_column(record, "reward", where, (int, float), required=False)
        if reward is not None:
            expect(
                abs(reward) <= sys.float_info.max,
                f"{where}: 'reward' is {reward}: expected a finite number",
            )
            columns["reward"] = float(reward)
        group = get_column(record, "group", where, (int, str), required=False)
        if group is not None:
            columns["group"] = _number_of(group)
        if "routes" in record:
            try:
                columns["routes"] = _routes(record["routes"], len(ids))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        return np.where(is_trained, ids, ~ids), columns, media

    def _ids(self, record: dict[str, Any], where: str) -> tuple[np.ndarray, int | None]:
        """Find a record's token ids, and where the answer begins -> (int32 ids of prompt and
        answer, index of the answer's first token, or None if the record does not tell). where: the
        record's place, for messages.

        ValueError if ids are missing, no list, less than two or outside the vocabulary, or if the
        record's lengths disagree."""
        start = None
        ids = get_column(record, "ids", where, list, required="response_ids" not in record)
        if ids is None:
            prompt = get_column(record, "prompt_ids", where, list)
            ids = prompt + get_column(record, "response_ids", where, list)
            start = len(prompt)
        size = get_column(record, "response_length", where, int, required=False)
        mask = record.get("mask")
        if start is None and size is None and isinstance(mask, list) and len(mask) < len(ids):
            size = len(mask)
        if size is not None:
            expect(
                0 <= size <= len(ids) and start in (None, len(ids) - size),
                f"{where}: response_length or mask has {size} tokens, and the record {len(ids)}, "
                f"of which the prompt {start or 'any number'}: expected numbers that agree",
            )
            start = len(ids) - size
        expect(len(ids) > 1, f"{where}: {len(ids)} token ids: expected two or more")
        known = len(self.tokenizer)
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < known]
        expect(
            not wrong,
            f"{where}: token id {wrong[:1]}: expected 0 to {known - 1}, those of the tokenizer",
        )
        return np.array(ids, dtype=np.int32), start


def _with_usual_names(record: Any, where: str) -> dict[str, Any]:
    """A copy of a record in which other programs' names for columns are replaced by this module's
    (such as "token_ids" by "ids"), and columns that are null are left out. where: the record's
    place, for messages.

    ValueError if the record is no object, has one column under two names, or has both ids and
    response_ids."""
    get_column(record, "", where, object, required=False)  # refuses all but objects
    record = {name: record[name] for name in record if record[name] is not None}
    for name, others in ALIASES.items():
        given = [key for key in (name, *others) if key in record]
        expect(len(given) < 2, f"{where}: {' and '.join(given)}: expected one of them")
        if given:
            record[name] = record.pop(given[0])
    both = {"ids", "response_ids"} <= record.keys()
    expect(not both, f"{where}: ids and response_ids: expected one of them")
    return record


def _of_tokens(
    record: dict[str, Any], name: str, length: int, start: int | None, where: str
) -> np.ndarray | None:
    """Read a record's column with one number per token -> float32 [length], or None if the record
    lacks the column. One number alone is repeated. If only the answer's tokens have values, those
    of the prompt are 0. A null becomes NaN.

    name: the column's. length: number of tokens. start: index of the answer's first token, if
    known. where: the record's place, for messages. ValueError for another number of values, or for
    values that NumPy cannot convert."""
    given = get_column(record, name, where, (list, int, float), required=False)
    if given is None:
        return None
    try:
        values = np.array(given, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: {name!r}: expected numbers, got {given!r:.60}") from None
    if not values.ndim:
        return np.full(length, values)
    sizes = [length] if start is None else [length, length - start]
    expect(
        values.shape in [(size,) for size in sizes],
        f"{where}: {name!r} has {len(given)} values: expected "
        f"{' or '.join(map(str, sizes))}, one for each token, or for each of the answer",
    )
    return np.pad(values, (length - len(values), 0))


def read_routes(field: Any) -> np.ndarray:
    """Decode the experts chosen for a rollout, int16 [n, MoE layers, experts per token], from a
    JSON field: nested lists, or {"data": base64 of little-endian int16, "shape": [...]}. ValueError
    for anything else.
    """
    try:
        if isinstance(field, dict):
            data = base64.b64decode(field["data"], validate=True)
            given = np.frombuffer(data, "<i2").reshape([int(size) for size in field["shape"]])
        else:
            given = np.array(field)
        routes = given.astype(np.int16)
        expect(routes.ndim == 3 and (routes == given).all(), f"{given.dtype} {[*given.shape]}")
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ValueError(
            'routes: expected {"data": base64 of int16 numbers, "shape": [tokens, layers with '
            f"experts, experts per token]}}, or lists of that shape, got {field!r:.100} ({error})"
        ) from None
    return routes


def _routes(field: Any, length: int) -> np.ndarray:
    """Read a record's field with the experts that the sampler chose -> a column, int16 [length, MoE
    layers, experts per token]. Its row t has the experts of token t - 1, and row 0 is -1, because
    data_encode.shifted later drops the first row of each column.

    field: the record's value. length: number of tokens. ValueError if the field cannot be decoded,
    or has neither `length` rows nor one less."""
    routes = read_routes(field)
    expect(
        len(routes) in (length - 1, length),
        f"'routes' has {len(routes)} rows: expected {length - 1} or {length}, those of the prompt "
        "and the answer",
    )
    return np.concatenate([np.full_like(routes[:1], -1), routes[: length - 1]])


def _first(values: np.ndarray, wrong: np.ndarray) -> str:
    """Text for a message about wrong values in a column: the first of them and its index. values:
    the column. wrong: bool of the same shape, True at wrong values."""
    place = int(wrong.argmax())
    return f"{values[place]:g} at {place}"


def _number_of(group: int | str) -> float:
    """A number by which answers of one group are recognised, from the group's name: 48 bits of the
    name's hash, exact in float64."""
    return float(int(hashlib.sha256(str(group).encode()).hexdigest()[:12], 16))
