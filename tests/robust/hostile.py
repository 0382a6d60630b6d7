"""What tests of hostile use share: policies, a model of one's own, and what a refusal must look like."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvpolicy import PolicyCache
from tests.conformance.models import VOCABULARY, build
from tests.conformance.play import TURNS, make_batch, talk
from tests.conformance.policies import words
from tests.sampling import product, star

POLICIES = {
    "full": "full",
    "h2o": "h2o@0.5",
    "squeeze": words("squeeze", "snapkv"),
    "kvcrush": "kvcrush/streaming:sinks=2@0.5",
    "kivi": words("snapkv", "kivi"),
    "mikv": words("h2o", "mikv"),
    "csr": words("streaming", "csr"),
}
FEW = ("full", "squeeze", "csr")
"""No budget, prompts that wait for their budgets, and codes: for what hardly depends on the policy."""
_NAMES = {words: name for name, words in POLICIES.items()}


def each(names: str = "", *axes: Sequence[Any], often: Sequence[str] = tuple(POLICIES)) -> pytest.MarkDecorator:
    """Each policy with each value of other axes; on every commit a star, of the policies that are named in `often`.

    The second of these and the first value of each axis are its center.
    """
    whole = ([*POLICIES.values()], *axes)
    center = (POLICIES[often[1]], *(axis[0] for axis in axes))
    sample = star([POLICIES[name] for name in often], *axes, centers=[center] * len(whole))
    return product(["policy", *names.split(",")] if names else ["policy"], *whole, sample=sample, ids=_name)


def _name(value: Any) -> str | None:
    """The short name of a policy; for all else, pytest's."""
    return _NAMES.get(value) if isinstance(value, str) else None


EACH = each()
SOME = each(often=FEW)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
NEW = sum(TURNS[1:])


def roomy(policy: str, budget: str = "64") -> str:
    """The policy with a budget for everything."""
    return policy if policy == "full" else f"{policy.rpartition('@')[0]}@{budget}"


def exact(policy: str) -> bool:
    """Whether what is kept is kept as it is."""
    return not any(codec in policy for codec in ("+kivi", "+mikv", "+csr"))


def own(family: str = "llama") -> Any:
    """A model that a test may change."""
    return copy.deepcopy(build(family))


def drawn(name: str, config: Any) -> Any:
    """A sharp random model of a class of transformers; vectors such as the weights of norms are random, too."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    return model


def made(name: str, config: str, *without: str, **fields: Any) -> Any:
    """A small model of a class of transformers, with a config of another one."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    sizes = {key: value for key, value in sizes.items() if key not in without}
    return drawn(name, getattr(transformers, config)(**(sizes | fields)))


def converse(model: Any, lengths: list[int], seed: int = 0) -> tuple[Tensor, PolicyCache]:
    """Logits of a conversation over a new cache, and the cache."""
    cache = PolicyCache(model, new=NEW)
    return talk(model, *make_batch(lengths, TURNS, seed), TURNS, cache), cache


def prompt(width: int = 26) -> Tensor:
    """Ids of one row, [1, width]."""
    return make_batch([width], [width])[0]


def answer(model: Any, **how: Any) -> Tensor:
    """What greedy generation of a padded batch gives."""
    ids, mask = make_batch([24, 15], [24])
    return model.generate(ids, attention_mask=mask, **(GREEDY | how))


@contextmanager
def refused(match: str) -> Generator[None]:
    """Nothing but one sentence of ours, which ends with how to go on."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=match) as error:
        yield
    said = str(error.value)
    assert said.endswith(".") and ". " not in said and "\n" not in said, said
    raised = [Path(str(entry.path)) for entry in error.traceback][-1]
    assert "kvpolicy" in raised.parts, f"{raised} raised it"
