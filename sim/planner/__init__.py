"""The planner: every plan of an offer, bounds and estimates for all, simulations of the best, and what would change the choice."""
