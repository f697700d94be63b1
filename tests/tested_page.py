"""Write docs/tested.md from the paths that this project has run: `python -m tests.tested_page > docs/tested.md`."""

from __future__ import annotations

from itertools import groupby

from streamrl.executor.checkup.tested_paths import NEVER, PATHS, RunPath

HEAD = """\
# See what was tested, and on which hardware

Each row is a path of `streamrl execute`, as a choice of a run file or in words. `streamrl doctor RUN.toml` names the paths of
your run that were never run on its devices. Both come from one list, and tests check that each named test and each part of
`make gpu` exists. `python -m tests.tested_page` writes this page.

| in a column | meaning |
|---|---|
| a make target | these tests run the path on a CPU; the test below is one of them |
| "by hand" | someone ran it once, and no test does |
| "part X: one H200" | this part of `make gpu` ran it on this GPU ([running.md](running.md#on-a-gpu)) |
| "part X: not run yet" | this part of `make gpu` is ready, but no GPU has run it |
| "no GPU work" | the path computes nothing on a GPU |
| "never" | no kernel of this path has run there; tests cover its errors and its placement at most |

`make gpu` uses one GPU, random weights, and minutes. So start with a few steps and check `logprob_gap`: the mean difference
between the log-probabilities of trainer and replica.
"""


def tested_page() -> str:
    """Return the page: a table for each topic, and the paths that were never run."""
    lines = [HEAD]
    for topic, paths in groupby(PATHS, key=lambda path: path.topic):
        lines += [f"## {topic}\n", "| path | on a CPU | on a GPU | test |", "|---|---|---|---|"]
        lines += [f"{_row(path)}" for path in paths]
        lines.append("")
    lines.append("## Paths that were never run\n")
    on_cpu = [path.path for path in PATHS if path.command == NEVER]
    on_gpu = [path.path for path in PATHS if path.ran_on == NEVER]
    for place, never in (("CPU", on_cpu), ("GPU", on_gpu)):
        lines.append(f"On a {place}, {len(never)} of {len(PATHS)} paths:\n")
        lines += [f"- {path}" for path in never]
        lines.append("")
    return "\n".join(lines)


def _row(path: RunPath) -> str:
    file, _, name = path.test.partition("::")
    test = f"`{file}`: {name}" if path.test else ""
    return f"| {path.path} | {path.on_cpu} | {path.on_gpu} | {test} |"


if __name__ == "__main__":
    print(tested_page(), end="")
