"""Agreement of the positions that both sides keep."""

from __future__ import annotations

from collections.abc import Iterator

from kvpolicy_eval.peers.pair import Line, Options, Pair, attention_for, embedded_model, questions

METHODS = [
    ("SnapKV", "snapkv:window=64:kernel=5:decode=grow", "snapkv"),
    ("SnapKV, window 16", "snapkv:window=16:kernel=5:decode=grow", "snapkv:window_size=16"),
    ("TOVA", "tova", "tova"),
    ("StreamingLLM", "streaming:sinks=4", "streaming"),
    ("Knorm", "knorm", "knorm"),
    ("H2O and ObservedAttention", "h2o", "observed"),
    ("H2O without its window", "h2o:recent=0", "observed"),
    ("ObservedAttention through our adapter", "averaged", "observed"),
]
"""Name of the method, our spec, their press."""
SHARES = (0.5, 0.2, 0.1)
"""Budgets, as shares of the prompt."""


def kept(pair: Pair, options: Options) -> Iterator[Line]:
    """Agreement on prompts of the embedded model."""
    prompts = [question.ids for question in questions(max(options.n // 4, 2), ("recall", "passkey"))]
    with embedded_model() as path:
        for name, ours, theirs in METHODS:
            pair.load(path, attention=attention_for(theirs), threads=options.threads)
            for share in SHARES:
                by_prompt = [_agreement(pair, ids, ours, theirs, int(len(ids) * share)) for ids in prompts]
                mean = {key: sum(one[key] for one in by_prompt) / len(by_prompt) for key in by_prompt[0]}
                yield {"method": name, "ours": ours, "theirs": theirs, "share": share, "prompts": len(prompts)} | mean


def _agreement(pair: Pair, ids: list[int], ours: str, theirs: str, keep: int) -> dict[str, float]:
    """Agreement on one prompt, and the causes of differences.

    Returns:
        `overlap`: mean overlap of a head's positions; `same`: share of heads with identical positions. Of the positions
        that only we keep, `ties` is the share whose token equals one that only they keep, and `edge` the share in the
        two positions before the last 16.
    """
    our_layers = pair.ours.ask("kept", ids=[ids], method=ours, keep=keep)["kept"]
    their_layers = pair.theirs.ask("kept", ids=[ids], method=theirs, keep=keep)["kept"]
    heads = [
        (set(our_head), set(their_head))
        for our_layer, their_layer in zip(our_layers, their_layers, strict=True)
        for our_head, their_head in zip(our_layer, their_layer, strict=True)
    ]
    ties: list[bool] = []
    edges: list[bool] = []
    edge = range(len(ids) - 18, len(ids) - 16)
    for our_head, their_head in heads:
        their_tokens = {ids[position] for position in their_head - our_head}
        for position in our_head - their_head:
            ties.append(ids[position] in their_tokens)
            edges.append(position in edge)
    return {
        "overlap": sum(len(x & y) / len(y) for x, y in heads) / len(heads),
        "same": sum(x == y for x, y in heads) / len(heads),
        "ties": sum(ties) / max(len(ties), 1),
        "edge": sum(edges) / max(len(edges), 1),
    }
