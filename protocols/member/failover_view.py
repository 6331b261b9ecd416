"""Which server a member listens to, and when it turns to the standby (ps/replication/replication_primary.py). No I/O.

Rules
- A member votes once in a view. While its vote is with the standby, it takes nothing of the server.
- A member turns where the server was silent for FAILOVER_SILENCE_NS, or once the connections to all of its shards have ended.
  The end of one connection says nothing: a shard that was killed may be back in a moment.
- A server that lacks the votes to go on without its standby says so twice a second. After FAILOVER_SILENCE_NS of that, a member
  asks the standby too, and moves there where that serves. The member stays with the server meanwhile: it may get its votes yet.
- It comes back where the standby says that the vote does not count, or where the server was elected without it.
"""

from __future__ import annotations

from narrows.protocols import messages as m
from narrows.protocols.config.retry import LONG_AGO_NS
from narrows.protocols.config.timing import (
    FAILOVER_CUT_NS,
    FAILOVER_SILENCE_NS,
    FAILOVER_STAY_NS,
    VOTE_RETRY,
)
from narrows.protocols.effects import MemberEffect, Send, SendToPeer, Turned


class FailoverView:
    """The views as one member knows them, whose number is `worker` and whose place is of `epoch`."""

    def __init__(self, worker: int, epoch: int) -> None:
        self.worker, self.epoch = worker, epoch
        self.view, self.standby = 0, ""
        self.turned = False  # to the standby
        self.undecided = False  # the server has asked for a vote, and was not elected since
        self.decided_ns = 0  # when that was not so last
        self.asking = False  # the standby whether it serves, while the server is listened to
        self.attempt = 0
        self.said_ns = self.stayed_ns = 0
        self.cut: dict[int, int] = {}  # shards whose connections have ended, and when

    @property
    def listens(self) -> bool:
        """The standby was asked whether it serves."""
        return self.turned or self.asking

    def told(self, view: m.FailoverNotice) -> list[MemberEffect]:
        """Take the view that the server tells, and answer with a vote."""
        alone = view.decided and not view.standby and view.view == self.view  # we have voted for it
        if self.turned and not (alone or (view.decided and view.view > self.view)):
            return []
        self.undecided = not view.decided
        if view.view >= self.view and view.decided:
            self.standby, self.turned = view.standby, False
        self.view = max(self.view, view.view)
        return [
            Send(0, m.FailoverVote(self.worker, self.epoch, self.view, 0))
        ]  # the server may have lost the one before

    def tick(self, heard_ns: int, shards: int, now_ns: int) -> list[MemberEffect]:
        """Turn to the standby, where there is one and the server, of so many shards, has been silent for long or is gone."""
        gone = 1 < shards <= len(self.cut) and now_ns - max(self.cut.values()) > FAILOVER_CUT_NS
        lost = (gone or now_ns - heard_ns > FAILOVER_SILENCE_NS) and now_ns - self.stayed_ns > FAILOVER_STAY_NS
        if self.standby and not self.turned and lost:
            self.turned, self.said_ns = True, LONG_AGO_NS
            self.attempt += 1
        self.decided_ns = self.decided_ns if self.undecided else now_ns
        before, self.asking = self.asking, bool(self.standby) and now_ns - self.decided_ns > FAILOVER_SILENCE_NS
        self.attempt += self.asking > before
        if not (self.turned or self.asking) or not VOTE_RETRY.due(self.said_ns, now_ns):
            return []
        self.said_ns = now_ns
        return [SendToPeer(self.standby, m.FailoverVote(self.worker, self.epoch, self.view + 1, self.attempt))]

    def hear(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """Take what the standby says: to stay with the server, or that it serves. Either ends `turned`, the latter `asking`."""
        if isinstance(message, m.KeepServing) and (message.view, message.attempt) == (self.view + 1, self.attempt):
            self.turned, self.stayed_ns = False, now_ns
        if not self.listens or not isinstance(message, m.FailoverNotice) or message.view < self.view:
            return []
        if not message.ports:  # not all of its shards serve yet
            return []
        address, self.turned, self.asking, self.undecided = self.standby, False, False, False
        self.cut.clear()
        self.view, self.standby = message.view, message.standby
        return [Turned(address, message.ports)]
