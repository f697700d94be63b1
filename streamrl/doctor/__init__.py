"""What is wrong with a run file before any GPU is taken, and which change mends it."""
