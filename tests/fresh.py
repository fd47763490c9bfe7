"""Scripts in processes of their own that need not load torch again: forked from one that has.

What forks has imported libraries and done nothing else; it has no threads. The script runs as its
`__main__`, and at its end the interpreter ends as after any other.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_LOOP = """
import importlib, json, os, resource, signal, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
from cached_rag import *
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, place in enumerate((os.devnull, asked["out"], asked["err"])):
    os.dup2(os.open(place, os.O_RDWR | os.O_CREAT), number)
os.chdir(asked["cwd"])
os.environ.update(asked["env"])
sys.argv = ["-c", *asked["argv"]]
resource.setrlimit(resource.RLIMIT_CPU, (asked["seconds"],) * 2)
signal.alarm(600)  # ends what hangs
exec(compile(asked["code"], "script", "exec"), {"__name__": "__main__"})
"""
_LIBRARIES = (
    "torch transformers.models.llama.modeling_llama transformers.models.auto.modeling_auto "
    "cached_rag.cli.main"
)


class Ended(NamedTuple):
    """What `subprocess.run` says of a script."""

    returncode: int
    stdout: str
    stderr: str


@functools.cache
def _parent(modules: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _LOOP, modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    atexit.register(parent.communicate)
    return parent


def run_fresh(
    code: str, *argv: object, cwd=".", seconds=120, modules=_LIBRARIES, **env: str
) -> Ended:
    """Run a script that finds `modules` imported, which are imported once for all such scripts.

    It is ended when it has computed for that many seconds.
    """
    parent = _parent(modules)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"code": code, "argv": [*map(str, argv)], "cwd": str(cwd), "env": env}
        asked |= {"out": str(out), "err": str(err), "seconds": seconds}
        print(json.dumps(asked), file=parent.stdin, flush=True)
        return Ended(int(parent.stdout.readline()), out.read_text(), err.read_text())
