"""Tables of named choices: chat templates, preference losses, stages and optimizers.

The rules of configuration keys read them too, so torch is imported in the functions: a typing error
must not wait for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import Judge, Rule
from .files import HF_CONFIG_NAME, IGNORE_INDEX

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

# templates of LLaMA-Factory -> the built-in one
_LLAMA_FACTORY = {
    "chatml": "chatml chatml_de qwen yi intern2 smollm smollm2",
    "llama3": "llama3",
    "mistral": "mistral ministral",
    "deepseek": "deepseek3 deepseekr1",
    "gemma": "gemma gemma2 gemma3",
    "plain": "default",
    "qwen3": "qwen3 qwen3_nothink",
}
BUILT_IN_FOR = {
    name: built_in for built_in, names in _LLAMA_FACTORY.items() for name in names.split()
}
# templates without a built-in one: most tokenizers of their models have one
_NOT_BUILT_IN = """
alpaca bailing bailing_v2 breeze chatglm3 cohere cpm4 dbrx deepseek hy3 deepseekcoder dots_ocr
empty ernie ernie_nothink ernie_vl exaone falcon falcon_h1 fewshot gemma3n gemma4 gemma4n glm4
glm4_moe glm4v glm4_5v glm_ocr glm4_7 glmz1 gpt_oss granite3 granite3_vision granite4 index
hunyuan hunyuan_small intern_vl intern_s1 keye_vl kimi_vl lfm2 lfm2_vl llama2 llama2_zh llama4
mllama moonlight llava llava_next llava_next_llama3 llava_next_mistral llava_next_qwen
llava_next_yi llava_next_video llava_next_video_mistral llava_next_video_yi mimo mimo_v2 mimo_vl
minicpm_v minicpm_v_4_6 minicpm_o minimax1 minimax2 mistral_small ministral3 olmo openchat
openchat-3.6 opencoder paligemma paligemma_chat phi phi_small phi4 phi4_mini pixtral qwen2_audio
qwen2_omni qwen3_omni qwen3_omni_nothink qwen2_vl qwen3_vl qwen3_vl_nothink qwen3_5
qwen3_5_nothink qwen3_6 sailor seed_coder seed_oss solar starchat telechat2 vicuna video_llava
xuanyuan yi_vl youtu youtu_vl yuan zephyr aeva
""".split()


def check_template(name: str) -> None:
    """Raise ValueError for a template unknown to LLaMA-Factory."""
    if name not in (*BUILT_IN_FOR, *_NOT_BUILT_IN):
        raise ValueError("LLaMA-Factory has no template of this name")


def _refuse_taken(kind: str, name: str, table: Container[str]) -> None:
    if name in table:
        raise ValueError(f"{kind} {name} is registered already: choose another name")


# -- preference losses

if TYPE_CHECKING:
    import torch

REFERENCES = ("cached", "adapter", "model")
METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "sft_loss",
)
RM_METRICS = METRICS[:5]
KTO_METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "kl",
)


class Responses(NamedTuple):
    """Inputs of a preference loss, each float32 [P] for P pairs: the policy's log-probabilities of
    the responses, their numbers of tokens, and the reference's log-probabilities (None for a loss
    without a reference)."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_lens: torch.Tensor
    rejected_lens: torch.Tensor
    reference_chosen: torch.Tensor | None = None
    reference_rejected: torch.Tensor | None = None


class PreferenceLoss(NamedTuple):
    """One row of LOSSES.

    formula(responses, config) -> (losses, rewards of chosen, rewards of rejected), each [P];
    rewards are detached, and config is a DPOConfig (beta, label_smoothing). has_reference: True for
    a comparison with a reference model. keys: the configuration keys of the loss, beside pref_ftx.
    """

    formula: Callable[[Responses, Any], tuple]
    has_reference: bool
    keys: tuple[str, ...] = ("pref_beta",)


LOSSES: dict[str, PreferenceLoss] = {}


def register_loss(name: str, formula: Callable[[Responses, Any], tuple], **fields: Any) -> None:
    """Add a row to LOSSES: `pref_loss: <name>` trains with `formula`. fields: the others of
    PreferenceLoss, with `has_reference` required.

    Call it before the configuration is parsed, on every rank. Raises ValueError for a taken name,
    TypeError for a formula that is no function.
    """
    if not callable(formula):
        raise TypeError(f"pref_loss {name}: expected a function of responses, got {formula!r}")
    _refuse_taken("pref_loss", name, LOSSES)
    LOSSES[name] = PreferenceLoss(formula, **fields)


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) of x <= 0, finite everywhere.

    Near 0 through expm1 and far from it through log1p: the other way loses all digits in each case.
    Above -1e-7, for a model certain of every token, value and gradient saturate (gradient 0).
    """
    import torch

    x = x.clamp(max=-1e-7)
    # each branch gets its range only: the gradient of the other would be NaN
    near = x.clamp(min=-math.log(2))
    far = x.clamp(max=-math.log(2))
    return torch.where(
        x > -math.log(2), torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far))
    )


def dpo_loss(r: Responses, config):
    """(losses, rewards of chosen, rewards of rejected), each [P], of config.beta and
    config.label_smoothing, the assumed fraction of swapped pairs.

    A reward is beta (policy - reference), detached.
    """
    from torch.nn.functional import logsigmoid

    chosen = r.chosen - r.reference_chosen
    rejected = r.rejected - r.reference_rejected
    beta = config.beta
    smoothing = config.label_smoothing
    scaled = beta * (chosen - rejected)
    losses = -(1 - smoothing) * logsigmoid(scaled) - smoothing * logsigmoid(-scaled)
    return losses, beta * chosen.detach(), beta * rejected.detach()


def odds_ratio_loss(r: Responses, config):
    """(losses, rewards of chosen, rewards of rejected), each [P], of config.beta.

    A reward is beta times the mean log-probability of a token, detached. The loss includes a
    supervised term.
    """
    from torch.nn.functional import logsigmoid

    chosen = r.chosen / r.chosen_lens.clamp(min=1)
    rejected = r.rejected / r.rejected_lens.clamp(min=1)
    log_odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    losses = -chosen - config.beta * logsigmoid(log_odds)
    return losses, config.beta * chosen.detach(), config.beta * rejected.detach()


register_loss("sigmoid", dpo_loss, has_reference=True, keys=("pref_beta", "dpo_label_smoothing"))
register_loss("orpo", odds_ratio_loss, has_reference=False)


# -- stages

# kinds of records
TEXT = "text"  # documents; may be joined and cut into full rows, without borders in attention
CONVERSATIONS = "conversations"  # rendered by the tokenizer's chat template, with loss on answers
PAIRS = "pairs"  # a prompt with a chosen and a rejected answer
LABELLED = "labelled"  # conversations, each with a label: a number, or true and false
KINDS = (TEXT, CONVERSATIONS, PAIRS, LABELLED)
ANSWER_LABEL = "answer_label"  # the column of its label in samples and micro-batches


def _nothing(*args: Any) -> str:
    """Apply no rule; describe nothing."""
    return ""


@dataclass(kw_only=True)
class Objective:
    """One row of OBJECTIVES.

    records: the kind of records, TEXT, CONVERSATIONS, PAIRS or LABELLED; the data's datasets, cache
    and packs follow. columns: of COLUMNS, numbers of its records beside. trainer: McaTrainer or a
    subclass, or "module:Class" of this package. scores: True for a model with a value head in place
    of logits. metrics: the names of its metrics; eval_<name> may decide the best checkpoint. keys:
    configuration keys of FinetuningArguments without effect on other objectives.
    check_keys(a, judge), check_run(a, judge): its rules over FinetuningArguments, and over the keys
    of all groups.
    describe(finetuning arguments) -> text after the stage's name in the start summary.
    """

    stage: str
    records: str
    columns: tuple[str, ...] = ()
    trainer: type | str = "trainer:McaTrainer"
    scores: bool = False
    metrics: tuple[str, ...] = ("loss",)
    keys: tuple[str, ...] = ()
    check_keys: Callable[[Any, Judge], Any] = _nothing
    check_run: Callable[[Any, Judge], Any] = _nothing
    describe: Callable[[Any], str] = _nothing

    def __post_init__(self) -> None:
        # packing joins and cuts documents; else it puts whole samples in a row
        self.joins_documents = self.records == TEXT
        self.has_pairs = self.records == PAIRS  # a chosen and a rejected answer
        self.has_labels = self.records == LABELLED
        if self.has_labels:
            self.columns = (ANSWER_LABEL, *self.columns)
        self.unit = "pair" if self.has_pairs else "sample"  # name of a sample in reports

    def trainer_class(self) -> type:
        """The trainer; imports torch and megatron-core for one of this package."""
        if isinstance(self.trainer, type):
            return self.trainer
        module, _, name = self.trainer.partition(":")
        return getattr(import_module(f".{module}", __package__), name)


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
    _refuse_taken("stage", stage, OBJECTIVES)
    OBJECTIVES[stage] = objective
    return objective


def objective_of(stage: str) -> Objective:
    """The row of a stage. Raises ValueError for an unknown one."""
    if stage not in OBJECTIVES:
        raise ValueError(f"stage {stage!r}: expected one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[stage]


# -- preference training


_PREFERENCES = (
    Rule(
        "!calculate_per_token_loss",
        "a preference loss is the mean over the answers or pairs of the global batch, in every "
        "layout",
        "calculate_per_token_loss: true",
    ),
    Rule(
        "mtp_num_layers",
        "layers for multi-token prediction have no part in a preference loss",
        "mtp_num_layers: 0",
    ),
)
_REFERENCE = (
    Rule(
        "ref_model=adapter !finetuning_type=lora",
        "there are no adapters to switch off",
        "ref_model: cached, or finetuning_type: lora",
    ),
    Rule(
        "ref_model=adapter modules_to_save",
        "modules_to_save changes the model beside its adapters",
        "ref_model: cached",
    ),
)


def _check_preferences(a: Any, judge: Judge) -> None:
    judge.apply(_PREFERENCES)
    path = os.path.join(a.ref_model or "", HF_CONFIG_NAME)
    judge.expect(
        a.ref_model in (None, *REFERENCES, a.model_name_or_path) or os.path.isfile(path),
        "ref_model",
        f"it is no folder with {HF_CONFIG_NAME}",
        f"ref_model: {', '.join(REFERENCES)}, or a model's folder",
    )


def _describe_preferences(keys: Any) -> str:
    text = f"pref_loss {keys.pref_loss}, beta {keys.pref_beta:g}, sft term {keys.pref_ftx:g}"
    return f"{text}, label smoothing {keys.dpo_label_smoothing:g}"


def _describe_kto(keys: Any) -> str:
    text = f"beta {keys.pref_beta:g}, weight of desirable answers {keys.kto_chosen_weight:g}"
    return f"{text}, of undesirable ones {keys.kto_rejected_weight:g}"


def _describe_rewards(keys: Any) -> str:
    return f"center_rewards_coefficient {keys.center_rewards_coefficient:g}"


def _check_reference(a: Any, judge: Judge) -> None:
    judge.apply(_REFERENCE)


def _check_preference_keys(a: Any, judge: Judge) -> None:
    """Check the keys of a loss and its reference."""
    loss = LOSSES[a.pref_loss]
    judge.expect(
        loss.has_reference or a.ref_model is None,
        "ref_model pref_loss",
        f"pref_loss {a.pref_loss} has no reference model",
        "ref_model left out",
    )
    _check_reference(a, judge)
    judge.expect(
        not a.dpo_label_smoothing or "dpo_label_smoothing" in loss.keys,
        "dpo_label_smoothing pref_loss",
        f"no effect, since pref_loss is {a.pref_loss}",
        "dpo_label_smoothing: 0",
    )


register_objective("pt", records=TEXT)
register_objective("sft", records=CONVERSATIONS)
register_objective(
    "dpo",
    records=PAIRS,
    trainer="trainer_dpo:DPOTrainer",
    metrics=METRICS,
    keys=("pref_loss", "pref_beta", "pref_ftx", "dpo_label_smoothing", "ref_model"),
    check_keys=_check_preference_keys,
    check_run=_check_preferences,
    describe=_describe_preferences,
)
register_objective(
    "kto",
    records=LABELLED,
    trainer="trainer_kto:KTOTrainer",
    metrics=KTO_METRICS,
    keys=("pref_beta", "kto_chosen_weight", "kto_rejected_weight", "ref_model"),
    check_keys=_check_reference,
    check_run=_check_preferences,
    describe=_describe_kto,
)
register_objective(
    "rm",
    records=PAIRS,
    columns=("margin",),
    trainer="trainer_rm:RewardTrainer",
    scores=True,
    metrics=RM_METRICS,
    keys=("center_rewards_coefficient",),
    check_run=_check_preferences,
    describe=_describe_rewards,
)


# -- optimizers


class Optimizer(NamedTuple):
    """One row of OPTIMIZERS.

    make(groups, args) -> the torch optimizer of parameter groups (dicts with "params"); args:
    TrainingArguments. Both backends set each group's lr and weight_decay before every step, so
    decay should be decoupled. states: the names of its tensors of a parameter's shape, for
    checkpoints. counts_steps: True with the number of updates as a tensor "step" beside them.
    megatron: its name in megatron-core, used on that backend; None: make() is used there too.
    halves(groups, args) -> the optimizer for bf16 weights that are the upper halves of fp32
    masters, or None. of_matrices: the states of the matrices in hidden layers, in place of
    `states`; these parameters have optim.Matrices as their attribute `matrices` then.
    """

    make: Callable[[list[dict], Any], Any]
    states: tuple[str, ...]
    counts_steps: bool = False
    megatron: str | None = None
    halves: Callable[[list[dict], Any], Any] | None = None
    of_matrices: tuple[str, ...] = ()

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
        _refuse_taken("optim", taken, {*OPTIMIZERS, *OPTIMIZER_ALIASES})
    OPTIMIZERS[name] = Optimizer(make, **fields)
    OPTIMIZER_ALIASES.update({alias.lower(): name for alias in aliases})


def _adam(groups: list[dict], args):
    import torch

    if "bf16" in (args.exp_avg_dtype, args.exp_avg_sq_dtype):
        return _adam_of_halves(groups, args)
    # fused: one kernel for the whole update
    return torch.optim.AdamW(groups, **_numbers_of_adam(args), fused=True)


def _adam_of_halves(groups: list[dict], args):
    from .kernels import AdamW

    moments = ("exp_avg", "exp_avg_sq")
    halves = {name for name in moments if getattr(args, f"{name}_dtype") == "bf16"}
    return AdamW(groups, **_numbers_of_adam(args), halves=halves)


def _numbers_of_adam(args) -> dict:
    betas = args.adam_beta1, args.adam_beta2
    return dict(lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def _sgd(groups: list[dict], args):
    import torch

    return torch.optim.SGD(groups, lr=args.learning_rate, momentum=args.sgd_momentum)


def _muon(groups: list[dict], args):
    optim = import_module(".optim", __package__)  # it reads this table
    return optim.Muon(groups, args, **_numbers_of_adam(args))


OPTIMIZERS["adam"] = Optimizer(
    _adam,
    states=("exp_avg", "exp_avg_sq"),
    counts_steps=True,
    megatron="adam",
    halves=_adam_of_halves,
)
OPTIMIZERS["sgd"] = Optimizer(_sgd, states=("momentum_buffer",), megatron="sgd")
OPTIMIZERS["muon"] = Optimizer(
    _muon, states=("exp_avg", "exp_avg_sq"), counts_steps=True, of_matrices=("momentum_buffer",)
)
OPTIMIZER_ALIASES |= dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adam")


# -- columns of a micro-batch


@dataclass(frozen=True)
class Column:
    """A column of samples and micro-batches.

    per: "token", cut by context parallelism at the rank's places of a row; "document", or "sample":
    one value each; "picture": rows of all pictures of a micro-batch, one picture after another in
    the order of the documents, whole on every rank, absent without a picture. dtype: torch's name.
    padding: the value in positions that only pad. default: of a document without the column.
    of_dataset: (DatasetSpec, DataArguments) -> the value of its documents by the keys of a run,
    None: the default. to_model: the forward pass gets it, under its name. given_by: where it may
    come from; "record" is a field of a dataset's files. of_trainer: samples may have it for a
    trainer that names it among its own_columns.
    """

    per: str
    dtype: str = "float32"
    padding: float = 0
    default: float | None = None
    of_dataset: Callable[[Any, Any], float | None] | None = None
    to_model: bool = False
    given_by: tuple[str, ...] = ("record", "sample", "collator")
    of_trainer: bool = False

    @property
    def is_registered(self) -> bool:
        """True for a column of a script, which every sample must have."""
        return "record" in self.given_by


_GIVEN = ("sample", "collator")
COLUMNS = {
    "input_ids": Column("token", "int64", to_model=True, given_by=_GIVEN),
    "labels": Column("token", "int64", IGNORE_INDEX, to_model=True, given_by=_GIVEN),
    # number of each token's document in its row from 1, 0 for padding
    "attention_mask": Column("token", "int64", given_by=_GIVEN),
    "position_ids": Column("token", "int64", given_by=("collator",)),
    "padding_mask": Column("token", "bool", True, to_model=True, given_by=()),
    # positions along time, height and width, of a model that has them (batch.rope_positions)
    "rope_t": Column("token", "int64", to_model=True, given_by=_GIVEN),
    "rope_h": Column("token", "int64", to_model=True, given_by=_GIVEN),
    "rope_w": Column("token", "int64", to_model=True, given_by=_GIVEN),
    # [patches, values of a patch], and [pictures, 3]: patches along time, height and width
    "pixel_values": Column("picture", to_model=True, given_by=_GIVEN),
    "image_grid_thw": Column("picture", "int64", to_model=True, given_by=_GIVEN),
    # number of each place's image feature in the micro-batch (batch.with_image_slots), -1 for text
    "image_slot": Column("token", "int64", -1, to_model=True, given_by=()),
    # of a labelled answer: 1 for a good one, 0 for a bad one, or another number
    ANSWER_LABEL: Column("document", given_by=_GIVEN),
    # least difference of the scores of a pair without a loss of one half, of a reward model
    "margin": Column("sample", default=0.0, given_by=_GIVEN, of_trainer=True),
    # log-probability by a reference model
    "reference": Column("document", given_by=_GIVEN),
}


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
    _refuse_taken("column", name, COLUMNS)
    COLUMNS[name] = Column(per, **fields)


def registered_columns() -> dict[str, Column]:
    return {name: column for name, column in COLUMNS.items() if column.is_registered}
