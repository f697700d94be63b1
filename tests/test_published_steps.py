"""Published RL steps are run files that simulate, with the mean length that their source states."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamrl.runfile.files import make_run
from streamrl.sim.fidelity import rl_steps
from streamrl.sim.fidelity.rl_steps import PhaseSeconds, Published, load_published
from streamrl.workload.workload import SimulatedWorkload

PUBLISHED = {step.name: step for step in load_published()}


def test_every_published_step_is_a_run_file_and_states_its_source() -> None:
    assert len(PUBLISHED) == len(load_published()) >= 52
    for step in PUBLISHED.values():
        run = make_run(step.table)
        assert step.source and step.note and step.stages
        assert step.stages.keys() <= {*PhaseSeconds._fields}
        assert {*step.fitted} <= {*PhaseSeconds._fields}
        gpus = run.trainer.num_gpus
        if step.overlaps:
            gpus += run.rollout.num_gpus
        (pool,) = run.cluster.pools.values()
        assert gpus <= pool.num_gpus


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("NeMo-RL 0.5: Qwen3-32B on 32 H100, on policy", "h100, dense, in turns"),
        ("NeMo-RL 0.5: Qwen3-32B on 64 H100, 1 step off", "h100, dense, overlapping"),
        ("NeMo-RL 0.6: DeepSeek-V3 on 128 GB200, on policy", "gb200, mixture, in turns"),
    ],
)
def test_errors_are_summarised_by_gpu_kind_of_model_and_timing(name: str, partition: str) -> None:
    assert PUBLISHED[name].partition == partition


@pytest.mark.parametrize("name", ["NeMo-RL 0.5: Qwen3-30B-A3B on 32 H100, 1 step off"])
def test_lengths_have_the_published_mean_whatever_their_shape(name: str) -> None:
    step = PUBLISHED[name]
    choices = list(rl_steps._choices(step))
    assert len(choices) == 2
    for choice in choices:
        run = rl_steps._run(step.table, choice)
        draws = SimulatedWorkload(run).draw(0, 500)
        lengths = [min(each, run.rollout.max_tokens) for draw in draws for each in draw.lengths]
        assert sum(lengths) / len(lengths) == pytest.approx(step.mean_tokens, rel=0.03)


def test_a_step_that_our_memory_model_refuses_is_predicted_with_recomputation_and_says_so() -> None:
    step = PUBLISHED["NeMo-RL 0.5: Qwen3-30B-A3B on 32 H100, on policy"]
    assert rl_steps.REFUSED not in _note(step)
    assert rl_steps.REFUSED in _note(_with_passes(step, 30_000))
    with pytest.raises(ValueError, match="our memory model refuses it"):
        _note(_with_passes(step, 200_000))


def _with_passes(step: Published, tokens: int) -> Published:
    trainer = {**step.table["trainer"], "max_tokens_per_pass": tokens}
    return replace(step, table={**step.table, "trainer": trainer})


def _note(step: Published) -> str:
    """Return the note of a step's row."""
    found = [rl_steps._simulated(step, choice) for choice in rl_steps._choices(step)]
    (row,) = rl_steps._stage_rows(step, found)
    return row.note
