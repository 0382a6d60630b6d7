"""Token spans of a text."""

from kvpolicy.reporting.token_spans import pieces as pieces
