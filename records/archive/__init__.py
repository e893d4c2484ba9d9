"""What lies on the disk: tracks, records, verdicts and numbers."""
