"""The command line of training: reads the arguments, checks everything that can be checked alone,
then trains.

torchrun --nproc_per_node N train.py config.yaml [key=value ...]
"""

import os
import sys
import time

from . import world
from .args_run import parse_args

USER_ERROR = 2  # exit code for input that cannot be trained on, and for unreadable checkpoints
INTERRUPTED = 130  # of Ctrl-C before training: there was nothing to save


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` (None: the command line) says -> exit code."""
    try:
        return _main(argv)
    except KeyboardInterrupt:  # outside of the loop, which saves on it
        if os.environ.get("RANK", "0") == "0":
            print("interrupted outside of training: nothing was saved", file=sys.stderr)
        return INTERRUPTED


def _main(argv: list[str] | None) -> int:
    """As main, which answers Ctrl-C.

    Input that cannot be trained on is told once a machine, by its first rank: a file may be missing
    on one of them only.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(__doc__.strip() + "\n\n--help lists the keys.")
        return 0
    try:
        world.settle()
        is_main = os.environ.get("RANK", "0") == "0"
        arguments = parse_args(words)
        if is_main:
            for line in arguments.warnings:
                print(f"note: {line}", flush=True)
        from . import (
            run,
        )  # torch, transformers and megatron-core: seconds, and a typing error is told by now

        plan = run.make_plan(arguments)
    except ValueError as error:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if is_first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # the first rank to leave ends the others
        return USER_ERROR
    from .ckpt_folder import CheckpointError
    from .output_folder import OutputFolderError
    from .trainer_nonfinite import NOT_FINITE_EXIT_CODE, NotFiniteError

    try:
        run.train(plan)
    except NotFiniteError as error:  # alike on every rank
        if is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # the first rank to leave ends the others
        return NOT_FINITE_EXIT_CODE
    except (CheckpointError, OutputFolderError) as error:  # alike on every rank
        if is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    return 0
