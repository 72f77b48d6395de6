"""Gradient and optimizer memory of full fine-tuning against LoRA, counted on the tensors
themselves.
"""

import contextlib
import io
import tempfile

from tests.shared import tiny, world

SIZES = dict(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, head_dim=64
)
RANK = 8
MIB = 2**20


def held(path: str, output_dir: str, rank: int | None, **changes) -> dict[str, float]:
    """MiB on this rank after two steps in bf16: weights, gradient buffers, optimizer state with
    master weights.
    """
    from mca_lite import part_lora
    from mca_lite.args import TrainingArguments
    from mca_lite.model import AutoModel
    from mca_lite.trainer import McaTrainer

    keys = dict(
        output_dir=output_dir,
        global_batch_size=2,
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        bf16=True,
    )
    args = TrainingArguments(**keys, **changes)
    model = AutoModel.from_pretrained(path, args)
    if rank is not None:
        part_lora.inject(model, part_lora.LoraSpec(rank=rank))
    trainer = McaTrainer(model=model, args=args, train_dataset=tiny.samples(4))
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    own = {p.data_ptr() for p in model.parameters()}
    state = 0
    for part in parts:
        for parameter, values in part.optimizer.state.items():
            state += sum(v.nbytes for name, v in values.items() if name != "step")
            state += 0 if parameter.data_ptr() in own else parameter.nbytes  # a master weight
    return {
        "weights": sum(p.nbytes for p in model.parameters()) / MIB,
        "gradients": sum(
            b.grad_data.nbytes for chunk in trainer.backend.chunks for b in chunk.buffers
        )
        / MIB,
        "optimizer": state / MIB,
        "trained": trainer.backend.num_parameters()[1],
    }


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stderr(io.StringIO()):
            path = tiny.save_model(f"{folder}/model", "llama", **SIZES)
        print(
            f"memory of a rank in bf16, MiB: llama of {SIZES['num_hidden_layers']} "
            f"layers, hidden {SIZES['hidden_size']}"
        )
        print(
            f"{'layout':<14} {'':<10} {'trained':>12} {'weights':>9} {'gradients':>10} "
            f"{'optimizer':>10}"
        )
        layouts = {"one rank": (1, {}), "dp2 dist opt": (2, dict(use_distributed_optimizer=True))}
        for name, (ranks, keys) in layouts.items():
            for kind, rank in (("full", None), (f"LoRA r={RANK}", RANK)):
                got = world.run(held, ranks, path, f"{folder}/out", rank, **keys)[0]
                numbers = f"{got['weights']:9.1f} {got['gradients']:10.1f} {got['optimizer']:10.1f}"
                print(f"{name:<14} {kind:<10} {got['trained']:12,} {numbers}")


if __name__ == "__main__":
    main()
