"""Preference training: DPOTrainer, as hooks of McaTrainer's loop, and the reference model's pass.

    _arrange                pairs -> rows or a packed row, alternating chosen and rejected
    _prepare_micro_batches  add log-probabilities of the reference, unless the data has them, and
                            numbers about the global batch for losses that need them
    _pre_compute_loss, _post_compute_loss
                            token losses -> log-probabilities of answers -> loss and 8 metrics

part_dpo_losses has the formulas. The loss is the mean over the pairs of the global batch, in every
layout. A cached reference is the model before training, without adapters: its log-probabilities
are computed once, and stored on disk if there is a cache_dir. Letters: P pairs in a micro-batch,
without fillers; s positions.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Subset

from . import ckpt_folder, parallel, part_dpo_losses
from .batch import Batch, in_documents, join, real_documents
from .data_batches import Documents, Packs, View, documents_of, samples_of
from .data_encode import hash_of
from .data_files import SIDES
from .errors import Judge, expect, refuse
from .files import IGNORE_INDEX, cache_folder, resolve_folder
from .finetuning import finetuning_of
from .loss_tokens import Logits
from .part_dpo_keys import LOSSES, METRICS, PreferenceLoss, has_reference
from .part_dpo_losses import Responses
from .part_scores import ObjectiveConfig, ScoredTrainer, identity_of_model
from .part_scores_keys import REFERENCES
from .step import collecting, measure, row_length, to_length
from .tables import OBJECTIVES, PAIR_COLUMNS, function_of, other_columns
from .trainer_evaluation import sum_documents

# a forward pass of the reference joins at most so many micro-batches and tokens: with fewer a GPU
# waits for the host to launch kernels, with more it may need more memory than training
JOINED = 2
JOINED_TOKENS = 16384
_WITHOUT_ADAPTER = (
    "note: the reference is the model of model_name_or_path, without the adapter of "
    "adapter_name_or_path, so that rewards do not begin at 0; to start from the adapter's model, "
    "merge it (python -m mca_lite convert BASE DST --merge) and train a new adapter on it"
)


class WithReference(View):
    """A view of a dataset that adds "reference" to each document: the log-probability of its
    answer under the reference model, summed over trained tokens (as weighted by ld_alpha). logps:
    [samples, documents per sample].
    """

    def __init__(self, dataset: Any, logps: np.ndarray) -> None:
        super().__init__(dataset)
        self.logps = logps
        self.first_scores = logps[:4].tolist()

    def __getitem__(self, i: int) -> Documents:
        documents = documents_of(self.dataset[i])
        return [
            {**document, "reference": logp}
            for document, logp in zip(documents, self.logps[i], strict=True)
        ]


@dataclass(kw_only=True)
class ReferenceConfig(ObjectiveConfig):
    """Settings that objectives with a reference model share.

    reference: "cached" (its log-probabilities are computed once, before training), "adapter" (the
    model with adapters off) or "model" (a second model). None: "model" if a second model is given;
    otherwise "adapter" for adapters without modules_to_save; otherwise "cached".
    cache_dir: folder for the cached log-probabilities; None: kept in memory.
    model_source: text in the cache's key that tells apart start models of the same folder, such as
    models drawn from different seeds.
    """

    reference: str | None = None
    cache_dir: str | None = None
    model_source: str = ""

    def __post_init__(self) -> None:
        self.take_keys(finetuning_type="lora")
        if self.reference not in (None, *REFERENCES):
            reason = f"expected {', '.join(REFERENCES)}, or None"
            refuse("reference", self.reference, reason, "cached")


@dataclass
class DPOConfig(ReferenceConfig):
    """Settings of preference training. ConfigError for values that do not fit together.

    pref_loss: a name in LOSSES, such as sigmoid (DPO), or a list of names; it becomes a list.
    pref_loss_weights: a weight per loss; None: 1.
    beta: usually a factor on log-ratios to the reference, or without one on log-probabilities; in
    ORPO the weight of the odds ratio.
    label_smoothing: assumed share of pairs whose answers are swapped.
    ftx: weight of the sft term, the mean token loss of the chosen answer. simpo_gamma to
    use_weighting: the configuration keys of the same names.
    use_ref_model: whether the losses have a reference; it becomes True or False, and another value
    than theirs is an error. Other fields are ReferenceConfig's."""

    beta: float = 0.1
    pref_loss: Any = "sigmoid"
    label_smoothing: float = 0.0
    _: KW_ONLY
    use_ref_model: bool | None = None
    ftx: float = 0.0
    pref_loss_weights: list[float] | None = None
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0
    discopop_tau: float = 0.05
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    use_weighting: bool = False
    stage: ClassVar[str] = "dpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        needs = has_reference(self.pref_loss)
        if self.use_ref_model not in (None, needs):
            article = "a" if needs else "no"
            reason = f"pref_loss {', '.join(self.pref_loss)} has {article} reference model"
            refuse("use_ref_model", self.use_ref_model, reason, "use_ref_model left out")
        self.use_ref_model = needs


def _choose_reference(config: DPOConfig, model: Any, ref_model: Any) -> str | None:
    """Decide where the reference comes from: "cached", "adapter" or "model", see ReferenceConfig;
    None if the losses need no reference. ConfigError if the configured reference is not possible,
    or if ref_model is missing or would not be used."""
    finetuning = finetuning_of(model)
    kind = None
    if config.use_ref_model:
        kind = "cached"
        if ref_model is not None:
            kind = "model"
        elif finetuning.can_be_off:
            kind = "adapter"
        kind = config.reference or kind
        config.check_with(finetuning_type=finetuning.kind, modules_to_save=finetuning.saved)
    if (kind == "model") != (ref_model is not None):
        article = "a" if kind == "model" else "no"
        reason = f"expected {article} ref_model for this loss"
        refuse(
            "reference", kind, reason, "reference: model, with a ref_model, or leave ref_model out"
        )
    return kind


class DPOTrainer(ScoredTrainer):
    """Train on preference pairs. A sample has two documents {"input_ids", "labels"} with shifted
    labels, the chosen answer's before the rejected one's, as a list or as {"chosen", "rejected"}.
    With sequence_packing, samples may also be packs (lists) of pairs; with a cached reference only
    those of data_batches.Packs.

    train_config: a DPOConfig; None: its defaults.
    ref_model: for reference "model", a second model of the backend's kind, which gets frozen; it
    must share no parameter with `model`.
    optimizer, lr_scheduler: McaTrainer's `optimizers`. Other arguments are McaTrainer's;
    per_device_train_batch_size counts pairs, or packs. ValueError for data and keys that do not
    fit."""

    config_class: Any = DPOConfig
    scorer = "reference model"
    scorer_key = "model_name_or_path"
    kind = "reference"
    row_unit = "pair"
    part_rows = 1024
    row_type = np.dtype([("logps", np.float32, (len(SIDES),))])
    in_turn = "chosen and rejected"  # names a sample's documents in messages
    metrics_keys = list(METRICS)
    documents_per_sample = len(SIDES)
    unread_columns = other_columns("reference", *PAIR_COLUMNS)
    _loss_of_logits: Any = None

    def __init__(
        self,
        model: Any = None,
        train_config: DPOConfig | None = None,
        ref_model: Any = None,
        args: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("optimizers", (optimizer, lr_scheduler))
        super().__init__(model, train_config, args, **kwargs)
        config = self.train_config
        self.reference = _choose_reference(config, model, ref_model)
        self.settings["ref_model"] = self.reference
        if config.use_weighting:
            self._loss_of_logits = _with_agreement
        self.backend.expect_weighted_losses()
        self.ref_chunks = None
        if ref_model is not None:
            self.guard.check_weights("the reference model", ref_model)
            self.ref_chunks = self.backend.wrap_reference(ref_model)
        if config.use_ref_model and self.reference != "cached":
            self._reference_model = self.model if ref_model is None else ref_model

    def _keys_of_data(self, args: Any, given: dict[str, Any]) -> dict[str, Any]:
        evaluated = given.get("eval_dataset")
        if not isinstance(evaluated, dict):
            evaluated = {"eval": evaluated}
        datasets = [*filter(None, (given.get("train_dataset"), *evaluated.values()))]
        for dataset in datasets:
            self.check_samples(dataset)
            is_packed = isinstance(dataset, Packs) or len(documents_of(dataset[0])) > len(SIDES)
            # rows then have unequal numbers of samples, and pipeline stages must know a row's shape
            expect(
                args.sequence_packing or not is_packed,
                "the data set has packs, and sequence_packing is false: set it to true",
            )
            has_its_own = isinstance(samples_of(dataset), WithReference)
            expect(
                has_its_own or not _has("reference", dataset),
                "the samples have reference, which the trainer computes: remove the column",
            )
        self.pair_columns = {name for name in PAIR_COLUMNS for one in datasets if _has(name, one)}
        return dict.fromkeys(self.pair_columns, "its column")

    @property
    def _rows(self) -> dict[str, PreferenceLoss]:
        """{name: PreferenceLoss} for the losses that this run sums."""
        return {name: LOSSES[name] for name in self.train_config.pref_loss}

    @property
    def _of_batch(self) -> list[str]:
        """Names of this run's losses that need numbers about all pairs of the global batch."""
        return [name for name, row in self._rows.items() if row.of_batch]

    # -- a run of the command line

    @classmethod
    def has_reference(cls, keys: Any) -> bool:
        """True if a run with these configuration keys compares with a reference model."""
        known = cls.config_class.use_ref_model
        return has_reference(keys.pref_loss) if known is None else known

    @classmethod
    def forward_passes(cls, keys: Any) -> tuple[int, int]:
        """For counting FLOPs: (extra forward passes of the trained model per step, forward passes
        of a reference model that runs in each step). The first is 1 if a loss needs the
        log-probabilities of the whole global batch beforehand, otherwise 0; the second is 1."""
        return int(any(LOSSES[name].looks_ahead for name in keys.pref_loss)), 1

    @classmethod
    def second_model_folder(cls, arguments: Any, planned: Any) -> Path | None:
        """Folder of the reference model to load; None if the run needs no second model. ConfigError
        for a reference that cannot work with these keys, ValueError if there is no such model.
        planned: the trained model's run.PlannedModel."""
        if not cls.has_reference(arguments):
            return None
        if arguments.ref_model == "model":
            return planned.folder
        if arguments.ref_model not in (None, *REFERENCES):
            return resolve_folder(arguments.ref_model, arguments.model.model_revision)
        judge = Judge(arguments)
        # checked again, because new tokens may have set modules_to_save
        OBJECTIVES[arguments.stage].check_keys(arguments, judge)
        judge.close()
        adapter = arguments.adapter_name_or_path
        if adapter and planned.finetuning.saved:
            reason = (
                "it has modules_to_save, and without its adapters the model is not the one that "
                "it began with"
            )
            refuse("adapter_name_or_path", adapter, reason, "ref_model: model")
        return None

    @classmethod
    def notes_of_run(cls, arguments: Any) -> list[str]:
        """For a run that trains a saved adapter further: a note that the reference is the base
        model without that adapter. [] if no adapter is loaded, if there is no reference, or if
        ref_model is a folder.
        """
        is_base = cls.has_reference(arguments) and arguments.ref_model in (None, *REFERENCES)
        return [_WITHOUT_ADAPTER] if is_base and arguments.adapter_name_or_path else []

    @classmethod
    def own_keywords(cls, arguments: Any, second_model: Any) -> dict[str, Any]:
        """This trainer's arguments beyond McaTrainer's, for a run: {"train_config", "ref_model"}.
        second_model: a function that builds the reference model; None: there is none.
        """
        source = ""
        if arguments.model.train_from_scratch:
            source = f"drawn from seed {arguments.training.seed}"
        config = cls.config_class.of_keys(
            arguments,
            reference=arguments.ref_model if second_model is None else "model",
            cache_dir=str(cache_folder(arguments.data.cache_dir)),
            model_source=source,
        )
        ref_model = None if second_model is None else second_model()
        return {"train_config": config, "ref_model": ref_model}

    @staticmethod
    def check_samples(dataset: Any) -> None:
        """Raise ValueError if the first sample is not a pair, or a pack of pairs, or if
        dataset.documents_per_sample says otherwise."""
        first = dataset[0]
        of_sample = getattr(dataset, "documents_per_sample", len(SIDES))
        count = len(documents_of(first))
        if of_sample != len(SIDES) or not count or count % len(SIDES):
            got = sorted(first) if isinstance(first, dict) else f"{count} documents"
            raise ValueError(
                'preference training takes samples {"chosen": ..., "rejected": ...}, or lists of '
                f"two documents, and this one has {got}: use a data set of pairs, or stage: sft"
            )

    # -- the loss

    def preference_loss(self, responses: Responses) -> tuple[Any, Any, Any]:
        """(losses, rewards of chosen, rewards of rejected answers), each [P]. Losses are the
        weighted sum of this run's losses; rewards are the first loss's.

        responses.of_batch: [P, 2 n], two numbers for each of the n losses that need numbers about
        the global batch; None if n is 0. sigmoid goes through dpo_loss and orpo through
        odds_ratio_loss, which subclasses can override."""
        found = [self._loss_of(name, responses) for name in self._rows]
        weights = self.train_config.pref_loss_weights or [1.0] * len(found)
        losses = sum(weight * one[0] for weight, one in zip(weights, found, strict=True))
        return losses, *found[0][1:]

    def _loss_of(self, name: str, r: Responses) -> tuple[Any, Any, Any]:
        """(losses, rewards of chosen, rewards of rejected answers), each [P], by the loss `name`
        alone. r: the Responses of P pairs."""
        row = self._rows[name]
        formula = function_of(row.formula)
        if formula is part_dpo_losses.sigmoid:
            margin = {} if r.margin is None else {"margin": r.margin}
            of_reference = (r.reference_chosen, r.reference_rejected)
            return self.dpo_loss(r.chosen, r.rejected, *of_reference, **margin)
        if formula is part_dpo_losses.orpo:
            lens = torch.cat([r.chosen_lens, r.rejected_lens])
            return self.odds_ratio_loss(r.chosen, r.rejected, lens)
        own = None
        if row.of_batch:
            first = 2 * self._of_batch.index(name)
            own = r.of_batch[:, first : first + 2]
        return self._with_rewards(row, r.with_numbers(own))

    def _with_rewards(self, row: PreferenceLoss, r: Responses) -> tuple[Any, Any, Any]:
        """Apply the formula of a loss: (losses, rewards of chosen, rewards of rejected answers),
        each [P]. If the formula gives only losses, rewards are beta times the log-ratio to the
        reference, or without a reference beta times Responses.means. row: the loss's row in LOSSES.
        r: the Responses of P pairs."""
        found = function_of(row.formula)(r, self.train_config)
        if isinstance(found, tuple):
            return found
        numbers = r.ratios if row.has_reference else r.means
        return found, *part_dpo_losses.rewards(numbers, self.train_config)

    def odds_ratio_loss(
        self, chosen_logps: torch.Tensor, rejected_logps: torch.Tensor, response_lens: torch.Tensor
    ) -> tuple[Any, Any, Any]:
        """ORPO's (losses, rewards of chosen, rewards of rejected answers), each [P], from
        log-probabilities [P]. response_lens: numbers of tokens, [2 P], first of all chosen answers,
        then of all rejected ones.
        """
        r = Responses(chosen_logps, rejected_logps, *response_lens.chunk(2))
        return self._with_rewards(LOSSES["orpo"], r)

    def dpo_loss(
        self,
        policy_chosen_logps: torch.Tensor,
        policy_rejected_logps: torch.Tensor,
        reference_chosen_logps: torch.Tensor,
        reference_rejected_logps: torch.Tensor,
        margin: torch.Tensor | None = None,
    ) -> tuple[Any, Any, Any]:
        """DPO's (losses, rewards of chosen, rewards of rejected answers), each [P], from
        log-probabilities [P]. margin: [P], subtracted from beta times the difference of log-ratios
        (or of an f-divergence's slopes); passed only if pairs have one."""
        policy = (policy_chosen_logps, policy_rejected_logps)
        reference = (reference_chosen_logps, reference_rejected_logps)
        r = Responses(*policy, None, None, *reference, margin=margin)
        return self._with_rewards(LOSSES["sigmoid"], r)

    def _pre_compute_loss(self, batch: Batch, inputs: dict[str, Any], *more: Any) -> Any:
        """Make the loss function of a micro-batch. _post_compute_loss then gets the labels, the
        batch and the reference's log-probabilities (None without a reference) before the token
        losses. inputs: the model's inputs for the batch. more: further arguments of
        _post_compute_loss."""
        of_reference = (None, None)
        if "reference" in batch:
            of_reference = batch["reference"].view(-1, len(SIDES)).unbind(-1)
        return super()._pre_compute_loss(batch, inputs, batch, *of_reference, *more)

    def _post_compute_loss(  # type: ignore[override]
        self,
        labels: torch.Tensor,
        batch: Batch,
        ref_chosen_logps: torch.Tensor | None,
        ref_rejected_logps: torch.Tensor | None,
        losses: torch.Tensor,
    ) -> tuple[Any, ...]:
        """Turn token losses [b, s] into (sum of the pairs' losses, number of pairs int32, {metric:
        float32 [sum, pairs]}).

        labels: [b, s] on this rank. batch: the whole micro-batch; its loss columns per token are
        sharded like the tokens. ref_chosen_logps, ref_rejected_logps: float32 [P]; None without a
        reference. losses: with use_weighting [b, s, 2], from _with_agreement. Under context
        parallelism collective over its group, whose ranks other than the first return counts and
        metrics of 0."""
        agreement: Any = 1.0
        if self.train_config.use_weighting:
            losses, of_squares = losses.unbind(-1)
            agreement = self._agreement(batch, labels, losses.detach() + of_squares)
        logps, lens = self._log_probs_of(batch, labels, losses)
        whole = logps
        if "logp_weight" in batch:
            whole, _ = sum_documents(self.backend, batch, labels, losses)
        responses = Responses(
            logps[0::2],
            logps[1::2],
            lens[0::2],
            lens[1::2],
            ref_chosen_logps,
            ref_rejected_logps,
            whole[0::2],
            batch.get("pair_margin"),
            batch.get("of_batch"),
        )
        of_pairs, chosen_rewards, rejected_rewards = self.preference_loss(responses)
        sft = -responses.whole_chosen / responses.chosen_lens.clamp(min=1)
        of_pairs = agreement * of_pairs + self.train_config.ftx * sft
        of_pairs = of_pairs * batch.get("pair_weight", 1.0)
        values = {
            **compared(chosen_rewards, rejected_rewards),
            "logps/chosen": responses.chosen,
            "logps/rejected": responses.rejected,
            "sft_loss": sft,
        }
        return self._summed(of_pairs, values)

    def _summed(
        self, losses: torch.Tensor, values: dict[str, Any], counted: Any = ()
    ) -> tuple[Any, ...]:
        """(sum of losses [n], n as int32, {metric: float32 [sum, count]}). values: {metric: [n]};
        "loss" is added. counted: {metric: mask [n]} for metrics over only some of the n.

        Context-parallel ranks have equal losses, so ranks other than the first return a count and
        metrics of 0. Sets `terms`.
        """
        values = {"loss": losses, **values}
        masks = dict.fromkeys(values, torch.ones_like(losses)) | dict(counted)
        self.terms = (masks["loss"], losses.detach())
        # context-parallel ranks have equal values, and metrics are summed over all ranks: count one
        is_counted = self.backend.context_parallel[1] == 0
        metrics = {
            key: torch.stack([(values[key].detach() * mask).sum(), mask.sum()]).float() * is_counted
            for key, mask in masks.items()
        }
        count = torch.full_like(losses.sum(), len(losses)) * is_counted
        return losses.sum(), count.int(), metrics

    def _log_probs_of(
        self, batch: Batch, labels: torch.Tensor, losses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, numbers of tokens) of an arranged batch's real documents, [documents]
        each, from labels and token losses [b, s] on this rank; a document counts its trained
        tokens. With ld_alpha, log-probabilities of an answer's tokens beyond the other answer's
        length are multiplied by it. Collective under context parallelism."""
        if "logp_weight" in batch:
            losses = losses * batch["logp_weight"]
        return sum_documents(self.backend, batch, labels, losses)

    def _agreement(
        self, batch: Batch, labels: torch.Tensor, differences: torch.Tensor
    ) -> torch.Tensor:
        """WPO's weights of pairs [P] (2406.11827, equation 2), larger for answers that the model
        itself is likely to give: exp of the mean of log p - log sum p^2 over an answer's tokens,
        multiplied over the pair's two answers.

        differences: log sum p^2 - log p for each token, [b, s]. Collective under context
        parallelism.
        """
        sums, lens = sum_documents(self.backend, batch, labels, differences)
        return (sums / lens.clamp(min=1)).exp().view(-1, len(SIDES)).prod(-1)

    def _count_of_loss(self, batch: Batch) -> float:
        return _num_pairs(batch)

    # -- micro-batches

    def _arrange(self, batch: Batch) -> Batch:
        """Arrange a collated batch of pairs for the model, and with ld_alpha add "logp_weight", the
        token weights. ValueError if a row's documents do not make whole pairs, or if the batch
        lacks a column of pairs, such as pair_weight, that the data has, or has one that the data
        lacks."""
        counts = batch["attention_mask"].amax(dim=1)  # documents per row; fillers have none
        expect(
            not (counts % self.documents_per_sample).any(),
            f"the data collator gave rows of {counts.tolist()} documents: expected "
            f"{self.in_turn} in turn, numbered from 1 by attention_mask",
        )
        arranged = super()._arrange(batch)
        found = arranged.keys() & {*PAIR_COLUMNS}
        expect(
            found == self.pair_columns,
            f"some pairs have {', '.join(self.pair_columns ^ found)}, and others have not, or the "
            "data collator dropped it: expected one number for each pair",
        )
        alpha = self.train_config.ld_alpha
        if alpha is not None:
            arranged["logp_weight"] = _weights_beyond(arranged, alpha)
        return arranged

    def _prepare_micro_batches(self, micro_batches: list[Batch], seq_length: int) -> list[Batch]:
        if self.train_config.use_ref_model:
            micro_batches = self._with_reference_logps(micro_batches)
        return self._compared(micro_batches) if self._of_batch else micro_batches

    def _with_reference_logps(self, micro_batches: list[Batch]) -> list[Batch]:
        """The micro-batches with the column "reference", the reference's log-probabilities of all
        documents. Pipeline stages before the last return them unchanged. Collective unless the
        reference is cached; then ValueError if the collator dropped the column.
        """
        if self.reference == "cached":
            expect(
                all("reference" in batch for batch in micro_batches),
                'the data collator dropped "reference", the samples\' log-probabilities [b, '
                "documents]: keep that column, or use ref_model: model",
            )
            return micro_batches
        models = self.ref_chunks or self.models
        run = functools.partial(self._reference_logps, models)
        logps = self._score_pairs(micro_batches, models, run)
        if logps is None:
            return micro_batches
        return _with_column(micro_batches, "reference", logps, len(SIDES))

    def _score_pairs(
        self, micro_batches: list[Batch], models: Any, run: Callable[..., list[torch.Tensor]]
    ) -> torch.Tensor | None:
        """Log-probabilities [2 P] for the P pairs of all micro-batches, computed by
        run(micro-batches). Where the backend allows it, micro-batches are joined first,
        for fewer forward passes. None on pipeline stages before the last. Collective.

        models: the chunks that `run` uses.
        """
        joined = _joined(micro_batches) if self.backend.joins_rows(models) else micro_batches
        joined = [to_length(self.backend, batch) for batch in joined]
        logps = run(joined)
        return torch.cat(logps).flatten() if logps else None

    # -- the global batch

    def _compared(self, micro_batches: list[Batch]) -> list[Batch]:
        """The micro-batches with the column "of_batch": numbers about the global batch for the
        losses that need them. An evaluation does not change what such a loss remembers between
        steps. Collective."""
        every, first = self._every_pair(micro_batches)
        memory = self.state.objective
        if not torch.is_grad_enabled():
            memory = dict(memory)
        columns = []
        for name in self._of_batch:
            numbers = function_of(self._rows[name].of_batch)(every, self.train_config, memory)
            for number in numbers:
                column = torch.as_tensor(number).to(every.chosen)
                columns.append(column.expand_as(every.chosen))
        own = torch.stack(columns, -1).float()[first : first + sum(map(_num_pairs, micro_batches))]
        return _with_column(micro_batches, "of_batch", own)

    @torch.no_grad()
    def _every_pair(self, micro_batches: list[Batch]) -> tuple[Responses, int]:
        """(Responses with all pairs of the global batch, float64, the same on every rank; index of
        this data-parallel rank's first pair). micro_batches: this rank's. Collective.

        The policy's log-probabilities are computed without dropout; they are 0 if no loss reads
        them ahead. Those of the reference are 0 without one.
        """
        logps = None
        if any(row.looks_ahead for row in self._rows.values()):
            run = functools.partial(self._log_probs, self.models)
            logps = self._score_pairs(micro_batches, self.models, run)
        own = {}
        rank = self.backend.dp_rank
        if self.backend.counts_tokens:
            lengths = torch.cat([_lengths(batch) for batch in micro_batches])
            reference = torch.zeros(len(lengths))
            if self.train_config.use_ref_model:
                reference = torch.cat([batch["reference"] for batch in micro_batches])
            logps = torch.zeros(len(lengths)) if logps is None else logps
            columns = [x.cpu().double().view(-1, 2) for x in (logps, lengths, reference)]
            own[rank] = torch.cat(columns, -1)
        of_ranks: dict[int, torch.Tensor] = {}
        for found in parallel.gather(own):
            of_ranks.update(found)
        tables = [of_ranks[number] for number in sorted(of_ranks)]
        every = torch.cat(tables).to(parallel.device())
        return Responses(*every.unbind(-1)), sum(map(len, tables[:rank]))

    # -- the reference

    @torch.no_grad()
    def compute_reference_log_probs(
        self,
        models: Any,
        data_list: list[dict[str, Any]],
        seq_length: int,
        micro_batch_size: int | None = None,
    ) -> list[dict[str, torch.Tensor]] | None:
        """Log-probabilities under the reference, for each micro-batch: [{"reference_chosen_logps":
        [P], "reference_rejected_logps": [P]}]. None on pipeline stages before the last.

        models: the reference model's chunks, or the trained model's, whose adapters are off
        meanwhile. data_list: arranged micro-batches. seq_length, micro_batch_size: not used.
        Without dropout and gradients. Collective: the pipeline schedule's forward passes.
        """
        logps = self._log_probs_of_reference(models, data_list)
        names = [f"reference_{side}_logps" for side in SIDES]
        pairs = [(of_batch[0::2], of_batch[1::2]) for of_batch in logps]
        return [dict(zip(names, of_batch, strict=True)) for of_batch in pairs] or None

    def _log_probs(self, models: Any, batches: list[Batch]) -> list[torch.Tensor]:
        """Log-probabilities of the real documents in each micro-batch, [documents], without dropout
        and gradients. [] on pipeline stages before the last. models: the chunks to run. batches:
        arranged micro-batches. Collective: the pipeline schedule's forward
        passes."""

        def collect(inputs: dict[str, Any], batch: Batch, losses: torch.Tensor) -> torch.Tensor:
            logps, _ = self._log_probs_of(batch, inputs["labels"], losses)
            return logps

        step = collecting(self.backend, collect, self.inputs_of)
        return measure(self.backend, step, batches, models)

    def _log_probs_of_reference(self, models: Any, batches: list[Batch]) -> list[torch.Tensor]:
        """Log-probabilities of the documents in each micro-batch, as from _log_probs, while the
        trained model's adapters are off. models, more: arguments of _log_probs. Collective."""
        with self.backend.finetuning.without(self.model):
            return self._log_probs(models, batches)

    def _reference_logps(self, models: Any, batches: list[Batch]) -> list[torch.Tensor]:
        """Log-probabilities of (chosen, rejected) answers under the reference, [P, 2] for each
        micro-batch. [] on pipeline stages before the last. Collective.
        """
        logps = self.compute_reference_log_probs(models, batches, row_length(batches[0])) or ()
        return [torch.stack(list(of_batch.values()), -1) for of_batch in logps]

    def _score(self, samples: Any, ends: np.ndarray, start: int, stop: int) -> np.ndarray:
        run = functools.partial(self._reference_logps, self.models)
        found = self.evaluator.by_sample(Subset(samples, range(start, stop)), run, (len(SIDES),))
        rows = np.empty(len(found), self.row_type)
        rows["logps"] = found
        return rows

    def _identity(self, cache_dir: Path) -> dict[str, Any]:
        config = self.train_config
        name = getattr(self.model.config, "name_or_path", None)
        facts = [
            name,
            config.model_source,
            config.ld_alpha,
            ckpt_folder.model_identity(self.backend.hf_config),
            identity_of_model(name, cache_dir),
            self.backend.precision,
        ]
        return {"reference": hash_of(facts)}

    def _prepare_samples(self, samples: Any) -> Any:
        """The samples unchanged if the reference is not cached (or there is none), or if they have
        its log-probabilities. Otherwise the samples with these, computed now as far as they are not
        stored: collective; ValueError if the model has been trained already, CheckpointError if
        stored rows are of another model or cannot be written.
        """
        if self.reference != "cached" or isinstance(samples, WithReference):
            return samples
        expect(
            not self.was_trained,
            "a cached reference is computed by the model before it is trained: give this "
            f"dataset to {type(self).__name__} as train_dataset or eval_dataset",
        )
        return WithReference(samples, self._all_logps(samples, np.arange(len(samples) + 1)))


def compared(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """{metric: [P]} about rewards of pairs: rewards/chosen, rewards/rejected, rewards/accuracies (1
    if chosen is above rejected, otherwise 0) and rewards/margins (chosen - rejected).
    """
    margins = chosen - rejected
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (margins > 0).float(),
        "rewards/margins": margins,
    }


def _with_agreement(logits: Logits) -> torch.Tensor:
    """[n, 2] for n tokens: cross entropy; and for WPO's weights, without a gradient, the log of the
    sum of squared probabilities. Collective over the tensor-parallel group."""
    lse = logits.logsumexp()
    with torch.no_grad():
        squares = logits.sum((2 * (logits.values - lse[:, None])).exp().sum(1)).log()
    return torch.stack([lse - logits.of_labels(), squares], -1)


def _weights_beyond(batch: Batch, alpha: float) -> torch.Tensor:
    """Weights [rows, s] of tokens for ld_alpha: alpha for an answer's trained tokens beyond the
    length of the pair's other answer, 1 for earlier ones. Lengths count trained tokens. batch:
    arranged, with whole rows.
    """
    trained = (batch["labels"] != IGNORE_INDEX).long()
    counts = in_documents(batch, trained)
    of_pairs = counts[: len(counts) // 2 * 2].view(-1, 2)
    shared = counts.clone()  # an odd last document is padding
    shared[: of_pairs.numel()] = of_pairs.amin(1).repeat_interleave(2)
    last = counts.cumsum(0) - counts + shared  # in each document, the last token with weight 1
    borders = batch.get("cu_seqlens", np.arange(len(trained) + 1) * trained.shape[1])
    last = last.repeat_interleave(torch.as_tensor(np.diff(borders)))
    numbers = trained.flatten().cumsum(0)
    return torch.where(numbers > last, alpha, 1.0).view(trained.shape)


def _has(column: str, dataset: Any) -> bool:
    """True if the first document of the dataset's first sample has a value in the column."""
    return documents_of(dataset[0])[0].get(column) is not None


def _joined(batches: list[Batch]) -> list[Batch]:
    """Join every two neighbouring micro-batches into one, so that fewer forward passes run. Two
    stay apart if they are unpacked with different shapes, if together they exceed JOINED_TOKENS, or
    if one has only padding.
    """
    joined: list[Any] = []
    for first in range(0, len(batches), JOINED):
        group = batches[first : first + JOINED]
        shapes = [batch["input_ids"].shape for batch in group]
        have_one_length = "cu_seqlens" in group[0] or len({*shapes}) == 1
        has_memory = sum(map(math.prod, shapes)) <= JOINED_TOKENS
        fits = have_one_length and has_memory and all(map(_num_pairs, group))
        joined += [join(group)] if fits else group
    return joined


def _with_column(
    batches: list[Batch], name: str, values: torch.Tensor, per_pair: int = 1
) -> list[Batch]:
    """Add a column to the micro-batches: each takes its consecutive share of `values`, per_pair
    elements for each pair in it.
    """
    sizes = [_num_pairs(batch) * per_pair for batch in batches]
    parts = zip(batches, values.split(sizes), strict=True)
    return [{**batch, name: part} for batch, part in parts]


def _lengths(batch: Batch) -> torch.Tensor:
    """Number of trained tokens in each real document of an arranged batch, [documents]."""
    return in_documents(batch, batch["labels"] != IGNORE_INDEX)[real_documents(batch)]


def _num_pairs(batch: Batch) -> int:
    """Number of pairs in an arranged micro-batch; padding does not count."""
    return int(real_documents(batch).sum()) // len(SIDES)
