"""llama-server's `/infill`: what belongs between two pieces of code, for models that know tokens for it."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ApiError
from .llama_server import LlamaCompletions
from .routes import Endpoint
from .served import ServedModel
from .types import llama_server as types

# How models call their tokens: before the prefix, the suffix and the middle, a repository, and a file.
_NAMES: dict[str, tuple[str, ...]] = {
    "prefix": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<｜fim▁begin｜>",
        "<|prefix|>",
    ),
    "suffix": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<｜fim▁hole｜>",
        "<|suffix|>",
    ),
    "middle": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<｜fim▁end｜>",
        "<|middle|>",
    ),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}
_SNIPPET = "\n\n--- snippet ---\n\n"  # before a file, where there is no token for it


class Infill(LlamaCompletions):
    """A gap that is to be filled."""

    route = Endpoint(
        *("/infill", "Fill a gap in code", types.InfillRequest, types.LlamaAnswer),
        events=(types.LlamaDelta, types.LlamaCompletion),
        errors=(501,),
    )

    def _prompts(self) -> list[str | list[int]]:
        assert isinstance(self.body, types.InfillRequest)
        return [infill_ids(self.served, self.body)]


def infill_ids(served: ServedModel, body: types.InfillRequest) -> list[int]:
    """Other files, the prefix, the suffix, and the beginning of what is between them."""
    vocabulary = served.model.tokenizer.vocabulary
    known = {vocabulary.tokens[i]: i for i in vocabulary.not_normal}
    special = {part: known[name] for part, names in _NAMES.items() for name in reversed(names) if name in known}
    missing = [part for part in ("prefix", "suffix", "middle") if part not in special]
    if missing:
        raise ApiError(501, f"this model cannot fill gaps: it has no token for the {' and the '.join(missing)}")

    def ids(text: str) -> Sequence[int]:
        return served.model.tokenize(text, add_special=False, parse_special=False)

    files = list[int]()
    if "repository" in special:
        files += [special["repository"], *ids("myproject\n")]
    for each in body.input_extra or ():
        files += [special["file"], *ids(f"{each.filename}\n")] if "file" in special else ids(_SNIPPET)
        files += ids(each.text)
    if "file" in special:
        files += [special["file"], *ids("filename\n")]
    bos = [vocabulary.bos] if vocabulary.add_bos and vocabulary.bos is not None else []
    return [
        *(*bos, *files, special["prefix"], *ids(body.input_prefix), *ids(body.prompt or "")),
        *(special["suffix"], *ids(body.input_suffix), special["middle"]),
    ]
