"""GPUs and models: what `profiles/` says of them, what fits in memory, and measured tables between and beyond their rows."""
