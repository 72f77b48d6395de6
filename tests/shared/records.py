"""Records of collectives as torch's flight recorder makes them, by hand."""

from mca_lite.part_recorder import calls_of

GROUPS = {"world": [0, 1, 2, 3], "dp": [0, 1], "pp": [0, 1]}
LAST = 4  # number of each group's last collective before the calls
CODE = {"lib.py": "/venv/megatron/core/lib.py", "users.py": "/home/me/users.py"}


def entry(group: str, number: int, name: str, size: int, file: str = "lib.py", state="scheduled"):
    """An unfinished call, as torch records it."""
    frames = [("all_reduce", "/venv/torch/distributed/c10d.py", 1), ("f", CODE[file], 7)]
    is_message = name.startswith(("send", "recv"))
    is_batch = name == "coalesced"  # for torch no message, with the number of the last collective
    return dict(
        process_group=(group, group),
        collective_seq_id=LAST if is_batch else number * (not is_message),
        p2p_seq_id=number * is_message,
        is_p2p=is_message,
        profiling_name=f"nccl:{name}",
        input_sizes=[] if is_batch else [[size]],
        input_dtypes=[] if is_batch else ["Float"],
        state=state,
        retired=state == "completed",
        frames=[dict(name=name, filename=file, line=line) for name, file, line in frames],
    )


def record(*calls) -> dict:
    """The summary of a rank in calls, each the arguments of entry()."""
    before = [entry(group, LAST, "all_reduce", 3, state="completed") for group in GROUPS]
    return calls_of(dict(entries=[*before, *(entry(*call) for call in calls)]), GROUPS.__getitem__)
