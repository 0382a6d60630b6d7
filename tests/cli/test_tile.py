"""`--tile` of the commands: the same texts and files as with a whole prompt, and a wrong size in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy.hf.cache_file import read
from tests.cli.conftest import Facts, Run

PROMPT = "tiger=4821\nlion=1234\nwolf=9310\nsheep=7764\n?tiger=4821\n?wolf="


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of each tile that a layer of the embedded model takes."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    found: list[int] = []
    forward = LlamaMLP.forward

    def noting(self: Any, x: torch.Tensor) -> torch.Tensor:
        found.append(x.shape[1])
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", noting)
    return found


def test_generate(facts: Facts, sizes: list[int]) -> None:
    texts: list[str] = []
    for tile in ("16", "none"):
        found = facts(["generate", PROMPT, "--policy", "snapkv@0.5", "--new", "5", "--tile", tile])
        texts.append(found["runs"][0]["text"])
        assert (max(sizes) <= 16) == (tile == "16")
    assert texts[0] == texts[1]


def test_cache_make(tmp_path: Path, facts: Facts, sizes: list[int]) -> None:
    for tile in ("16", "auto"):
        out = ["--out", str(tmp_path / tile)]
        facts(["cache", "make", PROMPT, "--policy", "snapkv@0.5", "--tile", tile, *out])
        assert (max(sizes) <= 16) == (tile == "16")
    tiled, whole = (read(tmp_path / name).tensors for name in ("16", "auto"))
    assert all(torch.equal(tiled[name], whole[name]) for name in whole if name.endswith("positions"))


@pytest.mark.parametrize(
    "words", [["inspect", PROMPT, "--policy", "h2o@0.5"], ["bench", "h2o@0.5", "--length", "64", "--rounds", "1"]]
)
def test_other_commands(words: list[str], facts: Facts, sizes: list[int]) -> None:
    facts([*words, "--tile", "16"])
    assert 16 in sizes


@pytest.mark.parametrize("command", [["generate"], ["cache", "make"], ["inspect"], ["bench"], ["serve"]])
def test_a_wrong_size(command: list[str], run: Run) -> None:
    assert "--tile must be a number of tokens, auto or none, got 'huge'; try 4096." in run(
        [*command, "--tile", "huge"], 2
    )
