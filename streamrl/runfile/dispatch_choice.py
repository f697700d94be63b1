"""The dispatch policies that `policies.dispatch` chooses among, and the properties by which a run file is checked.

The policies themselves are classes of `streamrl.engine.policies`. A class outside this package subclasses
`streamrl.engine.policies.dispatch.Dispatch` and is chosen as `policies.dispatch = "module:Class"`.
"""

from __future__ import annotations

from typing import Annotated

from streamrl.runfile.choices import ChoiceList

DEFAULT_DISPATCH = "least-loaded"
DISPATCH = ChoiceList(
    key="policies.dispatch",
    group="streamrl.dispatch",
    base="streamrl.engine.policies.dispatch:Dispatch",
    required="choose",
    is_made_alone=False,
    own={
        DEFAULT_DISPATCH: "streamrl.engine.policies.dispatch:LeastLoaded",
        "round-robin": "streamrl.engine.policies.dispatch:RoundRobin",
        "random": "streamrl.engine.policies.dispatch:Random",
        "skewness-aware": "streamrl.engine.policies.skew:SkewnessAware",
    },
)
DispatchName = Annotated[str, DISPATCH]


class DispatchProperties:
    """What a dispatch policy needs, and what other keys may be combined with it."""

    needs_latency = False
    """Whether it computes with `policies.latency`, the seconds of a decode step."""
    needs_lengths = False
    """Whether it does nothing unless the lengths of rollouts are expected to differ."""
    sends_just_in_time = False
    """Whether it can keep rollouts until a replica has a free slot. A subclass does not inherit this."""
    has_tail = False
    """Whether replicas are reserved for the longest rollouts, as `policies.migration` "overrun" needs."""

    def __init_subclass__(cls) -> None:
        """Let each class say by itself that it can wait: `LeastLoaded` then makes another policy of itself."""
        super().__init_subclass__()
        cls.sends_just_in_time = bool(vars(cls).get("sends_just_in_time", False))


def dispatch_named(name: str | None) -> type[DispatchProperties]:
    """Return the policy that a value of `policies.dispatch` chooses; `RunError` where there is none."""
    return DISPATCH.class_of(name or DEFAULT_DISPATCH, DispatchProperties)
