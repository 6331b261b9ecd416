"""The arithmetic by which a sender repeats messages until they are acknowledged. No clock: the time is an argument.

How it works
- A sender repeats a message until the receiver acknowledges it. Each such rule is a row, a `Retry`: the wait before the
  first repeat, the slowest link, and how far the wait grows. The machine keeps the time of the last sending and asks
  `Retry.due`.
- The wait grows in one of two ways. For a repeated request the caller passes the count of its requests as `factor`. If
  a late answer shows that a link is slow, `RetryTimer` keeps the factor of that answer.
- A new connection makes everything due: the machine sets its times to `LONG_AGO_NS`, and the next tick repeats.
- A `NumberedStream` counts messages that the receiver acknowledges together, all before a number:

      0 ...              acked ...         sent ...                          there
      the receiver's   | under way       | to be sent, as the window lets it

  If no acknowledgement comes within the wait of a `Retry`, the sender goes back to `acked` and sends the same numbers
  again.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.effects import NS

SLOW_LINK_BYTES_PER_SECOND = 125_000  # of the slowest link: the wait for n bytes is longer by n / this
RETRY_FACTOR_MAX = 8  # a wait grows to at most this many times its first length: a lost message must not wait longer
LONG_AGO_NS = -(1 << 62)  # set as the time of the last sending, it makes the next tick repeat the message


def transfer_ns(size: int, bytes_per_second: int = SLOW_LINK_BYTES_PER_SECOND) -> int:
    """Return the time that `size` bytes take on a link of this rate."""
    return size * NS // bytes_per_second


@dataclass(frozen=True, slots=True)
class Retry:
    """When a sender repeats a message that is not acknowledged.

    Args:
        first_ns: the wait for the answer to a message without payload.
        bytes_per_second: of the slowest link; the wait for n bytes is longer by n / this. 0: the size does not count.
        most: the factor by which the wait grows at most.
    """

    first_ns: int
    bytes_per_second: int = 0
    most: int = 1

    def wait_ns(self, size: int = 0, factor: int = 1) -> int:
        """Return the wait for the answer to `size` bytes: `factor` times the first wait, at most `most` times."""
        more_ns = transfer_ns(size, self.bytes_per_second) if self.bytes_per_second else 0
        return min(factor, self.most) * (self.first_ns + more_ns)

    def due(self, sent_ns: int, now_ns: int, size: int = 0, factor: int = 1) -> bool:
        """True if `size` bytes that were last sent at `sent_ns` are to be sent again."""
        return now_ns - sent_ns >= self.wait_ns(size, factor)


@dataclass(slots=True)
class RetryTimer:
    """When bytes are sent again on one link, slow links included.

    A link slower than `bytes_per_second` would carry nothing but copies. So the timer learns from each answer to bytes
    that were sent twice: the next bytes get as long a wait as those took.
    """

    retry: Retry
    factor: int = 1  # of the wait; it only grows, up to `retry.most`

    def due(self, sent_ns: int, now_ns: int, size: int) -> bool:
        """True if `size` bytes that were last sent at `sent_ns` are to be sent again."""
        return self.retry.due(sent_ns, now_ns, size, self.factor)

    def answered(self, sent_ns: int, now_ns: int, size: int) -> None:
        """Learn from the answer to `size` bytes that were sent first at `sent_ns`, and once more since."""
        took = -(-(now_ns - sent_ns) // self.retry.wait_ns(size))
        self.factor = min(max(self.factor, took), self.retry.most)


@dataclass(slots=True)
class NumberedStream:
    """Counts of the messages from one sender to one receiver, which acknowledges all before a number (go-back-n).

    The sender keeps the messages. Numbers begin with 0.

    Args:
        window: the largest number of messages under way; None: no limit.
        acked: the receiver has all messages before this number.
        sent: the sender has sent all messages before this number.
    """

    window: int | None = None
    acked: int = 0
    sent: int = 0

    def acknowledge(self, count: int) -> bool:
        """Note that the receiver has all messages before `count`. True if that is more than before.

        A smaller count than before means that the receiver has begun anew.
        """
        more, self.acked = count > self.acked, count
        return more

    def go_back(self) -> None:
        """Count all that is under way as lost."""
        self.sent = self.acked

    def begin_anew(self) -> None:
        """Count no message as sent: those that follow are others."""
        self.sent = 0

    def take(self, there: int) -> range:
        """Return the numbers to send now, of messages before `there`, and count them as sent."""
        end = there if self.window is None else min(there, self.acked + self.window)
        first, self.sent = self.sent, max(self.sent, end)
        return range(first, self.sent)
