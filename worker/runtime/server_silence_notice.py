"""Tells the user of a silent server long before it counts as lost. Else the user sees no reason for missing steps."""

from __future__ import annotations

from narrows.protocols.effects import NS
from narrows.protocols.member.member import Member, MemberPhase

SILENT_NS = 3 * NS  # the server sends each member a message at least once a second


class SilenceNotice:
    """Notices when one member's server falls silent, and when it answers again."""

    def __init__(self) -> None:
        self.told = False

    def sentence(self, member: Member, address: str, now_ns: int) -> str:
        """Return a sentence when the server falls silent, and another when it answers again; else ""."""
        silent = member.phase is MemberPhase.RUNNING and now_ns - member.heard_ns >= SILENT_NS
        if silent == self.told:
            return ""
        self.told = silent
        if not silent:
            return f"the server at {address} answers again" if member.phase is MemberPhase.RUNNING else ""
        standby = f", or until its standby at {member.views.standby} serves" if member.views.standby else ""
        lost_s, silent_s = member.timing.lost_ns / NS, SILENT_NS / NS
        return f"the server at {address} has not answered for {silent_s:g} s; waiting up to {lost_s:g} s{standby}"
