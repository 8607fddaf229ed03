"""Drawing the cart for a terminal: a small canvas of braille dots (2 × 4 in each character)."""

from __future__ import annotations

import math
from typing import Any, Final

from taktd.daemon.demo.plant import RAIL_M, ROD_M

COLUMNS: Final = 72
ROWS: Final = 13
_DOT: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


class Canvas:
    """Dots that are on or off; (0, 0) is the upper left one."""

    def __init__(self, columns: int = COLUMNS, rows: int = ROWS) -> None:
        self.width, self.height = columns * 2, rows * 4
        self._cells = [[0] * columns for _ in range(rows)]

    def dot(self, x: float, y: float) -> None:
        column, row = round(x), round(y)
        if 0 <= column < self.width and 0 <= row < self.height:
            self._cells[row // 4][column // 2] |= _DOT[row % 4][column % 2]

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        steps = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0)) * 1.5))
        for i in range(steps + 1):
            self.dot(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps)

    def disc(self, x: float, y: float, radius: float) -> None:
        for dy in range(-math.ceil(radius), math.ceil(radius) + 1):
            for dx in range(-math.ceil(radius), math.ceil(radius) + 1):
                if dx * dx + dy * dy <= radius * radius:
                    self.dot(x + dx, y + dy)

    def text(self, braille: bool = True) -> str:
        """One character per cell: its dots, or (for a terminal without braille) a star where any dot is on."""
        lines = ("".join(chr(0x2800 + cell) if braille else " *"[cell > 0] for cell in row) for row in self._cells)
        return "\n".join(lines)


def draw(frame: dict[str, Any], braille: bool = True) -> str:
    """The machine as text: rail, cart, rod and bob. Needs `position_m` and `lean_rad`."""
    canvas = Canvas()
    scale = canvas.height * 0.42 / ROD_M  # dots per metre, the same in both directions
    middle, rail = canvas.width / 2, canvas.height / 2
    half_width = min(RAIL_M * scale, middle - 1)
    squeeze = half_width / (RAIL_M * scale)  # a narrow terminal shortens the rail, not the rod
    x = middle + frame["position_m"] * scale * squeeze
    canvas.line(middle - half_width, rail + 3, middle + half_width, rail + 3)
    for dy in range(-2, 3):
        canvas.line(x - 7, rail + dy, x + 7, rail + dy)
    tip_x = x + math.sin(frame["lean_rad"]) * ROD_M * scale
    tip_y = rail - math.cos(frame["lean_rad"]) * ROD_M * scale
    canvas.line(x, rail, tip_x, tip_y)
    canvas.disc(tip_x, tip_y, 2.2)
    return canvas.text(braille)


def sparkline(values: list[float], width: int = 48) -> str:
    """The last values as bars between zero and the largest of them."""
    shown = values[-width:]
    top = max(shown, default=0.0) or 1.0
    return "".join(_BLOCKS[min(7, int(8 * value / top))] for value in shown)
