"""Start the worker processes of a run, on this machine or on a Ray cluster, and call their methods.

A role is a replica, a trainer, a reward model or a weight relay. Its class runs in a worker process.

Read these files first:

- `launcher.py`: `Launcher`, the base class of all launchers.
- `role_configs.py`: the configuration of each role, whatever starts the role.
- `local_launcher.py`, `ray_launcher.py`: the two launchers. One starts local processes, the other Ray actors.
- `handles.py`: `Handle`, with which the controller calls a role. `LocalProcess`, `InProcess` and `RankHandles` are
  the local kinds. `Heartbeat` decides when a silent process counts as dead.
- `worker.py`: the main function of a local worker process, and the message format of calls and answers.
- `processes.py`, `prefork_server.py`: how a local worker process starts. CPU workers are forked from a prefork server.
- `ray_actor.py`, `ray_cluster.py`: the role inside a Ray actor with its handle, and the check of a Ray cluster.
- `placement.py`: which GPUs and CPU cores each role gets.

Rules:

- Calls on one handle begin in the order in which they were made.
- A dead process raises `WorkerLostError` in every pending and later call. An error of the role raises `AnswerError`.
- No worker outlives the controller: it ends when its connection closes.
- Everything that crosses a process boundary is MessagePack. No object is pickled.
"""

from __future__ import annotations
