"""One file an idea; `runs` makes small runs, `traces` asks questions of what they record."""
