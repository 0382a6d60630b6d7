"""Engines with other options and models than most tests have; each test starts its own, since two would share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError
from kvpolicy_vllm import prompt
from tests.vllm.engines import about, answers, ask, engine, free_blocks, plain, reasons, sampling, scheduler_of
from tests.vllm.models import LONG, POLICY, Served, answer, make_model, make_question, make_text, save, short

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_without_a_prefix_cache(served: Served) -> None:
    with engine(served.folder / "model", enable_prefix_caching=False) as llm:
        requests = [about(*each, llm) for each in served.asked]
        for _ in range(2):
            assert short(answers(llm, requests)) == short(served.wanted)


def test_speculation_by_ngrams(served: Served) -> None:
    """Also of a question of one token, whose request begins with a step of several.

    In a process of its own, in which vLLM starts no engine after one that speculates.
    """
    short_questions = [(path, [5]) for path, _ in served.asked[::2]]
    wanted = [answer(served.model, POLICY, *each) for each in short_questions]
    options = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with engine(served.folder / "model", processes=True, speculative_config=options) as llm:
        requests = [about(*each, llm, tokens=LONG) for each in served.asked]
        refused = requests[0][0], sampling()
        for _ in range(2):
            assert short(answers(llm, requests), LONG) == short(served.wanted, LONG)
            assert short(answers(llm, [about(*each, llm) for each in short_questions])) == short(wanted)
            assert reasons(ask(llm, [refused, requests[1]])) == ["error", "length"]


@pytest.mark.parametrize("block_size", [64, 128])
def test_other_blocks(served: Served, block_size: int) -> None:
    with engine(served.folder / "model", block_size=block_size) as llm:
        for _ in range(2):
            assert short(answers(llm, [about(*each, llm) for each in served.asked])) == short(served.wanted)


def test_a_long_question_comes_in_chunks(served: Served) -> None:
    path, _ = served.asked[0]
    question = make_text(served.model, 100, seed=7) + make_question(served.model)
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


def test_half_precision_takes_documents_of_fp32(served: Served) -> None:
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


HAS_WIDE_VECTORS = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


@pytest.mark.skipif(not HAS_WIDE_VECTORS, reason="vLLM stores 8 bits on CPUs with AVX-512 or AMX alone")
def test_a_cache_of_eight_bits(served: Served) -> None:
    with engine(served.folder / "model", dtype="bfloat16", kv_cache_dtype="fp8") as llm:
        for _ in range(2):
            found = ask(llm, [about(*each, llm) for each in served.asked])
            assert reasons(found) == ["length"] * len(found)
            first = [each.outputs[0].token_ids[0] for each in found]
            assert sum(one == other.tokens[0] for one, other in zip(first, served.wanted, strict=True)) >= 4


def test_documents_of_a_folder(served: Served, tmp_path: Path) -> None:
    """Names and paths of the folder are taken, and no others."""
    (tmp_path / "folder").mkdir()
    path = save(served.model, POLICY, make_text(served.model, 150), tmp_path / "folder" / "inside.safetensors")
    outside = save(served.model, POLICY, make_text(served.model, 150), tmp_path / "outside.safetensors")
    question = make_question(served.model)
    text, params = prompt(path, question)
    wanted = answer(served.model, POLICY, path, question)
    with engine(served.folder / "model", extra={"folder": str(tmp_path / "folder")}) as llm:
        named = [(text, sampling(params | {"document": name})) for name in ("inside", "inside.safetensors", str(path))]
        assert short(answers(llm, named)) == [wanted.tokens] * 3
        assert reasons(ask(llm, [about(outside, question), about(path, question)])) == ["error", "length"]


def test_a_second_engine_of_a_process_is_refused(served: Served) -> None:
    """It would have the connector of the first one, which would write into the wrong caches."""
    with engine(served.folder / "model") as llm:
        with pytest.raises(KVPolicyError, match="must be alone in its process"), engine(served.folder / "model"):
            pass
        assert llm is not None
