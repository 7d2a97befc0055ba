"""The engine without a model: threads and tasks, limits, ends and errors. Tokens are right only if the cache is."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shaderlm.engine import EngineOptions, Handle, LanguageModel, Request, SamplingParams
from shaderlm.engine.scheduler import Batch
from shaderlm.errors import ContextSizeError, DeviceError, InputError, QueueFullError, UnavailableError
from shaderlm.graph.batch import PAGE

from .fake_runner import FakeRunner, FakeTokens, continued, hashed, model_of, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCABULARY = len(TOKENIZER.vocabulary.tokens)
TOKEN = hashed(VOCABULARY)
ENDS = TOKENIZER.stop_ids


def made(**options: Any) -> tuple[LanguageModel, FakeRunner]:
    gc.freeze()  # `left_nothing` searches what is new for garbage, not all that the tests have imported
    runner = FakeRunner(TOKEN, VOCABULARY, **{"context": 8 * PAGE, **options})
    return model_of(runner, TOKENIZER), runner


@pytest.fixture
def model() -> Iterator[LanguageModel]:
    found, runner = made()
    yield found
    found.close()
    left_nothing(runner)


def left_nothing(runner: FakeRunner) -> None:
    assert runner.pool.sequences == 0
    assert runner.pool.free == runner.pool.pages, "no page is left"
    assert not {"engine", "masks"} & {thread.name for thread in threading.enumerate()}
    gc.collect()
    assert "pending" not in runner.fates


def request(prompt: list[int], tokens: int = 20, **options: Any) -> Request:
    return Request(prompt, max_tokens=tokens, **options)


def expected(prompt: list[int], tokens: int = 20) -> list[int]:
    return continued(prompt, TOKEN, tokens)


def ids_of(handle: Handle) -> list[int]:
    return [i for delta in handle for i in delta.ids]


def held(runner: FakeRunner) -> threading.Event:
    """Steps come back after this event."""
    go_on = threading.Event()
    runner.awaited = lambda tokens: go_on.wait(60)  # type: ignore[method-assign]
    return go_on


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# Many at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "deterministic"), [(1, False), (2, False), pytest.param(2, True, marks=pytest.mark.smoke)]
)
def test_many_clients_in_a_small_pool(ahead: int, deterministic: bool) -> None:
    """Threads, tasks and handles, shared beginnings, a tenth cancelled, a pool of a third of what they want."""
    model, runner = made(ahead=ahead)
    runner.deterministic, runner.max_pages, runner.max_outputs = deterministic, 28, 32
    model.engine.configure(EngineOptions())  # the limits follow from these
    go_on = held(runner)
    rng = random.Random(ahead)
    shared = [rng.randrange(VOCABULARY) for _ in range(2 * PAGE)]
    prompts = [
        shared[: rng.choice((0, PAGE, 200, 256))] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 90))]
        for _ in range(96)
    ]
    counts = [rng.randrange(64, 130) for _ in prompts]
    wrong: list[int] = []

    def check(i: int, ids: list[int]) -> None:
        if ids != expected(prompts[i], counts[i])[: len(ids)]:
            wrong.append(i)

    def in_thread(i: int) -> None:
        if i % 10 == 0:
            with model.stream(prompts[i], max_tokens=counts[i], ignore_eos=True) as stream:
                for _ in zip(stream, range(9), strict=False):
                    pass
            assert stream.completion is not None
            check(i, stream.completion.ids)
        else:
            found = model.generate(prompts[i], max_tokens=counts[i], ignore_eos=True)
            assert len(found.ids) == counts[i]
            check(i, found.ids)

    async def in_tasks(numbers: list[int]) -> None:
        options: Any = {"ignore_eos": True}
        found = await asyncio.gather(*(model.agenerate(prompts[i], max_tokens=counts[i], **options) for i in numbers))
        for i, completion in zip(numbers, found, strict=True):
            assert len(completion.ids) == counts[i]
            check(i, completion.ids)

    threads = [threading.Thread(target=in_thread, args=(i,)) for i in range(48)]
    threads.append(threading.Thread(target=lambda: asyncio.run(in_tasks(list(range(48, 96))))))
    for thread in threads:
        thread.start()
    wait_until(lambda: len(model.engine.sequences()) == 96)
    go_on.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    stats = model.engine.stats()
    assert not wrong
    assert stats.preemptions > 0
    assert sum(stats.finished.values()) == 96
    assert stats.finished["length"] >= 96 - 5, "who leaves may be too late"
    assert stats.prefix_hits > 0
    assert runner.pool.pages <= 28
    decode = [len(step) for step in runner.steps if set(step) == {1}]
    assert sum(count >= 8 for count in decode) > len(decode) / 2
    model.close()
    left_nothing(runner)


@pytest.mark.parametrize(("alone", "most"), [(True, 3), (False, 2)])
def test_more_steps_are_on_their_way_where_one_sequence_decodes_alone(alone: bool, most: int) -> None:
    found, runner = made()
    runner.steps_ahead_alone = 3
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    engine, all_submitted = found.engine, threading.Event()

    def awaited(tokens: FakeTokens) -> None:
        all_submitted.wait(60)
        seen[len(engine._scheduler.running)].append(len(engine._core.in_flight))

    runner.awaited = awaited  # type: ignore[method-assign]
    handles = [engine.submit(request([i], 100)) for i in range(1 if alone else 2)]
    all_submitted.set()
    assert [ids_of(handle) for handle in handles] == [expected([i], 100) for i in range(len(handles))]
    assert max(seen[len(handles)][4:50]) == most, "the first steps were on their way when the other one came"
    found.close()
    left_nothing(runner)


def test_no_more_steps_are_on_their_way_while_a_prompt_is_read_alone() -> None:
    """They are long: a request that comes then would wait for all of them."""
    found, runner = made(max_tokens=8)
    runner.steps_ahead_alone = 3
    core, ahead = found.engine._core, dict[bool, int]()
    submit = core.submit

    def counted(batch: Batch) -> bool:
        ahead[batch.decode] = max(ahead.get(batch.decode, 0), len(core.in_flight) + 1)
        return submit(batch)

    core.submit = counted  # type: ignore[method-assign]
    prompt = list(range(64))
    assert ids_of(found.engine.submit(request(prompt, 30))) == expected(prompt, 30)
    assert ahead == {False: 2, True: 3}
    found.close()
    left_nothing(runner)


def test_streams_go_on_while_a_long_prompt_is_read(model: LanguageModel) -> None:
    handles = [model.engine.submit(request([i], 60)) for i in range(3)]
    wait_until(lambda: all(handle.usage.completion_tokens for handle in handles) or handles[0].state == "finished")
    long = model.engine.submit(request([7] * 500, 3))
    found = [ids_of(handle) for handle in (*handles, long)]
    assert found == [expected([i], 60) for i in range(3)] + [expected([7] * 500, 3)]


def test_a_second_prompt_begins_after_what_is_cached(model: LanguageModel) -> None:
    first, second = [3] * 300 + [1], [3] * 300 + [2, 4]
    assert ids_of(model.engine.submit(request(first, 5))) == expected(first, 5)
    handle = model.engine.submit(request(second, 5))
    assert ids_of(handle) == expected(second, 5)
    assert handle.usage.cached_tokens == 300
    other = model.engine.submit(request(second, 5, cache_prompt=False))
    assert (ids_of(other), other.usage.cached_tokens) == (expected(second, 5), 0)


def test_clients_do_not_find_the_prompts_of_others(model: LanguageModel) -> None:
    prompt = [3] * 300
    cached = []
    for client in ("a", "b", "a", None, None):
        handle = model.engine.submit(request(prompt, 2, client=client))
        assert ids_of(handle) == expected(prompt, 2)
        cached.append(handle.usage.cached_tokens)
    assert cached == [0, 0, 299, 0, 299]


def test_prefixes_that_all_clients_share_are_whole_pages() -> None:
    model, runner = made()
    model.engine.configure(EngineOptions(share_prefixes=True))
    prompt, cached = [3] * (2 * PAGE + 40), []
    for client in ("a", "b", "b"):
        handle = model.engine.submit(request(prompt, 2, client=client))
        assert ids_of(handle) == expected(prompt, 2)
        cached.append(handle.usage.cached_tokens)
    assert cached == [0, 2 * PAGE, 2 * PAGE]
    model.close()
    left_nothing(runner)


def test_logits_share_steps_with_others() -> None:
    """A stream goes on while the prompt of somebody who asks for logits is read."""
    model, runner = made()
    handle = model.engine.submit(request([5], 400))
    shared, run = list[list[tuple[str, int]]](), runner._run

    def watched(records: Any, outputs: Any, keys: int, parts: Any) -> Any:
        shared.append([(part.gives, part.rows) for part in parts])
        return run(records, outputs, keys, parts)

    runner._run = watched  # type: ignore[method-assign]
    ids = [i % VOCABULARY for i in range(3 * runner.max_outputs)]
    logits = model.logits(ids)
    assert logits.shape == (len(ids), VOCABULARY)
    assert logits.argmax(1).tolist() == [expected(ids[: i + 1], 1)[0] for i in range(len(ids))]
    assert ids_of(handle) == expected([5], 400)
    together = [step for step in shared if any(gives == "all logits" for gives, _ in step)]
    assert sum(rows for step in together for gives, rows in step if gives == "all logits") == len(ids)
    assert all(("token", 1) in step for step in together)
    assert all(sum(rows for _, rows in step) <= runner.max_outputs for step in together)
    model.close()
    left_nothing(runner)


def test_logits_of_a_prompt_that_makes_way_for_others() -> None:
    """The pool has no room for both: the younger one waits, and is computed again."""
    model, runner = made()
    model.engine.configure(EngineOptions(cache_tokens=4 * PAGE))
    handle = model.engine.submit(request([5] * (2 * PAGE), PAGE + 3))
    ids = [i % VOCABULARY for i in range(2 * PAGE - 3)]
    logits = model.logits(ids)
    assert logits.argmax(1).tolist() == [expected(ids[: i + 1], 1)[0] for i in range(len(ids))]
    assert ids_of(handle) == expected([5] * (2 * PAGE), PAGE + 3)
    model.close()
    left_nothing(runner)


def test_requests_that_are_submitted_together_start_in_one_step() -> None:
    model, runner = made()
    steps, run = list[int](), runner._run

    def watched(records: Any, outputs: Any, keys: int, parts: Any) -> Any:
        steps.append(len(parts))
        return run(records, outputs, keys, parts)

    runner._run = watched  # type: ignore[method-assign]
    handles = model.engine.submit_all([request([i], 5) for i in range(7)])
    assert [ids_of(handle) for handle in handles] == [expected([i], 5) for i in range(7)]
    assert steps[0] == 7
    model.engine.configure(EngineOptions(parallel=2, queue=1))
    with pytest.raises(QueueFullError):
        model.engine.submit_all([request([i], 500) for i in range(4)])
    wait_until(lambda: not model.engine.sequences())
    model.close()
    left_nothing(runner)


def test_two_tasks_read_one_handle(model: LanguageModel) -> None:
    """Each delta goes to one of them, and both hear of the end."""
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    runner.awaited = lambda tokens: time.sleep(0.001)  # type: ignore[method-assign]

    async def read(handle: Handle) -> list[int]:
        return [i async for delta in handle for i in delta.ids]

    async def main() -> None:
        handle = model.engine.submit(request([5], 60))
        found = await asyncio.wait_for(asyncio.gather(*(read(handle) for _ in range(3))), 60)
        assert sorted(i for each in found for i in each) == sorted(expected([5], 60))

    asyncio.run(main())


def test_one_caller_needs_no_thread(model: LanguageModel) -> None:
    before = threading.active_count()
    for i, _ in enumerate(model.stream([5], max_tokens=30, ignore_eos=True)):
        assert threading.active_count() == before, i


def test_the_caller_steps_again_when_the_others_are_over() -> None:
    model, runner = made()
    stream = model.stream([5], max_tokens=300, ignore_eos=True)
    next(stream)
    assert ids_of(model.engine.submit(request([6], 10))) == expected([6], 10)
    wait_until(lambda: not model.engine.has_thread)
    for _ in stream:
        assert not model.engine.has_thread
    assert stream.completion is not None
    assert stream.completion.ids == expected([5], 300)
    model.close()
    left_nothing(runner)


# Reading -------------------------------------------------------------------------------------------------


def test_a_slow_reader_gets_all_at_once(model: LanguageModel) -> None:
    handle = model.engine.submit(request([5], 40))
    wait_until(lambda: handle.finish_reason is not None)
    (delta,) = list(handle)
    assert list(delta.ids) == expected([5], 40)
    assert handle.completion is not None
    assert delta.text == str(handle.completion)
    assert handle.usage.completion_tokens == 40
    assert handle.timing.queue_seconds >= 0
    assert handle.timing.tokens_per_second > 0
    assert list(handle) == []


def test_asyncio(model: LanguageModel) -> None:
    runner = model.runner
    assert isinstance(runner, FakeRunner)

    async def main() -> None:
        deltas = [delta async for delta in model.engine.submit(request([5], 30))]
        assert [i for delta in deltas for i in delta.ids] == expected([5], 30)
        texts = [text async for text in model.astream([5], max_tokens=30, ignore_eos=True)]
        assert "".join(texts) == "".join(delta.text for delta in deltas)
        found = await model.achat([{"role": "user", "content": "hello"}], max_tokens=4, ignore_eos=True)
        assert len(found.ids) == 4
        runner.awaited = lambda tokens: time.sleep(0.001)  # type: ignore[method-assign]
        async with model.astream([5], max_tokens=900, ignore_eos=True) as stream:
            async for _ in stream:
                break
        assert stream.completion is not None
        assert stream.completion.finish_reason == "closed"
        with pytest.raises(InputError, match="empty"):
            await model.agenerate([])

    asyncio.run(main())


def test_a_task_that_is_cancelled_ends_its_generation_alone() -> None:
    model, runner = made()
    go_on = held(runner)

    async def main() -> None:
        task = asyncio.create_task(model.agenerate([5], max_tokens=50, ignore_eos=True))
        other = asyncio.create_task(model.agenerate([6], max_tokens=50, ignore_eos=True))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        assert (await other).ids == expected([6], 50)

    asyncio.run(main())
    assert model.engine.stats().finished == {"closed": 1, "length": 1}
    model.close()
    left_nothing(runner)


def test_one_wake_up_for_all_handles_of_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runner = made(ahead=1)
    go_on = held(runner)

    async def main() -> int:
        loop = asyncio.get_running_loop()
        calls, real = [], loop.call_soon_threadsafe

        def counted(*given: Any) -> Any:
            calls.append(given)
            return real(*given)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        tasks = [asyncio.create_task(model.agenerate([i], max_tokens=10, ignore_eos=True)) for i in range(8)]
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.gather(*tasks)
        return len(calls)

    assert asyncio.run(main()) <= 24, "not 80"
    model.close()


# Ends ----------------------------------------------------------------------------------------------------


def test_cancelled_before_the_next_step() -> None:
    model, runner = made(ahead=2)
    go_on = held(runner)
    handle, other = (model.engine.submit(request([i], 60)) for i in (5, 6))
    wait_until(lambda: len(runner.steps) >= 2)
    before = len(runner.steps)
    handle.cancel()
    handle.cancel()
    go_on.set()
    assert ids_of(other) == expected([6], 60)
    list(handle)
    assert (handle.finish_reason, handle.state) == ("closed", "finished")
    late = [step for step in runner.steps[before + 1 :] if len(step) > 1]
    assert not late, "one step at most was submitted with it"
    model.close()
    left_nothing(runner)


def test_a_request_that_waits_can_be_cancelled(model: LanguageModel) -> None:
    model.engine.configure(EngineOptions(parallel=1))
    first, second = model.engine.submit(request([5], 200)), model.engine.submit(request([6], 10))
    second.cancel()
    assert list(second) == []
    assert second.finish_reason == "closed"
    assert (second.completion, second.timing.prompt_seconds) == ("", 0)
    assert second.timing.queue_seconds > 0
    assert ids_of(first) == expected([5], 200)


def test_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by 5 ms with every step."""
    model, runner = made()
    steps: list[FakeTokens] = []
    runner.awaited = steps.append  # type: ignore[method-assign, assignment]
    monkeypatch.setattr("shaderlm.engine.inbox.time", SimpleNamespace(perf_counter=lambda: 1000 + 0.005 * len(steps)))
    handle = model.engine.submit(request([5], 800, timeout=0.5))
    ids = ids_of(handle)
    assert handle.finish_reason == "deadline"
    assert 0 < len(ids) < 800
    assert ids == expected([5], len(ids))
    assert model.generate([5], max_tokens=900, ignore_eos=True, timeout=0.05).finish_reason == "deadline"
    model.engine.configure(EngineOptions(parallel=1))

    def slowly(tokens: FakeTokens) -> None:
        steps.append(tokens)
        time.sleep(0.005)

    runner.awaited = slowly  # type: ignore[method-assign]
    first = model.engine.submit(request([5], 800))
    late = asyncio.run(model.agenerate([6], max_tokens=9, timeout=0.02))
    assert (late.finish_reason, late.ids) == ("deadline", []), "before it started"
    first.cancel()
    first.result()
    model.close()
    left_nothing(runner)


def test_stop_tokens_and_strings(model: LanguageModel) -> None:
    whole = expected([5], 30)
    stop = whole[12]
    at = whole.index(stop)
    handle = model.engine.submit(request([5], 30, stop_ids=frozenset({stop})))
    assert ids_of(handle) == whole[:at]
    assert (handle.finish_reason, handle.stop_match) == ("stop", stop)
    assert model.generate([5], max_tokens=30, stop_token_ids=[stop], ignore_eos=True).ids == whole[:at]
    text = str(model.generate([5], max_tokens=30, ignore_eos=True))
    string = text[len(text) // 2 : len(text) // 2 + 2]
    handle = model.engine.submit(request([5], 30, stop=("never", string)))
    found = "".join(delta.text for delta in handle)
    assert found == text[: text.index(string)]
    assert (handle.finish_reason, handle.stop_match) == ("stop", string)


def test_priorities_go_first(model: LanguageModel) -> None:
    model.engine.configure(EngineOptions(parallel=1))
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    go_on = held(runner)
    order: list[str] = []
    first = model.engine.submit(request([5], 10))
    handles = {
        name: model.engine.submit(request([6], 5, priority=priority))
        for name, priority in (("late", 1), ("usual", 0), ("urgent", -1))
    }
    go_on.set()
    list(first)
    for name, handle in handles.items():
        list(handle)
        order.append(name)
    started = sorted(handles, key=lambda name: handles[name].started)
    assert started == ["urgent", "usual", "late"]


def test_the_queue_has_a_limit(model: LanguageModel) -> None:
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    model.engine.configure(EngineOptions(parallel=2, queue=3))
    go_on = held(runner)
    handles = [model.engine.submit(request([i], 5)) for i in range(5)]
    with pytest.raises(QueueFullError, match="2 requests run and 3 wait, which is the most") as caught:
        model.engine.submit(request([9], 5))
    assert (caught.value.waiting, caught.value.limit) == (3, 3)
    assert caught.value.retry_after >= 1
    with pytest.raises(InputError, match="the engine has 5 requests"):
        model.engine.configure(EngineOptions())
    states = {info.state for info in model.engine.sequences()}
    assert "waiting" in states
    assert model.engine.stats().waiting >= 3
    go_on.set()
    assert [ids_of(handle) for handle in handles] == [expected([i], 5) for i in range(5)]
    model.engine.submit(request([9], 5)).result()


def test_what_does_not_fit_is_refused_before_it_runs() -> None:
    model, runner = made()
    model.engine.configure(EngineOptions(cache_tokens=2 * PAGE))
    assert model.engine.context == 2 * PAGE - 1
    assert runner.pool.pages == 2
    with pytest.raises(ContextSizeError, match="the prompt has 300 tokens, the context holds 255") as caught:
        model.engine.submit(request([1] * 300))
    assert (caught.value.prompt_tokens, caught.value.context) == (300, 255)
    found = model.engine.submit(request([1] * 250, 50)).result()
    assert found is not None
    assert (found.finish_reason, found.ids) == ("length", expected([1] * 250, 6))
    assert model.engine.tokens_for(5 * runner.page_bytes + 1) == 5 * PAGE
    wrong: Any
    for wrong in ({"parallel": 0}, {"queue": -1}, {"cache_tokens": 0}, {"chunk_tokens": -3}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            model.engine.configure(EngineOptions(**wrong))
    model.close()
    left_nothing(runner)


# What a request may ask for ------------------------------------------------------------------------------


def test_a_hidden_state(model: LanguageModel) -> None:
    text, state = (model.engine.submit(request([5, 6, 7], 4, output=output)) for output in ("text", "hidden"))
    assert ids_of(text) == expected([5, 6, 7], 4)
    assert state.result() is None
    assert state.hidden is not None
    np.testing.assert_array_equal(state.hidden, [3, 7])
    assert (state.finish_reason, state.usage.completion_tokens) == ("stop", 0)


def test_a_wrong_request_does_not_reach_the_others(model: LanguageModel) -> None:
    class Short:
        def start(self) -> Short:
            return self

        def mask(self) -> bytes:
            return b"\xff"

        def accept(self, token: int) -> bool:
            return True

        def is_complete(self, dropped: int, prefix: bytes) -> bool:
            return True

    running = model.engine.submit(request([5], 60))
    for wrong, message in (
        (request([VOCABULARY]), "a token id must lie in"),
        (request([]), "the prompt is empty"),
        (request([1], 0), "max_tokens must be at least 1"),
        (request([1], stop_ids=frozenset({-1})), "a token id must lie in"),
        (request([1], sampling=SamplingParams(logit_bias={VOCABULARY: 1.0})), "logit_bias has token"),
    ):
        with pytest.raises(InputError, match=message):
            model.engine.submit(wrong)
    with pytest.raises(InputError, match="a mask must have"):
        list(model.engine.submit(request([6], constraint=Short())))
    assert ids_of(running) == expected([5], 60)


class Allowed:
    """A constraint that has seen every token before it allows the next one."""

    def __init__(self, tokens: int, fails: bool = False) -> None:
        self.seen: list[int] = []
        self.masks, self.tokens, self.fails = 0, tokens, fails
        self.ends = True  # with the last of its tokens

    def start(self) -> Allowed:
        return self

    def mask(self) -> bytes:
        assert self.masks == len(self.seen), "the token before is known"
        self.masks += 1
        if self.fails and self.masks == 3:
            raise ZeroDivisionError("no mask")
        return b"\xff" * (4 * -(-VOCABULARY // 32))

    def accept(self, token: int) -> bool:
        self.seen.append(token)
        return len(self.seen) < self.tokens or not self.ends

    def is_complete(self, dropped: int, prefix: bytes) -> bool:
        return len(self.seen) - dropped >= self.tokens


class Unknown(Allowed):
    """A constraint that cannot say whether a text is complete."""

    def is_complete(self, dropped: int, prefix: bytes) -> bool:
        raise ZeroDivisionError("nobody knows")


@pytest.mark.parametrize(
    ("constraint", "reason"), [(Allowed(3), "stop"), (Allowed(60), "length"), (Unknown(3), "length")]
)
def test_a_stop_id_within_a_form(model: LanguageModel, constraint: Allowed, reason: str) -> None:
    ids = expected([6], 60)
    at = next(i for i, token in enumerate(ids) if i > 2 and token not in ids[:i])
    constraint.tokens = at + 1 if constraint.tokens == 60 else at
    constraint.ends = False
    plain = model.engine.submit(request([5], 60))
    handle = model.engine.submit(request([6], 60, constraint=constraint, stop_ids=frozenset({ids[at]})))
    assert ids_of(handle) == ids[:at]
    assert handle.finish_reason == reason
    assert ids_of(plain) == expected([5], 60)


def test_a_constraint_sees_every_token_and_holds_nobody_up(model: LanguageModel) -> None:
    constraint, broken = Allowed(7), Allowed(7, fails=True)
    plain = model.engine.submit(request([5], 60))
    handle = model.engine.submit(request([6], 60, constraint=constraint))
    failing = model.engine.submit(request([7], 60, constraint=broken))
    assert ids_of(handle) == expected([6], 7) == constraint.seen
    assert (handle.finish_reason, handle.stop_match) == ("stop", None)
    with pytest.raises(ZeroDivisionError, match="no mask"):
        list(failing)
    assert failing.finish_reason == "error"
    assert ids_of(plain) == expected([5], 60)


def test_no_end_before_min_tokens(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler is told to leave the stop tokens out as long as too few came."""
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    banned: list[bool] = []
    step, decode = runner.step, runner.decode_batch

    def first(parts: Any) -> Any:
        banned.append(bool(parts[0].settings.bias))
        return step(parts)

    def later(sequences: Any, settings: Any) -> Any:
        batch = decode(sequences, settings)
        now, replace, run = [settings[0]], batch.replace, batch.step

        def replaced(sequences: Any, settings: Any) -> None:
            now[0] = settings[0]
            replace(sequences, settings)

        def stepped() -> Any:
            banned.append(now[0].bias == ((3, float("-inf")), (4, float("-inf"))))
            return run()

        monkeypatch.setattr(batch, "replace", replaced)
        monkeypatch.setattr(batch, "step", stepped)
        return batch

    monkeypatch.setattr(runner, "step", first)
    monkeypatch.setattr(runner, "decode_batch", later)
    list(model.engine.submit(request([5], 9, stop_ids=frozenset({3, 4}), min_tokens=4)))
    assert banned[:8] == [True] * 4 + [False] * 4


def test_every_gap_between_tokens_is_counted() -> None:
    """One step takes long: this gap is among them, for both that are in it."""
    model, runner = made()
    awaited: list[object] = []

    def slow(tokens: object) -> None:
        awaited.append(tokens)
        if len(awaited) == 10:
            time.sleep(0.06)

    runner.awaited = slow  # type: ignore[method-assign]
    with runner.lock:  # no step before both are there
        handles = [model.engine.submit(request([i], 20)) for i in (5, 6)]
    assert [ids_of(handle) for handle in handles] == [expected([i], 20) for i in (5, 6)]
    awaited.clear()
    buckets, total = model.engine.stats().token_gaps.buckets()
    assert buckets[-1] == ("+Inf", 2 * 19)
    assert total == pytest.approx(sum(handle.timing.decode_seconds for handle in handles))
    assert dict(buckets)["0.05"] <= 2 * 18
    model.close()
    left_nothing(runner)


def test_penalties_and_log_probabilities(model: LanguageModel) -> None:
    sampling = SamplingParams(repetition_penalty=1.2, logprobs=1)
    handles = [model.engine.submit(request([i, 9], 9, sampling=sampling)) for i in (5, 6)]
    for i, handle in zip((5, 6), handles, strict=True):
        found = handle.result()
        assert found is not None
        assert found.ids == expected([i, 9], 9)
        assert found.logprobs is not None
        assert [each.id for each in found.logprobs] == found.ids


# Errors and the end --------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_what_runs_and_not_what_waits() -> None:
    model, runner = made()
    model.engine.configure(EngineOptions(parallel=2))
    go_on = held(runner)
    handles = [model.engine.submit(request([i], 30)) for i in range(4)]
    wait_until(lambda: len(runner.steps) >= 2)
    fail_once(runner, ZeroDivisionError("a bug"))
    go_on.set()
    results: list[Any] = []
    for i, handle in enumerate(handles):
        try:
            results.append(ids_of(handle) == expected([i], 30))
        except ZeroDivisionError:
            results.append("failed")
    assert results == ["failed", "failed", True, True]
    assert model.engine.stats().finished == {"error": 2, "length": 2}
    del handles, handle  # the error has what was under way
    model.close()
    left_nothing(runner)


def fail_once(runner: FakeRunner, problem: BaseException) -> None:
    """The next step that is awaited fails."""

    def awaited(tokens: FakeTokens) -> None:
        runner.awaited = lambda tokens: None  # type: ignore[method-assign]
        raise problem

    runner.awaited = awaited  # type: ignore[method-assign]


def test_a_lost_device_ends_everything() -> None:
    class Lost(FakeRunner):
        lost = False

        @property
        def usable(self) -> bool:
            return not self.lost

    runner = Lost(TOKEN, VOCABULARY, context=512)
    model = model_of(runner, TOKENIZER)
    model.engine.configure(EngineOptions(parallel=1))
    go_on = held(runner)
    handles = [model.engine.submit(request([i], 30)) for i in range(3)]
    wait_until(lambda: len(runner.steps) >= 2)
    runner.lost = True
    fail_once(runner, DeviceError("the GPU was lost"))
    go_on.set()
    for handle in handles:
        with pytest.raises(DeviceError, match="the GPU was lost"):
            list(handle)
    assert isinstance(model.engine.lost, DeviceError)
    with pytest.raises(DeviceError, match="the GPU was lost"):
        model.engine.submit(request([1]))
    del handles, handle  # the error has what was under way
    model.close()
    left_nothing(runner)


def test_an_interrupted_caller_leaves_the_engine_whole(model: LanguageModel) -> None:
    runner = model.runner
    assert isinstance(runner, FakeRunner)
    fail_once(runner, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        model.generate([5], max_tokens=9)
    assert model.generate([5], max_tokens=9, ignore_eos=True).ids == expected([5], 9)


def test_a_reader_that_is_interrupted_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the engine's thread steps."""
    model, runner = made()
    runner.awaited = lambda tokens: time.sleep(0.001)  # type: ignore[method-assign]
    handle, other = model.engine.submit(request([5], 900)), model.engine.submit(request([6], 40))

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "wait_in_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(handle)
    assert ids_of(other) == expected([6], 40)
    wait_until(lambda: handle.finish_reason == "closed")
    model.close()
    left_nothing(runner)


def test_a_pool_that_cannot_grow_preempts() -> None:
    """Memory is gone at 6 pages: the sequences that there are share those."""
    model, runner = made()
    grow = runner._grow

    def scarce(pages: int) -> None:
        if pages > 6:
            raise DeviceError("no memory")
        grow(pages)

    runner._grow = scarce  # type: ignore[method-assign]
    prompts = [[i] * 100 for i in range(6)]
    handles = [model.engine.submit(request(prompt, 60)) for prompt in prompts]
    assert [ids_of(handle) for handle in handles] == [expected(prompt, 60) for prompt in prompts]
    assert runner.pool.pages <= 6
    with pytest.raises(DeviceError, match="no memory"):
        model.generate([1] * 900, max_tokens=3)
    model.close()
    left_nothing(runner)


def test_draining() -> None:
    model, runner = made()
    go_on = held(runner)
    handle = model.engine.submit(request([5], 20))
    assert not model.engine.drain(0.01)
    with pytest.raises(UnavailableError, match="takes no more requests"):
        model.engine.submit(request([6], 20))
    go_on.set()
    assert asyncio.run(model.engine.adrain(20))
    assert ids_of(handle) == expected([5], 20)
    model.close()
    left_nothing(runner)


def test_closing_ends_all_readers() -> None:
    model, runner = made()
    runner.awaited = lambda tokens: time.sleep(0.002)  # type: ignore[method-assign]
    ends: list[str] = []

    def read(handle: Handle) -> None:
        try:
            list(handle)
        except UnavailableError as problem:
            ends.append(str(problem))

    async def aread() -> None:
        try:
            await model.agenerate([9], max_tokens=5000)
        except UnavailableError as problem:
            ends.append(str(problem))

    handles = [model.engine.submit(request([i], 5000)) for i in range(3)]
    threads = [threading.Thread(target=read, args=(handle,)) for handle in handles]
    threads.append(threading.Thread(target=lambda: asyncio.run(aread())))
    for thread in threads:
        thread.start()
    wait_until(lambda: model.engine.stats().running == 4)
    model.close()
    for thread in threads:
        thread.join(60)
    assert ends == ["this model is closed; load it again"] * 4
    with pytest.raises(UnavailableError, match="this model is closed"):
        model.engine.submit(request([1]))
    left_nothing(runner)
