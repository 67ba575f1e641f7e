"""The command line: a file for each group of commands, imported when one of them is called.

So `visard --help` is quick, and a command loads torch only if it computes something with a network.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import os
import signal
import sys
import threading
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import click
import typer
from typer.main import get_command

from visard.errors import UsageError, VisardError, one_line
from visard.processes import LARGE_PAGES
from visard.text import line

# name: (where, the first line of its help)
COMMANDS = {
    "run": ("run:run", "Train with a method and leave a run folder with metrics, models, ledger and report."),
    "adapt": (
        "adapt:adapt",
        "Adapt a recogniser to the people of several sites, whose pictures stay there, and test it before and after.",
    ),
    "bench": (
        "bench:bench",
        "Reproduce a paper's tables: make the missing runs, then write results.json, .md and .tex, and report.html.",
    ),
    "report": ("run:report", "Write one HTML page about a run, or about several side by side. It opens offline."),
    "watch": (
        "watch:watch",
        "Follow runs in progress: time left, curves, clients in trouble, bytes, privacy budget, sites of a deployment.",
    ),
    "methods": ("run:methods", "List the methods, their papers, and what leaves a client in each."),
    "presets": (
        "run:presets",
        "List the presets that `visard run` knows, or show all settings of one, to be changed with --set.",
    ),
    "plugins": ("run:plugins", "List the plug-ins that settings can name, and where each comes from."),
    "data": ("data:app", "Make, import and look at face sets."),
    "models": ("model_files:app", "Keep recognisers under names, list where networks can be cut, fetch files."),
    "eval": ("models:evaluate", "Test a model on the people of a face set."),
    "embed": (
        "models:embed",
        "Write the features of pictures, one row each, in the order of the set, the file names or the arguments.",
    ),
    "cluster": (
        "models:cluster",
        "Group unlabelled pictures by person: one label each, and how good the labels are where people are known.",
    ),
    "export": ("models:export", "Write a model as ONNX, checked against PyTorch on random pictures."),
    "enroll": (
        "gallery:enroll",
        "Enrol the people of a folder in a gallery, to find them later. Unreadable pictures are skipped and listed.",
    ),
    "identify": (
        "gallery:identify",
        "Find who is in a picture: the most similar people of a gallery, and whether the score reaches the threshold.",
    ),
    "verify": (
        "gallery:verify",
        "Compare two pictures: the cosine of their features, and whether it reaches the threshold for one person.",
    ),
    "gallery": ("gallery:app", "List or remove the people of a gallery, or encrypt it."),
    "keys": ("keys:keys", "Make, sign, renew and revoke the keys of a deployment; make a key file for encryption."),
    "server": ("deploy:server", "Let parties connect: TLS and registered node keys only. Runs until Ctrl-C."),
    "client": (
        "client:client",
        "Take part in runs as one party. Pictures and states stay on this machine. Runs until Ctrl-C.",
    ),
    "health": ("deploy:health", "Ask a server or a party for its health; exit code 1 if it is not well."),
    "ledger": ("ledger:app", "Check the records of what left each client, and compare the two sides of a deployment."),
    "audit": (
        "models:audit",
        "Attack a method on random features and report what leaks: encryption does not hide what a result implies.",
    ),
}
GROUPS = {  # in the help: a heading, and the first of its commands
    "run": "Train and compare",
    "data": "Face sets and models",
    "enroll": "Find people",
    "keys": "Between machines",
    "ledger": "What leaves a client",
}


class Late(click.Command):
    """A command whose file is imported when it is called; until then a name and a line of help."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        command = load_command(str(self.name))
        try:
            return command.make_context(info_name, args, parent, **extra)
        except click.NoSuchOption as error:
            known = [name for option in command.params for name in option.opts]
            if "--set" not in known or difflib.get_close_matches(error.option_name, known, cutoff=0.75):
                raise
            raise UsageError(
                f"visard {self.name} has no option {error.option_name}; settings are changed with --set, "
                f"for example --set method.rounds=5 (visard {self.name} --help)"
            ) from None


def load_command(name: str) -> click.Command:
    """A command as its file defines it: a function, or a group of commands."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(f"visard.cli.{module}"), attribute)
    app = _application()
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        app.command(name)(found)
    command = group_of(app).commands[name]
    _flow(command)
    return command


def _flow(command: click.Command) -> None:
    """Join the lines of each paragraph of its help, which is then broken at the width of the terminal."""
    paragraphs = [part.split("\n") for part in inspect.cleandoc(command.help or "").split("\n\n")]
    joined = [" ".join([lines[0], *(text.strip() for text in lines[1:])]) for lines in paragraphs]
    command.help = "\n\n".join(f"  {text}" if text.startswith("visard ") else text for text in joined)
    for inner in getattr(command, "commands", {}).values():
        _flow(inner)


def group_of(app: typer.Typer) -> click.Group:
    """An application as click sees it."""
    group = get_command(app)
    assert isinstance(group, click.Group)
    return group


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"visard {version('visard')}")
        raise typer.Exit


def _application() -> typer.Typer:
    app = typer.Typer(
        name="visard",
        help="Federated face recognition: train and adapt across parties that cannot share their pictures.\n\n"
        "Start with: visard run demo",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode="rich",
    )

    @app.callback()
    def _(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None: ...

    return app


def commands() -> click.Group:
    """`visard` with all its commands."""
    group = group_of(_application())
    heading = ""
    for name, (_, first) in COMMANDS.items():
        command: Any = Late(name, help=first)
        command.rich_help_panel = heading = GROUPS.get(name, heading)
        group.add_command(command)
    return group


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of writing, which name no file

INTERRUPTED = 128 + signal.SIGINT  # the exit code of typer after Ctrl-C


def main() -> None:
    """Run a command; every failure is one line on stderr and exit code 1 (failed) or 2 (wrong use)."""
    os.environ.update(LARGE_PAGES | os.environ)
    if threading.current_thread() is threading.main_thread():  # others may not
        signal.signal(signal.SIGTERM, _terminate)
    try:
        commands()()
    except VisardError as error:
        _say(one_line(error))
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _say("stopped (Ctrl-C)")
        raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("VISARD_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename is not None:  # no such file, no permission, a full disk
            _say(one_line(VisardError(f"{error.filename}: {error.strerror}")))
            sys.exit(1)
        if isinstance(error, OSError) and error.errno in FULL:
            _say(f"a file could not be written: {error.strerror}")
            sys.exit(1)
        _say(f"internal error: {one_line(error)} (VISARD_DEBUG=1 shows where)")
        sys.exit(1)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End like an error does, so that half-written files are removed; once, so that this is not interrupted."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


def _say(text: str) -> None:
    print(f"visard: {line(text)}", file=sys.stderr)
