"""Names of megatron-core that this package uses, imported once the CPU settings are made.

Some settings (TORCHDYNAMO_DISABLE) must be made before megatron-core is imported, and its import
warns about packages that local layers do not need. So modules import these names from here:
cpu.apply() runs first, and such warnings are filtered. The filters of the host program are
restored.
"""

# ruff: noqa: F401
import contextlib
import logging
import warnings
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from . import cpu
from .errors import UserError

SUPPORTED = ">=0.16.1,<0.20"


class MegatronVersionError(UserError, ImportError):
    """The installed megatron-core has a version that this package does not support."""


def check_version(version: str) -> None:
    """Raise MegatronVersionError if this version of megatron-core is outside SUPPORTED."""
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        text = f"megatron-core {version} is installed, expected {SUPPORTED}: "
        raise MegatronVersionError(f"{text}pip install 'megatron-core{SUPPORTED}'")


with warnings.catch_warnings(), cpu.compiling_later():
    warnings.filterwarnings("ignore", message=".*(Apex is not installed|Engine and Apex)")
    warnings.filterwarnings("ignore", message="absl.logging is not|MimoModelConfig is experimental")
    cpu.apply()
    from megatron.core import __version__

    check_version(__version__)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
    from megatron.core.dist_checkpointing.utils import (
        apply_prefix_mapping,
        extract_sharded_tensors_and_factories,
        replace_prefix_for_sharding,
    )
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.extensions.transformer_engine import TENorm, te_checkpoint
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        get_cuda_rng_tracker,
        mappings,
        reduce_from_tensor_model_parallel_region,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.attention import SelfAttention as TEAttention
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.core.transformer.utils import (
        ensure_metadata_has_dp_cp_group,
        make_sharded_tensors_for_checkpoint,
        sharded_state_dict_default,
    )
    from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint, make_viewless_tensor


# The differences between minor versions of megatron-core: {name here: {first minor: its form}}.
# Drop a row once its newest form holds for every supported minor.
MINORS = {
    # 0.18 renames the field, and moves some of its values to other fields
    "cuda_graph_parts": {(0, 16): "cuda_graph_scope", (0, 18): "cuda_graph_modules"},
    # 0.19 gives the method an argument, and another name
    "gradients_for_norm": {
        (0, 16): "get_main_grads_for_grad_norm",
        (0, 19): "get_grads_for_grad_norm",
    },
    # The usable versions of Transformer Engine. 0.16 names them in its metadata; for later minors
    # the upper bound comes from the release's lock file (0.18, 0.19) or mcore-bridge's advice
    # (0.17).
    "transformer_engine": {
        (0, 16): ">=2.9,<2.12",
        (0, 17): ">=2.9,<2.15",
        (0, 18): ">=2.9,<2.17",
        (0, 19): ">=2.9,<2.18",
    },
}
# (megatron-core, Transformer Engine) for which `make gpu ARGS=te` was run to its end
RUN_WITH_ENGINE = {("0.16", "2.11"), ("0.19", "2.11")}


def of_minor(name: str) -> str:
    """Look up something that differs between minor versions of megatron-core, for the installed
    one. name: a key of MINORS. For "gradients_for_norm", for example, the result is the name of a
    method: "get_grads_for_grad_norm" from 0.19 on."""
    minor = tuple(int(number) for number in __version__.split(".")[:2])
    forms = MINORS[name]
    return forms[max(first for first in forms if first <= minor)]


# From 0.18 on DDP warns if it must work out the parameter layout itself, which is harmless.
_OF_DDP = logging.getLogger("megatron.core.distributed.distributed_data_parallel")
_OF_DDP.addFilter(lambda record: "full_param_layout not provided" not in record.getMessage())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that hides some warnings of megatron-core and torch during training."""
    with warnings.catch_warnings():
        # megatron-core calls collectives by their old names
        warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated", FutureWarning)
        # a resumed run advances the user's scheduler before its first step
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        # megatron-core reads the gradient of every tensor
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        # the start summary of a run on a GPU shows this warning once
        warnings.filterwarnings("ignore", ".*CUDA_DEVICE_MAX_CONNECTIONS")
        # 0.19 imports a multimodal model together with its schedules
        warnings.filterwarnings("ignore", "MimoModelConfig is experimental")
        yield
