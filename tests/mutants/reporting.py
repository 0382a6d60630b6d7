"""Defects in distortions, reports and texts."""

from __future__ import annotations

from tests.mutants import Mutation

CODECS = ("tests/eval/common/test_codecs.py", "kvpolicy/distortion.py")

MUTATIONS = (
    Mutation(
        name="tokens in full precision count in the distortion",
        file="kvpolicy/distortion.py",
        old="    coded[..., : layer.layout.exact] = False\n",
        new="",
        tests=("tests/test_distortion.py",),
    ),
    Mutation(
        name="the distortion of half precision is computed in half precision",
        file="kvpolicy/distortion.py",
        old="error = (decoded.float() - original.float()).square().sum(-1)[coded].sum()",
        new="error = (decoded - original).square().sum(-1)[coded].sum()",
        tests=("tests/test_distortion.py",),
    ),
    Mutation(
        name="a report has the tokens of the first head",
        file="kvpolicy/reporting/report.py",
        old="kept=_integers(kept.amax(-1))",
        new="kept=_integers(kept[:, 0])",
        tests=("tests/test_report_edges.py",),
    ),
    Mutation(
        name="characters of four bytes are cut",
        file="kvpolicy/reporting/token_spans.py",
        old="elif len(group) == 4:",
        new="elif len(group) == 3:",
        tests=("tests/test_report_edges.py",),
    ),
    Mutation(
        name="a share that is just below its level by rounding has the one below",
        file="kvpolicy/reporting/token_spans.py",
        old="int(share * 5 + 1e-9)",
        new="int(share * 5)",
        tests=("tests/test_report_edges.py",),
    ),
    Mutation(
        name="a word that fills the line moves to the next",
        file="kvpolicy/reporting/token_spans.py",
        old="if sum(cells(text) for text, _ in last) + cells(piece[0]) <= width:",
        new="if sum(cells(text) for text, _ in last) + cells(piece[0]) < width:",
        tests=("tests/test_report_edges.py",),
    ),
)
