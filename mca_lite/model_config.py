"""McaModelConfig: megatron's TransformerConfig with a Hugging Face model and a parallel layout.
Also the choice between local layers and Transformer Engine's.

AutoConfig.from_pretrained reads mca_config.json if the folder has one of this package. Otherwise it
translates Hugging Face's config.json with the family's table.
"""

import copy
import enum
import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from .args import TrainingArguments
from .args_rules_model import AUTO_LAYOUT, balanced_layout, check_model, check_numbers
from .args_rules_training import (
    ADDITIONAL_FIELDS,
    VIRTUAL_STAGES,
    check_additional_configs,
    normalise_additional_configs,
)
from .errors import Judge, expect, refuse
from .families import FAMILIES, SAME_AS, InputTensors, get_family, needs_file
from .families_rows import has_value_head
from .files import (
    HF_CONFIG_NAME,
    MCA_CONFIG_NAME,
    VOCABULARY_FILES,
    PathLike,
    describe_error,
    read_json,
    read_mca_config,
    read_model_config,
    text_values,
    write_file,
)
from .inputs import Inputs, inputs_of
from .kernels import QUICK_GELU, first_line
from .mcore import AttnBackend, MLATransformerConfig, TransformerConfig, of_minor
from .parts import module_of
from .tables import function_of


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(QUICK_GELU * x)


ACTIVATIONS = {
    "swish": F.silu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": squared_relu,
    "quick_gelu": quick_gelu,
}
_NAMES = {function: name for name, function in ACTIVATIONS.items()}

# row length assumed for attention's cost, in pipeline_model_parallel_layout: auto
TOKENS_OF_A_ROW = 4096

# fields that are not saved: the constructor derives them for the layout of a run, or the run sets
# them later
_DERIVED = (
    "params_dtype pipeline_dtype overlap_p2p_comm batch_p2p_comm use_cpu_initialization "
    "use_te_activation_func gradient_accumulation_fusion autocast_dtype "
    "microbatch_group_size_per_vp_stage window_size window_attn_skip_freq init_method "
    "output_layer_init_method embedding_init_method weight_format"
).split()
# fields that decide how tensors are sharded, and their names
LAYOUT_FIELDS = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size transformer_impl "
    "pipeline_model_parallel_layout"
).split()


@dataclass
class PretrainedConfig:
    """Base class of McaModelConfig: the Hugging Face model that a config describes, and reading and
    writing mca_config.json."""

    name_or_path: str | None = None
    hf_model_type: str | None = None
    hf_config: dict[str, Any] | None = None  # the model's config.json as it was read

    def to_dict(self) -> dict[str, Any]:
        """The config as a dict, for mca_config.json: the class name, and the fields whose JSON
        value differs from that of their default. A default made by a default_factory counts as
        null, and so does a value without a JSON form, such as a function that is not in
        ACTIVATIONS. Left out are fields in _DERIVED (derived or set in each run), such as
        params_dtype, and those of CUDA graphs."""
        out = {"model_class": type(self).__name__}
        for f in fields(self):
            # the fields of CUDA graphs differ between versions of megatron, and are not used here
            if f.name in _DERIVED or "cuda_graph" in f.name:
                continue
            value = _to_json(getattr(self, f.name))
            if value != _to_json(f.default):
                out[f.name] = value
        return out

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, save_directory: PathLike) -> None:
        """Write mca_config.json into a folder, created if missing. Only one rank should call it."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / MCA_CONFIG_NAME, self.to_json_string())

    @classmethod
    def from_json_file(
        cls, path: PathLike, args: TrainingArguments | None = None
    ) -> "McaModelConfig":
        """Read an mca_config.json. If `args` is given, the fields that it determines, such as the
        parallel layout, replace the saved ones. fp8 settings are not read: each run chooses them.
        ValueError for invalid JSON, an unknown class or unknown fields."""
        # fp8 is a choice of each run, and needs a GPU
        values = {k: v for k, v in read_json(path).items() if not k.startswith("fp8")}
        name = values.pop("model_class", cls.__name__)
        targets = {target.__name__: target for target in (McaModelConfig, MLAMcaModelConfig)}
        if str(name) not in targets:
            raise ValueError(f"{path}: expected {' or '.join(targets)}, got model_class {name!r}")
        try:
            return targets[name].build(values, args, str(path))
        except (TypeError, LookupError, AttributeError, AssertionError, ArithmeticError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, args: TrainingArguments | None = None
    ) -> "McaModelConfig":
        """Read the config of a folder or hub model; see AutoConfig.from_pretrained."""
        return AutoConfig.from_pretrained(model_name_or_path, args)

    @classmethod
    def build(cls, values: dict[str, Any], args: TrainingArguments | None, origin: str) -> Any:
        """Build a config. values: {field name: JSON value}. args: the fields that they determine
        override `values`; None: nothing is overridden. origin: the file's name, for the message.
        ValueError for unknown fields.

        With `args`, the coefficient of the routers' balancing loss in `values` is not used for a
        model with experts: it comes from `args`, or else from the Hugging Face config (0 if the
        family does not read it there)."""
        if args is not None:
            # the saved coefficient may come from a former run's key; hf_config has the model's
            family = FAMILIES.get(str(values.get("hf_model_type")))
            of_model: dict[str, Any] = {}
            if values.get("num_moe_experts"):
                hf = text_values(values.get("hf_config") or {})
                key = "router_aux_loss_coef"
                is_heard = family is None or key in family.config
                of_model["moe_aux_loss_coeff"] = (hf.get(key) or 0.0) * is_heard
            values = values | of_model | _from_arguments(args)
        unknown = sorted(values.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"{origin}: not fields of {cls.__name__}: {', '.join(unknown)}")
        return cls(**values)

    def distribute_config_match(self, other: "PretrainedConfig") -> bool:
        """True if both configs shard tensors alike (LAYOUT_FIELDS are equal): then each rank can
        load weights saved under `other` without resharding."""
        return all(
            _to_json(getattr(self, name)) == _to_json(getattr(other, name))
            for name in LAYOUT_FIELDS
        )


@dataclass
class McaModelConfig(TransformerConfig, PretrainedConfig):
    """Configuration of a dense or MoE decoder: megatron's TransformerConfig, the Hugging Face
    model, and the parallel layout of a run.

    The constructor raises ConfigError (a ValueError) if the layout does not fit the model (heads,
    query groups, layers), and says what to set.
    """

    vocab_size: int = 0  # tokens of the model, without padding
    max_sequence_length: int = 0
    tie_embeddings_and_output_weights: bool = False
    has_value_head: bool = False  # outputs a score per token instead of logits
    position_embedding_type: str = "rope"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    transformer_impl: str = "auto"  # the constructor chooses: local or transformer_engine
    weight_format: str | None = None  # frozen weights of layers: a name in part_quantised.FORMS
    sliding_window: int | None = None  # tokens that a query sees, itself included
    sliding_layers: list[int] | None = None  # indices of layers with the window; None: all
    layers_without_rope: list[int] | None = None  # indices of layers without positions
    linear_layers: list[int] | None = None  # indices of layers with linear attention
    linear_num_key_heads: int | None = None
    # Llama 4 multiplies the query at position p by 1 + beta log(1 + floor(p / length)); this is
    # beta, and original_max_position_embeddings is the length
    query_scaling_beta: float | None = None
    pre_norms: bool = True  # norms before attention and MLP
    post_norms: bool = False  # norms after attention and MLP, before the residual addition
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # multiplies the outputs of attention and MLP
    logits_scaling: float = 1.0  # the logits are divided by it
    final_logit_softcapping: float | None = None  # c: logits become c tanh(logits / c)
    attn_logit_softcapping: float | None = None  # the same for attention scores
    # rotate pairs of neighbouring channels; megatron's rotary_interleaved would forbid MLA
    rope_interleave: bool = False
    # rotary channels alternate between time, height and width (Qwen3-VL); if False they come in
    # blocks, sized by mrope_section
    mrope_in_turns: bool = False
    drop_embeddings: bool = True  # hidden_dropout applies to the embeddings as well
    loss_chunk_size: int | None = None  # rows of logits in memory at once; None: by device
    recompute_keep: str | None = None  # this and the next two: see part_long.py
    activation_offloading: bool = False
    mlp_chunk_size: int | None = None
    loss_weights_differ: bool = False  # rows have different loss weights: see loss_tokens.py
    # training rows contain several documents: attention refuses to run without their borders
    rows_are_packed: bool = False
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    qk_norm_over_heads: bool = False  # one norm spans all heads of a query or key
    qk_norm_after_rope: bool = False  # query and key norms follow the rotation
    # Gemma 4: head size and query groups of layers without a window; their keys are values too
    full_kv_channels: int | None = None
    full_query_groups: int | None = None
    layer_scalars: bool = False  # a constant multiplies each layer's output
    attention_sinks: bool = False  # each head has a learned score beside those of its keys
    add_output_bias: bool = False  # attention's output linear has a bias
    add_moe_bias: bool = False  # routers and experts have biases
    # "allgather", megatron's default, forbids variable lengths even for dense models
    moe_token_dispatcher_type: str = "alltoall"
    moe_grouped_gemm: bool = True
    moe_router_dtype: str | None = "fp32"
    # files store routers' weights in float32 beside 16-bit others: so does a model in 16 bits
    moe_router_weight_in_fp32: bool = False
    moe_router_load_balancing_type: str = "none"
    # megatron's 1e-3 would change the bias of a merely fine-tuned model
    moe_router_bias_update_rate: float = 0.0
    moe_router_norm_topk_prob: bool = True  # a token's weights sum to 1
    moe_router_group_score: str = "top2"  # rank expert groups by their best two, or "max": best one
    perform_initialization: bool = False  # weights come from a checkpoint, or are drawn by name

    def __post_init__(self):
        named = dict(activation_func=ACTIVATIONS, attention_backend=AttnBackend.__members__)
        for key, known in named.items():
            name = getattr(self, key)
            if isinstance(name, str):
                if name not in known:
                    refuse(key, name, "it is unknown", f"{key}: {', '.join(known)}")
                setattr(self, key, known[name])
        if self.activation_func not in (F.silu, F.gelu):
            self.bias_activation_fusion = False
        self.validate()
        if self.transformer_impl == "local":
            self.apply_rope_fusion = False  # TE's kernel; local attention has another
        # lets megatron's MLP call the activation module that it is given: kernels.swiglu
        has_swiglu = self.gated_linear_unit and self.activation_func is F.silu
        self.use_te_activation_func = has_swiglu and not self.bias_activation_fusion
        self.params_dtype = torch.float32
        if self.fp16:
            self.params_dtype = torch.float16
        if self.bf16:
            self.params_dtype = torch.bfloat16
        self.pipeline_dtype = self.params_dtype
        self.use_cpu_initialization = not torch.cuda.is_available()
        setattr(self, of_minor("cuda_graph_parts"), [])  # megatron warns about its default
        super().__post_init__()  # reads the virtual stages off a pipeline_model_parallel_layout
        if self.transformer_impl == "transformer_engine" and self.sliding_window is not None:
            self.window_size = (self.sliding_window - 1, 0)  # positions a token sees on each side
            self.window_attn_skip_freq = [
                int(self.layer_type(number) == "sliding_attention")
                for number in range(1, self.num_layers + 1)
            ]
        # virtual stages send two tensors between one pair of ranks: batched p2p mixes them up
        self.overlap_p2p_comm = self.virtual_pipeline_model_parallel_size is not None
        self.batch_p2p_comm = not self.overlap_p2p_comm

    def validate(self) -> None:
        """Check the parallel layout against the model, and replace values that say "auto", in
        place. transformer_impl and pipeline_model_parallel_layout are chosen here.
        recompute_granularity becomes full recomputation until part_long_auto chooses later. Needs
        no process group. Raises ConfigError."""
        self.sequence_parallel &= self.tensor_model_parallel_size > 1
        more = "m" * (self.mtp_num_layers or 0)
        layout = vars(self)["pipeline_model_parallel_layout"]  # megatron's annotation excludes str
        if layout == AUTO_LAYOUT:
            self.pipeline_model_parallel_layout = layout = self._balanced_layout()
        if isinstance(layout, str) and (more or "m" in layout):
            # in megatron's syntax, m is a multi-token prediction layer; they precede the loss, L
            layout = re.sub(r",|m(\*\d+)?", "", layout)
            self.pipeline_model_parallel_layout = layout[:-1] + more + "L"
        judge = Judge(self)
        self._choose_layers(judge)
        judge.apply(VIRTUAL_STAGES)
        tp = self.tensor_model_parallel_size
        groups = math.gcd(self.num_query_groups or 0, self.full_query_groups or 0)
        judge.expect(
            not self.full_query_groups or groups % tp == 0,
            "tensor_model_parallel_size",
            f"layers of this model have {self.num_query_groups} and {self.full_query_groups} query "
            "groups, and ranks that share one are not supported",
            f"tensor_model_parallel_size: {groups}",
        )
        self.chooses_recomputed = vars(self)["recompute_granularity"] == "auto"
        if self.chooses_recomputed:  # all layers, until part_long_auto has chosen
            self.recompute_granularity, self.recompute_method = "full", "block"
            self.recompute_num_layers = self.num_layers
        if self.recompute_keep:
            function_of("part_long:check")(self, judge)
        check_model(self, self, judge, engine_here() is not None)
        judge.close()
        if self.mtp_num_layers and self.hf_config is not None:
            self.hf_config = function_of("part_mtp_rows:with_count")(self)

    def _choose_layers(self, judge: Judge) -> None:
        """Choose between this package's layers and Transformer Engine's: replace transformer_impl
        "auto" by "local" or "transformer_engine", in place. Features that the chosen layers lack
        are reported to `judge`, which collects problems.

        "auto" chooses Transformer Engine if it works here, supports the model, and the run is in
        bf16 or fp16. In float32 it chooses local layers, because Transformer Engine multiplies
        float32 in tf32."""
        if self.transformer_impl == "auto":
            engine = engine_here()
            suits = engine is not None and (self.bf16 or self.fp16) and not engine.needs_local(self)
            self.transformer_impl = "transformer_engine" if suits else "local"
        if self.transformer_impl == "transformer_engine":
            function_of("part_transformer_engine:check")(self, judge)
        if self.transformer_impl == "local":
            for name in changed(self, NOT_LOCAL):
                judge.refuse(name, f"{name}: the local layers lack it", f"{name} left out")

    def _balanced_layout(self) -> str | None:
        """A pipeline layout in megatron's syntax whose stages take about equal time. None without
        pipeline parallelism; "auto", which a later check refuses, if there are too many stages for
        the layers."""
        pp = self.pipeline_model_parallel_size
        if pp == 1:
            return None
        stages = pp * (self.virtual_pipeline_model_parallel_size or 1)
        if stages > self.num_layers + 1:
            return AUTO_LAYOUT
        costs = [self._cost(number) for number in range(1, self.num_layers + 1)]
        ahead = self.mtp_num_layers or 0
        h = self.hidden_size
        head = h * self.vocab_size
        head += ahead * (head + 2 * h * h + self._cost(self.num_layers + 1))
        return balanced_layout(costs, head, stages)

    def _cost(self, layer_number: int) -> float:
        """Estimated multiplications per token in a layer, to balance pipeline stages. Full
        attention is counted for rows of TOKENS_OF_A_ROW tokens."""
        groups, channels = self.head_sizes(layer_number)
        heads = self.num_attention_heads
        channels = channels or self.hidden_size // heads  # megatron sets its default later
        width = self.ffn_hidden_size
        if self.is_moe_layer(layer_number - 1):
            of_experts = self.moe_router_topk * self.moe_ffn_hidden_size
            width = of_experts + (self.moe_shared_expert_intermediate_size or 0)
        weights = 2 * (heads + groups) * channels + 3 * width
        seen = 0
        if self.layer_type(layer_number) == "full_attention":
            seen = TOKENS_OF_A_ROW
        if self.layer_type(layer_number) == "sliding_attention":
            seen = 2 * (self.sliding_window or 0)
        return self.hidden_size * weights + seen * heads * channels

    def head_sizes(self, layer_number: int) -> tuple[int, int]:
        """(number of query groups, channels per head) of the layer with this number, from 1. They
        differ between layers in Gemma 4 only. Channels may be None until the constructor ends."""
        groups = self.num_query_groups or self.num_attention_heads
        if self.full_kv_channels and self.layer_type(layer_number) == "full_attention":
            return self.full_query_groups or groups, self.full_kv_channels
        return groups, self.kv_channels

    def layer_type(self, layer_number: int) -> str:
        """transformers' name for a layer's attention: "full_attention", "sliding_attention" or
        "linear_attention". layer_number counts from 1, as in megatron."""
        if layer_number - 1 in (self.linear_layers or ()):
            return "linear_attention"
        layers = self.sliding_layers
        slides = layers is None or layer_number - 1 in layers
        if self.sliding_window is not None and slides:
            return "sliding_attention"
        return "full_attention"

    def is_moe_layer(self, layer: int) -> bool:
        """True if the layer has experts. layer: its index in the whole model, from 0."""
        if not self.num_moe_experts:
            return False
        pattern = self.moe_layer_freq
        layer = min(layer, self.num_layers - 1)  # prediction layers are like the last layer
        return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern == 0

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding on all tensor-parallel ranks together: vocab_size, rounded up to a
        multiple of the tensor-parallel size."""
        tp = self.tensor_model_parallel_size
        return -(-self.vocab_size // tp) * tp

    @property
    def padding_idx(self) -> int | None:
        """The pad token's id; looking it up gives its embedding no gradient, as in transformers.
        None if config.json has no pad_token_id."""
        pad = text_values(self.hf_config or {}).get("pad_token_id")
        return pad % self.vocab_size if pad is not None and pad < 0 else pad

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """transformers' rotary parameters from config.json: one dict, or a dict per layer type; {}
        if there are none."""
        return text_values(self.hf_config or {}).get("rope_parameters") or {}

    @property
    def inputs(self) -> Inputs:
        """The model's Inputs object, which describes its modules for inputs other than text, such
        as a vision tower. A model of text alone has an Inputs object without such modules."""
        return inputs_of(self)

    @property
    def input_tensors(self) -> InputTensors:
        """(name, True if it is the weight matrix of a torch Linear) for each parameter in the
        modules for inputs other than text, such as the vision tower; () for text models."""
        return self.inputs.tensors

    @property
    def num_deepstack(self) -> int:
        """Number of layers, counted from the first, to whose outputs image features are added
        (Qwen3-VL's deepstack)."""
        return self.inputs.num_deepstack


@dataclass
class MLAMcaModelConfig(McaModelConfig, MLATransformerConfig):
    """McaModelConfig for multi-head latent attention (DeepSeek). Such models always use local
    layers."""


class AutoConfig:
    """Reads the McaModelConfig of a folder or hub model."""

    @staticmethod
    def from_pretrained(
        model_name_or_path: str,
        args: TrainingArguments | None = None,
        trust_remote_code: bool = False,
        values: dict[str, Any] | None = None,
        value_head: bool = False,
    ) -> McaModelConfig:
        """Read a model's config, with the layout of `args` (None: that in mca_config.json,
        otherwise one rank, float32).

        Reads mca_config.json if this package wrote it, and then ignores trust_remote_code, values
        and value_head. Otherwise reads config.json, also if mcore_adapter wrote an mca_config.json
        beside it.

        values: the contents of config.json, if it was read before. value_head: if True, add one
        (see add_value_head). ValueError if config.json has an unsupported feature, or if
        mca_config.json cannot be used.
        """
        folder = Path(model_name_or_path)
        if read_mca_config(folder):
            return McaModelConfig.from_json_file(folder / MCA_CONFIG_NAME, args)
        hf = load_hf_config(model_name_or_path, trust_remote_code, values)
        if value_head:
            add_value_head(hf)
        return from_hf_config(hf, args, model_name_or_path)


def from_hf_config(
    hf: Any, args: TrainingArguments | None = None, name_or_path: str | None = None
) -> McaModelConfig:
    """Translate a transformers config object to McaModelConfig, as the table of its family says
    (FAMILIES, by model_type). args: the fields that they determine override the model's; None: one
    rank, float32. name_or_path: the model's name, which the config keeps. ValueError for an
    unsupported family or feature."""
    values = hf.to_dict()
    origin = name_or_path or hf.model_type
    family = get_family(hf.model_type, values)
    family.check(hf, origin)
    known = dict(name_or_path=name_or_path, hf_model_type=hf.model_type, hf_config=values)
    target = MLAMcaModelConfig if family.constants.get("multi_latent_attention") else McaModelConfig
    return target.build(family.values(hf) | known, args, origin)


def add_value_head(hf: Any) -> Any:
    """Change a transformers config, in place, to that of a reward model: a value head gives one
    score per token instead of logits -> the config.

    ConfigError if transformers has no sequence-classification model of this type, or the model is a
    classifier with several labels.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES,
    )

    key = "model_name_or_path"
    name = NAMES.get(hf.model_type)
    if name is None:
        reason = "transformers has no model for sequence classification of this type"
        refuse(key, hf.model_type, f"a value head: {reason}", "a model of another family")
    if has_value_head(hf.architectures) and hf.num_labels != 1:
        reason = f"it is a classifier with {hf.num_labels} labels: a reward model has one"
        refuse(
            key, hf.name_or_path, reason, "a model with num_labels 1, or one without such a head"
        )
    hf.architectures = [name]
    hf.num_labels = 1
    return hf


def grow(config: Any, vocab_size: int) -> None:
    """Set vocab_size of a McaModelConfig or transformers config, in place. ValueError if it is
    smaller than before."""
    is_mca = isinstance(config, McaModelConfig)
    text = config if is_mca else config.get_text_config()
    if vocab_size < text.vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size}: the model has {text.vocab_size} tokens, and cannot lose any"
        )
    text.vocab_size = vocab_size
    if is_mca and config.hf_config:
        text_values(config.hf_config)["vocab_size"] = vocab_size


def load_decision(saved: PretrainedConfig, now: PretrainedConfig) -> str:
    """A phrase for the log that says how weights are loaded: directly, or resharded from another
    layout. saved: the config under which they were saved. now: the run's config."""
    if saved.distribute_config_match(now):
        return "loaded directly: the layout is the same"
    return "resharded from another layout"


def load_hf_config(
    model_name_or_path: str, trust_remote_code: bool = False, values: dict[str, Any] | None = None
) -> Any:
    """transformers' config object of a folder or hub model. ConfigError if it cannot be read.

    values: the contents of its config.json, if it was read before.
    """
    import transformers

    folder = Path(model_name_or_path)
    if values is None or (folder.is_dir() and not (folder / HF_CONFIG_NAME).is_file()):
        judge = Judge(None)
        values = read_model_config(model_name_or_path, judge, files=(HF_CONFIG_NAME,))
        check_numbers(values, judge)
        judge.close()
    kind = str(values.get("model_type"))
    try:
        if not needs_file(values):
            keys = {**copy.deepcopy(values), "model_type": SAME_AS.get(kind, kind)}
            keys.pop("_name_or_path", None)  # where the folder was before
            return transformers.AutoConfig.for_model(**keys, name_or_path=model_name_or_path)
        return transformers.AutoConfig.from_pretrained(
            model_name_or_path, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises many types for invalid files
        reason = f"its {HF_CONFIG_NAME} cannot be used: {describe_error(error)}"
        remedy = f"a folder with {HF_CONFIG_NAME}, or a model of the hub"
        refuse("model_name_or_path", model_name_or_path, reason, remedy)


def load_tokenizer(folder: str | Path, trust_remote_code: bool) -> Any:
    """transformers' tokenizer of a folder or hub model. ConfigError if it cannot be loaded,
    or if a folder has no vocabulary file and trust_remote_code is off."""
    import transformers

    try:
        # transformers makes an empty tokenizer from a config alone. A hub name is no folder
        has_files = any(Path(folder, name).is_file() for name in VOCABULARY_FILES)
        may_lack = trust_remote_code or not Path(folder).is_dir()
        words = f"it has no vocabulary, a file like {VOCABULARY_FILES[0]}"
        expect(has_files or may_lack, words)
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises many types for damaged files
        reason = f"no tokenizer could be loaded from this folder: {describe_error(error)}"
        refuse("model_name_or_path", str(folder), reason, "a folder with the model's tokenizer")


def _from_arguments(args: TrainingArguments) -> dict[str, Any]:
    """{config field: value} for the fields that TrainingArguments determine. ConfigError if
    Transformer Engine is requested and does not work here, or if additional_configs are invalid."""
    if args.transformer_impl == "transformer_engine":
        function_of("part_transformer_engine:expect_works")()
    normalise_additional_configs(args)  # the user may have set them after the constructor
    judge = Judge(args)
    check_additional_configs(args, judge)
    judge.close()
    out = {}
    for f in fields(TrainingArguments):
        kind = f.metadata.get("model")
        value = getattr(args, f.name)
        # "always" marks the layout: None too must override a checkpoint's layout
        if kind == "always" or (kind is not None and value is not None):
            out[f.name] = value
    cuda = torch.cuda.is_available()
    # fused kernels are faster on a GPU; on a CPU they would only round differently
    out.setdefault("apply_rope_fusion", cuda)
    # without dropout a residual is one addition; compiled it costs the host ten times as much
    out.setdefault("bias_dropout_fusion", cuda and bool(args.hidden_dropout))
    out.setdefault("bias_activation_fusion", False)  # kernels.swiglu replaces it
    out["deterministic_mode"] = args.deterministic
    if args.mtp_num_layers is not None:  # None keeps the checkpoint's
        out["mtp_num_layers"] = args.mtp_num_layers or None
    # defaults, because a checkpoint's values belong to the run that saved it
    out |= {name: getattr(McaModelConfig, name) for name in ADDITIONAL_FIELDS}
    return out | args.additional_configs


def _to_json(value: Any) -> Any:
    """The value after a round trip through JSON, in which _of_other_types() converts what JSON does
    not know: an enum or an activation function to its name, most other objects to None."""
    return json.loads(json.dumps(value, default=_of_other_types))


def _of_other_types(value: Any) -> Any:
    """Convert a value that json.dumps does not know: an enum or an activation function to its name,
    megatron's pipeline layout to its text, anything else to None."""
    if isinstance(value, enum.Enum):
        return value.name
    if hasattr(value, "input_data"):  # megatron's pipeline layout: the key's text
        return value.input_data
    return _NAMES.get(value)


# ---- Transformer Engine

# only megatron's modules support these
NOT_LOCAL = (
    "add_bias_linear softmax_type no_rope_freq qk_clip experimental_attention_variant".split()
)


def engine_here() -> ModuleType | None:
    """The module part_transformer_engine if Transformer Engine works here; None if not, or if the
    module's file was removed."""
    part = module_of("part_transformer_engine")
    return part if part is not None and part.works() else None


def changed(config: McaModelConfig, names: list[str]) -> list[str]:
    """Names among `names` whose value in the config is not the field's default."""
    return [name for name in names if getattr(config, name) != getattr(McaModelConfig, name)]


def accumulate_in_place(module: torch.nn.Module) -> bool:
    """Let a Transformer Engine linear add the gradient of a trained weight to its main_grad
    (megatron's gradient buffer) itself. Returns True for such a linear, False for any other module,
    which stays unchanged."""
    if not hasattr(module, "fuse_wgrad_accumulation"):
        return False
    module.fuse_wgrad_accumulation = module.weight.requires_grad
    return True


def found_here() -> str | None:
    """Versions of Transformer Engine and cuDNN, for the start summary; None without CUDA.

    Transformer Engine may load the system's cuDNN before torch loads its own version; torch then
    uses the one already loaded. If that one is older, local layers may be slower.
    """
    if not torch.cuda.is_available():
        return None
    part = engine_here()
    engine = "no Transformer Engine" if part is None else part.version()
    try:
        version = torch.backends.cudnn.version() or 0
        return f"{engine}, cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"
    except RuntimeError as error:  # the loaded cuDNN does not fit torch
        return f"{engine}, {first_line(error)}"
