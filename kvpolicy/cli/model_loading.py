"""The arguments of a command: the model and its tokenizer, the prompt, and the files that a policy reads.

A prompt is read from somewhere, tokenized, and must fit the model.
"""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.cli.arguments import TINY
from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError, is_out_of_memory
from kvpolicy.text.formats import reason_of

if TYPE_CHECKING:
    from kvpolicy.policy import Policy
    from kvpolicy.tuning.windows import Window


DTYPES = ("bfloat16", "float16", "float32", "float64")
"""The dtypes in which attention can be computed."""

SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Other names of dtypes, as configs of training and users write them."""


WITHOUT_FP64 = "mps"
"""The accelerator of Apple silicon, which has no float64, in which budgets and scores are computed."""


def load(name: str, dtype: str = "auto", device: str = "", *, text: bool = True, tp: int = 1) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: `tiny` for the embedded model, a folder, a GGUF file, or a model name on the Hub.
        dtype: The dtype of the weights; `auto` for that of the checkpoint, or float32 for the embedded model.
        device: The device; an empty string for an accelerator if one is available, but the CPU on Apple silicon.
        text: Whether to load the tokenizer.
        tp: The number of ranks, of which this one loads its part, by the plan of transformers.

    Returns:
        The model in evaluation mode, and its tokenizer or None.

    Raises:
        KVPolicyError: If the dtype or the device is unknown, or the model cannot be loaded.
    """
    import torch

    from kvpolicy.hf.embedded import tiny

    weight_dtype: Any = "auto" if dtype == "auto" else dtype_of(dtype)
    target = _device(device)
    with _progress_bars_disabled():
        if name in EMBEDDED and tp > 1:
            raise KVPolicyError(f"--tp must be 1 for the embedded model, got {tp}; try a folder or a name on the Hub.")
        if name in EMBEDDED:
            model, tokenizer = tiny(torch.float32 if weight_dtype == "auto" else weight_dtype, name=name)
        else:
            _check_name(name)
            model, tokenizer = _load_pretrained(name, weight_dtype, text, tp)
    return model if tp > 1 else _move(model, target), tokenizer


def dtype_of(name: str) -> Any:
    """Return the dtype of a name, such as `bfloat16` or `bf16`.

    Raises:
        KVPolicyError: If it is unknown, or attention cannot be computed in it.
    """
    import torch

    word = name.strip().lower().removeprefix("torch.")
    word = SHORT.get(word, word)
    dtype = getattr(torch, word, None) if word.isidentifier() else None
    if dtype not in [getattr(torch, known) for known in DTYPES]:
        raise KVPolicyError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}; try bfloat16.")
    return dtype


def _device(name: str) -> str:
    """Check the name of a device; replace an empty one by the accelerator, or by the CPU if there is none."""
    import torch

    if not name:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if found is None or found.type == WITHOUT_FP64 else str(found)
    try:
        found = torch.device(name)
    except RuntimeError:
        raise KVPolicyError(f"--device must be a device of PyTorch, got {name!r}; try cpu, cuda or cuda:1.") from None
    if found.type == WITHOUT_FP64:
        raise KVPolicyError(f"--device must be a device that computes in float64, got {name!r}; try cpu.")
    if found.type == "meta":
        raise KVPolicyError(
            "--device must be a device that stores numbers, got 'meta'; try cpu, or kvpolicy plan, which loads no "
            "weights."
        )
    return str(found)


@contextmanager
def _progress_bars_disabled() -> Generator[None, None, None]:
    """Disable the progress bars of transformers, which would mix with the output."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _check_name(name: str) -> None:
    """Raise KVPolicyError if there is no such model or only its config, before anything large is read."""
    from kvpolicy.hf.embedded import SHIPPED, config_of

    if name in SHIPPED:
        raise KVPolicyError(
            f"The model {name!r} cannot be loaded, because only its config ships; try kvpolicy plan {name}."
        )
    try:
        config_of(name)
    except ValueError as error:
        reason = _shorten(error.__cause__ or error)
        similar = difflib.get_close_matches(name, EMBEDDED, 1, 0.75)
        if similar:
            reason = f"{reason.rstrip('.')}; did you mean {similar[0]!r}?"
        raise KVPolicyError(f"The model {name!r} cannot be loaded: {reason}") from error


def _load_pretrained(name: str, dtype: Any, text: bool, tp: int) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvpolicy.hf.embedded import checkpoint_of
    from kvpolicy.hf.meta_model import MALFORMED

    where, options = checkpoint_of(name)
    how: dict[str, Any] = {"trust_remote_code": False, **options}
    share = {} if tp == 1 else _share(where, how, tp)
    loading = "tokenizer of the model"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(where, **how) if text else None
        loading = "model"
        model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **how, **share)
    except (OSError, SafetensorError, *MALFORMED) as error:
        # Of a RuntimeError, tensors of other sizes than the config says, and a file of PyTorch that is cut off.
        if is_out_of_memory(error):
            raise
        reason = _shorten(error)
        if reason.startswith("Unrecognized configuration class"):  # the message lists every class of transformers
            reason = "only decoder-only causal language models are supported."
        if "ignore_mismatched_sizes" in reason:  # the message names an option that no command has
            reason = "its weights have other sizes than its config says."
        raise KVPolicyError(f"The {loading} {name!r} cannot be loaded: {reason}") from error
    # Checkpoints that were saved in training with `use_cache: false` would generate without the policy.
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.use_cache = True
        # That of a policy takes its place, and that without a policy is the ordinary one.
        model.generation_config.cache_implementation = None
    return model.eval(), tokenizer


def _share(where: str, how: dict[str, Any], tp: int) -> dict[str, Any]:
    """The arguments by which transformers loads this rank's part of a model.

    Raises:
        KVPolicyError: If its plan is not tested with this model, or cannot divide it among so many ranks.
    """
    from transformers import AutoConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    from kvpolicy.hf.weights import check_shardable

    check_shardable(AutoConfig.from_pretrained(where, **how), "hf", tp)
    return {"distributed_config": DistributedConfig(tp_size=tp)}


def _shorten(error: BaseException) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def _move(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, ImportError) as error:  # PyTorch raises any of them
        reason = str(error).strip().splitlines()[0]
        raise KVPolicyError(f"The device {device!r} cannot be used ({reason}); try cpu.") from error


TRAINED_LENGTH = 1024
"""The longest prompt that the embedded model was trained on, in tokens."""


def sample() -> str:
    """Return the default prompt: sixty records and a question that the embedded model can answer.

    >>> sample().endswith("?iron=")
    True
    """
    text = (files("kvpolicy") / "assets" / "sample.txt").read_text(encoding="utf-8")
    return text.removesuffix("\n")


def read_prompt(prompt: str | None, file: str | None, model: str, *, whole: bool = False) -> tuple[str, bool]:
    """Read the prompt from the argument, a file or standard input.

    One newline at the end of a file or of standard input is removed, unless `whole` is true.

    Args:
        prompt: The argument; `-` for standard input.
        file: The path of the file; `-` for standard input.
        model: The name of the model. The embedded model has a default prompt.
        whole: Whether to keep the text as it is, since more text will follow it.

    Returns:
        The prompt, and whether it is the default prompt.

    Raises:
        KVPolicyError: If there is no prompt or more than one, or it is empty or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise KVPolicyError("The prompt must be given once, got both an argument and --file; try one of them.")
    source = prompt if file is None else file
    if prompt is not None and prompt != "-":
        text = _check_argument(prompt)
    else:
        text = _read(source)
        if not whole:
            text = text.removesuffix("\n")
    if not text and source is None:
        if model in EMBEDDED:
            return sample(), True
        raise KVPolicyError("The prompt must be an argument, a file or standard input, got no prompt; try --file FILE.")
    if not text.strip():
        raise KVPolicyError("The prompt must contain text, got an empty one; try a prompt of at least one word.")
    return text, False


def _read(source: str | None) -> str:
    """The text of a file, of standard input (`-`), or, without a source, of standard input that is no terminal."""
    if source is None:
        return "" if sys.stdin is None or sys.stdin.isatty() else _standard_input()
    return _standard_input() if source == "-" else _decode(_read_file(source), source)


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise KVPolicyError(f"The file {path!r} cannot be read ({reason_of(error)}); try a text file.") from error


def _standard_input() -> str:
    raw: Any = getattr(sys.stdin, "buffer", sys.stdin).read()
    return raw if isinstance(raw, str) else _decode(raw, "standard input")


def _decode(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise KVPolicyError(
            f"The text of {source} must be UTF-8, got {reason_of(error)}; try converting it."
        ) from error


def _check_argument(text: str) -> str:
    """Raise KVPolicyError if the argument was not UTF-8.

    Python passes such bytes as surrogates, which no tokenizer accepts.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KVPolicyError(
            f"The text of the argument must be UTF-8, got an invalid character at position {error.start:,}; try "
            "converting it."
        ) from error
    return text


def encode(tokenizer: Any, text: str, chat: bool = False, *, answer: bool = True) -> Any:
    """Tokenize a prompt.

    Args:
        tokenizer: The tokenizer.
        text: The prompt.
        chat: Whether to format it as a message of the user with the chat template.
        answer: Whether the template begins an answer behind the message.

    Returns:
        Token ids, [1, P] int64.

    Raises:
        KVPolicyError: If the tokenizer has no chat template, or returns no tokens.
    """
    if chat and not getattr(tokenizer, "chat_template", None):
        raise KVPolicyError(
            "The tokenizer must have a chat template for --chat, got one without; try the command without --chat."
        )
    if chat:
        messages = [{"role": "user", "content": text}]
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=answer, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(text, return_tensors="pt", verbose=False)
    if not encoded["input_ids"].numel():
        raise KVPolicyError("The prompt must have at least one token, got none; try a longer prompt.")
    return encoded["input_ids"]


def check_length(model: Any, tokens: int, new: int, remedy: str = "") -> None:
    """Raise KVPolicyError if the prompt and the new tokens exceed the context length of the model.

    Args:
        model: The model.
        tokens: Tokens of the prompt.
        new: Tokens that follow.
        remedy: Advice for the user, if not a shorter prompt or a smaller `--new`.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < tokens + new:
        remedy = remedy or f"try a shorter prompt{' or a smaller --new' if new else ''}"
        raise KVPolicyError(
            f"The prompt and the new tokens must fit into {limit:,} positions, got {tokens:,} and {new:,}; {remedy}."
        )


def check_longest(model: Any, windows: Sequence[Window]) -> None:
    """Raise KVPolicyError if a text, a prompt with what follows it, exceeds the context length of the model."""
    longest = max(windows, key=lambda window: window.length)
    remedy = "try shorter texts, or smaller --prompt and --answer"
    check_length(model, len(longest.prompt), len(longest.follow), remedy)


def prompt_notes(model: str, tokens: int, is_sample: bool) -> list[str]:
    """Return what a user should know about the prompt, one sentence each."""
    notes: list[str] = []
    if is_sample:
        key = sample().rpartition("?")[2]
        record = next(line for line in sample().splitlines() if line.startswith(key))
        notes.append(f"No prompt was given. The built-in sample has 60 records, such as {record}, and asks for ?{key}")
    if model == TINY and tokens > TRAINED_LENGTH:
        notes.append(
            f"The embedded model was trained on prompts of at most {TRAINED_LENGTH:,} tokens; this prompt has "
            f"{tokens:,}."
        )
    return notes


def files_of(policy: Policy) -> list[str]:
    """The files and folders that the parts of a policy name, of those that exist.

    >>> from kvpolicy import Policy
    >>> files_of(Policy.parse("squeeze+kvcrush/h2o+kivi@0.2"))
    []
    """
    from kvpolicy.policy import TunedPolicy

    content = policy.source if isinstance(policy, TunedPolicy) else policy.to_dict()
    from kvpolicy.text.model_file import paths_in  # needs PyTorch

    return paths_in(content)
