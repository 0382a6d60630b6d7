"""Plans of rows behind a shared prefix, and the policies that can be planned so; nothing here needs transformers."""

from __future__ import annotations

from dataclasses import replace

from kvpolicy.planning.memory import DIGEST_NBYTES, layer_spec
from kvpolicy.planning.result import SHARED, CachePlan
from kvpolicy.policy import Policy
from kvpolicy.text.errors import KVPolicyError


def check_own(own: Policy) -> None:
    """Refuse a policy that cannot be that of tokens behind a shared prefix.

    Raises:
        KVPolicyError: Naming the part.
    """
    part = next(filter(None, map(_obstacle, own.distinct)), "") if not own.differs_by_layer else "a policy by layer"
    if part:
        raise KVPolicyError(
            f"own must be a policy that selects tokens by position only, in the same way in every layer, got {part}; "
            "try 'full', 'full+kivi' or 'window@256'."
        )


def _obstacle(own: Policy) -> str:
    spec = layer_spec(own, 0)
    if own.layer_metric or own.heads is not None or spec.allocator_statistics:
        return f"the allocator {own.allocator}"
    if spec.statistics:
        return f"the selector {own.selector}"
    if spec.merger_traits.when != "never":
        return f"the merger {own.merger}"
    return f"the reader {own.reader}" if own.reads_part else ""


def check_readable(policy: Policy) -> None:
    """Refuse a policy whose slots several rows cannot read together.

    Raises:
        KVPolicyError: If a part chooses which slots a step reads, or layers store tokens together.
    """
    if policy.layer_groups:
        raise KVPolicyError(
            "Every layer must store its tokens by itself for its slots to be shared, got a codec that stores those of "
            f"several layers together, {policy.codec!r}; try another codec, or shared=False."
        )
    readers = [own.reader for own in policy.distinct if own.reads_part]
    choosers = [*readers, *(own.codec for own in policy.distinct if own.codec.traits.searches)]
    if choosers:
        raise KVPolicyError(
            "Every slot must be read in a step for slots to be shared, since a choice depends on the queries of one "
            f"row, got {choosers[0]!r}; try a policy that reads everything, or shared=False."
        )


def beside(plan: CachePlan, shared: list[int], moved: list[int], full: int, length: int) -> CachePlan:
    """A plan of what rows add, beside a prefix that they share.

    Args:
        plan: The plan of what they add.
        shared: Bytes of the prefix in each layer under the policy.
        moved: Bytes of it that a decode step reads.
        full: Bytes of its tokens in the stock cache, of all rows.
        length: Its tokens.
    """
    note = f"{length:,} tokens of a shared prefix are held once for all rows"
    return replace(
        plan,
        layers=tuple(
            replace(own, nbytes=own.nbytes | {SHARED: held}, moved=own.moved + read)
            for own, held, read in zip(plan.layers, shared, moved, strict=True)
        ),
        full_nbytes=plan.full_nbytes + full,
        peak_nbytes=plan.peak_nbytes + sum(shared),
        full_peak_nbytes=plan.full_peak_nbytes + full,
        note="; ".join(filter(None, (plan.note, note))),
    )


def planned_behind(plan: CachePlan, text: CachePlan) -> CachePlan:
    """A plan of what rows add behind a text, whose plan is that of one row."""
    shared = [sum(layer.nbytes.values()) for layer in text.layers]
    shared[0] -= DIGEST_NBYTES  # of the mask, of which each row has its own
    length = text_length(text)
    assert text.prefill is not None
    full = plan.batch * length * text.prefill.shape.token_nbytes * len(shared)
    return beside(plan, shared, [layer.moved for layer in text.layers], full, length)


def text_length(text: CachePlan | None) -> int:
    """The tokens that the plan of a text is of; 0 without one."""
    return 0 if text is None or text.prefill is None else text.prefill.columns


def check_text(text: CachePlan, own: Policy, layers: int) -> None:
    """Refuse the plan of a text whose slots rows cannot share.

    Raises:
        KVPolicyError: If it is not of one row of the same model, or a part of either policy does not allow it.
    """
    if not isinstance(text, CachePlan) or text.batch != 1 or len(text.layers) != layers:  # pyright: ignore[reportUnnecessaryIsInstance]
        got = f"{text.batch} row(s) and {len(text.layers)} layers" if isinstance(text, CachePlan) else repr(text)  # pyright: ignore
        raise KVPolicyError(
            f"prefix must be the plan of one row of the same model, with {layers} layers under the policy, got {got}; "
            "try kvpolicy.plan(config, policy, prompt=4096)."
        )
    check_readable(text.policy)
    check_own(own)
