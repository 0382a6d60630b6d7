"""Text that a model generates with the full cache, of which every token is predicted again under policies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpolicy_eval.common.continuation import Continuation
from kvpolicy_eval.real.prompts import prose

ROWS = 4
"""Rows of the batch."""
PROMPT = 384
"""Tokens of prose before what is generated."""
NEW = 200
"""Tokens that are generated in each row."""
SEED = 0


@torch.inference_mode()
def generate(model: Any, tokenizer: Any) -> Continuation:
    """Sample text after excerpts of English prose, from the probabilities of the full cache.

    Args:
        model: A causal language model without a policy.
        tokenizer: Its tokenizer.
    """
    ids: Tensor = tokenizer(prose(), return_tensors="pt").input_ids[0, : ROWS * PROMPT].view(ROWS, PROMPT)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        out: Tensor = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    return Continuation(model, out, PROMPT)
