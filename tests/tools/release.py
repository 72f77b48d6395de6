"""The steps of a release, in order; the first that fails ends it.

    make release REPOSITORY=https://github.com/owner/name
    python -m tests.tools.release build install train     some steps

The checks are targets of make and take hours. `build` packs a clean export of the last commit, in
which the README's links are absolute. Later steps use nothing of this folder but dist/, the
versions of requirements.lock and constraints.txt, and the example's data.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path

import mca_lite
from tests.tools import lock

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
CHECKS = ["lint", "test-all", "wrong-inputs", "mutations", "families", "foreign-keys"]
STEPS = [*CHECKS, "notes", "build", "install", "train"]
FRESH = ROOT / "build" / "fresh"  # the virtual environment of `install`
# of the sdist, beside the package: without it setuptools packs half of the tests
WHOLE = "graft tests\ngraft configs\ninclude *.md *.txt *.lock Makefile train.py\n"
PIP = [sys.executable, "-m", "pip"]
STEPS_TRAINED = 30


def run(*command, folder: Path = ROOT) -> str:
    """The output of a command. Exits with it if the command fails."""
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\n{' '.join(words)}: exit code {done.returncode}")
    return done.stdout


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """A page's text whose relative links lead to a tag's files: for readers outside of the tree."""

    def absolute(found: re.Match) -> str:
        mark, words, target = found.groups()
        if target.startswith(("#", "http:", "https:", "mailto:")):
            return found.group()
        kind = "raw" if mark else "tree" if target.endswith("/") else "blob"
        return f"{mark}[{words}]({repository}/{kind}/{tag}/{target})"

    return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", absolute, text)


def check_notes() -> None:
    """The changelog has a dated heading for this version, and nothing waits for the next one."""
    version, log = mca_lite.__version__, (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d$", log, re.MULTILINE):
        sys.exit(f"CHANGELOG.md: expected a heading `## [{version}] - YYYY-MM-DD`")
    if waiting := re.search(r"^## \[?Unreleased\]?\n(.*?)^## ", log, re.MULTILINE | re.DOTALL):
        if "\n* " in "\n" + waiting.group(1):
            sys.exit(f"CHANGELOG.md: move what is unreleased below {version}, or raise __version__")


def build() -> None:
    """dist/: the sdist, the wheel that is built from it, and the bill of materials."""
    repository = os.environ.get("REPOSITORY", "").rstrip("/")
    if not repository.startswith("https://"):
        sys.exit("the package's page needs links: set REPOSITORY=https://host/owner/name")
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"commit first, or run the checks again: git status says\n{changed}")
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        packed = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder / "tree", filter="data")
        page = folder / "tree" / "README.md"
        tag = f"v{mca_lite.__version__}"
        page.write_text(with_absolute_links(page.read_text(), repository, tag))
        (folder / "tree" / "MANIFEST.in").write_text(WHOLE)
        make = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
        run(sys.executable, "-c", make, DIST, folder=folder / "tree")
        [sdist] = DIST.glob("*.tar.gz")
        run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", DIST, sdist, folder=folder)
    bill = json.dumps(lock.bill_of_materials(), indent=1)
    (DIST / f"mca_lite-{mca_lite.__version__}.cdx.json").write_text(bill)
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")


def install() -> None:
    """The wheel in a fresh environment, by its own metadata; pip finds nothing missing."""
    shutil.rmtree(FRESH, ignore_errors=True)
    venv.create(FRESH, with_pip=True)
    [wheel] = DIST.glob("*.whl")
    pip = [FRESH / "bin/python", "-m", "pip"]
    run(*pip, "install", "-q", "-c", ROOT / "constraints.txt", wheel, folder=FRESH)
    run(*pip, "check", folder=FRESH)


def train() -> None:
    """The example on two ranks, by the installed wheel, in a folder without the package."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(ROOT / "configs" / "tiny", folder / "configs" / "tiny")
        shutil.copy(ROOT / "configs" / "sft.yaml", folder)
        where = run(FRESH / "bin/python", "-c", "import mca_lite as m; print(m.__file__)",
                    folder=folder)  # fmt: skip
        if not where.startswith(str(FRESH)):
            sys.exit(f"expected the package of {FRESH}, got {where}")
        run(FRESH / "bin/torchrun", "--standalone", "--local_addr", "127.0.0.1",
            "--nproc_per_node", 2, "-m", "mca_lite", "train", "sft.yaml", "logging_steps=1",
            f"max_steps={STEPS_TRAINED}", "eval_strategy=no", folder=folder)  # fmt: skip
        out = folder / "output" / "sft"
        lines = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        print(f"losses of {len(losses)} steps: {losses[0]:.3f} to {losses[-1]:.3f}")
        if len(losses) != STEPS_TRAINED or losses[-1] > 0.8 * losses[0]:
            sys.exit("expected 30 losses, and the last one below 80 % of the first")
        if not [*out.glob("model*.safetensors")]:
            sys.exit("the trained model was not exported")


def main(words: list[str]) -> int:
    if unknown := set(words) - set(STEPS):
        sys.exit(f"{', '.join(sorted(unknown))}: no step; the steps are {', '.join(STEPS)}")
    own = {"notes": check_notes, "build": build, "install": install, "train": train}
    for step in STEPS:
        if not words or step in words:
            started = time.monotonic()
            if step in own:
                own[step]()
            elif code := subprocess.call(["make", step], cwd=ROOT):
                sys.exit(code)
            print(f"{step}: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
