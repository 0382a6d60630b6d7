"""A small config of any class of transformers, made from the names of its fields."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from kvpolicy_eval.families.sizes import FIRST_SPECIAL, HEADS, ONLY_IF_SET, SIZES, TOKEN, VOCABULARY, WINDOW

_OMIT = object()
"""Stands for the default of a field."""


def small_config(kind: type, fields: Mapping[str, Any] | None = None) -> Any:
    """A config of a class with small sizes, and full attention in some layers.

    Args:
        kind: Its class.
        fields: Values of fields that the rules do not know; of a config inside it, the fields of that.
    """
    config = _Shrinker().config(kind, dict(fields or {}))
    _mix_windows(config.get_text_config(decoder=True))
    return config


class _Shrinker:
    """Makes a config and those inside it; each special token is another one."""

    def __init__(self) -> None:
        self._tokens = itertools.count(FIRST_SPECIAL)

    def config(self, kind: Any, given: dict[str, Any]) -> Any:
        """A small config of a class."""
        return kind(**self._values(kind, given))

    def _values(self, kind: Any, given: dict[str, Any]) -> dict[str, Any]:
        """The fields of a small config that differ from their defaults."""
        try:
            default = kind()
        except Exception:  # some have fields that they require
            default = None
        inner = dict(getattr(kind, "sub_configs", None) or {})
        names = {field.name for field in dataclasses.fields(kind)}
        values = dict[str, Any]()
        for field in dataclasses.fields(kind):
            if field.name in inner:
                value = self._inner(field.name, inner[field.name], default, given)
            elif field.name in given:
                value = given.pop(field.name)
            else:
                value = self._value(field.name, _default(field), names)
            if value is not _OMIT:
                values[field.name] = value
        return values | given

    def _inner(self, name: str, kind: Any, default: Any, given: dict[str, Any]) -> Any:
        """The config of a part of the model, such as its text decoder."""
        usual = getattr(default, name, None)
        if inspect.isclass(kind) and kind.__name__ == "AutoConfig":
            kind = type(usual) if usual is not None and not isinstance(usual, dict) else None
        if kind is None or (usual is None and name not in given and default is not None):
            return _OMIT
        return self.config(kind, dict(given.pop(name, {})))

    def _value(self, name: str, usual: Any, names: set[str]) -> Any:
        """The value of a field by its name."""
        if name == "sliding_window":
            if usual is None:
                return _OMIT
            return WINDOW if "layer_types" in names else None  # without types, all layers would have it
        if name not in SIZES:
            return self._token() if TOKEN.search(name) and isinstance(usual, int) else _OMIT
        if (usual is None and name in ONLY_IF_SET) or isinstance(usual, bool):
            return _OMIT
        if isinstance(usual, list | tuple) and not name.endswith("token_id"):
            return _OMIT
        if name == "num_key_value_heads" and "kv_lora_rank" in names:
            return HEADS  # latent vectors are expanded to all of them
        return SIZES[name]

    def _token(self) -> int:
        return min(next(self._tokens), VOCABULARY - 1)


def _default(field: Any) -> Any:
    """The default of a field of a dataclass; None if it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _mix_windows(text: Any) -> None:
    """Give every second layer full attention, where a shortened pattern has windows alone."""
    types = getattr(text, "layer_types", None)
    if types and set(types) <= _WINDOWS.keys():
        text.layer_types = [kind if place % 2 == 0 else _WINDOWS[kind] for place, kind in enumerate(types)]


_WINDOWS = {
    "sliding_attention": "full_attention",
    "chunked_attention": "full_attention",
    "hybrid_sliding": "hybrid",
}
"""Types of layers with windows, and of those like them without."""
