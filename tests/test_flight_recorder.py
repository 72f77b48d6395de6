"""The call in which ranks differ: of records made by hand, and of a world of gloo."""

import pickle
import time

import pytest

from mca_lite.part_recorder import differing_calls, dump_calls
from tests.shared import world
from tests.shared.records import record

WORLD = ("world", 5, "all_reduce", 3)
BEGUN = (*WORLD, "lib.py", "started")
CASES = {
    "all in one call": ({0: [WORLD], 1: [WORLD]}, [], ""),
    "one in none": ({0: [WORLD], 1: []}, [1], "ranks without it: 1"),
    "one earlier": ({0: [("world", 6, "all_reduce", 3)], 1: [WORLD]}, [1], "call 6 of group world"),
    "other sizes": (
        {0: [WORLD], 1: [("world", 5, "all_reduce", 7, "users.py")]},
        [1],
        "all_reduce of [[7]] ['Float'] at /home/me/users.py:7; ranks without it: 0",
    ),
    "one too many, ended": (
        {
            0: [("world", 5, "all_reduce", 2, "lib.py", "completed"), ("dp", 5, "all_reduce", 8)],
            1: [
                ("world", 5, "all_reduce", 3, "users.py", "completed"),
                ("world", 6, "all_reduce", 2),
            ],
        },
        [1],
        "calls differ: ranks 0: call 5 of group world, all_reduce of [[2]]",
    ),
    "one of three unlike": (
        {0: [WORLD], 1: [WORLD], 2: [("world", 5, "all_reduce", 7)]},
        [2],
        "ranks 0, 1: call 5 of group world, all_reduce of [[3]]",
    ),
    "uneven messages to experts": (
        {0: [("dp", 5, "all_to_all", 2)], 1: [("dp", 5, "all_to_all", 3)]},
        [],
        "",
    ),
    "another operation": ({0: [WORLD], 1: [("world", 5, "_gather", 3)]}, [], "_gather"),
    "alone in a call of the user": (
        {0: [("dp", 5, "all_reduce", 8)], 1: [(*WORLD, "users.py")]},
        [1],
        "ranks 1: call 5 of group world, all_reduce of [[3]] ['Float'] at /home/me/users.py:7",
    ),
    # its GPU is busy with a kernel before the call
    "a GPU that never ends": ({0: [BEGUN], 1: [WORLD]}, [1], "ranks without it: 1"),
    "a first stage's GPU that never ends": (
        {0: [("pp", 1, "send 0->1", 8)], 1: [("pp", 1, "recv 1<-0", 8, "lib.py", "started")]},
        [0],
        "recv 1<-0 of [[8]]",
    ),
    # the batch's last entry alone has a state
    "a last stage's GPU that never ends": (
        {
            0: [
                ("pp", 1, "recv 0<-1", 8),
                ("pp", 1, "coalesced", 8, "lib.py", "completed"),
                ("pp", 2, "send 0->1", 8),
                ("pp", 2, "recv 0<-1", 9),
                ("pp", 2, "coalesced", 8, "lib.py", "started"),
            ],
            1: [("pp", 2, "recv 1<-0", 8), ("pp", 2, "coalesced", 8)],
        },
        [1],
        "send 0->1 of [[8]]",
    ),
    # 0 waits for 1, which waits for 2; 3 waits for all
    "a chain": (
        {0: [("dp", 5, "all_reduce", 8)], 1: [WORLD], 2: [], 3: [WORLD]},
        [2],
        "ranks 1, 3: call 5 of group world",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_is_late_and_the_call_that_differs(case):
    calls, late, words = CASES[case]
    got, lines = differing_calls({rank: record(*of_rank) for rank, of_rank in calls.items()})
    assert got == late
    assert words in "\n".join(lines) and bool(lines) == bool(words)


def test_a_summary_takes_kilobytes_however_long_the_record():
    calls = [("dp", number, "all_reduce", 8) for number in range(5, 2005)]
    assert len(str(record(*calls))) < 4000
    assert [call["number"] for call in record(*calls)["calls"].values()] == [5]


def call_alone(folder: str) -> list:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    group = dist.new_group([0, 1], group_desc="of both")
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    call = dict(async_op=True) if rank == 1 else dict(group=group, async_op=True)
    waiting = dist.all_reduce(torch.ones(5), **call)
    time.sleep(0.1)
    assert not waiting.is_completed()
    return [dump_calls(folder, rank)]


def test_gloo_is_recorded_and_torchs_analyser_reads_the_files(tmp_path):
    records = world.run(call_alone, 2, str(tmp_path))
    late, lines = differing_calls({rank: about for rank, [about] in enumerate(records)})
    said = "\n".join(lines)
    assert "of group of both, all_reduce of [[5]]" in said and "of group default_pg" in said
    assert f"{__file__}:" in said and late == []  # both are calls of this file
    for rank in range(2):
        with open(tmp_path / f"rank_{rank}", "rb") as file:
            assert pickle.load(file)["entries"][-1]["input_sizes"] == [[5]]
    from torch.distributed.flight_recorder.components.loader import read_dump

    assert read_dump("rank_", str(tmp_path / "rank_1"))["rank"] == 1
