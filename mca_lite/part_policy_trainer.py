"""Policy training on rollouts: PolicyTrainer, whose objective is a Session's loss.

Columns that samples lack are computed before training: advantages from rewards within groups, and
log-probabilities under the model before training. With a cache_dir the latter are stored on disk,
and a resumed run reads them. Letters: n tokens in a sample.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .batch import Batch
from .data_batches import Documents, Stream, View, documents_of, samples_of
from .data_encode import hash_of
from .errors import expect
from .files import cache_folder
from .part_policy import Policy, group_advantages, sampler_weights
from .part_policy_keys import POLICY_METRICS, RECORD_COLUMNS, loss_of_stage
from .part_scores import ObjectiveConfig, ScoredTrainer, identity_of_model, trained, trained_counts
from .part_session import Session, with_columns
from .part_session_loss import SampleLoss, check_dropout, reads_logits
from .tables import SESSION_COLUMNS, function_of, other_columns


@dataclass(kw_only=True)
class PolicyConfig(Policy, ObjectiveConfig):
    """Settings of policy training: a loss with its parameters (see Policy), and how columns are
    computed that the samples lack. ConfigError for values that do not fit together. name: the loss,
    a row of POLICIES. with_entropy: log the entropy.

    scale_rewards: divide advantages by the standard deviation of their group's rewards.
    sampler_correction: computes a weight per token that corrects for the difference between sampler
    and model, such as "token_truncate"; the samples' old_logp is then the sampler's. None: no
    correction. sampler_max, sampler_min: limits of these weights.

    cache_dir: folder for log-probabilities under the model before training; None: kept in memory.
    model_source: text in the cache's key that tells apart start models of the same folder, such as
    models drawn from different seeds."""

    name: str = "grpo"
    with_entropy: bool = True
    scale_rewards: bool = False
    sampler_correction: str | None = None
    sampler_max: float = 3.0
    sampler_min: float = 0.0
    cache_dir: str | None = None
    model_source: str = ""
    stage: ClassVar[str] = "policy"

    def __post_init__(self) -> None:
        self.take_keys()
        super().__post_init__()


class PolicyTrainer(SampleLoss, ScoredTrainer):
    """Train with a policy loss, such as GRPO, on rollouts: answers that another program sampled. A
    sample is {"input_ids", "labels"} with a Session's columns (part_session.py); "reward" with
    "group" may replace "advantage".

    train_config: a PolicyConfig. Other arguments are McaTrainer's. The loss is divided by its count
    over the global batch, for dr_grpo also by `constant`. For importance_sampling, which is a sum,
    the log shows the mean over tokens; for dr_grpo the loss before the division by `constant`.
    ValueError for data and keys that do not fit."""

    config_class = PolicyConfig
    scorer = "model before training"
    scorer_key = "model_name_or_path"
    kind = "policy"
    row_unit = "token"
    part_rows = 65_536
    metrics_keys = list(POLICY_METRICS)
    unread_columns = other_columns(*SESSION_COLUMNS, "group", "routes")

    def __init__(
        self,
        model: Any = None,
        train_config: PolicyConfig | None = None,
        args: Any = None,
        **kwargs: Any,
    ) -> None:
        ScoredTrainer.__init__(self, model, train_config, args, **kwargs)
        self.backend.expect_weighted_losses()
        self.loss = self.train_config
        self.row_type = np.dtype([("logps", np.float32, (2,))])  # the model's, the reference's

    # -- a run of the command line

    @classmethod
    def own_keywords(cls, arguments: Any, second_model: Any) -> dict[str, Any]:
        """The arguments that this trainer takes in addition to McaTrainer's, for a run of the
        command line: {"train_config": a PolicyConfig}. arguments: RunArguments. second_model: not
        used."""
        cache_dir = cache_folder(arguments.data.cache_dir)
        source = ""
        if arguments.model.train_from_scratch:
            source = f"drawn from seed {arguments.training.seed}"
        if arguments.adapter_name_or_path:
            source = hash_of(identity_of_model(arguments.adapter_name_or_path, cache_dir))
        name = loss_of_stage(arguments)
        more = dict(name=name, cache_dir=str(cache_dir), model_source=source)
        return {"train_config": PolicyConfig.of_keys(arguments, **more)}

    # -- the objective, that of a Session

    def _arrange(self, batch: Batch) -> Batch:
        """Arrange a collated batch for the model, and check the columns that the loss reads, which
        become 0 at tokens without a label. ValueError for values that the loss cannot use, and for
        routes (chosen experts) that do not fit the model."""
        if "routes" in batch:
            function_of("part_routes:check_routes")(self.backend, batch["routes"])
        return super()._arrange(with_columns(batch, self.loss))

    def _prepare_micro_batches(self, micro_batches: list[Batch], seq_length: int) -> list[Batch]:
        """Return the micro-batches of a step. If they have the column "routes" (experts chosen for
        each token), make the MoE routers replay these experts in this step."""
        if any("routes" in batch for batch in micro_batches):
            self.routes = self.routes or function_of("part_routes:Routes")(self.backend)
            self.routes.__enter__()  # this also forgets the routes of the step before
        return super()._prepare_micro_batches(micro_batches, seq_length)

    def _post_compute_loss(  # type: ignore[override]
        self, labels: Any, batch: Batch, losses: Any
    ) -> tuple[Any, ...]:
        """Turn token losses [b, s], with entropy [b, s, 2], into (sum of the loss's terms, count
        int32, {metric: (sum, count)}). The sum is divided by the loss's factor `times`, such as
        dr_grpo's constant. count: trained tokens, or samples with a trained token, as the loss
        counts; 0 for a loss that counts "one"."""
        total, count, metrics = super()._post_compute_loss(labels, batch, losses)
        del metrics["logps"]
        return total / self.loss.times, count, metrics

    # -- columns of samples

    def _prepare_samples(self, samples: Any) -> Any:
        """Give samples the columns that the loss needs and they lack: advantages, from the rewards
        of a group, and log-probabilities under the model before training (for the reference of
        adapters without modules_to_save: under their base model). A stream, and samples prepared
        before, are returned unchanged. ValueError if a column cannot be computed, such as a
        teacher's log-probabilities. All ranks must call it."""
        if isinstance(samples, (Stream, Computed)):
            return samples
        config = self.train_config
        first = _document(samples[0])
        view = Computed(samples, config, _columns(first))
        if "advantage" in config.required and "advantage" not in first:
            view.advantages = self._advantages(samples)
        expect(
            config.name != "opd" or "ref_logp" in first,
            "opd learns from a teacher, and the samples have no ref_logp: expected the teacher's "
            "log-probabilities, in records ref_logprobs",
        )
        has_sampler = config.sampler_correction is not None
        if has_sampler or {"old_logp", "ref_logp"} & {*first, *config.required}:
            check_dropout(self.model, self.backend.finetuning, config)
        expect(
            not has_sampler or "sampler_weight" not in first,
            "sampler_correction computes the weights of tokens, and the samples have "
            "sampler_weight: expected one of the two: leave out the key, or remove the column",
        )
        expect(
            not has_sampler or "old_logp" in first,
            "sampler_correction compares with the sampler, and the samples have no old_logp: "
            "expected logprobs in the records, or sampler_correction left out",
        )
        if has_sampler or ("ref_logp" in config.required and "ref_logp" not in first):
            # names of groups have no part in a fingerprint that is computed from columns
            is_named = hasattr(samples, "fingerprint")
            view.use_rows(*self._rows(samples if is_named else view))
        return view

    def _advantages(self, samples: Any) -> np.ndarray:
        """Compute advantages from the samples' rewards: float64 [samples]. Rewards are compared
        within a group: the samples with the same "group" in one data set (one token-cache shard).
        ValueError if a reward or group is missing."""
        shards = getattr(samples, "shards", None)
        if shards is None:
            documents = [_document(samples[i]) for i in range(len(samples))]
            tables = [[[x.get(name) for x in documents] for name in RECORD_COLUMNS]]
        else:
            tables = []
            for shard in shards:
                names = shard.meta["columns"]
                tables.append([shard.columns[:, names.index(name)] for name in RECORD_COLUMNS])
        parts = []
        for rewards, groups in tables:
            for name, values in zip(RECORD_COLUMNS, (rewards, groups), strict=True):
                missing = [i for i, x in enumerate(values) if x is None or x != x]
                expect(
                    not missing,
                    f"{self.train_config.name} needs advantages, or rewards and groups to compute "
                    f"them from, and sample {missing[:1]} has no {name}",
                )
            parts.append(group_advantages(rewards, groups, self.train_config.scale_rewards))
        advantages = np.concatenate(parts)
        return advantages if shards is None else advantages[samples.indices]

    def _rows(self, samples: Any) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of all trained tokens before training, read from disk or computed now:
        (ends, int64 [samples + 1], and float32 [trained tokens, 2], under the model and under the
        reference). Sample i has the tokens ends[i] to ends[i + 1]. ValueError if training has
        begun. Collective."""
        expect(
            not self.was_trained,
            "log-probabilities by the model before training are computed before it is trained: "
            "give this data set as train_dataset or eval_dataset, or with old_logp and ref_logp",
        )
        ends = np.append(0, trained_counts(samples).cumsum())
        return ends, self._all_logps(samples, ends)

    def _identity(self, cache_dir: Path) -> dict[str, Any]:
        config = self.train_config
        facts = [config.temperature, reads_logits(config), *self.facts_of_model(cache_dir)]
        return {self.kind: hash_of(facts)}

    def _score(self, samples: Any, ends: np.ndarray, start: int, stop: int) -> np.ndarray:
        documents = self._documents(samples, start, stop)
        logps = self._log_probs(documents)
        reference = logps
        if self.backend.finetuning.can_be_off:
            reference = self._log_probs(documents, base=True)
        rows = np.empty(int(ends[stop] - ends[start]), self.row_type)
        for column, values in enumerate((logps, reference)):
            pairs = zip(documents, values, strict=True)
            parts = [of_sample.numpy()[trained(document)] for document, of_sample in pairs]
            rows["logps"][:, column] = np.concatenate(parts)
        return rows

    def _documents(self, samples: Any, start: int, stop: int) -> Documents:
        """Samples `start` to `stop` as the dicts that a Session takes, without the column "group".
        If the loss reads logits, each sample without its own temperature gets the configured one,
        so that the Session divides the logits as training does.
        """
        documents = [_document(samples[i]) for i in range(start, stop)]
        for document in documents:
            document.pop("group", None)
            if reads_logits(self.loss):
                document.setdefault("temperature", self.train_config.temperature)
        return documents

    def _log_probs(self, documents: Documents, base: bool = False) -> list[Any]:
        """Compute the log-probabilities of each document's labels under the trainer's model, by a
        Session: float32 [n] per document, on the CPU. base: True to switch adapters off.
        Collective."""
        session = Session(self.model, self.args, self.tokenizer, self.backend)
        self.backend.use_timers(self.phases.timer)
        return session.log_probs(documents, base=base)

    def log_probabilities(self, dataset: Any) -> np.ndarray:
        """Sum each sample's log-probabilities over its trained tokens -> float64 [samples, 1, 2],
        the sum and the number of these tokens, on every rank. Temperatures and routes (chosen
        experts) are applied as in training. Collective."""
        self.plan_batches(dataset, training=False)  # refuses several sets, and a stream
        samples = samples_of(dataset)
        of_step = self.args.train_global_batch_size
        sums = []
        for start in range(0, len(samples), of_step):
            documents = self._documents(samples, start, min(start + of_step, len(samples)))
            logps = self._log_probs(documents)
            self.notify("on_prediction_step")
            for document, values in zip(documents, logps, strict=True):
                sums.append([[float(values.double().sum()), trained(document).sum()]])
        return np.array(sums, np.float64)


class Computed(View):
    """A view of rollouts with the columns which PolicyTrainer has computed, and without the column
    `group`. With sampler_correction, old_logp becomes the log-probability under the model before
    training.

    advantages: float64 [samples]; None: the samples have advantages, or the loss needs none.
    columns: the SESSION_COLUMNS that the first sample has; reading a sample with others raises
    ValueError."""

    advantages: np.ndarray | None = None
    rows: np.ndarray | None = None

    def __init__(self, dataset: Any, config: PolicyConfig, columns: set[str]):
        super().__init__(dataset)
        self.columns = columns
        self.config = config
        self.document_lengths = getattr(dataset, "document_lengths", None)

    def use_rows(self, ends: np.ndarray, rows: np.ndarray) -> None:
        """Set the log-probabilities that samples of this view get: rows, float32 [trained tokens,
        2], under the model before training, and under the reference. ends: int64 [samples + 1];
        sample i has rows ends[i] to ends[i + 1]."""
        self.ends = ends
        self.rows = rows
        self.first_scores = rows[:4].tolist()

    def __getitem__(self, i: int) -> Documents:
        config = self.config
        given = _document(self.dataset[i])
        expect(
            _columns(given) == self.columns,
            f"sample {i} has {sorted(_columns(given))}, and the first one {sorted(self.columns)}: "
            "set a column in every sample, or in none",
        )
        document = {name: given[name] for name in given if name != "group"}
        if self.advantages is not None:
            document["advantage"] = self.advantages[i]
        if self.rows is None:
            return [document]
        is_trained = trained(document)
        logps = np.zeros((2, len(is_trained)), np.float32)
        logps[:, is_trained] = self.rows[self.ends[i] : self.ends[i + 1]].T
        if config.sampler_correction is not None:
            bounds = (config.sampler_max, config.sampler_min)
            shape = np.shape(document["old_logp"])
            expect(
                shape in ((), is_trained.shape),
                f"old_logp of sample {i} has the shape {[*shape]}: expected one number, or "
                f"{[*is_trained.shape]}",
            )
            both = (logps[0], document["old_logp"])
            weights = sampler_weights(document["labels"], *both, config.sampler_correction, *bounds)
            document |= {"old_logp": logps[0], "sampler_weight": weights}
        if "ref_logp" in config.required:
            document.setdefault("ref_logp", logps[1])
        return [document]


def _document(sample: Any) -> dict[str, Any]:
    """The sample's document, without columns whose value is None. ValueError if the sample has
    several documents."""
    [document, *others] = documents_of(sample)
    expect(not others, "a rollout has several documents: expected one")
    return {name: document[name] for name in document if document[name] is not None}


def _columns(document: Any) -> set[str]:
    return {*document} & {*SESSION_COLUMNS}
