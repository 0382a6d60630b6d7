"""For every model family, several ranks give the output of one rank; or the model is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deepspeed.checkpoints import MORE, NAMED, NOT_BY_TRANSFORMERS, compare, save
from tests.parallel.ranks import run_ranks

pytest.importorskip("deepspeed")
CLOSE = 5e-6


def _answers(rank: int, world: int, folders: dict[str, str], backend: str) -> dict[str, Any]:
    import kvpolicy_deepspeed

    found: dict[str, Any] = {}
    for name, folder in folders.items():
        try:
            model = kvpolicy_deepspeed.load(folder, backend=backend)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            found[name] = str(error)
        else:
            found[name] = compare(folder, model)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of all checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save(name, folder) for name in [*{*NAMED, *MORE}]}


def _run(folders: dict[str, str], backend: str, world: int) -> dict[str, Any]:
    results = run_ranks(_answers, world, folders, backend)
    assert all(result == results[0] for result in results)  # the same bits on all ranks
    return results[0]


def _right(found: Any) -> bool:
    return not isinstance(found, str) and found[0] <= CLOSE and found[1]


def test_deepspeed_is_correct_on_two_ranks(saved: dict[str, str]) -> None:
    found = _run(saved, "deepspeed", 2)
    assert all(map(_right, found.values())), found


def test_transformers_is_correct_on_two_ranks_or_names_the_other_backend(saved: dict[str, str]) -> None:
    found = _run(saved, "hf", 2)
    refused = {name for name, value in found.items() if isinstance(value, str)}
    assert all(_right(value) for name, value in found.items() if name not in refused), found
    assert refused == NOT_BY_TRANSFORMERS
    assert all('try backend="deepspeed"' in found[name] for name in refused)


@pytest.mark.full
def test_two_kv_heads_are_replicated_on_four_ranks(saved: dict[str, str]) -> None:
    found = _run({name: saved[name] for name in ("llama", "four experts")}, "deepspeed", 4)
    assert all(map(_right, found.values())), found


@pytest.mark.full
def test_deepspeed_is_correct_on_four_ranks(saved: dict[str, str]) -> None:
    found = _run({name: folder for name, folder in saved.items() if name != "no head"}, "deepspeed", 4)
    assert all(map(_right, found.values())), found
