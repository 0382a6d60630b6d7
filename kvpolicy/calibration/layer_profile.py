"""Measure the layers of a model once, so that SqueezeAttention need not measure every prompt."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.allocators.profile import save_profile
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import device_of
from kvpolicy.hf.eval_mode import eval_mode
from kvpolicy.text.arguments import named_arguments
from kvpolicy.text.errors import KVPolicyError, KVPolicyTypeError
from kvpolicy.text.output import check_is_file
from kvpolicy.text.validation import has_integers


@named_arguments
def profile(model: nn.Module, prompts: Iterable[Tensor], path: str | os.PathLike[str]) -> list[float]:
    """Measure the attention cosine of each layer over a few prompts, and write it to a file.

    Args:
        model: A causal language model without a policy attached.
        prompts: Token ids, each [B, P] without padding; all prompts have equal weight.
        path: The file, which `squeeze:profile=FILE` reads.

    Returns:
        The mean cosine of each layer.

    Raises:
        KVPolicyError: If there is no prompt, a policy is attached, a token id is none of the model's, a cosine is not
            finite, or the path is a folder.
        KVPolicyTypeError: If a prompt is not a tensor of token ids [B, P].

    Examples:
        >>> import tempfile, os
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=9)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "profile.json")
        ...     cosine = profile(LlamaForCausalLM(config).eval(), [torch.arange(8)[None]], path)
        >>> len(cosine)
        2
    """
    from kvpolicy.calibration.listener import check_finite
    from kvpolicy.calibration.suitable import check_tokens
    from kvpolicy.hf.attach import attach
    from kvpolicy.hf.cache import PolicyCache

    path = os.path.expanduser(path)
    check_is_file(path)
    rows: list[Tensor] = []
    # Squeeze requests the measurement, and with a budget of 1.0 nothing is evicted.
    with eval_mode(model), torch.no_grad(), attach(model, "squeeze+window@1.0"):
        device = device_of(model)
        for ids in prompts:
            _check_prompt(ids)
            check_tokens(model, [ids])
            cache = PolicyCache(model)
            _: Any = model(ids.to(device), **cache_argument(model, cache))
            rows.append(cache.cosines().mean(0))
    if not rows:
        raise KVPolicyError("The prompts must contain at least one tensor of token ids, got none; try one.")
    cosine = torch.stack(rows).mean(0)
    check_finite("cosines", f"layer {int((~cosine.isfinite()).int().argmax())}", cosine)
    save_profile(path, getattr(model.config, "name_or_path", "") or type(model).__name__, cosine)
    return [float(value) for value in cosine]


def _check_prompt(ids: object) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not has_integers(ids):
        got = f"{list(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise KVPolicyTypeError(
            f"A prompt must be a tensor of token ids [B, P], got {got}; try the input_ids of a tokenizer."
        )
