"""Bases for a model: the directions in which its keys and values vary most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvpolicy.calibration.collect import fisher_information
from kvpolicy.calibration.corpus import as_windows, text_sha256
from kvpolicy.calibration.listener import Listener, Sums, check_finite, listening
from kvpolicy.codecs import _files
from kvpolicy.hf.identity import identity
from kvpolicy.protocols import Needs, Seen, State, View
from kvpolicy.text.errors import KVPolicyError

MIN_TOKENS = 128
"""The minimum number of tokens: directions of fewer say little about other text."""

KEY_SPACES = ("rotated", "unrotated")


class Moments(NamedTuple):
    """First and second moments of vectors of each KV head, or of each group of heads, fp64.

    Attributes:
        mean: [H, D].
        product: Mean of the outer products, [H, D, D].
    """

    mean: Tensor
    product: Tensor


def calibrate_lowrank(
    model: nn.Module,
    windows: Sequence[Tensor],
    out: str | Path,
    *,
    key_spaces: Sequence[str] = KEY_SPACES,
    head_groups: Sequence[int] = (),
    fisher: bool = False,
    name: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Find the bases of a model's keys and values, and write them to a folder that `lowrank:calibration=DIR` reads.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n]; see `token_windows`.
        out: The folder.
        key_spaces: Whether keys are taken as attention sees them (`rotated`), without the rotary embedding
            (`unrotated`), or both.
        head_groups: Of how many KV heads bases are found together too, for `lowrank:head_group=N`; each divides the
            heads of the model.
        fisher: Whether to collect the Fisher information too, for `lowrank:ranks=fisher`. Each window then takes a
            backward pass and the memory of a training step.
        name: Name of the model in the calibration.
        progress: Whether to show a progress bar.
        force: Whether to replace a finished calibration of another model or text, or with other options.

    Returns:
        The metadata that were written with the tensors. `energy` is the share of the variance in the first quarter of
        the directions, by part (such as `values`), a mean over layers and heads.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, has no rotary embedding that could be
            undone, needs no gradients for `fisher`, or produces numbers that are not finite; a group of heads does not
            divide them; the text is too short; or `out` holds another calibration.

    Examples:
        >>> import tempfile, kvpolicy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     meta = calibrate_lowrank(kvpolicy.tiny()[0], [torch.arange(3, 140)], folder)
        >>> sorted(meta["energy"])
        ['keys.post', 'keys.pre', 'values']
    """
    unknown = sorted({*key_spaces} - {*KEY_SPACES})
    if unknown or not key_spaces:
        raise KVPolicyError(
            f"The key spaces must be of {' and '.join(KEY_SPACES)}, got {', '.join(unknown) or 'none'}; try rotated."
        )
    described = identity(model, name)
    check_groups(head_groups, described["heads"])
    windows = as_windows(windows)
    count = sum(len(ids) for ids in windows)
    if count < MIN_TOKENS:
        raise KVPolicyError(
            f"The tokens to find bases with must be at least {MIN_TOKENS}, got {count}; try a longer text."
        )
    facts: dict[str, Any] = {
        "model": described,
        "text_sha256": text_sha256(windows),
        "windows": len(windows),
        "tokens": count,
        "key_spaces": sorted({*key_spaces}),
        "head_groups": sorted({*head_groups}),
        "fisher": fisher,
    }
    _files.folder_of("lowrank").check_free(out, _files.CalibrationFile(facts, {}), force=force)
    tensors: dict[str, Tensor] = {}
    for layer, both in (fisher_information(model, windows, progress=progress) if fisher else {}).items():
        tensors[f"fisher.{layer}"] = torch.tensor(both, dtype=torch.float32, device="cpu")
    groups = tuple(facts["head_groups"])
    moments = collect_moments(model, windows, unrotated="unrotated" in key_spaces, groups=groups, progress=progress)
    unwanted = ("keys.post", "queries") if "rotated" not in key_spaces else ()
    shares: dict[str, list[float]] = {}
    for layer, parts in tqdm(moments.items(), desc="bases", disable=not progress):
        for part in sorted(part for part in parts if not part.startswith(unwanted)):
            own = parts[part]
            found = basis_of(own, centered=part != "queries")
            tensors |= {f"{part}.{what}.{layer}": t for what, t in found.items()}
            energy = found["energy"].double()
            first = energy[:, : -(-energy.shape[-1] // 4)].sum(-1) / energy.sum(-1).clamp_min(1e-30)
            if part in ("keys.pre", "keys.post", "values"):
                shares.setdefault(part, []).append(float(first.mean()))
    meta = facts | {"energy": {part: round(sum(own) / len(own), 4) for part, own in sorted(shares.items())}}
    _files.save(out, "lowrank", meta, tensors)
    return meta


def basis_of(moments: Moments, centered: bool = True) -> dict[str, Tensor]:
    """The principal components of the vectors of each head.

    Args:
        moments: Of the vectors.
        centered: Whether the mean is subtracted first.

    Returns:
        `mean` [H, D] fp32, if centered; `basis` [H, D, D] fp16, whose columns are directions of falling `energy`, the
        variance along them, [H, D] fp32.

    Examples:
        >>> moments = Moments(torch.zeros(1, 2).double(), torch.diag(torch.tensor([1.0, 4.0])).double()[None])
        >>> basis_of(moments)["energy"], basis_of(moments)["basis"].abs().tolist()
        (tensor([[4., 1.]]), [[[0.0, 1.0], [1.0, 0.0]]])
    """
    product = moments.product
    if centered:
        product = product - moments.mean[:, :, None] * moments.mean[:, None]
    energy, basis = torch.linalg.eigh(product)
    found = {"basis": basis.flip(-1).half(), "energy": energy.flip(-1).clamp_min(0).float()}
    return found | ({"mean": moments.mean.float()} if centered else {})


def check_groups(groups: Sequence[int], heads: int) -> None:
    """Refuse groups of KV heads that do not divide the heads of a model.

    Raises:
        KVPolicyError: Naming the group.
    """
    for group in groups:
        if group < 2 or heads % group:
            raise KVPolicyError(
                f"A group of heads must be at least 2 and divide the {heads} KV heads of the model, got {group}; try "
                f"{heads}."
            )


def collect_moments(
    model: nn.Module,
    windows: Sequence[Tensor],
    *,
    unrotated: bool = True,
    groups: Sequence[int] = (),
    progress: bool = False,
) -> dict[int, dict[str, Moments]]:
    """Run windows of tokens through a model once, and add up the moments of keys, values and queries.

    Args:
        model: A causal language model without a policy attached.
        windows: Token ids, each [n] or [1, n].
        unrotated: Whether to also take keys without the rotary embedding.
        groups: Of how many KV heads moments are added up together too: of g heads, their vectors are one of g D
            channels, and the part has `.joint` and g behind its name.
        progress: Whether to show a progress bar.

    Returns:
        By the index of the layer and by part, moments on the CPU: `keys.post` of keys as attention sees them,
        `keys.pre` of unrotated keys, `values`, and `queries` of all query heads of a KV head together.

    Raises:
        KVPolicyTypeError: If the windows are not token ids.
        KVPolicyError: If the model is not supported, has a policy attached, or produces numbers that are not finite.
    """
    tap = _Tap(unrotated=unrotated, groups=tuple(groups))
    with listening(model, tap) as run:
        for ids in tqdm(as_windows(windows), desc="moments", disable=not progress):
            run(ids)
    found: dict[int, dict[str, Moments]] = {}
    for layer, parts in sorted(tap.found.items()):
        for part, sums in parts.items():
            check_finite(part, layer, *sums.total)
            found.setdefault(layer, {})[part] = Moments(*sums.means())
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tap(Listener):
    """A selector that adds up moments of prompts, and keeps the newest token.

    Attributes:
        unrotated: Whether to take keys without the rotary embedding too.
        groups: Of how many heads sums are taken together.
        found: The sums of each layer and part so far.
    """

    unrotated: bool
    groups: tuple[int, ...] = ()
    found: dict[int, dict[str, Sums]] = field(default_factory=dict[int, dict[str, Sums]])

    @property
    def needs(self) -> Needs:
        """Keys and values of a prompt, and queries as attention takes them."""
        return Needs(forward=True, prompt_vectors=True, unrotated_keys=self.unrotated)

    def observe(self, state: State, seen: Seen, view: View) -> State:
        assert seen.forward is not None and seen.forward.queries is not None
        assert seen.keys is not None and seen.values is not None
        heads = seen.keys.shape[1]
        queries = seen.forward.queries[0].unflatten(0, (heads, -1)).flatten(1, 2)
        parts = {"keys.post": seen.keys[0], "values": seen.values[0]}
        if seen.unrotated is not None:
            parts["keys.pre"] = seen.unrotated[0]
        parts |= {
            f"{part}.joint{group}": x.unflatten(0, (-1, group)).transpose(1, 2).flatten(2)
            for part, x in parts.items()
            for group in self.groups
        }
        parts["queries"] = queries
        own = self.found.setdefault(view.layer_idx, {})
        for part, vectors in parts.items():
            x = vectors.double()
            own.setdefault(part, Sums()).add(x.shape[1], x.sum(1).cpu(), (x.mT @ x).cpu())
        return state
