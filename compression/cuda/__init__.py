"""narrows.compression.cuda: error feedback and coding where the arrays are, on a GPU; `kernels.py` has all its kernels."""

from narrows.compression.cuda.feedback import CudaErrorFeedback, accumulate, decode

__all__ = ["CudaErrorFeedback", "accumulate", "decode"]
