"""What depends on the version of transformers."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, cache_utils
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.hf import cache_names
from kvpolicy.hf.cache_names import (
    CACHE,
    NEW,
    OLD,
    OLDEST,
    cache_argument,
    cache_name,
    check_cache_name,
    check_version,
    output_cache,
    passed_cache,
    rename_cache,
)
from tests.conformance.models import build

IDS = torch.arange(3, 23)[None]


class Old(nn.Module):
    """A module with code of its own, from before the name changed."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None) -> Any:
        return past_key_values


class New(nn.Module):
    def forward(self, input_ids: Any = None, cache: Any = None) -> Any:
        return cache


class Wrapper(nn.Module):
    """Such as an adapter or an engine, which names no arguments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("kind,name", [(Old, OLD), (New, NEW)])
def test_the_name_is_that_of_the_forward(kind: type[nn.Module], name: str) -> None:
    for module in (kind(), Wrapper(kind()), Wrapper(Wrapper(kind()))):
        assert cache_name(module) == name
        cache = DynamicCache()
        assert module(**cache_argument(module, cache)) is cache
    assert cache_name(nn.Linear(1, 1)) == CACHE


def test_a_renamed_call_has_one_name() -> None:
    for given in ({OLD: 1}, {NEW: 1}, {OLD: 1, NEW: None}, {OLD: None, NEW: 1}):
        for name in (OLD, NEW):
            call: dict[str, Any] = dict(given)
            rename_cache(call, name)
            assert call == {name: 1}
        assert passed_cache(dict(given)) == 1
    call = {"other": 2}
    rename_cache(call, NEW)
    assert call == {"other": 2}
    assert passed_cache({}) is None


@pytest.mark.parametrize("name", [NEW, OLD])
def test_users_may_pass_either_name(name: str) -> None:
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, "window@0.5") as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, to those who pass the old name
        cache = kvpolicy.PolicyCache(model)
        assert output_cache(model(IDS, **{name: cache})) is cache
        model(IDS[:, :1], **{name: cache})
        assert cache.get_seq_length() == 21
        decoder = kvpolicy.PolicyCache(model)
        model.model(IDS, **{name: decoder})
        assert decoder.get_seq_length() == 20
        generating = kvpolicy.PolicyCache(model)
        out = model.generate(IDS, **{name: generating}, max_new_tokens=3, return_dict_in_generate=True)
        assert output_cache(out) is generating
        assert handle.cache is generating
        assert torch.equal(out.sequences, model.generate(IDS, max_new_tokens=3))


class OldOuter(LlamaForCausalLM):
    """A model that passes on the cache by the old name alone, such as Falcon before transformers 5.24."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        kwargs.pop(NEW, None)
        return super().forward(input_ids, **cache_argument(self.model, past_key_values), **kwargs)


@pytest.mark.parametrize("name", [NEW, OLD])
def test_a_model_that_passes_on_the_old_name_alone_takes_either(name: str) -> None:
    model = OldOuter(build("llama", layers=2).config).eval()
    with torch.no_grad(), kvpolicy.attach(model, "window@0.5"):
        cache = kvpolicy.PolicyCache(model)
        model(IDS, **{name: cache})
        assert cache.get_seq_length() == IDS.shape[1]


@pytest.mark.parametrize("policy", ["snapkv@0.5", "kvzip@0.5", "squeeze+window@0.5", "full"])
@pytest.mark.parametrize("tile", [None, 8])
def test_no_warning_reaches_who_does_not_pass_the_old_name(policy: str, tile: int | None) -> None:
    model = build("llama", layers=2)
    with torch.no_grad(), kvpolicy.attach(model, policy, tile=tile), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        cache = kvpolicy.PolicyCache(model, prompt=20, new=3)
        model(IDS, **{CACHE: cache})
        model(IDS[:, :1], **{CACHE: cache})
        model.generate(IDS, max_new_tokens=3)
        model.generate(IDS, max_new_tokens=3, num_beams=2)


def test_a_decoder_with_another_name_is_refused_with_the_version() -> None:
    class Renamed(nn.Module):
        def forward(self, input_ids: Any, store: Any = None) -> Any: ...

    with pytest.raises(kvpolicy.KVPolicyError, match=re.escape(transformers.__version__)):
        check_cache_name(Renamed())
    check_cache_name(New())
    check_cache_name(Old())


@pytest.mark.parametrize(
    "version,refused", [("5.17.0", True), ("4.57.6", True), ("5.18.0", False), ("6.0.0.dev0", False)]
)
def test_old_versions_are_refused(version: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attach = kvpolicy.attach  # loaded first: what it imports of transformers sets the version again
    model = build("llama", layers=2)
    monkeypatch.setattr("kvpolicy.hf.cache_names.transformers.__version__", version)
    if not refused:
        return check_version()
    with pytest.raises(kvpolicy.KVPolicyError, match=rf"must be 5.18 or newer, got {re.escape(version)}"):
        attach(model, "full")


def test_the_oldest_version_is_that_of_the_package() -> None:
    path = Path(__file__).parents[2] / "pyproject.toml"
    if not path.exists():
        pytest.skip("the source tree is not here")
    found = re.search(r"transformers>=([\d.]+)", path.read_text(encoding="utf-8"))
    assert found is not None and found[1] == ".".join(map(str, OLDEST))


pytest.importorskip("transformers")


def test_where_transformers_has_none_no_layer_is_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)
    absent = runpy.run_path(cache_names.__file__)["DummyLayer"]
    assert not isinstance(cache_utils.DynamicLayer(), absent)
