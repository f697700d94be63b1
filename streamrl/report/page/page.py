"""Build the report of several directories and write it as one HTML page, Markdown or JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from streamrl.report.page.answer import answer_of, chosen_of, tiles_of
from streamrl.report.page.comparison import against_sections, compare_options, differences
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
from streamrl.report.page.learning import learning_json, learning_sections, selection_sections
from streamrl.report.page.options import Option, make_options
from streamrl.report.page.parts import Page, PageSection
from streamrl.report.page.sources import RecordedRun, Sources, read_sources
from streamrl.report.pictures.drawing import COLOURS, element, rules, swatch
from streamrl.report.words import GLOSSARY
from streamrl.runfile.formatting import listing


class Report(NamedTuple):
    """The data of directories, and the options that follow from it."""

    sources: Sources
    options: list[Option]


def read_report(directories: Sequence[Path]) -> Report:
    """Read directories; nothing is simulated.

    Raises:
        ValueError: a directory or a file in it cannot be reported; the message has the reason.
    """
    sources = read_sources(directories)
    return Report(sources, make_options(sources))


def make_page(report: Report) -> Page:
    """Return the page with words, figures and tables."""
    sources, options = report
    chosen = chosen_of(options)
    return Page(
        title=_title(sources, options),
        subtitle=_subtitle(sources),
        answer=answer_of(sources, options),
        tiles=tiles_of(chosen) if chosen is not None else [],
        sections=list(_sections(sources, options)),
        terms=GLOSSARY,
    )


def render_html(page: Page) -> str:
    """Return a page as self-contained HTML."""
    return _ENVIRONMENT.get_template("report.html.j2").render(page=page)


def render_markdown(page: Page) -> str:
    """Return a page as Markdown; the numbers of its figures are in tables and captions."""
    text = _ENVIRONMENT.get_template("report.md.j2").render(page=page)
    return text.replace("&#39;", "'").replace("&#34;", '"')  # quotes are harmless in Markdown


def describe(report: Report) -> dict[str, object]:
    """Return the report's figures as data."""
    sources, options = report
    chosen = chosen_of(options)
    return {
        "whole_run": chosen.whole_run if chosen is not None else None,
        "answer": answer_of(sources, options),
        "chosen": chosen.letter if chosen is not None else None,
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
        "learning": learning_json(sources.runs),
        "selection": [{"name": r.name, "selection": r.metrics.selection} for r in sources.runs],
        "against": [made.found.as_json() for made in sources.comparisons],
    }


def _sections(sources: Sources, options: list[Option]) -> Iterator[PageSection]:
    yield from whole_section(chosen_of(options))
    yield from compare_options(sources, options)
    yield from learning_sections(sources.runs)
    yield from selection_sections(sources.runs)
    if options:
        yield idle_section(options)
        yield step_section(options)
        if _is_any_paid(options):
            yield sensitivity_section(sources, options)
        yield uncertainty_section(options)
    yield from against_sections(sources.comparisons)
    yield from study_sections(sources.studies)
    yield from differences(options)
    yield from assumption_sections(sources, options)


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
    keys = ("letter", "name", "kind", "what", "world", "step_time", "goodput", "cost_per_step")
    more = ("cost_per_million_tokens", "dollars_per_hour", "cost_range", "source")
    metrics = option.run.metrics if option.run is not None else None
    return {
        **{key: getattr(option, key) for key in (*keys, *more)},
        "num_seeds": option.band.num_seeds,
        "tiers": option.band.tiers,
        "idle": metrics.idle if metrics is not None else None,
    }


def _table_text(text: object) -> Markup:
    """Escape characters that would end a Markdown table cell or look like HTML."""
    return Markup(Markup.escape(str(text)).replace("|", "\\|").replace("\n", " "))


_ENVIRONMENT = Environment(
    loader=PackageLoader("streamrl.report", "templates"),
    autoescape=select_autoescape(enabled_extensions=("html.j2", "md.j2", "css.j2")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _code(text: str) -> Markup:
    """Escape text, and mark text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(Markup.escape(text))))


_ENVIRONMENT.filters |= {"cell": _table_text, "code": _code, "element": element, "swatch": swatch}
_ENVIRONMENT.globals |= {"colours": COLOURS, "rules": rules()}


def report_html(directories: Sequence[Path]) -> str:
    """Return the data of directories as one self-contained page, as `streamrl report` writes it.

    Raises:
        ValueError: a directory or a file in it cannot be reported; the message has the reason.
    """
    return render_html(make_page(read_report(directories)))
