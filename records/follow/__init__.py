"""A run sent on to a tracker. `python -m records.follow` is the command."""
