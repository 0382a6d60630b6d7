"""A second policy compiles in a process that compiled another one: its sizes are symbols where they have changed."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import pytest
import torch

import kvpolicy
from kvpolicy.kernels import words as words_of_codes
from kvpolicy.kernels.words import constant
from tests.codecs.compiling import compile_all
from tests.conformance.models import build
from tests.conformance.policies import CODECS, words
from tests.engine import test_compile
from tests.engine.test_compile import METHODS, OTHERS, REUSE

CENTERS = [words("h2o", "tokenwise"), words("h2o", "quest"), "uniform/adakv+h2o+compensate@0.5"]
"""Policies that are compiled first: with codes, with a reader and with budgets of heads."""
POLICIES = list(dict.fromkeys([*METHODS, REUSE, *OTHERS, *(words("h2o", codec) for codec in CODECS)]))
CHAINS = [POLICIES[start : start + 5] for start in range(0, len(POLICIES), 5)]
EACH = 4
"""Of so many chains or codecs one is compiled before an issue is closed, and the others by `pytest -m full`."""
LENGTHS = (24, 37, 31)
"""Tokens of prompts, in turn."""


def some(cases: Iterable[Any]) -> list[Any]:
    """Cases with the markers of their jobs: they take a minute each."""
    marks = pytest.mark.slow, pytest.mark.full
    return [pytest.param(case, marks=marks[number % EACH > 0]) for number, case in enumerate(cases)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """No code of other tests, and the functions for many slots also with a few."""
    compile_all(monkeypatch)
    monkeypatch.setattr(words_of_codes, "HAS_WIDE_VECTORS", True)  # also where the processor has none
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_steps(monkeypatch: pytest.MonkeyPatch, policy: str, prompt: int) -> None:
    """One graph for all steps of a policy behind a prompt."""
    monkeypatch.setattr(test_compile, "PROMPT", prompt)
    model: Any = build("llama", layers=2 if policy == REUSE or "minicache" in policy else 1)
    with kvpolicy.attach(model, policy):
        steps: Any = torch.compile(model, backend="eager", fullgraph=True)
        test_compile.decode(model, steps, [prompt], 3)


def check_chain(monkeypatch: pytest.MonkeyPatch, policies: Sequence[str]) -> None:
    # A model's forward has one code object, of which each policy has a compilation or two.
    with torch._dynamo.config.patch(recompile_limit=64):
        for number, policy in enumerate(policies):
            compile_steps(monkeypatch, policy, LENGTHS[number % len(LENGTHS)])


def test_a_policy_compiles_after_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of half the width, whose numbers are symbols when they are compiled."""
    check_chain(monkeypatch, [f"h2o+kivi:bits={bits}:group_size=4:residual_length=4@0.5" for bits in (4, 2)])


@pytest.mark.parametrize("number", some(range(len(CHAINS))))
def test_every_policy_compiles_after_others(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """After one of the centers, and before another."""
    check_chain(monkeypatch, [CENTERS[number % 3], *CHAINS[number], CENTERS[(number + 1) % 3]])


@pytest.mark.parametrize("first", some(CODECS))
def test_every_codec_compiles_before_and_after_kivi(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    kivi = words("h2o", "kivi")
    check_chain(monkeypatch, [kivi, words("h2o", first), kivi])


def test_a_size_that_changed_is_a_number() -> None:
    """Neither `math.gcd` nor a set takes a symbol."""

    def widths(t: torch.Tensor) -> torch.Tensor:
        size = constant(t.shape[-1])
        return torch.zeros(math.gcd(size, 8) * len({size, 1}))

    step: Any = torch.compile(widths, backend="eager", fullgraph=True)
    assert [len(step(torch.ones(2, size))) for size in (8, 12, 20)] == [16, 8, 8]
