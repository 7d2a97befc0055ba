"""`/v1/embeddings` and `/embedding`: the normalised final state of an input's last token."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from ..engine import Handle
from .completions import read_prompts
from .errors import ApiError
from .generation import check_supported
from .routes import Endpoint, Prepared
from .served import ServedModel
from .types.openai import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    LlamaEmbedding,
    LlamaEmbeddingRequest,
)


def check_embedding(served: ServedModel) -> None:
    """They are asked for, or they are off."""
    if not served.embedding:
        raise ApiError(501, "embeddings are off; start the server with --embedding")


class Embeddings(Prepared):
    """Inputs that are checked and tokenised."""

    route = Endpoint("/v1/embeddings", "Embed texts", EmbeddingRequest, EmbeddingResponse, api="OpenAI", errors=(501,))
    stream = return_progress = False

    def __init__(self, served: ServedModel, body: EmbeddingRequest) -> None:
        check_embedding(served)
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


class LlamaEmbeddings(Prepared):
    """The same in llama-server's form."""

    route = Endpoint(
        *("/embedding", "Embed texts", LlamaEmbeddingRequest, list[LlamaEmbedding]),
        errors=(501,),
        aliases=("/embeddings",),
    )
    stream = return_progress = False

    def __init__(self, served: ServedModel, body: LlamaEmbeddingRequest) -> None:
        check_embedding(served)
        check_supported(body)
        served.check_name(body.model)
        field, value = ("input", body.input) if body.content is None else ("content", body.content)
        if value is None:
            raise ApiError(400, "content is missing; this route needs it", param="content")
        self.served = served
        self.requests = [served.model.embed_request(each) for each in read_prompts(field, value)]

    def response(self, handles: Sequence[Handle]) -> list[Any]:
        """One embedding for each handle."""
        return [LlamaEmbedding(i, [handle.embedding().tolist()]) for i, handle in enumerate(handles)]
