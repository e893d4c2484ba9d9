"""The tables of README.md, from the settings and RELIABILITY.md: `python tests/readme.py` writes them."""
import dataclasses
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt  # noqa: E402

README = ROOT / "README.md"
RELIABILITY = ROOT / "tests" / "RELIABILITY.md"


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


def reliability_table() -> str:
    """The tables that campaigns of tests/chaos.py wrote, as one: tries summed, medians of the first."""
    rows: dict[str, list] = {}
    for line in re.findall(r"^\| (.*) \|$", RELIABILITY.read_text(encoding="utf-8"), re.MULTILINE):
        promise, tried, survived, median = line.split(" | ")
        if survived.isdigit():      # no head of a table, nothing that was skipped
            row = rows.setdefault(promise, [0, 0, median])
            row[0] += int(tried.split()[0])
            row[1] += int(survived)
    lines = [f"| {promise} | " + " | ".join(map(str, row)) + " |" for promise, row in rows.items()]
    return "\n".join(["| promise | tried | survived | median |", "|---|---:|---:|---|", *lines]) + "\n"


def with_tables(text: str) -> str:
    """The README's text with the tables of today between their marks."""
    for name, table in (("settings", settings_table()), ("reliability", reliability_table())):
        found = re.fullmatch(rf"(.*<!-- {name} -->\n)(.*)(<!-- /{name} -->.*)", text, re.DOTALL)
        if not found:
            raise SystemExit(f"README.md: no <!-- {name} --> … <!-- /{name} -->")
        text = found[1] + table + found[3]
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
