"""What lies on the disk: tracks, records, runs, verdicts."""
