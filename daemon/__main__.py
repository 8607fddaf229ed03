"""`taktd --config FILE`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Final

NO_CONFIGURATION: Final = """\
taktd: no configuration. It says which devices, models and loops this machine has; for a start:

    node: {name: my-robot}
    devices:
      cpu0: {driver: cpu, cores: [1]}
    models:
      policy: {path: policy.onnx}               # relative to this file
    loops:
      walk: {model: policy, device: cpu0, period: 20ms, deadline: 5ms}

Save it as taktd.yaml and run:   taktd --config taktd.yaml
See it work without one:         taktctl demo
All settings:                    taktd --settings
"""
EXIT_CONFIGURATION: Final = 78


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="taktd", description="Runs neural networks inside robot control loops. Runs in the foreground."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration; conf.d beside it is read too")
    parser.add_argument("--settings", action="store_true", help="list every setting of the configuration and exit")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def main() -> int:
    """The `taktd` command; the exit code."""
    parser = _parser()
    arguments, others = parser.parse_known_args()
    if others and arguments.config is None and not others[0].startswith("-"):
        parser.error(f"the configuration needs its option: taktd --config {shlex.quote(others[0])}")
    if others:
        parser.error(f"not understood: {' '.join(others)}; taktd --help lists what is")
    if arguments.version:
        from taktd.daemon.health.status import daemon_version

        print(f"taktd {daemon_version()}")
        return 0
    if arguments.settings:
        from taktd.daemon.config.configuration import settings

        for setting in settings():
            default = f" (default {setting.default})" if setting.default not in ("", "required") else ""
            required = " (required)" if setting.default == "required" else ""
            print(f"{setting.key}{required}{default}\n    {setting.description}")
        return 0
    if arguments.config is None:
        sys.stderr.write(NO_CONFIGURATION)
        return EXIT_CONFIGURATION
    from taktd.daemon.supervisor import main as supervise

    return supervise(arguments.config)


if __name__ == "__main__":
    sys.exit(main())
