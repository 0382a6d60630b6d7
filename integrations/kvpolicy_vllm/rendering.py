"""The token ids of a body, as vLLM's server makes them."""

# vLLM is no dependency of development.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class Rendered(NamedTuple):
    """A prompt of a body.

    Attributes:
        ids: Its token ids.
        new: The most tokens that the server generates behind it.
    """

    ids: list[int]
    new: int


async def rendered(state: Any, content: Mapping[str, Any], is_chat: bool) -> Rendered | None:
    """Render a body, by the chat template of the server, with tools and all.

    Args:
        state: The state of the server's application.
        content: The body.
        is_chat: Whether it is of a chat.

    Returns:
        Its prompt; None if it has several, or something else than text, or if the server refuses it.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    try:
        if is_chat:
            found = await state.serving_render.render_chat_request(ChatCompletionRequest(**content))
        else:
            found = await state.serving_render.render_completion_request(CompletionRequest(**content))
    except ValueError:  # which the server answers in its own words
        return None
    except Exception:  # such as one that a chat template raises
        logger.warning("A prompt was not compressed, since it cannot be rendered.", exc_info=True)
        return None
    prompts = found if isinstance(found, list) else [found]
    if len(prompts) != 1 or getattr(prompts[0], "features", None) or not hasattr(prompts[0], "token_ids"):
        return None
    return Rendered([*prompts[0].token_ids], int(prompts[0].sampling_params.max_tokens))
