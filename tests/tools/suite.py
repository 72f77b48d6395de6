"""`make test`: the suite as two processes, each with half of the files, since most worlds of ranks
leave a core idle.

python -m tests.tools.suite [words for pytest]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROCESSES = 2
# CPU seconds of the slow files, roughly: only the balance hangs on them; a file that is not named
# counts SHORT
SECONDS = dict(
    moe=74, lora=74, model_families=70, lora_files=68, moe_lora=57, ckpt_safety=57,
    packed_layouts=55, dpo=55, ckpt=53, dpo_reference=43, moe_weights=39, model_mtp=37,
    trainer=35, chaos=34, cli=28, weights_vocabulary=26, weights=24, parity=23, keys=23,
    moe_ckpt=15, lora_errors=13, imports=13, parity_command=20, data_stream_runs=20,
    data_stream=15, ckpt_settings=12,
)  # fmt: skip
SHORT = 5


def seconds_of(path: Path) -> int:
    return SECONDS.get(path.stem.removeprefix("test_"), SHORT)


def parts(files: list[Path], count: int = PROCESSES) -> list[list[Path]]:
    """The files dealt to `count` parts, the slowest first, each to the part that has least."""
    dealt: list[list[Path]] = [[] for _ in range(count)]
    for path in sorted(files, key=lambda path: (-seconds_of(path), path.name)):
        min(dealt, key=lambda part: sum(map(seconds_of, part))).append(path)
    return dealt


def main(words: list[str]) -> int:
    """Run all parts at once; the first shows its progress, the others follow as a whole -> 0, or
    the first exit code.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    running = []
    for number, files in enumerate(parts(sorted(TESTS.glob("test_*.py")))):
        command = [sys.executable, "-m", "pytest", "-q", *map(str, files), *words]
        out = tempfile.TemporaryFile("w+") if number else None
        running.append((subprocess.Popen(command, env=environment, stdout=out, stderr=out), out))
    codes = []
    for process, out in running:
        codes.append(process.wait())
        if out is not None:
            out.seek(0)
            print(out.read(), flush=True)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
