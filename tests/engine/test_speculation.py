"""Speculation changes no token, and no distribution."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import KVPolicyError
from tests.conformance.models import build
from tests.conformance.policies import SELECTORS, words
from tests.engine.test_text_angles import adapting
from tests.sampling import each_once, product

PROMPT = 24
NEW = 8
TIE = 1e-3
"""Logits that are this close may change places, since several tokens and single ones differ by rounding."""


@functools.cache
def tiny() -> Any:
    return kvpolicy.tiny()[0]


def prompt(seed: int, vocabulary: int, length: int = PROMPT) -> Tensor:
    """Random tokens, of which the second half repeats the first, so that there is something to predict."""
    half = torch.randint(3, vocabulary, (1, length // 2), generator=torch.Generator().manual_seed(seed))
    return torch.cat([half, half], 1)


def check_same(model: Any, policy: str, ids: Tensor, new: int = NEW, gamma: int = 4) -> kvpolicy.SpeculationStats:
    """Speculation gives the tokens of plain greedy decoding; after a tie, any tokens."""
    plain = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    out, stats = kvpolicy.speculate(model, policy, ids, max_new_tokens=new, gamma=gamma, return_stats=True)
    assert out.shape == plain.shape and torch.equal(out[:, : ids.shape[1]], ids)
    if not torch.equal(out, plain):
        first = int((out != plain)[0].int().argmax())
        with torch.no_grad():
            top = model(plain[:, :first]).logits[0, -1].topk(2).values
        assert top[0] - top[1] < TIE
    assert new - 1 == stats.accepted + stats.rounds
    assert stats.rounds >= 1 and 0 <= stats.accepted <= stats.drafted
    return stats


@product("seed", range(200), sample=[(seed,) for seed in range(2)])
def test_greedy_tokens_are_those_of_the_full_cache(seed: int) -> None:
    model = tiny()
    check_same(model, "snapkv@8", prompt(seed, model.config.vocab_size))


DRAFTING = ["streaming", "keydiff", "kvzip", "tova"]
"""Of each kind one; that steps are undone is tested of every selector in `test_rollback`."""


@product("selector,seed", SELECTORS, range(20), sample=[(name, 0) for name in DRAFTING])
def test_every_selector_drafts(selector: str, seed: int) -> None:
    check_same(build("llama"), words(selector, budget="0.5"), prompt(seed, 48))


DRAFTERS = ["full", "window@4", words("h2o", "kivi"), words("uniform/adakv", "h2o")]


@product("policy,gamma", DRAFTERS, [1, 3, 20], sample=[*each_once(DRAFTERS, [3, 1, 20]), ("full", 1), ("full", 20)])
def test_a_perfect_and_a_bad_drafter(policy: str, gamma: int) -> None:
    stats = check_same(build("llama"), policy, prompt(0, 48), 14, gamma)
    if policy == "full":
        assert stats.acceptance == 1.0


def test_windows_of_hybrid_models_are_rolled_back() -> None:
    check_same(build("gemma2"), "h2o@0.3", prompt(1, 48), 20)


def test_on_a_model_with_a_policy_of_its_own() -> None:
    """Its policy stays attached."""
    model = build("llama")
    with kvpolicy.attach(model, "h2o@0.5") as handle:
        out = kvpolicy.speculate(model, "window@6", prompt(2, 48), max_new_tokens=5)
        with torch.no_grad():
            model(prompt(2, 48))
        assert handle.cache is not None and str(handle.cache.policy) == "h2o@0.5"
    assert torch.equal(out, kvpolicy.speculate(model, "window@6", prompt(2, 48), max_new_tokens=5))


def test_an_end_token_ends_the_text() -> None:
    model = build("llama")
    ids = prompt(3, 48)
    text = kvpolicy.speculate(model, "h2o@0.5", ids, max_new_tokens=12)[0, PROMPT:].tolist()
    for end in (text[0], text[4], [47, text[7]]):
        stop = min(text.index(token) for token in (end if isinstance(end, list) else [end]) if token in text)
        out = kvpolicy.speculate(model, "h2o@0.5", ids, max_new_tokens=12, eos_token_id=end)
        assert out[0, PROMPT:].tolist() == text[: stop + 1]


def test_what_a_generation_config_adds_to_logits_is_warned_of() -> None:
    model: Any = copy.deepcopy(build("llama", layers=2))
    model.generation_config.update(repetition_penalty=1.05, top_k=20, top_p=1.0, suppress_tokens=[])
    for temperature, ignored in ((0.0, "repetition_penalty=1.05 of"), (1.0, "repetition_penalty=1.05, top_k=20 of")):
        with pytest.warns(kvpolicy.KVPolicyWarning, match=f"without {ignored} the generation config") as caught:
            kvpolicy.speculate(model, "h2o@0.5", prompt(3, 48), max_new_tokens=2, temperature=temperature)
        assert [warning.filename for warning in caught] == [__file__]


REFUSED: dict[str, list[dict[str, Any]]] = {
    "one row": [{"input_ids": torch.ones(2, 4, dtype=torch.int64)}],
    "one row of at least one token": [{"input_ids": torch.ones(1, 0, dtype=torch.int64)}],
    "tensor of token ids": [{"input_ids": torch.ones(1, 4)}, {"input_ids": [[1, 2]]}],
    "in int64 or int32, got torch.uint8": [{"input_ids": torch.tensor([[1, 2]], dtype=torch.uint8)}],
    "in int64 or int32, got torch.bool": [{"input_ids": torch.tensor([[True]])}],
    "in int64 or int32, got torch.float32": [{"input_ids": torch.tensor([[1.0]])}],
    "input_ids must be between 0 and 47, .* got 48": [{"input_ids": torch.tensor([[1, 48]])}],
    "input_ids must be between 0 and 47, .* got -1": [{"input_ids": torch.tensor([[1, -1]])}],
    r"gamma must be between 1 and 2\^40": [{"gamma": 0}, {"gamma": 2**50}],
    "max_new_tokens must be an integer": [{"max_new_tokens": True}],
    "temperature must be a number from 0, and finite": [{"temperature": 10**400}, {"temperature": -1.0}],
    "seed must be an integer, got ('0'|True)": [{"seed": "0"}, {"seed": True}],
    "seed must be between": [{"seed": 2**64}, {"seed": -(2**64)}, {"seed": 10**5000}],
    "eos_token_id must be at least one token, or None": [{"eos_token_id": []}],
    "eos_token_id must be a token id": [{"eos_token_id": wrong} for wrong in ("2", True, 2.5, [2, None])],
    "eos_token_id must be between 0 and 47": [{"eos_token_id": wrong} for wrong in (-1, [2, 48], 10**5000)],
}


@pytest.mark.parametrize("message", REFUSED)
def test_mistakes_are_refused(message: str) -> None:
    for change in REFUSED[message]:
        given: dict[str, Any] = {"input_ids": prompt(0, 48), "max_new_tokens": 2, "gamma": 4, **change}
        with pytest.raises(KVPolicyError, match=message):
            kvpolicy.speculate(build("llama"), "h2o@0.5", **given)


@pytest.mark.parametrize(("kind", "lengths", "changing"), [("dynamic", [8], [20, 40]), ("longrope", [8, 40], [20])])
def test_angles_must_not_change_within_a_text(kind: str, lengths: list[int], changing: list[int]) -> None:
    """Tokens that are verified together have the angles of the longest text, single steps those of their own."""
    model = adapting(kind)
    for length in lengths:
        check_same(model, "snapkv@4", prompt(3, 48, length))
    for length in changing:
        refused = pytest.raises(KVPolicyError, match=f"must not change .*, got one of type {kind} with {length} tokens")
        with refused:
            kvpolicy.speculate(model, "snapkv@4", prompt(3, 48, length), max_new_tokens=NEW)
        kvpolicy.speculate(model, "snapkv@4", prompt(3, 48, length), max_new_tokens=1)


def test_samples_have_the_distribution_of_the_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square over all texts of two tokens: the rejection rule removes what the drafts prefer."""
    from kvpolicy.hf import speculation

    dice = torch.Generator().manual_seed(0)
    tables = {full: torch.randn(4, 4, generator=dice) * 1.5 for full in (True, False)}

    def logits(self: Any, cache: Any, ids: Tensor, *, last_only: bool = False) -> Tensor:
        return tables[cache is self._full][ids[0]]

    class Counted:
        """In place of a cache, whose tokens such a model does not see."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """Nothing to hold."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    monkeypatch.setattr(speculation._Run, "_forward", logits)
    monkeypatch.setattr(speculation, "PolicyCache", Counted)
    model: Any = build("llama")
    draws = 2500
    counts = torch.zeros(4, 4, 4, dtype=torch.float64)
    drafted = accepted = 0
    for seed in range(draws):
        run = speculation._Run(model, kvpolicy.Policy(), torch.tensor([[1]]), 3, 0.8, seed)
        tokens, stats = run.tokens(3, 2, frozenset())
        counts[tuple(tokens)] += 1
        drafted += stats.drafted
        accepted += stats.accepted
    weights = (tables[True].double() / 0.8).softmax(-1)
    wanted = draws * weights[1][:, None, None] * weights[:, :, None] * weights[None]
    often = wanted > 5
    chi = ((counts - wanted)[often] ** 2 / wanted[often]).sum()
    # With 63 degrees of freedom at most, 103 is exceeded once in a thousand times.
    assert float(chi) < 103
    assert 0.2 < accepted / drafted < 0.9
    # What drafts alone has another distribution, which the same test tells apart.
    wrong = (tables[False].double() / 0.8).softmax(-1)
    other = draws * weights[1][:, None, None] * wrong[:, :, None] * wrong[None]
    assert float(((counts - other)[often] ** 2 / other[often]).sum()) > 600


def test_sampling_runs_on_a_model_and_repeats_with_its_seed() -> None:
    model = build("llama")
    texts = [
        kvpolicy.speculate(model, "h2o@0.5", prompt(0, 48), max_new_tokens=12, temperature=1.0, seed=seed).tolist()
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_least_temperature_draws_the_most_probable_tokens() -> None:
    """Logits that are divided by it are infinite."""
    model = build("llama")
    options: dict[str, Any] = {"max_new_tokens": 6}
    cold = kvpolicy.speculate(model, "h2o@0.5", prompt(0, 48), temperature=5e-324, **options)
    assert cold.tolist() == kvpolicy.speculate(model, "h2o@0.5", prompt(0, 48), **options).tolist()
