"""What bench_gpu.py compares with: rivals that train the same."""

import pytest
import torch

from tests.tools import bench_gpu, bench_varlen


def test_flattened_documents_have_the_logits_that_each_has_alone(monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(bench_gpu, "TINY", True)
    config = bench_gpu.hf_config("1.5B")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=bench_varlen.register())
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    data, tokens, _ = bench_gpu.dataset(config, 64, 3, packed=True)
    rows, alone = [], []
    for row in data:
        documents = row["input_ids"].split(torch.bincount(row["attention_mask"])[1:].tolist())
        positions = torch.cat([torch.arange(len(document)) for document in documents])
        rows.append(dict(input_ids=row["input_ids"], position_ids=positions))
        alone += [plain(document[None]).logits[0] for document in documents]
    together = model(**bench_varlen.flatten(rows)).logits[0]
    assert len(alone) > 3 and len(together) == tokens
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    # another micro-batch has its own documents
    assert torch.allclose(model(**bench_varlen.flatten(rows[1:])).logits[0], together[64:])


@pytest.mark.parametrize("case", bench_gpu.CASES)
def test_every_case_has_rivals_that_are_known(case):
    trainers = bench_gpu.trainers_of(case)
    assert set(trainers) <= set(bench_gpu.TRAINERS) and trainers[0] == "ours"
    other_layers = "experts", "hybrid", "packed hybrid", "sinks"
    is_full = not {"lora", "pairs", "keys", "new_packs"} & bench_gpu.CASES[case].keys()
    is_full = is_full and case not in other_layers
    assert any("float32" in name for name in trainers) == is_full
