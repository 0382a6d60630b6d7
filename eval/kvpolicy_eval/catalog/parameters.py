"""`python -m kvpolicy_eval.catalog.parameters`: write the names and shapes of the parameters of the shipped models.

Plans count weights from this file without transformers. Run it in the root of the source tree after a config was added.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvpolicy.hf.embedded import SHIPPED, config_of
from kvpolicy.text.formats import replace_file

FILE = Path("kvpolicy") / "assets" / "parameters.json"
_LAYER = re.compile(r"^(.+?)\.(\d+)\.(.+)$")


def parameters_of(name: str) -> dict[str, Any]:
    """The parameters of a shipped model, as the file has them.

    Layers have the same parameters, which are written once: `*` stands for the index of the layer.

    Raises:
        ValueError: If layers of a stack differ.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config_of(name))
    layers: dict[str, int] = {}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    counts: dict[str, int] = {}
    for full, parameter in model.named_parameters():
        match = _LAYER.match(full)
        pattern = full
        if match:
            stack, index, leaf = match.groups()
            pattern = f"{stack}.*.{leaf}"
            layers[stack] = max(layers.get(stack, 0), int(index) + 1)
        shapes.setdefault(pattern, set()).add(tuple(parameter.shape))
        counts[pattern] = counts.get(pattern, 0) + 1
    for pattern, found in shapes.items():
        stack, star, _ = pattern.partition(".*.")
        if len(found) > 1 or (star and counts[pattern] != layers[stack]):
            raise ValueError(f"All layers must have the same {pattern}, got {sorted(found)} in {name}.")
    own = dict(model.named_parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): full for full, parameter in own.items()}
    head = model.get_output_embeddings()
    return {
        "layers": layers,
        "parameters": {pattern: list(next(iter(found))) for pattern, found in shapes.items()},
        "tied": {full: names[id(parameter)] for full, parameter in every.items() if full not in own},
        "head": next(full for full, module in model.named_modules() if module is head),
        "tp_plan": dict(model.tp_plan),
    }


def main() -> None:
    """Write the file."""
    text = json.dumps({name: parameters_of(name) for name in SHIPPED}, indent=1)
    # A shape on one line.
    text = re.sub(r"\[\s+([\d,\s]+?)\s+\]", lambda found: f"[{', '.join(found[1].split())}]".replace(",,", ","), text)
    replace_file(FILE, (text + "\n").encode())
    print(f"{FILE}: {len(SHIPPED)} models")


if __name__ == "__main__":
    main()
