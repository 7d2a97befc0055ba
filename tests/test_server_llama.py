"""llama-server's routes, and what the server tells about itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shaderlm.engine import Handle, load
from shaderlm.server import llama_server
from shaderlm.server.errors import ApiError
from shaderlm.server.metrics import Metrics, ModelNumbers, metrics_text
from shaderlm.server.prepare import prepare
from shaderlm.server.served import ServedModel

from .serving import Running, loader, running
from .test_server import ASK, events
from .tiny_models import write_tiny_llama

pytestmark = pytest.mark.xdist_group("server clients")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("server") / "tiny.gguf", context=256)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Running]:
    with running(loader(path, names=("first", "second"), tags=("chat",), embedding=True)) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def test_completion(http: httpx.Client, server: Running) -> None:
    expected = server.model.generate("the an", max_tokens=8, ignore_eos=True)
    body: dict[str, Any] = {"prompt": "the an", "n_predict": 8, "temperature": 0, "ignore_eos": True}
    whole = http.post("/completion", json={**body, "return_tokens": True}).json()
    assert whole["content"] == expected
    assert whole["tokens"] == expected.ids
    assert (whole["stop_type"], whole["tokens_predicted"]) == ("limit", 8)
    assert whole["generation_settings"]["n_predict"] == 8
    parts = events(http.post("/completion", json={**body, "stream": True}))
    assert "".join(part["content"] for part in parts) == expected
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["timings"]["predicted_n"] == 8
    mixed = http.post("/completion", json={**body, "prompt": ["the", *server.model.tokenize(" an")]}).json()
    assert mixed["content"] == expected
    ids = server.model.tokenize("the an")
    several = http.post("/completions", json={**body, "prompt": [ids, "the an", {"prompt_string": "the an"}]}).json()
    assert [(each["index"], each["content"]) for each in several] == [(i, expected) for i in range(3)]
    assert several[0]["prompt"] == "the an"
    image = http.post("/completion", json={**body, "prompt": {"prompt_string": "the", "multimodal_data": ["aGk="]}})
    assert (image.status_code, image.json()["error"]["param"]) == (400, "prompt")
    both = http.post("/completion", json={**body, "prompt": [5, ["the"]]})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "prompt")
    one = http.post("/completion", json={**body, "prompt": ["the an"]}).json()
    assert one["content"] == expected
    stopped = http.post("/completion", json={**body, "stop": [expected[3:5]]}).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", expected[3:5])


def test_probabilities_of_a_completion(http: httpx.Client) -> None:
    body = {"prompt": "the", "n_predict": 3, "temperature": 0, "n_probs": 2}
    found = http.post("/completion", json=body).json()["completion_probabilities"]
    assert [len(each["top_logprobs"]) for each in found] == [2, 2, 2]
    assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] for each in found)


def test_samplers_of_a_completion(http: httpx.Client, server: Running) -> None:
    """Each field is the option of the same name, and is told in the settings; all of them together, too."""
    samplers: dict[str, Any] = {"dry_multiplier": 2.0, "dry_base": 2.0, "dry_allowed_length": 1}
    samplers |= {"dry_penalty_last_n": -1, "dry_sequence_breakers": ["q", "\n"], "xtc_probability": 0.75}
    samplers |= {"xtc_threshold": 0.25, "typical_p": 0.75, "top_n_sigma": 2.0, "dynatemp_range": 0.5}
    samplers |= {"dynatemp_exponent": 2.0, "mirostat": 0, "mirostat_tau": 4.0, "mirostat_eta": 0.5}
    samplers["samplers"] = ["dry", "top_n_sigma", "typ_p", "temperature", "xtc"]
    common: dict[str, Any] = {"temperature": 1.5, "seed": 4, "ignore_eos": True}
    common |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    never = dict.fromkeys(server.model.tokenizer.stop_ids, float("-inf"))  # this route's ignore_eos
    cases: list[dict[str, Any]] = [samplers, {"mirostat": 2}, {"xtc_probability": 1.0}, {"samplers": "tkx"}]
    for some in cases:
        expected = server.model.generate("the an", max_tokens=12, logit_bias=never, **common, **some)
        body = {"prompt": "the an", "n_predict": 12, **common, **some}
        found = http.post("/completion", json=body).json()
        assert found["content"] == expected, some
        told = found["generation_settings"]
        assert {name: told[name] for name in some if name != "samplers"} == {
            name: value for name, value in some.items() if name != "samplers"
        }
    assert told["samplers"] == ["temperature", "top_k", "xtc"]
    params = http.get("/props").json()["default_generation_settings"]["params"]
    assert params["samplers"] == ["penalties", "dry", "temperature", "top_k", "top_p", "min_p"]
    assert (params["dry_base"], params["dry_sequence_breakers"]) == (1.75, ["\n", ":", '"', "*"])


def test_defaults_of_sampling(path: Path) -> None:
    """The server's own, where neither the request says anything; the model's and llama-server's come after them."""
    sampling: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "xtc_probability": 1.0, "xtc_threshold": 0.01}
    with running(loader(path, sampling=sampling, seed=3)) as server, server.client() as http:
        params = http.get("/props").json()["default_generation_settings"]["params"]
        assert params | sampling == params
        assert (params["top_p"], params["min_p"]) == (0.95, 0.05)
        expected = server.model.generate("the", max_tokens=9, seed=3, top_p=0.95, min_p=0.05, **sampling)
        assert http.post("/completion", json={"prompt": "the", "n_predict": 9}).json()["content"] == expected
        warm = {"prompt": "the", "n_predict": 9, "temperature": 0, "xtc_probability": 0}
        assert http.post("/completion", json=warm).json()["content"] == server.model.generate("the", max_tokens=9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dry_sequence_breakers", ["x" * 1000]),
        ("dry_sequence_breakers", ["x"] * 1000),
        ("dry_penalty_last_n", 1 << 50),
        ("dry_base", 0.5),
        ("typical_p", -1),
        ("mirostat", 1),
        ("mirostat_tau", 1e9),
        ("samplers", ["top_k", "infill"]),
        ("samplers", "q" * 100_000),
    ],
)
def test_samplers_that_are_wrong(http: httpx.Client, field: str, value: Any) -> None:
    found = http.post("/completion", json={"prompt": "the", "n_predict": 1, field: value})
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"].startswith(field)
    assert "\n" not in error["message"]
    assert len(error["message"]) < 250


def test_a_prompt_can_be_read_into_the_cache(http: httpx.Client) -> None:
    prompt = "the in an " * 20
    read = http.post("/completion", json={"prompt": prompt, "n_predict": 0}).json()
    assert (read["content"], read["tokens_predicted"]) == ("", 0)
    assert (read["stop_type"], read["generation_settings"]["n_predict"]) == ("limit", 0)
    again = http.post("/completion", json={"prompt": prompt, "n_predict": 1}).json()
    assert again["tokens_cached"] > 0


def test_tokens(http: httpx.Client, server: Running) -> None:
    text = "the café <|im_end|>"
    ids = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert ids == server.model.tokenize(text)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": text, "prompt": text}
    plain = http.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert len(plain) > len(ids)
    pieces = http.post("/tokenize", json={"content": "é", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == [[0xC3], [0xA9]]
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert http.post("/detokenize", json={"tokens": []}).json() == {"content": "", "prompt": ""}
    many = b'{"tokens": [' + b"1," * (1 << 20) + b"1]}"
    assert http.post("/detokenize", content=many).status_code == 400


def test_apply_template(http: httpx.Client) -> None:
    found = http.post("/apply-template", json={"messages": ASK}).json()
    assert found == {"prompt": "<|im_start|>user\nthe an in<|im_end|>\n<|im_start|>assistant\n"}


def test_names(http: httpx.Client) -> None:
    found = http.get("/models").json()
    listed, in_its_form = found["data"][0], found["models"][0]
    assert (in_its_form["name"], in_its_form["model"], in_its_form["capabilities"]) == (
        "first",
        "first",
        ["completion"],
    )
    assert (listed["id"], listed["aliases"], listed["tags"]) == ("first", ["first", "second"], ["chat"])
    for name in ("first", "second", "tiny", "gpt-4o", None):
        answer = http.post("/chat/completions", json={"model": name, "messages": ASK, "max_tokens": 1})
        assert (answer.status_code, answer.json()["model"]) == (200, "first"), name
    assert http.get("/v1/models/second").status_code == 200
    assert http.get("/models/gpt-4o").status_code == 404


def test_another_model_can_be_refused(path: Path) -> None:
    with load(path, device="cpu") as model:
        served = ServedModel(model, strict=True)
        for name, expected in ((served.name, None), (None, None), ("gpt-4o", 404)):
            raw = json.dumps({"messages": ASK, "model": name}).encode()
            if expected is None:
                prepare(served, "/v1/chat/completions", raw)
                continue
            with pytest.raises(ApiError, match="'gpt-4o' is not served here; there is 'tiny'") as refused:
                prepare(served, "/v1/chat/completions", raw)
            assert refused.value.status == expected


def test_props_and_slots(http: httpx.Client) -> None:
    found = http.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == 256
    assert "im_start" in found["chat_template"]
    slots = http.get("/slots").json()
    assert len(slots) == found["total_slots"]
    assert not any(slot["is_processing"] or "params" in slot for slot in slots)
    assert slots[0]["next_token"] == [{"n_decoded": 0, "n_remain": -1, "has_next_token": False}]
    assert (found["endpoint_slots"], found["endpoint_metrics"]) == (True, True)
    assert found["modalities"] == {"vision": False, "audio": False}
    assert http.get("/slots", params={"fail_on_no_slot": 1}).status_code == 200


def _metric(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_speeds_are_of_requests_that_are_over(server: Running) -> None:
    served, metrics = server.service.served, Metrics()
    handle = Handle(served.model.engine, served.model.request("the an"), 0)
    handle.submitted_at, handle.started, handle.first, handle.last = 1.0, 2.0, 4.0, 14.0
    handle.sequence.cached_tokens = 1
    for _ in range(21):
        handle.take_token(5, None)
    handle.finish("length")
    metrics.finished(handle)
    text = metrics_text([ModelNumbers("tiny", metrics, served.model.engine.stats())]).decode()
    tokens = len(served.model.tokenize("the an")) - 1
    assert f"llamacpp:prompt_tokens_seconds {tokens / 2}\n" in text
    assert "llamacpp:predicted_tokens_seconds 2.0\n" in text


def test_metrics(http: httpx.Client) -> None:
    before = http.get("/metrics").text
    http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 5, "ignore_eos": True})
    after = http.get("/metrics").text

    def grew(name: str) -> float:
        return _metric(after, name) - _metric(before, name)

    assert grew("shaderlm:generation_tokens_total") == 5
    computed = grew("llamacpp:prompt_tokens_total")
    assert computed > 0
    assert grew("shaderlm:prompt_tokens_total") == computed + grew("llamacpp:prompt_tokens_cached_total")
    assert grew("llamacpp:n_decode_total") >= 5
    for line in after.splitlines():
        if line.startswith("llamacpp:"):
            assert f"# TYPE {line.split()[0]} " in after
    assert grew("llamacpp:tokens_predicted_total") == 5
    assert grew('shaderlm:request_success_total{finished_reason="length"') == 1
    assert grew("shaderlm:prefix_cache_queries_total") > 0
    for stem in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert grew(f"shaderlm:{stem}_seconds_count") == 1
    assert grew("shaderlm:inter_token_latency_seconds_count") == 4
    names = ("shaderlm:num_requests_running", "shaderlm:num_requests_waiting", "shaderlm:kv_cache_usage_perc")
    llama = ("prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing", "requests_deferred")
    for name in (*names, "shaderlm:prefix_cache_hits_total", *(f"llamacpp:{each}" for each in llama)):
        assert f"\n{name}" in after, name


def test_routes_that_are_off(path: Path) -> None:
    with running(loader(path), metrics=False, slots=False) as server, server.client() as http:
        for route in ("/metrics", "/slots"):
            found = http.get(route)
            assert (found.status_code, found.json()["error"]["type"]) == (501, "not_supported_error")
        found = http.post("/v1/embeddings", json={"input": "x"})
        assert (found.status_code, found.json()["error"]["type"]) == (501, "not_supported_error")
        assert "--embedding" in found.json()["error"]["message"]


def test_sampling_values_of_the_model(tmp_path: Path) -> None:
    """They take the place of those of each API, unless a request says otherwise."""
    own = {"general.sampling.temp": 0.6, "general.sampling.top_k": 7}
    with load(write_tiny_llama(tmp_path / "tiny.gguf", metadata=own), device="cpu") as model:
        served = ServedModel(model)
        params = llama_server.props(served, slots=True, metrics=True).default_generation_settings.params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 7, 0.95, 0.05)
        for body, values in (({}, (0.6, 7, 1.0)), ({"temperature": 0, "top_p": 0.5}, (0.0, 7, 0.5))):
            raw = json.dumps({"messages": ASK, **body}).encode()
            sampling = prepare(served, "/v1/chat/completions", raw).requests[0].sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p) == values
