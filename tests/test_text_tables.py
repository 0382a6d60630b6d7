"""Tables of layers as text: what shares a line, and what does not."""

from __future__ import annotations

import kvpolicy
from kvpolicy import Policy
from kvpolicy.cli.layer_table import layer_facts, layer_table
from kvpolicy.text.tables import MAX_LINES, text_layer_table


def lines(text: str) -> list[str]:
    """The first cell of each line of a table."""
    return [line.split("  ")[0] for line in text.splitlines()]


def test_layers_of_other_bytes_have_lines_of_their_own() -> None:
    """With equal tokens and slots: only the codes are of other sizes."""
    specs = ["snapkv+kivi:bits=2@0.5"] * 3 + ["snapkv+kivi:bits=8@0.5"] * 5
    plan = kvpolicy.plan("tiny", Policy.by_layer(specs, budget=1.0), prompt=900)
    assert len({layer.layout for layer in plan.layers}) == 1
    assert lines(str(plan))[2:5] == ["0-2", "3-7", "all"]
    assert lines(layer_table(layer_facts(plan), 0))[1:] == ["0-2", "3-7"]


def test_plans_and_the_command_group_alike() -> None:
    plan = kvpolicy.plan("tiny", "snapkv@0.2", batch=8, prompt=900)
    assert len({sum(layer.nbytes.values()) for layer in plan.layers}) == 2  # the first one counts the tokens of all
    assert lines(str(plan))[2:] == ["0-7", "all"] and lines(layer_table(layer_facts(plan), 0))[1:] == ["0-7"]


def test_a_long_table_is_folded() -> None:
    rows = [(index, (str(index),)) for index in range(MAX_LINES + 4)]
    shown = lines(text_layer_table(("layers", "tokens"), rows, ("all", "190")))
    assert len(shown) == 1 + MAX_LINES + 1 + 1 and shown[9] == "4 more" and shown[-1] == "all"
    assert "more" not in text_layer_table(("layers", "tokens"), rows[:MAX_LINES])
