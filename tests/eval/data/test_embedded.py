"""The shipped model: it loads offline and answers its own prompts with the full cache."""

from __future__ import annotations

from importlib.resources import as_file, files
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpolicy_eval.data.tasks import tasks

Embedded = tuple[Any, Any]
"""Model and tokenizer."""


@pytest.fixture(scope="module")
def embedded() -> Embedded:
    with as_file(files("kvpolicy") / "assets" / "tiny") as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_tokenizer_prepends_bos_and_pads_left(embedded: Embedded) -> None:
    _, tokenizer = embedded
    batch = tokenizer(["?tiger=", "tiger=4821\n?tiger="], padding=True)["input_ids"]
    assert batch[0][0] == tokenizer.pad_token_id and batch[1][0] == tokenizer.bos_token_id
    assert len(batch[1]) == 1 + 7 + 3


@pytest.mark.parametrize("task", tasks(512))
def test_full_cache_answers(embedded: Embedded, task: str) -> None:
    model, tokenizer = embedded
    right = 0
    for seed in range(5):
        prompt, answer = tasks(512)[task](Random(seed))
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        out = model.generate(**inputs, max_new_tokens=len(answer), do_sample=False)
        right += tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]) == answer
    assert right >= 4
