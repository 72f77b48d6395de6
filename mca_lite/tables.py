"""Tables of named choices: key groups, chat templates, stages, optimizers and columns.

The rules for configuration keys read these tables, and a typing error should be reported without
waiting for torch, so functions here import torch only when they need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

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
    # as in Qwen3's tokenizers: only turns after the last question keep their thinking, and the
    # last turn has a think block even if it is empty
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
    """Raise ValueError if a name is in use: `table` has it already. kind: what the name is for,
    such as "key" or "column", for the message."""
    if name in table:
        raise ValueError(f"{kind} {name} is registered already: choose another name")


# -- names of other trainers, which part migration adds


class ForeignKey(NamedTuple):
    """A configuration key of another trainer that has no effect here.

    reason: why, for the message. remedy: what to set instead; with a remedy the key is refused, and
    without one it is ignored. off: values (lower case) with which a refused key is accepted,
    because they mean that the feature is off.
    """

    reason: str
    remedy: str = ""
    off: tuple[str, ...] = ()


ALIASES: dict[str, str] = {}  # another trainer's key -> the key here with the same meaning
FOREIGN_KEYS: dict[str, ForeignKey] = {}  # by name, or by a pattern such as hub_*
NOT_OF_TRAINING: set[str] = set()  # with one of these, keys required for training may be missing
BUILT_IN_FOR: dict[str, str] = {}  # another trainer's chat template -> the built-in one


def foreign_key(name: str) -> ForeignKey | None:
    """Look up a configuration key of another trainer -> its row of FOREIGN_KEYS, which tells why
    the key has no effect here; None for a key without a row. A row's name may be a pattern such as
    "hub_*"."""
    return next((row for key, row in FOREIGN_KEYS.items() if fnmatchcase(name, key)), None)


# -- keys


class KeyGroup(NamedTuple):
    """A registered group of configuration keys: its dataclass and the other arguments of
    register_keys.

    rules: checks over the keys of all groups. needs: keys that have no effect unless other keys
    have certain values. fixed: keys that must not change when a run is resumed. of_stages: True if
    a key works only in the training stages that list it.
    """

    group: type[ArgumentGroup]
    rules: tuple[Rule, ...] = ()
    needs: tuple[Any, ...] = ()
    fixed: tuple[str, ...] = ()
    of_stages: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(item.name for item in fields(self.group))


KEY_GROUPS: dict[str, KeyGroup] = {}  # groups of the core, of parts and of user scripts


def register_keys(
    part: str,
    group: type[ArgumentGroup],
    *,
    rules: Iterable[Rule] = (),
    needs: Iterable[Any] = (),
    fixed: Iterable[str] = (),
    of_stages: bool = False,
) -> None:
    """Add configuration keys: the fields of `group`, a dataclass derived from ArgumentGroup.

    part: name of the group in KEY_GROUPS.
    rules: Rules over the keys of all groups.
    needs: args_rules_training.Need rows, for keys that have no effect unless other keys have
    certain values.
    fixed: keys that must not change when a run is resumed.
    of_stages: if True, a key works only in stages whose row in OBJECTIVES names it under `keys`; in
    other stages a key set to another value than its default gets a note that it has no effect.

    Call it on every rank before the configuration is parsed. ValueError for a name or key that
    exists, TypeError if `group` is no ArgumentGroup.
    """
    if not (isinstance(group, type) and issubclass(group, ArgumentGroup)):
        raise TypeError(f"keys {part}: expected a subclass of ArgumentGroup, got {group!r}")
    row = KeyGroup(group, tuple(rules), tuple(needs), tuple(fixed), of_stages)
    refuse_taken("keys", part, KEY_GROUPS)
    for key in row.keys:
        refuse_taken("key", key, {*KEY_GROUPS, *(k for r in KEY_GROUPS.values() for k in r.keys)})
    KEY_GROUPS[part] = row


# finetuning_type -> a subclass of finetuning.Finetuning
FINETUNING: dict[str, Any] = {"full": "finetuning:Finetuning"}


def function_of(name: Any) -> Any:
    """Import "module:name" from this package, such as "trainer:McaTrainer", or "module" for the
    module itself. Anything but a string is returned unchanged. UserError if the module belongs to
    an optional part that cannot be used because files are missing."""
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
LABELLED = "labelled"  # conversations, each with a label: a number, or true or false
TOKENS = "tokens"  # token ids with numbers beside them, read by an encoder of the stage
KINDS = (TEXT, CONVERSATIONS, PAIRS, LABELLED, TOKENS)
PAIR_COLUMNS = ("pair_weight", "pair_margin")  # columns for pairs, and keys of these names
ANSWER_LABEL = "answer_label"  # column with the label of a labelled answer


def _nothing(*args: Any) -> str:
    """Return "" for any arguments: the default of an Objective's functions check_keys, check_run
    and describe."""
    return ""


@dataclass(kw_only=True)
class Objective:
    """A training objective, which `stage: <name>` selects: one row of OBJECTIVES.

    records: kind of records, one of KINDS. It decides datasets, cache and packing.
    encoder: data_encode.Encoder or a subclass, which turns records into token ids; or
    "module:Class" in this package.
    columns: names in COLUMNS of numbers that tokenised data keeps for each record.
    trainer: McaTrainer or a subclass, or "module:Class" in this package.
    scores: True if the model has a value head instead of logits.
    has_binary_labels: True if labels are 1 or 0, False if they can be any number.
    least_samples: fewest samples of a training or evaluation set that is read from files, unless it
    is streamed.
    metrics: the trainer's metrics_keys. Given here for trainers of this package, which are not
    imported yet. eval_<metric> may choose the best checkpoint.
    keys: configuration key -> field of the trainer's config.
    check_keys(a, judge): rules over FinetuningArguments and the keys of optional parts; they also
    apply to configs made in Python.
    check_run(a, judge): rules over the keys of all groups.
    describe(a): text that follows the stage's name in the start summary.
    """

    stage: str
    records: str
    trainer: type | str = "trainer:McaTrainer"
    encoder: type | str = "data_encode:Encoder"
    columns: tuple[str, ...] = ()
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
        # if True, packing joins and cuts documents; otherwise it puts whole samples in a row
        self.joins_documents = self.records == TEXT
        self.has_pairs = self.records == PAIRS  # a chosen and a rejected answer
        self.has_labels = self.records == LABELLED
        if self.has_labels:
            self.columns += (ANSWER_LABEL,)
        self.is_rendered = self.records in (CONVERSATIONS, PAIRS, LABELLED)  # by a chat template
        self.unit = "pair" if self.has_pairs else "sample"  # name of a sample in reports
        # name endings of the modules with one row per vocabulary token
        self.vocabulary = ("embed_tokens",) if self.scores else ("embed_tokens", "lm_head")

    def trainer_class(self) -> Any:
        """The trainer class. If it is still a string, its module is imported, and with it torch and
        megatron-core."""
        return function_of(self.trainer)


OBJECTIVES: dict[str, Objective] = {}


def register_objective(stage: str, **fields: Any) -> Objective:
    """Add a training objective that `stage: <name>` selects, and return its row of OBJECTIVES.

    fields: the other fields of Objective, of which `records` is required. Call it on every rank
    before the configuration is parsed. ValueError if the name exists or `records` is unknown,
    TypeError for a wrong trainer, metrics or field.
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
    """The OBJECTIVES row of a training stage. ValueError for an unknown stage."""
    if stage not in OBJECTIVES:
        raise ValueError(f"stage {stage!r}: expected one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[stage]


register_objective("pt", records=TEXT)
register_objective("sft", records=CONVERSATIONS)
TEACHER_KEY = "teacher_model_name_or_path"


# name of a Session's loss -> its class; part_session_loss.CrossEntropy shows the interface
_POLICIES = "ppo grpo dapo dr_grpo cispo gspo sapo reinforce importance_sampling opd"
SESSION_LOSSES: dict[str, Any] = {
    "cross_entropy": "part_session_loss:CrossEntropy",
    **dict.fromkeys(_POLICIES.split(), "part_policy:Policy"),
}


# -- optimizers


ParamGroups: TypeAlias = list[dict[str, Any]]  # dicts with "params", as torch takes them


class Optimizer(NamedTuple):
    """An optimizer that `optim: <name>` selects: one row of OPTIMIZERS.

    make(groups, args): builds the torch optimizer for parameter groups (dicts with "params") and
    TrainingArguments; or "module:name" in this package. Both backends set each group's lr and
    weight_decay before every step, so the decay should be decoupled.
    states: names of its state tensors with the parameter's shape, for checkpoints.
    counts_steps: True if the state also has a tensor "step" that counts updates.
    megatron: the name of megatron-core's optimizer to use on that backend. make() is used there too
    if this is None, and may be if moments are in 8 or 16 bits or with optimizer_cpu_offload.
    halves(groups, args): builds the optimizer for bf16 weights that are the upper halves of float32
    masters; None: there is none.
    of_matrices: state names, instead of `states`, for matrices in hidden layers. Such parameters
    get an attribute `matrices` (optim.Matrices).
    """

    make: Callable[[ParamGroups, Any], Any] | str
    states: tuple[str, ...]
    counts_steps: bool = False
    megatron: str | None = None
    halves: Callable[[ParamGroups, Any], Any] | None = None
    of_matrices: tuple[str, ...] = ()

    def new(self, groups: ParamGroups, args: Any) -> Any:
        """Build the torch optimizer by the row's `make`. groups: parameter groups, dicts with
        "params". args: TrainingArguments."""
        return function_of(self.make)(groups, args)

    def states_of(self, parameter: Any) -> tuple[str, ...]:
        """Names of the state tensors that the optimizer keeps for a parameter: of_matrices if it
        has the attribute `matrices`, otherwise states."""
        return self.of_matrices if hasattr(parameter, "matrices") else self.states


# "key=value" in lower case -> the keys of this package that it stands for
MEANINGS: dict[str, dict[str, Any]] = {}
OPTIMIZERS: dict[str, Optimizer] = {}
OPTIMIZER_ALIASES: dict[str, str] = {}  # another name, in lower case -> row of OPTIMIZERS


def register_optimizer(
    name: str,
    make: Callable[[ParamGroups, Any], Any],
    *,
    aliases: tuple[str, ...] = (),
    **fields: Any,
) -> None:
    """Add an optimizer: `optim: <name>` then trains with it, on both backends. It updates float32
    weights; if the model's weights have 16 bits, these are masters.

    make(groups, args): builds the torch optimizer for parameter groups and TrainingArguments.
    aliases: other names for it.
    fields: more fields of Optimizer: `states`, which is required, `counts_steps` and `of_matrices`.

    Call it on every rank before the configuration is parsed. ValueError for a name that exists,
    TypeError if `make` cannot be called or for wrong fields."""
    if not callable(make):
        raise TypeError(f"optim {name}: expected a function of (groups, args), got {make!r}")
    lowered = [alias.lower() for alias in aliases]
    for taken in (name, *lowered):
        refuse_taken("optim", taken, {*OPTIMIZERS, *OPTIMIZER_ALIASES})
    OPTIMIZERS[name] = Optimizer(make, **fields)
    OPTIMIZER_ALIASES.update(dict.fromkeys(lowered, name))


def _adam(groups: ParamGroups, args: Any) -> Any:
    import torch

    if {"bf16", "8bit"} & {args.exp_avg_dtype, args.exp_avg_sq_dtype}:
        return _adam_of_halves(groups, args)
    # fused is one kernel for the whole update
    return torch.optim.AdamW(groups, **numbers_of_adam(args), fused=True)


def _adam_of_halves(groups: ParamGroups, args: Any) -> Any:
    from .kernels import AdamW

    moments = ("exp_avg", "exp_avg_sq")
    halves = {name for name in moments if getattr(args, f"{name}_dtype") == "bf16"}
    if "8bit" in (args.exp_avg_dtype, args.exp_avg_sq_dtype):
        return function_of("part_quantised_adam:new")(groups, args, numbers_of_adam(args), halves)
    return AdamW(groups, **numbers_of_adam(args), halves=halves)


def numbers_of_adam(args: Any) -> dict[str, Any]:
    """Adam's keyword arguments lr, betas and eps, as a dict. args: TrainingArguments, whose values
    they have."""
    betas = args.adam_beta1, args.adam_beta2
    return dict(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def bytes_of_states(args: Any, names: Iterable[str]) -> float:
    """Memory that optimizer states take, in bytes per value of a parameter. names: of the states,
    such as "exp_avg". args: TrainingArguments, which may set a smaller dtype for a state."""
    widths = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / 64}  # 64 values share a float32 scale
    return sum(widths[getattr(args, f"{name}_dtype", "fp32")] for name in names)


def _sgd(groups: ParamGroups, args: Any) -> Any:
    import torch

    # weight decay is added to the gradient, as in torch and transformers
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

# layer type -> class that replaces attention; its costs(config, facts) gives the bytes per token
# saved for the backward pass, for the command `plan`
LAYER_TYPES = {"linear_attention": "part_delta:GatedDeltaNet"}
# addition to attention scores -> autograd function that computes such attention on CUDA
CORE_ATTENTIONS = {"sinks": "part_sinks:FlashWithSinks"}
# tensor format of files that differs from the model's -> module that converts both ways
TENSOR_FORMATS = {"stacked_experts": "part_stacked"}
# kind of model input beside text -> its class, a subclass of inputs.Inputs
INPUTS = {"pictures": "part_pictures_model:Pictures", "audio": "part_audio_model:Hears"}


# -- columns of a micro-batch

# per-token columns of a Session's samples, beside tokens and labels
SESSION_COLUMNS = (
    "advantage", "old_logp", "ref_logp", "sampler_weight", "temperature", "reward",
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A named value of the data beside or among the tokens, such as "labels", "pair_weight" or
    "position_ids", as samples and micro-batches have it: one row of COLUMNS.

    per: "token": sharded by context parallelism like the tokens; "document" or "sample": one entry
    each; "input": rows for inputs other than text (such as pixels), concatenated in document order,
    not sharded, absent if the micro-batch has none.
    dtype: name of a torch dtype, such as "int64".
    padding: the value at padding positions; for input_ids the tokenizer's is used instead.
    more_dims: number of dimensions of one token's value; 0: a number.
    default: the value for a document without the column; None: if is_registered, each document
    needs a value.
    of_dataset: (DatasetSpec, DataArguments) -> the value for a dataset's documents, or None for the
    default.
    to_model: True for an input of the model, which its forward pass may get as a keyword.
    given_by: what may have it under its name: "sample", those of a Python dataset; "collator", its
    batches; "record", the objects in any dataset's files.
    of_key: True if DataArguments has a key of this name; its value names the field of records that
    contains the column.
    """

    per: str
    dtype: str = "float32"
    padding: float = 0
    default: float | None = None
    of_dataset: Callable[[Any, Any], float | None] | None = None
    to_model: bool = False
    given_by: tuple[str, ...] = ("record", "sample", "collator")
    of_key: bool = False
    more_dims: int = 0

    @property
    def is_registered(self) -> bool:
        """True if records in a dataset's files may have a field of the column's name: "record" is
        in given_by, as it is by default for columns that user scripts register."""
        return "record" in self.given_by


# columns that samples and collators may contain, and records of files may not
_given = functools.partial(Column, given_by=("sample", "collator"))
COLUMNS = {
    "input_ids": _given("token", "int64", to_model=True),
    "labels": _given("token", "int64", IGNORE_INDEX, to_model=True),
    # index of each token's document in its row, from 1; 0 for padding
    "attention_mask": _given("token", "int64"),
    "position_ids": Column("token", "int64", given_by=("collator",)),
    "padding_mask": Column("token", "bool", True, to_model=True, given_by=()),
    # label of an answer: 1 for a good one, 0 for a bad one, or another number
    ANSWER_LABEL: _given("document"),
    # number for the name of an answer's group
    "group": _given("document", "float64"),
    # log-probability under a reference model
    "reference": _given("document"),
    # pairs get them from the keys of these names, or from the samples of a Python dataset
    "pair_weight": _given("sample", of_key=True),
    "pair_margin": _given("sample", of_key=True),
    # weights of tokens in their answer's log-probability (ld_alpha)
    "logp_weight": Column("token", given_by=()),
    # statistics of the global batch, repeated for each pair; two per loss that uses them
    "of_batch": Column("sample", given_by=()),
    # row index of a trained token in a teacher's cache (part_scores.py)
    "teacher_row": _given("token", "int64", -1),
    # columns of a Session's samples, and the index of each trained token in the call
    **dict.fromkeys(SESSION_COLUMNS, _given("token")),
    "token_number": _given("token", "int64", -1),
    # a sampler's experts of each token: [layers with experts, experts per token] (part_routes.py)
    "routes": _given("token", "int16", -1, more_dims=2),
}


def is_of_inputs(name: str) -> bool:
    """True if a column of this name holds inputs other than text, such as pixels."""
    return name in COLUMNS and COLUMNS[name].per == "input"


def other_columns(*read: str) -> tuple[str, ...]:
    """Names of the columns that losses of this package read, such as "reference" or "advantage",
    except those in `read`. A trainer whose loss reads only those in `read` would ignore these."""
    of_losses = (
        ANSWER_LABEL,
        "reference",
        *PAIR_COLUMNS,
        "teacher_row",
        *SESSION_COLUMNS,
        "group",
        "routes",
    )
    return tuple(name for name in of_losses if name not in read)


def register_column(name: str, per: str = "token", **fields: Any) -> None:
    """Add a column, such as a weight per token, to samples and micro-batches. fields: those of
    Column.

    Loss hooks get it in `batch`, on the rank's device: [b, s] per token, sharded like the tokens
    ([b, s, ...] with more_dims); [n] per document or sample.

    In a Python dataset, a document gives a number, or for a column per token a list as long as its
    tokens. In files, a record gives a number. Records without it take the dataset's value: `values`
    of its entry in dataset_info.json, or of_dataset. Without more_dims one number applies to all
    tokens of a document. A document without a value raises ValueError, unless the column has a
    default.

    Call it on every rank before the data is read. ValueError for a name that exists or an unknown
    `per`.
    """
    if per not in ("token", "document", "sample"):
        raise ValueError(f"column {name}: expected per token, document or sample, got {per!r}")
    refuse_taken("column", name, COLUMNS)
    COLUMNS[name] = Column(per, **fields)


def registered_columns() -> dict[str, Column]:
    """The columns that records in a dataset's files may have as fields, such as those that user
    scripts registered: {name: Column}."""
    return {name: column for name, column in COLUMNS.items() if column.is_registered}
