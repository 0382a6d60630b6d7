"""Whether a policy is right on a small model of an entry: the verdict, and what it was measured from."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

import kvpolicy
from kvpolicy.text.errors import KVPolicyError
from kvpolicy_eval.common.results import Result
from kvpolicy_eval.families import special
from kvpolicy_eval.families.conversation import (
    Written,
    generated,
    under_policy,
    with_stock,
    written_by_stock,
    written_under,
)
from kvpolicy_eval.families.differences import largest, until_parted
from kvpolicy_eval.families.entries import Entry, classes
from kvpolicy_eval.families.prompts import PROMPT, Inputs, padded, prompt, turns
from kvpolicy_eval.families.small_model import build

RIGHT = "right"
REFUSED = "refused"
STOCK = "stock does not run"
WRONG = "WRONG"
ERROR = "error"
"""An error in somebody else's words, a crash, or no end."""
VERDICTS = (RIGHT, REFUSED, STOCK, WRONG, ERROR)
FAILED = (WRONG, ERROR)

WITHIN = 1e-4
"""Largest difference of logits that is rounding, in standard deviations of the logits."""
SEEN_FROM = 0.05
"""Least difference of the same model without the mask: a model with less could not tell a wrong cache."""
EVICTING = ("window@0.5", "snapkv@0.5", "uniform/adakv+snapkv@0.4")
"""Policies that are compared with the masked model: equal heads, heads that differ, heads with different budgets."""
PADDED = "snapkv@0.5"
PLANNED = "snapkv@0.5"


def check(entry: Entry) -> Result:
    """The result of an entry: its verdict, and what was measured.

    Returns:
        `verdict`, one of `VERDICTS`, `sentence`, why it is not right, and `model`, the name of the class; `planned`,
        what `plan` says. Of a model that `attach` takes also `attached`, `full`, `policies` and `padding`.
    """
    start = time.perf_counter()
    result: Result = {"model": str(classes()[entry.kind][entry.name]), "verdict": ERROR, "sentence": ""}
    with _quiet():
        try:
            _check(entry, result)
        except KVPolicyError as error:
            result |= {"verdict": REFUSED, "sentence": str(error)}
        except _StockFails as error:
            result |= {"verdict": STOCK, "sentence": str(error)}
        except Exception as error:
            result |= {"verdict": ERROR, "sentence": describe(error)}
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def describe(error: BaseException) -> str:
    """An error in one line: its type, its message and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('site-packages/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


class _StockFails(Exception):
    """The stock model does not run, so that there is nothing to compare with."""


def _check(entry: Entry, result: Result) -> None:
    """Measure an entry, and write what is known into its result.

    Raises:
        KVPolicyError: If the model, or all policies on it, are refused.
    """
    given = prompt(entry)
    model, expected = _stock(entry, given)
    result["planned"] = _planned(model)
    with kvpolicy.attach(model, "full"):
        result["attached"] = True
        result["full"] = until_parted(generated(model, given), expected)
    if not torch.equal(generated(model, given)[1], expected[1]):
        result |= {"verdict": WRONG, "sentence": "After detach, the stock model gives other logits."}
        return
    _compare(model, given, expected, result)
    if _is_text(given):
        result["padding"] = _padding(model)
    result["verdict"], result["sentence"] = _judge(result)


def _stock(entry: Entry, given: Inputs) -> tuple[nn.Module, Written]:
    """A small stock model, and what it writes.

    Raises:
        _StockFails: If it cannot be made, does not run, or gives no numbers.
    """
    try:
        model = build(entry)
        written = generated(model, given)
    except Exception as error:
        raise _StockFails(special.of(entry, special.WHY_STOCK_FAILS, "") or describe(error)) from error
    if bool(torch.isnan(written[1]).any()):
        raise _StockFails("its logits are no numbers with random weights")
    return model, written


def _planned(model: nn.Module) -> Result:
    """What `plan` says of the config alone: the bytes, or why it refuses."""
    try:
        return {"nbytes": kvpolicy.plan(model.config, PLANNED, prompt=PROMPT, dtype=torch.float32).nbytes}
    except KVPolicyError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": describe(error)}


def _compare(model: nn.Module, given: Inputs, expected: Written, result: Result) -> None:
    """Compare each policy with the stock model that may read what the policy held.

    Raises:
        KVPolicyError: If all evicting policies are refused.
    """
    play = _Conversation(model, given) if _is_text(given) else _Writing(model, given, expected)
    result["full"] = max(result["full"], play.full())
    result["policies"] = {}
    refused = list[KVPolicyError]()
    for spec in EVICTING:
        try:
            result["policies"][spec] = play.evicting(spec)
        except KVPolicyError as error:
            refused.append(error)
            result["policies"][spec] = {"refused": str(error)}
    if len(refused) == len(EVICTING):
        raise refused[0]


class _Conversation:
    """Compares conversations of given tokens."""

    def __init__(self, model: nn.Module, given: Inputs) -> None:
        self._model = model
        self._what = given, turns()
        self._whole = with_stock(model, *self._what)

    def full(self) -> float:
        """How far a cache that keeps everything is from stock."""
        return largest(under_policy(self._model, "full", *self._what).logits, self._whole)

    def evicting(self, spec: str) -> Result:
        """How far a policy is from the masked stock model, and that model from the stock model; the bytes held."""
        played = under_policy(self._model, spec, *self._what)
        masked = with_stock(self._model, *self._what, played.held)
        unmasked = largest(self._whole[1:], masked[1:])
        return {"difference": largest(played.logits, masked), "unmasked": unmasked, "nbytes": played.nbytes}


class _Writing:
    """Compares what `generate` writes, of a model whose forward takes a picture with every token."""

    def __init__(self, model: nn.Module, given: Inputs, expected: Written) -> None:
        self._model = model
        self._given = given
        self._whole = expected

    def full(self) -> float:
        """How far a cache that keeps everything is from stock."""
        return until_parted(written_under(self._model, "full", self._given)[0], self._whole)

    def evicting(self, spec: str) -> Result:
        """How far a policy is from the masked stock model, and that model from the stock model."""
        written, held = written_under(self._model, spec, self._given)
        masked = written_by_stock(self._model, self._given, held)
        return {"difference": until_parted(written, masked), "unmasked": until_parted(self._whole, masked)}


def _is_text(given: Inputs) -> bool:
    return given.keys() == {"input_ids"}


def _padding(model: nn.Module) -> Result:
    """The largest difference between rows of a padded batch and each row alone: of the stock model, under a policy."""
    try:
        stock = _padded_difference(model, nullcontext)
    except Exception as error:
        return {"stock": describe(error)}
    return {"stock": stock, "policy": _padded_difference(model, lambda: kvpolicy.attach(model, PADDED))}


def _padded_difference(model: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> float:
    rows, batch = padded()

    def write(inputs: Inputs) -> Written:
        with context():
            return generated(model, inputs, new=6)

    tokens, logits = write(batch)
    together = [(tokens[row : row + 1], logits[row : row + 1]) for row in range(len(rows))]
    return max(until_parted(row, write(alone)) for row, alone in zip(together, rows, strict=True))


def _judge(result: Result) -> tuple[str, str]:
    """The verdict of a model that ran, and why it is not right."""
    for name, found in {"full": {"difference": result["full"]}, **result["policies"]}.items():
        if found.get("difference", 0.0) > WITHIN:
            return WRONG, f"Under {name}, logits differ by {found['difference']:.2g} standard deviations."
        if found.get("unmasked", SEEN_FROM) < SEEN_FROM:
            return WRONG, f"Without the mask of {name}, logits differ by {found['unmasked']:.2g}: this shows nothing."
    rows = result.get("padding", {})
    stock = rows.get("stock")
    if isinstance(stock, float) and stock <= WITHIN < rows["policy"]:
        return WRONG, f"Rows of a padded batch differ by {rows['policy']:.2g} under {PADDED}, and not in stock."
    return RIGHT, ""


@contextmanager
def _quiet() -> Generator[None]:
    """Without warnings: those of other packages about small sizes help nobody."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
