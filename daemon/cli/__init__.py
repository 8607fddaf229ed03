"""`taktctl`: everything a person does with taktd. Each command is a module here and is loaded when it is used.

Exit codes: 0 fine, 1 the answer is no, 2 unusable input, 3 nothing there to ask. With --json a command prints JSON
alone on stdout; whatever else there is to say goes to stderr.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

import click

from taktd.daemon.cli.endings import INTERRUPTED, NO, UNUSABLE

#: name → module:command, and its line in `taktctl --help`; loading all of them would take a second.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "status": ("taktd.daemon.cli.report:status", "Is everything served? Executors, doors, loops."),
    "loops": ("taktd.daemon.cli.report:loops", "Loops: who has them, how they keep their deadlines."),
    "top": ("taktd.daemon.cli.top:top", "Live view: devices, loops, latencies, misses."),
    "models": ("taktd.daemon.cli.report:models", "Models: tensors, and what their engines were measured to cost."),
    "costs": ("taktd.daemon.cli.report:costs", "Measured costs, as check and simulate read them."),
    "reload": ("taktd.daemon.cli.report:reload", "Read the configuration again."),
    "model": ("taktd.daemon.cli.model:model", "Versions of models: add, list, activate, rollback, remove."),
    "fault": ("taktd.daemon.cli.fault:fault", "Make a simulated device fail."),
    "check": ("taktd.daemon.cli.check:check", "Judge a configuration; no daemon needed."),
    "simulate": ("taktd.daemon.cli.simulate:simulate", "Run a configuration in virtual time."),
    "bench": ("taktd.daemon.cli.bench:bench", "Measure round trips of a running taktd."),
    "demo": ("taktd.daemon.cli.demo:demo", "Balance a pendulum through a taktd of its own."),
    "record": ("taktd.daemon.cli.recording:record", "Save the flight recorder's last minutes."),
    "replay": ("taktd.daemon.cli.recording:replay", "Decide everything again: identical, or the first difference."),
    "why": ("taktd.daemon.cli.recording:why", "Why a job missed its deadline, in a sentence."),
    "trace": ("taktd.daemon.cli.recording:trace", "A recording as a timeline for Perfetto, or as a picture."),
    "selftest": ("taktd.daemon.cli.selftest:selftest", "Try a GPU and taktd's use of it; a report to send."),
    "doctor": ("taktd.daemon.cli.doctor:doctor", "What on this machine costs determinism, and what to do."),
}


class LazyGroup(click.Group):
    """Knows its commands by name and loads one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from taktd.daemon.health.status import daemon_version

        click.echo(f"taktctl {daemon_version()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
def cli() -> None:
    """Ask and steer taktd, which runs neural networks inside control loops.

    Exit codes: 0 fine, 1 the answer is no, 2 unusable input, 3 nothing there to ask.

    The daemon is found by $TAKTD_SOCKET, $TAKTD_RUNTIME_DIR, $XDG_RUNTIME_DIR/taktd, /run/taktd, in this order.
    """


def main() -> Any:
    """The `taktctl` command. Everything click finds wrong with the command line is unusable input."""
    try:
        code = cli.main(prog_name="taktctl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(UNUSABLE)
    except click.Abort:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        sys.stderr.close()
        sys.exit(NO)
    sys.exit(code if isinstance(code, int) else 0)
