"""Two replicas on Ray Serve behave as the single server does, and what only several can do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from shaderlm import load
from shaderlm.ray.config import cluster_config
from shaderlm.ray.versions import TESTED

from .lazily import lazily
from .ray_cluster import Deployed, RayServe, ray_serve, until
from .serving import loader, running
from .tiny_models import write_tiny_llama

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("ignore")]

ASK: list[Any] = [{"role": "user", "content": "the an in"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", context=4096)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "requests.jsonl"


@pytest.fixture(scope="module")
def serve() -> Iterator[RayServe]:
    with ray_serve() as running_serve:
        yield running_serve


@pytest.fixture(scope="module")
def two(serve: RayServe, tiny: Path, logs: Path) -> Deployed:
    from .lost_replica import LosesDevice

    options: dict[str, Any] = {"log_file": str(logs), "log_format": "json", "parallel": 128}
    return serve.deploy(LosesDevice, model=str(tiny), replicas=2, **options)


def body(content: str, tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "ignore_eos": True, **more}


# The contract --------------------------------------------------------------------------------------------


def test_clients_see_the_single_server(two: Deployed, tiny: Path) -> None:
    prompts = [f"the an {number}" for number in range(6)]
    with running(loader(tiny, source=str(tiny))) as single:
        expected, listed = _answers(f"{single.url}/v1", prompts), single.client().get("/v1/models").json()
        wrong = [single.client().post(CHAT, json=each) for each in _WRONG]
    assert _answers(f"{two.url}/v1", prompts) == expected
    with two.client() as http:
        assert {**http.get("/v1/models").json()["data"][0], "created": 0} == {**listed["data"][0], "created": 0}
        for sent, answer in zip(_WRONG, wrong, strict=True):
            got = http.post(CHAT, json=sent)
            assert (got.status_code, got.json()) == (answer.status_code, answer.json())
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/").text.startswith("<!doctype html>")
    answered = two.samples("shaderlm:request_success_total")
    assert len(answered) == 2, "both replicas have the label"
    assert len(two.samples("shaderlm:generation_tokens_total")) == 2


_WRONG: list[Any] = [{"messages": 3}, {"messages": ASK, "temperature": -1}, {"messages": ASK, "n": 0}, {}]


def _answers(url: str, prompts: list[str]) -> list[tuple[str | None, str]]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        answers = []
        for prompt in prompts:
            options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
            options["messages"] = [{"role": "user", "content": prompt}]
            whole = client.chat.completions.create(**options).choices[0].message.content
            chunks = client.chat.completions.create(**options, stream=True)
            answers.append((whole, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)))
        return answers


def test_a_request_has_one_name_in_all_logs(two: Deployed, logs: Path) -> None:
    with two.client() as http:
        answer = http.post(CHAT, json=body("the"), headers={"x-request-id": "one-name"})
    assert answer.headers["x-request-id"] == "one-name"

    def lines() -> list[Any]:
        entries = [json.loads(line) for line in logs.read_text().splitlines()]
        return [each for each in entries if each["request"] == "one-name"]

    until(lambda: len(lines()) == 2, "both processes log the request")
    first, second = sorted(lines(), key=lambda each: each["process"] == "ingress")
    assert second["process"] == "ingress"
    assert (first["route"], first["completion_tokens"], first["status"]) == (CHAT, 8, 200)
    assert (second["route"], second["status"]) == (CHAT, 200)


def test_nothing_listens_beyond_loopback(two: Deployed) -> None:
    from ray._common.usage import usage_lib

    pids = _descendants(os.getpid())
    assert len(pids) > 5
    table = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    ours = [line for line in table.splitlines() if any(f"pid={pid}," in line for pid in pids)]
    assert any(two.url.rpartition(":")[2] in line for line in ours)
    beyond = [line for line in ours if not re.search(r"\s(127\.0\.0\.1|\[::ffff:127\.0\.0\.1\]|\[::1\]):\d+\s", line)]
    assert not beyond, "\n".join(beyond)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert usage_lib.usage_stats_enabled() is False


def _descendants(pid: int) -> list[int]:
    """Ray's processes are in sessions of their own, and remember who started them."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    reached, todo = [], [pid]
    while todo:
        reached.append(todo.pop())
        todo += children.get(reached[-1], [])
    return reached


def test_slots_are_those_of_all_replicas(two: Deployed) -> None:
    with two.client() as http:
        streams = [http.stream("POST", CHAT, json=body(f"{number}", 3000, stream=True)) for number in range(2)]
        with streams[0] as first, streams[1] as second:  # what is new goes where less runs: one stream on each
            lines = [first.iter_lines(), second.iter_lines()]
            assert all(next(each).startswith("data: ") for each in lines)
            slots = http.get("/slots?fail_on_no_slot=1").json()
    assert [each["id"] for each in slots] == list(range(len(slots)))
    assert [each["id"] for each in slots if each["is_processing"]] == [0, len(slots) // 2]


# Streams -------------------------------------------------------------------------------------------------


def test_a_disconnect_cancels_on_the_replica(two: Deployed) -> None:
    before = sum(two.samples("shaderlm:generation_tokens_total").values())
    with two.client() as http, http.stream("POST", CHAT, json=body("the", 3000, stream=True)) as answer:
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
    until(lambda: sum(two.samples("shaderlm:num_requests_running").values()) == 0, "the request ends", 20)
    assert sum(two.samples("shaderlm:generation_tokens_total").values()) - before < 2000


def test_a_chunk_takes_no_longer_by_more_than_5_ms(two: Deployed, tiny: Path) -> None:
    """The time between the write of a token at the replica, which is in the token's event, and its arrival."""
    with running(loader(tiny, source=str(tiny))) as single:
        alone = _gaps(single.url)
    through = _gaps(two.url)
    print(f"\nmedian between chunks: alone {1000 * alone:.2f} ms, through Ray {1000 * through:.2f} ms")
    assert through - alone <= 0.005


def _gaps(url: str) -> float:
    """Seconds between chunks of one stream, at the median."""
    times = []
    with httpx.Client(timeout=120, trust_env=False) as http:
        for prompt in ("the", "an", "in"):
            with http.stream("POST", f"{url}{CHAT}", json=body(prompt, 200, stream=True)) as answer:
                times.append([time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")])
    return statistics.median((each[-1] - each[1]) / 199 for each in times)


def test_prompts_with_the_same_beginning_go_to_the_same_replica(two: Deployed) -> None:
    systems = [f"System prompt {number}. " + "the an in " * 150 for number in range(4)]
    before, share = Counter(two.counts()), two.samples("shaderlm:prompt_tokens_total")

    async def all_requests() -> None:
        async with two.async_client() as http:
            limit = asyncio.Semaphore(4)

            async def one(system: str, number: int) -> None:
                messages = [{"role": "system", "content": system}, {"role": "user", "content": f"question {number}"}]
                async with limit:
                    answer = await http.post(CHAT, json={"messages": messages, "max_tokens": 2})
                assert answer.status_code == 200, answer.text

            await asyncio.gather(*(one(system, number) for number in range(60) for system in systems))

    asyncio.run(all_requests())
    counts = Counter(two.counts()) - before
    after = two.samples("shaderlm:prompt_tokens_total")
    shares = [after[name] - share[name] for name in after]
    affinity, imbalance = counts["prefix"] / 240, max(shares) / (sum(shares) / len(shares))
    print(f"\naffinity {affinity:.1%}, imbalance {imbalance:.2f}, {dict(counts)}")
    assert affinity >= 0.95
    assert imbalance <= 1.3


def test_a_session_stays_on_its_replica(two: Deployed) -> None:
    before, tokens = Counter(two.counts()), Counter(two.samples("shaderlm:prompt_tokens_total"))
    with two.client(headers={"x-session-id": "mine"}) as http:
        for number in range(8):
            assert http.post(CHAT, json=body(f"{number} the an", 2)).status_code == 200
    counts = Counter(two.counts()) - before
    assert counts["session"] >= 7
    used = Counter(two.samples("shaderlm:prompt_tokens_total")) - tokens
    assert len(used) == 1, "the session is on one replica"


# Replicas that end ---------------------------------------------------------------------------------------


def test_a_replica_that_dies_ends_its_streams_alone(two: Deployed) -> None:
    streams, killed = 200, two.replicas()[0]

    async def load() -> list[str]:
        async with two.async_client() as http:
            begun = 0

            async def one(number: int) -> str:
                nonlocal begun
                sent = body(f"{number} the an", 60, stream=True)
                async with http.stream("POST", CHAT, json=sent) as answer:
                    if answer.status_code != 200:
                        return f"{answer.status_code} {answer.headers.get('retry-after')}"
                    last = ""
                    async for line in answer.aiter_lines():
                        begun += not last
                        last = line or last
                    return last

            tasks = [asyncio.create_task(one(number)) for number in range(streams)]
            while begun < streams // 2:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(two.kill, killed)
            return await asyncio.gather(*tasks)

    ends = asyncio.run(load())
    died = time.monotonic()
    whole = sum(end == "data: [DONE]" for end in ends)
    errors = [end for end in ends if end != "data: [DONE]"]
    print(f"\n{whole} of {streams} streams were whole; of the others: {Counter(errors)}")
    assert 0 < len(errors) < streams
    for end in errors:
        error = json.loads(end.removeprefix("data: "))["error"] if end.startswith("data: ") else None
        assert end == "503 1" or (error is not None and error["code"] == 503), end
    until(lambda: len(two.replicas()) == 2 and killed not in two.replicas(), "another replica")
    _wait_for_replicas(two, 2)
    name = killed.rpartition("#")[2]
    assert name not in two.samples("shaderlm:num_requests_running")
    with two.client() as http:
        for number in range(20):
            assert http.post(CHAT, json=body(f"{number}")).status_code == 200
    assert all(count > 0 for count in two.samples("shaderlm:generation_tokens_total").values()), "both are used"
    print(f"another replica is there {time.monotonic() - died:.1f} s later")


def test_an_update_under_load_fails_no_request(serve: RayServe, two: Deployed, tiny: Path, logs: Path) -> None:
    from .lost_replica import LosesDevice

    before = set(two.replicas())

    async def load() -> Counter[str]:
        ends, stop = Counter[str](), asyncio.Event()

        async def client(number: int) -> None:
            async with two.async_client() as http:
                while not stop.is_set():
                    answer = await http.post(CHAT, json=body(f"{number} the an", 20))
                    ends[f"{answer.status_code}" if answer.status_code == 200 else answer.text] += 1

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        options = {"replicas": 2, "log_file": str(logs), "log_format": "json", "parallel": 128, "seed": 7}
        await asyncio.to_thread(lambda: serve.deploy(LosesDevice, model=str(tiny), **options))
        while set(two.replicas()) & before:
            await asyncio.sleep(0.1)
        stop.set()
        await asyncio.gather(*clients)
        return ends

    ends = asyncio.run(load())
    print(f"\nanswers during the update: {dict(ends)}")
    assert set(ends) == {"200"}
    assert ends["200"] > 20


def test_a_replica_whose_device_is_lost_ends(two: Deployed, tiny: Path) -> None:
    from .lost_replica import flag_of

    flag_of(tiny).touch()
    with two.client() as http:
        lost = http.post(CHAT, json=body("the"))
        assert (lost.status_code, lost.json()["error"]["type"]) == (503, "unavailable_error")
        assert "the GPU was lost" in lost.json()["error"]["message"], "its answer is out before it ends"
        pid = int(flag_of(tiny).read_text())
        until(lambda: not Path(f"/proc/{pid}").exists(), "the process ends", 60)
        for number in range(5):
            assert http.post(CHAT, json=body(f"{number}")).status_code == 200, "the other one answers"


def test_more_requests_start_a_replica_and_fewer_end_it(serve: RayServe, tiny: Path) -> None:
    options = {"replicas": 1, "max_replicas": 2, "parallel": 2, "downscale_seconds": 2}
    scaled = serve.deploy(model=str(tiny), **options)
    until(lambda: len(scaled.replicas()) == 1, "one replica")

    async def load() -> float:
        async with scaled.async_client() as http:
            tasks = [asyncio.create_task(http.post(CHAT, json=body("the", 1000))) for _ in range(8)]
            took = await asyncio.to_thread(until, lambda: len(scaled.replicas()) == 2, "another replica starts", 60)
            for answer in await asyncio.gather(*tasks):
                assert answer.status_code == 200
            return took

    took = asyncio.run(load())
    down = until(lambda: len(scaled.replicas()) == 1, "it ends again", 90)
    print(f"\nscale-up began after {took:.1f} s, and down {down:.1f} s after the load")
    assert took <= 10


def test_several_models_have_one_front(serve: RayServe, tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other.gguf", context=512, seed=1)
    models = {
        "small": {"model": str(tiny), "device": "cpu", "num_cpus": 0, "aliases": ["gpt"]},
        "large": {"model": str(other), "device": "cpu", "num_cpus": 0, "parallel": 1, "queue": 1},
    }
    both = serve.deploy(models=models, api_keys=["one", "two"], ingress_replicas=2)
    with both.client(headers={"Authorization": "Bearer two"}) as http:
        listed = http.get("/v1/models").json()["data"]
        assert [(each["id"], each["meta"]["n_ctx"]) for each in listed] == [("small", 4096), ("large", 512)]
        assert http.get("/v1/models/large").json()["meta"]["n_ctx"] == 512
        answers = {
            name: http.post(CHAT, json=body("the", model=name, temperature=0)).json()
            for name in ("small", "gpt", "large")
        }
        assert [each["model"] for each in answers.values()] == ["small", "small", "large"]
        texts = [each["choices"][0]["message"]["content"] for each in answers.values()]
        assert texts[0] == texts[1] != texts[2]
        assert http.post(CHAT, json=body("the")).json()["model"] == "small", "the first one is the default"
        wrong = http.post(CHAT, json=body("the", model="huge"))
        assert wrong.status_code == 404
        assert wrong.json()["error"]["message"] == ("the model 'huge' is not served here; there are 'small', 'large'")
        _two_fronts_count_by_themselves(http)
    with both.client() as http:
        assert http.post(CHAT, json=body("the")).status_code == 401
        assert http.get("/metrics").status_code == 401
        assert http.get("/health").status_code == 200
    asyncio.run(_a_full_queue_refuses(both))


def _two_fronts_count_by_themselves(http: httpx.Client) -> None:
    seen = dict[str, str]()

    def both_answered() -> bool:
        text = http.get("/metrics").text
        (front,) = set(re.findall(r'front="(.+?)"', text))
        seen[front] = text
        return len(seen) == 2

    until(both_answered, "both fronts answer")
    for text in seen.values():
        assert re.findall(r'replicas{.*model_name="(.+?)"', text) == ["small", "large"]
        assert len(set(re.findall(r'replica="(.+?)"', text))) == 2, "each has the replicas of all models"


async def _a_full_queue_refuses(both: Deployed) -> None:
    """One runs, one is with the replica to follow it, and of the others one may wait in each front."""
    async with both.async_client(headers={"Authorization": "Bearer one"}) as http:
        sent = body("the", 300, model="large")
        answers = await asyncio.gather(*(http.post(CHAT, json=sent) for _ in range(16)))
    assert Counter(each.status_code for each in answers).keys() == {200, 429}
    refused = next(each for each in answers if each.status_code == 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.json()["error"]["message"] == "the queue of 1 is full; try again later"
    assert int(refused.headers["retry-after"]) > 0


def test_a_second_device_nearly_doubles_the_tokens(serve: RayServe, tiny: Path) -> None:
    """Steps take a fixed time, so that two cores are as many devices as there are replicas."""
    from .timed_replica import TimedReplica

    async def tokens_per_second(deployed: Deployed) -> float:
        async with deployed.async_client() as http:
            limit, tokens = asyncio.Semaphore(16), 10

            async def one(number: int) -> None:
                async with limit:
                    answer = await http.post(CHAT, json=body(f"{number}", tokens))
                assert answer.json()["usage"]["completion_tokens"] == tokens

            await asyncio.gather(*(one(number) for number in range(8)))
            began = time.perf_counter()
            await asyncio.gather(*(one(number) for number in range(48)))
            return 48 * tokens / (time.perf_counter() - began)

    speeds = []
    for replicas in (1, 2):
        deployed = serve.deploy(TimedReplica, model=str(tiny), replicas=replicas, parallel=4)
        _wait_for_replicas(deployed, replicas)
        speeds.append(asyncio.run(tokens_per_second(deployed)))
    print(
        f"\n{speeds[0]:.0f} tokens per second with one replica, {speeds[1]:.0f} with two: {speeds[1] / speeds[0]:.2f}"
    )
    assert speeds[1] >= 1.9 * speeds[0]


def _wait_for_replicas(deployed: Deployed, count: int) -> None:
    until(lambda: len(deployed.samples("shaderlm:num_requests_running")) == count, f"{count} replicas are there")


# Ray Data ------------------------------------------------------------------------------------------------


def test_a_predictor_maps_a_dataset(serve: RayServe, tiny: Path) -> None:
    import ray

    from shaderlm.ray import Predictor

    rows = [
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": CHAT,
            "body": json.dumps(body(f"{number} the", 4, temperature=0)),
        }
        for number in range(12)
    ]
    rows[5]["body"] = json.dumps({"messages": 3})
    results = ray.data.from_items(rows).map_batches(
        Predictor,
        fn_constructor_kwargs={"model": str(tiny), "device": "cpu"},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_size=6,
    )
    answers = {row["custom_id"]: json.loads(row["result"])["response"] for row in results.take_all()}
    assert len(answers) == 12
    assert answers["id-5"]["status_code"] == 400
    with load(tiny, device="cpu") as model:
        for number in (0, 11):
            expected = model.chat([{"role": "user", "content": f"{number} the"}], max_tokens=4, ignore_eos=True)
            assert answers[f"id-{number}"]["body"]["choices"][0]["message"]["content"] == expected


# The manifest --------------------------------------------------------------------------------------------


def test_the_manifest_is_one_that_ray_and_we_can_read() -> None:
    import yaml  # type: ignore[import-untyped]
    from ray.serve.schema import ServeDeploySchema

    path = Path(__file__).parent.parent / "docs" / "ray-service.yaml"
    service = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    serve_config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (app,) = serve_config.applications
    assert app.import_path == "shaderlm.ray:build_app"
    config = cluster_config(app.args)
    (model,) = config.models.values()
    assert (model.gpus, model.max_replicas) == (1, group["maxReplicas"])
    assert model.drain < group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert config.host == serve_config.http_options.host
    assert cluster["rayVersion"].startswith(".".join(map(str, TESTED)))
    mounts = {each["mountPath"] for each in worker["volumeMounts"]}
    assert config.api_key_file is not None
    assert {
        str(Path(config.api_key_file).parent),
        *(e["value"] for e in worker["env"] if "CACHE" in e["name"]),
    } == mounts
