"""Decide what can run a plan: `streamrl execute` or another framework, and the first rule that keeps one from it.

- `execute_limits.py`: what the back ends of `streamrl execute` cannot carry out.
"""
