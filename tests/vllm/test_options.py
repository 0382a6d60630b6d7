"""Options of engines: preemption, chunks of a question, other blocks and other formats of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.engines import about, answers, ask, engine, free_blocks, plain, reasons, scheduler_of
from tests.vllm.models import LONG, POLICY, Served, answer, make_model, make_question, make_text, save, short

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_without_a_prefix_cache(served: Served) -> None:
    with engine(served.folder / "model", enable_prefix_caching=False) as llm:
        requests = [about(*each, llm) for each in served.asked]
        for _ in range(2):
            assert short(answers(llm, requests)) == short(served.wanted)


@pytest.mark.parametrize("block_size", [64, 128])
def test_other_blocks(served: Served, block_size: int) -> None:
    with engine(served.folder / "model", block_size=block_size) as llm:
        for _ in range(2):
            assert short(answers(llm, [about(*each, llm) for each in served.asked])) == short(served.wanted)


def test_a_long_question_comes_in_chunks(served: Served) -> None:
    (path, _), question = served.asked[0], make_text(served.model, 100, seed=7) + make_question(served.model)
    wanted = answer(served.model, POLICY, path, question)
    with engine(served.folder / "model", max_num_batched_tokens=24, max_num_seqs=4) as llm:
        for _ in range(2):
            found = answers(llm, [about(path, question, llm), about(*served.asked[2], llm), plain([5, 6, 7])])
            assert short(found[:2]) == [wanted.tokens, *short([served.wanted[2]])]


def test_preempted_requests_are_loaded_again(served: Served) -> None:
    # Each request has 4 blocks of a document and question, and needs another one or two for its answer.
    with engine(served.folder / "model", num_gpu_blocks_override=18, max_model_len=256) as llm:
        preempted: set[str] = set()
        scheduler = scheduler_of(llm)
        inner = scheduler._preempt_request

        def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.add(request.request_id)
            inner(request, *args, **kwargs)

        scheduler._preempt_request = preempt
        before = free_blocks(llm)
        found = answers(llm, [about(*each, llm, tokens=LONG) for each in served.asked])
        assert preempted
        assert short(found, LONG) == short(served.wanted, LONG)
        assert free_blocks(llm) == before


def test_half_precision_takes_documents_of_fp32(served: Served, tmp_path: Path) -> None:
    with engine(served.folder / "model", dtype="bfloat16") as llm:
        found = answers(llm, [about(*each, llm) for each in served.asked])
    agree = [one.tokens[:2] == other.tokens[:2] for one, other in zip(found, served.wanted, strict=True)]
    assert sum(agree) >= len(agree) - 1


def test_documents_of_half_precision(tmp_path: Path) -> None:
    model = make_model("tiny", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    path = save(model, POLICY, make_text(model, 150), tmp_path / "document.safetensors")
    wanted = answer(make_model("tiny"), None, None, make_question(model))
    with engine(tmp_path / "model", dtype="bfloat16") as llm:
        (found, without) = answers(llm, [about(path, make_question(model), llm), plain(make_question(model))])
    exact = answer(model, POLICY, path, make_question(model))
    assert found.tokens[:2] == exact.tokens[:2] and found.logprobs[:2] == pytest.approx(exact.logprobs[:2], abs=0.1)
    assert without.tokens[:1] == wanted.tokens[:1]


def test_a_cache_of_eight_bits(served: Served) -> None:
    with engine(served.folder / "model", dtype="bfloat16", kv_cache_dtype="fp8") as llm:
        for _ in range(2):
            found = ask(llm, [about(*each, llm) for each in served.asked])
            assert reasons(found) == ["length"] * len(found)
            first = [each.outputs[0].token_ids[0] for each in found]
            assert sum(one == other.tokens[0] for one, other in zip(first, served.wanted, strict=True)) >= 4
