"""Processes with the packages of this environment, but without an editable install of mca_lite. Its
finder would take a module that a folder lacks from the installed checkout.
"""

import os
import sys
from pathlib import Path

import pytest

PYTHON = [sys.executable, "-S"]  # reads no .pth file, which adds the finder
SITE_PACKAGES = Path(pytest.__file__).parents[1]


def environment(*folders) -> dict[str, str]:
    """The variables of such a process, which imports from the folders first."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [*folders, *filter(None, before), SITE_PACKAGES]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
