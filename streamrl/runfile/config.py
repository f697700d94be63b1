"""The whole run file as frozen structs (`Run`), which simulate, plan and execute all read; paths in it are relative to the file.

The run file as frozen structs: one file that simulate, plan and execute all read.

`load_run` reads TOML, applies `--set` overrides, and raises `ValueError` with the key's path and value
where anything is wrong. Paths in a run file are relative to the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

import msgspec

from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.cluster_config import ClusterConfig, ModelConfig
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.notebook import html_table
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import PoliciesConfig, SyncConfig
from streamrl.runfile.roles_config import (
    LendingConfig,
    RolloutConfig,
    SecondaryTrainerConfig,
    TrainerConfig,
    VerifierConfig,
)
from streamrl.runfile.section import Section
from streamrl.runfile.simulation_config import (
    FailuresConfig,
    FaultConfig,
    FrameworkConfig,
    SimulateConfig,
)
from streamrl.runfile.units import Duration
from streamrl.runfile.workload_config import WorkloadConfig

OTHER_SEED = 7919
"""Added to the seed for the lengths of held-out prompts, which are other prompts than those of training."""
DEVICE = re.compile(r"auto|cpu|cuda(?::(?P<index>\d+))?")
"""Values of `execute.device`; cuda:N puts every role on one GPU."""


class CostsConfig(Section, frozen=True, kw_only=True):
    """Where simulated seconds come from, beside what `profiles/` ships."""

    profile: str | None = None
    """A profile that `streamrl profile` measured for this model on this GPU: a TOML file."""
    backend: str | None = None
    """Source of the operator tables for decode and prefill, such as "sglang"; the GPU profile's
    default where absent.
    """
    engine: str = "vllm-0.11"
    """Source of the overhead of a decode step besides its operators: an engine and version in
    `profiles/engines`. A name has one version of its profile: vllm-0.11 has figures of vLLM 0.11 and
    0.12, vllm-0.19 of 0.15 to 0.19.
    """
    engine_version: str | None = None
    """Version of the engine that replicas will run, such as "0.24.0". Bands are wider if it is not a
    version of `costs.engine`. Absent: the profile's own version.
    """
    calibration: str | None = None
    """A TOML file from `streamrl calibrate`, with factors by stage and seconds of each step. The
    two factors below apply in addition.
    """
    generation_factor: float = 1.0
    """Simulated: speed of prefill and decode relative to the profiles; seconds are divided by it.
    0.5 doubles the time, for a framework slower than the measured engines.
    """
    training_factor: float = 1.0
    """Simulated: the same for score, train and the optimizer step."""


TrackerName = Literal["tensorboard", "wandb", "mlflow"]


AdapterForm = Literal["merged", "apart"]
CheckpointChoice = Literal["last", "best"]


class CheckpointsConfig(Section, frozen=True, kw_only=True):
    """Which checkpoints an executed run keeps, and what it exports when it has all its steps."""

    keep_last: int = 2
    """Newest checkpoints that are kept. A crash may damage the newest one, so at least two."""
    keep_best: int = 0
    """Checkpoints with the best avg@n of `[evaluation]` that are kept too. Then each evaluated version
    is saved.
    """
    export: str | None = None
    """Where the last or best checkpoint is written at the end, without optimizer state: a directory, or
    "hf://OWNER/NAME" for a model repository of the Hugging Face hub. A directory must be new, empty, or
    an unchanged export of the same run, which is replaced. Absent: nowhere.
    """
    choice: CheckpointChoice = "last"
    """The exported checkpoint: the last one, or the best one by `[evaluation]`."""
    adapters: AdapterForm = "merged"
    """Exported runs of sync.mode lora. merged: whole weights with merged adapters. apart: the adapters
    alone, in PEFT's format.
    """


class ExecuteConfig(Section, frozen=True, kw_only=True):
    """How a plan is run for real."""

    launcher: Literal["local", "in-process", "ray"] = "local"
    """local: one process for each replica and for the trainer. in-process: threads of this process.
    ray: actors of a Ray cluster, whose nodes name their pool by a resource "pool-NAME".
    """
    ray_address: str = "auto"
    """Address of the cluster's head, as in ray.init; auto: the cluster of this machine."""
    output: str = "runs/run"
    """Run directory: trace, metrics, rollouts, checkpoints."""
    readers: Literal["owner", "group", "everyone"] = "owner"
    """Who may read the files of the run directory: prompts, rollouts, weights and logs."""
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    threads: int | None = None
    """CPU threads of each worker process. Where absent, roles that compute on CPUs share the cores
    equally, and roles with a GPU get one.
    """
    deterministic: bool = False
    """Whether every run of this file trains on the same tokens and gives bit-identical weights,
    also after a kill and resume. Supported for synchronous systems that generate one rollout at
    a time, on CPUs of one kind with one thread each; other settings are rejected. Dropped groups
    and lost trainers break it.
    """
    trackers: tuple[TrackerName, ...] = ()
    """Further outputs of each step's figures besides metrics.jsonl: "tensorboard" (files in the run
    directory), "wandb" (with WANDB_MODE=offline on this machine), "mlflow" (the server of
    MLFLOW_TRACKING_URI; absent: files in the run directory).
    """
    samples_per_step: int = 3
    """Rollouts of each step in samples.jsonl, for people to read. They come from the group whose
    rewards differ most: the best, the worst, and evenly spaced ones between. 0: none.
    """
    live_trace: bool = True
    """Whether chrome_trace.json, for ui.perfetto.dev, is also written during the run. It costs
    about 40 us of the controller process for each rollout.
    """
    stream_port: int | None = None
    """Loopback port of this machine that streams scored rollouts and finished groups as server-sent
    events; 0: any free port. stream.json in the run directory has the port, and the token that
    readers need.
    """
    device: str = "auto"
    """"cpu", "cuda", "cuda:1" (every role on that GPU), or "auto": a GPU where the pool has any."""
    patience: Duration = Duration(60.0)
    """Time for which a worker process may neither answer nor compute before it is killed and
    replaced. A running command gets at least ten times as long, and ten times the slowest of its
    kind so far.
    """
    grace: Duration = Duration(20.0)
    """Time that a run has after Ctrl-C, SIGTERM, SIGHUP or SIGQUIT to save a checkpoint. Eight seconds later its
    processes have ended. The default fits into the 30 s of Kubernetes and of Slurm's KillWait. A second
    signal ends the run at once. 0: save nothing.
    """
    deadline: Duration | None = None
    """Time after which a start or resume of the run must have ended. It is saved and stopped in time,
    with exit status 1. Absent: no limit.
    """
    budget: float | None = None
    """Dollars that the GPUs of a start or resume may cost, at the prices of their pools. The run is
    saved and stopped before it costs more, with exit status 1. Absent: no limit.
    """
    save_tokens_every: Duration = Duration(5.0)
    """Interval at which the tokens of running rollouts are saved to disk. It limits the tokens lost
    with a replica or the controller process. Long rollouts are saved only after growing by a
    sixteenth.
    """


class Run(Section, frozen=True, kw_only=True):
    """A whole run file."""

    seed: int = 0
    """Seed of everything random: lengths, order of prompts, sampling, failures."""
    model: ModelConfig
    cluster: ClusterConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    lending: LendingConfig | None = None
    algorithm: AlgorithmConfig
    workload: WorkloadConfig = WorkloadConfig()
    environment: EnvironmentConfig | None = None
    verifier: VerifierConfig = VerifierConfig()
    evaluation: EvaluationConfig | None = None
    sync: SyncConfig = SyncConfig()
    costs: CostsConfig = CostsConfig()
    policies: PoliciesConfig = PoliciesConfig()
    execute: ExecuteConfig = ExecuteConfig()
    simulate: SimulateConfig = SimulateConfig()
    plan: PlanConfig = PlanConfig()
    failures: FailuresConfig = FailuresConfig()
    faults: tuple[FaultConfig, ...] = ()
    framework: FrameworkConfig = FrameworkConfig()
    followers: tuple[SecondaryTrainerConfig, ...] = ()
    """What a run file writes as the second `[[trainer]]` and those after it."""

    def __repr__(self) -> str:
        return f"<Run: {', '.join(text for _, text in self.summary())}>"

    def _repr_html_(self) -> str:
        """Return the main values as a table for a notebook."""
        return html_table("Run", self.summary())

    def summary(self) -> Iterator[tuple[str, str]]:
        """Yield the main values, each with its name: model, work, GPUs and system."""
        algorithm = self.algorithm
        generate = [f"{kind.num_gpus} {self._gpu_of(kind.pool)}" for kind in self.rollout.kinds]
        train = [f"{each.num_gpus} {self._gpu_of(each.pool)}" for each in self.trainers]
        yield "model", self.model.name or self.model.path or ""
        yield "algorithm", f"{algorithm.name} with {algorithm.steps:,} steps"
        yield "rollouts", f"{algorithm.prompts_per_step:,} x {algorithm.group_size} rollouts a step"
        yield "generation", f"{' and '.join(generate)} generate"
        yield "training", f"{' and '.join(train)} train"
        yield "system", self.policies.system

    def _gpu_of(self, pool: str) -> str:
        return self.cluster.pools[pool].gpu if pool in self.cluster.pools else pool

    @property
    def has_steady_state(self) -> bool:
        """Whether some steps represent all of them; not so if lengths drift, or faults or changes of ranks are planned."""
        lengths = self.workload.lengths
        is_constant = not self.faults and not self.trainer.resize
        return is_constant and (lengths is None or not lengths.drifts)

    def of_kind(self, kind: int) -> Run:
        """Return the run as if it had replicas of one kind alone, the one that is named first where 0."""
        if not self.rollout.others and self.lending is None:
            return self
        found: Run = msgspec.structs.replace(self, rollout=self.replica_kinds[kind], lending=None)
        return found

    @property
    def lent(self) -> RolloutConfig | None:
        """The replicas on GPUs of the primary trainer; None if it lends none."""
        own, degrees = self.lending, {}
        if own is None:
            return None
        if own.tensor_parallel is not None:
            whole_experts = self.rollout.expert_parallel > 1
            degrees = {
                "tensor_parallel": own.tensor_parallel,
                "pipeline_parallel": 1,
                "data_parallel": 1,
                "expert_parallel": own.tensor_parallel if whole_experts else 1,
            }
        alone: RolloutConfig = msgspec.structs.replace(
            self.rollout,
            pool=self.trainer.pool,
            memory_utilization=own.memory_utilization or self.rollout.memory_utilization,
            others=(),
            **degrees,
        )
        most = self.trainer.num_gpus // alone.gpus_per_replica
        found: RolloutConfig = msgspec.structs.replace(alone, replicas=own.replicas or most)
        return found

    @property
    def borrowed_ranks(self) -> int:
        """Data-parallel ranks for which the GPUs of all replicas suffice; 0 if the primary trainer borrows none."""
        each = self.trainer.num_gpus // self.trainer.data_parallel
        return self.rollout.num_gpus // each if self.trainer.borrows else 0

    @property
    def trainer_ranks(self) -> list[int]:
        """Every number of data-parallel ranks that the primary trainer may have by its run file."""
        ranks = [data_parallel for _, data_parallel in self.trainer.sizes]
        if self.trainer.borrows:
            ranks.append(self.trainer.data_parallel + self.borrowed_ranks)
        return ranks

    @property
    def replica_kinds(self) -> tuple[RolloutConfig, ...]:
        """What each kind of replica is by itself; the last ones may be on GPUs of the primary trainer."""
        lent = self.lent
        return self.rollout.kinds if lent is None else (*self.rollout.kinds, lent)

    @property
    def on_held_out_prompts(self) -> Run:
        """The run as if it drew the prompts of `[evaluation]`: other ones, and nothing learned of their lengths."""
        assert self.evaluation is not None, "the caller has checked it"
        most = self.evaluation.max_tokens or self.rollout.max_tokens
        found: Run = msgspec.structs.replace(
            self,
            seed=self.seed + OTHER_SEED,
            workload=msgspec.structs.replace(self.workload, ranker=None),
            rollout=msgspec.structs.replace(self.rollout, max_tokens=most),
            policies=PoliciesConfig(system=self.policies.system),
            followers=(),
        )
        return found

    @property
    def num_trainers(self) -> int:
        """Trainers: the one that leads, and those that follow."""
        return 1 + len(self.followers)

    @property
    def secondary_trainer_names(self) -> tuple[str, ...]:
        """The names of its trainers that follow."""
        return tuple(follower.name for follower in self.followers)

    @property
    def trainers(self) -> tuple[TrainerConfig, ...]:
        """Every trainer, the one that leads first."""
        return (self.trainer, *self.followers)

    def only_counts(self, trainer: int) -> bool:
        """Return whether a trainer has no model, and only counts what it is given."""
        return trainer > 0 and self.followers[trainer - 1].counts_only

    def as_seen_by(self, trainer: int) -> Run:
        """Return the run as one trainer sees it: alone, with its own section, GPUs and algorithm."""
        if not trainer:
            return self
        own = self.followers[trainer - 1]
        changes = msgspec.structs.asdict(own.algorithm)
        changes = {key: value for key, value in changes.items() if value is not None}
        algorithm = msgspec.structs.replace(self.algorithm, **changes)
        algorithm = msgspec.structs.replace(algorithm, **{**algorithm.unknown, **changes})
        policies = self.policies
        if self.policies.shares_gpus:  # with the leader alone
            policies = msgspec.structs.replace(policies, system="stream-sync")
        seen: Run = msgspec.structs.replace(
            self,
            trainer=own,
            algorithm=algorithm,
            policies=policies,
            followers=(),
        )
        return seen

    @property
    def filters_by_family(self) -> bool:
        """Whether a trainer takes groups by the family of their prompt, so that the engine is told of it."""
        return any(follower.families for follower in self.followers)

    @property
    def filters_by_reward(self) -> bool:
        """Whether a trainer takes groups by their mean reward."""
        return any(follower.filters_by_reward for follower in self.followers)

    @property
    def leaves_out_uniform(self) -> bool:
        """Whether any trainer passes over groups whose rewards are all equal."""
        seen = (self.as_seen_by(trainer).algorithm for trainer in range(self.num_trainers))
        return any(algorithm.leaves_out_uniform for algorithm in seen)

    @property
    def computed_share(self) -> float:
        """Simulated share of the rollouts in a step of the trainer that leads whose gradient is computed."""
        return self.trained_group_share * (
            1.0 if self.algorithm.computes_all else self.algorithm.computed_of_group
        )

    @property
    def trained_group_share(self) -> float:
        """The same of groups of which any rollout's gradient is computed."""
        if self.algorithm.computes_all or self.algorithm.leaves_out_uniform:
            return 1.0
        return self.workload.informative_share

    @property
    def rollouts_per_update(self) -> int | None:
        """Rollouts between two optimizer steps of the trainer that leads; None where a batch has one."""
        steps = self.framework.optimizer_steps
        return None if steps == 1 else -(-self.algorithm.rollouts_per_step // steps)

    @property
    def shares_prefixes(self) -> bool:
        """Whether the prompt of a group is prefilled and kept once for all of it."""
        given = self.rollout.shares_prefixes
        if given is None:
            return self.costs.profile is None or engine_named(self.rollout.backend).shares_prefixes
        return given

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts that share the cache of their prompt; 1 where each has its own."""
        return self.algorithm.group_size if self.shares_prefixes else 1

    @property
    def serves_adapters(self) -> bool:
        """Whether replicas compute with adapters beside the weights that the run began with, and load nothing else."""
        merges = self.sync.merge_adapters
        if merges is None:  # one that cannot is enough: a version lies in one form at each place
            merges = any(
                not engine_named(kind.backend).serves_adapters for kind in self.rollout.kinds
            )
        return self.sync.adapter_rank is not None and not merges

    @property
    def merges_adapters(self) -> bool:
        """Whether replicas load whole weights that adapters were merged with."""
        return self.sync.adapter_rank is not None and not self.serves_adapters

    @property
    def num_gpus(self) -> int:
        """GPUs of the replicas and the trainer that leads, those that they share once."""
        generate = sum(kind.num_gpus for kind in self.rollout.kinds)
        both = (generate, self.trainer.num_gpus)
        return max(both) if self.policies.shares_gpus else sum(both)


def whole_groups(share: float, prompts_per_step: int) -> int:
    """Return `share` steps as groups, rounded down: 0.29 of 100 prompts are 29, which floats make 28 of."""
    return int(Fraction(repr(share)) * prompts_per_step)


def num_extra(oversampling: float, prompts: int) -> int:
    """Return the groups that are drawn for a step beyond those that it is made of (`policies.oversampling`)."""
    return whole_groups(oversampling, prompts) - prompts
