"""The embedded model's tokenizer: byte-level BPE with a single token per prompt word, digit and newline."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvpolicy_lm_eval.data.words import WORDS

SIZE = 768
PASSKEY = "passkey"
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
_SPLIT = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z0-9]|\n|[ \t]+(?!\S)|[ \t]+|\s"


def _splitter() -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


def _learn_merges(texts: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = _splitter()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(WORDS) - 1,
        special_tokens=_SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    base.train_from_iterator(texts, trainer)
    model = json.loads(base.to_str())["model"]
    merges = [(pair[0], pair[1]) for pair in (m.split(" ") if isinstance(m, str) else m for m in model["merges"])]
    return dict(model["vocab"]), merges


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token of the vocabulary."""
    result = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(result, int)
    return result


def build_tokenizer(texts: Iterable[str], max_length: int = 2048) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from `texts`; it prepends `<s>` and pads on the left.

    The prompt words and `passkey` are added to the vocabulary after the merges
    are learned; `ignore_merges` gives them precedence over merges.

    Args:
        texts: Training sources.
        max_length: The tokenizer's `model_max_length`.
    """
    vocab, merges = _learn_merges(texts)
    for word in (*WORDS, PASSKEY):
        vocab.setdefault(word, len(vocab))
    while len(vocab) < SIZE:
        vocab[f"<extra{len(vocab)}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
