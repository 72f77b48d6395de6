"""McaTrainer: the training loop. Its backend shards and runs the model.

A trainer is also the objective of its steps (step.py), and subclasses override its hooks. A metric
is a (sum, count) pair; pairs are summed over micro-batches, ranks and steps, and divided when
shown."""

import functools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from . import ckpt, ckpt_folder, mcore, parallel, parts, watchdog
from .backend import mean_of
from .backend_megatron import MegatronBackend
from .backend_torch import TorchBackend
from .batch import Batch
from .callbacks import (
    FLAGS,
    Interrupted,
    StopSignals,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    export_states,
    raise_flags,
)
from .compat import OtherNames
from .data_batches import (
    BatchPlan,
    Collator,
    Limits,
    Stream,
    check_batch,
    count_tokens,
    make_loader,
    samples_of,
    with_samples,
)
from .errors import expect, refuse
from .files import TRAINER_STATE_NAME
from .log import Report, Throughput, model_sizes, model_work, peak_memory_gib, run_summary
from .model import VirtualModels
from .optim import get_megatron_lr_scheduler, given_optimizers
from .step import (
    arrange,
    arrange_step,
    compute_gradients,
    count_labels,
    forward_step,
    inputs_of,
    new_numbers,
    row_length,
    save_model,
    save_tokenizer,
    sum_losses,
    to_length,
    use_loss,
)
from .tables import function_of, other_columns
from .trainer_evaluation import Evaluator, PredictionOutput, records_of
from .trainer_events import (
    EvalLoopOutput,
    Numbers,
    Phases,
    RunSums,
    SentNumbers,
    TrainOutput,
    as_callback,
    callbacks_of,
    check_given,
    check_hooks,
    collect_garbage,
    steady_host,
)
from .trainer_nonfinite import FiniteGuard

STEPS_PER_LOOK = 1000  # steps between full garbage collections
__path__: list[str] = []  # makes mcore_adapter's paths, such as mca_lite.trainer.utils, importable


def __getattr__(name: str) -> Any:
    """Return a public name of the package that this module lacks, such as DPOTrainer, so that it
    can be imported from here, as trainers of mcore_adapter from `mcore_adapter.trainer`."""
    return sys.modules[__package__].__getattr__(name)


class McaTrainer(OtherNames):
    """The training loop: trains a model on a dataset, with megatron-core or plain torch.

    model: VirtualModels (a model on megatron-core) or a transformers model (torch backend).
    args: TrainingArguments.
    tokenizer (or processing_class): saved with the model; its padding token is used.
    data_collator: list of samples -> {"input_ids", "labels", "attention_mask"} [b, s]. Labels are
    already shifted (labels[t] is the target of position t); rows are padded on the right. None:
    samples of {"input_ids", "labels"} are padded; their labels must be shifted too.
    train_dataset: map-style, or a Stream (a set without a length, read in its own order).
    eval_dataset: map-style, or a dict of such datasets. shuffle: shuffle a map-style training set.
    callbacks: of this package or transformers, instances or classes. summary: further sections for
    the summary that is printed at the start.
    optimizers: torch backend only: (a torch optimizer over the model's trained parameters, its
    scheduler or None).
    compute_metrics(EvalPrediction): returns {name: number}, from the results of
    preprocess_logits_for_metrics(logits, labels) for each sample. As in transformers, position t of
    the labels is predicted by t - 1.
    backend: replaces the one made for the model.

    TypeError for a model without `config`, for args or callbacks of another type, and for a
    subclass that check_hooks() refuses, such as one that overrides compute_loss."""

    metrics_keys = ["loss"]
    documents_per_sample = 1
    # columns that this class ignores. Not inherited: a user's subclass may read any column
    unread_columns: ClassVar[tuple[str, ...]] = other_columns()
    was_trained = False  # True after the first training_step
    _reference_model: Any = None  # a second model that runs forward on each batch
    _sent: SentNumbers | None = None  # the Numbers of the current step in train()
    answers: Any = None  # set by tool_generation.Answers, for predict_with_generate
    _loss_of_logits: Any = None  # a subclass's method: loss_tokens.Logits -> losses per token
    around_loss: Any = None  # a part's function: (batch, loss_func, output) -> loss_func(output)
    # what the last loss summed: (labels, losses per token), or (True or 1 where it counts, losses)
    terms: Any = None

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        tokenizer: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        shuffle: bool = True,
        summary: dict[str, Any] | None = None,
        processing_class: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        compute_metrics: Any = None,
        preprocess_logits_for_metrics: Any = None,
        backend: Any = None,
    ) -> None:
        check_given(model, args)
        check_hooks(type(self), McaTrainer)
        is_megatron = isinstance(model, VirtualModels)
        self._given = given_optimizers(optimizers, model, is_megatron)
        self.args = args
        self.model = model
        self.tokenizer = tokenizer or processing_class
        self.settings = ckpt.settings_of(args)
        self.checkpoints = ckpt.Checkpoints(self)
        self.guard = FiniteGuard(self)
        if backend is None:
            parallel.start_process_group(args.ddp_timeout)
            self.guard.check_weights("before training")
            backend = (MegatronBackend if is_megatron else TorchBackend)(model, args)
        self.backend = backend
        self.models = backend.chunks
        self.limits = Limits.of(backend.hf_config or {})
        degrees = "tensor_model context expert_model".split()
        sizes = [getattr(args, f"{degree}_parallel_size") for degree in degrees]
        self.phases = Phases(waits_in_model=max(sizes) > 1)
        backend.use_timers(self.phases.timer)
        backend.pad_token_id = getattr(self.tokenizer, "pad_token_id", None) or 0
        use_loss(backend, self)
        if backend.predicts_ahead:
            self.metrics_keys = [*self.metrics_keys, "mtp_loss"]
        self.data_collator = data_collator or Collator(backend.pad_token_id)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.shuffle = shuffle
        self.extra_summary = summary or {}
        self.lr_scheduler = self._given[1]
        self.optimizer = self.batch_plan = self._rate = cast(Any, None)  # made in training
        self.state = TrainerState()
        self.control = TrainerControl()
        self.signals = StopSignals()
        self.evaluator = Evaluator(self)
        self.report = Report(args, parallel.is_main())
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.loaders = {"train_dataloader": None, "eval_dataloader": None}
        self.callbacks = [*map(as_callback, callbacks or ()), *callbacks_of(args), self.report]
        self.notify("on_init_end")
        self.evaluator.check()

    # -- the loop

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train until max_steps or num_train_epochs, or until a callback stops the run ->
        (global_step, mean loss over the steps made now, {"train_loss", "train_runtime" in
        seconds}). Every rank must call it, with equally many training samples.

        resume_from_checkpoint: a path; True or "auto": the newest intact checkpoint in output_dir,
        or start anew if there is no checkpoint; False: start anew; None:
        args.resume_from_checkpoint. OutputFolderError if another run uses output_dir, or if it
        cannot be written or is not shared by the nodes. CheckpointError if a checkpoint cannot be
        resumed from, if all of them are damaged, or if a new run would begin beside checkpoints
        without overwrite_output_dir. After SIGTERM, SIGINT or SIGUSR1 on any rank during a step,
        all ranks finish it, save a checkpoint, and raise Interrupted, a SystemExit with
        callbacks.EXIT_CODE; this needs train() to run in the main thread."""
        args = self.args
        with (
            mcore.quiet(),
            watchdog.watch(args),
            ckpt_folder.hold(args.output_dir),
            StopSignals() as self.signals,
            steady_host(args),
        ):
            return self._train(resume_from_checkpoint)

    def _train(self, resume_from_checkpoint: str | bool | None) -> TrainOutput:
        """The body of train(): prepare, run the steps, end the run. train() wraps it in the
        watchdog, the output folder's lock and the signal handlers."""
        plan = self._prepare_train_loop(resume_from_checkpoint)
        started = time.perf_counter()
        batches = None
        self.notify("on_train_begin")
        self._agree()
        if self.args.sequence_packing and (cudnn := parts.module_of("part_cudnn")):
            cudnn.foresee(self.look_ahead(plan))
        while not (self.state.is_over or self.control.should_training_stop):
            epoch, step = divmod(self.state.position, plan.steps_per_epoch)
            epoch_begins = batches is None or step == 0
            if batches is None or self.control.should_epoch_stop:
                self.loaders["train_dataloader"] = loader = self._train_loader(plan, epoch, step)
                batches = iter(loader)
            self._begin_step(epoch_begins)
            data, length, numbers = self.read_step(batches, plan, step)
            self._sent = SentNumbers(numbers, self.backend)
            _, metrics, skipped, grad_norm, zeros = self.training_step(self.models, data, length)
            metrics, grad_norm = self.guard.after_step(skipped, grad_norm, metrics)
            numbers = self._sent.result(metrics)
            self.sums.add(numbers, skipped, grad_norm, zeros)
            tokens, *squares_and_patches, positions = numbers.counts()
            self.state.count_step(plan.num_samples_of(step), int(tokens), plan.steps_per_epoch)
            flops = self.work.flops(tokens, *squares_and_patches)
            self.throughput.stop(tokens, positions, flops)
            self.phases.steps += 1
            self._end_step()
        return self._end_run(time.perf_counter() - started)

    def training_step(
        self, models: Any, data_iterator: Iterable[Batch], seq_length: int
    ) -> tuple[Any, ...]:
        """Make one optimizer step over all micro-batches of `data_iterator`, which are as the data
        collator made them, or already arranged for the model.

        -> (mean loss over this rank's micro-batches, metrics of each micro-batch, 1 if the update
        was skipped else 0, gradient norm before clipping (0 if fp16's loss scale overflowed),
        number of zeros in the gradient or None). On pipeline stages before the last, the loss is 0
        and metrics are []. `models` and `seq_length` have no effect. Makes the optimizer and
        schedule if there are none. Collective: pipeline schedule, gradient reduction and
        optimizer."""
        self._prepare_updates()
        self.was_trained = True
        micro_batches = list(data_iterator)
        if any("padding_mask" not in batch for batch in micro_batches):
            given = self._checked(micro_batches)
            micro_batches = arrange_step(self.backend, self, given)
            self.backend.weigh_micro_batches(micro_batches, len(given) * self.backend.dp_size)
        micro_batches = self.prepared(micro_batches)
        self.guard.start_step(micro_batches)
        metrics = compute_gradients(self.backend, self, self.forward_step, micro_batches)
        if self._sent is not None:
            self._sent.begin(metrics)
        for _ in micro_batches[1:]:
            self.notify("on_substep_end")
        self.notify("on_pre_optimizer_step")
        watchdog.note("updating the weights")
        updated, grad_norm, num_zeros = self.backend.step()
        self.notify("on_optimizer_step")
        self._rate = self.lr_scheduler.get_last_lr()[0]
        if updated:
            self.lr_scheduler.step(1)
        total, count = new_numbers(self, metrics).vector[:2]
        return mean_of(total, count), metrics, int(not updated), grad_norm, num_zeros

    # -- the objective

    def forward_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
        """Run the iterator's next micro-batch through `model`, one chunk of this rank's model ->
        (output, loss_func). loss_func(output) computes the loss. The backend's schedule calls it,
        as megatron's schedules call a forward_step_func."""
        output, loss_func = forward_step(
            self.backend, self.args, self, data_iterator, model, self.inputs_of
        )
        return output, self.guard.mark(loss_func)

    def prepared(self, micro_batches: list[Batch]) -> list[Batch]:
        """The arranged micro-batches of a step, after the hook _prepare_micro_batches, which may
        add columns, such as log-probabilities of a reference model. All ranks must call it."""
        return self._prepare_micro_batches(micro_batches, row_length(micro_batches[0]))

    def _prepare_micro_batches(self, micro_batches: list[Batch], seq_length: int) -> list[Batch]:
        """Hook: add columns to the micro-batches of a training or evaluation step before they run
        -> the micro-batches. All ranks call it, so it may use collectives or run a second model
        forward.

        micro_batches: arranged for the model, not yet on the rank's device. Their columns: labels
        int64 [b, s], IGNORE_INDEX for positions without a loss; padding_mask, True for padding;
        cu_seqlens for packed rows. seq_length: s of the first micro-batch. If the layout needs one
        common s, all have it, and those returned must have a common s too.
        Register the name of an added column with register_column(). It is [b, s] if it is per
        token, [n] if it is per real document or sample. _pre_compute_loss then gets it in `batch`,
        on the rank's device; a column per token is sharded as the tokens are, others are whole."""
        return micro_batches

    def _pre_compute_loss(self, batch: Batch, inputs: dict[str, Any], *more: Any) -> Any:
        """Hook: make the function that takes a micro-batch's model output and returns the results
        of _post_compute_loss. Called on every pipeline stage. inputs: the model's inputs.
        batch: columns that the model takes are whole rows; others, such as attention_mask and those
        of register_column, are on this rank's device, and those per token hold only its
        context-parallel part. more: a subclass's values; _post_compute_loss gets them between
        labels and losses."""
        return functools.partial(self._post_compute_loss, inputs["labels"], *more)

    def inputs_of(self, batch: Batch) -> dict[str, Any]:
        """Make the model's keyword arguments from an arranged micro-batch: tensors on this rank's
        device, sharded for its context-parallel rank; see step.inputs_of."""
        return inputs_of(self.backend, batch)

    def _post_compute_loss(self, labels: Any, losses: torch.Tensor) -> tuple[Any, ...]:
        """Hook: reduce this rank's token losses [b, s] -> (the loss to differentiate, number of
        trained tokens int32, {"loss": [sum, tokens]} for the log). The loss is the sum over trained
        tokens; step.sum_losses scales it for the backend.

        With multi-token prediction, labels are part_mtp.Targets (with the labels of tokens further
        ahead), losses are [b, s, 1 + layers], and "mtp_loss" is another metric."""
        self.terms = (labels, losses.detach())
        return sum_losses(self.backend, labels, losses)

    def _count_of_loss(self, batch: Batch) -> float:
        """Hook: the number by which a micro-batch's loss will be divided, as in _post_compute_loss,
        but counted over whole rows; in this class the number of trained tokens. It is needed before
        the forward pass, to weight router losses."""
        return count_labels(batch)

    # -- data

    def _prepare_samples(self, samples: Any) -> Any:
        """Hook: add columns that this objective computes before training, such as log-probabilities
        of a reference model, to a dataset -> a view of the dataset with these columns. A dataset
        that needs none, or was prepared before, is returned unchanged. All ranks call it."""
        return samples

    def _prepared(self, dataset: Any) -> Any:
        """Call the hook _prepare_samples for a dataset, or for each in a dict of datasets -> the
        result, or the dict of results; None for None. All ranks must call it."""
        if isinstance(dataset, dict):
            return {name: self._prepared(part) for name, part in dataset.items()}
        return None if dataset is None else with_samples(dataset, self._prepare_samples)

    def _prepare_datasets(self, *names: str) -> None:
        """Call _prepare_samples for the datasets in the attributes `names` ("train_dataset",
        "eval_dataset"), and set the attributes to the results. All ranks must call it."""
        for name in names:
            setattr(self, name, self._prepared(getattr(self, name)))

    def get_train_dataloader(self) -> Any:
        """Make an endless DataLoader over this data-parallel rank's training micro-batches; a
        Stream (a set without a length) makes its own. All ranks must call it: the objective may
        first compute columns, such as a reference model's."""
        self._prepare_datasets("train_dataset")
        return self._train_loader(self.plan_batches(self.train_dataset), 0, 0)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Make a DataLoader for evaluation_loop(): this data-parallel rank's micro-batches, through
        one dataset once. eval_dataset: None: the trainer's own. All ranks must call it: the
        objective may first compute columns, such as a reference model's."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.evaluator.loader_of(self._prepared(given))

    def plan_batches(self, dataset: Any, training: bool = True) -> BatchPlan:
        """Plan which samples this data-parallel rank runs in which micro-batch -> the BatchPlan.
        training: False for evaluation. ValueError for an empty dataset, a dict of datasets, or a
        dataset without a length (but a training Stream is taken if max_steps is set); also for a
        document longer than the model's positions, if the dataset knows its lengths."""
        args = self.args
        streams = training and isinstance(dataset, Stream)
        name = "train_dataset" if training else "eval_dataset"
        is_known = streams or hasattr(dataset, "__len__")
        expect(
            is_known and not isinstance(dataset, dict),
            f"{name}: expected one dataset with a length (a list; streaming: true reads files "
            f"as they come), got a {type(dataset).__name__}",
        )
        # only this package's datasets know their lengths
        lengths = getattr(samples_of(dataset), "document_lengths", None)
        if lengths is not None and lengths.size:
            self.limits.check_positions(int(lengths.max()))
        size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
        expect(
            not streams or args.max_steps > 0,
            "max_steps: a streamed dataset has no length: set max_steps",
        )
        of_a_step = size * args.gradient_accumulation_steps * self.backend.dp_size
        return BatchPlan(
            args.max_steps * of_a_step if streams else len(dataset),
            size,
            # evaluation too runs several micro-batches at once, to keep a pipeline busy
            args.gradient_accumulation_steps,
            self.backend.dp_rank,
            self.backend.dp_size,
            seed=args.order_seed,
            shuffle=self.shuffle and training and not streams,  # a stream shuffles itself
            costs=self._costs(dataset),
        )

    def _costs(self, dataset: Any) -> np.ndarray | None:
        """Estimate the cost of a forward pass for each sample, by which BatchPlan balances ranks:
        [samples], in multiplications, or as the sum of squared document lengths if the model's
        sizes are unknown. None if the dataset's `work` (sizes of its samples) is absent or None."""
        work = getattr(dataset, "work", None)
        if work is None:
            return None
        tokens, squares = work.T
        sizes = model_sizes(getattr(self.model, "config", None))
        return squares if sizes is None else sizes.cost(tokens, squares)

    def _train_loader(self, plan: BatchPlan, epoch: int, step: int) -> Any:
        """A DataLoader over this rank's training micro-batches, from step `step` of epoch `epoch`
        on; for a Stream (a set without a length) from state.data_position on. plan: the run's."""
        workers = self.args.dataloader_num_workers
        dataset = self.train_dataset
        if isinstance(dataset, Stream):
            start = self.state.data_position
            return dataset.loader(self.data_collator, plan, start, workers, parallel.is_main())
        return make_loader(dataset, self.data_collator, plan, epoch, step, num_workers=workers)

    def read_step(
        self, loader: Iterator[Batch], plan: BatchPlan, step: int
    ) -> tuple[list[Batch], int, Numbers]:
        """Read the micro-batches of a step, and arrange them for the model -> (this rank's
        micro-batches, row length of the first one, Numbers with their token counts; 0 on ranks
        without backend.counts_tokens). loader: yields collated micro-batches. plan: which samples
        each rank runs. step: its index in the epoch. If the layout needs it, all micro-batches get
        one row length, which may take a collective."""
        watchdog.note("reading data", self.state.global_step)
        with self.phases.of["data"]:
            batches = [next(loader) for _ in range(plan.num_micro_batches(step))]
        if "data_position" in batches[-1]:  # batches of a stream have it
            self.state.data_position = batches[-1]["data_position"]
        given = self._checked(batches)
        batches = arrange_step(self.backend, self, given)
        numbers = new_numbers(self)
        if self.backend.counts_tokens:
            numbers.set_counts(*self._count(given, batches))
        watchdog.note("running the model")
        filled = math.ceil(plan.num_samples_of(step) / plan.micro_batch_size)
        self.backend.weigh_micro_batches(batches, filled)
        return batches, row_length(batches[0]), numbers

    def look_ahead(self, plan: BatchPlan) -> Iterator[Batch]:
        """Read this rank's next micro-batches before they are trained, so that cuDNN graphs can be
        built for their sizes. Yields them, arranged for the model, up to the end of the epoch; each
        is padded to its own length. The trainer's state stays as it is. plan: the run's BatchPlan.

        Yields nothing for a user's collator and for most dataset classes of a user, because they
        might give other data when read again. Also yields nothing for a model that takes inputs
        other than text."""
        samples = self.train_dataset
        lengths = getattr(samples_of(samples), "document_lengths", None)
        is_same = isinstance(samples, list) or lengths is not None
        if not is_same or type(self.data_collator) is not Collator or self.limits.has_inputs:
            return
        epoch, first = divmod(self.state.position, plan.steps_per_epoch)
        loader = make_loader(samples, self.data_collator, plan, epoch, first, epoch + 1)
        for batch in loader:
            [checked] = self._checked([batch])
            yield to_length(self.backend, self._arrange(checked))

    def _checked(self, batches: list[Batch]) -> list[Batch]:
        """Check batches of the data collator -> the batches, with missing columns added and ignored
        columns removed. ValueError for a batch that check_batch() refuses."""
        # if so, attention_mask numbers the documents of a row
        numbered = self.args.sequence_packing or self.documents_per_sample > 1
        unread = vars(type(self)).get("unread_columns", ())
        return [check_batch(batch, numbered, self.limits, unread) for batch in batches]

    def _count(self, batches: list[Batch], arranged: list[Batch]) -> tuple[Any, ...]:
        """Count a step's data on this rank -> (*sums of count_tokens() over the checked `batches`;
        number of positions in `arranged`, the same data in rows, with padding)."""
        counts = zip(*map(count_tokens, batches), strict=True)
        return *map(sum, counts), sum(batch["input_ids"].numel() for batch in arranged)

    def _arrange(self, batch: Batch) -> Batch:
        """Hook: arrange a batch that was collated and checked for the model: one document per row,
        or with sequence_packing all documents in one packed row; see step.arrange."""
        return arrange(self.backend, self.args, batch, self.documents_per_sample)

    # -- around a step

    def _prepare_train_loop(self, resume_from_checkpoint: str | bool | None) -> BatchPlan:
        """Prepare train(): data, optimizer, schedule, state and log; load the checkpoint to resume
        from, if any -> the BatchPlan (which samples each rank runs). Collective."""
        args = self.args
        # before a checkpoint is loaded, because a cached reference is the model before training
        self._prepare_datasets("train_dataset", "eval_dataset")
        self.batch_plan = plan = self.plan_batches(self.train_dataset)
        max_steps = args.steps_of_run(plan.steps_per_epoch)
        self.lr_scheduler = self._given[1]  # each call of train() makes a new schedule
        self.state = TrainerState(
            max_steps=max_steps, num_train_epochs=max_steps / plan.steps_per_epoch
        )
        self.control = TrainerControl()
        self._prepare_updates()
        if resume_from_checkpoint is None:
            resume_from_checkpoint = args.resume_from_checkpoint
        self._load_from_checkpoint(resume_from_checkpoint)
        self.guard.start_run()
        self.checkpoints.written_step = None
        self.guard.check_weights("before the first step")
        carried = self.state.log_sums or {}
        self.sums = RunSums(Numbers.zeros(self.metrics_keys), carried)
        self.backend.carry_router_sums(carried.get("routers"))
        self.checkpoints.prepare()
        self.throughput = Throughput.of(args)
        passes = self.forward_passes(getattr(self, "train_config", None))
        self.work = model_work(self.model, self._reference_model, passes)
        if getattr(self.backend, "chooses_recomputed", False):
            of_run = self.train_dataset, self.settings, self.documents_per_sample
            self.extra_summary |= function_of("part_long_auto:choose")(self.backend, *of_run)
        self.report.summary(run_summary(self, plan))
        return plan

    def _prepare_updates(self) -> None:
        """Make the optimizer and the learning-rate schedule, each only if there is none."""
        if self.optimizer is None:
            self.create_optimizer()
        if self.lr_scheduler is None:
            steps = self.args.max_steps
            if steps <= 0:
                plan = self.plan_batches(self.train_dataset)
                steps = self.args.steps_of_run(plan.steps_per_epoch)
            self.create_scheduler(steps)

    def create_optimizer(self) -> Any:
        """Hook: set `optimizer` to the one that the user passed to the trainer, otherwise to a new
        one -> the optimizer."""
        self.optimizer = self._given[0] or self.backend.create_optimizer()
        self.backend.optimizer = self.optimizer
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Hook: set `lr_scheduler` to the one that the user passed, otherwise to a new schedule
        over num_training_steps of `optimizer` (None: the trainer's) -> the schedule."""
        self.lr_scheduler = self._given[1] or get_megatron_lr_scheduler(
            self.args, num_training_steps, optimizer or self.optimizer
        )
        return self.lr_scheduler

    def notify(self, event: str, **kwargs: Any) -> None:
        """Call the method `event`, such as "on_step_end", of each callback. If a callback returns
        something other than None, that becomes `control` (the flags such as should_save)."""
        kwargs.update(
            **self.loaders,
            trainer=self,
            model=self.model,
            processing_class=self.tokenizer,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
        )
        with self.phases.of["callbacks"]:
            for callback in self.callbacks:
                answer = getattr(callback, event)(self.args, self.state, self.control, **kwargs)
                if answer is not None:
                    self.control = answer

    def add_callback(self, callback: Any) -> None:
        """Add a callback of this package or transformers, an instance or a class."""
        self.callbacks.append(as_callback(callback))

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it; None if there is none."""
        of_kind = callback if isinstance(callback, type) else ()
        for one in self.callbacks:
            if one is callback or isinstance(one, of_kind):
                self.callbacks.remove(one)
                return one
        return None

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class, if there is one."""
        self.pop_callback(callback)

    # -- between steps. All of it is collective: one small all-reduce combines the flags and signals
    # of all ranks after each step, log line, evaluation and checkpoint

    # a step's flag -> the method that follows it, in order
    _ACTIONS = {
        "should_log": "_log_step",
        "should_evaluate": "_evaluate_step",
        "should_save": "_save_step",
    }

    def _begin_step(self, epoch_begins: bool) -> None:
        """Clear flags of the step before, such as should_save, and if epoch_begins
        should_epoch_stop; notify the callbacks, and start the step's clock."""
        if epoch_begins:
            self.control.should_epoch_stop = False
            self.notify("on_epoch_begin")
        for flag in self._ACTIONS:
            setattr(self.control, flag, False)
        self.notify("on_step_begin")
        self.throughput.start()

    def _end_step(self) -> None:
        """After a step was counted: log, evaluate and save if it is time. Raises Interrupted after
        a signal on any rank."""
        state = self.state
        watchdog.note(watchdog.BETWEEN_STEPS, state.global_step)
        if self.guard.steps % STEPS_PER_LOOK == 1:
            collect_garbage()  # after the first step, this frees what compiling left
        steps_per_epoch = self.batch_plan.steps_per_epoch
        raise_flags(self.control, self.args, state, state.position % steps_per_epoch == 0)
        self.notify("on_step_end")
        done = self._act()
        epoch_ends = state.position % steps_per_epoch == 0  # a callback may have ended the epoch
        if epoch_ends or state.is_over or self.control.should_training_stop:
            raise_flags(self.control, self.args, state, end_of_epoch=True)
            for flag in done:  # this step has already done these
                setattr(self.control, flag, False)
            self.notify("on_epoch_end")
            self._act()

    def _agree(self) -> list[int]:
        """Exchange flags (such as should_save), received signals and phase times between ranks ->
        [number of a signal that any rank received, or 0; 1 if any rank is still writing a
        checkpoint, else 0]. Collective.

        A flag set on any rank is set on all afterwards. If a callback stopped the epoch, its
        remaining steps are added to state.left_out_steps."""
        flags = [getattr(self.control, name) for name in FLAGS]
        signal, is_writing, *largest = parallel.largest(
            self.signals.received,
            int(self.checkpoints.is_writing),
            *map(int, flags),
            *self.phases.numbers(),
        )
        for name, flag in zip(FLAGS, largest, strict=False):
            setattr(self.control, name, bool(flag))
        self.phases.compare(largest[len(FLAGS) :])
        if self.control.should_epoch_stop:
            self.state.left_out_steps += -self.state.position % self.batch_plan.steps_per_epoch
        return [signal, is_writing]

    def _act(self) -> list[str]:
        """Do what the flags ask for: log, evaluate, save -> names of the flags that were followed,
        such as "should_log". A flag of any rank counts. Also finishes a begun checkpoint, if all
        ranks have written it or any rank got a signal; after a signal raises Interrupted.
        Collective."""
        done = []
        signal, is_writing = self._agree()
        for flag, action in self._ACTIONS.items():
            if getattr(self.control, flag):
                setattr(self.control, flag, False)
                done.append(flag)
                getattr(self, action)()
                signal, is_writing = self._agree()
        if "should_evaluate" in done or "should_save" in done:
            collect_garbage()
        if self.checkpoints.is_busy and (signal or not is_writing):
            self.checkpoints.finish()
            signal, _ = self._agree()
        if signal:
            self._interrupt(signal)
        return done

    def _log_step(self) -> None:
        """Notify callbacks of a log line about the steps since the last line, if there are any.
        May be collective for a model with experts, also without steps."""
        of_routers = self.backend.router_statistics()
        numbers = self.sums.take()
        if not numbers:
            return
        state = self.state
        speed = self.throughput.take()
        logs = {
            "step": state.global_step,
            "epoch": state.epoch,
            **numbers,
            **of_routers,
            **speed,
            **self.phases.take(speed.get("step_time_s", 0.0)),
            "learning_rate": self._rate,
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            "peak_memory_gib": peak_memory_gib(),
        }
        state.log_history.append({k: v for k, v in logs.items() if not isinstance(v, list)})
        self.notify("on_log", logs=logs)

    def _evaluate_step(self) -> None:
        """Evaluate the model during training, if there is an evaluation set. NotFiniteError if
        check_for_nan_in_loss_and_grad is set and the loss is not finite."""
        if self.eval_dataset is not None:
            self.guard.check_evaluation(self.evaluate())

    def _save_step(self) -> None:
        """Save a checkpoint of this step, after finishing one that is still being written.

        With async_save, a checkpoint gets its final name after the first step by which all ranks
        have written their files. So a crash costs at most one interval, plus the steps made during
        a write."""
        self.checkpoints.finish()
        watchdog.note(watchdog.SAVING)
        self.guard.check_weights(f"after step {self.state.global_step}, before it is saved")
        self._complete_state()
        self.checkpoints.begin()
        if not self.args.async_save:
            self.checkpoints.finish()

    def _interrupt(self, signal: int) -> None:
        """After a signal on any rank: save a checkpoint, unless this step has one, and raise
        Interrupted."""
        step = self.state.global_step
        if self.checkpoints.written_step != step or self.args.save_only_model:
            self.args.save_only_model = False  # the run shall go on from here
            self._save_step()
            self.checkpoints.finish()
        self._store_state()
        self.report.end("interrupted")
        stop = Interrupted(signal, step)
        self.report.print(
            f"{stop.signal.name}: saved after step {step}; resume_from_checkpoint: auto goes on "
            "from here"
        )
        raise stop

    def stop_after_signal(self, where: str) -> None:
        """Raise Interrupted if any rank has received a signal. Long passes over the data before
        training, such as a reference model's log-probabilities, call it between their parts, to
        stop within a scheduler's grace period. where: text for the user that names the pass and how
        it resumes. Collective."""
        [number] = parallel.largest(self.signals.received)
        if number:
            stop = Interrupted(number, self.state.global_step)
            self.report.print(f"{stop.signal.name}: stopped {where}")
            raise stop

    def _complete_state(self) -> None:
        """Copy the callbacks' states and the sums since the last log line into the state, before it
        is saved. May be collective for a model with experts."""
        self.state.stateful_callbacks = export_states(self.callbacks)
        sums = self.sums.to_record()
        self.state.log_sums = sums and {**sums, "routers": self.backend.router_sums()}

    def _store_state(self) -> None:
        """Write trainer_state.json to output_dir, on the main rank. Every rank must call it."""
        self._complete_state()
        folder = Path(self.args.output_dir)
        if parallel.is_main():
            folder.mkdir(parents=True, exist_ok=True)
            self.state.save(folder / TRAINER_STATE_NAME)

    def _end_run(self, seconds: float) -> TrainOutput:
        """End the run after its last step -> the result of train(). Finishes a checkpoint that is
        still being written, loads the best one with load_best_model_at_end, if there is one, and
        stores the state. seconds: duration of the run. Collective."""
        self._sent = None
        self.checkpoints.finish()
        watchdog.note(watchdog.ENDING)
        self.guard.end_run()
        self.checkpoints.end()
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best:
            ckpt.load_model(best, self.backend)
            self.report.print(f"loaded the best checkpoint {best}")
        self._store_state()
        self.notify("on_train_end")
        loss = self.sums.whole_run.means()["loss"]
        return TrainOutput(
            self.state.global_step, loss, {"train_loss": loss, "train_runtime": seconds}
        )

    # -- evaluation

    def evaluate(
        self, eval_dataset: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of a dataset (None: the trainer's own) over all ranks: {"eval_loss": 1.23}. A
        dict of datasets also gives each one's, named <prefix>_<name>_<metric>. Collective."""
        dataset = self._prepared(eval_dataset)
        if dataset is None:
            self._prepare_datasets("eval_dataset")
            dataset = self.eval_dataset
        return self.evaluator.evaluate(dataset, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Score a dataset -> PredictionOutput on every rank: metrics, and for each sample, in
        dataset order, the summed log-probability and the number of trained tokens; for a pair,
        these two for both of its documents. ignore_keys has no effect. Collective."""
        return self.evaluator.predict(test_dataset, metric_key_prefix)

    def log_probabilities(self, dataset: Any) -> np.ndarray:
        """Hook: float64 [samples, documents per sample, 2] on every rank: the sum of a document's
        log-probabilities over its trained tokens, and the number of these tokens. Collective."""
        return self.evaluator.log_probabilities(dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run forward over a DataLoader that this trainer made -> EvalLoopOutput with metrics over
        all ranks and the number of samples. dataloader: from get_eval_dataloader(), or for a
        map-style training set from get_train_dataloader(); ValueError for any other. `description`,
        `prediction_loss_only` and `ignore_keys` have no effect. Collective."""
        return self.evaluator.run_loop(dataloader, metric_key_prefix)

    def prediction_records(self, predictions: Any) -> Iterator[dict[str, Any]]:
        """Yield the lines of predictions.jsonl as dicts, one per sample. predictions: the array in
        predict()'s result."""
        return records_of(predictions)

    # -- files

    def objective_facts(self) -> dict[str, Any]:
        """Hook: facts about the objective to store in a checkpoint, beside the arguments."""
        return {}

    def check_objective(self, facts: dict[str, Any], folder: Path) -> None:
        """Hook: raise CheckpointError if this run's objective cannot resume a checkpoint. facts:
        objective_facts() of the run that saved it. folder: the checkpoint's folder."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str | bool | None, model: Any = None
    ) -> None:
        """Resume from a checkpoint, if there is one: load weights, optimizer, schedule and data
        position; random states too if the parallel layout is the same. resume_from_checkpoint: as
        in train(), but None also means not to resume. `model` has no effect. Collective."""
        self.checkpoints.resume(resume_from_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained model, and the tokenizer if there is one, to output_dir (None:
        args.output_dir). Every rank must call it.

        With save_hf_model, the files are in Hugging Face's format, or for adapters in PEFT's format
        without the base model; otherwise they are a checkpoint of the weights."""
        folder = Path(output_dir or self.args.output_dir)
        save_model(self.backend, self.args, folder, self.tokenizer)

    def save_merged_model(self, output_dir: str | None = None) -> None:
        """Write the model with its adapters merged, in Hugging Face's format, and the tokenizer if
        there is one. The model in memory is not changed. output_dir None: args.output_dir/merged.
        Collective."""
        folder = Path(output_dir or Path(self.args.output_dir) / "merged")
        self.backend.export_merged(folder, self.args.max_shard_size)
        self.save_tokenizer(folder)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files to `folder`, if there is a tokenizer. Every rank must call
        it."""
        save_tokenizer(folder, self.tokenizer)

    # -- hooks for a run of the command line; `arguments` is RunArguments

    @classmethod
    def forward_passes(cls, keys: Any) -> tuple[int, int]:
        """Hook, to count FLOPs: (extra forward passes of the trained model per step, forward passes
        of the second model). keys: RunArguments, or the trainer's train_config or None."""
        return 0, 1

    @classmethod
    def second_model_folder(cls, arguments: Any, planned: Any) -> Path | None:
        """Hook: find the folder of the objective's second model, such as a teacher; None if it
        needs none. arguments: RunArguments. planned: a run.PlannedModel, the trained model as read
        from its config. ValueError for keys or models that do not fit."""
        return None

    @classmethod
    def check_second_model(cls, arguments: Any, first: Any, second: Any, tokenizer: Any) -> None:
        """Hook: raise ConfigError if the second model, such as a reference, does not fit the first;
        here if vocabularies have different sizes. first, second: run.PlannedModels."""
        if second.old_vocab_size != first.old_vocab_size:
            reason = f"a vocabulary of {second.old_vocab_size} tokens, not {first.old_vocab_size}"
            refuse("ref_model", str(second.folder), reason, "a model that reads the same tokens")

    @classmethod
    def notes_of_run(cls, arguments: Any) -> list[str]:
        """Hook: notes about the objective that a run prints at its start. This class has none."""
        return []

    @classmethod
    def own_keywords(cls, arguments: Any, second_model: Any) -> dict[str, Any]:
        """Hook: the constructor's arguments in a run, beyond McaTrainer's. second_model: a function
        that builds the second model, such as a reference; None if there is none."""
        return {}
