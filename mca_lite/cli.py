"""The command line of training: reads the arguments, checks everything that can be checked alone,
then trains.

torchrun --nproc_per_node N train.py config.yaml [key=value ...]
"""

import os
import sys
from importlib import import_module

from . import world
from .args_run import parse_args
from .cli_errors import INTERRUPTED, end


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` (None: the command line) says -> exit code, which cli_errors.py explains."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(__doc__.strip() + "\n\n--help lists the keys.")
        return 0
    if words == ["--version"]:
        print(import_module(__package__).__version__)
        return 0
    output_dir = None
    world.end_second_run()
    try:
        world.settle()
        arguments = parse_args(words)
        output_dir = arguments.training.output_dir
        if os.environ.get("RANK", "0") == "0":
            for line in arguments.warnings:
                print(f"note: {line}", flush=True)
        arguments.training.notes.clear()  # the summary need not say them again
        # torch, transformers and megatron-core: seconds, and a typing error is told by now
        from .ckpt_folder import check_new
        from .run import make_plan, train

        if arguments.training.do_train and arguments.training.resume_from_checkpoint is None:
            check_new(arguments.training)  # here too, before anything is tokenised
        train(make_plan(arguments))
    except KeyboardInterrupt:  # outside of the loop, which saves on it
        if os.environ.get("RANK", "0") == "0":
            print("interrupted outside of training: nothing was saved", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return end(error, output_dir)
    return 0
