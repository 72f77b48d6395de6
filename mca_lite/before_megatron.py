"""Imported before megatron-core by every module that needs it: the CPU settings, and quiet imports.

megatron-core reads settings while it is imported (TORCHDYNAMO_DISABLE), and warns about packages
that local layers do not need. So cpu.apply() comes first whichever module is imported first, and
the modules that warn are imported here. The warning filters of the host program stay as they are.
"""

import contextlib
import warnings

from . import cpu

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*(Apex is not installed|Engine and Apex)")
    cpu.apply()
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401


@contextlib.contextmanager
def quiet():
    """A run, without what libraries tell each rank of what its user has no part in."""
    with warnings.catch_warnings():
        # megatron-core calls collectives by names that newer versions of torch have others for
        warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated", FutureWarning)
        # as it reads checkpoints, and what holds their tensors
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        # a resumed run counts a scheduler of the user's on, before its first step
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        # megatron-core asks every tensor for a gradient
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        # the summary says it once, on a GPU
        warnings.filterwarnings("ignore", ".*CUDA_DEVICE_MAX_CONNECTIONS")
        yield
