"""What a total rests on that the run file does not set is named next to it, in JSON, on the terminal and in the report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.record.assumed import assumed_of
from streamrl.report.page.page import make_page, read_report, render_html
from streamrl.runfile.files import write_run
from streamrl.sim.planner.first_answer import Question, assumptions_of
from tests.command_line import streamrl
from tests.runs import small_run

LINK = {"between": ["far", "near"], "bandwidth": "80 Gbps", "latency": "10 ms"}


def keys_of(changes: dict[str, Any], paid: tuple[str, ...] = ("far", "near")) -> list[str]:
    run = small_run(changes)
    return [each.key for each in assumed_of(run.cluster, run.workload.lengths, paid)]


def test_prices_of_profiles_are_assumed_and_those_of_the_run_file_are_not() -> None:
    both = ["cluster.pools.far.price", "cluster.pools.near.price"]
    assert keys_of({})[:2] == both
    assert keys_of({"cluster.pools.far.price": 1.0})[0] == both[1]
    assert both[1] not in keys_of({}, ("far",))


def test_a_link_without_latency_and_lengths_of_a_profile_are_assumed(tmp_path: Path) -> None:
    assert "cluster.links.0.latency" not in keys_of({"cluster.links": [LINK]})
    assert "cluster.links.0.latency" in keys_of({"cluster.links": [{**LINK, "latency": "0 ms"}]})
    own = tmp_path / "own.csv"
    own.write_text("output_tokens\n5\n")
    lengths = {"workload.lengths": {"kind": "empirical", "source": str(own)}}
    assert "workload.lengths.source" in keys_of({})
    assert "workload.lengths.source" not in keys_of(lengths)


def test_a_total_names_what_it_rests_on_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    write_run(small_run({"simulate.max_steps": 12}), tmp_path / "run.toml")
    shown = streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "run").stdout
    data = json.loads(streamrl("simulate", tmp_path / "run.toml", "--json").stdout)
    assumed = [each["text"] for each in data["whole_run"]["assumed"]]
    assert "$1.85 per GPU-hour of far" in assumed
    page = re.sub("<[^>]*>", "", render_html(make_page(read_report([tmp_path / "run"]))))
    html = page.replace("\xa0", " ")
    assert data["whole_run"]["uncounted"][0] == "set-up" and data["model_error"]["datasheet_share"]
    share = (
        f"{data['model_error']['datasheet_share'] * 100:.0f} % of the seconds are from datasheets"
    )
    for text in (*assumed, "not counted", share):
        assert text in shown and text in html


def test_a_first_answer_names_prices_of_profiles() -> None:
    told = "\n".join(assumptions_of(Question(model="qwen3-8b", gpus="8xH100@2.20,8xH20"), set()))
    assert "h20 costs $1.85 per GPU-hour, by its profile" in told and "h100 costs" not in told
