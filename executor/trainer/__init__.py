"""Train the policy: the trainer's controller side, its worker process, losses, and training backends.

Read these files first:

- `trainer.py`: `Trainer`, the controller side. Each method carries out one command and returns its event.
- `trainer_worker.py`: `TrainerWorker`, the process. Its docstring has the invariants of gradients and versions.
- `learner.py`: `Learner`, the blocking part: accumulate gradients, step, push, save.
- `losses.py`: policy losses and off-policy corrections, as one table. `objectives.py`: one class for each algorithm.
- `advantages.py`: advantages from rewards, on the controller side. `step_record.py`: figures of a step.
- `passes.py`, `sequences.py`: pack rollouts into forward passes; samples as arrays.
- `training_backend.py`, `torch_backend.py`, `deepspeed_backend.py`: what holds weights, gradients and optimizer.
- `rank_group.py`: the ranks of one trainer. `joining.py`: what a rank that is added gets from the first one. `critic.py`, `adapters.py`, `model_loading.py`: the models.

Rules:

- Every rank calls the same methods in the same order, because they wait for each other in collectives. If one rank
  rejects a sample, all do (`RankGroup.agree`).
- A gradient must not depend on how a batch was split over calls of `train`: sum first, and divide at the step.
- Tensors of tokens are flat and have only tokens that the policy sampled.
- Trained weights are float32. `trainer.dtype` is the dtype of passes and of pushed weights.
- A checkpoint is complete or absent.
"""
