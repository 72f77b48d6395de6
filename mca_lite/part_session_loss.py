"""Losses of a Session's calls: what each token adds to the loss, what the sum is divided by, and
the hooks with which a training step computes it. Letters as in part_session.py: [b, s] is a
micro-batch on this rank."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch

from .batch import Batch, in_documents
from .errors import expect
from .files import IGNORE_INDEX
from .loss_tokens import Logits
from .step import arrange
from .tables import SESSION_LOSSES, function_of

_DROPOUTS = ("attention_dropout", "hidden_dropout", "residual_dropout", "_pdrop", "dropout")


@dataclass
class Tokens:
    """The inputs of a loss: this rank's tokens of a micro-batch. Tensors are [b, s].

    logps: float32, log-probability of each label, 0 where there is no label.
    is_trained: bool, True where there is a label.
    lengths: float32, for each trained token the number of trained tokens in its sample.
    is_first: bool, True for the first trained token of each sample.
    columns: {name: values} of the columns that the loss reads and the samples have; 0 where there
    is no label.
    entropy: of the next-token distribution; None unless the loss sets wants_entropy.
    sum_samples: function of values [b, s] that gives each trained token its sample's sum, on all
    context-parallel ranks; call sum_of_sample instead, which leaves out tokens without a label."""

    logps: torch.Tensor
    is_trained: torch.Tensor
    lengths: torch.Tensor
    is_first: torch.Tensor
    columns: dict[str, torch.Tensor]
    entropy: torch.Tensor | None
    sum_samples: Callable[[torch.Tensor], torch.Tensor]

    def sum_of_sample(self, values: torch.Tensor) -> torch.Tensor:
        """For each trained token, the sum of values [b, s] over those of its sample, over all
        context-parallel ranks. The sums have no gradient, because the gradient through other ranks'
        tokens would be lost. Collective over the context-parallel group."""
        return self.sum_samples(values.detach().masked_fill(~self.is_trained, 0.0))


@dataclass(kw_only=True)
class CrossEntropy:
    """Cross entropy of each label, times the column sampler_weight if samples have it. An example
    of the classes in the table SESSION_LOSSES.

    Such a class is a dataclass whose fields are the loss's parameters, with these attributes:
    columns: sample columns that the loss reads. required: columns that every sample must have.
    metrics: names of metrics beside "loss": means over trained tokens, or over samples for names in
    of_answers.
    counts: what an update divides by: "tokens" with a label, "answers" (samples with a label), or
    "one". times: a factor on that count.
    temperature: divides the logits.
    wants_entropy: True to get Tokens.entropy.
    refuses_dropout: True if the loss compares log-probabilities of two passes.
    terms(tokens: Tokens): returns (summands of the loss [b, s], {metric: values [b, s]})."""

    name: str = "cross_entropy"
    temperature: float = 1.0
    columns: ClassVar[tuple[str, ...]] = ("sampler_weight", "temperature")
    required: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[tuple[str, ...]] = ()
    of_answers: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[str] = "tokens"
    times: ClassVar[float] = 1.0
    wants_entropy: ClassVar[bool] = False
    refuses_dropout: ClassVar[bool] = False

    def __post_init__(self) -> None:
        expect(0 < self.temperature < math.inf, f"temperature {self.temperature}: expected above 0")

    def terms(self, tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -tokens.logps * tokens.columns.get("sampler_weight", 1.0), {}


class Plain(CrossEntropy):
    """Cross entropy that ignores the samples' sampler_weight."""

    columns = ("temperature",)


class WithEntropy(Plain):
    """Cross entropy for passes that also ask for the next-token distribution's entropy: results per
    token are [n, 2], log-probability and entropy."""

    wants_entropy = True


class GivenGradient(CrossEntropy):
    """A loss whose gradient is given: its derivative with respect to each label's log-probability
    is minus the column sampler_weight. For Session.forward_backward_custom."""

    counts = "one"
    refuses_dropout = True


def loss_of(name: str, numbers: dict[str, Any]) -> Any:
    """Make the loss that a Session's caller names: an instance of its class in SESSION_LOSSES.
    name: the loss's name there, such as "cross_entropy". numbers: the loss's parameters, such as
    {"clip_low": 0.1}. ValueError for an unknown loss or parameter."""
    expect(name in SESSION_LOSSES, f"loss {name!r}: expected one of {', '.join(SESSION_LOSSES)}")
    row = function_of(SESSION_LOSSES[name])
    known = [field.name for field in fields(row) if field.name != "name"]
    unknown = sorted(numbers.keys() - {*known})
    expect(not unknown, f"{name} has no {', '.join(unknown)}: expected {', '.join(known)}")
    return row(name=name, **numbers)


def check_dropout(model: Any, finetuning: Any, loss: Any) -> None:
    """Raise ValueError if a model has dropout, and a loss compares log-probabilities of two passes.
    finetuning: the model's Finetuning, whose adapters may have dropout. loss: such as a
    CrossEntropy."""
    config = model.config
    text = getattr(config, "text_config", config)  # transformers' model may see pictures too
    named = vars(text) | vars(getattr(finetuning, "spec", Tokens))
    rates = [f"{name} {named[name]}" for name in named if name.endswith(_DROPOUTS)]
    rates = [rate for rate in rates if rate.split()[1] not in ("0", "0.0", "None")]
    expect(
        not (loss.refuses_dropout and rates),
        f"{', '.join(rates)}: {loss.name} compares log-probabilities of two passes, which "
        "would differ by it: set it to 0",
    )


def _losses_of_logits(temperature: float, with_entropy: bool, logits: Logits) -> torch.Tensor:
    """Cross entropy [n] of n labels, at a temperature. logits: a Logits (this rank's logits of n
    tokens). The logits are divided by the batch's column "temperature" if it has one, otherwise by
    `temperature`. with_entropy True: [n, 2], cross entropy and the distribution's entropy.
    Collective over the tensor-parallel group."""
    divisor: Any = temperature
    if "temperature" in logits.batch:
        divisor = logits.take(logits.batch["temperature"])[:, None]
    values = logits.values / divisor
    whole = logits.logsumexp(values)
    losses = whole - logits.of_tokens(logits.labels[:, None], values)[:, 0]
    if not with_entropy:
        return losses
    probabilities = (values - logits.spread(whole)[:, None]).exp()
    return torch.stack([losses, whole - logits.sum((probabilities * values).sum(1))], 1)


def reads_logits(loss: Any) -> bool:
    """True if a loss cannot use the model's plain cross entropy, because it has a temperature other
    than 1 or needs the entropy. loss: the loss, such as a CrossEntropy."""
    return loss.temperature != 1.0 or loss.wants_entropy


@dataclass(eq=False)
class SampleLoss:
    """The objective of one Session call, with the hooks of a trainer: it arranges batches of
    samples for the model, and turns token losses into the loss. PolicyTrainer inherits from it, and
    sets backend, args (TrainingArguments) and loss.

    loss: the loss, such as a CrossEntropy.
    ends: int64 [N + 1], borders in the numbering of the call's trained tokens: sample i has the
    numbers ends[i] to ends[i + 1] - 1, which are in the batch column token_number. None: tokens are
    numbered within each micro-batch.
    routes: a part_routes.Routes that replays or records the chosen experts, or None.
    tokens: number of trained tokens in the call, over all replicas."""

    backend: Any
    args: Any
    loss: Any
    ends: np.ndarray | None = None
    routes: Any = None
    tokens: int = 0
    _loss_of_logits: Callable[..., Any] | None = None
    terms: Any = None  # see McaTrainer

    @property
    def metrics_keys(self) -> list[str]:
        return ["loss", *self.loss.metrics]

    def _arrange(self, batch: Batch) -> Batch:
        """Put a collated batch's documents into rows, and add columns: "token_number" [rows, s],
        unless self.ends is given: the trained tokens in order from 0, and -1 where there is no
        label; "ends": self.ends, or the numbers at which each document begins and the last one
        ends; "answers": how many samples have a label."""
        loss = self.loss
        if "temperature" in batch or reads_logits(loss):
            self._loss_of_logits = functools.partial(
                _losses_of_logits, loss.temperature, loss.wants_entropy
            )
        batch = arrange(self.backend, self.args, batch)
        is_trained = batch["labels"] != IGNORE_INDEX
        ends = self.ends
        if ends is None:
            counts = in_documents(batch, is_trained.long())
            ends = np.cumsum([0, *counts.tolist()])
            numbers = is_trained.flatten().cumsum(0).view_as(batch["labels"]) - 1
            batch["token_number"] = numbers.where(is_trained, -1)
        batch["ends"] = torch.from_numpy(ends)
        return batch | {"answers": int(_firsts(batch, is_trained).sum())}

    def _count_of_loss(self, batch: Batch) -> float:
        if self.loss.counts == "answers":
            return batch["answers"]
        labels = int((batch["labels"] != IGNORE_INDEX).sum())
        if self.loss.counts == "tokens":
            return labels
        return labels / self.tokens if self.tokens else 0

    def _pre_compute_loss(self, batch: Batch, inputs: dict[str, Any]) -> Callable[..., Any]:
        if self.routes is not None:
            self.routes.expect(batch, inputs)
        if torch.is_grad_enabled() and self.ends is not None:  # a trainer weighs whole steps
            count = self._count_of_loss(batch) * self.loss.times
            self.backend.weigh_router_loss(count, inputs)
        return functools.partial(self._post_compute_loss, inputs["labels"], batch)

    def _post_compute_loss(
        self, labels: Any, batch: Batch, losses: torch.Tensor
    ) -> tuple[Any, ...]:
        """Token losses [b, s] -> (sum of the loss's terms, count int32, {metric: (sum, count)}).
        count: trained tokens, or samples with one, as the loss counts; 0 for a loss that counts
        "one". With entropy, losses are [b, s, 2], the first of them cross entropy. The metric
        "logps" is (numbers of this rank's trained tokens, their log-probabilities; for WithEntropy
        with their entropies, [n, 2])."""
        entropy = None
        if losses.dim() == 3:
            losses, entropy = losses.unbind(-1)
        is_trained = labels != IGNORE_INDEX
        tokens = self._tokens(batch, -losses, is_trained, entropy)
        terms, values = self.loss.terms(tokens)
        terms = terms.masked_fill(~is_trained, 0.0)
        self.terms = (
            tokens.is_first if self.loss.counts == "answers" else is_trained,
            terms.detach(),
        )
        total = terms.sum()
        trained = is_trained.sum()
        answers = tokens.is_first.sum()
        count = {"tokens": trained, "answers": answers, "one": trained * 0}[self.loss.counts]
        # megatron divides `total` in place afterwards
        per = trained if self.loss.counts == "one" else count
        of_loss = torch.stack([total.detach().clone(), per.float()])
        metrics: dict[str, Any] = {"loss": of_loss}
        for name in self.loss.metrics:
            metrics[name] = of_loss.new_zeros(2)
            kept = tokens.is_first if name in self.loss.of_answers else is_trained
            if name in values:
                summed = values[name].detach().masked_fill(~kept, 0.0).sum()
                metrics[name] = torch.stack([summed, kept.sum().float()])
        results = tokens.logps
        if isinstance(self.loss, WithEntropy):
            results = torch.stack([results, entropy], -1)
        metrics["logps"] = (batch["token_number"][is_trained], results.detach()[is_trained])
        return total, count.int(), metrics

    def _tokens(
        self,
        batch: Batch,
        logps: torch.Tensor,
        is_trained: torch.Tensor,
        entropy: torch.Tensor | None,
    ) -> Tokens:
        numbers = batch["token_number"]
        ends = batch["ends"].to(numbers.device)
        count = len(ends) - 1
        sample = torch.bucketize(numbers.clamp(min=0), ends[1:], right=True).clamp(max=count - 1)

        def sum_samples(values: torch.Tensor) -> torch.Tensor:
            sums = values.new_zeros(count).index_add(0, sample.flatten(), values.flatten())
            return self.backend.sum_over_context_parallel(sums)[sample]

        return Tokens(
            logps,
            is_trained,
            ends.diff()[sample].float(),
            _firsts(batch, is_trained),
            {name: batch[name] for name in self.loss.columns if name in batch},
            entropy,
            sum_samples,
        )


def _firsts(batch: Batch, is_trained: torch.Tensor) -> torch.Tensor:
    """bool [b, s]: True for the first trained token of each sample. batch: arranged. is_trained:
    bool [b, s], True at labels."""
    numbers = batch["token_number"]
    return torch.isin(numbers, batch["ends"].to(numbers.device)) & is_trained
