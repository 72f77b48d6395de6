"""The answers of a trained model to the evaluation set, beside those that are expected.

python -m mca_lite generate config.yaml [key=value ...] [options]
    writes generations.jsonl into output_dir: prompt, answer, expected, exact_match of each sample
    (the last answer of a conversation), and shows the first of them. The prompts are those of
    eval_dataset or val_size, or of --file: records as for training, with or without an answer,
    {"prompt": ...}, or a .txt file with one a line
"""

import copy
import functools
import json
from pathlib import Path
from typing import NamedTuple

from .args_run import parse_args
from .args_values import refuse
from .cli_chat import add_options, decoding_of
from .cli_errors import at_least, finish, parser_of
from .constants import GENERATIONS_NAME
from .files import printable, write_file
from .objectives import OBJECTIVES

_SHOWN, _MOST_CHARACTERS = 3, 100  # answers, and of each line
_QUESTION = "mcaquestion"  # no template changes it
_FILES = "--file prompts.jsonl, or prompts.txt: one a line"


class _Sample(NamedTuple):
    """prompt: token ids. expected: None where the file does not say."""

    prompt: list[int]
    expected: str | None


def main(words: list[str]) -> int:
    """Generate as the words say -> exit code."""
    parser, number = parser_of("generate", __doc__), at_least(1)
    parser.add_argument("--file", metavar="F", help="these prompts instead")
    parser.add_argument("--num", type=number, metavar="N", help="only the first N samples")
    parser.add_argument("--batch-size", type=number, default=32, metavar="N", help="prompts (32)")
    add_options(parser, temperature=0.0)
    options, words = parser.parse_known_args(words)
    return finish(_generate, words, options)


def _generate(words: list[str], options) -> None:
    arguments = parse_args(words, needs_world=False)
    if options.file is not None and not Path(options.file).is_file():
        refuse("--file", options.file, f"no such file (seen from {Path.cwd()})", _FILES)
    from .generation import load_for_generation

    output_dir, decoding = Path(arguments.training.output_dir), decoding_of(options)
    trusted: tuple[str | None, ...] = ()
    if arguments.model.trust_remote_code:
        trusted = (str(output_dir), options.base, arguments.model.model_name_or_path)
    model, tokenizer = load_for_generation(output_dir, options.base, trusted=trusted)
    samples = _samples(arguments, options.file, model, tokenizer)[: options.num]
    rows = [{"prompt": tokenizer.decode(sample.prompt)} for sample in samples]
    _answer("answer", model, tokenizer, samples, rows, decoding, options)
    if options.before:
        del model  # there may be no room for two
        model, _ = load_for_generation(output_dir, options.base, before=True, trusted=trusted)
        _answer("before", model, tokenizer, samples, rows, decoding, options)
    path = output_dir / GENERATIONS_NAME
    write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    question_of = _question_finder(tokenizer)
    for row in rows[:_SHOWN]:
        print(_line(question_of(row["prompt"])))
        for name in ("before", "answer", "expected"):
            if row.get(name) is not None:
                print(f"    {name:9} {_line(row[name])}")
    print(_result(rows), f"all answers are in {path}", sep="\n")


def _answer(name: str, model, tokenizer, samples, rows: list[dict], decoding, options) -> None:
    """Put a model's answers into the rows, under this name."""
    from .generation import answers

    prompts = [sample.prompt for sample in samples]
    found = answers(model, tokenizer, prompts, decoding, options.batch_size)
    for row, sample, answer in zip(rows, samples, found, strict=True):
        row[name] = answer
        if sample.expected is not None:
            row["expected"] = sample.expected
            matches = answer.strip() == sample.expected.strip()
            row["exact_match" if name == "answer" else f"exact_match_{name}"] = matches


def _result(rows: list[dict]) -> str:
    """How many answers are exactly right."""
    judged = [row for row in rows if "expected" in row]
    if not judged:
        return f"{len(rows)} answers, and no expected ones to compare them with"
    right = sum(row["exact_match"] for row in judged)
    text = f"exact match: {100 * right / len(judged):.1f} % ({right} of {len(judged)} held-out "
    text += "prompts)"
    if "before" in judged[0]:
        before = sum(row["exact_match_before"] for row in judged)
        text += f", before training: {100 * before / len(judged):.1f} %"
    return text


def _line(text: str) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def _question_finder(tokenizer):
    """A function (prompt as the chat template writes it) -> its last question; the prompt, where
    the question cannot be told from the rest."""
    from .generation import prompt_ids

    asked = [{"role": "user", "content": _QUESTION}]
    before, _, after = tokenizer.decode(prompt_ids(tokenizer, asked)).partition(_QUESTION)
    # a system message may stand before the user's header, whose last special token begins `before`
    starts = [before.rfind(str(token)) for token in tokenizer.added_tokens_decoder.values()]
    before = before[max([0, *starts]) :]
    if not before:
        return str
    return lambda prompt: prompt.removesuffix(after).rpartition(before)[2]


# -- which prompts ---------------------------------------------------------------------------------


def _samples(arguments, file: str | None, model, tokenizer) -> list[_Sample]:
    if file is not None:
        return _of_file(file, tokenizer, arguments.data)
    if OBJECTIVES[arguments.finetuning.stage].joins_documents:
        stage = arguments.finetuning.stage
        refuse("stage", stage, "its documents have no answers", "--file prompts.jsonl")
    return _of_evaluation_set(arguments, model, tokenizer)


def _of_evaluation_set(arguments, model, tokenizer) -> list[_Sample]:
    """The samples as training reads them: the last answer that carries loss is the expected one."""
    from .data import load_datasets
    from .generation import last_turn, stop_ids, until_stop

    data, stage = copy.copy(arguments.data), arguments.finetuning.stage
    load = functools.partial(
        load_datasets, stage=stage, tokenizer=tokenizer, seed=arguments.training.order_seed
    )
    vars(data).update(packing=False, neat_packing=False)
    if data.eval_dataset:  # nothing of the training data is asked for
        vars(data).update(dataset=[], mix_weights=None, eval_on_each_dataset=False)
    as_trained = copy.copy(data)
    data.train_on_prompt = False
    if as_trained.train_on_prompt and data.val_size and not data.streaming:
        dataset = _held_out(load, as_trained, data)
    else:
        dataset = load(data).eval
    if dataset is None:
        remedy = "eval_dataset or val_size, or --file prompts.jsonl"
        refuse("eval_dataset", None, "there is nothing to evaluate on", remedy)
    stop, samples = stop_ids(model, tokenizer), []
    for number in range(len(dataset)):
        prompt, answer = last_turn(dataset[number][0])  # of a pair the chosen one
        expected = tokenizer.decode(until_stop(answer, stop), skip_special_tokens=True)
        samples.append(_Sample(prompt, expected))
    return samples


def _held_out(load, as_trained, data) -> list[list[dict]]:
    """The samples that val_size kept out of training, with the answers alone as what is trained.

    Which samples there are depends on train_on_prompt (a prompt of cutoff_len leaves no answer to
    train), and what val_size takes depends on how many there are.
    """
    vars(data).update(val_size=0, mix_weights=None, mix_strategy="concat")
    keys = [sample[0]["input_ids"].tobytes() for sample in load(as_trained).eval]
    answered: dict[bytes, list[dict]] = dict.fromkeys(keys, [])
    for sample in load(data).train:
        key = sample[0]["input_ids"].tobytes()
        if key in answered:
            answered[key] = sample
    return [answered[key] for key in keys if answered[key]]


def _of_file(file: str, tokenizer, data) -> list[_Sample]:
    from .data_files import DatasetSpec, read_records
    from .data_records import FORMATS, detect_format, is_plain
    from .generation import prompt_ids

    spec, samples = DatasetSpec(file), []
    for where, record in read_records(file):
        record = {"prompt": record} if isinstance(record, str) else record
        form = "prompt"
        if not isinstance(record, dict) or record.keys() - {"system"} != {"prompt"}:
            form = detect_format(record, spec, OBJECTIVES["sft"], where)
        reader = FORMATS[form]
        messages = [*reader.prompt(record, spec, where), *reader.answer(record, spec, where)]
        expected = None
        if messages[-1]["role"] == "assistant":
            expected = messages.pop()["content"]
        if is_plain(record, form):
            samples.append(_Sample(tokenizer.encode(record["prompt"]), expected))
            continue
        system = record.get("system") or data.default_system
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        samples.append(_Sample(prompt_ids(tokenizer, messages, data.enable_thinking), expected))
    if not samples:
        refuse("--file", file, "it holds no record", _FILES)
    return samples
