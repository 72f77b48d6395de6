"""Session.weights() of every family in a world of each layout: its forms without a transfer, and
the tensors of the files that transformers wrote.
"""

import pytest
import torch

from tests.shared import pictures, tiny, tiny_moe, world
from tests.shared.files import tensors as tensors_of_files
from tests.shared.layouts import EP2, PP2, TP2_SP

PLAIN = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES = {
    **{name: (tiny.save_model, name) for name in (*PLAIN, *tiny.MORE_KEYS)},
    **{f"{name}, experts": (tiny_moe.save_model, name) for name in tiny_moe.MODELS},
    **{f"{name}, pictures": (pictures.save_model, name) for name in pictures.FAMILIES},
}
LAYOUTS = {"tp2": TP2_SP, "pp2": PP2, "ep2": EP2}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {key: save(folder / key, name) for key, (save, name) in FAMILIES.items()}


def wrong_of(path: str, keys: dict) -> str:
    """What is wrong with the weights of a model, in words, on this rank."""
    from mca_lite import AutoModel, Session, parallel
    from tests.shared.training import arguments

    args = arguments(**keys)
    source = Session(AutoModel.from_pretrained(path, args), args).weights()
    metadata = source.metadata()
    for _ in range(2):
        found = dict(source)
        forms = [(name, x.dtype, tuple(x.shape)) for name, x in found.items()]
        if parallel.is_main() and forms != metadata:
            return f"metadata {metadata[:3]} ..., tensors {forms[:3]} ..."
        if not parallel.is_main() and found:
            return "tensors beside the main rank"
    if not parallel.is_main():
        return ""
    wanted = tensors_of_files(path)
    if found.keys() != wanted.keys():
        return f"other names than the files: {sorted(found.keys() ^ wanted.keys())}"
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return f"other values than the files: {different}" if different else ""


def all_wrong(paths: dict, keys: dict) -> dict:
    """{family: what is wrong, or the error}"""
    found = {}
    for name, path in paths.items():
        try:
            found[name] = wrong_of(path, keys)
        except Exception as error:
            found[name] = repr(error)
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.full] if n == "pp2" else []) for n in LAYOUTS]
)
def test_weights_of_every_family_are_those_of_its_files(paths, layout):
    if layout == "ep2":
        paths = {name: path for name, path in paths.items() if "experts" in name}
    answers = world.run(all_wrong, 2, paths, LAYOUTS[layout], timeout_s=300)
    wrong = {name: [answer[name] for answer in answers] for name in paths}
    assert not {name: words for name, words in wrong.items() if any(words)}
