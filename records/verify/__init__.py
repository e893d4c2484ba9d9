"""Check a record: papers, source, score, training. `python -m records verify` is the command."""
