"""Filters for a model: the main direction of the queries of each KV head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvpolicy.calibration.corpus import as_windows
from kvpolicy.calibration.listener import check_finite, listening
from kvpolicy.calibration.samples import sampled, tokens_per_window
from kvpolicy.protocols import View
from kvpolicy.statistics import ModuleCall, Results

TOKENS = 3000
"""Tokens whose queries are used, as the authors have it."""


def query_filters(queries: Tensor, heads: int) -> Tensor:
    """The filters of one layer: minus the mean, over the query heads of a KV head, of the main direction of queries.

    The main direction of a query head is the first right singular vector of the matrix of its queries, with the sign
    that gives most of them a positive product with it.

    Args:
        queries: Queries of each query head as attention takes them, [Hq, n, D].
        heads: KV heads, H.

    Returns:
        The filters, [H, D] fp32: the product with a key is smallest where that of the queries is largest.

    Examples:
        >>> queries = torch.tensor([[[3.0, 0.0], [2.0, 0.0], [-1.0, 0.0]]])
        >>> query_filters(queries, heads=1) + 0.0
        tensor([[-1.,  0.]])

    Source:
        Q-Filters (arXiv:2503.02812), and `make_filters.py` of its authors (NathanGodey/qfilters). As there,
        queries are rotated, not centered, and the mean over the group is not normalized, so that query heads of
        different directions make a short filter. Differences: the decomposition is in fp64 (theirs: fp32). If as many
        queries have a positive product as have a negative one, the larger sum decides, and equal sums give a filter
        of zeros; theirs keeps the sign that the decomposition happens to have. Tokens are drawn equally from windows
        of any length (theirs: from all tokens of 19 texts of 2,048).
    """
    queries = queries.double()
    direction = torch.linalg.svd(queries, full_matrices=False).Vh[:, 0]  # [Hq, D]
    # The first left singular vector, but for a positive factor; zeros if all queries are.
    products = (queries @ direction[..., None]).squeeze(-1)
    majority = products.sign().sum(-1)
    sign = torch.where(majority == 0, products.sum(-1), majority).sign()
    filters = -sign[:, None] * direction
    return filters.unflatten(0, (heads, -1)).mean(1).float()


def sample_queries(
    model: nn.Module, windows: Sequence[Tensor], *, tokens: int = TOKENS, seed: int = 0, progress: bool = False
) -> dict[int, Tensor]:
    """Run windows of tokens through a model, and keep the queries of a sample of the tokens.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n].
        tokens: About how many tokens are sampled, equally from all windows.
        seed: Seed of the sample.
        progress: Whether to show a progress bar.

    Returns:
        The queries of each layer that a policy manages as attention takes them, [Hq, n, D] fp32 on the CPU, by the
        index of the layer. The n tokens are the same in every layer and head.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite.

    Examples:
        >>> import kvpolicy
        >>> sample_queries(kvpolicy.tiny()[0], [torch.arange(3, 40)], tokens=20)[0].shape
        torch.Size([8, 20, 32])
    """
    windows = as_windows(windows)
    found: dict[int, list[Tensor]] = {}
    for ids, sample in sampled(windows, tokens_per_window(windows, tokens), seed, "queries", progress):

        def look(seen: Results, view: View, sample: Tensor = sample) -> None:
            queries = seen[ModuleCall].queries
            assert queries is not None
            chosen = queries[0].index_select(1, sample.to(queries.device))  # [Hq, n, D]
            found.setdefault(view.layer_idx, []).append(chosen.float().cpu())

        with listening(model, (ModuleCall(),), look) as run:
            run(ids)
    joined = {layer: torch.cat(parts, 1) for layer, parts in sorted(found.items())}
    for layer, queries in joined.items():
        check_finite("collected numbers", f"the queries of layer {layer}", queries)
    return joined
