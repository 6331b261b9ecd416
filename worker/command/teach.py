"""ps-teach: runs a script that calls `narrows.worker.teacher.serve`, at the address and with the keys of its flags."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, run
from narrows.worker.distillation.teacher_place import BIND, TeacherPlace


@click.command(context_settings=COMMAND | {"allow_interspersed_args": False})
@click.option("--bind", default=BIND, show_default=True, help="address that students reach")
@click.option(
    "--keys",
    default="",
    metavar="DIR",
    help="folder made by ps-serve keys; students whose key is not in it are refused",
)
@click.option("--insecure", is_flag=True, help="allow an address beyond loopback without keys")
@click.option("--ready-file", default="", metavar="FILE", help="JSON file that is written once students can ask")
@click.option(
    "--record",
    default="",
    metavar="FILE",
    help="JSON lines: students that come and go, counts once a minute and at the end",
)
@click.option("-m", "module", is_flag=True, help="run a module instead of a script: -m MODULE ARGS...")
@click.version_option(package_name="narrows", allow_from_autoenv=False)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py|MODULE ARGS...")
def command(
    bind: str, keys: str, insecure: bool, ready_file: str, record: str, module: bool, command: tuple[str, ...]
) -> int:
    """Teach: SCRIPT.py loads a model and calls narrows.worker.teacher.serve(model), which answers students until Ctrl-C.

    Each flag has an environment variable NARROWS_<FLAG>, for example NARROWS_BIND; the flag wins.
    """
    if not command:
        raise UsageError("name the script to run: ps-teach [flags] SCRIPT.py ARGS...")
    if not module and not Path(command[0]).is_file():
        raise UsageError(f"{command[0]}: there is no such script")
    variables = {"NARROWS_BIND": bind, "NARROWS_KEYS": keys, "NARROWS_READY_FILE": ready_file, "NARROWS_RECORD": record}
    os.environ.update(variables, NARROWS_INSECURE=str(int(insecure)))
    TeacherPlace.of_environment()  # a wrong flag is found before the script loads its model
    sys.argv = [*command]
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")
    return 0


def main() -> None:
    run(command, "ps-teach")


if __name__ == "__main__":
    main()
