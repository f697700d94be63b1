"""Read measured steps and recorded rollouts from logs of training frameworks and from our own runs.

Read these files first:

- `log_formats.py`: `LogFormat`, the lines and keys of a framework's log, from profiles/logs.
- `framework_logs.py`: read a log (text, JSON lines, JSON or CSV) by these formats. `printed_values.py` reads its numbers.
- `measured_steps.py`: `MeasuredStep`, one row for each step: seconds by stage, and work. It also reads traces.
- `recorded_rollouts.py`: read a data set of rollouts as lengths by prompt.
- `agent_logs.py`: read message logs of agents as episodes, turn by turn.
- `imported_workload.py`: write the part of a run file that replays what was read.

Rules:

- The names of keys and columns are data in profiles/logs. To support a new framework, add a file there.
- An unmeasured value is None, never 0.
- A known key with an invalid value (a text, a negative time, nan) is an error that names the file and line. Unknown keys
  are ignored.
- A last line that was cut off is left out with a note, because the run may still be writing it.
- If two formats fit a file equally well, `--format` is required. The reader never guesses.
"""
