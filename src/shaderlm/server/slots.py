"""llama-server's slots as files: `/slots/{id}` saves what is cached of a prompt, restores it, or erases it.

There are no fixed slots here: any prompt that begins like an earlier one is found in the cache. A slot stands for the
last request that named it as `id_slot`, or, for slot 0, that named none; each client has slots of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from ..engine import Handle, LanguageModel
from ..engine.model_identity import identity_of
from ..engine.saved_prompts import restore_prompt, save_prompt
from ..errors import InputError
from ..runtime.disk_cache import keyed, read_salt
from .errors import ApiError
from .types.llama_server import SlotFileResponse, SlotTimings

MAX_SLOTS = 64  # of a client: each may hold a list of as many tokens as the context has
MAX_FILES = 256  # of a client
_NAME = re.compile(r"[^\x00-\x1f\x7f/\\:*?\"<>|.][^\x00-\x1f\x7f/\\:*?\"<>|]{0,199}")
_ACTIONS = ("save", "restore", "erase")


class SlotFiles:
    """The slots of the clients of one model, and a folder for their files. With keys each client has its own below."""

    def __init__(self, model: LanguageModel, folder: Path, keys: Sequence[str] = ()) -> None:
        self._model, self._folder, self._keys = model, folder, tuple(keys)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            raise InputError(f"cannot use --slot-save-path {folder}: {problem.strerror}") from None
        self._identity = identity_of(model.runner, model.report)
        self._salt = read_salt(folder) if keys else b""
        self._lock, self._transfer = Lock(), Lock()  # one prompt at a time is in the memory of the host
        self._tokens: dict[tuple[str | None, int], Sequence[int]] = {}

    def note(self, client: str | None, slot: int | None, handles: Sequence[Handle]) -> None:
        """A request begins: its slot holds what it reads and writes."""
        number = 0 if slot is None or slot < 0 else slot
        if number < MAX_SLOTS:
            with self._lock:
                self._tokens[client, number] = handles[0].sequence.tokens  # the engine adds to it

    def tokens(self, client: str | None, slot: int) -> Sequence[int]:
        """What a slot holds."""
        with self._lock:
            return [*self._tokens.get((client, slot), ())]

    def save(self, client: str | None, slot: int, name: str) -> SlotFileResponse:
        """Write a slot into a file."""
        began, ids, path = time.perf_counter(), self.tokens(client, slot), self._path(client, name)
        if not path.exists() and len([*path.parent.iterdir()]) >= MAX_FILES:
            raise ApiError(400, f"there are {MAX_FILES} saved files, which is the most; save under one of their names")
        with self._transfer:
            saved = save_prompt(self._model.engine.pages, ids, self._owner(client), path, self._of(client))
        timings = SlotTimings(save_ms=_milliseconds(began))
        return SlotFileResponse(
            id_slot=slot, filename=name, n_saved=len(saved.ids), n_written=saved.nbytes, timings=timings
        )

    def restore(self, client: str | None, slot: int, name: str) -> SlotFileResponse:
        """Put a file into the cache; the slot holds it."""
        began = time.perf_counter()
        pages = self._model.engine.pages
        with self._transfer:
            saved = restore_prompt(pages, self._owner(client), self._path(client, name), self._of(client))
        with self._lock:
            self._tokens[client, slot] = saved.ids
        timings = SlotTimings(restore_ms=_milliseconds(began))
        return SlotFileResponse(
            id_slot=slot, filename=name, n_restored=len(saved.ids), n_read=saved.nbytes, timings=timings
        )

    def erase(self, client: str | None, slot: int) -> SlotFileResponse:
        """Forget what is cached of a slot, in memory and on disk. Files that were saved stay."""
        ids = self.tokens(client, slot)
        self._model.engine.forget(ids, self._owner(client))
        with self._lock:
            self._tokens.pop((client, slot), None)
        return SlotFileResponse(id_slot=slot, n_erased=len(ids))

    def _owner(self, client: str | None) -> str | None:
        """Whose pages a client finds in the cache."""
        return None if self._model.engine.options.share_prefixes else client

    def _key(self, client: str | None) -> bytes:
        """What stands for the key of a client in a file."""
        return b"" if client is None else keyed(self._salt, self._keys[int(client)].encode())

    def _of(self, client: str | None) -> bytes:
        return keyed(self._identity, self._key(client))

    def _path(self, client: str | None, name: str) -> Path:
        folder = self._folder
        if client is not None:
            folder /= f"key-{self._key(client).hex()[:32]}"
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as problem:
                raise InputError(f"cannot make a folder in --slot-save-path: {problem.strerror}") from None
        return folder / name


def change(slots: SlotFiles | None, number: str, action: str, name: str | None, client: str | None) -> SlotFileResponse:
    """Save, restore or erase a slot."""
    if slots is None:
        raise ApiError(501, "slots are not saved here; start the server with --slot-save-path DIR")
    if not number.isascii() or not number.isdecimal() or len(number) > 9 or int(number) >= MAX_SLOTS:
        raise ApiError(400, f"the slot must be a number in 0 … {MAX_SLOTS - 1}, got {number[:40]!r}", param="id")
    if action not in _ACTIONS:
        raise ApiError(400, f"action must be one of {', '.join(_ACTIONS)}, got {action[:40]!r}", param="action")
    slot = int(number)
    if action == "erase":
        return slots.erase(client, slot)
    checked = checked_name(name)
    return slots.save(client, slot, checked) if action == "save" else slots.restore(client, slot, checked)


def checked_name(name: str | None) -> str:
    """The name of a file in the folder itself, which every system takes."""
    try:
        short = name is not None and len(name.encode()) <= 200
    except UnicodeEncodeError:
        short = False
    if name is None or not short or not _NAME.fullmatch(name) or name[-1] in ". ":
        expected = 'a file name without a path: up to 200 bytes, no / \\ : * ? " < > |, not beginning with a dot'
        raise ApiError(400, f"filename must be {expected}", param="filename")
    return name


def _milliseconds(began: float) -> float:
    return round(1000 * (time.perf_counter() - began), 3)
