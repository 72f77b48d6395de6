"""DPOConfig: what a preference objective is, and which reference it has."""

from dataclasses import dataclass
from typing import Literal

from . import lora
from .args import FinetuningArguments
from .args_values import Judge, refuse
from .loss_preference import LOSSES, REFERENCES


@dataclass(kw_only=True)
class DPOConfig:
    """The objective. ValueError for what does not fit together.

    pref_loss: sigmoid (DPO) or orpo. beta: how strongly the reference holds, or the weight of the
    odds ratio. label_smoothing: the share of pairs thought to be swapped. ftx: weight of the sft
    term, the mean loss of a token of the chosen response. use_ref_model: whether there is a
    reference (None: where the loss has one). reference: cached, adapter or model (None: a model
    that is given, else the model without its adapters, else cached). cache_dir: where
    log-probabilities of a cached reference are kept (None: nowhere). model_source: what tells the
    start model from others of its folder.
    """

    beta: float = 0.1
    pref_loss: str = "sigmoid"
    label_smoothing: float = 0.0
    use_ref_model: bool | None = None
    ftx: float = 0.0
    reference: str | None = None
    cache_dir: str | None = None
    model_source: str = ""

    def __post_init__(self):
        keys = self.check_with()
        self.pref_loss, self.beta, self.ftx = keys.pref_loss, keys.pref_beta, keys.pref_ftx
        self.label_smoothing = keys.dpo_label_smoothing
        judge, needs = Judge(self), LOSSES[self.pref_loss].has_reference
        if self.reference not in (None, *REFERENCES):
            judge.refuse("reference", f"expected {', '.join(REFERENCES)}, or None", "cached")
        if self.use_ref_model not in (None, needs):
            reason = f"pref_loss {self.pref_loss} has {'a' if needs else 'no'} reference model"
            judge.refuse("use_ref_model", reason, "use_ref_model left out")
        judge.close()
        self.use_ref_model = needs

    def check_with(
        self, finetuning_type: Literal["full", "lora"] = "lora", modules_to_save=()
    ) -> FinetuningArguments:
        """The keys that mean the same, for such adapters. ConfigError by their rules."""
        return FinetuningArguments(
            stage="dpo",
            finetuning_type=finetuning_type,
            modules_to_save=list(modules_to_save),
            pref_loss=self.pref_loss,
            pref_beta=self.beta,
            pref_ftx=self.ftx,
            dpo_label_smoothing=self.label_smoothing,
            ref_model=self.reference,
        )


def choose_reference(config: DPOConfig, model, ref_model) -> str | None:
    """The kind of reference, None for a loss without one. ConfigError for one that cannot be."""
    if not config.use_ref_model:
        if ref_model is not None:
            reason = f"pref_loss {config.pref_loss} has no reference model"
            refuse("ref_model", "a model", reason, "leave ref_model out")
        return None
    spec = lora.spec_of(model)
    by_default = "adapter" if spec is not None and not spec.modules_to_save else "cached"
    kind = config.reference or ("model" if ref_model is not None else by_default)
    if (kind == "model") != (ref_model is not None):
        reason = f"expected {'a' if kind == 'model' else 'no'} ref_model"
        refuse("reference", kind, reason, "reference: model, with a ref_model, or neither")
    if spec is None:
        config.check_with("full")
    else:
        config.check_with("lora", spec.modules_to_save)
    return kind
