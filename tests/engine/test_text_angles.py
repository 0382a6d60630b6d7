"""A text in pieces has the angles of one forward, or is refused, where these depend on the length."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError, PolicyCache
from kvpolicy.hf.rotary_lookup import changing_kind, least_with_angles
from kvpolicy.hf.text_angles import angles_of
from kvpolicy.tuning.evidence import score
from kvpolicy.tuning.measure import layer_kls
from kvpolicy.tuning.windows import Window
from tests.conformance.models import build
from tests.conformance.play import make_batch

TRAINED = 26
KINDS = ["dynamic", "longrope"]


def adapting(kind: str) -> Any:
    """A model whose angles change behind 26 tokens."""
    model: Any = copy.deepcopy(build("llama", layers=2))
    pairs = model.config.head_dim // 2
    scaled = {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs, "original_max_position_embeddings": TRAINED}
    model.config.max_position_embeddings = TRAINED
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    model.config.rope_parameters |= scaled if kind == "longrope" else {}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def in_pieces(model: Any, ids: Tensor, sizes: list[int], cache: PolicyCache) -> Tensor:
    return torch.cat([model(part, cache=cache).logits for part in ids.split(sizes, 1)], 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[20, 20], [10, 10, 20], [30, 10], [20, 1, 19], [39, 1]])
def test_pieces_have_the_angles_of_one_forward(kind: str, sizes: list[int]) -> None:
    ids, _ = make_batch([40], [40])
    model = adapting(kind)
    with torch.no_grad():
        want = adapting(kind)(ids).logits
        model(torch.cat([ids, ids], 1))  # `dynamic` remembers the longest text
        with kvpolicy.attach(model, "full"), angles_of(model, 40):
            got = in_pieces(model, ids, sizes, PolicyCache(model))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert not model.model.rotary_emb._forward_pre_hooks and not model.model.rotary_emb._forward_hooks
        assert torch.equal(adapting(kind)(ids[:, :20]).logits, model(ids[:, :20]).logits), "a short text has its own"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("announced", [None, 40])
def test_pieces_whose_angles_change_are_refused_before_the_cache_does(kind: str, announced: int | None) -> None:
    ids, _ = make_batch([40], [40])
    model = adapting(kind)
    with torch.no_grad(), kvpolicy.attach(model, "h2o@0.5"):
        cache = PolicyCache(model, prompt=announced)
        model(ids[:, :20], cache=cache)
        before = cache.nbytes
        with pytest.raises(KVPolicyError, match=rf"behind a cache must have the angles .* {kind}, .* 20 and 40 tokens"):
            model(ids[:, 20:], cache=cache)
        assert cache.nbytes == before and cache.get_seq_length() == 20
        model(ids[:, 20:26], cache=cache)  # up to there, nothing changes
        assert cache.get_seq_length() == 26
        with pytest.raises(KVPolicyError, match="angles"):
            model.generate(ids, prefill_chunk_size=20, max_new_tokens=2)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_a_generation_are_those_of_the_stock_cache(kind: str) -> None:
    """Which has angles of its own for each step."""
    ids, _ = make_batch([24], [24])
    settings: Any = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    stock = adapting(kind).generate(ids, **settings)
    model = adapting(kind)
    with kvpolicy.attach(model, "full"):
        assert torch.equal(model.generate(ids, **settings), stock)


def test_the_least_text_is_one_with_the_same_angles() -> None:
    for kind in KINDS:
        config = adapting(kind).config
        for length in (1, TRAINED, TRAINED + 1, 40):
            least = least_with_angles(config, length)
            assert least <= length and not changing_kind(config, least, length)
            assert least == 1 or changing_kind(config, least - 1, least) == kind
    assert least_with_angles(build("llama").config, 999) == 1


def test_other_threads_have_angles_of_their_own() -> None:
    ids, _ = make_batch([40], [40])
    model = adapting("longrope")
    found: list[Tensor] = []

    def short() -> None:
        with torch.no_grad():
            found.append(model(ids[:, :20], use_cache=False).logits)

    with torch.no_grad(), angles_of(model, 40):
        thread = threading.Thread(target=short)
        thread.start()
        thread.join()
        assert not torch.allclose(model(ids[:, :20], use_cache=False).logits, found[0], atol=1e-3)
    short()
    assert torch.equal(*found)


def test_a_kind_without_a_module_is_refused() -> None:
    model = adapting("dynamic")
    model.model.rotary_emb = torch.nn.Identity()
    refused = pytest.raises(KVPolicyError, match=r"must be a module of the model .* kind dynamic alone")
    with refused, angles_of(model, 40):
        pass
    with angles_of(model, TRAINED):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_the_tuner_have_one_kind_of_angles(kind: str) -> None:
    ids, _ = make_batch([40], [40])
    model = adapting(kind)
    short = Window(ids[0, :18], ids[0, 18:TRAINED])
    long = Window(ids[0, :18], ids[0, 18:])
    assert layer_kls(model, [short], ["h2o@0.5"]).isfinite().all()
    assert score(model, [short], "h2o@0.5")
    for measure in (layer_kls, score):
        refused = pytest.raises(KVPolicyError, match=rf"What follows the prompt of a window .* {kind}, .* 18 and 40")
        with refused:
            measure(model, [long], ["h2o@0.5"] if measure is layer_kls else "h2o@0.5")  # pyright: ignore
