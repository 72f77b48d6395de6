"""Reward models: they score whole answers, and are trained on pairs, as hooks of DPOTrainer without
a reference.

    loss = -log sigmoid(s(chosen) - s(rejected) - margin) + c (s(chosen) + s(rejected))^2

Sources: Bradley and Terry 1952; second term, with c = center_rewards_coefficient, Eisenstein and
others 2023. The score s is the value head's output at the answer's last token other than the pad
token, as in transformers' sequence classification models. The loss is the mean over the pairs of
the global batch, each times its pair_weight, if pairs have one. Letters: P pairs in a micro-batch,
b rows, s positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from .batch import Batch, in_documents, real_documents
from .data_files import SIDES
from .errors import expect
from .families_rows import VALUE_HEAD, has_value_head
from .files import IGNORE_INDEX, text_values
from .finetuning import finetuning_of
from .hosts import module_of
from .part_dpo import DPOTrainer, ReferenceConfig, compared
from .part_rm_keys import RM_METRICS
from .tables import PAIR_COLUMNS, other_columns
from .trainer_evaluation import PredictionOutput, sum_documents


@dataclass
class RewardConfig(ReferenceConfig):
    """Settings of reward model training. ConfigError for values that do not fit together.

    center_rewards_coefficient: weight of a loss term, the squared sum of a pair's two scores, which
    centres scores around 0.
    """

    center_rewards_coefficient: float = 0.0
    use_ref_model: ClassVar[bool] = False
    stage: ClassVar[str] = "rm"


class RewardTrainer(DPOTrainer):
    """Train a reward model, a model with a value head, on preference pairs. A sample has two
    documents {"input_ids", "labels"}, the chosen answer's before the rejected one's. Their
    input_ids are complete, including the last token.

    model: VirtualModels with has_value_head in the config, or transformers' sequence classification
    model with one label. train_config: a RewardConfig. tokenizer: its pad token is copied into the
    model's config; without one, the config's pad token is used. Other arguments are DPOTrainer's,
    without ref_model. ValueError for data and models that do not fit.
    """

    config_class = RewardConfig
    metrics_keys = list(RM_METRICS)
    unread_columns = other_columns(*PAIR_COLUMNS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.model.config
        values = self.backend.hf_config
        expect(
            has_value_head(values.get("architectures")),
            "a reward model has a value head: expected one for sequence classification, got "
            f"{values.get('architectures')}: model_config.add_value_head makes its config",
        )
        expect(
            finetuning_of(self.model).trains(module_of(VALUE_HEAD)),
            "the value head would not be trained beside the adapters: expected modules_to_save: "
            f"{module_of(VALUE_HEAD)}",
        )
        pad = getattr(self.tokenizer, "pad_token_id", None)
        if pad is None:
            pad = text_values(values).get("pad_token_id")
        elif hasattr(config, "hf_config"):  # McaModelConfig
            text_values(config.hf_config)["pad_token_id"] = pad
        else:
            config.get_text_config().pad_token_id = pad
        if pad is None:
            self.args.notes.append(
                "no pad_token: transformers takes one answer at a time, and with a pad_token set "
                "later it would score other tokens of answers that end with it"
            )
        self.pad_token_id = pad  # in exports too: transformers never scores this token

    @classmethod
    def own_keywords(cls, arguments: Any, second_model: Any) -> dict[str, Any]:
        return {"train_config": RewardConfig.of_keys(arguments)}

    # -- the loss

    def _arrange(self, batch: Batch) -> Batch:
        """Arrange a micro-batch for the model, and label one token per answer, the one at which the
        value head's score is read: the last that is not the pad token, as in transformers.
        ValueError for an answer of pad tokens alone."""
        batch = super()._arrange(batch)
        ids = batch["input_ids"]
        can_score = ~batch["padding_mask"]
        if self.pad_token_id is not None:
            can_score = can_score & (ids != self.pad_token_id)
        real = real_documents(batch)
        counts = in_documents(batch, can_score.long())
        expect(
            bool(counts[real].all()),
            f"an answer consists only of pad tokens ({self.pad_token_id}): expected a token to "
            "score: give the tokenizer another pad_token",
        )
        last = can_score.nonzero()[counts.cumsum(0)[real] - 1].unbind(1)
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[last] = ids[last]  # put_ is not deterministic
        return {**batch, "labels": labels}

    def _scores(self, batch: Batch, labels: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Read the scores of a micro-batch's P pairs: float32 [P, 2], chosen and rejected answer.
        scores: the value head's outputs [b, s] on this rank. labels: [b, s], a label at each
        answer's token to read. Collective under context parallelism."""
        # sum_documents takes losses: negative log-probabilities
        sums, _ = sum_documents(self.backend, batch, labels, -scores * (labels != IGNORE_INDEX))
        return sums.view(-1, len(SIDES))

    def _post_compute_loss(self, labels: torch.Tensor, batch: Batch, *more: Any) -> tuple[Any, ...]:
        """Compute the loss of a micro-batch's pairs -> (sum, number of pairs int32, {metric:
        float32 [sum, pairs]}). labels: [b, s], a label at each answer's token to read. more: its
        last value is the value head's outputs [b, s].

        Collective over the context-parallel group; its ranks have the same pairs, so ranks other
        than the first return a number and metrics of 0."""
        chosen, rejected = self._scores(batch, labels, more[-1]).unbind(-1)
        margin = batch.get("pair_margin", 0.0)
        centre = self.train_config.center_rewards_coefficient * (chosen + rejected).square()
        of_pairs = centre - F.logsigmoid(chosen - rejected - margin)
        of_pairs = of_pairs * batch.get("pair_weight", 1.0)
        return self._summed(of_pairs, compared(chosen, rejected))

    # -- evaluation

    @torch.no_grad()
    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Score each pair: predictions are float64 [pairs, 2], for chosen and rejected answers, in
        the data set's order, on every rank. metrics: the means of both scores, and the share of
        pairs whose chosen answer has the higher score. Collective.
        """

        def collect(inputs: dict[str, Any], batch: Batch, scores: torch.Tensor) -> torch.Tensor:
            return self._scores(batch, inputs["labels"], scores)

        scores = self.evaluator.collected(test_dataset, collect, (len(SIDES),))
        values = compared(*torch.from_numpy(scores).T)
        del values["rewards/margins"]
        metrics = {f"{metric_key_prefix}_{name}": float(x.mean()) for name, x in values.items()}
        self.notify("on_predict", metrics=metrics)
        return PredictionOutput(scores, None, metrics)

    def prediction_records(self, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yield {"index": i, "chosen": score, "rejected": score} for each pair. predictions:
        [pairs, 2] from predict().
        """
        for index, scores in enumerate(predictions.tolist()):
            yield {"index": index, **dict(zip(SIDES, scores, strict=True))}
