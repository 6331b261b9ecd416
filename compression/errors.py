"""The errors of compression. Each has one sentence that names the fault and the way out.

SpecError and NonFiniteError are faults of the caller, PayloadError is a fault of the sender.
"""


class SpecError(ValueError):
    """A SPEC cannot be parsed. The sentence names the stage, and the known stages or the stage's syntax."""


class NonFiniteError(ValueError):
    """A lossy stage cannot encode the values: one is NaN or infinite, or overflows when it is coded."""


class PayloadError(ValueError):
    """Bytes are no valid payload for the expected number of values. Raised before anything is written."""


class NonFinitePayloadError(PayloadError):
    """A payload holds NaN or infinity, or decodes to it, and the receiver accepts finite values alone."""
