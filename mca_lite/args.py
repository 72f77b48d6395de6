"""The core's configuration keys in five dataclasses, and parse_args, which fills these and the
groups of parts.

Keys are flat, most with their name in Hugging Face, LLaMA-Factory or megatron-core. A group's
constructor casts, normalises and checks values, and raises the problems found together; parse_args
does so for all groups of a run. torch, megatron-core and transformers are imported only when
needed, so that a typing error shows without waiting for them.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import math
import re
import sys
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml

from . import parts, world
from .args_rules import (
    BACKEND,
    check_data,
    check_objective_run,
    check_part_rules,
    check_run,
    normalise_data,
)
from .args_rules_model import check_config, check_layout
from .args_rules_training import (
    ADDITIONAL_FIELDS,
    SCHEDULES,
    check_training,
    check_world,
    normalise_training,
    parse_steps,
)
from .args_values import (
    ArgumentGroup,
    amount,
    arg,
    count,
    default_of,
    flag,
    optional,
    read_config_file,
)
from .errors import ConfigError, Judge, Problem
from .files import PathLike, parse_size, read_model_config, write_file
from .tables import (
    ALIASES,
    FINETUNING,
    KEY_GROUPS,
    MEANINGS,
    NOT_OF_TRAINING,
    OBJECTIVES,
    OPTIMIZER_ALIASES,
    OPTIMIZERS,
    TEMPLATES,
    foreign_key,
    register_keys,
)

# -- groups of keys


def mca(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field for a configuration key that only the megatron-core backend uses. With
    use_mca: false, parse_args() resets the key to its default. default: the key's default. text:
    the key's help. metadata: other options of arg(), which makes the field."""
    return arg(default, text, torch=False, **metadata)


def of_config(default: Any, text: str, model: bool | str = True, **metadata: Any) -> Any:
    """A dataclass field for a configuration key that only megatron-core uses. The key sets the
    field of McaModelConfig with the same name. model: True sets that field unless the key is None,
    for which some fields have a chosen default; "always" sets it to None too. default: the key's
    default. text: the key's help. metadata: other options of arg(), which makes the field."""
    return mca(default, text, model=model, **metadata)


@dataclass(kw_only=True)
class ModelArguments(ArgumentGroup):
    """Model: its folder or hub name, initial weights and new tokens."""

    model_name_or_path: str = arg(MISSING, "folder with config.json, or model of the hub")
    train_from_scratch: bool = flag("random weights in place of those of model_name_or_path")
    trust_remote_code: bool = flag("run code from the model's folder (tokenizers)")
    model_revision: str | None = optional("branch, tag or commit on the hub")
    resize_vocab: bool = flag("grow embedding and head to the tokenizer's size")
    add_tokens: list[str] | None = optional("new tokens, with new rows in embedding and head")
    add_special_tokens: list[str] | None = optional("new special tokens, skipped in decoded text")


@dataclass(kw_only=True)
class DataArguments(ArgumentGroup):
    """Datasets: their files, mix, tokenising, chat template and packing."""

    dataset: list[str] = arg(
        [], "required to train: files, or names in dataset_info.json; a list, or joined by commas"
    )
    dataset_dir: str = arg("data", "folder of dataset_info.json")
    eval_dataset: list[str] | None = optional("files or names for evaluation")
    eval_on_each_dataset: bool = flag(
        "a loss of each eval_dataset, eval_<name>_loss, beside eval_loss"
    )
    val_size: float = amount(0.0, "samples held out for evaluation: a fraction below 1, or a count")
    cutoff_len: int = count(2048, "maximum tokens of a row; dpo: of an answer with its prompt")
    cutoff_rule: str = arg(
        "end",
        "where samples above cutoff_len are cut: at the end (pairs: at the beginning of the "
        "prompt), or each prompt and answer in proportion, as LLaMA-Factory does",
        choices=("end", "proportion"),
    )
    packing: bool | None = optional(
        "pt: join and cut documents (None: true); sft, dpo: pack samples (None: false)"
    )
    neat_packing: bool = flag(
        "sft, dpo: like packing; pt: pack documents, each cut to cutoff_len, apart from each other"
    )
    train_on_prompt: bool = flag("loss on the prompt too")
    mask_history: bool = flag("loss on the last answer of a conversation only")
    mix_strategy: Literal["concat", "interleave_under", "interleave_over", "interleave_once"] = arg(
        "concat",
        "epoch of several datasets: all samples, or datasets in turns until the first is exhausted "
        "(under), until all are, with repeats (over), or without repeats (once)",
    )
    mix_weights: list[float] | None = optional(
        "relative sampling rate of each dataset, for interleave (None: round robin)"
    )
    sample_by: Literal["line", "document"] = arg(
        "line", "document of a .txt file: each line, or the whole file"
    )
    on_bad_record: Literal["stop", "skip"] = arg(
        "stop", "on an unusable record stop, or skip it: at most a tenth of a dataset"
    )
    max_samples: int | None = count(None, "maximum samples of each dataset, from its start")
    preprocessing_num_workers: int | None = count(
        None, "tokenising processes (None: chosen)", high=1024
    )
    cache_dir: str | None = optional(
        "folder of tokenised data (None: $MCA_LITE_CACHE, or ~/.cache/mca_lite)"
    )
    overwrite_cache: bool = flag("tokenise again, ignoring the cache")
    disable_shuffling: bool = flag("train in file order")
    default_system: str | None = optional("system message of conversations without one")
    chat_template: str | None = optional(
        f"{', '.join(TEMPLATES)}, a jinja file, or its text (None: the tokenizer's); "
        "tools are rendered as Qwen's text if the template has no place for them"
    )
    template: str | None = optional(
        "LLaMA-Factory's name of a chat template, for a tokenizer without one"
    )
    enable_thinking: bool | None = optional(
        "enable_thinking of the chat template (None: not passed)"
    )
    end_of_answer: list[str] = arg(
        [],
        "tokens that end an answer if the template writes nothing after it: the one that follows "
        "it (GLM: <|user|>, <|observation|>), otherwise the first, which is added",
    )
    ignore_message_keys: list[str] = arg([], "unknown keys of messages to leave out")
    pair_weight: str | None = optional(
        "dpo, rm: field of records with the weight of the pair's loss (None: 1)"
    )
    pair_margin: str | None = optional(
        "dpo, rm: field of records with the margin between the rewards of the answers (None: 0)"
    )

    normalise = normalise_data
    check = check_data


@dataclass(kw_only=True)
class FinetuningArguments(ArgumentGroup):
    """Training objective, and which weights are trained."""

    stage: str = arg(
        "sft",
        "pt: plain text, sft: conversations, dpo: preference pairs, kto: answers with a label, "
        "rm: a reward model of pairs, distill: a teacher's answers, policy, grpo, ppo: rollouts",
        choices=OBJECTIVES,
        remedy="stage: sft | dpo | kto | rm | distill | policy: of given rollouts, nothing is "
        "generated while training",
    )
    finetuning_type: str = arg(
        "full",
        "full: train every weight; lora (LLaMA-Factory's default): train adapters; freeze: train "
        "some layers",
        choices=FINETUNING,
        remedy="finetuning_type: lora for adapters, full or freeze",
    )


@dataclass(kw_only=True)
class UseMcaArguments(ArgumentGroup):
    """Backend: megatron-core or plain torch."""

    use_mca: bool = arg(True, "true: megatron-core; false: plain torch DDP")


@dataclass(kw_only=True)
class TrainingArguments(ArgumentGroup):
    """Batches, optimizer, cadence, precision and parallel layout.

    The constructor takes output_dir and keywords, and raises one ConfigError (a ValueError) with
    the problems found. Under torchrun the number of processes must be a multiple of tensor x
    pipeline x context parallel size. Afterwards keys such as `eval_steps` that were None have the
    value in effect; `resume_from_checkpoint` is None, "auto" or a path.
    """

    # output and cadence
    output_dir: str = arg(MISSING, "folder for checkpoints, logs and the trained model")
    overwrite_output_dir: bool = flag("train into a folder that is not empty")
    do_train: bool = arg(True, "train; false with do_eval: evaluate only, without an export")
    do_eval: bool = flag("evaluate at the end too")
    do_predict: bool = flag(
        "write the log-probability of each evaluation sample to predictions.jsonl"
    )
    predict_with_generate: bool = flag(
        "sft: generate answers to the evaluation samples: exact_match, rouge_l"
    )
    max_new_tokens: int = count(1024, "maximum tokens of a generated answer")
    generation_num_samples: int | None = count(
        None, "maximum answered samples of each set (None: all)"
    )
    logging_steps: int = count(10, "steps between log lines")
    eval_strategy: Literal["no", "steps", "epoch"] = arg("no", "evaluation by steps or epochs")
    eval_steps: int | None = count(None, "steps between evaluations (None: logging_steps)")
    save_strategy: Literal["no", "steps", "epoch"] = arg("steps", "checkpoints by steps or epochs")
    save_steps: int = count(500, "steps between checkpoints")
    save_total_limit: int | None = count(None, "maximum number of checkpoints (None: all)")
    save_only_model: bool = flag("checkpoints without optimizer state; a signal's has it")
    async_save: bool = flag("write checkpoints in the background, from host memory")
    save_hf_checkpoints: bool = flag(
        "also write the model in Hugging Face's format into each checkpoint, as hf/"
    )
    save_hf_model: bool = arg(True, "write the trained model in Hugging Face's format at the end")
    max_shard_size: str = arg(
        "5GB",
        "maximum size of a weight file: bytes, or with KB, MB, GB, KiB, MiB, GiB",
        check=parse_size,
    )
    load_best_model_at_end: bool = flag("end with the weights of the best evaluation")
    metric_for_best_model: str = arg("loss", "metric of the best checkpoint")
    greater_is_better: bool | None = optional("a greater metric is better (None: from its name)")
    early_stopping_patience: int | None = count(
        None, "evaluations without progress before the run stops"
    )
    early_stopping_threshold: float = amount(0.0, "minimum change for progress")
    resume_from_checkpoint: str | None = optional(
        "auto: the newest in output_dir; a path; false: start anew",
        # YAML files have true and false as well
        words=dict.fromkeys(("true", "yes"), "auto") | dict.fromkeys(("false", "no", "none")),
    )
    report_to: list[Literal["none", "all", "tensorboard", "wandb"]] = arg(
        [], "trackers: none, tensorboard, wandb"
    )
    run_name: str | None = optional("name of the run in wandb")
    plot_loss: bool = flag("draw training_loss.png during the run")
    html_report: bool = arg(True, "write report.html during the run")
    disable_tqdm: bool | None = optional("no progress bar (None: a bar in a terminal)")
    profile_steps: str | None = optional(
        "profiled steps, such as 10-12: traces in output_dir/profile, a table", check=parse_steps
    )

    # batches and length
    per_device_train_batch_size: int = count(1, "samples of a micro-batch", high=100_000)
    per_device_eval_batch_size: int | None = count(
        None, "samples of an evaluation micro-batch (None: as in training)"
    )
    gradient_accumulation_steps: int | None = count(
        None, "micro-batches a step on each data parallel rank (None: from global_batch_size, or 1)"
    )
    global_batch_size: int | None = count(
        None, "samples of a step on all ranks, or packs of them with packing"
    )
    num_train_epochs: float = arg(3.0, "passes over the data", above=0, high=1e6)
    max_steps: int = arg(-1, "optimizer steps, in place of num_train_epochs (-1: unset)", low=-1)
    seed: int = amount(42, "seed of weights, data order and dropout", high=2**32 - 1)
    deterministic: bool = flag("the same bits in every run of a layout; slower on a GPU")
    data_seed: int | None = amount(None, "seed of the data order (None: seed)", high=2**32 - 1)
    dataloader_num_workers: int = amount(0, "data loading processes on each rank", high=256)
    ddp_timeout: int = count(1800, "timeout of collectives in seconds", high=10**9)
    hang_timeout: int = count(
        300, "seconds without progress before late ranks are named: at most ddp_timeout / 2"
    )

    # optimizer and schedule
    learning_rate: float = amount(5e-5, "peak learning rate", optimizer="lr")
    lr_scheduler_type: str = arg(
        "linear",
        "schedule of the learning rate; constant has no warm-up, constant_with_warmup has",
        choices=SCHEDULES,
    )
    lr_scheduler_kwargs: dict[str, Any] = arg(
        {}, "min_lr, min_lr_rate, num_decay_steps, num_stable_steps, decay_type"
    )
    warmup_steps: float = amount(
        0, "warm-up steps of the learning rate; below 1: a fraction of all steps"
    )
    warmup_ratio: float = amount(0.0, "warm-up as a fraction of all steps", high=1)
    weight_decay: float = amount(
        0.0, "weight decay, decoupled except in sgd; none on norms and biases", optimizer=True
    )
    optim: str = arg(
        "adam",
        "adam (adamw_torch, adamw_torch_fused are the same), muon or sgd",
        choices=OPTIMIZERS,
        words=OPTIMIZER_ALIASES,
        optimizer="optimizer",
    )
    sgd_momentum: float = amount(0.9, "momentum of sgd", below=1, optimizer=True)
    adam_beta1: float = amount(0.9, "decay of Adam's first moment", below=1, optimizer=True)
    adam_beta2: float = amount(0.999, "decay of Adam's second moment", below=1, optimizer=True)
    adam_epsilon: float = arg(
        1e-8, "epsilon added to the root of the second moment", above=0, optimizer="adam_eps"
    )
    muon_momentum: float = amount(0.95, "momentum of muon", below=1)
    muon_nesterov: bool = arg(True, "Nesterov momentum of muon")
    muon_ns_steps: int = count(5, "Newton-Schulz iterations of muon", below=100)
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = arg(
        "match_rms_adamw", "size of muon's updates: as AdamW's, or by the shape of a matrix"
    )
    exp_avg_dtype: Literal["fp32", "bf16", "8bit"] = arg("fp32", "dtype of Adam's first moment")
    exp_avg_sq_dtype: Literal["fp32", "bf16", "8bit"] = arg(
        "fp32", "dtype of Adam's second moment; bf16 is rounded stochastically"
    )
    max_grad_norm: float = amount(1.0, "gradient clipping norm (0: none)", optimizer="clip_grad")
    calculate_per_token_loss: bool = arg(
        True, "mean over the global batch's tokens; false: of micro-batches' means", model=True
    )
    log_num_zeros_in_grad: bool = flag("count the gradient's zeros", optimizer=True)
    loss_chunk_size: int | None = count(
        None, "rows of logits in memory at once (None: 4096 on a GPU, 1024 on a CPU)", model=True
    )
    check_for_nan_in_loss_and_grad: bool = arg(
        True, "check loss and gradient for NaN and Inf before each update"
    )
    nan_policy: Literal["stop", "skip"] = arg(
        "stop", "on a non-finite update stop, or skip and count it"
    )
    grad_norm_skip_threshold: float | None = optional(
        "skip updates whose gradient norm is larger (None: none)", above=0
    )
    nan_skip_limit: int = count(
        10, "maximum updates skipped by nan_policy: skip, and by grad_norm_skip_threshold in a row"
    )

    # precision
    bf16: bool = flag("bfloat16 weights and activations, fp32 master weights", model=True)
    fp16: bool = flag("float16 with loss scaling", model=True)
    fp8: Literal["hybrid", "e4m3"] | None = of_config(
        None,
        "8-bit matmuls of Transformer Engine; hybrid: gradients as e5m2",
        model="always",
        words={"true": "hybrid", "false": None},  # LLaMA-Factory's
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise"] | None = of_config(
        None, "scales by tensor, by its past values, by blocks of 128 (None: tensorwise)"
    )
    first_last_layers_bf16: bool = of_config(False, "bf16 for first and last layers under fp8")
    num_layers_at_start_in_bf16: int = of_config(1, "first layers in bf16", low=0)
    num_layers_at_end_in_bf16: int = of_config(1, "last layers in bf16", low=0)
    loss_scale: float | None = optional(
        "constant loss scale (None: dynamic)", above=0, optimizer=True
    )
    initial_loss_scale: float = arg(2.0**16, "initial loss scale", above=0, optimizer=True)
    min_loss_scale: float = arg(1.0, "minimum loss scale", above=0, optimizer=True)
    loss_scale_window: int = count(
        1000, "steps without overflow before the scale doubles", optimizer=True
    )
    hysteresis: int = count(2, "overflows before the scale halves", optimizer=True)

    # parallel layout
    tensor_model_parallel_size: int = of_config(1, "ranks that split each matrix", low=1)
    pipeline_model_parallel_size: int = of_config(1, "ranks that split the layers", low=1)
    virtual_pipeline_model_parallel_size: int | None = of_config(
        None, "chunks of layers on each pipeline rank", low=1, model="always"
    )
    context_parallel_size: int = of_config(1, "ranks that split each sequence", low=1)
    expert_model_parallel_size: int = of_config(1, "ranks that split the experts", low=1)
    expert_tensor_parallel_size: int | None = of_config(
        None, "ranks that split each expert's matrices", low=1, model="always"
    )
    sequence_parallel: bool = of_config(
        False, "split activations of norms and dropout over tensor parallel ranks"
    )
    tp_comm_overlap: bool = of_config(
        False, "overlap sequence-parallel communication with matmuls, on GPUs of one host"
    )
    pipeline_model_parallel_layout: str | None = of_config(
        None,
        'layers of each stage, such as "Et*3|t*4|t*3L"; auto: stages of about equal time',
        model="always",
        check=check_layout,
    )
    variable_seq_lengths: bool = of_config(
        False, "micro-batches of different lengths: pipeline stages exchange shapes"
    )
    sequence_packing: bool = flag(
        "join the samples of a micro-batch; packing fills rows of cutoff_len from all data"
    )
    use_distributed_optimizer: bool = mca(
        False, "shard optimizer state over data parallel ranks", optimizer=True, ddp=True
    )
    overlap_grad_reduce: bool = mca(False, "reduce gradients during the backward pass", ddp=True)
    overlap_param_gather: bool = mca(
        False, "gather parameters during the forward pass", optimizer=True, ddp=True
    )
    ddp_bucket_size: int | None = mca(
        None, "parameters of a gradient bucket (None: megatron's choice)", low=1, ddp="bucket_size"
    )
    grad_reduce_in_fp32: bool = mca(True, "accumulate and reduce gradients in fp32", ddp=True)
    optimizer_cpu_offload: bool = mca(False, "optimizer state and step on the CPU")
    optimizer_offload_fraction: float = mca(
        1.0, "fraction of the optimizer state on the CPU", low=0, high=1
    )

    # memory, kernels and the model
    recompute_granularity: Literal["full", "selective", "auto"] | None = of_config(
        None,
        "recomputation of activations in the backward pass; auto: of as many whole layers as "
        "memory needs",
        model="always",
        words={"true": "full", "false": None},  # values of gradient_checkpointing
    )
    recompute_method: Literal["uniform", "block"] | None = of_config(
        None, "full recomputation by uniform units or blocks (None: uniform)", model="always"
    )
    recompute_num_layers: int | None = of_config(
        None, "full: layers of a unit, or of a stage (None: 1)", low=1, model="always"
    )
    recompute_modules: (
        list[Literal["core_attn", "mlp", "layernorm", "moe", "shared_experts"]] | None
    ) = of_config(None, "selective: core_attn, mlp, layernorm, moe, shared_experts", model="always")
    recompute_keep: Literal["core_attn"] | None = of_config(
        None, "full: results of kernels kept, not computed again: core_attn", model="always"
    )
    activation_offloading: bool = of_config(
        False, "full: activations kept for the backward pass wait in host memory"
    )
    mlp_chunk_size: int | None = of_config(
        None, "tokens of a rank in an MLP at once (None: all)", low=1, model="always"
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = of_config(
        "auto", "auto: Transformer Engine in bf16 or fp16, if installed and suitable for the model"
    )
    attention_dropout: float | None = of_config(
        None, "dropout of attention (None: the model's)", low=0, below=1
    )
    hidden_dropout: float | None = of_config(
        None, "dropout of activations (None: the model's)", low=0, below=1
    )
    torch_compile: bool | None = optional(
        "compile elementwise code between matmuls (None: on a GPU with a compiler)"
    )
    bias_activation_fusion: bool | None = of_config(
        None, "fused bias and activation (None: chosen)"
    )
    bias_dropout_fusion: bool | None = of_config(None, "fused bias and dropout (None: chosen)")
    apply_rope_fusion: bool | None = of_config(None, "fused rotary embedding (None: chosen)")
    moe_grouped_gemm: bool = of_config(True, "one grouped GEMM for all experts")
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = of_config(
        "alltoall", "exchange of tokens between expert ranks"
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = arg(
        "aux_loss", "load-balancing loss: over a micro-batch, or over each row", model=True
    )
    moe_aux_loss_coeff: float | None = amount(
        None, "weight of the load-balancing loss (None: router_aux_loss_coef; 0: none)", model=True
    )
    moe_z_loss_coeff: float | None = amount(None, "weight of the router z-loss", model="always")
    moe_router_dtype: Literal["fp32", "fp64"] = of_config(
        "fp32", "dtype of the router's logits and scores"
    )
    mtp_num_layers: int | None = amount(
        None, "multi-token prediction layers (None: the model's; 0: none)"
    )
    mtp_loss_scaling_factor: float = amount(
        0.1, "weight of the multi-token prediction loss", model=True
    )
    moe_router_bias_update_rate: float = amount(
        0.0, "update rate of the load-balancing router bias", model=True
    )
    moe_shared_expert_overlap: bool = of_config(False, "overlap shared experts with dispatch")
    moe_permute_fusion: bool = of_config(False, "Transformer Engine's fused permutation")
    additional_configs: dict[str, Any] = mca(
        {}, f"fields of megatron's TransformerConfig: {', '.join(ADDITIONAL_FIELDS)}"
    )

    normalise = normalise_training
    check = check_training

    def leave_out_megatron(self) -> None:
        """Reset the keys in `changed` that only megatron-core uses to their defaults, and take them
        out of `changed`, for a run on plain torch. A line in `notes` names each such key."""
        for item in dataclasses.fields(self):
            if item.name in self.changed and not item.metadata.get("torch", True):
                setattr(self, item.name, default_of(item))
                self.changed.remove(item.name)
                self.notes.append(f"{item.name}: no effect, since use_mca is false")

    @property
    def world_size(self) -> int:
        """Number of processes: the environment variable WORLD_SIZE, which launchers set; 1 without
        it."""
        return world.current().size

    @property
    def process_index(self) -> int:
        """This process's global rank: the environment variable RANK, which launchers set; 0 without
        it."""
        return world.current().rank

    @property
    def should_save(self) -> bool:
        """True on global rank 0."""
        return self.process_index == 0

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that compute one micro-batch together: tensor x pipeline x context
        parallel size."""
        tp = self.tensor_model_parallel_size
        pp = self.pipeline_model_parallel_size
        return tp * pp * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas: processes // model_parallel_size, at least 1."""
        return max(1, self.world_size // self.model_parallel_size)

    @property
    def device(self) -> Any:
        """The torch.device of this rank: its GPU with CUDA, otherwise the CPU."""
        from .parallel import device  # imported late: arguments are read without torch

        return device()

    @property
    def micro_batch_size(self) -> int:
        """Samples in a training micro-batch of one data-parallel rank: per_device_train_batch_size.
        With packing, packed rows are counted instead of samples."""
        return self.per_device_train_batch_size

    @property
    def order_seed(self) -> int:
        """The seed for the data order and for the split by val_size: data_seed, or seed if that is
        None."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def train_global_batch_size(self) -> int:
        """Samples of a full optimizer step over all ranks. With packing, packed rows are counted
        instead of samples. The last step of an epoch may have fewer."""
        steps = self.gradient_accumulation_steps or 1
        return self.micro_batch_size * steps * self.data_parallel_size

    def steps_of_run(self, steps_per_epoch: int) -> int:
        """Optimizer steps in a run: max_steps if it is above 0; otherwise num_train_epochs x
        steps_per_epoch, rounded up."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_train_epochs * steps_per_epoch)


@dataclass(kw_only=True)
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments under the name that fine-tuning scripts use."""


# -- the arguments of a run


@dataclass
class RunArguments:
    """Every group of configuration keys of a run. Reading args.learning_rate gives
    args.training.learning_rate. A key is None if only an optional part of the package defines it
    and that part is absent.

    parts: {name: group of keys} for the groups of optional parts and user scripts. warnings: notes
    for the user, such as keys without effect. model_config: values of the model's config.json or
    mca_config.json, or {} if it was not read."""

    model: ModelArguments
    data: DataArguments
    finetuning: FinetuningArguments
    training: TrainingArguments
    backend: UseMcaArguments
    parts: dict[str, ArgumentGroup] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    model_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        joins_documents = OBJECTIVES[self.finetuning.stage].joins_documents
        if self.data.packing is None:
            self.data.packing = joins_documents
        if self.data.neat_packing or (self.data.packing and not joins_documents):
            # the model must keep the samples of a pack apart
            self.training.sequence_packing = True

    def __getattr__(self, key: str) -> Any:
        for group in self.groups if key in key_fields() else ():
            if hasattr(group, key):
                return getattr(group, key)
        if key in parts.absent_keys():
            return None
        raise AttributeError(key)

    @property
    def groups(self) -> tuple[ArgumentGroup, ...]:
        """Every argument group of the run, in the order in which the groups were registered."""
        groups = dict(vars(self), **self.parts)
        return tuple(groups[name] for name in KEY_GROUPS if name in groups)

    @property
    def changed(self) -> list[str]:
        """Names of the keys that were set to another value than their default; required keys count
        too. Keys that were reset for plain torch (use_mca: false) are left out."""
        return [key for group in self.groups for key in group.changed]

    def with_keys(self, **values: Any) -> RunArguments:
        """A deep copy with the given keys set to other values. The values are not checked, and a
        key that no group has is ignored."""
        copied = copy.deepcopy(self)
        for group in copied.groups:
            vars(group).update({key: values[key] for key in values.keys() & vars(group).keys()})
        return copied

    def to_dict(self) -> dict[str, Any]:
        """The value in effect of each key of the run's groups: {key: value}."""
        return {key: getattr(self, key) for key in key_fields()}

    def to_yaml_dict(self) -> dict[str, Any]:
        """The run's keys for a configuration file: {key: value in effect}. Keys with None are left
        out, because an absent key means the same.

        If the file is read again with the same number of processes, it gives the same values. If
        global_batch_size is set, gradient_accumulation_steps is left out, so that it can follow
        from another number of processes."""
        values = {key: value for key, value in self.to_dict().items() if value is not None}
        if self.training.global_batch_size is not None:
            del values["gradient_accumulation_steps"]
        return values

    def save(self, path: PathLike) -> None:
        """Write to_yaml_dict() to the YAML file `path`; make its folder if absent."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.to_yaml_dict(), sort_keys=False, allow_unicode=True, width=120)
        write_file(path, text)


register_keys("model", ModelArguments)
register_keys("data", DataArguments)
register_keys("finetuning", FinetuningArguments)
parts.load("_keys", "_migration")
register_keys("training", TrainingArguments)
register_keys("backend", UseMcaArguments)
CORE_GROUPS = ("model", "data", "finetuning", "training", "backend")


def key_groups() -> tuple[type[ArgumentGroup], ...]:
    """The dataclasses of configuration keys: those of the core, of optional parts and of user
    scripts."""
    return tuple(row.group for row in KEY_GROUPS.values())


def key_fields() -> dict[str, dataclasses.Field[Any]]:
    """The dataclass fields of all configuration keys: {key: its field}."""
    return _fields_of(key_groups())


@functools.cache
def _fields_of(groups: tuple[type[ArgumentGroup], ...]) -> dict[str, dataclasses.Field[Any]]:
    return {item.name: item for group in groups for item in dataclasses.fields(group)}


def check_together(args: TrainingArguments, *, stage: str | None = None, **keys: Any) -> None:
    """Check training arguments together with keys of other argument groups. Each backend calls it,
    because its trainer may be built in Python, without parse_args. Raises ConfigError.

    keys: values of keys in other groups, or in place of those in args; any other key has its
    default. stage: the training objective ("dpo") whose rules are checked too; None skips these
    rules.
    """
    defaults = dict.fromkeys(parts.absent_keys())
    defaults |= {name: default_of(item) for name, item in key_fields().items()}
    judge = Judge(SimpleNamespace(**defaults | args.to_dict() | keys))
    judge.apply(BACKEND)
    check_part_rules(judge)
    if stage is not None:
        judge.arguments.stage = stage
        check_objective_run(judge.arguments, judge)
    judge.close()


def parse_args(argv: list[str] | None = None, *, needs_world: bool = True) -> RunArguments:
    """The arguments of a run, from its command line (argv None: sys.argv).

    Words are `key=value`, `--key=value` or `--key value`, in any order, and the path of at most one
    config file, which ends in .yaml, .yml or .json. A lone `--key` means true, `--no_key` false,
    but a plain word after it, such as that path, is taken as its value. Words override the file,
    and later words earlier ones; null means the default. The model's config.json, from its folder
    or the hub, is checked against the parallel layout.

    needs_world: False, for commands that only read a configuration, skips the check that the
    parallel layout fits a single process without torchrun.

    `-h` and `--help` print the keys and exit. Raises ConfigError that lists the problems found.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(argv):
        print(format_help())
        raise SystemExit(0)
    given, problems = read_words(argv)
    keys, ignored = known_keys(given, problems)
    problems = [one for one in problems if "migrate FILE" in one.suggestion][:1] or problems
    if any(problem.reason == _IN_GROUPS or problem.key in NOT_OF_TRAINING for problem in problems):
        raise ConfigError(problems)  # missing keys may be in those groups, or not needed
    judge = Judge(None, problems)
    groups: dict[str, Any] = {n: row.group.read(keys, judge) for n, row in KEY_GROUPS.items()}
    core = {name: groups.pop(name) for name in CORE_GROUPS}
    judge.arguments = run = RunArguments(**core, parts=groups)
    if not run.use_mca:
        run.training.leave_out_megatron()
    if run.model_name_or_path:
        is_trained = not run.train_from_scratch
        run.model_config = read_model_config(
            run.model_name_or_path, judge, run.model_revision, is_trained
        )
    for group in run.groups:
        group.resolve(judge)
    if needs_world and not world.current().is_given:
        check_world(run.training, judge)
    run.warnings = [*ignored, *check_run(run, judge)]
    if run.model_config:
        # a degree may fit neither the number of processes nor the model: both problems are shown
        judge.bad.discard("tensor_model_parallel_size")
        check_config(run.model_config, run, judge)
    judge.close()
    return run


# -- words and files

_FILE_SUFFIXES = (".yaml", ".yml", ".json")
_IN_GROUPS = "keys must be at the top level, not in groups"


def read_words(argv: list[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Split a command line into names and values -> ({name: raw value}, Problems). argv: the words.
    A config file among the words is read too, and words override its values. Names are keys or
    aliases. There is a Problem for each word that cannot be read, and one if several config files
    are named. Raises ConfigError if the config file cannot be read."""
    words: list[tuple[str, Any]] = []
    problems: list[Problem] = []
    paths = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        is_option = word.startswith("--")
        if is_option:
            key = key.replace("-", "_")
        if is_option and not equals:
            text = rest.pop(0) if rest and _is_value(rest[0]) else "true"
            switched = key.removeprefix("no_")
            is_known = _key_of(switched) in key_fields() or foreign_key(switched)
            if switched != key and text == "true" and is_known:
                key = switched  # transformers reads --no_KEY as KEY=false too
                text = "false"
        if not _is_value(word):
            words.append((key, _word_value(text)))
        elif word.endswith(_FILE_SUFFIXES):
            paths.append(word)
        else:
            reason = (
                "expected a YAML file (mca-lite migrate FILE writes one), key=value or --key value"
            )
            problems.append(Problem(word, None, reason, f"{word}=<value>, or --{word} <value>"))
    if len(paths) > 1:
        remedy = "one file, then key=value"
        problems.append(Problem("config file", ", ".join(paths), "one file is read", remedy))
    # this raises at once if the file cannot be read: its keys would seem to be missing
    values = read_config_file(paths[0]) if paths else {}
    for key, value in words:
        # a word replaces the file's value under each name of the key
        values = {name: v for name, v in values.items() if _key_of(name) != _key_of(key)}
        values[key] = value
    return values, problems


def _is_value(word: str) -> bool:
    """True if a command-line word is a plain value: neither `--option` nor `key=value`."""
    key, equals, _ = word.partition("=")
    return not (word.startswith("--") or (equals and key.isidentifier()))


def _word_value(text: str) -> str | None:
    """A command-line value before it is cast to its key's type: None for a blank text, ~ or null in
    any case; otherwise the text, without a pair of quotes around it."""
    if text.strip().lower() in ("", "~", "null"):
        return None
    quoted = re.fullmatch("([\"'])(.*)\\1", text)
    return quoted[2] if quoted else text


def _key_of(name: str) -> str:
    """The key that `name` stands for: `name` itself if it is a key; otherwise the key of which it
    is an alias; otherwise `name` unchanged."""
    return name if name in key_fields() else ALIASES.get(name, name)


def known_keys(values: dict[str, Any], problems: list[Problem]) -> tuple[dict[str, Any], list[str]]:
    """Turn the names that a user gave into keys -> ({key: raw value}, notes about names that are
    ignored). values: {name: raw value}. A name may be an alias of a key, and a value may stand for
    several other keys (MEANINGS).

    Appends a Problem to `problems` for each name that is unknown, that this package refuses with
    this value, or that means the same key as an earlier name. So it does for each key that needs an
    optional part of the package whose files are missing."""
    keys: dict[str, Any] = {}
    ignored = []
    for name, value in values.items():
        if meant := MEANINGS.get(f"{_key_of(name)}={value}".lower()):
            others = {key: given for key, given in values.items() if key != name}
            values = {**meant, **others}
    need_parts = parts.absent({_key_of(name): value for name, value in values.items()})
    problems += need_parts
    absent = {*parts.absent_keys(), *(problem.key for problem in need_parts)}
    for name, value in values.items():
        key = _key_of(name)
        foreign = foreign_key(name)
        if key in keys:
            same = f"{key} is given too, and means the same"
            problems.append(Problem(name, value, same, f"only {key}"))
        elif key in absent:
            continue
        elif key in key_fields():
            keys[key] = value
        elif foreign is None:
            problems.append(_unknown_key(name, value))
        elif not foreign.remedy:
            ignored.append(f"{name} ({foreign.reason})")
        elif str(value).strip().lower() not in foreign.off:
            problems.append(Problem(name, value, foreign.reason, foreign.remedy))
    notes = ["these keys have no effect: " + ", ".join(ignored)] if ignored else []
    return keys, notes


def _unknown_key(name: str, value: Any) -> Problem:
    if isinstance(value, dict):
        flat = f"its keys without {name}: one level up, each on a separate line"
        return Problem(name, None, _IN_GROUPS, flat)
    known = [*key_fields(), *parts.absent_keys(), *ALIASES]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    [remedy] = near or ["one of the keys that --help lists; configs/MIGRATION.md has others' names"]
    return Problem(name, value, "no such key", remedy)


def format_help() -> str:
    """The text of --help: the keys with their defaults and meanings, by group."""
    program = "train.py" if __package__ == "mca_lite" else f"python -m {__package__} train"
    lines = [f"usage: {program} [config.yaml] [key=value ...]"]
    for group in key_groups():
        lines += ["", str(group.__doc__).strip().splitlines()[0]]
        for item in dataclasses.fields(group):
            if item.name in parts.absent_keys():
                continue
            default = default_of(item)
            default = "required" if default is dataclasses.MISSING else json.dumps(default)
            lines.append(f"  {item.name} ({default}): {item.metadata['help']}")
    return "\n".join(lines)
