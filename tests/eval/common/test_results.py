"""Files of results: an interrupted run continues, and other files are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy_eval.common.results import keep_result, read_results


@pytest.mark.parametrize("tail", ["", '{"key": "b", "x": 0.', "{", '{"k', '{"key": "é'])
def test_a_line_that_was_cut_off_is_measured_again(tail: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    known = read_results(file)
    keep_result(file, known, "a", {"x": 1})
    whole = file.read_bytes()
    file.write_bytes(whole + tail.encode())
    assert read_results(file) == {"a": {"x": 1}}
    keep_result(file, known, "b", {"x": 2})
    assert file.read_bytes() == whole + b'{"key": "b", "x": 2}\n'
    assert read_results(file) == known


def test_a_line_break_that_is_missing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"key": "a", "x": 1}')
    known = read_results(file)
    keep_result(file, known, "b", {"x": 2})
    assert read_results(file) == {"a": {"x": 1}, "b": {"x": 2}}


@pytest.mark.parametrize("text", ["mine", "{}", '{"key": "a"\n{"key": "b"}\n', "[1]\n"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match="must be absent, or a file of results"):
        read_results(file)
    assert file.read_text() == text
