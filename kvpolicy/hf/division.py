"""What of the attention of a model transformers divides among ranks, by the plan of its config."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from kvpolicy.parallel.runtime import Sharing, follows_plan, sharing_of

Divided = Literal["heads", "queries", "nothing"]
"""What of its attention each rank has a part of.

KV heads with their query heads; query heads alone, which all read the same latent vectors; or nothing: every rank
computes the attention of all heads, and holds the whole cache.
"""

_KEYS = ("k_proj", "query_key_value", "qkv_proj")
_LATENTS = ("kv_b_proj",)


def divided(config: Any) -> Divided:
    """What the plan of a config divides.

    Args:
        config: A transformers config.

    Examples:
        >>> from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig
        >>> [divided(config()) for config in (LlamaConfig, DeepseekV2Config, DeepseekV3Config)]
        ['heads', 'queries', 'nothing']
    """
    plan: dict[str, str] = getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
    if any(name.endswith(_KEYS) and style == "colwise" for name, style in plan.items()):
        return "heads"
    if any(name.endswith(_LATENTS) and style == "colwise" for name, style in plan.items()):
        return "queries"
    return "nothing"


class Division(NamedTuple):
    """How a loaded model is divided among ranks.

    Attributes:
        size: The number of ranks.
        follows_plan: Whether transformers sharded the model by its plan.
        weights: Weight fingerprint of the whole model, [64], if the model is a shard and it is known.
        sharing: How its cache is divided; None if this rank holds all of it.
    """

    size: int
    follows_plan: bool
    weights: Tensor | None
    sharing: Sharing | None

    @property
    def gathers(self) -> bool:
        """Whether every rank computes the attention of all heads, with parts of weights that are gathered."""
        return self.size > 1 and self.sharing is None


def division_of(model: nn.Module) -> Division:
    """How a loaded model is divided among ranks."""
    sharing = sharing_of(model)
    if sharing is None:
        return Division(1, False, None, None)
    planned = follows_plan(model)
    parts = divided(model.config) if planned else "heads"
    own = None if parts == "nothing" else sharing.repeated() if parts == "queries" else sharing
    return Division(sharing.size, planned, sharing.weights, own)
