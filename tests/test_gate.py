"""No error of a partition rises unseen, and no prediction or band is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.hardware.step_errors import Stage
from streamrl.record.band import StepBasis
from streamrl.sim.fidelity.gate import (
    partitions_of,
    read_partitions,
    worsened,
    write_partitions,
)
from streamrl.sim.fidelity.published_rows import Row
from tests.command_line import streamrl

ROW = Row(
    name="a model",
    group="stage a",
    shape="a",
    unit="s",
    published=(10.0, 10.0),
    predicted=(11.0, 11.0),
    band=(9.0, 12.0),
    source="a page",
)
OTHER = replace(ROW, group="stage b", predicted=(9.0, 9.0))


def test_partitions_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    sets = {"steps": [ROW, OTHER, replace(ROW, band=None, group="without a band")]}
    write_partitions(sets, tmp_path / "before.csv")
    assert read_partitions(tmp_path / "before.csv") == partitions_of(sets)


def test_two_stages_that_became_worse_are_named_although_they_cancel() -> None:
    before = partitions_of({"steps": [ROW, OTHER]})
    now = [replace(ROW, predicted=(12.0, 12.0)), replace(OTHER, predicted=(8.0, 8.0))]
    lines = list(worsened({"steps": now}, before))
    assert lines == [
        f"steps, {group}: {what} 20.0%, before 10.0%"
        for group in ("stage a", "stage b", "bands of whole steps")
        for what in ("median error", "p90 of errors")
    ]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (replace(ROW, predicted=(11.06, 11.06)), ""),  # a twentieth of 10 %, and rounding
        (replace(ROW, predicted=(11.1, 11.1)), "median error 11.0%"),
        (replace(ROW, band=(10.5, 12.0)), "0% of the rows in the band, before 100%"),
        (replace(ROW, band=None), "no row in the band"),
        (replace(ROW, group="another name"), "0 rows have a prediction, before 1"),
    ],
)
def test_what_is_lost_is_named(row: Row, word: str) -> None:
    lines = list(worsened({"steps": [row]}, partitions_of({"steps": [ROW]})))
    assert bool(lines) is bool(word) and word in "".join(lines)


def test_bands_of_reports_may_not_hold_fewer_steps_than_they_claim() -> None:
    shares: dict[Stage, float] = {"generation": 0.6, "train": 0.4}
    basis = StepBasis(replicas=shares, trainer={}, partition=("dense", "hopper"))
    near = [replace(ROW, name=str(k), predicted=(9.9, 9.9), basis=basis) for k in range(10)]
    far = replace(near[0], predicted=(1.0, 1.0))
    for rows, is_told in ((near, False), ([*near[:6], *[far] * 4], True)):
        found = [line for line in worsened({"steps": rows}, {}) if "bands of reports" in line]
        assert bool(found) is is_told
        assert all("bands of reports: 60% of the rows in a band of 80 %" in one for one in found)


def test_a_band_of_eight_in_ten_may_hold_less_than_all_and_a_range_may_not() -> None:
    all_in = [replace(ROW, name=str(k)) for k in range(5)]
    one_out = [replace(all_in[0], band=(11.5, 12.0)), *all_in[1:]]
    for name, is_worse in (("steps", False), ("served-ranges", True)):
        lines = list(worsened({name: one_out}, partitions_of({name: all_in})))
        assert any("80% of the rows" in line for line in lines) is is_worse


def test_a_set_that_was_not_predicted_is_not_compared() -> None:
    assert not list(worsened({"memory": [ROW]}, partitions_of({"steps": [ROW]})))


def test_validate_ends_with_1_where_an_error_rose(tmp_path: Path) -> None:
    header = "set,group,rows,median,p90,in_band,half_band\n"
    line = 'memory,"KV cache, vllm-0.6: constants from these",2,{},0.1,,\n'
    for median, code in ((0.1, 0), (0.0, 1)):
        (tmp_path / "before.csv").write_text(
            header + line.format(median).replace("0.1,,\n", f"{median},,\n")
        )
        done = streamrl("validate", "memory", "--against", tmp_path / "before.csv")
        assert done.returncode == code, done.stderr
        assert ("worse: memory, KV cache, vllm-0.6" in done.stderr) is bool(code)
    (tmp_path / "before.csv").write_text("a,b\n")
    refused = streamrl("validate", "memory", "--against", tmp_path / "before.csv")
    assert refused.returncode == 2 and "must have the columns" in refused.stderr
