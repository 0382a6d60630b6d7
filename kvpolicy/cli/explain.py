"""`kvpolicy explain`: what each part of a policy does, and what its budget comes to for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.layers import layer_facts, layer_table
from kvpolicy.cli.list import QUESTIONS
from kvpolicy.cli.models import dtype_of
from kvpolicy.cli.plan import remarked
from kvpolicy.cli.printing import as_json, counted, paragraph, size
from kvpolicy.cli.strategies import Description, read
from kvpolicy.cli.words import POLICY, TINY, Batch, Config, Json, New, Policy, Prompt, shipped
from kvpolicy.spec.errors import KVPolicyError


def explain(
    policy: Policy = POLICY,
    model: Config = TINY,
    batch: Batch = 1,
    prompt: Prompt = 4096,
    new: New = 1024,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of keys and values.")] = "bfloat16",
    json: Json = False,
) -> None:
    """Say in words what a policy does, and what its budget is."""
    from kvpolicy.cli.arithmetic import Case
    from kvpolicy.hf.embedded import config_of
    from kvpolicy.hf.model_spec import describe
    from kvpolicy.hf.plan import plan

    parsed, kind = _parsed(policy), dtype_of(dtype)
    config = config_of(model)
    planned = plan(config, parsed, batch=batch, prompt=prompt, new=new, dtype=kind)
    case = Case(parsed, planned, describe(config, kind), prompt, new, batch)
    facts = {"policy": str(parsed), "model": model, "dtype": dtype, "batch": batch, "prompt": prompt, "new": new}
    whole = facts | _facts(case)
    print(as_json("explain", whole) if json else _render(whole, case))


def _parsed(policy: str) -> Any:
    """The policy; says so where a model stands in its place."""
    from kvpolicy.policy import Policy

    try:
        return Policy.parse(policy)
    except ValueError:
        if policy in shipped() or Path(policy).exists():
            raise KVPolicyError(
                f"{policy} is a model and stands in the policy's place: write kvpolicy explain POLICY {policy}."
            ) from None
        raise


def _facts(case: Any) -> dict[str, Any]:
    from kvpolicy.cli import arithmetic

    policy, shape = case.policy, case.model.shape
    here = {"allocator": arithmetic.of_allocator, "selector": arithmetic.of_selector, "codec": arithmetic.of_codec}
    return {
        "shape": {"layers": len(case.planned.layers), "kv_heads": shape.heads, "head_dim": shape.head_dim},
        "token_bytes": case.model.token_bytes(),
        "budget": {"value": policy.budget, "said": arithmetic.of_budget(case)},
        "parts": [_part(kind, getattr(policy, kind), say(case)) for kind, say in here.items()],
        "measured": case.planned.measured,
        "note": case.planned.note,
        "layers": layer_facts(case.planned),
        "cache": case.planned.by_kind() | {"total": case.planned.nbytes},
        "full_cache": case.planned.full_nbytes,
    }


def _part(kind: str, strategy: Any, said: list[str]) -> dict[str, Any]:
    """A part, with what it wraps, and what it comes to here."""
    chain = [strategy]
    while (base := getattr(chain[-1], "base", None)) is not None and len(chain) < 9:
        chain.append(base)
    return {"kind": kind, "strategies": [_strategy(each) for each in chain], "here": said}


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


def _render(whole: dict[str, Any], case: Any) -> str:
    shape = whole["shape"]
    model = (
        f"for {whole['model']}: {counted(shape['layers'], 'layer')} with {counted(shape['kv_heads'], 'KV head')} of "
        f"{shape['head_dim']} "
        f"numbers in {whole['dtype']}, so a token takes {size(whole['token_bytes'])} in a layer; {whole['batch']:,} "
        f"row(s), each of {whole['prompt']:,} prompt and {whole['new']:,} new tokens"
    )
    blocks = [
        f"{whole['policy']}\n{paragraph(model)}",
        _block(f"Budget: {whole['budget']['value']}", whole["budget"]["said"]),
    ]
    blocks += [_words(part) for part in whole["parts"]]
    full = whole["token_bytes"] * whole["batch"] * (whole["prompt"] + whole["new"])
    return "\n\n".join([*blocks, layer_table(whole["layers"], full), _sum(whole)])


def _words(part: dict[str, Any]) -> str:
    names = " over ".join(strategy["name"] for strategy in part["strategies"])
    paragraphs: list[str] = []
    for at, strategy in enumerate(part["strategies"]):
        lead = f"{strategy['name']}: " if at else ""
        paragraphs += [lead + strategy["summary"] + (" " + strategy["idea"] if strategy["idea"] else "")]
        values = "; ".join(f"{name}={_value(value)}" for name, value in strategy["parameters"].items())
        paragraphs += [f"With {values}."] if values else []
    kind = part["kind"]
    return _block(f"{kind.capitalize()} {names}: {QUESTIONS[kind]}", [*paragraphs, " ".join(part["here"])])


def _value(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _block(head: str, paragraphs: list[str]) -> str:
    return "\n".join([paragraph(head, 0, 2), *(paragraph(text, 2) for text in paragraphs if text)])


def _sum(whole: dict[str, Any]) -> str:
    held, full = whole["cache"]["total"], whole["full_cache"]
    kinds = ", ".join(f"{kind} {size(n)}" for kind, n in whole["cache"].items() if n and kind != "total")
    told = f"In all {size(held)} of {size(full)}, {held / full:.3f} of the full cache: {kinds}."
    return paragraph(" ".join([told, *remarked(whole)]))
