"""Scores of heads are those of the definition, for what the model's own projections give."""

from __future__ import annotations

import json
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
from kvpolicy.allocators.head_files import HEAD_FILES
from kvpolicy.calibration import calibrate_heads, head_scores
from kvpolicy.hf.discovery import find_sites
from tests.reference.head_allocators.duo import reach
from tests.small_models import SIZES

THETA = 100.0


def llama(**fields: Any) -> Any:
    torch.manual_seed(0)
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
    """Queries and keys of every token of each layer before the rotary embedding, [heads, n, D]."""
    found: dict[int, list[Tensor]] = {}
    handles: list[Any] = []
    for site in find_sites(model).layers:
        for side in ("q", "k"):
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
                for q, k in (each[layer] for each in every)
                for g in range(2)
            ]
            assert score == pytest.approx(sum(expected) / 4, abs=1e-5)


def test_a_model_with_an_attention_of_its_own() -> None:
    config = FalconConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=40,
        alibi=False,
        num_kv_heads=2,
        new_decoder_architecture=True,
    )
    found = head_scores(FalconForCausalLM(config).eval(), windows(1))
    assert [scores.shape for scores in found.values()] == [(2,), (2,)]
    assert all(bool(((scores > 0) & (scores < 1)).all()) for scores in found.values())


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


def test_a_file_is_written_for_the_model(tmp_path: Path) -> None:
    model = gemma()
    path = tmp_path / "heads.json"
    written = calibrate_heads(model.train(), windows(), path, sinks=2, recent=5, positions=30)
    assert model.training and HEAD_FILES.load(str(path)) == written
    assert (written.sinks, written.recent, written.kind) == (2, 5, "score")
    assert [len(row) for row in written.heads] == [0, 2], "a row for each layer, empty for the sliding one"
    assert json.loads(path.read_text())["model"]["type"] == "gemma2"
    model.eval()
    kvpolicy.attach(model, f"uniform/duo:file={path}+streaming@0.5").detach()
    other = llama()
    with pytest.raises(kvpolicy.KVPolicyError, match=r"made for another model \(gemma2"):
        kvpolicy.attach(other, f"uniform/duo:file={path}+streaming@0.5")
