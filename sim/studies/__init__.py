"""Run studies of several runs or shapes: what-if sweeps, comparisons, reruns, and hardware efficiency.

Files to read first:

- `sweep.py`: simulates a grid of run files, in parallel.
- `comparison.py`: simulates two runs side by side, and finds the bandwidth at which they cost the same.
- `comparable_runs.py`: checks that two run files do the same work.
- `rerun.py`: simulates a recorded run with changes.
- `hardware_efficiency.py`: decode curves and MFU without a run.
- `finished_jobs.py`: simulations that a continued study does not repeat.
- `results.py`: the results of all studies.

Compared runs use the same prompts and lengths, so errors that affect both cancel in their ratio.
"""
