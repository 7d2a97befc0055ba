"""The exceptions that users see. Knows nothing else.

Every message says what was given, what was expected and, where that is not obvious, what to do.
"""


class ShaderlmError(Exception):
    """Base of everything that shaderlm raises on purpose."""


class InputError(ShaderlmError, ValueError):
    """An argument has the wrong shape, dtype, size or value."""


class ContextSizeError(InputError):
    """A prompt has more tokens than the context holds."""

    def __init__(
        self, message: str, prompt_tokens: int, context: int, *, at_least: bool = False, max_context: int = 0
    ) -> None:
        super().__init__(message)
        self.prompt_tokens, self.context = prompt_tokens, context
        self.at_least = at_least  # of a long text, tokens are not counted to the end
        self.max_context = max_context  # the longest of this model; 0: the memory of the cache is the limit


class UnavailableError(InputError):
    """A model that is closed, or that takes no more requests, was asked for something."""


class QueueFullError(ShaderlmError, RuntimeError):
    """As many requests run and wait as may."""

    def __init__(self, message: str, waiting: int, limit: int, retry_after: float) -> None:
        super().__init__(message)
        self.waiting, self.limit, self.retry_after = waiting, limit, retry_after  # retry_after: seconds, a guess


class RouteError(InputError):
    """A route is unknown, or does not apply to this shape on this device."""


class DeviceError(ShaderlmError, RuntimeError):
    """No adapter fits, or the GPU refused what was asked of it."""


class TooLargeError(DeviceError):
    """A model needs more memory than the device has, even if nothing else is on it."""


class MemoryFullError(DeviceError):
    """A device has no memory left. With less on it there may be some."""


class KernelError(ShaderlmError, RuntimeError):
    """A WGSL kernel does not compose or compile. The message shows the numbered line."""


class ModelError(ShaderlmError, ValueError):
    """A checkpoint cannot be found, read or run: broken, incomplete, or of a kind that is not supported."""
