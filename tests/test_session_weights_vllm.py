"""The source of configs/EXPORTS.md with the classes of the installed vLLM: what its engine checks
as it sends. The Python files of its wheel are enough, with what they import.
"""

import importlib.util
import re

import pytest

from tests.shared import tiny_moe, world
from tests.shared.commands import ROOT
from tests.shared.layouts import EP2, PP2, TP2_SP

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed"),
]


def sent(path: str, keys: dict) -> tuple:
    """(names to send, those that vLLM's engine let pass in two rounds) of this rank."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    from mca_lite import AutoModel, Session, parallel
    from tests.shared.training import arguments

    page = (ROOT / "configs/EXPORTS.md").read_text()
    [code] = re.findall(r"```python\n([^`]*WeightSource[^`]*)```", page)
    names: dict = {}
    exec(code, names)
    args = arguments(**keys)
    source = names["Source"](Session(AutoModel.from_pretrained(path, args), args))
    assert source.implements_iter_full()
    metadata = source.metadata  # collective, as in send_weights on every rank
    check = NCCLTrainerWeightTransferEngine._checked_iter
    rounds = []
    for _ in range(2):
        pairs = check(source, metadata) if parallel.is_main() else source.iter_full()
        rounds.append([name for name, _ in pairs])
    return source.owned_names(parallel.rank()), rounds


@pytest.mark.parametrize("keys", [TP2_SP, PP2, EP2], ids=["tp2", "pp2", "ep2"])
def test_the_source_of_the_page_passes_the_checks_of_vllm(tmp_path, keys):
    path = tiny_moe.save_model(tmp_path / "model", "qwen3_moe")
    (main, main_rounds), (other, other_rounds) = world.run(sent, 2, path, keys, timeout_s=120)
    assert main and main_rounds == [main, main]
    assert other == [] and other_rounds == [[], []]
