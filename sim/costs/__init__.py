"""Compute the seconds and bytes of every operation of a run, each from the best tier that has data.

Files to read first:

- `costs.py`: `Costs.load(run)` combines everything below; the simulator and the planner only use `Costs`.
- `kernels.py`: seconds of single operators, from kernel tables or from the roofline of a GPU.
- `inference.py`: decode steps and prefill of a replica, composed of operators.
- `curves.py`: the same as tables over batch sizes, for fast lookup.
- `weight_sync.py`: pushes and loads of weights.
- `machine_profile.py`: seconds that `streamrl profile` measured on one machine; they replace all others.
- `corrections.py`: factors of a calibration, and the framework's own seconds.

The folder `training` has the costs of a trainer.

Rules:

- `Estimate` carries seconds together with their unmeasured part and their sources. Combine estimates
  instead of bare seconds, so that a trace can say where its seconds come from.
- Hardware constants are in profiles/, with source and date. Only fitted constants are in the code.
- Source texts are part of the trace, so a change of their wording changes recorded files.
"""
