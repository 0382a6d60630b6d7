"""The next token of a row: what it depends on, and that it is the one of `generate`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import kvpolicy
from kvpolicy.serving.sampling import Sampler, Sampling


def draw(sampler: Sampler, logits: torch.Tensor, tokens: int) -> list[int]:
    return [sampler(logits, int(logits.argmax())) for _ in range(tokens)]


def test_a_row_draws_from_its_own_random_numbers() -> None:
    """Whatever other rows, and the rest of the program, draw in between."""
    logits = torch.linspace(0, 1, 30)
    alone = draw(Sampler(Sampling(seed=3), [1], 20, [], is_greedy=False), logits, 20)
    assert len(set(alone)) > 5
    others = [Sampler(Sampling(seed=seed), [1], 20, [], is_greedy=False) for seed in (3, 4, None)]
    made: list[list[int]] = [[], [], []]
    for _ in range(20):
        torch.rand(3)
        for row, sampler in enumerate(others):
            made[row].append(sampler(logits, 29))
    assert made[0] == alone and made[1] != alone and made[2] != alone


def test_a_seed_gives_what_generate_gives() -> None:
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\n?tiger=", return_tensors="pt").input_ids
    config: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "top_k": 20, "eos_token_id": None}
    torch.manual_seed(7)
    with torch.no_grad():
        wanted = model.generate(ids, max_new_tokens=6, **config)[0, ids.shape[1] :].tolist()
    processors: list[Any] = []

    def keep(model: Any, input_ids: Any, logits_processor: Any, **kwargs: Any) -> Any:
        processors.extend(logits_processor)
        return input_ids

    model.generate(ids, max_new_tokens=6, custom_generate=keep, **config)
    sampler = Sampler(Sampling(seed=7), ids[0].tolist(), 6, processors, is_greedy=False)
    text = ids[0].tolist()
    for _ in range(6):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, -1]
        text.append(sampler(logits, int(logits.argmax())))
    assert text[ids.shape[1] :] == wanted


@pytest.mark.parametrize(
    ("sampling", "made"),
    [
        (Sampling(), [3, 3, 3, 3]),
        (Sampling(presence_penalty=1.5), [3, 2, 3, 3]),  # 3, 2 at [0, 1, 2, 1.5], then 3 at [0, 1, 0.5, 1.5]
        (Sampling(frequency_penalty=1.5), [3, 2, 3, 1]),
        (Sampling(frequency_penalty=-1.0), [3, 3, 3, 3]),
    ],
)
def test_penalties_count_the_tokens_of_the_answer(sampling: Sampling, made: list[int]) -> None:
    """Not those of the prompt, which has the largest token here."""
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert draw(Sampler(sampling, [3, 3, 3], 4, [], is_greedy=True), logits, 4) == made


def test_processors_see_the_prompt_and_the_answer() -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0), TemperatureLogitsWarper(0.5)])
    logits = torch.tensor([1.0, 2.0, 3.0])
    kept = logits.clone()
    assert draw(Sampler(Sampling(), [2], 2, processors, is_greedy=True), logits, 2) == [1, 2]
    assert torch.equal(logits, kept)


def test_log_probabilities_are_those_of_the_model() -> None:
    """Before temperature and penalties, and of the chosen token even if it is not among the most likely ones."""
    logits = torch.tensor([0.0, 1.0, 2.0])
    sampler = Sampler(Sampling(logprobs=2, presence_penalty=9.0), [0], 3, [], is_greedy=True)
    assert draw(sampler, logits, 3) == [2, 1, 0]
    total = math.log(sum(math.exp(value) for value in (0, 1, 2)))
    assert [entry.token for entry in sampler.logprobs] == [2, 1, 0]
    assert [entry.value for entry in sampler.logprobs] == pytest.approx([2 - total, 1 - total, -total])
    assert [[token for token, _ in entry.top] for entry in sampler.logprobs] == [[2, 1]] * 3
    assert sampler.logprobs[2].top[0][1] == pytest.approx(2 - total)


def test_options_of_generate() -> None:
    model, _ = kvpolicy.tiny()
    config = model.generation_config.__class__(do_sample=True, top_k=7)
    Sampling(min_p=0.1, repetition_penalty=1.5).configure(config)
    assert (config.top_k, config.min_p, config.repetition_penalty) == (7, 0.1, 1.5)
    Sampling(top_k=0).configure(config)
    assert config.top_k == 0
    config.do_sample = False
    Sampling(top_k=3, min_p=0.1).configure(config)
    assert config.top_k is None and config.min_p is None
