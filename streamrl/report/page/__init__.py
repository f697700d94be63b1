"""Write the cost-effectiveness report: one HTML page, or Markdown, from run, plan and study directories.

Read these files first:

- `page.py`: `read_report`, `make_page` and the renderers.
- `sources.py`: read directories. `options.py`: turn plans and runs into `Option`s, one for each way to run.
- `band.py`: the uncertainty of a figure.
- `parts.py`: `Page`, `PageSection`, `PageTable`: the structure that the templates render.
- `decision.py`: the head and the options of a plan page. `answer.py`: the head of the other pages.
- `measured.py`, `learning.py`: executed runs. `comparison.py`, `details.py`, `assumptions.py`: the other sections.

Rules:

- All figures come from the directories. Only the prediction of an executed run is simulated, by a function that the
  command passes in.
- A section is a generator. It yields nothing if its data is missing.
- Pictures come from `streamrl.report.pictures` as shapes. The page has them as SVG.
- The page's own script copies commands and runs the what-if part (`explorer.py`). All else works without it.
- The page needs no other file.
"""
