"""What a plan takes of the tokens that it may draft, and from where."""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.runfile.config import Run
from streamrl.sim.costs.speculation import accepted_tokens


def drafts_text(run: Run) -> str:
    """Say what a plan takes of the tokens that it may draft, and from where; nothing where it may not."""
    drafts, counts = run.rollout.speculative, run.plan.speculative
    if drafts is None or counts is None:
        return ""
    assert drafts.acceptance is not None, "check_run wants it"
    made = {
        tokens: accepted_tokens(replace(drafts, tokens=tokens)) for tokens in counts if tokens > 0
    }
    each = ", ".join(f"{tokens} drafted make {of:.2f} tokens a step" for tokens, of in made.items())
    drafter = drafts.model or "the model's own layer for multi-token prediction"
    return (
        f"drafts of {drafter} are accepted with probability {drafts.acceptance:g} each where all before were, "
        f"as rollout.speculative.acceptance says{f': {each}' if each else ''}"
    )
