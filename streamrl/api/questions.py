"""Ask for a first answer from Python, as `streamrl plan --model …` gives it."""

from __future__ import annotations

from streamrl.api.studies import named_as_arguments
from streamrl.runfile.errors import RunError
from streamrl.runfile.python_values import Changes
from streamrl.sim.planner.answers import estimate, question_of, run_of, stated_of
from streamrl.sim.planner.first_answer import FirstAnswer, assumptions_of


def first_answer(
    model: str,
    gpus: str,
    *,
    algorithm: str | None = None,
    prompts: int | str | None = None,
    group: int | str | None = None,
    mean_tokens: int | str | None = None,
    max_tokens: int | str | None = None,
    prompt_tokens: int | str | None = None,
    steps: int | str | None = None,
    link: str | None = None,
    deadline: str | None = None,
    budget: float | str | None = None,
    setup_time: str | None = None,
    minimum_term: str | None = None,
    changes: Changes = (),
) -> FirstAnswer:
    """Estimate plans for a model on an offer of GPUs, within ten seconds. No run file is needed.

    Arguments are the options of `streamrl plan`. What is left out is assumed, and the answer says so. `plan`
    takes its `run`, and compares plans by simulation.

    Args:
        model: a model profile, or a Hugging Face name such as Qwen/Qwen3-8B.
        gpus: GPUs that you may rent, with dollars per GPU-hour: "16xH100@2.20,8xH20@1.10". Your own GPUs are
            "16xH100@owned". The bandwidth between nodes is "16xH20@1.10 with 1600 Gbps".
        algorithm: the algorithm; grpo by default.
        prompts: prompts of a step.
        group: rollouts of each prompt.
        mean_tokens: mean output tokens, such as 6000 or "6k".
        max_tokens: output tokens at which a rollout is cut off.
        prompt_tokens: tokens of a prompt.
        steps: steps of the training.
        link: bandwidth between pools, such as "100 Gbps".
        deadline: latest end, such as "3 days".
        budget: most dollars of the whole run.
        setup_time: time for which GPUs are rented before the first step, such as "2 h".
        minimum_term: shortest time that rented GPUs are billed for, such as "24 h".
        changes: further keys of the run file, as `load_run` takes them.

    Raises:
        ValueError: an answer cannot be read, or no plan fits. The error names the argument.
        RunError: a change is wrong.
    """
    given = dict(locals())
    try:
        stated = stated_of(given)
        question = question_of(stated)
        answer = estimate(run_of(question, changes))
    except RunError:
        raise
    except ValueError as error:
        raise named_as_arguments(error) from None
    return answer._replace(assumptions=tuple(assumptions_of(question, set(stated))))
