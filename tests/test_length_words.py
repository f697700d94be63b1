"""Output lengths in words: stated figures and names of kinds of work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.cli.doctor import examine
from streamrl.hardware.profiles import check_profiles
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run, make_run, write_run
from streamrl.runfile.length_words import CATALOGUE, StatedFigures
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.workload.stated_lengths import StatedLengths, described
from streamrl.workload.workload import SimulatedWorkload, load_source
from tests.patients import NOWHERE
from tests.runs import make_table

FIGURES = {"mean": "6k", "p95": "20k", "max": "32k"}


def table_of(lengths: Any) -> dict[str, Any]:
    table = make_table({"rollout.max_tokens": 40_000})
    table["workload"] = {"lengths": lengths}
    return table


def drawn(figures: StatedFigures) -> Any:
    return StatedLengths(figures, 1).sample(np.random.default_rng(1), 200_000, 1)[0]


@pytest.mark.parametrize(
    "figures",
    [
        StatedFigures(6000, 20_000, 32_000),
        StatedFigures(600, 900, 4096),
        StatedFigures(6000, 16_384, 16_384),
        StatedFigures(6000, 20_000, None),
    ],
)
def test_lengths_have_the_stated_figures(figures: StatedFigures) -> None:
    lengths = drawn(figures)
    assert lengths.mean() == pytest.approx(figures.mean, rel=0.01)
    assert np.quantile(lengths, 0.95) == pytest.approx(figures.p95, rel=0.02)
    assert lengths.min() >= 1 and (figures.max is None or lengths.max() <= figures.max)


@pytest.mark.parametrize("most", [None, 8000])
def test_a_mean_alone_is_kept_under_any_maximum(most: int | None) -> None:
    assert drawn(StatedFigures(3000, None, most)).mean() == pytest.approx(3000, rel=0.01)


@pytest.mark.parametrize("kind", ["stated", "histogram"])
def test_lengths_of_a_group_are_as_alike_as_stated(kind: Any) -> None:
    source = "mean 600, p95 1500" if kind == "stated" else "r1-distill-aime"
    own, alike = (
        load_source(LengthsConfig(kind=kind, source=source, group_correlation=correlation))
        for correlation in (0.0, 0.6)
    )
    draws = [one.sample(np.random.default_rng(1), 20_000, 2)[0] for one in (own, alike)]
    ranks = [np.argsort(np.argsort(draw.ravel())).reshape(draw.shape) for draw in draws]
    none, found = (np.corrcoef(rank[:, 0], rank[:, 1])[0, 1] for rank in ranks)
    assert none == pytest.approx(0, abs=0.03)
    assert found == pytest.approx(
        6 / np.pi * np.arcsin(0.6 / 2), abs=0.03
    )  # of ranks of normal numbers
    assert np.quantile(draws[1], 0.9) == pytest.approx(np.quantile(draws[0], 0.9), rel=0.03)


def test_lengths_of_a_group_in_a_file_are_as_alike_as_there() -> None:
    lengths = {"kind": "groups", "source": "a.csv", "group_correlation": 0.6}
    with pytest.raises(RunError, match="group_correlation is for kinds histogram and stated"):
        make_run(table_of(lengths))


def test_figures_are_a_short_form_of_the_section(tmp_path: Path) -> None:
    run = make_run(table_of({**FIGURES, "prompt_tokens": 500, "ranker": "oracle"}))
    lengths = run.workload.lengths
    assert lengths is not None
    assert (lengths.kind, lengths.source) == ("stated", "mean 6k, p95 20k, max 32k")
    draws = SimulatedWorkload(run).draw(0, 2000)
    assert np.mean([draw.lengths for draw in draws]) == pytest.approx(6000, rel=0.05)
    assert {draw.drawn.prompt_tokens for draw in draws} == {500}
    write_run(run, tmp_path / "run.toml")
    assert load_run(tmp_path / "run.toml").workload == run.workload


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_kind_of_work_is_a_histogram(name: str) -> None:
    lengths = make_run(table_of(name.upper())).workload.lengths
    assert lengths == LengthsConfig(kind="histogram", source=CATALOGUE[name])
    load_source(lengths)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ({"mean": "0"}, "mean must be at least 1 token, got '0'"),
        ({"mean": "9" * 20}, "mean must be at most 1,000,000,000 tokens, got '999"),
        ({"mean": "2.5"}, "must be a whole number"),
        ({"mean": "\uff16k"}, "must be a whole number"),
        ({"mean": "6k", "p95": "5k"}, "needs mean < p95 <= max"),
        ({"mean": "6k", "p95": "20k", "max": "10k"}, "needs mean < p95 <= max"),
        ({"kind": "stated", "source": "p95 20k"}, "has no mean; write one"),
        ({"kind": "stated", "source": "mean 6k, mean 7k"}, "has 'mean 7k'; write mean, p95 and"),
        ("chatting", "chatting"),
    ],
)
def test_figures_that_cannot_be_are_refused(lengths: Any, says: str) -> None:
    with pytest.raises(RunError, match=r"workload\.lengths") as found:
        check_profiles(make_run(table_of(lengths)))
    assert says in str(found.value) and "\n" not in str(found.value)


def test_a_tail_that_no_distribution_has_is_refused() -> None:
    with pytest.raises(RunError, match="mean is 6000; with p95 40000 it must be at least 10341"):
        StatedLengths(StatedFigures(6000, 40_000, None), 1)


def test_statistics_are_printed_with_a_histogram() -> None:
    text = described(np.array([10] * 90 + [100] * 10))
    assert text.startswith("mean 19, median 10, p95 100, longest 100 tokens; 0 |")
    assert text.endswith("|  █                ▁| 100")
    (found,) = [f for f in examine(table_of("chat"), NOWHERE).findings if f.name == "lengths"]
    assert "histogram servegen-r1: mean 1," in found.text and "|" in found.text
