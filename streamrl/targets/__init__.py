"""Decide what can run a plan: `streamrl execute` or another framework, and the first rule that keeps one from it.

Read these files first:

- `verdicts.py`: whether each target can run a plan, and the first rule that it breaks.
- `execute_limits.py`: what the back ends of `streamrl execute` cannot carry out.
- `back_ends.py`: the back ends and the launcher with which `streamrl execute` runs a layout.
- `framework_rules.py`: systems, layouts and options of other frameworks.

Rules:

- `streamrl execute` and `streamrl export` refuse a run with the functions that the planner uses.
- A refusal is a `RunError` with the key, its value, and the rule in one line.
"""
