"""The two pictures of the README, from the records that are committed: the ladder, and two curves of loss.

python -m records.pictures            write records/ladder.svg and records/curves.svg
python -m records.pictures --check    exit 1 if the records have changed since
"""

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.command import DataError, Parser, open_streams, run, say
from data.files import read_bytes, sha256, write_whole
from records.archive.metrics import find_runs
from records.archive.tracks import NOTHING, RECORDS, load_track, read_yardsticks
from records.board.tables import Entry, load_entries

TRACK = "track_floppy"
PAR = "Par"  # what every record has to beat
BLUE, ORANGE, GREY = "#3374dd", "#bf6a12", "#737c87"  # contrast of about 4.3 with white and with black
NEAR = 0.03  # bits per byte between two names of the ladder's lines
PLACES = {(4, 5): 0.06, (9, -3.5): 0.0, (4, -12): -0.06}  # of a score's digits, in points and bits per byte
POINTS = 150  # of a curve's means
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bytegolf",
    "font.size": 10,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.25,
}


def ladder_data(entries: list[Entry], rules: list) -> dict:
    """Records in order of date, and compressors that saw nothing before."""
    shown = sorted((entry for entry in entries if entry.kind != "disputed"), key=lambda one: one.record.name)
    rows = [[one.short_name, one.mean, one.half or 0.0, one.kind == "records"] for one in shown]
    return {
        "records": rows,
        "rules": [[row.name, row.bits_per_byte] for row in rules if row.after == NOTHING],
    }


def curves_data(entries: list[Entry]) -> dict:
    """Loss over operations of par and of the best record: [operations, bits per byte] of each seed's means.

    A token is worth as many bytes as in the validation text: nats of other tokenizers could not be compared.
    """
    best = [*(one for one in entries if one.kind == "records"), *entries][0]
    par = [one for one in entries if one.short_name == PAR] or [best]
    chosen = {one.short_name: one for one in (par[0], best)}
    curves = {}
    for name, entry in chosen.items():
        curves[name] = []
        for one in find_runs(entry.record.path):
            parts = np.array_split(np.arange(one.steps), POINTS)
            flops, losses = (one.table[key] for key in ("train_flops", "train_loss"))
            losses = losses * (one.told("val_bpb") / one.told("val_loss"))
            means = [[float(f"{values[part].mean():.4g}") for part in parts] for values in (flops, losses)]
            curves[name].append(means)
    return curves


def labels(rules: list) -> list[tuple[str, float]]:
    """The rules' names and places; those that lie closer than a line of text share one."""
    groups = []
    for name, bpb in sorted(rules, key=lambda rule: -rule[1]):
        if groups and groups[-1][0][1] - bpb < NEAR:
            groups[-1].append((name, bpb))
        else:
            groups.append([(name, bpb)])
    return [(", ".join(name for name, _ in group), np.mean([bpb for _, bpb in group])) for group in groups]


def free_place(mean: float, rules: list[float]) -> tuple[float, float]:
    """The first of PLACES where no rule runs through a score's digits, or the one furthest from them."""
    room = lambda place: min(NEAR, *(abs(mean + PLACES[place] - bpb) for bpb in rules), NEAR)
    return max(PLACES, key=room)


def draw_ladder(axes, data: dict) -> None:
    places = np.arange(len(data["records"]))
    names, means, halves, counted = map(np.array, zip(*data["records"]))
    low = min([*means, *(bpb for _, bpb in data["rules"])]) - 0.06
    high = max([*means, *(bpb for _, bpb in data["rules"])]) + 0.06
    for _, bpb in data["rules"]:
        axes.axhline(bpb, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for text, bpb in labels(data["rules"]):
        axes.annotate(
            text, (1.01, bpb), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=GREY
        )
    bars = {"fmt": "o", "color": BLUE, "markersize": 7, "capsize": 4, "linewidth": 1.4, "zorder": 3}
    for filled in (True, False):
        its = counted == filled
        face = BLUE if filled else "none"
        axes.errorbar(places[its], means[its], halves[its], markerfacecolor=face, **bars)
    for place, mean in zip(places, means):
        offset = free_place(mean, [bpb for _, bpb in data["rules"]])
        axes.annotate(
            f"{mean:.4f}", (place, mean), offset, textcoords="offset points", color=BLUE, fontsize=8.5
        )
    axes.set_xticks(places, names, rotation=25, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_ylim(low, high)
    axes.set_ylabel("bits per byte")


def draw_curves(axes, data: dict) -> None:
    for (name, seeds), colour in zip(data.items(), (ORANGE, BLUE)):
        for at, (flops, losses) in enumerate(seeds):
            axes.plot(flops, losses, color=colour, linewidth=1.3, alpha=0.8, label=None if at else name)
    axes.grid(axis="y")
    axes.set_xlabel("operations of training")
    axes.set_ylabel("train loss, bits per byte")
    axes.legend(frameon=False)


def svg(draw: Callable, data: dict, title: str) -> bytes:
    """The picture, with the digest of its data as its identifier."""
    import matplotlib  # a second that --check need not pay

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.4), layout="constrained")
        draw(axes, data)
        blob = io.BytesIO()
        meta = {"Date": None, "Title": title, "Identifier": digest(data)}
        figure.savefig(blob, format="svg", transparent=True, metadata=meta)
        pyplot.close(figure)
    return blob.getvalue()


def digest(data: dict) -> str:
    return sha256(json.dumps(data, sort_keys=True).encode())


def work(args: argparse.Namespace) -> int:
    track = load_track(args.records / TRACK)
    entries = load_entries(track)
    if not entries:
        raise DataError(f"{track.folder}: holds no record to draw")
    ladder = ladder_data(entries, read_yardsticks(track))
    pictures = {
        "ladder.svg": (draw_ladder, ladder, "Bits per byte of the floppy track's records and of compressors"),
        "curves.svg": (draw_curves, curves_data(entries), "Train loss of par and of the best record"),
    }
    code = 0
    for name, (draw, data, title) in pictures.items():
        path = args.records / name
        if path.exists() and digest(data).encode() in read_bytes(path):
            continue
        if args.check:
            print(f"{path}: is not up to date: python -m records.pictures")
            code = 1
        else:
            write_whole(path, svg(draw, data, title))
            say(f"{path}: written")
    return code


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m records.pictures", description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the tracks")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 if something would change"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), "draw again")


if __name__ == "__main__":
    sys.exit(main())
