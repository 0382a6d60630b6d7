"""Decoder layers that take a long prompt tile by tile: only attention looks at more than one token.

A layer takes all tiles before the next layer begins, so that it sees its whole prompt before it is compressed, and what
is alive besides are two hidden states of the prompt and the tensors of one tile.

Outputs that transformers records inside a layer, and keys that layers pass to later ones, are joined over the tiles.
Weights that accelerate offloads stay on their device meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from kvpolicy.hf.cache_names import LAYER_NAMES, passed_cache
from kvpolicy.hf.discovery import Site
from kvpolicy.hf.masks import DeferredMask
from kvpolicy.text.errors import KVPolicyError


@contextmanager
def hold_weights(block: nn.Module) -> Generator[None]:
    """Load the offloaded weights of a layer once, and release them at the end.

    Hooks of accelerate stand on each module with weights, and would move them for every call.

    Args:
        block: The layer.
    """
    with ExitStack() as stack:
        for module in block.modules():
            hook: Any = getattr(module, "_hf_hook", None)
            # The layer's own hook runs already, around all tiles.
            if module is not block and any(getattr(one, "offload", False) for one in getattr(hook, "hooks", [hook])):
                _hold(module, hook, stack)
        yield


def _hold(module: Any, hook: Any, stack: ExitStack) -> None:
    """Run the hook of a module now and at the end, and not in between."""
    forward = module.__dict__.get("forward")
    hook.pre_forward(module)
    stack.callback(hook.post_forward, module, ())
    module.forward = module._old_forward
    stack.callback(setattr, module, "forward", forward)


class Recorded:
    """Outputs that the running forward records while a layer takes its tiles."""

    def __init__(self) -> None:
        """Note what was recorded of earlier layers."""
        collector: Any = getattr(output_capturing, "_active_collector", None)
        found: dict[str, Any] = (None if collector is None else collector.get()) or {}
        self._lists = {key: parts for key, parts in found.items() if isinstance(parts, list)}
        self._starts: list[dict[str, int]] = []

    def begin_tile(self) -> None:
        """Note what was recorded before the next tile."""
        self._starts.append({key: len(parts) for key, parts in self._lists.items()})

    def join(self, rows: int) -> None:
        """Replace the records of all tiles by one of the whole prompt.

        Args:
            rows: Rows of the batch.
        """
        for key, parts in self._lists.items():
            starts = [start[key] for start in self._starts]
            tiles = [parts[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)]
            parts[starts[0] :] = [_joined(same, rows) for same in zip(*tiles, strict=True)]


def _joined(tiles: tuple[Any, ...], rows: int) -> Any:
    """The record of a module for all tokens, from those of tiles: [B, T, ...], or [B * T, ...] as routers have it."""
    if not all(isinstance(tile, Tensor) and tile.dim() for tile in tiles):
        return tiles[-1]
    if all(tile.shape[0] == rows for tile in tiles) and tiles[0].dim() > 2:
        return torch.cat(tiles, 1)
    return torch.cat([tile.unflatten(0, (rows, -1)) for tile in tiles], 1).flatten(0, 1)


SHARED = "shared_kv_states"
"""The argument of layers through which they pass keys."""


def passes_by_kind(attention: nn.Module) -> bool:
    """Whether an attention module passes keys to later ones of its kind, or reads those of an earlier one."""
    return hasattr(attention, "is_kv_shared_layer")


def _key(attention: nn.Module) -> Any:
    """Under what the keys of a module's owner are passed: its kind, or its index in Gemma 3n of transformers 5.18."""
    index = getattr(attention, "kv_shared_layer_index", None)
    return getattr(attention, "layer_type", None) if index is None else index


class TiledKeys:
    """The keys that layers pass on, while one of them takes its tiles.

    Attributes:
        length: The keys that the layer is given for its newest tile; None if it has its own.
    """

    def __init__(self, attention: nn.Module, passed: MutableMapping[Any, tuple[Tensor, ...]] | None) -> None:
        """Keys that earlier layers have passed to one with an attention module; None if layers pass none."""
        self._reads = _key(attention) if getattr(attention, "is_kv_shared_layer", False) else None
        self._passed = passed
        self._tiles = 0
        self._new: dict[Any, list[Tensor]] = {}
        self.length: int | None = None

    @contextmanager
    def next_tile(self) -> Generator[dict[str, Any]]:
        """The arguments of the next tile through which keys are passed."""
        if self._passed is None:
            yield {}
            return
        of_tile = slice(2 * self._tiles, 2 * self._tiles + 2)
        given = {kind: pairs[of_tile] for kind, pairs in self._passed.items()}
        self.length = None if self._reads is None else given[self._reads][0].shape[2]
        make: Any = type(self._passed)
        part = make(given)
        yield {SHARED: part}
        for kind, pair in part.items():
            if pair is not given.get(kind):
                self._new.setdefault(kind, []).extend(pair)
        self._tiles += 1

    def join(self) -> None:
        """Pass on what the layer has passed in all its tiles."""
        if self._passed is not None:
            self._passed.update({kind: tuple(pairs) for kind, pairs in self._new.items()})


COLUMNS = {
    "hidden_states": -2,
    "per_layer_input": -2,
    "position_ids": -1,
    "cache_position": -1,
    "position_embeddings": -2,
    "mamba_attention_mask": -1,  # of the new tokens alone: what is padding for a state beside attention
}
"""The dimension of tokens in the arguments of decoder layers that have one."""

OFFLOADED = "_old_forward"
"""Where accelerate keeps the forward of a module that it wraps."""


class PromptTile(NamedTuple):
    """The new tokens that a layer takes at the moment.

    Attributes:
        start: The first of them.
        stop: Behind the last.
        columns: The new tokens of the whole forward.
        valid: Which of all new tokens are not padding, [B, P] bool; None if all are.
        whole: The layer's arguments for all new tokens, by name.
    """

    start: int
    stop: int
    columns: int
    valid: Tensor | None
    whole: Mapping[str, Any]

    @property
    def is_last(self) -> bool:
        """Whether the layer then has seen all."""
        return self.stop == self.columns

    def cut(self, t: Tensor | None) -> Tensor | None:
        """The columns [B, T, ...] of this tile of a tensor [B, P, ...]."""
        return None if t is None else t[:, self.start : self.stop]


class TiledCache(Cache):
    """A cache whose layers may take a prompt tile by tile.

    Attributes:
        tile_size: The most tokens that a layer takes at a time in the running forward; None for all.
        tile: The tile that a layer takes at the moment, or None.
    """

    tile_size: int | None = None
    tile: PromptTile | None = None


def tile_obstacle(sites: list[Site]) -> str:
    """Why layers cannot take tiles, as a clause behind their class; empty if they can."""
    for site in sites:
        kind = type(site.block)
        names = inspect.signature(kind.forward).parameters
        if SHARED in names and not passes_by_kind(site.attention):
            return f"{kind.__name__}, since layers pass keys to others ({SHARED})"
        if "prev_router_hidden_states" in names:
            return f"{kind.__name__}, since routers pass hidden states to those of later layers"
        if "hidden_states" not in names:
            return f"{kind.__name__}, which has no argument hidden_states"
    return ""


def check_layers(sites: list[Site]) -> None:
    """Refuse models with layers that pass keys to each other, or name their input otherwise.

    Raises:
        KVPolicyError: Naming the layer.
    """
    if obstacle := tile_obstacle(sites):
        raise KVPolicyError(f"tile must be None for {obstacle}, got a size; try prompts in one piece.")


def take_tiles(site: Site) -> Callable[[], None]:
    """Let a decoder layer take its tokens in tiles where its cache has a tile size; returns how to undo it."""

    def in_tiles(original: Callable[..., Any]) -> Callable[..., Any]:
        names = _names(site.block, original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a step has one token
                return original(*args, **kwargs)
            arguments = dict(zip(names, args, strict=False)) | kwargs
            cache = passed_cache(arguments, LAYER_NAMES)
            if isinstance(cache, TiledCache) and cache.tile_size is not None:
                return _run(site, _with_places(original, names[: len(args)]), arguments, cache, cache.tile_size)
            mask = arguments.get("attention_mask")
            if isinstance(mask, DeferredMask):  # made before it was known that this forward has no cache
                whole = arguments | {"attention_mask": mask.whole()}
                return _with_places(original, names[: len(args)])(**whole)
            return original(*args, **kwargs)

        return forward

    return _shadow(site.block, in_tiles)


def _names(block: nn.Module, original: Callable[..., Any]) -> list[str]:
    """The arguments of a layer; those of its class where the layer's own forward is a wrapper that names others."""
    names = list(inspect.signature(original).parameters)
    if "hidden_states" in names:
        return names
    return list(inspect.signature(type(block).forward).parameters)[1:]


def _with_places(original: Callable[..., Any], places: list[str]) -> Callable[..., Any]:
    """A function of keywords that passes some of them by their places, as the caller did."""
    if not places:
        return original
    return lambda **kwargs: original(*[kwargs.pop(name) for name in places], **kwargs)


def norm_in_tiles(module: Any, size: Callable[[], int | None]) -> Callable[[], None]:
    """Let a norm behind the last layer work tile by tile, since norms compute in fp32; returns how to undo it.

    Args:
        module: The norm.
        size: The tile size of the running forward, or None.
    """

    def in_tiles(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or hidden.dim() != 3:
                return original(hidden, *args, **kwargs)
            tokens = size()
            if tokens is None or hidden.shape[1] <= tokens or args or kwargs:
                return original(hidden, *args, **kwargs)
            out: Tensor | None = None
            for start in range(0, hidden.shape[1], tokens):
                part: Tensor = original(hidden[:, start : start + tokens])
                if out is None:
                    out = part.new_empty(hidden.shape)  # of another dtype, where a norm stays in fp32
                out[:, start : start + tokens] = part
            return out

        return forward

    return _shadow(module, in_tiles)


def last_norms(decoder: nn.Module) -> list[nn.Module]:
    """The norms of a decoder that belong to no layer."""
    return [module for module in decoder.children() if type(module).__name__.endswith("Norm")]


def _shadow(module: Any, replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Shadow the forward of a module by one that is made of it; returns how to undo it.

    Others may have wrapped the new forward by then, such as accelerate: their wrapper stays, around the old one.
    """
    name = OFFLOADED if hasattr(module, OFFLOADED) else "forward"
    before = module.__dict__.get(name)
    original = getattr(module, name)
    replaced = replace(original)
    runs = [replaced]

    def forward(*args: Any, **kwargs: Any) -> Any:
        return runs[0](*args, **kwargs)

    setattr(module, name, forward)

    def undo() -> None:
        runs[0] = original
        for place in ("forward", OFFLOADED):
            if module.__dict__.get(place) is forward:
                if before is None and place == name:
                    del module.__dict__[place]
                else:
                    setattr(module, place, original)

    return undo


def _run(site: Site, original: Callable[..., Any], arguments: dict[str, Any], cache: TiledCache, size: int) -> Any:
    """The output of a layer for all tokens, computed tile by tile."""
    columns = arguments["hidden_states"].shape[-2]
    _check_arguments(site, arguments, columns)
    mask = arguments.get("attention_mask")
    layer: Any = cache.layers[site.layer_idx]  # of transformers, or one that has its attributes
    if layer.is_sliding and not isinstance(mask, DeferredMask):
        raise KVPolicyError(
            "tile must be None if ready-made masks of sliding windows are passed, which are for the whole prompt, got "
            "a size; try a 2-D padding mask."
        )
    valid = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    out: Tensor | None = None
    others: tuple[Any, ...] | None = None
    # The weights stay loaded for all tiles, and attention sees which tile it has in `cache.tile`.
    with ExitStack() as stack:
        stack.enter_context(hold_weights(site.block))
        stack.callback(setattr, cache, "tile", None)
        recorded = Recorded()
        keys = TiledKeys(site.attention, arguments.get(SHARED))
        for start in range(0, columns, size):
            tile = PromptTile(start, min(start + size, columns), columns, valid, arguments)
            cache.tile = tile
            recorded.begin_tile()
            with keys.next_tile() as passed:
                found = original(**dict(_cut(arguments | passed, tile, layer, keys.length)))
            # Each output is written behind those before, so that no tile is held twice.
            part: Tensor = found[0] if isinstance(found, tuple) else found
            others = found[1:] if isinstance(found, tuple) else None
            if out is None:
                out = part.new_empty(*part.shape[:-2], columns, part.shape[-1])
            out[..., tile.start : tile.stop, :] = part
        # Later layers and callers see keys and records as if the layer had run once.
        keys.join()
        recorded.join(arguments["hidden_states"].shape[-3])
    return out if others is None else (out, *others)


def _cut(arguments: Mapping[str, Any], tile: PromptTile, layer: Any, length: int | None) -> Iterator[tuple[str, Any]]:
    """The arguments of a layer for one tile, with a number of keys if they are passed to it."""
    for name, value in arguments.items():
        if isinstance(value, DeferredMask) and length is not None:
            yield name, value.of_keys(tile.start, tile.stop, length)
        elif isinstance(value, DeferredMask):
            yield name, value.of_tile(tile.start, tile.stop, layer)
        elif name == "attention_mask":
            yield name, tile.cut(value)
        elif name in COLUMNS:
            yield name, _narrow(value, COLUMNS[name], tile)
        else:
            yield name, value


def _narrow(value: Any, dim: int, tile: PromptTile) -> Any:
    """The columns of a tile of a tensor, or of several."""
    if isinstance(value, Tensor):
        return value.narrow(dim, tile.start, tile.stop - tile.start)
    if isinstance(value, tuple | list):
        return type(value)(_narrow(part, dim, tile) for part in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return value


def _check_arguments(site: Site, arguments: Mapping[str, Any], columns: int) -> None:
    """Refuse an argument that has a column for each token, and is not known.

    Raises:
        KVPolicyError: Naming the argument.
    """
    for name, value in arguments.items():
        known = name in COLUMNS or (name == "attention_mask" and getattr(value, "ndim", 2) == 2)
        parts = value if isinstance(value, tuple | list) else (value,)
        if not known and any(isinstance(part, Tensor) and columns in part.shape for part in parts):  # pyright: ignore[reportUnknownVariableType]
            raise KVPolicyError(
                f"tile must be None for {type(site.block).__name__}, whose argument {name!r} has a column for each "
                "token and cannot be cut, got a size; try prompts in one piece."
            )
