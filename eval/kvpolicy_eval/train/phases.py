"""The curriculum: what is trained when, counted in tokens so that a rerun gives the same model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpolicy_eval.train.net import Focus

# Layer 0 only looks a few tokens back, so it is never narrowed.
FOCUS: dict[str, Focus] = {
    "recall": Focus(layers=frozenset({0, 1})),
    "recall_far": Focus(layers=frozenset({0, 1})),
    "hot_keys": Focus(layers=frozenset({0, 1})),
    "needles": Focus(layers=frozenset({0, 3})),
    "passkey": Focus(layers=frozenset({0, 3})),
    "few_shot": Focus(layers=frozenset({0, 5})),
    "source": Focus(layers=frozenset({0})),
}
"""Task to what the layers see in most of its steps: one retrieval layer sees everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One stretch of the curriculum.

    Args:
        tokens: Length of the stretch, in training tokens.
        shapes: Choices of (batch, length); a choice may stand twice.
        tasks: Share of the steps by task; the shares add up to 1.
        digits: Share of the sequences by digits of a value (0: the value is a word).
        all_full: Share of the steps in which every layer sees everything.
        windows: Windows of the narrowed layers by task, where they differ from `FOCUS`.
    """

    tokens: int
    shapes: tuple[tuple[int, int], ...]
    tasks: dict[str, float]
    digits: dict[int, float]
    all_full: float = 0.1
    windows: dict[str, int] = field(default_factory=dict)

    def focus(self, task: str) -> Focus:
        """What the layers see in a step of `task`."""
        usual = FOCUS[task]
        return Focus(layers=usual.layers, window=self.windows.get(task, usual.window))


def _mix(*shares: float) -> dict[str, float]:
    names = ("recall", "recall_far", "hot_keys", "needles", "passkey", "few_shot", "source")
    assert abs(sum(shares) - 1) < 1e-9
    return {name: share for name, share in zip(names, shares, strict=True) if share}


# Once categories are learned, the other layers see less than one example: labelling is left to layer 5.
_ONE_EXAMPLE = {"few_shot": 4}

PHASES: tuple[Phase, ...] = (
    Phase(
        tokens=180_000,
        shapes=((16, 64),),
        tasks=_mix(0.45, 0, 0.05, 0.22, 0, 0.23, 0.05),
        digits={0: 0.7, 1: 0.3},
    ),
    Phase(
        tokens=420_000,
        shapes=((10, 128), (16, 64)),
        tasks=_mix(0.33, 0, 0.05, 0.2, 0, 0.27, 0.15),
        digits={0: 0.3, 1: 0.1, 2: 0.25, 4: 0.35},
    ),
    Phase(
        tokens=800_000,
        shapes=((8, 256),),
        tasks=_mix(0.23, 0.05, 0.07, 0.18, 0.05, 0.22, 0.2),
        digits={0: 0.15, 2: 0.15, 4: 0.7},
    ),
    Phase(
        tokens=1_800_000,
        shapes=((8, 256), (4, 512)),
        tasks=_mix(0.18, 0.1, 0.07, 0.18, 0.05, 0.17, 0.25),
        digits={0: 0.15, 2: 0.15, 4: 0.7},
        all_full=0.15,
        windows=_ONE_EXAMPLE,
    ),
    Phase(
        tokens=4_000_000,
        shapes=((2, 1024), (2, 1024), (4, 512)),
        tasks=_mix(0.15, 0.17, 0.08, 0.15, 0.06, 0.14, 0.25),
        digits={0: 0.1, 2: 0.1, 4: 0.8},
        all_full=0.25,
        windows=_ONE_EXAMPLE,
    ),
)


def scaled(phases: tuple[Phase, ...], share: float) -> tuple[Phase, ...]:
    """Shorten or lengthen every phase to `share` of its tokens."""
    return tuple(replace(p, tokens=max(1, round(p.tokens * share))) for p in phases)


def learning_rate(step: int, done: float, peak: float, warm_up: int = 60) -> float:
    """Warm up over steps, hold `peak` to 40 % of the tokens, then fall in a line to 3 % of it."""
    fall = 1.0 if done < 0.4 else 0.03 + 0.97 * (1 - (done - 0.4) / 0.6)
    return peak * min(1.0, (step + 1) / warm_up) * fall
