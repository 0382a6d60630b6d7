"""The embedded model under lm-eval, loaded once. Warnings of lm-eval and its dependencies are ignored."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval.models.huggingface")
    import kvpolicy
    from kvpolicy_lm_eval.model import KVPolicyLM


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="session")
def tiny() -> tuple[Any, Any]:
    """The embedded model and its tokenizer."""
    return kvpolicy.tiny()


@pytest.fixture(scope="session")
def make(tiny: tuple[Any, Any]) -> Callable[..., KVPolicyLM]:
    """Create a KVPolicyLM with the embedded model, without loading it again."""
    model, tokenizer = tiny

    def build(policy: str = "full", **kwargs: Any) -> KVPolicyLM:
        return KVPolicyLM(pretrained=model, tokenizer=tokenizer, policy=policy, **kwargs)

    return build
