"""Tokenizers made on the spot, and what they make of a conversation."""

import itertools
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# thinking is written for the last turn alone, as an empty block where there is none; tool calls as
# JSON
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor "
    "%}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% set text = m['content'] %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set answer = text.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>\n{{ "
    "text.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in text }}"
    "\n</think>\n\n{% endif %}{{ answer }}"
    "{% for c in m['tool_calls'] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "{% else %}{{ text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as gpt-oss': an answer ends with <|return|> if it is the last, else with <|end|>; a call ends with
# <|call|>, and its thinking goes once an answer follows
HARMONY = (
    "{% macro say(to, channel, text, end) %}<|start|>assistant{{ to }}<|channel|>{{ channel }}"
    "<|message|>{{ text }}{{ end }}{% endmacro %}"
    "<|start|>system<|message|>Be a model.{% if tools %} Tools: {{ tools | tojson }}{% endif %}"
    "<|end|>{% set ns = namespace(answer=-1, call='') %}{% for m in messages %}"
    "{% if m['role'] == 'assistant' and not m['tool_calls'] %}{% set ns.answer = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set calls = m['tool_calls'] %}"
    "{% if m['thinking'] and (loop.index0 > ns.answer if calls else loop.last) %}"
    "{{ say('', 'analysis', m['thinking'], '<|end|>') }}{% endif %}"
    "{% if calls %}{% set call = calls[0]['function'] %}"
    "{% set ns.call = 'functions.' + call['name'] %}"
    "{{ say(' to=' + ns.call, 'commentary', call['arguments'] | tojson, '<|call|>') }}{% else %}"
    "{{ say('', 'final', m['content'], '<|return|>' if loop.last else '<|end|>') }}{% endif %}"
    "{% elif m['role'] == 'tool' %}<|start|>{{ ns.call }} to=assistant<|message|>"
    "{{ m['content'] | tojson }}<|end|>"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_TOKENS = "<|start|> <|message|> <|channel|> <|end|> <|return|> <|call|>".split()
HARMONY_MARKS = HARMONY.replace(
    "{% set calls = m['tool_calls'] %}", "{% set calls = m['tool_calls'] %}{% generation %}"
).replace(
    "{% endif %}{% elif m['role'] == 'tool'",
    "{% endif %}{% endgeneration %}{% elif m['role'] == 'tool'",
)
SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end|>",
]


def word_tokenizer():
    """A fast tokenizer of 60 words (w0 ... w55 and four special tokens) with a ChatML template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"] + [f"w{i}" for i in range(56)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def byte_tokenizer(template: str | None = None, merges: tuple = ()) -> PreTrainedTokenizerFast:
    """A token a byte, so that a mask can be read as text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {
        piece: number
        for number, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])
    }
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def encode(record, template: str | None, form: str = "openai", spec=None, **keys):
    """(byte_tokenizer of a template, encode_with of it)."""
    tokenizer = byte_tokenizer(template)
    return tokenizer, encode_with(tokenizer, record, form, spec, **keys)


def encode_with(tokenizer, record, form: str = "openai", spec=None, **keys) -> SimpleNamespace:
    """A record encoded: ids and mask of its samples end to end, lengths, tallies."""
    from mca_lite.args import DataArguments
    from mca_lite.data_chat import chat_renderer
    from mca_lite.data_encode import Encoder
    from mca_lite.data_files import DatasetSpec
    from mca_lite.data_records import conversations
    from mca_lite.tables import OBJECTIVES

    data_args = DataArguments(dataset=["t"], **{"cutoff_len": 9999, **keys})
    renderer, _ = chat_renderer(tokenizer, data_args)
    encoder = Encoder(tokenizer, renderer, OBJECTIVES["sft"], data_args)
    where, spec, system = "t.json:1", spec or DatasetSpec("t"), data_args.default_system
    ignored = data_args.ignore_message_keys
    samples, tally = encoder.encode(
        [(where, conversations(record, spec, form, False, system, where, ignored), {})]
    )
    documents = [document for document, _ in itertools.chain(*samples)]
    tokens = np.concatenate([np.zeros(0, np.int32), *documents])
    return SimpleNamespace(
        tokens=tokens,
        ids=np.where(tokens < 0, ~tokens, tokens),
        mask=(tokens >= 0).astype(np.uint8),
        lengths=list(map(len, documents)),
        tallies={what: (tally.counts[what], place) for what, place in tally.places.items()},
    )
