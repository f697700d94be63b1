"""The sections `[rollout]`, `[trainer]` and `[verifier]` of a run file: GPUs, parallelism, number formats and rewards of each role."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from streamrl.runfile.algorithm_config import CorrectionName, KlEstimator, KlPlace, LossMean
from streamrl.runfile.algorithms import AlgorithmName
from streamrl.runfile.backend_choice import (
    RolloutBackend,
    TrainerBackend,
)
from streamrl.runfile.scorer_choice import SCORERS, function_of
from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration, Size

WideDtype = Literal["bfloat16", "float16", "float32"]
"""Formats of one value each, without scales."""
WeightDtype = Literal["bfloat16", "float16", "float32", "fp8", "mxfp8", "int8", "int4", "nvfp4"]
"""What a replica may keep weights in. fp8: a scale for each block of 128 by 128, or each row; mxfp8: for each 32 values;
int8: for each row; int4: for each 128 values; nvfp4: for each 16."""
CacheDtype = Literal["bfloat16", "float16", "float32", "fp8"]
"""What a replica may keep keys and values in."""
TrainingDtype = Literal["bfloat16", "float16", "float32", "fp8", "mxfp8"]
"""What a trainer may compute products in."""

NARROW = tuple(name for name in get_args(WeightDtype) if name not in get_args(WideDtype))
"""Formats of weights that have scales."""


OverSteps = Literal["min", "mean", "last"]


class RewardConfig(Section, frozen=True, kw_only=True):
    """One score of a completion; a rollout's reward is the weighted sum of all."""

    scorer: str
    """The name of a scorer, or a function: "python:FILE.py:FUNCTION" or "MODULE:FUNCTION"."""
    weight: float = 1.0
    """What the score is multiplied by; below 0 for what is not wanted."""
    name: str | None = None
    """Its mean is `reward/NAME` in metrics.jsonl; the scorer's name, or the function's, where absent."""
    families: tuple[str, ...] = ()
    """The "family" of the prompts whose completions it scores; all prompts where empty."""
    pattern: str | None = None
    """Of regex and format: a regular expression of Python's `re`."""
    beyond: int | None = None
    """Of length-penalty: output tokens up to which the score is 0; from there it falls in a line."""
    until: int | None = None
    """Of length-penalty: output tokens from which the score is -1."""
    credit: Literal["all", "share"] = "all"
    """Of unit-tests: 1 where all tests pass and else 0, or the share of tests that pass."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Of a function: the least and the most that it returns; anything else is an error of it. Of judge: of its scores."""
    endpoint: str | None = None
    """Of judge: where an OpenAI-compatible server is, such as "http://127.0.0.1:8000/v1"."""
    model: str | None = None
    """Of judge: the model that the server is asked for. Of reward-model: a Hugging Face directory, or "hf://NAME" on the hub:
    a sequence classifier with one output, or with `step_end` a token classifier."""
    step_end: str | None = None
    """Of reward-model: what a step of a completion ends with, such as "\n\n": the model scores each step at its last token
    (a process reward), and not the whole at its last one."""
    over_steps: OverSteps = "min"
    """Of reward-model with `step_end`: which of the scores of its steps a completion gets."""
    template: str | None = None
    """Of judge: what it is asked, a Jinja template of the record's fields, `completion`, `least` and `most`; its last
    "Score: X" counts. A question of our own where absent."""
    key_variable: str | None = None
    """Of judge: the environment variable that holds the key which the server wants, if any."""
    at_once: int = 8
    """Of judge: questions under way at a time."""
    request_time: Duration = Duration(60.0)
    """Of judge: time for an answer."""

    @property
    def has_model(self) -> bool:
        """Whether a reward model scores, on GPUs of the verifier's own."""
        return self.scorer in SCORERS and SCORERS[self.scorer].has_model

    @property
    def label(self) -> str:
        """What the reward is called in metrics."""
        function = function_of(self.scorer)
        return self.name or (self.scorer if function is None else function.name)


AdmissionName = Literal["on-demand", "reserve"]
Recompute = Literal["none", "selective", "mlp", "full"]
Logits = Literal["eager", "fused", "chunked"]
Packing = Literal["packed", "padded"]
ContextExchange = Literal["ring", "all-gather", "all-to-all"]


class SpeculativeConfig(Section, frozen=True, kw_only=True):
    """Tokens that a draft proposes and the model checks together."""

    tokens: int = 1
    """Drafted for each rollout and step."""
    acceptance: float | None = None
    """Probability that a drafted token is accepted where all before it were: measured, on your own rollouts; never absent."""
    model: str | None = None
    """Name of the model in profiles/models that drafts; the model's own layer for multi-token prediction where absent."""
    enabled: bool = True
    """Whether tokens are drafted at all: what a plan switches off where drafts do not pay."""


class ReplicasConfig(Section, frozen=True, kw_only=True):
    """Replicas of another kind, beside those that `[rollout]` itself names; all else is as there."""

    pool: str
    replicas: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: int = 1
    max_running: int | None = None
    share: float | None = None
    """Rollouts that one of them gets for each that one of the first kind gets; `simulate` and `execute` fill in, from
    the costs, what lets all be done at the same time."""
    latency: tuple[tuple[int, float], ...] | None = None
    """As `policies.latency`, of these; filled in like it."""


OF_REPLICAS = (
    *("pool", "replicas", "tensor_parallel", "pipeline_parallel", "data_parallel"),
    *("expert_parallel", "max_running"),
)
"""What each kind of replica has of its own."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """The generation side."""

    pool: str
    replicas: int
    tensor_parallel: int = 1
    """GPUs that share each layer of a replica: of a node, of an NVLink domain, or of several of these."""
    pipeline_parallel: int = 1
    """Simulated: stages that layers are dealt out to, each on `tensor_parallel` GPUs; as many batches are under way."""
    data_parallel: int = 1
    """Simulated: groups of `tensor_parallel` GPUs in a replica of a mixture that each attend to rollouts of their own,
    with all weights but the experts, which all of them share out (wide expert parallelism)."""
    expert_parallel: int = 1
    """1, or tensor_parallel x data_parallel: then each GPU of a replica holds whole experts of a mixture."""
    overlaps_dispatch: bool = False
    """Simulated: whether tokens of attention ranks go to experts and back while GPUs compute the other half of the batch,
    where that is faster (two-batch overlap of SGLang and vLLM)."""
    chunked_prefill: bool = True
    """Simulated: whether prefill rides on decode steps, as in vLLM, or halts them."""
    max_running: int = 256
    """Most rollouts that a replica decodes at once; KV memory may allow fewer."""
    max_tokens: int
    """Most output tokens of a rollout."""
    dtype: WeightDtype | None = None
    """Simulated: what replicas keep the weights of linear layers in, and multiply them in; `model.dtype` where absent."""
    weight_only: bool = False
    """Simulated: weights of a narrow `dtype` are widened before each product, as int4 always is: fewer bytes are read and
    kept, and products take as long as those of `model.dtype`."""
    kv_dtype: CacheDtype | None = None
    """Simulated: what keys and values are kept in; `model.dtype` where absent."""
    admission: AdmissionName = "on-demand"
    """Simulated: what a replica lets a rollout in by. on-demand: what it has now fits KV memory, and what outgrows
    that later is preempted, as engines do; reserve: `max_tokens` of all that run fit, so none is ever preempted."""
    temperature: float = 1.0
    memory_utilization: float = 0.9
    """Share of GPU memory for weights and KV cache."""
    backend: RolloutBackend = "transformers"
    """Who generates: transformers' continuous batching; vllm; or static: one batch to its end, then the next, a
    reference that is executed and never simulated."""
    shares_prefixes: bool | None = None
    """Whether the prompt of a group is prefilled and kept once for all of it, as vLLM and SGLang do; `execute` does so
    with `backend` vllm, among rollouts that begin under the same weights. By default yes, but where `costs.profile` was
    measured on transformers, which computes the prompt of each."""
    migration_transfer: Literal["recompute", "kv"] = "recompute"
    """How a rollout that `policies.migration` moves gets its KV cache: computed again, or (simulated) sent
    over the network, within a node over NVLink."""
    start_time: Duration = Duration(0.0)
    """Simulated seconds until a replica serves."""
    speculative: SpeculativeConfig | None = None
    """Simulated: speculative decoding."""
    others: tuple[ReplicasConfig, ...] = ()
    """Replicas on GPUs of another pool, or of other degrees: each gets rollouts by what it generates a second."""

    @property
    def drafts(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None where they are not."""
        own = self.speculative
        return own if own is not None and own.enabled else None

    @property
    def num_kinds(self) -> int:
        """Kinds of replicas."""
        return 1 + len(self.others)

    @property
    def kinds(self) -> tuple[RolloutConfig, ...]:
        """What each kind of replica is by itself, those that are named first before `others`."""
        if not self.others:
            return (self,)
        return tuple(self._of(kind) for kind in range(1 + len(self.others)))

    def _of(self, kind: int) -> RolloutConfig:
        own = msgspec.structs.asdict(self.others[kind - 1]) if kind else {}
        own = {key: own[key] for key in OF_REPLICAS if own.get(key) is not None}
        found: RolloutConfig = msgspec.structs.replace(self, **own, others=())
        return found

    @property
    def kind_of_each(self) -> list[int]:
        """The kind of each replica by its id: those of one kind are started before those of the next."""
        return [kind for kind, own in enumerate(self.kinds) for _ in range(own.replicas)]

    @property
    def num_replicas(self) -> int:
        """Replicas of all kinds."""
        return self.replicas + sum(each.replicas for each in self.others)

    @property
    def num_gpus(self) -> int:
        """GPUs of the replicas of the kind that is named first."""
        return self.replicas * self.gpus_per_replica

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one of them."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The training side."""

    pool: str
    dtype: TrainingDtype | None = None
    """Simulated: what products of linear layers are computed in; weights, activations and the optimizer stay as with
    `model.dtype`, which it is where absent."""
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    micro_batch: int = 4
    """Simulated: rollouts that one data-parallel rank takes in one forward and backward pass."""
    max_tokens_per_pass: int = 16384
    """Tokens in one forward and backward pass of a data-parallel rank, padding included, which its context ranks share;
    a longer rollout has one of its own."""
    context_parallel: int = 1
    """Simulated: context ranks: each computes an equal share of the tokens and work of every
    sequence. Each holds all weights of its tensor ranks. Data-parallel ranks are divided by this
    number.
    """
    context_exchange: ContextExchange = "ring"
    """Simulated: how context ranks attend to each other's tokens. ring: keys and values pass from
    rank to rank while attention computes (Megatron's p2p, ring attention). all-gather: keys and
    values are gathered first (Llama 3). all-to-all: each rank gets all tokens for its share of
    the heads (Ulysses, in verl and DeepSpeed).
    """
    expert_parallel: int = 1
    """Ranks that share out the experts of a mixture; they are data-parallel, context and tensor ranks too."""
    expert_tensor_parallel: int | None = None
    """Simulated: ranks that share each expert (Megatron's expert_tensor_parallel_size); experts times these are folded into
    data-parallel, context and tensor ranks. Absent: whole experts where `expert_parallel` is above 1, else those that
    share attention."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: what data-parallel ranks split. 0: nothing; 1: the optimizer; 2: gradients too, which every pass
    reduces; 3: weights too, gathered for every pass (FSDP's full shard). Beside pipeline stages 2 and 3 are simulated as
    FSDP2 has them, every pass by itself; DeepSpeed refuses that, and plans try it only where `plan.zero` says so."""
    virtual_stages: int = 1
    """Simulated: slices of the model that each pipeline stage has (Megatron's interleaved schedule)."""
    recompute: Recompute = "full"
    """What the backward pass computes again (executed: on GPUs, selective as mlp; a CPU keeps all). full: layers, of which
    it keeps the input; selective: norms and activations of MLPs; mlp: norms and whole MLPs, experts with their
    dispatch; none: nothing but attention scores, which flash attention never keeps."""
    kernels: Literal["fused", "uncompiled", "eager"] = "eager"
    """Simulated: how elementwise operations run. fused: all fused (Transformer Engine,
    torch.compile), as in tuned pretraining. uncompiled: only attention and norms are fused.
    eager: one operation after the other, as in most RL trainers (prime-rl's benchmarks, and the
    stage times that RLinf publishes for itself and verl).
    """
    logits: Logits | None = None
    """The memory of logits. eager: all logits of a pass with float32 copies and gradients (16 bytes
    each). fused: one kernel for the loss (4 bytes each: Megatron, flash-attn); executed as
    chunked, which holds less. chunked: 1,024 tokens at a time (prime-rl's RL trainer, Liger).
    Absent: fused if `kernels` is fused, else eager.
    """
    packing: Packing = "packed"
    """Rollouts of a pass follow each other, or are padded to the longest. Executed, packed ones attend through an
    attention of our own, which some architectures do not let one exchange: those are refused."""
    order: Literal["sorted", "arrival"] = "sorted"
    """Simulated: rollouts of a command go to ranks and micro-batches by falling length, or as they came."""
    routing: Literal["natural", "balanced"] = "natural"
    """Simulated: the router of a mixture chooses freely, or every expert gets as many tokens (benchmarks force it)."""
    dispatch: Literal["all-to-all", "deduplicated"] = "all-to-all"
    """Simulated: how tokens go to expert ranks: a copy for each expert, or one a node and GPU (DeepEP, HybridEP)."""
    overlaps_dispatch: bool = False
    """Simulated: whether that hides behind another micro-batch (Megatron's EP overlap, DualPipe)."""
    offload: bool = False
    """Simulated: models take turns on the GPUs, and wait in host memory; of one that is alone the optimizer, but for steps."""
    efficiency: float | None = None
    """Simulated: share of peak FLOP/s in forward and backward passes, where you have measured yours;
    recomputation and collectives are then part of it. What the profiles give where absent."""
    backend: TrainerBackend = "torch"
    """Executed: torch, with all weights and all of the optimizer on every data-parallel rank (`zero = 0` where there are
    several); or deepspeed, which splits them as `zero` says."""
    start_time: Duration = Duration(0.0)
    """Simulated seconds until the trainer is up."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.copies * self.tensor_parallel * self.pipeline_parallel

    @property
    def copies(self) -> int:
        """Ranks that compute with the same weights but for experts, and split what `zero` says."""
        return self.data_parallel * self.context_parallel

    @property
    def expert_copies(self) -> int:
        """The same of experts that ranks share out, which are fewer."""
        return max(1, self.copies * self.tensor_parallel // self.expert_ranks)

    @property
    def expert_slices(self) -> int:
        """Ranks that share each expert of a mixture."""
        if self.expert_tensor_parallel is not None:
            return self.expert_tensor_parallel
        return 1 if self.expert_parallel > 1 else self.tensor_parallel

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold all experts of a layer together."""
        return self.expert_parallel * self.expert_slices

    @property
    def shards_experts(self) -> bool:
        """Whether experts are not simply split over the ranks that share attention, so that tokens have to go to them."""
        return self.expert_parallel > 1 or self.expert_slices != self.tensor_parallel

    @property
    def num_slices(self) -> int:
        """Slices of the model along the pipeline."""
        return self.pipeline_parallel * self.virtual_stages


class AlgorithmChanges(Section, frozen=True, kw_only=True):
    """What a trainer that follows does otherwise than `[algorithm]`: what is absent is as there, if its algorithm knows it."""

    name: AlgorithmName | None = None
    prompts_per_step: int | None = None
    dynamic_sampling: bool | None = None
    """It passes over groups of one reward; others come for them only where the trainer that leads passes over them too."""
    max_gen_batches: int | None = None
    learning_rate: float | None = None
    correction: CorrectionName | None = None
    correction_cap: float | None = None
    second_moment: float | None = None
    clip: float | None = None
    clip_high: float | None = None
    kl_coefficient: float | None = None
    kl_estimator: KlEstimator | None = None
    kl_in: KlPlace | None = None
    entropy_coefficient: float | None = None
    loss_mean: LossMean | None = None
    max_grad_norm: float | None = None
    beta: float | None = None
    critic_learning_rate: float | None = None
    gae_lambda: float | None = None


class SecondaryTrainerConfig(TrainerConfig, frozen=True, kw_only=True):
    """A trainer after the first `[[trainer]]`: it learns from the rollouts that the first one's weights generate.

    It has a copy of the policy, GPUs and a pace of its own, and holds up neither generation nor other trainers.
    """

    name: str
    """What reports call it."""
    algorithm: AlgorithmChanges = AlgorithmChanges()
    backlog: int = 2
    """Batches of complete groups of the primary trainer's size that may wait for it, because groups
    arrive in bursts. It loses older groups beyond that; they are counted.
    """
    counts_only: bool = False
    """Whether it has no model and learns nothing: it takes groups and counts them, on one CPU or GPU of its pool, to tell
    what being subscribed costs a run."""
    every: int = 1
    """Of so many complete groups that the keys below let pass it takes one, from the first on."""
    min_staleness: int | None = None
    """Minimum versions that the oldest token of a complete group must be behind the primary
    trainer.
    """
    max_staleness: int | None = None
    """Most versions that it may be behind."""
    min_reward: float | None = None
    """Least mean reward of a group; a simulation goes by `workload.group_rewards`."""
    max_reward: float | None = None
    families: tuple[str, ...] = ()
    """Of prompts that it takes groups of: the "task" of their record, or else its "family"; all where empty."""

    @property
    def takes_share(self) -> bool:
        """Whether it leaves out groups that it could have."""
        bounds = (self.min_staleness, self.max_staleness, self.min_reward, self.max_reward)
        return self.every > 1 or bool(self.families) or any(each is not None for each in bounds)

    @property
    def filters_by_reward(self) -> bool:
        """Whether it takes groups by their rewards."""
        return self.min_reward is not None or self.max_reward is not None


class VerifierConfig(Section, frozen=True, kw_only=True):
    """Who computes rewards."""

    scorer: str | None = None
    """Executed: what a completion is scored by, where that is one scorer: as `scorer` of a `[[verifier.reward]]`."""
    reward: tuple[RewardConfig, ...] = ()
    """Executed: what a completion is scored by, where these are several scorers, or one with parameters."""
    workers: int = 1
    """Rollouts that scorers on CPUs look at at a time; in `pool`, replicas of the reward model."""
    pool: str | None = None
    """The pool whose GPUs score: a reward model's; CPUs beside the run where absent."""
    gpus_per_worker: int = 0
    """GPUs that each worker has in `pool`; 1 to be executed."""
    time: Duration = Duration(0.0)
    """Simulated seconds of one worker for one rollout. Of a reward model: what the costs say where it is 0."""
    start_time: Duration = Duration(0.0)
    """Simulated seconds until a replica of the reward model is up."""
    max_rollouts_per_call: int = 16
    """Most rollouts that a replica of the reward model takes at once, of those that wait."""
    max_tokens_per_pass: int = 16384
    """Of the reward model: tokens in one forward pass, padding included; a longer rollout has one of its own."""
    time_limit: Duration = Duration(10.0)
    """Executed: seconds after which a completion that a scorer still works on gets the least of its scores."""
    memory_limit: Size = Size(1e9)
    """Executed: most memory that scoring one completion may take, beside the scorer itself."""

    @property
    def rewards(self) -> tuple[RewardConfig, ...]:
        """What a completion is scored by, in order; nothing where the run file does not say."""
        return self.reward if self.scorer is None else (RewardConfig(scorer=self.scorer),)

    @property
    def reward_model(self) -> RewardConfig | None:
        """The reward that replicas in `pool` compute; None where none is."""
        return next((each for each in self.rewards if each.has_model), None)

    def key(self, place: int) -> str:
        """Return the key of the scorer at a place of `rewards`."""
        return f"verifier.reward.{place}.scorer" if self.reward else "verifier.scorer"

    @property
    def num_gpus(self) -> int:
        """GPUs of all workers."""
        return self.workers * self.gpus_per_worker
