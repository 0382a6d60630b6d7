"""KVTC: a cache file of quantized principal components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpolicy.codecs._files import FACTS
from kvpolicy.engine.snapshot import below
from kvpolicy.hf.attachment import Attachment
from kvpolicy.hf.cache_file import CacheFile, check_layers, deflated, inflated
from kvpolicy.hf.kvtc.bases import METHOD, SIDES, Bases, Plan
from kvpolicy.hf.kvtc.quantizer import read_stored, stored, stored_nbytes
from kvpolicy.hf.kvtc.slots import Slots, damaged, find_slots, share_tokens
from kvpolicy.kernels.rotary import Rope
from kvpolicy.text.embedded_names import EMBEDDED
from kvpolicy.text.errors import KVPolicyError
from kvpolicy.text.formats import expanded
from kvpolicy.text.grammar import quoted
from kvpolicy.text.strategy import checked, least, strategy


def _check_folder(name: str, value: str) -> None:
    if not value or value in EMBEDDED:
        raise KVPolicyError(
            f"{name} must be a folder of kvpolicy calibrate kvtc, of which none ships with the package, got "
            f"{value or 'none'}; try 'kvtc:calibration=DIR:ratio=16'."
        )


@strategy
class KVTC:
    """Store keys and values of a cache file as a few bits of their calibrated principal components.

    The cache in memory stays what its policy says; the file becomes smaller, and is not exact: a loaded cache has keys
    and values that differ by the rounding of their components. Keys are stored without their rotation. Where all heads
    of a layer hold the same tokens, all their numbers are one vector; else each head has its own. The numbers of a
    vector vary together, so that few of the directions in which it varies most need many bits, and most need none. The
    first and the newest tokens of a row, codes of a codec, and everything else are stored as they are.

    Args:
        calibration: The folder that `kvpolicy calibrate kvtc` wrote.
        ratio: 16 bits over the mean bits of a number, with shifts and scales and before DEFLATE: one of those that the
            calibration was made for.
        sinks: The first tokens of a row that are stored as they are.
        window: The newest tokens of a row that are stored as they are.

    Examples:
        >>> str(KVTC(calibration="folder", ratio=8))
        'kvtc:calibration=folder:ratio=8'

    Source:
        KVTC (arXiv:2511.01815, ICLR 2026). The paper could not be read; what is here is from its abstract, from
        summaries of its method, and from implementations of others, which agree: components of unrotated keys and of
        values apart, over all layers and heads; groups of 1, 16, 64, 256 or 1,024 components with a shift and a scale
        of 16 bits for each token, of 0, 2, 4 or 8 bits, by dynamic programming over measured errors; DEFLATE; 4 first
        and 128 newest tokens as they are. Differences:

        - Vectors are of the heads of one layer, unless the calibration was made with `--layers` and these layers hold
          the same tokens; and of one head where the heads of a layer hold different ones.
        - Codes of 8 bits are integers, as those of 2 and 4 bits are; those of the paper are FP8, with a scale of which
          nothing could be found.
        - Principal components are exact, and not those of a randomized SVD.
        - Groups of more than 16 components begin at multiples of 16, which leaves few errors to measure.
        - Errors are measured on a quarter of the calibration tokens that the components were not computed from; the
          newest tokens of a text are among them.
        - Every vector has the same number of bits; how the paper divides them between keys and values is not known.
        - DEFLATE is that of zlib, on the CPU, over the codes of a component next to each other.
        - At and behind a picture (M-RoPE), the number of a token stands for its position, so that a part of the
          rotation stays in its key, and its components may need more bits.
    """

    calibration: str = checked(_check_folder, "")
    ratio: int = least(1, 16)
    sinks: int = least(0, 4)
    window: int = least(0, 128)

    def __str__(self) -> str:
        """The spec."""
        terms = [f"{METHOD}:calibration={quoted(self.calibration)}", f"ratio={self.ratio}"]
        terms += [f"sinks={self.sinks}"] if self.sinks != 4 else []
        terms += [f"window={self.window}"] if self.window != 128 else []
        return ":".join(terms)

    def check(self, attachment: Attachment) -> None:
        """See `FileForm`."""
        self._own_bases(attachment)

    def encode(self, content: CacheFile, attachment: Attachment) -> CacheFile:
        """See `FileForm`."""
        bases = self._own_bases(attachment)
        layers = self._layers(content, attachment, bases, "cache")
        tensors = dict(content.tensors)
        for span in bases.spans:
            for unit, together in _units([layers[index] for index in span]):
                _encode_unit(unit, together, bases, tensors)
        header = content.header | {"form": {"spec": str(self), "calibration": bases.sha256}}
        return CacheFile(header, tensors)

    def decode(self, content: CacheFile, attachment: Attachment, device: torch.device, what: str) -> CacheFile:
        """See `FileForm`."""
        check_layers(content.header, attachment, what)  # before anything is allocated for them
        bases = self._bases(self._found(what), attachment)
        told = content.header["form"].get("calibration")
        if told != bases.sha256:
            raise KVPolicyError(
                f"The cache file {what!r} must be loaded with the calibration that it was saved with, got another one "
                f"in {bases.folder!r}; put the folder {self._name!r} of that time next to the file."
            )
        layers = self._layers(content, attachment, bases, what)
        tensors = {name: tensor for name, tensor in content.tensors.items() if f".{METHOD}." not in name}
        for span in bases.spans:
            for unit, together in _units([layers[index] for index in span]):
                _decode_unit(unit, together, bases, content, tensors, device, what)
        header = {name: value for name, value in content.header.items() if name != "form"}
        return CacheFile(header, tensors)

    def _found(self, what: str) -> str:
        """The folder of the calibration: next to the cache file if one of its name is there, else where it was."""
        for folder in (expanded(what).parent / self._name, expanded(self.calibration)):
            if (folder / FACTS).is_file():  # others may be called alike
                return str(folder)
        raise KVPolicyError(
            f"The cache file {what!r} must be loaded with the calibration that it was saved with, got none in "
            f"{self.calibration!r}; put the folder {self._name!r} of that time next to the file."
        )

    @property
    def _name(self) -> str:
        return Path(self.calibration).name or self.calibration

    def _own_bases(self, attachment: Attachment) -> Bases:
        rank, size = attachment.place
        if size > 1:
            raise KVPolicyError(
                "A cache must be whole to be saved with kvtc, whose components are those of all heads, got rank "
                f"{rank + 1} of {size}; try compress='zlib'."
            )
        return self._bases(self.calibration, attachment)

    def _bases(self, folder: str, attachment: Attachment) -> Bases:
        shape = attachment.model_shape.shape
        if shape.latent:
            raise KVPolicyError(
                "A model must hold keys and values for its caches to be saved with kvtc, got latent attention (MLA); "
                "try compress='zlib'."
            )
        if not attachment.rotations:
            raise KVPolicyError(
                "The rotary embedding of a model must not depend on the length of the text for its caches to be saved "
                "with kvtc, got one that does; try compress='zlib'."
            )
        return Bases(folder, self.ratio, attachment.info)

    def _layers(self, content: CacheFile, attachment: Attachment, bases: Bases, what: str) -> dict[int, _Layer]:
        found: dict[int, _Layer] = {}
        for index in (layer for span in bases.spans for layer in span):
            numbers: Mapping[str, Any] | None = content.header["layers"].get(str(index))
            rope = attachment.rotations.get(index)
            if numbers is None or rope is None:
                raise damaged(f"the layer {index} of the calibration {bases.folder!r}", what)
            own = below(content.tensors, f"layers.{index}.")
            slots = find_slots(numbers, own, self.sinks, self.window, what)
            found[index] = _Layer(index, own, slots, rope, numbers["shape"][1])
        return found


@dataclass
class _Layer:
    """One layer of a file.

    Attributes:
        index: Its index.
        tensors: Its tensors in the file by name.
        slots: Its slots in full precision; None if none of them is encoded.
        rope: Its rotary embedding.
        heads: Its KV heads.
        sides: Its keys and values, [S, D], once they are read.
    """

    index: int
    tensors: dict[str, Tensor]
    slots: Slots | None
    rope: Rope
    heads: int
    sides: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def vectors(self, side: str, at: Tensor) -> Tensor:
        """Keys without their rotation, or values, of some slots, [n, D] fp32."""
        assert self.slots is not None
        held = self.tensors[side].flatten(0, 2)[at.to(self.tensors[side].device)].to(at.device)
        if side == "values":
            return held.float()
        return self.rope.unrotate(held[None, None], self.slots.positions[at][None, None])[0, 0]

    def put(self, side: str, at: Tensor, vectors: Tensor) -> None:
        """Write vectors to some slots, keys with their rotation."""
        assert self.slots is not None
        if side == "keys":
            where = self.slots.positions[at].to(vectors.device)
            vectors = self.rope.rotate(vectors[None, None], where[None, None])[0, 0]
        target = self.sides[side]
        target[at] = vectors.to(target.dtype).cpu()


def _units(span: list[_Layer]) -> Iterator[tuple[list[_Layer], bool]]:
    """The layers of a span that are encoded at once, and whether all of their heads are one vector."""
    if share_tokens([layer.slots for layer in span]):
        yield span, True
        return
    for layer in span:
        yield [layer], share_tokens([layer.slots])


def _encode_unit(layers: list[_Layer], together: bool, bases: Bases, tensors: dict[str, Tensor]) -> None:
    """Put codes and the remaining vectors in the place of the keys and values of some layers."""
    first = layers[0].index
    for side in SIDES:
        if together:
            tensors[f"layers.{first}.{METHOD}.joint{len(layers)}.{side}"] = _together(layers, side, bases)
        for layer in layers:
            if layer.slots is None:
                continue
            if not together:
                tensors[f"layers.{layer.index}.{METHOD}.heads.{side}"] = _apart(layer, side, bases)
            held = tensors.pop(f"layers.{layer.index}.{side}").flatten(0, 2)
            rest = held[layer.slots.kept.to(held.device)]
            tensors[f"layers.{layer.index}.{METHOD}.rest.{side}"] = rest


def _together(layers: list[_Layer], side: str, bases: Bases) -> Tensor:
    """The codes of the tokens of some layers, all heads of which are one vector."""
    at = _by_token(layers[0].slots)
    parts = [layer.vectors(side, at.flatten()).unflatten(0, at.shape).flatten(1) for layer in layers]
    return deflated(_encoded(torch.cat(parts, -1), bases.joint(side, [layer.index for layer in layers])))


def _apart(layer: _Layer, side: str, bases: Bases) -> Tensor:
    """The codes of the tokens of each head of a layer, one head behind the other."""
    slots = enumerate(_by_head(layer))
    parts = [_encoded(layer.vectors(side, at), bases.of_head(side, layer.index, head)) for head, at in slots]
    return deflated(b"".join(parts))


def _decode_unit(
    layers: list[_Layer],
    together: bool,
    bases: Bases,
    content: CacheFile,
    tensors: dict[str, Tensor],
    device: torch.device,
    what: str,
) -> None:
    """Put keys and values of some layers in the place of their codes."""
    dtype: torch.dtype = getattr(torch, content.header["dtype"])
    encoded = [layer for layer in layers if layer.slots is not None]
    for side in SIDES:
        for layer in encoded:
            _begin(layer, side, dtype, bases, what)
        if together:
            _decode_together(encoded, side, bases, device, what)
        else:
            for layer in encoded:
                _decode_apart(layer, side, bases, device, what)
        for layer in encoded:
            assert layer.slots is not None
            held = layer.sides[side]
            tensors[f"layers.{layer.index}.{side}"] = held.view(*layer.slots.shape, held.shape[-1])


def _decode_together(layers: list[_Layer], side: str, bases: Bases, device: torch.device, what: str) -> None:
    """Read the vectors of some layers, all heads of which are one vector."""
    at = _by_token(layers[0].slots)
    plan = bases.joint(side, [layer.index for layer in layers])
    blob = _inflated(layers[0], f"joint{len(layers)}.{side}", stored_nbytes(plan.groups, len(at)), what)
    parts = _decoded(blob, plan, len(at), device).chunk(len(layers), -1)
    for layer, part in zip(layers, parts, strict=True):
        layer.put(side, at.flatten(), part.unflatten(-1, (layer.heads, -1)).flatten(0, 1))


def _decode_apart(layer: _Layer, side: str, bases: Bases, device: torch.device, what: str) -> None:
    """Read the vectors of each head of a layer."""
    slots = _by_head(layer)
    plans = [bases.of_head(side, layer.index, head) for head in range(layer.heads)]
    sizes = [stored_nbytes(plan.groups, len(at)) for plan, at in zip(plans, slots, strict=True)]
    blob = _inflated(layer, f"heads.{side}", sum(sizes), what)
    start = 0
    for plan, at, size in zip(plans, slots, sizes, strict=True):
        layer.put(side, at, _decoded(blob[start : start + size], plan, len(at), device))
        start += size


def _begin(layer: _Layer, side: str, dtype: torch.dtype, bases: Bases, what: str) -> None:
    """Make the keys or values of a layer, with the vectors that are stored as they are."""
    assert layer.slots is not None
    rest = layer.tensors.get(f"{METHOD}.rest.{side}")
    count = int(layer.slots.kept.sum())
    width = len(bases.of_head(side, layer.index, 0).components.mean)
    if rest is None or rest.dtype != dtype or rest.shape != (count, width):
        got = "none" if rest is None else f"{rest.dtype} {list(rest.shape)}"
        raise damaged(f"{side} of {count} tokens of layer {layer.index} as {dtype} [{count}, {width}], got {got}", what)
    held = torch.zeros(len(layer.slots.kept), width, dtype=dtype, device="cpu")
    held[layer.slots.kept] = rest
    layer.sides[side] = held


def _by_token(slots: Slots | None) -> Tensor:
    """The slots of each encoded token in all heads, which hold the same, [n, H]."""
    assert slots is not None
    numbers = torch.arange(slots.coded.numel(), device=slots.coded.device).view(slots.shape).transpose(1, 2)
    return numbers[slots.of_rows().all(-1)]


def _by_head(layer: _Layer) -> list[Tensor]:
    """The encoded slots of each head."""
    slots = layer.slots
    assert slots is not None
    return [(slots.coded & (slots.heads == head)).nonzero()[:, 0] for head in range(layer.heads)]


def _encoded(x: Tensor, plan: Plan) -> bytes:
    return stored(plan.components.latents(x), plan.groups)


def _decoded(blob: bytes, plan: Plan, tokens: int, device: torch.device) -> Tensor:
    return plan.components.vectors(read_stored(blob, plan.groups, tokens).to(device))


def _inflated(layer: _Layer, name: str, size: int, what: str) -> bytes:
    """As many bytes of codes as there must be."""
    held = layer.tensors.get(f"{METHOD}.{name}")
    if held is None or held.dtype != torch.uint8 or held.dim() != 1:
        raise damaged(f"the codes {name} of layer {layer.index}, got none", what)
    found = inflated(held, size)
    if found is None:
        raise damaged(f"{size} bytes of codes {name} in layer {layer.index}, got another number, or no codes", what)
    return found
