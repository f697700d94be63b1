"""What training frameworks, and runs of our own, recorded of their steps and rollouts, read by names that are data."""
