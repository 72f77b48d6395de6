"""Imported before megatron-core by every module that needs it: the CPU settings, and quiet imports.

megatron-core reads settings while it is imported (TORCHDYNAMO_DISABLE), and warns about packages
that local layers do not need. So cpu.apply() comes first whichever module is imported first, and
the modules that warn are imported here. The warning filters of the host program stay as they are.
"""

import warnings

from . import cpu

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*(Apex is not installed|Engine and Apex)")
    cpu.apply()
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
