"""List prices: what is in profiles/prices.toml, how a run file and `--gpus` name one, and what outputs say of it."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.profile_check import check_all
from streamrl.hardware.profiles import PROFILES, price_of
from streamrl.record.assumed import assumed_of, price_note
from streamrl.report.page.what_if_command import PRICE
from streamrl.runfile.errors import RunError
from streamrl.runfile.field_checks import find_errors
from streamrl.runfile.files import change_run, make_run, run_table
from streamrl.runfile.list_prices import KINDS, is_old, list_price, sheets
from streamrl.runfile.run_file_schema import run_file_schema
from streamrl.runfile.short_forms import in_full, read_offer
from streamrl.sim.planner.first_answer import Question, assumptions_of
from tests.runs import make_table, small_run

LAMBDA = "lambda on-demand, read on 2026-09-20"


def priced(price: object, gpu: str = "h100") -> dict[str, Any]:
    """Return the small run file with a price for its first pool."""
    return make_table({"cluster.pools.far": {"gpu": gpu, "price": price}})


def test_every_list_price_is_of_a_gpu_with_a_profile_and_names_its_page() -> None:
    gpus = {path.stem for path in (PROFILES / "gpus").glob("*.toml")}
    for sheet in sheets():
        assert "." in sheet.source and sheet.region
        assert sheet.date <= datetime.date(2026, 11, 29)
        for kind in KINDS:
            for gpu, dollars in sheet.of_kind(kind).items():
                assert gpu in gpus and 0.1 < dollars < 20, (sheet.provider, gpu)


def test_a_provider_asks_one_price_of_a_gpu_and_kind() -> None:
    asked = [
        (sheet.provider, kind, gpu)
        for sheet in sheets()
        for kind in KINDS
        for gpu in sheet.of_kind(kind)
    ]
    assert len(asked) == len(set(asked))


def test_a_wrong_file_of_prices_is_refused_by_its_key(tmp_path: Path) -> None:
    text = (PROFILES / "prices.toml").read_text()
    file = tmp_path / "prices.toml"
    for old, new, message in (
        (
            'currency = "USD"',
            'currency = "EUR"',
            r"prices\.toml: Invalid enum value 'EUR' .*currency",
        ),
        ("b300 = 6.00", "b301 = 6.00", "no profile 'b301'"),
        ("b300 = 6.00", "b300 = 0.0", r"akash: on-demand\.b300 must be above 0, got 0\.0"),
    ):
        file.write_text(text.replace(old, new, 1))
        [verdict] = check_all(tmp_path)
        assert not verdict.is_good and re.search(message, verdict.notes[0])


@pytest.mark.parametrize(
    ("text", "gpu", "dollars"),
    [
        ("lambda/h100", "h100", 3.99),
        ("Lambda / H100-SXM5", "h100", 3.99),
        ("coreweave/h100/spot", "h100", 2.46375),
        ("coreweave/spot", "b200", 4.26375),
        ("market/h100/reserved", "h100", 2.35),
        ("coreweave", "gb200", 10.5),
    ],
)
def test_a_run_file_may_name_a_list_price(text: str, gpu: str, dollars: float) -> None:
    pool = make_run(priced(text, gpu)).cluster.pools["far"]
    assert price_of(pool) == dollars
    assert pool.price_source == list_price(text, gpu).source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lamda/h100", "no provider 'lamda' in profiles/prices.toml; there is akash, aws"),
        ("lambda/h100/spot", "lambda has no spot price of h100 .*; there is .*lambda/h100"),
        ("lambda/b200", "'lambda/b200' is not of this pool's GPU; write lambda/h100"),
        ("2.20", "price must be a number .*; remove the quotes"),
    ],
)
def test_an_unknown_list_price_is_refused_with_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        make_run(priced(text))
    errors = list(find_errors(in_full(priced(text))))
    assert [error.key for error in errors] == ["cluster.pools.far.price"]


def test_an_offer_may_name_a_provider() -> None:
    pools = read_offer("16xH100@lambda/8,8xB200@coreweave/spot,8xH20@1.10")
    assert pools["h100"]["price"] == 3.99 and pools["h100"]["unit"] == 8
    assert pools["h100"]["price_source"].startswith(LAMBDA)
    assert pools["b200"]["price"] == 4.26375
    assert pools["h20"] == {"gpu": "h20", "nodes": 1, "price": 1.1}
    with pytest.raises(ValueError, match=r"--gpus: no provider 'lamda' .*; there is .*lambda"):
        read_offer("8xH100@lamda")


def test_the_price_of_an_offer_can_be_left_out_of_its_text() -> None:
    for text in ("16xH100@lambda/8", "16xH100 @ $2.20/8", "16xH100/8@coreweave/h100/spot"):
        assert PRICE.sub("", text) == "16xH100/8"
    assert PRICE.sub("", "8xH100@owned@0.5") == "8xH100@owned"


def test_a_run_keeps_the_source_of_its_price_until_it_has_another() -> None:
    run = make_run(priced("lambda"))
    assert make_run(run_table(run)) == run
    pool = change_run(run, {"cluster.pools.far.price": 2.0}).cluster.pools["far"]
    assert (pool.price, pool.price_source) == (2.0, None)


def test_the_total_names_who_asks_the_price_and_since_when() -> None:
    cluster = make_run(priced("lambda")).cluster
    [price] = assumed_of(cluster, None, {"far": 8.0})
    assert price.key == "cluster.pools.far.price"
    assert price.text.startswith(f"$3.99 per GPU-hour of far ({LAMBDA}")
    assert "lambda.ai/instances" in price.source
    assert "far" not in [each.text for each in assumed_of(small_run().cluster, None, {"near": 8.0})]


def test_the_first_answer_names_the_list_price_of_an_offer() -> None:
    question = Question(model="qwen3-8b", gpus="16xH100@lambda,8xL40S@coreweave")
    told = assumptions_of(question, set())
    assert f"h100 costs $3.99 per GPU-hour, the list price of {LAMBDA}" in told
    assert any("l40s costs $2.25" in line and line.endswith(", an old price") for line in told)


def test_editors_accept_a_number_or_a_list_price() -> None:
    pools = run_file_schema()["properties"]["cluster"]["properties"]["pools"]
    kinds = pools["additionalProperties"]["properties"]["price"]["anyOf"]
    assert [each["type"] for each in kinds] == ["number", "string"]


def test_a_price_of_more_than_half_a_year_ago_is_called_old() -> None:
    source = list_price("coreweave", "l40s").source
    assert "read on 2026-02-01" in source
    assert is_old(source, datetime.date(2026, 8, 4))
    assert not is_old(source, datetime.date(2026, 8, 2))
    assert price_note(source).endswith(", an old price")
    assert not is_old("contract of 2019", datetime.date(2026, 8, 4))
