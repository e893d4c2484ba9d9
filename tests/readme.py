"""The settings table of README.md, generated from the trainer's: `python tests/readme.py` writes it anew."""
import dataclasses
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt  # noqa: E402

README = ROOT / "README.md"
MARKS = "<!-- settings -->\n", "<!-- /settings -->"


def settings_table() -> str:
    """A row for each setting: its value in every preset, then what it does."""
    presets = {name: train_gpt.load_settings({"PRESET": name}, name)[0] for name in train_gpt.PRESETS}
    lines = ["| variable | " + " | ".join(f"`{name}`" for name in presets) + " | what it does |",
             "|---|" + "---|" * len(presets) + "---|"]
    for row in dataclasses.fields(train_gpt.Settings):
        values = [train_gpt.show(getattr(s, row.name)) for s in presets.values()]
        words = row.metadata["doc"].replace("|", "\\|").replace("*", "\\*")
        if row.metadata["pick"]:
            words += "; takes " + ", ".join(f"`{value}`" for value in row.metadata["pick"])
        lines.append(f"| `{row.name.upper()}` | " + " | ".join(values) + f" | {words} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The README's text with the table of today between its marks."""
    start, end = MARKS
    found = re.fullmatch(rf"(.*{start})(.*)({end}.*)", text, re.DOTALL)
    if not found:
        raise SystemExit(f"README.md: no {start.strip()} … {end}")
    return found[1] + settings_table() + found[3]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
