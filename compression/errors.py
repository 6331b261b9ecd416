"""The named errors of compression. Each carries one sentence that says whose fault it is and what to do.

SpecError and NonFiniteError are ours (the caller gave something wrong); PayloadError is the sender's.
"""


class SpecError(ValueError):
    """A SPEC that cannot be parsed; the sentence points at the stage and says what is known or how it is written."""


class NonFiniteError(ValueError):
    """NaN or infinity in values that a lossy stage was asked to encode, or values so large that coding them overflows."""


class PayloadError(ValueError):
    """Bytes that are no valid payload for the expected number of values. Raised before anything is written."""


class NonFinitePayloadError(PayloadError):
    """A payload that holds NaN or infinity, or decodes to it, where only finite values were asked for."""
