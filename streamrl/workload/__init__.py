"""Prompts, groups and output lengths: where they come from, how they drift, and what a ranker expects."""
