"""Decides which other machines have shards of this server, which shards, and from when to when.

Rules
- A remote host is a machine that runs `ps-serve --join`. It repeats what it wants (`RemoteShardsOffer`), which is its
  sign of life. The answer (`RemoteShardsGrant`) names its shards.
- A remote host comes and goes by a resharding, one host at a time. Its shards get the numbers after all others. When it
  goes, the shards after its own go too; their hosts join again.
- A remote host that is silent for REMOTE_HOST_LOST_LEASES leases is lost with its shards and all shards after them. The
  run goes back to the newest checkpoint, over the shards before them.
- A coordinator that was restarted knows which shards are on which host. It waits as long for an offer of those hosts.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols import messages as m
from narrows.protocols.config.timing import REMOTE_HOST_LOST_LEASES
from narrows.protocols.effects import NS, Log, Send
from narrows.protocols.messages import RefuseCode, RemoteShardsWish
from narrows.ps.coordinator.resharding import Resharding, ReshardPhase
from narrows.ps.coordinator.run import Decision, Run

GONE_MAX = 256  # number of former remote hosts whose tokens are remembered
FAILED, DONE = 1, 0  # exit codes of `ps-serve --join`


@dataclass(slots=True)
class RemoteHost:
    """One machine that has, or waits for, shards of this server."""

    token: str  # "": the host joined before this life of the coordinator, and has not sent an offer since
    host: str
    shards: int  # the number of shards that it has, or has room for
    seen_ns: int  # when its newest offer arrived; -1: before the first decision
    first: int = -1  # its lowest shard, -1: it waits for the resharding before its own
    came: bool = False  # its shards have had keys
    wish: int = RemoteShardsWish.STAY
    again: bool = False  # its shards go because shards before them go: then it joins again
    peer: bytes = b""  # routing id of its newest offer

    def has(self, shard: int) -> bool:
        """True if this shard is on the host."""
        return self.first <= shard < self.first + self.shards


class RemoteShards(Decision):
    """Decides which remote host has which shards.

    `hosts` are the remote hosts, in the order of their shards; a host that waits comes last.
    """

    def __init__(self, run: Run, resharding: Resharding) -> None:
        self.run, self.resharding = run, resharding
        self.hosts = [RemoteHost("", host, 1, -1, shard, came=True) for shard, host in sorted(resharding.away.items())]
        self.gone: dict[str, tuple[int, str]] = {}  # by token of a former host, its exit code and the reason
        self.untold: list[RemoteHost] = []  # former hosts that were not sent the reason yet
        self.said: list[Log] = []

    # Messages of remote hosts.

    def hear(self, peer: bytes, join: m.RemoteShardsOffer, now_ns: int) -> None:
        """Take an offer of a remote host: it renews the host's lease, and may make it a new host."""
        remote = self._of(join)
        if remote is None and join.token not in self.gone:
            remote = self._new(join, now_ns)
        if remote is not None:
            remote.peer, remote.seen_ns, remote.wish = peer, now_ns, max(remote.wish, join.wish)

    def _of(self, join: m.RemoteShardsOffer) -> RemoteHost | None:
        remote = next((remote for remote in self.hosts if remote.token == join.token), None)
        if remote is not None or join.first < 0:
            return remote
        here = [each for each in self.hosts if not each.token and join.first <= each.first < join.first + join.shards]
        if not here or here[0].first != join.first:
            return None
        found = RemoteHost(join.token, join.host, len(here), 0, join.first, came=True)
        self.hosts = sorted([found, *(each for each in self.hosts if each not in here)], key=lambda each: each.first)
        return found

    def _new(self, join: m.RemoteShardsOffer, now_ns: int) -> RemoteHost | None:
        if join.first >= 0:
            self._forget(join, RefuseCode.SERVER_LOST, "the server does not know it any more")
        elif self.resharding.never:
            self._forget(join, FAILED if self.run.over else RefuseCode.INCOMPATIBLE, self.resharding.never)
        else:
            self.hosts.append(RemoteHost(join.token, join.host, max(1, join.shards), now_ns))
            return self.hosts[-1]
        return None

    def _forget(self, who: RemoteHost | m.RemoteShardsOffer, code: int, text: str) -> None:
        self.gone[who.token] = (code, text)
        if isinstance(who, RemoteHost):
            self.untold.append(who)
        while len(self.gone) > GONE_MAX:
            self.gone.pop(next(iter(self.gone)))

    def room(self, token: str, version: int) -> m.RemoteShardsGrant:
        """Return the answer to an offer with this token: the host's shards, or why it is no remote host any more."""
        remote = next((remote for remote in self.hosts if remote.token == token), None)
        code, text = self.gone.get(token, (DONE, ""))
        first, count = (remote.first, remote.shards) if remote is not None else (-1, 0)
        shards, target = self.run.shards, self.resharding.target
        return m.RemoteShardsGrant(
            token, self.run.epoch, version, first, count, shards, target, remote is None, code, text
        )

    # Hosts that come and go.

    def decide(self, now_ns: int) -> bool:
        """Begin the resharding by which the next host goes or comes, if none is under way."""
        for remote in self.hosts:
            remote.came |= 0 <= remote.first < self.run.shards
            remote.seen_ns = now_ns if remote.seen_ns < 0 else remote.seen_ns
        going = next((remote for remote in self.hosts if remote.wish == RemoteShardsWish.GO), None)
        if self.resharding.phase is not ReshardPhase.STILL:
            return going is not None and self._gives_up(going)
        if gone := [remote for remote in self.hosts if remote.first >= self.run.shards]:
            self._let_go(gone[-1])
            return True
        for remote in self.hosts:  # a resharding may have taken the last shards of a host
            remote.shards = min(remote.shards, self.run.shards - remote.first) if remote.first >= 0 else remote.shards
        if going is not None:
            return self._go(going)
        coming = next((remote for remote in self.hosts if remote.first < 0), None)
        return coming is not None and self._come(coming)

    def _gives_up(self, going: RemoteHost) -> bool:
        """Call off the resharding under way, if this host comes by it and it can still be called off."""
        if going.first < self.run.shards or not self.resharding.may_stay:
            return False
        self.said.append(self.resharding.call_off(f"the machine at {going.host} goes"))
        return True

    def _let_go(self, remote: RemoteHost) -> None:
        """Forget a host whose shards have no keys any more, or never had any."""
        self.hosts.remove(remote)
        if remote.wish == RemoteShardsWish.STAY and remote.again:
            self._forget(remote, RefuseCode.NOT_A_MEMBER, "the keys of a machine before it have moved back")
        elif remote.wish == RemoteShardsWish.STAY and not remote.came:
            self._forget(remote, FAILED, f"the keys stay where they are: {self.resharding.why}")
        else:
            self._forget(remote, DONE, "")

    def _go(self, remote: RemoteHost) -> bool:
        if remote.first < 0:
            self._let_go(remote)
            return True
        if self.resharding.unfit(remote.first):  # the run cannot reshard, for example because it is over
            return False
        for other in self.hosts:
            other.again = other.first > remote.first
        self.said.append(self.resharding.ask(remote.first))
        return True

    def _come(self, remote: RemoteHost) -> bool:
        shards = self.run.shards + remote.shards
        if why := self.resharding.unfit(shards, remote.host):
            self.hosts.remove(remote)
            self._forget(remote, FAILED, f"the keys stay where they are: {why}")
            return True
        remote.first = self.run.shards
        self.said.append(self.resharding.ask(shards, remote.host))
        return True

    # Hosts that are lost.

    def lost(self, now_ns: int) -> RemoteHost | None:
        """The first host that has been silent for too long, or that has said that its shards are gone."""
        limit_ns = int(REMOTE_HOST_LOST_LEASES * self.run.settings.lease * NS)
        silent = [remote for remote in self.hosts if remote.seen_ns >= 0 and now_ns - remote.seen_ns > limit_ns]
        return next((each for each in self.hosts if each in silent or each.wish == RemoteShardsWish.GONE), None)

    def lose(self, remote: RemoteHost) -> None:
        """Forget a lost host. The hosts after it join again."""
        after = [each for each in self.hosts if each.first > remote.first >= 0]
        self.hosts = [each for each in self.hosts if each is not remote and each not in after]
        self._forget(remote, RefuseCode.SERVER_LOST, "the server has not heard this machine, and went on without it")
        for each in after:
            self._forget(each, RefuseCode.NOT_A_MEMBER, "a machine before it was lost")

    def words(self, version: int) -> list[Send]:
        """Tell former hosts the reason at once: if the run is over, no coordinator may answer their next offer."""
        untold, self.untold = self.untold, []
        return [Send(remote.peer, self.room(remote.token, version)) for remote in untold if remote.peer]

    def tell(self) -> list[Log]:
        said, self.said = self.said, []
        return said
