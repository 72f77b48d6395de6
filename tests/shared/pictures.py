"""Tiny models with pictures, samples with random pixels, and their training in plain torch."""

import json
import re

import torch

from tests.shared import tiny
from tests.shared.files import changed
from tests.shared.training import train

IMAGE, VIDEO, START, END = 5, 6, 7, 8
MERGE = 2
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
TEXT = dict(tiny.SIZES, vocab_size=tiny.VOCAB, rope_parameters=ROPE)
TOWER = dict(depth=2, num_heads=2, patch_size=2, spatial_merge_size=MERGE)
# changes of the text's config, the tower's config
FAMILIES = {
    "qwen2_vl": ({}, dict(TOWER, embed_dim=16, hidden_size=32, mlp_ratio=2)),
    "qwen2_5_vl": (
        {},
        dict(
            TOWER,
            hidden_size=16,
            intermediate_size=24,
            out_hidden_size=32,
            fullatt_block_indexes=[1],
            window_size=8,
        ),
    ),
    "qwen3_vl": (
        dict(head_dim=8, rope_parameters={**ROPE, "mrope_section": [2, 1, 1]}),
        dict(
            TOWER,
            hidden_size=16,
            intermediate_size=24,
            out_hidden_size=32,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0, 1],
        ),
    ),
}
# sizes that tell a matrix of experts from its transpose
FAMILIES["qwen3_vl_moe"] = (
    dict(
        FAMILIES["qwen3_vl"][0],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        router_aux_loss_coef=0.0,
    ),
    FAMILIES["qwen3_vl"][1],
)
_QWEN3_TOWER = {k: v for k, v in FAMILIES["qwen3_vl"][1].items() if k != "deepstack_visual_indexes"}
DELTA_ROPE = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
FAMILIES["qwen3_5"] = (dict(tiny.DELTA, rope_parameters=DELTA_ROPE), _QWEN3_TOWER)
FAMILIES["qwen3_5_moe"] = (
    dict(
        tiny.DELTA,
        rope_parameters=DELTA_ROPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        router_aux_loss_coef=0.0,
    ),
    _QWEN3_TOWER,
)
# transformers counts 13 features for a chunk of 100 frames
HEARING = dict(
    d_model=16,
    encoder_layers=2,
    encoder_attention_heads=2,
    encoder_ffn_dim=24,
    num_mel_bins=8,
    n_window=50,
    n_window_infer=200,
    conv_chunksize=3,
    downsample_hidden_size=4,
    output_dim=32,
    max_source_positions=50,
)
HEARS = "qwen3_omni_moe_thinker"
FAMILIES[HEARS] = FAMILIES["qwen3_vl_moe"]
AUDIO_END, AUDIO_START, AUDIO = 3, 4, 9
GLM = "glm4v"
VIDEO_START, VIDEO_END = 3, 4  # of glm4v
GLM_ROPE = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
FAMILIES["glm4v"] = (
    dict(num_attention_heads=2, rope_parameters=GLM_ROPE),
    dict(
        TOWER,
        hidden_size=16,
        intermediate_size=24,
        out_hidden_size=32,
        image_size=8,
        hidden_act="silu",
    ),
)
CHANNELS = 3 * 2 * 2 * 2  # of a patch


def hf_config(family: str, tied: bool = False, tower: dict | None = None, **of_text):
    """A transformers config of 4 layers and a tower of 2. tower: changes of the tower's."""
    from transformers import AutoConfig

    text, vision = FAMILIES[family]
    of = "image" if family == "glm4v" else "vision"
    more = {f"{of}_start_token_id": START, f"{of}_end_token_id": END}
    if family == GLM:
        more |= {"video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END}
    if family == HEARS:
        more |= {
            "audio_config": HEARING,
            "audio_token_id": AUDIO,
            "audio_start_token_id": AUDIO_START,
        }
    return AutoConfig.for_model(
        family,
        text_config={**TEXT, **text, **of_text},
        vision_config={**vision, **(tower or {})},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=tied,
        **more,
    )


def save_model(folder, family: str, seed: int = 0, dtype=torch.float32, **changes) -> str:
    """Save a model with random weights, norms and biases too."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(hf_config(family, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(tiny.factor_of(name))
    model.to(dtype).save_pretrained(folder)
    return str(folder)


def document(
    generator,
    *pieces,
    is_timed: bool = False,
    seconds: float | None = None,
    per_second: float = 4.0,
    exact_times: bool = False,
    as_images: bool = False,
) -> dict:
    """A shifted document of pieces in their order: a number of random text tokens, the (height,
    width) of a picture in features, the (times, height, width) of a video, or a float, the number
    of frames of an audio.

    is_timed: two tokens of text stand before each time of a video. seconds: between times, for a
    model whose positions count per_second for a second, not rounded if exact_times. as_images: each
    time of a video is a picture, with two tokens of text after it.
    """
    from mca_lite.part_audio import num_tokens
    from mca_lite.part_pictures_data import COLUMNS_OF, rope_positions

    frames: list[int] = []

    def text(count: int) -> list[int]:
        return torch.randint(10, tiny.VOCAB, (count,), generator=generator).tolist()

    ids: list[int] = []
    runs, steps, grids = [], [], {"image": [], "video": []}
    for piece in pieces:
        if isinstance(piece, int):
            ids += text(piece)
            continue
        if isinstance(piece, float):
            frames.append(int(piece))
            ids += [AUDIO_START] + [AUDIO] * num_tokens(frames[-1], 50) + [AUDIO_END]
            continue
        *times, height, width = piece
        kind, token = ("video", VIDEO) if times else ("image", IMAGE)
        grid = [*(times or [1]), MERGE * height, MERGE * width]
        grids[kind].append(grid)
        if times and as_images:
            ids += [VIDEO_START]
            for _ in range(grid[0]):
                ids += [START] + [IMAGE] * (height * width) + [END] + text(2)
            runs += [[1, *grid[1:]]] * grid[0]
            grids["image"] += [[1, *grid[1:]]] * grid[0]
            grids["video"].pop()
            ids += [VIDEO_END]
        elif times and is_timed:
            ids += [START]
            for _ in range(grid[0]):
                ids += text(2) + [START] + [token] * (height * width) + [END]
                runs.append([1, *grid[1:]])
            ids += [END]
        else:
            ids += [START] + [token] * (grid[0] * height * width) + [END]
            runs.append(grid)
        step = per_second * seconds if times and seconds else 1.0
        steps += [step] * (len(runs) - len(steps))
    ids = torch.tensor(ids)
    is_placeholder = (ids == IMAGE) | (ids == VIDEO) | (ids == AUDIO)
    labels = torch.where(is_placeholder | (ids == START), -100, ids)[1:]
    labels[:2] = -100
    out = dict(input_ids=ids[:-1], labels=labels)
    runs = torch.tensor(runs, dtype=torch.long)
    positions = rope_positions(ids[:-1], runs, (IMAGE, VIDEO), MERGE, steps, exact_times)
    out |= dict(zip(("rope_t", "rope_h", "rope_w"), positions, strict=True))
    for kind, (pixels, name) in COLUMNS_OF.items():
        if grids[kind]:
            out[name] = torch.tensor(grids[kind])
            patches = int(out[name].prod(1).sum())
            out[pixels] = torch.randn(patches, CHANNELS, generator=generator)
    if frames:
        out["audio_lengths"] = torch.tensor(frames)
        out["audio_grid"] = torch.tensor([[1, MERGE, MERGE * num_tokens(n, 50)] for n in frames])
        bins = HEARING["num_mel_bins"]
        out["input_features"] = torch.randn(sum(frames), bins, generator=generator)
    if grids["video"] and seconds:
        out["second_per_grid_ts"] = torch.full((len(grids["video"]),), seconds)
    return out


def of_videos(family: str) -> dict:
    """The arguments of document() for a family's videos."""
    how: dict = dict(is_timed=family.startswith("qwen3"))
    if family == "qwen2_5_vl":
        how["seconds"] = 0.8  # times at 0, 1.6, 3.2 ...
    if family == HEARS:
        # at 0, 7.5, 15 ..., longer than the sides of a video
        how = dict(seconds=0.3, per_second=25.0, exact_times=True)
    if family == GLM:
        how = dict(as_images=True)
    return how


def glm_columns(ids: torch.Tensor, columns: dict) -> dict:
    """What glm4v of transformers takes of a document: its videos apart from its pictures, of which
    it takes one kind.
    """
    types = (ids == IMAGE).int()
    if not bool((ids == VIDEO_START).any()):
        return columns | {"mm_token_type_ids": types}
    starts, ends = (torch.nonzero(ids[0] == i)[:, 0] for i in (VIDEO_START, VIDEO_END))
    borders = zip(starts.tolist(), ends.tolist(), strict=True)
    counts = [int((ids[0, first:last] == START).sum()) for first, last in borders]
    grids = [each[0] for each in columns["image_grid_thw"].split(counts)]
    grids = [torch.tensor([n, *grid[1:].tolist()]) for n, grid in zip(counts, grids, strict=True)]
    pixels = columns["pixel_values"]
    return dict(
        pixel_values_videos=pixels,
        video_grid_thw=torch.stack(grids).to(ids.device),
        mm_token_type_ids=2 * types,
    )


# columns of pictures and videos, which transformers' models take as they are
WHOLE = (
    *("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
    "second_per_grid_ts",
    *("input_features", "audio_lengths", "audio_grid"),
)


def row_of(document: dict) -> dict:
    """A batch of one document."""
    return {name: x if name in WHOLE else x[None] for name, x in document.items()}


SHAPES = [
    [(3, (2, 2), 5), (7, (1, 3), 4), (9,), (6,)],
    [((2, 3), 4), (3, (2, 1), 2, (2, 2), 5), (2, (4, 2), 6), (8,)],
    [(7,), (5,), (11,), (9,)],
    [(5,), (6, (2, 2), 3), (4, (3, 2), 3, (1, 1), 4), (5, (2, 2), 3)],
    [(4, (2, 2), (2, 1), 3), (9,), (3, (5, 1), 4), (2, (2, 3), 5)],
]


def samples(first: int = 0, seed: int = 1, shapes=SHAPES, **how) -> list[dict]:
    """Twenty documents, five steps of four from the one with number `first`: the first micro-batch
    of two has pictures and the second none, or each some; step 2 has no picture at all. how: of
    document()."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes[first:] + shapes[:first]
    return [document(generator, *pieces, **how) for step in shapes for pieces in step]


# constant rates: the plain loop below has no schedule
EPSILON = 1e-4  # a smaller one amplifies the rounding of near-zero gradients
KEYS = dict(
    steps=5,
    adam_epsilon=EPSILON,
    lr_scheduler_type="constant",
    lr_scheduler_kwargs={},
    warmup_steps=0,
)


def renamed(path: str, folder) -> str:
    """A copy of a model with its tensors under the other names: those of transformers' modules, or
    of older files."""
    older = {"model.visual.": "visual.", "model.language_model.": "model."}

    def change(values: dict) -> None:
        if "model.embed_tokens.weight" in values:
            pairs = [(new, old) for old, new in older.items()]
        else:
            pairs = list(older.items())
        for name in list(values):
            before, after = next((p for p in pairs if name.startswith(p[0])), ("", ""))
            values[after + name.removeprefix(before)] = values.pop(name)

    return changed(path, folder, change)


def flat(path: str, folder) -> str:
    """A copy of a model whose config.json has the text's keys at its top, as on the hub."""
    changed(path, folder, lambda values: None)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    return str(folder)


def train_ours(path: str, out: str, **keys) -> list:
    """(loss, grad norm) of each step on megatron-core; the model exported to out."""
    return train(path, out, **{**KEYS, "export": True, "data": samples(), **keys})


def train_plain(path: str, out: str, adapt=None, data=None, device="cpu") -> list:
    """The same of transformers' model on one document at a time, in plain torch. adapt: what is
    done to the model before; it returns the model to save. data: in place of samples()."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    model.to(device).train()
    saved = adapt(model) if adapt is not None else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        dict(params=[p for p in trained if p.dim() != 1], weight_decay=0.1),
        dict(params=[p for p in trained if p.dim() == 1], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=EPSILON)
    data = [{name: x.to(device) for name, x in one.items()} for one in data or samples()]
    curve = []
    for first in range(0, len(data), 4):
        step = data[first : first + 4]
        count = sum(int((d["labels"] != -100).sum()) for d in step)
        total = 0.0
        for d in step:
            loss = loss_of(model, d) / count
            if loss.requires_grad:  # not that of text, if the tower alone is trained
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((total, float(norm)))
    saved.save_pretrained(out)
    return curve


# of attention, linear attention, MLPs and shared experts
LINEARS = r"model\.language_model\..*\.((q|k|v|o|gate|up|down|out)_proj|in_proj_(qkv|z|a|b))"


# those of the text, of the vision tower and the projector behind it, and of the audio tower
EVERY_LINEAR = (
    rf"{LINEARS}|model\.visual\.(blocks|merger(_list)?|deepstack_merger_list)\..*"
    r"(qkv|proj|fc\d|mlp\.[02])|model\.audio_tower\.(.*_proj|.*fc\d|conv_out|proj\d)"
)


def with_peft(folder: str, model, targets: str = LINEARS):
    """The model with PEFT's adapters on linears, those of its text unless `targets` names others,
    saved to `folder`."""
    from peft import LoraConfig, get_peft_model

    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    # where transformers fuses the files' experts, PEFT takes a pattern as names of leaves
    names = [name for name in names if re.fullmatch(targets, name)]
    spec = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, spec)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:  # none is zero: a start of B = 0 would hide errors in A
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(folder)
    return wrapped


def without_tower(model):
    """The model with a tower that does not train."""
    model.model.visual.requires_grad_(False)
    return model


def without_tower_here(models):
    """The same of a model on megatron-core."""
    for name, parameter in models.named_parameters():
        if "vision_model." in name:
            parameter.requires_grad_(False)
    return models


def inputs_of(model, document: dict) -> dict:
    """The arguments of transformers' model for a document; it finds the positions itself."""
    ids = torch.as_tensor(document["input_ids"])[None]
    more = {name: document[name] for name in WHOLE if name in document}
    if hasattr(model.config, "audio_config"):
        more["attention_mask"] = torch.ones_like(ids)
        if "second_per_grid_ts" in more:
            more["video_second_per_grid"] = more.pop("second_per_grid_ts")
    elif model.config.model_type == GLM:
        more = glm_columns(ids, more)
    else:
        more["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if more.pop("audio_grid", None) is not None:
        lengths = more.pop("audio_lengths")
        spectra = more["input_features"].split(lengths.tolist())
        more["input_features"] = torch.nn.utils.rnn.pad_sequence(spectra, batch_first=True).mT
        places = torch.arange(int(lengths.max()), device=lengths.device)
        more["feature_attention_mask"] = places < lengths[:, None]
    return dict(input_ids=ids, use_cache=False, **more)


def loss_of(model, document: dict) -> torch.Tensor:
    """The sum of a document's losses, by transformers' positions."""
    logits = model(**inputs_of(model, document)).logits[0]
    return torch.nn.functional.cross_entropy(
        logits.float(), document["labels"], ignore_index=-100, reduction="sum"
    )
