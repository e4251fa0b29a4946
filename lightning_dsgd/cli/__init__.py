"""The command line, `lightning-dsgd`: one module per command.

A command module has exactly two functions: `add_arguments(parser)` and `run(args) -> int`, the exit
code. Only the module of the command asked for is imported, so that one which repairs the
installation does not need what it is about to install.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_dsgd.errors import ConfigurationError, DSGDError

__all__ = ["main"]

COMMANDS = {
    "install-horovod": "build Horovod for the installed torch, and install it",
    "doctor": "check what is installed, which backends work, and what to do about the rest",
    "selftest": "try this machine's devices with real ranks, in two minutes",
    "algorithms": "list the installed strategies, with their papers",
    "simulate": "run an algorithm in simulated time, with simulated slow workers",
    "plan": "choose an algorithm and its settings from the workers' speeds",
}

USAGE_ERROR = 2


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Every command's name and help line, but the arguments only of the one in `argv`."""
    parser = argparse.ArgumentParser(
        prog="lightning-dsgd", description="Lightning strategies that tolerate slow workers."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((word for word in argv if word in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
        if name == chosen:
            module = import_module(f"{__name__}.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake in its arguments gives exit code 2, any other failure 1."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser(words).parse_args(words)
        return int(args.run(args))
    except ConfigurationError as error:
        print(f"lightning-dsgd: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except DSGDError as error:
        print(f"lightning-dsgd: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
