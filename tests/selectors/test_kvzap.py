"""KVzap: gates of the definition, for the inputs that the model's own layers take, in prompts, tiles, chunks, steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy.selectors.gate_files import GATE_FILES

pytest.importorskip("transformers")

import kvpolicy
from kvpolicy import KVCrush, KVzap, Policy, PolicyCache
from kvpolicy.engine.layer_store import LayerStore
from kvpolicy.planning.memory import layer_spec
from kvpolicy.protocols import ChecksModel, ModelInfo, View
from kvpolicy.selectors.gate_files import GateFile, Inner, LayerGate
from kvpolicy.statistics import InputScores, NewScores, Results
from tests.conformance.bench import Bench, draw
from tests.conformance.calibration import gates
from tests.conformance.models import build
from tests.conformance.play import forward, make_batch

Write = Callable[[GateFile], str]
WINDOW = 3


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a gate file; its path."""

    def write(content: GateFile) -> str:
        path = tmp_path / "gate.safetensors"
        GATE_FILES.save(path, content)
        return str(path)

    return write


def slow_scores(gate: LayerGate, inputs: list[list[float]]) -> list[list[float]]:
    """The score of each token [n][hidden] by each head, in Python numbers."""

    def affine(weight: Tensor, bias: Tensor, vector: list[float]) -> list[float]:
        pairs = zip(weight.double().tolist(), bias.double().tolist(), strict=True)
        return [sum(w * x for w, x in zip(row, vector, strict=True)) + b for row, b in pairs]

    found = []
    for vector in inputs:
        units = vector
        if isinstance(gate.inner, Inner):
            units = [x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in affine(*gate.inner, vector)]
        found.append(affine(gate.weight, gate.bias, units))
    return found


@pytest.mark.parametrize("layer", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_is_that_of_the_definition(layer: int, dtype: torch.dtype) -> None:
    gate = gates(heads=2).gates[layer]
    inputs = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = gate.score(inputs)
    assert got.dtype == torch.float32 and got.shape == (2, 2, 7)
    for row in range(2):
        want = torch.tensor(slow_scores(gate, inputs[row].double().tolist())).T
        torch.testing.assert_close(got[row], want, atol=1e-4, rtol=1e-4)


def test_equal_inputs_have_equal_scores_in_any_company() -> None:
    gate = gates(heads=3, hidden=96).gates[0]
    inputs = torch.randn(1, 1, 96).expand(1, 70, -1)
    scores = torch.cat([gate.score(inputs[:, :count]) for count in (1, 2, 7, 31, 70)], 2)
    assert bool((scores == scores[..., :1]).all())


def inputs_of(model: Any, ids: Tensor) -> dict[int, Tensor]:
    """What the attention of each layer is given for a row of tokens [n], by a stock forward: [n, hidden] fp64."""
    found: dict[int, Tensor] = {}
    handles = []
    for index, block in enumerate(model.model.layers):

        def keep(_: Any, args: Any, kwargs: dict[str, Any], index: int = index) -> None:
            found[index] = (args[0] if args else kwargs["hidden_states"])[0].double()

        handles.append(block.self_attn.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model(ids[None])
    for handle in handles:
        handle.remove()
    return found


def kept_by_hand(scores: list[float], size: int, budget: int) -> list[int]:
    """What one head keeps of `size` tokens: the window, and the tokens of highest score; ties to the earlier one."""
    window = max(min(WINDOW, budget // 2), 1)
    others = sorted(range(size - window), key=lambda j: (-scores[j], j))[: budget - window]
    return sorted([*others, *range(size - window, size)])


class Play:
    """A batch of prompts and its steps, of which every kept position is compared with the gate's arithmetic.

    The first layer alone takes the same inputs with and without a policy once tokens are evicted.
    """

    def __init__(self, model: Any, path: str, lengths: list[int], steps: int) -> None:
        self.model = model
        self.lengths = lengths
        self.prompt = max(lengths)
        self.steps = steps
        self.ids, self.mask = make_batch(lengths, [self.prompt, *[1] * steps])
        self.gates = GATE_FILES.load(path).gates
        rows = [self.ids[b][self.mask[b].bool()] for b in range(len(lengths))]
        self.scores = [
            {
                layer: [[s[h] for s in slow_scores(self.gates[layer], inputs.tolist())] for h in range(self.heads)]
                for layer, inputs in inputs_of(model, row).items()
            }
            for row in rows
        ]

    @property
    def heads(self) -> int:
        return int(self.model.config.num_key_value_heads)

    def compare(self, cache: PolicyCache, step: int, layers: int) -> None:
        """Compare what the first layers hold after so many steps."""
        for layer in cache.policy_layers[:layers]:
            for row, length in enumerate(self.lengths):
                budget = int(layer.budget[row])
                for head in range(self.heads):
                    scores = self.scores[row][layer.layer_idx][head]
                    want = kept_by_hand(scores, length, budget)
                    for size in range(length + 1, length + step + 1):  # one token leaves for each that comes
                        window = max(min(WINDOW, budget // 2), 1)
                        old = [j for j in want if j < size - window]
                        if len(want) == budget:
                            want.remove(min(old, key=lambda j: (scores[j], -j)))
                        want.append(size - 1)
                    held = layer.head_positions[row, head]
                    assert sorted(held[held >= 0].tolist()) == want, (layer.layer_idx, row, head, step)


@pytest.mark.parametrize(("tile", "chunks", "cut"), [(None, "select", 0), (7, "hold", 11)])
def test_prompts_and_steps_keep_what_the_gate_says(tile: int | None, chunks: Any, cut: int, write: Write) -> None:
    """A padded batch, in one piece or in tiles, and in one forward or in a chunk that waits for the next."""
    model = build("llama", layers=2)
    path = write(gates(heads=2))
    play = Play(model, path, [26, 17], 9)
    with kvpolicy.attach(model, f"kvzap:file={path}:window={WINDOW}@0.5", tile=tile, chunks=chunks):
        cache = PolicyCache(model, prompt=torch.tensor(play.lengths) if cut else None, new=9)
        if cut:
            forward(model, play.ids, play.mask, 0, cut, cache)
        forward(model, play.ids, play.mask, cut, play.prompt, cache)
        play.compare(cache, 0, 2)
        for step in range(play.steps):
            at = play.prompt + step
            forward(model, play.ids, play.mask, at, at + 1, cache)
            play.compare(cache, step + 1, 1)


def test_a_compiled_step_scores_its_token(write: Write) -> None:
    model = build("llama", layers=2)
    path = write(gates(heads=2))
    play = Play(model, path, [26], 6)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with kvpolicy.attach(model, f"kvzap:file={path}:window={WINDOW}@0.5"), torch.no_grad():
        cache = PolicyCache(model, new=7)
        forward(model, play.ids, play.mask, 0, play.prompt, cache)
        for step in range(play.steps):
            at = play.prompt + step
            compiled(play.ids[:, at : at + 1], position_ids=torch.tensor([[at]]), cache=cache, use_cache=True)
            cache.tick()
            play.compare(cache, step + 1, 1)
    torch.compiler.reset()


def test_the_window_is_at_most_half_the_budget(write: Write) -> None:
    content = GateFile({0: LayerGate(torch.zeros(1, 32), torch.zeros(1))})  # all tokens are equal
    path = write(content)
    for window, budget, kept in ((3, 7, [0, 1, 2, 3, 17, 18, 19]), (128, 5, [0, 1, 2, 18, 19]), (128, 1, [19])):
        bench = Bench(f"kvzap:file={path}:window={window}", [budget])
        bench.forward(*draw(20, 0))
        assert bench.turns[0].kept[0][0] == kept


@pytest.mark.parametrize("spec", ["kvcrush/kvzap:file={}", "chunk:size=4/kvzap:file={}", "uniform/adakv+kvzap:file={}"])
def test_wrappers_and_heads_with_budgets_of_their_own(spec: str, write: Write) -> None:
    """A score comes with its token, wherever the slots are and whatever wraps the selector."""
    model = build("llama", layers=2)
    path = write(gates(heads=2))
    play = Play(model, path, [40, 31], 20)
    with kvpolicy.attach(model, spec.format(path) + ":window=3@0.5"):
        cache = PolicyCache(model, new=20)
        forward(model, play.ids, play.mask, 0, play.prompt, cache)
        for step in range(play.steps):
            at = play.prompt + step
            forward(model, play.ids, play.mask, at, at + 1, cache)
        layer = cache.policy_layers[0]
        state: Any = layer.store.tensors.state
        score = state.score if "/kvzap" not in spec else state.base.score
        owner = layer.owner
        count = 0
        for row in range(2):
            for page in range(layer.positions.shape[1]):
                head = page if owner is None else int(owner[row, page])
                if head >= play.heads:
                    continue
                for slot, position in enumerate(layer.positions[row, page].tolist()):
                    if position >= 0:
                        want = play.scores[row][0][head][position]
                        assert float(score[row, page, slot]) == pytest.approx(want, rel=1e-3, abs=1e-4)
                        count += 1
        assert count > 60


def test_a_rank_has_the_gates_of_its_heads(write: Write) -> None:
    selector = KVzap(file=write(gates(heads=4)))
    inputs = torch.randn(2, 5, 32)
    whole = selector.score_inputs(selector.load_gate(3, "cpu"), inputs)
    parts = [selector.score_inputs(selector.load_gate(3, "cpu", own), inputs) for own in (slice(0, 3), slice(3, 4))]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_plans_count_the_bytes_of_the_scores_and_the_gates_apart() -> None:
    model, _ = kvpolicy.tiny()
    ids = torch.arange(3, 67)[None]
    with torch.no_grad(), kvpolicy.attach(model, "kvzap@0.5"):
        cache = PolicyCache(model)
        model(ids, cache=cache)
        assert cache.plan is not None and cache.nbytes == cache.plan.nbytes
        assert cache.resident_nbytes == cache.plan.resident_nbytes == 8 * (4 * 128 + 4) * 4
        held = [layer.held() for layer in cache.policy_layers]
    assert all(kinds["statistics"] == 4 * 4 * 32 for kinds in held)


def test_no_input_of_a_prompt_is_held(write: Write) -> None:
    """A prompt that waits holds a score for each token and head, and nothing of the size of its inputs."""
    model = build("llama", layers=2)
    path = write(gates(heads=2))
    ids, mask = make_batch([26, 17], [26])
    sizes = []
    for policy in (f"kvzap:file={path}@0.5", "window@0.5"):
        with kvpolicy.attach(model, policy, chunks="hold"):
            cache = PolicyCache(model, prompt=[50, 50], new=1)
            forward(model, ids, mask, 0, 26, cache)
            pending = cache.policy_layers[0].pending
            assert pending is not None and pending.forward is None
            sizes.append(pending.nbytes)
    assert sizes[0] - sizes[1] == 2 * 2 * 26 * 4


def test_it_is_refused_without_the_input_of_the_layer(write: Write) -> None:
    bench = Bench(f"kvzap:file={write(gates())}", [5])
    q, k, v = draw(9, 0)
    bench.forward(q, k, v)
    for call in (LayerStore.attend_prompt, LayerStore.append):
        with pytest.raises(kvpolicy.KVPolicyError, match="must be run with the input of its attention for the selec"):
            call(bench.layer, q[:, :, :1], k[:, :, :1], v[:, :, :1], None, bench.turns[0].kernel)


def test_inputs_are_scored_by_what_the_selector_hands_over() -> None:
    selector = KVzap()
    for outer in (selector, KVCrush(base=selector)):
        spec = layer_spec(Policy(selector=outer, budget=0.5), 0)
        assert spec.input_scorer is selector and spec.sees_steps and not spec.step_attention


def test_it_asks_for_a_file_of_the_model() -> None:
    info = ModelInfo(layers=8, heads=4, head_dim=32)
    for selector in (KVzap(), KVCrush(base=KVzap(file="tiny-4k"))):
        assert isinstance(selector, ChecksModel)
        selector.check(info)
        with pytest.raises(kvpolicy.KVPolicyError, match="made for another model"):
            selector.check(info._replace(heads=2))
    with pytest.raises(kvpolicy.KVPolicyError, match="must be a file or 'tiny', got an empty string"):
        KVzap(file="")
    with pytest.raises(kvpolicy.KVPolicyError, match="window"):
        KVzap(window=0)


def test_expected_attention_is_the_exponential_of_the_score() -> None:
    selector = KVzap()
    positions = torch.arange(3, dtype=torch.int32).expand(1, 2, -1)
    new = NewScores(torch.tensor([[[0.0, -1.0, 99.0]]]), positions >= 0)
    view = View(positions, torch.tensor([3]), torch.tensor([3]), 0)
    state = selector.observe(selector.alloc(1, 2, 3, "cpu"), Results({InputScores: new}), view)
    found = selector.attention(state)
    assert found.shape == (1, 2, 3) and bool(found.isfinite().all())
    assert found[0, 0, :2].tolist() == pytest.approx([1.0, math.exp(-1)])


def test_copies_of_a_cache_share_the_gates(write: Write) -> None:
    model = build("llama", layers=2)
    ids, mask = make_batch([26], [26])
    with kvpolicy.attach(model, f"kvzap:file={write(gates(heads=2))}@0.5"):
        cache = PolicyCache(model, new=4)
        forward(model, ids, mask, 0, 26, cache)
        one, other = (each.policy_layers[1].store for each in (cache, cache.fork()))
    assert one.contents.gate is other.contents.gate
    assert one.tensors.state.score is not other.tensors.state.score


def test_a_saved_cache_needs_the_same_gates(write: Write, tmp_path: Path) -> None:
    model = build("llama", layers=2)
    path = write(gates(heads=2))
    ids, mask = make_batch([26], [26, 1])
    with kvpolicy.attach(model, f"kvzap:file={path}@0.5"):
        cache = PolicyCache(model, new=4)
        forward(model, ids, mask, 0, 26, cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = PolicyCache.load(model, tmp_path / "cache.safetensors")
        outs = [forward(model, ids, mask, 26, 27, each) for each in (cache, loaded)]
        assert torch.equal(*outs)
        first, second = (each.policy_layers[0].store.tensors.state.score for each in (cache, loaded))
        assert torch.equal(first, second)
    others = {layer: gate._replace(bias=gate.bias + 1) for layer, gate in gates(heads=2).gates.items()}
    GATE_FILES.save(path, GateFile(others))
    with (
        kvpolicy.attach(model, f"kvzap:file={path}@0.5"),
        pytest.raises(kvpolicy.KVPolicyError, match="calibrat"),
    ):
        PolicyCache.load(model, tmp_path / "cache.safetensors")


def test_it_predicts_what_a_replay_finds() -> None:
    """In text of the embedded model's kind, tokens that the gate keeps get more of the replay than those it evicts."""
    model, tokenizer = kvpolicy.tiny()
    ids = tokenizer("tiger=4821\nfalcon=1937\nlion=2261\nwolf=7764\nwhat is lion? " * 4, return_tensors="pt").input_ids
    found: dict[str, list[Tensor]] = {}
    for spec in ("kvzap", "kvzip:plus=true"):
        with torch.no_grad(), kvpolicy.attach(model, f"{spec}@1.0"):
            cache = PolicyCache(model)
            model(ids, cache=cache)
        selector: Any = Policy.parse(spec + "@1.0").selector
        found[spec] = [selector.attention(layer.store.tensors.state)[0].log() for layer in cache.policy_layers]
    better = 0
    for mine, its in zip(found["kvzap"], found["kvzip:plus=true"], strict=True):
        for head in range(4):
            better += float(torch.corrcoef(torch.stack([mine[head], its[head]]))[0, 1]) > 0.3
    assert better >= 24
