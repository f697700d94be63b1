"""The assumptions of a report, each with its value and source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from streamrl.engine.trace import Trace
from streamrl.hardware.calibration_file import named_calibration
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.precision import rollout_precision
from streamrl.hardware.profiles import PROFILES, gpu_of, load_gpu, price_of
from streamrl.report.words import dollars, percent, share_text, tiers_text
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.formatting import format_duration, listing
from streamrl.runfile.frameworks import Setting, framework_of, settings_of
from streamrl.runfile.keys import trainer_key
from streamrl.runfile.reading import read_text, read_toml
from streamrl.runfile.roles_config import RolloutConfig, SecondaryTrainerConfig
from streamrl.runfile.simulation_config import FrameworkName
from streamrl.runfile.units import Bandwidth
from streamrl.runfile.workload_config import LengthsConfig, LengthsKind
from streamrl.sim.planner.plan import Plan

OPERATIONS = {
    "prefill": "reading prompts (prefill)",
    "decode": "generating tokens (decode)",
    "score": "forward passes of critic and reference",
    "train": "forward and backward passes",
    "sync": "weight sync",
    "cache_transfer": "moving KV caches between replicas",
}
KINDS: dict[LengthsKind, str] = {
    "histogram": "drawn from the histogram",
    "empirical": "drawn from the lengths in",
    "groups": "prompts resampled from",
    "trace": "those of the recorded run",
    "stated": "lognormal with",
    "episodes": "episodes resampled from",
}
RUN_FILE = "run file"


class Assumption(NamedTuple):
    """One assumption."""

    what: str
    value: str
    source: str


def assumptions_of(
    run: Run, model: ModelShape, trace: Trace | None, plan: Plan | None
) -> Iterator[Assumption]:
    """Yield the assumptions of a run file, and of its trace and its plan if there are any."""
    yield Assumption("model", f"{model.name} in {run.model.dtype}", model.source)
    yield from _of_formats(run.rollout, run.model, run.trainer.dtype)
    seen = [run.as_seen_by(number).algorithm for number in range(run.num_trainers)]
    yield from _of_algorithms(seen, run.followers)
    if run.filters_by_reward:
        yield from _of_group_rewards(run.workload.group_rewards)
    if run.workload.lengths is not None:
        yield from _of_lengths(run.workload.lengths, run.rollout.max_tokens)
    yield from _of_framework(run.framework.name, settings_of(run))
    for name, pool in run.cluster.pools.items():
        yield from _of_pool(run.cluster.pools, name)
        yield Assumption(f"GPUs of pool {name}", load_gpu(pool.gpu).name, load_gpu(pool.gpu).source)
    for link in run.cluster.links:
        value = (
            f"{_bandwidth(link.bandwidth)} each way, {link.latency * 1e3:g} ms, {link.transport}"
        )
        if link.price_per_gb:
            value += f", ${link.price_per_gb:g} per GB"
        between = f"network between {' and '.join(link.between)}"
        yield Assumption(between, value, f"{RUN_FILE}: cluster.links")
    if run.costs.calibration is not None:
        made = named_calibration(run.costs.calibration, run.model)
        value = "none" if made is None else f"factors by stage, from {made.source}"
        yield Assumption("calibration", value, f"{RUN_FILE}: costs.calibration")
    for side, config in (("generation_factor", "generation"), ("training_factor", "training")):
        factor = getattr(run.costs, side)
        if factor != 1.0:
            told = f"{factor:g} times as fast as the profiles say"
            yield Assumption(f"speed of {config}", told, f"{RUN_FILE}: costs.{side}")
    if trace is not None and trace.world == "real":
        yield from _of_clock(trace)
    if plan is not None:
        yield from _of_plan(run.simulate.interval, plan)


def _of_formats(
    rollout: RolloutConfig, model: ModelConfig, trainer_dtype: str | None
) -> Iterator[Assumption]:
    if rollout.dtype is not None or rollout.kv_dtype is not None:
        yield Assumption(
            "formats of replicas",
            str(rollout_precision(rollout, model)),
            f"{RUN_FILE}: rollout",
        )
    if trainer_dtype is not None:
        yield Assumption("products of training", trainer_dtype, f"{RUN_FILE}: trainer.dtype")


def _of_algorithms(
    seen: Sequence[AlgorithmConfig], followers: tuple[SecondaryTrainerConfig, ...]
) -> Iterator[Assumption]:
    """Yield the algorithm of each trainer, that of the primary trainer first."""
    algorithm = seen[0]
    batch = f"{algorithm.prompts_per_step:,} prompts"
    if algorithm.group_size > 1:
        batch += f" with {algorithm.group_size} rollouts each"
    passes = ["actor"]
    passes += ["critic"] if algorithm.has_critic else []
    passes += ["reference"] if algorithm.has_reference else []
    value = f"{algorithm.name.upper()} ({listing(passes)}), {batch} a step, {algorithm.steps} steps"
    yield Assumption("algorithm", value, f"{RUN_FILE}: algorithm")
    for number, (follower, own) in enumerate(zip(followers, seen[1:], strict=True), start=1):
        does = "none: it only counts" if follower.counts_only else own.name.upper()
        value = f"{does}, {own.prompts_per_step:,} prompts a step, in its own time"
        if not follower.counts_only and (left := _not_inherited(algorithm, own)):
            value += f"; takes no {listing(left)} from the leader"
        value += f"; of complete groups {share_text(follower)}" if follower.takes_share else ""
        yield Assumption(
            f"algorithm of {follower.name}", value, f"{RUN_FILE}: {trainer_key(number)}"
        )


def _of_group_rewards(group_rewards: tuple[tuple[float, float], ...]) -> Iterator[Assumption]:
    if group_rewards:
        pairs = [f"{reward:g} of {share:.0%}" for reward, share in group_rewards]
        source = f"{RUN_FILE}: workload.group_rewards"
        yield Assumption("mean rewards of groups, simulated", listing(pairs), source)


def _of_lengths(lengths: LengthsConfig, max_tokens: int) -> Iterator[Assumption]:
    value = f"{KINDS[lengths.kind]} {lengths.source}"
    value += f", scaled by {lengths.scale:g}" if lengths.scale != 1 else ""
    value += f", at most {max_tokens:,} tokens; prompts of {lengths.prompt_tokens:,} where it has none of its own"
    yield Assumption("output lengths", value, _lengths_source(lengths))
    if lengths.ranker != "none":
        value = lengths.ranker
        if lengths.ranker == "recall":
            value = f"finds {percent(lengths.ranker_recall)} of the longest fifth"
        yield Assumption("predictor of lengths", value, f"{RUN_FILE}: workload.lengths.ranker")


def _not_inherited(primary: AlgorithmConfig, own: AlgorithmConfig) -> list[str]:
    """Return the settings of the primary trainer's algorithm that a secondary trainer's algorithm does not have."""
    return [key for key, value in own.unknown.items() if getattr(primary, key) != value]


def _lengths_source(lengths: LengthsConfig) -> str:
    """Return the comment at the head of a length profile."""
    path = PROFILES / "lengths" / f"{lengths.source}.csv"
    if lengths.names_a_file or not path.is_file():
        return f"{RUN_FILE}: workload.lengths.source"
    lines = read_text(path).splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


def _of_framework(
    name: FrameworkName | None, settings: Iterator[tuple[Setting, object]]
) -> Iterator[Assumption]:
    """Yield the framework, and the parts of a step that it determines."""
    framework = framework_of(name)
    if framework is None:
        return
    place = f"profiles/frameworks/{framework.name}.toml"
    yield Assumption("framework", f"{framework.name}, {framework.version}", place)
    for setting, own in settings:
        is_its = own == setting.value
        source = setting.source if is_its else f"{RUN_FILE}: {setting.key}"
        yield Assumption(setting.key, str(own), source)


def _of_pool(pools: dict[str, PoolConfig], name: str) -> Iterator[Assumption]:
    pool = pools[name]
    gpu = load_gpu(pool.gpu)
    source = gpu.price_source
    if pool.price_source is not None:
        source = pool.price_source
    elif pool.price is not None:
        source = f"{RUN_FILE}: cluster.pools.{name}.price"
        if pool.price == gpu.price:
            source += f" ({gpu.price_source})"
    paid = f"all {pool.num_gpus} GPUs owned" if pool.owned else "every GPU that is used"
    per_hour = f"{dollars(price_of(pool))} per GPU-hour, {paid} paid for the whole run"
    yield Assumption(f"price of pool {name}", per_hour, source)
    if pool.gpu != "cpu":
        key = f"cluster.pools.{name}.node_bandwidth"
        said = (
            f"{RUN_FILE}: {key}"
            if pool.node_bandwidth
            else f"assumed, as usual for {gpu.name}: {key} says another"
        )
        network = Bandwidth(gpu_of(pool).network * pool.gpus_per_node)
        yield Assumption(f"network of pool {name}", f"{_bandwidth(network)} a node", said)
    if rate := pool.spot_failures_per_gpu_day:
        key = f"{RUN_FILE}: cluster.pools.{name}.spot_failures_per_gpu_day"
        yield Assumption(f"spot pool {name}", f"a GPU is taken away {rate:g} times a day", key)
    if pool.spot_warning:
        later = format_duration(pool.spot_replacement_time)
        told = f"{format_duration(pool.spot_warning)} before; another machine {later} later"
        key = f"{RUN_FILE}: cluster.pools.{name}.spot_warning"
        yield Assumption(f"notice in spot pool {name}", told, key)


def _bandwidth(bandwidth: Bandwidth) -> str:
    return f"{bandwidth * 8 / 1e9:g} Gbit/s"


def _of_clock(trace: Trace) -> Iterator[Assumption]:
    versions = ", ".join(f"{k} {v}" for k, v in trace.facts.items() if isinstance(v, str))
    yield Assumption("seconds", "taken from a clock while the run was executed", versions)


def tiers_by_operation(trace: Trace) -> Iterator[tuple[str, str]]:
    """Yield each operation of a simulation with the tier of its seconds."""
    for operation, name in OPERATIONS.items():
        shares = trace.facts.get(operation)
        if isinstance(shares, Mapping):
            yield name, tiers_text(shares)
    for follower in trace.run.followers:
        shares = trace.facts.get(f"train {follower.name}")
        if isinstance(shares, Mapping):
            yield f"forward and backward passes of {follower.name}", tiers_text(shares)


def sources_of_seconds(trace: Trace) -> list[str]:
    """Return every source of a simulation's seconds; for a profile, the sources in its file."""
    sources = trace.facts.get("sources", [])
    return [_with_origin(str(source)) for source in sources] if isinstance(sources, list) else []


def _with_origin(source: str) -> str:
    path = PROFILES.parent / source
    if not (source.startswith("profiles/") and source.endswith(".toml") and path.is_file()):
        return source
    origin = read_toml(path).get("source")
    return f"{source}: {origin}" if isinstance(origin, str) else source


def _of_plan(interval: float, plan: Plan) -> Iterator[Assumption]:
    yield Assumption("what a plan is judged by", plan.objective.unit, f"{RUN_FILE}: plan.objective")
    seeds = plan.allocation.num_seeds
    steps = f"{plan.allocation.steps} steps on {'one seed' if seeds == 1 else f'each of {seeds} seeds'}, "
    steps += f"until the mean step is known within {interval:.2g} of itself"
    source = f"{RUN_FILE}: simulate.interval, plan.seeds"
    yield Assumption("simulation of the chosen plan", steps, source)
    if plan.framework is not None:
        left_out = "; ".join(plan.framework.left_out)
        source = f"what framework {plan.framework.name} has none of"
        yield Assumption("left out of all plans", left_out, source)
