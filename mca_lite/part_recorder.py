"""The collectives of each rank, and the ranks whose calls differ, from torch's flight recorder.

torch keeps the last nccl and gloo calls in a ring buffer. Each rank writes the buffer to a file for
torch's analyser (torchfrtrace), and stores a few kilobytes about unfinished and recent calls, so
that no rank must read a thousand files. gloo does not record point-to-point communication.
"""

import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .files import PathLike, first_of

_CALLS_SHOWN = 4
_RECENT = 8  # how many recent calls per group are compared
_TORCH = re.compile(r"[/\\]torch[/\\]|^<")
_OF_LIBRARIES = re.compile(
    r"[/\\]megatron[/\\]core[/\\]|^" + re.escape(os.path.dirname(os.path.abspath(__file__)))
)
_EVEN = re.compile("reduce|broadcast|gather")  # operations with equal sizes on all ranks
_PEERS = re.compile(r"(\d+)(?:->|<-)(\d+)")


def dump_calls(folder: PathLike, rank: int) -> dict[str, Any]:
    """Write this rank's flight recorder (torch's buffer of recent collectives) to the file
    rank_<rank> in the folder -> the summary that calls_of() makes of it. OSError if the file cannot
    be written."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    def ranks_of(group: str) -> list[int]:
        return dist.get_process_group_ranks(c10d._resolve_process_group(group))

    kind = "nccl" if dist.get_backend() == "nccl" else "fr"
    record = getattr(c10d, f"_dump_{kind}_trace")()
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"rank_{rank}").write_bytes(record)
    return calls_of(pickle.loads(record), ranks_of)  # safe: this process wrote the pickle


def calls_of(
    record: Mapping[str, Any], ranks_of: Callable[[str], list[int]]
) -> dict[str, dict[str, Any]]:
    """Summarise a rank's flight recorder (torch's buffer of recent collectives) -> {"calls":
    {group: its first unfinished call}, "recent": {group: its last collectives}}. Calls are dicts
    made by _call().

    record: the recorder's contents, as torch pickles them. Groups have torch's names.
    ranks_of(name): the global ranks of a group."""
    calls: dict[str, dict[str, Any]] = {}
    recent: dict[str, list[dict[str, Any]]] = {}
    for entry in record["entries"]:
        name = entry["process_group"][0]
        is_batch = entry["profiling_name"].endswith(":coalesced")  # reuses an earlier call's number
        if not entry["is_p2p"] and not is_batch:
            ended = _call(entry, [])
            recent[name] = [*recent.get(name, [])[1 - _RECENT :], ended]
        if entry["retired"] or entry["state"] == "completed":
            calls.pop(name, None)  # torch never marks the sends inside a batch as completed
            continue
        call = _call(entry, ranks_of(name))
        first = calls.setdefault(name, call)
        first["has_begun"] |= call["has_begun"]  # in a batch only the last entry is marked
        if first["is_message"] and call["is_message"]:
            first["ranks"] = sorted({*first["ranks"], *call["ranks"]})
    return {"calls": calls, "recent": recent}


def _call(entry: Mapping[str, Any], ranks: list[int]) -> dict[str, Any]:
    """Turn an entry of the flight recorder (torch's buffer of recent collectives) into a dict, with
    the facts that are compared between ranks and shown in reports. ranks: the global ranks of the
    call's group; [] if they are not needed, but not for a point-to-point call."""
    backend, _, operation = entry["profiling_name"].partition(":")
    pair = _PEERS.search(operation)
    if entry["is_p2p"] and pair:
        ranks = [ranks[int(index)] for index in pair.groups()]
    callers = [f"{frame['filename']}:{frame['line']}" for frame in entry.get("frames", ())]
    place = next((caller for caller in callers if not _TORCH.search(caller)), "")
    sizes = f" of {entry['input_sizes']} {entry['input_dtypes']}"
    return {
        "number": entry["collective_seq_id"],
        "backend": backend,
        "is_message": entry["is_p2p"],
        "operation": operation + sizes,
        "form": operation + sizes * bool(_EVEN.search(operation)),
        "ranks": ranks,
        "words": entry["process_group"][1],
        "has_begun": entry["state"] == "started",
        "place": place,
        "is_users": bool(place) and not _OF_LIBRARIES.search(place),
    }


def differing_calls(summaries: Mapping[int, Mapping[str, Any]]) -> tuple[list[int], list[str]]:
    """Find the ranks that hold up the others -> (late ranks, report lines about calls that differ
    or wait). summaries: {rank: its calls_of()}.

    First, recent collectives are compared. If ranks of a group made different ones under the same
    call number, the ranks in the minority are late, or at a tie those whose call is in the user's
    code, if any.

    If this names no rank, unfinished calls decide. A rank is late if others wait for it in a call,
    and it waits for none. A call that its GPU has not begun is no wait if any GPU has begun a
    call. If every awaited rank waits too, the late ranks are those waiting in a call made by the
    user's code, outside torch, megatron-core and this package. On gloo, which may hide a
    point-to-point wait, these ranks are late in any case if they are at most half of all ranks. No
    rank is late if that would be every rank."""
    late, lines = _unlike(summaries)
    waiting, found = _waiting(summaries)
    return sorted(late or waiting), [*lines, *found][:_CALLS_SHOWN]


def _unlike(summaries: Mapping[int, Mapping[str, Any]]) -> tuple[set[int], list[str]]:
    """Find the first call number at which ranks of a group made different collectives ->
    (late ranks, a report line). Late are the ranks in the minority, or at a tie those whose call is
    in the user's code, if any. (empty set, []) if no calls differ. summaries: {rank: its
    calls_of()}."""
    forms: dict[tuple[str, int], dict[str, list[int]]] = {}
    calls: dict[tuple[tuple[str, int], int], Any] = {}
    for rank, about in summaries.items():
        for group, recent in about.get("recent", {}).items():
            for call in recent:
                key = (group, call["number"])
                forms.setdefault(key, {}).setdefault(call["form"], []).append(rank)
                calls[key, rank] = call
    for key in sorted(forms):
        rarest, *others = sorted(forms[key].values(), key=len)
        if others:
            heads = {ranks[0]: ranks for ranks in (rarest, *others)}
            late = rarest
            if len(others[0]) == len(rarest):
                of_users = [rank for rank in heads if calls[key, rank]["is_users"]]
                late = heads[of_users[0]] if of_users else []
            words = [f"ranks {_shown(heads[r])}: {_in_words(calls[key, r])}" for r in heads]
            return set(late), [f"calls differ: {'; '.join(words[:_CALLS_SHOWN])}"]
    return set(), []


def _waiting(summaries: Mapping[int, Mapping[str, Any]]) -> tuple[set[int], list[str]]:
    """Find unfinished calls in which some ranks of their group take no part -> (late ranks, a
    report line per such call). summaries: {rank: its calls_of()}.

    A rank is late if others wait for it, and it waits for no rank. If there is no such rank, and on
    gloo in some cases, the late ranks are those waiting in a call made by the user's code: see
    differing_calls()."""
    open_calls = {rank: about.get("calls", {}) for rank, about in summaries.items()}
    some_began = any(c["has_begun"] for calls in open_calls.values() for c in calls.values())
    waits_for: dict[int, set[int]] = {}
    alone = set()
    of_gloo = False
    lines: dict[str, list[int]] = {}
    for rank, calls in open_calls.items():
        for group, call in calls.items():
            if some_began and not call["has_begun"]:  # this call waits for its own GPU
                continue
            others = summaries.keys() & set(call["ranks"]) - {rank}
            absent = sorted(r for r in others if not _takes_part(group, call, summaries[r]))
            if absent:
                waits_for.setdefault(rank, set()).update(absent)
                of_gloo |= call["backend"] == "gloo"
                if call["is_users"]:
                    alone.add(rank)
                without = f"; ranks without it: {_shown(absent)}"
                lines.setdefault(_in_words(call) + without, []).append(rank)
    awaited = set().union(*waits_for.values())
    late = awaited - waits_for.keys()
    is_few = 2 * len(alone) <= len(summaries)
    if not late or of_gloo and alone and is_few:
        late = alone
    if late == summaries.keys():
        late = set()
    return late, [f"ranks {_shown(ranks)}: {words}" for words, ranks in lines.items()]


def _shown(ranks: list[int]) -> str:
    """Rank numbers as text for a report line; of more than 8, only the first ones are shown."""
    return first_of([str(rank) for rank in ranks], 8)


def _takes_part(group: str, call: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """True if a rank takes part in another rank's unfinished `call` of a group. It does if it has
    finished this call, or if its own unfinished call is the same, and both have begun or neither
    has. In a point-to-point call it does if its own unfinished call in the group is one too,
    and has begun. about: the rank's calls_of()."""
    same = about.get("calls", {}).get(group)
    if call["is_message"]:
        return same is not None and same["is_message"] and same["has_begun"]
    if same is None or same["is_message"] or call["number"] < same["number"]:
        recent = about.get("recent", {}).get(group, [])
        return any(own["number"] >= call["number"] for own in recent)
    return all(same[key] == call[key] for key in ("number", "form", "has_begun"))


def _in_words(call: Mapping[str, Any]) -> str:
    """A call, as _call() describes it, in words for a report: "call 7 of group <description>,
    all_reduce of <sizes> at <file:line>". The place in the code is left out if it is not known."""
    place = f" at {call['place']}" * bool(call["place"])
    return f"call {call['number']} of group {call['words']}, {call['operation']}{place}"
