"""The parser, the arguments' own rules, and the layouts it proposes."""

import copy
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from mca_lite.args import (
    DataArguments,
    Seq2SeqTrainingArguments,
    TrainingArguments,
    key_groups,
    known_keys,
    parse_args,
    read_words,
)
from mca_lite.args_rules_model import (
    balanced_layout,
    check_layout,
    check_model,
    layout_stages,
    numbers_of,
)
from mca_lite.args_values import cast, read_config_file, show_count
from mca_lite.errors import ConfigError, Judge
from tests.shared.commands import keys_of

NUMBERS = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
}


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """Sets the number of processes that torchrun would announce; none unless a test says so."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return lambda size: monkeypatch.setenv("WORLD_SIZE", str(size))


@pytest.fixture
def good_words(tmp_path):
    """The words of a run that has nothing wrong."""
    (tmp_path / "config.json").write_text(json.dumps(NUMBERS))
    return [f"model_name_or_path={tmp_path}", "dataset=train.jsonl", "output_dir=out"]


def problems_with(numbers, args):
    """What a config.json's numbers and TrainingArguments have against each other."""
    judge = Judge(args)
    check_model(numbers_of(numbers), args, judge)
    return judge.problems


def training(**values):
    return TrainingArguments(output_dir="out", **values)


# ---- reading


def test_yaml_scalars_take_the_type_of_their_field(tmp_path, good_words):
    path = tmp_path / "run.yaml"
    path.write_text(
        "learning_rate: 1e-5\nmax_steps: 10.0\nbf16: 'true'\neval_strategy: "
        "no\nrun_name: 2024-01-31\ndataset: a, b\n"
        "lr_scheduler_kwargs: {min_lr: 1e-6}\nlr_scheduler_type: "
        "cosine_with_min_lr\nsave_total_limit: null\n"
        "mix_weights: 1, 3\nmix_strategy: interleave_over\n"
    )
    run = parse_args([str(path), good_words[0], good_words[2]])
    assert run.training.learning_rate == 1e-5
    assert run.training.max_steps == 10 and isinstance(run.training.max_steps, int)
    assert run.training.bf16 is True
    assert run.training.eval_strategy == "no"
    assert run.training.run_name == "2024-01-31"
    assert run.training.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert run.training.save_total_limit is None
    assert run.data.dataset == ["a", "b"]
    assert run.data.mix_weights == [1.0, 3.0]


def test_command_line_wins_over_the_file_in_every_spelling_and_order(tmp_path, good_words):
    path = tmp_path / "run.yaml"
    path.write_text(
        "max_steps: 1\nlogging_steps: 1\nsave_steps: 1\nseed: 1\nsave_total_limit: "
        "1\nevaluation_strategy: epoch\n"
    )
    words = [
        "max_steps=2",
        "--logging_steps",
        "3",
        str(path),
        "--save-steps=4",
        "--bf16",
        "seed=5",
        "save_total_limit=null",
    ]
    run = parse_args([*words, *good_words, "eval_strategy=no"])
    args = run.training
    assert (args.max_steps, args.logging_steps, args.save_steps, args.seed) == (2, 3, 4, 5)
    assert args.bf16 is True
    assert args.save_total_limit is None
    assert args.eval_strategy == "no"
    assert (run.max_steps, run.stage, run.use_mca) == (2, "sft", True)  # of all groups
    assert copy.deepcopy(run).max_steps == 2 and not hasattr(run, "max_step")


def test_text_on_the_command_line_stays_text_for_a_text_field(good_words):
    assert parse_args([*good_words, "run_name=007"]).training.run_name == "007"
    assert parse_args([*good_words, "run_name=a: b"]).training.run_name == "a: b"
    assert parse_args([*good_words, "run_name='1e5'"]).training.run_name == "1e5"


def test_json_files_and_json_values_are_read(tmp_path, good_words):
    path = tmp_path / "run.json"
    path.write_text(
        '{\n\t"max_steps":\t3, "report_to": ["none"], "lr_scheduler_kwargs": '
        '"{\\"min_lr_rate\\": 0.1}"\n}'
    )
    args = parse_args(
        [str(path), *good_words, 'additional_configs={"attention_backend": "fused"}']
    ).training
    assert args.max_steps == 3
    assert args.report_to == []
    assert args.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert args.additional_configs == {"attention_backend": "fused"}


@pytest.mark.parametrize(
    "text", ["seed: 1\nseed: 2\n", "lr_scheduler_kwargs:\n  min_lr: 0\n  min_lr: 1\n"]
)
def test_a_key_written_twice_in_a_file_is_an_error(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    problem = keys_of(read_config_file, path)["config file"]
    assert "written twice" in problem.reason and "line" in problem.reason


BOMB = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
BOMB += [
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip("abcdef", "bcdefg", strict=True)
]


@pytest.mark.parametrize("text", ["\n".join(BOMB), "a: &a [*a, *a]", "lora_target: *.q_proj"])
def test_a_file_with_aliases_is_refused_at_once(tmp_path, text):
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is an alias, which is not read: quote it .line"):
        read_config_file(tmp_path / "bomb.yaml")
    with pytest.raises(ValueError, match="is an alias"):
        cast("{" + text.replace("\n", ", ") + "}", dict[str, Any])


def test_a_file_that_cannot_be_read_is_the_only_problem(tmp_path, good_words):
    for words in ([str(tmp_path / "none.yaml")], [str(tmp_path / "none.yaml"), "lora_rang=1"]):
        with pytest.raises(ConfigError) as caught:
            parse_args(words)
        assert [problem.key for problem in caught.value.problems] == ["config file"]


def test_keys_in_groups_are_told_to_stand_side_by_side(tmp_path):
    (tmp_path / "run.yaml").write_text("model:\n  model_name_or_path: x\n")
    problems = keys_of(parse_args, [str(tmp_path / "run.yaml")])
    problem = problems.pop("model")
    assert not problems, "what else is missing may be in the group"
    assert "at the top level" in problem.reason and "without model" in problem.suggestion


@pytest.mark.parametrize("text", ["- a\n- b\n", "seed: [1\n", "just text"])
def test_a_file_that_is_no_flat_mapping_is_an_error(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert "config file" in keys_of(read_config_file, path)


def test_help_names_every_key(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "tensor_model_parallel_size (1)" in text and "model_name_or_path (required)" in text


# ---- errors


def test_a_required_key_of_another_type_is_one_problem_among_others(good_words):
    problems = keys_of(parse_args, [*good_words, "dataset=[[train.jsonl]]", "bf16=maybe"])
    assert set(problems) == {"dataset", "bf16"}


def test_keys_of_llama_factory_that_tutorials_name_are_known(good_words):
    assert parse_args(
        [*good_words, "early_stopping_steps=3", "eval_strategy=steps", "val_size=0.1"]
    )
    assert parse_args([*good_words, "template=qwen3", "eval_on_each_dataset=false"])
    assert parse_args([*good_words, "streaming=true", "max_steps=9", "buffer_size=128"])
    problem = keys_of(parse_args, [*good_words, "new_special_tokens_config=x"])
    assert "not in this version" in problem["new_special_tokens_config"].reason


@pytest.mark.parametrize("names", ["a/x.jsonl,b/x.jsonl", "training.jsonl"])
def test_evaluation_sets_of_one_name_are_refused(good_words, names):
    words = [*good_words, f"eval_dataset={names}", "eval_on_each_dataset=true"]
    words += ["eval_strategy=steps", "eval_steps=1"]
    [problem] = keys_of(parse_args, words).values()
    assert "the same name" in problem.reason and problem.key == "eval_on_each_dataset"
    assert parse_args([*words, "eval_dataset=a/x.jsonl,b/y.jsonl"])


def test_a_folder_without_a_model_is_named_as_such(good_words, tmp_path):
    (tmp_path / "empty").mkdir()
    words = [f"model_name_or_path={tmp_path / 'empty'}", *good_words[1:]]
    problem = keys_of(parse_args, words)["model_name_or_path"]
    assert "No such file or directory" in problem.reason and "config.json" in problem.reason


def test_all_errors_of_a_run_are_shown_at_once(good_words):
    words = [
        good_words[0].replace("model_name_or_path=", "model_name_or_path=/absent"),
        "tensor_model_paralel_size=2",
        "learning_rate=-1",
        "gradient_accumulation_steps=x",
        "bf16=true",
        "fp16=true",
        "stage=reward",
        "lr_scheduler_type=cosin",
        "moe_expert_capacity_factor=1.5",
        "stray",
    ]
    problems = keys_of(parse_args, words)
    assert set(problems) == {
        "model_name_or_path",
        "tensor_model_paralel_size",
        "learning_rate",
        "gradient_accumulation_steps",
        "bf16",
        "stage",
        "lr_scheduler_type",
        "moe_expert_capacity_factor",
        "stray",
        "output_dir",
        "dataset",
    }
    assert problems["tensor_model_paralel_size"].suggestion == "tensor_model_parallel_size"
    assert "pt, sft, dpo" in problems["stage"].reason
    text = str(ConfigError(list(problems.values())))
    assert all(problem.key in text and problem.reason in text for problem in problems.values())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("per_device_train_batch_size", 0),
        ("per_device_train_batch_size", 10**9),
        ("dataloader_num_workers", 100_000),
        ("num_train_epochs", 1e308),
        ("seed", 2**64),
        ("run_name", "half a character \ud800"),
        ("run_name", "nothing \0 after it"),
        ("pipeline_model_parallel_layout", "Et*99999999999|tL"),
        ("pipeline_model_parallel_layout", "E(t)*9999999999tL"),
        ("warmup_ratio", 1.5),
        ("adam_beta1", 1.0),
        ("max_steps", 0),
        ("max_steps", -2),
        ("num_train_epochs", 0),
        ("learning_rate", "nan"),
        ("logging_steps", True),
        ("save_steps", 0.5),
        ("eval_strategy", "sometimes"),
        ("optim", "lion"),
        ("report_to", "nowhere"),
        ("max_shard_size", "big"),
        ("transformer_impl", "te"),
        ("expert_model_parallel_size", 0),
        ("moe_token_dispatcher_type", "flex"),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("recompute_modules", "core_attn"),
        ("recompute_num_layers", 2),
        ("overlap_param_gather", True),
        ("load_best_model_at_end", True),
        ("early_stopping_patience", 3),
        ("virtual_pipeline_model_parallel_size", 2),
        ("lr_scheduler_kwargs", "[1]"),
    ],
)
def test_a_value_that_does_not_work_is_an_error_of_its_key(key, value):
    problems = keys_of(training, **{key: value})
    assert list(problems) == [key]
    assert problems[key].suggestion


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"dataset": ["a"], "mix_weights": [1, 2]}, "mix_weights"),
        ({"dataset": ["a", "b"], "mix_weights": [0, 0]}, "mix_weights"),
        ({"dataset": ["a"], "val_size": 0.1, "eval_dataset": ["b"]}, "val_size"),
        ({"dataset": ["a"], "val_size": 1.5}, "val_size"),
        ({"dataset": ["a"], "train_on_prompt": True, "mask_history": True}, "mask_history"),
        ({"dataset": []}, "dataset"),
    ],
)
def test_data_arguments_that_contradict_each_other_are_an_error(values, key):
    assert list(keys_of(DataArguments, **values)) == [key]


def test_evaluation_without_data_is_an_error(good_words):
    assert set(keys_of(parse_args, [*good_words, "eval_strategy=steps"])) == {"eval_strategy"}


@pytest.mark.parametrize(
    "words, packs",
    [
        ("stage=sft packing=true", True),
        ("stage=sft neat_packing=true", True),
        ("stage=pt neat_packing=true", True),
        (
            "stage=pt packing=true",
            False,
        ),  # documents are joined and cut: rows are single documents to the model
        ("stage=sft", False),
    ],
)
def test_packs_of_samples_reach_the_model_with_their_borders(good_words, words, packs):
    assert parse_args([*good_words, *words.split()]).training.sequence_packing is packs


def test_both_names_of_a_key_are_an_error():
    values = {"eval_strategy": "no", "evaluation_strategy": "no"}
    known_keys({"output_dir": "o", **values}, problems := [])
    assert [problem.key for problem in problems] == ["evaluation_strategy"]


def test_best_checkpoint_must_have_been_evaluated():
    common = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    assert (
        "no multiple"
        in keys_of(training, **common, eval_steps=200, save_steps=500)[
            "load_best_model_at_end"
        ].reason
    )
    assert (
        "save_strategy"
        in keys_of(training, **common, save_strategy="epoch")["load_best_model_at_end"].reason
    )
    assert training(**common, eval_steps=100, save_steps=500).load_best_model_at_end


@pytest.mark.parametrize(
    ("kind", "kwargs", "key"),
    [
        ("cosine", {"min_lrr": 0}, "min_lrr"),
        ("cosine", {"min_lr": 1.0}, "min_lr"),
        ("cosine", {"min_lr": 0, "min_lr_rate": 0}, "min_lr_rate"),
        ("constant", {"min_lr": 0}, "min_lr"),
        ("linear", {"decay_type": "cosine"}, "decay_type"),
        ("warmup_stable_decay", {"decay_type": "linear"}, "num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 1.5}, "num_decay_steps"),
    ],
)
def test_scheduler_kwargs_without_effect_or_sense_are_errors(kind, kwargs, key):
    problems = keys_of(training, lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs)
    assert f"lr_scheduler_kwargs.{key}" in problems


def test_hugging_face_names_of_the_stable_schedule_are_taken():
    kwargs = {"num_decay_steps": "10", "min_lr_ratio": "0.1", "decay_type": "1-sqrt"}
    args = training(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=kwargs)
    assert args.lr_scheduler_kwargs == {
        "num_decay_steps": 10,
        "min_lr_rate": 0.1,
        "decay_type": "minus_sqrt",
    }


def test_additional_configs_cannot_pass_by_the_keys_and_limits():
    extra = {"sequence_parallel": True, "num_moe_experts": 8, "attention_backend": "fused"}
    problems = keys_of(training, additional_configs=extra)
    assert set(problems) == {
        "additional_configs.sequence_parallel",
        "additional_configs.num_moe_experts",
    }


# ---- what is filled in


def test_defaults_follow_from_other_values():
    args = training(
        per_device_train_batch_size=4,
        eval_strategy="steps",
        logging_steps=7,
        recompute_granularity="full",
    )
    assert args.per_device_eval_batch_size == 4
    assert args.eval_steps == 7
    assert (args.recompute_method, args.recompute_num_layers) == ("uniform", 1)
    assert args.gradient_accumulation_steps == 1
    assert training(optim="adamw_torch").optim == "adam"
    assert training(warmup_steps=0.1).warmup_ratio == 0.1
    assert isinstance(Seq2SeqTrainingArguments(output_dir="out"), TrainingArguments)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, "auto"), ("true", "auto"), (False, None), ("false", None), ("x", "x")],
)
def test_resume_from_checkpoint_takes_truth_values_and_paths(value, expected):
    assert training(resume_from_checkpoint=value).resume_from_checkpoint == expected


def test_packing_follows_the_stage(good_words):
    assert parse_args([*good_words, "stage=pt"]).data.packing is True
    assert parse_args([*good_words, "stage=sft"]).data.packing is False


def test_switched_off_values_and_ignored_keys_are_named_once(good_words):
    words = [
        "sequence_parallel=true",
        "tool_format=qwen",
        "tf32=true",
        "use_audio_in_video=true",
        "max_steps=3",
    ]
    run = parse_args([*good_words, *words, "num_train_epochs=2"])
    assert run.training.sequence_parallel is False
    ignored, switched_off, epochs = run.warnings
    assert all(name in ignored for name in ("tool_format", "tf32", "use_audio_in_video"))
    assert "sequence_parallel" in switched_off and "num_train_epochs" in epochs


def test_one_global_batch_gives_the_accumulation_of_each_layout(world):
    world(8)
    # 8 ranks / (tp 2 x pp 2) = 2 copies of micro-batch 2: 32 samples are 8 micro-batches each
    args = training(
        global_batch_size=32,
        per_device_train_batch_size=2,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    assert (
        args.model_parallel_size,
        args.data_parallel_size,
        args.gradient_accumulation_steps,
    ) == (4, 2, 8)
    assert args.train_global_batch_size == 32
    assert (
        training(global_batch_size=32, per_device_train_batch_size=2).gradient_accumulation_steps
        == 2
    )


def test_a_global_batch_that_cannot_be_shared_names_its_neighbours(world):
    world(4)
    problem = keys_of(training, global_batch_size=12, per_device_train_batch_size=2)[
        "global_batch_size"
    ]
    assert problem.suggestion == "global_batch_size: 8 or 16"
    problem = keys_of(training, global_batch_size=16, gradient_accumulation_steps=3)[
        "gradient_accumulation_steps"
    ]
    assert "4" in problem.suggestion and "global_batch_size: 12" in problem.suggestion


def test_layout_must_divide_the_world(world, good_words):
    # without torchrun arguments can be made for any world, but a run cannot start
    assert training(tensor_model_parallel_size=2).data_parallel_size == 1
    assert (
        "torchrun --nproc_per_node 2"
        in keys_of(parse_args, [*good_words, "tensor_model_parallel_size=2"])[
            "tensor_model_parallel_size"
        ].suggestion
    )
    assert (
        parse_args(
            [*good_words, "tensor_model_parallel_size=2"], needs_world=False
        ).training.model_parallel_size
        == 2
    )
    world(6)
    problem = keys_of(training, tensor_model_parallel_size=4)["tensor_model_parallel_size"]
    assert problem.suggestion.endswith("a product that divides 6")


def test_virtual_stages_need_whole_groups_of_micro_batches():
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert "gradient_accumulation_steps" in keys_of(
        training, **layout, gradient_accumulation_steps=3
    )
    assert (
        training(**layout, gradient_accumulation_steps=4).virtual_pipeline_model_parallel_size == 2
    )


def test_plain_torch_backend_counts_every_rank_as_data_parallel(world, good_words):
    world(4)
    words = [
        "tensor_model_parallel_size=2",
        "sequence_parallel=true",
        "use_distributed_optimizer=true",
    ]
    run = parse_args([*good_words, *words, "global_batch_size=8", "use_mca=false"])
    args = run.training
    assert (
        args.model_parallel_size,
        args.data_parallel_size,
        args.gradient_accumulation_steps,
    ) == (1, 4, 2)
    assert not args.sequence_parallel and not args.use_distributed_optimizer
    assert {line.split(":")[0] for line in run.warnings} == {w.split("=")[0] for w in words}


@pytest.mark.parametrize(
    "key",
    [
        "attention_dropout=0.1",
        "hidden_dropout=0.1",
        "recompute_granularity=full",
        "transformer_impl=local",
        "ddp_bucket_size=9",
    ],
)
def test_what_plain_torch_does_without_is_named(good_words, key):
    (line,) = parse_args([*good_words, key, "use_mca=false"]).warnings
    assert key.split("=")[0] in line


@pytest.mark.parametrize(
    "key, meant",
    [("lora_targets", "lora_target"), ("lora_dropot", "lora_dropout"), ("lora_rnk", "lora_rank")],
)
def test_a_misspelt_key_of_adapters_is_an_error(good_words, key, meant):
    with pytest.raises(ConfigError) as error:
        parse_args([*good_words, f"{key}=4"])
    [problem] = error.value.problems
    assert problem.key == key and meant in problem.suggestion


def test_effective_configuration_reproduces_the_run(world, good_words, tmp_path):
    world(2)
    words = [
        "global_batch_size=8",
        "pipeline_model_parallel_size=2",
        "pipeline_model_parallel_layout=Et*5|t*3L",
        "eval_strategy=steps",
        "val_size=5",
        "warmup_steps=0.1",
        "recompute_granularity=full",
        "resume_from_checkpoint=true",
        "learning_rate=3e-5",
        "lr_scheduler_kwargs={min_lr: 1e-6}",
    ]
    run = parse_args([*good_words, *words])
    path = tmp_path / "new" / "config.yaml"
    run.save(path)
    again = parse_args([str(path)])
    assert again == run
    assert again.training.gradient_accumulation_steps == 8
    assert "gradient_accumulation_steps" not in yaml.safe_load(path.read_text())
    for name, link in {"twin": os.link, "linked": os.symlink}.items():  # of another run
        (tmp_path / name).write_text("old")
        path.unlink()
        link(tmp_path / name, path)
        run.save(path)
        assert (tmp_path / name).read_text() == "old" and parse_args([str(path)]) == run


# ---- the model


def test_heads_and_query_groups_must_be_shared_evenly():
    (problem,) = problems_with(
        {**NUMBERS, "num_key_value_heads": 6}, training(tensor_model_parallel_size=4)
    )
    assert (
        "6 query groups" in problem.reason and problem.suggestion == "tensor_model_parallel_size: 2"
    )
    shared = {**NUMBERS, "num_key_value_heads": 2}  # each group on two ranks
    assert problems_with(shared, training(tensor_model_parallel_size=4)) == []
    normed = {**shared, "model_type": "olmo2"}  # keys are normed over both groups together
    (problem,) = problems_with(normed, training(tensor_model_parallel_size=4))
    assert "2 query groups" in problem.reason
    assert problems_with(NUMBERS, training(tensor_model_parallel_size=4)) == []


@pytest.mark.parametrize(
    "pp, vpp, key",
    [
        (2, 8, "virtual_pipeline_model_parallel_size"),
        (3, None, "pipeline_model_parallel_size"),
        (16, None, "pipeline_model_parallel_size"),
    ],
)
def test_stages_that_layers_cannot_fill_evenly_are_refused(pp, vpp, key):
    args = training(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        gradient_accumulation_steps=pp,
    )
    (problem,) = problems_with(NUMBERS, args)
    assert problem.key == key and "divides 8" in problem.suggestion


def test_a_layout_that_loses_a_layer_is_an_error():
    for pp, layout in ((2, "Et*4|t*3L"), (1, "Et*7L")):
        args = training(pipeline_model_parallel_size=pp, pipeline_model_parallel_layout=layout)
        (problem,) = problems_with(NUMBERS, args)
        assert problem.key == "pipeline_model_parallel_layout" and "7 layers" in problem.reason


@pytest.mark.parametrize("costs", [[1.0] * 7, [0.4] + [1.0] * 6, [1.0, 3.0] * 3])
@pytest.mark.parametrize("head", [0.0, 1.6, 9.0])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_auto_has_the_layout_with_the_most_equal_stages(costs, head, stages):
    def work(borders):
        edges = (0, *borders, len(costs))
        of_stages = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        of_stages[-1] += head
        return sum(seconds**8 for seconds in of_stages)

    layout = balanced_layout(costs, head, stages)
    counts = [stage.count("t") for stage in layout_stages(layout)]
    borders = tuple(itertools.accumulate(counts[:-1]))
    others = itertools.combinations(range(1, len(costs) + 1), stages - 1)
    assert work(borders) == pytest.approx(min(map(work, others)))
    check_layout(layout)


def test_auto_needs_a_layer_on_every_stage_but_the_last():
    layout = dict(pipeline_model_parallel_layout="auto")
    assert not problems_with(NUMBERS, training(pipeline_model_parallel_size=9, **layout))
    [problem] = problems_with(NUMBERS, training(pipeline_model_parallel_size=10, **layout))
    assert problem.key == "pipeline_model_parallel_size" and "8 for 10" in problem.reason


@pytest.mark.parametrize(
    "layout", ["t*4|t*4L", "Et*4|t*4", "Et*4|t*2|t*2L", "Et*4|x*4L", "Et*4|EtL"]
)
def test_a_layout_that_is_none_is_an_error(layout):
    problems = keys_of(
        training, pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout
    )
    assert list(problems) == ["pipeline_model_parallel_layout"]


def test_a_layout_sets_the_virtual_stages():
    args = training(
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et*2|(t*2|)*2t*2L",
        gradient_accumulation_steps=2,
    )
    assert args.virtual_pipeline_model_parallel_size == 2
    wrong = {"virtual_pipeline_model_parallel_size": 3, "pipeline_model_parallel_size": 2}
    assert "virtual_pipeline_model_parallel_size" in keys_of(
        training, **wrong, pipeline_model_parallel_layout="Et|t|t|tL", gradient_accumulation_steps=2
    )


def test_an_mca_config_alone_is_checked_too(tmp_path, good_words):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "mca_config.json").write_text(json.dumps({"num_layers": 7, "num_attention_heads": 4}))
    words = [f"model_name_or_path={folder}", *good_words[1:], "pipeline_model_parallel_size=2"]
    problems = keys_of(parse_args, words, needs_world=False)
    assert "7 layers" in problems["pipeline_model_parallel_size"].reason


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_shipped_configurations_hold_known_keys_and_consistent_values(path):
    given, problems = read_words([str(path)])
    own, _ = known_keys(given, problems)
    judge = Judge(None, problems)
    for group in key_groups():
        judge.arguments = group.read(own, judge)
        judge.arguments.resolve(judge)
    assert judge.problems == []


# ---- as others write it


def test_the_coefficient_in_llama_factorys_spelling_is_the_key(good_words):
    assert known_keys({"moe_aux_loss_coef": "0.02"}, [])[0] == {"moe_aux_loss_coeff": "0.02"}
    assert parse_args([*good_words, "optimizer=sgd"]).training.optim == "sgd"


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("moe_layer_recompute=true", "recompute_modules: moe"),
        ("label_smoothing_factor=0.1", "register_objective"),
        ("account_for_loss_in_pipeline_split=true", "pipeline_model_parallel_layout"),
        ("train_sampling_strategy=sequential", "disable_shuffling: true"),
        ("use_muon=true", "optim: muon"),
    ],
)
def test_what_is_refused_names_the_nearest_way(good_words, word, remedy):
    problem = keys_of(parse_args, [*good_words, word])[word.partition("=")[0]]
    assert "not in this version" in problem.reason and remedy in problem.suggestion


@pytest.mark.parametrize("word", ["label_smoothing_factor=0.0", "use_dora=false", "pissa_iter=16"])
def test_the_default_of_a_refused_key_is_taken(good_words, word):
    assert parse_args([*good_words, word])


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_of_activations_is_full_recomputation(good_words, name):
    run = parse_args([*good_words, f"{name}=true"])
    assert run.training.recompute_granularity == "full"
    run = parse_args([*good_words, f"--{name}", "--recompute_granularity=selective"])
    assert run.training.recompute_granularity == "selective" and run.warnings == []
    for off in ("false", "null"):
        run = parse_args([*good_words, f"{name}={off}"])
        assert run.training.recompute_granularity is None and run.warnings == []
    problem = keys_of(parse_args, [*good_words, f"{name}=abc"])["recompute_granularity"]
    assert problem.reason.startswith("expected one of full")
    run = parse_args([*good_words, f"{name}=true", f"{name}_kwargs={{use_reentrant: false}}"])
    assert run.warnings[0].startswith(f"these keys have no effect: {name}_kwargs")


def test_plain_torch_says_that_it_recomputes_nothing(good_words):
    run = parse_args([*good_words, "gradient_checkpointing=true", "use_mca=false"])
    assert run.training.recompute_granularity is None
    assert run.warnings == ["recompute_granularity: no effect, since use_mca is false"]


def test_a_name_for_wandb_is_said_to_have_no_effect_without_it(good_words):
    assert parse_args([*good_words, "run_name=a"]).warnings == [
        "run_name: no effect, since report_to is not set"
    ]


@pytest.mark.parametrize(
    ("kind", "kwargs", "key"),
    [
        ("cosine", {"max_lr": 1e-3}, "max_lr"),
        ("warmup_stable_decay", {"num_stable_steps": 5, "lr_decay_steps": 10}, "lr_decay_steps"),
    ],
)
def test_what_a_schedule_cannot_take_of_megatrons_is_refused(kind, kwargs, key):
    problems = keys_of(training, lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs)
    assert f"{kind} takes min_lr" in problems[f"lr_scheduler_kwargs.{key}"].reason


def test_arguments_know_which_process_they_are_of(monkeypatch):
    for rank, first in (("0", True), ("3", False)):
        monkeypatch.setenv("RANK", rank)
        args = training()
        assert (args.process_index, args.should_save) == (int(rank), first)


def test_a_warm_up_that_the_schedule_does_not_have_is_said():
    said = [
        any(
            "lr_scheduler_type is constant" in note
            for note in training(lr_scheduler_type=kind, **keys).notes
        )
        for kind, keys in (
            ("constant", dict(warmup_steps=3)),
            ("constant", dict(warmup_ratio=0.1)),
            ("constant", {}),
            ("constant_with_warmup", dict(warmup_steps=3)),
        )
    ]
    assert said == [True, True, False, False]


@pytest.mark.parametrize("asks", ["4", None])
def test_a_degree_that_fits_neither_the_world_nor_the_model_is_told_of_both(
    good_words, world, asks
):
    if asks is not None:
        world(asks)
    with pytest.raises(ConfigError) as caught:
        parse_args([*good_words, "tensor_model_parallel_size=3"])
    first, second = caught.value.problems
    assert first.key == second.key == "tensor_model_parallel_size"
    assert "number of processes" in first.reason and "attention heads" in second.reason


@pytest.mark.parametrize(
    "words, problems",
    [
        ("max_steps 3", {"max_steps": "max_steps=<value>", "3": "=<value>"}),
        ("bf16 max_steps=3", {"bf16": "--bf16 <value>"}),
    ],
)
def test_a_key_without_its_equals_sign_is_answered_with_the_word_that_is_meant(
    good_words, words, problems
):
    found = keys_of(parse_args, [*good_words, *words.split()])
    assert found.keys() == problems.keys()
    assert all(remedy in found[key].suggestion for key, remedy in problems.items())


def test_a_key_twice_under_both_of_its_names_is_one_problem(good_words, tmp_path):
    file = tmp_path / "twice.yaml"
    file.write_text("moe_aux_loss_coef: 0.1\nmoe_aux_loss_coeff: 0.2\n")
    [problem] = keys_of(parse_args, [*good_words, str(file)]).values()
    assert problem.suggestion == "only moe_aux_loss_coeff"


def test_one_of_a_thing_is_said_so():
    assert [show_count(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_a_whole_number_beyond_those_of_a_float_is_kept():
    assert cast("9007199254740993", int) == cast(9007199254740993, int) == 2**53 + 1
    assert cast("1e3", int) == 1000
    for value in (True, "1.5", "nan"):
        with pytest.raises(ValueError, match="a whole number"):
            cast(value, int)


def test_values_of_a_mapping_are_cast_by_its_type():
    assert cast('{"a": "0.5", "b": 2}', dict[str, float]) == {"a": 0.5, "b": 2.0}
    with pytest.raises(ValueError, match="finite number"):
        cast({"a": "x"}, dict[str, float])
