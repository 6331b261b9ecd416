"""Tells the user of a server that is silent, long before it counts as lost: else nothing says why no step is done."""

from __future__ import annotations

from narrows.protocols.effects import NS
from narrows.protocols.member.member import Member, MemberPhase

SILENT_NS = 3 * NS  # the server says something to each member once a second


class SilenceNotice:
    """The silence of one member's server."""

    def __init__(self) -> None:
        self.told = False

    def sentence(self, member: Member, address: str, now_ns: int) -> str:
        """Return what is to be said now: once when the server falls silent, once when it is back; else ""."""
        silent = member.phase is MemberPhase.RUNNING and now_ns - member.heard_ns >= SILENT_NS
        if silent == self.told:
            return ""
        self.told = silent
        if not silent:
            return f"the server at {address} answers again" if member.phase is MemberPhase.RUNNING else ""
        standby = f", or until its standby at {member.views.standby} serves" if member.views.standby else ""
        lost_s, silent_s = member.timing.lost_ns / NS, SILENT_NS / NS
        return f"the server at {address} has not answered for {silent_s:g} s; waiting up to {lost_s:g} s{standby}"
