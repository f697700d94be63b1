"""Many runs, or shapes, beside each other: the grid of a what-if study, decode curves, efficiencies."""
