"""Random configurations: each trains on megatron-core in a random layout as it does on one rank of
plain torch, or is refused before ranks meet.

    make fuzz                                  40 configurations, as in `make test-all`
    make fuzz ARGS="--count 300 --seed 7"
    make fuzz ARGS="--seed 7 --only 123 --folder /tmp/fuzz"    one of them again; model, data, YAML
    and runs stay there

A configuration is a model (family, odd sizes), a stage with its data, and keys; the layout's keys
are megatron's alone. The log's numbers of each step and the exported weights must be the same
within the suite's tolerances. Where plain torch refuses what megatron-core takes, one rank of
megatron-core is what it is compared with. Everything is float32 without dropout.
"""

import argparse
import collections
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import transformers
import yaml

from tests.shared import small_runs, tiny, tiny_moe, world
from tests.shared.dpo_tools import differences
from tests.shared.files import tensors
from tests.shared.training import NUMBERS, TOLERANCE, read_log

DENSE = [*tiny.FAMILY_KEYS, *tiny.MORE_KEYS]
EXPERTS = list(tiny_moe.MODELS)
WITH_BIAS = ("glm4_moe", "glm4_moe_plain", "deepseek_v3")
LORA_TARGETS = [["all"], ["q_proj", "v_proj"], ["k_proj", "embed_tokens", "lm_head"]]
STAGES = ("pt", "sft", "dpo", "kto", "rm", "distill")
# half of them compare the pairs of a global batch
LOSSES = ("orpo", "simpo", "ipo", "hinge", "cpo", "bco_pair", "kto_pair", "aot", "aot_unpaired")
# further ones, {pref_loss: keys that it reads or needs}
MORE_LOSSES = {
    "sigmoid_norm": {}, "discopop": {"discopop_tau": 0.2}, "nca_pair": {}, "sppo_hard": {},
    "robust": {"dpo_label_smoothing": 0.2}, "exo_pair": {"dpo_label_smoothing": 0.1},
    "bco_pair_unshifted": {}, "apo_zero": {}, "apo_down": {}, "sft": {},
}  # fmt: skip
OF_ANSWERS = ("dpo", "kto", "rm")
# families with layers for multi-token prediction, and how many of them their files can have
AHEAD = {"deepseek_v3": 2, "glm4_moe": 2, "glm4_moe_plain": 2, "glm4_moe_lite": 2}
AHEAD |= {"qwen3_next": 1, "qwen3_5_text": 1, "qwen3_5_moe_text": 1}
LATENT = ("deepseek", "glm4_moe_lite", "youtu")
TYPES = ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt")
REFUSED, SAME, ONE, FAILED = "refused", "same as torch", "same as one rank", "failed"


@dataclass
class Case:
    """One configuration. keys: of both backends; layout: of megatron-core alone."""

    name: str
    model: str
    has_experts: bool
    sizes: dict
    ranks: int
    keys: dict = field(default_factory=dict)
    layout: dict = field(default_factory=dict)


# -- drawing ---------------------------------------------------------------------------------------


class Draw:
    """Draws one case; `seed` and `number` alone decide it."""

    def __init__(self, seed: int, number: int):
        self.rng = random.Random(f"{seed}/{number}")
        ranks, has_experts = self.rng.choices((1, 2, 4), (1, 6, 2))[0], self.chance(0.35)
        model = self.one(*(EXPERTS if has_experts else DENSE))
        self.case = Case(f"{seed}-{number}", model, has_experts, {}, ranks)
        self._model()
        self._stage()
        self._steps()
        self._layout()
        self._memory()
        if self.case.has_experts:
            self._experts()
        # drawn apart, so that what stands above stays what it was for a seed and a number
        self.rng = random.Random(f"{seed}/{number}/more")
        self._more_model()
        self._more_memory()
        if self.case.keys["stage"] == "dpo":
            self._more_losses()
        if self.case.keys.get("finetuning_type") == "lora":
            self._more_adapters()
        elif self.case.keys.get("finetuning_type") == "freeze":
            self._more_frozen()

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def one(self, *values):
        return self.rng.choice(values)

    def _model(self) -> None:
        case, one = self.case, self.one
        sizes = case.sizes
        sizes["vocab_size"] = one(60, 61, 64, 67)
        sizes["intermediate_size"] = one(40, 48, 54)
        if self.case.has_experts:
            sizes["num_hidden_layers"] = one(2, 3, 4)
            sizes["moe_intermediate_size"] = one(12, 16, 20)
        elif case.model in tiny.FAMILY_KEYS:
            sizes["num_hidden_layers"] = one(1, 2, 3, 4)
        if not case.model.startswith(("deepseek", "glm4_moe_lite", "youtu")):  # latent attention
            heads, groups = one((4, 2), (4, 4), (4, 1), (2, 2), (2, 1), (6, 3), (6, 2), (3, 1))
            sizes.update(num_attention_heads=heads, num_key_value_heads=groups)
            sizes["hidden_size"] = 8 * heads
        if case.model in ("llama", "mistral", "qwen3", "olmo2", "mixtral", "qwen3_moe"):
            sizes["tie_word_embeddings"] = self.chance(0.5)
        sizes["weights_seed"] = self.rng.randrange(1000)

    def _stage(self) -> None:
        keys, one, chance = self.case.keys, self.one, self.chance
        keys["stage"] = stage = self.rng.choices(STAGES, (2, 4, 3, 1, 1, 2))[0]
        keys["cutoff_len"] = one(15, 16, 24, 33)
        is_lora = chance(0.3)
        if is_lora:
            keys.update(finetuning_type="lora", lora_rank=one(1, 3, 4), lora_target=self._targets())
            keys.update(use_rslora=chance(0.3), save_merged_model=chance(0.3))
        elif chance(0.15):
            keys.update(finetuning_type="freeze", freeze_trainable_layers=one(1, 2, -1))
        if keys["stage"] == "dpo":
            losses = ("sigmoid", "sigmoid", "sigmoid", *LOSSES)
            keys["pref_loss"], keys["pref_beta"] = one(*losses), one(0.1, 0.5)
            keys["pref_ftx"] = one(0.0, 0.0, 0.3)
            if keys["pref_loss"] == "sigmoid":
                keys["dpo_label_smoothing"] = one(0.0, 0.1)
                keys["ref_model"] = one(None, "cached", "model", "adapter" if is_lora else "cached")
        elif stage == "kto":
            keys.update(pref_beta=one(0.1, 0.5), kto_chosen_weight=one(1.0, 1.5))
            keys["ref_model"] = one(None, "cached", "model")
        elif stage == "rm":
            keys["center_rewards_coefficient"] = one(0.0, 0.05)
        else:
            keys["calculate_per_token_loss"] = chance(0.8)
        if stage == "distill":
            keys.update(distill_loss=one("forward_kl", "reverse_kl", "jsd"))
            keys.update(distill_temperature=one(1.0, 1.5), distill_ce_weight=one(0.0, 0.25))
            keys["teacher_top_k"] = one(None, 4)
        if stage in ("sft", "distill"):
            keys[one("train_on_prompt", "mask_history")] = chance(0.6)
        keys[one("packing", "neat_packing")] = chance(0.4)
        if stage in OF_ANSWERS:
            keys.pop("neat_packing", None)

    def _targets(self) -> list[str]:
        model = self.case.model
        if model.startswith(("phi3", "glm4_no", "deepseek")) or model == "glm4":
            return self.one(["o_proj"], ["o_proj", "embed_tokens"], ["all"])
        if self.case.has_experts and self.chance(0.3):
            return ["all", "all-router"]
        return self.one(*LORA_TARGETS)

    def _steps(self) -> None:
        keys, one, chance = self.case.keys, self.one, self.chance
        keys["per_device_train_batch_size"] = one(1, 1, 2, 3)
        if chance(0.7):
            keys["max_steps"] = one(3, 4)
        else:
            keys.update(num_train_epochs=one(1.0, 1.5), max_samples=11)
        keys["learning_rate"], keys["weight_decay"] = one(1e-3, 2e-3), one(0.0, 0.1)
        keys["max_grad_norm"], keys["seed"] = one(0.0, 0.3, 1.0), self.rng.randrange(1000)
        keys["optim"] = one("adam", "adam", "adam", "sgd")
        keys["adam_beta2"] = one(0.95, 0.999)
        keys["lr_scheduler_type"] = one(*TYPES)
        if keys["lr_scheduler_type"] in ("linear", "cosine") and chance(0.4):
            keys["lr_scheduler_kwargs"] = one({"min_lr": 1e-4}, {"min_lr_rate": 0.1})
        keys[one("warmup_steps", "warmup_ratio")] = one(0, 0, 0.3, 1)
        keys["loss_chunk_size"] = one(None, None, 3, 7)
        keys["disable_shuffling"] = chance(0.2)
        if chance(0.3):
            keys.update(eval_strategy="steps", eval_steps=2, val_size=one(3, 0.2))
            keys["per_device_eval_batch_size"] = one(None, 1, 2)
        if chance(0.1):
            keys["train_from_scratch"] = True
        if chance(0.1):
            keys["add_tokens"] = ["new1", "new2"]

    def _layout(self) -> None:
        case, layout, one, chance = self.case, self.case.layout, self.one, self.chance
        left, degrees = case.ranks, {}
        names = [
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        ]
        for name in self.rng.sample(names, len(names)):
            degrees[name] = one(*[n for n in (1, 2, 2, 4) if left % n == 0])
            left //= degrees[name]
        layout.update({name: degree for name, degree in degrees.items() if degree > 1})
        tp, pp, _ = (degrees[name] for name in names)
        layout["sequence_parallel"] = chance(0.9 if self.case.has_experts else 0.5)
        layout["tp_comm_overlap"] = chance(0.3)
        if pp > 1:
            layout["variable_seq_lengths"] = chance(0.3)
            if chance(0.3):
                layout["virtual_pipeline_model_parallel_size"] = 2
            elif chance(0.2):
                layout["pipeline_model_parallel_layout"] = "auto"
            elif chance(0.3):
                layers = case.sizes.get("num_hidden_layers", 2)
                first = self.rng.randint(0, layers)
                stages = ["t" * first, "t" * (layers - first), *[""] * (pp - 2)]
                layout["pipeline_model_parallel_layout"] = f"E{'|'.join(stages)}L"
        per_step = case.keys["per_device_train_batch_size"] * left
        case.keys["global_batch_size"] = per_step * one(1, 2, 4)
        layout["use_distributed_optimizer"] = chance(0.05 if case.keys["optim"] == "sgd" else 0.5)
        if chance(0.3):
            layout["overlap_grad_reduce"] = True
            layout["overlap_param_gather"] = layout["use_distributed_optimizer"] and chance(0.7)
        layout["ddp_bucket_size"] = one(None, None, 500)
        layout["grad_reduce_in_fp32"] = chance(0.7)
        if self.case.has_experts:
            stage = case.ranks // pp
            layout["expert_model_parallel_size"] = one(*[n for n in (1, 2, 4) if stage % n == 0])
            if tp > 1:
                layout["expert_tensor_parallel_size"] = one(None, 1)

    def _memory(self) -> None:
        layout, one, chance = self.case.layout, self.one, self.chance
        kind = one(None, None, "full", "selective")
        layout["recompute_granularity"] = kind
        if kind == "full" and chance(0.6):
            layout["recompute_method"] = one("uniform", "block")
            layout["recompute_num_layers"] = one(1, 2)
        elif kind == "selective":
            layout["recompute_modules"] = one(None, ["mlp"], ["core_attn", "mlp"], ["moe"])

    def _experts(self) -> None:
        keys, layout, one, chance = self.case.keys, self.case.layout, self.one, self.chance
        keys["moe_aux_loss_coeff"], keys["moe_z_loss_coeff"] = one(0.0, 0.05), one(None, 0.01)
        keys["moe_router_load_balancing_type"] = one("aux_loss", "aux_loss", "seq_aux_loss")
        is_full = "finetuning_type" not in keys
        if (self.case.model in WITH_BIAS and is_full) or chance(0.03):
            keys["moe_router_bias_update_rate"] = one(0.0, 0.01)
        layout["moe_grouped_gemm"] = chance(0.7)
        layout["moe_token_dispatcher_type"] = one("alltoall", "alltoall", "allgather")
        layout["moe_shared_expert_overlap"] = chance(0.1)
        layout["moe_router_dtype"] = one("fp32", "fp32", "fp64")
        if is_full and keys["stage"] in ("pt", "sft") and chance(0.15):
            # tiny models' files hold no such layers; plain torch has none: one rank is the oracle
            keys.update(train_from_scratch=True, mtp_num_layers=1)

    def _more_model(self) -> None:
        """Gated delta nets, sinks and multi-token prediction, more often than by their share."""
        case, one, chance = self.case, self.one, self.chance
        if chance(0.2):
            experts = ("qwen3_next", "qwen3_5_moe_text", "gpt_oss")
            case.model = one(*experts) if case.has_experts else "qwen3_5_text"
            case.sizes.pop("tie_word_embeddings", None)
            case.keys.pop("moe_router_bias_update_rate", None)
        is_plain = case.keys["stage"] in ("pt", "sft")
        is_plain = is_plain and case.keys.get("finetuning_type") != "freeze"
        if case.model in AHEAD and chance(0.6 if is_plain else 0.05):
            # tiny models' files hold no such layers
            case.keys["mtp_num_layers"] = one(1, 1, AHEAD[case.model])
            case.keys["train_from_scratch"] = True
        elif case.model not in AHEAD:
            case.keys.pop("mtp_num_layers", None)
        if chance(0.8):
            self._fit()

    def _fit(self) -> None:
        """Mend what most often has a layout refused."""
        case, keys, layout = self.case, self.case.keys, self.case.layout
        tp, pp, cp = (
            layout.get(f"{name}_parallel_size", 1)
            for name in ("tensor_model", "pipeline_model", "context")
        )
        if case.sizes.get("num_key_value_heads", tp) % tp:
            case.sizes.update(num_attention_heads=4, num_key_value_heads=4, hidden_size=32)
        layers = case.sizes.get("num_hidden_layers", 4 if case.has_experts else 2)
        stages = pp * layout.get("virtual_pipeline_model_parallel_size", 1)
        if layers % stages and "pipeline_model_parallel_layout" not in layout:
            layout.pop("virtual_pipeline_model_parallel_size", None)
            layout["pipeline_model_parallel_layout"] = "auto"
        elif stages > pp:
            per_step = keys["per_device_train_batch_size"] * (case.ranks // (tp * pp * cp))
            keys["global_batch_size"] = per_step * pp * self.one(1, 2)
        if tp * layout.get("expert_model_parallel_size", 1) > case.ranks // pp:
            layout["expert_tensor_parallel_size"] = 1
        if keys["optim"] == "sgd":
            layout["use_distributed_optimizer"] = layout["overlap_param_gather"] = False
        if keys["cutoff_len"] < 24:
            keys["cutoff_len"] += 9
        if keys["stage"] == "distill":
            keys.pop("add_tokens", None)

    def _more_memory(self) -> None:
        layout, one, chance = self.case.layout, self.one, self.chance
        if chance(0.25):
            layout["recompute_granularity"] = "full"
            layout.pop("recompute_modules", None)
        if layout["recompute_granularity"] == "full":
            layout["recompute_keep"] = one(None, "core_attn")
            layout["activation_offloading"] = chance(0.4)
        if chance(0.25):
            layout["mlp_chunk_size"] = one(1, 4, 8, 50)

    def _more_losses(self) -> None:
        keys, one, chance = self.case.keys, self.one, self.chance
        if chance(0.3):
            keys["pref_loss"] = one(*MORE_LOSSES)
            keys.pop("dpo_label_smoothing", None)
            keys.update(MORE_LOSSES[keys["pref_loss"]])
            if keys["pref_loss"] == "sft":
                keys.pop("ref_model", None)
                keys.pop("pref_beta")
        elif chance(0.2):
            keys["pref_loss"] = ["sigmoid", one("ipo", "simpo", "cpo", "bco_pair", "sft")]
            keys["pref_loss_weights"] = one(None, [0.7, 0.4])
        if keys["pref_loss"] in ("sigmoid", "sigmoid_norm", "hinge", "robust") and chance(0.3):
            keys["f_divergence_type"] = one("forward_kl", "js_divergence", "alpha_divergence")
        if chance(0.2):
            keys["ld_alpha"] = one(0.0, 0.6)
        if chance(0.2):
            keys["use_weighting"] = True

    def _more_adapters(self) -> None:
        case, keys, one, chance = self.case, self.case.keys, self.one, self.chance
        tied = case.sizes.get("tie_word_embeddings")
        if chance(0.2):
            keys["lora_target"] = one(["embed_tokens"], ["o_proj", "embed_tokens"], ["lm_head"])
        if case.has_experts and chance(0.3):
            keys["target_parameters"] = one(
                ["mlp.experts.gate_up_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            )
        if not tied and chance(0.3):
            keys["modules_to_save"] = one(
                ["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"], ["norm"],
                ["post_attention_layernorm"],
            )  # fmt: skip
            targets = [name for name in keys["lora_target"] if name not in keys["modules_to_save"]]
            keys["lora_target"] = targets or ["o_proj"]
        # a pattern has to name a module with an adapter
        last = keys["lora_target"][-1]
        module = "o_proj" if last.startswith("all") else last
        some = rf".*\.1\..*{module}" if module.endswith("proj") else f".*{module}"
        if chance(0.3):
            keys["rank_pattern"] = one({module: 2}, {some: 5})
        if chance(0.3):
            keys["alpha_pattern"] = one({module: 3.0}, {some: 5.0})
        if not case.model.startswith(LATENT) and chance(0.35):
            # blocks of 64 numbers in the rows of each rank
            case.sizes.update(num_attention_heads=16, num_key_value_heads=one(2, 4, 16))
            case.sizes.update(hidden_size=128, intermediate_size=128)
            if case.model in AHEAD and not case.model.startswith("glm4"):  # delta nets
                case.sizes["linear_value_head_dim"] = 16
            if case.has_experts:
                case.sizes["moe_intermediate_size"] = 128
            if case.model.startswith(("qwen2_moe", "qwen3_next", "qwen3_5_moe", "flint")):
                case.sizes["shared_expert_intermediate_size"] = 128
            keys["quantization_bit"] = one(4, 8)
            if keys["quantization_bit"] == 4:
                keys["quantization_type"] = one(None, "nf4", "mxfp4")

    def _more_frozen(self) -> None:
        keys, one, chance = self.case.keys, self.one, self.chance
        if chance(0.6):
            keys["freeze_trainable_modules"] = one(["self_attn"], ["mlp"], ["input_layernorm"])
        if chance(0.5):
            keys["freeze_extra_modules"] = one(
                ["embed_tokens"], ["norm"], ["lm_head"], ["norm", "lm_head"]
            )


# -- running ---------------------------------------------------------------------------------------


def attempt(keys: dict) -> str:
    """Train on this rank -> "", or why the keys were refused. Whatever comes after the plan is
    raised.
    """
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    from mca_lite import run, tool_generation
    from mca_lite.args import parse_args

    # its class there leaves the words of the toy tokenizer out, and no sample would remain
    TOKENIZER_MAPPING_NAMES.pop("qwen3_5_moe_text", None)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            plan = run.make_plan(parse_args(small_runs.words_of(keys)))
        except ValueError as error:
            return str(error)
        run.train(plan, [tool_generation.Answers()])
    return ""


def save_model(case: Case, folder: Path, more_seed: int = 0) -> None:
    sizes, module = dict(case.sizes), tiny_moe if case.has_experts else tiny
    seed = sizes.pop("weights_seed") + more_seed
    module.save_model(folder, case.model, seed=seed, **sizes)
    small_runs.save_tokenizer(folder)


class Runs:
    """Cases run in `folder`, which holds the data, and the model and the runs of each."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        small_runs.write_data(folder, chats=17, pairs=15)

    def keys_of(self, case: Case, kind: str) -> dict:
        """The configuration of a case on "megatron", on "torch", or on "one" rank."""
        place = self.folder / case.name
        data = self.folder / f"{small_runs.DATA[case.keys['stage']]}.jsonl"
        keys = dict(
            model_name_or_path=str(place / "model"), dataset=[str(data)],
            output_dir=str(place / kind),
            cache_dir=str(place / f"cache-{kind}"), overwrite_output_dir=True, save_strategy="no",
            logging_steps=1, adam_epsilon=1e-4, preprocessing_num_workers=1, disable_tqdm=True,
        )  # fmt: skip
        keys.update(case.keys)
        if keys["stage"] == "distill":
            keys["teacher_model_name_or_path"] = str(place / "teacher")
        if kind == "megatron":
            keys.update(case.layout)
        elif kind == "torch":
            keys["use_mca"] = False
        return {key: value for key, value in keys.items() if value is not None}

    def refused(self, case: Case, kind: str) -> str:
        """Run a case -> "", or the words of its refusal, which every rank has."""
        keys = self.keys_of(case, kind)
        (self.folder / case.name / f"{kind}.yaml").write_text(yaml.safe_dump(keys, sort_keys=False))
        ranks = case.ranks if kind == "megatron" else 1
        answers = world.run(attempt, ranks, keys, timeout_s=100)
        assert len(set(answers)) == 1, f"some ranks refuse what others take: {answers}"
        return answers[0]

    def judge(self, case: Case) -> tuple[str, str]:
        """(REFUSED, SAME, ONE or FAILED, why)"""
        place = self.folder / case.name
        save_model(case, place / "model")
        if case.keys["stage"] == "distill":
            save_model(case, place / "teacher", more_seed=1)
        try:
            if words := self.refused(case, "megatron"):
                return REFUSED, words
            kind = "torch"
            if words := self.refused(case, kind):
                kind = "one"
                if again := self.refused(case, kind):
                    return FAILED, f"taken in this layout, and refused on one rank: {again}"
        except (AssertionError, RuntimeError, TimeoutError) as error:
            return FAILED, str(error)
        wrong = compare(place / "megatron", place / kind)
        if wrong:
            return FAILED, "\n".join(wrong)
        return (SAME, "") if kind == "torch" else (ONE, words)


def compare(ours: Path, theirs: Path) -> list[str]:
    """Differences between two runs' logs and exported weights, in words."""
    logs = [small_runs.curve(read_log(folder)) for folder in (ours, theirs)]
    names = [[sorted(line) for line in log] for log in logs]
    if names[0] != names[1]:
        return [f"the logs hold {names[0]} and {names[1]}"]
    routers = [[{k: line.pop(k) for k in NUMBERS if k in line} for line in log] for log in logs]
    wrong = differences(*logs) + differences(*routers, tolerance=1e-4)
    for folder in (".", "merged"):
        got, wanted = tensors(ours / folder), tensors(theirs / folder)
        if got.keys() != wanted.keys():
            wrong.append(f"exports in {folder}: other names: {got.keys() ^ wanted.keys()}")
            continue
        off = {name: float((got[name] - wanted[name]).abs().max()) for name in wanted}
        wrong += [
            f"{folder}/{name} is off by {v:.1e}" for name, v in off.items() if not v <= TOLERANCE
        ]
    return wrong


def run(count: int, seed: int, folder: Path, only: int | None = None, say=print) -> dict:
    """{verdict: how many}; each failure is told with all that it takes to see it again."""
    runs, found = Runs(folder), collections.Counter()
    for number in range(count) if only is None else [only]:
        case, start = Draw(seed, number).case, time.monotonic()
        verdict, why = runs.judge(case)
        found[verdict] += 1
        took = f"{time.monotonic() - start:.1f} s"
        told = "" if verdict == FAILED else " ".join(why.split())[:200]
        say(f"{number}: {verdict}, {case.model}, {took} {told}".rstrip(), flush=True)
        if verdict == FAILED:
            text = (folder / case.name / "megatron.yaml").read_text()
            again = f'make fuzz ARGS="--seed {seed} --only {number} --folder /tmp/fuzz"'
            say(f"{why}\nsizes: {case.sizes}\n{case.ranks} ranks with\n{text}{again}\n", flush=True)
    return dict(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one configuration")
    parser.add_argument("--folder", type=Path, help="where models and runs stay")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        found = run(options.count, options.seed, options.folder or Path(temporary), options.only)
    print(json.dumps(found))
    return 1 if found.get(FAILED) else 0


if __name__ == "__main__":
    sys.exit(main())
