"""Runs one function of a file as if it were a script.

    python -m narrows.worker.integrations.function_entry FILE.py NAME ARGS...

The file is executed under a module name other than __main__. So the code under `if __name__ == "__main__"` does not
run. The function finds FILE.py and ARGS in sys.argv.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    """Execute the file that the command line names, and call its function."""
    _, path, name, *words = sys.argv
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="narrows_script")[name]()


if __name__ == "__main__":
    main()
