"""Plots of what a policy does; see `kvpolicy.reporting.plots`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpolicy.reporting.plots import accuracy_against_bytes as accuracy_against_bytes
    from kvpolicy.reporting.plots import budgets as budgets
    from kvpolicy.reporting.plots import bytes_by_kind as bytes_by_kind
    from kvpolicy.reporting.plots import kept as kept
    from kvpolicy.reporting.plots import layer_similarity as layer_similarity
    from kvpolicy.reporting.plots import token_text as token_text


if not TYPE_CHECKING:  # a type checker would accept every misspelled name

    def __getattr__(name: str) -> Any:
        from kvpolicy.reporting import plots

        try:
            return getattr(plots, name)
        except AttributeError:
            raise AttributeError(f"module 'kvpolicy.plots' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    from kvpolicy.reporting import plots

    return dir(plots)
