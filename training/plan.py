"""How long a training of the base lasts, which stage it is in, and its learning rate."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass
class Stage:
    """`SIZE:BATCH:WEIGHT`: pictures of SIZE px, BATCH a step and process, for WEIGHT of the run (relative).

    `:tower` behind it: only the probes' loss, so that the tower alone learns, at a fifth of the cost of a picture.
    """

    size: int
    batch: int
    weight: float
    tower_only: bool = False

    @classmethod
    def parse(cls, text: str) -> "Stage":
        size, batch, weight, *part = text.split(":")
        if part not in ([], ["tower"]):
            raise ValueError(f"a stage is SIZE:BATCH:WEIGHT or SIZE:BATCH:WEIGHT:tower, not {text!r}")
        return cls(int(size), int(batch), float(weight), bool(part))


@dataclass
class Plan:
    """How far the run is, which stage that makes it, and the learning rate's factor.

    Measured in pictures (exact: the stage of step k is fixed) or in seconds (a loan's worth: stages change by the
    clock; `now` is shared with the workers).
    """

    stages: list[Stage]
    pictures: int = 0  # of the whole run; 0 where seconds decide
    seconds: float = 0.0
    world: int = 1
    warmup: int = 6400  # pictures
    decay: float = 0.4  # the last share of the run, over which the rate falls to zero
    done_pictures: int = 0
    done_seconds: float = 0.0
    now: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64).share_memory_())

    def __post_init__(self):
        weights = np.array([stage.weight for stage in self.stages])
        if not self.pictures and not self.seconds:
            self.pictures = int(weights.sum())
        self.bounds = np.cumsum(weights) / weights.sum()
        shares = weights / weights.sum() * self.pictures
        steps = [max(1, round(n / (s.batch * self.world))) for n, s in zip(shares, self.stages, strict=True)]
        self.ends = np.cumsum(steps)  # the step at which each stage is over
        if not self.seconds:  # whole steps
            self.pictures = self.world * sum(n * s.batch for n, s in zip(steps, self.stages, strict=True))

    @property
    def total_steps(self) -> int:
        return 10**9 if self.seconds else int(self.ends[-1])

    @property
    def progress(self) -> float:
        if self.seconds:
            return min(1.0, self.done_seconds / self.seconds)
        return min(1.0, self.done_pictures / self.pictures)

    def stage(self, step: int) -> Stage:
        index = int(self.now) if self.seconds else int(np.searchsorted(self.ends, step, "right"))
        return self.stages[min(index, len(self.stages) - 1)]

    def advance(self, pictures: int, seconds: float):
        self.done_pictures, self.done_seconds = pictures, seconds
        self.now.fill_(min(int(np.searchsorted(self.bounds, self.progress, "right")), len(self.stages) - 1))

    def rate(self, _step: int = 0) -> float:
        warm = (self.done_pictures + 1) / self.warmup if self.warmup else 1.0
        return min(1.0, warm, (1 - self.progress) / self.decay)
