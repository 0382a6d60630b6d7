"""Operations of `kvpolicy cache` on files of saved caches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.hf.cache_header import read_header

if TYPE_CHECKING:
    from kvpolicy.hf.attachment import Hold
    from kvpolicy.hf.tile_size import TileSize
    from kvpolicy.policy import Policy


def make_file(
    model: Any,
    ids: Any,
    policy: Policy,
    out: Path,
    compress: str | None,
    *,
    tile: TileSize = None,
    hold: Hold = "plain",
) -> dict[str, Any]:
    """Prefill a text under a policy, and save its cache.

    Args:
        model: A model without a policy.
        ids: The text, [1, P].
        policy: The policy.
        out: The file to write.
        compress: How to compress the codes, or None.
        tile: The most tokens that a layer takes at a time, `auto`, or None.
        hold: How a prompt is held that waits, as `hold` of `attach`.

    Returns:
        The result of `describe` for the file, and `note`: that of `note_for` for the policy.
    """
    import torch

    from kvpolicy.hf.attach import attach
    from kvpolicy.hf.cache import PolicyCache
    from kvpolicy.hf.cache_names import cache_argument

    ids = ids.to(model.device)
    with torch.inference_mode(), attach(model, policy, tile=tile, hold=hold) as handle:
        cache = PolicyCache(model)
        model(ids, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
        cache.save(out, tokens=ids.cpu(), compress=compress)
    return describe(out) | {"note": note_for(handle.policy)}


def describe(path: Path) -> dict[str, Any]:
    """Facts from the header of a file; `held` has the fewest and the most tokens of a head, None if unknown."""
    header = read_header(path)
    held = [count for pair in header.get("held", {}).values() for count in pair]
    return {
        "file": str(path),
        "file_nbytes": path.stat().st_size,
        "kvpolicy": header["kvpolicy"],
        "format": header["format"],
        "policy": header["spec"],
        "model": header["model"]["name"],
        "model_type": header["model"]["type"],
        "dtype": header["dtype"],
        "rows": header["rows"],
        "columns": header["columns"],
        "has_tokens": header["has_tokens"],
        "held": [min(held), max(held)] if held else None,
        "nbytes": header["nbytes"],
        "full_nbytes": header["full_nbytes"],
        "compressed": bool(header["packed"]),
        "ranks": {name: header["ranks"][name] for name in ("rank", "size")},
    }


def check(path: Path) -> dict[str, Any]:
    """Read and verify a file.

    Raises:
        KVPolicyError: If it is not as it was written.
    """
    from kvpolicy.hf.cache_file import read

    content = read(path)
    return {"file": str(path), "tensors": len(content.tensors), "verified": True}


def note_for(policy: Policy) -> str:
    """Note for a user who saves a cache under this policy; empty if there is none."""
    every = [each for one in policy.distinct for each in one.selector.statistics]
    if not any(each.of_newest for each in every):
        return ""
    return (
        f"The selector of {policy} keeps what the last tokens of the text attend to. If these are a question, the "
        "cache may not answer another one; try uniform/adakv+kvzip, which does not depend on a question."
    )
