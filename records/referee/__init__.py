"""The score: the text, the coder, and the proof. `python -m records` is the command."""
