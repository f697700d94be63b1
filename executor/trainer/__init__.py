"""The trainer, its losses and its advantages."""
