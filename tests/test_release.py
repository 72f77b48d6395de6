"""What a release is made from: the lock, the bill of materials, links, the changelog."""

import configparser
import re

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mca_lite
from tests.shared.commands import ROOT
from tests.tools import lock, release

PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def applies(marker: str, python: str) -> bool:
    return not marker or Marker(marker).evaluate(
        {"python_version": python, "python_full_version": f"{python}.4", "sys_platform": "linux"}
    )


def locked(python: str) -> dict[str, str]:
    """{package: version} that the lock installs on Linux."""
    found = lock.entries(lock.LOCK.read_text())
    return {name: version for name, version, marker, _ in found if applies(marker, python)}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_what_the_package_needs_in_the_pinned_versions(python):
    versions = locked(python)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    wanted = setup["options"]["install_requires"] + "\n".join(extras[e] for e in lock.EXTRAS)
    for requirement in map(Requirement, wanted.split()):
        name = canonicalize_name(requirement.name)
        assert name == "torch" or versions[name] in requirement.specifier, name
    pins = re.findall(r"^([\w-]+)==(\S+?)(?:; (.+))?$", constraints(), re.MULTILINE)
    pinned = {canonicalize_name(n): version for n, version, m in pins if applies(m, python)}
    assert {name: pinned[name] for name in pinned.keys() & versions.keys()} == {
        name: versions[name] for name in pinned.keys() & versions.keys()
    }


def constraints() -> str:
    return (ROOT / "constraints.txt").read_text()


def test_each_locked_file_has_a_hash_and_the_build_uses_the_locked_setuptools():
    found = lock.entries(lock.LOCK.read_text())
    assert len(found) == len(re.findall(r"^[\w.-]+==", lock.LOCK.read_text(), re.MULTILINE))
    assert not [name for name, _, _, hashes in found if not hashes]
    assert not [h for *_, hashes in found for h in hashes if not re.fullmatch("[0-9a-f]{64}", h)]
    build = (ROOT / "pyproject.toml").read_text()
    assert f'requires = ["setuptools=={locked("3.13")["setuptools"]}"]' in build


def test_the_bill_of_materials_names_each_package_once_and_what_training_needs():
    bill = lock.bill_of_materials()
    names = [one["purl"] for one in bill["components"]]
    assert len(names) == len(set(names)) == len(lock.entries(lock.LOCK.read_text())) + 1
    scopes = {one["name"]: one["scope"] for one in bill["components"]}
    for name in ("torch", "megatron-core", "transformers", "safetensors", "tokenizers"):
        assert scopes[name] == "required"
    assert scopes["pytest"] == scopes["peft"] == "optional"
    assert bill["metadata"]["component"]["version"] == mca_lite.__version__


def test_links_of_the_packages_page_lead_to_the_tags_files():
    page = "[a](b/c.md#d) ![p](e.svg) [f](configs/) [g](https://h.i) [j](#k)"
    assert release.with_absolute_links(page, "https://x/o/n", "v1") == (
        "[a](https://x/o/n/blob/v1/b/c.md#d) ![p](https://x/o/n/raw/v1/e.svg)"
        " [f](https://x/o/n/tree/v1/configs/) [g](https://h.i) [j](#k)"
    )
    text = release.with_absolute_links((ROOT / "README.md").read_text(), "https://x/o/n", "v1")
    assert not re.findall(r"\]\((?!https:|#)[^)]*\)", text)


def test_a_word_that_is_no_step_of_a_release_is_refused():
    with pytest.raises(SystemExit, match="biuld: no step; the steps are lint, test-all, "):
        release.main(["biuld"])


def test_the_changelog_has_a_dated_heading_for_this_version():
    log = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {mca_lite.__version__} - \d{{4}}-\d\d-\d\d$", log, re.MULTILINE)
