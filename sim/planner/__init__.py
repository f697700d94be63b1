"""Choose a plan for an offer of GPUs: bounds and estimates for all plans, simulations of the best ones.

Files to read first:

- `planner.py`: runs the whole search for a run file.
- `space.py` and `layouts.py`: all plans of an offer, as arrays.
- `estimates.py` and `stage_times.py`: bounds and estimates of step times.
- `search.py`: simulates the plans that may still be best.
- `race.py`: simulates the finalists on the same prompts until their order is known.
- `objective.py` and `scores.py`: compute the objective that ranks plans.
- `allocation.py`: divides GPUs between generation and training by StreamRL's Algorithm 1.
- `shifts.py` and `sensitivity.py`: the effect of other lengths, prices, bandwidth and training speed.
- `choice_after.py`: the option that the rule of the plan chooses after such a change.
- `options.py`: chooses the three to five plans of the answer.
- `plan_description.py` and `plan.py`: describe the result and write it as plan.json.
- `plan_settings.py`: converts a plan to keys of a run file, and back.

Rules:

- Bounds must hold for every plan, because the search discards plans by them. Estimates only rank plans.
- Compare two simulated plans only on the same prompts and lengths, and over the same steps.
- Budgets and the deadline limit simulated figures. Only the rent is checked before a simulation.
"""
