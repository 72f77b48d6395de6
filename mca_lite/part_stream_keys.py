"""Keys and rules of streaming: the training set is tokenised while it is read."""

from dataclasses import dataclass

from .args_rules_training import harmless_need
from .args_values import ArgumentGroup, count, flag
from .errors import Rule
from .tables import register_keys


@dataclass(kw_only=True)
class StreamArguments(ArgumentGroup):
    """Streaming.

    The configuration keys for a training set that is tokenised while it is read.
    """

    streaming: bool = flag(
        "pt, sft: tokenise `dataset` on the fly, without a cache; needs max_steps"
    )
    buffer_size: int = count(16384, "streaming: records in the shuffle buffer")


register_keys(
    "stream",
    StreamArguments,
    rules=(
        Rule(
            "val_size streaming",
            "the samples of a stream are not chosen ahead",
            "eval_dataset: <files, or names>",
        ),
        Rule(
            "max_steps=-1 streaming",
            "the number of steps an epoch is unknown before the data is read",
            "max_steps: 1000",
        ),
        Rule("eval_strategy=epoch streaming", "a stream has no epochs", "eval_strategy: steps"),
        Rule("save_strategy=epoch streaming", "a stream has no epochs", "save_strategy: steps"),
    ),
    needs=(
        harmless_need("buffer_size", "streaming", "streaming: true"),
        harmless_need(
            "preprocessing_num_workers overwrite_cache", "!streaming", "streaming: false"
        ),
    ),
)
