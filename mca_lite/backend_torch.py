"""The plain torch backend: a Hugging Face model, torch DDP, AdamW. The fallback, and the oracle of every test.

`forward_backward` has the contract of megatron's schedules, so the trainer's objective runs on both as it is.
"""

import contextlib
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import ckpt, cpu, lora, lora_files, parallel, weights_files, weights_sources
from .args import check_together
from .args_rules_model import check_torch_packing
from .args_values import Judge
from .backend_torch_moe import TorchRouters
from .constants import IGNORE_INDEX
from .loss_tokens import token_losses
from .optim import create_grad_scaler, create_torch_optimizer
from .packed_rows import block_diagonal_mask, packed_row
from .weights_files import file_parts, named_tensors


class TokenLossModel(torch.nn.Module):
    """A Hugging Face decoder that answers as McaGPTModel does: token losses with labels, logits without.

    Where the model's logits are its last hidden states times the head's weight, the loss is taken in chunks of rows;
    another head (scaled or capped logits, a bias) is found out by trying, and its whole logits are held.
    """

    def __init__(self, model, loss_chunk_size: int):
        super().__init__()
        self.model, self.loss_chunk_size = model, loss_chunk_size
        self.head_is_plain = self._head_is_plain()

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        training = self.model.training
        ids = (
            torch.arange(4, device=parallel.device())[None]
            % self.model.config.get_text_config().vocab_size
        )
        self.model.eval()
        logits = self.model(ids, use_cache=False).logits.float()
        hidden = self.model.base_model(ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        own = F.linear(hidden, head.weight).float()
        extra = lora.extra_factors(head, hidden)
        if extra is not None:
            own = own + F.linear(*extra).float()
        self.model.train(training)
        return torch.allclose(own, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max()))

    def forward(self, input_ids, position_ids=None, attention_mask=None, labels=None):
        """input_ids, labels [b, s]; attention_mask bool [b or 1, 1, s, s], True meaning hidden -> float32 [b, s]."""
        if attention_mask is not None:
            attention_mask = ~attention_mask  # Hugging Face's True means visible
        kwargs = dict(attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        if labels is None:
            return self.model(input_ids, **kwargs).logits
        if not self.head_is_plain:
            logits = self.model(input_ids, **kwargs).logits.float().flatten(0, 1)
            return F.cross_entropy(
                logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
            ).view(labels.shape)
        hidden = self.model.base_model(input_ids, **kwargs).last_hidden_state
        head = self.model.get_output_embeddings()
        extra = lora.extra_factors(head, hidden)
        return token_losses(
            hidden, head.weight, labels, chunk_size=self.loss_chunk_size, extra=extra
        )

    @torch.no_grad()
    def refuse_packing_if_documents_mix(self) -> None:
        """ValueError where the model does not keep packed documents apart by a mask and by positions: tried on one row."""
        config, device = self.model.config.get_text_config(), parallel.device()
        judge = Judge(None)
        check_torch_packing(self.model.config, judge)
        judge.close()
        cu, ids = (0, 5, 8), torch.arange(8, device=device)[None] % config.vocab_size
        training = self.model.training
        self.model.eval()
        params = packed_row(cu, 1, 0, device)
        packed = self(ids, params.layout.positions[None], block_diagonal_mask(cu, device))
        alone = torch.cat(
            [
                self(ids[:, a:b], torch.arange(b - a, device=device)[None])
                for a, b in ((0, 5), (5, 8))
            ],
            1,
        )
        self.model.train(training)
        if not torch.allclose(packed, alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
            raise ValueError(
                f"{config.model_type} lets packed documents see each other: set packing: false"
            )


class TorchBackend:
    """A Hugging Face model in training: float32 weights, autocast for bf16 and fp16, DDP where there are several ranks."""

    name = "torch"
    micro_batch_multiple = document_multiple = length_multiple = 1
    context_parallel = (1, 0)
    counts_tokens = True

    predicts_ahead = 0.0

    def __init__(self, model, args):
        check_together(args, use_mca=False)
        self.args, self.hf_model = args, model
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        wrapped = TokenLossModel(model, args.loss_chunk_size)
        if not wrapped.head_is_plain:
            args.notes.append(
                f"{model.config.model_type} changes its logits: they are held whole, loss_chunk_size has no effect"
            )
        if args.sequence_packing:
            wrapped.refuse_packing_if_documents_mix()
        if self.world > 1:
            ids = [torch.cuda.current_device()] if torch.cuda.is_available() else None
            wrapped = torch.nn.parallel.DistributedDataParallel(wrapped, device_ids=ids)
        self.chunks = [wrapped]
        self.routers = TorchRouters(model, args)
        self.optimizer = None
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        device = parallel.device().type
        self._autocast = lambda: (
            torch.autocast(device, dtype=dtype) if dtype else contextlib.nullcontext()
        )
        self._scaler = None
        if args.fp16:
            self._scaler = create_grad_scaler(args)

    @property
    def dp_rank(self) -> int:
        return parallel.rank() if self.world > 1 else 0

    @property
    def dp_size(self) -> int:
        return self.world

    @property
    def grad_scalers(self) -> list:
        """The loss scalers of fp16, which checkpoints keep."""
        return [self._scaler] if self._scaler else []

    @property
    def hf_config(self) -> dict:
        """The model's config.json."""
        return self.hf_model.config.to_dict()

    def model_inputs(self, batch: dict) -> dict:
        """The batch on this rank's device; packed documents are kept apart by a mask and by positions that restart."""
        device, params = parallel.device(), batch.get("packed_seq_params")
        ids, labels = (batch[k].to(device, non_blocking=True) for k in ("input_ids", "labels"))
        padding = batch.get("padding_mask")
        self.routers.expect(None if padding is None else padding.to(device))
        if params is None:
            positions = batch["position_ids"].to(device)
            return dict(input_ids=ids, labels=labels, position_ids=positions, attention_mask=None)
        mask = block_diagonal_mask(batch["cu_seqlens"], device)
        positions = params.layout.positions[None]
        return dict(input_ids=ids, labels=labels, position_ids=positions, attention_mask=mask)

    def over_context_parallel(
        self, total: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return total, count

    def sum_over_context_parallel(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def wrap_reference(self, model) -> list:
        """A frozen model as what forward_backward runs forward only."""
        return [TokenLossModel(model.requires_grad_(False), self.args.loss_chunk_size).eval()]

    def create_optimizer(self):
        self.optimizer = create_torch_optimizer(self.args, self.hf_model)
        return self.optimizer

    def train_mode(self, training: bool) -> None:
        self.chunks[0].train(training)

    def forward_backward(
        self, forward_step, micro_batches: list, seq_length: int, forward_only=False, chunks=None
    ) -> list[dict]:
        """Metrics of each micro-batch. Gradients are left as MegatronBackend.forward_backward leaves them."""
        model, metrics, iterator = (chunks or self.chunks)[0], [], iter(micro_batches)
        tokens = torch.zeros((), dtype=torch.float32, device=parallel.device())
        if not forward_only:
            self.optimizer.zero_grad()
        for i in range(len(micro_batches)):
            more_to_come = i < len(micro_batches) - 1 and self.world > 1
            with model.no_sync() if more_to_come and not forward_only else contextlib.nullcontext():
                with self._autocast():
                    output, loss_func = forward_step(iterator, model)
                loss, count, measured = loss_func(output)
                if not self.args.calculate_per_token_loss:
                    loss = loss / count.clamp(min=1)
                if not forward_only:
                    loss = loss + self.routers.losses_of_pass(output.shape[:2])
                if not self.args.calculate_per_token_loss:
                    loss = loss / len(micro_batches)
                tokens += count
                if not forward_only:
                    (loss * self._scaler.scale if self._scaler else loss).backward()
            metrics.append(measured)
        if not forward_only:
            self.routers.update_biases()
            if self.args.calculate_per_token_loss:
                self._divide_by_tokens(tokens)
        return metrics

    def _divide_by_tokens(self, tokens: torch.Tensor) -> None:
        """DDP has averaged the ranks' sums: make that the sum over all, divided by the tokens of all."""
        if self.world > 1:
            dist.all_reduce(tokens)
        grads = [p.grad for p in self.hf_model.parameters() if p.grad is not None]
        torch._foreach_mul_(grads, self.world / tokens.clamp(min=1))

    def common_length(self, longest: int) -> int:
        """Each micro-batch has its own length."""
        return 0

    def weigh_router_losses(self, micro_batches: list, count_of_loss) -> None:
        """As MegatronBackend.weigh_router_losses."""
        self.routers.weigh(micro_batches, count_of_loss, self.world)

    def router_statistics(self) -> dict[str, float]:
        """As MegatronBackend.router_statistics."""
        return self.routers.take_statistics()

    def step(self) -> tuple[bool, float, int | None]:
        """As MegatronBackend.step."""
        parameters = [p for p in self.hf_model.parameters() if p.grad is not None]
        grads = [p.grad for p in parameters]
        if self._scaler:
            torch._foreach_mul_(grads, float(self._scaler.inv_scale))
        grad_norm = torch.nn.utils.get_total_norm(grads) if grads[0].is_cuda else cpu.l2_norm(grads)
        if self._scaler:
            overflow = not bool(grad_norm.isfinite())
            self._scaler.update(overflow)
            if overflow:  # the update is left out, and has no norm: as megatron's optimizer answers
                return False, 0.0, None
        torch.nn.utils.clip_grads_with_norm_(
            parameters, self.args.max_grad_norm or float("inf"), grad_norm
        )
        zeros = sum(int((g == 0).sum()) for g in grads) if self.args.log_num_zeros_in_grad else None
        self.optimizer.step()
        return True, float(grad_norm), zeros

    def reduce(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum of a vector over all ranks, on every rank. Changes `totals`."""
        if self.world > 1:
            dist.all_reduce(totals)
        return totals

    def num_parameters(self) -> tuple[int, int]:
        parameters = list(self.hf_model.parameters())
        return sum(p.numel() for p in parameters), sum(
            p.numel() for p in parameters if p.requires_grad
        )

    def export_hf(self, folder, max_shard_size) -> list[str]:
        """The trained model in Hugging Face's format, its weights in the dtype that they were trained for; or its adapters in
        PEFT's -> the files that this rank wrote."""
        if lora.spec_of(self.hf_model) is not None:
            return self.export_adapters(folder)
        return self._export(folder, max_shard_size, lambda name, tensor: tensor)

    def export_adapters(self, folder) -> list[str]:
        """The adapters in PEFT's format, where there are any -> the files that this rank wrote."""
        if lora.spec_of(self.hf_model) is None:
            return []
        return lora_files.save_adapter(self.hf_model, folder)

    def export_merged(self, folder, max_shard_size) -> None:
        """The model with its adapters in its weights, in Hugging Face's format."""
        self._export(folder, max_shard_size, lora_files.merger(self.hf_model))

    def _export(self, folder, max_shard_size, change) -> list[str]:
        written = []
        if parallel.is_main():
            dtype = (
                torch.bfloat16
                if self.args.bf16
                else torch.float16
                if self.args.fp16
                else torch.float32
            )
            config = self.hf_model.config
            tensors = (
                # a router's bias keeps its precision, as in transformers
                (
                    file_name,
                    change(file_name, part).to(dtype if tensor.requires_grad else part.dtype),
                )
                for name, tensor in named_tensors(self.hf_model)
                if ".lora." not in name
                for file_name, index in file_parts(config.model_type, name, tuple(tensor.shape))
                for part in [tensor.detach()[index].to("cpu", copy=bool(index))]
            )
            carried = weights_sources.carried_tensors(self.hf_model.name_or_path, config.to_dict())
            written = weights_files.write_safetensors(
                itertools.chain(tensors, carried), Path(folder), max_shard_size
            )
            written += weights_files.write_hf_config(
                config.to_dict(), self.hf_model.name_or_path, Path(folder), dtype
            )
        parallel.barrier()
        return written

    def finish_param_sync(self) -> None:
        """Nothing is on its way: DDP has the weights of every update at once."""

    def snapshot(self, with_optimizer: bool, copy: bool) -> ckpt.TorchSnapshot:
        """The checkpoint's weights and optimizer state, ready to be written by the main rank."""
        return ckpt.TorchSnapshot(self.hf_model, self.optimizer if with_optimizer else None, copy)

    def load_state(self, folder, with_optimizer: bool = True) -> None:
        """What a snapshot wrote, on every rank."""
        lora_files.check_checkpoint(self.hf_model, folder)
        ckpt.load_torch(folder, self.hf_model, self.optimizer if with_optimizer else None)
