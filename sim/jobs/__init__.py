"""Plan several jobs that share the GPUs of some pools: their speed at each number of GPUs, and who has GPUs when.

Files to read first:

- `planner.py`: plans each job for each share of the pools, and chooses how they share.
- `speeds.py`: the speed of a job at one share, from the planner and a simulation, and the cost of a switch.
- `schedule.py`: the events of a schedule: jobs start, finish steps, save, change their GPUs, end.
- `sharing.py`: the ways of sharing, and the candidates of each.
- `figures.py`: ends, dollars and utilisation of a schedule, and how schedules are compared.
- `plan.py`: the result, as the tables, the picture and the exports read it.

Rules:

- A job changes its GPUs only between two steps. It saves a checkpoint, stops, and starts again from it.
- No speed is interpolated: a job has only shares that were planned and simulated.
- An equal split is always a candidate, so that no choice is worse by the same figures.
- Nothing here runs jobs. Ray, Kueue and Slurm do; see `streamrl/export/job_scripts.py`.
"""
