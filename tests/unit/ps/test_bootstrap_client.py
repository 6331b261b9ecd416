"""What a standby asks a server first."""

from __future__ import annotations

import threading
from contextlib import closing

from narrows.protocols import messages as m
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.protocols.wire import encode, pack
from narrows.ps.process.bootstrap_client import TOLD, ask
from narrows.ps.process.machine_factory import release


def test_a_server_that_still_starts_its_shards_is_asked_again() -> None:
    with closing(Sockets()) as server:
        number = server.listen("tcp://127.0.0.1:0")

        def answer() -> None:
            for ports in ([number, 0], [number, 7]):
                ((peer, _),) = server.receive(10_000)
                told = dict.fromkeys(TOLD, "") | {"release": release(), "ports": ports}
                server.send(peer, encode(m.ReplicationBegin(pack(told))))

        answering = threading.Thread(target=answer)
        answering.start()
        found = ask("--standby", f"tcp://127.0.0.1:{number}", "")
        answering.join(10)
        assert list(found["ports"]) == [number, 7]
