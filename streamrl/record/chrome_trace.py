"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

    process     tracks
    replicas    a thread a replica with its activities; its rollouts as overlapping (async) slices; how many run on all,
                and on how many GPUs' worth a full batch would be missed, as counters
    trainers    a thread a trainer: score, train, checkpoint, failure; its version as a counter; an instant for each
                step of the one that leads
    links       pushes of weights
    verifiers   when any reward is computed, where verifiers have GPUs

Format: "Trace Event Format", Google, 2016; times are microseconds. A file that is written while a run goes on is an
array of the same events, which need not be in order of time and whose closing bracket may be missing.
"""

from __future__ import annotations

import msgspec

from streamrl.record.chrome_events import ChromeReader
from streamrl.record.chrome_format import TraceEvent
from streamrl.record.trace import Trace, blaming_damage
from streamrl.record.underfilled import read_underfilled

CHROME_TRACE = "chrome_trace.json"
"""In a run's directory."""


def chrome_trace(trace: Trace) -> bytes:
    """Encode a trace as Chrome trace JSON, in order of time.

    Raises:
        ValueError: the trace is damaged.
    """
    with blaming_damage(trace):
        reader = ChromeReader(trace.run, trace.decode)
        events = [*reader.names(), *reader.read(trace.entries), *reader.finish()]
        if not trace.decode:  # full batches had to be looked for in all of the run
            events += reader.count_underfilled(read_underfilled(trace))
    events.sort(key=_place)
    return msgspec.json.encode(
        {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"system": trace.run.policies.system, "world": trace.world},
        }
    )


def _place(event: TraceEvent) -> tuple[bool, float]:
    return event.ph != "M", event.ts
