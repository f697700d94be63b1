"""Write the cost-effectiveness report: one HTML page, or Markdown, from run, plan and study directories.

Read these files first:

- `page.py`: `read_report`, `make_page` and the renderers.
- `sources.py`: read directories. `options.py`: turn plans and runs into `Option`s, one for each way to run.
- `band.py`: the uncertainty of a figure.
- `parts.py`: `Page`, `PageSection`, `PageTable`: the structure that the templates render.
- `answer.py`, `comparison.py`, `details.py`, `learning.py`, `assumptions.py`: the sections.

Rules:

- Nothing is simulated here. All figures come from the directories.
- A section is a generator. It yields nothing if its data is missing.
- Pictures come from `streamrl.report.pictures` as shapes. The page has them as SVG, without scripts.
- The page needs no other file.
"""
