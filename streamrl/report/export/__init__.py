"""What was planned as the launch arguments of other frameworks, whose option names are data."""
