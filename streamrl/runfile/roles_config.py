"""The sections `[rollout]`, `[trainer]` and `[verifier]` of a run file: GPUs, parallelism, number formats and rewards of each role."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from streamrl.runfile.algorithm_config import (
    CorrectionName,
    KlEstimator,
    KlPlace,
    LossMean,
    OptimizerConfig,
)
from streamrl.runfile.algorithms import AlgorithmName
from streamrl.runfile.backend_choice import (
    RolloutBackend,
    ServerApiName,
    TrainerBackend,
)
from streamrl.runfile.scorer_choice import SCORERS, function_of
from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration, Size

WideDtype = Literal["bfloat16", "float16", "float32"]
"""Number formats without scales."""
WeightDtype = Literal[
    "bfloat16", "float16", "float32", "fp8", "mxfp8", "int8", "int4", "nvfp4", "mxfp4"
]
"""Formats of replica weights. Scales: fp8 one per block of 128 x 128 or per row; mxfp8 per 32
values; int8 per row; int4 per 128 values; nvfp4 per 16 values; mxfp4 per 32 values.
"""
CacheDtype = Literal["bfloat16", "float16", "float32", "fp8"]
"""Formats of keys and values in a replica."""
TrainingDtype = Literal["bfloat16", "float16", "float32", "fp8", "mxfp8"]
"""Formats of matrix products in a trainer."""

NARROW = tuple(name for name in get_args(WeightDtype) if name not in get_args(WideDtype))
"""Weight formats with scales."""


OverSteps = Literal["min", "mean", "last"]
RewardSignature = Literal["plain", "verl", "trl"]
WeightsWay = Literal["disk", "distributed"]


class RewardConfig(Section, frozen=True, kw_only=True):
    """One score of a completion; a rollout's reward is the weighted sum of all."""

    scorer: str
    """The name of a scorer, or a function: "python:FILE.py:FUNCTION" or "MODULE:FUNCTION"."""
    weight: float = 1.0
    """Factor of the score; negative for unwanted behaviour."""
    name: str | None = None
    """Name in metrics.jsonl, as `reward/NAME`; where absent, the name of the scorer or function."""
    families: tuple[str, ...] = ()
    """Families of the prompts whose completions it scores; empty: all prompts."""
    pattern: str | None = None
    """For regex and format: a regular expression of Python's `re`."""
    beyond: int | None = None
    """For length-penalty: output tokens up to which the score is 0. Beyond, it falls linearly."""
    until: int | None = None
    """For length-penalty: output tokens from which the score is -1."""
    credit: Literal["all", "share"] = "all"
    """For unit-tests: all: 1 if all tests pass, else 0; share: the share of tests that pass."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """For a function: its minimum and maximum; other values are errors. For judge: the range of its
    scores.
    """
    signature: RewardSignature = "plain"
    """For a function: how it is called. plain: score(completion, record). verl:
    compute_score(data_source, solution_str, ground_truth, extra_info). trl: reward(completions,
    prompts, **columns), with lists of one.
    """
    sandbox: bool = True
    """For a function: false runs it with network, files, subprocesses and your environment, as trusted
    code, in a process apart from other scorers. It must not run text of a completion as code.
    """
    endpoint: str | None = None
    """For judge: URL of an OpenAI-compatible server, such as "http://127.0.0.1:8000/v1"."""
    model: str | None = None
    """For judge: the model to request from the server. For reward-model: a Hugging Face directory,
    or "hf://NAME" on the hub. It is a sequence classifier with one output or, with `step_end`, a
    token classifier.
    """
    step_end: str | None = None
    """Of reward-model: what a step of a completion ends with, such as "\n\n": the model scores each step at its last token
    (a process reward), and not the whole at its last one."""
    over_steps: OverSteps = "min"
    """For reward-model with `step_end`: which of the step scores becomes the completion's score."""
    template: str | None = None
    """For judge: the prompt, a Jinja template with the record's fields, `completion`, `least` and
    `most`. The last "Score: X" of the answer counts. Where absent, a built-in prompt.
    """
    key_variable: str | None = None
    """For judge: environment variable with the API key, if the server needs one."""
    at_once: int = 8
    """For judge: maximum number of requests at a time."""
    request_time: Duration = Duration(60.0)
    """For judge: time limit of one answer."""

    @property
    def has_model(self) -> bool:
        """Whether a reward model scores, on GPUs of the verifier."""
        return self.scorer in SCORERS and SCORERS[self.scorer].has_model

    @property
    def scores_length(self) -> bool:
        """Whether the length alone is scored, which evaluations leave out."""
        return self.scorer in SCORERS and SCORERS[self.scorer].scores_length

    @property
    def label(self) -> str:
        """Name of the reward in metrics."""
        function = function_of(self.scorer)
        return self.name or (self.scorer if function is None else function.name)


AdmissionName = Literal["on-demand", "reserve"]
Recompute = Literal["none", "selective", "mlp", "full"]
Logits = Literal["eager", "fused", "chunked"]
Packing = Literal["packed", "padded"]
KernelFusion = Literal["fused", "uncompiled", "eager"]
ContextExchange = Literal["ring", "all-gather", "all-to-all"]
OffloadTarget = Literal["host", "nvme"]
Sharding = Literal["fsdp2", "fsdp", "deepspeed"]
KEEPS_ONE_COPY: frozenset[Sharding] = frozenset(("fsdp2", "fsdp"))
"""Ways to shard that train on 32-bit weights, and keep no second copy of them for the optimizer."""


class SpeculativeConfig(Section, frozen=True, kw_only=True):
    """Tokens that a draft proposes and the model checks together."""

    tokens: int = 1
    """Tokens drafted for each rollout in each decode step."""
    acceptance: float | None = None
    """Probability that a drafted token is accepted if all before it were. Required: measure it on
    your own rollouts.
    """
    acceptance_to: float | None = None
    """The same probability in the last step, if the draft is not trained and the policy moves away
    from it. It changes linearly, and costs use the mean over steps. Where absent, it stays.
    """
    trained: bool = False
    """Simulated: whether the trainer trains the model's own draft layer with the policy, with
    detached inputs, so that `acceptance` stays (verl's mtp.enable_train with detach_encoder, slime's
    --enable-mtp-training). It costs time and memory of the last pipeline stage, and bytes of syncs.
    """
    model: str | None = None
    """Name of the draft model in profiles/models; where absent, the model's own
    multi-token-prediction layer.
    """
    enabled: bool = True
    """Whether tokens are drafted. A plan turns it off where drafting does not pay."""


class ExternalConfig(Section, frozen=True, kw_only=True):
    """Servers that generate for `rollout.backend` "external". Someone else starts and stops them."""

    endpoints: tuple[str, ...]
    """URL of each server, such as "http://node-7:8000"; one for each replica."""
    api: ServerApiName = "vllm"
    """API of the servers. vllm: `vllm serve`, with VLLM_SERVER_DEV_MODE=1. sglang: SGLang's own."""
    key: str | None = None
    """API key of the servers, as "${NAME}" of an environment variable. Records contain only the name."""
    certificate: str | None = None
    """For https: file with the certificates to trust, in place of the system's."""
    timeout: Duration = Duration(60.0)
    """A server that gives no sign of life for this long is lost, and so is its replica."""
    weights: WeightsWay = "disk"
    """How new weights reach the servers. disk: as a checkpoint in `directory`. distributed: over a
    process group of torch (gloo) that each server joins; SGLang's update_weights_from_distributed.
    It needs no shared directory, and `rollout.tensor_parallel` must be the GPUs of a server.
    """
    directory: str | None = None
    """Directory for new weights, which the servers see under the same path. Where absent, they are in
    shared memory of this machine, so the servers must run here.
    """


class ReplicasConfig(Section, frozen=True, kw_only=True):
    """Replicas of another kind, besides those of `[rollout]`, whose other keys apply to them too."""

    pool: str
    """As `rollout.pool`, for these replicas."""
    replicas: int
    """Number of these replicas."""
    tensor_parallel: int = 1
    """As `rollout.tensor_parallel`, for these replicas."""
    pipeline_parallel: int = 1
    """As `rollout.pipeline_parallel`, for these replicas."""
    data_parallel: int = 1
    """As `rollout.data_parallel`, for these replicas."""
    expert_parallel: int = 1
    """As `rollout.expert_parallel`, for these replicas."""
    max_running: int | None = None
    """As `rollout.max_running`, for these replicas; the same value where absent."""
    disaggregation_mode: Literal["prefill"] | None = None
    """Simulated: prefill: these replicas only prefill, and all others only decode. Each prompt, each
    observation of an episode and each context to recompute is prefilled here. Its KV cache is then
    transferred to a replica that decodes it (vLLM's disaggregated prefilling, SGLang's
    --disaggregation-mode). Absent: these replicas prefill and decode.
    """
    share: float | None = None
    """Rollouts that one such replica gets for each rollout of a replica of the first kind. Where
    absent, `simulate` and `execute` compute the share with which all finish at the same time.
    """
    latency: tuple[tuple[int, float], ...] | None = None
    """As `policies.latency`, of these; filled in like it."""

    @property
    def prefills(self) -> bool:
        """Whether these replicas only prefill."""
        return self.disaggregation_mode == "prefill"


class LendingConfig(Section, frozen=True, kw_only=True):
    """Replicas on GPUs of the primary trainer, which generate while the trainer would wait for rollouts.

    Other keys of these replicas are those of `[rollout]`. verl calls this hybrid rollout.
    """

    replicas: int | None = None
    """Number of these replicas. Absent: as many as the trainer's GPUs allow."""
    tensor_parallel: int | None = None
    """GPUs of one of them. Absent: as many as a replica of `[rollout]` has, in the same parallelism."""
    memory_utilization: float | None = None
    """As `rollout.memory_utilization`, for these replicas. The trainer keeps data on the GPU that fits
    beside them; the rest moves to host memory and back. Absent: that of `[rollout]`.
    """
    until: float = 0.4
    """Share of a step's rollouts that must be ready before the trainer takes its GPUs back, but at least
    one micro-batch for each data-parallel rank. verl: switch_threshold_ratio.
    """
    adapts: bool = True
    """Whether `until` follows the run: it rises while the trainer waits after it took its GPUs back, and
    falls while it does not. verl: adaptive_switch_threshold.
    """
    share: float | None = None
    """Rollouts that one of these replicas gets for each rollout of a replica of the first kind. Absent:
    `simulate` and `execute` compute the share with which all finish at the same time.
    """


OF_REPLICAS = (
    *("pool", "replicas", "tensor_parallel", "pipeline_parallel", "data_parallel"),
    *("expert_parallel", "max_running"),
)
"""What each kind of replica has of its own."""


class RolloutConfig(Section, frozen=True, kw_only=True):
    """The generation side."""

    pool: str
    """Pool whose GPUs generate."""
    replicas: int
    """Number of replicas: inference engines, each with all weights."""
    tensor_parallel: int = 1
    """GPUs that share each layer of a replica: within a node, within an NVLink domain, or several
    whole domains.
    """
    pipeline_parallel: int = 1
    """Simulated: pipeline stages, each on `tensor_parallel` GPUs; as many batches run at once."""
    data_parallel: int = 1
    """Simulated: attention ranks in a replica of a mixture of experts (wide expert parallelism).
    Each rank has `tensor_parallel` GPUs, its own rollouts, and all weights except the experts,
    which are sharded over all ranks.
    """
    expert_parallel: int = 1
    """1, or tensor_parallel x data_parallel: then each GPU of a replica holds whole experts of a
    mixture.
    """
    overlaps_dispatch: bool = False
    """Simulated: whether the all-to-all of attention ranks overlaps with computing the other half
    of the batch, where that is faster (two-batch overlap of SGLang and vLLM).
    """
    chunked_prefill: bool = True
    """Simulated: true: prefill is part of decode steps, as in vLLM; false: prefill interrupts
    decoding.
    """
    max_running: int = 256
    """Maximum number of rollouts that a replica decodes at once; KV memory may allow fewer."""
    max_tokens: int
    """Maximum output tokens of a rollout."""
    dtype: WeightDtype | None = None
    """Simulated: format of the weights and products of linear layers in replicas; `model.dtype`
    where absent.
    """
    weight_only: bool = False
    """Simulated: dequantise weights of a narrow `dtype` before each product, as int4 always does.
    This saves memory and bandwidth, but products take as long as with `model.dtype`.
    """
    kv_dtype: CacheDtype | None = None
    """Simulated: format of keys and values; `model.dtype` where absent."""
    admission: AdmissionName = "on-demand"
    """Simulated: when a replica admits a rollout. on-demand: if its current tokens fit KV memory;
    rollouts that outgrow it are preempted, as in common engines. reserve: only if `max_tokens`
    of all running rollouts fit, so none is preempted.
    """
    kv_offload: Size | None = None
    """Simulated: host memory of each replica for the contexts of episodes that its GPUs evict, such
    as "200 GB". Loading one back takes the time of the host link. Absent: evicted contexts are
    computed again. In vLLM it is `--kv-offloading-size`, in SGLang `--hicache-size`.
    """
    temperature: float = 1.0
    """Sampling temperature. Log-probabilities of the loss are at the same temperature."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this probability mass. Log-probabilities of the loss
    are over the same tokens, also with `top_k` and `min_p`. Simulated: below 1, as with `top_k`,
    engines sort all logits in every step.
    """
    top_k: int | None = None
    """Sample from this number of most likely tokens; absent: from all."""
    min_p: float = 0.0
    """Executed: sample only tokens at least this likely relative to the most likely one."""
    stop: tuple[str, ...] = ()
    """Executed: texts that end a rollout. Its last token is the one that completes such a text."""
    stop_token_ids: tuple[int, ...] = ()
    """Executed: token ids that end a rollout, in addition to those that the model's files name."""
    seed_rollouts: bool = False
    """Executed: whether each rollout is sampled from a seed of its own, computed from `seed` and its
    number. Its tokens then depend neither on its replica nor on other rollouts, except by rounding.
    """
    memory_utilization: float = 0.9
    """Share of GPU memory for weights, KV cache and, except with SGLang, the workspace of a pass."""
    backend: RolloutBackend = "transformers"
    """Inference engine. transformers: continuous batching of its model. vllm. sglang: a server that each
    replica starts. external: the servers of `rollout.external`. static: one batch to its end, then
    the next; a reference that is executed but not simulated.
    """
    external: ExternalConfig | None = None
    """Executed: the servers of backend external."""
    shares_prefixes: bool | None = None
    """Whether a group's prompt is prefilled and kept once, as vLLM and SGLang do. `execute` does so
    for rollouts that start under the same weights, except with `backend` static. The default is
    true, except where `costs.profile` was measured on transformers, whose profile has the prompt
    of each rollout.
    """
    migration_transfer: Literal["recompute", "kv"] = "recompute"
    """How a rollout moved by `policies.migration` gets its KV cache. recompute: it is computed
    again. kv (simulated): it is sent over the network, or over NVLink within a node.
    """
    start_time: Duration = Duration(0.0)
    """Simulated: seconds until a started replica serves."""
    speculative: SpeculativeConfig | None = None
    """Simulated: speculative decoding."""
    others: tuple[ReplicasConfig, ...] = ()
    """Replicas on GPUs of another pool, or with other degrees of parallelism. Each gets rollouts in
    proportion to its throughput.
    """

    @property
    def drafts(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None where they are not."""
        own = self.speculative
        return own if own is not None and own.enabled else None

    @property
    def sorts_tokens(self) -> bool:
        """Whether only the most likely tokens are sampled, so that engines sort the logits."""
        return self.top_p < 1.0 or self.top_k is not None

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
    def prefill_kinds(self) -> tuple[int, ...]:
        """The kinds of replicas that only prefill. Then all others only decode."""
        return tuple(n for n, other in enumerate(self.others, start=1) if other.prefills)

    @property
    def decode_kinds(self) -> tuple[RolloutConfig, ...]:
        """Each kind of replicas that decodes, by itself."""
        return tuple(own for n, own in enumerate(self.kinds) if n not in self.prefill_kinds)

    @property
    def num_decode_replicas(self) -> int:
        """Replicas that decode, of all kinds."""
        return sum(own.replicas for own in self.decode_kinds)

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


class TrainerResize(Section, frozen=True, kw_only=True):
    """A change of the primary trainer's data-parallel ranks between two steps.

    The ranks that stay do not restart. Added ranks get weights and optimizer state from them, without a
    checkpoint. Needs `trainer.zero = 0`. Executed by backend torch with launcher local. `plan` leaves
    it out. `streamrl resize` changes the ranks of a running job.
    """

    step: int
    """The first step that the trainer makes with these ranks; at least 2."""
    data_parallel: int
    """As `trainer.data_parallel`, from this step on."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The training side."""

    pool: str
    """Pool whose GPUs train."""
    dtype: TrainingDtype | None = None
    """Simulated: format of the products of linear layers. Weights, activations and the optimizer
    keep `model.dtype`, which is also the default.
    """
    data_parallel: int = 1
    """Copies of the model that train on different rollouts of a step."""
    tensor_parallel: int = 1
    """GPUs that share each layer."""
    pipeline_parallel: int = 1
    """Pipeline stages, each with a part of the layers."""
    micro_batch: int = 4
    """Simulated: rollouts of one data-parallel rank in one forward and backward pass."""
    max_tokens_per_pass: int = 16384
    """Maximum tokens of a data-parallel rank in one forward and backward pass, padding included;
    its context ranks share them. A longer rollout has a pass of its own.
    """
    max_tokens_per_scoring_pass: int | None = None
    """Simulated: the same for passes that only compute log-probabilities (verl's
    log_prob_max_token_len_per_gpu, NeMo-RL's logprob_mb_tokens). They keep nothing for a backward
    pass, so they can be larger. Absent: `max_tokens_per_pass`.
    """
    context_parallel: int = 1
    """Context ranks: each computes an equal share of the tokens and work of every sequence. ZeRO
    counts them as data-parallel ranks. `execute` needs backend fsdp2, packed passes and
    `context_exchange` all-gather.
    """
    context_exchange: ContextExchange = "ring"
    """How context ranks attend to each other's tokens; only all-gather is executed. ring: keys and values pass from
    rank to rank while attention computes (Megatron's p2p, ring attention). all-gather: keys and
    values are gathered first (Llama 3). all-to-all: each rank gets all tokens for its share of
    the heads (Ulysses, in verl and DeepSpeed).
    """
    expert_parallel: int = 1
    """Ranks over which the experts of a mixture are sharded. They are also data-parallel, context
    and tensor ranks.
    """
    expert_tensor_parallel: int | None = None
    """Simulated: ranks that share each expert (Megatron's expert_tensor_parallel_size).
    `expert_parallel` times this number of ranks is folded into data-parallel, context and tensor
    ranks. Absent: 1 if `expert_parallel` is above 1, else `tensor_parallel`.
    """
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: what data-parallel ranks shard. 0: nothing. 1: the optimizer. 2: also gradients,
    reduced in every pass. 3: also weights, gathered for every pass (FSDP's full shard). With
    pipeline stages, 2 and 3 are simulated as in FSDP2, for every pass. DeepSpeed rejects that
    combination, and plans try it only if `plan.zero` says so.
    """
    sharding: Sharding = "fsdp2"
    """Simulated: what shards weights with `zero = 3`. fsdp2 (PyTorch's fully_shard): each parameter on
    its own; its float32 shard is cast while it is gathered. fsdp: flat parameters; its peak memory is
    7.5 % higher (torchtitan docs/fsdp.md, Llama 7B on 8 H100). deepspeed: a 16-bit shard beside the
    float32 one.
    """
    reshard_after_forward: bool = True
    """With `zero = 3`, whether gathered weights are freed after the forward pass and gathered again
    for the backward pass; backend fsdp2 executes both. false: they stay in between, as in FSDP's
    SHARD_GRAD_OP: more memory and one gather less.
    """
    shard_ranks: int | None = None
    """With `zero = 3`, adjacent data-parallel and context ranks that shard one copy of the weights, a
    divisor of their number. Each such group has a copy, and groups sum their gradients after every
    pass: hybrid sharding (HSDP; verl's fsdp_size). Fewer ranks gather within a node, and need more
    memory. Backend fsdp2 executes it. Absent: all ranks shard one copy.
    """
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Simulated: format in which gradients of micro-batches add up, and are reduced over ranks.
    bfloat16: NeMo-RL's Megatron (grad_reduce_in_fp32 false).
    """
    master_weights: Literal["float32", "remainders"] = "float32"
    """Simulated: what the optimizer keeps of float32 weights, beside 16-bit ones. remainders: only the
    16 bits that bfloat16 weights lack, 2 bytes a parameter instead of 4 (Megatron's
    use_precision_aware_optimizer with store_param_remainders, as in NeMo-RL).
    """
    offload_reference: bool = False
    """Simulated: keep the weights of the reference model in host memory. Its pass swaps them with
    those of the actor, as in NeMo-RL and slime. `offload` does so with every model. `execute`
    keeps the reference where the actor is.
    """
    virtual_stages: int = 1
    """Simulated: model slices of each pipeline stage (Megatron's interleaved schedule)."""
    recompute: Recompute = "full"
    """What the backward pass recomputes (executed on GPUs, selective as mlp; a CPU keeps
    everything). full: whole layers, of which only the input is kept. selective: norms and
    activations of MLPs. mlp: norms and whole MLPs, including experts and their dispatch. none:
    only attention scores, which flash attention never keeps.
    """
    sequence_parallel: bool = True
    """Simulated: whether tensor ranks split the tokens of norms and residuals (Megatron's
    sequence_parallel). Otherwise every rank has all of them, which takes memory and time, as by
    default in NeMo-RL's DTensor back end.
    """
    kernels: KernelFusion = "eager"
    """Simulated: how elementwise operations run. fused: all fused (Transformer Engine,
    torch.compile), as in tuned pretraining. uncompiled: only attention and norms are fused.
    eager: one operation after the other, as in most RL trainers (prime-rl's benchmarks, and the
    stage times that RLinf publishes for itself and verl).
    """
    logits: Logits | None = None
    """How the loss uses logits. eager: all logits of a pass with float32 copies and gradients (16
    bytes each), which move as often as with kernels that are not fused. fused: one kernel for the
    loss (4 bytes each: Megatron, flash-attn); executed as chunked, which holds less. chunked: 1,024
    tokens at a time (prime-rl's RL trainer, Liger). Absent: fused if `kernels` is fused, else eager.
    """
    packing: Packing = "packed"
    """packed: rollouts of a pass are concatenated; otherwise they are padded to the longest.
    Executed, packing replaces the model's attention by our packed implementation. Architectures
    that do not allow this are rejected.
    """
    order: Literal["sorted", "arrival"] = "sorted"
    """Simulated: how rollouts of a command go to ranks and micro-batches. sorted: by falling
    length. arrival: as they came.
    """
    routing: Literal["natural", "balanced"] = "natural"
    """Simulated: natural: the router of a mixture chooses freely. balanced: every expert gets the
    same number of tokens, as benchmarks force it.
    """
    dispatch: Literal["all-to-all", "deduplicated"] = "all-to-all"
    """Simulated: how tokens go to expert ranks. all-to-all: one copy for each expert. deduplicated:
    one copy for each node and GPU (DeepEP, HybridEP).
    """
    overlaps_dispatch: bool = False
    """Simulated: whether the all-to-all overlaps with another micro-batch (Megatron's EP overlap,
    DualPipe).
    """
    offload: bool = False
    """Models take turns on the GPUs, and wait in host memory. If there is only one model, its
    optimizer waits there between steps; backend fsdp2 executes that.
    """
    offload_to: OffloadTarget = "host"
    """Simulated: where `offload` keeps the optimizer. nvme: on the drives of its node, and the CPU
    makes the step (DeepSpeed's ZeRO-Infinity). Each step reads and writes 16 bytes for every
    parameter. Needs `zero = 3`. Idle models wait in host memory either way.
    """
    efficiency: float | None = None
    """Simulated: your measured share of peak FLOP/s in forward and backward passes, including
    recomputation and collectives. Where absent, the profiles decide.
    """
    backend: TrainerBackend = "torch"
    """Executed. torch: all weights and optimizer states on every data-parallel rank (`zero = 0`
    with several ranks). deepspeed: sharded by `zero`. fsdp2: sharded by PyTorch's FSDP2 (`zero = 3`
    with several ranks), also with `context_parallel`, and with `tensor_parallel` for dense models.
    """
    start_time: Duration = Duration(0.0)
    """Simulated: seconds until a started trainer is ready."""
    resize: tuple[TrainerResize, ...] = ()
    """Changes of `data_parallel` during the run, in order of steps."""
    borrows: bool = False
    """Whether the GPUs of all replicas join as data-parallel ranks while nothing is left to generate for the
    next step, if this saves more time than the switches take. They return after the step. Needs
    `zero = 0` and replicas in the trainer's pool. Executed by backend torch with launcher local.
    """
    rank_start_time: Duration | None = None
    """Simulated: seconds until an added rank has its process, its libraries and an empty model. The trainer
    waits for it. Absent: `start_time`.
    """

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Data-parallel ranks from a step on, as (first step, ranks); step 0 is the size at the start."""
        changes = [(each.step, each.data_parallel) for each in self.resize]
        return [(0, self.data_parallel), *changes]

    @property
    def largest(self) -> TrainerConfig:
        """The trainer with the most ranks that it ever has by its run file."""
        return self.with_ranks(max(ranks for _, ranks in self.sizes))

    def with_ranks(self, data_parallel: int) -> TrainerConfig:
        """Return the trainer with another number of data-parallel ranks, and without later changes."""
        found: TrainerConfig = msgspec.structs.replace(self, data_parallel=data_parallel, resize=())
        return found

    @property
    def steps_on_nvme(self) -> bool:
        """Whether the optimizer is on NVMe drives, and CPUs make its steps."""
        return self.offload and self.offload_to == "nvme"

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.copies * self.tensor_parallel * self.pipeline_parallel

    @property
    def copies(self) -> int:
        """Ranks that hold the same non-expert weights, and shard by `zero`."""
        return self.data_parallel * self.context_parallel

    @property
    def scorer(self) -> TrainerConfig:
        """The trainer, with the tokens of passes that only score as those of all passes."""
        most = self.max_tokens_per_scoring_pass
        return self if most is None else msgspec.structs.replace(self, max_tokens_per_pass=most)

    @property
    def shards(self) -> int:
        """Ranks over which `zero` shards one copy of the non-expert weights, gradients or optimizer."""
        return self.shard_ranks or self.copies

    @property
    def ranks_alike(self) -> int:
        """Ranks, next to each other, that train on the same rollouts: tensor and context ranks."""
        return self.tensor_parallel * self.context_parallel

    @property
    def copies_of_norms(self) -> int:
        """Tensor ranks that have the same norms and residuals: all of them without sequence parallelism."""
        return 1 if self.sequence_parallel else self.tensor_parallel

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts; fewer than `copies` where experts are sharded."""
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
        """Whether experts are sharded differently from attention, so that tokens must be sent to them."""
        return self.expert_parallel > 1 or self.expert_slices != self.tensor_parallel

    @property
    def num_slices(self) -> int:
        """Slices of the model along the pipeline."""
        return self.pipeline_parallel * self.virtual_stages


class AlgorithmChanges(Section, frozen=True, kw_only=True):
    """Differences of a secondary trainer from `[algorithm]`. Absent keys are inherited, if its algorithm reads them."""

    name: AlgorithmName | None = None
    prompts_per_step: int | None = None
    dynamic_sampling: bool | None = None
    """Whether it skips groups of equal rewards. They are replaced only if the primary trainer skips
    them too.
    """
    max_gen_batches: int | None = None
    learning_rate: float | None = None
    optimizer: OptimizerConfig | None = None
    correction: CorrectionName | None = None
    correction_cap: float | None = None
    second_moment: float | None = None
    clip: float | None = None
    clip_high: float | None = None
    clip_dual: float | None = None
    kl_coefficient: float | None = None
    kl_estimator: KlEstimator | None = None
    kl_in: KlPlace | None = None
    entropy_coefficient: float | None = None
    loss_mean: LossMean | None = None
    mask_truncated: bool | None = None
    max_grad_norm: float | None = None
    beta: float | None = None
    critic_learning_rate: float | None = None
    gae_lambda: float | None = None


class SecondaryTrainerConfig(TrainerConfig, frozen=True, kw_only=True):
    """A trainer after the first `[[trainer]]`: it trains on the rollouts that the primary trainer's weights generate.

    It has its own copy of the policy, its own GPUs and its own pace. It delays neither generation
    nor other trainers.
    """

    name: str
    """Its name in reports."""
    algorithm: AlgorithmChanges = AlgorithmChanges()
    backlog: int = 2
    """Batches of complete groups of the primary trainer's size that may wait for it, because groups
    arrive in bursts. It loses older groups beyond that; they are counted.
    """
    counts_only: bool = False
    """Whether it has no model and only counts groups, on one CPU or GPU of its pool. This measures
    the cost of a subscriber.
    """
    every: int = 1
    """Take one of this many complete groups that pass the keys below, beginning with the first."""
    min_staleness: int | None = None
    """Minimum versions that the oldest token of a complete group must be behind the primary
    trainer.
    """
    max_staleness: int | None = None
    """Maximum versions that the oldest token of a complete group may be behind the primary trainer.
    """
    min_reward: float | None = None
    """Minimum mean reward of a group; simulated with `workload.group_rewards`."""
    max_reward: float | None = None
    """Maximum mean reward of a group."""
    families: tuple[str, ...] = ()
    """Families of prompts whose groups it takes: the "task" of a record, else its "family". Empty:
    all.
    """

    @property
    def takes_share(self) -> bool:
        """Whether it skips some complete groups."""
        bounds = (self.min_staleness, self.max_staleness, self.min_reward, self.max_reward)
        return self.every > 1 or bool(self.families) or any(each is not None for each in bounds)

    @property
    def filters_by_reward(self) -> bool:
        """Whether it takes groups by their rewards."""
        return self.min_reward is not None or self.max_reward is not None


class VerifierConfig(Section, frozen=True, kw_only=True):
    """Computes rewards."""

    scorer: str | None = None
    """Executed: the scorer of a completion, if there is only one; values as `scorer` of a
    `[[verifier.reward]]`.
    """
    reward: tuple[RewardConfig, ...] = ()
    """Executed: the scorers of a completion, if there are several or one has parameters."""
    workers: int = 1
    """Rollouts that CPU scorers process at a time; with `pool`, the number of replicas of the
    reward model.
    """
    pool: str | None = None
    """The pool whose GPUs run the reward model; where absent, scorers run on CPUs."""
    gpus_per_worker: int = 0
    """GPUs of each worker in `pool`; must be 1 for execution."""
    time: Duration = Duration(0.0)
    """Simulated: seconds of one worker for one rollout. With a reward model, 0 means that the costs
    decide.
    """
    start_time: Duration = Duration(0.0)
    """Simulated: seconds until a replica of the reward model is ready."""
    max_rollouts_per_call: int = 16
    """Maximum waiting rollouts that a replica of the reward model takes at once."""
    max_tokens_per_pass: int = 16384
    """Reward model: tokens in one forward pass, padding included. A longer rollout has a pass of
    its own.
    """
    time_limit: Duration = Duration(10.0)
    """Executed: time limit of a scorer for one completion. After it, the completion gets the
    minimum score.
    """
    memory_limit: Size = Size(1e9)
    """Executed: maximum memory for scoring one completion, in addition to the scorer itself."""

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
