"""Two ranks compress their own heads, and their answers are those of one; engines that cannot compress do not start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy import KVPolicyError
from tests.vllm.compressed import LEAST, recipe_of, run, wanted
from tests.vllm.engines import answers_of, engine, plain
from tests.vllm.models import Saved, close, make_model, make_text

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


CASES = [
    (1, "snapkv:window=8@0.3"),
    (2, "snapkv:window=8@0.3"),
    (2, "h2o@0.3"),
    (2, "keydiff@0.3"),
    (2, "expected@0.3"),
]


@pytest.mark.parametrize(("ranks", "policy"), CASES)
def test_answers_of_several_processes(tmp_path: Path, ranks: int, policy: str) -> None:
    model = make_model("llama3")
    model.save_pretrained(tmp_path / "model")
    prompts = [make_text(model, tokens, tokens) for tokens in (70, 128, 200)]
    recipe = recipe_of(policy)
    extra = {"policy": policy, "threshold": LEAST, "least": 0}
    options: dict[str, Any] = {"processes": True, "tensor_parallel_size": ranks, "max_num_batched_tokens": 96}
    with engine(tmp_path / "model", extra=extra, **options) as llm:
        found = answers_of(run(llm, prompts, recipe, [plain([5, 6])]))
    assert close(found[:3], [wanted(model, recipe, ids) for ids in prompts])


def test_speculation_by_ngrams(tmp_path: Path) -> None:
    """Drafts come with the last token of a prompt, in one step."""
    model = make_model("llama3")
    model.save_pretrained(tmp_path / "model")
    policy = "snapkv:window=8@0.5"
    prompts = [make_text(model, 40, 1) * 3, make_text(model, 100, 2)]
    recipe = recipe_of(policy)
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    options: dict[str, Any] = {"processes": True, "speculative_config": speculation}
    with engine(tmp_path / "model", extra={"policy": policy, "threshold": LEAST, "least": 0}, **options) as llm:
        found = answers_of(run(llm, prompts, recipe, tokens=24))
    assert close(found, [wanted(model, recipe, ids, 24) for ids in prompts])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("kvzip@0.2", "must be one of window"),
        ("snapkv+kivi@0.2", "must not encode tokens"),
        ("expected@0.003", "at least 5 tokens"),
    ],
)
def test_other_policies_do_not_start(saved: Saved, policy: str, message: str) -> None:
    extra = {"policy": policy, "least": 0}
    with pytest.raises(KVPolicyError, match=message), engine(saved.folder / "model", extra=extra):
        pass
