"""What a policy's parts come to for one model and prompt, in sentences; asked of the protocols, so of plug-ins too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvpolicy.cli.layers import ranges
from kvpolicy.cli.printing import size
from kvpolicy.planning.memory import bytes_by_kind
from kvpolicy.planning.planner import divide
from kvpolicy.policy import Policy
from kvpolicy.protocols import Needs, View
from kvpolicy.selectors.kvcrush import KVCrush

EXAMPLE = (0.5, 0.95)
"""Cosines of the first and the last layer in an example."""

LONGEST = 2**18
"""The longest prompt that a selector is asked about token by token."""

MANY = 4096
"""Slots over which the bytes of a coded part are averaged."""


class Case(NamedTuple):
    """A policy, what `plan` says of it, and for which model and sizes."""

    policy: Policy
    planned: Any
    model: Any
    prompt: int
    new: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens that a layer may hold, on average."""
        return sum(layer.tokens for layer in self.planned.layers) // len(self.planned.layers)

    @property
    def kept(self) -> int:
        """Tokens of the prompt that a layer keeps, on average."""
        beside = self.new if self.policy.decode == "grow" else 0
        return min(max(self.tokens - beside, 1), self.prompt)


def of_budget(case: Case) -> list[str]:
    """How many tokens the budget is, and what becomes of generated ones."""
    budget, layers, prompt = case.policy.budget, len(case.planned.layers), case.prompt
    if isinstance(budget, str):
        told = f"{budget} for the whole cache come to {_tokens(case.kept)} per layer on average, all bytes counted."
    elif isinstance(budget, float) and budget == 1.0:
        told = f"All of the prompt is kept: {_tokens(prompt)} in each of {layers} layers."
    else:
        each = budget if isinstance(budget, int) else max(int(prompt * budget + 1e-9), 1)
        share = "" if isinstance(budget, int) else f"{budget} of {_tokens(prompt)} are "
        told = f"{share}{_tokens(each)} per layer on average, {each * layers:,} in {layers} layers."
        told += f" The prompt's {_tokens(prompt)} fit." if each >= prompt else ""
    return [told, _of_new_tokens(case)]


def _tokens(count: int) -> str:
    return f"{count:,} token" + "s" * (count != 1)


def _of_new_tokens(case: Case) -> str:
    if case.policy.decode == "grow":
        return f"Generated tokens get room beside it: {case.new:,} more per layer, and nothing is evicted for them."
    return "Generated tokens compete: where a layer holds its budget, each takes the place of the least worthy token."


def of_allocator(case: Case) -> list[str]:
    """Tokens per layer; of an allocator that measures the prompt, an example."""
    metrics = bool(case.policy.allocator.layer_metric)
    count = len(case.planned.layers)
    cosines = torch.linspace(*EXAMPLE, count).expand(case.batch, -1)
    length = torch.tensor([case.prompt] * case.batch)
    other = sum(case.planned.left_alone.values())
    ends = length + case.new
    found = divide(case.policy, cosines if metrics else None, length, ends, [case.model.shape] * count, other)
    told = _per_layer(found.keep[0].clamp_max(case.prompt + case.new).tolist(), case)
    if not metrics:
        return [f"Here: {told}."]
    return [
        "Here: each layer is measured in each row's prompt, so budgets are known after it. For example, with cosines "
        f"that rise evenly from {EXAMPLE[0]} in the first layer to {EXAMPLE[1]} in the last: {told}."
    ]


def _per_layer(tokens: list[int], case: Case) -> str:
    if len(set(tokens)) == 1:
        return f"{_tokens(tokens[0])} in every layer"
    alike: dict[int, list[int]] = {}
    for layer, count in zip(case.planned.layers, tokens, strict=True):
        alike.setdefault(count, []).append(layer.layer_idx)
    if len(alike) <= 4:
        return "; ".join(f"layer {ranges(layers)}: {_tokens(count)}" for count, layers in alike.items())
    first, last = case.planned.layers[0].layer_idx, case.planned.layers[-1].layer_idx
    least, most = min(tokens), max(tokens)
    return f"{_tokens(tokens[0])} in layer {first}, {tokens[-1]:,} in layer {last}, {least:,} to {most:,} in all"


def of_selector(case: Case) -> list[str]:
    """What is kept for its place alone, what the ranking chooses, and what the selector must see."""
    selector, budget = case.policy.selector, case.kept
    told = [_sight(selector.needs)]
    if budget >= case.prompt:
        return [f"Here: nothing of the prompt is dropped, its {_tokens(case.prompt)} fit.", *told]
    begin = f"Here: of {_tokens(budget)} that each KV head keeps of {case.prompt:,} in an average layer, "
    if isinstance(selector, KVCrush):
        stand_in = budget * round(selector.split * 10**6) // 10**6
        begin += f"{stand_in:,} are representatives ({selector.split} of them); of the base's {budget - stand_in:,}, "
        budget -= stand_in
    first, last, newest = _by_place(case)
    sure = " and ".join([f"the first {first:,}"] * bool(first) + [f"the newest {last:,}"] * bool(last))
    rest = f"the {'newest ' if newest else ''}{max(budget - first - last, 0):,}"
    rest += "" if newest else " best by its ranking"
    return [begin + (f"{sure} in any case and {rest}." if sure else f"{rest}."), *told]


def _by_place(case: Case) -> tuple[int, int, bool]:
    """How many of the first and newest tokens stay whatever attention says, and whether the others go by age."""
    if case.prompt > LONGEST:
        return 0, 0, False
    selector = case.policy.selector
    places = torch.arange(case.prompt, dtype=torch.int32)[None, None]
    view = View(places, torch.tensor([case.prompt]), torch.tensor([case.kept]), case.planned.layers[0].layer_idx)
    try:
        worth = selector.priority(selector.alloc(1, 1, case.prompt, "cpu"), view)[0, 0]
    except Exception:  # a plug-in may rank only what it has seen
        return 0, 0, False
    sure = (worth == torch.inf).int()
    newest = selector.needs == Needs() and bool((worth[sure == 0].diff() > 0).all())
    return int(sure.cumprod(0).sum()), int(sure.flip(0).cumprod(0).sum()), newest


def _sight(needs: Needs) -> str:
    seen = ["the sums of attention over all queries of the prompt"] * needs.attn_sum
    seen += [f"the attention of the newest {needs.window_queries:,} queries"] if needs.window_queries else []
    if needs.probes:
        seen += [f"the attention of probe queries, {needs.probes.recent + needs.probes.random:g} of all"]
    seen += ["the attention of each generated token"] * needs.decode_attn
    seen += ["what the attention modules are called with"] * needs.forward
    return f"It looks at {' and '.join(seen)}." if seen else "It looks at nothing of attention."


def of_codec(case: Case) -> list[str]:
    """Bits per number of each coded part, and slots."""
    codec, shape = case.policy.codec, case.model.shape
    exact = 8 * shape.dtype.itemsize
    if not codec.stages:
        return [f"Here: a number takes {exact} bits, as the model made it."]
    several = len(codec.stages) > 1
    parts = "; ".join(_bits(case, at, several) for at in range(len(codec.stages)))
    told = [f"Here: {parts}; in the model's dtype it takes {exact}."]
    layout = codec.layout(case.tokens)
    coded = " + ".join(f"{slots:,}" for slots in layout.coded) or "no"
    slots = f"A layer of {_tokens(case.tokens)} has {layout.exact:,} exact and {coded} coded slots."
    return [*told, f"{slots} {_traits(codec.traits)}", *_resident(case)]


def _bits(case: Case, at: int, several: bool) -> str:
    traits, shape = case.policy.codec.traits, case.model.shape
    slots = -(-MANY // traits.group_size) * traits.group_size
    codes = case.policy.codec.stages[at].alloc(1, shape.heads, slots, shape.head_dim, "meta")
    nothing = torch.empty(0)
    kinds = bytes_by_kind((), (codes,), nothing, (), ())
    numbers = 2 * shape.heads * slots * shape.head_dim
    codes, scales = (8 * kinds[kind] / numbers for kind in ("codes", "scales"))
    part = f" of part {at + 1}" if several else ""
    return f"a coded number{part} takes {codes + scales:.2f} bits, {codes:.2f} of codes and {scales:.2f} of scales"


def _traits(traits: Any) -> str:
    told = [f"The newest {traits.residual:,} tokens always stay exact"] if traits.residual else []
    told += ["All tokens are coded anew whenever the exact part is full"] if traits.recode_all else []
    told += [f"tokens are coded {traits.block:,} at a time"] if not traits.recode_all and traits.block else []
    told += ["the least worthy first"] if traits.demote_by == "priority" else []
    told += ["keys without their rotary embedding"] if traits.key_space == "unrotated" else []
    told += [_PINS[traits.pins].format(traits.pinned)] if traits.pins in _PINS else []
    words = ", ".join(told)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


_PINS = {
    "first": "the prompt's first {:,} stay exact",
    "massive": "up to {:,} tokens with massive activations stay exact",
    "newest": "the prompt's newest {:,} stay exact",
}


def _resident(case: Case) -> list[str]:
    nbytes = case.planned.resident_nbytes
    return [f"Its calibrated tensors take {size(nbytes)} beside the cache, once for all rows."] if nbytes else []
