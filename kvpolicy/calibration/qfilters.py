"""Filters for a model: the main direction of the queries of each KV head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.collect import tokens_per_window
from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.listener import Listener, check_finite, listening
from kvpolicy.hf.identity import identity
from kvpolicy.hf.model_spec import describe
from kvpolicy.protocols import Needs, Seen, State, View
from kvpolicy.selectors.filter_files import FILTER_FILES, FilterFile
from kvpolicy.text.errors import KVPolicyError

TOKENS = 3000
"""Tokens whose queries are used, as the authors have it."""

MIN_TOKENS = 128
"""The minimum number of tokens: a direction of fewer queries says little about other text."""


def calibrate_qfilters(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> FilterFile:
    """Find the filters of a model, and write them to a file that `qfilters:file=FILE` reads.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The file.
        tokens: About how many tokens are sampled, equally from all windows. Their queries in all layers are held at
            once, as fp32.
        seed: Seed of the sample.
        name: Name of the model in the file.
        progress: Whether to show a progress bar.
        force: Whether to replace a file that holds something else: another model, text or other options.

    Returns:
        The content of the file.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite;
            the text is too short; or `out` holds something else.

    Examples:
        >>> import tempfile, kvpolicy
        >>> model, _ = kvpolicy.tiny()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     content = calibrate_qfilters(model, [torch.arange(3, 140)], f"{folder}/filters.safetensors")
        >>> len(content.filters), content.filters[0].shape
        (8, torch.Size([4, 32]))
    """
    windows = as_windows(windows)
    count = sum(tokens_per_window(windows, tokens)) if windows else 0
    if count < MIN_TOKENS:
        raise KVPolicyError(
            f"The tokens to find filters with must be at least {MIN_TOKENS}, got {count}; try a longer text, or more "
            "tokens of it."
        )
    made = {"text_sha256": text_sha256(windows), "windows": len(windows), "tokens": count, "seed": seed}
    facts = FilterFile({}, identity(model, name), made)
    FILTER_FILES.check_free(out, facts, force=force)
    queries = sample_queries(model, windows, tokens=tokens, seed=seed, progress=progress)
    heads = describe(model.config).whole.heads  # pyright: ignore[reportArgumentType]
    layers = tqdm(queries.items(), desc="filters", disable=not progress)
    content = FilterFile({layer: query_filters(found, heads) for layer, found in layers}, facts.model, made)
    FILTER_FILES.save(out, content)
    return content


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
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, list[Tensor]] = {}
    counts = tokens_per_window(windows, tokens)
    for ids, count in zip(tqdm(windows, desc="queries", disable=not progress), counts, strict=True):
        sample = torch.randperm(len(ids), generator=generator, device="cpu")[:count].sort().values
        with listening(model, _Tap(sample=sample, found=found)) as run:
            run(ids)
    joined = {layer: torch.cat(parts, 1) for layer, parts in sorted(found.items())}
    for layer, queries in joined.items():
        check_finite("the queries", layer, queries)
    return joined


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tap(Listener):
    """A selector that keeps the queries of some tokens of a prompt, and the newest token.

    Attributes:
        sample: Which tokens of the prompt, [n] int64.
        found: The queries of each layer so far, each [Hq, n, D] fp32.
    """

    sample: Tensor
    found: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])

    @property
    def needs(self) -> Needs:
        """Queries as attention takes them."""
        return Needs(forward=True)

    def observe(self, state: State, seen: Seen, view: View) -> State:
        assert seen.forward is not None and seen.forward.queries is not None
        queries = seen.forward.queries[0]  # [Hq, P, D]
        sampled = queries.index_select(1, self.sample.to(queries.device))
        self.found.setdefault(view.layer_idx, []).append(sampled.float().cpu())
        return state
