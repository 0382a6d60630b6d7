"""Scores by the input of the layer: those of tiles and chunks, of padding, and of long inputs in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kvpolicy import KVzap
from kvpolicy.selectors.gate_files import GATE_FILES, LayerGate
from kvpolicy.statistics import Forward, input_scores
from kvpolicy.statistics.input_scores import InputScores
from kvpolicy.statistics.statistic import Coming, Tile
from tests.conformance.calibration import gates


def test_scores_of_tiles_and_chunks_are_joined() -> None:
    """Padding has a score of 0, whatever its input; a prompt without a tile stays without scores."""
    scores = torch.randn(2, 3, 10)
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[1, :4] = False
    coming = Coming(valid, 10, torch.zeros(2, dtype=torch.int64), None)
    broken = scores.masked_fill(~valid[:, None], torch.nan)
    want = scores.masked_fill(~valid[:, None], 0)

    def tile(start: int, stop: int) -> Tile:
        empty = torch.empty(2, 3, stop - start, 8)
        return Tile(empty, empty, start, valid[:, start:stop], stop - start == 10, broken[..., start:stop])

    whole = InputScores(KVzap()).begun(coming).added(tile(0, 10))
    cut = InputScores(KVzap()).begun(coming).added(tile(0, 6)).added(tile(6, 10))
    assert whole.scores is not None and cut.scores is not None
    assert torch.equal(whole.scores, want) and torch.equal(cut.scores, want)
    both = whole.joined(cut, 10)
    assert both.scores is not None and both.columns == 20 and torch.equal(both.scores, torch.cat([want, want], 2))
    one = both.map_rows(lambda t: t[1:])
    assert one.scores is not None and torch.equal(one.scores, both.scores[1:])
    assert InputScores(KVzap()).joined(whole, 0) is whole and whole.joined(InputScores(KVzap()), 10) is whole


def test_long_inputs_are_scored_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gate.safetensors"
    GATE_FILES.save(path, gates(heads=2))
    selector = KVzap(file=str(path))
    gate = selector.load_gate(1, "cpu")
    call = Forward(nn.Identity(), torch.randn(2, 50, 32), {})
    whole = input_scores.score_inputs(selector, gate, call)
    monkeypatch.setattr(input_scores, "TILE_ELEMENTS", 1)
    sizes: list[int] = []
    score = LayerGate.score
    monkeypatch.setattr(LayerGate, "score", lambda self, x: sizes.append(x.shape[1]) or score(self, x))
    torch.testing.assert_close(input_scores.score_inputs(selector, gate, call), whole)
    assert sizes == [16, 16, 16, 2]


def test_a_layer_without_its_input_is_refused() -> None:
    with pytest.raises(ValueError, match="must be run with the input of its attention for the selector kvzap"):
        input_scores.score_inputs(KVzap(), (), None)
