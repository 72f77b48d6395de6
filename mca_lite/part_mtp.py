"""Multi-token prediction: layers after the decoder, and their targets.

Layer k predicts the token k + 1 ahead:

    g_0 = the decoder's output
    g_k = norm(layer_k(eh_proj [enorm(embedding of the token k ahead); hnorm(g_{k-1})]))

These layers share the model's embedding and output layer. They run on the last pipeline stage; if
there are several stages, it keeps a copy of the embedding. Image features replace embeddings there
too. Rotary positions are those of g_0's tokens, as in megatron-core.

The objective follows the DeepSeek-V3 report. With N trained tokens of the main loss, it is (sum
of main losses + mtp_loss_scaling_factor / layers * sum of the prediction losses) / N. N counts the
whole step if calculate_per_token_loss, else the micro-batch. Under context parallelism megatron's
module exchanges tokens between ranks to look ahead; here a batch already includes the following
tokens (Targets).
"""

import re
from typing import Any, NamedTuple

import torch

from .batch import Batch
from .families_rows import Row
from .files import IGNORE_INDEX
from .mcore import MegatronModule, ProcessGroupCollection, TransformerConfig
from .model_attention import DuplicatedLinear
from .model_layers import Layer, build_layer, recomputed
from .model_norms import hidden_norm
from .parallel import to_device
from .part_mtp_rows import prediction_of
from .weights_convert import VOCABULARY
from .weights_files import Shape, original_of


class Targets(NamedTuple):
    """The labels of a batch with multi-token prediction: prediction layer i of k (from 1) reads the
    tokens that are i positions later, and predicts their labels.

    labels: [b, s], of the main loss. next_ids, next_labels, next_slots: [k, b, s]: the token ids,
    labels and image-feature indices of these later tokens.
    Beyond the document and the padding that belongs to it, the id is 0, the label IGNORE_INDEX and
    the index -1. Text tokens have the index -1 too."""

    labels: torch.Tensor
    next_ids: torch.Tensor
    next_labels: torch.Tensor
    next_slots: torch.Tensor

    @classmethod
    def ahead(cls, batch: Batch, count: int) -> "Targets":
        """Build the targets from a batch's whole rows, before context parallelism splits them.
        count: number of prediction layers."""
        length = batch["input_ids"].shape[1]
        cu = torch.tensor(batch.get("cu_seqlens", (0, length)))
        ends = cu[1:].repeat_interleave(cu.diff())  # where each position's document ends
        places = torch.arange(length) + torch.arange(1, count + 1)[:, None]  # [k, s]
        is_beyond = (places >= ends)[:, None]  # [k, 1, s]
        places = places.clamp(max=length - 1)
        ids = batch["input_ids"]
        slots = batch.get("image_slot", torch.full_like(ids, -1))
        columns = ((ids, 0), (batch["labels"], IGNORE_INDEX), (slots, -1))
        ahead = (
            column.cpu()[:, places].transpose(0, 1).masked_fill(is_beyond, filler)  # [k, b, s]
            for column, filler in columns
        )
        return cls(batch["labels"], *ahead)

    def to_rank(
        self, labels: torch.Tensor, places: torch.Tensor | None, device: torch.device
    ) -> "Targets":
        """Cut the targets to this context-parallel rank's tokens, and move them to `device`.
        places: indices of these tokens in the row (None: all). labels: [b, s], of these tokens
        alone."""
        ahead = self[1:]
        if places is not None:
            ahead = tuple(x[..., places] for x in ahead)
        return Targets(labels, *(to_device(x, device) for x in ahead))

    def of_ahead(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the losses of the prediction layers. losses: [b, s, 1 + layers], of which the first
        is the main loss and not added -> (sum, [sum without a gradient, number of labels in it]).
        """
        more = losses[..., 1:].sum()
        ahead = (self.next_labels != IGNORE_INDEX).sum()
        return more, torch.stack([more.detach(), ahead])


class PredictionLayer(MegatronModule):
    """One multi-token prediction layer: projects token embeddings and hidden states together, then
    runs a decoder layer. layer_number counts these layers from 1."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.enorm = hidden_norm(config)
        self.hnorm = hidden_norm(config)
        self.eh_proj = DuplicatedLinear(config, 2 * config.hidden_size, config.hidden_size)
        number = config.num_layers + layer_number
        self.transformer_layer = build_layer(config, number, pg_collection)
        self.final_layernorm = hidden_norm(config)

    @property
    def mtp_model_layer(self) -> Layer:
        """The decoder layer of this prediction layer, under the name by which megatron's schedules
        look for it since 0.17."""
        return self.transformer_layer

    def forward(
        self, embedded: torch.Tensor, hidden_states: torch.Tensor, **shared: Any
    ) -> torch.Tensor:
        """Compute hidden states that predict one token further ahead than `hidden_states` do.
        hidden_states: output of the layer before. embedded: embeddings of the tokens ahead. Both,
        and the result, are [s, b, h], or [s / tp, b, h] under sequence parallelism. shared:
        keywords of Layer.forward."""

        def run(embedded: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
            both = torch.cat((self.enorm(embedded), self.hnorm(hidden_states)), -1)
            hidden_states = self.transformer_layer(self.eh_proj(both), **shared)
            return self.final_layernorm(hidden_states)

        if self.training and self.config.recompute_granularity == "full":
            return recomputed(self.config, run, embedded, hidden_states)
        return run(embedded, hidden_states)


class Predictions(MegatronModule):
    """The multi-token prediction layers of a model, all on the last pipeline stage."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection):
        super().__init__(config=config)
        numbers = range(1, config.mtp_num_layers + 1)
        self.layers = torch.nn.ModuleList(
            PredictionLayer(config, number, pg_collection) for number in numbers
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The state of the prediction layers for a checkpoint: {name: megatron's ShardedTensor or
        ShardedObject}. Names begin with `prefix` and contain the layer's index, from 0."""
        state: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            state |= layer.sharded_state_dict(f"{prefix}layers.{i}.", (), metadata)
        return state

    def losses(
        self,
        model: Any,
        targets: Targets,
        hidden: torch.Tensor,
        trained: Any,
        place: Any,
        shared: dict[str, Any],
    ) -> torch.Tensor:
        """Token losses of the main model and of the prediction layers, float32 [b, s, 1 + layers];
        [b, s, 1 + layers, k] if model.loss_of_logits gives k numbers per token.

        model: McaGPTModel. hidden: the decoder's output. targets: a Targets. trained: the places of
        labels with loss, as for McaGPTModel.losses. place(embeddings, slots): puts image features
        among embeddings; None: there are none. shared: keywords of Layer.forward."""
        losses = [model.losses(targets.labels, hidden, trained)]
        for layer, ids, next_labels, places in zip(self.layers, *targets[1:], strict=True):
            embedded = model.embedding(ids)
            if place is not None:
                embedded = place(embedded, places)
            hidden = layer(embedded, hidden, **shared)
            losses.append(model.losses(next_labels, hidden, trained))
        return torch.stack(losses, 2)


def initial_shapes(hf: Any, shapes: dict[str, Shape], count: int) -> dict[str, Shape]:
    """Shapes of the tensors in new multi-token prediction layers, for a model whose weights are
    drawn at random: {Hugging Face name: shape}. Each layer has three norms, a projection, and the
    tensors of the last decoder layer, but with softmax attention even if that layer has linear
    attention.

    hf: the transformers config. shapes: {name: shape} of the decoder's tensors. count: number of
    prediction layers."""
    text = hf.get_text_config()
    h = text.hidden_size
    first = text.num_hidden_layers
    names = prediction_of(hf.model_type)
    of_layer = {}
    for name, shape in shapes.items():
        match = re.fullmatch(r".*\.layers\.(\d+)\.((\w+)\..*)", name)
        is_last = match is not None and int(match[1]) == first - 1
        if match and (is_last or match[3] == "self_attn") and match[3] != "linear_attn":
            of_layer[match[2]] = shape
    found = {}
    for layer in range(first, first + count):
        for name, shape in of_layer.items():
            found[names.layer.format(layer) + name] = shape
        for norm in (names.enorm, names.hnorm, names.final_layernorm):
            found[f"{norm.format(layer)}.weight"] = (h,)
        found[f"{names.eh_proj.format(layer)}.weight"] = (h, 2 * h)
    return found


def copies_of(row: Row, config: Any) -> list[str]:
    """Names under which a model's files may repeat the embedding or output layer in each
    multi-token prediction layer, such as "model.layers.61.embed_tokens.weight". If the model's
    original files are there, only names that they contain are returned.

    row: a Row (maps a weight to its Hugging Face name); [] if it is another weight's. config: a
    McaModelConfig with prediction layers; [] for families without numbered ones."""
    names = {VOCABULARY[0]: "embed_tokens", VOCABULARY[1]: "shared_head.head"}
    is_numbered = prediction_of(config.hf_model_type).is_numbered
    if row.mca not in names or not is_numbered:
        return []
    layers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    copies = {f"model.layers.{layer}.{names[row.mca]}.weight" for layer in layers}
    original = original_of(config.name_or_path)
    return sorted(original.names() & copies if original else copies)
