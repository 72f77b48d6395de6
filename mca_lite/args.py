"""What a run is told: five groups of arguments, from Python, or from a YAML file and `key=value` words.

Every key is flat and bears the name that Hugging Face, LLaMA-Factory or megatron-core gives it. A group casts,
normalises and checks itself when it is made, from Python as from a file, and shows all its problems at once. Nothing
here imports torch, megatron-core or transformers before it is needed: a typing error shows in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from .args_parser import ArgumentGroup, ArgumentParser, arg
from .args_rules import (
    check_data,
    check_finetuning,
    check_model,
    check_run,
    check_training,
    check_world,
    normalise_training,
)
from .args_rules_experts import check_frozen_bias
from .args_values import ConfigError, Problem, cast, default_of, type_hints
from .constants import ADAPTER_CONFIG_NAME, HF_CONFIG_NAME, MCA_CONFIG_NAME
from .loss_preference import LOSSES
from .objectives import OBJECTIVES, check_objective_keys, check_objective_run

# What plain torch DDP, which knows data parallelism only, does without: these keys count as their defaults there.
NOT_FOR_TORCH = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel "
    "pipeline_model_parallel_layout use_distributed_optimizer overlap_grad_reduce overlap_param_gather "
    "optimizer_cpu_offload distribute_saved_activations additional_configs moe_grouped_gemm moe_token_dispatcher_type "
    "moe_router_dtype moe_shared_expert_overlap moe_permute_fusion attention_dropout hidden_dropout variable_seq_lengths "
    "recompute_granularity recompute_method recompute_num_layers recompute_modules transformer_impl ddp_bucket_size "
    "grad_reduce_in_fp32 optimizer_offload_fraction bias_activation_fusion bias_dropout_fusion apply_rope_fusion"
).split()


@dataclass(kw_only=True)
class ModelArguments(ArgumentGroup):
    """Which model is trained."""

    model_name_or_path: str = arg(
        MISSING, "a folder with config.json, or a model of the Hugging Face hub"
    )
    train_from_scratch: bool = arg(False, "random weights instead of those of model_name_or_path")
    trust_remote_code: bool = arg(
        False, "let the model's folder bring code of its own (tokenizers)"
    )
    model_revision: str | None = arg(None, "branch, tag or commit on the hub")
    resize_vocab: bool = arg(
        False, "grow embedding and head to the tokenizer's tokens, where it has more than the model"
    )
    add_tokens: list[str] | None = arg(
        None, "new tokens: the tokenizer learns them, embedding and head grow to them"
    )
    add_special_tokens: list[str] | None = arg(
        None, "the same for special tokens, which decoding can leave out"
    )


@dataclass(kw_only=True)
class DataArguments(ArgumentGroup):
    """What it is trained on."""

    dataset: list[str] = arg(
        MISSING, "files, or names in dataset_dir/dataset_info.json; a list, or joined by commas"
    )
    dataset_dir: str = arg("data", "the folder of dataset_info.json")
    eval_dataset: list[str] | None = arg(None, "files or names to evaluate on")
    val_size: float = arg(
        0.0, "samples split off for evaluation: a fraction below 1, or a count", low=0
    )
    cutoff_len: int = arg(2048, "tokens a row, at most; dpo: of each answer with its prompt", low=1)
    packing: bool | None = arg(
        None, "pt: join documents and cut them (None: yes); sft, dpo: pack samples (None: no)"
    )
    neat_packing: bool = arg(
        False, "the same as packing for sft; for pt: documents do not see each other"
    )
    train_on_prompt: bool = arg(False, "the prompt carries loss too")
    mask_history: bool = arg(False, "only the last answer of a conversation carries loss")
    mix_weights: list[float] | None = arg(
        None, "relative sampling rate of each dataset (None: everything once an epoch)"
    )
    max_samples: int | None = arg(None, "only the first so many samples of each dataset", low=1)
    preprocessing_num_workers: int | None = arg(
        None, "processes that tokenise (None: chosen)", low=1
    )
    cache_dir: str | None = arg(None, "where tokenised data is kept (None: ~/.cache/mca_lite)")
    overwrite_cache: bool = arg(False, "tokenise again even where the cache has it")
    disable_shuffling: bool = arg(False, "train in the file's order")
    default_system: str | None = arg(None, "system message of conversations that have none")

    def _check(self, bad: set[str]) -> list[Problem]:
        return check_data(self, bad)


@dataclass(kw_only=True)
class FinetuningArguments(ArgumentGroup):
    """What training is meant: the objective, and which weights move."""

    stage: str = arg(
        "sft", "pt: plain text, sft: conversations, dpo: preference pairs", choices=OBJECTIVES
    )
    finetuning_type: Literal["full", "lora"] = arg(
        "full", "full: every weight is trained; lora: adapters are"
    )
    lora_rank: int = arg(8, "rank of the adapters", low=1)
    lora_alpha: float | None = arg(
        None, "adapters count alpha / rank (None: alpha is twice the rank)", above=0
    )
    lora_dropout: float | None = arg(
        None,
        "dropout on what goes into the adapters (None: 0, or that of adapter_name_or_path)",
        low=0,
        below=1,
    )
    lora_target: list[str] = arg(
        ["all"],
        "all (every linear layer but the head), or names of Hugging Face or megatron, or patterns",
    )
    use_rslora: bool = arg(False, "adapters count alpha / sqrt(rank)")
    modules_to_save: list[str] | None = arg(
        None, "modules trained whole beside the adapters, such as lm_head"
    )
    adapter_name_or_path: str | None = arg(
        None, "a folder in PEFT's format: its adapter is trained further"
    )
    save_merged_model: bool = arg(
        False, "write the model with the adapters in its weights too, to output_dir/merged"
    )
    pref_loss: str = arg(
        "sigmoid", "for stage dpo: sigmoid is DPO, orpo needs no reference", choices=LOSSES
    )
    pref_beta: float = arg(
        0.1, "how strongly the reference holds, or the weight of orpo's odds ratio", above=0
    )
    pref_ftx: float = arg(
        0.0, "weight of the sft term: the mean loss of a token of the chosen response", low=0
    )
    dpo_label_smoothing: float = arg(
        0.0, "the share of pairs thought to be swapped", low=0, below=0.5
    )
    ref_model: str | None = arg(
        None,
        "cached: scored before training; adapter: adapters off; model, or a folder: a second copy (None: chosen)",
    )

    def _check(self, bad: set[str]) -> list[Problem]:
        return check_finetuning(self, bad) + check_objective_keys(self, bad)


@dataclass(kw_only=True)
class UseMcaArguments(ArgumentGroup):
    """Which backend trains."""

    use_mca: bool = arg(True, "true: megatron-core; false: plain torch DDP")


@dataclass(kw_only=True)
class TrainingArguments(ArgumentGroup):
    """How it is trained: batches, optimizer, cadence, precision and parallel layout.

    The constructor takes keywords only and raises ConfigError (a ValueError) that lists all problems. Under torchrun
    the layout must divide the world. `gradient_accumulation_steps`, `per_device_eval_batch_size`, `eval_steps`,
    `recompute_method` and `recompute_num_layers` hold the values in effect afterwards; `resume_from_checkpoint` is
    None, "auto" or a path.
    """

    # output and cadence
    output_dir: str = arg(MISSING, "the folder for checkpoints, logs and the trained model")
    overwrite_output_dir: bool = arg(False, "train into a folder that is not empty")
    logging_steps: int = arg(10, "steps between two lines of the log", low=1)
    eval_strategy: Literal["no", "steps", "epoch"] = arg("no", "when to evaluate")
    eval_steps: int | None = arg(None, "steps between evaluations (None: logging_steps)", low=1)
    save_strategy: Literal["no", "steps", "epoch"] = arg("steps", "when to save a checkpoint")
    save_steps: int = arg(500, "steps between checkpoints", low=1)
    save_total_limit: int | None = arg(None, "checkpoints that are kept (None: all)", low=1)
    save_only_model: bool = arg(
        False, "checkpoints without optimizer state: they cannot be resumed from"
    )
    async_save: bool = arg(
        False,
        "write checkpoints in the background, from copies in host memory; a crash costs one interval and the time of a write",
    )
    save_hf_checkpoints: bool = arg(
        False, "put the model in Hugging Face's format into each checkpoint too, as hf/"
    )
    save_hf_model: bool = arg(True, "write the trained model in Hugging Face's format at the end")
    max_shard_size: str = arg(
        "5GB", "largest file of that model: a number of bytes with KB, MB, GB, KiB, MiB, GiB"
    )
    load_best_model_at_end: bool = arg(False, "end with the checkpoint that evaluated best")
    metric_for_best_model: str = arg("loss", "the metric that decides which one is best")
    greater_is_better: bool | None = arg(
        None, "whether that metric should grow (None: from its name)"
    )
    early_stopping_patience: int | None = arg(
        None, "stop after so many evaluations without progress", low=1
    )
    early_stopping_threshold: float = arg(0.0, "the least change that counts as progress", low=0)
    resume_from_checkpoint: str | None = arg(
        None, "auto: the newest in output_dir; a path; false: start anew"
    )
    report_to: list[str] = arg([], "none, tensorboard, wandb")
    run_name: str | None = arg(None, "the run's name in wandb")
    plot_loss: bool = arg(False, "draw training_loss.png")
    disable_tqdm: bool | None = arg(None, "no progress bar (None: a bar where there is a terminal)")

    # batches and length
    per_device_train_batch_size: int = arg(1, "samples of a micro-batch", low=1)
    per_device_eval_batch_size: int | None = arg(
        None, "the same for evaluation (None: as in training)", low=1
    )
    gradient_accumulation_steps: int | None = arg(
        None, "micro-batches a step on each data parallel rank (None: 1)", low=1
    )
    global_batch_size: int | None = arg(
        None, "samples a step in all: gradient_accumulation_steps follows from it", low=1
    )
    num_train_epochs: float = arg(3.0, "times that the data is seen", above=0)
    max_steps: int = arg(-1, "optimizer steps, instead of num_train_epochs (-1: not used)", low=-1)
    seed: int = arg(42, "of weights, data order and dropout", low=0)
    data_seed: int | None = arg(None, "of the data order (None: seed)", low=0)
    dataloader_num_workers: int = arg(0, "processes that load data, on each rank", low=0)
    ddp_timeout: int = arg(1800, "seconds that a rank waits for the others", low=1)

    # optimizer and schedule
    learning_rate: float = arg(5e-5, "the highest learning rate", low=0)
    lr_scheduler_type: str = arg("linear", "shape of the learning rate after the warm-up")
    lr_scheduler_kwargs: dict[str, Any] = arg(
        {}, "min_lr, min_lr_rate, num_decay_steps, num_stable_steps, decay_type"
    )
    warmup_steps: float = arg(
        0, "steps in which the learning rate grows; below 1: a fraction of all steps", low=0
    )
    warmup_ratio: float = arg(0.0, "the same as a fraction of all steps", low=0, high=1)
    weight_decay: float = arg(0.0, "decoupled weight decay; norms and biases have none", low=0)
    optim: str = arg("adam", "adam (adamw_torch, adamw_torch_fused are the same) or sgd")
    sgd_momentum: float = arg(0.9, "for optim: sgd", low=0, below=1)
    adam_beta1: float = arg(0.9, "decay of the mean of gradients", low=0, below=1)
    adam_beta2: float = arg(0.999, "decay of the mean of squared gradients", low=0, below=1)
    adam_epsilon: float = arg(1e-8, "added to the root of the second moment", above=0)
    max_grad_norm: float = arg(1.0, "gradients are scaled down to this norm (0: never)", low=0)
    calculate_per_token_loss: bool = arg(
        True, "mean over the tokens of the global batch; false: mean of micro-batches' means"
    )
    log_num_zeros_in_grad: bool = arg(False, "count the gradient's zeros")
    loss_chunk_size: int = arg(1024, "rows of logits that are held at once", low=1)

    # precision
    bf16: bool = arg(False, "bfloat16 weights and activations, fp32 master weights")
    fp16: bool = arg(False, "float16 with loss scaling")
    loss_scale: float | None = arg(None, "a constant loss scale (None: it adapts)", above=0)
    initial_loss_scale: float = arg(2.0**16, "where it starts", above=0)
    min_loss_scale: float = arg(1.0, "where it ends to shrink", above=0)
    loss_scale_window: int = arg(1000, "steps without overflow before it doubles", low=1)
    hysteresis: int = arg(2, "overflows before it halves", low=1)

    # parallel layout
    tensor_model_parallel_size: int = arg(1, "ranks that share each matrix", low=1)
    pipeline_model_parallel_size: int = arg(1, "ranks that share the layers", low=1)
    virtual_pipeline_model_parallel_size: int | None = arg(
        None, "chunks of layers on each pipeline rank", low=1
    )
    context_parallel_size: int = arg(1, "ranks that share each sequence", low=1)
    expert_model_parallel_size: int = arg(1, "ranks that share the experts", low=1)
    expert_tensor_parallel_size: int | None = arg(
        None, "ranks that share each expert's matrices", low=1
    )
    sequence_parallel: bool = arg(
        False, "share the activations of norms and dropout among the tensor parallel ranks"
    )
    pipeline_model_parallel_layout: str | None = arg(
        None, 'layers of each stage, such as "Et*3|t*4|t*3L"'
    )
    variable_seq_lengths: bool = arg(
        False, "pipeline stages exchange shapes, so that micro-batches may differ in length"
    )
    sequence_packing: bool = arg(False, "pack the samples of a micro-batch into one row")
    use_distributed_optimizer: bool = arg(
        False, "share optimizer state among the data parallel ranks"
    )
    overlap_grad_reduce: bool = arg(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = arg(False, "gather parameters during the forward pass")
    ddp_bucket_size: int | None = arg(
        None, "parameters a gradient bucket (None: megatron's choice)", low=1
    )
    grad_reduce_in_fp32: bool = arg(True, "accumulate and reduce gradients in fp32")
    optimizer_cpu_offload: bool = arg(False, "optimizer state and step on the CPU")
    optimizer_offload_fraction: float = arg(1.0, "the part of it that is there", low=0, high=1)

    # memory, kernels and the model
    recompute_granularity: Literal["full", "selective"] | None = arg(
        None, "activations computed again in the backward pass"
    )
    recompute_method: Literal["uniform", "block"] | None = arg(None, "for full (None: uniform)")
    recompute_num_layers: int | None = arg(
        None, "for full: layers of a unit, or of a stage (None: 1)", low=1
    )
    recompute_modules: list[str] | None = arg(
        None, "for selective: core_attn, mlp, layernorm, moe, shared_experts"
    )
    distribute_saved_activations: bool = arg(
        False, "share recomputation's inputs among the tensor parallel ranks"
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = arg(
        "auto", "auto: TE where it works on CUDA"
    )
    attention_dropout: float | None = arg(None, "None: the model's own", low=0, below=1)
    hidden_dropout: float | None = arg(None, "None: the model's own", low=0, below=1)
    bias_activation_fusion: bool | None = arg(None, "None: chosen")
    bias_dropout_fusion: bool | None = arg(None, "None: chosen")
    apply_rope_fusion: bool | None = arg(None, "None: chosen")
    moe_grouped_gemm: bool = arg(
        True, "one grouped matrix product for the experts; false: one after another"
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = arg(
        "alltoall", "how tokens reach their experts' ranks"
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = arg(
        "aux_loss", "over a micro-batch's tokens, or over each row's"
    )
    moe_aux_loss_coeff: float = arg(0.0, "weight of that loss", low=0)
    moe_z_loss_coeff: float | None = arg(None, "weight of the routers' z loss", low=0)
    moe_router_dtype: Literal["fp32", "fp64"] = arg(
        "fp32", "precision of the routers' logits and scores"
    )
    mtp_num_layers: int | None = arg(
        None, "layers for multi-token prediction that are trained; 0 or none", low=0
    )
    mtp_loss_scaling_factor: float = arg(0.1, "weight of all their losses together", low=0)
    moe_router_bias_update_rate: float = arg(
        0.0, "step of the bias that evens out the experts' loads", low=0
    )
    moe_shared_expert_overlap: bool = arg(False, "run shared experts beside the dispatch")
    moe_permute_fusion: bool = arg(False, "Transformer Engine's kernels for the dispatch")
    additional_configs: dict[str, Any] = arg({}, "further fields of megatron's TransformerConfig")

    def _resolve(self, bad: set[str]) -> list[Problem]:
        # YAML has true and false for it, which the type, a path, does not know.
        words = {
            "true": "auto",
            "yes": "auto",
            "auto": "auto",
            "false": None,
            "no": None,
            "none": None,
        }
        value = self.resume_from_checkpoint
        self.resume_from_checkpoint = words.get(str(value).lower(), value)
        return super()._resolve(bad)

    def _check(self, bad: set[str]) -> list[Problem]:
        problems = normalise_training(self, bad)
        bad = bad | {problem.key for problem in problems}
        # Without torchrun the arguments may be made for a world that is not there: parse_args decides then.
        if "WORLD_SIZE" in os.environ:
            problems += check_world(self, bad)
        return problems + check_training(self, bad | {problem.key for problem in problems})

    @property
    def world_size(self) -> int:
        """Processes of the run: torchrun's WORLD_SIZE, 1 without it."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model together: tp x pp x cp."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model in the world; 1 where it holds less than one (arguments made without torchrun)."""
        return max(1, self.world_size // self.model_parallel_size)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch: per_device_train_batch_size."""
        return self.per_device_train_batch_size

    @property
    def train_global_batch_size(self) -> int:
        """Samples an optimizer step over all ranks: micro-batch x gradient_accumulation_steps x data parallel size."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.data_parallel_size


@dataclass(kw_only=True)
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments under the name that fine-tuning scripts use."""


@dataclass
class RunArguments:
    """All groups of a run, and `warnings`: the lines that rank 0 should print, each about values without effect."""

    model: ModelArguments
    data: DataArguments
    finetuning: FinetuningArguments
    training: TrainingArguments
    backend: UseMcaArguments
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        objective = OBJECTIVES[self.finetuning.stage]
        if self.data.packing is None:
            self.data.packing = objective.joins_documents
        if self.data.neat_packing or (self.data.packing and not objective.joins_documents):
            self.training.sequence_packing = (
                True  # packs of samples reach the model with their borders
            )

    @property
    def groups(self) -> tuple[ArgumentGroup, ...]:
        """The five groups, in the order in which they are written to a file."""
        return self.model, self.finetuning, self.data, self.training, self.backend

    def to_yaml_dict(self) -> dict[str, Any]:
        """Flat key -> value in effect, without the keys that are None (None and absent mean the same). Parsed again in
        a world of the same size it gives the same run; with global_batch_size it holds for any world, because
        gradient_accumulation_steps is left to be derived."""
        values = {
            key: value
            for group in self.groups
            for key, value in group.to_dict().items()
            if value is not None
        }
        if self.training.global_batch_size is not None:
            del values["gradient_accumulation_steps"]
        return values

    def save(self, path: str | os.PathLike) -> None:
        """Writes to_yaml_dict() as YAML to the file `path`, whose folder is made where it is absent."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.to_yaml_dict(), sort_keys=False, allow_unicode=True, width=120)
        path.write_text(text, encoding="utf-8")


def parse_args(argv: list[str] | None = None, *, needs_world: bool = True) -> RunArguments:
    """The arguments of a run from the words of its command line (sys.argv where argv is None), see ArgumentParser.

    The model's config.json is read too (from its folder, or the hub) and checked against the layout. needs_world=False
    is for commands that only look at a configuration: without torchrun the layout need not fit this one process then.
    `-h` and `--help` print the keys and leave. Raises ConfigError with all problems of the run.
    """
    parser = ArgumentParser(
        [ModelArguments, DataArguments, FinetuningArguments, TrainingArguments, UseMcaArguments]
    )
    argv = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(argv):
        print(parser.format_help())
        raise SystemExit(0)
    values, problems = parser.read(argv)
    switched_off = _use_torch_backend(values)
    parsed = parser.build(values)
    model, data, finetuning, training, backend = parsed.groups
    run = RunArguments(model, data, finetuning, training, backend, parsed.warnings)
    problems += parsed.problems
    bad = {problem.key for problem in problems}
    if needs_world and "WORLD_SIZE" not in os.environ:
        problems += check_world(training, bad)
    problems += check_run(run, bad) + check_objective_run(run, bad) + check_frozen_bias(run, bad)
    if model.model_name_or_path:
        numbers, found = read_model_numbers(model)
        problems += found + check_model(numbers, training)
    if problems:
        raise ConfigError(problems)
    if switched_off:
        run.warnings.append(
            f"use_mca is false: plain torch DDP does without {', '.join(switched_off)}"
        )
    if training.max_steps > 0 and "num_train_epochs" in parsed.given:
        run.warnings.append(f"num_train_epochs is not used: max_steps is {training.max_steps}")
    if training.eval_strategy == "no" and (data.val_size > 0 or data.eval_dataset):
        run.warnings.append(
            "nothing is evaluated although there is data for it: eval_strategy is no"
        )
    return run


def _use_torch_backend(values: dict[str, Any]) -> list[str]:
    """Where use_mca is false, takes the keys NOT_FOR_TORCH out of values; returns those that had another value."""
    try:
        if cast(values.get("use_mca", True), bool):
            return []
    except ValueError:
        return []  # shown with the other problems
    changed = []
    for item in dataclasses.fields(TrainingArguments):
        if item.name not in NOT_FOR_TORCH or values.get(item.name) is None:
            continue
        try:
            if cast(values[item.name], type_hints(TrainingArguments)[item.name]) != default_of(
                item
            ):
                changed.append(item.name)
            del values[item.name]
        except ValueError:
            pass  # not even a value of its type: it stays, to be shown with the other problems
    return changed


def read_model_numbers(model: ModelArguments) -> tuple[dict[str, Any], list[Problem]]:
    """The model's config.json, or mca_config.json where there is only that; {} and a Problem where there is neither."""
    name = model.model_name_or_path
    if (Path(name) / ADAPTER_CONFIG_NAME).is_file() and not (Path(name) / HF_CONFIG_NAME).is_file():
        reason = "it holds adapters, without the model that they belong to"
        return {}, [
            Problem(
                "model_name_or_path", name, reason, f"that model, and adapter_name_or_path: {name}"
            )
        ]
    try:
        path = Path(name) / MCA_CONFIG_NAME
        if (Path(name) / HF_CONFIG_NAME).is_file() or not path.is_file():
            from transformers.utils import (
                cached_file,  # seconds to import: only once the rest could be read
            )

            path = cached_file(name, HF_CONFIG_NAME, revision=model.model_revision)
        numbers = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(numbers, dict):
            raise ValueError("expected a JSON object")
    except (
        Exception
    ) as error:  # whatever a hub, a network or a file comes up with is a problem of this key
        reason = f"its {HF_CONFIG_NAME} cannot be read: {str(error).strip().splitlines()[0] if str(error) else repr(error)}"
        return {}, [
            Problem(
                "model_name_or_path",
                name,
                reason,
                f"a folder with {HF_CONFIG_NAME}, or a model of the hub",
            )
        ]
    return numbers, []
