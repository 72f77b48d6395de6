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


def encode(tokenizer, record, form: str = "openai", spec=None, **keys) -> SimpleNamespace:
    """A conversation, encoded: ids and mask of its samples end to end, lengths, tallies."""
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
        tallies={what: (count.number, count.place) for what, count in tally.counts.items()},
    )
