"""The key log_each_dataset, and its rule."""

from dataclasses import dataclass

from .args_values import ArgumentGroup, flag
from .errors import Rule
from .tables import register_keys


@dataclass(kw_only=True)
class DatasetsArguments(ArgumentGroup):
    """Configuration key for logging the loss of each dataset."""

    log_each_dataset: bool = flag("log the training loss of each name in `dataset`: loss/<name>")


register_keys(
    "datasets",
    DatasetsArguments,
    rules=(
        Rule(
            "log_each_dataset stage=pt streaming",
            "a stream joins texts of several datasets in one row",
            "streaming: false",
        ),
    ),
)
