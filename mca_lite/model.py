"""The model of one rank: McaGPTModel is one chunk of layers, VirtualModels holds all chunks of a
rank, AutoModel builds them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import parallel, weights_convert
from .args import TrainingArguments
from .ckpt_megatron import DIST_NAME, load_megatron
from .errors import expect, refuse
from .families import FAMILIES, rows_of
from .families_rows import TE_ALIASES, VALUE_HEAD
from .files import ADAPTER_CONFIG_NAME, HF_CONFIG_NAME, MCA_CONFIG_NAME, PathLike, describe_error
from .finetuning import Finetuning
from .loss_tokens import LossOfLogits, TrainedPlaces, token_losses
from .mcore import (
    ColumnParallelLinear,
    LanguageModelEmbedding,
    MegatronModule,
    ModelType,
    PackedSeqParams,
    ProcessGroupCollection,
    copy_to_tensor_model_parallel_region,
    ensure_metadata_has_dp_cp_group,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    make_tp_sharded_tensor_for_checkpoint,
    mpu,
    set_tensor_model_parallel_attributes,
)
from .model_config import AutoConfig, McaModelConfig, grow, load_decision, load_hf_config
from .model_layers import Block
from .model_linears import extra_factors
from .tables import function_of
from .weights_files import (
    GrownSource,
    InitSource,
    SafetensorsSource,
    TensorSource,
    check_loaded,
    file_tensors,
    grow_torch,
    has_float32_routers,
    model_class,
    scored,
)

# appended to weights_from, for the start summary
FROM_QUANTISED = ", from quantised weights: exports are not quantised"
_IN_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.*)")


class Embedding(LanguageModelEmbedding):
    """Token embedding, sharded over the vocabulary (megatron's): ids [b, s] -> [s, b, h], or [s /
    tp, b, h] under sequence parallelism. The output is multiplied by config.embedding_multiplier,
    which is first rounded to the output's dtype, as in Gemma."""

    def __init__(self, config: McaModelConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        sizes = config.padded_vocab_size, config.max_sequence_length
        super().__init__(config, *sizes, position_embedding_type="none", tp_group=tp_group)
        if not config.drop_embeddings:
            self.embedding_dropout.p = 0.0
        self.padding_idx = config.padding_idx
        if self.padding_idx is not None:
            self.word_embeddings.register_forward_hook(self._keep_padding)

    def _keep_padding(
        self, module: torch.nn.Module, inputs: tuple[torch.Tensor], out: torch.Tensor
    ) -> None:
        """Forward hook of the word embeddings: let pad tokens contribute nothing to the gradient of
        the embedding weight, as with padding_idx of torch.nn.Embedding."""
        if not out.requires_grad:
            return
        is_padding = inputs[0] == self.padding_idx
        if self.config.sequence_parallel:
            is_padding = is_padding.t().chunk(self.tp_group.size())[self.tp_group.rank()]
        out.register_hook(lambda grad: grad.masked_fill(is_padding[..., None], 0.0))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out = super().forward(input_ids=input_ids, position_ids=None)
        multiplier = self.config.embedding_multiplier
        return out if multiplier == 1.0 else out * torch.tensor(multiplier, dtype=out.dtype)


class OutputLayer(ColumnParallelLinear):
    """The output layer's weight (LM head), sharded over the vocabulary, without the matmul: forward
    returns (hidden, weight), so that the loss can compute logits in chunks. Call the module instead
    of reading its weight: with overlap_param_gather, megatron's DDP waits for the weight in a hook
    of this call."""

    passes_hidden = True  # its adapter's factors go to the loss: extra_factors

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, self.weight if weight is None else weight


def expect_causal(mask: torch.Tensor, input_ids: torch.Tensor) -> None:
    """Raise ValueError unless `mask` is the causal mask for input_ids [b, s]: bool [b or 1, 1, s,
    s], True where a query must not see a key."""
    b, s = input_ids.shape
    causal = torch.ones(s, s, dtype=torch.bool, device=mask.device).triu(1)
    fits = mask.dtype == torch.bool and mask.shape in ((1, 1, s, s), (b, 1, s, s))
    otherwise = "attention_mask: attention is causal here; expected None or the causal mask, bool "
    otherwise += "[b or 1, 1, s, s], True for hidden"
    expect(fits and (mask == causal).all(), otherwise)


class McaGPTModel(MegatronModule):
    """A decoder-only language model, or one pipeline stage's chunk of it, on megatron's parallel
    layers: embedding, decoder layers, output layer or value head, and layers for multi-token
    prediction.

    forward(input_ids [b, s], ...): attention is causal within each document. Arguments:
    position_ids: ignored; positions of text count from 0 in each document.
    attention_mask: None or the causal mask, bool [b or 1, 1, s, s], True for hidden; any other
    raises ValueError.
    padding_mask: bool [b, s], True for padding; the routers of MoE layers read it.
    labels: [b, s], part_mtp.Targets, or None.
    trained: loss_tokens.TrainedPlaces for the labels, or None.
    packed_seq_params: batch.PackedRow of a packed row, or None.
    columns: further model inputs, such as pixels (inputs.Inputs).

    Chunks before the last return hidden states [s, b, h] ([s / tp, b, h] under sequence
    parallelism). The last chunk returns:
    with a value head, a score per token, float32 [b, s];
    without labels, logits [b, s, V / tp];
    with labels, the loss of each token, float32 [b, s], 0 where the label is IGNORE_INDEX; or
    [b, s, k] if loss_of_logits gives k numbers per token;
    with Targets, the losses of the next token and of each prediction layer, [b, s, 1 + prediction
    layers] or [b, s, 1 + prediction layers, k].
    """

    # replaces cross entropy; may give k losses per token: forward then returns [b, s, k]
    loss_of_logits: LossOfLogits | None = None
    model_type = ModelType.encoder_or_decoder  # read by megatron's schedules

    def __init__(
        self,
        config: McaModelConfig,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = groups.tp
        self.pre_process = pre_process
        self.post_process = post_process
        self.vp_stage = vp_stage
        self.share_embeddings_and_output_weights = config.tie_embeddings_and_output_weights
        self.mtp_process = post_process and bool(config.mtp_num_layers)
        has_embedding = pre_process or self.mtp_process
        if has_embedding:
            self.embedding = Embedding(config, self.tp_group)
        self.inputs = config.inputs
        self.inputs.build(self)
        # only Transformer Engine's attention needs it; local layers have rotary tables
        self.rotary_pos_emb: Any = None
        if config.transformer_impl == "transformer_engine":
            self.rotary_pos_emb = function_of("part_transformer_engine:begin")(config, groups.cp)
        self.decoder = Block(config, pre_process, post_process, vp_stage, groups)
        if self.mtp_process:
            self.mtp = function_of("part_mtp:Predictions")(config, groups)
        self.output_layer: Any = None
        self.score = None  # the value head, the same on all tensor-parallel ranks
        if post_process and config.has_value_head:
            self.score = torch.nn.Linear(config.hidden_size, 1, bias=False)
        elif post_process:
            takes_its_weight = has_embedding and config.tie_embeddings_and_output_weights
            self.output_layer = OutputLayer(
                config.hidden_size,
                config.padded_vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=takes_its_weight,
                tp_group=self.tp_group,
            )
        self._mark_vocabulary()

    def _mark_vocabulary(self) -> None:
        """Set the attributes by which megatron recognises embedding and output weights: for the
        optimizer's parameter groups, and for the sum of gradients if the weight is tied or copied
        to the last pipeline stage."""
        config = self.config
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.output_layer is not None and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
        is_shared = self.share_embeddings_and_output_weights or bool(config.mtp_num_layers)
        weight = self.shared_embedding_or_output_weight()
        if weight is None or not is_shared:
            return
        if config.pipeline_model_parallel_size == 1:
            weight.zero_out_wgrad = True  # two gradients are added to one buffer
        else:
            weight.shared_embedding = True
            weight.shared = not self.pre_process  # a copy: the gradient norm counts the first

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The weight [V / tp, h] of this chunk's embedding; without an embedding, of its output
        layer; None if it has neither. megatron calls this to sum the gradients of tied copies."""
        if self.pre_process or self.mtp_process:
            return self.embedding.word_embeddings.weight
        return None if self.output_layer is None else self.output_layer.weight

    def set_input_tensor(self, input_tensor: list[torch.Tensor]) -> None:
        """Take the previous stage's hidden states. megatron's schedules call it with a list of one
        tensor."""
        [self.decoder.input_tensor] = input_tensor

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: Any = None,
        *,
        trained: TrainedPlaces | None = None,
        padding_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **columns: Any,
    ) -> torch.Tensor:
        if attention_mask is not None:
            expect_causal(attention_mask, input_ids)
        hidden = self.embedding(input_ids) if self.pre_process else None
        shared = dict(packed_seq_params=packed_seq_params)
        added: list[torch.Tensor] = []
        place = None
        if columns:
            hidden, added, place = self.inputs.embed(self, hidden, shared, **columns)
        if self.rotary_pos_emb is not None:
            of_engine = function_of("part_transformer_engine:attention_inputs")
            shared |= of_engine(self, hidden, packed_seq_params)
        if padding_mask is not None and self.config.sequence_parallel:
            padding_mask = padding_mask.chunk(self.tp_group.size(), 1)[self.tp_group.rank()]
        shared["padding_mask"] = padding_mask
        hidden = self.decoder(hidden, *added, **shared)
        if not self.post_process:
            return hidden
        if self.score is not None:
            return self._scores(hidden, self.score)
        if labels is None:
            return self.logits(hidden)
        if isinstance(labels, torch.Tensor):
            return self.losses(labels, hidden, trained)
        return self.mtp.losses(self, labels, hidden, trained, place, shared)

    def _head(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Prepare the operands for logits = hidden x weight^T -> (hidden [s, b, h], divided by
        config.logits_scaling; this rank's rows of the output layer's weight, [V / tp, h]; the
        output layer's LoRA factors, or None).

        Under sequence parallelism hidden is gathered. Collectives over the tensor-parallel group:
        in backward; under sequence parallelism in forward too."""
        tied = None
        if self.share_embeddings_and_output_weights:
            tied = self.shared_embedding_or_output_weight()
        hidden, weight = self.output_layer(hidden, tied)
        if self.config.logits_scaling != 1.0:
            hidden = hidden / self.config.logits_scaling
        extra = extra_factors(self.output_layer, hidden)
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return hidden, weight, extra

    def _scores(self, hidden: torch.Tensor, head: torch.nn.Linear) -> torch.Tensor:
        """Value-head scores, float32 [b, s], from decoder output [s, b, h], or [s / tp, b, h] under
        sequence parallelism. Every tensor-parallel rank computes all scores and the full gradient
        of the head."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return head(hidden)[..., 0].float().transpose(0, 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's vocabulary shard of the logits, [b, s, V / tp], from decoder output [s, b,
        h], or [s / tp, b, h] under sequence parallelism. Collectives: see _head."""
        hidden, weight, extra = self._head(hidden)
        logits = hidden @ weight.t()
        if extra is not None:
            low, factor = extra
            logits = (logits + low @ factor.t()).to(logits.dtype)
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits.transpose(0, 1).contiguous()

    def losses(
        self, labels: torch.Tensor, hidden: torch.Tensor, trained: TrainedPlaces | None
    ) -> torch.Tensor:
        """Loss per token, float32 [b, s] ([b, s, k] if loss_of_logits gives k per token), for
        labels [b, s] and decoder output [s, b, h], or [s / tp, b, h] under sequence parallelism.
        The loss is cross entropy, or loss_of_logits if set. trained: the indices of trained tokens
        in these labels; None: unknown. Collective over the tensor-parallel group."""
        config = self.config
        hidden, weight, extra = self._head(hidden)
        losses = token_losses(
            hidden, weight, labels.t().contiguous(), self.tp_group,
            config.vocab_size, config.loss_chunk_size, extra, config.final_logit_softcapping,
            config.loss_weights_differ, self.loss_of_logits,
            trained and trained.known_for(labels), sequence_first=True,
        )  # fmt: skip
        return losses.transpose(0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """{name: ShardedTensor or another of megatron's sharded objects} of this chunk, for a
        distributed checkpoint. The last stage's copy of the embedding is saved as a replica of the
        first stage's."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state.pop(f"{prefix}output_layer._extra_state", None)  # empty
        embedding = f"{prefix}embedding.word_embeddings.weight"
        output = f"{prefix}output_layer.weight"
        if output in state:
            state[output].allow_shape_mismatch = True  # rows of padding differ between layouts
        tied = self.share_embeddings_and_output_weights and output in state
        if not self.pre_process and (tied or embedding in state):
            group = metadata["dp_cp_group"]
            state[output if tied else embedding] = make_tp_sharded_tensor_for_checkpoint(
                tensor=self.shared_embedding_or_output_weight(),
                key=embedding,
                replica_id=(1, 0, group.rank()),
                allow_shape_mismatch=True,
                tp_group=self.tp_group,
                dp_cp_group=group,
            )
        return state

    def global_name(self, name: str) -> tuple[str, int | None]:
        """The name of a module or tensor in the whole model, from its name in this chunk: (name
        with {} for the layer index, that index from 0, or None outside layers). On a stage that
        begins with layer 4, "decoder.layers.0.mlp.linear_fc2.weight" gives
        ("decoder.layers.{}.mlp.linear_fc2.weight", 4)."""
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            return name, None
        block, local, rest = match.groups()
        layer = getattr(self, block).layers[int(local)]
        layer = getattr(layer, "transformer_layer", layer)
        return f"{block}.layers.{{}}.{rest}", layer.layer_number - 1

    def global_parameter_names(self) -> Iterator[tuple[str, int | None, torch.nn.Parameter]]:
        """Yield (name in the whole model, layer index or None, tensor) for each parameter of this
        chunk except adapters of experts, and for the buffers that Hugging Face files contain:
        router biases and layer scalars. Names are those of global_name(), with {} for the layer
        index. Norms inside Transformer Engine's linears get the names of separate norms
        (TE_ALIASES). Stacked experts are yielded one by one, as views with the expert's index in
        the layer, such as "decoder.layers.{}.mlp.experts.3.linear_fc1.weight"."""
        of_files = ("router.expert_bias", "layer_scalar")
        buffers = (pair for pair in self.named_buffers() if pair[0].endswith(of_files))
        for name, parameter in (*self.named_parameters(), *buffers):
            template, layer = self.global_name(name)
            if ".mlp.experts." not in name:
                yield TE_ALIASES.get(template, template), layer, parameter
            elif name.endswith(".mlp.experts.fc1"):
                experts = template.removesuffix("fc1")
                for e, tensor, view in self.get_submodule(name.removesuffix(".fc1")).tensors():
                    yield f"{experts}{e}.{tensor}", layer, view


class VirtualModels(torch.nn.ModuleList):
    """This rank's part of a model: a ModuleList of its chunks. There is one chunk, or one per
    virtual pipeline stage."""

    def __init__(self, config: McaModelConfig, models: list[torch.nn.Module]):
        super().__init__(models)
        self.config = config
        self.weights_from = ""  # shown in the start summary
        self.finetuning = Finetuning()

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the forward pass of the only chunk. ValueError with several chunks: these need
        megatron's pipeline schedule."""
        if len(self) != 1:
            raise ValueError(
                f"this rank holds {len(self)} chunks: run them through the pipeline schedule"
            )
        self[0].set_is_first_microbatch()  # fp8: weights are rounded anew
        return self[0](*args, **kwargs)

    def get_models(self) -> list[torch.nn.Module]:
        """The chunks as a list."""
        return list(self)

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (name in its chunk, parameter). With several chunks, names start with "model0.",
        "model1." and so on. Arguments are ignored."""
        for chunk, model in self._by_key().items():
            yield from model.named_parameters(chunk if len(self) > 1 else "")

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count the weights that this rank holds. only_trainable: leave frozen ones out.
        exclude_embeddings: leave out the word embeddings, and a tied head."""
        is_tied = self.config.tie_embeddings_and_output_weights
        embeddings = ("word_embeddings.", *["output_layer."] * is_tied)
        return sum(
            parameter.numel()
            for name, parameter in self.named_parameters()
            if (parameter.requires_grad or not only_trainable)
            and not (exclude_embeddings and any(part in name for part in embeddings))
        )

    def enable_input_require_grads(self) -> None:
        """Make the embedding's output on the first pipeline stage require a gradient, even if the
        embedding is frozen."""
        for model in self:
            if model.pre_process:
                model.embedding.register_forward_hook(lambda *call: call[-1].requires_grad_())

    def _by_key(self) -> dict[str, torch.nn.Module]:
        """The chunks by name: {"model": chunk}, or {"model0": ..., "model1": ...} with several
        chunks."""
        if len(self) == 1:
            return {"model": self[0]}
        return {f"model{i}": model for i, model in enumerate(self)}

    def state_dict(self) -> dict[str, Any]:
        """State dicts of the chunks: {"model": its state dict}, or {"model0": ..., "model1": ...}
        with several chunks."""
        return {key: model.state_dict() for key, model in self._by_key().items()}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load what state_dict() returned. `strict` has no effect with LoRA, because a state may
        then lack the frozen weights."""
        for key, model in self._by_key().items():
            model.load_state_dict(state_dict[key], strict=strict and self.finetuning.is_whole)

    def sharded_state_dict(self) -> dict[str, Any]:
        """The state of this rank's chunks for a distributed checkpoint: {chunk's key, as in
        state_dict(): {name: ShardedTensor or another of megatron's sharded objects}}. With LoRA it
        has only what a LoRA checkpoint saves."""
        chunks = self._by_key()
        return {key: self.finetuning.sharded_state(model) for key, model in chunks.items()}

    def save_pretrained(self, save_directory: PathLike, max_shard_size: str | int = "5GB") -> None:
        """Write a Hugging Face checkpoint: config.json and safetensors. Collective: every rank must
        call it."""
        weights_convert.export_hf(self, save_directory, max_shard_size)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather this rank's logits [b, s, V / tp] to [b, s, V], without vocabulary padding.
        Collective over the tensor-parallel group."""
        return gather_from_tensor_model_parallel_region(logits)[..., : self.config.vocab_size]


def build_chunks(config: McaModelConfig) -> VirtualModels:
    """Build this rank's chunks. Their weights have no meaning yet: files or a seed fill them
    later."""
    vpp = config.virtual_pipeline_model_parallel_size
    models = []
    for vp_stage in range(vpp) if vpp else [None]:
        first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = McaGPTModel(config, first, last, vp_stage)
        model.to(device=parallel.device(), dtype=config.params_dtype)
        _mark_tensor_parallel(model)
        models.append(model)
    return VirtualModels(config, models)


def _mark_tensor_parallel(model: McaGPTModel) -> None:
    """Set megatron's attribute tensor_model_parallel on the parameters that tensor parallelism
    shards. megatron sets it while it initialises weights, a step that is skipped here. Without the
    attribute megatron believes that every rank has the same parameter, and the gradient norm comes
    out too small. Stacked experts have the attribute already."""
    axes = {row.mca: row.axis for row in rows_of(model.config.hf_model_type, model.config)}
    for name, _, parameter in model.global_parameter_names():
        axis = axes.get(name)
        if axis is not None and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)


def refuse_new_rows(folder: Path, old: int, new: int) -> None:
    """Raise ConfigError: the vocabulary of a megatron checkpoint cannot grow from `old` to `new`
    tokens. The message says to convert it to a Hugging Face folder first."""
    reason = f"it is a checkpoint of a model of {old} tokens, and cannot grow to {new}"
    remedy = "a Hugging Face folder of it, python -m mca_lite convert"
    refuse("model_name_or_path", str(folder), reason, remedy)


class AutoModel:
    """Builds this rank's VirtualModels, from files or with random weights. If TrainingArguments are
    given, it first starts torch.distributed and megatron's process groups, unless they exist."""

    @staticmethod
    def from_pretrained(
        model_name_or_path: str,
        args: TrainingArguments,
        trust_remote_code: bool = False,
        vocab_size: int | None = None,
        *,
        config: McaModelConfig | None = None,
        source: TensorSource | None = None,
    ) -> VirtualModels:
        """Load a Hugging Face model (folder or hub name) or a checkpoint of this package, keeping
        this rank's shard.

        vocab_size: number of tokens of the result, if larger than the folder's; weights_files.py
        says how new rows are initialised. A checkpoint's vocabulary cannot grow.
        config, source: pass them if the folder was read before: its config with the final
        vocab_size, and a tensor source (weights_files.py) with as many rows.

        Of a Hugging Face model, one data-parallel replica reads the files, each rank its shards,
        and broadcasts them. Collective: every rank must call it.
        ValueError: files cannot be read, the model or layout cannot be built, vocab_size is lower
        than the folder's, or the weights do not fit the model.
        """
        folder = Path(model_name_or_path)
        is_checkpoint = (folder / DIST_NAME).is_dir()  # a run's, saved in any layout
        if is_checkpoint and (folder / ADAPTER_CONFIG_NAME).is_file():
            reason = "it is a checkpoint of adapters, without their model"
            remedy = "the model, with these as adapter_name_or_path, or in its weights: python -m "
            remedy += "mca_lite convert BASE DST --merge CHECKPOINT"
            refuse("model_name_or_path", str(folder), reason, remedy)
        parallel.initialize(args)
        if config is None:
            config = AutoConfig.from_pretrained(model_name_or_path, args, trust_remote_code)
        old = config.vocab_size
        grow(config, vocab_size or old)
        if config.vocab_size > old and is_checkpoint:
            refuse_new_rows(folder, old, config.vocab_size)
        if not is_checkpoint:
            if source is None:
                source = scored(config, SafetensorsSource(model_name_or_path), args.seed)
            config.moe_router_weight_in_fp32 = has_float32_routers(source)
        models = build_chunks(config)
        if source is None:
            saved = McaModelConfig.from_json_file(folder / MCA_CONFIG_NAME)
            load_megatron(folder, models)
            models.weights_from = load_decision(saved, config)
            return models
        if config.vocab_size > old:
            names = weights_convert.vocabulary_names(config)
            source = GrownSource(source, names, config.vocab_size)
        weights_convert.fill(models, source)
        models.weights_from = "converted from Hugging Face safetensors"
        if (config.hf_config or {}).get("quantization_config"):
            models.weights_from += FROM_QUANTISED
        return models

    @staticmethod
    def from_config(
        config: McaModelConfig, args: TrainingArguments | None = None, seed: int = 42
    ) -> VirtualModels:
        """Build a model with initial weights (see InitSource). Random values depend on `seed`, the
        config and the tensor's Hugging Face name, not on the parallel layout.

        config: from this package's AutoConfig.from_pretrained(folder, args); ValueError for another
        one, such as a transformers config, which lacks the layout. args: from these,
        torch.distributed and megatron's process groups are started; None if they exist. Collective:
        every rank must call it."""
        kind = type(config)
        expect(
            isinstance(config, McaModelConfig),
            "AutoModel.from_config: expected the McaModelConfig that mca_lite.AutoConfig."
            f"from_pretrained(folder, args) gives, got {kind.__module__}.{kind.__name__}: for a "
            "config object of transformers call mca_lite.model_config.from_hf_config(config, args)",
        )
        if args is not None:
            parallel.initialize(args)
        models = build_chunks(config)
        source = InitSource(config.hf_config or {}, seed, config.mtp_num_layers)
        weights_convert.fill(models, source)
        models.weights_from = f"drawn from seed {seed}"
        return models


def load_torch_model(
    model_name_or_path: str,
    train_from_scratch: bool = False,
    seed: int = 42,
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
    config: Any = None,
    dtype: torch.dtype = torch.float32,
) -> torch.nn.Module:
    """Load a Hugging Face model with transformers, in `dtype` on this rank's device: for the torch
    backend, for generate(), and as a reference in tests.

    train_from_scratch: draw the weights from `seed`; for model types in FAMILIES (those that this
    package knows) as AutoModel.from_config does, for others as transformers does.
    vocab_size: number of tokens of the result, if larger than the folder's.
    config: transformers' config of the folder, if it was read before; it may be changed in place.

    ValueError if config.json cannot be used, if weights do not fit the model, or with
    train_from_scratch if transformers cannot build it or vocab_size is lower than the folder's."""
    hf = config or load_hf_config(model_name_or_path, trust_remote_code)
    text = hf.get_text_config()
    vocab_size = vocab_size or text.vocab_size
    kwargs = dict(dtype=dtype, trust_remote_code=trust_remote_code)
    quantized = dict(getattr(hf, "quantization_config", None) or {})
    is_mxfp4 = quantized.get("quant_method") == "mxfp4"
    if is_mxfp4:
        hf.quantization_config = {**quantized, "dequantize": True}
    if getattr(text, "attn_logit_softcapping", None):
        # with sdpa some transformers releases silently ignore the cap
        kwargs["attn_implementation"] = "eager"
    if train_from_scratch:
        grow(hf, vocab_size)
        is_known = hf.model_type in FAMILIES
        if not is_known:  # its norms may add 1 to their weights, or other tensors need their values
            torch.manual_seed(seed)
        try:
            model = model_class(hf).from_config(hf, **kwargs)
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
            words = f"transformers cannot build the model of {model_name_or_path}/{HF_CONFIG_NAME}"
            raise ValueError(f"{words}: {describe_error(error)}") from error
        source = InitSource(hf.to_dict(), seed)
        with torch.no_grad():
            for name, _, part in file_tensors(model) if is_known else ():
                part.copy_(source.read(name))
    else:
        model, report = model_class(hf).from_pretrained(
            model_name_or_path,
            config=hf,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **kwargs,
        )
        check_loaded(model_name_or_path, report)
        if is_mxfp4:
            model.weights_from = f"read by transformers{FROM_QUANTISED}"
        if VALUE_HEAD in report["missing_keys"]:
            with torch.no_grad():
                model.score.weight.copy_(InitSource(hf.to_dict(), seed).read(VALUE_HEAD))
        if vocab_size > text.vocab_size:
            grow_torch(model, vocab_size, hf.dtype or torch.float32)
    experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
    if any(size % 8 for stacked in experts for size in stacked.shape[1:]):
        # torch's grouped GEMM needs rows whose bytes are a multiple of 16
        model.set_experts_implementation("eager")
    if Path(model_name_or_path).is_dir():
        model.name_or_path = str(model_name_or_path)
    return model.to(parallel.device())
