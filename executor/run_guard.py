"""Guard a run: project its end, stop it before its deadline or budget is exceeded, and say if it cannot learn.

`RunGuard.take` gets each line of metrics.jsonl. `RunGuard.reason` is asked every second. `StageWatch.take` gets each entry
of the trace.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from streamrl.engine.messages import Stepped, TrainerJoined
from streamrl.engine.trace import Entry, Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.executor.launchers.placement import usable_cores
from streamrl.record.attribution import AttributionReader
from streamrl.record.step_stages import stage_seconds
from streamrl.runfile.config import ExecuteConfig
from streamrl.runfile.formatting import format_dollars, format_duration
from streamrl.runfile.roles_config import VerifierConfig

logger = logging.getLogger(__name__)

FEW_STEPS = 5
"""Steps after which the end is projected, and steps in a row without a signal after which the run says so."""
CLOSE_TIME = 8.0
"""Seconds that processes take to end after `execute.grace`; see `LAST_TIME` in `execute.py`."""

CLOSE = 0.1
"""A stage that is off by less than this share of the planned step is as planned."""
MOST_ENTRIES = 10_000
"""Entries of the trace that are read at a time, so that those of a long step are not all in memory."""
HELD_UP = 0.1
"""Share of their time that replicas and trainer wait for rewards, from which the run says so."""


class PlannedStep(NamedTuple):
    """What a plan says of a step."""

    step_time: float
    """Seconds of a mean step."""
    stages: Mapping[str, float] = {}
    """Seconds of a mean step in each stage, as `stage_seconds` returns them."""


class RunGuard:
    """Watches the steps, the time and the cost of one start of a run."""

    def __init__(
        self,
        execute: ExecuteConfig,
        num_steps: int,
        dollars: float,
        planned: PlannedStep | None = None,
    ) -> None:
        """Take the limits, the steps of the whole run, the cost in dollars per second, and what was planned."""
        self._execute = execute
        self._planned = None if planned is None else planned.step_time
        self.stages: Mapping[str, float] = {} if planned is None else planned.stages
        """Planned seconds of each stage; empty without a plan."""
        self._num_steps = num_steps
        self._dollars = dollars
        self._learning = LearningWatch()
        self._took: deque[float] = deque(maxlen=FEW_STEPS - 1)
        self._num_seen = 0
        self.ended: str | None = None
        """Why the guard has ended the run; None if it has not."""

    @property
    def time_limit(self) -> tuple[float, str] | None:
        """Seconds that this start may take, and the key that says so; None without a limit."""
        limits = []
        if self._execute.deadline is not None:
            text = format_duration(self._execute.deadline)
            limits.append((float(self._execute.deadline), f"execute.deadline ({text})"))
        if self._execute.budget is not None and self._dollars:
            text = format_dollars(self._execute.budget)
            limits.append((self._execute.budget / self._dollars, f"execute.budget ({text})"))
        return min(limits, default=None)

    def reason(self, now: float) -> str | None:
        """Return why the run must be saved and ended at `now` seconds; None if it may go on, or was told before."""
        limit = self.time_limit
        if limit is None or self.ended is not None:
            return None
        seconds, key = limit
        margin = min(self._execute.grace + CLOSE_TIME, seconds / 2)
        if now < seconds - margin:
            return None
        self.ended = f"{key} would be exceeded"
        return self.ended

    def take(self, line: Mapping[str, Any]) -> None:
        """Read a line of metrics.jsonl."""
        if not isinstance(line.get("step"), int):
            return
        self._learning.take(line)
        self._num_seen += 1
        if self._num_seen > 1:  # the first step includes the start of processes
            self._took.append(float(line["step_time"]))
        if self._num_seen == FEW_STEPS:
            logger.info(self._projection(line["step"], float(line["time"])))

    def _projection(self, step: int, now: float) -> str:
        """Return the expected time and cost of this start, and whether a limit ends it earlier."""
        pace = median(self._took)
        total = now + (self._num_steps - step) * pace
        text = f"after {FEW_STEPS} steps: {format_duration(pace)} a step"
        if self._planned is not None:
            text += f" ({pace / self._planned - 1:+.0%} against {format_duration(self._planned)} planned)"
        text += f", {format_duration(total)} in all"
        if self._dollars:
            text += f", {format_dollars(total * self._dollars)}"
        limit = self.time_limit
        if limit is not None and total > limit[0]:
            reached = step + int(max(0.0, limit[0] - now) / max(pace, 1e-9))
            text += f"; {limit[1]} ends the run at about step {reached:,} of {self._num_steps:,}"
        return text

    def end(self) -> None:
        """Say at the end if the run could not learn."""
        self._learning.end()


class StageWatch:
    """Says after a few steps if rewards hold up the run, and which stage deviates from its planned seconds."""

    def __init__(self, header: Trace, planned: Mapping[str, float]) -> None:
        """Take a trace of the run without entries, and the planned seconds of each stage, if there is a plan."""
        self._verifier = header.run.verifier
        self._reader: AttributionReader | None = AttributionReader(header)
        self._secondary = [follower.name for follower in header.run.followers]
        self._planned = planned
        self._block: list[Entry] = []
        self._stepped_at: list[float] = []

    def take(self, entry: Entry) -> None:
        """Read an entry of the trace, as it happens."""
        if isinstance(entry.event, TrainerJoined):  # from now on a step has other stages
            self._reader, self._block = None, []
        if self._reader is None:
            return
        self._block.append(entry)
        if not isinstance(entry.event, Stepped) or entry.event.trainer != LEADER:
            if len(self._block) >= MOST_ENTRIES:
                self._read()
            return
        self._stepped_at.append(entry.time)
        self._reader.mark([entry.time])
        self._read()
        if len(self._stepped_at) == FEW_STEPS:
            self._reader.finish()
            # What runs beside the newest step is known only once it ends. The first step has the start of processes.
            first, last = self._stepped_at[0], self._stepped_at[-2]
            step_time = (last - first) / (FEW_STEPS - 2)
            shares = self._reader.between(first, last)
            self._reader = None
            if text := rewards_text(shares.whole.idle["verifier"], self._verifier, usable_cores()):
                logger.warning(text)
            if self._planned:
                measured = stage_seconds(shares, step_time, self._secondary)
                logger.info(compare_stages(measured, self._planned))

    def _read(self) -> None:
        """Read the entries that have gathered."""
        if self._reader is not None:
            self._reader.read(self._block)
        self._block = []


def rewards_text(share: float, verifier: VerifierConfig, num_cores: int) -> str:
    """Return that rewards hold up a run, and what helps; "" if replicas and trainer hardly wait for them.

    Args:
        share: share of the time of replicas and trainer in which they wait for rewards.
        verifier: what computes the rewards.
        num_cores: CPU cores that this machine has for scorers.
    """
    if share < HELD_UP:
        return ""
    workers = verifier.workers
    told = f"replicas and trainer wait for rewards {share:.0%} of their time"
    judges = [reward.at_once for reward in verifier.rewards if reward.endpoint is not None]
    if verifier.pool is not None:
        return (
            f"{told}: set verifier.workers above {workers}, for more replicas of the reward model"
        )
    if judges:
        return f"{told}: set at_once of the judge above {min(judges)}, for more requests at a time"
    if workers >= num_cores:
        return f"{told}, with verifier.workers {workers} on {num_cores} CPU cores: a faster scorer or more cores help"
    return f"{told}: set verifier.workers above {workers}, up to the {num_cores} CPU cores of this machine"


def compare_stages(measured: Mapping[str, float], planned: Mapping[str, float]) -> str:
    """Return the seconds of each stage beside the planned ones, and the stage that deviates most."""
    parts, off = [], {}
    for stage in dict.fromkeys([*planned, *measured]):
        own, wanted = measured.get(stage, 0.0), planned.get(stage, 0.0)
        beside = f"{own / wanted - 1:+.0%} against {format_duration(wanted)}" if wanted else ""
        parts.append(f"{stage} {format_duration(own)} ({beside or 'not planned'})")
        off[stage] = own - wanted
    text = f"stages of a step, against the plan: {', '.join(parts)}"
    most = max(off, key=lambda stage: abs(off[stage]))
    if abs(off[most]) <= CLOSE * sum(planned.values()):
        return f"{text}; no stage deviates by more than {CLOSE:.0%} of a step"
    sign = "longer" if off[most] > 0 else "shorter"
    return f"{text}; {most} deviates most: {format_duration(abs(off[most]))} {sign} in each step"


class LearningWatch:
    """Says if steps have no learning signal: all rewards of each group are equal, or the gradient is zero."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_futile = 0
        self._in_a_row = 0
        self._last: Mapping[str, Any] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """Read the figures of a step."""
        is_futile = line.get("uniform_groups") == 1.0 or line.get("grad_norm") == 0.0
        self._num_steps += 1
        self._num_futile += is_futile
        self._in_a_row = self._in_a_row + 1 if is_futile else 0
        self._last = line
        if self._in_a_row == FEW_STEPS:
            logger.warning(
                f"{FEW_STEPS} steps in a row taught the model nothing, up to step {line['step']}: {causes(line)}"
            )

    def end(self) -> None:
        """Log how many steps taught nothing, if those were most of them or the last ones."""
        is_many = self._num_futile > self._num_steps / 2 or self._in_a_row >= FEW_STEPS
        if self._num_steps >= FEW_STEPS and is_many:
            what = f"{self._num_futile:,} of {self._num_steps:,} steps taught the model nothing"
            logger.warning(f"{what}: {causes(self._last)}")


def causes(line: Mapping[str, Any]) -> str:
    """Return what the figures of a step without a signal show, and its likely causes."""
    shown = [f"reward {line.get('reward', 0.0):.3f} in every group"]
    if line.get("reward_std"):
        shown = ["each group has equal rewards"]
    if line.get("uniform_groups") != 1.0:
        shown = ["the gradient is 0"]
    if line.get("cut_off", 0.0) >= 1.0:
        return f"{shown[0]}, and all completions are cut off; raise rollout.max_tokens, or check that the prompts have the chat template"
    if line.get("unscored"):
        return f"{shown[0]}, and {line['unscored']:,} completions have no score; see the scorer's warning above"
    if line.get("late_actions"):
        return (
            f"{shown[0]}, and {line['late_actions']:,} actions reached environment.action_time_limit; "
            "see the warnings above, and raise it if tools are slow"
        )
    if line.get("uniform_groups") != 1.0:
        return f"{shown[0]}; check algorithm.learning_rate and the clipping"
    if line.get("reward", 0.0) >= 1.0:
        return f"{shown[0]}; the prompts are too easy, or the scorer accepts everything (streamrl samples RUN)"
    return f"{shown[0]}; the prompts are too hard, or the scorer refuses the format (streamrl samples RUN)"
