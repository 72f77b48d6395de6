"""Work of the slowest rank over the mean, for packed rows of real lengths.

    python -m tests.tools.balance FILE.jsonl [--cutoff 8192] [--model FOLDER]

Arithmetic only: FLOPs of rows, dealt by the plan of batches of a run. Lengths are those of the
texts of a record, in bytes / 4 (tokens of English), drawn with replacement where the file is
short. Data parallel ranks: one row a micro-batch, and the mean over steps. Context parallel
ranks: attention of whole rows, and the tokens that padding adds.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

BYTES_PER_TOKEN = 4
QWEN3_8B = dict(
    model_type="qwen3",
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
RANKS = (2, 8, 64)
MICRO_BATCHES = (1, 2, 4, 8)
CONTEXT_RANKS = (2, 4, 8)
STEPS = 20  # of the largest global batch


def read_lengths(path: Path) -> np.ndarray:
    """Tokens of each record of a .json or .jsonl file, at least 1."""
    text = path.read_text(encoding="utf-8")
    records = map(json.loads, filter(None, text.splitlines()))
    if path.suffix == ".json":
        records = json.loads(text)
    return np.array([max(1, _text_bytes(record) // BYTES_PER_TOKEN) for record in records])


def _text_bytes(value) -> int:
    """Bytes of all texts in a record."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_text_bytes, value))


def make_packs(lengths: np.ndarray, cutoff: int) -> list[np.ndarray]:
    """Document lengths of each packed row, enough rows for STEPS."""
    from mca_lite.data_batches import best_fit

    rows = STEPS * max(RANKS) * max(MICRO_BATCHES)
    draws = np.random.default_rng(0)
    count = int(rows * cutoff / np.minimum(lengths, cutoff).mean())
    drawn = np.minimum(draws.choice(lengths, count), cutoff)
    return [drawn[pack] for pack in best_fit(drawn, cutoff)]


def slowest_of_steps(costs: np.ndarray, weigh: np.ndarray | None, dp: int, count: int) -> float:
    """The slowest rank's cost over the mean one, the mean of steps. weigh: costs by which the rows
    are dealt, None: in their order."""
    from mca_lite.data_batches import BatchPlan

    plans = [BatchPlan(len(costs), 1, count, rank, dp, seed=0, costs=weigh) for rank in range(dp)]
    found = []
    for step in range(min(STEPS, plans[0].steps_per_epoch - 1)):  # the last one has fillers
        loads = [costs[np.array(plan.step(0, step))].sum() for plan in plans]
        found.append(max(loads) / np.mean(loads))
    return float(np.mean(found))


def context_balance(packs: list[np.ndarray], cp: int) -> tuple[float, float]:
    """(the slowest rank's attention over the mean, tokens of padding over those of documents) of
    rows cut for cp ranks; the slowest of all rows."""
    from mca_lite.batch import zigzag

    multiple = 2 * cp
    worst = 0.0
    tokens = sum(int(pack.sum()) for pack in packs)
    padded = 0
    for pack in packs:
        sizes = -(-pack // multiple) * multiple
        borders = (0, *itertools.accumulate(sizes.tolist()))
        # a position sees those of its document up to itself
        seen = np.concatenate([np.arange(1, size + 1) for size in sizes])
        work = [seen[zigzag(borders, cp, rank).numpy()].sum() for rank in range(cp)]
        worst = max(worst, max(work) / np.mean(work))
        padded += borders[-1]
    return worst, padded / tokens - 1


def main() -> None:
    from transformers import AutoConfig

    from mca_lite.data_batches import work_of
    from mca_lite.log import model_sizes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--cutoff", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--model", help="folder of a config.json; none: sizes of Qwen3 8B")
    options = parser.parse_args()
    config = AutoConfig.for_model(**QWEN3_8B)
    if options.model:
        config = AutoConfig.from_pretrained(options.model)
    sizes = model_sizes(config)
    lengths = read_lengths(options.file)
    packs = make_packs(lengths, options.cutoff)
    tokens, squares = np.array([work_of(pack[None])[0] for pack in packs]).T
    costs = sizes.cost(tokens, squares)
    share = sizes.core * squares.sum() / costs.sum()
    print(
        f"{len(lengths):,} records of {lengths.mean():,.0f} tokens, the longest {lengths.max():,}; "
        f"{len(packs):,} rows of {options.cutoff:,}; attention is {100 * share:.1f} % of the work, "
        f"the dearest row {costs.max() / costs.mean():.3f} of the mean"
    )
    print(f"\n{'dp':>4} {'micro-batches':>14} {'in order':>9} {'dealt':>7}   slowest over mean")
    for dp, count in itertools.product(RANKS, MICRO_BATCHES):
        in_order = slowest_of_steps(costs, None, dp, count)
        dealt = slowest_of_steps(costs, costs, dp, count)
        print(f"{dp:4} {count:14} {in_order:9.4f} {dealt:7.4f}")
    print(f"\n{'cp':>4} {'attention':>10} {'padding':>8}")
    for cp in CONTEXT_RANKS:
        worst, padding = context_balance(packs[:: len(packs) // 200 or 1], cp)
        print(f"{cp:4} {worst:10.4f} {100 * padding:7.2f}%")


if __name__ == "__main__":
    main()
