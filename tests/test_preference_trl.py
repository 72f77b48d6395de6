"""Three steps of TRL's own trainers of pairs, labelled answers and reward models beside ours, where
TRL is installed: a batch of four samples is one micro-batch, since TRL's numbers of a batch are
those of a micro-batch.
"""

import importlib.util

import pytest

from tests.shared import kto_tools, rm_tools, tiny, world
from tests.shared.dpo_tools import BETAS, CLIP, DECAY, EPS, RATE, Pairs, curve_of, our_run
from tests.shared.small_runs import save_tokenizer

STEPS = 3
PAD = 0  # the token that pads in TRL's batches
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
# labels of four answers, and fields of KTOConfig
ANSWERS = {
    "both labels": ([1, 0, 1, 1], dict(beta=0.3, desirable_weight=1.5, undesirable_weight=0.75)),
    "desirable ones": ([1, 1, 1, 1], dict(beta=0.5, desirable_weight=1.25)),
    "undesirable ones": ([0, 0, 0, 0], dict(beta=0.2)),
}
OF_ANSWERS = "loss grad_norm kl rewards/chosen rewards/rejected logps/chosen logps/rejected"
# have margins, center_rewards_coefficient
SCORES = {"plain": (False, 0.0), "margins": (True, 0.0), "centred": (True, 0.05)}
# number of TRL's log -> ours
OF_SCORES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
}


def pairs() -> Pairs:
    return Pairs(count=4)


def tokens_of(document: dict) -> list[int]:
    """A document's tokens, with the last one."""
    return [*document["input_ids"].tolist(), int(document["labels"][-1])]


def columns(pair: dict) -> dict:
    """A pair as TRL has it: the tokens of the prompt and of both answers."""
    found = {}
    for side in ("chosen", "rejected"):
        document = pair[side]
        tokens = tokens_of(document)
        first = len(tokens) - int((document["labels"] != -100).sum())
        found |= {"prompt_ids": tokens[:first], f"{side}_ids": tokens[first:]}
    return found


def answers(labels: list[int]) -> list[tuple]:
    """(prompt, answer, label) of four answers."""
    raw = kto_tools.raw_answers(count=4)
    return [(*one[:2], float(label)) for one, label in zip(raw, labels, strict=True)]


def answer_columns(raw: list[tuple]) -> list[dict]:
    """Labelled answers as TRL has them; its mismatched answers are made of them."""
    rows = [
        {"prompt_ids": prompt.tolist(), "completion_ids": answer.tolist(), "label": bool(label)}
        for prompt, answer, label in raw
    ]
    for i, row in enumerate(rows):
        row["KL_completion_ids"] = rows[i - 1]["completion_ids"]
    return rows


def rated(has_margins: bool) -> rm_tools.Rated:
    """Four pairs whose answers do not end with the token that pads."""
    data = rm_tools.Rated(4, seed=3)
    for pair in data.pairs:
        del pair["pair_weight"]
        if not has_margins:
            del pair["pair_margin"]
        assert all(int(pair[side]["input_ids"][-1]) != PAD for side in rm_tools.SIDES)
    return data


def score_columns(pair: dict) -> dict:
    found = {f"{side}_ids": pair[side]["input_ids"].tolist() for side in rm_tools.SIDES}
    return found | ({"margin": pair["pair_margin"]} if "pair_margin" in pair else {})


# -- TRL's


def log_of_trl(names, models, out, rows, **own) -> list[dict]:
    """The log of three steps of the trainer and the config of these names."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    trainer_class, config_class = (getattr(trl, name) for name in names)

    class OnTokens(trainer_class):
        def _prepare_dataset(self, dataset, *args):
            return dataset  # tokens already

    tokenizer = AutoTokenizer.from_pretrained(models[0].name_or_path)
    tokenizer.pad_token_id = PAD
    args = config_class(
        output_dir=out, per_device_train_batch_size=4, max_steps=STEPS,
        learning_rate=RATE, lr_scheduler_type="constant", weight_decay=DECAY,
        max_grad_norm=CLIP, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS,
        logging_steps=1, bf16=False,
        save_strategy="no", report_to="none", use_cpu=True, gradient_checkpointing=False, **own,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    trainer = OnTokens(*models, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def curves_of_trl(path, scorer, out) -> dict:
    from transformers import AutoModelForCausalLM

    def two():
        return [AutoModelForCausalLM.from_pretrained(path) for _ in range(2)]

    found = {}
    for name, objective in OBJECTIVES.items():
        own = dict(objective)
        losses = own.pop("pref_loss")
        losses = [losses] if isinstance(losses, str) else losses
        own["loss_type"] = [loss.removesuffix("_unshifted") for loss in losses]
        own["loss_weights"] = own.pop("pref_loss_weights", None)
        rows = list(map(columns, pairs().pairs))
        lines = log_of_trl(("DPOTrainer", "DPOConfig"), two(), f"{out}/{name}", rows, **own)
        found[name] = [{key: line[key] for key in COMMON.split()} for line in lines]
    for name, (labels, own) in ANSWERS.items():
        rows = answer_columns(answers(labels))
        lines = log_of_trl(("KTOTrainer", "KTOConfig"), two(), f"{out}/{name}", rows, **own)
        found[name] = [{k: line[k] for k in OF_ANSWERS.split() if k in line} for line in lines]
    for name, (has_margins, centre) in SCORES.items():
        rows = list(map(score_columns, rated(has_margins).pairs))
        own = dict(center_rewards_coefficient=centre or None)
        models = [rm_tools.load(scorer)]
        lines = log_of_trl(("RewardTrainer", "RewardConfig"), models, f"{out}/{name}", rows, **own)
        found[name] = [{ours: line[key] for key, ours in OF_SCORES.items()} for line in lines]
    return found


# -- ours


def curves_of_ours(path, scorer, out) -> dict:
    keys = dict(per_device_train_batch_size=4, max_steps=STEPS, backend="torch")
    curves = {
        name: curve_of(our_run(path, f"{out}/{name}", own, train_dataset=pairs(), **keys))
        for name, own in OBJECTIVES.items()
    }
    for name, (labels, own) in ANSWERS.items():
        data = kto_tools.Answers(answers(labels))
        run = kto_tools.kto_run(path, f"{out}/{name}", objective=own, train_dataset=data, **keys)
        curves[name] = curve_of(run)
    for name, (has_margins, centre) in SCORES.items():
        data = rated(has_margins)
        run = rm_tools.rm_run(scorer, f"{out}/{name}", centre=centre, train_dataset=data, **keys)
        curves[name] = curve_of(run)
    return curves


if importlib.util.find_spec("trl"):

    @pytest.fixture(scope="module")
    def curves(tmp_path_factory):
        folder = tmp_path_factory.mktemp("trl")
        path = tiny.save_model(folder / "model", "qwen3")
        scorer = rm_tools.save_model(folder / "scorer")
        for of_model in ("model", "scorer"):
            save_tokenizer(folder / of_model)
        [theirs] = world.run(curves_of_trl, 1, path, scorer, str(folder / "theirs"), timeout_s=400)
        [ours] = world.run(curves_of_ours, 1, path, scorer, str(folder / "ours"), timeout_s=400)
        return ours, theirs

    def test_kl_is_above_zero_in_some_step(curves):
        _, theirs = curves
        assert max(line["kl"] for name in ANSWERS for line in theirs[name]) > 0.1

    @pytest.mark.parametrize("name", [*OBJECTIVES, *ANSWERS, *SCORES])
    def test_three_steps_are_those_of_trl(name, curves):
        ours, theirs = (of_all[name] for of_all in curves)
        for step, (line, wanted) in enumerate(zip(ours, theirs, strict=True)):
            for key, value in wanted.items():
                tolerance = 1e-4 if key == "loss" else 1e-5  # the loss is logged with four digits
                assert line[key] == pytest.approx(value, rel=tolerance, abs=tolerance), (step, key)
