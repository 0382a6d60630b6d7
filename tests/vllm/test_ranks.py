"""Engines of several processes: each rank loads and compresses its own heads, and their answers are those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpolicy import KVPolicyError
from tests.vllm.compressed import LEAST, recipe_of, run, wanted
from tests.vllm.engines import about, answers_of, ask, engine, plain, reasons, sampling
from tests.vllm.models import POLICY, Saved, Served, answer, close, make_model, make_question, make_text, save, short

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_documents_of_several_ranks(served: Served, tmp_path: Path, ranks: int) -> None:
    path = save(served.model, POLICY, make_text(served.model, 150, 40), tmp_path / "d.safetensors")
    with engine(served.folder / "model", processes=True, tensor_parallel_size=ranks) as llm:
        good = [about(*each, llm) for each in served.asked]
        refused = good[0][0], sampling()
        missing = about(path, [5, 6], llm)
        path.unlink()
        for _ in range(2):
            found = ask(llm, [refused, *good, plain([5, 6]), missing])
            assert reasons(found) == ["error", *["length"] * 7, "error"]
            assert [[*each.outputs[0].token_ids] for each in found[1:7]] == short(served.wanted)


def test_ranks_that_share_a_head(tmp_path: Path) -> None:
    model = make_model("one head")
    model.save_pretrained(tmp_path / "model")
    path = save(model, POLICY, make_text(model, 90), tmp_path / "d.safetensors")
    question = make_question(model)
    with engine(tmp_path / "model", processes=True, tensor_parallel_size=2) as llm:
        for _ in range(2):
            (found,) = ask(llm, [about(path, question, llm)])
            assert [*found.outputs[0].token_ids] == answer(model, POLICY, path, question).tokens


CASES = [
    (1, "snapkv:window=8@0.3"),
    *((2, f"{selector}@0.3") for selector in ("snapkv:window=8", "h2o", "keydiff", "expected")),
]


@pytest.mark.parametrize(("ranks", "policy"), CASES)
def test_compressed_prompts_of_several_ranks(tmp_path: Path, ranks: int, policy: str) -> None:
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
