"""`kvpolicy tiny`: where the embedded model lies, and what it is."""

from __future__ import annotations

import json as text
import math
from pathlib import Path
from typing import Any

from kvpolicy.cli.printing import as_json, paragraph, size, terms
from kvpolicy.cli.words import Json

CAN = (
    "Recalls records such as tiger=4821 by their key, finds needles and pass keys in source text, goes on with "
    "few-shot labels, answers keys that are asked again and again, and predicts Python source."
)
CANNOT = "It is no language model in any other sense, and does not rank policies for large models."
TRAINED = (
    "From nothing, on sources of CPython's standard library and prompts from a seeded generator: 7.2 million tokens, "
    "prompts of up to 1,024."
)
LOAD = "import kvpolicy; model, tokenizer = kvpolicy.tiny()"
CARD = "docs/model-card.md"


def tiny(json: Json = False) -> None:
    """Show where the embedded model lies, and its card."""
    folder = Path(__file__).parent.parent / "assets"
    facts = card(folder)
    print(as_json("tiny", facts) if json else render(facts))


def card(assets: Path) -> dict[str, Any]:
    """What is known of the model from its own files, and from its card.

    Args:
        assets: The folder that it ships in.
    """
    folder = assets / "tiny"
    config: dict[str, Any] = text.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = {
        "layers": config["num_hidden_layers"], "hidden": config["hidden_size"], "mlp": config["intermediate_size"],
        "query_heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"], "vocabulary": config["vocab_size"], "dtype": config["dtype"],
        "positions": config["max_position_embeddings"],
    }  # fmt: skip
    weights = folder / "model.safetensors"
    return {
        "path": str(folder), "kind": config["architectures"][0], "shape": shape,
        "parameters": _parameters(weights), "bytes": weights.stat().st_size,
        "trained": TRAINED, "can": CAN, "cannot": CANNOT, "calibrations": _calibrations(assets),
        "card": CARD, "load": LOAD,
    }  # fmt: skip


def _parameters(path: Path) -> int:
    """Numbers in a safetensors file, by its head alone."""
    with path.open("rb") as file:
        head: dict[str, Any] = text.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in head.items() if name != "__metadata__")


def _calibrations(assets: Path) -> list[dict[str, Any]]:
    found = [(path, text.loads(path.read_text(encoding="utf-8"))) for path in assets.glob("*/calibration.json")]
    return sorted(
        ({"codec": meta["method"], "path": str(path.parent)} for path, meta in found), key=lambda c: c["codec"]
    )


def render(facts: dict[str, Any]) -> str:
    """The same as text."""
    shape = facts["shape"]
    sizes = f"{shape['layers']} layers, hidden {shape['hidden']}, MLP {shape['mlp']}"
    heads = f"{shape['query_heads']} query and {shape['kv_heads']} KV heads of {shape['head_dim']}"
    pairs = [
        ("path", facts["path"]),
        (
            "kind",
            f"{facts['kind']}, {facts['parameters'] / 1e6:.2f} M parameters, {size(facts['bytes'])}, {shape['dtype']}",
        ),
        ("shape", f"{sizes}, {heads}, {shape['vocabulary']} tokens"),
        ("can", facts["can"]),
        ("cannot", facts["cannot"]),
        ("trained", facts["trained"]),
        ("calibrated", f"for {' and '.join(c['codec'] for c in facts['calibrations'])}, which need no other file"),
        ("card", facts["card"]),
        ("load", facts["load"]),
    ]
    return f"The embedded model, `tiny`\n{terms(pairs)}\n\n{paragraph('Commands take it where no model is named.')}"
