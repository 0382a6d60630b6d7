"""Which policies are compared on real weights: the order of the board's selectors, and that of its codecs."""

from __future__ import annotations

SELECTORS = (
    "kvzip@0.5",
    "kvzip@0.3",
    "keydiff@0.5",
    "expected@0.5",
    "knorm@0.5",
    "snapkv@0.5",
    "snapkv@0.3",
    "snapkv@0.2",
    "h2o@0.5",
    "h2o@0.3",
    "tova@0.5",
    "streaming@0.5",
    "squeeze+snapkv@0.2",
    "squeeze+kvcrush/snapkv@0.3",
    "uniform/adakv+kvzip@0.3",
    "rkv@0.3",
    "random@0.3",
)
CODECS = (
    "tokenwise:bits=8",
    "tokenwise:bits=4",
    "tokenwise:bits=4:group_size=32",
    "kivi:bits=4",
    "kivi:bits=2",
    "turboquant:bits=4",
    "bfp",
    "bfp:mantissa=5",
    "bfp:block_channels=8",
    "rotate",
    "zipcache",
    "gear",
)
OTHERS = (
    "kvzip+tokenwise:bits=4@0.5",
    "snapkv+tokenwise:bits=4@0.3",
    "uniform/adakv+kvzip+tokenwise:bits=4@0.3",
    "full+quest:read=0.1:dense=0",
    "full+sparq:read=0.1:dense=0",
)

POLICIES = ("full", *SELECTORS, *CODECS, *OTHERS)
"""All that is measured, in the order of the table."""
