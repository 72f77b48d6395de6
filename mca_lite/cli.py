"""The entry point: reads the arguments, checks everything that can be checked alone, then trains.

torchrun --nproc_per_node N train.py config.yaml [key=value ...]
"""

import copy
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .args import RunArguments, parse_args
from .args_rules_model import check_torch_packing, check_window
from .args_values import Judge
from .constants import RUN_CONFIG_NAME
from .objectives import OBJECTIVES

USER_ERROR = 2  # exit code for input that cannot be trained on, and for checkpoints that cannot be read or written


@dataclass
class Prepared:
    """What a run needs and no process group does: made, or refused, on every rank alike before ranks meet."""

    folder: Path
    config: Any
    tokenizer: Any
    data: Any
    vocab_size: int  # with new tokens more than model_name_or_path has
    reference: Path | None = None  # the folder of a second model, for ref_model


def main(argv: list[str] | None = None) -> int:
    """Train as `argv` (None: the command line) says -> exit code. Input that cannot be trained on is told once, by rank 0."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(__doc__.strip() + "\n\n--help lists the keys.")
        return 0
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        run = parse_args(words)
        if is_main:
            for line in run.warnings:
                print(f"note: {line}", flush=True)
        prepared = prepare(run)
    except ValueError as error:
        # one rank of each machine says it: what is wrong may be so on one of them only
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)  # the first rank to leave ends the others
        return USER_ERROR
    from .ckpt_folder import CheckpointError

    try:
        train(run, prepared)
    except CheckpointError as error:  # the same on every rank
        if is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    return 0


def prepare(run: RunArguments) -> Prepared:
    """Load tokenizer, config and data. ValueError says what is wrong with them. No collectives: ranks that wait for the
    token cache poll for it."""
    import transformers

    from . import model_config, weights_sources
    from .data import load_datasets

    transformers.utils.logging.disable_progress_bar()
    folder = weights_sources.resolve_folder(run.model.model_name_or_path, run.model.model_revision)
    remote, judge = run.model.trust_remote_code, Judge(None)
    if run.backend.use_mca:
        config = model_config.AutoConfig.from_pretrained(str(folder), run.training, remote)
        vocab_size = config.vocab_size
        check_window(run.data.cutoff_len, config.sliding_window, config.transformer_impl, judge)
    else:
        config = model_config.load_hf_config(str(folder), remote)
        vocab_size = config.get_text_config().vocab_size
        if run.training.sequence_packing:
            check_torch_packing(config, judge)
    judge.close()
    if not run.model.train_from_scratch and not (folder / "dist").is_dir():
        weights_sources.SafetensorsSource(
            str(folder)
        )  # says what is missing, before anything is started
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=remote
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: no tokenizer could be loaded from this folder: {error}"
        ) from None
    lines = add_new_tokens(run, tokenizer, config, vocab_size)
    if run.finetuning.finetuning_type == "lora":
        check_adapters(run, config)
    seed = run.training.seed if run.training.data_seed is None else run.training.data_seed
    data = load_datasets(run.data, run.finetuning.stage, tokenizer, seed)
    data.report[:0] = lines
    size, reference = max(len(tokenizer), vocab_size), reference_folder(run, folder, vocab_size)
    prepared = Prepared(folder, config, tokenizer, data, size, reference)
    _check_before_start(run.training, len(prepared.data.train))
    return prepared


def add_new_tokens(run: RunArguments, tokenizer, config, old_size: int) -> list[str]:
    """Put the keys' new tokens into the tokenizer, and let the config have their rows -> lines for the report.

    With adapters, modules_to_save becomes embed_tokens and lm_head unless it is given: what is not trained stays as it began.
    """
    from . import lora_files, model_config, weights_vocabulary

    keys = run.model
    added = weights_vocabulary.add_tokens(tokenizer, keys.add_tokens, keys.add_special_tokens)
    resize = keys.resize_vocab or bool(keys.add_tokens or keys.add_special_tokens)
    size = weights_vocabulary.grown_size(tokenizer, old_size, resize)
    new = max(added, size - old_size)
    if not new:
        return (
            ["vocabulary: the tokenizer had all of the new tokens"]
            if keys.add_tokens or keys.add_special_tokens
            else []
        )
    model_config.grow(config, size)
    line = f"vocabulary: {new} new token{'s' if new > 1 else ''}"
    if size > old_size:
        line += f", {old_size:,} -> {size:,} rows; a new row begins as the mean of the old ones"
    if run.finetuning.finetuning_type == "lora":
        tied = getattr(
            config,
            "tie_embeddings_and_output_weights",
            getattr(config, "tie_word_embeddings", False),
        )
        if tied:
            raise ValueError(
                f"the rows of {new} new tokens are trained through modules_to_save, which needs a head of its own, and this "
                "model's embedding is its head: set finetuning_type: full, or leave the new tokens out"
            )
        if not run.finetuning.modules_to_save and not run.finetuning.adapter_name_or_path:
            run.finetuning.modules_to_save = list(weights_vocabulary.EMBEDDING_AND_HEAD)
            line += "; modules_to_save is embed_tokens, lm_head, which trains them"
        weights_vocabulary.check_trained(
            lora_files.spec_of_keys(run.finetuning).modules_to_save, new
        )
    return [line]


def _check_before_start(args, num_samples: int) -> None:
    """ValueError for a schedule that does not fit the number of steps."""
    import torch

    from .data_batches import steps_of_run
    from .optim import get_megatron_lr_scheduler

    steps = steps_of_run(args, math.ceil(num_samples / args.train_global_batch_size))
    get_megatron_lr_scheduler(args, steps, torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate))


def train(run: RunArguments, prepared: Prepared):
    """Start the world, train, save, and stop the world -> the trainer."""
    from . import parallel

    args = run.training
    parallel.initialize(args, run.backend.use_mca)
    if parallel.is_main():
        print("\n".join(prepared.data.report), flush=True)
    model = build_model(run, prepared)
    make, keys = trainer_of(run, prepared)
    trainer = make(
        model=model,
        **keys,
        args=args,
        tokenizer=prepared.tokenizer,
        train_dataset=prepared.data.train,
        eval_dataset=prepared.data.eval,
        shuffle=not run.data.disable_shuffling,
        summary={"data": data_summary(run, prepared, model)},
        callbacks=[_save_config_at_start(run)],
    )
    result = trainer.train()
    if args.save_hf_model:
        trainer.save_model()
    if run.finetuning.save_merged_model and run.finetuning.finetuning_type == "lora":
        trainer.save_merged_model()
    trainer.report.print(
        f"trained {result.global_step} steps in {result.metrics['train_runtime']:.1f} s, mean loss "
        f"{result.training_loss:.4f}"
        + (f"; the model is in {args.output_dir}" if args.save_hf_model else "")
    )
    parallel.shutdown()
    return trainer


def trainer_of(run: RunArguments, prepared: Prepared):
    """(the trainer's class, what it takes beside McaTrainer's arguments) of the run's stage."""
    from .trainer import McaTrainer

    if run.finetuning.stage != "dpo":
        return McaTrainer, {}
    from .data_cache import default_cache_dir
    from .trainer_dpo import DPOConfig, DPOTrainer

    keys, model = run.finetuning, run.model
    config = DPOConfig(
        beta=keys.pref_beta,
        pref_loss=keys.pref_loss,
        label_smoothing=keys.dpo_label_smoothing,
        ftx=keys.pref_ftx,
        reference="model" if prepared.reference else keys.ref_model,
        cache_dir=str(Path(run.data.cache_dir or default_cache_dir()).expanduser()),
        model_source=f"drawn from seed {run.training.seed}" if model.train_from_scratch else "",
    )
    reference = build_base(run, prepared, prepared.reference) if prepared.reference else None
    return DPOTrainer, dict(train_config=config, ref_model=reference)


def reference_folder(run: RunArguments, folder: Path, vocab_size: int) -> Path | None:
    """The folder of a reference that is a second model; None without one. ValueError for a model of other tokens, and for
    a reference that the finetuning keys do not leave as it was."""
    from .loss_preference import REFERENCES
    from .model_config import load_hf_config
    from .weights_sources import resolve_folder

    keys = run.finetuning
    if keys.stage != "dpo" or keys.pref_loss == "orpo":
        return None
    if keys.ref_model in (None, *REFERENCES):
        judge = Judge(keys)
        # new tokens bring modules_to_save that the file does not name
        OBJECTIVES[keys.stage].check_keys(keys, judge)
        judge.close()
        if (
            keys.ref_model != "model"
            and keys.adapter_name_or_path
            and _saves_modules(keys.adapter_name_or_path)
        ):
            raise ValueError(
                f"{keys.adapter_name_or_path} has modules of its own (modules_to_save), and without its adapters the model is "
                "not the one that it began with: set ref_model: model"
            )
        return folder if keys.ref_model == "model" else None
    other = Path(resolve_folder(keys.ref_model, run.model.model_revision))
    size = load_hf_config(str(other), run.model.trust_remote_code).get_text_config().vocab_size
    if size != vocab_size:
        raise ValueError(
            f"ref_model {keys.ref_model} has a vocabulary of {size} tokens, and the trained model {vocab_size}: the reference "
            "must read the same tokens"
        )
    return other


def _saves_modules(adapter: str) -> bool:
    from .constants import ADAPTER_CONFIG_NAME

    path = Path(adapter) / ADAPTER_CONFIG_NAME
    return path.is_file() and bool(json.loads(path.read_text()).get("modules_to_save"))


def _save_config_at_start(run: RunArguments):
    """A callback that writes config.yaml once the run is accepted: a refused one must leave an earlier run's alone."""
    from . import parallel
    from .trainer_callbacks import TrainerCallback

    class SaveConfig(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if parallel.is_main():
                run.save(Path(args.output_dir) / RUN_CONFIG_NAME)

    return SaveConfig()


def build_model(run: RunArguments, prepared: Prepared):
    """VirtualModels, or a transformers model with use_mca: false, on this rank."""
    model = build_base(run, prepared, prepared.folder)
    return add_adapters(model, run) if run.finetuning.finetuning_type == "lora" else model


def build_base(run: RunArguments, prepared: Prepared, folder: Path):
    """The same without adapters, from `folder`: the run's own, or that of another reference."""
    from . import model

    remote, seed = run.model.trust_remote_code, run.training.seed
    from_scratch = run.model.train_from_scratch and folder == prepared.folder
    if not run.backend.use_mca:
        return model.load_torch_model(str(folder), from_scratch, seed, remote, prepared.vocab_size)
    if from_scratch:  # a config of its own: megatron keeps functions of the optimizer's in it
        return model.AutoModel.from_config(copy.deepcopy(prepared.config), seed=seed)
    return model.AutoModel.from_pretrained(str(folder), run.training, remote, prepared.vocab_size)


def add_adapters(model, run: RunArguments):
    """The model with the adapters that the finetuning keys ask for: fresh ones, or those of adapter_name_or_path."""
    import torch

    from . import lora, lora_files

    keys, args = run.finetuning, run.training
    spec = lora_files.spec_of_keys(keys)
    dtype = (
        torch.bfloat16 if args.bf16 else torch.float32
    )  # of frozen weights; fp16 would lose too much of them
    if keys.adapter_name_or_path:
        return lora_files.load_adapter(model, keys.adapter_name_or_path, spec.dropout, dtype)
    return lora.inject(model, spec, args.seed, dtype)


def check_adapters(run: RunArguments, config) -> None:
    """ValueError where the finetuning keys ask for adapters that this model cannot have. config: as Prepared has it."""
    import torch
    import transformers

    from . import lora, lora_files

    keys, spec, model = run.finetuning, lora_files.spec_of_keys(run.finetuning), config
    if not run.backend.use_mca:
        with torch.device("meta"):
            remote = run.model.trust_remote_code
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=remote)
    if keys.adapter_name_or_path:
        lora_files.check_modules(keys.adapter_name_or_path, spec, lora.candidates(model))
    spec = lora.plan(model, spec)
    if keys.save_merged_model:
        lora_files.check_mergeable(spec, model)


def _stage_words(run: RunArguments) -> str:
    keys = run.finetuning
    if keys.stage != "dpo":
        return keys.stage
    rest = f", sft term {keys.pref_ftx:g}" if keys.pref_ftx else ""
    rest += f", label smoothing {keys.dpo_label_smoothing:g}" if keys.dpo_label_smoothing else ""
    return f"dpo, pref_loss {keys.pref_loss}, beta {keys.pref_beta:g}{rest}"


def _packing_words(run: RunArguments) -> str:
    if run.training.sequence_packing:
        return ", samples packed, none sees another"
    return ", documents joined and cut" if run.data.packing else ""


def data_summary(run: RunArguments, prepared: Prepared, model) -> dict[str, str]:
    from .lora import spec_of

    data, train_set = run.data, prepared.data.train
    unit = (
        "samples"
        if run.finetuning.stage != "dpo"
        else "packs of pairs"
        if run.training.sequence_packing
        else "pairs"
    )
    summary = {
        "stage": _stage_words(run),
        "dataset": ", ".join(data.dataset),
        "training": f"{len(train_set):,} {unit}, {train_set.num_tokens:,} tokens, {train_set.num_trained_tokens:,} trained",
        "cutoff_len": f"{data.cutoff_len} tokens" + _packing_words(run),
    }
    if spec := spec_of(model):
        summary["finetuning"] = (
            f"LoRA of rank {spec.rank} on {len(spec.modules)} modules, scale {spec.scale:g}"
        )
    if prepared.data.eval is not None:
        summary["evaluation"] = (
            f"{len(prepared.data.eval):,} {unit}, {prepared.data.eval.num_trained_tokens:,} trained tokens"
        )
    return summary
