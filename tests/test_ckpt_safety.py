"""Whatever is damaged, full, refused or interrupted: an error that names it on every rank, and
nothing good is lost.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mca_lite import ckpt_folder
from mca_lite.files import show_size
from tests.shared import session_tools, tiny, world
from tests.shared.files import flip_bit
from tests.shared.fixtures import saved_model
from tests.shared.layouts import DIST_OPT, PP2, SAVE, TP2
from tests.shared.training import attempt, train

AUTO = dict(SAVE, resume_from_checkpoint="auto")


model_path = saved_model("qwen3")


@pytest.fixture(scope="module")
def run_of_four(model_path, tmp_path_factory):
    """(output directory with checkpoint-2 and checkpoint-4, curve of the run on two ranks, to step
    5)
    """
    folder = tmp_path_factory.mktemp("four")
    whole = world.run(train, 2, model_path, str(folder), steps=5, **SAVE, **DIST_OPT)[0]
    shutil.rmtree(folder / "checkpoint-5")
    return folder, whole


@pytest.fixture
def run_folder_copy(run_of_four, tmp_path):
    shutil.copytree(run_of_four[0], tmp_path / "run")
    return tmp_path / "run"


def printed_by_run(path: str, out: str, **keys) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(path, out, **keys)
    return printed.getvalue()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "flipped bit": ("dist/__1_0.distcp", flip_bit, "__1_0.distcp has changed since it was written"),
    "cut file": ("dist/index.json", truncate, "bytes"),
    "lost file": ("rng-0.pt", Path.unlink, "rng-0.pt is missing"),
    "cut manifest": ("manifest.json", truncate, "is damaged"),
    "no manifest": ("manifest.json", Path.unlink, "has no manifest.json"),
}


def do_damage(kind: str, folder: Path) -> str:
    """What is said of it."""
    name, damage, words = DAMAGE[kind]
    if kind == "cut manifest":
        damage = lambda path: path.write_text(path.read_text()[:-9])  # noqa: E731
    damage(folder / name)
    return words


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_found_and_named(run_folder_copy, kind):
    """What the ranks ask before they load anything, asked here."""
    newest = run_folder_copy / "checkpoint-4"
    model = ckpt_folder.read_manifest(newest)["model"]
    words = do_damage(kind, newest)
    with pytest.raises(ckpt_folder.CheckpointError, match=f"(?s)checkpoint-4.*{words}"):
        find_checkpoint(run_folder_copy, str(newest), model=model)
    found, printed = find_checkpoint(run_folder_copy, model=model)
    assert found == run_folder_copy / "checkpoint-2"
    assert "skipped checkpoint-4" in printed[0] and words in printed[0]


# how a run goes on after it knows no kind of damage
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.full] if k != "flipped bit" else []) for k in DAMAGE],
)
def test_auto_skips_a_damaged_checkpoint_and_says_why(
    model_path, run_of_four, run_folder_copy, kind
):
    words = do_damage(kind, run_folder_copy / "checkpoint-4")
    keys = dict(AUTO, resume_from_checkpoint=str(run_folder_copy / "checkpoint-4"), **DIST_OPT)
    for error, _, _ in world.run(attempt, 2, model_path, str(run_folder_copy), steps=5, **keys):
        assert words in error and "checkpoint-4" in error
    printed = world.run(
        printed_by_run, 2, model_path, str(run_folder_copy), steps=5, **AUTO, **DIST_OPT
    )[0]
    assert "skipped checkpoint-4" in printed and words in printed and "resuming from" in printed
    assert [p.name for p in ckpt_folder.list_checkpoints(run_folder_copy)] == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-5",
    ]
    assert (run_folder_copy / "set-aside-checkpoint-4").is_dir()
    history = json.loads((run_folder_copy / "trainer_state.json").read_text())["log_history"]
    assert [(h["loss"], h["grad_norm"]) for h in history] == run_of_four[1]


def test_where_no_checkpoint_is_good_nothing_starts_anew_by_itself(model_path, run_folder_copy):
    for step in (2, 4):
        flip_bit(run_folder_copy / f"checkpoint-{step}" / "training.json")
    for error, _, _ in world.run(attempt, 2, model_path, str(run_folder_copy), steps=5, **AUTO):
        assert "none of the checkpoints" in error and "overwrite_output_dir: true" in error


def test_a_checkpoint_of_another_model_version_or_backend_is_refused(
    model_path, run_folder_copy, tmp_path, monkeypatch
):
    other = tiny.save_model(tmp_path / "other", "qwen3", intermediate_size=64)
    for error, _, _ in world.run(attempt, 2, other, str(run_folder_copy), steps=5, **AUTO):
        assert "intermediate_size 48 instead of 64" in error and "manifest.json" in error
    for error, _, _ in world.run(
        attempt, 2, model_path, str(run_folder_copy), backend="torch", steps=5, **AUTO
    ):
        assert "use_mca: true" in error
    with monkeypatch.context() as patch:  # as a newer version writes it
        patch.setattr(ckpt_folder, "FORMAT_VERSION", ckpt_folder.FORMAT_VERSION + 1)
        record = ckpt_folder.read_manifest(run_folder_copy / "checkpoint-4")
        facts = {key: record[key] for key in ("backend", "step", "with_optimizer", "model")}
        ckpt_folder.write_manifest(run_folder_copy / "checkpoint-4", facts, record["files"])
    for error, _, _ in world.run(attempt, 2, model_path, str(run_folder_copy), steps=5, **AUTO):
        newest = ckpt_folder.FORMAT_VERSION
        assert f"has format {newest + 1}" in error and f"up to {newest}" in error
        assert "checkpoint-4" in error


def run_with_full_disk(path: str, out: str, full_rank: int, limit: int, **keys):
    """A run on whose rank `full_rank` files cannot grow beyond `limit` bytes once checkpoint-2 is
    there.
    """
    from mca_lite.callbacks import TrainerCallback
    from tests.shared import training

    class Fill(TrainerCallback):
        def on_save(self, args, state, control, path, step, trainer, **kwargs):
            if int(os.environ["RANK"]) == full_rank and step == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    try:
        return "", training.train(path, out, callbacks=[Fill()], **keys)
    except ValueError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(error), []


@pytest.mark.parametrize(
    "limit, keys", [(20000, {}), (20000, dict(async_save=True)), (9000, dict(backend="torch"))]
)
@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_stops_all_ranks_and_leaves_what_was_there(
    model_path, tmp_path, full_rank, limit, keys
):
    if keys.get("backend") == "torch" and full_rank:
        limit = 5000  # its rank 1 writes nothing but random states
    for error, _ in world.run(
        run_with_full_disk, 2, model_path, str(tmp_path), full_rank, limit, steps=5, **SAVE, **keys
    ):
        assert (
            "checkpoint-4 could not be" in error
            and "File too large" in error
            and "untouched" in error
        )
    assert [p.name for p in ckpt_folder.all_folders(tmp_path)] == ["checkpoint-2"]
    assert not list(tmp_path.glob(".checkpoint*"))
    world.run(
        train,
        2,
        model_path,
        str(tmp_path),
        steps=3,
        **AUTO,
        **{k: v for k, v in keys.items() if k == "backend"},
    )


def blocked(path: str, out: str) -> str:
    """The error of a run in which something else takes the name that checkpoint-2 is
    written under.
    """
    from mca_lite.callbacks import TrainerCallback
    from tests.shared import training

    class Block(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            Path(out, ".checkpoint-2.tmp").touch()

    try:
        training.train(path, out, steps=3, callbacks=[Block()], **SAVE)
    except ValueError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_made_stops_all_ranks(model_path, tmp_path):
    for error in world.run(blocked, 2, model_path, str(tmp_path)):
        assert ".checkpoint-2.tmp" in error and "File exists" in error


def unwritable(path: str, out: str) -> str:
    """The error of a run that may no longer write into its folder when checkpoint-4 is due: a root
    becomes nobody first.
    """
    from mca_lite.callbacks import TrainerCallback
    from tests.shared import training

    class Forbid(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if os.environ["RANK"] == "0":
                os.chmod(out, 0o555)
            if os.geteuid() == 0:
                os.setuid(65534)

    try:
        training.train(path, out, steps=5, callbacks=[Forbid()], **{**SAVE, "logging_steps": 100})
    except ValueError as error:
        return str(error)
    return ""


def test_a_folder_without_permission_stops_all_ranks_and_leaves_what_was_there(model_path):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        os.chmod(folder, 0o755)
        out = Path(folder) / "run"
        for error in world.run(unwritable, 2, model_path, str(out)):
            assert ".checkpoint-4.tmp" in error and "Permission denied" in error
        os.chmod(out, 0o755)
        assert [p.name for p in ckpt_folder.list_checkpoints(out)] == ["checkpoint-2"]
        world.run(train, 2, model_path, str(out), steps=3, **AUTO)


def test_going_on_from_an_older_checkpoint_sets_newer_ones_aside(model_path, run_folder_copy):
    keys = dict(
        SAVE, resume_from_checkpoint=str(run_folder_copy / "checkpoint-2"), learning_rate=5e-3
    )
    world.run(train, 1, model_path, str(run_folder_copy), steps=3, **keys)
    assert [p.name for p in ckpt_folder.list_checkpoints(run_folder_copy)] == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    assert (run_folder_copy / "set-aside-checkpoint-4" / "manifest.json").is_file()
    assert (run_folder_copy / "latest").read_text() == "checkpoint-3\n"


def test_pruning_spares_the_newest_and_the_best(tmp_path):
    for step in (2, 4, 6, 8):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
    ckpt_folder.prune(tmp_path / "checkpoint-8", str(tmp_path / "checkpoint-2"), 2)
    assert [p.name for p in ckpt_folder.list_checkpoints(tmp_path)] == [
        "checkpoint-2",
        "checkpoint-8",
    ]
    ckpt_folder.prune(tmp_path / "checkpoint-8", str(tmp_path / "checkpoint-2"), 1)
    assert [p.name for p in ckpt_folder.list_checkpoints(tmp_path)] == [
        "checkpoint-2",
        "checkpoint-8",
    ]


def test_what_a_dead_run_left_half_done_is_put_right(model_path, run_of_four, run_folder_copy):
    (run_folder_copy / ".checkpoint-6.tmp").mkdir()
    (run_folder_copy / ".checkpoint-1.old").mkdir()
    os.rename(
        run_folder_copy / "checkpoint-4", run_folder_copy / ".checkpoint-4.replaced"
    )  # died between two renames
    printed = world.run(
        printed_by_run, 2, model_path, str(run_folder_copy), steps=5, **AUTO, **DIST_OPT
    )[0]
    assert "checkpoint-4" in printed
    assert not list(run_folder_copy.glob(".checkpoint*"))


def test_a_new_run_does_not_begin_beside_a_checkpoint_that_gets_its_name_back(tmp_path):
    small_checkpoint(tmp_path / "checkpoint-4").rename(tmp_path / ".checkpoint-4.replaced")
    with pytest.raises(ckpt_folder.CheckpointError, match="the newest checkpoint-4"):
        find_checkpoint(tmp_path, None)
    (tmp_path / "checkpoint-4").rename(tmp_path / ".checkpoint-4.replaced")
    assert find_checkpoint(tmp_path, None, overwrite=True)[0] is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "ranks, keys", [(1, {}), (2, DIST_OPT), (2, PP2), (2, dict(backend="torch"))]
)
def test_a_checkpoint_written_in_the_background_holds_its_own_step(
    model_path, tmp_path, ranks, keys
):
    names, records = {}, {}
    for kind in (False, True):
        folder = tmp_path / str(kind)
        world.run(train, ranks, model_path, str(folder), steps=3, async_save=kind, **SAVE, **keys)
        record = json.loads((folder / "checkpoint-2" / "manifest.json").read_text())
        names[kind] = record["files"]
        records[kind] = json.loads((folder / "checkpoint-2" / "training.json").read_text())
        for key in ("async_save", "output_dir"):
            del records[kind]["settings"][key]
        assert [p.name for p in ckpt_folder.list_checkpoints(folder)] == [
            "checkpoint-2",
            "checkpoint-3",
        ]
    assert records[True] == records[False]
    for name in names[False]:
        if not name.startswith(
            ("trainer_state", "training", "rng")
        ):  # these hold times, the settings, an id, unseeded states
            assert names[True][name] == names[False][name], name


def named_late(path: str, out: str) -> list:
    """[(step of a checkpoint, step after which it has its name)], where rank 1 has written
    checkpoint-2 in step 3, and checkpoint-4 only when the next one is due.
    """
    import threading

    from mca_lite.callbacks import TrainerCallback
    from mca_lite.ckpt_megatron import MegatronSnapshot
    from tests.shared import training

    gates, write, is_late = (
        {2: threading.Event(), 4: threading.Event(), 6: None},
        MegatronSnapshot.write,
        [],
    )
    named, late = [], os.environ["RANK"] == "1"

    def wait_and_write(self, folder):
        gate = gates[int(folder.stem.rpartition("-")[2])]
        if late and gate is not None:
            is_late.append(gate.wait(20))
        return write(self, folder)

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, trainer, **kwargs):
            newest = ckpt_folder.list_checkpoints(out)[-1:]
            assert state.global_step - (ckpt_folder.step_of(newest[0]) if newest else 0) <= 4, (
                "two intervals are the most"
            )
            if state.global_step == 3:
                gates[2].set()
                while trainer.checkpoints.is_writing:
                    time.sleep(0.01)
            if state.global_step == 6 and late:
                threading.Timer(0.2, gates[4].set).start()

        def on_save(self, args, state, control, path, step, **kwargs):
            named.append((step, state.global_step))

    MegatronSnapshot.write = wait_and_write
    training.train(path, out, steps=6, callbacks=[Watch()], async_save=True, **SAVE)
    assert is_late == [True, True] or not late
    return named


def test_in_the_background_a_checkpoint_is_named_once_all_have_written_and_before_the_next(
    model_path, tmp_path
):
    for named in world.run(named_late, 2, model_path, str(tmp_path)):
        assert named == [(2, 3), (4, 6), (6, 6)]


def memory_of_copies(path: str, out: str, **keys) -> tuple[list, int, int, list[str]]:
    """(addresses of the copies in each of two saves, bytes reserved before the first, bytes copied
    by one, folders at the end) of a run that writes beside training."""
    from mca_lite import parallel
    from tests.shared import training

    saves: list = []
    sizes: list = []

    class Watched(parallel.HostBuffers):
        def reserve(self, wanted):
            sizes.extend(wanted)
            super().reserve(wanted)

        def reuse(self):
            saves.append([])
            super().reuse()

        def copy(self, tensor):
            found = super().copy(tensor)
            assert torch.equal(found, tensor) and found.data_ptr() != tensor.data_ptr()
            saves[-1].append((found.data_ptr(), found.nbytes))
            return found

    parallel.HostBuffers = Watched
    training.train(path, out, async_save=True, save_total_limit=1, **SAVE, **keys)
    addresses = [sorted(address for address, _ in save) for save in saves]
    copied = sum(size for _, size in saves[0])
    names = sorted(entry.name for entry in Path(out).glob("*checkpoint*"))
    return addresses, sum(sizes), copied, names


@pytest.mark.parametrize("keys", [DIST_OPT, PP2], ids=["dist_opt", "pp2"])
def test_copies_of_all_checkpoints_are_in_the_same_memory_reserved_when_training_begins(
    model_path, tmp_path, keys
):
    found = world.run(memory_of_copies, 2, model_path, str(tmp_path), **keys)
    of_model = sum(
        tensor.nbytes for tensor in load_file(Path(model_path) / "model.safetensors").values()
    )
    for (first, second), reserved, copied, names in found:
        # a tied embedding of the last stage is reserved, and not written
        assert first == second and copied <= reserved <= 1.05 * copied
        assert names == ["checkpoint-4"]
    # weights and two moments, in float32: each by one rank
    assert sum(copied for _, _, copied, _ in found) == pytest.approx(3 * of_model, rel=0.1)


def memory_of_adapters(path: str, out: str) -> tuple:
    return memory_of_copies(path, out, adapt=session_tools.with_adapters)


def test_copies_of_adapters_reserve_nothing_for_the_frozen_base(model_path, tmp_path):
    [(_, reserved, copied, _)] = world.run(memory_of_adapters, 1, model_path, str(tmp_path))
    assert copied <= reserved <= 1.05 * copied


def told_of_memory(path: str, out: str, free: int, **keys) -> list[str]:
    """What a run with `free` bytes of host memory tells of its copies."""
    import psutil

    from tests.shared import training

    psutil.virtual_memory = lambda: SimpleNamespace(available=free)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        training.train(path, out, async_save=True, **SAVE, **keys)
    return [line for line in told.getvalue().splitlines() if "host memory" in line]


def test_a_host_without_room_for_the_copies_of_its_ranks_is_told(model_path, tmp_path):
    weights = load_file(Path(model_path) / "model.safetensors").values()
    states = 3 * sum(tensor.nbytes for tensor in weights)
    told = world.run(told_of_memory, 2, model_path, str(tmp_path / "a"), states // 2, **DIST_OPT)
    words = f"of host memory, and {show_size(states // 2)} are free"
    assert len(told[0]) == 1 and words in told[0][0] and "async_save: false" in told[0][0]
    assert told[1] == []  # one line a host
    enough = world.run(told_of_memory, 2, model_path, str(tmp_path / "b"), 2 * states, **DIST_OPT)
    assert enough == [[], []]


def interrupted(path: str, out: str, number: int, **keys):
    """A run whose rank 1 gets a signal in step 3; (exit code, step of the newest checkpoint)."""
    from mca_lite.callbacks import Interrupted, TrainerCallback
    from tests.shared import training

    class Send(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if (
                state.global_step == 3
                and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
            ):
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    try:
        training.train(path, out, callbacks=[Send()], **keys)
    except Interrupted as end:
        return end.code, end.step, signal.getsignal(number) == before
    return None


BACKGROUND = dict(async_save=True, **PP2)
SIGNALED = [
    *((signal.SIGTERM, keys) for keys in (TP2, dict(backend="torch"), BACKGROUND)),
    *((number, dict(backend="torch")) for number in (signal.SIGUSR1, signal.SIGINT)),
    (signal.SIGTERM, dict(backend="torch", save_only_model=True)),  # but this one with all
    # what a signal's number is is forgotten where the run saves
    *(pytest.param(signal.SIGUSR1, keys, marks=pytest.mark.full) for keys in (TP2, BACKGROUND)),
]


@pytest.fixture(scope="module")
def undisturbed_curves(model_path, tmp_path_factory):
    """run(keys) -> the curve of a run of two ranks that gets no signal; each is made once."""
    done = {}

    def run(keys: dict):
        key = str(keys)
        if key not in done:
            out = str(tmp_path_factory.mktemp("undisturbed"))
            done[key] = world.run(train, 2, model_path, out, steps=4, **keys)[0]
        return done[key]

    return run


@pytest.mark.parametrize("number, keys", SIGNALED)
def test_a_signal_to_one_rank_saves_and_stops_all(
    model_path, undisturbed_curves, tmp_path, number, keys
):
    whole = undisturbed_curves(keys)
    answers = world.run(
        interrupted, 2, model_path, str(tmp_path / "run"), number, steps=4, **SAVE, **keys
    )
    assert answers == [(85, 3, True)] * 2
    assert json.loads((tmp_path / "run/run_summary.json").read_text())["state"] == "interrupted"
    assert [p.name for p in ckpt_folder.list_checkpoints(tmp_path / "run")] == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    assert (
        world.run(train, 2, model_path, str(tmp_path / "run"), steps=4, **AUTO, **keys)[0] == whole
    )


def stopped_in_its_second_run(path: str, out: str) -> list[int]:
    """max_steps in the state that checkpoint-2 has: of a run of two steps; then of one of four in
    the same trainer, which a signal stops after its second."""
    from mca_lite import AutoModel, McaTrainer, TrainingArguments
    from mca_lite.callbacks import Interrupted, TrainerCallback

    class Send(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.max_steps == 4 and state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    args = TrainingArguments(
        output_dir=out, max_steps=2, save_strategy="steps", save_steps=9, disable_tqdm=True
    )
    model = AutoModel.from_pretrained(path, args)
    trainer = McaTrainer(model, args, train_dataset=tiny.samples(8), callbacks=[Send()])
    found = []
    for steps in (2, 4):
        args.max_steps = steps
        args.overwrite_output_dir = True
        with contextlib.suppress(Interrupted):
            trainer.train()
        state = json.loads(Path(out, "checkpoint-2/trainer_state.json").read_text())
        found.append(state["max_steps"])
    return found


def test_a_second_run_is_saved_at_the_step_that_the_first_one_saved(model_path, tmp_path):
    assert world.run(stopped_in_its_second_run, 1, model_path, str(tmp_path)) == [[2, 4]]


# what lies about in output_dir

FACTS = {"backend": "megatron", "step": 4, "with_optimizer": True, "model": {"vocab_size": 61}}


def small_checkpoint(folder: Path) -> Path:
    """A complete checkpoint of one file."""
    folder.mkdir(parents=True)
    (folder / "training.json").write_text("{}")
    files = {"training.json": ckpt_folder.measure(folder / "training.json")}
    ckpt_folder.write_manifest(folder, {**FACTS, "step": ckpt_folder.step_of(folder)}, files)
    return folder


def find_checkpoint(
    output_dir: Path, asked="auto", overwrite: bool = False, model=FACTS["model"]
) -> tuple[Path | None, list[str]]:
    """(the checkpoint that a run goes on from, the lines that it prints)."""
    said = []
    args = SimpleNamespace(output_dir=str(output_dir), overwrite_output_dir=overwrite)
    found = ckpt_folder.find(args, asked, "megatron", model, said.append)
    return found, said


def test_no_flipped_bit_of_a_manifest_is_accepted(tmp_path):
    folder = small_checkpoint(tmp_path / "checkpoint-4")
    path = folder / "manifest.json"
    whole, wanted = path.read_bytes(), ckpt_folder.read_manifest(folder)
    for place in range(len(whole) * 8):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with contextlib.suppress(ckpt_folder.CheckpointError):
            assert ckpt_folder.read_manifest(folder) == wanted, data
    path.write_bytes(whole)
    assert ckpt_folder.read_manifest(folder) == wanted


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", "[" * 100_000, '{"format": true}', '{"format": 0, "files": {}}']
)
def test_auto_falls_back_where_a_manifest_is_none(tmp_path, text):
    older = small_checkpoint(tmp_path / "checkpoint-2")
    (small_checkpoint(tmp_path / "checkpoint-4") / "manifest.json").write_text(text)
    found, said = find_checkpoint(tmp_path)
    assert found == older and "skipped checkpoint-4" in said[0] and "is damaged" in said[0]


@pytest.mark.parametrize(
    "change",
    [
        dict(files=None),
        dict(files={"gone.bin": {"bytes": 1, "crc32": "00000000"}}),
        dict(files={"a\0b": {"bytes": 1, "crc32": "00000000"}}),
        dict(step="4"),
        dict(backend=["megatron"]),
    ],
)
def test_auto_falls_back_where_a_manifest_has_other_types_or_files(tmp_path, change):
    older = small_checkpoint(tmp_path / "checkpoint-2")
    newer = small_checkpoint(tmp_path / "checkpoint-4")
    record = ckpt_folder.read_manifest(newer) | change
    record["crc32"] = ckpt_folder.crc_of(record)
    (newer / "manifest.json").write_text(json.dumps(record))
    found, said = find_checkpoint(tmp_path)
    assert found == older and "skipped checkpoint-4" in said[0] and "is damaged" in said[0]


def test_a_pipe_in_place_of_a_file_is_damage_and_nobody_waits_for_it(tmp_path):
    older = small_checkpoint(tmp_path / "checkpoint-2")
    path = small_checkpoint(tmp_path / "checkpoint-4") / "training.json"
    path.unlink()
    os.mkfifo(path)
    found, said = find_checkpoint(tmp_path)
    assert found == older and "training.json is missing, or no file" in said[0]


def litter(output_dir: Path, elsewhere: Path) -> Path:
    """Links, files and odd names beside the real checkpoint-4 -> the folder that the links
    lead to.
    """
    target = small_checkpoint(elsewhere / "checkpoint-2")
    small_checkpoint(output_dir / "checkpoint-4")
    for name in (
        "checkpoint-2",
        ".checkpoint-2.tmp",
        ".checkpoint-1.old",
        ".checkpoint-6.replaced",
    ):
        (output_dir / name).symlink_to(target)
    (output_dir / "checkpoint-9").symlink_to(elsewhere / "nowhere")
    for name in (".checkpoint-x.tmp", ".checkpoint-8.tmp", "checkpoint-7"):
        (output_dir / name).write_text("a file")
    (output_dir / "checkpoint-best-12").mkdir()
    os.mkdir(os.fsencode(output_dir) + b"/checkpoint-\xff-12")
    return target


@pytest.mark.parametrize("asked, overwrite", [("auto", False), (None, True)])
def test_what_is_no_checkpoint_of_ours_is_left_alone(tmp_path, asked, overwrite):
    target = litter(tmp_path / "run", tmp_path / "elsewhere")
    found, _ = find_checkpoint(tmp_path / "run", asked, overwrite)
    assert found == (tmp_path / "run" / "checkpoint-4" if asked else None)
    assert ckpt_folder.damage(target, ckpt_folder.read_manifest(target)) == ""
    for name in ("checkpoint-2", ".checkpoint-2.tmp", ".checkpoint-1.old"):
        assert (tmp_path / "run" / name).is_symlink()
    assert (tmp_path / "run" / "checkpoint-7").read_text() == "a file"
    assert find_checkpoint(tmp_path / "run", "auto")[0] == found


def test_pruning_and_naming_touch_no_link(tmp_path):
    target, run = litter(tmp_path / "run", tmp_path / "elsewhere"), tmp_path / "run"
    for step in (2, 6):
        written = small_checkpoint(run / f"written-{step}")
        ckpt_folder.publish(written, run / f"checkpoint-{step}")
    assert (run / ".checkpoint-2.replaced").is_symlink()
    ckpt_folder.prune(run / "checkpoint-6", None, 1)
    assert [p.name for p in ckpt_folder.list_checkpoints(run)] == ["checkpoint-6"]
    assert ckpt_folder.damage(target, ckpt_folder.read_manifest(target)) == ""


def test_records_of_a_checkpoint_with_other_content_are_named(tmp_path):
    from mca_lite import ckpt

    good = {"with_optimizer": True, "scheduler_steps": 4, "num_samples": 8, "global_batch_size": 2}
    good |= {"layout": [1, 1], "streaming": False, "loss_scales": []}
    good |= {"objective": {}, "base": {}, "settings": {}}
    steps = [None, 5, -1, 1e30]
    states = [{"global_step": n} for n in (3, -1, 10**30, 1e300)]
    states += [{"global_step": 4, "consumed_samples": -1}]
    contents = {
        "training.json": [json.dumps({**good, "scheduler_steps": n}) for n in steps],
        "trainer_state.json": ['{"global_step": 1e400}', *map(json.dumps, states)],
    }
    small_checkpoint(tmp_path / "checkpoint-4")
    folder = tmp_path / "checkpoint-4"
    for name, texts in contents.items():
        (folder / "training.json").write_text(json.dumps(good))
        (folder / "trainer_state.json").write_text('{"global_step": 4}')
        assert ckpt.read_records(folder)[1].global_step == 4
        for bad in (*texts, "[" * 100_000, "null", ""):
            (folder / name).write_text(bad)
            with pytest.raises(ckpt_folder.CheckpointError, match=f"{name}.*another checkpoint"):
                ckpt.read_records(folder)


NO_STATES = [None, [1], {}, "text", {"torch": "x"}, {"torch": torch.zeros(3, dtype=torch.uint8)}]


@pytest.mark.parametrize("content", [*NO_STATES, b"hello", b""], ids=str)
def test_random_states_that_are_none_are_named(tmp_path, content):
    from mca_lite import ckpt

    path = tmp_path / "rng-0.pt"
    path.write_bytes(ckpt.random_states())
    before = torch.get_rng_state()
    ckpt.restore_random_states(tmp_path, True)
    assert torch.equal(torch.get_rng_state(), before)
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    ckpt.restore_random_states(tmp_path, False)  # of another layout: not read
    with pytest.raises(ckpt_folder.CheckpointError, match="random states cannot be read.*another"):
        ckpt.restore_random_states(tmp_path, True)


def sign_again(folder: Path) -> None:
    """Give a checkpoint the manifest of what it holds now, as an attacker or a careless
    tool does.
    """
    record = ckpt_folder.read_manifest(folder)
    facts = {key: record[key] for key in ("backend", "step", "with_optimizer", "model")}
    files = {name: ckpt_folder.measure(folder / name) for name in record["files"]}
    ckpt_folder.write_manifest(folder, facts, files)


def test_tensors_that_are_none_are_an_error_and_no_traceback(model_path, run_folder_copy):
    path = run_folder_copy / "checkpoint-4" / "dist" / "__1_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    sign_again(run_folder_copy / "checkpoint-4")
    keys = dict(AUTO, **DIST_OPT)
    for error, _, _ in world.run(attempt, 2, model_path, str(run_folder_copy), steps=5, **keys):
        assert (
            "checkpoint-4/dist cannot be read" in error and "(rank 0" in error and "\n" not in error
        )


def lost(tensors: dict, name: str) -> dict:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_tensors_of_the_torch_backend_are_checked_by_name_and_shape(tmp_path, file):
    from safetensors.torch import save_file

    from mca_lite import ckpt

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ckpt.TorchSnapshot(model, optimizer).write(tmp_path)
    path, name = tmp_path / f"{file}.safetensors", "weight" if file == "model" else "exp_avg.weight"
    whole, bytes_before = load_file(path), path.read_bytes()
    for changed in (lost(whole, name), {**whole, name: torch.zeros(5)}):
        save_file(changed, path)
        with pytest.raises(ckpt_folder.CheckpointError, match=f"{path}: expected {name} of shape"):
            ckpt.load_torch(tmp_path, model, optimizer)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="damaged or cut"):
        ckpt.load_torch(tmp_path, model, optimizer)
    path.write_bytes(bytes_before)
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    ckpt.load_torch(tmp_path, model, optimizer)
    assert all(torch.equal(optimizer.state[model.weight][key], before[key]) for key in before)
