"""`taktctl demo`: see taktd at work on this machine, with nothing installed or configured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import click

from taktd.daemon.cli.endings import FINE, INTERRUPTED, NO, die

__all__ = ["demo"]

NEXT: Final = (
    "Next: a loop of your own, see README.md. `taktd` says how to begin; from a clone, first: . .venv/bin/activate"
)


@click.command(name="demo")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
@click.option("--seconds", type=click.FloatRange(5, 40), default=20.0, show_default=True, help="How long.")
@click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write the picture. Default: demo.png; with --json none.",
)  # fmt: skip
def demo(as_json: bool, seconds: float, plot_path: Path | None) -> None:
    """Swing up and balance a simulated pendulum at 1 kHz through a taktd of its own.

    A small neural network drives a cart; taktd runs it on the CPU. In 10 s or more the pendulum is pushed twice. Exit
    code 0: it stood and stayed up; 1: it fell, or taktd did not start.
    """
    from rich.console import Console

    from taktd.daemon.demo.picture import save_picture
    from taktd.daemon.demo.show import run_demo, summary
    from taktd.daemon.foreground import StartFailed

    console = Console()
    try:
        end = run_demo(seconds, console, quiet=as_json)
    except (StartFailed, RuntimeError) as error:
        die(str(error), as_json=as_json)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    result = end["result"]
    if not as_json:
        console.print(summary(result))
    path = plot_path or (None if as_json else Path("demo.png"))
    result["picture"] = None
    if path is not None:
        try:
            save_picture(end, path)
            result["picture"] = str(path)
            if not as_json:
                console.print(f"Picture: {path}", highlight=False)
        except ImportError:
            print("taktctl demo: no picture, matplotlib is not installed: pip install 'taktd[plot]'", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"taktctl demo: no picture, {path} can't be written: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps(result))
    else:
        console.print(NEXT, markup=False, highlight=False)
    raise SystemExit(NO if result["fell"] else FINE)
