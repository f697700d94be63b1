"""Check a run file before any GPU is taken, and propose the change that fixes each finding.

Read these files first:

- `examination.py`: `Examination`, the result for people and for scripts.
- `diagnosis.py`: the list of all checks on a valid run, and the list of their fixes.
- `invalid_keys.py`: errors of keys, types and combinations. It also repairs a run so that the other checks can go on.
- `memory.py`, `divisibility.py`, `batch.py`, `staleness.py`, `idle_gpus.py`, `files.py`, `planned_faults.py`,
  `framework.py`: one topic each.
- `every_side.py`: repeats the checks for secondary trainers and for further replica kinds.

Rules:

- A check is a generator named `find`. It takes a `Run` and yields `Finding`s. It changes nothing and reads no GPU.
- A fix yields candidate changes, the most likely one first. A change is proposed only after the run was diagnosed with
  it and the finding was gone.
- `FIXES` maps the name of a finding to its fix. Every warning and error needs an entry.
- `find` and the entries of `FIXES` take the run. The functions below them take only what they read.
- A finding's text names the keys with their values. `otherwise` of a fix says what to do if no change was found.
"""
