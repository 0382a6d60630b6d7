"""Reports: tokens of a text and the share that keeps each, how they are laid out, and what layers hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.reporting.token_spans import (
    DARK,
    LIGHT,
    SHADES,
    Span,
    cells,
    ink,
    level,
    pieces,
    runs_on,
    spans,
    visible,
    wrapped,
)
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch
from tests.counting_model import counting_model

TEXTS = ("tiger=4821\nlion=1234\n?lion=", "def f(x):\n    return x + 1\n\n\nprint(f(2), f(3))\n?tiger=")


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return kvpolicy.tiny()


def counted(cache: Any, layer: int, row: int, position: int) -> float:
    """The share of a layer's heads that hold a position, slot by slot."""
    heads = cache.policy_layers[layer].positions[row].tolist()
    return sum(position in slots for slots in heads) / len(heads)


@pytest.mark.parametrize("policy", ["full", "h2o@0.4", "squeeze+snapkv@0.5", "tova+kivi:bits=4@0.6"])
def test_shares_are_those_of_the_slots_in_padded_rows(policy: str, tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    batch = tokenizer(list(TEXTS), return_tensors="pt", padding=True)
    assert not batch.attention_mask.all()
    with torch.no_grad(), kvpolicy.attach(model, policy) as handle:
        made = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    cache = handle.cache
    assert cache is not None and cache.policy_layers[0].positions.shape[1] == 4
    for row, text in enumerate(TEXTS):
        padding = int((batch.attention_mask[row] == 0).sum())
        tokens = pieces(tokenizer, made[row, padding:].tolist())
        found = spans(handle, tokens, row=row)
        assert "".join(span.text for span in found).startswith(f"<s>{text}")
        assert [span.position for span in found] == list(range(len(tokens)))
        assert [span.seen for span in found] == [True] * (len(tokens) - 1) + [False]  # the last was never given back
        for span in found:
            shares = [counted(cache, layer, row, span.position) for layer in range(8)]
            assert span.layers == pytest.approx(shares)
            assert span.kept == pytest.approx(sum(shares) / 8)
        assert policy == "full" or min(sum(span.layers) for span in found[-5:-1]) > 0
        assert policy == "full" or any(span.kept < 1 for span in found[:-1])


def test_what_cannot_be_shown(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    with torch.no_grad(), kvpolicy.attach(model, "full") as handle:
        for nothing in (handle, kvpolicy.PolicyCache(model)):
            with pytest.raises(ValueError, match="must have seen a prompt"):
                spans(nothing, [])
        model(tokenizer("a=1", return_tensors="pt").input_ids)
    with pytest.raises(ValueError, match="row must be between 0 and 0, got 1"):
        spans(handle, ["<s>", "a", "=", "1"], row=1)
    for wrong in (1.0, "0"):
        with pytest.raises(TypeError, match=f"row must be an integer, got {wrong!r}"):
            spans(handle, ["<s>", "a", "=", "1"], row=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"all 4 tokens that row 0 .*, got 3"):
        spans(handle, ["<s>", "a", "="])


def test_pieces_make_the_text_again(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    text = "tiger = 4821\n\tlion  é 中文 🙂 x"
    found = pieces(tokenizer, tokenizer(text).input_ids)
    whole = "".join(piece for piece in found if not (piece.startswith("<") and piece.endswith(">")))
    assert whole == text
    assert [piece for piece in found if piece.startswith("<")][1:5] == ["<C3>", "<E4>", "<B8>", "<E6>"]


def test_bytes_that_make_no_character(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    lead = tokenizer("é").input_ids[1]
    assert pieces(tokenizer, [lead, lead, *tokenizer("abc").input_ids[1:]])[:2] == ["<C3>", "<C3>"]
    assert pieces(tokenizer, [lead]) == ["<C3>"]


def test_pieces_keep_the_spaces_of_sentencepiece() -> None:
    _, tokenizer = counting_model()
    words = ["▁paris", *(f"<0x{byte:02X}>" for byte in "🙂".encode()), "▁on"]
    assert pieces(tokenizer, tokenizer.convert_tokens_to_ids(words)) == ["paris", "<F0>", "<9F>", "<99>", "🙂", " on"]


def row_of(*texts: str) -> list[Span]:
    return [Span(text, at, 0.0, (0.0,)) for at, text in enumerate(texts)]


def lines(width: int, *texts: str) -> list[str]:
    return ["".join(text for text, _ in line) for line in wrapped(row_of(*texts), width)]


def test_lines_break_between_words() -> None:
    assert lines(10, "one", " two", " thr", "ee", " go") == ["one two", " three go"]
    assert lines(8, "one", " tw", "o", " three") == ["one two", " three"]
    assert lines(4, "abcdefghij") == ["abcd", "efgh", "ij"]
    assert lines(4, "中文字") == ["中文", "字"]
    assert lines(50, f"{'a line' * 8}\n", "  b\n", "\n", "c") == ["a line" * 8 + "↵", "  b↵", "↵", "c"]
    assert wrapped([], 10) == []


def test_a_list_of_short_lines_runs_on() -> None:
    assert runs_on(row_of("a=1\n", "b=2\n", "c=3")) and not runs_on(row_of("a line that is long\n", "b"))
    assert lines(9, "a=1\n", "b", "=", "2\n", "c=3") == ["a=1↵b=2↵", "c=3"]


@pytest.mark.parametrize("width", [7, 20, 61])
def test_no_letter_is_lost_and_no_line_too_long(width: int) -> None:
    text = "def f(x):\n\treturn [中, 文]  # and so on, for long enough to be wrapped at every width\n" * 2
    cut = [text[at : at + 3] for at in range(0, len(text), 3)]
    found = lines(width, *cut)
    assert "".join(found) == visible(text).replace("\n", "")
    assert max(map(cells, found)) <= width


def test_signs() -> None:
    assert visible("\u202eab\u2069") == "·ab·"  # and nothing turns a line around
    assert visible("a\n\t\x00\x1b\x7f\x85\u2028") == "a↵\n⇥   ␀␛␡\ufffd\ufffd"
    assert (cells("e\u0301"), cells("中x")) == (1, 3)


def test_text_can_be_read_on_every_shade() -> None:
    def light(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for shade in [*SHADES, *LIGHT, *DARK]:
        dark, bright = sorted((light(shade), light(ink(shade))))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, shade  # WCAG's AA


def test_levels_rise() -> None:
    assert [level(share) for share in (0, 1e-6, 0.2, 0.4, 0.6, 0.8, 0.999, 1)] == [0, 1, 2, 3, 4, 5, 5, 6]


def test_a_report_has_the_tokens_of_the_fullest_head() -> None:
    model = build("llama")
    ids, mask = make_batch([26, 13], [26])
    with kvpolicy.attach(model, "uniform/adakv:safeguard=0.0+h2o@0.5"):
        cache = PolicyCache(model)
        forward(model, ids, mask, 0, 26, cache)
    first = 0
    for layer, report in zip(cache.policy_layers, cache.report().layers, strict=True):
        held = [[sum(at >= 0 for at in head) for head in row] for row in layer.head_positions.tolist()]
        assert report.heads == tuple(map(tuple, held))
        assert report.kept == tuple(map(max, held))
        first += sum(max(row) > row[0] for row in held)
    assert first, "in some row the first head is not the fullest"


@pytest.mark.parametrize("layers", [1, 3, 7, 10, 80])
def test_the_shade_of_a_mean_of_equal_layers_is_theirs(layers: int) -> None:
    """Also where the mean is less by its last bit."""
    means = [sum([fifths / 5] * layers) / layers for fifths in range(6)]
    assert [*map(level, means)] == [0, 2, 3, 4, 5, 6]
