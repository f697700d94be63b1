"""Compute the cost of training: layer by layer, stage by stage, micro-batch by micro-batch.

Files to read first:

- `training.py`: `TrainingCosts` chooses the best source of stage times and combines everything below.
- `layer.py`: forward and backward pass of one layer, term by term.
- `ranks.py`: how GPUs share a model, and their collectives.
- `stage_times.py`: seconds of each pipeline stage for a micro-batch.
- `micro_batches.py`: distributes and packs rollouts.
- `pipeline.py`: 1F1B and interleaved schedules.
- `profile.py`: the fitted constants in profiles/measured/training.toml.

A `Pass` is linear: a constant, seconds per token, and seconds per pair of tokens. Stage times are sums
of passes, so a micro-batch needs only its tokens, its pairs, and its tokens times its sequences.
"""
