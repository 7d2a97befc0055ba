"""How an engine is asked to draft, and which models draft for others.

Imports little: the command line reads it for its help.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from ..models.config import Config

DRAFTS = ("ngram",)  # that need no model
MOST_TOKENS = 64  # that may be drafted for a sequence at once
DRAFT_TOKENS = 15  # unless another number is given: with the row of the token before, a bucket of 16


def check_can_draft(config: Config) -> None:
    """Refuse models that cannot draft for others: their caches must be truncated to what was accepted."""
    if config.recurrent:
        raise InputError(
            "a model that drafts needs a cache that can be truncated to any token; the states of the recurrent layers "
            f'of {config.architecture} cannot. Take another one, or draft="ngram"'
        )


def check_draft(draft: str | None, tokens: int, model: object = None) -> None:
    """How to draft, and how many tokens at once."""
    if draft is not None and model is not None:
        raise InputError("draft and draft_model exclude each other: give one of them")
    if draft not in (None, *DRAFTS):
        raise InputError(f"draft must be None or one of {', '.join(map(repr, DRAFTS))}, got {draft!r}")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MOST_TOKENS:
        raise InputError(f"draft_tokens must be a whole number in 1 … {MOST_TOKENS}, got {tokens!r}")
