"""Build the report of several directories and write it as one HTML page, Markdown or JSON."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from streamrl.report.page.answer import answer_of, chosen_of, tiles_of
from streamrl.report.page.comparison import against_sections, compare_options, differences
from streamrl.report.page.decision import (
    lead_of,
    next_steps,
    options_section,
    rental_section,
    tiles_of_plan,
    title_of,
    why_section,
)
from streamrl.report.page.details import (
    assumption_sections,
    idle_section,
    of_plan,
    sensitivity_section,
    step_section,
    study_sections,
    uncertainty_section,
    whole_section,
)
from streamrl.report.page.evaluations import evaluation_sections, evaluations_json
from streamrl.report.page.explorer import estimate_note, explorer_data
from streamrl.report.page.identity import facts_of
from streamrl.report.page.learning import (
    learning_json,
    learning_sections,
    selection_sections,
    steps_sections,
)
from streamrl.report.page.measured import (
    Prediction,
    Simulator,
    fault_sections,
    measured_section,
    predict,
)
from streamrl.report.page.options import Option, make_options
from streamrl.report.page.parts import Page, PageSection
from streamrl.report.page.sources import PlanMade, RecordedRun, Sources, read_sources
from streamrl.report.page.terms import Terms
from streamrl.report.pictures.drawing import COLOURS, element, rules, swatch
from streamrl.report.words import NBSP, pool_words
from streamrl.runfile.escaping import visible
from streamrl.runfile.formatting import listing
from streamrl.sim.planner.plan import PLAN_TOML


class Report(NamedTuple):
    """The data of directories, and the options that follow from it."""

    sources: Sources
    options: list[Option]


def read_report(directories: Sequence[Path]) -> Report:
    """Read directories.

    Raises:
        ValueError: a directory or a file in it cannot be reported; the message has the reason.
    """
    sources = read_sources(directories)
    return Report(sources, make_options(sources))


def make_page(
    report: Report, today: date | None = None, simulator: Simulator | None = None
) -> Page:
    """Return the page with words, figures and tables.

    Args:
        report: the data.
        today: the date of the page, after which a plan would start; by default the present day.
        simulator: predicts executed runs; without it, only simulations of the report do.
    """
    sources, options = report
    chosen, day = chosen_of(options), today or date.today()
    made = plan_of(sources, chosen)
    prediction = None
    if chosen is not None and chosen.is_executed:
        prediction = predict(chosen, sources.runs, simulator)
    predicted = prediction.metrics if isinstance(prediction, Prediction) else None
    tiles = tiles_of(chosen, predicted) if chosen is not None else []
    if made is not None and chosen is not None:
        tiles = tiles_of_plan(made, chosen, day)
    return Page(
        kind=_kind(sources, chosen),
        title=_title(sources, options) if made is None else title_of(made),
        subtitle=_subtitle(sources),
        answer=_answer(sources, options),
        tiles=tiles,
        rental=None if made is None else rental_section(made),
        steps=list(next_steps(made, chosen)) if made is not None and chosen is not None else [],
        sections=list(_sections(sources, options, prediction)),
        explorer=None if made is None else explorer_data(made),
        explorer_note="" if made is None else estimate_note(made.plan),
        facts=list(facts_of(sources, day)),
        pools=pool_words(_gpus_of_pools(sources)),
    )


def _gpus_of_pools(sources: Sources) -> dict[str, str]:
    """Return the GPU of every pool of a page."""
    found: dict[str, str] = {}
    for made in sources.plans:
        for option in made.plan.options:
            found |= option.choice.gpus
        found |= made.plan.what_if.gpus if made.plan.what_if is not None else {}
    for run in [made.run for made in sources.plans] + [each.run for each in sources.runs]:
        found |= {name: pool.gpu for name, pool in run.cluster.pools.items()}
    return found


def plan_of(sources: Sources, chosen: Option | None) -> PlanMade | None:
    """Return the plan that a page is about; None if it is about runs or studies."""
    return sources.plans[0] if chosen is not None and chosen.kind == "plan" else None


EDITED = (
    "was edited after it was planned: times and costs of this plan are those before the edit, prices and keys of its "
    "run file are those after it. Plan again."
)


def _answer(sources: Sources, options: list[Option]) -> str:
    """Return the answer, after a warning for each plan whose run file was edited."""
    made = plan_of(sources, chosen_of(options))
    edited = [f"{Path(each.name, PLAN_TOML)} {EDITED}" for each in sources.plans if each.is_edited]
    return " ".join([*edited, answer_of(sources, options) if made is None else lead_of(made)])


def _kind(sources: Sources, chosen: Option | None) -> str:
    if chosen is None:
        return "Study" if sources.studies else "Comparison"
    if chosen.kind == "plan":
        return "Plan"
    return f"{chosen.world[0].upper()}{chosen.world[1:]} run"


def render_html(page: Page) -> str:
    """Return a page as self-contained HTML. Its policy allows no fetch, and no script but its own."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return _ENVIRONMENT.get_template("report.html.j2").render(
        page=page,
        terms=Terms(page.pools),
        script=Markup(SCRIPT),
        script_hash=Markup(f"sha256-{digest}"),
    )


def render_markdown(page: Page) -> str:
    """Return a page as Markdown; the numbers of its figures are in tables and captions."""
    text = _ENVIRONMENT.get_template("report.md.j2").render(page=page, terms=Terms(page.pools))
    return text.replace("&#39;", "'").replace("&#34;", '"')  # quotes are harmless in Markdown


def describe(report: Report) -> dict[str, object]:
    """Return the report's figures as data."""
    sources, options = report
    chosen = chosen_of(options)
    return {
        "whole_run": chosen.whole_run if chosen is not None else None,
        "answer": _answer(sources, options),
        "chosen": chosen.mark if chosen is not None else None,
        "options": [_option_json(option) for option in options],
        "sensitivity": [
            {"what": swing.what, "less": swing.less, "more": swing.more}
            for made in sources.plans
            for swing in of_plan(made.plan, made.name, str(made.path)).swings
        ],
        "studies": [
            {"title": study.found.title, "findings": study.found.findings}
            for study in sources.studies
        ],
        "evaluations": evaluations_json(sources.runs),
        "learning": learning_json(sources.runs),
        "selection": [{"name": r.name, "selection": r.metrics.selection} for r in sources.runs],
        "against": [made.found.as_json() for made in sources.comparisons],
    }


def _sections(
    sources: Sources, options: list[Option], prediction: Prediction | str | None
) -> Iterator[PageSection]:
    """Yield the sections: first what decides, then why, then details that readers open on request."""
    chosen = chosen_of(options)
    made = plan_of(sources, chosen)
    if made is not None:
        yield from options_section(made)
        yield why_section(made)
    if chosen is not None and prediction is not None:
        yield measured_section(chosen, prediction)
    yield from evaluation_sections(sources.runs)
    yield from learning_sections(sources.runs)
    yield from fault_sections(sources.runs)
    selected = list(selection_sections(sources.runs))
    yield from selected if made is None else ()
    yield from against_sections(sources.comparisons)
    yield from study_sections(sources.studies)
    compared = list(compare_options(sources, options))
    is_alone = made is not None or (prediction is not None and len(options) == 1)
    if not is_alone:
        yield from compared
    if options:
        yield from idle_section(options)
        if _is_any_paid(options):
            yield sensitivity_section(sources, options)
        if prediction is None:
            yield uncertainty_section(options)
    folded = compared if is_alone else []
    folded += selected if made is not None else []
    if options and prediction is not None:
        folded.append(uncertainty_section(options))
    yield from _folded(sources, options, folded)


def _folded(
    sources: Sources, options: list[Option], compared: list[PageSection]
) -> Iterator[PageSection]:
    """Yield the details."""
    found = [*whole_section(chosen_of(options)), *compared]
    if options:
        found += step_section(options)
    found += steps_sections(sources.runs)
    found += [*differences(options), *assumption_sections(sources, options)]
    for section in found:
        section.is_folded = True
        yield section


def _is_any_paid(options: list[Option]) -> bool:
    return any(option.is_paid for option in options)


def _title(sources: Sources, options: list[Option]) -> str:
    """Return what the page is about. A run that was executed has a cost, not a prediction of it."""
    of_plans = [made.model.name for made in sources.plans]
    models = listing(list(dict.fromkeys([*of_plans, *map(_model_name, sources.runs)])))
    if not models:
        titles = ["Is it worth it?" for _ in sources.comparisons[:1]]
        return listing([*titles, *(study.found.title for study in sources.studies)])
    chosen, is_paid = chosen_of(options), _is_any_paid(options)
    if chosen is None or not chosen.is_executed:
        return f"What it {'costs' if is_paid else 'takes'} to post-train {models}"
    if not chosen.is_complete:
        return f"What post-training {models} has {'cost' if is_paid else 'taken'} so far"
    return f"What it {'cost' if is_paid else 'took'} to post-train {models}"


def _model_name(run: RecordedRun) -> str:
    """Return the name of a run's model. A directory is often called "model", so its parent is named too."""
    path = run.run.model.path
    return run.model.name if path is None else "/".join(Path(path).parts[-2:])


def _subtitle(sources: Sources) -> str:
    """Return the directories with the kind of data in each."""
    found: dict[str, list[str]] = {}
    for made in sources.plans:
        found.setdefault(made.name, []).append("plan")
    for run in sources.runs:
        kind = "executed run" if run.metrics.world == "real" else "simulated run"
        found.setdefault(run.name, []).append(kind)
    for study in sources.studies:
        found.setdefault(study.name, []).append("what-if study")
    for comparison in sources.comparisons:
        found.setdefault(comparison.name, []).append("a run against another")
    return "streamrl report of " + "; ".join(f"{n}: {listing(k)}" for n, k in found.items())


def _option_json(option: Option) -> dict[str, object]:
    keys = ("name", "kind", "what", "world", "step_time", "goodput", "cost_per_step")
    more = ("cost_per_million_tokens", "dollars_per_hour", "cost_range", "source")
    metrics = option.run.metrics if option.run is not None else None
    return {
        "letter": option.mark,
        **{key: getattr(option, key) for key in (*keys, *more)},
        "num_seeds": option.band.num_seeds,
        "tiers": option.band.tiers,
        "idle": metrics.idle if metrics is not None else None,
    }


def _table_text(text: object) -> Markup:
    """Escape characters that would end a Markdown table cell or look like HTML."""
    return Markup(Markup.escape(visible(str(text))).replace("|", "\\|").replace("\n", " "))


_ENVIRONMENT = Environment(
    loader=PackageLoader("streamrl.report", "templates"),
    autoescape=select_autoescape(enabled_extensions=("html.j2", "md.j2", "css.j2")),
    undefined=StrictUndefined,
    finalize=lambda value: visible(value) if type(value) is str else value,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _code(text: str) -> Markup:
    """Escape text, and mark text between backticks as code. Elsewhere no line ends between a number and its "%"."""
    parts = re.split(r"`([^`]+)`", str(Markup.escape(visible(text))))
    written = [re.sub(r"(?<=\d) ?%", f"{NBSP}%", part) for part in parts[::2]]
    code = [f"<code>{part}</code>" for part in parts[1::2]]
    return Markup("".join(each for pair in zip(written, [*code, ""], strict=True) for each in pair))


_ENVIRONMENT.filters |= {"cell": _table_text, "code": _code, "element": element, "swatch": swatch}
_ENVIRONMENT.globals |= {"colours": COLOURS, "rules": rules()}
SCRIPT = (files("streamrl.report") / "templates" / "report.js").read_text(encoding="utf-8")
"""The script of the page."""


def report_html(directories: Sequence[Path | str] | Path | str) -> str:
    """Return the data of directories as one self-contained page, as `streamrl report` writes it.

    Raises:
        ValueError: a directory or a file in it cannot be reported; the message has the reason.
    """
    several = [directories] if isinstance(directories, Path | str) else directories
    return render_html(make_page(read_report([Path(each) for each in several])))
