"""The command: what it runs again, how it fails, what it writes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvpolicy_eval.families import __main__ as command
from kvpolicy_eval.families.check import ERROR, PLANNED, REFUSED, RIGHT, STOCK, WRONG
from kvpolicy_eval.families.entries import CAUSAL, IMAGE, Entry, counted, newer
from kvpolicy_eval.families.guard import guarded
from kvpolicy_eval.families.page import PLACES, answer, bytes_of, held, tables
from kvpolicy_eval.families.stamp import digest, stamp

GOOD: dict[str, Any] = {
    "verdict": RIGHT,
    "sentence": "",
    "planned": {"nbytes": 1234},
    "attached": True,
    "full": 1e-6,
    "policies": {PLANNED: {"difference": 2e-6, "unmasked": 3.0, "nbytes": 1234}},
}
ALIBI = "A Falcon must use rotary embeddings, got one with ALiBi, which is not supported."
NO: dict[str, Any] = {"verdict": REFUSED, "sentence": ALIBI, "planned": {"refused": ALIBI}}


def fake(entry: Entry) -> dict[str, Any]:
    """What a process runs: an entry that crashes, one that never ends, one that is refused, and others."""
    if entry.name == "gpt2":
        os._exit(7)
    if entry.name == "opt":
        time.sleep(600)
    return NO if entry.name == "falcon" else GOOD


def test_a_crash_and_an_endless_loop_end_one_entry_alone() -> None:
    found = dict(guarded([Entry(CAUSAL, name) for name in ("gpt2", "llama", "falcon")], fake, jobs=2))
    by_name = {entry.name: result for entry, result in found.items()}
    assert (by_name["llama"], by_name["falcon"]) == (GOOD, NO)
    assert (by_name["gpt2"]["verdict"], by_name["gpt2"]["sentence"]) == (ERROR, "Its process ended with exit code 7.")
    ((entry, result),) = guarded([Entry(CAUSAL, "opt")], fake, seconds=1)
    assert (entry.name, result["verdict"], result["sentence"]) == ("opt", ERROR, "It took more than 1 s.")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that the command checks; a result for each without a process."""
    keys = list[str]()

    def instead(entries: list[Entry], *_: Any) -> Any:
        for entry in entries:
            keys.append(entry.key)
            yield entry, NO if entry.name == "falcon" else GOOD

    monkeypatch.setattr(command, "guarded", instead)
    return keys


def test_a_result_is_measured_again_where_something_has_changed(
    tmp_path: Path, checked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--results", str(tmp_path / "families.jsonl")]
    assert command.main(["llama", *options]) == 0
    assert command.main(["llama", "falcon", *options]) == 0
    assert checked == ["causal llama", "causal falcon"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "causal llama: right: differs by 2e-06, without the mask by 3"
    assert printed[-2] == f"causal falcon: refused: {ALIBI}"
    monkeypatch.setattr(command, "stamp", lambda: "other code")
    assert command.main(["llama", *options]) == 0
    assert checked == ["causal llama", "causal falcon", "causal llama"]
    assert json.loads((tmp_path / "families.jsonl").read_text().splitlines()[-1])["made"] == "other code"


@pytest.mark.parametrize(
    ("result", "word"),
    [
        ({"verdict": WRONG, "sentence": "Under full, logits differ."}, "WRONG: Under full"),
        ({"verdict": ERROR, "sentence": "KeyError: 'x'"}, "error: KeyError"),
        ({"verdict": REFUSED, "sentence": "For no reason.", "planned": {"refused": "For no reason."}}, "no reason for"),
    ],
)
def test_what_is_wrong_fails_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: dict[str, Any],
    word: str,
) -> None:
    monkeypatch.setattr(command, "guarded", lambda entries, *_: [(entry, result) for entry in entries])
    assert command.main(["llama", "--results", str(tmp_path / "families.jsonl")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("causal llama: ")
    monkeypatch.setattr(command, "guarded", lambda entries, *_: [(entry, STOCKLESS) for entry in entries])
    assert command.main(["llama", "--results", str(tmp_path / "other.jsonl")]) == 0
    assert word in "; ".join(f"{fault}" for fault in command.faults([Entry(CAUSAL, "llama")], {"causal llama": result}))


STOCKLESS = {"verdict": STOCK, "sentence": "it takes a token of each codebook at a position"}


def test_the_page_is_filled_from_results(
    tmp_path: Path, checked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in PLACES), encoding="utf-8")
    options = ["--results", str(tmp_path / "families.jsonl"), "--fill", str(page)]
    assert command.main(options) == 0
    measured = len(checked)
    assert command.main([*options, "--page-only"]) == 0
    assert len(checked) == measured
    text = page.read_text(encoding="utf-8")
    assert "| Llama 2, Llama 3, Llama 3.1, " in text
    assert "| `llama` | yes |  | 1,234 |" in text
    assert "| `falcon` | no: ALiBi |" in text
    assert "| right | 188 | 97 |\n| refused | 1 | 0 |" in text
    assert "286 entries of transformers 5.23.0. transformers " in text
    assert "| ALiBi | 1 | `falcon` |" in text
    for entry in newer():
        assert f"`{entry.name}`" in text.partition("<!-- table:families-newer -->")[2]
        assert f"`{entry.name}`" not in text.partition("<!-- table:families-newer -->")[0] or entry.name in {
            other.name for other in counted()
        }
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["unheard_of"], "got 'unheard_of'"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0."),
        (["llama", "--fill", "{page}"], "--fill must be given without names"),
        (["--fill", "{page}", "--page-only"], "must have all entries to fill the page, got none of 'causal afmoe'"),
        (["--fill", "{empty}"], "has no place for families-counts"),
        (["--page-only", "--results", "{none}"], "must be an existing file with --page-only"),
    ],
)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    paths = {name: tmp_path / name for name in ("page", "empty", "none", "results")}
    paths["page"].write_text("".join(f"<!-- table:{name} -->\n<!-- /table -->\n" for name in PLACES), encoding="utf-8")
    paths["empty"].touch()
    paths["results"].write_text('{"key": "causal llama", "verdict": "right"}\n', encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        command.main(["--results", str(paths["results"]), *(option.format(**paths) for option in options)])
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_cells() -> None:
    assert answer(None) == ""
    assert answer(STOCKLESS) == "stock does not run: it takes a token of each codebook at a position"
    other = {**GOOD, "planned": {"nbytes": 1000}}
    assert bytes_of(GOOD) == (1234, 1234) and bytes_of(NO) is None
    assert held({CAUSAL: GOOD, IMAGE: GOOD}) == "1,234"
    assert held({CAUSAL: GOOD, IMAGE: other}) == "1,234; 1,000, 1,234"
    assert "mistral" not in tables({Entry(CAUSAL, "llama").key: GOOD})["families"]


def test_the_stamp_changes_with_versions_and_code(tmp_path: Path) -> None:
    import torch
    import transformers

    assert stamp() == stamp()
    assert f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}" in stamp()
    (tmp_path / "a.py").write_text("x = 1\n")
    before = digest([tmp_path])
    (tmp_path / "a.py").write_text("x = 2\n")
    after = digest([tmp_path])
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({before, after, digest([tmp_path])}) == 3
