"""The ablation: keeping everything equals `generate`, and each method keeps what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvpolicy_eval.train.ablate import OBSERVATION, SINKS, Bench, Prefill, decode
from kvpolicy_eval.train.export import export
from kvpolicy_eval.train.loop import Trainer
from kvpolicy_eval.train.phases import PHASES
from kvpolicy_eval.train.tokenizer import build_tokenizer, token_id
from kvpolicy_eval.train.tokens import encode_text
from kvpolicy_lm_eval.data.text import training_texts


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder: Path = tmp_path_factory.mktemp("model")
    texts = training_texts()[:4]
    tokenizer = build_tokenizer(texts)
    trainer = Trainer(tokenizer, encode_text(tokenizer, texts[:2], token_id(tokenizer, "</s>")), PHASES[:1])
    trainer.run(max_steps=1)
    export(trainer.net, tokenizer, folder)
    return Bench(folder, n=1)


@pytest.fixture(scope="module")
def prefill(bench: Bench) -> Prefill:
    with torch.no_grad():
        return Prefill(bench.model, bench.tokenizer("tiger=4821\n" * 12, return_tensors="pt").input_ids)


@torch.no_grad()
def test_keeping_everything_equals_generate(bench: Bench, prefill: Prefill) -> None:
    ids = bench.tokenizer("tiger=4821\n" * 12, return_tensors="pt").input_ids
    model: Any = bench.model
    expected = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    layers = bench.model.config.num_hidden_layers
    assert decode(prefill, [None] * layers, [], 4) == expected.tolist()
    whole = [prefill.streaming(layer, prefill.length) for layer in range(layers)]
    assert decode(prefill, whole, [], 4) == expected.tolist()


@pytest.mark.parametrize("method", ["streaming", "h2o", "snapkv"])
def test_methods_keep_their_budget(prefill: Prefill, method: str) -> None:
    kept = getattr(prefill, method)(3, 30)
    assert kept.shape == (4, 30)
    assert (kept.diff(dim=-1) > 0).all()
    assert kept.max() == prefill.length - 1
    recent = {"streaming": 30 - SINKS, "h2o": 15, "snapkv": OBSERVATION}[method]
    assert (kept[:, -recent:] == torch.arange(prefill.length - recent, prefill.length)).all()


def test_scores_count_exact_answers(bench: Bench) -> None:
    layers = bench.model.config.num_hidden_layers
    scores, tokens = bench.scores("recall", 128, True, {"full": lambda p: [None] * layers})
    assert scores["full"] in (0.0, 1.0)
    assert 100 < tokens < 140
