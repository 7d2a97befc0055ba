"""What the server and the commands say of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shaderlm import load
from shaderlm.cli.draft_options import draft_options
from shaderlm.cli.options import ModelOptions
from shaderlm.engine.draft_settings import DRAFT_TOKENS, DRAFTS, MOST_TOKENS
from shaderlm.engine.drafts import Drafts, NgramDrafter
from shaderlm.server.loading import ServeOptions, serve_model
from shaderlm.server.served import ServedModel

from .command_line import shaderlm
from .serving import running
from .tiny_models import write_tiny_llama

PROMPT = [3, 9, 4, 7, 5] * 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("server_drafts") / "tiny.gguf", context=1024)


def test_usage_timings_and_metrics_count_drafts(tiny: Path) -> None:
    """Only where there are any: clients that know no drafts see nothing new."""
    options, body = (
        ServeOptions(warmup=False),
        {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True},
    )

    def served() -> ServedModel:
        return serve_model(load(tiny, device="numpy"), "tiny", options)

    with running(served) as server, server.client() as http:
        plain = http.post("/v1/completions", json=body).json()
        assert "draft_n" not in plain["timings"]
        assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        server.model.engine.use_drafts(Drafts(NgramDrafter(), 7, measured=False))
        answer = http.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
        details, timings = answer["usage"]["completion_tokens_details"], answer["timings"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert accepted > 0
        assert (timings["draft_n"], timings["draft_n_accepted"]) == (accepted + rejected, accepted)
        lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
        found = {name.partition("{")[0]: float(value) for name, value in lines.items()}
    for server_name in ("shaderlm", "llamacpp"):
        assert found[f"{server_name}:spec_decode_num_accepted_tokens_total"] == accepted
        assert found[f"{server_name}:spec_decode_num_draft_tokens_total"] == accepted + rejected
        assert 0 < found[f"{server_name}:spec_decode_num_drafts_total"] <= accepted + rejected


def test_commands_draft(tiny: Path) -> None:
    prompt = "the an in ou er " * 20
    arguments = ("generate", prompt, "-m", tiny, "--device", "numpy", "--raw", "-n", 30, "--json")
    texts = [json.loads(shaderlm(*arguments, *more).out)["text"] for more in ((), ("--draft", "ngram"))]
    assert texts[0] == texts[1]


def test_the_commands_know_what_python_knows() -> None:
    parameters: Any = {each.name: each for each in draft_options(lambda: None).__click_params__}  # type: ignore[attr-defined]
    assert tuple(parameters["draft"].type.choices) == DRAFTS
    assert (parameters["draft_tokens"].type.min, parameters["draft_tokens"].type.max) == (1, MOST_TOKENS)
    assert f"[default: {DRAFT_TOKENS}]" in parameters["draft_tokens"].help
    assert ModelOptions("", "cpu", "auto", None, "fast", False, (), None).draft_model is None
