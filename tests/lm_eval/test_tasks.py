"""The offline tasks are complete, seeded, and have answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lm_eval.helpers import load, manager, simple_evaluate

TASKS = ["fewshot", "hot", "multiquery", "passkey", "recall_1024", "recall_512", "text"]


@pytest.fixture(scope="module")
def group() -> dict[str, Any]:
    return load(manager(policy="h2o", pretrained="x"), "kvpolicy")


def test_group_is_complete(group):
    assert sorted(group) == [f"kvpolicy_{name}" for name in TASKS]
    kinds = {"generate_until", "loglikelihood_rolling", "multiple_choice"}
    assert {task.OUTPUT_TYPE for task in group.values()} == kinds


@pytest.mark.parametrize(("mode", "without"), [("after", {"text"}), ("second", {"text", "passkey"})])
def test_questions_have_other_places(mode: str, without: set[str], group):
    tasks = load(manager(docs=3), f"kvpolicy_{mode}")
    assert sorted(tasks) == [f"kvpolicy_{name}_{mode}" for name in TASKS if name not in without]
    for name, task in tasks.items():
        inside = group[name.removesuffix(f"_{mode}")]
        task.build_all_requests(limit=1)
        assert task.instances[0].args[0].endswith(task.instances[0].doc["held_back"])
        known = {doc["prompt"] for doc in inside.test_docs()}
        assert task.config.metadata["seed"] == inside.config.metadata["seed"]
        for doc in task.test_docs():
            assert doc["prompt"].endswith(doc["held_back"]) and doc["held_back"].count("\n") == (mode == "second")
            assert doc["prompt"] not in known  # a request cache has one answer of each prompt


def test_documents_are_the_same_every_time(group):
    again = load(manager(), "kvpolicy")
    assert {n: list(t.test_docs()) for n, t in group.items()} == {n: list(t.test_docs()) for n, t in again.items()}


def test_prompts_end_right_before_the_answer(group):
    for name, task in group.items():
        task.build_all_requests(limit=3)
        for one in task.instances if name != "kvpolicy_text" else []:
            assert one.args[0][-1] == (":" if name == "kvpolicy_fewshot" else "=")
            assert task.config.target_delimiter == ""
            assert isinstance(task.doc_to_target(one.doc), int if name == "kvpolicy_fewshot" else str)


def test_the_right_choice_is_the_answer(group):
    for doc in group["kvpolicy_fewshot"].test_docs():
        assert doc["choices"][doc["label"]] == doc["answer"]
        assert len(doc["choices"]) == 4


def test_every_step_takes_the_one_before(make):
    task = load(manager(docs=3, steps=6), "kvpolicy_steps")["kvpolicy_steps"]
    documents = list(task.test_docs())
    for doc in documents:
        numbers = [int(word) for word in doc["prompt"].rpartition("List: ")[2].split("\n")[0].split()]
        total = 0
        for line, number in zip(doc["lines"], numbers, strict=True):
            assert line == f"{total} + {number} = {total + number}"
            total += number
        assert doc["prompt"] + doc["answer"] == doc["prompt"].removesuffix("0 +") + "\n".join(doc["lines"])
        assert task.process_results(doc, [doc["answer"]]) == {"right_steps": 1.0}
        wrong = doc["answer"].replace(doc["lines"][2], "9 + 9 = 9")
        assert task.process_results(doc, [wrong]) == {"right_steps": pytest.approx(2 / 6)}
        assert task.process_results(doc, ["nothing"]) == {"right_steps": 0.0}
        assert task.process_results(doc, [doc["answer"].split("\n")[0]]) == {"right_steps": pytest.approx(1 / 6)}
    assert documents[0]["prompt"] != documents[1]["prompt"]
    small = manager(docs=2, steps=3, shots=1)
    found = simple_evaluate(
        model=make("h2o:protect=prompt@200"),
        tasks=["kvpolicy_steps"],
        task_manager=small,
        bootstrap_iters=0,
        gen_kwargs={"max_gen_toks": 8},
    )
    assert 0 <= found["results"]["kvpolicy_steps"]["right_steps,none"] <= 1


def test_metadata_changes_sizes():
    tasks = load(manager(records=10, docs=5), "kvpolicy_recall_512")
    docs = list(tasks["kvpolicy_recall_512"].test_docs())
    assert len(docs) == 5 and docs[0]["prompt"].count("\n") == 10


def test_prompts_fit_the_embedded_model(group, tiny):
    sizes = {}
    for name in ("kvpolicy_recall_512", "kvpolicy_recall_1024"):
        lengths = [len(tiny[1](doc["prompt"]).input_ids) for doc in group[name].test_docs()]
        sizes[name] = (min(lengths), max(lengths))
    assert 480 <= sizes["kvpolicy_recall_512"][0] <= sizes["kvpolicy_recall_512"][1] <= 512
    assert 960 <= sizes["kvpolicy_recall_1024"][0] <= sizes["kvpolicy_recall_1024"][1] <= 1024


def test_evaluation_reports_scores_and_costs(make):
    small = manager(records=12, queries=2, chars=200, fresh=4, asks=4, shots=2)
    results = simple_evaluate(
        model=make("snapkv@0.5"), tasks=["kvpolicy"], task_manager=small, limit=2, bootstrap_iters=0
    )
    assert sorted(results["results"]) == ["kvpolicy", *(f"kvpolicy_{name}" for name in TASKS)]
    costs = results["config"]["kvpolicy"]["tasks"]
    kinds = {"fewshot": "loglikelihood", "text": "loglikelihood_rolling"}
    assert sorted(costs) == sorted(f"kvpolicy_{name}/{kinds.get(name, 'generate_until')}" for name in TASKS)
    for cost in costs.values():
        assert cost["requests"] >= 2 and 0 < cost["kv_share"] < 1 and cost["tokens_per_second"] > 0
    assert json.loads(json.dumps(results["config"]["kvpolicy"]))["policy"] == "snapkv@0.5"


def test_embedded_model_is_the_default():
    from kvpolicy_lm_eval.model import KVPolicyLM

    lm = KVPolicyLM(policy="h2o")
    assert lm.model.config.model_type == "llama" and str(lm.model.dtype) == "torch.float32"
