"""Tests of train_gpt.py, of its twin, and of what measures them."""
