"""Simulate a few steps of a run with its own policies and a limit on events, to check whether it finishes."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from msgspec.structs import replace

from streamrl.engine.messages import Event
from streamrl.engine.presets import choose_system
from streamrl.engine.trace import Trace
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.cluster_config import ClusterConfig, LinkConfig, ModelConfig, PoolConfig
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.gpu_pools import most_replicas, replicas_per_node
from streamrl.runfile.roles_config import VerifierConfig
from streamrl.runfile.units import Bandwidth
from streamrl.runfile.workload_config import LengthsConfig, RankerName
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import SimWorld
from streamrl.workload.replica_batch import rollouts_under_way
from streamrl.workload.workload import SimulatedWorkload

LEAST_STEPS = 3
"""Minimum steps of a rehearsal. The first step is generated before any training, and only later steps overlap with it."""
MOST_AHEAD = 4
"""Maximum steps ahead of training that a rehearsal covers. More of them show nothing new."""
MANY_ROLLOUTS = 20_000
"""Above this number of rollouts, a rehearsal has two steps, so that it takes about a second."""
MOST_ROLLOUTS = 100_000
"""Above this number of rollouts per step, a stand-in with fewer prompts is rehearsed."""
EVENTS_PER_ROLLOUT = 10
"""Maximum events per rollout. With more, a run counts as stuck in a loop. An undisturbed rollout takes three events, and
one more for each push that aborts it."""
FEW_TURNS = 3
"""Turns of an episode. Each takes an event of its replica and one of its environment."""
FEW_HELD_OUT = 100
"""Assumed prompts of an evaluation whose file has an unknown number of them."""
FEWEST_EVENTS = 5_000
"""Events that are always allowed, in addition to those of the rollouts."""
SPLITS = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
"""Degrees that are 1 on every side of a stand-in."""
STAND_IN_MODEL = "qwen2.5-0.5b"
STAND_IN_GPU = "h200"


class Rehearsal(NamedTuple):
    """The result of a rehearsal."""

    trace: Trace
    steps: int
    """Number of steps to simulate."""
    version: int
    """Number of finished steps."""
    problem: str
    """Why it did not finish; empty if it did."""
    stopped: bool
    """Whether a policy stopped it before its last step."""
    is_stand_in: bool
    """Whether a stand-in with small model, GPUs and lengths was simulated, because the run itself cannot be."""
    num_preempted: int = 0
    """Number of times that a replica ran out of KV memory and preempted a rollout."""
    recomputing: float = 0.0
    """Share of the replicas' seconds for recomputing preempted rollouts."""
    refusal: str = ""
    """The error of a simulation of the run itself; empty without an error."""


ALL_GROUPS: dict[str, Any] = {
    "families": (),
    "min_reward": None,
    "max_reward": None,
    "min_staleness": None,
}
"""Settings with which a secondary trainer of a stand-in takes all groups. A stand-in has no real prompts and rewards, and
the original settings may be invalid."""


class CountingWorld(SimWorld):
    """A simulated world that stops with an error after too many events."""

    _num_events = 0

    @cached_property
    def _most_events(self) -> int:
        """Maximum number of events, by the rollouts of all steps."""
        algorithm = self.run_file.algorithm
        turns = 1 if self.run_file.environment is None else 2 * FEW_TURNS
        rollouts = algorithm.rollouts_per_step * algorithm.steps
        return FEWEST_EVENTS + EVENTS_PER_ROLLOUT * turns * rollouts

    def emit(self, event: Event) -> None:
        """Count an event and pass it to the engine.

        Raises:
            RuntimeError: there were too many events.
        """
        self._num_events += 1
        if self._num_events > self._most_events:
            raise RuntimeError(
                f"after {self._most_events:,} events and {self.now:,.0f} simulated seconds it is at step "
                f"{self.engine.version}: the same work is repeated again and again"
            )
        super().emit(event)


def rehearse(run: Run) -> Rehearsal:
    """Simulate the first steps of a run. A stand-in replaces a run that is huge, has no lengths, or does not fit."""
    refusal = ""
    try:
        if run.algorithm.rollouts_per_step <= MOST_ROLLOUTS:
            return perform(make_world(shortened(run)))
    except ValueError as error:
        refusal = str(error)
    went = perform(make_world(stand_in(shortened(run))), is_stand_in=True)
    return went._replace(refusal=refusal)


def make_world(run: Run) -> CountingWorld:
    """Return the simulated world for a rehearsal.

    Raises:
        ValueError: the run has no lengths, does not fit its memory, or uses a back end that has no cost model.
    """
    costs = Costs.load(run)
    return CountingWorld(fill_policies(run, costs), costs, SimulatedWorkload(run))


def perform(world: CountingWorld, *, is_stand_in: bool = False) -> Rehearsal:
    """Run a world until its end, or until a problem stops it, and return the result."""
    state, problem = world.engine.state, ""
    try:
        world.run()
    except RuntimeError as error:
        problem = str(error)
    stopped = not problem and not state.has_all_steps
    if stopped:
        problem = (
            f"it stops after step {state.leader.version} of {state.num_steps}: {state.stop_reason}"
        )
    replicas, version = world.replicas.values(), state.leader.version
    seconds = len(replicas) * world.env.now
    return Rehearsal(
        trace=world.trace,
        steps=state.num_steps,
        version=version,
        problem=problem,
        stopped=stopped,
        is_stand_in=is_stand_in,
        num_preempted=sum(replica.num_preempted for replica in replicas),
        recomputing=sum(r.recompute_time for r in replicas) / seconds if seconds else 0.0,
    )


def shortened(run: Run) -> Run:
    """Return the run without planned faults, and with only as many steps as its policies need to repeat."""
    ahead = min(choose_system(run.policies).staleness_bound, MOST_AHEAD)
    steps = max(LEAST_STEPS, ahead + 2)
    if steps * run.algorithm.rollouts_per_step > MANY_ROLLOUTS:
        steps = 2
    if run.policies.tail_batching != "none":
        steps = -(-steps // run.policies.tail_every) * run.policies.tail_every
    steps = min(steps, run.algorithm.steps)
    most = min(
        run.rollout.max_running, rollouts_under_way(run.policies, run.algorithm)
    )  # more places stay empty
    return replace(
        run,
        algorithm=replace(run.algorithm, steps=steps),
        rollout=replace(run.rollout, max_running=most),
        environment=_with_few_turns(run.environment),
        evaluation=_with_few_prompts(run.evaluation),
        faults=(),
    )


def _with_few_prompts(evaluation: EvaluationConfig | None) -> EvaluationConfig | None:
    """Return an evaluation with a number of prompts, which a simulation needs and an executed run does not."""
    if evaluation is None or evaluation.num_prompts is not None:
        return evaluation
    return replace(evaluation, num_prompts=FEW_HELD_OUT)


def stand_in(run: Run) -> Run:
    """Return a run with the same policies and numbers of replicas, but a small model, short outputs and large GPUs."""
    apart = dict.fromkeys((*SPLITS, "context_parallel", "zero"), 1)
    trainer = replace(
        run.trainer, pool="rollout" if run.policies.shares_gpus else "trainer", **apart
    )
    alone = {"pool": "rollout", **dict.fromkeys((*SPLITS, "data_parallel"), 1)}
    rollout = replace(
        run.rollout,
        backend="transformers",
        max_tokens=256,
        memory_utilization=0.9,
        others=tuple(replace(each, **alone) for each in run.rollout.others),
        **alone,
    )
    policies = run.policies
    if policies.resize == "adjust" and policies.resize_unit is None:
        policies = replace(policies, resize_unit=replicas_per_node(run.rollout, run.cluster.pools))
    lengths = LengthsConfig(
        kind="histogram", source="streamrl-codemath-20k", scale=0.01, prompt_tokens=16
    )
    if run.workload.lengths is not None:
        lengths = replace(lengths, ranker=_stand_in_ranker(run.workload.lengths))
    ranks = [each.data_parallel for each in run.trainers]
    return replace(
        run,
        model=ModelConfig(name=STAND_IN_MODEL, dtype=run.model.dtype),
        algorithm=replace(run.algorithm, prompts_per_step=_few_prompts(run.algorithm, ranks[0])),
        cluster=_stand_in_cluster(max(most_replicas(run), run.rollout.num_replicas, sum(ranks))),
        rollout=rollout,
        trainer=trainer,
        followers=tuple(
            replace(
                own,
                pool="trainer",
                algorithm=replace(
                    own.algorithm,
                    prompts_per_step=_few_prompts(run.as_seen_by(n).algorithm, ranks[n]),
                ),
                **apart,
                **ALL_GROUPS,
            )
            for n, own in enumerate(run.followers, start=1)
        ),
        verifier=_without_gpus(run.verifier),
        workload=replace(run.workload, lengths=lengths, max_prompt_tokens=64),
        costs=CostsConfig(),
        policies=policies,
    )


def _without_gpus(verifier: VerifierConfig) -> VerifierConfig:
    """Return a verifier without reward models, because the stand-in has no GPUs for them."""
    rewards = tuple(each for each in verifier.reward if not each.has_model)
    return replace(verifier, pool=None, gpus_per_worker=0, reward=rewards)


def _with_few_turns(environment: EnvironmentConfig | None) -> EnvironmentConfig | None:
    """Return an environment with the same limits on episodes, but few turns and short times."""
    if environment is None:
        return None
    few = str(FEW_TURNS)
    short = {"observation_tokens": "8", "action_time": "1 s", "start_time": "1 s"}
    changed: EnvironmentConfig = replace(environment, max_turns=FEW_TURNS, turns=few, **short)
    return changed


def _few_prompts(algorithm: AlgorithmConfig, data_parallel: int) -> int:
    """Return a small number of prompts for a step, with at least one rollout for each rank."""
    size = algorithm.group_size
    least = -(-data_parallel // size)
    return min(algorithm.prompts_per_step, max(least, MANY_ROLLOUTS // size, 1))


def _stand_in_ranker(lengths: LengthsConfig) -> RankerName:
    return "none" if lengths.ranker == "none" else "recall"


def _stand_in_cluster(num_gpus: int) -> ClusterConfig:
    pool = PoolConfig(gpu=STAND_IN_GPU, gpus_per_node=1, nodes=num_gpus)
    link = LinkConfig(between=("rollout", "trainer"), bandwidth=Bandwidth.parse("80 Gbps"))
    return ClusterConfig(pools={"rollout": pool, "trainer": pool}, links=[link])
