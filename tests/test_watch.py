"""Runs as their folders show them: `watch`, `report`, and what a run draws of itself."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mca_lite import TrainingArguments, log, tool_page, tool_watch
from mca_lite.callbacks import TrainerControl, TrainerState
from mca_lite.log import Report
from mca_lite.log_metrics import read_lines
from mca_lite.tool_page import RunFolder, draw, page
from mca_lite.tool_watch import frame, sparkline
from tests.shared import tiny, world
from tests.shared.training import Clock

LINE = {
    "epoch": 0.5, "grad_norm": 1.25, "learning_rate": 3e-4, "tokens_per_second": 12345.6,
    "padding_fraction": 0.375, "peak_memory_gib": 1.5, "mfu": 0.42, "step_time_s": 2.0,
}  # fmt: skip


def make_run(folder: Path, losses, age_s=1.0, took_s=100.0, **summary) -> Path:
    """A folder as a run of one line every ten steps leaves it, its last line of age_s ago."""
    folder.mkdir(parents=True)
    lines = [{"step": 10 * (i + 1), "loss": loss, **LINE} for i, loss in enumerate(losses)]
    path, now = folder / "trainer_log.jsonl", time.time()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (now - age_s, now - age_s))
    known = {"state": "running", "max_steps": 100, "first_step": 0, "host": "another", "pid": 1}
    known |= {"started": now - age_s - took_s, **summary}
    (folder / "run_summary.json").write_text(json.dumps(known))
    return folder


def append(folder: Path, text: str) -> None:
    with open(folder / "trainer_log.jsonl", "a") as file:
        file.write(text)


# a log that is being written


def test_half_a_line_waits_for_its_end_and_nonsense_is_passed_over(tmp_path):
    make_run(tmp_path / "run", [3.0])
    run = RunFolder(tmp_path / "run")
    append(run.folder, '{"step": 20, "lo')
    assert [line["step"] for line in run.read().records] == [10]
    append(run.folder, 'ss": 2.5}\nnonsense\n[1]\n{"loss": 1}\n{"step": 30, "loss": NaN}\n\xff\n')
    assert run.read().points("loss") == [(10, 3.0), (20, 2.5)]
    assert run.step == 30 and run.values("grad_norm") == [1.25]


def test_the_log_of_a_resumed_run_is_read_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert len(read_lines(path)) == 3
    (tmp_path / "new").write_text('{"step": 1}\n')
    os.replace(tmp_path / "new", path)
    assert read_lines(path) == [{"step": 1}]
    path.unlink()
    assert read_lines(path) == []


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


HERE = {"host": socket.gethostname()}
STATES = {  # name: (what make_run is told, the state)
    "a line just now": ({}, "running"),
    "a slow run": ({"age_s": 95.0}, "running"),
    "silent for 121 seconds": ({"age_s": 121.0}, "hung?"),
    "no line yet": ({"losses": [], "took_s": 600.0}, "running"),
    "no line ever": ({"losses": [], "took_s": 1000.0}, "hung?"),
    "its process lives": (HERE | {"pid": os.getpid()}, "running"),
    "its process is gone": (HERE | {"pid": dead_process}, "failed"),
    "it said so": ({"state": "finished", "age_s": 1e6}, "finished"),
    "a signal": ({"state": "interrupted", "age_s": 1e6}, "interrupted"),
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_a_run(tmp_path, name):
    told, state = STATES[name]
    told = {key: value() if callable(value) else value for key, value in told.items()}
    make_run(tmp_path / "run", **{"losses": [2.0, 1.0], **told})
    assert RunFolder(tmp_path / "run").state() == state


def test_a_run_of_slow_lines_may_be_silent_for_five_of_them(tmp_path):
    run = make_run(tmp_path / "run", [2.0, 1.0], age_s=500.0)
    slow = json.dumps({"step": 40, "loss": 1.0, "step_time_s": 10.0})  # 20 steps: 200 s a line
    (run / "trainer_log.jsonl").write_text(f'{{"step": 20, "loss": 1.0}}\n{slow}\n')
    for age_s, state in ((990, "running"), (1010, "hung?")):
        os.utime(run / "trainer_log.jsonl", (time.time() - age_s,) * 2)
        assert RunFolder(run).state() == state


def test_a_folder_without_a_summary_or_without_anything(tmp_path):
    run = make_run(tmp_path / "run", [2.0])
    (run / "run_summary.json").unlink()
    assert RunFolder(run).state() == "unknown" and RunFolder(run).eta_s() is None
    assert RunFolder(tmp_path / "nothing").state() == "no run yet"


def test_time_left_is_that_of_the_steps_since_the_start(tmp_path):
    # resumed at step 10, 20 steps in 100 s, the last line 4 s ago: 70 steps take 350 s
    run = RunFolder(make_run(tmp_path / "run", [3.0, 2.0, 1.0], age_s=4.0, first_step=10))
    assert run.eta_s() == pytest.approx(346.0, abs=1.0)


# watch


def test_a_frame_has_the_runs_beside_each_other(tmp_path):
    first = make_run(tmp_path / "first", [4.0, 3.0, 2.5])
    append(first, json.dumps({"step": 30, "eval_loss": 2.75, "expert_load_max": 1.5}) + "\n")
    second = make_run(tmp_path / "second", [4.0] * 10, state="finished")
    lines = frame([RunFolder(x) for x in (first, second, tmp_path / "third")], 120)
    assert max(map(len, lines)) <= 120
    names, *columns = [
        [line[start : start + 32].rstrip() for line in lines] for start in (0, 18, 50, 82)
    ]
    one, other, nothing = columns
    assert one[0].endswith("/first") and other[0].endswith("/second")
    one, other, nothing = (
        {line[:18].rstrip(): cell[:14].rstrip() for line, cell in zip(lines, column, strict=True)}
        for column in columns
    )
    assert re.fullmatch(r"3m5\ds", one.pop("time left")) and one.pop("last line") in ("0s", "1s")
    del one[""], one["time"]
    assert one == {
        "state": "running", "step": "30 of 100",
        "epoch": "0.50", "loss": "2.5000", "eval_loss": "2.7500", "grad_norm": "1.25",
        "lr": "3.0e-04", "step time": "2.00 s",
        "tokens/s": "12.3k", "MFU": "42.0%", "padding": "37.5%", "memory": "1.50 GiB",
        "experts, most": "1.50 x mean",
    }  # fmt: skip
    assert other["state"] == "finished" and other["step"] == "100 of 100"
    assert nothing["state"] == "no run yet" and nothing["loss"] == ""


def test_a_narrow_frame_has_them_below_each_other_and_keeps_whole_sparklines(tmp_path):
    losses = [4.0, 3.0, 1.0]
    runs = [RunFolder(make_run(tmp_path / name, losses)) for name in "ab"]
    lines = frame(runs, 36)
    assert max(map(len, lines)) <= 36
    rows = [line for line in lines if line.startswith("loss ")]
    assert [row[32:] for row in rows] == [sparkline(losses, 2)] * 2 == ["█▁"] * 2
    assert len(frame(runs, 1)) == len(lines)


def test_a_sparkline_has_the_first_and_the_last_value_at_its_ends():
    assert sparkline([0.0, 7.0], 2) == "▁█" and sparkline([5.0], 3) == "▁▁▁"
    assert sparkline(list(range(8)), 8) == "▁▂▃▄▅▆▇█" == sparkline(list(range(1, 9)), 8)
    assert sparkline([3.0, 1.0, 2.0], 0) == ""


def test_watch_follows_until_all_runs_have_ended(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", [4.0])
    summary = json.loads((run / "run_summary.json").read_text())

    def sleep(seconds):
        assert seconds == 0.5
        append(run, json.dumps({"step": 20, "loss": 3.25}) + "\n")
        (run / "run_summary.json").write_text(json.dumps({**summary, "state": "finished"}))

    monkeypatch.setattr(tool_watch.time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert tool_watch.main([str(run), "--every", "0.5"]) == 0
    frames = capsys.readouterr().out.split("\033[H")[1:]
    assert len(frames) == 2
    assert "4.0000" in frames[0] and "running" in frames[0]
    assert "3.2500" in frames[1] and "finished" in frames[1]


def test_what_is_no_terminal_gets_one_plain_frame(tmp_path, capsys):
    run = make_run(tmp_path / "run", [4.0])
    for words in ([str(run)], [str(run), "--once"]):
        assert tool_watch.main(words) == 0
        out = capsys.readouterr().out
        assert "4.0000" in out and "\033" not in out


def test_a_folder_of_other_things_is_left_out_beside_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "first", [1.0])
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokens.bin").touch()
    (tmp_path / "page.html").touch()
    assert tool_watch.main(["first", "cache", "page.html", "later"]) == 0
    printed = capsys.readouterr().out
    assert "first" in printed
    assert not any(name in printed for name in ("cache", "page.html", "later"))
    assert tool_watch.main(["cache"]) == 2
    assert "cache" in capsys.readouterr().out


def test_neither_command_waits_for_torch():
    script = (
        "import sys, mca_lite.tool_watch, mca_lite.tool_watch; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


# the page


def parse(text: str) -> ElementTree.Element:
    """The page, which has to be XML, and to need nothing from elsewhere."""
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|src=|href=|<script|@import|url\(", text)
    return ElementTree.fromstring(text)


def cards(root) -> dict:
    """{title: the element} of the charts and tables."""
    found = {}
    for element in root.iter("div"):
        title = element.find("h3")
        if element.get("class") == "card" and title is not None:
            found[title.text] = element
    return found


def texts(element, tag: str, kind: str | None = None) -> list[str]:
    found = (one for one in element.iter(tag) if kind in (None, one.get("class")))
    return ["".join(one.itertext()) for one in found]


def test_the_numbers_on_the_page_are_the_logs(tmp_path):
    losses = [4.0, 2.0, 3.0, 1.0]
    run = make_run(tmp_path / "run", losses, state="finished", sections={"data": {"training": "9"}})
    append(run, '{"step": 20, "eval_loss": 1.5}\n{"step": 40, "eval_loss": 1.75}\n')
    (run / "config.yaml").write_text("seed: 42\nbf16: true\nlearning_rate: 0.00025\n")
    root = parse(page([RunFolder(run)]))
    first, tiles = (
        dict(("".join(part.itertext()) for part in tile) for tile in tiles)
        for tiles in root.iterfind(".//div[@class='tiles']")
    )
    assert first == {
        "state": "finished", "step": "40 of 100", "loss": "1.0000", "tokens/s": "12.3k",
    }  # fmt: skip
    assert tiles.pop("time") in ("1m40s", "1m41s")
    assert tiles == {
        "state": "finished", "step": "40 of 100", "epoch": "0.50", "loss": "1.0000",
        "eval_loss": "1.7500", "grad_norm": "1.25", "lr": "3.0e-04", "tokens/s": "12.3k",
        "MFU": "42.0%", "step time": "2.00 s", "padding": "37.5%", "memory": "1.50 GiB",
    }  # fmt: skip
    chart = cards(root)["Loss"]
    assert texts(chart, "span", "c0") == ["— loss 1.0000"]
    assert texts(chart, "span", "c1") == ["— eval_loss 1.7500"]
    # the curve from its path and the axis' ends: 1 to 4, from step 10 to 40
    assert texts(chart, "span", "y") == ["1.0000", "2.0000", "3.0000", "4.0000"]
    assert texts(chart, "span", "x") == ["10", "20", "30", "40"]
    curve = next(path for path in chart.iter("path") if path.get("class") == "c0")
    places = re.findall(r"([\d.]+) ([\d.]+)", curve.get("d"))
    assert [10 + float(x) / 1000 * 30 for x, _ in places] == pytest.approx([10, 20, 30, 40], 1e-3)
    assert [4 - float(y) / 1000 * 3 for _, y in places] == pytest.approx(losses, 1e-3)
    table = dict(zip(texts(root, "th"), texts(root, "td"), strict=True))
    assert table == {"training": "9", "seed": "42", "bf16": "true", "learning_rate": "0.00025"}


def test_parts_of_a_loss_are_drawn_beside_their_evaluations(tmp_path):
    run = make_run(tmp_path / "run", [3.0])
    keys = "kd_loss", "eval_kd_loss", "eval_chat_kd_loss", "eval_sft_loss", "eval_chat_loss"
    append(run, json.dumps({"step": 20, **dict.fromkeys(keys, 0.5)}) + "\n")
    charts = cards(parse(page([RunFolder(run)])))
    drawn = {title: re.findall(r"— (\w+)", "".join(charts[title].itertext())) for title in charts}
    assert drawn["kd_loss"] == ["kd_loss", "eval_kd_loss", "eval_chat_kd_loss"]
    assert drawn["sft_loss"] == ["eval_sft_loss"]
    assert drawn["Loss"] == ["loss", "eval_chat_loss"]


def test_a_page_of_several_runs_shows_what_differs(tmp_path):
    runs = [make_run(tmp_path / name, [3.0, loss]) for name, loss in (("a", 2.0), ("b", 1.0))]
    for run, seed in zip(runs, (1, 2), strict=True):
        (run / "config.yaml").write_text(f"dataset: {'Aa'[seed - 1]}\nseed: {seed}\nbf16: true\n")
        answer = {"prompt": "p", "before": "x", "expected": "y1", "answer": f"y{seed}"}
        (run / "generations.jsonl").write_text(json.dumps(answer) + "\n")
    root = parse(page([RunFolder(run) for run in runs]))
    chart = cards(root)["Loss"]
    a, b = runs
    assert texts(chart, "span", "c0") == [f"— {a}: loss 2.0000"]
    assert texts(chart, "span", "c1") == [f"— {b}: loss 1.0000"]
    rows = [texts(row, "*")[1:] for row in root.iter("tr")]
    rows = [[*dict.fromkeys(row)] for row in rows]
    assert ["dataset", "A", "a"] in rows
    assert ["seed", "1", "2"] in rows and not any(row[0] == "bf16" for row in rows)
    assert ["prompt", "expected", "before", f"after, {a}", f"after, {b}"] in rows
    assert texts(root, "td", "right") == ["y1"]  # of b's the answer is another


def test_texts_of_a_model_stay_texts(tmp_path):
    run = make_run(tmp_path / "<b>&", [1.0], sections={"data": {"<i>": "'\x07\ud800<script>"}})
    sample = {"prompt": "</td><img src=x>", "answer": "<|im_end|>\n\x00"}
    (run / "generations.jsonl").write_text(json.dumps(sample) + "\n")
    text = page([RunFolder(run)])
    assert "<img" not in text and "<script" not in text and "\x00" not in text
    root = ElementTree.fromstring(text)
    assert texts(root, "td")[:4] == ["</td><img src=x>", "", "", "<|im_end|>\n\ufffd"]
    text.encode()


def test_a_long_log_makes_a_short_page_without_losing_a_spike(tmp_path):
    losses = [2.0 + i % 2 / 100 for i in range(5_000)]
    losses[3_777] = 9.0
    run = RunFolder(make_run(tmp_path / "run", losses))
    started = time.process_time()
    text = page([run])
    # a quarter of a second, and in a process that holds many tests' garbage three times that
    assert time.process_time() - started < 4 and len(text) < 1_000_000
    chart = cards(parse(text))["Loss"]
    [path] = [path.get("d") for path in chart.iter("path") if path.get("class") == "c0 raw"]
    assert re.search(r"L755.6 0.0L", path) and path.endswith("L1000.0 998.6h0")


def places(element) -> list[tuple[str, float, str]]:
    """(class, percent, text) of the marks beside the axes of a chart."""
    spans = [span for span in element.iter("span") if span.get("class") in ("x", "y")]
    return [(s.get("class"), float(re.search(r"[\d.]+", s.get("style"))[0]), s.text) for s in spans]


def test_the_page_leads_with_the_loss_smoothed_and_folds_the_rest(tmp_path):
    losses = [4.0 - i / 10 + (i % 2) / 2 for i in range(30)]
    run = make_run(tmp_path / "run", losses, state="interrupted", resumes=[100, 250])
    append(run, json.dumps({"step": 300, "skipped_iter": 0, "own": 3.0}) + "\n")
    root = parse(page([RunFolder(run)]))
    leading, folded = (
        root.find(f".//{path}") for path in ("div[@class='charts leading']", "details")
    )
    assert [*cards(leading)] == ["Loss", "Gradient norm, before clipping", "Learning rate"]
    assert {"Seconds per step", "own", "skipped_iter"} <= cards(folded).keys()
    assert not cards(leading).keys() & cards(folded).keys()
    chart = cards(leading)["Loss"]
    kinds = [path.get("class") for path in chart.iter("path")]
    assert kinds.count("resume") == 2 and kinds[-2:] == ["c0 raw", "c1"]
    # from step 10 to 300
    marks = [path.get("d") for path in chart.iter("path") if path.get("class") == "resume"]
    assert [float(re.match(r"M([\d.]+) 0v1000", mark)[1]) for mark in marks] == pytest.approx(
        [1000 * 90 / 290, 1000 * 240 / 290]
    )
    # the mean falls behind by nine tenths of each difference: of a ramp of 0.1 by 0.9 in the end
    mean = losses[0]
    for loss in losses[1:]:
        mean += (loss - mean) / 10
    assert texts(chart, "span", "c1") == [f"— loss, smoothed {mean:.4f}"]


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [5.0, 5.0], [1e-9, 3e5], [-3.0, -7.0]])
def test_axes_have_several_true_marks(tmp_path, values):
    run = make_run(tmp_path / "run", values)
    for step, value in enumerate(values):
        append(run, json.dumps({"step": 10 + 10 * step, "own": value}) + "\n")
    folded = parse(page([RunFolder(run)])).find(".//details")
    marks = places(cards(folded)["own"])
    low, high = min(0.0, *values), max(values)
    high = max(high, low + 1.0) if high == low else high
    for axis, first, size in (("y", low, high - low), ("x", 10, max(1, 10 * len(values) - 10))):
        found = [
            (place, float(text.replace(",", ""))) for kind, place, text in marks if kind == axis
        ]
        assert 2 <= len(found) <= 6
        for place, number in found:
            assert 0 <= place <= 100 and number == pytest.approx(first + size * place / 100, 1e-3)


def test_constants_spikes_and_single_lines_are_drawn(tmp_path):
    run = make_run(tmp_path / "run", [0.0])
    append(run, json.dumps({
        "step": 20, "loss": 1e-12, "rewards/accuracies": 1.0, "logps/chosen": -5.0,
        "expert_load": [[0.5, 1.5, 1.0], [4.0, 0.0, 1.0]], "expert_load_max": 2.75, "own": 1e300,
    }) + "\n")  # fmt: skip
    append(run, '{"step": 20, "eval_loss": 1.0, "eval_web_loss": 1.0, "eval_own": 2.0}\n')
    root = parse(page([RunFolder(run)]))
    assert texts(cards(root)["own"], "span", "c1") == ["— eval_own 2"]
    assert texts(cards(root)["Loss"], "span", "c2") == ["— eval_web_loss 1.0000"]
    assert "Pairs ranked right; in KTO answers with rewards of their label" in cards(root)
    assert not {"step", "expert_load"} & cards(root).keys()


def test_a_frame_of_folders_without_a_run_ends_with_the_code_of_an_error(tmp_path, capsys):
    run = make_run(tmp_path / "run", [1.0])
    nothing = str(tmp_path / "nothing")
    assert tool_watch.main([nothing, "--once"]) == 2
    assert tool_watch.main([nothing, str(run), "--once"]) == 0
    assert capsys.readouterr().out.count("no run yet") == 1


def test_the_report_command_writes_the_page(tmp_path, capsys, monkeypatch):
    first, second = (make_run(tmp_path / name, [1.0]) for name in "ab")
    assert tool_watch.main_report([str(first)]) == 0
    assert capsys.readouterr().out == f"{first}/report.html\n"
    parse((first / "report.html").read_text())
    monkeypatch.chdir(tmp_path)
    assert tool_watch.main_report([str(first), str(second)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/comparison.html\n"
    assert f"{first}: loss" in (tmp_path / "comparison.html").read_text()
    assert tool_watch.main_report([str(tmp_path / "nothing")]) == 2
    assert "trainer_log.jsonl" in capsys.readouterr().err


# somebody else's folder

DEEP = "[" * 99_999
BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join(10 * [f'*{before}'])}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TAGS = "!!bool x", "!!int x", "!!int ''", "!!timestamp x", "9" * 5000
VALUES = {
    "null": None, "text": "x\x1b]0;owned\x07\x1b[2J", "negative": -1, "huge": 10**400,
    "large": 1e308, "lower": -1e308, "tiny": 5e-324, "nan": float("nan"), "true": True,
    "list": [[]], "mapping": {"a": {"b\x1b": [None]}},
}  # fmt: skip
KEYS = {  # of which file, and which of the values is one that fits
    "state": ("run_summary.json", "text"),
    "max_steps": ("run_summary.json", ""),
    "first_step": ("run_summary.json", ""),
    "started": ("run_summary.json", ""),
    "host": ("run_summary.json", "text"),
    "pid": ("run_summary.json", ""),
    "sections": ("run_summary.json", "mapping"),
    **dict.fromkeys(("step", "loss", "eval_loss", "step_time_s", "consumed_tokens", "expert_load"),
                    ("trainer_log.jsonl", "")),
    **dict.fromkeys(("prompt", "answer"), ("generations.jsonl", "")),
}  # fmt: skip


def watched_and_reported(folder: Path, capsys, monkeypatch) -> str:
    """Pages of `watch` about the folder's run beside a good one, after `report` drew both."""
    monkeypatch.chdir(folder)
    make_run(folder / "good", [3.0, 1.2345], **HERE, pid=os.getpid())
    assert tool_watch.main_report(["odd", "good"]) in (0, 2), capsys.readouterr().err
    page_of_both = (folder / "comparison.html").read_text()
    assert "1.234" in page_of_both
    parse(page_of_both)
    capsys.readouterr()
    assert tool_watch.main(["odd", "good"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "1.2345" in out and "\x1b" not in out and "\x07" not in out
    return out


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", VALUES)
def test_an_odd_value_in_one_folder_leaves_the_others_shown(
    tmp_path, capsys, monkeypatch, key, value
):
    name, fits = KEYS[key]
    run, line = (
        make_run(tmp_path / "odd", [2.0, 1.0], **HERE, pid=os.getpid()),
        {key: VALUES[value]},
    )
    if name == "run_summary.json":
        line = {**json.loads((run / name).read_text()), **line}
        (run / name).write_text(json.dumps(line))
    else:
        with open(run / name, "a") as file:
            file.write(json.dumps({"step": 30, **line}) + "\n")
    out = watched_and_reported(tmp_path, capsys, monkeypatch)
    is_bad = name == "run_summary.json" and value not in (fits, "null")
    assert ("cannot be read" in out) == is_bad


FILES = {  # name: (file, what it holds; None: a pipe, the words of `report` on this folder alone)
    "a summary cut short": ("run_summary.json", '{"state": "run', "expected JSON"),
    "a summary nested deep": ("run_summary.json", '{"state": ' + DEEP, "nested too deep"),
    "a summary of bytes": ("run_summary.json", b"\xff\xfe\x00", "expected JSON"),
    "a summary that is a list": ("run_summary.json", "[]", "expected a JSON object"),
    "a summary that is a pipe": ("run_summary.json", None, "no file"),
    "a log that is a pipe": ("trainer_log.jsonl", None, "no file"),
    "a log nested deep": ("trainer_log.jsonl", f'{{"step": 1, "loss": {DEEP}\n', ""),
    "answers nested deep": ("generations.jsonl", f'{{"prompt": {DEEP}\n', ""),
    "answers that are a pipe": ("generations.jsonl", None, "no file"),
    "a config of names of names": ("config.yaml", BOMB, "an alias"),
    "a config nested deep": ("config.yaml", f"a: {DEEP}", "nested too deep"),
    "a config of bytes": ("config.yaml", b"\xff\xfe\x00", "cannot be read"),
    "a config that is a pipe": ("config.yaml", None, "no file"),
    "a config with a huge number": ("config.yaml", f"a: [{TAGS[-1]}]", ""),
    "a config with bytes as key": ("config.yaml", "a: [{!!binary aGk=: 1}]", ""),
    **{
        f"a config with {tag:.12}": ("config.yaml", f"a: [{tag}]", "cannot be read")
        for tag in TAGS[:-1]
    },
}


@pytest.mark.parametrize("kind", FILES)
def test_an_odd_file_in_one_folder_leaves_the_others_shown(tmp_path, capsys, monkeypatch, kind):
    name, content, words = FILES[kind]
    run = make_run(tmp_path / "odd", [2.0, 1.0])
    (run / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(run / name)
    else:
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    out = watched_and_reported(tmp_path, capsys, monkeypatch)
    seen_by_watch = name in ("run_summary.json", "trainer_log.jsonl") and words != ""
    assert ("cannot be read" in out) == seen_by_watch
    page_of_both = (tmp_path / "comparison.html").read_text()
    code = tool_watch.main_report(["odd"])
    told = capsys.readouterr().err + page_of_both
    assert code == (2 if name == "trainer_log.jsonl" else 0)
    assert words in told and ("cannot be read" in told) == bool(words)


def test_names_of_folders_do_not_steer_the_terminal(tmp_path, capsys):
    make_run(tmp_path / "a\x1b[2J\nb", [1.0])
    assert tool_watch.main([str(tmp_path / "a\x1b[2J\nb")]) == 0
    assert "a\ufffd[2J\ufffdb" in capsys.readouterr().out


# what a run draws of itself


def begin(tmp_path, **options) -> tuple[Report, Clock]:
    clock = Clock()
    args = TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True, **options)
    report = Report(args, True, clock)
    report.draw = draw
    report.summary({"data": {"training": "3 samples"}})
    report.on_train_begin(None, TrainerState(max_steps=9), TrainerControl())
    return report, clock


def test_a_run_draws_itself_again_after_thirty_seconds_and_at_its_end(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(tool_page, "plot_loss", lambda run, path: drawn.append(len(run.records)))
    report, clock = begin(tmp_path, plot_loss=True)
    for step, now in enumerate((0, 29, 30, 31, 59, 61), start=1):
        clock.now = float(now)
        report.log({"step": step, "loss": 1 / step})
    assert drawn == [3, 6]
    run = RunFolder(tmp_path)
    assert run.state() == "running" and run.summary["max_steps"] == 9
    text = (tmp_path / "report.html").read_text()
    assert "loss <b>0.1667</b>" in text and "http-equiv='refresh'" in text
    report.log({"step": 7, "loss": 0.5})
    report.on_train_end(None, TrainerState(), TrainerControl())
    assert drawn == [3, 6, 7] and run.read().state() == "finished"
    text = (tmp_path / "report.html").read_text()
    assert "loss <b>0.5000</b>" in text and "3 samples" in text and ">finished<" in text
    assert "refresh" not in text


def test_pictures_take_a_fiftieth_of_the_time_at_most(tmp_path, monkeypatch):
    drawn = []

    def slow(args):
        drawn.append(clock.now)
        clock.now += 2.0

    report, clock = begin(tmp_path)
    report.draw = slow
    for now in range(0, 400, 10):
        clock.now = float(now)
        report.log({"step": now, "loss": 1.0})
    assert drawn == [30.0, 140.0, 250.0, 360.0]  # 100 seconds after the end of the one before


def test_a_picture_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch, capsys):
    def fail(args):
        raise OSError(28, "No space left on device")

    report, clock = begin(tmp_path)
    report.draw = fail
    for now in (40.0, 80.0):
        clock.now = now
        report.log({"step": int(now), "loss": 1.0})
    report.on_train_end(None, TrainerState(), TrainerControl())
    out = capsys.readouterr().out
    assert out.count("note: report and plot are no longer drawn: disk full") == 1
    assert RunFolder(tmp_path).state() == "finished"


def train_with_and_without(model: str, out: str) -> None:
    from tests.shared.training import train

    log.DRAW_EVERY_S = log.DRAW_SHARE = 0  # after every line
    for name in ("with", "without"):
        pictures = [log.Pictures(draw)]
        train(model, f"{out}/{name}", export=True, callbacks=pictures, html_report=name == "with")


def test_a_run_exports_the_same_bytes_with_its_report(tmp_path):
    model = tiny.save_model(tmp_path / "model", "llama")
    world.run(train_with_and_without, 1, str(model), str(tmp_path))
    ours, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()}
        for name in ("with", "without")
    )
    assert ours.keys() - other.keys() == {"report.html"} and b">finished<" in ours["report.html"]
    weights = [name for name in other if name.endswith((".safetensors", "config.json"))]
    assert len(weights) > 2 and all(ours[name] == other[name] for name in weights)
