"""Budgets that are divided where rounding, a floor or a limit decides, and plans of one rank beside the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvpolicy
from kvpolicy import Policy
from kvpolicy.hf.layer_sizes import widths_of
from kvpolicy.hf.model_spec import describe
from kvpolicy.planning.activations import Prefill, Widths
from kvpolicy.planning.memory import pages_of, prefill_peak, waiting_bytes
from kvpolicy.planning.tokens import Tokens, tokens_of
from kvpolicy.planning.tuned import lengths, resolve
from kvpolicy.policy import TunedPolicy
from kvpolicy.policy.tuned import TunedFile
from kvpolicy.protocols import LayerShape, ModelInfo
from kvpolicy.text.limits import MAX_SIZE
from tests.conformance.models import build
from tests.planning.test_tuned import draw_curves, save_curves

SHAPE = LayerShape(1, 8, torch.float32)


def config(layers: int = 2, **changed: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 9}
    sizes |= {"intermediate_size": 16, **changed}
    return LlamaConfig(num_hidden_layers=layers, dtype=torch.float32, **sizes)


def tokens(policy: Policy | str, **how: Any) -> list[int]:
    return [layer.tokens for layer in kvpolicy.plan(config(), policy, **how).layers]


@pytest.mark.parametrize(("prompt", "kept"), [(5, 5), (6, 6), (12, 6)])
def test_a_prompt_up_to_the_minimum_of_its_selector_is_kept_whole(prompt: int, kept: int) -> None:
    assert Policy.parse("streaming:sinks=5@0.5").min_tokens == 6
    assert tokens("streaming:sinks=5@0.5", prompt=prompt) == [kept] * 2


def test_all_of_a_text_is_all_of_it_in_layers_of_small_shares() -> None:
    assert tokens(Policy.by_layer(["window@0.02", "window@0.9"], budget=1.0), prompt=77) == [77, 77]


@pytest.mark.parametrize(("share", "kept"), [(0.29, 29), (0.57, 57), (0.58, 58), (0.07, 7)])
def test_shares_of_layers_whose_bytes_fit_exactly(share: float, kept: int) -> None:
    """The bytes of one layer of 100 tokens and one of its share, which products such as 0.29 * 100 fall short of."""
    digest = 8  # of the mask, once in a cache
    alone = [kvpolicy.plan(config(1), f"window@{count}", prompt=200).nbytes for count in (100, kept)]
    policy = Policy.by_layer(["window@1.0", f"window@{share}"], budget=f"{sum(alone) - digest}B")
    assert tokens(policy, prompt=200) == [100, kept]


@pytest.mark.parametrize(
    ("keep", "last", "size", "pages"), [(100, 500, 8, 50 - 2), (60, 102, 4, 2 * 26), (60, 104, 4, 2 * 26)]
)
def test_the_most_pages_of_one_of_two_ranks(keep: int, last: int, size: int, pages: int) -> None:
    """All pages of the layer but one for each head of the other rank, or as many as all tokens of two heads take."""
    policy = Policy.parse("uniform/adakv+h2o@0.5")
    budget = Tokens(torch.tensor([[keep]]), torch.tensor([0]), torch.tensor([[keep]]), torch.tensor([last]))
    found = pages_of(policy, budget, 0, LayerShape(2, 8, torch.float32, 1, 4))
    assert found is not None and (found.size, found.number) == (size, pages)


@pytest.mark.parametrize(("chunk", "peak"), [(None, 3 * 640), (2, 300 + 128), (5, 3 * 320)])
def test_what_measured_layers_hold_of_a_prompt(chunk: int | None, peak: int) -> None:
    """All layers hold the first chunk until it was measured, and later ones are beside what was kept of it."""
    policy = Policy.parse("squeeze+window@0.5")
    assert SHAPE.token_nbytes == 64
    assert prefill_peak(policy, 1, SHAPE, [100] * 3, 10, 7, chunk) == peak + 7


@pytest.mark.parametrize(("chunk", "peak"), [(None, 100 + 640 + 7 * 10), (2, 111 + 128 + 7 * 2)])
def test_what_waits_for_the_next_layer_is_beside_its_prompt(chunk: int | None, peak: int) -> None:
    """Seven bytes of each token of the first layer wait while the second has its prompt, and none elsewhere."""
    policy = Policy.parse("window@0.5")

    def waiting(tokens: int) -> list[int]:
        return [0, 7 * tokens, 0]

    assert prefill_peak(policy, 1, SHAPE, [100, 10, 1], 10, 5, chunk, waiting=waiting) == peak + 5


def test_tokens_of_the_first_layer_of_a_pair_wait() -> None:
    """Those that it encodes of a prompt: all but the residual, and none that comes later."""
    sizes = "minicache:start=1:residual_length=3:block_size=4"
    for policy, tokens in ((f"full+{sizes}", 100), (f"window+{sizes}@40", 40)):
        found = kvpolicy.plan(config(4), policy, prompt=100, new=20, dtype=torch.float32)
        token = describe(config(4), torch.float32).shape.token_nbytes
        held = waiting_bytes(found.policy, found.layers, token, 100)
        assert held == [0, 0, (tokens - 3) * token, 0]


@pytest.mark.parametrize("length", [2, 5, 8, 9, 30])
def test_a_tuned_policy_for_a_short_text_has_a_prompt(length: int) -> None:
    policy = TunedPolicy(TunedFile(file="a.json", length=length), 0.5)
    prompt, new = lengths(draw_curves(0), policy)
    assert prompt >= 1 and prompt + new == length and new == min(8, length - 1)


@pytest.mark.parametrize("budget", [0.3, 20])
def test_every_rank_makes_the_policy_of_the_whole_model(budget: float | int, tmp_path: Path) -> None:
    """Also a rank with two of three heads, of which the whole is no multiple."""
    model = {"layers": 3, "heads": 3, "head_dim": 8, "weights": None}
    save_curves(tmp_path / "plan.json", draw_curves(1, model=model))
    policy = TunedPolicy(TunedFile(file=str(tmp_path / "plan.json")), budget)
    info = ModelInfo(3, 3, 8, None, (0, 1, 2), 3)
    whole = LayerShape(3, 8, torch.float32)
    found = [resolve(policy, info, shape, whole, lambda _: 0) for shape in (whole, LayerShape(2, 8, torch.float32))]
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_must_fit_when_all_tokens_are_generated(rows: int) -> None:
    """Beside the weights, which are more than a row or two."""
    sizes: dict[str, Any] = {"prompt": 1, "new": 49, "backend": "hf"}
    planned = kvpolicy.plan(config(), "full", **sizes)
    more = kvpolicy.plan(config(), "full", batch=rows + 1, **sizes)
    assert planned.weights is not None and planned.weights.nbytes > planned.nbytes
    assert planned.largest_batch(planned.weights.nbytes + more.nbytes - 1) == rows


def test_a_short_text_that_is_kept_whole_is_no_matter_of_note() -> None:
    assert kvpolicy.plan(config(), "window@1.0", prompt=10).note == ""
    assert "as few as 5 of 10 prompt tokens" in kvpolicy.plan(config(), "window@0.5", prompt=10).note


@pytest.mark.parametrize(("heads", "tp", "queries"), [(8, 4, 2), (6, 4, 2), (9, 2, 5), (3, 8, 1)])
def test_widths_are_those_of_the_rank_that_holds_the_most(heads: int, tp: int, queries: int) -> None:
    text = LlamaConfig(hidden_size=72, num_attention_heads=heads, head_dim=8, intermediate_size=100, vocab_size=9)
    widths = widths_of([text], tp)
    assert widths.queries == queries * 8 and widths.hidden == 72
    assert widths.mlp == 3 * max(len(range(rank, 100, tp)) for rank in range(tp))


def test_a_mask_of_a_sliding_layer_covers_the_window_before_a_chunk() -> None:
    """One byte for each pair, beside an MLP that needs more than any attention."""

    def peak(window: int, columns: int) -> int:
        widths = Widths(hidden=1, mlp=10**6, queries=8, vocab=1)
        policy = Policy.parse("window@0.5")
        return Prefill(policy, SHAPE, widths, ((window, SHAPE),), columns, 10, 20, 0).activation_bytes(3)

    assert peak(5, 1000) - peak(1, 1000) == 3 * 10 * 4
    assert peak(100, 1000) - peak(1, 1000) == 3 * 10 * 99
    assert peak(100, 30) - peak(1, 30) == 3 * 10 * 20
    assert peak(100, 10) == peak(1, 10)


@pytest.mark.parametrize(("columns", "chunk"), [(100, 7), (100, 30), (15, 15), (20, 5)])
def test_what_windows_hold_of_the_last_chunk(columns: int, chunk: int) -> None:
    """As many tokens as a layer of transformers hands to attention."""
    model = build("gemma3")
    shape = describe(model.config)
    stock = DynamicSlidingWindowLayer(sliding_window=model.config.sliding_window)
    keys = torch.zeros(0)
    for start in range(0, columns, chunk):
        new = torch.zeros(1, 2, min(chunk, columns - start), 8)
        keys, _ = stock.update(new, new)
    tokens_held = 3 * sum(keys.shape[2] * shape.unmanaged_shapes[index].token_nbytes for index in shape.unmanaged)
    planned = shape.unmanaged_prefill_bytes(3, columns, chunk)
    assert planned == tokens_held if columns % chunk == 0 else planned >= tokens_held


def test_the_first_rank_holds_what_does_not_divide() -> None:
    """An MLP of 17 channels takes as much of it as one of 18."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8}
    models = [config(1, intermediate_size=width, **sizes) for width in (16, 17, 18)]
    held = [kvpolicy.weights_per_rank(model, tp=2, backend="hf").sharded for model in models]
    assert held[0] < held[1] == held[2]


@pytest.mark.parametrize(
    ("budget", "prompt", "tokens"),
    [
        *((0.29, 100, 29), (0.29, 50_000_003, 14_500_000), (0.07, 100, 7), (0.001, 100, 1)),
        *((1.0, 100, 100), (64, 100, 64), (2**50, 3, MAX_SIZE)),
    ],
)
def test_tokens_of_a_budget(budget: float | int, prompt: int, tokens: int) -> None:
    assert tokens_of(budget, torch.tensor([prompt, prompt])).tolist() == [tokens] * 2
