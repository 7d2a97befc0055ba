"""`shaderlm ps` and `stop`: the models of a server that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import click

from ..errors import InputError, ModelError
from .loading import console
from .options import apply_options, json_option

_SECONDS = 30.0
_WIDTH = 120  # of the table in a pipe


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--url and --api-key."""
    words = "Address of the server."
    options: list[Any] = [
        click.option("--url", default="http://127.0.0.1:8080", show_default=True, metavar="URL", help=words),
        click.option("--api-key", metavar="KEY", help="The key that the server wants."),
    ]
    return apply_options(options, command)


@click.command()
@server_options
@json_option
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """List the models of a server that runs.

    A model is unloaded, loading, loaded, sleeping or failed. Each request for one that is not loaded loads it.
    """
    models = _ask(url, api_key, "GET", "/v1/models")["data"]
    if as_json:
        print(json.dumps(models, ensure_ascii=False, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("name", "state", "context", "requests", "until"):
        table.add_column(title, justify="right" if title in ("context", "requests") else "left")
    for each in models:
        status, meta = each.get("status", {}), each.get("meta", {})
        context = f"{meta['n_ctx']:,}" if "n_ctx" in meta else ""
        until = status.get("error") or status.get("expires_at", "")
        table.add_row(each["id"], status.get("value", "loaded"), context, str(status.get("requests", 0)), until)
    console(_WIDTH).print(table, markup=False, highlight=False)


@click.command()
@click.argument("name")
@server_options
def stop(name: str, url: str, api_key: str | None) -> None:
    """Close a model of a server that runs.

    Its requests come to their end before that. The next request for it loads it again.
    """
    _ask(url, api_key, "POST", "/models/unload", {"model": name})
    print(f"{name} is closed, once its requests are over")


def _ask(url: str, key: str | None, method: str, route: str, body: Any = None) -> Any:
    """What the server answers. What it refuses is told in its own words."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    if urlsplit(base).scheme not in ("http", "https"):
        raise InputError(f"--url must be like http://127.0.0.1:8080, got {url!r}")
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(base + route, data, headers, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=_SECONDS) as response:
            return json.load(response)
    except HTTPError as problem:
        raise ModelError(f"{base}: {_words(problem)}") from None
    except (URLError, OSError) as problem:
        reason = getattr(problem, "reason", problem)
        reason = getattr(reason, "strerror", None) or reason
        raise ModelError(f"no server answers at {base}: {str(reason).lower()}; --url says where it is") from None
    except ValueError:
        raise ModelError(f"{base} does not answer as `shaderlm serve` does; --url says where it is") from None


def _words(problem: HTTPError) -> str:
    try:
        return str(json.load(problem)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{problem.code} {problem.reason}"
