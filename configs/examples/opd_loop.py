"""On-policy distillation with a Session: the student answers prompts of its data set, a teacher
scores these answers, and each token's advantage is log p of the teacher - log p of the student, as
the gradient of the reverse KL divergence. Plain torch: the student's own weights sample.

    torchrun --nproc_per_node 1 configs/examples/opd_loop.py TEACHER configs/sft.yaml \
        use_mca=false max_steps=50 learning_rate=1e-4 output_dir=output/opd
"""

import sys

import torch

from mca_lite import Session, parallel, run, tool_generation
from mca_lite.args import parse_args
from mca_lite.model import load_torch_model

SAMPLED = tool_generation.Decoding(max_new_tokens=24, temperature=1.0, top_p=1.0)


def prompt_of(document):
    """The ids before the first label, of a shifted document."""
    [document] = document if isinstance(document, list) else [document]
    labels = torch.as_tensor(document["labels"])
    first = int((labels != -100).nonzero()[0])
    return torch.as_tensor(document["input_ids"])[: first + 1].tolist()


def rollouts_of(model, prompts, stop):
    """A sample of each prompt and the model's answer to it."""
    model.eval()
    with torch.no_grad():
        answers = tool_generation.continuations(model, prompts, [], SAMPLED)
    for prompt, answer in zip(prompts, answers, strict=True):
        ends = [i + 1 for i, token in enumerate(answer) if token in stop]
        answer = answer[: min(ends, default=len(answer))]  # trained to stop, too
        ids = prompt + answer
        yield {"input_ids": ids[:-1], "labels": [-100] * (len(prompt) - 1) + answer}


def loop(teacher, words):
    """[(reverse KL divergence in nats per token, norm of its gradient)] of each step's answers."""
    plan = run.make_plan(parse_args(words))
    args = plan.arguments.training
    parallel.initialize(args, plan.arguments.use_mca)
    student = run.build_model(plan)
    student.generation_config.top_k = 0  # log-probabilities are those of all tokens
    session = Session(student, args, plan.tokenizer)
    scorer = Session(load_torch_model(teacher), args, plan.tokenizer)
    stop = tool_generation.stop_ids(student, plan.tokenizer)
    documents = plan.data.train
    size = args.train_global_batch_size
    torch.manual_seed(args.seed)  # every rank samples the same answers
    found = []
    for step in range(args.max_steps):
        numbers = range(step * size, (step + 1) * size)
        prompts = [prompt_of(documents[i % len(documents)]) for i in numbers]
        samples = list(rollouts_of(student, prompts, stop))
        ours, theirs = session.log_probs(samples), scorer.log_probs(samples)
        for sample, old, wanted in zip(samples, ours, theirs, strict=True):
            sample |= {"old_logp": old, "advantage": wanted - old}
        tokens = sum(label != -100 for sample in samples for label in sample["labels"])
        session.forward_backward(samples, "importance_sampling")
        update = session.optim_step(denominator=tokens)
        divergence = float(torch.cat(ours).sum() - torch.cat(theirs).sum()) / tokens
        found.append((divergence, update.grad_norm))
        if parallel.is_main():
            print(f"step {step + 1}: reverse KL {divergence:.4f} nats per token")
    return found


if __name__ == "__main__":
    loop(sys.argv[1], sys.argv[2:])
    parallel.shutdown()
