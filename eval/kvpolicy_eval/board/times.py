"""Times of decode steps, over those of the stock cache that holds everything."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

import kvpolicy
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.bench.decode import steps
from kvpolicy_eval.bench.models import llama, tokens
from kvpolicy_eval.bench.timing import compare
from kvpolicy_eval.board.policies import Entry

LENGTH = 4096
"""Tokens of the prompt."""
LAYERS = 4
ROUNDS = 5


class Times:
    """A model of hidden size 512 with random weights, a stock cache after a prompt, and eager steps of both."""

    def __init__(self) -> None:
        """Build the models, and read the prompt with the stock cache."""
        self.ids = tokens(LENGTH)
        self.token = tokens(1)
        self.stock = llama(LAYERS)
        self.model = llama(LAYERS)
        self.cache: Any = DynamicCache(config=self.stock.config)
        with torch.inference_mode():
            self.stock(self.ids, **cache_argument(self.stock, self.cache), logits_to_keep=1)
        self.full_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def measure(self, entry: Entry, share: float) -> dict[str, Any]:
        """Time of a decode step over the stock cache's: median, lower and upper quartile of several rounds."""
        policy = entry.at(share)
        sized = f"{policy}@{int(share * self.full_bytes)}B" if entry.by_bytes else policy
        try:
            with torch.inference_mode(), kvpolicy.attach(self.model, sized):
                cache = kvpolicy.PolicyCache(self.model, prompt=LENGTH, new=1024)
                self.model(self.ids, **cache_argument(self.model, cache), logits_to_keep=1)
                if extra := self.cache.get_seq_length() - LENGTH:  # steps of the policy before
                    self.cache.crop(-extra)
                ratio = compare(
                    lambda: steps(self.stock, self.token, self.cache),
                    lambda: steps(self.model, self.token, cache),
                    ROUNDS,
                )
        except KVPolicyError as error:
            return {"refused": str(error)}
        return {"ratio": round(ratio.median, 3), "low": round(ratio.low, 3), "high": round(ratio.high, 3)}
