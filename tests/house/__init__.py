"""Tests of the house itself: sources, papers and workflows."""
