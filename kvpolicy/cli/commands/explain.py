"""`kvpolicy explain`: what each part of a policy does, and what its budget amounts to for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import kvpolicy
from kvpolicy.cli.arguments import POLICY, TINY, Batch, Config, Json, New, Policy, Prompt, prompt_length, shipped
from kvpolicy.cli.commands.plan import notes
from kvpolicy.cli.formatting import as_json, counted, input_size, paragraph, size, terms
from kvpolicy.cli.layer_table import Bandwidth, Link, layer_facts, layer_table, transfer_facts, transfer_text
from kvpolicy.cli.model_loading import dtype_of
from kvpolicy.cli.strategy_docs import Description, read
from kvpolicy.registry import QUESTIONS
from kvpolicy.text.errors import KVPolicyError

MAX_WRAPPED = 9
"""The most nested strategies that are described; a strategy could wrap itself."""


def explain(
    policy: Policy = POLICY,
    model: Config = TINY,
    batch: Batch = 1,
    prompt: Prompt = None,
    new: New = 1024,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of keys and values.")] = "bfloat16",
    link: Link = None,
    bandwidth: Bandwidth = None,
    json: Json = False,
) -> None:
    """Describe each part of a policy, and its effect on a model.

    Only the config of the model is read.
    """
    from kvpolicy.cli.explanation import Case
    from kvpolicy.cli.explanation_by_layer import facts_by_layer, render_by_layer
    from kvpolicy.hf.embedded import as_config
    from kvpolicy.hf.model_spec import describe
    from kvpolicy.hf.rotary_lookup import trained_positions
    from kvpolicy.policy import LayeredPolicy

    # The plan is that of `kvpolicy plan`, so that both commands say the same bytes.
    parsed = _parse(policy)
    cache_dtype = dtype_of(dtype)
    config = as_config(model)
    prompt = prompt_length(prompt, new, trained_positions(config))
    planned = kvpolicy.plan(config, parsed, batch=batch, prompt=prompt, new=new, dtype=cache_dtype)
    facts = {
        "policy": str(parsed),
        "model": model,
        "dtype": str(cache_dtype).removeprefix("torch."),
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "link": transfer_facts(planned, link, bandwidth),
    }
    # Of layers with policies of their own, a table says more than a paragraph about each part.
    if isinstance(planned.policy, LayeredPolicy):
        facts |= facts_by_layer(parsed, planned, describe(config, cache_dtype))
        print(as_json("explain", facts) if json else render_by_layer(facts))
        return
    case = Case(parsed, planned, describe(config, cache_dtype), prompt, new, batch)
    facts |= _facts(case)
    print(as_json("explain", facts) if json else _render(facts))


def _parse(policy: str) -> Any:
    """Parse a spec; if it is the name of a model, the error says that the arguments are in the wrong order."""
    from kvpolicy.policy import Policy

    try:
        return Policy.parse(policy)
    except ValueError:
        if policy and (policy in shipped() or Path(policy).exists()):
            raise KVPolicyError(
                f"POLICY must be a policy spec, got the model {policy!r}; try kvpolicy explain POLICY {policy}."
            ) from None
        raise


def _facts(case: Any) -> dict[str, Any]:
    from kvpolicy.cli import explanation
    from kvpolicy.text.budget import json_budget

    policy = case.policy
    shape = case.model.shape
    effects = {
        "allocator": explanation.of_allocator(case),
        "selector": explanation.of_selector(case),
        "merger": explanation.of_merger(case),
        "codec": explanation.of_codec(case),
        "reader": explanation.of_reader(case),
    }
    return {
        "shape": {"layers": len(case.planned.layers), "kv_heads": shape.heads, "head_dim": shape.head_dim},
        "token_bytes": case.model.token_bytes(),
        "budget": {"value": json_budget(policy.budget), "said": explanation.of_budget(case)},
        "parts": [_part(kind, getattr(policy, kind), effect) for kind, effect in effects.items()],
        "measured": case.planned.measured,
        "note": case.planned.note,
        "layers": layer_facts(case.planned),
        "cache": case.planned.by_kind() | {"total": case.planned.nbytes},
        "full_cache": case.planned.full_nbytes,
    }


def _part(kind: str, strategy: Any, effect: list[str]) -> dict[str, Any]:
    """Return a part with the strategies that it wraps, and its effect on the model."""
    chain = [strategy]
    while len(chain) < MAX_WRAPPED:
        inner = getattr(chain[-1], "base", None) or getattr(chain[-1], "heads", None)
        if inner is None:
            break
        chain.append(inner)
    return {"kind": kind, "strategies": [_strategy(each) for each in chain], "here": effect}


def _strategy(strategy: Any) -> dict[str, Any]:
    from kvpolicy.registry import name_of

    found: Description = read(type(strategy))
    values = {p.name: getattr(strategy, p.name) for p in found.parameters if p.name != "base"}
    return {
        "name": name_of(type(strategy)),
        "summary": found.summary,
        "idea": found.idea,
        "parameters": {name: value if isinstance(value, int | float | str) else None for name, value in values.items()},
        "source": found.source,
    }


def _render(facts: dict[str, Any]) -> str:
    """Format the facts as text."""
    shape = facts["shape"]
    heads = f"{counted(shape['kv_heads'], 'KV head')} of dimension {shape['head_dim']}"
    head = [
        ("policy", facts["policy"]),
        (
            "model",
            f"{facts['model']} in {facts['dtype']}: {counted(shape['layers'], 'layer')} with {heads}, "
            f"{size(facts['token_bytes'])} per token and layer",
        ),
        ("input", input_size(facts["batch"], facts["prompt"], facts["new"])),
    ]
    blocks = [terms(head, 0), _block(f"Budget: {facts['budget']['value']}", facts["budget"]["said"])]
    blocks += [_describe(part) for part in facts["parts"]]
    full = facts["token_bytes"] * facts["batch"] * (facts["prompt"] + facts["new"])
    blocks += [layer_table(facts["layers"], full), paragraph(_total(facts)), *map(paragraph, notes(facts))]
    if facts["link"]:
        blocks.append(paragraph(transfer_text(facts["link"])))
    return "\n\n".join(blocks)


def _describe(part: dict[str, Any]) -> str:
    names = " over ".join(strategy["name"] for strategy in part["strategies"])
    paragraphs: list[str] = []
    for depth, strategy in enumerate(part["strategies"]):
        start = f"{strategy['name']}: " if depth else ""
        paragraphs.append(" ".join(filter(None, [start + strategy["summary"], strategy["idea"]])))
        values = "; ".join(f"{name}={_value(value)}" for name, value in strategy["parameters"].items())
        if values:
            paragraphs.append(f"Parameters: {values}.")
    kind = part["kind"]
    return _block(f"{kind.capitalize()} {names}: {QUESTIONS[kind]}", [*paragraphs, " ".join(part["here"])])


def _value(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _block(head: str, paragraphs: list[str]) -> str:
    return "\n".join([paragraph(head, 0, 2), *(paragraph(text, 2) for text in paragraphs if text)])


def _total(facts: dict[str, Any]) -> str:
    nbytes = facts["cache"]["total"]
    full = facts["full_cache"]
    kinds = ", ".join(f"{kind} {size(taken)}" for kind, taken in facts["cache"].items() if taken and kind != "total")
    return f"Total: {size(nbytes)}, {nbytes / full:.3f} of the full cache ({size(full)}): {kinds}."
