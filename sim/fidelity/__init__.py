"""The evaluation of StreamRL (arXiv 2504.15930) in simulation, figure by figure."""
