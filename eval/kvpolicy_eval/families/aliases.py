"""What people call the models of each name of transformers, from `aliases.yaml`."""

from __future__ import annotations

from importlib.resources import files

import yaml


def aliases() -> dict[str, list[str]]:
    """Public names of models, by the name of their config in transformers.

    >>> aliases()["smollm3"]
    ['SmolLM3']
    """
    return yaml.safe_load((files("kvpolicy_eval.families") / "aliases.yaml").read_text(encoding="utf-8"))
