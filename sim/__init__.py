"""The simulator: predicts the time, the cost and the GPU idle time of a run, and plans runs with these predictions.

Files to read first:

- `world.py`: `SimWorld` drives the engine; it starts a SimPy process for each command and returns events.
- `replica.py`: continuous batching with a bounded KV cache.
- `trainer.py`: passes and optimizer steps.
- `transfer.py`: weight pushes.
- `verifier.py`: verifier workers and reward-model replicas.
- `steady_state.py`: simulates until the mean step time is known; most callers begin here.
- `batch_generation.py`: generation of one batch alone, for the planner's estimates;
  `idle_replica.py` and `lone_batch.py` compute the ends of the rollouts of each replica.

The folders are `costs` (seconds and bytes of every operation), `planner`, `studies` (sweeps and
comparisons), `calibration`, `acceptance` (a plan with the measured figures of a node), `checkup` and
`fidelity` (predictions against published measurements).

Rules:

- The engine makes every decision. The simulated world only executes commands and reports events.
- Every duration comes from `Costs`, which also says where it comes from. Processes have no constants.
- A seed always gives the same trace, byte by byte. Each kind of random draw has its own stream, so
  new draws must not use an existing one.
"""

# Refuse the import when the root of a checkout is on the path and this folder is found there.
if __name__ != "streamrl.sim":
    raise ImportError("import streamrl.sim: sim is a folder of streamrl, not a package of its own")
