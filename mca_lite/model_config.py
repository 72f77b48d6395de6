"""McaModelConfig: megatron's TransformerConfig with a Hugging Face model and a parallel layout.

AutoConfig.from_pretrained reads mca_config.json where the folder has one, and otherwise translates
Hugging Face's config.json by the family's table.
"""

import copy
import difflib
import enum
import functools
import json
import math
import os
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from . import before_megatron  # noqa: F401  # isort: skip
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from . import model_te
from .args import TrainingArguments
from .args_rules_model import check_model, check_numbers
from .args_rules_training import (
    ADDITIONAL_FIELDS,
    DERIVED_FIELDS,
    check_additional_configs,
    check_virtual_stages,
)
from .args_values import Judge, refuse
from .constants import HF_CONFIG_NAME, MCA_CONFIG_NAME
from .files import describe_error, is_of_mcore_adapter, read_json, read_model_config, write_file
from .model_families import FAMILIES, SAME_AS, check_type, get_family
from .model_rope import rope_frequencies

ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
_DTYPES = {str(d): d for d in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass
class PretrainedConfig:
    """What a config needs beside megatron's fields: where it came from, and its way to and from
    JSON."""

    name_or_path: str | None = None
    hf_model_type: str | None = None
    hf_config: dict[str, Any] | None = None  # the model's config.json as it was read

    def to_dict(self) -> dict[str, Any]:
        """Every field that differs from its default, as JSON can hold it. What follows from other
        fields is left out, and so are functions other than the activation: they are derived again,
        for the layout that reads them."""
        out = {"model_class": type(self).__name__}
        for f in fields(self):
            if f.name in _DERIVED:
                continue
            value = _to_json(getattr(self, f.name))
            default = f.default if f.default is not MISSING else None
            if value is not _LEFT_OUT and value != _to_json(default):
                out[f.name] = value
        return out

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Write mca_config.json into the folder, which is made where it is missing. One rank should
        call it."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / MCA_CONFIG_NAME, self.to_json_string())

    @classmethod
    def from_json_file(cls, path: str | os.PathLike, args=None) -> "McaModelConfig":
        """Read an mca_config.json; `args` (TrainingArguments) gives this run's layout in place of
        the saved one."""
        # 8-bit products are a run's own, and need a GPU
        values = {k: v for k, v in read_json(path).items() if not k.startswith("fp8")}
        name = values.pop("model_class", cls.__name__)
        targets = {target.__name__: target for target in (McaModelConfig, MLAMcaModelConfig)}
        if str(name) not in targets:
            raise ValueError(f"{path}: expected {' or '.join(targets)}, got model_class {name!r}")
        try:
            return targets[name]._build(values, args, str(path))
        except (TypeError, LookupError, AttributeError, AssertionError, ArithmeticError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def from_pretrained(cls, model_name_or_path: str, args=None) -> "McaModelConfig":
        """The config of a folder or hub name; see AutoConfig.from_pretrained."""
        return AutoConfig.from_pretrained(model_name_or_path, args)

    @classmethod
    def _build(cls, values: dict, args, origin: str) -> Any:
        known = {f.name for f in fields(cls)}
        if args is not None:
            # a saved coefficient may be that of the run that saved it; the model's is in hf_config
            own = (values.get("hf_config") or {}).get("router_aux_loss_coef")
            balance = {"moe_aux_loss_coeff": own or 0.0} if values.get("num_moe_experts") else {}
            values = {**values, **balance, **_from_arguments(args)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{origin}: {key!r} is not a field of {cls.__name__}{hint}")
        return cls(**{k: _from_json(k, v) for k, v in values.items()})

    def update_with_args(self, args) -> None:
        """Take the layout, precision and recomputation of `args` (TrainingArguments), in place, and
        check them."""
        names = {f.name for f in fields(self) if f.init} - _DERIVED
        kept = {name: getattr(self, name) for name in names}
        rebuilt = type(self)._build(kept, args, self.name_or_path or "the model's config")
        self.__dict__.update(rebuilt.__dict__)

    def distribute_config_match(self, other: "PretrainedConfig") -> bool:
        """Whether weights saved under `other` can be loaded rank by rank, without resharding or
        conversion."""
        return all(
            _to_json(getattr(self, name)) == _to_json(getattr(other, name))
            for name in LAYOUT_FIELDS
        )


# derived by megatron's __post_init__ from other fields: derived anew when a config is rebuilt
_DERIVED = {*DERIVED_FIELDS.split(), "autocast_dtype", "microbatch_group_size_per_vp_stage"}
_DERIVED |= {"window_size", "window_attn_skip_freq"}
_DERIVED |= {"init_method", "output_layer_init_method", "embedding_init_method"}
# what decides which rank holds which part of which tensor, under which name
LAYOUT_FIELDS = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size transformer_impl "
    "pipeline_model_parallel_layout"
).split()
_LEFT_OUT = object()


@dataclass
class McaModelConfig(TransformerConfig, PretrainedConfig):
    """A dense or MoE decoder: megatron's fields, the HF model that it came from, and this run's
    layout.

    Raises ValueError where the layout does not fit the model (heads, query groups, layers), each
    with what to set.
    """

    vocab_size: int = 0  # the model's own, without padding
    max_sequence_length: int = 0
    tie_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "rope"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    transformer_impl: str = "auto"  # replaced by what it comes to: local or transformer_engine
    sliding_window: int | None = None  # tokens that a query sees, itself included
    sliding_layers: list[int] | None = None  # the layers, from 0, that have the window; None: all
    pre_norms: bool = True  # norms in front of attention and MLP
    # norms of what attention and MLP give, before it is added to the residual stream
    post_norms: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP give
    logits_scaling: float = 1.0  # the logits are divided by it
    final_logit_softcapping: float | None = None  # c: logits become c tanh(logits / c)
    attn_logit_softcapping: float | None = None  # the same of attention's scores
    # neighbouring channels turn together; megatron's rotary_interleaved forbids MLA
    rope_interleave: bool = False
    drop_embeddings: bool = True  # whether hidden_dropout is for the embeddings as well
    loss_chunk_size: int | None = None  # rows of logits that are held at once; None: by the device
    loss_weights_differ: bool = False  # rows weigh differently in the loss: see loss_tokens.py
    # training rows hold several documents: attention without their borders is refused
    rows_are_packed: bool = False
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    qk_norm_over_heads: bool = False  # queries and keys are normed over all their heads together
    # "allgather", megatron's default, forbids variable lengths even for dense models
    moe_token_dispatcher_type: str = "alltoall"
    moe_grouped_gemm: bool = True
    moe_router_dtype: str | None = "fp32"
    moe_router_load_balancing_type: str = "none"
    # megatron's 1e-3 would change the bias of a model that is merely fine-tuned
    moe_router_bias_update_rate: float = 0.0
    moe_router_norm_topk_prob: bool = True  # a token's weights sum to 1
    moe_router_group_score: str = "top2"  # what a group of experts counts by: its best two, or max
    perform_initialization: bool = False  # weights come from a checkpoint, or are drawn by name

    def __post_init__(self):
        if isinstance(self.activation_func, str):
            if self.activation_func not in ACTIVATIONS:
                known = f"activation_func: {', '.join(ACTIVATIONS)}"
                refuse("activation_func", self.activation_func, "no such function", known)
            self.activation_func = ACTIVATIONS[self.activation_func]
        if self.activation_func not in (F.silu, F.gelu):
            self.bias_activation_fusion = False
        self.validate()
        if self.transformer_impl == "local":
            self.apply_rope_fusion = False  # TE's kernel: local attention rotates by itself
        # megatron's way to hand an MLP its activation: ours is a SwiGLU of our own
        has_swiglu = self.gated_linear_unit and self.activation_func is F.silu
        self.use_te_activation_func = has_swiglu and not self.bias_activation_fusion
        self.params_dtype = torch.float32
        if self.bf16 or self.fp16:
            self.params_dtype = torch.bfloat16 if self.bf16 else torch.float16
        self.pipeline_dtype = self.params_dtype
        self.use_cpu_initialization = not torch.cuda.is_available()
        if self.cuda_graph_scope == "full":
            self.cuda_graph_scope = []  # megatron makes the same of its own default, and warns
        super().__post_init__()  # reads the virtual stages off a pipeline_model_parallel_layout
        if self.transformer_impl == "transformer_engine":
            model_te.suit(self)
        # two messages between one pair of ranks: batched p2p mixes them up without an error
        interleaved = self.virtual_pipeline_model_parallel_size is not None
        self.overlap_p2p_comm, self.batch_p2p_comm = interleaved, not interleaved

    def validate(self) -> None:
        """Choose the layers, and check the layout against the model, without a process group.
        Raises ConfigError."""
        self.sequence_parallel &= self.tensor_model_parallel_size > 1
        more = "m" * (self.mtp_num_layers or 0)
        layout = vars(self)["pipeline_model_parallel_layout"]  # megatron's types know no text
        if isinstance(layout, str) and (more or "m" in layout):
            # m is a layer for multi-token prediction in megatron's syntax: before the loss
            layout = re.sub(r"m(\*\d+)?", "", layout)
            self.pipeline_model_parallel_layout = layout[:-1] + more + "L"
        judge = Judge(self)
        model_te.resolve_layers(self)
        model_te.check_layers(self, judge)
        check_virtual_stages(self, judge)
        check_model(self, self, judge, model_te.transformer_engine_works())
        judge.close()
        if self.mtp_num_layers and self.hf_config is not None:
            # config.json says how many the files hold: a model drawn from a seed may have more
            there = self.hf_config.get("num_nextn_predict_layers") or 0
            count = max(there, self.mtp_num_layers)
            self.hf_config = {**self.hf_config, "num_nextn_predict_layers": count}

    def layer_type(self, layer_number: int) -> str:
        """transformers' name for the attention of a layer, numbered from 1 as megatron does."""
        slides = self.sliding_window is not None and (
            self.sliding_layers is None or layer_number - 1 in self.sliding_layers
        )
        return "sliding_attention" if slides else "full_attention"

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer, by its number in the whole model, is a mixture of experts."""
        if not self.num_moe_experts:
            return False
        pattern = self.moe_layer_freq
        layer = min(layer, self.num_layers - 1)  # those for prediction are as the last one
        return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern == 0

    @property
    def padded_vocab_size(self) -> int:
        """vocab_size rounded up so that tensor parallelism can cut it: the rows that megatron's
        embedding holds."""
        tp = self.tensor_model_parallel_size
        return -(-self.vocab_size // tp) * tp

    # megatron scales cos and sin by (0.1 m ln s + 1) / (0.1 a ln s + 1), with s, m and a by these
    # names, in each layer.
    # HF's attention factor f, below 1 or above, comes out of ln s = 10, m = f - 1, a = 0
    yarn_rotary_scaling_factor = math.exp(10)
    yarn_mscale_all_dim = 0.0

    @functools.cached_property
    def yarn_mscale(self) -> float:
        return rope_frequencies(self)[1] - 1.0

    @property
    def has_local_rope(self) -> bool:
        """Whether layers with a sliding window have rotary frequencies of their own."""
        return "sliding_attention" in ((self.hf_config or {}).get("rope_parameters") or {})


@dataclass
class MLAMcaModelConfig(McaModelConfig, MLATransformerConfig):
    """The same for multi-latent attention: kv_channels are those that turn with the position,
    layers are local ones."""


class AutoConfig:
    """McaModelConfig of a folder or hub name."""

    @staticmethod
    def from_pretrained(
        model_name_or_path: str, args=None, trust_remote_code=False, values: dict | None = None
    ) -> McaModelConfig:
        """The config of a model, with the layout of `args` (TrainingArguments; None: one rank,
        float32).

        An mca_config.json wins over a config.json, unless mcore_adapter wrote it: then the
        config.json beside it says the same. values: what config.json holds, where it was read
        before. ValueError where config.json asks for what cannot be honoured.
        """
        saved = Path(model_name_or_path) / MCA_CONFIG_NAME
        if saved.is_file() and not is_of_mcore_adapter(saved.parent):
            return McaModelConfig.from_json_file(saved, args)
        hf = load_hf_config(model_name_or_path, trust_remote_code, values)
        return from_hf_config(hf, args, model_name_or_path)


def grow(config, vocab_size: int) -> None:
    """Let a McaModelConfig, or a transformers config, have so many tokens. ValueError for fewer."""
    text = config if isinstance(config, McaModelConfig) else config.get_text_config()
    if vocab_size < text.vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size}: the model has {text.vocab_size} tokens, and none is removed"
        )
    text.vocab_size = vocab_size
    if isinstance(config, McaModelConfig):
        hf = config.hf_config or {}
        (hf.get("text_config") or hf)["vocab_size"] = vocab_size


def load_decision(saved: PretrainedConfig, now: PretrainedConfig) -> str:
    """How weights saved under one config are loaded under another: directly, or resharded; said in
    the log."""
    if saved.distribute_config_match(now):
        return "loaded directly: the layout is the same"
    names = ["tensor", "pipeline", "virtual_pipeline", "expert"]
    degrees = [[getattr(c, f"{n}_model_parallel_size") or 1 for n in names] for c in (saved, now)]
    return f"resharded from (tp, pp, vpp, ep) {tuple(degrees[0])} to {tuple(degrees[1])}"


def load_hf_config(model_name_or_path: str, trust_remote_code=False, values: dict | None = None):
    """transformers' config object of a folder or hub name. ConfigError where there is none.

    values: what its config.json holds, where it was read before.
    """
    import transformers

    folder = Path(model_name_or_path)
    if values is None or (folder.is_dir() and not (folder / HF_CONFIG_NAME).is_file()):
        judge = Judge(None)
        values = read_model_config(model_name_or_path, judge, files=(HF_CONFIG_NAME,))
        check_numbers(values, judge)
        judge.close()
    kind = str(values.get("model_type"))
    # transformers reads a file itself that it may take for another type's
    reads_itself = "auto_map" in values or (kind == "mistral" and "layer_types" in values)
    try:
        if kind in SAME_AS or (kind in FAMILIES and not reads_itself):
            own = {**copy.deepcopy(values), "model_type": SAME_AS.get(kind, kind)}
            own.pop("_name_or_path", None)  # where it was once
            return transformers.AutoConfig.for_model(**own, name_or_path=model_name_or_path)
        return transformers.AutoConfig.from_pretrained(
            model_name_or_path, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever a made up file leads to in transformers
        reason = f"its {HF_CONFIG_NAME} cannot be used: {describe_error(error)}"
        remedy = f"a folder with {HF_CONFIG_NAME}, or a model of the hub"
        refuse("model_name_or_path", model_name_or_path, reason, remedy)


def load_tokenizer(folder: str | Path, trust_remote_code: bool):
    """transformers' tokenizer of a folder. ConfigError where there is none, or a damaged one."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever a damaged file leads to in transformers
        reason = f"no tokenizer could be loaded from this folder: {describe_error(error)}"
        refuse("model_name_or_path", str(folder), reason, "a folder with the model's tokenizer")


def from_hf_config(hf, args=None, name_or_path: str | None = None) -> McaModelConfig:
    """McaModelConfig of a transformers config object, translated by its family's table."""
    judge, origin = Judge(None), name_or_path or hf.model_type
    check_type(hf.to_dict(), judge)
    judge.close()
    family = get_family(hf.model_type)
    family.check(hf, origin)
    known = dict(name_or_path=name_or_path, hf_model_type=hf.model_type, hf_config=hf.to_dict())
    target = MLAMcaModelConfig if family.constants.get("multi_latent_attention") else McaModelConfig
    return target._build(family.values(hf) | known, args, origin)


def _from_arguments(args) -> dict[str, Any]:
    """The fields of the config that TrainingArguments set."""
    keys = {f.name: f.metadata["model"] for f in fields(TrainingArguments) if "model" in f.metadata}
    # a saved layout must not outlive the run that it was made for: there None counts too
    values = {key: getattr(args, key) for key in keys}
    out = {k: v for k, v in values.items() if v is not None or keys[k] == "always"}
    if args.transformer_impl == "transformer_engine":
        model_te.refuse_where_absent()
    cuda = torch.cuda.is_available()
    # fused glue pays on a GPU, and needs nothing else; on a CPU it would only round differently
    out.setdefault("apply_rope_fusion", cuda)
    # without dropout a residual is one addition; compiled it costs the host ten times as much
    out.setdefault("bias_dropout_fusion", cuda and bool(args.hidden_dropout))
    out.setdefault("bias_activation_fusion", False)  # SwiGLU is a kernel of our own
    if args.mtp_num_layers is not None:  # else a checkpoint's own
        out["mtp_num_layers"] = args.mtp_num_layers or None
    judge = Judge(args)
    check_additional_configs(args, judge)  # which may have changed since the constructor
    judge.close()
    # those of a checkpoint are the run's that saved it
    out |= {f.name: f.default for f in fields(McaModelConfig) if f.name in ADDITIONAL_FIELDS}
    out["attention_backend"] = model_te.backend_of_environment()
    return out | args.additional_configs


def _to_json(value):
    """The value as JSON can hold it, or _LEFT_OUT."""
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if callable(value) and value in ACTIVATIONS.values():
        return next(name for name, function in ACTIVATIONS.items() if function is value)
    if hasattr(value, "input_data"):  # megatron's pipeline layout: the text that it was made of
        return value.input_data
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return _LEFT_OUT


def _from_json(key: str, value):
    if isinstance(value, str) and value in _DTYPES:
        return _DTYPES[value]
    if key == "attention_backend" and isinstance(value, str):
        from megatron.core.transformer.enums import AttnBackend

        return AttnBackend[value]
    return value
