"""The server that a member listens to, and when the member turns to the standby. No I/O.

ps/replication/replication_primary.py has the server's side.

Rules
- A member votes once in a view. While its vote is with the standby, it drops all messages of the server but
  FailoverNotice.
- A member turns to the standby after FAILOVER_SILENCE_NS without a message of the server, or FAILOVER_CUT_NS after the
  connections to all shards have ended. The end of one connection says nothing: a killed shard may be back in a moment.
- A server without the votes to go on without its standby sends its request for votes twice a second. After
  FAILOVER_SILENCE_NS of such requests a member asks the standby too, and moves to the standby if the standby serves.
  Until then the member stays with the server, which may still get its votes.
- A member returns to the server if the standby answers KeepServing (the vote does not count), or if the server was
  elected without the vote of this member.
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
from narrows.protocols.effects import MemberEffect, Send, SendToPeer, ServerChanged


class FailoverView:
    """The views as one member knows them.

    Args:
        worker: number of the member.
        epoch: of the member's place in the run; 0 before Ready.
        view: number of the newest view.
        standby: address of the standby of that view; "": none.
    """

    def __init__(self, worker: int, epoch: int, view: int = 0, standby: str = "") -> None:
        self.worker, self.epoch, self.view, self.standby = worker, epoch, view, standby
        self.turned = False  # the vote is with the standby, and the server is not listened to
        self.undecided = False  # the server has asked for a vote, and was not elected since
        self.decided_ns = 0  # the last time at which `undecided` was False
        self.asking = False  # the member asks the standby whether it serves, and still listens to the server
        self.attempt = 0  # number of the newest vote for the standby; KeepServing repeats it
        self.said_ns = self.stayed_ns = 0  # when the last vote went to the standby; when KeepServing came
        self.cut: dict[int, int] = {}  # shards whose connections have ended -> when

    def seated(self, epoch: int) -> None:
        """Note the epoch of the member's place: its votes name it."""
        self.epoch = epoch

    @property
    def listens(self) -> bool:
        """True if the member takes messages of the standby."""
        return self.turned or self.asking

    def told(self, view: m.FailoverNotice) -> list[MemberEffect]:
        """Handle a FailoverNotice of the server: take over its view, and answer with a vote."""
        alone = view.decided and not view.standby and view.view == self.view  # elected with the vote of this member
        if self.turned and not (alone or (view.decided and view.view > self.view)):
            return []
        self.undecided = not view.decided
        if view.view >= self.view and view.decided:
            self.standby, self.turned = view.standby, False
        self.view = max(self.view, view.view)
        return [
            Send(0, m.FailoverVote(self.worker, self.epoch, self.view, 0))
        ]  # also if this view has the member's vote already: that message may have been lost

    def tick(self, heard_ns: int, shards: int, now_ns: int) -> list[MemberEffect]:
        """Turn to the standby if the server is silent or its connections have ended; repeat the vote for the standby.

        Args:
            heard_ns: time of the last message of the server.
            shards: number of shards of the server.
            now_ns: the time.
        """
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

    def hear(self, message: m.Message, now_ns: int) -> list[ServerChanged]:
        """Handle a message of the standby.

        KeepServing ends `turned`: the member stays with the server. A FailoverNotice with ports ends `turned` and
        `asking`: the standby serves.
        """
        if isinstance(message, m.KeepServing) and (message.view, message.attempt) == (self.view + 1, self.attempt):
            self.turned, self.stayed_ns = False, now_ns
        if not self.listens or not isinstance(message, m.FailoverNotice) or message.view < self.view:
            return []
        if not message.ports:  # not all shards of the standby serve yet
            return []
        address, self.turned, self.asking, self.undecided = self.standby, False, False, False
        self.cut.clear()
        self.view, self.standby = message.view, message.standby
        return [ServerChanged(address, message.ports)]
