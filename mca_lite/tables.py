"""Tables of named choices: groups of keys, chat templates, stages, optimizers and columns.

The rules of configuration keys read them too, so torch is imported in the functions: a typing error
must not wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple

from .args_values import ArgumentGroup
from .errors import Judge, Rule
from .files import IGNORE_INDEX
from .parts import check_module

# -- chat templates

_SYSTEM_IN_QUESTION = (
    "{% set ns = namespace(system='') %}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set ns.system = messages[0]['content'] + '\n\n' %}{% endif %}{{ bos_token }}"
)

TEMPLATES = {
    "chatml": "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}",
    "mistral": _SYSTEM_IN_QUESTION + "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + ns.system + m['content'] + '[/INST]' }}"
    "{% set ns.system = '' %}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% elif m['role'] != 'system' %}{{ raise_exception('no role ' + m['role']) }}"
    "{% endif %}{% endfor %}",
    "deepseek": "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] + '<｜Assistant｜>' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}",
    "gemma": _SYSTEM_IN_QUESTION + "{% for m in messages %}"
    "{% if m['role'] == 'user' %}"
    "{{ '<start_of_turn>user\n' + ns.system + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% set ns.system = '' %}"
    "{% elif m['role'] == 'assistant' %}"
    "{{ '<start_of_turn>model\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% elif m['role'] != 'system' %}{{ raise_exception('no role ' + m['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "plain": "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ 'Human: ' + m['content'] + '\nAssistant:' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token + '\n' }}"
    "{% else %}{{ m['role'] | capitalize + ': ' + m['content'] + '\n' }}{% endif %}{% endfor %}",
    # as in the tokenizers of Qwen3: thinking is written from the last question on, and the last
    # turn has a block even without thoughts
    "qwen3": """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": ' }}
    {{- '<function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(question=messages | length - 1) %}
{%- for message in messages %}
    {%- set text = message.content %}
    {%- set is_result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not is_result %}
        {%- set ns.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thinking = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thinking = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.question and (loop.last or thinking) %}
            {{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""",
}


def refuse_taken(kind: str, name: str, table: Container[str]) -> None:
    """ValueError for a name that a table has already."""
    if name in table:
        raise ValueError(f"{kind} {name} is registered already: choose another name")


# -- names of other trainers, which part migration adds


class ForeignKey(NamedTuple):
    """A key without effect here. remedy: the setting in its place; a key without one is ignored.
    off: values of a refused key that are taken, in lower case."""

    reason: str
    remedy: str = ""
    off: tuple[str, ...] = ()


ALIASES: dict[str, str] = {}  # key -> the one of the same meaning
FOREIGN_KEYS: dict[str, ForeignKey] = {}  # by name, or by a pattern such as hub_*
NOT_OF_TRAINING: set[str] = set()  # beside them keys required for training may be missing
BUILT_IN_FOR: dict[str, str] = {}  # name of a chat template -> the built-in one


def foreign_key(name: str) -> ForeignKey | None:
    """The first row of FOREIGN_KEYS whose name or pattern fits."""
    return next((row for key, row in FOREIGN_KEYS.items() if fnmatchcase(name, key)), None)


# -- keys


class KeyGroup(NamedTuple):
    """One row of KEY_GROUPS: a group of keys, with the arguments of register_keys."""

    group: type[ArgumentGroup]
    rules: tuple[Rule, ...] = ()
    needs: tuple[Any, ...] = ()
    fixed: tuple[str, ...] = ()
    of_stages: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(item.name for item in fields(self.group))


KEY_GROUPS: dict[str, KeyGroup] = {}  # the core's groups, those of parts and of scripts


def register_keys(
    part: str,
    group: type[ArgumentGroup],
    *,
    rules: Iterable[Rule] = (),
    needs: Iterable[Any] = (),
    fixed: Iterable[str] = (),
    of_stages: bool = False,
) -> None:
    """Add the keys of a part: the fields of `group`, a dataclass. rules: Rules over the keys of all
    groups. needs: args_rules_training.Needs of the group's keys. fixed: keys that must not change
    when a run is resumed. of_stages: True if a key has an effect on a stage only where `keys` of
    its row in OBJECTIVES names it; a note names others that are given.

    Call it before the configuration is parsed, on every rank. Raises ValueError for a name or a key
    that is taken, TypeError for a group that is no ArgumentGroup.
    """
    if not (isinstance(group, type) and issubclass(group, ArgumentGroup)):
        raise TypeError(f"keys {part}: expected a subclass of ArgumentGroup, got {group!r}")
    row = KeyGroup(group, tuple(rules), tuple(needs), tuple(fixed), of_stages)
    refuse_taken("keys", part, KEY_GROUPS)
    for key in row.keys:
        refuse_taken("key", key, {*KEY_GROUPS, *(k for r in KEY_GROUPS.values() for k in r.keys)})
    KEY_GROUPS[part] = row


# finetuning_type -> a subclass of finetuning.Finetuning
FINETUNING: dict[str, Any] = dict.fromkeys(("full", "freeze"), "finetuning:Finetuning")


def function_of(name: Any) -> Any:
    """A function or class: itself, or "module:name" of this package. "module" gives the module."""
    if not isinstance(name, str):
        return name
    module, _, attribute = name.partition(":")
    check_module(module)
    found = import_module(f".{module}", __package__)
    return getattr(found, attribute) if attribute else found


# -- stages

# kinds of records
TEXT = "text"  # documents; may be joined and cut into full rows, without borders in attention
CONVERSATIONS = "conversations"  # rendered by the tokenizer's chat template, with loss on answers
PAIRS = "pairs"  # a prompt with a chosen and a rejected answer
LABELLED = "labelled"  # conversations, each with a label: a number, or true and false
KINDS = (TEXT, CONVERSATIONS, PAIRS, LABELLED)
PAIR_COLUMNS = ("pair_weight", "pair_margin")  # of samples and micro-batches; keys too
ANSWER_LABEL = "answer_label"  # the column of its label in samples and micro-batches


def _nothing(*args: Any) -> str:
    """Apply no rule; describe nothing."""
    return ""


@dataclass(kw_only=True)
class Objective:
    """One row of OBJECTIVES.

    records: the kind of records, TEXT, CONVERSATIONS, PAIRS or LABELLED; the data's datasets, cache
    and packs follow. trainer: McaTrainer or a subclass, or "module:Class" of this package. scores:
    True for a model with a value head in place of logits. has_binary_labels: True if labels are 1
    or 0, False for any numbers. least_samples: of each data set. metrics: metrics_keys of the
    trainer, given here for one of this package, which is not imported yet; eval_<name> may decide
    the best checkpoint. keys: configuration keys -> fields of the trainer's config.
    check_keys(a, judge): its rules over FinetuningArguments and the keys of parts, for configs made
    in Python too. check_run(a, judge): those over the keys of all groups.
    describe(a) -> text after the stage's name in the start summary.
    """

    stage: str
    records: str
    trainer: type | str = "trainer:McaTrainer"
    scores: bool = False
    has_binary_labels: bool = False
    least_samples: int = 1
    metrics: tuple[str, ...] = ("loss",)
    keys: dict[str, str] = field(default_factory=dict)
    check_keys: Callable[[Any, Judge], Any] = _nothing
    check_run: Callable[[Any, Judge], Any] = _nothing
    describe: Callable[[Any], str] = _nothing

    def __post_init__(self) -> None:
        declared = tuple(getattr(self.trainer, "metrics_keys", self.metrics))
        if self.metrics not in (declared, ("loss",)):
            raise TypeError(
                f"stage {self.stage}: metrics: name them in metrics_keys of the trainer"
            )
        self.metrics = declared
        # packing joins and cuts documents; else it puts whole samples in a row
        self.joins_documents = self.records == TEXT
        self.has_pairs = self.records == PAIRS  # a chosen and a rejected answer
        self.has_labels = self.records == LABELLED
        self.unit = "pair" if self.has_pairs else "sample"  # name of a sample in reports
        # ends of the names of modules with a row for each token
        self.vocabulary = ("embed_tokens",) if self.scores else ("embed_tokens", "lm_head")

    def trainer_class(self) -> type:
        """The trainer; imports torch and megatron-core for one of this package."""
        return function_of(self.trainer)


OBJECTIVES: dict[str, Objective] = {}


def register_objective(stage: str, **fields: Any) -> Objective:
    """Add a row to OBJECTIVES, for `stage: <name>`, and return it. fields: Objective's, with
    `records` required.

    Call it before the configuration is parsed, on every rank. Raises ValueError for a taken name
    and an unknown kind of records, TypeError for a trainer that is no class.
    """
    objective = Objective(stage=stage, **fields)
    if not isinstance(objective.trainer, (type, str)):
        raise TypeError(f"stage {stage}: expected a trainer's class, got {objective.trainer!r}")
    if objective.records not in KINDS:
        kinds = ", ".join(KINDS)
        raise ValueError(f"stage {stage}: records {objective.records!r}: expected one of {kinds}")
    refuse_taken("stage", stage, OBJECTIVES)
    OBJECTIVES[stage] = objective
    return objective


def objective_of(stage: str) -> Objective:
    """The row of a stage. Raises ValueError for an unknown one."""
    if stage not in OBJECTIVES:
        raise ValueError(f"stage {stage!r}: expected one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[stage]


register_objective("pt", records=TEXT)
register_objective("sft", records=CONVERSATIONS)
TEACHER_KEY = "teacher_model_name_or_path"


# a Session's loss -> the class of its numbers, see session.CrossEntropy
_POLICIES = "ppo grpo dapo dr_grpo cispo gspo sapo reinforce importance_sampling"
SESSION_LOSSES: dict[str, Any] = {
    "cross_entropy": "session:CrossEntropy",
    **dict.fromkeys(_POLICIES.split(), "part_policy:Policy"),
}


# -- optimizers


class Optimizer(NamedTuple):
    """One row of OPTIMIZERS.

    make(groups, args) -> the torch optimizer of parameter groups (dicts with "params"), or
    "module:name" of this package; args: TrainingArguments. Both backends set each group's lr and
    weight_decay before every step, so decay should be decoupled. states: the names of its tensors
    of a parameter's shape, for checkpoints. counts_steps: True with the number of updates as a
    tensor "step" beside them.
    megatron: its name in megatron-core, used on that backend; None: make() is used there too.
    halves(groups, args) -> the optimizer for bf16 weights that are the upper halves of fp32
    masters, or None. of_matrices: the states of the matrices in hidden layers, in place of
    `states`; these parameters have optim.Matrices as their attribute `matrices` then.
    """

    make: Callable[[list[dict], Any], Any] | str
    states: tuple[str, ...]
    counts_steps: bool = False
    megatron: str | None = None
    halves: Callable[[list[dict], Any], Any] | None = None
    of_matrices: tuple[str, ...] = ()

    def new(self, groups: list[dict], args) -> Any:
        """The torch optimizer of parameter groups."""
        return function_of(self.make)(groups, args)

    def states_of(self, parameter: Any) -> tuple[str, ...]:
        """The names of a parameter's states."""
        return self.of_matrices if hasattr(parameter, "matrices") else self.states


OPTIMIZERS: dict[str, Optimizer] = {}
OPTIMIZER_ALIASES: dict[str, str] = {}  # in lower case


def register_optimizer(
    name: str,
    make: Callable[[list[dict], Any], Any],
    *,
    aliases: tuple[str, ...] = (),
    **fields: Any,
) -> None:
    """Add a row to OPTIMIZERS: `optim: <name>` trains with the optimizer of `make` on both
    backends, with float32 master weights under megatron-core. fields: `states`, required,
    `counts_steps` and `of_matrices` of Optimizer.

    Call it before the configuration is parsed, on every rank. Raises ValueError for a taken name,
    TypeError for a `make` that is no function.
    """
    if not callable(make):
        raise TypeError(f"optim {name}: expected a function of (groups, args), got {make!r}")
    for taken in (name, *aliases):
        refuse_taken("optim", taken, {*OPTIMIZERS, *OPTIMIZER_ALIASES})
    OPTIMIZERS[name] = Optimizer(make, **fields)
    OPTIMIZER_ALIASES.update({alias.lower(): name for alias in aliases})


def _adam(groups: list[dict], args):
    import torch

    if "bf16" in (args.exp_avg_dtype, args.exp_avg_sq_dtype):
        return _adam_of_halves(groups, args)
    # fused: one kernel for the whole update
    return torch.optim.AdamW(groups, **numbers_of_adam(args), fused=True)


def _adam_of_halves(groups: list[dict], args):
    from .kernels import AdamW

    moments = ("exp_avg", "exp_avg_sq")
    halves = {name for name in moments if getattr(args, f"{name}_dtype") == "bf16"}
    return AdamW(groups, **numbers_of_adam(args), halves=halves)


def numbers_of_adam(args) -> dict:
    """The keywords of Adam by TrainingArguments."""
    betas = args.adam_beta1, args.adam_beta2
    return dict(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def _sgd(groups: list[dict], args):
    import torch

    # the decay is added to the gradient, as torch and transformers have it
    return torch.optim.SGD(groups, lr=args.learning_rate, momentum=args.sgd_momentum)


OPTIMIZERS["adam"] = Optimizer(
    _adam,
    states=("exp_avg", "exp_avg_sq"),
    counts_steps=True,
    megatron="adam",
    halves=_adam_of_halves,
)
OPTIMIZERS["sgd"] = Optimizer(_sgd, states=("momentum_buffer",), megatron="sgd")
OPTIMIZERS["muon"] = Optimizer(
    "part_muon:Muon",
    states=("exp_avg", "exp_avg_sq"),
    counts_steps=True,
    of_matrices=("momentum_buffer",),
)
OPTIMIZER_ALIASES |= dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adam")


# -- the network

# a layer's type -> its class, in place of attention; costs(config, facts) -> bytes of a token that
# it keeps for the backward pass, for plan
LAYER_TYPES = {"linear_attention": "part_delta:GatedDeltaNet"}
# what a layer's scores have beside those of keys -> the autograd function of its attention on CUDA
CORE_ATTENTIONS = {"sinks": "part_sinks:FlashWithSinks"}
# tensors of files that differ from a model's -> the module that takes them apart and together
TENSOR_FORMATS = {"stacked_experts": "part_stacked"}
# what a model takes beside text -> its class, an inputs.Inputs
INPUTS = {"pictures": "part_pictures_model:Pictures"}


# -- columns of a micro-batch

# the rows of a Session's samples beside tokens and labels
SESSION_COLUMNS = ("advantage", "old_logp", "ref_logp", "sampler_weight")


@dataclass(frozen=True)
class Column:
    """A column of samples and micro-batches.

    per: "token", cut by context parallelism at the rank's places of a row; "document", or "sample":
    one value each; "input": rows of all inputs beside text of a micro-batch, one after another in
    the order of the documents, whole on every rank, absent without any. dtype: torch's name.
    padding: the value in positions that only pad. default: of a document without the column.
    of_dataset: (DatasetSpec, DataArguments) -> the value of its documents by the keys of a run,
    None: the default. to_model: the forward pass gets it, under its name. given_by: where it may
    come from; "record" is a field of a dataset's files. of_key: True for a column with a key of
    DataArguments of its name, whose value is the field of records that has it.
    """

    per: str
    dtype: str = "float32"
    padding: float = 0
    default: float | None = None
    of_dataset: Callable[[Any, Any], float | None] | None = None
    to_model: bool = False
    given_by: tuple[str, ...] = ("record", "sample", "collator")
    of_key: bool = False

    @property
    def is_registered(self) -> bool:
        """True for a column of a script, which every sample must have."""
        return "record" in self.given_by


# of samples and collators, no field of records
_given = functools.partial(Column, given_by=("sample", "collator"))
COLUMNS = {
    "input_ids": _given("token", "int64", to_model=True),
    "labels": _given("token", "int64", IGNORE_INDEX, to_model=True),
    # number of each token's document in its row from 1, 0 for padding
    "attention_mask": _given("token", "int64"),
    "position_ids": Column("token", "int64", given_by=("collator",)),
    "padding_mask": Column("token", "bool", True, to_model=True, given_by=()),
    # of a labelled answer: 1 for a good one, 0 for a bad one, or another number
    ANSWER_LABEL: _given("document"),
    # log-probability by a reference model
    "reference": _given("document"),
    # of pairs: by the keys of these names, or from the samples of a Python dataset
    "pair_weight": _given("sample", of_key=True),
    "pair_margin": _given("sample", of_key=True),
    # weights of tokens in their answer's log-probability (ld_alpha)
    "logp_weight": Column("token", given_by=()),
    # numbers of the global batch for each pair, two for each loss with some
    "of_batch": Column("sample", given_by=()),
    # number of a trained token's row in a teacher's cache (part_scores.py)
    "teacher_row": _given("token", "int64", -1),
    # of a Session's samples, and the number of each trained token in the call
    **dict.fromkeys(SESSION_COLUMNS, _given("token")),
    "token_number": _given("token", "int64", -1),
}


def is_of_inputs(name: str) -> bool:
    """True for a column with rows of inputs beside text."""
    return name in COLUMNS and COLUMNS[name].per == "input"


def other_columns(*read: str) -> tuple[str, ...]:
    """The package's columns for losses that a trainer would ignore: all but those it reads."""
    of_losses = (ANSWER_LABEL, "reference", *PAIR_COLUMNS, "teacher_row", *SESSION_COLUMNS)
    return tuple(name for name in of_losses if name not in read)


def register_column(name: str, per: str = "token", **fields: Any) -> None:
    """Add a column to samples and micro-batches, with the fields of Column. The loss hooks get it
    in `batch`, cut and on the rank's device as the tokens are: [b, s], or of real documents or
    samples [n].

    A document of a Python dataset has it as a number, or a list of its length; a record of a file
    as a number. For the records without it a dataset gives a number, by `values` of its entry in
    dataset_info.json, or of_dataset. One number counts for all tokens of a document. A document
    without the column and without a default is a ValueError. Call it before the data is read, on
    every rank.
    Raises: ValueError for a name that is taken, and for another `per`.
    """
    if per not in ("token", "document", "sample"):
        raise ValueError(f"column {name}: expected per token, document or sample, got {per!r}")
    refuse_taken("column", name, COLUMNS)
    COLUMNS[name] = Column(per, **fields)


def registered_columns() -> dict[str, Column]:
    return {name: column for name, column in COLUMNS.items() if column.is_registered}
