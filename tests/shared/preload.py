"""Imported once by the fork server: every rank of every test world starts with these in place."""

import gc
import os
import warnings

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # saves a second an import
warnings.filterwarnings("ignore")
gc.disable()  # while modules are imported, which stay

import peft  # noqa: E402, F401
import pytest  # noqa: E402, F401  # the module of a test imports it, and each rank imports that module
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402, F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import mca_lite.cli  # noqa: E402
import mca_lite.part_dpo  # noqa: E402, F401

FAMILIES = """deepseek_v2 deepseek_v3 gemma2 gemma3 glm4 glm4_moe granite llama mistral mixtral
olmo2 olmoe phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss"""
for name in FAMILIES.split():
    __import__(f"transformers.models.{name}.modeling_{name}")
transformers.utils.logging.disable_progress_bar()
get_checkpoint_conversion_mapping("llama")  # a table that the first model to be loaded builds

# A rank's collections would walk through all that was imported, and copy its pages: a third of the
# CPU time of a small world.
gc.enable()
gc.collect()
gc.freeze()
