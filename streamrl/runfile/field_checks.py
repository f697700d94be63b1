"""Check every field by itself: unknown, missing and unused keys, values of a wrong type, and numbers out of bounds.

Keys of `[algorithm]` that say nothing to the algorithm, or to the correction, that is chosen beside them.

They are looked for in the table of a run file, which tells what is stated: a run has its defaults too. What is said here
of a table is said of one in which nothing else is wrong.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeGuard,
    get_args,
    get_origin,
    get_type_hints,
)

from streamrl.runfile.algorithm_config import AlgorithmConfig, CorrectionName, OptimizerConfig
from streamrl.runfile.algorithms import readers_of
from streamrl.runfile.choices import choices_of
from streamrl.runfile.cluster_config import BillingConfig, LinkConfig, PoolConfig
from streamrl.runfile.config import CheckpointsConfig, CostsConfig, ExecuteConfig, Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import Allowed, Bounds, OneOf, RunError, raise_all, say, shown
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.jobs_config import MOST_SHARES, JobConfig, ScheduleConfig
from streamrl.runfile.keys import FOLLOWERS, TRAINER, is_list, join_key, trainer_key
from streamrl.runfile.list_prices import list_price, list_prices_of, providers
from streamrl.runfile.other_names import key_meant
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import PoliciesConfig, SyncConfig
from streamrl.runfile.roles_config import (
    AlgorithmChanges,
    ExternalConfig,
    LendingConfig,
    ReplicasConfig,
    RolloutConfig,
    SecondaryTrainerConfig,
    SpeculativeConfig,
    TrainerConfig,
    TrainerResize,
    VerifierConfig,
)
from streamrl.runfile.section import Section, fields_of
from streamrl.runfile.simulation_config import (
    FailuresConfig,
    FaultConfig,
    FrameworkConfig,
    SimulateConfig,
)
from streamrl.runfile.units import (
    QUANTITIES,
    SECONDS_PER_YEAR,
    Bandwidth,
    Duration,
    Size,
    quantity_text,
)
from streamrl.runfile.workload_config import (
    TAIL_SHARE,
    LengthsConfig,
    RankerConfig,
    SourceConfig,
    WorkloadConfig,
)

LARGEST = 2**63 - 1
"""The largest whole number that TOML promises, and that a trace can hold."""
MOST_NEAR = 3
"""Maximum suggestions for an unknown key."""
ALIKE = 0.8
"""Minimum similarity (difflib's ratio) of a suggested key in another section."""

Kind = Any
"""A type that a key of the run file has."""


def find_errors(table: object) -> Iterator[RunError]:
    """Yield all errors in keys and types of a TOML table; bounds and contradictions are not checked."""
    if not isinstance(table, dict) or not is_list(table):
        yield from _value_errors(table, Run, "")
        return
    if not table[TRAINER]:
        text = "trainer is empty, got []; it must have at least one trainer"
        yield RunError(TRAINER, [], Bounds(1), text)
        return
    for trainer, entry in enumerate(table[TRAINER]):
        if not isinstance(entry, dict):
            yield from _value_errors(entry, SecondaryTrainerConfig, f"{TRAINER}.{trainer}")
            return
    leader, *followers = table[TRAINER]
    yield from _value_errors({**table, TRAINER: leader}, Run, "")
    for trainer, follower in enumerate(followers, start=1):
        yield from _value_errors(follower, SecondaryTrainerConfig, trainer_key(trainer))


def find_section_errors(table: object, kind: type[Section]) -> Iterator[RunError]:
    """Yield all errors in keys and types of a table that has the keys of a section."""
    yield from _value_errors(table, kind, "")


def _value_errors(value: Any, kind: Kind, key: str, or_absent: str = "") -> Iterator[RunError]:
    if NoneType in get_args(kind):
        if value is not None:
            yield from _value_errors(value, without_none(kind), key, " (or absent)")
    elif kind in QUANTITIES:
        try:
            kind.parse(value)
        except ValueError as error:
            yield RunError(key, value, kind, f"{key}: {error}")
    elif choices := choices_of(kind):
        if wrong := choices.find_error(value, key, or_absent):
            yield wrong
    elif not _fits(value, kind):
        text = f"{key or 'a run file'} must be {_say(kind)}{or_absent}, got {shown(value)}"
        yield RunError(key, value, allowed_by(kind), f"{text}{_remedy(value, kind)}")
    elif is_section(kind):
        yield from _section_errors(value, kind, key)
    else:
        for name, each, inner in _entries(value, kind):
            yield from _value_errors(each, inner, join_key(key, name))


def _fits(value: Any, kind: Kind) -> bool:
    """Whether a value is of a type, whatever its entries are."""
    allowed = allowed_by(kind)
    if allowed is UnionType:
        return any(_fits(value, each) for each in get_args(kind))
    if isinstance(allowed, OneOf):
        return any(type(value) is type(name) and value == name for name in allowed)
    if allowed is list:
        return isinstance(value, list | tuple) and len(value) == (_size(kind) or len(value))
    if allowed in (int, float) and type(value) is int:
        return abs(value) <= LARGEST
    return type(value) is allowed


def _remedy(value: Any, kind: Kind) -> str:
    """Return what to do about a value that is nearly of a type; empty where there is no advice."""
    if _is_quoted_number(value, kind):
        return "; remove the quotes"
    is_large = allowed_by(kind) in (int, float) and type(value) is int and abs(value) > LARGEST
    return f"; the largest is {LARGEST}" if is_large else ""


def _is_quoted_number(value: Any, kind: Kind) -> bool:
    """Whether a text is a number of the type that its key wants."""
    wanted = allowed_by(kind)
    if not isinstance(value, str) or (wanted is not int and wanted is not float):
        return False
    try:
        return wanted(value) is not None
    except ValueError:
        return False


def allowed_by(kind: Kind) -> Allowed:
    """Return what a type allows, as errors have it."""
    kind = without_none(kind)
    if choices := choices_of(kind):
        return OneOf(choices.names())
    if origin_of(kind) is Literal:
        return OneOf(get_args(kind))
    if is_section(kind):
        return dict
    allowed: type = list if origin_of(kind) is tuple else origin_of(kind)
    return allowed


def _say(kind: Kind) -> str:
    size = _size(kind)
    return f"{say(allowed_by(kind))} of {size}" if size else say(allowed_by(kind))


def _size(kind: Kind) -> int:
    """Return the length of a pair or triple, 0 for a list that may be of any."""
    inner = get_args(kind)
    return len(inner) if origin_of(kind) is tuple and Ellipsis not in inner else 0


def _entries(value: Any, kind: Kind) -> Iterator[tuple[str | int, Any, Kind]]:
    """Yield name, value and type of what is in a table or a list."""
    inner = get_args(kind)
    if origin_of(kind) is dict:
        yield from ((name, each, inner[1]) for name, each in value.items())
    elif origin_of(kind) in (list, tuple):
        kinds = inner if _size(kind) else inner[:1] * len(value)
        yield from zip(range(len(value)), value, kinds, strict=True)


def origin_of(kind: Kind) -> Any:
    """Return the type without what it is made of: `list` of a list of names."""
    origin: Any = get_origin(kind)
    return kind if origin is None else origin


def without_none(kind: Kind) -> Kind:
    """Return a type without None: that of a key that may be absent."""
    options = [each for each in get_args(kind) if each is not NoneType]
    return options[0] if NoneType in get_args(kind) else kind


def is_section(kind: Kind) -> TypeGuard[type[Section]]:
    """Return whether a type is a table of a run file."""
    return isinstance(kind, type) and issubclass(kind, Section)


# Sections -----------------------------------------------------------------------------------------


def _section_errors(table: dict[str, Any], kind: type[Section], key: str) -> Iterator[RunError]:
    fields = {field.name: field for field in fields_of(kind) if field.name != FOLLOWERS}
    for name, value in table.items():
        if kind is PoolConfig and name == "price" and _names_a_price(value):
            yield _price_error(join_key(key, name), value, table.get("gpu"))
        elif name in fields:
            yield from _value_errors(value, fields[name].type, join_key(key, name))
        else:
            yield _unknown(key, name, value, list(fields))
    for name, field in fields.items():
        if field.required and name not in table:
            missing = join_key(key, name)
            text = f"{missing} is missing: it must be {_say(field.type)}"
            yield RunError(missing, None, allowed_by(field.type), text, problem="missing key")


def _names_a_price(value: Any) -> bool:
    return isinstance(value, str) and not _is_quoted_number(value, float)


def _price_error(key: str, text: str, gpu: object) -> RunError:
    """Return the error of a list price that was not found, with those of the pool's GPU."""
    name = gpu if isinstance(gpu, str) else ""
    try:
        list_price(text, name)
    except ValueError as error:
        return RunError(key, text, OneOf(list_prices_of(name) or providers()), f"{key}: {error}")
    return RunError(key, text, OneOf(list_prices_of(name)))


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Sampling options of engines that a policy gradient cannot use."""


def _unknown(section: str, name: str, value: object, names: list[str]) -> RunError:
    """Return the error of an unknown key, with the likeliest keys first."""
    key = join_key(section, name)
    lower = name.lower()
    near = difflib.get_close_matches(lower, names, n=MOST_NEAR)
    elsewhere = difflib.get_close_matches(lower, list(_places()), n=1, cutoff=ALIKE)
    meant = [join_key(section, each) for each in near]
    if (called := key_meant(key)) is not None and lower not in names:
        meant = [called]
    elif name in _places():  # of another section
        meant = _places()[name] + meant
    elif not near and elsewhere:
        meant = _places()[elsewhere[0]]
    hint = f"; did you mean {meant[0].removeprefix(f'{section}.')}?" if meant else ""
    text = f"{key} is not a key of a run file{hint}"
    if name in PENALTIES:
        text = (
            f"{key} is not supported; remove it: a penalty changes each log-probability by the tokens before it, "
            "so the log-probabilities of the loss would be wrong"
        )
        meant = []
    return RunError(key, value, OneOf(meant), text, problem="unknown key")


@cache
def _places() -> dict[str, list[str]]:
    """Return the sections in which each name is a key, without those in tables by name or in lists."""
    found: dict[str, list[str]] = {}
    open_sections: list[tuple[str, type[Section]]] = [("", Run)]
    for section, kind in open_sections:
        for field in (field for field in fields_of(kind) if field.name != FOLLOWERS):
            key, inner = join_key(section, field.name), without_none(field.type)
            found.setdefault(field.name, []).append(key)
            if is_section(inner):
                open_sections.append((key, inner))
    return found


CLIPPING: tuple[CorrectionName, ...] = ("none", "gspo", "cispo", "decoupled")
READ_BY_CORRECTION: dict[str, tuple[CorrectionName, ...]] = {
    "clip": CLIPPING,
    "clip_high": CLIPPING,
    "clip_dual": ("none", "gspo", "decoupled"),
    "correction_cap": ("token-tis", "seq-tis", "icepop", "decoupled"),
    "second_moment": ("m2po",),
}
"""Corrections whose loss a key is in; every one reads what is not here."""
CLIPPED_TOO: dict[CorrectionName, CorrectionName] = {"token-tis": "decoupled"}
"""For a correction without a clip: the correction with the same weights and a clip."""

Table: TypeAlias = dict[str, Any]


class _Unused(NamedTuple):
    section: Table
    """Where the key stands, and under which key that is."""
    place: str
    name: str
    chosen: AlgorithmConfig
    """Of which nothing but name and correction is said."""


def find_unused(table: Table) -> Iterator[RunError]:
    """Yield an error for each key of an algorithm that is set, but not read by any trainer with that key."""
    for unused in _find_unused(table):
        yield _unused_error(unused)


def drop_unused(table: Table) -> None:
    """Remove unread keys from a table; older versions accepted and recorded them."""
    for unused in list(_find_unused(table)):
        del unused.section[unused.name]


def _find_unused(table: Table) -> Iterator[_Unused]:
    leader: Table = table["algorithm"]
    trainers = table[TRAINER][1:] if is_list(table) else []
    followers: list[Table] = [trainer.get("algorithm", {}) for trainer in trainers]
    for name in leader:
        inheriting = [{**leader, **own} for own in followers if name not in own]
        if not any(_algorithm_reads(_chosen(each), name) for each in (leader, *inheriting)):
            yield _Unused(leader, "algorithm", name, _chosen(leader))
    for number, own in enumerate(followers, start=1):
        chosen, place = _chosen({**leader, **own}), f"{trainer_key(number)}.algorithm"
        yield from (
            _Unused(own, place, name, chosen) for name in own if not _algorithm_reads(chosen, name)
        )


def _chosen(stated: Table) -> AlgorithmConfig:
    choice = {key: stated[key] for key in ("name", "correction") if key in stated}
    return AlgorithmConfig(steps=1, prompts_per_step=1, **choice)


def _algorithm_reads(chosen: AlgorithmConfig, key: str) -> bool:
    by_name = key in chosen.chosen.reads or not readers_of(key)
    return by_name and chosen.corrected_by in READ_BY_CORRECTION.get(key, (chosen.corrected_by,))


def _unused_error(unused: _Unused) -> RunError:
    chosen, correction = unused.chosen, unused.chosen.corrected_by
    key = f"{unused.place}.{unused.name}"
    readers: tuple[str, ...] = readers_of(unused.name)
    instead, others, with_what = OneOf(()), tuple[str, ...](), f"name {chosen.name!r}"
    if unused.name in READ_BY_CORRECTION and correction is None:
        with_what += ", which has no correction"
    elif unused.name in READ_BY_CORRECTION and correction is not None:
        readers = READ_BY_CORRECTION[unused.name]
        with_what = f"correction {correction!r}" + ("" if chosen.correction else " (the default)")
        if readers == CLIPPING and correction in CLIPPED_TOO:
            instead, others = OneOf([CLIPPED_TOO[correction]]), (f"{unused.place}.correction",)
    hint = _unused_hint(readers, instead)
    if (called := key_meant(key)) is not None:
        hint += f"; another framework's {unused.name} is {called}"
    text = f"{key} has no effect with {with_what}, got {shown(unused.section[unused.name])}{hint}"
    value = unused.section[unused.name]
    return RunError(key, value, instead, text, others, problem="unused key")


def _unused_hint(readers: tuple[str, ...], instead: OneOf) -> str:
    also = f"; {instead} has the same weights and clips, as TRL and verl do" if instead else ""
    return f"; it applies only to {', '.join(readers)}{also}" if readers else ""


POSITIVE = Bounds(0, excludes_least=True)
SHARE = Bounds(0, 1)
REWARD = Bounds(-1e9, 1e9)
MONEY = Bounds(0, 10**6)
"""Dollars of a GPU-hour, or of a gigabyte."""
SECONDS = Bounds(0, 1e7)
"""Of something that happens within a run: at most four months."""
WAIT = Bounds(0, 1e7, excludes_least=True)
"""Seconds for which a process waits: at most four months. The kernel takes no times of thousands of years."""
TERM = Bounds(0, 10 * SECONDS_PER_YEAR)
"""Of a contract for GPUs: at most ten years."""
FACTOR = Bounds(1e-4, 1e4)
POSITIVE_SHARE = Bounds(0, 1, excludes_least=True)
MOST_TEMPERATURE = 100
"""At this temperature, logits that differ by 10 have nearly the same probability."""
MOST_ROLLOUTS = 10**7
"""Maximum rollouts of a step, or of an evaluation; those under way are held in memory."""
MOST_PER_GROUP = 2**14
"""Maximum rollouts of one prompt. Lengths of a thousand groups are drawn at once; this keeps them
below 128 MiB.
"""
MOST_FAILURES = 10**7
"""Maximum failures within a minute; each is remembered for that long."""
MOST_FAULTS = 1000
MOST_THREADS = 1024
"""Maximum threads of a process: more than any machine has cores."""
MOST_DRAFTED = 64
"""Maximum drafted tokens; engines draft up to 16."""
MOST_OVERSAMPLED = 16
"""Maximum `policies.oversampling`: beyond it, hardly any rollout is trained on."""
OF_LOSSES = {
    "learning_rate": Bounds(0),
    "correction_cap": Bounds(1),
    "clip": POSITIVE,
    "clip_high": POSITIVE,
    "clip_dual": Bounds(1, excludes_least=True),
    "beta": POSITIVE,
    "critic_learning_rate": POSITIVE,
    "gae_lambda": Bounds(0, 1),
    "kl_coefficient": Bounds(0),
    "entropy_coefficient": Bounds(0),
    "second_moment": POSITIVE,
    "max_grad_norm": POSITIVE,
}
OF_TRAINERS = {
    "efficiency": POSITIVE_SHARE,
    "start_time": SECONDS,
    "rank_start_time": SECONDS,
    "expert_tensor_parallel": Bounds(1),
    "max_tokens_per_scoring_pass": Bounds(1),
    "shard_ranks": Bounds(1),
}
COUNTS = (
    *(
        PoolConfig,
        RolloutConfig,
        TrainerConfig,
        SecondaryTrainerConfig,
        AlgorithmConfig,
        WorkloadConfig,
    ),
    *(VerifierConfig, SyncConfig, ExecuteConfig, FrameworkConfig, ReplicasConfig),
    LendingConfig,
    *(SpeculativeConfig, EnvironmentConfig, EvaluationConfig),
)
"""Sections whose whole numbers are all at least 1."""
BOUNDS: dict[type[Section], dict[str, Bounds]] = {
    Run: {"seed": Bounds(0)},
    PoolConfig: {
        "host_memory": POSITIVE,
        "nvme": POSITIVE,
        "nvme_read": POSITIVE,
        "nvme_write": POSITIVE,
        "node_bandwidth": POSITIVE,
        "nvlink_domain": Bounds(1),
        "unit": Bounds(1),
        "price": MONEY,
        "billing_unit": TERM,
        "minimum_term": TERM,
        "spot_failures_per_gpu_day": Bounds(0),
        "spot_warning": SECONDS,
        "spot_replacement_time": SECONDS,
        "spot_replacement_variation": Bounds(0, 100),
        "on_demand_price": MONEY,
    },
    BillingConfig: {
        "setup_time": SECONDS,
        "failed_share": SHARE,
        "storage": Bounds(0),
        "storage_price": MONEY,
    },
    LinkConfig: {"bandwidth": POSITIVE, "price_per_gb": MONEY},
    RolloutConfig: {
        "memory_utilization": POSITIVE_SHARE,
        "start_time": SECONDS,
        "temperature": Bounds(0, MOST_TEMPERATURE, excludes_least=True),
        "top_p": POSITIVE_SHARE,
        "top_k": Bounds(1),
        "min_p": SHARE,
    },
    ExternalConfig: {"timeout": WAIT},
    SpeculativeConfig: {
        "tokens": Bounds(1, MOST_DRAFTED),
        "acceptance": SHARE,
        "acceptance_to": SHARE,
    },
    ReplicasConfig: {"max_running": Bounds(1), "share": POSITIVE},
    LendingConfig: {
        "replicas": Bounds(1),
        "tensor_parallel": Bounds(1),
        "memory_utilization": POSITIVE_SHARE,
        "until": POSITIVE_SHARE,
        "share": POSITIVE,
    },
    TrainerConfig: OF_TRAINERS,
    TrainerResize: {"step": Bounds(2), "data_parallel": Bounds(1)},
    SecondaryTrainerConfig: {
        **OF_TRAINERS,
        "min_staleness": Bounds(0),
        "max_staleness": Bounds(0),
        "min_reward": REWARD,
        "max_reward": REWARD,
    },
    AlgorithmConfig: {"group_size": Bounds(1, MOST_PER_GROUP), **OF_LOSSES},
    OptimizerConfig: {
        "epsilon": POSITIVE,
        "weight_decay": Bounds(0),
        "momentum": SHARE,
        "warmup_steps": Bounds(0),
        "final_rate_share": SHARE,
    },
    AlgorithmChanges: {"prompts_per_step": Bounds(1), "max_gen_batches": Bounds(1), **OF_LOSSES},
    WorkloadConfig: {"informative_share": SHARE},
    SourceConfig: {"weight": POSITIVE},
    RankerConfig: {"window": Bounds(8), "false_alarms": Bounds(0.001, 0.5)},
    LengthsConfig: {
        "scale": POSITIVE,
        "scale_to": POSITIVE,
        "drift_steps": Bounds(2),
        "ranker_recall": Bounds(TAIL_SHARE, 1),
        "ranker_recall_to": Bounds(TAIL_SHARE, 1),
        "group_correlation": SHARE,
        "ranker_correlation": SHARE,
        "ranker_history": Bounds(1),
    },
    EnvironmentConfig: {
        "sandboxes": Bounds(1),
        "max_episodes": Bounds(1),
        "sandbox_price": MONEY,
        "action_time_factor": FACTOR,
        "warm": Bounds(0),
        "action_time_limit": WAIT,
        "memory_limit": POSITIVE,
        "episode_time_limit": WAIT,
        "start_time_limit": WAIT,
        "warm_start_time": SECONDS,
        "starts_per_second": POSITIVE,
        "failed_share": Bounds(0, 0.9),
    },
    EvaluationConfig: {
        "share": Bounds(0, 0.9, excludes_least=True),
        "num_prompts": Bounds(1),
        "samples": Bounds(1, MOST_PER_GROUP),
        "passes_at": Bounds(0),
        "confidence": Bounds(0.5, 0.999),
        "temperature": Bounds(0, MOST_TEMPERATURE),
        "top_p": POSITIVE_SHARE,
        "top_k": Bounds(1),
        "min_p": SHARE,
        "max_tokens": Bounds(1),
    },
    VerifierConfig: {
        "gpus_per_worker": Bounds(0),
        "start_time": SECONDS,
        "time_limit": WAIT,
        "memory_limit": POSITIVE,
    },
    SyncConfig: {"bucket_size": POSITIVE, "lora_alpha": POSITIVE, "changed_share": POSITIVE_SHARE},
    CostsConfig: {"generation_factor": FACTOR, "training_factor": FACTOR},
    PoliciesConfig: {
        "max_staleness": Bounds(0),
        "sync_every": Bounds(1),
        "oversampling": Bounds(1, MOST_OVERSAMPLED),
        "turn_imbalance": Bounds(1),
        "context_time": Bounds(0),
        "tail_share": SHARE,
        "tail_every": Bounds(2),
        "resize_unit": Bounds(1),
        "max_replicas": Bounds(1),
        "resize_window": Bounds(1),
        "shrink_after": Bounds(1),
        "max_attempts": Bounds(1),
        "max_restarts": Bounds(0),
        "max_dropped_groups": Bounds(1),
        "max_failures_per_minute": Bounds(1, MOST_FAILURES),
        "max_step_time": WAIT,
    },
    PlanConfig: {
        "budget_per_hour": POSITIVE,
        "budget_per_step": POSITIVE,
        "budget_per_day": POSITIVE,
        "budget": POSITIVE,
        "deadline": POSITIVE,
        "unit": Bounds(1),
        "finalists": Bounds(1),
        "seeds": Bounds(1),
        "staleness_cost": Bounds(0),
        "cut_off_share": SHARE,
        "tolerance": Bounds(0),
        "value_of_hour": Bounds(0),
    },
    ExecuteConfig: {
        "patience": WAIT,
        "samples_per_step": Bounds(0),
        "stream_port": Bounds(0, 65535),
        "save_tokens_every": WAIT,
        "grace": SECONDS,
        "deadline": WAIT,
        "budget": POSITIVE,
        "threads": Bounds(1, MOST_THREADS),
    },
    JobConfig: {
        "priority": Bounds(0, 10**6, excludes_least=True),
        "deadline": POSITIVE,
        "submitted": SECONDS,
    },
    ScheduleConfig: {
        "shares": Bounds(1, MOST_SHARES),
        "slice": Bounds(60, 1e7),
        "storage_bandwidth": POSITIVE,
        "start_time": SECONDS,
        "time_limit": POSITIVE,
    },
    CheckpointsConfig: {"keep_last": Bounds(2), "keep_best": Bounds(0)},
    SimulateConfig: {"interval": POSITIVE_SHARE, "max_steps": Bounds(1)},
    FailuresConfig: {"per_gpu_day": Bounds(0)},
    FaultConfig: {
        "step": Bounds(1),
        "time": SECONDS,
        "count": Bounds(1, MOST_FAULTS),
        "seed": Bounds(0),
        "duration": WAIT,
        "factor": Bounds(1, 1e4, excludes_least=True),
    },
    FrameworkConfig: {
        "step_time": SECONDS,
        "switch_time": SECONDS,
        "transfer_time": SECONDS,
        "checkpoint_time": SECONDS,
    },
}


def check_filled(key: str, entries: Sequence[object] | None, what: str) -> None:
    """Raise `RunError` if a list was given without entries: only an absent one stands for all values."""
    if entries is not None and not entries:
        text = f"{key} is empty, got []; remove it, or list {what}"
        raise RunError(key, [], list, text)


def check_bounds(sections: Iterable[tuple[str, Section]]) -> None:
    """Raise `RunError` where a number is out of bounds, or not finite."""
    raise_all(error for key, section in sections for error in _bounds_errors(key, section))


def sections_of(run: Run) -> Iterator[tuple[str, Section]]:
    """Yield a run and every section of it, with their keys."""
    followers = enumerate(run.followers, start=1)
    return chain(sections_in(run), *(sections_in(each, trainer_key(at)) for at, each in followers))


def code_of(sections: Iterable[tuple[str, Section]]) -> Iterator[str]:
    """Yield each class from outside this package that sections choose, as "module:Class"."""
    for _, section in sections:
        for field in fields_of(type(section)):
            choices, value = choices_of(without_none(field.type)), getattr(section, field.name)
            if choices is not None and value is not None and value not in choices.own:
                yield choices.path_of(value)


def _bounds_errors(key: str, section: Section) -> Iterator[RunError]:
    for name, bounds in bounds_of(type(section)).items():
        value = getattr(section, name)
        if value is not None and not bounds.hold(value):
            yield _bounds_error(join_key(key, name), value, bounds)


def _bounds_error(key: str, value: object, bounds: Bounds) -> RunError:
    """Return the error of a number out of bounds, with the units of a quantity."""
    if not isinstance(value, Bandwidth | Duration | Size):
        return RunError(key, value, bounds)
    kind = type(value)
    allowed = bounds.text(lambda bound: quantity_text(kind(bound)))
    return RunError(key, value, bounds, f"{key} must be {allowed}, got {quantity_text(value)}")


def sections_in(place: object, key: str = "") -> Iterator[tuple[str, Section]]:
    """Yield a section and all that are in it, in tables and lists too, with their keys."""
    match place:
        case Section():
            yield key, place
            for name in place.__struct_fields__:
                if name != FOLLOWERS:
                    yield from sections_in(getattr(place, name), join_key(key, name))
        case dict():
            for name, entry in place.items():
                yield from sections_in(entry, join_key(key, name))
        case list() | tuple():
            for index, entry in enumerate(place):
                yield from sections_in(entry, join_key(key, index))


@cache
def bounds_of(kind: type[Section]) -> dict[str, Bounds]:
    """Return the bounds of a section's keys."""
    hints = get_type_hints(kind) if kind in COUNTS else {}
    counts = {name: Bounds(1) for name, hint in hints.items() if hint is int}
    return {**counts, **BOUNDS.get(kind, {})}
