"""`kvpolicy tiny`: the path and the properties of the embedded model."""

from __future__ import annotations

import json as serializer
import math
from pathlib import Path
from typing import Any

import kvpolicy
from kvpolicy.cli.arguments import Json
from kvpolicy.cli.formatting import as_json, paragraph, size, terms

CAN = (
    "Recalls the value of a record such as tiger=4821, also if it is asked for repeatedly. Finds needles and pass keys "
    "in source code. Continues few-shot labels. Predicts Python source code."
)
CANNOT = "Not a general language model. Its ranking of policies does not transfer to large models."
TRAINED = (
    "From scratch, on source code of CPython's standard library and on synthetic prompts from a seeded generator: 7.2 "
    "million tokens, prompts of at most 1,024 tokens."
)
LOAD = "import kvpolicy; model, tokenizer = kvpolicy.tiny()"
FILES = {"heads": "duo"}
"""Methods whose calibration lies in a folder of another name."""
CARD = "docs/model-card.md"


def tiny(json: Json = False) -> None:
    """Show the path and the properties of the embedded model."""
    facts = card(Path(kvpolicy.__file__).parent / "assets")
    print(as_json("tiny", facts) if json else render(facts))


def card(assets: Path) -> dict[str, Any]:
    """Return the properties of the model, from its files and from its model card.

    Args:
        assets: The folder that contains the model.
    """
    folder = assets / "tiny"
    weights = folder / "model.safetensors"
    config: dict[str, Any] = serializer.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "path": str(folder),
        "kind": config["architectures"][0],
        "shape": {
            "layers": config["num_hidden_layers"],
            "hidden": config["hidden_size"],
            "mlp": config["intermediate_size"],
            "query_heads": config["num_attention_heads"],
            "kv_heads": config["num_key_value_heads"],
            "head_dim": config["head_dim"],
            "vocabulary": config["vocab_size"],
            "dtype": config["dtype"],
            "positions": config["max_position_embeddings"],
        },
        "parameters": _parameters(weights),
        "bytes": weights.stat().st_size,
        "trained": TRAINED,
        "can": CAN,
        "cannot": CANNOT,
        "calibrations": _calibrations(assets),
        "calibration_files": _files(assets),
        "card": CARD,
        "load": LOAD,
    }


def _parameters(path: Path) -> int:
    """Count the parameters of a safetensors file.

    Only the header is read: its length in the first 8 bytes, then JSON.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = serializer.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _calibrations(assets: Path) -> list[dict[str, Any]]:
    """Return the calibrations that ship with the package, ordered by codec."""
    found: list[dict[str, Any]] = []
    for path in assets.glob("*/calibration.json"):
        meta = serializer.loads(path.read_text(encoding="utf-8"))
        found.append({"codec": meta["method"], "path": str(path.parent)})
    return sorted(found, key=lambda calibration: calibration["codec"])


def _files(assets: Path) -> list[dict[str, str]]:
    """Return the calibrations that are one file each, ordered by method."""
    found = [path for path in assets.glob("*/tiny.*") if path.suffix in (".json", ".safetensors")]
    methods = [{"method": FILES.get(path.parent.name, path.parent.name), "path": str(path)} for path in found]
    return sorted(methods, key=lambda calibration: calibration["method"])


def render(facts: dict[str, Any]) -> str:
    """Format the properties as text."""
    shape = facts["shape"]
    parameters = f"{facts['parameters'] / 1e6:.2f} M parameters"
    heads = f"{shape['query_heads']} query heads and {shape['kv_heads']} KV heads of dimension {shape['head_dim']}"
    folders = [calibration["codec"] for calibration in facts["calibrations"]]
    *methods, last = [*folders, *(calibration["method"] for calibration in facts["calibration_files"])]
    pairs = [
        ("path", facts["path"]),
        ("class", f"{facts['kind']}, {parameters}, {size(facts['bytes'])}, {shape['dtype']}"),
        (
            "shape",
            f"{shape['layers']} layers, hidden size {shape['hidden']}, MLP size {shape['mlp']}, {heads}, vocabulary "
            f"of {shape['vocabulary']} tokens",
        ),
        ("abilities", facts["can"]),
        ("limits", facts["cannot"]),
        ("training", facts["trained"]),
        ("calibrations", f"{', '.join(methods)} and {last}, used by default"),
        ("model card", facts["card"]),
        ("usage", facts["load"]),
    ]
    return f"The embedded model, `tiny`\n{terms(pairs)}\n\n{paragraph('Commands use it by default.')}"
