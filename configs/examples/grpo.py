"""GRPO with a Session, on plain torch. After a short start on given answers the model answers each
prompt several times; answers better than their group's mean become likelier. The reward is 1 for
the expected answer, otherwise 0: its mean is the share of exact answers. `make grpo` runs it.

    torchrun --nproc_per_node 2 configs/examples/grpo.py configs/sft.yaml use_mca=false \
        eval_dataset=null val_size=256 per_device_train_batch_size=32 max_steps=40 \
        learning_rate=3e-4 output_dir=output/grpo
"""

import sys
from itertools import cycle, islice
from operator import eq

import numpy as np
import torch

from mca_lite import Session, group_advantages, parallel, run, tool_generation
from mca_lite.args import parse_args

START, START_RATE = 80, 3e-3  # steps on given answers, at this learning rate after a warm-up
PROMPTS, GROUP, UPDATES = 32, 8, 2  # of a batch: prompts, answers to each, updates
SAMPLED = tool_generation.Decoding(max_new_tokens=12, temperature=1.0, top_p=1.0)
GREEDY = SAMPLED._replace(temperature=0.0)


class Sampler:
    """Answers of a model to prompts. Each rank answers its share of them."""

    def __init__(self, model, tokenizer, reward_of):
        model.generation_config.top_k = 0  # log-probabilities are those of all tokens
        self.model, self.tokenizer, self.reward_of = model, tokenizer, reward_of
        self.stop = tool_generation.stop_ids(model, tokenizer)

    @torch.no_grad()
    def answers(self, documents, decoding, times=1):
        """[(number of the prompt, its ids, ids of an answer, reward)], the same on every rank."""
        own = range(parallel.rank(), len(documents), parallel.world_size())
        turns = tool_generation.turns_of(documents, own, self.model, self.tokenizer)
        turns = [turn for turn in turns for _ in range(times)]
        prompts = [prompt for _, prompt, *_ in turns]
        self.model.eval()
        given = tool_generation.continuations(self.model, prompts, self.stop, decoding, 256)
        found = []
        for (number, prompt, expected, _), answer in zip(turns, given, strict=True):
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            if len(answer) < decoding.max_new_tokens:
                answer = [*answer, self.tokenizer.eos_token_id]  # trained to stop, too
            found.append((number, prompt, answer, float(self.reward_of(text, expected))))
        return [one for of_rank in parallel.gather(found) for one in of_rank]

    def reward(self, documents):
        return np.mean([reward for *_, reward in self.answers(documents, GREEDY)])

    def rollouts(self, documents):
        """(samples with advantages other than 0, the mean reward)."""
        found = self.answers(documents, SAMPLED, GROUP)
        numbers, prompts, answers, rewards = zip(*found, strict=True)
        samples = []
        advantages = group_advantages(rewards, numbers, scale=True)
        for prompt, answer, advantage in zip(prompts, answers, advantages, strict=True):
            labels = [-100] * (len(prompt) - 1) + answer
            sample = {"input_ids": (prompt + answer)[:-1], "labels": labels}
            samples += [{**sample, "advantage": advantage}] if advantage else []
        return samples, np.mean(rewards)


def loop(words, start=START, reward_of=eq):
    """[held-out reward before GRPO, after it], [mean reward of each batch]"""
    plan = run.make_plan(parse_args(words))
    args, heldout = plan.arguments.training, plan.data.eval
    parallel.initialize(args, False)
    session = Session(run.build_model(plan), args, plan.tokenizer)
    sampler = Sampler(session.model, plan.tokenizer, reward_of)
    order = np.random.default_rng(args.seed).permutation(len(plan.data.train))
    documents = cycle(plan.data.train[i] for i in order)
    torch.manual_seed(args.seed + parallel.rank())  # other answers on each rank
    say = print if parallel.is_main() else lambda words: None
    for step in range(start):
        batch = [*islice(documents, args.train_global_batch_size)]
        session.forward_backward(batch, "cross_entropy")
        session.optim_step(lr=START_RATE * min(1, (step + 1) / 20))
    rewards, of_heldout = [], [sampler.reward(heldout)]
    say(f"held-out reward {of_heldout[0]:.3f} after {start} steps on given answers")
    for step in range(args.max_steps):
        samples, reward = sampler.rollouts([*islice(documents, PROMPTS)])
        for _ in range(UPDATES if samples else 0):
            output = session.forward_backward(samples, "grpo")  # the first ratio is 1
            session.optim_step()
            samples = [{"old_logp": x, **one} for one, x in zip(samples, output.logps, strict=True)]
        rewards.append(reward)
        say(f"batch {step + 1}: reward {reward:.3f}, {len(samples)} answers to learn from")
    of_heldout.append(sampler.reward(heldout))
    say(f"held-out reward {of_heldout[1]:.3f} after {args.max_steps} batches of GRPO")
    return of_heldout, rewards


if __name__ == "__main__":
    loop(sys.argv[1:])
    parallel.shutdown()
