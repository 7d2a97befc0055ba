"""`/v1/embeddings`: the normalised final state of an input's last token."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from ..engine import Handle
from .completions import read_prompts
from .errors import ApiError
from .routes import Endpoint, Prepared
from .served import ServedModel
from .types.openai import Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage


class Embeddings(Prepared):
    """Inputs that are checked and tokenised."""

    route = Endpoint("/v1/embeddings", "Embed texts", EmbeddingRequest, EmbeddingResponse, api="OpenAI", errors=(501,))
    stream = return_progress = False

    def __init__(self, served: ServedModel, body: EmbeddingRequest) -> None:
        if not served.embedding:
            raise ApiError(501, "embeddings are off; start the server with --embedding")
        served.check_name(body.model)
        width = served.model.config.hidden
        if body.dimensions is not None and body.dimensions != width:
            raise ApiError(
                400, f"dimensions must be the model's {width:,}, got {body.dimensions:,}", param="dimensions"
            )
        self.served, self.base64 = served, body.encoding_format == "base64"
        inputs = read_prompts("input", body.input)
        self.requests = [served.model.embed_request(each) for each in inputs]

    def response(self, handles: Sequence[Handle]) -> EmbeddingResponse:
        """One embedding for each handle."""
        data = [Embedding("embedding", i, self._embedding(handle)) for i, handle in enumerate(handles)]
        tokens = sum(handle.usage.prompt_tokens for handle in handles)
        return EmbeddingResponse("list", data, self.served.name, EmbeddingUsage(tokens, tokens))

    def _embedding(self, handle: Handle) -> list[float] | str:
        values = handle.embedding()
        return base64.b64encode(values.astype("<f4").tobytes()).decode() if self.base64 else values.tolist()
