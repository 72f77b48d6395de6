"""Runs of the command line on pictures: the first losses are those of transformers' model, with
its image processor and positions."""

import base64
import io
import re

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from mca_lite import tool_inspect
from mca_lite.args import parse_args
from mca_lite.run import make_plan
from tests.shared import world
from tests.shared.chats import assistant, conversation, user, write_records
from tests.shared.commands import answer, ended, error_of, run_script
from tests.shared.picture_files import TOKENS, draw, save_whole_model
from tests.shared.training import read_log

FULL = pytest.mark.full
ONE_STEP = "max_steps=1 logging_steps=1 eval_strategy=no save_strategy=no"
LAYOUTS = {
    "one_packed": (1, "packing=true global_batch_size=2"),
    "pp2": (2, "pipeline_model_parallel_size=2 per_device_train_batch_size=2 global_batch_size=4"),
    "cp2_packed": (2, "context_parallel_size=2 packing=true global_batch_size=2"),
    "torch_packed": (1, "use_mca=false packing=true global_batch_size=2"),
    "dp2_workers": (2, "dataloader_num_workers=1 global_batch_size=4"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, pictures, conversations and pairs of four records each."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = save_whole_model(folder / "model")
    sizes = [(16, 8), (8, 8), (30, 17), (9, 12)]
    names = [draw(folder / f"{n}.png", *size, seed=n) for n, size in enumerate(sizes)]
    images = [names[:1], [], names[1:3], names[3:]]
    chats, pairs = [], []
    for n, of_record in enumerate(images):
        question = "<image>" * len(of_record) + "what?" + "x" * n
        chats.append({**conversation(question, "y" * (n + 1)), "images": of_record})
        pairs.append(
            {
                "messages": [user(question)],
                "chosen": assistant("yes"),
                "rejected": assistant("no" * n + "t"),
                "images": of_record,
            }
        )
    write_records(folder / "chats.jsonl", *chats)
    write_records(folder / "pairs.jsonl", *pairs)
    return folder, tokenizer, images


def tokens_of(folder, tokenizer, question: str, answer: str, images) -> tuple:
    """(ids of a conversation, number of those before the answer, columns of its pictures)."""
    processor = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")
    counts = []
    columns = {}
    if images:
        pictures = [Image.open(folder / name) for name in images]
        columns = processor(images=pictures, return_tensors="pt")
        counts = (columns["image_grid_thw"].prod(1) // 4).tolist()
    content = "".join(TOKENS[0] + TOKENS[1] * count + TOKENS[2] for count in counts) + question
    prompt = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    texts = [f"{prompt}{answer}<|im_end|>", prompt]
    ids, before = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    return ids, len(before), columns


@torch.no_grad()
def answer_losses(folder, tokenizer, model, question: str, answer: str, images) -> torch.Tensor:
    """Losses of the tokens of an answer and of the end of its turn, by transformers."""
    ids, before, columns = tokens_of(folder, tokenizer, question, answer, images)
    ids = torch.tensor([ids])
    types = (ids == tokenizer.convert_tokens_to_ids(TOKENS[1])).int()
    logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **columns).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    return losses[before - 1 :]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_loss_is_that_of_transformers(folder, layout, tmp_path):
    folder, tokenizer, images = folder
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    losses = [
        answer_losses(folder, tokenizer, model, "what?" + "x" * n, "y" * (n + 1), of_record)
        for n, of_record in enumerate(images)
    ]
    ranks, keys = LAYOUTS[layout]
    words = f"model_name_or_path={folder / 'model'} dataset={folder / 'chats.jsonl'} cutoff_len=128"
    run_script(f"{words} {ONE_STEP} {keys} output_dir={tmp_path / 'out'}", tmp_path, nproc=ranks)
    [line] = read_log(tmp_path / "out")
    assert line["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


STREAMS = {"one": (1, "global_batch_size=2"), "pp2": LAYOUTS["pp2"], "cp2": LAYOUTS["cp2_packed"]}


@pytest.mark.parametrize("layout", ["pp2", *(pytest.param(n, marks=FULL) for n in ("one", "cp2"))])
def test_a_streamed_run_has_the_losses_of_transformers(folder, layout, tmp_path):
    folder, tokenizer, images = folder
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    ranks, keys = STREAMS[layout]
    count = len(images) if layout == "pp2" else 2
    losses = [
        answer_losses(folder, tokenizer, model, "what?" + "x" * n, "y" * (n + 1), of_record)
        for n, of_record in enumerate(images[:count])
    ]
    words = f"model_name_or_path={folder / 'model'} dataset={folder / 'chats.jsonl'} cutoff_len=128"
    words += f" streaming=true disable_shuffling=true {ONE_STEP} {keys}".replace("packing=true", "")
    run_script(f"{words} output_dir={tmp_path / 'out'}", tmp_path, nproc=ranks)
    [line] = read_log(tmp_path / "out")
    assert line["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


ROLLOUTS = {
    "pp2": LAYOUTS["pp2"],
    "cp2_packed": (2, "context_parallel_size=2 packing=true cutoff_len=512 global_batch_size=1"),
    "torch": (1, "use_mca=false global_batch_size=4 per_device_train_batch_size=2"),
    "tp2_streamed": (2, "tensor_model_parallel_size=2 streaming=true global_batch_size=4"),
}


@pytest.mark.parametrize(
    "layout", ["pp2", *(pytest.param(n, marks=FULL) for n in ROLLOUTS if n != "pp2")]
)
def test_rollouts_have_the_log_probabilities_of_transformers(folder, layout, tmp_path):
    folder, tokenizer, images = folder
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    records, losses = [], []
    for n, of_record in enumerate(images):
        question, answer = "what?" + "x" * n, "y" * (n + 1)
        ids, before, _ = tokens_of(folder, tokenizer, question, answer, of_record)
        mask = [0] * before + [1] * (len(ids) - before)
        records.append(dict(ids=ids, mask=mask, advantages=1.0, images=of_record))
        losses.append(answer_losses(folder, tokenizer, model, question, answer, of_record))
    path = write_records(folder / "rollouts.jsonl", *records)
    ranks, keys = ROLLOUTS[layout]
    words = f"model_name_or_path={folder / 'model'} dataset={path} {ONE_STEP} cutoff_len=128 {keys}"
    words += " stage=policy policy_loss=reinforce"
    if "streaming" not in keys:  # the reference scores the samples before training
        words += " kl_coef=0.1"
    run_script(f"{words} output_dir={tmp_path / 'out'}", tmp_path, nproc=ranks)
    [line] = read_log(tmp_path / "out")
    assert line["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert abs(line.get("kl", 0.0)) < 1e-6


def test_pairs_have_the_log_probabilities_of_transformers(folder, tmp_path):
    folder, tokenizer, images = folder
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    words = f"model_name_or_path={folder / 'model'} dataset={folder / 'pairs.jsonl'} cutoff_len=128"
    keys = "stage=dpo tensor_model_parallel_size=2 learning_rate=1e-3 global_batch_size=4"
    run_script(f"{words} {ONE_STEP} {keys} output_dir={tmp_path / 'out'}", tmp_path, nproc=2)
    [line] = read_log(tmp_path / "out")
    assert line["loss"] == pytest.approx(0.6931472, abs=1e-5)  # no step yet: the reference's own
    for side in ("chosen", "rejected"):
        sums = []
        for n, of_record in enumerate(images):
            answer = "yes" if side == "chosen" else "no" * n + "t"
            question = "what?" + "x" * n
            losses = answer_losses(folder, tokenizer, model, question, answer, of_record)
            sums.append(-losses.sum())
        assert line[f"logps/{side}"] == pytest.approx(torch.stack(sums).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    "stage, said", [("rm", "transformers has no model for sequence classification of this type")]
)
def test_stages_without_pictures_refuse_their_models_in_words(folder, stage, said):
    folder, *_ = folder
    for backend in "true", "false":
        words = f"stage={stage} model_name_or_path={folder / 'model'} use_mca={backend}"
        words += f" dataset={folder / 'chats.jsonl'} output_dir={folder / 'out'}"
        assert said in error_of(lambda words=words: make_plan(parse_args(words.split())))


@pytest.mark.parametrize("backend", ["true", "false"])
def test_an_adapter_and_its_checkpoints_have_the_image_processors_file(folder, backend, tmp_path):
    folder, *_ = folder
    words = f"model_name_or_path={folder / 'model'} dataset={folder / 'chats.jsonl'} cutoff_len=128"
    words += f" {ONE_STEP} save_strategy=steps save_steps=1 finetuning_type=lora lora_rank=2"
    run_script(f"{words} use_mca={backend} output_dir={tmp_path}", tmp_path)
    name = "preprocessor_config.json"
    for place in (tmp_path, tmp_path / "checkpoint-1"):
        assert (place / name).read_bytes() == (folder / "model" / name).read_bytes()


# {keys of freezing: parts of the names in the adapter}
OF_PARTS = {
    "": {"language_model"},
    "freeze_vision_tower=false": {"language_model", "visual.blocks"},
    "freeze_multi_modal_projector=false freeze_language_model=true": {"visual.merger"},
}


@pytest.mark.parametrize("backend", ["true", "false"])
def test_the_keys_of_freezing_say_which_parts_get_adapters(folder, backend, tmp_path):
    folder, *_ = folder
    base = f"model_name_or_path={folder / 'model'} dataset={folder / 'chats.jsonl'} cutoff_len=128"
    base += f" {ONE_STEP} finetuning_type=lora use_mca={backend} overwrite_output_dir=true"
    for number, (keys, parts) in enumerate(OF_PARTS.items()):
        run_script(f"{base} {keys} output_dir={tmp_path / str(number)}", tmp_path)
        names = load_file(tmp_path / str(number) / "adapter_model.safetensors")
        known = ("language_model", "visual.blocks", "visual.merger")
        assert {part for part in known for name in names if f".{part}." in name} == parts
        [line] = read_log(tmp_path / str(number))
        assert line["grad_norm"] > 0


def parity(words: list[str]) -> tuple[int, str, str]:
    return ended(tool_inspect.main_parity, words)


@pytest.mark.parametrize(
    "layout, freeze_tower",
    [
        ("tensor_model_parallel_size=2 sequence_parallel=true", "false"),
        ("pipeline_model_parallel_size=2 packing=true", "true"),
    ],
)
def test_the_parity_command_compares_models_with_pictures(folder, layout, freeze_tower, tmp_path):
    folder, _, _ = folder
    words = f"model_name_or_path={folder / 'model'} dataset={folder / 'chats.jsonl'} cutoff_len=128"
    words += f" freeze_vision_tower={freeze_tower} per_device_train_batch_size=2 {layout}"
    words += f" global_batch_size=4 {ONE_STEP} cache_dir={tmp_path} output_dir={tmp_path / 'out'}"
    codes, out, errors = zip(*world.run(parity, 2, words.split(), timeout_s=120), strict=True)
    assert codes == (0, 0) and "right: " in "".join(out), "".join(out + errors)
    assert ("visual.blocks" in "".join(out)) == (freeze_tower == "false")


def test_inspect_shows_pictures_with_their_tokens(folder, tmp_path):
    folder, _, _ = folder
    name = "a'b\"<img>.png"
    Image.open(folder / "2.png").save(folder / name)
    odd = write_records(folder / "odd.jsonl", {**conversation("<image>", "b"), "images": [name]})
    words = f"model_name_or_path={folder / 'model'} output_dir={tmp_path / 'out'} max_steps=1 "
    words += f"dataset={folder / 'chats.jsonl'} eval_dataset={odd} cutoff_len=128 warmup_steps=0 "
    words += f"cache_dir={tmp_path} --samples 4 --html {tmp_path / 'page.html'}"
    code, out = answer(tool_inspect.main, words)
    assert code == 0, out
    # patches of 2 x 2 pixels, 4 of them a token: sides are multiples of 4, at most 256 pixels
    assert "4 pictures, 33 of " in out and "1 picture, 15 of " in out
    assert "<|vision_start|><|image_pad|> x 8<|vision_end|>what?" in out
    assert f"{folder / '0.png'}: 8 tokens, (1, 4, 8) patches" in out
    page = (tmp_path / "page.html").read_text()
    urls = re.findall(r"<img src='data:image/png;base64,([\w+/=]+)' alt=''>", page)
    sizes = [Image.open(io.BytesIO(base64.b64decode(url))).size for url in urls]
    assert sizes == [(16, 8), (8, 8), (30, 17), (9, 12), (30, 17)]
    assert "a&#39;b&#34;&lt;img&gt;.png: " in page and name not in page


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_broken_in_its_pixels_ends_the_run_by_name(folder, tmp_path, workers):
    folder, _, _ = folder
    whole = (folder / "2.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    record = {**conversation("<image>", "b"), "images": ["half.png"]}
    data = write_records(tmp_path / "a.jsonl", *[record] * 4)
    words = f"model_name_or_path={folder / 'model'} dataset={data} cutoff_len=128 {ONE_STEP} "
    words += f"global_batch_size=4 dataloader_num_workers={workers} output_dir={tmp_path / 'out'}"
    shown = run_script(words, tmp_path, nproc=2, code=2)
    assert re.search(r"a.jsonl:\d: .*half.png cannot be read as one of BMP", shown.stderr)
    assert "defect of mca_lite" not in shown.stderr
