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

from . import parallel, part_dpo_losses
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
from .part_scores import ObjectiveConfig, ScoredTrainer, expect_another
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
    """A data set whose documents also carry what the reference model says about them: the key
    "reference" is the sum of its log-probabilities of the document's trained tokens. With ld_alpha,
    the log-probability of a token beyond the length of the pair's other answer is first multiplied
    by ld_alpha.

    logps: these sums, [samples, documents per sample]."""

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

    pref_loss: the name of a loss in LOSSES, such as sigmoid (DPO), or a list of names, whose losses
    are summed; a single name becomes a list.
    pref_loss_weights: the factors of these losses in the sum; None: 1 each.
    beta: usually a factor on an answer's log-ratio (policy minus reference), or without a reference
    on its log-probability (simpo: the mean per token); in ORPO the weight of the odds ratio.
    label_smoothing: assumed share of pairs whose chosen and rejected answers are swapped.
    ftx: weight of an added sft loss, the mean token loss of the chosen answer.
    use_ref_model: True or False as a check of whether the losses need a reference model:
    ConfigError if that is wrong. None is replaced by the right value.
    simpo_gamma to use_weighting: the configuration keys of the same names. Other fields are
    ReferenceConfig's."""

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
    labels: the chosen answer's, then the rejected one's, as a list or as {"chosen", "rejected"}.
    With sequence_packing, a sample may also be a pack (a list of several pairs); with a cached
    reference, packs must come from data_batches.Packs.

    train_config: a DPOConfig; None: its defaults.
    ref_model: the reference model, if train_config.reference is "model" or None. It is a second
    model of the same backend, is frozen, and must share no parameter with `model`.
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
        if ref_model is not None:
            expect_another(model, ref_model, "the reference model")
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
        """The losses that this run sums: {name: PreferenceLoss (its formula and what it reads)}."""
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
        """Forward passes that a training step makes besides training itself, for counting FLOPs:
        (of the trained model, of a reference model). The first number is 1 if a loss must know the
        log-probabilities of the whole global batch before the training pass, otherwise 0. The
        second is always 1: the callers know whether there is a reference model, and whether it runs
        in each step or only before training."""
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
        """Raise ValueError if a data set has no preference pairs: if its first sample is neither a
        pair nor a pack of pairs, or if it has an attribute documents_per_sample that is not 2."""
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
        """Losses of P pairs, and rewards for the log: (losses, rewards of the chosen answers,
        rewards of the rejected ones), each [P]. The losses of this run are summed with their
        weights; rewards are those of its first loss.

        responses: log-probabilities of the answers. Its field of_batch has two columns for each of
        the n losses that need numbers about the global batch: [P, 2 n], or None if no loss needs
        any. The loss sigmoid is computed by dpo_loss and orpo by odds_ratio_loss, which subclasses
        can override."""
        found = [self._loss_of(name, responses) for name in self._rows]
        weights = self.train_config.pref_loss_weights or [1.0] * len(found)
        losses = sum(weight * one[0] for weight, one in zip(weights, found, strict=True))
        return losses, *found[0][1:]

    def _loss_of(self, name: str, r: Responses) -> tuple[Any, Any, Any]:
        """Compute one loss by its name for P pairs: (losses, rewards of the chosen answers, rewards
        of the rejected ones), each [P]. r: log-probabilities and lengths of the answers."""
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
        """Apply a loss's formula to P pairs: (losses, rewards of the chosen answers, rewards of the
        rejected ones), each [P]. If the formula gives no rewards, they are beta times the log-ratio
        of policy and reference, or without a reference beta times the mean log-probability per
        token.

        row: the loss's row in LOSSES, with the formula. r: log-probabilities and lengths of the
        answers."""
        found = function_of(row.formula)(r, self.train_config)
        if isinstance(found, tuple):
            return found
        numbers = r.ratios if row.has_reference else r.means
        return found, *part_dpo_losses.rewards(numbers, self.train_config)

    def odds_ratio_loss(
        self, chosen_logps: torch.Tensor, rejected_logps: torch.Tensor, response_lens: torch.Tensor
    ) -> tuple[Any, Any, Any]:
        """ORPO's (losses, rewards of the chosen answers, rewards of the rejected ones) for P pairs,
        each [P], from log-probabilities [P]. response_lens: numbers of trained tokens, [2 P]: first
        those of all chosen answers, then those of all rejected ones."""
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
        """DPO's (losses, rewards of the chosen answers, rewards of the rejected ones) for P pairs,
        each [P], from log-probabilities [P]. margin: [P], by how much each pair should differ; it
        is subtracted from beta times the difference of log-ratios (or of an f-divergence's slopes).
        Only passed if pairs have a margin."""
        policy = (policy_chosen_logps, policy_rejected_logps)
        reference = (reference_chosen_logps, reference_rejected_logps)
        r = Responses(*policy, None, None, *reference, margin=margin)
        return self._with_rewards(LOSSES["sigmoid"], r)

    def _pre_compute_loss(self, batch: Batch, inputs: dict[str, Any], *more: Any) -> Any:
        """Make the loss function of a micro-batch. It calls _post_compute_loss with the labels, the
        batch, the reference's log-probabilities of chosen and of rejected answers (None if the
        batch has none), `more`, and at the end the token losses. inputs: the model's inputs for the
        batch."""
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
        """Turn token losses into the loss of a micro-batch of P pairs -> (sum of the pairs' losses,
        number of pairs int32, {metric: float32 [sum, pairs]}).

        labels: [b, s], this rank's tokens. batch: the whole micro-batch, except that its loss
        columns per token cover only this rank's tokens. ref_chosen_logps, ref_rejected_logps:
        float32 [P]; None without a reference. losses: [b, s]; with use_weighting [b, s, 2], as
        _with_agreement gives them.
        Under context parallelism it is collective, and ranks other than the group's first return a
        count and metrics of 0, so that pairs are counted once."""
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
        """Sum up n losses for McaTrainer's loop: (sum of losses [n], n as int32, {metric: float32
        [sum, count]}). values: more metrics, {metric: [n]}, besides "loss". counted: {metric: mask
        [n]} for metrics that cover only some of the n.

        Context-parallel ranks have equal losses, so ranks other than the first return a count and
        metrics of 0. Stores (the mask of "loss", the losses without gradients) as `terms`."""
        values = {"loss": losses, **values}
        masks = dict.fromkeys(values, torch.ones_like(losses)) | dict(counted)
        self.terms = (masks["loss"], losses.detach() * masks["loss"])
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
        """Sum up token losses per answer: (log-probabilities, numbers of trained tokens) of a
        micro-batch's real documents, [documents] each; padding is left out. batch: arranged for the
        model. labels, losses: [b, s], this rank's tokens. With ld_alpha, log-probabilities of
        tokens beyond the length of the pair's other answer are multiplied by it. Collective under
        context parallelism."""
        if "logp_weight" in batch:
            losses = losses * batch["logp_weight"]
        return sum_documents(self.backend, batch, labels, losses)

    def _agreement(
        self, batch: Batch, labels: torch.Tensor, differences: torch.Tensor
    ) -> torch.Tensor:
        """WPO's weights of P pairs, [P] (2406.11827, equation 2): larger if the model itself is
        likely to give the pair's answers. An answer's weight is exp(mean of log p - log sum p^2
        over its trained tokens), with p the label's probability and the sum over the vocabulary; a
        pair's is the product of two.

        differences: log sum p^2 - log p of each token, [b, s]. Collective under context
        parallelism."""
        sums, lens = sum_documents(self.backend, batch, labels, differences)
        return (sums / lens.clamp(min=1)).exp().view(-1, len(SIDES)).prod(-1)

    def _count_of_loss(self, batch: Batch) -> float:
        return _num_pairs(batch)

    # -- micro-batches

    def _arrange(self, batch: Batch) -> Batch:
        """Arrange a batch of the data collator into the rows that the model takes; with ld_alpha
        add the column "logp_weight", a weight per token. ValueError if the documents in a row are
        no whole pairs, or if a column with a number per pair, such as pair_weight, is in the batch
        and not in the data, or in the data and not in the batch."""
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
        """Return the micro-batches with the column "reference": the reference's log-probability of
        each document. A cached reference has brought this column with the data; ValueError if the
        data collator dropped it. Otherwise it is computed here, which is collective, and pipeline
        stages before the last return the micro-batches unchanged."""
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
        """Log-probabilities [2 P] of the P pairs in all micro-batches, chosen and rejected in turn;
        None on pipeline stages before the last. Collective. If backend.joins_rows() allows it,
        every two micro-batches that fit together share a forward pass.

        models: the model chunks that run. run(micro_batches): computes a list of their
        log-probabilities."""
        joined = _joined(micro_batches) if self.backend.joins_rows(models) else micro_batches
        joined = [to_length(self.backend, batch) for batch in joined]
        logps = run(joined)
        return torch.cat(logps).flatten() if logps else None

    # -- the global batch

    def _compared(self, micro_batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches with the column "of_batch": for each loss that needs numbers
        about the whole global batch, two such numbers per pair, for example a mean of rewards. An
        evaluation does not change the values that such a loss carries from step to step.
        Collective."""
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
        """Gather the pairs of all ranks: (Responses with log-probabilities and lengths of all pairs
        in the global batch, float64, the same on every rank; index of this data-parallel rank's
        first pair). micro_batches: this rank's. Collective.

        If a loss looks ahead, the policy's log-probabilities are computed here without dropout;
        otherwise they are 0. The reference's are 0 in a run without a reference."""
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
        """Log-probabilities of a pair's answers under the reference, for each micro-batch of P
        pairs: [{"reference_chosen_logps": [P], "reference_rejected_logps": [P]}]. With ld_alpha,
        tokens are weighted as in _log_probs_of(). None on pipeline stages before the last.

        models: the reference model's chunks, or the trained model's, whose adapters are off
        meanwhile. data_list: arranged micro-batches. seq_length, micro_batch_size: not used.
        Without dropout and gradients. Collective: the pipeline schedule's forward passes.
        """
        logps = self._log_probs_of_reference(models, data_list)
        names = [f"reference_{side}_logps" for side in SIDES]
        pairs = [(of_batch[0::2], of_batch[1::2]) for of_batch in logps]
        return [dict(zip(names, of_batch, strict=True)) for of_batch in pairs] or None

    def _log_probs(self, models: Any, batches: list[Batch]) -> list[torch.Tensor]:
        """Run the model over micro-batches: the log-probability of each real document (no padding),
        [documents] for each micro-batch, without dropout and gradients. [] on pipeline stages
        before the last. models: the model chunks to run. batches: arranged for the model.
        Collective: the pipeline schedule's forward passes."""

        def collect(inputs: dict[str, Any], batch: Batch, losses: torch.Tensor) -> torch.Tensor:
            logps, _ = self._log_probs_of(batch, inputs["labels"], losses)
            return logps

        step = collecting(self.backend, collect, self.inputs_of)
        return measure(self.backend, step, batches, models)

    def _log_probs_of_reference(self, models: Any, batches: list[Batch]) -> list[torch.Tensor]:
        """Log-probabilities under the reference: the same as _log_probs, while the adapters of the
        trained model are off. models: the model chunks to run. batches: arranged micro-batches.
        Collective."""
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
        facts = [self.train_config.ld_alpha, *self.facts_of_model(cache_dir)]
        return {"reference": hash_of(facts)}

    def _prepare_samples(self, samples: Any) -> Any:
        """Add the reference's log-probabilities to a data set, if the reference is cached -> the
        data set, which is unchanged without a cached reference, or if its samples have them
        already. Those that are not stored yet are computed now, which is collective. ValueError if
        the model has been trained already, even if all are stored; CheckpointError if stored values
        are of another model or cannot be written."""
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
    """The loss function under use_weighting: for n tokens [n, 2], cross entropy and the log of the
    sum of squared probabilities, which WPO's weights need; the latter has no gradient. Collective
    over the tensor-parallel group."""
    lse = logits.logsumexp()
    with torch.no_grad():
        squares = logits.sum((2 * (logits.values - lse[:, None])).exp().sum(1)).log()
    return torch.stack([lse - logits.of_labels(), squares], -1)


def _weights_beyond(batch: Batch, alpha: float) -> torch.Tensor:
    """Weights of tokens [rows, s] for ld_alpha: 1 up to the length of the pair's shorter answer,
    and `alpha` for the longer answer's trained tokens after that. Lengths count trained tokens.
    batch: arranged for the model, with whole rows (not a context-parallel shard)."""
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
    """Return the micro-batches with one more column, cut from `values`: each takes the next
    elements in order, per_pair for each of its pairs. name: the column's."""
    sizes = [_num_pairs(batch) * per_pair for batch in batches]
    parts = zip(batches, values.split(sizes), strict=True)
    return [{**batch, name: part} for batch, part in parts]


def _lengths(batch: Batch) -> torch.Tensor:
    """Number of trained tokens in each real document of an arranged batch, [documents]."""
    return in_documents(batch, batch["labels"] != IGNORE_INDEX)[real_documents(batch)]


def _num_pairs(batch: Batch) -> int:
    """Number of pairs in an arranged micro-batch; padding does not count."""
    return int(real_documents(batch).sum()) // len(SIDES)
