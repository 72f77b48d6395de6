"""KTO: training on single answers with a label, as hooks of DPOTrainer with its reference.

    loss  = weight (1 - sigmoid(beta (r - kl)))  of a desirable answer
            weight (1 - sigmoid(beta (kl - r)))  of an undesirable one
    r     = log-probability of the answer, policy - reference
    kl    = max(0, mean of r over the mismatched answers of the global batch), without a gradient

(Ethayarajh and others 2024, equation 7; TRL estimates kl over each micro-batch.) A sample is two
documents: its answer, and its prompt with the answer of another sample. The second one is run
forward only, before the step. The pairing belongs to the data set, so that a cached reference has
scored it: answers shift by one sample within blocks of global_batch_size samples, packed or not.
Without packing and shuffling these are the global batches, as TRL has them. Letters: n answers of a
micro-batch.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from . import parallel
from .backend import mean_of
from .batch import every_second, real_documents
from .data_batches import View, WithReference, documents_of, samples_of, with_samples
from .errors import expect
from .files import IGNORE_INDEX
from .part_dpo import DPOTrainer, ReferenceConfig
from .part_kto_keys import KTO_METRICS
from .step import row_length, to_length
from .tables import ANSWER_LABEL, other_columns
from .trainer_evaluation import PredictionOutput, sum_documents


@dataclass
class KTOConfig(ReferenceConfig):
    """The objective. ConfigError for values that do not fit together.

    beta: strength of the reference. desirable_weight, undesirable_weight: of the losses of answers
    with the label 1 and 0. cutoff_len: tokens of a mismatched document at most (None: any number).
    The other fields are ReferenceConfig's.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    _: KW_ONLY
    cutoff_len: int | None = None
    use_ref_model: ClassVar[bool] = True
    stage: ClassVar[str] = "kto"


class KTOTrainer(DPOTrainer):
    """Train `model` on samples of one document {"input_ids", "labels", "answer_label"}, shifted,
    with the label 1 for a desirable answer and 0 for an undesirable one, or on packs of them.

    train_config: KTOConfig. The other arguments are DPOTrainer's; per_device_train_batch_size
    counts answers, or packs. In an evaluation kl is that of the micro-batches run together. Token
    counts are those of the answers, without the mismatched ones.
    Raises: ValueError for data and keys that do not fit, before anything is computed.
    """

    row_unit = "sample"
    in_turn = "an answer and a mismatched one"
    config_class = KTOConfig
    metrics_keys = list(KTO_METRICS)
    unread_columns = other_columns("reference", ANSWER_LABEL)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.train_dataset is not None:  # the dry run reads it
            self.train_dataset = with_samples(self.train_dataset, self._paired)

    @classmethod
    def forward_passes(cls, keys) -> tuple[int, int]:
        return 1, 2  # mismatched answers; over an epoch they have as many tokens

    @classmethod
    def own_keywords(cls, arguments, second_model) -> dict[str, Any]:
        keywords = super().own_keywords(arguments, second_model)
        keywords["train_config"].cutoff_len = arguments.data.cutoff_len
        return keywords

    @staticmethod
    def check_samples(dataset) -> None:
        """ValueError for samples without a label, and for a single one."""
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

    def _post_compute_loss(self, labels, batch, ref_logps, ref_mismatched_logps, losses):
        """Token losses [b, s] -> (sum of the answers' losses, answers int32, {metric: (sum,
        count)}).

        labels [b, s] of this rank; batch: the whole micro-batch, with "kl"; ref_*_logps [n].
        Collective under context parallelism: one sum over its group.
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

    def _count_of_loss(self, batch: dict) -> int:
        return int(real_documents(batch).sum())

    # -- micro-batches

    def _count(self, batches: list[dict], arranged: list[dict]) -> tuple:
        if self.documents_per_sample == 2:
            masks = [torch.as_tensor(batch["attention_mask"]) for batch in batches]
            batches = [
                {**batch, "attention_mask": mask * (mask % 2)}
                for batch, mask in zip(batches, masks, strict=True)
            ]
            arranged = [every_second(batch, 0) for batch in arranged]
        return super()._count(batches, arranged)

    @torch.no_grad()
    def _prepare_micro_batches(self, micro_batches: list[dict], seq_length: int) -> list[dict]:
        """The answers of the micro-batches, with their "kl". Collectives: forward passes of the
        schedule, and a sum over all ranks."""
        both = super()._prepare_micro_batches(micro_batches, seq_length)
        mismatched = self._of_each_two(both, 1)
        logps = self._log_probs(self.models, mismatched, row_length(mismatched[0]))
        sums = torch.zeros(2, device=parallel.device())
        for batch, of_batch in zip(both, logps, strict=False):  # none on earlier pipeline stages
            reference = batch["reference"].to(of_batch.device)[1::2]
            sums += torch.stack([(of_batch - reference).sum(), of_batch.new_tensor(len(reference))])
        total, count = self.backend.reduce(sums)
        kl = mean_of(total, count).clamp(min=0)
        return [{**batch, "kl": kl} for batch in self._of_each_two(both, 0)]

    def _reference_logps(self, models, batches: list[dict], seq_length: int) -> list[torch.Tensor]:
        """float32 [n, 2] of each micro-batch, of its answers and its mismatched documents. They run
        apart: mismatched ones are longer, and would pad the answers."""
        kinds = []
        for first in range(2):
            chosen = self._of_each_two(batches, first)
            kinds.append(self._log_probs_of_reference(models, chosen, row_length(chosen[0])))
        return [torch.stack(pair, -1) for pair in zip(*kinds, strict=True)]

    def _of_each_two(self, batches: list[dict], first: int) -> list[dict]:
        """The answers (first 0) of arranged micro-batches, or the mismatched ones (1), padded as
        these need it."""
        chosen = [every_second(batch, first) for batch in batches]
        longest = self.backend.common_length(max(map(row_length, chosen)))
        return [to_length(self.backend, batch, longest) for batch in chosen]

    # -- data

    def _prepare_samples(self, samples):
        return super()._prepare_samples(self._paired(samples))

    def _paired(self, samples):
        """The samples with mismatched documents."""
        if isinstance(samples, (Mismatched, WithReference)):
            return samples
        self.check_samples(samples)
        return Mismatched(samples, self.args.train_global_batch_size, self.train_config.cutoff_len)

    def predict(
        self, test_dataset, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        view = samples_of(test_dataset)
        while isinstance(view, (Mismatched, WithReference)):
            view = view.dataset
        self.documents_per_sample = 1
        try:
            return super().predict(view, ignore_keys, metric_key_prefix)
        finally:
            self.documents_per_sample = 2


class Mismatched(View):
    """A view of labelled samples: each one's document, and one of its prompt with the answer of the
    sample before it in its block; the first takes the last one's.

    block: samples of a block; one alone takes the sample before it. cutoff_len: tokens of a
    mismatched document at most.
    """

    documents_per_sample = 2

    def __init__(self, dataset, block: int, cutoff_len: int | None = None):
        super().__init__(dataset)
        self.block = block
        self.cutoff_len = cutoff_len
        self.work = None  # that of the answers alone
        fingerprint = getattr(dataset, "fingerprint", None)
        self.fingerprint = fingerprint and f"{fingerprint} mismatched {block} {cutoff_len}"

    def partner(self, i: int) -> int:
        """The sample with the answer for sample i's mismatched document."""
        start = i - i % self.block
        size = min(self.block, len(self) - start)
        if size == 1:
            return (i - 1) % len(self)
        return start + (i - start - 1) % size

    def __getitem__(self, i: int) -> list[dict]:
        [document] = documents_of(self.dataset[i])
        [other] = documents_of(self.dataset[self.partner(i)])
        label = document.get(ANSWER_LABEL)
        expect(
            label in (0, 1),
            f"sample {i}: {ANSWER_LABEL} {label!r}: expected 1 for a desirable answer, or 0",
        )
        tokens = {name: x[: self.cutoff_len] for name, x in _joined(document, other).items()}
        return [dict(document), {**document, **tokens}]


def _joined(document: Mapping, other: Mapping) -> dict:
    """The prompt of a shifted document with the answer of another."""
    ids = np.asarray(document["input_ids"])
    start, _ = _span_of_answer(document)
    first, end = _span_of_answer(other)
    labels = np.asarray(other["labels"])
    answer = labels[first:end]
    return {
        "input_ids": np.concatenate([ids[: start + 1], answer[:-1]]),
        "labels": np.concatenate([np.full(start, IGNORE_INDEX), answer]),
    }


def _span_of_answer(document: Mapping) -> tuple[int, int]:
    """(first, end) of the labels of a document's answer. ValueError without any, and for labels
    with a gap."""
    [trained] = np.nonzero(np.asarray(document["labels"]) != IGNORE_INDEX)
    expect(len(trained) > 0, "a sample has no label: expected those of its answer")
    first = int(trained[0])
    end = int(trained[-1]) + 1
    expect(
        end - first == len(trained),
        f"a sample has labels in several parts, from {first} to {end}: expected one answer",
    )
    return first, end
