"""The score: the text, the coder, and the proof. commands.py has the commands that run a model."""
