"""Imported once by the fork server: every rank of every test world starts with these in place."""

import os
import warnings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # saves a second an import
warnings.filterwarnings("ignore")

import megatron.core.dist_checkpointing  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402, F401

import mca_lite.cli  # noqa: E402
import mca_lite.trainer  # noqa: E402, F401

for name in "llama mistral qwen2 qwen3 deepseek_v2 deepseek_v3 gemma2 gemma3 glm4 granite olmo2 phi3 seed_oss".split():
    __import__(f"transformers.models.{name}.modeling_{name}")
transformers.utils.logging.disable_progress_bar()
