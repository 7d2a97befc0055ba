"""What a request of a batch is called: the same request has the same id in every run, wherever it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

PREFIX = "batch_req_"


def request_id(request: Mapping[str, object]) -> str:
    """The same for the same request, in whatever order its fields are."""
    fields = [request.get(name) for name in ("custom_id", "method", "url", "body")]
    return PREFIX + hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:24]
