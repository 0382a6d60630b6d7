"""A policy's words, and its plain data, are read and written without loss; what is not a policy is a ValueError."""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpolicy
from kvpolicy import KIVI, Even, KeepAll, Plain, Policy, Pyramid, SnapKV, Uniform, registry
from kvpolicy.text import grammar
from kvpolicy.text.part_fields import part_from_dict, part_to_dict
from tests.conformance.policies import star_of_three
from tests.conformance.policies import words as spec_of_parts
from tests.sampling import each_once, product


@dataclass(frozen=True, kw_only=True, slots=True)
class Every:
    """A strategy with a field of every type."""

    count: int = 3
    share: float = 0.5
    on: bool = False
    word: Literal["first", "best"] = "first"
    bits: Literal[2, 4] = 2
    file: str | None = None
    most: int | None = None
    title: str = "x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrap:
    """A wrapper with a default base."""

    base: Any = field(default_factory=Every)
    file: str = ""


@pytest.fixture(autouse=True, scope="module")
def named() -> Iterator[None]:
    """Register the strategies of this module."""
    table = registry._table()
    table |= {"every": ("codec", f"{__name__}:Every"), "wrap": ("codec", f"{__name__}:Wrap")}
    original = registry._load
    own = {"every": Every, "wrap": Wrap}
    registry._load = lambda name, target: own.get(name) or original(name, target)
    yield
    registry._load = original
    registry._table.cache_clear()


def read(text: str) -> Any:
    return grammar.parse(text)[0]["codec"]


def test_values_are_typed_by_the_fields() -> None:
    assert read("every:count=-2:share=1:on=true:word=best:bits=4:file=a/b.json:most=7:title=none") == Every(
        count=-2, share=1.0, on=True, word="best", bits=4, file="a/b.json", most=7, title="none"
    )
    assert read("every:file=none:most=none") == Every()
    assert isinstance(read("every:share=1").share, float)


def test_parts_come_in_any_order() -> None:
    assert Policy.parse("kivi:bits=4+pyramid") == Policy(codec=KIVI(bits=4), allocator=Pyramid())
    assert str(Policy.parse("kivi+pyramid")) == "pyramid+kivi"


@pytest.mark.parametrize(
    "text",
    [
        "snapkv + tokenwise @ 20%",
        " tokenwise+snapkv@0.20 ",
        "snapkv\t+ tokenwise : bits = 4 @20 %",
        "uniform + snapkv+tokenwise@20.0%",
    ],
)
def test_spaces_and_percent_have_one_canonical_form(text: str) -> None:
    policy = Policy.parse(text)
    bits = ":bits=4" if "bits" in text else ""
    assert str(policy) == str(Policy.parse(str(policy))) == str(Policy.parse(f"snapkv+tokenwise{bits}@0.2"))
    assert policy == Policy.parse(f"snapkv+tokenwise{bits}@0.2")


def test_spaces_around_a_whole_policy() -> None:
    assert Policy.parse(" full ") == Policy()
    assert Policy.parse("tuned : file = plan.json @ 10%") == Policy.parse("tuned:file=plan.json@0.1")


@pytest.mark.parametrize("thing", [Policy.parse("snapkv@0.2"), 0.2])
def test_what_is_no_text_is_told(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"A spec must be a string, got (Policy|float); try Policy\.of"):
        Policy.parse(thing)


def test_left_wraps_right() -> None:
    assert read("wrap:file=f/every:count=4") == Wrap(file="f", base=Every(count=4))
    assert read("wrap/wrap/every:bits=4") == Wrap(base=Wrap(base=Every(bits=4)))
    assert grammar.show({"codec": Wrap()}, None) == "wrap"
    assert grammar.show({"codec": Wrap(base=Plain(), file="a/b")}, 0.5) == "wrap:file=a/b/plain@0.5"


PATHS = ["a/lowrank", "/lowrank", "lowrank", "a/kivi", "kivi/b", "a/tokenwise:x", "a/b"]


@product("path,base", PATHS, ["", "/tokenwise:bits=2"], sample=each_once(PATHS, ["", "/tokenwise:bits=2"]))
def test_a_path_of_a_codec_that_wraps_may_hold_the_name_of_a_codec(path: str, base: str) -> None:
    codec = Policy.parse(f"window+lowrank{base}@0.5").codec
    policy = Policy.parse("window@0.5")
    policy = dataclasses.replace(policy, codec=dataclasses.replace(codec, calibration=path))  # pyright: ignore
    assert Policy.parse(str(policy)) == policy
    assert ("%2F" in str(policy)) == (path == "a/kivi")


@pytest.mark.parametrize("path", ["a/adakv", "even/adakv/b.json", "/duo", "a/duo:x", "adakv", "a/adakv.json"])
def test_a_path_may_hold_the_name_of_a_head_allocator(path: str) -> None:
    """Which behind a slash would be the head allocator."""
    for heads in (None, Even()):
        policy = Policy(allocator=kvpolicy.SqueezeAttention(profile=path, heads=heads), selector=SnapKV(), budget=0.5)
        assert Policy.parse(str(policy)) == policy


def test_path_holds_what_a_path_may_hold() -> None:
    for path in ("/data/a b,c.json", "C:\\p+q@2%41.json", "ü/é~$'\"", "none", "\udcff"):
        policy = Policy(allocator=kvpolicy.SqueezeAttention(profile=path))
        assert set(str(policy)) <= set(string.ascii_letters + string.digits + ":=_.-/%")
        assert Policy.parse(str(policy)) == policy
    assert str(Policy(allocator=kvpolicy.SqueezeAttention(profile="/a/b_c.json"))) == "squeeze:profile=/a/b_c.json"


RENAMED = {
    "csr:s=4": "csr:nnz=4",
    "csr:sn=4": "csr:value_chunks=4",
    "csr:frame=pre": "csr",
    "csr:frame=post": "csr:key_space=rotated",
    "csr:frame=rotated": "csr:key_space=rotated",
    "csr:key_space=post": "csr:key_space=rotated",
    "csr:online=3": "csr:prompt_atoms=3",
    "csr:guard=2": "csr:outlier_atoms=2",
    "csr:top=16": "csr:read_top_k=16",
    "csr:distance=9": "csr:approx_distance=9",
    "csr:s=8:online=0:sn=1:coef=fp8:top=5:guard=1": (
        "csr:value_chunks=1:coef=fp8:prompt_atoms=0:outlier_atoms=1:read_top_k=5"
    ),
    "staircase:eight=4:four=8": "staircase:tokens_8bit=4:tokens_4bit=8",
}


@pytest.mark.parametrize(("former", "present"), RENAMED.items())
def test_former_names_still_parse(former: str, present: str) -> None:
    for spec in (former, f"h2o+{former}@0.5"):
        policy = Policy.parse(spec)
        assert policy == Policy.parse(spec.replace(former, present))
        assert str(policy) == spec.replace(former, present)


@pytest.mark.parametrize("spec", ["csr:s=4:nnz=4", "csr:nnz=4:s=4", "csr:s=4:s=4"])
def test_a_former_and_a_present_name_are_refused_together(spec: str) -> None:
    with pytest.raises(ValueError, match=r"'csr' must be given once, got 'nnz' \(formerly 's'\) twice"):
        Policy.parse(spec)


@pytest.mark.parametrize("name", ["csr", "staircase"])
def test_former_names_are_for_specs_alone(name: str) -> None:
    _, cls = registry.lookup(name)
    for former, present in cls.ALIASES.items():
        value = getattr(cls(), present)
        assert cls(**{present: value}) == cls()
        with pytest.raises(TypeError, match=f"'{former}'"):
            cls(**{former: value})


@pytest.mark.parametrize(
    ("split", "base"), each_once(["0.0", "0.3", "0.5", "0.99", "0.999999"], ["h2o", "streaming:sinks=6"])
)
def test_the_least_budget_of_a_split(split: str, base: str) -> None:
    """It leaves the base its own, and one token less does not."""
    selector: Any = Policy.parse(f"kvcrush:split={split}/{base}@0.5").selector
    of_base = [
        floor - floor * round(float(split) * 10**6) // 10**6 for floor in (selector.min_tokens, selector.min_tokens - 1)
    ]
    assert of_base[0] == selector.base.min_tokens > of_base[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "parts of a policy must not be empty, got ''"),
        ("kivvi", "strategy must have a registered name, got 'kivvi'; did you mean 'kivi'"),
        ("kivi+plain", "at most one codec, got 'kivi\\+plain'"),
        ("kivi:bit=4", "must be among bits, key_bits, value_bits, .*, residual_length, got 'bit'; did you mean 'bits'"),
        ("plain:bits=4", "'plain' must be given without options, got 'bits'"),
        ("kivi:bits", "'bits' of 'kivi' must have a value; write bits=value"),
        ("kivi:bits=4:bits=2", "'bits' twice"),
        ("kivi:bits=3", "option kivi:bits must be 2 or 4 or 8, got '3'"),
        ("kivi:group_size=1.5", "kivi:group_size must be an integer, got '1.5'"),
        ("kivi:group_size=0", r"KIVI\.group_size must be at least 1, got 0; try 32"),
        ("squeeze:keep_share=much", "squeeze:keep_share must be a number, got 'much'"),
        ("squeeze:keep_share=nan", "must be a number, got 'nan'"),
        ("squeeze:profile=a,b", "squeeze:profile must be a string of .*, got 'a,b'"),
        ("csr:frame=both", "csr:key_space must be unrotated or rotated, got 'both'"),
        ("every:on=1", "every:on must be true or false, got '1'"),
        ("every:word=bset", "must be first or best, got 'bset'; did you mean 'best'"),
        ("wrap:base=every", "base of 'wrap' must be written after '/', got the option 'base'; try wrap/tokenwise"),
        ("kvcrush:base=h2o", "base of 'kvcrush' must be written after '/', got the option 'base'; try kvcrush/h2o"),
        ("kivi/plain", "must be a strategy that wraps another, got 'kivi'"),
        ("wrap/pyramid", "'wrap' must wrap a codec, got the allocator 'pyramid'; use '\\+'"),
        ("wrap" + "/wrap" * 5000, "must nest at most 8 strategies"),
        ("kivi=4", "must be written as kivi:key=value, got 'kivi=4'"),
        ("kivi@", "budget must be .*, got ''"),
        ("kivi@0.2@3", "budget"),
        ("snapkv@0.2 0.3", "budget"),
        ("snapkv@20%%", "budget"),
        ("kivi@2", "must have a selector"),
        ("ki vi", "did you mean 'kivi'"),
        ("kivi:group_size=" + "9" * 9999, "must be an integer, got '9999"),
        ("streaming:sinks=2147483648", r"sinks must be below 2\^31 in magnitude, got 2147483648"),
        ("kvcrush:seed=" + "9" * 26, r"must be below 2\^31"),
        ("snapkv:kernel=32769", r"SnapKV\.kernel must be an odd number between 1 and 32767, got 32769"),
        ("rotate:sinks=32768", r"RotateKV\.sinks must be between 0 and 32767, got 32768"),
        ("kvcrush:split=0.9999999", r"KVCrush\.split must be between 0 and 0\.999999.*, got 0\.9999999"),
        ("kvcrush:split=-0.1", r"KVCrush\.split must be .*, got -0\.1"),
        ("uniform:skip=" + "9" * 5000 + "-2+h2o@0.5", "option uniform:skip must be .*, got '9999"),
        ("h2o@9223372036854775807", "got 9223372036854775807 tokens"),
    ],
)
def test_what_is_no_policy_is_told(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


@pytest.mark.parametrize(
    "text", ["", " ", "@0.3", "snapkv+", "+h2o", "snapkv++kivi", "kvcrush/", "kvcrush//h2o", ":bits=4"]
)
def test_an_empty_part_is_told_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Policy.parse(text)
    told = str(caught.value)
    assert "must not be empty" in told and told.count(". ") == 0
    assert "turboquant" not in told, "the list of all strategies explains nothing here"


PLACES = ["X", "h2o:X", "h2o:recent=X", "h2o@X", "h2o@5X", "h2o+X/h2o", "h2o+h2o+X", "+X", "h2o=X", "kivi:bits=X"]


@pytest.mark.parametrize("text", [*PLACES, "plain:X", "h2o@" + "9" * 900])
def test_a_long_text_is_not_repeated(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Policy.parse(text.replace("X", "x" * 10_000))
    assert "..." in str(caught.value) and len(str(caught.value)) < 1000


words = st.sampled_from(
    [*registry.names(), "full", "every", "wrap", "none", *"+/:@=%.-_ ", "share", "bits", "base", "profile", "0.2", "4"]
)


@given(st.text() | st.lists(words).map("".join) | st.lists(words | st.text(max_size=2)).map("".join))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_is_a_policy_or_a_value_error(text: str) -> None:
    try:
        policy = Policy.parse(text)
    except ValueError as error:
        assert str(error)
        return
    assert Policy.parse(str(policy)) == policy


shares = st.floats(0, 1, exclude_min=True)
paths = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
allocators = st.one_of(
    st.just(Uniform()),
    st.builds(Pyramid, beta=st.floats(1, 1e30)),
    st.builds(kvpolicy.SqueezeAttention, keep_share=shares, groups=st.integers(2, 9), profile=paths),
)
every = st.builds(
    Every,
    count=st.integers(-9, 9),
    share=st.floats(allow_nan=False, allow_infinity=False),
    on=st.booleans(),
    word=st.sampled_from(["first", "best"]),
    bits=st.sampled_from([2, 4]),
    file=paths,
    most=st.none() | st.integers(0, 9),
    title=st.text(st.characters(exclude_categories=["Cs"])),
)
codecs = st.one_of(
    st.just(Plain()),
    st.builds(KIVI, bits=st.sampled_from([2, 4, 8]), group_size=st.integers(1, 99), residual_length=st.integers(0, 99)),
)


def selectors() -> st.SearchStrategy[Any]:
    """Every registered selector with its defaults, and the wrappers over them."""
    plain = [registry.lookup(name)[1] for name in registry.names("selector")]
    wrappers = [cls for cls in plain if "base" in cls.__dataclass_fields__]
    bases = [cls for cls in plain if cls not in wrappers and cls is not KeepAll]
    built = [cls() for cls in plain]
    for cls in wrappers:
        for base in bases:
            with suppress(kvpolicy.KVPolicyError):  # some wrap only what holds attention
                built.append(cls(base=base()))
    return st.sampled_from([each for each in built if not isinstance(each, KeepAll)])


@given(
    allocators, st.data(), codecs, st.none() | shares | st.integers(500, 10**9) | st.sampled_from(["512MiB", "1.5GB"])
)
@settings(deadline=None)
def test_every_policy_survives_its_words(allocator: Any, data: st.DataObject, codec: Any, budget: Any) -> None:
    policy = Policy(allocator=allocator, codec=codec)
    assert Policy.parse(str(policy)) == policy
    policy = Policy(allocator=allocator, selector=data.draw(selectors()), codec=codec, budget=budget)
    again = Policy.parse(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert type(again.budget) is type(policy.budget)
    assert "," not in str(policy)


@given(st.recursive(every, lambda inner: st.builds(Wrap, base=inner, file=st.just("a/b")), max_leaves=4))
@settings(deadline=None)
def test_every_value_survives_its_words(strategy: Any) -> None:
    assert read(grammar.show({"codec": strategy}, None)) == strategy


def test_value_that_has_no_words_is_told() -> None:
    with pytest.raises(ValueError, match="to be written in a spec, got a list"):
        grammar.show({"codec": Every(title=[1])}, None)  # pyright: ignore[reportArgumentType]


WRAPPED = "squeeze/adakv:safeguard=0.1+kvcrush:split=0.5/snapkv:window=6@512MiB"


def test_policies_pass_through_json() -> None:
    rows = [spec_of_parts(*row) for row in star_of_three()]
    for text in [*rows, WRAPPED, "full", "h2o+merge+quest:read=64@300"]:
        policy = Policy.parse(text)
        again = Policy.from_dict(json.loads(json.dumps(policy.to_dict())))
        assert again == policy and str(again) == str(policy)


def test_every_field_is_stated_and_a_missing_one_has_its_default() -> None:
    sides = {"key_bits": "auto", "value_bits": "auto"}
    assert part_to_dict(KIVI()) == {"kivi": {"bits": 2, **sides, "group_size": 32, "residual_length": "auto"}}
    assert part_from_dict("codec", {"kivi": {"bits": 4}}) == KIVI(bits=4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"h2o": {}}, "A codec must be described"),
        ({"kivi": {}, "bfp": {}}, "one name with its fields"),
        ("kivi", "one name with its fields"),
        ({"kivi": {"bats": 4}}, "must be among bits, key_bits, value_bits, group_size, residual_length, got 'bats'"),
        ({"kivi": {"bits": 3}}, "KIVI.bits must be one of"),
        ({"kivi": 4}, "must be described"),
        ({"kivi": {"bits": [4]}}, r"'bits' of 'kivi' must be a number, a bool, a string or None, got \[4\]"),
        ({"csr": {"dictionary": 4}}, "'dictionary' of 'csr' must be a string, got 4"),
    ],
)
def test_what_describes_no_codec(content: object, message: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        part_from_dict("codec", content)


def test_unknown_parts_of_a_policy() -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match="by its parts and its budget, got 'chooser'"):
        Policy.from_dict({"chooser": {"h2o": {}}})
