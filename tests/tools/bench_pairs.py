"""DPO as a plain loop over two transformers models: what bench_gpu.py's DPO cases are compared
with.

It stands in for TRL, whose loss it computes: chosen and rejected in one batch, the logits whole, in
bf16 with a float32 log-softmax of the rows that have labels, the reference under no_grad. bf16
weights and moments, torch's fused AdamW. Rows alone: TRL packs no pairs.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F


def run_pairs(shape, mbs, rows, s, steps, packed=False, liger=False):
    import transformers

    from mca_lite.part_dpo_losses import Responses, sigmoid

    from .bench_gpu import Clock, dataset_of_pairs, fill, hf_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config, clock, logs = hf_config(shape), Clock(), []
    objective = SimpleNamespace(
        beta=0.1, label_smoothing=0.0, f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5
    )
    data, tokens, squares = dataset_of_pairs(config, s, rows, packed)
    models = []
    for _ in range(2):
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        fill(model.named_parameters())
        models.append(model)
        if liger:
            from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)
    policy, reference = models[0].train(), models[1].eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=1e-5, weight_decay=0.1, fused=device == "cuda"
    )

    def logps(model, ids, labels):
        hidden = model.base_model(input_ids=ids, use_cache=False)[0]
        kept = labels != -100
        logits = model.lm_head(hidden[kept]).float()
        of_tokens = -F.cross_entropy(logits, labels[kept], reduction="none")
        return torch.zeros_like(labels, dtype=torch.float32).masked_scatter(kept, of_tokens).sum(1)

    clock.begin()
    for _ in range(steps):
        total = 0.0
        for start in range(0, rows, mbs):
            batch = data[start : start + mbs]  # chosen first, then rejected
            ids, labels = (
                torch.stack([pair[i][key] for i in (0, 1) for pair in batch]).to(device)
                for key in ("input_ids", "labels")
            )
            with torch.no_grad():
                known = logps(reference, ids, labels).chunk(2)
            responses = Responses(*logps(policy, ids, labels).chunk(2), None, None, *known)
            losses = sigmoid(responses, objective)
            loss = losses.sum() / rows
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logs.append(dict(loss=total, grad_norm=float(norm)))
        clock.tick()
    return clock, logs, tokens, squares
