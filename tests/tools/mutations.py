"""Wrong changes of the package, each tried alone in a copy of the tree: a test must notice it.

python -m tests.tools.mutations [words of a row's name]

A row survives if its tests pass with the change. It is stale if its text is not in the package
exactly once; modules may be renamed and merged, so a row names none. What was noticed is kept in
output/mutations.json, and is tried again once its module or the files of its tests have another
text, or where the row is named; without that file all are tried.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.shared import uninstalled

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "output" / "mutations.json"
COPIED = "mca_lite tests configs train.py setup.cfg pyproject.toml README.md CHANGELOG.md".split()

DRAWN = (
    "test_dpo_reference.py"
    "::test_drawn_models_of_two_seeds_and_two_precisions_have_folders_of_their_own"
)
# (what is wrong, text of the package, the text in its place, tests that fail then)
ROWS: list[tuple[str, str, str, str]] = [
    (
        "a stream that is resumed inside a chunk counts its samples from 0",
        "enumerate(samples[done:], done)",
        "enumerate(samples[done:])",
        "test_data_stream.py::test_a_run_goes_on_at_every_position",
    ),
    (
        "rows are dealt in order, whatever a rank has so far",
        'ranks = np.argsort(loads, kind="stable")',
        "ranks = np.arange(len(loads))",
        "test_data.py::test_a_rank_with_one_dear_sample_gets_the_cheap_ones_after_it",
    ),
    (
        "the checksum of a checkpoint's file leaves out what came before",
        "self.crc = zlib.crc32(block, self.crc)",
        "self.crc = zlib.crc32(block)",
        "test_files.py::test_a_checksum_writer_knows_size_and_crc_of_what_is_in_the_file",
    ),
    (
        "split masters scale gradients up to the limit of their norm",
        "/ (grad_norm + 1e-6)).clamp(max=1)",
        "/ (grad_norm + 1e-6))",
        "test_optim_adam.py::test_gradients_below_the_limit_of_their_norm_are_left_as_they_are",
    ),
    (
        "tokens are not summed over context parallel ranks",
        "dist.all_reduce(totals, group=mpu.get_data_parallel_group(with_context_parallel=True))",
        "dist.all_reduce(totals, group=mpu.get_data_parallel_group())",
        "test_trainer.py::test_bf16_follows_the_torch_backend_in_bf16",
    ),
    (
        "adapters are resumed with another use_rslora",
        '"lora_alpha", "use_rslora", "target_modules"',
        '"lora_alpha", "target_modules"',
        "test_lora_errors.py::test_a_checkpoint_with_other_adapters_is_not_resumed_from",
    ),
    (
        "the head of an adapter that cut a tie is dropped",
        "and len(both) == 2 and torch.equal(*map(source.read, both)):",
        "and len(both) == 2:",
        "test_lora_merge.py::test_what_cannot_be_merged_is_refused",
    ),
    (
        "the best checkpoint does not name itself",
        "if state.best_global_step == state.global_step:",
        "if False:",
        "test_ckpt_settings.py::test_the_best_evaluation_is_forgotten_when_another_way_tells_it",
    ),
    (
        "pieces of later gradient buckets are at the wrong place",
        "bucket.offset + rank * share - start",
        "rank * share - start",
        "test_ckpt.py::test_resume_in_the_same_layout_is_bit_for_bit",
    ),
    (
        "the count of updates is the main rank's",
        "return parallel.largest(*counts)",
        "return list(counts)",
        "test_lora_files.py::test_a_run_goes_on_where_a_rank_has_nothing_trained_to_write",
    ),
    (
        "a group of experts counts by its three best",
        '{"top2": 2, "max": 1}[group_score]',
        "min(3, grouped.shape[-1])",
        "test_model_routing.py::test_choices_and_weights_are_those_of_transformers",
    ),
    (
        "an adapter's alpha_pattern is ignored",
        "if self.alpha_pattern:",
        "if False:",
        "test_lora_patterns.py::test_patterns_of_linears_train_as_with_peft",
    ),
    (
        "convert verifies logits that are NaN",
        "if not difference <= tolerance * max(largest, 1.0):",
        "if difference > tolerance * max(largest, 1.0):",
        "test_lora_merge.py::test_a_merge_that_went_wrong_is_found_out",
    ),
    (
        "rows of packs are named as samples",
        "if not isinstance(dataset, Packs):",
        "if True:",
        "test_nonfinite.py::test_samples_of_packs_are_those_of_the_data",
    ),
    (
        "a rank that goes on has waited",
        "        self._late = None\n        self.waited = 0.0",
        "        self._late = None",
        "test_watchdog.py::test_micro_batches_are_progress_and_a_suspended_process_has_not_waited",
    ),
    (
        "pairs that fill a batch are real tokens",
        'batch["attention_mask"] = (mask != 0).long()',
        'batch["attention_mask"] = torch.ones_like(mask)',
        "test_data_pairs.py::test_documents_of_a_row_that_fills_the_batch_are_no_tokens",
    ),
    (
        "a pair's weight counts for each of its documents",
        "column = _of_samples(name, column, per_sample)",
        "pass",
        "test_columns.py::test_columns_of_pairs_are_those_of_documents_and_samples_in_a_packed_row",
    ),
    (
        "a dataset's weight that changes leaves its cache as it is",
        '"columns": reader.columns,',
        "",
        "test_columns.py::test_a_records_column_is_in_the_cache_and_a_changed_one_is_read_again",
    ),
    (
        "gradients in fp16 are made before the loss scale",
        "ahead = not (would_be_in_vain or would_be_zero)",
        "ahead = not would_be_in_vain",
        "test_loss_tokens.py::test_small_gradients_in_fp16_are_kept_by_the_loss_scale",
    ),
    (
        "a rank of padding alone has columns of the vocabulary",
        "min(max(vocab_size - first, 0), rows)",
        "min(vocab_size - first, rows)",
        "test_loss_logits.py::test_a_function_of_the_logits_has_its_gradients_in_every_layout",
    ),
    (
        "the weights of experts are rounded before the product",
        "(swiglu(both) * weights.unsqueeze(-1)).to(both.dtype)",
        "(swiglu(both) * weights.unsqueeze(-1).to(both.dtype)).to(both.dtype)",
        "test_model_fused.py"
        "::test_the_weights_of_experts_are_float32_and_their_product_is_rounded_once",
    ),
    (
        "of many answers the second is asked for",
        "np.flatnonzero(np.diff(trained) > 1) + 1)[-1]",
        "np.flatnonzero(np.diff(trained) > 1) + 1)[:2][-1]",
        "test_trainer_generate.py::test_the_last_answer_is_asked_for",
    ),
    (
        "adapters on some experts of a layer pass",
        'not others,\n        "lora_target",',
        'True,\n        "lora_target",',
        "test_lora_errors.py::test_adapters_on_some_experts_of_a_layer_are_refused",
    ),
    (
        "drawn models of two seeds share a cached reference",
        "            self.train_config.model_source,\n",
        "",
        DRAWN,
    ),
    (
        "parts of two passes over a teacher's rows are mixed",
        "if (start, name[3]) != (self.num_rows, self._before()):",
        "if start != self.num_rows:",
        "test_distill_cache.py::test_rows_of_two_passes_are_not_mixed",
    ),
    (
        "damaged rows of a teacher pass",
        "if checksum(path) == ((end - start) * self.dtype.itemsize, int(name[4], 16)):",
        "if True:",
        "test_distill_cache.py::test_damaged_rows_are_named_and_written_again",
    ),
    (
        "another model goes on with the rows of a first one",
        "if not self._is_same(now[: len(kept)], kept):",
        "if not len(now):",
        "test_distill_cache.py::test_what_cannot_be_is_refused "
        "test_dpo_reference.py::test_a_cached_reference_of_another_model_or_other_data_is_refused",
    ),
    ("two precisions share a cached reference", "            self.backend.precision,\n", "", DRAWN),
    (
        "every replica of experts is the main one",
        "replica_id=(0, copy, self.dp_group.rank()),",
        "replica_id=(0, copy, 0),",
        "test_moe_ckpt.py::test_each_piece_of_the_weights_has_one_main_replica",
    ),
    (
        "plan counts more micro-batches in flight than a step has",
        "min(micro_batches * vpp, chunks) / vpp",
        "chunks / vpp",
        "test_plan.py::test_ranks_of_a_tiny_model_hold_what_is_planned",
    ),
    (
        "the work of experts' adapters is that of all experts",
        'uses = share if ".experts." in name else 1.0',
        "uses = 1.0",
        "test_log_speed.py::test_the_log_counts_the_experts_that_a_token_goes_to_once",
    ),
    (
        "a column of some samples is lost",
        "lacking = [i for i, row in enumerate(rows) if name not in row]",
        "lacking = []",
        "test_columns.py::test_a_column_of_some_samples_is_not_lost",
    ),
    (
        "KTO's estimate of the divergence may be below 0",
        "kl = mean_of(total, count).clamp(min=0)",
        "kl = mean_of(total, count)",
        "test_kto.py::test_kto_trains_as_plain_torch",
    ),
    (
        "answers shift within the whole data set, not within a global batch",
        "size = min(self.block, len(self) - start)",
        "size = len(self) - start",
        "test_kto.py::test_answers_shift_by_one_within_blocks",
    ),
    (
        "a reward model scores every token of a packed answer",
        "last = can_score.nonzero()[counts.cumsum(0)[real] - 1].unbind(1)",
        "last = can_score.nonzero().unbind(1)",
        "test_rm.py::test_a_reward_model_trains_as_plain_torch",
    ),
    (
        "a reward model scores the pad token at the end of an answer",
        "can_score = can_score & (ids != self.pad_token_id)",
        "pass",
        "test_rm.py::test_answers_that_hold_the_pad_token_are_scored_as_by_transformers",
    ),
    (
        "the pad token of a text has a gradient",
        "out.register_hook(lambda grad: grad.masked_fill(is_padding[..., None], 0.0))",
        "pass",
        "test_pad_token.py::test_the_pad_token_learns_as_in_transformers",
    ),
    (
        "the margin of a pair is no part of its loss",
        "centre - F.logsigmoid(chosen - rejected - margin)",
        "centre - F.logsigmoid(chosen - rejected)",
        "test_rm.py::test_a_reward_model_trains_as_plain_torch",
    ),
    (
        "a divergence at a temperature is not scaled",
        "config.temperature**2 * divergence,",
        "divergence,",
        "test_distill.py::test_layouts_distil_as_plain_torch_on_whole_logits",
    ),
    (
        "a cached teacher's other tokens are no event",
        "return torch.cat([log_q, rest], 1)",
        "return log_q",
        "test_distill.py::test_divergences_of_three_tokens_by_hand",
    ),
    (
        "the teacher's rows are of the token after",
        "self.first + row + has_row.cumsum() - 1, -1)",
        "self.first + row + has_row.cumsum(), -1)",
        "test_distill_cache.py::test_trained_tokens_are_numbered_in_the_order_of_samples",
    ),
    (
        "plan leaves out the passes of KTO",
        "return 1, 2  # mismatched",
        "return 0, 1  # mismatched",
        "test_plan.py::test_forward_passes_of_each_objective_are_counted",
    ),
    (
        "the lock of a folder that is in use is removed",
        "if [path.name for path in folder.iterdir()] == [LOCK_NAME]:",
        "if True:",
        "test_launch.py::test_a_folder_belongs_to_one_run_until_its_process_is_gone",
    ),
    (
        "rows of a second data set are those of the first",
        "view = WithRows(samples, ends, first)",
        "view = WithRows(samples, ends)",
        "test_distill_cache.py"
        "::test_the_keys_of_the_stage_train_as_plain_torch_and_rows_are_read_without_a_teacher",
    ),
    (
        "two precisions of a teacher share its rows",
        'identity["teacher"] = hash_of([files, self.backend.precision, self.args.fp8])',
        'identity["teacher"] = hash_of([files])',
        "test_distill_cache.py"
        "::test_the_keys_of_the_stage_train_as_plain_torch_and_rows_are_read_without_a_teacher",
    ),
    (
        "the tower rests on a rank without a picture alone",
        "enumerate(largest(*map(int, found)), 1)",
        "enumerate(map(int, found), 1)",
        "test_vision.py::test_ranks_with_and_without_a_picture_have_one_tower[megatron]",
    ),
    (
        "plain torch leaves the tower of a rank without a picture as it was",
        "enumerate(largest(*map(int, found)), 1)",
        "enumerate(map(int, found), 1)",
        "test_vision.py::test_ranks_with_and_without_a_picture_have_one_tower[torch]",
    ),
    (
        "the value head of a frozen reward model stays as it was drawn",
        "            named.add(head)\n",
        "            pass\n",
        "test_freeze.py::test_the_value_head_of_a_frozen_reward_model_trains",
    ),
    (
        "the first shard alone is in a model's identity",
        '(HF_CONFIG_NAME, "*.safetensors", "dist/*")',
        '(HF_CONFIG_NAME, "model.safetensors", "dist/*")',
        "test_distill_cache.py::test_a_byte_of_any_shard_makes_another_teacher",
    ),
    (
        "data sets in memory with other labels have one fingerprint",
        "for column in sorted(document.keys() & COLUMNS.keys()):",
        'for column in ["input_ids"]:',
        "test_distill_cache.py::test_every_column_of_a_dataset_in_memory_is_in_its_fingerprint",
    ),
    (
        "the best checkpoint keeps its path when the run's folder moves",
        "state.best_model_checkpoint = str(best)",
        "pass",
        "test_ckpt_settings.py::test_the_best_checkpoint_moves_with_the_runs_folder",
    ),
    (
        "a bias that chooses experts is rounded to bf16",
        "self._maintain_float32_expert_bias()",
        "pass",
        "test_moe_weights.py"
        "::test_a_run_in_bf16_leaves_the_bias_that_chooses_experts_as_it_was[megatron]",
    ),
    (
        "plain torch exports a bias that chooses experts in bf16",
        "kept = dtype if isinstance(tensor, torch.nn.Parameter) else part.dtype",
        "kept = dtype",
        "test_moe_weights.py"
        "::test_a_run_in_bf16_leaves_the_bias_that_chooses_experts_as_it_was[torch]",
    ),
    (
        "some parts of an optimizer begin with the first loss scale",
        "zip(scalers, states + states[-1:] * len(scalers), strict=False)",
        "zip(scalers, states, strict=False)",
        "test_optim.py::test_every_part_of_an_optimizer_gets_its_loss_scale_back",
    ),
    (
        "all parts of an optimizer have the loss scale of the first",
        "zip(scalers, states + states[-1:] * len(scalers), strict=False)",
        "zip(scalers, states[:1] * len(scalers), strict=False)",
        "test_optim.py::test_every_part_of_an_optimizer_gets_its_loss_scale_back",
    ),
    (
        "a micro-batch that is partly filled counts less than a whole one",
        "filled = math.ceil(plan.num_samples_of(step) / plan.micro_batch_size)",
        "filled = plan.num_samples_of(step) / plan.micro_batch_size",
        "test_trainer.py::test_a_micro_batch_that_is_partly_filled_counts_as_one",
    ),
    (
        "mismatched answers of other blocks share a reference",
        'f"{fingerprint} mismatched {block} {cutoff_len}"',
        'f"{fingerprint} mismatched {cutoff_len}"',
        "test_kto.py::test_answers_shift_by_one_within_blocks",
    ),
    (
        "mismatched answers cut to other lengths share a reference",
        'f"{fingerprint} mismatched {block} {cutoff_len}"',
        'f"{fingerprint} mismatched {block}"',
        "test_kto.py::test_answers_shift_by_one_within_blocks",
    ),
    (
        "rows that fill weigh balancing losses of KTO",
        "(self, batch: Batch) -> float:\n        return int(real_documents(batch).sum())",
        "(self, batch: Batch) -> float:\n        return len(real_documents(batch))",
        "test_kto.py::test_rows_that_fill_have_no_part_in_the_weight_of_balancing_losses",
    ),
    (
        "predictions are of the trainer's loss",
        "backend.use_loss(None)  # cross entropy, whatever the training loss is",
        "pass",
        "test_predict.py::test_predictions_are_transformers_own_in_every_layout[torch_dp2]",
    ),
    (
        "records with other options have the end of turn of the first",
        "key = (template, str(self.options))",
        "key = template",
        "test_data_chat.py::test_each_record_has_the_end_of_turn_of_its_options",
    ),
    (
        "the bytes of pictures in one record are stored in another order",
        "for placed in pictures:\n                record = ",
        "for placed in reversed(pictures):\n                record = ",
        "test_images.py::test_pictures_stored_in_one_record_keep_their_order",
    ),
    (
        "a family without a balancing loss has that of its config.json",
        "is_heard = family is None or key in family.config",
        "is_heard = True",
        "test_model_wishes.py::test_the_models_coefficient_counts_where_transformers_reads_it",
    ),
    (
        "pictures are lost where the first of joined batches has none",
        "for name in set().union(*batches) - joined.keys():",
        "for name in batches[0].keys() - joined.keys():",
        "test_columns.py"
        "::test_pictures_stand_in_the_order_of_the_documents_packed_joined_and_without_fillers",
    ),
    (
        "a group's rewards are divided by the deviation of all of them, not of a sample",
        "(counts - 1).clip(min=1)",
        "counts",
        "test_policy_data.py::test_rewards_of_a_group_become_advantages",
    ),
    (
        "a sampler's weights of a whole answer are those of its tokens",
        "gap[:] = gap.sum()",
        "gap[:] = gap",
        "test_policy_data.py::test_weights_of_a_sampler",
    ),
    (
        "columns of a rollout's tokens are not shifted with the labels",
        "np.array(value[1:]) if isinstance",
        "np.array(value[:-1]) if isinstance",
        "test_policy_data.py::test_every_spelling_is_shifted_to_the_same_sample",
    ),
    (
        "stage policy forgets the constant of dr_grpo",
        "return total / self.loss.times, count, metrics",
        "return total, count, metrics",
        "test_policy_stage.py::test_steps_are_those_of_formulas_on_whole_logits[one]",
    ),
    (
        "on-policy distillation compares the teacher with the model in training",
        "(tokens.logps - tokens.log_ratio).detach()",
        "tokens.logps.detach()",
        "test_policy_stage.py::test_steps_are_those_of_formulas_on_whole_logits[one]",
    ),
]


def copy_tree(folder: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=skipped)
        else:
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> subprocess.CompletedProcess:
    """pytest on the copy; its exit code is 0 if all pass and 1 if one fails."""
    command = [*uninstalled.PYTHON, "-m", "pytest", "-q", "-x"]
    command += [f"tests/{test}" for test in tests]
    environment = {"OMP_NUM_THREADS": "1", **uninstalled.environment(folder)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a change may leave a file's size and second
    with tempfile.TemporaryDirectory() as cache:  # of this change alone
        command += ["-o", f"cache_dir={cache}"]
        environment["MCA_LITE_CACHE"] = f"{cache}/mca_lite"
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def verdict(folder: Path, old: str, new: str, tests: str) -> str:
    """ "noticed", "SURVIVES", or why the row shows nothing; the copy is as before then."""
    modules = {path: path.read_text() for path in (folder / "mca_lite").glob("**/*.py")}
    count = sum(text.count(old) for text in modules.values())
    if count != 1:
        return f"STALE: its text is there {count} times"
    [(path, text)] = [item for item in modules.items() if old in item[1]]
    path.write_text(text.replace(old, new))
    code = run_tests(folder, tests.split()).returncode
    path.write_text(text)
    return {0: "SURVIVES", 1: "noticed"}.get(code, f"STALE: pytest ends with {code}")


def state_of(folder: Path, old: str, new: str, tests: str) -> str:
    """A digest of a row, of the modules that have its text, and of the files of its tests."""
    modules = [path.read_text() for path in sorted((folder / "mca_lite").glob("**/*.py"))]
    files = sorted({test.split("::")[0] for test in tests.split()})
    texts = [text for text in modules if old in text]
    texts += [(folder / "tests" / file).read_text() for file in files]
    return hashlib.sha256("\0".join([old, new, tests, *texts]).encode()).hexdigest()


def main(words: list[str]) -> int:
    named = [row for row in ROWS if not words or any(word in row[0] for word in words)]
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    states = {what: state_of(ROOT, *row) for what, *row in named}
    rows = [row for row in named if words or kept.get(row[0]) != states[row[0]]]
    failed = 0
    if not rows:
        print(f"all {len(named)} were noticed on these texts: {KEPT}")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        unchanged = run_tests(folder, sorted({test for row in rows for test in row[3].split()}))
        if unchanged.returncode:
            print(unchanged.stdout, "the tests do not pass without a change", sep="\n")
            return 2
        for what, *row in rows:
            found = verdict(folder, *row)
            failed += found != "noticed"
            if found == "noticed":
                kept[what] = states[what]
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_text(json.dumps(kept, indent=1))
            print(f"{found:10} {what}", flush=True)
    earlier = f", {len(named) - len(rows)} more earlier" if len(named) > len(rows) else ""
    print(f"{len(rows) - failed} of {len(rows)} wrong changes noticed{earlier}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
