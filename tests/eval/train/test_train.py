"""Training resumes exactly and exports what it trained, and the ablation keeps what each method says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvpolicy_eval.train.ablate import OBSERVATION, SINKS, Bench, Prefill, decode
from kvpolicy_eval.train.export import LONG_POSITIONS, export, load_llama, to_llama
from kvpolicy_eval.train.loop import Trainer
from kvpolicy_eval.train.net import Net, windowed_attention
from kvpolicy_eval.train.phases import FOCUS, LONG_PHASES, PHASES, learning_rate, scaled
from kvpolicy_eval.train.tokenizer import SIZE, build_tokenizer, token_id
from kvpolicy_eval.train.tokens import ANSWER, TEXT, Sampler, Vocabulary, encode_text
from kvpolicy_lm_eval.data.text import training_texts
from kvpolicy_lm_eval.data.words import WORDS
from tests.sampling import each_once, product


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(training_texts()[:6])


@pytest.fixture(scope="module")
def text(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    return encode_text(tokenizer, training_texts()[:2], token_id(tokenizer, "</s>"))


@pytest.fixture
def trainer(tokenizer: PreTrainedTokenizerFast, text: np.ndarray) -> Trainer:
    return Trainer(tokenizer, text, PHASES[:1], seed=1)


def test_tokenizer_makes_one_token_of_each_part(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == SIZE
    assert tokenizer.padding_side == "left"
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    for part in (*WORDS, "passkey", *"0123456789=?#:\n"):
        assert len(tokenizer.encode(part, add_special_tokens=False)) == 1
    source = "def f(x):\n    return x['tiger'] + 12  # ok\n"
    assert tokenizer.decode(tokenizer.encode(source, add_special_tokens=False)) == source


LENGTHS = [65, 129, 257, 1025, 4737]


@product("task,length", [*FOCUS], LENGTHS, sample=each_once([*FOCUS], LENGTHS[2:]))
def test_sequences_are_the_tokens_of_their_text(
    tokenizer: PreTrainedTokenizerFast, text: np.ndarray, task: str, length: int
) -> None:
    if task == "passkey" and length < 257:
        pytest.skip("the curriculum has no short pass keys")
    sampler = Sampler(Vocabulary(tokenizer), text, np.random.default_rng(0))
    row = sampler.row(task, length, 4)
    assert len(row.ids) == len(row.kinds)
    assert length * 0.6 < len(row) < length * 1.5 + 100
    if TEXT not in row.kinds:  # source text is cut inside its tokens
        assert tokenizer(tokenizer.decode(row.ids[1:]))["input_ids"] == row.ids
    assert (ANSWER in row.kinds) == (task != "source")


@pytest.mark.parametrize("digits", [0, 2])
def test_short_records_of_a_long_sequence_have_keys(
    tokenizer: PreTrainedTokenizerFast, text: np.ndarray, digits: int
) -> None:
    for seed in range(4):
        sampler = Sampler(Vocabulary(tokenizer), text, np.random.default_rng(seed))
        for task in ("recall", "hot_keys", "needles"):
            assert len(sampler.row(task, 4737, digits)) > 2000


def test_same_seed_gives_same_batches(tokenizer: PreTrainedTokenizerFast, text: np.ndarray) -> None:
    a, b = (Sampler(Vocabulary(tokenizer), text, np.random.default_rng(5)) for _ in range(2))
    for task in FOCUS:
        assert torch.equal(a.batch(task, 2, 257, {4: 1.0})[0], b.batch(task, 2, 257, {4: 1.0})[0])


@pytest.mark.parametrize("window", [4, 24, 32])
@pytest.mark.parametrize("length", [7, 32, 77])
def test_windowed_attention_equals_a_mask(length: int, window: int) -> None:
    query, key, value = torch.randn(3, 2, 4, length, 8, generator=torch.Generator().manual_seed(0))
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    mask = (distance >= 0) & (distance < window)
    mask[:, 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(windowed_attention(query, key, value, window), expected)


def test_resumed_training_equals_uninterrupted(trainer: Trainer, tokenizer, text, tmp_path: Path) -> None:
    trainer.run(max_steps=1)
    trainer.save(tmp_path)
    trainer.run(max_steps=1)
    resumed = Trainer(tokenizer, text, PHASES[:1], seed=9)
    resumed.load(tmp_path)
    resumed.run(max_steps=1)
    assert resumed.progress.tokens == trainer.progress.tokens
    for name, weight in trainer.net.state_dict().items():
        assert torch.equal(weight, resumed.net.state_dict()[name]), name


def test_resume_without_checkpoint_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint"):
        trainer.load(tmp_path)


@torch.no_grad()
def test_export_gives_the_logits_of_the_net(trainer: Trainer, tokenizer, tmp_path: Path) -> None:
    ids, _ = trainer.sampler.batch("recall", 2, 64, {0: 1.0})
    expected = trainer.net(ids)
    torch.testing.assert_close(to_llama(trainer.net, tokenizer)(ids).logits, expected, atol=2e-5, rtol=1e-4)
    export(trainer.net, tokenizer, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.max_position_embeddings >= 1024
    torch.testing.assert_close(model(ids).logits, expected, atol=0.1, rtol=0.1)  # weights are bf16
    assert AutoTokenizer.from_pretrained(tmp_path)("?tiger=")["input_ids"] == tokenizer("?tiger=")["input_ids"]


@torch.no_grad()
def test_a_continued_net_is_the_exported_one(trainer: Trainer, tokenizer, text, tmp_path: Path) -> None:
    export(trainer.net, tokenizer, tmp_path, dtype=torch.float32, positions=LONG_POSITIONS)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.max_position_embeddings == LONG_POSITIONS
    other = Net(trainer.net.shape, seed=7)
    load_llama(other, tmp_path)
    for name, weight in trainer.net.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    continued = Trainer(tokenizer, text, LONG_PHASES[:1], seed=9, start=tmp_path, peak_rate=1e-3, autocast=False)
    assert all(torch.equal(a, b) for a, b in zip(continued.net.parameters(), trainer.net.parameters(), strict=True))
    assert continued.adam.param_groups[0]["lr"] == 1e-3


def test_a_long_sequence_asks_for_its_records(tokenizer: PreTrainedTokenizerFast, text: np.ndarray) -> None:
    sampler = Sampler(Vocabulary(tokenizer), text, np.random.default_rng(3))
    for task in ("recall", "recall_far", "hot_keys"):
        row = sampler.row(task, 4096, 4)
        lines = str(tokenizer.decode(row.ids[1:])).splitlines()
        asked = [line[1:] for line in lines if re.fullmatch(rf"\?({'|'.join(WORDS)})=\d{{4}}", line)]
        assert len(asked) > 20
        assert set(asked) <= set(lines)
        assert (TEXT in row.kinds) == (task != "hot_keys"), "text fills what keys cannot"


def test_phases_add_up() -> None:
    for phase in (*PHASES, *LONG_PHASES):
        assert sum(phase.tasks.values()) == pytest.approx(1)
        assert sum(phase.digits.values()) == pytest.approx(1)
        assert set(phase.tasks) <= set(FOCUS)
    assert sum(p.tokens for p in scaled(PHASES, 0.5)) == sum(p.tokens for p in PHASES) / 2
    rates = [learning_rate(step, done, 1.0) for step, done in ((0, 0), (59, 0.1), (999, 0.4), (999, 1.0))]
    assert rates == pytest.approx([1 / 60, 1, 1, 0.03])


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
