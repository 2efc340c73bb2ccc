"""The plans of docs/plan.md, made anew by the commands that stand above them.

    python -m rollplex.planning.document docs/plan.md

Owns which blocks of a document are plans: fenced ones that begin with `$ rollplex plan`. A line that ends in a
backslash goes on.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

from rollplex.cli.app import run
from rollplex.errors import RollplexError

_BLOCK: Final = re.compile(r"^```\n\$ (rollplex plan (?:[^\n]*\\\n)*[^\n]*)\n.*?^```$", re.DOTALL | re.MULTILINE)


def updated(document: str) -> str:
    """The document with every plan's output made anew. Paths in commands are meant from the working directory.

    Raises:
        RollplexError: there is no plan in it, or a command fails; the command says why on the standard error.
    """
    made, count = _BLOCK.subn(lambda match: _block(match[1]), document)
    if not count:
        raise RollplexError("There is no plan in the document", needed="a fenced block that begins: $ rollplex plan")
    return made


def _block(command: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        code = run(shlex.split(command.replace("\\\n", " "))[1:])
    if code:
        raise RollplexError("A command of the document fails", got=f"code {code}", where=command)
    return f"```\n$ {command}\n{output.getvalue()}```"


def main(arguments: list[str]) -> int:
    """Command line; see the module's docstring."""
    match arguments:
        case [path]:
            document = Path(path)
            document.write_text(updated(document.read_text(encoding="utf-8")), encoding="utf-8")
            return 0
        case _:
            sys.stderr.write("usage: python -m rollplex.planning.document docs/plan.md\n")
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
