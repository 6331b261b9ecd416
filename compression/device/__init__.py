"""narrows.compression.device: error feedback and coding of arrays on a GPU.

kernels = kernels_for("cuda:0")
feedback = DeviceErrorFeedback(kernels, parse("topk:0.01+int8"), count)
payload = feedback.encode(update)            # update: a tensor on the device
accumulate(kernels, payload, weight, state)  # state: likewise
"""

from narrows.compression.device.feedback import DeviceErrorFeedback, accumulate, add_raw, decode
from narrows.compression.device.kernels import kernels_for
from narrows.compression.device.stages import Staging

__all__ = ["DeviceErrorFeedback", "Staging", "accumulate", "add_raw", "decode", "kernels_for"]
