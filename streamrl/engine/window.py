"""Which groups may start ahead of training, and under which version: what staleness is bounded by.

Groups have places in the order of the run, from 0. With P prompts a step, S steps that generation may be ahead, of
which A = floor(P S) groups, and weights that are pushed at each kth version:

    step that place n is for        n // P + 1, which trains from version n // P
    oldest version it starts under  k max(0, floor((n - A) / (P k)))
    places that may start at v      those before P (v - v mod k + k) + A: of which the oldest version is at most v

What is trained in its place is less than S + k versions behind, so at most ceil(S) + k - 1: with k = 1 and a whole S
that is S. It is the bound of AReaL (arXiv 2505.24298, its eta) and verl's (1 + staleness_threshold) batches of a push.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionWindow:
    """See the module; what a run lets start ahead of training."""

    prompts_per_step: int
    num_ahead: int
    """Groups that may start before the versions are there that those of their step would else wait for."""
    sync_every: int = 1
    num_extra: int = 0
    """Groups that are drawn beyond those that a step is made of."""

    def num_allowed(self, version: int, num_steps: int) -> int:
        """Return the places that may be drawn at `version` of a run of so many steps, the extra ones left out."""
        pushed = version - version % self.sync_every
        allowed = (pushed + self.sync_every) * self.prompts_per_step + self.num_ahead
        last = num_steps * self.prompts_per_step
        return allowed if allowed < last else last

    def oldest(self, place: int) -> int:
        """Return the oldest version that the group at a place may start under."""
        return self.sync_every * self._cycle(place)

    def step(self, place: int) -> int:
        """Return the step that the group at a place is for."""
        return place // self.prompts_per_step + 1

    def next_border(self, place: int) -> int:
        """Return the next place that is for another step, or may start under another version only."""
        cycle = self.prompts_per_step * self.sync_every
        new_version = self.num_ahead + cycle * (self._cycle(place) + 1)
        return min(self.step(place) * self.prompts_per_step, new_version)

    def _cycle(self, place: int) -> int:
        """Return how many pushes the group at a place waits for."""
        return max(0, place - self.num_ahead) // (self.prompts_per_step * self.sync_every)
