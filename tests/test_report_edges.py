"""Reports where heads differ, and texts whose shares and lines are just at a limit."""

from __future__ import annotations

import pytest

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.reporting.token_spans import Span, level, pieces, wrapped
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch


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


def test_a_word_may_fill_its_line() -> None:
    spans = [Span(word, at, 1.0, (1.0,)) for at, word in enumerate(["four", " five", " si", "x", " ten"])]
    lines = ["".join(text for text, _ in line) for line in wrapped(spans, 9)]
    assert lines == ["four five", " six ten"]


def test_bytes_of_a_character_are_shown_before_it() -> None:
    _, tokenizer = kvpolicy.tiny()
    ids = tokenizer("=😀a", add_special_tokens=False).input_ids
    assert pieces(tokenizer, ids) == ["=", "<F0>", "<9F>", "<98>", "😀", "a"]
