"""All that touches the private server of transformers: its handlers for chat and completions, with one model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

# First of all: transformers imports without these, and its handlers then fail with a NameError.
import fastapi as _fastapi  # noqa: F401  # pyright: ignore[reportUnusedImport]
import openai as _openai  # noqa: F401  # pyright: ignore[reportUnusedImport]
import transformers

from kvpolicy.text.errors import KVPolicyError

try:
    from transformers.cli.serving import chat_completion, completion, model_manager, utils

    BaseChat: Any = chat_completion.ChatCompletionHandler
    BaseModels: Any = model_manager.ModelManager
    BaseState: Any = utils.GenerationState
except (ImportError, AttributeError):  # another version; `check_transformers` says so
    chat_completion = completion = model_manager = utils = None
    BaseChat = BaseModels = BaseState = object

TESTED = "5.18 to 5.24"
"""The versions of transformers with which this module was tested."""

RESERVED = frozenset(inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "load_audio_from_video",
    "messages",
}
"""Names that a client must not pass to a chat template, since they are arguments of the tokenizer."""

_EXPECTED: dict[str, tuple[str, ...]] = {
    "chat_completion.ChatCompletionHandler.__init__": ("model_manager", "generation_state", "chat_template_kwargs"),
    "chat_completion.ChatCompletionHandler.handle_request": ("body", "request_id"),
    "chat_completion.ChatCompletionHandler.get_processor_inputs_from_messages": ("messages", "modality"),
    "completion.CompletionHandler.handle_request": ("body", "request_id"),
    "model_manager.ModelManager.load_model_and_processor": ("model_id_and_revision",),
    "utils.GenerationState.get_manager": ("model_id", "use_cb"),
    "utils.GenerateManager.generate_streaming": ("model", "processor", "inputs", "gen_config", "request_id"),
    "utils.GenerateManager.generate_non_streaming": ("model", "processor", "inputs", "gen_config", "request_id"),
    "utils.response_events_to_chunks": ("events",),
    "utils._StreamError.__init__": ("msg",),
}
"""Functions that this package calls or overrides, and the parameters that it relies on."""


def check_transformers() -> None:
    """Refuse a version of transformers with another server than this module expects.

    Raises:
        KVPolicyError: Naming the first difference.
    """
    for path, expected in _EXPECTED.items():
        found: Any = globals()
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        given = list(inspect.signature(found).parameters) if callable(found) else []
        given = given[1:] if given[:1] == ["self"] else given
        if given[: len(expected)] != list(expected):
            raise KVPolicyError(
                f"transformers must have the server of versions {TESTED}, got {transformers.__version__}, where "
                f"{path} is different; try one of these versions."
            )


class OneModel(BaseModels):
    """A model manager that has one model, with a policy attached, and loads no other.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        name: Its name in requests.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        """Not transformers' own, which resolves devices and kernels in order to load models."""
        self.force_model = name
        self._found = (model, tokenizer)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name without a revision: answers contain it."""
        return model_id

    def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return self._found


class OneManager(BaseState):
    """Generation by one manager, which has the rows.

    Args:
        manager: The manager.
    """

    def __init__(self, manager: Any) -> None:
        """Without continuous batching and without `torch.compile`."""
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """The manager."""
        return self._manager


class ChatHandler(BaseChat):
    """Transformers' handler for chat, with messages as they were checked.

    Transformers' own conversion leaves out fields, such as the content of a message that has tool calls.
    """

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        """The messages for the chat template, which `parse_chat` has made."""
        return messages


def make_handlers(models: OneModel, manager: Any) -> tuple[Any, Any]:
    """Transformers' handlers for chat and for completions.

    Args:
        models: The model.
        manager: The manager that generates.
    """
    state = OneManager(manager)
    text: Any = completion
    return ChatHandler(models, state), text.CompletionHandler(models, state)


def response_items(events: list[Any]) -> list[Any]:
    """The entries of a handler's queue for the events of transformers' parser: texts, reasoning and tool calls."""
    private: Any = utils
    return private.response_events_to_chunks(events)


MALFORMED = (ValueError, TypeError, LookupError, RuntimeError)
"""What transformers' parser raises for a call of a tool that is no JSON, or lacks a name or arguments."""


def check_calls(calls: Iterable[Any]) -> None:
    """Look for what transformers' handler reads of calls of tools; raises one of `MALFORMED` if it is not there."""
    for call in calls:
        _ = call["function"]["name"], call["function"]["arguments"]


def last_events(parser: Any) -> list[Any]:
    """The events of transformers' parser at the end of a text; none if the text ends within a tool call."""
    try:
        return parser.finalize()[1]
    except (ValueError, RuntimeError):  # what transformers catches
        return []


def stream_error(message: str) -> Any:
    """The entry of a queue that ends a stream with an error."""
    private: Any = utils
    return private._StreamError(message)
