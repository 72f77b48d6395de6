"""Callbacks of transformers: their events, flags that all ranks follow, states; overrides that
would not be called; the import lines of mcore_adapter.
"""

import functools
import gc
import importlib
import json
import os
import warnings
import weakref
from types import SimpleNamespace

import pytest

from tests.shared import tiny, tiny_moe, world
from tests.shared.fixtures import saved_model
from tests.shared.layouts import CP2, DIST_OPT, LOOP, PACKED, PP2, SP, TP2
from tests.shared.training import arguments, train

model_path = saved_model("qwen3")


def recorder(events: list, actions=None):
    """A callback of transformers that notes each event, and does `actions[event]`."""
    from transformers import TrainerCallback

    def method(name):
        def on_event(self, args, state, control, **kwargs):
            events.append(f"{name.removeprefix('on_')} {state.global_step}")
            for key in ("model", "processing_class", "optimizer", "lr_scheduler"):
                assert key in kwargs
            if name == "on_step_begin":
                assert kwargs["train_dataloader"] is not None and kwargs["optimizer"] is not None
            if name in (actions or {}):
                actions[name](state, control)
                return control

        return on_event

    names = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    return type("Recorder", (TrainerCallback,), {name: method(name) for name in names})()


KEYS = dict(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=4,
    learning_rate=1e-3,
)


def our_trainer(path, out, callbacks, count=12, **changes):
    from mca_lite import McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    keys = {**KEYS, "num_train_epochs": 2, "disable_tqdm": True, **changes}
    return McaTrainer(
        load_torch_model(path),
        TrainingArguments(output_dir=out, **keys),
        train_dataset=tiny.samples(count),
        eval_dataset=tiny.samples(8, seed=2),
        callbacks=callbacks,
    )


def our_events(path, out) -> list[str]:
    events: list[str] = []
    our_trainer(path, out, [recorder(events)]).train()
    return events


def events_of_transformers(path, out) -> list[str]:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from mca_lite.data_batches import Collator

    events: list[str] = []
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(path),
        TrainingArguments(out, num_train_epochs=2, use_cpu=True, report_to=[], **KEYS),
        data_collator=Collator(0),
        train_dataset=tiny.samples(12),
        eval_dataset=tiny.samples(8, seed=2),
        callbacks=[recorder(events)],
    )
    trainer.train()
    return events


def test_events_come_in_the_order_of_transformers(model_path, tmp_path):
    [ours] = world.run(our_events, 1, model_path, str(tmp_path / "ours"))
    [theirs] = world.run(events_of_transformers, 1, model_path, str(tmp_path / "theirs"))
    # theirs: a prediction step is a micro-batch, an evaluation logs its metrics as a line of its
    # own, and the speed of the run is a line at its end
    ours = [event for event in ours if not event.startswith("prediction_step")]
    theirs = [event for event in theirs if not event.startswith("prediction_step")]
    logs = [i for i, event in enumerate(theirs) if event.startswith("log")]
    extra = {i for i in logs if theirs[i - 1].startswith("log")} | {logs[-1]}
    assert ours == [event for i, event in enumerate(theirs) if i not in extra]


def run_with_flags(path, out) -> tuple[list[str], int]:
    """Two ranks, each raising flags that the other does not raise."""
    rank, events = int(os.environ["RANK"]), []

    def step_end(state, control):
        if state.global_step == 1:
            control.should_save = rank == 1
        if state.global_step == 2:
            control.should_log = rank == 0

    def log(state, control):
        control.should_evaluate = rank == 1

    def evaluate(state, control):
        control.should_training_stop = rank == 0

    actions = {"on_step_end": step_end, "on_log": log, "on_evaluate": evaluate}
    changes = dict(logging_steps=50, eval_strategy="no", save_strategy="no", num_train_epochs=9)
    trainer = our_trainer(path, out, [recorder(events, actions)], **changes)
    trainer.train()
    kept = ("save", "log", "evaluate", "epoch_end", "train_end")
    return [event for event in events if event.startswith(kept)], trainer.state.global_step


def test_a_flag_that_one_rank_raises_counts_on_all(model_path, tmp_path):
    wanted = ["save 1", "log 2", "evaluate 2", "epoch_end 2", "train_end 2"]
    assert world.run(run_with_flags, 2, model_path, str(tmp_path)) == [(wanted, 2)] * 2


def run_stopping_epochs(path, out, resume=None, **changes) -> tuple[list, list, dict]:
    """Three steps an epoch, of which the second is the last one in epoch 0."""
    events: list[str] = []

    def stop(state, control):
        control.should_epoch_stop = state.global_step == 2

    callback = recorder(events, {"on_step_end": stop})
    keys = dict(logging_steps=1, save_steps=1, num_train_epochs=3, eval_strategy="no", **changes)
    trainer = our_trainer(path, out, [callback], **keys)
    trainer.train(resume_from_checkpoint=resume)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    kept = [event for event in events if event.startswith(("epoch", "train_end"))]
    left_out = dict.fromkeys(("stateful_callbacks", "log_history", "resumes"))
    return kept, losses, vars(trainer.state) | left_out


def test_an_epoch_that_is_stopped_goes_on_with_the_next_also_after_a_resume(model_path, tmp_path):
    [(events, losses, state)] = world.run(run_stopping_epochs, 1, model_path, str(tmp_path))
    assert events == [
        "epoch_begin 0", "epoch_end 2", "epoch_begin 2", "epoch_end 5", "epoch_begin 5",
        "epoch_end 8", "train_end 8",
    ]  # fmt: skip
    assert (state["global_step"], state["left_out_steps"], state["epoch"]) == (8, 1, 3.0)
    again = str(tmp_path / "checkpoint-2")
    [(_, resumed, end)] = world.run(run_stopping_epochs, 1, model_path, str(tmp_path), again)
    assert (resumed, end) == (losses, state)


def run_early_stopping(path, out, steps, resume=None) -> tuple[int, int]:
    from transformers import EarlyStoppingCallback

    callback = EarlyStoppingCallback(3, early_stopping_threshold=10.0)  # no gain is so large
    keys = dict(
        max_steps=steps, eval_steps=1, save_steps=1, metric_for_best_model="loss",
        lr_scheduler_type="constant", overwrite_output_dir=resume is None,
    )  # fmt: skip
    trainer = our_trainer(path, out, [callback], **keys)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step, callback.early_stopping_patience_counter


def test_early_stopping_of_transformers_goes_on_counting_after_a_resume(model_path, tmp_path):
    out = str(tmp_path)
    assert world.run(run_early_stopping, 1, model_path, out, 3) == [(3, 2)]
    saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    [state] = saved["stateful_callbacks"]["EarlyStoppingCallback"]
    assert state["attributes"] == {"early_stopping_patience_counter": 2}
    assert world.run(run_early_stopping, 1, model_path, out, 9, "auto") == [(4, 3)]


def callbacks_of_every_kind(path, out) -> None:
    from transformers import PrinterCallback, TrainerCallback

    class Mine(TrainerCallback):
        def __init__(self):
            self.steps = []

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

        def on_step_end(self, args, state, control, **kwargs):
            assert state.is_world_process_zero and state.is_local_process_zero
            self.steps.append(state.global_step)

    trainer = our_trainer(path, out, [Mine, PrinterCallback])
    mine = next(one for one in trainer.callbacks if isinstance(one, Mine))
    trainer.add_callback(Mine)
    assert trainer.pop_callback(Mine) is mine
    second = trainer.pop_callback(Mine)
    assert trainer.pop_callback(Mine) is None
    trainer.add_callback(second)
    trainer.remove_callback(PrinterCallback)
    assert not any(isinstance(one, PrinterCallback) for one in trainer.callbacks)
    trainer.train()
    third = our_trainer(path, out, [Mine], num_train_epochs=3)
    third.train(resume_from_checkpoint=True)
    assert next(one for one in third.callbacks if isinstance(one, Mine)).steps == [*range(1, 10)]
    with pytest.raises(TypeError, match="has no on_init_end: derive it from"):
        our_trainer(path, out, [object()])


def test_callbacks_are_added_and_removed_and_keep_their_state(model_path, tmp_path):
    world.run(callbacks_of_every_kind, 1, model_path, str(tmp_path))


def hook(*names: str):
    """A function with these arguments."""
    return eval(f"lambda {', '.join(['self', *names])}: None")


@pytest.mark.parametrize(
    ("name", "member", "said"),
    [
        ("compute_loss", hook("model", "inputs"), r"never be called: override _post_compute_loss"),
        ("_inner_forward_step", hook("data_iterator", "model"), "override forward_step"),
        ("get_batch", hook("data_iterator"), "override inputs_of"),
        (
            "_pre_compute_loss",
            hook("data_iterator", "model", "x"),
            r"called with \(batch, inputs\)",
        ),
        ("_pad_batched_inputs", hook("inputs"), r"never be called: override _arrange"),
        ("create_optimizer_and_scheduler", hook("steps"), r"override create_optimizer\(\) or"),
        ("_post_compute_loss", hook("outputs"), r"called with \(labels, losses\)"),
        ("_post_compute_loss", hook("loss_mask", "losses"), r"'loss_mask' in the place of labels"),
        ("_post_compute_loss", hook("labels", "logits"), "'logits' in the place of losses"),
        ("_post_compute_loss", hook("losses", "labels"), "'losses' in the place of labels"),
        ("_pre_compute_loss", hook("data_iterator", "model"), "in the place of batch"),
        ("training_step", hook("model", "inputs", "num_items=None"), "in the place of models"),
        ("_post_compute_loss", hook("targets", "of_tokens"), None),
        ("_prepare_train_inputs", hook("data_iterator"), None),
        ("_post_compute_loss", hook("labels", "losses", "more=1"), None),
    ],
)
def test_an_override_is_called_or_refused(name, member, said):
    from mca_lite import DPOTrainer, McaTrainer
    from mca_lite.trainer_events import check_hooks

    check_hooks(DPOTrainer, McaTrainer)
    kind = type("Mine", (McaTrainer,), {name: member})
    if said is None:
        check_hooks(kind, McaTrainer)
        return
    with pytest.raises(TypeError, match=f"Mine.{name} .*{said}"):
        check_hooks(kind, McaTrainer)


def test_a_preference_loss_with_the_arguments_of_mcore_adapter_is_refused():
    from mca_lite import DPOTrainer, McaTrainer
    from mca_lite.trainer_events import check_hooks

    theirs = hook("labels", "loss_mask", "ref_chosen_logps", "ref_rejected_logps", "logits")
    kind = type("Mine", (DPOTrainer,), {"_post_compute_loss": theirs})
    with pytest.raises(TypeError, match="'loss_mask' in the place of batch") as refused:
        check_hooks(kind, McaTrainer)
    assert "called with (labels, batch, ref_chosen_logps," in str(refused.value)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("trainer.trainer", "McaTrainer"),
        ("models", "AutoModel AutoConfig"),
        ("models.auto", "AutoModel AutoConfig"),
        ("models.auto.config_auto", "AutoConfig"),
        ("models.auto.modeling_auto", "AutoModel"),
        ("models.model_config", "McaModelConfig MLAMcaModelConfig"),
        ("models.model_factory", "McaGPTModel VirtualModels"),
        ("trainer", "McaTrainer DPOTrainer DPOConfig"),
        ("training_args", "Seq2SeqTrainingArguments TrainingArguments"),
        ("trainer.dpo_trainer", "DPOTrainer"),
        ("trainer.dpo_config", "DPOConfig"),
        (
            "trainer.utils",
            "get_ltor_masks_and_position_ids get_seqlens_in_batch check_pack_seq_aligned "
            "MegatronLRScheduler get_megatron_lr_scheduler",
        ),
    ],
)
def test_an_import_line_of_mcore_adapter_works(module, names):
    import mca_lite

    found = importlib.import_module(f"mca_lite.{module}")
    for name in names.split():
        assert getattr(found, name) is getattr(mca_lite, name)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("adapters import apply_megatron_lora, find_all_linear_modules", "finetuning_type: lora"),
        ("adapters import set_linear_is_expert", r"part_lora.inject\(model, part_lora.LoraSpec"),
        ("adapters import find_all_embedding_modules, find_all_router_modules", "LoraSpec"),
        ("checkpointing import generate_model_state_dict", r"trainer.save_model\(\)"),
        ("checkpointing import get_checkpoint_dir, load_state_dict_from_checkpoint", "AutoModel"),
        ("models.converter.model_converter import ModelConverter", "convert SRC DST"),
        ("models.converter.post_converter import convert_checkpoint_to_hf", "convert SRC DST"),
        ("models.converter.post_converter import convert_checkpoint_to_mca", "convert SRC DST"),
        ("parallel_functions import context_parallel_gather", "whole_logits"),
        ("parallel_functions import vocab_parallel_logprobs", "token_losses"),
        ("patcher import patch_torch_find_nd_overlapping_shards", "no patches"),
        ("patcher import patch_torch_validate_global_plan", "no patches"),
        ("trainer.utils import build_sharded_state_dict_metadata", "no patches"),
        ("training_args import DistributingParallelArguments", "TrainingArguments"),
        ("utils import get_logger", "logging.getLogger"),
        ("constants import TRACKER_FILENAME, DIST_MODEL_DIR", "checkpoint-N"),
        ("platforms import current_platform", "CUDA"),
    ],
)
def test_an_import_line_of_mcore_adapter_names_what_takes_its_place(line, said):
    with pytest.raises(ImportError, match=f"of mcore_adapter is not in mca_lite: .*{said}"):
        exec(f"from mca_lite.{line}")


def test_what_takes_the_place_of_names_of_mcore_adapter_is_there():
    from mca_lite import AutoModel, McaTrainer, parallel
    from mca_lite.backend import Backend
    from mca_lite.files import MCA_CONFIG_NAME
    from mca_lite.loss_tokens import token_losses
    from mca_lite.part_lora import inject
    from mca_lite.part_lora_layers import LoraSpec

    moved = importlib.import_module("mca_lite.initialize")
    assert moved.initialize_megatron is parallel.initialize
    assert MCA_CONFIG_NAME == "mca_config.json"
    constants = importlib.import_module("mca_lite.constants")
    assert constants.MCA_CONFIG_NAME is MCA_CONFIG_NAME and constants.IGNORE_INDEX == -100
    assert constants.ADAPTER_CONFIG_NAME == "adapter_config.json"
    named = [inject, LoraSpec, token_losses, Backend.whole_logits, McaTrainer.save_model]
    assert all(map(callable, [*named, McaTrainer.predict, AutoModel.from_pretrained]))


def test_a_module_that_there_is_not_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="trainer.nothing"):
        importlib.import_module("mca_lite.trainer.nothing")


def run_with_own_optimizer(path, out, scheduled: bool, resume=None, steps=4) -> list:
    """Losses of a run with an optimizer, and a scheduler, of the user's."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    from mca_lite import McaTrainer, TrainingArguments
    from mca_lite.model import load_torch_model

    model = load_torch_model(path)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "lr": 3e-3, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}]
    optimizer, scheduler = torch.optim.AdamW(groups, weight_decay=0.0), None
    if scheduled:
        scheduler = get_cosine_schedule_with_warmup(optimizer, 1, 8)
    args = TrainingArguments(
        output_dir=out, max_steps=steps, logging_steps=1, save_strategy="steps", save_steps=2,
        disable_tqdm=True, lr_scheduler_type="cosine", warmup_steps=1, learning_rate=7.0,
    )  # fmt: skip
    optimizers, data = (optimizer, scheduler), dict(train_dataset=tiny.samples(8))
    trainer = McaTrainer(model, args, optimizers=optimizers, shuffle=False, **data)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.optimizer is optimizer
    return [(line["loss"], line["learning_rate"]) for line in trainer.state.log_history]


def resume_without_warnings(path, out, again) -> list:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Detected call of")  # of a scheduler that is counted on
        return run_with_own_optimizer(path, out, True, again)


def the_same_in_torch(path, total: int) -> list:
    """The loss of each step and its rate, of a loop in plain torch."""
    import torch
    from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

    model, found = AutoModelForCausalLM.from_pretrained(path).train(), []
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "lr": 3e-3, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, total)
    for sample in tiny.samples(8)[:4]:
        logits = model(sample["input_ids"][None]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, sample["labels"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append((float(loss), scheduler.get_last_lr()[0]))
        scheduler.step()
    return found


@pytest.mark.parametrize("scheduled", [True, False])
def test_an_optimizer_of_the_users_updates_the_model_with_its_own_rates(
    model_path, tmp_path, scheduled
):
    out = str(tmp_path)
    [found] = world.run(run_with_own_optimizer, 1, model_path, out, scheduled)
    wanted = the_same_in_torch(model_path, 8 if scheduled else 4)
    for got, expected in zip(found, wanted, strict=True):
        assert got == pytest.approx(expected, rel=1e-5)
    if scheduled:
        again = f"{out}/checkpoint-2"
        [resumed] = world.run(resume_without_warnings, 1, model_path, out, again)
        assert resumed[2:] == found[2:]


def test_a_model_or_arguments_that_are_none_are_refused_before_ranks_meet(tmp_path):
    import torch

    from mca_lite import DPOTrainer, McaTrainer, TrainingArguments

    args, model = TrainingArguments(str(tmp_path)), SimpleNamespace(config=None)
    assert args.output_dir == str(tmp_path)
    for kind in (McaTrainer, DPOTrainer):
        for given in (None, "Qwen/Qwen3-0.6B", torch.nn.Linear(2, 2)):
            with pytest.raises(TypeError, match="model: expected what AutoModel.from_pretrained"):
                kind(model=given, args=args)
            with pytest.raises(TypeError, match="args: expected TrainingArguments of this package"):
                kind(model=model, args=given)
    assert not torch.distributed.is_initialized()


def test_optimizers_that_would_not_update_the_model_are_refused():
    import torch

    from mca_lite.optim import given_optimizers

    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    foreign = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(other.parameters(), lr=0.1))
    refused = [
        ((optimizer, None), True, "register_optimizer adds one for optim"),
        ((None, foreign), False, "expected a torch optimizer first, got None"),
        ((torch.optim.SGD([model.weight], lr=0.1), None), False, "lacks 1 of the model's 2"),
        ((torch.optim.SGD(other.parameters(), lr=0.1), None), False, "and has 2 others"),
        ((optimizer, plateau), False, "a scheduler of this optimizer that counts steps"),
        ((optimizer, foreign), False, "expected a scheduler of this optimizer"),
    ]
    for given, is_megatron, said in refused:
        with pytest.raises(ValueError, match=said):
            given_optimizers(given, model, is_megatron)
    assert given_optimizers((None, None), model, True) == (None, None)


def full_looks() -> int:
    """Looks of Python's collector at objects of all ages while many are made."""
    before = gc.get_stats()[2]["collections"]
    made = [[] for _ in range(100_000 + len(gc.get_objects()))]
    assert made
    return gc.get_stats()[2]["collections"] - before


@pytest.mark.parametrize("on_host", [False, True])
def test_a_host_that_feeds_a_gpu_is_not_held_up_during_a_run(on_host, monkeypatch):
    import torch

    from mca_lite import trainer_events

    threads, args = torch.get_num_threads(), SimpleNamespace(optimizer_cpu_offload=on_host)
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.set_num_threads(2)
    try:
        assert full_looks() > 0
        with pytest.raises(KeyError), trainer_events.steady_host(args):
            assert full_looks() == 0
            assert gc.get_freeze_count() == frozen
            assert torch.get_num_threads() == (2 if on_host else 1)
            raise KeyError
        assert gc.get_threshold() == thresholds
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def lives_on(path: str, out: str, host_freezes: bool, keys: dict) -> tuple[list[str], bool]:
    """After a run as on a GPU and gc.collect(): (what lives of its trainer, whether a list of the
    host is frozen). host_freezes: what was there before, as Python 3.12 itself does."""
    import torch

    from mca_lite import McaTrainer, trainer_events
    from mca_lite.callbacks import TrainerCallback

    class WithGpu:
        cuda = SimpleNamespace(is_available=lambda: True)

        def __getattr__(self, name):
            return getattr(torch, name)

    class Note(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            found = dict(optimizer=kwargs["optimizer"], weight=next(kwargs["model"].parameters()))
            held.update({name: weakref.ref(value) for name, value in found.items()})

    def make(**kwargs):
        trainer = McaTrainer(**kwargs)
        held["trainer"], held["chunk"] = weakref.ref(trainer), weakref.ref(trainer.models[0])
        return trainer

    gc.unfreeze()
    of_host, held = [{}], {}
    if host_freezes:
        gc.freeze()
    trainer_events.torch = WithGpu()
    train(path, out, trainer_class=make, callbacks=[Note()], **keys)
    gc.collect()
    alive = [name for name, reference in held.items() if reference() is not None]
    assert len(held) == 4
    return alive, not any(known is of_host for known in gc.get_objects())


# what holds a tensor with its graph holds the model: pieces of float32 weights, megatron's
# dispatchers
@pytest.mark.parametrize(
    "host_freezes, family, keys",
    [
        (False, "qwen3", {}),
        (True, "qwen3", {}),
        (True, "qwen3", DIST_OPT),
        (True, "qwen3_moe", {}),
        (True, "qwen3_moe", LOOP),
    ],
)
def test_nothing_of_a_trainer_lives_on_and_what_a_host_froze_stays_frozen(
    model_path, tmp_path, host_freezes, family, keys
):
    if family == "qwen3_moe":
        model_path = tiny_moe.save_model(tmp_path / "model", family)
    found = world.run(lives_on, 1, model_path, str(tmp_path), host_freezes, keys)
    assert found == [([], host_freezes)]


def looks_of_the_collector(path: str, out: str) -> list[int]:
    """The steps after which a run of four looks for garbage of all ages, every third one."""
    from mca_lite import trainer, trainer_events
    from mca_lite.callbacks import TrainerCallback

    steps, found = [0], []
    trainer.collect_garbage = trainer_events.collect_garbage = lambda: found.append(steps[-1])
    trainer.STEPS_PER_LOOK = 3

    class Count(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            steps.append(state.global_step + 1)

    train(path, out, callbacks=[Count()], steps=5, eval_strategy="steps", eval_steps=2)
    return found


def test_garbage_of_all_ages_goes_after_what_compiles_evaluations_and_many_steps(
    model_path, tmp_path
):
    looks = world.run(looks_of_the_collector, 1, model_path, str(tmp_path))
    assert looks == [[0, 1, 2, 4, 4, 5]]


# -- the numbers of a step, read while the update runs


def order_of_a_step(path: str, out: str, doubled: bool, **keys) -> tuple[list, list]:
    """(calls of two steps in their order, losses of the log) of a run whose training_step may
    give a loss twice as large."""
    from mca_lite import McaTrainer
    from mca_lite.trainer_events import Numbers

    calls: list = []

    over_ranks = Numbers.over_ranks

    def watched(numbers, backend):
        calls.append("numbers")
        return over_ranks(numbers, backend)

    Numbers.over_ranks = watched  # of this process, which is the test's own

    class Watched(McaTrainer):
        def training_step(self, *args):
            step = self.backend.step
            self.backend.step = lambda: calls.append("update") or step()
            loss, metrics, *rest = super().training_step(*args)
            self.backend.step = step
            if doubled:
                metrics = [
                    {name: pair * torch.tensor([2.0, 1.0]) for name, pair in found.items()}
                    for found in metrics
                ]
            return loss, metrics, *rest

    import torch

    lines = train(path, out, steps=2, trainer_class=Watched, **keys)
    return calls, [loss for loss, _ in lines]


@pytest.mark.parametrize("keys", [DIST_OPT, dict(backend="torch")], ids=["megatron", "torch"])
def test_numbers_are_sent_before_the_update_and_again_if_a_subclass_changes_them(
    model_path, tmp_path, keys
):
    run = functools.partial(world.run, order_of_a_step, 2, model_path, str(tmp_path))
    calls, losses = run(False, **keys)[0]
    assert calls == ["numbers", "update"] * 2
    calls, doubled = run(True, **keys)[0]
    assert calls == ["numbers", "update", "numbers"] * 2
    assert doubled == pytest.approx([2 * loss for loss in losses], rel=1e-6)


# -- names of mcore_adapter's trainer


def runs_with_other_names(path: str, out: str) -> list[tuple]:
    """(curve, names of hooks that were called) of a plain run and of trainers with overrides."""
    from mca_lite import McaTrainer

    def noted(name: str):
        def hook(self, *args):
            called.add(name)
            return getattr(super(type(self), self), name)(*args)

        return hook

    loop = "_get_step_iterator_and_seq_length"
    runs = []
    for names in (), ("_prepare_train_inputs", "_packing_sequence"), ("_packing_sequence", loop):
        called: set = set()
        kind = type("Mine", (McaTrainer,), {name: noted(name) for name in names})
        curve = train(path, f"{out}/{len(runs)}", steps=2, trainer_class=kind, **PACKED)
        runs.append((curve, called))
    return runs


def test_overrides_under_names_of_mcore_adapter_are_called(model_path, tmp_path):
    [runs] = world.run(runs_with_other_names, 1, model_path, str(tmp_path))
    curves, called = zip(*runs, strict=True)
    assert called == (
        set(),
        {"_prepare_train_inputs", "_packing_sequence"},
        {"_packing_sequence", "_get_step_iterator_and_seq_length"},
    )
    assert curves[0] == curves[1] == curves[2]


# -- members of the seed's models and trainers


def see_outputs(model, seen: list[bool]) -> None:
    """Note from now on whether outputs of the first stage's embedding have gradients."""
    for chunk in model:
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(lambda *call: seen.append(call[-1].requires_grad))


def seen_members(path: str, out: str, layouts: dict) -> dict:
    """On a rank, for each layout: losses of evaluate() and of a loop over the loader; the numbers
    of weights, of trained ones, of those without embeddings; whether outputs of the frozen
    embedding have gradients, before and after enable_input_require_grads()."""
    from mca_lite import AutoModel, McaTrainer

    found = {}
    for name, keys in layouts.items():
        data = dict(train_dataset=tiny.samples(4), eval_dataset=tiny.samples(7, seed=2))
        args = arguments(save_strategy="no", disable_tqdm=True, max_steps=1, **keys)
        assert args.device.type == "cpu"
        model = AutoModel.from_pretrained(path, args)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in key)
        trainer = McaTrainer(model=model, args=args, **data)
        loop = trainer.evaluation_loop(trainer.get_eval_dataloader(), "evaluation")
        losses = [metrics["eval_loss"] for metrics in (trainer.evaluate(), loop.metrics)]
        counts = [model.num_parameters(*words) for words in ((), (True,), (False, True))]
        seen: list[bool] = []
        see_outputs(model, seen)
        batches = iter(trainer.get_train_dataloader())
        trainer.training_step(model, [next(batches)], 0)
        model.enable_input_require_grads()
        see_outputs(model, seen)
        trainer.training_step(model, [next(batches)], 0)
        found[name] = losses, counts, seen
        world.leave_layout()
    return found


@pytest.mark.parametrize("is_tied", [True, False])
def test_members_of_the_seed_are_those_of_transformers(tmp_path, is_tied):
    from transformers import AutoModelForCausalLM

    path = tiny.save_model(tmp_path / "model", "qwen3", tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_pretrained(path)
    whole, without = model.num_parameters(), model.num_parameters(exclude_embeddings=True)
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    layouts = {"dp2": {}, "tp2_sp": {**TP2, **SP}, "pp2": PP2, "cp2": CP2}
    ranks = world.run(seen_members, 2, path, str(tmp_path / "out"), layouts)
    with_hook = [False, False, True]
    for found in ranks:
        for (evaluated, looped), *_ in found.values():
            assert looped == evaluated
        assert found["dp2"][1:] == ([whole, norms, without], with_hook)
        assert found["cp2"][1:] == ([whole, norms, without], with_hook)
        assert whole / 2 < found["tp2_sp"][1][0] < whole and found["tp2_sp"][2] == with_hook
    (first, seen), (last, nothing) = (found["pp2"][1:] for found in ranks)
    tied = (whole - without) * is_tied  # the last stage has a copy
    assert [a + b for a, b in zip(first, last, strict=True)] == [whole + tied, norms, without]
    assert (seen, nothing) == (with_hook, [])
