"""The command line: connects the control engine, simulation and execution; no other package imports it.

Read these files first:

- `main.py`: the list of commands, exit statuses, and how errors become one line.
- `lazy_commands.py`: a command is imported only when it is called.
- `shared.py`: arguments, options and output that several commands share.
- `simulate.py`, `simulate_sweep.py`, `simulate_against.py`: one command in three files.
- `progress.py`, `log_output.py`, `watch_run.py`: output on standard error.

Every other file is one command, named like it.

Rules:

- A command checks its input and its output paths before any long work.
- Exit status 0 is success, 2 is wrong input, 1 is failure. Wrong input raises `ValueError`, with one line that names the
  key or option, its value, and the remedy.
- Results go to standard output. Progress and logs go to standard error.
- With `--json`, a command prints JSON only, one object per line.
- Help texts are checked: the first line has at most 12 words.
"""

import sys

try:
    from streamrl.cli.main import main
except KeyboardInterrupt:  # Ctrl-C while the command line is imported
    sys.stderr.write("streamrl: Ctrl-C\n")
    raise SystemExit(130) from None

__all__ = ["main"]
