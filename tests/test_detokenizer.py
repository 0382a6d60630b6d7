"""Generated tokens have the text that they add to their prompt, at once or one by one, with any tokenizer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvpolicy
from kvpolicy.reporting import detokenizer
from kvpolicy.reporting.detokenizer import Detokenizer, special_ids, text_behind

WORDS = [
    *["the", "capital", "of", "france", "is", "paris", "river"],
    *("don", "'", "t", "n", "n't", "'s", ".", ",", "!", "?"),
]
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def fast(core: Tokenizer, **options: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **options
    )


def metaspace(**options: Any) -> Any:
    """Whole words, each with the space before it."""
    words = [*SPECIAL, "▁", *(f"▁{word}" for word in WORDS), *(word for word in WORDS)]
    core = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return fast(core, **options)


def unigram(scheme: str) -> Any:
    words = [*SPECIAL, "▁", *(f"▁{word}" for word in WORDS), *WORDS]
    core = Tokenizer(models.Unigram([(word, -1.0 - token / 99) for token, word in enumerate(words)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return fast(core)


def sentencepiece() -> Any:
    """As Llama 2: words with their space, and bytes for all other characters."""
    words = [*SPECIAL, *BYTES, *(f"▁{word}" for word in WORDS), *WORDS]
    core = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return fast(core)


def byte_level() -> Any:
    """As GPT-2, with one token per byte, and some of two bytes that are in two characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("©", "Ã"), ("Ġ", "p")]
    words = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return fast(core)


def word_piece() -> Any:
    words = [*SPECIAL, *WORDS, *(f"##{word}" for word in WORDS)]
    core = Tokenizer(models.WordPiece({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    core.decoder = decoders.WordPiece()
    return fast(core, clean_up_tokenization_spaces=True)


KINDS: dict[str, Any] = {
    "words": metaspace(),
    "cleaned words": metaspace(clean_up_tokenization_spaces=True),
    "unigram, always": unigram("always"),
    "unigram, first": unigram("first"),
    "unigram, never": unigram("never"),
    "bytes for rare characters": sentencepiece(),
    "bytes": byte_level(),
    "word pieces": word_piece(),
    "tiny": kvpolicy.tiny()[1],
}


def ids(tokenizer: Any, *words: str) -> list[int]:
    found = tokenizer.convert_tokens_to_ids(list(words))
    assert tokenizer.unk_token_id not in found
    return found


def stream(tokenizer: Any, prompt: list[int], tokens: list[int]) -> list[str]:
    answer = Detokenizer(tokenizer, prompt)
    return [*(answer.add(token) for token in tokens), answer.flush()]


@pytest.mark.parametrize("kind", ["words", "unigram, always", "unigram, first", "bytes for rare characters"])
def test_the_first_space_is_kept(kind: str) -> None:
    tokenizer = KINDS[kind]
    prompt = ids(tokenizer, "▁france", "▁is")
    new = ids(tokenizer, "▁paris", "▁river")
    assert tokenizer.decode(new) == "paris river"
    assert text_behind(tokenizer, prompt, new) == " paris river"
    assert stream(tokenizer, prompt, new) == [" paris", " river", ""]
    assert text_behind(tokenizer, [], new) == "paris river"  # the begin of a text has none
    assert text_behind(tokenizer, [tokenizer.bos_token_id], new) == "paris river"
    assert stream(tokenizer, [*prompt, tokenizer.eos_token_id, tokenizer.bos_token_id], new)[0] == " paris"
    assert text_behind(tokenizer, prompt, ids(tokenizer, "paris")) == "paris"


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_are_what_the_tokens_add_to_the_whole(kind: str) -> None:
    """For random tokens: the prompt's end, special tokens and pieces of characters included."""
    tokenizer = KINDS[kind]
    draw = random.Random(0)
    special = special_ids(tokenizer)
    plain = sorted(set(range(len(tokenizer))) - special)
    texts = ["naïve 東京 🙂 é paris", "Ünïcödé — ok", "🙂🙂 the river"]
    for case in range(60):
        prompt = [draw.choice(plain) for _ in range(draw.randint(1, 30))]
        new = [draw.choice(plain) for _ in range(draw.randint(1, 30))]
        if kind in ("bytes", "tiny"):  # random bytes are no text
            prompt = tokenizer("Tell: ", add_special_tokens=False).input_ids
            new = tokenizer(draw.choice(texts), add_special_tokens=False).input_ids
        elif kind.startswith("bytes"):
            new = [token for token in new if token >= 259]
            pieces = [f"<0x{byte:02X}>" for byte in draw.choice(texts).encode() if byte != 32]
            new = [*new[:4], *ids(tokenizer, *pieces), *new[4:]]
            prompt = [259, *ids(tokenizer, *pieces)] if case % 2 else [259]
        if any(text.endswith(detokenizer.CLEANED_STARTS) for text in [tokenizer.decode(prompt)]):
            continue  # the answer changes the end of such a prompt: see below
        before = tokenizer.decode(prompt)
        whole = tokenizer.decode([*prompt, *new])
        assert whole.startswith(before)
        with_special = [draw.choice(sorted(special)), *new[:2], draw.choice(sorted(special)), *new[2:]]
        for tokens in (new, with_special):
            assert text_behind(tokenizer, prompt, tokens) == whole[len(before) :]
            assert "".join(stream(tokenizer, prompt, tokens)) == whole[len(before) :]


@pytest.mark.parametrize(("kind", "pieces"), [("bytes", ["ð", "Ł", "Ļ", "Ĥ"]), ("bytes for rare characters", None)])
def test_a_stream_has_whole_characters(kind: str, pieces: list[str] | None) -> None:
    tokenizer = KINDS[kind]
    new = ids(tokenizer, *(pieces or [f"<0x{byte:02X}>" for byte in "🙂".encode()]))
    prompt = tokenizer.convert_tokens_to_ids(["a"]) if pieces else ids(tokenizer, "▁is")
    assert stream(tokenizer, prompt, new) == ["", "", "", "🙂", ""]
    assert stream(tokenizer, prompt, [*new, *new])[3::4] == ["🙂", "🙂"]
    cut = stream(tokenizer, prompt, new[:3])
    assert cut[:3] == ["", "", ""] and set(cut[3]) == {"\ufffd"}  # an incomplete one ends the answer
    assert stream(tokenizer, [*prompt, *new], new)[3] == "🙂"  # behind one that the context may not cut


def test_tokens_that_are_in_two_characters() -> None:
    tokenizer = KINDS["bytes"]
    new = ids(tokenizer, "Ã", "©Ã", "©Ã", "©")
    assert stream(tokenizer, [*ids(tokenizer, "a")], new) == ["", "", "", "ééé", ""]


def test_what_is_no_text_is_not_held_for_ever() -> None:
    tokenizer = KINDS["bytes"]
    answer = Detokenizer(tokenizer, ids(tokenizer, "a"))
    texts = [answer.add(token) for token in ids(tokenizer, "ÿ") * 100]
    assert [bool(text) for text in texts].count(True) == 100 // detokenizer.LONGEST_WAIT
    assert len("".join(texts) + answer.flush()) == 100
    assert answer.add(ids(tokenizer, "a")[0]) == "a"


def test_special_tokens_have_a_text_on_demand() -> None:
    tokenizer = KINDS["words"]
    prompt = ids(tokenizer, "▁is")
    new = [*ids(tokenizer, "▁paris"), tokenizer.eos_token_id]
    assert text_behind(tokenizer, prompt, new) == " paris"
    assert text_behind(tokenizer, prompt, new, skip_special_tokens=False) == " paris</s>"
    shown = Detokenizer(tokenizer, prompt, skip_special_tokens=False)
    assert [shown.add(token) for token in new] == [" paris", "</s>"]


def test_cleaned_spaces() -> None:
    """A space that may be removed waits for the next token; the prompt is not changed any more."""
    tokenizer = KINDS["cleaned words"]
    prompt = ids(tokenizer, "▁paris")
    assert stream(tokenizer, prompt, ids(tokenizer, "▁.")) == [".", ""]
    assert stream(tokenizer, prompt, ids(tokenizer, "▁don", "▁'", "▁t", "▁is")) == [" don", "", "'t", " is", ""]
    assert stream(tokenizer, prompt, ids(tokenizer, "▁don", "▁'")) == [" don", "", " '"]
    behind = ids(tokenizer, "▁don", "▁n")
    assert tokenizer.decode([*behind, *ids(tokenizer, "'", "t")]) == "donn't"
    assert "".join(stream(tokenizer, behind, ids(tokenizer, "'", "t"))) == "'t"


def test_the_work_of_a_token_does_not_grow() -> None:
    """No more tokens are decoded at once behind a long answer than behind a short one."""
    tokenizer = KINDS["words"]
    sizes: list[int] = []

    class Counting:
        all_special_ids = tokenizer.all_special_ids

        def decode(self, tokens: list[int], **options: Any) -> str:
            sizes.append(len(tokens))
            return tokenizer.decode(tokens)

    answer = Detokenizer(Counting(), ids(tokenizer, "▁the") * 1000)
    for _ in range(500):
        answer.add(ids(tokenizer, "▁river")[0])
    assert max(sizes) <= detokenizer.CONTEXT + 1 and len(sizes) < 1010
