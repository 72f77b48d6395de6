"""Reward models in tests: a tiny one, a run of ours in any layout, and transformers' model for
sequence classification as the oracle.
"""

import torch
import torch.nn.functional as F

from tests.shared import pictures, tiny, tiny_moe
from tests.shared.answers import curve_of_steps, trained
from tests.shared.dpo_tools import COUNT, STEPS, Pairs

CENTRE = 0.05
SIDES = ("chosen", "rejected")


class Rated(Pairs):
    """Pairs of documents that are whole, each with a margin and a weight."""

    def __init__(self, count: int = COUNT, seed: int = 1):
        super().__init__(count, seed)
        for i, pair in enumerate(self.pairs):
            pair.update(pair_margin=0.5 * (i % 3), pair_weight=1.5 - 0.25 * (i % 2))


PAD = 11  # the token that pads


class Ending(Rated):
    """Rated pairs whose answers hold the token that pads inside, or end with it once or twice: not
    those of the first pair."""

    def __init__(self, count: int = COUNT, seed: int = 1):
        super().__init__(count, seed)
        for i, pair in enumerate(self.pairs):
            for side in SIDES:
                ids = pair[side]["input_ids"]
                ids[(ids >= pictures.IMAGE) & (ids <= pictures.END)] = 0  # have no picture
                ids[len(ids) - i % 3 :] = PAD
                ids[len(ids) // 2] = PAD
                ids[0] = PAD + 1
                if i == 0:
                    ids[-1] = PAD + 1


def save_model(folder, family: str = "qwen3", seed: int = 0, **changes) -> str:
    """A tiny model of one score with random weights, as transformers saves it."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    tables = tiny_moe if family in tiny_moe.MODELS else tiny
    if family in pictures.FAMILIES:
        tables = pictures
    config = tables.hf_config(family, **changes)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def rm_run(path, output_dir, adapter=None, centre=CENTRE, **changes):
    """The trainer after a run of RewardTrainer; the arguments are those of dpo_tools.our_run."""
    from mca_lite import RewardConfig, RewardTrainer

    data = dict(train_dataset=Rated(), eval_dataset=None, tokenizer=None)
    config = RewardConfig(centre)
    return trained(RewardTrainer, config, path, output_dir, data, adapter, **changes)


# -- the oracle


def score(model, document: dict) -> torch.Tensor:
    """Of one document alone: without a pad_token_id transformers takes the last token."""
    ids = torch.as_tensor(document["input_ids"])[None]
    more = {}
    if "pixel_values" in document:
        more = {name: document[name] for name in ("pixel_values", "image_grid_thw")}
        more["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return model(ids, **more).logits[0, 0].float()


def numbers_of(model, pairs) -> tuple:
    """(losses, metrics) by TRL's formulas."""
    chosen, rejected = (torch.stack([score(model, pair[s]) for pair in pairs]) for s in SIDES)
    margins = torch.tensor([pair["pair_margin"] for pair in pairs])
    losses = -F.logsigmoid(chosen - rejected - margins) + CENTRE * (chosen + rejected) ** 2
    losses = losses * torch.tensor([pair["pair_weight"] for pair in pairs])
    metrics = {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
    }
    return losses, {key: float(value.detach().mean()) for key, value in metrics.items()}


def padded_scores(model, documents: list[dict], side: str) -> list[float]:
    """Of documents in one batch, padded on the right or on the left."""
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.as_tensor(document["input_ids"]) for document in documents]
    ids = pad_sequence(rows, True, model.config.get_text_config().pad_token_id, side)
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, side)
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits[:, 0].tolist()


def oracle_curve(model, steps: int = STEPS, packs=None, data=None) -> list[dict]:
    """The curve for rm_run, one pair after another. packs: the numbers of the pairs of each. data:
    in place of Rated()."""
    pairs = (data or Rated()).pairs

    def numbers(model, chosen):
        return numbers_of(model, [pairs[j] for j in chosen])

    return curve_of_steps(model, numbers, steps, packs)


def load(path, pad=None):
    """transformers' model of a folder. pad: set after its embedding was made, which would give the
    row of its padding_idx no gradient."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    if pad is not None:
        model.config.pad_token_id = pad
    return model


def adapted(path):
    """The model with PEFT's fresh adapters, B not zero, and a trained value head."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"]
    )
    model = get_peft_model(load(path), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05)
    return model


def make_oracles(path: str, folder: str, steps: int) -> dict:
    """{"full" or "lora": curve}; folder/start is the adapter that lora starts from, and
    folder/full the trained model."""
    wrapped = adapted(path)
    wrapped.save_pretrained(f"{folder}/start")
    full = load(path)
    curves = {"full": oracle_curve(full, steps), "lora": oracle_curve(wrapped, steps)}
    full.save_pretrained(f"{folder}/full")
    return curves
