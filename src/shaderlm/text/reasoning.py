"""What a reasoning model writes between its thinking tags, told from its answer while both are streamed."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser:
    """Splits streamed text into thoughts and answer. Blank space around either is left out.

    `inside`: the prompt ends with the opening tag, so that the text begins with thoughts.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._state = "thoughts" if inside else "before"
        self._held = ""
        self._begun = False  # has this part any text yet?

    def push(self, text: str) -> tuple[str, str]:
        """More of the text: thoughts and answer in it that are certain."""
        if self._state == "answer" and self._begun:
            return "", text
        text = self._held + text
        self._held = ""
        thoughts = ""
        if self._state == "before":
            stripped = text.lstrip()
            if not stripped or (OPEN.startswith(stripped) and stripped != OPEN):
                self._held = text
                return "", ""
            if not stripped.startswith(OPEN):
                self._state, self._begun = "answer", True
                return "", text
            self._state, text = "thoughts", stripped[len(OPEN) :]
        if self._state == "thoughts":
            thoughts, text = self._thoughts(text)
        return thoughts, self._answer(text) if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """What was held back: the text ended within a tag, or with blank space."""
        held, self._held = self._held, ""
        if self._state == "thoughts":
            return held.rstrip(), ""
        return "", held

    def _thoughts(self, text: str) -> tuple[str, str]:
        """Thoughts, and what comes after them; what may be the closing tag, or blank before it, is held back."""
        if not self._begun:
            text = text.lstrip()
        found, tag, rest = text.partition(CLOSE)
        if tag:
            self._state, self._begun = "answer", False
            return found.rstrip(), rest
        keep = len(text)
        for length in range(min(len(CLOSE) - 1, len(text)), 0, -1):
            if CLOSE.startswith(text[-length:]):
                keep = len(text) - length
                break
        certain = text[:keep].rstrip()
        self._held = text[len(certain) :]
        self._begun = self._begun or bool(certain)
        return certain, ""

    def _answer(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text
