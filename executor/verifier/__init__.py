"""Rewards of finished rollouts, computed in processes from which what a model wrote reaches nothing."""
