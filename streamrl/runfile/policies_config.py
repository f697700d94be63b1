"""The sections `[policies]` and `[sync]` of a run file, and the name of every policy that can be chosen."""

from __future__ import annotations

from typing import Literal, assert_never

from streamrl.runfile.dispatch_choice import DispatchName
from streamrl.runfile.section import Section
from streamrl.runfile.units import SECONDS_PER_DAY, Duration, Size

SystemName = Literal[
    "colocated", "disaggregated", "stream-sync", "one-step-async", "stream-async", "fully-async"
]
OrderName = Literal["fifo", "longest-first"]
StreamingName = Literal["whole-batch", "stream"]
ConsumptionName = Literal["strict-fifo", "greedy"]
WeightSyncName = Literal[
    "barrier", "drain-then-load", "load-in-flight", "abort-and-resume", "between-batches"
]
GroupPlacement = Literal["split", "together"]
TurnPlacement = Literal["sticky", "cache-aware", "any"]
SkewObjective = Literal["max", "sum", "drain"]
TailBatchingName = Literal["none", "defer"]
MigrationName = Literal["none", "consolidate", "overrun"]
ResizeName = Literal["keep", "adjust"]
OverStalenessName = Literal["wait", "drop"]
LeftOverName = Literal["drop", "keep"]
ConcurrencyName = Literal["fixed", "kv-pressure"]
LeaderLoss = Literal["restart", "promote"]
SyncMode = Literal["full", "lora", "delta"]
ALPHA_PER_RANK = 2.0
"""LoRA's alpha divided by the rank where a run file has no alpha: a usual value."""


class PoliciesConfig(Section, frozen=True, kw_only=True):
    """A system by name; each policy may be replaced by name."""

    system: SystemName = "stream-async"
    """Preset of policies: how generation, training and weight sync take turns. colocated: on the
    same GPUs, by turns. disaggregated: on GPUs of their own, by turns. stream-sync: training begins
    as rollouts arrive. one-step-async: generation is one whole batch ahead. stream-async: it is one
    step ahead, and weights load while replicas drain. fully-async: it is `max_staleness` steps
    ahead, and weights load in flight.
    """
    max_staleness: float | int | None = None
    """Steps that generation may be ahead of training. A fraction is that part of a step's prompts,
    rounded down to whole groups.
    """
    sync_every: int = 1
    """Steps from one push of weights to the next. With k, replicas load only every k-th version,
    and a rollout may be k - 1 versions staler than `max_staleness` alone allows.
    """
    over_staleness: OverStalenessName = "wait"
    """What happens to a group that would pass the staleness bound. wait: with strict-fifo
    consumption no group passes it, because a step waits for its groups; with greedy consumption
    the group is trained on anyway. drop: with greedy consumption the group is dropped and
    another one is drawn.
    """
    oversampling: float = 1.0
    """Prompts drawn for a step, as a multiple of the prompts that it trains on. The step takes the
    groups that finish first. Needs greedy consumption.
    """
    left_over: LeftOverName = "drop"
    """What happens to the surplus groups of oversampling once a step is full. drop: abort and drop
    them. keep: keep their tokens and continue them for the next step, under its version.
    """
    waits_for_whole_batches: bool | None = None
    """Whether the prompts of a batch start only once the batch before is generated."""
    dispatch: DispatchName | None = None
    """Which replica gets the next rollout; the one with the fewest where absent."""
    group_placement: GroupPlacement = "split"
    """Whether the rollouts of a group may go to different replicas, or share one and their prompt's prefill."""
    turn_placement: TurnPlacement = "sticky"
    """Which replica generates the next turn of an episode. sticky: that of the turn before, whose
    prefix cache may have its context, unless its weights are too old. cache-aware: the same, unless
    that replica is overloaded: it has more than 1.5 times the turns of the least loaded replica, and
    at least `turn_imbalance` more. Then, and with any, `dispatch` decides.
    """
    turn_imbalance: int = 64
    """Fewest turns by which an overloaded replica is ahead of the least loaded one, with
    `turn_placement = "cache-aware"`. The default is that of SGLang's router.
    """
    tail_share: float = 0.2
    """Share of a step's rollouts that skewness-aware dispatch gives replicas of their own (the paper's alpha)."""
    skew_objective: SkewObjective = "drain"
    """What skewness-aware dispatch minimises. drain: the longer of the two parts while batches
    shrink; no split if it gains less than 3 %. max: the same with StreamRL's latency model,
    always split; on few replicas this is slower than random dispatch. sum: the sum of both
    parts, as printed in its paper.
    """
    order: OrderName | None = None
    """Order in which rollouts start. fifo: as they were drawn. longest-first: the longest expected
    ones first, which needs a ranker. The default of the system where absent.
    """
    streaming: StreamingName | None = None
    """whole-batch: training begins when a batch is complete. stream: it begins with the first
    rollouts. The default of the system where absent.
    """
    consumption: ConsumptionName | None = None
    """Which groups a step trains on. strict-fifo: those drawn for it. greedy: the groups that
    finish first. The default of the system where absent.
    """
    weight_sync: WeightSyncName | None = None
    """between-batches: each replica loads when its share of a batch is done, and then begins the next one's."""
    tail_batching: TailBatchingName = "none"
    """defer: group `tail_every` steps, and move the prompts expected to be longest to the last of
    them. The other steps then have no stragglers. Needs a ranker, and changes the order of the
    data (RollPacker).
    """
    tail_every: int = 3
    """Steps of which one takes the longest prompts, where `tail_batching` is defer."""
    learns_from_siblings: bool = False
    """Whether a rollout that waits is expected to be as long as its siblings were that finished; then replicas
    get no more than they run, and one rollout of each group goes first. Pays where `max_running` is small."""
    concurrency: ConcurrencyName = "fixed"
    """kv-pressure: limit the rollouts sent to a replica to what its KV cache holds at recent
    lengths, at most `rollout.max_running`. The limit grows while the replica hardly preempts and
    falls while it often does (as prime-rl's `orchestrator.concurrency`). Other rollouts wait in
    the engine.
    """
    migration: MigrationName = "none"
    """consolidate: near the end of a step, move rollouts that share a batch to idle replicas.
    overrun: with skewness-aware dispatch, move a rollout that exceeds the expected length of the
    regular part to a tail replica.
    """
    context_time: float | None = None
    """Seconds for each token of context that a moved rollout computes again, or that is sent
    (`rollout.migration_transfer`). Filled in from the costs, like `latency`.
    """
    latency: tuple[tuple[int, float], ...] | None = None
    """Seconds of a decode step by batch size, such as [[1, 0.008], [256, 0.022]], for policies that
    estimate time. Where absent, `simulate` and `execute` fill it in from the costs.
    """
    resize: ResizeName = "keep"
    """adjust: add replicas while generation lags behind training by more than they gain (StreamRL's
    dynamic adjustment). The pool of `rollout` must have free GPUs for them.
    """
    resize_unit: int | None = None
    """Replicas added at once. Where absent, as many as fit a node."""
    max_replicas: int | None = None
    """Maximum number of replicas. Where absent, as many as the pool has GPUs for."""
    resize_window: int = 3
    """Steps whose median time decides, so that one long batch does not."""
    shrink_after: int | None = None
    """Consecutive steps in which generation would be the faster side even with `resize_unit` fewer
    replicas. After them that many replicas are released. Where absent, replicas are never
    released.
    """
    max_attempts: int = 3
    """Failures of one rollout after which its group is dropped. Also: consecutive failures of
    pushes or checkpoints after which the run stops.
    """
    max_restarts: int = 4
    """Lost replicas that are replaced before the run stops."""
    on_leader_loss: LeaderLoss = "restart"
    """What happens when the primary trainer is lost. restart: it restarts from its checkpoint;
    after `max_restarts` restarts the trainer named by `promote` replaces it, or the run stops.
    promote: that trainer replaces it at once.
    """
    promote: str | None = None
    """Name of the secondary trainer that replaces the primary one: replicas then load its weights.
    """
    max_dropped_groups: int = 64
    """Consecutive dropped groups after which the run stops. A completed group resets the count."""
    max_failures_per_minute: int = 10_000
    """Failures of rollouts and rewards within one minute after which the run stops. Failures caused
    by a lost replica do not count.
    """
    max_step_time: Duration = Duration(7 * SECONDS_PER_DAY)
    """Longest time without a step. After it, the run stops at the next event. The default, a week,
    is longer than any useful step: set it from your own step times.
    """

    @property
    def shares_gpus(self) -> bool:
        """Whether generation and training take turns on the same GPUs."""
        return self.system == "colocated"

    @property
    def follows_pressure(self) -> bool:
        """Whether the number of rollouts on a replica follows the pressure on its KV cache. The world then reports that pressure."""
        match self.concurrency:
            case "fixed":
                return False
            case "kv-pressure":
                return True
            case _:
                assert_never(self.concurrency)


class SyncConfig(Section, frozen=True, kw_only=True):
    """What a weight sync sends, and how."""

    mode: SyncMode = "full"
    """full: all weights; lora: only the adapters; delta: indices and values of the weights that the
    step changed.
    """
    backend: Literal[
        "broadcast-tree",
        "nccl-broadcast",
        "nccl-buckets",
        "nccl-packed",
        "checkpoint-engine",
        "nccl-reshard",
    ] = "broadcast-tree"
    """Simulated: which library moves the weights, as measured in profiles/sync. broadcast-tree: one
    sender at 12.65 GB/s, the median of measured ones (4.84 to 90.8 GB/s), then pipelined trees. A
    `framework.name` whose own sync was measured fills it in.
    """
    bucket_size: Size = Size(1e9)
    """Simulated: maximum bytes sent in one piece. Pieces are pipelined through gather, link and
    broadcast.
    """
    lora_rank: int = 32
    """Rank of the adapters on every linear layer of attention and MLP."""
    lora_alpha: float | None = None
    """Executed: LoRA's alpha. The product of the two adapters of a layer is multiplied by
    `lora_alpha / lora_rank`. Absent: twice the rank.
    """
    merge_adapters: bool | None = None
    """Mode lora: true: replicas load full weights with merged adapters. false: replicas compute
    with the adapters beside the initial weights, as vLLM does by default.
    """
    changed_share: float = 0.02
    """Simulated: share of the 16-bit values that one step changes. Measured: about 1 % at learning
    rates up to 3e-6 (PULSE, arXiv 2602.03839), 2.1 to 2.6 % for a dense 72B
    (github.com/verl-project/verl issue 7060).
    """
    wire: Literal["chunks", "gloo", "broadcast", "cuda-ipc"] = "chunks"
    """Executed. chunks: files in shared memory; to other machines, pieces go from relay to relay
    through the controller process. gloo: the trainer's relay broadcasts to one remote relay, and
    that one to all others, over torch's gloo. broadcast: the trainer's process sends to all
    replicas at once, over NCCL between GPUs and over gloo between CPUs. cuda-ipc: the same within
    one GPU that trainer and replica share.
    """
    quantise_at: Literal["trainer", "replica"] = "trainer"
    """Simulated: who converts weights to a narrow `rollout.dtype`. trainer: before each push, so
    that fewer bytes are sent. replica: while it loads them.
    """
    anchor_every: int = 20
    """Executed, mode delta: every n-th sync sends all weights instead of a delta. 1: every sync."""

    @property
    def is_direct(self) -> bool:
        """Whether the trainer's process sends to the processes of replicas, without files or relays."""
        return self.wire in ("broadcast", "cuda-ipc")

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the adapters that the primary trainer trains; None where it trains all weights."""
        return self.lora_rank if self.mode == "lora" else None

    @property
    def adapter_alpha(self) -> float:
        """LoRA's alpha: the adapters' product is multiplied by alpha / rank."""
        return ALPHA_PER_RANK * self.lora_rank if self.lora_alpha is None else self.lora_alpha
