"""The record of a run: its trace, and the figures that are computed from it."""
