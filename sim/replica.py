"""A simulated replica: continuous batching of rollouts in a bounded KV cache.

Which queued rollouts join the batch depends on the KV cache (`streamrl.sim.kv_cache`).

Between two changes of the batch, every running rollout gains one token per decode step. So the time
of n steps has a closed form, and a rollout of any length costs only a few events:

    b rollouts with S context tokens:  n * a(b) + c * (n * S + b * n * (n - 1) / 2)

With an environment an attempt is one turn of an episode. The context of an episode stays in the
prefix cache while its environment acts (`streamrl.sim.prefix_cache`).

A prefill replica only prefills, in passes of one chunk, and keeps each context until a decode
replica has received it (`streamrl.sim.kv_transfer`). Its prefix cache keeps prompts too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import Any, TypeAlias

import simpy

from streamrl.engine.messages import (
    Command,
    Event,
    Finish,
    Generate,
    Generated,
    Lend,
    Lent,
    LoadWeights,
    TakeBack,
    TakenBack,
    WeightsLoaded,
)
from streamrl.hardware.memory import PREFILL_CHUNK
from streamrl.sim.costs.cache_transfer import HostCache
from streamrl.sim.kv_cache import Attempt, KvCache, choose_admission
from streamrl.sim.kv_transfer import Arrivals, Handover
from streamrl.sim.prefix_cache import PrefixCache
from streamrl.sim.world_interface import WorldInterface


def _prefix_cache(host: HostCache | None) -> PrefixCache:
    return PrefixCache(None if host is None else PrefixCache.in_host_memory(host.capacity))


ROUNDING = 1e-9
"""Share of a decode step by which a computed instant may miss the step's end in floating point."""
Emit: TypeAlias = Callable[[Event], None]
GIVE_UP_SHARE = 0.5
"""CPU time in which the controller ends an aborted rollout that a replica has begun and sends it to
another one, relative to that of a whole rollout, which is scored too. Measured with
`make bench-lending`: 13 returns took 1.9 ms for each running rollout, of which there were 7 to 64,
and no longer if up to 120 more waited in the queue. Steps took 1.5 times as long as alone, and the
profile's [handling] was 2.56 ms.
"""


class Replica:
    """One process: load weights, admit and prefill, decode until the batch changes, and repeat."""

    def __init__(
        self,
        around: WorldInterface,
        replica_id: int,
        version: int,
        kind: int = 0,
        emit: Emit | None = None,
        handover: Handover | None = None,
    ) -> None:
        """Start a replica of a kind with weights `version`; events go to `emit`, or directly to the world.

        `handover` has the contexts of prefill replicas, if the run has any.
        """
        self._env = around.env
        self._time = around.cores.time_of("generating")
        self._costs = around.costs.of_kind(kind)
        self._curve, self._padded_share = self._costs.decode, self._costs.padded_share
        self._rides_along = self._costs.rides_along
        self._lending = around.costs.lending
        self._handling, self._handling_time = (
            around.cores.time_of("handling"),
            around.costs.handling_time,
        )
        self._num_given_up = 0
        """Running rollouts that were aborted so that the trainer gets its GPUs back."""
        self._rollouts = around.rollouts
        self._emit = emit or around.emit
        rollout = around.run_file.replica_kinds[kind]
        self._max_running = rollout.max_running
        self._max_tokens = rollout.max_tokens
        self._shares_prefixes = around.run_file.of_kind(kind).shares_prefixes
        self.id = replica_id
        self.kind = kind
        self.version = version
        self._queue: list[tuple[int, int]] = []
        """Heap of (priority, rollout); aborted rollouts remain here but are no longer in
        `_queued`.
        """
        self._queued: dict[int, Attempt] = {}
        self._running: dict[int, Attempt] = {}
        self._finishing: list[tuple[int, int]] = []
        self._by_length: list[tuple[int, int]] = []
        """Heap of (-context tokens beyond the replica's step, rollout), used if contexts are
        padded.
        """
        self._has_turns = around.run_file.environment is not None
        self._handover = handover
        self._prefills = kind in around.run_file.rollout.prefill_kinds
        self._receiving: dict[int, Attempt] = {}
        """Rollouts whose contexts come from prefill replicas."""
        self._kept: dict[int, Attempt] = {}
        """Rollouts whose contexts are prefilled, until decode replicas have received them."""
        self._arrivals: Arrivals | None = None
        if handover is not None and not self._prefills:
            self._arrivals = Arrivals(
                handover, (replica_id, kind), self._notice, self._compute_again
            )
        own = self._costs.tokens_per_pass
        self._tokens_per_pass = min(own, PREFILL_CHUNK) if self._prefills else own
        self._reuses_contexts = self._has_turns or self._prefills
        is_kept = self._reuses_contexts and self._shares_prefixes
        unused = _prefix_cache(self._costs.host_cache) if is_kept else None
        self._cache = KvCache(self._costs.kv_capacity, unused=unused)
        self._admission = choose_admission(rollout)
        self._step = 0
        self._context = 0
        self._is_full = False
        self._freed_at = self._num_freed = 0
        """Last decode step in which rollouts ended, and how many ended in it."""
        self.has_stopped = False
        self._aborted: list[int] = []
        self.num_preempted = 0
        """Number of preemptions, because the cache was full."""
        self._num_reported = 0 if around.run_file.policies.follows_pressure else None
        """Preemptions that were already reported in events; None if no policy uses them."""
        self.recompute_time = 0.0
        """Seconds of prefill of tokens that rollouts had generated before."""
        self._change: LoadWeights | Lend | TakeBack | None = None
        self._idle: simpy.Event | None = None
        self._is_decoding = False
        self.process = self._env.process(self._run())

    # What the world asks for ----------------------------------------------------------------------

    def generate(self, command: Generate) -> None:
        """Queue a rollout."""
        drawn = self._rollouts[command.rollout]
        self._enqueue(Attempt.of(command, drawn, shares_prefixes=self._shares_prefixes))
        is_waiting = self._is_decoding or self._idle is not None
        if is_waiting and len(self._running) < self._max_running and not self._is_full:
            self._notice()

    def abort(self, rollout: int) -> None:
        """End a rollout with its current tokens, at the end of the decode step."""
        self._aborted.append(rollout)
        self._notice()

    def load(self, command: LoadWeights) -> None:
        """Load new weights, after draining or at the end of the decode step."""
        self._begin(command)

    def lend(self, command: Lend) -> None:
        """Wake up on GPUs of the trainer, with its newest weights; rollouts wait meanwhile."""
        self._begin(command)

    def take_back(self, command: TakeBack) -> None:
        """Sleep, once the rollouts that were aborted have left."""
        self._begin(command)

    def _begin(self, command: LoadWeights | Lend | TakeBack) -> None:
        self._change = command
        self._notice()

    def stop(self) -> Sequence[Command | Generated]:
        """Stop the replica now, and return how all its commands end.

        A rollout with new tokens ends in a `Generated` event, so that another replica can continue
        it. All other commands are returned as lost.
        """
        if not self.has_stopped:
            if self._is_decoding and self._running:
                steps = int(self._progress(self._time.leave()) + ROUNDING)
                self._advance(min(steps, self._next_finish() - self._step - 1))
            for attempt in list(self._running.values()):
                self._leave(attempt)
                self._queued[attempt.rollout] = attempt
            self._queued.update(self._receiving)
            self.process.interrupt("stopped")
        self.has_stopped = True
        self._is_decoding = False  # so that nothing wakes it up
        ends = [self._broken_off(self._queued[rollout]) for rollout in sorted(self._queued)]
        return ends if self._change is None else [*ends, self._change]

    def _broken_off(self, attempt: Attempt) -> Generate | Generated:
        run_time = 0.0 if attempt.began_at is None else self._env.now - attempt.began_at
        if run_time < attempt.prefill_time:  # its first token is not computed yet
            return Generate(attempt.rollout, self.id, 0)
        if attempt.done > attempt.begun_with:
            return self._ended(attempt, "aborted")
        return Generate(attempt.rollout, self.id, 0)

    # The process ----------------------------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, Any, None]:
        try:
            while True:
                if self._aborted:
                    self._end_aborted()
                if self._arrivals:
                    self._join_arrived(self._arrivals)
                if self._change is not None and self._may_change(self._change):
                    yield from self._make_change(self._change)
                elif self._queue and (prefill_time := self._admit()) is not None:
                    yield self._time.work(prefill_time)
                    if self._prefills:
                        self._keep_prefilled()
                    else:
                        self._end_finished()
                elif not self._running:
                    self._idle = self._env.event()
                    yield self._idle
                elif steps := self._steps_to_change():
                    self._is_decoding = True
                    try:
                        yield self._time.work(self._time_of(steps))
                    except simpy.Interrupt:
                        if self.has_stopped:
                            raise
                        done = self._time.leave()
                        steps = min(steps, self._steps_in(done))
                        yield self._time.work(max(0.0, self._time_of(steps) - done))
                    self._is_decoding = False
                    self._advance(steps)
                    self._end_finished()
                else:
                    self._preempt()
        except simpy.Interrupt:
            self._time.leave()  # stopped

    def _may_change(self, command: LoadWeights | Lend | TakeBack) -> bool:
        is_in_flight = isinstance(command, LoadWeights) and not command.drain
        return is_in_flight or not (self._running or self._arrivals)

    def _make_change(
        self, command: LoadWeights | Lend | TakeBack
    ) -> Generator[simpy.Event, Any, None]:
        if (
            self._num_given_up
        ):  # the controller handles the end of each before the GPUs change sides
            yield self._handling.work(self._num_given_up * GIVE_UP_SHARE * self._handling_time)
            self._num_given_up = 0
        seconds = self._seconds_of(command)
        yield self._time.work(seconds)
        self._change = None
        if self._kept and isinstance(command, LoadWeights) and command.drain:
            self._own_handover.flush(self.id)
        if self._cache.unused is not None:
            self._cache.unused.clear()
        if isinstance(command, TakeBack):
            self._emit(TakenBack(self.id, seconds))
            return
        self.version = command.version
        if isinstance(command, Lend):
            self._emit(Lent(self.id, command.version, seconds))
        else:
            self._emit(WeightsLoaded(self.id, command.version, seconds))

    def _seconds_of(self, command: LoadWeights | Lend | TakeBack) -> float:
        lending = self._lending
        if isinstance(command, LoadWeights):
            return self._costs.load_time
        assert lending is not None, "only a run with [lending] lends"
        return lending.lend_time if isinstance(command, Lend) else lending.return_time

    def _admit(self) -> float | None:
        """Begin the pass that admits queued rollouts, and return its seconds; None if none can be admitted."""
        if self._change is not None or self._is_full:
            return None
        joined: list[Attempt] = []
        running, queue, queued = self._running, self._queue, self._queued
        cache, has_room, rides_along = self._cache, self._admission.has_room, self._rides_along
        tokens, again, pairs, num_prefixes, step_time, transfer_time = 0, 0, 0.0, 0, 0.0, 0.0
        num_new = 0 if self._prefills else 1
        places = self._max_running - self._num_stale_slots()
        if self._arrivals:
            places -= len(self._arrivals)
        budget = self._tokens_per_pass - len(running)
        while queue and len(running) < places and tokens < budget:
            priority, rollout = queue[0]
            attempt = queued.get(rollout)
            if attempt is None or attempt.priority != priority:
                heappop(queue)
                continue
            own = attempt.observed + attempt.done
            context = attempt.prompt_tokens + own
            fresh = own if attempt.prefix in cache.sharing else context
            riding = len(running) if rides_along and not num_prefixes else 0
            if not has_room(cache, attempt, fresh, riding):
                break
            if attempt.brings_cache:
                heappop(queue)
                transfer_time += self._receive(attempt, fresh)
                continue
            if attempt.prefilled_on is not None and self._begin_to_receive(attempt, fresh):
                heappop(queue)
                places -= 1
                continue
            if not num_prefixes:
                step_time = self._ride_along()
            if self._reuses_contexts and attempt.cached is None:
                attempt.cached = attempt.computed = cache.find(attempt)
                transfer_time += self._load_back()
            done = attempt.computed if attempt.computed < fresh else fresh
            part = fresh - done
            if part > budget - tokens:
                part = int(budget - tokens)
            tokens += part or 1
            if attempt.done:
                again += max(0, part - attempt.new)
            pairs += part * (context - fresh + done + part / 2)
            num_prefixes += 1
            if done + part < fresh:
                attempt.computed = done + part
                if self._prefills and attempt.began_at is None:
                    attempt.began_at, attempt.version = self._env.now, self.version
                break
            heappop(queue)
            cache.enter(attempt, fresh + num_new)
            self._join(attempt, num_new)
            joined.append(attempt)
        if not tokens:
            return transfer_time or None
        prefill_time = self._prefill(joined, tokens, pairs, num_prefixes)
        self.recompute_time += prefill_time * again / tokens
        if self._has_turns:
            for attempt in joined:
                attempt.recompute_time = prefill_time * again / tokens
        return transfer_time + step_time + prefill_time

    def _receive(self, attempt: Attempt, fresh: int) -> float:
        """Admit a rollout whose KV cache is transferred over the network, and return the seconds of the transfer.

        The replica does nothing else meanwhile, as in a prefill, because rollouts move to idle
        replicas.
        """
        attempt.prefill_time = self._costs.cache_transfer.time(
            attempt.prompt_tokens + (attempt.observed + attempt.done)
        )
        attempt.brings_cache = False
        self._cache.enter(attempt, fresh)
        self._join(attempt, num_new=0)
        return attempt.prefill_time

    def _load_back(self) -> float:
        """Return the seconds in which the context that was just found is loaded from host memory."""
        host, unused = self._costs.host_cache, self._cache.unused
        return 0.0 if host is None or unused is None else unused.loaded * host.token_time

    def _ride_along(self) -> float:
        """Let running rollouts make a token in the prefill pass, if the back end does this; return its seconds."""
        num_running = len(self._running)
        if not self._costs.rides_along or not num_running:
            return 0.0
        step_time = self._time_of(1)
        self._advance(1)
        return step_time

    def _num_stale_slots(self) -> int:
        """Return the slots that were freed but stay empty until the queue learns of them."""
        is_stale = self._step - self._freed_at < self._costs.refill_passes
        return self._num_freed if is_stale and self._running else 0

    def _prefill(
        self, joined: list[Attempt], tokens: int, pairs: float, num_prefixes: int
    ) -> float:
        """Return the seconds to prefill prefixes or parts of them; each joined rollout also gets its next token."""
        beside = len(self._running) - len(joined)
        prefill_time = self._costs.prefill_time(tokens, pairs, beside, num_prefixes)
        if self._has_turns and self._costs.serving_time:
            prefill_time += len(joined) * self._costs.serving_time
        for attempt in joined:
            attempt.prefill_time = attempt.prefill_time or prefill_time
        return prefill_time

    def _steps_to_change(self) -> int:
        """Return the decode steps until a rollout finishes or the KV cache is full; 0 if it is full now."""
        cache = self._cache
        room = (cache.capacity - cache.held) // cache.num_rollouts
        if room < 1:
            return 0
        finish_at, rollout = self._finishing[0]
        attempt = self._running.get(rollout)
        if attempt is None or attempt.finish_at != finish_at:
            finish_at = self._next_finish()
        steps = finish_at - self._step
        if room < steps:
            steps = room
        if self._queue and self._num_stale_slots():
            steps = min(steps, self._freed_at + self._costs.refill_passes - self._step)
        return steps

    def _advance(self, steps: int) -> None:
        """Add a token to every running rollout for each of `steps` passes."""
        num_tokens = steps * len(self._running)
        self._step += steps
        self._context += num_tokens
        self._cache.held += num_tokens
        if self._cache.unused is not None:
            self._cache.make_room()

    def _time_of(self, steps: int) -> float:
        """Return the seconds of the next `steps` decode steps with the current batch."""
        curve, num_running = self._curve, len(self._running)
        attended = self._attended() if self._padded_share else self._context
        context = steps * attended + num_running * steps * (steps - 1) / 2
        return steps * curve.base[num_running] + curve.per_context_token[num_running] * context

    def _steps_in(self, elapsed: float) -> int:
        """Return the decode steps after `elapsed` seconds of work, including the current one."""
        return ceil(self._progress(elapsed) - ROUNDING)

    def _progress(self, elapsed: float) -> float:
        """Return the fractional decode steps after `elapsed` seconds of work: the inverse of `_time_of`."""
        curve, num_running = self._curve, len(self._running)
        per_token = curve.per_context_token[num_running]
        slope = per_token * num_running / 2
        first = curve.base[num_running] + per_token * self._attended() - slope
        return 2 * elapsed / (first + sqrt(first * first + 4 * slope * elapsed))

    def _attended(self) -> float:
        """Return the context tokens that the next decode step reads."""
        share = self._padded_share
        if not share:
            return self._context
        return self._context + share * (self._padded() - self._context)

    def _padded(self) -> int:
        """Return the context tokens if every running rollout were padded to the longest."""
        by_length = self._by_length
        while True:
            ahead, rollout = by_length[0]
            attempt = self._running.get(rollout)
            if attempt is not None and attempt.ahead == -ahead:
                return len(self._running) * (self._step - ahead)
            heappop(by_length)

    # The batch ------------------------------------------------------------------------------------

    def _enqueue(self, attempt: Attempt) -> None:
        self._queued[attempt.rollout] = attempt
        heappush(self._queue, (attempt.priority, attempt.rollout))

    def _join(self, attempt: Attempt, num_new: int) -> None:
        """Add a rollout, whose context has entered the cache, with the `num_new` tokens of its prefill."""
        rollout = attempt.rollout
        del self._queued[rollout]
        if attempt.began_at is None:
            attempt.began_at = self._env.now
            attempt.version = self.version
        done = attempt.done = attempt.done + num_new
        finish_at = attempt.finish_at = self._step + attempt.length - done
        self._running[rollout] = attempt
        heappush(self._finishing, (finish_at, rollout))
        if self._padded_share:
            heappush(self._by_length, (-attempt.ahead, attempt.rollout))
        self._context += attempt.prompt_tokens + attempt.observed + done

    def _leave(self, attempt: Attempt) -> None:
        """Remove a rollout from the batch with its current tokens."""
        del self._running[attempt.rollout]
        done = attempt.done = attempt.length - (attempt.finish_at - self._step)
        own = attempt.observed + done
        self._context -= attempt.prompt_tokens + own
        self._cache.leave(attempt, own)
        if attempt.reached is not None:
            attempt.reached.tokens = own

    def _next_finish(self) -> int:
        """Return the decode step in which the next rollout finishes."""
        finishing = self._finishing
        while True:
            step, rollout = finishing[0]
            attempt = self._running.get(rollout)
            if attempt is not None and attempt.finish_at == step:
                return step
            heappop(finishing)

    def _end_finished(self) -> None:
        finishing, running, now = self._finishing, self._running, self._step
        while finishing and finishing[0][0] <= now:
            step, rollout = heappop(finishing)
            attempt = running.get(rollout)
            if attempt is None or attempt.finish_at != step:
                continue  # was aborted or preempted
            self._leave(attempt)
            self._is_full = False
            if self._freed_at != now:
                self._freed_at, self._num_freed = now, 1
            else:
                self._num_freed += 1
            is_cut = attempt.is_cut or attempt.length >= self._max_tokens
            self._emit(self._ended(attempt, "length" if is_cut else "stop"))

    def _end_aborted(self) -> None:
        while self._aborted:
            rollout = self._aborted.pop(0)
            attempt = self._running.get(rollout) or self._queued.pop(rollout, None)
            attempt = attempt or self._receiving.pop(rollout, None)
            if attempt is None:
                self._forget_kept(rollout)
                continue  # finished before the abort arrived
            if rollout in self._running:
                is_returning = isinstance(self._change, TakeBack)
                self._num_given_up += is_returning and self._handling_time > 0
                self._leave(attempt)
                self._is_full = False
            elif self._handover is not None:
                self._stop_receiving(attempt)
            self._emit(self._ended(attempt, "aborted"))

    def _ended(self, attempt: Attempt, finish: Finish) -> Generated:
        if self._num_reported is None:
            return attempt.ended(finish, self._env.now)
        put_off, self._num_reported = self.num_preempted - self._num_reported, self.num_preempted
        return attempt.ended(finish, self._env.now, self._cache.use, put_off)

    def _preempt(self) -> None:
        """Preempt the rollout that joined last; its KV cache is recomputed later.

        No rollout joins again before one finishes, so that the same rollout is not preempted again
        and again.
        """
        attempt = self._running[next(reversed(self._running))]
        self._leave(attempt)
        if self._has_turns:
            attempt.cached, attempt.computed, attempt.new = None, 0, 0
        self._enqueue(attempt)
        self._is_full = True
        self.num_preempted += 1

    # Prefill and decode apart ---------------------------------------------------------------------

    @property
    def _own_handover(self) -> Handover:
        assert self._handover is not None, "only a run with prefill replicas hands contexts over"
        return self._handover

    def _keep_prefilled(self) -> None:
        """End the attempts whose contexts this pass has completed, and keep the contexts for decode replicas."""
        self._end_aborted()
        prefilled = list(self._running.values())
        self._running.clear()
        self._finishing.clear()
        self._context = 0
        for attempt in prefilled:
            began_at = self._env.now if attempt.began_at is None else attempt.began_at
            attempt.prefill_time = self._env.now - began_at
            release = partial(self._release, attempt.rollout)
            self._own_handover.keep(attempt.rollout, (self.id, self.kind), release)
            self._kept[attempt.rollout] = attempt
            self._emit(self._ended(attempt, "prefilled"))

    def _release(self, rollout: int) -> None:
        """Free the context of a rollout that a decode replica has, or does not need."""
        attempt = self._kept.pop(rollout, None)
        if attempt is None:
            return
        self._cache.leave(attempt, attempt.own)
        if self._queue and not self.has_stopped:
            self._notice()

    def _forget_kept(self, rollout: int) -> None:
        """Free the context of a rollout that was aborted when it was prefilled, unless a replica receives it."""
        if rollout in self._kept and self._own_handover.has(rollout, self.id):
            self._own_handover.drop(rollout)

    def _begin_to_receive(self, attempt: Attempt, fresh: int) -> bool:
        """Receive a context, if its prefill replica still has it; return whether it has."""
        source, attempt.prefilled_on = attempt.prefilled_on, None
        cache, rollout = self._cache, attempt.rollout
        if self._arrivals is None or source is None:
            return False
        if not self._own_handover.has(rollout, source):
            return False
        attempt.cached = cache.find(attempt)
        lacks = fresh - attempt.cached + (0 if cache.unused is None else cache.unused.loaded)
        brings_prompt = attempt.prefix not in cache.sharing
        cache.enter(attempt, fresh)
        self._receiving[rollout] = self._queued.pop(rollout)
        attempt.began_at = self._env.now
        self._arrivals.begin(rollout, attempt.prefix, max(0, lacks), brings_prompt=brings_prompt)
        return True

    def _join_arrived(self, arrivals: Arrivals) -> None:
        """Add the rollouts to the batch whose contexts have been received."""
        for rollout in arrivals.take():
            attempt = self._queued[rollout] = self._receiving.pop(rollout)
            assert attempt.began_at is not None, "its context was received since then"
            attempt.transfer_time = self._env.now - attempt.began_at
            attempt.version = self.version
            self._join(attempt, num_new=0)

    def _stop_receiving(self, attempt: Attempt) -> None:
        """Receive the context of an aborted rollout no more."""
        if self._arrivals is not None and attempt.rollout in self._arrivals:
            self._forget_context(attempt)
            for sibling in self._arrivals.give_up(attempt.rollout):
                self._queue_again(sibling)
        self._own_handover.drop(attempt.rollout)

    def _compute_again(self, rollout: int) -> None:
        """Queue a rollout again whose context will not arrive, because its prefill replica was lost."""
        assert self._arrivals is not None, "only a decode replica receives contexts"
        if rollout not in self._arrivals:
            return  # its prompt was lost with that of a sibling
        for each in (rollout, *self._arrivals.give_up(rollout)):
            self._queue_again(each)
        self._notice()

    def _queue_again(self, rollout: int) -> None:
        attempt = self._receiving.pop(rollout)
        self._forget_context(attempt)
        attempt.began_at, attempt.cached, attempt.computed = None, 0, 0
        self._enqueue(attempt)

    def _forget_context(self, attempt: Attempt) -> None:
        """Free the room of a context that was not received whole."""
        self._cache.leave(attempt, attempt.own)
        self._cache.find(attempt)

    def _notice(self) -> None:
        """Wake the process up, at the end of the current decode step."""
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
        elif self._is_decoding:
            self._is_decoding = False
            self.process.interrupt()
