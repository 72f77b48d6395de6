"""The gate over bench_gpu's rows, and README's rows of speed beside the kept ones."""

import json

import pytest

from tests.tools import bench_rows


def lines(**rates: float) -> dict:
    """Rows by names such as "4B__ours"."""
    keys = [name.split("__") for name in rates]
    return bench_rows.rows_of(
        [
            dict(case=case, trainer=trainer, tokens_per_second=rate, gpu="H200")
            for (case, trainer), rate in zip(keys, rates.values(), strict=True)
        ]
    )


BEFORE = dict(A__ours=1000, A__liger=800, B__ours=500, C__ours=90, C__hf=70)


@pytest.mark.parametrize(
    "after, fallen",
    [
        (BEFORE, []),
        (dict(BEFORE, A__ours=951), []),
        (dict(BEFORE, A__ours=949), ["A"]),
        # the machine is a tenth slower: rivals say so
        (dict(A__ours=900, A__liger=720, B__ours=450, C__ours=81, C__hf=63), []),
        # as fast as before, where its rival gained a tenth
        (dict(BEFORE, A__liger=880), ["A"]),
        # without a rival: by the median of the others'
        (dict(BEFORE, B__ours=470), ["B"]),
        (dict(BEFORE, B__ours=470, A__liger=752, C__hf=66, A__ours=940, C__ours=85), []),
    ],
)
def test_a_row_that_fell_by_more_than_5_percent_beside_its_rival_is_named(after, fallen):
    words, found = bench_rows.compare(lines(**BEFORE), lines(**after))
    assert found == fallen
    assert [word for word in words if word.startswith("FELL: ")] == [
        word for word in words if word.split(", ")[0].removeprefix("FELL: ") in fallen
    ]
    assert len(words) == 3


def test_calls_without_a_common_rival_or_on_other_gpus_are_refused():
    with pytest.raises(ValueError, match="no rival is in both calls"):
        bench_rows.compare(lines(A__ours=1), lines(**BEFORE))
    others = {key: {**row, "gpu": "H100"} for key, row in lines(**BEFORE).items()}
    with pytest.raises(ValueError, match="ran on H100, before on H200"):
        bench_rows.compare(lines(**BEFORE), others)


def test_lines_are_kept_each_in_place_of_its_trainers_and_compared(tmp_path, monkeypatch, capsys):
    kept, new = tmp_path / "speed.json", tmp_path / "results.jsonl"
    kept.write_text(bench_rows.kept_lines(lines(**BEFORE)))
    monkeypatch.setattr(bench_rows, "KEPT", kept)
    of_call = [
        dict(case="A", trainer="ours", tokens_per_second=900, spread=[880, 905], losses=[1.0]),
        dict(case="A", trainer="liger", tokens_per_second=800, spread=[790, 810]),
        dict(case="C", trainer="ours", failed="OutOfMemoryError"),
    ]
    new.write_text("".join(json.dumps(line) + "\n" for line in of_call))
    assert bench_rows.main(["compare", str(new)]) == 1
    assert capsys.readouterr().out == (
        "FELL: A, ours: 1,000 -> 900 (880 to 905), -10.0% beside its rival (+0.0%)\nFAILED: C\n"
    )
    assert bench_rows.main(["keep", str(new)]) == 0
    rows = bench_rows.read(kept)
    assert rows["A", "ours"]["spread"] == [880, 905] and "losses" not in rows["A", "ours"]
    assert rows["C", "ours"]["tokens_per_second"] == 90 and len(rows) == 5
    assert bench_rows.main(["compare", str(new)]) == 1, "C failed"
    again = dict(case="C", trainer="ours", tokens_per_second=90)
    new.write_text(new.read_text() + json.dumps(again) + "\n")
    assert bench_rows.main(["compare", str(new)]) == 0
    assert bench_rows.main(["other"]) == 2


def test_layouts_are_kept_and_compared_as_shares_of_one_gpu_in_the_same_call():
    def of_two(**rates: int) -> list[dict]:
        return [
            dict(case=case, gpus=2, tokens_per_second_per_gpu=rate, gpu="H200")
            for case, rate in rates.items()
        ]

    one = dict(case="dp2", gpus=1, tokens_per_second_per_gpu=1000, gpu="H200")
    before = bench_rows.rows_of([one, *of_two(cp2=840, tp2=830)])
    assert {case: row["share"] for (case, _), row in before.items()} == dict(cp2=0.84, tp2=0.83)
    assert bench_rows.rows_of(of_two(cp2=840)) == {}, "a share needs one GPU's rate"
    slower = {**one, "tokens_per_second_per_gpu": 500}
    words, fallen = bench_rows.compare(
        before, bench_rows.rows_of([slower, *of_two(cp2=415, tp2=390)])
    )
    assert fallen == ["tp2"]
    assert words[1] == "FELL: tp2, ours: 83% -> 78%, -6.0% beside one GPU of its call"


def test_readme_has_the_kept_rows():
    page = (bench_rows.ROOT / "README.md").read_text()
    assert bench_rows.table(bench_rows.read(bench_rows.KEPT)) in page
    assert bench_rows.with_table(page, bench_rows.read(bench_rows.KEPT)) == page
