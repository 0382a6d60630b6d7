"""vLLM answers behind prompts that it compresses as kvpolicy does, token for token."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from kvpolicy_vllm.ledger import Work
from tests.vllm.compressed import LEAST, POLICIES, compressor_of, recipe_of, run, start, use, wanted
from tests.vllm.engines import about, answers_of, engine, free_blocks, plain, reasons, sampling, scheduler_of
from tests.vllm.models import POLICY, answer, close, make_model, make_question, make_text, save, short

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

TEXTS = [70, 128, 150, 201, 300]
"""Tokens of prompts, which fill blocks or end in the middle of one."""

EXTRA = {"policy": POLICIES[0], "threshold": LEAST, "least": 0}


class Model:
    """A model of a family, prompts for it, and what kvpolicy answers to them."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = make_model(family)
        self.folder = folder
        self.model.save_pretrained(folder)
        self.prompts = [make_text(self.model, tokens, seed) for seed, tokens in enumerate(TEXTS)]
        if family == "tiny":  # which answers with numbers that stand in its prompt
            self.prompts = [[*ids, *make_question(self.model)] for ids in self.prompts]

    def wanted(self, policy: str, tokens: int = 8) -> list[Any]:
        return [wanted(self.model, recipe_of(policy), ids, tokens) for ids in self.prompts]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("vllm")
    return Model("llama3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(small: Model) -> Generator[Any]:
    """An engine with few blocks, in which prompts come in chunks."""
    with engine(small.folder, extra=EXTRA, num_gpu_blocks_override=26, max_num_batched_tokens=96) as started:
        yield started


@pytest.fixture
def llm(shared: Any) -> Generator[Any]:
    use(shared, recipe_of(POLICIES[0]))
    before = free_blocks(shared)
    yield shared
    shared.llm_engine.step()  # of which workers learn that requests have ended
    assert free_blocks(shared) == before
    connector = scheduler_of(shared).connector
    assert not len(connector._ledger) and not connector._ledger._by_request and not connector._requests._known
    assert not compressor_of(shared).nbytes and not compressor_of(shared)._failed


@pytest.mark.parametrize(
    ("family", "eager"),
    [("tiny", True), ("tiny", False), ("qwen2", True), ("one head", True), ("glm", True), ("cohere", True)],
)
def test_answers_are_those_of_kvpolicy(family: str, eager: bool, tmp_path: Path) -> None:
    found = Model(family, tmp_path)
    # Before vLLM changes the classes of models that it runs by its backend of transformers.
    expected = {policy: found.wanted(policy) for policy in POLICIES}
    with engine(tmp_path, extra=EXTRA, enforce_eager=eager) as llm:
        for policy in POLICIES:
            recipe = recipe_of(policy)
            use(llm, recipe)
            assert close(answers_of(run(llm, found.prompts, recipe)), expected[policy]), policy
        whole = answers_of(run(llm, [], recipe_of(POLICIES[0]), [plain(ids) for ids in found.prompts]))
    assert any(one.tokens != other.tokens for one, other in zip(whole, expected["window@0.2"], strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_and_mixed_batches(small: Model, llm: Any, policy: str, tmp_path: Path) -> None:
    recipe = recipe_of(policy)
    use(llm, recipe)
    question = make_question(small.model)
    path = save(small.model, POLICY, make_text(small.model, 90, 30), tmp_path / "d.safetensors")
    others = [plain(small.prompts[0]), about(path, question, llm), plain(question)]
    found = answers_of(run(llm, small.prompts, recipe, others))
    assert close(found[: len(TEXTS)], small.wanted(policy))
    assert found[len(TEXTS)].tokens == answer(small.model, None, None, small.prompts[0]).tokens
    assert found[len(TEXTS) + 1].tokens == answer(small.model, POLICY, path, question).tokens
    assert found[len(TEXTS) + 2].tokens == answer(small.model, None, None, question).tokens


@pytest.mark.parametrize("policy", ["snapkv:window=8@0.5", "h2o@0.5", "expected@0.5"])
def test_preempted_prompts_and_answers(small: Model, llm: Any, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are preempted in the middle of their prefill, and answers lose their kept tokens."""
    recipe = recipe_of(policy)
    use(llm, recipe)
    scheduler = scheduler_of(llm)
    savings = []
    steps = itertools.count()
    lost = []
    schedule = scheduler.schedule
    save_all = compressor_of(llm).save

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        if next(steps) % 5 == 3:
            while scheduler.running:
                lost.append(scheduler.running[-1].request_id.partition("-")[0])
                scheduler._preempt_request(scheduler.running.pop(), 0.0)
        return schedule(*args, **kwargs)

    def noted(work: Work) -> None:
        savings.extend(work.savings)
        save_all(work)

    monkeypatch.setattr(scheduler, "schedule", disturbed)
    monkeypatch.setattr(compressor_of(llm), "save", noted)
    for caching in (True, False):  # blocks that are cached still are not loaded again
        monkeypatch.setattr(scheduler.kv_cache_manager, "enable_caching", caching)
        assert close(answers_of(run(llm, small.prompts, recipe, tokens=24)), small.wanted(policy, 24))
        assert {"first", "second"} <= {*lost} and savings
        lost.clear()
        savings.clear()


def test_answers_that_run_out_of_blocks(small: Model, llm: Any) -> None:
    recipe = recipe_of("window@100")
    use(llm, recipe)
    before = compressor_of(llm).peak
    prompts = [small.prompts[-1][n:] for n in range(6)]
    found = answers_of(run(llm, prompts, recipe, tokens=90))
    assert close(found, [wanted(small.model, recipe, ids, 90) for ids in prompts])
    one = 99 * 3 * 2 * 2 * 32 * 4 + 3 * 4 * 32 * 4
    assert compressor_of(llm).peak <= max(before, (recipe.prefills + len(prompts)) * one)


def test_few_prompts_wait_at_a_time(small: Model, llm: Any) -> None:
    recipe = recipe_of("window@40", prefills=2)
    use(llm, recipe)
    compressor_of(llm).peak = 0
    found = run(llm, small.prompts, recipe, [plain([5, 6])])
    assert close(answers_of(found)[:-1], small.wanted("window@40"))
    one = 39 * 3 * 2 * 2 * 32 * 4 + 3 * 4 * 32 * 4  # keys and values, and the outputs of the last token
    # Those that have begun hold the outputs of their last token until they end.
    assert one <= compressor_of(llm).peak <= 2 * one + 5 * 3 * 4 * 32 * 4


def test_what_goes_wrong_with_a_prompt_ends_only_its_request(
    small: Model, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(POLICIES[0])
    compressed = compressor_of(llm)._compressed

    def broken(layer_idx: int, part: Any, known: Any) -> Any:
        if layer_idx == 1 and part.total == TEXTS[2]:
            raise RuntimeError("no memory")
        return compressed(layer_idx, part, known)

    monkeypatch.setattr(compressor_of(llm), "_compressed", broken)
    found = run(llm, small.prompts, recipe, [plain([5, 6])])
    assert reasons(found) == ["length", "length", "error", "length", "length", "length"]
    expected = small.wanted(POLICIES[0])
    assert close(answers_of([*found[:2], *found[3:5]]), [*expected[:2], *expected[3:]])


def test_requests_of_other_forms_end_with_an_error(small: Model, llm: Any) -> None:
    recipe = recipe_of(POLICIES[0])
    ids = small.prompts[1]
    kept = recipe.kept(len(ids))
    good = start(llm, ids, recipe, "good")
    bad = [
        (start(llm, ids, recipe, "unknown", first=False), {}),
        (start(llm, ids, recipe, "good", first=False), {"cache_salt": "mine"}),
        (start(llm, ids, recipe, "good", first=False), {"prompt_token_ids": ids[: kept + 1]}),
        (start(llm, ids, recipe, "good", first=False), {"prompt_token_ids": ids[:1]}),
    ]
    outputs = run(llm, [], recipe, [({**text, **changes}, params) for (text, params), changes in bad])
    assert reasons(outputs) == ["error"] * len(bad)
    outputs = run(llm, [], recipe, [good, good, plain([5, 6])])  # the second one comes too late
    assert reasons(outputs) == ["length", "error", "length"]
    assert short(answers_of(outputs[:1])) == [wanted(small.model, recipe, ids).tokens]


def test_requests_that_are_aborted_leave_nothing(small: Model, llm: Any) -> None:
    recipe = recipe_of(POLICIES[0])
    ids = small.prompts[-1]
    core = llm.llm_engine
    for steps, first in itertools.product(range(4), (None, True)):
        text, params = start(llm, ids, recipe, f"{steps} {first}", first)
        core.add_request("gone", text, params)
        for _ in range(steps):
            core.step()
        core.abort_request(["gone"])
        run(llm, [], recipe, [plain([5, 6])])


def test_prompts_whose_clients_have_left_are_forgotten(small: Model, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(POLICIES[0], prefills=1)
    use(llm, recipe)
    late = start(llm, small.prompts[0], recipe, "late")
    assert compressor_of(llm).nbytes > 0
    ledger = scheduler_of(llm).connector._ledger
    monkeypatch.setattr(ledger, "_now", lambda now=ledger._now: now() + 100)
    assert reasons(run(llm, small.prompts[1:], recipe)) == ["length"] * 4
    assert reasons(run(llm, [], recipe, [late])) == ["error"]


def test_penalties_see_the_tokens_of_the_prompt(llm: Any) -> None:
    recipe = recipe_of("window@70")
    ids = [*range(3, 40)] * 4
    use(llm, recipe)
    (found,) = answers_of(run(llm, [ids], recipe, repetition_penalty=1e6, tokens=4))
    assert not {*found.tokens} & {*ids}


def test_sampling_is_that_of_the_whole_prompt(small: Model, llm: Any) -> None:
    """The first token is sampled from the logits of the whole prompt, by the first number of the seed."""
    # On a CPU, vLLM takes no seed for prompts in chunks.
    recipe = recipe_of(POLICIES[0])
    prompts = small.prompts[:1]
    for seed in range(5):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "tokens": 1}
        whole = [({"prompt_token_ids": ids}, sampling(**options)) for ids in prompts]
        assert close(answers_of(run(llm, prompts, recipe, **options)), answers_of(run(llm, [], recipe, whole)))
