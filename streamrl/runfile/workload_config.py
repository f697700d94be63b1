"""The section `[workload]` of a run file: prompts for a real run, output lengths for a simulated one."""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.runfile.section import Section

HUB = "hf://"
"""What `workload.prompts` begins with that is a data set of the hub, and no path."""
LengthsKind = Literal["histogram", "empirical", "groups", "trace"]
RankerName = Literal["none", "oracle", "recall", "scores", "history", "recorded"]
FreeRanker = Literal["none", "oracle", "recall"]
"""Rankers that need no file, and work with lengths of any kind."""

TAIL_SHARE = 0.2
"""Of recall@20%, the figure that StreamRL (arXiv 2504.15930, Table 4) states first; a ranker that knows nothing has it."""


class LengthsConfig(Section, frozen=True, kw_only=True):
    """Where simulated output lengths come from."""

    kind: LengthsKind
    """histogram: bins of `start,end,density`. empirical: one length a row (column output_tokens).
    groups: lengths by prompt (columns prompt_id and output_tokens; optional prompt_tokens and
    family); whole groups are sampled. trace: the lengths of a recorded run, rollout by rollout.
    """
    source: str
    """A name in profiles/lengths, or the path of a CSV file (a trace: its JSONL file)."""
    scale: float = 1.0
    """Multiplies every length."""
    scale_to: float | None = None
    """What multiplies lengths in the last step, where they drift; in between the factor goes linearly."""
    drift_steps: int | None = None
    """The step that has `scale_to` first; the last of the run where absent."""
    prompt_tokens: int = 400
    """Tokens of a prompt where the source does not say."""
    ranker: RankerName = "none"
    """How a rollout's expected length is computed. none: the mean of all. oracle: its true length.
    recall: the true length with noise that gives `ranker_recall`. scores: with the errors of
    `ranker_scores`. history: the mean of its prompt's past. recorded (kind trace): as the
    recorded run expected; the order of prompts then stays the same.
    """
    ranker_recall: float = 0.87
    """recall@20% of a ranker of kind recall; 0.87 is StreamRL's (arXiv 2504.15930, Table 4)."""
    ranker_recall_to: float | None = None
    """Its recall at the end of the drift, where it goes stale."""
    ranker_correlation: float = 0.0
    """Share of its noise that the rollouts of a group have in common."""
    ranker_scores: str | None = None
    """Held-out scores of a real ranker: a CSV file with columns score and output_tokens."""
    ranker_history: int = 1
    """Past samples of each prompt that a ranker of kind history knows."""

    epochs: bool = False
    """Whether prompts (kind groups) come once an epoch each, in the order that an executed run with this seed and as many
    prompts has; at random where not."""

    @property
    def drifts(self) -> bool:
        """Whether lengths, or what the ranker knows of them, change over a training."""
        return self.scale_to is not None or self.ranker_recall_to is not None

    @property
    def names_a_file(self) -> bool:
        """Whether `source` is a path, not the name of a profile."""
        return "/" in self.source or "." in self.source


class RankerConfig(Section, frozen=True, kw_only=True):
    """A ranker that learns while the run goes on, and is switched off where it is worse than none.

    Its prior is, in a simulation, what `workload.lengths.ranker` says; in an executed run a file, or `expected_tokens`.
    """

    path: str | None = None
    """What `streamrl ranker fit` wrote, to score prompts with; where absent, lines of `workload.prompts` may say
    `expected_tokens`, and no prompt is expected to be longer than another where they do not."""
    history: bool = True
    """Whether what a prompt's rollouts took in earlier epochs counts."""
    window: int = 32
    """Groups, in draw order, after which it learns and is judged; at least a step's."""
    false_alarms: float = 0.01
    """Chance that a window in which nothing has changed counts as drift, whereupon it is fitted anew."""


class TemplateConfig(Section, frozen=True, kw_only=True):
    """A chat that prompts are put into: at most one system message, and one of the user.

    Both are Jinja templates whose variables are the fields of the record: "{{ prompt }} Think step by step."
    """

    user: str
    system: str | None = None


class SourceConfig(Section, frozen=True, kw_only=True):
    """One data set of a mixture; its keys are those of `[workload]` where there is one data set."""

    prompts: str
    name: str | None = None
    """The "family" of its records, by which `[[verifier.reward]]` chooses, and rankers' tables group what has no task."""
    weight: float = 1.0
    """Its share of the groups, beside the weights of the others."""
    subset: str | None = None
    split: str | None = None
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    template: TemplateConfig | None = None


class WorkloadConfig(Section, frozen=True, kw_only=True):
    """What is generated: prompts for a real run, lengths for a simulated one."""

    prompts: str | None = None
    """Records with a "prompt" and what their scorers read: a JSONL or Parquet file, a directory that
    `datasets.save_to_disk` wrote, or "hf://NAME", a data set of the Hugging Face hub."""
    subset: str | None = None
    """Of a data set of the hub that has several configurations: which."""
    split: str | None = None
    """Of a data set: which split; where absent the only one."""
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    """By the name of a field that the run reads (prompt, answer, task, tests, ...) the column that has it; dots lead into
    nested ones. Fields that are not named here are columns of their own names."""
    template: TemplateConfig | None = None
    """What prompts are made of, where the data has none as the model is to see it."""
    source: tuple[SourceConfig, ...] = ()
    """Data sets to be mixed, in place of `prompts`."""
    order: Literal["shuffled", "file"] = "shuffled"
    """Order of prompts. shuffled: shuffled in every epoch by the run's seed. file: in the order of
    the file in every epoch, for example from easy to hard.
    """
    max_prompt_tokens: int = 2048
    informative_share: float = 1.0
    """Simulated share of rollouts with a non-zero advantage; without a KL term a trainer skips the others."""
    group_rewards: tuple[tuple[float, float], ...] = ()
    """Simulated: pairs of a group's mean reward and the share of groups that have it, such as
    [[0.0, 0.25], [1.0, 0.75]]. Read only where a trainer selects groups by their rewards.
    Measure it on your task.
    """
    lengths: LengthsConfig | None = None
    ranker: RankerConfig | None = None
    """What expects longer outputs of some prompts than of others, learns, and is watched; none where absent."""

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The data sets that prompts come from, in order; nothing where the run file names none."""
        if self.prompts is None:
            return self.source
        only = SourceConfig(
            prompts=self.prompts,
            subset=self.subset,
            split=self.split,
            fields=self.fields,
            template=self.template,
        )
        return (only,)

    @property
    def source_weights(self) -> tuple[float, ...]:
        """The weight of each data set, in order."""
        return tuple(source.weight for source in self.sources)

    def key(self, place: int) -> str:
        """Return the key of the data set at a place of `sources`."""
        return f"workload.source.{place}.prompts" if self.source else "workload.prompts"
