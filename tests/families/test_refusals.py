"""What is refused is told in the words of a user, and `plan` says what `attach` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy_eval.families.entries import CAUSAL, IMAGE, Entry, installed
from kvpolicy_eval.families.reasons import reason_of
from kvpolicy_eval.families.small_model import build

SAID = {
    Entry(CAUSAL, "blt"): "got none for blt",
    Entry(CAUSAL, "deepseek_v4"): "holds entries that stand for several tokens (compressed attention)",
    Entry(CAUSAL, "gpt_neo"): "whose layers share attention modules, or do not say their index to them",
    Entry(CAUSAL, "hrm_text"): "which has 2 stacks",
    Entry(CAUSAL, "inkling_text"): "a bias by content and distance in model.layers.0.self_attn (InklingAttention)",
    Entry(CAUSAL, "mamba"): "whose layers hold states of a fixed size and no tokens",
    Entry(CAUSAL, "minimax"): "got layer 0 of MiniMaxModel, which keeps its own in another way",
    Entry(CAUSAL, "mllama"): "it also attends to an encoder or to pictures",
    Entry(CAUSAL, "openai-gpt"): "which takes no cache of transformers",
    Entry(CAUSAL, "qwen4_exp_text"): "also holds an index, by which sparse attention chooses tokens",
    Entry(CAUSAL, "rwkv"): "whose layers hold states of a fixed size and no tokens",
    Entry(CAUSAL, "whisper"): "it also attends to an encoder or to pictures",
    Entry(CAUSAL, "xlstm"): "whose layers hold states of a fixed size and no tokens",
    Entry(CAUSAL, "zamba"): "whose layers share attention modules, or do not say their index to them",
    Entry(CAUSAL, "zamba2"): "whose layers share attention modules, or do not say their index to them",
    Entry(IMAGE, "paligemma"): "tokens attend to later ones",
    Entry(IMAGE, "unlimited_ocr"): "holds a window and a reference text before it",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", SAID, ids=lambda entry: entry.key)
def test_a_refusal_names_its_reason(entry: Entry) -> None:
    if entry not in installed():
        pytest.skip("this version of transformers lacks it")
    model: Any = build(entry)
    said = list[str]()
    for call, given in ((kvpolicy.attach, model), (kvpolicy.plan, model), (kvpolicy.plan, model.config)):
        with pytest.raises(kvpolicy.KVPolicyError) as error:
            call(given, "window@0.5")
        said.append(str(error.value))
    assert SAID[entry] in said[0]
    assert said == said[:1] * 3
    assert said[0].endswith(".") and ". " not in said[0] and " must " in said[0] and ", got " in said[0]
    assert "sliding_window" not in said[0], "advice that is none"
    assert reason_of(said[0])


@pytest.mark.parametrize("name", ["glmga", "glm46v"])
def test_a_class_may_take_the_config_of_another_model(name: str) -> None:
    """GLM-GA has the class of GLM-4.6V, and a config of its own that is no text config either."""
    entry = Entry(IMAGE, name)
    if entry not in installed():
        pytest.skip("this version of transformers lacks it")
    model: Any = build(entry)
    with kvpolicy.attach(model, "window@0.5") as handle, torch.no_grad():
        model(torch.arange(3, 43)[None])
        held = handle.cache.nbytes  # pyright: ignore[reportOptionalMemberAccess]
    assert kvpolicy.plan(model.config, "window@0.5", prompt=40, dtype=torch.float32).nbytes == held
