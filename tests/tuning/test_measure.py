"""Errors and divergences are those of a slow reference, which attends with what real caches hold; also in tiles."""

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
from kvpolicy.hf.embedded import config_of
from kvpolicy.hf.model_spec import describe
from kvpolicy.policy import Policy
from kvpolicy.selectors.gate_files import GATE_FILES, GateFile, LayerGate
from kvpolicy.statistics.windows import Past
from kvpolicy.tuning import rivals
from kvpolicy.tuning.answers import Answer, Changes, over
from kvpolicy.tuning.compression import LayerPrompt, prompt_of, whole
from kvpolicy.tuning.evidence import Score
from kvpolicy.tuning.measure import joint_kls, layer_kls, output_errors, sensitivities
from kvpolicy.tuning.peak import tuning_peak
from kvpolicy.tuning.proof import prove
from kvpolicy.tuning.rivals import estimate_rivals
from kvpolicy.tuning.tap import LayerCall, tapped
from kvpolicy.tuning.tune import tune
from kvpolicy.tuning.windows import Window
from tests.engine.live import Alive
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
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(KVPolicyError, match="must be a number above 0"):
            sensitivities(model, texts[:1], size=wrong)
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


def test_many_rows_are_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    text = [window(30, 3)]
    specs = ["h2o@0.3", "window@0.3", "tova@0.3"]
    whole = layer_kls(model, text, specs)
    for name, value in (("LOGITS", 2 * 40 * 2), ("ROWS", 2), ("LOGITS", 1)):  # two predictions of each row
        with monkeypatch.context() as patch:
            patch.setattr(f"kvpolicy.tuning.answers.{name}", value)
            torch.testing.assert_close(layer_kls(model, text, specs), whole, atol=1e-6, rtol=1e-4)


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


def test_rows_that_change_several_layers_are_as_alone() -> None:
    text = window(40, 6)
    prompts: list[LayerPrompt] = []
    with tapped(llama(num_hidden_layers=3)) as tap:
        cache = tap.run(text.prompt, 40, lambda call: prompts.append(prompt_of(call, 40)))
        full = {prompt.layer_idx: whole(prompt.keys, prompt.values) for prompt in prompts}
        few = {layer: over(Past(*(t[:, :, ::3] for t in past[:3]))) for layer, past in full.items()}  # pyright: ignore[reportOptionalSubscript]
        answer = Answer(tap.model, cache, full, text.answer)
        rows: dict[str, Changes] = {
            "last": {2: few[2]},
            "ends": {0: few[0], 2: few[2]},
            "first": {0: few[0]},
            "none": {},
            "all": few,
        }
        together = dict(answer.kls(rows.items()))
        alone = {name: kl for pair in rows.items() for name, kl in answer.kls([pair])}
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-9)
    assert together["none"] < 1e-9 and min(together[name] for name in ("last", "ends", "first")) > 1e-4


def test_the_largest_activations_of_a_prompt_are_those_without_its_answer() -> None:
    text = window(12, 40)
    seen: list[list[LayerCall]] = [[], []]
    with tapped(llama()) as tap:
        tap.run(torch.cat([text.prompt, text.answer]), 12, seen[0].append, pins=(1, 3))
        tap.run(text.prompt, 12, seen[1].append, pins=(1, 3))
    for call, alone in zip(*seen, strict=True):
        assert all(torch.equal(call.massive[count], alone.massive[count]) for count in (1, 3))
        assert call.massive[1].shape == (1, 12) and bool(call.massive[1].any())


MODEL = llama(num_hidden_layers=3)
WINDOWS = [window(40, 6, seed) for seed in range(2)]
SPECS = ["snapkv:window=4@0.3", "uniform/adakv+h2o+tokenwise@0.5", "kvzip:chunk=16@0.4", "keydiff+merge@0.4", "rotate"]


@pytest.mark.parametrize("measure", [output_errors, layer_kls, joint_kls])
def test_measures_in_tiles(measure: Any) -> None:
    whole = measure(MODEL, WINDOWS, SPECS)
    torch.testing.assert_close(measure(MODEL, WINDOWS, SPECS, tile=7), whole, rtol=1e-3, atol=1e-7)


def test_sensitivities_in_tiles() -> None:
    whole = sensitivities(MODEL, WINDOWS)
    torch.testing.assert_close(sensitivities(MODEL, WINDOWS, tile=7), whole, rtol=1e-3, atol=1e-7)


def test_a_file_and_its_evidence(tmp_path: Path) -> None:
    found = [tune(MODEL, WINDOWS, tmp_path / f"{tile}.json", candidates=SPECS, tile=tile) for tile in (None, 16)]
    torch.testing.assert_close(
        torch.tensor(found[0].distortion), torch.tensor(found[1].distortion), rtol=2e-3, atol=1e-6
    )
    others = [window(40, 6, seed) for seed in (5, 6)]
    evidence = [
        prove(MODEL, tmp_path / "16.json", 0.5, WINDOWS, others, specs=["window", "squeeze+h2o"], tile=tile)
        for tile in (None, 16)
    ]
    assert evidence[0]["rival"] == evidence[1]["rival"]
    assert evidence[0]["tuned"] == pytest.approx(evidence[1]["tuned"], rel=1e-3)


def test_prompts_of_all_layers_are_stored_on_the_host() -> None:
    """On another device they would not stay: what a layer is compressed from has been moved back."""
    with tapped(MODEL) as tap:
        assert tap.store is None
    with tapped(MODEL, 8) as tap:
        assert tap.store == torch.device("cpu")


def test_seconds_of_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of windows, and of two that are held out, of which a score takes a second."""

    def one_second(*args: Any, **kwargs: Any) -> Score:
        none = torch.zeros(1)
        return Score(none, none, none, 0.0, seconds=1.0)

    assert estimate_rivals(MODEL, WINDOWS, 2, ["streaming:sinks=64"]) == 0, "it cannot run"
    monkeypatch.setattr(rivals, "score", one_second)
    monkeypatch.setattr(rivals, "reference_logits", lambda *args: [])
    three = [window(40, 6, seed) for seed in range(3)]
    assert estimate_rivals(MODEL, three, 2, ["window"]) == pytest.approx(3 + 2 * 2, abs=0.1)
    assert estimate_rivals(MODEL, three, 2, ["window", "kvzip"] * 20) == pytest.approx(40 * 3 + 2 * 2, abs=0.1)
    many = three * 4  # a quarter of them first, then the best policies on all
    assert estimate_rivals(MODEL, many, 2, ["window"] * 40) == pytest.approx(40 * 4 + 8 * 12 + 2 * 2, abs=0.1)


LEAST = 0.4
"""The smallest part of a planned peak that is in use: answers and forwards are not at their largest in every window."""


@pytest.mark.parametrize("policy", ["snapkv@0.3", "h2o+tokenwise@0.5", "kvzip@0.4"])
def test_the_peak_is_planned(policy: str) -> None:
    model = llama(num_hidden_layers=6)
    text = Window(torch.arange(600) % 30 + 1, torch.arange(8) + 3)
    with Alive(model) as watch:
        joint_kls(model, [text], [policy])
    planned = tuning_peak(describe(model.config, torch.float32), 0, [Policy.parse(policy)], 600, 8)
    assert LEAST * planned <= watch.peak <= planned


def test_tiles_need_the_memory_of_one_layer() -> None:
    shape = describe(config_of("llama-3.1-8b"), torch.bfloat16)
    policies = [Policy.parse("snapkv@0.1"), Policy.parse("snapkv+tokenwise:bits=4@0.2")]
    weights = 15 * 2**30
    assert tuning_peak(shape, weights, policies, 127_000, 64, 4096) < 24 * 2**30 < 100 * 2**30
    assert tuning_peak(shape, weights, policies, 127_000, 64) > 90 * 2**30
    # A prompt that waits for its replay is held in all layers.
    assert tuning_peak(shape, weights, [*policies, Policy.parse("kvzip@0.1")], 127_000, 64, 4096) > 30 * 2**30
