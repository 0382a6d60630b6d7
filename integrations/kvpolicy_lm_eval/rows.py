"""Greedy answers in rows that are refilled: the row of an answer that ends goes to the next prompt at once.

It is the loop of `kvpolicy serve`. Each prompt is read alone, without padding, and each answer is the one that its
prompt has alone, whatever is in the other rows.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvpolicy.serving.forwards import ManyRows, Prompts
from kvpolicy.serving.metrics import CacheUsage, Metrics
from kvpolicy.serving.prompt import Prompt
from kvpolicy.serving.sampling import Sampler, Sampling
from kvpolicy.serving.scheduler import Scheduler
from kvpolicy.text.errors import KVPolicyError

REFILLS = 16
"""Prompts for each row that are given together: while the last answers end, rows stay free."""

GREEDY = frozenset(("until", "do_sample", "temperature", "max_gen_toks", "max_tokens", "max_new_tokens"))
"""Arguments of a request that rows know."""


class RowAnswer:
    """One greedy answer on its way through a row; see `kvpolicy.serving.scheduler.Answer`.

    Args:
        ids: Token ids of its prompt.
        config: The generation config.
        tokenizer: The tokenizer.
        stop: Strings that end the answer.
    """

    is_cancelled = False

    def __init__(self, ids: list[int], config: Any, tokenizer: Any, stop: Sequence[str]) -> None:
        """Nothing was generated."""
        self.client = self
        self.prompt = Prompt(ids, config)
        self.text = [*ids]
        self.tokens: list[int] = []
        self.cached = 0
        self.usage: CacheUsage | None = None
        self.error: Exception | None = None
        self._sampler: Sampler | None = None
        self._decode = tokenizer.decode
        # lm-eval looks for a string in as many tokens: others than its own may write it too.
        self._stop = [(text, len(tokenizer.encode(text, add_special_tokens=False)) + 2) for text in stop]

    def take(self, logits: Tensor, best: int) -> bool:
        """Add the best token, once transformers' processors have changed the logits."""
        prompt = self.prompt
        most = prompt.config.max_new_tokens
        if self._sampler is None:
            processors = prompt.processors or []
            self._sampler = Sampler(Sampling(), prompt.ids, most, processors, is_greedy=True, device=logits.device)
        token = self._sampler(logits, best)
        self.tokens.append(token)
        self.text.append(token)
        is_whole = len(self.tokens) >= most or token in prompt.ends
        return is_whole or any(text in self._decode(self.tokens[-tokens:]) for text, tokens in self._stop)

    def end(self, usage: Any, error: Exception | None) -> None:
        """Note how the answer ended."""
        self.usage = usage
        self.error = error


def is_greedy(arguments: dict[str, Any]) -> bool:
    """Whether the arguments of a request ask for the best token each time, and for nothing that rows do not know.

    Examples:
        >>> is_greedy({"until": ["."]}), is_greedy({"temperature": 0.7, "do_sample": True}), is_greedy({"num_beams": 2})
        (True, False, False)
    """
    chooses = arguments.get("do_sample") or (arguments.get("temperature") and arguments.get("do_sample") is None)
    return not chooses and arguments.keys() <= GREEDY


def rows_obstacle(handle: Any, rows: int, length: int) -> str:
    """Why answers of up to `length` tokens cannot be generated in rows that are refilled; empty if they can."""
    try:
        handle.rows(rows, length)
    except KVPolicyError as error:
        return str(error)
    return ""


def answer_in_rows(
    handle: Any, model: Any, tokenizer: Any, prompts: Sequence[list[int]], rows: int, new: int, stop: Sequence[str]
) -> list[RowAnswer]:
    """Generate greedily behind prompts, several at a time.

    Args:
        handle: The policy, attached to the model.
        model: The model.
        tokenizer: Its tokenizer.
        prompts: Token ids of each prompt.
        rows: How many rows there are.
        new: The most tokens of an answer.
        stop: Strings that end an answer.

    Returns:
        The answers, in the order of the prompts.

    Raises:
        Exception: What ended the first answer that failed.
    """
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=False, max_new_tokens=new, max_length=None, pad_token_id=tokenizer.pad_token_id)
    answers = [RowAnswer(ids, config, tokenizer, stop) for ids in prompts]
    length = max(map(len, prompts)) + new
    scheduler = Scheduler(ManyRows(Prompts(model, handle, Metrics()), min(rows, len(prompts)), length), share=1.0)
    scheduler.submit(answers)
    while scheduler.turn():
        pass
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return answers


def stack_answers(context: Tensor, answers: Sequence[RowAnswer], columns: int, pad: int) -> Tensor:
    """Prompts and their answers as `generate` returns them, [B, columns].

    Args:
        context: Token ids of the prompts, padded on the left, [B, T].
        answers: The answer to each.
        columns: Columns of the prompts and of the longest answer that they may have.
        pad: The token id of padding behind an answer.
    """
    size = context.shape[1]
    out = context.new_full((len(answers), columns), pad)
    out[:, :size] = context
    for row, answer in zip(out, answers, strict=True):
        row[size : size + len(answer.tokens)] = row.new_tensor(answer.tokens)
    return out
