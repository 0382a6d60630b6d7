"""Engines of many models and options answer about documents as kvpolicy does, token for token.

Each test starts its own, since two would share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError
from kvpolicy_vllm import prompt
from tests.vllm.engines import about, answers, ask, engine, free_blocks, plain, reasons, sampling, scheduler_of
from tests.vllm.models import (
    EMBEDDED,
    FAMILIES,
    LONG,
    MORE,
    POLICY,
    Answer,
    Served,
    answer,
    answer_of_decoded,
    close,
    make_model,
    make_question,
    make_text,
    save,
    short,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


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


PLAIN = ["kvzip:decode=grow@0.5", "keydiff:decode=grow@0.3"]
CODED = ["snapkv:decode=grow+tokenwise@0.5", "snapkv:decode=grow+kivi@0.5"]
UNROTATED = ["kvzip:decode=grow+csr@0.5", "kvzip:decode=grow+kvquant@0.5"]
"""Codecs whose dictionaries ship for the embedded model, and which hold keys without their rotation."""

CASES = [
    ("tiny", True, [*PLAIN, *CODED, *UNROTATED]),
    ("tiny", False, [*PLAIN, *CODED]),
    *((family, True, [*PLAIN, *CODED]) for family in (EMBEDDED[1], *FAMILIES)),
    *((family, True, PLAIN) for family in MORE),
    ("stablelm", False, PLAIN),
]
TEXTS = [90, 128, 200]
"""Tokens of documents, of which kept tokens fill a block, or end in the middle of one."""


@pytest.mark.parametrize(("family", "eager", "policies"), CASES, ids=[f"{name}-{eager}" for name, eager, _ in CASES])
def test_answers_are_those_of_kvpolicy(family: str, eager: bool, policies: list[str], tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    asked: list[tuple[Path, list[int]]] = []
    wanted: list[Answer] = []
    for number, policy in enumerate(policies):
        # A cache of kvpolicy would code the question too.
        reference = answer if policy in PLAIN else answer_of_decoded
        for tokens in TEXTS:
            path = save(model, policy, make_text(model, tokens, number), tmp_path / f"{number}-{tokens}.safetensors")
            for record in ("wolf", "gold"):
                question = make_question(model, record)
                asked.append((path, question))
                wanted.append(reference(model, policy, path, question))
    with engine(tmp_path / "model", enforce_eager=eager) as llm:
        requests = [about(path, question, llm) for path, question in asked]
        assert close(answers(llm, requests), wanted)
        assert close(answers(llm, requests), wanted)  # now from the prefix cache
        without = answers(llm, [plain(question) for _, question in asked])
    assert all(one.tokens != other.tokens for one, other in zip(without, wanted, strict=True))


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"block_size": 64}, {"block_size": 128}])
def test_without_a_prefix_cache_and_with_other_blocks(served: Served, options: dict[str, Any]) -> None:
    with engine(served.folder / "model", **options) as llm:
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
