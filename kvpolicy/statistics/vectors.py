"""The keys and values of all candidates, as they are and without their rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.statistics.statistic import Context, Sizes, Statistic, Working, by_vector


class Candidates(NamedTuple):
    """Keys and values of slots and new tokens; numbers at invalid tokens are to be ignored.

    Attributes:
        keys: As attention takes them, those of coded slots decoded, [B, H, N, D].
        values: [B, H, N, D].
        scale: The factor that products of queries and keys are multiplied by.
    """

    keys: Tensor
    values: Tensor
    scale: float


@dataclass(frozen=True)
class Vectors(Statistic[Candidates]):
    """The keys and values of all candidates.

    Attributes:
        generated: Whether those of each generated token are passed to `Selector.step` too, as `View.token`.
    """

    generated: bool = False
    reads_past: ClassVar[bool] = True
    reads_vectors: ClassVar[bool] = True

    def described(self) -> str:
        """Of which tokens."""
        return f"the keys and values of the {'tokens' if self.generated else 'prompt'}"

    def serving(self, other: Any) -> Vectors:
        """Of generated tokens if one of both asks for them."""
        return Vectors(self.generated or other.generated)

    def reduced(self, context: Context) -> Candidates:
        """The vectors."""
        return Candidates(context.all_keys, context.all_values, context.transform.scale)

    def reordered(self, result: Candidates, order: Tensor) -> Candidates:
        """In another order."""
        return result._replace(keys=by_vector(result.keys, order), values=by_vector(result.values, order))


@dataclass(frozen=True)
class UnrotatedKeys(Statistic[Tensor]):
    """The keys of all candidates without their rotation, [B, H, N, D] fp32."""

    reads_past: ClassVar[bool] = True
    reads_vectors: ClassVar[bool] = True
    undoes_rotation: ClassVar[bool] = True
    along: ClassVar = "vectors"

    def reduced(self, context: Context) -> Tensor:
        """The keys."""
        assert context.rotation is not None
        return context.rotation.undone(context.all_keys, context.positions)

    def working(self, sizes: Sizes) -> Working:
        """The keys."""
        return Working(chosen=4 * sizes.candidates * sizes.head_dim)


@dataclass(frozen=True)
class Rotation(Statistic[KeyRotation]):
    """How the model rotates queries and keys: see the methods of `KeyRotation`."""

    undoes_rotation: ClassVar[bool] = True

    def reduced(self, context: Context) -> KeyRotation:
        """The rotation, whose offset is that of the embedding's positions from those of the row."""
        assert context.rotation is not None
        return context.rotation
