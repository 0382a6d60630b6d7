"""Heads divided over ranks, and nothing else: every rank runs the whole model, and its cache sees its heads alone.

What a linear layer's rounding would add is so left out: N ranks must keep what one keeps, to the bit.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import kvpolicy
from kvpolicy import Policy, PolicyCache
from kvpolicy.allocators.head_files import HEAD_FILES, HeadFile
from kvpolicy.allocators.profile import save_profile
from kvpolicy.codecs._files import save
from kvpolicy.engine.state import tensors
from kvpolicy.parallel.runtime import share
from kvpolicy.planning.curves import save_layers
from kvpolicy.selectors.center_files import CENTER_FILES
from kvpolicy.selectors.filter_files import FILTER_FILES
from kvpolicy.selectors.gate_files import GATE_FILES
from kvpolicy.statistics import output_norms
from kvpolicy.statistics.output_norms import absolute_norms
from tests.conformance.access import Attend, attending, kept_positions, stage_codes
from tests.conformance.calibration import DIM, LAYERS, _kvquant, _random, centers, filters, gates
from tests.conformance.policies import words

PROMPT = 26
STEPS = 3
NEXT = 13


class Heads(NamedTuple):
    """Query and KV heads of a model, and how many ranks hold each KV head."""

    queries: int
    heads: int
    replicas: int = 1

    def own(self, rank: int, world: int) -> tuple[slice, slice]:
        """Query and KV heads of a rank: the first ranks have one more where they do not divide."""
        if self.replicas > 1:
            assert world == self.heads * self.replicas
            size = self.queries // world
            head = rank // self.replicas
            return slice(rank * size, rank * size + size), slice(head, head + 1)
        first = sum(self.share(before, world) for before in range(rank))
        last = first + self.share(rank, world)
        group = self.queries // self.heads
        return slice(first * group, last * group), slice(first, last)

    def share(self, rank: int, world: int) -> int:
        """KV heads of a rank."""
        return self.heads // world + (rank < self.heads % world)


def model_of(heads: Heads, layers: int = 2) -> Any:
    """A small model, the same on every rank."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=DIM * heads.queries,
        intermediate_size=48,
        num_hidden_layers=layers,
        head_dim=DIM,
        num_attention_heads=heads.queries,
        num_key_value_heads=heads.heads,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def pair_of(heads: Heads) -> tuple[Any, Any]:
    """A small model for the heads of this rank, and the same one alone."""
    model = model_of(heads)
    share(model, replicas=heads.replicas)
    return model, model_of(heads)


def kvquant_by_head(folder: Path, heads: int) -> None:
    """A calibration in which every KV head has ranges of its own."""
    meta, tensors = _kvquant()
    for layer in range(LAYERS):
        tensors[f"keys.offset.{layer}"] = _random(heads, DIM, seed=layer) / 4
        tensors[f"keys.range.{layer}"] = 1.5 + _random(heads, DIM, seed=layer + 10).abs()
    save(folder, "kvquant", {"model": None, "head_dim": DIM, **meta}, tensors)


@contextmanager
def divided(heads: Heads, rank: int, world: int) -> Generator[None]:
    """Let layers see this rank's heads only, and gather what all ranks attended."""
    queries, held = heads.own(rank, world)

    def around(whole: Attend) -> Attend:
        def attend(cache: PolicyCache, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
            own = whole(cache, layer_idx, q[:, queries], k[:, held], v[:, held], *rest)
            out = torch.zeros_like(q)
            out[:, queries] = own
            dist.all_reduce(out)  # to zeros nothing is rounded
            return out

        return attend

    def sliced(values: Tensor, projection: Tensor) -> Tensor:
        """The norms by this rank's columns of the projection of the whole model."""
        return absolute_norms(values, projection.unflatten(1, (heads.queries, -1))[:, queries].flatten(1))

    with attending(around, replays=True), mock.patch.object(output_norms, "absolute_norms", sliced):
        yield


def play(model: Any, policy: str | Policy, file: Path | None = None) -> tuple[PolicyCache, list[Tensor]]:
    """A padded batch, some steps, more of a prompt, which one row has no part in, and more steps; cache and logits.

    With a file, the cache is saved to it between the two prompts, and the rest runs on what is loaded, under a policy
    that is attached anew, as in another process.
    """
    draw = torch.Generator().manual_seed(3)
    found: list[Tensor] = []
    seen = torch.zeros(3, 0, dtype=torch.int64)
    with torch.no_grad(), ExitStack() as stack:
        handle = stack.enter_context(kvpolicy.attach(model, policy))
        cache = PolicyCache(model)
        for lengths in ([PROMPT, PROMPT // 2, 1], [NEXT, 0, NEXT // 2]):
            columns = max(lengths)
            tokens = torch.randint(3, 64, (3, columns), generator=draw)
            own = torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]
            for _ in range(1 + STEPS):
                seen = torch.cat([seen, own.long()], 1)
                places = (seen.cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
                out = model(tokens, attention_mask=seen, position_ids=places, cache=cache)
                logits = out.logits[:, -1:]
                found.append(logits)
                tokens = logits[:, -1].argmax(-1, keepdim=True)
                own = torch.ones(3, 1)
            if file is not None:
                cache.save(file)
                handle.detach()
                handle = stack.enter_context(kvpolicy.attach(model, policy))
                cache = PolicyCache.load(model, file)
    return cache, found


def differences(one: PolicyCache, some: PolicyCache, held: slice, to_the_bit: bool) -> list[str]:
    """What of a rank's cache is not what one rank holds of these heads; a rank without heads has nothing to compare.

    Fewer heads or queries can make another matrix product, whose rounding reaches the layers behind the first: there
    positions alone must be equal, where not all is `to_the_bit`.
    """
    wrong: list[str] = []
    for index, (left, right) in enumerate(zip(one.policy_layers, some.policy_layers, strict=True)):
        if not bool((left.budget == right.budget).all()):
            wrong.append(f"layer {index}: budgets {left.budget.tolist()} and {right.budget.tolist()}")
        if held.start == held.stop:
            continue
        if left.owner is not None:  # pages of single heads, of which another rank has another number
            kept = kept_positions(left), kept_positions(right)
            if [row[held] for row in kept[0]] != kept[1]:
                wrong.append(f"layer {index}: positions")
            continue
        live = left.positions[:, held] >= 0
        parts = {"positions": (left.positions, right.positions)}
        for stage, (a, b) in enumerate(zip(stage_codes(left), stage_codes(right), strict=True)):
            if index and not to_the_bit:
                break
            pairs = enumerate(zip(tensors(a), tensors(b), strict=True))
            parts |= {f"stage {stage}: tensor {number}": pair for number, pair in pairs}
        for name, (whole, part) in parts.items():
            own = whole[:, held] if whole.shape[1] > 1 else whole
            if own.shape != part.shape or not torch.equal(own, part):
                wrong.append(f"layer {index}: {name}")
        exact = live[..., : left.layout.exact, None]
        assert left.keys is not None and right.keys is not None
        if not wrong and _far(left.keys[:, held] * exact, right.keys * exact, to_the_bit):
            wrong.append(f"layer {index}: keys")
    return wrong


def _far(a: Tensor, b: Tensor, to_the_bit: bool) -> bool:
    return not (torch.equal(a, b) if to_the_bit else torch.allclose(a, b, atol=1e-4))


def compare(rank: int, world: int, heads: Heads, policies: list[str], folder: str) -> list[str]:
    """What differs between this rank's part under each policy and the whole, as text."""
    model, alone = pair_of(heads)
    wrong = list[str]()
    if folder and rank == 0:
        kvquant_by_head(Path(folder) / "kvquant", heads.heads)
        save_profile(Path(folder) / "profile.json", "a test", [0.2, 0.9])
        scores = _random(2, heads.heads, seed=4).tolist()
        FILTER_FILES.save(Path(folder) / "filters.safetensors", filters(heads.heads))
        CENTER_FILES.save(Path(folder) / "centers.safetensors", centers(heads.queries))
        GATE_FILES.save(Path(folder) / "gate.safetensors", gates(heads.heads, DIM * heads.queries))
        save_layers(Path(folder) / "layers.json", ["snapkv:window=6:kernel=3@0.5", "uniform/adakv+h2o@0.9"])
        save_layers(Path(folder) / "coded.json", [words("h2o", "kivi"), words("tova", "zipcache", budget="0.8")])
        HEAD_FILES.save(Path(folder) / "heads.json", HeadFile(tuple(map(tuple, scores)), sinks=2, recent=4))
    dist.barrier()
    for spec in policies:
        spec = spec.replace("FOLDER", folder)
        one, logits = play(alone, spec)
        with divided(heads, rank, world):
            some, others = play(model, spec, Path(folder) / "cache.safetensors" if folder else None)
        # One product over all heads reads the first; a second prompt attends to as many columns as the fullest head of
        # the rank has pages for, which other ranks may not have.
        paged = any(layer.owner is not None for layer in one.policy_layers)
        # Products with a matrix of a head's size round by how many heads they are of.
        mixes = "turboquant" in spec or "kvarn" in spec
        to_the_bit = heads.replicas == 1 and not paged and not mixes
        found = differences(one, some, heads.own(rank, world)[1], to_the_bit)
        if any(_far(a, b, to_the_bit) for a, b in zip(logits, others, strict=True)):
            found.append("logits")
        wrong += [f"{spec} on {heads}: {what}" for what in found[:3]]
    return wrong
