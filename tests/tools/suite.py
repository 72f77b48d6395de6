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
    moe=64, model_families=62, packed_layouts=50, lora=46, lora_files=40, ckpt_safety=36, ckpt=36,
    moe_lora=35, model_mtp=32, dpo=31, dpo_reference=29, nonfinite=28, cli=26, parity=25, keys=23,
    weights=23, trainer=22, moe_ckpt=21, moe_weights=18, weights_vocabulary=17, dpo_moe=16,
    parity_command=20, imports=14, ckpt_layouts=12, cli_convert=12, lora_errors=12, offload=11,
    chaos=8, data_stream_runs=20, data_stream=15, ckpt_settings=12,
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
