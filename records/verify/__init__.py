"""Is a record what it says? Papers, source, training repeated. `python -m records.verify` is the command."""
