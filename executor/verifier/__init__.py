"""Compute the rewards of finished rollouts, in sandboxed processes that model output cannot leave.

Read these files first:

- `verifier.py`: `Verifier`, the entry point. It scores a completion with all rewards of the run file.
- `scorers.py`: `Scorer`, one for each value of `verifier.scorer`, and functions of the user.
- `fork_server_process.py`: start the fork server, send it answers, and notice when it dies.
- `fork_server.py`: `ForkServer`, a separate process that loads the scorers once and forks workers.
- `sandbox.py`, `seccomp.py`, `landlock.py`: the limits of a worker.
- `judge.py`: score with a language model over HTTP. `reward_model.py`, `reward_pool.py`: score with a reward model.
- `reward_checks.py`: checks of prompts and reward models before the run starts.

Rules:

- An answer may be a program that attacks its scorer. Evaluate answers only in a worker.
- A worker that graded an answer with code is not used again. Its output is untrusted data.
- If an answer exceeds the limits, it gets the worst score, not an error. Otherwise a model could remove bad rollouts
  from its group.
- If the record's own answer cannot be scored either, the record or the limits are wrong. That is an error.
- Judges and reward models do not run in the sandbox, because it has no network.
"""
