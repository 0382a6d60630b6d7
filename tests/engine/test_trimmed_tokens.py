"""What is known of the tokens of a trimmed prompt: counted, and selected by row."""

from __future__ import annotations

import torch

from kvpolicy.engine.trimmed_tokens import TrimmedTokens
from kvpolicy.protocols import Scores, View
from kvpolicy.selectors.expected import Expectation


def tokens() -> TrimmedTokens:
    """Two rows, of which a head of the second one has a token less."""
    positions = torch.tensor([[[0, 3, 4]], [[1, 2, -1]]], dtype=torch.int32)
    view = View(positions, torch.tensor([5, 4]), torch.tensor([3, 2]), 0)
    return TrimmedTokens(view, Scores(torch.arange(6.0).view(2, 1, 3)), 9)


def test_its_tensors_are_those_of_tokens() -> None:
    """Lengths and budgets of rows are those of the layer."""
    held = tokens()
    assert sum(t.nbytes for t in held.tensors) == 2 * 3 * (4 + 4)
    assert held.tensors[0] is held.view.positions and held.tensors[1] is held.state.score


def test_rows_are_selected() -> None:
    held = tokens().map_rows(lambda t: t[[1, 1, 0]])
    assert held.view.positions[:, 0].tolist() == [[1, 2, -1], [1, 2, -1], [0, 3, 4]]
    assert held.view.length.tolist() == [4, 4, 5] and held.view.budget.tolist() == [2, 2, 3]
    assert held.state.score[:, 0, 0].tolist() == [3, 3, 0] and held.columns == 9


def test_tensors_of_heads_and_rows_follow_the_rows() -> None:
    state = Expectation(*(torch.arange(2.0).view(2, *[1] * rank) for rank in (2, 3, 4, 0, 0)))
    held = tokens()._replace(state=state).map_rows(lambda t: t[1:])
    assert [t.flatten().tolist() for t in held.state] == [[1.0]] * 5
