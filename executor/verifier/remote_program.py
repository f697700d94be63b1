"""Run a program of a completion in one process and the tests of its record in another.

The tests see the program's names. A value of a plain type (`PLAIN`) is copied, so a test compares its own copy. Everything
else is a `RemoteObject`: what a test does with it is done in the program's process, and the result comes back. So a
program sees neither tests nor expected values, and cannot change how they are compared.

A `RemoteObject` equals a plain value only by its content (a named tuple, a subclass of int), and has no order or size beside one. Arithmetic with a plain value gives no plain
value. So an object whose methods answer "equal", "greater" or 0 passes no test of a value. A test that asks an object
(`f(2).is_right()`) believes its answer.

`all`, `len` and other built-in names are Python's own for a test, even if the program defines them. Only a record whose
tests use no other name of the program may test a function with such a name. A program's `StopIteration` ends no loop of
a test, because a function passed to `map` would end the comparison early.

Messages are JSON after four bytes of length. The tests' process treats each of them as untrusted.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import dis
import io
import json
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from types import CodeType
from typing import Any

MOST_MESSAGE = 2**24
"""Maximum bytes of a message."""
MOST_DEPTH = 100
"""Maximum depth of a plain value; a deeper one stays in its process."""
SAFE_INT = 2**53
PLAIN = "None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, Decimal, Fraction, numpy"
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "Decimal": Decimal,
    "Fraction": Fraction,
}
ATTRIBUTES = {"__name__", "__qualname__", "__doc__", "__module__", "__dict__"}
"""Attributes with such names that a test may read of a remote object."""

Encode = Callable[[Any], Any]
Json = Any


class ProgramEndedError(BaseException):
    """The program's process has ended; a test cannot catch it as an `Exception`."""


class Channel:
    """One end of the connection of both processes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_over = False

    def send(self, message: Json) -> None:
        """Send a message.

        Raises:
            ValueError: it is too large.
            ProgramEndedError: the other side has ended.
        """
        data = json.dumps(message).encode("utf-8", "surrogatepass")
        if len(data) > MOST_MESSAGE:
            raise ValueError(f"a value of {len(data):,} bytes is too large for a test")
        view = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            self.is_over = True
            raise ProgramEndedError from None

    def receive(self) -> Json:
        """Wait for a message; errors as those of `send`."""
        size = int.from_bytes(self._read(4), "big")
        if size > MOST_MESSAGE:
            self.is_over = True
            raise ProgramEndedError
        return json.loads(self._read(size).decode("utf-8", "surrogatepass"))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                block = os.read(self._descriptor, min(size - len(data), 2**20))
            except OSError:
                block = b""
            if not block:
                self.is_over = True
                raise ProgramEndedError
            data += block
        return bytes(data)


def encode_plain(value: Any, other: Encode, depth: int = 0) -> Json:
    """Return a value as JSON; `other` encodes what is not of a plain type, or is nested too deeply."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and abs(value) < SAFE_INT):
        return value
    if depth > MOST_DEPTH:
        return other(value)

    def inner(each: Any) -> Json:
        return encode_plain(each, other, depth + 1)

    name = kind.__name__
    if kind is list:
        return [inner(each) for each in value]
    if kind in (tuple, set, frozenset, deque):
        return {name: [inner(each) for each in value]}
    if isinstance(value, dict) and kind.__module__ in ("builtins", "collections"):
        return {"dict": [[inner(key), inner(each)] for key, each in value.items()]}
    if kind is int:
        return {name: hex(value)}
    if kind in (bytes, bytearray):
        return {name: base64.b64encode(value).decode()}
    if kind is complex:
        return {name: [value.real, value.imag]}
    if kind in (Decimal, Fraction):
        return {name: str(value)}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        if name != "ndarray":
            return inner(value.item())
        data = base64.b64encode(value.tobytes()).decode()
        return {"ndarray": [value.dtype.str, list(value.shape), data]}
    return other(value)


def decode_plain(found: Json, other: Callable[[str, Json], Any]) -> Any:
    """Return the value of its JSON; `other` decodes what is not of a plain type, given its kind and content."""
    if isinstance(found, list):
        return [decode_plain(each, other) for each in found]
    if not isinstance(found, dict):
        return found
    ((kind, content),) = found.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([decode_plain(each, other) for each in content])
    if kind == "dict":
        return {decode_plain(key, other): decode_plain(each, other) for key, each in content}
    if kind in _FROM_TEXT:
        return _FROM_TEXT[kind](content)
    if kind == "complex":
        return complex(*content)
    if kind == "ndarray":
        import numpy as np

        dtype, shape, data = content
        if np.dtype(dtype).kind not in "biufc":
            raise ValueError("an array of objects is not plain")
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    return other(kind, content)


_run = exec
channel: Channel | None = None
"""The connection of this worker to the process that runs programs."""


def serve_program(descriptor: int) -> None:
    """Run programs and do what tests ask, until the connection ends."""
    with contextlib.suppress(ProgramEndedError):
        Program(Channel(descriptor)).serve()


def begin_tests() -> Tests:
    """Return the tests of one program in this worker."""
    assert channel is not None, "the fork server makes it"
    return Tests(channel)


# The program's process ----------------------------------------------------------------------------

_CONTENTS: tuple[type[Any], ...] = (int, float, str, bytes, tuple, list, dict, set, frozenset)


def _content(value: Any) -> Any:
    """Return what an object of a subclass of a plain type contains, such as a named tuple; another object as it is."""
    return next((kind(value) for kind in _CONTENTS if isinstance(value, kind)), value)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "content": _content,
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "enter": lambda each: type(each).__enter__(each),
    "exit": lambda each, *error: type(each).__exit__(each, *error),
    **{f.__name__: f for f in (getattr, setattr, delattr, len, iter, next, bool, str, repr, hash)},
    "isinstance": isinstance,
    "issubclass": issubclass,
    **{
        name: getattr(operator, f"__{name}__")
        for name in (
            *("getitem", "setitem", "delitem", "eq", "ne", "lt", "le", "gt", "ge", "neg", "pos"),
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"),
            *("xor", "lshift", "rshift", "invert"),
        )
    },
}


class Program:
    """Holds the names of a program, and does what tests ask."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._names: dict[str, Any] = {"__name__": "program"}
        self._objects: dict[int, Any] = {}
        self._shared: dict[str, type] = {}
        """Classes of the setup, by name; their objects are copied."""

    def serve(self) -> None:
        """Answer until the tests' process closes the connection."""
        while True:
            message = self._channel.receive()
            printed = io.StringIO()
            try:
                sys.stdin = io.StringIO(message.get("in", ""))
                with contextlib.redirect_stdout(printed):
                    reply = self._answer(message)
            except ProgramEndedError:
                raise
            except BaseException as error:
                reply = {"error": self._encode_error(error)}
            self._channel.send({**reply, "out": printed.getvalue()})

    def _answer(self, message: Json) -> Json:
        if "setup" in message:
            self._names = {"__name__": "program"}
            exec(message["setup"], self._names)
            self._shared = classes_in(self._names)
            return {"value": None}
        if "code" in message:
            exec(compile(message["code"], "<program>", "exec"), self._names)
            return {"value": None}
        if "names" in message:
            here = [name for name in message["names"] if name in self._names]
            return {"names": {name: self._encode(self._names[name]) for name in here}}
        arguments = [self._decode(each) for each in message["arguments"]]
        named = {name: self._decode(each) for name, each in message.get("named", {}).items()}
        value = _OPERATIONS[message["do"]](*arguments, **named)
        return {"value": self._encode(value), "after": [self._encode(each) for each in arguments]}

    def _encode(self, value: Any) -> Json:
        return encode_plain(value, self._encode_object)

    def _encode_object(self, value: Any) -> Json:
        if self._shared.get(type(value).__name__) is type(value):
            fields = {name: self._encode(each) for name, each in vars(value).items()}
            return {"shared": [type(value).__name__, fields]}
        if isinstance(value, Callback):
            return {"callback": value.number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": self._lineage(value)}
        self._objects[id(value)] = value
        return {"object": id(value)}

    def _decode(self, found: Json) -> Any:
        return decode_plain(found, self._decode_object)

    def _decode_object(self, kind: str, content: Json) -> Any:
        if kind == "object":
            return self._objects[content]
        if kind == "callback":
            return Callback(content, self._call_back)
        if kind == "shared":
            name, fields = content
            return copy_of(
                self._shared[name], {key: self._decode(each) for key, each in fields.items()}
            )
        raise ValueError(kind)

    def _call_back(self, number: int, what: str, arguments: tuple[Any, ...]) -> Any:
        """Let the tests' process call a function that a test passed."""
        encoded = [self._encode(each) for each in arguments]
        self._channel.send({"callback": number, "what": what, "arguments": encoded})
        while "answer" not in (message := self._channel.receive()):
            try:
                reply = self._answer(message)
            except Exception as error:
                reply = {"error": self._encode_error(error)}
            self._channel.send({**reply, "out": ""})
        if message.get("is_stop"):
            raise StopIteration
        if "error" in message:
            raise RuntimeError(message["error"])
        return self._decode(message["answer"])

    def _encode_error(self, error: BaseException) -> Json:
        try:
            arguments = [self._encode(each) for each in error.args]
            fields = {name: self._encode(each) for name, each in vars(error).items()}
        except Exception:
            arguments, fields = [str(type(error))], {}
        return {"lineage": self._lineage(type(error)), "arguments": arguments, "fields": fields}

    def _lineage(self, kind: type[BaseException]) -> list[Any]:
        """Return id and name of each class up to the first one of Python, and that one's name."""
        own: list[Any] = []
        for each in kind.__mro__:
            if getattr(builtins, each.__name__, None) is each:
                return [*own, each.__name__]
            self._objects[id(each)] = each
            own.append([id(each), each.__name__])
        return [*own, "Exception"]


class Callback:
    """A function or an iterator of a test, as the program sees it."""

    def __init__(self, number: int, call: Callable[[int, str, tuple[Any, ...]], Any]) -> None:
        self.number = number
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self._call(self.number, "call", arguments)

    def __iter__(self) -> Callback:
        """Return the iterator."""
        return self

    def __next__(self) -> Any:
        """Return the next value of the iterator."""
        return self._call(self.number, "next", ())


def classes_in(names: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes among some names whose objects can be copied by their fields."""
    return {
        name: each
        for name, each in names.items()
        if isinstance(each, type) and each.__name__ == name and "__dict__" in dir(each)
    }


def copy_of(kind: type, fields: dict[str, Any]) -> Any:
    """Return an object of a class with some fields; its constructor does not run."""
    made: Any = object.__new__(kind)
    made.__dict__.update(fields)
    return made


# The tests' process -------------------------------------------------------------------------------


class Tests:
    """Runs tests, and asks the program's process for what they use of the program."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._callbacks: list[Any] = []
        self._shared: dict[str, type] = {}
        self._exceptions: dict[int, type[BaseException]] = {}
        self.names: dict[str, Any] = {"__name__": "tests"}
        self._given: dict[str, Any] = {}
        """Names that were set to what the program has."""
        self._hidden: set[str] = set()
        """Names of the program that tests do not see."""

    def set_up(self, setup: CodeType, text: str) -> None:
        """Run the setup of a record in both processes; raise what it raises."""
        _run(setup, self.names)
        self._shared = classes_in(self.names)
        self._ask({"setup": text})

    def find_names(self, tests: Sequence[CodeType]) -> None:
        """Find what tests use of the program. Call this once, after `set_up`."""
        own = {*self.names, *(name for test in tests for name in _set_in(test))}
        used = {name for test in tests for name in _read_in(test)} - own
        self._hidden = _BUILTINS if used - _BUILTINS else set()

    def run_program(self, text: str) -> None:
        """Run the program in its own process; raise what it raises, or `ProgramEndedError`."""
        self._ask({"code": text})

    def run(self, test: CodeType) -> None:
        """Run a test; raise what it raises. Names that the setup or a test defines are the tests' own."""
        wanted = [
            name
            for name in _read_in(test)
            if name not in self._hidden
            and (name not in self.names or self.names[name] is self._given.get(name, self))
        ]
        names = self._ask({"names": wanted})["names"]
        for name in wanted:
            if name in names:
                self._given[name] = self.names[name] = self.decode(names[name])
        _run(test, self.names)
        if self._channel.is_over:
            raise ProgramEndedError

    def do(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Do something in the program's process, and return the result; raise what it raises."""
        message = {
            "do": operation,
            "arguments": [self.encode(each) for each in arguments],
            "named": {name: self.encode(each) for name, each in named.items()},
        }
        try:
            reply = self._ask(message)
        except StopIteration as error:
            if operation == "next":
                raise
            raise RuntimeError("the program raised StopIteration") from error
        for given, after in zip(arguments, reply.get("after", ()), strict=False):
            self._merge(given, after)
        return self.decode(reply["value"])

    def _ask(self, message: Json) -> Json:
        if isinstance(sys.stdin, io.StringIO):
            message = {**message, "in": sys.stdin.read()}
        self._channel.send(message)
        while "callback" in (reply := self._channel.receive()):
            self._channel.send(self._call_back(reply))
        sys.stdout.write(str(reply.get("out", "")))
        if "error" in reply:
            raise self._error(reply["error"])
        return reply

    def _call_back(self, reply: Json) -> Json:
        call = self._callbacks[reply["callback"]]
        try:
            arguments = [self.decode(each) for each in reply["arguments"]]
            found = next(call) if reply["what"] == "next" else call(*arguments)
            return {"answer": self.encode(found)}
        except StopIteration:
            return {"answer": None, "is_stop": True}
        except Exception as error:
            return {"answer": None, "error": f"{type(error).__name__}: {error}"}

    def encode(self, value: Any) -> Json:
        """Return a test's value as JSON."""
        return encode_plain(value, self._encode_object)

    def _encode_object(self, value: Any) -> Json:
        if type(value) is RemoteObject:
            return {"object": object.__getattribute__(value, "_number")}
        if self._shared.get(type(value).__name__) is type(value):
            fields = {name: self.encode(each) for name, each in vars(value).items()}
            return {"shared": [type(value).__name__, fields]}
        if callable(value) or hasattr(type(value), "__next__"):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        raise TypeError(f"a test cannot pass a {type(value).__name__} to a program, only {PLAIN}")

    def decode(self, found: Json) -> Any:
        """Return what the program's process sent."""
        return decode_plain(found, self._decode_object)

    def _decode_object(self, kind: str, content: Json) -> Any:
        if kind == "object":
            return RemoteObject(int(content), self.do)
        if kind == "callback":
            return self._callbacks[content]
        if kind == "exception":
            return self._exception(content)
        if kind == "shared":
            name, fields = content
            return copy_of(
                self._shared[name], {key: self.decode(each) for key, each in fields.items()}
            )
        raise ValueError(f"an unknown value: {kind}")

    def _exception(self, lineage: Json) -> type[BaseException]:
        *own, python = lineage
        kind = getattr(builtins, python, Exception)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = Exception
        for number, name in reversed(own):
            kind = self._exceptions.setdefault(number, type(str(name), (kind,), {}))
        return kind

    def _error(self, found: Json) -> BaseException:
        arguments = [self.decode(each) for each in found["arguments"]]
        try:
            error = self._exception(found["lineage"])(*arguments)
        except TypeError:
            error = RuntimeError("the program raised an error that cannot be copied")
        with contextlib.suppress(AttributeError, TypeError):
            for name, each in found["fields"].items():
                if name.startswith("_"):
                    continue
                setattr(error, name, self.decode(each))
        return error

    def _merge(self, given: Any, after: Json) -> None:
        """Change a test's list, dict, set or object as the program changed its copy."""
        if type(given) in (list, deque, bytearray):
            new = self.decode(after)
            given.clear()
            given.extend(new)
        elif type(given) in (dict, set):
            new = self.decode(after)
            given.clear()
            given.update(new)
        elif self._shared.get(type(given).__name__) is type(given):
            given.__dict__.update(vars(self.decode(after)))


_BUILTINS = {*dir(builtins)}


def _read_in(code: CodeType) -> list[str]:
    """Return the global names that code reads, each once."""
    return _named_in(code, ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"))


def _set_in(code: CodeType) -> list[str]:
    """Return the global names that code sets."""
    return _named_in(code, ("STORE_NAME", "STORE_GLOBAL"))


def _named_in(code: CodeType, operations: tuple[str, ...]) -> list[str]:
    """Return the names in instructions of code and of the functions in it."""
    names = [each.argval for each in dis.get_instructions(code) if each.opname in operations]
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return list(
        dict.fromkeys([*names, *(name for each in inner for name in _named_in(each, operations))])
    )


class RemoteObject:
    """An object of a program, as a test sees it."""

    __slots__ = ("_do", "_number")

    def __init__(self, number: int, do: Callable[..., Any]) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_do", do)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object."""
        if name.startswith("__") and name not in ATTRIBUTES:
            raise AttributeError(name)
        return _do(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the object."""
        _do(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        """Remove an attribute of the object."""
        _do(self, "delattr", name)

    def __eq__(self, other: object) -> bool:
        """Compare two objects in the program's process, and a plain value with the object's content here."""
        if type(other) is RemoteObject:
            return bool(_do(self, "eq", other))
        content = _do(self, "content")
        return type(content) is not RemoteObject and bool(content == other)

    def __ne__(self, other: object) -> bool:
        """Return the contrary of `==`."""
        return not self == other

    def __hash__(self) -> int:
        """Return the program's hash."""
        return int(_do(self, "hash"))

    def __bool__(self) -> bool:
        """Return whether the object counts as true."""
        return bool(_do(self, "bool"))

    def __len__(self) -> int:
        """Return the program's length."""
        return int(_do(self, "len"))

    def __str__(self) -> str:
        """Return the program's text."""
        return str(_do(self, "str"))

    def __repr__(self) -> str:
        """Return the program's text."""
        return str(_do(self, "repr"))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the object in the program's process."""
        return _do(self, "call", *arguments, **named)

    def __iter__(self) -> Iterator[Any]:
        """Yield the program's values."""
        each = _do(self, "iter")
        while True:
            try:
                yield _do(each, "next") if type(each) is RemoteObject else next(each)
            except StopIteration:
                return

    def __next__(self) -> Any:
        """Return the iterator's next value."""
        return _do(self, "next")

    def __getitem__(self, key: Any) -> Any:
        """Return an item."""
        return _do(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set an item."""
        _do(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        """Remove an item."""
        _do(self, "delitem", key)

    def __enter__(self) -> Any:
        """Enter the context."""
        return _do(self, "enter")

    def __exit__(self, *_: object) -> bool:
        """Leave the context; its error stays in the test."""
        return bool(_do(self, "exit", None, None, None))

    def __instancecheck__(self, value: Any) -> bool:
        """Ask the program whether a value is of this class."""
        return bool(object.__getattribute__(self, "_do")("isinstance", value, self))


def _do(each: RemoteObject, operation: str, *arguments: Any, **named: Any) -> Any:
    return object.__getattribute__(each, "_do")(operation, each, *arguments, **named)


def _add_operator(name: str, is_unary: bool = False, is_order: bool = False) -> None:
    def apply(first: Any, second: Any) -> Any:
        mixes = type(first) is not RemoteObject or type(second) is not RemoteObject
        if mixes and is_order:
            return NotImplemented
        do = object.__getattribute__(first if type(first) is RemoteObject else second, "_do")
        found = do(name, first, second)
        if mixes and type(found) is not RemoteObject:
            raise TypeError("a test must compare plain values, not an object of the program")
        return found

    if is_unary:
        setattr(RemoteObject, f"__{name}__", lambda self: _do(self, name))
        return
    setattr(RemoteObject, f"__{name}__", lambda self, other: apply(self, other))
    if not is_order:
        setattr(RemoteObject, f"__r{name}__", lambda self, other: apply(other, self))


for _name in ("lt", "le", "gt", "ge"):
    _add_operator(_name, is_order=True)
for _name in ("neg", "pos", "invert"):
    _add_operator(_name, is_unary=True)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"):
    _add_operator(_name)
for _name in ("xor", "lshift", "rshift"):
    _add_operator(_name)
