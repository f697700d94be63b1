"""What only a simulation tells of a run file: whether it comes to an end, and what its link is used for."""
