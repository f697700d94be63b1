"""Check by a short simulation whether a run finishes, and how it uses its link.

`streamrl doctor` calls `examine` for the findings that need a simulation. All others are in `streamrl/doctor`.

Files to read first:

- `checkup.py`: `examine`, and the findings on the link and on slow weight formats.
- `rehearsal.py`: `rehearse` simulates the first steps of a run and returns a `Rehearsal`.
- `progress.py`: the findings on progress, preemption, losses and staleness.

Rules:

- A fix is proposed only after the run with the fix passes the same checks.
- A run that is huge, has no lengths or does not fit is replaced by a stand-in with a small model and
  the same policies. Seconds of a stand-in mean nothing, so no finding uses them.
- A rehearsal stops after a maximum number of events, because wrong policies could repeat the same work forever.
"""
