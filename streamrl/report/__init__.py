"""Show results to people: tables on the terminal, plans, studies, figures, and the report page.

Read these files first:

- `words.py`: how figures get units and how sides are named. All other files use it.
- `run_tables.py`: the figures of a run, and of a prediction next to a measurement.
- `plan_report.py`, `rerun_report.py`, `against_report.py`: results of plan, of changed re-runs, and of two runs.
- `study_file.py`, `study_table.py`, `study_report.py`: read a what-if study, tabulate it and state its findings.
- `bubbles.py`, `profile_report.py`, `calibration_table.py`, `fidelity.py`: smaller reports.
- `figures.py`: all pictures as matplotlib figures.

Folders: `page` has the sections of the report page, `pictures` has one picture in each file,
and `templates` has the Jinja templates.

Rules:

- A report computes no figure that the engine or the metrics have. It selects and writes them.
- Every sentence about a result is derived from its numbers.
- A figure is shown with its uncertainty if it is known.
- An unknown figure is shown as a dash or left out, never as 0.
"""
