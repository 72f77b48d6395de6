"""The scripts of configs/examples, as modules."""

import importlib.util

from tests.shared.commands import ROOT

FOLDER = ROOT / "configs/examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
