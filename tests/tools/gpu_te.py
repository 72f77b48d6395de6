"""Transformer Engine on a GPU: `make gpu ARGS="te"`, or `make gpu ARGS="te fp8 dense:"` for the
cases whose "group: name" has one of these words.

Without words the groups run side by side, in seven processes on one GPU, and then those of two,
where there are two. jobs=N: in N processes, jobs=1: in this one. limit=S: what has not begun after
S seconds is named and not run.

Each case trains a small model for a few steps on TE's layers, and on local ones in the same
precision and in float32: TE may be off the float32 run as far as the local layers are, times a
margin for another order of rounding. FP8 is compared with TE in bf16. One line a case: ok, DIFF
(numbers out of bounds) or FAIL (an exception); a case never ends the others.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# a repeated run is the same to the bit: attention without atomic additions
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
os.environ.setdefault("NVTE_FRAMEWORK", "pytorch")

import torch

from tests.shared import dpo_tools, world
from tests.shared.commands import ROOT
from tests.shared.layouts import AUX, CP2, DIST_OVERLAP, FULL, SP, TP2

from .gpu_te_runs import (
    IN_FP8,
    LOCAL,
    MIXED,
    PACKED,
    PLAIN,
    TE,
    VOCAB,
    apart,
    compare,
    fp8,
    lora_on,
    lora_start,
    model_of,
    moved,
    new_folder,
    once,
    read,
    reference,
    refuses,
    relative,
    runs,
    selective,
    train,
    trained,
    trainer_of,
    use_folder,
    within,
)

HEADS = dict(head_dim=32)
WITH_HEADS = ("qwen3", "mistral", "seed_oss", "llama", "qwen3_moe", "glm4_moe")
RECIPES = ("tensorwise", "delayed", "blockwise")
CASE_S = 120
# side by side: the groups of a process, longest first
PARTS = (
    "learning:",
    "packs:",
    "resume: convert:",
    "modes: dpo:",
    "dense:",
    "lora:",
    "experts: fp8:",
)

CASES: list[tuple[str, str, object]] = []  # (group, name, action -> (whether it is right, numbers))


def chosen(words: list[str], group: str, name: str) -> bool:
    return not words or any(word in f"{group}: {name}" for word in words)


def add(group: str, name: str, function, *args, **keys) -> None:
    CASES.append((group, name, lambda: function(*args, **keys)))


# -- dense models and how they run -----------------------------------------------------------------


def dense_cases() -> None:
    def case(name, function, family, *args, changes=None, **keys):
        path = lambda: model_of(family, **(changes or {}))  # noqa: E731
        add("dense", name, lambda: function(path(), *args, **keys))

    for mode, keys in (("rows", {}), ("packed", PACKED)):
        for family in ("qwen3", "llama", "qwen2", "mistral", "seed_oss"):
            case(f"{family} {mode}", compare, family, **keys)
        plain = dict(sliding_window=None)
        case(f"phi3 {mode}", compare, "phi3", changes=plain, **keys)
        window = dict(sliding_window=16)
        case(f"mistral with a window {mode}", compare, "mistral", changes=window, **keys)
        one = dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)
        case(f"qwen3 one layer with a window {mode}", compare, "qwen3", changes=one, **keys)
        case(f"qwen3 head_dim 96 {mode}", compare, "qwen3", changes=dict(head_dim=96), **keys)
        keys = dict(keys, impl="auto", wanted_impl=LOCAL)
        case(f"head_dim 256 {mode} auto", compare, "qwen3", changes=dict(head_dim=256), **keys)
    case("head_dim 256 is refused", refuses, "qwen3", "more than 128", changes=dict(head_dim=256))
    for family in ("gemma2", "olmo2", "granite", "deepseek_v3"):
        changes = {"num_key_value_heads": 4} if family == "deepseek_v3" else {}
        words = "only the local layers have"
        case(f"{family} is refused", refuses, family, words, changes=changes)
        keys = dict(impl="auto", wanted_impl=LOCAL, export=False, changes=changes)
        case(f"{family} auto is local", runs, family, **keys)


MODES = {
    "recompute full": FULL,
    "recompute full packed": {**FULL, **PACKED},
    "recompute block": dict(FULL, recompute_method="block", recompute_num_layers=1),
    "recompute core_attn": selective("core_attn"),
    "recompute core_attn packed": {**selective("core_attn"), **PACKED},
    "recompute mlp": selective("mlp"),
    "recompute layernorm": selective("layernorm"),
    "recompute layernorm local": dict(selective("layernorm"), impl=LOCAL),
    "distributed optimizer, overlap": DIST_OVERLAP,
    "gradients in bf16": dict(grad_reduce_in_fp32=False, bound=2.0),
    "evaluation": dict(evaluate=True),
    "evaluation packed": dict(evaluate=True, **PACKED),
    "rope fusion off": dict(apply_rope_fusion=False),
    "rope fusion off packed": dict(apply_rope_fusion=False, **PACKED),
    "compiled": dict(torch_compile=None),
    "compiled packed": dict(torch_compile=None, **PACKED),
    "fp16": dict(dtype="fp16", initial_loss_scale=1024.0),
    "fp16 packed": dict(dtype="fp16", initial_loss_scale=1024.0, **PACKED),
    "sgd": dict(optim="sgd", learning_rate=1.0),
    "auto bf16": dict(impl="auto"),
    "micro-batch means": dict(calculate_per_token_loss=False),
}


def mode_cases() -> None:
    def case(name, function, **keys):
        add("modes", name, lambda: function(model_of("qwen3"), **keys))

    for name, keys in MODES.items():
        case(name, compare, **keys)
    drops = dict(attention_dropout=0.1, hidden_dropout=0.1)
    for name, keys in {"": {}, " packed": PACKED, " recomputed": FULL}.items():
        case(f"dropout{name}", runs, **drops, **keys)
    for mode, keys in (("rows", {}), ("packed", PACKED)):
        case(f"float32 {mode} TE in tf32", in_float32, impl=TE, **keys)
        case(f"float32 {mode} auto is local", in_float32, impl="auto", **keys)
    for impl in (TE, LOCAL):
        for dtype in ("bf16", "float32"):
            for name, more in {
                "": {},
                " distributed": dict(use_distributed_optimizer=True),
            }.items():
                case(f"offload {impl} {dtype}{name}", offloaded, impl=impl, dtype=dtype, **more)
        case(
            f"offload {impl} half",
            offloaded,
            impl=impl,
            dtype="bf16",
            optimizer_offload_fraction=0.5,
        )
    add("modes", "logits as transformers'", logits)


def in_float32(path, impl, **keys):
    exact, got = reference(path, "float32", **keys), train(path, impl, **keys)
    numbers = dict(
        loss=apart(got["loss"], exact["loss"]), norm=relative(got["norm"], exact["norm"])
    )
    bound = 1e-3 if impl == TE else 1e-5
    right = got["impl"] == (TE if impl == TE else LOCAL)
    return right and max(numbers.values()) < bound, {**numbers, "ran": got["impl"]}


def offloaded(path, impl, dtype, **keys):
    bf16 = dtype == "bf16"
    plain = train(path, impl, bf16=bf16, export=False)
    got = train(path, impl, bf16=bf16, export=False, optimizer_cpu_offload=True, **keys)
    loss = apart(got["loss"], plain["loss"])
    ok = loss < (5e-3 if bf16 else 1e-4) and "Offloaded" in got["optimizer"]
    return ok, dict(loss=loss, optimizer=got["optimizer"])


def logits():
    from transformers import AutoModelForCausalLM

    from mca_lite import AutoModel, TrainingArguments

    path, numbers = model_of("qwen3"), {}
    ids = torch.randint(0, VOCAB, (2, 64), generator=torch.Generator().manual_seed(3)).cuda()
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda()(ids).logits
        for impl in (TE, LOCAL):
            args = TrainingArguments(output_dir=new_folder(), bf16=True, transformer_impl=impl)
            models = AutoModel.from_pretrained(path, args).eval()
            got = models.gather_logits(models(ids)).float()
            numbers[impl] = float((got - exact).norm() / exact.norm())
    return numbers[TE] < 2 * numbers[LOCAL] + 1e-2, numbers


# -- adapters and preferences ----------------------------------------------------------------------


def lora_case(family, *targets, saved=(), **keys):
    path, adapt = model_of(family), lora_on(*targets, saved=saved)
    return compare(path, start=lambda: lora_start(path, adapt), adapt=adapt, **keys)


def lora_cases() -> None:
    for name, family, keys in (
        ("qwen3 rows", "qwen3", {}),
        ("qwen3 packed", "qwen3", PACKED),
        ("qwen2 (bias) rows", "qwen2", {}),
        ("llama packed", "llama", PACKED),
        ("recomputed", "qwen3", FULL),
        ("recomputed packed", "qwen3", {**FULL, **PACKED}),
        ("overlap", "qwen3", DIST_OVERLAP),
        ("compiled", "qwen3", dict(torch_compile=None)),
        ("qwen3_moe experts too", "qwen3_moe", dict(bound=3.0)),
        ("qwen2_moe shared experts", "qwen2_moe", dict(bound=3.0)),
    ):
        add("lora", name, lora_case, family, **keys)
    add("lora", "q_proj, gate_proj alone", lora_case, "qwen3", "q_proj", "gate_proj")
    add("lora", "embed_tokens too", lora_case, "llama", "all", "embed_tokens")
    add("lora", "lm_head too", lora_case, "llama", "all", "lm_head")
    norms = ("input_layernorm", "post_attention_layernorm")
    add("lora", "norms trained whole", lora_case, "qwen3", "q_proj", saved=norms)
    dropped = lambda: runs(model_of("qwen3"), adapt=lora_on(dropout=0.1), export=False)  # noqa: E731
    add("lora", "dropout", dropped)
    add("lora", "merged export is base and delta", merged)
    add("dpo", "adapters, reference without them", lambda: dpo(model_of("qwen3"), lora=True))
    add("dpo", "full, cached reference", lambda: dpo(model_of("qwen3")))
    add("dpo", "full, packed", lambda: dpo(model_of("qwen3"), pack=64))
    add("dpo", "fp8", lambda: dpo(model_of("qwen3"), **fp8("tensorwise")))


def merged():
    from mca_lite.part_lora_sites import pieces_of

    path, folder = model_of("qwen3"), new_folder("merged")
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_of(path, TE, adapt=lora_on(), bf16=True)
        trainer.train()
        trainer.backend.export_merged(folder, "5GB")
    pieces = {p.key: p.tensor.float().cpu() for p in pieces_of(trainer.model)}
    base, both, worst, changed = read(path), read(folder), 0.0, 0
    for name, tensor in both.items():
        module, before = name.removesuffix(".weight"), base[name].bfloat16().float()
        a, b = (pieces.get(f"{module}.lora_{x}.weight") for x in "AB")
        wanted = (before if a is None else before + 2.0 * b @ a).bfloat16().float()
        worst = max(worst, float((tensor - wanted).norm() / wanted.norm()))
        changed += a is None and not torch.equal(tensor, before)
    return worst < 5e-3 and not changed, {"worst": worst, "frozen tensors that changed": changed}


def dpo(path, lora=False, pack=0, **changes):
    from mca_lite import part_lora_files

    def curve(impl, bf16):
        with contextlib.redirect_stdout(io.StringIO()):
            adapter = None
            if lora:
                adapter = new_folder("adapter")
                part_lora_files.save_adapter(
                    trainer_of(path, LOCAL, adapt=lora_on()).model, adapter
                )
            keys = dict(transformer_impl=impl, bf16=bf16, learning_rate=1e-3, torch_compile=False)
            keys.update(changes if impl == TE else {}, sequence_packing=bool(pack))
            keys.update(train_dataset=dpo_tools.Pairs(17), max_steps=5)
            objective = dict(pref_loss="sigmoid", beta=0.3)
            trainer = dpo_tools.our_run(
                path, new_folder(), objective, adapter=adapter, pack=pack, **keys
            )
        return dpo_tools.curve_of(trainer)

    exact, local, got = curve(LOCAL, False), curve(LOCAL, True), curve(TE, True)
    numbers = {}
    for key in ("loss", "logps/chosen", "grad_norm"):
        for name, run in (("te", got), ("local", local)):
            numbers[f"{key} {name}"] = apart([s[key] for s in run], [s[key] for s in exact])
    # seen: 7e-3 off, in FP8 6e-2; adapters that are not trained are 2.4e-2 off
    ok = numbers["loss local"] <= 1.5e-2
    return ok and numbers["loss te"] <= (0.08 if changes else 1.5e-2), numbers


# -- checkpoints -----------------------------------------------------------------------------------


def resumed(path, impl=TE, then=None, **keys):
    """Five steps, against a run that died after its second one and goes on, on the
    layers `then`.
    """
    keys = {"bf16": True, "steps": 5, **keys}
    whole, folder = train(path, impl, **keys), new_folder("parts")
    saves = dict(save_strategy="steps", save_steps=2, out=folder)
    train(path, impl, export=False, **saves, **keys)
    for step in (4, 5):
        shutil.rmtree(f"{folder}/checkpoint-{step}", ignore_errors=True)
    if then == LOCAL:
        keys = {name: value for name, value in keys.items() if not name.startswith("fp8")}
    got = train(path, then or impl, resume_from_checkpoint="auto", **saves, **keys)
    start = lora_start(path, keys["adapt"]) if "adapt" in keys else read(path)
    numbers = dict(
        loss=apart(got["loss"], whole["loss"]),
        norm=relative(got["norm"], whole["norm"]),
        move=moved(got["tensors"], whole["tensors"], start),
    )
    exact = not any(numbers.values())
    if whole["fp8"] and (then or keys["fp8_recipe"] == "delayed"):
        # to bf16: FP8's whole noise; to itself: its past values are not in a checkpoint
        ok = within(numbers, IN_FP8)
    elif then:
        ok = within(numbers, dict(loss=5e-3, norm=3e-2, move=0.2))
    else:
        ok = exact
    return ok and trained(whole["tensors"], start), {
        "to the bit": exact,
        **numbers,
        "ran": got["optimizer"],
    }


def checkpoint_cases() -> None:
    def case(name, family="qwen3", **keys):
        add("resume", name, lambda: resumed(model_of(family), **keys))

    offload = dict(optimizer_cpu_offload=True)
    for name, keys in {
        "TE": {},
        "local beside TE": dict(impl=LOCAL),
        "TE packed": PACKED,
        "TE distributed optimizer": DIST_OVERLAP,
        "TE async": dict(async_save=True),
        "TE sgd": dict(optim="sgd", learning_rate=1.0),
        "TE offload": offload,
        "TE offload distributed": dict(offload, use_distributed_optimizer=True),
        "local offload half": dict(offload, impl=LOCAL, optimizer_offload_fraction=0.5),
        "local offload float32": dict(offload, impl=LOCAL, bf16=False),
        "local to TE": dict(impl=LOCAL, then=TE),
        "TE to local": dict(then=LOCAL),
        "TE lora": dict(adapt=lora_on()),
        "TE to local lora": dict(adapt=lora_on(), then=LOCAL),
        "fp8 delayed to local": dict(fp8("delayed"), then=LOCAL),
        **{f"fp8 {recipe}": fp8(recipe) for recipe in RECIPES},
    }.items():
        case(name, **keys)
    case("qwen2 TE to local", "qwen2", then=LOCAL)
    for name, keys in {
        "TE": {},
        "local to TE": dict(impl=LOCAL, then=TE),
        "TE to local": dict(then=LOCAL),
    }.items():
        case(f"experts {name}", "qwen3_moe_dense_layers", **keys)
    add("convert", "qwen2 packed, experts, fp8, without a GPU", converted)


def converted():
    """Checkpoints of TE to Hugging Face's format where no GPU is seen, verified; and onto
    TE again.
    """
    made = {}
    for name, family, keys in (
        ("qwen2", "qwen2", PACKED),
        ("experts", "qwen3_moe", {}),
        ("fp8", "qwen3", fp8("delayed")),
    ):
        folder = new_folder(name)
        saves = dict(out=folder, steps=2, save_strategy="steps", save_steps=2)
        made[name] = folder, new_folder("hf"), train(model_of(family), bf16=True, **saves, **keys)
    script = "import sys; from mca_lite.tool_convert import main; args = sys.argv[1:]\n"
    script += "sys.exit(any([main([*p, '--verify']) for p in zip(args[::2], args[1::2])]))"
    pairs = [word for folder, hf, _ in made.values() for word in (f"{folder}/checkpoint-2", hf)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *pairs],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=CASE_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        return False, {"error": (done.stdout + done.stderr)[-600:]}
    numbers = {}
    for name, (_, hf, got) in made.items():
        theirs = read(hf)
        same = theirs.keys() == got["tensors"].keys()
        numbers[name] = same and all(torch.equal(theirs[k], got["tensors"][k]) for k in theirs)
    return all(numbers.values()), numbers


# -- experts and FP8 -------------------------------------------------------------------------------


def expert_cases() -> None:
    def case(name, family="qwen3_moe", **keys):
        add("experts", name, lambda: compare(model_of(family), bound=3.0, **AUX, **keys))

    for family in ("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "glm4_moe"):
        case(f"{family} rows", family)
        case(f"{family} packed", family, **PACKED)
    case("one after another", moe_grouped_gemm=False)
    case("permute fusion", moe_permute_fusion=True)
    case("permute fusion packed", moe_permute_fusion=True, **PACKED)
    case("permute fusion local", impl=LOCAL, moe_permute_fusion=True)
    case("shared experts beside the dispatch", "qwen2_moe", moe_shared_expert_overlap=True)
    case("recompute full", **FULL)
    case("recompute layernorm", **selective("layernorm"))
    case("recompute moe, layernorm", **selective("moe", "layernorm"))


def in_fp8(family="qwen3", changes=None, adapt=None, **keys):
    """TE in FP8 against TE in bf16."""
    path, meant = model_of(family, **(changes or {})), dict(evaluate=True, bf16=True)
    meant.update({"adapt": adapt} if adapt else {})
    plain_keys = {k: v for k, v in keys.items() if "fp8" not in k and "_in_bf16" not in k}
    plain_keys.pop("first_last_layers_bf16", None)
    key = path, repr(sorted(plain_keys.items())), adapt
    plain = once(key, lambda: train(path, TE, **meant, **plain_keys))
    got = train(path, TE, **meant, **keys)
    start = lora_start(path, adapt) if adapt else read(path)
    assert len(got["eval"]) == len(plain["eval"]) > 0
    numbers = dict(
        loss=apart(got["loss"], plain["loss"]),
        norm=relative(got["norm"], plain["norm"]),
        eval=apart(got["eval"], plain["eval"]),
        move=moved(got["tensors"], plain["tensors"], start),
    )
    ok = numbers["loss"] > 0 and got["fp8"] > 0 and within(numbers, IN_FP8)
    ok &= trained(plain["tensors"], start) and trained(got["tensors"], start)
    return ok, {**numbers, "modules in fp8": got["fp8"]}


def fp8_cases() -> None:
    def case(name, *args, recipe="tensorwise", **keys):
        add("fp8", name, lambda: in_fp8(*args, **fp8(recipe), **keys))

    for recipe in RECIPES:
        for name, keys in {
            "rows": {},
            "packed": PACKED,
            "recomputed": FULL,
            "lora": dict(adapt=lora_on()),
        }.items():
            case(f"{recipe} {name}", recipe=recipe, **keys)
    case("lora packed recomputed", adapt=lora_on(), **FULL, **PACKED)
    case("recompute mlp", **selective("mlp"))
    case("delayed overlap", recipe="delayed", **DIST_OVERLAP)
    case("qwen3_moe delayed", "qwen3_moe", recipe="delayed")
    case("qwen3_moe recompute layernorm", "qwen3_moe", **selective("layernorm"))
    case("qwen2_moe shared experts", "qwen2_moe")
    case("qwen2 (bias) delayed packed", "qwen2", recipe="delayed", **PACKED)
    case("gradients in bf16", grad_reduce_in_fp32=False)
    case("compiled packed", torch_compile=None, **PACKED)
    ends = dict(first_last_layers_bf16=True)
    case("first and last layer in bf16", "qwen3", dict(num_hidden_layers=4), **ends)
    e4m3 = dict(fp8="e4m3", fp8_recipe="blockwise")
    add("fp8", "blockwise e4m3", lambda: in_fp8(**e4m3))

    def refused(name, *words, changes=None, **keys):
        path = lambda: model_of("qwen3", **(changes or {}))  # noqa: E731
        add("fp8", f"refused: {name}", lambda: refuses(path(), *words, **keys))

    hybrid = dict(fp8="hybrid")
    for key in ("fp8_param", "fp8_dot_product_attention"):
        refused(key, key, additional_configs={key: True}, **hybrid)
    refused("local layers", "local ones", impl=LOCAL, **hybrid)
    refused("auto with wide heads", "local ones", changes=dict(head_dim=256), impl="auto", **hybrid)
    refused("float32", "bf16: true", bf16=False, **hybrid)
    odd = dict(hidden_size=136, intermediate_size=248)
    refused("sizes", "sizes that 16 divides", changes=odd, **hybrid)


# -- learning --------------------------------------------------------------------------------------

STEPS, ROWS, LENGTH, TOKENS = 200, 32, 512, 8192  # of a run, a step, a row, the vocabulary
HELD_OUT = 128  # rows: 65 thousand tokens


def text_rows(count: int) -> list[dict]:
    """At most `count` rows of Python's own library, as a tokenizer that is trained on it
    cuts it.
    """
    import sysconfig

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    files = [p for p in files if "site-packages" not in str(p) and "test" not in str(p)]
    texts = [p.read_text(errors="ignore") for p in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts[::10], trainers.BpeTrainer(vocab_size=TOKENS))
    ids = torch.tensor([i for e in tokenizer.encode_batch(texts) for i in e.ids])
    order = torch.randperm(len(ids) // LENGTH - 1, generator=torch.Generator().manual_seed(0))
    starts = (int(i) * LENGTH for i in order[:count])
    return [dict(input_ids=ids[i : i + LENGTH], labels=ids[i + 1 : i + LENGTH + 1]) for i in starts]


_learned: dict = {}


def learned(**keys) -> float:
    """The loss on held-out text after 200 steps, from weights drawn from one seed."""
    from transformers import AutoConfig as HF

    from mca_lite import AutoConfig, AutoModel, McaTrainer, TrainingArguments

    key = repr(sorted(keys.items()))
    if key in _learned:
        return _learned[key]
    if "rows" not in _learned:
        rows, _learned["folder"] = text_rows(STEPS * ROWS + HELD_OUT), new_folder("text")
        _learned["rows"], _learned["held out"] = rows[HELD_OUT:], rows[:HELD_OUT]
        shape = dict(
            hidden_size=768,
            intermediate_size=2304,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            vocab_size=TOKENS,
            tie_word_embeddings=True,
        )
        HF.for_model("qwen3", **shape).save_pretrained(_learned["folder"])
    args = TrainingArguments(
        output_dir=new_folder(),
        bf16=True,
        per_device_train_batch_size=ROWS,
        num_train_epochs=STEPS,  # of however few rows there are: max_steps ends it
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=6e-4,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        weight_decay=0.1,
        adam_beta2=0.95,
        save_strategy="no",
        disable_tqdm=True,
        **keys,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        model = AutoModel.from_config(AutoConfig.from_pretrained(_learned["folder"], args), args)
        trainer = McaTrainer(model=model, args=args, train_dataset=_learned["rows"])
        trainer.train()
        _learned[key] = trainer.evaluate(_learned["held out"])["eval_loss"]
    return _learned[key]


def learns(then: dict, **keys):
    """The held-out loss is that of TE in bf16, within 1 %; `then` is a run of local layers or of
    FP8.
    """
    key = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    exact, os.environ[key] = os.environ[key], "1"
    # exact repeats need a workspace that grows with a packed row's square
    try:
        wanted, got = learned(transformer_impl=TE, **keys), learned(**then, **keys)
    finally:
        os.environ[key] = exact
    off = got / wanted - 1
    return wanted < 5.0 and abs(off) < 0.01, dict(bf16=wanted, got=got, off=off)


def learning_cases() -> None:
    add("learning", "local bf16", learns, dict(transformer_impl=LOCAL))
    for recipe in RECIPES:
        add("learning", f"fp8 {recipe}", learns, dict(fp8(recipe), transformer_impl=TE))
    packed = dict(sequence_packing=True)
    then = dict(fp8("delayed"), transformer_impl=TE)
    add("packs", "learning fp8 delayed", lambda: learns(then, **packed))
    ends = dict(fp8("tensorwise"), transformer_impl=TE, first_last_layers_bf16=True)
    add("learning", "fp8, ends in bf16", learns, ends)


# -- two GPUs --------------------------------------------------------------------------------------

MULTI = {
    "dp2 fp8 delayed distributed": {**fp8("delayed"), **DIST_OVERLAP},
    "tp2": TP2,
    "tp2+sp packed": {**TP2, **SP, **PACKED},
    "tp2+sp fp8 delayed packed": {**TP2, **SP, **PACKED, **fp8("delayed")},
    "tp2+sp lora": {**TP2, **SP, "adapt": "lora"},
    "cp2 packed recomputed": {**CP2, **PACKED, **FULL},
    "cp2 fp8": {**CP2, **fp8("tensorwise")},
    "pp2 fp8": dict(pipeline_model_parallel_size=2, **fp8("tensorwise")),
    "experts ep2": dict(family="qwen3_moe", expert_model_parallel_size=2, **AUX),
    "experts tp2+sp": dict(family="qwen3_moe", **TP2, **SP, **AUX),
    # the adapters' products of local layers in bf16, whose sums the CPU's tests make over gloo
    "local cp2": dict(impl=LOCAL, **CP2),
    "local tp2 lora": dict(impl=LOCAL, adapt="lora", **TP2),
    "local tp2+sp lora packed": dict(impl=LOCAL, adapt="lora", **TP2, **SP, **PACKED),
    "local experts ep2 lora": dict(
        impl=LOCAL, adapt="lora", family="qwen3_moe", expert_model_parallel_size=2
    ),
    "local experts tp2+sp lora": dict(impl=LOCAL, adapt="lora", family="qwen3_moe", **TP2, **SP),
}


def on_two(folder: str, cells: dict, end: float) -> dict[str, str]:
    """On each of two ranks: train every cell, {name: (path, keys, losses and norms of one GPU in
    float32, in bf16)}, and print its line at once -> {case: state}. What has not begun at
    `end`, by the clock, is named and not run.
    """
    use_folder(folder)
    states = {}
    for name, (path, keys, exact, local) in cells.items():
        late = world.is_late(end)
        started, keys = time.time(), dict(keys)
        if keys.pop("adapt", None):
            keys["adapt"] = lora_on()
        try:
            if late:
                raise TimeoutError("not run: no time was left")
            of_run = dict(impl=TE, export=False, out=f"{folder}/{name}", bf16=True)
            got = train(path, **{**of_run, **keys})
            state, words = judge_two(name, (got["loss"], got["norm"]), exact, local)
        except Exception as error:
            state, words = "FAIL", f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        if torch.distributed.get_rank() == 0:
            say(state, "two", name, started, words)
        states[f"two: {name}"] = state
        world.leave_layout()
        if not late:
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

            # or it reduces this run's scales in the next one's passes, over groups that are gone
            FP8GlobalStateManager.reset()
    return states


def judge_two(name: str, got, exact, local) -> tuple[str, str]:
    """("ok" or "DIFF", the numbers) of a layout of two GPUs."""
    numbers = {}
    for run, (losses, norms) in (("te", got), ("local", local)):
        numbers[f"loss {run}"] = apart(losses, exact[0])
        numbers[f"norm {run}"] = relative(norms, exact[1])
    limits = IN_FP8 if "fp8" in name else MIXED if "experts" in name else PLAIN
    limits = dict(loss=limits["loss"], norm=limits["norm"])
    ok = within(numbers, limits, "te") and within(numbers, limits, "local")
    return ("ok" if ok else "DIFF"), text(numbers)


def two(words: list[str], end: float) -> dict[str, str]:
    """The layouts of two GPUs that the words choose, in one world -> {case: state}."""
    cells = {}
    for name, keys in MULTI.items():
        if not chosen(words, "two", name):
            continue
        keys = dict(keys)
        path = model_of(keys.pop("family", "qwen3"))
        meant = {**keys, "adapt": lora_on()} if "adapt" in keys else keys
        runs_of_one = (reference(path, dtype, **meant) for dtype in ("float32", "bf16"))
        cells[name] = path, keys, *((run["loss"], run["norm"]) for run in runs_of_one)
    if not cells:
        return {}
    left = max(end - time.time(), 0.0)
    return world.run(on_two, 2, new_folder("two"), cells, end, timeout_s=left + CASE_S)[0]


# -- one after another -----------------------------------------------------------------------------


def _stop(*_):
    raise TimeoutError(f"longer than {CASE_S} s")


def text(numbers: dict) -> str:
    parts = (f"{k} {v:.1e}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
    return " ".join(", ".join(parts).split())


def say(state: str, group: str, name: str, started: float, words: str) -> None:
    print(f"{state:4} {group:8} {name:40} {time.time() - started:5.1f} s  {words}", flush=True)


def run_case(group: str, name: str, action) -> str:
    """Print the case's line -> its state."""
    started, words = time.time(), ""
    signal.alarm(3 * CASE_S if "learning" in f"{group} {name}" else CASE_S)
    try:
        ok, numbers = action()
        state, words = "ok" if ok else "DIFF", text(numbers)
    except Exception as error:
        state, words = "FAIL", f"{type(error).__name__}: {error}"[:600]
        traceback.print_exc()
    signal.alarm(0)
    with contextlib.suppress(ImportError):  # TE keeps the scales of models that are gone
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
    say(state, group, name, started, words)
    return state


def side_by_side(jobs: int, end: float) -> dict[str, str]:
    """All groups in `jobs` processes on the first GPU, whose lines are printed as they come ->
    {case: state}. They end with this one.
    """
    children, states = [], {}
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

    def run(part: str) -> None:
        words = [*part.split(), "jobs=1", f"limit={max(end - time.time(), 0):.0f}"]
        command = [sys.executable, "-u", "-W", "ignore", "-m", "tests.tools.gpu_te", *words]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": one_gpu}
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        children.append(child)
        for line in child.stdout:
            if line[:5] in ("ok   ", "DIFF ", "FAIL "):
                print(line, end="", flush=True)
                states[line[5:54]] = line[:4].strip()
        if child.wait() not in (0, 1):
            states[f"{part} its process"] = f"ended with {child.returncode}"

    pool = ThreadPoolExecutor(jobs)
    try:
        list(pool.map(run, PARTS))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            if child.poll() is None:
                child.kill()
    return states


def one_by_one(words: list[str], end: float) -> dict[str, str]:
    """The cases of one GPU that the words choose, in this process -> {case: state}."""
    groups = dense_cases, mode_cases, lora_cases, checkpoint_cases, expert_cases, fp8_cases
    for make in (*groups, learning_cases):
        make()
    states = {}
    for group, name, action in CASES:
        if not chosen(words, group, name):
            continue
        if time.time() > end:
            states[f"{group}: {name}"] = "FAIL"
            say("FAIL", group, name, time.time(), "not run: no time was left")
        else:
            states[f"{group}: {name}"] = run_case(group, name, action)
    return states


def main(words: list[str]) -> int:
    """Run the cases that the words choose. Returns 1 where one is not ok, or there is none."""
    from mca_lite import model_config

    if model_config.engine_here() is None:
        print("Transformer Engine does not work here: its cases are left out")
        return 0
    options = dict(word.split("=") for word in words if word.startswith(("jobs=", "limit=")))
    words = [word for word in words if word.partition("=")[0] not in options]
    jobs, started = int(options.get("jobs", 1 if words else len(PARTS))), time.time()
    end = started + float(options.get("limit", 3600))
    signal.signal(signal.SIGALRM, _stop)
    world.end_when_told()
    print(model_config.found_here(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        use_folder(folder)
        alone = jobs == 1 or words
        states = one_by_one(words, end) if alone else side_by_side(jobs, end)
        if torch.cuda.device_count() > 1:
            states.update(two(words, end))
    failed = [name for name, state in states.items() if state != "ok"]
    done, seconds = len(states) - len(failed), time.time() - started
    print(f"{done} of {len(states)} cases of Transformer Engine in {seconds:.0f} s")
    print("\n".join(["not ok:", *failed]) if failed else "all ok", flush=True)
    return int(bool(failed) or not states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
