"""Undo and redo a model's rotary embedding with the model's own functions.

Keys arrive in the cache rotated. A codec may want them unrotated: then they lie in fewer directions, because their
content does not depend on the position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpolicy.kernels.compiled import call, is_compiled
from kvpolicy.kernels.products import rotate_halves
from kvpolicy.text.errors import KVPolicyError

_TILE = 512
"""Tokens whose rotation is undone at a time, where it is that of all."""

INSTEAD = {
    "codec": "a codec that stores rotated keys, such as tokenwise.",
    "reader": "a reader that reads keys as they are stored, such as quest.",
    "selector": "another selector.",
}
"""Alternatives that do not undo the rotation, by the part that does."""


class Rope:
    """The rotary embedding of one layer; the identity for a layer without one."""

    def __init__(
        self, tables: nn.Module | None, apply_pairs: Callable[..., Any] | None, layer_type: str | None
    ) -> None:
        """Wrap a model's embedding.

        Args:
            tables: The module that computes cos and sin, or None.
            apply_pairs: The function that rotates queries and keys by them, or None.
            layer_type: The type of the layer, where the tables depend on it.
        """
        self._tables = tables
        self._apply_pairs = apply_pairs
        self._layer_type = layer_type
        prefix = "" if layer_type is None else f"{layer_type}_"
        self.scaling: float = float(getattr(tables, f"{prefix}attention_scaling", 1.0))
        self._frequencies_name = f"{prefix}inv_freq"
        self._angles: int = getattr(
            tables, self._frequencies_name, torch.empty(0, dtype=torch.float32, device="cpu")
        ).numel()
        self._rotates_halves: bool | None = None  # None: not tried yet
        self._found_planes: dict[int, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Rope:
        """Copies of a cache share the model's embedding."""
        return self

    @property
    def rotates(self) -> bool:
        """Whether the layer has an embedding."""
        return self._tables is not None and self._apply_pairs is not None

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate keys [B, H, n, D] to positions [B, H, n] (or [B, 1, n]), fp32."""
        return self._rotate(keys, positions, undo=False)

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotation of keys [B, H, n, D] at positions [B, H, n] (or [B, 1, n]), fp32."""
        self.frequencies(keys.shape[-1])  # known before a step is compiled
        return self._rotate(keys, positions, undo=True)

    def frequencies(self, head_dim: int) -> Tensor | None:
        """Radians per position of each channel pair, [1, 1, 1, D / 2] fp32, as `rotate_halves` takes them.

        None if the embedding is another one, or if a compiled step asks first.
        """
        if self._rotates_halves is None and not torch.compiler.is_compiling():
            self._rotates_halves = self._try_halves()
        if not self._rotates_halves or 2 * self._angles != head_dim:
            return None
        return getattr(self._tables, self._frequencies_name).float()[None, None, None]

    def _try_halves(self) -> bool:
        """Whether the embedding is `rotate_halves`, times the scaling; its frequencies never change."""
        frequencies = getattr(self._tables, self._frequencies_name, None)
        if not isinstance(frequencies, Tensor) or frequencies.is_meta or self._apply_pairs is None:
            return False
        # Tried, and not concluded from names: models may pair other channels, or rotate the other way round.
        positions = torch.tensor([0, 1, 7, 300, 5000], device=frequencies.device)[None]
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(1, 1, 5, 2 * self._angles, generator=generator, dtype=torch.float32, device="cpu").to(
            frequencies.device
        )
        wanted = rotate_halves(vectors, positions[:, None], frequencies.float()[None, None, None]) * self.scaling
        return torch.allclose(self.rotate(vectors, positions[:, None]), wanted, atol=1e-5)

    def unrotate_rows(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotation of vectors [B, Hq, n, D] with the same positions [B, n] in all heads, fp32."""
        return self._apply(vectors.float(), self._angles_at(vectors, positions.clamp_min(0), undo=True))

    def mean_rotation(self, vectors: Tensor, first: Tensor, ahead: int | Tensor) -> Tensor:
        """The mean of vectors [B, n, m, D] rotated to positions `ahead` of `first` [B], fp32.

        Args:
            vectors: What is rotated.
            first: A position of each row.
            ahead: How many positions from `first` on, or distances from it, [n] int64.
        """
        # A rotation is linear in its cosines and sines, so that the mean over positions is one rotation by their means.
        if isinstance(ahead, int):
            ahead = torch.arange(ahead, device=first.device)
        positions = first[:, None] + ahead.to(first.device)
        angles = self._angles_at(vectors, positions, undo=False)
        means = None if angles is None else tuple(t.mean(1, keepdim=True) for t in angles)
        return self._apply(vectors.float(), means)

    def pair_lengths(self, vectors: Tensor) -> Tensor:
        """The length of vectors [..., D] in each plane that the embedding rotates, [..., F] fp32; no plane without one.

        Such lengths are the same at every position.
        """
        one, other = self._planes(vectors.shape[-1], vectors.device)
        return torch.hypot(vectors[..., one].float(), vectors[..., other].float())

    def _planes(self, dim: int, device: torch.device) -> Tensor:
        """The two channels of each plane, [2, F] int64."""
        if not self.rotates:
            return torch.empty(2, 0, dtype=torch.int64, device=device)
        if dim not in self._found_planes:
            # Tried, and not concluded from names: models pair a channel with the next one, or with that half a head on.
            basis = torch.eye(dim, device=device, dtype=torch.float32)[None, None]
            turned = self.rotate(basis, torch.ones(1, 1, dim, dtype=torch.int64, device=device))[0, 0]
            far = turned.abs().fill_diagonal_(0)
            partner = far.argmax(-1)
            number = torch.arange(dim, device=device)
            first = (far.amax(-1) > 0) & (number < partner)
            self._found_planes[dim] = torch.stack([number[first], partner[first]])
        return self._found_planes[dim].to(device)

    def _angles_at(self, like: Tensor, positions: Tensor, *, undo: bool) -> tuple[Tensor, ...] | None:
        """Cosines and sines at positions [B, n], each [B, n, angles] fp32; None for a layer without an embedding."""
        if self._tables is None or self._apply_pairs is None:
            return None
        more = {} if self._layer_type is None else {"layer_type": self._layer_type}
        # The tables take only dtype and device from this argument; a half-precision one would round cos and sin.
        cos, sin = self._tables(like.new_empty(1, dtype=torch.float32), positions, **more)
        cos = cos.float()
        sin = sin.float()
        # The tables include the attention scaling: divide by it once to remove it, and once to undo it.
        return (cos / self.scaling**2, -sin / self.scaling**2) if undo else (cos, sin)

    def _apply(self, vectors: Tensor, angles: tuple[Tensor, ...] | None) -> Tensor:
        """Rotate fp32 vectors [B, n, m, D] by cosines and sines [B, m or 1, angles]."""
        if angles is None or self._apply_pairs is None:
            return vectors
        cos, sin = angles
        width = cos.shape[-1] * (2 if cos.shape[-1] == self._angles else 1)  # an angle may serve two channels (GPT-OSS)
        # The model's function rotates queries and keys at once. One head stands for the keys, so that little is wasted.
        rotated, _ = self._apply_pairs(vectors[..., :width], vectors[:, :1, :, :width], cos, sin)
        return rotated if width == vectors.shape[-1] else torch.cat([rotated, vectors[..., width:]], -1)

    def _rotate(self, keys: Tensor, positions: Tensor, *, undo: bool) -> Tensor:
        keys = keys.float()
        if self._tables is None or self._apply_pairs is None:
            return keys
        # Heads may hold different tokens, but the model's tables have one position per row and column, for all heads.
        # So the slots of all heads become the columns of a single head.
        batch, heads, count, dim = keys.shape
        at = positions.clamp_min(0).expand(batch, heads, count).reshape(batch, heads * count)
        flat = keys.reshape(batch, 1, heads * count, dim)
        return self._apply(flat, self._angles_at(flat, at, undo=undo)).view(batch, heads, count, dim)


class KeyRotation(NamedTuple):
    """How a model rotates the keys of a layer, and what follows of it for vectors without their rotation.

    Attributes:
        rope: The layer's embedding, or None.
        offset: Offset of the embedding's positions from a row's positions, [B]; None if they are the same.
    """

    rope: Rope | None
    offset: Tensor | None = None

    def mean(self, vectors: Tensor, first: Tensor, ahead: int | Tensor) -> Tensor:
        """See `Rope.mean_rotation`; the vectors as they are without an embedding."""
        return vectors.float() if self.rope is None else self.rope.mean_rotation(vectors, first, ahead)

    def pair_lengths(self, vectors: Tensor) -> Tensor:
        """See `Rope.pair_lengths`; of no plane without an embedding."""
        return vectors.new_zeros(*vectors.shape[:-1], 0) if self.rope is None else self.rope.pair_lengths(vectors)

    def undone(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys [B, H, n, D] at the rows' positions [B, H, n] (-1 for none) without their rotation, fp32."""
        if self.rope is None:
            return keys.float()
        at = positions if self.offset is None else positions + self.offset[:, None, None].to(positions.device)
        plain = torch.empty_like(keys, dtype=torch.float32)
        # In tiles: angles of all heads' tokens, and what is made of them, would take several times as much.
        for start in range(0, keys.shape[2], _TILE):
            tile = slice(start, start + _TILE)
            plain[:, :, tile] = self.rope.unrotate(keys[:, :, tile], at[:, :, tile])
        return plain


class SlotRotary:
    """The rotary embedding of one stage's slots; implements `kvpolicy.protocols.RotaryView`."""

    def __init__(self, rope: Rope, positions: Tensor, newest: Tensor, offset: Tensor) -> None:
        """Rotate to the positions of the slots.

        Args:
            rope: The layer's embedding.
            positions: Positions of the slots, [B, H, C].
            newest: Position of the newest token, [B].
            offset: Offset of the embedding's positions from a row's positions, [B].
        """
        self._rope = rope
        self._positions = positions + offset[:, None, None]
        self._newest = newest + offset
        self.occupied: Tensor = positions >= 0

    def keys(self, keys: Tensor, at: slice | Tensor) -> Tensor:
        """Rotate keys of the slots `at` to their positions, fp32; see `RotaryView.keys`."""
        positions = self._positions[..., at] if isinstance(at, slice) else self._positions.gather(-1, at)
        frequencies = self._rope.frequencies(keys.shape[-1]) if is_compiled(self._positions) else None
        if frequencies is None:
            return self._rope.rotate(keys, positions)
        rotated = call(rotate_halves, keys, positions.clamp_min(0), frequencies)
        return rotated if self._rope.scaling == 1 else rotated * self._rope.scaling

    def queries(self, queries: Tensor, distance: int) -> Tensor:
        """Rotate the newest token's queries as if it stood `distance` tokens after unrotated keys."""
        here = self._newest[:, None, None].expand(*queries.shape[:3])
        return self._rope.rotate(self._rope.unrotate(queries, here), torch.full_like(here, distance))


def one_part(position_ids: Tensor | None) -> Tensor | None:
    """Positions of several parts (M-RoPE), [parts, B, P], as [B, P] where all parts are equal, as in a text."""
    if position_ids is None or position_ids.dim() != 3 or not bool((position_ids == position_ids[:1]).all()):
        return position_ids
    return position_ids[0]


def rope_offset(
    position_ids: Tensor | None,
    valid: Tensor | None,
    columns: int,
    seen: Tensor,
    new: int,
    known: Tensor | None,
    part: str = "codec",
) -> Tensor:
    """Offset of the model's rotary positions from the rows' positions, which do not count padding, [B] int64.

    Args:
        position_ids: Positions that the model was given, [B or 1, P], or equal parts of them, or None.
        valid: Which of the P tokens are no padding, [B, P]; None where all are.
        columns: Tokens seen before, padding included.
        seen: Tokens that each row has seen before, [B] int64.
        new: P.
        known: Offset of those tokens, [B], or None.
        part: The `codec`, `reader` or `selector` that undoes the rotation.

    Raises:
        KVPolicyError: If the offset differs within a row, or the positions have parts that differ.
    """
    position_ids = one_part(position_ids)
    if position_ids is not None and position_ids.dim() != 2:
        raise KVPolicyError(
            f"Positions must be one number per token for a {part} that undoes their rotation, got position_ids "
            f"{list(position_ids.shape)} of parts that differ (M-RoPE); try {INSTEAD[part]}"
        )
    at = torch.arange(new, device=seen.device) + columns if position_ids is None else position_ids
    counted = torch.arange(new, device=seen.device) if valid is None else (valid.long().cumsum(-1) - 1).clamp_min(0)
    shifts = at - counted - seen[:, None]  # of each token, [B, P]
    first = torch.zeros_like(seen) if valid is None else valid.int().argmax(-1)
    shift = shifts.gather(1, first[:, None])[:, 0]
    if known is not None:
        # Keys of this row were coded with the known offset, so a different one is an error below.
        shift = torch.where(seen > 0, known, shift)
    wrong = shifts != shift[:, None]
    wrong = wrong if valid is None else wrong & valid
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise KVPolicyError(
            "A row's positions must go on by one from token to token and from prompt to prompt for its keys to be "
            f"unrotated, got position {int(at.expand_as(shifts)[row, column])} for token {column} of row {row}; try "
            "position_ids that count each row's own tokens."
        )
    return shift
