"""Scores of heads: by how far they reach, and by a random text that is repeated, against their definitions."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvpolicy
from kvpolicy.allocators.duo import DuoAttention
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.calibration import EchoScores, calibrate_echoes, calibrate_heads, echo_scores, head_scores, ranked_scores
from kvpolicy.calibration.echoes import repeated_text
from kvpolicy.calibration.qfilters import sample_queries
from kvpolicy.hf.discovery import find_sites
from tests.conformance import models
from tests.reference.head_allocators.duo import echoes, reach, retrieving
from tests.small_models import SIZES

THETA = 100.0


def llama(seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    fields = SIZES | {"rope_parameters": _rope()} | fields
    return LlamaForCausalLM(LlamaConfig(**fields)).eval()


def qwen() -> Any:
    """It normalizes queries and keys before the rotary embedding."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=_rope())).eval()


def gemma() -> Any:
    """It caps products, and its odd layers alone are managed."""
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, rope_parameters=_rope(), attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    return Gemma2ForCausalLM(config).eval()


def _rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": THETA}


def windows(count: int = 2, length: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 40, (length,), generator=generator) for _ in range(count)]


def projected(model: Any, ids: Tensor) -> dict[int, list[Tensor]]:
    """Queries, keys and values of every token of each layer before the rotary embedding, [heads, n, D]."""
    found: dict[int, list[Tensor]] = {}
    handles: list[Any] = []
    for site in find_sites(model).layers:
        for side in ("q", "k", "v"):
            module = getattr(site.attention, f"{side}_norm", getattr(site.attention, f"{side}_proj"))

            def keep(_: Any, args: Any, out: Tensor, layer: int = site.layer_idx) -> None:
                found.setdefault(layer, []).append(out.reshape(len(ids), -1, 8).transpose(0, 1))

            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(ids[None])
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize(("make", "cap", "scale"), [(llama, None, 8**-0.5), (qwen, None, 8**-0.5), (gemma, 2.0, 0.25)])
def test_scores_are_those_of_the_definition(make: Callable[[], Any], cap: float | None, scale: float) -> None:
    model = make()
    texts = windows()
    positions = 20
    found = head_scores(model, texts, positions=positions)
    assert sorted(found) == ([1] if make is gemma else [0, 1])
    every = [projected(model, ids) for ids in texts]
    for layer, scores in found.items():
        for head, score in enumerate(scores.tolist()):
            expected = [
                reach(q[2 * head + g].tolist(), k[head].tolist(), THETA, positions, scale, cap)
                for q, k, _ in (each[layer] for each in every)
                for g in range(2)
            ]
            assert score == pytest.approx(sum(expected) / 4, abs=1e-5)


@pytest.mark.parametrize(("measure", "shape"), [(head_scores, (2,)), (sample_queries, (4, 12, 8))])
def test_a_model_with_an_attention_of_its_own(measure: Any, shape: tuple[int, ...]) -> None:
    config = FalconConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=40,
        alibi=False,
        num_kv_heads=2,
        new_decoder_architecture=True,
    )
    found = measure(FalconForCausalLM(config).eval(), windows(1))
    assert [each.shape for each in found.values()] == [shape] * 2
    assert measure is sample_queries or all(bool(((each > 0) & (each < 1)).all()) for each in found.values())


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    opt = OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            num_attention_heads=4,
            num_hidden_layers=1,
            vocab_size=40,
            ffn_dim=32,
            word_embed_proj_dim=32,
        )
    ).eval()
    refused = [
        (opt, windows(), "got none in layer 0 of OPTForCausalLM; try a head file from another source"),
        (llama(rope_parameters={**_rope(), "rope_type": "dynamic", "factor": 2.0}), windows(), "depends on the length"),
        (llama(), [], "must contain tokens to calibrate on"),
    ]
    for model, texts, message in refused:
        with pytest.raises(kvpolicy.KVPolicyError, match=message):
            calibrate_heads(model, texts, tmp_path / "heads.json")
    assert not list(tmp_path.iterdir())


def build(family: str) -> Any:
    """A model of its own, since tests change it."""
    return copy.deepcopy(models.build(family))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "opt"])
@pytest.mark.parametrize(("tokens", "repeats"), [(7, 2), (11, 4)])
def test_echo_scores_are_those_of_the_definition(
    family: str, tokens: int, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of grouped heads, softcaps, sinks, and models without a rotary embedding; in tiles of a few queries."""
    monkeypatch.setattr("kvpolicy.statistics.windows.TILE_ELEMENTS", 16)
    model = build(family)
    found = echo_scores(model, random=tokens, repeats=repeats, seed=3)
    ids, first = repeated_text(model, tokens, repeats, 3)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        matrices: Any = model(ids[None], output_attentions=True, use_cache=False).attentions
    assert found and len(ids) == first + tokens * repeats
    for layer, scores in found.items():
        weights = matrices[layer][0].double().tolist()
        group = len(weights) // len(scores.echo)
        for head, (echo, induction) in enumerate(zip(scores.echo.tolist(), scores.induction.tolist(), strict=True)):
            own = [echoes(rows, first, tokens) for rows in weights[head * group : (head + 1) * group]]
            assert echo == pytest.approx(max(pair[0] for pair in own), abs=1e-6)
            assert induction == pytest.approx(max(pair[1] for pair in own), abs=1e-6)


def test_the_text_is_random_distinct_and_repeated() -> None:
    model = build("llama")
    ids, first = repeated_text(model, 45, 3, 0)
    assert first == 1 and int(ids[0]) == 1, "the token that begins texts"
    assert sorted(ids[1:46].tolist()) == list(range(3, 48)), "every token but those that the config names"
    assert torch.equal(ids[1:46], ids[46:91]) and torch.equal(ids[1:46], ids[91:])
    assert not torch.equal(ids, repeated_text(model, 45, 3, 1)[0])
    longer = repeated_text(model, 100, 2, 0)[0][1:101]
    assert longer.bincount().max() == 3, "tokens repeat only where the vocabulary ends"
    model.config.bos_token_id = None
    model.config.eos_token_id = [2, 7]
    ids, first = repeated_text(model, 45, 2, 0)
    assert first == 0 and not {0, 2, 7} & set(ids.tolist())


def test_the_best_heads_by_both_scores_retrieve(tmp_path: Path) -> None:
    """With disjoint sets, `duo` has the heads of the paper, at any sparsity."""
    dice = random.Random(2)
    for case in range(20):
        layers = 5
        heads = 4
        # The best by one score are the worst by the other, so that no head is among the best of both.
        order = [dice.random() for _ in range(layers * heads)]
        pairs = [
            [(order[layer * heads + h], 1 - order[layer * heads + h]) for h in range(heads)] for layer in range(layers)
        ]
        scores = {
            layer: EchoScores(*(torch.tensor([pair[which] for pair in row]) for which in (0, 1)))
            for layer, row in enumerate(pairs)
        }
        ranked = ranked_scores(scores, echo=0.05, induction=0.2)
        path = str(tmp_path / f"{case}.json")
        HEAD_FILES.save(path, HeadFile(tuple(tuple(ranked[layer].tolist()) for layer in range(layers))))
        for echo, induction in ((1, 4), (2, 8)):
            sparsity = 1 - (echo + induction) / 20
            streams = DuoAttention(file=path, sparsity=sparsity).streaming_heads(heads)
            kept = {
                (layer, head)
                for layer, row in enumerate(streams)
                for head, streaming in enumerate(row)
                if not streaming
            }
            assert retrieving(pairs, echo, induction) <= kept and len(kept) <= echo + induction + 1


def test_a_share_of_zero_leaves_a_score_out() -> None:
    found = {3: EchoScores(torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0.0, 1.0, 0.0]))}
    assert ranked_scores(found, echo=0.15, induction=0)[3].argsort(descending=True).tolist() == [0, 2, 1]
    assert ranked_scores(found, echo=0, induction=0.15)[3].argsort(descending=True, stable=True).tolist() == [1, 0, 2]


def test_the_random_text_fits_into_the_model(tmp_path: Path) -> None:
    model = build("llama")
    model.config.max_position_embeddings = 41
    made = calibrate_echoes(model, tmp_path / "heads.json").made
    assert made is not None and (made["random"], made["repeats"]) == (10, 4)
    with pytest.raises(kvpolicy.KVPolicyError) as refused:
        echo_scores(model, random=11)
    assert str(refused.value) == (
        "The random tokens must be at most 10, so that 4 copies fit into the 41 positions of the model, got 11; "
        "try 10, or fewer repeats."
    )


@pytest.mark.parametrize(
    ("best", "tokens", "warns"), [(0.11, 100, False), (0.09, 100, True), (0.16, 8, True), (0.2, 8, False)]
)
def test_a_model_that_finds_no_copies_is_warned_of(
    best: float, tokens: int, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even attention gives 0.09 to three copies of 8 tokens, and 0.008 to those of 100."""
    scores = EchoScores(torch.tensor([0.001, 0.01]), torch.tensor([0.001, best]))
    monkeypatch.setattr("kvpolicy.calibration.echoes.echo_scores", lambda *args, **options: {0: scores})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        written = calibrate_echoes(build("llama"), tmp_path / "heads.json", random=tokens)
    assert written.heads[0] == (0.464286, 1.0)
    found = [str(each.message) for each in caught if each.category is kvpolicy.KVPolicyWarning]
    assert len(found) == warns
    assert (
        not warns or f"No head finds the copies of {tokens} random tokens: the best gives them {best:.3f}" in found[0]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 1}, "repeats must be"),
        ({"random": 1}, "random must be"),
        ({"echo": -0.1}, "The shares of heads by echo and induction must be from 0 to 1"),
        ({"echo": 0.0, "induction": 0.0}, "their sum more than 0 and at most 1, got 0.0 and 0.0; try 0.01 and 0.14."),
        ({"echo": 0.5, "induction": 0.6}, "got 0.5 and 0.6"),
        ({"induction": float("nan")}, "got 0.01 and nan"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(kvpolicy.KVPolicyError, match=message):
        calibrate_echoes(build("llama"), tmp_path / "heads.json", **options)
    assert not list(tmp_path.iterdir())
