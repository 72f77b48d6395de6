"""How fast a run is: tokens per second, FLOPs, the share of the device's peak (MFU), memory.

The FLOPs of a step are those that the model asks for, forward and backward. A weight that a token
is multiplied with costs 2 FLOPs forward, 2 for the gradient of its input, and 2 for its own
gradient, where it is trained:

    (4 x frozen weights + 6 x trained weights) x tokens  +  6 x core x sum of squared lengths

All weights of a full fine-tune are trained; with LoRA those of the adapters and of
modules_to_save. Tokens are real ones, without padding. The lengths are those of the documents,
also of packed ones, which do not see each other. `core` is half the sum of query and value
channels over all heads and layers: a token sees half of its document. The embedding look-up costs
nothing. What is computed twice (recomputation) or for padding counts as lost time. The forward pass
of a preference loss's reference, where it is not known from before, is work that is asked for:

    2 x weights x tokens  +  2 x core x sum of squared lengths
"""

import math
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import lora, parallel
from .model_families import DENSE_CONFIG, FAMILIES

# Dense bf16 and fp16 peaks in FLOP/s from NVIDIA's data sheets (without sparsity). Each row: words
# that the device's name must hold, words that it must not hold, the peak. The first row that fits
# counts.
_PEAK_FLOPS = (
    ({"A100"}, set(), 312e12),
    ({"A800"}, set(), 312e12),
    ({"H100", "PCIE"}, set(), 756e12),
    ({"H800", "PCIE"}, set(), 756e12),
    ({"H100", "NVL"}, set(), 835e12),
    ({"H200", "NVL"}, set(), 835e12),
    ({"H100"}, set(), 989e12),
    ({"H800"}, set(), 989e12),
    ({"H200"}, set(), 989e12),
    ({"B200"}, set(), 2250e12),
    ({"L40S"}, set(), 362e12),
    ({"4090"}, {"D", "LAPTOP"}, 165e12),
)


class Throughput:
    """Times steps between two lines of the log and turns their token counts into rates.

    Counts are of the whole step, over all ranks. world_size: number of devices; peak_flops: FLOP/s
    of one device, None where unknown. Nothing here waits for the GPU: a step whose work is still
    queued shifts its time to the next one, and the sums between two lines are right as long as the
    loop reads a number (loss, grad norm) off each step.
    """

    def __init__(
        self,
        world_size: int = 1,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.world_size, self.peak_flops, self._clock = world_size, peak_flops, clock
        self._reset()

    @classmethod
    def of(cls, args) -> "Throughput":
        """The meter of a run with these TrainingArguments on this rank's device."""
        name, dtype = "", torch.float32
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name()
        if args.bf16 or args.fp16:
            dtype = torch.bfloat16
        return cls(args.world_size, peak_flops(name, dtype))

    def _reset(self) -> None:
        self._steps = self._tokens = self._positions = 0
        self._time_s = self._flops = 0.0

    def start(self) -> None:
        """A step begins."""
        self._started = self._clock()

    def stop(self, tokens: float, positions: float, model_flops: float = 0.0) -> None:
        """A step ends. tokens: without padding; positions: all that were computed, padding
        included; model_flops: of the step's model, forward and backward (0 where not counted)."""
        self._time_s += self._clock() - self._started
        self._steps += 1
        self._tokens += tokens
        self._positions += positions
        self._flops += model_flops

    def take(self) -> dict[str, float]:
        """Rates over the steps since the last call, and a new start; {} where there was no step.

        Keys: step_time_s (mean), tokens_per_second, tokens_per_second_per_device,
        padding_fraction (of all positions), tflops_per_device where FLOPs were counted, mfu (of 1)
        where the peak is known too.
        """
        if not self._steps:
            return {}
        time_s = max(self._time_s, 1e-9)  # a clock may not have ticked
        padding = 0.0
        if self._positions:
            padding = 1.0 - self._tokens / self._positions
        rates = {
            "step_time_s": self._time_s / self._steps,
            "tokens_per_second": self._tokens / time_s,
            "tokens_per_second_per_device": self._tokens / time_s / self.world_size,
            "padding_fraction": padding,
        }
        if self._flops:
            flops_per_device = self._flops / time_s / self.world_size
            rates["tflops_per_device"] = flops_per_device / 1e12
            if self.peak_flops:
                rates["mfu"] = flops_per_device / self.peak_flops
        self._reset()
        return rates


class ModelSizes(NamedTuple):
    """The sizes of a model that decide what a token costs, of a config of either backend."""

    weights: float  # that a token is multiplied with
    core: float  # half the sum of query and value channels over all heads and layers
    num_layers: int
    hidden_size: int
    vocab_size: int
    mlp_weights: float  # of one layer, mean over layers; of a mixture those that a token meets
    expert_share: float  # of the experts of a layer, those that a token meets


@dataclass(frozen=True)
class ModelWork:
    """The FLOPs of a step: the formulas at the top of this file. `beside`: what runs forward only,
    a reference."""

    frozen: float
    trained: float
    core: float
    beside: "ModelWork | None" = None

    def flops(self, tokens: float, squares: float) -> float:
        """tokens: without padding; squares: the sum of the documents' squared lengths."""
        both = (4 * self.frozen + 6 * self.trained) * tokens + 6 * self.core * squares
        return both if self.beside is None else both + self.beside.forward(tokens, squares)

    def forward(self, tokens: float, squares: float) -> float:
        """The FLOPs of a forward pass alone."""
        return 2 * (self.frozen + self.trained) * tokens + 2 * self.core * squares


def model_work(model, reference=None) -> ModelWork | None:
    """The work of a model in training; None where its sizes are not known.

    model: VirtualModels or a transformers model, with its adapters. reference: the model that each
    batch passes forward only; `model` itself stands for its weights without adapters. Collective
    over all ranks for VirtualModels with adapters.
    """
    sizes = model_sizes(getattr(model, "config", None))
    if sizes is None:
        return None
    beside = None if reference is None else model_sizes(reference.config)
    if beside is not None:
        beside = ModelWork(beside.weights, 0.0, beside.core)
    if lora.spec_of(model) is None:
        return ModelWork(0.0, sizes.weights, sizes.core, beside)
    adapters, saved = _trained_weights(model, sizes.expert_share)
    return ModelWork(sizes.weights - saved, adapters + saved, sizes.core, beside)


def model_sizes(config) -> ModelSizes | None:
    """The sizes in a McaModelConfig or a transformers config; None where it does not say them."""
    fields = _fields_of(config)
    needed = "num_layers hidden_size vocab_size num_attention_heads ffn_hidden_size".split()
    if any(not fields.get(name) for name in needed):
        return None
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    head = fields.get("kv_channels") or hidden // heads
    groups = fields.get("num_query_groups") or heads
    channels = 2 * head  # of a query and a value
    # queries and what attention gives; keys and values
    attention = hidden * head * (2 * heads + 2 * groups)
    if fields.get("kv_lora_rank"):
        channels = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"] + fields["v_head_dim"]
        attention = _latent_weights(fields)
    # layers that predict ahead have a projection of 2 h to h each, and the logits again
    ahead = fields.get("mtp_num_layers") or 0
    layers, mlp = fields["num_layers"] + ahead, _mlp_weights(fields)
    logits = (1 + ahead) * hidden * fields["vocab_size"]
    experts = fields.get("num_moe_experts")
    return ModelSizes(
        weights=layers * (attention + mlp) + ahead * 2 * hidden**2 + logits,
        core=layers * heads * channels / 2,
        num_layers=fields["num_layers"],
        hidden_size=hidden,
        vocab_size=fields["vocab_size"],
        mlp_weights=mlp,
        expert_share=fields["moe_router_topk"] / experts if experts else 1.0,
    )


def _fields_of(config) -> dict[str, Any]:
    """McaModelConfig's fields, of such a config or of one of transformers."""
    if hasattr(config, "hf_model_type"):
        return vars(config)
    family = FAMILIES.get(getattr(config, "model_type", None))
    if family is not None:
        return family.values(config)
    return {ours: getattr(config, theirs, None) for theirs, ours in DENSE_CONFIG.items()}


def _latent_weights(fields: dict[str, Any]) -> float:
    """Weights of one layer's multi-latent attention."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    still, turning = fields["qk_head_dim"], fields["qk_pos_emb_head_dim"]
    value, latent = fields["v_head_dim"], fields["kv_lora_rank"]
    query = heads * (still + turning)
    queries = hidden * query
    if fields.get("q_lora_rank"):
        queries = fields["q_lora_rank"] * (hidden + query)
    keys_and_values = hidden * (latent + turning) + latent * heads * (still + value)
    return queries + keys_and_values + heads * value * hidden


def _mlp_weights(fields: dict[str, Any]) -> float:
    """Weights of the gated MLP that a token meets in a layer, averaged over the layers.

    In a mixture they are those of its experts and of the shared one, each of three matrices, the
    router's row of each expert, and that of the shared expert's gate.
    """
    hidden = fields["hidden_size"]
    dense = 3 * hidden * fields["ffn_hidden_size"]
    experts = fields.get("num_moe_experts")
    if not experts:
        return dense
    shared = fields.get("moe_shared_expert_intermediate_size") or 0
    columns = fields["moe_router_topk"] * fields["moe_ffn_hidden_size"] + shared
    rows = experts
    if shared and fields.get("moe_shared_expert_gate"):
        rows += 1
    mixture = 3 * hidden * columns + hidden * rows
    mixtures = sum(fields["moe_layer_freq"])
    return ((fields["num_layers"] - mixtures) * dense + mixtures * mixture) / fields["num_layers"]


def _trained_weights(model, expert_share: float) -> tuple[float, float]:
    """(weights of the adapters, of modules_to_save) that a token is multiplied with, of all ranks.

    Every rank tells the whole size of what it holds a part of, divided by the number of ranks that
    tell the same.
    """
    config = model.config
    is_megatron = hasattr(config, "hf_model_type")
    tellers, expert_parallel, tensor_parallel, chunks = 1, 1, 1, [model]
    if is_megatron:
        tellers = parallel.world_size() // config.pipeline_model_parallel_size
        expert_parallel = config.expert_model_parallel_size
        tensor_parallel, chunks = config.tensor_model_parallel_size, model
    adapters, saved = 0.0, 0.0
    for piece in lora.pieces_of(model):
        if "lora_embedding_A" in piece.key:
            continue  # a look-up
        share = expert_share * expert_parallel if piece.is_expert else 1.0
        adapters += math.prod(piece.full_shape) * share / tellers
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            is_matrix = parameter.requires_grad and parameter.dim() == 2
            if not is_matrix or ".lora." in name or "embed" in name:
                continue
            cut = tensor_parallel if getattr(parameter, "tensor_model_parallel", False) else 1
            saved += parameter.numel() * cut / tellers
    totals = torch.tensor([adapters, saved], dtype=torch.float64, device=parallel.device())
    if is_megatron and parallel.world_size() > 1:
        dist.all_reduce(totals)
    return tuple(totals.tolist())


def peak_flops(device_name: str, dtype: str | torch.dtype = torch.bfloat16) -> float | None:
    """The dense peak of a device in FLOP/s, by the name that torch.cuda.get_device_name() gives.

    None for a device that is not in the table and for dtypes other than bf16 and fp16: better no
    mfu than a wrong one.
    """
    if str(dtype).removeprefix("torch.") not in ("bfloat16", "float16", "bf16", "fp16"):
        return None
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    for needed, forbidden, flops in _PEAK_FLOPS:
        if needed <= words and not forbidden & words:
            return flops
    return None


def peak_memory_gib() -> float:
    """Peak memory of this process in GiB: CUDA's allocator, or the resident set on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
