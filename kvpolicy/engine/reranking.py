"""Rankings of all slots of a layer together, in the rows where one is due; see `kvpolicy.protocols.Reranks`."""

from __future__ import annotations

from kvpolicy.engine.decode import assign_state
from kvpolicy.engine.due_rows import due_rows, only_rows
from kvpolicy.engine.geometry import Geometry
from kvpolicy.engine.layer_contents import LayerContents
from kvpolicy.kernels.mixed_values import read_values
from kvpolicy.kernels.rotary import KeyRotation
from kvpolicy.protocols import Reranks, Selector, State, View
from kvpolicy.statistics import Candidates, Results, Rotation, Vectors
from kvpolicy.statistics.windows import Past


def rerank(layer: LayerContents, geometry: Geometry) -> None:
    """Rank all slots together in the rows where it is time."""
    tensors = layer.tensors
    due = layer.schedule.due(tensors.length, tensors.budget)
    for rows in due_rows(due):
        with only_rows(layer, rows, written=("state",)):
            _rank_slots(layer, geometry.past())
    layer.schedule.note(due, tensors.length, tensors.budget)


def _rank_slots(layer: LayerContents, past: Past | None) -> None:
    """Rank all slots, which are given decoded."""
    if past is not None:
        rotation = KeyRotation(layer.spec.rope)
        values = read_values(past.keys, past.values, layer.spec.latent)
        seen = Results({Vectors: Candidates(past.keys, values, layer.scale), Rotation: rotation})
        rank_again(layer.spec.selector, layer.tensors.state, seen, layer.view())


def rank_again(selector: Selector, state: State, seen: Results, view: View) -> None:
    """Let the selector rank all slots together, in place."""
    assert isinstance(selector, Reranks)  # only a selector with `rerank_every` is asked
    assign_state(state, selector.rerank(state, seen, view))
