"""The reasons for refusals that the page names, each with what its sentences have in common."""

from __future__ import annotations

import re

REASONS = {
    "sparse attention, which keeps an index of its own beside the keys": r"also holds an index",
    "compressed attention, whose entries stand for several tokens": r"entries that stand for several tokens",
    "a window beside a reference text": r"a reference text before it",
    "states alone: there are no tokens to evict": r"states of a fixed size and no tokens|layers with a state alone",
    "states that transformers' cache does not hold": r"keeps its own in another way",
    "encoder-decoders, and decoders that also attend to an encoder or to pictures": (
        r"an encoder-decoder model|it also attends to"
    ),
    "tokens attend to later ones": r"attend to later ones|which is not causal",
    "attention outside the attention interface of transformers": r"attention interface of transformers to be replaced",
    "attention in another form: twice in a layer, or by content beside keys": (
        r"differential attention|mask that depends on values|bias by content|'position_bias'|expert per token"
    ),
    "keys and values of several widths or numbers of heads": r"same head dimension|same number of KV heads",
    "layers that read the keys of earlier ones": r"reads those of an earlier one",
    "only sliding windows, which bound themselves": r"sliding-window layers for",
    "layers that run several times for a token": r"attend once in a forward",
    "several stacks of layers": r"which has \d+ stacks",
    "layers that share attention modules, or a cache that is not by layer": (
        r"share attention modules|takes no cache of transformers"
    ),
    "ALiBi": r"with ALiBi",
    "masks that the model makes itself": r"makes its own",
    "several tokens at a position": r"one of each of its codebooks",
    "arguments of attention that a policy does not know": r"Attention must be called without",
    "configs without layers": r"must have num_hidden_layers",
}
"""By reason: a pattern that the sentences with it have, and no others."""


def reason_of(sentence: str) -> str:
    """The reason for a refusal; empty if the page has none for it.

    >>> reason_of("A Falcon must use rotary embeddings, got one with ALiBi, which is not supported.")
    'ALiBi'
    >>> reason_of("No.")
    ''
    """
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, sentence)), "")
