"""torchrun --nproc_per_node N train.py config.yaml [key=value ...]"""

import sys

from mca_lite.cli import main

if __name__ == "__main__":
    sys.exit(main())
