"""Compiled functions of codecs, for any number of slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpolicy.codecs import uniform
from kvpolicy.kernels import compiled, fused_read, words


def compile_all(monkeypatch: pytest.MonkeyPatch, backend: str = "eager") -> None:
    """Compile functions for any number of slots."""
    monkeypatch.setattr(compiled, "BACKEND", backend)
    monkeypatch.setattr(compiled, "MIN_SLOTS", 1)
    monkeypatch.setattr(words, "VECTOR", 1)
    monkeypatch.setattr(uniform, "HAS_WIDE_VECTORS", True)
    monkeypatch.setattr(fused_read, "BLOCK", 32)
    monkeypatch.setattr(compiled, "_is_on", True)
    monkeypatch.setattr(compiled, "_failures", [])
    monkeypatch.setattr(compiled, "_missing_compiler", lambda device: "")


def call_directly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Call the functions that would be compiled, for any number of slots, without dynamo; their names, in order."""
    called: list[str] = []

    def direct(function: Callable[..., object], *given: object, **options: object) -> object:
        called.append(function.__name__)
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "_is_on", False)  # a function that calls itself compiled
            return function(*given, **options)

    compile_all(monkeypatch)
    for module in (
        "codecs.token_groups",
        "codecs.base",
        "codecs.e4m3",
        "codecs.uniform",
        "codecs.gear",
        "codecs.kvquant",
        "codecs.rotate",
        "codecs.turboquant",
        "kernels.rotary",
    ):
        monkeypatch.setattr(f"kvpolicy.{module}.call", direct)
    return called
