"""The process of nursery.py. It imports nothing that a command runs as __main__."""

from __future__ import annotations

import os
import sys

from narrows.protocols.runtime import launch

FOLDER = os.path.dirname(os.path.dirname(__file__))


class Nursery(launch.Nursery):
    """A command begins in the folder that PWD names."""

    def _begins(self, fds: list[int], request: launch.Request) -> launch.Begins:
        os.chdir(request.env["PWD"])
        return super()._begins(fds, request)


def main() -> None:
    sys.path.remove(FOLDER)  # a command has it not
    launch.main(Nursery)
