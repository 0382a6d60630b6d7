"""Tables of the documentation, each by its command: what is measured, and that a page gets it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.planning.curves import save_layers
from kvpolicy.tuning.evidence import Score
from kvpolicy.tuning.tune import tune
from kvpolicy_eval.common import heldout
from kvpolicy_eval.common.accuracy import TaskEvaluator
from kvpolicy_eval.data.tasks import tasks
from kvpolicy_eval.report.parts import _without_a_part  # pyright: ignore[reportPrivateUsage]
from kvpolicy_eval.sweep.estimate import CARDS
from kvpolicy_eval.tables import acceptance, answers, files, memory, moved, papers, requantize, tuned
from kvpolicy_eval.tables.__main__ import main
from kvpolicy_lm_eval.data.modes import MODES, place
from tests.eval.pages import cells, page_with
from tests.files.kvtc import calibrated, spec
from tests.sampling import each_once, product

SLOTS = Path(__file__).parents[3] / "docs" / "design" / "slots.md"
READERS = ["exact", "quest:dense=0", "loki", "sparq", "centroids:page=16"]


def test_a_full_budget_is_always_accepted() -> None:
    model, tokenizer = kvpolicy.tiny()
    rows = acceptance.prompts(tokenizer, 1)[:, :40]
    assert acceptance.acceptance(model, "window@1.0", rows, 3)[0] == 1.0
    with pytest.raises(ValueError, match="--n must be at most"):
        acceptance.prompts(tokenizer, 10**6)


def test_the_page_of_accepted_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_with(tmp_path / "page.md", "acceptance")
    monkeypatch.setattr(acceptance, "acceptance", lambda model, policy, rows, gamma: (0.5, 2.25))
    main(["acceptance", "--n", "1", "--only", "h2o", "--budgets", "0.5", "--fill", str(page)])
    assert "| `h2o` | 0.50 (2.2) |" in page.read_text()


def test_forms_are_compared_with_the_cache_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PROMPT", 48)
    model = calibrated(tmp_path / "calibration")
    rows = [row[None] for row in torch.randint(3, 40, (2, 56), generator=torch.Generator().manual_seed(2))]
    wanted = {
        "none": None,
        "zlib": "zlib",
        "many": spec(tmp_path / "calibration", 1),
        "few": spec(tmp_path / "calibration", 4),
    }
    for policy in ("full", "h2o@0.8"):
        found = files.measured(model, rows, policy, wanted)
        assert found["none"] == found["zlib"] and found["none"].divergence == 0 and found["none"].same == 1
        assert found["none"].nbytes > found["many"].nbytes > found["few"].nbytes
        assert 0 < found["many"].divergence < found["few"].divergence
        assert found["few"].same <= 1


def test_layers_have_components_together_only_where_they_hold_the_same_tokens() -> None:
    found = {1: Path("one"), 8: Path("all")}
    assert "kvtc of 8 layers, ratio=4" in files.forms(found, "full")
    assert [*files.forms(found, "h2o@0.5")] == ["none", "zlib", "kvtc, ratio=4", "kvtc, ratio=16"]


def test_the_page_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_with(tmp_path / "page.md", "memory")
    line = ["memory", "--models", "tiny", "--policies", "full", "--backend", "hf", "--fill", str(page)]
    monkeypatch.setattr(memory, "RANKS", [1, 2])
    main(line)
    assert [row[1:4] for row in cells(page.read_text())] == [["1", "3.19 MiB", "full"], ["2", "1.6 MiB", "full"]]


@product("reader,share", READERS, [0.6, 0.25], sample=each_once(READERS, [0.6, 0.25]))
def test_one_more_page_would_not_fit(reader: str, share: float) -> None:
    def part(tokens: int) -> float:
        full = kvpolicy.plan("tiny", "full", prompt=moved.LENGTH).moved
        return kvpolicy.plan("tiny", f"{reader}:read={tokens}", prompt=moved.LENGTH).moved / full

    tokens = moved.read_for(reader, share)
    assert tokens == 0 or part(tokens) <= share
    assert part(tokens + 1) > share


def test_every_reader_of_the_table_fits_some_share() -> None:
    for reader in moved.READERS:
        assert any(moved.read_for(reader, share) for share in moved.SHARES)


def test_the_page_of_bytes_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_with(tmp_path / "page.md", "moved")
    tasks = {"tasks": {"recall": 0.5, "needles": 1.0}}
    monkeypatch.setattr(moved.Bench, "result", lambda *_: tasks)
    monkeypatch.setattr(moved.HeldOutText, "__init__", lambda *_: None)
    monkeypatch.setattr(moved.HeldOutText, "divergence", lambda self, policy: len(policy) / 100)
    main(["moved", "--only", "exact", "--shares", "0.6", "0.4", "--fill", str(page)])
    text = page.read_text()
    divergences = "divergence, 20% read | divergence, 10% read | divergence, 5% read"
    assert f"| bytes read, of the full cache | 60% | 40% | {divergences} |" in text
    assert "| `exact` | 0.75 (44) |  | 0.1400 | 0.1400 | 0.1500 |" in text


def test_the_full_cache_does_not_diverge_and_less_read_diverges_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("PROMPT", 96), ("FOLLOWING", 6), ("ROWS", 2)):
        monkeypatch.setattr(heldout, name, number)
    text = heldout.HeldOutText(*kvpolicy.tiny())
    some, few = (text.divergence(f"exact:read={read}") for read in (0.5, 0.05))
    assert abs(text.divergence("full")) < 1e-6 < some < few


def test_the_docs_show_the_errors_of_requantization() -> None:
    rows = cells(SLOTS.read_text(encoding="utf-8"))
    two = requantize.errors(2)
    assert two["fresh"] < two["overwrite"] < two["compact once"] < two["compact 5 times"]
    for bits in requantize.BITS:
        (shown,) = [row for row in rows if row[0] == str(bits)]
        found = requantize.errors(bits)
        assert [float(cell) for cell in shown[1:]] == pytest.approx(
            [found[case] for case in requantize.CASES], rel=0.02
        )


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


def scores(correct: list[float], kl: float = 0.1) -> Score:
    values = torch.tensor(correct, dtype=torch.float64)
    return Score(torch.full_like(values, kl), torch.ones_like(values), values, 10.0)


def test_a_task_in_which_tuning_answers_less_is_named() -> None:
    names = ("recall",) * 8 + ("needles",) * 8
    cell = tuned.Cell("inside", 0.1, "h2o", scores([0.0] * 8 + [1.0] * 8), scores([1.0] * 8 + [0.0] * 8), names)
    assert [*cell.worse()] == ["recall"]
    shown = tuned.line(cell)
    assert shown[:5] == ["10%", "inside", "`h2o`", "0.50", "0.50"] and shown[-1] == "recall"
    even = tuned.Cell("after", 0.1, "h2o", scores([1.0] * 16), scores([1.0] * 16), names)
    assert tuned.line(even)[-1] == "none"
    better = tuned.Cell("after", 0.1, "h2o", scores([1.0] * 16), scores([0.0] * 16), names)
    assert "Mean difference of answers: +0.333 at 10%." in tuned.note([cell, even, better], (3, 4))


def test_windows_are_of_all_tasks_and_other_seeds_differ() -> None:
    _, tokenizer = kvpolicy.tiny()
    found, names = tuned.made(tokenizer, "second", 1, tuned.TUNED_ON)
    others, _ = tuned.made(tokenizer, "second", 1, tuned.HELD_OUT)
    assert {*names} == {*tasks(1000)} - {"passkey"} and len(found) == len(names)
    assert all(not torch.equal(a.prompt, b.prompt) for a, b in zip(found, others, strict=True))


def test_both_are_scored_on_held_out_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = kvpolicy.tiny()
    known, _ = tuned.made(tokenizer, "after", 1, tuned.TUNED_ON)
    tune(model, known[:1], tmp_path / "after-joint-1.json", candidates=["window@0.3", "window@0.6"])
    monkeypatch.setattr(tuned, "best_rival", lambda *_, **__: SimpleNamespace(spec="window"))
    (cell,) = tuned.cells(model, tokenizer, "after", [0.5], (1, 1), tmp_path, "joint")
    assert cell.rival == "window" and len(cell.tasks) == len(cell.tuned.kl) == len(tasks(1000))
    assert cell.tuned.nbytes <= 1.01 * cell.ordinary.nbytes
    assert not torch.equal(cell.tuned.kl, cell.ordinary.kl)


ROOT = Path(__file__).parents[3]
CARD = CARDS[papers.CARD]
REPRODUCED = ROOT / "docs" / "reproduce" / "index.md"


@pytest.mark.parametrize("name", sorted(papers.papers()))
def test_the_page_has_what_the_command_prints(name: str) -> None:
    page = REPRODUCED.read_text(encoding="utf-8")
    paper = papers.papers()[name]
    swept = (ROOT / papers.SWEEP_PAGE).read_text(encoding="utf-8")
    sections = [papers.values(paper, CARD)]
    sections += [papers.embedded(paper["embedded"], swept)] if "embedded" in paper else []
    for section in sections:
        place = f"<!-- table:{name}-{section.place} -->\n{section}\n<!-- /table -->"
        assert place in page, f"run python -m kvpolicy_eval.tables papers {name} --fill docs/reproduce/index.md"


def _paper(**row: Any) -> dict[str, Any]:
    base = {"what": "x", "model": "mistral-7b", "task": "xsum", "policy": "full", "value": "1"}
    return {"config": "papers-squeeze", "rows": [base | row]}


def test_a_run_takes_the_place_of_what_it_needs() -> None:
    assert "| 1 | 0.97 |" in str(papers.values(_paper(ours="0.97"), CARD))
    assert "| 1 | not run: needs " in str(papers.values(_paper(), CARD))


def test_a_row_must_be_cells_of_its_sweep() -> None:
    with pytest.raises(ValueError, match=r"papers-squeeze must have cells of h2o@0\.7 for mistral-7b"):
        papers.values(_paper(policy="h2o@0.7"), CARD)


TABLE = "<!-- table:t -->\n| policy | at 20% | without a budget | bytes held |\n|---|---|---|---|\n"
ROWS = "| `full` |  | **1.00** | 100% |\n| `h2o` | **0.5 [0.1, 0.9]** |  | 20% |\n<!-- /table -->"


def test_rows_of_the_embedded_model_are_those_of_its_page() -> None:
    chosen = {"source": "t", "column": "at 20%", "policies": ["h2o", "full"]}
    (grid,) = papers.embedded(chosen, TABLE + ROWS).grids
    assert list(grid.rows) == [["`h2o`", "0.5 [0.1, 0.9]"], ["`full`", "1.00"]]
    for changes, message in (
        ({"source": "u"}, "must have the table u"),
        ({"column": "at 30%"}, "with the column 'at 30%'"),
        ({"policies": ["tova"]}, "must have tova"),
    ):
        with pytest.raises(ValueError, match=message):
            papers.embedded(chosen | changes, TABLE + ROWS)
