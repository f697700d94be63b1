"""Show a running job: a table of its last steps on a terminal, otherwise a line per step."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import sqrt
from statistics import fmean, stdev
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from streamrl.cli.consoles import SafeConsole
from streamrl.cli.progress import STDERR, PlainProgress, bar_columns
from streamrl.engine.entities import Phase
from streamrl.engine.messages import HELD_OUT, Event, Generated, Verified
from streamrl.engine.state import State
from streamrl.record.run_directory import ROLLED_BACK_TO
from streamrl.runfile.formatting import format_duration


class Column(NamedTuple):
    """A figure of a step, and how it is shown."""

    name: str
    keys: tuple[str, ...]
    """Keys of metrics.jsonl; a step that lacks one of them shows nothing."""
    form: str
    """Format for the values of `keys`."""
    meaning: str = ""
    """Explanation, if its name is not enough."""


COLUMNS = (
    Column("step", ("step",), "{:.0f}"),
    Column("seconds", ("step_time",), "{:.1f}"),
    Column("reward", ("reward", "reward_std"), "{:.3f} ± {:.3f}"),
    Column("tokens", ("length_mean", "length_max"), "{:.0f} to {:.0f}", "mean to longest"),
    Column("cut off", ("cut_off",), "{:.0%}"),
    Column("unscored", ("unscored",), "{:.0f}", "rollouts that their scorer cannot score"),
    Column("uniform", ("uniform_groups",), "{:.0%}", "groups of one reward, which teach nothing"),
    Column(
        "stale", ("staleness_mean", "staleness_max"), "{:.1f} to {:.0f}", "versions, mean to most"
    ),
    Column("loss", ("loss",), "{:+.3f}"),
    Column("gradient", ("grad_norm",), "{:.2f}", "norm before clipping"),
    Column("entropy", ("entropy",), "{:.3f}"),
    Column("KL", ("kl_k3",), "{:.1e}", "from the policy that sampled"),
    Column("KL ref", ("reference_kl",), "{:.1e}", "from the initial policy"),
    Column("tokens/s", ("speed",), "{:,.0f}"),
)
"""Columns on the right are left out if the terminal is too narrow."""


def step_table(steps: Sequence[Mapping[str, float]], console: Console) -> Table:
    """Return steps as a table, with as many columns as the terminal is wide."""
    shown = [column for column in COLUMNS if any(text_of(column, step) for step in steps)]
    table = _table(steps, shown)
    while len(shown) > 1 and console.measure(table).maximum >= console.width:
        shown.pop()
        table = _table(steps, shown)
    return table


def _table(steps: Sequence[Mapping[str, float]], shown: Sequence[Column]) -> Table:
    legend = "; ".join(f"{column.name}: {column.meaning}" for column in shown if column.meaning)
    table = Table(box=None, pad_edge=False, caption=legend, caption_justify="left")
    for column in shown:
        table.add_column(column.name, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(*(text_of(column, step) for column in shown))
    return table


def line_of(step: Mapping[str, float]) -> str:
    """Return the figures of a step as a line: "seconds 1.2, reward 0.685 ± 0.464, …"."""
    told = ((column.name, text_of(column, step)) for column in COLUMNS[1:])
    return ", ".join(f"{name} {text}" for name, text in told if text)


def text_of(column: Column, step: Mapping[str, float]) -> str:
    """Return a cell; empty if the step lacks the figure."""
    if any(key not in step for key in column.keys):
        return ""
    return column.form.format(*(step[key] for key in column.keys))


RECENT = 200
"""Rollouts in the mean reward next to the progress bar."""
NUM_ROWS = 10
"""Steps in the table."""
PACED = 30
"""Steps whose mean time says how long the rest takes. Over fewer steps it jumps."""
QUIET = 30.0
"""Seconds between progress lines within a step, without a terminal."""
REFRESHES = 4
"""Updates of the terminal a second, and counts of rollouts."""


class RunWatch:
    """Shows a run on standard error. It is a context manager that receives every event and every line of metrics.jsonl.

    An error of the terminal or of the log file never stops the run.
    """

    def __init__(
        self, num_steps: int, max_running: Sequence[int] = (1,), console: Console | None = None
    ) -> None:
        """Prepare the display.

        Args:
            num_steps: steps of the whole run.
            max_running: rollouts that a replica of each kind runs at once; further ones wait there.
            console: where to show it; a plain terminal gets lines, a quiet one nothing.
        """
        console = console or SafeConsole(stderr=True)
        self._num_steps = num_steps
        self._max_running = max_running
        self._console = console
        self._steps: deque[dict[str, float]] = deque(maxlen=NUM_ROWS)
        self._took: deque[float] = deque(maxlen=PACED)
        self._has_begun = False  # the first step includes the start of processes
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._tokens = 0
        self._known: dict[int, int] = {}
        """Tokens of rollouts whose turns or parts were counted before."""
        self._counted_at = 0.0
        self._version = 0
        self._facts = "starting"
        self._bar: Progress = PlainProgress(QUIET)
        self._live: Live | None = None
        if console.quiet:
            self._bar = Progress(disable=True)
        elif console.is_terminal and not console.is_dumb_terminal:
            self._bar = Progress(*bar_columns(), console=console)
            self._live = Live(
                console=console, get_renderable=self._view, refresh_per_second=REFRESHES
            )
        self._task = self._bar.add_task("step", total=num_steps, facts=self._shown_facts())

    def __enter__(self) -> RunWatch:
        with suppress(OSError):
            (self._live or self._bar).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            (self._live or self._bar).stop()

    def see(self, event: Event, state: State, now: float) -> None:
        """Process an event; a few times a second, count the rollouts by state."""
        if isinstance(event, Generated):
            self._count_tokens(event)
        elif isinstance(event, Verified) and event.rollout < HELD_OUT:
            self._known.pop(event.rollout, None)
            self._rewards.append(event.reward)
        version = state.leader.version
        if now >= self._counted_at + 1 / REFRESHES or version != self._version:
            self._counted_at, self._version = now, version
            reward = (
                f"reward {sum(self._rewards) / len(self._rewards):.3f}; " if self._rewards else ""
            )
            speed = f"{self._tokens / max(now, 1e-9):,.0f} tokens/s"
            fleet = state.fleet
            coming = sum(not replica.is_serving for replica in fleet.replicas.values())
            coming -= len(fleet.asleep) + len(fleet.leaving)
            starting = f"{coming} of {fleet.num_wanted} replicas start; " if coming else ""
            if fleet.away:
                starting += f"{len(fleet.away)} machines leave or are gone; "
            self._facts = f"{starting}{reward}rollouts: {self._count(state)}; {speed}"
            self._bar.update(self._task, completed=version, facts=self._shown_facts())

    def _count_tokens(self, event: Generated) -> None:
        """Count the tokens that are new. An event has all tokens of its rollout, of earlier turns too."""
        before = self._known.get(event.rollout, 0)
        self._known[event.rollout] = event.tokens
        self._tokens += event.tokens - before if event.tokens >= before else event.tokens

    def _count(self, state: State) -> str:
        """Return the numbers of rollouts by state."""
        replicas = state.fleet.replicas.values()
        running = sum(min(len(r.rollouts), self._max_running[r.kind]) for r in replicas)
        phases = Counter(rollout.phase for rollout in state.rollouts.values())
        trained = len(state.leader.batch.in_gradient)
        counts = {
            "running": running,
            "waiting": max(phases["waiting"] + phases["generating"] - running, 0),
            **self._in_environments(state, phases),
            "to be scored": phases["finished"] + phases["verifying"],
            "buffered": max(phases["ready"] - trained, 0),
            "trained": state.leader.num_trained + trained,
        }
        return ", ".join(f"{count:,} {where}" for where, count in counts.items())

    def _in_environments(self, state: State, phases: Counter[Phase]) -> dict[str, int]:
        """Return the number of episodes whose environment acts, and of those that wait for one."""
        if state.environments is None:
            return {}
        return {"in environments": phases["acting"], "wait for environments": phases["queued"]}

    def take(self, line: Mapping[str, Any]) -> None:
        """Show the figures of a step, or that steps were rolled back."""
        if ROLLED_BACK_TO in line:
            kept = [step for step in self._steps if step["step"] <= line[ROLLED_BACK_TO]]
            self._steps = deque(kept, maxlen=NUM_ROWS)
            return
        step = {key: value for key, value in line.items() if isinstance(value, int | float)}
        if not step.get("unscored"):
            step.pop("unscored", None)  # zero in nearly all runs
        step["speed"] = step["output_tokens"] / max(step["step_time"], 1e-9)
        if self._has_begun:
            self._took.append(step["step_time"])
        self._has_begun = True
        self._steps.append(step)
        if self._live is None and not self._console.quiet:
            left = self._left()
            head = f"step {step['step']} of {self._num_steps}" + (f", {left}" if left else "")
            with suppress(OSError):  # without Python's buffers, like `PlainProgress`
                os.write(STDERR, f"{head}: {line_of(step)}\n".encode())

    def _left(self) -> str:
        """Return when the run is expected to end: a range, as far as its last steps differ; empty before the second step."""
        steps, took = list(self._steps), list(self._took)  # another thread appends to them
        num_left = self._num_steps - int(steps[-1]["step"]) if steps else 0
        if num_left <= 0 or not took:
            return ""
        seconds = num_left * fmean(took)
        half = 2 * num_left * stdev(took) / sqrt(len(took)) if len(took) > 2 else 0.0
        ends = [format_duration(max(1, round(each))) for each in (seconds - half, seconds + half)]
        return f"{' to '.join(dict.fromkeys(ends))} left, until about {clock(seconds)}"

    def _shown_facts(self) -> str:
        """Return the text next to the progress bar. Without a terminal, only this text is printed."""
        return self._facts if self._live is None else self._left()

    def _view(self) -> Group:
        """Return the current content of the terminal."""
        steps = list(self._steps)  # another thread appends to them
        facts = Text(self._facts)
        if not steps:
            return Group(self._bar, facts)
        return Group(step_table(steps, self._console), self._bar, facts)


def clock(seconds: float) -> str:
    """Return the clock time in so many seconds, with the day if it is another one."""
    now = time.time()
    then, today = time.localtime(now + seconds), time.localtime(now)
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%b %d %H:%M", then)
