"""What a policy accepts, fills in and refuses."""

# To a type checker, `decode` of a frozen class that inherits nothing is not that of `Selector`, which is writable.
# pyright: reportArgumentType=false

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import H2O, KIVI, Even, KeepAll, KVCrush, Plain, Policy, Pyramid, Share, SnapKV, Uniform
from kvpolicy.policy.combination import FORMER
from kvpolicy.protocols import (
    SMALLEST_HEAD,
    Codec,
    DecodeMode,
    HeadShape,
    Layout,
    Selector,
    Stage,
    State,
    Traits,
    View,
)
from kvpolicy.registry import names
from kvpolicy.statistics import Results, Statistic
from kvpolicy.text.validation import longest
from tests.conformance.models import build


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    """A selector that nobody registered, and that inherits nothing."""

    decode: DecodeMode = "evict"
    min_tokens: int = 1
    statistics: tuple[Statistic[Any], ...] = ()

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return ()

    def observe(self, state: State, seen: Results, view: View) -> State:
        return state

    def step(self, state: State, row: Tensor, view: View) -> None:
        return None

    def priority(self, state: State, view: View) -> Tensor:
        return view.positions.float()

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        return None


def test_parts_not_named_change_nothing() -> None:
    policy = Policy()
    assert policy == Policy(allocator=Uniform(), selector=KeepAll(), codec=Plain(), budget=1.0)
    assert hash(policy) == hash(Policy())
    assert str(policy) == "full"
    assert isinstance(policy.selector, Selector)


def test_budget_is_a_fifth_where_a_selector_is_named() -> None:
    assert Policy(selector=Newest()).budget == 0.2
    assert Policy(codec=KIVI()).budget == 1.0
    assert Policy(selector=Newest(), budget="512MiB").budget == "512MiB"
    assert Policy(selector=Newest(), budget="0.5").budget == 0.5
    assert Policy(selector=Newest(), budget=None).budget == 0.2  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"budget must be a fraction .*, got True of type bool"):
        Policy(selector=Newest(), budget=True)


@pytest.mark.parametrize("text", ["full", "none", None, "full@1.0", "keepall", "uniform+full+plain", "plain@1.0"])
def test_words_for_the_policy_that_changes_nothing(text: str | None) -> None:
    assert Policy.parse(text) == Policy()


@pytest.mark.parametrize("budget", [0.5, 1, 2048, "512MiB"])
def test_budget_below_the_whole_needs_a_selector(budget: float | int | str) -> None:
    with pytest.raises(
        ValueError, match="must have a selector that evicts tokens, got full, which keeps them all; try snapkv"
    ):
        Policy(codec=KIVI(), budget=budget)


@pytest.mark.parametrize("budget", [0.0, 1.5, -0.1, 0, -3, 10**18, float("nan"), "12parrots", ""])
def test_budget_out_of_range(budget: float | int | str) -> None:
    with pytest.raises(ValueError, match=r"budget|share"):
        Policy(selector=Newest(), budget=budget)


def test_budget_below_the_floor_names_the_smallest_that_works() -> None:
    with pytest.raises(ValueError, match=r"must be at least 8 tokens for Newest\(.*\), got 7"):
        Policy(selector=Newest(min_tokens=8), budget=7)
    Policy(selector=Newest(min_tokens=8), budget=8)
    Policy(selector=Newest(min_tokens=8), budget=0.001)  # a share is only known with a prompt


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"allocator": KIVI()}, r"The allocator must implement .*\.Allocator, got KIVI\(.*; pass it as codec="),
        ({"selector": Pyramid()}, "pass it as allocator="),
        ({"codec": Newest()}, "pass it as selector="),
        ({"codec": "kivi"}, "got 'kivi'; read a spec with Policy.parse"),
        ({"selector": Newest}, r"The selector must be an instance, got the class Newest; try Newest\(\)"),
        ({"selector": None}, "it lacks alloc, decode, .* of kvpolicy.protocols.Selector"),
    ],
)
def test_wrong_part_in_a_slot(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Policy(**parts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Newest(), r"The policy must be a kvpolicy.Policy or a spec, got Newest; try Policy\(selector=...\)"),
        (Newest, 'got the class Newest; try "snapkv@0.2"'),
        (None, "must be a kvpolicy.Policy or a spec, got NoneType"),
    ],
)
def test_what_is_no_policy(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Policy.of(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SnapKV(window=2.5),  # pyright: ignore[reportArgumentType]
        lambda: kvpolicy.StreamingLLM(sinks=True),
        lambda: kvpolicy.StreamingLLM(sinks=numpy.bool_(True)),
        lambda: H2O(recent="0.5"),  # pyright: ignore[reportArgumentType]
        lambda: KIVI(group_size=32.0),  # pyright: ignore[reportArgumentType]
        lambda: kvpolicy.SqueezeAttention(keep_share=None),  # pyright: ignore[reportArgumentType]
    ],
)
def test_parameters_of_another_type(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"^\w+\.\w+ must be (an integer|a number), got .*\.$"):
        make()


def test_equal_policies_have_equal_words() -> None:
    one = Policy(selector=Newest(), budget=1)
    all_ = Policy(selector=Newest(), budget=1.0)
    assert one != all_ and len({one, all_, Policy(selector=Newest(), budget=1)}) == 2
    assert one != "full" and Policy(budget=1.0) == Policy()
    for equal in ((H2O(recent=1), H2O(recent=1.0)), (H2O(recent=-0.0), H2O(recent=0.0))):
        first, second = (Policy(selector=selector) for selector in equal)
        assert first == second and str(first) == str(second) and Policy.parse(str(first)) == first
    assert str(Policy(codec=KIVI(bits=4.0))) == "kivi:bits=4"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("reader", [name for name in names("reader") if name not in ("all", "reuse")])
def test_to_read_one_token_is_not_to_read_all(reader: str) -> None:
    """Policies are the keys of what plans remember."""
    one, whole = (Policy.parse(f"h2o+{reader}:read={read}@0.5") for read in ("1", "1.0"))
    assert one != whole and one.reader != whole.reader and len({one, whole}) == 2
    assert one == Policy.parse(str(one)) and whole == Policy.parse(str(whole))


def test_a_plan_of_one_token_is_not_that_of_all() -> None:
    config = build("llama").config
    plans = [kvpolicy.plan(config, f"h2o+quest:read={read}@0.5", prompt=64) for read in ("1", "1.0", "64")]
    assert plans[1].nbytes == plans[2].nbytes < plans[0].nbytes
    assert plans[1].moved == plans[2].moved > plans[0].moved


@pytest.mark.parametrize("split", [float("nan"), float("inf"), -float("inf"), 1])
def test_a_split_that_is_no_share(split: float) -> None:
    with pytest.raises(ValueError, match=r"KVCrush\.split must be between 0 and 0\.999999"):
        KVCrush(split=split)


def test_layers_together_are_what_one_of_them_is() -> None:
    """A step reads a part if any layer does; the smallest budget of any layer is that of the least selector."""
    policy = Policy.by_layer(["streaming:sinks=7@0.5", "h2o+exact:read=4@0.5", "h2o@0.5"], budget=0.5)
    assert policy.reads_part and policy.min_tokens == 1 and not policy.keeps_whole
    assert not Policy.by_layer(["h2o@0.5", "snapkv@0.5"], budget=0.5).reads_part
    assert Policy.by_layer(["streaming:sinks=7@0.5", "streaming:sinks=5@0.5"], budget=0.5).min_tokens == 6
    assert not Policy.by_layer(["full", "h2o:decode=grow@0.5"], budget=0.5).keeps_whole
    assert Policy.by_layer(["full", "kivi"], budget=0.5).keeps_whole


def test_a_layer_reads_what_one_of_the_same_codec_chose() -> None:
    reuse = "reuse:every=2:dense=0/exact:read=4"
    Policy.by_layer([f"kivi:bits=4+{reuse}"] * 2 + [f"kivi:bits=8+{reuse}"] * 2, budget=0.5)
    with pytest.raises(ValueError, match=r"must have the same reader and codec, got .* for layer 1 and .* for layer 0"):
        Policy.by_layer([f"kivi:bits=4+{reuse}", f"kivi:bits=8+{reuse}"], budget=0.5)


def test_the_longer_of_two_expected_prompts() -> None:
    """Row by row; after a beam search with another number of beams, the newer one."""
    told = torch.tensor([5, 9])
    for prompt, want in (
        (None, [5, 9]),
        (torch.tensor(7), [7, 9]),
        (torch.tensor([6, 2]), [6, 9]),
        (torch.tensor([1, 2, 3]), [1, 2, 3]),
    ):
        found = longest(told, prompt)
        assert found is not None and found.tolist() == want
    assert longest(None, None) is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages(Codec):
    """A codec whose tokens are encoded one by one, in some stages."""

    count: int

    @property
    def traits(self) -> Traits:
        return Traits(block=4, per_head=())

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (kvpolicy.TokenWise(),) * self.count

    def layout(self, tokens: int) -> Layout:
        return Layout(tokens, (tokens,) * self.count)


def test_head_budgets_need_a_codec_of_one_stage() -> None:
    """Pages of heads are moved between the buffer and one stage."""
    parts: dict[str, Any] = {"allocator": Uniform(heads=Even()), "selector": H2O(), "budget": 0.5}
    assert Policy(**parts, codec=Stages(count=1)).heads == Even()
    with pytest.raises(ValueError, match=r"must encode every token by itself to be combined with even, which"):
        Policy(**parts, codec=Stages(count=2))


@pytest.mark.parametrize("spec", ["snapkv", "squeeze+kvcrush/h2o+kivi:bits=4", "uniform/adakv+snapkv", "h2o+mikv"])
def test_a_policy_has_a_share_with_a_least_number(spec: str) -> None:
    policy = Policy.parse(f"{spec}@0.2:least=1024")
    assert policy.budget == Share(0.2, least=1024) and Policy.parse(spec).with_budget(policy.budget) == policy
    assert str(policy).endswith("@0.2:least=1024") and Policy.parse(str(policy)) == policy == eval(repr(policy))
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    others = [policy.with_budget(0.2), policy.with_budget(Share(0.2, least=1023)), policy.with_budget(1024)]
    assert policy not in others and len({policy, Policy.parse(str(policy)), *others}) == 4
    assert copy.deepcopy(policy) == policy
    assert "at least 1,024 tokens per layer" in policy.to_html()


def test_a_least_number_says_nothing_where_every_token_is_kept() -> None:
    assert Policy.parse("kivi@1.0:least=9") == Policy.parse("kivi")
    assert Policy.parse("h2o+mikv@1.0:least=9") == Policy.parse("h2o+mikv")
    assert Policy.parse("h2o@1.0:least=9").budget == Share(1.0, least=9)
    with pytest.raises(kvpolicy.KVPolicyError, match=r"must evict tokens, got the budget 1\.0:least=9"):
        Policy.parse("snapkv:decode=grow+merge@1.0:least=9")
    with pytest.raises(kvpolicy.KVPolicyError, match=r"0\.5:least=9 must have a selector that evicts tokens"):
        Policy.parse("kivi@0.5:least=9")


def test_layers_have_relative_shares_without_a_least_number() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=r"a fraction or tokens, got h2o@0\.5:least=9"):
        Policy.by_layer(["h2o@0.5:least=9", "h2o@0.5"], budget=0.5)
    policy = Policy.by_layer(["h2o@0.5", "window@0.25"], budget="0.5:least=9")
    assert policy.budget == Share(0.5, least=9) and eval(repr(policy)) == policy
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    tuned = Policy.parse("tuned:file=plan.json@0.1:least=64")
    assert str(tuned) == "tuned:file=plan.json@0.1:least=64" and tuned.budget == Share(0.1, least=64)


@pytest.mark.parametrize("name", FORMER)
def test_parts_of_earlier_versions_are_told_what_to_hand_over(name: str) -> None:
    selector: Any = type("Earlier", (H2O,), {"__slots__": (), name: True})()
    with pytest.raises(kvpolicy.KVPolicyTypeError, match=f"which has {name}; try "):
        Policy(selector=selector)
