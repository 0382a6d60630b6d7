"""All that touches the private server of transformers: its handlers for chat and completions, with one model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# First of all: transformers imports without these, and its handlers then fail with a NameError.
import fastapi as _fastapi  # noqa: F401  # pyright: ignore[reportUnusedImport]
import openai as _openai  # noqa: F401  # pyright: ignore[reportUnusedImport]
import transformers

from kvpolicy.spec.errors import KVPolicyError

try:
    from transformers.cli.serving import chat_completion, completion, model_manager, utils

    BaseGeneration: Any = utils.GenerateManager
    BaseModels: Any = model_manager.ModelManager
    BaseState: Any = utils.GenerationState
except (ImportError, AttributeError):  # another version; `check_transformers` says so
    chat_completion = completion = model_manager = utils = None
    BaseGeneration = BaseModels = BaseState = object

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
    "completion.CompletionHandler.handle_request": ("body", "request_id"),
    "model_manager.ModelManager.load_model_and_processor": ("model_id_and_revision",),
    "utils.GenerationState.get_manager": ("model_id", "use_cb"),
    "utils.GenerateManager.generate_streaming": ("model", "processor", "inputs", "gen_config", "request_id"),
    "utils.GenerateManager.generate_non_streaming": ("model", "processor", "inputs", "gen_config", "request_id"),
    "utils.GenerateManager.submit": ("fn",),
    "utils.DirectStreamer.__init__": ("tokenizer", "loop", "queue", "response_parser"),
    "utils.DirectStreamer.put": ("value",),
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
        if given[1 : len(expected) + 1] != list(expected):
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
    """Generation by one manager, so that one request is answered at a time.

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


def make_handlers(models: OneModel, manager: Any) -> tuple[Any, Any]:
    """Transformers' handlers for chat and for completions.

    Args:
        models: The model.
        manager: The manager that generates.
    """
    state = OneManager(manager)
    chat: Any = chat_completion
    text: Any = completion
    return chat.ChatCompletionHandler(models, state), text.CompletionHandler(models, state)


def text_streamer(tokenizer: Any, loop: Any, queue: Any, response_parser: Any, cancel: Callable[[], None]) -> Any:
    """Transformers' streamer, which decodes tokens and puts text into a queue; the handler may `cancel` it."""
    private: Any = utils
    streamer = private.DirectStreamer(tokenizer._tokenizer, loop, queue, response_parser=response_parser)
    streamer.cancel = cancel
    return streamer


def stream_error(message: str) -> Any:
    """The entry of a queue that ends a stream with an error."""
    private: Any = utils
    return private._StreamError(message)


def adapt_tokenizer(tokenizer: Any) -> bool:
    """Let a tokenizer without a chat template join the contents of messages by newlines.

    Args:
        tokenizer: The tokenizer; its `apply_chat_template` is replaced.

    Returns:
        Whether it has a chat template.

    Raises:
        KVPolicyError: If it is a tokenizer that cannot stream.
    """
    if not hasattr(tokenizer, "_tokenizer"):
        raise KVPolicyError(
            f"The tokenizer must be a fast tokenizer to be streamed, got {type(tokenizer).__name__}; try a model with "
            "a tokenizer.json."
        )
    # A call of the tokenizer would do so too, while another thread may be using it.
    tokenizer._tokenizer.no_truncation()
    tokenizer._tokenizer.no_padding()
    has_template = bool(getattr(tokenizer, "chat_template", None))
    tokenizer.apply_chat_template = _rendering(tokenizer) if has_template else _joining(tokenizer)
    return has_template


def _joining(tokenizer: Any) -> Callable[..., Any]:
    def join(messages: list[dict[str, Any]], *, tools: Any = None, **kwargs: Any) -> Any:
        if tools or any("tool_calls" in message for message in messages):
            raise KVPolicyError("The tokenizer must have a chat template for tools, got one without; try it without.")
        # With the special tokens that the tokenizer adds to any text, unlike those of a template.
        return tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt", verbose=False)

    return join


def _rendering(tokenizer: Any) -> Callable[..., Any]:
    render = tokenizer.apply_chat_template

    def apply(messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return render(messages, **kwargs)
        except TemplateError as error:
            raise KVPolicyError(f"The messages must fit the model's chat template, got an error: {error}.") from None

    return apply
