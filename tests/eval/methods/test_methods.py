"""The numbers on the pages of methods: what is measured, and how a page is filled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy import registry
from kvpolicy_eval.common import measure
from kvpolicy_eval.common.measure import Bench
from kvpolicy_eval.methods.__main__ import main
from kvpolicy_eval.methods.plan import (
    BUDGETS,
    at_read,
    codec_policies,
    codec_rows,
    methods,
    reader_policies,
    selection_policies,
)
from kvpolicy_eval.methods.tables import at

TASKS = ["recall", "multi_query", "passkey", "needles", "few_shot", "hot_keys"]
PLACE = "# A page\n\n<!-- table:measured -->\nold\n<!-- /table -->\n\nMore.\n"


def refused(*_: Any) -> None:
    """Stands for the model where nothing may be measured."""
    raise AssertionError("measured again")


def test_what_is_measured_of_a_method_is_of_this_method() -> None:
    for name in methods():
        own, kind = registry.lookup(name)
        if own == "codec":
            policies = codec_policies(name)
        elif own == "reader":
            policies = [at_read(policy, 0.1) for policy in reader_policies(name)]
        else:
            policies = [at(policy, 0.2) for policy in selection_policies(name)]
        assert len(set(policies)) == len(policies), name
        assert len(policies) > 1 or name == "all"
        parsed = [kvpolicy.Policy.parse(policy) for policy in policies]
        parts = [part for one in parsed for part in (one.heads, *(getattr(one, part) for part in registry.kinds()))]
        assert any(isinstance(part, kind) for part in parts), name


def test_a_page_gets_its_table_and_nothing_is_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "streaming.md"
    page.write_text(PLACE)
    arguments = ["streaming", "--n", "1", "--cache", str(tmp_path / "cache"), "--fill", str(tmp_path)]
    main(arguments)
    filled = page.read_text()
    assert filled.startswith("# A page\n\n<!-- table:measured -->\n| policy | answers at 30% |")
    assert filled.endswith("<!-- /table -->\n\nMore.\n")
    assert "| `window` |" in filled and "old" not in filled and "1 prompts" in filled and "by task" not in filled
    right = Bench(1, torch.float32, tmp_path / "cache").result("window@0.1")
    assert list(right["tasks"]) == TASKS and 0.09 < right["share"] < 0.11
    monkeypatch.setattr(measure, "TaskEvaluator", refused)
    main(arguments)
    assert page.read_text() == filled
    capsys.readouterr()
    main([*arguments[:-2], "--by-task"])
    assert f"| by task, at 20% | {' | '.join(TASKS)} |" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="measured again"):
        main(["window", *arguments[1:3]])


def test_a_codec_stands_beside_exact_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    for number, policy in enumerate(codec_policies("bfp")):
        key = f"{policy} n=1 torch.bfloat16 text=True kvpolicy={kvpolicy.__version__}"
        tasks = {task: float(place < 6 - number) for place, task in enumerate(TASKS)}
        error = 0.25 if "bfp" in policy else None
        result = {"tasks": tasks, "share": 1 / (1 + number), "keys": error, "values": error, "perplexity": 5 + number}
        lines.append(json.dumps({"key": key, **result}))
    (tmp_path / "methods.jsonl").write_text("\n".join(lines))
    main(["bfp", "--n-codecs", "1", "--cache", str(tmp_path)])
    out = capsys.readouterr().out.splitlines()
    assert out[4:6] == [
        "| `plain` |  |  | 1.00 | 1.00 | 5.00 | 0.83 | 0.50 | 6.00 |",
        "| `bfp` | 0.250 | 0.250 | 0.67 | 0.33 | 7.00 | 0.50 | 0.25 | 8.00 |",
    ]
    assert out[7].endswith(
        "At 20%: with `snapkv`. Prompts are short, so every codec has `residual_length=8:block_size=8`."
    )


def test_a_codec_that_the_selector_does_not_combine_with_has_no_cells_under_eviction() -> None:
    by_codec = {row.codec: row for row in codec_rows("lowrank", ["lowrank:head_group=4"])}
    assert by_codec["lowrank:rank=8"].evicting == "snapkv+lowrank:rank=8:residual_length=8:block_size=8@0.2"
    assert by_codec["lowrank:head_group=4"].evicting is None
    assert by_codec["lowrank:head_group=4"].policy == "lowrank:head_group=4:residual_length=8:block_size=8"


@pytest.mark.parametrize(
    ("arguments", "message"), [(["h3o"], "no method 'h3o'"), (["full", "--fill", "{}"], "has no place")]
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full.md").write_text("# full\n")
    keys = [f"{at(policy, budget)} n=1 torch.float32" for policy in selection_policies("full") for budget in BUDGETS]
    result = {"tasks": dict.fromkeys(TASKS, 1.0), "share": 1.0}
    lines = [json.dumps({"key": f"{key} text=False kvpolicy={kvpolicy.__version__}", **result}) for key in keys]
    (tmp_path / "methods.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit) as stopped:
        main([argument.format(tmp_path) for argument in arguments] + ["--n", "1", "--cache", str(tmp_path)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
