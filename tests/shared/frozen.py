"""Models with frozen weights: by the keys of finetuning, and by names in plain torch."""

import re


def by_pattern(pattern: str):
    """Freeze in plain torch the parameters without the pattern in their names."""

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.search(pattern, name) is not None)
        return model

    return freeze


def by_keys(keys: dict):
    """Freeze by the keys of finetuning, as a run does."""

    def freeze(model):
        from mca_lite.errors import Judge
        from mca_lite.finetuning import Finetuning, plan_frozen
        from mca_lite.part_scores import objective_keys

        given = objective_keys(**{"stage": "sft", **keys})
        judge = Judge(given)
        trained = plan_frozen(model, given, judge)
        judge.close()
        return Finetuning(trained, given.finetuning_type).place(model)

    return freeze
