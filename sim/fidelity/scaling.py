"""Stages by themselves: how they grow with GPUs and lengths (Figure 2), and how GPUs are divided (Figure 10)."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from streamrl.report.fidelity import FigureCell, PaperFigure
from streamrl.sim.fidelity.cases import GPUS, Case, make_case
from streamrl.sim.fidelity.paper import load_paper
from streamrl.sim.planner.allocation import Comparison, search
from streamrl.sim.planner.stages import Generation, Stages, Training

NODE = 8
SCALING_GPUS = 32
"""On which lengths are scaled."""


def scaling() -> PaperFigure:
    """Figure 2: stage seconds of 7B over those on 8 GPUs, and over those at 1K tokens."""
    paper = load_paper().scaling
    with ProcessPoolExecutor() as pool:
        by_gpus = list(pool.map(_stages, [20_000] * len(paper.gpus), paper.gpus))
        by_length = list(pool.map(_stages, paper.tokens, [SCALING_GPUS] * len(paper.tokens)))
    cells = [
        FigureCell(
            label=f"{stage} on {num_gpus} GPUs", paper=value, ours=found[place] / by_gpus[0][place]
        )
        for place, stage, values in ((0, "generate", paper.generate), (1, "train", paper.train))
        for num_gpus, value, found in zip(paper.gpus, values, by_gpus, strict=True)
    ]
    cells += [
        FigureCell(
            label=f"{stage} at {tokens}", paper=value, ours=found[place] / by_length[0][place]
        )
        for place, stage, values in (
            (0, "generate", paper.generate_by_length),
            (1, "train", paper.train_by_length),
        )
        for tokens, value, found in zip(paper.tokens, values, by_length, strict=True)
    ]
    return PaperFigure(
        name="Figure 2",
        title="stage seconds of 7B over those on 8 GPUs, and over those at 1K",
        unit="times",
        cells=cells,
        target="mean error at most 15 %",
        is_met=sum(abs(cell.error) for cell in cells) / len(cells) <= 0.15,
        notes=[
            "the paper's training takes a fifth of the time on four times the GPUs, which no division of the same "
            "work gives: its trainer must do something else on 8 GPUs. Here it takes a quarter at best"
        ],
    )


def _stages(longest: int, num_gpus: int) -> tuple[float, float]:
    """Return the seconds of generation and training of 7B on these GPUs, outputs up to `longest` tokens."""
    changes = {
        "workload.lengths.scale": longest / 20_000,
        "rollout.max_tokens": longest,
        "policies.dispatch": "random",
        "policies.order": "fifo",
    }
    stages = Stages(make_case(Case("7B", "20K", "sync"), 0, changes), smallest_tensor_parallel=True)
    generation, training = stages.generation(num_gpus), stages.training(num_gpus)
    assert generation is not None and training is not None, f"7B fits {num_gpus} GPUs"
    return generation.time, training.time


def divisions() -> PaperFigure:
    """Figure 10: GPUs that generate by Algorithm 1, and stage seconds at the even and the chosen split."""
    paper = load_paper().allocation
    with ProcessPoolExecutor() as pool:
        divided = dict(zip(paper, pool.map(_divide, paper), strict=True))
    cells, notes = [], []
    for size, splits in paper.items():
        found = divided[size].smallest
        generations = {entry.generation.num_gpus: entry.generation for entry in found.table}
        trainings = {entry.training.num_gpus: entry.training for entry in found.table}
        base = generations[splits.even.generate[0]].time
        cells.append(
            FigureCell(
                label=f"{size} GPUs that generate",
                paper=splits.chosen.generate[0],
                ours=found.chosen.generation.num_gpus,
            )
        )
        stages: tuple[tuple[str, tuple[int, float], dict[int, Any]], ...] = (
            ("generate", splits.chosen.generate, generations),
            ("train", splits.even.train, trainings),
            ("train", splits.chosen.train, trainings),
        )
        cells += [
            FigureCell(
                label=f"{size} {stage} on {gpus}", paper=value, ours=by_gpus[gpus].time / base
            )
            for stage, (gpus, value), by_gpus in stages
        ]
        notes.append(_division_note(size, divided[size]))
    chosen = [cell for cell in cells if "that generate" in cell.label]
    return PaperFigure(
        name="Figure 10",
        title="GPUs that generate, and stage seconds over generation on half of all",
        unit="GPUs, times",
        cells=cells,
        target="the split of least step time within a node of the paper's",
        is_met=all(abs(cell.difference) <= NODE for cell in chosen),
        notes=notes,
    )


class Divided(NamedTuple):
    """A model's GPUs divided by Algorithm 1."""

    smallest: Comparison
    """With the smallest replicas that fit."""
    fastest: Comparison
    """With those that generate fastest."""


def _divide(size: str) -> Divided:
    run = make_case(
        Case(size, "20K", "async"), changes={"cluster.pools.h800.nodes": GPUS[size] // NODE}
    )
    stages = Stages(run, smallest_tensor_parallel=True)
    smallest = search(run, stages, unit=NODE)
    return Divided(smallest, search(run, stages.with_fastest_replicas(), unit=NODE))


def _division_note(size: str, divided: Divided) -> str:
    def describe(found: Comparison) -> str:
        generation: Generation = found.chosen.generation
        training: Training = found.chosen.training
        return (
            f"{generation.num_gpus}:{training.num_gpus} GPUs ({generation.tensor_parallel} a replica, "
            f"{found.chosen.step_time:.0f} s a step)"
        )

    return (
        f"{size}: {describe(divided.smallest)} with the smallest replicas that fit, as all figures here have them; "
        f"{describe(divided.fastest)} where replicas may be larger, which is what the planner would choose"
    )
