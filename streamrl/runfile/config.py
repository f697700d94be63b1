"""The run file as frozen structs: one file that simulate, plan and execute all read.

`load_run` reads TOML, applies `--set` overrides, and raises `ValueError` with the key's path and value
where anything is wrong. Paths in a run file are relative to the file.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.runfile.failures_config import FailuresConfig
from streamrl.runfile.plan_config import DispatchName, PlanConfig, SyncMode, SystemName
from streamrl.runfile.section import Section
from streamrl.runfile.units import Bandwidth, Duration, Size


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which model is post-trained: `name` of a profile, or `path` of a Hugging Face directory."""

    name: str | None = None
    """Name of a model in profiles/models, such as "qwen2.5-7b"."""
    path: str | None = None
    """A Hugging Face directory with config.json, tokenizer and weights."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights that generate, of activations and of the KV cache."""


class PoolConfig(Section, frozen=True, kw_only=True):
    """Machines of one kind in one place."""

    gpu: str
    """Name of a GPU in profiles/gpus; "cpu" counts worker processes of this machine as GPUs."""
    nodes: int = 1
    gpus_per_node: int = 8
    price: float | None = None
    """Dollars per GPU-hour; the GPU's own figure where absent."""
    transport: Literal["tcp", "rdma"] = "rdma"
    """What its nodes speak to each other; over tcp weights reach a GPU through host memory."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


class LinkConfig(Section, frozen=True, kw_only=True):
    """What connects two pools."""

    between: tuple[str, str]
    bandwidth: Bandwidth
    """One direction, shared by everything that crosses: "80 Gbps", "400 GB/s"."""
    latency: Duration = Duration(0.0)
    """One way: "20 ms"."""
    transport: Literal["tcp", "rdma"] = "tcp"
    """Its efficiency and latency are in profiles/transports."""


class ClusterConfig(Section, frozen=True, kw_only=True):
    """The pools and the links between them; within a pool the GPU's own network counts."""

    pools: dict[str, PoolConfig]
    links: list[LinkConfig] = msgspec.field(default_factory=list)


class RolloutConfig(Section, frozen=True, kw_only=True):
    """The generation side."""

    pool: str
    replicas: int
    tensor_parallel: int = 1
    expert_parallel: int = 1
    """1, or tensor_parallel: then each GPU of a replica holds whole experts of a mixture."""
    chunked_prefill: bool = True
    """Simulated: whether prefill rides on decode steps, as in vLLM, or halts them."""
    max_running: int = 256
    """Most rollouts that a replica decodes at once; KV memory may allow fewer."""
    max_tokens: int
    """Most output tokens of a rollout."""
    temperature: float = 1.0
    memory_utilization: float = 0.9
    """Share of GPU memory for weights and KV cache."""
    backend: Literal["transformers"] = "transformers"
    shares_prefixes: bool = True
    """Whether the prompt of a group is prefilled and kept once for all of it, as vLLM and SGLang do;
    `execute` with transformers does not: keys computed under old weights would be attended to by new ones."""
    migration_transfer: Literal["recompute", "kv"] = "recompute"
    """How a rollout that `policies.migration` moves gets its KV cache: computed again, or (simulated) sent
    over the network, within a node over NVLink."""
    start_time: Duration = Duration(0.0)
    """Simulated seconds until a replica serves."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.tensor_parallel


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The training side."""

    pool: str
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    micro_batch: int = 4
    """Rollouts that one data-parallel rank takes in one forward and backward pass."""
    max_tokens_per_pass: int = 16384
    """Tokens in one forward and backward pass of a rank, padding included; a longer rollout has one of its own."""
    expert_parallel: int = 1
    """Ranks that share out the experts of a mixture; they are data-parallel and tensor ranks too."""
    zero: Literal[1, 3] = 1
    """ZeRO stage: what data-parallel ranks split. 1: the optimizer; 3: weights and gradients too, gathered
    for every pass (FSDP's full shard)."""
    recompute: Literal["none", "full"] = "full"
    """Simulated: full keeps the input of each layer and computes the layer again for its backward pass;
    none keeps all activations but attention scores, which flash attention never keeps."""
    offload: bool = False
    """Simulated: actor, critic and reference take turns on the GPUs, and wait in host memory."""
    efficiency: float | None = None
    """Simulated: share of peak FLOP/s in forward and backward passes, where you have measured yours;
    recomputation and collectives are then part of it. What the profiles give where absent."""
    backend: Literal["torch"] = "torch"
    start_time: Duration = Duration(0.0)
    """Simulated seconds until the trainer is up."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the trainer."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """What is optimised, and in which portions."""

    name: Literal["grpo", "dr-grpo", "rloo", "reinforce++", "ppo"] = "grpo"
    steps: int
    prompts_per_step: int
    group_size: int = 1
    """Rollouts of each prompt."""
    learning_rate: float = 1e-6
    correction: Literal["none", "token_tis", "seq_tis", "icepop", "decoupled"] = "token_tis"
    """How sampling from an older policy is corrected for."""
    clip: float = 0.2
    kl_coefficient: float = 0.0
    """Weight of the KL term against the initial policy; above 0 a reference model runs."""
    loss_mean: Literal["token", "rollout"] = "token"
    max_grad_norm: float = 1.0

    @property
    def trains_whole_groups(self) -> bool:
        """Whether an advantage needs every rollout of its group."""
        return self.name in ("grpo", "dr-grpo", "rloo")

    @property
    def has_critic(self) -> bool:
        """Whether a critic of the actor's size is trained beside it."""
        return self.name == "ppo"

    @property
    def has_reference(self) -> bool:
        """Whether the initial policy runs beside the actor."""
        return self.kl_coefficient > 0

    @property
    def needs_score(self) -> bool:
        """Whether rollouts need forward passes before their gradient."""
        return self.has_critic or self.has_reference or self.correction == "decoupled"

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one optimizer step."""
        return self.prompts_per_step * self.group_size


class LengthsConfig(Section, frozen=True, kw_only=True):
    """Where simulated output lengths come from."""

    kind: Literal["histogram", "empirical", "groups", "trace"]
    """histogram: bins of `start,end,density`; empirical: one length a row; groups: lengths by prompt,
    resampled whole; trace: what a recorded run generated, rollout by rollout."""
    source: str
    """A name in profiles/lengths, or the path of a CSV file (a trace: its JSONL file)."""
    scale: float = 1.0
    """Multiplies every length."""
    scale_to: float | None = None
    """What multiplies lengths in the last step, where they drift; in between the factor goes linearly."""
    drift_steps: int | None = None
    """The step that has `scale_to` first; the last of the run where absent."""
    prompt_tokens: int = 400
    """Tokens of a prompt where the source does not say."""
    ranker: Literal["none", "oracle", "recall", "scores", "history"] = "none"
    """What a rollout's expected length is: the mean of all (none), its true one (oracle), that with as much
    noise as `ranker_recall` allows, with the errors of `ranker_scores`, or the mean of its prompt's past."""
    ranker_recall: float = 0.87
    """recall@20% of a ranker of kind recall; 0.87 is StreamRL's (arXiv 2504.15930, Table 4)."""
    ranker_recall_to: float | None = None
    """Its recall at the end of the drift, where it goes stale."""
    ranker_correlation: float = 0.0
    """Share of its noise that the rollouts of a group have in common."""
    ranker_scores: str | None = None
    """Held-out scores of a real ranker: a CSV file with columns score and output_tokens."""
    ranker_history: int = 1
    """Past samples of each prompt that a ranker of kind history knows."""

    @property
    def names_a_file(self) -> bool:
        """Whether `source` is a path, not the name of a profile."""
        return "/" in self.source or "." in self.source


class WorkloadConfig(Section, frozen=True, kw_only=True):
    """What is generated: prompts for a real run, lengths for a simulated one."""

    prompts: str | None = None
    """A JSONL file with a "prompt" on each line, and what its verifier needs."""
    verifier: str | None = None
    """Name of the scorer: "exact", "math-verify" or "reasoning-gym"."""
    max_prompt_tokens: int = 2048
    informative_share: float = 1.0
    """Simulated share of rollouts with a non-zero advantage; without a KL term a trainer skips the others."""
    lengths: LengthsConfig | None = None


class VerifierConfig(Section, frozen=True, kw_only=True):
    """Who computes rewards."""

    workers: int = 1
    time: Duration = Duration(0.0)
    """Simulated seconds of one worker for one rollout."""
    time_limit: Duration = Duration(10.0)
    """Executed: seconds after which a completion that its scorer still works on gets reward 0."""
    memory_limit: Size = Size(1e9)
    """Executed: most memory that scoring one completion may take, beside the scorer itself."""


class SyncConfig(Section, frozen=True, kw_only=True):
    """What a simulated weight synchronisation sends, and how."""

    mode: SyncMode = "full"
    """full: all weights; lora: adapters alone; delta: indices and values of what the step changed."""
    backend: Literal[
        "broadcast-tree", "nccl-broadcast", "nccl-buckets", "checkpoint-engine", "nccl-reshard"
    ] = "broadcast-tree"
    """Who moves it, as measured in profiles/sync; broadcast-tree adds nothing to what the wires need."""
    bucket_size: Size = Size(1e9)
    """Most bytes that are sent in one piece; pieces follow each other through gather, link and broadcast."""
    lora_rank: int = 32
    """Rank of the adapters on every linear layer of attention and MLP."""
    changed_share: float = 0.02
    """Share of the values that one step changes in 16 bits: about 1 % at learning rates up to 3e-6 (PULSE,
    arXiv 2602.03839), 2.1 to 2.6 % for a dense 72B (github.com/verl-project/verl issue 7060)."""


class CostsConfig(Section, frozen=True, kw_only=True):
    """Where simulated seconds come from, beside what `profiles/` ships."""

    profile: str | None = None
    """A profile that `streamrl profile` measured for this model on this GPU: a TOML file."""
    backend: str | None = None
    """Whose operator tables make up decode and prefill, such as "sglang"; the GPU profile's own choice where
    absent."""
    generation_factor: float = 1.0
    """Simulated: how fast prefill and decode are, relative to what the profiles say: seconds are divided by
    it. For a framework slower than the engines that were measured: 0.5 takes twice as long."""
    training_factor: float = 1.0
    """Simulated: the same for score, train and the optimizer step."""


class PoliciesConfig(Section, frozen=True, kw_only=True):
    """A system by name; each policy may be replaced by name."""

    system: SystemName = "stream-async"
    max_staleness: int | None = None
    waits_for_whole_batches: bool | None = None
    """Whether the prompts of a batch start only once the batch before is generated."""
    dispatch: DispatchName | None = None
    group_placement: Literal["split", "together"] = "split"
    """Whether the rollouts of a group may go to different replicas, or share one and their prompt's prefill."""
    tail_share: float = 0.2
    """Share of a step's rollouts that skewness-aware dispatch gives replicas of their own (the paper's alpha)."""
    skew_objective: Literal["max", "sum", "drain"] = "drain"
    """What skewness-aware dispatch makes smallest. drain: the longer of both parts, side by side, as batches
    shrink, and no split where it gains less than 3 %; max: the same by StreamRL's latency model, always split,
    which on few replicas is slower than dealing at random; sum: of both parts, as its paper prints it."""
    order: Literal["fifo", "longest-first"] | None = None
    streaming: Literal["whole-batch", "stream"] | None = None
    consumption: Literal["strict-fifo", "greedy"] | None = None
    weight_sync: (
        Literal[
            "barrier", "drain-then-load", "load-in-flight", "abort-and-resume", "between-batches"
        ]
        | None
    ) = None
    """between-batches: each replica loads when its share of a batch is done, and then begins the next one's."""
    tail_batching: Literal["none", "defer"] = "none"
    """defer: of the prompts of every `tail_every` steps those expected to be longest make up the last one, so
    that the others have no stragglers; needs a ranker, and changes the order of the data (RollPacker)."""
    tail_every: int = 3
    """Steps of which one takes the longest prompts, where `tail_batching` is defer."""
    learns_from_siblings: bool = False
    """Whether a rollout that waits is expected to be as long as its siblings were that finished; then replicas
    get no more than they run, and one rollout of each group goes first. Pays where `max_running` is small."""
    migration: Literal["none", "consolidate"] = "none"
    """consolidate: near the end of a step, rollouts that share a batch move to replicas that stand idle."""
    context_time: float | None = None
    """Seconds for each token of context that a moved rollout computes again, or that is sent
    (`rollout.migration_transfer`); filled in like `latency`."""
    latency: tuple[tuple[int, float], ...] | None = None
    """Seconds of a decode step by batch, such as [[1, 0.008], [256, 0.022]], for policies that reckon with
    them; `simulate` and `execute` fill it in from the costs where it is absent."""
    resize: Literal["keep", "adjust"] = "keep"
    """adjust: more replicas while generation lags behind training by more than they gain (StreamRL's dynamic
    adjustment); the pool of `rollout` must have GPUs left for them."""
    resize_unit: int | None = None
    """Replicas that are added at once; as many as fit a node where absent."""
    max_replicas: int | None = None
    """Most replicas that there may be; as many as the pool has GPUs for where absent."""
    resize_window: int = 3
    """Steps whose median time decides, so that one long batch does not."""
    shrink_after: int | None = None
    """Steps in a row for which generation, also with a unit less, would be the faster side, after which that
    unit is given back; never where absent."""
    max_attempts: int = 3
    """Failures of one rollout after which its group is dropped."""
    max_restarts: int = 4
    """Lost replicas that are replaced before the run stops."""


class ExecuteConfig(Section, frozen=True, kw_only=True):
    """How a plan is run for real."""

    launcher: Literal["local", "in-process"] = "local"
    """local: a process for each replica and for the trainer; in-process: threads of this one."""
    output: str = "runs/run"
    """Run directory: trace, metrics, rollouts, checkpoints."""
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step is always saved."""
    threads: int = 1
    """CPU threads of each worker process."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": a GPU where there is one."""


class Run(Section, frozen=True, kw_only=True):
    """A whole run file."""

    seed: int = 0
    warm_up_steps: int = 1
    """Steps at the start that reported medians leave out."""
    model: ModelConfig
    cluster: ClusterConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    workload: WorkloadConfig = WorkloadConfig()
    verifier: VerifierConfig = VerifierConfig()
    sync: SyncConfig = SyncConfig()
    costs: CostsConfig = CostsConfig()
    policies: PoliciesConfig = PoliciesConfig()
    execute: ExecuteConfig = ExecuteConfig()
    plan: PlanConfig = PlanConfig()
    failures: FailuresConfig = FailuresConfig()

    @property
    def shares_gpus(self) -> bool:
        """Whether generation and training take turns on the same GPUs."""
        return self.policies.system == "colocated"

    @property
    def num_gpus(self) -> int:
        """GPUs of both sides, those that they share once."""
        both = (self.rollout.num_gpus, self.trainer.num_gpus)
        return max(both) if self.shares_gpus else sum(both)
