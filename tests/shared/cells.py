"""Products of cases and layouts: which cells `make test` runs, and one world for all cells of a
layout.

A cell is a test with the parameters `case` and `layout`. Cells that only `make test-all` runs carry
the mark `full`.
"""

import functools

import pytest

from tests.shared import world
from tests.shared.training import train


def cell(case, layout, full: bool = False):
    return pytest.param(case, layout, marks=[pytest.mark.full] if full else [])


def thinned(cases, layouts, everywhere, few) -> list:
    """Every case in the `few` layouts, the cases `everywhere` in all of them; the rest of the
    product is marked full.
    """
    return [
        cell(case, layout, full=case not in everywhere and layout not in few)
        for case in cases
        for layout in layouts
    ]


def asked_for(request, layout: str | None = None) -> list:
    """The cases of the module's cells that this session runs, in all layouts or in one."""
    cases = {}
    for item in request.session.items:
        values = getattr(item, "callspec", None) and item.callspec.params
        if item.module is request.module and values and {"case", "layout"} <= values.keys():
            if layout in (None, values["layout"]):
                cases[values["case"]] = None
    return list(cases)


def train_all(runs: dict, out: str, run=train, **keys) -> dict:
    """{name: curve} of the runs {name: (arguments, keys)}, one after another on this rank; each is
    exported to out/name.
    """
    return {
        name: run(args[0], f"{out}/{name}", *args[1:], **{"export": True, **keys, **own})
        for name, (args, own) in runs.items()
    }


def shared_worlds(request, tmp_path_factory, layouts: dict, runs_of, timeout_s=120, **keys):
    """run(layout) -> ([{case: curve} of each rank], folder of the exports): the world of a layout
    runs once, when it is asked for.

    runs_of(case) -> (arguments, keys) of train_all.
    """

    @functools.cache
    def run(layout: str):
        out, (ranks, own) = tmp_path_factory.mktemp(layout), layouts[layout]
        runs = {case: runs_of(case) for case in asked_for(request, layout)}
        return world.run(
            train_all, ranks, runs, str(out), timeout_s=timeout_s, **{**keys, **own}
        ), out

    return run
