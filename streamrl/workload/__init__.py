"""Draw prompts, groups and output lengths, and predict the lengths with a ranker.

Read these files first:

- `workload.py`: `Workload`, the protocol of simulated and real runs, and `SimulatedWorkload`.
- `prompt_order.py`: the order of prompts: epochs, mixtures of data sets, and tail batching.
- `prompt_records.py`, `data_files.py`: read prompts and tables from files and from the Hugging Face hub.
- `length_posterior.py`: expected lengths from past samples of a prompt and from finished siblings.
- `online_ranker.py`: `Expectations` and `LengthRanker`, the ranker of a run. It learns and is checked for drift.
- `simulated_ranker.py`: rankers for simulations, which know the true lengths.
- `replica_batch.py`: mean lengths of a run, and the limit of a replica's batch. The doctor and the planner use it.
- `prompt_families.py`: the families by which secondary trainers select groups.

Rules:

- The same run file draws the same groups. Every draw has its own random stream, keyed by the seed and the block.
- True lengths stay in the workload. The engine sees only expected tokens, in `PromptsDrawn` and
  `ExpectationsChanged`, so a replay decides as the run did.
- A group's number is its position in the order of draws, not its index in the data.
"""
