"""Ideas compared by many runs. `python -m records.campaign` is the command."""
