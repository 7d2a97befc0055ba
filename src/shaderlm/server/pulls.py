"""Models that clients have fetched: one thread for each that is on its way. Knows no HTTP library."""

from __future__ import annotations

import threading

from ..formats.default_model import NAME as DEFAULT_MODEL
from ..formats.find import find, is_remote
from ..formats.hub import FORM, PREFIX
from ..formats.local_models import complete
from ..formats.short_names import SHORT_NAMES
from .errors import ApiError

_HUB_ADDRESSES = ("hf.co/", "huggingface.co/")


def pull_source(name: str) -> str:
    """What a name stands for that can be fetched: also as Ollama spells it, qwen3:0.6b or hf.co/ORG/REPO."""
    text = name.strip().removesuffix(":latest")
    for address in _HUB_ADDRESSES:
        if text.startswith(address):
            text = PREFIX + text.removeprefix(address)
    spelt = text.lower().replace(":", "-")
    if spelt == DEFAULT_MODEL or spelt in SHORT_NAMES:
        text = spelt
    if not is_remote(text):  # a path would say which files there are
        expected = f"a short name, which `shaderlm models` lists, or {FORM}"
        raise ApiError(404, f"there is no model {name!r} to pull; give {expected}", param="model")
    return text


class _PullCancelled(BaseException):  # as Ctrl-C: the package of the hub catches exceptions
    """Nobody waits for it any more."""


class Pull:
    """A model that a thread fetches, for all requests that wait for it."""

    def __init__(self, source: str) -> None:
        self.source, self.readers = source, 0
        self.progress = ("", 0, 0)  # what is done, bytes done, bytes in all
        self.problem: Exception | None = None
        self.is_new = self.is_over = False  # new: it was not there before

    def start(self) -> None:
        """The end of the program does not wait for it: what is there of a file is used the next time."""
        threading.Thread(target=self._run, name="pull", daemon=True).start()

    def _run(self) -> None:
        try:
            was_here = self._is_here()
            find(self.source, self._note)
            self.is_new = not was_here
        except _PullCancelled:
            pass
        except Exception as problem:
            self.problem = problem
        finally:
            self.is_over = True

    def _is_here(self) -> bool:
        """Is it kept on this machine, or a part of its repository?"""
        name = SHORT_NAMES[self.source].model if self.source in SHORT_NAMES else self.source
        return any(each.name == name or each.name.startswith(f"{name}/") for each in complete())

    def _note(self, label: str, done: int, total: int) -> None:
        if not self.readers:
            raise _PullCancelled
        self.progress = (label, done, total)


class Pulls:
    """What a server fetches, and has fetched. Its methods are for the event loop."""

    def __init__(self) -> None:
        self.fetched = set[str]()  # models that were not here before: clients may remove these, and no others
        self._pulls = dict[str, Pull]()

    def join(self, source: str) -> Pull:
        """The pull of a model: the one that is on its way, or a new one. Whoever joins leaves."""
        pull = self._pulls.get(source)
        if pull is None or pull.is_over:
            pull = self._pulls[source] = Pull(source)
            pull.readers = 1
            pull.start()
        else:
            pull.readers += 1
        return pull

    def readers(self, source: str) -> int:
        """How many requests wait for a model."""
        return self._pulls[source].readers if source in self._pulls else 0

    def leave(self, pull: Pull) -> None:
        """A request does not wait any more. The last one ends the pull."""
        pull.readers -= 1
        if pull.is_new:
            self.fetched.add(pull.source)
        if not pull.readers and self._pulls.get(pull.source) is pull:
            del self._pulls[pull.source]
