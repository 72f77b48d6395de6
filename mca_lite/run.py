"""A run from its arguments: planned once, then built and trained from the plan.

make_plan() needs no process group. It reads configs, tokenizer, the weights' index, adapter and
data, and refuses a model or data that do not fit, on every rank alike, before ranks meet. Later
steps take these from the plan. The command line (cli.py) parses, plans and trains.
"""

import copy
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from . import ckpt_folder, mcore, model, model_config, parallel, watchdog, weights_convert
from .args import RunArguments, TrainingArguments
from .args_rules_model import check_torch_packing
from .args_rules_training import plan_schedule
from .args_values import show_count
from .callbacks import StopSignals, TrainerCallback, TrainerControl, TrainerState
from .ckpt_megatron import DIST_NAME
from .data import DatasetBundle, load_datasets
from .data_batches import Limits, Packs, Stream, samples_of
from .errors import Judge, refuse
from .families import FAMILIES
from .families_rows import has_value_head
from .files import (
    EVAL_RESULTS_NAME,
    GENERATIONS_NAME,
    HF_GENERATION_CONFIG_NAME,
    PREDICTIONS_NAME,
    RUN_CONFIG_NAME,
    check_can_write,
    read_json,
    resolve_folder,
    text_values,
    write_file,
    write_json,
)
from .finetuning import Finetuning, Request, finetuning_class
from .inputs import inputs_of
from .model_config import load_tokenizer
from .tables import OBJECTIVES, Objective, function_of
from .weights_files import (
    GrownSource,
    SafetensorsSource,
    ScoredSource,
    check_shapes,
    check_value_head,
    model_class,
    scored,
)


@dataclass
class PlannedModel:
    """A model to build, as read from the config files in its folder.

    config: on the megatron backend a McaModelConfig, with rows for new tokens; on the torch backend
    the folder's transformers config. old_vocab_size: number of tokens of the folder's model;
    vocab_size: the same with new tokens. from_scratch: True if weights are drawn at random. source:
    reads the weight files; None if there are none to read, or they are a megatron checkpoint.
    finetuning: which weights are trained, and how."""

    folder: Path
    config: Any
    old_vocab_size: int  # tokens of the folder's model
    vocab_size: int  # the same with new tokens
    from_scratch: bool = False
    # None if the weights are drawn from a seed or come from a checkpoint
    source: SafetensorsSource | ScoredSource | GrownSource | None = None
    finetuning: Finetuning = field(default_factory=Finetuning)


@dataclass
class Plan:
    """Everything that a run needs except the values of weights; make_plan() reads it once.

    objective: the stage's row in OBJECTIVES. steps: optimizer steps of the run. steps_per_epoch: 0
    for a stream, and without training data. second_model: the objective's reference or teacher;
    None if there is none to load."""

    arguments: RunArguments
    objective: Objective
    model: PlannedModel
    tokenizer: Any
    data: DatasetBundle
    steps: int  # optimizer steps
    steps_per_epoch: int  # 0 for a stream, and without training data
    second_model: PlannedModel | None = None  # the objective's reference or teacher


# -- planning

_FROM_BF16 = (
    "note: the model's files are in bfloat16, and bf16 is false: it trains and is saved in "
    "float32, in twice the memory"
)


def make_plan(arguments: RunArguments) -> Plan:
    """Prepare a run: read tokenizer, configs, the index of the weights, adapter and data -> the
    Plan, which run.train() executes.

    ValueError if a configuration key, or the content of a file, is wrong. No collectives: usually
    one process tokenises the data, and the others wait for its lock."""
    transformers.utils.logging.disable_progress_bar()
    keys = arguments.model
    args = arguments.training
    check_can_write(args.output_dir, "output_dir")
    objective = OBJECTIVES[arguments.finetuning.stage]
    folder = resolve_folder(keys.model_name_or_path, keys.model_revision)
    planned = _plan_model(arguments, folder, keys.train_from_scratch, arguments.model_config)
    open_source(planned, args.seed)
    judge = Judge(arguments)
    tokenizer, num_new, report = _plan_tokenizer(arguments, planned, judge)
    host = functools.partial(_host_model, arguments, planned)
    request = Request(arguments, planned.config, host, num_new)
    planned.finetuning = finetuning_class(arguments.finetuning).plan(request, judge)
    judge.close()
    report += planned.finetuning.notes(arguments)
    hf_config = getattr(planned.config, "hf_config", None) or planned.config.to_dict()
    dtypes = [part.get("dtype") for part in (hf_config, text_values(hf_config))]
    if not args.bf16 and "bfloat16" in dtypes and not planned.from_scratch:
        report.append(_FROM_BF16)
    second_model = None
    make = objective.trainer_class()
    second_folder = make.second_model_folder(arguments, planned)
    report += make.notes_of_run(arguments)
    if second_folder is not None:
        second_model = planned
        if second_folder != folder:
            second_model = _plan_model(_of_any_depth(arguments), second_folder)
        make.check_second_model(arguments, planned, second_model, tokenizer)
    if second_model is not None and second_model is not planned:
        open_source(second_model)
        if second_model.old_vocab_size == planned.old_vocab_size:
            _grow(second_model, planned.vocab_size)
    inputs = inputs_of(planned.config)
    media = inputs.media(folder, tokenizer, arguments)
    stream = arguments.parts.get("stream")
    seed = args.order_seed
    data = load_datasets(arguments.data, objective.stage, tokenizer, seed, media, stream)
    data.report[:0] = report
    if getattr(samples_of(data.train), "has_media", False):
        data.report += inputs.notes(args)
    of_epoch = 0
    if data.train is not None and not isinstance(data.train, Stream):
        of_epoch = math.ceil(len(data.train) / args.train_global_batch_size)
    steps = args.steps_of_run(of_epoch)
    if data.train is not None:
        plan_schedule(args, steps)  # refuses a schedule without steps to decay in
    return Plan(arguments, objective, planned, tokenizer, data, steps, of_epoch, second_model)


def _plan_model(
    arguments: RunArguments,
    folder: Path,
    from_scratch: bool = False,
    values: dict[str, Any] | None = None,
) -> PlannedModel:
    """Read a model folder's configs, not its weights -> the PlannedModel. from_scratch: True to
    draw random weights later instead of reading them. values: the contents of its config.json, if
    it was read before. ConfigError if the model does not fit the stage."""
    remote = arguments.model.trust_remote_code
    has_scores = OBJECTIVES[arguments.finetuning.stage].scores
    if (folder / HF_GENERATION_CONFIG_NAME).is_file():
        read_json(folder / HF_GENERATION_CONFIG_NAME)  # exports copy it
    if arguments.backend.use_mca:
        config = model_config.AutoConfig.from_pretrained(
            str(folder), arguments.training, remote, values, has_scores
        )
        _check_head(config.has_value_head, has_scores, folder)
        return PlannedModel(folder, config, config.vocab_size, config.vocab_size, from_scratch)
    config = model_config.load_hf_config(str(folder), remote, values)
    if has_scores:
        model_config.add_value_head(config)
    _check_head(has_value_head(config.architectures), has_scores, folder)
    if arguments.training.sequence_packing:
        judge = Judge(None)
        check_torch_packing(config, judge)
        judge.close()
    vocab_size = config.get_text_config().vocab_size
    return PlannedModel(folder, config, vocab_size, vocab_size, from_scratch)


def _of_any_depth(arguments: RunArguments) -> RunArguments:
    """Adapt the arguments to a second model, such as a reference, which only runs forward and may
    have another number of layers -> a copy. Its layers are spread over the pipeline stages by their
    cost, and nothing is recomputed."""
    arguments = copy.copy(arguments)
    arguments.training = training = copy.copy(arguments.training)
    training.pipeline_model_parallel_layout = "auto"
    for name in ("granularity", "method", "num_layers"):
        setattr(training, f"recompute_{name}", None)
    return arguments


def _check_head(has_value_head: bool, wanted: bool, folder: Path) -> None:
    """Raise ConfigError if a model and the stage do not fit together: if the model has a value head
    (is a reward model) and the stage trains none, or has none and the stage trains one. wanted: the
    stage trains one. folder: the model's."""
    if has_value_head and not wanted:
        reason = "it is a reward model (its architectures in config.json), which has no logits"
        refuse("model_name_or_path", str(folder), reason, "stage: rm, or its base model")
    if wanted and not has_value_head:
        reason = "it is a checkpoint of a model with logits"
        remedy = "a Hugging Face folder of it, python -m mca_lite convert"
        refuse("model_name_or_path", str(folder), reason, remedy)


def open_source(planned: PlannedModel, seed: int = 42) -> None:
    """Read the headers of a planned model's weight files, and set planned.source, which reads the
    weights. Nothing is read for a model that is trained from scratch or comes from a megatron
    checkpoint.

    seed: for drawing a value head that the files lack, on megatron-core. ValueError if files are
    missing or cannot be read, or have a value head of TRL or LLaMA-Factory. ValueError too if
    tensors do not fit config.json; on plain torch this is checked only for model types in FAMILIES.
    """
    config = planned.config
    is_mca = isinstance(config, model_config.McaModelConfig)
    if planned.from_scratch or (is_mca and (planned.folder / DIST_NAME).is_dir()):
        return
    planned.source = SafetensorsSource(str(planned.folder))
    if is_mca:
        check_shapes(planned.source, config.hf_config)
        planned.source = scored(config, planned.source, seed)
        weights_convert.check_names(config, planned.source.names())
        return
    if has_value_head(config.architectures):
        check_value_head(planned.source)
    if config.model_type in FAMILIES:  # transformers may convert files of other families
        check_shapes(planned.source, config.to_dict())


def _plan_tokenizer(
    arguments: RunArguments, planned: PlannedModel, judge: Judge
) -> tuple[Any, int, list[str]]:
    """Load the tokenizer, add the configured tokens, and plan embedding rows for them ->
    (tokenizer, number of new tokens, report lines). The finetuning method may change configuration
    keys so that new rows are trained.

    If the tokenizer has more tokens than the model, and neither resize_vocab nor new tokens are
    set, that is reported to `judge`, which collects configuration errors."""
    keys = arguments.model
    plain = keys.add_tokens or []
    special = keys.add_special_tokens or []
    added = plain + special
    tokenizer = load_tokenizer(planned.folder, keys.trust_remote_code)
    known = len(tokenizer)
    old = planned.old_vocab_size
    tokenizer.add_tokens(plain)
    tokenizer.add_tokens(special, special_tokens=True)
    size = max(len(tokenizer), old)
    if size > old and not (keys.resize_vocab or added):
        reason = f"the tokenizer has {size} tokens, and the model's vocab_size is {old}: they do "
        reason += "not belong together, or new tokens were added without growing the embedding"
        judge.refuse("resize_vocab", reason, "resize_vocab: true, which grows it")
    new = max(len(tokenizer) - known, size - old)
    if not new:
        return tokenizer, 0, []
    line = f"vocabulary: {show_count(new, 'new token')}"
    if size > old:
        _grow(planned, size)
        line += f", {old:,} -> {size:,} rows"
        line += "; a new row begins as the mean of the old ones" * (not planned.from_scratch)
    line += finetuning_class(arguments.finetuning).take_new_tokens(arguments)
    return tokenizer, new, [line]


def _grow(planned: PlannedModel, size: int) -> None:
    """Change a planned model to a vocabulary of `size` tokens.

    A McaModelConfig and the source of its weights grow at once. On the torch backend the config
    stays, because transformers loads the old rows before it grows a model. ConfigError if a
    megatron checkpoint would need more rows."""
    planned.vocab_size = size
    is_mca = isinstance(planned.config, model_config.McaModelConfig)
    if size == planned.old_vocab_size or not is_mca:
        return
    if (planned.folder / DIST_NAME).is_dir() and not planned.from_scratch:
        model.refuse_new_rows(planned.folder, planned.old_vocab_size, size)
    model_config.grow(planned.config, size)
    if planned.source is not None:
        names = weights_convert.vocabulary_names(planned.config)
        planned.source = GrownSource(planned.source, names, size)


def _host_model(arguments: RunArguments, planned: PlannedModel) -> Any:
    """A planned model without weights, as hosts.host_of takes it (for access by Hugging Face
    names): on megatron-core its McaModelConfig, on the torch backend the transformers model on the
    meta device."""
    if arguments.backend.use_mca:
        return planned.config
    with torch.device("meta"):
        return model_class(planned.config).from_config(
            planned.config, trust_remote_code=arguments.model.trust_remote_code
        )


# -- building and training


def build_model(plan: Plan) -> Any:
    """Build the planned model on this rank, with its finetuning applied (frozen weights, adapters)
    -> VirtualModels, or a transformers model with use_mca: false."""
    built = build_planned(plan.arguments, plan.model)
    args = plan.arguments.training
    # dtype of frozen weights; fp16 would lose too much precision
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return plan.model.finetuning.place(built, args.seed, dtype)


def build_planned(arguments: RunArguments, planned: PlannedModel) -> Any:
    """Build a planned model on this rank and load its weights, or draw them if it is trained from
    scratch -> VirtualModels, or a transformers model with use_mca: false. Finetuning is not applied
    yet: no adapters are there, and no weights are frozen except quantised ones."""
    # a copy, because megatron-core stores functions of the optimizer in it
    config = copy.deepcopy(planned.config)
    seed = arguments.training.seed
    remote = arguments.model.trust_remote_code
    folder = str(planned.folder)
    if not arguments.backend.use_mca:
        return model.load_torch_model(
            folder, planned.from_scratch, seed, remote, planned.vocab_size, config=config
        )
    if planned.from_scratch:
        return model.AutoModel.from_config(config, seed=seed)
    return model.AutoModel.from_pretrained(
        folder, arguments.training, remote, config=config, source=planned.source
    )


def train(plan: Plan, callbacks: Sequence[TrainerCallback] = ()) -> Any:
    """Execute a planned run -> the trainer. It starts the process group, builds the model, trains,
    exports, evaluates and predicts as configured, and ends the process group. Collective.

    callbacks: added to the trainer's. A signal during the export does not interrupt it, because
    half a model is useless."""
    args = plan.arguments.training
    parallel.initialize(args, plan.arguments.backend.use_mca)
    with mcore.quiet(), watchdog.watch(args), ckpt_folder.hold(args.output_dir):
        trainer = build_trainer(plan, callbacks)
        if args.do_train:
            result = trainer.train()
            with StopSignals():
                _export(plan, trainer, result)
        if args.do_eval and not (args.do_train and args.eval_strategy != "no"):
            metrics = trainer.evaluate()
            if parallel.is_main():
                write_json(Path(args.output_dir) / EVAL_RESULTS_NAME, metrics)
        if args.do_predict:
            _predict(trainer.eval_dataset, trainer)
    parallel.shutdown()
    return trainer


def _predict(sets: Any, trainer: Any) -> None:
    """Run the trainer's predict() over the evaluation data, and write predictions.jsonl with one
    line per sample. With predict_with_generate also write generations.jsonl, one line per answer.
    sets: a dataset, or {name: dataset}. Collective."""
    lines: dict[str, list[dict[str, Any]]] = {PREDICTIONS_NAME: [], GENERATIONS_NAME: []}
    if not isinstance(sets, dict):
        sets = {"": sets}
    for name, dataset in sets.items():
        logps, _, metrics = trainer.predict(dataset, metric_key_prefix="predict")
        answers = trainer.answers.lines if trainer.answers is not None else ()
        for file, of_set in zip(lines, (trainer.prediction_records(logps), answers), strict=True):
            lines[file] += [{"dataset": name} | line if name else line for line in of_set]
        shown = ", ".join(f"{key} {value:.4f}" for key, value in metrics.items())
        trainer.report.print(f"{name or 'evaluation'}: {len(logps):,} samples, {shown}")
    for file, records in lines.items():
        if records and parallel.is_main():
            text = "\n".join(json.dumps(line, ensure_ascii=False) for line in records)
            write_file(Path(trainer.args.output_dir) / file, f"{text}\n")


def build_trainer(plan: Plan, callbacks: Sequence[TrainerCallback] = ()) -> Any:
    """Build the planned model and the trainer of the run's stage (McaTrainer or a subclass), which
    gets the model and the planned data. callbacks: added to the trainer's. Collective."""
    arguments = plan.arguments
    args = plan.arguments.training
    data = plan.data
    if parallel.is_main():
        print("\n".join(data.report), flush=True)
    built = build_model(plan)
    if arguments.backend.use_mca:
        data.media.is_read = built[0].pre_process
    make = plan.objective.trainer_class()
    of_sets = arguments.parts.get("datasets")
    if of_sets is not None and arguments.log_each_dataset:
        names = arguments.data.dataset
        callbacks = [*callbacks, function_of("part_datasets:EachDataset")(data, names)]
    second_model = None
    if plan.second_model is not None:
        second_model = functools.partial(build_planned, arguments, plan.second_model)
    trainer = make(
        model=built,
        args=args,
        tokenizer=plan.tokenizer,
        train_dataset=data.train,
        eval_dataset=data.eval,
        shuffle=not arguments.data.disable_shuffling,
        summary={"data": data_summary(plan)},
        callbacks=[_SaveConfig(arguments), *callbacks],
        **make.own_keywords(arguments, second_model),
    )
    trainer.settings = arguments.to_yaml_dict()
    return trainer


def _export(plan: Plan, trainer: Any, result: Any) -> None:
    """Save the trained model as configured, and print how the training ended: its steps, time and
    mean loss, without the steps before a resume. result: what trainer.train() returned. Collective.
    """
    args = plan.arguments.training
    first = trainer.report.first_step
    if args.save_hf_model:
        trainer.save_model()
    if plan.model.finetuning.merges:
        trainer.save_merged_model()
    if result.global_step > first:
        steps = show_count(result.global_step - first, "step")
        seconds = result.metrics["train_runtime"]
        done = f"trained {steps} in {seconds:.1f} s, mean loss {result.training_loss:.4f}"
    else:
        done = f"nothing was left to train after step {first} of {trainer.state.max_steps}"
    if args.save_hf_model:
        done += f"; the model is in {args.output_dir}"
    trainer.report.print(done)


class _SaveConfig(TrainerCallback):
    """Writes config.yaml and the tokenizer to output_dir when training begins, not before, so that
    a run refused earlier leaves another run's files alone."""

    def __init__(self, arguments: RunArguments):
        self.arguments = arguments

    def on_train_begin(  # type: ignore[override]
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any,
        **kwargs: Any,
    ) -> None:
        if parallel.is_main():
            self.arguments.save(Path(args.output_dir) / RUN_CONFIG_NAME)
        trainer.save_tokenizer(Path(args.output_dir))


def data_summary(plan: Plan) -> dict[str, str]:
    """Some lines of the text that is printed at the start, {name: text}: about the objective,
    finetuning and data of a run."""
    data = plan.arguments.data
    keys = plan.arguments.finetuning
    packing = ""
    if plan.arguments.training.sequence_packing:
        packing = ", samples packed, none sees another"
    elif data.packing:
        packing = ", documents joined and cut"
    config = plan.model.config
    positions = Limits.of(getattr(config, "hf_config", None) or config.to_dict()).positions
    if data.cutoff_len > positions:
        packing += f", above the model's {positions:,} positions (max_position_embeddings)"
    summary = {
        "stage": ", ".join(filter(None, (keys.stage, plan.objective.describe(plan.arguments)))),
        "finetuning": str(plan.model.finetuning),
        "dataset": ", ".join(data.dataset),
        "cutoff_len": f"{data.cutoff_len} tokens{packing}",
    }
    if len(data.dataset) > 1:
        weights = map("weight {:g}".format, data.mix_weights or ())
        summary["mixed"] = ", ".join([data.mix_strategy, *weights])
    for name, part in named_sets(plan.data).items():
        if isinstance(part, Stream):
            summary[name] = part.describe()
            continue
        count = f"{len(samples_of(part)):,} {plan.objective.unit}s"
        if isinstance(part, Packs):
            count = f"{len(part):,} packs of {count}"
        tokens = f"{part.num_tokens:,} tokens, {part.num_trained_tokens:,} trained"
        summary[name] = f"{count}, {tokens}"
    return summary


def named_sets(data: DatasetBundle) -> dict[str, Any]:
    """Name the datasets of a run: {"training": ..., "evaluation": ...}. With eval_on_each_dataset,
    each evaluation set has its own name instead of "evaluation". Datasets that the run does not
    have are left out."""
    evaluated: Any = data.eval
    if not isinstance(evaluated, dict):
        evaluated = {"evaluation": evaluated}
    sets = {"training": data.train, **evaluated}
    return {name: dataset for name, dataset in sets.items() if dataset is not None}
