"""Policies that a run file cannot ask for together; raises `ValueError` naming key and value."""

from __future__ import annotations

from streamrl.runfile.config import Run


def check_policies(run: Run) -> None:
    """Raise `ValueError` where a policy lacks what it works with."""
    if run.policies.tail_batching != "none":
        _check_tail_batching(run)
    if run.policies.learns_from_siblings:
        _check_learning(run)


def _check_tail_batching(run: Run) -> None:
    """Refuse to put off long prompts where nobody knows which these are, or past the end of the run."""
    steps, every = run.algorithm.steps, run.policies.tail_every
    if run.workload.lengths is not None and run.workload.lengths.ranker == "none":
        raise ValueError(
            "policies.tail_batching 'defer' needs a ranker that tells long prompts from short ones, "
            "got workload.lengths.ranker 'none'"
        )
    if steps % every:
        raise ValueError(
            f"algorithm.steps must be a multiple of policies.tail_every={every} where "
            f"policies.tail_batching is 'defer', or the longest prompts of the last steps are left out, "
            f"got {steps}"
        )


def _check_learning(run: Run) -> None:
    """Refuse to learn what comes too late: rollouts must be sent one by one, the longest first."""
    policies = run.policies
    for key, value, only in (
        ("dispatch", policies.dispatch or "least-loaded", "least-loaded"),
        ("order", policies.order or "fifo", "longest-first"),
        ("group_placement", policies.group_placement, "split"),
    ):
        if value != only:
            raise ValueError(
                f"policies.{key} must be {only!r} where policies.learns_from_siblings is true, "
                f"got {value!r}"
            )
    if policies.weight_sync == "between-batches":
        raise ValueError(
            "policies.weight_sync 'between-batches' deals whole batches at once, which leaves nothing to learn: "
            "choose another, or policies.learns_from_siblings = false"
        )
    if run.algorithm.group_size < 2:
        raise ValueError(
            f"policies.learns_from_siblings needs an algorithm.group_size of 2 or more, "
            f"got {run.algorithm.group_size}"
        )
