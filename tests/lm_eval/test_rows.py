"""Greedy answers in rows that are refilled: those of a batch of one, in fewer steps than batches of the same size."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models import huggingface

import kvpolicy
from kvpolicy_lm_eval import model as lm
from kvpolicy_lm_eval.data import prompts
from kvpolicy_lm_eval.rows import RowAnswer, answer_in_rows, rows_obstacle
from tests.engine.test_text_angles import TRAINED, adapting
from tests.lm_eval.helpers import forwards, instances
from tests.sampling import product

HFLM: Any = huggingface.HFLM  # its type is lost in the decorator that registers it


def requests(lengths: list[int], **arguments: Any) -> list[Instance]:
    """Prompts of many lengths; how long an answer may become is the same for all, and where it ends is not."""
    asked = {"until": ["\n"], "max_gen_toks": 12} | arguments
    texts = [prompts.recall(Random(n), 4 + n)[0] for n in range(len(lengths))]
    texts = [text.replace("?", "\n" * pad + "?") for text, pad in zip(texts, lengths, strict=True)]
    return instances("generate_until", [(text, asked) for text in texts])


@product("policy", ["snapkv@0.3", "h2o@24", "uniform/adakv+snapkv@0.4", "snapkv+tokenwise:bits=4@0.5", "window@24"])
def test_answers_are_those_of_one_row(make: Any, policy: str) -> None:
    asked = requests([3, 0, 7, 1, 0, 9, 2])
    alone = make(policy, batch_size=1)
    rows = make(policy, batch_size=3)
    assert rows.generate_until(asked, disable_tqdm=True) == alone.generate_until(asked, disable_tqdm=True)
    ours, theirs = (each.stats.report()["task/generate_until"] for each in (rows, alone))
    for name in ("requests", "prompt_tokens", "new_tokens", "full_kv_bytes"):
        assert ours[name] == theirs[name]
    assert rows.batch_size == 3


@pytest.mark.parametrize("policy", ["full", "window@2000", "full+quest:read=1.0"])
def test_a_length_in_the_generation_config_counts_as_in_hf(
    make: Any, tiny: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint such as one for chats; what lm-eval passes on counts less, in rows and behind a prefix too."""
    model, tokenizer = tiny
    monkeypatch.setattr(model.generation_config, "max_new_tokens", 9)
    asked = requests([0, 2, 1], until=["never"], max_gen_toks=3)
    arguments: Any = asked[0].args
    asked += instances("generate_until", [(arguments[0] + "1", arguments[1])])
    want = HFLM(pretrained=model, tokenizer=tokenizer).generate_until(asked, disable_tqdm=True)
    for batch_size, group in ((1, False), (3, False), (3, 8)):
        if group and "quest" in policy:
            continue
        ours = make(policy, batch_size=batch_size, group_by_prefix=group)
        assert ours.generate_until(asked, disable_tqdm=True) == want
        assert ours.stats.report()["task/generate_until"]["new_tokens"] == 9 * len(asked)


def test_a_row_goes_to_the_next_prompt_when_its_answer_ends(make: Any, tiny: Any, monkeypatch: Any) -> None:
    """Where answers end depends on their digits; without refills, batches of two wait for the longer one."""
    asked = requests([0] * 10, until=["4"], max_gen_toks=40)
    steps: list[int] = []
    for refills in (16, 1):
        monkeypatch.setattr(lm, "REFILLS", refills)
        evaluated = make("snapkv@0.5", batch_size=2)
        with forwards(tiny[0]) as seen:
            evaluated.generate_until(asked, disable_tqdm=True)
        read = sorted(columns for _, columns in seen if columns > 1)
        assert read == sorted(len(evaluated.tok_encode(request.args[0])) for request in asked), "alone, without padding"
        steps.append(len(seen) - len(read))
    assert steps[0] < steps[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": True, "temperature": 0.5},
        {"temperature": 0.5},
        {"num_beams": 2},
        {"repetition_penalty": 1.5},
    ],
)
def test_other_answers_are_generated_in_batches(make: Any, tiny: Any, arguments: dict[str, Any]) -> None:
    with forwards(tiny[0]) as seen:
        make("snapkv@0.5", batch_size=3).generate_until(requests([0] * 3, **arguments), disable_tqdm=True)
    assert seen[0][0] >= 3


def test_a_policy_without_rows_answers_in_batches(make: Any, tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    policy = "snapkv@256KiB"  # of all rows together
    evaluated = make(policy, batch_size=2)
    asked = requests([0, 3])
    with forwards(tiny[0]) as seen:
        found = evaluated.generate_until(asked, disable_tqdm=True)
    assert evaluated._rows_obstacle and seen[0][0] == 2
    assert f"wait for the longest one of their batch, since {evaluated._rows_obstacle}" in caplog.text
    assert found == make(policy, batch_size=1).generate_until(asked, disable_tqdm=True)


def test_angles_of_long_texts_are_an_obstacle() -> None:
    model = adapting("dynamic")
    with kvpolicy.attach(model, "snapkv@0.5") as handle:
        assert rows_obstacle(handle, 2, TRAINED) == ""
        assert "dynamic" in rows_obstacle(handle, 2, TRAINED + 1)


def test_processors_of_the_model_are_applied(tiny: Any) -> None:
    model, tokenizer = tiny
    ids = tokenizer(prompts.recall(Random(1), 6)[0]).input_ids
    banned = tokenizer("0123456789", add_special_tokens=False).input_ids
    model.generation_config.suppress_tokens = banned
    try:
        with torch.no_grad(), kvpolicy.attach(model, "snapkv@0.5") as handle:
            (answer,) = answer_in_rows(handle, model, tokenizer, [ids], 2, 5, [])
            expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=5)[0, len(ids) :].tolist()
    finally:
        model.generation_config.suppress_tokens = None
    assert answer.tokens == expected and not {*answer.tokens} & {*banned}


def test_an_answer_ends_at_a_string_that_other_tokens_write(tiny: Any) -> None:
    tokenizer = tiny[1]
    config = type("Config", (), {"max_new_tokens": 9, "eos_token_id": 3})()
    ids = tokenizer("a=12", add_special_tokens=False).input_ids
    answer = RowAnswer([5, 6], config, tokenizer, ["=1"])
    logits = torch.zeros(len(tokenizer))
    assert [answer.take(logits, token) for token in ids[:3]] == [False, False, True]
    assert answer.text == [5, 6, *ids[:3]]
    assert RowAnswer([5], config, tokenizer, []).take(logits, 3), "the end of a sequence"


def test_an_error_in_a_row_is_raised(tiny: Any) -> None:
    model, tokenizer = tiny
    with torch.no_grad(), kvpolicy.attach(model, "snapkv@0.5") as handle:
        hook = model.lm_head.register_forward_hook(lambda module, args, out: out * torch.nan)
        with pytest.raises(ArithmeticError, match="not numbers"):
            answer_in_rows(handle, model, tokenizer, [[5, 6, 7], [8, 9, 10]], 2, 4, [])
        hook.remove()


def test_the_token_that_ends_an_answer_is_counted_as_in_a_batch(make: Any, tiny: Any) -> None:
    """It is not, where it is the padding too."""
    asked = requests([3, 0, 7])
    made = [make("snapkv@0.3", batch_size=size) for size in (1, 3)]
    tokenizer = tiny[1]
    before = tokenizer.pad_token
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(tokenizer("\n", add_special_tokens=False).input_ids)[-1]
    try:
        for each in made:
            each.generate_until(asked, disable_tqdm=True)
    finally:
        tokenizer.pad_token = before
    alone, rows = (each.stats.report()["task/generate_until"]["new_tokens"] for each in made)
    assert alone == rows
