"""The exceptions of flashjit, one class for each code of an error."""


class Error(Exception):
    """A failure of flashjit.

    message says what was asked, what is wrong and what would work. detail has logs, and may be empty. code is the
    text that the C++ interface and the command have for it, such as "invalid_argument".
    """

    code = "internal"

    def __init__(self, message: str, detail: str = ""):
        super().__init__(message)
        self.message = message
        self.detail = detail

    def __reduce__(self):
        return type(self), (self.message, self.detail)


class InvalidSpecError(Error):
    """A spec that is malformed or contradicts itself."""

    code = "invalid_spec"


class UnsupportedError(Error):
    """A valid request for which there is no kernel."""

    code = "unsupported"


class InvalidArgumentError(Error):
    """A tensor, length or option that does not fit the request."""

    code = "invalid_argument"


class TargetUnavailableError(Error):
    """This machine cannot run the target."""

    code = "target_unavailable"


class CompilerUnavailableError(Error):
    """NVRTC or the LLVM plugin was not found."""

    code = "compiler_unavailable"


class CompileFailedError(Error):
    """The compiler rejected the source; detail is its log."""

    code = "compile_failed"


class CacheFailedError(Error):
    """A cache folder is unusable or refused."""

    code = "cache_failed"


class DeviceFailedError(Error):
    """The CUDA driver or the operating system reported a failure."""

    code = "device_failed"


class InternalError(Error):
    """A defect of flashjit itself."""

    code = "internal"


class NotPrebuiltError(Error):
    """An engine with the policy require_prebuilt found the kernel in no cache folder."""

    code = "not_prebuilt"


class CancelledError(Error):
    """A compilation was cancelled."""

    code = "cancelled"


class LimitExceededError(Error):
    """A compilation went beyond compile_seconds or compile_bytes."""

    code = "limit_exceeded"


# The class of the C interface's status i is element i - 1.
BY_STATUS = (
    InvalidSpecError,
    UnsupportedError,
    InvalidArgumentError,
    TargetUnavailableError,
    CompilerUnavailableError,
    CompileFailedError,
    CacheFailedError,
    DeviceFailedError,
    InternalError,
    NotPrebuiltError,
    CancelledError,
    LimitExceededError,
)
