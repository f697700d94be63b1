"""Real time: replicas, trainer and verifiers as processes, driven by the same engine as the simulation."""
