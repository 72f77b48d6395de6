"""Stage distill as a user runs it, and the teacher's rows on disk: kept, resumed, refused where
they are foreign.
"""

import contextlib
import dataclasses
import functools
import io
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mca_lite import files
from mca_lite.args import parse_args
from mca_lite.ckpt_folder import CheckpointError
from mca_lite.data_encode import hash_of
from mca_lite.errors import ConfigError
from mca_lite.part_distill import WithRows
from mca_lite.part_scores import RowStore, fingerprint_of, identity_of_model, trained_counts
from tests.shared import layouts, small_runs, tiny, world
from tests.shared.commands import ROOT
from tests.shared.distilling import (
    PLAIN,
    TEACHER_VOCAB,
    keys_of_run,
    maker,
    oracle_curves,
    our_curve,
    rows_of_torch,
    save_models,
    whole_trainer,
)
from tests.shared.training import assert_same_curve, read_log, train

OBJECTIVE = dict(divergence="jsd", jsd_mix=0.3, temperature=1.5, ce_weight=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A student and a teacher, `student` and `teacher`, with one tokenizer, and data."""
    folder = tmp_path_factory.mktemp("distill")
    for path in save_models(folder):
        small_runs.save_tokenizer(path)
    small_runs.write_data(folder)
    return folder


# -- the command line


def keys_of(folder, **more) -> dict:
    keys = dict(
        model_name_or_path=f"{folder}/student",
        teacher_model_name_or_path=f"{folder}/teacher",
        dataset=f"{folder}/chat.jsonl",
        eval_dataset=f"{folder}/other.jsonl",
        cache_dir=f"{folder}/cache",
        stage="distill",
        distill_loss="jsd",
        distill_jsd_mix=0.3,
        distill_temperature=1.5,
        distill_ce_weight=0.5,
        max_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        global_batch_size=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        cutoff_len=40,
        save_strategy="no",
        save_hf_model=False,
        disable_tqdm=True,
    )
    return {key: value for key, value in {**keys, **more}.items() if value is not None}


def run_of_whole_logits(keys: dict, teacher: str, objective: dict) -> None:
    """The run of these keys, with a trainer whose losses are taken of whole logits."""
    from mca_lite import run

    plan = run.make_plan(parse_args(small_runs.words_of(keys)))
    made = whole_trainer(teacher, objective)
    plan.objective = dataclasses.replace(plan.objective, trainer=made)
    run.train(plan)


def runs_of(folder: str, out: str) -> dict:
    """{name: (error, what was printed)} of runs of the command line."""
    cached = dict(teacher_top_k=6, teacher_cache=f"{out}/rows")
    alone = dict(cached, teacher_model_name_or_path=None)
    plain = dict(use_mca=False, stage="sft")
    runs = {
        "resident": {},
        "cached": cached,
        "read": dict(alone, use_mca=False),
        "another k": dict(cached, teacher_top_k=5),
        "another temperature": dict(cached, distill_temperature=2.0),
        "another dtype": dict(cached, teacher_cache_dtype="float16"),
        "another precision": dict(cached, bf16=True),
        "other data": dict(alone, eval_dataset=f"{folder}/chat.jsonl", max_samples=5),
    }
    found = {}
    for name, keys in runs.items():
        said = io.StringIO()
        error = ""
        with contextlib.redirect_stdout(said):
            try:
                keys = keys_of(folder, output_dir=f"{out}/{name}", **keys)
                small_runs.train_by_words(keys)
            except ValueError as refused:
                error = str(refused)
        found[name] = error, said.getvalue()
    for k in (None, 6):
        keys = keys_of(folder, output_dir=f"{out}/whole-{k}", **plain)
        run_of_whole_logits(keys, f"{folder}/teacher", dict(OBJECTIVE, top_k=k))
    return found


def numbers(out: Path) -> list:
    return [(line["loss"], line["grad_norm"]) for line in read_log(out) if "loss" in line]


def test_the_keys_of_the_stage_train_as_plain_torch_and_rows_are_read_without_a_teacher(
    folder, tmp_path
):
    found = world.run(runs_of, 1, str(folder), str(tmp_path))[0]
    for name, k in (("resident", None), ("cached", 6), ("read", 6)):
        assert not found[name][0], found[name]
        assert_same_curve(numbers(tmp_path / name), numbers(tmp_path / f"whole-{k}"))
        logged = read_log(tmp_path / name)
        mixed = [0.5 * (line["kd_loss"] + line["sft_loss"]) for line in logged if "loss" in line]
        assert mixed == pytest.approx([loss for loss, _ in numbers(tmp_path / name)])
        [whole] = [n["eval_loss"] for n in read_log(tmp_path / f"whole-{k}") if "eval_loss" in n]
        assert logged[-1]["eval_loss"] == pytest.approx(whole, rel=1e-5)  # of the second data set
    said = found["resident"][1]
    assert "jsd, temperature 1.5, cross entropy 0.5, resident teacher" in said
    for name, lines in ("cached", 4), ("read", 2):  # of both data sets
        assert found[name][1].count("tokens in /") == lines
    for name, words in {
        "another k": "teacher_top_k 6, and this run has another",
        "another temperature": "distill_temperature 1.5",
        "another dtype": "teacher_cache_dtype float32",
        "another precision": "are of another teacher",
        "other data": "set teacher_model_name_or_path to compute them",
    }.items():
        assert words in found[name][0], name
    shown = sorted(path.suffix for path in (tmp_path / "rows").glob("*/*"))
    assert shown == [".json", ".json", ".rows", ".rows"]


def problems(folder, **changes) -> dict:
    keys = {
        k: v for k, v in keys_of(folder, output_dir="unused", **changes).items() if v is not None
    }
    with pytest.raises(ConfigError) as error:
        parse_args(small_runs.words_of(keys))
    return {problem.key: problem.reason for problem in error.value.problems}


ALONE = dict(teacher_model_name_or_path=None)
REFUSED = {
    "no teacher": (ALONE, "teacher_model_name_or_path", "learns from a teacher"),
    "no rows": (dict(ALONE, teacher_top_k=4), "teacher_model_name_or_path", "from a folder"),
    "cache": (dict(teacher_cache="rows"), "teacher_cache", "resident teacher"),
    "dtype": (dict(teacher_cache_dtype="float16"), "teacher_cache_dtype", "resident teacher"),
    "mix": (dict(distill_loss="forward_kl"), "distill_jsd_mix", "distill_loss is forward_kl"),
    "ahead": (dict(mtp_num_layers=1), "mtp_num_layers", "no part in distillation"),
    "stream": (dict(teacher_top_k=4, streaming=True), "teacher_top_k", "before training"),
    "weight": (dict(distill_ce_weight=1.0), "distill_ce_weight", "less than 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_do_not_fit_together_are_refused(folder, name):
    changes, key, words = REFUSED[name]
    assert words in problems(folder, **changes)[key]


def refusals(folder: str, out: str) -> dict[str, str]:
    """What plans say to teachers that do not fit, and `parity` to one that fits."""
    import shutil

    from mca_lite import run, tool_parity
    from tests.shared.training import refusal

    foreign = shutil.copytree(f"{folder}/teacher", f"{out}/foreign")
    path = Path(foreign, "tokenizer.json")
    path.write_text(path.read_text().replace('"w7"', '"v7"'))
    small = tiny.save_model(f"{out}/small", "qwen3", vocab_size=40)
    small_runs.save_tokenizer(small)
    capped = tiny.save_model(f"{out}/capped", "gemma2")
    small_runs.save_tokenizer(capped)
    names = {
        "capped": dict(teacher_model_name_or_path=capped, use_mca=False),
        "foreign": dict(teacher_model_name_or_path=str(foreign)),
        "small": dict(teacher_model_name_or_path=small),
        "drawn": dict(teacher_model_name_or_path=f"{folder}/student", train_from_scratch=True),
        "new tokens": dict(add_tokens=["w97"]),
    }

    def plan(keys):
        words = small_runs.words_of(keys_of(folder, output_dir=f"{out}/run", **keys))
        return run.make_plan(parse_args(words))

    found = {name: refusal(plan, keys) for name, keys in names.items()}
    return {**found, "parity": refusal(tool_parity.compare, plan({}))}


def test_a_teacher_that_reads_other_tokens_is_refused_in_words(folder, tmp_path):
    found = world.run(refusals, 1, str(folder), str(tmp_path))[0]
    assert "1 of the student's 60 tokens have another id in it, or none: 'w7'" in found["foreign"]
    assert "40 rows for 60 tokens" in found["small"]
    assert "its final_logit_softcapping changes logits" in found["capped"]
    assert "random, as the student's" in found["drawn"]
    assert "'w97' is 60 here, and there unknown" in found["new tokens"]
    assert "stage: sft, which has the same layout" in found["parity"]


@pytest.mark.parametrize("changes", [{}, dict(teacher_top_k=4)])
def test_the_dry_run_needs_no_rows_and_writes_none(folder, tmp_path, changes):
    from mca_lite import tool_inspect
    from tests.shared import commands

    keys = keys_of(folder, output_dir=f"{tmp_path}/out", cache_dir=f"{tmp_path}/cache", **changes)
    words = [*small_runs.words_of(keys), "--check", "--gpus", "2"]
    code, out, error = commands.ended(tool_inspect.main, words)
    assert code == 0 and f"{folder}/teacher" in out, out + error
    assert not (tmp_path / "cache").exists()


# -- rows on disk


ROWS = np.dtype([("tokens", np.int32, (2,)), ("logps", np.float32, (3,))])


def twelve_rows() -> np.ndarray:
    rows = np.zeros(12, ROWS)
    rows["tokens"] = np.arange(24).reshape(12, 2)
    rows["logps"] = -np.arange(36).reshape(12, 3)
    return rows


def store_in(folder, **changes) -> RowStore:
    identity = dict(data="d", rows=12, top_k=2, temperature=1.0, dtype="float32", teacher="t")
    return RowStore(Path(folder), {**identity, **changes}, ROWS)


def written(store, stops=(5, 8, 12)) -> None:
    """Write the rows that a store lacks, in three parts."""
    for stop in stops:
        if stop > store.num_rows:
            store.parts.append(store.write(twelve_rows()[store.num_rows : stop]))


def loaded(folder, **changes) -> tuple[RowStore, list]:
    said = []
    return store_in(folder, **changes).load(said.append), said


def test_rows_are_read_as_they_were_written(tmp_path):
    written(store_in(tmp_path, vocab_size=61))
    store, said = loaded(tmp_path)
    assert store.is_complete and not said and store.identity["vocab_size"] == 61
    assert np.array_equal(store.read(), twelve_rows())
    assert np.array_equal(np.concatenate(store.maps()), twelve_rows())
    # a reader without the teacher takes those of any
    identity = {k: v for k, v in store.identity.items() if k != "teacher"}
    assert RowStore(tmp_path, identity, ROWS).load().is_complete


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


# (number of the damaged part, its content, rows left)
DAMAGE = {
    "flipped": (2, flipped, 8),
    "cut": (2, lambda data: data[:-3], 8),
    "empty": (1, lambda data: b"", 5),
    "first": (0, lambda data: b"x" + data[1:], 0),
    "more": (1, lambda data: data + b"x", 5),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_rows_are_named_and_written_again(tmp_path, name):
    number, damage, left = DAMAGE[name]
    written(store_in(tmp_path))
    path = sorted(tmp_path.glob("*.rows"))[number]
    path.write_bytes(damage(path.read_bytes()))
    store, said = loaded(tmp_path)
    assert store.num_rows == left
    assert [str(path) in line for line in said] == [True] and "computed again" in said[0]
    written(store)
    again, said = loaded(tmp_path)
    assert again.is_complete and not said and np.array_equal(again.read(), twelve_rows())


JUNK = [
    "a-b-c-d.rows",
    "1-2-3-4-5.rows",
    "{at:012d}-٣-{before}-00000000.rows",
    "{at:012d}-999999999999-{before}-00000000.rows",
    "{at:012d}-000000000012-{before}-xyz.rows",
]


@pytest.mark.parametrize("name", JUNK)
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo])
def test_junk_among_rows_is_left_alone(tmp_path, name, make):
    store = store_in(tmp_path)
    written(store, stops=(8,))
    before = hash_of([store.identity, [path.name for _, path in store.parts]])[:8]
    make(tmp_path / name.format(at=8, before=before))
    store, _ = loaded(tmp_path)
    assert store.num_rows == 8
    written(store)
    assert loaded(tmp_path)[0].is_complete


def test_a_folder_of_rows_without_room_is_named_with_its_keys(tmp_path, monkeypatch):
    store = store_in(tmp_path / "rows")
    (tmp_path / "rows").mkdir()
    name = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0"))  # of temporary files
    monkeypatch.setattr(files, "uuid", name)
    (tmp_path / "rows" / ".meta.json.0.tmp").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="rows.*disk full: .*No space left.*teacher_cache"):
        written(store)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/rows.*cache_dir"):
        written(store_in(tmp_path / "file" / "rows"))


def test_rows_of_two_writers_are_those_of_one(tmp_path):
    written(store_in(tmp_path), stops=(4, 8, 12))
    written(store_in(tmp_path))  # parts of other sizes
    store, said = loaded(tmp_path)
    assert store.is_complete and not said and np.array_equal(store.read(), twelve_rows())


def test_rows_of_another_identity_in_a_folder_are_not_read(tmp_path):
    """Runs with two teachers may begin at once: rows of one have the meta.json of the other."""
    written(store_in(tmp_path, teacher="u"))
    store_in(tmp_path).write(twelve_rows()[:5])
    store, said = loaded(tmp_path)
    assert store.num_rows == 5 and not said


@pytest.mark.parametrize("stops", [(8, 9), (9, 8)])
def test_rows_of_two_passes_are_not_mixed(tmp_path, stops):
    """Teachers without a folder have one identity: part two is that of the same pass."""
    passes = []
    for number, stop in enumerate(stops):
        store = store_in(tmp_path)
        rows = twelve_rows()
        rows["tokens"] += number
        passes.append(rows[:stop])
        for end in (5, stop):
            store.parts.append(store.write(rows[store.num_rows : end]))
    store, said = loaded(tmp_path)
    assert not said and any(np.array_equal(store.read(), rows) for rows in passes)


@pytest.mark.parametrize("content", ['{"format": 1, "parts": [[12, 0]]}', "{", "[]"])
def test_rows_of_another_version_are_computed_again_with_one_line(tmp_path, content):
    written(store_in(tmp_path))
    (tmp_path / "meta.json").write_text(content)
    store, said = loaded(tmp_path)
    assert not store.num_rows and len(said) == 1
    assert str(tmp_path) in said[0] and "computed again" in said[0]


FOREIGN = {
    "teacher": ("u", "of another teacher"),
    "data": ("e", "of other data"),
    "rows": (13, "another number of rows"),
    "top_k": (3, "teacher_top_k 2"),
    "temperature": (2.0, "distill_temperature 1.0"),
    "dtype": ("float16", "teacher_cache_dtype float32"),
}


@pytest.mark.parametrize("key", FOREIGN)
def test_foreign_rows_are_refused_in_words(tmp_path, key):
    written(store_in(tmp_path))
    value, words = FOREIGN[key]
    with pytest.raises(ValueError, match=words):
        store_in(tmp_path, **{key: value}).load()


def test_a_byte_of_any_shard_makes_another_teacher(tmp_path):
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(b"0123")
    before = identity_of_model(tmp_path, tmp_path / "cache")
    assert before.keys() == {*names}
    for name in names:
        (tmp_path / name).write_bytes(b"0122")
        after = identity_of_model(tmp_path, tmp_path / "cache")
        assert [other for other in names if after[other] != before[other]] == [name]
        (tmp_path / name).write_bytes(b"0123")


def trained_by(student: str, teachers: list, out: str) -> list[str]:
    """The error of a run by each of these teachers, given as models, over one cache. The first
    samples have no trained tokens, so no rows."""
    from mca_lite import AutoModel, DistillConfig, DistillTrainer
    from tests.shared.training import attempt

    def trainer(path, model, args, **more):
        config = DistillConfig(top_k=4, cache_dir=f"{out}/cache")
        return DistillTrainer(model, config, AutoModel.from_pretrained(path, args), args, **more)

    found, samples = [], tiny.samples()
    shared = dict(steps=1, warmup_steps=0, data=samples[5:6] * 9 + samples, **SMALL_STEPS)
    for number, path in enumerate(teachers):
        keys = dict(shared, trainer_class=functools.partial(trainer, path))
        [error, *_] = attempt(student, f"{out}/{number}", **keys)
        found.append(error)
    return found


def test_rows_of_a_teacher_given_as_a_model_are_not_those_of_another(tmp_path):
    student, one = save_models(tmp_path)
    shape = dict(hidden_size=48, intermediate_size=40, vocab_size=64)
    other = tiny.save_model(tmp_path / "other", "qwen3", seed=99, **shape)
    args = student, [one, one, other], str(tmp_path)
    [[first, again, another]] = world.run(trained_by, 1, *args)
    assert not first and not again and "are of another teacher" in another


def test_every_column_of_a_dataset_in_memory_is_in_its_fingerprint():
    sample = {"input_ids": [1, 2, 3], "labels": [2, 3, 4], "answer_label": 1}
    of_pair = {"chosen": sample, "rejected": sample, "pair_weight": 1.0}
    changes = {"input_ids": [1, 2, 5], "labels": [-100, 3, 4], "answer_label": 0}
    datasets = [[sample], [sample, sample]]
    datasets += [[sample | {name: value}] for name, value in changes.items()]
    datasets += [[of_pair], [of_pair | {"pair_weight": 2.0}], [of_pair | {"pair_margin": 1.0}]]
    assert len(set(map(fingerprint_of, datasets))) == len(datasets)


def test_trained_tokens_are_numbered_in_the_order_of_samples():
    samples = tiny.samples(8)
    counts = trained_counts(samples)
    view = WithRows(samples, np.append(0, counts.cumsum()), first=100)
    rows = np.concatenate([document["teacher_row"] for i in range(8) for document in view[i]])
    labels = np.concatenate([sample["labels"].numpy() for sample in samples])
    assert rows[labels != -100].tolist() == list(range(100, 100 + counts.sum()))
    assert (rows[labels == -100] == -1).all() and counts[5] == 0
    with pytest.raises(ValueError, match="the same sample in every epoch"):
        WithRows(samples, np.append(0, (counts + 1).cumsum()))[0]


# -- a pass that stops


@contextlib.contextmanager
def signalled_passes():
    """Passes of 20 rows a part, in which the last rank gets SIGTERM."""
    from mca_lite import DistillTrainer
    from mca_lite.trainer_evaluation import Evaluator

    DistillTrainer.part_rows = 20
    passes = Evaluator.passes

    def signalled(*args):
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return passes(*args)

    Evaluator.passes = signalled
    try:
        yield
    finally:
        Evaluator.passes = passes


def code_of_stopped(run, *args, **keys) -> int | None:
    """The exit code of a run stopped in its teacher's pass."""
    with signalled_passes():
        try:
            run(*args, **keys)
        except SystemExit as stop:
            return stop.code
    return None


def stopped_and_gone_on(student, teacher, out) -> tuple:
    """(exit code, rows left by a pass that got SIGTERM on its last rank, curve of the run that
    goes on, what it printed, curve of a run whose pass did not stop)."""
    config = dict(PLAIN, top_k=3, cache=f"{out}/rows")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = code_of_stopped(our_curve, student, teacher, f"{out}/a", config)
        [part] = Path(out, "rows").glob("*/*.rows")
        left = int(part.name.split("-")[1])
        parts = our_curve(student, teacher, f"{out}/b", config)
        config = dict(config, cache=f"{out}/whole")
        return code, left, said.getvalue(), parts, our_curve(student, teacher, f"{out}/c", config)


def test_a_stopped_pass_goes_on_where_it_stopped(folder, tmp_path):
    args = (f"{folder}/student", f"{folder}/teacher", str(tmp_path))
    found = world.run(stopped_and_gone_on, 2, *args)
    assert [code for code, *_ in found] == [85, 85]
    _, left, said, parts, whole = found[0]
    assert 0 < left < 40 and "SIGTERM: stopped in the teacher's pass" in said
    assert parts == whole
    stopped, other = (
        [bytes_in(folder) for folder in sorted((tmp_path / name).iterdir())]
        for name in ("rows", "whole")
    )
    assert stopped == other and len(stopped) == 2


def bytes_in(folder: Path) -> bytes:
    """The rows of a data set, one after another."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.rows")))


# -- a pass begun in one layout, finished in another

ACROSS = ("jsd", 4, "full")  # the run, as tests/shared/distilling.py has it
SEEDS = {11: 1, 9: 2}  # of the samples that a run of train() has: their numbers
ROW = np.dtype([("tokens", np.int32, (4,)), ("logps", np.float32, (5,))])
SMALL_STEPS = dict(per_device_eval_batch_size=1)
# the layouts that begin, and those that finish it: ranks, keys
BEGUN = {"tp2": (2, layouts.TP2), "torch": (1, dict(backend="torch"))}
FINISHED = {
    "pp2": (2, {**layouts.PP2, "per_device_eval_batch_size": 3}),
    "torch packed": (1, dict(backend="torch", **layouts.PACKED)),
    "cp2 packed": (2, {**layouts.CP2, **layouts.PACKED}),
    "dp2": (2, SMALL_STEPS),
    "tp2+sp pp2": (4, {**layouts.TP2_SP, **layouts.PP2}),
}
CROSSINGS = [("tp2", "pp2"), ("tp2", "torch packed")] + [
    pytest.param(*pair, marks=pytest.mark.full)
    for pair in [("tp2", "cp2 packed"), ("tp2", "dp2"), ("torch", "tp2+sp pp2")]
]


def config_across(teacher, cache) -> dict:
    """The objective with a teacher whose files the rows name."""
    return dict(keys_of_run(ACROSS), cache=cache, cache_dir=f"{cache}-sums", teacher=teacher)


def begun_rows(student, teacher, out, cache, **keys) -> int | None:
    config = config_across(teacher, cache)
    return code_of_stopped(our_curve, student, teacher, out, config, **keys, **SMALL_STEPS)


def finished_rows(student, teacher, out, cache, **keys) -> list:
    return our_curve(student, teacher, out, config_across(teacher, cache), **keys)


def assert_same_rows(folder, wanted: tuple) -> None:
    tokens, logps = wanted
    found = np.frombuffer(bytes_in(folder), ROW)
    assert found["tokens"].tolist() == tokens.tolist()
    np.testing.assert_allclose(found["logps"], logps, rtol=1e-5, atol=1e-5)


def rows_and_curve_of_torch(student, teacher, out) -> tuple:
    """({number of samples: (tokens, log-probabilities) of their trained tokens}, curve)."""
    rows = {
        count: rows_of_torch(teacher, tiny.samples(count, seed), keys_of_run(ACROSS))
        for count, seed in SEEDS.items()
    }
    [curve] = oracle_curves(student, teacher, "", out, [ACROSS])
    return rows, curve


@pytest.fixture(scope="module")
def of_torch(folder, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("of_torch"))
    args = (f"{folder}/student", f"{folder}/teacher", out)
    return world.run(rows_and_curve_of_torch, 1, *args)[0]


@pytest.fixture(scope="module")
def begun(folder, tmp_path_factory):
    """(name of a layout -> folder of the rows that it has begun), each begun once."""

    @functools.cache
    def begin(name: str) -> Path:
        ranks, keys = BEGUN[name]
        out = tmp_path_factory.mktemp("begun")
        args = (f"{folder}/student", f"{folder}/teacher", f"{out}/run", f"{out}/rows")
        assert world.run(begun_rows, ranks, *args, **keys) == [85] * ranks
        return out / "rows"

    return begin


@pytest.mark.parametrize("first, then", CROSSINGS)
def test_rows_begun_in_one_layout_are_finished_in_another(
    folder, tmp_path, of_torch, begun, first, then
):
    rows = shutil.copytree(begun(first), tmp_path / "rows")
    [before] = map(bytes_in, rows.iterdir())
    ranks, keys = FINISHED[then]
    args = (f"{folder}/student", f"{folder}/teacher", str(tmp_path / "run"), str(rows))
    curves = world.run(finished_rows, ranks, *args, **keys)
    wanted, curve = of_torch
    assert_same_curve(curves[-1], curve)
    kept = 0
    for count, seed in SEEDS.items():
        folder = rows / fingerprint_of(tiny.samples(count, seed))
        kept += bytes_in(folder).startswith(before)
        assert_same_rows(folder, wanted[count])
        assert count == 9 or 0 < len(before) < len(bytes_in(folder))
    assert kept == 1  # those begun were not written again


def packed_across(folder, out) -> tuple:
    """(exit code of a run without packs stopped at tp2, what transformers gives for its rows) of
    the command line; a packed run at pp2 finishes them."""
    from mca_lite import run

    rows = dict(teacher_top_k=4, teacher_cache=f"{out}/rows")
    given = dict(rows, eval_dataset=None, eval_strategy=None)
    keys = keys_of(folder, output_dir=f"{out}/first", **given, **layouts.TP2, **SMALL_STEPS)
    code = code_of_stopped(small_runs.train_by_words, keys)
    world.leave_layout()
    keys = keys_of(folder, output_dir=f"{out}/then", packing=True, **given, **layouts.PP2)
    small_runs.train_by_words(keys)
    packs = run.make_plan(parse_args(small_runs.words_of(keys))).data.train
    samples = [document for sample in packs.dataset for document in sample]
    return code, rows_of_torch(f"{folder}/teacher", samples, dict(OBJECTIVE, top_k=4))


@pytest.mark.full
def test_rows_begun_without_packs_are_finished_with_them(folder, tmp_path):
    code, wanted = world.run(packed_across, 2, str(folder), str(tmp_path))[0]
    assert code == 85
    [folder] = (tmp_path / "rows").iterdir()
    assert_same_rows(folder, wanted)


def refused_runs(student, teacher, other, out) -> list[str]:
    """What DistillTrainer says to what cannot be."""
    from mca_lite import DistillTrainer
    from mca_lite.data_batches import Collator
    from tests.shared.training import refusal

    DistillTrainer.part_rows = 20
    cached = dict(PLAIN, top_k=3, cache=f"{out}/rows")

    def forgetful(samples):
        batch = Collator(0)(samples)
        return {key: value for key, value in batch.items() if key != "teacher_row"}

    def attempt(config, teacher=teacher, given=True, **more):
        make = maker(teacher, config, "megatron", given)
        made = (lambda *args, **keys: make(*args, **keys, **more)) if more else make
        return refusal(train, student, f"{out}/run", trainer_class=made, steps=2)

    def resumed_with_more(first, then):
        keys = dict(steps=2, save_steps=1, save_strategy="steps")
        train(student, f"{out}/saved", trainer_class=first, **keys)
        keys |= dict(steps=3, resume_from_checkpoint="auto")
        return refusal(train, student, f"{out}/saved", trainer_class=then, **keys)

    more = dict(PLAIN, top_k=5, cache=f"{out}/five")
    whole = attempt(cached)
    for folder in Path(out, "rows").iterdir():
        [_, *others] = sorted(folder.glob("*.rows"))
        for part in others:
            part.unlink()
    return [
        whole,
        attempt(cached, other),  # without a folder's name its rows tell
        attempt(cached, given=False),
        attempt(dict(PLAIN), given=False),
        attempt(dict(cached, cache=f"{out}/more", top_k=62)),
        attempt(cached, data_collator=forgetful),
        resumed_with_more(maker(teacher, cached, "megatron"), maker(teacher, more, "megatron")),
    ]


def test_what_cannot_be_is_refused(folder, tmp_path):
    other = tiny.save_model(tmp_path / "other", "qwen3", seed=9, vocab_size=TEACHER_VOCAB)
    args = (f"{folder}/student", f"{folder}/teacher", other, str(tmp_path))
    found = world.run(refused_runs, 1, *args)[0]
    for got, words in zip(
        found,
        [
            "",
            "are of another teacher",
            "set teacher_model_name_or_path to compute them",
            "distillation needs its teacher here",
            "at most 61",
            'the data collator dropped "teacher_row"',
            "teacher_top_k and distill_temperature back to go on",
        ],
        strict=True,
    ):
        assert words in got and bool(words) == bool(got)


def test_the_example_of_configs_names_keys_of_the_stage():
    run = parse_args([str(ROOT / "configs/distill.yaml")], needs_world=False)
    assert run.stage == "distill" and run.teacher_model_name_or_path == "output/teacher"
