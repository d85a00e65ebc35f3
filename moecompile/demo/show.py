"""What the demo puts on the screen and into files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

from .layer_text import LEGEND


def progress_bar(console: Console) -> Progress:
    """A bar with room for the latest step's figures."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=console,
    )


def step_line(number: int, loss: float, reference: float | None, tokens_per_s: float, utilisation: float) -> str:
    """One step in one line; ``tokens_per_s`` is per rank, ``utilisation`` a fraction of the measured peak."""
    against = f"  one process {reference:.9f}  difference {abs(loss - reference):.1e}" if reference is not None else ""
    return f"step {number:>3}  loss {loss:.9f}{against}  {tokens_per_s:>5,.0f} tokens/s a rank  MFU {100 * utilisation:.0f}%"


def advance(progress: Progress, task: TaskID, figures: str) -> None:
    progress.update(task, advance=1, figures=figures)


def load_table(load: dict[str, list[int]]) -> Table:
    """How many tokens each expert of each layer got in the last step."""
    table = Table(title="tokens per expert, last step", title_justify="left")
    table.add_column("layer")
    for name in ("least", "most", "most / mean"):
        table.add_column(name, justify="right")
    table.add_column("experts 0, 1, 2, ...")
    for name, counts in load.items():
        mean = sum(counts) / len(counts)
        table.add_row(
            name, str(min(counts)), str(max(counts)), f"{max(counts) / mean:.2f}", " ".join(f"{n:>4}" for n in counts)
        )
    return table


def rewritten_layer(console: Console, text: str) -> None:
    """The first MoE layer's forward."""
    console.print(
        f"\nThe first MoE layer as the passes leave it; its backward is derived from this. {LEGEND}\n", highlight=False
    )
    console.print(Syntax(text, "python", background_color="default", word_wrap=True))


def save_plot(path: Path, losses: Sequence[float], reference: Sequence[float], title: str) -> None:
    """Both curves in one picture, their difference below."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = 2 if reference else 1
    figure = Figure(figsize=(7, 5))  # without pyplot no display is looked for
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=[3, 1][:rows])
    top = axes[0][0]
    if reference:
        top.plot(reference, color="0.6", linewidth=5, label="one process")
        gaps = [max(abs(ours - theirs), 1e-17) for ours, theirs in zip(losses, reference, strict=True)]
        axes[1][0].semilogy(gaps, color="C3", linewidth=1)
        axes[1][0].set_ylabel("|difference|")
    top.plot(losses, color="C0", linewidth=1.5, label="parallel")
    top.set_ylabel("loss")
    top.set_title(title, fontsize=10)
    top.legend()
    axes[-1][0].set_xlabel("step")
    figure.savefig(path, dpi=120, bbox_inches="tight")
