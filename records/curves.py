"""A picture of how the records of a track learned: SVG, from the metrics in their folders.

python -m records.curves records/track_10min_floppy     writes curves.svg there
"""

import argparse
import io
import json
import sys
from pathlib import Path

from data.command import DataError, Parser, open_streams, run
from records.files import read_bytes, write_whole
from records.folders import record_folders

SPAN = 10.0  # seconds over which losses are averaged: single batches are noisy
FIRST = 20.0  # seconds that are not shown: the loss falls so fast then that the rest would look flat
COLOURS = ("#d1495b", "#1f8aa8", "#8a63d2", "#c98a1b")
INK = "#7d8590"  # a grey that can be read on white and on black


def curve(metrics: Path) -> tuple[list[float], list[float], float]:
    """Seconds and training loss of a run, averaged over SPAN, and the final val_loss; nats per token."""
    try:
        events = [json.loads(line) for line in read_bytes(metrics).splitlines()]
        steps = [event for event in events if event["event"] == "step"]
        final = [event for event in events if event["event"] == "final"][-1]
        spans = {}
        for step in steps:
            spans.setdefault(step["train_seconds"] // SPAN, []).append(float(step["train_loss"]))
        spans.popitem()  # the last was cut short
        shown = {span: losses for span, losses in spans.items() if span * SPAN >= FIRST}
        seconds = [(span + 0.5) * SPAN for span in shown]
        return seconds, [sum(losses) / len(losses) for losses in shown.values()], float(final["val_loss"])
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{metrics}: no metrics of a run that has ended: {error!r}") from None


def picture(track: Path) -> bytes:
    """A thin line for each seed, a colour for each record: SVG, equal bytes for equal records."""
    import matplotlib  # a second that the command's errors need not wait for

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": track.name, "svg.fonttype": "none", "font.size": 10})
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    matplotlib.rcParams.update(dict.fromkeys(inks, INK))
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    folders = [folder for folder in record_folders(track.parent) if folder.parent == track]
    for at, folder in enumerate(folders):
        colour = COLOURS[at % len(COLOURS)]
        label = folder.name.partition("_")[2]
        for metrics in sorted(folder.glob("metrics_seed*.jsonl")):
            seconds, losses, score = curve(metrics)
            axes.plot(seconds, losses, color=colour, linewidth=1.2, label=label)
            axes.plot(seconds[-1] + SPAN, score, "o", color=colour, markersize=5)
            label = None  # one entry of the legend for all seeds
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("nats per token")
    axes.set_title("training loss of every seed; dots: validation loss of the artifact", fontsize=10)
    axes.grid(alpha=0.2, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    out = io.BytesIO()
    about = {"Date": None, "Creator": "records/curves.py"}
    figure.savefig(out, format="svg", transparent=True, metadata=about)
    pyplot.close(figure)
    return out.getvalue()


def work(args: argparse.Namespace) -> int:
    track = args.track.absolute()
    if not (track / "track.json").exists():
        raise DataError(f"{args.track}: holds no track.json, expected the folder of a track")
    write_whole(track / "curves.svg", picture(track))
    print(f"{args.track / 'curves.svg'}: written")
    return 0


def main(argv: list[str] | None = None) -> int:
    open_streams()
    parser = Parser(prog="python -m records.curves", description=__doc__.splitlines()[0])
    parser.add_argument("track", type=Path, help="folder of a track")
    args = parser.parse_args(argv)
    return run(lambda: work(args), "run the command again")


if __name__ == "__main__":
    sys.exit(main())
