"""`python -m mca_lite config.yaml [key=value ...]`: the same as train.py. `python -m mca_lite convert ...`: see cli_convert.py."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["convert"]:
        from .cli_convert import main
    else:
        from .cli import main
    sys.exit(main(sys.argv[1:]))
