"""Check a record: papers, source, score, training. Its commands are freeze, verify and judge."""
