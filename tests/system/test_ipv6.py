"""A run over IPv6: server, workers that mix with each other, and the page, all at ::1."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from kit.processes import SCRIPT, finished, serving, started, until

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")


def test_workers_gossip_and_a_page_is_read_over_ipv6(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT % "if os.path.exists('seen'): sys.argv[1:] = ['0']"
    )  # until the page was read
    flags = ("--sync", "gossip", "--workers", "2", "--dashboard", "[::1]:0")
    with serving(*flags, host="[::1]") as server:
        assert server.address == f"tcp://[::1]:{server.port}"
        page = until(lambda: [line for line in server.command.out.splitlines() if "glance" in line], server.command)
        assert "http://[::1]:" in page[0]
        with started("ps-worker", "--server", server.address, "-n", "2", "train.py", cwd=tmp_path) as workers:
            until(lambda: "clock" in workers.err, workers)
            code, shown, said = finished("ps-top", "--once", page[0].partition("http://")[2].rstrip("/"))
            assert code == 0 and "gossip" in shown, said
            (tmp_path / "seen").touch()
            assert workers.wait() == 0, workers
