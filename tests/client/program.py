# pyright: strict
"""What a user writes against kvpolicy's public surface; test_types.py lets pyright read it, strictly and as installed.

Nothing here is cast to Any or ignored: what pyright does not know of kvpolicy's, a user's editor does not either.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import kvpolicy
from kvpolicy import (
    H2O,
    KIVI,
    CachePlan,
    Handle,
    KVCrush,
    KVPolicyWarning,
    Plain,
    Policy,
    PolicyCache,
    SnapKV,
    SqueezeAttention,
    Uniform,
    Weights,
)
from kvpolicy.distortion import Distortion, distortion
from kvpolicy.hf.adapters import KVPressScorer
from kvpolicy.planning.result import LayerPlan
from kvpolicy.protocols import SMALLEST_HEAD, Allocator, Codec, DecodeMode, HeadShape, Selector, State, View
from kvpolicy.reporting.report import LayerReport, Report
from kvpolicy.statistics import AttentionSum, Results, Statistic


class Ages(NamedTuple):
    """State of the selector below."""

    age: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class EverySecond(Selector):
    """A selector, which inherits what it does not say."""

    decode: DecodeMode = "evict"

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        return (AttentionSum(),)

    def alloc(
        self, batch: int, heads: int, slots: int, device: torch.device | str, head: HeadShape = SMALLEST_HEAD
    ) -> State:
        return Ages(torch.zeros(batch, heads, slots, device=device))

    def observe(self, state: Ages, seen: Results, view: View) -> State:
        return Ages(view.ranks.head_mean(seen[AttentionSum])[:, None].expand_as(state.age).contiguous())

    def step(self, state: Ages, row: Tensor, view: View) -> None:
        state.age.add_(1)

    def priority(self, state: Ages, view: View) -> Tensor:
        return (view.positions % 2).float().masked_fill(view.newest(1), torch.inf)

    def statistic(self, seen: Results, view: View) -> Tensor | None:
        return seen[AttentionSum]


class Longest:
    """A scorer as those of kvpress are."""

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        return values.float().square().sum(-1)


def policies() -> list[Policy]:
    """Parts of every kind, as objects and as words."""
    allocators: list[Allocator] = [Uniform(), SqueezeAttention(keep_share=0.3)]
    selectors: list[Selector] = [H2O(recent=0.4), KVCrush(base=SnapKV(window=16)), EverySecond()]
    selectors.append(KVPressScorer(Longest()))
    codecs: list[Codec] = [Plain(), KIVI(bits=4)]
    made = [Policy(allocator=a, selector=s, codec=c, budget=0.2) for a in allocators for s in selectors for c in codecs]
    words: list[str] = [str(policy) for policy in made]
    parsed: Policy = Policy.parse("squeeze+kvcrush/h2o+kivi:bits=4@512MiB")
    budget: float | int | str | kvpolicy.Share = parsed.budget
    print(words, budget, {parsed: parsed.decode}, parsed == made[0], hash(parsed))
    return made


def by_hand(model: nn.Module, prompt: Tensor) -> list[int]:
    """A loop with a cache of its own."""
    chosen: list[int] = []
    with torch.no_grad(), kvpolicy.attach(model, "snapkv+kivi", budget=2048) as handle:
        cache = PolicyCache(model, prompt=prompt.shape[1], new=8)
        tokens = prompt
        for _ in range(8):
            logits: Tensor = model(tokens, cache=cache).logits
            tokens = logits[:, -1:].argmax(-1)
            chosen.append(int(tokens))
            cache.tick()
        for layer in cache.policy_layers:
            positions: Tensor = layer.positions
            budget: Tensor = layer.budget
            print(positions.shape, int(budget[0]), layer.layer_idx)
        print(cache.nbytes + cache.full_nbytes + cache.resident_nbytes, cache.batch_size)
        told = look(handle)
    cache.reset()
    return chosen if told is None else [told.nbytes]


def look(handle: Handle) -> CachePlan | None:
    """Everything that a handle and its report say."""
    newest: PolicyCache | None = handle.cache
    if newest is not None:
        report: Report = handle.report()
        rows: tuple[LayerReport, ...] = report.layers
        content: dict[str, Any] = report.as_dict()
        kinds: dict[str, int] = rows[0].nbytes
        kept: tuple[int, ...] = rows[0].kept
        print(str(report), content["format"], kinds, kept, rows[0].note, report.note)
    handle.detach()
    return handle.plan


def before(config: Any) -> int:
    """What a plan says."""
    found: CachePlan = kvpolicy.plan(
        config, "pyramid+window@0.1", batch=2, prompt=[100, 50], new=8, dtype=torch.bfloat16, tp=2, backend="hf"
    )
    layer: LayerPlan = found.layers[0]
    weights: Weights | None = found.weights
    kinds: dict[str, int] = found.by_kind()
    print(layer.tokens, layer.layout.slots, layer.nbytes, kinds, weights.nbytes if weights else 0)
    return found.largest_batch(2**30) + found.full_largest_batch(2**30)


def measured(model: nn.Module, path: Path) -> list[float]:
    """Errors of a codec, and a stored profile."""
    lost: Distortion = distortion(KIVI(bits=4), torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64))
    cosines: list[float] = kvpolicy.profile(model, [torch.arange(8)[None]], path)
    return [lost.keys, lost.bits, *cosines]


def evaluated() -> dict[str, Any]:
    """The model of lm-eval."""
    from kvpolicy_lm_eval.model import KVPolicyLM  # lm-eval takes seconds to import

    lm = KVPolicyLM(policy="h2o@0.1", holdback=1)
    return lm.get_model_info()


def warned() -> type[UserWarning]:
    """The category of warnings."""
    return KVPolicyWarning
