"""Small runs to test with, and questions to ask of a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from typing import Any

import simpy

from streamrl.engine.engine import Engine, Policy
from streamrl.engine.invariants import check
from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    DrawnGroup,
    DrawPrompts,
    Event,
    Generated,
    LoadWeights,
    PromptsDrawn,
    PushWeights,
    ReplicaStarted,
    ResizeTrainer,
    RunStarted,
    SaveCheckpoint,
    Score,
    Scored,
    StartReplica,
    Step,
    Stepped,
    Train,
    Trained,
    TrainerResized,
    TrainerStarted,
    Verified,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.state import State
from streamrl.engine.systems import build_engine, build_policies, build_state
from streamrl.hardware.memory import replica_workspace, weight_bytes
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.keys import place_of
from streamrl.sim.costs.costs import Costs
from streamrl.sim.world import SimWorld
from streamrl.workload.length_posterior import SiblingLengths
from streamrl.workload.workload import SimulatedWorkload

TABLE: dict[str, Any] = {
    "model": {"name": "qwen2.5-7b"},
    "cluster": {
        "pools": {"far": {"gpu": "h20"}, "near": {"gpu": "h800"}},
        "links": [{"between": ["far", "near"], "bandwidth": "80 Gbps", "latency": "10 ms"}],
    },
    "rollout": {"pool": "far", "replicas": 2, "max_running": 4, "max_tokens": 256},
    "trainer": {"pool": "near", "tensor_parallel": 4, "micro_batch": 2},
    "algorithm": {"steps": 3, "prompts_per_step": 2, "group_size": 2},
    "workload": {
        "lengths": {
            "kind": "histogram",
            "source": "streamrl-codemath-20k",
            "scale": 0.01,
            "prompt_tokens": 40,
        }
    },
    "policies": {"system": "stream-async"},
    "framework": {"step_time": "0 s", "switch_time": "0 s"},
}
"""Its framework takes no time of its own, so that times can be computed by hand."""


def make_table(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the small run file as TOML would, with dotted keys replaced; colocated sides in one pool.

    "followers" are the trainers after the first.
    """
    table = copy.deepcopy(TABLE)
    changes = dict(changes or {})
    followers = changes.pop("followers", [])
    for key, value in changes.items():
        place, last = place_of(table, key)
        place[last] = value
    if table["policies"].get("system") == "colocated":
        table["trainer"]["pool"] = table["rollout"]["pool"]
    if followers:
        table["trainer"] = [table["trainer"], *copy.deepcopy(followers)]
    return table


def small_run(changes: dict[str, Any] | None = None) -> Run:
    """Return the small run with dotted keys replaced."""
    return make_run(make_table(changes))


def run_with_capacity(tokens: int, changes: dict[str, Any] | None = None) -> Run:
    """Return a small run whose replicas hold the KV cache of about `tokens` tokens."""
    run = small_run(changes)
    kv = load_model(run.model).kv_bytes_per_token(run.model.dtype)
    memory = load_gpu(run.cluster.pools[run.rollout.pool].gpu).usable_memory
    replica = resolve(run).replica
    share = (weight_bytes(replica) + replica_workspace(replica) + tokens * kv) / memory
    return small_run({**(changes or {}), "rollout.memory_utilization": share})


class CheckedEngine(Engine):
    """Checks the state's invariants after every event, and policies that ignored it."""

    def __init__(self, state: State, policies: Sequence[Policy]) -> None:
        super().__init__(state, policies)
        self._policies = policies

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle `event`, then check."""
        commands = super().handle(event, now)
        check(self.state)
        asked = self._concerned.get(type(event), self._everyone)
        for decider, policy in zip(self._everyone, self._policies, strict=True):
            if decider not in asked:
                assert not list(policy.decide(self.state)), f"{policy} must not ignore {event}"
        return commands


def checked_world(run: Run) -> SimWorld:
    """Return a simulated world whose engine checks itself."""
    world = SimWorld(run, Costs.load(run), SimulatedWorkload(run))
    world.engine = CheckedEngine(build_state(run), build_policies(run))
    return world


def lose_trainer_at(world: SimWorld, time: float, trainer: int) -> None:
    """Let a trainer die at `time`, if it is up then."""

    def die() -> None:
        if trainer in world.trainers:
            world.lose_trainer(trainer, "pulled the plug")

    call_at(world, time, die)


def call_at(world: SimWorld, time: float, action: Callable[[], None]) -> None:
    """Do something at a simulated time."""

    def wait() -> Generator[simpy.Event, Any, None]:
        yield world.env.timeout(time)
        action()

    world.env.process(wait())


def lose_replica_at(world: SimWorld, time: float, which: int) -> None:
    """Let one of the replicas that are up at `time` die then."""

    def die() -> None:
        if world.replicas:
            world.lose(sorted(world.replicas)[which % len(world.replicas)], "pulled the plug")

    call_at(world, time, die)


class Script:
    """Feeds events to an engine, one second apart, and checks its state after each."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engine = build_engine(run)
        self.now = 0.0
        self.num_groups = 0
        self._siblings = SiblingLengths() if run.policies.learns_from_siblings else None
        self.trained: list[tuple[int, int]] = []
        """Staleness of each rollout handed to training: (rollout, version - born)."""

    @property
    def state(self) -> State:
        """The engine's state."""
        return self.engine.state

    def tell(self, *events: Event) -> list[Command]:
        """Return the commands that `events` lead to."""
        commands: list[Command] = []
        for event in chain.from_iterable(map(self._with_news, events)):
            self.now += 1.0
            answer = self.engine.handle(event, self.now)
            check(self.state)
            for command in answer:
                if isinstance(command, Train):
                    self.trained += [(r, self._staleness(r)) for r in command.rollouts]
            commands += answer
        return commands

    def _with_news(self, event: Event) -> Iterator[Event]:
        """Yield what the event tells of other rollouts, as a world would, and then the event."""
        if self._siblings is not None and isinstance(event, PromptsDrawn):
            self._siblings.add(event.groups)
        if self._siblings is not None and isinstance(event, Generated):
            news = self._siblings.learn(event)
            if news is not None:
                yield news
        yield event

    def begin(self) -> list[Command]:
        """Bring trainer and replicas up; return what the engine wants then."""
        started = self.tell(RunStarted(0, 0))
        replicas = [c for c in started if isinstance(c, StartReplica)]
        return self.tell(TrainerStarted(0, 0), *(ReplicaStarted(c.replica, 0) for c in replicas))

    def begin_with(self, *cache_tokens: int) -> list[Command]:
        """Bring everyone up, replicas with caches of so many tokens; return what the engine wants then."""
        self.tell(RunStarted(0, 0))
        started = enumerate(cache_tokens)
        return self.tell(
            TrainerStarted(0, 0), *(ReplicaStarted(n, 0, cache_tokens=c) for n, c in started)
        )

    def draw(self, commands: list[Command], prompt_tokens: int = 40) -> list[Command]:
        """Answer every draw among `commands`."""
        answers: list[Command] = []
        for command in (c for c in commands if isinstance(c, DrawPrompts)):
            first, size = self.num_groups, self.run.algorithm.group_size
            self.num_groups += command.num_groups
            groups = tuple(
                DrawnGroup(g, tuple(range(g * size, g * size + size)), prompt_tokens, (10,) * size)
                for g in range(first, self.num_groups)
            )
            answers += self.tell(PromptsDrawn(command.step, command.oldest_version, groups))
        return answers

    def finish(self, *rollouts: int, version: int = 0) -> list[Command]:
        """Let rollouts be generated and verified, one after the other."""
        commands: list[Command] = []
        for rollout in rollouts:
            commands += self.tell(generated(rollout, version=version), Verified(rollout, 1.0))
        return commands

    def step(self, version: int) -> list[Command]:
        """Let the trainer finish what it has, up to the step that makes `version`."""
        for _ in range(100):
            command = self.state.leader.command
            assert command is not None, "the trainer has nothing to do"
            commands = self.tell(done(command))
            if isinstance(command, Step):
                assert command.version == version
                return commands
        raise AssertionError(f"no step makes version {version}")

    def _staleness(self, rollout: int) -> int:
        born = self.state.rollouts[rollout].born
        assert born is not None
        return self.state.leader.version - born


def generated(rollout: int, tokens: int = 10, finish: str = "stop", version: int = 0) -> Generated:
    """Return the event that ends a `Generate`."""
    return Generated(rollout, tokens, finish, version, 1.0, 0.1)  # type: ignore[arg-type]


def done(command: Command) -> Event:
    """Return the event in which a command of the trainer or the link ends well."""
    match command:
        case Score(rollouts, trainer):
            return Scored(rollouts, trainer)
        case Train(rollouts, trainer):
            return Trained(rollouts, trainer)
        case Step(version, _, trainer):
            return Stepped(version, trainer)
        case SaveCheckpoint(version, _, trainer):
            return CheckpointSaved(version, trainer)
        case ResizeTrainer(trainer, data_parallel):
            return TrainerResized(trainer, data_parallel)
        case PushWeights(version):
            return WeightsPushed(version, 1)
        case LoadWeights(replica, version):
            return WeightsLoaded(replica, version, 1.0)
    raise AssertionError(command)


def of(kind: type, commands: list[Command]) -> list[Any]:
    """Return the commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


SINGLE = {"algorithm.name": "reinforce++", "algorithm.group_size": 1}


def script(**changes: Any) -> Script:
    """Return a script of the small run; `__` stands for the dot of a key."""
    return Script(small_run({key.replace("__", "."): value for key, value in changes.items()}))


def singles(num_prompts: int, **changes: Any) -> Script:
    """Return a script whose groups have one rollout, so that ids of groups and rollouts agree."""
    return script(**SINGLE, algorithm__prompts_per_step=num_prompts, **changes)
