"""Layers of caches that hold nothing, in versions of transformers with and without a class for them."""

from __future__ import annotations

import runpy

import pytest

pytest.importorskip("transformers")
from transformers import cache_utils

from kvpolicy.hf import cache_names


def test_it_is_the_class_of_transformers() -> None:
    assert cache_names.DummyLayer is getattr(cache_utils, "DummyLayer", cache_names.DummyLayer)


def test_where_transformers_has_none_no_layer_is_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)
    absent = runpy.run_path(cache_names.__file__)["DummyLayer"]
    assert not isinstance(cache_utils.DynamicLayer(), absent)
