"""Every request type is evaluated under the policy; with `full`, the results are those of lm-eval."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models import huggingface
from lm_eval.utils import simple_parse_args_string
from transformers import LlamaConfig

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy.planning.curves import save_layers
from kvpolicy_lm_eval.arguments import check_spelling
from kvpolicy_lm_eval.data import prompts
from kvpolicy_lm_eval.model import KVPolicyLM
from tests.lm_eval.helpers import forwards, instances
from tests.sampling import each_once, product

HFLM: Any = huggingface.HFLM  # its type is lost in the decorator that registers it
HARSH = "streaming@0.12"
POLICIES = ["h2o@0.3", "snapkv@0.2", "squeeze+kvcrush@0.2", "kivi:bits=4:group_size=16:residual_length=32", "window@24"]


@pytest.fixture(scope="module")
def choices() -> list[Instance]:
    """Contexts and answers of different lengths; three answers share a context."""
    pairs = []
    for seed, records in enumerate((16, 6, 11)):
        prompt, answer = prompts.recall(Random(seed), records)
        pairs += [(prompt, choice) for choice in (answer, "7", "12")]
    return instances("loglikelihood", [*pairs, ("", "tiger=1234"), ("a", "=1")])


@pytest.fixture(scope="module")
def texts() -> list[Instance]:
    return instances("loglikelihood_rolling", [(prompts.passkey(Random(i), 90 * i)[0],) for i in (3, 1, 2)])


@pytest.fixture(scope="module")
def questions() -> list[Instance]:
    until = {"until": ["\n"], "max_gen_toks": 6}
    return instances("generate_until", [(prompts.recall(Random(n), n)[0], until) for n in (16, 6, 11, 13)])


def answers(lm: Any, requests: list[Instance]) -> list[Any]:
    return getattr(lm, requests[0].request_type)(requests, disable_tqdm=True)


def numbers(found: list[Any]) -> torch.Tensor:
    return torch.tensor([one[0] if isinstance(one, tuple) else one for one in found])


KINDS = ["choices", "texts", "questions"]


@pytest.fixture(params=KINDS)
def requests(request: pytest.FixtureRequest) -> list[Instance]:
    """One list of requests of each type."""
    return request.getfixturevalue(request.param)


def test_full_gives_the_numbers_of_lm_eval(make, tiny, requests):
    plain = HFLM(pretrained=tiny[0], tokenizer=tiny[1], batch_size=2)
    assert answers(make("full", batch_size=2), requests) == answers(plain, requests)


def test_a_harsh_policy_changes_answers(make, requests):
    assert answers(make(HARSH), requests) != answers(make("full"), requests)


@product("policy,kind", POLICIES, KINDS, sample=each_once(POLICIES, KINDS))
def test_batch_size_changes_nothing(make, request: pytest.FixtureRequest, policy: str, kind: str):
    requests = request.getfixturevalue(kind)
    alone, together = (answers(make(policy, batch_size=size), requests) for size in (1, 4))
    if isinstance(alone[0], str):
        assert alone == together
    else:
        assert torch.allclose(numbers(alone), numbers(together), atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "policy", "options"),
    [
        ("choices", "h2o@1.0", {}),
        ("texts", "h2o@1.0", {}),
        ("choices", "window@1.0", {"holdback": 0}),
        ("choices", "window@1.0", {"holdback": 4}),
    ],
)
def test_full_budget_gives_the_numbers_of_lm_eval(
    make, request: pytest.FixtureRequest, kind: str, policy: str, options: dict[str, int]
):
    """With a budget for everything, the code of kvpolicy gives the numbers of lm-eval, whatever is held back."""
    requests = request.getfixturevalue(kind)
    ours = numbers(answers(make(policy, batch_size=3, **options), requests))
    plain = numbers(answers(make("full", batch_size=2), requests))
    assert torch.allclose(ours, plain, atol=2e-3)


def test_one_token_answers_need_the_holdback(make, choices):
    """Without it, the first token is predicted from the uncompressed context, and no policy has an effect."""
    single = [one for one in choices if one.args[1] == "7"]
    plain = numbers(answers(make("full"), single))
    assert torch.allclose(numbers(answers(make(HARSH, holdback=0), single)), plain, atol=2e-3)
    assert not torch.allclose(numbers(answers(make(HARSH, holdback=1), single)), plain, atol=0.05)


def test_answers_share_the_prefill_of_their_context(make, choices):
    lm = make(HARSH)
    with forwards(lm.model) as seen:
        answers(lm, choices[:3])
    assert sum(columns > 10 for _, columns in seen) == 1
    assert lm.stats.tallies["task/loglikelihood"].sequences == 1


def test_beams(make, questions):
    """Each beam has its own row in the cache. No stop words, because lm-eval stops all beams of a batch together."""
    beams = [(one.args[0], {"until": ["never"], "max_gen_toks": 6, "num_beams": 2}) for one in questions]
    requests = instances("generate_until", beams)
    alone, together = (answers(make("h2o@0.5", batch_size=size), requests) for size in (1, 4))
    assert alone == together


def test_long_texts_are_split_into_windows(make, texts):
    short = make("h2o@0.5", max_length=64)
    found, whole = (numbers(answers(lm, texts)) for lm in (short, make("h2o@0.5")))
    assert torch.isfinite(found).all() and not torch.allclose(found, whole)


def test_the_model_is_not_changed(make, tiny, choices):
    model = tiny[0]
    before = (model.config._attn_implementation, sum(len(m._forward_hooks) for m in model.modules()))
    answers(make("squeeze+h2o@0.2"), choices)
    assert before == (model.config._attn_implementation, sum(len(m._forward_hooks) for m in model.modules()))


def test_stats(make, questions, choices):
    lm = make("h2o@0.2", batch_size=2)
    full = make("full", batch_size=2)
    for one in (lm, full):
        answers(one, questions)
        answers(one, choices)
    info = lm.get_model_info()["kvpolicy"]
    base = full.get_model_info()["kvpolicy"]
    assert (info["policy"], info["budget"], base["policy"]) == ("h2o@0.2", 0.2, "full")
    assert (info["group_by_prefix"], info["rolling_chunk"], info["tp"]) == (0, lm.rolling_chunk, 1)
    assert 2 * full._full_bytes(1) == full._full_bytes(2)
    for kind in ("task/generate_until", "task/loglikelihood"):
        ours = info["tasks"][kind]
        theirs = base["tasks"][kind]
        assert theirs["kv_share"] == 1.0 and ours["kv_share"] < 0.6
        assert ours["full_kv_bytes"] == pytest.approx(theirs["full_kv_bytes"], rel=0.03)
        assert ours["tokens_per_second"] > 0 and ours["prompt_tokens"] == theirs["prompt_tokens"]


def test_tasks_are_counted_apart(make, questions):
    lm = make("full")
    other = instances("generate_until", [questions[0].args], task="other")
    found = lm.generate_until([questions[1], *other, questions[2]], disable_tqdm=True)
    assert found == answers(make("full"), [questions[1], questions[0], questions[2]])
    counts = {name: tally.requests for name, tally in lm.stats.tallies.items()}
    assert counts == {"task/generate_until": 2, "other/generate_until": 1}


def test_a_budget_with_a_least_number_of_tokens(make):
    """It survives lm-eval's own parsing and stands in the results."""
    arguments = simple_parse_args_string("policy=squeeze+h2o@0.2:least=1024,budget=0.3:least=64")
    assert str(make(arguments["policy"]).policy) == "squeeze+h2o@0.2:least=1024"
    lm = make(**arguments)
    assert str(lm.policy) == "squeeze+h2o@0.3:least=64" and lm.get_model_info()["kvpolicy"]["budget"] == "0.3:least=64"


def test_budget_overrides_that_of_the_policy(make):
    lm = make("h2o@0.5", budget=0.25)
    assert str(lm.policy) == "h2o@0.25"
    with pytest.raises(ValueError, match="selector"):
        make("full", budget=0.2)


def greedy(tiny: tuple[Any, Any], policy: str, prompt: str, *, beyond: bool = False) -> str:
    """The answer to a prompt whose question is fed once the rest of it was compressed, token by token."""
    model, tokenizer = tiny
    document, question = prompts.split(prompt)
    asked = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
    tokens: list[int] = []
    with torch.no_grad(), kvpolicy.attach(model, policy):
        cache = kvpolicy.PolicyCache(model)
        model(tokenizer(document, return_tensors="pt").input_ids, cache=cache)
        if beyond:
            cache.hold_next()
        for _ in range(6):
            tokens.append(int(model(asked, cache=cache).logits[0, -1].argmax()))
            asked = torch.tensor([tokens[-1:]])
    return tokenizer.decode(tokens).split("\n")[0]


def held_back(requests: list[Instance], **more: Any) -> list[Instance]:
    """The same requests, with documents that hold back the question."""
    return [
        dataclasses.replace(one, doc={"held_back": prompts.split(one.args[0])[1]} | more)
        if "\n?" in one.args[0]
        else one
        for one in requests
    ]


def test_a_question_of_a_document_is_scored_after_the_rest_was_compressed(make, choices):
    scored = answers(make("streaming@0.5", batch_size=2), held_back(choices[:6]))
    assert scored == answers(make("streaming@0.5", batch_size=2, holdback=3), choices[:6])
    assert scored != answers(make("streaming@0.5", batch_size=2), choices[:6])


def test_a_question_beyond_the_budget_takes_no_slots(make, tiny, questions):
    whole = make("snapkv@0.4")
    competing = make("snapkv@0.4")
    found = answers(whole, held_back(questions, beyond=True))
    answers(competing, held_back(questions))
    held = [lm.stats.report()["task/generate_until"]["kv_bytes"] for lm in (whole, competing)]
    assert held[0] > held[1]
    assert found == [greedy(tiny, "snapkv@0.4", request.args[0], beyond=True) for request in questions]


@pytest.mark.parametrize("policy", ["kivi:bits=4", "full+quest:read=0.5", "uniform/adakv+snapkv@0.5", "full"])
def test_a_question_beyond_the_budget_of_any_policy(make, policy: str, questions):
    assert answers(make(policy), held_back(questions[:2], beyond=True))


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}])
def test_a_question_of_a_document_is_fed_after_the_rest_was_compressed(make, tiny, questions, more: dict[str, int]):
    requests = held_back(questions)
    for request in requests:
        prompt, options = cast("tuple[str, dict[str, Any]]", request.args)
        request.arguments = (prompt, options | more)
    found = answers(make("snapkv@0.4", batch_size=3), requests)
    assert found != answers(make("snapkv@0.4", batch_size=3), questions)  # which sees the question
    assert more or found == [greedy(tiny, "snapkv@0.4", request.args[0]) for request in requests]


@pytest.mark.parametrize("beyond", [False, True])
def test_a_prompt_that_is_held_back_whole_changes_no_other(make, questions, beyond: bool):
    """Of it alone, the first token is read before what is held back; the others hold back their questions."""
    others = held_back(questions, beyond=beyond)
    asked = others[0].doc["held_back"]
    whole = instances("generate_until", [(asked, questions[0].args[1])], doc={"held_back": asked, "beyond": beyond})
    lm = make("snapkv@0.4", batch_size=5, add_bos_token=False)
    with forwards(lm.model) as seen:
        found = answers(lm, [*others, *whole])
    assert len(lm.tok_encode(asked)) in [columns for _, columns in seen]
    assert found == answers(lm, others) + answers(lm, whole)


def test_a_length_without_room_for_an_answer_is_refused_as_by_generate(make, questions):
    too_short = instances("generate_until", [(questions[0].args[0], {"until": ["\n"], "max_length": 10})])
    with pytest.raises(ValueError, match="`max_length` is set to 10"):
        answers(make("snapkv@0.4"), too_short)


def test_a_text_that_is_held_back_is_part_of_the_prompt(make, questions):
    request = dataclasses.replace(questions[0], doc={"held_back": "?nothing="})
    with pytest.raises(ValueError, match=r"held_back must be the end of the prompt, got '\?nothing=' .*try to end"):
        make(HARSH).generate_until([request])


@pytest.mark.parametrize(("name", "value"), [("holdback", -1), ("rolling_chunk", 1), ("holdback", 0.5)])
def test_invalid_numbers_are_rejected(make, name: str, value: float):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least [012], got {value}"):
        make("h2o", **{name: value})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("budgt", "budget"), ("plicy", "policy"), ("Rolling-Chunk", "rolling_chunk"), ("group_prefix", "group_by_prefix")],
)
def test_a_misspelled_argument_is_rejected(wrong: str, meant: str):
    message = f"^The arguments must be arguments of the model kvpolicy, got '{wrong}'; try '{meant}'\\.$"
    given: dict[str, Any] = {wrong: 1}
    with pytest.raises(ValueError, match=message):
        KVPolicyLM(policy="squeeze+kvcrush", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "nccl"}, "backend must be deepspeed or hf with tp, got 'nccl'; try leaving it out."),
        ({"dtype": "bf16"}, "dtype must be auto or a dtype of PyTorch, got 'bf16'; try bfloat16."),
        ({"batch_size": 0}, "must be an integer of at least 1, auto, or auto:N to measure it N times, got 0;"),
        ({"batch_size": "many"}, "to measure it N times, got many; try 1."),
        ({"batch_size": "auto:x"}, "to measure it N times, got auto:x; try 1."),
        ({"max_length": "4k"}, "max_length must be an integer of at least 1, got '4k'; try leaving it out."),
        ({"max_batch_size": 0}, "max_batch_size must be an integer of at least 1, got 0; try leaving it out."),
        ({"window": 16}, "got 'window'; options of a method belong to the policy, as in policy=snapkv:window=32."),
        ({"compression_ratio": 0.5}, "got 'compression_ratio'; try budget=0.2, the fraction that is kept."),
        ({"apply_chat_template": True}, "got 'apply_chat_template'; try the option --apply_chat_template of lm_eval."),
        ({"seed": 1}, "got 'seed'; try the option --seed of lm_eval."),
        ({"temperature": 0.5}, "got 'temperature'; try --gen_kwargs temperature=VALUE."),
        ({"max_gen_toks": 5}, "got 'max_gen_toks'; try --gen_kwargs max_gen_toks=VALUE."),
        ({"pretrained": "no/such"}, "The model 'no/such' cannot be loaded: "),
    ],
)
def test_values_that_lm_eval_has_no_sentence_for(given: dict[str, Any], message: str):
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        KVPolicyLM(policy="h2o", **given)


def test_arguments_of_others_are_accepted(make, tiny):
    make("h2o", max_length=64, attn_implementation="eager", device_map="cpu", token=None)
    given = {"tp_plan": "auto", "revision": "main", "budge": 1}
    check_spelling(given, ["budget", "tp"], SimpleNamespace(config=Odd()))
    for other in (tiny[0], "/no/such/folder"):
        with pytest.raises(ValueError, match="must be arguments of the model kvpolicy, got 'budge'; try 'budget'"):
            check_spelling(given, ["budget", "tp"], other)


class Odd(LlamaConfig):
    """The config of a model that has an argument with a name similar to `budget`."""

    budge: int = 3


def test_a_longer_task_has_a_batch_size_of_its_own(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `batch_size=auto`: tasks are answered one after the other, and the first one may be the shortest."""
    evaluated = make("full", batch_size="auto")
    measured: list[int] = []

    def detect(requests: Any, position: int) -> int:
        measured.append(len(requests[0][1]) + len(requests[0][2]))
        return 4

    monkeypatch.setattr(evaluated, "_detect_batch_size", detect)
    for tokens in (3, 2, 9, 9):
        assert evaluated._batch([(("", ""), [1] * tokens, [2]), (("", ""), [1], [2])]) == 4
    assert measured == [4, 10]


def test_a_file_of_layers_is_a_policy(make, tmp_path: Path):
    text = "tiger=4821 wolf=1937 lion=1111 ?tiger="
    save_layers(tmp_path / "plan.json", ["snapkv@0.5", "h2o+tokenwise@0.25"] * 4)
    arguments = simple_parse_args_string(f"policy=tuned:file={tmp_path}/plan.json@0.5,budget=0.9")
    lm = make(**arguments)
    policy = kvpolicy.Policy.by_layer(["snapkv@0.5", "h2o+tokenwise@0.25"] * 4, budget=0.9)
    other = make(policy)
    assert not lm.is_full and lm.policy.budget == 0.9
    for kind, given in [
        ("loglikelihood", (text, "4821")),
        ("generate_until", (text, {"until": ["\n"], "max_gen_toks": 4})),
        ("loglikelihood_rolling", (text,)),
    ]:
        answer = getattr(lm, kind)(instances(kind, [given]))
        assert answer == getattr(other, kind)(instances(kind, [given]))
