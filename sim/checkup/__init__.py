"""Check a run file by a short simulation: does the run finish, and how is its link used?

Files to read first:

- `checkup.py`: the findings that need a simulation.
- `rehearsal.py`: a short simulation of the run.
- `progress.py`: how far a run comes, and why it stops.

Findings that need no simulation belong in the doctor.
"""
