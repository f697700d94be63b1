"""The examples in docs/python.md run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame

from streamrl.report.plan_report import head_lines
from streamrl.report.run_tables import dollars_text, time_text
from streamrl.sim.planner import answers
from streamrl.sim.planner.plan import Plan

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
SMALLER = {
    '"16xH100@2.20,8xH20@1.10"': '"2xH100@2"',
    "Qwen/Qwen3-8B": "Qwen/Qwen3-0.6B",
    '"6k"': "300",
    '"32k"': "900",
    '"policies": {': '"simulate": {"max_steps": 3}, "plan": {"systems": ["stream-async"], "unit": 8}, "policies": {',
    '"source": ': '"scale": 0.02, "source": ',
}
"""What makes the examples quick: that they run does not depend on how much they simulate."""


def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_SECONDS", 1.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    source = "".join(BLOCKS)
    for text, smaller in SMALLER.items():
        assert text in source
        source = source.replace(text, smaller)
    names: dict[str, Any] = {}
    exec(compile(source, "docs/python.md", "exec"), names)
    assert (tmp_path / "fewer.toml").exists()
    assert names["study"].to_frame()["step_time"].min() > 0
    for name in ("answer", "run", "planned", "metrics", "trace", "study", "against"):
        shown = names[name]
        assert "\n" not in repr(shown) and len(repr(shown)) < 300, name
        assert "<td" in shown._repr_html_(), name
    frames = [names["answer"], names["planned"], names["planned"].plan, names["against"]]
    assert all(isinstance(each.to_frame(), DataFrame) for each in frames)
    check_plan(names["planned"].plan)


def check_plan(plan: Plan) -> None:
    """Check the frames of a plan, and what a notebook shows of it."""
    frame = plan.to_frame()
    assert list(frame["number"]) == [option.number for option in plan.options]
    assert list(frame["trainer.pool"]) == [o.choice.settings["trainer.pool"] for o in plan.options]
    for name in ("dollars", "hours"):
        assert (frame[f"{name}_low"] <= frame[name]).all()
        assert (frame[name] <= frame[f"{name}_high"]).all()
    assert len(plan.to_frame("runners-up")) == len(plan.runners_up)
    assert list(plan.to_frame("sensitivity")["what"]) == [each.what for each in plan.sensitivity]
    with pytest.raises(ValueError, match="'sensitivity', got 'runners'"):
        plan.to_frame("runners")  # type: ignore[arg-type]  # a wrong name
    shown = " ".join(fragment for fragment in head_lines(plan))
    assert plan.whole_run is not None
    for text in (dollars_text(plan.whole_run), time_text(plan.whole_run)):
        assert text in repr(plan) and text in plan._repr_html_() and text in shown
