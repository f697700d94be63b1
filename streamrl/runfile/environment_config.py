"""The section `[environment]` of a run file: episodes of several turns, and the environments that answer them."""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration

LossRecovery = Literal["restart", "replay"]


class EnvironmentConfig(Section, frozen=True, kw_only=True):
    """Episodes of several turns: the policy generates a turn, its environment answers with an observation.

    A run without this section has episodes of one turn. `workload.lengths` are the generated tokens
    of a whole episode. Texts such as "mean 20, p95 40, max 50" state a lognormal distribution.
    """

    max_turns: int
    """Maximum turns of an episode. The environment does not answer the last one."""
    max_context: int
    """Maximum tokens of an episode: prompt, generated tokens and observations. An episode ends there.
    """
    sandboxes: int | None = None
    """Maximum environments at once. Absent: one for each episode that is in flight."""
    max_episodes: int | None = None
    """Maximum episodes in flight: those whose environment was started and that have not ended.
    Absent: no limit.
    """
    action_time_limit: Duration | None = None
    """Time limit of one action. The observation then says that the action timed out."""
    episode_time_limit: Duration | None = None
    """Time limit of an episode, from the end of its environment's start. The episode then ends with
    the tokens that it has.
    """
    after_loss: LossRecovery = "restart"
    """What happens to an episode whose environment is lost. restart: it begins again without tokens.
    replay: it keeps its tokens, and its actions are repeated in a new environment.
    """
    scores_in_sandbox: bool = False
    """Whether the reward is computed in the episode's environment, which then stays open until the
    reward is known.
    """
    source: str | None = None
    """Simulated: a name in profiles/episodes, such as "swe-agent". It gives the distributions below
    that are absent.
    """
    turns: str | None = None
    """Simulated: turns of an episode, such as "median 33, p95 60". Longer episodes have more turns."""
    observation_tokens: str | None = None
    """Simulated: tokens of an observation, such as "mean 1900, p95 6000"."""
    action_time: str | None = None
    """Simulated: time of an action, such as "median 5.2 s, p99 81 s"."""
    start_time: str | None = None
    """Simulated: time to start an environment, such as "4 s"."""
    warm_start_time: Duration = Duration(0.0)
    """Simulated: time to start a prepared environment."""
    warm: int = 0
    """Simulated: environments that are kept prepared."""
    starts_per_second: float | None = None
    """Simulated: maximum environments started per second. Absent: no limit."""
    failed_share: float = 0.0
    """Simulated: share of actions and starts that fail because the environment is lost."""
