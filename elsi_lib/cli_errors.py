"""How the command line ends: errors on one line of standard error, exit codes, Ctrl-C and closed pipes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from elsi_lib.cli_output import plain
from elsi_lib.errors import AssetError, ElsiError

ClickException = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")  # typer may carry its own click


class _ReaderGone(Exception):
    """Nobody reads what we print."""


class OneLineErrors(TyperGroup):
    """A group whose errors are one line on standard error, with the exit codes of this module."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as err:  # typer would end the process with code 1
            raise _ReaderGone from err

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(*args, standalone_mode=False, **extra)
            sys.stdout.flush()
            code = code if isinstance(code, int) else 0
            if code == 130:
                _complain("interrupted")
        except (BrokenPipeError, _ReaderGone):
            with suppress(OSError, ValueError):  # nobody reads: let the interpreter's last flush go nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 141
        except (KeyboardInterrupt, typer.Abort):
            _complain("interrupted")
            code = 130
        except ClickException as err:
            context = getattr(err, "ctx", None)
            hint = f" (see `{context.command_path} --help`)" if context else ""
            _complain(f"{err.format_message().rstrip('.')}{hint}")
            code = 2
        except Exception as err:
            if os.environ.get("ELSI_DEBUG"):
                raise
            code = _explain(err)
        if not standalone_mode:
            return code
        sys.exit(code)


def _explain(err: Exception) -> int:
    """Print what went wrong; returns the exit code."""
    from safetensors import SafetensorError

    if isinstance(err, ElsiError):
        _complain(str(err))
        return 1 if isinstance(err, AssetError) else 2
    if isinstance(err, OSError):
        where = f"{err.filename}: " if err.filename else ""
        _complain(f"{where}{err.strerror or err}")
    elif isinstance(err, SafetensorError):
        _complain(f"a safetensors file cannot be written or read ({err}): check the disk")
    elif isinstance(err, MemoryError) or type(err).__name__ == "OutOfMemoryError":
        _complain(f"out of memory ({err}): take a shorter preset, --dtype bfloat16, or a larger machine")
    else:
        _complain(f"unexpected {type(err).__name__}: {err} (a bug: run again with ELSI_DEBUG=1 for the traceback and report it)")
    return 1


def _complain(message: str) -> None:
    with suppress(OSError):
        print(f"elsi: {plain(message)}", file=sys.stderr, flush=True)
