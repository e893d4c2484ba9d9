"""The tables and the site. `python -m records.board` is the command."""
