"""`shaderlm generate`: one prompt, one generation, streamed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from .cache_options import cache_options
from .completion import complete_files
from .draft_options import draft_options
from .image_options import content_with, image_option, vision_options
from .info import printable
from .loading import load_model, status
from .options import (
    ModelOptions,
    generation_options,
    model_options,
    sampling_options,
    structure_options,
    with_model_values,
)
from .prompts import TextCommand, prompt_text
from .streaming import tell, tell_cancelled, write_stream

if TYPE_CHECKING:
    from ..engine import Completion, GenerationOptions, LanguageModel, Stream, TokenLogprob


@click.command(cls=TextCommand)
@click.argument("prompt", required=False)
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    shell_complete=complete_files,
    help="Read the prompt from FILE. PROMPT goes first, if there is one.",
)
@model_options
@cache_options
@draft_options
@vision_options
@image_option
@sampling_options(max_tokens=256)
@structure_options
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--logprobs", type=int, metavar="N", help="Print log probabilities: of each token and of the N best.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object instead of the text.")
@click.option(
    "--jsonl", "form", flag_value="jsonl", help="Print a JSON line per delta as it comes; last all of --json."
)
@click.option("-v", "--verbose", is_flag=True, help="Also print what was loaded and how fast it ran, on stderr.")
def generate(
    prompt: str | None,
    file: str | None,
    model_options: ModelOptions,
    images: tuple[str, ...],
    system: str | None,
    raw: bool,
    form: str | None,
    verbose: bool,
    **generation: Any,
) -> None:
    """Answer a prompt, or continue a text.

    PROMPT `-` and FILE `-`, or nothing in a pipe, read standard input. A model with a chat template answers through it;
    --raw continues the text instead.
    """
    from ..gpu import begin_opening

    # Drivers start while modules are imported and files are read, and so does what renders a chat.
    begin_opening(model_options.device, model_options.backend)
    if raw and system is not None:
        raise click.UsageError("--system needs a chat template; leave out --raw.")
    if raw and images:
        raise click.UsageError("--image needs a chat template; leave out --raw.")
    if not raw:
        from ..text.chat import start_rendering

        start_rendering()
    options = generation_options(generation)
    text = prompt_text(prompt, file)
    with load_model(model_options, options) as loaded:
        options = with_model_values(options, loaded)
        if verbose:
            tell("\n".join(map(printable, loaded.report.lines())))
        completion = _generate(_stream(loaded, text, images, raw, system, options), form)
        if form is not None:
            indent = 2 if form == "json" else None
            print(json.dumps(_record(loaded, completion), ensure_ascii=False, indent=indent), flush=True)
        elif completion.logprobs is not None:
            for entry in completion.logprobs:
                tell(_logprob_line(loaded, entry))
        if verbose:
            tell(_timing(completion))
            if loaded.engine.drafter is not None:
                tell(_drafts(loaded))
        if completion.finish_reason == "length" and form is None and (verbose or sys.stderr.isatty()):
            tell(_cut(loaded, completion, options["max_tokens"]))


def _stream(
    model: LanguageModel,
    text: str,
    images: Sequence[str],
    raw: bool,
    system: str | None,
    options: GenerationOptions,
) -> Stream:
    if raw or not model.has_chat_template:
        if images:
            raise InputError(f"{model.report.name} has no chat template to put images in; leave out --image")
        if system is not None:
            raise InputError(f"{model.report.name} has no chat template to put a system message in; leave out --system")
        return model.stream(text, **options)
    first = [] if system is None else [{"role": "system", "content": system}]
    # What is printed has the form that was asked for, so there is no thinking before it.
    free = options.get("json_schema") is None and options.get("grammar") is None
    return model.stream_chat(
        [*first, {"role": "user", "content": content_with(images, text)}], reasoning=free, **options
    )


def _generate(stream: Stream, form: str | None) -> Completion:
    """The whole generation, on stdout as it comes if that is its form. Ctrl-C ends the line and the program."""
    text, interrupted = "", False
    if form != "json":
        text, interrupted = write_stream(stream, as_lines=form == "jsonl")
    else:
        try:
            with status("generating"):
                for _ in stream:
                    pass
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        tell_cancelled("the text ends here and is not complete" if text else "there is no text yet", text)
        sys.exit(130)
    assert stream.completion is not None
    return stream.completion


# What is printed besides the text ---------------------------------------------------------------------------


def _timing(completion: Completion) -> str:
    timing = completion.timing
    return (
        f"prompt   {len(completion.prompt_ids):,} tokens, {timing.prompt_seconds:.2f} s to the first token\n"
        f"output   {len(completion.ids):,} tokens, {timing.tokens_per_second:.1f} tok/s; "
        f"finish reason: {completion.finish_reason}"
    )


def _drafts(model: LanguageModel) -> str:
    stats, by = model.engine.stats(), model.draft_model
    return (
        f"drafts   {stats.drafted_tokens:,} tokens{'' if by is None else f' by {printable(by.report.name)}'}, "
        f"{stats.accepted_tokens:,} accepted"
    )


def _cut(model: LanguageModel, completion: Completion, max_tokens: int) -> str:
    if len(completion.ids) == max_tokens:
        return f"output cut after {max_tokens:,} tokens; --max-tokens (-n) allows more"
    return f"output cut: the context of {model.config.context:,} tokens is full"


def _record(model: LanguageModel, completion: Completion) -> dict[str, Any]:
    timing, logprobs = completion.timing, completion.logprobs
    return {
        "model": model.report.name,
        "device": model.report.device,
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": len(completion.ids),
        "ids": completion.ids,
        "text": str(completion),
        "finish_reason": completion.finish_reason,
        "logprobs": None if logprobs is None else [_logprob_record(model, entry) for entry in logprobs],
        "seconds_to_first_token": timing.prompt_seconds,
        "tokens_per_second": timing.tokens_per_second,
    }


def _logprob_record(model: LanguageModel, entry: TokenLogprob) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinity: the log of a probability of 0 is null.
        value = logprob if math.isfinite(logprob) else None
        return {"id": token, "token": model.detokenize([token]), "logprob": value}

    return {**one(entry.id, entry.logprob), "top": [one(*pair) for pair in entry.top]}


def _logprob_line(model: LanguageModel, entry: TokenLogprob) -> str:
    """The sampled token, then its alternatives."""

    def one(token: int, logprob: float) -> str:
        return f"{logprob:8.3f} {model.detokenize([token])!r}"

    others = (one(*pair) for pair in entry.top if pair[0] != entry.id)
    return " | ".join([one(entry.id, entry.logprob), *others])
