"""All configuration keys, in five dataclasses; args.py fills them from files and words.

Every key is flat and bears the name that Hugging Face, LLaMA-Factory or megatron-core gives it. A
group casts, normalises and checks itself when it is made, from Python as from a file, and shows all
its problems at once. Nothing here imports torch, megatron-core or transformers before it is needed:
a typing error shows in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import sys
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml

from .args_keys import (
    ALIASES,
    HINTS,
    IGNORED_KEYS,
    NOT_OF_TRAINING,
    SWITCHES,
    UNSUPPORTED,
    lookup,
    unsupported,
)
from .args_rules import (
    check_backend,
    check_data,
    check_finetuning,
    check_objective_run,
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
from .args_values import ArgumentGroup, arg, cast, default_of, loads_yaml, read_config_file
from .errors import ConfigError, Judge, Problem
from .files import parse_size, read_model_config, write_file
from .tables import LOSSES, OBJECTIVES, OPTIMIZER_ALIASES, OPTIMIZERS, TEMPLATES, check_template

# -- groups of keys


def mca(default: Any, text: str, **metadata: Any) -> Any:
    """A key of megatron-core: on the plain torch backend it counts as its default."""
    return arg(default, text, torch=False, **metadata)


@dataclass(kw_only=True)
class ModelArguments(ArgumentGroup):
    """Which model is trained."""

    model_name_or_path: str = arg(MISSING, "a folder with config.json, or a model of the hub")
    train_from_scratch: bool = arg(False, "random weights instead of those of model_name_or_path")
    trust_remote_code: bool = arg(False, "let the model's folder bring its own code (tokenizers)")
    model_revision: str | None = arg(None, "branch, tag or commit on the hub")
    resize_vocab: bool = arg(False, "grow embedding and head where the tokenizer has more tokens")
    add_tokens: list[str] | None = arg(None, "new tokens: the embedding and the head grow for them")
    add_special_tokens: list[str] | None = arg(None, "special ones, which decoding can leave out")


@dataclass(kw_only=True)
class DataArguments(ArgumentGroup):
    """What it is trained on."""

    dataset: list[str] = arg(
        [], "required to train: files, or names in dataset_info.json; a list, or joined by commas"
    )
    dataset_dir: str = arg("data", "the folder of dataset_info.json")
    eval_dataset: list[str] | None = arg(None, "files or names to evaluate on")
    eval_on_each_dataset: bool = arg(False, "a loss of each eval_dataset: eval_<its name>_loss")
    val_size: float = arg(
        0.0, "samples split off for evaluation: a fraction below 1, or a count", low=0
    )
    cutoff_len: int = arg(2048, "tokens a row, at most; dpo: of each answer with its prompt", low=1)
    packing: bool | None = arg(
        None, "pt: join and cut documents (None: yes); sft, dpo: pack samples (None: no)"
    )
    neat_packing: bool = arg(False, "sft, dpo: like packing; pt: documents do not see each other")
    train_on_prompt: bool = arg(False, "the prompt carries loss too")
    mask_history: bool = arg(False, "only the last answer of a conversation carries loss")
    mix_strategy: Literal["concat", "interleave_under", "interleave_over", "interleave_once"] = arg(
        "concat",
        "an epoch of several datasets: all samples, or datasets in turns until the first is used "
        "up, until all are and shorter ones repeat, or until all are and none repeats",
    )
    mix_weights: list[float] | None = arg(
        None,
        "relative sampling rate of each dataset (None: everything once an epoch); interleave: the "
        "chance of its turn (None: turns go round)",
    )
    streaming: bool = arg(
        False, "pt, sft: tokenise `dataset` as it is read, and keep nothing; needs max_steps"
    )
    buffer_size: int = arg(
        16384, "streaming: records that are in memory at once, and shuffled among each other", low=1
    )
    sample_by: Literal["line", "document"] = arg(
        "line", "what a document of a .txt file is: each line, or the whole file"
    )
    on_bad_record: Literal["stop", "skip"] = arg(
        "stop",
        "a record that cannot be used ends the run, or is left out: a tenth of a dataset at most",
    )
    max_samples: int | None = arg(None, "only the first so many samples of each dataset", low=1)
    preprocessing_num_workers: int | None = arg(
        None, "processes that tokenise (None: chosen)", low=1, high=1024
    )
    cache_dir: str | None = arg(None, "where tokenised data is kept (None: ~/.cache/mca_lite)")
    overwrite_cache: bool = arg(False, "tokenise again even where the cache has it")
    disable_shuffling: bool = arg(False, "train in the file's order")
    default_system: str | None = arg(None, "system message of conversations that have none")
    chat_template: str | None = arg(
        None,
        f"{', '.join(TEMPLATES)}, a jinja file, or its text (None: the tokenizer's own); one that "
        "takes no tools gets them as text, as Qwen writes them",
    )
    template: str | None = arg(
        None,
        "LLaMA-Factory's name of a chat template, for a tokenizer without one of its own",
        check=check_template,
    )
    enable_thinking: bool | None = arg(None, "given to the chat template (None: not given)")
    ignore_message_keys: list[str] = arg(
        [], "keys of messages that are left out where nothing here knows them"
    )

    normalise = normalise_data
    check = check_data


@dataclass(kw_only=True)
class FinetuningArguments(ArgumentGroup):
    """What training is meant: the objective, and which weights move."""

    stage: str = arg(
        "sft", "pt: plain text, sft: conversations, dpo: preference pairs", choices=OBJECTIVES
    )
    finetuning_type: Literal["full", "lora"] = arg(
        "full", "full: every weight is trained; lora (LLaMA-Factory's default): adapters are"
    )
    lora_rank: int = arg(8, "rank of the adapters", low=1, high=65_536, lora=True)
    lora_alpha: float | None = arg(
        None, "adapters count alpha / rank (None: alpha is twice the rank)", above=0, lora=True
    )
    lora_dropout: float | None = arg(
        None, "dropout on adapters' input (None: 0, or their own)", low=0, below=1, lora=True
    )
    lora_target: list[str] = arg(
        ["all"], "all (every linear layer but the head), module names, or patterns", lora=True
    )
    use_rslora: bool = arg(False, "adapters count alpha / sqrt(rank)", lora=True)
    modules_to_save: list[str] | None = arg(
        None, "modules trained whole beside the adapters, such as lm_head", lora=True
    )
    adapter_name_or_path: str | None = arg(
        None, "a folder in PEFT's format: its adapter is trained further", lora=True
    )
    save_merged_model: bool = arg(
        False, "write the model with merged adapters too, to output_dir/merged", lora=True
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
    dpo_label_smoothing: float = arg(0.0, "share of pairs thought to be swapped", low=0, below=0.5)
    ref_model: str | None = arg(
        None,
        "cached: scored before training; adapter: adapters off; model, a folder: a second copy",
    )

    check = check_finetuning


@dataclass(kw_only=True)
class UseMcaArguments(ArgumentGroup):
    """Which backend trains."""

    use_mca: bool = arg(True, "true: megatron-core; false: plain torch DDP")


@dataclass(kw_only=True)
class TrainingArguments(ArgumentGroup):
    """How it is trained: batches, optimizer, cadence, precision and parallel layout.

    The constructor takes output_dir and keywords, and raises ConfigError (a ValueError) that lists
    all problems. Under torchrun the layout must divide the world. `gradient_accumulation_steps`,
    `per_device_eval_batch_size`, `eval_steps`, `recompute_method` and `recompute_num_layers` hold
    the values in effect afterwards; `resume_from_checkpoint` is None, "auto" or a path.
    """

    # output and cadence
    output_dir: str = arg(MISSING, "the folder for checkpoints, logs and the trained model")
    overwrite_output_dir: bool = arg(False, "train into a folder that is not empty")
    do_train: bool = arg(True, "train; false with do_eval: evaluate alone, and export nothing")
    do_eval: bool = arg(False, "evaluate at the end too, where eval_strategy has not")
    do_predict: bool = arg(
        False, "write the log-probability of each sample for evaluation to predictions.jsonl"
    )
    predict_with_generate: bool = arg(
        False, "sft: let the model answer the samples for evaluation: exact_match, rouge_l"
    )
    max_new_tokens: int = arg(1024, "tokens of an answer that is generated", low=1)
    generation_num_samples: int | None = arg(
        None, "only the first so many samples of each set are answered (None: all)", low=1
    )
    logging_steps: int = arg(10, "steps between two lines of the log", low=1)
    eval_strategy: Literal["no", "steps", "epoch"] = arg("no", "when to evaluate")
    eval_steps: int | None = arg(None, "steps between evaluations (None: logging_steps)", low=1)
    save_strategy: Literal["no", "steps", "epoch"] = arg("steps", "when to save a checkpoint")
    save_steps: int = arg(500, "steps between checkpoints", low=1)
    save_total_limit: int | None = arg(None, "checkpoints that are kept (None: all)", low=1)
    save_only_model: bool = arg(False, "checkpoints without optimizer state, not to resume from")
    async_save: bool = arg(False, "write checkpoints in the background, from copies in host memory")
    save_hf_checkpoints: bool = arg(
        False, "put the model in Hugging Face's format into each checkpoint too, as hf/"
    )
    save_hf_model: bool = arg(True, "write the trained model in Hugging Face's format at the end")
    max_shard_size: str = arg(
        "5GB", "its largest file: bytes, with KB, MB, GB, KiB, MiB or GiB", check=parse_size
    )
    load_best_model_at_end: bool = arg(False, "end with the checkpoint that evaluated best")
    metric_for_best_model: str = arg("loss", "the metric that decides which one is best")
    greater_is_better: bool | None = arg(None, "whether the metric grows (None: from its name)")
    early_stopping_patience: int | None = arg(
        None, "stop after so many evaluations without progress", low=1
    )
    early_stopping_threshold: float = arg(0.0, "the least change that counts as progress", low=0)
    resume_from_checkpoint: str | None = arg(
        None,
        "auto: the newest in output_dir; a path; false: start anew",
        # YAML files have true and false as well
        words=dict.fromkeys(("true", "yes"), "auto") | dict.fromkeys(("false", "no", "none")),
    )
    report_to: list[Literal["none", "all", "tensorboard", "wandb"]] = arg(
        [], "trackers: none, tensorboard, wandb"
    )
    run_name: str | None = arg(None, "the run's name in wandb")
    plot_loss: bool = arg(False, "draw training_loss.png, again and again during the run")
    html_report: bool = arg(True, "write report.html, again and again during the run")
    disable_tqdm: bool | None = arg(None, "no progress bar (None: a bar where there is a terminal)")
    profile_steps: str | None = arg(
        None,
        "steps such as 10-12 to profile: traces in output_dir/profile, a table",
        check=parse_steps,
    )

    # batches and length
    per_device_train_batch_size: int = arg(1, "samples of a micro-batch", low=1, high=100_000)
    per_device_eval_batch_size: int | None = arg(
        None, "samples of a micro-batch of evaluation (None: as in training)", low=1
    )
    gradient_accumulation_steps: int | None = arg(
        None,
        "micro-batches a step on each data parallel rank (None: of global_batch_size, or 1)",
        low=1,
    )
    global_batch_size: int | None = arg(
        None, "samples a step in all, or packs of them with packing", low=1
    )
    num_train_epochs: float = arg(3.0, "times that the data is seen", above=0, high=1e6)
    max_steps: int = arg(-1, "optimizer steps, instead of num_train_epochs (-1: not used)", low=-1)
    seed: int = arg(42, "of weights, data order and dropout", low=0, high=2**32 - 1)
    data_seed: int | None = arg(None, "of the data order (None: seed)", low=0, high=2**32 - 1)
    dataloader_num_workers: int = arg(0, "processes that load data, on each rank", low=0, high=256)
    ddp_timeout: int = arg(1800, "seconds that a rank waits for the others", low=1, high=10**9)
    hang_timeout: int = arg(
        300, "seconds without progress until ranks are named: at most ddp_timeout / 2", low=1
    )

    # optimizer and schedule
    learning_rate: float = arg(5e-5, "the highest learning rate", low=0, high=1e38, optimizer="lr")
    lr_scheduler_type: str = arg(
        "linear",
        "shape of the learning rate; constant has no warm-up, constant_with_warmup has",
        choices=SCHEDULES,
    )
    lr_scheduler_kwargs: dict[str, Any] = arg(
        {}, "min_lr, min_lr_rate, num_decay_steps, num_stable_steps, decay_type"
    )
    warmup_steps: float = arg(
        0, "steps in which the learning rate grows; below 1: a fraction of all steps", low=0
    )
    warmup_ratio: float = arg(0.0, "warm-up as a fraction of all steps", low=0, high=1)
    weight_decay: float = arg(0.0, "decoupled; norms and biases have none", low=0, optimizer=True)
    optim: str = arg(
        "adam",
        "adam (adamw_torch, adamw_torch_fused are the same) or sgd",
        choices=OPTIMIZERS,
        words=OPTIMIZER_ALIASES,
        optimizer="optimizer",
    )
    sgd_momentum: float = arg(0.9, "for optim: sgd", low=0, below=1, optimizer=True)
    adam_beta1: float = arg(0.9, "decay of the mean of gradients", low=0, below=1, optimizer=True)
    adam_beta2: float = arg(0.999, "decay of the mean of squares", low=0, below=1, optimizer=True)
    adam_epsilon: float = arg(
        1e-8, "added to the root of the second moment", above=0, optimizer="adam_eps"
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = arg("fp32", "of Adam's mean of gradients")
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = arg(
        "fp32", "of Adam's mean of squared gradients; bf16 is rounded by chance"
    )
    max_grad_norm: float = arg(
        1.0, "gradients are scaled down to this norm (0: never)", low=0, optimizer="clip_grad"
    )
    calculate_per_token_loss: bool = arg(
        True, "mean over the global batch's tokens; false: of micro-batches' means", model=True
    )
    log_num_zeros_in_grad: bool = arg(False, "count the gradient's zeros", optimizer=True)
    loss_chunk_size: int | None = arg(
        None, "rows of logits held at once (None: 4096 on a GPU, 1024 on a CPU)", low=1, model=True
    )
    check_for_nan_in_loss_and_grad: bool = arg(
        True, "stop before an update whose loss or gradient is not finite"
    )
    nan_policy: Literal["stop", "skip"] = arg(
        "stop", "what such an update does: end the run, or be left out and counted"
    )
    nan_skip_limit: int = arg(
        10, "updates that nan_policy: skip leaves out, at most, before it ends the run", low=1
    )

    # precision
    bf16: bool = arg(False, "bfloat16 weights and activations, fp32 master weights", model=True)
    fp16: bool = arg(False, "float16 with loss scaling", model=True)
    fp8: Literal["hybrid", "e4m3"] | None = mca(
        None,
        "8-bit products in Transformer Engine; hybrid: gradients as e5m2",
        model="always",
        words={"true": "hybrid", "false": None},  # LLaMA-Factory's
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise"] | None = mca(
        None, "scales of a tensor, its past values, blocks of 128 (None: tensorwise)", model=True
    )
    first_last_layers_bf16: bool = mca(False, "leave first and last layers in bf16", model=True)
    num_layers_at_start_in_bf16: int = mca(1, "first layers that it leaves", low=0, model=True)
    num_layers_at_end_in_bf16: int = mca(1, "last layers that it leaves", low=0, model=True)
    loss_scale: float | None = arg(
        None, "a constant loss scale (None: it adapts)", above=0, high=1e38, optimizer=True
    )
    initial_loss_scale: float = arg(2.0**16, "first loss scale", above=0, high=1e38, optimizer=True)
    min_loss_scale: float = arg(1.0, "lower bound of the loss scale", above=0, optimizer=True)
    loss_scale_window: int = arg(1000, "steps without overflow to double it", low=1, optimizer=True)
    hysteresis: int = arg(2, "overflows before it halves", low=1, optimizer=True)

    # parallel layout
    tensor_model_parallel_size: int = mca(1, "ranks that share each matrix", low=1, model=True)
    pipeline_model_parallel_size: int = mca(1, "ranks that share the layers", low=1, model=True)
    virtual_pipeline_model_parallel_size: int | None = mca(
        None, "chunks of layers on each pipeline rank", low=1, model="always"
    )
    context_parallel_size: int = mca(1, "ranks that share each sequence", low=1, model=True)
    expert_model_parallel_size: int = mca(1, "ranks that share the experts", low=1, model=True)
    expert_tensor_parallel_size: int | None = mca(
        None, "ranks that share each expert's matrices", low=1, model="always"
    )
    sequence_parallel: bool = mca(
        False, "split activations of norms and dropout over tensor parallel ranks", model=True
    )
    pipeline_model_parallel_layout: str | None = mca(
        None, 'layers of each stage, such as "Et*3|t*4|t*3L"', model="always", check=check_layout
    )
    variable_seq_lengths: bool = mca(
        False, "micro-batches may differ in length: pipeline stages exchange shapes", model=True
    )
    sequence_packing: bool = arg(
        False, "join the samples of a micro-batch; packing fills rows of cutoff_len from all data"
    )
    use_distributed_optimizer: bool = mca(
        False, "share optimizer state among the data parallel ranks", optimizer=True, ddp=True
    )
    overlap_grad_reduce: bool = mca(False, "reduce gradients during the backward pass", ddp=True)
    overlap_param_gather: bool = mca(
        False, "gather parameters during the forward pass", optimizer=True, ddp=True
    )
    ddp_bucket_size: int | None = mca(
        None, "parameters a gradient bucket (None: megatron's choice)", low=1, ddp="bucket_size"
    )
    grad_reduce_in_fp32: bool = mca(True, "accumulate and reduce gradients in fp32", ddp=True)
    optimizer_cpu_offload: bool = mca(False, "optimizer state and step on the CPU")
    optimizer_offload_fraction: float = mca(1.0, "share of its state on the CPU", low=0, high=1)

    # memory, kernels and the model
    recompute_granularity: Literal["full", "selective"] | None = mca(
        None, "activations computed again in the backward pass", model="always"
    )
    recompute_method: Literal["uniform", "block"] | None = mca(
        None, "for full (None: uniform)", model="always"
    )
    recompute_num_layers: int | None = mca(
        None, "for full: layers of a unit, or of a stage (None: 1)", low=1, model="always"
    )
    recompute_modules: (
        list[Literal["core_attn", "mlp", "layernorm", "moe", "shared_experts"]] | None
    ) = mca(None, "for selective: core_attn, mlp, layernorm, moe, shared_experts", model="always")
    distribute_saved_activations: bool = mca(
        False, "split recomputation's inputs over the tensor parallel ranks", model=True
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = mca(
        "auto",
        "auto: Transformer Engine where it works and suits the model, in bf16 or fp16",
        model=True,
    )
    attention_dropout: float | None = mca(None, "None: the model's own", low=0, below=1, model=True)
    hidden_dropout: float | None = mca(None, "None: the model's own", low=0, below=1, model=True)
    torch_compile: bool | None = arg(
        None, "compile what stands between matrix products (None: on a GPU that has a compiler)"
    )
    bias_activation_fusion: bool | None = mca(None, "None: chosen", model=True)
    bias_dropout_fusion: bool | None = mca(None, "None: chosen", model=True)
    apply_rope_fusion: bool | None = mca(None, "None: chosen", model=True)
    moe_grouped_gemm: bool = mca(True, "one grouped matrix product for all experts", model=True)
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = mca(
        "alltoall", "how tokens reach their experts' ranks", model=True
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = arg(
        "aux_loss", "load-balancing loss: over a micro-batch, or over each row", model=True
    )
    moe_aux_loss_coeff: float | None = arg(
        None,
        "weight of the balancing loss (None: router_aux_loss_coef; 0: none)",
        low=0,
        model=True,
    )
    moe_z_loss_coeff: float | None = arg(None, "weight of routers' z loss", low=0, model="always")
    moe_router_dtype: Literal["fp32", "fp64"] = mca(
        "fp32", "precision of the routers' logits and scores", model=True
    )
    mtp_num_layers: int | None = arg(
        None, "layers for multi-token prediction (None: the model's; 0: none)", low=0
    )
    mtp_loss_scaling_factor: float = arg(
        0.1, "weight of all losses of multi-token prediction together", low=0, model=True
    )
    moe_router_bias_update_rate: float = arg(
        0.0, "step of the bias that balances the experts' loads", low=0, model=True
    )
    moe_shared_expert_overlap: bool = mca(False, "run shared experts beside dispatch", model=True)
    moe_permute_fusion: bool = mca(False, "Transformer Engine's dispatch", model=True)
    additional_configs: dict[str, Any] = mca(
        {}, f"fields of megatron's TransformerConfig: {', '.join(ADDITIONAL_FIELDS)}"
    )

    normalise = normalise_training
    check = check_training

    @property
    def world_size(self) -> int:
        """Processes of the run: torchrun's WORLD_SIZE, 1 without it."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def process_index(self) -> int:
        """This process's number in the run: torchrun's RANK, 0 without it."""
        return int(os.environ.get("RANK", "0"))

    @property
    def should_save(self) -> bool:
        """Whether this process is the one that writes files of its own: the first."""
        return self.process_index == 0

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model together: tp x pp x cp."""
        tp = self.tensor_model_parallel_size
        pp = self.pipeline_model_parallel_size
        return tp * pp * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model in the world; 1 for arguments made without torchrun."""
        return max(1, self.world_size // self.model_parallel_size)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch: per_device_train_batch_size."""
        return self.per_device_train_batch_size

    @property
    def order_seed(self) -> int:
        """The seed of the data's order, and of what val_size holds out."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def train_global_batch_size(self) -> int:
        """Samples of an optimizer step over all ranks."""
        steps = self.gradient_accumulation_steps or 1
        return self.micro_batch_size * steps * self.data_parallel_size

    def steps_of_run(self, steps_per_epoch: int) -> int:
        """Optimizer steps of a run: max_steps, or those of num_train_epochs, rounded up."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_train_epochs * steps_per_epoch)


@dataclass(kw_only=True)
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments under the name that fine-tuning scripts use."""


# -- the arguments of a run


@dataclass
class RunArguments:
    """All groups of a run; their keys are attributes too. warnings: the lines that rank 0 should
    print, each about values without effect. model_config: what the model's config.json holds, {}
    where it was not read."""

    model: ModelArguments
    data: DataArguments
    finetuning: FinetuningArguments
    training: TrainingArguments
    backend: UseMcaArguments
    warnings: list[str] = field(default_factory=list)
    model_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        joins_documents = OBJECTIVES[self.finetuning.stage].joins_documents
        if self.data.packing is None:
            self.data.packing = joins_documents
        if self.data.neat_packing or (self.data.packing and not joins_documents):
            # packs of samples reach the model with their borders
            self.training.sequence_packing = True

    def __getattr__(self, key: str) -> Any:
        for group in self.groups if key in FIELDS else ():
            if hasattr(group, key):
                return getattr(group, key)
        raise AttributeError(key)

    @property
    def groups(self) -> tuple[ArgumentGroup, ...]:
        """The five groups, in the order in which they are written to a file."""
        return self.model, self.finetuning, self.data, self.training, self.backend

    def to_dict(self) -> dict[str, Any]:
        """Flat key -> value in effect, of all groups."""
        groups = map(dataclasses.asdict, self.groups)
        return {key: value for group in groups for key, value in group.items()}

    def to_yaml_dict(self) -> dict[str, Any]:
        """Flat key -> value in effect, without the keys that are None (None and absent mean the
        same).

        Parsed again in a world of the same size it gives the same run; with global_batch_size it
        holds for any world, because gradient_accumulation_steps is left to be derived.
        """
        values = {key: value for key, value in self.to_dict().items() if value is not None}
        if self.training.global_batch_size is not None:
            del values["gradient_accumulation_steps"]
        return values

    def save(self, path: str | os.PathLike) -> None:
        """Write to_yaml_dict() as YAML to the file `path`; its folder is made if absent."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.to_yaml_dict(), sort_keys=False, allow_unicode=True, width=120)
        write_file(path, text)


GROUPS = (ModelArguments, DataArguments, FinetuningArguments, TrainingArguments, UseMcaArguments)
FIELDS = {item.name: item for group in GROUPS for item in dataclasses.fields(group)}


def check_together(args: TrainingArguments, *, stage: str | None = None, **keys: Any) -> None:
    """The rules between training arguments and keys of other groups, for trainers that are made
    without a file.

    Keys that are not given have their defaults; without a stage the rules of objectives are left
    out. Raises ConfigError, as parse_args does.
    """
    defaults = {name: default_of(item) for name, item in FIELDS.items()}
    judge = Judge(SimpleNamespace(**defaults | args.to_dict() | keys))
    check_backend(judge)
    if stage is not None:
        judge.arguments.stage = stage
        check_objective_run(judge.arguments, judge)
    judge.close()


def parse_args(argv: list[str] | None = None, *, needs_world: bool = True) -> RunArguments:
    """The arguments of a run from the words of its command line (None: sys.argv).

    Words are `key=value`, `--key=value` or `--key value`, in any order; a lone `--key` means true,
    and a word that ends in .yaml, .yml or .json is the file, which the words overrule. Of a key
    given twice there the last value holds; null is the default. The model's config.json is read too
    (from its folder, or the hub) and checked against the layout. needs_world=False is for commands
    that only look at a configuration: without torchrun the layout need not fit this one process
    then. `-h` and `--help` print the keys and leave. Raises ConfigError with all problems of the
    run.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(argv):
        print(format_help())
        raise SystemExit(0)
    given, problems = read_words(argv)
    own, ignored = own_keys(given, problems)
    if any(problem.reason == _IN_GROUPS or problem.key in NOT_OF_TRAINING for problem in problems):
        raise ConfigError(problems)  # what else is missing may be in those groups, or not needed
    judge = Judge(None, problems)
    backend = UseMcaArguments.read(own, judge)
    judge.arguments = run = RunArguments(
        ModelArguments.read(own, judge),
        DataArguments.read(own, judge),
        FinetuningArguments.read(own, judge),
        TrainingArguments.read(own, judge, backend.use_mca),
        backend,
    )
    if name := run.model_name_or_path:
        revision = run.model_revision
        own_weights = not run.train_from_scratch
        run.model_config = read_model_config(name, judge, revision, own_weights)
    run.training.resolve(judge)
    if needs_world and "WORLD_SIZE" not in os.environ:
        check_world(run.training, judge)
    run.data.resolve(judge)
    run.finetuning.resolve(judge)
    run.warnings = [*ignored, *check_run(run, own, judge)]
    if run.model_config:
        # of a degree that the number of processes does not allow the model has its say too
        judge.bad.discard("tensor_model_parallel_size")
        run.warnings += check_config(run.model_config, run, judge)
    judge.close()
    return run


# -- words and files

_IN_GROUPS = "keys stand side by side, in no groups"


def read_words(argv: list[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Key -> raw value of the file and the words, and what could not be read."""
    words: list[tuple[str, Any]] = []
    problems: list[Problem] = []
    paths = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.partition("=")
        if word.startswith("--"):
            key = key[2:].replace("-", "_")
            if not equals:
                text = rest.pop(0) if rest and _is_value(key, rest[0]) else "true"
            words.append((key, _word_value(text)))
        elif equals and key.isidentifier():
            words.append((key, _word_value(text)))
        elif word.endswith((".yaml", ".yml", ".json")):
            paths.append(word)
        else:
            reason = "expected a YAML file, key=value or --key value"
            remedy = "key=value"
            if _is_known(word) and rest and _is_value(word, rest[0]):
                remedy = f"{word}={rest.pop(0).lstrip('=')}"
            problems.append(Problem(word, None, reason, remedy))
    values: dict[str, Any] = {}
    for path in paths:
        try:
            values.update(read_config_file(path))
        except ConfigError as error:
            # its keys are not known: what else is missing may be there
            raise ConfigError([*problems, *error.problems]) from None
    if len(paths) > 1:
        remedy = "one file, then key=value"
        problems.append(Problem("config file", ", ".join(paths), "one file is read", remedy))
    for key, value in words:
        # a word replaces the file's value, whichever of the key's names the file used
        values = {n: v for n, v in values.items() if ALIASES.get(n, n) != ALIASES.get(key, key)}
        values[key] = value
    return values, problems


def _is_known(key: str) -> bool:
    tables = (FIELDS, ALIASES, SWITCHES, IGNORED_KEYS, UNSUPPORTED)
    return any(lookup(table, key) for table in tables)


def _is_value(option: str, word: str) -> bool:
    """Whether the word after `--option` is its value, not the next key or a flag's file."""
    key, equals, _ = word.partition("=")
    flag = option in FIELDS and isinstance(default_of(FIELDS[option]), bool)
    if word.startswith("--") or (equals and _is_known(key)):
        return False
    return not (flag and word.endswith((".yaml", ".yml", ".json")))


def _word_value(text: str) -> str | None:
    """A word's value, for its field's type to read: None, or text without its quotes."""
    if text.strip().lower() in ("", "~", "null"):
        return None
    try:
        return str(loads_yaml(text)) if text[0] in "\"'" else text
    except yaml.YAMLError:
        return text  # a quote that is not closed is a character like others


def own_keys(values: dict[str, Any], problems: list[Problem]) -> tuple[dict[str, Any], list[str]]:
    """Our keys by their own names, and a line about those without effect; Problems are added."""
    own = {}
    ignored = []
    known = [*FIELDS, *ALIASES]
    for name, value in values.items():
        key = ALIASES.get(name, name)
        if key in FIELDS:
            if key in own:
                reason = f"{key} is given too, and means the same"
                problems.append(Problem(name, value, reason, f"only {key}"))
            own[key] = value
        elif name in SWITCHES:
            continue  # its key may come later
        elif lookup(IGNORED_KEYS, name):
            ignored.append(f"{name} ({lookup(IGNORED_KEYS, name)})")
        elif lookup(UNSUPPORTED, name):
            if refused := unsupported(name, value):
                problems.append(Problem(name, value, *refused))
        elif isinstance(value, dict):
            flat = f"its keys without {name}: above them, each in a line of its own"
            problems.append(Problem(name, None, _IN_GROUPS, flat))
        else:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            remedy = near[0] if near else "one of the keys that --help lists"
            problems.append(Problem(name, value, "no such key", HINTS.get(name, remedy)))
    lines = _turn_switches(values, own, problems)
    return own, [*lines, "these keys have no effect: " + ", ".join(ignored)] if ignored else lines


def _turn_switches(values: dict[str, Any], own: dict[str, Any], problems: list) -> list[str]:
    """Set the keys that SWITCHES stand for where they have no value -> a line about each."""
    lines = []
    for name in filter(values.__contains__, SWITCHES):
        key, setting = SWITCHES[name]
        try:
            is_on = cast(values[name], bool | None)
        except ValueError as error:
            problems.append(Problem(name, values[name], str(error), f"{key}: {setting}"))
            continue
        if is_on and own.get(key) is None:
            own[key] = setting
            lines.append(f"{name} is {key}: {setting} here")
    return lines


def format_help() -> str:
    """All keys, their defaults and what they mean, group by group."""
    lines = ["usage: train.py [config.yaml] [key=value ...]"]
    for group in GROUPS:
        lines += ["", str(group.__doc__).strip().splitlines()[0]]
        for item in dataclasses.fields(group):
            default = default_of(item)
            default = "required" if default is dataclasses.MISSING else json.dumps(default)
            lines.append(f"  {item.name} ({default}): {item.metadata['help']}")
    return "\n".join(lines)
