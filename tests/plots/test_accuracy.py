"""Accuracy against bytes: points, intervals and the front are those of the table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from kvpolicy.reporting import plots
from kvpolicy.reporting.plots.accuracy import looks, pareto, read_points

ROWS: list[dict[str, Any]] = [
    {"policy": "full", "accuracy": 1.0, "share": 1.0},
    {"policy": "h2o@0.2", "accuracy": 0.5, "share": 0.2, "low": 0.4, "high": 0.7},
    {"policy": "squeeze+h2o@0.2", "accuracy": 0.8, "share": 0.21, "low": 0.7, "high": 0.9},
    {"policy": "h2o@0.4", "accuracy": 0.7, "share": 0.4},
]


def lines(figure: Figure) -> dict[str, Any]:
    return {str(line.get_label()): line for line in figure.axes[0].lines}


def test_points_intervals_and_front() -> None:
    figure = plots.accuracy_against_bytes(ROWS)
    found = lines(figure)
    for row in ROWS:
        mark = found[row["policy"]]
        assert mark.get_xdata()[0] == pytest.approx(100 * row["share"])
        assert mark.get_ydata()[0] == row["accuracy"]
    vertical = [list(line.get_ydata()) for line in figure.axes[0].lines if len(line.get_xdata()) == 2]  # pyright: ignore[reportArgumentType]
    assert [[pytest.approx(0.4), pytest.approx(0.7)], [pytest.approx(0.7), pytest.approx(0.9)]] == vertical
    front = figure.axes[0].lines[-1]
    assert list(front.get_ydata()) == [0.5, 0.8, 1.0]  # pyright: ignore[reportArgumentType]
    assert found["h2o@0.2"].get_color() == found["squeeze+h2o@0.2"].get_color()
    assert found["squeeze+h2o@0.2"].get_markerfacecolor() == "none", "hollow: layers differ"
    names = [text.get_text() for text in figure.legends[0].texts]
    assert names == ["h2o", "squeeze+h2o", "full", "Pareto front"]
    assert figure.axes[0].get_xlabel() == "bytes held, % of the full cache"


def test_tasks_are_averaged_and_their_widths_add_as_squares() -> None:
    ends = [(0.5, 0.2, 0.9), (0.7, 0.3, 0.8)]
    rows = [
        {"policy": "h2o@0.2", "task": task, "accuracy": value, "low": low, "high": high, "share": share}
        for task, share, (value, low, high) in zip("ab", (0.1, 0.3), ends, strict=True)
    ]
    (point,) = read_points(rows)
    assert (point.method, point.accuracy, point.share) == ("h2o", pytest.approx(0.6), pytest.approx(0.2))
    assert (point.low, point.high) == (pytest.approx(0.6 - 0.25), pytest.approx(0.6 + (0.16 + 0.01) ** 0.5 / 2))
    (of_one_task,) = read_points([row | {"task": "a"} for row in rows])
    assert of_one_task[2:] == pytest.approx((0.2, 0.6, 0.25, 0.85)), "rows of one task count as their mean"


def test_a_sweeps_table_is_read(tmp_path: Path) -> None:
    head = {"model": "tiny", "filter": "none", "status": "done", "higher_is_better": True, "low": "", "high": ""}
    rows = [
        head | {"method": "h2o", "budget": "0.2", "task": "a", "metric": "acc", "value": 0.5, "kv_share": 0.2},
        head | {"method": "h2o", "budget": "0.2", "task": "a", "metric": "ppl", "value": 9.0, "kv_share": 0.2},
        head | {"method": "full", "budget": "", "task": "a", "metric": "acc", "value": 0.9, "kv_share": 1.0},
        head | {"method": "tova", "budget": "0.2", "task": "a", "status": "failed"},
    ]
    rows[1]["higher_is_better"] = False
    with (tmp_path / "table.csv").open("w", newline="") as out:
        table = csv.DictWriter(out, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (tmp_path, tmp_path / "table.csv", str(tmp_path / "table.jsonl"), rows):
        assert [(one.policy, one.accuracy, one.share) for one in read_points(source)] == [
            ("h2o@0.2", 0.5, 0.2),
            ("full", 0.9, 1.0),
        ]


def test_a_policy_that_lacks_a_task_is_left_out() -> None:
    rows = [{**row, "task": task} for row in ROWS for task in "ab" if (row["policy"], task) != ("h2o@0.4", "b")]
    assert "h2o@0.4" not in [one.policy for one in read_points(rows)] and len(read_points(rows)) == 3


def test_the_front_is_what_nothing_beats() -> None:
    found = [(0.3, 0.5, "a"), (0.1, 0.2, "b"), (0.3, 0.6, "c"), (0.2, 0.1, "d"), (1.0, 0.6, "e"), (0.1, 0.2, "f")]
    pairs = [one[:2] for one in found]
    wanted = [one for one in found if not any(b != one[:2] and b[0] <= one[0] and b[1] >= one[1] for b in pairs)]
    assert pareto(found, lambda one: one[0], lambda one: one[1]) == sorted(wanted)
    assert [name for *_, name in sorted(wanted)] == ["b", "f", "c"], "equals are on the front together"


def test_a_length_that_was_not_measured_is_never_chosen() -> None:
    """RULER's mark, -1, has an interval in old tables, and the length that was measured has none."""
    head = {"policy": "h2o@0.2", "task": "niah", "share": 0.2}
    rows = [
        head | {"metric": "16384", "value": -1.0, "low": -1.0, "high": -1.0},
        head | {"metric": "4096", "value": 0.5},
    ]
    assert [point.accuracy for point in read_points(rows)] == [0.5]
    with pytest.raises(ValueError, match="a measured metric"):
        read_points(rows[:1])


def test_a_name_that_is_no_policy_and_policies_by_layer_have_a_look_of_their_own() -> None:
    """Parts of policies by layer are not known without a model."""
    found = looks(["snapkv", "tuned:file=a.json", "h2o", "tuned:file=b.json", "expected attention"])
    assert len({(look.color, look.marker) for look in found.values()}) == 5


ONE = {"policy": "full", "accuracy": 1, "share": 1}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "at least one row"),
        ([3], "must be a mapping"),
        ([{"accuracy": 1, "share": 1}], "must have policy in every row"),
        ([{"policy": "full", "share": 1}], "must have accuracy or value"),
        ([{"policy": "full", "accuracy": 1}], "must have share or kv_share"),
        ([ONE | {"accuracy": "high"}], "must have numbers under accuracy, got 'high'"),
        ([ONE | {"higher_is_better": False}], "a measured metric of which more is better"),
        ([ONE | {"model": "a"}, ONE | {"model": "b"}], "must be given for results of several models; try one of"),
        ([row | {"task": row["policy"]} for row in ROWS[:2]], r"a row for each of the tasks full, h2o@0\.2"),
        ("nothing/here.csv", "must be a CSV or JSON lines file"),
    ],
)
def test_what_is_missing_is_said(rows: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plots.accuracy_against_bytes(rows)


def test_a_model_that_is_not_there_is_said() -> None:
    with pytest.raises(ValueError, match="model must be one of a, got 'c'"):
        plots.accuracy_against_bytes([row | {"model": "a"} for row in ROWS], model="c")


def test_files_of_other_encodings_and_broken_ones(tmp_path: Path) -> None:
    """Excel puts a mark before UTF-8; what is no UTF-8 is said."""
    text = "policy,accuracy,share\nä,0.5,0.2\n"
    (tmp_path / "a.csv").write_text(text, encoding="utf-8-sig")
    assert [point.policy for point in read_points(tmp_path / "a.csv")] == ["ä"]
    (tmp_path / "b.csv").write_text(text, encoding="latin-1")
    (tmp_path / "c.jsonl").write_text("{not json}\n")
    for name in ("b.csv", "c.jsonl"):
        with pytest.raises(ValueError, match=rf"must be CSV .*, got .*{name}"):
            read_points(tmp_path / name)
