"""The exceptions that users see. Knows nothing else.

Every message says what was given, what was expected and, where that is not obvious, what to do.
"""


class ShaderlmError(Exception):
    """Base of everything that shaderlm raises on purpose."""


class InputError(ShaderlmError, ValueError):
    """An argument has the wrong shape, dtype, size or value."""


class RouteError(InputError):
    """A route is unknown, or does not apply to this shape on this device."""


class DeviceError(ShaderlmError, RuntimeError):
    """No adapter fits, or the GPU refused what was asked of it."""


class KernelError(ShaderlmError, RuntimeError):
    """A WGSL kernel does not compose or compile. The message shows the numbered line."""


class ModelError(ShaderlmError, ValueError):
    """A checkpoint cannot be found, read or run: broken, incomplete, or of a kind that is not supported."""
