"""What differs between runs, and what of it is noise. `python -m records.compare` is the command."""
