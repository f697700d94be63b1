"""Compute the figures of a run from its trace: times, costs, GPU shares, staleness, and the ledger.

Simulated and executed runs write the same trace, so all of this works for both.

Files to read first:

- `metrics.py`: `measure` returns the `Metrics` of a trace. `RunReader` combines the readers below.
- `message_reader.py`: one pass over the entries, in which each message goes to the readers that use its type.
- `timeline.py`: the time span of each activity of each replica and trainer. `attempts.py` pairs each `Generate` with its end.
- `attribution.py`: GPU-seconds by activity and by cause of idle time, from the counts of `state_counts.py`.
- `decode_efficiency.py`: decode seconds that full batches would not need.
- `steady_state.py`: the steps that count, and the confidence interval of their mean time.
- `rollout_flow.py` and `selection.py`: what each step trained on, and what was dropped.
- `ledger.py`, `restarts.py`, `served_versions.py`: check that no rollout was lost or used twice.
- `whole_run.py`, `charges.py`, `uncertainty.py`: totals, dollars and model errors. `run_comparison.py`: two runs.
- `run_directory.py`: the other files of a run directory.

Rules:

- Readers read a trace in blocks, so memory holds only running rollouts and a few numbers for each step. Call
  `read` for each block and `settle` between blocks. Call `finish` at the end.
- A figure depends only on the trace, never on the engine's state. So it checks the engine independently.
- Steps that a failure rolled back count in no figure, but their seconds do.
"""
