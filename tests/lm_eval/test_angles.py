"""Rotary embeddings whose angles depend on the length: a text in pieces is scored as in one forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvpolicy import KVPolicyError
from kvpolicy_lm_eval.model import KVPolicyLM
from kvpolicy_lm_eval.scoring import by_angles, split
from tests.engine.test_text_angles import KINDS, TRAINED, adapting
from tests.lm_eval.helpers import instances

PIECES = ["tiger=4821", "falcon=1937", "bear=5", "lion=22"]


def lines(count: int) -> str:
    return "\n".join(PIECES[number % len(PIECES)] for number in range(count))


def model_of(kind: str, vocabulary: int) -> Any:
    """An adapting model with random tokens for a tokenizer, whose answers depend a lot on its angles."""
    model = adapting(kind)
    torch.manual_seed(0)
    model.resize_token_embeddings(vocabulary)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.35 if "q_proj" in name or "k_proj" in name else 0.15)
    return model


def alone(model: Any, ids: list[int], answer: int) -> float:
    """The log-likelihood of the last tokens of a text, in one forward of a new copy of the model."""
    with torch.no_grad():
        logits = copy.deepcopy(model)(torch.tensor([ids[:-1]])).logits[0]
    return float(logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]][-answer:].double().sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [{}, {"batch_size": 4}, {"batch_size": 4, "group_by_prefix": 8}])
def test_answers_and_rolling_texts_have_the_scores_of_one_forward(tiny, kind: str, arguments: dict[str, Any]) -> None:
    """Texts on both sides of the length behind which the angles change, in one batch."""
    tokenizer = tiny[1]
    model = model_of(kind, len(tokenizer))
    clean = copy.deepcopy(model)
    lm = KVPolicyLM(
        pretrained=model, tokenizer=tokenizer, policy="window@1.0", max_length=80, rolling_chunk=9, **arguments
    )
    ids = tokenizer(lines(12), add_special_tokens=False).input_ids
    sizes = [(TRAINED - 6, 4), (TRAINED - 6, 5), (TRAINED - 6, 12), (50, 3), (50, 9), (TRAINED - 8, 2), (0, 7)]
    asked = [(("", ""), ids[:context], ids[context : context + answer]) for context, answer in sizes]
    scores = [score for score, _ in lm._loglikelihood_tokens(asked, disable_tqdm=True)]
    wanted = [alone(clean, ids[: context + answer], answer if context else answer - 1) for context, answer in sizes]
    # Without a context, lm-eval puts a token before the answer; here, the first one is not predicted.
    assert scores[:-1] == pytest.approx(wanted[:-1], abs=2e-3)
    texts = [lines(2), lines(9), lines(5)]
    rolled = lm.loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,) for text in texts]), disable_tqdm=True
    )
    for text, score in zip(texts, rolled, strict=True):
        own = [lm.prefix_token_id, *lm.tok_encode(text)]
        assert len(own) <= 80
        assert score == pytest.approx(alone(clean, own, len(own) - 1), abs=5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_behind_a_held_text_is_refused_where_the_angles_change(tiny, kind: str) -> None:
    model = model_of(kind, len(tiny[1]))
    lm, grouped = (
        KVPolicyLM(pretrained=model, tokenizer=tiny[1], policy="window@1.0", max_length=200, group_by_prefix=least)
        for least in (False, 8)
    )
    until = {"until": ["\n"], "max_gen_toks": 3}
    for text in (lines(2), lines(5)):
        request = instances("generate_until", [(text, until)], doc={"held_back": text[-4:]})
        count = len(tiny[1](text).input_ids)
        if count <= TRAINED:
            assert lm.generate_until(request, disable_tqdm=True)
        else:
            with pytest.raises(
                KVPolicyError, match=rf"The end of a prompt that is held back must have the angles .* type {kind}"
            ):
                lm.generate_until(request, disable_tqdm=True)
    assert len(tiny[1](lines(2)).input_ids) <= TRAINED < len(tiny[1](lines(5)).input_ids)
    requests = instances("generate_until", [(f"{lines(2)}{first}{lines(4)}", until) for first in "ab"])
    with pytest.raises(KVPolicyError, match=rf"A prompt behind a common prefix must have the angles .* type {kind}"):
        grouped.generate_until(requests, disable_tqdm=True)


def test_requests_are_divided_by_their_angles() -> None:
    groups = split([(None, [1] * 20, [2] * 3), (None, [1] * 20, [2] * 9), (None, [1] * 40, [2])], 99, 1)
    longrope = by_angles(groups, adapting("longrope").config)
    assert [(least, len(own)) for least, own in longrope] == [(TRAINED + 1, 2), (1, 1)]
    assert [least for least, _ in by_angles(groups, adapting("dynamic").config)] == [40, 28, 1]
    plain = adapting("longrope").config
    plain.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    assert by_angles(groups, plain) == [(1, groups)]
