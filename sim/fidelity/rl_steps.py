"""Published RL steps (profiles/published/rl_steps.toml), stage by stage, compared with their simulation.

Two sources are left out. NeMo-Aligner's five steps (arXiv 2405.01481) have no published response
lengths. RLHFuse's twelve steps (arXiv 2409.13221) have critics and reward models of another size than
the actor.

Inputs that a source does not state are ranges: a row is predicted with every combination of
`Published.opens`.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from copy import deepcopy
from itertools import product
from math import prod, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from streamrl.engine.messages import (
    Generated,
    PromptsDrawn,
    PushWeights,
    Score,
    Scored,
    Step,
    Stepped,
    Train,
    Trained,
    WeightsLoaded,
)
from streamrl.engine.presets import choose_system
from streamrl.engine.trace import Trace
from streamrl.hardware.profiles import PROFILES, load_gpu, load_model
from streamrl.hardware.resolved import ResolvedRun, resolve
from streamrl.hardware.step_errors import Stage
from streamrl.record.band import StepBasis
from streamrl.record.metrics import steady_basis
from streamrl.record.steady_state import START
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from streamrl.runfile.keys import place_of
from streamrl.sim.batch_generation import DrawnBatch, generate_batch
from streamrl.sim.costs.colocation import PhaseChange
from streamrl.sim.costs.corrections import own_switch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.fidelity.published_rows import AT_DEFAULTS, Row
from streamrl.sim.fidelity.switches import switch_rows
from streamrl.sim.parallel import worker_pool
from streamrl.sim.world import simulate
from streamrl.workload.workload import SimulatedWorkload


class PhaseSeconds(NamedTuple):
    """Mean seconds of a run's steps without the first one, which has no earlier generation or load."""

    generation: float
    """Time from the prompts, once all replicas have the weights, to the last rollout."""
    score: float
    train: float
    """Forward and backward passes, and the optimizer step."""
    refit: float
    """Time from the pushed weights until the last replica has loaded them."""
    step: float
    """Time from version to version."""


def phase_seconds(trace: Trace, besides: float = 0.0) -> PhaseSeconds:
    """Return the stage times of a run whose generation and training do not overlap.

    Args:
        trace: the run.
        besides: seconds of the framework's own work that a step has beside its stages. The simulation takes them with
            the optimizer step; published stages do not have them.
    """
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    scored: defaultdict[int, float] = defaultdict(float)
    trained: defaultdict[int, float] = defaultdict(float)
    stepped: dict[int, float] = {}
    pushed: dict[int, float] = {}
    refit: dict[int, float] = {}
    work_at = 0.0
    for time, event, commands in trace.entries:
        match event:
            case PromptsDrawn():
                began[len(began) + 1] = time
            case Generated():
                ended[len(began)] = time
            case Scored():
                scored[len(stepped) + 1] += time - work_at
            case Trained():
                trained[len(stepped) + 1] += time - work_at
            case Stepped(version):
                trained[version] += time - work_at - besides
                stepped[version] = time
            case WeightsLoaded(_, version) if version in pushed:
                refit[version] = time - pushed[version]
                began[len(began)] = time
            case _:
                pass
        for command in commands:
            match command:
                case Score() | Train() | Step():
                    work_at = time
                case PushWeights(version):
                    pushed[version] = time
                case _:
                    pass
    steps = [step for step in stepped if step > 1]
    return PhaseSeconds(
        generation=fmean(ended[n] - began[n] for n in steps),
        score=fmean(scored[n] for n in steps),
        train=fmean(trained[n] for n in steps),
        refit=fmean(refit.values()),
        step=fmean(stepped[n] - stepped[n - 1] for n in steps),
    )


SYNCHRONOUS = 5
"""Simulated steps if generation and training do not overlap."""
SAMPLE_CAP = 10**6
"""Tokens that no output reaches."""
LENGTHS = "r1-distill-aime"
"""Assumed shape of output lengths, scaled to the published mean. Another shape changes the time of
generation, and changes other stages only slightly.
"""
ASSUMED: dict[str, Any] = {
    "algorithm": {"steps": SYNCHRONOUS},
    "workload": {"lengths": {"kind": "histogram", "source": LENGTHS, "prompt_tokens": 150}},
}
MOST_RECOMPUTED = {"trainer.recompute": "full"}
REFUSED = (
    "our memory model refuses this step without recomputation; it is predicted with recompute=full"
)
PATH = PROFILES / "published" / "rl_steps.toml"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One published step."""

    name: str
    source: str
    note: str
    mean_tokens: float
    table: dict[str, Any]
    opens: dict[str, list[Any]]
    """Possible values of the dotted keys that the source does not state."""
    stages: dict[str, tuple[float, float]]
    """Lowest and highest published seconds by stage, with the names of `PhaseSeconds`. They differ where a source
    contradicts itself.
    """
    fitted: list[str]
    """Stages with constants that rest on this very source."""
    generation_has_sleep: bool = False
    """Whether the published generation ends when replicas sleep, and not with the last rollout."""

    @property
    def partition(self) -> str:
        """The GPU, the kind of model, and whether generation and training overlap: "h100, dense, synchronous"."""
        run = make_run(self.table)
        gpu = run.cluster.pools[run.rollout.pool].gpu
        kind = "dense" if load_model(run.model).experts is None else "MoE"
        return f"{gpu}, {kind}, {'asynchronous' if self.most_ahead else 'synchronous'}"

    @property
    def num_gpus(self) -> int:
        """GPUs that generate or train."""
        return sum(pool.num_gpus for pool in make_run(self.table).cluster.pools.values())

    @property
    def most_ahead(self) -> int:
        """Steps that generation may be ahead of training; 0 if they take turns."""
        return choose_system(make_run(self.table).policies).staleness_bound

    @property
    def num_simulated(self) -> int:
        """Steps to simulate."""
        return START + 4 + 4 * self.most_ahead if self.most_ahead else SYNCHRONOUS


class Simulated(NamedTuple):
    """Our seconds of a published step, for one combination of inputs."""

    seconds: dict[str, float]
    """By stage; only the step where generation and training overlap."""
    basis: StepBasis
    """What the step consists of."""


def load_published(path: Path = PATH) -> list[Published]:
    """Read profiles/published/rl_steps.toml, or another file of that form."""
    found = []
    for group in tomllib.loads(path.read_text(encoding="utf-8"))["groups"]:
        for step in group["steps"]:
            table = deepcopy(ASSUMED)
            _apply(table, _dotted(group["run"]))
            _apply(table, step.get("keys", {}))
            found.append(
                Published(
                    name=step["name"],
                    source=group["source"],
                    note=group["note"],
                    mean_tokens=step["mean_tokens"],
                    table=table,
                    opens={**group["opens"], **step.get("opens", {})},
                    stages={name: _ends(own) for name, own in step.get("stages", {}).items()},
                    fitted=group["fitted"],
                    generation_has_sleep=group.get("generation_has_sleep", False),
                )
            )
    return found


def _ends(published: float | Sequence[float]) -> tuple[float, float]:
    """Return both ends of published seconds: one figure, or the lowest and the highest one."""
    low, high = published if isinstance(published, Sequence) else (published, published)
    return float(low), float(high)


STAGES_OF: dict[str, Stage | Literal["step"]] = {
    "generation": "generation",
    "score": "score",
    "train": "train",
    "refit": "sync",
    "step": "step",
}
"""Stages of errors by those of `PhaseSeconds`."""
OLD_GENERATION = ("dense", "ampere", "default framework")
"""The partition of HybridFlow's figures: Llama 2 on A100, without a framework's terms."""
GENERATED = {
    ("llama-2-7b", 8): 86,
    ("llama-2-7b", 4): 44.5,
    ("llama-2-7b", 2): 34,
    ("llama-2-7b", 1): 32,
    ("llama-2-13b", 8): 224,
    ("llama-2-13b", 4): 141,
    ("llama-2-13b", 2): 159,
    ("llama-2-13b", 1): 230,
}
"""Seconds of 1,024 rollouts of 1,024 + 1,024 tokens on 16 A100, by model and tensor parallelism.
Source: HybridFlow, arXiv 2409.19256, Figure 15, read within 3 %, including the switch, with vLLM of
2024.
"""


class Unstated(NamedTuple):
    """Inputs of HybridFlow's figures that the paper does not state, or that no profile has."""

    engine: str
    """The paper has vLLM 0.3.1. The profiles beside it have CUDA graphs, or none (`enforce_eager` of verl's
    first releases).
    """
    resident: float
    """Bytes a parameter of a model that stay on the 16 GPUs. KV caches take what remains: best-effort allocation."""


UNSTATED = "no profile of vLLM 0.3.1; KV memory is what remains"
FASTEST, SLOWEST = Unstated("vllm-0.6", 0.0), Unstated("vllm-0.2", 2 * 18.0 + 2 * 2.0)
"""All states are offloaded, or none: two models that train with Adam, and two in two bytes that only score."""
MOST_USED = 0.9
"""vLLM's default of `gpu_memory_utilization`."""


def steps_rows() -> list[Row]:
    """Return every published stage with its prediction, computed on all cores."""
    with worker_pool() as pool:
        rows = stage_rows(load_published(), pool)
        generated = [
            list(pool.map(_generated, GENERATED, [end] * len(GENERATED)))
            for end in (FASTEST, SLOWEST)
        ]
    rows += [
        Row(
            name=f"HybridFlow: {model} on 16 A100 at TP{degree}, 1,024 rollouts of 1,024 + 1,024",
            group="generation by tensor parallelism, vLLM of 2024",
            shape=model,
            unit="s generation",
            published=(seconds * 0.97, seconds * 1.03),
            predicted=(min(ours), max(ours)),
            note=UNSTATED,
            source="HybridFlow arXiv 2409.19256 Figure 15",
            stage="generation",
            basis=StepBasis(replicas={}, trainer={}, partition=OLD_GENERATION),
        )
        for ((model, degree), seconds), *ours in zip(GENERATED.items(), *generated, strict=True)
    ]
    return rows + switch_rows()


def stage_rows(published: Sequence[Published], pool: Executor) -> list[Row]:
    """Return the published stages of steps with their predictions, and with those of racks at defaults."""
    readings = [at_defaults(step) for step in published]
    every = [*published, *filter(None, readings)]
    wanted = [(step, choice) for step in every for choice in choices_of(step)]
    found = list(pool.map(simulate_step, *zip(*wanted, strict=True)))
    rows = []
    for step, reading in zip(published, readings, strict=True):
        ours, default = (
            [each for (one, _), each in zip(wanted, found, strict=True) if one is asked]
            for asked in (step, reading)
        )
        rows += list(_stage_rows(step, ours, default))
    return rows


def at_defaults(step: Published) -> Published | None:
    """Return a step on racks of which nothing is stated; None for a step on nodes without racks."""
    if DOMAIN not in _dotted(step.table):
        return None
    table = deepcopy(step.table)
    place, last = place_of(table, DOMAIN)
    del place[last]
    opens = {key: values for key, values in step.opens.items() if key != DOMAIN}
    return msgspec.structs.replace(step, table=table, opens=opens)


DOMAIN = "cluster.pools.gpus.nvlink_domain"
"""GPUs of a rack that NVLink joins, or of the part of one in which nodes are."""
RELEASE = re.compile(r" \d[\d.]*(?=[:,])|, second run")
"""What names of one configuration differ in: the release of the framework, and repeated runs."""


def choices_of(step: Published) -> Iterator[dict[str, Any]]:
    """Yield every combination of unstated inputs, with lengths scaled to the published mean."""
    for values in product(*step.opens.values()):
        choice = dict(zip(step.opens, values, strict=True))
        yield {**choice, "workload.lengths.scale": _scale(step, choice)}


def with_keys(step: Published, keys: Mapping[str, Any]) -> Published:
    """Return a step with dotted keys of its run file changed."""
    table = deepcopy(step.table)
    _apply(table, keys)
    return msgspec.structs.replace(step, table=table)


def simulate_step(step: Published, choice: dict[str, Any]) -> Simulated | None:
    """Return the seconds of the published stages for one combination of inputs; None if our memory model refuses it."""
    ahead = step.most_ahead
    run = _run(step.table, {**choice, "algorithm.steps": step.num_simulated})
    try:
        trace = simulate(run)
    except RunError:
        return None
    if ahead:
        seconds = {"step": step_seconds(trace, ahead)}
    else:
        seconds = phase_seconds(trace, Costs.load(run).training.overhead_time)._asdict()
        seconds["generation"] += sleep_seconds(resolve(run)) if step.generation_has_sleep else 0.0
    return Simulated(seconds, steady_basis(trace))


def sleep_seconds(resolved: ResolvedRun) -> float:
    """Return the seconds in which the replicas of a colocated run go to sleep; they are a part of its switch."""
    own = own_switch(resolved.run.framework, resolved.trainer.pool.gpu).per_gpu
    return (own.sleep if own is not None else 0.0) + PhaseChange.load(resolved).kept_time


def step_seconds(trace: Trace, most_ahead: int) -> float:
    """Return the mean time from version to version.

    Steps that use up the first batches in advance are left out, and those for which nothing is generated beside them.
    """
    ended = [time for time, event, _ in trace.entries if isinstance(event, Stepped)]
    return float(np.diff(ended[START + 2 * most_ahead : len(ended) - most_ahead]).mean())


DEGREES = ("pipeline_parallel", "tensor_parallel", "context_parallel")
"""Degrees that divide the trainer's GPUs, beside its data parallelism."""


def _run(table: dict[str, Any], changes: Mapping[str, Any]) -> Run:
    """Make a run with keys changed; as many GPUs train with other degrees of parallelism."""
    made = deepcopy(table)
    _apply(made, changes)
    before, now = (prod(of["trainer"].get(key, 1) for key in DEGREES) for of in (table, made))
    made["trainer"]["data_parallel"] = made["trainer"]["data_parallel"] * before // now
    return make_run(made)


def _apply(table: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set dotted keys of a run file's table."""
    for key, value in changes.items():
        place, last = place_of(table, key)
        place[last] = value


def _dotted(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _dotted(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def _scale(step: Published, choice: dict[str, Any]) -> float:
    """Return the scale at which the lengths of all simulated steps, cut off at the cap, have the published mean."""
    cap = step.table["rollout"]["max_tokens"]
    long = {"rollout.max_tokens": SAMPLE_CAP, "algorithm.prompts_per_step": 8}
    num_prompts = make_run(step.table).algorithm.prompts_per_step * step.num_simulated
    draws = SimulatedWorkload(_run(step.table, {**choice, **long})).draw(0, num_prompts)
    lengths = np.array([length for draw in draws for length in draw.lengths], dtype=float)
    low, high = 0.01, 100.0
    for _ in range(50):
        scale = sqrt(low * high)
        is_short = np.minimum(lengths * scale, cap).mean() < step.mean_tokens
        low, high = (scale, high) if is_short else (low, scale)
    return round(scale, 4)


def _generated(layout: tuple[str, int], unstated: Unstated) -> float:
    """Return the seconds that 16 A100 take to generate the batch; every output is cut off at 1,024 tokens."""
    model, degree = layout
    resident = unstated.resident * load_model(ModelConfig(name=model)).num_parameters / 16
    run = make_run(
        {
            "model": {"name": model, "dtype": "bfloat16"},
            "cluster": {"pools": {"a100": {"gpu": "a100", "nodes": 2}}},
            "rollout": {
                "pool": "a100",
                "replicas": 16 // degree,
                "tensor_parallel": degree,
                "max_tokens": 1024,
                "memory_utilization": MOST_USED - resident / load_gpu("a100").memory,
            },
            "trainer": {"pool": "a100", "data_parallel": 2, "tensor_parallel": 8},
            "costs": {"engine": unstated.engine},
            "algorithm": {"name": "ppo", "steps": 1, "prompts_per_step": 1024},
            "workload": {
                "lengths": {
                    "kind": "histogram",
                    "source": LENGTHS,
                    "scale": 2000.0,
                    "prompt_tokens": 1024,
                }
            },
            "policies": {"system": "colocated"},
        }
    )
    batch = DrawnBatch(SimulatedWorkload(run).draw(0, 1024))
    return generate_batch(run, Costs.load(run), batch)[-1].time


def _stage_rows(
    step: Published, found: Sequence[Simulated | None], at_default: Sequence[Simulated | None] = ()
) -> Iterator[Row]:
    """Yield a row for each published stage from the combinations of inputs that our memory model lets run.

    Args:
        step: the published step.
        found: its simulations.
        at_default: those on racks of which nothing is stated; empty without racks.

    Raises:
        ValueError: none of them runs, nor with recomputation.
    """
    times, note = [each for each in found if each is not None], step.note
    if not times:
        again = [simulate_step(step, {**choice, **MOST_RECOMPUTED}) for choice in choices_of(step)]
        times, note = [each for each in again if each is not None], f"{note}; {REFUSED}"
    if not times:
        raise ValueError(f"{step.name}: our memory model refuses it")
    for stage, seconds in step.stages.items():
        ours = [one.seconds[stage] for one in times]
        reading = [one.seconds[stage] for one in at_default if one is not None]
        is_whole = step.stages.keys() == {"step"}
        group = f"whole steps: {step.partition}" if is_whole else f"stages of RL steps: {stage}"
        row = Row(
            name=f"{step.name}: {stage}",
            group=group,
            shape=step.table["model"]["name"],
            unit="s",
            published=seconds,
            predicted=(min(ours), max(ours)),
            stage=STAGES_OF[stage],
            basis=times[0].basis,
            is_fitted=stage in step.fitted,
            note=note,
            num_gpus=step.num_gpus,
            readings={AT_DEFAULTS: sqrt(min(reading) * max(reading))} if reading else {},
            configuration=RELEASE.sub("", f"{step.name}: {stage}"),
            system=make_run(step.table).policies.system,
            has_stages=not is_whole,
            source=step.source,
        )
        if row.has_unknown_inputs:
            row = msgspec.structs.replace(row, group=f"{group}, unknown inputs")
        yield row
