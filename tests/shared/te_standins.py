"""Stand-ins for Transformer Engine's modules on a CPU: the same names of parameters, arguments and
outputs, mathematics in torch. For what is asked around them: checkpoints, adapters, layouts of
arguments. One rank of tensor parallelism."""

import contextlib

import torch
import torch.nn.functional as F


def _modules():
    """(linear, norm and linear, norm, core attention); megatron is imported here."""
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    from mca_lite.model_attention import CoreAttention
    from mca_lite.model_norms import RMSNorm

    class Linear(torch.nn.Module):
        cut = 1
        activation_dtype = None
        fuse_wgrad_accumulation = False
        zero_centered_gamma = False

        def __init__(self, input_size, output_size, *, config, bias, skip_bias_add, **unused):
            super().__init__()
            self.config, self.use_bias, dtype = config, bias, config.params_dtype
            self.te_return_bias = skip_bias_add and bias
            self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=dtype))
            shape = output_size if bias else 0
            self.bias = torch.empty(shape, dtype=dtype)
            if bias:
                self.bias = torch.nn.Parameter(self.bias)

        def forward(self, x):
            if self.activation_dtype != x.dtype:  # as TE asks, once
                for name, parameter in self.named_parameters():
                    assert parameter.dtype == x.dtype, f"{name} is {parameter.dtype}"
                self.activation_dtype = x.dtype
            bias = self.bias if self.use_bias and not self.te_return_bias else None
            out = F.linear(self.normed(x), self.weight, bias)
            return out, (self.bias if self.te_return_bias else None)

        def normed(self, x):
            return x

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            state = self.state_dict(prefix="", keep_vars=True)
            axes = {"weight": self.cut} | ({"bias": 0} if self.cut == 0 else {})
            return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)

    class NormLinear(Linear):
        cut = 0

        def __init__(self, input_size, *rest, config, **more):
            super().__init__(input_size, *rest, config=config, **more)
            self.eps = config.layernorm_epsilon
            ones = torch.ones(input_size, dtype=config.params_dtype)
            self.layer_norm_weight = torch.nn.Parameter(ones)

        def normed(self, x):
            return F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps)

    class Attention(CoreAttention):
        """Takes megatron's arguments; packed rows without their axis of one."""

        def __init__(self, config, layer_number, pg_collection=None, **unused):
            super().__init__(config, layer_number, pg_collection)

        def forward(self, query, key, value, attention_mask=None, packed_seq_params=None, **unused):
            if packed_seq_params is not None:
                query, key, value = (x[:, None] for x in (query, key, value))
            return super().forward(query, key, value, packed_seq_params)

    return Linear, NormLinear, RMSNorm, Attention


@contextlib.contextmanager
def installed():
    """Within it Transformer Engine seems to work: transformer_impl: transformer_engine builds the
    stand-ins, by megatron's own specs."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from mca_lite import model_norms
    from mca_lite import part_transformer_engine as engine

    linear, norm_linear, norm, attention = _modules()

    class Provider:
        column_parallel_linear = staticmethod(lambda: ColumnParallelLinear)
        row_parallel_linear = staticmethod(lambda: linear)
        column_parallel_layer_norm_linear = staticmethod(lambda: norm_linear)
        core_attention = staticmethod(lambda: attention)

    was = engine.TESpecProvider, model_norms.TENorm, engine.works
    engine.TESpecProvider = Provider
    engine.TENorm = model_norms.TENorm = norm
    engine.works = lambda: True
    try:
        yield
    finally:
        engine.TESpecProvider, norm, engine.works = was
        engine.TENorm = model_norms.TENorm = norm
