"""Say whether the measured steps of a run are normal for its hardware, and which changes are worth most.

Files to read first:

- `diagnosis.py`: compares measured with predicted stages, and ranks the changes.
- `result.py`: `Diagnosis`, the result.
- `changes.py`: the list of changes of a run file that are tried by simulation.

Nothing is fitted here. A fit would explain a badly tuned run away.
"""
