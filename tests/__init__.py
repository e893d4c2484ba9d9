"""Tests: they import everything, and prove that scripts, data tools and referee agree."""
