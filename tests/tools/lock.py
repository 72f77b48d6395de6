"""The lock with hashes, and the software bill of materials that follows from it.

python -m tests.tools.lock          write requirements.lock, by uv (`make lock`)
python -m tests.tools.lock --sbom   print the CycloneDX JSON of this version (`make sbom`)

requirements.lock has what `make install` installs, for each Python, with the hash of each file:
the versions of constraints.txt, and for a package that is not pinned there on a Python the newest
that fits. torch is not in it, nor the CUDA libraries that only torch needs: their files differ by
platform and index, and constraints.txt has torch's version.
"""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mca_lite

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
EXTRAS = ("test", "plot", "parquet")
OLDEST = "3.10"
# by torch alone
BY_PLATFORM = re.compile(r"(torch|triton|cuda-.*|nvidia-.*)==")
HEAD = "# What `make install` installs beside torch. Written by `make lock` from constraints.txt.\n"


def entries(text: str) -> list[tuple[str, str, str, list[str]]]:
    """(name, version, marker, hashes in hex) for each entry of a lock."""
    found = []
    for entry in re.split(r"\n(?=[a-z])", text):
        if named := re.match(r"([\w.-]+)==([^\s;]+)(?: ; (.+?))? \\\n", entry):
            name, version, marker = named.groups(default="")
            found.append((name, version, marker, re.findall(r"sha256:(\w+)", entry)))
    return found


def resolved() -> str:
    """A lock for every Python from OLDEST on, resolved by uv."""
    words = ["compile", "--quiet", "--universal", "--generate-hashes", "--no-header"]
    words += ["--no-annotate", "--python-version", OLDEST, "-c", "constraints.txt", "setup.cfg"]
    words += [word for extra in EXTRAS for word in ("--extra", extra)]
    command = [sys.executable, "-m", "uv", "pip", *words]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    kept = [e for e in re.split(r"\n(?=[a-z])", text.strip()) if not BY_PLATFORM.match(e)]
    return HEAD + "\n".join(kept) + "\n"


def needed_to_run(package: str = "mca-lite") -> set[str]:
    """The names that a package needs without extras, directly or not, by what is installed."""
    found, waiting = set(), [package]
    while waiting:
        for line in metadata.requires(waiting.pop()) or []:
            wanted = Requirement(line)
            name = canonicalize_name(wanted.name)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if applies and name not in found:
                found.add(name)
                waiting.append(name)
    return found


def component(name: str, version: str, marker: str, hashes: list[str], scope: str) -> dict:
    purl = f"pkg:pypi/{name}@{version}"
    found = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    found["scope"] = scope
    if hashes:
        sums = [{"alg": "SHA-256", "content": value} for value in hashes]
        # the hash of each file of the version: one of them is what a platform installs
        found["externalReferences"] = [{"type": "distribution", "url": purl, "hashes": sums}]
    if marker:
        found["properties"] = [{"name": "python:marker", "value": marker}]
    return found


def bill_of_materials() -> dict:
    """CycloneDX 1.6: each locked package, and torch. Scope "required": training needs it on this
    Python; "optional": the tests, an extra, or another Python.
    """
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    locked = [*entries(LOCK.read_text()), ("torch", pinned.group(1), "", [])]
    required = needed_to_run()
    scopes = {name: "required" if name in required else "optional" for name, *_ in locked}
    own = {"type": "library", "name": "mca-lite", "version": mca_lite.__version__}
    own |= {"licenses": [{"license": {"id": "Apache-2.0"}}], "bom-ref": "mca-lite"}
    own["purl"] = f"pkg:pypi/mca-lite@{mca_lite.__version__}"
    components = [component(*entry, scopes[entry[0]]) for entry in sorted(locked)]
    needs = [one["bom-ref"] for one in components if one["scope"] == "required"]
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": "mca-lite", "dependsOn": needs}],
    }  # fmt: skip


def main(words: list[str]) -> int:
    if words == ["--sbom"]:
        print(json.dumps(bill_of_materials(), indent=1))
    elif words:
        sys.exit(f"expected nothing, or --sbom; got {' '.join(words)}")
    else:
        LOCK.write_text(resolved())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
