"""`kvpolicy explain`: its arithmetic is that of the plan, for every part, also of others."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvpolicy import registry
from kvpolicy.selectors.window import SlidingWindow

Run = Callable[..., str]
Facts = Callable[..., dict[str, Any]]


def said(run: Run, line: str) -> str:
    return " ".join(run(f"explain {line}").split())


def test_a_share_in_tokens_and_in_bits(run: Run) -> None:
    text = said(run, "squeeze+kvcrush/snapkv+kivi:bits=4@0.2 llama-2-70b")
    assert "0.2 of 4,096 tokens are 819 tokens per layer on average, 65,520 in 80 layers." in text
    assert "204 are representatives (0.25 of them)" in text
    assert "of the base's 615, the newest 32 in any case and the 583 best by its ranking" in text
    assert "a coded number takes 5.00 bits, 4.00 of codes and 1.00 of scales" in text
    assert "A layer of 819 tokens has 160 exact and 704 coded slots." in text
    assert "53-79: 328 tokens." in text  # squeeze's example: 0.4 of 819.2
    assert "129.50 MB of 1.68 GB, 0.077 of the full cache" in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("streaming@0.5", "the first 4 in any case and the newest 2,044."),
        ("window@100", "100 tokens per layer on average, 800 in 8 layers."),
        ("window@100", "the newest 100. It looks at nothing of attention."),
        ("h2o:recent=0.25@0.5", "the newest 512 in any case and the 1,536 best by its ranking"),
        ("snapkv:decode=grow@0.2", "1,024 more per layer"),
        ("snapkv:decode=grow@0.2", "of 819 tokens that each KV head keeps"),
        ("snapkv@9000", "9,000 tokens per layer on average, 72,000 in 8 layers. The prompt's 4,096 tokens fit."),
        ("full", "All of the prompt is kept: 4,096 tokens in each of 8 layers."),
        ("pyramid+window@0.2 mixtral-8x7b", "1,597 tokens in layer 0, 41 in layer 31"),
        ("window@1MiB", "1MiB for the whole cache come to 248 tokens per layer on average"),
        ("kivi:bits=8", "a coded number takes 9.00 bits"),
        ("csr", "Its calibrated tensors take"),
        ("window@1e-300", "of 1 token that each KV head keeps"),
        ("squeeze:groups=5+window@0.2", ": 327 tokens."),
        ("window@99999999999999999", "Here: 5,120 tokens in every layer."),
        ("probe+zipcache", "All tokens are coded anew"),
        ("streaming@0.5 tiny --prompt 1000000", "of 500,000 tokens that each KV head keeps of 1,000,000"),
    ],
)
def test_what_it_comes_to(line: str, told: str, run: Run) -> None:
    assert told in said(run, line)


@pytest.mark.parametrize("name", registry.names())
def test_every_part_is_explained_and_its_bytes_are_the_plans(name: str, facts: Facts) -> None:
    kind = registry.lookup(name)[0]
    policy = {"allocator": f"{name}+h2o@0.3", "selector": name, "codec": f"h2o+{name}@0.5"}[kind]
    explained, planned = facts(f"explain {policy} tiny --batch 3"), facts(f"plan tiny {policy} --batch 3")
    assert explained["cache"] == planned["cache"] and explained["layers"] == planned["layers"]
    part = next(part for part in explained["parts"] if part["kind"] == kind)
    assert part["strategies"][0]["name"] == name
    assert all(re.search(r"[0-9a-z]", sentence) for sentence in part["here"])


def test_a_selector_of_others_that_ranks_only_what_it_saw(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def priority(*args: object) -> Any:
        raise AssertionError("nothing was seen")

    monkeypatch.setattr(SlidingWindow, "priority", priority)
    assert "the 819 best by its ranking" in said(run, "window@0.2")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", "got 'nonsense'"),
        ("tiny snapkv", "tiny is a model and stands in the policy's place: write kvpolicy explain POLICY tiny."),
        ("kivi@0.2", "must have a selector"),
        ("streaming@3", "at least 5 tokens"),
        ("window@0.2 no/such/model", "got no/such/model"),
        ("csr llama-2-70b", "made for another model"),
        ("window@1B", "budget must be at least"),
        ("full tiny --dtype int8", "dtype 'int8' is not known"),
        ("full tiny --dtype Tensor", "dtype 'Tensor' is not known"),
    ],
)
def test_what_the_user_can_put_right(line: str, told: str, run: Run) -> None:
    assert told in run(f"explain {line}", 2)
