"""Mergers where heads have budgets of their own: after prompts and in decode steps, beside the slow version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpolicy.allocators.adakv import AdaKV
from kvpolicy.allocators.duo import DuoAttention
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from tests.engine.paged import HEADS, Run
from tests.sampling import each_once, product

CODECS = ["plain", "tokenwise:group_size=2:residual_length=3:block_size=4"]
GROWING = ["blend", "elastic", "kvmerger", "merge", "keepkv", "zsmerge", "d2o", "regress", "compensate"]


SNAPKV = "snapkv:window=6:kernel=3"


@pytest.mark.parametrize(
    ("merger", "selector", "codec"),
    [
        ("compensate", "h2o", CODECS[0]),
        ("compensate", "window", CODECS[1]),
        ("compensate", SNAPKV, CODECS[1]),
        *((merger, "h2o", CODECS[1]) for merger in ("merge", "keepkv", "zsmerge", "d2o")),
    ],
)
def test_prompts_and_steps(merger: str, selector: str, codec: str) -> None:
    """A prompt, steps that evict, a later prompt that divides the pages again, and steps behind it.

    Mergers that compare keys merge into buffers, which a codec has for each head.
    """
    run = Run(selector, AdaKV(safeguard=0.0), [70, 12], codec=codec, merger=merger)
    run.prompt([120, 33])
    for _ in range(9):
        run.step()
    run.prompt([7, 40])
    for number in range(9):
        run.step(valid=[True, number % 3 != 1])
    if merger == "compensate":
        assert run.store.tensors.log_counts is not None and float(run.store.tensors.log_counts.max()) > 2


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_are_selected_and_repeated(codec: str) -> None:
    run = Run("h2o", AdaKV(), [40, 9], codec=codec, merger="compensate")
    run.prompt([80, 33])
    run.step()
    run.select([1, 0, 1])
    for number in range(6):
        run.step(valid=[number % 3 != 1, True, True])
    run.prompt([7, 0, 9])
    run.step()


@pytest.mark.parametrize("codec", CODECS)
def test_retrieval_heads_keep_all_and_streaming_heads_one_slot_for_the_rest(codec: str, tmp_path: Path) -> None:
    """RazorAttention: one head of three retrieves."""
    path = str(tmp_path / "heads.json")
    HEAD_FILES.save(path, HeadFile(((0.1, 0.9, 0.2),), sinks=2, recent=10))
    run = Run(
        "window", DuoAttention(file=path, sparsity=0.67, sinks=2, recent=10), [36], codec=codec, merger="compensate"
    )
    run.prompt([60])
    counts = run.rows[0].heads
    assert [max(token.count for token in head.tokens) for head in counts] == [60 - 12 + 1, 1, 60 - 12 + 1]
    for _ in range(25):
        run.step()
    assert [sum(token.count for token in head.tokens) for head in counts] == [85, 85, 85], "no token is lost"


def test_softcaps_and_sinks() -> None:
    sinks = torch.linspace(-1, 2, HEADS * 2)
    run = Run("h2o", AdaKV(), [40], merger="compensate", softcap=2.0, sinks=sinks)
    run.prompt([90])
    for _ in range(5):
        run.step()


@product("merger,codec", GROWING, CODECS, sample=each_once(GROWING, CODECS))
def test_mergers_in_prompts_of_a_cache_that_grows(merger: str, codec: str) -> None:
    run = Run(SNAPKV, AdaKV(), [40, 24], grows=True, codec=codec, merger=merger)
    run.prompt([80, 33], extra=5)
    for _ in range(8):
        run.step()
    run.prompt([0, 20], extra=5)
    run.step()


@pytest.mark.parametrize("merger", ["blend", "elastic", "kvmerger", "regress"])
def test_mergers_of_prompts_where_steps_evict(merger: str) -> None:
    run = Run(SNAPKV, AdaKV(), [40, 24], merger=merger)
    run.prompt([80, 33])
    for _ in range(8):
        run.step()
    run.prompt([9, 30])
    run.step()
