"""Every wait of the executor for another process, thread or task has a bound, or a reason why it needs none.

A call of a role has two bounds, wherever it is awaited: `Heartbeat` ends a process without a sign of life, and `Watchdog`
ends a command that takes too long. This file is about the waits below these calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "executor"
METHODS = {
    *("accept", "communicate", "drain", "join", "readexactly", "readline", "readuntil"),
    *("recv", "recv_into", "recvmsg", "select", "sock_accept", "sock_connect", "sock_recv", "wait"),
    *("wait_closed", "waitpid"),
}
"""Names of methods and functions that wait for others."""
BOUNDED_BY = {"wait_for", "timeout"}
"""Calls of asyncio whose argument, or block, has a bound."""
LIMITED_WAITS = {"wait", "join", "select", "communicate"}
"""Methods whose argument is the bound."""

KILLED = "it waits for a process that was killed, which the kernel ends"
CALLED = (
    "it runs inside a call of a role, which the heartbeat and the watchdog of its command bound"
)
GONE = "it ends if the other side closes the connection or dies; until then there is nothing to do"
OTHER_WAITS = {
    "colocation.py:of": "the commands of the other side, each of which the watchdog bounds",
    "environment/host.py:_reap": f"at the end, {KILLED}; before, WNOHANG does not wait",
    "environment/mcp_client.py:ask": "the server has closed its output; the session's request is bounded",
    "environment/mcp_client.py:close": KILLED,
    "environment/session.py:_listen": "a heartbeat kills the host that is silent, and then the stream ends",
    "launchers/handles.py:_first_of": f"{CALLED}: the first error of a rank ends it",
    "launchers/prefork_server.py:_reap": "the kernel has reported that the process has ended",
    "launchers/prefork_server.py:is_closed": "MSG_DONTWAIT does not wait",
    "launchers/prefork_server.py:receive": GONE,
    "launchers/processes.py:_answer_of": "a task whose result is read in a loop that counts silence",
    "launchers/ray_actor.py:answers": "a stream of an actor; the handle's heartbeat ends it",
    "launchers/worker.py:_answer": f"the controller reads each answer; {GONE}",
    "launchers/worker.py:read_frame": f"the next call may come at any time; {GONE}",
    "launchers/processes.py:_status": "the socket is readable: `_first_ready` has waited with a limit",
    "profiling/collectives.py:time_collectives": KILLED,
    "profiling/peer_link.py:transfer": "the profiler ends both processes after LONGEST seconds",
    "rollout/child_guard.py:kill_registered": "the guard kills what it knows, and ends when its input is closed",
    "rollout/external_engine.py:_together": "LOAD_TIME bounds the request, and the group's patience the other part",
    "rollout/server_group.py:send": "the group's patience, which its constructor takes",
    "rollout/external_engine.py:_request": "a pause of this process; the server's health is looked at meanwhile",
    "rollout/replica.py:evaluate": "a load of this replica, which the watchdog bounds",
    "rollout/replica.py:_generate": "a load of this replica, which the watchdog bounds",
    "rollout/replica.py:take_back": "its rollouts, which were aborted; the watchdog bounds both",
    "rollout/replica_worker.py:_idle_now": f"rollouts of this replica end; {CALLED}",
    "rollout/transformers_engine.py:_begin_pass": "a daemon thread; the next request may come at any time",
    "rollout/transformers_engine.py:_wait_for_pass": f"the current pass; {CALLED}",
    "subscribers/listener.py:_accept": "the next reader may come at any time; the run cancels it at its end",
    "subscribers/membership.py:_join": "it waits for nothing: it adds a trainer to the buffer",
    "subscribers/membership.py:detach": "the trainer saves and ends, both of which the watchdog bounds",
    "subscribers/stream.py:_authenticate": "the listener closes connections that do not ask in time",
    "subscribers/stream.py:_feed": "a slow reader delays only itself: its events are dropped",
    "subscribers/stream.py:take": "the next event may come at any time; the run cancels it at its end",
    "subscribers/stream_client.py:_read_event": f"in the process of a reader; {GONE}",
    "subscribers/stream_client.py:read_stream": f"in the process of a reader; {GONE}",
    "trainer/deepspeed_backend.py:save": f"the other ranks; {CALLED}, and ranks are killed together",
    "trainer/fsdp2_backend.py:save": f"the other ranks; {CALLED}, and ranks are killed together",
    "trainer/learner.py:save": f"the other ranks; {CALLED}, and ranks are killed together",
    "trainer/trainer_worker.py:do": f"the work before it on another thread; {CALLED}",
    "transfer/broadcast.py:forward_blocks": f"gloo raises an error if a member has died; {CALLED}",
    "transfer/shared_directory.py:remove": KILLED,
    "verifier/fork_server.py:_bury": f"{KILLED}; with WNOHANG it does not wait",
    "verifier/fork_server.py:_receive": GONE,
    "verifier/fork_server.py:_serve_nursery": "WNOHANG does not wait",
    "verifier/fork_server.py:begin": f"a child that only forks; the controller limits each score; {GONE}",
    "verifier/fork_server.py:end": f"a child that only kills; the controller limits each score; {GONE}",
    "verifier/fork_server_process.py:_listen": f"each score has a time limit of its own; {GONE}",
    "verifier/fork_server_process.py:close": KILLED,
    "verifier/reward_pool.py:_arrival": "the next exchange may come at any time; the run cancels it at its end",
    "world.py:_take_machine": "a replica whose worker was stopped or killed; the watchdog bounds both",
    "world.py:_push": "pauses between attempts of a push, which have their own end",
    "world.py:run": "the end of the run; the watchdog and policies.max_step_time end a run without progress",
}
"""Waits without a bound of their own, by file and function, and what ends them."""


def waits(path: Path) -> Iterator[str]:
    """Yield "file:function" of each wait in a file that has no bound of its own."""
    tree = ast.parse(path.read_text())
    for function, call in calls(tree, "", is_bounded=False):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in METHODS and not has_bound(name, call):
            yield f"{path.relative_to(ROOT)}:{function}"


def calls(node: ast.AST, function: str, *, is_bounded: bool) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call outside blocks and calls that have a bound, with the name of its function."""
    if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.Call) and not is_bounded:
        yield function, node
    inside = is_bounded or names_a_bound(node)
    for child in ast.iter_child_nodes(node):
        yield from calls(child, function, is_bounded=inside)


def names_a_bound(node: ast.AST) -> bool:
    """Return whether a node is `wait_for(...)` or a block under `timeout(...)`."""
    if isinstance(node, ast.AsyncWith | ast.With):
        return any(names_a_bound(item.context_expr) for item in node.items)
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in BOUNDED_BY
    )


def has_bound(name: str, call: ast.Call) -> bool:
    """Return whether a call has a time limit, or only shares its name with one that waits."""
    assert isinstance(call.func, ast.Attribute)
    is_text = (
        isinstance(call.func.value, ast.Constant | ast.JoinedStr)
        or ast.unparse(call.func) == "shlex.join"
    )
    if is_text or any(keyword.arg == "timeout" for keyword in call.keywords):
        return True
    is_limit = bool(call.args) and not isinstance(call.args[0], ast.Constant | ast.List)
    is_of_asyncio = isinstance(call.func.value, ast.Name) and call.func.value.id == "asyncio"
    return name in LIMITED_WAITS and is_limit and not is_of_asyncio


def test_every_wait_has_a_bound_or_a_reason() -> None:
    found = {each for path in sorted(ROOT.rglob("*.py")) for each in waits(path)}
    assert sorted(found - OTHER_WAITS.keys()) == [], (
        "give it a time limit, or a reason in OTHER_WAITS"
    )
    assert sorted(OTHER_WAITS.keys() - found) == [], "no such wait any more"
    assert all(len(reason) > 20 for reason in OTHER_WAITS.values())


def test_the_search_finds_waits_and_their_bounds(tmp_path: Path) -> None:
    text = """
async def free(process, event, tasks):
    process.wait()
    await event.wait()
    await asyncio.wait(tasks)
    ", ".join(tasks)
async def bound(process, event, tasks):
    process.wait(5.0 if tasks else LIMIT)
    process.wait(timeout=3)
    await asyncio.wait_for(event.wait(), 3)
    await asyncio.wait(tasks, timeout=1)
    async with asyncio.timeout(3):
        await event.wait()
"""
    functions = [
        name
        for name, call in calls(ast.parse(text), "", is_bounded=False)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in METHODS
        and not has_bound(call.func.attr, call)
    ]
    assert functions == ["free"] * 3
