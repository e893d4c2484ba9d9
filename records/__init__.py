"""Records and the programs that prove their scores. records/README.md and a page in each package say more."""
