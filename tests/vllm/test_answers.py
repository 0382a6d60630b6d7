"""vLLM answers about documents as kvpolicy does, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engines import about, answers, engine, plain
from tests.vllm.models import (
    EMBEDDED,
    FAMILIES,
    MORE,
    Answer,
    answer,
    answer_of_decoded,
    close,
    make_model,
    make_question,
    make_text,
    save,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

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
