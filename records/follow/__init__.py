"""Runs shown in TensorBoard. `python -m records follow` is the command."""
