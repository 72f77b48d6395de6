"""Keys, rules and table rows of stage dpo: training on preference pairs. Also the table of its
losses.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from .args_values import ArgumentGroup, amount, arg, flag, optional
from .errors import Judge, Rule
from .part_scores_keys import REFERENCE_RULES, check_preferences
from .tables import PAIRS, refuse_taken, register_keys, register_objective

# -- losses

METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "sft_loss",
)


class PreferenceLoss(NamedTuple):
    """A preference loss that `pref_loss: <name>` selects: one row of LOSSES.

    formula(responses, config): returns losses [P] of P pairs, or (losses, rewards of chosen,
    rewards of rejected) with detached rewards; a string "module:function" names one in this
    package. responses: part_dpo_losses.Responses; config: a DPOConfig.

    has_reference: True if the loss compares with a reference model. keys: configuration keys that
    the loss reads. pref_ftx, pair_weight, use_weighting and ld_alpha are not listed: they work with
    all losses that do not exclude them. required: keys that must not be 0. excludes: keys that the
    loss cannot be combined with.

    of_batch: for a formula that needs numbers from all N pairs of a global batch, such as a mean;
    otherwise None. It is a function of (responses, config, memory), or its "module:function", with
    two results, each a number or a tensor [N]. The formula finds those of its pairs in
    responses.of_batch [P, 2]. memory: a dict that lasts from step to step. looks_ahead: True if
    of_batch reads the policy's log-probabilities, which takes one more forward pass per step."""

    formula: Callable[[Any, Any], Any] | str
    has_reference: bool
    keys: tuple[str, ...] = ("pref_beta",)
    required: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    of_batch: Callable[[Any, Any, dict[str, Any]], tuple[Any, ...]] | str | None = None
    looks_ahead: bool = False


LOSSES: dict[str, PreferenceLoss] = {}


def register_loss(name: str, formula: Callable[[Any, Any], Any], **fields: Any) -> None:
    """Add a preference loss: `pref_loss: <name>` then trains with `formula`. Call it on every rank
    before the configuration is parsed.

    fields: further fields of PreferenceLoss; has_reference is required. ValueError if the name
    exists, TypeError if `formula` cannot be called.
    """
    if not callable(formula):
        raise TypeError(f"pref_loss {name}: expected a function of responses, got {formula!r}")
    refuse_taken("pref_loss", name, LOSSES)
    LOSSES[name] = PreferenceLoss(formula, **fields)


_BETA = ("pref_beta",)
_SMOOTHED = ("pref_beta", "dpo_label_smoothing")
_OF_SCORES = ("pref_beta", "pair_margin", "f_divergence_type", "f_alpha_divergence_coef")
_NO_PREFERENCE = ("use_weighting",)


def _add_losses() -> None:
    """Fill the table LOSSES with this package's preference losses. Their formulas are in
    part_dpo_losses."""

    def add(name: str, keys: tuple[str, ...], of_batch: str = "", **fields: Any) -> None:
        fields.setdefault("has_reference", True)
        if of_batch:
            fields["of_batch"] = f"part_dpo_losses:{of_batch}"
        LOSSES[name] = PreferenceLoss(f"part_dpo_losses:{name}", keys=keys, **fields)

    add("sigmoid", (*_OF_SCORES, "dpo_label_smoothing"))
    add("sigmoid_norm", _OF_SCORES)
    add("hinge", _OF_SCORES)
    of_ipo = ("pref_beta", "f_divergence_type", "f_alpha_divergence_coef")
    add("ipo", of_ipo, required=_BETA)
    add("robust", (*_OF_SCORES, "dpo_label_smoothing"))
    add("exo_pair", (*_OF_SCORES, "dpo_label_smoothing"), required=("dpo_label_smoothing",))
    add("discopop", (*_OF_SCORES, "discopop_tau"))
    add("nca_pair", _BETA)
    add("bco_pair", _BETA, "bco_shift", looks_ahead=True)
    LOSSES["bco_pair_unshifted"] = PreferenceLoss("part_dpo_losses:bco_pair", True)
    add("sppo_hard", _BETA, required=_BETA)
    add("apo_zero", _BETA)
    add("apo_down", _BETA)
    add("kto_pair", _BETA, "kl_of_batch", looks_ahead=True)
    of_others = dict(looks_ahead=True, excludes=("use_weighting", "pair_weight"))
    add("aot", _SMOOTHED, "sorted_references", **of_others)
    add("aot_unpaired", _SMOOTHED, "sorted_partners", **of_others)
    # losses with token terms cannot be weighted by the policy or shortened by ld_alpha
    add("orpo", _BETA, has_reference=False, excludes=("use_weighting", "ld_alpha"))
    add("simpo", (*_SMOOTHED, "pair_margin", "simpo_gamma"), has_reference=False)
    add(
        "cpo",
        (*_SMOOTHED, "pair_margin", "cpo_alpha"),
        "pairs_per_token",
        has_reference=False,
        excludes=_NO_PREFERENCE,
    )
    add("sft", _BETA, "pairs_per_token", has_reference=False, excludes=_NO_PREFERENCE)


_add_losses()


def has_reference(names: Iterable[str]) -> bool:
    """True if any of these preference losses compares with a reference model."""
    return any(LOSSES[name].has_reference for name in names)


# -- keys


@dataclass(kw_only=True)
class PreferenceArguments(ArgumentGroup):
    """Configuration keys of preference training, on pairs of a chosen and a rejected answer."""

    pref_loss: list[str] = arg(
        ["sigmoid"],
        "stage dpo: preference losses, added up; sigmoid is DPO; configs/PREFERENCES.md lists all",
        choices=LOSSES,
    )
    pref_loss_weights: list[float] | None = optional(
        "weight of each loss in pref_loss (None: 1 each)"
    )
    pref_ftx: float = amount(
        0.0, "weight of an added SFT loss: the mean token loss of the chosen answer"
    )
    dpo_label_smoothing: float = amount(0.0, "assumed fraction of wrong preferences", high=0.5)
    simpo_gamma: float = amount(0.5, "simpo: margin between the rewards of chosen and rejected")
    cpo_alpha: float = amount(1.0, "cpo: weight of the chosen answers' token loss")
    discopop_tau: float = arg(0.05, "discopop: temperature of its sigmoids", above=0)
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        arg("reverse_kl", "f-DPO: divergence from the reference, in losses that read it")
    )
    f_alpha_divergence_coef: float = arg(
        0.5, "alpha of alpha_divergence: 1 is reverse_kl, 0 is forward_kl", low=-10, high=10
    )
    ld_alpha: float | None = amount(
        None, "LD-DPO: weight of tokens beyond the shorter answer's length (None: 1)", high=1
    )
    use_weighting: bool = flag("WPO: weigh pairs by how likely the model is to give both answers")


_KEYS = {item.name: item.name for item in fields(PreferenceArguments)}
_KEYS |= {
    "pref_beta": "beta",
    "pref_ftx": "ftx",
    "dpo_label_smoothing": "label_smoothing",
    "ref_model": "reference",
}
_DIVERGENCE = Rule(
    "!f_alpha_divergence_coef=0.5 !f_divergence_type=alpha_divergence",
    "no effect, since f_divergence_type is not alpha_divergence",
    "f_divergence_type: alpha_divergence",
)


def _check_excludes(a: Any, judge: Judge) -> None:
    """Check that no key is set with which a loss in pref_loss cannot be combined; Problems are
    added to `judge` (which collects them). a: the keys of the stage, or of all groups."""
    for name in a.pref_loss:
        for key in LOSSES[name].excludes:
            reason = f"pref_loss {name} has a term of single tokens, or of answers of several pairs"
            # 0 is a value of ld_alpha
            is_unset = getattr(a, key, None) == getattr(PreferenceArguments, key, None)
            judge.expect(is_unset, f"{key} pref_loss", reason, f"{key} left out")


def _check_pairs(a: Any, judge: Judge) -> None:
    """Check the configuration of a preference run, with the keys of all groups (`a`). Problems are
    added to `judge` (which collects them)."""
    check_preferences(a, judge)
    _check_excludes(a, judge)
    judge.expect(
        a.pair_margin is None or "pair_margin" in _keys_of(a.pref_loss),
        "pair_margin pref_loss",
        f"no effect, since pref_loss is {', '.join(a.pref_loss)}",
        "pair_margin left out",
    )


def _describe_preferences(keys: Any) -> str:
    """Text for the start summary: the preference losses, beta, SFT term and label smoothing of a
    run."""
    losses = ", ".join(keys.pref_loss)
    if keys.pref_loss_weights:
        losses += f" weighing {', '.join(f'{weight:g}' for weight in keys.pref_loss_weights)}"
    text = f"pref_loss {losses}, beta {keys.pref_beta:g}, sft term {keys.pref_ftx:g}"
    return f"{text}, label smoothing {keys.dpo_label_smoothing:g}"


def _keys_of(names: Iterable[str]) -> set[str]:
    """The configuration keys that the named preference losses read, from the table LOSSES."""
    return {key for name in names for key in LOSSES[name].keys}


def _check_preference_keys(a: Any, judge: Judge) -> None:
    """Check the keys of preference training, such as the number of loss weights, and that keys
    which the chosen losses do not read are left out. Problems are added to `judge` (which collects
    them). a: the keys of the stage."""
    names = a.pref_loss
    listed = ", ".join(names)
    judge.expect(
        len(names) == len({*names}) > 0,
        "pref_loss",
        "expected at least one loss, and each once",
        "pref_loss: sigmoid",
    )
    weights = a.pref_loss_weights
    judge.expect(
        weights is None or (len(weights) == len(names) and min(weights, default=1) > 0),
        "pref_loss_weights pref_loss",
        f"expected a number above 0 for each of {listed}",
        f"pref_loss_weights: {[1.0] * len(names)}",
    )
    judge.expect(
        has_reference(names) or a.ref_model is None,
        "ref_model pref_loss",
        f"pref_loss {listed} has no reference model",
        "ref_model left out",
    )
    judge.apply((*REFERENCE_RULES, _DIVERGENCE))
    for key in _keys_of(LOSSES) - _keys_of(names):
        judge.expect(
            key not in a.changed,
            f"{key} pref_loss",
            f"no effect, since pref_loss is {listed}",
            f"{key} left out",
        )
    judge.expect(
        a.dpo_label_smoothing < 0.5 or "robust" not in names,
        "dpo_label_smoothing pref_loss",
        "pref_loss robust divides by 1 - 2 * dpo_label_smoothing",
        "dpo_label_smoothing: 0.4",
    )
    for name in names:
        for key in LOSSES[name].required:
            reason = f"pref_loss {name} divides by it, or takes its logarithm"
            judge.expect(getattr(a, key), f"{key} pref_loss", reason, f"{key}: 1e-3")
    _check_excludes(a, judge)


register_keys("dpo", PreferenceArguments, of_stages=True)
register_objective(
    "dpo",
    records=PAIRS,
    trainer="part_dpo:DPOTrainer",
    metrics=METRICS,
    keys=_KEYS,
    check_keys=_check_preference_keys,
    check_run=_check_pairs,
    describe=_describe_preferences,
)
