"""A run while it goes on: a table of its last steps over the bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.table import Table

from streamrl.cli.progress import STDERR, PlainProgress, bar_columns
from streamrl.engine.messages import Event, Generated, Stepped, Verified
from streamrl.engine.state import State
from streamrl.record.run_lines import ROLLED_BACK_TO

RECENT = 200
"""Rollouts that the bar's reward is the mean of."""
NUM_ROWS = 10
"""Steps in the table."""
QUIET = 30.0
"""Seconds between lines that say where a step is, where there is no terminal."""
REFRESHES = 4
"""Times a second that the terminal is drawn."""


class Column(NamedTuple):
    """A figure of a step as it is shown."""

    name: str
    keys: tuple[str, ...]
    """Of metrics.jsonl; nothing is shown of a step that lacks the first."""
    form: str
    """Takes the values of `keys`."""


COLUMNS = (
    Column("step", ("step",), "{:.0f}"),
    Column("seconds", ("seconds",), "{:.1f}"),
    Column("reward", ("reward", "reward_std"), "{:.3f} ± {:.3f}"),
    Column("uniform", ("uniform_groups",), "{:.0%}"),
    Column("tokens", ("length_mean", "length_max"), "{:.0f} to {:.0f}"),
    Column("cut off", ("cut_off",), "{:.0%}"),
    Column("stale", ("staleness_mean", "staleness_max"), "{:.1f} to {:.0f}"),
    Column("entropy", ("entropy",), "{:.3f}"),
    Column("KL", ("kl_k3",), "{:.1e}"),
    Column("loss", ("loss",), "{:+.3f}"),
    Column("gradient", ("grad_norm",), "{:.2f}"),
    Column("tokens/s", ("speed",), "{:,.0f}"),
)
LEGEND = (
    "uniform: groups of one reward, which teach nothing; tokens, stale: mean to most; KL: from the policy that sampled; "
    "gradient: norm before clipping"
)


class RunWatch:
    """Shows a run on standard error; a context, and told of every event and of every line of metrics.jsonl."""

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._steps: deque[dict[str, float]] = deque(maxlen=NUM_ROWS)
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._tokens = 0
        self._last_time = 0.0
        self._bar: Progress = PlainProgress(QUIET)
        self._live: Live | None = None
        if console.is_terminal:
            self._bar = Progress(*bar_columns(), console=console)
            self._live = Live(
                console=console, get_renderable=self._view, refresh_per_second=REFRESHES
            )
        self._task = self._bar.add_task("step", total=num_steps, facts="starting")

    def __enter__(self) -> RunWatch:
        (self._live or self._bar).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # a terminal that is gone costs the run nothing
            (self._live or self._bar).stop()

    def see(self, event: Event, state: State, now: float) -> None:
        """Show what an event changes: steps, recent reward, rollouts trained + running, staleness."""
        if isinstance(event, Generated):
            self._tokens += event.tokens
        elif isinstance(event, Verified):
            self._rewards.append(event.reward)
        elif not isinstance(event, Stepped):
            return
        reward = sum(self._rewards) / len(self._rewards) if self._rewards else 0.0
        leader, replicas = state.leader, state.fleet.replicas.values()
        behind = leader.version - min(
            (r.version for r in replicas if r.is_serving), default=leader.version
        )
        facts = (
            f"reward {reward:.3f}  rollouts {leader.num_trained}+{state.num_generating}  "
            f"staleness {behind}  {self._tokens / now:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=leader.version, facts=facts)

    def take(self, line: Mapping[str, Any]) -> None:
        """Show the figures of a step, or that steps are taken back."""
        if ROLLED_BACK_TO in line:
            kept = [step for step in self._steps if step["step"] <= line[ROLLED_BACK_TO]]
            self._steps = deque(kept, maxlen=NUM_ROWS)
            self._last_time = line.get("time", 0.0)
            return
        seconds = line["time"] - self._last_time
        self._last_time = line["time"]
        step = {key: value for key, value in line.items() if isinstance(value, int | float)}
        step |= {"seconds": seconds, "speed": line["output_tokens"] / max(seconds, 1e-9)}
        self._steps.append(step)
        if self._live is None:
            with suppress(OSError):  # past Python's buffers, as `PlainProgress` writes
                os.write(STDERR, f"{line_of(step)}\n".encode())

    def _view(self) -> Group:
        """Return what the terminal shows now."""
        steps = list(self._steps)  # another thread adds to them
        if not steps:
            return Group(self._bar)
        table = Table(box=None, pad_edge=False, caption=LEGEND, caption_justify="left")
        shown = [column for column in COLUMNS if any(text_of(column, step) for step in steps)]
        for column in shown:
            table.add_column(column.name, justify="right", no_wrap=True)
        for step in steps:
            table.add_row(*(text_of(column, step) for column in shown))
        return Group(table, self._bar)


def line_of(step: Mapping[str, float]) -> str:
    """Return a step in a line: "step 7: seconds 1.2, reward 0.685 ± 0.464, …"."""
    first, *others = ((column.name, text_of(column, step)) for column in COLUMNS)
    told = ", ".join(f"{name} {text}" for name, text in others if text)
    return f"{first[0]} {first[1]}: {told}"


def text_of(column: Column, step: Mapping[str, float]) -> str:
    """Return a cell; nothing where the step lacks the figure."""
    if any(key not in step for key in column.keys):
        return ""
    return column.form.format(*(step[key] for key in column.keys))
