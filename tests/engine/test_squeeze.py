"""SqueezeAttention online and with a profile: what is measured, and what follows from it."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import kvpolicy
from kvpolicy import PolicyCache
from kvpolicy.calibration.layer_profile import profile
from kvpolicy.engine.attention import attend
from kvpolicy.engine.hidden_stats import massive_tokens, sum_cosines
from kvpolicy.engine.layer_attention import layer_attention
from kvpolicy.engine.prefill import PendingPrompt
from kvpolicy.protocols import SINGLE_RANK, AttentionNeeds
from kvpolicy.statistics.attention_sum import AttentionSum
from kvpolicy.statistics.newest_queries import NewestQueries
from kvpolicy.statistics.recent_queries import RecentQueries
from kvpolicy.statistics.statistic import Coming, Tile
from kvpolicy.statistics.windows import ScoreTransform
from tests.conformance.access import kept_positions
from tests.conformance.models import FAMILIES, UNNAMED, build
from tests.conformance.play import forward, make_batch, talk
from tests.conformance.policies import SELECTORS, words
from tests.engine.filled import prompted
from tests.engine.parts import generator
from tests.sampling import product

LENGTHS = [40, 26, 13]
BEHIND = {
    "gemma2": "post_attention_layernorm",
    "gemma3": "post_attention_layernorm",
    "gemma3_pictures": "post_attention_layernorm",
    "gemma4": "post_attention_layernorm",
    "gemma4_shared": "post_attention_layernorm",
    "afmoe": "post_attention_layernorm",
    "exaone4": "post_attention_layernorm",
    "hyperclovax": "post_norm1",
    "olmo2": "post_attention_layernorm",
    "glm4": "post_self_attn_layernorm",
}
"""Norms between attention and the residual stream."""

SCALES = {"granite": 0.3, "falcon_h1": 0.5, "minicpm3": 1.4 / 3**0.5}
"""Factors of attention's output where it is added."""


def follow(model: nn.Module, family: str) -> dict[int, Tensor]:
    """Cosines of the residual stream before and after every attention, from hooks that know the blocks by heart."""
    cosines: dict[int, Tensor] = {}
    held: dict[int, Tensor] = {}

    def before(index: int, args: Any, kwargs: Any) -> None:
        held[index] = (args[0] if args else kwargs["hidden_states"]).double()

    def after(index: int, out: Any) -> None:
        update = (out[0] if isinstance(out, tuple) else out).double() * SCALES.get(family, 1.0)
        cosines[index] = F.cosine_similarity(held[index], held[index] + update, dim=-1)

    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and type(module).__name__.endswith("Attention"):
            block = model.get_submodule(name.rpartition(".")[0])
            behind = block.get_submodule(BEHIND[family]) if family in BEHIND else module
            block.register_forward_pre_hook(lambda _, *given, at=index: before(at, *given), with_kwargs=True)
            behind.register_forward_hook(lambda _, args, out, at=index: after(at, out))
    return cosines


@pytest.mark.parametrize("family", [name for name in (*FAMILIES, *UNNAMED) if name != "gemma3n"])
def test_cosine_of_the_residual_stream(family: str) -> None:
    """Before the norms and after the add, fp32, mean over the row's own tokens; in parallel blocks, too.

    Gemma 3n has several streams: see `test_hidden_states_of_several_streams`.
    """
    ids, mask = make_batch(LENGTHS, [40])
    stock = copy.deepcopy(build(family))
    cosines = follow(stock, family)
    talk(stock, ids, mask, [40], None)
    cache = talked(build(family), "squeeze+window@0.5", LENGTHS, [40])
    for place, layer in enumerate(cache.policy_layers):
        cosine = cosines[layer.layer_idx]
        want = torch.stack([row[flags].mean() for row, flags in zip(cosine, mask.bool(), strict=True)])
        assert torch.allclose(cache.cosines()[:, place].double(), want, atol=1e-5)


def silence(block: Any) -> None:
    """Let a block of BERT's kind add its attention to the residual stream and nothing else."""
    for part in (block.attention.output, block.output):
        if part.forward.__func__.__code__.co_names.count("LayerNorm"):  # the others have it before attention
            part.LayerNorm = nn.Identity()
    nn.init.zeros_(block.output.dense.weight)
    nn.init.zeros_(block.output.dense.bias)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "RobertaPreLayerNorm", "XLMRobertaXL", "RoCBert"])
def test_the_projection_may_stand_around_the_attention(kind: str) -> None:
    """As in BERT and its kin: the metric is that of blocks whose feed-forward part is silenced."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
    config: Any = getattr(transformers, f"{kind}Config")(num_hidden_layers=3, is_decoder=True, **sizes)
    model = getattr(transformers, "BertLMHeadModel" if kind == "Bert" else f"{kind}ForCausalLM")(config).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
    ids = torch.randint(3, 48, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), kvpolicy.attach(model, "squeeze+window@0.5") as handle:
        model(ids)
    assert handle.cache is not None
    for place in range(3):
        silenced = copy.deepcopy(model)
        (block,) = (module for name, module in silenced.named_modules() if name.endswith(f"encoder.layer.{place}"))
        silence(block)
        seen: list[Tensor] = []
        block.register_forward_hook(
            lambda _, args, out, seen=seen: seen.extend((args[0], out[0] if isinstance(out, tuple) else out))
        )
        with torch.no_grad():
            silenced(ids, use_cache=False)
        want = F.cosine_similarity(seen[0], seen[1], dim=-1).mean()
        assert abs(handle.cache.cosines()[0, place] - want) < 1e-5


def test_hidden_states_of_several_streams() -> None:
    """Gemma-3n's attention reads and changes one of them."""
    model = copy.deepcopy(build("gemma3n"))
    found: dict[int, list[Tensor]] = {index: [] for index in range(len(model.model.layers))}
    for index, block in enumerate(model.model.layers):
        for norm in (block.input_layernorm, block.pre_feedforward_layernorm):
            norm.register_forward_pre_hook(lambda _, args, at=index: found[at].append(args[0]))
    ids = torch.randint(3, 48, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), kvpolicy.attach(model, "squeeze+window@0.5") as handle:
        model(ids)
    assert handle.cache is not None
    want = [F.cosine_similarity(*found[index], dim=-1).mean(-1) for index in (1, 3)]
    assert torch.allclose(handle.cache.cosines(), torch.stack(want, 1), atol=1e-5)


def test_norms_that_transformers_knows() -> None:
    """A norm between attention and the residual add is one that `attention_output` or `next_norm` finds."""
    blocks = re.compile(r"^class (\w*Layer)\(.*\n((?:(?!class |def |@).*\n)*)", re.MULTILINE)
    found = dict[str, set[str]]()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for name, body in blocks.findall(path.read_text(encoding="utf-8")):
            behind = re.search(r"\.self_attn\(([^+]*?)residual \+", body)
            norms = re.findall(r"hidden_states = self\.(\w*norm\w*)\(hidden_states\)", behind[1] if behind else "")
            for norm in norms:
                found.setdefault(norm, set()).add(name)
    assert found.pop("input_layernorm") == {"Molmo2DecoderLayer", "ChameleonSwinDecoderLayer"}
    names = {"post_attention_layernorm", "post_self_attn_layernorm", "post_norm1", "post_operator_norm"}
    assert found.keys() == names


def deep() -> Any:
    """Eight layers whose attention matters more or less."""
    torch.manual_seed(3)
    model = copy.deepcopy(build("llama", layers=8))
    for layer, gain in zip(model.model.layers, [40.0, 1, 20, 1, 0.5, 30, 1, 10], strict=True):
        nn.init.normal_(layer.self_attn.o_proj.weight, std=0.02 * gain)
    return model


def talked(model: Any, policy: str, lengths: list[int], turns: list[int]) -> PolicyCache:
    """A cache after a conversation."""
    with kvpolicy.attach(model, policy):
        cache = PolicyCache(model)
        talk(model, *make_batch(lengths, turns), turns, cache)
    return cache


@product("selector", SELECTORS, sample=[(name,) for name in ("window", "snapkv", "kvzip", "h2o")])
def test_a_profile_gives_the_same_as_measuring(selector: str, tmp_path: Path) -> None:
    model = deep()
    path = tmp_path / "profile.json"
    ids, mask = make_batch([40], [40, 1, 1, 6, 1])
    recorded = profile(model, [ids[:, :40]], path)
    with kvpolicy.attach(model, words("squeeze", selector)):
        online = PolicyCache(model)
        want = talk(model, ids, mask, [40, 1, 1, 6, 1], online)
    assert recorded == pytest.approx(online.cosines()[0].tolist(), abs=1e-6)
    with kvpolicy.attach(model, words("squeeze", selector).replace("squeeze", f"squeeze:profile={path}")):
        stored = PolicyCache(model)
        got = talk(model, ids, mask, [40, 1, 1, 6, 1], stored)
    assert torch.allclose(got, want, atol=1e-5)
    assert [kept_positions(a) for a in stored.policy_layers] == [kept_positions(b) for b in online.policy_layers]


def test_a_profile_of_another_model(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile(build("llama"), [make_batch([20], [20])[0]], path)
    model = deep()
    refused = pytest.raises(ValueError, match="must be of a model with 8 layers, got 3")
    with refused, kvpolicy.attach(model, f"squeeze:profile={path}+window@0.5"):
        talk(model, *make_batch([20], [20]), [20], PolicyCache(model))


def test_measured_once_per_conversation() -> None:
    """Budgets of a continuation follow the prompt's measures; a chunked prompt is measured in its first chunk."""
    model = deep()
    ids, mask = make_batch(LENGTHS, [40, 1, 9])
    with kvpolicy.attach(model, "squeeze+h2o@0.5"):
        cache = prompted(model, ids, mask, 40)
        cosines = cache.cosines().clone()
        forward(model, ids, mask, 40, 41, cache)
        forward(model, ids, mask, 41, 50, cache)
    assert torch.equal(cache.cosines(), cosines)
    totals = torch.stack([layer.budget for layer in cache.policy_layers]).sum(0)
    assert totals.tolist() == [8 * ((length + 10) // 2) for length in LENGTHS]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_rows_that_begin_in_a_later_chunk_are_measured_then(family: str) -> None:
    """One row has padding alone in the first chunk, so that measured and held cosines meet in the second."""
    model = build(family)
    turns = [12, 14, 1, 1]
    ids, mask = make_batch([12, 12], turns)
    mask[1, :12] = 0
    with kvpolicy.attach(model, "squeeze+window@0.5"):
        cache = PolicyCache(model, new=4)
        talk(model, ids, mask, turns, cache)
        assert cache.plan is not None and cache.plan.measured
        managed = {layer.layer_idx for layer in cache.policy_layers}
        assert 0 not in managed, "the first layer of these models is a sliding window"


def slow_massive(hidden: Tensor, valid: Tensor | None, count: int) -> list[list[bool]]:
    """Tokens of the largest numbers, one row after the other; of equal numbers, those of earlier tokens."""
    found: list[list[bool]] = []
    for b, row in enumerate(hidden.tolist()):
        numbers = [(-abs(x), t) for t, token in enumerate(row) if valid is None or bool(valid[b, t]) for x in token]
        best = {t for _, t in sorted(numbers)[:count]}
        found.append([t in best for t in range(len(row))])
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 500])
@pytest.mark.parametrize("padding", ["none", "left", "between"])
@pytest.mark.parametrize("length", [7, 40])
def test_massive_tokens(count: int, padding: str, length: int) -> None:
    """Of numbers of any size, and of a prompt that has every token several times, as what a first layer is given."""
    hidden = torch.randn(3, length, 4, generator=generator(count))
    hidden[1, 2] *= 100
    hidden[2] = hidden[2, torch.randint(3, (length,), generator=generator(length))]
    valid = None
    if padding != "none":
        valid = torch.arange(length) >= torch.tensor([[0], [0], [3]])
        valid[1, 2] = padding == "left"
    got = massive_tokens(hidden, valid, count)
    if valid is not None:
        got &= valid  # padding is found in a row with too few numbers
    assert got.tolist() == slow_massive(hidden, valid, count)


def slow_cosine(before: Tensor, update: Tensor, valid: Tensor | None) -> list[float]:
    """The mean over tokens of one cosine each."""
    means: list[float] = []
    for b in range(len(before)):
        cosines: list[float] = []
        for t in range(before.shape[1]):
            if valid is not None and not bool(valid[b, t]):
                continue
            x = before[b, t].double().tolist()
            y = (before[b, t].double() + update[b, t].double()).tolist()
            sizes = math.dist(x, [0] * len(x)) * math.dist(y, [0] * len(y))
            cosines.append(sum(a * c for a, c in zip(x, y, strict=True)) / sizes if sizes else 0.0)
        means.append(sum(cosines) / len(cosines) if cosines else 0.0)
    return means


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mean_cosine(dtype: torch.dtype, padded: bool) -> None:
    before, update = (torch.randn(4, 5, 6, generator=generator(seed)).to(dtype) for seed in (1, 2))
    update[0] = -before[0]  # nothing is left, which is like nothing
    update[1] = -2 * before[1]
    every = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    valid = every if padded else None
    got = sum_cosines(before.clone().requires_grad_(), update, valid).mean
    assert got.dtype == torch.float32 and not got.requires_grad
    assert got.tolist() == pytest.approx(slow_cosine(before, update, valid), abs=1e-5)


TRANSFORMS = {
    "plain": ScoreTransform(0.4),
    "softcap": ScoreTransform(0.4, softcap=2.0),
    "sinks": ScoreTransform(0.4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}

EVERY = AttentionNeeds(("mean", "variance", "entropy", "total", "value_size"), 5)


def pending_of(transform: ScoreTransform, valid: Tensor | None, tokens: int = 19) -> tuple[Tensor, PendingPrompt]:
    """Queries of four heads, and the prompt of three rows with two KV heads."""
    dice = generator(0)
    q, k, v = (torch.randn(3, heads, tokens, 8, generator=dice) for heads in (4, 2, 2))
    coming = Coming(valid, tokens, torch.zeros(3, dtype=torch.int64), None)
    recent = RecentQueries(9).begun(coming).added(Tile(q, k, 0, valid, True))
    summed = AttentionSum(attend(q, k, v, transform, None, valid, True)[1])
    return q, PendingPrompt(k, v, valid, transform, (summed, recent, NewestQueries(2)))


def matrix(q: Tensor, k: Tensor, transform: ScoreTransform, row: int, head: int, own: list[int]) -> Tensor:
    """Attention of all queries of a head of a row to all of its tokens, fp64 [n, n]."""
    scores = (q[row, head, own].double() @ k[row, head // 2, own].double().T) * transform.scale
    if transform.softcap is not None:
        scores = torch.tanh(scores / transform.softcap) * transform.softcap
    weights = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).exp()
    sink = 0.0 if transform.sinks is None else transform.sinks[head].double().exp()
    return weights / (weights.sum(-1, keepdim=True) + sink)


@product("name,padding", [*TRANSFORMS], ["none", "left", "between", "all but one"])
def test_as_whole_matrices(name: str, padding: str) -> None:
    """With more queries than are asked for."""
    transform = TRANSFORMS[name]
    valid = None if padding == "none" else torch.ones(3, 19, dtype=torch.bool)
    if valid is not None:
        valid[1] = torch.arange(19) >= {"left": 7, "between": 0, "all but one": 18}[padding]
        if padding == "between":
            valid[1, [0, 4, 5, 17]] = False
    q, pending = pending_of(transform, valid)
    seen = layer_attention(pending, EVERY, SINGLE_RANK)
    for row in range(3):
        own = list(range(19)) if valid is None else valid[row].nonzero()[:, 0].tolist()
        n = len(own)
        assert seen.positions[row].tolist() == [*range(n), *[-1] * (19 - n)]
        assert int(seen.length[row]) == n and int(seen.queries[row]) == min(5, n)
        for head in range(4):
            weights = matrix(q, pending.keys, transform, row, head, own)
            newest = weights[-5:]
            spread = newest.var(0) if n > 1 else torch.zeros(1)
            entropy = -(newest * (newest + 1e-10).log()).sum(0)
            for got, want in (
                (seen.mean, newest.mean(0)),
                (seen.variance, spread),
                (seen.entropy, entropy),
                (seen.total, weights.sum(0)),
            ):
                assert got is not None
                torch.testing.assert_close(got[row, head, :n].double(), want.double(), rtol=1e-4, atol=1e-6)
                assert not got[row, head, n:].any()
            assert seen.value_size is not None
            size = pending.values[row, head // 2, own].abs().sum(-1).max()
            torch.testing.assert_close(seen.value_size[row, head // 2], size)
