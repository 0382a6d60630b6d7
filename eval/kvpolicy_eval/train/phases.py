"""The curriculum, counted in tokens so that a rerun gives the same model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvpolicy_eval.train.net import Focus

# Layer 0 attends only to the last few tokens anyway, so its attention is never restricted.
FOCUS: dict[str, Focus] = {
    "recall": Focus(layers=frozenset({0, 1})),
    "recall_far": Focus(layers=frozenset({0, 1})),
    "hot_keys": Focus(layers=frozenset({0, 1})),
    "needles": Focus(layers=frozenset({0, 3})),
    "passkey": Focus(layers=frozenset({0, 3})),
    "few_shot": Focus(layers=frozenset({0, 5})),
    "source": Focus(layers=frozenset({0})),
}
"""Task to the attention of its layers in most steps: one retrieval layer attends to the whole context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of the curriculum.

    Args:
        tokens: Length of the phase, in training tokens.
        shapes: Choices of (batch, length); repeated choices are drawn more often.
        tasks: Probability of each task; they sum to 1.
        digits: Probability of each number of digits of a value (0: the value is a word).
        all_full: Probability of a step in which every layer attends to the whole context.
        windows: Windows of the restricted layers by task, where they differ from `FOCUS`.
    """

    tokens: int
    shapes: tuple[tuple[int, int], ...]
    tasks: dict[str, float]
    digits: dict[int, float]
    all_full: float = 0.1
    windows: dict[str, int] = field(default_factory=dict)

    def focus(self, task: str) -> Focus:
        """Attention of the layers in a step of `task`."""
        default = FOCUS[task]
        return Focus(layers=default.layers, window=self.windows.get(task, default.window))


def _mix(*shares: float) -> dict[str, float]:
    """Task probabilities in the order of `names`; tasks with probability 0 are left out."""
    names = ("recall", "recall_far", "hot_keys", "needles", "passkey", "few_shot", "source")
    assert abs(sum(shares) - 1) < 1e-9
    return {name: share for name, share in zip(names, shares, strict=True) if share}


# Once categories are learned, the other layers attend to less than one example, so that only layer 5 can label.
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

LONG_PHASES: tuple[Phase, ...] = (
    Phase(
        tokens=400_000,
        shapes=((1, 2048), (1, 2048), (2, 1024), (4, 512)),
        tasks=_mix(0.18, 0.17, 0.08, 0.17, 0.06, 0.16, 0.18),
        digits={0: 0.1, 2: 0.1, 4: 0.8},
        all_full=0.1,
        windows=_ONE_EXAMPLE,
    ),
    Phase(
        tokens=1_500_000,
        shapes=((1, 4096), (1, 4096), (1, 4736), (1, 2048), (2, 1024), (4, 512)),
        tasks=_mix(0.18, 0.17, 0.08, 0.17, 0.06, 0.16, 0.18),
        digits={0: 0.1, 2: 0.1, 4: 0.8},
        all_full=0.1,
        windows=_ONE_EXAMPLE,
    ),
    Phase(
        tokens=400_000,
        shapes=((1, 4096), (1, 4736), (1, 2048), (2, 1024), (4, 512)),
        tasks=_mix(0.18, 0.17, 0.08, 0.17, 0.06, 0.16, 0.18),
        digits={0: 0.1, 2: 0.1, 4: 0.8},
        all_full=0.3,
        windows=_ONE_EXAMPLE,
    ),
)
"""Phases that continue the trained model to 4,096 tokens, and to 640 positions behind them for replays."""


def scaled(phases: tuple[Phase, ...], share: float) -> tuple[Phase, ...]:
    """Scale the tokens of every phase by `share`."""
    return tuple(replace(p, tokens=max(1, round(p.tokens * share))) for p in phases)


def learning_rate(step: int, done: float, peak: float, warm_up: int = 60) -> float:
    """Linear warm-up over steps, constant until 40 % of the tokens, then linear decay to 3 % of `peak`."""
    decay = 1.0 if done < 0.4 else 0.03 + 0.97 * (1 - (done - 0.4) / 0.6)
    return peak * min(1.0, (step + 1) / warm_up) * decay
