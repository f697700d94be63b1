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
SkewObjective = Literal["max", "sum", "drain"]
TailBatchingName = Literal["none", "defer"]
MigrationName = Literal["none", "consolidate", "overrun"]
ResizeName = Literal["keep", "adjust"]
OverStalenessName = Literal["wait", "drop"]
LeftOverName = Literal["drop", "keep"]
ConcurrencyName = Literal["fixed", "kv-pressure"]
LeaderLoss = Literal["restart", "promote"]
SyncMode = Literal["full", "lora", "delta"]


class PoliciesConfig(Section, frozen=True, kw_only=True):
    """A system by name; each policy may be replaced by name."""

    system: SystemName = "stream-async"
    max_staleness: float | int | None = None
    """Steps that generation may be ahead of training; a fraction is that part of a step's prompts, rounded down to
    whole groups."""
    sync_every: int = 1
    """Steps from one push of weights to the next: replicas load the versions that are multiples of it, and a rollout
    may be that many versions less one staler than `max_staleness` alone lets it."""
    over_staleness: OverStalenessName = "wait"
    """What becomes of a group that would be trained on past the bound. wait: with strict-fifo consumption none is, as
    a step waits for its groups, and greedy lets it be; drop: with greedy it is given up, and another one is drawn."""
    oversampling: float = 1.0
    """Prompts that are drawn for a step, over those that it is made of: it takes the groups that are done first. Needs
    greedy consumption."""
    left_over: LeftOverName = "drop"
    """What becomes of the groups that oversampling leaves over once a step has all it is made of. drop: they are
    aborted and given up; keep: what they have is kept, and they go on for the next step, under its version."""
    waits_for_whole_batches: bool | None = None
    """Whether the prompts of a batch start only once the batch before is generated."""
    dispatch: DispatchName | None = None
    group_placement: GroupPlacement = "split"
    """Whether the rollouts of a group may go to different replicas, or share one and their prompt's prefill."""
    tail_share: float = 0.2
    """Share of a step's rollouts that skewness-aware dispatch gives replicas of their own (the paper's alpha)."""
    skew_objective: SkewObjective = "drain"
    """What skewness-aware dispatch makes smallest. drain: the longer of both parts, side by side, as batches
    shrink, and no split where it gains less than 3 %; max: the same by StreamRL's latency model, always split,
    which on few replicas is slower than dealing at random; sum: of both parts, as its paper prints it."""
    order: OrderName | None = None
    streaming: StreamingName | None = None
    consumption: ConsumptionName | None = None
    weight_sync: WeightSyncName | None = None
    """between-batches: each replica loads when its share of a batch is done, and then begins the next one's."""
    tail_batching: TailBatchingName = "none"
    """defer: of the prompts of every `tail_every` steps those expected to be longest make up the last one, so
    that the others have no stragglers; needs a ranker, and changes the order of the data (RollPacker)."""
    tail_every: int = 3
    """Steps of which one takes the longest prompts, where `tail_batching` is defer."""
    learns_from_siblings: bool = False
    """Whether a rollout that waits is expected to be as long as its siblings were that finished; then replicas
    get no more than they run, and one rollout of each group goes first. Pays where `max_running` is small."""
    concurrency: ConcurrencyName = "fixed"
    """kv-pressure: a replica is sent no more at a time than its KV cache holds by the lengths seen lately, more while it
    hardly preempts and less while it often does, `rollout.max_running` at most (as prime-rl's
    `orchestrator.concurrency`); the others wait in the engine."""
    migration: MigrationName = "none"
    """consolidate: near the end of a step, rollouts that share a batch move to replicas that stand idle; overrun:
    with skewness-aware dispatch, one that outgrows what the others were expected to take moves to the tail's replicas."""
    context_time: float | None = None
    """Seconds for each token of context that a moved rollout computes again, or that is sent
    (`rollout.migration_transfer`); filled in like `latency`."""
    latency: tuple[tuple[int, float], ...] | None = None
    """Seconds of a decode step by batch, such as [[1, 0.008], [256, 0.022]], for policies that reckon with
    them; `simulate` and `execute` fill it in from the costs where it is absent."""
    resize: ResizeName = "keep"
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
    """Failures of one rollout after which its group is dropped; of pushes, or checkpoints, in a row after which the run
    stops."""
    max_restarts: int = 4
    """Lost replicas that are replaced before the run stops."""
    on_leader_loss: LeaderLoss = "restart"
    """What becomes of a leading trainer that is lost. restart: it begins again at its checkpoint, and once that was so
    `max_restarts` times `promote` takes its place, or the run stops; promote: that one does at once."""
    promote: str | None = None
    """Name of the trainer that follows whose weights replicas load from then on."""
    max_dropped_groups: int = 64
    """Groups dropped in a row, none complete between them, after which the run stops."""
    max_failures_per_minute: int = 10_000
    """Failures of rollouts and rewards within a minute, those that a lost replica brings left out, after which the
    run stops."""
    max_step_time: Duration = Duration(7 * SECONDS_PER_DAY)
    """Longest time without a step, after which the run stops at whatever happens next. A week is longer than any step
    that somebody waits for, or simulates to learn that nobody would: set it by what your steps take."""

    @property
    def shares_gpus(self) -> bool:
        """Whether generation and training take turns on the same GPUs."""
        return self.system == "colocated"

    @property
    def follows_pressure(self) -> bool:
        """Whether the places of a replica follow the pressure on its KV cache, which its world then tells."""
        match self.concurrency:
            case "fixed":
                return False
            case "kv-pressure":
                return True
            case _:
                assert_never(self.concurrency)


class SyncConfig(Section, frozen=True, kw_only=True):
    """What a weight synchronisation sends, and how."""

    mode: SyncMode = "full"
    """full: all weights; lora: adapters alone; delta: indices and values of what the step changed."""
    backend: Literal[
        "broadcast-tree", "nccl-broadcast", "nccl-buckets", "checkpoint-engine", "nccl-reshard"
    ] = "broadcast-tree"
    """Simulated: who moves it, as measured in profiles/sync; broadcast-tree adds nothing to what the wires need. A `framework.name`
    whose own way was measured fills it in."""
    bucket_size: Size = Size(1e9)
    """Simulated: most bytes that are sent in one piece; pieces follow each other through gather, link and broadcast."""
    lora_rank: int = 32
    """Rank of the adapters on every linear layer of attention and MLP."""
    merge_adapters: bool | None = None
    """Mode lora: whether replicas load whole weights that adapters were merged with, or compute with the adapters beside the
    weights that the run began with, as vLLM can and does by default."""
    changed_share: float = 0.02
    """Simulated: share of the values that one step changes in 16 bits: about 1 % at learning rates up to 3e-6 (PULSE,
    arXiv 2602.03839), 2.1 to 2.6 % for a dense 72B (github.com/verl-project/verl issue 7060)."""
    wire: Literal["chunks", "gloo"] = "chunks"
    """Executed, where weights go over relays. chunks: pieces go from relay to relay by way of the process that decides;
    gloo: the trainer's relay broadcasts to one far relay, and that one to all others, over torch's gloo."""
    quantise_at: Literal["trainer", "replica"] = "trainer"
    """Simulated: who brings weights to a narrow `rollout.dtype`: the trainer before each push, so that fewer bytes are
    sent, or each replica while it loads them."""
    anchor_every: int = 20
    """Executed, mode delta: every so many synchronisations a place is sent all weights; 1: always."""

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the adapters that the leading trainer learns; None where it learns all weights."""
        return self.lora_rank if self.mode == "lora" else None
