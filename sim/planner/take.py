"""Write the run file of an option, for `streamrl plan --take`."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import Losses, expected_losses
from streamrl.runfile.files import encode_run
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.sim.planner.plan import Plan, PlanOption
from streamrl.sim.planner.plan_settings import candidate_of

DIGEST_BYTES = 16


def digest_of(offer: Run) -> str:
    """Return a digest of a run file with its changes."""
    return hashlib.blake2b(encode_run(offer), digest_size=DIGEST_BYTES).hexdigest()


def take(offer: Run, plan: Plan, number: int) -> tuple[Run, Plan]:
    """Return the run file of an option, and the plan that names it as taken. Nothing is simulated.

    Args:
        offer: the run file that was planned.
        plan: its plan.
        number: number of the option, from 1.

    Raises:
        ValueError: the plan has no such option.
    """
    option = option_of(plan, number)
    constant = replace(offer, faults=(), trainer=replace(offer.trainer, resize=(), borrows=False))
    run = candidate_of(option.choice.settings).apply(constant)
    if number == 1 and plan.steps_in_time is not None:
        run = replace(run, simulate=replace(run.simulate, max_steps=plan.steps_in_time))
    losses = expected_losses(run, option.choice.step_time)
    run = replace(run, policies=with_restarts(run.policies, losses))
    check_run(run)
    return run, replace(plan, taken=number, carried_by=option.carried_by)


def option_of(plan: Plan, number: int) -> PlanOption:
    """Return an option of a plan; `ValueError` if it has no such number."""
    if not 1 <= number <= len(plan.options):
        raise ValueError(f"--take {number}: choose an option from 1 to {len(plan.options)}")
    return plan.options[number - 1]


def with_restarts(policies: PoliciesConfig, losses: Losses) -> PoliciesConfig:
    """Return policies that allow as many restarts as the run may need. The price of the run includes them."""
    changed: PoliciesConfig = replace(
        policies, max_restarts=max(policies.max_restarts, losses.most)
    )
    return changed
