"""Audio of conversations, and a model that hears, against transformers' own classes: its thinker
alone, and within the files of a model that speaks too."""

import functools
import json
import re
import shutil
import sys
import wave
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Thinker

from mca_lite.args import parse_args
from mca_lite.run import make_plan
from tests.shared import kto_tools, pictures, policy_tools, video_files, world
from tests.shared.answers import STEPS
from tests.shared.cells import shared_worlds, thinned
from tests.shared.chats import assistant, user, write_records
from tests.shared.commands import error_of, run_script
from tests.shared.dpo_tools import COUNT, Pairs, curve_of, differences, oracle_curve, our_run
from tests.shared.files import assert_same_bytes, assert_same_tensors, tensors
from tests.shared.layouts import (
    CP2,
    DIST_OPT,
    EP2,
    FULL,
    ONE_ROW,
    OVERLAP,
    PACKED,
    PP2,
    SAVE,
    SP,
    TP2,
    TWO_ROWS,
)
from tests.shared.picture_files import PROCESSOR, TOKENS, draw
from tests.shared.training import assert_same_curve, read_log, train

THINKER = "qwen3_omni_moe_thinker"
LAYOUTS = {
    "one": (1, TWO_ROWS),
    "one_packed": (1, PACKED),
    "torch": (1, {"backend": "torch", **TWO_ROWS}),
    "torch_packed": (1, {"backend": "torch", **PACKED}),
    "torch_dp2": (2, {"backend": "torch", **ONE_ROW}),
    # in its first step one rank has a micro-batch with an audio, the other has none
    "dp2_overlap": (2, {**OVERLAP, **ONE_ROW}),
    "tp2_sp_packed": (2, {**TP2, **SP, **PACKED, **FULL, **DIST_OPT}),
    "pp2": (2, {**PP2, **TWO_ROWS}),
    "cp2": (2, {**CP2, **TWO_ROWS}),
    "cp2_packed": (2, {**CP2, **PACKED}),
    "tp2sp_pp2_packed": (4, {**TP2, **SP, **PP2, **PACKED}),
    "cp2tp2_sp": (4, {**CP2, **TP2, **SP, **TWO_ROWS}),
    "ep2": (2, {**EP2, **DIST_OPT, **ONE_ROW}),
}
# frames of audios are floats: without a picture, between pictures, in several chunks
SHAPES = [
    [(3, 40.0, 5), (7, (1, 3), 4), (9,), (6,)],
    [(130.0, 4), (3, (2, 1), 2, 16.0, 5), (2, 8.0, (2, 2), 9.0, 6), (8,)],
    [(7,), (5,), (11,), (9,)],
    [(5,), (6, 1.0, 3), (4, 210.0, 3, 100.0, 4), (5,)],  # the tower of pictures rests
    [(4, (2, 2), (2, 1), 3), (9,), (3, (5, 1), 4), (7,)],  # that of audio rests
]


def documents() -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    return [pictures.document(generator, *pieces) for step in SHAPES for pieces in step]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return pictures.save_model(tmp_path_factory.mktemp("model") / "model", THINKER)


@pytest.fixture(scope="module")
def wanted(path, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "plain"
    return pictures.train_plain(path, str(out), data=documents()), out


@pytest.fixture(scope="module")
def trained(request, path, tmp_path_factory):
    keys = dict(run=pictures.train_ours, data=documents())
    return shared_worlds(request, tmp_path_factory, LAYOUTS, lambda n: ((path,), {}), **keys)


@pytest.mark.parametrize(
    "case, layout", thinned([THINKER], LAYOUTS, [], ["torch", "tp2_sp_packed"])
)
def test_audio_trains_as_transformers_does(case, layout, wanted, trained):
    (curve, folder), (ranks, out) = wanted, trained(layout)
    for got in ranks:
        assert_same_curve(got[case], curve)
    assert_same_tensors(tensors(out / case), tensors(folder))


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(path, tmp_path):
    """Two steps are before the checkpoint; audio is in the second alone."""
    found = documents()
    data = found[16:] + found[:4] + found[12:16] + found[4:8]
    keys = {**pictures.KEYS, **TWO_ROWS, **SAVE, "steps": 4, "data": data}
    run = functools.partial(world.run, train, 2, path, str(tmp_path), **keys)
    whole = run(**DIST_OPT)[0]
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = run(**PP2, resume_from_checkpoint="auto")[0]
    assert_same_curve(resumed, whole)


# -- within a model that speaks

TALKER = dict(
    text_config=dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=30,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    ),
    code_predictor_config=dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=20,
        num_code_groups=2,
    ),
    thinker_hidden_size=32,
    num_code_groups=2,
    spatial_merge_size=2,
)
CODE2WAV = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=16,
    codebook_size=20,
    num_quantizers=2,
    decoder_dim=16,
    upsample_rates=[2],
    upsampling_ratios=[2],
)


def save_speaking_model(folder: Path, **of_text) -> str:
    """Save a tiny Qwen3-Omni with random weights."""
    from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration

    config = AutoConfig.for_model(
        "qwen3_omni_moe",
        thinker_config=pictures.hf_config(THINKER, **of_text).to_dict(),
        talker_config=TALKER,
        code2wav_config=CODE2WAV,
    )
    torch.manual_seed(0)
    Qwen3OmniMoeForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory) -> str:
    return save_speaking_model(tmp_path_factory.mktemp("speaking") / "model")


@pytest.mark.parametrize(
    "ranks, keys",
    [(1, {"backend": "torch"}), (2, {**TP2, **SP, **PACKED})],
    ids=("torch", "tp2_sp_packed"),
)
def test_the_thinker_of_a_model_that_speaks_trains_and_the_rest_is_carried(
    speaking, ranks, keys, tmp_path
):
    out = tmp_path / "out"
    Thinker.from_pretrained(speaking).save_pretrained(tmp_path / "thinker")
    data = documents()[:16]
    wanted = pictures.train_plain(str(tmp_path / "thinker"), str(tmp_path / "plain"), data=data)
    keys = {**keys, "data": data, "steps": 4}
    for got in world.run(pictures.train_ours, ranks, speaking, str(out), **keys):
        assert_same_curve(got, wanted)
    ours, theirs, before = (tensors(of) for of in (out, tmp_path / "plain", speaking))
    assert ours.keys() == before.keys()
    rest = {name: x for name, x in ours.items() if not name.startswith("thinker.")}
    assert_same_bytes(rest, {name: before[name] for name in rest})
    thinker = {name.removeprefix("thinker."): ours[name] for name in ours.keys() - rest.keys()}
    assert_same_tensors(thinker, {n.removeprefix("thinker."): x for n, x in theirs.items()})
    configs = [json.loads(Path(of, "config.json").read_text()) for of in (out, speaking)]
    assert configs[0] == configs[1]


def read_and_written(paths: list[str], out: str, **keys) -> None:
    from mca_lite import AutoModel, TrainingArguments

    for number, path in enumerate(paths):
        args = TrainingArguments(output_dir="unused", **keys)
        AutoModel.from_pretrained(path, args).save_pretrained(f"{out}/{number}")


def test_files_are_written_as_they_were_read(path, speaking, tmp_path):
    sources = [path, speaking]
    world.run(read_and_written, 4, sources, str(tmp_path), **TP2, **SP, **PP2)
    for number, source in enumerate(sources):
        assert_same_bytes(tensors(tmp_path / str(number)), tensors(source))


# -- in records

TEMPLATE = video_files.TEMPLATE.replace(
    "{% else %}{{ c['text'] }}",
    "{% elif c['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}{{ c['text'] }}",
)
AUDIO_TOKENS = ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")


def write_sound(file: Path, seconds: float, rate: int = 16_000, channels: int = 1) -> str:
    """Write a WAV file of noise -> its name."""
    count = int(seconds * rate)
    noise = np.random.default_rng(count).integers(-9000, 9000, (count, channels), dtype="<i2")
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(noise.tobytes())
    return file.name


def save_whole_model(folder: Path):
    """Save a tiny Qwen3-Omni with its tokenizer and processors -> the tokenizer."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer = video_files.video_tokenizer(TEMPLATE)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in AUDIO_TOKENS])
    names = ("audio_bos_token", "audio_token", "audio_eos_token")
    tokenizer.save_pretrained(folder)
    more = dict(zip(names, AUDIO_TOKENS, strict=True))
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=more)
    save_speaking_model(folder, vocab_size=len(tokenizer), max_position_embeddings=512)
    ids = tokenizer.convert_tokens_to_ids(AUDIO_TOKENS)
    keys = ("audio_start_token_id", "audio_token_id", "audio_end_token_id")
    config = json.loads((folder / "config.json").read_text())
    config["thinker_config"] |= dict(zip(keys, ids, strict=True))
    config["thinker_config"] |= video_files.token_ids(tokenizer)
    (folder / "config.json").write_text(json.dumps(config))
    settings = dict(feature_size=8, sampling_rate=16_000, hop_length=160, n_fft=400)
    settings |= dict(feature_extractor_type="WhisperFeatureExtractor", chunk_length=30)
    settings |= {**PROCESSOR, "patch_size": 2, "max_pixels": 256, "min_pixels": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(folder)
    return tokenizer


FRAMES = [f"{n}.png" for n in range(4)]  # two a second
RECORDS = [
    dict(audios=["a.wav"], question="<audio>what is it?"),
    dict(audios=["b.wav", "a.wav"], images=["p.png"], question="<audio>and<image>, <audio>?"),
    dict(question="nothing?"),
    dict(audios=["c.wav"], question="<audio>why?"),
    dict(audios=["a.wav"], videos=[FRAMES], question="<video>and <audio>?"),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """(folder, tokenizer): a model, and records in LLaMA-Factory's form."""
    folder = tmp_path_factory.mktemp("records")
    tokenizer = save_whole_model(folder / "model")
    write_sound(folder / "a.wav", 0.5)
    write_sound(folder / "b.wav", 1.23)
    write_sound(folder / "c.wav", 0.0126)
    draw(folder / "p.png", 12, 8)
    for number, name in enumerate(FRAMES):
        draw(folder / name, 16, 8, seed=number)
    rows = []
    for number, record in enumerate(RECORDS):
        more = {key: record[key] for key in ("audios", "images", "videos") if key in record}
        turns = [user(record["question"]), assistant("y" * (number + 1))]
        rows.append({"messages": turns, **more})
    write_records(folder / "chats.jsonl", *rows)
    return folder, tokenizer


def prompt_of(folder: Path, tokenizer, record: dict) -> tuple[str, dict]:
    """(text of a record's prompt, its inputs by transformers' processors)"""
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,
    )

    content, columns = record["question"], {}
    if sounds := record.get("audios"):
        samples = []
        for name in sounds:
            with wave.open(str(folder / name)) as sound:
                data = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2")
            samples.append(data.astype(np.float32) / 32768)
        extractor = WhisperFeatureExtractor.from_pretrained(folder / "model")
        keys = dict(sampling_rate=16_000, truncation=False, return_attention_mask=True)
        found = [extractor(one, return_tensors="pt", padding=True, **keys) for one in samples]
        spectra = [one["input_features"][0].t() for one in found]
        masks = [one["attention_mask"][0] for one in found]
        pad = torch.nn.utils.rnn.pad_sequence
        columns["input_features"] = pad(spectra, batch_first=True).mT
        columns["feature_attention_mask"] = pad(masks, batch_first=True)
        for mask in masks:
            count = int(_get_feat_extract_output_lengths(mask.sum()))
            text = AUDIO_TOKENS[0] + AUDIO_TOKENS[1] * count + AUDIO_TOKENS[2]
            content = content.replace("<audio>", text, 1)
    if images := record.get("images"):
        processor = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")
        columns |= processor(images=[Image.open(folder / images[0])], return_tensors="pt")
        count = int(columns["image_grid_thw"].prod()) // 4
        content = content.replace("<image>", TOKENS[0] + TOKENS[1] * count + TOKENS[2])
    if videos := record.get("videos"):
        processor = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")
        frames = [
            processor(images=Image.open(folder / name), do_resize=False, return_tensors="pt")
            for name in videos[0]
        ]
        halves = [each["pixel_values"].view(-1, 3, 2, 4)[:, :, 0] for each in frames]
        pairs = zip(halves[::2], halves[1::2], strict=True)
        columns["pixel_values_videos"] = torch.cat([torch.stack(p, 2).flatten(1) for p in pairs])
        columns["video_grid_thw"] = torch.tensor([[len(frames) // 2, 4, 8]])
        columns["video_second_per_grid"] = torch.tensor([2 / 2.0])
        count = int(columns["video_grid_thw"].prod()) // 4
        content = content.replace("<video>", TOKENS[0] + video_files.VIDEO * count + TOKENS[2])
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n", columns


def losses_of(folder: Path, tokenizer, model, record: dict, answer: str) -> torch.Tensor:
    """Losses of an answer by transformers' model, with its processors' inputs."""
    prompt, columns = prompt_of(folder, tokenizer, record)
    texts = [f"{prompt}{answer}<|im_end|>", prompt]
    ids, before = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **columns).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    return losses[len(before) - 1 :]


RUNS = {
    "tp2": (2, "tensor_model_parallel_size=2 sequence_parallel=true packing=true"),
    "torch": (1, "use_mca=false per_device_train_batch_size=5"),
}


@pytest.mark.parametrize("layout", RUNS)
def test_the_first_loss_of_a_run_is_that_of_transformers(records, layout, tmp_path):
    folder, tokenizer = records
    model = Thinker.from_pretrained(folder / "model", dtype=torch.float32)
    losses = [
        losses_of(folder, tokenizer, model, record, "y" * (number + 1))
        for number, record in enumerate(RECORDS)
    ]
    ranks, keys = RUNS[layout]
    words = f"model_name_or_path={folder / 'model'} dataset={folder / 'chats.jsonl'} cutoff_len=128"
    words += f" max_steps=1 logging_steps=1 eval_strategy=no save_strategy=no {keys}"
    words += " video_min_pixels=16"
    words += f" global_batch_size={2 if 'packing' in keys else 5} output_dir={tmp_path / 'out'}"
    run_script(words, tmp_path, nproc=ranks)
    [line] = read_log(tmp_path / "out")
    assert line["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_other_rates_and_channels_are_resampled(tmp_path):
    from mca_lite.part_audio import Audio, read_sound, resampled

    times = np.arange(44_100) / 44_100
    tone = np.sin(2 * np.pi * 500 * times).astype(np.float32)
    out = resampled(tone, 44_100)
    assert len(out) == 16_000
    right = np.sin(2 * np.pi * 500 * np.arange(16_000) / 16_000)
    assert np.abs(out - right)[100:-100].max() < 2e-3
    file = tmp_path / "two.wav"
    write_sound(file, 0.1, rate=8_000, channels=2)
    samples, count, rate = read_sound(Audio(str(file)), "here")
    assert (samples.shape, count, rate) == ((800,), 800, 8_000)
    assert len(resampled(samples, 8_000)) == 1_600


WRONG = {
    "mark": (dict(question="<audio>?"), "1 <audio> marks.* and 0 audios in the column audios"),
    "video": (dict(videos=["a.mp4"], question="?"), "there is no .*a.mp4"),
    "text": (dict(audios=["t.wav"], question="<audio>?"), "no WAV file.*mca-lite.audio"),
    "short": (
        dict(audios=["s.wav"], question="<audio>?"),
        "takes 0.0050 seconds: expected at least 0.0126",
    ),
    "gone": (dict(audios=["none.wav"], question="<audio>?"), "there is no .*none.wav"),
}


@pytest.mark.parametrize("name", WRONG)
def test_records_that_cannot_be_are_refused(records, name, tmp_path, monkeypatch):
    folder, _ = records
    record, said = WRONG[name]
    (tmp_path / "t.wav").write_text("no sound")
    write_sound(tmp_path / "s.wav", 0.005)
    more = {key: record[key] for key in ("audios", "videos") if key in record}
    turns = [user(record["question"]), assistant("b")]
    data = write_records(tmp_path / "a.jsonl", {"messages": turns, **more})
    monkeypatch.setitem(sys.modules, "soundfile", None)
    words = f"model_name_or_path={folder / 'model'} dataset={data} output_dir={tmp_path / 'out'}"
    words += f" max_steps=1 cache_dir={tmp_path}"
    assert re.search(said, error_of(lambda: make_plan(parse_args(words.split()))))


# -- rollouts, answers, other stages


def test_rollouts_bring_the_videos_and_audios_that_their_tokens_stand_for(records, tmp_path):
    folder, tokenizer = records
    record = RECORDS[-1] | dict(images=["p.png"], question="<audio>, <image> and <video>?")
    prompt, wanted = prompt_of(folder, tokenizer, record)
    ids = tokenizer(f"{prompt}yes", add_special_tokens=False)["input_ids"]
    row = dict(ids=ids, mask=[0] * (len(ids) - 3) + [1] * 3, advantages=1.0)
    row |= dict(audios=["a.wav"], images=["p.png"], videos=[FRAMES])
    words = f"model_name_or_path={folder / 'model'} stage=policy media_dir={folder} max_steps=1"
    words += f" output_dir={tmp_path / 'out'} cache_dir={tmp_path} video_min_pixels=16 dataset="

    def plan_of(**changes):
        data = write_records(tmp_path / f"{len(changes)}.jsonl", row | changes)
        return make_plan(parse_args(f"{words}{data}".split()))

    [document] = plan_of().data.train[0]
    assert document["input_ids"].tolist() == ids[:-1]
    spectra = wanted.pop("input_features")[0].T
    torch.testing.assert_close(document["input_features"], spectra, rtol=0, atol=0)
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        torch.testing.assert_close(document[name], wanted[name], rtol=0, atol=1e-6)
    model = Thinker.from_pretrained(folder / "model")
    grids = wanted["image_grid_thw"], wanted["video_grid_thw"]
    more = dict(audio_seqlens=document["audio_lengths"])
    more |= dict(second_per_grids=wanted["video_second_per_grid"])
    row_of_ids = torch.tensor([ids[:-1]])
    positions, _ = model.get_rope_index(row_of_ids, *grids, torch.ones_like(row_of_ids), **more)
    ours = torch.stack([torch.as_tensor(document[f"rope_{axis}"]) for axis in "thw"])
    assert torch.equal(ours, positions[:, 0])
    said = error_of(lambda: plan_of(videos=[FRAMES[:2]]))
    assert re.search(r"16 tokens <.video_pad.>, and the 1 videos of videos have 8 features", said)


LENGTH = 4


def answer_of(folder: Path, tokenizer, model, record: dict) -> str:
    """A greedy answer by transformers' model."""
    prompt, columns = prompt_of(folder, tokenizer, record)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=LENGTH,
        pad_token_id=end,
        eos_token_id=end,
        **columns,
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "ranks, keys",
    [(2, "pipeline_model_parallel_size=2"), (1, "use_mca=false")],
    ids=("pp2", "torch"),
)
def test_answers_of_an_evaluation_are_those_of_transformers(records, ranks, keys, tmp_path):
    folder, tokenizer = records
    words = f"model_name_or_path={folder / 'model'} eval_dataset={folder / 'chats.jsonl'}"
    words += f" output_dir={tmp_path / 'out'} do_predict=true do_train=false video_min_pixels=16"
    words += f" predict_with_generate=true max_new_tokens={LENGTH} cutoff_len=256 {keys}"
    run_script(f"{words} cache_dir={tmp_path}", tmp_path, nproc=ranks)
    rows = [json.loads(line) for line in open(tmp_path / "out" / "generations.jsonl")]
    model = Thinker.from_pretrained(folder / "model", dtype=torch.float32).eval()
    wanted = [answer_of(folder, tokenizer, model, record).strip() for record in RECORDS]
    assert [row["answer"] for row in rows] == wanted
    assert len(set(wanted)) > 1


PIECES = [(4,), (2, 30.0, 3), ((1, 3), 2, 12.0, 4), (2, 9.0, (2, 1, 1), 2)]
HOW = pictures.of_videos(THINKER)


def heard_answers() -> list[tuple]:
    """Labelled answers to prompts with audio, pictures and videos."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(COUNT):
        prompt = pictures.document(generator, *PIECES[i % 4], **HOW)
        answer = torch.randint(10, 61, (1 + 5 * i % 9,), generator=generator)
        found.append((prompt, answer, float(i % 3 != 1)))
    return found


class HeardPairs(Pairs):
    """Pairs of answers to such prompts."""

    def pair(self, draw) -> dict:
        seed = int(draw(2, 7).sum())
        pair = {}
        for side in ("chosen", "rejected"):
            count = len(draw(1, 9))
            generator = torch.Generator().manual_seed(seed)  # the same text of the prompt
            document = pictures.document(generator, *PIECES[seed % 4], count, **HOW)
            document["labels"][:-count] = -100
            pair[side] = document
        return pair


PREFERRED = dict(pref_loss="sigmoid", beta=0.3)


def stage_run(path: str, out: str, stage: str, **keys) -> list:
    if stage == "kto":
        data = kto_tools.Answers(heard_answers())
        return curve_of(kto_tools.kto_run(path, out, train_dataset=data, **keys))
    if stage == "policy":
        samples = torch.load(f"{path}/samples.pt")
        return policy_tools.policy_run(path, out, samples, dict(name="ppo"), **keys)
    return curve_of(our_run(path, out, PREFERRED, train_dataset=HeardPairs(), **keys))


@pytest.fixture(scope="module")
def of_stages(path):
    """{stage: curve of plain transformers}"""
    curves = {}
    for stage in ("dpo", "kto", "policy"):
        model = Thinker.from_pretrained(path, dtype=torch.float32)
        if stage == "policy":
            with torch.no_grad():
                samples = policy_tools.with_numbers(model, documents_of_stages())
            torch.save(samples, f"{path}/samples.pt")
            run = functools.partial(policy_tools.oracle_run, model, samples, policy_tools.clipped)
            lines = run(lambda tokens, answers: tokens)
            curves[stage] = [x | dict(loss=x["total"] / x["counts"][False]) for x in lines]
        elif stage == "kto":
            curves[stage] = kto_tools.oracle_curve(model, steps=STEPS, raw=heard_answers())
        else:
            curves[stage] = oracle_curve(model, PREFERRED, STEPS, pairs=HeardPairs().pairs)
    return curves


def documents_of_stages() -> list[dict]:
    generator = torch.Generator().manual_seed(5)
    return [pictures.document(generator, *pieces, 5, **HOW) for pieces in PIECES * 2]


STAGES = [("dpo", "tp2_sp_packed"), ("kto", "pp2"), ("policy", "torch"), ("policy", "cp2_packed")]
MORE_STAGES = [
    *((stage, layout) for stage in ("dpo", "kto") for layout in ("torch", "torch_packed", "cp2")),
    *(("policy", layout) for layout in ("pp2", "tp2_sp_packed", "ep2")),
    *(("dpo", "pp2"), ("kto", "tp2_sp_packed"), ("dpo", "torch_dp2"), ("kto", "torch_dp2")),
]


@pytest.mark.parametrize(
    "stage, layout",
    [*STAGES, *(pytest.param(*cell, marks=pytest.mark.full) for cell in MORE_STAGES)],
)
def test_stages_train_on_audio_as_plain_torch(stage, layout, of_stages, path, tmp_path):
    ranks, keys = LAYOUTS[layout]
    keys = {**keys, **(dict(steps=2) if stage == "policy" else dict(max_steps=STEPS))}
    curves = world.run(stage_run, ranks, path, str(tmp_path), stage, **keys)
    for curve in curves if stage != "policy" else []:
        assert not differences(curve, of_stages[stage])
    for line, right in zip(curves[0], of_stages[stage], strict=True):
        assert all(
            line[name] == pytest.approx(right[name], 1e-5, 1e-5) for name in right.keys() & line
        )


def test_a_reward_model_is_refused_where_transformers_has_none(records, tmp_path):
    folder, _ = records
    words = f"model_name_or_path={folder / 'model'} dataset={folder / 'chats.jsonl'} stage=rm"
    words += f" output_dir={tmp_path / 'out'} max_steps=1"
    said = error_of(lambda: make_plan(parse_args(words.split())))
    assert "transformers has no model for sequence classification of this type" in said


def test_the_work_of_the_audio_tower_is_what_torch_counts(path):
    from torch.utils.flop_counter import FlopCounterMode

    from mca_lite.inputs import inputs_of

    model = Thinker.from_pretrained(path, attn_implementation="eager")
    spectra = torch.randn(8, 600)  # of whole chunks and windows
    with FlopCounterMode(display=False) as counter:
        model.model.audio_tower(spectra, feature_lens=torch.tensor([400, 200]))
    forward = counter.get_total_flops()
    work = inputs_of(model.config).work(model)
    assert work.of_frame * 600 == pytest.approx(3 * forward, rel=1e-6)
    model.model.audio_tower.requires_grad_(False)
    assert inputs_of(model.config).work(model).of_frame * 600 == pytest.approx(forward, rel=1e-6)
    trained = [("vision_model.module.audio_tower.conv_out.weight", torch.nn.Parameter())]
    alone = SimpleNamespace(named_parameters=lambda: trained)  # as in a model on megatron-core
    assert inputs_of(model.config).work(alone).of_frame == work.of_frame
    assert inputs_of(model.config).work(alone).of_unit == pytest.approx(work.of_unit / 3)
