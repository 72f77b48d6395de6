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
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import lora, loss_preference, parallel
from .args_run import check_together
from .args_values import Judge, refuse
from .ckpt_folder import CheckpointError
from .data_batches import documents_of, split_documents
from .data_cache import default_cache_dir
from .data_files import SIDES
from .data_packs import Packs, WithReference
from .loss_preference import LOSSES, METRICS, REFERENCES, Responses
from .objectives import OBJECTIVES
from .packed_rows import pack_batch
from .trainer import McaTrainer
from .trainer_dpo_config import DPOConfig, choose_reference
from .trainer_predict import own_lengths, sum_documents
from .trainer_reference import is_same_model, reference_of, score
from .weights_sources import resolve_folder

PAIR_KEYS = ("real", "reference")  # what a micro-batch says of its pairs


class Documents(NamedTuple):
    """Where a micro-batch's responses are. lengths: this rank's tokens of each document of a packed
    row, None where each row is one. real float32 [P]: 0 for a pair that only fills the batch."""

    lengths: list[int] | None
    real: torch.Tensor


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
    _language_input_names = [*McaTrainer._language_input_names, "reference"]

    def __init__(
        self, model=None, train_config: DPOConfig | None = None, ref_model=None, args=None, **kwargs
    ):
        self.train_config = config = train_config or DPOConfig()
        self.reference = choose_reference(config, model, ref_model)
        mtp = args.mtp_num_layers or getattr(model.config, "mtp_num_layers", None)
        check_together(args, stage="dpo", mtp_num_layers=mtp)
        evaluated = kwargs.get("eval_dataset")
        if not isinstance(evaluated, dict):
            evaluated = {"eval": evaluated}
        for dataset in (kwargs.get("train_dataset"), *evaluated.values()):
            if dataset is not None and len(dataset):
                _check_pairs(dataset, args.sequence_packing)
        super().__init__(model=model, args=args, **kwargs)
        self.settings |= {
            "pref_loss": config.pref_loss,
            "pref_beta": config.beta,
            "pref_ftx": config.ftx,
            "dpo_label_smoothing": config.label_smoothing,
            "ref_model": self.reference,
        }
        self.backend.expect_weighted_losses()
        if ref_model is not None:
            self._guard.check_weights("the reference model", ref_model)
        self.ref_chunks = self.backend.wrap_reference(ref_model) if ref_model is not None else None
        if self.train_config.use_ref_model and self.reference != "cached":
            self._reference_model = self.model if ref_model is None else ref_model
        self._was_trained = self._start_is_checked = False

    # -- a run of the command line

    @classmethod
    def second_model_folder(cls, arguments, planned) -> Path | None:
        keys = arguments.finetuning
        if not LOSSES[keys.pref_loss].has_reference:
            return None
        if keys.ref_model == "model":
            return planned.folder
        if keys.ref_model not in (None, *REFERENCES):
            return Path(resolve_folder(keys.ref_model, arguments.model.model_revision))
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
        keys, source = arguments.finetuning, ""
        if arguments.model.train_from_scratch:
            source = f"drawn from seed {arguments.training.seed}"
        config = DPOConfig(
            beta=keys.pref_beta,
            pref_loss=keys.pref_loss,
            label_smoothing=keys.dpo_label_smoothing,
            ftx=keys.pref_ftx,
            reference=keys.ref_model if second_model is None else "model",
            cache_dir=str(Path(arguments.data.cache_dir or default_cache_dir()).expanduser()),
            model_source=source,
        )
        return {"train_config": config, "ref_model": second_model}

    # -- the loss

    def preference_loss(self, responses: Responses):
        """(losses, rewards of chosen, rewards of rejected), each [P], by the table's row of
        pref_loss. Those of DPO and ORPO go through dpo_loss and odds_ratio_loss, which a subclass
        may override."""
        r, formula = responses, LOSSES[self.train_config.pref_loss].formula
        if formula is loss_preference.sigmoid:
            return self.dpo_loss(r.chosen, r.rejected, r.reference_chosen, r.reference_rejected)
        if formula is loss_preference.odds_ratio:
            lens = torch.cat([r.chosen_lens, r.rejected_lens])
            return self.odds_ratio_loss(r.chosen, r.rejected, lens)
        return formula(r, self.train_config)

    def odds_ratio_loss(self, chosen_logps, rejected_logps, response_lens):
        """(losses, rewards of chosen, rewards of rejected), each [P]; response_lens [2 P]: those of
        chosen, then rejected.
        """
        return loss_preference.odds_ratio_loss(
            chosen_logps, rejected_logps, *response_lens.chunk(2), beta=self.train_config.beta
        )

    def dpo_loss(
        self,
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
    ):
        """(losses, rewards of chosen, rewards of rejected), each [P]."""
        config = self.train_config
        return loss_preference.dpo_loss(
            policy_chosen_logps,
            policy_rejected_logps,
            reference_chosen_logps,
            reference_rejected_logps,
            config.beta,
            config.label_smoothing,
        )

    def _pre_compute_loss(self, batch: dict, inputs: dict):
        device, known = parallel.device(), batch.get("reference")
        chosen, rejected = (
            (None, None) if known is None else parallel.to_device(known, device).unbind(-1)
        )
        documents = self._documents(batch)
        return functools.partial(
            self._post_compute_loss, inputs["labels"], documents, chosen, rejected
        )

    def _documents(self, batch: dict) -> Documents:
        lengths = own_lengths(self.backend, batch)
        return Documents(lengths, parallel.to_device(batch["real"], parallel.device()))

    def _response_logps(self, labels, documents: Documents, losses):
        """(log-probabilities float32 [2 P], tokens float32 [2 P]) of the responses, chosen and
        rejected in turn.

        Collective under context parallelism: one sum over its group."""
        sums = sum_documents(self.backend, documents.lengths, labels, losses)
        return sums[:, : 2 * len(documents.real)]

    def _post_compute_loss(self, labels, documents, ref_chosen_logps, ref_rejected_logps, losses):
        """Token losses [b, s] -> (sum of the pairs' losses, pairs int32, {metric: (sum, pairs)}).

        labels [b, s]; documents says where the responses are; ref_*_logps float32 [P], None for a
        loss without reference.
        """
        logps, lens = self._response_logps(labels, documents, losses)
        real, config = documents.real, self.train_config
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
        count = real.sum()
        metrics = {
            key: torch.stack([(value.detach() * real).sum(), count])
            for key, value in values.items()
        }
        # all context-parallel ranks have the same pairs, and megatron adds up what they count: one
        # of them counts
        counts = self.backend.context_parallel[1] == 0
        return (of_pairs * real).sum(), (count * counts).int(), metrics

    def _count_of_loss(self, batch: dict) -> int:
        return int(batch["real"].sum())

    # -- micro-batches

    _rows_hold_documents = True

    def _arrange(self, batch: dict) -> dict:
        if "attention_mask" not in batch:
            raise ValueError(
                "the data collator gave no attention_mask: expected one that numbers a row's "
                "documents from 1"
            )
        counts = batch["attention_mask"].amax(dim=1)  # documents of each row; a filler has none
        if (counts % 2).any():
            raise ValueError(
                f"the data collator gave rows of {counts.tolist()} documents: expected chosen and "
                "rejected in turn, numbered from 1 by attention_mask"
            )
        known = batch.get("reference")  # [b, most documents of a row]
        if self.args.sequence_packing:  # fillers are dropped
            arranged = pack_batch(batch, self.backend.document_multiple, self._pad_token_id)
            arranged["real"] = torch.ones(int(counts.sum()) // 2)
            if known is not None:
                known = torch.cat([row[:n] for row, n in zip(known, counts, strict=True)])
        else:  # fillers are kept: all micro-batches of a pipeline have one shape
            arranged = split_documents(batch, len(SIDES), self._pad_token_id)
            arranged["real"] = (counts > 0).float()
            if known is not None:
                known = known * arranged["real"][:, None]
        if known is not None:
            arranged["reference"] = known.view(-1, len(SIDES))
        return arranged

    def _to_length(self, batch: dict, at_least: int = 0) -> dict:
        of_pairs = {key: batch[key] for key in PAIR_KEYS if key in batch}
        tokens = {key: value for key, value in batch.items() if key not in PAIR_KEYS}
        return {**super()._to_length(tokens, at_least), **of_pairs}

    def _prepare_micro_batches(self, micro_batches: list[dict], seq_length: int) -> list[dict]:
        """The micro-batches with the reference's log-probabilities, where the loss takes them and
        the data does not.
        """
        if not self.train_config.use_ref_model or self.reference == "cached":
            if self.reference == "cached" and any(
                "reference" not in batch for batch in micro_batches
            ):
                raise ValueError(
                    'the data collator dropped "reference", the '
                    "log-probabilities [b, documents] that the samples bring: hand them on, or use "
                    "ref_model: model"
                )
            return micro_batches
        chunks = self.models if self.ref_chunks is None else self.ref_chunks
        found = self.compute_reference_log_probs(chunks, micro_batches, seq_length)
        if found is None:  # a pipeline stage before the last, where no loss is taken
            return micro_batches
        known = (
            torch.stack([of["reference_chosen_logps"], of["reference_rejected_logps"]], -1)
            for of in found
        )
        return [
            {**batch, "reference": logps} for batch, logps in zip(micro_batches, known, strict=True)
        ]

    # -- the reference

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
        if own:
            self.backend.train_mode(False)
        with lora.without_adapters(self.model) if own else contextlib.nullcontext():
            found = self.backend.forward_backward(
                self._reference_step, data_list, seq_length, forward_only=True, chunks=models
            )
        if own:
            self.backend.train_mode(was_training)
        return found or None

    def _reference_step(self, data_iterator, model):
        batch = next(data_iterator)
        inputs = self._prepare_train_inputs(iter([batch]))
        documents = self._documents(batch)

        def collect(losses):
            logps, _ = self._response_logps(inputs["labels"], documents, losses)
            found = {"reference_chosen_logps": logps[0::2], "reference_rejected_logps": logps[1::2]}
            return losses.sum(), documents.real.sum().int(), found

        return model(**inputs), collect

    def _with_reference(self, dataset):
        """The dataset, its pairs with the log-probabilities of a cached reference. Collective."""
        if dataset is None or self.reference != "cached":
            return dataset
        if isinstance(dataset, dict):
            return {name: self._with_reference(part) for name, part in dataset.items()}
        view = dataset.dataset if isinstance(dataset, Packs) else dataset
        if isinstance(view, WithReference):
            return dataset
        if self._was_trained:
            raise ValueError(
                "a cached reference is computed by the model before it is trained: give this "
                "dataset to DPOTrainer as train_dataset or eval_dataset"
            )
        referenced = WithReference(view, reference_of(self, view))
        return dataset.over(referenced) if isinstance(dataset, Packs) else referenced

    def _score(self, pairs) -> np.ndarray:
        """float32 [pairs, 2]: the log-probabilities that the model, without adapters, gives to them
        now. Collective.
        """
        return score(self, pairs)

    # -- around the loop

    def _prepare_train_loop(self, resume_from_checkpoint):
        # before a checkpoint is loaded: the reference is the model that the run started from
        self._prepare_datasets()
        return super()._prepare_train_loop(resume_from_checkpoint)

    def _prepare_datasets(self) -> None:
        self.train_dataset = self._with_reference(self.train_dataset)
        self.eval_dataset = self._with_reference(self.eval_dataset)

    def evaluate(self, eval_dataset=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        if eval_dataset is None:
            self.eval_dataset = eval_dataset = self._with_reference(self.eval_dataset)
        return super().evaluate(self._with_reference(eval_dataset), metric_key_prefix)

    def training_step(self, models, data_iterator, seq_length: int):
        """McaTrainer's, with the reference's log-probabilities: the loss is the mean of this rank's
        pairs.
        """
        answer = super().training_step(models, data_iterator, seq_length)
        if (
            not self._start_is_checked
            and not answer[2]  # a skipped step: its numbers may not be finite
            and self.train_config.use_ref_model
            and self.state.global_step == 0
        ):
            self._check_start(self._over_ranks(self._numbers(answer[1])).means())
        self._was_trained = self._start_is_checked = True
        return answer

    def _check_start(self, means: dict[str, float]) -> None:
        """At the first step policy and reference are one model: D = 0, and the loss is ln 2 with
        any label smoothing.
        """
        loss = means["loss"] - self.train_config.ftx * means["sft_loss"]
        share = 5e-2 if self.args.bf16 or self.args.fp16 else 1e-3
        if abs(loss - math.log(2)) <= share * max(1.0, self.train_config.beta / 0.1):
            return
        causes = [
            "the reference is not the model that training starts from (ref_model, an adapter that "
            "was trained before)"
        ]
        causes += [
            "dropout is on in the policy and off in the reference (attention_dropout, "
            "hidden_dropout, lora_dropout)"
        ]
        self.report.print(
            f"warning: the first preference loss is {loss:.4f}, and it is ln 2 = 0.6931 where "
            f"policy and reference are the same: {'; or '.join(causes)}; or the model's numbers "
            "are not reproducible"
        )

    def objective_facts(self) -> dict:
        """The reference's log-probabilities of the first pairs: a run goes on with the reference
        that it began with.
        """
        packed = isinstance(self.train_dataset, Packs)
        view = self.train_dataset.dataset if packed else self.train_dataset
        return {"reference": view.logps[:4].tolist()} if isinstance(view, WithReference) else {}

    def check_objective(self, facts: dict, folder: Path) -> None:
        theirs, ours = facts.get("reference"), self.objective_facts().get("reference")
        if theirs and ours and not is_same_model(self.args, np.array(ours), np.array(theirs)):
            raise CheckpointError(
                f"{folder} was trained against another reference model, which gave {theirs[0]} to "
                f"the first pair, and this one gives {ours[0]}: set model_name_or_path to the "
                "model that the run started from"
            )


def _check_pairs(dataset, packs: bool) -> None:
    """ValueError for a dataset of something else, and for packs where rows hold one pair."""
    first, of_sample = dataset[0], getattr(dataset, "documents_per_sample", len(SIDES))
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
