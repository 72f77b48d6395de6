"""Adapters in tests: a peft-wrapped Hugging Face model in plain torch as the oracle, and ours on
top of the same start.
"""

import functools
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.shared import tiny
from tests.shared.training import BRIEF, GLOBAL_BATCH, train

RANK, ALPHA = 4, 8
TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
EVERYTHING = [*TARGETS, "embed_tokens", "lm_head"]
KEYS = dict(
    adam_epsilon=1e-4
)  # 1e-6 amplifies the rounding of the smallest gradients to 1e-4 of a weight


def peft_model(path: str, targets=TARGETS, seed: int = 3, **config):
    """The model of a folder, wrapped by peft; no matrix of the adapters is zero: a start of B = 0
    would hide errors in A.

    They are small enough for peft's own curve in float32 to be within 2e-7 of that in float64.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    keys = {
        **dict(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM"),
        **config,
    }
    model = get_peft_model(model, LoraConfig(**keys))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def whole_logits_trainer():
    """McaTrainer with whole logits from the wrapped model, and torch's cross entropy."""
    from mca_lite.trainer import McaTrainer

    class Oracle(McaTrainer):
        def forward_step(self, data_iterator, model):
            inputs = self._prepare_train_inputs(data_iterator)
            labels = inputs["labels"]
            logits = model.model(inputs["input_ids"], position_ids=inputs["position_ids"]).logits
            losses = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100
            )
            return losses.view_as(labels), functools.partial(self._post_compute_loss, labels)

    return Oracle


def train_with_peft(path: str, folder: str, **config) -> list:
    """The curve of a peft-wrapped model on plain torch, as long as BRIEF; folder/start and
    folder/end are its adapters, as peft saves them.
    """
    from mca_lite.args import TrainingArguments

    wrapped = peft_model(path, **config)
    wrapped.save_pretrained(f"{folder}/start")
    args = TrainingArguments(**run_keys(f"{folder}/run"))
    data = dict(train_dataset=tiny.samples(BRIEF["count"]))
    trainer = whole_logits_trainer()(wrapped.base_model.model, args, **data)
    trainer.train()
    wrapped.save_pretrained(f"{folder}/end")
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


def train_cases_with_peft(folder: str, cases: dict) -> dict:
    """{case: curve} of train_with_peft in folder/case. cases: {case: (model folder, peft's
    configuration)}."""
    return {
        case: train_with_peft(path, f"{folder}/{case}", **config)
        for case, (path, config) in cases.items()
    }


def run_keys(output_dir: str) -> dict:
    """The keys of tests.shared.training.train with BRIEF, where they differ from their defaults."""
    return dict(
        output_dir=output_dir, global_batch_size=GLOBAL_BATCH, max_steps=BRIEF["steps"],
        logging_steps=1, learning_rate=1e-2,
        lr_scheduler_type="cosine", lr_scheduler_kwargs={"min_lr": 1e-3}, warmup_steps=0,
        weight_decay=0.1,
        max_grad_norm=0.5, adam_beta2=0.95, save_strategy="no", disable_tqdm=True, **KEYS,
    )  # fmt: skip


def load(folder: str, model):
    from mca_lite.part_lora import load_adapter

    return load_adapter(model, folder)


def train_from_adapter(path: str, output_dir: str, adapter: str, **changes) -> list:
    """tests.shared.training.train from an adapter in PEFT's format; the trained one is in
    output_dir.
    """
    keys = {**KEYS, "export": True, **changes}
    return train(path, output_dir, adapt=functools.partial(load, adapter), **keys)


def draw_by_name(key: str, shape) -> torch.Tensor:
    """Values for a matrix of an adapter, drawn from a seed of its name."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "little")
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_drawn_adapters(models, **spec):
    """The models with adapters of a LoraSpec, both of whose matrices are drawn."""
    from mca_lite import part_lora

    part_lora.inject(models, part_lora.LoraSpec(**spec))
    part_lora.fill_adapters(models, draw_by_name)
    return models


def adapter_of(folder) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter without the frozen copies that peft adds for embeddings.

    peft's name of an adapter on experts may have ".base_layer." too."""
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    return {n: t for n, t in tensors.items() if ".lora_" in n or ".base_layer." not in n}


def run_arguments(output_dir: str, **changes):
    from mca_lite.args import TrainingArguments

    keys = dict(output_dir=output_dir, save_strategy="no", disable_tqdm=True, global_batch_size=4)
    return TrainingArguments(**{**keys, **changes})


def make(path: str, output_dir: str, backend="megatron", **changes):
    """(the base model, its backend's class)"""
    from mca_lite import model
    from mca_lite.backend_megatron import MegatronBackend
    from mca_lite.backend_torch import TorchBackend

    args = run_arguments(output_dir, **changes)
    if backend == "torch":
        return model.load_torch_model(path), functools.partial(TorchBackend, args=args)
    return model.AutoModel.from_pretrained(path, args), functools.partial(
        MegatronBackend, args=args
    )


def logits(model) -> torch.Tensor:
    tokens = torch.arange(48).reshape(2, 24) % tiny.VOCAB
    with torch.no_grad():
        return model.eval()(tokens).logits


def save_start(path: str, folder: str, targets: tuple) -> None:
    """An adapter of ours whose matrices are all not zero: a start of B = 0 would hide errors
    in A.
    """
    from mca_lite import part_lora, part_lora_files
    from mca_lite.model import load_torch_model
    from mca_lite.part_lora_layers import LoraSpec

    model = part_lora.inject(load_torch_model(path), LoraSpec(RANK, ALPHA, targets=targets))
    generator = torch.Generator().manual_seed(3)
    part_lora.fill_adapters(model, lambda key, shape: 0.1 * torch.randn(shape, generator=generator))
    part_lora_files.save_adapter(model, folder)
