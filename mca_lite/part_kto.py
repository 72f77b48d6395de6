"""KTO: training on single answers with a label, as hooks of DPOTrainer with its reference model.

    loss  = weight (1 - sigmoid(beta (r - kl)))  for a desirable answer
            weight (1 - sigmoid(beta (kl - r)))  for an undesirable answer
    r     = log-probability of the answer, policy - reference
    kl    = max(0, mean of r over the mismatched answers of the global batch), without a gradient

Source: Ethayarajh and others 2024, equation 7; TRL estimates kl per forward pass instead. A sample
becomes two documents: its prompt with its answer, and its prompt with another sample's answer
(mismatched). The mismatched one only runs forward, before the step. The pairing is fixed for the
data set, so a cached reference can score it: within blocks of train_global_batch_size samples,
answers shift by one sample, packed or not. Without packing and shuffling the blocks are the global
batches of training. Letters: n answers in a micro-batch.
"""

import itertools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from . import parallel
from .backend import mean_of
from .batch import Batch, is_of_tokens, real_documents
from .data_batches import Documents, View, documents_of, samples_of, with_samples
from .errors import expect
from .files import IGNORE_INDEX
from .part_dpo import DPOTrainer, ReferenceConfig, WithReference
from .part_kto_keys import KTO_METRICS
from .step import row_length, to_length
from .tables import ANSWER_LABEL, COLUMNS, is_of_inputs, other_columns
from .trainer_evaluation import PredictionOutput, sum_documents


@dataclass
class KTOConfig(ReferenceConfig):
    """Settings of KTO. ConfigError for values that do not fit together.

    beta: factor on the log-ratio to the reference. desirable_weight, undesirable_weight: loss
    weights of answers with label 1 and 0. cutoff_len: maximum tokens of a mismatched document (a
    prompt with another sample's answer); None: no limit. Other fields are ReferenceConfig's.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    _: KW_ONLY
    cutoff_len: int | None = None
    use_ref_model: ClassVar[bool] = True
    stage: ClassVar[str] = "kto"


class KTOTrainer(DPOTrainer):
    """Train with KTO on labelled answers. A sample has one document {"input_ids", "labels",
    "answer_label"} with shifted labels; answer_label is 1 for a desirable answer, 0 for an
    undesirable one. With sequence_packing, a data set may also be a data_batches.Packs (packed
    rows) of such samples.

    train_config: a KTOConfig; None: its defaults. Other arguments are DPOTrainer's;
    per_device_train_batch_size counts answers, or packs. The metric kl estimates the KL divergence
    to the reference. It comes from mismatched documents, a prompt with another sample's answer,
    which token counts exclude; in an evaluation it is estimated over the micro-batches that run
    together. ValueError for data and keys that do not fit.
    """

    row_unit = "sample"
    in_turn = "an answer and a mismatched one"
    config_class = KTOConfig
    metrics_keys = list(KTO_METRICS)
    unread_columns = other_columns("reference", ANSWER_LABEL)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.train_dataset is not None:  # a dry run reads it before it is prepared
            self.train_dataset = with_samples(self.train_dataset, self._paired)

    @classmethod
    def forward_passes(cls, keys: Any) -> tuple[int, int]:
        """Numbers of forward passes per step, for counting FLOPs: (extra ones of the trained model,
        those of a reference model that runs in each step). Here (1, 2): mismatched documents (a
        prompt with another sample's answer) run once through the trained model; answers and
        mismatched documents run separately through the reference."""
        return 1, 2  # mismatched answers have, over an epoch, about as many tokens as the answers

    @classmethod
    def own_keywords(cls, arguments: Any, second_model: Any) -> dict[str, Any]:
        keywords = super().own_keywords(arguments, second_model)
        keywords["train_config"].cutoff_len = arguments.data.cutoff_len
        return keywords

    @staticmethod
    def check_samples(dataset: Any) -> None:
        """Raise ValueError if the first sample has no answer_label or several documents, or if the
        data set has only one sample, so that there is no other answer to compare with.
        """
        view = samples_of(dataset)
        documents = documents_of(view[0])
        expect(
            len(documents) == 1 and documents[0].get(ANSWER_LABEL) is not None,
            f"KTO takes samples of one document with {ANSWER_LABEL}, 1 or 0, and the first one has "
            f"{[sorted(document) for document in documents]}: use records with a label",
        )
        expect(
            len(view) > 1,
            "KTO compares with answers to other prompts, and a data set has one sample: expected "
            "two samples in each: raise max_samples or val_size",
        )

    # -- the loss

    def _post_compute_loss(  # type: ignore[override]
        self,
        labels: torch.Tensor,
        batch: Batch,
        ref_logps: torch.Tensor,
        ref_mismatched_logps: torch.Tensor,
        losses: torch.Tensor,
    ) -> tuple[Any, ...]:
        """Compute KTO's loss from token losses [b, s] -> (sum of the answers' losses, number of
        answers int32, {metric: float32 [sum, count]}).

        labels: [b, s] on this rank. batch: the whole micro-batch of n answers, with "kl" (the
        estimate of the KL divergence). ref_logps: [n], the answers' log-probabilities under the
        reference. ref_mismatched_logps is not used. Under context parallelism collective over its
        group, whose ranks other than the first return counts and metrics of 0.
        """
        config = self.train_config
        logps, _ = sum_documents(self.backend, batch, labels, losses)
        ratios = logps - ref_logps
        good = batch[ANSWER_LABEL][0::2] > 0
        signs = torch.where(good, 1.0, -1.0)
        weights = torch.where(good, config.desirable_weight, config.undesirable_weight)
        of_answers = weights * (1 - torch.sigmoid(config.beta * signs * (ratios - batch["kl"])))
        rewards = config.beta * ratios
        values = {
            "rewards/chosen": rewards,
            "rewards/rejected": rewards,
            "rewards/accuracies": signs * (ratios - batch["kl"]) > 0,
            "logps/chosen": logps,
            "logps/rejected": logps,
            "kl": batch["kl"].expand(len(logps)),
        }
        counted = {
            "rewards/chosen": good,
            "rewards/rejected": ~good,
            "logps/chosen": good,
            "logps/rejected": ~good,
        }
        return self._summed(of_answers, values, counted)

    def _count_of_loss(self, batch: Batch) -> float:
        return int(real_documents(batch).sum())

    # -- micro-batches

    def _count(self, batches: list[Batch], arranged: list[Batch]) -> tuple[Any, ...]:
        if self.documents_per_sample == 2:
            masks = [torch.as_tensor(batch["attention_mask"]) for batch in batches]
            batches = [
                {**batch, "attention_mask": mask * (mask % 2)}
                for batch, mask in zip(batches, masks, strict=True)
            ]
            arranged = [_every_second(batch, 0) for batch in arranged]
        return super()._count(batches, arranged)

    @torch.no_grad()
    def _prepare_micro_batches(self, micro_batches: list[Batch], seq_length: int) -> list[Batch]:
        """Estimate the KL divergence to the reference, before the micro-batches of a step are
        trained -> the micro-batches without mismatched documents (a prompt with another sample's
        answer), each with the estimate as "kl". For it, the mismatched documents of all ranks run
        forward through the trained model. Collective."""
        both = super()._prepare_micro_batches(micro_batches, seq_length)
        mismatched = self._of_each_two(both, 1)
        logps = self._log_probs(self.models, mismatched)
        sums = torch.zeros(2, device=parallel.device())
        # pipeline stages before the last have no log-probabilities
        for batch, of_batch in zip(both, logps, strict=False):
            reference = batch["reference"].to(of_batch.device)[1::2]
            sums += torch.stack([(of_batch - reference).sum(), of_batch.new_tensor(len(reference))])
        total, count = self.backend.reduce(sums)
        kl = mean_of(total, count).clamp(min=0)
        return [{**batch, "kl": kl} for batch in self._of_each_two(both, 0)]

    def _reference_logps(self, models: Any, batches: list[Batch]) -> list[torch.Tensor]:
        """Log-probabilities under the reference: [n, 2] for each micro-batch, of each of its n
        answers and of the mismatched document that belongs to it (a prompt with another sample's
        answer). [] on pipeline stages before the last. models: those that serve as the reference.
        Both kinds run separately, because a longer mismatched document would pad the answers.
        Collective."""
        kinds = []
        for first in range(2):
            chosen = self._of_each_two(batches, first)
            kinds.append(self._log_probs_of_reference(models, chosen))
        return [torch.stack(pair, -1) for pair in zip(*kinds, strict=True)]

    def _of_each_two(self, batches: list[Batch], first: int) -> list[Batch]:
        """Keep only the answers (first = 0) or only the mismatched documents (first = 1) of
        micro-batches, in which the two alternate. batches: arranged ones (from batch.pack or
        split). Rows are padded anew as the layout needs it. Collective if the layout pads to the
        longest row of all ranks."""
        chosen = [_every_second(batch, first) for batch in batches]
        longest = self.backend.common_length(max(map(row_length, chosen)))
        return [to_length(self.backend, batch, longest) for batch in chosen]

    # -- data

    def _prepare_samples(self, samples: Any) -> Any:
        """Add a mismatched document (a prompt with another sample's answer) to each sample. If the
        reference is cached, its log-probabilities are added too, unless the samples have them;
        computing them is collective."""
        return super()._prepare_samples(self._paired(samples))

    def _paired(self, samples: Any) -> Any:
        """Add a mismatched document (a prompt with another sample's answer) to each sample, as a
        Mismatched view. Samples that already have one are returned unchanged. ValueError for
        samples that do not fit."""
        if isinstance(samples, (Mismatched, WithReference)):
            return samples
        self.check_samples(samples)
        return Mismatched(samples, self.args.train_global_batch_size, self.train_config.cutoff_len)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Compute each answer's summed log-probability and its number of trained tokens, in the
        data set's order, and metrics -> a PredictionOutput on every rank. Mismatched documents (a
        prompt with another sample's answer) are left out. ignore_keys has no effect. Collective."""
        view = samples_of(test_dataset)
        while isinstance(view, (Mismatched, WithReference)):
            view = view.dataset
        self.documents_per_sample = 1
        try:
            return super().predict(view, ignore_keys, metric_key_prefix)
        finally:
            self.documents_per_sample = 2


class Mismatched(View):
    """A view of labelled samples for KTO's estimate of the KL divergence. Each sample has two
    documents: its own, and a mismatched one, which joins its prompt with another sample's answer.
    Samples form blocks. The other sample is the one before it in its block; for the first sample of
    a block it is the block's last one.

    block: samples per block. For a sample alone in its block, the other is the one before it in the
    data set; for the first of the data set, the last one. cutoff_len: maximum tokens of a
    mismatched document; None: no limit. ValueError on reading a sample whose answer_label is not 1
    or 0.
    """

    documents_per_sample = 2

    def __init__(self, dataset: Any, block: int, cutoff_len: int | None = None):
        super().__init__(dataset)
        self.block = block
        self.cutoff_len = cutoff_len
        self.work = None  # the dataset's would count the answers only
        fingerprint = getattr(dataset, "fingerprint", None)
        self.fingerprint = fingerprint and f"{fingerprint} mismatched {block} {cutoff_len}"

    def partner(self, i: int) -> int:
        """Index of the sample whose answer is joined with sample i's prompt in the mismatched
        document."""
        start = i - i % self.block
        size = min(self.block, len(self) - start)
        if size == 1:
            return (i - 1) % len(self)
        return start + (i - start - 1) % size

    def __getitem__(self, i: int) -> Documents:
        [document] = documents_of(self.dataset[i])
        [other] = documents_of(self.dataset[self.partner(i)])
        label = document.get(ANSWER_LABEL)
        expect(
            label in (0, 1),
            f"sample {i}: {ANSWER_LABEL} {label!r}: expected 1 for a desirable answer, or 0",
        )
        tokens = {name: x[: self.cutoff_len] for name, x in _joined(document, other).items()}
        # pictures stand in a batch once, for either half of its documents: their prompts are equal
        shared = {name: document[name] for name in document if not is_of_inputs(name)}
        shared.pop("attention_mask", None)  # it is as long as the document
        return [dict(document), {**shared, **tokens}]


def _joined(document: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Make a mismatched document: the prompt of `document` with the answer of `other`. Its labels
    are shifted and cover the answer alone. Registered columns per token that `document` has are
    joined from both; positions of tokens, which documents with images have, rise by 1 per token
    over the answer. Other columns are left out."""
    ids = np.asarray(document["input_ids"])
    start, _ = _span_of_answer(document)
    first, end = _span_of_answer(other)
    labels = np.asarray(other["labels"])
    answer = labels[first:end]
    joined = {
        "input_ids": np.concatenate([ids[: start + 1], answer[:-1]]),
        "labels": np.concatenate([np.full(start, IGNORE_INDEX), answer]),
    }
    for name in filter(is_of_tokens, document.keys() - joined.keys()):
        column = COLUMNS[name]
        if column.is_registered:
            of_prompt, of_answer = (
                np.broadcast_to(
                    column.default if x.get(name) is None else x[name], len(x["labels"])
                )
                for x in (document, other)
            )
            joined[name] = np.append(of_prompt[: start + 1], of_answer[first + 1 : end])
        elif column.to_model:  # positions of tokens, which documents with pictures have
            before = np.asarray(document[name])[: start + 1]
            joined[name] = np.append(before, before[-1] + np.arange(1, len(answer)))
    return joined


def _span_of_answer(document: Mapping[str, Any]) -> tuple[int, int]:
    """The part of a document's labels that belongs to its answer, as indices (first, end): labels
    of the prompt are masked with IGNORE_INDEX. ValueError if no label is left, or if there is a gap
    between them."""
    [trained] = np.nonzero(np.asarray(document["labels"]) != IGNORE_INDEX)
    expect(len(trained) > 0, "a sample has no label: expected those of its answer")
    first = int(trained[0])
    end = int(trained[-1]) + 1
    expect(
        end - first == len(trained),
        f"a sample has labels in several parts, from {first} to {end}: expected one answer",
    )
    return first, end


def _every_second(batch: Batch, first: int) -> Batch:
    """Keep only the documents first, first + 2 and so on of a micro-batch. batch: an arranged one
    (from batch.pack or split). Rows that are not packed become as long as the longest document that
    is left, at least 1. A packed row has these documents end to end; one of padding alone keeps one
    document.
    Columns per document, sample or image are unchanged."""
    chosen = dict(batch)
    names = [name for name in batch if is_of_tokens(name)]
    if "cu_seqlens" not in batch:
        lengths = (~batch["padding_mask"][first::2]).sum(1)
        longest = max(int(lengths.max()), 1)
        return chosen | {name: batch[name][first::2, :longest] for name in names}
    count = int(real_documents(batch).sum())
    borders = list(itertools.pairwise(batch["cu_seqlens"]))
    kept = borders[:count][first::2] or borders[:1]
    places = [torch.arange(start, end) for start, end in kept]
    sizes = map(len, places)
    chosen["cu_seqlens"] = tuple(itertools.accumulate(sizes, initial=0))
    return chosen | {name: batch[name][:, torch.cat(places)] for name in names}
