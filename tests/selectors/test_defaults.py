"""Parts that inherit defaults, optional abilities, and what is refused without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy import Policy
from kvpolicy.protocols import (
    Allocator,
    ChecksModel,
    Codec,
    ComparesHeads,
    Merger,
    ModelInfo,
    Reader,
    Reranks,
    ScoredByKeys,
    Selector,
    State,
    View,
    compares_heads,
    heads_of,
    joint_decode,
    rerank_every,
)
from kvpolicy.selectors.kvcrush import KVCrush
from kvpolicy.selectors.snapkv import SnapKV
from kvpolicy.selectors.tova import TOVA
from kvpolicy.selectors.window import SlidingWindow
from kvpolicy.statistics import Results
from kvpolicy.testing import check


@dataclass(frozen=True)
class Newest(Selector):
    def priority(self, state: State, view: View) -> Tensor:
        return view.positions.float()


@dataclass(frozen=True)
class KeyNorm(ScoredByKeys):
    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        return -keys.norm(dim=-1)


def kept(policy: Policy) -> list[Any]:
    model, _ = kvpolicy.tiny()
    cache = None
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        for ids in (torch.arange(60, 180)[None], torch.tensor([[5]]), torch.tensor([[9]])):
            model(ids, cache=cache)
    return [layer.positions.sort(-1).values.tolist() for layer in cache.policy_layers]


@pytest.mark.parametrize("part", [Newest(), KeyNorm()])
def test_a_method_of_one_line_keeps_the_rules(part: Selector) -> None:
    check(part)


@pytest.mark.parametrize(("part", "known"), [(Newest(), SlidingWindow()), (KeyNorm(), kvpolicy.KeyNorm())], ids=str)
def test_the_defaults_are_those_of_the_methods_of_the_package(part: Selector, known: Selector) -> None:
    assert kept(Policy(selector=part, budget=32)) == kept(Policy(selector=known, budget=32))


@pytest.mark.parametrize("kind", [Selector, Merger, Codec, Reader, Allocator])
def test_what_has_all_members_is_a_part_whatever_its_class(kind: type) -> None:
    names = {name for name in dir(kind) if not name.startswith("_")}
    part = type("Part", (), {name: getattr(kind, name) for name in names})()
    assert isinstance(part, kind)
    for name in names:
        lacking = type("Part", (), {other: getattr(kind, other) for other in names - {name}})()
        assert not isinstance(lacking, kind), name


def test_optional_abilities_are_asked_of_the_part() -> None:
    assert isinstance(SnapKV(), ComparesHeads) and compares_heads(SnapKV())
    assert not isinstance(Newest(), ComparesHeads) and not compares_heads(Newest())
    assert compares_heads(KVCrush(base=SnapKV())) and not compares_heads(KVCrush(base=SlidingWindow()))
    assert joint_decode(TOVA()) and not joint_decode(SnapKV())
    assert heads_of(object()) is None


@dataclass(frozen=True)
class FewLayers(Newest):
    def check(self, model: ModelInfo) -> None:
        if model.layers > 2:
            raise kvpolicy.KVPolicyError(f"The model must have at most 2 layers, got {model.layers}.")


@pytest.mark.parametrize("selector", [FewLayers(), KVCrush(base=FewLayers()), KVCrush(base=KVCrush(base=FewLayers()))])
def test_a_selector_may_refuse_a_model_before_anything_is_attached(selector: Selector) -> None:
    assert isinstance(selector, ChecksModel) and not isinstance(SnapKV(), ChecksModel)
    model, _ = kvpolicy.tiny()
    policies = [Policy(selector=selector, budget=0.5)]
    policies.append(Policy.by_layer([*["snapkv@0.5"] * 7, policies[0]], budget=0.5))
    for policy in policies:
        with pytest.raises(kvpolicy.KVPolicyError, match="must have at most 2 layers, got 8"):
            kvpolicy.attach(model, policy)
        with pytest.raises(kvpolicy.KVPolicyError, match="must have at most 2 layers, got 8"):
            kvpolicy.plan("tiny", policy)
    kvpolicy.attach(model, "snapkv@0.5").detach()  # nothing is attached
    KVCrush(base=SnapKV()).check(ModelInfo(8, 4, 32))


def test_a_part_is_refused_with_the_name_of_what_it_lacks() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match="whose compares_heads is not True"):
        Policy(allocator=kvpolicy.Uniform(heads=kvpolicy.AdaKV()), selector=Newest(), budget=0.5)

    @dataclass(frozen=True)
    class Comparing(Newest):
        compares_heads: ClassVar[bool] = True

    assert Policy(allocator=kvpolicy.Uniform(heads=kvpolicy.AdaKV()), selector=Comparing(), budget=0.5).heads

    @dataclass(frozen=True)
    class Ranking(Newest):
        rerank_every: ClassVar[int] = 4

    for selector in (Ranking(), KVCrush(base=Ranking())):
        assert rerank_every(selector) == 0, "it has no method rerank(state, seen, view)"
        Policy(selector=selector, budget=0.5)

    @dataclass(frozen=True)
    class RankingAgain(Ranking):
        def rerank(self, state: State, seen: Results, view: View) -> State:
            return state

    for selector in (RankingAgain(), KVCrush(base=RankingAgain())):
        assert isinstance(selector, Reranks) and rerank_every(selector) == 4
