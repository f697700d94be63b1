"""Check by a short simulation whether a run finishes, and how it uses its link.

Files to read first:

- `checkup.py`: the findings that need a simulation.
- `rehearsal.py`: a short simulation of the run.
- `progress.py`: how far a run comes, and why it stops.

Findings that need no simulation belong in the doctor.
"""
