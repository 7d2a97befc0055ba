"""The OpenAPI document is true: schemathesis finds no status, field or event that it does not have, and no 500."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shaderlm.cli.serve import serve
from shaderlm.server.app import ENDPOINTS
from shaderlm.server.errors import TYPES
from shaderlm.server.openapi import document
from shaderlm.server.routes import Endpoint

from .serving import Running, loader, running
from .tiny_models import write_tiny_llama

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.filterwarnings("ignore")]

NOT_HERE = ("/infill", "/slots/{id}", "/rerank")  # a 501 with this model
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_tiny_llama(tmp_path_factory.mktemp("server") / "tiny.gguf", context=64)
    with running(loader(path, embedding=True), pull=True) as made:
        yield made


@pytest.fixture(scope="module")
def schema(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def _cases() -> Iterator[Any]:
    """Every route, with bodies that fit it and bodies that do not; few of them unless all tests are asked for."""
    quick = ("/v1/completions", "/tokenize", "/slots", "/v1/models/{model}")
    for endpoint in ENDPOINTS:
        if endpoint.path in NOT_HERE:
            continue
        modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if endpoint.body is not None else [])]
        for mode in modes:
            is_quick = endpoint.path in quick and mode == GenerationMode.POSITIVE
            marks = [] if is_quick else [pytest.mark.long]
            yield pytest.param(endpoint, mode, id=f"{endpoint.path} {mode.value}", marks=marks)


@pytest.mark.parametrize(("endpoint", "mode"), list(_cases()))
def test_a_route_does_what_the_document_says(
    schema: Any, endpoint: Endpoint, mode: GenerationMode, pytestconfig: pytest.Config
) -> None:
    strategy = schema[endpoint.path][endpoint.method].as_strategy(generation_mode=mode)

    @given(case=strategy)
    @settings(
        max_examples=50 if pytestconfig.getoption("--all") else 4,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


@pytest.mark.long
def test_all_of_the_document(server: Running, tmp_path: Path) -> None:
    """By schemathesis's own program, which also tries each value of each field by itself, and other methods."""
    names = [check.__name__ for check in CHECKS]
    options = ["--checks", ",".join([*names, "unsupported_method"]), "--max-examples", "20", "--no-color"]
    options += [each for path in NOT_HERE for each in ("--exclude-path", path)]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


def test_docs_have_every_route_option_and_error() -> None:
    text = (Path(__file__).parent.parent / "docs" / "server.md").read_text(encoding="utf-8")
    assert not [each.path for each in ENDPOINTS if f"`{each.method} {each.path}`" not in text]
    options = {option.opts[-1] for option in serve.params if option.name not in ("aliases", "embedding")}
    assert not [name for name in options if f"`{name}`" not in text]
    assert {f"`{kind}`" for kind in TYPES.values()} <= set(re.findall(r"`\w+`", text))


def test_the_document_has_every_route_field_and_status() -> None:
    made = document(ENDPOINTS)
    for endpoint in ENDPOINTS:
        operation = made["paths"][endpoint.path][endpoint.method.lower()]
        assert {"200", "401", "403", "500", "503"} <= set(operation["responses"])
        assert "default" not in operation["responses"], "a response for everything says nothing"
        if endpoint.body is not None:
            body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            fields = made["components"]["schemas"][body]["properties"]
            assert set(fields) == set(endpoint.body.__struct_encode_fields__)
            assert {"400", "413"} <= set(operation["responses"])
    assert all("description" in each for each in made["components"]["schemas"].values())
    assert msgspec.json.encode(made)
