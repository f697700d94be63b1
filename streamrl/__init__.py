"""The core: decides, describes and reports disaggregated RL post-training; it never waits and never computes on GPUs."""

__version__ = "0.1.0"
