"""Errors and divergences are those of a slow reference, which attends with what real caches hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import kvpolicy
from kvpolicy import KVPolicyError
from kvpolicy.adapters import KVPressScorer
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, LayerGate
from kvpolicy.tuning.answers import scored_tokens
from kvpolicy.tuning.measure import joint_kls, layer_kls, output_errors, sensitivities
from kvpolicy.tuning.windows import Window
from tests.reference.one_layer import measured
from tests.small_models import SIZES

SELECTORS = [
    "window@1.0",
    "window@0.2",
    "h2o@0.25",
    "snapkv:window=4@0.3",
    "snapkv:window=8:kernel=3@0.1",
    "tova@0.3",
    "expected@0.3",
    "keydiff@0.3",
    "kvzip@0.3",
    "kvzip:plus=true@0.3",
    "kvcrush/snapkv:window=4@0.4",
    "probe@0.3",
    "streaming:sinks=8@0.1",  # too small
    "kvcrush/kvzip@0.4",
]
CODED = [
    "kivi:bits=2:group_size=8",
    "tokenwise:bits=4",
    "rotate:bits=2:group_size=8:sinks=3",
    "h2o+kivi:bits=2:group_size=8@0.6",
    "snapkv:window=4+tokenwise:bits=4@0.5",
    "h2o+mikv:high=0.4:group_size=8@0.6",
    "expected+turboquant:bits=2@0.5",
    "h2o+d2o@0.3",
    "uniform/adakv+snapkv:window=4@0.4",
    "uniform/adakv+h2o@0.05",  # too small for pages
    "uniform/adakv+h2o+tokenwise:bits=4:residual_length=2@0.6",
]


def llama(**fields: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | fields)).eval()


def gemma() -> Any:
    """It caps products, and its first layer slides and is not under a policy."""
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, attn_logit_softcapping=2.0, query_pre_attn_scalar=16, sliding_window=8)
    return Gemma2ForCausalLM(config).eval()


def window(prompt: int, answer: int, seed: int = 1, vocabulary: int = 40) -> Window:
    generator = torch.Generator().manual_seed(seed)
    return Window(*torch.randint(3, vocabulary, (prompt + answer,), generator=generator).split([prompt, answer]))


def agree(model: Any, texts: list[Window], specs: Sequence[kvpolicy.Policy | str]) -> tuple[Tensor, Tensor]:
    """Compare both measures with the reference, and return them."""
    slow = [measured(model, text.prompt, text.answer, specs) for text in texts]
    errors, kls, together = (measure(model, texts, specs) for measure in (output_errors, layer_kls, joint_kls))
    for got, want in zip((errors, kls, together), zip(*slow, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack([*want]), atol=1e-4, rtol=1e-4, equal_nan=True)
    return errors, kls


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("specs", [SELECTORS, CODED])
def test_measures_are_those_of_the_reference(make: Callable[[], Any], specs: list[str]) -> None:
    model = make()
    errors, kls = agree(model, [window(45, 4)], specs)
    assert errors.shape == kls.shape == (1, 2 if make is llama else 1, len(specs))
    assert not bool(errors.isnan().any()) and not bool(kls.isnan().any())
    whole = [spec in ("streaming:sinks=8@0.1", "uniform/adakv+h2o@0.05") for spec in specs]  # of so short a prompt
    loses = (errors > 1e-6).all(1).all(0)[1:]
    assert bool((loses | torch.tensor(whole[1:])).all()), "every candidate but the first loses something"


def test_each_gate_scores_the_prompt_itself(tmp_path: Path) -> None:
    """Selectors with equal needs, whose files differ."""
    specs = []
    for number in range(2):
        file = tmp_path / f"{number}.safetensors"
        weights = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(number))
        GATE_FILES.save(file, GateFile({layer: LayerGate(weights[layer], torch.zeros(2)) for layer in range(2)}))
        specs.append(f"kvzap:file={file}:window=3@0.3")
    errors, _ = agree(llama(), [window(45, 4)], specs)
    assert bool((errors[..., 0] != errors[..., 1]).all())


class ByInput:
    """A scorer of kvpress that reads the input of the attention module and the tables of its rotary embedding."""

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> Tensor:
        """See `kvpolicy.hf.adapters.Scorer`."""
        cos, _ = kwargs["position_embeddings"]
        assert hidden_states.shape[:2] == cos.shape[:2] == (1, keys.shape[2])
        own = hidden_states.norm(dim=-1) + (keys * cos[:, None]).sum((1, 3))
        return own[:, None] + values.norm(dim=-1)


def test_scorers_of_other_libraries() -> None:
    scorer = KVPressScorer(ByInput())
    agree(llama(), [window(30, 3)], [kvpolicy.Policy(selector=scorer, budget=budget) for budget in (0.2, 0.5)])


def test_calibrated_codecs() -> None:
    model, _ = kvpolicy.tiny()
    agree(model, [window(24, 2, vocabulary=700)], ["kvquant:bits=3", "snapkv:window=4+csr@0.9"])


@pytest.mark.parametrize(("prompt", "answer"), [(1, 1), (1, 3), (20, 1)])
def test_short_texts(prompt: int, answer: int) -> None:
    specs = ["snapkv:window=4@0.5", "h2o@0.5", "kvzip@0.5", "kivi:bits=2:group_size=8", "rotate:group_size=8"]
    errors, _ = agree(llama(), [window(prompt, answer)], specs)
    if prompt == 1:  # a prompt of one token is kept whole
        assert bool((errors < 1e-6).all())


def test_several_windows_are_measured_by_themselves() -> None:
    model = llama()
    texts = [window(30, 3, 1), window(520, 5, 2)]  # the second is too long to be kept whole
    specs = ["h2o@0.2", "streaming:sinks=3@0.005"]
    for measure in (output_errors, layer_kls):
        together = measure(model, texts, specs)
        assert together.isnan().tolist() == [[[False, False]] * 2, [[False, True]] * 2]
        alone = torch.cat([measure(model, [text], specs) for text in texts])
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-4, equal_nan=True)


def test_candidates_are_measured_by_themselves() -> None:
    """What is seen of a prompt is shared by candidates, none of which may change it."""
    model = llama()
    text = [window(40, 3)]
    specs = [spec for spec in SELECTORS[1::2] + CODED[::2] if "@0.1" not in spec]
    together = output_errors(model, text, specs + specs[::-1])
    alone = torch.cat([output_errors(model, text, [spec]) for spec in specs], -1)
    assert torch.equal(together.nan_to_num(9), torch.cat([alone, alone.flip(-1)], -1).nan_to_num(9))


@pytest.mark.parametrize("make", [llama, gemma])
def test_all_of_a_prompt_is_no_error(make: Callable[[], Any]) -> None:
    # As many tokens as fit whole pages.
    model = make()
    text = [window(32, 5)]
    specs = ["full", "snapkv@1.0", "uniform/adakv+h2o@1.0"]
    assert bool((output_errors(model, text, specs).abs() < 1e-6).all())
    assert bool((layer_kls(model, text, specs).abs() < 1e-6).all())


def test_the_model_is_as_it_was() -> None:
    model = llama().train()
    text = [window(20, 3)]
    model.model.layers[1].eval()  # as a frozen part may be
    config = model.config
    training = [module.training for module in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    output_errors(model, text, ["h2o+rotate@0.5", "kvzip@0.5"])
    layer_kls(model, text, ["h2o+rotate@0.5", "kvzip@0.5"])
    sensitivities(model, text)
    with pytest.raises(KVPolicyError):
        output_errors(model, text, ["pyramid+h2o@0.5"])
    assert model.config is config and config._attn_implementation == "sdpa"
    assert [module.training for module in model.modules()] == training
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    with kvpolicy.attach(model, "h2o@0.5"), pytest.raises(KVPolicyError, match="already attached"):
        sensitivities(model, text)


def test_sensitivities_are_those_of_noise_in_one_layer() -> None:
    """For small noise the divergence is quadratic in it; noise of another seed, window or layer is other noise."""
    model = llama()
    texts = [window(30, 9, 1), window(20, 9, 2), window(20, 9, 2)]
    found = sensitivities(model, texts, size=0.01)
    assert found.shape == (3, 2) and bool((found > 0).all())
    torch.testing.assert_close(found, sensitivities(model, texts, size=0.02), rtol=0.1, atol=0)
    assert torch.equal(found, sensitivities(model, texts, size=0.01))
    assert not torch.equal(found[1], found[2])
    assert not torch.equal(found, sensitivities(model, texts, size=0.01, seed=1))
    draws = [sensitivities(model, texts, size=0.01, draws=draws) for draws in (1, 2, 4)]
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(draws[1], draws[2], rtol=2, atol=0)  # a mean and not a sum
    # A layer whose attention the model does not read is not sensitive.
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    assert sensitivities(model, texts)[:, 0].tolist() == [0, 0, 0]


def test_noise_has_the_size_that_was_asked_for() -> None:
    model = llama()
    text = window(20, 4)
    size = 0.3
    found: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    sensitivities(model, [text], size=size, draws=1)
    # Of each layer: the prompt, the answer as it is, and a row of the answer for noise in each layer.
    first = found[4]
    plain = found[2][0]
    noisy = first[0]
    other = first[1]
    torch.testing.assert_close(plain, other)
    error, norm = ((x.unflatten(-1, (4, 8))).norm(dim=-1) for x in (noisy - plain, plain))
    torch.testing.assert_close(error, size * norm)


def test_answers_are_scored_behind_their_first_token() -> None:
    assert scored_tokens(torch.tensor([5, 6, 7])).tolist() == [5, 6]
    assert scored_tokens(torch.tensor([5])).tolist() == [5]


def test_many_rows_are_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    text = [window(30, 3)]
    specs = ["h2o@0.3", "window@0.3", "tova@0.3"]
    whole = layer_kls(model, text, specs)
    for name, value in (("LOGITS", 2 * 40 * 2), ("ROWS", 2), ("LOGITS", 1)):  # two predictions of each row
        with monkeypatch.context() as patch:
            patch.setattr(f"kvpolicy.tuning.answers.{name}", value)
            torch.testing.assert_close(layer_kls(model, text, specs), whole, atol=1e-6, rtol=1e-4)


def test_progress_is_told_after_each_window() -> None:
    told: list[tuple[int, int]] = []
    sensitivities(llama(), [window(9, 2), window(8, 2)], progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("texts", "specs", "message"),
    [
        ([], ["h2o@0.5"], "got none"),
        ([Window(torch.arange(0), torch.arange(3))], ["h2o@0.5"], "got an empty part"),
        ([window(9, 2)], [], "at least one policy, got none"),
        ([window(9, 2)], ["squeeze+h2o@0.5"], "same budget"),
        ([window(9, 2)], ["h2o@8"], "must be a fraction of the prompt, got 8"),
        ([window(9, 2)], ["quest"], "without the reader"),
        ([window(9, 2)], ["csr:read_top_k=4"], "without read_top_k"),
        ([window(9, 2)], ["minicache"], "encode every layer by itself"),
        ([window(9, 2)], ["kvquant"], "calibrat"),
    ],
)
def test_what_cannot_be_measured_is_refused(texts: list[Window], specs: list[str], message: str) -> None:
    for measure in (output_errors, layer_kls):
        with pytest.raises(KVPolicyError, match=message):
            measure(llama(), texts, specs)


@pytest.mark.parametrize("size", [0, -1, math.inf, math.nan])
def test_noise_has_a_size(size: float) -> None:
    with pytest.raises(KVPolicyError, match="must be a number above 0"):
        sensitivities(llama(), [window(9, 2)], size=size)
