"""Fixtures of several test modules: a tiny model, runs of plain torch, and the worlds beside them.

Each function makes one: `model_path = saved_model("qwen3")` at the top of a module.
"""

from pathlib import Path

import pytest

from tests.shared import small_runs, tiny, world
from tests.shared.cells import asked_for, shared_worlds, train_all
from tests.shared.files import assert_same_tensors, tensors
from tests.shared.layouts import TWO_ROWS
from tests.shared.lora_tools import adapter_of, train_from_adapter
from tests.shared.training import BRIEF, assert_same_curve


def saved_model(family: str, **changes):
    """The folder of a model, tiny.save_model's, for a module."""

    @pytest.fixture(scope="module")
    def path(tmp_path_factory) -> str:
        return tiny.save_model(tmp_path_factory.mktemp("saved") / "model", family, **changes)

    return path


def saved_run_files(family: str, **changes):
    """A folder of small_runs.save_all, for a module."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("run_files")
        small_runs.save_all(folder, family, **changes)
        return folder

    return folder


def torch_references(**keys):
    """{family: (model folder, curve of the torch backend on one rank, its exported weights)} of the
    families with cells in this session, and of qwen3; the others have a folder alone."""

    @pytest.fixture(scope="module")
    def references(request, tmp_path_factory) -> dict:
        folder = tmp_path_factory.mktemp("references")
        paths = {f: tiny.save_model(folder / "models" / f, f) for f in tiny.FAMILY_KEYS}
        runs = {family: ((paths[family],), {}) for family in {*asked_for(request), "qwen3"}}
        [curves] = world.run(train_all, 1, runs, str(folder), backend="torch", **keys)
        return {f: (paths[f], curves.get(f), tensors(folder / f)) for f in paths}

    return references


def trained_references(layouts: dict, **keys):
    """run(layout) of cells.shared_worlds: the models of the fixture `references`."""

    @pytest.fixture(scope="module")
    def trained(request, references, tmp_path_factory):
        return shared_worlds(
            request, tmp_path_factory, layouts, lambda f: ((references[f][0],), {}), **keys
        )

    return trained


def beside_peft(layouts: dict):
    """check(case, layout): the curve and the adapters of the case in the layout are peft's. The
    module has a fixture `peft_references`, {case: (model folder, folder of peft's adapters, `start`
    and `end`, curve of peft)}."""

    @pytest.fixture(scope="module")
    def assert_as_peft(request, peft_references, tmp_path_factory):
        def of(case: str):
            path, folder, _ = peft_references[case]
            return (path, str(folder / "start")), {}

        keys = dict(run=train_from_adapter, **BRIEF, **TWO_ROWS)
        trained = shared_worlds(request, tmp_path_factory, layouts, of, **keys)

        def check(case: str, layout: str):
            _, folder, curve = peft_references[case]
            curves, out = trained(layout)
            for got in curves:
                assert_same_curve(got[case], curve)
            assert_same_tensors(adapter_of(out / case), adapter_of(folder / "end"))

        return check

    return assert_as_peft
