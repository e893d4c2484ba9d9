"""Send what a run writes to a tracker. `python -m records follow` is the command."""
