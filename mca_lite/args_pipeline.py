"""Pipeline layouts in megatron's syntax: stages between |, with the embedding E, layers t and the loss L."""

import re


def layout_stages(layout: str) -> list[str]:
    """The stages of a layout in megatron's syntax, repeats written out: "Et*2|tL" -> ["Ett", "tL"]."""
    text = layout.replace(",", "")
    for pattern in (
        r"\(([^)]+)\)\*(\d+)",
        r"(.)\*(\d+)",
    ):  # groups before single letters, as megatron does
        text = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")


def layout_defect(layout: str, pp: int) -> str | None:
    """Why a layout does not work for pp pipeline ranks, whatever the model; None where it does."""
    stages = layout_stages(layout)
    letters = "".join(stages)
    if set(letters) - set("EtL"):
        return f"unknown letters {''.join(sorted(set(letters) - set('EtL')))!r}: E is the embedding, t a layer, L the loss"
    if (
        letters.count("E") != 1
        or letters.count("L") != 1
        or not letters.startswith("E")
        or not letters.endswith("L")
    ):
        return "it must begin with the embedding E and end with the loss L, once each"
    if len(stages) % pp != 0:
        return f"its {len(stages)} stages cannot be shared evenly by {pp} pipeline ranks"
    return None


def balanced_layout(num_layers: int, pp: int, vpp: int | None = None) -> str:
    """A layout of pp x vpp stages in megatron's syntax that holds every layer: stages differ by one at most, ranks
    too, and those of the embedding and the loss are the last to get one more. Stage s lies on rank s % pp.

    Raises ValueError where there are fewer layers than stages.
    """
    stages = pp * (vpp or 1)
    if num_layers < stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {stages} stages: set pipeline sizes whose product is at most that"
        )
    counts = [num_layers // stages] * stages
    extra_on_rank = [0] * pp
    free = list(range(stages))

    def cost(stage: int) -> tuple:
        rank = stage % pp
        return (
            extra_on_rank[rank],
            rank == pp - 1,
            rank == 0,
            stage == stages - 1,
            stage == 0,
            stage,
        )

    for _ in range(num_layers % stages):
        best = min(free, key=cost)
        free.remove(best)
        counts[best] += 1
        extra_on_rank[best % pp] += 1
    texts = ["t" if count == 1 else f"t*{count}" for count in counts]
    return "E" + "|".join(texts) + "L"
