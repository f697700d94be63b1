"""Describe pictures as shapes, one picture in each file.

The report page draws the shapes as SVG. Commands and notebooks draw them with matplotlib.

Read these files first:

- `drawing.py`: shapes, styles and colours, and their SVG. Everything else builds on it.
- `canvas.py`: the same shapes with matplotlib. Import it only to draw, because matplotlib is slow to import.
- `step_timeline.py`: replicas, trainers, links and verifiers over time.
- `stacked_bars.py`, `range_bars.py`, `scatter.py`, `step_curves.py`, `study_chart.py`: the charts.

Rules:

- A picture function returns a `Picture`. It reads no file and draws nothing.
- Styles are classes in `STYLES`. A shape names classes, never a colour.
- An activity or a cause of waiting has the same colour in all pictures.
- y grows downwards. A unit is a pixel on the page and a point in print.
"""
