"""Transformer Engine: whether it works here, which models get its layers, and what these need of a
config.

With model_layers.py, which builds the layers, the only file that knows TE. Facts below were
measured with TE 2.11 and cuDNN 9.14 on an H200.
"""

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields

import torch

from .args_values import Judge, refuse

# fields of a config whose other values only the local layers know ...
ONLY_LOCAL = (
    "pre_norms post_norms embedding_multiplier residual_multiplier logits_scaling "
    "final_logit_softcapping attn_logit_softcapping rope_interleave "
    "layernorm_zero_centered_gamma multi_latent_attention mtp_num_layers"
).split()
# ... and of attention that only megatron's own modules know
NOT_LOCAL = "softmax_type no_rope_freq qk_clip experimental_attention_variant".split()


# variables that TE and mcore_adapter read -> the attention that each one switches on or off
TE_SWITCHES = {
    "NVTE_FLASH_ATTN": "flash",
    "NVTE_FUSED_ATTN": "fused",
    "NVTE_UNFUSED_ATTN": "unfused",
}


# why TE does not work, where that is no fault
NO_GPU, ABSENT = "there is no GPU", "not installed"


def why_unusable() -> str | None:
    """NO_GPU, ABSENT, or the first line of what TE's import raised; None where it works here."""
    if not torch.cuda.is_available():
        return NO_GPU
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # a broken installation raises more than ImportError
        missing = str(getattr(error, "name", None))
        if isinstance(error, ModuleNotFoundError) and missing.startswith("transformer_engine"):
            return ABSENT
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


@functools.lru_cache(1)
def transformer_engine_works() -> bool:
    """Whether TE can be imported and there is a GPU for it. Warns where it is installed and
    broken."""
    reason = why_unusable()
    if reason not in (None, NO_GPU, ABSENT):
        warnings.warn(
            f"Transformer Engine is installed and cannot be imported ({reason}): layers are local "
            "ones",
            stacklevel=3,
        )
    return reason is None


def refuse_where_absent() -> None:
    """ConfigError where Transformer Engine, which a run asks for, does not work here."""
    if not transformer_engine_works():
        reason = "Transformer Engine does not work here (it needs a GPU and `pip install "
        reason += "mca-lite[te]`)"
        remedy = "transformer_impl: local or auto"
        refuse("transformer_impl", "transformer_engine", reason, remedy)


def _changed(config, names: list[str]) -> list[str]:
    """Those of the fields that have another value than their default."""
    default = {f.name: f.default for f in fields(config)}
    return [name for name in names if getattr(config, name) != default[name]]


def needs_local(config) -> list[str]:
    """What of a McaModelConfig TE's layers lack, or do wrong."""
    needs = _changed(config, ONLY_LOCAL)
    channels = config.kv_channels or config.hidden_size // max(config.num_attention_heads, 1)
    if channels > 128:  # gradients of packed rows are NaN or 1e19 with cuDNN before 9.18
        needs.append("heads of more than 128 channels")
    if config.sliding_window is not None and config.context_parallel_size > 1:
        needs.append("a sliding window under context_parallel_size")  # the ring has none
    if config.attention_backend.name == "local":
        needs.append("attention_backend: local")
    return needs


def resolve_layers(config) -> None:
    """Put what it comes to in place of transformer_impl "auto", in place.

    TE multiplies float32 in tf32, so that auto means it for bf16 and fp16 alone.
    """
    if config.transformer_impl == "auto":
        suits = (config.bf16 or config.fp16) and not needs_local(config)
        works = suits and transformer_engine_works()
        config.transformer_impl = "transformer_engine" if works else "local"


def check_layers(config, judge: Judge) -> None:
    """What only one of the two implementations of the layers has."""
    needs = needs_local(config)
    if config.transformer_impl == "transformer_engine" and needs:
        reason = f"{config.hf_model_type} needs {', '.join(needs)}, which only the local layers "
        judge.refuse("transformer_impl", f"{reason}have", "transformer_impl: local or auto")
    for name in _changed(config, NOT_LOCAL) if config.transformer_impl == "local" else ():
        reason = f"{name}: the local layers have no such thing"
        judge.refuse(name, reason, f"{name} left out", getattr(config, name))


def backend_of_environment() -> str:
    """attention_backend as the variables of TE_SWITCHES have it: one that is on while another is
    off, local where all are off, auto otherwise."""
    values = {name: os.environ.get(variable) for variable, name in TE_SWITCHES.items()}
    if set(values.values()) == {"0"}:
        return "local"
    on = [name for name, value in values.items() if value == "1"]
    return on[0] if on and "0" in values.values() else "auto"


@contextlib.contextmanager
def own_switches(config) -> Iterator[None]:
    """Within it megatron-core finds no variable of TE_SWITCHES, which it compares with
    attention_backend and sets. With auto TE reads those of the user afterwards."""
    users = {name: os.environ.pop(name, None) for name in TE_SWITCHES}
    try:
        yield
    finally:
        if config.transformer_impl == "local" or config.attention_backend.name == "auto":
            for name, value in users.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def without_effect(config, args) -> list[str]:
    """A line about settings of TE's layers where a model has local ones."""
    if config.transformer_impl != "local":
        return []
    given = [name for name in TE_SWITCHES if name in os.environ]
    if args.additional_configs.get("attention_backend", "local") not in ("auto", "local"):
        given.append("attention_backend")
    if args.apply_rope_fusion:
        given.append("apply_rope_fusion")
    return [f"{', '.join(given)}: no effect on local layers"] if given else []


def suit(config) -> None:
    """Set the fields of megatron's own that TE's layers read in place of ours, in place."""
    if config.sliding_window is not None:
        # positions before and behind it that a token sees
        config.window_size = (config.sliding_window - 1, 0)
        numbers = range(1, config.num_layers + 1)
        kinds = [config.layer_type(number) for number in numbers]
        config.window_attn_skip_freq = [int(kind == "sliding_attention") for kind in kinds]


def accumulate_in_place(module: torch.nn.Module) -> bool:
    """Let a linear of TE add its weight's gradient to the float32 one itself. False: it is none."""
    if not hasattr(module, "fuse_wgrad_accumulation"):
        return False
    module.fuse_wgrad_accumulation = module.weight.requires_grad
    return True


def found_here() -> str | None:
    """What the start summary says of TE and cuDNN, None without CUDA.

    TE loads the system's cuDNN before torch's own, and torch uses what is loaded: local layers are
    slower with an older one.
    """
    if not torch.cuda.is_available():
        return None
    found = "no Transformer Engine"
    if transformer_engine_works():
        import transformer_engine

        found = f"Transformer Engine {transformer_engine.__version__}"
    try:
        version = torch.backends.cudnn.version() or 0
        return f"{found}, cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"
    except RuntimeError as error:  # another one than torch was compiled for
        built, here = re.findall(r"\((\d+), (\d+), (\d+)\)", str(error))[:2]
        return f"{found}, cuDNN {'.'.join(here)} (torch was built for {'.'.join(built)})"
