"""The tables of README.md, from the script's settings and tests/RELIABILITY.md.

python -m tests.kit.readme          writes them
"""

import sys

import train_gpt
from tests.kit import helpers

README = helpers.ROOT / "README.md"
RELIABILITY = helpers.ROOT / "tests" / "RELIABILITY.md"


def table_row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def settings_table() -> str:
    """A row for each setting: its value in every preset, then what it does."""
    presets = {name: train_gpt.load_settings({"PRESET": name}, name)[0] for name in train_gpt.PRESETS}
    table = table_row("variable", *(f"`{name}`" for name in presets), "what it does")
    table += "|---" * (len(presets) + 2) + "|\n"
    for name, row in train_gpt.ROWS.items():
        values = [train_gpt.format_value(getattr(s, name)) for s in presets.values()]
        words = row.metadata["doc"].replace("|", "\\|").replace("*", "\\*")
        if "choices" in row.metadata:
            words += "; takes " + ", ".join(f"`{value}`" for value in row.metadata["choices"])
        table += table_row(f"`{name.upper()}`", *values, words)
    return table


def reliability_table() -> str:
    """The table of the campaign of tests/chaos.py."""
    lines = RELIABILITY.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("|"))


def with_tables(text: str) -> str:
    """The README's text with the tables of today between their marks."""
    for name, table in {"settings": settings_table(), "reliability": reliability_table()}.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            sys.exit(f"README.md: expected one {begin.strip()} … {end}")
        before, _, rest = text.partition(begin)
        text = before + begin + table + end + rest.partition(end)[2]
    return text


def write() -> None:
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
