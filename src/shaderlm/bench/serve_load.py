"""The load of `bench serve`: which requests are sent when, and what came of each.

Prompts are random token ids, so that no tokenizer is needed; `ignore_eos` keeps answers at their length. Times are the
client's: a token counts when the event with its text was read. Tokens that are read together count as one in the
latency between tokens; the time per output token counts all of them.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import InputError
from .serve_client import Address, Client, ClientAnswer

ROUTE = "/v1/completions"
_LONGEST_ERROR = 300


@dataclass(frozen=True)
class Span:
    """A length, or all lengths from `low` to `high` with the same probability."""

    low: int
    high: int


@dataclass(frozen=True)
class Load:
    """What is sent: `requests`, at most `concurrency` of them at once, `rate` per second on average (None: no limit).

    Prompts have `prefix` tokens in common and then `prompt` tokens of their own. Answers have `output` tokens.
    """

    requests: int
    prompt: Span
    output: Span
    prefix: int = 0
    concurrency: int | None = None
    rate: float | None = None
    temperature: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        """16 streams, 4 requests/s, or both."""
        parts = [f"{self.concurrency} streams" if self.concurrency != 1 else "1 stream"] if self.concurrency else []
        parts += [f"{self.rate:g} requests/s"] if self.rate is not None else []
        return ", ".join(parts) or f"{self.requests} requests at once"


@dataclass(frozen=True)
class ServerInfo:
    """What the server says about its model."""

    name: str
    vocabulary: int
    context: int | None
    device: str  # "" where it does not say
    backend: str


@dataclass(frozen=True)
class Job:
    """A request that is ready to be sent."""

    message: bytes
    output: int


@dataclass(frozen=True)
class Outcome:
    """What came of a request. Times are in seconds of one clock."""

    sent: float
    ended: float
    events: tuple[float, ...] = ()  # when text was read
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    max_tokens: int = 0  # that were asked for
    error: str | None = None

    @property
    def is_cached(self) -> bool:
        """Was at least half of its prompt in the prefix cache? Short random prompts may share a token by chance."""
        return 0 < self.prompt_tokens <= 2 * self.cached_tokens

    @property
    def first_token(self) -> float | None:
        """Seconds to the first token."""
        return self.events[0] - self.sent if self.events else None

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first one; None where all of them were read together."""
        if len(self.events) < 2 or self.output_tokens < 2:
            return None
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)


@dataclass
class Run:
    """One load and its outcomes, which come while it runs."""

    name: str
    load: Load
    outcomes: list[Outcome] = field(default_factory=list)
    beside: list[Outcome] = field(default_factory=list)  # of a companion, which is not measured itself
    seconds: float = 0.0  # from the first request to the end of the last answer; the sum, if it runs several times
    busy: float = 0.0  # CPU seconds of the client


def jobs(client: Client, served: ServerInfo, load: Load, salt: int, more: Mapping[str, Any] | None = None) -> list[Job]:
    """The requests of a load. Another `salt` gives other tokens: servers remember prompts."""
    rng = np.random.default_rng((load.seed, salt))
    shared: list[int] = rng.integers(0, served.vocabulary, load.prefix).tolist()
    requests = []
    for _ in range(load.requests):
        length = int(rng.integers(load.prompt.low, load.prompt.high + 1))
        output = int(rng.integers(load.output.low, load.output.high + 1))
        body = {
            "model": served.name,
            "prompt": shared + rng.integers(0, served.vocabulary, length).tolist(),
            "max_tokens": output,
            "ignore_eos": True,
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        raw = json.dumps(body | dict(more or {}), separators=(",", ":")).encode()
        requests.append(Job(client.address.message("POST", ROUTE, raw), output))
    return requests


def _arrivals(load: Load, count: int) -> list[float]:
    """When each request is sent, in seconds from the start: a Poisson process of this rate."""
    if load.rate is None:
        return [0.0] * count
    gaps = np.random.default_rng((load.seed, 1 << 20)).exponential(1 / load.rate, count)
    times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
    return times


async def send(client: Client, job: Job, on_body: Callable[[], None] | None = None) -> Callable[[], Outcome]:
    """One request, to its end. Its answer is read later: 64 of them at once would take 100 ms, in which others wait."""
    sent = time.perf_counter()
    try:
        return partial(outcome, await client.send(job.message, on_body), job.output)
    except OSError as problem:
        return partial(Outcome, sent, time.perf_counter(), max_tokens=job.output, error=str(problem))


def outcome(answer: ClientAnswer, max_tokens: int) -> Outcome:
    """What an answer says."""
    if answer.status != 200:
        refusal = f"{answer.status}: {_message(answer.body())}"
        return Outcome(answer.sent, answer.ended, max_tokens=max_tokens, error=refusal)
    times: list[float] = []
    usage: dict[str, Any] = {}
    complete, error, texts = False, None, 0
    for came, data in answer.events():
        if data == b"[DONE]":
            complete = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = {"error": data}
        if "error" in event:
            error = _message(data)
        usage = event.get("usage") or usage
        if any(choice.get("text") for choice in event.get("choices") or ()):
            texts += 1
            if not times or came > times[-1]:
                times.append(came)
    if error is None and not complete:
        error = "the stream has no end ([DONE])"
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        answer.sent,
        answer.ended,
        tuple(times),
        int(usage.get("prompt_tokens", 0)),
        int(usage.get("completion_tokens", texts)),
        int(details.get("cached_tokens") or 0),
        max_tokens,
        error,
    )


def _message(body: bytes) -> str:
    """The words of an error."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])[:_LONGEST_ERROR]
    return body[:_LONGEST_ERROR].decode(errors="replace") or "no reason given"


@dataclass(frozen=True)
class Companion:
    """A stream beside the measured ones: one job after the other while they run, or one job once all of them run."""

    jobs: Sequence[Job]
    once: bool = False


async def run(
    client: Client,
    run: Run,
    todo: Sequence[Job],
    companion: Companion | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Send everything, and add the outcomes to `run`, also if this is cancelled. `progress` gets how many there are."""
    load, done = run.load, list[Callable[[], Outcome]]()
    limit = asyncio.Semaphore(load.concurrency or len(todo))
    streaming, all_stream = 0, asyncio.Event()
    at_once = min(load.concurrency or len(todo), len(todo))

    def begins() -> None:
        nonlocal streaming
        streaming += 1
        if streaming >= at_once:
            all_stream.set()

    async def one(job: Job) -> None:
        try:
            done.append(await send(client, job, begins))
            progress(len(done))
        finally:
            limit.release()

    async def beside(companion: Companion) -> None:
        if companion.once:
            await all_stream.wait()
        for job in companion.jobs if companion.once else itertools.cycle(companion.jobs):
            read = await send(client, job)
            run.beside.append(read())
            if run.beside[-1].error is not None:
                return

    began, company = time.thread_time(), None if companion is None else asyncio.create_task(beside(companion))
    finished = False
    try:
        async with asyncio.TaskGroup() as group:
            begin = time.perf_counter()
            for job, at in zip(todo, _arrivals(load, len(todo)), strict=True):
                await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
                await limit.acquire()
                group.create_task(one(job))
        finished = all_stream.is_set()
    finally:
        run.busy += time.thread_time() - began
        if company is not None:
            if not (finished and companion is not None and companion.once):
                company.cancel()
            with suppress(asyncio.CancelledError):
                await company
        outcomes = [read() for read in done]
        run.outcomes += outcomes
        if outcomes:
            run.seconds += max(each.ended for each in outcomes) - min(each.sent for each in outcomes)


async def describe(client: Client, vocabulary: int | None) -> ServerInfo:
    """What the server's list of models says."""
    status, models = await client.get("/v1/models")
    if status != 200:
        words = (models or {}).get("error", {}).get("message", "") if isinstance(models, dict) else ""
        raise InputError(f"the server answers /v1/models with status {status}: {words or 'no reason given'}")
    try:
        model = models["data"][0]
        meta = model.get("meta") or {}
        name = str(model["id"])
    except (TypeError, KeyError, IndexError, AttributeError):
        raise InputError("the server's /v1/models lists no model") from None
    known = vocabulary or meta.get("n_vocab")
    if known is None:
        raise InputError("this server does not say how many tokens its model has; give --vocabulary N")
    context = meta.get("n_ctx") or model.get("max_model_len")
    _, props = await client.get("/props")
    props = props if isinstance(props, dict) else {}
    device, backend = (str(props.get(key) or "") for key in ("device", "backend"))
    return ServerInfo(name, int(known), None if context is None else int(context), device, backend)


async def wait_until_ready(client: Client, seconds: float, is_starting: Callable[[], bool] | None = None) -> bool:
    """Until the server's model is loaded. False: the time is over, or a server that was starting has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and (is_starting is None or is_starting()):
        try:
            status, _ = await client.get("/health")
            if status != 503:
                return True
        except OSError:
            if is_starting is None:
                raise
        await asyncio.sleep(0.1)
    return False


@contextmanager
def open_client(address: Address) -> Iterator[tuple[Client, asyncio.Runner]]:
    """A client and what runs it: uvloop where there is one, and no garbage collection, which takes milliseconds."""
    factory = None
    if find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    client = Client(address)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            try:
                yield client, runner
            finally:
                runner.run(client.close())
    finally:
        if collects:
            gc.enable()
