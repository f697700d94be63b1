"""The section `[evaluation]` of a run file: held-out prompts on which policy versions are scored."""

from __future__ import annotations

import msgspec

from streamrl.runfile.section import Section
from streamrl.runfile.workload_config import SourceConfig, TemplateConfig


class EvaluationConfig(Section, frozen=True, kw_only=True):
    """Score policy versions on held-out prompts, on the replicas of the run.

    The trainer never sees these rollouts. An evaluation has the weights of one version: replicas load
    no other weights until it has ended.
    """

    prompts: str | None = None
    """Held-out records, as `workload.prompts`. Absent: `share` of the run's own prompts."""
    share: float | None = None
    """Share of the prompts of `workload` that is held out: they are evaluated and never trained on.
    The run's seed selects them.
    """
    subset: str | None = None
    """As `workload.subset`, for `prompts`."""
    split: str | None = None
    """As `workload.split`, for `prompts`."""
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    """As `workload.fields`, for `prompts`."""
    template: TemplateConfig | None = None
    num_prompts: int | None = None
    """Maximum prompts of an evaluation: the first ones of the file. Absent: all. A
    simulation needs it where the files of prompts are missing."""
    every: int = 20
    """Steps from one evaluation to the next. The last version is always evaluated."""
    before: bool = True
    """Whether the weights before the first step are evaluated."""
    beside: bool = False
    """Whether training goes on during an evaluation. false: no rollout starts and no optimizer step is
    made until it has ended. true: only new weights wait for its end.
    """
    samples: int = 1
    """Rollouts of each prompt: n of avg@n and of the estimates of pass@k."""
    k: tuple[int, ...] | None = None
    """Values of k for which pass@k is reported. Absent: 1 and `samples`."""
    passes_at: float = 1.0
    """Least reward of a rollout that counts as solved, for pass@k."""
    confidence: float = 0.95
    """Confidence level of the intervals."""
    temperature: float | None = None
    """Sampling temperature; 0: the most likely token. Absent: `rollout.temperature`."""
    top_p: float | None = None
    """As `rollout.top_p`, whose value it has where absent."""
    top_k: int | None = None
    """As `rollout.top_k`, whose value it has where absent."""
    min_p: float | None = None
    """As `rollout.min_p`, whose value it has where absent."""
    max_tokens: int | None = None
    """Maximum output tokens. Absent: `rollout.max_tokens`."""
    scorer: str | None = None
    """Scorer or function, as `verifier.scorer`. Absent: the rewards of `[verifier]` without length
    penalties. With `[environment]` the rewards of the environment are added.
    """

    @property
    def source(self) -> SourceConfig | None:
        """The data set of the held-out prompts; None where they are a share of the run's own."""
        if self.prompts is None:
            return None
        return SourceConfig(
            prompts=self.prompts,
            subset=self.subset,
            split=self.split,
            fields=self.fields,
            template=self.template,
        )

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k of pass@k, in ascending order."""
        return tuple(sorted({*(self.k or (1, self.samples))}))

    def is_due(self, version: int, num_steps: int) -> bool:
        """Return whether a version of a run of `num_steps` steps is evaluated."""
        if version == 0 and num_steps:
            return self.before
        return version % self.every == 0 or version == num_steps

    def versions(self, num_steps: int) -> list[int]:
        """Return the versions of a run that are evaluated."""
        return [version for version in range(num_steps + 1) if self.is_due(version, num_steps)]
