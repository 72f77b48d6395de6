"""`python -m mca_lite config.yaml [key=value ...]`: the same as train.py."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
