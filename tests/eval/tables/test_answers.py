"""The table of answers by the place of the question: what is measured, and what the evaluator feeds when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.planning.curves import save_layers
from kvpolicy_eval.common.accuracy import TaskEvaluator
from kvpolicy_eval.report.parts import _without_a_part  # pyright: ignore[reportPrivateUsage]
from kvpolicy_eval.tables import answers
from kvpolicy_eval.tables.__main__ import main
from kvpolicy_lm_eval.data.modes import MODES, place
from tests.eval.pages import page_with


def test_every_policy_of_the_table_can_be_made() -> None:
    for policy in answers.selections():
        assert kvpolicy.plan("tiny", f"{policy}@400000B", prompt=answers.LENGTH).nbytes <= 400_000
    for policy in answers.readings():
        assert not isinstance(kvpolicy.Policy.parse(policy).reader, kvpolicy.ReadAll)


@pytest.mark.parametrize(
    ("mode", "policy", "widths"),
    [
        ("inside", "snapkv", []),
        ("after", "snapkv", [3, 1, 1, 1]),
        ("after", "full+quest:read=0.1", [2, 1, 1, 1, 1]),
        ("second", "snapkv", [8, 1, 1, 1]),
    ],
)
def test_what_follows_is_fed_to_the_compressed_cache(
    mode: str, policy: str, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = TaskEvaluator(1, 256)
    fed: list[Any] = []

    class Recorded(kvpolicy.PolicyCache):
        """Records how many tokens each forward pass has."""

        def begin(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            fed.append(tokens.shape[1])
            super().begin(tokens, *args, **kwargs)

    monkeypatch.setattr(kvpolicy, "PolicyCache", Recorded)
    right, _ = evaluator.accuracy(policy, None, mode, ["recall"])
    compressed = place(evaluator.prompts["recall"][0], mode).compressed
    assert fed == [len(evaluator.tokenizer(compressed).input_ids), *(widths or [1, 1, 1])]
    assert list(right) == ["recall"]


def test_a_page_gets_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place_of_table = page_with(tmp_path / "page.md", "answers")
    lines: list[str] = []
    policies = ["full", "snapkv byte_share=0.2", "full+quest:read=0.1"]
    for number, (policy, mode) in enumerate((policy, mode) for policy in policies for mode in MODES):
        spec, _, share = policy.partition(" ")
        options = [share, "" if mode == "inside" else f"mode={mode}", "only=('recall', 'few_shot')"]
        key = f"{spec} n=1 torch.float32 text=False kvpolicy={kvpolicy.__version__} {' '.join(filter(None, options))}"
        lines.append(json.dumps({"key": key, "tasks": {"recall": number / 10, "few_shot": 0.0}, "share": 0.2}))
    (tmp_path / "methods.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("kvpolicy_eval.common.measure.TaskEvaluator", None)
    sizes = ["--n", "1", "--shares", "0.2", "--tasks", "recall", "few_shot"]
    files = ["--cache", str(tmp_path), "--fill", str(place_of_table)]
    main(["answers", *sizes, *files, "--only", "snapkv", "full+quest:read=0.1"])
    filled = place_of_table.read_text().splitlines()
    head = "recall, inside | recall, after | recall, second | all, inside | all, after | all, second | cache | read |"
    assert filled[1] == f"| 20% of the bytes | {head}" and filled[6] == f"| every token kept | {head}"
    assert filled[4].startswith("| `snapkv` | 0.30 | 0.40 | 0.50 | 0.15 | 0.20 | 0.25 | 0.20 | 0.")
    assert filled[9].startswith("| `full+quest:read=0.1` | 0.60 | 0.70 | 0.80 | 0.30 | 0.35 | 0.40 | 0.20 | 0.")
    assert "1 prompts of about 512 tokens a task" in filled[11]
    main(["answers", *sizes, *files, "--only", "snapkv", "full+quest:read=0.1", "--means"])
    assert place_of_table.read_text().splitlines()[1] == f"| 20% of the bytes | {head.partition('second | ')[2]}"


def test_policies_by_layer(tmp_path: Path) -> None:
    """From a file, at equal bytes, with and without a reader in a layer."""
    specs = ["h2o@0.5", "snapkv@0.5"] * 4
    spec = f"tuned:file={tmp_path}/plan.json"
    evaluator = TaskEvaluator(1, 256)
    for reading in (False, True):
        save_layers(tmp_path / "plan.json", [*specs[:-1], "h2o+exact:read=0.2@0.5"] if reading else specs)
        right, share = evaluator.accuracy(spec, 0.5, "inside", ["recall"])
        assert right and share <= 0.5
    assert not answers._reads_part(spec) and answers._reads_part("h2o+exact")  # pyright: ignore[reportPrivateUsage]
    assert [*_without_a_part(spec)] == []
