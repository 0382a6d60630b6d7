"""The effect of each part of a policy on a given model and prompt, in sentences.

Everything is computed through the protocols, so that parts of other packages are explained too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvpolicy.cli.formatting import counted, ranges, size
from kvpolicy.engine.reading import chooses, read_shape
from kvpolicy.engine.row_limits import buffer_slots
from kvpolicy.engine.state import HOST, bytes_by_kind
from kvpolicy.planning.planner import divide
from kvpolicy.planning.tokens import tokens_of, too_short
from kvpolicy.policy import Policy
from kvpolicy.protocols import SMALLEST_HEAD, Selector, Traits, View, differs_by_layer, traits_for
from kvpolicy.text.budget import Budget, Share, fraction_of

EXAMPLE_COSINES = (0.5, 0.95)
"""The cosines of the first and the last layer in the example of an allocator that measures layers."""

MAX_RANKED = 2**18
"""The longest prompt for which a selector is asked to rank every token."""

AVERAGED_SLOTS = 4096
"""The number of slots over which the bytes of a stage are averaged."""


class Case(NamedTuple):
    """A policy, a model and the size of the input.

    Attributes:
        policy: The policy.
        planned: Its `CachePlan`.
        model: The description of the model, from `describe`.
        prompt: Prompt length of each row.
        new: Number of tokens to generate.
        batch: Number of rows.
    """

    policy: Policy
    planned: Any
    model: Any
    prompt: int
    new: int
    batch: int

    @property
    def tokens(self) -> int:
        """The tokens that a layer may hold, as a mean over the layers."""
        return sum(layer.tokens for layer in self.planned.layers) // len(self.planned.layers)

    @property
    def kept(self) -> int:
        """The prompt tokens that a layer keeps, as a mean over the layers."""
        generated = self.new if self.policy.decode == "grow" else 0
        return min(max(self.tokens - generated, 1), self.prompt)


def of_budget(case: Case) -> list[str]:
    """Explain the budget in tokens, and what happens to generated tokens."""
    budget = case.policy.budget
    layers = len(case.planned.layers)
    if isinstance(budget, str):
        held = "on the device" if case.planned.host_nbytes else "included"
        text = f"{budget} for the whole cache, all bytes {held}, is {_tokens(case.kept)} per layer on average."
    elif fraction_of(budget) == 1.0:
        text = f"The whole prompt is kept: {_tokens(case.prompt)} in each of {counted(layers, 'layer')}."
    else:
        prompt = torch.tensor([case.prompt], device="cpu")
        if bool(too_short(case.policy, prompt)):
            return [f"The whole prompt is kept: {_tokens(case.prompt)} are too few for {budget}.", _of_new_tokens(case)]
        per_layer = int(tokens_of(budget, prompt))
        text = f"{_tokens(per_layer)} per layer on average, {per_layer * layers:,} in {layers} layers."
        text = f"{_of_fraction(budget, case.prompt)}{text}"
        if per_layer >= case.prompt:
            text += f" The prompt of {_tokens(case.prompt)} fits."
    return [text, _of_new_tokens(case)]


def _of_fraction(budget: Budget, prompt: int) -> str:
    """The beginning of a sentence about the tokens of a fraction; empty of a budget in tokens."""
    fraction = fraction_of(budget)
    if fraction is None:
        return ""
    if not isinstance(budget, Share):
        return f"{fraction} of {_tokens(prompt)} is "
    own = int(tokens_of(fraction, torch.tensor([prompt], device="cpu")))
    than = "less than" if own < budget.least else "at least"
    return f"{fraction} of {_tokens(prompt)} is {own:,}, {than} the least number of {budget.least:,}: "


def _tokens(count: int) -> str:
    return counted(count, "token")


def _of_new_tokens(case: Case) -> str:
    if case.policy.decode == "grow":
        return (
            f"Generated tokens do not count towards the budget: each layer has {case.new:,} more slots for them, and "
            "decoding evicts no token."
        )
    return (
        "Generated tokens count towards the budget: in a full layer, each new token replaces the token of lowest "
        "priority."
    )


def of_allocator(case: Case) -> list[str]:
    """Explain the budget of each layer; for an allocator that measures the prompt, with an example."""
    # Budgets of a measured allocator depend on the prompt: cosines get an example, other metrics are taken as equal.
    metric = case.policy.allocator.layer_metric
    layers = len(case.planned.layers)
    cosines = torch.linspace(*EXAMPLE_COSINES, layers, dtype=torch.float32, device="cpu").expand(case.batch, -1)
    length = torch.tensor([case.prompt] * case.batch, device="cpu")
    # The policy as it was planned, since codecs may differ by layer, which a budget in bytes depends on.
    budgets = divide(
        case.planned.policy,
        {"": None, "cosine": cosines}.get(metric, torch.ones_like(cosines)),
        length,
        length + case.new,
        [case.model.shape] * layers,
        sum(case.planned.unmanaged.values()),
        [layer.layer_idx for layer in case.planned.layers],
    )
    # As in a plan, without the tokens that no prompt of this length could fill.
    text = _per_layer(budgets.keep[0].clamp_max(case.prompt + case.new).tolist(), case)
    if not metric:
        return [f"Here: {text}."]
    if metric == "curve":
        return [
            "Here: the tokens of all layers are compared after the first prompt of each row, and budgets depend on the "
            f"result. If all layers are alike: {text}."
        ]
    if metric == "attention":
        return [
            "Here: each layer is measured by its attention during prefill, for each row, and budgets depend on the "
            f"result. If all layers are alike: {text}."
        ]
    return [
        "Here: each layer is measured during prefill, for each row, and budgets depend on the result. For example, "
        f"for cosines that increase linearly from {EXAMPLE_COSINES[0]} in the first layer to {EXAMPLE_COSINES[1]} in "
        f"the last: {text}."
    ]


def _per_layer(tokens: list[int], case: Case) -> str:
    if len(set(tokens)) == 1:
        return f"{_tokens(tokens[0])} in every layer"
    groups: dict[int, list[int]] = {}
    for layer, count in zip(case.planned.layers, tokens, strict=True):
        groups.setdefault(count, []).append(layer.layer_idx)
    if len(groups) <= 4:
        return "; ".join(
            f"{'layer' if len(layers) == 1 else 'layers'} {ranges(layers)}: {_tokens(count)}"
            for count, layers in groups.items()
        )
    first = case.planned.layers[0].layer_idx
    last = case.planned.layers[-1].layer_idx
    return (
        f"{_tokens(tokens[0])} in layer {first}, {tokens[-1]:,} in layer {last} (minimum {min(tokens):,}, maximum "
        f"{max(tokens):,})"
    )


def of_selector(case: Case) -> list[str]:
    """Explain which tokens are always kept, how many are kept by priority, and which statistics are used."""
    selector = case.policy.selector
    budget = case.kept
    if budget >= case.prompt:
        return [f"Here: the whole prompt of {_tokens(case.prompt)} is kept.", _statistics(selector)]
    # Not by its class, which only a policy that has it imports.
    crush: Any = selector if hasattr(selector, "representative_count") else None
    representatives = 0 if crush is None else int(crush.representative_count(torch.tensor(budget, device="cpu")))
    chosen = _chosen(case, budget - representatives)
    if crush is not None:
        chosen = (
            f"{counted(representatives, 'representative')} ({crush.split} of the budget), and "
            f"{budget - representatives:,} chosen by the base selector ({chosen})"
        )
    who = "each KV head" if case.policy.heads is None else "an average KV head"
    start = f"Here: in an average layer, {who} keeps {budget:,} of {_tokens(case.prompt)}"
    return [f"{start}: {chosen}.", _statistics(selector)]


def _chosen(case: Case, budget: int) -> str:
    """Describe which tokens a budget keeps: those that are always kept, and the others by priority."""
    first, last, by_age = _always_kept(case)
    always: list[str] = []
    if first:
        always.append("the first token" if first == 1 else f"the first {first:,}")
    if last:
        always.append("the newest token" if last == 1 else f"the newest {last:,}")
    others = max(budget - first - last, 0)
    rest = f"the newest {others:,}" if by_age else f"the {others:,} of highest priority"
    return f"always {' and '.join(always)}, and {rest}" if always else rest


def _always_kept(case: Case) -> tuple[int, int, bool]:
    """Return how many of the first and of the newest tokens are kept regardless of attention.

    The selector ranks a prompt of which it has seen nothing: priority inf marks the tokens that are always kept. The
    third value is whether the order of the others depends on their age alone.
    """
    if case.prompt > MAX_RANKED:
        return 0, 0, False
    selector = case.policy.selector
    positions = torch.arange(case.prompt, dtype=torch.int32, device="cpu")[None, None]
    view = View(
        positions,
        torch.tensor([case.prompt], device="cpu"),
        torch.tensor([case.kept], device="cpu"),
        case.planned.layers[0].layer_idx,
    )
    try:
        priority = selector.priority(selector.alloc(1, 1, case.prompt, "cpu", SMALLEST_HEAD), view)[0, 0]
    except Exception:  # a selector of another package may not be able to rank tokens before it has seen attention
        return 0, 0, False
    always = (priority == torch.inf).int()
    by_age = not selector.statistics and bool((priority[always == 0].diff() > 0).all())
    return int(always.cumprod(0).sum()), int(always.flip(0).cumprod(0).sum()), by_age


def _statistics(selector: Selector) -> str:
    used = [words for each in selector.statistics if (words := each.described())]
    return f"The selector uses {' and '.join(used)}." if used else "The selector uses no attention weights."


def of_merger(case: Case) -> list[str]:
    """Explain when evicted tokens are merged, and what a slot stores for it."""
    traits = case.policy.merger.traits
    if traits.when == "never":
        return ["Here: evicted tokens are dropped."]
    evicted = max(case.prompt - case.kept, 0)
    sentences = [f"Here: the {_tokens(evicted)} of the prompt that an average layer does not keep are merged."]
    if traits.when == "prompt" or case.policy.decode == "grow":
        sentences.append("Decoding merges no token.")
    else:
        sentences.append("In decoding, a token is merged when its slot is overwritten.")
    if traits.counted:
        sentences.append("Each slot stores how many tokens it stands for, and attention counts it as so many.")
    return sentences


def of_codec(case: Case) -> list[str]:
    """Explain the bits per number of each stage, the slots of a layer, and when tokens are demoted."""
    codec = case.policy.codec
    bits = 8 * case.model.shape.dtype.itemsize
    if not codec.stages:
        return [f"Here: each number takes {bits} bits, in the dtype of the model."]
    stages = "; ".join(_bits(case, stage) for stage in range(len(codec.stages)))
    layout = codec.layout(case.tokens)
    encoded = " + ".join(f"{slots:,}" for slots in layout.coded) or "no"
    slots = f"A layer of {_tokens(case.tokens)} has a full-precision buffer of {counted(layout.exact, 'slot')}, and "
    slots += f"{encoded} encoded slots."
    if case.policy.heads is not None:
        buffer = counted(buffer_slots(codec, case.tokens), "slot")
        slots = (
            f"Each KV head has a full-precision buffer of {buffer}, and an encoded slot for each token of its pages."
        )
    sentences = [
        f"Here: {stages}; in the dtype of the model, a number takes {bits} bits.",
        *_groups(case.planned.policy.layer_groups),
        *_differences(case),
        slots,
        *_demotion(traits_for(codec, case.tokens)),
    ]
    if case.planned.resident_nbytes:
        sentences.append(
            f"The calibrated tensors take {size(case.planned.resident_nbytes)} in addition to the cache, once for all "
            "rows."
        )
    return sentences


def _groups(groups: Sequence[Sequence[int]]) -> list[str]:
    """Explain which layers share what they store."""
    if not groups:
        return []
    named = ", ".join(" and ".join(map(str, group)) for group in groups)
    return [f"Layers {named} share what they store, which the first of them holds."]


def _differences(case: Case) -> list[str]:
    """Explain in which parameters the codecs of the layers differ, where the codec stands for one of each layer."""
    if not differs_by_layer(case.policy.codec):
        return []
    codecs: list[Any] = [case.planned.policy.at(layer.layer_idx).codec for layer in case.planned.layers]
    every = {field.name: [getattr(codec, field.name) for codec in codecs] for field in dataclasses.fields(codecs[0])}
    differing = [f"{name} {', '.join(map(str, own))}" for name, own in every.items() if len({*map(str, own)}) > 1]
    return [f"By layer: {'; '.join(differing) or 'all alike'}."]


def _bits(case: Case, stage: int) -> str:
    """Explain the bits per number of a stage, from the tensors that it allocates, without storage."""
    codec = case.policy.codec
    shape = case.model.shape
    group = codec.traits.group_size
    slots = -(-AVERAGED_SLOTS // group) * group  # the next multiple, so that no group is cut
    policy = case.planned.policy
    # The mean of layers that share what they store, or that differ.
    averaged = policy.layer_groups[0] if policy.layer_groups else ()
    if differs_by_layer(codec):
        averaged = tuple(layer.layer_idx for layer in case.planned.layers)
    codecs = [policy.at(layer).codec for layer in averaged] or [codec]
    allocated = [each.stages[stage].alloc(1, shape.heads, slots, shape.head_dim, "meta") for each in codecs]
    kinds = bytes_by_kind((), allocated, torch.empty(0, dtype=torch.float32, device="cpu"), (), ())
    numbers = 2 * shape.heads * slots * shape.head_dim * len(codecs)  # keys and values
    codes = 8 * kinds["codes"] / numbers
    scales = 8 * kinds["scales"] / numbers
    where = f" of stage {stage + 1}" if len(codec.stages) > 1 else ""
    return f"an encoded number{where} takes {codes + scales:.2f} bits (codes {codes:.2f}, scales {scales:.2f})"


def _demotion(traits: Traits) -> list[str]:
    """Explain which tokens stay in the full-precision buffer, and which are demoted when."""
    sentences: list[str] = []
    if traits.residual:
        sentences.append(f"The newest {_tokens(traits.residual)} always stay in full precision.")
    if traits.pins in _PINNED:
        sentences.append(_PINNED[traits.pins].format(_tokens(traits.pinned)))
    if traits.demotion is not None and traits.demotion.recodes:
        sentences.append("Whenever the full-precision buffer is full, all tokens are encoded again.")
    elif traits.block:
        sentences.append(f"Tokens are demoted {traits.block:,} at a time.")
    if traits.demotion is not None and traits.demotion.words:
        sentences.append(traits.demotion.words)
    if traits.key_space == "unrotated":
        sentences.append("Keys are stored without their rotary embedding.")
    return sentences


def of_reader(case: Case) -> list[str]:
    """Explain how many tokens a step reads, the index, and the bytes that are moved."""
    reader = case.policy.reader
    layers = case.planned.layers
    all_bytes = sum(layer.all_moved for layer in layers)
    parts = [read_shape(reader, case.policy.codec, layer.layout, layer.layer_idx) for layer in layers]
    if not any(parts):
        return [f"Here: each decode step reads every kept token of every layer, {size(all_bytes)} in all."]
    last = next(shape for shape in reversed(parts) if shape is not None)
    reads_all = [reader.traits.choosers_read_all and chooses(reader, layer.layer_idx) for layer in layers]
    own = zip(layers, parts, reads_all, strict=True)
    whole = [layer.layer_idx for layer, shape, everything in own if shape is None or everything]
    sources = [reader.traits.source(layer.layer_idx) for layer in layers]
    choosers = [layer.layer_idx for layer, source in zip(layers, sources, strict=True) if source == layer.layer_idx]
    shared = len(choosers) < len(layers) - sources.count(None)
    chosen = f"{last.chosen:,} of {counted(last.entries, 'page')} of {last.page} slots"
    if last.page == 1:
        chosen = f"{last.chosen:,} of {counted(last.entries, 'slot')}"
    buffer = ", and the full-precision buffer" if sum(layers[-1].layout.coded) else ""
    index = sum(layer.nbytes["index"] for layer in layers)
    return [
        f"Here: each KV head reads {chosen} in a step{buffer}.",
        f"All slots are read in layers {ranges(whole)}." if whole else "No layer reads all slots.",
        *([f"Layers {ranges(choosers)} choose for those behind them."] if shared else []),
        f"A step moves {size(case.planned.moved)} instead of {size(all_bytes)}; the index takes {size(index)} in "
        "addition to what is kept.",
        *_of_host_memory(case.planned),
    ]


def _of_host_memory(planned: Any) -> list[str]:
    """Explain what lies in host memory, and what a step copies."""
    if not planned.host_nbytes:
        return []
    layers = ranges([layer.layer_idx for layer in planned.layers if HOST in layer.nbytes])
    return [
        f"Keys and values of layers {layers} lie in host memory, {size(planned.host_nbytes)}; a step copies "
        f"{size(planned.loaded)} of them to the device, and {size(planned.stored)} from it."
    ]


_PINNED = {
    "first": "The first {} of the prompt stay in full precision.",
    "massive": "Up to {} with massive activations stay in full precision.",
    "newest": "The newest {} of the prompt stay in full precision.",
}
"""By `Traits.pins`, which tokens of the prompt are pinned."""
