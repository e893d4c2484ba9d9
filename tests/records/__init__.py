"""Tests of records/."""
