"""Every key has a row that shows where a value other than its default arrives: a key without one
fails.

Three kinds of rows. Keys that change what is computed: two short runs of the command line differ in
their curves. Keys of megatron: the field of its configuration that holds the value. Keys of files,
logs and starts: the test that shows them.
"""

import contextlib
import io
import json
import os
import re
import sys
import traceback
from pathlib import Path

import pytest

from mca_lite.args import key_fields
from tests.shared import tiny, tiny_moe, world
from tests.shared.files import tensors
from tests.shared.policy_tools import write_rollouts
from tests.shared.small_runs import save_tokenizer, write_data
from tests.shared.training import read_log

HERE = Path(__file__).parent
KEYS = list(key_fields())

DPO = "stage=dpo dataset={folder}/pairs.jsonl"
KTO = "stage=kto dataset={folder}/labelled.jsonl"
LORA = "finetuning_type=lora lora_target=o_proj,down_proj"
GRPO = "stage=grpo dataset={folder}/rollouts.jsonl"
POLICY = GRPO.replace("grpo", "policy")
START = f"{LORA} adapter_name_or_path={{folder}}/adapter"
TWO_SETS = "dataset={folder}/chat.jsonl,{folder}/other.jsonl"
WIDE = "model_name_or_path={folder}/wide"  # rows of whole blocks
EXPERTS = "model_name_or_path={folder}/experts"
AHEAD = "model_name_or_path={folder}/ahead train_from_scratch=true"  # no one saves such layers
EVAL = "eval_dataset={folder}/other.jsonl eval_strategy=steps eval_steps=1"
BEST = f"{EVAL} save_strategy=steps save_steps=1 max_steps=4"
DPO_BEST = f"{DPO} eval_dataset={{folder}}/pairs.jsonl eval_strategy=steps eval_steps=1"
# {key: (value, the other words of both runs)}: the curve of the run with the value is another
CHANGES_A_RUN = {
    "model_name_or_path": ("{folder}/other_model", ""),
    "train_from_scratch": ("true", ""),
    "dataset": ("{folder}/other.jsonl", ""),
    "cutoff_len": ("12", ""),
    "cutoff_rule": ("proportion", "cutoff_len=12"),
    "train_on_prompt": ("true", ""),
    "mask_history": ("true", ""),
    "mix_weights": ("5,1", f"{TWO_SETS} mix_strategy=interleave_over"),
    "mix_strategy": ("interleave_over", TWO_SETS),
    "buffer_size": ("4", "streaming=true"),
    "max_samples": ("6", ""),
    "disable_shuffling": ("true", ""),
    "default_system": ("w3", ""),
    "val_size": ("4", ""),
    "stage": ("pt", ""),  # the records have a text beside their messages
    "packing": ("true", ""),
    "neat_packing": ("true", ""),
    "finetuning_type": ("lora", ""),
    "freeze_trainable_layers": ("1", "finetuning_type=freeze"),
    "freeze_trainable_modules": ("mlp", "finetuning_type=freeze"),
    "freeze_extra_modules": ("embed_tokens", "finetuning_type=freeze"),
    "lora_rank": ("2", LORA),
    "lora_alpha": ("64", LORA),
    "lora_dropout": ("0.5", START),
    "lora_target": ("q_proj", "finetuning_type=lora"),
    "use_rslora": ("true", LORA),
    "rank_pattern": ('{{"o_proj":2}}', LORA),
    "alpha_pattern": ('{{"o_proj":64}}', LORA),
    "modules_to_save": ("norm", LORA),
    "adapter_name_or_path": ("{folder}/adapter", LORA),
    "quantization_bit": ("8", f"{LORA} {WIDE}"),
    "quantization_type": ("mxfp4", f"{LORA} {WIDE} quantization_bit=4"),
    "pref_loss": ("orpo", DPO),
    "pref_beta": ("0.9", DPO),
    "pref_ftx": ("0.5", DPO),
    "pref_loss_weights": ("2,3", f"{DPO} pref_loss=sigmoid,sft"),
    "dpo_label_smoothing": ("0.3", DPO),
    "simpo_gamma": ("0.9", f"{DPO} pref_loss=simpo"),
    "cpo_alpha": ("0.5", f"{DPO} pref_loss=cpo"),
    "discopop_tau": ("0.5", f"{DPO} pref_loss=discopop"),
    "f_divergence_type": ("js_divergence", DPO),
    "f_alpha_divergence_coef": ("0.9", f"{DPO} f_divergence_type=alpha_divergence"),
    "ld_alpha": ("0.5", DPO),
    "use_weighting": ("true", DPO),
    "pair_weight": ("trust", DPO),
    "pair_margin": ("trust", DPO),
    "kto_chosen_weight": ("0.5", KTO),
    "center_rewards_coefficient": ("0.5", DPO.replace("dpo", "rm")),
    "kto_rejected_weight": ("0.5", KTO),
    "policy_loss": ("reinforce", POLICY),
    "clip_low": ("0.01", GRPO),
    "clip_high": ("0.01", GRPO),
    "dual_clip": ("1.01", GRPO),
    "delta": ("0.5", GRPO),
    "cispo_max": ("0.5", f"{POLICY} policy_loss=cispo cispo_max=5"),
    "tau_pos": ("2", f"{POLICY} policy_loss=sapo"),
    "tau_neg": ("2", f"{POLICY} policy_loss=sapo"),
    "constant": ("8", f"{POLICY} policy_loss=dr_grpo constant=16"),
    "kl_coef": ("0.5", GRPO),
    "kl": ("k1", f"{GRPO} kl_coef=0.5"),
    "kl_unbiased": ("true", f"{GRPO} kl_coef=0.5"),
    "entropy_coef": ("0.5", GRPO),
    "with_entropy": ("false", GRPO),
    "temperature": ("0.5", GRPO),
    "teacher_coef": ("0.5", f"{POLICY} policy_loss=opd"),
    "off_policy_max": ("-5", GRPO),
    "scale_rewards": ("true", GRPO),
    "sampler_correction": ("token_truncate", GRPO),
    "sampler_max": ("0.5", f"{GRPO} sampler_correction=token_truncate"),
    "sampler_min": ("2", f"{GRPO} sampler_correction=token_truncate"),
    "ref_model": ("{folder}/other_model", DPO),
    "global_batch_size": ("8", ""),
    "num_train_epochs": ("0.6", "max_steps=-1"),
    "max_steps": ("2", ""),
    "gradient_accumulation_steps": ("3", "global_batch_size=null"),
    "per_device_train_batch_size": ("4", "calculate_per_token_loss=false"),
    "seed": ("7", ""),
    "data_seed": ("7", ""),
    "learning_rate": ("1e-4", ""),
    "lr_scheduler_type": ("cosine", ""),
    "lr_scheduler_kwargs": ('{{"min_lr":5e-3}}', "lr_scheduler_type=cosine"),
    "warmup_steps": ("2", ""),
    "warmup_ratio": ("0.6", ""),
    "weight_decay": ("0.5", ""),
    "optim": ("sgd", ""),
    "sgd_momentum": ("0.1", "optim=sgd"),
    "muon_momentum": ("0.1", "optim=muon"),
    "muon_nesterov": ("false", "optim=muon"),
    "muon_ns_steps": ("1", "optim=muon"),
    "muon_adjust_lr": ("original", "optim=muon"),
    "adam_beta1": ("0.1", ""),
    "adam_beta2": ("0.1", ""),
    "adam_epsilon": ("1.0", ""),
    "exp_avg_dtype": ("bf16", ""),
    "exp_avg_sq_dtype": ("bf16", ""),
    "max_grad_norm": ("1e-3", "optim=sgd learning_rate=1"),
    "calculate_per_token_loss": ("false", ""),
    "bf16": ("true", ""),
    "fp16": ("true", "initial_loss_scale=64"),  # at 2^16 it would skip all three steps
    "attention_dropout": ("0.5", ""),
    "hidden_dropout": ("0.5", ""),
    "moe_router_load_balancing_type": ("seq_aux_loss", f"{EXPERTS} moe_aux_loss_coeff=0.5"),
    "moe_aux_loss_coeff": ("0.5", EXPERTS),
    "moe_z_loss_coeff": ("0.5", EXPERTS),
    "mtp_num_layers": ("1", AHEAD),
    "mtp_loss_scaling_factor": ("0.9", f"{AHEAD} mtp_num_layers=1"),
    "use_mca": ("false", "fp16=true initial_loss_scale=64"),  # autocast rounds elsewhere
    "add_tokens": ("w97,w98,w99", ""),
    "add_special_tokens": ("w97,w98,w99", ""),
    # what is logged and left behind
    "logging_steps": ("2", ""),
    "eval_dataset": ("{folder}/chat.jsonl", EVAL),
    "eval_strategy": ("epoch", EVAL),
    "eval_steps": ("2", EVAL),
    "save_strategy": ("epoch", ""),
    "save_steps": ("2", "save_strategy=steps"),
    "save_total_limit": ("1", "save_strategy=steps save_steps=1"),
    "save_hf_checkpoints": ("true", "save_strategy=steps save_steps=2"),
    "save_hf_model": ("true", ""),
    "html_report": ("true", ""),
    "max_shard_size": ("10KB", "save_hf_model=true"),
    "save_merged_model": ("true", LORA),
    "metric_for_best_model": ("rewards/margins", DPO_BEST),
    "greater_is_better": ("true", BEST),
    "load_best_model_at_end": ("true", f"{BEST} save_hf_model=true greater_is_better=true"),
    "early_stopping_patience": ("1", f"{BEST} greater_is_better=true"),
    "early_stopping_threshold": ("100", f"{BEST} early_stopping_patience=1"),
}
BASE = (
    "model_name_or_path={folder}/model dataset={folder}/chat.jsonl cutoff_len=40 "
    "cache_dir={folder}/cache max_steps=3 "
    "logging_steps=1 global_batch_size=4 per_device_train_batch_size=2 "
    "learning_rate=1e-2 lr_scheduler_type=linear "
    "save_strategy=no save_hf_model=false overwrite_output_dir=true disable_tqdm=true "
    "html_report=false"
)


def what_is_left(folder: Path) -> dict:
    """The numbers of the log without times, the best evaluation, the files, and the sum of the
    exported weights.
    """
    numbers = ("loss", "grad_norm", "eval_loss", "step", "entropy")
    state = json.loads((folder / "trainer_state.json").read_text())
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    weights = {} if not (folder / "config.json").exists() else tensors(folder)
    return {
        "log": [{k: line[k] for k in numbers if k in line} for line in read_log(folder)],
        "best": {k: v for k, v in state.items() if k in ("best_metric", "best_global_step")},
        "files": files,
        "weights": sum(float(value.double().abs().sum()) for value in weights.values()),
    }


def curves_of_commands(folder: str, runs: dict) -> dict:
    """{name: [(loss, grad norm) of each step]} of the command line's runs {name: words}, on this
    rank.
    """
    from mca_lite import cli, parallel

    # gloo takes 70 ms to end the groups of a run, and none to leave them behind
    parallel.shutdown = world.leave_layout
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    curves = {}
    for number, (name, words) in enumerate(runs.items()):
        out, said = f"{folder}/out-{os.getpid()}-{number}", io.StringIO()
        words = f"{BASE} {words} output_dir={out}".format(folder=folder).split(" ")
        last = {word.partition("=")[0]: word for word in words if word}
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                code = cli.main(list(last.values()))
            except Exception:
                code = traceback.format_exc()
        if code:
            curves[name] = f"{code} {said.getvalue()}"
            continue
        curves[name] = what_is_left(Path(out))
    return curves


@pytest.fixture(scope="module")
def key_folder(tmp_path_factory) -> Path:
    """Models with a tokenizer, an adapter, conversations and pairs, as CHANGES_A_RUN names them."""
    from tests.shared.lora_tools import peft_model

    folder = tmp_path_factory.mktemp("keys")
    tiny.save_model(folder / "model", "llama", num_hidden_layers=2)
    wide = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    tiny.save_model(folder / "wide", "llama", num_hidden_layers=2, **wide)
    tiny.save_model(folder / "other_model", "llama", seed=1, num_hidden_layers=2)
    tiny_moe.save_model(folder / "experts", "qwen3_moe", num_hidden_layers=2)
    tiny_moe.save_model(
        folder / "ahead", "deepseek_v3", num_hidden_layers=2, num_nextn_predict_layers=1
    )
    for name in ("model", "wide", "other_model", "experts", "ahead"):
        save_tokenizer(folder / name)
    peft_model(str(folder / "model"), ["o_proj", "down_proj"]).save_pretrained(folder / "adapter")
    write_data(folder)
    write_rollouts(folder / "rollouts.jsonl")
    return folder


def thinned(keys) -> list:
    """Keys as parameters; every second one in `make test-all` alone."""
    return [
        pytest.param(key, marks=[pytest.mark.full] if i % 2 else []) for i, key in enumerate(keys)
    ]


@pytest.fixture(scope="module")
def curves_by_key(request, key_folder):
    """{(key or None, other words): curve} of the rows that this session asks for, and of what they
    are compared with.
    """
    asked = {
        item.callspec.params["key"]
        for item in request.session.items
        if "changes_a_run" in item.name
    }
    runs = {}
    for key in asked:
        value, others = CHANGES_A_RUN[key]
        runs[key, others] = f"{others} {key}={value}"
        runs[None, others] = others
    curves, names = {}, list(runs)
    for start in range(0, len(names), 15):  # a world for each few: it ends with their threads
        some = {name: runs[name] for name in names[start : start + 15]}
        curves |= world.run(curves_of_commands, 1, str(key_folder), some)[0]
    return curves


@pytest.mark.parametrize("key", thinned(CHANGES_A_RUN))
def test_a_key_changes_a_run(key, curves_by_key):
    _, others = CHANGES_A_RUN[key]
    with_value, without = curves_by_key[key, others], curves_by_key[None, others]
    assert isinstance(with_value, dict) and isinstance(without, dict), f"{with_value}\n{without}"
    assert with_value != without, f"{key} is read and has no effect"


def from_keys(model, **keys):
    """The model's configuration, as megatron has it, for TrainingArguments of these keys."""
    from mca_lite import TrainingArguments
    from mca_lite.model_config import from_hf_config

    return from_hf_config(model, TrainingArguments(output_dir="unused", **keys))


TP2 = dict(tensor_model_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2)
EP2 = dict(expert_model_parallel_size=2)
FULL = dict(recompute_granularity="full")
SELECTIVE = dict(recompute_granularity="selective")
# {key: (value, other keys)}: the model's configuration has the value in the field of this name
IN_THE_CONFIG = {
    "tensor_model_parallel_size": (2, {}),
    "pipeline_model_parallel_size": (2, {}),
    "virtual_pipeline_model_parallel_size": (2, {**PP2, "gradient_accumulation_steps": 2}),
    "context_parallel_size": (2, {}),
    "expert_model_parallel_size": (2, {}),
    "expert_tensor_parallel_size": (1, dict(TP2, sequence_parallel=True)),
    "sequence_parallel": (True, TP2),
    "tp_comm_overlap": (True, dict(TP2, sequence_parallel=True)),
    "pipeline_model_parallel_layout": ("Ett|ttL", PP2),
    "variable_seq_lengths": (True, PP2),
    "recompute_granularity": ("selective", {}),
    "recompute_method": ("block", FULL),
    "recompute_num_layers": (2, FULL),
    "recompute_modules": (["mlp"], SELECTIVE),
    "recompute_keep": ("core_attn", FULL),
    "activation_offloading": (True, FULL),
    "mlp_chunk_size": (16, {}),
    "bias_activation_fusion": (True, {}),
    "bias_dropout_fusion": (True, {}),
    "moe_grouped_gemm": (False, {}),
    "moe_token_dispatcher_type": ("allgather", {}),
    "moe_router_dtype": ("fp64", {}),
    "moe_router_bias_update_rate": (0.01, {}),
    "moe_shared_expert_overlap": (True, {}),
    "loss_chunk_size": (16, {}),
}


@pytest.mark.parametrize("key", IN_THE_CONFIG)
def test_a_key_is_in_the_models_configuration(key):
    value, others = IN_THE_CONFIG[key]
    if key.startswith(("moe", "expert")):
        model = tiny_moe.hf_config("glm4_moe" if key.startswith("moe") else "mixtral")
    else:
        model = tiny.hf_config("llama")
    got = from_keys(model, **others, **{key: value})
    if key == "pipeline_model_parallel_layout":
        assert str(got.pipeline_model_parallel_layout) != str(
            from_keys(model, **others).pipeline_model_parallel_layout
        )
    else:
        assert getattr(got, key) == value != getattr(from_keys(model, **others), key)


def test_auto_knows_the_heads_of_a_config_without_their_size():
    from transformers import AutoConfig

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, vocab_size=61)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    model = AutoConfig.for_model("qwen2", **sizes, **heads)
    layout = from_keys(model, **PP2, pipeline_model_parallel_layout="auto")
    assert str(layout.pipeline_model_parallel_layout) == "Et*2|t*2L"


def test_transformer_engine_is_used_only_where_it_is_asked_for_or_works():
    from mca_lite.part_transformer_engine import works

    if not works():
        with pytest.raises(ValueError, match="[Tt]ransformer.?[Ee]ngine"):
            from_keys(tiny.hf_config("llama"), transformer_impl="transformer_engine")
        assert from_keys(tiny.hf_config("llama")).transformer_impl == "local"


# {key: (value, other keys, field, what it holds)} of megatron's OptimizerConfig
IN_THE_OPTIMIZER = {
    "learning_rate": (0.25, {}, "lr", 0.25),
    "sgd_momentum": (0.25, dict(optim="sgd"), "sgd_momentum", 0.25),
    "loss_scale": (128.0, dict(fp16=True), "loss_scale", 128.0),
    "initial_loss_scale": (32.0, dict(fp16=True), "initial_loss_scale", 32.0),
    "min_loss_scale": (4.0, dict(fp16=True), "min_loss_scale", 4.0),
    "loss_scale_window": (7, dict(fp16=True), "loss_scale_window", 7),
    "hysteresis": (5, dict(fp16=True), "hysteresis", 5),
    "use_distributed_optimizer": (True, {}, "use_distributed_optimizer", True),
    "log_num_zeros_in_grad": (True, {}, "log_num_zeros_in_grad", True),
}  # fmt: skip


@pytest.mark.parametrize("key", IN_THE_OPTIMIZER)
def test_a_key_is_in_the_optimizers_configuration(key, monkeypatch):
    import torch

    from mca_lite import TrainingArguments
    from mca_lite.optim import get_optimizer_config

    value, others, name, wanted = IN_THE_OPTIMIZER[key]
    dtype = torch.float16 if others.get("fp16") else torch.float32
    args = TrainingArguments(output_dir="unused", **others, **{key: value})
    default = TrainingArguments(output_dir="unused", **others)
    assert getattr(get_optimizer_config(args, dtype), name) == wanted
    assert getattr(get_optimizer_config(default, dtype), name) != wanted


# {key: (value, other keys, what `settings_of_a_trainer` calls it)}
OVERLAP = dict(use_distributed_optimizer=True, overlap_grad_reduce=True)
IN_THE_TRAINER = {
    "overlap_grad_reduce": (True, {}, "ddp overlap_grad_reduce"),
    "overlap_param_gather": (True, OVERLAP, "ddp overlap_param_gather"),
    "grad_reduce_in_fp32": (False, {}, "ddp grad_reduce_in_fp32"),
    "ddp_bucket_size": (4321, dict(overlap_grad_reduce=True), "ddp bucket_size"),
    "sequence_packing": (True, {}, "rows are packed"),
    "dataloader_num_workers": (2, {}, "workers"),
    "per_device_eval_batch_size": (3, {}, "rows of an evaluation's micro-batch"),
    "disable_tqdm": (False, {}, "bar"),
    "run_name": ("a name", dict(report_to=["wandb"]), "run name"),
    "report_to": (["wandb"], {}, "trackers"),
    "plot_loss": (True, {}, "plot"),
}


def settings_of_a_trainer(path: str, rows: dict) -> dict:
    """{key: (setting with the value, setting without)} of a trainer, on this rank."""
    from types import SimpleNamespace

    from mca_lite import AutoModel, McaTrainer, TrainingArguments, args_rules_training

    # the trackers' packages need not be there
    args_rules_training.check_installed = lambda *key: None
    told: dict = {}  # what the tracker was told at its start

    def init(**options):
        told.update(options)
        return SimpleNamespace(finish=lambda: None)

    sys.modules["wandb"] = SimpleNamespace(init=init)

    def settings(**keys) -> dict:
        args = TrainingArguments(output_dir=f"{path}-run", **keys)
        data = tiny.samples()
        model = AutoModel.from_pretrained(path, args)
        trainer = McaTrainer(model, args, train_dataset=data, eval_dataset=data)
        ddp, rows = trainer.models[0].ddp_config, []
        trainer.backend.forward = lambda step, batches, *rest, **more: rows.extend(batches)
        with contextlib.suppress(Exception):
            trainer.evaluate()
        told.clear()
        drawn = []
        trainer.report.draw = lambda args: drawn.append(args.plot_loss)
        trainer.report.on_train_begin(args, trainer.state, trainer.control)
        trainer.report.end("interrupted")
        return {
            "workers": trainer.get_train_dataloader().num_workers,
            "rows are packed": model.config.rows_are_packed,
            "rows of an evaluation's micro-batch": rows[0]["input_ids"].shape[0],
            "trackers": ["wandb"] if told else [],
            "bar": not trainer.report.uses_bar,
            "run name": told.get("name"),
            "plot": drawn == [True],
            **{f"ddp {name}": value for name, value in vars(ddp).items()},
        }

    return {
        key: (settings(**others, **{key: value})[name], settings(**others)[name])
        for key, (value, others, name) in rows.items()
    }


@pytest.fixture(scope="module")
def settings(key_folder):
    return world.run(settings_of_a_trainer, 1, str(key_folder / "model"), IN_THE_TRAINER)[0]


@pytest.mark.parametrize("key", IN_THE_TRAINER)
def test_a_key_is_in_the_trainer(key, settings):
    with_value, without = settings[key]
    assert with_value == IN_THE_TRAINER[key][0] != without


def test_the_timeout_is_that_of_the_process_group(monkeypatch):
    from mca_lite import TrainingArguments, parallel

    class Started(Exception):
        pass

    def start(*args, timeout, **options):
        raise Started(timeout.total_seconds())

    monkeypatch.setattr("torch.distributed.init_process_group", start)
    with pytest.raises(Started, match="77"):
        parallel.initialize(TrainingArguments(output_dir="unused", ddp_timeout=77), False)


def test_revision_and_trust_reach_what_loads_from_the_hub(key_folder, monkeypatch, capsys):
    import transformers

    from mca_lite import cli

    asked = {}

    def refuse(name, *args, **options):
        asked.update(options)
        raise OSError("no hub here")

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = f"{BASE} output_dir=unused".format(folder=key_folder).split()
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", refuse)
        hub = [*words[1:], "model_name_or_path=someone/model", "model_revision=branch"]
        assert cli.main(hub) and asked["revision"] == "branch"
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    for word, wanted in (("false", False), ("true", True)):
        assert cli.main([*words, f"trust_remote_code={word}"])
        assert asked["trust_remote_code"] is wanted
    assert "no hub here" in capsys.readouterr().err


# {key: the test that shows it}, for what only files and restarts show
SHOWN_BY = {
    **dict.fromkeys(
        "do_train do_eval eval_on_each_dataset".split(),
        "test_trainer_evaluation.py::"
        "test_evaluation_alone_gives_what_the_end_of_training_gave_and_exports_nothing",
    ),
    "log_each_dataset": "test_log_each_dataset.py::test_each_loss_is_that_of_its_dataset_by_hand",
    **dict.fromkeys(
        "do_predict predict_with_generate max_new_tokens generation_num_samples".split(),
        "test_predict.py::test_do_predict_writes_each_sample_of_the_evaluation_sets_once",
    ),
    "resize_vocab": "test_weights_vocabulary.py::test_keys_add_tokens_and_both_backends_agree",
    "dataset_dir": "test_cli.py::test_a_llama_factory_mca_file_runs_after_its_paths_are_changed",
    "profile_steps": "test_profile.py::test_steps_are_profiled_on_every_rank",
    "preprocessing_num_workers": "test_data.py::test_several_processes_give_the_same_files_as_one",
    "cache_dir": "test_data.py::test_several_processes_give_the_same_files_as_one",
    "chat_template": "test_data_chat.py::test_chat_template_takes_a_name_a_file_or_a_text",
    "template": "test_data_chat.py::"
    "test_a_template_of_llama_factory_is_used_where_the_tokenizer_has_none",
    "enable_thinking": "test_data_chat.py::"
    "test_enable_thinking_false_shows_the_empty_block_and_does_not_train_it",
    "on_bad_record": "test_data_skips.py::"
    "test_bad_records_are_left_out_counted_by_reason_and_listed",
    "streaming": "test_data_stream_runs.py::test_a_run_that_stops_goes_on_bit_for_bit",
    "sample_by": "test_data_mix.py::test_a_text_file_is_a_document_a_line_or_as_a_whole",
    "end_of_answer": "test_data_chat.py::"
    "test_end_of_answer_ends_each_answer_where_the_template_writes_nothing",
    "ignore_message_keys": "test_data_chat.py::"
    "test_unknown_keys_of_a_message_are_refused_by_name_unless_they_are_ignored",
    "media_dir": "test_images.py::"
    "test_the_cache_knows_the_folder_of_relative_paths_and_bad_records_are_left_out",
    "image_max_pixels": "test_images.py::test_keys_bound_the_pixels_and_are_read_again",
    "image_min_pixels": "test_images.py::test_keys_bound_the_pixels_and_are_read_again",
    "rope_scaling": "test_rope.py::test_the_key_trains_as_a_config_json_with_its_numbers",
    "video_fps": "test_video.py::test_records_spell_a_video_in_many_ways",
    "video_maxlen": "test_video.py::test_keys_choose_frames_and_their_sizes",
    "video_max_pixels": "test_video.py::test_keys_choose_frames_and_their_sizes",
    "video_min_pixels": "test_video.py::test_keys_choose_frames_and_their_sizes",
    "overwrite_cache": "test_data.py::test_overwrite_cache_writes_again_what_an_earlier_run_wrote",
    "output_dir": "test_cli.py::"
    "test_the_example_gives_the_same_numbers_on_two_ranks_and_on_plain_torch",
    "overwrite_output_dir": "test_ckpt.py::test_overwriting_deletes_the_old_checkpoints",
    "resume_from_checkpoint": "test_ckpt.py::test_resume_in_the_same_layout_is_bit_for_bit",
    "save_only_model": "test_ckpt.py::test_what_cannot_be_resumed_is_refused",
    "async_save": "test_ckpt_safety.py::"
    "test_a_checkpoint_written_in_the_background_holds_its_own_step",
    "check_for_nan_in_loss_and_grad": "test_nonfinite.py::"
    "test_check_for_nan_in_loss_and_grad_can_be_switched_off",
    "hang_timeout": "test_watchdog.py::"
    "test_the_rank_that_has_noted_less_is_named_and_all_leave_at_ddp_timeout",
    "nan_policy": "test_nonfinite.py::test_nan_policy_skip_leaves_the_update_out_and_counts_it",
    "grad_norm_skip_threshold": "test_nonfinite.py::"
    "test_an_update_with_a_large_gradient_norm_is_left_out",
    "deterministic": "test_deterministic.py::test_every_library_takes_its_deterministic_path",
    "nan_skip_limit": "test_nonfinite.py::test_nan_skip_limit_ends_the_run",
    "apply_rope_fusion": "test_cli.py::test_one_step_with_a_warm_up_share_and_tes_rope_kernel_run",
    **dict.fromkeys(
        "fp8 fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 "
        "num_layers_at_end_in_bf16".split(),
        "test_te.py::test_fp8s_keys_are_in_the_models_configuration",
    ),
    "optimizer_cpu_offload": "test_offload.py::"
    "test_an_offloaded_optimizer_trains_as_one_on_the_device",
    "optimizer_offload_fraction": "test_offload.py::test_a_fraction_of_the_elements_is_on_the_host",
    "torch_compile": "test_model_fused.py::test_torch_compile_switches_what_runs_on_a_gpu",
    **dict.fromkeys(
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model".split(),
        "test_vision_torch.py::test_parts_of_a_family_train_as_transformers_does",
    ),
    **dict.fromkeys(
        "teacher_model_name_or_path teacher_top_k teacher_cache teacher_cache_dtype distill_loss "
        "distill_jsd_mix distill_temperature distill_ce_weight".split(),
        "test_distill_cache.py::test_the_keys_of_the_stage_train_as_plain_torch_and_rows_are_read_"
        "without_a_teacher",
    ),
    "target_parameters": "test_lora_patterns.py::test_stacked_parameters_train_as_with_peft",
    "moe_permute_fusion": "test_moe_args.py::test_a_config_that_does_not_fit_says_what_to_set",
}
ROWS = [CHANGES_A_RUN, IN_THE_CONFIG, IN_THE_OPTIMIZER, IN_THE_TRAINER, SHOWN_BY]
BY_NAME = (
    "additional_configs ddp_timeout model_revision trust_remote_code transformer_impl".split()
)  # above


def test_every_key_has_a_row():
    rows = set().union(*ROWS, BY_NAME)
    assert not set(KEYS) - rows, "a key without a row: nothing shows where its value arrives"
    assert not rows - set(KEYS), "rows of keys that are no longer there"


@pytest.mark.parametrize("key", SHOWN_BY)
def test_a_key_is_in_the_test_that_shows_it(key):
    file, name = SHOWN_BY[key].split("::")
    text = (HERE / file).read_text()
    assert re.search(rf"\b{key}\b", text) and f"def {name}" in text
