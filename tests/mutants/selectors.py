"""Defects in selectors."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="half of the tokens are a majority",
        file="kvpolicy/selectors/_crush.py",
        old="return (bits & valid).sum(-1) * 2 > valid.sum(-1)",
        new="return (bits & valid).sum(-1) * 2 >= valid.sum(-1)",
        tests=("tests/selectors/test_crush_parts.py",),
    ),
    Mutation(
        name="a signature loses a bit to rounding",
        file="kvpolicy/selectors/_crush.py",
        old="(1 - quantile) + 1e-9).floor()",
        new="(1 - quantile)).floor()",
        tests=("tests/selectors/test_crush_parts.py",),
    ),
    Mutation(
        name="padding counts in the distance of the newest token",
        file="kvpolicy/selectors/_crush.py",
        old="size = int(view.length.max()) + 1  #",
        new="size = int(view.length.max())  #",
        tests=("tests/selectors/test_crush_parts.py",),
    ),
    Mutation(
        name="buckets begin one rank early",
        file="kvpolicy/selectors/_crush.py",
        old="return ((rank + 1) * count[..., None] - 1).div(",
        new="return (rank * count[..., None]).div(",
        tests=("tests/conformance/test_options.py",),
    ),
    Mutation(
        name="the newest page is not counted by itself",
        file="kvpolicy/selectors/_pages.py",
        old="return (1 - (1 - tokens) // page) * page if page else tokens",
        new="return -(-tokens // page) * page if page else tokens",
        tests=("tests/conformance/test_options.py", "tests/test_policy.py"),
    ),
    Mutation(
        name="a page that fits exactly is left out",
        file="kvpolicy/selectors/_pages.py",
        old="cumsum(-1) <= capacity[:, None, None]",
        new="cumsum(-1) < capacity[:, None, None]",
        tests=("tests/conformance/test_options.py",),
    ),
    Mutation(
        name="the first query behind the sinks does not count",
        file="kvpolicy/selectors/expected.py",
        old="counts = (view.length > self.sinks).float()",
        new="counts = (view.length > self.sinks + 1).float()",
        tests=("tests/selectors/test_expected.py", "tests/engine/test_query_moments.py"),
    ),
    Mutation(
        name="the length at which slots were scored is that of the row",
        file="kvpolicy/selectors/expected.py",
        old="ranked=view.length.clone()",
        new="ranked=view.length",
        tests=("tests/selectors/test_expected.py", "tests/engine/test_rank_schedule.py"),
    ),
    Mutation(
        name="only the first tile of keys is scored",
        file="kvpolicy/selectors/expected.py",
        old="seen.keys.split(_TILE, 2)], -1)",
        new="seen.keys.split(_TILE, 2)][:1], -1)",
        tests=("tests/selectors/test_limits.py",),
    ),
    Mutation(
        name="a window is rounded up by its floating-point error",
        file="kvpolicy/selectors/h2o.py",
        old="self.recent - 1e-9).ceil()",
        new="self.recent).ceil()",
        tests=("tests/selectors/test_limits.py",),
    ),
    Mutation(
        name="invalid tokens count in the mean direction of keys",
        file="kvpolicy/selectors/keydiff.py",
        old="if not bool(view.valid.all()):",
        new="if not bool(view.valid.any()):",
        tests=("tests/selectors/test_keydiff.py",),
    ),
    Mutation(
        name="a generated token is compared before it is part of the anchor",
        file="kvpolicy/selectors/keydiff.py",
        old="""        state.anchor.add_(unit)
        cosine = (unit * F.normalize(state.anchor, dim=-1)).sum(-1, keepdim=True)
""",
        new="""        cosine = (unit * F.normalize(state.anchor, dim=-1)).sum(-1, keepdim=True)
        state.anchor.add_(unit)
""",
        tests=("tests/selectors/test_keydiff.py",),
    ),
    Mutation(
        name="a head that evicts nothing has representatives",
        file="kvpolicy/selectors/kvcrush.py",
        old="count = torch.where(total > view.budget[:, None], count, 0)",
        new="count = torch.where(total >= 0, count, 0)",
        tests=("tests/conformance/test_options.py", "tests/conformance/test_layer.py"),
    ),
    Mutation(
        name="all layers have the anchor of the first",
        file="kvpolicy/selectors/kvcrush.py",
        old="self.seed * 1000003 + view.layer_idx",
        new="self.seed * 1000003",
        tests=("tests/conformance/test_options.py",),
    ),
    Mutation(
        name="the base ranks again with the whole budget",
        file="kvpolicy/selectors/kvcrush.py",
        old="base.rerank(state.base, seen, self._base_view(view))",
        new="base.rerank(state.base, seen, view)",
        tests=("tests/selectors/test_crush_parts.py",),
    ),
    Mutation(
        name="replayed tokens without attention rank as if they were not replayed",
        file="kvpolicy/selectors/kvzip.py",
        old="torch.where(largest < 0, state.score, score)",
        new="torch.where(largest <= 0, state.score, score)",
        tests=("tests/selectors/test_limits.py",),
    ),
    Mutation(
        name="sinks may take the whole budget",
        file="kvpolicy/selectors/kvzip.py",
        old="sinks = (view.budget // 2).clamp_max(self.sinks)",
        new="sinks = view.budget.clamp_max(self.sinks)",
        tests=("tests/engine/test_replay.py",),
    ),
    Mutation(
        name="sums and numbers of probes share their memory",
        file="kvpolicy/selectors/probe.py",
        old="return Salience(empty, empty.clone())",
        new="return Salience(empty, empty)",
        tests=("tests/selectors/test_limits.py",),
    ),
    Mutation(
        name="counts turn negative after a chunk that is longer than the window",
        file="kvpolicy/selectors/scissorhands.py",
        old="left = (1 - seen.added / self.window).clamp_min(0).float()",
        new="left = (1 - seen.added / self.window).float()",
        tests=("tests/selectors/test_limits.py",),
    ),
    Mutation(
        name="recent tokens may displace sinks",
        file="kvpolicy/selectors/scissorhands.py",
        old="torch.minimum(view.budget // 2, view.budget - self.sinks).clamp(1, self.recent)",
        new="(view.budget // 2).clamp(1, self.recent)",
        tests=("tests/selectors/test_scissorhands.py",),
    ),
    Mutation(
        name="the window may be one more than half the budget",
        file="kvpolicy/selectors/snapkv.py",
        old="return (view.budget // 2).clamp(1, self.window)",
        new="return ((view.budget + 1) // 2).clamp(1, self.window)",
        tests=("tests/conformance/test_layer.py",),
    ),
    Mutation(
        name="one sink more is kept",
        file="kvpolicy/selectors/streaming.py",
        old="view.positions < self.sinks",
        new="view.positions <= self.sinks",
        tests=("tests/conformance/test_layer.py",),
    ),
    Mutation(
        name="a generated token scores by the head that attends most",
        file="kvpolicy/selectors/tova.py",
        old="view.ranks.head_mean(row.flatten(1, 2))[:, None]",
        new="row.flatten(1, 2).amax(1, keepdim=True)",
        tests=("tests/conformance/test_layer.py",),
    ),
    Mutation(
        name="the newest token may be evicted by its own attention",
        file="kvpolicy/selectors/tova.py",
        old="return keep_always(state.score, view.newest(1))",
        new="return state.score",
        tests=("tests/conformance/test_layer.py",),
    ),
    Mutation(
        name="page sums count what must be kept as nothing",
        file="kvpolicy/selectors/_pages.py",
        old="total((priority == torch.inf).float()) > 0",
        new="total((priority == torch.inf).float()) > 1",
        tests=("tests/conformance/test_options.py",),
    ),
)
