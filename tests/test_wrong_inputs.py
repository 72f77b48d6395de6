"""The short form of tests/tools/wrong_inputs.py, and that it sees what it is there to see."""

import pytest

from tests.shared.wrong_cases import Case, cases, sample
from tests.tools import wrong_inputs


def test_a_sample_of_wrong_inputs_ends_in_words_that_name_them(tmp_path):
    assert wrong_inputs.run(sample(20), tmp_path, lanes=1) == {}


@pytest.mark.full
def test_every_wrong_input_ends_in_words_that_name_it(tmp_path):
    assert wrong_inputs.run(cases(), tmp_path) == {}


def test_there_are_hundreds_of_cases_of_each_kind_of_input():
    found = cases()
    groups = {case.name.partition("/")[0] for case in found}
    wanted = "keys config templates data world limits python commands".split()
    assert len(found) > 600 and groups >= set(wanted)
    assert len([case for case in found if not case.name.startswith("keys/")]) > 300


@pytest.mark.parametrize(
    "code, said, problem",
    [
        (2, "error: seed is no number", None),
        (1, "error: KeyError: 'x' (a defect of mca_lite; ...)", "a defect of mca_lite"),
        (2, "Traceback (most recent call last)", "Traceback"),
        (0, "", "code 0, expected 2"),
        (2, "error: something", "does not name seed"),
        (None, "", "did not end"),
    ],
)
def test_an_end_is_judged(code, said, problem):
    found = wrong_inputs.judge(Case("any", ("seed",)), (2,), code, said)
    assert found is None if problem is None else found.startswith(problem)


def test_a_case_that_is_taken_one_that_hangs_and_one_that_fails_are_seen(tmp_path):
    base = sample(1000)[0].words[:-1]
    good = Case("good", ("seed",), words=base)
    called = Case("called", ("seed",), "python", call="tests.test_wrong_inputs:fail")
    found = wrong_inputs.run([good, called], tmp_path)
    assert found["good"].startswith("code 0") and "a defect of mca_lite" in found["called"]


def fail(folder):
    from mca_lite.data_batches import make_loader

    make_loader([1], None, None)  # no plan: an AttributeError of the package
