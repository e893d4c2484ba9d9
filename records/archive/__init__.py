"""The files of tracks, records, runs and verdicts, read and checked. Nothing of a record runs here."""
