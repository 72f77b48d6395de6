"""`python -m mca_lite inspect`: counts of what was put into a file by hand, the page, both sides of
pairs, and what the dry run says of ranks beside what ranks have.
"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mca_lite.tables import TEMPLATES
from tests.shared import commands, small_runs, tiny, tiny_moe, world
from tests.shared.chats import conversation, write_records
from tests.shared.layouts import CP2, EP2, ETP1, PP2, TP2_SP
from tests.shared.toy_tokenizer import CHATML, byte_tokenizer

OPEN_ENDED = CHATML.replace("<|im_end|>", "")  # an answer goes over into the next question


def inspect(words: str) -> tuple[int, str]:
    from mca_lite import tool_inspect

    code, out, error = commands.ended(tool_inspect.main, words.split())
    return code, out + error


def model_words(folder: Path, template=CHATML) -> str:
    """A model's folder without weights, with a token a byte -> words of a command line."""
    tiny.hf_config("qwen3", vocab_size=320).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    words = f"model_name_or_path={folder} train_from_scratch=true cache_dir={folder / 'cache'} "
    return words + f"output_dir={folder / 'out'} max_steps=2 warmup_steps=0 "


def count(out: str, what: str) -> list[str]:
    """The number and the samples on the lines of a finding."""
    return re.findall(rf"^  {what} +(\d.*)$", out, re.MULTILINE)


GOOD = [conversation(f"q{i}", f"a{i}") for i in range(12)]
# a token a byte and a special token: 43 beside the question, all in ahead of its 2 of an answer
WRONG = [
    conversation("q3", "a3"),  # 12: as sample 3
    conversation("<s><s>hi", "yes"),  # 13
    conversation("q", "long " * 20),  # 14: cut in its answer
    conversation("long " * 30, "a"),  # cut before its answer: no label
    conversation("q", ""),  # an empty answer
]


def test_what_is_wrong_with_records_is_counted(tmp_path):
    words = model_words(tmp_path) + "stage=sft cutoff_len=64 "
    data = write_records(tmp_path / "a.jsonl", *GOOD + WRONG)
    held_out = write_records(tmp_path / "b.jsonl", *[GOOD[5], conversation("new", "new")])
    code, out = inspect(f"{words} dataset={data} eval_dataset={held_out} --samples 0")
    assert code == 0, out
    counts = "19 read, 0 bad, 2 truncated, 1 label-less, 1 left out besides"
    assert f"records: {counts}" in out
    assert count(out, "duplicate") == ["1  12", "0"]
    assert count(out, "double BOS") == ["1  13", "0"]
    assert count(out, "no end of turn") == ["0", "0"]
    assert count(out, "cut in a turn") == ["1  14", "0"]
    assert count(out, "in training too") == ["0", "1  0"]
    assert "  sample 13, " in out and "- double BOS" in out  # shown, for something is wrong
    assert "  sample 4, " not in out


def test_turns_without_an_end_are_counted(tmp_path):
    words = model_words(tmp_path, OPEN_ENDED) + "stage=sft"
    data = write_records(
        tmp_path / "a.jsonl",
        *[conversation("q", "a"), conversation("q", "b</s>"), conversation("q", "c")],
    )
    out = inspect(f"{words} dataset={data} --samples 0")[1]
    assert count(out, "no end of turn") == ["2  0, 2"]


def test_all_that_is_trained_may_end_in_white_space(tmp_path):
    words = model_words(tmp_path, TEMPLATES["chatml"]) + "stage=sft train_on_prompt=true"
    data = write_records(tmp_path / "a.jsonl", *GOOD)
    assert count(inspect(f"{words} dataset={data}")[1], "no end of turn") == ["0"]


def test_bad_records_are_counted_though_a_run_would_stop(tmp_path):
    words, bad = model_words(tmp_path) + "stage=sft", conversation("q", "a")
    bad["messages"][0]["role"] = "alien"
    data = write_records(tmp_path / "a.jsonl", *[*GOOD, bad])
    code, out = inspect(f"{words} dataset={data} --samples 0 --html {tmp_path / 'page.html'}")
    assert code == 2 and "13 read, 1 bad," in out
    assert f"a run would stop: {data}:13" in out
    assert f"a run would stop: {data}:13" in (tmp_path / "page.html").read_text()
    assert inspect(f"{words} dataset={data} on_bad_record=skip")[0] == 0


# -- what is shown


class Page(HTMLParser):
    """Checks that tags close in turn; gathers the text, in marks and as a whole."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.text, self.marked, self.attributes, self.tags = [], "", "", [], set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "mark" in self.open:
            self.marked += data


HOSTILE = "<script>alert(1)</script> &amp; \x1b[2J \u202e «x»"


def test_samples_show_what_is_trained_and_run_nothing(tmp_path):
    data = write_records(tmp_path / "a.jsonl", *[conversation(HOSTILE, "an <b>answer</b>"), *GOOD])
    words, file = model_words(tmp_path) + "stage=sft packing=true", tmp_path / "page.html"
    code, out = inspect(f"{words} dataset={data} --html {file} --samples 1")
    assert code == 0, out
    assert "assistant\n    «an <b>answer</b><|im_end|>»" in out
    assert r"&amp; \x1b[2J \u202e «x»" in out and "\x1b" not in out
    text = file.read_text()
    page = Page(text)
    assert "an <b>answer</b><|im_end|>" in page.marked and "alert" not in page.marked
    assert r"<script>alert(1)</script> &amp; \x1b[2J \u202e «x»" in page.text
    assert not page.tags & {"script", "link", "img", "iframe"}
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert all(link.startswith("#") for link in links)
    assert "url(" not in text and "//" not in text and "@import" not in text


def test_a_terminal_gets_colours(tmp_path, monkeypatch):
    from mca_lite import tool_inspect

    monkeypatch.setattr(tool_inspect, "has_colors", lambda: True)
    data = write_records(tmp_path / "a.jsonl", *[conversation("q", "a\x1b«")])
    out = inspect(f"{model_words(tmp_path)} stage=sft dataset={data}")[1]
    assert "assistant\n    \x1b[32ma\\x1b«<|im_end|>\x1b[0m\n" in out


def test_both_sides_of_a_pair_are_shown_from_where_they_part(tmp_path):
    data = write_records(
        tmp_path / "a.jsonl", *[{"prompt": "q", "chosen": "I say 4", "rejected": "I say 5!"}]
    )
    words, file = model_words(tmp_path) + "stage=dpo packing=true", tmp_path / "page.html"
    code, out = inspect(f"{words} dataset={data} --html {file}")
    assert code == 0, out
    at = len("SuserNqENSassistantNI say ")  # each special token and line break a token, as a letter
    assert f"pair 0: the first {at} tokens\n    <|im_start|>user\n    q<|im_end|>\n" in out
    assert "assistant\n    «I say »\n" in out
    assert "goes on\n    «4<|im_end|>»" in out and "goes on\n    «5!<|im_end|>»" in out
    assert re.search(r"row 0 .*: 0$", out, re.MULTILINE)  # both sides in one row
    page = Page(file.read_text())
    assert page.marked.endswith("I say 4<|im_end|>5!<|im_end|>")


def test_texts_that_rows_cut_are_counted_whole(tmp_path):
    texts = ["abcd", "ef", "ghijklmn", "ef"]  # with their end tokens 5, 3, 9, 3
    data = write_records(tmp_path / "a.jsonl", *[{"text": text} for text in texts])
    out = inspect(model_words(tmp_path) + f"stage=pt dataset={data} cutoff_len=7")[1]
    assert "3 rows of 7 tokens, texts joined and cut" in out
    assert count(out, "duplicate") == ["1  3"]
    for length, number in ((3, 2), (5, 1), (9, 1)):
        assert re.search(rf"^ +{length}-{length} +{number} █+$", out, re.MULTILINE)


def test_lengths_fall_into_bars():
    import numpy as np

    from mca_lite.tool_inspection import histogram

    assert histogram(np.array([7, 7, 9])) == [("7-7", 2), ("8-8", 0), ("9-9", 1)]
    bars = histogram(np.array([3, 999, 1000]))
    assert bars[0] == ("3-86", 1) and bars[-1] == ("927-1,010", 2)


# -- the dry run


def tree(folder: Path) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_check_writes_nothing(tmp_path):
    words = (
        model_words(tmp_path) + f"stage=sft dataset={write_records(tmp_path / 'a.jsonl', *GOOD)}"
    )
    before = tree(tmp_path)
    code, out = inspect(f"{words} tensor_model_parallel_size=2 --gpus 4 --check")
    assert code == 0 and "nothing of the run was written" in out, out
    assert tree(tmp_path) == before
    inspect(words)  # the token cache is there now, and read
    before = tree(tmp_path)
    assert inspect(f"{words} --check")[0] == 0 and tree(tmp_path) == before


def test_a_check_of_an_evaluation_alone_needs_nothing_to_train_on(tmp_path):
    words = (
        model_words(tmp_path)
        + f"stage=sft eval_dataset={write_records(tmp_path / 'a.jsonl', *GOOD)} --check "
    )
    code, out = inspect(words + "do_train=false do_predict=true dataset=null")
    assert code == 0 and "the run would reach its evaluation" in out, out


def test_a_check_refuses_what_a_run_would(tmp_path):
    words = (
        model_words(tmp_path)
        + f"stage=sft dataset={write_records(tmp_path / 'a.jsonl', *GOOD)} --check "
    )
    code, out = inspect(words + "tensor_model_parallel_size=2 --gpus 3")
    assert code == 2 and "tensor_model_parallel_size" in out
    code, out = inspect(words + "train_from_scratch=false")
    assert code == 2 and "model.safetensors" in out
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    code, out = inspect(words)
    assert code == 2 and "holds checkpoints of an earlier run" in out
    assert inspect(words + "overwrite_output_dir=true")[0] == 0
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    code, out = inspect(words.replace("--check", "streaming=true"))
    assert code == 2 and "streaming=false max_samples=1000" in out
    code, out = inspect(words + "resume_from_checkpoint=auto")
    assert code == 2 and "resume_from_checkpoint: false" in out


def test_one_rank_of_torchruns_speaks_for_all(tmp_path, monkeypatch):
    words = (
        model_words(tmp_path)
        + f"stage=sft dataset={write_records(tmp_path / 'a.jsonl', *GOOD)} --check"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert inspect(words) == (0, "")
    monkeypatch.setenv("RANK", "0")
    assert len(checked(inspect(words)[1])) == 2


def real(keys: dict) -> dict:
    """What this rank holds, and its first step's micro-batches."""
    from megatron.core import parallel_state as mpu

    from mca_lite import parallel, part_lora_sites, run
    from mca_lite.args import parse_args
    from mca_lite.weights_convert import own_parameters

    plan = run.make_plan(parse_args(small_runs.words_of(keys)))
    parallel.initialize(plan.arguments.training)
    trainer = run.build_trainer(plan)
    batches = trainer.plan_batches(trainer.train_dataset)
    step = trainer.read_step(iter(trainer.get_train_dataloader()), batches, 0)[0]
    own = own_parameters(trainer.model).items()
    held = {key: tuple(p.shape) for key, p in own if ".lora." not in key[0]}
    for piece in part_lora_sites.pieces_of(trainer.model):
        layer = re.search(r"(?<=layers.)\d+", piece.key)
        key = re.sub(r"layers\.\d+", "layers.{}", piece.key)
        held[key, int(layer[0]) if layer else None] = tuple(piece.tensor.shape)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    inputs = [trainer._prepare_train_inputs(iter([batch]))["input_ids"] for batch in step]
    read = [list(ids.shape) for ids in inputs]
    places = dict(
        stage=mpu.get_pipeline_model_parallel_rank(),
        tensor=mpu.get_tensor_model_parallel_rank(),
        context=mpu.get_context_parallel_rank(),
        data=mpu.get_data_parallel_rank(),
    )
    if trainer.model.config.num_moe_experts:
        places["expert tensor"] = mpu.get_expert_tensor_parallel_rank()
        places["expert"] = mpu.get_expert_model_parallel_rank()
    return dict(held=held, count=count, read=read, places=places)


def checked(out: str) -> list[dict]:
    """What the dry run says of each rank, in the form of real()."""
    held, stage = {}, None
    for line in out.splitlines():
        if match := re.match(r"a rank of stage (\d+) holds", line):
            stage = held.setdefault(int(match[1]), set())
        elif match := re.match(r"  (\S+) +\[([\d, ]+)\](?:  layers ([\d, -]+))?$", line):
            shape, layers = tuple(map(int, match[2].split(", "))), [None]
            if match[3]:
                spans = [span.partition("-") for span in match[3].split(", ")]
                layers = [n for a, _, b in spans for n in range(int(a), int(b or a) + 1)]
            stage |= {(match[1], layer, shape) for layer in layers}
    ranks = []
    head, lines = re.search(r"^rank (.* data.*?)     par.*\n((?: +\d+ .*\n)+)", out, re.M).groups()
    names = re.findall(r"(?:expert )?\w+", head)
    for line in lines.splitlines():
        batches = re.findall(r"(\d+) x (\[[\d, ]+\])", line)
        read = [json.loads(shape) for n, shape in batches for _ in range(int(n))]
        numbers = [int(word) for word in line.partition("[")[0].replace(",", "").split()[1:-2]]
        places = dict(zip(names, numbers, strict=False))
        count = numbers[len(names)]
        ranks.append(dict(held=held[places["stage"]], count=count, read=read, places=places))
    return ranks


def test_pipelines_pad_each_data_parallel_rank_to_its_own_longest_row(tmp_path):
    records = [conversation("q", "a"), conversation("q" * 30, "a")]
    words = model_words(tmp_path) + "stage=sft per_device_train_batch_size=1 --check --gpus 4 "
    words += f"dataset={write_records(tmp_path / 'a.jsonl', *records)} disable_shuffling=true "
    code, out = inspect(words + "pipeline_model_parallel_size=2 global_batch_size=2")
    assert code == 0, out
    first, second = (
        {tuple(rank["read"][0]) for rank in checked(out) if rank["places"]["data"] == i}
        for i in range(2)
    )
    assert len(first) == len(second) == 1 and first.pop()[1] + 29 == second.pop()[1]


def test_a_rank_has_megatrons_places_in_every_grid(tmp_path):
    from megatron.core.parallel_state import RankGenerator

    words = model_words(tmp_path)
    hf = tiny_moe.hf_config("qwen3_moe", vocab_size=320, num_hidden_layers=4)
    hf.save_pretrained(tmp_path)
    words += f"stage=sft dataset={write_records(tmp_path / 'a.jsonl', *GOOD)} --check "
    words += "pipeline_model_parallel_size=2 tensor_model_parallel_size=2 sequence_parallel=true "
    words += "expert_model_parallel_size=4 expert_tensor_parallel_size=2 context_parallel_size=2 "
    code, out = inspect(words + "global_batch_size=8 bf16=true --gpus 32")
    assert code == 0, out
    order = "tp-cp-ep-dp-pp"
    grids = {
        RankGenerator(tp=2, cp=2, ep=1, dp=4, pp=2, order=order): {
            "tensor": "tp", "context": "cp", "data": "dp", "stage": "pp",
        },
        RankGenerator(tp=2, cp=1, ep=4, dp=2, pp=2, order=order): {
            "expert tensor": "tp", "expert": "ep",
        },
    }  # fmt: skip
    ranks = checked(out)
    assert len(ranks) == 32
    for grid, axes in grids.items():
        for name, axis in axes.items():
            for group in grid.get_ranks(axis):
                assert [ranks[rank]["places"][name] for rank in group] == list(range(len(group)))


LORA = dict(finetuning_type="lora", lora_rank=4, lora_target="all,all-router")
ADAPTED = "all,embed_tokens,lm_head"
AHEAD = dict(mtp_num_layers=1, train_from_scratch=True)
WORLDS = {
    "pp2, tied, packed": ("qwen3", "sft", {**PP2, "packing": True}),
    "tp2_sp, preferences": ("llama", "dpo", TP2_SP),
    "cp2, packed preferences": ("llama", "dpo", {**CP2, "packing": True}),
    "pp2, tokens ahead": ("glm4_moe_plain", "sft", {**PP2, **AHEAD}),
    "pp2, a token ahead of a hybrid": ("qwen3_next", "sft", {**PP2, **AHEAD}),
    "dp2, streamed": ("llama", "sft", {"streaming": True, "packing": True}),
    "pp2, packed labels": ("llama", "kto", {**PP2, "packing": True}),
    "tp2_sp, a value head": ("qwen3", "rm", TP2_SP),
    "ep2": ("qwen3_moe", "sft", {**EP2, "moe_token_dispatcher_type": "allgather"}),
    "tp2_sp, adapters": ("qwen3", "sft", {**TP2_SP, **LORA, "lora_target": ADAPTED}),
    "ep2, experts in tp2, adapters": ("qwen2_moe", "sft", {**TP2_SP, **EP2, **ETP1, **LORA}),
}


@pytest.mark.parametrize("name", WORLDS)
def test_ranks_hold_and_read_what_a_check_says(tmp_path, name):
    family, stage, keys = WORLDS[name]
    save = tiny_moe.save_model if family in tiny_moe.MODELS else tiny.save_model
    save(tmp_path / "hf", family)
    small_runs.save_tokenizer(tmp_path / "hf")
    small_runs.write_data(tmp_path)
    keys = dict(
        model_name_or_path=str(tmp_path / "hf"),
        dataset=str(tmp_path / f"{small_runs.DATA[stage]}.jsonl"),
        output_dir=str(tmp_path / "out"),
        cache_dir=str(tmp_path / "cache"),
        stage=stage,
        cutoff_len=24,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **keys,
    )
    code, out, error = commands.ended(check_files, small_runs.words_of(keys))
    assert code == 0, out + error
    said, ranks = checked(out), world.run(real, 2, keys)
    assert len(said) == 2
    for one, rank in zip(said, ranks, strict=True):
        parameters = set()
        for (parameter, layer), shape in rank["held"].items():
            if not parameter.endswith("expert_bias"):  # no parameter
                parameter = re.sub(r"experts\.\d+\.", "experts.[].", parameter)
                parameters.add((parameter, layer, shape))
        assert one == {**rank, "held": parameters}


def check_files(words: list[str]) -> int:
    from mca_lite import tool_inspect

    return tool_inspect.main([*words, "--check", "--gpus", "2"])
