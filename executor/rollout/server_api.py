"""The HTTP APIs of inference servers: the requests that a replica sends, and the parts of the answers that it reads.

An API is only data in and data out; `ServerClient` has the connection. Every API takes token ids and returns token ids,
each with the log-probability under the distribution that was sampled from.

| | vLLM (0.32.0) | SGLang (0.5.23) |
|---|---|---|
| generate | `/v1/completions` with `return_token_ids` | `/generate` with `input_ids` and `return_logprob` |
| new weights | `/pause`, `/collective_rpc` (`reload_weights`), `/resume` | `/pause_generation`, `/update_weights_from_disk`, `/continue_generation` |
| the same without files | its engines take them from GPUs, over vLLM's own communicator | `/init_weights_update_group`, `/update_weights_from_distributed` |
| name of the weights | `/update_weight_version`, `cache_salt` of a request | `weight_version` of an update and of each answer |
| abort | the client closes the connection | the client closes the connection |

Sources: vLLM's `entrypoints/openai/completion`, `entrypoints/rl/online/api_router.py` and `entrypoints/serve/dev`;
SGLang's `srt/entrypoints/http_server.py`, `srt/managers/io_struct.py` and docs.sglang.io/advanced_features/sglang_for_rl.
A class outside this package subclasses `ServerApi`, and a subclass of `ServerApiChoice` names it.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from streamrl.executor.sampling import Sampling
from streamrl.runfile.backend_choice import ServerApiName, server_api_named
from streamrl.runfile.choices import import_object
from streamrl.runfile.roles_config import WeightsWay

STREAM_INTERVAL = 8
"""Tokens in one part of a stream, if the server can choose. A part of one token each takes a client's whole core at
some thousand tokens per second. An aborted rollout loses the tokens of its last, unfinished part."""
MOST_LOGPROB = 1e-3
"""Largest log-probability that rounding explains (an assumption); a probability is at most 1."""
MOST_FLOAT32 = 3.4028235e38
"""Largest finite number of IEEE 754 binary32, in which log-probabilities are kept."""
Body = dict[str, Any]


class RejectedError(RuntimeError):
    """The server rejects one request; it goes on with others."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """Status of HTTP that the server gives the error, if any."""


class AnswerError(RuntimeError):
    """An answer has an unexpected form, so the server cannot be used."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server is, and how to talk to it."""

    url: str
    api: ServerApiName
    timeout: float
    """Seconds without a sign of life after which the server is lost."""
    key: str | None = None
    certificate: str | None = None
    """File with the certificates to trust for https; None: those of the system."""
    directory: str | None = None
    """Directory for new weights, which the server sees too; None: beside the pushed weights."""
    weights: WeightsWay = "disk"
    """How new weights reach the server; see `rollout.external.weights`."""
    num_ranks: int = 1
    """Processes of the server that share the model."""


class Post(NamedTuple):
    """A request to send."""

    path: str
    body: Body | None = None
    query: dict[str, str] | None = None
    may_be_missing: bool = False
    """Whether older versions of the server do not have it."""


class GroupToJoin(NamedTuple):
    """A process group of torch, whose rank 0 sends weights."""

    host: str
    port: int
    size: int
    """Ranks, with the one that sends."""
    name: str


class TensorsToReceive(NamedTuple):
    """Tensors that are sent next over a group, in this order."""

    names: list[str]
    dtypes: list[str]
    """Such as "bfloat16"."""
    shapes: list[list[int]]
    is_last: bool
    """Whether the weights are complete with them."""


class Part(NamedTuple):
    """New tokens of a stream."""

    tokens: list[int]
    logprobs: list[float]
    is_last: bool = False
    weights: str | None = None
    """Name of the weights, if the server reports it."""


class Wanted(NamedTuple):
    """What one request asks for."""

    prompt: list[int]
    """Token ids of the prompt and of the output so far."""
    sampling: Sampling
    max_tokens: int
    end_tokens: tuple[int, ...] = ()
    """Token ids after which the output ends."""
    seed: int | None = None


class ServerApi(ABC):
    """The API of one kind of server."""

    health = "/health"
    """Path that answers 200 while the server can generate."""
    how_to_start: str
    """Options that the server needs, for error messages."""

    @property
    @abstractmethod
    def models(self) -> str:
        """Path that answers which model is served."""

    @abstractmethod
    def see_models(self, answer: Any) -> int | None:
        """Read the answer of `models`; return the longest sequence in tokens, or None if it is not reported."""

    @abstractmethod
    def generate(self, wanted: Wanted, weights: str, priority: int) -> Post:
        """Return the request that generates, as a stream.

        Args:
            wanted: the prompt, how to sample, and where to end.
            weights: name of the current weights; requests of other weights must not share a prefix cache.
            priority: the smallest value goes first.
        """

    @abstractmethod
    def read(self, event: Any, num_before: int) -> Part:
        """Return the new tokens in one event of a stream, of which `num_before` tokens were read.

        `read_part` checks the values, and turns errors of access into `AnswerError`.

        Raises:
            RejectedError: the server rejects the request.
            AnswerError: the event has no token ids or log-probabilities.
        """

    @abstractmethod
    def probe(self, wanted: Wanted) -> Post:
        """Return a request for one token with the two largest log-probabilities, without a stream."""

    @abstractmethod
    def read_probe(self, answer: Any) -> tuple[float, float]:
        """Return these two log-probabilities, the larger one first."""

    def check_update(self, answer: Any) -> None:  # noqa: B027  # most report by status
        """Raise `AnswerError` if an answer with status 200 to a request of `update` reports a failure."""

    @abstractmethod
    def update(self, directory: str, weights: str) -> Sequence[Post]:
        """Return the requests that load a directory's weights under a name; none of our requests runs meanwhile."""

    def join(self, group: GroupToJoin) -> Post:
        """Return the request to join a group from which the server takes weights."""
        raise NotImplementedError("it takes weights from files only")

    def receive(self, tensors: TensorsToReceive, group: str, weights: str) -> Post:
        """Return the request to receive tensors over a group, as part of the weights of a name."""
        raise NotImplementedError("it takes weights from files only")

    def around_update(self) -> tuple[Post, Post]:
        """Return the requests before and after those of `receive`."""
        raise NotImplementedError("it takes weights from files only")

    def leave(self, group: str) -> Post:
        """Return the request to leave a group."""
        raise NotImplementedError("it takes weights from files only")


def make_api(name: str) -> ServerApi:
    """Return the API that `rollout.external.api` names."""
    make: Any = import_object(server_api_named(name).api)
    api: ServerApi = make()
    return api


def read_part(api: ServerApi, event: Any, num_before: int, num_embeddings: int) -> Part:
    """Return the new tokens in one event of a stream, of which `num_before` tokens were read.

    Raises:
        RejectedError: the server rejects the request.
        AnswerError: the event has another form, a token id outside the vocabulary of `num_embeddings`, or a value that
            is not a log-probability.
    """
    try:
        part = api.read(event, num_before)
        for token, logprob in zip(part.tokens, part.logprobs, strict=True):
            if type(token) is not int or not 0 <= token < num_embeddings:
                raise AnswerError(
                    f"it sent token id {reprlib.repr(token)}, but the model has token ids 0 to {num_embeddings - 1}"
                )
            if not _is_logprob(logprob):
                raise AnswerError(
                    f"it sent log-probability {reprlib.repr(logprob)}, which is not a finite number of at most 0"
                )
    except (LookupError, TypeError, ValueError, AttributeError):
        raise AnswerError(
            f"it sent an event of an unexpected form: {reprlib.repr(event)}"
        ) from None
    return part


def _checked(value: Any) -> float:
    """Return a log-probability; raise `ValueError` if a value is none."""
    if not _is_logprob(value):
        raise ValueError(f"{reprlib.repr(value)} is not a log-probability")
    return float(value)


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and -MOST_FLOAT32 <= value <= MOST_LOGPROB


class VllmApi(ServerApi):
    """vLLM's OpenAI-compatible server."""

    how_to_start = (
        "start it as `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs`"
    )

    def __init__(self) -> None:
        self._model = ""
        self.sends_priorities = False

    @property
    def models(self) -> str:
        """Path of the list of models."""
        return "/v1/models"

    def see_models(self, answer: Any) -> int | None:
        """Keep the name of the model; return `max_model_len`."""
        first = answer["data"][0]
        most: int | None = first.get("max_model_len")
        if type(first["id"]) is not str or type(most) not in (int, type(None)):
            raise TypeError("id must be a text, max_model_len an integer")
        self._model = first["id"]
        return most

    def generate(self, wanted: Wanted, weights: str, priority: int) -> Post:
        """Return a request for completions."""
        body = {
            **self._body(wanted),
            "cache_salt": weights,
            "logprobs": 0,  # only of the sampled token
            "return_token_ids": True,
            "stream": True,
            "stream_interval": STREAM_INTERVAL,
        }
        if self.sends_priorities:
            body["priority"] = priority
        return Post("/v1/completions", body)

    def read(self, event: Any, num_before: int) -> Part:
        """Return the tokens of one part of the stream."""
        _refuse(event)
        if not event["choices"]:  # such as the usage
            return Part([], [])
        (choice,) = event["choices"]
        tokens, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if tokens is None or (tokens and logprobs is None):
            raise AnswerError(
                "it returns no token ids with log-probabilities; it needs vLLM 0.29 or newer"
            )
        values = logprobs["token_logprobs"] if logprobs else []
        return Part(tokens, values, choice.get("finish_reason") is not None)

    def probe(self, wanted: Wanted) -> Post:
        """Return a request for one token with the log-probabilities of two."""
        return Post("/v1/completions", {**self._body(wanted), "logprobs": 2})

    def read_probe(self, answer: Any) -> tuple[float, float]:
        """Return the two largest log-probabilities of the first token."""
        (first,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        largest, second, *_ = sorted(first.values(), reverse=True)
        return _checked(largest), _checked(second)

    def update(self, directory: str, weights: str) -> Sequence[Post]:
        """Return the requests that pause, load, name the weights and resume."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        return (
            Post("/pause", query={"mode": "abort", "clear_cache": "true"}),
            Post("/collective_rpc", load),
            Post("/reset_prefix_cache"),
            Post("/update_weight_version", {"new_version": weights}, may_be_missing=True),
            Post("/resume"),
        )

    def _body(self, wanted: Wanted) -> Body:
        """Return what every request has; each sampling key is named, because the model's own would apply else."""
        sampling, truncation = wanted.sampling, wanted.sampling.truncation
        return {
            "model": self._model,
            "prompt": wanted.prompt,
            "max_tokens": wanted.max_tokens,
            "temperature": sampling.temperature,
            "top_k": truncation.top_k or 0,
            "top_p": truncation.top_p,
            "min_p": truncation.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(wanted.end_tokens),
            "ignore_eos": True,  # only the tokens above end a rollout
            "seed": wanted.seed,
            "return_tokens_as_token_ids": True,
        }


class SglangApi(ServerApi):
    """SGLang's own API.

    A request also ends at end tokens of the server's own tokenizer. `ExternalEngine` then goes on with another one.
    """

    how_to_start = "start it as `python -m sglang.launch_server --model-path MODEL`"

    @property
    def models(self) -> str:
        """Path of the facts of the model."""
        return "/model_info"

    def see_models(self, answer: Any) -> int | None:
        """Return None: it reports no length."""
        if not answer.get("is_generation", True):
            raise AnswerError("the server does not generate: its model embeds or scores")
        return None

    def generate(self, wanted: Wanted, weights: str, priority: int) -> Post:
        """Return a request of SGLang's API.

        `priority` is not sent: whether SGLang serves small or large values first depends on an option of the server.
        """
        body = self._body(wanted)
        return Post("/generate", {**body, "logprob_start_len": -1, "stream": True})

    def read(self, event: Any, num_before: int) -> Part:
        """Return the new tokens of one event; events have the whole output, or only new tokens, by its own option."""
        _refuse(event)
        about = event["meta_info"]
        triples = about.get("output_token_logprobs")
        if triples is None:
            raise AnswerError("it returns no log-probabilities of the output")
        has_whole = len(triples) == about["completion_tokens"] >= num_before
        new = triples[num_before:] if has_whole else triples
        finish = about.get("finish_reason")
        if finish is not None and finish.get("type") == "abort":
            raise RuntimeError(f"the server aborted a request: {finish.get('message')}")
        return Part(
            [token for _, token, *_ in new],
            [value for value, *_ in new],
            finish is not None,
            about.get("weight_version"),
        )

    def probe(self, wanted: Wanted) -> Post:
        """Return a request for one token with the log-probabilities of two."""
        return Post("/generate", {**self._body(wanted), "top_logprobs_num": 2})

    def read_probe(self, answer: Any) -> tuple[float, float]:
        """Return the two largest log-probabilities of the first token."""
        (first,) = answer["meta_info"]["output_top_logprobs"]
        largest, second, *_ = sorted((value for value, *_ in first), reverse=True)
        return _checked(largest), _checked(second)

    def update(self, directory: str, weights: str) -> Sequence[Post]:
        """Return the requests that pause, load and name the weights, and continue."""
        load = {"model_path": directory, "weight_version": weights, "flush_cache": True}
        before, after = self.around_update()
        return before, Post("/update_weights_from_disk", load), after

    def around_update(self) -> tuple[Post, Post]:
        """Return the requests that pause and continue."""
        return Post("/pause_generation", {"mode": "abort"}), Post("/continue_generation", {})

    def join(self, group: GroupToJoin) -> Post:
        """Return the request to join a group behind its first rank."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": "gloo",
        }
        return Post("/init_weights_update_group", body)

    def receive(self, tensors: TensorsToReceive, group: str, weights: str) -> Post:
        """Return the request to receive tensors; the last one names the weights and empties the prefix cache."""
        body = {
            "names": tensors.names,
            "dtypes": tensors.dtypes,
            "shapes": tensors.shapes,
            "group_name": group,
            "flush_cache": tensors.is_last,
            **({"weight_version": weights} if tensors.is_last else {}),
        }
        return Post("/update_weights_from_distributed", body)

    def leave(self, group: str) -> Post:
        """Return the request to leave a group."""
        return Post("/destroy_weights_update_group", {"group_name": group})

    def check_update(self, answer: Any) -> None:
        """Check `success`, which the answer to an update has."""
        if isinstance(answer, dict) and not answer.get("success", True):
            raise AnswerError(str(answer.get("message")))

    def _body(self, wanted: Wanted) -> Body:
        """Return what every request has; each sampling key is named, because the model's own would apply else."""
        sampling, truncation = wanted.sampling, wanted.sampling.truncation
        return {
            "input_ids": wanted.prompt,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": wanted.max_tokens,
                "temperature": sampling.temperature,
                "top_k": truncation.top_k or -1,
                "top_p": truncation.top_p,
                "min_p": truncation.min_p,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop_token_ids": list(wanted.end_tokens),
                "ignore_eos": not wanted.end_tokens,  # it switches the tokens above off too
                "skip_special_tokens": False,
                "stream_interval": STREAM_INTERVAL,
            },
        }


def _refuse(event: Any) -> None:
    """Raise `RejectedError` if an event of a stream is an error."""
    error = event.get("error")
    if error is not None:
        details = error if isinstance(error, dict) else {}
        code = details.get("code")
        status = code if type(code) is int else None
        raise RejectedError(str(details.get("message", error)), status)
