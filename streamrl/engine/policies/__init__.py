"""Decide what a run does next: one file for each kind of decision, from admission of prompts to weight sync.

A policy is a class with the method `decide(state)`, which yields commands (`Policy` in `streamrl/engine/engine.py`).
`streamrl/engine/systems.py` chooses the policies of a run and their order of precedence.

Files to read first:

- `weight_sync.py`: how a new version reaches the replicas. It is the best example of a policy.
- `staleness.py`: which prompts may start, which groups are trained on next, and which are too stale.
- `dispatch.py`, `skew.py`: which replica generates a rollout. `migration.py` moves running rollouts.
- `streaming.py`: when rewards are computed, and when the trainer works on rollouts.
- `oversampling.py`: surplus groups, and groups whose rewards are all equal.
- `retry.py`, `resize.py`: retries and drops, restarts and the number of replicas.
- `secondary_trainers.py`: the groups of secondary trainers. `checkpoint.py`: when checkpoints are saved.

Rules:

- A policy reads `State` and yields commands. It never changes the state, and it has no I/O and no clock.
- Each command enters the state before the next one is computed, so `decide` must be a generator or return `()`.
  Most events concern few policies. Return `()` early, because `decide` runs after every event.
- A policy is named by what it does (`DrainThenLoad`), and a run file chooses it by a name of `[policies]`.
- Limits on admission alone do not bound staleness. Consumption must take groups in start order, or drop stale ones.
"""
