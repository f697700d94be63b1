"""Decide whether a rented node is as fast as a plan assumed.

- `points.py`: what to measure for a plan on one kind of GPU, and the seconds that the plan rests on.
- `scaled_profiles.py`: a folder of profiles with the figures of that GPU scaled to the measurements.
- `outlook.py`: a plan's step, dollars and days with such a folder, in a process of its own.
- `result.py`: the result that reports read.

The measurements themselves are in `streamrl.executor.profiling`.
"""
