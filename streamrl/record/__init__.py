"""What a run leaves: its trace, and from it who did what when, where GPU-seconds went, and the figures."""
