"""Measure this machine with the code that executes runs, and write the times as a measured profile.

Read these files first:

- `profile_file.py`: `make_setup` and `profile_model`, the two entry points, and the rows of the profile.
- `measurements.py`: which points are measured (`Measurements`), and the times (`Readings`).
- `profiler.py`: starts a replica and a trainer, gives them work, and reads their times.
- `timed_roles.py`, `timed_workers.py`: the replica and the trainer with a stopwatch.
- `role_benchmarks.py`: times of weight relays and of the reward model.
- `contention.py`: the slowdown when roles share the CPU cores of one host.
- `rollout_overhead.py`: CPU time per rollout in processes that do not run the model.
- `synthetic.py`: random tokens, and a model that never ends a sequence early.

An acceptance test of a rented node measures operations instead: `node_benchmarks.py` (one GPU), `collectives.py` (all
GPUs of the node) and `peer_link.py` (another machine).

Rules of profiles:

- Measure through the roles of a run, never through a separate benchmark of a kernel.
- Measure each point once per round. Then a drift of the machine's speed affects all points equally.
- Rows hold quartiles. `Readings` holds the seconds of every repeat.
"""
