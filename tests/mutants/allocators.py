"""Defects in layer and head allocators."""

from __future__ import annotations

from tests.mutants import Mutation

MUTATIONS = (
    Mutation(
        name="the floor of pages by head is always -1",
        file="kvpolicy/allocators/_heads.py",
        old="(-(-least // request.size)).clamp_min(1)",
        new="-(-least // request.size).clamp_min(1)",
        tests=(
            "tests/allocators/test_adakv.py",
            "tests/engine/test_head_walks.py",
            "tests/robust/test_uneven_heads.py",
        ),
    ),
    Mutation(
        name="the part that is safe loses a token to rounding",
        file="kvpolicy/allocators/adakv.py",
        old="self.safeguard / heads + 1e-9).long()",
        new="self.safeguard / heads).long()",
        tests=("tests/allocators/test_adakv.py",),
    ),
    Mutation(
        name="places of tokens that do not exist are safe",
        file="kvpolicy/allocators/adakv.py",
        old="(number < safe[:, None, None]) & (ranked > -torch.inf), torch.inf)",
        new="number < safe[:, None, None], torch.inf)",
        tests=("tests/allocators/test_adakv.py",),
    ),
    Mutation(
        name="the room of a streaming head is rounded down to whole pages",
        file="kvpolicy/allocators/duo.py",
        old="few = min(-(-room // size), pages // heads, most)",
        new="few = min(room // size, pages // heads, most)",
        tests=("tests/allocators/test_duo.py",),
    ),
    Mutation(
        name="one head more is streaming by a floating-point error",
        file="kvpolicy/allocators/duo.py",
        old="math.ceil(sparsity * (len(places) - 1) - 1e-9)",
        new="math.ceil(sparsity * (len(places) - 1))",
        tests=("tests/allocators/test_duo.py",),
    ),
    Mutation(
        name="streaming heads have no room for what the selector protects",
        file="kvpolicy/allocators/duo.py",
        old="room = protected.clamp_min(sinks + recent)",
        new="room = torch.full_like(protected, sinks + recent)",
        tests=("tests/allocators/test_duo.py",),
    ),
    Mutation(
        name="a head file without the last layer is taken",
        file="kvpolicy/allocators/head_files.py",
        old="if layers <= max(model.indices) or",
        new="if layers < max(model.indices) or",
        tests=("tests/allocators/test_head_files.py", "tests/allocators/test_duo.py"),
    ),
    Mutation(
        name="as many distinct cosines as groups are too few",
        file="kvpolicy/allocators/squeeze.py",
        old="or distinct < self.groups or",
        new="or distinct <= self.groups or",
        tests=("tests/allocators/test_squeeze.py",),
    ),
    Mutation(
        name="rounding decides between divisions of large values",
        file="kvpolicy/allocators/kmeans.py",
        old="tolerance = _RELATIVE_TIE * cost[0, -1] + _ROUNDING * ranked.square().amax()",
        new="tolerance = _RELATIVE_TIE * cost[0, -1]",
        tests=("tests/allocators/test_kmeans.py", "tests/allocators/test_squeeze.py"),
    ),
    Mutation(
        name="a profile of more layers is taken",
        file="kvpolicy/allocators/profile.py",
        old="if len(cosine) != layers:",
        new="if len(cosine) < layers:",
        tests=("tests/allocators/test_squeeze.py",),
    ),
    Mutation(
        name="a changed profile is not read again",
        file="kvpolicy/allocators/profile.py",
        old="status.st_mtime_ns, status.st_size)",
        new="0, 0)",
        tests=("tests/allocators/test_squeeze.py",),
    ),
    Mutation(
        name="of a score file with groups the first query head counts",
        file="kvpolicy/allocators/head_files.py",
        old="math.fsum(part) / len(part)",
        new="part[0]",
        tests=("tests/allocators/test_head_files.py",),
    ),
    Mutation(
        name="streaming heads take pages before retrieval heads",
        file="kvpolicy/allocators/duo.py",
        old="((retrieval, most), (streaming, most),",
        new="((streaming, most), (retrieval, most),",
        tests=("tests/allocators/test_duo.py",),
    ),
    Mutation(
        name="what the fewest heads protect must fit into every head",
        file="kvpolicy/allocators/adakv.py",
        old="ranks.all_heads((ranked == torch.inf).sum(-1)).amax(-1)",
        new="ranks.all_heads((ranked == torch.inf).sum(-1)).amin(-1)",
        tests=("tests/allocators/test_adakv.py",),
    ),
    Mutation(
        name="a single layer has the budget of the last one",
        file="kvpolicy/allocators/pyramid.py",
        old="if layers > 1 else 0.5",
        new="if layers > 1 else 1.0",
        tests=("tests/allocators/test_budgets.py",),
        equivalent="`waterfill` scales targets to the total, so that a single layer has all of it at any depth.",
    ),
)
