"""Compare simulations with published measurements: the StreamRL paper, serving, training and RL steps.

Read these files first:

- `paper.py`: the runs of the StreamRL paper's evaluation (arXiv 2504.15930). Its docstring lists our readings.
- `paper_figure.py`: `PaperFigure`, the cells of a figure with their errors.
- `paper_generation.py`, `paper_scaling.py`, `paper_throughput.py`: the figures.
- `published_rows.py`: `Row`, a published number with its prediction, and summaries of errors.
- `serving.py`, `training_steps.py`, `rl_steps.py`: the sets of published rows.
- `scorecard.py`: the first half of docs/fidelity.md. `streamrl validate` writes the page.
- `gate.py`: errors by partition against those of an earlier version. CI runs it.

Rules:

- A row that a constant was fitted to is judged by a prediction without its shape (`Row.left_out`).
- An input that a source does not state is a range, and the row is predicted for both ends.
- Read figures of the paper from profiles/papers, never from code.
- Every choice that the paper leaves open is listed in `paper.py`, one reading for all figures.
"""
