"""A loss that compares with a teacher: the Kullback-Leibler divergence of the student's
probabilities from those of transformers' model in TEACHER, which each rank holds. `stage: distill`
has this and more without a script, and cuts the teacher as the student is cut.

    torchrun --nproc_per_node 2 configs/examples/distillation.py configs/sft.yaml stage=kd \
        tensor_model_parallel_size=2 output_dir=output/kd
"""

import functools
import itertools
import sys

import torch
from transformers import AutoModelForCausalLM

from mca_lite import McaTrainer, cli, register_objective

TEACHER = "output/sft"


class KDTrainer(McaTrainer):
    @functools.cached_property
    def teacher(self):
        model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32).eval()
        return model.to(next(self.model.parameters()).device)

    @torch.no_grad()
    def _prepare_micro_batches(self, micro_batches, seq_length):
        return [{**batch, "teacher": self.hidden(batch)} for batch in micro_batches]

    def hidden(self, batch):
        """The teacher's last hidden states [b, s, h] of this rank's tokens, of one document after
        another where a row has several."""
        ids = batch["input_ids"].to(self.teacher.device)
        borders = itertools.pairwise(batch.get("cu_seqlens", (0, ids.shape[1])))
        documents = [ids[:, start:end] for start, end in borders if end > start]
        model = self.teacher.base_model
        hidden = torch.cat([model(ids).last_hidden_state for ids in documents], 1)
        places = self.backend.places(batch)  # of context parallelism
        return hidden if places is None else hidden[:, places]

    def _loss_of_logits(self, logits):
        """[n]: sum of p (log p - log q) over the vocabulary, p of the teacher and q of the student.
        A chunk of both models' logits is there at a time, of this rank's part of the vocabulary."""
        head = self.teacher.get_output_embeddings().weight[logits.vocabulary].detach()
        log_p = logits.log_softmax(logits.take(logits.batch["teacher"]) @ head.t())
        return logits.sum((log_p.exp() * (log_p - logits.log_softmax())).sum(1))


def main(words):
    register_objective("kd", records="conversations", trainer=KDTrainer)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
