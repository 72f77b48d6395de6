"""The rows of bench_gpu that are kept in tests/bench/speed.json, and README's table of them.

    python -m tests.tools.bench_rows compare results.jsonl [before.jsonl]
    python -m tests.tools.bench_rows keep results.jsonl ...
    python -m tests.tools.bench_rows readme

compare: names each row that fell by more than 5 % beside its rival, or failed, and exits with 1 if
one did; before: the kept rows by default. GPUs of one kind differ by a few percent, so a row counts
by its rival's measurements: what the rival gained or lost in the same two calls is the machine's
share. A case without a rival in both calls is judged by the median rival of all cases. Two GPUs'
rows are shares of one GPU's tokens/s in the same call, of bench_gpus with one rank and with two.
keep: puts lines into speed.json, each in place of its trainer's line of that case. readme: writes
README's table. Lines are those that bench_gpu, bench_gpus, bench_images and bench_policy append to
$OUT/results.jsonl.
"""

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests/bench/speed.json"
FALL = 0.05
KEYS = "case trainer tokens_per_second spread mfu peak_gib gpu versions".split()
HEAD = "| case | mca_lite | Trainer + Liger |\n| --- | --- | --- |\n"
# README's words for a case, the case, its rival, what README says before the rival's figure
TABLE = [
    ("0.5B, full training", "0.5B", "liger", ""),
    ("1.5B, full training, 32 rows a step", "1.5B", "liger", ""),
    ("4B, full training", "4B", "liger", ""),
    ("1.5B, packed documents of 400 tokens", "packed 1.5B", "liger-varlen", ""),
    ("1.5B, rows of 65,536, full recomputation", "1.5B 65k", "liger", ""),
    ("8B, LoRA of rank 16 on all linears", "LoRA 8B", "liger", ""),
    ("8B, QLoRA, the base in nf4", "QLoRA 8B", "liger", "with bitsandbytes: "),
    (
        "1.5B, a GRPO update on given answers",
        "policy 1.5B",
        "trl-liger",
        "TRL's GRPOTrainer + Liger: ",
    ),
    ("1.5B, DPO, packed", "packed DPO 1.5B", "liger", "a plain loop: "),
    ("1.5B, KTO in rows, on one H100", "KTO 1.5B", "trl-liger", "TRL's KTOTrainer + Liger: "),
    ("4B distilled into 0.5B", "distill 4B into 0.5B", "liger", "a loop with Liger's fused JSD: "),
    ("six layers of Qwen3-30B-A3B, 128 experts", "experts", "liger", ""),
    (
        "Qwen2.5-VL-3B, a picture of 1,024 x 768 a row, tower trained",
        "pictures trained",
        "liger",
        "",
    ),
]
SHARES = "two H200, share of one GPU's tokens/s: "
LAYOUTS = {"dp2": "dp2 overlap", "cp2": "cp2", "tp2": "tp2"}  # README's word: bench_gpus' case
ONE_GPU = "dp2"  # bench_gpus' case that is one GPU's rate with one rank

Rows = dict[tuple[str, str], dict]


def rows_of(lines: list[dict]) -> Rows:
    """{(case, trainer): line} of lines that did not fail, and of shares(); of two the later."""
    found = {}
    for line in lines + shares(lines):
        rate = line.get("tokens_per_second", line.get("update_per_second"))
        if "trainer" in line and (rate or "share" in line):
            found[line["case"], line["trainer"]] = {**line, "tokens_per_second": rate}
    return found


def shares(lines: list[dict]) -> list[dict]:
    """A line per layout of LAYOUTS, with its share of one GPU's rate, if bench_gpus ran both."""
    rates = {
        (line["case"], line["gpus"]): line
        for line in lines
        if line.get("tokens_per_second_per_gpu")
    }
    one = rates.get((ONE_GPU, 1))
    found = []
    for layout, case in LAYOUTS.items():
        line = rates.get((case, 2))
        if one is not None and line is not None:
            share = line["tokens_per_second_per_gpu"] / one["tokens_per_second_per_gpu"]
            found.append({**line, "case": layout, "trainer": "ours", "share": round(share, 3)})
    return found


def failed(lines: list[dict]) -> list[str]:
    """Cases of this project's whose last line failed."""
    of_ours = [line for line in lines if line.get("trainer", "ours").startswith("ours")]
    last = {line["case"]: "failed" in line for line in of_ours if "case" in line}
    return [case for case, has_failed in last.items() if has_failed]


def read_lines(path: str | Path) -> list[dict]:
    """The lines of a file of JSON lines, or of one list."""
    text = Path(path).read_text()
    if text.startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines()]


def read(path: str | Path) -> Rows:
    """rows_of() a file's lines."""
    return rows_of(read_lines(path))


def kept_lines(rows: Rows) -> str:
    """The text of speed.json: a row per line."""
    names = [*KEYS, "share"]
    lines = [{key: row[key] for key in names if row.get(key) is not None} for row in rows.values()]
    return "[\n" + ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n]\n"


def gains(before: Rows, after: Rows) -> dict[tuple[str, str], float]:
    """Tokens/s after over before, or the share, of the rows that have one in both."""
    rates = {
        key: [row.get("share") or row["tokens_per_second"] for row in (before[key], after[key])]
        for key in before.keys() & after.keys()
    }
    return {key: new / old for key, (old, new) in rates.items() if old and new}


def compare(before: Rows, after: Rows) -> tuple[list[str], list[str]]:
    """(a line of words per case, the cases that fell). ValueError for other GPUs than before, or if
    no rival was measured both times."""
    gained = gains(before, after)
    for key in gained:
        kinds = [rows[key].get("gpu") for rows in (before, after)]
        if None not in kinds and kinds[0] != kinds[1]:
            raise ValueError(
                f"{key[0]} ran on {kinds[1]}, before on {kinds[0]}: expected one kind of GPU"
            )
    rivals: dict[str, list[float]] = {}
    for (case, trainer), gain in gained.items():
        if not trainer.startswith("ours"):
            rivals.setdefault(case, []).append(gain)
    if not rivals and any("share" not in after[key] for key in gained):
        raise ValueError(
            "no rival is in both calls: expected a line such as liger's for at least one case; run "
            "bench_gpu without naming trainers"
        )
    of_all = statistics.median([gain for of_case in rivals.values() for gain in of_case] or [1.0])
    words, fallen = [], []
    for (case, trainer), gain in sorted(gained.items()):
        if not trainer.startswith("ours"):
            continue
        old, new = before[case, trainer], after[case, trainer]
        text = f"{case}, {trainer}: {said(old)} -> {said(new)}, "
        rival = 1.0 if "share" in new else statistics.median(rivals.get(case, [of_all]))
        text += f"{gain / rival - 1:+.1%} beside "
        if "share" in new:
            text += "one GPU of its call"
        else:
            text += f"{'its rival' if case in rivals else 'the median rival'} ({rival - 1:+.1%})"
        if gain / rival < 1 - FALL:
            fallen.append(case)
            text = "FELL: " + text
        words.append(text)
    return words, fallen


def said(row: dict) -> str:
    """A rate with the spread of its steps, or a share."""
    if "share" in row:
        return f"{row['share']:.0%}"
    low, high = row.get("spread") or (None, None)
    spread = "" if low is None else f" ({low:,} to {high:,})"
    return f"{row['tokens_per_second']:,}{spread}"


def cell(row: dict) -> str:
    """A rate as README has it, to 100 tokens/s from 10,000 on and to 50 below, and its share."""
    rate = row["tokens_per_second"]
    text = f"{round(rate, -2):,}" if rate >= 10_000 else f"{50 * round(rate / 50):,}"
    return text + (f" ({row['mfu']:.0%})".replace("%", " %") if row.get("mfu") else "")


def table(rows: Rows) -> str:
    """README's table."""
    lines = []
    for words, case, rival, before in TABLE:
        ours, theirs = cell(rows[case, "ours"]), cell(rows[case, rival])
        lines.append(f"| {words} | {ours} | {before}{theirs} |")
    shares = [f"{100 * rows[name, 'ours']['share']:.0f} %" for name in LAYOUTS]
    lines.append(f"| {SHARES}{'; '.join(LAYOUTS)} | {'; '.join(shares)} | - |")
    return HEAD + "\n".join(lines) + "\n"


def with_table(page: str, rows: Rows) -> str:
    """README's text with its table written anew."""
    lines = r"(?:\|.*\n)+"
    return re.sub(re.escape(HEAD) + lines, lambda _: table(rows), page)


def main(words: list[str]) -> int:
    command, *files = words or [""]
    if command == "compare" and len(files) in (1, 2):
        lines, fallen = compare(read(files[1] if files[1:] else KEPT), read(files[0]))
        gone = failed(read_lines(files[0]))
        print("\n".join([*lines, *(f"FAILED: {case}" for case in gone)]))
        return bool(fallen or gone)
    if command == "keep" and files:
        rows = read(KEPT)
        for file in files:
            rows |= read(file)
        KEPT.write_text(kept_lines(rows))
    elif command == "readme":
        page = ROOT / "README.md"
        page.write_text(with_table(page.read_text(), read(KEPT)))
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
