"""Calls one function of a script, as a script of its own: python -m narrows.worker.integrations.function_entry FILE.py
NAME ARGS...

The file is run as a module that is not __main__, so what stands under `if __name__ == "__main__"` does not run.
"""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    _, path, name, *words = sys.argv
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="narrows_script")[name]()


if __name__ == "__main__":
    main()
