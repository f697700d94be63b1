"""The executor: carries out a run on real processes, driven by the same engine as the simulator.

Files to read first:

- `execute.py`: checks a run file, starts the processes, drives the run and handles Ctrl-C.
- `world.py`: `RealWorld` carries out each command in an asyncio task and returns the event that it ends in.
- `roles.py`: the contracts of replica, trainer, transfer, verifier and relay, and what they exchange.
- `buffer.py`: where the tokens of each rollout are, and what became of it.
- `record.py`: the run directory, and what a resumed run reads from it.
- `run_log.py`: one log line for each loss, restart, resize and refusal.
- `chosen_classes.py`: refuses classes from outside that workers cannot import.

The folders are `launchers` (where roles live), `rollout`, `trainer`, `transfer` and `verifier` (the roles),
`subscribers` (several trainers on one stream), `profiling` and `checkup` (measure and check this machine).

Rules:

- The engine decides. The world only carries commands out; it never reads the engine's state to do so.
- One place catches exceptions: around a command, where the exception becomes `Failed`.
- torch, transformers, vLLM, DeepSpeed and Ray are imported only in the files that need them. The controller's
  process imports none of them.
- A file that mirrors `sim/` (world, faults, replica, trainer, transfer, verifier) has the same methods in the same order.
"""

# Refuse the import when the root of a checkout is on the path and this folder is found there.
if __name__ != "streamrl.executor":
    raise ImportError(
        "import streamrl.executor: executor is a folder of streamrl, not a package of its own"
    )
