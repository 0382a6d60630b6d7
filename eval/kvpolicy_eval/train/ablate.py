"""Accuracy of the embedded model under eviction, by layer and by method.

`python -m kvpolicy_eval.train.ablate MODEL --n 40` prints, per prompt length:
which layer each task needs; the accuracy of three methods at several budgets,
with the question after the eviction and with the question inside the prefill;
and the perplexity of held-out text. Eviction happens once, after the prefill,
by dropping cache entries per KV head; the answer is decoded greedily. The code
is independent of the engine of kvpolicy, which it serves to check.

Shapes: B = 1, H KV heads, G query heads per KV head, P prompt tokens, S slots, D head dim.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy.hf.cache_names import cache_argument, output_cache
from kvpolicy_eval.common.markdown import header, row
from kvpolicy_eval.data.tasks import tasks
from kvpolicy_lm_eval.data import prompts
from kvpolicy_lm_eval.data.text import held_out

SINKS = 4
OBSERVATION = 16
"""Queries of SnapKV's observation window."""
POOL = 7
"""Width of SnapKV's max pooling."""
Kept = Sequence[Tensor | None]
"""Kept positions of each layer, [H, S], or None for all."""


class Prefill:
    """A prompt in the cache, with the attention statistics that the methods rank tokens by.

    Args:
        model: A Llama.
        ids: Prompt tokens [1, P].
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        """Run the prefill and reduce its attention weights."""
        self.model = model
        self.length = ids.shape[1]
        heads = model.config.num_key_value_heads
        model.set_attn_implementation("eager")  # the only implementation that returns weights
        out = model(ids, use_cache=True, output_attentions=True)
        model.set_attn_implementation("sdpa")  # takes no mask for a single query, so that cache lengths may differ
        self.next = int(out.logits[0, -1].argmax())
        cache = output_cache(out)
        self.keys = [layer.keys for layer in cache.layers]
        self.values = [layer.values for layer in cache.layers]
        grouped = [a[0].unflatten(0, (heads, -1)).mean(1) for a in out.attentions]  # each [H, P, P]
        self.mass = [a.sum(1) for a in grouped]
        self.observed = [a[:, -OBSERVATION:].sum(1) for a in grouped]

    def streaming(self, layer: int, budget: int) -> Tensor:
        """The first SINKS positions and the last ones, [H, S]."""
        keep = torch.cat([torch.arange(SINKS), torch.arange(self.length - budget + SINKS, self.length)])
        return keep.expand(len(self.mass[layer]), -1)

    def h2o(self, layer: int, budget: int) -> Tensor:
        """Half recent tokens, half tokens with the most accumulated attention, [H, S]."""
        score = self.mass[layer].clone()
        score[:, self.length - budget // 2 :] = torch.inf
        return score.topk(budget).indices.sort().values

    def snapkv(self, layer: int, budget: int) -> Tensor:
        """The observation window and the tokens that it attends to most, max-pooled, [H, S]."""
        score = F.max_pool1d(self.observed[layer][None], POOL, 1, POOL // 2)[0]
        score[:, self.length - OBSERVATION :] = torch.inf
        return score.topk(max(budget, OBSERVATION)).indices.sort().values

    def cache(self, kept: Kept) -> DynamicCache:
        """A cache that holds only the kept positions of each layer."""
        cache = DynamicCache()
        for layer, keep in enumerate(kept):
            pair = [self.keys[layer], self.values[layer]]
            if keep is not None:
                pair = [x.gather(2, keep[None, :, :, None].expand(-1, -1, -1, x.shape[-1])) for x in pair]
            cache.update(pair[0], pair[1], layer)
        return cache


def decode(prefill: Prefill, kept: Kept, question: list[int], count: int) -> list[int]:
    """Feed `question`, then decode `count` tokens greedily from the evicted cache.

    With an empty question the first token is that of the full prefill, as in `generate`.
    """
    cache = prefill.cache(kept)
    given = cache_argument(prefill.model, cache)
    position = prefill.length
    answer = [] if question else [prefill.next]
    pending = list(question or answer)
    while len(answer) < count:
        token = torch.tensor([[pending.pop(0)]])
        position_ids = torch.tensor([[position]])
        logits = prefill.model(token, **given, position_ids=position_ids, use_cache=True).logits
        position += 1
        if not pending:
            answer.append(int(logits[0, -1].argmax()))
            pending = [answer[-1]]
    return answer


class Bench:
    """Scores evictions on freshly drawn prompts.

    Args:
        folder: Exported model.
        n: Prompts per table cell.
        seed: Seed of the prompts; all cells of a task share them.
    """

    def __init__(self, folder: Path, n: int, seed: int = 1234) -> None:
        """Load the model in fp32."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.n = n
        self.seed = seed

    @torch.no_grad()
    def scores(
        self, task: str, length: int, after: bool, plans: dict[str, Callable[[Prefill], Kept]]
    ) -> tuple[dict[str, float], float]:
        """Share of exact answers by plan, and the mean prompt length in tokens.

        Args:
            task: Name in `tasks`.
            length: Rough prompt length in tokens.
            after: Whether the question follows the eviction.
            plans: Functions that select the kept positions, by name.
        """
        right = dict.fromkeys(plans, 0)
        tokens = 0
        rng = Random(f"{self.seed} {task} {length}")
        for _ in range(self.n):
            prompt, answer = tasks(length)[task](rng)
            document, question = prompts.split(prompt) if after else (prompt, "")
            ids = self.tokenizer(document, return_tensors="pt").input_ids
            asked = self.tokenizer.encode(question, add_special_tokens=False) if question else []
            expected = self.tokenizer.encode(answer, add_special_tokens=False)
            prefill = Prefill(self.model, ids)
            tokens += prefill.length
            for name, plan in plans.items():
                right[name] += decode(prefill, plan(prefill), asked, len(expected)) == expected
        return {name: r / self.n for name, r in right.items()}, tokens / self.n

    @torch.no_grad()
    def perplexity(self, length: int, windows: int) -> float:
        """Perplexity per token of held-out text, over evenly spaced windows that each begin with BOS."""
        ids = torch.tensor(self.tokenizer.encode(held_out(), add_special_tokens=False, verbose=False))
        loss = []
        for start in torch.linspace(0, len(ids) - length, windows).long().tolist():
            window = F.pad(ids[start : start + length - 1], (1, 0), value=self.model.config.bos_token_id)[None]
            logits = self.model(window).logits[0, :-1]
            loss.append(F.cross_entropy(logits, window[0, 1:]))
        return float(torch.stack(loss).mean().exp())


def layer_table(bench: Bench, length: int, share: float = 0.1) -> Iterable[str]:
    """Lines of the ablation: StreamingLLM at `share` in a single layer, with the question after the eviction."""
    layers = bench.model.config.num_hidden_layers

    def alone(target: int) -> Callable[[Prefill], Kept]:
        return lambda p: [p.streaming(i, int(share * p.length)) if i == target else None for i in range(layers)]

    plans: dict[str, Callable[[Prefill], Kept]] = {"full": lambda p: [None] * layers}
    plans |= {f"layer {i}": alone(i) for i in range(layers)}
    plans["all"] = lambda p: [p.streaming(i, int(share * p.length)) for i in range(layers)]
    yield from header(["task", "tokens", *plans])
    for task in tasks(length):
        scores, tokens = bench.scores(task, length, True, plans)
        yield row([task, f"{tokens:.0f}", *(f"{score:.2f}" for score in scores.values())])


def method_table(bench: Bench, length: int, after: bool, shares: tuple[float, ...] = (0.1, 0.2, 0.3)) -> Iterable[str]:
    """Lines of the comparison of methods, with every layer at the same share."""
    layers = bench.model.config.num_hidden_layers

    def uniform(method: str, share: float) -> Callable[[Prefill], Kept]:
        return lambda p: [getattr(p, method)(i, int(share * p.length)) for i in range(layers)]

    plans: dict[str, Callable[[Prefill], Kept]] = {"full": lambda p: [None] * layers}
    plans |= {f"{m} {s:.0%}": uniform(m, s) for s in shares for m in ("streaming", "h2o", "snapkv")}
    yield from header(["task", *plans])
    for task in tasks(length):
        scores, _ = bench.scores(task, length, after, plans)
        yield row([task, *(f"{score:.2f}" for score in scores.values())])


def main(argv: list[str] | None = None) -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m kvpolicy_eval.train.ablate", description="Print the accuracy under eviction."
    )
    parser.add_argument("model", type=Path, help="folder of an exported model")
    parser.add_argument("--n", type=int, default=40, help="prompts per table cell")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024], help="prompt lengths in tokens")
    parser.add_argument("--tables", nargs="+", default=["layers", "after", "inside", "text"], help="tables to print")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bench = Bench(args.model, args.n)
    for length in args.lengths:
        tables = {
            "layers": lambda n=length: layer_table(bench, n),
            "after": lambda n=length: method_table(bench, n, after=True),
            "inside": lambda n=length: method_table(bench, n, after=False),
            "text": lambda n=length: [f"held-out perplexity per token: {bench.perplexity(n, 40):.2f}"],
        }
        for name in args.tables:
            print(f"\n{name}, {length} tokens, n={args.n}\n")
            for line in tables[name]():
                print(line, flush=True)


if __name__ == "__main__":
    main()
