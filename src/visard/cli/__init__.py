"""The command line: one small file for each group of commands."""

from __future__ import annotations

import os
import sys

import typer

from visard.errors import VisardError

DEPLOYMENT = ("keys", "server", "client")


def commands(first: str) -> typer.Typer:
    """The application for a command line; those of a deployment do not load torch, which takes seconds and memory."""
    app = typer.Typer(
        name="visard",
        help="Federated face recognition: train and adapt across parties whose pictures may not leave home.\n\n"
        "Start with: visard run demo",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode="rich",
    )
    if first not in DEPLOYMENT:
        from visard.cli import bench, data, gallery, models, run
        from visard.cli import run as listing
        from visard.cli import run as report

        app.command("methods")(listing.methods)
        app.command("presets")(listing.presets)
        app.add_typer(data.app, name="data")
        app.command("run")(run.run)
        app.command("bench")(bench.bench)
        app.command("eval")(models.evaluate)
        app.command("embed")(models.embed)
        app.command("cluster")(models.cluster)
        app.command("audit")(models.audit)
        app.command("export")(models.export)
        app.command("enroll")(gallery.enroll)
        app.command("identify")(gallery.identify)
        app.command("verify")(gallery.verify)
        app.command("report")(report.report)
    from visard.cli import deploy

    app.add_typer(deploy.keys, name="keys")
    app.command("server")(deploy.server)
    app.command("client")(deploy.client)
    return app


def main() -> None:
    """Run a command; every failure is one line on stderr and exit code 1 (failed) or 2 (wrong use)."""
    try:
        commands(sys.argv[1] if len(sys.argv) > 1 else "")()
    except VisardError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("VISARD_DEBUG"):
            raise
        first = (str(error).splitlines() or [""])[0]
        _say(f"internal error: {type(error).__name__}: {first} (VISARD_DEBUG=1 shows where)")
        sys.exit(1)


def _say(text: str) -> None:
    print(f"visard: {' '.join(text.splitlines())}", file=sys.stderr)
