"""lm-eval's request cache: it is of one model, policy and setting, and a run goes on as if it had not ended."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models import huggingface

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy.allocators.profile import save_profile
from kvpolicy.planning.curves import save_layers
from kvpolicy_lm_eval.data import prompts
from kvpolicy_lm_eval.fingerprint import content_of, describe_others, fingerprint_of
from kvpolicy_lm_eval.model import KVPolicyLM
from tests.lm_eval.helpers import instances

UNTIL = {"until": ["\n"], "max_gen_toks": 6}
REFUSED = r"The request cache must be of this run \(.*\), got one filled by .*; try another --use_cache path\."


def test_another_policy_setting_or_model_is_refused(make: Any, tiny: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "answers.db")
    request = asked("loglikelihood", ["tiger=1\n?tiger="])
    first = CachingLM(make("h2o@0.5"), path).loglikelihood(request)
    assert CachingLM(make("h2o@0.5"), path).loglikelihood(request) == first
    for other in (make("h2o@0.4"), make("h2o@0.5", holdback=2), make("full")):
        with pytest.raises(KVPolicyError, match=r"filled by .*policy=h2o@0\.5 .*use_cache"):
            CachingLM(other, path)
    plain: Any = huggingface.HFLM
    path = str(tmp_path / "others.db")
    CachingLM(plain(pretrained=tiny[0], tokenizer=tiny[1]), path).loglikelihood(request)
    with pytest.raises(KVPolicyError, match="a model other than kvpolicy"):
        CachingLM(make("full"), path)


def test_answers_are_cached_as_they_come(make: Any) -> None:
    lm = make("h2o@0.2")
    pairs = [("tiger=1\n?tiger=", "1"), ("tiger=1\n?tiger=", "7"), ("wolf=4821\nlion=7\n?lion=", "7")]
    requests = instances("loglikelihood", pairs)
    seen: list[tuple[str, tuple[str, str], tuple[float, bool]]] = []
    lm.cache_hook = SimpleNamespace(add_partial=lambda *told: seen.append(told))
    given = lm.loglikelihood(requests, disable_tqdm=True)
    assert sorted(seen) == sorted(("loglikelihood", one.args, got) for one, got in zip(requests, given, strict=True))


def test_other_weights_of_the_same_name_are_refused(tiny: Any, tmp_path: Path) -> None:
    """A checkpoint that was trained on, in its folder or in memory."""
    model, tokenizer = tiny
    path = str(tmp_path / "answers.db")
    request = asked("loglikelihood", ["tiger=1\n?tiger="])
    CachingLM(KVPolicyLM(pretrained=model, tokenizer=tokenizer, policy="h2o@0.5"), path).loglikelihood(request)
    CachingLM(KVPolicyLM(pretrained=copy.deepcopy(model), tokenizer=tokenizer, policy="h2o@0.5"), path)
    for name in ("model.norm.weight", "model.layers.7.mlp.down_proj.weight"):
        trained = copy.deepcopy(model)
        with torch.no_grad():
            trained.get_parameter(name).add_(1e-4)
        with pytest.raises(KVPolicyError, match=REFUSED):
            CachingLM(KVPolicyLM(pretrained=trained, tokenizer=tokenizer, policy="h2o@0.5"), path)


def test_a_model_without_a_name_is_called_so(make: Any) -> None:
    assert fingerprint_of(make("h2o@0.5"), "").startswith("a model without a name torch.float32 weights=")


def test_another_calibration_at_the_same_path_is_another_run(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    spec = f"squeeze:profile={path}+snapkv@0.5"
    found: list[str] = []
    for first in (0.5, 0.5, 0.6):
        save_profile(path, "tiny", [first, *(0.9 + layer / 100 for layer in range(7))])
        found.append(make(spec).fingerprint)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("tuned", [False, True])
def test_files_are_hashed(tuned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All in a folder, also those of the layers of a tuned policy; embedded calibrations come with kvpolicy."""
    monkeypatch.chdir(tmp_path)
    assert content_of(kvpolicy.Policy.parse("kvzap@0.3")) == content_of(kvpolicy.Policy.parse("h2o@0.3")) == ""
    spec = "snapkv+csr:dictionary=atoms@0.5"
    save_layers("plan.json", [spec] * 2)
    policy = kvpolicy.Policy.parse("tuned:file=plan.json@0.5" if tuned else spec)
    (tmp_path / "atoms/inner").mkdir(parents=True)
    found = [content_of(policy)]
    for content in ("a", "b"):
        (tmp_path / "atoms/inner/tensors").write_text(content, encoding="utf-8")
        found.append(content_of(policy))
    assert len({*found}) == 3 and bool(found[0]) == tuned and found[2].startswith(" sha256=")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"truncation": False, "revision": "main", "add_bos_token": None, "max_batch_size": 8}, ""),  # the defaults
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
            ' rope_parameters={"factor": 4, "rope_type": "yarn"}',
        ),
        ({"softmax_dtype": torch.float32}, " softmax_dtype=float32"),  # as from a command line
        ({"peft": Path("lora"), "tokenizer": object()}, " peft=lora"),
        ({"enable_thinking": False, "think_end_token": 7}, " enable_thinking=False think_end_token=7"),
    ],
)
def test_arguments_that_answers_depend_on(arguments: dict[str, Any], text: str) -> None:
    assert describe_others(arguments) == text


def test_arguments_of_hf_are_a_part_of_the_run(make: Any) -> None:
    """But the number of rows in a batch, which changes no answer."""
    plain = make("h2o@0.5").fingerprint
    assert make("h2o@0.5", batch_size=2, device="cpu", truncation=False).fingerprint == plain
    assert make("h2o@0.5", add_bos_token=True, softmax_dtype="float32").fingerprint == (
        f"{plain} add_bos_token=True softmax_dtype=float32"
    )


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_equal_prompts_that_hold_back_other_texts_are_refused(make: Any, kind: str, tmp_path: Path) -> None:
    """The cache would have one answer for both."""
    prompt, answer = prompts.recall(Random(0), 8)
    last = UNTIL if kind == "generate_until" else answer
    inside = instances(kind, [(prompt, last)], task="inside")
    after = instances(kind, [(prompt, last)], task="after", doc={"held_back": prompt.splitlines()[-1]})
    message = r"hold back different texts, got '.*\.\.\.' in inside and after; try a --use_cache path for each\."
    lm = make("snapkv@0.5")
    first = getattr(lm, kind)(inside + after)
    cached = CachingLM(make("snapkv@0.5"), str(tmp_path / "answers.db"))
    with pytest.raises(KVPolicyError, match=message):
        getattr(cached, kind)(inside + after)
    for name, some in (("a", inside), ("b", after)):
        assert getattr(CachingLM(lm, str(tmp_path / name)), kind)(some) == [first[name == "b"]]
    assert getattr(cached, kind)(inside + inside) == [first[0]] * 2


@pytest.fixture(scope="module")
def about_two() -> list[str]:
    """Three questions about each of two documents."""
    documents = [prompts.recall(Random(seed), 24)[0].rpartition("\n")[0] for seed in (0, 1)]
    return [f"{document}\n{name}=" for name in ("tiger", "lion", "wolf") for document in documents]


def asked(kind: str, texts: list[str]) -> list[Instance]:
    return instances(kind, [(text, UNTIL if kind == "generate_until" else "4821") for text in texts])


class Interrupted(Exception):
    """The end of a run."""


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_a_run_that_goes_on_shares_what_it_would_have_shared(
    make: Any, kind: str, about_two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last question about a document is answered behind its prefix, though the others have been answered."""
    requests = asked(kind, about_two)
    whole = getattr(make("knorm@0.3", group_by_prefix=32), kind)(requests)
    path = str(tmp_path / "answers.db")
    lm = make("knorm@0.3", group_by_prefix=32)
    cached = CachingLM(lm, path)
    add = lm.cache_hook.add_partial
    count = [0]

    def stop(*told: Any) -> None:
        add(*told)
        count[0] += 1
        if count[0] == 5:
            raise Interrupted

    monkeypatch.setattr(lm.cache_hook, "add_partial", stop)
    with pytest.raises(Interrupted):
        getattr(cached, kind)(requests)
    again = make("knorm@0.3", group_by_prefix=32)
    found = getattr(CachingLM(again, path), kind)(requests)
    assert again.stats.tallies[f"task/{kind}"].requests == 1 and found == whole
    # Requests that the cache does not know share with each other.
    another = asked(kind, [text.replace("wolf", "goat") for text in about_two])
    assert getattr(CachingLM(again, path), kind)(another) == getattr(lm, kind)(another)


def test_costs_are_those_of_one_evaluation(make: Any) -> None:
    """A model that is evaluated again, as between steps of training, begins with no requests."""
    lm = make("snapkv@0.5")
    requests = asked("loglikelihood", ["tiger=1\n?tiger="])
    counts = []
    for _ in range(2):
        lm.loglikelihood(requests)
        lm.generate_until(asked("generate_until", ["tiger=1\n?tiger="]))
        for _ in range(2):
            tasks = lm.get_model_info()["kvpolicy"]["tasks"]
            counts.append({name: cost["requests"] for name, cost in tasks.items()})
    assert counts == [{"task/loglikelihood": 1, "task/generate_until": 1}] * 4


def test_costs_of_an_evaluation_from_the_cache_are_none(make: Any, tmp_path: Path) -> None:
    lm = make("snapkv@0.5")
    requests = asked("loglikelihood", ["tiger=1\n?tiger="])
    for want in (["task/loglikelihood"], []):
        CachingLM(lm, str(tmp_path / "answers.db")).loglikelihood(requests)
        assert [*lm.get_model_info()["kvpolicy"]["tasks"]] == want


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_it_is_said_that_nothing_is_shared(
    make: Any, kind: str, about_two: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    requests = asked(kind, about_two[:3])
    with caplog.at_level(logging.WARNING, "lm_eval.kvpolicy"):
        for least in (16, 200):
            getattr(make("knorm@0.5", group_by_prefix=least), kind)(requests)
        make("knorm@0.5").loglikelihood(asked("loglikelihood", about_two[:2]))
    assert [record.message for record in caplog.records if record.name == "lm_eval.kvpolicy"] == [
        f"group_by_prefix changes nothing for 3 {kind} requests, since no two of a task begin with the same 200 tokens "
        "that are compressed; group_by_prefix=N sets another minimum"
    ]
