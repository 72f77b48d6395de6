"""DPOTrainer: preference training as hooks over McaTrainer's loop, which it does not own.

    _arrange                pairs -> a packed row of documents, or rows, chosen and rejected in turn
    _prepare_micro_batches  what the reference says of them, where it is not known from before
    _pre_compute_loss, _post_compute_loss
                            token losses -> log-probabilities of the responses -> loss, 8 metrics

The loss is the mean over the pairs of the global batch, in every layout. Letters: P pairs of a
micro-batch, s positions.
"""

import contextlib
import functools
import hashlib
import io
import json
import math
import os
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from . import ckpt_folder, lora, parallel, tables
from .args import FinetuningArguments, check_together
from .batch import join, real_documents
from .callbacks import Interrupted
from .ckpt_folder import CheckpointError, measure
from .data_batches import Packs, WithReference, documents_of, samples_of
from .data_encode import cache_folder
from .data_files import SIDES
from .errors import Judge, refuse
from .files import HF_CONFIG_NAME, describe_error, read_json, resolve_folder, write_file, write_json
from .tables import LOSSES, METRICS, OBJECTIVES, REFERENCES, Responses
from .trainer import McaTrainer
from .trainer_evaluation import sum_documents
from .trainer_events import arrange, check_given

# -- log-probabilities of a reference

FORMAT = 2
META_NAME = "meta.json"
SAY_EVERY_S = 10.0
PART_PAIRS = 1024  # pairs of a part that the pass keeps: what is lost when it dies
_NONE = np.zeros((0, 2), np.float32)  # of no pairs


def files_of_model(name_or_path: str | None) -> list:
    """[name, bytes, time of change] of what a model's folder loads; [] for what is no folder."""
    found: list = []
    for pattern in ("*.safetensors", "dist/*", HF_CONFIG_NAME) if name_or_path else ():
        for path in Path(name_or_path).glob(pattern):
            name = path.relative_to(name_or_path).as_posix()
            state = path.stat()
            found.append([name, state.st_size, state.st_mtime_ns])
    return sorted(found)


class ReferenceStore:
    """What is on disk for one model and one data set of `num_pairs` pairs."""

    def __init__(self, cache_dir: str | os.PathLike, identity: dict, num_pairs: int):
        self.identity = {"format": FORMAT, "pairs": num_pairs, **identity}
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]
        self.folder = Path(cache_dir) / "reference" / digest
        self._files: dict[str, dict] = {}  # name -> size and checksum

    def load(self, say=print) -> np.ndarray:
        """float32 [n, 2] of the first n pairs, as many as are there and as they were written. What
        is not is computed again, and one line says so."""
        self._files = {}
        found = [_NONE]
        if not (self.folder / META_NAME).is_file():
            return _NONE
        try:
            meta = read_json(self.folder / META_NAME)
            if meta["identity"] != self.identity:
                raise ValueError(f"{META_NAME} is of another run")
            for name, entry in sorted(meta["files"].items()):
                if measure(self.folder / Path(name).name) != entry:
                    raise ValueError(f"{name} is not as it was written")
                found.append(np.load(self.folder / Path(name).name))
                self._files[name] = entry
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            error = describe_error(error)
            say(f"{self.folder}: {error}: the reference is computed again from there")
        return np.concatenate(found)

    def add(self, start: int, logps: np.ndarray) -> None:
        """Keep the pairs from `start` on. On the disk when the call returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(f"part-{start:012d}.npy", logps)

    def finish(self, logps: np.ndarray) -> None:
        """All pairs are there: one file in place of the parts."""
        self._files = {}
        self._write("logps.npy", logps)
        for part in self.folder.glob("part-*.npy"):
            part.unlink(missing_ok=True)

    def _write(self, name: str, logps: np.ndarray) -> None:
        stream = io.BytesIO()
        np.save(stream, logps.astype(np.float32))
        write_file(self.folder / name, stream.getvalue())
        self._files[name] = measure(self.folder / name)
        meta = {"identity": self.identity, "files": self._files}
        write_json(self.folder / META_NAME, meta)


# -- the pass; trainer: a DPOTrainer, whose model is not trained yet


def reference_of(trainer, pairs) -> np.ndarray:
    """float32 [pairs, 2], on every rank: what is kept on disk, checked, and the rest computed now.
    Collective."""
    args = trainer.args
    store = _store_of(trainer, pairs)
    num = len(pairs)
    done = _NONE
    if store is not None:
        done = parallel.on_main(lambda: store.load(trainer.report.print), CheckpointError)
    if len(done):
        _check_kept(trainer, pairs, done, store)
    if store is not None and len(done) == num:
        trainer.report.print(f"reference model: {num:,} pairs from {store.folder}")
        return done
    per_rank = args.per_device_eval_batch_size * args.gradient_accumulation_steps
    whole_steps = per_rank * trainer.backend.dp_size
    part = math.ceil(PART_PAIRS / whole_steps) * whole_steps
    said = time.monotonic()
    for start in range(len(done), num, part):
        logps = trainer._score(Subset(pairs, range(start, min(start + part, num))))
        done = np.concatenate([done, logps])
        if store is not None:
            parallel.on_main(functools.partial(store.add, start, logps), CheckpointError)
        if time.monotonic() - said > SAY_EVERY_S or len(done) == num:
            said = time.monotonic()
            trainer.report.print(f"reference model: {len(done):,} of {num:,} pairs")
        _stop_if_asked(trainer, store)
    if store is not None:
        parallel.on_main(functools.partial(store.finish, done), CheckpointError)
    return done


def is_same_model(args, ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether two passes over the same pairs differ by rounding only."""
    share = 3e-2 if args.bf16 or args.fp16 else 1e-3
    return bool(np.allclose(ours, theirs, rtol=share, atol=share))


def _check_kept(trainer, pairs, kept: np.ndarray, store: ReferenceStore) -> None:
    """CheckpointError where the model gives other log-probabilities to the first pairs than what
    was kept says."""
    count = min(len(kept), trainer.args.per_device_eval_batch_size * trainer.backend.dp_size)
    now = trainer._score(Subset(pairs, range(count)))
    if not is_same_model(trainer.args, now, kept[:count]):
        raise CheckpointError(
            f"the reference in {store.folder} is of another model: it gave {kept[0].tolist()} to "
            f"the first pair, and this model gives {now[0].tolist()}: remove the folder, and the "
            "reference is computed again"
        )


def _stop_if_asked(trainer, store: ReferenceStore | None) -> None:
    """Interrupted between two parts of the pass, which may take longer than a scheduler waits.
    Collective."""
    [number] = parallel.largest(trainer.signals.received)
    if not number:
        return
    kept = "nothing of the pass is kept"
    if store is not None:
        kept = f"the pass goes on from what is in {store.folder}"
    stop = Interrupted(number, trainer.state.global_step)
    trainer.report.print(f"{stop.signal.name}: stopped in the reference pass; {kept}")
    raise stop


def _store_of(trainer, pairs) -> ReferenceStore | None:
    """Where log-probabilities of these pairs are kept. On ranks that are not the main one its times
    of files may differ."""
    config = trainer.train_config
    fingerprint = getattr(pairs, "fingerprint", None)  # other people's datasets have none
    if config.cache_dir is None or fingerprint is None:
        return None
    name = getattr(getattr(trainer.model, "config", None), "name_or_path", None) or None
    backend = trainer.backend
    identity = {
        "model": [name, config.model_source, ckpt_folder.model_identity(backend.hf_config)],
        "files": files_of_model(name),
        "precision": backend.precision,
        "data": fingerprint,
    }
    return ReferenceStore(config.cache_dir, identity, len(pairs))


# -- preference training

# micro-batches, and tokens of all of them, in a forward pass of the reference: with fewer a GPU
# waits for the host's launches, with more it might hold more than in training
JOINED = 2
JOINED_TOKENS = 16384
# DPOConfig's fields -> the configuration keys that mean the same
_KEYS = {
    "pref_loss": "pref_loss",
    "beta": "pref_beta",
    "label_smoothing": "dpo_label_smoothing",
    "ftx": "pref_ftx",
}


@dataclass
class DPOConfig:
    """The objective. ValueError for what does not fit together.

    pref_loss: sigmoid (DPO) or orpo. beta: how strongly the reference holds, or the weight of the
    odds ratio. label_smoothing: the share of pairs thought to be swapped. ftx: weight of the sft
    term, the mean loss of a token of the chosen response. use_ref_model: whether there is a
    reference (None: where the loss has one). reference: cached, adapter or model (None: a model
    that is given, else the model without its adapters, else cached). cache_dir: where
    log-probabilities of a cached reference are kept (None: nowhere). model_source: what tells the
    start model from others of its folder.
    """

    beta: float = 0.1
    pref_loss: str = "sigmoid"
    label_smoothing: float = 0.0
    _: KW_ONLY
    use_ref_model: bool | None = None
    ftx: float = 0.0
    reference: str | None = None
    cache_dir: str | None = None
    model_source: str = ""

    def __post_init__(self):
        keys = self.check_with()
        for name, key in _KEYS.items():  # as their types say
            setattr(self, name, getattr(keys, key))
        judge = Judge(self)
        needs = LOSSES[self.pref_loss].has_reference
        if self.reference not in (None, *REFERENCES):
            judge.refuse("reference", f"expected {', '.join(REFERENCES)}, or None", "cached")
        if self.use_ref_model not in (None, needs):
            reason = f"pref_loss {self.pref_loss} has {'a' if needs else 'no'} reference model"
            judge.refuse("use_ref_model", reason, "use_ref_model left out")
        judge.close()
        self.use_ref_model = needs

    def as_keys(self) -> dict[str, Any]:
        """The configuration keys that mean the same."""
        keys = {key: getattr(self, name) for name, key in _KEYS.items()}
        return {**keys, "ref_model": self.reference}

    def check_with(self, kind="lora", modules_to_save=()) -> FinetuningArguments:
        """The keys for such adapters. ConfigError by their rules."""
        modules = list(modules_to_save)
        return FinetuningArguments(
            stage="dpo", finetuning_type=kind, modules_to_save=modules, **self.as_keys()
        )


def _choose_reference(config: DPOConfig, model, ref_model) -> str | None:
    """The kind of reference, None for a loss without one. ConfigError for one that cannot be."""
    if not config.use_ref_model:
        if ref_model is not None:
            reason = f"pref_loss {config.pref_loss} has no reference model"
            refuse("ref_model", "a model", reason, "leave ref_model out")
        return None
    spec = lora.spec_of(model)
    by_default = "adapter" if spec is not None and not spec.modules_to_save else "cached"
    kind = config.reference or ("model" if ref_model is not None else by_default)
    if (kind == "model") != (ref_model is not None):
        reason = f"expected {'a' if kind == 'model' else 'no'} ref_model"
        refuse("reference", kind, reason, "reference: model, with a ref_model, or neither")
    if spec is None:
        config.check_with("full")
    else:
        config.check_with("lora", spec.modules_to_save)
    return kind


class DPOTrainer(McaTrainer):
    """Trains `model` on pairs: samples of two documents {"input_ids", "labels"}, shifted, chosen
    and rejected, as a list or as {"chosen", "rejected"}, or on packs (lists) of pairs.

    train_config: DPOConfig. ref_model: a second model of the backend's kind, frozen, for reference:
    model; it may share nothing with `model`. The other arguments are McaTrainer's;
    per_device_train_batch_size counts pairs, or packs. Raises ValueError for what cannot be trained
    so, before anything is computed.
    """

    metrics_keys = list(METRICS)
    documents_per_sample = len(SIDES)

    def __init__(
        self, model=None, train_config: DPOConfig | None = None, ref_model=None, args=None, **kwargs
    ):
        check_given(model, args)
        self.train_config = config = train_config or DPOConfig()
        self.reference = _choose_reference(config, model, ref_model)
        mtp = args.mtp_num_layers or getattr(model.config, "mtp_num_layers", None)
        check_together(args, stage="dpo", mtp_num_layers=mtp)
        evaluated = kwargs.get("eval_dataset")
        if not isinstance(evaluated, dict):
            evaluated = {"eval": evaluated}
        for dataset in (kwargs.get("train_dataset"), *evaluated.values()):
            if dataset is not None and len(dataset):
                _check_pairs(dataset, args.sequence_packing)
        super().__init__(model=model, args=args, **kwargs)
        self.settings |= {**config.as_keys(), "ref_model": self.reference}
        self.backend.expect_weighted_losses()
        self.ref_chunks = None
        if ref_model is not None:
            self.guard.check_weights("the reference model", ref_model)
            self.ref_chunks = self.backend.wrap_reference(ref_model)
        if config.use_ref_model and self.reference != "cached":
            self._reference_model = self.model if ref_model is None else ref_model
        self._was_trained = False

    # -- a run of the command line

    @classmethod
    def second_model_folder(cls, arguments, planned) -> Path | None:
        keys = arguments.finetuning
        if not LOSSES[keys.pref_loss].has_reference:
            return None
        if keys.ref_model == "model":
            return planned.folder
        if keys.ref_model not in (None, *REFERENCES):
            return resolve_folder(keys.ref_model, arguments.model.model_revision)
        judge = Judge(keys)
        # new tokens bring modules_to_save that the file does not name
        check = OBJECTIVES[keys.stage].check_keys
        if check is not None:
            check(keys, judge)
        judge.close()
        adapter = keys.adapter_name_or_path
        if adapter and planned.adapters.modules_to_save:
            reason = "it has modules of its own (modules_to_save), and without its adapters the "
            reason += "model is not the one that it began with"
            refuse("adapter_name_or_path", adapter, reason, "ref_model: model")
        return None

    @classmethod
    def own_keywords(cls, arguments, second_model) -> dict[str, Any]:
        keys = arguments.finetuning
        source = ""
        if arguments.model.train_from_scratch:
            source = f"drawn from seed {arguments.training.seed}"
        config = DPOConfig(
            **{name: getattr(keys, key) for name, key in _KEYS.items()},
            reference=keys.ref_model if second_model is None else "model",
            cache_dir=str(cache_folder(arguments.data)),
            model_source=source,
        )
        return {"train_config": config, "ref_model": second_model}

    # -- the loss

    def preference_loss(self, responses: Responses):
        """(losses, rewards of chosen, rewards of rejected), each [P], by the table's row of
        pref_loss. Those of DPO and ORPO go through dpo_loss and odds_ratio_loss, which a subclass
        may override."""
        r = responses
        formula = LOSSES[self.train_config.pref_loss].formula
        if formula is tables.dpo_loss:
            return self.dpo_loss(r.chosen, r.rejected, r.reference_chosen, r.reference_rejected)
        if formula is tables.odds_ratio_loss:
            lens = torch.cat([r.chosen_lens, r.rejected_lens])
            return self.odds_ratio_loss(r.chosen, r.rejected, lens)
        return formula(r, self.train_config)

    def odds_ratio_loss(self, chosen_logps, rejected_logps, response_lens):
        """(losses, rewards of chosen, rewards of rejected), each [P]; response_lens [2 P]: those of
        chosen, then rejected."""
        responses = Responses(chosen_logps, rejected_logps, *response_lens.chunk(2))
        return tables.odds_ratio_loss(responses, self.train_config)

    def dpo_loss(
        self,
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    ):
        """(losses, rewards of chosen, rewards of rejected), each [P]."""
        logps = policy_chosen_logps, policy_rejected_logps
        reference = reference_chosen_logps, reference_rejected_logps
        responses = Responses(*logps, None, None, *reference)
        return tables.dpo_loss(responses, self.train_config)

    def _pre_compute_loss(self, batch: dict, inputs: dict):
        of_reference = (None, None)
        if "reference" in batch:
            of_reference = batch["reference"].view(-1, len(SIDES)).unbind(-1)
        return functools.partial(self._post_compute_loss, inputs["labels"], batch, *of_reference)

    def _post_compute_loss(self, labels, batch, ref_chosen_logps, ref_rejected_logps, losses):
        """Token losses [b, s] -> (sum of the pairs' losses, pairs int32, {metric: (sum, pairs)}).

        labels [b, s] of this rank; batch: the whole micro-batch; ref_*_logps float32 [P], None for
        a loss without reference. Collective under context parallelism: one sum over its group.
        """
        logps, lens = sum_documents(self.backend, batch, labels, losses)
        config = self.train_config
        responses = Responses(
            logps[0::2], logps[1::2], lens[0::2], lens[1::2], ref_chosen_logps, ref_rejected_logps
        )
        of_pairs, chosen_rewards, rejected_rewards = self.preference_loss(responses)
        sft = -responses.chosen / responses.chosen_lens.clamp(min=1)
        of_pairs = of_pairs + config.ftx * sft
        margins = chosen_rewards - rejected_rewards
        values = {
            "loss": of_pairs,
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/accuracies": (margins > 0).float(),
            "rewards/margins": margins,
            "logps/chosen": responses.chosen,
            "logps/rejected": responses.rejected,
            "sft_loss": sft,
        }
        count = torch.full_like(sft.sum(), len(sft))
        metrics = {key: torch.stack([value.detach().sum(), count]) for key, value in values.items()}
        # all context-parallel ranks have the same pairs, and megatron adds up what they count: one
        # of them counts
        counts = self.backend.context_parallel[1] == 0
        return of_pairs.sum(), (count * counts).int(), metrics

    def _count_of_loss(self, batch: dict) -> int:
        return _num_pairs(batch)

    def over_ranks(self, numbers):
        """The sums over all ranks, of which those of context parallelism have the same pairs."""
        numbers = super().over_ranks(numbers)
        numbers.vector[: 2 * len(numbers.keys)] /= self.backend.context_parallel[0]
        return numbers

    # -- micro-batches

    def _arrange(self, batch: dict) -> dict:
        counts = batch["attention_mask"].amax(dim=1)  # documents of each row; a filler has none
        if (counts % 2).any():
            raise ValueError(
                f"the data collator gave rows of {counts.tolist()} documents: expected chosen and "
                "rejected in turn, numbered from 1 by attention_mask"
            )
        return super()._arrange(batch)

    def _prepare_micro_batches(self, micro_batches: list[dict], seq_length: int) -> list[dict]:
        """The micro-batches with the reference's log-probabilities, where the loss takes them and
        the data does not."""
        if not self.train_config.use_ref_model:
            return micro_batches
        if self.reference == "cached":
            if any("reference" not in batch for batch in micro_batches):
                raise ValueError(
                    'the data collator dropped "reference", the '
                    "log-probabilities [b, documents] that the samples bring: hand them on, or use "
                    "ref_model: model"
                )
            return micro_batches
        models = self.ref_chunks or self.models
        joined = self._joined(micro_batches) if self.backend.joins_rows(models) else micro_batches
        found = self._reference_logps(models, joined, seq_length)
        if not found:  # a pipeline stage before the last, where no loss is taken
            return micro_batches
        logps = torch.cat(found).split(list(map(_num_pairs, micro_batches)))
        return [
            {**batch, "reference": of_pairs.flatten()}
            for batch, of_pairs in zip(micro_batches, logps, strict=True)
        ]

    # -- the reference

    def _joined(self, batches: list[dict]) -> list[dict]:
        """The pairs of micro-batches in fewer of them: packed rows one behind the other, rows of
        one length one below the other."""
        groups: list[list[dict]] = []
        for batch in batches:
            if groups and _fit_together([*groups[-1], batch]):
                groups[-1].append(batch)
            else:
                groups.append([batch])
        return [group[0] if len(group) == 1 else self._to_length(join(group)) for group in groups]

    @torch.no_grad()
    def compute_reference_log_probs(
        self, models, data_list: list[dict], seq_length: int, micro_batch_size=None
    ):
        """[{"reference_chosen_logps", "reference_rejected_logps"}, each [P]] of each micro-batch;
        None on pipeline stages before the last. models: the policy's chunks, which run without
        adapters and dropout, or those of a reference.

        Collectives: those of the schedule, forward only.
        """
        own = models is self.models
        was_training = self.models[0].training

        def collect(inputs: dict, batch: dict, losses: torch.Tensor) -> dict[str, torch.Tensor]:
            logps, _ = sum_documents(self.backend, batch, inputs["labels"], losses)
            return {"reference_chosen_logps": logps[0::2], "reference_rejected_logps": logps[1::2]}

        if own:
            self.backend.train_mode(False)
        with lora.without_adapters(self.model) if own else contextlib.nullcontext():
            found = self.backend.forward_backward(
                self.evaluator.collecting(collect),
                data_list,
                seq_length,
                forward_only=True,
                chunks=models,
            )
        if own:
            self.backend.train_mode(was_training)
        return found or None

    def _reference_logps(self, models, batches: list[dict], seq_length: int) -> list[torch.Tensor]:
        """What compute_reference_log_probs gives, as one tensor [P, 2] of each micro-batch."""
        found = self.compute_reference_log_probs(models, batches, seq_length) or ()
        return [torch.stack(list(of_batch.values()), -1) for of_batch in found]

    def _score(self, pairs) -> np.ndarray:
        """float32 [pairs, 2]: the log-probabilities that the model, without adapters, gives to them
        now. Collective."""
        run = functools.partial(self._reference_logps, self.models)
        return self.evaluator.by_sample(pairs, run, (len(SIDES),)).astype(np.float32)

    def _with_reference(self, dataset):
        """The dataset, its pairs with the log-probabilities of a cached reference. Collective."""
        if dataset is None or self.reference != "cached":
            return dataset
        if isinstance(dataset, dict):
            return {name: self._with_reference(part) for name, part in dataset.items()}
        view = samples_of(dataset)
        if isinstance(view, WithReference):
            return dataset
        if self._was_trained:
            raise ValueError(
                "a cached reference is computed by the model before it is trained: give this "
                "dataset to DPOTrainer as train_dataset or eval_dataset"
            )
        referenced = WithReference(view, reference_of(self, view))
        return dataset.over(referenced) if isinstance(dataset, Packs) else referenced

    # -- around the loop

    def _prepare_train_loop(self, resume_from_checkpoint):
        # before a checkpoint is loaded: the reference is the model that the run started from
        self.train_dataset = self._with_reference(self.train_dataset)
        self.eval_dataset = self._with_reference(self.eval_dataset)
        return super()._prepare_train_loop(resume_from_checkpoint)

    def evaluate(self, eval_dataset=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        if eval_dataset is None:
            self.eval_dataset = eval_dataset = self._with_reference(self.eval_dataset)
        return super().evaluate(self._with_reference(eval_dataset), metric_key_prefix)

    def get_train_dataloader(self):
        """McaTrainer's; the pairs of a cached reference have its log-probabilities. Collective."""
        self.train_dataset = self._with_reference(self.train_dataset)
        return super().get_train_dataloader()

    def training_step(self, models, data_iterator, seq_length: int):
        """McaTrainer's, with the reference's log-probabilities: the loss is the mean of this rank's
        pairs. Takes micro-batches of get_train_dataloader() too."""
        micro_batches = list(data_iterator)
        if any("padding_mask" not in batch for batch in micro_batches):
            micro_batches, _ = arrange(self, micro_batches)
            seq_length = max(batch["input_ids"].shape[1] for batch in micro_batches)
        answer = super().training_step(models, micro_batches, seq_length)
        _, metrics, is_skipped, *_ = answer  # a skipped step's numbers may not be finite
        is_first = not self._was_trained and self.state.global_step == 0
        if is_first and not is_skipped and self.train_config.use_ref_model:
            self._check_start(self.over_ranks(self.new_numbers(metrics)).means())
        self._was_trained = True
        return answer

    def _check_start(self, means: dict[str, float]) -> None:
        """At the first step policy and reference are one model: D = 0, and the loss is ln 2 with
        any label smoothing."""
        loss = means["loss"] - self.train_config.ftx * means["sft_loss"]
        share = 5e-2 if self.args.bf16 or self.args.fp16 else 1e-3
        if abs(loss - math.log(2)) <= share * max(1.0, self.train_config.beta / 0.1):
            return
        self.report.print(
            f"warning: the first preference loss is {loss:.4f}, and it is ln 2 = 0.6931 where "
            "policy and reference are the same: the reference is not the model that training "
            "starts from (ref_model, an adapter that was trained before); or dropout is on in the "
            "policy and off in the reference (attention_dropout, hidden_dropout, lora_dropout); or "
            "the model's numbers are not reproducible"
        )

    def objective_facts(self) -> dict:
        """The reference's log-probabilities of the first pairs: a run goes on with the reference
        that it began with."""
        view = samples_of(self.train_dataset)
        return {"reference": view.logps[:4].tolist()} if isinstance(view, WithReference) else {}

    def check_objective(self, facts: dict, folder: Path) -> None:
        theirs = facts.get("reference")
        ours = self.objective_facts().get("reference")
        if theirs and ours and not is_same_model(self.args, np.array(ours), np.array(theirs)):
            raise CheckpointError(
                f"{folder} was trained against another reference model, which gave {theirs[0]} to "
                f"the first pair, and this one gives {ours[0]}: set model_name_or_path to the "
                "model that the run started from"
            )


def _fit_together(batches: list[dict]) -> bool:
    """Whether one forward pass takes these micro-batches at once."""
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    lengths = {batch["input_ids"].shape[1] for batch in batches}
    if len(lengths) > 1 and "cu_seqlens" not in batches[0]:
        return False
    few = len(batches) <= JOINED and tokens <= JOINED_TOKENS
    return few and all(map(_num_pairs, batches))


def _num_pairs(batch: dict) -> int:
    """Pairs of an arranged micro-batch, without those that only fill it."""
    return int(real_documents(batch).sum()) // len(SIDES)


def _check_pairs(dataset, packs: bool) -> None:
    """ValueError for a dataset of something else, and for packs where rows hold one pair."""
    first = dataset[0]
    of_sample = getattr(dataset, "documents_per_sample", len(SIDES))
    count = len(documents_of(first))
    if of_sample != len(SIDES) or count % len(SIDES):
        got = sorted(first) if isinstance(first, dict) else f"{count} documents"
        raise ValueError(
            'preference training takes samples {"chosen": ..., "rejected": ...}, or lists of two '
            f"documents, and this one has {got}: use a data set of pairs, or stage: sft"
        )
    if not packs and (isinstance(dataset, Packs) or count > len(SIDES)):
        # as rows, micro-batches would differ in their number of rows, which pipeline stages have to
        # know
        raise ValueError(
            "the data set has packs of pairs, and sequence_packing is false: set it to true"
        )
