"""What eviction costs the embedded model: by layer and by method.

`python -m kvpolicy_eval.train.ablate MODEL --n 40` prints, per length: which
layer each task needs; what three methods keep at several budgets, with the
question after the eviction and with the question inside the prefill; and the
perplexity of held-out text. Eviction happens once, after the prefill, by
dropping cache entries per KV head; the answer is decoded greedily.

Shape letters: B = 1, H KV heads, G query heads per KV head, P prompt tokens, S slots, D head dim.
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

from kvpolicy_eval.data import prompts
from kvpolicy_eval.data.text import held_out

SINKS = 4
OBSERVATION = 16
POOL = 7
Kept = Sequence[Tensor | None]
"""Per layer the kept positions [H, S], or None for everything."""


def tasks(length: int) -> dict[str, Callable[[Random], prompts.Prompt]]:
    """Prompt generators that fill about `length` tokens (512 or 1,024)."""
    k = length / 512
    return {
        "recall": lambda rng: prompts.recall(rng, int(70 * k)),
        "multi_query": lambda rng: prompts.multi_query(rng, int(50 * k), int(16 * k)),
        "passkey": lambda rng: prompts.passkey(rng, int(900 * k)),
        "needles": lambda rng: prompts.needles(rng, int(850 * k), int(4 * k)),
        "few_shot": lambda rng: prompts.few_shot(rng, 4, 3, int(850 * k)),
        "hot_keys": lambda rng: prompts.hot_keys(rng, int(10 * k), 3, int(27 * k), int(28 * k)),
    }


class Prefill:
    """One document in the cache, with the attention statistics that selectors need.

    Args:
        model: A Llama.
        ids: Prompt tokens [1, P].
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        """Run the prefill and reduce its attention."""
        self.model = model
        self.length = ids.shape[1]
        heads = model.config.num_key_value_heads
        model.set_attn_implementation("eager")  # returns weights
        out = model(ids, use_cache=True, output_attentions=True)
        model.set_attn_implementation("sdpa")  # needs no mask for one query, so layers may keep different lengths
        self.next = int(out.logits[0, -1].argmax())
        self.keys = [layer.keys for layer in out.past_key_values.layers]
        self.values = [layer.values for layer in out.past_key_values.layers]
        grouped = [a[0].unflatten(0, (heads, -1)).mean(1) for a in out.attentions]  # each [H, P, P]
        self.mass = [a.sum(1) for a in grouped]
        self.observed = [a[:, -OBSERVATION:].sum(1) for a in grouped]

    def streaming(self, layer: int, budget: int) -> Tensor:
        """First SINKS and last positions, [H, S]."""
        keep = torch.cat([torch.arange(SINKS), torch.arange(self.length - budget + SINKS, self.length)])
        return keep.expand(len(self.mass[layer]), -1)

    def h2o(self, layer: int, budget: int) -> Tensor:
        """Half recent, half with the most accumulated attention, [H, S]."""
        score = self.mass[layer].clone()
        score[:, self.length - budget // 2 :] = torch.inf
        return score.topk(budget).indices.sort().values

    def snapkv(self, layer: int, budget: int) -> Tensor:
        """The observation window and what it attends to, max-pooled, [H, S]."""
        score = F.max_pool1d(self.observed[layer][None], POOL, 1, POOL // 2)[0]
        score[:, self.length - OBSERVATION :] = torch.inf
        return score.topk(max(budget, OBSERVATION)).indices.sort().values

    def cache(self, kept: Kept) -> DynamicCache:
        """Build a cache that holds only the kept positions of each layer."""
        cache = DynamicCache()
        for layer, keep in enumerate(kept):
            pair = [self.keys[layer], self.values[layer]]
            if keep is not None:
                pair = [x.gather(2, keep[None, :, :, None].expand(-1, -1, -1, x.shape[-1])) for x in pair]
            cache.update(pair[0], pair[1], layer)
        return cache


def decode(prefill: Prefill, kept: Kept, question: list[int], count: int) -> list[int]:
    """Feed `question`, then decode `count` tokens greedily from the evicted cache.

    With an empty question the first token comes from the full prefill, as it
    does in `generate`.
    """
    cache, answer, position = prefill.cache(kept), [] if question else [prefill.next], prefill.length
    pending = list(question or answer)
    while len(answer) < count:
        token = torch.tensor([[pending.pop(0)]])
        place = torch.tensor([[position]])
        logits = prefill.model(token, past_key_values=cache, position_ids=place, use_cache=True).logits
        position += 1
        if not pending:
            answer.append(int(logits[0, -1].argmax()))
            pending = [answer[-1]]
    return answer


class Bench:
    """Score evictions on freshly drawn prompts.

    Args:
        folder: Exported model.
        n: Prompts per cell.
        seed: Seed of the prompts; the same prompts serve every cell of a task.
    """

    def __init__(self, folder: Path, n: int, seed: int = 1234) -> None:
        """Load the model in fp32."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.n, self.seed = n, seed

    @torch.no_grad()
    def scores(
        self, task: str, length: int, after: bool, plans: dict[str, Callable[[Prefill], Kept]]
    ) -> tuple[dict[str, float], float]:
        """Share of exact answers by plan, and the mean prompt length in tokens.

        Args:
            task: Name in `tasks`.
            length: Rough prompt length in tokens.
            after: Whether the question comes after the eviction.
            plans: What to keep, by name.
        """
        right, tokens, rng = dict.fromkeys(plans, 0), 0, Random(f"{self.seed} {task} {length}")
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
        """Held-out perplexity per token over evenly spaced windows, each after BOS."""
        ids = torch.tensor(self.tokenizer.encode(held_out(), add_special_tokens=False, verbose=False))
        loss = []
        for start in torch.linspace(0, len(ids) - length, windows).long().tolist():
            window = F.pad(ids[start : start + length - 1], (1, 0), value=self.model.config.bos_token_id)[None]
            logits = self.model(window).logits[0, :-1]
            loss.append(F.cross_entropy(logits, window[0, 1:]))
        return float(torch.stack(loss).mean().exp())


def layer_table(bench: Bench, length: int, share: float = 0.1) -> Iterable[str]:
    """Rows of the ablation: StreamingLLM at `share` in one layer alone, the question after the eviction."""
    layers = bench.model.config.num_hidden_layers

    def alone(target: int) -> Callable[[Prefill], Kept]:
        return lambda p: [p.streaming(i, int(share * p.length)) if i == target else None for i in range(layers)]

    plans: dict[str, Callable[[Prefill], Kept]] = {"full": lambda p: [None] * layers}
    plans |= {f"layer {i}": alone(i) for i in range(layers)}
    plans["all"] = lambda p: [p.streaming(i, int(share * p.length)) for i in range(layers)]
    yield _row("task", ["tokens", *plans])
    yield _row("---", ["---"] * (len(plans) + 1))
    for task in tasks(length):
        scores, tokens = bench.scores(task, length, True, plans)
        yield _row(task, [f"{tokens:.0f}", *(f"{s:.2f}" for s in scores.values())])


def method_table(bench: Bench, length: int, after: bool, shares: tuple[float, ...] = (0.1, 0.2, 0.3)) -> Iterable[str]:
    """Rows of the methods: every layer at the same share."""
    layers = bench.model.config.num_hidden_layers

    def uniform(method: str, share: float) -> Callable[[Prefill], Kept]:
        return lambda p: [getattr(p, method)(i, int(share * p.length)) for i in range(layers)]

    plans: dict[str, Callable[[Prefill], Kept]] = {"full": lambda p: [None] * layers}
    plans |= {f"{m} {s:.0%}": uniform(m, s) for s in shares for m in ("streaming", "h2o", "snapkv")}
    yield _row("task", list(plans))
    yield _row("---", ["---"] * len(plans))
    for task in tasks(length):
        scores, _ = bench.scores(task, length, after, plans)
        yield _row(task, [f"{s:.2f}" for s in scores.values()])


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m kvpolicy_eval.train.ablate", description="Print what eviction costs."
    )
    parser.add_argument("model", type=Path, help="folder of an exported model")
    parser.add_argument("--n", type=int, default=40, help="prompts per cell")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024], help="prompt lengths in tokens")
    parser.add_argument("--tables", nargs="+", default=["layers", "after", "inside", "text"], help="which tables")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bench = Bench(args.model, args.n)
    for length in args.lengths:
        rows = {
            "layers": lambda n=length: layer_table(bench, n),
            "after": lambda n=length: method_table(bench, n, after=True),
            "inside": lambda n=length: method_table(bench, n, after=False),
            "text": lambda n=length: [f"held-out perplexity per token: {bench.perplexity(n, 40):.2f}"],
        }
        for table in args.tables:
            print(f"\n{table}, {length} tokens, n={args.n}\n")
            for row in rows[table]():
                print(row, flush=True)


if __name__ == "__main__":
    main()
