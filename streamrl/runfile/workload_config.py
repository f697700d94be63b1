"""The section `[workload]` of a run file: prompts for a real run, output lengths for a simulated one."""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.runfile.section import Section

HUB = "hf://"
"""Prefix of `workload.prompts` for a data set on the hub."""
LengthsKind = Literal["histogram", "empirical", "groups", "trace", "stated", "episodes"]
RankerName = Literal["none", "oracle", "recall", "scores", "history", "recorded"]
FreeRanker = Literal["none", "oracle", "recall"]
"""Rankers that need no file and work with all kinds of lengths."""

TAIL_SHARE = 0.2
"""Of recall@20%, the figure that StreamRL (arXiv 2504.15930, Table 4) states first; a ranker that knows nothing has it."""


class LengthsConfig(Section, frozen=True, kw_only=True):
    """Where simulated output lengths come from."""

    kind: LengthsKind
    """histogram: bins of `start,end,density`. empirical: one length a row (columns output_tokens and,
    optionally, prompt_tokens).
    groups: lengths by prompt (columns prompt_id and output_tokens; optional prompt_tokens and
    family); whole groups are sampled. trace: the lengths of a recorded run, rollout by rollout.
    stated: lognormal lengths with the figures in `source`. episodes: whole episodes are sampled from an
    executed run or a CSV file, which needs [environment]. The file has one turn a row (columns episode,
    output_tokens, observation_tokens and action_time in seconds; optional prompt_tokens and start_time).
    Short forms of the section are
    lengths = { mean = "6k", p95 = "20k", max = "32k" } and lengths = "math reasoning" (or "short
    math", "code", "math and code", "chat").
    """
    source: str
    """A name in profiles/lengths, or the path of a CSV file (a trace: its JSONL file; episodes: also a
    run directory or its rollouts.jsonl). Kind stated: figures, such as "mean 6000, p95 20000, max 32000".
    """
    group_correlation: float = 0.0
    """Kinds histogram and stated: correlation of the lengths of two rollouts of a group, as normal
    quantiles. 0: independent. Measured are 0.63 (mathematics) and 0.79 (science questions).
    """
    scale: float = 1.0
    """Factor of every length."""
    scale_to: float | None = None
    """Factor of lengths in the last step, for a drift; between the first and the last step it
    changes linearly.
    """
    drift_steps: int | None = None
    """The first step with the full `scale_to`; where absent, the last step of the run."""
    prompt_tokens: int = 400
    """Tokens of a prompt, if the source has no prompt lengths."""
    ranker: RankerName = "none"
    """How a rollout's expected length is computed. none: the mean of all. oracle: its true length.
    recall: the true length with noise that gives `ranker_recall`. scores: with the errors of
    `ranker_scores`. history: the mean of its prompt's past. recorded (kind trace): as the
    recorded run expected; the order of prompts then stays the same.
    """
    ranker_recall: float = 0.87
    """recall@20% of a ranker of kind recall; 0.87 is StreamRL's (arXiv 2504.15930, Table 4)."""
    ranker_recall_to: float | None = None
    """Recall at the end of the drift, for a ranker that becomes outdated."""
    ranker_correlation: float = 0.0
    """Share of the ranker's noise that is common to the rollouts of a group."""
    ranker_scores: str | None = None
    """Held-out scores of a real ranker: a CSV file with columns score and output_tokens."""
    ranker_history: int = 1
    """Past samples of each prompt that a ranker of kind history knows."""

    epochs: bool = False
    """Kind groups: true: each prompt comes once an epoch, in the order of an executed run with this
    seed and number of prompts. false: prompts are drawn at random.
    """

    @property
    def drifts(self) -> bool:
        """Whether lengths, or what the ranker knows of them, change over a training."""
        return self.scale_to is not None or self.ranker_recall_to is not None

    @property
    def names_a_file(self) -> bool:
        """Whether `source` is a path, not the name of a profile."""
        is_path = self.kind == "episodes" or "/" in self.source or "." in self.source
        return self.kind != "stated" and is_path


class RankerConfig(Section, frozen=True, kw_only=True):
    """A ranker that learns during the run, and is switched off while it is worse than none.

    Its initial estimate is `workload.lengths.ranker` in a simulation. In an executed run it is a
    file, or `expected_tokens`.
    """

    path: str | None = None
    """A ranker file from `streamrl ranker fit`, which scores prompts. Where absent, the
    `expected_tokens` of lines in `workload.prompts` count; without them all prompts have the
    same expected length.
    """
    history: bool = True
    """Whether the lengths of a prompt's rollouts in earlier epochs count."""
    window: int = 32
    """Groups, in draw order, after which the ranker learns and is evaluated; at least one step."""
    false_alarms: float = 0.01
    """Probability that an unchanged window counts as drift, which causes a new fit."""


class TemplateConfig(Section, frozen=True, kw_only=True):
    """A chat around each prompt: an optional system message, and one user message.

    Both are Jinja templates with the record's fields: "{{ prompt }} Think step by step."
    """

    user: str
    """Jinja template of the user message."""
    system: str | None = None
    """Jinja template of the system message; no such message where absent."""


class SourceConfig(Section, frozen=True, kw_only=True):
    """One data set of a mixture; its keys are those of `[workload]` where there is one data set."""

    prompts: str
    """As `workload.prompts`, for this data set."""
    name: str | None = None
    """The "family" of its records. `[[verifier.reward]]` selects by it, and rankers' tables use it
    for records without a task.
    """
    weight: float = 1.0
    """Its share of the groups, relative to the weights of the other sources."""
    subset: str | None = None
    """As `workload.subset`, for this data set."""
    split: str | None = None
    """As `workload.split`, for this data set."""
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    """As `workload.fields`, for this data set."""
    template: TemplateConfig | None = None


class WorkloadConfig(Section, frozen=True, kw_only=True):
    """What to generate: prompts for a real run, lengths for a simulated one."""

    prompts: str | None = None
    """Records with a "prompt" and what their scorers read: a JSONL or Parquet file, a directory that
    `datasets.save_to_disk` wrote, or "hf://NAME", a data set of the Hugging Face hub."""
    subset: str | None = None
    """Configuration of a data set on the hub, if it has several."""
    split: str | None = None
    """Split of a data set; where absent, its only split."""
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    """Column for each field that the run reads (prompt, answer, task, tests, ...). Dots lead into
    nested columns. Fields that are not named here have columns of their own names.
    """
    template: TemplateConfig | None = None
    """Chat template for data without complete prompts."""
    source: tuple[SourceConfig, ...] = ()
    """Data sets to mix, instead of `prompts`."""
    order: Literal["shuffled", "file"] = "shuffled"
    """Order of prompts. shuffled: shuffled in every epoch by the run's seed. file: in the order of
    the file in every epoch, for example from easy to hard.
    """
    template_arguments: dict[str, bool | int | float | str] = msgspec.field(default_factory=dict)
    """Executed: arguments of the model's chat template, such as { enable_thinking = false }."""
    max_prompt_tokens: int = 2048
    """Maximum tokens of a prompt."""
    overlong_prompts: Literal["refuse", "filter"] = "refuse"
    """Executed: prompts above `max_prompt_tokens`. refuse: a run with one does not begin. filter: they
    are never drawn; the run reports how many of each data set.
    """
    informative_share: float = 1.0
    """Simulated: share of rollouts with a non-zero advantage. Without a KL term the trainer skips
    the others.
    """
    group_rewards: tuple[tuple[float, float], ...] = ()
    """Simulated: pairs of a group's mean reward and the share of groups that have it, such as
    [[0.0, 0.25], [1.0, 0.75]]. Read only where a trainer selects groups by their rewards.
    Measure it on your task.
    """
    lengths: LengthsConfig | None = None
    ranker: RankerConfig | None = None
    """Predicts which prompts have longer outputs, and learns during the run; absent: no ranker."""

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
