"""How every plot of a measurement looks. Needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

FORMATS = (".svg", ".png")
COLOURS = ("#1f5fa8", "#e07b28", "#3d9970", "#9b59b6", "#8c6d31", "#c94f7c", "#4bb3c9", "#7f7f7f")
"""Octavo's first; told apart in grey, too."""
GREY = "#667085"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7ec",
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "octavo",
    "savefig.dpi": 150,
    "figure.facecolor": "white",
}


def check_plot(path: Path, flag: str = "plot", formats: Sequence[str] = FORMATS) -> None:
    """Raise ``ConfigError`` if no plot can be drawn to ``path``, so that nobody measures for nothing.

    ``formats``: endings that the flag takes.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"{flag}: {path.name!r} must end with {' or '.join(formats)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(f"{flag}: needs matplotlib; `pip install 'octavo[plots]'` installs it") from None


@contextmanager
def drawing(path: Path, title: str, note: str, width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches to draw on, which is written to ``path`` at the end. Equal figures are equal files."""
    check_plot(path)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(textwrap.fill(title, int(11 * width)), x=0.01, ha="left", fontweight="bold")
        figure.supxlabel(textwrap.fill(note, int(17 * width)), x=0.01, ha="left", fontsize=7, color=GREY)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def legend(axes: Any, count: int) -> None:
    """A legend for several lines, where it hides least."""
    if count > 1:
        axes.legend(fontsize=7 if count > 3 else 8)
