"""Ideas compared by many runs. `python -m records sweep` is the command."""
