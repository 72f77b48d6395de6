"""Three steps of TRL's own DPOTrainer beside ours, where TRL is installed: a batch of four pairs is
one micro-batch, since TRL's numbers of a batch are those of a micro-batch.
"""

import importlib.util

import pytest

from tests.shared import tiny, world
from tests.shared.dpo_tools import BETAS, CLIP, DECAY, EPS, RATE, Pairs, curve_of, our_run
from tests.shared.small_runs import save_tokenizer

STEPS = 3
B = dict(beta=0.3)
SMOOTH = dict(beta=0.3, label_smoothing=0.1)
MPO = dict(pref_loss=["sigmoid", "bco_pair_unshifted", "sft"], pref_loss_weights=[0.8, 0.2, 1.0])
OBJECTIVES = {
    **{name: dict(B, pref_loss=name) for name in "sigmoid sigmoid_norm hinge ipo".split()},
    **{name: dict(B, pref_loss=name) for name in "nca_pair sppo_hard apo_zero apo_down".split()},
    **{name: dict(SMOOTH, pref_loss=name) for name in "robust exo_pair aot aot_unpaired".split()},
    "discopop": dict(B, pref_loss="discopop", discopop_tau=0.3),
    "bco_pair": dict(B, pref_loss="bco_pair_unshifted"),
    "MPO": dict(B, **MPO),
    "ld_alpha": dict(B, pref_loss="sigmoid", ld_alpha=0.4),
    # with hinge TRL 1.16 multiplies in place, and its backward pass fails
    "WPO": dict(B, pref_loss=["sigmoid", "apo_zero"], use_weighting=True),
    "forward_kl": dict(B, pref_loss="sigmoid", f_divergence_type="forward_kl"),
    "js": dict(B, pref_loss="ipo", f_divergence_type="js_divergence"),
    "alpha": dict(
        B, pref_loss="sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3
    ),
}
COMMON = (
    "loss grad_norm rewards/chosen rewards/rejected rewards/margins logps/chosen logps/rejected"
)


def pairs() -> Pairs:
    return Pairs(count=4)


def columns(pair: dict) -> dict:
    """A pair as TRL has it: the tokens of the prompt and of both answers."""
    found = {}
    for side in ("chosen", "rejected"):
        document = pair[side]
        tokens = [*document["input_ids"].tolist(), int(document["labels"][-1])]
        first = len(tokens) - int((document["labels"] != -100).sum())
        found |= {"prompt_ids": tokens[:first], f"{side}_ids": tokens[first:]}
    return found


def curves_of_trl(path, out) -> dict:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class OnTokens(trl.DPOTrainer):
        def _prepare_dataset(self, dataset, *args):
            return dataset  # tokens already

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token_id = 0
    found = {}
    for name, objective in OBJECTIVES.items():
        own = dict(objective)
        losses = own.pop("pref_loss")
        losses = [losses] if isinstance(losses, str) else losses
        own["loss_type"] = [loss.removesuffix("_unshifted") for loss in losses]
        own["loss_weights"] = own.pop("pref_loss_weights", None)
        args = trl.DPOConfig(
            output_dir=f"{out}/{name}", per_device_train_batch_size=4, max_steps=STEPS,
            learning_rate=RATE, lr_scheduler_type="constant", weight_decay=DECAY,
            max_grad_norm=CLIP, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS,
            logging_steps=1, bf16=False,
            save_strategy="no", report_to="none", use_cpu=True, gradient_checkpointing=False, **own,
        )  # fmt: skip
        model, reference = (AutoModelForCausalLM.from_pretrained(path) for _ in range(2))
        trainer = OnTokens(
            model,
            reference,
            args,
            train_dataset=Dataset.from_list([columns(pair) for pair in pairs().pairs]),
            processing_class=tokenizer,
        )
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        found[name] = [{key: line[key] for key in COMMON.split()} for line in lines]
    return found


def curves_of_ours(path, out) -> dict:
    keys = dict(per_device_train_batch_size=4, max_steps=STEPS, backend="torch")
    return {
        name: curve_of(our_run(path, f"{out}/{name}", own, train_dataset=pairs(), **keys))
        for name, own in OBJECTIVES.items()
    }


if importlib.util.find_spec("trl"):

    @pytest.fixture(scope="module")
    def curves(tmp_path_factory):
        folder = tmp_path_factory.mktemp("trl")
        path = tiny.save_model(folder / "model", "qwen3")
        save_tokenizer(folder / "model")
        [theirs] = world.run(curves_of_trl, 1, path, str(folder / "theirs"), timeout_s=400)
        [ours] = world.run(curves_of_ours, 1, path, str(folder / "ours"), timeout_s=400)
        return ours, theirs

    @pytest.mark.parametrize("name", OBJECTIVES)
    def test_three_steps_are_those_of_trl(name, curves):
        ours, theirs = (of_all[name] for of_all in curves)
        for step, (line, wanted) in enumerate(zip(ours, theirs, strict=True)):
            for key, value in wanted.items():
                tolerance = 1e-4 if key == "loss" else 1e-5  # the loss is logged with four digits
                assert line[key] == pytest.approx(value, rel=tolerance, abs=tolerance), (step, key)
