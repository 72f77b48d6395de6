"""A training loop of your own on a Session, with the model, data and layout of a configuration.
forward_backward adds gradients, optim_step divides and updates: batches, losses, rates and their
order are the loop's. Every rank runs the same lines.

    torchrun --nproc_per_node 2 configs/examples/own_loop.py configs/sft.yaml \
        tensor_model_parallel_size=2 max_steps=20 output_dir=output/own_loop
"""

import sys

from mca_lite import Session, parallel, run
from mca_lite.args import parse_args


def loop(words):
    """[(loss, norm of the gradient)] of each step."""
    plan = run.make_plan(parse_args(words))
    args = plan.arguments.training
    parallel.initialize(args, plan.arguments.use_mca)
    session = Session(run.build_model(plan), args, plan.tokenizer)
    samples = plan.data.train
    size = args.train_global_batch_size
    steps = []
    for step in range(args.max_steps):
        batch = [samples[i % len(samples)] for i in range(step * size, (step + 1) * size)]
        for half in (batch[: size // 2], batch[size // 2 :]):  # any number of calls
            session.forward_backward(half, "cross_entropy")
        loss = session.forward(batch).metrics["loss"]
        update = session.optim_step(lr=args.learning_rate)
        steps.append((loss, update.grad_norm))
        if parallel.is_main():
            print(f"step {step + 1}: loss {loss:.4f}, gradient {update.grad_norm:.4f}")
    for name, tensor in session.weights():  # one by one, whole, under Hugging Face's names
        if parallel.is_main() and name.endswith("norm.weight"):
            print(f"{name} {tuple(tensor.shape)}")
    return steps


def main(words):
    loop(words)
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
