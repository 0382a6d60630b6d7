"""The extra `plots` is needed when a picture is drawn; `tests/test_lean_import.py` tests that it is not before."""

from __future__ import annotations

import importlib
import sys

import pytest

import kvpolicy.plots
import kvpolicy.reporting.plots


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("kvpolicy.reporting.plots.bytes")
    for name in ("kvpolicy.reporting.plots._style", "kvpolicy.reporting.plots.bytes"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(vars(kvpolicy.reporting.plots), "bytes_by_kind", raising=False)
    with pytest.raises(ImportError, match=r"^Plots need matplotlib, .*; run pip install 'kvpolicy\[plots\]'\.$"):
        _ = kvpolicy.plots.bytes_by_kind


def test_an_unknown_picture_is_said() -> None:
    with pytest.raises(AttributeError, match=r"'kvpolicy\.plots' has no attribute 'cakes'"):
        kvpolicy.plots.cakes  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_every_name_is_there() -> None:
    names = {"accuracy_against_bytes", "budgets", "bytes_by_kind", "kept", "layer_similarity", "token_text"}
    assert names <= set(dir(kvpolicy.plots))
    assert all(getattr(kvpolicy.plots, name).__name__ == name for name in names)
