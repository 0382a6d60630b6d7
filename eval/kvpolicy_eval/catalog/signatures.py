"""Signatures of strategies on API pages: an extension of griffe, which reads sources without importing them.

`mkdocs.yml` names this file.
"""

from __future__ import annotations

from typing import Any

import griffe

_STRATEGY = "kvpolicy.text.strategy.strategy"
_DATACLASS = griffe.ExprCall(
    function=griffe.ExprName("dataclasses.dataclass"), arguments=[griffe.ExprKeyword("kw_only", "True")]
)


class Strategies(griffe.Extension):
    """Show a class below `@strategy` as the dataclass that it is, with the defaults that constraints give."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Rewrite the decorator and the values of the fields, which griffe's own extension reads afterwards."""
        for decorator in cls.decorators:
            if isinstance(decorator.value, griffe.Expr) and decorator.value.canonical_path == _STRATEGY:
                decorator.value = _DATACLASS
                for member in cls.attributes.values():
                    member.value = default_of(member.value)


def default_of(value: Any) -> Any:
    """The default of a field, which is the last argument by position of a constraint."""
    if not isinstance(value, griffe.ExprCall) or value.canonical_path == "dataclasses.field":
        return value
    if value.function.canonical_name == "tiny_or":
        return "'tiny'"
    default = [argument for argument in value.arguments if not isinstance(argument, griffe.ExprKeyword)][-1]
    if isinstance(default, griffe.ExprName) and value.function.canonical_name == "checked":
        return griffe.ExprCall(function=default, arguments=[])
    return default
