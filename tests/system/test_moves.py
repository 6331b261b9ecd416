"""ps-serve shards N, against a ps-serve whose worker goes on training: real processes, and one of them killed meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kit.processes import Server, Worker, finished, serving, started, trained_alone
from kit.scripts import distance, flat
from safetensors import safe_open

RATE = 0.001  # of hundreds of steps, which must not end in noise


def moved(server: Server, worker: Worker, shards: int, kill: int = -1) -> str:
    """Train until the command has ended, and return what it said. `kill`: a shard that dies meanwhile."""
    with started("ps-serve", "shards", str(shards), "--at", server.address) as command:
        while command.process.poll() is None:
            worker.step()
            if kill >= 0 and f"become {shards}" in server.command.out:
                os.kill(server.pids[1 + kill], signal.SIGKILL)
                kill = -1
        assert kill < 0, f"no shard was killed: {server.command}"
        return command.out + command.err


def test_two_shards_become_three_and_two_again(tmp_path: Path) -> None:
    """Trace: 2 to 3; 3 to 2, in which shard 1 is killed; 2, where they are 2; numbers that are none."""
    with serving("--sync", "bsp", "--shards", "2", "--checkpoint-dir", str(tmp_path)) as server:
        worker = Worker(server.address, rate=RATE)
        worker.train(5)
        assert "the keys of 2 shards are those of 3" in moved(server, worker, 3), server.command
        assert len(server.pids) == 4
        said = moved(server, worker, 2, kill=1)
        assert "the keys of 3 shards are those of 2" in said, f"{said}\n{server.command}"
        assert len(server.pids) == 3
        for words, text in (("2", "2 shards"), ("0", "not in the range"), ("500", "not in the range")):
            assert text in "".join(map(str, finished("ps-serve", "shards", words, "--at", server.address))), words
        worker.train(5)
        worker.close()
        assert server.command.wait() == 0, server.command
        out = server.command.out
        assert out.count(" joined at clock ") == 1 and "lost" not in out and "goes back" not in out, server.command
    alone = trained_alone(worker.clock, RATE)
    assert distance(flat(worker.model), alone) < 1e-6
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert sum(file.get_tensor(name).size for name in file.keys()) == alone.size  # noqa: SIM118 - it is no dict


def test_nobody_is_there_to_be_asked() -> None:
    code, _, err = finished("ps-serve", "shards", "3", "--at", "tcp://127.0.0.1:1")
    assert code == 3 and "no ps-serve serves port 1 on this machine" in err
