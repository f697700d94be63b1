"""GPUs and models: read `profiles/`, count memory, and interpolate measured tables."""
