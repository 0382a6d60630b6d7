"""Wrong arguments are answered with one sentence that names what was probably meant, and right ones as before."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import kvpolicy
from kvpolicy import CSR, H2O, KIVI, TOVA, KVCrush, KVPolicyError, KVPolicyTypeError, Plain, Policy, SnapKV, registry
from kvpolicy.helpers import named_options
from kvpolicy.planning.planner import base_tokens


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """A method of a user, which takes one option and fails inside for another reason."""

    primes: int = 2

    def __post_init__(self) -> None:
        if self.primes == 0:
            raise TypeError("inside")


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: SnapKV(window_size=32), "must be among window, .*, got 'window_size'; try window=32."),  # pyright: ignore[reportCallIssue]
    (lambda: SnapKV(kernel_size=5), "; try kernel=5."),  # pyright: ignore[reportCallIssue]
    (lambda: SnapKV(windw=32), "got 'windw'; did you mean 'window'?"),  # pyright: ignore[reportCallIssue]
    (lambda: SnapKV(zebra=object()), "decode, got 'zebra'."),  # pyright: ignore[reportCallIssue]
    (lambda: SnapKV(compression_ratio=0.7), r"; try Policy\(..., budget=0.3\), the fraction that is kept."),  # pyright: ignore[reportCallIssue]
    (lambda: SnapKV(32), r"SnapKV must be given by name, got 32; try SnapKV\(window=32\)."),  # pyright: ignore[reportCallIssue]
    (lambda: SnapKV(32, 7), r"; try SnapKV\(window=32\)."),  # pyright: ignore[reportCallIssue]
    (lambda: SnapKV(True), r"got True; try SnapKV\(window=..., kernel=..., pool=...\)."),  # pyright: ignore[reportCallIssue]
    (lambda: TOVA(1), r"got 1; try TOVA\(decode=...\)."),  # pyright: ignore[reportCallIssue]
    (lambda: Plain(1), "Plain must be given at most 0 options, got 1."),  # pyright: ignore[reportCallIssue]
    (lambda: Plain(bits=4), "Plain must be given without options, got 'bits'."),  # pyright: ignore[reportCallIssue]
    (lambda: kvpolicy.StreamingLLM(num_sinks=4), "; try sinks=4."),  # pyright: ignore[reportCallIssue]
    (lambda: KIVI(nbits=4), "; try bits=4."),  # pyright: ignore[reportCallIssue]
    (lambda: CSR(s=8), "; try nnz=8."),  # pyright: ignore[reportCallIssue]
    (lambda: KVCrush(H2O(recent=0.25)), r"; try KVCrush\(base=H2O\(recent=0.25, decode='evict'\)\)."),  # pyright: ignore[reportCallIssue]
    (lambda: Policy("snapkv@0.2"), r"; try Policy.parse\('snapkv@0.2'\)."),  # pyright: ignore[reportCallIssue]
    (lambda: Policy(compression_ratio=0.75), "; try budget=0.25, the fraction that is kept."),  # pyright: ignore[reportCallIssue]
    (lambda: Policy(max_capacity_prompt=512), "; try budget=512."),  # pyright: ignore[reportCallIssue]
    (lambda: Own(prime=3), "got 'prime'; did you mean 'primes'?"),  # pyright: ignore[reportCallIssue]
    (lambda: kvpolicy.attach(None, "h2o", compression_ratio=0.5), "arguments of attach .*; try budget=0.5, the"),  # pyright: ignore
    (lambda: kvpolicy.attach(None, "h2o", window=9), "; the options of a method belong to the policy, as in policy="),  # pyright: ignore
    (lambda: kvpolicy.attach(None, "h2o", 0.5), r"by name, got 0.5; try attach\(..., budget=..., tile"),  # pyright: ignore
    (lambda: kvpolicy.attach(), "attach must be given model and policy, got no model and policy."),  # pyright: ignore
    (lambda: kvpolicy.attach(None, model=None, policy="h2o"), "attach must be given once, got 'model' twice."),  # pyright: ignore
    (lambda: kvpolicy.plan("tiny", "h2o", batch_size=4), "; try batch=4."),  # pyright: ignore[reportCallIssue]
    (lambda: kvpolicy.plan("tiny", "h2o", compression_ratio=0.5), "; try policy='snapkv@0.5', the fraction"),  # pyright: ignore
    (lambda: kvpolicy.PolicyCache(None, "h2o", max_length=9), "arguments of PolicyCache .*; try prompt=9."),  # pyright: ignore
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(KVPolicyTypeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and caught.value.__context__ is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapkv:window_size=16", r"; try window=16\.$"),
        ("snapkv:compression_ratio=0.9", r"; try @0\.1, the fraction that is kept\.$"),
        ("kivi:nbits=4", r"; try bits=4\.$"),
        ("snapkv:windw=4", r"; did you mean 'window'\?$"),
    ],
)
def test_specs_know_the_same_terms(spec: str, message: str) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        Policy.parse(spec)


def test_every_method_explains_its_options_and_keeps_its_signature() -> None:
    for _, cls in map(registry.lookup, registry.names()):
        with pytest.raises(KVPolicyTypeError, match=f"{cls.__name__} must be"):
            cls(no_such_option=1)
        with pytest.raises(KVPolicyTypeError, match=f"{cls.__name__} must be given"):
            cls(object())
        signature = inspect.signature(cls)
        assert list(signature.parameters) == [field.name for field in fields(cls) if field.init], cls
        made = cls()
        assert replace(made) == made == copy.deepcopy(made)


def test_an_error_inside_a_call_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match=r"^inside$") as caught:
        Own(primes=0)
    assert not isinstance(caught.value, kvpolicy.KVPolicyError)
    with pytest.raises(KVPolicyTypeError, match=r"SnapKV\.window must be an integer, got 'x'"):
        SnapKV(window="x")  # pyright: ignore[reportArgumentType]


def test_functions_keep_their_signatures() -> None:
    assert str(inspect.signature(kvpolicy.attach)).startswith("(model: 'nn.Module', policy: 'Policy | str', *, budget:")
    wrapped: list[Any] = [kvpolicy.attach, kvpolicy.plan, kvpolicy.speculate, kvpolicy.profile, kvpolicy.tiny]
    for function in wrapped:
        assert function.__doc__
        with pytest.raises(KVPolicyTypeError, match=f"of {function.__name__} must be"):
            function(no_such_argument=1)


def test_dir_has_public_names_only() -> None:
    assert dir(kvpolicy) == sorted(["__version__", *vars(kvpolicy)["__all__"]])


def test_the_name_of_a_bundled_model_is_no_dtype() -> None:
    wrong: Any = "tiny-4k"
    with pytest.raises(KVPolicyTypeError, match=r"dtype must be a torch\.dtype, got 'tiny-4k'; try name='tiny-4k'"):
        kvpolicy.tiny(wrong)
    with pytest.raises(KVPolicyTypeError, match=r"got 'bf16'; try torch\.bfloat16"):
        kvpolicy.tiny(dtype="bf16")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", ["bf16", "auto", 16, "nn"])
def test_a_plan_takes_a_dtype(dtype: Any) -> None:
    with pytest.raises(KVPolicyTypeError, match=rf"dtype must be a torch\.dtype, got {dtype!r}; try torch\.bfloat16"):
        kvpolicy.plan("tiny", "h2o", prompt=9, dtype=dtype)


@pytest.mark.parametrize("given", [torch.zeros(40, 3), LlamaConfig(), "a\nb"], ids=["tensor", "config", "text"])
def test_a_value_of_several_lines_is_shown_in_one(given: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: kvpolicy.attach(given, "h2o@8"),
        lambda: kvpolicy.plan("tiny", "h2o@8", prompt=given),
        lambda: kvpolicy.SnapKV(window=given),
        lambda: Policy(selector=given, budget=8),
    ]
    for call in calls:
        with pytest.raises(KVPolicyError) as error:
            call()
        assert len(str(error.value).splitlines()) == 1
        assert str(copy.copy(error.value)) == str(error.value)


def test_numbers_of_numpy_are_those_of_python(tmp_path: Path) -> None:
    eight: Any = np.int64(8)
    half: Any = np.float32(0.5)
    words: Any = np.str_("max")
    parts: list[tuple[Any, Any]] = [
        (KIVI(bits=eight), KIVI(bits=8)),
        (SnapKV(window=eight, pool=words), SnapKV(window=8, pool="max")),
        (H2O(recent=half), H2O(recent=0.5)),
        (kvpolicy.Quest(read=eight), kvpolicy.Quest(read=8)),
        (kvpolicy.Quest(read=np.float64(0.5)), kvpolicy.Quest(read=0.5)),
        (kvpolicy.MiniCache(start=eight), kvpolicy.MiniCache(start=8)),
    ]
    for given, want in parts:
        assert given == want and repr(given) == repr(want)
    model, _ = kvpolicy.tiny()
    ids = torch.arange(60, 124)[None]
    with torch.no_grad(), kvpolicy.attach(model, Policy(codec=KIVI(bits=eight))) as handle:
        model(ids)
        assert handle.cache is not None
        handle.cache.save(tmp_path / "cache.safetensors")
        rows = handle.rows(2, 128)
        rows.put(eight - 7, handle.cache)
        rows.drop(eight - 7)
    with torch.no_grad(), kvpolicy.attach(model, "window@64"):
        moved: list[torch.Tensor] = []
        numbers: list[Any] = [int, np.int64]
        for number in numbers:
            cache = kvpolicy.PolicyCache(model)
            model(ids, cache=cache)
            cache.shift(number(30), number(-5))
            cache.shift(number(20), number(5))
            model(ids[:, :1], cache=cache)
            moved.append(cache.policy_layers[0].positions)
        assert torch.equal(*moved)
    hot = kvpolicy.speculate(model, "window@8", ids, max_new_tokens=3, temperature=half, seed=eight)
    assert torch.equal(hot, kvpolicy.speculate(model, "window@8", ids, max_new_tokens=3, temperature=0.5, seed=8))


def test_a_profile_is_not_written_to_a_folder(tmp_path: Path) -> None:
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\n" * 9, return_tensors="pt").input_ids
    with pytest.raises(kvpolicy.KVPolicyError, match="The file to write must be a file, got the folder"):
        kvpolicy.profile(model, [ids], tmp_path)
    kvpolicy.profile(model, [ids], tmp_path / "new" / "profile.json")
    assert (tmp_path / "new" / "profile.json").is_file()


def test_a_part_is_shown_as_in_a_spec() -> None:
    """Messages have what a user wrote; what no spec has is shown as in Python."""
    assert str(kvpolicy.KVzip()) == "kvzip" and str(kvpolicy.KVzip(sinks=8)) == "kvzip:sinks=8"
    assert repr(kvpolicy.KVzip()).startswith("KVzip(")
    assert str(KVCrush(base=H2O(recent=0.25))) == "kvcrush/h2o:recent=0.25"
    with pytest.raises(KVPolicyError, match=r"^The budget must be at least 5 tokens for streaming, got 4\.$"):
        Policy.parse("streaming@4")
    with pytest.raises(
        KVPolicyError, match=r"^The budget must be at least 4 tokens for kvzip, got 0\.005, which is 3 of 600"
    ):
        base_tokens(Policy.parse("uniform/adakv+kvzip@0.005"), torch.tensor([600]))
    for kind in ("selector", "codec", "reader", "merger", "allocator"):
        for name in registry.names(kind):
            cls = registry.lookup(name)[1]
            with contextlib.suppress(TypeError, ValueError):  # some need an argument
                part = cls()
                assert str(part).partition(":")[0].partition("/")[0] == name, kind
