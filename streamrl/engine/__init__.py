"""The control engine: every decision of a run, with no clock, no I/O and no randomness.

Theory of operation
===================

`Engine.handle(event, now) -> list[Command]` is the whole interface. A *world* calls it. The world tells the engine
what happened and when; the engine answers with what to do. The world carries the commands out, and each command ends
in an event that the world reports later. There are two worlds: `streamrl.sim` in simulated time and
`streamrl.executor` in real time. Both drive the same engine, so a simulated and a real run decide with the same code.

What comes in. An event is a fact: a rollout is generated, a reward is known, a replica is lost. `messages.py` has
all of them. The time comes with the event; the engine never asks for it. Lengths, prompts and seeds come in events
or from the run file.

What goes out. A command is an order that names all that it needs: rollout, group, replica, trainer, version. A world
never reads the engine's state. Every command ends in exactly one event, or in `Failed`. Ten commands have no event
of their own. `Abort` makes a running `Generate` end early, `Close` a running `Act`, and `EndEvaluation` each running
`Evaluate`. `Truncate`, `Take`, `Skip`, `Postpone`, `Drop`, `Resize` and `Stop` only change what the engine plans.

How it decides. The engine holds one `State` and a list of policies. `handle` enters the event into the state. Then it
asks each policy, in order of precedence, what to do now. Each command enters the state before the next is asked for,
so a policy sees the effect of those before it. Policies are level-triggered: they look at the state and say what
should be done, and keep no memory of their own. A policy that wants to look again later yields `WakeAt`.

Who may change the state. Only `State.observe` (an event) and `State.commit` (a command). Policies, worlds and reports
read it. `invariants.check` states what is true of every state, and runs after each event in the tests.

A rollout passes through these phases. Nothing else moves it.

| phase      | it begins when                          | entered by                    | indexed in          |
|------------|-----------------------------------------|-------------------------------|---------------------|
| waiting    | its prompt is drawn, or it is aborted   | `PromptsDrawn`, `Generated`   | `state.waiting`     |
| generating | a dispatch policy sends it to a replica | `Generate`                    | its replica         |
| finished   | its last token is sampled               | `Generated`                   | `state.unverified`  |
| verifying  | its reward is asked for                 | `Verify`                      | `num_verifying`     |
| ready      | its reward is known                     | `Verified`                    | each trainer's side |

A rollout is an episode. Without `[environment]` it has one turn. With it, an environment answers each turn, and the
rollout passes through two more phases (`environments.py`):

| phase      | it begins when                                | entered by                    | indexed in          |
|------------|-----------------------------------------------|-------------------------------|---------------------|
| queued     | its prompt is drawn, its turn has ended, or   | `PromptsDrawn`, `Generated`,  | `environments.queue`,|
|            | its environment is lost                       | `Failed`                      | `environments.to_act`|
| acting     | its environment is started, or answers a turn | `Act`                         | `num_acting`        |

`Observed` makes it wait for a replica again, until the episode is over. The staleness of an episode is that of its
oldest generated token. A lost environment is no result: the episode starts over, or repeats its actions.

With prefill replicas (`policies/disaggregation.py`) a rollout, or each of its turns, is generated in two parts. A prefill
replica computes its context and ends as "prefilled". Then a replica of another kind decodes it:

| phase      | it begins when                                | entered by                    | indexed in          |
|------------|-----------------------------------------------|-------------------------------|---------------------|
| prefilled  | a prefill replica has computed its context    | `Generated`                   | `state.prefilled`   |

A rollout on held-out prompts is no rollout of training. `[evaluation]` has its own commands (`evaluation.py`,
`policies/evaluation.py`), so it enters no group, batch, line or statistic. With an environment it is an episode that
passes through the states above the trainer's, under the same limits, and `Evaluate` generates its turns. The weights of its version stay on all
replicas until it has ended.

From there each trainer counts for itself (`trainer_side.py`). The group waits in the trainer's line. `Take` puts it
into the batch of a step, `Score` and `Train` compute it, and `Step` makes the next policy version. A group leaves the
state when no trainer may still train on it: trained, skipped or dropped with a reason. So each rollout is trained on
once, or its reason is in the record.

| object    | states                                        | changed by                                            |
|-----------|-----------------------------------------------|-------------------------------------------------------|
| replica   | starting, serving, loading, must load, gone   | `StartReplica`, `ReplicaStarted`, `LoadWeights`, `WeightsLoaded`, `ReplicaLost`, `StopReplica` |
| trainer   | starting, idle, working, saving, resizing, away, lost | `StartTrainer`, `TrainerStarted`, `Score`, `Train`, `Step`, `SaveCheckpoint`, `ResizeTrainer`, `TrainerResized`, `TrainerLost` |
| weights   | current, pushing, pushed                      | `Step`, `PushWeights`, `WeightsPushed`                |
| run       | not started, running, stopping, finished      | `RunStarted`, `Stop`, `Interrupted`, the last `Stepped` |

Rules that hold for a whole run:

1. The same run file, seed and events give the same commands, byte for byte. Policies iterate lists and dicts, never
   sets, and break ties by id. So a recorded run replays through a fresh engine (`trace.replay`).
2. Commands to one replica take effect in order. A rollout sent after `LoadWeights` starts under that version or newer.
3. What may start (admission) and what is trained next (consumption) are two policies. Admission alone does not bound
   staleness; in-order consumption keeps the bound, greedy consumption breaks it.
4. A decision costs O(log n) in rollouts and replicas. A policy never scans history; each question has an index.
5. Trainer 0 is the primary trainer: replicas load its versions. Secondary trainers read the same groups at their own
   pace and delay nobody.

Where to look:

| question                                   | file                                        |
|--------------------------------------------|---------------------------------------------|
| which events and commands there are        | `messages.py`                               |
| what the engine knows                      | `state.py`, `entities.py`, `fleet.py`, `trainer_side.py` |
| which policies a run has, in which order   | `systems.py`; presets by name in `presets.py` |
| how an episode has several turns           | `environments.py`, `policies/environments.py` |
| how a version is evaluated                 | `evaluation.py`, `policies/evaluation.py`   |
| how one decision is made                   | `policies/`, one idea a file                |
| what a world must do                       | `world.py`                                  |
| how a run is recorded and replayed         | `trace.py`                                  |
"""
