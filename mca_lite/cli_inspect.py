"""What a run will train on, and, with --check, all that it does before its first step.

python -m mca_lite inspect config.yaml [key=value ...] [options]
    samples as the model reads them, trained tokens marked (in colour in a terminal, else in «»);
    records that are bad, truncated or without labels; duplicates, double BOS, turns without their
    end; lengths, and which samples lie in which row. Tokenised data is kept in cache_dir, where the
    run finds it. Large data: max_samples=10000. No weights here: train_from_scratch=true

python -m mca_lite inspect --check config.yaml [key=value ...] [--gpus N]
    configuration, weights' names and shapes, adapters, data, schedule and what would be resumed;
    the tensors that each rank would hold and the batches of its first step. Nothing is written.
    Not tried: memory (`plan` says it), devices, messages between ranks

Exit code: 0, or 2 where the run would not begin: `error:` says why.
"""

from pathlib import Path

from . import world
from .args import parse_args
from .cli import USER_ERROR, at_least, finish, has_colors, parser_of
from .errors import refuse
from .files import write_file

_MAX_CHARS = 1500
_WIDTH = 60
_TRAINED = "\x1b[32m"
_PLAIN = "\x1b[0m"


def main(words: list[str]) -> int:
    """Inspect as the words say -> exit code."""
    parser = parser_of("inspect", __doc__)
    here = world.current()
    parser.add_argument(
        "--samples", type=at_least(0), default=3, metavar="N", help="shown of each dataset (3)"
    )
    parser.add_argument("--html", metavar="FILE", help="the same, and more of it, as one page")
    parser.add_argument("--check", action="store_true", help="the dry run")
    parser.add_argument(
        "--gpus", type=at_least(1), default=here.size, metavar="N", help="ranks of the dry run (1)"
    )
    options, words = parser.parse_known_args(words)
    if options.check and options.html:
        parser.error("--check has no page: leave out --html")
    if not here.is_main:
        return 0  # each rank would say the same of all
    return finish(_check if options.check else _inspect, words, options)


def _check(words: list[str], options) -> None:
    with world.planned_world(options.gpus):
        arguments = _arguments(words)
        from .inspection import check  # torch: seconds, and a typing error is told by now

        check(arguments)


def _inspect(words: list[str], options) -> int:
    plan, refused = _read(words)
    from .inspection import DataInspector, page

    inspector = DataInspector(plan, options.samples)
    records = inspector.records()
    parts = list(inspector.parts())
    report = [line for line in plan.data.report if not line.startswith("  first ")]
    stops = [f"a run would stop: {refused}"] if refused is not None else []
    print("\n".join(report))
    print("\nrecords: " + ", ".join(f"{count:,} {name}" for name, count in records.items()))
    for part in parts:
        print("\n".join(_part_lines(part, has_colors())))
    if options.html:
        title = next((word for word in words if word.endswith((".yaml", ".yml", ".json"))), "run")
        Path(options.html).parent.mkdir(parents=True, exist_ok=True)
        write_file(options.html, page(title, plan, stops + report, records, parts))
        print(f"\nthe page is in {options.html}")
    for line in stops:
        print(f"\n{line}")
    return USER_ERROR if stops else 0


def _read(words: list[str]):
    """(run.Plan, why a run would stop at a record or None). Its other records are read then."""
    arguments = _arguments(words)
    if arguments.data.streaming:
        reason = "every sample is looked at"
        remedy = "streaming=false max_samples=1000"
        refuse("streaming", True, reason, remedy)
    from .run import make_plan

    try:
        return make_plan(arguments), None
    except ValueError as error:
        if arguments.data.on_bad_record == "skip":
            raise
        try:
            plan = make_plan(parse_args([*words, "on_bad_record=skip"], needs_world=False))
        except ValueError:
            raise error from None
        return plan, error


def _arguments(words: list[str]):
    """The RunArguments of the words, after their notes."""
    arguments = parse_args(words, needs_world=False)
    for line in arguments.warnings:
        print(f"note: {line}")
    return arguments


# -- in the terminal


def _part_lines(part, is_coloured: bool) -> list[str]:
    lines = ["", f"{part.name}: {part.summary}"]
    for name, numbers in part.found.items():
        first = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
        lines.append(f"  {name:16}{len(numbers):>7,}  {first}".rstrip())
    if part.bars:
        lines.append("  tokens of a document")
        most = max(count for _, count in part.bars)
    for lengths, count in part.bars:
        lines.append(f"  {lengths:>13}{count:>10,} {'█' * round(40 * count / most)}".rstrip())
    lines.append(f"  {part.packing}")
    lines += [f"  row {row.number:<7}{_row_line(row)}" for row in part.rows]
    for sample in part.samples:
        lines += ["", *_sample_lines(sample, is_coloured)]
    return lines


def _row_line(row) -> str:
    """A picture of a row, then its documents' names."""
    picture = ""
    at = 0
    for i, (_, size) in enumerate(row.documents):
        at += size
        picture += "▓▒"[i % 2] * (round(_WIDTH * at / row.capacity) - len(picture))
    names = ", ".join(name for name, _ in row.documents[:8])
    more = ", ..." if len(row.documents) > 8 else ""
    return f"{picture:·<{_WIDTH}} {at:,} of {row.capacity:,}: {names}{more}"


def _sample_lines(sample, is_coloured: bool) -> list[str]:
    from .inspection import visible

    lines = []
    before, behind = (_TRAINED, _PLAIN) if is_coloured else ("«", "»")
    for i, side in enumerate(sample.sides):
        found = f" - {', '.join(sample.found)}" if sample.found and not i else ""
        text = ""
        for run, is_trained in side.runs:
            run = visible(run, _MAX_CHARS)
            if not is_coloured:
                run = run.replace("«", "\\«").replace("»", "\\»")
            text += f"{before}{run}{behind}" if is_trained else run
        lines += [f"  {side.name}{found}", *(f"    {line}" for line in text.split("\n"))]
    return lines
