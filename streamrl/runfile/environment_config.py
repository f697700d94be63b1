"""The section `[environment]` of a run file: episodes of several turns, and the environments that answer them."""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration, Size

LossRecovery = Literal["restart", "replay"]
ToolFormat = Literal["auto", "hermes", "xml", "llama", "mistral"]


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
    """Maximum environments at once. Absent: one for each episode that is in flight. `streamrl plan`
    rents at most this number.
    """
    sandbox_price: float = 0.0
    """Dollars per hour of one sandbox. All `sandboxes` are paid for as long as the GPUs."""
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
    start_time_limit: Duration = Duration(300.0)
    """Time limit of the start of one environment. One that takes longer is lost."""
    after_loss: LossRecovery = "restart"
    """What happens to an episode whose environment is lost. restart: it begins again without tokens.
    replay: it keeps its tokens, and its actions are repeated in a new environment.
    """
    scores_in_sandbox: bool = False
    """Whether the reward is computed in the episode's environment, which then stays open until the
    reward is known.
    """
    implementation: str | None = None
    """Executed: the environment. A name, or a class with `reset` and `step`: "python:FILE.py:CLASS" or
    "MODULE:CLASS". See docs/agentic.md.
    """
    arguments: dict[str, bool | int | float | str] = msgspec.field(default_factory=dict)
    """Executed: keyword arguments of the class, such as { max_attempts = 3 }."""
    tools: tuple[str, ...] = ()
    """Executed: tools of the environment "tools": functions as "python:FILE.py:FUNCTION" or
    "MODULE:FUNCTION", and MCP servers as "mcp:COMMAND" or "mcp:http://HOST/PATH".
    """
    tool_format: ToolFormat = "auto"
    """Executed: how the policy writes tool calls. hermes: JSON between <tool_call> and </tool_call>, as
    Qwen3 does. xml: <function=NAME> with <parameter=KEY> between these tags, as Qwen3-Coder does.
    llama: a JSON object with name and parameters. mistral: a JSON list after [TOOL_CALLS]. auto: the
    one of the model's chat template.
    """
    sandbox: bool = True
    """Executed: whether the environment runs without network, subprocesses and files of yours. With
    false it runs as trusted code. It must then not execute text of the policy.
    """
    memory_limit: Size = Size(1e9)
    """Executed: maximum memory of one environment in the sandbox."""
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
    action_time_factor: float = 1.0
    """Simulated: factor on the time of each action, also of recorded episodes."""
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
