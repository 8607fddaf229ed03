"""Write the manual pages that follow from declarations: taktd.yaml(5), taktctl(1) and takt(3).

The configuration's settings, taktctl's commands and takt.h each have their descriptions in one place; the pages are
made from there when the package is built, so that they can't disagree. taktd(8) is written by hand, in man/
Usage: manual.py PAGE OUTPUT_FOLDER, with the taktd of this tree importable (takt.3 needs nothing).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def escape(text: str) -> str:
    """Text as roff: backslashes and hyphens kept, no line that looks like a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def version() -> str:
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def heading(page: str, section: int, name: str, purpose: str) -> str:
    return f'.TH {page} {section} "" "taktd {version()}" "taktd"\n.SH NAME\n{escape(name)} \\- {escape(purpose)}\n'


# ---- taktd.yaml(5) ----


def configuration() -> Iterator[str]:
    from taktd.daemon.config.configuration import settings

    yield heading("TAKTD.YAML", 5, "taktd.yaml", "configuration of taktd")
    yield ".SH SYNOPSIS\n/etc/taktd/taktd.yaml\n.br\n/etc/taktd/conf.d/*.yaml\n.SH DESCRIPTION\n"
    yield escape(
        "Read at start and on SIGHUP, and judged as a whole: an error names file, line, key, what was found and what "
        "is allowed, and nothing of a refused configuration is applied. Files in conf.d are read in the order of their "
        "names and add to the sections devices, models and loops; one thing is described in one file. `taktctl check "
        "FILE` says what the daemon would say.\n"
    )
    yield ".PP\n" + escape(
        "Durations carry a unit (250us, 20ms, 1.5s), sizes too (64MiB). Paths are relative to the file that has them. "
        "NAME stands for a name of your choice: letters, digits, '_', '-' and '.'.\n"
    )
    yield ".SH SETTINGS\n"
    for setting in settings():
        default = f" (default: {setting.default})" if setting.default else ""
        yield f".TP\n.B {escape(setting.key)}\n{escape(setting.description + default)}\n"
    yield ".SH EXAMPLE\n.nf\n" + escape((ROOT / "packaging" / "example.yaml").read_text()) + "\n.fi\n"
    yield ".SH FILES\n.TP\n/usr/share/taktd/models/pendulum.onnx\nThe policy of `taktctl demo`, to try a loop with.\n"
    yield ".SH SEE ALSO\n.BR taktd (8),\n.BR taktctl (1)\n"


# ---- taktctl(1) ----


def command_line() -> Iterator[str]:
    import click

    from taktd.daemon.cli import cli as group

    context = click.Context(group, info_name="taktctl")
    yield heading("TAKTCTL", 1, "taktctl", "see and change what taktd does")
    yield ".SH SYNOPSIS\n.B taktctl\n.I COMMAND\n[\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n"
    yield _paragraphs(group.help)
    yield ".SH COMMANDS\n"
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield from _command(command, name, context)
    yield ".SH EXIT STATUS\n.TP\n0\nFine.\n.TP\n1\nThe answer is no.\n.TP\n2\nUnusable input.\n.TP\n3\n"
    yield "Nothing there to ask: no daemon was found.\n"
    yield ".SH ENVIRONMENT\n.TP\n.B TAKTD_SOCKET\nThe lane socket; control.sock is looked for beside it.\n"
    yield ".TP\n.B TAKTD_RUNTIME_DIR\nThe folder of both, where TAKTD_SOCKET is not set. Default: /run/taktd.\n"
    yield ".SH SEE ALSO\n.BR taktd (8),\n.BR taktd.yaml (5)\n"


def _paragraphs(text: str | None) -> str:
    import click

    paragraphs = re.split(r"\n\s*\n", click.unstyle(text or "").replace("\b", "").replace("\f", ""))
    return "\n.PP\n".join(escape(re.sub(r"\s+", " ", paragraph).strip()) for paragraph in paragraphs) + "\n"


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    import click

    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f".SS {escape(name)} {escape(usage)}\n"
    yield _paragraphs(command.help)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            yield f".TP\n.B {escape(record[0])}\n{escape(record[1])}\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from _command(found, f"{name} {child}", parent)


# ---- takt(3) ----

_SECTION = re.compile(r"/\* ---- (.*?) -+ \*/")
_PROTOTYPE = re.compile(r"TAKT_API\s+([^;]+);[ \t]*(?:/\*(.*?)\*/)?", re.DOTALL)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)


def _prose(comment: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\n\s*\*", "\n", comment)).strip()


def library() -> Iterator[str]:
    text = (ROOT / "ipc" / "core" / "takt.h").read_text()
    yield heading("TAKT", 3, "takt", "client library of taktd, for C and C++")
    yield ".SH LIBRARY\nlibtakt (\\-ltakt; pkg\\-config: takt)\n.SH SYNOPSIS\n.nf\n.B #include <takt.h>\n.fi\n"
    top = next(comment for comment in _COMMENT.findall(text) if " takt.h: " in comment)
    body = "\n".join(re.sub(r"^\s*\* ?", "", line) for line in top.split(" takt.h: ")[1].splitlines()[1:])
    yield ".SH DESCRIPTION\n.nf\n" + escape(body.strip("\n")) + "\n.fi\n"
    parts = _SECTION.split(text)
    for title, part in zip(parts[1::2], parts[2::2], strict=True):
        yield f".SH {escape(title.upper())}\n"
        end = 0
        for found in _PROTOTYPE.finditer(part):
            comments = _COMMENT.findall(part[end : found.start()])
            end = found.end()
            if comments:
                yield f".PP\n{escape(_prose(comments[-1]))}\n"
            prototype = re.sub(r"\s+", " ", found[1]).strip()
            yield f".TP\n.B {escape(prototype)};\n{escape(_prose(found[2] or ''))}\n"
    yield ".SH SEE ALSO\n.BR taktd (8)\n"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "taktd.yaml.5": configuration,
    "taktctl.1": command_line,
    "takt.3": library,
}


def main() -> None:
    page, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / page).write_text("".join(PAGES[page]()), encoding="utf-8")


if __name__ == "__main__":
    main()
