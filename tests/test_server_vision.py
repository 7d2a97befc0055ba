"""Pictures over HTTP: the same answer by every API, limits, and what hostile clients send."""

from __future__ import annotations

import base64
import io
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shaderlm import load
from shaderlm.server.addresses import Fetcher
from shaderlm.server.limits import Limits
from shaderlm.server.model_facts import FactReader
from shaderlm.server.models import HostedModel, ModelSource
from shaderlm.server.served import ServedModel

from .serving import Running, running
from .vision_oracles import VisionOracle

pytest.importorskip("PIL", reason="Pillow is in the extra `vision`")
from PIL import Image

BODY_BYTES, TOKENS = 3 << 20, 12


@pytest.fixture(scope="module")
def oracle(vision_oracles: dict[str, VisionOracle]) -> VisionOracle:
    return vision_oracles["qwen3vl"]


@pytest.fixture(scope="module")
def server(oracle: VisionOracle) -> Iterator[Running]:
    """A model that reads images, in NumPy, for two clients."""
    limits = Limits(body_bytes=1 << 20, image_body_bytes=BODY_BYTES)

    def loaded() -> ServedModel:
        return ServedModel(load(oracle.folder / "hf", device="cpu", precision="exact"), names=("eyes",), limits=limits)

    with running(loaded, keys=("a", "b"), limits=limits) as found:
        yield found


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client(headers={"x-api-key": "a"}) as client:
        yield client


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{_base64(content)}"


def _png(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


def _chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2, **fields}


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _case(oracle: VisionOracle) -> tuple[bytes, str, list[int], list[int]]:
    """The picture, the text, the ids of the prompt and of its answer."""
    case = oracle.cases[0]
    (picture,) = oracle.pictures(case)
    text = next(part["text"] for part in case["messages"][0]["content"] if part["type"] == "text")
    return picture.read_bytes(), text, case["ids"], case["greedy"]


def test_the_same_answer_by_every_api(http: httpx.Client, server: Running, oracle: VisionOracle) -> None:
    content, text, ids, greedy = _case(oracle)
    url, wanted = _url(content), server.model.detokenize(greedy[:TOKENS])
    image_tokens = oracle.cases[0]["features"]["shape"][0]
    same = {"temperature": 0, "ignore_eos": True}

    def post(route: str, body: dict[str, Any]) -> Any:
        found = http.post(route, json=body)
        assert found.status_code == 200, found.text
        return found.json()

    made = post("/v1/chat/completions", {**_chat(_image(url), _text(text)), "max_tokens": TOKENS, **same})
    assert made["choices"][0]["message"]["content"] == wanted
    assert made["usage"]["prompt_tokens"] == len(ids)
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": image_tokens}

    parts = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": text}]
    asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": TOKENS, **same}
    made = post("/v1/responses", asked)
    assert made["output"][0]["content"][0]["text"] == wanted
    assert made["usage"]["input_tokens_details"]["image_tokens"] == image_tokens
    assert made["usage"]["input_tokens_details"]["cached_tokens"] == len(ids) - 1, "the picture is known"
    more = post("/v1/responses", {"input": "and?", "previous_response_id": made["id"], "max_output_tokens": 1})
    assert more["usage"]["input_tokens_details"]["image_tokens"] == image_tokens, "it is kept with the conversation"

    source = {"type": "base64", "media_type": "image/png", "data": _base64(content)}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, _text(text)]}]
    made = post("/v1/messages", {"messages": messages, "max_tokens": TOKENS, **same})
    assert made["content"][0]["text"] == wanted
    assert post("/v1/messages/count_tokens", {"messages": messages}) == {"input_tokens": len(ids)}

    options = {"options": {"temperature": 0, "num_predict": TOKENS}, "stream": False}
    message = {"role": "user", "content": text, "images": [_base64(content)]}
    made = post("/api/chat", {"messages": [message], **options})
    assert wanted.startswith(made["message"]["content"])  # which ends where the model does
    assert made["prompt_eval_count"] == len(ids)
    made = post("/api/generate", {"prompt": text, "images": [_base64(content)], **options})
    assert wanted.startswith(made["response"])
    assert "context" not in made, "ids do not say what a picture was"

    counted = {"messages": [{"role": "user", "content": [_image(url), _text(text)]}]}
    assert post("/v1/chat/completions/input_tokens", counted) == {"input_tokens": len(ids)}
    assert post("/v1/responses/input_tokens", {"input": asked["input"]}) == {"input_tokens": len(ids)}
    assert text in post("/apply-template", counted)["prompt"]


def test_what_a_tool_gave(http: httpx.Client, oracle: VisionOracle) -> None:
    """Its pictures are a part of the result."""
    content, text, *_ = _case(oracle)
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    source = {"type": "base64", "media_type": "image/png", "data": _base64(content)}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    found = http.post("/v1/messages", json={"messages": messages, "max_tokens": 1})
    # The template of this model shows a tool's text alone: refused, and not left out.
    assert found.status_code in (200, 400)
    if found.status_code == 400:
        assert "places for images" in found.json()["error"]["message"]


def test_what_the_model_says_of_itself(http: httpx.Client) -> None:
    assert http.get("/props").json()["modalities"] == {"vision": True, "audio": False}
    found = http.get("/v1/models").json()
    assert found["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    assert found["models"][0]["capabilities"] == ["completion", "multimodal"]
    assert "vision" in http.post("/api/show", json={"model": "eyes"}).json()["capabilities"]


def test_each_client_has_its_own_features(server: Running, http: httpx.Client) -> None:
    body = _chat(_image(_url(_png(33, 20))), _text("What is it?"))
    runner, made = server.model.vision.runner, []  # type: ignore[union-attr]
    encode = runner.encode
    runner.encode = lambda *args: made.append(1) or encode(*args)  # type: ignore[method-assign, func-returns-value]
    try:
        for _ in range(2):
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert len(made) == 1
        other = http.post("/v1/chat/completions", json=body, headers={"x-api-key": "b"})
        assert len(made) == 2, "what another key showed is not there"
        assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    finally:
        runner.encode = encode  # type: ignore[method-assign]


def _bomb() -> bytes:
    """A PNG of 20,000 × 20,000 in a hundred bytes: its header."""
    small = _png(1, 1)
    size = (20_000).to_bytes(4, "big") * 2
    head = b"IHDR" + size + small[24:29]
    return small[:12] + head + zlib.crc32(head).to_bytes(4, "big") + small[33:]


_FEW = _url(_png(8, 8))
HOSTILE = [
    ("data:image/png;base64,***", "not valid base64"),
    ("data:image/png;base64,", "the picture is empty"),
    ("data:image/png,abc", "must be a data URL"),
    (_url(b"This is a text, not a picture."), "is not a PNG, JPEG, WebP, GIF or BMP"),
    (_url(_png(8, 8)[:40]), "damaged"),
    (_url(_png(8, 8), "text/html"), "must be a data URL, data:image/TYPE"),
    (_url(_bomb()), "megapixels"),
    (_url(_png(2000, 1)), "200"),
    ("/etc/passwd", "must be a data URL"),
    ("file:///etc/passwd", "must be a data URL"),
    ("http://127.0.0.1/x.png", "addresses of pictures are not fetched"),
    ("HTTP://example.com/x.png", "addresses of pictures are not fetched"),
]


@pytest.mark.parametrize(("url", "words"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_picture(http: httpx.Client, url: str, words: str) -> None:
    """A 400 in words by every API, soon."""
    kind, data = "image/png", url.partition("base64,")[2]
    asked = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    source = {"type": "url", "url": url}
    block = {"role": "user", "content": [{"type": "image", "source": source}]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", _chat(_text("x"), _image(url))),
        ("/v1/responses", {"input": [asked]}),
        ("/v1/messages", {"messages": [block], "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": [block]}),
    ]
    if url.startswith("data:image/png;base64,"):
        source = {"type": "base64", "media_type": kind, "data": data}
        bodies += [
            ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}),
            ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [data]}]}),
            ("/api/generate", {"prompt": "x", "images": [data]}),
        ]
        bodies[-3][1]["max_tokens"] = 2
    for route, body in bodies:
        begin = time.monotonic()
        found = http.post(route, json=body)
        assert time.monotonic() - begin < 1
        assert found.status_code == 400 or (route.endswith("count_tokens") and "damaged" in words), found.text
        if found.status_code == 400:
            assert words in found.text


def test_addresses(server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, oracle: VisionOracle) -> None:
    """With --allow-image-urls they are fetched before the request is prepared; private ones never."""
    content, text, ids, _ = _case(oracle)
    fetcher = Fetcher(5, 1 << 20)
    monkeypatch.setattr(server.service, "fetcher", fetcher)
    begin = time.monotonic()
    for url in ("http://127.0.0.1:1/x.png", "http://169.254.169.254/latest", "http://localhost/"):
        found = http.post("/v1/chat/completions", json=_chat(_text("x"), _image(url)))
        assert found.status_code == 400
        assert "messages[0].content[1]: the picture cannot be fetched" in found.text
        assert "not a public one" in found.text
    many = http.post("/v1/chat/completions", json=_chat(*[_image("http://localhost/")] * 65))
    assert "a request may have 64 images" in many.text
    assert time.monotonic() - begin < 2
    monkeypatch.setattr(fetcher, "_get", lambda address, end, most: content)
    found = http.post("/v1/chat/completions", json=_chat(_image("https://pictures.example/a.png"), _text(text)))
    assert found.json()["usage"]["prompt_tokens"] == len(ids)
    monkeypatch.setattr(fetcher, "_get", lambda address, end, most: b"<html>Sign in</html>")
    found = http.post("/v1/chat/completions", json=_chat(_image("https://pictures.example/b.png")))
    assert found.status_code == 400
    assert "is not a PNG, JPEG, WebP, GIF or BMP file" in found.text
    fetcher.close()


def test_limits(http: httpx.Client, server: Running) -> None:
    many = http.post("/v1/chat/completions", json=_chat(*[_image(_FEW)] * 65))
    assert many.status_code == 400
    assert "a request may have 64 images" in many.text
    # A body with pictures may be larger than one with text; other routes do not take it.
    large = {"x": "x" * (2 << 20)}
    assert http.post("/v1/chat/completions", json=_chat(_text("x"), **large)).status_code == 200
    assert http.post("/v1/completions", json={"prompt": "x", **large}).status_code == 413
    found = http.post("/v1/chat/completions", json=_chat(_text("x"), x="x" * BODY_BYTES))
    assert found.status_code == 413
    assert f"{BODY_BYTES:,} bytes" in found.text


def test_places_without_pictures(http: httpx.Client, server: Running) -> None:
    token = server.model.vision.token  # type: ignore[union-attr]
    for body in ({"prompt": [token]}, {"prompt": server.model.detokenize([token])}):
        found = http.post("/v1/completions", json=body)
        assert found.status_code == 400
        assert "no image for them" in found.text
    found = http.post("/completion", json={"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}})
    assert found.status_code == 400
    assert "/v1/chat/completions" in found.text
    typed = _chat(_text(f"{server.model.detokenize([token])} is only text"))
    assert http.post("/v1/chat/completions", json=typed).status_code == 200, "it is no token in a message"
    for more in ({"suffix": "x"}, {"raw": True}, {"context": [1]}):
        found = http.post("/api/generate", json={"prompt": "x", "images": [_FEW], **more})
        assert found.status_code == 400
        assert "is not for a prompt with images" in found.text


def test_a_model_that_is_not_loaded_says_that_it_reads_images(oracle: VisionOracle) -> None:
    """Ollama's clients ask before they send a picture, which would load it."""
    folder = oracle.folder / "hf"
    for sees in (True, False):
        source = ModelSource(name="eyes", load=lambda: pytest.fail("nothing is loaded"), path=folder, vision=sees)
        assert FactReader().facts(HostedModel(source)).vision is sees
