"""McaTrainer: the training loop. It has no base class and knows no parallelism; a backend does.

The objective speaks megatron's contract, which both backends run:
    forward_step(iterator, model) -> (output, loss_func);   loss_func(output) -> (loss, tokens, metrics)
A metric is a pair (sum, count); pairs are summed over micro-batches, ranks and steps, and divided when they are shown.
"""

import functools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import ckpt, ckpt_folder, parallel
from .backend_megatron import MegatronBackend
from .backend_torch import TorchBackend
from .ckpt_folder import CheckpointError
from .constants import IGNORE_INDEX, TRAINER_STATE_NAME
from .data_batches import (
    BatchPlan,
    Collator,
    check_batch,
    count_tokens,
    make_loader,
    pad_batch,
    steps_of_run,
)
from .log import Report, run_summary
from .log_speed import Throughput, model_work, peak_flops, peak_memory_gib
from .model import VirtualModels
from .optim import get_megatron_lr_scheduler
from .packed_rows import (
    Targets,
    get_ltor_masks_and_position_ids,
    pack_batch,
    packed_row,
    pad_packed,
)
from .trainer_callbacks import (
    BestModel,
    EarlyStopping,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from .trainer_signals import Interrupted, StopSignals


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    predictions: None
    label_ids: None
    metrics: dict[str, float]
    num_samples: int


class McaTrainer:
    """Trains `model` on `train_dataset`.

    model: VirtualModels (megatron backend) or a transformers model (torch backend). args: TrainingArguments.
    tokenizer: saved beside the model; its padding token is used. data_collator: list of samples -> {"input_ids", "labels",
    "attention_mask"} [b, s] with labels already shifted (labels[t] is the target of position t) and padded on the right;
    None: pads samples {"input_ids", "labels"} that are shifted themselves. Datasets are map-style.
    """

    metrics_keys = ["loss"]
    _language_input_names = ["input_ids", "attention_mask", "labels", "position_ids"]

    def __init__(
        self,
        model=None,
        args=None,
        tokenizer=None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        callbacks: list[TrainerCallback] | None = None,
        shuffle: bool = True,
        summary: dict[str, Any] | None = None,
    ):
        parallel.start_process_group(args.ddp_timeout)
        self.args, self.model, self.tokenizer = args, model, tokenizer
        self.backend = (MegatronBackend if isinstance(model, VirtualModels) else TorchBackend)(
            model, args
        )
        self.models = self.backend.chunks
        if self.backend.predicts_ahead:
            self.metrics_keys = [*self.metrics_keys, "mtp_loss"]
        pad = getattr(tokenizer, "pad_token_id", None) or 0
        self.data_collator = data_collator or Collator(pad)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.shuffle, self.extra_summary = shuffle, summary or {}
        self.optimizer = self.lr_scheduler = None
        self.state, self.control = TrainerState(), TrainerControl()
        self._writer = ckpt.CheckpointWriter(self)
        self._signals = StopSignals()
        self.report = Report(
            is_main=parallel.is_main(),
            output_dir=args.output_dir,
            report_to=args.report_to,
            plot_loss=args.plot_loss,
            run_name=args.run_name,
            disable_tqdm=args.disable_tqdm,
            config=args.to_dict(),
        )
        self.callbacks = list(callbacks or [])
        if args.eval_strategy != "no":
            self.callbacks.append(BestModel())
        if args.early_stopping_patience is not None:
            self.callbacks.append(
                EarlyStopping(args.early_stopping_patience, args.early_stopping_threshold)
            )
        self.callbacks.append(self.report)

    # -- the loop

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to max_steps or num_train_epochs -> (global_step, mean loss per trained token, metrics).

        resume_from_checkpoint: a path, True or "auto" (the newest complete one in output_dir, if any), None: args'.
        Every rank must call it, with as many samples in train_dataset. After SIGTERM or SIGUSR1 to any rank, all finish
        the step, save, and raise Interrupted, a SystemExit with the code signals.EXIT_CODE.
        """
        with StopSignals() as self._signals:
            return self._train(resume_from_checkpoint, self._signals)

    def _train(self, resume_from_checkpoint, signals: StopSignals) -> TrainOutput:
        plan = self._prepare_train_loop(resume_from_checkpoint)
        state, throughput, started = self.state, self._throughput(), time.perf_counter()
        epoch, step = divmod(state.global_step, plan.steps_per_epoch)
        loader = iter(self._train_loader(plan, epoch, step))
        whole_run, window, skips = self._zeros(), self._zeros(), 0
        self._notify("on_train_begin")
        while state.global_step < state.max_steps and not self.control.should_stop:
            throughput.start()
            data, seq_length, totals = self._get_step_iterator_and_seq_length(loader, plan, step)
            loss, metrics, skipped, grad_norm, num_zeros = self.training_step(
                self.models, data, seq_length
            )
            totals += self._sum_metrics(metrics)
            totals = self.backend.reduce(totals)
            window, whole_run = window + totals, whole_run + totals
            samples = plan.num_samples_of(step)
            step += 1
            self._advance(plan, samples, totals, throughput, step)
            skips = skipped + (0 if self.control.should_log else skips)  # since the last log
            extra = {"grad_norm": grad_norm, "skipped_iter": skips}
            if num_zeros is not None:
                extra["num_zeros_in_grad"] = num_zeros
            window = self._after_step(
                window, throughput, extra, end_of_epoch=step == plan.steps_per_epoch
            )
            epoch, step = (epoch + 1, 0) if step == plan.steps_per_epoch else (epoch, step)
            self._answer(signals)
        return self._finish(whole_run, time.perf_counter() - started)

    def training_step(self, models, data_iterator, seq_length: int):
        """One optimizer step over the micro-batches of `data_iterator`
        -> (loss: mean per token of this rank's micro-batches, metrics of each micro-batch, skipped_iter 0 or 1,
        grad_norm before clipping, zeros in the gradient or None).

        On pipeline stages before the last the loss is 0 and the metrics are []. Collectives: those of the schedule, the
        gradient reduction and the optimizer.
        """
        micro_batches = self._prepare_micro_batches(list(data_iterator), seq_length)
        self.backend.train_mode(True)
        self.backend.weigh_router_losses(micro_batches, self._count_of_loss)
        metrics = self.backend.forward_backward(self.forward_step, micro_batches, seq_length)
        updated, grad_norm, num_zeros = self.backend.step()
        if updated:
            self.lr_scheduler.step(1)
        total, count = self._sum_metrics(metrics)[:2]
        return total / max(count, 1), metrics, int(not updated), grad_norm, num_zeros

    # -- the objective

    def forward_step(self, data_iterator: Iterator, model):
        """megatron's contract: one micro-batch through one chunk -> (output, loss_func)."""
        batch = next(data_iterator)
        inputs = self._prepare_train_inputs(iter([batch]))
        return model(**inputs), self._pre_compute_loss(batch, inputs)

    def _prepare_micro_batches(self, micro_batches: list[dict], seq_length: int) -> list[dict]:
        """The micro-batches of a step, before they run: the place for what an objective takes from another model."""
        return micro_batches

    def _pre_compute_loss(self, batch: dict, inputs: dict):
        """The loss_func of a micro-batch, on whichever pipeline stage. batch: as it was read; inputs: the model's."""
        return functools.partial(self._post_compute_loss, inputs["labels"])

    def _prepare_train_inputs(self, data_iterator: Iterator) -> dict[str, Any]:
        """The next micro-batch as the model takes it, on this rank's device, cut for its context-parallel rank.

        Every pipeline stage reads the whole batch: each needs the borders of packed documents.
        """
        batch = next(data_iterator)
        if self.args.sequence_packing:
            batch = self._packing_sequence(batch)
        else:  # rows are padded on the right and attention is causal: no mask is built
            mask, position_ids = get_ltor_masks_and_position_ids(
                batch["input_ids"], build_attention_mask=False
            )
            real = batch.get("attention_mask")
            padding = {} if real is None else {"padding_mask": real == 0}
            batch = {**batch, **padding, "attention_mask": mask, "position_ids": position_ids}
        return self.backend.model_inputs(batch)

    def _packing_sequence(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """A batch [b, s] as one row [1, t] in thd format: input_ids, labels, cu_seqlens and packed_seq_params.

        attention_mask numbers the documents of each row (1, 2, ...; 0 is padding, which is dropped); without numbers each
        row is a document. A batch that is packed already is taken as it is.
        """
        if "cu_seqlens" not in inputs:
            inputs = self._to_length(
                pack_batch(inputs, self.backend.document_multiple, self._pad_token_id)
            )
        params = packed_row(inputs["cu_seqlens"], *self.backend.context_parallel, parallel.device())
        return {**inputs, "packed_seq_params": params}

    @property
    def _pad_token_id(self) -> int:
        return getattr(self.tokenizer, "pad_token_id", None) or 0

    def _post_compute_loss(self, labels: torch.Tensor, losses: torch.Tensor):
        """Token losses [b, s] -> (their sum, trained tokens int32, {"loss": (sum, tokens)}).

        With multi-token prediction labels are packing.Targets, and losses [b, s, 1 + layers]: "mtp_loss" is another metric.
        """
        if ahead := labels if isinstance(labels, Targets) else None:
            labels, losses, more = ahead.labels, losses[..., 0], losses[..., 1:].sum()
        total, count = losses.sum(), (labels != IGNORE_INDEX).sum()
        # megatron divides `total` in place afterwards: the metric is a copy
        metrics = {"loss": torch.stack([total.detach().clone(), count.float()])}
        if ahead:
            metrics["mtp_loss"] = torch.stack(
                [more.detach().clone(), (ahead.next_labels != IGNORE_INDEX).sum()]
            )
            total = total + self.backend.predicts_ahead * more
        total, count = self.backend.over_context_parallel(total, count)
        return total * self._micro_batch_weight, count.int(), metrics

    _micro_batch_weight = 1.0

    def _count_of_loss(self, batch: dict) -> int:
        """The count that _post_compute_loss will give for a whole micro-batch: what its loss is a sum over."""
        return int((batch["labels"] != IGNORE_INDEX).sum())

    # -- data

    def get_train_dataloader(self):
        """A DataLoader of this data parallel rank's micro-batches, epoch after epoch."""
        return self._train_loader(self._plan(self.train_dataset), 0, 0)

    def _plan(self, dataset, training: bool = True) -> BatchPlan:
        if dataset is None or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{'train' if training else 'eval'}_dataset: expected a dataset with a length, got {dataset!r}"
            )
        args = self.args
        return BatchPlan(
            len(dataset),
            args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
            # evaluation takes as many micro-batches at once: a pipeline wants more than one
            args.gradient_accumulation_steps,
            self.backend.dp_rank,
            self.backend.dp_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=self.shuffle and training,
            costs=getattr(dataset, "costs", None),
        )

    def _train_loader(self, plan: BatchPlan, epoch: int, step: int):
        workers = self.args.dataloader_num_workers
        return make_loader(
            self.train_dataset, self.data_collator, plan, epoch, step, num_workers=workers
        )

    def _get_step_iterator_and_seq_length(self, loader: Iterator, plan: BatchPlan, step: int):
        """(this rank's micro-batches of the step, their length, the step's counts as _zeros() has them)."""
        real, numbered = plan.num_micro_batches(step), self._rows_hold_documents
        batches = [
            check_batch(next(loader), self._language_input_names, numbered) for _ in range(real)
        ]
        counts = [count_tokens(batch) for batch in batches]
        for _ in range(
            -real % self.backend.micro_batch_multiple
        ):  # the schedule wants a multiple: empty ones follow
            batches.append(self._empty_batch(batches[0]))
        batches = [self._arrange(batch) for batch in batches]
        longest = self.backend.common_length(max(b["input_ids"].shape[1] for b in batches))
        batches = [self._to_length(batch, longest) for batch in batches]
        if (
            not self.args.calculate_per_token_loss
        ):  # empty micro-batches have no part in the mean over micro-batches
            filled = math.ceil(plan.num_samples_of(step) / plan.micro_batch_size)
            self._micro_batch_weight = len(batches) * plan.dp_size / filled
        totals = self._zeros()
        if self.backend.counts_tokens:
            positions = sum(b["input_ids"].numel() for b in batches)
            totals[-3:] = torch.tensor(
                [sum(c[0] for c in counts), sum(c[1] for c in counts), positions]
            )
        return batches, max(b["input_ids"].shape[1] for b in batches), totals

    @property
    def _rows_hold_documents(self) -> bool:
        """Whether a collated row may hold several documents, which its attention_mask numbers."""
        return self.args.sequence_packing

    def _empty_batch(self, batch: dict) -> dict:
        """A batch of the same shape that carries no loss, and is padding where tokens are counted."""
        nothing = torch.zeros_like(batch["labels"])
        return {**batch, "labels": nothing + IGNORE_INDEX, "attention_mask": nothing}

    def _arrange(self, batch: dict) -> dict:
        """A checked batch as the model takes it: its rows, or one packed row."""
        if not self.args.sequence_packing:
            return batch
        return pack_batch(batch, self.backend.document_multiple, self._pad_token_id)

    def _to_length(self, batch: dict, at_least: int = 0) -> dict:
        """The batch, padded on the right to a length that the layout can cut."""
        multiple = self.backend.length_multiple
        length = -(-max(at_least, batch["input_ids"].shape[1]) // multiple) * multiple
        return (pad_packed if "cu_seqlens" in batch else pad_batch)(
            batch, length, self._pad_token_id
        )

    # -- numbers: a vector (sum, count) a metric, then the step's tokens, squared document lengths, tokens with padding

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(
            2 * len(self.metrics_keys) + 3, dtype=torch.float64, device=parallel.device()
        )

    def _sum_metrics(self, metrics: list[dict]) -> torch.Tensor:
        totals = self._zeros()
        for i, key in enumerate(self.metrics_keys):
            for of_micro_batch in metrics:
                totals[2 * i : 2 * i + 2] += of_micro_batch[key].to(totals.dtype)
        return totals

    def _means(self, totals: torch.Tensor) -> dict[str, float]:
        values = totals.tolist()
        return {
            key: values[2 * i] / max(values[2 * i + 1], 1)
            for i, key in enumerate(self.metrics_keys)
        }

    def _throughput(self) -> Throughput:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        dtype = (
            torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        )
        self._work = model_work(self.model)
        return Throughput(self.args.world_size, peak_flops(name, dtype))

    # -- around a step

    def _prepare_train_loop(self, resume_from_checkpoint) -> BatchPlan:
        args, plan = self.args, self._plan(self.train_dataset)
        max_steps = steps_of_run(args, plan.steps_per_epoch)
        self.state = TrainerState(
            max_steps=max_steps, num_train_epochs=max_steps / plan.steps_per_epoch
        )
        self.control = TrainerControl()
        if self.optimizer is None:
            self.create_optimizer()
        self.create_scheduler(max_steps)
        self._load_from_checkpoint(
            args.resume_from_checkpoint
            if resume_from_checkpoint is None
            else resume_from_checkpoint
        )
        self.report.summary(run_summary(self, plan))
        return plan

    def create_optimizer(self):
        self.optimizer = self.backend.create_optimizer()
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = get_megatron_lr_scheduler(self.args, num_training_steps, optimizer)
        return self.lr_scheduler

    def _advance(self, plan, samples, totals, throughput, step) -> None:
        state, (tokens, squares, positions) = self.state, totals[-3:].tolist()
        state.global_step += 1
        state.consumed_samples += samples
        state.consumed_tokens += int(tokens)
        state.epoch = (state.global_step - 1) // plan.steps_per_epoch + step / plan.steps_per_epoch
        flops = 0.0
        if self._work is not None:
            flops = self._work.flops(tokens, squares)
        throughput.stop(int(tokens), int(positions), samples, flops)

    def _after_step(self, window, throughput, extra, end_of_epoch: bool) -> torch.Tensor:
        """Log, evaluate and save where it is time -> the window of the next log."""
        args, state, control = self.args, self.state, self.control
        last = state.global_step >= state.max_steps
        control.should_log = state.global_step % args.logging_steps == 0 or last
        control.should_evaluate = self._is_time(
            args.eval_strategy, args.eval_steps, end_of_epoch, last
        )
        control.should_save = self._is_time(args.save_strategy, args.save_steps, end_of_epoch, last)
        self._notify("on_step_end")
        if control.should_log:
            self._log(
                {
                    **self._means(window),
                    **extra,
                    **self.backend.router_statistics(),
                    **throughput.take(),
                }
            )
            window = self._zeros()
        if control.should_evaluate and self.eval_dataset is not None:
            self.evaluate()
        if control.should_save:
            self._save_checkpoint()
        return window

    def _is_time(self, strategy: str, interval: int | None, end_of_epoch: bool, last: bool) -> bool:
        if strategy == "no":
            return False
        return last or (
            end_of_epoch if strategy == "epoch" else self.state.global_step % interval == 0
        )

    def _log(self, numbers: dict) -> None:
        state = self.state
        logs = {"step": state.global_step, "epoch": state.epoch, **numbers}
        logs.update(
            learning_rate=self.lr_scheduler.get_last_lr()[0],
            consumed_samples=state.consumed_samples,
        )
        logs.update(consumed_tokens=state.consumed_tokens, peak_memory_gib=peak_memory_gib())
        state.log_history.append(
            {key: value for key, value in logs.items() if not isinstance(value, list)}
        )
        self._notify("on_log", logs=logs)

    def _notify(self, event: str, **kwargs) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.args, self.state, self.control, trainer=self, **kwargs)

    def _store_state(self) -> None:
        if parallel.is_main():
            os.makedirs(self.args.output_dir, exist_ok=True)
            self.state.save(os.path.join(self.args.output_dir, TRAINER_STATE_NAME))

    def _finish(self, whole_run: torch.Tensor, seconds: float) -> TrainOutput:
        if self._writer.is_busy:
            self._finish_checkpoint()
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            ckpt.load_model(self.state.best_model_checkpoint, self.backend)
            self.report.print(f"loaded the best checkpoint {self.state.best_model_checkpoint}")
        self._store_state()
        self._notify("on_train_end")
        loss = self._means(whole_run)["loss"]
        return TrainOutput(
            self.state.global_step, loss, {"train_loss": loss, "train_runtime": seconds}
        )

    # -- evaluation

    def evaluate(self, eval_dataset=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Metrics over the whole set, sum / count over all ranks. Collective."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        plan = self._plan(dataset, training=False)
        loader = make_loader(dataset, self.data_collator, plan, num_epochs=1)
        metrics = self.evaluation_loop(
            loader, "evaluation", metric_key_prefix=metric_key_prefix
        ).metrics
        self.state.log_history.append(
            {"step": self.state.global_step, "epoch": self.state.epoch, **metrics}
        )
        self.report.log(self.state.log_history[-1])
        self._notify("on_evaluate", metrics=metrics)
        return metrics

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Forward passes over a loader of get_train_dataloader's kind -> metrics and the number of samples."""
        plan, batches = getattr(dataloader.batch_sampler, "plan", None), iter(dataloader)
        if plan is None:
            raise ValueError(
                "evaluation_loop takes a loader of batches.make_loader; for a dataset call evaluate(dataset)"
            )
        weight, self._micro_batch_weight = self._micro_batch_weight, 1.0
        self.backend.train_mode(False)
        totals = self._zeros()
        for step in range(plan.steps_per_epoch):
            data, seq_length, counts = self._get_step_iterator_and_seq_length(batches, plan, step)
            data = self._prepare_micro_batches(data, seq_length)
            totals += counts + self._sum_metrics(
                self.backend.forward_backward(
                    self.forward_step, data, seq_length, forward_only=True
                )
            )
        self.backend.train_mode(True)
        self._micro_batch_weight = weight
        means = self._means(self.backend.reduce(totals))
        metrics = {f"{metric_key_prefix}_{key}": value for key, value in means.items()}
        return EvalLoopOutput(None, None, metrics, plan.num_samples)

    # -- files

    def objective_facts(self) -> dict:
        """What a checkpoint remembers of the objective, beside the arguments."""
        return {}

    def check_objective(self, facts: dict, folder: Path) -> None:
        """CheckpointError where a run with these facts cannot go on in this one."""

    def _save_checkpoint(self) -> None:
        """Save this step. With async_save it gets its name after the first step by whose end all ranks have written, and
        before the next one begins: dying costs at most one interval and the steps that were made during a write."""
        if self._writer.is_busy:
            self._finish_checkpoint()
        self._writer.begin()
        if not self.args.async_save:
            self._finish_checkpoint()

    def _answer(self, signals: StopSignals) -> None:
        """What ranks have to agree on between two steps: whether to stop, and whether a checkpoint is written by now."""
        signal, still_writes = parallel.largest(signals.received, self._writer.still_writes)
        if self._writer.is_busy and (signal or not still_writes):
            self._finish_checkpoint()
        if not signal:
            return
        if self._writer.written_step != self.state.global_step:
            self._save_checkpoint()
            if self._writer.is_busy:
                self._finish_checkpoint()
        self._store_state()
        stop = Interrupted(signal, self.state.global_step)
        self.report.print(
            f"{stop.signal.name}: saved after step {stop.step}; resume_from_checkpoint: auto goes on from here"
        )
        raise stop

    def _finish_checkpoint(self) -> None:
        folder, step = self._writer.finish()
        self._notify("on_save", path=str(folder), step=step)
        best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
        parallel.on_main(lambda: ckpt_folder.prune(folder, best, limit), CheckpointError)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        """Continue where a checkpoint stopped: weights, optimizer, schedule, random states, position in the data."""
        folder = ckpt.find(self, resume_from_checkpoint)
        if folder is not None:
            ckpt.load(folder, self)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained model and the tokenizer to output_dir (None: args.output_dir). All ranks must call it.

        A model with adapters gives those, in PEFT's format.
        Hugging Face's format with save_hf_model; else, or without save_only_model on an internal call, a checkpoint.
        """
        folder = Path(output_dir or self.args.output_dir)
        if self.args.save_hf_model:
            self.backend.export_hf(folder, self.args.max_shard_size)
        else:
            ckpt.save_model(folder, self.backend)
        self._save_tokenizer(folder)

    def save_merged_model(self, output_dir: str | None = None) -> None:
        """Write the model with its adapters in its weights (None: to args.output_dir/merged), in Hugging Face's format, and
        the tokenizer. All ranks must call it."""
        folder = Path(output_dir or Path(self.args.output_dir) / "merged")
        self.backend.export_merged(folder, self.args.max_shard_size)
        self._save_tokenizer(folder)

    def _save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer is not None and parallel.is_main():
            self.tokenizer.save_pretrained(folder)
        parallel.barrier()
