"""The wrong inputs of tests/tools/wrong_inputs.py: rows of files and words, and what the words that
answer them name.
"""

import itertools
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.shared.commands import ROOT

CONFIG = json.loads((ROOT / "configs" / "tiny" / "model" / "config.json").read_text())
CHAT = json.dumps(
    {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
)
MODEL = {"chat.jsonl": f"{CHAT}\n" * 8}  # files of every case, beside model/
BASE = (
    "train_from_scratch=true model_name_or_path={}/model dataset={}/chat.jsonl cutoff_len=64 "
    "max_steps=1 save_strategy=no html_report=false output_dir={}/out cache_dir={}/cache"
).split()
TORCH = "use_mca=false"


@dataclass(frozen=True)
class Case:
    """A wrong input.

    door: "read" (planned, not trained; many share a process), "train", or "python", which calls
    `call`, "module:function", with the case's folder. names: what the words must hold. words: of
    `python -m mca_lite`, {} is the folder. ranks: the exit codes that each rank may have.
    environment: {rank} is the rank's number. limits: {rank: {name in `resource`: value}}.
    """

    name: str
    names: tuple[str, ...]
    door: str = "read"
    words: tuple[str, ...] = ()
    files: dict[str, str | bytes] = field(default_factory=dict)
    call: str = ""
    ranks: tuple[tuple[int, ...], ...] = ((2,),)
    environment: dict[str, str] = field(default_factory=dict)
    limits: dict[int, dict[str, int]] = field(default_factory=dict)


def cases() -> list[Case]:
    """All of them, group by group."""
    groups = (keys, between_keys, configs, tokenizers, weights, templates, data, commands)
    found = [case for group in (*groups, worlds, limits, python) for case in group()]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "two cases of one name"
    return found


def _trained(*words: str) -> tuple[str, ...]:
    return (*BASE, *words)


# -- keys: of each field what its type and limits forbid


def keys() -> Iterator[Case]:
    from mca_lite.args import key_fields, key_groups

    hints = {k: v for group in key_groups() for k, v in typing.get_type_hints(group).items()}
    for key, item in key_fields().items():
        kinds = typing.get_args(hints[key]) or (hints[key],)
        wrong = {}
        if bool in kinds:
            wrong["text"] = "maybe"
        if int in kinds or float in kinds:
            wrong["text"], wrong["nan"] = "many", "nan"
            limit = item.metadata.get("low", item.metadata.get("above"))
            if limit is not None:
                wrong["low"] = str(limit - 1)
            limit = item.metadata.get("high", item.metadata.get("below"))
            if limit is not None:
                wrong["high"] = str(2 * limit + 1)
        if typing.get_origin(hints[key]) is typing.Literal or "choices" in item.metadata:
            wrong["text"] = "nothing_known"
        if typing.get_origin(hints[key]) is dict:
            wrong["list"], wrong["deep"] = "[1, 2]", "[" * 5000
        if str in kinds:
            wrong["null"] = "a\0b"
        for how, value in wrong.items():
            yield Case(f"keys/{key}/{how}", (key,), words=_trained(f"{key}={value}"))


_BETWEEN = {
    # name: (words, what is named)
    "unknown": ("learning_rat=1", "learning_rate"),
    "no_word": ("learning_rate", "learning_rate"),
    "twice_file": ("a.yaml b.yaml", "a.yaml"),
    "no_file": ("none.yaml", "none.yaml"),
    "group": ("training={lr:1}", "training"),
    "both_halves": ("bf16=true fp16=true", "bf16"),
    "no_such_model": ("model_name_or_path=./nowhere", "nowhere"),
    "model_is_file": ("model_name_or_path={}/chat.jsonl", "model_name_or_path"),
    "no_such_data": ("dataset=nowhere.jsonl", "nowhere.jsonl"),
    "data_is_folder": ("dataset={}/empty", "empty"),
    "eval_missing": ("eval_strategy=steps", "eval_dataset"),
    "out_is_file": ("output_dir={}/chat.jsonl", "output_dir"),
    "out_is_model": ("output_dir={}/model", "output_dir"),
    "cache_is_file": ("cache_dir={}/chat.jsonl", "cache_dir"),
    "tp_of_one": ("tensor_model_parallel_size=2", "tensor_model_parallel_size"),
    "pp_of_one": ("pipeline_model_parallel_size=2", "pipeline_model_parallel_size"),
    "cp_of_one": ("context_parallel_size=3", "context_parallel_size"),
    "ep_dense": ("expert_model_parallel_size=2", "expert_model_parallel_size"),
    "layout": ("pipeline_model_parallel_layout=tt|L", "pipeline_model_parallel_layout"),
    "layout_huge": ("pipeline_model_parallel_layout=Et*99999L", "pipeline_model_parallel_layout"),
    "recompute": ("recompute_granularity=full recompute_num_layers=3", "recompute_num_layers"),
    "batch": ("global_batch_size=3 per_device_train_batch_size=2", "global_batch_size"),
    "warmup": ("warmup_steps=5", "warmup_steps"),
    "warmup_huge": ("warmup_steps=1e18", "warmup_steps"),
    "kwargs": ("lr_scheduler_kwargs={a:1}", "lr_scheduler_kwargs"),
    "kwargs_type": ("lr_scheduler_kwargs={min_lr:x}", "min_lr"),
    "scheduler": ("lr_scheduler_type=polynomial", "lr_scheduler_type"),
    "steps": ("profile_steps=5-3", "profile_steps"),
    "shard": ("max_shard_size=none", "max_shard_size"),
    "report": ("report_to=nowhere", "report_to"),
    "optim": ("optim=lion9", "optim"),
    "best": ("load_best_model_at_end=true", "load_best_model_at_end"),
    "metric": ("val_size=2 eval_strategy=steps metric_for_best_model=f1", "metric_for_best_model"),
    "val_all": ("val_size=8", "val_size"),
    "val_more": ("val_size=100", "val_size"),
    "val_half": ("val_size=1.5", "val_size"),
    "mix": ("mix_weights=[1,2]", "mix_weights"),
    "mix_zero": ("mix_weights=[0]", "mix_weights"),
    "stream_epochs": ("streaming=true max_steps=-1", "max_steps"),
    "stage": ("stage=ppo9", "stage"),
    "pairs": ("stage=dpo", "chat.jsonl"),
    "lora_target": ("finetuning_type=lora lora_target=nothing_here", "lora_target"),
    "lora_none": ("finetuning_type=lora lora_target=[]", "lora_target"),
    "lora_saved": ("finetuning_type=lora modules_to_save=nothing_here", "modules_to_save"),
    "adapter": ("finetuning_type=lora adapter_name_or_path=./nowhere", "adapter_name_or_path"),
    "adapter_full": ("adapter_name_or_path=./nowhere", "adapter_name_or_path"),
    "template": ("chat_template=nothing_known", "chat_template"),
    "sequence": ("resume_from_checkpoint={}/nowhere", "nowhere"),
    "fp8": ("fp8=hybrid", "fp8"),
    "engine": ("transformer_impl=transformer_engine", "transformer_engine"),
    "mtp": ("mtp_num_layers=1", "mtp_num_layers"),
    "balance": ("moe_aux_loss_coeff=0.1", "moe_aux_loss_coeff"),
    "additional": ("additional_configs={nothing:1}", "additional_configs"),
    "additional_model": ("additional_configs={num_layers:1}", "additional_configs"),
    "additional_timers": ("additional_configs={timers:5}", "additional_configs"),
    "additional_std": ("additional_configs={init_method_std:abc}", "additional_configs"),
    "ddp_timeout": ("ddp_timeout=99999999999999", "ddp_timeout"),
    "rate": ("learning_rate=1e39 bf16=true", "learning_rate"),
    "rate_fp16": ("learning_rate=1e39 fp16=true", "learning_rate"),
    "scale": ("fp16=true loss_scale=1e300", "loss_scale"),
    "scale_first": ("fp16=true initial_loss_scale=1e300", "initial_loss_scale"),
    "tokens": ("add_tokens=[{a: 1}]", "add_tokens"),
    "ref_model": ("stage=dpo ref_model=./nowhere", "ref_model"),
    "predict": ("predict_with_generate=true stage=pt", "predict_with_generate"),
}


def between_keys() -> Iterator[Case]:
    for name, (words, named) in _BETWEEN.items():
        door = "train" if name == "sequence" else "read"
        files = {"empty/none.txt": ""} if name == "data_is_folder" else {}
        yield Case(f"between/{name}", (named,), door, _trained(*words.split()), files)
    bombs = {
        "deep": "a: " + "[" * 20_000,
        "anchors": "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{x}: &{x} [{', '.join([f'*{y}'] * 10)}]\n" for y, x in itertools.pairwise("abcdefgh")
        ),
        "twice": "seed: 1\nseed: 2\n",
        "list": "- 1\n- 2\n",
        "tab": "a:\n\t- b\n",
        "python": "seed: !!python/object/apply:os.system [ls]\n",
        "binary": b"\xff\xfe\x00s",
        "itself": "a: &a [*a]\n",
    }
    for name, text in bombs.items():
        words = ("{}/run.yaml", *_trained())
        yield Case(f"yaml/{name}", ("run.yaml",), words=words, files={"run.yaml": text})


# -- config.json


def _config(**changes) -> dict[str, str]:
    return {"model/config.json": json.dumps({**CONFIG, **changes})}


_EXPERTS = dict(
    model_type="qwen3_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    mlp_only_layers=[],
)
_LATENT = dict(
    model_type="deepseek_v3",
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    head_dim=8,
)
_COUNTS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim vocab_size max_position_embeddings"
).split()
_WRONG_COUNTS = {
    "zero": 0,
    "negative": -128,
    "half": 1.5,
    "text": "many",
    "list": [2],
    "true": True,
}
_WRONG_REALS = {
    "nan": float("nan"),
    "infinite": float("inf"),
    "text": "x",
    "list": [1],
    "negative": -1,
}


def configs() -> Iterator[Case]:
    for key in _COUNTS:
        for how, value in _WRONG_COUNTS.items():
            yield Case(
                f"config/{key}/{how}", (key,), words=_trained(), files=_config(**{key: value})
            )
        for how in ("zero", "negative", "text"):
            words, files = _trained(TORCH), _config(**{key: _WRONG_COUNTS[how]})
            yield Case(f"config/{key}/{how}/torch", (key,), words=words, files=files)
    for key in ("rms_norm_eps", "rope_theta", "initializer_range"):
        for how, value in _WRONG_REALS.items():
            yield Case(
                f"config/{key}/{how}", (key,), words=_trained(), files=_config(**{key: value})
            )
    for base, fields in (
        (_EXPERTS, "num_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step"),
        (
            _LATENT,
            "n_routed_experts num_experts_per_tok moe_intermediate_size kv_lora_rank "
            "qk_rope_head_dim qk_nope_head_dim v_head_dim n_group topk_group",
        ),
    ):
        for key in fields.split():
            for how in ("negative", "half", "text", "list"):
                changed = _config(**base | {key: _WRONG_COUNTS[how]})
                name = f"config/{base['model_type']}/{key}/{how}"
                yield Case(name, (key,), words=_trained(), files=changed)
    odd: dict[str, tuple[dict, str]] = {
        "layers_1e6": (dict(num_hidden_layers=1_000_000), "num_hidden_layers"),
        "heads_do_not_divide": (dict(num_attention_heads=3), "num_attention_heads"),
        "groups_do_not_divide": (dict(num_key_value_heads=3), "num_key_value_heads"),
        "groups_above_heads": (dict(num_key_value_heads=8), "num_key_value_heads"),
        "model_type_unknown": (dict(model_type="nothing_known"), "nothing_known"),
        "model_type_list": (dict(model_type=[1]), "model_type"),
        "model_type_none": (dict(model_type=None), "model_type"),
        "activation": (dict(hidden_act="nothing_known"), "nothing_known"),
        "activation_number": (dict(hidden_act=5), "hidden_act"),
        "rope_type": (dict(rope_scaling={"rope_type": "nothing_known"}), "rope"),
        "rope_list": (dict(rope_scaling=[1]), "rope"),
        "rope_factor_text": (dict(rope_scaling={"rope_type": "linear", "factor": "x"}), "factor"),
        "rope_factor_none": (dict(rope_scaling={"rope_type": "linear"}), "factor"),
        "rope_factor_zero": (dict(rope_scaling={"rope_type": "linear", "factor": 0}), "factor"),
        "layer_types": (dict(layer_types=["nothing_known"] * 4), "layer_types"),
        "layer_types_few": (dict(layer_types=["full_attention"]), "layer_types"),
        "window_text": (dict(sliding_window="x", use_sliding_window=True), "sliding_window"),
        "window_negative": (dict(sliding_window=-5, use_sliding_window=True), "sliding_window"),
        "bias": (dict(attention_bias=True), "attention_bias"),
        "dropout": (dict(attention_dropout=7), "attention_dropout"),
        "dropout_text": (dict(attention_dropout="x"), "attention_dropout"),
        "dtype": (dict(dtype="nothing_known"), "dtype"),
        "quantized": (dict(quantization_config={"quant_method": "nothing"}), "quantization"),
        "eos_text": (dict(eos_token_id="x"), "eos_token_id"),
    }
    for name, (changes, named) in odd.items():
        files = _config(**changes)
        yield Case(f"config/{name}", (named,), words=_trained(), files=files)
        if name not in ("bias", "quantized"):  # plain torch trains these
            words = _trained(TORCH)
            yield Case(f"config/{name}/torch", (named,), "train", words, files)
    texts = {
        "empty": "",
        "null": "null",
        "list": "[]",
        "number": "5",
        "cut": json.dumps(CONFIG)[:80],
        "deep": '{"a": ' + "[" * 20_000,
        "binary": b"\xff\xfe\x00",
        "no_fields": "{}",
    }
    for name, text in texts.items():
        files = {"model/config.json": text}
        yield Case(f"config/{name}", ("config.json",), words=_trained(), files=files)


# -- tokenizer, generation_config.json, weights


def _tokenizer(**changes) -> dict[str, str]:
    path = ROOT / "configs" / "tiny" / "model" / "tokenizer.json"
    return {"model/tokenizer.json": json.dumps({**json.loads(path.read_text()), **changes})}


_SLOW = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


def tokenizers() -> Iterator[Case]:
    for name, text in {
        "empty": "",
        "null": "null",
        "cut": '{"model": {',
        "number": "5",
        "deep": "[" * 20_000,
        "binary": b"\xff\x00",
    }.items():
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            files = {f"model/{file}": text}
            yield Case(f"tokenizer/{file}/{name}", ("model",), words=_trained(), files=files)
    yield Case(
        "tokenizer/slow_regex",
        ("tokenizer",),
        words=_trained(),
        files={
            **_tokenizer(pre_tokenizer=_SLOW),
            "chat.jsonl": CHAT.replace("one", "x" * 40_000) + "\n",
        },
    )
    yield Case("tokenizer/model_type", ("tokenizer",), words=_trained(),
               files=_tokenizer(model={"type": "Nothing"}))  # fmt: skip
    yield Case("tokenizer/many", ("resize_vocab",), words=_trained(),
               files=_config(vocab_size=100))  # fmt: skip


def weights() -> Iterator[Case]:
    own = tuple(word for word in BASE if not word.startswith("train_from_scratch"))
    texts = {
        "empty": b"",
        "short": b"\x10\0\0\0\0\0\0\0{}",
        "header": b"\xff" * 64,
        "text": b"these are no weights",
    }
    for name, text in texts.items():
        for backend in ("use_mca=true", TORCH):
            files = {"model/model.safetensors": text}
            words = (*own, backend)
            yield Case(f"weights/{name}/{backend}", ("safetensors",), words=words, files=files)
    for backend in ("use_mca=true", TORCH):
        yield Case(f"weights/none/{backend}", ("model",), words=(*own, backend))
        files = {"model/dist/.metadata": b"x", "model/pytorch_model.bin": b"x"}
        name = f"weights/bin_beside_dist/{backend}"
        yield Case(name, ("model",), "train", (*own, backend), files, ranks=((2,),))
        files = {"model/pytorch_model.bin": b"x"}
        yield Case(f"weights/bin/{backend}", ("model",), "train", (*own, backend), files)
        files = {"model/model.safetensors.index.json": '{"weight_map": 5}'}
        yield Case(f"weights/index/{backend}", ("model",), "train", (*own, backend), files)


# -- chat templates, data


def templates() -> Iterator[Case]:
    texts = {
        "divides_by_zero": "{{ 1 // 0 }}",
        "syntax": "{% for",
        "unknown_filter": "{{ messages | nothing_known }}",
        "include": "{% include 'x' %}",
        "import": "{% import 'x' as y %}",
        "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "undefined": "{{ nothing.known.here }}",
        "type": "{{ messages + 5 }}",
        "index": "{{ messages[99]['content'] }}",
        "raises": "{{ raise_exception('no such thing') }}",
        "constant": "{{ 'always the same' }}",
        "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "range": "{% for i in range(10**9) %}{% endfor %}{{ messages[0]['content'] }}",
    }
    for name, text in texts.items():
        words = _trained("chat_template={}/chat.jinja")
        files = {"chat.jinja": text}
        yield Case(f"templates/{name}", ("template",), words=words, files=files)


def data() -> Iterator[Case]:
    def turns(*contents) -> str:
        roles = ("user", "assistant")
        return json.dumps(
            {"messages": [{"role": roles[n % 2], "content": c} for n, c in enumerate(contents)]}
        )

    lines = {
        "empty": "",
        "no_json": "this is no JSON",
        "cut": CHAT[:30],
        "null": "null",
        "number": "5",
        "list": "[]",
        "nothing": "{}",
        "other_keys": '{"a": 1, "b": 2}',
        "messages_text": '{"messages": "x"}',
        "messages_null": '{"messages": null}',
        "messages_empty": '{"messages": []}',
        "messages_numbers": '{"messages": [1, 2]}',
        "no_role": '{"messages": [{"content": "x"}]}',
        "no_content": '{"messages": [{"role": "user"}, {"role": "assistant"}]}',
        "role_number": '{"messages": [{"role": 5, "content": "x"}]}',
        "role_unknown": '{"messages": [{"role": "nobody", "content": "x"}]}',
        "content_number": turns("x", 5),
        "content_null": turns("x", None),
        "content_list": turns("x", [1]),
        "content_object": turns("x", {"a": 1}),
        "only_user": turns("x"),
        "answer_empty": turns("x", ""),
        "surrogate": turns("x", "\ud800"),
        "nul": b"\x00\x00\x00",
        "binary": b"\xff\xfe\x00\x01",
        "deep": '{"messages": ' + "[" * 20_000,
        "deep_valid": '{"messages": ' + "[" * 960 + "]" * 960 + "}",
        "huge_number": '{"messages": ' + "9" * 5000 + "}",
    }
    for name, line in lines.items():
        files = {"chat.jsonl": line}
        yield Case(f"data/{name}", ("chat.jsonl",), words=_trained(), files=files)
    for name in ("no_json", "nothing", "messages_text", "content_number"):
        files = {"chat.jsonl": f"{CHAT}\n{CHAT}\n" + str(lines[name])}
        yield Case(f"data/third/{name}", ("chat.jsonl", "3"), words=_trained(), files=files)
    kinds = {
        "table.txt": b"\xff\xfe",
        "table.parquet": b"PAR1",
        "table.arrow": b"ARROW",
        "table.xlsx": b"x",
        "table": b"x",
        "table.json": b"{",
    }
    for name, content in kinds.items():
        words = _trained("dataset={}/" + name)
        yield Case(f"data/{name}", (name,), words=words, files={name: content})
    infos = {
        "empty": "",
        "list": "[]",
        "number": '{"mine": 5}',
        "no_file": '{"mine": {"columns": {}}}',
        "absent": '{"mine": {"file_name": "nowhere.jsonl"}}',
        "columns": '{"mine": {"file_name": "../chat.jsonl", "columns": 5}}',
        "formatting": '{"mine": {"file_name": "../chat.jsonl", "formatting": "nothing"}}',
        "ranking": '{"mine": {"file_name": "../chat.jsonl", "ranking": "x"}}',
    }
    for name, text in infos.items():
        words = _trained("dataset=mine", "dataset_dir={}/info")
        files = {"info/dataset_info.json": text}
        yield Case(f"data/info/{name}", ("mine" if name == "absent" else "info",), words=words,
                   files=files)  # fmt: skip
    for name in ("no_json", "cut", "nothing", "content_number", "binary"):
        words = _trained("streaming=true")
        files = {"chat.jsonl": lines[name]}
        yield Case(f"data/stream/{name}", ("chat.jsonl",), words=words, files=files)
    pairs = {
        "one_answer": '{"prompt": "x", "chosen": "y"}',
        "numbers": '{"prompt": "x", "chosen": 5, "rejected": 6}',
        "empty": '{"prompt": "x", "chosen": "", "rejected": ""}',
        "null": '{"prompt": null, "chosen": null, "rejected": null}',
    }
    for name, line in pairs.items():
        files = {"chat.jsonl": line}
        yield Case(f"data/pairs/{name}", ("chat.jsonl",), words=_trained("stage=dpo"), files=files)
    for name, line in {
        "no_text": '{"a": 1}',
        "number": '{"text": 5}',
        "null": '{"text": null}',
    }.items():
        files = {"chat.jsonl": line}
        yield Case(f"data/text/{name}", ("chat.jsonl",), words=_trained("stage=pt"), files=files)


# -- other commands


_COMMANDS = {
    "unknown": ("traim", "traim"),
    "plan_no_words": ("plan --gpus", "--gpus"),
    "plan_memory_nan": ("plan {base} --memory nan", "--memory"),
    "plan_memory_infinite": ("plan {base} --memory inf", "--memory"),
    "plan_memory_zero": ("plan {base} --memory 0", "--memory"),
    "plan_memory_text": ("plan {base} --memory x", "--memory"),
    "plan_gpus_negative": ("plan {base} --gpus -1", "--gpus"),
    "plan_gpu": ("plan {base} --gpu nothing", "--gpu"),
    "plan_link_nan": ("plan {base} --link nan", "--link"),
    "plan_torch": ("plan {base} use_mca=false", "use_mca"),
    "plan_key": ("plan {base} seed=x", "seed"),
    "inspect_key": ("inspect {base} seed=x", "seed"),
    "inspect_none": ("inspect {base} dataset=nowhere.jsonl", "nowhere.jsonl"),
    "generate_none": ("generate {base} val_size=2", "out"),
    "generate_num": ("generate {base} --num 0", "--num"),
    "generate_file": ("generate {base} --file nowhere.jsonl", "nowhere.jsonl"),
    "chat_none": ("chat ./nowhere", "nowhere"),
    "chat_no_weights": ("chat {}/model", "model"),
    "chat_tokens": ("chat {}/model --max-new-tokens 0", "--max-new-tokens"),
    "chat_heat": ("chat {}/model --temperature -1", "--temperature"),
    "chat_heat_nan": ("chat {}/model --temperature nan", "--temperature"),
    "convert_none": ("convert ./nowhere {}/new", "nowhere"),
    "convert_no_weights": ("convert {}/model {}/new", "model"),
    "convert_to_file": ("convert {}/model {}/chat.jsonl", "chat.jsonl"),
    "convert_option": ("convert {}/model {}/new --nothing", "--nothing"),
    "report_none": ("report ./nowhere", "nowhere"),
    "report_empty": ("report {}/model", "model"),
    "vendor_part": ("vendor {}/new --parts lroa", "lroa"),
    "vendor_full": ("vendor {}/model", "model"),
    "parity_key": ("parity {base} seed=x", "seed"),
    "parity_none": ("parity {base} model_name_or_path=./nowhere", "nowhere"),
}


def commands() -> Iterator[Case]:
    for name, (words, named) in _COMMANDS.items():
        words = words.replace("{base}", " ".join(BASE)).split()
        yield Case(f"commands/{name}", (named,), words=tuple(words))
    words = ("plan", *BASE)
    files = _config(num_hidden_layers=1_000_000)
    yield Case("commands/plan_layers", ("num_hidden_layers",), words=words, files=files)
    chat = "tests.shared.wrong_calls:chat"
    for name, text in {
        "null": "null",
        "list": "[]",
        "heat": '{"temperature": "hot", "do_sample": true}',
        "heat_list": '{"temperature": [1], "do_sample": true}',
        "top_k": '{"top_k": "x", "do_sample": true}',
        "tokens": '{"max_new_tokens": "x"}',
        "tokens_negative": '{"max_new_tokens": -5}',
        "eos": '{"eos_token_id": "x"}',
        "eos_list": '{"eos_token_id": ["x"]}',
    }.items():
        files = {"generation_config.json": text, "stdin": "one\n"}
        yield Case(f"chat/{name}", ("generation_config.json",), "python", files=files, call=chat)
    files = {"stdin": b"\xe9t\xe9\n"}
    yield Case("chat/latin_1", ("UTF-8",), "python", files=files, call=chat)


# -- the world, and the limits of a process


def _world(size: int, **more: str) -> dict[str, str]:
    found = dict(RANK="{rank}", WORLD_SIZE=str(size), LOCAL_RANK="{rank}", MASTER_ADDR="127.0.0.1")
    return {**found, "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": "29731", **more}


_ENDS = ((2,),)


def worlds() -> Iterator[Case]:
    words = _trained("ddp_timeout=4")
    half: dict[str, tuple[dict[str, str], str]] = {
        "size_text": (_world(2, WORLD_SIZE="two"), "WORLD_SIZE"),
        "size_zero": (_world(2, WORLD_SIZE="0"), "WORLD_SIZE"),
        "size_negative": (_world(2, WORLD_SIZE="-1"), "WORLD_SIZE"),
        "rank_text": (_world(2, RANK="one"), "RANK"),
        "rank_above": (_world(2, RANK="2"), "RANK"),
        "rank_negative": (_world(2, RANK="-1"), "RANK"),
        "rank_alone": ({"RANK": "0"}, "WORLD_SIZE"),
        "size_alone": ({"WORLD_SIZE": "2"}, "RANK"),
        "no_port": (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"), "MASTER_PORT"),
        "no_address": (dict(RANK="0", WORLD_SIZE="2", MASTER_PORT="29731"), "MASTER_ADDR"),
        "port_0": (_world(2, MASTER_PORT="0"), "MASTER_PORT"),
        "port_text": (_world(2, MASTER_PORT="abc"), "MASTER_PORT"),
        "port_negative": (_world(2, MASTER_PORT="-1"), "MASTER_PORT"),
        "port_huge": (_world(2, MASTER_PORT="99999"), "MASTER_PORT"),
        "local_rank_text": (_world(2, LOCAL_RANK="x"), "LOCAL_RANK"),
        "local_rank_negative": (_world(2, LOCAL_RANK="-3"), "LOCAL_RANK"),
        "slurm_half": (dict(SLURM_PROCID="0", SLURM_NTASKS="2"), "LOCAL_RANK"),
        "slurm_text": (
            dict(SLURM_PROCID="x", SLURM_NTASKS="2", SLURM_LOCALID="0", MASTER_ADDR="a"),
            "RANK",
        ),
    }
    for name, (environment, named) in half.items():
        yield Case(f"world/{name}", (named,), words=words, environment=environment)
    many = {
        # name: (ranks that come, environment, what they name)
        "one_of_3_never_comes": (2, _world(3, MASTER_PORT="29741"), ()),
        "rank_0_never_comes": (1, _world(2, RANK="1", MASTER_PORT="29742"), ("MASTER_ADDR",)),
        "rank_twice": (2, _world(2, RANK="0", MASTER_PORT="29743"), ("MASTER_PORT",)),
        "address_unknown": (
            1,
            _world(2, RANK="1", MASTER_ADDR="host.invalid", MASTER_PORT="29744"),
            ("host.invalid",),
        ),
        "address_unknown_0": (
            1,
            _world(2, MASTER_ADDR="host.invalid", MASTER_PORT="29745"),
            ("host.invalid",),
        ),
        "port_in_use": (2, _world(3, RANK="0", MASTER_PORT="29746"), ("MASTER_PORT",)),
    }
    for name, (ranks, environment, named) in many.items():
        yield Case(
            f"world/{name}", named, "train", words, ranks=_ENDS * ranks, environment=environment
        )


def limits() -> Iterator[Case]:
    for count in (24, 32, 48, 64):
        of_process = {0: {"RLIMIT_NOFILE": count}}
        yield Case(f"limits/files_{count}", ("ulimit -n",), "train", _trained(), limits=of_process,
                   ranks=((0, 2),))  # fmt: skip
    for count in (24, 32):
        words, of_both = _trained("ddp_timeout=6"), {n: {"RLIMIT_NOFILE": count} for n in range(2)}
        world = _world(2, MASTER_PORT=str(29750 + count))
        yield Case(f"limits/files_{count}_2_ranks", ("ulimit -n",), "train", words,
                   environment=world, limits=of_both, ranks=((2,),) * 2)  # fmt: skip
    for mebibytes in (1400, 1600):
        world = _world(2, MASTER_PORT=str(28000 + mebibytes))
        name, small = f"limits/memory_{mebibytes}", {1: {"RLIMIT_AS": mebibytes << 20}}
        words = _trained("ddp_timeout=6", "per_device_train_batch_size=2")
        yield Case(
            name, (), "train", words, environment=world, limits=small, ranks=((0, 1, 2),) * 2
        )
    call = "tests.shared.wrong_calls:no_thread"
    yield Case("limits/threads", ("ulimit -u",), "python", call=call)
    call = "tests.shared.wrong_calls:no_memory"
    yield Case("limits/memory", ("out of memory",), "python", call=call)
    words = _trained()
    call = "tests.shared.wrong_calls:full_stdout"
    yield Case("limits/stdout", ("disk full",), "python", words, call=call)


# -- from Python: the functions of wrong_calls.py, and what their words name


def python() -> Iterator[Case]:
    from tests.shared import wrong_calls

    for name, (named, codes) in wrong_calls.CALLS.items():
        call = f"tests.shared.wrong_calls:{name}"
        yield Case(f"python/{name}", named, "python", call=call, ranks=(codes,))


def sample(step: int) -> list[Case]:
    """Every `step`th case of those that read, and of each group at least one."""
    readers = [case for case in cases() if case.door == "read"]
    firsts = {case.name.rpartition("/")[0]: case for case in reversed(readers)}
    chosen = {id(case): case for case in (*readers[::step], *firsts.values())}
    return list(chosen.values())
