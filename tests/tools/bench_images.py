"""Training speed on one GPU with pictures, side by side: Qwen2.5-VL-3B's shape, pictures of 1,024 x
768 pixels, random weights, tokens and pixels.

    python -m tests.tools.bench_images [NAME ...]        some of the cases, or of the trainers

A row is a picture (999 tokens) and a text of random length; rows are padded to the longest of a
micro-batch, or packed. "frozen": the tower has no gradient; "trained": all weights have one. The
rival is Hugging Face's Trainer with Liger kernels, with weights and moments in bf16 (liger), and
with float32 weights and products in bf16 (liger-float32), the precision of this project. The rival
gets the rows padded: it has no packed form of them. Its loss is the mean of micro-batches' means:
transformers' models with pictures take no count of a step's tokens. Tokens are real ones: text,
and a picture's.
TINY=1 in the environment runs the same at a size for a CPU, without Liger.
"""

import contextlib
import io
import itertools
import os
import sys
import tempfile

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a fork may start CUDA afterwards

import numpy as np
import torch

from mca_lite.part_pictures_data import rope_positions

from . import bench_gpu
from .bench_gpu import Clock, peak_gib

TINY = bench_gpu.TINY
GRID = (1, 54, 74)  # patches of 14 x 14 of a picture of 1,024 x 768
CHANNELS = 1176
IMAGE = 151655
TEXT = dict(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]),
)
VISION = dict(
    depth=32,
    hidden_size=1280,
    num_heads=16,
    intermediate_size=3420,
    out_hidden_size=2048,
    fullatt_block_indexes=[7, 15, 23, 31],
)
if TINY:
    GRID = (1, 4, 8)
    IMAGE = 500
    TEXT |= dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    TEXT |= dict(num_attention_heads=4, num_key_value_heads=2)
    TEXT["rope_parameters"] = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3])
    VISION |= dict(depth=2, hidden_size=32, num_heads=4, intermediate_size=48, out_hidden_size=64)
    VISION |= dict(fullatt_block_indexes=[1])
STEPS, SKIP = 6, 3
ROWS = 16  # a step
# mbs: rows, or packs of LENGTH tokens, a micro-batch
LENGTH = 4096
CASES = {
    "frozen": dict(mbs=4, trained=False),
    "trained": dict(mbs=4, trained=True),
    "frozen, packed": dict(mbs=1, trained=False, packed=True),
    "trained, packed": dict(mbs=1, trained=True, packed=True),
}
TRAINERS = {"ours": {}, "liger": {}, "liger-float32": dict(float32=True)}


def config():
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=dict(TEXT, model_type="qwen2_5_vl_text"),
        vision_config=VISION,
        image_token_id=IMAGE,
        tie_word_embeddings=True,
    )


def documents() -> list[dict]:
    """ROWS documents: a picture's tokens after a few of text, and an answer; pixels with them."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    grids = torch.tensor([GRID])
    count = GRID[1] * GRID[2] // 4
    made = []
    for length in rng.integers(100, 900, ROWS) if not TINY else rng.integers(5, 12, ROWS):
        text = torch.from_numpy(rng.integers(0, IMAGE - 100, length + 1))
        ids = torch.cat([text[:4], torch.full((count,), IMAGE), text[4:]])
        labels = ids.masked_fill(ids == IMAGE, -100)
        inputs = ids[:-1]
        axes = rope_positions(inputs, grids, IMAGE, 2)
        columns = dict(zip(("rope_t", "rope_h", "rope_w"), axes, strict=True))
        pixels = torch.randn(GRID[1] * GRID[2], CHANNELS, generator=generator)
        made.append(
            dict(
                input_ids=inputs,
                labels=labels[1:],
                pixel_values=pixels,
                image_grid_thw=grids,
                **columns,
            )
        )
    return made


def train_ours(mbs: int, trained: bool, packed: bool = False):
    from mca_lite import McaTrainer, TrainingArguments, parallel
    from mca_lite.callbacks import TrainerCallback
    from mca_lite.data_batches import best_fit
    from mca_lite.model import build_chunks
    from mca_lite.model_config import AutoConfig

    folder = tempfile.mkdtemp()
    config().save_pretrained(folder)
    data = [[document] for document in documents()]
    if packed:
        lengths = np.array([len(sample[0]["input_ids"]) for sample in data])
        data = [
            [data[i][0] for i in pack] for pack in best_fit(lengths, max(LENGTH, lengths.max()))
        ]
    clock = Clock()

    class Ticks(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            clock.begin()

        def on_step_end(self, *args, **kwargs):
            clock.tick()

    args = TrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=mbs,
        gradient_accumulation_steps=len(data) // mbs,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        disable_tqdm=True,
        sequence_packing=packed,
    )
    parallel.initialize(args)
    models = build_chunks(AutoConfig.from_pretrained(folder, args))
    bench_gpu.fill(models.named_parameters())
    for name, parameter in models.named_parameters():
        if "vision_model." in name and not trained:
            parameter.requires_grad = False
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = McaTrainer(models, args, train_dataset=data, callbacks=[Ticks()], shuffle=False)
        trainer.train()
    return clock, trainer.state.log_history


def train_theirs(mbs: int, trained: bool, packed: bool = False, float32: bool = False):
    import transformers

    transformers.utils.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    clock = Clock()
    with torch.device("cuda" if cuda else "cpu"):
        dtype = torch.bfloat16 if cuda and not float32 else torch.float32
        model = transformers.AutoModelForImageTextToText.from_config(config(), dtype=dtype)
    bench_gpu.fill(model.named_parameters())
    model.model.visual.requires_grad_(trained)
    model.config.use_cache = False

    def collate(rows):
        # the model shifts labels itself: it gets each document's last token too
        ids = [torch.cat([row["input_ids"], row["labels"][-1:]]) for row in rows]
        labels = [torch.cat([torch.tensor([-100]), row["labels"]]) for row in rows]
        axes = [rope_positions(one, torch.tensor([GRID]), IMAGE, 2).T for one in ids]
        pad = torch.nn.utils.rnn.pad_sequence
        pictures = {
            name: torch.cat([row[name] for row in rows])
            for name in ("pixel_values", "image_grid_thw")
        }
        return dict(
            pictures,
            input_ids=pad(ids, batch_first=True),
            labels=pad(labels, batch_first=True, padding_value=-100),
            position_ids=pad(axes, batch_first=True).permute(2, 0, 1),
        )

    rows = documents()
    more = dict(train_sampling_strategy="sequential")
    return clock, bench_gpu.train_theirs(
        model, rows, collate, clock, mbs, ROWS, STEPS, True, **more
    )


def measure(case: str, trainer: str, label: str) -> dict:
    """Train one case and return its line."""
    keys = CASES[case]
    if trainer == "ours":
        clock, history = train_ours(**keys)
    else:
        clock, history = train_theirs(**{**keys, "mbs": 4}, **TRAINERS[trainer])
    median = clock.median(SKIP)
    logs = [log for log in history if "loss" in log]
    tokens = sum(len(document["input_ids"]) for document in documents())
    return dict(
        case=f"pictures {case}",
        trainer=trainer,
        **clock.rates(tokens, SKIP),
        pictures_per_second=round(ROWS / median, 2),
        peak_gib=peak_gib(),
        step_ms=[round(1e3 * t) for t in clock.times],
        losses=[round(float(log["loss"]), 5) for log in logs],
        grad_norms=[round(float(log["grad_norm"]), 4) for log in logs],
    )


def main(names: list[str]) -> int:
    cases = [name for name in CASES if name in names] or CASES
    trainers = [name for name in TRAINERS if name in names] or TRAINERS
    import transformers.trainer  # noqa: F401

    import mca_lite.trainer  # noqa: F401

    bench_gpu.measure = measure  # of each process, a fork
    for case, trainer in itertools.product(cases, trainers):
        if trainer == "ours" or not CASES[case].get("packed"):
            bench_gpu.in_a_child(case, trainer, "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
