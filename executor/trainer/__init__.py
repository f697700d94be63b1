"""The trainer: its controller side with advantages, its worker, and the losses that this computes."""
