"""Rewards of finished rollouts: scorers by name, and the workers that run them."""
