"""Simulated time: the hardware as SimPy processes, which never hold a decision."""

if (
    __name__ != "streamrl.sim"
):  # the root of a checkout is on the path, and this folder is found there
    raise ImportError("import streamrl.sim: sim is a folder of streamrl, not a package of its own")
