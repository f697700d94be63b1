"""The result of the doctor, for people and for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.hardware.side_memory import SideMemory
from streamrl.runfile.findings import TOPICS, Finding, Level, Topic, toml

SIGNS: dict[Level, tuple[str, str]] = {
    "error": ("✗", "bold red"),
    "warning": ("!", "bold yellow"),
    "ok": ("✓", "green"),
}
GB = 1e9

Json: TypeAlias = dict[str, object]


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one run file."""

    run_file: str
    findings: list[Finding]
    memory: list[SideMemory]
    not_examined: list[Topic]
    """Topics that were not checked because of other findings."""
    assumed: str
    """Changes that were assumed so that the other checks could go on, as `--set` takes them; empty if none."""

    def count(self, level: Level) -> int:
        """Return the number of findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    def as_json(self) -> Json:
        """Return the report as plain data; sizes are numbers of bytes."""
        found: Json = msgspec.to_builtins(self, enc_hook=lambda value: toml(value).strip('"'))
        return {**found, "errors": self.count("error"), "warnings": self.count("warning")}


def render(report: Examination) -> RenderableType:
    """Lay out a report for a terminal: memory, then the findings by topic, each followed by its fix."""
    parts: list[RenderableType] = []
    if report.memory:
        parts += [_memory_table(report.memory), Text()]
    parts += _notes(report)
    for topic in TOPICS:
        findings = [finding for finding in report.findings if finding.topic == topic]
        if findings:
            parts += [Text(topic, style="bold"), _findings_table(findings), Text()]
    return Group(*parts, _sum_up(report))


def _memory_table(sides: list[SideMemory]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("memory of a GPU", no_wrap=True)
    for title in ("GB", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    for side in sides:
        is_over = side.need > side.usable
        table.add_row(Text(f"{side.side}: {side.num_gpus} x {side.gpu}", style="bold"))
        for name, size in side.parts.items():
            table.add_row(f"  {name.replace('_', ' ')}", *_size(size, side))
        style = "bold red" if is_over else "bold"
        limit = "" if side.usable == side.capacity else f", {side.usable / GB:.1f} may be used"
        total = f"  in all of {side.capacity / GB:.1f}{limit}"
        table.add_row(total, *_size(side.need, side), style=style)
    return table


def _size(size: float, side: SideMemory) -> tuple[str, str]:
    return (
        f"{size / GB:.1f}" if size >= GB / 10 else f"{size / GB:.1g}",
        f"{size / side.capacity:.0%}",
    )


def _findings_table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        sign, style = SIGNS[finding.level]
        table.add_row(Text(f"  {sign}", style=style), Text(finding.text))
        if finding.fix:
            table.add_row("", Text(f"→ {finding.fix}", style="cyan"))
    return table


def _notes(report: Examination) -> Iterator[Text]:
    if report.assumed:
        yield Text(f"The checks below assume these fixes: {report.assumed}\n")
    if report.not_examined:
        yield Text(f"Not checked because of the errors below: {', '.join(report.not_examined)}\n")


def _sum_up(report: Examination) -> Text:
    errors, warnings = report.count("error"), report.count("warning")
    worst: Level = "error" if errors else "warning" if warnings else "ok"
    text = f"{_plural(errors, 'error')}, {_plural(warnings, 'warning')} in {report.run_file}"
    return Text(text, style=SIGNS[worst][1])


def _plural(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
