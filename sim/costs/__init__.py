"""Seconds and bytes of every operation of a run, each from the best tier that has data."""
