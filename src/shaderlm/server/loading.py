"""From a loaded model to one that is served: its template, its limits, its engine, and what is compiled beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..engine import EngineOptions, LanguageModel
from ..engine.language_model import DEFAULT_CACHE_DISK
from ..errors import InputError, ModelError
from ..text import RenderLimits
from .limits import Limits
from .served import ServedModel
from .slots import SlotFiles

Status = Callable[[str], AbstractContextManager[None]]  # says what is being done
_PARALLEL = 128  # sequences; with more, a server's own work per token costs more than larger steps gain (docs/log.md)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server decides about a model. `n_predict` below 0: until the end, as None."""

    names: tuple[str, ...] = ()
    n_predict: int | None = None
    seed: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict, hash=False)  # other options, as for `generate`
    reasoning: Literal["auto", "none"] = "auto"
    thinking: bool = True
    thinking_budget: int | None = None
    tags: tuple[str, ...] = ()
    strict_model: bool = False
    verbose: bool = False
    embedding: bool = False
    limits: Limits = Limits()  # noqa: RUF009 (nothing changes it)
    chat_template: str | None = None
    parallel: int | None = None
    queue: int | None = None
    kv_memory: int | None = None  # bytes
    share_prefixes: bool = False
    cache_dir: str | None = None  # of the cache on disk
    cache_disk: int | None = None  # bytes
    slot_save_path: str | None = None  # a folder that clients save slots into
    keys: tuple[str, ...] = field(default=(), repr=False)  # of clients, in the order by which requests name them
    warmup: bool = True
    prepare_grammars: bool = True  # in the warm-up; half a second in which no other thread runs


def serve_model(
    model: LanguageModel, source: str, options: ServeOptions, status: Status = lambda text: nullcontext()
) -> ServedModel:
    """The model with the server's options. One that does not take them is closed again."""
    limits = options.limits
    try:
        model.limit(RenderLimits(limits.template_seconds, limits.template_bytes), limits.grammar_seconds)
        if options.chat_template is not None:
            model.use_chat_template(options.chat_template)
        memory = options.kv_memory
        tokens = None if memory is None else model.engine.tokens_for(memory)
        if tokens == 0:
            raise InputError(f"--kv-memory must hold at least one page of the cache, got {memory:,} bytes")
        engine = EngineOptions(
            options.parallel or _PARALLEL, options.queue, tokens, share_prefixes=options.share_prefixes
        )
        model.engine.configure(engine)
        if options.cache_dir is not None:
            with status("reading the model's files for --cache-dir"):
                model.use_cache_dir(options.cache_dir, options.cache_disk or DEFAULT_CACHE_DISK, options.keys)
        slots = None
        if options.slot_save_path is not None:
            with status("reading the model's files for --slot-save-path"):
                slots = SlotFiles(model, Path(options.slot_save_path), options.keys)
        if model.has_chat_template:  # what the first request would wait for: the template is compiled
            with suppress(InputError, ModelError):
                model.chat_request([{"role": "user", "content": "Hello"}], max_tokens=1)
        if options.warmup:
            with status("compiling kernels"):
                model.engine.warm_up()
            if options.prepare_grammars:
                with suppress(InputError):  # without llguidance, requests that need it are told so
                    model.prepare_grammars()
    except BaseException:
        model.close()
        raise
    predict = options.n_predict
    return ServedModel(
        model,
        names=options.names,
        n_predict=None if predict is None or predict < 0 else predict,
        seed=options.seed,
        sampling=options.sampling,
        reasoning=options.reasoning,
        thinking=options.thinking,
        thinking_budget=options.thinking_budget,
        tags=options.tags,
        strict=options.strict_model,
        verbose=options.verbose,
        embedding=options.embedding,
        limits=limits,
        slots=slots,
        source=source,
    )
