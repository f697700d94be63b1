"""Simulated time: the hardware as SimPy processes, which never hold a decision."""
