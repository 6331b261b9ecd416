"""Checkpoints of a gossip worker: files of its own model, which no server has. --resume begins with them.

How it works
1. A worker writes its model after each round whose number is a multiple of `every`. `every` is a power of two: the
   number of rounds that take about the time of --checkpoint-every. So the rounds that a slower or faster worker writes
   are every second, fourth, ... round of another worker.
2. A worker keeps its KEPT newest files, and the newest file of a multiple of `SPARSE * every`, a round that slower
   workers have written too.
3. A worker that joins sends the coordinator the list of the models in its folder. When a run is resumed, the
   coordinator takes the newest round that a majority has reached (ps/coordinator/checkpoint_schedule.py). From each of
   these workers the shards take the oldest model of this round or a newer one, and average them.
4. A run that begins at round 0 is a new run: files of an earlier run are renamed.

A thread writes the files. A worker that is stopped or ends waits for the thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch

from narrows.protocols.config.checkpoint_names import ROUND, round_file
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import CHECKPOINT_COST_TIMES, CHECKPOINT_LEAST_NS
from narrows.protocols.effects import NS
from narrows.protocols.messages import MODELS_MAX
from narrows.protocols.runtime.storage.store_copy import opened
from narrows.worker.checkpoint.optimizer_state import write_whole
from narrows.worker.model.flat import FloatArray
from narrows.worker.runtime.launcher_pipe import say

KEPT = 3  # the number of newest files that are kept
SPARSE = 4  # the newest file of a multiple of this times `every` rounds is kept too
END_S = 8.0  # how long `end` waits for the last file


class GossipCheckpoints:
    """The checkpoints of one gossip worker.

    Args:
        settings: the settings of the run.
        folder: the folder of the files, or its address in a store; "" or "none": no checkpoints.
        rank: the rank of this worker.
        plan: the packed `ModelSpec`. Files of another model are ignored.
    """

    def __init__(self, settings: Settings, folder: str, rank: int, plan: bytes) -> None:
        self.settings, self.place, self.rank, self.plan = settings, folder, rank, plan
        self.keeps = folder not in ("", "none")
        self.folder, self.copy = opened(folder if self.keeps else "", f"narrows-model-{rank}.")
        self.made_unix = time.time()  # compared with the times of files: older ones are of an earlier run
        self.began_s, self.begun = time.monotonic(), 0  # time and number of this worker's first round
        self.took_s = 0.0  # seconds that the newest file took to write
        self.thread: threading.Thread | None = None  # writes a file
        self.failed = False  # the newest file was not written, and the user has been warned

    # Files.

    def models(self) -> tuple[tuple[int, int], ...]:
        """Return (rank, round) of the readable models in the folder, at most MODELS_MAX of the newest.

        Models of all ranks count, because a worker may have had another rank before. From an address all are fetched.
        """
        try:
            self.copy.pull(self.folder, ROUND.fullmatch)
        except OSError as error:
            say(f"{error}; this worker offers no model of an earlier run")
        whole = [(rank, number) for number, rank in self._files() if self.read(rank, number, mapped=True) is not None]
        return tuple(whole[-MODELS_MAX:])

    def _files(self) -> list[tuple[int, int]]:
        """Return round and rank of each file in the folder, sorted."""
        names = [path.name for path in self.folder.iterdir()] if self.keeps and self.folder.is_dir() else []
        return sorted((int(match[2]), int(match[1])) for name in names if (match := ROUND.fullmatch(name)))

    def reached(self, rank: int, number: int) -> FloatArray | None:
        """Read the rank's oldest model of round `number` or a newer one, float32[size]; None without such a file."""
        models = (self.read(rank, found) for found, of in self._files() if of == rank and found >= number)
        return next((model for model in models if model is not None), None)

    def read(self, rank: int, number: int, mapped: bool = False) -> FloatArray | None:
        """Read the model of a round, float32[size]; None without such a file, or if it is of another model.

        `mapped`: read the values from the disk where they are used.
        """
        path = self.folder / round_file(rank, number)
        try:
            content: Any = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
            if content["plan"] != self.plan.hex() or content["round"] != number:
                return None
            model: FloatArray = content["model"].numpy()
        except Exception:  # a file may hold anything, and torch may raise anything
            return None
        return model

    def begin(self, number: int) -> None:
        """Begin at this round. At round 0 the run is new, and files from before this worker's start are renamed."""
        self.began_s, self.begun = time.monotonic(), number
        with suppress(OSError):  # another worker may rename one first
            begins = self.keeps and not number
            for kept in self.copy.set_aside(self.folder, ROUND.fullmatch, self.made_unix) if begins else ():
                say(f"the model of an earlier run is kept as {kept}")

    # Writing.

    @property
    def every(self) -> int:
        """The rounds from one file to the next; 0: no file is written."""
        if (clocks := self.settings.checkpoint_clocks) > 0:
            return clocks
        return self._power

    _power = 1

    def _fit(self, number: int) -> None:
        """Set `_power` to the number of rounds, a power of two, that take the time from one checkpoint to the next.

        Args:
            number: the number of the present round; the mean duration of a round so far counts.
        """
        given = self.settings.checkpoint_every
        every_s = given if given >= 0 else max(CHECKPOINT_LEAST_NS / NS, CHECKPOINT_COST_TIMES * self.took_s)
        if every_s <= 0:
            self._power = 0
            return
        round_s = max((time.monotonic() - self.began_s) / max(1, number - self.begun), 1e-6)
        self._power = max(1, 1 << max(0, math.ceil(math.log2(every_s / round_s))))

    def due(self, number: int) -> bool:
        """Return whether to write the model of this round. While an earlier file is being written, no round is due."""
        if not self.keeps or number <= self.begun:
            return False
        self._fit(number)
        busy = self.thread is not None and self.thread.is_alive()
        return self.every > 0 and number % self.every == 0 and not busy

    def write(self, number: int, model: FloatArray) -> None:
        """Begin to write the model of a round.

        Args:
            number: the number of the round.
            model: float32[size]. This object owns it from now on: the caller must not change it.
        """
        if self.keeps:
            self.end()
            thread = threading.Thread(target=self._write, args=(number, model), daemon=True)
            thread.start()
            self.thread = thread  # a KeyboardInterrupt before this line leaves no thread that end() cannot join

    def _write(self, number: int, model: FloatArray) -> None:
        began = time.monotonic()
        content = {"plan": self.plan.hex(), "round": number, "model": torch.from_numpy(model)}
        try:
            write_whole(self.folder / round_file(self.rank, number), content, copy=self.copy)
            self._tidy()
            self.failed = False
        except Exception as error:  # torch raises RuntimeError for a full disk
            if not self.failed:
                say(f"{self.place}: the model of round {number} could not be written ({error})")
            self.failed = True
        self.took_s = time.monotonic() - began

    def _tidy(self) -> None:
        """Delete this rank's files but the KEPT newest and the newest sparse one."""
        for name in self._superfluous([path.name for path in self.folder.iterdir()]):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # the next file drops them in the store
            self.copy.remove(self._superfluous)

    def _superfluous(self, names: Collection[str]) -> list[str]:
        found = ((name, ROUND.fullmatch(name)) for name in names)
        mine = sorted((int(match[2]), name) for name, match in found if match and int(match[1]) == self.rank)
        sparse = [each for each in mine if each[0] % (SPARSE * max(1, self.every)) == 0][-1:]
        return [each[1] for each in mine[:-KEPT] if each not in sparse]

    def end(self) -> None:
        """Wait until the file that is being written is on disk, at most END_S."""
        if self.thread is not None:
            self.thread.join(END_S)
