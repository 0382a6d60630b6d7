"""Measure what positions do to a model: its attention and its embeddings run on one token at several positions.

Nothing is concluded from names: a model may normalize keys behind their rotation, or add positions to hidden states.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.engine.host import outside_autocast
from kvpolicy.hf.cache_names import LAYER_NAMES
from kvpolicy.hf.discovery import Site, Sites, device_of
from kvpolicy.hf.eval_mode import eval_mode
from kvpolicy.kernels.rotary import Rope

Angles = Callable[[Tensor, Tensor], Any]
"""Cosines and sines of a layer at positions [1, n], in the dtype and on the device of a tensor; None without any."""

PLACES = (0, 1, 3, 7, 12)
"""The positions of the hidden state whose keys are compared."""

_TOKENS = 12
"""How often a token is repeated for the hidden states of its positions."""

_COMPARED = 4
"""How many of these are compared: those of the first tokens may depend on what stands before."""


class _Seen(BaseException):
    """Ends a forward once what is measured was seen; no error that a model might handle."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.seen = seen


class _KeyCatcher:
    """In place of an empty cache: it ends the forward at the first keys that it is given."""

    def update(self, key_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _Seen(key_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def is_undone(site: Site, rope: Rope, angles: Angles) -> bool | None:
    """Whether the keys of a hidden state are the same at every position once their rotation is undone.

    The attention module runs until it hands its keys to the cache, so that it computes three projections of five
    tokens. The model stays as it was.

    Args:
        site: The layer.
        rope: Its rotary embedding.
        angles: Computes the angles that the layer is given.

    Returns:
        False also where the embedding cannot be applied to the keys. None where it cannot be measured: the weights are
        on `meta` or have an unknown form, or the module takes other arguments.
    """
    keys = _caught(site.attention, lambda: _attend(site, angles))
    if keys is None or keys.dim() != 4 or keys.shape[2] != len(PLACES):
        return None
    try:
        plain = rope.unrotate(keys, torch.tensor(PLACES, device=keys.device)[None, None])
    except Exception:
        return False  # of whatever kind: it would fail in a forward, too
    spread = (plain - plain.mean(2, keepdim=True)).square().mean().sqrt()
    # Cosines and sines are rounded to the model's dtype, and so are the keys.
    tolerance = max(1e-4, 1.25 * torch.finfo(keys.dtype).eps)
    return not bool(spread > tolerance * plain.square().mean().sqrt())


def adds_positions(model: nn.Module, sites: Sites) -> bool | None:
    """Whether the hidden states of a token differ by its position before the first layer.

    Args:
        model: A model that takes token ids.
        sites: Its modules.

    Returns:
        None where it cannot be measured.
    """
    thread = threading.get_ident()

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:  # others may run the model
            raise _Seen(args[0] if args else kwargs["hidden_states"])

    def run() -> None:
        weight: Tensor = model.get_input_embeddings().weight  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        device = torch.device("cpu") if weight.is_meta else weight.device
        token = torch.full((1, _TOKENS), weight.shape[0] // 2, dtype=torch.int64, device=device)
        # A compiled model would be compiled again, with the hook.
        with torch.compiler.set_stance("force_eager"):
            model(input_ids=token, use_cache=False)

    hook = _first_block(sites).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        hidden = _caught(model, run)
    finally:
        hook.remove()
    if hidden is None or hidden.shape[-2] != _TOKENS:
        return None
    compared = hidden[..., -_COMPARED:, :].float()
    return bool((compared - compared[..., :1, :]).abs().max() > 1e-4 * compared.abs().max())


def _first_block(sites: Sites) -> nn.Module:
    """The first layer of a decoder, which may have no attention."""
    block = sites.layers[0].block
    stack = next((part for part in sites.decoder.children() if any(each is block for each in part.children())), None)
    return block if stack is None else next(stack.children())


def _caught(module: nn.Module, run: Callable[[], None]) -> Tensor | None:
    """The tensor with which a probe ends a forward; None if the forward fails, or ends by itself."""
    try:
        with torch.no_grad(), eval_mode(module):
            run()
    except _Seen as end:
        return None if end.seen.is_meta else end.seen
    except Exception:
        return None  # of whatever kind: it is no forward that the user has asked for
    return None


def _attend(site: Site, angles: Angles) -> None:
    """Run an attention module on one hidden state at several positions."""
    attention: Any = site.attention
    weight = next(p for p in site.block.parameters() if p.is_floating_point())
    if not _is_loaded(attention):
        return
    device = device_of(attention)
    shape = (1, 1, attention.config.get_text_config(decoder=True).hidden_size)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, weight.dtype)
    hidden = hidden.expand(1, len(PLACES), -1)
    positions = torch.tensor(PLACES, device=device)[None]
    with outside_autocast(device):
        attention(hidden, **_arguments(attention, positions, angles(hidden, positions)))


def _arguments(attention: nn.Module, positions: Tensor, angles: Any) -> dict[str, Any]:
    """The arguments of an attention module behind the hidden states, by name."""
    given = {"position_embeddings": angles, "position_ids": positions, "cache_position": positions[0]}
    given |= dict.fromkeys(LAYER_NAMES, _KeyCatcher())
    names = list(inspect.signature(type(attention).forward).parameters.values())[2:]
    taken = [p for p in names if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    found = {p.name: given.get(p.name) for p in taken if p.name in given or p.default is p.empty}
    passes = any(p.kind is p.VAR_KEYWORD for p in names)
    return {"position_ids": positions, **found} if passes else found


def _is_loaded(attention: nn.Module) -> bool:
    """Whether the weights of a module are in memory, or hooks of accelerate load each of its parts while it runs."""
    unloaded = [m for m in attention.modules() if any(p.is_meta for p in m.parameters(recurse=False))]
    hooks: list[Any] = [getattr(module, "_hf_hook", None) for module in unloaded]
    # Weights of the module's own would stay loaded, since its forward does not end.
    return attention not in unloaded and all(getattr(hook, "offload", False) for hook in hooks)
