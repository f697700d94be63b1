"""StreamRL paper, throughput of whole runs: Figure 8 with its ratios and verl, Table 3, Figure 12."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import log
from statistics import median

from streamrl.hardware.memory import most_running
from streamrl.hardware.resolved import resolve
from streamrl.record.attribution import UNDERFILLED, Attribution, attribute
from streamrl.sim.fidelity.paper import (
    ACROSS,
    BATCH,
    LENGTHS,
    MODELS,
    SYSTEMS,
    Case,
    Times,
    load_paper,
    make_case,
    on_wider_replicas,
    take_all_times,
    take_times,
)
from streamrl.sim.fidelity.paper_figure import (
    FigureCell,
    PaperFigure,
    largest_difference,
    mean_error,
)
from streamrl.sim.parallel import worker_pool
from streamrl.sim.world import simulate

END_TO_END = "Figure 8"
COLUMNS = ("verl", "colocated", "sync", "async")
CELLS = [
    Case(size, length, system) for length in LENGTHS for size in MODELS for system in COLUMNS[1:]
]
COST = {True: 4 * 1.0 + 2 * 2.85, False: 4 * 2.85}
"""Relative cost of Figure 12's machines, across datacenters or in one: an H20 machine costs 1, an H800 machine 2.85."""
VERL_FITTED = (("7B", "5K"), ("72B", "20K"))
"""The two cells that the factors of verl are fitted to: opposite corners of the table."""
VERL_FACTORS = [share / 40 for share in range(10, 41)]
"""Candidate factors of verl's speed, relative to the profiles: from a quarter to 1."""
VERL_TIE = 0.1
"""Penalty for unequal factors. Generation has the same share of both cells' seconds, so without a
penalty every pair of factors on a line fits equally well. Factors that differ by 30 % are penalised
like errors of 10 %.
"""


def end_to_end() -> PaperFigure:
    """Return Figure 8: 27 cells of throughput."""
    ours = take_all_times(CELLS)
    cells = [
        FigureCell(label=_label(case), paper=paper_throughput(case), ours=ours[case].throughput)
        for case in CELLS
    ]
    errors = [abs(cell.error) for cell in cells]
    return PaperFigure(
        name=END_TO_END,
        title="end-to-end throughput, PPO, 1,024 rollouts a step",
        unit="samples/s",
        cells=cells,
        target="mean error at most 15 %, none above 30 %",
        is_met=mean_error(cells) <= 0.15 and max(errors) <= 0.30,
        found=f"mean {mean_error(cells):.1%}, largest {max(errors):.1%}",
        notes=[_consistency_note(), _doubling_note(), _longest_note(ours), _wider_note(ours)],
    )


def cells_in_band() -> dict[str, list[bool]]:
    """Return by system whether each cell of Figure 8 is within the band of our step."""
    ours = take_all_times(CELLS)
    found: dict[str, list[bool]] = {}
    for case in CELLS:
        low, high = ours[case].error
        is_within = low <= ours[case].throughput / paper_throughput(case) <= high
        found.setdefault(SYSTEMS[case.system]["system"], []).append(is_within)
    return found


def ratios() -> PaperFigure:
    """Return Figure 8 as ratios over the colocated system, in which common constants cancel."""
    ours = take_all_times(CELLS)
    cells = [
        FigureCell(
            label=f"{length} {size} {system}/colocated",
            paper=paper_throughput(Case(size, length, system))
            / paper_throughput(Case(size, length, "colocated")),
            ours=ours[Case(size, length, system)].throughput
            / ours[Case(size, length, "colocated")].throughput,
        )
        for system in ("sync", "async")
        for length in LENGTHS
        for size in MODELS
    ]
    medians = {
        system: median(abs(cell.error) for cell in cells if f"{system}/" in cell.label)
        for system in ("sync", "async")
    }
    wrong = sum(cell.is_reversed for cell in cells)
    return PaperFigure(
        name="Figure 8 ratios",
        title="speed-up over the colocated system",
        unit="times",
        cells=cells,
        target="median error of each system at most 10 %, no reversed cell",
        is_met=max(medians.values()) <= 0.10 and not wrong,
        found=", ".join(f"{system} {error:.1%}" for system, error in medians.items())
        + f", {wrong} of {len(cells)} reversed",
        reversed=wrong,
    )


def verl() -> PaperFigure:
    """Return Figure 8's verl: the colocated system, slower by one factor for generation and one for the rest."""
    ours = take_all_times(case for case in CELLS if case.system == "colocated")
    fitted = [Case(size, length, "colocated") for size, length in VERL_FITTED]
    generate, train = min(
        product(VERL_FACTORS, VERL_FACTORS),
        key=lambda pair: (
            sum(_verl_error(ours[case], case, *pair) ** 2 for case in fitted)
            + VERL_TIE * log(pair[0] / pair[1]) ** 2
        ),
    )
    cells = [
        FigureCell(
            label=_label(case, "verl"), paper=_verl(case), ours=slower(ours[case], generate, train)
        )
        for case in ours
    ]
    tested = [cell for case, cell in zip(ours, cells, strict=True) if case not in fitted]
    return PaperFigure(
        name="Figure 8 verl",
        title="end-to-end throughput of verl",
        unit="samples/s",
        cells=cells,
        target="mean error of the seven cells that were not fitted at most 15 %",
        is_met=mean_error(tested) <= 0.15,
        found=f"mean of seven {mean_error(tested):.1%}",
        notes=[
            f"Calibration: verl generates at {generate:.3g} of the speed of the colocated system, and does the rest at {train:.3g}. "
            f"Both factors are fitted on {' and '.join(_label(case, 'verl') for case in fitted)}. The other seven cells are "
            "predictions.",
            "In the paper, verl over colocated is "
            + ", ".join(
                f"{_verl(case) / paper_throughput(case):.2f} ({_label(case, '')})" for case in ours
            )
            + ". The shares of generation in these cells are alike: "
            + ", ".join(f"{t.generation_time / t.step_time:.2f}" for t in ours.values())
            + ". So no two factors give ratios that differ so much.",
        ],
    )


def ablation() -> PaperFigure:
    """Return Table 3: the gain of each mechanism, 72B at 20K on 128 GPUs."""
    names = ("colocated", "colocated, skewness-aware", "sync", "async")
    ours = take_all_times(Case("72B", "20K", name) for name in names)
    base = ours[Case("72B", "20K", "colocated")].throughput
    cells = [
        FigureCell(label=name, paper=value, ours=ours[Case("72B", "20K", name)].throughput / base)
        for name, value in list(zip(names, load_paper().ablation["72B"], strict=True))[1:]
    ]
    return PaperFigure(
        name="Table 3",
        title="throughput of 72B at 20K over the colocated system",
        unit="times",
        cells=cells,
        target="every row within 0.05",
        is_met=largest_difference(cells) <= 0.05,
        found=f"off by up to {largest_difference(cells):.2f}",
        notes=[
            "Faster generation helps the colocated system most, because it generates on all GPUs and then trains. "
            "`benchmarks/bench_readings.py` has these rows with generation a fifth faster, with twice the GPUs per replica, and with "
            "other batches.",
            _bubbles_note(names),
        ],
    )


def heterogeneous() -> PaperFigure:
    """Return Figure 12: 32 H20 that generate and 16 H800 that train in another datacenter, against 32 H800."""
    cases = {
        length: [Case("7B", length, "async", across) for across in (True, False)]
        for length in LENGTHS
    }
    ours = take_all_times(case for pair in cases.values() for case in pair)
    cells = []
    for length, pair in cases.items():
        across, alone = (ours[case].throughput / COST[case.across] for case in pair)
        paper = load_paper().heterogeneous[length]
        cells.append(
            FigureCell(
                label=f"{length} H20 + H800 over H800",
                paper=paper[0] / paper[1],
                ours=across / alone,
            )
        )
    faster = [ours[pair[0]].throughput / ours[pair[1]].throughput for pair in cases.values()]
    return PaperFigure(
        name="Figure 12",
        title="throughput per cost of 7B in two datacenters over one",
        unit="times",
        cells=cells,
        target="every ratio within 0.05",
        is_met=largest_difference(cells) <= 0.05,
        found=f"off by up to {largest_difference(cells):.2f}",
        notes=[
            f"The machines cost {COST[False] / COST[True]:.3f} times less. With {ACROSS['rollout.replicas']} H20 instead of 16 H800, "
            f"a step here is {', '.join(f'{f:.2f}' for f in faster)} times as fast. In the paper it is "
            + ", ".join(
                f"{a / b * COST[True] / COST[False]:.2f}"
                for a, b in load_paper().heterogeneous.values()
            )
            + " times as fast.",
            f"Each of 16 H800 replicas gets 64 rollouts and runs {_held_at_once()} of them at once. Each of 32 H20 replicas gets 32 "
            "and runs all. Our ratio is above the paper's if some rollouts wait, and below it if none waits. "
            "`benchmarks/bench_readings.py` has other readings.",
        ],
    )


# Verl -----------------------------------------------------------------------------------------------


def slower(times: Times, generate: float, train: float) -> float:
    """Return the samples per second at these speeds; phases do not overlap, so their seconds add up."""
    rest = times.step_time - times.generation_time
    return BATCH / (times.generation_time / generate + rest / train)


def _verl_error(times: Times, case: Case, generate: float, train: float) -> float:
    return log(slower(times, generate, train) / _verl(case))


# Notes ----------------------------------------------------------------------------------------------


def _consistency_note() -> str:
    """Return a note: the paper's asynchronous run gives an upper bound on its colocated 72B step at 5K."""
    step = BATCH / paper_throughput(Case("72B", "5K", "async"))
    colocated = BATCH / paper_throughput(Case("72B", "5K", "colocated"))
    most = step + step * 48 / 128
    return (
        f"72B colocated at 5K: an asynchronous step of the paper takes {step:.0f} s. So neither generation on 80 GPUs nor training "
        f"on 48 GPUs takes longer. If all 128 GPUs do one after the other, they need at most {step:.0f} + {step:.0f} x 48/128 = "
        f"{most:.0f} s. The paper has {colocated:.0f} s. The rest is neither generation nor training, and is not simulated. Even "
        f"{most:.0f} s would be {colocated / most - 1:+.0%}."
    )


def _doubling_note() -> str:
    """Return a note on how the paper's seconds and a batch's tokens grow with the output length."""

    def growth(short: str, long: str) -> str:
        steps = [
            paper_throughput(Case(size, short, system)) / paper_throughput(Case(size, long, system))
            for size in MODELS
            for system in COLUMNS[1:]
        ]
        return f"{min(steps):.2f} to {max(steps):.2f} times (median {median(steps):.2f})"

    return (
        f"Lengths: the paper's seconds grow {growth('5K', '10K')} from 5K to 10K, and {growth('10K', '20K')} from 10K to 20K. The "
        "second doubling should cost more, because prompts do not grow and attention grows faster than tokens. So with any one "
        "constant, cells that are too fast at 5K are too slow at 20K."
    )


def _longest_note(ours: dict[Case, Times]) -> str:
    """Return a note on the time that the decode curve leaves for training in the paper's fastest 7B cells."""
    alone = load_paper().decode.milliseconds[0] / 1e3 * 19_869
    case = Case("7B", "20K", "colocated")
    paper = BATCH / paper_throughput(case)
    return (
        f"7B at 20K: the longest rollout alone takes 19,869 tokens x {load_paper().decode.milliseconds[0]} ms = "
        f"{alone:.0f} s on the paper's own decode curve. The paper's colocated step of {paper:.0f} s leaves "
        f"{paper - alone:.0f} s for everything else. Our step takes {ours[case].step_time:.0f} s."
    )


def _bubbles_note(systems: Sequence[str]) -> str:
    """Return a note on the cost of stragglers for each system: idle and underfilled shares of GPU-seconds."""
    with worker_pool() as pool:
        found = list(pool.map(_bubbles, systems))
    return (
        "Stragglers leave few GPUs idle. They leave many underfilled: these decode only a few rollouts. Idle and underfilled "
        "shares of all GPU-seconds are "
        + ", ".join(
            f"{shares.idle['skew']:.0%} and {shares.busy[UNDERFILLED]:.0%} ({system})"
            for system, shares in zip(systems, found, strict=True)
        )
        + "."
    )


def _bubbles(system: str) -> Attribution:
    return attribute(simulate(make_case(Case("72B", "20K", system))))


def _wider_note(ours: dict[Case, Times]) -> str:
    """Return a note on the effect of twice the GPUs per replica in the cells with the smallest batches."""
    cases = [Case("32B", "20K", system) for system in COLUMNS[1:]]
    changes = [on_wider_replicas(case) for case in cases]
    with worker_pool() as pool:
        wider = list(pool.map(take_times, cases, changes))

    def errors(times: Iterable[Times]) -> str:
        pairs = zip(times, cases, strict=True)
        return ", ".join(f"{t.throughput / paper_throughput(case) - 1:+.0%}" for t, case in pairs)

    narrow, wide = (make_case(cases[1], changes=each) for each in ({}, changes[1]))
    return (
        f"32B at 20K: a replica on {narrow.rollout.tensor_parallel} GPUs gets {_share(narrow.rollout.replicas)} rollouts and has memory for "
        f"{most_running(resolve(narrow).replica)} of the longest. This share is the smallest of all cells. On {wide.rollout.tensor_parallel} GPUs it "
        f"gets {_share(wide.rollout.replicas)} and has memory for {most_running(resolve(wide).replica)}. Its three errors are then {errors(wider)} instead of "
        f"{errors(ours[case] for case in cases)}. The paper does not say how many GPUs it used. `benchmarks/bench_readings.py` has "
        "all models on twice the GPUs."
    )


def _share(num_replicas: int) -> int:
    return BATCH // num_replicas


def _held_at_once() -> str:
    """Return how many of its 64 rollouts an H800 replica of 7B runs at once, by length."""
    runs = {length: make_case(Case("7B", length, "async")) for length in LENGTHS}
    return ", ".join(
        f"{min(_share(run.rollout.replicas), most_running(resolve(run).replica))} ({length})"
        for length, run in runs.items()
    )


def _label(case: Case, system: str | None = None) -> str:
    return f"{case.length} {case.size} {case.system if system is None else system}".strip()


def paper_throughput(case: Case) -> float:
    """Return the paper's samples per second."""
    return load_paper().throughput[f"{case.length} {case.size}"][COLUMNS.index(case.system)]


def _verl(case: Case) -> float:
    return load_paper().throughput[f"{case.length} {case.size}"][0]
