"""Scores of policies on windows: against a dense forward with a mask, on solved tasks, and at a share of the bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

import kvpolicy
from kvpolicy.hf import compiled_generation
from kvpolicy.hf.identity import identity
from kvpolicy.planning.curves import Curves, save_curves
from kvpolicy.tuning import evidence
from kvpolicy.tuning.evidence import Score, at_bytes, reference_logits, score, share_bytes
from kvpolicy.tuning.windows import Window
from kvpolicy_eval.data.tasks import tasks
from kvpolicy_lm_eval.data.modes import place
from tests.reference.evidence import newest
from tests.sampling import each_once
from tests.tuning.test_measure import gemma, llama

SIZES = {"vocab_size": 23, "initializer_range": 0.5}


def drawn(seed: int, prompt: int, question: int, answer: int) -> Window:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(23, (prompt + question + answer,), generator=generator)
    first, asked, rest = ids.split([prompt, question, answer])
    return Window(first, rest, asked)


@functools.cache
def solved() -> tuple[Any, list[Window]]:
    """The embedded model, and a window of each task with the question behind the compressed text."""
    model, tokenizer = kvpolicy.tiny()
    windows: list[Window] = []
    for draw in tasks(300).values():
        text, asked, answer = place(draw(Random(1)), "after")
        rest = (torch.tensor(tokenizer.encode(part, add_special_tokens=False)) for part in (answer, asked))
        windows.append(Window(torch.tensor(tokenizer.encode(text)), *rest))
    return model, windows


@pytest.mark.parametrize(("question", "answer"), each_once([0, 1, 4], [3, 1]))
def test_score_is_that_of_a_dense_forward_with_a_mask(question: int, answer: int) -> None:
    model = llama(**SIZES)
    windows = [drawn(seed, 9 + 3 * seed, question, answer) for seed in range(4)]
    # One window whose answer is what the model says, so that it is right.
    windows.append(_answered(model, windows[0], keep=5))
    found = score(model, windows, "window@5")
    expected = [newest(model, window.prompt, window.question, window.answer, 5) for window in windows]
    for values, wanted in zip(found[:3], zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(values, torch.tensor(wanted, dtype=torch.float64), atol=1e-5, rtol=1e-4)
    assert found.correct[-1] == 1 and found.correct.min() == 0 and found.kl.min() > 0


def _answered(model: Any, window: Window, keep: int) -> Window:
    """The window with the answer of greedy decoding from the newest tokens, found token by token."""
    answer = window.answer[:0]
    for _ in window.answer:
        ok = [
            token
            for token in range(23)
            if newest(model, window.prompt, window.question, torch.cat([answer, torch.tensor([token])]), keep)[2]
        ]
        answer = torch.cat([answer, torch.tensor(ok)])
    return window._replace(answer=answer)


def test_the_full_cache_changes_nothing_on_solved_tasks() -> None:
    model, windows = solved()
    found = score(model, windows, "full")
    assert found.kl.abs().max() < 1e-6 and found.top1.min() == 1 and found.correct.min() == 1
    assert found.kl.shape == found.top1.shape == found.correct.shape == (6,)


def test_evicting_the_document_changes_the_answers() -> None:
    model, windows = solved()
    found = score(model, windows, "window@0.1")
    assert found.kl.min() > 0.1 and found.correct.mean() <= 0.5
    assert f"{float(found.correct.mean()):.1%} answered, KL " in str(found)


def test_a_shared_reference_gives_the_same() -> None:
    model = llama(**SIZES)
    windows = [drawn(seed, 30, 2, 4) for seed in range(2)]
    reference = reference_logits(model, windows)
    assert [tuple(logits.shape) for logits in reference] == [(7, 23), (7, 23)]
    alone, shared = (score(model, windows, "h2o@8", reference=given) for given in (None, reference))
    assert all(torch.equal(x, y) for x, y in zip(alone[:3], shared[:3], strict=True))
    changed = [logits + torch.arange(23.0) for logits in reference]
    assert not torch.equal(score(model, windows, "h2o@8", reference=changed).kl, shared.kl), "it is what counts"
    with pytest.raises(kvpolicy.KVPolicyError, match="reference must be of the same windows"):
        score(model, windows, "h2o@8", reference=reference[:1])


def test_tokens_of_an_answer_are_steps_and_readers_act_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(**SIZES)
    window = drawn(0, 40, 3, 4)
    fed: list[tuple[int, Any]] = []
    plain = evidence._logits

    def spy(model: Any, ids: Tensor, count: int, **kwargs: Any) -> Tensor:
        fed.append((len(ids), kwargs["cache"].new))
        return plain(model, ids, count, **kwargs)

    monkeypatch.setattr(evidence, "_logits", spy)
    reference = [torch.zeros(8, 23)]
    score(model, [window], "full", reference=reference)
    assert fed == [(40, 7), (3, 7), *[(1, 7)] * 4], "the cache is told of 7 more tokens"
    monkeypatch.undo()
    read, everything = (score(model, [window], spec) for spec in ("exact:read=0.1", "full"))
    assert read.kl > everything.kl + 1e-3


def test_compiled_steps_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    monkeypatch.setattr(compiled_generation, "_default", lambda model: CompileConfig(backend=backend, mode="default"))
    torch.compiler.reset()
    model, _ = kvpolicy.tiny()
    windows = [Window(torch.arange(3, 3 + length), torch.arange(5, 13)) for length in (40, 57)]
    eager, compiled = (score(model, windows, "h2o@0.5", compile=compile) for compile in (False, True))
    assert len(graphs) == 1
    torch.testing.assert_close(compiled.kl, eager.kl)
    assert torch.equal(compiled.correct, eager.correct) and compiled.nbytes == eager.nbytes


def test_bytes_are_a_share_of_the_full_cache() -> None:
    model, windows = solved()
    config = model.config
    tokens = [len(window.prompt) + len(window.follow) for window in windows]
    each = 8 * 2 * config.num_key_value_heads * config.head_dim * 4
    budgets = [share_bytes(model, window, 0.15) for window in windows]
    assert budgets == [int(0.15 * count * each) for count in tokens]
    for spec in ("snapkv", "snapkv+kivi:bits=4"):
        found = score(model, windows, spec, share=0.15)
        assert 0.7 * sum(budgets) / 6 < found.nbytes <= sum(budgets) / 6
    bounded = gemma()  # a layer of it holds 7 tokens
    window = drawn(0, 30, 0, 10)
    token = 2 * 2 * 8 * 4
    assert share_bytes(bounded, window, 0.5) == 20 * token + 7 * token
    assert score(bounded, [window], "window", share=0.5).nbytes <= 27 * token


def test_a_model_keeps_its_mode_and_has_no_policy_afterwards() -> None:
    model = llama(**SIZES, attention_dropout=0.5).train()
    window = drawn(0, 20, 0, 3)
    assert torch.equal(score(model, [window], "h2o@8").kl, score(model, [window], "h2o@8").kl)
    assert model.training
    kvpolicy.attach(model, "h2o").detach()


def test_what_cannot_be_scored_is_refused() -> None:
    model = llama(**SIZES)
    window = drawn(0, 20, 0, 3)
    with pytest.raises(kvpolicy.KVPolicyError, match="must be windows to measure policies on, got none"):
        score(model, [], "full")
    with pytest.raises(kvpolicy.KVPolicyError, match=r"budget must be at least \d+B"):
        score(model, [window], "h2o", share=0.01)
    for share in (0, 1.5):
        with pytest.raises(kvpolicy.KVPolicyError, match=r"must be in \(0, 1\], got"):
            share_bytes(model, window, share)
    with pytest.raises(kvpolicy.KVPolicyError, match="must have a selector"):
        at_bytes("kivi:bits=4", 1000)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(kvpolicy.KVPolicyError, match="must be finite, got NaN in window 0 under window@5"):
        score(model, [window], "window@5")
    kvpolicy.attach(model, "h2o").detach()


def test_a_token_that_is_ruled_out_adds_nothing() -> None:
    full = torch.tensor([[0.0, 0.0], [0.0, -torch.inf]])
    ours = torch.tensor([[5.0, 0.0], [1.0, 1.0]])
    kl, same, right = evidence._compare(ours, full, Window(torch.tensor([0]), torch.tensor([0])))
    assert kl == pytest.approx(0.6931471805599453) and (same, right) == (1.0, 1.0)


def test_means_are_of_the_windows() -> None:
    model = llama(**SIZES)
    windows = [drawn(seed, 30, 0, 4) for seed in range(3)]
    each = [score(model, [window], "h2o@8") for window in windows]
    together = score(model, windows, "h2o@8")
    assert isinstance(together, Score) and together.nbytes == sum(one.nbytes for one in each) / 3
    assert torch.equal(together.kl, torch.cat([one.kl for one in each]))


def test_policies_by_layer_are_scored(tmp_path: Path) -> None:
    """Given as such and as a file, whose parts may be others in each window."""
    model = llama(**SIZES)
    windows = [drawn(seed, 20 + 30 * seed, 0, 2) for seed in range(2)]
    alike = kvpolicy.Policy.by_layer(["window@0.5"] * 2, budget=0.5)
    found = score(model, windows, alike, share=0.5)
    wanted = score(model, windows, "window", share=0.5)
    assert torch.equal(found.kl, wanted.kl) and found.nbytes == wanted.nbytes
    table = [[1.0, 0.1, 0.0] for _ in range(2)]
    forms = ("window@0.1", "window+rotate:group_size=4:residual_length=4@0.4", "window@1.0")
    candidates = tuple(map(kvpolicy.Policy.parse, forms))
    text = {"sha256": "", "windows": 2, "prompt": 20, "new": 2}
    save_curves(tmp_path / "a.json", Curves(identity(model), text, "kl", (0, 1), 2, candidates, table, table))
    for share in (0.3, 0.9):
        assert score(model, windows, f"tuned:file={tmp_path}/a.json", share=share).kl.isfinite().all()
