"""The embedding of config.json's pad token: transformers gives it no gradient (padding_idx), in a
text neither. The oracle is transformers' own model, with adapters PEFT's.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.shared import tiny, world
from tests.shared.layouts import DIST_OPT, PACKED, PP2, SP, TP2
from tests.shared.lora_tools import train_from_adapter, train_with_peft, whole_logits_trainer
from tests.shared.training import BRIEF, TOLERANCE, assert_same_curve, train

# {case: (family, keys of its config.json)}
CASES = {
    "untied": ("qwen3", dict(tie_word_embeddings=False)),
    "tied": ("qwen3", dict(tie_word_embeddings=True)),
    "scaled": ("gemma2", {}),  # its class of the embedding is another
    "negative": ("llama", {}),  # counted from the end
}
LAYOUTS = {
    "torch": (1, dict(backend="torch")),
    "one": (1, {}),
    "tp2": (2, TP2),
    "tp2_sp": (2, {**TP2, **SP}),
    "tp2_sp_packed": (2, {**TP2, **SP, **PACKED}),
    "pp2": (2, PP2),
    "dp2": (2, DIST_OPT),
}
ADAPTED = dict(targets=["embed_tokens", "down_proj"])
PAD = 2 + int(tiny.samples(1)[0]["input_ids"][0])  # never a row of the other rank's beginning


def padded(path: str, pad: int | None) -> str:
    """A model's folder, with that pad_token_id in its config.json."""
    file = Path(path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token_id": pad}))
    return path


def data() -> list[dict]:
    """Samples with the pad token in half of them, in the first place too."""
    found = tiny.samples(BRIEF["count"])
    for sample in found[::2]:
        sample["input_ids"][[0, 2]] = PAD
    return found


def curves_of_transformers(paths: dict, out: str) -> dict:
    kind = dict(backend="torch", trainer_class=whole_logits_trainer(), data=data(), export=True)
    return {case: train(path, f"{out}/{case}", **kind, **BRIEF) for case, path in paths.items()}


def curves_here(paths: dict, out: str, keys: dict) -> dict:
    kind = dict(data=data(), export=True, **BRIEF, **keys)
    return {case: train(path, f"{out}/{case}", **kind) for case, path in paths.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    for case, (family, keys) in CASES.items():
        pad = PAD - tiny.VOCAB if case == "negative" else PAD
        paths[case] = padded(tiny.save_model(folder / case, family, **keys), pad)
    paths["without"] = tiny.save_model(folder / "without", "qwen3", **CASES["untied"][1])
    return paths


@pytest.fixture(scope="module")
def wanted(models, tmp_path_factory):
    """{case: transformers' curve}, and the folder of its trained models."""
    out = tmp_path_factory.mktemp("wanted")
    return world.run(curves_of_transformers, 1, models, str(out))[0], out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pad_token_learns_as_in_transformers(layout, models, wanted, tmp_path):
    curves, folder = wanted
    ranks, keys = LAYOUTS[layout]
    got = world.run(curves_here, ranks, models, str(tmp_path), keys)[0]
    for case in models:
        assert_same_curve(got[case], curves[case])
        ours, theirs = (embedding_of(place / case) for place in (tmp_path, folder))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def embedding_of(folder: Path) -> torch.Tensor:
    """The embedding in the files of a model."""
    name = "model.embed_tokens.weight"
    files = map(load_file, sorted(folder.glob("*.safetensors")))
    [found] = [tensors[name] for tensors in files if name in tensors]
    return found


def test_the_pad_token_makes_a_difference(models, wanted):
    """Without it the same model has another gradient norm in the first step, and the row moves by
    more than its decay."""
    curves, folder = wanted
    (loss, norm), (same, other) = curves["untied"][0], curves["without"][0]
    assert loss == pytest.approx(same, abs=1e-6) and abs(norm - other) > 0.01 * other
    start = embedding_of(Path(models["untied"]))[PAD]
    for case, is_kept in (("untied", True), ("without", False)):
        end = embedding_of(folder / case)[PAD]
        ratio = end / start  # weight decay alone multiplies a row
        assert ((ratio - ratio[0]).abs().max() < 1e-3) == is_kept


def adapted(run, *args, **keys) -> list:
    """A run on these samples, in their usual order."""
    given = data()
    tiny.samples = lambda *args, **kwargs: given  # of this process, which is the test's
    return run(*args, **keys)


@pytest.mark.parametrize("layout", ["torch", "one", "tp2_sp", "pp2"])
def test_the_pad_token_of_an_adapted_embedding_learns_as_in_peft(layout, tmp_path):
    """PEFT's table A has the padding_idx of the embedding; its row is not zero here."""
    path = padded(tiny.save_model(tmp_path / "model", "llama"), PAD)
    [want] = world.run(adapted, 1, train_with_peft, path, str(tmp_path / "peft"), **ADAPTED)
    ranks, keys = LAYOUTS[layout]
    out = str(tmp_path / "run")
    adapter = str(tmp_path / "peft/start")
    given = {**BRIEF, **keys}
    got, *_ = world.run(adapted, ranks, train_from_adapter, path, out, adapter, **given)
    assert_same_curve(got, want)
    name = "adapter_model.safetensors"
    ours, theirs = (load_file(tmp_path / place / name) for place in ("run", "peft/end"))
    for key, value in ours.items():  # beside them PEFT writes the embedding, which is frozen
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=TOLERANCE)


def test_every_family_gives_its_pad_token_no_gradient():
    """transformers' class of each family passes padding_idx: the row here needs no exception."""
    from mca_lite.families import FAMILIES
    from mca_lite.weights_files import model_class
    from tests.shared import pictures, tiny_moe

    makers = {**dict.fromkeys(tiny.MORE_KEYS, tiny), **dict.fromkeys(tiny.FAMILY_KEYS, tiny)}
    makers |= dict.fromkeys(tiny_moe.MODELS, tiny_moe) | dict.fromkeys(pictures.FAMILIES, pictures)
    for family, maker in makers.items():
        if family in FAMILIES and tiny.is_known(family):
            hf = maker.hf_config(family)
            hf.get_text_config().pad_token_id = 3
            with torch.device("meta"):
                model = model_class(hf).from_config(hf)
            assert model.get_input_embeddings().padding_idx == 3, family
