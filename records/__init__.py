"""Records and what proves their scores: freeze, verify, referee, board. records/README.md explains them."""
