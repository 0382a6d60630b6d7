"""Capture of each layer's attention inputs while a model runs unchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvpolicy.calibration.listener import Listener, listening
from kvpolicy.calibration.suitable import check_measurable
from kvpolicy.engine.hidden_stats import massive_tokens
from kvpolicy.hf.attachment import Attachment, attachment_of
from kvpolicy.hf.cache import PolicyCache
from kvpolicy.hf.cache_names import cache_argument
from kvpolicy.hf.discovery import Site, device_of, find_sites
from kvpolicy.hf.residual_hooks import active_stream
from kvpolicy.hf.rotary_lookup import ropes_of
from kvpolicy.hf.tile_size import TileSize
from kvpolicy.kernels.rotary import Rope
from kvpolicy.policy import Policy
from kvpolicy.protocols import View
from kvpolicy.statistics import Forward, ModuleCall, Replay, Results, Vectors
from kvpolicy.statistics.windows import ScoreTransform
from kvpolicy.text.errors import KVPolicyError


class LayerCall(NamedTuple):
    """The inputs of one layer's attention, for a text of n tokens.

    Attributes:
        layer_idx: Index of the layer in the model.
        keys: As attention takes them, [1, H, n, D].
        values: [1, H, n, D].
        forward: The arguments of the attention module, with the queries as attention takes them.
        massive: Which of the first tokens hold the `count` largest activations, [1, N] bool, by `count`.
    """

    layer_idx: int
    keys: Tensor
    values: Tensor
    forward: Forward
    massive: dict[int, Tensor]

    @property
    def queries(self) -> Tensor:
        """As attention takes them, [1, Hq, n, D]."""
        assert self.forward.queries is not None
        return self.forward.queries

    @property
    def transform(self) -> ScoreTransform:
        """From products to attention weights."""
        return ScoreTransform(self.forward.scale, self.forward.softcap, self.forward.sinks)


Look = Callable[[LayerCall], None]

_HOST = torch.device("cpu")


class Tap:
    """A model in eval mode that passes the inputs of its attention on; made by `tapped`.

    Attributes:
        model: The model.
        attachment: The attachment that connects caches to it.
        layers: Indices of the layers that a policy manages.
        device: Device of its token ids.
        store: Device that keeps the prompts of all layers after the run that reads them; None for that of each layer.
    """

    def __init__(self, model: nn.Module) -> None:
        """Describe a model that is listened to; see `show`."""
        self.model = model
        self.attachment: Attachment = attachment_of(model)
        self.layers = self.attachment.model_shape.evictable
        self._look: Look | None = None
        self._sites = find_sites(model)
        self.device: torch.device = device_of(self._sites.decoder)
        self.store: torch.device | None = _HOST if isinstance(self.attachment.tile, int) else None

    def run(self, ids: Tensor, prompt: int, look: Look, pins: Collection[int] = ()) -> PolicyCache:
        """Run a text through the model, and show the call of each layer's attention to a function.

        Args:
            ids: Token ids, [n].
            prompt: How many of them are a prompt.
            look: Called in each layer that a policy manages, in order.
            pins: Numbers of largest activations of the prompt for which to find the tokens; see `LayerCall.massive`.

        Returns:
            A cache that has seen the text; its unmanaged layers hold their windows, and the others one token.
        """
        massive: dict[int, Tensor] = {}

        def note(site: Site, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = active_stream(site, args[0] if args else kwargs["hidden_states"])
            massive.update((count, massive_tokens(hidden[:, :prompt], None, count)) for count in pins)

        cache = PolicyCache(self.model)
        # A prompt that is read in tiles is long: of all layers together, it does not fit beside the weights.
        self.store = None if self.attachment.tile_size(ids[None].to(self.device)) is None else _HOST
        with ExitStack() as hooks:
            for site in self._sites.layers if pins else ():
                hooks.callback(site.block.register_forward_pre_hook(partial(note, site), with_kwargs=True).remove)
            # A block's hook runs before its attention, so `massive` is that of the layer. The next block overwrites it.
            self._look = lambda call: look(call._replace(massive=dict(massive)))
            hooks.callback(setattr, self, "_look", None)
            self._read(ids, cache)
        return cache

    def show(self, seen: Results, view: View) -> None:
        """Show the call of a layer's attention to the function of the run, if there is one."""
        if self._look is not None:
            self._look(LayerCall(view.layer_idx, *seen[Vectors][:2], seen[ModuleCall], {}))

    def replay(self, prompt: Tensor, plan: Replay) -> dict[int, Tensor]:
        """Run a prompt [N] through the model twice, the second time as a replay.

        Returns:
            The scores of its tokens in each layer, [1, H, N] fp32.
        """
        found: dict[int, Tensor] = {}

        def look(seen: Results, view: View) -> None:
            scores = seen[Replay]
            assert scores is not None
            found[view.layer_idx] = scores

        listener = Listener((plan,), look)
        self._read(prompt, PolicyCache(self.model, Policy(selector=listener, budget=1)))
        return found

    def ropes(self, policies: Collection[Policy]) -> dict[int, Rope]:
        """The rotary embedding of each layer if a policy undoes it; none if no policy does.

        Raises:
            KVPolicyError: If a policy undoes it, and it cannot be undone.
        """
        parts = {policy.undoes_rotation for policy in policies} - {""}
        sites = [site for site in self._sites.layers if site.layer_idx in self.layers]
        return ropes_of(self._sites.decoder, sites, min(parts)) if parts else {}

    def _read(self, ids: Tensor, cache: PolicyCache) -> None:
        decoder = self._sites.decoder
        decoder(input_ids=ids[None].to(self.device), **cache_argument(decoder, cache), use_cache=True)


@contextmanager
def tapped(model: nn.Module, tile: TileSize = None) -> Generator[Tap]:
    """Look at a model's attention inside, without gradients; afterwards the model is as it was.

    Args:
        model: A causal language model without a policy attached.
        tile: The most tokens that a layer takes at a time, as for `attach`.

    Raises:
        KVPolicyError: If the model is not supported, is sharded over ranks, or has a policy attached.

    Examples:
        >>> import kvpolicy
        >>> shapes = []
        >>> with tapped(kvpolicy.tiny()[0]) as tap:
        ...     _ = tap.run(torch.arange(3, 13), 8, lambda call: shapes.append(call.queries.shape))
        >>> len(shapes), shapes[0]
        (8, torch.Size([1, 8, 10, 32]))
    """
    with listening(model, (ModuleCall(), Vectors()), lambda seen, view: tap.show(seen, view), tile):
        tap = Tap(model)
        if tap.attachment.place[1] > 1:
            raise KVPolicyError(
                f"The model must be on one rank to be measured, got {tap.attachment.place[1]}; try loading it without "
                "tensor parallelism."
            )
        check_measurable(model)
        yield tap
