"""additional_configs changes how a step is computed, never what: the list of what it may set, and
what decides the rest.
"""

import dataclasses
import os

import pytest
import torch

from mca_lite.args import TrainingArguments
from mca_lite.args_rules_training import ADDITIONAL_FIELDS
from mca_lite.errors import ConfigError
from mca_lite.model_config import AutoConfig, McaModelConfig
from mca_lite.part_transformer_engine import TE_SWITCHES
from tests.shared import te_standins, tiny, world
from tests.shared.commands import keys_of
from tests.shared.fixtures import saved_model
from tests.shared.training import train

ONE_RANK, TP2 = {}, dict(tensor_model_parallel_size=2, sequence_parallel=True)
ONE_STEP = dict(steps=1, count=4, warmup_steps=0)
PP2 = dict(pipeline_model_parallel_size=2)
# value, layout and other keys
ALLOWED = {
    "attention_backend": ("flash", ONE_RANK),
    "batch_p2p_sync": (False, PP2),
    "clone_scatter_output_in_embedding": (False, TP2),
    "deallocate_pipeline_outputs": (True, PP2),
    "disable_bf16_reduced_precision_matmul": (True, dict(bf16=True)),
}


two_layers = saved_model("qwen3", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    """Neither the user's, nor what megatron-core leaves behind."""
    for name in TE_SWITCHES:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def unused_run(**keys) -> TrainingArguments:
    return TrainingArguments(output_dir="unused", **keys)


def evaluation_loss(model, out: str, **keys) -> float:
    from mca_lite.trainer import McaTrainer

    args = TrainingArguments(output_dir=out, overwrite_output_dir=True, disable_tqdm=True, **keys)
    data = tiny.samples(9, seed=2)  # as train() has
    return McaTrainer(model=model, args=args, eval_dataset=data).evaluate()["eval_loss"]


def train_and_evaluate(path: str, out: str, **keys) -> tuple[list, float, list[dict]]:
    """(curve of two steps with an evaluation, the export's loss on plain torch, the fields of
    additional_configs as megatron's layers have them)."""
    from mca_lite.model import load_torch_model

    seen = []

    def look(model):
        for module in (module for chunk in model for module in chunk.modules()):
            config = getattr(module, "config", None)
            if isinstance(config, McaModelConfig):
                seen.append({name: getattr(config, name) for name in ADDITIONAL_FIELDS})
        return model

    brief = dict(steps=2, count=8, export=True, save_strategy="no", do_eval=True)
    evals = dict(eval_strategy="steps", eval_steps=2)
    curve = train(path, out, adapt=look, **brief, **evals, **keys)
    bf16 = dict(bf16=True) if keys.get("bf16") else {}
    return curve, evaluation_loss(load_torch_model(out), f"{out}/again", **bf16), seen


# ---- what is on the list


def test_the_list_is_tested_field_by_field():
    assert ALLOWED.keys() == ADDITIONAL_FIELDS.keys()


@pytest.mark.parametrize("field", ALLOWED)
def test_an_allowed_field_reaches_the_layers_and_changes_no_number(field, two_layers, tmp_path):
    value, keys = ALLOWED[field]
    ranks = 2 if keys in (PP2, TP2) else 1
    runs = {"plain": {}, "set": dict(additional_configs={field: value})}
    answers = {
        name: world.run(train_and_evaluate, ranks, two_layers, str(tmp_path / name), **keys, **more)
        for name, more in runs.items()
    }
    for plain, changed in zip(answers["plain"], answers["set"], strict=True):
        assert changed[:2] == plain[:2]
        found = {getattr(config[field], "name", config[field]) for config in changed[2]}
        assert found == {value} and len(changed[2]) > 5
        assert value not in {getattr(config[field], "name", config[field]) for config in plain[2]}
        (_, in_the_run), exported = changed[0][-1], changed[1]
        assert exported == pytest.approx(in_the_run, rel=1e-2 if keys.get("bf16") else 1e-5)


def test_values_are_read_by_their_types():
    from megatron.core.transformer.enums import AttnBackend

    given = {"attention_backend": AttnBackend.fused, "batch_p2p_sync": "no"}
    args = unused_run(additional_configs=given, **PP2)
    assert args.additional_configs == {"attention_backend": "fused", "batch_p2p_sync": False}
    assert given["batch_p2p_sync"] == "no"  # the caller's stays


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"attention_backend": "flesh"}, "expected one of auto, flash"),
        ({"batch_p2p_sync": 5}, "expected true or false"),
        ({"batch_p2p_sync": None}, "expected true or false"),
    ],
)
def test_a_value_of_another_type_is_refused(given, reason):
    [(key, problem)] = keys_of(unused_run, additional_configs=given, **PP2).items()
    assert key == f"additional_configs.{next(iter(given))}" and reason in problem.reason


# ---- what is not


@pytest.mark.parametrize("value", [True, 5, "abc", None, [1], {"a": 1}])
def test_every_other_field_of_megatrons_config_is_refused_with_any_value(value):
    from megatron.core.transformer import MLATransformerConfig

    names = {f.name for c in (McaModelConfig, MLATransformerConfig) for f in dataclasses.fields(c)}
    names -= ADDITIONAL_FIELDS.keys()
    problems = keys_of(unused_run, additional_configs=dict.fromkeys(names, value))
    assert problems.keys() == {f"additional_configs.{name}" for name in names}


def test_python_cannot_set_another_field_after_the_constructor(two_layers):
    args = unused_run()
    args.additional_configs["rotary_base"] = 2
    with pytest.raises(ConfigError, match="additional_configs.rotary_base"):
        AutoConfig.from_pretrained(two_layers, args)


def test_a_field_of_the_run_that_saved_a_checkpoint_is_not_the_next_runs(two_layers, tmp_path):
    first = unused_run(additional_configs={"deallocate_pipeline_outputs": True}, **PP2)
    AutoConfig.from_pretrained(two_layers, first).save_pretrained(tmp_path)
    saved = str(tmp_path)
    assert AutoConfig.from_pretrained(saved).deallocate_pipeline_outputs
    assert not AutoConfig.from_pretrained(saved, unused_run(**PP2)).deallocate_pipeline_outputs


# ---- attention in the environment: (flash, fused, unfused)


def switches() -> tuple:
    return tuple(os.environ.get(name) for name in TE_SWITCHES)


def put(values) -> None:
    """Set the variables of this process."""
    for name, value in zip(TE_SWITCHES, values, strict=True):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.mark.parametrize(
    "name, key", [("tp_comm_overlap", "tp_comm_overlap"), ("deterministic_mode", "deterministic")]
)
def test_a_field_that_is_a_key_is_sent_there(name, key):
    [problem] = keys_of(unused_run, additional_configs={name: True}).values()
    assert problem.suggestion == f"{key}: true, beside additional_configs"


def test_a_file_of_fields_is_read_as_by_mcore_adapter(tmp_path):
    path = tmp_path / "more.json"
    path.write_text('{"attention_backend": "fused"}')
    assert unused_run(additional_configs=str(path)).additional_configs == {
        "attention_backend": "fused"
    }
    [problem] = keys_of(unused_run, additional_configs="absent.json").values()
    assert "absent.json" in problem.reason and "No such file" in problem.reason


# the variables, attention_backend of additional_configs, what TE's layers find
WITH_TE = [
    (("0", None, None), None, ("0", None, None)),  # TE chooses among the other two
    (("1", None, "0"), None, ("1", None, "0")),
    (("0", "0", "1"), "flash", ("1", "0", "0")),
]


def build_with_te(path: str) -> list[tuple]:
    """The variables after a model on TE's layers was built in each of the environments."""
    from mca_lite.model import AutoModel

    answers = []
    with te_standins.installed():
        for values, backend, _ in WITH_TE:
            put(values)
            more = {"attention_backend": backend} if backend else {}
            args = unused_run(
                bf16=True, transformer_impl="transformer_engine", additional_configs=more
            )
            assert AutoModel.from_pretrained(path, args).config.transformer_impl != "local"
            answers.append(switches())
    return answers


def test_transformer_engine_finds_what_was_asked_for(two_layers):
    assert world.run(build_with_te, 1, two_layers)[0] == [left for *_, left in WITH_TE]


def test_attention_backend_local_means_local_layers(two_layers):
    more = dict(bf16=True, additional_configs={"attention_backend": "local"})
    with te_standins.installed():
        config = AutoConfig.from_pretrained(two_layers, unused_run(**more))
        assert config.transformer_impl == "local"
        args = unused_run(transformer_impl="transformer_engine", **more)
        with pytest.raises(ConfigError, match="attention_backend: local"):
            AutoConfig.from_pretrained(two_layers, args)


def test_the_flag_of_bf16_products_is_torchs():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    assert before
    try:
        given = {"disable_bf16_reduced_precision_matmul": True}
        McaModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True, **given)
        assert not matmul.allow_bf16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
