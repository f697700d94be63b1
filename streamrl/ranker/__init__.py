"""Rankers of prompts by text: fitted to known lengths, scored on held-out ones, kept in a file."""
