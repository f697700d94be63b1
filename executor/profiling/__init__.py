"""Measure this machine through the code that executes runs, and write what was measured as a profile."""
