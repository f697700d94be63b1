"""Check a run file before any GPU is taken, and propose the change that fixes each finding.

Read these files first:

- `examination.py`: `Examination`, the result for people and for scripts.
- `diagnosis.py`: the list of all checks on a valid run, and the list of their fixes.
- `invalid_keys.py`: errors of keys, types and combinations. It also repairs a run so that the other checks can go on.
- `memory.py`, `divisibility.py`, `batch.py`, `staleness.py`, `idle_gpus.py`, `files.py`, `planned_faults.py`, `spot.py`,
  `framework.py`: one topic each.
- `every_side.py`: repeats the checks for secondary trainers and for further replica kinds.

Rules:

- A check is a generator of `Finding`s. It takes the sections and roles of a run that it reads. It changes nothing and
  reads no GPU.
- `PARTS` in `diagnosis.py` lists the checks, and passes each one what it reads.
- A fix yields candidate changes, the most likely one first. A change is proposed only after the run was diagnosed with
  it and the finding was gone.
- `FIXES` maps the name of a finding to its fix. Every warning and error needs an entry.
- The entries of `PARTS` and `FIXES` take the run. The functions that they call take only what they read.
- A finding's text names the keys with their values. `otherwise` of a fix says what to do if no change was found.
"""
