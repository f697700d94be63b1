"""Real time: replicas, trainer and verifiers as processes, driven by the same engine as the simulation."""

if (
    __name__ != "streamrl.executor"
):  # the root of a checkout is on the path, and this folder is found there
    raise ImportError(
        "import streamrl.executor: executor is a folder of streamrl, not a package of its own"
    )
